"""Any data set of the hub, or a folder in the hub's layout, streamed by `datasets`: its formats, configs and splits.

Slower than the reader of the named sources (a quarter of its speed on .jsonl.zst, 0.6 of it on Parquet), which
know where their shards lie.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from model import InputError
from tasks.corpus import hub, local
from tasks.corpus.columns import Layout, read_rows
from tasks.corpus.parts import Document
from tasks.corpus.rows import Loss, Row

if TYPE_CHECKING:
    from datasets import IterableDataset

REFUSALS = (  # of `datasets`: its message, what to tell the user
    (
        r"Dataset scripts are no longer supported.* (\S+)",
        "needs code of its own ({0}), which cram and `datasets` don't run. Use a version of it in Parquet (many have "
        "the revision refs/convert/parquet), or convert it.",
    ),
    (r"BuilderConfig '(.*)' not found\. Available: (.*)", "has no config {0}. It has {1}. Set download.config."),
    (r"Config name is missing.*available configs: (.*?\])", "has several configs: {0}. Set download.config to one."),
    (r"Bad split: (.*)\. Available splits: (.*)", "has no split {0}. It has {1}. Set download.split to one of them."),
)


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
        return path if local.is_folder(path) else None

    def identity(self) -> dict:
        """What identifies the content in a key: the commit on the hub, or the digests of a folder's files."""
        about, top = {"config": self.config, "split": self.split}, self.folder
        if not top:
            commit = hub.commit(hub.Source(self.dataset, self.revision, ""))  # the newest at first use
            return about | {"repository": self.dataset, "revision": commit}
        if self.revision:
            raise InputError(f"revision is {self.revision!r}, but {top} is a folder, which has none. Leave it out.")
        files = sorted(file for _, inner in local.walk(top, hidden=False) for file in inner)
        return about | {"files": [[str(file.relative_to(top)), local.file_digest(file)] for file in files]}

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

    def refusal(self, problem: Exception) -> InputError:
        """What to tell the user if `datasets` can't read it."""
        reason = " ".join(str(problem).split()).rstrip(".")
        for pattern, said in REFUSALS:
            if match := re.match(pattern, reason):
                return InputError(f"{self.dataset} {said.format(*match.groups())}")
        if self.folder or isinstance(problem, ValueError | TypeError | KeyError):
            why = f"{type(problem).__name__}: {reason}"
            return InputError(f"{self.dataset} can't be read by `datasets`: {why}. Expected files in the hub's layout.")
        return hub.error(self.dataset, problem)


class Stream:
    """Reads the rows of a data set in order, as `Reader` of the stage does the files of the other sources.

    `at` is where an earlier attempt stopped, as the property of that name gave it.
    """

    name, hub, size, bytes = "hub", None, 0, 0  # it has no sets of its own, and its size isn't known

    def __init__(self, split: Split, columns: dict[str, str], at: dict | None) -> None:
        self.split, self.identity, folder = split, split.identity(), split.folder
        title = "/".join(filter(None, (folder.name if folder else split.dataset, split.config, split.split)))
        self.layout = Layout(title, **columns, form="datasets")
        self.rows, self.shard, self.records = split.opened(self.identity.get("revision")), 0, 0
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

    def check_unchanged(self) -> None:
        """Raise Damage if a file of a folder no longer has the digest that is in the key."""
        if self.split.folder and self.split.identity() != self.identity:
            raise local.changed(self.split.dataset)
