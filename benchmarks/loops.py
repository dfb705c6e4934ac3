"""What train.py compares: a recipe's model in our loop; BERT and ModernBERT of transformers in a usual training loop.

The peers have the recipe's layers, widths, vocabulary, batch, micro-batch, masks, dropout and dtype. ModernBERT has
global attention only, as our `modern` layout, and computes its head at masked tokens only; BERT computes it at all
tokens. Their loop has autocast, clipping and fused AdamW. Its batch is masked beforehand and no loss is read, so
reading and masking count in our time but not in theirs.
"""

import gc
import json
import math
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from watch import Watch

from model import machine, masking
from model.bert import Bert, operations
from model.checkpoint import METRICS
from model.conversion import TOKENS
from model.detection import operations_per_token
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import Architecture, Training

MASK_ID, SPECIALS = TOKENS["mask_token_id"], 5  # the vocabulary fixes both
WARM_UP = 2  # steps
PARTS = ("forward", "backward", "optimizer")
TIMED = (  # with the forward pass of the peers
    (Pretraining, "losses", "forward"),
    (torch.Tensor, "backward", "backward"),
    (nn.utils, "clip_grad_norm_", "optimizer"),
    (nn.utils, "get_total_norm", "optimizer"),
    *((torch.amp.GradScaler, name, "optimizer") for name in ("unscale_", "step", "update")),
    (torch.optim.Optimizer, "zero_grad", "optimizer"),
)
PEERS = ("BERT", "ModernBERT")
LEFT_OUT = -100  # the label of tokens that are not predicted
CLIP = 1.0  # the peers' largest gradient norm


@dataclass(frozen=True)
class Case:
    """What is measured. A peer's architecture has the fields that decide its number of operations."""

    recipe: str
    peer: str | None
    compiled: bool
    architecture: Architecture
    training: Training
    vocabulary: int
    length: int
    steps: int  # after the warm-up

    @property
    def name(self) -> str:
        """The name of its row."""
        return (f"{self.peer}, as {self.recipe}" if self.peer else self.recipe) + ", compiled" * self.compiled

    def of_peer(self, peer: str) -> "Case":
        """The peer instead of our model. A GEGLU layer has two matrices of two thirds of the width."""
        sizes = {name: getattr(self.architecture, name) for name in ("layers", "hidden", "heads")}
        wide = self.architecture.intermediate
        own = {"intermediate": wide, "activation": "gelu"} if peer == "BERT" else {"intermediate": 3 * round(wide / 3)}
        return replace(self, peer=peer, architecture=Architecture(**sizes, **own, head_transform=True))

    @property
    def masks(self) -> int:
        """The number of tokens of a sequence to predict."""
        return masking.masks_per_sequence(self.training.mask_fraction, self.length)

    def operations(self) -> float:
        """Floating-point operations per token."""
        sizes = self.vocabulary, self.length
        if not self.peer:
            return operations_per_token(self.architecture, self.training, *sizes, self.masks)
        scored = self.length if self.peer == "BERT" else self.masks
        return operations(self.architecture, *sizes, scored, last_states=self.length)

    def corpus(self) -> Corpus:
        """A batch of random sequences, and a held-out sequence."""
        shape, kind = (self.training.batch_size + 1, self.length), np.uint16 if self.vocabulary <= 2**16 else np.uint32
        rows = np.random.default_rng(0).integers(SPECIALS, self.vocabulary, shape, dtype=kind)
        return Corpus(rows[1:], Heldout.of_rows(rows[:1]), self.vocabulary, MASK_ID, SPECIALS)


def ours(case: Case, here: machine.Machine, watch: Watch) -> tuple[nn.Module, float, bool, int]:
    """Train in our loop: the model, seconds after the warm-up by the loop's clock, whether compiled, micro-batch."""
    bert = Bert(case.architecture, case.vocabulary, case.length)
    with tempfile.TemporaryDirectory() as folder:
        run = Pretraining(bert, case.training, case.corpus(), here, Path(folder))
        run.evaluation_due = lambda fraction: False  # it is off the clock anyway
        step = run.step
        run.step = lambda fraction: (watch.step(), step(fraction))
        run.run(lambda fraction, note: watch.end(), seconds_between_checkpoints=math.inf)
        rows = [json.loads(line) for line in (Path(folder) / METRICS).read_text().splitlines()]
    return bert, rows[-1]["seconds"] - rows[WARM_UP - 1]["seconds"], run.model.compiled, run.micro_batch


def peer_model(case: Case) -> nn.Module:
    """The model of transformers."""
    import transformers

    a, dropout = case.architecture, case.training.dropout
    sizes = {"vocab_size": case.vocabulary, "num_hidden_layers": a.layers, "hidden_size": a.hidden}
    sizes |= {"num_attention_heads": a.heads, "intermediate_size": a.inner, "max_position_embeddings": case.length}
    sizes |= TOKENS
    if case.peer == "BERT":
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **rates))
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), dropout)
    layout = {"layer_types": ["full_attention"] * a.layers, "sparse_prediction": True}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, **rates, **layout))


def theirs(case: Case, here: machine.Machine, watch: Watch) -> tuple[nn.Module, float, bool, int]:
    """Train in the peers' loop; returns the same as `ours`."""
    corpus, size = case.corpus(), here.micro_batch
    tokens_BS, positions_BK, labels_BK = masking.mask(corpus.sequences, 0, case.masks, corpus, seed=0)
    labels_BS = np.full_like(tokens_BS, LEFT_OUT)
    np.put_along_axis(labels_BS, positions_BK, labels_BK, axis=1)
    parts = [torch.from_numpy(part).to(here.device).split(size) for part in (tokens_BS, labels_BS)]
    batch = [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(*parts, strict=True)]
    model = peer_model(case).to(here.device).train()
    forward = watch.timed("forward", torch.compile(model, dynamic=False) if case.compiled else model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype is torch.float16)
    for number in range(WARM_UP + case.steps):
        if number == WARM_UP:
            watch.wait()
            begin = time.perf_counter()
        watch.step()
        for micro_batch in batch:
            with here.autocast():
                loss = forward(**micro_batch).loss / len(batch)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    watch.wait()
    watch.end()
    return model, time.perf_counter() - begin, case.compiled, size


def measure(case: Case, here: machine.Machine) -> dict:
    """Train for some steps: rates, the parts of a step's time, and the rate of large matrix products at that time."""
    gc.collect()
    torch.cuda.empty_cache()  # of the case before
    limit = machine.matrix_rate.__wrapped__(here.device, here.dtype)  # each time, since machines are noisy
    here, watch = replace(here, compiles=case.compiled, compiles_always=case.compiled), Watch(here.device)
    with ExitStack() as stack:
        for owner, name, part in TIMED:
            stack.enter_context(mock.patch.object(owner, name, watch.timed(part, getattr(owner, name))))
        model, seconds, compiled, micro_batch = (theirs if case.peer else ours)(case, here, watch)
    watch.wait()
    tokens = case.steps * case.training.batch_size * case.length
    shares = {part: watch.seconds(part, WARM_UP) / seconds for part in PARTS}
    return {
        "tokens_per_second": tokens / seconds,
        "cpu_seconds_per_1000_tokens": 1000 * watch.cpu_seconds(WARM_UP) / tokens,
        **shares,
        "overhead": 1.0 - sum(shares.values()),
        "matrix_gflop_per_second": limit / 1e9,
        "parameters": sum(p.numel() for p in model.parameters()),
        "compiled": compiled,
        "micro_batch": micro_batch,
    }
