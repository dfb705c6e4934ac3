"""Pretraining within a budget: the training loop."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from model import export, masking, memory, optimizer, schedules
from model.bert import Bert, operations_per_token, with_detector
from model.checkpoint import HELDOUT, METRICS, Spent, Writer, cut_metrics, line, restore
from model.clock import Clock
from model.diagnosis import Course, advice
from model.errors import InputError
from model.files import TENTHS
from model.heldout import curve_losses, share_of_curve
from model.layers import MASK
from model.machine import ALONE, Machine, Processes, keep_heap, keeps_tenths, matrix_rate
from model.masking import Batches, Corpus
from model.settings import Training
from model.signals import StopRequest
from model.wording import budget, counted, duration

log = logging.getLogger(__name__)
EVALUATIONS = 10  # held-out losses over the budget, and one before it
HOPEFUL_UNTIL = 0.1  # fraction of the budget until which the loss may be above that of token frequencies alone
CHECKPOINT_SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
# Compiling takes 20 to 60 s on CPUs and saves a tenth of a step's time or more there. Beside an H200 it takes up to a
# minute and saves from 28 % (crammed-bert) to 53 % (frontier). So it pays if the compiled code is used for this long.
# For a budget of tokens or operations, that time is estimated at this share of the machine's peak rate.
COMPILE_FROM_SECONDS, USUAL_MFU = {"cpu": 600.0, "cuda": 240.0}, 0.4
AHEAD = {"cpu": 0, "cuda": 1}  # steps that the device may still compute when the next one is queued


class Forward(nn.Module):
    """A model's forward pass, compiled or not: a wrapper such as DistributedDataParallel stays when compiling fails."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.use(compiled=False)

    def use(self, compiled: bool) -> None:
        """Call the model as it is, or have it compiled at the next call, for its shapes."""
        self.compiled, self.call = compiled, self.model.__call__
        if compiled:
            torch.compiler.reset()  # graphs of earlier shapes and runs count towards a limit
            self.call = torch.compile(self.model, fullgraph=True, dynamic=False).__call__  # type: ignore[operator]

    def forward(self, *batch: Tensor) -> Tensor:
        """The model's loss."""
        return self.call(*batch)


