"""Recipes: named sets of all parameters. deltas.py has how each differs from the paper's final recipe."""

import functools
import json
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict

from flows.recipes.deltas import ADAPTS, DELTAS
from flows.recipes.rules import LIMITS, reads_files
from flows.recipes.values import choices_in, describe_values, model_in_list
from flows.summary import check_name, did_you_mean
from model.errors import InputError
from model.layouts import STARTS
from model.settings import Architecture, AskedBudget, with_budget_as_number
from model.wording import budget, parse_budget
from tasks import adopt
from tasks.decontaminate import Decontaminate
from tasks.deduplicate import Deduplicate
from tasks.download import Download
from tasks.filter import BY_SCRIPT, Filter
from tasks.finetune import Finetune
from tasks.glue.own import RESERVED, TAGS, definitions_in
from tasks.glue.pairs import HUB_BLIMP, each_name_once
from tasks.glue.table import HUB_GLUE
from tasks.measure import Measure
from tasks.minimal_pairs import MinimalPairs
from tasks.pretrain import Pretrain
from tasks.report import Report
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import is_trained_here, load_tokenizer, reading_of
from tasks.text.words import ASCII
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

BUDGET = "budget"  # a field of pretraining
UNIT = "budget_unit"  # another one
LONGEST_DEFAULT = 40  # characters of a default in a description
LONGEST_FOUND = 60  # characters of a wrong value in a message
SAID_WELL = (
    "value_error",
    "missing",
    "string_pattern_mismatch",
    "too_short",
    "finite_number",
)  # problems in pydantic's words


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
    minimal_pairs: MinimalPairs = MinimalPairs()
    finetune: Finetune = Finetune()
    report: Report = Report()

    def check_pairs(self, until: str) -> None:
        """Raise InputError if a run ends with minimal pairs and there are none."""
        if until == "minimal_pairs" and not self.minimal_pairs.data:
            raise InputError(
                "minimal_pairs.data names no pairs. Name files or data sets, as in --set 'minimal_pairs.data="
                '["nyu-mll/blimp"]\'.'
            )

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
if TYPE_CHECKING:  # which are made from the recipes below
    StageName = str
    RecipeName = str
    Override = dict[str, Any]
    Use = dict[str, str]
else:
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
        if inner and isinstance(value, dict):
            value = merge(base.get(name, {}), value, inner)
        merged[name] = value
    return with_budget_of(merged, base, delta) if UNIT in model.model_fields else merged


def with_budget_of(merged: dict, base: dict, delta: dict) -> dict:
    """Merged settings of pretraining, in which a budget in words brings its unit, and a number keeps the earlier unit.

    `base`, `delta`: what was merged. A unit that stands beside words or comes after them stays, and is refused later if
    it contradicts them.
    """
    if UNIT in delta or BUDGET not in delta:
        return merged
    if has_unit(delta[BUDGET]):
        return {name: value for name, value in merged.items() if name != UNIT}
    if has_unit(base.get(BUDGET)):
        return merged | {UNIT: with_budget_as_number(base)[UNIT]}
    return merged


def has_unit(given: Any) -> bool:
    """Whether a budget is in words, with its unit."""
    with suppress(ValueError):  # other text is refused later
        return isinstance(given, str) and parse_budget(given)[1] != ""
    return False


def in_words(value: Any) -> str:
    """The value of a field as text: strings unquoted, integers with separators, all else as JSON."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if type(value) is int else json.dumps(value)


def value_in_words(values: dict, name: str) -> str:
    """The value of one of a stage's fields as text; a budget with its unit."""
    return budget(values[BUDGET], values[UNIT]) if name == BUDGET else in_words(values[name])


