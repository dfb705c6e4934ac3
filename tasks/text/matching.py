"""Words for matching: two texts that differ in case, accents, punctuation or line breaks have the same ones.

A word is a run of letters and digits of any script, in small letters and in Unicode's form NFKD (but for the syllables
of Korean), without accents, points and other combining marks, but with vowel signs and viramas. Each character of a
script without spaces between words is a word by itself: half of one where it matters how much is said.
"""

import functools
import unicodedata
from typing import NamedTuple

import numpy as np
import regex

from tasks.text import words
from tasks.text.tokenizer import portions
from tasks.text.words import ALONE, DROPPED, LOWER, MULTIPLIER, REMOVED, SPACE, WORD

VERSION = 2  # raise it when the words change: it enters the keys of what is found by them
HALVES = 2  # a word counts as two characters of a script without spaces
BLOCK = 1 << 15  # words whose runs are hashed at once: what fits in a core's cache
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
VIRAMA = 9  # canonical combining class; vowel signs have 0
UNSPACED = r"[\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
PATTERNS = {  # a later one counts; all else is a blank
    r"[\p{L}\p{N}\p{M}]": WORD,
    rf"[[\p{{L}}\p{{N}}\p{{M}}]&&{UNSPACED}]": ALONE,
    r"[\p{Cf}\p{Cc}\p{Me}\p{Default_Ignorable_Code_Point}--\s]": REMOVED,
}
PLAIN = bytes(LOWER[c] if c > 127 or chr(c).isalnum() else 0 if c in DROPPED else 32 for c in range(256))
PLAIN_KINDS = bytes(SPACE if c in b"\n " else WORD for c in range(256))
SYLLABLES = frozenset(map(chr, range(0xAC00, 0xD7A4)))  # of Korean, which stay whole
LONGER = b"\xff"  # not in UTF-8: stands for a character that becomes more bytes than it has


class Matched(NamedTuple):
    """The words of some texts: those of text i are at `ends[i - 1]:ends[i]`."""

    hashes: np.ndarray  # (words,) uint64
    halves: np.ndarray  # (words,) bool: whether it is a character of a script without spaces
    ends: np.ndarray  # (texts,) int64


@functools.cache
def kinds() -> np.ndarray:
    """(2^21,) uint8: the kind of every code point. Made once, in about 0.2 s."""
    found, every = np.full(1 << 21, SPACE, dtype=np.uint8), "".join(map(chr, range(0x110000)))
    for pattern, kind in PATTERNS.items():
        for run in regex.finditer(f"{pattern}+", every, regex.V1):
            found[run.start() : run.end()] = kind
    marks = [run.start() for run in regex.finditer(r"\p{M}", every)]
    found[[code for code in marks if unicodedata.combining(chr(code)) not in (0, VIRAMA)]] = REMOVED
    return found


def plain(char: str) -> str:
    """The letters and digits of a character, small and without variants or accents; blanks for what is neither."""
    of, made = kinds(), char if char in SYLLABLES else unicodedata.normalize("NFKD", char).casefold()
    return "".join(" " if of[ord(c)] == SPACE else c for c in made if of[ord(c)] != REMOVED)


def is_half(char: str) -> bool:
    """Whether a letter counts as half a word."""
    return bool(kinds()[ord(char)] == ALONE)


class Plain(dict):
    """What each character becomes, with blanks on both sides of those that are words; also for `str.translate`."""

    def __missing__(self, code: int) -> str:
        """Ask, the first time."""
        self[code] = made = "".join(f" {c} " if is_half(c) else c for c in plain(chr(code)))
        return made


PLAIN_TEXT = Plain()


@functools.cache
def letters() -> np.ndarray:
    """(2^21,) uint32: what each character becomes, four bytes of UTF-8 and zeros. Made once, in about 0.2 s."""
    found, every = np.zeros((1 << 21, 4), dtype=np.uint8), "".join(map(chr, range(0x110000)))
    for size, codes in ((2, range(0x80, 0x800)), (3, range(0x800, 0x10000)), (4, range(0x10000, 0x110000))):
        encoded = every[codes.start : codes.stop].encode(errors="surrogatepass")
        found[codes.start : codes.stop, :size] = np.frombuffer(encoded, dtype=np.uint8).reshape(-1, size)
    found[kinds() == SPACE] = list(b" \0\0\0")
    found[kinds() == REMOVED] = 0
    for run in regex.finditer(r"[[\p{L}\p{N}\p{M}\p{P}\p{S}]--[\p{Unified_Ideograph}\p{ASCII}]]", every, regex.V1):
        made, size = plain(run.group()).encode(), len(run.group().encode())
        found[run.start()] = list((made if len(made) <= size else LONGER).ljust(4, b"\0"))
    return found.view(np.uint32)[:, 0]


