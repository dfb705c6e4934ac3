"""N-grams: which runs of words of some sentences occur in a text, and where.

Runs are looked up by their hashes, some tens of megabytes of text a second. Of 64 bits, these are as good as the words:
in 10^10 words of text, ten million runs are found by mistake with a probability of 0.5 %.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.text.matching import HALVES, PLAIN_TEXT, is_half, matched, runs
from tasks.text.tokenizer import pieces

PENN = re.compile(r" (?=n't\b)|-[lr]rb-(?=\s|$)", re.IGNORECASE)  # in SST-2 and others: "do n't", brackets
TEXT = pa.string()
SENTENCE = pa.schema([("task", TEXT), ("split", TEXT), ("row", pa.int64()), ("column", TEXT), ("text", TEXT)])
WORD = re.compile("[^ ]+")


class Word(NamedTuple):
    """A word of a text, normalised, and the characters that it was."""

    start: int
    end: int
    word: str
    half: bool  # counts as half a word


def ngrams(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words of each text, uint64, and where those of each text end."""
    return runs(matched(texts), n, by_halves=True)


def words_in(text: str) -> Iterator[Word]:
    """The words that `ngrams` sees in a text, with their places. Fifty times slower, so only for texts with a match."""
    start = 0
    for piece in pieces(text):
        made = [PLAIN_TEXT[ord(char)] for char in piece]
        places = np.repeat(np.arange(start, start + len(piece)), [len(letters) for letters in made])
        for found in WORD.finditer("".join(made)):
            word = found.group()
            yield Word(int(places[found.start()]), int(places[found.end() - 1]) + 1, word, is_half(word[0]))
        start += len(piece)


def passage(text: str, firsts: list[int], n: int) -> tuple[int, int]:
    """Where the first passage begins and ends that runs of n words make, one after the other or overlapping.

    firsts: the numbers of the first word of each run, ascending.
    """
    begins, start, end, left = set(firsts), None, 0, 0
    for number, word in enumerate(islice(words_in(text), firsts[0], None), firsts[0]):
        left = HALVES * n if number in begins else left
        if left <= 0:
            break
        start = word.start if start is None else start
        end, left = word.end, left - (HALVES - word.half)
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1  # the accents of the last letter are a part of it
    return start, end


def restored(sentence: str) -> str:
    """A sentence without the tokenization of the Penn Treebank."""
    return PENN.sub(lambda token: " " if "rb" in token.group().lower() else "", sentence)


def write_index(batches: Iterable[tuple], tasks: list[str], n: int, folder: Path) -> dict[str, dict]:
    """Write the runs of n words of the tasks' sentences to files that `Index` reads, and count by task.

    A batch has sentences in successive rows of one column: task, split, column, row of the first, texts.
    """
    rows, hashes, owners = [], [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    counts = {task: {"sentences": 0, "too_short": 0} for task in tasks}
    for task, split, column, first, texts in batches:
        prose = [restored(text) for text in texts]
        forms = [*enumerate(prose), *((i, text) for i, text in enumerate(texts) if text != prose[i])]
        hashed, ends = ngrams([text for _, text in forms], n)
        sizes = np.diff(ends, prepend=0)
        long = np.flatnonzero(sizes)
        counts[task]["sentences"] += len(texts)
        counts[task]["too_short"] += int(np.count_nonzero(sizes[: len(texts)] == 0))
        hashes.append(hashed)
        owners.append(np.repeat(np.arange(len(rows), len(rows) + len(long)), sizes[long]))
        rows += [(task, split, first + i, column, text) for i, text in (forms[k] for k in long.tolist())]
    hashed, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.lexsort((owner, hashed))
    hashed, owner = hashed[order], owner[order]
    different, starts = np.unique(hashed, return_index=True)
    of_task = np.array([tasks.index(row[0]) for row in rows], dtype=np.uint8)[owner]
    for i, task in enumerate(tasks):
        counts[task]["ngrams"] = len(np.unique(hashed[of_task == i]))
    for name, array in (("hashes", different), ("starts", np.append(starts, len(owner))), ("owners", owner)):
        np.save(folder / f"{name}.npy", array)
    columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(SENTENCE)]
    with pa.ipc.new_file(folder / "sentences.arrow", SENTENCE) as file:
        file.write_table(pa.table(columns, schema=SENTENCE))
    return counts


class Known:
    """N-grams in which others are looked up. `hashes`: their hashes, uint64, ascending and different."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = hashes
        bits = max(16, (8 * len(hashes)).bit_length())
        self.shift = np.uint64(64 - bits)  # the first bits of a hash rule out most that are not known
        self.table = np.zeros(1 << bits, dtype=bool)
        self.table[hashes >> self.shift] = True

    def look_up(self, hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of those hashes that are known, and the number of the n-gram of each."""
        at = np.flatnonzero(self.table[hashed >> self.shift])
        order = np.argsort(hashed[at])  # a search in order is four times as fast
        grams = np.empty(len(at), dtype=np.int64)
        grams[order] = np.minimum(np.searchsorted(self.hashes, hashed[at[order]]), len(self.hashes) - 1)
        same = self.hashes[grams] == hashed[at]
        return at[same], grams[same]


class Index(Known):
    """The runs of n words of all sentences, memory-mapped from the files of `write_index`."""

    def __init__(self, folder: Path, n: int) -> None:
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "owners"))
        hashes, self.starts, self.owners = arrays
        super().__init__(hashes)
        self.n = n
        self.sentences = pa.ipc.open_file(pa.memory_map(str(folder / "sentences.arrow"))).read_all()

    def sentences_of(self, grams: Iterable[int]) -> pa.Table:
        """The sentences that have one of these n-grams, in order: rows of SENTENCE."""
        owners = [self.owners[self.starts[gram] : self.starts[gram + 1]] for gram in grams]
        return self.sentences.take(pa.array(np.unique(np.concatenate([np.zeros(0, np.int64), *owners]))))

    def sentences_by_task(self, grams: Iterable[int]) -> Counter:
        """How many sentences of each task have one of these n-grams; one can be here twice, as given and restored."""
        rows = self.sentences_of(grams).select(["task", "split", "row", "column"]).to_pylist()
        return Counter(task for task, *_ in {tuple(row.values()) for row in rows})

    def find(self, texts: list[str]) -> dict[int, list[tuple[int, int]]]:
        """The runs of the index in these texts, by the number of the text: that of its first word, and the n-gram."""
        hashed, ends = ngrams(texts, self.n)
        at, grams = self.look_up(hashed)
        numbers, found = np.searchsorted(ends, at, side="right"), defaultdict(list)
        places = at - np.append(0, ends)[numbers]
        for number, *run in zip(numbers.tolist(), places.tolist(), grams.tolist(), strict=True):
            found[number].append(tuple(run))
        return found
