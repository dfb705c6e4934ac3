"""Does the device compute what the CPU computes in fp32: every layout, eager and compiled, in each precision?

gradients  of one micro-batch of pretraining, beside the CPU's: the largest relative error of a parameter's gradient
padded     the same of sequences of several lengths, as finetuning and the held-out loss read them
resumed    training that is stopped halfway and goes on has the losses of training at once, and lowers them

All at a small size, without dropout, whose random numbers differ between devices. Losses would not do: with so few
steps, a model that lacks its positions, its convolutions or its attention has nearly the same. Nor would the weights
that training begins with: attention is uniform at first, and `zero_outputs` leaves most gradients zero.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import common
import numpy as np
import torch
from loops import MASK_ID, SPECIALS
from torch import Tensor, nn

from model import InputError
from model.attention import fastest_kernel
from model.bert import PAD, Bert
from model.checkpoint import METRICS
from model.heldout import Heldout
from model.machine import Machine
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import Architecture, Training

STEPS, VOCABULARY, LENGTH, BATCH, MICRO_BATCH = 20, 1024, 64, 32, 16
SIZES = {"layers": 3, "hidden": 128, "heads": 2, "intermediate": 384}
REFERENCE = Machine(torch.device("cpu"), torch.float32, False, MICRO_BATCH)
LAYOUTS = {  # a recipe, and changes to its architecture
    "crammed-bert": ("crammed-bert", {}),
    "modern": ("modern", {}),
    "frontier": ("frontier", {}),
    "bert-base": ("bert-base", {}),
    "funnel": ("crammed-bert", {"funnel": 1}),
    "shared and factorised": ("crammed-bert", {"different_layers": 1, "embedding": 64, "head_transform": True}),
    "RMSNorm, ReLU², untied": (
        "crammed-bert",
        {"norm": "rmsnorm", "norm_bias": False, "activation": "relu2", "positions": "rotary", "tied": False},
    ),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKS = ("gradients", "padded", "resumed")
# Largest relative error of a gradient. On a CPU, rounding makes 0.000004, 0.06 and 0.011. No rotation, no convolution,
# scores of attention halved or all equal, padding that is seen, and inputs or labels of another sequence make 0.6 or
# more; padding that is convolved, 0.3.
FAR = {"fp32": 1e-3, "bf16": 0.18, "fp16": 0.05}
# A gradient that is zero but for rounding, as that of the keys' biases, has this share of the usual norm at least.
LEAST = 0.01
# Largest difference of a resumed step's loss, nats. Rounding makes 0.0001; an optimizer that starts again makes 0.02.
APART = 0.003
SCALE = 1024.0  # of fp16 gradients; the first of training, 65,536, is too large for these weights


class Stopped(BaseException):
    """Ends a run after half of its steps."""


def settings(layout: str) -> tuple[Architecture, Training]:
    """The layout at its small size, and its recipe's training for some steps."""
    recipe, architecture = LAYOUTS[layout]
    changes = {"batch_size": BATCH, "batch_ramp": 0, "dropout": 0, "learning_rate": 1e-3}
    budget = {"budget": STEPS * BATCH * LENGTH, "budget_unit": "tokens", "last_mask_fraction": None}
    return common.settings(recipe, changes | budget | {"architecture": SIZES | architecture})


def corpus() -> Corpus:
    """Sequences that count up from a random number: a model learns something in a few steps."""
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (2 * BATCH, 1))
    rows = (SPECIALS + (starts + np.arange(LENGTH)) % (VOCABULARY - SPECIALS)).astype(np.uint16)
    return Corpus(rows, Heldout.of_rows(rows[:1]), VOCABULARY, MASK_ID, SPECIALS)


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Without TF32, which rounds the factors of fp32 products to 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def pretraining(layout: str, here: Machine, folder: Path) -> Pretraining:
    """A run, which may continue one in the folder."""
    architecture, training = settings(layout)
    run = Pretraining(Bert(architecture, VOCABULARY, LENGTH, seed=1), training, corpus(), here, folder)
    run.evaluation_due = lambda fraction: False
    return run


