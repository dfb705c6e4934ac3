"""The validation and test sentences of GLUE, which decontamination looks for in the corpus."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from model import InputError
from tasks.glue import data
from tasks.glue.tasks import HUB_GLUE, TASKS

SENTENCES_AT_ONCE = 1 << 16


def sentences(paths: list[Path], task: str) -> Iterator[tuple[str, int, list[str]]]:
    """The sentences of a split, many at a time: column, row of the first, texts.

    Raises InputError if a file lacks a column of the task, or has something else than text in it.
    """
    row = 0
    for path in paths:
        where = f"{task}/{path.name}"
        table = data.read_file(path, where, optional=TASKS[task].columns)
        check_columns(table.schema, task, where)
        for batch in table.to_batches(SENTENCES_AT_ONCE):
            for name in TASKS[task].columns:
                yield name, row, [text or "" for text in batch[name].to_pylist()]
            row += batch.num_rows


def check_columns(schema: pa.Schema, task: str, where: str) -> None:
    """Raise InputError unless a file has the texts of the task."""
    for name in TASKS[task].columns:
        kind = schema.field(name).type if name in schema.names else None
        if kind not in (pa.string(), pa.large_string()):
            problem = f"no column {name}" if kind is None else f"{kind} in the column {name}"
            raise InputError(
                f"{where} has {problem}; expected text, as in {HUB_GLUE.repository}. Correct it, or leave {task} out "
                "of decontaminate.tasks."
            )
