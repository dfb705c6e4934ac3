"""Overlap: how much of some texts stands in others too, in runs of 13 words.

The words are those of `matching.py`, as for GLUE's sentences: a character of a script without spaces is half a word, so
a run of 26 of them counts. A text of fewer words has no run, and shares nothing.
"""

import numpy as np

from tasks.text.matching import hash_ngrams, matching_words, stops_of
from tasks.text.ngrams import Known, ngrams

WORDS_IN_A_ROW = 13  # words in a row, as in the GPT-3 paper


def ngrams_in(texts: list[str]) -> np.ndarray:
    """The hashes of all runs of these texts, uint64, ascending and different."""
    hashed, _ = ngrams(texts, WORDS_IN_A_ROW)
    return np.unique(hashed)


def ngrams_in_common(known: Known, texts: list[str]) -> np.ndarray:
    """The hashes of those known runs that these texts have too, ascending and different."""
    hashed, _ = ngrams(texts, WORDS_IN_A_ROW)
    _, numbers = known.look_up(hashed)
    return known.hashes[np.unique(numbers)]


def count_short(texts: list[str]) -> int:
    """How many of these texts have no run, so that they can't be compared."""
    _, ends = ngrams(texts, WORDS_IN_A_ROW)
    return int((np.diff(ends, prepend=0) == 0).sum())


def words_in_common(shared: Known, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The words of each text, and how many of them are in one of the shared runs: (texts,) int64 each."""
    found = matching_words(texts)
    hashed, ends = hash_ngrams(found, WORDS_IN_A_ROW, by_halves=True)
    at, _ = shared.look_up(hashed)
    words = np.diff(found.ends, prepend=0)
    first_words = found.ends - words
    first_runs = np.append(0, ends)[:-1]
    owners = np.searchsorted(ends, at, side="right")
    # run j of a text begins at its word j, since only its last words begin none
    begins = at - first_runs[owners] + first_words[owners]
    stops = stops_of(found.halves, WORDS_IN_A_ROW)[begins]

    size = len(found.hashes) + 1
    begun = np.bincount(begins, minlength=size)
    ended = np.bincount(stops, minlength=size)
    is_shared = np.cumsum(begun - ended) > 0
    shared_before = np.append(0, np.cumsum(is_shared))
    return words, shared_before[found.ends] - shared_before[first_words]
