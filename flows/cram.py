"""The flow: from raw text to a GLUE table. Read it top to bottom; each line is a stage, an artifact and a cache."""

from prefect import flow

from flows.flow_runs import register
from flows.logs import configure
from flows.plan import Plan, Step
from flows.recipes import Override, Recipe, RecipeName, StageName, Use, resolve, without_empty
from tasks.decontaminate import decontaminate
from tasks.deduplicate import deduplicate
from tasks.download import download
from tasks.filter import drop_incompressible
from tasks.finetune import finetune
from tasks.measure import measure
from tasks.pretrain import pretrain
from tasks.report import report
from tasks.store import Artifact
from tasks.tokenize import tokenize
from tasks.vocabulary import train_vocabulary
from tasks.workers.progress import SECONDS_AT_THE_END, reporter

configure()


def add(plan: Plan, r: Recipe) -> dict[str, Step]:
    """Add the stages in order, each with its params and inputs. Returns the steps of the model and of the report."""
    corpus = plan(download, r.download)
    unique = plan(deduplicate, r.deduplicate, corpus)
    clean = plan(decontaminate, r.decontaminate, unique)
    measures = plan(measure, r.measure, clean)
    kept = plan(drop_incompressible, r.filter, clean, measures)
    words = plan(train_vocabulary, r.vocabulary, kept)
    sequences = plan(tokenize, r.tokenize, kept, words)
    bert = plan(pretrain, r.pretrain, sequences)
    finetuned: list[Step] = []
    for params, start in r.finetune.runs():  # protocol modern: some start from the run on MNLI
        finetuned.append(plan(finetune, params, bert if start is None else finetuned[start]))
    page = plan(report, r.report, finetuned)
    return {"pretrain": bert, "report": page}


def planned(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The plan of a run. Nothing runs yet."""
    r, plan = resolve(recipe, override), Plan(until, use, refresh)
    if not {"tokenize", "pretrain", "finetune"} & set(use):  # else the length of the given artifact counts
        r.check_lengths(until)
    add(plan, r)
    return plan


@flow(name="cram", flow_run_name=register, log_prints=True)
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
        use: Artifact keys to take in place of running their stages, as {"pretrain": "0123456789ab"}.
        refresh: Stages to run again though they are cached.
    """
    plan = planned(recipe, override, until, use, refresh)
    plan.warn_of_unused(without_empty(override))
    try:
        return plan.run()
    finally:
        reporter.flush(SECONDS_AT_THE_END)
