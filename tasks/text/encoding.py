"""Encoding: the tokens of many documents, for which each different word is divided once."""

import functools
import threading
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

from tasks.text import words
from tasks.text.tokenizer import FILES, LONGEST_DIVIDED, LONGEST_WORD, UNWRITTEN, load_tokenizer, marking

PIECE_CHARACTERS = 4_000_000  # of text split at once, which takes ten times their memory
LEARNED_AT_ONCE = 1 << 16  # words; each takes some hundred bytes
DIVIDED_AT_ONCE = 1 << 12  # words in a batch, for one thread
BATCHES_AT_ONCE = 32
KNOWN_WORDS = 1 << 20  # at so many the encoder forgets all words: about 200 MB


def pieces(text: str) -> Iterator[str]:
    """A long text in pieces of some million characters, cut at white space so that no word is divided."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        ends = [end for end in (text.find(c, start + PIECE_CHARACTERS) for c in " \n\t") if end >= 0]
        end = min(ends, default=len(text))
        yield text[start:end]
        start = end
    yield text[start:]


class Encoded(NamedTuple):
    """The ids of some texts, one after the other: those of text i are `ids[ends[i - 1]:ends[i]]`."""

    ids: np.ndarray  # (tokens,) uint16, or uint32 for more than 65,536 entries
    ends: np.ndarray  # (texts,) int64


class Encoder:
    """Encodes texts as the tokenizer does, without special tokens, but divides every different word only once.

    A word's tokens don't depend on the words around it, so this is exact, and several times as fast. A word of more
    than LONGEST_DIVIDED characters is [UNK] in every model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words = Tokenizer(tokenizer.model)  # divides words, without normalising them or recognising special tokens
        self.words.pre_tokenizer = pre_tokenizers.Sequence(marking(tokenizer.model))
        self.type = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
        self.forget()

    def forget(self) -> None:
        """Forget all words."""
        self.places: dict[str, int] = {}
        self.lengths, self.starts, self.ids = np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, self.type)

    def known(self, different: list[str]) -> np.ndarray:
        """The number of each word among the known ones; new ones are learned first."""
        if len(self.places) > KNOWN_WORDS:
            self.forget()
        places = np.fromiter(map(self.places.get, different, repeat(-1)), np.int64, len(different))
        unknown = np.flatnonzero(places < 0)
        places[unknown] = np.arange(len(unknown)) + len(self.places)
        new = [different[i] for i in unknown.tolist()]
        for start in range(0, len(new), LEARNED_AT_ONCE):
            self._learn(new[start : start + LEARNED_AT_ONCE])
        return places

    def _learn(self, new: list[str]) -> None:
        divided = [word if len(word) <= LONGEST_DIVIDED else UNWRITTEN for word in new]
        encoding = self.words.encode(divided, is_pretokenized=True, add_special_tokens=False)
        lengths = np.bincount(np.array(encoding.word_ids, dtype=np.int64), minlength=len(new)).astype(np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths + len(self.ids)
        self.places.update(zip(new, range(len(self.places), len(self.places) + len(new)), strict=True))
        self.lengths, self.starts = np.append(self.lengths, lengths), np.append(self.starts, starts)
        self.ids = np.append(self.ids, np.array(encoding.ids, dtype=self.type))

    def __call__(self, texts: list[str]) -> Encoded:
        """The ids of the texts."""
        ids, ends, before = [], [], 0
        for some, last in portions(texts):
            split = words.split(some)
            places = self.known(split.different)
            counts = self.lengths[places][split.indices]
            word_ends = np.cumsum(counts, dtype=np.int64)
            # from a token's place here to its place in self.ids
            shift = self.starts[places][split.indices] - (word_ends - counts)
            ids.append(self.ids[np.repeat(shift, counts) + np.arange(len(shift) and word_ends[-1])])
            ends.append(np.append(0, word_ends)[split.ends][last] + before)
            before += len(ids[-1])
        return Encoded(np.concatenate(ids), np.concatenate(ends))

    def tokens(self, texts: list[str]) -> np.ndarray:
        """(texts,) the number of tokens of each text; a word longer than LONGEST_WORD counts as its characters."""
        ends, before = [], 0
        for some, last in portions(texts):
            split = words.split(some)
            letters = np.fromiter(map(len, split.different), np.int64, len(split.different))
            places = self.known(split.different)
            costs = np.where(letters > LONGEST_WORD, letters, self.lengths[places])
            sums = np.append(0, np.cumsum(costs[split.indices]))
            ends.append(sums[split.ends][last] + before)
            before += int(sums[-1])
        return np.diff(np.concatenate(ends), prepend=0)


def encoder_of(folder: Path) -> Encoder:
    """The encoder of a vocabulary. A worker keeps it from part to part, since it then knows most words."""
    about = (folder / FILES[0]).stat()
    return _encoder(folder, about.st_mtime_ns, about.st_ino, threading.get_ident())


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, *_: int) -> Encoder:
    return Encoder(load_tokenizer(folder))


def portions(texts: list[str]) -> Iterator[tuple[list[str], np.ndarray]]:
    """The texts, long ones in pieces, some million characters at a time; and which of the pieces end a text."""
    some, last, size = [], [], 0
    for text in texts:
        for piece in pieces(text):
            if some and size + len(piece) > PIECE_CHARACTERS:
                yield some, np.array(last)
                some, last, size = [], [], 0
            some.append(piece)
            last.append(False)
            size += len(piece)
        last[-1] = True
    yield some, np.array(last, dtype=bool)
