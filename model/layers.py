"""Layers that the training model (bert.py) and its twin in transformers (hf.py) share. Imports torch only.

`Sizes`: an `Architecture`, or a config of transformers, which has the same fields and may travel with a model.
Shapes: B sequences, S tokens each, D hidden, E embedding (D unless factorised), N heads, H = D / N, V vocabulary
entries.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = Any
Maybe = Tensor | None
INIT_STD = 0.02  # of every weight matrix, as BERT
# the ids in a vocabulary that cram trains; a public model's vocabulary has its own
PAD = 0
SEP = 3
ROTARY_BASE = 10_000.0  # Su et al. 2021


def inner(sizes: Sizes) -> int:
    """Input width of the feed-forward layer's output projection."""
    if sizes.activation == "geglu":
        return sizes.intermediate * 2 // 3
    return sizes.intermediate


def halvings(sizes: Sizes) -> list[int]:
    """How often the length is halved at each block: each length, down and up again, has about as many blocks."""
    last = 2 * sizes.funnel
    stages = [index * (last + 1) // sizes.layers for index in range(sizes.layers)]
    return [min(stage, last - stage) for stage in stages]


class LayerNorm(nn.LayerNorm):
    """torch's, but its output has the type of its input; autocast computes it in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        return super().forward(x).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's, computed in the type of its weights; its output has the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape and type."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def norm(sizes: Sizes, width: int) -> nn.Module:
    """A norm over the last `width` values."""
    if sizes.norm == "rmsnorm":
        return RMSNorm(width, eps=sizes.norm_eps)
    return LayerNorm(width, eps=sizes.norm_eps, bias=sizes.norm_bias)


def sinusoids(length: int, width: int) -> Tensor:
    """Position codes (S, E): pairs of sine and cosine, interleaved, of base 10,000 (Vaswani et al. 2017)."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    evens = torch.arange(0, width, 2, dtype=torch.float32)
    rates = torch.exp(evens * (-math.log(10_000.0) / width))
    angles = positions * rates
    codes = torch.zeros(length, width)
    codes[:, 0::2] = torch.sin(angles)
    codes[:, 1::2] = torch.cos(angles)
    return codes


class Embedding(nn.Module):
    """Words plus positions, normalised, projected to the hidden width if factorised.

    A model that was pretrained on pairs adds `second`, if it isn't None, to the tokens of the second text.
    """

    codes: Tensor  # (S, E)
    second: Maybe  # (E,)

    def __init__(self, sizes: Sizes, vocabulary: int, length: int, pad: int = PAD) -> None:
        super().__init__()
        width = sizes.embedding or sizes.hidden
        self.word = nn.Embedding(vocabulary, width, padding_idx=pad)
        self.register_buffer("second", None)
        self.positions = sizes.positions
        if self.positions == "learned":
            self.position = nn.Embedding(length, width)
        elif self.positions != "rotary":
            self.register_buffer("codes", sinusoids(length, width), persistent=False)
        if self.positions == "scaled-sinusoidal":
            self.scale = nn.Parameter(torch.tensor(width**-0.5))
        self.norm = norm(sizes, width) if sizes.embedding_norm else nn.Identity()
        self.project: nn.Module = nn.Identity()
        if sizes.embedding is not None:
            self.project = nn.Linear(width, sizes.hidden, bias=sizes.bias)

    def forward(
        self, tokens_BS: Maybe, words_BSE: Maybe = None, positions_BS: Maybe = None, second_BS: Maybe = None
    ) -> Tensor:
        """(B, S) token ids, or the embeddings of words, to (B, S, D). Without positions, tokens are at the first S.

        second_BS  True for the tokens of a second text; None: there is none
        """
        x_BSE = self.word(tokens_BS) if words_BSE is None else words_BSE
        if self.second is not None and second_BS is not None:
            x_BSE = x_BSE + self.second * second_BS[..., None]
        places = slice(x_BSE.shape[1]) if positions_BS is None else positions_BS
        if self.positions == "learned":
            x_BSE = x_BSE + self.position.weight[places]
        elif self.positions == "sinusoidal":
            x_BSE = x_BSE + self.codes[places]
        elif self.positions == "scaled-sinusoidal":
            x_BSE = x_BSE + self.scale * self.codes[places]
        return self.project(self.norm(x_BSE))


class Rotation(nn.Module):
    """Rotary positions: values i and i + H / 2 of a head are turned by an angle proportional to the position."""

    cosines: Tensor  # (S, 1, 1, H)
    sines: Tensor

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        positions = torch.arange(length, dtype=torch.float32)[:, None]
        rates = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = positions * rates
        sine = torch.sin(angles)
        cosines = torch.cos(angles).repeat(1, 2)
        sines = torch.cat([-sine, sine], dim=1)
        self.register_buffer("cosines", cosines[:, None, None], persistent=False)
        self.register_buffer("sines", sines[:, None, None], persistent=False)

    def forward(self, x_BSPNH: Tensor, positions_BS: Maybe = None) -> Tensor:
        """Queries or keys (P of them), turned. Without positions, tokens are at the first S."""
        places = slice(x_BSPNH.shape[1]) if positions_BS is None else positions_BS
        cosines = self.cosines[places].to(x_BSPNH.dtype)
        sines = self.sines[places].to(x_BSPNH.dtype)
        other = swap_halves(x_BSPNH, x_BSPNH.device.type)
        return torch.addcmul(x_BSPNH * cosines, other, sines)


def swap_halves(x: Tensor, device: str) -> Tensor:
    """(..., H): the second half of the last axis before the first.

    Compiled for a CPU, `roll` would not be vectorised; for a GPU, it takes fewer instructions (docs/findings.md).
    """
    if device == "cpu":
        return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return x.roll(x.shape[-1] // 2, dims=-1)


class Attention(nn.Module):
    """The projections of bidirectional self-attention. bert.py and hf.py each compute attention from them."""

    def __init__(self, sizes: Sizes, length: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.heads = sizes.heads
        hidden = sizes.hidden
        # three matrices, since Muon orthogonalises each by itself
        self.query = nn.Linear(hidden, hidden, bias=sizes.qkv_bias)
        self.key = nn.Linear(hidden, hidden, bias=sizes.qkv_bias)
        self.value = nn.Linear(hidden, hidden, bias=sizes.qkv_bias)
        self.out = nn.Linear(hidden, hidden, bias=sizes.bias)
        self.out.ends_branch = True  # type: ignore[assignment]  # for zero_outputs
        self.rotation = None
        if sizes.positions == "rotary":
            self.rotation = Rotation(hidden // self.heads, length)

    def rotate(self, x_BSPNH: Tensor, positions_BS: Maybe = None) -> Tensor:
        """Queries or keys, turned by their positions if these are rotary."""
        if self.rotation is None:
            return x_BSPNH
        return self.rotation(x_BSPNH, positions_BS)


class FeedForward(nn.Module):
    """Two dense layers; with GEGLU, one half of the first layer's output gates the other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.activation = sizes.activation
        wide = inner(sizes)
        if self.activation == "geglu":
            wide *= 2
        self.dense_in = nn.Linear(sizes.hidden, wide, bias=sizes.bias)
        self.dense_out = nn.Linear(inner(sizes), sizes.hidden, bias=sizes.bias)
        self.dense_out.ends_branch = True  # type: ignore[assignment]  # for zero_outputs

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        if self.activation == "geglu":
            x, gate = self.halves(x_BSD)
            x = F.gelu(x) * gate
        elif self.activation == "gelu":
            x = F.gelu(self.dense_in(x_BSD))
        else:
            x = F.relu(self.dense_in(x_BSD)).square()
        return self.dense_out(x)

    def halves(self, x_BSD: Tensor) -> tuple[Tensor, ...]:
        """The two halves of the first layer's output, (B, S, `inner`) each.

        They are one product. Compiled for a GPU they are two: torch's compiler would make one matrix of the gradients
        of both halves in a kernel that computes each half at the places of the other too (docs/findings.md).
        """
        if not multiplies_by_halves(x_BSD.device.type):
            return self.dense_in(x_BSD).chunk(2, dim=-1)
        weights = self.dense_in.weight.chunk(2)
        biases: tuple[Maybe, ...] = (None, None)
        if self.dense_in.bias is not None:
            biases = self.dense_in.bias.chunk(2)
        return tuple(F.linear(x_BSD, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def multiplies_by_halves(device: str) -> bool:
    """Whether both halves of a GEGLU layer are products of their own: compiled for a GPU."""
    return device != "cpu" and torch.compiler.is_compiling()


class Convolution(nn.Module):
    """A depthwise convolution over tokens, added to the states; zero at first.

    In a day or less of training, attention hardly learns to look at neighbouring tokens, from which most of a masked
    token is predicted. Similar to the layers of Allen-Zhu 2025 (arXiv 2512.17351).
    """

    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        # three dimensions, so that Muon, which is for matrices, leaves it to AdamW (docs/findings.md)
        self.weight = nn.Parameter(torch.zeros(tokens, 1, hidden))

    def forward(self, x_BSD: Tensor, seen_BS: Maybe) -> Tensor:
        """(B, S, D) to (B, S, D). Tokens beyond the sequence and those that are not `seen` count as zero."""
        S = x_BSD.shape[1]
        reach = len(self.weight) // 2
        seen_BSD = x_BSD
        if seen_BS is not None:
            seen_BSD = x_BSD * seen_BS[:, :, None]
        wide_BWD = F.pad(seen_BSD, (0, 0, reach, reach))
        for place, weight_1D in enumerate(self.weight):
            x_BSD = torch.addcmul(x_BSD, wide_BWD[:, place : place + S], weight_1D)
        return x_BSD.to(wide_BWD.dtype)  # summed in that of the weights


class Block(nn.Module):
    """Attention and feed-forward layer, each with a residual connection and a norm before or after."""

    def __init__(self, sizes: Sizes, index: int, attention: Attention, dropout: nn.Dropout) -> None:
        super().__init__()
        self.post = sizes.norm_order == "post"
        self.convolution = Convolution(sizes.convolution, sizes.hidden) if sizes.convolution else None
        self.attention_norm = norm(sizes, sizes.hidden) if index or sizes.first_norm else nn.Identity()
        self.attention = attention
        with_ffn = (index + 1) % sizes.ffn_every == 0
        self.ffn_norm = norm(sizes, sizes.hidden) if with_ffn else nn.Identity()
        self.ffn = FeedForward(sizes) if with_ffn else None
        self.dropout = dropout

    def mix(self, x_BSD: Tensor, seen_BS: Maybe) -> Tensor:
        """The states with their neighbours, if there is a convolution."""
        if self.convolution is None:
            return x_BSD
        return self.convolution(x_BSD, seen_BS)

    def norm_input(self, x: Tensor) -> Tensor:
        """The input of attention."""
        return x if self.post else self.attention_norm(x)

    def combine(self, x: Tensor, attended: Tensor) -> Tensor:
        """States and the output of attention to new states, all (..., D)."""
        x = x + self.dropout(attended)
        if self.post:
            x = self.attention_norm(x)
        if self.ffn is None:
            return x
        if self.post:
            return self.ffn_norm(x + self.dropout(self.ffn(x)))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))


class Head(nn.Module):
    """From states to scores of the vocabulary: optional transform and projection to the embedding's width, decoder."""

    def __init__(self, sizes: Sizes, vocabulary: int) -> None:
        super().__init__()
        hidden = sizes.hidden
        width = sizes.embedding or hidden
        self.transforms = sizes.head_transform
        self.dense = None
        if self.transforms or sizes.embedding is not None:
            self.dense = nn.Linear(hidden, width, bias=sizes.bias)
        self.norm = norm(sizes, width) if self.transforms else nn.Identity()
        self.decoder = None if sizes.tied else nn.Linear(width, vocabulary, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocabulary)) if sizes.decoder_bias else None

    def forward(self, states: Tensor) -> Tensor:
        """(..., D) to (..., E), the decoder's input."""
        x = states if self.dense is None else self.dense(states)
        if self.transforms:
            x = self.norm(F.gelu(x))
        return x


class ClassifierHead(nn.Module):
    """Dense, tanh, dropout and dense to the scores.

    `inputs`: the width of a state. `width`: that of the first dense layer; None: no such layer and no tanh.
    """

    def __init__(self, inputs: int, classes: int, dropout: nn.Dropout, width: int | None) -> None:
        super().__init__()
        self.dense = None if width is None else nn.Linear(inputs, width)
        self.dropout = dropout
        self.out = nn.Linear(width or inputs, classes)

    def forward(self, states: Tensor) -> Tensor:
        """(..., inputs) to (..., classes) scores."""
        if self.dense is not None:
            states = torch.tanh(self.dense(states))
        return self.out(self.dropout(states))


def at(x_BSD: Tensor, positions_BK: Tensor) -> Tensor:
    """(B, K, D): the states at these positions."""
    D = x_BSD.shape[-1]
    places_BKD = positions_BK[:, :, None].expand(-1, -1, D)
    return x_BSD.gather(1, places_BKD)


def initial_tensors(part: nn.Module, zero_outputs: bool) -> dict[str, Tensor]:
    """The tensors of a layer that don't start with random values, by name; the tables of positions too."""
    if isinstance(part, Rotation):
        length, _, _, size = part.cosines.shape
        return dict(Rotation(size, length).named_buffers())
    if isinstance(part, Embedding):
        width = part.word.embedding_dim
        tensors = {}
        if hasattr(part, "codes"):
            tensors["codes"] = sinusoids(len(part.codes), width)
        if hasattr(part, "scale"):
            tensors["scale"] = torch.tensor(width**-0.5)
        return tensors
    if isinstance(part, Convolution):
        return {"weight": torch.zeros_like(part.weight)}
    if isinstance(part, nn.Linear) and zero_outputs and hasattr(part, "ends_branch"):
        return {"weight": torch.zeros_like(part.weight)}
    if isinstance(part, Head) and part.bias is not None:
        return {"bias": torch.zeros_like(part.bias)}
    return {}


def pool(states_BSD: Tensor, seen_BS: Maybe, pooling: str) -> Tensor:
    """(B, D): the mean over the tokens that are `seen` (None: all), or for "cls" the first of them."""
    if pooling == "mean":
        return states_BSD.mean(dim=1) if seen_BS is None else mean(states_BSD, seen_BS)
    if seen_BS is None:
        return states_BSD[:, 0]
    first_B = seen_BS.int().argmax(dim=1)  # padding may be on the left
    return at(states_BSD, first_B[:, None])[:, 0]


def mean(states: Tensor, seen: Tensor) -> Tensor:
    """(..., S, D) to (..., D): the mean over the tokens that are `seen` (..., S); zero if there are none."""
    counts = seen.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = seen.to(states.dtype) / counts
    return (states * weights[..., None]).sum(dim=-2)


def in_second_text(ends_BS: Tensor) -> Tensor:
    """(B, S): True for tokens after the first [SEP]: those of a second text, and [PAD]. `ends_BS`: True for [SEP]."""
    ends_BS = ends_BS.int()
    ends_before_BS = ends_BS.cumsum(dim=1) - ends_BS
    return ends_before_BS > 0


def compare_texts(states_BSD: Tensor, seen_BS: Tensor, ends_BS: Tensor) -> Tensor:
    """(B, 4 D): the means of two texts, their absolute difference and product. The first ends at the first of `ends`.

    seen_BS, ends_BS  True for tokens that are not padding, and for [SEP]
    """
    is_second_BS = in_second_text(ends_BS)
    first_BS = seen_BS & ~is_second_BS
    second_BS = seen_BS & is_second_BS
    u_BD = mean(states_BSD, first_BS)
    v_BD = mean(states_BSD, second_BS)
    difference_BD = (u_BD - v_BD).abs()
    return torch.cat([u_BD, v_BD, difference_BD, u_BD * v_BD], dim=1)


def halve(x_BSD: Tensor, seen_BS: Maybe) -> tuple[Tensor, Maybe]:
    """The mean of each pair of neighbours, without padding, and whether a pair has a token that is not padding."""
    B, S, D = x_BSD.shape
    pairs = x_BSD.view(B, S // 2, 2, D)
    if seen_BS is None:
        return pairs.mean(dim=2), None
    seen = seen_BS.view(B, S // 2, 2)
    return mean(pairs, seen), seen.any(dim=2)
