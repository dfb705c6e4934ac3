"""Both loops: pretraining within a budget, and finetuning."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import InputError, masking, optimizer
from model.bert import PAD, Bert, Classifier
from model.checkpoint import METRICS, Spent, checkpoint, restore
from model.machine import Machine, keep_heap
from model.settings import Finetuning, Training

log = logging.getLogger(__name__)
HELDOUT_MASKS = 0.15  # fixed, and uncorrupted, so that recipes with other masking rates compare
HELDOUT_BATCH = 64  # sequences; fixed, since the masks are drawn batch by batch
EVALUATIONS = 10  # held-out losses over the budget, and one before it
CHECKPOINT_SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
COMPILE_FROM_SECONDS, COMPILE_FROM_TOKENS = 1800.0, 2e7  # on CPUs, where it costs 20 to 60 s and gains under 10 %


@dataclass(frozen=True)
class Corpus:
    """Packed sequences (n, S) uint16 to train on, others held out, and what is needed to mask them."""

    sequences: np.ndarray
    heldout: np.ndarray
    vocabulary: int
    mask_id: int
    specials: int  # ids below this are special tokens

    @property
    def length(self) -> int:
        """Tokens a sequence, S."""
        return self.sequences.shape[1]


class Clock:
    """Seconds spent, over restarts, without the time in `paused`."""

    def __init__(self, before: float) -> None:
        self.before, self.since = before, time.perf_counter()

    def seconds(self) -> float:
        """Spent until now."""
        return self.before + time.perf_counter() - self.since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop for work that is off the clock."""
        stopped = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - stopped


def heldout_loss(bert: Bert, corpus: Corpus, machine: Machine) -> float:
    """Cross-entropy, nats a masked token, on the held-out sequences: 15 % masks, all shown as [MASK]."""
    count = masking.masks_per_sequence(HELDOUT_MASKS, corpus.length)
    total, was_training = 0.0, bert.training
    bert.eval()
    with torch.inference_mode(), machine.autocast():
        for index, start in enumerate(range(0, len(corpus.heldout), HELDOUT_BATCH)):
            rows = corpus.heldout[start : start + HELDOUT_BATCH]
            tokens = torch.from_numpy(rows.astype(np.int64))  # masked on the CPU: the same masks on every machine
            masked = masking.mask(tokens, count, corpus.mask_id, corpus.specials, corpus.vocabulary, (0, index), False)
            total += bert(*(part.to(machine.device) for part in masked)).item() * len(rows)
    bert.train(was_training)
    return total / len(corpus.heldout)


