"""Resolve a study: its definition, its size and budget, and the recipe of each run."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from flows.recipes.deltas import DELTAS, NAMED, POCKET_EXTRA
from flows.recipes.recipe import Recipe, check_changes, merge, parse_json, recipe_of
from flows.recipes.rules import LIMITS, POCKET_HEAD, nearest, pocket, reads_files, resized
from flows.recipes.studies import STUDIES
from flows.summary import check_name
from model.errors import InputError
from model.settings import READ_BY, Training
from model.wording import budget
from tasks.compare import Compare, Member

NUMBER = r"(\d{1,3}(?:,\d{3})+|\d*\.?\d+(?:[eE][+-]?\d+)?)"  # commas between thousands only
SCALE = re.compile(rf"(?:(pocket|day)(?: +x *{NUMBER})?)?(?:(?:^|(?<=\w),? +){NUMBER} +(hour|token|flop)s?)?")
MOST = 64  # the largest multiple of a size
SCALES = (
    f"a size (pocket, day, or 1/{MOST} to {MOST} times its depth and width, as 'pocket x 0.5'), a budget (at least "
    "a token or flop: '3e6 tokens', '0.5 hours', '1e15 flops'), or both: 'pocket 3e6 tokens'"
)
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


RunName = Annotated[str, Field(pattern=r"^\S(.*\S)?$")]  # not empty, on one line, without space around it


class Study(BaseModel, frozen=True, extra="forbid"):
    """A list of runs. studies.py has those that come with cram."""

    about: str = Field("", description="What it asks.")
    paper: str = Field("", description="What of the paper it reproduces.")
    published: dict[str, str] = Field({}, description="Figures or findings of the paper, by run.")
    recipe: str = Field("crammed-bert", description="The recipe that the runs change.")
    fit: bool = Field(False, description="Whether to fit a scaling law to the runs.")
    runs: dict[RunName, dict[str, Any]] = Field(
        min_length=1, description="The changes of each run; the first is the one that the others are compared with."
    )


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
    """A run before it starts: its row on the page, and its recipe (None: impossible)."""

    member: Member
    recipe: Recipe | None


def study_called(name: str) -> Study:
    """A study by its name, or from a JSON file."""
    if name in STUDIES:
        return Study(**STUDIES[name])
    if not name.lower().endswith(".json"):
        check_name("study", name, STUDIES, rest="; or the path of a .json file")
    try:
        return Study.model_validate(parse_json(Path(name).read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the study"
        raise InputError(
            f"{name}: {where}: {first['msg']}. A study has {', '.join(Study.model_fields)}; runs holds the changes of "
            "each run by its name."
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{name} can't be read: {type(error).__name__}: {error}. Expected a study.") from error


def scale_of(text: str, recipe: str) -> Scale:
    """Parse a scale. Without a size, recipes of the paper's size become pocket recipes."""
    check_name("recipe", recipe, DELTAS)
    match = SCALE.fullmatch(text.strip())
    size, by, number, noun = match.groups() if match else ("", "0", "", "")
    multiple, amount = (float(given.replace(",", "")) if given else 1.0 for given in (by, number))
    if not 1 / MOST <= multiple <= MOST or not 0 < amount < math.inf or (amount < 1 and noun != "hour"):
        raise InputError(f"scale is {text!r}; expected {SCALES}.")
    if size and recipe not in NAMED:
        raise InputError(
            f"Recipe {recipe!r} has a size of its own, and scale is {text!r}. Give only a budget, or one of the "
            f"recipes {', '.join(NAMED)}."
        )
    size = size or ("pocket" if recipe in NAMED else "")
    return Scale(size, multiple, *((amount, f"{noun}s") if noun else (None, "")))


