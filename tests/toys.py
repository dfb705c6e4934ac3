"""Small models, texts, machines and counts of words."""

import numpy as np
import pyarrow as pa
import torch

from model.bert import Bert
from model.heldout import Heldout
from model.machine import Machine
from model.masking import Corpus
from model.settings import Architecture
from tasks.text.words import ASCII, Normaliser
from tasks.vocabulary import count_portions, sum_counts

CPU = torch.device("cpu")
SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY = 40
LENGTH = 16


def machine_of(dtype: torch.dtype = torch.float32, micro_batch: int = 32, compiles: bool = False, **about) -> Machine:
    """The CPU, for whatever precision."""
    return Machine(CPU, dtype, compiles, micro_batch, **about)


def encoder(vocabulary: int = VOCABULARY, length: int = LENGTH, seed: int = 1, **axes) -> Bert:
    """A model of SMALL with some other axes."""
    return Bert(SMALL.model_copy(update=axes), vocabulary, length, seed=seed)


def corpus_of_rows(rows: np.ndarray, vocabulary: int = VOCABULARY, heldout: int = 0) -> Corpus:
    """These sequences; the last ones are held out, a document each."""
    rows = rows.astype(np.uint16 if vocabulary < 2**16 else np.uint32)
    end = len(rows) - heldout
    return Corpus(rows[:end], Heldout.of_rows(rows[end:]), vocabulary)


def count_words(texts: list[str], how: Normaliser = ASCII) -> pa.Table:
    """How often each word occurs in the texts, in the order of words."""
    return sum_counts(count_portions(texts, how)).sort_by("word")
