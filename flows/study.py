"""The flow of a study: its runs, on shared cached stages, and the page that compares them."""

import logging
from pathlib import Path
from typing import Literal

from prefect import flow

from flows.cram import add
from flows.deltas import NAMED
from flows.flow_runs import register
from flows.logs import running
from flows.pages import show
from flows.plan import Plan, Problems, Step, failure, result_line
from flows.recipes import Override, Recipe, RecipeName, recipe_of, without_empty
from flows.study_runs import StudyRun, runs_of, scale_of, study_called
from model import InputError
from model.quantities import counted, duration
from tasks.evaluate import Evaluate, evaluate, share_in_common
from tasks.reports.law import FEWEST
from tasks.stage import Params
from tasks.store import Artifact, named
from tasks.study import SIZES, Card, Member, StudyReport, compare_runs
from tasks.workers import side_by_side
from tasks.workers.progress import SECONDS_AT_THE_END, reporter

# Dense fp16 or bf16 TFLOP/s: paper, section 4.1, and NVIDIA's data sheet. 42 % of the peak is what the release reached
# on an A6000 (pytorch/pytorch#96693: 103,200 tokens/s).
CARDS = {"RTX 2080 Ti": 53.8, "RTX A4000": 88.45, "RTX A6000": 154.8, "H100 or H200": 989.4}
SHARE_OF_PEAK = 0.42
USUAL_MFU = {"cpu": 0.6, "cuda": 0.4}  # for the time that a study takes, before anything has run
SECONDS_PER_DAY = 86_400
FEWEST_IN_COMMON = 0.1  # of the first model's held-out documents: with fewer, losses are not compared
log = logging.getLogger(__name__)


def recipe_operations(recipe: Recipe) -> float:
    """Floating-point operations per token of a recipe's pretraining, for the vocabulary that it asks for."""
    from model.detection import operations_per_token
    from model.masking import masks_per_sequence

    length, training = recipe.tokenize.length, recipe.pretrain
    masks = masks_per_sequence(training.mask_fraction, length)
    return operations_per_token(training.architecture, training, recipe.vocabulary.entries, length, masks)


def seconds_of(recipe: Recipe, rate: float) -> float:
    """About how long a recipe's pretraining takes; `rate`: operations per second that training reaches here."""
    amount, unit = recipe.pretrain.budget, recipe.pretrain.budget_unit
    if unit == "hours":
        return 3600 * amount
    return (amount if unit == "flops" else amount * recipe_operations(recipe)) / rate


def usual_rate() -> float:
    """The operations per second that training usually reaches on this machine, from a measurement of a second."""
    from model import machine

    here = machine.detect()
    return USUAL_MFU[here.device.type] * machine.matrix_rate(here.device, here.dtype)


def estimate(runs: list[StudyRun], rate: float) -> str:
    """The number of runs, and about how long their pretraining takes at this rate.

    Runs side by side divide the time among them; on a CPU they also divide its rate.
    """
    from model import machine

    count, cuda = side_by_side.at_once(side_by_side.PRETRAIN, len(runs)), machine.detect().device.type == "cuda"
    seconds = [seconds_of(run.recipe, rate) for run in runs]
    divided = [
        each / count if cuda or run.recipe.pretrain.budget_unit == "hours" else each
        for each, run in zip(seconds, runs, strict=True)
    ]
    return f"{counted(len(runs), 'run')}, about {duration(max(*seconds, sum(divided)), 2)}"


def planned(
    name: str, recipe: str | None, override: dict, seeds: int, scale: str, until: str
) -> tuple[StudyReport, list[StudyRun]]:
    """What the page will say of a study, and its runs. Raises InputError for what can't be run."""
    study = study_called(name)
    base = recipe or study.recipe
    if seeds < 1:
        raise InputError(f"seeds is {seeds}; expected 1 or more.")
    size = scale_of(scale, base)
    runs, refused = runs_of(study, base, override, seeds, size, until)
    if seeds > 1 and any("seed" in run.get("pretrain", {}) for run in study.runs.values()):
        raise InputError("A run of this study sets pretrain.seed, and seeds is above 1. Leave one of them out.")
    if study.fit:
        check_fit(name, runs)
    about = StudyReport(
        title=f"Study: {Path(name).stem}",
        **study.model_dump(include={"about", "paper", "fit"}),
        published=study.published if base == study.recipe else {},
        recipe=base,
        scale=str(size),
        is_rescaled=base in NAMED and (size.size == "pocket" or size.multiple != 1 or size.amount is not None),
        cards=cards(base, override) if study.fit else [],
        members=[Member(run=name, seed=seed, problem=why) for name, why in refused.items() for seed in range(seeds)],
    )
    return about, runs