def _for_the_form(value: str, schema: dict) -> None:
    """Change a field's JSON schema so that Prefect's form sends the field only if the user sets it.

    For a boolean the form has a switch and sends false; for choices it has a list, which may stay empty. The form shows
    no ranges and no defaults, so the description names the range and the `value` in the paper's recipe.
    """
    if schema.get("type") == "boolean":
        del schema["type"]
        schema["enum"] = [True, False]
    for inner in (schema, schema.get("items", {})):
        if "oneOf" in inner:  # unknown to the form
            inner["anyOf"] = inner.pop("oneOf")
    usual = f"in crammed-bert: {value}" if 0 < len(value) <= LONGEST_DEFAULT else ""
    facts = "; ".join(filter(None, (describe_values(schema), usual)))
    schema["description"] = f"{schema.get('description', '')} {facts[0].upper()}{facts[1:]}.".strip()


def _partial(model: type[BaseModel], base: dict) -> type:
    """A typed dict of a model's fields, all optional, with their defaults in `base` described."""
    fields: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        nested = level(info)
        if nested:
            kind: Any = _partial(nested, base[name])
            first_line, *_ = (nested.__doc__ or "").split("\n")
            about = Field(title=name, description=info.description or first_line)
        else:
            kind = AskedBudget if name == BUDGET else info.annotation
            shown = functools.partial(_for_the_form, value_in_words(base, name))
            about = Field(title=name, description=info.description, json_schema_extra=shown)
        constraints = [] if name == BUDGET else info.metadata
        fields[name] = Annotated[kind, about, *constraints]
    return _optional_fields(f"{model.__name__}Override", fields)


def _optional_fields(name: str, fields: dict[str, Any]) -> type:
    """A typed dict with these fields, all optional, and no others."""
    made = TypedDict(name, fields, total=False)  # type: ignore[misc]
    made.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    return made


if not TYPE_CHECKING:
    # The changes to a recipe. Prefect refuses unknown fields and bad values at submission.
    Override = _partial(Recipe, Recipe().model_dump(mode="json"))
    Use = _optional_fields("Use", dict.fromkeys(STAGES, str))
CHANGES: TypeAdapter[Any] = TypeAdapter(Override)


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if an object has a name twice, since one of the two would be lost."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"{name!r} occurs twice in the same object; merge the two or rename one")
            found[name] = value
        return found

    return json.loads(text, object_pairs_hook=unique)


def without_empty(override: dict) -> dict:
    """Drop the empty levels of an override, which Prefect's form sends for cleared fields."""
    found = {}
    for name, value in override.items():
        kept = without_empty(value) if isinstance(value, dict) else value
        if kept != {}:
            found[name] = kept
    return found


def check_changes(changes: dict) -> None:
    """Raise InputError for unknown fields and for values that a field never takes."""
    try:
        CHANGES.validate_python(changes)
    except ValidationError as error:
        raise InputError(sentences_of(error)) from error


def resolve(name: str, override: dict) -> Recipe:
    """The recipe of that name, with overrides. Raises InputError for unknown names and invalid fields."""
    check_name("recipe", name, DELTAS)
    return recipe_of(DELTAS[name], override)


def refuse_without_start(name: str, override: dict) -> None:
    """Raise InputError if a recipe begins from a model and the override names none."""
    if name in ADAPTS and not override.get("pretrain", {}).get("start"):
        raise InputError(
            f"Recipe {name} continues the training of a model, and pretrain.start names none. Name a folder, a model "
            "of the Hugging Face hub such as google-bert/bert-base-uncased, or one that `cram ls pretrain` lists."
        )


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
    changes = changes_of(delta, override)
    return fill_in(begin_from_model(validated(changes), override), changes)


def changes_of(delta: dict, override: dict) -> dict:
    """A delta and then an override, as one. If the text becomes your own files, the delta's limits don't hold."""
    download = override.get("download")
    if isinstance(download, dict) and reads_files(download):
        override = override | {"download": dict.fromkeys(LIMITS, 0) | download}  # the recipe's belong to its source
    return merge(delta, override)


def validated(changes: dict) -> Recipe:
    """The paper's recipe with changes. Raises InputError for invalid fields."""
    try:
        return Recipe.model_validate(merge(Recipe().model_dump(), changes))
    except ValidationError as error:
        raise InputError(sentences_of(error)) from error


