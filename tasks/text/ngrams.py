"""Overlap: which runs of words of GLUE's validation and test sentences stand in a text, and where.

Runs are looked up by their hashes, some tens of megabytes of text a second; of those found, the words are compared.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from model import InputError
from tasks.glue import data as glue
from tasks.glue.tasks import HUB_GLUE, TASKS
from tasks.text import words

SENTENCES_AT_ONCE = 1 << 16
PIECE = 4_000_000  # characters looked at at once, in about ten times their memory
PENN = re.compile(r" (?=n't\b)|-[lr]rb-(?=\s|$)", re.IGNORECASE)  # how SST-2 and others write "don't" and brackets
# typographic quotes, dashes, spaces …; not accents that stand alone, nor what is invisible and may stand within a word
SIGNS = re.compile(r"[^\x00-\x7f\w\u0300-\u036f\u00ad\u200b-\u200d\u2060\ufeff]")
WHITE = re.compile(r"[ \t-\r]")
GAP = "\0"  # stands for a character that the normaliser leaves out
WORD = re.compile(f"[a-z0-9](?:{GAP}*[a-z0-9])*")


class Word(NamedTuple):
    """A word of a text, normalised, and the characters that it was."""

    start: int
    end: int
    word: str


class Match(NamedTuple):
    """A run of words that stands in a sentence too: characters start to end of a text, and which of the n-grams it is."""

    start: int
    end: int
    gram: int


def plain(text: str) -> str:
    """The text with blanks for underscores and typographic signs: words are runs of letters and digits."""
    text = text.replace("_", " ")
    return text if text.isascii() else SIGNS.sub(" ", text)


def ngrams(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes of all runs of n words in each text, uint64, and where those of each text end."""
    found = words.split([plain(text) for text in texts])
    are_words = np.array([word[0] not in string.punctuation for word in found.different], dtype=bool)[found.indices]
    ends = np.concatenate([[0], np.cumsum(are_words)])[found.ends]
    return words.grams(words.hashes(found)[are_words], ends, n)


class Letters(dict):
    """For `str.translate`: what the normaliser makes of each character: a letter or digit, a blank, or nothing (GAP)."""

    def __missing__(self, code: int) -> str:
        """Ask the normaliser, the first time."""
        made = words.normalise(plain(chr(code))).decode()
        self[code] = letter = made if made.isalnum() else " " if made else GAP
        return letter


LETTERS = Letters()


def words_in(text: str) -> list[Word]:
    """The words that `ngrams` has of the text, each with its place. Fifty times slower: for what was found only."""
    letters = text.translate(LETTERS)
    return [Word(m.start(), m.end(), m.group().replace(GAP, "")) for m in WORD.finditer(letters)]


def pieces(text: str, n: int) -> Iterator[tuple[int, str]]:
    """A text in pieces, and where they begin: each run of n words is in one of them, and in no other."""
    start, end = 0, PIECE
    while end < len(text) and (gap := WHITE.search(text, end)):
        again = last_words(text, start, gap.start(), n - 1)
        if again > start:
            yield start, text[start : gap.start()]
            start = again
        end = gap.start() + PIECE
    yield start, text[start:]


def last_words(text: str, start: int, end: int, count: int) -> int:
    """Where the last so many words of text[start:end] begin; start if there are fewer."""
    size = 64 * count
    while True:
        begin = max(start, end - size)
        found = words_in(text[begin:end])
        if len(found) > count:  # one more, since the first may be but a part of a word
            return begin + found[-count].start
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


def sentences(paths: list[Path], task: str) -> Iterator[tuple[str, int, list[str]]]:
    """The sentences of a split: column, the row of the first, and some at a time. Raises InputError for what has none."""
    row = 0
    for path in paths:
        where = f"{task}/{path.name}"
        table = glue.read_file(path, where, optional=TASKS[task].columns)
        check_columns(table.schema, task, where)
        for batch in table.to_batches(SENTENCES_AT_ONCE):
            for name in TASKS[task].columns:
                yield name, row, [text or "" for text in batch[name].to_pylist()]
            row += batch.num_rows


def check_columns(schema: pa.Schema, task: str, where: str) -> None:
    """Raise InputError unless a file has the sentences of the task."""
    for name in TASKS[task].columns:
        kind = schema.field(name).type if name in schema.names else None
        if kind not in (pa.string(), pa.large_string()):
            raise InputError(
                f"{where} has {'no column ' + name if kind is None else f'{kind} in the column {name}'}; expected text, as in "
                f"{HUB_GLUE.repository}. Correct it, or leave {task} out of decontaminate.tasks."
            )


def restored(sentence: str) -> str:
    """A sentence as it was before it was split into the tokens of the Penn Treebank."""
    return PENN.sub(lambda found: " " if "rb" in found.group().lower() else "", sentence)


