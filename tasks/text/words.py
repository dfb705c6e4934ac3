"""The words of many texts at once, by array operations: runs of letters and digits, runs of punctuation, ideographs.

They are those of a vocabulary's normaliser and pre-tokenizer (`tokenizer.py`), which a test checks for every code
point. Each different word is then encoded, counted or hashed once, several times as fast as at every occurrence.
"""

import functools
import re
import string
import unicodedata
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field, model_validator
from tokenizers import Regex, normalizers
from xxhash import xxh3_64_intdigest

# as a core's cache allows
SLICE = 1 << 18  # bytes
DIVIDED_AT_ONCE = 1 << 15  # bytes
HASHED_AT_ONCE = 1 << 17  # words
SPACES = b"\t\n\v\f\r "
DROPPED = bytes(c for c in range(128) if c < 32 and c not in SPACES) + b"\x7f"
LOWER = bytes(range(256)).lower()
ASCII_ALONE = bytes(range(128)).ljust(256, b"\0")
# Kinds of bytes. A word is a run of one of the first two but SPACE, or an ideograph: one ALONE, the others INSIDE.
PUNCTUATION, SPACE, WORD, REMOVED, ALONE, INSIDE = range(6)
LETTERS = string.ascii_letters + string.digits + "_"


def kind_of_byte(byte: int) -> int:
    """The kind of a byte of ASCII; others are REMOVED."""
    if byte in DROPPED or byte > 127:
        return REMOVED
    if byte in SPACES:
        return SPACE
    return WORD if chr(byte) in LETTERS else PUNCTUATION


KINDS = bytes(map(kind_of_byte, range(256)))
# The other kinds as patterns of `tokenizers`, whose tables of Unicode count, not Python's. The rest are letters: marks,
# digits and joiners too. Private use, unassigned and control characters are removed, and signs of lost characters.
SIGNS = r"[\p{P}\p{S}&&[^_\p{Han}]]"
IDEOGRAPHS = r"\p{Han}"
BLANKS = r"\s"
GONE = r"[\p{C}\x{FFFD}\x{FE00}-\x{FE0F}\x{E0100}-\x{E01EF}&&[^\s\x{200C}\x{200D}]]"
# Typographic punctuation and spaces, and what takes their place with `Normaliser.punctuation` plain. Two hyphens for an
# em dash, as in plain text, keep it apart from a compound's. `·` stays: a part of Catalan words.
PLAIN = {
    "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000": " ",
    "\u2010-\u2013\u2043\u2212": "-",
    "\u2014\u2015": "--",
    "\xb4\u02bb\u02bc\u2018-\u201b\u2032\u2035\u2039\u203a": "'",
    "\xab\xbb\u201c-\u201f\u2033\u2036": '"',
    "\u2026": "...",
    "\u2022\u2023\u25aa\u25cf\u25e6": "*",
    "\u2044": "/",
}
ASSIGNED = (range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000))  # where characters are assigned
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits well spread: 2^64 over the golden ratio
SHIFT = np.uint64(32)
LONG = 128  # bytes of a word that is hashed together with others
MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], dtype=np.uint64)  # the first bytes of eight
BEYOND_PLAIN = re.compile(f"[{''.join(PLAIN)}]")
BELOW = "".join(map(chr, range(0x3001)))  # all characters up to the ideographs
PLAIN_OF = {character: to for some, to in PLAIN.items() for character in re.findall(f"[{some}]", BELOW)}
COUNTS = pa.schema([("word", pa.large_string()), ("count", pa.int64())])


class Normaliser(BaseModel, frozen=True, extra="forbid"):
    """Which characters a vocabulary reads, and in what form."""

    characters: Literal["ascii", "unicode"] = Field(
        "ascii",
        description="ascii: the paper's; accents are stripped, letters lowercased, all else beyond ASCII is deleted. "
        "unicode: any script; the fields after punctuation apply.",
    )
    punctuation: Literal["raw", "plain"] = Field(
        "raw",
        description="plain: typographic dashes, quotes, ellipses, bullets and spaces become those of ASCII first "
        "(don’t, 1889–1895, …). raw: ascii deletes them as the paper does, and words run together; unicode keeps them.",
    )
    form: Literal["NFKC", "NFC"] = Field(
        "NFKC", description="Unicode normalisation: NFC; or NFKC, which also unites full-width letters, ligatures …"
    )
    lowercase: bool = Field(True, description="Lowercase letters.")
    strip_accents: bool = Field(
        False, description="Drop accents and other combining marks; in Hindi or Thai, the vowels are among these."
    )
    alphabet: int = Field(
        6000, ge=100, le=100_000,
        description="Largest number of characters that have their own entries: the most frequent ones, in at most half "
        "of the entries. A word with another character is [UNK].",
    )  # fmt: skip

    @model_validator(mode="after")
    def _each_field_has_an_effect(self) -> Self:
        if self.characters == "ascii":
            for name in ("form", "lowercase", "strip_accents", "alphabet"):
                if getattr(self, name) != Normaliser.model_fields[name].default:
                    raise ValueError(f"{name} has no effect with characters ascii. Set characters to unicode")
        return self


