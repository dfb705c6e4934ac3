"""Many documents to tokens, fast: an encoder of cram's vocabularies, and one by `tokenizers` for all others."""

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from model.settings import SPECIALS
from tasks.text import tokenizer as vocabularies
from tasks.text import words
from tasks.text.tokenizer import (
    FILES,
    UNK,
    encode,
    is_trained_here,
    load_tokenizer,
    normaliser_of,
    pieces,
    reading_of,
    specials_of,
    type_of_ids,
)
from tasks.text.wordpiece import LONGEST_WORD, NONE, WordPieces

KNOWN_WORDS = 1 << 20  # at so many the encoder forgets all words: about 70 MB
SLOT_BITS = 22  # for so many words


class Encoded(NamedTuple):
    """The ids of some texts, one after the other: those of text i are `ids[ends[i - 1]:ends[i]]`."""

    ids: np.ndarray  # (tokens,) uint16, or uint32 for more than 65,536 entries
    ends: np.ndarray  # (texts,) int64


class LibraryEncoder:
    """Encodes texts by `tokenizers`, without special tokens: for the tokenizer of another program's model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.how = reading_of(tokenizer)
        self.specials = specials_of(tokenizer)
        self.type = type_of_ids(tokenizer)
        self.unknown: Counter[str] = Counter()  # words that were encoded as [UNK]; the beginning of long ones

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of the texts."""
        ids: list[np.ndarray] = [np.zeros(0, self.type)]
        ends = []
        before = 0
        for some, is_last in portions(texts):
            encodings = self.tokenizer.encode_batch_fast(some, add_special_tokens=False)
            of_pieces = [np.array(encoding.ids, dtype=self.type) for encoding in encodings]
            sizes = np.array([len(of_piece) for of_piece in of_pieces], dtype=np.int64)
            edges = np.cumsum(sizes) + before
            ids.extend(of_pieces)
            ends.append(edges[is_last])
            before += int(sizes.sum())
            for piece, of_piece in zip(some, of_pieces, strict=True):
                if self.specials.unk in of_piece:
                    self.unknown.update(word[: LONGEST_WORD + 1] for word in self.unknown_in(piece))
        return Encoded(np.concatenate(ids), np.concatenate(ends))

    def unknown_in(self, text: str) -> list[str]:
        """The words of a text that are [UNK], as often as they are."""
        ids, spans = encode(text, self.tokenizer)
        is_unknown = ids == self.specials.unk
        begins = spans.begins[is_unknown].tolist()
        ends = spans.ends[is_unknown].tolist()
        return [text[begin:end] for begin, end in zip(begins, ends, strict=True)]

    def tokens(self, texts: list[str]) -> np.ndarray:
        """(texts,) the number of tokens of each text; a word longer than LONGEST_WORD counts as its characters."""
        ids, ends = self(texts)
        tokens = np.diff(ends, prepend=0)
        for number, of_text in enumerate(np.split(ids, ends[:-1])):
            if self.specials.unk in of_text:
                sizes = [len(word) for word in self.unknown_in(texts[number])]
                tokens[number] += sum(size - 1 for size in sizes if size > LONGEST_WORD)
        return tokens


