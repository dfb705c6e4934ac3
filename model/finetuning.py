"""Finetuning on one task."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import InputError, optimizer, schedules
from model.bert import PAD, Bert, Classifier
from model.machine import Machine, keep_heap
from model.quantities import counted
from model.settings import Finetuning

BETAS, EPS = (0.9, 0.98), 1e-6  # AdamW's, as GLUE_sane
POOL = 64  # batches whose examples are sorted by length together
HELD_BACK = 10  # for early choice, one of so many training examples
PREDICTED = 64  # examples at a time
REPORTED = 20  # steps between two reports
MOMENTS = 4  # times the weights: they, their gradients, and AdamW's two moments, in fp32
# kept of each value of the states for the backward pass, by the bytes of one: 70 to 81 and 137 measured on a CPU, 16 x 768
BYTES_A_VALUE = {2: 90, 4: 150}


@dataclass(frozen=True)
class Examples:
    """Token ids of all inputs, with [CLS] and [SEP], one after the other; where each ends; and the labels.

    Labels are class numbers, or floats for regression.
    """

    tokens: np.ndarray
    ends: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, inputs: list[list[int]], labels: np.ndarray) -> "Examples":
        """From a list of each input's ids."""
        ends = np.cumsum([len(ids) for ids in inputs], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *inputs]).astype(np.int32), ends, labels)

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each input."""
        return np.diff(self.ends, prepend=0)

    def input(self, row: int) -> np.ndarray:
        """The ids of one."""
        return self.tokens[self.ends[row] - self.lengths[row] : self.ends[row]]

    def take(self, rows: np.ndarray) -> "Examples":
        """These alone, in this order."""
        parts = [self.input(row) for row in rows]
        return Examples(np.concatenate([self.tokens[:0], *parts]), np.cumsum(self.lengths[rows]), self.labels[rows])

    def batch(self, rows: np.ndarray, device: torch.device) -> tuple[Tensor, bool]:
        """The inputs of `rows` as (B, S), as long as the longest of them; and whether others are padded."""
        lengths = self.lengths[rows]
        padded = np.full((len(rows), lengths.max()), PAD, dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[: self.lengths[row]] = self.input(row)
        return to_device(padded, device), bool(lengths.min() < lengths.max())


def memory(weights: int, tokens: int, values: int, machine: Machine) -> int:
    """Bytes that a model of so many bytes of weights takes in training, with batches of so many tokens at most.

    `values`: of its states, layers times hidden.
    """
    return MOMENTS * weights + tokens * values * BYTES_A_VALUE[machine.dtype.itemsize]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Without waiting for what the device still has to do."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def keep_used(bert: Bert, splits: dict[str, Examples]) -> dict[str, Examples]:
    """Keep the embeddings of the tokens in these splits alone, and give the splits in their numbers."""
    used = np.zeros(bert.vocabulary, dtype=bool)
    used[PAD] = True
    for examples in splits.values():
        used[examples.tokens] = True
    bert.keep_tokens(torch.from_numpy(np.flatnonzero(used)))
    places = (np.cumsum(used) - 1).astype(np.int32)
    return {name: Examples(places[e.tokens], e.ends, e.labels) for name, e in splits.items()}


def batches(lengths: np.ndarray, settings: Finetuning, shuffle: np.random.Generator) -> np.ndarray:
    """The rows of each batch (batches, batch_size) of an epoch, each row in one batch at most."""
    size = settings.batch_size
    order = shuffle.permutation(len(lengths))[: len(lengths) // size * size]
    if settings.batches == "random":
        return order.reshape(-1, size)
    pools = [order[start : start + POOL * size] for start in range(0, len(order), POOL * size)]
    order = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    return shuffle.permutation(order.reshape(-1, size))


def steps_of(count: int, settings: Finetuning) -> int:
    """Steps of a run on so many training examples. Raises InputError if they are too few for one."""
    held = count // HELD_BACK if settings.choose == "best" else 0
    trained = count - held
    if trained < settings.batch_size:
        raise InputError(
            f"The task has {counted(trained, 'training example')}, fewer than one batch of {settings.batch_size}. "
            "Give more, or lower "
            "finetune.batch_size."
        )
    if settings.choose == "best" and not held:
        raise InputError(
            f"The task has {counted(count, 'training example')}, of which no tenth can be held back to choose an "
            "epoch by. Give more, or set "
            "finetune.choose to 'last'."
        )
    return settings.epochs * (trained // settings.batch_size)


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    steps: int
    seconds: float  # of training, without those of scoring for an early choice
    examples_per_second: float
    chosen_epoch: int  # counted from 1
    epochs: list[dict]  # of each: epoch, mean loss, and with an early choice the score


def loss_of(classifier: nn.Module, examples: Examples, rows: np.ndarray, machine: Machine) -> Tensor:
    """The mean loss of a batch: cross-entropy in nats, or with one class of output, which means regression, squared error."""
    with machine.autocast():
        scores = classifier(*examples.batch(rows, machine.device))
    scores, labels = scores.float(), examples.labels[rows]
    if scores.shape[1] == 1:
        return F.mse_loss(scores[:, 0], to_device(labels.astype(np.float32), machine.device))
    return F.cross_entropy(scores, to_device(labels.astype(np.int64), machine.device))


def finetune(
    classifier: Classifier,
    train: Examples,
    settings: Finetuning,
    machine: Machine,
    seed: int,
    report: Callable[[int, str], None],
    score: Callable[[np.ndarray, np.ndarray], float] | None = None,
) -> Outcome:
    """Train encoder and head on one task, in place.

    `report` gets the examples done and a note; `score`, which an early choice needs, labels and predictions: class numbers, or
    floats for regression. Raises InputError for too few examples, and for a loss that is no number.
    """
    steps, shuffle, held = steps_of(len(train), settings), np.random.default_rng(seed), None
    if settings.choose == "best":
        held_rows, rows = np.split(shuffle.permutation(len(train)), [len(train) // HELD_BACK])
        held, train = train.take(held_rows), train.take(rows)
    if machine.device.type == "cpu":
        keep_heap()
    classifier.to(machine.device)
    forward: nn.Module = classifier
    if machine.compiles_always:  # else not: at pocket size on CPUs no step is faster, and compiling takes 100 s
        torch.compiler.reset()  # an earlier run's graphs don't fit this one, but count as attempts to compile it
        forward = torch.compile(classifier, dynamic=True)
    adamw = optimizer.adamw(classifier, settings.learning_rate, BETAS, EPS, settings.weight_decay)
    scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
    torch.manual_seed(seed)  # dropout
    step, seconds, epochs, chosen, weights = 0, 0.0, [], settings.epochs, {}
    for epoch in range(1, settings.epochs + 1):
        began, total = time.perf_counter(), torch.zeros((), device=machine.device)
        classifier.train()
        for rows in batches(train.lengths, settings, shuffle):
            step += 1
            optimizer.set_rates([adamw], schedules.SHAPES[settings.schedule](settings, step / steps))
            loss = loss_of(forward, train, rows, machine)
            scaler.scale(loss).backward()
            scaler.step(adamw)
            scaler.update()
            adamw.zero_grad()
            total += loss.detach()
            if step % REPORTED == 0 or step == steps:
                value = loss.item()
                if not math.isfinite(value):
                    raise InputError(f"The loss is {value} at step {step} of {steps}. Lower finetune.learning_rate.")
                report(step * settings.batch_size, f"loss {value:.3f}")
        epochs.append({"epoch": epoch, "loss": total.item() * settings.epochs / steps})
        seconds += time.perf_counter() - began
        if held is not None:
            found = score(held.labels, predictions(predict(classifier, held, machine)))
            if not weights or found > max(each["score"] for each in epochs[:-1]):
                chosen, weights = epoch, {name: value.clone() for name, value in classifier.state_dict().items()}
            epochs[-1]["score"] = found
    if weights:
        classifier.load_state_dict(weights)
    return Outcome(steps, seconds, steps * settings.batch_size / seconds, chosen, epochs)


def predictions(scores: np.ndarray) -> np.ndarray:
    """From scores (n, classes) to class numbers; of one class, the number itself."""
    return scores[:, 0] if scores.shape[1] == 1 else scores.argmax(axis=1)


def predict(classifier: Classifier, examples: Examples, machine: Machine) -> np.ndarray:
    """The scores (n, classes) of all examples, fp32, in their order; computed by length, so that little is padded."""
    order = np.argsort(examples.lengths, kind="stable")
    classifier.to(machine.device).eval()
    found = [torch.empty(0, classifier.classes, device=machine.device)]
    with torch.inference_mode(), machine.autocast():
        for start in range(0, len(order), PREDICTED):
            found.append(classifier(*examples.batch(order[start : start + PREDICTED], machine.device)).float())
    scores = np.empty((len(order), classifier.classes), dtype=np.float32)
    scores[order] = torch.cat(found).cpu().numpy()
    return scores
