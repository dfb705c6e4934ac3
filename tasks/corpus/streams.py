"""Any data set of the hub, or a folder in its layout, streamed by `datasets` with its formats, configs and splits.

It is slower than reading files: a quarter of the speed on .jsonl.zst, 0.6 of it on Parquet.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from model.errors import InputError
from tasks.corpus import hub, local
from tasks.corpus.columns import drift, text_column
from tasks.corpus.documents import Options, Origin, Records, documents_in
from tasks.corpus.rows import Row
from tasks.store.manifests import known_digest

if TYPE_CHECKING:
    from datasets import Features, IterableDataset

READING = 2  # raise it when the same data set yields other documents: it enters the keys of what `datasets` reads
OF_DATA = ValueError | TypeError | KeyError | RuntimeError  # errors of `datasets` that no network or disk causes
log = logging.getLogger(__name__)


class Split(NamedTuple):
    """Which rows are read; the parameters of `download` by these names."""

    dataset: str
    config: str
    split: str
    revision: str

    @property
    def folder(self) -> Path | None:
        """Where the data set is on this machine; None if it is on the hub."""
        path = Path(self.dataset).expanduser()
        return path if path.is_dir() else None

    @property
    def title(self) -> str:
        """Its name, config and split; of a folder, its own name only."""
        name = self.folder.name if self.folder else self.dataset
        return "/".join(part for part in (name, self.config, self.split) if part)

    def identity(self) -> dict:
        """What identifies the content in a key: the commit on the hub, or the digests of a folder's files."""
        about = {"config": self.config, "split": self.split, "reading": READING}
        top = self.folder
        if not top:
            return about | {"repository": self.dataset, "revision": self.commit()}
        if self.revision:
            raise InputError(
                f"revision is {self.revision!r}, but {top} is a folder, and folders have no revision. Leave it out."
            )
        digests = []
        for file in local.files_below(top, hidden=False):
            digests.append([str(file.relative_to(top)), known_digest(file)])
        return about | {"files": digests}

    def commit(self) -> str | None:
        """The commit on the hub, that of a branch at its first use; None for a folder."""
        return None if self.folder else hub.commit(hub.Source(self.dataset, self.revision, ""))

    def stream(self) -> "tuple[IterableDataset, list[str]]":
        """The rows, of which only what is read is fetched, and the files that they are in, in order, if known.

        A row is a table of Arrow with the columns and types of its own file. Raises InputError if there are none.
        """
        from datasets import disable_progress_bars, load_dataset_builder
        from datasets import logging as logging_of_datasets

        disable_progress_bars()
        logging_of_datasets.set_verbosity(logging_of_datasets.CRITICAL)  # its errors are raised too
        try:
            builder = load_dataset_builder(
                str(self.folder or self.dataset), self.config or None, revision=self.commit()
            )
            rows = builder.as_streaming_dataset(split=self.split)
        except Exception as problem:  # `datasets` raises its own, the hub's client's and the file systems' errors
            raise self.refusal(problem) from problem
        # Otherwise all rows would be cast to the first file's columns: where the files differ, reading would end, or
        # numbers and objects in the place of texts would become texts.
        builder.info.features = rows.info.features = None
        files = (builder.config.data_files or {}).get(self.split, [])
        return rows.with_format("arrow"), [str(file) for file in files]

    def refusal(self, problem: Exception, instead: str = hub.OWN_TEXT) -> InputError:
        """The error that the user sees if `datasets` can't open it. `instead`: advice if the hub doesn't provide it."""
        if not self.folder and not isinstance(problem, OF_DATA):
            return hub.error(self.dataset, problem, instead)
        if isinstance(problem, pa.ArrowException | UnicodeError):  # the files were found
            return self.unreadable(problem, "in its first file")
        return InputError(
            f"{self.dataset} can't be read by `datasets`: {words_of(problem)}. Expected files in the hub's layout, "
            "without code. Correct config, split or revision (of download, or of the task)."
        )

    def unreadable(self, problem: Exception, where: str) -> InputError:
        """The error that the user sees for rows that `datasets` can't read."""
        if not self.folder and not isinstance(problem, OF_DATA):
            return hub.error(self.dataset, problem)
        said = words_of(problem)
        return InputError(f"{self.dataset} can't be read by `datasets` ({where}): {said}. {self.how_to_repair}.")

    @property
    def how_to_repair(self) -> str:
        """Advice on a file that can't be read."""
        if self.folder:
            return "Repair that file, or leave it out"
        return (
            "Copy the data set (`hf download --repo-type dataset`), name the folder of the copy in place of it, and "
            "repair that file there or leave it out"
        )


