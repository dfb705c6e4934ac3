"""Probes: small tasks in GLUE's format, made from the held-out documents of a pretrained artifact.

They stand in for GLUE where it is not available: they show whether pretraining taught anything, and nothing more.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import regex

from model.errors import InputError
from model.wording import counted
from tasks.corpus import parts
from tasks.glue.table import LABEL, TASKS
from tasks.store.artifacts import HELDOUT_TEXT, Artifact
from tasks.text import matching
from tasks.text.scripts import count_deleted
from tasks.text.tokenizer import load_tokenizer, reading_of

if TYPE_CHECKING:
    import pandas as pd

VERSION = 3  # raise it when the tasks change: it enters the keys of their runs
SEED = 2  # of what is drawn: English examples are those of version 2
TRAIN = 4000  # examples at most
VALIDATION = 1000  # the same
MOST_UNREAD = 0.1  # of a document's characters; the model can't judge others
FEWEST = 64  # examples of a split; fewer measure nothing
ODD = 0.25  # of a sentence's words; one odd word alone is not noticed after a minute of pretraining
WORDS = range(6, 41)  # allowed lengths of a sentence
LETTERS_SHARE = 0.85  # of a sentence's characters, blanks included; a sentence with fewer isn't prose
# `.` ends a sentence before white space and a letter that isn't small, `。` or `।` anywhere; in Thai and Lao, a space
SIGN = r"[\p{STerm}--[.!?]][\p{Pe}\p{Pf}]*"
SPACED = r"[\p{Thai}\p{Lao}]"
END = regex.compile(
    rf"([.!?])\s+(?=[\p{{Lu}}\p{{Lt}}\p{{Lo}}])|({SIGN})\s*+(?![\p{{Pe}}\p{{Pf}}\p{{STerm}}])|({SPACED})\s+", regex.V1
)
ENDED = regex.compile(rf"(?:[.!?]|{SIGN}|{SPACED})$", regex.V1)
LETTERS = regex.compile(r"[\p{L}\p{M} ]+")
UNSPACED = rf"[[\p{{L}}\p{{Nl}}]&&{matching.UNSPACED}]"
RUN = regex.compile(rf"(?:{UNSPACED}\p{{M}}*){{1,2}}[^\s\w]*", regex.V1)
NO_BLANK = regex.compile(rf" (?:(?={UNSPACED})|(?<={UNSPACED}\p{{M}}*[^\s\w]* ))", regex.V1)


Draw = Callable[[], str]  # a sentence of another document
Change = Callable[[list[str], Draw, np.random.Generator], list[str]]
Maker = Callable[[list[str], Draw, np.random.Generator], list[tuple]]  # examples from a document's sentences


def prose_of(text: str) -> list[str]:
    """The sentences that are prose: several words, mostly letters, with an end mark."""
    candidates = END.sub(r"\1\2\3\n", re.sub(r"\s+", " ", text)).split("\n")
    return [sentence for sentence in candidates if is_prose(sentence)]


def is_prose(sentence: str) -> bool:
    """Whether a sentence has several words, mostly letters, and an end mark."""
    if len(words_of(sentence)) not in WORDS or not ENDED.search(sentence):
        return False
    letters = len(sentence) - len(LETTERS.sub("", sentence))
    return letters > LETTERS_SHARE * len(sentence)


def words_of(sentence: str) -> list[str]:
    """The words of a sentence with the signs at them. Without spaces between words, two characters count as one."""
    return RUN.sub(r" \g<0> ", sentence).split()


def join(words: list[str]) -> str:
    """A sentence of these words, with blanks only between those of scripts that have them."""
    return NO_BLANK.sub("", " ".join(words))


def another(pool: list[str], own: range, random: np.random.Generator) -> str:
    """A random sentence of the pool outside a document's `own` places."""
    index = int(random.integers(len(pool) - len(own)))
    return pool[index if index < own.start else index + len(own)]


def shuffle(words: list[str], draw: Draw, random: np.random.Generator) -> list[str]:
    """The words in random order, except the first and the last."""
    inner = random.permutation(len(words) - 2) + 1
    return [words[0], *(words[i] for i in inner), words[-1]]


