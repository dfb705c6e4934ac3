"""Any data set of the hub, or a folder in the hub's layout, streamed by `datasets`: its formats, configs and splits.

Slower than the reader of the named sources (a quarter of its speed on .jsonl.zst, 0.6 of it on Parquet), which
know where their shards lie.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from model import InputError
from tasks.corpus import hub, local
from tasks.corpus.columns import Layout, read_rows
from tasks.corpus.parts import Document
from tasks.corpus.rows import Loss, Row
from tasks.store import known_digest

if TYPE_CHECKING:
    from datasets import IterableDataset


class Split(NamedTuple):
    """Which rows are read; the parameters of `download` by these names."""

    dataset: str
    config: str
    split: str
    revision: str

    @property
    def folder(self) -> Path | None:
        """Where the data set lies on this machine; None if it is on the hub."""
        path = Path(self.dataset).expanduser()
        return path if path.is_dir() else None

    def identity(self) -> dict:
        """What identifies the content in a key: the commit on the hub, or the digests of a folder's files."""
        about, top = {"config": self.config, "split": self.split}, self.folder
        if not top:
            commit = hub.commit(hub.Source(self.dataset, self.revision, ""))  # the newest at first use
            return about | {"repository": self.dataset, "revision": commit}
        if self.revision:
            raise InputError(f"revision is {self.revision!r}, but {top} is a folder, which has none. Leave it out.")
        files = sorted(file for _, inner in local.walk(top, hidden=False) for file in inner)
        return about | {"files": [[str(file.relative_to(top)), known_digest(file)] for file in files]}

    def opened(self, commit: str | None) -> "IterableDataset":
        """The rows, of which only what is read is fetched. Raises InputError if there are none to read."""
        from datasets import disable_progress_bars, load_dataset, logging

        disable_progress_bars()
        logging.set_verbosity(logging.CRITICAL)  # its errors are raised too
        options = {"split": self.split, "revision": commit, "streaming": True}
        try:
            return load_dataset(str(self.folder or self.dataset), self.config or None, **options).decode(False)
        except Exception as problem:  # `datasets` raises its own, the hub's client's and the file systems' errors
            raise self.refusal(problem) from problem

    def refusal(self, problem: Exception, instead: str = hub.OWN_TEXT) -> InputError:
        """What to tell the user if `datasets` can't read it. `instead`: advice if the hub doesn't provide it."""
        if not self.folder and not isinstance(problem, ValueError | TypeError | KeyError | RuntimeError):
            return hub.error(self.dataset, problem, instead)
        said = " ".join(str(problem).partition("Example of usage")[0].split()).rstrip(".")
        return InputError(
            f"{self.dataset} can't be read by `datasets`: {said}. Expected files in the hub's layout, without code. "
            "Correct config, split or revision (of download, or of the task)."
        )


class Stream:
    """Reads the rows of a data set in order, as `Reader` of the stage does the files of the other sources.

    `at` is where an earlier attempt stopped, as the property of that name gave it.
    """

    def __init__(self, split: Split, columns: dict[str, str], at: dict | None) -> None:
        self.split, folder = split, split.folder
        title = "/".join(filter(None, (folder.name if folder else split.dataset, split.config, split.split)))
        self.layout = Layout(title, **columns, form="datasets")
        self.rows, self.shard, self.records = split.opened(split.identity().get("revision")), 0, 0
        if at:
            self.records = at["records"]
            self.rows.load_state_dict(at["state"])

    @property
    def at(self) -> dict:
        """Where it stands, as JSON."""
        return {"records": self.records, "state": self.rows.state_dict()}

    @property
    def ended(self) -> bool:
        """Whether the whole split has been read."""
        return self.shard == 1

    def __iter__(self) -> Iterator[Document | Loss]:
        """The records that are left. Raises InputError if the data set can't be read on."""
        yield from read_rows(self._rows(), self.layout.source, self.layout, table=True)
        self.shard = 1

    def _rows(self) -> Iterator[Row]:
        try:
            for row in self.rows:
                self.records += 1
                yield Row(self.records, row)
        except Exception as problem:  # as in `opened`
            raise self.split.refusal(problem) from problem
