"""Inputs of finetuning: a task's texts and labels as token ids, encoded once for all seeds."""

import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from model.wording import counted
from tasks.glue import reading
from tasks.glue.own import Definition
from tasks.glue.pieces import TOKENS
from tasks.glue.table import LABEL, TASKS
from tasks.glue.tags import within_words
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import load_tokenizer
from tasks.text.wordpiece import CONTINUES

if TYPE_CHECKING:
    import pandas as pd
    from tokenizers import Encoding, Tokenizer

    from model.finetuning import Examples

encoding = threading.Lock()  # the first of several seeds encodes the inputs; the others wait for it
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """A task's data as text and as token ids."""

    data: reading.Data
    examples: "dict[str, Examples]"
    cut: dict[str, int]  # inputs longer than max_tokens, by split
    seen: dict[str, np.ndarray]  # by split, which words have a label in `examples`, if words have labels
    notes: list[str]  # warnings


class Encoded(NamedTuple):
    """The inputs of a split."""

    ids: list[list[int]]
    cut: list[bool]  # which inputs were longer


class EncodedWords(NamedTuple):
    """The inputs of a split whose words have labels."""

    ids: list[list[int]]
    cut: list[bool]
    labels: np.ndarray  # of the tokens of all inputs
    seen: np.ndarray  # of the words of all rows, which have a label


class Split(NamedTuple):
    """A split of a task as the model reads it."""

    examples: "Examples"
    cut: list[bool]  # which inputs were longer
    unread: np.ndarray  # which words, if they have labels, or which inputs have no token
    unit: str  # what `unread` counts


@functools.lru_cache(maxsize=len(TASKS))  # for all seeds and shares
def encode_task(identity: str, task: Definition, tokens: int, start: Artifact) -> Inputs:
    """Read and encode a task's data. `identity` has the digests of the data: a changed file is read again."""
    data = reading.read(task, start)
    tokenizer = load_tokenizer(start.path)
    inputs = Inputs(data, {}, {}, {}, [])
    for split in data.tables:
        if data.task.kind == "tokens":
            encoded = encode_labelled_words(data, split, tokenizer, tokens)
            inputs.seen[split] = ~encoded.unread
        else:
            encoded = encode_texts(data, split, tokenizer, tokens)
        inputs.examples[split] = encoded.examples
        inputs.cut[split] = sum(encoded.cut)
        inputs.notes.extend(notes_on(encoded, task.name, split, tokens))
    for note in inputs.notes:
        log.warning(note)
    return inputs


def encode_labelled_words(data: reading.Data, split: str, tokenizer: "Tokenizer", max_tokens: int) -> Split:
    """A split whose words have labels. Further parts of a word are trained on, but not scored."""
    from model.finetuning import Examples

    within = within_words(data.task.labels) if split == "train" else None
    words = encode_words(data.tables[split], tokenizer, max_tokens, within)
    return Split(Examples.of(words.ids, words.labels), words.cut, ~words.seen, "word")


def encode_texts(data: reading.Data, split: str, tokenizer: "Tokenizer", max_tokens: int) -> Split:
    """A split whose texts have labels."""
    from model.finetuning import Examples

    encoded = encode(data.tables[split], tokenizer, max_tokens)
    separators = 1 + len(data.task.columns)  # [CLS], and [SEP] after each text
    sizes = np.array([len(ids) for ids in encoded.ids])
    return Split(Examples.of(encoded.ids, labels_of(data, split)), encoded.cut, sizes <= separators, "input")


def labels_of(data: reading.Data, split: str) -> np.ndarray:
    """The labels of a split's rows: numbers, or rows of 0 and 1."""
    labels = data.tables[split][LABEL]
    if data.task.kind == "multilabel":
        return np.array(labels.tolist())
    return labels.to_numpy()


def notes_on(encoded: Split, name: str, split: str, max_tokens: int) -> list[str]:
    """Warnings if some words or inputs have no token, and if inputs are cut."""
    notes = []
    unread = encoded.unread
    if unread.any():
        what = f"{unread.sum():,} of {counted(len(unread), encoded.unit)} of {split}"
        notes.append(f"{name}: {what} have no token that the model reads.")
    cut = sum(encoded.cut)
    if cut:
        what = f"{cut:,} of {counted(len(encoded.cut), 'input')} of {split}"
        notes.append(f"{name}: {what} are cut to {max_tokens} tokens (finetune.max_tokens).")
    return notes


def encode(table: "pd.DataFrame", tokenizer: "Tokenizer", max_tokens: int) -> Encoded:
    """Token ids of [CLS] A [SEP] (B [SEP]), and which inputs were cut. In a pair, the longer text is cut first."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    texts = [table[name].tolist() for name in table.columns if name != LABEL]
    inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    encodings = tokenizer.encode_batch_fast(inputs)
    return Encoded([one.ids for one in encodings], [bool(one.overflowing) for one in encodings])


def encode_words(
    table: "pd.DataFrame", tokenizer: "Tokenizer", max_tokens: int, within: np.ndarray | None = None
) -> EncodedWords:
    """As `encode`, for lists of words; with the labels of tokens, one on the first of a word, and which words have one.

    The other words are behind the cut, or have no token. Labels are those of all inputs, words those of all rows.
    `within`: by class, the label of what the tokenizer takes for further words in a word, as in `U.N.`; None: they have
    none. In plain text, where nothing says that they are one word, a model must know them (`cram predict`).
    """
    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch(table[TOKENS].map(list).tolist(), is_pretokenized=True)
    labels = []
    seen = []
    for encoding, given in zip(encodings, table[LABEL], strict=True):
        words = np.array([-1 if word is None else word for word in encoding.word_ids])
        labels.append(labels_of_tokens(encoding, words, given, within))
        seen.append(np.isin(np.arange(len(given)), words))
    ids = [one.ids for one in encodings]
    cut = [bool(one.overflowing) for one in encodings]
    return EncodedWords(ids, cut, np.concatenate(labels), np.concatenate(seen))


def labels_of_tokens(encoding: "Encoding", words: np.ndarray, given: tuple, within: np.ndarray | None) -> np.ndarray:
    """The label of each token of an input. `words`: the word of each, -1 for none; `given`: the labels of words."""
    from model.finetuning import UNLABELLED

    is_word = words >= 0
    is_first = is_word & (words != np.append(-1, words[:-1]))
    of_words = np.append(given, UNLABELLED)
    of_tokens = np.where(is_first, of_words[words], UNLABELLED)
    if within is not None:
        begins_anew = [not token.startswith(CONTINUES) for token in encoding.tokens]
        is_further = is_word & ~is_first & begins_anew
        of_tokens[is_further] = within[of_words[words[is_further]]]
    return of_tokens
