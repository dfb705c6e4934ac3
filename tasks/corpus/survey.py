"""Which local files can't be read, found by their beginnings before anything is written; and whether too many can't.

A file that was given by its own path must be readable. Others may be skipped, up to the share `max_lost` of the files.
"""

import functools
import io
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from model.errors import InputError, warn_once
from model.wording import counted, printable
from tasks.corpus.columns import Layout
from tasks.corpus.containers import BUFFER, content_of, reading
from tasks.corpus.formats import Records, Skipped, is_empty_file, read_file
from tasks.corpus.kinds import FORMATS, MARKUP, counted_kinds, ending, family
from tasks.corpus.local import IS_NOWHERE, NAMED, NOWHERE, Local
from tasks.corpus.losses import NOTHING, UNREADABLE, Losses
from tasks.corpus.parts import Document
from tasks.corpus.rows import Loss

LOOKED_AT = 4_000_000  # characters of documents beyond the first two records of each file
LOSS = 100  # characters as which one without text counts
SHOWN = 100  # files that an error names
Key = tuple[tuple[str, Path, tuple[int, ...]], ...]  # names, paths, and what changes when a file does


class Looked:
    """What the beginnings of files gave. `options`: of a Layout."""

    def __init__(self, options: tuple[tuple[str, str], ...]) -> None:
        self.options = dict(options)
        self.flaws: dict[str, Loss] = {}  # of whole files, by name
        self.losses: list[Loss] = []  # of records
        self.skipped: Counter = Counter()  # files in archives, by kind
        self.doubts: dict[str, str] = {}  # why a file may be no prose
        self.documents, self.left = 0, LOOKED_AT
        self.is_all = True  # there is nothing more in the files

    def look_at(self, name: str, path: Path) -> None:
        """Read the first records of a file."""
        layout = Layout(family(name), **self.options)
        try:
            with path.open("rb", BUFFER) as file, closing(beginning(file, name, layout)) as records:
                found = list(self.first_of(records))
        except InputError as error:
            self.flaws[name] = Loss(name, 0, UNREADABLE, str(error))
            return
        if any(is_empty_file(record, layout) for record in found):
            self.flaws[name] = Loss(name, 0, NOTHING)
            return
        if layout.doubt:
            self.doubts[name] = layout.doubt
        self.is_all = self.is_all and layout.form not in MARKUP.values()
        self.documents += len(found)
        for record in found:
            if isinstance(record, Loss):
                self.losses.append(record)
                self.documents -= 1
            elif isinstance(record, Skipped):
                self.skipped[record.kind] += 1
                self.documents -= 1

    def first_of(self, records: Records) -> Iterator[Document | Loss | Skipped]:
        """The records of a file, as many as are to be looked at and at least two; documents without their text."""
        for number, record in enumerate(records):
            is_document = isinstance(record, Document)
            self.left -= len(record.text) if is_document else LOSS
            yield record._replace(text="") if is_document else record
            if self.left < 0 and number:
                self.is_all = False
                return


@functools.lru_cache(maxsize=4)  # a plan, its check and its run ask for the same
def looked_at(files: Key, options: tuple[tuple[str, str], ...]) -> Looked:
    """What the beginnings of files give."""
    looked = Looked(options)
    for name, path, _ in files:
        looked.look_at(name, path)
    return looked


def beginning(file: io.BufferedReader, name: str, layout: Layout) -> Records:
    """The records of a file; of a page, whose text takes long to find, none."""
    if FORMATS.get(ending(name)) not in MARKUP.values():
        yield from read_file(file, name, layout)
        return
    with reading(name):
        layout.form, _ = content_of(file, name, layout.encoding, layout.extract)


def look(found: Local, options: dict[str, str]) -> Looked:
    """What the beginnings of local files give. `options`: of a Layout."""
    files = tuple((name, path, identity(path)) for name, path in found.files.items())
    return looked_at(files, tuple(options.items()))


def flaws_of(found: Local, options: dict[str, str]) -> dict[str, Loss]:
    """The losses of whole files, by name. `options`: of a Layout."""
    return look(found, options).flaws | {name: Loss(name, 0, NOWHERE) for name in found.gone}


def warn_of_doubts(found: Local, options: dict[str, str]) -> None:
    """Log which text files may be no prose."""
    doubts = look(found, options).doubts
    for doubt in dict.fromkeys(doubts.values()):
        names = [name for name, of in doubts.items() if of == doubt]
        warn_once(f"A text file {doubt}: {shown(names)}. All of that is trained on; leave out what is no prose.")


def check_records(found: Local, options: dict[str, str], max_lost: float, what: str) -> None:
    """Raise InputError, with the lost records, if the beginnings of the files are all that they have, and too many.

    `what`: the files as they were asked for.
    """
    looked = look(found, options)
    if looked.is_all:
        lines = [f"{loss.file}, line {loss.line}: {loss.reason}: {loss.sample}" for loss in looked.losses]
        listed = "\n  ".join(map(printable, lines[:SHOWN]))
        losses = [*flaws_of(found, options).values(), *looked.losses]
        Losses(losses).check(what, looked.documents, max_lost, looked.skipped, f"They are:\n  {listed}")


def shown(names: list[str]) -> str:
    """The first names of a list."""
    return ", ".join(names[:NAMED]) + ", …" * (len(names) > NAMED)


def identity(path: Path) -> tuple[int, ...]:
    """What changes when a file does."""
    about = os.stat(path)
    return about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns


def check_files(flaws: dict[str, Loss], given: set[str], total: int, max_lost: float) -> None:
    """Raise InputError with all flaws if a file that was given itself has one, or if too many of `total` files have.

    Below that, it warns of them. An empty file and a broken link take no text away, so there may always be one.
    """
    unreadable = [name for name, loss in flaws.items() if loss.reason == UNREADABLE]
    without_text = len(flaws) - len(unreadable)
    is_given = any(name in given for name in unreadable)
    if is_given or len(unreadable) > max_lost * total or without_text > max(1, max_lost * total):
        raise InputError(refusal_of(flaws, total, max_lost, is_given))
    if flaws:
        kinds = counted_kinds(loss.reason for loss in flaws.values())
        warn_once(
            f"Of {counted(total, 'file')} in download.files, these can't be read and are skipped: {kinds} "
            f"({shown(list(flaws))}). lost.jsonl lists them with the reasons."
        )


def refusal_of(flaws: dict[str, Loss], total: int, max_lost: float, is_given: bool) -> str:
    """What is said of flaws that are too many; of one that is all there is, or that was given itself, only its own."""
    said = {UNREADABLE: "", NOTHING: " is empty.", NOWHERE: f" {IS_NOWHERE}"}
    sentences = [loss.sample or f"{name}{said[loss.reason]}" for name, loss in flaws.items()]
    share = f"{len(sentences):,} of {counted(total, 'file')} can't be read, and download.max_lost allows {max_lost:.1%}"
    if len(sentences) == 1:
        return sentences[0] if is_given or total == 1 else f"{sentences[0]} ({share}.)"
    rest = [f"… and {len(sentences) - SHOWN:,} more."] if len(sentences) > SHOWN else []
    listed = "\n  ".join(sentences[:SHOWN] + rest)
    return f"{share}:\n  {listed}\nCorrect or delete them, or raise download.max_lost."
