"""Detection of corrupted tokens, a second loss beside masked language modelling.

A masked language model learns only from the tokens that it predicts, most of which are [MASK], and finetuning has no
[MASK]. Here the model also says of each visible token whether it is the original one, which is the loss of ELECTRA
(Clark et al. 2020). The corruptions need no second model: random tokens, and swapped tokens, similar to Yamaguchi et
al. 2021. `masking` makes them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.bert import Bert, operations
from model.layers import at
from model.masking import IGNORED
from model.settings import Architecture, Training


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
