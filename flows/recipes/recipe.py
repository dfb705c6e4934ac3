"""Recipes: named sets of all parameters. deltas.py has how each differs from the paper's final recipe."""

import functools
import json
from collections import Counter
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from flows.recipes.deltas import DELTAS
from flows.recipes.rules import LIMITS, reads_files
from flows.summary import check_name, did_you_mean
from model.errors import InputError
from tasks import adopt
from tasks.decontaminate import Decontaminate
from tasks.deduplicate import Deduplicate
from tasks.download import Download
from tasks.filter import BY_SCRIPT, Filter
from tasks.finetune import Finetune
from tasks.glue.own import TAGS, Definition, definitions_in
from tasks.measure import Measure
from tasks.pretrain import Pretrain
from tasks.report import Report
from tasks.text.tokenizer import load_tokenizer, normaliser_of
from tasks.text.words import ASCII
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

LONGEST_DEFAULT = 40  # characters of a default in a description
KINDS = {"string": "text", "boolean": "true or false"}  # other types keep their names in JSON Schema


class Recipe(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The params of every stage, in the order in which they run. The defaults are the paper's final recipe."""

    download: Download = Download()
    deduplicate: Deduplicate = Deduplicate()
    decontaminate: Decontaminate = Decontaminate()
    measure: Measure = Measure()
    filter: Filter = Filter()
    vocabulary: Vocabulary = Vocabulary()
    tokenize: Tokenize = Tokenize()
    pretrain: Pretrain = Pretrain()
    finetune: Finetune = Finetune()
    report: Report = Report()

    def check_lengths(self, until: str) -> None:
        """Raise InputError if the model or finetuning needs sequences of another length."""
        last = STAGES.index(until)
        if last >= STAGES.index("pretrain") and self.pretrain.start:
            adopt.check_start(self.pretrain.start, self.pretrain.architecture, self.tokenize.length)
        if last >= STAGES.index("pretrain"):
            self.pretrain.architecture.check_length(self.tokenize.length)
        if last >= STAGES.index("finetune"):
            self.finetune.check_length(self.tokenize.length)


STAGES = tuple(Recipe.model_fields)
StageName = Literal[*STAGES]
RecipeName = Literal[*DELTAS]  # for Prefect, which refuses other names at submission


def level(field: FieldInfo) -> type[BaseModel] | None:
    """The nested params class of a field; None for a field that holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def merge(base: dict, delta: dict, model: type[BaseModel] = Recipe) -> dict:
    """Override the fields of `base` by those of `delta`, level by level. A mixture of sources is one value."""
    merged = dict(base)
    for name, value in delta.items():
        inner = level(model.model_fields[name]) if name in model.model_fields else None
        nested = inner and isinstance(value, dict)
        merged[name] = merge(base.get(name, {}), value, inner) if nested else value
    return merged


def takes(schema: dict) -> str:
    """The values that a field takes, in words, from its JSON schema: a type with its range, or choices."""
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return ", or ".join(map(takes, several))
    if "$ref" in schema:  # the only models in lists
        return "definition"
    if "items" in schema:
        each = takes(schema["items"])
        return f"list, each {each}" if "enum" in schema["items"] else f"list of {each}"
    if isinstance(values := schema.get("additionalProperties"), dict):
        return f"object with values: {takes(values)}"
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return "true or false" if choices == [True, False] else f"one of {', '.join(map(str, choices))}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = ", ".join(f"{word} {schema[name]:,}" for name, word in words.items() if name in schema)
    if "minimum" in schema and "maximum" in schema:
        limits = f"{schema['minimum']:,} to {schema['maximum']:,}"
    kind = schema.get("type", "any value")
    return f"{KINDS.get(kind, kind)} {limits}".strip()


def in_words(value: Any) -> str:
    """The value of a field as text: strings unquoted, integers with separators, all else as JSON."""
    return f"{value:,}" if type(value) is int else value if isinstance(value, str) else json.dumps(value)


def _for_the_form(default: Any, schema: dict) -> None:
    """Change a field's JSON schema so that Prefect's form sends the field only if the user sets it.

    For a boolean the form has a switch and sends false; for choices it has a list, which may stay empty. The form shows
    no ranges and no defaults, so the description names the range and the value in the paper's recipe.
    """
    if schema.get("type") == "boolean":
        del schema["type"]
        schema["enum"] = [True, False]
    for inner in (schema, schema.get("items", {})):
        if "oneOf" in inner:  # unknown to the form
            inner["anyOf"] = inner.pop("oneOf")
    value = in_words(default)
    usual = f"in crammed-bert: {value}" if 0 < len(value) <= LONGEST_DEFAULT else ""
    facts = "; ".join(filter(None, (takes(schema), usual)))
    schema["description"] = f"{schema.get('description', '')} {facts[0].upper()}{facts[1:]}.".strip()


def _partial(model: type[BaseModel], base: dict) -> type:
    """A typed dict of a model's fields, all optional, with their defaults in `base` described."""
    fields = {}
    for name, info in model.model_fields.items():
        nested = level(info)
        kind = _partial(nested, base[name]) if nested else info.annotation
        shown = None if nested else functools.partial(_for_the_form, base[name])
        about = info.description or ((nested.__doc__ or "").split("\n")[0] if nested else None)
        fields[name] = Annotated[kind, Field(title=name, description=about, json_schema_extra=shown), *info.metadata]
    partial = TypedDict(f"{model.__name__}Override", fields, total=False)
    partial.__pydantic_config__ = ConfigDict(extra="forbid")
    return partial


# The changes to a recipe. Prefect refuses unknown fields and bad values at submission.
Override = _partial(Recipe, Recipe().model_dump(mode="json"))
CHANGES = TypeAdapter(Override)
Use = TypedDict("Use", dict.fromkeys(STAGES, str), total=False)
Use.__pydantic_config__ = ConfigDict(extra="forbid")


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if an object has a name twice, since one of the two would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise ValueError(f"{twice[0]!r} is given twice in the same object; merge the two or rename one")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def without_empty(override: dict) -> dict:
    """Drop the empty levels of an override, which Prefect's form sends for cleared fields."""
    levels = {name: without_empty(value) if isinstance(value, dict) else value for name, value in override.items()}
    return {name: value for name, value in levels.items() if value != {}}


def check_changes(changes: dict) -> None:
    """Raise InputError for unknown fields and for values that a field never takes."""
    try:
        CHANGES.validate_python(changes)
    except ValidationError as error:
        raise InputError(" ".join(sentence(problem) for problem in error.errors())) from error


def resolve(name: str, override: dict) -> Recipe:
    """The recipe of that name, with overrides. Raises InputError for unknown names and invalid fields."""
    check_name("recipe", name, DELTAS)
    return recipe_of(DELTAS[name], override)


def unused_fields(name: str, override: dict, reached: set[str]) -> list[str]:
    """The overridden fields, as STAGE.FIELD, of stages that a run doesn't reach and without which it does the same.

    A stage that it reaches may read fields of a later one.
    """
    recipe = resolve(name, override)
    unused = []
    for stage in sorted(override.keys() - reached):
        for field in sorted(override[stage]):
            others = {other: value for other, value in override[stage].items() if other != field}
            with suppress(InputError):  # the other overrides need this one
                without = resolve(name, override | {stage: others})
                if without == recipe:  # it repeats the recipe's value
                    continue
                if all(getattr(without, each) == getattr(recipe, each) for each in reached):
                    unused.append(f"{stage}.{field}")
    return unused


def recipe_of(delta: dict, override: dict) -> Recipe:
    """The paper's recipe with a delta and then an override. Raises InputError for invalid fields."""
    if isinstance(download := override.get("download"), dict) and reads_files(download):
        override = override | {"download": dict.fromkeys(LIMITS, 0) | download}  # the recipe's belong to its source
    changes = merge(delta, override)
    try:
        recipe = Recipe.model_validate(merge(Recipe().model_dump(), changes))
    except ValidationError as error:
        raise InputError(" ".join(sentence(problem) for problem in error.errors())) from error
    recipe = from_start(recipe, override.get("vocabulary", {}))
    # the corpus must not have the data that scores the model
    clean, own = recipe.decontaminate, definitions_in(recipe.finetune.tasks)
    of_names = recipe.finetune.data if len(own) < len(recipe.finetune.tasks) else ""
    searched = {"data": clean.data or of_names, "tasks": list(dict.fromkeys([*clean.tasks, *own]))}
    # what measures a document reads what the vocabulary will read
    normaliser = recipe.vocabulary.normaliser() if recipe.measure.normaliser == ASCII else recipe.measure.normaliser
    added = {"decontaminate": searched, "measure": {"normaliser": normaliser}}
    if recipe.vocabulary.characters == "unicode" and "max_tokens_per_char" not in changes.get("filter", {}):
        added["filter"] = {"max_tokens_per_char": BY_SCRIPT}
    return recipe.model_copy(update={name: getattr(recipe, name).model_copy(update=new) for name, new in added.items()})


def from_start(recipe: Recipe, asked: dict) -> Recipe:
    """The recipe with the vocabulary of the model that it begins from. `asked`: the user's changes to that."""
    if not (name := recipe.pretrain.start or recipe.vocabulary.start):
        return recipe
    model = adopt.find_model(name, masked=bool(recipe.pretrain.start))
    tokenizer = load_tokenizer(model.path)
    theirs = {"entries": tokenizer.get_vocab_size()} | normaliser_of(tokenizer).model_dump(exclude={"alphabet"})
    wrong = [f"{key} is {asked[key]!r}, its {of!r}" for key, of in theirs.items() if asked.get(key, of) != of]
    if wrong:
        raise InputError(f"vocabulary: that of {name} is taken as it is, but {'; '.join(wrong)}. Omit these.")
    words = recipe.vocabulary.model_copy(update=theirs | {"start": model.name})
    bert = recipe.pretrain.model_copy(update={"start": model.name} if recipe.pretrain.start else {})
    return recipe.model_copy(update={"vocabulary": words, "pretrain": bert})


def sentence(problem: dict) -> str:
    """A pydantic error as a sentence: the field, what is wrong, the value."""
    *path, last = [step for step in problem["loc"] if step not in TAGS] or ["recipe"]
    field = ".".join(map(str, (*path, last)))
    if problem["type"] == "extra_forbidden":
        model: type[BaseModel] = Recipe
        for step in path:  # the only models in lists are definitions
            model = model if isinstance(step, int) else level(model.model_fields[step]) or Definition
        meant = did_you_mean(last, model.model_fields)
        owner, fields = field.rpartition(".")[0] or "A recipe", ", ".join(model.model_fields)
        return f"There is no field {field}. {meant}{owner} has {fields}."
    message = problem["msg"].removeprefix("Value error, ")
    value = f" (found {problem['input']!r})" if problem["type"] != "value_error" else ""
    if TAGS[0] in problem["loc"]:
        value += f'. A task of your own needs a definition, as {{"name": "{problem["input"]}", "data": "FILE"}}'
    return f"{field}: {message}{value}."


RECIPES: dict[str, Recipe] = {name: resolve(name, {}) for name in DELTAS}
