"""Pretraining within a budget: the loop, and what it leaves behind."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import InputError, masking, optimizer, schedules
from model.batches import Batches
from model.bert import Bert, operations
from model.checkpoint import METRICS, Spent, Writer, cut_metrics, line, restore
from model.clock import Clock, Pace
from model.compiling import Forward
from model.heldout import heldout_loss
from model.machine import Machine, Reading, cpu_has_bf16, keep_heap, matrix_rate
from model.masking import Corpus
from model.processes import ALONE, Processes
from model.quantities import budget, counted
from model.settings import Training
from model.signals import Deferred

log = logging.getLogger(__name__)
EVALUATIONS = 10  # held-out losses over the budget, and one before it
CHECKPOINT_SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
# Compiling takes 20 to 60 s on CPUs, perhaps two minutes on GPUs, and saves a tenth of a step's time or more, so the
# compiled code has to be used for so long. For a budget of tokens or operations, that time is estimated at this share
# of the machine's peak rate.
COMPILE_FROM_SECONDS, USUAL_MFU = 600.0, 0.4
SPARE_MEMORY = 0.1  # of a GPU's memory, kept free when the size of a micro-batch is chosen
AHEAD = {"cpu": 0, "cuda": 1}  # steps that may be queued while another is computed


def share_of(training: Training, processes: int) -> int:
    """The sequences of each unit of the batch that one process computes. Raises InputError if they differ."""
    unit = schedules.ramp_unit(training)
    if unit % processes:
        raise InputError(
            f"pretrain.batch_size {training.batch_size} can't be shared by {processes} processes: it is made of units "
            f"of {counted(unit, 'sequence')}. Set CRAM_GPUS to a divisor of {unit}."
        )
    return unit // processes


class NotFinite(Exception):
    """The loss or the gradient of a step is no number, or weights after it are none."""

    def __init__(self, step: int, found: str) -> None:
        self.step = step
        super().__init__(f"At step {step} {found}; expected finite numbers")


class Queued(NamedTuple):
    """A step that the device may not have computed yet."""

    row: dict  # of metrics, without what is not known yet
    reading: Reading  # loss and gradient norm
    queued: float  # when, in seconds on the clock
    operations: float  # floating-point operations


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
                f"The corpus has {counted(len(corpus.sequences), 'sequence')} of {corpus.length} tokens, fewer than "
                f"one batch of {training.batch_size:,}. Give more text (download) or lower pretrain.batch_size."
            )
        if not corpus.heldout.tokens:
            raise InputError("No text is held out. Raise tokenize.heldout_fraction, or give more text.")
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
        self.saved = asdict(self.spent)  # as the last checkpoint has it
        if spent:
            self.load_scaler(spent)
            log.info("Resuming from step %d, %.0f s into the budget.", spent.step, spent.seconds)
        if processes.first:
            cut_metrics(folder, self.spent.step)
        if training.optimizer == "muon" and machine.device.type == "cpu" and not cpu_has_bf16():
            log.warning("Muon computes in bf16, which this CPU has to emulate: expect most of the time to go there.")
        self.model = Forward(self.bert)
        self.forward: torch.nn.Module = self.model  # in DistributedDataParallel, if there are several processes
        self.shape: int | None = None  # masks of a sequence for which `prepare` was called last
        self.compiler_failed = False
        self.deferred, self.stopping = Deferred(), False  # the latter is for whoever tells several processes to stop
        self.pending: list[Queued] = []
        self.pace, self.writer = Pace(), Writer(folder)
        self.micro_batch, self.device = processes.least(self.fitting_micro_batch()), machine.device_name()
        self.batches = Batches(corpus, self.micro_batch, training.seed, machine.device)

    def load_scaler(self, spent: Spent) -> None:
        """Set the scale of the gradients, where a run in fp16 has left one."""
        if spent.scaler:
            self.scaler.load_state_dict(spent.scaler)

    def fitting_micro_batch(self) -> int:
        """Sequences of the largest micro-batch that divides a process's share of the batch's unit and fits the memory.

        Since micro-batches divide the unit, all are equally large and one compiled shape serves every step. A run that
        is resumed on the same device keeps its micro-batch if that still fits, so that its sums are rounded alike.
        """
        machine, share = self.machine, share_of(self.training, self.processes.count)
        most = min(share, machine.micro_batch)
        if machine.probes and self.spent.device == machine.device_name():
            most = min(most, self.spent.micro_batch)
        sizes = [size for size in range(1, most + 1) if share % size == 0]
        while machine.probes and len(sizes) > 1 and not self.fits(sizes[-1]):
            sizes.pop()
        return sizes[-1]

    def fits(self, size: int) -> bool:
        """Whether a micro-batch of so many sequences can be computed with memory to spare for the optimizers."""
        masks = max(self.masks(0.0), self.masks(1.0))
        try:
            self.compute(self.bert, size, masks)
            if self.machine.device.type != "cuda":
                return True
            free, total = torch.cuda.mem_get_info(self.machine.device)
            states = 0  # of a resumed run: they are there
            if not self.spent.step:
                states = 2 * sum(p.numel() * p.element_size() for p in self.bert.parameters())
            return free > states + SPARE_MEMORY * total
        except torch.OutOfMemoryError:
            return False
        finally:
            if self.machine.device.type == "cuda":
                torch.cuda.empty_cache()

    def compute(self, model: torch.nn.Module, size: int, masks: int) -> None:
        """Compute the loss of a micro-batch and its gradient, and forget both."""
        batch = Batches(self.corpus, size, self.training.seed, self.machine.device).make(0, masks)
        try:
            with self.machine.autocast():
                model(*batch).backward()
        finally:
            self.bert.zero_grad()

    def masks(self, fraction: float) -> int:
        """Tokens of a sequence that are predicted at that fraction of the budget."""
        return masking.masks_per_sequence(schedules.mask_fraction(self.training, fraction), self.corpus.length)

    def fraction(self, clock: Clock) -> tuple[float, bool]:
        """The fraction of the budget at which the next step will begin, and whether it is too near the end to predict.

        The same on all processes. Hours are predicted if steps are queued and exact if not; tokens and flops are exact.
        """
        budget, pending = self.training.budget, [(step.queued, step.operations) for step in self.pending]
        if self.training.budget_unit != "hours":
            spent = self.spent.tokens if self.training.budget_unit == "tokens" else self.spent.operations
            return self.processes.agree(spent / budget), False
        now = clock.seconds()
        begin = self.pace.end(pending, now)
        later = begin + (begin - now)  # if the queued steps take twice as long as predicted
        return self.processes.agree(begin / 3600 / budget), self.processes.agree(later / 3600 >= budget)

    def compiles(self, fraction: float) -> bool:
        """Whether compiling at that fraction of the budget pays. The time that it takes is on the clock."""
        machine, training = self.machine, self.training
        if not machine.compiles or self.compiler_failed:
            return False
        used = (schedules.masks_stay_until(training, fraction) - fraction) * training.budget
        seconds = 3600 * used
        if training.budget_unit != "hours":
            per_unit = 1.0 if training.budget_unit == "flops" else self.operations(self.masks(fraction))
            seconds = used * per_unit / (USUAL_MFU * self.limit)
        return machine.compiles_always or seconds >= COMPILE_FROM_SECONDS

    def operations(self, masks: int) -> float:
        """Floating-point operations a token, forward and backward."""
        return operations(self.bert.architecture, self.bert.vocabulary, self.corpus.length, masks)

    def loss(self, batch: tuple[Tensor, Tensor, Tensor], first: int) -> Tensor:
        """The loss of the micro-batch that begins with sequence `first`."""
        if self.training.dropout:
            torch.manual_seed(self.training.seed * 1_000_003 + first)  # so that dropout goes on as if never stopped
        with self.machine.autocast():
            return self.forward(*batch)

    def prepare(self, clock: Clock, fraction: float) -> None:
        """Compile for the masks at that fraction of the budget if that pays and this machine can."""
        self.shape, began = self.masks(fraction), clock.seconds()
        self.model.use_eager()
        if not self.compiles(fraction):
            return
        try:
            self.model.use_compiler()
            self.compute(self.model, self.micro_batch, self.shape)
            self.spent.compilations += 1
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed (%s). Training continues without it.", why)
            self.model.use_eager()
            self.compiler_failed = True
        self.spent.compile_seconds += clock.seconds() - began

    def share(self) -> None:
        """Sum the gradients of all processes at the end of each step."""
        if self.processes.count > 1:
            devices = [self.machine.device] if self.machine.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=devices)

    def step(self, fraction: float, queued: float) -> None:
        """One optimizer step, queued at that time on the clock.

        Weights, `spent` and the row of metrics, which is left in `pending`, change together.
        """
        unit = self.micro_batch * self.processes.count
        batch = schedules.batch(self.training, fraction)
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
            self.spent.micro_batch, self.spent.device = self.micro_batch, self.device
            self.spent.tokens += tokens
            operations = tokens * self.operations(masks)
            self.spent.operations += operations
            self.spent.sequence += batch
            row = {
                "step": self.spent.step,
                "fraction": fraction,
                "tokens": self.spent.tokens,
                "lr": multiplier * self.training.learning_rate,
                "batch": batch,
                "masks": masks,
            }
            reading = Reading(self.processes.mean(torch.stack([total, norm.to(total)])))
            self.pending.append(Queued(row, reading, queued, operations))

    def note(self, clock: Clock, metrics: IO[str], leave: int = 0) -> str:
        """Write the rows of all but the last `leave` steps when their numbers are there; raises NotFinite.

        Returns a line for the progress bar.
        """
        told, due, before = "", self.pending[: max(0, len(self.pending) - leave)], self.noted
        for row, reading, *_ in due:
            row["loss"], row["gradient_norm"] = reading.read()
        if due:
            self.spent.seconds = now = clock.seconds()
            self.pace.measure(due[0].queued, sum(step.operations for step in due), now)
        for place, (row, *_) in enumerate(due, 1):
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
        """Start writing a checkpoint; raises NotFinite rather than put weights into it that nothing can go on from."""
        norm = torch.nn.utils.get_total_norm(list(self.bert.parameters()))
        if not norm.isfinite():
            raise NotFinite(self.spent.step, f"the norm of the weights is {norm.item()}")
        self.spent.scaler = self.scaler.state_dict()
        if self.processes.first:
            self.writer.save(self.bert, self.optimizers, self.spent)
        self.saved = asdict(self.spent)

    def save_changes(self) -> None:
        """Start writing a checkpoint if the last one differs."""
        if asdict(self.spent) != self.saved:
            self.save()

    def skip(self, problem: NotFinite) -> None:
        """Go back to the weights of the last checkpoint, and on with the data behind the step that went wrong; once."""
        if self.training.nonfinite == "stop" or self.spent.skipped:
            twice = " It happened before, and batches were skipped then." if self.spent.skipped else ""
            way = "" if twice else ", or set pretrain.nonfinite to 'skip' to go on without this batch"
            raise InputError(
                f"{problem}.{twice} The last checkpoint is kept. Lower pretrain.learning_rate or pretrain.clip{way}."
            ) from problem
        spent, self.pending = self.spent, []
        self.writer.wait()
        self.processes.wait()  # for the first, which has written it
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
            compilations=spent.compilations,
            compile_seconds=spent.compile_seconds,
        )
        if self.processes.first:
            cut_metrics(self.folder, self.spent.step)
        log.warning("%s. Resuming from step %d after skipping the bad batch.", problem, restored.step)

    def evaluate(self, clock: Clock, fraction: float) -> None:
        """Add the held-out loss to the record, off the clock."""
        with clock.paused():
            about = self.corpus.heldout, self.corpus.mask_id, self.machine
            loss = heldout_loss(self.bert, *about) if self.processes.first else 0.0
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
        """The loop. On a GPU, one step is queued while another is computed; anything else waits for both."""
        self.share()
        if self.training.nonfinite == "skip" and not self.spent.step:
            self.save()  # to have something to go back to
        saved_at, leave, told = clock.seconds(), 0, ""
        while True:
            if self.processes.agree(self.stopping):
                raise SystemExit("told to stop")
            self.writer.check()
            try:
                told = self.note(clock, metrics, leave) or told
                fraction, near_end = self.fraction(clock)
                saves = self.processes.agree(clock.seconds() - saved_at >= seconds_between_checkpoints)
                # at the end too: the last evaluation may be killed
                saves = (saves or fraction >= 1) and self.spent.step > self.saved["step"]
                prepares = fraction < 1 and self.masks(fraction) != self.shape
                evaluates = fraction < 1 and self.evaluation_due(fraction)
                if self.pending and (near_end or fraction >= 1 or saves or prepares or evaluates):
                    leave = 0  # with nothing queued, the fraction is exact
                    continue
                if told:
                    report(fraction, told)
                    told = ""
                if saves:
                    self.save()
                    saved_at = clock.seconds()
                    continue  # as this took time
            except NotFinite as problem:
                with self.deferred.held():
                    self.skip(problem)
                continue
            if fraction >= 1:
                break
            if prepares:
                self.prepare(clock, fraction)
                continue
            if evaluates:
                self.evaluate(clock, fraction)
            self.step(fraction, clock.seconds())
            # the loop waits for the first step, which the times of later ones are predicted from
            leave = AHEAD[self.machine.device.type] if self.pace.seconds_per_operation else 0
        self.finish(clock)

    def finish(self, clock: Clock) -> None:
        """Save that the budget is spent, then the last held-out loss. Raises InputError if no step is left.

        A checkpoint or a compilation after the last step may have spent the last seconds, and steps may have been
        skipped since the last checkpoint: a resumed run has to know of both, or it would train on.
        """
        training, spent = self.training, self.spent
        limit = budget(training.budget, training.budget_unit)
        if not spent.step and not spent.skipped:
            raise InputError(
                f"The budget of {limit} was spent before the first step. Raise pretrain.budget, or set CRAM_COMPILE=0 "
                "if compiling took that long."
            )
        if training.budget_unit == "hours" and spent.seconds / 3600 / training.budget < 1:
            spent.seconds = clock.seconds()
        self.save_changes()
        if not spent.step:
            raise InputError(
                f"The budget of {limit} is spent and no trained step is left. {spent.skipped[-1]['problem']}. The run went "
                "back to its only checkpoint, at step 0, so all steps were lost. Lower pretrain.learning_rate."
            )
        if not spent.evaluations or spent.evaluations[-1]["step"] < spent.step:
            self.evaluate(clock, 1.0)
            self.save_changes()
        self.writer.wait()

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note, after each step."""
        if seconds_between_checkpoints is None:
            low, high = CHECKPOINT_SECONDS
            hours = self.training.budget if self.training.budget_unit == "hours" else math.inf
            seconds_between_checkpoints = min(high, max(low, 360 * hours))
        self.limit = self.processes.agree(matrix_rate(self.machine.device, self.machine.dtype)) * self.processes.count
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
                        self.writer.wait()
                raise
            finally:
                self.batches.close()
                self.writer.close()
        return self.spent
