"""Masks for masked language modelling: exactly K tokens of every sequence, so that all shapes are static."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.draws import draws, random_order
from model.heldout import Heldout

MASKED = 0.8  # of the chosen tokens become [MASK], half of the others random, the rest stays (Devlin et al. 2019)
SAMPLED = 1_000_000  # tokens of the text, from which `detection` draws random ones


@dataclass(frozen=True)
class Corpus:
    """Packed sequences (n, S), uint16 or uint32, held-out documents, and the vocabulary's numbers for masking."""

    sequences: np.ndarray
    heldout: Heldout
    vocabulary: int
    mask_id: int
    specials: int  # ids below this are special tokens

    @property
    def length(self) -> int:
        """Tokens a sequence, S."""
        return self.sequences.shape[1]

    @cached_property
    def ordinary(self) -> np.ndarray:
        """(n,) int64: tokens of sequences spread over the text, each as often as it is there; no special ones."""
        sample = self.sequences[:: max(1, len(self.sequences) * self.length // SAMPLED)].ravel().astype(np.int64)
        ordinary = sample[sample >= self.specials]
        return ordinary if len(ordinary) else np.arange(self.specials, self.vocabulary)


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
    random = min(
        count - masked, round(round(1 - share, 9) / 2 * count)
    )  # rounded, since (1 - 0.8) / 2 is not exactly 0.1
    draws_BW = draws(first, B, S + random, seed)
    order_BS = random_order(draws_BW[:, :S], tokens_BS < corpus.specials)
    # a part of rows would go to a GPU by a copy that is not in pinned memory
    positions_BK = np.ascontiguousarray(order_BS[:, :count])
    hidden_BS = tokens_BS.astype(np.int64)
    labels_BK = np.take_along_axis(hidden_BS, positions_BK, axis=1)
    inputs_BK = labels_BK.copy()
    inputs_BK[:, :masked] = corpus.mask_id
    words = np.uint64(corpus.vocabulary - corpus.specials)  # far fewer than 2^64, so the remainder is nearly uniform
    inputs_BK[:, masked : masked + random] = corpus.specials + (draws_BW[:, S : S + random] % words).astype(np.int64)
    np.put_along_axis(hidden_BS, positions_BK, inputs_BK, axis=1)
    return hidden_BS, positions_BK, labels_BK
