"""The encoder with every axis of `Architecture`, its vocabulary head and its classification head.

The defaults are the model of "Cramming" (Geiping & Goldstein, arXiv 2212.14034, section 4.2).
Shapes: B sequences, S tokens each, D hidden, E embedding (D unless factorised), N heads, H = D / N, V vocabulary
entries, K masked tokens per sequence, M = B * K.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import InputError
from model.attention import Attention, Dropout, at
from model.layouts import transformers_model, why_not_transformers_classifier
from model.positions import sinusoids
from model.quantities import counted
from model.settings import CLASSIFIER_WIDTH, Architecture, HeadName, Pooling, Texts

INIT_STD = 0.02  # of every weight matrix, as BERT
HEAD_STREAM = 2**31  # beyond all seeds of encoders, so that a head does not start with the same numbers
PAD, SEP = 0, 3  # the vocabulary fixes the ids of special tokens


def norm(architecture: Architecture, width: int) -> nn.Module:
    """A norm over the last `width` values."""
    if architecture.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=architecture.norm_eps)
    return nn.LayerNorm(width, eps=architecture.norm_eps, bias=architecture.norm_bias)


class Embedding(nn.Module):
    """Words plus positions, normalised, projected to the hidden width if factorised."""

    def __init__(self, architecture: Architecture, vocabulary: int, length: int) -> None:
        super().__init__()
        width = architecture.embedding or architecture.hidden
        self.word = nn.Embedding(vocabulary, width, padding_idx=PAD)
        self.positions = architecture.positions
        if self.positions == "learned":
            self.position = nn.Embedding(length, width)
        elif self.positions != "rotary":
            self.register_buffer("codes", sinusoids(length, width), persistent=False)
        if self.positions == "scaled-sinusoidal":
            self.scale = nn.Parameter(torch.tensor(width**-0.5))
        self.norm = norm(architecture, width) if architecture.embedding_norm else nn.Identity()
        factorised = architecture.embedding is not None
        self.project = nn.Linear(width, architecture.hidden, bias=architecture.bias) if factorised else nn.Identity()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) token ids to (B, S, D)."""
        S, x_BSE = tokens_BS.shape[1], self.word(tokens_BS)
        if self.positions == "learned":
            x_BSE = x_BSE + self.position.weight[:S]
        elif self.positions == "sinusoidal":
            x_BSE = x_BSE + self.codes[:S]
        elif self.positions == "scaled-sinusoidal":
            x_BSE = x_BSE + self.scale * self.codes[:S]
        return self.project(self.norm(x_BSE))