def fill_in(recipe: Recipe, changes: dict) -> Recipe:
    """The recipe with the values that follow from other fields, where `changes` to the paper's recipe name none."""
    if recipe.minimal_pairs.data is None:
        recipe = change_stage(recipe, "minimal_pairs", data=usual_pairs(recipe))
    recipe = change_stage(recipe, "decontaminate", **searched_data(recipe))
    if recipe.measure.normaliser == ASCII:  # what measures a document reads what the vocabulary will read
        recipe = change_stage(recipe, "measure", normaliser=recipe.vocabulary.normaliser())
    if recipe.vocabulary.characters == "unicode" and "max_tokens_per_char" not in changes.get("filter", {}):
        recipe = change_stage(recipe, "filter", max_tokens_per_char=BY_SCRIPT)
    return recipe


def change_stage(recipe: Recipe, stage: str, **changes: Any) -> Recipe:
    """The recipe with other values of valid fields of a stage."""
    params = getattr(recipe, stage).model_copy(update=changes)
    return recipe.model_copy(update={stage: params})


def usual_pairs(recipe: Recipe) -> list[str]:
    """The sets of minimal pairs of a recipe that names none: BLiMP, if GLUE comes from the hub too."""
    has_glue = len(definitions_in(recipe.finetune.tasks)) < len(recipe.finetune.tasks)
    if has_glue and recipe.finetune.data == HUB_GLUE.repository:
        return [HUB_BLIMP.repository]
    return []


def searched_data(recipe: Recipe) -> dict[str, Any]:
    """What decontamination searches for: the corpus must not have the data that scores the model.

    Raises InputError for minimal pairs with the name of a task, since its counts have these names.
    """
    asked = recipe.decontaminate
    tasks = recipe.finetune.tasks
    own = definitions_in(tasks)
    data = asked.data
    if not data and len(own) < len(tasks):
        data = recipe.finetune.data
    scored = [run.pairs() for run in recipe.minimal_pairs.runs()]
    names_of_tasks = RESERVED | {task.name for task in own}
    pairs = each_name_once([*asked.pairs, *scored], names_of_tasks)
    return {"data": data, "tasks": list(dict.fromkeys([*asked.tasks, *own])), "pairs": pairs}


def begin_from_model(recipe: Recipe, asked: dict) -> Recipe:
    """The recipe with the vocabulary and the architecture of the model that it begins from. `asked`: the override."""
    name = recipe.pretrain.start or recipe.vocabulary.start
    if not name:
        return recipe
    model = adopt.find_model(name, heads=STARTS if recipe.pretrain.start else None)
    tokenizer = load_tokenizer(model.path)
    theirs = {"entries": tokenizer.get_vocab_size()} | reading_of(tokenizer).model_dump(exclude={"alphabet"})
    refuse_changes(f"The vocabulary of {name}", "vocabulary", asked.get("vocabulary", {}), theirs)
    recipe = change_stage(recipe, "vocabulary", **theirs, start=model.name)
    if not is_trained_here(tokenizer):
        recipe = change_stage(recipe, "measure", start=model.name)
    if recipe.pretrain.start:
        architecture = architecture_of(recipe, model, asked)
        recipe = change_stage(recipe, "pretrain", start=model.name, architecture=architecture)
    return recipe


def architecture_of(recipe: Recipe, model: Artifact, asked: dict) -> Architecture:
    """The architecture of the model that a recipe begins from. `asked`: the override, which may not contradict it."""
    its = adopt.architecture_of(model).model_dump()
    its["zero_outputs"] = recipe.pretrain.architecture.zero_outputs  # only says how weights begin
    wanted = asked.get("pretrain", {}).get("architecture", {})
    refuse_changes(f"The architecture of {recipe.pretrain.start}", "pretrain.architecture", wanted, its)
    return Architecture(**its)


