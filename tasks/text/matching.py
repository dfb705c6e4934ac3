"""Words for matching: two texts that differ in case, accents, punctuation or line breaks have the same ones.

A word is a run of letters and digits of any script, in lower case and in Unicode's form NFKD (except for the syllables
of Korean), without accents, points and other combining marks, but with vowel signs and viramas. In scripts without
spaces between words, each character is a word, which counts as half a word where lengths are compared.
"""

import functools
import unicodedata
from typing import NamedTuple

import numpy as np
import regex

from tasks.text import words
from tasks.text.encoder import portions
from tasks.text.words import ALONE, DROPPED, LOWER, MULTIPLIER, REMOVED, SPACE, WORD

VERSION = 2  # raise it when the words change: it enters the keys of the stages that compare words
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
CHANGING = r"[[\p{L}\p{N}\p{M}\p{P}\p{S}]--[\p{Unified_Ideograph}\p{ASCII}]]"
PLAIN = bytes(LOWER[c] if c > 127 or chr(c).isalnum() else 0 if c in DROPPED else 32 for c in range(256))
PLAIN_KINDS = bytes(SPACE if c in b"\n " else WORD for c in range(256))
SYLLABLES = frozenset(map(chr, range(0xAC00, 0xD7A4)))  # of Korean, which stay whole
LONGER = b"\xff"  # not in UTF-8: stands for a character that becomes more bytes than it has


class MatchingWords(NamedTuple):
    """The words of some texts: those of text i are at `ends[i - 1]:ends[i]`."""

    hashes: np.ndarray  # (words,) uint64
    halves: np.ndarray  # (words,) bool: whether it is a character of a script without spaces
    ends: np.ndarray  # (texts,) int64

    def ends_of_words(self) -> np.ndarray:
        """(words,) where the text of each word ends."""
        return np.repeat(self.ends, np.diff(self.ends, prepend=0))

    def first_words(self) -> np.ndarray:
        """The first word of each text that has any."""
        counts = np.diff(self.ends, prepend=0)
        return (self.ends - counts)[counts > 0]


def every_character() -> str:
    """All code points in order."""
    return "".join(map(chr, range(0x110000)))


@functools.cache
def kinds() -> np.ndarray:
    """(2^21,) uint8: the kind of every code point. Made once, in about 0.2 s."""
    found = np.full(1 << 21, SPACE, dtype=np.uint8)
    every = every_character()
    for pattern, kind in PATTERNS.items():
        for run in regex.finditer(f"{pattern}+", every, regex.V1):
            found[run.start() : run.end()] = kind
    for mark in regex.finditer(r"\p{M}", every):
        if unicodedata.combining(mark.group()) not in (0, VIRAMA):
            found[mark.start()] = REMOVED
    return found


def plain(char: str) -> str:
    """The letters and digits of a character in lower case, without variants or accents; blanks for all else."""
    made = char
    if char not in SYLLABLES:
        made = unicodedata.normalize("NFKD", char).casefold()
    left = []
    for letter in made:
        kind = kinds()[ord(letter)]
        if kind != REMOVED:
            left.append(" " if kind == SPACE else letter)
    return "".join(left)


def is_half(char: str) -> bool:
    """Whether a letter counts as half a word."""
    return bool(kinds()[ord(char)] == ALONE)


class Plain(dict):
    """What each character becomes, with blanks on both sides of those that are words; also for `str.translate`."""

    def __missing__(self, code: int) -> str:
        """Compute it, the first time."""
        made = "".join(f" {letter} " if is_half(letter) else letter for letter in plain(chr(code)))
        self[code] = made
        return made


PLAIN_TEXT = Plain()


@functools.cache
def letters() -> np.ndarray:
    """(2^21,) uint32: what each character becomes, four bytes of UTF-8 and zeros. Made once, in about 0.2 s."""
    found = np.zeros((1 << 21, 4), dtype=np.uint8)
    every = every_character()
    for size, first, stop in ((2, 0x80, 0x800), (3, 0x800, 0x10000), (4, 0x10000, 0x110000)):
        encoded = every[first:stop].encode(errors="surrogatepass")
        found[first:stop, :size] = np.frombuffer(encoded, dtype=np.uint8).reshape(-1, size)
    found[kinds() == SPACE] = list(b" \0\0\0")
    found[kinds() == REMOVED] = 0
    for run in regex.finditer(CHANGING, every, regex.V1):
        made = plain(run.group()).encode()
        if len(made) > len(run.group().encode()):
            made = LONGER
        found[run.start()] = list(made.ljust(4, b"\0"))
    return found.view(np.uint32)[:, 0]