class FeedForward(nn.Module):
    """Two dense layers; with GEGLU, one half of the first layer's output gates the other."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.activation = architecture.activation
        wide = architecture.inner * (2 if self.activation == "geglu" else 1)
        self.dense_in = nn.Linear(architecture.hidden, wide, bias=architecture.bias)
        self.dense_out = nn.Linear(architecture.inner, architecture.hidden, bias=architecture.bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        x = self.dense_in(x_BSD)
        if self.activation == "geglu":
            x, gate = x.chunk(2, dim=-1)
            x = F.gelu(x) * gate
        else:
            x = F.gelu(x) if self.activation == "gelu" else F.relu(x).square()
        return self.dense_out(x)


class Convolution(nn.Module):
    """A depthwise convolution over tokens, added to the states; zero at first.

    In a day or less of training, attention hardly learns to look at neighbouring tokens, from which most of a masked
    token is predicted. Similar to the layers of Allen-Zhu 2025 (arXiv 2512.17351).
    """

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        # three dimensions, so that Muon, which is for matrices, leaves it to AdamW (LOG.md)
        self.weight = nn.Parameter(torch.zeros(tokens, 1, hidden))

    def forward(self, x_BSD: Tensor, seen_BS: Tensor | None) -> Tensor:
        """(B, S, D) to (B, S, D). Tokens beyond the sequence and those that are not `seen` count as zero."""
        S, reach = x_BSD.shape[1], len(self.weight) // 2
        seen_BSD = x_BSD if seen_BS is None else x_BSD * seen_BS[:, :, None]
        wide_BWD = F.pad(seen_BSD, (0, 0, reach, reach))
        for place, weight_1D in enumerate(self.weight):
            x_BSD = torch.addcmul(x_BSD, wide_BWD[:, place : place + S], weight_1D)
        return x_BSD


class Block(nn.Module):
    """Attention and feed-forward layer, each with a residual connection and a norm before or after."""

    def __init__(self, architecture: Architecture, length: int, index: int) -> None:
        super().__init__()
        self.post = architecture.norm_order == "post"
        mixed = architecture.convolution
        self.convolution = Convolution(mixed, architecture.hidden) if mixed else None
        with_norm = index or architecture.first_norm
        self.attention_norm = norm(architecture, architecture.hidden) if with_norm else nn.Identity()
        self.attention = Attention(architecture, length)
        with_ffn = (index + 1) % architecture.ffn_every == 0
        self.ffn_norm = norm(architecture, architecture.hidden) if with_ffn else None
        self.ffn = FeedForward(architecture) if with_ffn else None
        self.dropout = Dropout(0.0)

    def forward(self, x_BSD: Tensor, seen_BS: Tensor | None, positions_BK: Tensor | None = None) -> Tensor:
        """(B, S, D) to (B, S, D), or to (B, K, D): the states at these positions alone.

        seen_BS  True for tokens that others see; None: all
        """
        mask = None if seen_BS is None else seen_BS[:, None, None, :]
        x_BSD = x_BSD if self.convolution is None else self.convolution(x_BSD, seen_BS)
        normed_BSD = x_BSD if self.post else self.attention_norm(x_BSD)
        if positions_BK is None:
            x = x_BSD + self.dropout(self.attention(normed_BSD, mask))
        else:
            x = at(x_BSD, positions_BK)
            normed = x if self.post else self.attention_norm(x)
            x = x + self.dropout(self.attention(normed_BSD, mask, (positions_BK, normed)))
        if self.post:
            x = self.attention_norm(x)
            return x if self.ffn is None else self.ffn_norm(x + self.dropout(self.ffn(x)))
        return x if self.ffn is None else x + self.dropout(self.ffn(self.ffn_norm(x)))


class Head(nn.Module):
    """From states to scores of the vocabulary: optional transform and projection to the embedding's width, decoder."""

    def __init__(self, architecture: Architecture, vocabulary: int) -> None:
        super().__init__()
        width, hidden = architecture.embedding or architecture.hidden, architecture.hidden
        self.transforms = architecture.head_transform
        factorised = architecture.embedding is not None
        self.dense = nn.Linear(hidden, width, bias=architecture.bias) if factorised or self.transforms else None
        self.norm = norm(architecture, width) if self.transforms else None
        self.decoder = None if architecture.tied else nn.Linear(width, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if architecture.decoder_bias else None

    def forward(self, states: Tensor) -> Tensor:
        """(..., D) to (..., E), the decoder's input."""
        x = states if self.dense is None else self.dense(states)
        return self.norm(F.gelu(x)) if self.transforms else x


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices from a normal distribution of deviation 0.02, with zeros for [PAD]; biases zero, norms one."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


class Bert(nn.Module):
    """The encoder and its masked-language-modelling head, on sequences of up to `length` tokens."""

    def __init__(self, architecture: Architecture, vocabulary: int, length: int, seed: int = 0) -> None:
        super().__init__()
        if length % 2**architecture.funnel:
            raise InputError(
                f"Sequences have {length} tokens, which can't be halved {counted(architecture.funnel, 'time')}. Lower "
                f"pretrain.architecture.funnel, or make tokenize.length a multiple of {2**architecture.funnel}."
            )
        self.architecture, self.vocabulary, self.length = architecture, vocabulary, length
        self.embedding = Embedding(architecture, vocabulary, length)
        different = architecture.different_layers or architecture.layers
        self.blocks = nn.ModuleList(Block(architecture, length, index) for index in range(different))
        self.norm = norm(architecture, architecture.hidden) if architecture.final_norm else nn.Identity()
        self.head = Head(architecture, vocabulary)
        self.kept: tuple[Tensor, Tensor] | None = None  # ids of `keep_tokens`, and all rows of the embedding
        self.dropout = Dropout(0.0)
        initialize(self, torch.Generator().manual_seed(seed))
        if architecture.zero_outputs:
            for block in self.blocks:
                nn.init.zeros_(block.attention.out.weight)
                if block.ffn is not None:
                    nn.init.zeros_(block.ffn.dense_out.weight)

    def set_dropout(self, probability: float) -> None:
        """Set dropout after embedding and branches and on attention weights."""
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = probability
            elif isinstance(part, Attention):
                part.dropout = probability

    def keep_tokens(self, ids: Tensor) -> None:
        """Keep only the embeddings of these ids (sorted, [PAD] first); from now on, tokens are places among them.

        The vocabulary head can't be used then. It saves the optimizer's work on rows that get no gradient.
        """
        rows = self.embedding.word.weight.detach()
        self.kept = ids, rows
        self.embedding.word = nn.Embedding.from_pretrained(rows[ids], freeze=False, padding_idx=PAD)
        self.vocabulary = len(ids)

    def restore_tokens(self) -> None:
        """Undo `keep_tokens`: restore all rows, with the trained values of those that were kept."""
        ids, rows = self.kept
        tuned = self.embedding.word.weight.detach()
        rows = rows.to(tuned.device).index_copy(0, ids.to(tuned.device), tuned)
        self.embedding.word = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=PAD)
        self.vocabulary, self.kept = len(rows), None

    def encode(self, tokens_BS: Tensor, padded: bool = False, positions_BK: Tensor | None = None) -> Tensor:
        """(B, S) token ids to (B, S, D) states. `padded`: mask [PAD].

        With positions, only the states there, (B, K, D): the last block computes no others.
        """
        S = tokens_BS.shape[1]
        if missing := -S % 2**self.architecture.funnel:  # a task's inputs have any length
            tokens_BS, padded = F.pad(tokens_BS, (0, missing), value=PAD), True
        seen_BS = tokens_BS != PAD if padded else None
        x_BSD = self.dropout(self.embedding(tokens_BS))
        longer: list[tuple[Tensor, Tensor | None]] = []
        for index, halvings in enumerate(self.architecture.halvings()):
            if halvings > len(longer):
                longer.append((x_BSD, seen_BS))
                x_BSD, seen_BS = halve(x_BSD, seen_BS)
            elif halvings < len(longer):
                before_BSD, seen_BS = longer.pop()
                x_BSD = before_BSD + x_BSD.repeat_interleave(2, dim=1)
            last = index + 1 == self.architecture.layers
            x_BSD = self.blocks[index % len(self.blocks)](x_BSD, seen_BS, positions_BK if last else None)
        return self.norm(x_BSD)[:, :S]

    def pooled(self, tokens_BS: Tensor, padded: bool, pooling: Pooling = "cls", texts: Texts = None) -> Tensor:
        """What the head on sequences of one or two texts reads, (B, D), or (B, 4 D) to compare two texts.

        [CLS] is the first token; means are over all tokens but [PAD]; the first text ends with the first [SEP].
        """
        if pooling == "cls":
            first_B1 = tokens_BS.new_zeros(len(tokens_BS), 1, dtype=torch.int64)
            return self.encode(tokens_BS, padded, first_B1)[:, 0]
        states_BSD, seen_BS = self.encode(tokens_BS, padded), tokens_BS != PAD
        if width_factor(pooling, texts) == 1:
            return mean(states_BSD, seen_BS)
        ends_BS = (tokens_BS == SEP).int()
        first_BS = seen_BS & (ends_BS.cumsum(dim=1) == ends_BS)
        u_BD, v_BD = mean(states_BSD, first_BS), mean(states_BSD, seen_BS & ~first_BS)
        return torch.cat([u_BD, v_BD, (u_BD - v_BD).abs(), u_BD * v_BD], dim=1)

    @property
    def decoder(self) -> Tensor:
        """The vocabulary head's matrix (V, E)."""
        return self.embedding.word.weight if self.head.decoder is None else self.head.decoder.weight

    def logits(self, states: Tensor) -> Tensor:
        """(..., D) states to (..., V) scores of the vocabulary."""
        return F.linear(self.head(states), self.decoder, self.head.bias)

    def forward(self, tokens_BS: Tensor, positions_BK: Tensor, labels_BK: Tensor) -> Tensor:
        """The mean cross-entropy, nats, at the masked positions. Last block and head are computed only there."""
        return self.masked_loss(self.encode(tokens_BS, positions_BK=positions_BK), labels_BK)

    def masked_loss(self, states_BKD: Tensor, labels_BK: Tensor) -> Tensor:
        """The mean cross-entropy, nats, of the states at masked positions."""
        scores_MV = self.logits(states_BKD.flatten(0, 1))
        return F.cross_entropy(scores_MV.float(), labels_BK.flatten())

    def losses(self, tokens_BS: Tensor, places_M: Tensor, labels_M: Tensor, padded: bool = False) -> Tensor:
        """The cross-entropy (M,), nats, at these places, which are numbered through the whole batch."""
        scores_MV = self.logits(self.encode(tokens_BS, padded).flatten(0, 1)[places_M])
        return F.cross_entropy(scores_MV.float(), labels_M, reduction="none")


