"""Records and files that can't be read: each with its reason, summed up with what helps, refused if too many."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from model.errors import InputError
from model.wording import counted, printable
from tasks.corpus.kinds import counted_kinds

# Reasons of losses
EMPTY = "empty text"
NOT_UTF8 = "not UTF-8"
NO_FIELD = "no field"  # and its name
NO_OBJECT = "not a JSON object"
TOO_LONG = "longer than 100 MB"
UNREADABLE = "unreadable file"
NOTHING = "empty file"
BREAK = "Break long lines, for example with: fold -s -w 10000 FILE > NEW"
ADVICE = {  # which parameters help, by the beginning of the reason of losses; the first one that fits
    NO_FIELD: "Set download.column to the field with the text.",
    "not UTF-8 in a table": "Parquet and Arrow hold UTF-8 only, and download.encoding has no effect on them: write the "
    "table again from text that was decoded.",
    "not UTF-8": "Set download.encoding to the encoding of the text, for example windows-1252 or utf-16-le.",
    "line longer than": f"{BREAK}.",
    "paragraph longer than": "Set download.documents_by to line.",
    "file longer than": "Divide long text files by download.documents_by: line or blank-line.",
    "longer than": "Divide the text among several records.",
    "mail in HTML only": "Set download.extract to trafilatura.",
    "broken JSON": "Name JSON with values of several lines .json, and CSV .csv.",
}


class Loss(NamedTuple):
    """A record that could not be read; in line 0, a whole file."""

    file: str
    line: int
    reason: str
    sample: str = ""

    @property
    def in_words(self) -> str:
        """Where it is, with its sample."""
        where = f"{self.file}, line {self.line}" if self.line else self.file
        return f"{where}: {self.sample}" if self.sample else where


class Skipped(NamedTuple):
    """A file in an archive, or a mail, that isn't read."""

    kind: str


class Unreadable(Exception):
    """A record that holds no document; its message is the reason of the loss."""


def advice_on(reason: str) -> str:
    """What helps against losses for this reason; empty if cram knows nothing."""
    for start, advice in ADVICE.items():
        if reason.startswith(start):
            return advice
    return ""


class Losses:
    """What was lost, by reason. Whole files are judged before anything is read."""

    def __init__(self, losses: Iterable[Loss]) -> None:
        self.reasons: Counter[str] = Counter()
        self.examples: dict[str, Loss] = {}
        self.records = 0
        for loss in losses:
            self.reasons[loss.reason] += 1
            self.records += loss.line > 0
            self.examples.setdefault(loss.reason, loss)

    @property
    def advice(self) -> str:
        """What helps against these losses; empty if cram knows nothing."""
        fitting = {advice_on(reason) for reason in self.reasons}
        return " ".join(advice for advice in ADVICE.values() if advice in fitting)

    def summary(self, skipped: Counter[str]) -> str:
        """The losses by reason, files that are `skipped`, by kind, and an example."""
        counts = [f"{n:,} x {reason}" for reason, n in sorted(self.reasons.items())]
        said = "; ".join(counts) or "nothing"
        if skipped:
            said += f"; skipped: {counted_kinds(skipped.elements())}"
        if self.reasons:
            [(most_frequent, _)] = self.reasons.most_common(1)
            said += f"; for example {printable(self.examples[most_frequent].in_words)}"
        return said

    def check(self, what: str, documents: int, max_lost: float, skipped: Counter[str], where: str) -> None:
        """Raise InputError if no document was read, or if more records were lost than `max_lost` allows.

        `what`: the source; `documents`: those read; `where`: a sentence that lists all losses, or says where they are.
        """
        summary = self.summary(skipped)
        if not documents:
            advice = self.advice or "Check download.files or source."
            raise InputError(f"{what} has no document that cram can read (lost: {summary}). {advice}")
        seen = self.records + documents
        if self.records > max_lost * seen:
            advice = self.advice or "Repair the files, or raise download.max_lost, with which all is read again."
            raise InputError(
                f"{self.records:,} of {counted(seen, 'record')} in {what} are unreadable ({summary}), more than "
                f"download.max_lost allows ({max_lost:.1%}). {advice} {where}"
            )
