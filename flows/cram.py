"""The flow: from raw text to a GLUE table. Read it top to bottom; each line is a stage, an artifact and a cache."""

import logging

from prefect import flow

from flows.plan import Plan
from flows.recipes import Override, RecipeName, StageName, Use, resolve
from model import InputError
from tasks.corpus import download
from tasks.decontaminate import decontaminate
from tasks.dedup import deduplicate
from tasks.filter import drop_incompressible
from tasks.glue import finetune
from tasks.pretrain import pretrain
from tasks.report import report
from tasks.stage import Artifact
from tasks.tokens import tokenize
from tasks.vocabulary import train_vocabulary


class WithoutTraceback(logging.Filter):
    """What the user can mend is a sentence in the log; tracebacks are for bugs."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the record; drop the traceback of an InputError."""
        if record.exc_info and isinstance(record.exc_info[1], InputError):
            record.exc_info = None
        return True


for name in ("prefect.flow_runs", "prefect.task_runs"):
    logging.getLogger(name).addFilter(WithoutTraceback())
for name in ("flows", "tasks", "model"):  # Prefect's setting extra_loggers sends them on, but leaves their level alone
    logging.getLogger(name).setLevel(logging.INFO)


@flow(name="cram", log_prints=True)
def cram(
    recipe: RecipeName = "crammed-bert",
    override: Override = {},
    until: StageName = "report",
    use: Use = {},
    refresh: list[StageName] = [],
) -> list[Artifact]:
    """Pretrain a BERT-class encoder from scratch within a budget, and score it on GLUE.

    Args:
        recipe: A named set of all parameters.
        override: What of the recipe to change, as {"filter": {"max_tokens_per_char": 0.25}}.
        until: The last stage to run.
        use: Artifact keys to take in place of running their stages, as {"pretrain": "0123456789ab"}.
        refresh: Stages to run again though they are cached.
    """
    r = resolve(recipe, override)
    plan = Plan(until, use, refresh)
    corpus = plan(download, r.download)
    unique = plan(deduplicate, r.deduplicate, corpus)
    clean = plan(decontaminate, r.decontaminate, unique)
    kept = plan(drop_incompressible, r.filter, clean)
    words = plan(train_vocabulary, r.vocabulary, kept)
    sequences = plan(tokenize, r.tokenize, kept, words)
    bert = plan(pretrain, r.pretrain, sequences)
    runs = [plan(finetune, run, bert) for run in r.finetune.runs()]
    plan(report, r.report, runs)
    plan.tell_unused(override)
    return plan.run()