def mean(states: Tensor, chosen: Tensor) -> Tensor:
    """(..., S, D) to (..., D): the mean over the tokens that `chosen` (..., S) marks; zero if there are none."""
    weights = chosen.to(states.dtype) / chosen.sum(dim=-1, keepdim=True).clamp(min=1)
    return (states * weights[..., None]).sum(dim=-2)


def width_factor(pooling: Pooling, texts: Texts) -> int:
    """The width of what a head reads, by the encoder's."""
    return 4 if pooling == "compare" and texts == 2 else 1


def halve(x_BSD: Tensor, seen_BS: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The mean of each pair of neighbours, without padding, and whether a pair has a token that is not padding."""
    B, S, D = x_BSD.shape
    pairs = x_BSD.view(B, S // 2, 2, D)
    if seen_BS is None:
        return pairs.mean(dim=2), None
    seen = seen_BS.view(B, S // 2, 2)
    return mean(pairs, seen), seen.any(dim=2)


def operations(
    architecture: Architecture, vocabulary: int, length: int, masks: int, last_states: int | None = None
) -> float:
    """Floating-point operations per token, forward and backward, of matrix products and attention.

    `masks` tokens of each sequence of `length` go through the head. For so many tokens, or else for `last_states`, the
    last block computes states, from keys and values of all. Reading the embedding is free.
    """
    hidden, width = architecture.hidden, architecture.embedding or architecture.hidden
    projection = hidden * width if width != hidden else 0
    total = 2.0 * projection
    for index, halvings in enumerate(architecture.halvings()):
        share = 0.5**halvings
        with_ffn = (index % (architecture.different_layers or architecture.layers) + 1) % architecture.ffn_every == 0
        ffn = architecture.inner * (3 if architecture.activation == "geglu" else 2) * hidden if with_ffn else 0
        asked = share if index + 1 < architecture.layers else (last_states or masks) / length
        total += 4 * share * hidden**2 + asked * (2 * (2 * hidden**2 + ffn) + 4 * share * length * hidden)
    transform = hidden * width if architecture.head_transform else projection
    return 3 * (total + masks / length * 2 * (transform + width * vocabulary))


class ClassifierHead(nn.Module):
    """Dense, tanh (EuroBERT: GELU), dropout and dense to the scores; ModernBERT's has only the last two.

    `inputs`: the width of what it reads.
    """

    def __init__(self, inputs: int, classes: int, dropout: float, seed: int, layout: str | None = None) -> None:
        super().__init__()
        width = inputs if layout else CLASSIFIER_WIDTH
        self.activation = F.gelu if layout == "EuroBert" else torch.tanh
        self.dense = None if layout == "ModernBert" else nn.Linear(inputs, width)
        self.dropout = Dropout(dropout)
        self.out = nn.Linear(width, classes)
        initialize(self, torch.Generator().manual_seed(HEAD_STREAM + seed))

    def forward(self, states_BD: Tensor) -> Tensor:
        """(B, inputs) to (B, classes) scores."""
        x = states_BD if self.dense is None else self.activation(self.dense(states_BD))
        return self.out(self.dropout(x))


class Classifier(nn.Module):
    """The encoder with a head on the pooled state of each sequence.

    "tanh" is the reference's GLUE head, 1024 wide. "native" is that of transformers' model of the layout, as wide as
    the encoder; ModernBERT's begins with the pretrained transform. InputError if transformers has no such model.
    `texts` in an input; None: not known.
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
        self.bert, self.classes, self.head, self.pooling, self.texts = bert, classes, head, pooling, texts
        self.layout = transformers_model(bert.architecture) if head == "native" else None
        if head == "native" and (lacking := why_not_transformers_classifier(bert.architecture, head, pooling)):
            raise InputError(f"{lacking} Set finetune.head to 'tanh'.")
        bert.set_dropout(dropout)
        inputs = bert.architecture.hidden * width_factor(pooling, texts)
        self.classifier = ClassifierHead(inputs, classes, dropout, seed, self.layout)

    def scores(self, states_BD: Tensor) -> Tensor:
        """What `Bert.pooled` returns to (B, classes) scores."""
        return self.classifier(self.bert.head(states_BD) if self.layout == "ModernBert" else states_BD)

    def forward(self, tokens_BS: Tensor, padded: bool = True) -> Tensor:
        """(B, S) token ids to (B, classes) scores. `padded`: mask [PAD]."""
        states_BD = self.bert.pooled(tokens_BS, padded, self.pooling, self.texts)
        if self.training:
            return self.scores(states_BD)
        # not in bf16, where one prediction in a hundred is a tie of classes
        with torch.autocast(states_BD.device.type, enabled=False):
            return self.scores(states_BD.float())
