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

from tasks.text.matching import HALVES, PLAIN_TEXT, hash_ngrams, is_half, matching_words
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
    return hash_ngrams(matching_words(texts), n, by_halves=True)


def words_in(text: str) -> Iterator[Word]:
    """The words that `ngrams` sees in a text, with their places. Fifty times slower, so only for texts with a match."""
    start = 0
    for piece in pieces(text):
        made = [PLAIN_TEXT[ord(char)] for char in piece]
        sizes = [len(letters) for letters in made]
        places = np.repeat(np.arange(start, start + len(piece)), sizes).tolist()
        for found in WORD.finditer("".join(made)):
            word = found.group()
            yield Word(places[found.start()], places[found.end() - 1] + 1, word, is_half(word[0]))
        start += len(piece)


def passage(text: str, firsts: list[int], n: int) -> tuple[int, int]:
    """Where the first passage begins and ends that runs of n words make, one after the other or overlapping.

    firsts: the numbers of the first word of each run, ascending.
    """
    begins = set(firsts)
    first = firsts[0]
    passage: list[Word] = []
    left = 0  # halves of words that the passage still has
    for number, word in enumerate(islice(words_in(text), first, None), first):
        if number in begins:
            left = HALVES * n
        if left <= 0:
            break
        passage.append(word)
        left -= HALVES - word.half
    end = passage[-1].end
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1  # the accents of the last letter are a part of it
    return passage[0].start, end


def detokenize(sentence: str) -> str:
    """A sentence without the tokenization of the Penn Treebank."""
    return PENN.sub(lambda token: " " if "rb" in token.group().lower() else "", sentence)


class SentenceBatch(NamedTuple):
    """Sentences in successive rows of one column."""

    task: str
    split: str
    column: str
    row: int  # of the first
    texts: list[str]

    def forms(self) -> list[tuple[int, str]]:
        """The sentences as prose with their numbers, and then as given those for which that is something else."""
        prose = [detokenize(text) for text in self.texts]
        changed = [(i, text) for i, text in enumerate(self.texts) if text != prose[i]]
        return [*enumerate(prose), *changed]


class SentenceNgrams:
    """The n-grams of sentences, and the sentences that have any: rows of SENTENCE."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.rows: list[tuple] = []
        self.hashes = [np.zeros(0, np.uint64)]
        self.owners = [np.zeros(0, np.int64)]

    def add(self, batch: SentenceBatch) -> int:
        """Add those of a batch; return how many of its sentences are too short to have any."""
        forms = batch.forms()
        hashed, ends = ngrams([text for _, text in forms], self.n)
        sizes = np.diff(ends, prepend=0)
        long = np.flatnonzero(sizes)
        self.hashes.append(hashed)
        self.owners.append(np.repeat(len(self.rows) + np.arange(len(long)), sizes[long]))
        for number in long.tolist():
            i, text = forms[number]
            self.rows.append((batch.task, batch.split, batch.row + i, batch.column, text))
        return int(np.count_nonzero(sizes[: len(batch.texts)] == 0))

    def in_order(self) -> tuple[np.ndarray, np.ndarray]:
        """All n-grams in ascending order, and the number of the row that has each."""
        hashed = np.concatenate(self.hashes)
        owner = np.concatenate(self.owners)
        order = np.lexsort((owner, hashed))
        return hashed[order], owner[order]


def write_index(batches: Iterable[SentenceBatch], tasks: list[str], n: int, folder: Path) -> dict[str, dict]:
    """Write the runs of n words of the tasks' sentences to files that `Index` reads, and count by task."""
    counts = {task: {"sentences": 0, "too_short": 0, "ngrams": 0} for task in tasks}
    found = SentenceNgrams(n)
    for batch in batches:
        counts[batch.task]["sentences"] += len(batch.texts)
        counts[batch.task]["too_short"] += found.add(batch)
    hashed, owner = found.in_order()
    save_index(hashed, owner, found.rows, folder)
    of_tasks = ngrams_by_task(hashed, owner, [task for task, *_ in found.rows])
    for task, number in of_tasks.items():
        counts[task]["ngrams"] = number
    return counts


def ngrams_by_task(hashed: np.ndarray, owner: np.ndarray, tasks: list[str]) -> dict[str, int]:
    """How many different n-grams each task has; tasks: those of the rows, by which `owner` gives the row of each."""
    names, numbers = np.unique(np.array(tasks, dtype=str), return_inverse=True)
    of_task = numbers.astype(np.uint8)[owner]
    return {name: len(np.unique(hashed[of_task == i])) for i, name in enumerate(names.tolist())}


def save_index(hashed: np.ndarray, owner: np.ndarray, rows: list[tuple], folder: Path) -> None:
    """Write the files of `Index`: n-grams in ascending order, the number of the row that has each, rows of SENTENCE."""
    different, starts = np.unique(hashed, return_index=True)
    np.save(folder / "hashes.npy", different)
    np.save(folder / "starts.npy", np.append(starts, len(hashed)))
    np.save(folder / "owners.npy", owner)
    columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(SENTENCE)]
    with pa.ipc.new_file(folder / "sentences.arrow", SENTENCE) as file:
        file.write_table(pa.table(columns, schema=SENTENCE))


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
        asked = hashed[at]
        order = np.argsort(asked)  # a search in order is four times as fast
        found = np.searchsorted(self.hashes, asked[order])
        grams = np.empty(len(at), dtype=np.int64)
        grams[order] = np.minimum(found, len(self.hashes) - 1)
        same = self.hashes[grams] == asked
        return at[same], grams[same]


class Index(Known):
    """The runs of n words of all sentences, memory-mapped from the files of `write_index`."""

    def __init__(self, folder: Path, n: int) -> None:
        super().__init__(np.load(folder / "hashes.npy", mmap_mode="r"))
        self.starts = np.load(folder / "starts.npy", mmap_mode="r")
        self.owners = np.load(folder / "owners.npy", mmap_mode="r")
        self.n = n
        self.sentences = pa.ipc.open_file(pa.memory_map(str(folder / "sentences.arrow"))).read_all()

    def sentences_of(self, grams: Iterable[int]) -> pa.Table:
        """The sentences that have one of these n-grams, in order: rows of SENTENCE."""
        owners = [np.zeros(0, np.int64)]
        for gram in grams:
            owners.append(self.owners[self.starts[gram] : self.starts[gram + 1]])
        return self.sentences.take(pa.array(np.unique(np.concatenate(owners))))

    def tasks_of(self, grams: Iterable[int]) -> set[str]:
        """The tasks with sentences that have one of these n-grams."""
        return set(self.sentences_of(grams)["task"].to_pylist())

    def sentences_by_task(self, grams: Iterable[int]) -> Counter[str]:
        """How many sentences of each task have one of these n-grams; one can be here twice, as given and restored."""
        rows = self.sentences_of(grams).select(["task", "split", "row", "column"]).to_pylist()
        different = {tuple(row.values()) for row in rows}
        return Counter(task for task, *_ in different)

    def find(self, texts: list[str]) -> dict[int, list[tuple[int, int]]]:
        """The runs of the index in these texts, by the number of the text: that of its first word, and the n-gram."""
        hashed, ends = ngrams(texts, self.n)
        at, grams = self.look_up(hashed)
        numbers = np.searchsorted(ends, at, side="right")
        firsts = at - np.append(0, ends)[numbers]
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, first, gram in zip(numbers.tolist(), firsts.tolist(), grams.tolist(), strict=True):
            found[number].append((first, gram))
        return found
