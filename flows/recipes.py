"""Every recipe: a named set of all parameters, each a delta from the paper's final recipe, `crammed-bert`."""

import difflib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from model import InputError
from tasks.corpus import Download
from tasks.decontaminate import Decontaminate
from tasks.dedup import Deduplicate
from tasks.filter import Filter
from tasks.glue import Finetune
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


STAGES = tuple(Recipe.model_fields)
StageName = Literal[
    "download", "deduplicate", "decontaminate", "filter", "vocabulary", "tokenize", "pretrain", "finetune", "report"
]
RecipeName = Literal["crammed-bert", "pocket", "demo"]

DELTAS: dict[str, dict] = {
    "crammed-bert": {},
    # the same recipe for two CPU cores and twenty minutes: width, depth, batch and data scaled, the peak rate for the short
    # run; unsorted, since such a run is far less than an epoch and would see the junk at the head of the sort only
    "pocket": {
        "tokenize": {"heldout_fraction": 0.005, "max_sequences": 250_000, "sort": "random"},
        "pretrain": {
            "architecture": {"layers": 4, "hidden": 256, "heads": 4, "intermediate": 1024},
            "budget": 1 / 3,
            "batch_size": 64,
            "learning_rate": 4e-3,
        },
        "finetune": {"seeds": 1},
        "report": {"title": "pocket"},
    },
    # offline, in a few minutes: the documentation of installed packages, and probes in place of GLUE
    "demo": {
        "download": {"source": "python-docs", "documents": 0, "megabytes": 12, "part_megabytes": 4},
        "filter": {"vocabulary_entries": 4096, "sample_megabytes": 5},
        "vocabulary": {"entries": 4096},
        "tokenize": {"heldout_fraction": 0.08, "sort": "random"},
        "pretrain": {
            "architecture": {"layers": 1, "hidden": 192, "heads": 6, "intermediate": 768},
            "budget": 1 / 60,
            "batch_size": 16,
            "learning_rate": 4e-3,
        },
        "finetune": {
            "data": "probes",
            "tasks": ["word-order", "odd-word", "neighbours"],
            "seeds": 1,
            "epochs": 3,
            "learning_rate": 2e-4,
            "baseline": True,
        },
        "report": {"title": "demo"},
    },
}


def _partial(model: type[BaseModel]) -> type:
    """A typed dict of the model's fields, each of which may be left out, nested ones too."""
    fields = {}
    for name, info in model.model_fields.items():
        nested = isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
        kind = _partial(info.annotation) if nested else info.annotation
        about = Field(description=info.description or (info.annotation.__doc__ if nested else None))
        fields[name] = Annotated[kind, about, *info.metadata]
    partial = TypedDict(f"{model.__name__}Override", fields, total=False)
    partial.__pydantic_config__ = ConfigDict(extra="forbid")
    return partial


Override = _partial(Recipe)  # what of a recipe to change: Prefect refuses unknown fields and bad values at submission
Use = TypedDict("Use", dict.fromkeys(STAGES, str), total=False)
Use.__pydantic_config__ = ConfigDict(extra="forbid")


def merge(base: dict, delta: dict) -> dict:
    """`base` with the fields of `delta` in place of its own, level by level."""
    merged = dict(base)
    for name, value in delta.items():
        nested = isinstance(value, dict) and isinstance(base.get(name), dict)
        merged[name] = merge(base[name], value) if nested else value
    return merged


def resolve(name: str, override: dict) -> Recipe:
    """The recipe of that name, changed. Raises InputError for what it can't be changed to."""
    if name not in DELTAS:
        raise InputError(f"There is no recipe {name!r}. Recipes: {', '.join(DELTAS)}.")
    if not isinstance(override, dict):
        raise InputError(
            f'override is {override!r}; expected an object like {{"filter": {{"max_tokens_per_char": 0.25}}}}.'
        )
    try:
        found = Recipe.model_validate(merge(merge(Recipe().model_dump(), DELTAS[name]), override))
    except ValidationError as error:
        raise InputError(" ".join(sentence(problem) for problem in error.errors())) from error
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
