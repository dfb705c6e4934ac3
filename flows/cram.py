"""The flow: from raw text to a GLUE table. Read it top to bottom; each line is a stage, an artifact and a cache."""

import logging
import re

from prefect import flow

from flows.flow_runs import register
from flows.plan import Plan, Step
from flows.recipes import Override, RecipeName, StageName, Use, resolve, without_empty
from model import InputError
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


class OneSentence(logging.Filter):
    """Shows a user's error as one sentence in the log; tracebacks are for bugs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Drop what says an InputError again, and its traceback."""
        said, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
        if isinstance(error, InputError):
            record.msg, record.args, record.exc_info = str(error), (), None
            record.input_error, again = True, getattr(error, "told", False)
            error.told = True  # by the task; the flow fails of it too
            return not again
        record.msg, record.args = re.sub(r"(?s)(Finished in state \w+\().*InputError: .*", r"\1)", said), ()
        return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(OneSentence())
for name in ("flows", "tasks", "model"):  # Prefect's setting extra_loggers sends them on, but leaves their level alone
    logging.getLogger(name).setLevel(logging.INFO)


def planned(recipe: str, override: dict, until: str, use: dict[str, str], refresh: list[str]) -> Plan:
    """The stages in their order, each with its parameters and with what it reads. Nothing runs yet."""
    r = resolve(recipe, override)
    plan = Plan(until, use, refresh)
    if not {"tokenize", "pretrain", "finetune"} & set(use):  # else their model says it
        r.check_lengths(until)
    corpus = plan(download, r.download)
    unique = plan(deduplicate, r.deduplicate, corpus)
    clean = plan(decontaminate, r.decontaminate, unique)
    measures = plan(measure, r.measure, clean)
    kept = plan(drop_incompressible, r.filter, clean, measures)
    words = plan(train_vocabulary, r.vocabulary, kept)
    sequences = plan(tokenize, r.tokenize, kept, words)
    bert = plan(pretrain, r.pretrain, sequences)
    runs: list[Step] = []
    for run, first in r.finetune.runs():  # protocol modern: some start from the run on MNLI
        runs.append(plan(finetune, run, bert if first is None else runs[first]))
    plan(report, r.report, runs)
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
    plan.tell_unused(without_empty(override))
    try:
        return plan.run()
    finally:
        reporter.flush(SECONDS_AT_THE_END)
