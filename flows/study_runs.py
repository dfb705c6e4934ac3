"""What a study consists of: its name or file, its size and budget, and the recipe of each of its runs."""

import math
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError, model_validator

from flows.deltas import LIMITS, NAMED, POCKET_EXTRA, POCKET_HEAD, heads, nearest, pocket, reads_files
from flows.recipes import DELTAS, Recipe, check_changes, check_name, did_you_mean, level, merge, parse_json, recipe_of
from flows.studies import STUDIES
from model import InputError
from model.quantities import budget
from model.settings import READ_BY, Training

SCALE = re.compile(r"(?:(pocket|day)(?: +x *([^\s,]+))?)?(?:(?:^|(?<=\w),? +)(\S+) +(hour|token|flop)s?)?")
NUMBER = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?|[^,]+")  # commas between thousands only
MOST = 64  # the largest multiple of a size
SCALES = (
    "a size (pocket, day, or a multiple of its depth and width as 'pocket x 0.5'), a budget ('3e6 tokens', '0.5 "
    "hours', '1e15 flops'), or both: 'pocket 3e6 tokens'"
)
SELECTED = set().union(*READ_BY.values())  # fields of Training that only some optimizers or schedules read
KEPT = {  # fields to which a scale gives a fixed value, unless a run sets them itself
    "tokenize": {"heldout_fraction", "sort"},
    "pretrain": {"budget", "budget_unit"},
    "finetune": {"seeds", "learning_rate"},
}
RELATIVE = "scale"  # the name of `Multiples` among the changes of a run
OTHER = "recipe"  # the name of the recipe that a run is instead of the study's, among its changes


