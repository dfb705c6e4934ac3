"""N-grams: which runs of words of some sentences occur in a text, and where.

Runs are looked up by their hashes, some tens of megabytes of text a second; the words of those found are compared.
"""

import re
import string
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.text import words
from tasks.text.tokenizer import portions

PENN = re.compile(r" (?=n't\b)|-[lr]rb-(?=\s|$)", re.IGNORECASE)  # in SST-2 and others: "do n't", brackets
# typographic quotes, dashes, spaces …; not combining accents, nor invisible characters that can be within a word
SIGNS = re.compile(r"[^\x00-\x7f\w\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufeff]")
GAP = "\0"  # replaces a character that the normaliser drops
TEXT = pa.string()
SENTENCE = pa.schema([("task", TEXT), ("split", TEXT), ("row", pa.int64()), ("column", TEXT), ("text", TEXT)])
WORD = re.compile(f"[a-z0-9](?:{GAP}*[a-z0-9])*")


class Word(NamedTuple):
    """A word of a text, normalised, and the characters that it was."""

    start: int
    end: int
    word: str


class Match(NamedTuple):
    """A run of words that a sentence has too: characters start to end of a text, and the number of its n-gram."""

    start: int
    end: int
    gram: int


def plain(text: str) -> str:
    """The text with blanks for underscores and typographic signs: words are runs of letters and digits."""
    text = text.replace("_", " ")
    return text if text.isascii() else SIGNS.sub(" ", text)


def ngrams(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words of each text, uint64, and where those of each text end."""
    hashed, ends, before = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], 0
    for some, last in portions(texts):  # long texts in pieces
        tokens = words.split([plain(text) for text in some])
        starts_as_word = np.array([word[0] not in string.punctuation for word in tokens.different], dtype=bool)
        are_words = starts_as_word[tokens.indices]
        hashed.append(words.hashes(tokens)[are_words])
        ends.append(np.concatenate([[0], np.cumsum(are_words)])[tokens.ends][last] + before)
        before += len(hashed[-1])
    return words.grams(np.concatenate(hashed), np.concatenate(ends), n)


class Letters(dict):
    """For `str.translate`: each character normalised to a letter or digit, a blank, or nothing (GAP)."""

    def __missing__(self, code: int) -> str:
        """Ask the normaliser, the first time."""
        made = words.normalise(plain(chr(code))).decode()
        self[code] = letter = made if made.isalnum() else " " if made else GAP
        return letter


LETTERS = Letters()


def words_in(text: str) -> Iterator[Word]:
    """The words that `ngrams` sees in a text, with their places. Fifty times slower, so only for texts with a match."""
    for found in WORD.finditer(text.translate(LETTERS)):
        yield Word(found.start(), found.end(), found.group().replace(GAP, ""))


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


class Index:
    """The runs of n words of all sentences, memory-mapped from the files of `write_index`."""

    def __init__(self, folder: Path, n: int) -> None:
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "owners"))
        self.n, (self.hashes, self.starts, self.owners) = n, arrays
        self.sentences = pa.ipc.open_file(pa.memory_map(str(folder / "sentences.arrow"))).read_all()
        bits = max(16, (8 * len(self.hashes)).bit_length())
        self.shift = np.uint64(64 - bits)  # the first bits of a hash rule out most that are not in the index
        self.table = np.zeros(1 << bits, dtype=bool)
        self.table[self.hashes >> self.shift] = True

    def look_up(self, hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of those hashes that are in the index, and the n-gram of each."""
        at = np.flatnonzero(self.table[hashed >> self.shift])
        order = np.argsort(hashed[at])  # a search in order is four times as fast
        grams = np.empty(len(at), dtype=np.int64)
        grams[order] = np.minimum(np.searchsorted(self.hashes, hashed[at[order]]), len(self.hashes) - 1)
        same = self.hashes[grams] == hashed[at]
        return at[same], grams[same]

    def sentences_of(self, grams: Iterable[int]) -> pa.Table:
        """The sentences that have one of these n-grams, in order: rows of SENTENCE."""
        owners = [self.owners[self.starts[gram] : self.starts[gram + 1]] for gram in grams]
        return self.sentences.take(pa.array(np.unique(np.concatenate([np.zeros(0, np.int64), *owners]))))

    def sentences_by_task(self, grams: Iterable[int]) -> Counter:
        """How many sentences of each task have one of these n-grams; one can be here twice, as given and restored."""
        rows = self.sentences_of(grams).select(["task", "split", "row", "column"]).to_pylist()
        return Counter(task for task, *_ in {tuple(row.values()) for row in rows})

    def find(self, texts: list[str]) -> dict[int, list[Match]]:
        """The runs of the index in these texts, by the number of the text, in order. The words are compared too."""
        hashed, ends = ngrams(texts, self.n)
        at, grams = self.look_up(hashed)
        numbers, matches = np.searchsorted(ends, at, side="right"), {}
        for number in np.unique(numbers).tolist():
            own = numbers == number
            places = at[own] - (ends[number - 1] if number else 0)
            if found := self.verified(texts[number], places.tolist(), grams[own].tolist()):
                matches[number] = found
        return matches

    def verified(self, text: str, places: list[int], grams: list[int]) -> list[Match]:
        """Those of a text's runs whose words a sentence has, and not others of the same hash.

        places: the number of the first word of each, ascending.
        """
        found, read, run, matches = words_in(text), 0, deque(maxlen=self.n), []
        for place, gram in zip(places, grams, strict=True):
            run.extend(islice(found, place + self.n - read))
            read = place + self.n
            if self.has(gram, [word.word for word in run]):
                end = run[-1].end
                while end < len(text) and unicodedata.combining(text[end]):
                    end += 1  # the accents of the last letter are a part of it
                matches.append(Match(run[0].start, end, gram))
        return matches

    def has(self, gram: int, run: list[str]) -> bool:
        """Whether the first sentence of an n-gram has these words."""
        text = self.sentences["text"][int(self.owners[self.starts[gram]])].as_py()
        sentence = [word.word for word in words_in(text)]
        return any(sentence[i : i + self.n] == run for i in range(len(sentence) - self.n + 1))
