"""The encoder with every axis of `Architecture`, and its vocabulary head, from token ids to scores and losses.

The defaults are the model of "Cramming" (Geiping & Goldstein, arXiv 2212.14034, section 4.2).
Shapes: B sequences, S tokens each, D hidden, E embedding (D unless factorised), N heads, H = D / N, V vocabulary
entries, K masked tokens per sequence, M = B * K.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import InputError, attention, counted
from model.settings import Architecture

INIT_STD = 0.02  # of every weight matrix, as BERT
PAD, SEP = 0, 3  # the vocabulary fixes the ids of special tokens
ROTARY_BASE = 10_000.0  # Su et al. 2021
OUTPUTS = ("attention.out.weight", "ffn.dense_out.weight")  # of each branch: the last layer's weights


def norm(architecture: Architecture, width: int) -> nn.Module:
    """A norm over the last `width` values."""
    if architecture.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=architecture.norm_eps)
    return nn.LayerNorm(width, eps=architecture.norm_eps, bias=architecture.norm_bias)


class Dropout(nn.Dropout):
    """Dropout in training, none in inference."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return attention.drop(x, self.p) if self.training else x


def sinusoids(length: int, width: int) -> Tensor:
    """Position codes (S, E): pairs of sine and cosine, interleaved, of base 10,000 (Vaswani et al. 2017)."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    codes = torch.zeros(length, width)
    codes[:, 0::2] = torch.sin(positions * rates)
    codes[:, 1::2] = torch.cos(positions * rates)
    return codes


class Embedding(nn.Module):
    """Words plus positions, normalised, projected to the hidden width if factorised."""

    codes: Tensor  # (S, E)

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


class Rotation(nn.Module):
    """Rotary positions: values i and i + H / 2 of a head are turned by an angle proportional to the position."""

    cosines: Tensor  # (S, 1, 1, H)
    sines: Tensor

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        rates = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
        sine = torch.sin(angles)
        self.register_buffer("cosines", torch.cos(angles).repeat(1, 2)[:, None, None], persistent=False)
        self.register_buffer("sines", torch.cat([-sine, sine], dim=1)[:, None, None], persistent=False)

    def forward(self, x_BSPNH: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Queries or keys (P of them), turned. They are those of the first S positions if no others are given."""
        places = slice(x_BSPNH.shape[1]) if positions_BS is None else positions_BS
        cosines, sines = (part[places].to(x_BSPNH.dtype) for part in (self.cosines, self.sines))
        # its two halves swapped; compiled for a CPU, `roll` would not be vectorised
        other = x_BSPNH.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.addcmul(x_BSPNH * cosines, other, sines)


class Attention(nn.Module):
    """Bidirectional self-attention."""

    def __init__(self, architecture: Architecture, length: int) -> None:
        super().__init__()
        hidden = architecture.hidden
        self.heads = architecture.heads
        # three matrices, since Muon orthogonalises each by itself; multiplied as one
        self.query = nn.Linear(hidden, hidden, bias=architecture.qkv_bias)
        self.key = nn.Linear(hidden, hidden, bias=architecture.qkv_bias)
        self.value = nn.Linear(hidden, hidden, bias=architecture.qkv_bias)
        self.out = nn.Linear(hidden, hidden, bias=architecture.bias)
        rotary = architecture.positions == "rotary"
        self.rotation = Rotation(hidden // self.heads, length) if rotary else None
        self.dropout = 0.0

    def project(self, x_BSD: Tensor, *parts: nn.Linear) -> Tensor:
        """(B, S, D) to (B, S, parts, N, H)."""
        bias = None if self.query.bias is None else torch.cat([part.bias for part in parts])
        together = F.linear(x_BSD, torch.cat([part.weight for part in parts]), bias)
        return together.view(*x_BSD.shape[:2], len(parts), self.heads, -1)

    def forward(self, x_BSD: Tensor, mask: Tensor | None, chosen: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """(B, S, D) to (B, S, D), or to (B, K, D) if only K tokens look at all others.

        mask    (B, 1, 1, S): True for tokens that others see
        chosen  the positions (B, K) of the K tokens, and what x_BSD holds there (B, K, D)
        """
        if chosen is None:
            qk_BS2NH, v_BS1NH = self.project(x_BSD, self.query, self.key, self.value).split((2, 1), dim=2)
            q_BK1NH, k_BS1NH = self.rotated(qk_BS2NH).split(1, dim=2)
        else:
            positions_BK, x_BKD = chosen
            q_BK1NH = self.rotated(self.project(x_BKD, self.query), positions_BK)
            k_BS1NH, v_BS1NH = self.project(x_BSD, self.key, self.value).split(1, dim=2)
            k_BS1NH = self.rotated(k_BS1NH)
        q_BNKH, k_BNSH, v_BNSH = (part.squeeze(2).transpose(1, 2) for part in (q_BK1NH, k_BS1NH, v_BS1NH))
        x_BNKH = attention.attend(q_BNKH, k_BNSH, v_BNSH, mask, self.dropout if self.training else 0.0)
        return self.out(x_BNKH.transpose(1, 2).flatten(2))

    def rotated(self, x_BSPNH: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Queries or keys, turned by their positions if these are rotary."""
        return x_BSPNH if self.rotation is None else self.rotation(x_BSPNH, positions_BS)


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
        # three dimensions, so that Muon, which is for matrices, leaves it to AdamW (docs/findings.md)
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
        self.ffn_norm = norm(architecture, architecture.hidden) if with_ffn else nn.Identity()
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
        self.norm = norm(architecture, width) if self.transforms else nn.Identity()
        self.decoder = None if architecture.tied else nn.Linear(width, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if architecture.decoder_bias else None

    def forward(self, states: Tensor) -> Tensor:
        """(..., D) to (..., E), the decoder's input."""
        x = states if self.dense is None else self.dense(states)
        return self.norm(F.gelu(x)) if self.transforms else x


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
            for name, weight in self.named_parameters():
                if name.endswith(OUTPUTS):
                    nn.init.zeros_(weight)

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
        assert self.kept is not None, "keep_tokens was not called"
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


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices from a normal distribution of deviation 0.02, with zeros for [PAD]; biases zero, norms one."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


def at(x_BSD: Tensor, positions_BK: Tensor) -> Tensor:
    """(B, K, D): the states at these positions."""
    return x_BSD.gather(1, positions_BK[:, :, None].expand(-1, -1, x_BSD.shape[-1]))


def mean(states: Tensor, seen: Tensor) -> Tensor:
    """(..., S, D) to (..., D): the mean over the tokens that are `seen` (..., S); zero if there are none."""
    weights = seen.to(states.dtype) / seen.sum(dim=-1, keepdim=True).clamp(min=1)
    return (states * weights[..., None]).sum(dim=-2)


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
