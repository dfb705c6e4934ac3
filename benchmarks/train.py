"""How fast is pretraining, beside this machine's matrix products and, with --peers, models of transformers?

    python benchmarks/train.py --recipe pocket pocket-modern [--compile both] [--peers] [--json FILE]
    python benchmarks/train.py --layers 4 --hidden 256 --heads 4 --intermediate 768 --batch 64

Needs torch, numpy, safetensors and pydantic; --peers needs transformers too. CRAM_DEVICE, CRAM_DTYPE, CRAM_MICRO_BATCH
and OMP_NUM_THREADS work as they do for cram. Sequences are random, since speed does not depend on them. The cases take
turns, each time with a new model; figures are medians over the rounds. On CPUs glibc keeps freed blocks
(model.machine.keep_heap), for the peers too. On a GPU whose memory decides on our micro-batch, the peers' need
CRAM_MICRO_BATCH.

The peers are BERT and ModernBERT of the recipe's layers, widths, vocabulary, batch, masks, dropout and dtype, in a loop
with autocast, clipping and fused AdamW. ModernBERT has global attention only, and computes its head at masked tokens
only; BERT computes it at all tokens. Their batch is masked beforehand and no loss is read, so reading and masking count
in our time but not in theirs.

    relative   tokens per second over those of the first row in the same round
    CPU s      of all threads, for 1,000 tokens
    MFU        matrix products and attention, over the rate of large matrix products in this run
"""

import argparse
import gc
import json
import logging
import math
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import common
import numpy as np
import torch
from common import LENGTH, aligned, positive
from torch import nn

from flows.recipes.deltas import DELTAS
from model import machine, masking
from model.bert import Bert, operations, operations_per_token
from model.checkpoint import METRICS
from model.errors import InputError
from model.export import token_ids
from model.heldout import Heldout
from model.layers import inner
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import SPECIALS, Architecture, Training

WARM_UP = 2  # steps
PEERS = ("BERT", "ModernBERT")
LEFT_OUT = -100  # the label of tokens that are not predicted
CLIP = 1.0  # the peers' largest gradient norm
RATE = "tokens_per_second"
CPU = "cpu_seconds_per_1000_tokens"
CODE_VARIANTS = 64  # that torch.compile keeps of one function: each model is one


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
        shape = (self.training.batch_size + 1, self.length)
        kind = np.uint16 if self.vocabulary <= 2**16 else np.uint32
        rows = np.random.default_rng(0).integers(len(SPECIALS), self.vocabulary, shape, dtype=kind)
        return Corpus(rows[1:], Heldout.of_rows(rows[:1]), self.vocabulary)


def case_of(recipe: str, compiled: bool, given: argparse.Namespace) -> Case:
    """A recipe at constant batch and masks, so that all steps are alike, with the sizes of the command line."""
    changes: dict = {"batch_ramp": 0.0, "last_mask_fraction": None, "architecture": common.sizes_given(given)}
    changes |= {"batch_size": given.batch} if given.batch else {}
    architecture, training = common.settings(recipe, changes)
    length = DELTAS[recipe].get("tokenize", {}).get("length", LENGTH)
    tokens = float((WARM_UP + given.steps) * training.batch_size * length)
    training = training.model_copy(update={"budget": tokens, "budget_unit": "tokens"})
    return Case(recipe, None, compiled, architecture, training, common.entries(recipe, given), length)


def ours(case: Case, here: machine.Machine) -> dict:
    """Train in our loop: the size of the model and of micro-batches, and the seconds of the steps after the warm-up."""
    bert = Bert(case.architecture, case.vocabulary, case.length)
    cpu = []
    with tempfile.TemporaryDirectory() as folder:
        run = Pretraining(bert, case.training, case.corpus(), here, Path(folder))
        # off the clock, but not off the CPU time
        run.evaluate = lambda fraction: run.spent.evaluations.append({"fraction": fraction, "step": run.spent.step})
        run.run(lambda fraction, note: cpu.append(time.process_time()), seconds_between_checkpoints=math.inf)
        ends = [
            json.loads(line)["seconds"] for line in (Path(folder) / METRICS).read_text(encoding="utf-8").splitlines()
        ]
    return {
        "seconds": ends[-1] - ends[WARM_UP - 1],
        "cpu_seconds": cpu[-1] - cpu[WARM_UP - 1],
        "parameters": sum(p.numel() for p in bert.parameters()),
        "compiled": run.model.compiled,
        "micro_batch": run.micro_batch,
    }


def peer_model(case: Case) -> nn.Module:
    """The model of transformers."""
    import transformers

    a = case.architecture
    dropout = case.training.dropout
    sizes = {"vocab_size": case.vocabulary, "num_hidden_layers": a.layers, "hidden_size": a.hidden}
    sizes |= {"num_attention_heads": a.heads, "intermediate_size": inner(a), "max_position_embeddings": case.length}
    sizes |= token_ids(SPECIALS)
    if case.peer == "BERT":
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **rates))
    rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "mlp_dropout"), dropout)
    layout = {"layer_types": ["full_attention"] * a.layers, "sparse_prediction": True}
    return transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes, **rates, **layout))


