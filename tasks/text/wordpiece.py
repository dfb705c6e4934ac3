"""WordPiece for many words at once: the longest entries from left to right, by a trie of the bytes of all entries."""

import numpy as np

from tasks.text.words import Numbers, mix

LONGEST_WORD = 100  # characters; a longer word is [UNK], as in BERT, and is left out of training
CONTINUES = "##"  # before an entry that continues a word
EDGE_BITS = 19  # slots for the edges of the trie: 32,768 entries have some 10^5
NONE = -1  # in place of an id
AT_ONCE = 1 << 16  # words


class WordPieces:
    """Divides words as the WordPiece model of `tokenizers` does, several times as fast.

    A state of the trie is the beginning of an entry, and an edge a state with a next byte; edge i leads to state i + 1.
    """

    def __init__(self, vocabulary: dict[str, int]) -> None:
        entries = [entry.encode() for entry in (CONTINUES, *vocabulary)]  # which can be an entry itself too
        raw, sizes = np.frombuffer(b"".join(entries), dtype=np.uint8), np.array(list(map(len, entries)))
        starts, states = np.cumsum(sizes) - sizes, np.zeros(len(entries), dtype=np.int64)
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
        slices = [slice(first, first + AT_ONCE) for first in range(0, max(1, len(starts)), AT_ONCE)]
        ids, lengths = zip(*(self._divide(data, starts[some], stops[some]) for some in slices), strict=True)
        return np.concatenate(ids), np.concatenate(lengths)

    def _divide(self, data: bytes, starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        raw, undivided = np.frombuffer(data, dtype=np.uint8), stops - starts > LONGEST_WORD
        for i in np.flatnonzero(undivided).tolist():
            undivided[i] = len(data[starts[i] : stops[i]].decode()) > LONGEST_WORD
        words, owners, ids = np.flatnonzero(~undivided), [], []
        at, stops, states = starts[words], stops[words], np.zeros(len(words), dtype=np.int64)
        longest, ends = np.full(len(words), NONE), at  # the entry that reaches farthest from here, and its end
        while len(words):
            states, at = self.edges.find(edges_of(states, raw[at])) + 1, at + 1
            found = self.ids[states]
            longest, ends = np.where(found != NONE, found, longest), np.where(found != NONE, at, ends)
            over = (states == 0) | (at == stops)
            owners.append(words[over])
            ids.append(longest[over])
            undivided[words[over & (longest == NONE)]] = True
            at, states, longest = (
                np.where(over, *both) for both in ((ends, at), (self.inside, states), (NONE, longest))
            )
            left = ~over | (ends < stops) & ~undivided[words]
            words, at, stops, states, longest, ends = (x[left] for x in (words, at, stops, states, longest, ends))
        none = np.flatnonzero(undivided)
        every, found = np.concatenate([none, *owners]), np.concatenate([np.full(len(none), NONE), *ids])
        kept = ~undivided[every] | (np.arange(len(every)) < len(none))
        every, found = every[kept], found[kept]
        return found[np.argsort(every, kind="stable")], np.bincount(every, minlength=len(undivided))


def edges_of(states: np.ndarray, following: np.ndarray) -> np.ndarray:
    """(states,) uint64: a hash of each state with the byte that follows it, surely a different one for each pair."""
    edges = states.astype(np.uint64) << np.uint64(8) | following
    mix(edges)
    return edges
