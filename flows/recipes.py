"""Recipes: named sets of all parameters. What each differs in from the paper's final recipe is in deltas.py."""

import difflib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from flows.deltas import DELTAS
from model import InputError
from tasks.corpus import Download
from tasks.decontaminate import Decontaminate
from tasks.dedup import Deduplicate
from tasks.filter import Filter
from tasks.finetune import Finetune
from tasks.pretrain import Pretrain
from tasks.report import Report
from tasks.tokens import Tokenize
from tasks.vocabulary import Vocabulary


class Recipe(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The params of every stage, in the order in which they run. The defaults are the paper's final recipe."""

    download: Download = Download()
    deduplicate: Deduplicate = Deduplicate()
    decontaminate: Decontaminate = Decontaminate()
    filter: Filter = Filter()
    vocabulary: Vocabulary = Vocabulary()
    tokenize: Tokenize = Tokenize()
    pretrain: Pretrain = Pretrain()
    finetune: Finetune = Finetune()
    report: Report = Report()

    def check_lengths(self, until: str) -> None:
        """Raise InputError where the model or finetuning is asked for what sequences of that length can't give."""
        last = STAGES.index(until)
        if last >= STAGES.index("pretrain") and self.tokenize.length % (halved := 2**self.pretrain.architecture.funnel):
            raise InputError(
                f"tokenize.length is {self.tokenize.length}, which can't be halved {self.pretrain.architecture.funnel} times "
                f"(pretrain.architecture.funnel). Make it a multiple of {halved}."
            )
        if last >= STAGES.index("finetune") and self.finetune.max_tokens > self.tokenize.length:
            raise InputError(
                f"finetune.max_tokens is {self.finetune.max_tokens}, but the model takes {self.tokenize.length} tokens at most "
                "(tokenize.length). Lower it."
            )


STAGES = tuple(Recipe.model_fields)
StageName = Literal[
    "download", "deduplicate", "decontaminate", "filter", "vocabulary", "tokenize", "pretrain", "finetune", "report"
]
RecipeName = Literal[*DELTAS]  # for Prefect, which refuses other names at submission


def _level(field: FieldInfo) -> type[BaseModel] | None:
    """The model that a field of a recipe holds, which has fields of its own; None for a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def merge(base: dict, delta: dict, model: type[BaseModel] = Recipe) -> dict:
    """What `base` says of a model's fields, with what `delta` says in its place, level by level. A mixture is a value."""
    merged = dict(base)
    for name, value in delta.items():
        inner = _level(model.model_fields[name]) if name in model.model_fields else None
        nested = inner and isinstance(value, dict)
        merged[name] = merge(base.get(name, {}), value, inner) if nested else value
    return merged


def whole(delta: dict) -> Recipe:
    """The recipe that differs from the paper's in `delta`. Raises ValidationError where there can't be one."""
    return Recipe.model_validate(merge(Recipe().model_dump(), delta))


def _partial(model: type[BaseModel]) -> type:
    """A typed dict of the model's fields, each of which may be left out, nested ones too."""
    fields = {}
    for name, info in model.model_fields.items():
        nested = _level(info)
        kind = _partial(nested) if nested else info.annotation
        about = Field(description=info.description or (nested.__doc__ if nested else None))
        fields[name] = Annotated[kind, about, *info.metadata]
    partial = TypedDict(f"{model.__name__}Override", fields, total=False)
    partial.__pydantic_config__ = ConfigDict(extra="forbid")
    return partial


Override = _partial(Recipe)  # what of a recipe to change: Prefect refuses unknown fields and bad values at submission
Use = TypedDict("Use", dict.fromkeys(STAGES, str), total=False)
Use.__pydantic_config__ = ConfigDict(extra="forbid")


def resolve(name: str, override: dict) -> Recipe:
    """The recipe of that name, changed. Raises InputError for what it can't be changed to."""
    if name not in DELTAS:
        raise InputError(f"There is no recipe {name!r}. Recipes: {', '.join(DELTAS)}.")
    if not isinstance(override, dict):
        raise InputError(
            f'override is {override!r}; expected an object like {{"filter": {{"max_tokens_per_char": 0.25}}}}.'
        )
    try:
        found = whole(merge(DELTAS[name], override))
    except ValidationError as error:
        raise InputError(" ".join(sentence(problem) for problem in error.errors())) from error
    if unread := found.finetune.unread(override.get("finetune", {})):
        raise InputError(
            f"finetune.{unread[0]} would change nothing: it is for a protocol that isn't asked for. finetune.protocols is "
            f"{found.finetune.protocols}; add 'modern' for what stands in finetune.modern, 'cramming' for the rest."
        )
    data = found.decontaminate.data or found.finetune.data  # of what the model is scored on, the corpus has to be free
    return found.model_copy(update={"decontaminate": found.decontaminate.model_copy(update={"data": data})})


def sentence(problem: dict) -> str:
    """A pydantic error in words: the field, what was found, what was expected."""
    *path, last = problem["loc"] or ("recipe",)
    field = ".".join(map(str, (*path, last)))
    if problem["type"] == "extra_forbidden":
        model: type[BaseModel] = Recipe
        for step in path:
            model = model.model_fields[step].annotation
        close = difflib.get_close_matches(str(last), model.model_fields, 1)
        meant = f"Did you mean {close[0]}? " if close else ""
        return f"{field} is no field. {meant}{'.'.join(path) or 'A recipe'} has {', '.join(model.model_fields)}."
    message = problem["msg"].removeprefix("Value error, ")
    found = f" (found {problem['input']!r})" if problem["type"] != "value_error" else ""
    return f"{field}: {message}{found}."


RECIPES: dict[str, Recipe] = {name: resolve(name, {}) for name in DELTAS}