def read_only(training: dict, chosen: dict) -> dict:
    """Drop the fields of pretraining that the run's optimizer, schedule or norms ignore.

    `chosen`: the fields that the run sets itself; they stay.
    """
    usual, shape = Training(), training.get("architecture", {})
    if shape.get("norm_order") == "post" and "first_norm" not in chosen.get("architecture", {}):
        shape = {name: value for name, value in shape.items() if name != "first_norm"}
        training = training | {"architecture": shape}
    readers = {training.get("optimizer", usual.optimizer), training.get("schedule", usual.schedule)}
    unread = {name for name, by in READ_BY.items() if not by & readers} - set(chosen)
    return {name: value for name, value in training.items() if name not in unread}


def delta_of(recipe: str, changes: dict, scale: Scale) -> dict:
    """The delta of a run at this scale. Raises InputError for changes that no recipe takes."""
    own, recipe = stages_of(changes), changes.get(OTHER, recipe)
    delta = merge(DELTAS[recipe], own)
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


def stages_of(changes: dict) -> dict:
    """A run's changes to stages, without `scale` and `recipe`."""
    return {name: fields for name, fields in changes.items() if name not in (RELATIVE, OTHER)}


def multiples_of(changes: dict) -> Multiples:
    """The multiples in a run's changes. Raises InputError for changes that no recipe takes."""
    check_changes(stages_of(changes))
    if OTHER in changes and changes[OTHER] not in [*NAMED]:
        raise InputError(f"{OTHER} is {changes[OTHER]!r}; expected one of {', '.join(NAMED)}.")
    try:
        return Multiples.model_validate(changes.get(RELATIVE, {}))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{'.'.join(map(str, (RELATIVE, *first['loc'])))}: {first['msg']}.") from error


def differing(a: BaseModel, b: BaseModel, chosen: dict) -> dict:
    """The fields of `b` that differ from `a` or that are in `chosen`, level by level."""
    found = {}
    for name, value in b:
        if isinstance(value, BaseModel):
            found[name] = differing(getattr(a, name), value, chosen.get(name, {}))
        elif value != getattr(a, name) or name in chosen:
            found[name] = value
    return found


def flat(settings: BaseModel, path: str = "") -> dict[str, Any]:
    """Values by dotted field."""
    found: dict[str, Any] = {}
    for name, value in settings:
        found |= flat(value, f"{path}{name}.") if isinstance(value, BaseModel) else {f"{path}{name}": value}
    return found