class Multiples(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Multiples of a run's size and budget."""

    layers: float = Field(1.0, gt=0, le=MOST, description="Multiple of the number of blocks.")
    hidden: float = Field(1.0, gt=0, le=MOST, description="Multiple of the width, in whole attention heads.")
    budget: float = Field(1.0, gt=0, le=10_000, description="Multiple of the budget.")


class Study(BaseModel, frozen=True, extra="forbid"):
    """A list of runs. flows/studies.py has those that come with cram."""

    about: str = Field("", description="What it asks.")
    paper: str = Field("", description="What of the paper it reproduces.")
    published: dict[str, str] = Field({}, description="Figures or findings of the paper, by run.")
    recipe: str = Field("crammed-bert", description="The recipe that the runs change.")
    fit: bool = Field(False, description="Whether to fit a scaling law to the runs.")
    runs: dict[str, dict[str, Any]] = Field(
        min_length=1, description="The changes of each run; the first is the one that the others are compared with."
    )

    @model_validator(mode="after")
    def _runs_have_names(self) -> "Study":
        for name in self.runs:
            if not name or name != name.strip() or not name.isprintable():
                raise ValueError(
                    f"the name {name!r} of a run is empty, begins or ends with a space, or has characters that can't "
                    "be printed; give it another"
                )
        if unknown := [name for name in self.published if name not in self.runs]:
            raise ValueError(f"published names {unknown[0]!r}, which is no run")
        return self


class Scale(NamedTuple):
    """Size and budget of the runs.

    size      pocket, day, or empty for a recipe with a size of its own
    multiple  of its depth and of its width
    """

    size: str
    multiple: float
    amount: float | None
    unit: str

    def __str__(self) -> str:
        of_size = self.size if self.multiple == 1 else f"{self.size} x {self.multiple:g}"
        of_budget = budget(self.amount, self.unit) if self.amount else ""
        return ", ".join(filter(None, (of_size, of_budget)))


class StudyRun(NamedTuple):
    """A run: its name, other names for the same run, the number of its seed, its recipe, and the fields it changes."""

    name: str
    also: tuple[str, ...]
    seed: int
    recipe: Recipe
    changes: dict[str, Any]

    @property
    def title(self) -> tuple[str, str]:
        """Name and seed."""
        return self.name, f"seed {self.seed}"


def study_called(name: str) -> Study:
    """The study of that name, or in that JSON or Python file. Raises InputError for anything else."""
    if name in STUDIES:
        return Study(**STUDIES[name])
    if not name.lower().endswith((".json", ".py")):
        raise InputError(
            f"There is no study {name!r}. {did_you_mean(name, STUDIES)}Studies: {', '.join(STUDIES)}; or the path of a "
            ".json or .py file."
        )
    try:
        if name.lower().endswith(".py"):
            content = runpy.run_path(name)
        else:
            content = {"STUDY": parse_json(Path(name).read_text(encoding="utf-8-sig"))}
    except (Exception, SystemExit) as error:
        raise InputError(f"{name} can't be read: {type(error).__name__}: {error}. Expected a study.") from error
    if "STUDY" not in content:
        raise InputError(f"{name} has no STUDY. Assign the study to it: STUDY = {{'runs': {{...}}}}.")
    try:
        return Study.model_validate(content["STUDY"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the study"
        raise InputError(
            f"{name}: {where}: {first['msg']}. A study has {', '.join(Study.model_fields)}; runs holds the changes of "
            "each run by its name."
        ) from error


def scale_of(text: str, recipe: str) -> Scale:
    """The scale that a text names, for this recipe. Without a size, a recipe of the paper's size becomes pocket."""
    check_name(recipe)
    match = SCALE.fullmatch(text.strip())
    if not match:
        raise InputError(f"scale is {text!r}; expected {SCALES}.")
    size, unit = match[1] or "", f"{match[4]}s" if match[4] else ""
    multiple, amount = (positive(number, text) if number else None for number in (match[2], match[3]))
    if multiple and not 1 / MOST <= multiple <= MOST:
        raise InputError(f"scale is {text!r}; expected a multiple between 1/{MOST} and {MOST}.")
    if amount and amount < 1 and unit != "hours":
        raise InputError(f"scale is {text!r}; expected a budget of at least one {unit.removesuffix('s')}.")
    if size and recipe not in NAMED:
        raise InputError(
            f"Recipe {recipe!r} has a size of its own, and scale is {text!r}. Give only a budget, or one of the "
            f"recipes {', '.join(NAMED)}."
        )
    return Scale(size or ("pocket" if recipe in NAMED else ""), multiple or 1.0, amount, unit)


def positive(number: str, scale: str) -> float:
    """A number in the text of a scale. Raises InputError unless it is positive and finite."""
    try:
        value = float(number.replace(",", "")) if NUMBER.fullmatch(number) else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"scale is {scale!r}, but {number!r} is no positive number; expected {SCALES}.")
    return value


def read_only(training: dict, chosen: dict) -> dict:
    """Pretraining without fields of the recipe that the run's optimizer, schedule and norms don't read.

    `chosen`: the fields that the run sets itself, which stay.
    """
    usual, shape = Training(), training.get("architecture", {})
    if shape.get("norm_order") == "post" and "first_norm" not in chosen.get("architecture", {}):
        shape = {name: value for name, value in shape.items() if name != "first_norm"}
        training = training | {"architecture": shape}
    read = READ_BY.get(training.get("optimizer", usual.optimizer), SELECTED)
    read = read | READ_BY.get(training.get("schedule", usual.schedule), SELECTED)
    return {name: value for name, value in training.items() if name not in SELECTED - read or name in chosen}


def delta_of(recipe: str, changes: dict, scale: Scale) -> dict:
    """The changes to the paper's recipe of a run at this scale. Raises InputError for changes that no recipe takes."""
    own, recipe = stages_of(changes), changes.get(OTHER, recipe)
    delta = merge((NAMED if recipe in NAMED else DELTAS)[recipe], own)
    if "pretrain" in delta:
        delta["pretrain"] = read_only(delta["pretrain"], own.get("pretrain", {}))
    recipe_of(delta, {})
    if scale.size == "pocket":
        delta = merge(POCKET_EXTRA.get(recipe, {}), pocket(delta))
    if scale.amount:
        delta = merge(delta, {"pretrain": {"budget": scale.amount, "budget_unit": scale.unit}})
    kept = {
        stage: {name: own[stage][name] for name in names & set(own.get(stage, {}))} for stage, names in KEPT.items()
    }
    return merge(delta, kept)


def multiplied(recipe: Recipe, by: Multiples) -> dict:
    """The fields of pretraining that these multiples change."""
    shape, fields = recipe.pretrain.architecture, {}
    if by.budget != 1:
        fields["budget"] = by.budget * recipe.pretrain.budget
    if (by.layers, by.hidden) != (1, 1):
        hidden = nearest(by.hidden * shape.hidden, min(shape.hidden // shape.heads, POCKET_HEAD))
        fields["architecture"] = {
            "layers": max(1, round(by.layers * shape.layers)),
            "hidden": hidden,
            "heads": heads(shape, hidden),
            "intermediate": nearest(hidden * shape.intermediate / shape.hidden, 6),
        }
        if shape.embedding:
            fields["architecture"]["embedding"] = nearest(hidden * shape.embedding / shape.hidden, 2)
        if shape.different_layers:
            fields["architecture"]["different_layers"] = max(1, round(by.layers * shape.different_layers))
    return fields


def differing(a: dict, b: dict, chosen: dict | None = None, model: type[BaseModel] = Recipe) -> dict:
    """The fields of `b`, a model's, that differ from those of `a` or are among the chosen ones, level by level."""
    found, chosen = {}, chosen or {}
    for name, value in b.items():
        if value != a[name] or name in chosen:
            inner = level(model.model_fields[name])
            found[name] = differing(a[name], value, chosen.get(name), inner) if inner else value
    return found


def flat(changes: dict, path: str = "") -> dict[str, Any]:
    """Changes by dotted field."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        nested = isinstance(value, dict) and f"{path}{name}" != "download.source"
        found |= flat(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return found


def stages_of(changes: dict) -> dict:
    """The changes of a run to the stages of its recipe."""
    return {name: fields for name, fields in changes.items() if name not in (RELATIVE, OTHER)}


def multiples_of(changes: dict) -> Multiples:
    """The multiples among the changes of a run. Raises InputError for changes that no recipe takes."""
    check_changes(stages_of(changes))
    if OTHER in changes and changes[OTHER] not in [*NAMED]:
        raise InputError(f"{OTHER} is {changes[OTHER]!r}; expected one of {', '.join(NAMED)}.")
    if "report" in changes:
        raise InputError("report.title is the name of the run in a study. Remove report.")
    try:
        return Multiples.model_validate(changes.get(RELATIVE, {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, (RELATIVE, *first['loc'])))}: {first['msg']}.") from error


def resolved(recipe: str, changes: dict, override: dict, scale: Scale) -> Recipe:
    """The recipe of a run. Raises InputError for changes that no recipe takes.

    The fields in `override` hold, unless the run changes them. Multiples are of what the run has then.
    """
    if OTHER in changes and recipe not in NAMED:
        raise InputError(
            f"It is the recipe {changes[OTHER]} of the paper's size, and the others are made of {recipe}, which has a "
            f"size of its own. Give one of the recipes {', '.join(NAMED)}."
        )
    base = delta_of(recipe, {}, scale)
    scaled = recipe_of(delta_of(recipe, changes, scale), {})
    own = differing(recipe_of(base, {}).model_dump(), scaled.model_dump(), changes)
    own.pop("report", None)
    if reads_files(merge(override, own).get("download", {})):  # its limits are what the run says, not the recipe's
        kept = {name: value for name, value in own.get("download", {}).items() if name not in LIMITS}
        own["download"] = kept | {name: value for name, value in changes.get("download", {}).items() if name in LIMITS}
    by = multiples_of(changes)
    by = by.model_copy(update={name: scale.multiple * getattr(by, name) for name in ("layers", "hidden")})
    own = merge(own, {"pretrain": multiplied(recipe_of(base, merge(override, own)), by)})
    return recipe_of(base, merge(override, own))


def check_run(study: Study, name: str, recipe: str, scale: Scale, until: str) -> None:
    """Raise InputError if a run takes changes that no recipe takes, or is impossible with the study's own recipe.

    With other recipes or sizes, or with an override, it may be impossible without being wrong.
    """
    changes = study.runs[name]
    try:
        multiples_of(changes)
        if recipe == study.recipe:
            resolved(recipe, changes, {}, scale).check_lengths(until)
    except InputError as error:
        raise InputError(f"Run {name!r} of the study: {error}") from error


def runs_of(
    study: Study, recipe: str, override: dict, seeds: int, scale: Scale, until: str
) -> tuple[list[StudyRun], dict[str, str]]:
    """The runs of a study, each with every seed; and the reasons for which other runs are impossible, by name.

    Runs that are the same at this scale are one. Only another recipe than the study's own, a multiple of a size, or an
    override can make a run impossible; else it raises InputError.
    """
    if "report" in override:
        raise InputError("A study sets report.title to the name of each run. Remove report from override.")
    check_changes(override)
    made: dict[str, tuple[list[str], Recipe]] = {}
    refused: dict[str, str] = {}
    usual = scale._replace(multiple=1.0)
    for name, changes in study.runs.items():
        check_run(study, name, recipe, usual, until)
        try:
            run = resolved(recipe, changes, override, scale)
            run.check_lengths(until)
        except InputError as error:
            refused[name] = str(error)
            continue
        unread = {"report", "finetune"} if until == "pretrain" else {"report"}
        made.setdefault(run.model_dump_json(exclude=unread), ([], run))[0].append(name)
    if not made:
        given = f"recipe {recipe}{f', scale {scale}' if str(scale) else ''}{' and this override' if override else ''}"
        raise InputError(f"No run of the study is possible with {given}: {next(iter(refused.values()))}")
    (base, *_), run = next(iter(made.values()))
    first = run.model_dump()
    if scale.multiple != 1 and resolved(recipe, study.runs[base], override, usual).model_dump() == first:
        raise InputError(
            f"A multiple of {scale.multiple:g} changes nothing: models have whole blocks, and widths in steps of "
            f"{POCKET_HEAD}. Give one that is further from 1."
        )
    return [
        StudyRun(
            names[0], tuple(names[1:]), seed, seeded(run, names[0], seed), flat(differing(first, run.model_dump()))
        )
        for names, run in made.values()
        for seed in range(seeds)
    ], refused


def seeded(recipe: Recipe, title: str, seed: int) -> Recipe:
    """A recipe with the seed of training moved on by `seed`, and this title."""
    pretrain = recipe.pretrain.model_copy(update={"seed": recipe.pretrain.seed + seed})
    return recipe.model_copy(update={"pretrain": pretrain, "report": recipe.report.model_copy(update={"title": title})})
