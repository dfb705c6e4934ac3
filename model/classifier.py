"""The encoder with a head on each sequence, for finetuning.

Shapes: B sequences, S tokens each, D hidden.
"""

import torch
from torch import Tensor, nn

from model import InputError
from model.bert import PAD, SEP, Bert, Dropout, initialize, mean
from model.layouts import transformers_model, why_not_transformers_classifier
from model.settings import CLASSIFIER_WIDTH, HeadName, Pooling, Texts

HEAD_STREAM = 2**31  # beyond all seeds of encoders, so that a head does not start with the same numbers


def width_factor(pooling: Pooling, texts: Texts) -> int:
    """The width of a pooled state, in multiples of the encoder's."""
    return 4 if pooling == "compare" and texts == 2 else 1


def pooled(bert: Bert, tokens_BS: Tensor, padded: bool, pooling: Pooling, texts: Texts) -> Tensor:
    """The state of each sequence of one or two texts, (B, D), or (B, 4 D) to compare two texts.

    [CLS] is the first token; means are over all tokens but [PAD]; the first text ends with the first [SEP].
    """
    if pooling == "cls":
        first_B1 = tokens_BS.new_zeros(len(tokens_BS), 1, dtype=torch.int64)
        return bert.encode(tokens_BS, padded, first_B1)[:, 0]
    states_BSD, seen_BS = bert.encode(tokens_BS, padded), tokens_BS != PAD
    if width_factor(pooling, texts) == 1:
        return mean(states_BSD, seen_BS)
    ends_BS = (tokens_BS == SEP).int()
    first_BS = seen_BS & (ends_BS.cumsum(dim=1) == ends_BS)
    u_BD, v_BD = mean(states_BSD, first_BS), mean(states_BSD, seen_BS & ~first_BS)
    return torch.cat([u_BD, v_BD, (u_BD - v_BD).abs(), u_BD * v_BD], dim=1)


class ClassifierHead(nn.Module):
    """Dense, tanh, dropout and dense to the scores; ModernBERT's has only the last two.

    `inputs`: the width of a pooled state. `family`: the model of transformers whose head it is; None: the reference's
    """

    def __init__(self, inputs: int, classes: int, dropout: float, seed: int, family: str | None = None) -> None:
        super().__init__()
        width = inputs if family else CLASSIFIER_WIDTH
        self.dense = None if family == "ModernBert" else nn.Linear(inputs, width)
        self.dropout = Dropout(dropout)
        self.out = nn.Linear(width, classes)
        initialize(self, torch.Generator().manual_seed(HEAD_STREAM + seed))

    def forward(self, states_BD: Tensor) -> Tensor:
        """(B, inputs) to (B, classes) scores."""
        x = states_BD if self.dense is None else torch.tanh(self.dense(states_BD))
        return self.out(self.dropout(x))


class Classifier(nn.Module):
    """The encoder with a head on the pooled state of each sequence.

    "tanh" is the reference's GLUE head, 1024 wide. "native" is that of transformers' model of the layout, as wide as
    the encoder; ModernBERT's begins with the pretrained transform. InputError if transformers has no such model.
    `texts`: how many an input has; None: not known.
    """

    def __init__(
        self,
        bert: Bert,
        classes: int,
        dropout: float,
        seed: int,
        head: HeadName = "tanh",
        pooling: Pooling = "cls",
        texts: Texts = None,
    ) -> None:
        super().__init__()
        if head == "native" and (lacking := why_not_transformers_classifier(bert.architecture, head, pooling)):
            raise InputError(f"{lacking} Set finetune.head to 'tanh'.")
        self.bert, self.classes, self.head, self.pooling, self.texts = bert, classes, head, pooling, texts
        self.family = transformers_model(bert.architecture) if head == "native" else None
        bert.set_dropout(dropout)
        inputs = bert.architecture.hidden * width_factor(pooling, texts)
        self.classifier = ClassifierHead(inputs, classes, dropout, seed, self.family)

    def scores(self, states_BD: Tensor) -> Tensor:
        """What `pooled` returns to (B, classes) scores."""
        return self.classifier(self.bert.head(states_BD) if self.family == "ModernBert" else states_BD)

    def forward(self, tokens_BS: Tensor, padded: bool = True) -> Tensor:
        """(B, S) token ids to (B, classes) scores. `padded`: mask [PAD]."""
        states_BD = pooled(self.bert, tokens_BS, padded, self.pooling, self.texts)
        if self.training:
            return self.scores(states_BD)
        # not in bf16, where one prediction in a hundred is a tie of classes
        with torch.autocast(states_BD.device.type, enabled=False):
            return self.scores(states_BD.float())
