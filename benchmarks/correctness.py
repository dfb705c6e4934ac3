"""Does the device train as the CPU does in fp32: every layout, eager and compiled, in each precision, and resumed?

Each layout is trained for some steps at a small size on the same random sequences, without dropout, whose random
numbers differ between devices. What is compared is the loss of every step.
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

from model import InputError
from model.bert import Bert
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
# Largest difference of a step's loss, nats. On a CPU, bf16 differs from fp32 by 0.01 after 20 steps; an error in a
# kernel or a wrong mask by 0.1 and more.
FAR = {"fp32": 0.01, "bf16": 0.05, "fp16": 0.05}


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


def losses(layout: str, here: Machine, resume: bool = False) -> tuple[list[float], bool]:
    """The loss of every step, and whether compiled code was used. `resume`: stop halfway and train on."""
    architecture, training = settings(layout)

    def run(folder: Path, steps: int) -> Pretraining:
        made = Pretraining(Bert(architecture, VOCABULARY, LENGTH, seed=1), training, corpus(), here, folder)
        made.evaluation_due = lambda fraction: False
        calls = iter(range(1, steps + 1))

        def report(fraction: float, note: str) -> None:
            if next(calls) == steps:
                raise Stopped

        with contextlib.suppress(Stopped):
            made.run(report)
        return made

    with tempfile.TemporaryDirectory() as folder, exact_products():
        if resume:
            run(Path(folder), STEPS // 2)
        done = run(Path(folder), STEPS + 1)
        rows = [json.loads(line) for line in (Path(folder) / METRICS).read_text().splitlines()]
    return [row["loss"] for row in rows], done.model.compiled


def check(here: Machine, ways: list[dict]) -> Iterator[dict]:
    """The rows of some ways to train one layout: the largest difference from the CPU's loss, and whether it is small.

    A way has the fields layout, dtype, compiled and resumed.
    """
    layout = ways[0]["layout"]
    expected, _ = losses(layout, REFERENCE)
    for way in ways:
        machine = replace(here, dtype=DTYPES[way["dtype"]], micro_batch=MICRO_BATCH, probes=False)
        machine = replace(machine, compiles=way["compiled"], compiles_always=way["compiled"])
        try:
            found, compiled = losses(layout, machine, way["resumed"])
        except (InputError, RuntimeError) as error:
            yield way | {"right": False, "problem": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        complete = len(found) == len(expected)
        away = max(abs(a - b) for a, b in zip(found, expected, strict=complete))
        close = away <= FAR[way["dtype"]]
        about = {"first_loss": found[0], "last_loss": found[-1], "difference": away}
        yield way | about | {"right": complete and compiled == way["compiled"] and close, "problem": None}
