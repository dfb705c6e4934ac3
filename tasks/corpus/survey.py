"""Which local files can't be read, found by their beginnings before anything is written; and whether too many can't.

A file that was given by its own path must be readable. Others may be skipped, up to the share `max_lost` of the files.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from model.errors import InputError, warn_once
from model.wording import counted, printable
from tasks.corpus.columns import MISSING, check_source_column, first_of, text_column, value_at
from tasks.corpus.containers import content_of, open_raw, reading
from tasks.corpus.documents import Found, Options, Records, read_file, records_of_json
from tasks.corpus.kinds import FORMATS, MARKUP, counted_kinds, ending, family
from tasks.corpus.local import IS_NOWHERE, NAMED, NOWHERE, Local
from tasks.corpus.losses import NO_FIELD, NOTHING, UNREADABLE, Loss, Losses, Skipped
from tasks.corpus.rows import Row

LOOKED_AT = 4_000_000  # characters of documents beyond the first two records of each file
LOSS = 100  # characters as which one without text counts
FIRST = 1000  # records of a JSON file; a column that is in none of them is taken to be in none of the file
SHOWN = 100  # files that an error names
SAID = {UNREADABLE: "", NOTHING: " is empty.", NOWHERE: f" {IS_NOWHERE}"}  # of flaws without a sample
Key = tuple[tuple[str, Path, tuple[int, ...]], ...]  # names, paths, and what changes when a file does


class Survey:
    """What the beginnings of files gave."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.flaws: dict[str, Loss] = {}  # of whole files, by name
        self.losses: list[Loss] = []  # of records
        self.skipped: Counter[str] = Counter()  # files in archives, by kind
        self.doubts: dict[str, str] = {}  # why a file may not be prose
        self.documents = 0
        self.left = LOOKED_AT
        self.is_all = True  # there is nothing more in the files
        self.has_pages = False

    def look_at(self, name: str, path: Path) -> None:
        """Read the first records of a file."""
        try:
            with closing(self.records(name, path)) as records:
                found = list(self.first_of(records))
            self.check_columns(name, path, found)
        except InputError as error:
            self.flaws[name] = Loss(name, 0, UNREADABLE, str(error))
            return
        doubt = ""
        for record in found:
            if isinstance(record, Found):
                self.documents += 1
                doubt = record.layout.doubt
            elif isinstance(record, Skipped):
                self.skipped[record.kind] += 1
            elif record.line:
                self.losses.append(record)
            else:
                self.flaws[name] = record
        if doubt:
            self.doubts[name] = doubt

    def check_columns(self, name: str, path: Path, found: list[Found | Loss | Skipped]) -> None:
        """Raise InputError, with the columns there are, if the first records of a JSON file lack one that is read.

        `found`: what they gave. Else all of the file is read first, and with a limit its sources are never checked.
        """
        if len(found) >= FIRST and all(map(lacks_text, found)):
            names = self.columns_of_json(name, path)
            if names:
                text_column(names, self.options.column, name, optional=False)
        source = self.options.source_column
        has_documents = any(isinstance(record, Found) for record in found)
        if has_documents and source:
            names = self.columns_of_json(name, path, without=source)
            if names:
                check_source_column(names, source, name)

    def columns_of_json(self, name: str, path: Path, without: str = "") -> dict[str, None]:
        """The columns of the first records of a JSON file; none of another file, or if one has the column `without`."""
        names: dict[str, None] = {}
        with reading(name), open_raw(path) as file:
            form, content = content_of(file, name, self.options.encoding, self.options.extract)
            rows = records_of_json(content, name, self.options.column) if form == "JSON" else iter(())
            for row in islice(rows, FIRST):
                record = row.record if isinstance(row, Row) else None
                if without and value_at(record, without) is not MISSING:
                    return {}
                if isinstance(record, dict):
                    names.update(dict.fromkeys(record))
        return names

    def records(self, name: str, path: Path) -> Records:
        """The records of a file; of a page, whose text takes long to find, none."""
        if FORMATS.get(ending(name)) not in MARKUP.values():
            return read_file(open_raw(path), name, family(name), self.options)
        self.is_all = False
        self.has_pages = True
        return self.nothing_of_page(name, path)

    def nothing_of_page(self, name: str, path: Path) -> Records:
        """No record of a page. Raises InputError if it can't be unpacked, or isn't a page."""
        with reading(name), open_raw(path) as file:
            content_of(file, name, self.options.encoding, self.options.extract)
        yield from ()

    def first_of(self, records: Records) -> Iterator[Found | Loss | Skipped]:
        """The records of a file, as many as are to be looked at and at least two; documents without their text.

        As long as all lack the text, it is FIRST of them.
        """
        is_lacking = True
        for number, record in enumerate(records, 1):
            is_lacking = is_lacking and lacks_text(record)
            if isinstance(record, Found):
                self.left -= len(record.text)
                yield record._replace(text="")
            else:
                self.left -= LOSS
                yield record
            if self.left < 0 and number >= (FIRST if is_lacking else 2):
                self.is_all = False
                return