def resolved(recipe: str, changes: dict, override: dict, scale: Scale) -> Recipe:
    """The recipe of a run. Raises InputError for changes that no recipe takes.

    A run's own changes win over `override`. Multiples apply to the result.
    """
    if OTHER in changes and recipe not in NAMED:
        raise InputError(
            f"It is the recipe {changes[OTHER]} of the paper's size, and the others are made of {recipe}, which has a "
            f"size of its own. Give one of the recipes {', '.join(NAMED)}."
        )
    base = delta_of(recipe, {}, scale)
    own = differing(recipe_of(base, {}), recipe_of(delta_of(recipe, changes, scale), {}), changes)
    del own["report"]
    if reads_files(merge(override, own)["download"]):  # its limits are what the run says, not the recipe's
        kept = {name: value for name, value in own["download"].items() if name not in LIMITS}
        own["download"] = kept | {name: value for name, value in changes.get("download", {}).items() if name in LIMITS}
    by = multiples_of(changes)
    by = by.model_copy(update={name: scale.multiple * getattr(by, name) for name in ("layers", "hidden")})
    pretrain, fields = recipe_of(base, merge(override, own)).pretrain, {}
    if by.budget != 1:
        fields["budget"] = by.budget * pretrain.budget
    if (by.layers, by.hidden) != (1, 1):
        shape = pretrain.architecture
        hidden = nearest(by.hidden * shape.hidden, min(shape.hidden // shape.heads, POCKET_HEAD))
        fields["architecture"] = resized(shape, by.layers, hidden)
    return recipe_of(base, merge(override, merge(own, {"pretrain": fields})))


def check_run(study: Study, name: str, recipe: str, scale: Scale, until: str) -> None:
    """Raise InputError if a run has changes that no recipe takes, or is impossible with the study's own recipe.

    Other recipes, sizes and overrides may make a correct run impossible.
    """
    changes = study.runs[name]
    try:
        multiples_of(changes)
        if recipe == study.recipe:
            resolved(recipe, changes, {}, scale).check_lengths(until)
    except InputError as error:
        raise InputError(f"Run {name!r} of the study: {error}") from error


def runs_of(study: Study, recipe: str, override: dict, seeds: int, scale: Scale, until: str) -> list[StudyRun]:
    """The runs of a study, for every seed; runs that are identical at this scale become one.

    A run that another recipe, a multiple of the size or an override makes impossible gets a `problem`. Raises
    InputError for all other mistakes.
    """
    if "report" in override or any("report" in changes for changes in study.runs.values()):
        raise InputError("A study sets report.title to the name of each run. Remove report.")
    check_changes(override)
    found: dict[str, tuple[list[str], Recipe | None, str]] = {}  # names, recipe and problem of each run
    usual, unread = scale._replace(multiple=1.0), {"report"} | ({"finetune"} if until == "pretrain" else set())
    for name, changes in study.runs.items():
        check_run(study, name, recipe, usual, until)
        try:
            own = resolved(recipe, changes, override, scale)
            own.check_lengths(until)
            found.setdefault(own.model_dump_json(exclude=unread), ([], own, ""))[0].append(name)
        except InputError as error:
            found[name] = [name], None, str(error)
    first = next(((names[0], own) for names, own, _ in found.values() if own), None)
    if not first:
        given = f"recipe {recipe}{f', scale {scale}' if str(scale) else ''}{' and this override' if override else ''}"
        raise InputError(f"No run of the study is possible with {given}: {next(iter(found.values()))[2]}")
    if scale.multiple != 1 and resolved(recipe, study.runs[first[0]], override, usual) == first[1]:
        raise InputError(
            f"A multiple of {scale.multiple:g} changes nothing: models have whole blocks, and widths in steps of "
            f"{POCKET_HEAD}. Give one that is further from 1."
        )
    base, runs = flat(first[1]), []
    for names, own, problem in found.values():
        changed = {field: value for field, value in flat(own).items() if value != base[field]} if own else {}
        for seed in range(seeds):
            member = Member(run=names[0], also=names[1:], seed=seed, changes=changed, problem=problem)
            runs.append(StudyRun(member, seeded(own, names[0], seed) if own else None))
    return runs


def seeded(recipe: Recipe, title: str, seed: int) -> Recipe:
    """A recipe with this title, and `seed` added to its seed of pretraining."""
    pretrain = recipe.pretrain.model_copy(update={"seed": recipe.pretrain.seed + seed})
    return recipe.model_copy(update={"pretrain": pretrain, "report": recipe.report.model_copy(update={"title": title})})


def resolve_study(
    name: str, recipe: str | None, override: dict, seeds: int, scale: str, until: str
) -> tuple[Compare, list[StudyRun]]:
    """The head of a study's page, and its runs. Raises InputError for a study that can't run."""
    study = study_called(name)
    base = recipe or study.recipe
    size = scale_of(scale, base)
    runs = runs_of(study, base, override, seeds, size, until)
    if seeds > 1 and any("seed" in run.get("pretrain", {}) for run in study.runs.values()):
        raise InputError("A run of this study sets pretrain.seed, and seeds is above 1. Leave one of them out.")
    about = Compare(
        title=f"Study: {Path(name).stem}",
        **study.model_dump(include={"about", "paper", "fit"}),
        published=study.published if base == study.recipe else {},
        recipe=base,
        scale=str(size),
        is_rescaled=base in NAMED and (size.size == "pocket" or size.multiple != 1 or size.amount is not None),
    )
    return about, runs


def operations_per_token(recipe: Recipe) -> float:
    """Floating-point operations per token of a recipe's pretraining, for the vocabulary that it asks for."""
    from model import bert
    from model.masking import masks_per_sequence

    length, training = recipe.tokenize.length, recipe.pretrain
    masks = masks_per_sequence(training.mask_fraction, length)
    return bert.operations_per_token(training.architecture, training, recipe.vocabulary.entries, length, masks)
