"""Detection of corrupted tokens, a second loss beside masked language modelling.

A masked language model learns only from the tokens that it predicts, most of which are [MASK], and finetuning has no
[MASK]. Here the model also says of each visible token whether it is the original one, which is the loss of ELECTRA
(Clark et al. 2020). The corruptions need no second model: random tokens, and swapped tokens, similar to Yamaguchi et
al. 2021.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import at
from model.bert import Bert, operations
from model.draws import draws, random_order
from model.masking import Corpus
from model.settings import Architecture, Training

STREAM = 1  # second word of the generator's key, so that corruptions are independent of masks, whose word is 0
REACH = 3  # tokens of a block in which two trade places
TRADES = np.array([[0, 1], [1, 2], [0, 2]])  # the places of a block that do
IGNORED = -1.0  # label of [MASK] and of special tokens


def corrupt(
    masked_BS: np.ndarray,
    tokens_BS: np.ndarray,
    positions_BK: np.ndarray,
    first: int,
    corpus: Corpus,
    training: Training,
) -> tuple[np.ndarray, np.ndarray]:
    """Swap and replace tokens that are not to be predicted.

    masked_BS     what `masking.mask` made of tokens_BS; positions_BK, the tokens it chose, stay as they are
    first         number of the first sequence; the corruptions of a sequence depend on its number and the seed alone

    Returns the tokens (B, S), int64, and the labels (B, S), fp32: 1 where a token differs from the original, 0 where it
    does not, IGNORED for [MASK] and special tokens. Of all tokens about the fraction `swapped` is drawn to be
    swapped; a pair stays as it is if either is special or to be predicted. The fraction `replaced` of all tokens, or
    fewer if fewer are left, becomes tokens drawn from the text, so that frequent ones are drawn often.
    """
    B, S = tokens_BS.shape
    replaced = max(1, round(training.replaced * S)) if training.replaced else 0
    blocks = (S - REACH + 1) // REACH
    key = np.array([training.seed, STREAM], dtype=np.uint64)
    draws_BW = draws(first, B, S + replaced + 1 + blocks, key)
    order_BS, words_BR, offset_B1, trades_BT = np.split(draws_BW, np.cumsum([S, replaced, 1]), axis=1)
    free_BS = tokens_BS >= corpus.specials
    np.put_along_axis(free_BS, positions_BK, False, axis=1)
    changed_BS = swap(masked_BS, free_BS, offset_B1, trades_BT, training.swapped)
    places_BR = random_order(order_BS, ~free_BS)[:, :replaced]
    drawn_BR = corpus.ordinary[words_BR % np.uint64(len(corpus.ordinary))]
    old_BR = np.take_along_axis(changed_BS, places_BR, axis=1)
    new_BR = np.where(np.take_along_axis(free_BS, places_BR, axis=1), drawn_BR, old_BR)
    np.put_along_axis(changed_BS, places_BR, new_BR, axis=1)
    visible_BS = (changed_BS != corpus.mask_id) & (tokens_BS >= corpus.specials)
    labels_BS = np.where(visible_BS, changed_BS != tokens_BS, IGNORED).astype(np.float32)
    return changed_BS, labels_BS


def swap(
    tokens_BS: np.ndarray, free_BS: np.ndarray, offset_B1: np.ndarray, draws_BT: np.ndarray, share: float
) -> np.ndarray:
    """Tokens where in some of the T blocks of three two trade places, if both are free; `share`: 2/3 would be all."""
    offset_B1 = (offset_B1 % np.uint64(REACH)).astype(np.int64)
    begins_BT = offset_B1 + REACH * np.arange(draws_BT.shape[1])
    trades_BT2 = TRADES[(draws_BT % np.uint64(len(TRADES))).astype(np.int64)]
    one_BT, other_BT = begins_BT + trades_BT2[..., 0], begins_BT + trades_BT2[..., 1]
    chosen_BT = (draws_BT >> np.uint64(11)) * 2.0**-53 < share * REACH / 2
    for places_BT in (one_BT, other_BT):
        chosen_BT &= np.take_along_axis(free_BS, places_BT, axis=1)
    sources_BS = np.tile(np.arange(tokens_BS.shape[1]), (len(tokens_BS), 1))
    np.put_along_axis(sources_BS, one_BT, np.where(chosen_BT, other_BT, one_BT), axis=1)
    np.put_along_axis(sources_BS, other_BT, np.where(chosen_BT, one_BT, other_BT), axis=1)
    return np.take_along_axis(tokens_BS, sources_BS, axis=1)


class Detecting(nn.Module):
    """An encoder in pretraining, with a detector on each state. The detector is dropped after pretraining."""

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert
        self.detector = nn.Linear(bert.architecture.hidden, 1)
        nn.init.zeros_(self.detector.weight)
        nn.init.zeros_(self.detector.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        """Those of the encoder."""
        return self.bert.blocks

    def forward(self, tokens_BS: Tensor, positions_BK: Tensor, labels_BK: Tensor, corrupted_BS: Tensor) -> Tensor:
        """(2,): the mean cross-entropy, nats, at masked positions, and of the detector, to which ignored tokens add 0.

        corrupted_BS  the labels of `corrupt`
        """
        states_BSD = self.bert.encode(tokens_BS)
        masked = self.bert.masked_loss(at(states_BSD, positions_BK), labels_BK)
        scores_BS = self.detector(states_BSD)[..., 0].float()
        visible_BS = (corrupted_BS != IGNORED).float()
        # a mean over all tokens, since micro-batches with as many tokens have to weigh as much
        return torch.stack([masked, F.binary_cross_entropy_with_logits(scores_BS, corrupted_BS, weight=visible_BS)])


def with_detector(bert: Bert, training: Training) -> Bert | Detecting:
    """What pretraining trains: the encoder, with a detector if the training asks for one."""
    return Detecting(bert) if training.detection else bert


def operations_per_token(
    architecture: Architecture, training: Training, vocabulary: int, length: int, masks: int
) -> float:
    """Floating-point operations of pretraining per token. Detection needs the last block's states at all positions."""
    return operations(architecture, vocabulary, length, masks, length if training.detection else None)