def impossible(about: StudyReport) -> dict[str, str]:
    """Why runs are left out before anything has run, by run."""
    return {member.run: member.problem for member in about.members}


def check_fit(name: str, runs: list[StudyRun]) -> None:
    """Raise InputError if no scaling law can be fitted to the runs of this study, even if all of them finish."""
    sized = {run.name: run.recipe for run in runs if set(run.changes) <= SIZES}
    if len(sized) < FEWEST:
        raise InputError(
            f"A scaling law needs at least {FEWEST} runs that differ in size or budget only, and study {name} has "
            f"{len(sized)}. Add runs, or set fit to false."
        )
    budgets = {(recipe.pretrain.budget_unit, recipe.pretrain.budget) for recipe in sized.values()}
    of_one_size = len(set(map(recipe_operations, sized.values()))) == 1
    if of_one_size or (
        len(budgets) == 1 and next(iter(budgets))[0] == "tokens"
    ):  # else larger models read fewer tokens
        raise InputError(
            f"A scaling law needs several sizes and several numbers of tokens, and all runs of study {name} have the "
            f"same {'size' if of_one_size else 'number of tokens'}. Add runs, or set fit to false."
        )


def cards(recipe: str, override: dict) -> list[Card]:
    """A day of each card, with the recipe at full size; none for a recipe that has no full size."""
    if recipe not in NAMED:
        return []
    kept = override | {"pretrain": {k: v for k, v in override.get("pretrain", {}).items() if k != "architecture"}}
    size = recipe_operations(recipe_of(NAMED[recipe], kept)) / 6
    return [
        Card(name=name, operations=SHARE_OF_PEAK * peak * 1e12 * SECONDS_PER_DAY, size=size)
        for name, peak in CARDS.items()
    ]


def reason(step: Step, problems: Problems) -> str:
    """Why a step has no artifact; empty if it has one."""
    if step not in problems:
        return ""
    if error := problems[step]:
        return sentence_of(error)
    return next(filter(None, (reason(upstream, problems) for upstream in step.upstream)), "")


def carry_out(task, params: Params, *inputs: Artifact | list[Artifact], run: tuple[str, ...]) -> Artifact:
    """Run a stage that follows the plan's, and log its result."""
    step, cached = Step(task, params, (), run), task.is_made(params, *inputs)
    with running(step.title):
        artifact = task(params, *inputs)
    log.info(result_line(step, artifact, cached))
    return artifact


