"""The encoder with a head on each sequence, or on each token, for finetuning.

Shapes: B sequences, S tokens each, D hidden.
"""

import torch
from torch import Tensor, nn

from model import InputError
from model.bert import Bert, Dropout, initialize
from model.layers import PAD, SEP, ClassifierHead, compared, mean
from model.layouts import transformers_classifier, transformers_model
from model.settings import CLASSIFIER_WIDTH, HeadName, Kind, Pooling, Texts

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
    return compared(states_BSD, seen_BS, tokens_BS == SEP)


class Classifier(nn.Module):
    """The encoder with a head on the pooled state of each sequence, or for `kind` "tokens" on the state of each token.

    "tanh" is the reference's GLUE head, 1024 wide. "native" is that of transformers' model of the layout, as wide as
    the encoder; ModernBERT's begins with the pretrained transform; BERT's for tokens is only the last layer. InputError
    if transformers has no such model. `texts`: how many an input has; None: not known. One class makes a regression of
    the kind "classes".
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
        kind: Kind = "classes",
    ) -> None:
        super().__init__()
        _, why_not = transformers_classifier(bert.architecture, head, pooling, kind)
        if head == "native" and why_not:
            raise InputError(f"{why_not} Set finetune.head to 'tanh'.")
        self.kind: Kind = "regression" if kind == "classes" and classes == 1 else kind
        self.bert, self.classes, self.head, self.texts = bert, classes, head, texts
        self.pooling: Pooling = "cls" if kind == "tokens" else pooling  # of tokens nothing is pooled
        self.family = transformers_model(bert.architecture)[0] if head == "native" else None
        bert.set_dropout(dropout)
        inputs = bert.architecture.hidden * width_factor(self.pooling, texts)
        widths = {None: CLASSIFIER_WIDTH, "Bert": None if kind == "tokens" else inputs, "ModernBert": None}
        self.classifier = ClassifierHead(inputs, classes, Dropout(dropout), widths[self.family])
        initialize(self.classifier, torch.Generator().manual_seed(HEAD_STREAM + seed))

    @torch.no_grad()
    def rescale(self, scale: float, shift: float) -> None:
        """Multiply all later scores by `scale` and add `shift`: a regression then predicts in the labels' own units."""
        self.classifier.out.weight.mul_(scale)
        self.classifier.out.bias.mul_(scale).add_(shift)

    def scores(self, states: Tensor) -> Tensor:
        """(..., inputs) states, pooled or of tokens, to (..., classes) scores."""
        return self.classifier(self.bert.head(states) if self.family == "ModernBert" else states)

    def forward(self, tokens_BS: Tensor, padded: bool = True) -> Tensor:
        """(B, S) token ids to (B, classes) scores, or of tokens to (B, S, classes). `padded`: mask [PAD]."""
        if self.kind == "tokens":
            states = self.bert.encode(tokens_BS, padded)
        else:
            states = pooled(self.bert, tokens_BS, padded, self.pooling, self.texts)
        if self.training:
            return self.scores(states)
        # not in bf16, where one prediction in a hundred is a tie of classes
        with torch.autocast(states.device.type, enabled=False):
            return self.scores(states.float())
