"""Micro-batches for pretraining: masked tokens, corrupted tokens, and the thread that makes the next micro-batch.

Exactly K tokens of every sequence are masked, so that all shapes are static.
"""

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.bert import IGNORED
from model.errors import InputError
from model.heldout import Heldout, by_frequencies, draws, random_order
from model.machine import to_device
from model.settings import SPECIALS, Specials, Training
from model.wording import budget, counted

MASKED = 0.8  # of the chosen tokens become [MASK], half of the others random, the rest stays (Devlin et al. 2019)
REPLACED = 0.05  # fraction of the tokens that become random ones of the text; at least one token
SWAPPED = 0.1  # fraction of the tokens that are drawn to trade places with one of the next two; at most 2/3
STREAM = 1  # second word of the generator's key, so that corruptions are independent of masks, whose word is 0
REACH = 3  # tokens of a block in which two trade places
TRADES = np.array([[0, 1], [1, 2], [0, 2]])  # the places of a block that do
SAMPLED = 1_000_000  # tokens of the text, from which replacements are drawn
# tokens (B, S), positions (B, K) and labels (B, K), int64; with detection also what is corrupted, (B, S), fp32
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Corpus:
    """Packed sequences (n, S), uint16 or uint32, held-out documents, and the number of entries of the vocabulary.

    `specials`: the ids of its special tokens.
    """

    sequences: np.ndarray
    heldout: Heldout
    vocabulary: int
    specials: Specials = SPECIALS

    @property
    def length(self) -> int:
        """Tokens a sequence, S."""
        return self.sequences.shape[1]

    def check(self, training: Training) -> None:
        """Raise InputError if there are too few sequences for one batch, or no held-out text."""
        sequences = len(self.sequences)
        if training.budget and sequences < training.batch_size:
            raise InputError(
                f"The corpus has {counted(sequences, 'sequence')} of {self.length} tokens, fewer than "
                f"one batch of {training.batch_size:,}. Add text (download), or lower pretrain.batch_size."
            )
        read = self.sequences_in(training)
        if training.budget and read is not None and read < training.batch_size:
            raise InputError(
                f"A budget of {budget(training.budget, training.budget_unit)} reads {counted(read, 'sequence')} of "
                f"{sequences:,}, fewer than one batch of {training.batch_size:,}. Raise pretrain.budget, or lower "
                "pretrain.batch_size."
            )
        if (self.heldout.words < 0).all():
            raise InputError(
                "No text is held out that the vocabulary can read. Raise tokenize.heldout_fraction, or add text "
                "(download)."
            )

    def sequences_in(self, training: Training) -> int | None:
        """The most sequences that a run with a budget in epochs may read; None with a budget in another unit."""
        if training.budget_unit != "epochs":
            return None
        # rounded, since for example 0.29 x 100 is a little less than 29
        return math.floor(round(training.budget * len(self.sequences), 6))

    @cached_property
    def is_special(self) -> np.ndarray:
        """(V,): which entries of the vocabulary are special tokens."""
        return np.isin(np.arange(self.vocabulary), self.specials)

    @cached_property
    def words(self) -> np.ndarray:
        """The ids of all other entries."""
        return np.flatnonzero(~self.is_special)

    @cached_property
    def ordinary(self) -> np.ndarray:
        """(n,) int64: all tokens but special ones of sequences that are spread over the text."""
        every = max(1, len(self.sequences) * self.length // SAMPLED)
        sample = self.sequences[::every].ravel().astype(np.int64)
        ordinary = sample[~self.is_special[sample]]
        return ordinary if len(ordinary) else self.words

    def loss_by_frequencies(self, share: float) -> float:
        """Nats per held-out token if each is predicted by its frequency in the training text.

        `share`: that of the curve, as in `curve_losses`.
        """
        counts = np.bincount(self.ordinary, minlength=self.vocabulary)
        return by_frequencies(self.heldout, counts, share)["nats_per_token"]


def masks_per_sequence(fraction: float, length: int) -> int:
    """The number of tokens of a sequence that are predicted: at least one."""
    return max(1, round(fraction * length))


def mask(
    tokens_BS: np.ndarray, first: int, count: int, corpus: Corpus, seed: int, share: float = MASKED
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Choose `count` = K tokens of each sequence for prediction, and hide them.

    Returns the changed tokens (B, S), the chosen positions (B, K) and the original ids there (B, K), all int64. Special
    tokens are never drawn as random ones, and are chosen only if a sequence has fewer than K others. Of each sequence's
    K, exactly round(`share` K) become [MASK] and half of the rest random tokens, as in the reference implementation
    (26, 3 and 3 of 32).

    The masks of sequence number `first` + i depend only on that number and on `seed`, not on the machine, the size of
    the micro-batch or what was read before. So a resumed run masks as if it had never stopped.
    """
    B, S = tokens_BS.shape
    masked = round(share * count)
    half = round(1 - share, 9) / 2  # rounded, since (1 - 0.8) / 2 is not exactly 0.1
    random = min(count - masked, round(half * count))
    draws_BW = draws(first, B, S + random, seed)
    order_BS = random_order(draws_BW[:, :S], corpus.is_special[tokens_BS])
    # a part of rows would go to a GPU by a copy that is not in pinned memory
    positions_BK = np.ascontiguousarray(order_BS[:, :count])

    hidden_BS = tokens_BS.astype(np.int64)
    labels_BK = np.take_along_axis(hidden_BS, positions_BK, axis=1)
    words = np.uint64(len(corpus.words))  # far fewer than 2^64, so the remainder is nearly uniform
    inputs_BK = labels_BK.copy()
    inputs_BK[:, :masked] = corpus.specials.mask
    inputs_BK[:, masked : masked + random] = corpus.words[draws_BW[:, S:] % words]
    np.put_along_axis(hidden_BS, positions_BK, inputs_BK, axis=1)
    return hidden_BS, positions_BK, labels_BK


def corrupt(
    masked_BS: np.ndarray, tokens_BS: np.ndarray, positions_BK: np.ndarray, first: int, corpus: Corpus, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Swap and replace tokens that are not to be predicted.

    masked_BS     what `mask` made of tokens_BS; positions_BK, the tokens it chose, stay as they are
    first         number of the first sequence; the corruptions of a sequence depend on its number and the seed alone

    Returns the tokens (B, S), int64, and the labels (B, S), fp32: 1 where a token differs from the original, 0 where it
    does not, IGNORED for [MASK] and special tokens. A pair that is drawn to be swapped stays as it is if either token
    is special or to be predicted. Replacements are drawn from the text, so that frequent tokens are drawn often; if
    fewer tokens than REPLACED are left, fewer are replaced.
    """
    B, S = tokens_BS.shape
    replaced = max(1, round(REPLACED * S))
    blocks = (S - REACH + 1) // REACH
    key = np.array([seed, STREAM], dtype=np.uint64)
    draws_BW = draws(first, B, S + replaced + 1 + blocks, key)
    order_BS, words_BR, offset_B1, trades_BT = np.split(draws_BW, np.cumsum([S, replaced, 1]), axis=1)

    is_ordinary_BS = ~corpus.is_special[tokens_BS]
    free_BS = is_ordinary_BS.copy()
    np.put_along_axis(free_BS, positions_BK, False, axis=1)
    changed_BS = swap(masked_BS, free_BS, offset_B1, trades_BT)
    replace(changed_BS, free_BS, order_BS, words_BR, corpus)

    visible_BS = (changed_BS != corpus.specials.mask) & is_ordinary_BS
    differs_BS = changed_BS != tokens_BS
    labels_BS = np.where(visible_BS, differs_BS, IGNORED).astype(np.float32)
    return changed_BS, labels_BS


def replace(
    tokens_BS: np.ndarray, free_BS: np.ndarray, order_BS: np.ndarray, words_BR: np.ndarray, corpus: Corpus
) -> None:
    """Put ordinary tokens of the text in R places that are free, the first ones by the draws of `order_BS`."""
    places_BR = random_order(order_BS, ~free_BS)[:, : words_BR.shape[1]]
    drawn_BR = corpus.ordinary[words_BR % np.uint64(len(corpus.ordinary))]
    old_BR = np.take_along_axis(tokens_BS, places_BR, axis=1)
    is_free_BR = np.take_along_axis(free_BS, places_BR, axis=1)
    new_BR = np.where(is_free_BR, drawn_BR, old_BR)
    np.put_along_axis(tokens_BS, places_BR, new_BR, axis=1)


def swap(tokens_BS: np.ndarray, free_BS: np.ndarray, offset_B1: np.ndarray, draws_BT: np.ndarray) -> np.ndarray:
    """The tokens after two have traded places in some of the T blocks of three, where both are free."""
    B, S = tokens_BS.shape
    one_BT, other_BT = trading_places(offset_B1, draws_BT)
    uniform_BT = (draws_BT >> np.uint64(11)) * 2.0**-53
    trades_BT = uniform_BT < SWAPPED * REACH / 2
    trades_BT &= np.take_along_axis(free_BS, one_BT, axis=1)
    trades_BT &= np.take_along_axis(free_BS, other_BT, axis=1)

    sources_BS = np.tile(np.arange(S), (B, 1))
    np.put_along_axis(sources_BS, one_BT, np.where(trades_BT, other_BT, one_BT), axis=1)
    np.put_along_axis(sources_BS, other_BT, np.where(trades_BT, one_BT, other_BT), axis=1)
    return np.take_along_axis(tokens_BS, sources_BS, axis=1)


def trading_places(offset_B1: np.ndarray, draws_BT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two places of each block that would trade, (B, T) each. Blocks begin 0 to 2 tokens into a sequence."""
    T = draws_BT.shape[1]
    offset_B1 = (offset_B1 % np.uint64(REACH)).astype(np.int64)
    begins_BT = offset_B1 + REACH * np.arange(T)
    pairs_BT = (draws_BT % np.uint64(len(TRADES))).astype(np.int64)
    places_BT2 = TRADES[pairs_BT]
    return begins_BT + places_BT2[..., 0], begins_BT + places_BT2[..., 1]


class Ahead(NamedTuple):
    """A micro-batch that the thread makes."""

    first: int
    masks: int
    batch: Future[Batch]


class Batches:
    """The corpus in order, epoch after epoch, `size` sequences at a time. A thread prepares the next micro-batch."""

    def __init__(self, corpus: Corpus, size: int, training: Training, device: torch.device) -> None:
        self.corpus = corpus
        self.size = size
        self.training = training
        self.device = device
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: Ahead | None = None

    def make(self, first: int, masks: int) -> Batch:
        """The micro-batch from sequence `first`, counted over all epochs, with `masks` tokens of each to predict."""
        corpus = self.corpus
        training = self.training
        rows = np.arange(first, first + self.size) % len(corpus.sequences)
        tokens_BS = corpus.sequences[rows]
        masked_BS, *chosen = mask(tokens_BS, first, masks, corpus, training.seed, training.masked_share)
        parts = [masked_BS, *chosen]
        if training.detection:
            positions_BK, _ = chosen
            changed_BS, corrupted_BS = corrupt(masked_BS, tokens_BS, positions_BK, first, corpus, training.seed)
            parts = [changed_BS, *chosen, corrupted_BS]
        return tuple(to_device(part, self.device) for part in parts)

    def take(self, first: int, masks: int, after: int) -> Batch:
        """Return what `make` does, and let the thread make the one from sequence `after`, likely the next."""
        if self.next and (self.next.first, self.next.masks) == (first, masks):
            batch = self.next.batch.result()
        else:
            batch = self.make(first, masks)
        self.next = Ahead(after, masks, self.thread.submit(self.make, after, masks))
        return batch

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(cancel_futures=True)
