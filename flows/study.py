"""The flow of a study: runs that share cached stages, and the page that compares them."""

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from prefect import flow, tags
from pydantic import PositiveInt

from flows import disk
from flows.cram import pipeline, run_name, warn_of_unused
from flows.execute import carry_out, execute
from flows.forecast import IMPOSSIBLE, PRETRAIN, Forecast, Row
from flows.logs import lines_later
from flows.plan import Plan, Step
from flows.recipes.recipe import Override, Recipe, RecipeName, refuse_without_start, without_empty
from flows.recipes.study_runs import StudyRun, operations_per_token, resolve_study
from model.errors import InputError
from model.wording import counted, duration
from tasks.compare import Compare, Member, compare, heldout_digest
from tasks.evaluate import Evaluate, evaluate, share_in_common
from tasks.store.artifacts import Artifact
from tasks.store.gc import keep_while_running
from tasks.store.manifests import refuse_hollow

RESULTS = {PRETRAIN, "minimal_pairs", "report"}  # the stages whose artifacts a study's page reads
FEWEST_IN_COMMON = 0.1  # of the first model's held-out documents: with fewer, losses are not compared
Results: TypeAlias = dict[str, Artifact]  # by name
log = logging.getLogger(__name__)


# the name of the other flow, so that both are one in Prefect's pages, with the deployments cram/full and cram/study
@flow(name="cram", flow_run_name=run_name)
def study(
    study: str = "masking",
    recipe: RecipeName | None = None,
    override: Override = {},
    seeds: PositiveInt = 1,
    scale: str = "",
    until: Literal["pretrain", "minimal_pairs", "report"] = "pretrain",
) -> Artifact:
    """Run a list of recipes that differ in one respect, and compare them on one page. Shared stages run once.

    Args:
        study: Name of a study, or the path of a .json file with one.
        recipe: The recipe that the runs change. Default: that of the study, mostly crammed-bert.
        override: Changes to all runs, as {"download": {"documents": 1000}}, except to what a run changes itself.
        seeds: Number of seeds of each run.
        scale: A size (pocket, the default; day; or "pocket x 0.5"), a budget ("3e6 tokens"), or both.
        until: pretrain compares losses; minimal_pairs also compares scores without finetuning; report all scores.
    """
    asked = plan_study(study, recipe, override, seeds, scale, until)
    plan = asked.plan
    with lines_later():
        plan.find()
        found = Forecast(plan)
        log.info(found.announcement(Path(study).stem))
    warn_of_unused(asked.about.recipe, without_empty(override), plan)
    log_odd_runs(asked.runs)
    if any(row.seconds is None for step, row in found.rows_of.items() if step.stage == PRETRAIN):
        log.info("Pretraining: %s on this machine, less what is cached.", estimate(asked.runs, usual_rate()))
    plan.check()
    refuse_hollow_models(plan)
    disk.check(plan)
    with tags(Path(study).stem, f"until {until}"), keep_while_running(plan.needed()):
        execute(plan)
        page, members = compare_runs(asked, carry_out)
    log_failures(members)
    return page


def log_odd_runs(runs: list[StudyRun]) -> None:
    """Log which runs are one run under several names, and which are impossible."""
    for run in runs:
        member = run.member
        if member.seed == 0 and member.also:
            log.info("%s and %s are the same at this scale; they are one run.", member.run, " and ".join(member.also))
        if member.seed == 0 and member.problem:
            log.warning("%s is not possible here: %s", member.run, member.problem)


def log_failures(members: list[Member]) -> None:
    """Log how many runs failed, if any did."""
    failed = sum(bool(member.problem) for member in members)
    if failed:
        log.warning("%s of %s failed; the page says why.", failed, counted(len(members), "run"))


def refuse_hollow_models(plan: Plan) -> None:
    """Let the runs of made models whose weights are not here be impossible: a study's page needs whole models."""
    for step in plan.steps:
        if step.stage == PRETRAIN and not step.error and step.is_made:
            try:
                refuse_hollow(step.artifact)
            except InputError as error:
                step.problem = error


class StudyPlan(NamedTuple):
    """The head of a study's page, its runs, their plan, and for each run the step of its report (None: impossible)."""

    about: Compare
    runs: list[StudyRun]
    plan: Plan
    pages: list[Step | None]