ASCII = Normaliser()
UNICODE = Normaliser(characters="unicode")


class Words(NamedTuple):
    """The words of some texts, in order: word k is `data[starts[k]:stops[k]]`; those of text i end at `ends[i]`."""

    data: bytes  # UTF-8
    starts: np.ndarray  # (words,) int64
    stops: np.ndarray  # (words,) int64
    ends: np.ndarray  # (texts,) int64


@functools.cache
def unicode_kinds() -> np.ndarray:
    """(2^21,) uint8: the kind of every code point. Made once, in about 0.1 s."""
    kinds = np.full(1 << 21, REMOVED, dtype=np.uint8)
    codes = np.concatenate([np.asarray(part) for part in ASSIGNED])
    text = "".join(map(chr, codes.tolist()))
    kinds[codes] = WORD
    for pattern, kind in ((SIGNS, PUNCTUATION), (IDEOGRAPHS, ALONE), (BLANKS, SPACE), (GONE, REMOVED)):
        marked = normalizers.Replace(Regex(pattern), "\0").normalize_str(text)
        is_marked = np.frombuffer(marked.encode("utf-32-le"), dtype=np.uint32) == 0
        kinds[codes[is_marked]] = kind
    kinds[0] = REMOVED
    return kinds


def by_tokenizers(text: str, *names: str) -> str:
    """The text after these normalisers of `tokenizers`."""
    for name in names:
        text = getattr(normalizers, name)().normalize_str(text)
    return text


@functools.lru_cache(maxsize=4)
def single(how: Normaliser) -> np.ndarray:
    """(2^21,) uint32: the character that a character becomes; itself if it becomes several. Made in about 0.1 s."""
    codes = [*range(0xB, 0xD800), *range(0xE000, 0x20000)]
    steps = [how.form, "Lowercase"] if how.lowercase else [how.form]
    made = by_tokenizers("\n".join(map(chr, codes)), *steps).split("\n")
    table = np.arange(1 << 21, dtype=np.uint32)
    table[codes] = [ord(to) if len(to) == 1 else code for code, to in zip(codes, made, strict=True)]
    return table


def by_table(text: str, how: Normaliser) -> str:
    """The text with each character replaced by its `single` one, and the most frequent that become several."""
    if how.form == "NFKC":
        text = text.replace("…", "...")
    if how.lowercase:
        text = text.replace("İ", "i\u0307")
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    return single(how)[codes].tobytes().decode("utf-32-le")


def beyond_ascii(data: bytes, least: int = 0xC0) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """The characters of a UTF-8 text whose first byte is at least this: their places, bytes and codes; some at a time.

    One that is cut off at the end has another code.
    """
    raw = np.frombuffer(data + b"   ", dtype=np.uint8)
    for first in range(0, len(data), SLICE):
        leads = np.flatnonzero(raw[first : min(first + SLICE, len(data))] >= least) + first
        begins = raw[leads]
        for size, low, high in ((2, 0xC0, 0xDF), (3, 0xE0, 0xEF), (4, 0xF0, 0xFF)):
            at = leads[(begins >= low) & (begins <= high)]
            codes: np.ndarray = (raw[at] & (0x7F >> size)).astype(np.uint32)
            for i in range(1, size):
                codes = codes << 6 | raw[i:][at] & 0x3F
            yield at, size, codes


def kinds_of(
    data: bytes, plain: bytes = KINDS, of_all: Callable[[], np.ndarray] = unicode_kinds, least: int = 0xC0
) -> np.ndarray:
    """(bytes,) uint8: the kind of each byte of UTF-8, that of its character. One that is cut off has any kind.

    plain: the kinds of bytes; of_all: gives those of characters, for the ones whose first byte is `least` or more.
    """
    if data.isascii():
        return np.frombuffer(data.translate(plain), dtype=np.uint8)
    table = of_all()
    found = np.frombuffer(bytearray((data + b"   ").translate(plain)), dtype=np.uint8)
    for at, size, codes in beyond_ascii(data, least):
        kinds = table[codes]
        found[at] = kinds
        kinds[kinds == ALONE] = INSIDE
        for i in range(1, size):
            found[i:][at] = kinds
    return found[: len(data)]


