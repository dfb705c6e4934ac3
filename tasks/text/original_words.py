"""The words of texts as they stand, the same for every vocabulary, and which of them each token is a piece of."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
import regex
from tokenizers import Tokenizer

from model.heldout import SIZES, Heldout
from tasks.text.encoding import pieces
from tasks.text.tokenizer import PAD, SEP, UNK

# A word is what lies between white space and punctuation, or a run of punctuation. Vocabularies divide runs of
# punctuation differently, and no token reaches beyond one. `_` is a letter to some of them. Ideographs and kana are
# words by themselves, as in BERT, since no space divides them.
ALONE, MARKS = r"\p{Han}\p{Hiragana}\p{Katakana}", r"[\p{P}\p{S}--_]"
WORD = regex.compile(rf"[{ALONE}]|{MARKS}+|[^\s{ALONE}{MARKS}]+", regex.V1)


def divided(text: str, tokenizer: Tokenizer, unknown: int = UNK) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The ids of a text, without special tokens; the number of the word in the text of each; and its SIZES.

    A token that reaches over two words, because what lies between them is deleted, is a piece of the second.
    """
    ids, offsets, first = [], [], 0
    for part in pieces(text):
        encoding = tokenizer.encode(part, add_special_tokens=False)
        ids.append(np.array(encoding.ids, dtype=np.int64))
        offsets.append(np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + first)
        first += len(part)
    every = (match.span() for match in WORD.finditer(text))
    spans = np.fromiter(chain.from_iterable(every), dtype=np.int64).reshape(-1, 2)
    ids, (begins, ends) = np.concatenate(ids), np.concatenate(offsets).T
    words = np.searchsorted(spans[:, 0], np.maximum(begins, ends - 1), side="right") - 1
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)  # bytes of a character in UTF-8
    known = ids != unknown
    unread = covered(spans[:, 0], spans[:, 1], len(text)) & ~covered(begins[known], ends[known], len(text))
    return ids, words, (len(ids), len(spans), len(text), int(sizes.sum()), int(sizes[unread].sum()))


def covered(begins: np.ndarray, ends: np.ndarray, length: int) -> np.ndarray:
    """(length,): whether each character is in one of the spans."""
    edges = np.bincount(begins, minlength=length + 1) - np.bincount(ends, minlength=length + 1)
    return np.cumsum(edges)[:length] > 0


def heldout_of(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    length: int,
    unknown: int = UNK,
    separator: int = SEP,
    pad: int = PAD,
    begin: int | None = None,
) -> Heldout:
    """The texts as held-out documents: one after another in sequences of `length`, each with its separator.

    `begin`: an id before each document, which is not predicted.
    """
    before_each = [] if begin is None else [begin]
    ids, words, sizes, before = [], [], [np.zeros((0, len(SIZES)), np.int64)], 0
    for text in texts:
        of_text, numbers, size = divided(text, tokenizer, unknown)
        ids.append(np.concatenate([before_each, of_text, [separator]]))
        words.append(np.concatenate([[-1] * len(before_each), numbers + before, [-1]]))
        sizes.append(np.array([size], dtype=np.int64))
        before += size[SIZES.index("words")]
    kind = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    return Heldout(
        in_sequences(np.concatenate([np.zeros(0, kind), *ids]).astype(kind), length, pad),
        in_sequences(np.concatenate([np.zeros(0, np.int32), *words]).astype(np.int32), length, -1),
        np.concatenate(sizes),
    )


def in_sequences(values: np.ndarray, length: int, pad: int) -> np.ndarray:
    """(m, length): the values one after another, `pad` after the last."""
    return np.pad(values, (0, -len(values) % length), constant_values=pad).reshape(-1, length)