def plan_study(study: str, recipe: str | None, override: dict, seeds: int, scale: str, until: str) -> StudyPlan:
    """The plan of a study, not yet checked."""
    override = without_empty(override)
    about, runs = resolve_study(study, recipe, override, seeds, scale, until)
    refuse_without_start(about.recipe, override)
    plan = Plan(until, {}, [])
    pages = []
    for run in runs:
        name = (run.member.run, f"seed {run.member.seed}")
        pages.append(plan.trace(pipeline, run.recipe, run=name) if run.recipe else None)
    return StudyPlan(about, runs, plan, pages)


def forecast_study(study: str, recipe: str | None, override: dict, seeds: int, scale: str, until: str) -> Forecast:
    """The forecast of a study."""
    asked = plan_study(study, recipe, override, seeds, scale, until)
    warn_of_unused(asked.about.recipe, without_empty(override), asked.plan)
    asked.plan.check(thoroughly=False)
    refuse_hollow_models(asked.plan)
    found = Forecast(asked.plan)
    for run in asked.runs:
        if not run.recipe:
            member = run.member
            found.rows.append(Row(f"[{member.run}, seed {member.seed}]", "", IMPOSSIBLE))
            if member.seed == 0:
                found.notes.append(f"{member.run} is not possible here: {member.problem}")
    models = [page.find_upstream(PRETRAIN) for page in asked.pages if page]
    if any(model and not model.error for model in models):
        found.refusal = None  # the others are possible
    if not found.would_run() and not found.refusal:
        compare_runs(asked, found.add_later)
    elif not found.refusal:
        found.rows.append(Row("compare", "", "to do", seconds=None))
    return found


def compare_runs(asked: StudyPlan, make: Callable[[Step], Artifact]) -> tuple[Artifact, list[Member]]:
    """The page that compares the runs of a plan that was carried out, and its rows. `make`: makes a step's artifact.

    Raises the first error if there is no model.
    """
    until = asked.plan.until
    members = [find_outcome(run, page, until) for run, page in zip(asked.runs, asked.pages, strict=True)]
    if not any(member.model for member in members):
        raise next(iter(asked.plan.problems.values()))
    results = results_of(asked.pages)
    members = on_common_text(members, asked.runs, results, make)
    given = tuple(artifacts_of_members(members, kind, results) for kind in ("model", "evaluation", "report"))
    given += (judged_of_members(members, results),)
    step = Step(compare, asked.about.model_copy(update={"members": members}), given)
    return make(step), members


def results_of(pages: list[Step | None]) -> Results:
    """The models, minimal pairs and reports that the steps of a plan made, by name.

    The very objects that the steps hold, since Prefect draws its graph by the identity of results.
    """
    results: Results = {}
    for page in pages:
        for step in page.find_all(RESULTS) if page else []:
            if not step.error:
                results[step.artifact.name] = step.artifact
    return results


def usual_rate() -> float:
    """Estimate the operations per second of training on this machine, in about a second."""
    from model import machine  # loads torch
    from model.forward import USUAL_MFU

    here = machine.detect()
    return USUAL_MFU[here.device.type] * machine.matrix_rate(here.device, here.dtype)


def pretraining_seconds(recipe: Recipe, rate: float) -> float:
    """Estimate the seconds of a recipe's pretraining at `rate` operations per second."""
    amount = recipe.pretrain.budget
    match recipe.pretrain.budget_unit:
        case "hours":
            return 3600 * amount
        case "flops":
            return amount / rate
        case "epochs":
            epoch = disk.limited_tokens(disk.text_of(recipe.download), recipe.vocabulary, recipe.tokenize)
            return amount * epoch * operations_per_token(recipe) / rate
        case _:
            return amount * operations_per_token(recipe) / rate


def estimate(runs: list[StudyRun], rate: float) -> str:
    """The number of possible runs and the estimated time of their pretraining, in words."""
    seconds = [pretraining_seconds(run.recipe, rate) for run in runs if run.recipe]
    return f"{counted(len(seconds), 'run')}, about {duration(sum(seconds), 2)}"


def find_outcome(run: StudyRun, page: Step | None, until: str) -> Member:
    """The row of a run on the page: its artifacts, or why it has none. `page`: the step of its report."""
    if page is None:
        return run.member
    results: dict = {"model": name_of(page, PRETRAIN), "report": "", "problem": ""}
    if until == "report":
        results["report"] = name_of(page, "report")
    if until != PRETRAIN:
        judged = page.find_all({"minimal_pairs"})
        results["judged"] = [step.artifact.name for step in judged if not step.error]
    for last in page.find_all({until}):
        if last.error:
            results["problem"] = sentence_of(last.error)
    return run.member.model_copy(update=results)


