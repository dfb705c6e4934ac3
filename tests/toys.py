"""Small models, texts and machines for the tests of model/."""

import numpy as np
import torch

from model.bert import Bert
from model.heldout import Heldout
from model.machine import Machine
from model.masking import Corpus
from model.settings import Architecture

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
