"""WordPiece for many words at once: the longest entries from left to right, by a trie of the bytes of all entries."""

from typing import NamedTuple

import numpy as np

from tasks.text.words import Numbers, mix

LONGEST_WORD = 100  # characters; a longer word is [UNK], as in BERT, and is left out of training
CONTINUES = "##"  # before an entry that continues a word
EDGE_BITS = 19  # slots for the edges of the trie: 32,768 entries have some 10^5
NONE = -1  # in place of an id
AT_ONCE = 1 << 16  # words


class Walk(NamedTuple):
    """Words that are being divided, each at a place and in a state of the trie."""

    words: np.ndarray  # their numbers
    at: np.ndarray  # the next byte of each
    stops: np.ndarray
    states: np.ndarray
    longest: np.ndarray  # the entry that reaches farthest from where the last one ended, or NONE
    ends: np.ndarray  # where that entry ends

    def take(self, chosen: np.ndarray) -> "Walk":
        """Some of them."""
        return Walk(*(each[chosen] for each in self))


class WordPieces:
    """Divides words as the WordPiece model of `tokenizers` does, several times as fast.

    A state of the trie is the beginning of an entry, and an edge a state with a next byte; edge i leads to state i + 1.
    """

    def __init__(self, vocabulary: dict[str, int]) -> None:
        entries = [entry.encode() for entry in (CONTINUES, *vocabulary)]  # which can be an entry itself too
        raw = np.frombuffer(b"".join(entries), dtype=np.uint8)
        sizes = np.array([len(entry) for entry in entries])
        starts = np.cumsum(sizes) - sizes
        states = np.zeros(len(entries), dtype=np.int64)
        self.edges = Numbers(EDGE_BITS)
        for depth in range(sizes.max()):
            longer = np.flatnonzero(sizes > depth)
            edges = edges_of(states[longer], raw[starts[longer] + depth])
            self.edges.add(np.unique(edges))
            states[longer] = self.edges.find(edges) + 1
        self.ids = np.full(self.edges.size + 1, NONE, dtype=np.int64)  # of the entry that a state is, if it is one
        self.ids[states] = [NONE, *vocabulary.values()]
        self.inside = states[0]  # from which a word is continued

    def divide(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids of the words of UTF-8 `data[starts:stops]`, none empty; and (words,) how many each has.

        A word that can't be divided, or has more than LONGEST_WORD characters, has NONE as its only id.
        """
        ids = [np.zeros(0, dtype=np.int64)]
        lengths = [np.zeros(0, dtype=np.int64)]
        for first in range(0, len(starts), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            of_some, number = self._divide(data, starts[some], stops[some]).in_order()
            ids.append(of_some)
            lengths.append(number)
        return np.concatenate(ids), np.concatenate(lengths)

    def _divide(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> "Pieces":
        raw = np.frombuffer(data, dtype=np.uint8)
        undivided = too_long(data, starts, stops)
        found = Pieces(undivided)
        words = np.flatnonzero(~undivided)
        begins = starts[words]
        walk = Walk(words, begins, stops[words], np.zeros_like(words), np.full(len(words), NONE), begins)
        while len(walk.words):
            walk = self._step(walk, raw)
            over = (walk.states == 0) | (walk.at == walk.stops)  # no longer entry begins here
            found.add(walk.words[over], walk.longest[over])
            undivided[walk.words[over & (walk.longest == NONE)]] = True
            left = ~over | (walk.ends < walk.stops) & ~undivided[walk.words]
            walk = self._begin_next(walk, over).take(left)
        return found

    def _step(self, walk: Walk, raw: np.ndarray) -> Walk:
        """All words a byte further."""
        states = self.edges.find(edges_of(walk.states, raw[walk.at])) + 1
        at = walk.at + 1
        entries = self.ids[states]
        is_entry = entries != NONE
        longest = np.where(is_entry, entries, walk.longest)
        ends = np.where(is_entry, at, walk.ends)
        return Walk(walk.words, at, walk.stops, states, longest, ends)

    def _begin_next(self, walk: Walk, over: np.ndarray) -> Walk:
        """Look for the next entry of some words, from where the longest one ends."""
        at = np.where(over, walk.ends, walk.at)
        states = np.where(over, self.inside, walk.states)
        longest = np.where(over, NONE, walk.longest)
        return walk._replace(at=at, states=states, longest=longest)


class Pieces:
    """The entries of some words as they are found, those of a word from left to right."""

    def __init__(self, undivided: np.ndarray) -> None:
        self.undivided = undivided  # (words,) bool: those that turn out to be NONE, which may still change
        self._owners: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []

    def add(self, owners: np.ndarray, ids: np.ndarray) -> None:
        """Add the next entry of each of these words."""
        self._owners.append(owners)
        self._ids.append(ids)

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids, a word after the other, and (words,) how many each word has."""
        none = np.flatnonzero(self.undivided)
        owners = np.concatenate([none, *self._owners])
        ids = np.concatenate([np.full(len(none), NONE), *self._ids])
        # what was found of a word before it turned out to be NONE does not count
        counts = ~self.undivided[owners] | (np.arange(len(owners)) < len(none))
        owners = owners[counts]
        order = np.argsort(owners, kind="stable")
        return ids[counts][order], np.bincount(owners, minlength=len(self.undivided))


def too_long(data: bytes, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """(words,) bool: whether each word of UTF-8 has more than LONGEST_WORD characters."""
    result = stops - starts > LONGEST_WORD  # bytes
    for i in np.flatnonzero(result).tolist():
        word = data[starts[i] : stops[i]].decode()
        result[i] = len(word) > LONGEST_WORD
    return result


def edges_of(states: np.ndarray, following: np.ndarray) -> np.ndarray:
    """(states,) uint64: a hash of each state with the byte that follows it, surely a different one for each pair."""
    edges = states.astype(np.uint64) << np.uint64(8) | following
    mix(edges)
    return edges