class Pretraining:
    """A training run: model, optimizers, data and clock. `run` spends what is left of the budget."""

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
        if not corpus.heldout.totals["tokens"]:
            raise InputError("No text is held out. Raise tokenize.heldout_fraction, or give more text.")
        self.training, self.corpus, self.machine, self.folder = training, corpus, machine, folder
        self.processes = processes
        if machine.device.type == "cpu":
            keep_heap()
        self.bert = bert.to(machine.device).train()
        self.bert.set_dropout(training.dropout)
        if machine.dtype is torch.bfloat16:  # reading and writing the states takes half the time; fp16 would overflow
            self.bert.trained_in = torch.bfloat16
        self.module = with_detector(self.bert, training).to(machine.device)
        self.optimizers = optimizer.optimizers(self.module, training, machine.dtype)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
        self.spent = restore(folder, self.module, self.optimizers, self.scaler) or Spent()
        if self.spent.step:
            log.info("Resuming from step %d, %.0f s into the budget.", self.spent.step, self.spent.seconds)
        if processes.first:
            cut_metrics(folder, self.spent.step)
        self.model = Forward(self.module)
        self.forward: Forward | DistributedDataParallel = self.model  # the latter with several processes
        self.no_sync: Callable[[], AbstractContextManager] = nullcontext
        self.compiled_masks: int | None = None  # masks per sequence at the last call of `prepare`
        self.compiler_failed = False
        self.writer = Writer(folder)
        share = memory.share_of(training, processes.count)
        fitting = memory.choose_micro_batch(self.module, training, corpus, machine, self.spent, share)
        self.micro_batch, self.device = processes.least(fitting), machine.device_name()
        self.batches = Batches(corpus, self.micro_batch, training, machine.device)

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note after each step."""
        training, machine, processes = self.training, self.machine, self.processes
        low, high = CHECKPOINT_SECONDS
        usual = min(high, max(low, 360 * training.budget)) if training.budget_unit == "hours" else high
        self.checkpoint_seconds = usual if seconds_between_checkpoints is None else seconds_between_checkpoints
        if processes.count > 1:  # sums the gradients of all processes at the end of each step
            devices = [machine.device] if machine.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)
            self.no_sync = self.forward.no_sync
        self.limit = processes.agree(matrix_rate(machine.device, machine.dtype)) * processes.count
        self.report = report
        self.saved_step, self.saved_at = self.spent.step, self.spent.seconds  # of the last checkpoint
        # steps that the device may not have computed yet: rows of metrics, the numbers that they lack, when these exist
        self.queued: list[tuple[dict, Tensor, torch.cuda.Event | None]] = []
        self.step_ended, self.step_seconds = self.spent.seconds, math.inf  # of the last step that was read
        with (
            StopRequest(waits=processes.count > 1) as self.stop,  # the process that started them sends one to each, too
            Clock(self.spent.seconds, self.spent.stopped_seconds) as self.clock,
            (self.folder / METRICS).open("a", buffering=1, encoding="utf-8") as self.metrics,
        ):
            try:
                self.train()
                self.finish()
            finally:
                self.batches.close()
                self.writer.close()
        return self.spent

    def train(self) -> None:
        """The loop. On a GPU, a step is read once the next one is queued; anything else waits until all are read."""
        training, spent, agree = self.training, self.spent, self.processes.agree
        most = self.processes.most
        while True:
            self.writer.check()
            fraction = self.fraction()
            stop = most(self.stop.number or 0)
            late = agree(self.clock.seconds() - self.saved_at >= self.checkpoint_seconds)
            saves = stop or (late and spent.step > self.saved_step)
            compiles = self.masks(fraction) != self.compiled_masks
            tenths = math.floor(EVALUATIONS * spent.evaluations[-1]["fraction"]) if spent.evaluations else -1
            evaluates = math.floor(EVALUATIONS * fraction) > tenths
            # the part of the budget that an unread step may still take: twice the time of the one before it
            unread = 2 * self.step_seconds / 3600 / training.budget if training.budget_unit == "hours" else 0.0
            if self.queued and (saves or compiles or evaluates or agree(fraction + unread >= 1)):
                self.read()  # then the fraction is exact
            elif fraction >= 1 and not stop:
                return
            elif saves:
                self.save()
                if stop:
                    self.writer.wait()
                    self.stop.pass_on(int(stop))
            elif compiles:
                self.prepare(fraction)
            elif evaluates:
                self.evaluate(fraction)
            else:
                self.step(fraction)
                if len(self.queued) > AHEAD[self.machine.device.type]:
                    self.read()

    def seconds(self) -> float:
        """The seconds on the clock. Of several processes, all wait for one that stands still: all take it off."""
        clock, spent = self.clock, self.spent
        clock.agree(self.processes.most(clock.stood_still()))
        gap = clock.stopped - spent.stopped_seconds
        if gap:
            log.warning(
                "The process stood still for %s (a stop signal, a paused container or a sleeping machine); that time "
                "is off the clock.",
                duration(gap),
            )
            spent.stopped_seconds = clock.stopped
        return clock.seconds()

    def fraction(self) -> float:
        """The fraction of the budget that is spent, at which the next step begins; the same in all processes.

        A budget in hours goes by the clock. A step that is queued while the device computes another one counts as begun
        when it is queued, so its schedules are up to one step behind.
        """
        spent = self.spent
        spent.seconds = self.seconds()
        amounts = {"hours": spent.seconds / 3600, "tokens": spent.tokens, "flops": spent.operations}
        return self.processes.agree(amounts[self.training.budget_unit] / self.training.budget)

    def step(self, fraction: float) -> None:
        """Queue one optimizer step, which begins at that fraction of the budget."""
        training, spent, length = self.training, self.spent, self.corpus.length
        batch, masks = schedules.batch(training, fraction), self.masks(fraction)
        multiplier = schedules.rate(training, fraction)
        optimizer.set_rates(self.optimizers, multiplier)
        losses = self.backward(batch, masks)

        # clip the gradients, change the weights
        for each in self.optimizers:
            self.scaler.unscale_(each)
        if training.clip is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), training.clip)
        # the scaler leaves out each optimizer whose own gradients overflow; of several, all have to
        together = self.scaler.is_enabled() and len(self.optimizers) > 1
        for each in self.optimizers:
            if not together or norm.isfinite():
                self.scaler.step(each)
            each.zero_grad()
        self.scaler.update()

        # count the step; its loss is read later
        values, computed = self.processes.mean(torch.cat([losses, norm.to(losses).view(1)])), None
        if values.is_cuda:  # a copy, as reading them later would wait for the next step too
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            computed = torch.cuda.current_stream(self.machine.device).record_event()
        spent.micro_batch, spent.device = self.micro_batch, self.device
        spent.step += 1
        spent.tokens += batch * length
        spent.operations += batch * length * self.operations(masks)
        row = {"step": spent.step, "fraction": fraction, "tokens": spent.tokens}
        row |= {"lr": multiplier * training.learning_rate, "batch": batch, "masks": masks}
        self.queued.append((row, values, computed))

    def backward(self, batch: int, masks: int) -> Tensor:
        """Add up the gradients of this process's share of the batch, micro-batch by micro-batch; the mean losses."""
        training, processes = self.training, self.processes
        unit = self.micro_batch * processes.count
        total = torch.zeros(2 if training.detection else 1, device=self.machine.device)
        begin = self.spent.tokens // self.corpus.length + processes.rank * self.micro_batch
        for first in range(begin, begin + batch, unit):
            micro_batch = self.batches.take(first, masks, first + unit)
            if training.dropout:
                torch.manual_seed(training.seed * 1_000_003 + first)  # so that a resumed run drops the same
            with self.no_sync() if first + unit < begin + batch else nullcontext():
                with self.machine.autocast():
                    losses = self.forward(*micro_batch) * (unit / batch)
                loss = losses[0] + training.detection * losses[1] if training.detection else losses
                self.scaler.scale(loss).backward()
            total += losses.detach()
        return total

    def read(self) -> None:
        """Wait until the first of the queued steps is computed; write its metrics. Raises InputError for NaN or inf."""
        row, values, computed = self.queued.pop(0)
        if computed:
            computed.synchronize()
        row["loss"], *detection_loss, row["gradient_norm"] = values.tolist()
        if detection_loss:
            (row["detection_loss"],) = detection_loss
        loss = row["loss"] + sum(detection_loss)
        finite = math.isfinite(row["gradient_norm"]) or self.scaler.is_enabled()  # in fp16 the step is left out
        if not (finite and math.isfinite(loss)):
            raise not_finite(row["step"], f"the loss is {loss} and the gradient norm {row['gradient_norm']}")
        now, tokens = self.seconds(), row["batch"] * self.corpus.length
        self.step_ended, self.step_seconds = now, now - self.step_ended
        row["seconds"] = now
        row["tokens_per_second"] = tokens / self.step_seconds
        row["mfu"] = tokens * self.operations(row["masks"]) / self.step_seconds / self.limit
        if self.processes.first:
            self.metrics.write(json.dumps(row) + "\n")
        self.report(self.fraction(), line(row))

    def evaluate(self, fraction: float) -> None:
        """Add the held-out losses to the record, off the clock, where models at tenths of the budget are kept too."""
        with self.clock.paused():
            percent = 100 * math.floor(EVALUATIONS * fraction) // EVALUATIONS
            if keeps_tenths() and 0 < percent < 100 and self.processes.first:
                kept = self.folder / TENTHS / str(percent)
                kept.mkdir(parents=True, exist_ok=True)
                export.save(self.bert, kept)
            share = share_of_curve(self.training)
            losses = dict.fromkeys(("heldout_loss", "heldout_nats_per_byte"), 0.0)
            if self.processes.first:
                losses = curve_losses(self.bert, self.corpus.heldout, MASK, self.machine, share)
            about = {name: getattr(self.spent, name) for name in ("step", "tokens", "operations", "seconds")}
            agreed = {name: self.processes.agree(loss) for name, loss in losses.items()}
            self.spent.evaluations.append({"fraction": fraction} | about | agreed)
            if self.processes.first:
                shown = agreed | {"memory_gib": memory.used(self.machine.device)}
                with (self.folder / HELDOUT).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": self.spent.step, "shown": shown}) + "\n")
            self.seconds()  # notes what a process stood still meanwhile
            limit, seen = self.corpus.loss_by_frequencies(share), self.spent.evaluations
            # a loss that falls is no reason to worry: that of a budget of a minute may be above for a third of it
            hopeless = [
                after
                for before, after in pairwise(seen)
                if after["fraction"] >= HOPEFUL_UNTIL and not after["heldout_loss"] < max(before["heldout_loss"], limit)
            ]
            if hopeless == seen[-1:] and self.processes.first:  # once
                log.warning(
                    "After %.0f %% of the budget, the held-out loss is %.4g nats per token, no lower than the time "
                    "before; by token frequencies alone it is %.4g. %s",
                    100 * fraction, agreed["heldout_loss"], limit, advice(self.course(limit)),
                )  # fmt: skip

    def course(self, limit: float) -> Course:
        """What there is to know of the run up to now. `limit`: the loss by token frequencies."""
        spent, training = self.spent, self.training
        return Course(
            losses=[each["heldout_loss"] for each in spent.evaluations],
            by_frequencies=limit,
            steps=spent.step,
            tokens=spent.tokens,
            epochs=spent.tokens / self.corpus.sequences.size,
            batch_size=training.batch_size,
            learning_rate=training.learning_rate,
            is_rotary=self.bert.architecture.positions == "rotary",
            width=self.bert.architecture.hidden,
        )

    def save(self) -> None:
        """Start writing a checkpoint. Raises InputError for weights that are not finite: no run can continue there."""
        norm = torch.nn.utils.get_total_norm(list(self.module.parameters()))
        if not norm.isfinite():
            raise not_finite(self.spent.step, f"the norm of the weights is {norm.item()}")
        if self.processes.first:
            self.spent.scaler = self.scaler.state_dict()
            self.writer.save(self.module, self.optimizers, self.spent)
        self.saved_step, self.saved_at = self.spent.step, self.clock.seconds()

    def finish(self) -> None:
        """Save, so that a run killed from here on knows its budget is spent; then measure the last held-out loss."""
        if not self.spent.step:
            limit = budget(self.training.budget, self.training.budget_unit)
            raise InputError(
                f"The budget of {limit} was spent before the first step. Raise pretrain.budget, or set CRAM_COMPILE=0 "
                "if compiling took that long."
            )
        self.save()
        if not self.spent.evaluations or self.spent.evaluations[-1]["step"] < self.spent.step:
            self.evaluate(1.0)
            self.save()
        self.writer.wait()

    def masks(self, fraction: float) -> int:
        """Tokens of a sequence that are predicted at that fraction of the budget."""
        return masking.masks_per_sequence(schedules.mask_fraction(self.training, fraction), self.corpus.length)

    def operations(self, masks: int) -> float:
        """Floating-point operations per token, forward and backward."""
        sizes = self.bert.vocabulary, self.corpus.length, masks
        return operations_per_token(self.bert.architecture, self.training, *sizes)

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
        return machine.compiles_always or seconds >= COMPILE_FROM_SECONDS[machine.device.type]

    def prepare(self, fraction: float) -> None:
        """Compile for the masks at that fraction of the budget if that pays and this machine can."""
        self.compiled_masks, began = self.masks(fraction), self.clock.seconds()
        self.model.use(compiled=False)
        if not self.compiles(fraction):
            return
        try:
            self.model.use(compiled=True)
            about = self.training, self.corpus, self.machine
            memory.compute(self.model, *about, self.micro_batch, self.compiled_masks)
            self.spent.compilations += 1
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed (%s). Training continues without it.", why)
            self.model.use(compiled=False)
            self.compiler_failed = True
        self.spent.compile_seconds += self.clock.seconds() - began


def not_finite(step: int, what: str) -> InputError:
    """The error of a step whose loss, gradient or weights are not finite."""
    return InputError(
        f"At step {step} {what}; expected finite numbers. The last checkpoint is kept. Lower pretrain.learning_rate or "
        "pretrain.clip."
    )
