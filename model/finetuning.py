"""Finetuning on one task."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import InputError, optimizer, schedules
from model.bert import PAD, Classifier
from model.machine import Machine, keep_heap
from model.settings import Finetuning


@dataclass(frozen=True)
class Examples:
    """Token ids of each input, with [CLS] and [SEP], and their labels: class numbers, or floats for regression."""

    tokens: list[list[int]]
    labels: np.ndarray

    def batch(self, rows: np.ndarray, longest: int, device: torch.device) -> Tensor:
        """The inputs of `rows` as (B, S), padded to a multiple of 8, or to the `longest` that the model takes."""
        chosen = [self.tokens[row] for row in rows]
        width = min(longest, -(-max(map(len, chosen)) // 8) * 8)
        padded = np.full((len(chosen), width), PAD, dtype=np.int64)
        for line, ids in zip(padded, chosen, strict=True):
            line[: len(ids)] = ids
        return torch.from_numpy(padded).to(device)


def finetune(
    classifier: Classifier,
    train: Examples,
    settings: Finetuning,
    machine: Machine,
    seed: int,
    report: Callable[[int, str], None],
) -> None:
    """Train encoder and head on one task, in place. One class of output means regression (mean squared error)."""
    steps = settings.epochs * (len(train.tokens) // settings.batch_size)
    if not steps:
        raise InputError(
            f"The task has {len(train.tokens)} training examples, fewer than one batch of {settings.batch_size}. Give "
            "more, or lower finetune.batch_size."
        )
    if machine.device.type == "cpu":
        keep_heap()
    regression = classifier.out.out_features == 1
    labels = torch.from_numpy(train.labels.astype(np.float32 if regression else np.int64)).to(machine.device)
    classifier.to(machine.device).train()
    adamw = optimizer.adamw(classifier, settings.learning_rate, (0.9, 0.98), 1e-6, 0.0)  # as GLUE_sane
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
    torch.manual_seed(seed)  # dropout
    shuffle, step = np.random.default_rng(seed), 0
    for _ in range(settings.epochs):
        order = shuffle.permutation(len(train.tokens))
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            rows = order[start : start + settings.batch_size]
            optimizer.set_rates([adamw], schedules.warm_cosine((step + 1) / steps, settings.warmup))
            with machine.autocast():
                scores = classifier(train.batch(rows, classifier.bert.length, machine.device))
            scores, wanted = scores.float(), labels[rows]
            loss = F.mse_loss(scores[:, 0], wanted) if regression else F.cross_entropy(scores, wanted)
            scaler.scale(loss).backward()
            scaler.step(adamw)
            scaler.update()
            adamw.zero_grad()
            step += 1
            if step % 20 == 0 or step == steps:
                value = loss.item()
                if not math.isfinite(value):
                    raise InputError(f"The loss is {value} at step {step} of {steps}. Lower finetune.learning_rate.")
                report(step, f"loss {value:.3f}")


def predict(classifier: Classifier, examples: Examples, machine: Machine) -> np.ndarray:
    """The scores (n, classes) of all examples, in their order; computed by length, so that little is padded."""
    order = np.argsort([len(ids) for ids in examples.tokens], kind="stable")
    scores = np.zeros((len(order), classifier.out.out_features), dtype=np.float32)
    classifier.to(machine.device).eval()
    with torch.inference_mode(), machine.autocast():
        for start in range(0, len(order), 64):
            rows = order[start : start + 64]
            tokens = examples.batch(rows, classifier.bert.length, machine.device)
            scores[rows] = classifier(tokens).float().cpu().numpy()
    return scores
