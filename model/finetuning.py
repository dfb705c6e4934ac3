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
from model.bert import PAD, SEP, Bert, Classifier
from model.machine import Machine, keep_heap
from model.quantities import counted
from model.settings import Finetuning

BETAS, EPS = (0.9, 0.98), 1e-6  # AdamW's, as GLUE_sane
POOL = 64  # batches whose examples are sorted by length together
HELD_BACK = 10  # choose: best holds back one of ten training examples
PREDICTED = 64  # examples at a time
REPORTED = 20  # steps between two reports
# Devices on which compiled steps are CUDA graphs, which need static shapes. A GPU computes a step of so small a batch
# in a fraction of the time that launching its kernels takes; a graph launches all of them at once.
WITH_GRAPHS = ("cuda",)
COMPILED_LENGTHS = 8  # of batches; each is compiled once, and torch compiles no more than 8 shapes of one function
TILE = 8  # tokens; matrix products on GPUs are fastest with multiples of it
MOMENTS = 4  # copies of the weights in fp32: the weights, their gradients, and AdamW's two moments
# kept for the backward pass, for each value of the states, by its bytes; measured on a CPU, 16 x 768: 70 to 81, and 137
BYTES_A_VALUE = {2: 90, 4: 150}


@dataclass(frozen=True)
class Examples:
    """The encoded inputs of a split and their labels."""

    tokens: np.ndarray  # ids of all inputs with [CLS] and [SEP], one input after the other
    ends: np.ndarray  # of each input in `tokens`
    labels: np.ndarray  # class numbers, or floats for regression

    @classmethod
    def of(cls, inputs: list[list[int]], labels: np.ndarray) -> "Examples":
        """Examples from the ids of each input."""
        ends = np.cumsum([len(ids) for ids in inputs], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *inputs]).astype(np.int32), ends, labels)

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each input."""
        return np.diff(self.ends, prepend=0)

    def input(self, row: int) -> np.ndarray:
        """The ids of one input."""
        return self.tokens[self.ends[row] - self.lengths[row] : self.ends[row]]

    def take(self, rows: np.ndarray) -> "Examples":
        """The examples `rows`, in that order."""
        parts = [self.input(row) for row in rows]
        return Examples(np.concatenate([self.tokens[:0], *parts]), np.cumsum(self.lengths[rows]), self.labels[rows])

    def batch(self, rows: np.ndarray, device: torch.device, widths: np.ndarray | None = None) -> tuple[Tensor, bool]:
        """The inputs `rows` as (B, S), padded to the longest of them; and whether any is padded.

        With widths, ascending: padded to the first that holds them, and always said to be padded.
        """
        lengths = self.lengths[rows]
        width = lengths.max() if widths is None else widths[np.searchsorted(widths, lengths.max())]
        padded = np.full((len(rows), width), PAD, dtype=np.int64)
        for line, row in zip(padded, rows, strict=True):
            line[: self.lengths[row]] = self.input(row)
        return to_device(padded, device), widths is not None or bool(lengths.min() < width)


def memory(weights: int, tokens: int, values: int, machine: Machine) -> int:
    """Bytes that training takes.

    `weights`: bytes of the model's weights; `tokens`: most tokens in a batch; `values`: of its states, layers x hidden.
    """
    return MOMENTS * weights + tokens * values * BYTES_A_VALUE[machine.dtype.itemsize]


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for the work that is queued there."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def keep_used(bert: Bert, splits: dict[str, Examples]) -> dict[str, Examples]:
    """Drop the embeddings of tokens that are in none of these splits. Returns the splits with the new token numbers."""
    used = np.zeros(bert.vocabulary, dtype=bool)
    used[: SEP + 1] = True  # the ids of [PAD] and [SEP] stay
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
    """The number of steps on `count` training examples. Raises InputError if there are too few for one step."""
    held = count // HELD_BACK if settings.choose == "best" else 0
    trained = count - held
    if trained < settings.batch_size:
        raise InputError(
            f"The task has {counted(trained, 'training example')}, fewer than one batch of {settings.batch_size}. "
            "Give more, or lower finetune.batch_size."
        )
    if settings.choose == "best" and not held:
        raise InputError(
            f"The task has {counted(count, 'training example')}, too few to hold back a tenth to choose an epoch by. "
            "Give more, or set finetune.choose to 'last'."
        )
    return settings.epochs * (trained // settings.batch_size)


@dataclass(frozen=True)
class Outcome:
    """How training went."""

    steps: int
    seconds: float  # of training, without scoring for choose: best
    examples_per_second: float
    chosen_epoch: int  # counted from 1
    epochs: list[dict]  # each with epoch, mean loss, and for choose: best the score


def compiled_widths(longest: int, most: int) -> np.ndarray:
    """Few lengths of batches for inputs of up to `longest` tokens, so that each is compiled for its static shape.

    `most`: tokens that the model takes
    """
    unit = TILE * -(-longest // (TILE * COMPILED_LENGTHS))
    return np.minimum(np.arange(unit, longest + unit, unit), most)


def loss_of(
    classifier: nn.Module, examples: Examples, rows: np.ndarray, machine: Machine, widths: np.ndarray | None = None
) -> Tensor:
    """The mean loss of a batch: cross-entropy in nats, or for regression (one output) the squared error."""
    with machine.autocast():
        scores = classifier(*examples.batch(rows, machine.device, widths))
    scores, labels = scores.float(), examples.labels[rows]
    if scores.shape[1] == 1:
        return F.mse_loss(scores[:, 0], to_device(labels.astype(np.float32), machine.device))
    return F.cross_entropy(scores, to_device(labels.astype(np.int64), machine.device))


class Steps:
    """The steps of a run: takes them, counts them, and reports the loss of every twentieth and the last."""

    def __init__(
        self,
        classifier: Classifier,
        train: Examples,
        settings: Finetuning,
        machine: Machine,
        count: int,
        report: Callable[[int, str], None],
    ) -> None:
        self.train, self.settings, self.machine, self.report = train, settings, machine, report
        self.count, self.taken = count, 0
        self.model: nn.Module = classifier
        self.widths: np.ndarray | None = None
        if machine.compiles_always:  # else not: at pocket size on CPUs no step is faster, and compiling takes 100 s
            torch.compiler.reset()  # an earlier run's graphs don't fit this one, but count as attempts to compile it
            graphs = machine.device.type in WITH_GRAPHS
            self.model = torch.compile(classifier, dynamic=not graphs, mode="reduce-overhead" if graphs else None)
            self.widths = compiled_widths(train.lengths.max(), classifier.bert.length) if graphs else None
        self.adamw = optimizer.adamw(classifier, settings.learning_rate, BETAS, EPS, settings.weight_decay)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
        self.multiplier = schedules.SHAPES[settings.schedule]

    def take(self, rows: np.ndarray) -> Tensor:
        """Train on the examples `rows`. Returns the loss, detached; raises InputError if it is not finite."""
        self.taken += 1
        optimizer.set_rates([self.adamw], self.multiplier(self.settings, self.taken / self.count))
        loss = loss_of(self.model, self.train, rows, self.machine, self.widths)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.adamw)
        self.scaler.update()
        self.adamw.zero_grad()
        if self.taken % REPORTED == 0 or self.taken == self.count:
            value = loss.item()
            if not math.isfinite(value):
                place = f"step {self.taken} of {self.count}"
                raise InputError(f"The loss is {value} at {place}. Lower finetune.learning_rate.")
            self.report(self.taken * self.settings.batch_size, f"loss {value:.3f}")
        return loss.detach()


def no_cudnn_attention() -> None:
    """Keep torch from choosing cuDNN's attention, its default on some GPUs, in this process from now on.

    It plans anew for every shape, which takes up to half a second (on a B200, modelscope/FunASR#3704), and inputs have
    many lengths. Not for a while only: the setting is that of the process, where other runs may go on in other threads.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


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

    `report` gets the number of examples done and a note. `score` is needed for choose: best; it gets labels and
    predictions (class numbers, or floats for regression). Raises InputError for too few examples and for a loss that is
    not finite.
    """
    count, shuffle, held = steps_of(len(train), settings), np.random.default_rng(seed), None
    no_cudnn_attention()
    if settings.choose == "best":
        held_rows, rows = np.split(shuffle.permutation(len(train)), [len(train) // HELD_BACK])
        held, train = train.take(held_rows), train.take(rows)
    if machine.device.type == "cpu":
        keep_heap()
    classifier.to(machine.device)
    steps = Steps(classifier, train, settings, machine, count, report)
    torch.manual_seed(seed)  # dropout
    seconds, epochs, chosen, best, weights = 0.0, [], settings.epochs, -math.inf, {}
    for epoch in range(1, settings.epochs + 1):
        began, total = time.perf_counter(), torch.zeros((), device=machine.device)
        classifier.train()
        for rows in batches(train.lengths, settings, shuffle):
            total += steps.take(rows)
        epochs.append({"epoch": epoch, "loss": total.item() * settings.epochs / count})
        seconds += time.perf_counter() - began
        if held is not None:
            epochs[-1]["score"] = reached = score(held.labels, predictions(predict(classifier, held, machine)))
            if reached > best:
                best, chosen = reached, epoch
                weights = {name: value.clone() for name, value in classifier.state_dict().items()}
    if weights:
        classifier.load_state_dict(weights)
    return Outcome(count, seconds, count * settings.batch_size / seconds, chosen, epochs)


def predictions(scores: np.ndarray) -> np.ndarray:
    """Class numbers from scores (n, classes); for regression (one output), the scores themselves."""
    return scores[:, 0] if scores.shape[1] == 1 else scores.argmax(axis=1)


def predict(classifier: Classifier, examples: Examples, machine: Machine) -> np.ndarray:
    """The scores (n, classes) of all examples, fp32, in their order. Batches are sorted by length to pad little."""
    order = np.argsort(examples.lengths, kind="stable")
    no_cudnn_attention()
    classifier.to(machine.device).eval()
    outputs = [torch.empty(0, classifier.classes, device=machine.device)]
    with torch.inference_mode(), machine.autocast():
        for start in range(0, len(order), PREDICTED):
            outputs.append(classifier(*examples.batch(order[start : start + PREDICTED], machine.device)).float())
    scores = np.empty((len(order), classifier.classes), dtype=np.float32)
    scores[order] = torch.cat(outputs).cpu().numpy()
    return scores