def normalise(text: str, how: Normaliser = ASCII) -> bytes:
    """The text as a vocabulary reads it. In ASCII: plain quotes, no accents, lower case, white space."""
    made = _normalise(text, how)
    return np.frombuffer(made, dtype=np.uint8)[kinds_of(made) != REMOVED].tobytes()


def _normalise(text: str, how: Normaliser) -> bytes:
    """The same, but in Unicode with the characters that are removed."""
    text = plain_punctuation(text, how)
    if how.characters == "ascii":
        return in_ascii(text.encode())
    if text.isascii():
        return text.encode().translate(LOWER if how.lowercase else None, DROPPED)
    made = by_table(text, how)
    if not unicodedata.is_normalized(how.form, made):  # the table alone does for most, several times as fast
        made = by_table(by_tokenizers(text, how.form), how)
    if how.strip_accents:
        made = by_tokenizers(made, "NFD", "StripAccents", "NFC")
    return made.encode()


def plain_punctuation(text: str, how: Normaliser) -> str:
    """The text with plain punctuation if the normaliser makes it plain."""
    if how.punctuation == "raw" or text.isascii():
        return text
    return BEYOND_PLAIN.sub(lambda found: PLAIN_OF[found[0]], text)


def in_ascii(data: bytes) -> bytes:
    """UTF-8 as a vocabulary of ASCII reads it."""
    raw = np.frombuffer(data, dtype=np.uint8)
    made = np.frombuffer(bytearray(data.translate(ASCII_ALONE)), np.uint8)
    for quote in b"`'":
        at = pairs_of(raw, quote)
        made[at] = ord('"')
        made[at + 1] = 0
    for at, _, codes in beyond_ascii(data):
        made[at] = unaccented()[codes]
    return made.tobytes().translate(LOWER, DROPPED)


def pairs_of(raw: np.ndarray, quote: int) -> np.ndarray:
    """Where pairs of this byte begin, from left to right as `replace` finds them, which takes ten times as long."""
    at = np.flatnonzero((raw[:-1] == quote) & (raw[1:] == quote))
    numbers = np.arange(len(at))
    run = at - numbers  # the same for all pairs within a run of this byte
    number_in_run = numbers - np.searchsorted(run, run)
    return at[number_in_run % 2 == 0]


@functools.cache
def unaccented() -> np.ndarray:
    """(2^21,) uint8: what is left of each other character in ASCII without its accents, or 0."""
    decomposed = unicodedata.normalize("NFD", "\n".join(BELOW[128:]))
    left = decomposed.encode("ascii", "ignore").split(b"\n")
    table = np.zeros(1 << 21, dtype=np.uint8)
    table[128 : len(BELOW)] = [of_character[0] if of_character else 0 for of_character in left]
    return table


def split(texts: list[str], how: Normaliser = ASCII) -> Words:
    """The words of the texts. Takes about ten times the memory of the texts."""
    if how.characters == "ascii":  # all at once
        plain = [plain_punctuation(text, how).encode().replace(b"\n", b" ") for text in texts]
        normalised = in_ascii(b"\n".join([*plain, b""]))
    else:
        each = [_normalise(text, how).replace(b"\n", b" ") for text in texts]
        normalised = b"\n".join([*each, b""])
    data, starts, stops = divide(normalised)
    lines = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
    return Words(data, starts, stops, np.searchsorted(starts, lines))


def count(texts: list[str], how: Normaliser = ASCII) -> pa.Table:
    """How often each word occurs in the texts: COUNTS. Takes the memory of `split`, but creates no Python objects."""
    data, starts, stops, _ = split(texts, how)
    if data.isascii():
        letters = pa.py_buffer(data.translate(None, SPACES))
    else:
        letters = pa.py_buffer(np.frombuffer(data, dtype=np.uint8)[kinds_of(data) != SPACE])
    offsets = pa.py_buffer(np.append(0, np.cumsum(stops - starts)))
    every = pa.LargeStringArray.from_buffers(len(starts), offsets, letters)
    return pa.Table.from_arrays(every.value_counts().flatten(), schema=COUNTS)


def in_buffers(strings: pa.LargeStringArray) -> tuple[bytes, np.ndarray]:
    """The UTF-8 of some strings one after another, and (strings + 1,) int64 where they begin and the last one ends."""
    _, offsets, data = strings.buffers()
    edges = np.frombuffer(offsets, dtype=np.int64)[strings.offset :][: len(strings) + 1]
    return data.slice(edges[0], edges[-1] - edges[0]).to_pybytes(), edges - edges[0]


