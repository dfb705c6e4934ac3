"""Counts of what a download read and lost."""

import io
import json
from collections import Counter, defaultdict
from pathlib import Path

from pydantic import BaseModel

from model import InputError, counted
from tasks import printable
from tasks.corpus.columns import Layout
from tasks.corpus.local import counted_kinds
from tasks.corpus.parts import Document, Tally

ADVICE = {  # which parameters help, by the beginning of the reason of losses
    "no field": "Set download.column to the field with the text.",
    "not UTF-8": "Set download.encoding to the encoding of the text, for example windows-1252 or utf-16-le.",
    "longer than": "Divide long text files by download.documents_by: line or blank-line.",
    "broken JSON": "Name JSON with values of several lines .json, and CSV .csv.",
}


class Counts(Tally):
    """Counts what was read and lost, by source and in total, and knows when a limit is reached.

    `params` are those of `download`, `state` is what `state()` gave an earlier attempt, `lost` the list of losses.
    """

    def __init__(self, params: BaseModel, lost: Path, state: dict) -> None:
        self.params = params
        self.documents, self.characters = Counter(state.get("documents")), Counter(state.get("characters"))
        self.read = Counter(state.get("read"))  # documents, by the name in download.source
        self.bytes = Counter(state.get("bytes"))  # the same
        self.other_sets = Counter(state.get("other_sets"))
        self.skipped = Counter(state.get("skipped"))  # files in archives, by kind
        self.formats = defaultdict(Counter, {form: Counter(by) for form, by in state.get("formats", {}).items()})
        self.lost = lost.open("a+")
        self.lost.truncate(state.get("lost", 0))

    def state(self) -> dict:
        """All counts as JSON."""
        self.lost.flush()
        counters = ("documents", "characters", "read", "bytes", "other_sets", "skipped", "formats")
        return {name: getattr(self, name) for name in counters} | {"lost": self.lost.seek(0, io.SEEK_END)}

    def take(self, name: str, document: Document, layout: Layout) -> None:
        """Count a document of a source, which was found in a file of this layout."""
        self.add(document)
        self.formats[layout.form][layout.taken] += 1
        self.read[name] += 1
        self.bytes[name] += len(document.text) if document.text.isascii() else len(document.text.encode())

    @property
    def enough(self) -> bool:
        """Whether a limit is reached."""
        most, megabytes = self.params.documents, self.params.megabytes
        return bool((most and self.read.total() >= most) or (megabytes and self.bytes.total() >= 1e6 * megabytes))

    def stats(self, what: str) -> dict:
        """The counts. Raises InputError if no document was read, or if more was lost than `max_lost` allows."""
        counts, lost, examples = self.counts(), Counter(), {}
        with open(self.lost.name) as file:
            for loss in map(json.loads, file):
                lost[loss["reason"]] += 1
                examples.setdefault(loss["reason"], "{file}, line {line}: {sample}".format_map(loss))
        listed = "; ".join(f"{n:,} x {reason}" for reason, n in sorted(lost.items())) or "nothing"
        listed += f"; skipped: {counted_kinds(self.skipped.elements())}" if self.skipped else ""
        listed += f"; for example {printable(examples[max(lost, key=lost.get)])}" if lost else ""
        advice = " ".join(said for start, said in ADVICE.items() if any(reason.startswith(start) for reason in lost))
        if not counts["documents"] and self.other_sets:
            sets = ", ".join(name for name, _ in self.other_sets.most_common(30))
            raise InputError(f"{what} has no documents from the requested sets. It has: {sets}. Correct download.sets.")
        if not counts["documents"]:
            help_ = advice or "Check download.files or source."
            raise InputError(f"{what} holds no document that cram can read (lost: {listed}). {help_}")
        total = lost.total()
        seen = total + counts["documents"] + self.other_sets.total()
        if total > self.params.max_lost * seen:
            raise InputError(
                f"{total:,} of {counted(seen, 'record')} in {what} are unreadable ({listed}), more than "
                f"download.max_lost allows ({self.params.max_lost:.1%}). "
                f"{advice or 'Repair the files, or raise download.max_lost.'} All are listed in {self.lost.name}."
            )
        return {**counts, "bytes": self.bytes.total(), "lost": dict(sorted(lost.items())), "formats": self.formats}