def lacks_text(record: Found | Loss | Skipped) -> bool:
    """Whether a record has no column with the text."""
    return isinstance(record, Loss) and record.reason.startswith(NO_FIELD)


@functools.lru_cache(maxsize=4)  # a plan, its check and its run ask for the same
def survey_of(files: Key, options: Options) -> Survey:
    """What the beginnings of files give."""
    survey = Survey(options)
    for name, path, _ in files:
        survey.look_at(name, path)
    return survey


def look(found: Local, options: Options) -> Survey:
    """What the beginnings of local files give."""
    files = [(name, path, identity(path)) for name, path in found.files.items()]
    return survey_of(tuple(files), options)


def flaws_of(found: Local, options: Options) -> dict[str, Loss]:
    """The losses of whole files, by name."""
    gone = {name: Loss(name, 0, NOWHERE) for name in found.gone}
    return look(found, options).flaws | gone


def warn_of_doubts(found: Local, options: Options) -> None:
    """Log which text files may not be prose."""
    doubts = look(found, options).doubts
    for doubt in dict.fromkeys(doubts.values()):
        names = first_of([name for name, of_file in doubts.items() if of_file == doubt], NAMED)
        warn_once(f"A text file {doubt}: {names}. All of it is trained on; leave out what is not prose.")


def check_records(found: Local, options: Options, max_lost: float, what: str) -> None:
    """Raise InputError, with the lost records, if these are too many.

    That is known if the beginnings of the files are all that they have, or hold many records and no document. `what`:
    the files as they were asked for.
    """
    survey = look(found, options)
    is_hopeless = len(survey.losses) >= FIRST and not survey.documents and not survey.has_pages
    if not survey.is_all and not is_hopeless:
        return
    listed = "They are:"
    for loss in survey.losses[:SHOWN]:
        listed += "\n  " + printable(f"{loss.file}, line {loss.line}: {loss.reason}: {loss.sample}")
    flaws = flaws_of(found, options).values()
    losses = Losses([*flaws, *survey.losses])
    losses.check(what, survey.documents, max_lost, survey.skipped, listed)


def identity(path: Path) -> tuple[int, ...]:
    """What changes when a file does."""
    about = os.stat(path)
    return about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns


def check_files(flaws: dict[str, Loss], given: set[str], total: int, max_lost: float) -> None:
    """Raise InputError with all flaws if a file named by its own path has one, or if too many of `total` files have.

    Below that, it warns about them. An empty file and a broken link take no text away, so there may always be one.
    """
    unreadable = [name for name, loss in flaws.items() if loss.reason == UNREADABLE]
    without_text = len(flaws) - len(unreadable)
    is_given = any(name in given for name in unreadable)
    allowed = max_lost * total
    if is_given or len(unreadable) > allowed or without_text > max(1, allowed):
        raise InputError(refusal_of(flaws, total, max_lost, is_given))
    if flaws:
        kinds = counted_kinds(loss.reason for loss in flaws.values())
        warn_once(
            f"Of {counted(total, 'file')} in download.files, these can't be read and are skipped: {kinds} "
            f"({first_of(list(flaws), NAMED)}). lost.jsonl lists them with the reasons."
        )


def refusal_of(flaws: dict[str, Loss], total: int, max_lost: float, is_given: bool) -> str:
    """A message about too many flaws; the flaw's own if it is the only one, or of a file named by its path."""
    sentences = [loss.sample or f"{name}{SAID[loss.reason]}" for name, loss in flaws.items()]
    count = len(sentences)
    share = f"{count:,} of {counted(total, 'file')} can't be read, and download.max_lost allows {max_lost:.1%}"
    if count == 1 and (is_given or total == 1):
        return sentences[0]
    if count == 1:
        return f"{sentences[0]} ({share}.)"
    listed = sentences[:SHOWN]
    if count > SHOWN:
        listed.append(f"… and {count - SHOWN:,} more.")
    lines = "\n  ".join(listed)
    return f"{share}:\n  {lines}\nCorrect or delete them, or raise download.max_lost."
