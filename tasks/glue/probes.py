"""Probes: small tasks in GLUE's format, made from the held-out documents of a pretrained artifact.

They take the place of GLUE where there is none: they tell whether pretraining taught anything, and nothing more.
"""

import itertools
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model import InputError
from model.quantities import counted
from tasks.corpus import parts
from tasks.store import HELDOUT_TEXT, Artifact

VERSION = 1  # raise when the tasks change: it enters the key of their runs
COLUMNS = {
    "word-order": ("sentence",),  # is the word order of this sentence intact?
    "odd-word": ("sentence",),  # does every word belong here, or was one put in from elsewhere?
    "neighbours": ("sentence1", "sentence2"),  # did these two sentences stand side by side?
}
LABELS = {
    "word-order": ("shuffled", "intact"),
    "odd-word": ("odd", "intact"),
    "neighbours": ("apart", "neighbours"),
}
TRAIN, VALIDATION = 4000, 1000  # examples, where the documents give as many
FEWEST = 64  # examples of a split; fewer measure nothing
WORDS = range(6, 41)  # of a sentence that is used


def sentences(text: str) -> list[str]:
    """The sentences of prose: several words, ended by a full stop, made of letters for the most part."""
    flat = re.sub(r"\s+", " ", text)
    found = re.split(r"(?<=[.!?])\s+(?=[A-Z])", flat)
    return [
        s
        for s in found
        if len(s.split()) in WORDS and s[-1] in ".!?" and sum(c.isalpha() or c == " " for c in s) > 0.85 * len(s)
    ]


def split_of(text: str) -> str:
    """Of a document: by its text alone."""
    return "validation" if parts.unit_hash(text, salt=2) < VALIDATION / (TRAIN + VALIDATION) else "train"


class Others:
    """The sentences of a split but for those of one document, pool[start:end]."""

    def __init__(self, pool: list[str], start: int, end: int) -> None:
        self.pool, self.start, self.end = pool, start, end

    def __len__(self) -> int:
        return len(self.pool) - (self.end - self.start)

    def __getitem__(self, index: int) -> str:
        return self.pool[index if index < self.start else index + self.end - self.start]


def word_order(own: list[str], others: Others, random: np.random.Generator) -> list[tuple]:
    """A sentence as it stood, or with the words between the first and the last in random order."""
    found = []
    for sentence in own:
        words = sentence.split()
        intact = int(random.integers(2))
        if not intact:
            inner = random.permutation(len(words) - 2) + 1
            words = [words[0], *(words[i] for i in inner), words[-1]]
            if words == sentence.split():
                continue
        found.append((" ".join(words), intact))
    return found


def odd_word(own: list[str], others: Others, random: np.random.Generator) -> list[tuple]:
    """A sentence as it stood, or with one word replaced by one of another document."""
    found = []
    for sentence in own:
        words = sentence.split()
        intact = int(random.integers(2))
        if not intact:
            place, other = int(random.integers(len(words) - 1)), others[random.integers(len(others))].split()
            word = other[random.integers(len(other) - 1)]
            if word.lower() == words[place].lower():
                continue
            words[place] = word
        found.append((" ".join(words), intact))
    return found


def neighbours(own: list[str], others: Others, random: np.random.Generator) -> list[tuple]:
    """Two sentences that stood side by side, or the first of them and one of another document."""
    found = []
    for first, second in itertools.pairwise(own):
        side_by_side = int(random.integers(2))
        found.append((first, second if side_by_side else others[random.integers(len(others))], side_by_side))
    return found


MAKERS = {"word-order": word_order, "odd-word": odd_word, "neighbours": neighbours}


def make(task: str, pretrained: Artifact) -> dict[str, pa.Table]:
    """The splits of a probe: the same examples from the same held-out documents, none of which is in two splits."""
    texts = pq.read_table(pretrained.path / HELDOUT_TEXT)["text"].to_pylist()
    documents = [(text, found) for text in texts if (found := sentences(text))]
    rows: dict[str, list[tuple]] = {}
    for split in ("train", "validation"):
        own_split = [found for text, found in documents if split_of(text) == split]
        pool, start = [sentence for found in own_split for sentence in found], 0
        rows[split] = []
        for number, own in enumerate(own_split):
            others, start = Others(pool, start, start + len(own)), start + len(own)
            if len(others):
                rows[split] += MAKERS[task](own, others, np.random.default_rng([VERSION, split == "train", number]))
    for split, wanted in (("train", TRAIN), ("validation", VALIDATION)):
        if len(rows[split]) < FEWEST:
            raise InputError(
                f"The held-out documents of {pretrained.name} give {counted(len(rows[split]), 'example')} of "
                f"{task}/{split}; "
                f"expected {FEWEST} or more. Raise tokenize.heldout_fraction, or give more text (download)."
            )
        order = np.random.default_rng(VERSION).permutation(len(rows[split]))[:wanted]
        rows[split] = [rows[split][i] for i in order]
    names = (*COLUMNS[task], "label")
    return {split: pa.table(dict(zip(names, zip(*found, strict=True), strict=True))) for split, found in rows.items()}
