"""Records and files that can't be read: summed up, with what helps, and refused if there are too many."""

from collections import Counter
from collections.abc import Iterable

from model.errors import InputError
from model.wording import counted, printable
from tasks.corpus.kinds import counted_kinds
from tasks.corpus.rows import Loss

UNREADABLE, NOTHING = "unreadable file", "empty file"  # reasons of losses of whole files
BREAK = "Break long lines, for example with: fold -s -w 10000 FILE > NEW"
ADVICE = {  # which parameters help, by the beginning of the reason of losses; the first one that fits
    "no field": "Set download.column to the field with the text.",
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


class Losses:
    """What was lost, by reason. Those in line 0 are whole files, which are judged before anything is read."""

    def __init__(self, losses: Iterable[Loss]) -> None:
        self.reasons: Counter = Counter()
        self.examples: dict[str, str] = {}
        self.records = 0
        for loss in losses:
            self.reasons[loss.reason] += 1
            self.records += loss.line > 0
            where = f"{loss.file}, line {loss.line}" if loss.line else loss.file
            self.examples.setdefault(loss.reason, f"{where}: {loss.sample}" if loss.sample else where)

    @property
    def advice(self) -> str:
        """What helps against these losses; empty if nothing that cram knows of."""
        fitting = (next((start for start in ADVICE if reason.startswith(start)), "") for reason in self.reasons)
        return " ".join(ADVICE[start] for start in ADVICE.keys() & set(fitting))

    def listed(self, skipped: Counter) -> str:
        """The losses by reason, files that are `skipped`, by kind, and an example."""
        said = "; ".join(f"{n:,} x {reason}" for reason, n in sorted(self.reasons.items())) or "nothing"
        said += f"; skipped: {counted_kinds(skipped.elements())}" if skipped else ""
        if self.reasons:
            said += f"; for example {printable(self.examples[max(self.reasons, key=lambda r: self.reasons[r])])}"
        return said

    def check(self, what: str, documents: int, max_lost: float, skipped: Counter, where: str) -> None:
        """Raise InputError if no document was read, or if more records were lost than `max_lost` allows.

        `what`: the source; `documents`: those read; `where`: a sentence that tells all losses, or where they are.
        """
        listed = self.listed(skipped)
        if not documents:
            help_ = self.advice or "Check download.files or source."
            raise InputError(f"{what} holds no document that cram can read (lost: {listed}). {help_}")
        seen = self.records + documents
        if self.records > max_lost * seen:
            help_ = self.advice or "Repair the files, or raise download.max_lost."
            raise InputError(
                f"{self.records:,} of {counted(seen, 'record')} in {what} are unreadable ({listed}), more than "
                f"download.max_lost allows ({max_lost:.1%}). {help_} {where}"
            )
