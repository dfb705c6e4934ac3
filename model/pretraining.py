"""Pretraining within a budget: the clock, the loop, and what it leaves behind."""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import InputError, masking, optimizer, schedules
from model.batches import Batches
from model.bert import Bert, operations
from model.checkpoint import METRICS, Spent, checkpoint, cut_metrics, line, restore
from model.machine import Machine, Reading, cpu_has_bf16, keep_heap, matrix_rate
from model.masking import Corpus
from model.processes import ALONE, Processes
from model.settings import Training
from model.signals import Deferred

log = logging.getLogger(__name__)
HELDOUT_MASKS = 0.15  # fixed, and uncorrupted, so that recipes with other masking rates compare
HELDOUT_SEED = 0  # of the masks on held-out sequences: the same for every run
HELDOUT_BATCH = 64  # sequences
EVALUATIONS = 10  # held-out losses over the budget, and one before it
CHECKPOINT_SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
COMPILE_FROM_SECONDS, COMPILE_FROM_TOKENS = 600.0, 1e7  # on CPUs, where it costs 20 to 60 s and gains 10 to 20 %
SPARE_MEMORY = 0.1  # of a GPU's memory, kept free when the size of a micro-batch is chosen
AHEAD = {"cpu": 0, "cuda": 1}  # steps that may be queued while another is computed


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
        for first in range(0, len(corpus.heldout), HELDOUT_BATCH):
            rows = corpus.heldout[first : first + HELDOUT_BATCH]
            masked = masking.mask(rows, first, count, corpus, HELDOUT_SEED, corrupt=False)
            total += bert(*(torch.from_numpy(part).to(machine.device) for part in masked)).item() * len(rows)
    bert.train(was_training)
    return total / len(corpus.heldout)


def share_of(batch: int, processes: int) -> int:
    """The sequences of a batch that each process has. Raises InputError where they can't have as many."""
    if batch % processes:
        raise InputError(f"pretrain.batch_size {batch} can't be shared by {processes} processes; make it a multiple.")
    return batch // processes


class NotFinite(Exception):
    """The loss or the gradient of a step is no number, or weights after it are none."""

    def __init__(self, step: int, found: str) -> None:
        self.step = step
        super().__init__(f"At step {step} {found}; expected finite numbers")