class Pretraining:
    """One run: model, optimizer, data and clock. `run` spends what is left of the budget."""

    def __init__(self, bert: Bert, training: Training, corpus: Corpus, machine: Machine, folder: Path) -> None:
        if len(corpus.sequences) < training.batch_size:
            raise InputError(
                f"The corpus has {len(corpus.sequences):,} sequences of {corpus.length} tokens, fewer than one batch of "
                f"{training.batch_size:,}. Give more text (download) or lower pretrain.batch_size."
            )
        if not len(corpus.heldout):
            raise InputError(
                f"No sequence of {corpus.length} tokens is held out. Raise tokenize.heldout_fraction, or give more text."
            )
        self.training, self.corpus, self.machine, self.folder = training, corpus, machine, folder
        if machine.device.type == "cpu":
            keep_heap()
        self.bert = bert.to(machine.device).train()
        self.adamw = optimizer.adamw(
            bert, training.learning_rate, (training.beta1, training.beta2), training.adam_eps, training.weight_decay
        )
        self.spent = restore(folder, self.bert, self.adamw)
        self.masks = masking.masks_per_sequence(training.mask_fraction, corpus.length)
        fitting = max(n for n in range(1, machine.micro_batch + 1) if training.batch_size % n == 0)
        self.micro_batch = self.spent.micro_batch = self.spent.micro_batch or fitting
        self.forward = self.bert
        self.updating = False  # from a change of the weights until it is in the record too

    def sequences_read(self) -> int:
        """Where to read on; what is left of a step that was stopped is read again."""
        return self.spent.tokens // self.corpus.length

    def fraction(self, clock: Clock) -> float:
        """Of the budget, spent until now."""
        if self.training.budget_unit == "tokens":
            return self.spent.tokens / self.training.budget
        return clock.seconds() / (3600 * self.training.budget)

    def compiles(self) -> bool:
        """Whether compiling pays: it is on the clock."""
        in_seconds = self.training.budget_unit == "hours"
        spends = self.training.budget * (3600 if in_seconds else 1)
        pays = spends >= (COMPILE_FROM_SECONDS if in_seconds else COMPILE_FROM_TOKENS)
        return self.machine.compiles and (pays or self.machine.device.type == "cuda" or self.machine.compiles_always)

    def micro_batch_loss(self, start: int) -> Tensor:
        """The loss of the micro-batch from sequence `start` on; after the last sequence comes the first again."""
        rows = np.arange(start, start + self.micro_batch) % len(self.corpus.sequences)
        tokens = torch.from_numpy(self.corpus.sequences[rows].astype(np.int64)).to(self.machine.device)
        seed = (self.training.seed, start // self.micro_batch)
        corpus = self.corpus
        masked = masking.mask(tokens, self.masks, corpus.mask_id, corpus.specials, corpus.vocabulary, seed)
        with self.machine.autocast():
            return self.forward(*masked)

    def start_compiler(self) -> None:
        """Compile, or say that this machine cannot and go on without."""
        try:
            self.forward = torch.compile(self.bert, fullgraph=True, dynamic=False)
            self.micro_batch_loss(self.sequences_read()).backward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed here (%s); going on without it.", why)
            self.forward = self.bert
        self.adamw.zero_grad()

    def step(self, spent_fraction: float) -> dict:
        """One optimizer step; returns its row of metrics. Lengthens `spent` when the weights are changed, not before."""
        count = optimizer.ramp(spent_fraction, self.training.batch_ramp, self.training.batch_size // self.micro_batch)
        rate = self.training.learning_rate * optimizer.triangle(spent_fraction)
        optimizer.set_learning_rate(self.adamw, rate)
        first, total = self.sequences_read(), torch.zeros((), device=self.machine.device)
        for index in range(count):
            loss = self.micro_batch_loss(first + index * self.micro_batch) / count
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.bert.parameters(), self.training.clip)
        if not (math.isfinite(total.item()) and math.isfinite(norm.item())):
            raise InputError(
                f"At step {self.spent.step + 1} the loss is {total.item()} and the gradient norm {norm.item()}; expected "
                f"finite numbers. The last checkpoint is kept. Lower pretrain.learning_rate or pretrain.clip."
            )
        self.updating = True
        self.adamw.step()
        self.adamw.zero_grad()
        self.spent.step += 1
        self.spent.tokens += count * self.micro_batch * self.corpus.length
        return {
            "step": self.spent.step,
            "loss": total.item(),
            "lr": rate,
            "batch": count * self.micro_batch,
            "gradient_norm": norm.item(),
            "tokens": self.spent.tokens,
        }

    def evaluate(self, fraction: float) -> None:
        """Add the held-out loss to the record when the next tenth of the budget is through."""
        due = len(self.spent.evaluations) / EVALUATIONS
        if fraction < due and fraction < 1:
            return
        loss = heldout_loss(self.bert, self.corpus, self.machine)
        spent = self.spent
        self.spent.evaluations.append(
            {
                "fraction": min(fraction, 1.0),
                "step": spent.step,
                "tokens": spent.tokens,
                "seconds": spent.seconds,
                "heldout_loss": loss,
            }
        )

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note, after each step."""
        low, high = CHECKPOINT_SECONDS
        if seconds_between_checkpoints is None:
            budget = 3600 * self.training.budget if self.training.budget_unit == "hours" else 10 * high
            seconds_between_checkpoints = min(high, max(low, budget / 10))
        clock = Clock(self.spent.seconds)
        saved, saved_step = clock.seconds(), self.spent.step
        try:
            if self.compiles() and self.fraction(clock) < 1:
                self.start_compiler()
            with (self.folder / METRICS).open("a", buffering=1) as metrics:
                while (fraction := self.fraction(clock)) < 1:
                    with clock.paused():
                        self.evaluate(fraction)
                    row = self.step(fraction)
                    before, self.spent.seconds = self.spent.seconds, clock.seconds()
                    row |= {"seconds": self.spent.seconds}
                    row["tokens_per_second"] = row["batch"] * self.corpus.length / (self.spent.seconds - before)
                    metrics.write(json.dumps(row) + "\n")
                    self.updating = False
                    if clock.seconds() - saved >= seconds_between_checkpoints:
                        checkpoint(self.folder, self.bert, self.adamw, self.spent)
                        saved, saved_step = clock.seconds(), self.spent.step
                    report(self.fraction(clock), f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s")
            if not self.spent.step:
                raise InputError(
                    f"The budget of {self.training.budget:g} {self.training.budget_unit} was spent before the first step. Raise "
                    "pretrain.budget, or set CRAM_COMPILE=0 where compiling takes it."
                )
            if self.spent.step > saved_step:
                checkpoint(self.folder, self.bert, self.adamw, self.spent)  # what follows may be killed too
            if not self.spent.evaluations or self.spent.evaluations[-1]["step"] < self.spent.step:
                with clock.paused():
                    self.evaluate(1.0)
        except BaseException as stop:
            if not isinstance(stop, Exception) and not self.updating:  # told to stop, at a point where all is in step
                self.spent.seconds = clock.seconds()
                checkpoint(self.folder, self.bert, self.adamw, self.spent)
            raise
        return self.spent


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
    torch.manual_seed(seed)  # dropout
    shuffle, step = np.random.default_rng(seed), 0
    for _ in range(settings.epochs):
        order = shuffle.permutation(len(train.tokens))
        for start in range(0, len(order) - settings.batch_size + 1, settings.batch_size):
            rows = order[start : start + settings.batch_size]
            scale = optimizer.warm_cosine((step + 1) / steps, settings.warmup)
            optimizer.set_learning_rate(adamw, settings.learning_rate * scale)
            with machine.autocast():
                scores = classifier(train.batch(rows, classifier.bert.length, machine.device))
            scores, wanted = scores.float(), labels[rows]
            loss = F.mse_loss(scores[:, 0], wanted) if regression else F.cross_entropy(scores, wanted)
            loss.backward()
            adamw.step()
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