def refuse_changes(what: str, path: str, asked: dict, theirs: dict) -> None:
    """Raise InputError if the fields that are asked for aren't those of the model that a recipe begins from."""
    wrong = [
        f"{path}.{field} is {asked[field]!r}, the model's is {of!r}"
        for field, of in theirs.items()
        if asked.get(field, of) != of
    ]
    if wrong:
        raise InputError(f"{what} is taken unchanged, but {'; '.join(wrong)}. Omit these fields.")


def sentences_of(error: ValidationError) -> str:
    """The problems that pydantic found, each as a sentence: the field, what was found, what is expected."""
    sentences = [sentence_of(problem) for problem in error.errors()]
    return " ".join(dict.fromkeys(sentences))  # a value that fits no type of several has a problem for each


def sentence_of(problem: ErrorDetails) -> str:
    """A problem that pydantic found, as a sentence."""
    path = [step for step in problem["loc"] if step not in TAGS] or ["recipe"]
    if problem["type"] == "extra_forbidden":
        return unknown_field(path)
    place, schema = place_and_schema(path)
    if problem["type"] in SAID_WELL and place == path:
        return f"{dotted(path)}: {problem['msg'].removeprefix('Value error, ')}."
    sentence = f"{dotted(place)} is {shown(problem['input'])}. {advice_on(problem['input'], schema)}"
    if TAGS[0] in problem["loc"]:
        sentence += f' A custom task needs a definition, such as {{"name": "{problem["input"]}", "data": "FILE"}}.'
    return sentence


def advice_on(found: Any, schema: dict) -> str:
    """What a field with this JSON schema takes, after a wrong value was found, in one or two sentences."""
    expected = f"Expected: {describe_values(schema)}"
    if not isinstance(found, str):
        return f"{expected}."
    if schema.get("type") == "array":
        return f"{expected}, such as {json.dumps([found], ensure_ascii=False)}."
    return f"{did_you_mean(found, map(str, choices_in(schema)))}{expected}."


def dotted(path: list[str | int]) -> str:
    """The path of a field, with dots."""
    return ".".join(map(str, path))


def shown(found: Any) -> str:
    """A wrong value as JSON, shortened."""
    return textwrap.shorten(json.dumps(found, ensure_ascii=False, default=repr), LONGEST_FOUND, placeholder="…")


def place_and_schema(path: list[str | int]) -> tuple[list[str | int], dict]:
    """The part of the path of a problem that names a field, or an item of a list in it, and its JSON schema."""
    model: type[BaseModel] = Recipe
    schema: dict = {}
    place: list[str | int] = []
    for step in path:
        if isinstance(step, int) and "items" in schema:
            schema = schema["items"]
            model = model_in_list(schema) or model
        elif isinstance(step, str) and step in model.model_fields:
            inner = level(model.model_fields[step])
            schema = {"type": "object"} if inner else model.model_json_schema()["properties"][step]
            model = inner or model
        else:  # a type among several, or a key of an object
            break
        place.append(step)
    if schema == {"type": "object"}:
        schema = {"type": f"fields, which are {', '.join(model.model_fields)}"}
    return place, schema


def unknown_field(path: list[str | int]) -> str:
    """The sentence about a field that doesn't exist, with the fields that do."""
    *levels, last = path
    model: type[BaseModel] = Recipe
    for name in levels:
        if isinstance(name, str):  # a number is a place in a list
            schema = model.model_json_schema()["properties"][name]
            model = level(model.model_fields[name]) or model_in_list(schema.get("items", {})) or model
    owner = dotted(levels) or "A recipe"
    meant = did_you_mean(last, model.model_fields)
    elsewhere = [field for field in fields_of(Recipe) if field.split(".")[-1] == last]
    if elsewhere:
        meant = f"Did you mean {' or '.join(elsewhere)}? "
    return f"There is no field {dotted(path)}. {meant}{owner} has {', '.join(model.model_fields)}."


def fields_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The dotted names of the fields that hold values, also of those of nested params."""
    for name, field in model.model_fields.items():
        inner = level(field)
        if inner:
            yield from fields_of(inner, f"{path}{name}.")
        else:
            yield path + name


RECIPES: dict[str, Recipe] = {name: resolve(name, {}) for name in DELTAS}