def write_index(files: dict[str, dict[str, list[Path]]], n: int, folder: Path) -> dict[str, dict]:
    """Write the runs of n words of all sentences, and count by task; `Index` reads them."""
    rows, hashes, owners, counts = [], [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)], {}
    for task, splits in files.items():
        counts[task] = {"splits": list(splits), "sentences": 0, "too_short": 0}
        for split, paths in splits.items():
            for column, first, texts in sentences(paths, task):
                prose = [restored(text) for text in texts]
                forms = [*enumerate(prose), *((i, text) for i, text in enumerate(texts) if text != prose[i])]
                found, ends = ngrams([text for _, text in forms], n)
                grams_of_each = np.diff(ends, prepend=0)
                long = np.flatnonzero(grams_of_each)
                counts[task]["sentences"] += len(texts)
                counts[task]["too_short"] += int(np.count_nonzero(grams_of_each[: len(texts)] == 0))
                hashes.append(found)
                owners.append(np.repeat(np.arange(len(rows), len(rows) + len(long)), grams_of_each[long]))
                rows += [(task, split, first + i, column, text) for i, text in (forms[k] for k in long.tolist())]
    hashed, owner = np.concatenate(hashes), np.concatenate(owners)
    order = np.lexsort((owner, hashed))
    hashed, owner = hashed[order], owner[order]
    new = np.ones(len(hashed), dtype=bool)
    new[1:] = (hashed[1:] != hashed[:-1]) | (owner[1:] != owner[:-1])  # a sentence can have a run twice
    hashed, owner = hashed[new], owner[new]
    different, starts = np.unique(hashed, return_index=True)
    bits = {task: 1 << i for i, task in enumerate(files)}
    of_owner = np.array([bits[row[0]] for row in rows], dtype=np.uint16)[owner]
    masks = np.bitwise_or.reduceat(of_owner, starts) if len(starts) else of_owner
    arrays = {"hashes": different, "starts": np.append(starts, len(owner)), "owners": owner, "masks": masks}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    columns = zip(*rows, strict=True) if rows else [()] * len(Index.SENTENCE)
    arrow = pa.table([pa.array(c, f.type) for c, f in zip(columns, Index.SENTENCE, strict=True)], schema=Index.SENTENCE)
    with pa.ipc.new_file(folder / "sentences.arrow", Index.SENTENCE) as file:
        file.write_table(arrow)
    for task, bit in bits.items():
        counts[task]["ngrams"] = int(np.count_nonzero(masks & bit))
    return counts


class Index:
    """The runs of n words of all evaluation sentences, mapped from the files of `write_index`."""

    SENTENCE = pa.schema(
        [
            ("task", pa.string()),
            ("split", pa.string()),
            ("row", pa.int64()),
            ("column", pa.string()),
            ("text", pa.string()),
        ]
    )

    def __init__(self, folder: Path, n: int, tasks: list[str]) -> None:
        arrays = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("hashes", "starts", "owners", "masks"))
        self.hashes, self.starts, self.owners, self.masks = arrays
        self.n, self.tasks = n, tasks
        self.sentences = pa.ipc.open_file(pa.memory_map(str(folder / "sentences.arrow"))).read_all()
        bits = max(16, (8 * len(self.hashes)).bit_length())
        self.shift = np.uint64(64 - bits)  # by their first bits most hashes are told to be none of these
        self.table = np.zeros(1 << bits, dtype=bool)
        self.table[self.hashes >> self.shift] = True

    def look_up(self, hashed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of the hashes are those of n-grams here, and of which."""
        at = np.flatnonzero(self.table[hashed >> self.shift])
        order = np.argsort(hashed[at])  # looked up in order they are found four times as fast
        grams = np.empty(len(at), dtype=np.int64)
        grams[order] = np.minimum(np.searchsorted(self.hashes, hashed[at[order]]), len(self.hashes) - 1)
        same = self.hashes[grams] == hashed[at]
        return at[same], grams[same]

    def sentence(self, owner: int) -> dict:
        """One evaluation sentence, and where it stands."""
        return {name: self.sentences[name][owner].as_py() for name in self.SENTENCE.names}

    def tasks_of(self, gram: int) -> list[str]:
        """The tasks that an n-gram stands in."""
        return [task for i, task in enumerate(self.tasks) if int(self.masks[gram]) >> i & 1]

    def sentences_by_task(self, owners: np.ndarray) -> Counter:
        """How many sentences of each task these are; one can be here twice, as given and restored."""
        columns = (
            self.sentences[name].take(pa.array(owners)).to_pylist() for name in ("task", "split", "row", "column")
        )
        return Counter(task for task, *_ in set(zip(*columns, strict=True)))

    def owners_of(self, gram: int) -> np.ndarray:
        """The sentences that an n-gram stands in."""
        return self.owners[self.starts[gram] : self.starts[gram + 1]]

    def find(self, texts: list[str]) -> dict[int, list[Match]]:
        """The runs that stand in the texts too, by the number of the text, in order. The words themselves are compared."""
        found: dict[int, list[Match]] = {}
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
                        found.setdefault(number, []).append(Match(start + run[0].start, end, gram))
        return found

    def holds(self, gram: int, run: list[Word]) -> bool:
        """Whether the sentence of an n-gram has these words, or something else of the same hash."""
        text = self.sentences["text"][int(self.owners_of(gram)[0])].as_py()
        sentence = [word.word for word in words_in(text)]
        wanted = [word.word for word in run]
        return any(sentence[i : i + self.n] == wanted for i in range(len(sentence) - self.n + 1))
