"""The encoder with every axis of `Architecture`, and its vocabulary head, from token ids to scores and losses.

The defaults are the model of "Cramming" (Geiping & Goldstein, arXiv 2212.14034, section 4.2). `Detecting` adds a second
loss to pretraining.
Shapes: B sequences, S tokens each, D hidden, E embedding (D unless factorised), N heads, H = D / N, V vocabulary
entries, K tokens per sequence that are masked, or whose states are computed, M = B * K.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import layers
from model.layers import INIT_STD, Embedding, Head, at, halve, halvings, inner, norm
from model.settings import SPECIALS, Architecture, Specials, Training

IGNORED = -1.0  # label of [MASK] and of special tokens, for `Detecting`


def drop(x: Tensor, probability: float) -> Tensor:
    """Dropout. On CPUs it draws 16 bits per value, seven times as fast as torch; probabilities are exact to 1e-5."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0.0 < probability < 1.0:
        return F.dropout(x, probability)
    count = x.numel()
    words = -(-count // 4)  # of 64 bits
    bits = torch.empty(words, dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    least = min(round(probability * 2**16) - 2**15, 2**15 - 1)
    factors = torch.empty_like(x, requires_grad=False)
    torch.ge(bits[:count].view(x.shape), least, out=factors)
    return x * factors.div_(1.0 - probability)


def attend(q_BNKH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Scaled dot-product attention. Written out on CPUs, where torch's kernel takes 4 times as long at 128 tokens."""
    if q_BNKH.device.type != "cpu":
        return F.scaled_dot_product_attention(q_BNKH, k_BNSH, v_BNSH, attn_mask=mask, dropout_p=dropout)
    scores_BNKS = (q_BNKH * q_BNKH.shape[-1] ** -0.5) @ k_BNSH.transpose(-1, -2)
    if mask is not None:
        scores_BNKS = scores_BNKS.masked_fill(~mask, -torch.inf)
    return drop(scores_BNKS.softmax(dim=-1, dtype=v_BNSH.dtype), dropout) @ v_BNSH


class Dropout(nn.Dropout):
    """Dropout in training, none in inference."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if not self.training:
            return x
        return drop(x, self.p)


class Attention(layers.Attention):
    """Bidirectional self-attention, whose three projections are multiplied as one."""

    def __init__(self, architecture: Architecture, length: int) -> None:
        super().__init__(architecture, length)
        self.dropout = 0.0

    def project(self, x_BSD: Tensor, *parts: nn.Linear) -> Tensor:
        """(B, S, D) to (B, S, parts, N, H)."""
        B, S, _ = x_BSD.shape
        weight = torch.cat([part.weight for part in parts])
        bias = None
        if self.query.bias is not None:
            bias = torch.cat([part.bias for part in parts])
        return F.linear(x_BSD, weight, bias).view(B, S, len(parts), self.heads, -1)

    def forward(self, x_BSD: Tensor, mask: Tensor | None, chosen: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """(B, S, D) to (B, S, D), or to (B, K, D) if only K tokens look at all others.

        mask    (B, 1, 1, S): True for tokens that others see
        chosen  the positions (B, K) of the K tokens, and what x_BSD holds there (B, K, D)
        """
        if chosen is None:
            qk_BS2NH, v_BS1NH = self.project(x_BSD, self.query, self.key, self.value).split((2, 1), dim=2)
            q_BK1NH, k_BS1NH = self.rotate(qk_BS2NH).split(1, dim=2)
        else:
            positions_BK, x_BKD = chosen
            q_BK1NH = self.rotate(self.project(x_BKD, self.query), positions_BK)
            k_BS1NH, v_BS1NH = self.project(x_BSD, self.key, self.value).split(1, dim=2)
            k_BS1NH = self.rotate(k_BS1NH)
        q_BNKH = q_BK1NH.squeeze(2).transpose(1, 2)
        k_BNSH = k_BS1NH.squeeze(2).transpose(1, 2)
        v_BNSH = v_BS1NH.squeeze(2).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        x_BNKH = attend(q_BNKH, k_BNSH, v_BNSH, mask, dropout)
        return self.out(x_BNKH.transpose(1, 2).flatten(2))


class Block(layers.Block):
    """Attention and feed-forward layer, each with a residual connection and a norm before or after."""

    def __init__(self, architecture: Architecture, length: int, index: int) -> None:
        super().__init__(architecture, index, Attention(architecture, length), Dropout(0.0))

    def forward(self, x_BSD: Tensor, seen_BS: Tensor | None, positions_BK: Tensor | None = None) -> Tensor:
        """(B, S, D) to (B, S, D), or to (B, K, D): the states at these positions alone.

        seen_BS  True for tokens that others see; None: all
        """
        mask = None if seen_BS is None else seen_BS[:, None, None, :]
        x_BSD = self.mix(x_BSD, seen_BS)
        normed_BSD = self.norm_input(x_BSD)
        if positions_BK is None:
            return self.combine(x_BSD, self.attention(normed_BSD, mask))
        x_BKD = at(x_BSD, positions_BK)
        chosen = positions_BK, self.norm_input(x_BKD)
        return self.combine(x_BKD, self.attention(normed_BSD, mask, chosen))


class Kept(NamedTuple):
    """What `Bert.keep_tokens` keeps to undo it."""

    ids: Tensor
    rows: Tensor  # all of the embedding
    specials: Specials


class Bert(nn.Module):
    """The encoder and its masked-language-modelling head, on sequences of up to `length` tokens.

    `specials`: the ids of the special tokens in its vocabulary.
    """

    def __init__(
        self, architecture: Architecture, vocabulary: int, length: int, seed: int = 0, specials: Specials = SPECIALS
    ) -> None:
        super().__init__()
        architecture.check_length(length)
        self.architecture = architecture
        self.vocabulary = vocabulary
        self.length = length
        self.specials = specials
        self.embedding = Embedding(architecture, vocabulary, length, specials.pad)
        different = architecture.different_layers or architecture.layers
        self.blocks = nn.ModuleList(Block(architecture, length, index) for index in range(different))
        self.norm = norm(architecture, architecture.hidden) if architecture.final_norm else nn.Identity()
        self.head = Head(architecture, vocabulary)
        self.kept: Kept | None = None
        self.has_new_head = True  # whether the vocabulary head is untrained, as in a bare encoder that was loaded
        self.dropout = Dropout(0.0)
        self.trained_in: torch.dtype | None = None  # the states between blocks; None: as the weights
        initialize(self, torch.Generator().manual_seed(seed))
        if architecture.zero_outputs:
            self.zero_outputs()

    def zero_outputs(self) -> None:
        """Set the output projection of each branch to zero."""
        for part in self.modules():
            if isinstance(part, nn.Linear) and hasattr(part, "ends_branch"):
                nn.init.zeros_(part.weight)

    def set_dropout(self, probability: float) -> None:
        """Set dropout after embedding and branches and on attention weights."""
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = probability
            elif isinstance(part, Attention):
                part.dropout = probability

    def keep_tokens(self, ids: Tensor) -> None:
        """Keep only the embeddings of these ids (sorted). From then on, a token is its place among them.

        All special tokens but [MASK] must be among them. The vocabulary head can't be used then. This saves the
        optimizer's work on rows that get no gradient.
        """
        rows = self.embedding.word.weight.detach()
        self.kept = Kept(ids, rows, self.specials)
        places = torch.searchsorted(ids, torch.tensor(self.specials))
        self.specials = Specials(*places.tolist())
        self.embedding.word = nn.Embedding.from_pretrained(rows[ids], freeze=False, padding_idx=self.specials.pad)
        self.vocabulary = len(ids)

    def restore_tokens(self) -> None:
        """Undo `keep_tokens`: restore all rows, with the trained values of those that were kept."""
        if self.kept is None:
            raise RuntimeError("keep_tokens was not called")
        ids, rows, self.specials = self.kept
        tuned = self.embedding.word.weight.detach()
        rows = rows.to(tuned.device).index_copy(0, ids.to(tuned.device), tuned)
        self.embedding.word = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=self.specials.pad)
        self.vocabulary = len(rows)
        self.kept = None

    def drop_entries(self, entries: int) -> None:
        """Keep only the first entries of the vocabulary: the others have no token."""
        if entries == self.vocabulary:
            return
        rows = self.embedding.word.weight.detach()[:entries].clone()
        self.embedding.word = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=self.specials.pad)
        head = self.head
        if head.decoder is not None:
            head.decoder.weight = nn.Parameter(head.decoder.weight.detach()[:entries].clone())
        if head.bias is not None:
            head.bias = nn.Parameter(head.bias.detach()[:entries].clone())
        self.vocabulary = entries

    def encode(
        self,
        tokens_BS: Tensor,
        padded: bool = False,
        positions_BK: Tensor | None = None,
        second_BS: Tensor | None = None,
    ) -> Tensor:
        """(B, S) token ids to (B, S, D) states. `padded`: hide [PAD] from the other tokens.

        With positions, it returns only the states there, (B, K, D): the last block computes no others.

        second_BS  True for the tokens of a second text, which matters to models that were pretrained on pairs
        """
        S = tokens_BS.shape[1]
        missing = -S % 2**self.architecture.funnel
        if missing:  # a task's inputs have any length
            tokens_BS = F.pad(tokens_BS, (0, missing), value=self.specials.pad)
            padded = True
        seen_BS = tokens_BS != self.specials.pad if padded else None
        of_weights = self.embedding.word.weight.dtype
        of_states = self.trained_in if self.training and self.trained_in else of_weights
        x_BSD = self.dropout(self.embedding(tokens_BS, second_BS=second_BS)).to(of_states)
        x_BSD = self.through_blocks(x_BSD, seen_BS, positions_BK)
        return self.norm(x_BSD.to(of_weights))[:, :S]

    def through_blocks(self, x_BSD: Tensor, seen_BS: Tensor | None, positions_BK: Tensor | None) -> Tensor:
        """(B, S, D) to (B, S, D), or to (B, K, D): the states at these positions alone."""
        longer: list[tuple[Tensor, Tensor | None]] = []  # states before they were halved
        for index, times in enumerate(halvings(self.architecture)):
            if times > len(longer):
                longer.append((x_BSD, seen_BS))
                x_BSD, seen_BS = halve(x_BSD, seen_BS)
            elif times < len(longer):
                before_BSD, seen_BS = longer.pop()
                x_BSD = before_BSD + x_BSD.repeat_interleave(2, dim=1)
            block = self.blocks[index % len(self.blocks)]
            is_last = index + 1 == self.architecture.layers
            x_BSD = block(x_BSD, seen_BS, positions_BK if is_last else None)
        return x_BSD

    @property
    def decoder(self) -> Tensor:
        """The vocabulary head's matrix (V, E)."""
        if self.head.decoder is None:
            return self.embedding.word.weight
        return self.head.decoder.weight

    def logits(self, states: Tensor) -> Tensor:
        """(..., D) states to (..., V) scores of the vocabulary's entries."""
        return F.linear(self.head(states), self.decoder, self.head.bias)

    def forward(self, tokens_BS: Tensor, positions_BK: Tensor, labels_BK: Tensor) -> Tensor:
        """The mean cross-entropy, nats, at the masked positions. Last block and head are computed only there."""
        states_BKD = self.encode(tokens_BS, positions_BK=positions_BK)
        return self.masked_loss(states_BKD, labels_BK)

    def masked_loss(self, states_BKD: Tensor, labels_BK: Tensor) -> Tensor:
        """The mean cross-entropy, nats, of the states at masked positions."""
        scores_MV = self.logits(states_BKD.flatten(0, 1))
        return F.cross_entropy(scores_MV.float(), labels_BK.flatten())

    def losses(self, tokens_BS: Tensor, places_M: Tensor, labels_M: Tensor, padded: bool = False) -> Tensor:
        """The cross-entropy (M,), nats, at these places, which are counted through the whole batch."""
        states_BSD = self.encode(tokens_BS, padded)
        scores_MV = self.logits(states_BSD.flatten(0, 1)[places_M])
        return F.cross_entropy(scores_MV.float(), labels_M, reduction="none")


def untrained(like: Bert, seed: int = 0) -> Bert:
    """A model with the shape and the vocabulary of another one, and random weights; its second text is marked too."""
    bert = Bert(like.architecture, like.vocabulary, like.length, seed, like.specials)
    second = like.embedding.second
    if second is not None:
        generator = torch.Generator().manual_seed(seed + 1)  # by the seed itself, it would be that of the first token
        bert.embedding.second = torch.empty_like(second).normal_(std=INIT_STD, generator=generator)
    return bert


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Draw matrices from a normal distribution of deviation 0.02; the row of [PAD] and biases are zero, norms one."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


def operations(
    architecture: Architecture, vocabulary: int, length: int, masks: int, last_states: int | None = None
) -> float:
    """Floating-point operations per token, forward and backward, of matrix products and attention.

    `masks` tokens of each sequence of `length` tokens go through the head. The last block computes `last_states` states
    of a sequence (None: as many as `masks`), from keys and values of all tokens. Reading the embedding is free.
    """
    hidden = architecture.hidden
    width = architecture.embedding or hidden
    projection = hidden * width if width != hidden else 0
    total = 2.0 * projection
    for index, times in enumerate(halvings(architecture)):
        share = 0.5**times  # of the tokens that the block reads
        is_last = index + 1 == architecture.layers
        computed = share
        if is_last:
            computed = (last_states or masks) / length
        keys_and_values = 4 * share * hidden**2
        dense = 2 * (2 * hidden**2 + ffn_weights(architecture, index))
        attention = 4 * share * length * hidden
        total += keys_and_values + computed * (dense + attention)
    transform = hidden * width if architecture.head_transform else projection
    head = 2 * (transform + width * vocabulary)
    return 3 * (total + masks / length * head)


def ffn_weights(architecture: Architecture, index: int) -> int:
    """The weights in the matrices of the feed-forward layer of block number `index`; 0 if it has none."""
    different = architecture.different_layers or architecture.layers
    if (index % different + 1) % architecture.ffn_every:
        return 0
    matrices = 3 if architecture.activation == "geglu" else 2
    return inner(architecture) * matrices * architecture.hidden


class Detecting(nn.Module):
    """An encoder in pretraining with a second loss: a detector of corrupted tokens, which is dropped afterwards.

    A masked language model learns only from the tokens that it predicts, most of which are [MASK], and finetuning has
    no [MASK]. Here the model also says of each visible token whether it is the original one, which is the loss of
    ELECTRA (Clark et al. 2020). The corruptions need no second model: random tokens, and swapped tokens, similar to
    Yamaguchi et al. 2021. `masking` makes them.
    """

    def __init__(self, bert: Bert) -> None:
        super().__init__()
        self.bert = bert
        self.detector = nn.Linear(bert.architecture.hidden, 1)
        nn.init.zeros_(self.detector.weight)
        nn.init.zeros_(self.detector.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        """The encoder's blocks."""
        return self.bert.blocks

    def forward(self, tokens_BS: Tensor, positions_BK: Tensor, labels_BK: Tensor, corrupted_BS: Tensor) -> Tensor:
        """(2,): the mean cross-entropy, nats, at masked positions, and that of the detector; ignored tokens count as 0.

        corrupted_BS  the labels of `corrupt`
        """
        states_BSD = self.bert.encode(tokens_BS)
        masked = self.bert.masked_loss(at(states_BSD, positions_BK), labels_BK)
        scores_BS = self.detector(states_BSD)[..., 0].float()
        visible_BS = (corrupted_BS != IGNORED).float()
        # a mean over all tokens, since micro-batches with as many tokens have to weigh as much
        detected = F.binary_cross_entropy_with_logits(scores_BS, corrupted_BS, weight=visible_BS)
        return torch.stack([masked, detected])


def with_detector(bert: Bert, training: Training) -> Bert | Detecting:
    """The module that pretraining trains: the encoder, with a detector if `training` has one."""
    return Detecting(bert) if training.detection else bert


def operations_per_token(
    architecture: Architecture, training: Training, vocabulary: int, length: int, masks: int
) -> float:
    """Floating-point operations of pretraining per token. Detection needs the last block's states at all positions."""
    last_states = length if training.detection else None
    return operations(architecture, vocabulary, length, masks, last_states)
