"""Pretraining within a budget: the training loop."""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from model import InputError, attention, detection, masking, micro_batch, optimizer, schedules
from model.batches import Batch, Batches
from model.bert import Bert
from model.checkpoint import METRICS, Spent, Writer, cut_metrics, line, restore
from model.clock import Clock
from model.compiling import Forward
from model.heldout import curve_losses
from model.machine import Machine, Reading, keep_heap, matrix_rate
from model.masking import Corpus
from model.processes import ALONE, Processes
from model.quantities import budget, counted
from model.settings import Training
from model.signals import Deferred
from model.steps import NotFinite, Step, StepQueue

log = logging.getLogger(__name__)
EVALUATIONS = 10  # held-out losses over the budget, and one before it
CHECKPOINT_SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
# Compiling takes 20 to 60 s on CPUs and perhaps two minutes on GPUs, and saves a tenth of a step's time or more. So it
# pays if the compiled code is used for this long. For a budget of tokens or operations, that time is estimated at this
# share of the machine's peak rate.
COMPILE_FROM_SECONDS, USUAL_MFU = 600.0, 0.4
AHEAD = {"cpu": 0, "cuda": 1}  # steps that may be queued while another is computed


def check_corpus(corpus: Corpus, training: Training) -> None:
    """Raise InputError if the corpus has less than one batch, or no held-out text."""
    if len(corpus.sequences) < training.batch_size:
        raise InputError(
            f"The corpus has {counted(len(corpus.sequences), 'sequence')} of {corpus.length} tokens, fewer than "
            f"one batch of {training.batch_size:,}. Give more text (download) or lower pretrain.batch_size."
        )
    if not corpus.heldout.tokens:
        raise InputError("No text is held out. Raise tokenize.heldout_fraction, or give more text.")


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
        check_corpus(corpus, training)
        self.training, self.corpus, self.machine, self.folder = training, corpus, machine, folder
        self.processes = processes
        if machine.device.type == "cpu":
            keep_heap()
        self.bert = bert.to(machine.device).train()
        self.bert.set_dropout(training.dropout)
        self.module = detection.with_detector(self.bert, training).to(machine.device)
        self.optimizers = optimizer.optimizers(self.module, training, machine.dtype)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype is torch.float16)
        self.spent = self.restored() or Spent()
        self.saved, self.saved_at = asdict(self.spent), 0.0  # the last checkpoint, and when it was written
        if self.spent.step:
            log.info("Resuming from step %d, %.0f s into the budget.", self.spent.step, self.spent.seconds)
        self.model = Forward(self.module)
        self.forward: torch.nn.Module = self.model  # in DistributedDataParallel, if there are several processes
        self.compiled_masks: int | None = None  # masks per sequence at the last call of `prepare`
        self.compiler_failed = False
        self.deferred, self.stopping = Deferred(), False  # `stopping` is set from outside to stop several processes
        self.writer = Writer(folder)
        share = micro_batch.share_of(training, processes.count)
        fitting = micro_batch.choose(self.module, training, corpus, machine, self.spent, share)
        self.micro_batch, self.device = processes.least(fitting), machine.device_name()
        self.batches = Batches(corpus, self.micro_batch, training, machine.device)

    def restored(self) -> Spent | None:
        """Load the last checkpoint, if there is one: weights, optimizers, gradient scale and metrics as they were."""
        spent = restore(self.folder, self.module, self.optimizers)
        if spent and spent.scaler:
            self.scaler.load_state_dict(spent.scaler)
        if self.processes.first:
            cut_metrics(self.folder, spent.step if spent else 0)
        return spent

    def run(self, report: Callable[[float, str], None], seconds_between_checkpoints: float | None = None) -> Spent:
        """Train until the budget is spent. `report` gets the fraction spent and a note after each step."""
        if seconds_between_checkpoints is None:
            low, high = CHECKPOINT_SECONDS
            hours = self.training.budget if self.training.budget_unit == "hours" else math.inf
            seconds_between_checkpoints = min(high, max(low, 360 * hours))
        self.checkpoint_seconds = seconds_between_checkpoints
        self.limit = self.processes.agree(matrix_rate(self.machine.device, self.machine.dtype)) * self.processes.count
        self.clock = Clock(self.spent.seconds)
        kernel = attention.fastest_kernel(self.bert.architecture, self.corpus.length, self.micro_batch, self.machine)
        with self.deferred, kernel, (self.folder / METRICS).open("a", buffering=1) as metrics:
            self.queue = StepQueue(
                clock=self.clock,
                finished=self.spent.seconds,
                metrics=metrics if self.processes.first else None,
                deferred=self.deferred,
                limit=self.limit,
                scaled=self.scaler.is_enabled(),
                ahead=AHEAD[self.machine.device.type],
            )
            try:
                self.writer.start()
                self.train(report)
                self.finish()
            except BaseException as stop:
                if not isinstance(stop, Exception) and not self.deferred.broken:  # a signal between two steps
                    self.save_stopped()
                raise
            finally:
                self.batches.close()
                self.writer.close()
        return self.spent

    def train(self, report: Callable[[float, str], None]) -> None:
        """The loop. On a GPU, one step is queued while another is computed; anything else waits for both."""
        if self.processes.count > 1:  # sums the gradients of all processes at the end of each step
            devices = [self.machine.device] if self.machine.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)
        if self.training.nonfinite == "skip" and not self.spent.step:
            self.save()  # the state to return to
        self.saved_at = self.clock.seconds()
        row, drain = None, False
        while True:
            if self.processes.agree(self.stopping):
                raise SystemExit("Training was stopped.")
            self.writer.check()
            try:
                row = self.collect(drain) or row
                fraction, near_end = self.fraction()
                due = self.due(fraction)
                drain = bool(self.queue.pending) and (near_end or due is not None)
                if drain:
                    continue  # with nothing queued, the fraction is exact
                if row:
                    report(fraction, line(row))
                    row = None
                if due == "checkpoint":
                    self.save()
                    continue  # as this took time
            except NotFinite as problem:
                with self.deferred.held():
                    self.skip(problem)
                continue
            if due == "end":
                return
            if due == "compilation":
                self.prepare(fraction)
                continue  # as this took time
            if due == "evaluation":
                self.evaluate(fraction)
            self.step(fraction)

    def collect(self, everything: bool) -> dict | None:
        """Write the metrics of finished steps, of all steps if `everything`; the last row, if there is one."""
        row = self.queue.collect(everything)
        if row:
            self.spent.seconds = row["seconds"]
        return row

    def fraction(self) -> tuple[float, bool]:
        """The fraction of the budget at which the next step will begin, and whether it is too near the end to predict.

        The same in all processes. Hours are predicted if steps are queued and exact if not; tokens and flops are exact.
        """
        budget, unit = self.training.budget, self.training.budget_unit
        if unit != "hours":
            spent = self.spent.tokens if unit == "tokens" else self.spent.operations
            return self.processes.agree(spent / budget), False
        now = self.clock.seconds()
        begin = self.queue.end()
        later = begin + (begin - now)  # if the queued steps take twice as long as predicted
        return self.processes.agree(begin / 3600 / budget), self.processes.agree(later / 3600 >= budget)

    def due(self, fraction: float) -> str | None:
        """What comes before the next step, while no step is queued; None if nothing does."""
        save = self.processes.agree(self.clock.seconds() - self.saved_at >= self.checkpoint_seconds)
        save = save or fraction >= 1  # at the end too, because the last evaluation may be killed
        if save and self.spent.step > self.saved["step"]:
            return "checkpoint"
        if fraction >= 1:
            return "end"
        if self.masks(fraction) != self.compiled_masks:
            return "compilation"
        return "evaluation" if self.evaluation_due(fraction) else None

    def step(self, fraction: float) -> None:
        """Queue one optimizer step. Weights, `spent` and the queue change together."""
        queued, spent = self.clock.seconds(), self.spent
        batch, masks = schedules.batch(self.training, fraction), self.masks(fraction)
        multiplier = schedules.rate(self.training, fraction)
        optimizer.set_rates(self.optimizers, multiplier)
        losses = self.backward(batch, masks)
        with self.deferred.held():
            norm = self.update()
            tokens = batch * self.corpus.length
            operations = tokens * self.operations(masks)
            spent.step += 1
            spent.micro_batch, spent.device = self.micro_batch, self.device
            spent.tokens += tokens
            spent.operations += operations
            spent.sequence += batch
            row = {
                "step": spent.step,
                "fraction": fraction,
                "tokens": spent.tokens,
                "lr": multiplier * self.training.learning_rate,
                "batch": batch,
                "masks": masks,
            }
            reading = Reading(self.processes.mean(torch.cat([losses, norm.to(losses).view(1)])))
            self.queue.pending.append(Step(row, reading, queued, tokens, operations))

    def backward(self, batch: int, masks: int) -> Tensor:
        """Add up the gradients of this process's share of the batch, micro-batch by micro-batch; the mean losses."""
        unit = self.micro_batch * self.processes.count
        total = torch.zeros(2 if self.training.detection else 1, device=self.machine.device)
        begin = self.spent.sequence + self.processes.rank * self.micro_batch
        for first in range(begin, begin + batch, unit):
            last = first + unit >= begin + batch
            with nullcontext() if last or self.processes.count == 1 else self.forward.no_sync():
                losses = self.losses(self.batches.take(first, masks, first + unit), first) * (unit / batch)
                loss = losses[0] + self.training.detection * losses[1] if self.training.detection else losses
                self.scaler.scale(loss).backward()
            total += losses.detach()
        return total

    def losses(self, batch: Batch, first: int) -> Tensor:
        """The loss of the micro-batch that begins with sequence `first`; with detection, both losses."""
        if self.training.dropout:
            torch.manual_seed(self.training.seed * 1_000_003 + first)  # so that a resumed run drops the same
        with self.machine.autocast():
            return self.forward(*batch)

    def update(self) -> Tensor:
        """Change the weights by the gradients, which are clipped and then cleared; the norm of the gradients."""
        for each in self.optimizers:
            self.scaler.unscale_(each)
        if self.training.clip is None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
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

    def evaluate(self, fraction: float) -> None:
        """Add the held-out losses to the record, off the clock."""
        with self.clock.paused():
            losses = dict.fromkeys(("heldout_loss", "heldout_nats_per_byte"), 0.0)
            if self.processes.first:
                losses = curve_losses(self.bert, self.corpus.heldout, self.corpus.mask_id, self.machine)
            self.spent.evaluations.append(
                {
                    "fraction": min(fraction, 1.0),
                    "step": self.spent.step,
                    "tokens": self.spent.tokens,
                    "operations": self.spent.operations,
                    "seconds": self.spent.seconds,
                    **{name: self.processes.agree(loss) for name, loss in losses.items()},
                }
            )

    def evaluation_due(self, fraction: float) -> bool:
        """Whether another tenth of the budget is spent since the last evaluation."""
        done = self.spent.evaluations
        return not done or math.floor(EVALUATIONS * fraction) > math.floor(EVALUATIONS * done[-1]["fraction"])

    def save(self) -> None:
        """Start writing a checkpoint. Raises NotFinite if the weights are not finite, as no run can continue there."""
        norm = torch.nn.utils.get_total_norm(list(self.module.parameters()))
        if not norm.isfinite():
            raise NotFinite(self.spent.step, f"the norm of the weights is {norm.item()}")
        self.spent.scaler = self.scaler.state_dict()
        if self.processes.first:
            self.writer.save(self.module, self.optimizers, self.spent)
        self.saved, self.saved_at = asdict(self.spent), self.clock.seconds()

    def save_changes(self) -> None:
        """Start writing a checkpoint if the last one differs."""
        if asdict(self.spent) != self.saved:
            self.save()

    def save_stopped(self) -> None:
        """Write a checkpoint of a run that a signal stops, unless its last steps are not finite."""
        with suppress(NotFinite):
            self.collect(everything=True)
            self.spent.seconds = self.clock.seconds()
            self.save()
            self.writer.wait()

    def skip(self, problem: NotFinite) -> None:
        """Return to the weights of the last checkpoint and continue with the data after the bad step; once."""
        if self.training.nonfinite == "stop" or self.spent.skipped:
            twice = " It happened before, and batches were skipped then." if self.spent.skipped else ""
            way = "" if twice else ", or set pretrain.nonfinite to 'skip' to continue without this batch"
            raise InputError(
                f"{problem}.{twice} The last checkpoint is kept. Lower pretrain.learning_rate or pretrain.clip{way}."
            ) from problem
        self.writer.wait()
        self.processes.wait()  # for the first, which has written it
        spent, restored = self.spent, self.restored()
        what = {"step": problem.step, "sequences": [restored.sequence, spent.sequence], "problem": str(problem)}
        self.spent = replace(  # the lost steps stay spent
            restored,
            seconds=self.clock.seconds(),
            tokens=spent.tokens,
            operations=spent.operations,
            sequence=spent.sequence,
            skipped=[what],
            compilations=spent.compilations,
            compile_seconds=spent.compile_seconds,
        )
        self.queue.pending.clear()
        log.warning("%s. Resuming from step %d after skipping the bad batch.", problem, restored.step)

    def finish(self) -> None:
        """Save that the budget is spent, then the last held-out loss. Raises InputError if no step is left.

        A checkpoint or a compilation after the last step may have spent the last seconds, and steps may have been
        skipped since the last checkpoint. A resumed run has to know of both, or it would train on.
        """
        training, spent = self.training, self.spent
        limit = budget(training.budget, training.budget_unit)
        if not spent.step and not spent.skipped:
            raise InputError(
                f"The budget of {limit} was spent before the first step. Raise pretrain.budget, or set CRAM_COMPILE=0 "
                "if compiling took that long."
            )
        if training.budget_unit == "hours" and spent.seconds / 3600 / training.budget < 1:
            spent.seconds = self.clock.seconds()
        self.save_changes()
        if not spent.step:
            raise InputError(
                f"The budget of {limit} is spent and no trained step is left. {spent.skipped[-1]['problem']}. All "
                "steps were lost, because the only checkpoint was that of step 0. Lower pretrain.learning_rate."
            )
        if not spent.evaluations or spent.evaluations[-1]["step"] < spent.step:
            self.evaluate(1.0)
            self.save_changes()
        self.writer.wait()

    def masks(self, fraction: float) -> int:
        """Tokens of a sequence that are predicted at that fraction of the budget."""
        return masking.masks_per_sequence(schedules.mask_fraction(self.training, fraction), self.corpus.length)

    def operations(self, masks: int) -> float:
        """Floating-point operations per token, forward and backward."""
        sizes = self.bert.vocabulary, self.corpus.length, masks
        return detection.operations_per_token(self.bert.architecture, self.training, *sizes)

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

    def prepare(self, fraction: float) -> None:
        """Compile for the masks at that fraction of the budget if that pays and this machine can."""
        self.compiled_masks, began = self.masks(fraction), self.clock.seconds()
        self.model.use_eager()
        if not self.compiles(fraction):
            return
        try:
            self.model.use_compiler()
            about = self.training, self.corpus, self.machine
            micro_batch.compute(self.model, *about, self.micro_batch, self.compiled_masks)
            self.spent.compilations += 1
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            why = " ".join(str(error).split()[:40])  # the first lines; many more follow
            log.warning("torch.compile failed (%s). Training continues without it.", why)
            self.model.use_eager()
            self.compiler_failed = True
        self.spent.compile_seconds += self.clock.seconds() - began