def divide(data: bytes) -> tuple[bytes, np.ndarray, np.ndarray]:
    """A text in UTF-8 without REMOVED characters, and where its words begin and end."""
    kinds = kinds_of(data)
    gone = np.flatnonzero(kinds == REMOVED)
    if len(gone):
        data = np.delete(np.frombuffer(data, dtype=np.uint8), gone).tobytes()
        kinds = np.delete(kinds, gone)
    starts, stops = spans(kinds, data.isascii())
    return data, starts, stops


def spans(kinds: np.ndarray, ascii_only: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the words of a text begin and end whose bytes have these kinds, none of them REMOVED: runs of one kind."""
    first = []
    last = []
    kinds = np.concatenate([[np.uint8(SPACE)], kinds, [np.uint8(SPACE)]])
    for begin in range(0, len(kinds) - 1, DIVIDED_AT_ONCE):
        here = kinds[begin : begin + DIVIDED_AT_ONCE + 1]
        before = here[:-1]
        after = here[1:]
        edges = before != after
        if not ascii_only:
            edges &= after != INSIDE
        first.append(np.flatnonzero(edges & (after != SPACE)) + begin)
        last.append(np.flatnonzero(edges & (before != SPACE)) + begin)
    return np.concatenate(first), np.concatenate(last)


def mix(hashed: np.ndarray) -> None:
    """Spread the bits, so that each changes many; different numbers stay different."""
    hashed ^= hashed >> SHIFT
    hashed *= MULTIPLIER
    hashed ^= hashed >> SHIFT


def hashes_of(data: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """(words,) uint64: a hash of each word of UTF-8, eight bytes at a time; those of at most eight differ surely."""
    eight = np.ndarray(len(data) + 1, "<u8", data + bytes(8), strides=(1,))  # the eight bytes from each place on
    hashed = [np.zeros(0, dtype=np.uint64)]
    for first in range(0, len(starts), HASHED_AT_ONCE):
        some = slice(first, first + HASHED_AT_ONCE)
        hashed.append(_hashes(data, eight, starts[some], stops[some]))
    return np.concatenate(hashed)


def _hashes(data: bytes, eight: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    hashed = eight[starts] & MASKS.take(stops - starts, mode="clip")
    mix(hashed)
    longer = np.flatnonzero(stops - starts > 8)
    for begin in range(8, LONG, 8):
        at = starts[longer] + begin
        more = hashed[longer] + (eight[at] & MASKS[np.minimum(stops[longer] - at, 8)])
        mix(more)
        hashed[longer] = more
        longer = longer[stops[longer] - at > 8]
    for i in longer.tolist():
        hashed[i] = xxh3_64_intdigest(data[starts[i] : stops[i]])
    return hashed


class Numbers:
    """The numbers of 64-bit hashes, in the order in which they are added. 2^bits slots, or more, as half stay free."""

    def __init__(self, bits: int) -> None:
        self.make_slots(bits)

    def make_slots(self, bits: int) -> None:
        """Make 2^bits empty slots of 12 bytes."""
        self.slots = np.zeros(1 << bits, dtype=np.uint64)
        self.numbers = np.zeros(1 << bits, dtype=np.int32)
        self.shift = np.uint64(64 - bits)
        self.last = (1 << bits) - 1
        self.size = 0

    def find(self, hashed: np.ndarray) -> np.ndarray:
        """(hashes,) int32: their numbers; -1 for those that aren't here."""
        at = (hashed >> self.shift).view(np.int64)
        there = self.slots.take(at)
        here = there == hashed
        left = np.flatnonzero(~here)
        left = left[there[left] != 0]
        while len(left):  # another is in its slot: it is in the next, if it is here
            at[left] = at[left] + 1 & self.last
            there = self.slots.take(at[left])
            here[left] = there == hashed[left]
            left = left[~here[left] & (there != 0)]
        return np.where(here, self.numbers.take(at), -1)

    def add(self, hashed: np.ndarray) -> None:
        """Number some different ones that aren't here."""
        size = self.size + len(hashed)
        if 2 * size > len(self.slots):
            self.move(size.bit_length() + 1)
        at = (hashed >> self.shift).view(np.int64)
        left = np.arange(len(hashed))
        while len(left):
            free = left[self.slots[at[left]] == 0]
            self.slots[at[free]] = hashed[free]
            left = left[self.slots[at[left]] != hashed[left]]  # another is there, perhaps one of these
            at[left] = at[left] + 1 & self.last
        self.numbers[at] = np.arange(self.size, size)
        self.size = size

    def move(self, bits: int) -> None:
        """Move all to 2^bits new slots."""
        taken = np.flatnonzero(self.slots)
        in_order = taken[np.argsort(self.numbers[taken])]
        hashed = self.slots[in_order]
        self.make_slots(bits)
        self.add(hashed)
