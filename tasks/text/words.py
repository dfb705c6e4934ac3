"""The words of many texts at once, by array operations: runs of letters, digits and underscores, or of punctuation.

They are those of the vocabulary's normaliser and pre-tokenizer (`tokenizer.py`), which a test checks for every code
point. Each different word is then encoded, counted or hashed once, several times as fast as at every occurrence.
"""

import string
import unicodedata
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

SLICE = 1 << 18  # bytes processed at once: what fits in a core's cache
SPACES = b"\t\n\v\f\r "
DROPPED = bytes(c for c in range(128) if c < 32 and c not in SPACES) + b"\x7f"
LOWER = bytes(range(256)).lower()
PUNCTUATION, SPACE, WORD = range(3)
KINDS = bytes(
    SPACE if c in SPACES else WORD if chr(c) in string.ascii_letters + string.digits + "_" else PUNCTUATION
    for c in range(256)
)
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd, with its bits well spread: 2^64 over the golden ratio
SHIFT = np.uint64(32)
COUNTS = pa.schema([("word", pa.large_string()), ("count", pa.int64())])


class Words(NamedTuple):
    """The words of some texts: those of text i are `different[k] for k in indices[ends[i - 1]:ends[i]]`."""

    different: list[str]
    indices: np.ndarray  # (words,) int32
    ends: np.ndarray  # (texts,) int64


def normalise(text: str) -> bytes:
    """Plain quotes, no accents, lower case; printable ASCII and white space only."""
    if "``" in text:
        text = text.replace("``", '"')
    if "''" in text:
        text = text.replace("''", '"')
    if not text.isascii():
        text = unicodedata.normalize("NFD", text)  # a letter with an accent becomes the letter, then the accent
    return text.encode("ascii", "ignore").translate(LOWER, DROPPED)


def split(texts: list[str]) -> Words:
    """The words of the texts, in order. Takes about ten times the memory of the texts."""
    plain = [normalise(text) for text in texts]
    every, starts = divide(b"\n".join([*plain, b""]))
    words = every.view(pa.large_string()).dictionary_encode()
    text_ends = np.cumsum([len(p) + 1 for p in plain], dtype=np.int64)
    return Words(words.dictionary.to_pylist(), words.indices.to_numpy(), np.searchsorted(starts, text_ends))


def count(texts: list[str]) -> pa.Table:
    """How often each word occurs in the texts: COUNTS. Takes the memory of `split`, but creates no Python objects."""
    every, _ = divide(b"\n".join(map(normalise, texts)))
    return pa.Table.from_arrays(every.view(pa.large_string()).value_counts().flatten(), schema=COUNTS)


def divide(data: bytes) -> tuple[pa.LargeBinaryArray, np.ndarray]:
    """The words of a text, in order, and the place of each word's first byte."""
    starts, lengths = runs(data)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    letters = data.translate(None, SPACES)  # all words, one after another
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(letters)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers), starts


def runs(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where the words begin, and their lengths: runs of bytes of one kind, except white space."""
    kinds = np.frombuffer(b"".join((b" ", data, b" ")).translate(KINDS), dtype=np.uint8)
    starts, ends = [], []
    for first in range(0, len(kinds) - 1, SLICE):
        here = kinds[first : first + SLICE + 1]
        before, after = here[:-1], here[1:]
        edges = before != after
        starts.append(np.flatnonzero(edges & (after != SPACE)) + first)
        ends.append(np.flatnonzero(edges & (before != SPACE)) + first)
    begin = np.concatenate(starts)
    return begin, np.concatenate(ends) - begin


def hashes(words: Words) -> np.ndarray:
    """(words,) uint64: a hash that depends on the word alone."""
    of_each = [xxhash.xxh3_64_intdigest(word.encode()) for word in words.different]
    return np.array(of_each, dtype=np.uint64)[words.indices]


def grams(hashed: np.ndarray, ends: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of `n` words within a text, uint64, and where those of each text end.

    `hashed` and `ends` are those of the single words. A text of fewer than n words has no run.
    """
    last = max(0, len(hashed) - n + 1)
    mixed = np.zeros(last, dtype=np.uint64)
    for i in range(n):  # a polynomial of the words, mod 2^64
        mixed *= MULTIPLIER
        mixed += hashed[i : last + i]
    mixed ^= mixed >> SHIFT
    mixed *= MULTIPLIER
    mixed ^= mixed >> SHIFT
    counts = np.diff(ends, prepend=0)
    whole = np.ones(last, dtype=bool)
    for back in range(1, n):  # runs that begin this near to the end of a text extend into the next
        at = ends[counts >= back] - back
        whole[at[at < last]] = False
    return mixed[whole], np.cumsum(np.maximum(counts - n + 1, 0))
