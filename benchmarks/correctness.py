"""Does the device compute what the CPU computes in fp32: every layout, eager and compiled, in each precision?

gradients  of one micro-batch of pretraining, beside the CPU's: the largest relative error of a parameter's gradient
padded     the same of sequences of several lengths, as finetuning and the held-out loss read them
recorded   on a GPU: the losses of finetuning whose steps are recorded, beside those of plain steps on the same device

All at a small size, without dropout, whose random numbers differ between devices. Losses would not do: after few steps,
a model that lacks its positions, its convolutions or its attention has nearly the same. Nor would the weights
that training begins with: attention is uniform at first, and `zero_outputs` leaves most gradients zero.
"""

import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import common
import numpy as np
import torch
from torch import Tensor, nn

from model import finetuning
from model.bert import Bert
from model.finetuning import Classifier, Examples
from model.heldout import Heldout
from model.layers import PAD
from model.machine import Machine, exact_products
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import SPECIALS, Finetuning

VOCABULARY = 1024
LENGTH = 64
BATCH = 32
MICRO_BATCH = 16
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
CHECKS = ("gradients", "padded")
RECORDED = "recorded"  # one more check, of GPUs
STEPS = 12  # of finetuning
INPUTS = (20, 52)  # the longest inputs of its batches, tokens, in turn
# Largest relative error of a step's loss. On a CPU, rounding makes 5e-7 in fp32 and 0.003 in bf16; inputs, labels or a
# rate of another step make 0.18 or more.
FAR_LOSS = 0.02
# Largest relative error of a gradient. On a CPU, rounding makes 0.000004, 0.06 and 0.011. No rotation, no convolution,
# scores of attention halved or all equal, padding that is seen, and inputs or labels of another sequence make 0.6 or
# more; padding that is convolved, 0.3.
FAR = {"fp32": 1e-3, "bf16": 0.18, "fp16": 0.05}
# A gradient that is zero but for rounding, as that of the keys' biases, has this share of the usual norm at least.
LEAST = 0.01
SCALE = 1024.0  # of fp16 gradients; the first of training, 65,536, is too large for these weights


def pretraining(layout: str, here: Machine, folder: Path) -> Pretraining:
    """A run of the layout at its small size, by its recipe, on sequences that count up from a random number."""
    recipe, architecture = LAYOUTS[layout]
    changes = {"batch_size": BATCH, "batch_ramp": 0, "dropout": 0, "last_mask_fraction": None}
    shape, training = common.settings(recipe, changes | {"architecture": SIZES | architecture})
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (2 * BATCH, 1))
    rows = (len(SPECIALS) + (starts + np.arange(LENGTH)) % (VOCABULARY - len(SPECIALS))).astype(np.uint16)
    corpus = Corpus(rows, Heldout.of_rows(rows[:1]), VOCABULARY)
    return Pretraining(Bert(shape, VOCABULARY, LENGTH, seed=1), training, corpus, here, folder)


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
                run.model.use(compiled=True)
            run.backward(MICRO_BATCH, run.masks(0.0))
        run.batches.close()
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in run.module.named_parameters()}
    return {name: gradient.cpu().double() / run.scaler.get_scale() for name, gradient in found.items()}


@functools.cache
def expected(layout: str, padded: bool) -> dict[str, Tensor]:
    """The gradients by the CPU in fp32."""
    return gradients(layout, REFERENCE, padded)


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[str, float]:
    """The parameter whose gradient has the largest relative error, and this error; not a number is the largest."""
    norms = torch.stack([gradient.norm() for gradient in expected.values()])
    away = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()])
    errors = away / norms.clamp(min=LEAST * norms.square().mean().sqrt())
    return list(expected)[errors.argmax()], errors.max().item()


def to_finetune() -> Examples:
    """Random inputs of two classes, those of each step one after the other."""
    random = np.random.default_rng(0)
    inputs = []
    for step in range(STEPS):
        longest = INPUTS[step % len(INPUTS)]
        for length in random.integers(longest - 8, longest + 1, MICRO_BATCH):
            words = random.integers(len(SPECIALS), VOCABULARY, length - 2)
            inputs.append([SPECIALS.cls, *words, SPECIALS.sep])
    return Examples.of(inputs, random.integers(0, 2, len(inputs)))


def losses(layout: str, here: Machine) -> tuple[Tensor, int]:
    """The losses of steps of finetuning, on the CPU, and how many lengths were recorded."""
    recipe, architecture = LAYOUTS[layout]
    shape, _ = common.settings(recipe, {"architecture": SIZES | architecture})
    model = Classifier(Bert(shape, VOCABULARY, LENGTH, seed=1), classes=2, dropout=0, seed=0)
    randomize(model)
    model.to(here.device).train()
    settings = Finetuning(batch_size=MICRO_BATCH, learning_rate=1e-3)
    loop = finetuning.Loop(model, to_finetune(), settings, here, STEPS, lambda *_: None)
    finetuning.no_cudnn_attention()
    with exact_products():
        found = [loop.step(rows) for rows in np.arange(STEPS * MICRO_BATCH).reshape(STEPS, -1)]
    return torch.stack(found).cpu(), len(loop.graphs.recordings) if loop.graphs else 0


def compare_recorded(here: Machine, layout: str) -> dict:
    """Finetune with recorded and with plain steps. Right if all lengths were recorded and the losses are the same."""
    found, lengths = losses(layout, here)
    expected_losses, _ = losses(layout, replace(here, compiles=False))
    error = ((found - expected_losses).abs() / expected_losses).max().item()
    return {"lengths": lengths, "error": error, "right": lengths == len(INPUTS) and error <= FAR_LOSS}


def compare(here: Machine, layout: str, dtype: str, compiled: bool, check: str) -> dict:
    """Compute a layout on the device in one way: the error, and whether it is small. `check`: of CHECKS or RECORDED."""
    here = replace(here, dtype=DTYPES[dtype], micro_batch=MICRO_BATCH, probes=False)
    here = replace(here, compiles=compiled, compiles_always=compiled)
    if check == RECORDED:
        return compare_recorded(here, layout)
    padded = check == "padded"
    name, error = worst(gradients(layout, here, padded), expected(layout, padded))
    return {"parameter": name, "error": error, "right": error <= FAR[dtype]}