class Pretraining:
    """One run: model, optimizers, data and clock. `run` spends what is left of the budget."""

    def __init__(
        self,
        bert: Bert,
        training: Training,
        corpus: Corpus,
        machine: Machine,
        folder: Path,
        processes: Processes = ALONE,
    ) -> None:
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
        self.processes = processes
        if machine.device.type == "cpu":
            keep_heap()
        self.bert = bert.to(machine.device).train()
        self.bert.set_dropout(training.dropout)
        self.optimizers = optimizer.optimizers(self.bert, training)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
        spent = restore(folder, self.bert, self.optimizers)
        self.spent = spent or Spent()
        if spent:
            self.load_scaler(spent)
            log.info("Going on from step %d, %.0f s into the budget.", spent.step, spent.seconds)
        if processes.first:
            cut_metrics(folder, self.spent.step)
        if training.optimizer == "muon" and machine.device.type == "cpu" and not cpu_has_bf16():
            log.warning("Muon computes in bf16, which this CPU has to emulate: expect most of the time to go there.")
        self.forward = self.bert
        self.deferred, self.stopping = Deferred(), False  # the latter is for whoever tells several processes to stop
        self.pending: list[tuple[dict, Reading]] = []
        self.spent.micro_batch = self.spent.micro_batch or processes.agree(self.fitting_micro_batch())
        self.micro_batch = self.spent.micro_batch
        self.batches = Batches(corpus, self.micro_batch, training.seed, machine.device)

    def load_scaler(self, spent: Spent) -> None:
        """Set the scale of the gradients, where a run in fp16 has left one."""
        if spent.scaler:
            self.scaler.load_state_dict(spent.scaler)

    def fitting_micro_batch(self) -> int:
        """Sequences of the largest micro-batch that divides the batch and fits the memory."""
        batch = self.training.batch_size
        share = share_of(batch, self.processes.count)
        sizes = [size for size in range(1, min(share, self.machine.micro_batch) + 1) if share % size == 0]
        while self.machine.probes and len(sizes) > 1 and not self.fits(sizes[-1]):
            sizes.pop()
        return sizes[-1]

    def fits(self, size: int) -> bool:
        """Whether a micro-batch of so many sequences can be computed with memory to spare for the optimizers."""
        masks = max(self.masks(0.0), self.masks(1.0))
        try:
            with self.machine.autocast():
                self.bert(
                    *Batches(self.corpus, size, self.training.seed, self.machine.device).make(0, masks)
                ).backward()
            self.bert.zero_grad()
            if self.machine.device.type != "cuda":
                return True
            free, total = torch.cuda.mem_get_info(self.machine.device)
            states = 2 * sum(p.numel() * p.element_size() for p in self.bert.parameters())
            return free > states + SPARE_MEMORY * total
        except torch.OutOfMemoryError:
            self.bert.zero_grad()
            return False
        finally:
            if self.machine.device.type == "cuda":
                torch.cuda.empty_cache()

    def masks(self, fraction: float) -> int:
        """Tokens of a sequence that are predicted at that fraction of the budget."""
        return masking.masks_per_sequence(schedules.mask_fraction(self.training, fraction), self.corpus.length)

    def fraction(self, clock: Clock) -> float:
        """Of the budget, spent until now; the same on all processes."""
        spent = {
            "hours": clock.seconds() / 3600,
            "tokens": self.spent.tokens,
            "flops": self.spent.operations,
        }[self.training.budget_unit]
        return self.processes.agree(spent / self.training.budget)

    def compiles(self) -> bool:
        """Whether compiling pays: it is on the clock."""
        machine, budget = self.machine, self.training.budget
        if not machine.compiles or machine.compiles_always or machine.device.type == "cuda":
            return machine.compiles
        if self.training.budget_unit == "hours":
            return 3600 * budget >= COMPILE_FROM_SECONDS
        per_token = self.operations(self.masks(0.0)) if self.training.budget_unit == "flops" else 1.0
        return budget / per_token >= COMPILE_FROM_TOKENS

    def operations(self, masks: int) -> float:
        """Floating-point operations a token, forward and backward."""
        return operations(self.bert.architecture, self.bert.vocabulary, self.corpus.length, masks)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor], first: int) -> Tensor:
        """The loss of the micro-batch that begins with sequence `first`."""
        if self.training.dropout:
            torch.manual_seed(self.training.seed * 1_000_003 + first)  # so that dropout goes on as if never stopped
        with self.machine.autocast():
            return self.forward(*batch)

    def start_compiler(self, fraction: float) -> None:
        """Compile for the masks at that fraction of the budget, or say that this machine cannot and go on without."""
        first = self.spent.sequence
        try:
            self.forward = torch.compile(self.bert, fullgraph=True, dynamic=False)
            self.loss(self.batches.make(first, self.masks(fraction)), first).backward()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed here (%s); going on without it.", why)
            self.forward = self.bert
        self.bert.zero_grad()

    def share(self) -> None:
        """Sum the gradients of all processes at the end of each step."""
        if self.processes.count > 1:
            devices = [self.machine.device] if self.machine.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.forward, device_ids=devices)

    def step(self, fraction: float) -> None:
        """One optimizer step. Weights, `spent` and the row of metrics, which is left in `pending`, change together."""
        unit = self.micro_batch * self.processes.count
        batch = schedules.batch(self.training, fraction, unit)
        multiplier, masks = schedules.rate(self.training, fraction), self.masks(fraction)
        optimizer.set_rates(self.optimizers, multiplier)
        total = torch.zeros((), device=self.machine.device)
        begin = self.spent.sequence + self.processes.rank * self.micro_batch
        for first in range(begin, begin + batch, unit):
            last = first + unit >= begin + batch
            with nullcontext() if last or self.processes.count == 1 else self.forward.no_sync():
                loss = self.loss(self.batches.take(first, masks, first + unit), first) * (unit / batch)
                self.scaler.scale(loss).backward()
            total += loss.detach()
        with self.deferred.held():
            for each in self.optimizers:
                self.scaler.unscale_(each)
            if self.training.clip is None:
                norm = torch.nn.utils.get_total_norm([p.grad for p in self.bert.parameters() if p.grad is not None])
            else:
                norm = torch.nn.utils.clip_grad_norm_(self.bert.parameters(), self.training.clip)
            # each optimizer leaves a step out where its own gradients overflow; of several, all have to
            together = self.scaler.is_enabled() and len(self.optimizers) > 1
            for each in self.optimizers:
                if not together or norm.isfinite():
                    self.scaler.step(each)
                each.zero_grad()
            self.scaler.update()
            tokens = batch * self.corpus.length
            self.spent.step += 1
            self.spent.tokens += tokens
            self.spent.operations += tokens * self.operations(masks)
            self.spent.sequence += batch
            row = {
                "step": self.spent.step,
                "fraction": fraction,
                "tokens": self.spent.tokens,
                "lr": multiplier * self.training.learning_rate,
                "batch": batch,
                "masks": masks,
            }
            self.pending.append((row, Reading(self.processes.mean(torch.stack([total, norm.to(total)])))))

    def note(self, clock: Clock, metrics: IO[str], leave: int = 0) -> str:
        """Write the rows of all but the last `leave` steps when their numbers are there; raises NotFinite.

        Returns a line for the progress bar.
        """
        told, due, before = "", self.pending[: max(0, len(self.pending) - leave)], self.noted
        for row, reading in due:
            row["loss"], row["gradient_norm"] = reading.read()
        now = clock.seconds()
        for place, (row, _) in enumerate(due, 1):
            overflows = self.scaler.is_enabled()  # then the scaler leaves such a step out, and lowers the scale
            if not (math.isfinite(row["loss"]) and (overflows or math.isfinite(row["gradient_norm"]))):
                found = f"the loss is {row['loss']} and the gradient norm {row['gradient_norm']}"
                raise NotFinite(row["step"], found)
            row["seconds"] = before + (now - before) * place / len(due)  # as if all had taken the same time
            row["tokens_per_second"] = row["batch"] * self.corpus.length / (row["seconds"] - self.noted)
            row["mfu"] = row["tokens_per_second"] * self.operations(row["masks"]) / self.limit
            with self.deferred.held():  # so that no row is lost or written twice
                if self.processes.first:
                    metrics.write(json.dumps(row) + "\n")
                self.pending.pop(0)
                self.noted = row["seconds"]
            told = line(row)
        return told

    def save(self) -> None:
        """Write the checkpoint; raises NotFinite rather than put weights into it that nothing can go on from."""
        norm = torch.nn.utils.get_total_norm(list(self.bert.parameters()))
        if not norm.isfinite():
            raise NotFinite(self.spent.step, f"the norm of the weights is {norm.item()}")
        self.spent.scaler = self.scaler.state_dict()
        if self.processes.first:
            checkpoint(self.folder, self.bert, self.optimizers, self.spent)
        self.processes.wait()

    def skip(self, problem: NotFinite) -> None:
        """Go back to the weights of the last checkpoint, and on with the data behind the step that went wrong; once."""
        if self.training.nonfinite == "stop" or self.spent.skipped:
            twice = " It happened before, and batches were skipped then." if self.spent.skipped else ""
            way = "" if twice else ", or set pretrain.nonfinite to 'skip' to go on without this batch"
            raise InputError(
                f"{problem}.{twice} The last checkpoint is kept. Lower pretrain.learning_rate or pretrain.clip{way}."
            ) from problem
        spent, self.pending = self.spent, []
        restored = restore(self.folder, self.bert, self.optimizers)
        self.load_scaler(restored)
        what = {"step": problem.step, "sequences": [restored.sequence, spent.sequence], "problem": str(problem)}
        self.spent = replace(  # what the lost steps cost stays spent
            restored,
            seconds=spent.seconds,
            tokens=spent.tokens,
            operations=spent.operations,
            sequence=spent.sequence,
            skipped=[what],
        )
        if self.processes.first:
            cut_metrics(self.folder, self.spent.step)
        log.warning("%s. Going on from step %d, with the data behind it.", problem, restored.step)

    def evaluate(self, clock: Clock, fraction: float) -> None:
        """Add the held-out loss to the record, off the clock."""
        with clock.paused():
            loss = heldout_loss(self.bert, self.corpus, self.machine) if self.processes.first else 0.0
            self.spent.evaluations.append(
                {
                    "fraction": min(fraction, 1.0),
                    "step": self.spent.step,
                    "tokens": self.spent.tokens,
                    "seconds": self.spent.seconds,
                    "heldout_loss": self.processes.agree(loss),
                }
            )

    def evaluation_due(self, fraction: float) -> bool:
        """Whether the next tenth of the budget is through since the last evaluation."""
        done = self.spent.evaluations
        return not done or math.floor(EVALUATIONS * fraction) > math.floor(EVALUATIONS * done[-1]["fraction"])

    def spend(
        self, clock: Clock, metrics: IO[str], report: Callable[[float, str], None], seconds_between_checkpoints: float
    ) -> None:
        """The loop."""
        if self.compiles() and (fraction := self.fraction(clock)) < 1:
            self.start_compiler(fraction)
        self.share()
        if self.training.nonfinite == "skip" and not self.spent.step:
            self.save()  # to have something to go back to
        saved_step, saved = self.spent.step, clock.seconds()
        ahead = AHEAD[self.machine.device.type]
        while True:
            if self.processes.agree(self.stopping):
                raise SystemExit("told to stop")
            fraction = self.fraction(clock)
            evaluates = fraction < 1 and self.evaluation_due(fraction)
            saves = self.processes.agree(clock.seconds() - saved >= seconds_between_checkpoints)
            try:
                told = self.note(clock, metrics, leave=0 if fraction >= 1 or evaluates or saves else ahead)
                if told:
                    report(fraction, told)
                saves = saves or fraction >= 1  # at the end too: what follows may be killed
                if saves and self.spent.step > saved_step:
                    self.save()
                    saved_step, saved = self.spent.step, clock.seconds()
                    continue  # as this took time
            except NotFinite as problem:
                with self.deferred.held():
                    self.skip(problem)
                continue
            if fraction >= 1:
                break
            if evaluates:
                self.evaluate(clock, fraction)
            self.step(fraction)
            self.spent.seconds = clock.seconds()
        if not self.spent.step:
            raise InputError(
                f"The budget of {self.training.budget:g} {self.training.budget_unit} was spent before the first step. Raise "
                "pretrain.budget, or set CRAM_COMPILE=0 where compiling takes it."
            )
        if not self.spent.evaluations or self.spent.evaluations[-1]["step"] < self.spent.step:
            self.evaluate(clock, 1.0)

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note, after each step."""
        if seconds_between_checkpoints is None:
            low, high = CHECKPOINT_SECONDS
            hours = self.training.budget if self.training.budget_unit == "hours" else math.inf
            seconds_between_checkpoints = min(high, max(low, 360 * hours))
        self.limit = matrix_rate(self.machine.device, self.machine.dtype) * self.processes.count
        clock, self.noted = Clock(self.spent.seconds), self.spent.seconds
        with self.deferred, (self.folder / METRICS).open("a", buffering=1) as metrics:
            try:
                self.spend(clock, metrics, report, seconds_between_checkpoints)
            except BaseException as stop:
                if not isinstance(stop, Exception) and not self.deferred.broken:  # told to stop, and all is in step
                    with suppress(NotFinite):
                        self.note(clock, metrics)
                        self.spent.seconds = clock.seconds()
                        self.save()
                raise
            finally:
                self.batches.close()
        return self.spent