class Encoder:
    """Encodes texts as the tokenizer does, without special tokens, but divides every different word only once.

    A word's tokens don't depend on the words around it, so this is exact, and several times as fast. Words are known by
    hashes of 64 bits: among 10^8 words of more than eight bytes, one is taken for another with a probability of 10^-5.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.how = normaliser_of(tokenizer)
        self.specials = SPECIALS
        self.pieces = WordPieces(tokenizer.get_vocab())
        self.type = type_of_ids(tokenizer)
        self.unknown: Counter[str] = Counter()  # words that were encoded as [UNK]; the beginning of long ones
        self.forget()

    def forget(self) -> None:
        """Forget all words."""
        self.numbers = words.Numbers(SLOT_BITS)
        self.undivided: dict[int, str] = {}  # by number, those that are [UNK]
        self.ids = np.zeros(0, self.type)  # of all known words, one after the other
        self.edges = np.zeros(1, np.int64)  # where each word's begin, and the last one's end
        self.costs = np.zeros(0, np.int32)  # see `tokens`

    def known(self, found: words.Words) -> np.ndarray:
        """The number of each word among the known ones; new ones are learned first."""
        if self.numbers.size > KNOWN_WORDS:
            self.forget()
        hashed = words.hashes_of(found.data, found.starts, found.stops)
        numbers = self.numbers.find(hashed)
        unknown = np.flatnonzero(numbers < 0)
        new, first, which = np.unique(hashed[unknown], return_index=True, return_inverse=True)
        numbers[unknown] = which + self.numbers.size
        self.numbers.add(new)
        self._learn(found.data, found.starts[unknown[first]], found.stops[unknown[first]])
        return numbers

    def _learn(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> None:
        """Divide some new words, and know them from now on."""
        ids, lengths = self.pieces.divide(data, starts, stops)
        ends = np.cumsum(lengths)
        for i in np.flatnonzero(ids[ends - 1] == NONE).tolist():
            word = data[starts[i] : stops[i]].decode()
            self.undivided[len(self.costs) + i] = word[: LONGEST_WORD + 1]
            lengths[i] = len(word) if len(word) > LONGEST_WORD else 1
        self.costs = np.append(self.costs, lengths.astype(np.int32))
        self.edges = np.append(self.edges, ends + len(self.ids))
        self.ids = np.append(self.ids, np.where(ids == NONE, UNK, ids).astype(self.type))

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of the texts."""
        ids = []
        ends = []
        before = 0
        for some, is_last in portions(texts):
            found = words.split(some, self.how)
            numbers = self.known(found)
            self._count_unknown(numbers)
            of_words, edges = self._ids_of(numbers)
            ids.append(of_words)
            ends.append(edges[found.ends][is_last] + before)
            before += len(of_words)
        return Encoded(np.concatenate(ids), np.concatenate(ends))

    def _ids_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of these known words, one after the other, and where each word's begin and the last one's end."""
        size = self.ids.itemsize
        buffers = [None, pa.py_buffer(self.edges * size), pa.py_buffer(self.ids)]
        lists = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(self.costs), buffers)
        _, offsets, data = lists.take(pa.array(numbers)).buffers()  # twice as fast as by numpy
        edges = np.frombuffer(offsets, np.int64, len(numbers) + 1) // size
        return np.frombuffer(data, self.type, edges[-1]), edges

    def _count_unknown(self, numbers: np.ndarray) -> None:
        if not self.undivided:
            return
        is_undivided = np.zeros(len(self.costs), dtype=bool)
        is_undivided[list(self.undivided)] = True
        found = numbers[is_undivided[numbers]].tolist()
        self.unknown.update(map(self.undivided.__getitem__, found))

    def tokens(self, texts: list[str]) -> np.ndarray:
        """(texts,) the number of tokens of each text; a word longer than LONGEST_WORD counts as its characters."""
        ends = []
        before = 0
        for some, is_last in portions(texts):
            found = words.split(some, self.how)
            numbers = self.known(found)
            sums = np.append(0, np.cumsum(self.costs[numbers], dtype=np.int64))
            ends.append(sums[found.ends][is_last] + before)
            before += int(sums[-1])
        return np.diff(np.concatenate(ends), prepend=0)


def encoder_of(folder: Path) -> Encoder | LibraryEncoder:
    """The encoder of a vocabulary. A worker keeps it from part to part, since it then knows most words."""
    about = (folder / FILES[0]).stat()
    return _encoder(folder, about.st_mtime_ns, about.st_ino, threading.get_ident())


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, *_: int) -> Encoder | LibraryEncoder:
    tokenizer = load_tokenizer(folder)
    if is_trained_here(tokenizer):
        return Encoder(tokenizer)
    return LibraryEncoder(tokenizer)


def portions(texts: list[str]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The texts, long ones in pieces, some million characters at a time; and which of the pieces end a text."""
    some: list[str] = []
    is_last: list[bool] = []
    size = 0
    for text in texts:
        for piece in pieces(text):
            if some and size + len(piece) > vocabularies.PIECE_CHARACTERS:
                yield some, np.array(is_last)
                some = []
                is_last = []
                size = 0
            some.append(piece)
            is_last.append(False)
            size += len(piece)
        is_last[-1] = True
    yield some, np.array(is_last, dtype=bool)
