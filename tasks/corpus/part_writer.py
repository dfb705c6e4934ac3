"""Writing documents as parts in a thread of its own, with a state from which an interrupted download resumes."""

import json
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.corpus.parts import ROW_GROUP_CHARACTERS, Document, table, writer
from tasks.store import fsync


class PartWriter:
    """Writes documents as parts; a context manager.

    The caller decides where a part ends, and then passes the state of its work. The state is saved after the part and
    `log`, a file to which the caller appends, are on disk.
    """

    def __init__(self, out: Path, log: Path, state: Path, parts: int) -> None:
        self.out, self.log, self.state, self.parts = out, log, state, parts
        self.characters, self.waiting, self.waiting_characters = 0, [], 0
        self.file: pq.ParquetWriter | None = None
        self.pool, self.pending = ThreadPoolExecutor(1, thread_name_prefix="write"), deque[Future]()
        self.failed = False

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, failure: type | None, *_: object) -> None:
        self.pool.shutdown(cancel_futures=bool(failure))
        if self.file is not None:  # an incomplete part, which a rerun writes again
            with suppress(OSError):
                self.file.close()
            self.file.is_open = False  # or it would try again when it is garbage-collected

    def write(self, document: Document) -> None:
        """Add a document to the part."""
        self.waiting.append(document)
        self.characters += len(document.text)
        self.waiting_characters += len(document.text)
        if self.waiting_characters >= ROW_GROUP_CHARACTERS:
            self._flush()

    def end_part(self, state: dict, spent: list[Path]) -> None:
        """End the part, unless it is empty; save the state, and delete downloaded shards that are no longer needed."""
        self._flush()
        self.parts += bool(self.characters)
        self.characters = 0
        self._submit(self._end, json.dumps(state | {"parts": self.parts}), spent)

    def wait(self) -> None:
        """Wait until everything is written."""
        while self.pending:
            self.pending.popleft().result()

    def _flush(self) -> None:
        if self.waiting:
            self._submit(self._write, self.out / f"part-{self.parts:05d}.parquet", table(self.waiting))
            self.waiting, self.waiting_characters = [], 0

    def _submit(self, work: Callable, *arguments: object) -> None:
        self.pending.append(self.pool.submit(self._unless_failed, work, *arguments))
        while len(self.pending) > 2:  # waiting row groups are held in memory
            self.pending.popleft().result()

    def _unless_failed(self, work: Callable, *arguments: object) -> None:
        if self.failed:  # a part without a row group must not look complete
            return
        try:
            work(*arguments)
        except BaseException:
            self.failed = True
            raise

    def _write(self, path: Path, rows: pa.Table) -> None:
        if self.file is None:
            self.file = writer(path)
        self.file.write_table(rows)

    def _end(self, state: str, spent: list[Path]) -> None:
        if self.file is not None:
            self.file.close()
            fsync(Path(self.file.where))
            self.file = None
        half = self.state.with_suffix(".half")
        half.write_text(state)
        fsync(self.log)
        fsync(half)
        half.replace(self.state)
        for path in spent:
            path.unlink(missing_ok=True)
