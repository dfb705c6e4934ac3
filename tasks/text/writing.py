"""The scripts that text is written in, and what is left of it in ASCII."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.text.scripts import LATIN, NOTHING, OTHERS, count_deleted, count_labels, deleted_by, script
from tasks.text.words import ASCII

FEWEST = 0.01  # of the letters, from which a script is named
# Text needs Unicode if more than these shares of its characters would lose an accent, or be deleted although they are
# letters. English has up to 0.06 % of accents, German 1 %, French and Spanish 2 to 4 %. Some pages in Chinese among
# many in English are 0.4 % of letters that are deleted.
MOST_ACCENTS = 0.003
MOST_DELETED = 0.01
MOST_SYMBOLS = 0.001  # the same of symbols, emoji among them, in texts whose labels may depend on them
AT_ONCE = 1000  # texts
NAMES = {"CJK": "Chinese characters", "KANA": "Japanese kana"}  # others are as Unicode has them
IN_BYTES = np.array([chr(byte).isalpha() and byte < 0x80 for byte in range(256)])


@dataclass(frozen=True)
class Writing:
    """How text is written. Shares are of all characters, but for `scripts`."""

    scripts: dict[str, float]  # share of the letters, of the most frequent first
    deleted: float  # which ASCII deletes
    letters_deleted: float  # the letters among these
    symbols_deleted: float  # the symbols, such as emoji
    accented: float  # Latin letters which in ASCII lose their accent

    @property
    def needs_unicode(self) -> bool:
        """Whether ASCII would spoil the text."""
        return self.accented > MOST_ACCENTS or self.letters_deleted > MOST_DELETED

    @property
    def needs_unicode_for_labels(self) -> bool:
        """Whether ASCII would spoil labelled text, which may say with an emoji what it means."""
        return self.needs_unicode or self.symbols_deleted > MOST_SYMBOLS

    @property
    def in_words(self) -> str:
        """The scripts: `Latin`, or `Cyrillic 81 % and Latin 19 %`."""
        named = {name: share for name, share in self.scripts.items() if share >= FEWEST}
        if len(named) == 1:
            return named_script(next(iter(named)))
        said = [f"{named_script(name)} {100 * share:.0f} %" for name, share in named.items()]
        return " and ".join(filter(None, [", ".join(said[:-1]), *said[-1:]]))

    @property
    def main(self) -> str:
        """The most frequent script, by Unicode's name."""
        return next(iter(self.scripts), LATIN)


def named_script(name: str) -> str:
    """The name of a script for a sentence."""
    return NAMES.get(name, name.capitalize())


class Counts(NamedTuple):
    """How many characters of each sort texts have."""

    characters: int  # all
    ascii_letters: int
    scripts: Counter[str]  # characters beyond ASCII, by script
    deleted: Counter[str]  # those among them that ASCII deletes, by script


def writing_of(texts: Sequence[str]) -> Writing:
    """How texts are written."""
    counts = count_characters(texts)
    characters = max(1, counts.characters)
    no_letters = {*OTHERS.values(), "U+FFFD"}
    letters_deleted = sum(count for name, count in counts.deleted.items() if name not in no_letters)
    accented = counts.scripts[LATIN] - counts.deleted[LATIN]
    return Writing(
        scripts=shares_of_scripts(counts),
        deleted=counts.deleted.total() / characters,
        letters_deleted=letters_deleted / characters,
        symbols_deleted=counts.deleted[OTHERS["S"]] / characters,
        accented=accented / characters,
    )


class Lost(NamedTuple):
    """The letters and symbols that ASCII deletes."""

    share: float  # of the texts, that have some
    usual: str  # the most frequent one; empty for none


def lost_of(texts: Sequence[str]) -> Lost:
    """The letters and symbols of texts that ASCII deletes."""
    kind_of = deleted_by(ASCII)
    no_matter = {NOTHING, "U+FFFD", *OTHERS.values()} - {OTHERS["S"]}
    counts: Counter[str] = Counter()
    touched = 0
    for text in texts:
        lost = [character for character in text if character > "\x7f" and kind_of(character) not in no_matter]
        touched += bool(lost)
        counts.update(lost)
    usual = counts.most_common(1)[0][0] if counts else ""
    return Lost(touched / max(1, len(texts)), usual)


def count_characters(texts: Sequence[str]) -> Counts:
    """Count the characters of texts, some texts at a time."""
    scripts: Counter[str] = Counter()
    deleted: Counter[str] = Counter()
    for start in range(0, len(texts), AT_ONCE):
        some = list(texts[start : start + AT_ONCE])
        add(scripts, *count_labels(some, script))
        add(deleted, *count_deleted(some, ASCII))
    characters = sum(map(len, texts))
    return Counts(characters, sum(map(ascii_letters, texts)), scripts, deleted)


def shares_of_scripts(counts: Counts) -> dict[str, float]:
    """Each script's share of the letters; the most frequent first."""
    letters = Counter({LATIN: counts.ascii_letters})
    letters.update(counts.scripts)
    del letters[NOTHING]
    total = max(1, letters.total())
    return {name: count / total for name, count in letters.most_common() if count}


def add(counts: Counter[str], names: Sequence[str], found: np.ndarray) -> None:
    """Add how often each name was found, (names, texts), to counts."""
    for name, number in zip(names, found.sum(axis=1).tolist(), strict=True):
        counts[name] += number


def ascii_letters(text: str) -> int:
    """The letters of ASCII in a text."""
    data = np.frombuffer(text.encode("ascii", "ignore"), dtype=np.uint8)
    return int(IN_BYTES[data].sum())
