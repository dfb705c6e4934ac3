"""The flow: from raw text to a GLUE table. Each line of `add` is a stage; its artifact is cached."""

from pathlib import Path

from prefect import flow, tags
from prefect.runtime import flow_run

from flows import disk
from flows.logs import configure
from flows.plan import Plan, Step
from flows.recipes.recipe import Override, Recipe, RecipeName, StageName, Use, resolve, without_empty
from tasks.decontaminate import decontaminate
from tasks.deduplicate import deduplicate
from tasks.download import download
from tasks.filter import filter
from tasks.finetune import finetune
from tasks.measure import measure
from tasks.pretrain import pretrain
from tasks.report import report
from tasks.store.artifacts import Artifact
from tasks.store.gc import keep_while_running
from tasks.tokenize import tokenize
from tasks.vocabulary import vocabulary

configure()


def add(plan: Plan, r: Recipe, run: tuple[str, ...] = ()) -> dict[str, Step]:
    """Add the stages in order, each with its params and inputs. Returns the steps of the model and of the report.

    Each line declares a task run; `Plan.run` calls the tasks, those of finetuning in a task runner. `run`: if the plan
    has several runs, what distinguishes this one.
    """
    corpus = plan.add(run, download, r.download)
    unique = plan.add(run, deduplicate, r.deduplicate, corpus)
    clean = plan.add(run, decontaminate, r.decontaminate, unique)
    measures = plan.add(run, measure, r.measure, clean)
    kept = plan.add(run, filter, r.filter, clean, measures)
    words = plan.add(run, vocabulary, r.vocabulary, kept)
    sequences = plan.add(run, tokenize, r.tokenize, kept, words)
    bert = plan.add(run, pretrain, r.pretrain, sequences)
    finetuned = [plan.add(run, finetune, params, bert) for params in r.finetune.runs()]
    page = plan.add(run, report, r.report, finetuned)
    return {"pretrain": bert, "report": page}


def laid_out(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The plan of a run, not yet checked."""
    r, plan = resolve(recipe, override), Plan(until, use, refresh)
    if not {"tokenize", "pretrain", "finetune"} & set(use):  # else the length of the given artifact counts
        r.check_lengths(until)
    add(plan, r)
    plan.warn_of_unused(without_empty(override))
    return plan


def planned(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The plan of a run, checked for every mistake that can be known before it starts."""
    plan = laid_out(recipe, override, until, use, refresh)
    for error in plan.check().values():
        raise error
    return plan


def run_name() -> str:
    """The name of a flow run: its recipe, or its study, before the name that Prefect gave it."""
    given = flow_run.parameters
    return f"{Path(given.get('study') or given['recipe']).stem}-{flow_run.name}"


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
    plan = planned(recipe, override, until, use, refresh)
    disk.check(plan)
    with tags(recipe, f"until {until}"), keep_while_running(plan.made.values(), *plan.given.values()):
        plan.run()
    return plan.results()