def lines(texts: list[str]) -> bytes:
    """The words of each text in a line of UTF-8, with blanks between them but for those that are characters."""
    data = b"\n".join([*(text.encode().translate(PLAIN) for text in texts), b""])
    if not data.isascii():
        made = np.frombuffer(bytearray(data), dtype=np.uint8)
        for at, size, codes in words.beyond_ascii(data):
            written = letters()[codes].view(np.uint8).reshape(-1, 4)
            for i in range(size):
                made[i:][at] = written[:, i]
        data = made.tobytes()
    if LONGER in data:
        rows = data.split(b"\n")
        those = [i for i, row in enumerate(rows) if LONGER in row]
        for i, row in zip(those, lines([texts[i].translate(PLAIN_TEXT) for i in those]).split(b"\n"), strict=False):
            rows[i] = row
        data = b"\n".join(rows)
    return data.translate(None, b"\0") if b"\0" in data else data


def matched(texts: list[str]) -> Matched:
    """The words of the texts, long ones in pieces."""
    parts, before = [], 0
    for some, last in portions(texts):
        data = lines(some)
        raw = np.frombuffer(data, dtype=np.uint8)
        of_bytes = words.kinds_of(data, PLAIN_KINDS, kinds, 0xE0)  # no script without spaces is below
        starts, stops = words.spans(of_bytes, data.isascii())
        hashed = words.hashes_of(data, starts, stops)
        ends = np.searchsorted(starts, np.flatnonzero(raw == ord("\n")))[last]
        parts.append(Matched(hashed, of_bytes[starts] == ALONE, ends + before))
        before += len(hashed)
    return Matched(*map(np.concatenate, zip(*parts, strict=True)))


def stops_of(halves: np.ndarray, n: int) -> np.ndarray:
    """Where the run of n words, or twice as many halves, stops that begins at each word; beyond all if too short."""
    before = np.concatenate([[0], np.cumsum(HALVES - halves)])
    numbers = np.arange(len(before))
    first = np.full(before[-1] + HALVES * n + 1, len(before))  # for each number of halves the first place after so many
    first[before[1:] - 1], first[before] = numbers[1:], numbers
    return first[before[:-1] + HALVES * n]


def runs(found: Matched, n: int, by_halves: bool = False, short: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words within a text, uint64, and where those of each text end.

    by_halves: twice as many if they are halves; short: a text of fewer words, which else has no run, is one.
    """
    reach, counts = BLOCK + HALVES * n, np.diff(found.ends, prepend=0)
    powers, inverse = (np.cumprod(np.full(reach, factor)) for factor in (MULTIPLIER, INVERSE))
    powers = np.append(np.uint64(1), powers)
    last, begins = np.repeat(found.ends, counts), np.zeros(len(found.hashes), dtype=bool)
    begins[(found.ends - counts)[counts > 0]] = short
    hashed = [np.zeros(0, dtype=np.uint64)]
    for first in range(0, len(last), BLOCK):
        block, reached = slice(first, first + BLOCK), slice(first, first + reach)
        here, halves, ends = found.hashes[reached], found.halves[reached], last[block] - first
        some = by_halves and halves.any()
        stops = stops_of(halves, n)[:BLOCK] if some else np.arange(n, n + len(ends))
        begins[block] |= stops <= ends
        stops = np.minimum(stops, ends)
        # a polynomial of the words, mod 2^64: the difference of two sums, by the power that makes it begin at the first
        sums = np.append(np.uint64(0), np.cumsum(here * inverse[: len(here)]))
        hashed.append(((sums[stops] - sums[: len(stops)]) * powers[stops])[begins[block]])
    mixed = np.concatenate(hashed)
    words.mix(mixed)
    return mixed, np.append(0, np.cumsum(begins))[found.ends]
