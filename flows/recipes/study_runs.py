"""Resolve a study: its definition, its size and budget, and the recipe of each run."""

import math
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from flows.recipes.deltas import DELTAS, NAMED, POCKET_EXTRA
from flows.recipes.recipe import Recipe, check_changes, merge, parse_json, recipe_of
from flows.recipes.rules import LIMITS, POCKET_HEAD, nearest, pocket, reads_files, resized
from flows.recipes.studies import STUDIES
from flows.summary import check_name
from model.errors import InputError
from model.settings import READ_BY, Training, with_budget_as_number
from model.wording import NUMBER, budget, parse_budget
from tasks.compare import Compare, Member
from tasks.pretrain import Pretrain

SCALE = re.compile(rf"(?:(pocket|day)(?: +x *{NUMBER})?)?(?:(?:^|(?<=\w),? +)(\S.*))?", re.IGNORECASE)
MOST = 64  # the largest multiple of a size
SCALES = (
    f"a size (pocket, day, or 1/{MOST} to {MOST} times its depth and width, as 'pocket x 0.5'), a budget (at least "
    "a token or flop: '3e6 tokens', '30 minutes', '10 epochs', '1e15 flops'), or both: 'pocket 3e6 tokens'"
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


def with_budgets_as_numbers(changes: dict[str, Any]) -> dict[str, Any]:
    """The changes of a run, whose budget may be in words, with its budget as a number and the unit."""
    pretrain = changes.get("pretrain")
    return changes if pretrain is None else changes | {"pretrain": with_budget_as_number(pretrain)}


class Study(BaseModel, frozen=True, extra="forbid"):
    """A list of runs. studies.py has those that come with cram."""

    about: str = Field("", description="What it asks.")
    paper: str = Field("", description="What of the paper it reproduces.")
    published: dict[str, str] = Field({}, description="Figures or findings of the paper, by run.")
    words: dict[str, str] = Field({}, description="What a run is, by run, if its changes don't say it well.")
    recipe: str = Field("crammed-bert", description="The recipe that the runs change.")
    fit: bool = Field(False, description="Whether to fit a scaling law to the runs.")
    runs: dict[RunName, Annotated[dict[str, Any], AfterValidator(with_budgets_as_numbers)]] = Field(
        min_length=1, description="The changes of each run; the first is the one that the others are compared with."
    )

    @model_validator(mode="after")
    def _names_its_runs(self) -> "Study":
        for field in ("published", "words"):
            unknown = sorted(set(getattr(self, field)) - set(self.runs))
            if unknown:
                raise ValueError(f"{field} names {unknown[0]!r}, which is not one of the runs")
        return self


class Scale(NamedTuple):
    """Size and budget of the runs.

    size      pocket, day, or empty for a recipe that has its own size
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


def find_study(name: str) -> Study:
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


def parse_scale(text: str, recipe: str) -> Scale:
    """Parse a scale. Without a size, recipes of the paper's size become pocket recipes."""
    check_name("recipe", recipe, DELTAS)
    wrong = InputError(f"scale is {text!r}; expected {SCALES}.")
    match = SCALE.fullmatch(text.strip())
    if not match:
        raise wrong
    size, by, words = match.groups()
    multiple = number_of(by) if by else 1.0
    amount = None
    unit = ""
    if words:
        try:
            amount, unit = parse_budget(words)
        except ValueError:
            raise wrong from None
        if not unit or not 0 < amount < math.inf or (amount < 1 and unit in ("tokens", "flops")):
            raise wrong
    if not 1 / MOST <= multiple <= MOST:
        raise wrong
    if size and recipe not in NAMED:
        raise InputError(
            f"Recipe {recipe!r} has its own size, and scale is {text!r}. Pass only a budget, or choose one of the "
            f"recipes {', '.join(NAMED)}."
        )
    usual = "pocket" if recipe in NAMED else ""
    return Scale(size.lower() if size else usual, multiple, amount, unit)


def number_of(text: str) -> float:
    """A number that may have commas between thousands."""
    return float(text.replace(",", ""))


def read_only(training: dict, chosen: dict) -> dict:
    """Drop the fields of pretraining that the run's optimizer, schedule or norms ignore.

    `chosen`: the fields that the run sets itself; they stay.
    """
    usual = Training()
    shape = training.get("architecture", {})
    if shape.get("norm_order") == "post" and "first_norm" not in chosen.get("architecture", {}):
        shape = {name: value for name, value in shape.items() if name != "first_norm"}
        training = training | {"architecture": shape}
    readers = {training.get("optimizer", usual.optimizer), training.get("schedule", usual.schedule)}
    unread = {name for name, by in READ_BY.items() if not by & readers} - set(chosen)
    return {name: value for name, value in training.items() if name not in unread}


def delta_of(recipe: str, changes: dict, scale: Scale) -> dict:
    """The delta of a run at this scale. Raises InputError for changes that no recipe takes."""
    own = stages_of(changes)
    recipe = changes.get(OTHER, recipe)
    delta = merge(DELTAS[recipe], own)
    if "pretrain" in delta:
        delta["pretrain"] = read_only(delta["pretrain"], own.get("pretrain", {}))
    recipe_of(delta, {})
    if scale.size == "pocket":
        delta = merge(POCKET_EXTRA.get(recipe, {}), pocket(delta))
    if scale.amount:
        delta = merge(delta, {"pretrain": {"budget": scale.amount, "budget_unit": scale.unit}})
    kept = {}
    for stage, names in KEPT.items():
        changed = own.get(stage, {})
        kept[stage] = {name: changed[name] for name in changed if name in names}
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


def differing_fields(a: BaseModel, b: BaseModel, chosen: dict) -> dict:
    """The fields of `b` that differ from `a` or that are in `chosen`, level by level."""
    found: dict[str, Any] = {}
    for name, value in b:
        if isinstance(value, BaseModel):
            found[name] = differing_fields(getattr(a, name), value, chosen.get(name, {}))
        elif value != getattr(a, name) or name in chosen:
            found[name] = value
    return found


def values_by_field(settings: BaseModel, path: str = "") -> dict[str, Any]:
    """Values by dotted field."""
    found: dict[str, Any] = {}
    for name, value in settings:
        found |= values_by_field(value, f"{path}{name}.") if isinstance(value, BaseModel) else {f"{path}{name}": value}
    return found


def resolve_run(recipe: str, changes: dict, override: dict, scale: Scale) -> Recipe:
    """The recipe of a run. Raises InputError for changes that no recipe takes.

    In order of precedence: multiples of size and budget, the run's own changes, `override`, the recipe at this scale.
    """
    if OTHER in changes and recipe not in NAMED:
        raise InputError(
            f"It changes the recipe {changes[OTHER]}, which has the paper's size; the others change {recipe}, which "
            f"has its own size. Choose one of the recipes {', '.join(NAMED)}."
        )
    base = delta_of(recipe, {}, scale)
    asked = merge(override, own_changes(recipe, changes, override, scale))
    sizes = multiply(recipe_of(base, asked).pretrain, multiples_of(changes), scale.multiple)
    return recipe_of(base, merge(asked, {"pretrain": sizes}))


def own_changes(recipe: str, changes: dict, override: dict, scale: Scale) -> dict:
    """The fields in which a run differs from the recipe at this scale, and those that it sets itself."""
    usual = recipe_of(delta_of(recipe, {}, scale), {})
    own = differing_fields(usual, recipe_of(delta_of(recipe, changes, scale), {}), changes)
    del own["report"]
    if reads_files(merge(override, own)["download"]):  # its limits are what the run says, not the recipe's
        others = {name: value for name, value in own["download"].items() if name not in LIMITS}
        limits = {name: value for name, value in changes.get("download", {}).items() if name in LIMITS}
        own["download"] = others | limits
    return own


def multiply(training: Pretrain, by: Multiples, multiple: float) -> dict:
    """The fields of pretraining that multiples of budget and size change. `multiple`: of the size, in all runs."""
    fields: dict[str, Any] = {}
    if by.budget != 1:
        fields["budget"] = by.budget * training.budget
    layers = multiple * by.layers
    width = multiple * by.hidden
    if (layers, width) != (1, 1):
        shape = training.architecture
        unit = min(shape.hidden // shape.heads, POCKET_HEAD)
        fields["architecture"] = resized(shape, layers, nearest(width * shape.hidden, unit))
    return fields


def check_run(study: Study, name: str, recipe: str, scale: Scale, until: str) -> None:
    """Raise InputError if a run has changes that no recipe takes, or is impossible with the study's own recipe.

    Other recipes, sizes and overrides may make a correct run impossible.
    """
    changes = study.runs[name]
    try:
        multiples_of(changes)
        if recipe == study.recipe:
            resolve_run(recipe, changes, {}, scale).check_lengths(until)
    except InputError as error:
        raise InputError(f"Run {name!r} of the study: {error}") from error


class Variant(NamedTuple):
    """What one or more runs of a study do, without their seeds. `recipe`: None if it is impossible; `problem`: why."""

    names: list[str]
    recipe: Recipe | None
    problem: str = ""


def find_variants(study: Study, recipe: str, override: dict, scale: Scale, until: str) -> list[Variant]:
    """The runs of a study; those that are identical at this scale become one."""
    unread = {"report"}
    if until != "report":
        unread.add("finetune")
    if until == "pretrain":
        unread.add("minimal_pairs")
    found: dict[str, Variant] = {}
    for name, changes in study.runs.items():
        check_run(study, name, recipe, scale._replace(multiple=1.0), until)
        try:
            own = resolve_run(recipe, changes, override, scale)
            own.check_lengths(until)
            own.check_pairs(until)
        except InputError as error:
            found[name] = Variant([name], None, str(error))
            continue
        same = found.setdefault(own.model_dump_json(exclude=unread), Variant([], own))
        same.names.append(name)
    return list(found.values())


def runs_of(study: Study, recipe: str, override: dict, seeds: int, scale: Scale, until: str) -> list[StudyRun]:
    """The runs of a study, for every seed; runs that are identical at this scale become one.

    A run that another recipe, a multiple of the size or an override makes impossible gets a `problem`. Raises
    InputError for all other mistakes.
    """
    if "report" in override or any("report" in changes for changes in study.runs.values()):
        raise InputError("A study sets report.title to the name of each run. Remove report.")
    check_changes(override)
    variants = find_variants(study, recipe, override, scale, until)
    first, base = find_first(variants, recipe, override, scale)
    if scale.multiple != 1:
        check_multiple(study.runs[first], base, recipe, override, scale)
    runs = []
    for variant in variants:
        about = about_variant(variant, base, study.words)
        for seed in range(seeds):
            member = Member(**about, seed=seed)
            own = with_seed(variant.recipe, member.run, seed) if variant.recipe else None
            runs.append(StudyRun(member, own))
    return runs


def check_multiple(changes: dict, base: Recipe, recipe: str, override: dict, scale: Scale) -> None:
    """Raise InputError if the scale's multiple of the size changes nothing. `base`: the first run's recipe at it."""
    usual = resolve_run(recipe, changes, override, scale._replace(multiple=1.0))
    if usual == base:
        raise InputError(
            f"A multiple of {scale.multiple:g} changes nothing: models have whole blocks, and widths in steps of "
            f"{POCKET_HEAD}. Choose one that is further from 1."
        )


def about_variant(variant: Variant, base: Recipe, words: dict[str, str]) -> dict[str, Any]:
    """The fields of Member that all seeds of a run share. `base`: the first run's recipe; `words`: by run."""
    name, *others = variant.names
    about: dict[str, Any] = {
        "run": name,
        "also": others,
        "words": words.get(name, ""),
        "problem": variant.problem,
    }
    if variant.recipe:
        changed = changed_values(base, variant.recipe)
        of_base = values_by_field(base)
        about |= {"changes": changed, "usual": {field: of_base[field] for field in changed}}
    return about


def find_first(variants: list[Variant], recipe: str, override: dict, scale: Scale) -> tuple[str, Recipe]:
    """The name and the recipe of the first run that is possible. Raises InputError if there is none."""
    for variant in variants:
        if variant.recipe:
            return variant.names[0], variant.recipe
    given = f"recipe {recipe}"
    if str(scale):
        given += f", scale {scale}"
    if override:
        given += " and this override"
    raise InputError(f"No run of the study is possible with {given}: {variants[0].problem}")


def changed_values(base: Recipe, recipe: Recipe) -> dict[str, Any]:
    """The values in which a recipe differs from the first run's, by dotted field."""
    usual = values_by_field(base)
    return {field: value for field, value in values_by_field(recipe).items() if value != usual[field]}


def with_seed(recipe: Recipe, title: str, seed: int) -> Recipe:
    """A recipe with this title, and `seed` added to its seed of pretraining."""
    pretrain = recipe.pretrain.model_copy(update={"seed": recipe.pretrain.seed + seed})
    return recipe.model_copy(update={"pretrain": pretrain, "report": recipe.report.model_copy(update={"title": title})})


def resolve_study(
    name: str, recipe: str | None, override: dict, seeds: int, scale: str, until: str
) -> tuple[Compare, list[StudyRun]]:
    """The head of a study's page, and its runs. Raises InputError for a study that can't run."""
    study = find_study(name)
    base = recipe or study.recipe
    size = parse_scale(scale, base)
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

    length = recipe.tokenize.length
    training = recipe.pretrain
    masks = masks_per_sequence(training.mask_fraction, length)
    return bert.operations_per_token(training.architecture, training, recipe.vocabulary.entries, length, masks)
