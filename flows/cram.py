"""The flow: from raw text to a GLUE table. Each line of `pipeline` is a stage; its artifact is cached."""

import logging
from pathlib import Path

from prefect import flow, tags
from prefect.runtime import flow_run

from flows import disk
from flows.execute import execute
from flows.forecast import Forecast
from flows.logs import configure, lines_later
from flows.plan import Plan
from flows.recipes.recipe import (
    Override,
    Recipe,
    RecipeName,
    StageName,
    Use,
    change_stage,
    refuse_without_start,
    resolve,
    unused_fields,
    without_empty,
)
from tasks.decontaminate import decontaminate
from tasks.deduplicate import deduplicate
from tasks.download import download
from tasks.filter import filter
from tasks.finetune import finetune
from tasks.measure import measure
from tasks.minimal_pairs import minimal_pairs
from tasks.pretrain import pretrain
from tasks.report import report
from tasks.store.artifacts import Artifact
from tasks.store.gc import keep_while_running
from tasks.tokenize import tokenize
from tasks.vocabulary import vocabulary

configure()
log = logging.getLogger(__name__)


def pipeline(r: Recipe) -> Artifact:
    """From raw text to a GLUE table: each line is a stage, a cached task. Returns the report.

    The flow `cram` doesn't run these lines: it records them as a plan (plan.py), checks the plan, and runs what is
    missing (execute.py). Called by itself, `pipeline` runs them in order, without Prefect. Only plain calls are
    recorded, so there is no `.submit` or `.map` here; finetuning runs are carried out side by side all the same.
    """
    corpus = download(r.download)
    unique = deduplicate(r.deduplicate, corpus)
    clean = decontaminate(r.decontaminate, unique)
    measures = measure(r.measure, clean)
    kept = filter(r.filter, clean, measures)
    words = vocabulary(r.vocabulary, kept)
    sequences = tokenize(r.tokenize, kept, words)
    bert = pretrain(r.pretrain, sequences)
    judged = [minimal_pairs(params, bert) for params in r.minimal_pairs.runs()]
    finetuned = [finetune(params, bert) for params in r.finetune.runs()]
    return report(r.report, finetuned, judged)


def plan_run(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The plan of a run, not yet checked."""
    if "pretrain" not in use:
        refuse_without_start(recipe, override)
    r = resolve(recipe, override)
    if "finetune" in use and not {"pretrain", "minimal_pairs"} & set(use):  # the models needn't be there
        r = change_stage(r, "minimal_pairs", data=[])
    r.check_pairs(until)
    plan = Plan(until, use, refresh)
    if not {"tokenize", "pretrain", "finetune"} & set(use):  # else the length of the given artifact counts
        r.check_lengths(until)
    plan.trace(pipeline, r)
    return plan


def warn_of_unused(recipe: str, override: dict, plan: Plan) -> None:
    """Log a warning of overridden fields that no stage of the plan reads."""
    unused = unused_fields(recipe, without_empty(override), {step.stage for step in plan.steps})
    if unused:
        log.warning("This run doesn't reach %s; overrides of it have no effect.", ", ".join(unused))


def checked_plan(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The plan of a run, checked for every mistake that can be known before it starts. The log says what it will do."""
    plan = plan_run(recipe, override, until, use, refresh)
    with lines_later():
        plan.find()
        refuse_problems(plan)
        log.info(Forecast(plan).announcement(recipe))
    warn_of_unused(recipe, override, plan)
    plan.check()
    refuse_problems(plan)
    return plan


def refuse_problems(plan: Plan) -> None:
    """Raise the first error if a step of the plan is not possible."""
    for error in plan.problems.values():
        raise error


def forecast_run(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Forecast:
    """The forecast of a run of a recipe."""
    plan = plan_run(recipe, override, until, use, refresh)
    warn_of_unused(recipe, override, plan)
    plan.check(thoroughly=False)
    return Forecast(plan)


def run_name() -> str:
    """The name of a flow run: its recipe, or its study, before the name that Prefect gave it."""
    parameters = flow_run.parameters
    what = Path(parameters.get("study") or parameters["recipe"]).stem  # the flow of a study has this name too
    name = flow_run.name or ""
    return name if name.startswith(f"{what}-") else f"{what}-{name}"  # a run that is retried has it already


@flow(name="cram", flow_run_name=run_name)
def cram(
    recipe: RecipeName = "demo",
    override: Override = {},
    until: StageName = "report",
    use: Use = {},
    refresh: list[StageName] = [],
) -> list[Artifact]:
    """Pretrain a BERT-class encoder from scratch within a budget, and score it on GLUE.

    Args:
        recipe: Name of a recipe. The demo takes minutes; crammed-bert, the paper's recipe, trains for 24 hours.
        override: Changes to the recipe, as {"filter": {"max_tokens_per_char": 0.25}}. Empty fields change nothing.
        until: The last stage to run.
        use: Artifact keys to take in place of running their stages, as {"pretrain": "0123456789ab"}; of pretrain also a
            folder with a model.
        refresh: Stages to run again though they are cached.
    """
    plan = checked_plan(recipe, override, until, use, refresh)
    disk.check(plan)
    # the tags are those of the task runs; what the plan needs is kept from a `cram gc` beside this run
    with tags(recipe, f"until {until}"), keep_while_running(plan.needed()):
        execute(plan)
    return plan.results()