def sentence_of(error: Exception) -> str:
    """An error for the page: a user's as its sentence, a bug with its type."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"


def holding_out(recipe: Recipe) -> tuple:
    """What decides which documents are held out, and how their text is changed before that.

    A model with other values here may be trained on text that is held out of the first one. What is cut as a repeated
    passage depends on all other text.
    """
    cut = (recipe.download, recipe.deduplicate) if "substring" in recipe.deduplicate.methods else None
    edited = recipe.decontaminate if recipe.decontaminate.method == "cut" else None
    return recipe.tokenize.heldout_fraction, cut, edited


def with_common_text(members: list[Member], runs: list[StudyRun]) -> list[Member]:
    """The members, with their losses on a text that none was trained on, if their own held-out texts differ.

    The text is the first model's, since documents are held out by their digests. If documents were changed before
    that, it is those that are held out of these models too; a model with hardly any of them has no loss.
    """
    made = {member.model: run.recipe for member, run in zip(members, runs, strict=True) if member.model}
    models = named_artifacts(list(made))
    digests = {model.name: model.stats["heldout"]["digest"] for model in models}
    if len(set(digests.values())) == 1:
        return members
    text, usual = models[0], holding_out(made[models[0].name])
    unusual = [model for model in models if holding_out(made[model.name]) != usual]
    others = [model for model in unusual if share_in_common(text, model) >= FEWEST_IN_COMMON]
    apart = {model.name for model in unusual} - {model.name for model in others}
    measured = []
    for member in members:
        if member.model in apart:
            why = (
                f"Too little of the held-out text of {text.name} is held out of {member.model} too, to compare losses."
            )
            member = member.model_copy(update={"compared": False, "problem": member.problem or why})
        elif member.model and (others or digests[member.model] != digests[text.name]):
            member = evaluated(member, text, others)
        measured.append(member)
    return measured


def evaluated(member: Member, text: Artifact, others: list[Artifact]) -> Member:
    """A member with its loss on this text, or with the reason why it has none."""
    run = member.run, f"seed {member.seed}"
    try:
        found = carry_out(evaluate, Evaluate(), named(member.model), text, others, run=run)
        return member.model_copy(update={"evaluation": found.name})
    except Exception as error:
        failure(Step(evaluate, Evaluate(), (), run), error)
        return member.model_copy(update={"compared": False, "problem": member.problem or sentence_of(error)})


def carried_out(plan: Plan, runs: list[StudyRun], override: dict) -> list[Member]:
    """Carry out all runs, and say what became of each. Raises the first error if none has a result."""
    steps = []
    for run in runs:
        plan.adding = run.title
        steps.append(add(plan, run.recipe))
    plan.warn_of_unused(override)
    problems, members = plan.run_each(), []
    for run, of_run in zip(runs, steps, strict=True):
        model, last = of_run["pretrain"], of_run[plan.until]
        members.append(
            Member(
                run=run.name,
                also=list(run.also),
                seed=run.seed,
                changes=run.changes,
                model="" if model in problems else plan.made[model].name,
                report="" if plan.until != "report" or last in problems else plan.made[last].name,
                problem=reason(last, problems),
            )
        )
    if not any(member.model for member in members):
        raise next(filter(None, problems.values()))
    return members


def named_artifacts(names: list[str]) -> list[Artifact]:
    """The artifacts of these names, each once; empty names are skipped."""
    return [named(name) for name in dict.fromkeys(filter(None, names))]


@flow(name="cram", flow_run_name=register, log_prints=True)
def study(
    study: str = "masking",
    recipe: RecipeName | None = None,
    override: Override = {},
    seeds: int = 1,
    scale: str = "",
    until: Literal["pretrain", "report"] = "pretrain",
) -> Artifact:
    """Run a list of recipes that differ in one respect, and compare them on one page. Shared stages run once.

    Args:
        study: Name of a study, or the path of a .json or .py file with one.
        recipe: The recipe that the runs change. Default: that of the study, mostly crammed-bert.
        override: Changes to all runs, as {"download": {"documents": 1000}}, except to what a run changes itself.
        seeds: Number of seeds of each run.
        scale: A size (pocket, the default; day; or "pocket x 0.5"), a budget ("3e6 tokens"), or both.
        until: pretrain compares losses; report also finetunes, and compares scores.
    """
    override = without_empty(override)
    about, runs = planned(study, recipe, override, seeds, scale, until)
    order = [*study_called(study).runs]  # also of those that are impossible; its file may change during the study
    for run in {run.name: run for run in runs if run.also}.values():
        log.info("%s and %s are the same at this scale; they are one run.", run.name, " and ".join(run.also))
    for run, problem in impossible(about).items():
        log.warning("%s is not possible here: %s", run, problem)
    plan = Plan(until, {}, [])
    log.info("Pretraining: %s on this machine, less what is cached.", estimate(runs, usual_rate()))
    try:
        members = with_common_text(carried_out(plan, runs, override), runs)
        given = (named_artifacts([getattr(one, kind) for one in members]) for kind in ("model", "evaluation", "report"))
        members = sorted(members + about.members, key=lambda member: order.index(member.run))
        params = about.model_copy(update={"members": members})
        page = carry_out(compare_runs, params, *given, run=())
        show(page)
        if failed := sum(bool(member.problem) for member in members):
            log.warning("%s of %s failed; the page says why.", failed, counted(len(members), "run"))
        return page
    finally:
        reporter.flush(SECONDS_AT_THE_END)
