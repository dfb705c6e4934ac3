"""N-grams: which runs of words of some sentences occur in a text, and where.

Runs are looked up by their hashes, some tens of megabytes of text a second; the words of those found are compared.
"""

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tasks.text import words

PIECE = 4_000_000  # characters searched at once, which takes ten times their memory
PENN = re.compile(r" (?=n't\b)|-[lr]rb-(?=\s|$)", re.IGNORECASE)  # in SST-2 and others: "do n't", brackets
# typographic quotes, dashes, spaces …; not combining accents, nor invisible characters that can be within a word
SIGNS = re.compile(r"[^\x00-\x7f\w\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufeff]")
WHITE = re.compile(r"[ \t-\r]")
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


class Sentences(NamedTuple):
    """Sentences in successive rows of one column."""

    task: str
    split: str
    column: str
    row: int  # of the first
    texts: list[str]


def plain(text: str) -> str:
    """The text with blanks for underscores and typographic signs: words are runs of letters and digits."""
    text = text.replace("_", " ")
    return text if text.isascii() else SIGNS.sub(" ", text)


def ngrams(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words of each text, uint64, and where those of each text end."""
    tokens = words.split([plain(text) for text in texts])
    are_words = np.array([word[0] not in string.punctuation for word in tokens.different], dtype=bool)[tokens.indices]
    ends = np.concatenate([[0], np.cumsum(are_words)])[tokens.ends]
    return words.grams(words.hashes(tokens)[are_words], ends, n)


class Letters(dict):
    """For `str.translate`: each character normalised to a letter or digit, a blank, or nothing (GAP)."""

    def __missing__(self, code: int) -> str:
        """Ask the normaliser, the first time."""
        made = words.normalise(plain(chr(code))).decode()
        self[code] = letter = made if made.isalnum() else " " if made else GAP
        return letter


LETTERS = Letters()


def words_in(text: str) -> list[Word]:
    """The words that `ngrams` sees in a text, with their places. Fifty times slower, so only for texts with a match."""
    letters = text.translate(LETTERS)
    return [Word(m.start(), m.end(), m.group().replace(GAP, "")) for m in WORD.finditer(letters)]


def pieces(text: str, n: int) -> Iterator[tuple[int, str]]:
    """A text in pieces, and where they begin. Each run of n words is in exactly one piece."""
    start, end = 0, PIECE
    while end < len(text) and (gap := WHITE.search(text, end)):
        again = last_words(text, start, gap.start(), n - 1)
        if again > start:
            yield start, text[start : gap.start()]
            start = again
        end = gap.start() + PIECE
    yield start, text[start:]


def last_words(text: str, start: int, end: int, count: int) -> int:
    """Where the last `count` words of text[start:end] begin; start if there are fewer."""
    size = 64 * count
    while True:
        begin = max(start, end - size)
        last = words_in(text[begin:end])
        if len(last) > count:  # one more, since the first may be only part of a word
            return begin + last[-count].start
        if begin == start:
            return start
        size *= 8


def groups(texts: list[str], n: int) -> Iterator[list[tuple[int, int, str]]]:
    """The pieces of texts, about PIECE characters at a time, each with the number of its text and its place in it."""
    group, size = [], 0
    for number, text in enumerate(texts):
        for start, piece in pieces(text, n):
            group.append((number, start, piece))
            size += len(piece)
            if size >= PIECE:
                yield group
                group, size = [], 0
    if group:
        yield group


def restored(sentence: str) -> str:
    """A sentence without the tokenization of the Penn Treebank."""
    return PENN.sub(lambda token: " " if "rb" in token.group().lower() else "", sentence)


def write_index(batches: Iterable[Sentences], tasks: list[str], n: int, folder: Path) -> dict[str, dict]:
    """Write the runs of n words of the tasks' sentences to files that `Index` reads, and count by task."""
    rows, hashes, owners = [], [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    counts = {task: {"sentences": 0, "too_short": 0} for task in tasks}
    for task, split, column, first, texts in batches:
        prose = [restored(text) for text in texts]
        forms = [*enumerate(prose), *((i, text) for i, text in enumerate(texts) if text != prose[i])]
        hashed, ends = ngrams([text for _, text in forms], n)
        grams_of_each = np.diff(ends, prepend=0)
        long = np.flatnonzero(grams_of_each)
        counts[task]["sentences"] += len(texts)
        counts[task]["too_short"] += int(np.count_nonzero(grams_of_each[: len(texts)] == 0))
        hashes.append(hashed)
        owners.append(np.repeat(np.arange(len(rows), len(rows) + len(long)), grams_of_each[long]))
        rows += [(task, split, first + i, column, text) for i, text in (forms[k] for k in long.tolist())]
    hashed, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.lexsort((owner, hashed))
    hashed, owner = hashed[order], owner[order]
    new = np.ones(len(hashed), dtype=bool)
    new[1:] = (hashed[1:] != hashed[:-1]) | (owner[1:] != owner[:-1])  # a sentence can have a run twice
    hashed, owner = hashed[new], owner[new]
    different, starts = np.unique(hashed, return_index=True)
    of_owner = np.array([1 << tasks.index(row[0]) for row in rows], dtype=np.uint16)[owner]
    masks = np.bitwise_or.reduceat(of_owner, starts) if len(starts) else of_owner
    for i, task in enumerate(tasks):
        counts[task]["ngrams"] = int(np.count_nonzero(masks & (1 << i)))
    arrays = {"hashes": different, "starts": np.append(starts, len(owner)), "owners": owner, "masks": masks}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    columns = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(SENTENCE)]
    with pa.ipc.new_file(folder / "sentences.arrow", SENTENCE) as file:
        file.write_table(pa.table(columns, schema=SENTENCE))
    (folder / "index.json").write_text(json.dumps({"words": n, "tasks": tasks}))
    return counts


class Index:
    """The runs of n words of all sentences, memory-mapped from the files of `write_index`."""

    def __init__(self, folder: Path) -> None:
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "owners", "masks"))
        self.hashes, self.starts, self.owners, self.masks = arrays
        self.n, self.tasks = json.loads((folder / "index.json").read_text()).values()
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

    def sentence(self, owner: int) -> dict:
        """A sentence, as a row of SENTENCE."""
        return self.sentences.slice(owner, 1).to_pylist()[0]

    def tasks_of(self, gram: int) -> list[str]:
        """The tasks with a sentence that has this n-gram."""
        return [task for i, task in enumerate(self.tasks) if int(self.masks[gram]) >> i & 1]

    def sentences_by_task(self, owners: np.ndarray) -> Counter:
        """How many sentences of each task these are; one can be here twice, as given and restored."""
        rows = self.sentences.select(["task", "split", "row", "column"]).take(pa.array(owners)).to_pylist()
        return Counter(task for task, *_ in {tuple(row.values()) for row in rows})

    def owners_of(self, gram: int) -> np.ndarray:
        """The numbers of the sentences that have an n-gram."""
        return self.owners[self.starts[gram] : self.starts[gram + 1]]

    def find(self, texts: list[str]) -> dict[int, list[Match]]:
        """The runs of the index in these texts, by the number of the text, in order. The words are compared too."""
        matches: dict[int, list[Match]] = {}
        for group in groups(texts, self.n):
            hashed, ends = ngrams([piece for _, _, piece in group], self.n)
            at, grams = self.look_up(hashed)
            of_piece = np.searchsorted(ends, at, side="right")
            for i in np.unique(of_piece).tolist():
                number, start, piece = group[i]
                here, places = words_in(piece), at[of_piece == i] - (ends[i - 1] if i else 0)
                for place, gram in zip(places.tolist(), grams[of_piece == i].tolist(), strict=True):
                    run = here[place : place + self.n]
                    if self.holds(gram, run):
                        end = start + run[-1].end
                        while end < len(texts[number]) and unicodedata.combining(texts[number][end]):
                            end += 1  # the accents of the last letter are a part of it
                        matches.setdefault(number, []).append(Match(start + run[0].start, end, gram))
        return matches

    def holds(self, gram: int, run: list[Word]) -> bool:
        """Whether the sentence of an n-gram has these words, or other words of the same hash."""
        text = self.sentences["text"][int(self.owners_of(gram)[0])].as_py()
        sentence = [word.word for word in words_in(text)]
        wanted = [word.word for word in run]
        return any(sentence[i : i + self.n] == wanted for i in range(len(sentence) - self.n + 1))