def name_of(page: Step, stage: str) -> str:
    """The name of the artifact of this stage that a page is made from; empty if the stage failed."""
    step = page.find_upstream(stage)
    return "" if step is None or step.error else step.artifact.name


def sentence_of(error: Exception) -> str:
    """An error as the page shows it: a user's as its sentence, a bug with its type."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"


def on_common_text(
    members: list[Member], runs: list[StudyRun], results: Results, make: Callable[[Step], Artifact]
) -> list[Member]:
    """Evaluate all models on one text that none was trained on, if their own held-out texts differ.

    `results`: the models by name, to which the evaluations are added.

    Documents are held out by their digests, so the first model's text serves. Models that hold out documents in another
    way are measured on the documents that all of them hold out, and not at all if these are few. If budgets are unequal
    and some were so short that they measured less than the others, all are measured on as much as the longest was.
    """
    models = artifacts_of_members(members, "model", results)
    if len({model.stats["heldout"]["digest"] for model in models}) == 1:
        return members
    unusual = find_unusual(models[0], models[1:], members, runs)
    common = choose_text(models, unusual)
    apart = {model.name for model in unusual if model not in common.others}
    measured = []
    for member in members:
        changes = {}
        if member.model in apart:
            changes = refuse_comparison(member, common.text)
        elif member.model in common.models:
            changes = evaluate_on(member, common, results, make)
        measured.append(member.model_copy(update=changes))
    return measured


class CommonText(NamedTuple):
    """What models are evaluated on so that their losses can be compared."""

    text: Artifact  # whose held-out documents are measured
    others: list[Artifact]  # that must hold out a document too
    how: Evaluate
    models: set[str]  # names of those that are evaluated: not those that have already measured all of this


def choose_text(models: list[Artifact], unusual: list[Artifact]) -> CommonText:
    """The text of the first model, or what of it those `unusual` ones hold out too that hold out enough of it."""
    first = models[0]
    sharing = [model for model in unusual if share_in_common(first, model) >= FEWEST_IN_COMMON]
    held = {model.name: model.stats["heldout"] for model in models}
    is_cut = any("of_digest" in one for one in held.values())
    most = max(one["characters"] for one in held.values())
    how = Evaluate(characters=most) if is_cut else Evaluate()
    texts = {name: heldout_digest(one) for name, one in held.items()}
    evaluated = {name for name, digest in texts.items() if sharing or is_cut or digest != texts[first.name]}
    return CommonText(first, sharing, how, evaluated)


def refuse_comparison(member: Member, first: Artifact) -> dict:
    """The fields of a member whose losses say nothing beside those of the first model."""
    why = f"Too little of the held-out text of {first.name} is held out of {member.model} too, to compare losses."
    return {"compared": False, "problem": member.problem or why}


def find_unusual(
    first: Artifact, others: list[Artifact], members: list[Member], runs: list[StudyRun]
) -> list[Artifact]:
    """The models that hold out documents in another way than the first."""
    settings = {}
    for member, run in zip(members, runs, strict=True):
        if member.model and run.recipe:
            settings[member.model] = holding_out(run.recipe)
    return [model for model in others if settings[model.name] != settings[first.name]]


def holding_out(recipe: Recipe) -> tuple:
    """The settings that decide which documents are held out, and what their text is.

    With other values, a model may be trained on text that the first one holds out. Which passages are cut as repeated
    depends on the whole corpus.
    """
    cut = (recipe.download, recipe.deduplicate) if "substring" in recipe.deduplicate.methods else None
    return recipe.tokenize.heldout_fraction, cut


def evaluate_on(member: Member, common: CommonText, results: Results, make: Callable[[Step], Artifact]) -> dict:
    """Evaluate a member's model on the common text; the fields of Member with the result or the problem."""
    given = (results[member.model], common.text, common.others)
    step = Step(evaluate, common.how, given, (member.run, f"seed {member.seed}"))
    try:
        found = make(step)
    except Exception as error:
        log.warning("%s failed: %s", step.title, error)
        return {"compared": False, "problem": member.problem or sentence_of(error)}
    results[found.name] = found
    return {"evaluation": found.name}


def judged_of_members(members: list[Member], results: Results) -> list[Artifact]:
    """The minimal pairs of the members."""
    names = dict.fromkeys(chain.from_iterable(member.judged for member in members))
    return [results[name] for name in names]


def artifacts_of_members(members: list[Member], kind: str, results: Results) -> list[Artifact]:
    """The distinct models, evaluations or reports of the members."""
    names = dict.fromkeys(getattr(member, kind) for member in members)
    return [results[name] for name in names if name]
