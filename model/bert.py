"""The encoder of "Cramming" (Geiping & Goldstein, arXiv 2212.14034, section 4.2): architecture, modules, heads, file.

Shapes: B sequences, S tokens each, D hidden, N heads, H = D / N, V vocabulary entries, K masked tokens a sequence.
Parameters of the defaults at V = 32,768: 119,589,889.
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model import InputError
from model.settings import Architecture

NORM_EPS = 1e-12  # as BERT; the paper found that it matters little (section 4.2)
INIT_STD = 0.02  # of every weight matrix, as BERT
PAD = 0  # the vocabulary fixes [PAD] at 0
CLASSIFIER_WIDTH = 1024  # of the head on [CLS], as in the reference implementation's GLUE settings
CONFIG, WEIGHTS = "config.json", "model.safetensors"


def sinusoids(length: int, hidden: int) -> Tensor:
    """Sine and cosine position codes (S, D) of base 10,000 (Vaswani et al. 2017), the pairs interleaved."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, hidden, 2, dtype=torch.float32) * (-math.log(10_000.0) / hidden))
    codes = torch.zeros(length, hidden)
    codes[:, 0::2] = torch.sin(positions * rates)
    codes[:, 1::2] = torch.cos(positions * rates)
    return codes


class Embedding(nn.Module):
    """Words plus scaled sinusoidal positions (one learned scale), normalised."""

    def __init__(self, architecture: Architecture, vocabulary: int, length: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, architecture.hidden, padding_idx=PAD)
        self.scale = nn.Parameter(torch.tensor(architecture.hidden**-0.5))
        self.register_buffer("codes", sinusoids(length, architecture.hidden), persistent=False)
        self.norm = nn.LayerNorm(architecture.hidden, eps=NORM_EPS)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) token ids to (B, S, D)."""
        return self.norm(self.word(tokens_BS) + self.scale * self.codes[: tokens_BS.shape[1]])


class Attention(nn.Module):
    """Bidirectional self-attention without biases."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.heads = architecture.heads
        self.qkv = nn.Linear(architecture.hidden, 3 * architecture.hidden, bias=False)
        self.out = nn.Linear(architecture.hidden, architecture.hidden, bias=False)
        self.dropout = 0.0

    def forward(self, x_BSD: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` (B, 1, 1, S): True where a token may be looked at; None for all."""
        B, S, D = x_BSD.shape
        q_BNSH, k_BNSH, v_BNSH = self.qkv(x_BSD).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        x_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH, attn_mask=mask, dropout_p=dropout)
        return self.out(x_BNSH.transpose(1, 2).reshape(B, S, D))


class FeedForward(nn.Module):
    """GEGLU: one half of the input layer gates the other."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.dense_in = nn.Linear(architecture.hidden, architecture.intermediate, bias=False)
        self.dense_out = nn.Linear(architecture.intermediate // 2, architecture.hidden, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        x, gate = self.dense_in(x_BSD).chunk(2, dim=-1)
        return self.dense_out(F.gelu(gate) * x)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(architecture.hidden, eps=NORM_EPS)
        self.attention = Attention(architecture)
        self.ffn_norm = nn.LayerNorm(architecture.hidden, eps=NORM_EPS)
        self.ffn = FeedForward(architecture)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x_BSD: Tensor, mask: Tensor | None) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        x_BSD = x_BSD + self.dropout(self.attention(self.attention_norm(x_BSD), mask))
        return x_BSD + self.dropout(self.ffn(self.ffn_norm(x_BSD)))


def initialize(module: nn.Module, generator: torch.Generator) -> None:
    """Matrices from a normal of deviation 0.02 ([PAD]'s row zero), biases zero, norms one."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding):
            with torch.no_grad():
                part.weight[PAD].zero_()


class Bert(nn.Module):
    """The encoder and its masked-language-modelling head, which is the word embedding itself (tied, no bias)."""

    def __init__(self, architecture: Architecture, vocabulary: int, length: int, seed: int = 0) -> None:
        super().__init__()
        self.architecture, self.vocabulary, self.length = architecture, vocabulary, length
        self.embedding = Embedding(architecture, vocabulary, length)
        self.blocks = nn.ModuleList(Block(architecture) for _ in range(architecture.layers))
        self.norm = nn.LayerNorm(architecture.hidden, eps=NORM_EPS)
        self.dropout = nn.Dropout(0.0)
        initialize(self, torch.Generator().manual_seed(seed))

    def set_dropout(self, probability: float) -> None:
        """Dropout after embedding and branches and on attention weights. Pretraining uses none (section 4.3)."""
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = probability
            elif isinstance(part, Attention):
                part.dropout = probability

    def keep_tokens(self, ids: Tensor) -> None:
        """Keep the embeddings of these ids (sorted, [PAD] first) alone; from now on a token is its place among them.

        In finetuning without weight decay the others never change, but cost the optimizer as much as those that do.
        """
        rows = self.embedding.word.weight.detach()[ids]
        self.embedding.word = nn.Embedding.from_pretrained(rows, freeze=False, padding_idx=PAD)
        self.vocabulary = len(ids)

    def encode(self, tokens_BS: Tensor, padded: bool = False) -> Tensor:
        """(B, S) token ids to (B, S, D) states. `padded`: [PAD] occurs, and is not to be looked at."""
        mask = (tokens_BS != PAD)[:, None, None, :] if padded else None
        x_BSD = self.dropout(self.embedding(tokens_BS))
        for block in self.blocks:
            x_BSD = block(x_BSD, mask)
        return self.norm(x_BSD)

    def logits(self, states: Tensor) -> Tensor:
        """(..., D) states to (..., V) scores of the vocabulary."""
        return F.linear(states, self.embedding.word.weight)

    def forward(self, tokens_BS: Tensor, positions_BK: Tensor, labels_BK: Tensor) -> Tensor:
        """The mean cross-entropy, nats, at the masked positions. The head is computed there and nowhere else."""
        states_BSD = self.encode(tokens_BS)
        states_BKD = states_BSD.gather(1, positions_BK[:, :, None].expand(-1, -1, states_BSD.shape[-1]))
        logits = self.logits(states_BKD.flatten(0, 1))
        return F.cross_entropy(logits.float(), labels_BK.flatten())


class Classifier(nn.Module):
    """A head on the state of [CLS], as the reference's GLUE settings have it: dense, tanh, dropout, linear."""

    def __init__(self, bert: Bert, classes: int, dropout: float, seed: int) -> None:
        super().__init__()
        self.bert = bert
        bert.set_dropout(dropout)
        self.dense = nn.Linear(bert.architecture.hidden, CLASSIFIER_WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(CLASSIFIER_WIDTH, classes)
        generator = torch.Generator().manual_seed(seed)
        initialize(self.dense, generator)
        initialize(self.out, generator)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """(B, S) token ids, padded with [PAD], to (B, classes) scores."""
        states_BD = self.bert.encode(tokens_BS, padded=True)[:, 0]
        return self.out(self.dropout(torch.tanh(self.dense(states_BD))))


def save(bert: Bert, folder: Path) -> None:
    """Write config.json and model.safetensors (fp32; the tied head is not stored twice)."""
    config = {
        "model_type": "crammed-bert",
        "architecture": bert.architecture.model_dump(),
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.length,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.detach().float().cpu().contiguous() for name, value in bert.state_dict().items()}
    save_file(weights, folder / WEIGHTS)


def load(folder: Path) -> Bert:
    """Read what `save` wrote."""
    try:
        config = json.loads((folder / CONFIG).read_text())
        architecture = Architecture(**config["architecture"])
        bert = Bert(architecture, config["vocab_size"], config["max_position_embeddings"])
        bert.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"{folder} holds no model that cram can load: {error}. Expected {CONFIG} and {WEIGHTS} as the pretrain "
            "stage writes them."
        ) from error
    return bert