def lines(texts: list[str]) -> bytes:
    """The words of each text in a line of UTF-8, with blanks between them but for those that are characters."""
    data = b"".join(text.encode().translate(PLAIN) + b"\n" for text in texts)
    if not data.isascii():
        data = with_plain_letters(data)
    if LONGER in data:
        data = with_longer_letters(data, texts)
    return data.translate(None, b"\0") if b"\0" in data else data


def with_plain_letters(data: bytes) -> bytes:
    """The text with what each character beyond ASCII becomes in its place, or LONGER, and zeros."""
    made = np.frombuffer(bytearray(data), dtype=np.uint8)
    for at, size, codes in words.beyond_ascii(data):
        written = letters()[codes].view(np.uint8).reshape(-1, 4)
        for i in range(size):
            made[i:][at] = written[:, i]
    return made.tobytes()


def with_longer_letters(data: bytes, texts: list[str]) -> bytes:
    """The lines of these texts, those with LONGER read character by character."""
    rows = data.split(b"\n")
    longer = [i for i, row in enumerate(rows) if LONGER in row]
    read = lines([texts[i].translate(PLAIN_TEXT) for i in longer]).split(b"\n")
    for i, row in zip(longer, read, strict=False):  # after the last line is nothing
        rows[i] = row
    return b"\n".join(rows)


def matching_words(texts: list[str]) -> MatchingWords:
    """The words of the texts, long ones in pieces."""
    hashes = []
    halves = []
    ends = []
    before = 0
    for some, last in portions(texts):
        data = lines(some)
        raw = np.frombuffer(data, dtype=np.uint8)
        of_bytes = words.kinds_of(data, PLAIN_KINDS, kinds, 0xE0)  # no script without spaces is below
        starts, stops = words.spans(of_bytes, data.isascii())
        hashes.append(words.hashes_of(data, starts, stops))
        halves.append(of_bytes[starts] == ALONE)
        line_ends = np.flatnonzero(raw == ord("\n"))
        ends.append(np.searchsorted(starts, line_ends)[last] + before)
        before += len(starts)
    return MatchingWords(np.concatenate(hashes), np.concatenate(halves), np.concatenate(ends))


def stops_of(halves: np.ndarray, n: int) -> np.ndarray:
    """Where the run of n words, or twice as many halves, stops that begins at each word; beyond all if too short."""
    if not halves.any():
        return np.arange(n, n + len(halves))
    before = np.append(0, np.cumsum(HALVES - halves))
    numbers = np.arange(len(before))
    # by number of halves: the first place with that many before it
    first = np.full(before[-1] + HALVES * n + 1, len(before))
    first[before[1:] - 1] = numbers[1:]
    first[before] = numbers
    return first[before[:-1] + HALVES * n]


class Polynomial:
    """Hashes of stretches of at most `size` words: polynomials of the words' hashes, mod 2^64."""

    def __init__(self, size: int) -> None:
        self.powers = np.append(np.uint64(1), np.cumprod(np.full(size, MULTIPLIER)))
        self.inverse = np.cumprod(np.full(size, INVERSE))

    def hashes(self, words: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Of the stretch that begins at each of the first words and stops there: the difference of two sums, by the
        power that makes it begin at the first."""
        sums = np.append(np.uint64(0), np.cumsum(words * self.inverse[: len(words)]))
        return (sums[stops] - sums[: len(stops)]) * self.powers[stops]


def hash_ngrams(
    found: MatchingWords, n: int, by_halves: bool = False, short: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words within a text, uint64, and where those of each text end.

    by_halves: two halves count as one word. short: a text of fewer words is one run; otherwise it has none.
    """
    last = found.ends_of_words()
    begins = np.zeros(len(last), dtype=bool)  # whether a run begins at a word
    if short:
        begins[found.first_words()] = True
    halves = found.halves & by_halves
    reach = BLOCK + HALVES * n
    polynomial = Polynomial(reach)
    hashed = [np.zeros(0, dtype=np.uint64)]
    for first in range(0, len(last), BLOCK):
        block = slice(first, first + BLOCK)
        reached = slice(first, first + reach)
        ends = last[block] - first
        stops = stops_of(halves[reached], n)[:BLOCK]
        begins[block] |= stops <= ends
        hashes = polynomial.hashes(found.hashes[reached], np.minimum(stops, ends))
        hashed.append(hashes[begins[block]])
    mixed = np.concatenate(hashed)
    words.mix(mixed)
    return mixed, np.append(0, np.cumsum(begins))[found.ends]
