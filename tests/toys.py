"""Small models, texts, machines and counts of words."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, roughen

from model.bert import Bert
from model.finetuning import Classifier
from model.heldout import Heldout
from model.machine import Machine
from model.masking import Corpus
from model.settings import Architecture
from tasks.text.tokenizer import copy_tokenizer, save_tokenizer
from tasks.text.words import ASCII, Normaliser
from tasks.vocabulary import count_portions, sum_counts, train_wordpiece

CPU = torch.device("cpu")
SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY = 40
LENGTH = 16
# the axes of transformers' ModernBERT and BERT; all others are the defaults, a layout that it doesn't have
MODERN = {"positions": "rotary", "norm_bias": False, "first_norm": False, "head_transform": True}
BIASES = {"bias": True, "qkv_bias": True, "decoder_bias": True}
POST = {"norm_order": "post", "activation": "gelu", "final_norm": False, "head_transform": True}
ORIGINAL = POST | BIASES | {"positions": "learned"}


def machine_of(dtype: torch.dtype = torch.float32, micro_batch: int = 32, compiles: bool = False, **about) -> Machine:
    """The CPU, for whatever precision."""
    return Machine(CPU, dtype, compiles, micro_batch, **about)


def encoder(vocabulary: int = VOCABULARY, length: int = LENGTH, seed: int = 1, **axes) -> Bert:
    """A model of SMALL with some other axes."""
    return Bert(SMALL.model_copy(update=axes), vocabulary, length, seed=seed)


def rough_bert(architecture: Architecture | dict, vocabulary: int, length: int) -> Bert:
    """A model whose parameters all matter, for evaluation."""
    return roughen(Bert(Architecture.model_validate(architecture), vocabulary, length, seed=3).eval())


def rough_classifier(bert: Bert, classes: int = 3, head: str = "tanh", **reads) -> Classifier:
    """A classifier on it; `reads`: what of it, and for which kind of task."""
    classifier = Classifier(bert, classes, dropout=0.0, seed=2, head=head, **reads).eval()
    roughen(classifier.classifier)
    return classifier


def tokenizer_in(folder: Path, length: int) -> int:
    """Put a tokenizer of conftest's sentences there, for a model of that length; its number of entries."""
    words = sorted({word for part in (SUBJECTS, VERBS, OBJECTS, ENDS) for words in part for word in words.split()})
    tokenizer = train_wordpiece(pa.table({"word": words, "count": [40] * len(words)}), 300)
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch))
        copy_tokenizer(Path(scratch), folder, length)
    return tokenizer.get_vocab_size()


def corpus_of_rows(rows: np.ndarray, vocabulary: int = VOCABULARY, heldout: int = 0) -> Corpus:
    """These sequences; the last ones are held out, a document each."""
    rows = rows.astype(np.uint16 if vocabulary < 2**16 else np.uint32)
    end = len(rows) - heldout
    return Corpus(rows[:end], Heldout.of_rows(rows[end:]), vocabulary)


def count_words(texts: list[str], how: Normaliser = ASCII) -> pa.Table:
    """How often each word occurs in the texts, in the order of words."""
    return sum_counts(count_portions(texts, how)).sort_by("word")