def replace_some(words: list[str], draw: Draw, random: np.random.Generator) -> list[str]:
    """The words; `ODD` of them, rounded up, are replaced by words of other documents. The last word stays."""
    replaced = list(words)
    count = math.ceil(ODD * len(words))
    for place in random.permutation(len(words) - 1)[:count]:
        others = words_of(draw())
        replaced[place] = others[random.integers(len(others) - 1)]
    return replaced


def alter(change: Change, own: list[str], draw: Draw, random: np.random.Generator) -> list[tuple]:
    """Sentences, half of them changed. A sentence is left out if the change leaves it as it was."""
    examples: list[tuple] = []
    for sentence in own:
        words = words_of(sentence)
        intact = int(random.integers(2))
        given = words if intact else change(words, draw, random)
        if intact or given != words:
            examples.append((join(given), intact))
    return examples


def neighbours(own: list[str], draw: Draw, random: np.random.Generator) -> list[tuple]:
    """Pairs of neighbouring sentences, half of them with the second from another document."""
    examples: list[tuple] = []
    for first, second in itertools.pairwise(own):
        side_by_side = int(random.integers(2))
        examples.append((first, second if side_by_side else draw(), side_by_side))
    return examples


MAKERS: dict[str, Maker] = {
    "word-order": functools.partial(alter, shuffle),  # is the word order of this sentence intact?
    "odd-word": functools.partial(alter, replace_some),  # does every word belong here, or are some from elsewhere?
    "neighbours": neighbours,  # did the second sentence follow the first?
}


def make(task: str, source: Artifact) -> "dict[str, pd.DataFrame]":
    """The splits of a probe; the same documents give the same examples, and each document is in one split only."""
    import pandas as pd

    tables = {}
    documents = heldout_prose(source)
    for split, wanted in (("train", TRAIN), ("validation", VALIDATION)):
        examples = examples_of(task, split, documents[split])
        if len(examples) < FEWEST:
            raise InputError(
                f"The held-out documents of {source.name} yield {counted(len(examples), 'example')} of {task}/{split}; "
                f"expected {FEWEST} or more. Raise tokenize.heldout_fraction, or add text (download)."
            )
        order = np.random.default_rng(SEED).permutation(len(examples))[:wanted]
        columns = [*TASKS[task].columns, LABEL]
        tables[split] = pd.DataFrame([examples[i] for i in order], columns=columns)
    return tables


def heldout_prose(source: Artifact) -> dict[str, list[list[str]]]:
    """The sentences of each held-out document that the vocabulary reads and that has prose, by split."""
    held = source.path / HELDOUT_TEXT
    if not held.exists():
        raise InputError(
            f"{source.name} was adopted from a folder, so it has no held-out text to make probes from. Set "
            "finetune.data and finetune.tasks to others."
        )
    texts = pq.read_table(held)["text"].to_pylist()
    normaliser = reading_of(load_tokenizer(source.path))
    unread_T = count_deleted(texts, normaliser)[1].sum(axis=0)
    share = VALIDATION / (TRAIN + VALIDATION)  # of the documents; their texts alone decide
    documents: dict[str, list[list[str]]] = {"train": [], "validation": []}
    for text, unread in zip(texts, unread_T, strict=True):
        if unread > MOST_UNREAD * len(text):
            continue
        prose = prose_of(text)
        if prose:
            split = "validation" if parts.unit_hash(text, parts.Salt.VALIDATE_PROBES) < share else "train"
            documents[split].append(prose)
    return documents


def examples_of(task: str, split: str, documents: list[list[str]]) -> list[tuple]:
    """The examples of a split, in the order of its documents."""
    pool = [sentence for prose in documents for sentence in prose]
    examples = []
    end = 0
    for number, own in enumerate(documents):
        places = range(end, end + len(own))
        end = places.stop
        if len(own) == len(pool):  # there is no other document to draw from
            continue
        random = np.random.default_rng([SEED, split == "train", number])
        draw = functools.partial(another, pool, places, random)
        examples += MAKERS[task](own, draw, random)
    return examples
