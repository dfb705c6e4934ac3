"""Pretraining within a budget: the training loop."""

import json
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import checkpoint, kept, masking, memory, optimizer, schedules
from model.bert import Bert, operations_per_token, with_detector
from model.checkpoint import HELDOUT, METRICS, Spent, Writer
from model.clock import Clock
from model.diagnosis import Course, advice, becomes_hopeless, not_finite
from model.errors import InputError
from model.files import TENTHS, TOKENS
from model.forward import COMPILE_FROM_SECONDS, USUAL_MFU, Forward, ready_for_training
from model.heldout import curve_losses, share_of_curve
from model.machine import ALONE, Machine, Processes, matrix_rate
from model.masking import Batches, Corpus
from model.settings import Training
from model.signals import StopRequest
from model.wording import budget, duration

log = logging.getLogger(__name__)
EVALUATIONS = 10  # held-out losses over the budget, and one before it
AHEAD = {"cpu": 0, "cuda": 1}  # steps that the device may still compute when the next one is queued


class Queued(NamedTuple):
    """A step that the device may not have computed yet."""

    row: dict  # of metrics, still without those in `values`
    values: Tensor  # the losses and the gradient's norm
    computed: torch.cuda.Event | None  # after it, `values` are there; None: they are there already


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
        corpus.check(training)
        self.training = training
        self.in_tokens = training.in_tokens(corpus.sequences.size)  # the same, without a budget in epochs
        self.most_sequences = corpus.sequences_in(training)
        self.corpus = corpus
        self.machine = machine
        self.folder = folder
        self.processes = processes
        self.bert = ready_for_training(bert, training, machine)
        self.module = with_detector(self.bert, training).to(machine.device)
        self.model = Forward(self.module)
        self.forward: Forward | DistributedDataParallel = self.model  # the latter with several processes

        self.optimizers = optimizer.optimizers(self.module, training, machine.dtype)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
        self.spent = self.resume()
        self.writer = Writer(folder)
        self.keeps_tokens = kept.keeps_tokens()
        self.kept_millions = kept.millions_reached(self.spent.tokens) if self.spent.step else -1

        self.micro_batch = self.choose_micro_batch()
        self.device = machine.device_name()
        self.batches = Batches(corpus, self.micro_batch, training, machine.device)

        # steps that the device may not have computed yet, and the time of the last one that was read
        self.queued: list[Queued] = []
        self.step_ended = self.spent.seconds
        self.step_seconds = math.inf

    def resume(self) -> Spent:
        """Load the checkpoint, if there is one. Returns what the run has spent so far."""
        spent = checkpoint.restore(self.folder, self.module, self.optimizers, self.scaler) or Spent()
        if spent.step:
            log.info("Resuming from step %d, %.0f s into the budget.", spent.step, spent.seconds)
        if self.processes.first:
            checkpoint.cut_metrics(self.folder, spent.step)
            kept.drop_later(self.folder, spent.tokens)
        return spent

    def choose_micro_batch(self) -> int:
        """The sequences whose gradients are computed at once: as many as the memory of every process has room for."""
        if not self.training.budget:
            return 1  # nothing is computed at once
        share = memory.share_of(self.training, self.processes.count)
        fitting = memory.choose_micro_batch(self.module, self.training, self.corpus, self.machine, self.spent, share)
        return self.processes.least(fitting)

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note after each step."""
        machine = self.machine
        processes = self.processes
        if seconds_between_checkpoints is None:
            self.checkpoint_seconds = checkpoint.usual_seconds(self.training)
        else:
            self.checkpoint_seconds = seconds_between_checkpoints
        if processes.count > 1:  # sums the gradients of all processes at the end of each step
            devices = [machine.device] if machine.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)
        self.limit = processes.agree(matrix_rate(machine.device, machine.dtype)) * processes.count
        self.report = report
        # of the last checkpoint
        self.saved_step = self.spent.step
        self.saved_at = self.spent.seconds
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
        """The loop. On a GPU, a step is read after the next one is queued; everything else waits until all are read."""
        while True:
            self.writer.check()
            fraction = self.fraction()
            due = self.due(fraction)
            if self.queued and (due != "step" or self.may_be_spent(fraction)):
                self.read()  # then the fraction is exact
                continue
            match due:
                case "end":
                    return
                case "keep":
                    self.keep()
                case "stop":
                    self.save()
                    self.writer.wait()
                    self.stop.pass_on(self.signal)
                case "save":
                    self.save()
                case "prepare":
                    self.prepare(fraction)
                case "evaluate":
                    self.evaluate(fraction)
                case "step":
                    self.step(fraction)
                    if len(self.queued) > AHEAD[self.machine.device.type]:
                        self.read()

    def due(self, fraction: float) -> Literal["keep", "stop", "end", "save", "prepare", "evaluate", "step"]:
        """What to do next at this fraction of the budget; the same in all processes."""
        if self.keeps_tokens and kept.millions_reached(self.spent.tokens) > self.kept_millions:
            return "keep"  # first, so that a checkpoint of this step implies this model
        self.signal = int(self.processes.most(self.stop.number or 0))
        if self.signal:
            return "stop"
        if fraction >= 1:
            return "end"
        is_late = self.clock.seconds() - self.saved_at >= self.checkpoint_seconds
        if self.processes.agree(is_late) and self.spent.step > self.saved_step:
            return "save"
        if self.masks(fraction) != self.model.masks:
            return "prepare"
        evaluations = self.spent.evaluations
        if not evaluations or tenths_in(fraction) > tenths_in(evaluations[-1]["fraction"]):
            return "evaluate"
        return "step"

    def may_be_spent(self, fraction: float) -> bool:
        """Whether the steps that are not read yet may take the rest of a budget in hours: each up to twice the last."""
        if self.training.budget_unit != "hours":
            return False  # these are counted when a step is queued
        unread = 2 * self.step_seconds / 3600 / self.training.budget
        return bool(self.processes.agree(fraction + unread >= 1))

    def seconds(self) -> float:
        """The seconds on the clock. If one of several processes stood still, all waited for it, so all take it off."""
        self.clock.agree(self.processes.most(self.clock.stood_still()))
        gap = self.clock.stopped - self.spent.stopped_seconds
        if gap:
            log.warning(
                "The process stood still for %s (a stop signal, a paused container or a sleeping machine). That time "
                "doesn't count.",
                duration(gap),
            )
            self.spent.stopped_seconds = self.clock.stopped
        return self.clock.seconds()

    def fraction(self) -> float:
        """The fraction of the budget that is spent when the next step begins; the same in all processes.

        A budget in epochs is never exceeded: it is spent when it has too few sequences left for a step. A budget in
        another unit is spent by the step that reaches it. One in hours is measured by the clock; a step that is queued
        while the device computes another one counts as begun when it is queued, so its schedules are up to one step
        behind.
        """
        spent = self.spent
        spent.seconds = self.seconds()
        if not self.training.budget:
            return 1.0
        amounts = {
            "hours": spent.seconds / 3600,
            "tokens": spent.tokens,
            "epochs": spent.tokens / self.corpus.sequences.size,
            "flops": spent.operations,
        }
        fraction = amounts[self.training.budget_unit] / self.training.budget
        if not self.has_sequences_for_a_step(fraction):
            return 1.0
        return self.processes.agree(fraction)

    def has_sequences_for_a_step(self, fraction: float) -> bool:
        """Whether a step at this fraction of the budget reads no more sequences than a budget in epochs has left."""
        if self.most_sequences is None:
            return True
        read = self.spent.tokens // self.corpus.length
        return read + schedules.batch(self.training, fraction) <= self.most_sequences

    def step(self, fraction: float) -> None:
        """Queue one optimizer step, which begins at this fraction of the budget."""
        batch = schedules.batch(self.training, fraction)
        masks = self.masks(fraction)
        multiplier = schedules.rate(self.training, fraction)
        optimizer.set_rates(self.optimizers, multiplier)
        losses = self.backward(batch, masks)
        norm = self.change_weights()

        # count the step; its loss is read later
        spent = self.spent
        tokens = batch * self.corpus.length
        spent.micro_batch = self.micro_batch
        spent.device = self.device
        spent.step += 1
        spent.tokens += tokens
        spent.operations += tokens * self.operations(masks)
        row = {
            "step": spent.step,
            "fraction": fraction,
            "tokens": spent.tokens,
            "lr": optimizer.rate_of_step(self.training, multiplier, spent.step),
            "batch": batch,
            "masks": masks,
        }
        self.queue(row, torch.cat([losses, norm.to(losses).view(1)]))

    def backward(self, batch: int, masks: int) -> Tensor:
        """Add up the gradients of this process's share of the batch, by micro-batches. Returns the mean losses."""
        training = self.training
        processes = self.processes
        unit = self.micro_batch * processes.count
        begin = self.spent.tokens // self.corpus.length + processes.rank * self.micro_batch
        end = begin + batch
        losses_of_step = 2 if training.detection else 1
        total = torch.zeros(losses_of_step, device=self.machine.device)
        for first in range(begin, end, unit):
            after = first + unit
            micro_batch = self.batches.take(first, masks, after)
            if training.dropout:
                torch.manual_seed(training.seed * 1_000_003 + first)  # so that a resumed run drops the same
            # several processes add up their gradients after the last micro-batch only
            with self.no_sync() if after < end else nullcontext():
                with self.machine.autocast():
                    losses = self.forward(*micro_batch) * (unit / batch)
                self.scaler.scale(self.sum_losses(losses)).backward()
            total += losses.detach()
        return total

    def no_sync(self) -> AbstractContextManager:
        """A context in which several processes don't add up their gradients."""
        return self.forward.no_sync() if isinstance(self.forward, DistributedDataParallel) else nullcontext()

    def sum_losses(self, losses: Tensor) -> Tensor:
        """The loss that is trained on: the model's, or the weighted sum of its two with detection."""
        if not self.training.detection:
            return losses
        return losses[0] + self.training.detection * losses[1]

    def change_weights(self) -> Tensor:
        """Clip the gradients and change the weights. Returns the norm of the gradients before clipping."""
        for each in self.optimizers:
            self.scaler.unscale_(each)
        if self.training.clip is None:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.training.clip)
        # the scaler leaves out each optimizer whose own gradients overflow; of several, all have to
        together = self.scaler.is_enabled() and len(self.optimizers) > 1
        for each in self.optimizers:
            if not together or norm.isfinite():
                self.scaler.step(each)
            each.zero_grad()
        self.scaler.update()
        return norm

    def queue(self, row: dict, values: Tensor) -> None:
        """Queue a step for reading. `values`: this process's losses and the gradient's norm, which `row` lacks."""
        values = self.processes.mean(values)
        computed = None
        if values.is_cuda:  # a copy, as reading them later would wait for the next step too
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            computed = torch.cuda.current_stream(self.machine.device).record_event()
        self.queued.append(Queued(row, values, computed))

    def read(self) -> None:
        """Wait until the first queued step is computed, and write its metrics. Raises InputError for NaN or inf."""
        row, values, computed = self.queued.pop(0)
        if computed:
            computed.synchronize()
        row["loss"], *detection_loss, row["gradient_norm"] = values.tolist()
        if detection_loss:
            (row["detection_loss"],) = detection_loss
        self.check_finite(row, row["loss"] + sum(detection_loss))

        now = self.seconds()
        self.step_seconds = now - self.step_ended
        self.step_ended = now
        tokens = row["batch"] * self.corpus.length
        row["seconds"] = now
        row["tokens_per_second"] = tokens / self.step_seconds
        row["mfu"] = tokens * self.operations(row["masks"]) / self.step_seconds / self.limit
        if self.processes.first:
            self.metrics.write(json.dumps(row) + "\n")
        self.report(self.fraction(), checkpoint.progress_note(row))

    def check_finite(self, row: dict, loss: float) -> None:
        """Raise InputError if the loss of a step or its gradient is NaN or inf."""
        norm = row["gradient_norm"]
        is_left_out = self.scaler.is_enabled() and not math.isfinite(norm)  # the step, in fp16
        if not math.isfinite(loss) or not (math.isfinite(norm) or is_left_out):
            raise not_finite(row["step"], f"the loss is {loss} and the gradient norm {norm}")

    def evaluate(self, fraction: float) -> None:
        """Measure and record the held-out losses, off the clock; keep models at tenths of the budget if asked to."""
        with self.clock.paused():
            percent = 100 * tenths_in(fraction) // EVALUATIONS
            if kept.keeps_tenths() and 0 < percent < 100 and self.processes.first:
                kept.save(self.bert, self.folder, TENTHS, percent)
            share = share_of_curve(self.in_tokens)
            losses = self.heldout_losses(share)
            spent = self.spent
            spent.evaluations.append(
                {
                    "fraction": fraction,
                    "step": spent.step,
                    "tokens": spent.tokens,
                    "operations": spent.operations,
                    "seconds": spent.seconds,
                    **losses,
                }
            )
            if self.processes.first:
                shown = losses | {"memory_gib": memory.used_gib(self.machine.device)}
                with (self.folder / HELDOUT).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": spent.step, "shown": shown}) + "\n")
            self.seconds()  # notes what a process stood still meanwhile
            limit = self.corpus.loss_by_frequencies(share)
            if self.processes.first and becomes_hopeless(spent.evaluations, limit):
                log.warning(
                    "After %.0f %% of the budget, the held-out loss is %.4g nats per token, not lower than at the last "
                    "measurement; by token frequencies alone it is %.4g. %s",
                    100 * fraction, losses["heldout_loss"], limit, advice(self.course(limit)),
                )  # fmt: skip

    def keep(self) -> None:
        """Write the model as it is after so many tokens, off the clock."""
        self.kept_millions = kept.millions_reached(self.spent.tokens)
        with self.clock.paused():
            if self.processes.first:
                kept.save(self.bert, self.folder, TOKENS, self.kept_millions)
            self.seconds()  # the other processes wait here, off their clocks, too

    def heldout_losses(self, share: float) -> dict[str, float]:
        """The losses of `curve_losses`, which the first process measures for all."""
        losses = dict.fromkeys(("heldout_loss", "heldout_nats_per_byte"), 0.0)
        if self.processes.first:
            losses = curve_losses(self.bert, self.corpus.heldout, self.corpus.specials.mask, self.machine, share)
        return {name: self.processes.agree(loss) for name, loss in losses.items()}

    def course(self, limit: float) -> Course:
        """What is known about the run so far. `limit`: the loss by token frequencies."""
        spent = self.spent
        training = self.training
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
        """Start writing a checkpoint. Raises InputError for weights that aren't finite: no run could continue there."""
        norm = torch.nn.utils.get_total_norm(list(self.module.parameters()))
        if not norm.isfinite():
            raise not_finite(self.spent.step, f"the norm of the weights is {norm.item()}")
        if self.processes.first:
            self.spent.scaler = self.scaler.state_dict()
            self.writer.save(self.module, self.optimizers, self.spent)
        self.saved_step = self.spent.step
        self.saved_at = self.clock.seconds()

    def finish(self) -> None:
        """Save, so that a run killed now knows that its budget is spent; then measure the last held-out loss."""
        if self.training.budget and not self.spent.step:
            limit = budget(self.training.budget, self.training.budget_unit)
            raise InputError(
                f"The budget of {limit} was spent before the first step. Raise pretrain.budget, or set CRAM_COMPILE=0 "
                "if compiling took the time."
            )
        self.save()
        evaluations = self.spent.evaluations
        if not evaluations or evaluations[-1]["step"] < self.spent.step:
            self.evaluate(1.0)
            self.save()
        self.writer.wait()

    def masks(self, fraction: float) -> int:
        """Tokens of a sequence that are predicted at this fraction of the budget."""
        masked = schedules.mask_fraction(self.training, fraction)
        return masking.masks_per_sequence(masked, self.corpus.length)

    def operations(self, masks: int) -> float:
        """Floating-point operations per token, forward and backward."""
        bert = self.bert
        return operations_per_token(bert.architecture, self.training, bert.vocabulary, self.corpus.length, masks)

    def compiles(self, fraction: float) -> bool:
        """Whether compiling at this fraction of the budget pays. The time that it takes is on the clock."""
        if not self.machine.compiles or self.model.compiler_failed:
            return False
        if self.machine.compiles_always or self.was_compiled(fraction):
            return True
        return self.seconds_of_shape(fraction) >= COMPILE_FROM_SECONDS[self.machine.device.type]

    def was_compiled(self, fraction: float) -> bool:
        """Whether a resumed run ends as if it had never stopped only if it compiles, as the same device did before.

        With a budget in hours, no two runs are the same, and compiling could take what is left of it.
        """
        spent = self.spent
        is_same = spent.device == self.device and spent.compiled_masks == self.masks(fraction)
        return is_same and self.training.budget_unit != "hours"

    def seconds_of_shape(self, fraction: float) -> float:
        """For about how many seconds the number of masks stays as it is at this fraction of the budget."""
        training = self.in_tokens
        amount = (schedules.masks_stay_until(training, fraction) - fraction) * training.budget
        if training.budget_unit == "hours":
            return 3600 * amount
        rate = USUAL_MFU[self.machine.device.type] * self.limit
        if training.budget_unit == "flops":
            return amount / rate
        return amount * self.operations(self.masks(fraction)) / rate

    def prepare(self, fraction: float) -> None:
        """Compile for the masks at this fraction of the budget if that pays and this machine can."""
        began = self.clock.seconds()
        masks = self.masks(fraction)
        self.model.masks = masks
        self.model.use(compiled=False)
        pays = self.compiles(fraction)
        self.spent.compiled_masks = 0
        if not pays:
            return
        try:
            self.model.use(compiled=True)
            memory.compute(self.model, self.training, self.corpus, self.machine, self.micro_batch, masks)
            self.spent.compilations += 1
            self.spent.compiled_masks = masks
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed (%s). Training continues without it.", why)
            self.model.use(compiled=False)
            self.model.compiler_failed = True
        self.spent.compile_seconds += self.clock.seconds() - began


def tenths_in(fraction: float) -> int:
    """The number of held-out losses that are due up to this fraction of the budget, without the first one at 0."""
    return math.floor(EVALUATIONS * fraction)