def theirs(case: Case, here: machine.Machine) -> dict:
    """Train in the peers' loop; returns the same as `ours`."""
    corpus = case.corpus()
    training = case.training
    size = here.micro_batch
    steps = int(training.budget) // (training.batch_size * case.length)
    tokens_BS, positions_BK, labels_BK = masking.mask(corpus.sequences, 0, case.masks, corpus, seed=0)
    labels_BS = np.full_like(tokens_BS, LEFT_OUT)
    np.put_along_axis(labels_BS, positions_BK, labels_BK, axis=1)
    parts = [torch.from_numpy(part).to(here.device).split(size) for part in (tokens_BS, labels_BS)]
    batch = [{"input_ids": tokens, "labels": labels} for tokens, labels in zip(*parts, strict=True)]
    model = peer_model(case).to(here.device).train()
    forward = torch.compile(model, dynamic=False) if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(here.device.type, enabled=here.dtype is torch.float16)
    wait = torch.cuda.synchronize if here.device.type == "cuda" else lambda: None
    for number in range(steps):
        if number == WARM_UP:
            wait()
            begin = time.perf_counter()
            cpu = time.process_time()
        for micro_batch in batch:
            with here.autocast():
                loss = forward(**micro_batch).loss / len(batch)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    wait()
    return {
        "seconds": time.perf_counter() - begin,
        "cpu_seconds": time.process_time() - cpu,
        "parameters": sum(p.numel() for p in model.parameters()),
        "compiled": case.compiled,
        "micro_batch": size,
    }


def measure(case: Case, here: machine.Machine) -> dict:
    """Train for some steps: the rate after the warm-up, and that of large matrix products at that time."""
    gc.collect()
    torch.cuda.empty_cache()  # of the case before
    cuda = here.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    limit = machine.matrix_rate.__wrapped__(here.device, here.dtype)  # each time, since machines are noisy
    here = replace(here, compiles=case.compiled, compiles_always=case.compiled)
    turn = (theirs if case.peer else ours)(case, here)
    tokens = case.training.budget - WARM_UP * case.training.batch_size * case.length
    return turn | {
        RATE: tokens / turn["seconds"],
        CPU: 1000 * turn["cpu_seconds"] / tokens,
        "matrix_gflop_per_second": limit / 1e9,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
    }


def row(case: Case, turns: list[dict], first: list[dict], limit: float) -> dict:
    """A row of the table. `limit`: GFLOP/s of matrix products."""
    medians = common.medians(turns, first, RATE, (CPU,))
    gflop = medians[RATE] * case.operations() / 1e9
    compiled = turns[0]["compiled"]
    return {
        "name": case.name + (" (failed: eager)" if case.compiled > compiled else ""),
        **{name: turns[0][name] for name in ("parameters", "micro_batch", "compiled", "memory_gb")},
        "batch": case.training.batch_size,
        "length": case.length,
        "masks": case.masks,
        "vocabulary": case.vocabulary,
        **medians,
        "gflop_per_second": gflop,
        "mfu": gflop / limit,
    }


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [["", "parameters", "tokens/s", "relative", "CPU s", "GFLOP/s", "MFU"]]
    for row in rows:
        cells = [f"{row['parameters']:,}", f"{row[RATE]:,.0f}", f"{row['relative']:.2f}", f"{row[CPU]:.3f}"]
        lines.append([row["name"], *cells, f"{row['gflop_per_second']:,.1f}", f"{row['mfu']:.1%}"])
    return aligned(lines)


def main() -> None:
    """Measure, print the table, and write it to the --json file."""
    parser = common.parser(
        __doc__,
        recipe={"nargs": "+", "default": ["pocket"], "help": "whose model, batch and training"},
        **common.SIZE_OPTIONS,
        batch={"type": positive, "help": "instead of the recipe's"},
        compile={"nargs": "?", "const": "yes", "default": "no", "choices": ["no", "yes", "both"]},
        peers={"action": "store_true", "help": "BERT and ModernBERT of transformers too"},
        rounds={"type": positive, "default": 5},
        steps={"type": positive, "default": 10, "help": f"a turn, after {WARM_UP} for warm-up"},
        json=common.JSON_OPTION,
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch._dynamo.config.recompile_limit = CODE_VARIANTS
    given.peers = given.peers and common.installed("transformers")
    with common.input_errors(parser):
        here = machine.detect()
        if given.compile != "no" and not here.compiles:
            raise InputError("Nothing can be compiled here: CRAM_COMPILE is '0', or there is no C++ compiler.")
        if here.device.type == "cpu":
            machine.keep_heap()
        cases = []
        for recipe in given.recipe:
            for compiled in {"no": [False], "yes": [True], "both": [False, True]}[given.compile]:
                case = case_of(recipe, compiled, given)
                cases += [case, *map(case.of_peer, PEERS if given.peers else ())]
        turns = common.take_turns({case.name: case for case in cases}, given.rounds, lambda c: measure(c, here), RATE)
    limit = statistics.median(turn["matrix_gflop_per_second"] for done in turns for turn in done)
    rows = [row(case, done, turns[0], limit) for case, done in zip(cases, turns, strict=True)]
    about = common.about(here)
    rounds = f"{given.rounds} rounds of {given.steps} steps"
    print(f"{', '.join(about.values())}: matrix products {limit:,.1f} GFLOP/s; {rounds}")
    print(table(rows))
    about |= {"rounds": given.rounds, "steps": given.steps, "matrix_gflop_per_second": limit, "rows": rows}
    common.write_json(given.json, about)


if __name__ == "__main__":
    main()