def randomize(module: nn.Module) -> None:
    """Give all weights random values, with which attention is far from uniform and no gradient vanishes."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            random = torch.randn(weight.shape, generator=generator).to(weight.device)
            if weight.ndim > 1:
                weight.copy_(random * (2 / weight.shape[-1]) ** 0.5)
            else:
                weight.add_(0.1 * random)


def padded_loss(run: Pretraining) -> Tensor:
    """The mean cross-entropy, nats, of all tokens of sequences that end at several places."""
    tokens_BS = torch.from_numpy(run.corpus.sequences[:MICRO_BATCH].astype(np.int64))
    ends_B1 = torch.linspace(LENGTH / 4, LENGTH, MICRO_BATCH).long()[:, None]
    tokens_BS = tokens_BS.where(torch.arange(LENGTH) < ends_B1, PAD).to(run.machine.device)
    places_M = (tokens_BS != PAD).flatten().nonzero()[:, 0]
    with run.machine.autocast():
        return run.bert.losses(tokens_BS, places_M, tokens_BS.flatten()[places_M], padded=True).mean()


def gradients(layout: str, here: Machine, padded: bool = False) -> dict[str, Tensor]:
    """The gradient of every parameter after a micro-batch, fp64 on the CPU. Random weights, the same on every device.

    `padded`: of sequences of several lengths, eager; else of pretraining's loss, compiled if the machine compiles.
    """
    with tempfile.TemporaryDirectory() as folder, exact_products():
        run = pretraining(layout, here, Path(folder))
        randomize(run.module)
        run.scaler = torch.amp.GradScaler(here.device.type, SCALE, enabled=here.dtype is torch.float16)
        if padded:
            run.scaler.scale(padded_loss(run)).backward()
        else:
            if here.compiles:
                run.model.use_compiler()
            with fastest_kernel(run.bert.architecture, LENGTH, MICRO_BATCH, here):
                run.backward(MICRO_BATCH, run.masks(0.0))
        run.batches.close()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in run.module.named_parameters()}
    return {name: gradient.cpu().double() / run.scaler.get_scale() for name, gradient in found.items()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient has the largest relative error, and this error; not a number is the largest."""
    norms = torch.stack([gradient.norm() for gradient in expected.values()])
    away = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    errors = away / norms.clamp(min=LEAST * norms.square().mean().sqrt())
    return list(expected)[errors.argmax()], errors.max().item()


def losses(layout: str, here: Machine, resume: bool) -> list[float]:
    """The loss of every step of training. `resume`: stop halfway and train on."""

    def train(folder: Path, steps: int) -> None:
        run, calls = pretraining(layout, here, folder), iter(range(1, steps + 1))

        def report(fraction: float, note: str) -> None:
            if next(calls) == steps:
                raise Stopped

        with contextlib.suppress(Stopped):
            run.run(report)

    with tempfile.TemporaryDirectory() as folder, exact_products():
        if resume:
            train(Path(folder), STEPS // 2)
        train(Path(folder), STEPS + 1)
        rows = [json.loads(line) for line in (Path(folder) / METRICS).read_text().splitlines()]
    return [row["loss"] for row in rows]


def resumed(layout: str, here: Machine) -> dict:
    """How training that is stopped and goes on differs from training at once."""
    whole, parts = (losses(layout, here, resume) for resume in (False, True))
    away = max((abs(a - b) for a, b in zip(whole, parts, strict=False)), default=0.0)
    right = len(whole) == len(parts) == STEPS and away <= APART and whole[-1] < whole[0]
    return {"first_loss": whole[0], "last_loss": whole[-1], "difference": away, "right": right}


def check(here: Machine, ways: list[dict]) -> Iterator[dict]:
    """The rows of some ways to compute one layout, with the error or the losses, and whether they are right.

    A way has the fields layout, dtype, compiled and check, which is one of CHECKS.
    """
    expected: dict[bool, dict[str, Tensor]] = {}
    for way in ways:
        layout, dtype, padded = way["layout"], way["dtype"], way["check"] == "padded"
        machine = replace(here, dtype=DTYPES[dtype], micro_batch=MICRO_BATCH, probes=False)
        machine = replace(machine, compiles=way["compiled"], compiles_always=way["compiled"])
        try:
            if way["check"] == "resumed":
                row = resumed(layout, machine)
            else:
                if padded not in expected:
                    expected[padded] = gradients(layout, REFERENCE, padded)
                name, error = worst(gradients(layout, machine, padded), expected[padded])
                row = {"parameter": name, "error": error, "right": error <= FAR[dtype]}
        except (InputError, RuntimeError) as error:
            yield way | {"right": False, "problem": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        yield way | row | {"problem": None}