def differs_in(name: str, before: pa.Schema, after: pa.Schema) -> bool:
    """Whether a column has another type than before, or is missing."""
    return name not in after.names or after.field(name).type != before.field(name).type


def words_of(problem: Exception) -> str:
    """The words of an error of `datasets`, on one line."""
    words = " ".join(str(problem).partition("Example of usage")[0].split()).rstrip(".")
    return words or type(problem).__name__


class StreamReader:
    """Reads the rows of a data set in order, as `sources.Reader` does the files of the other sources.

    `at` is where an earlier attempt stopped, as the property of that name gave it.
    """

    def __init__(self, split: Split, options: Options, at: dict | None) -> None:
        self.split = split
        self.options = options
        self.title = split.title
        self.rows, self.files = split.stream()
        self.shard = 0
        self.records = 0
        self.text = ""  # the column with the text, once a row was read
        self.schema: pa.Schema | None = None  # of the last row
        self.encoded: Features | None = None  # its types, if values of it are encoded as JSON
        self.drifts = False  # whether files were found to differ
        self.is_begun = False  # a row was read; until then, `datasets` says that it stands at the beginning
        self.start = at["state"] if at else self.rows.state_dict()
        if at:
            self.records = at["records"]
            self.rows.load_state_dict(self.start)

    @property
    def at(self) -> dict:
        """Where it stands, as JSON."""
        return {"records": self.records, "state": self.rows.state_dict() if self.is_begun else self.start}

    @property
    def ended(self) -> bool:
        """Whether the whole split has been read."""
        return self.shard == 1

    def __iter__(self) -> Records:
        """The records that are left. Raises InputError if the data set can't be read on."""
        origin = Origin("datasets", self.title, self.title, self.options)
        yield from documents_in(self._rows(), origin, same_columns=True)
        self.shard = 1

    def _rows(self) -> Iterator[Row]:
        try:
            for table in self.rows:
                self.is_begun = True
                if table.schema != self.schema:
                    self._note_schema(table.schema)
                [record] = table.to_pylist()
                self.records += 1
                if self.encoded:
                    record = self.encoded.decode_example(record)
                if not self.text:
                    self.text = text_column(record, self.options.column, self.title, optional=False)
                yield Row(self.records, record)
        except InputError:
            raise
        except Exception as problem:  # as in `stream`
            raise self.split.unreadable(problem, self._place()) from problem

    def _note_schema(self, schema: pa.Schema) -> None:
        """Of the columns and types from the next row on. Raises InputError if a column that is read is missing."""
        from datasets import Features

        before = self.schema
        self.schema = schema
        # `datasets` encodes a column whose values are of several types
        self.encoded = Features.from_arrow_schema(schema.remove_metadata()) if "arrow.json" in str(schema) else None
        differs = drift(before, schema) if before else ""
        if before and differs:
            self._check_drift(before, schema, differs)

    def _check_drift(self, before: pa.Schema, schema: pa.Schema, differs: str) -> None:
        """Log that columns differ, once or where it concerns those that are read. Raises as `_note_schema`."""
        text = self.text.partition(".")[0]
        source = self.options.source_column.partition(".")[0]
        if text in before.names and text not in schema.names:
            raise InputError(
                f"{self.split.dataset} has other columns {self._place()} than before: {differs}. Expected the text in "
                f"the same column of every file. {self.split.how_to_repair}; or read the folder with download.source "
                "files, which looks for the text in each file."
            )
        is_read = [name for name in (text, source) if name in before.names]
        concerns = any(differs_in(name, before, schema) for name in is_read)
        if concerns or not self.drifts:
            level = logging.WARNING if concerns else logging.INFO
            log.log(level, "%s has other columns %s than before: %s.", self.title, self._place(), differs)
        self.drifts = True

    def _place(self) -> str:
        """Where reading stands: the file, as far as it is known, and the row."""
        state = self.rows.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        number = state.get("shard_idx", len(self.files))
        row = f"after row {self.records:,}"
        if number >= len(self.files):
            return row
        address = f"hf://datasets/{self.split.dataset}@{self.split.commit()}/"
        return f"in {self.files[number].removeprefix(address)}, {row}"
