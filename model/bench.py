"""What a step of pretraining takes on this machine, by part.

Sequences are random, since speed doesn't depend on them. On a GPU, times are those of its stream, or end when the GPU
is done.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from model import memory, optimizer
from model.bert import Bert
from model.forward import COMPILE_FROM_SECONDS
from model.heldout import Heldout
from model.machine import Machine, matrix_rate
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import SPECIALS, Training

EMBEDDING = "embedding"
ATTENTION = "attention"
CONVOLUTION = "convolution"
FEED_FORWARD = "feed-forward"
HEAD = "vocabulary head and loss"
REST = "norms and sums of the encoder"
OPTIMIZER = "optimizer and clipping"
WAITING = "waiting for batches"
PARTS = (WAITING, EMBEDDING, CONVOLUTION, ATTENTION, FEED_FORWARD, REST, HEAD)  # of a forward and backward pass
TOGETHER = {"cpu": 1, "cuda": 4}  # passes that are timed at once, so that a GPU is not idle at the beginning of each
IN_BLOCKS = {"convolution": CONVOLUTION, "attention": ATTENTION, "ffn": FEED_FORWARD}  # modules


class Speed(NamedTuple):
    """How fast steps are, without compilation or with it."""

    seconds: float  # a step of the whole batch
    tokens: int  # that it reads
    mfu: float  # operations of its matrix products and attention, by the rate of large matrix products

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Measured(NamedTuple):
    """What was measured of training."""

    parameters: int
    checkpoint: int  # its bytes
    micro_batch: int  # sequences
    passes: int  # of a micro-batch, in a step
    parts: dict[str, float]  # seconds of a step by part, eager; they add up to `eager.seconds`
    batch_seconds: float  # to make a micro-batch, on a thread beside training
    pass_seconds: float  # of a micro-batch, forward and backward, eager
    eager: Speed
    compiled: Speed | None = None
    compile_seconds: float = 0.0
    why_not: str = ""  # compiled

    def best(self, seconds: float, device: str) -> tuple[Speed, float]:
        """The speed that a run of so many seconds has, and the seconds in which it compiles first."""
        if self.compiled and seconds >= COMPILE_FROM_SECONDS[device]:
            return self.compiled, self.compile_seconds
        return self.eager, 0.0

    def tokens_in(self, seconds: float, device: str) -> float:
        """The tokens that a run of so many seconds reads."""
        speed, lost = self.best(seconds, device)
        return max(0.0, seconds - lost) * speed.rate


class Marks:
    """When each part of a pass began on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.parts: list[str] = []
        self.events: list[torch.cuda.Event] = []  # on a GPU
        self.moments: list[float] = []  # on a CPU, in seconds

    def begin(self, part: str) -> None:
        """A part begins now, and the one before it ends."""
        self.parts.append(part)
        if self.device.type != "cuda":
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.events.append(event)

    def seconds(self) -> dict[str, float]:
        """The seconds of each part; together, those from the first mark to the last."""
        wait(self.device)
        lasting = [after - before for before, after in itertools.pairwise(self.moments)]
        lasting += [before.elapsed_time(after) / 1000 for before, after in itertools.pairwise(self.events)]
        totals = dict.fromkeys(PARTS, 0.0)
        for part, seconds in zip(self.parts[:-1], lasting, strict=True):
            totals[part] += seconds
        return totals


def wait(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device, limit: float) -> float:
    """The median seconds of this work: once for warm-up, then at least once, for about as long as the limit says."""
    end = time.perf_counter() + limit
    work()
    wait(device)
    found: list[float] = []
    while not found or time.perf_counter() < end:
        began = time.perf_counter()
        work()
        wait(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


class Watch:
    """Marks when the parts of an encoder begin, forward and backward; a context manager."""

    def __init__(self, bert: Bert, marks: Marks) -> None:
        self.bert = bert
        self.marks = marks
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> None:
        bert = self.bert
        self.mark(bert.embedding.register_forward_pre_hook, EMBEDDING)
        self.handles.append(bert.embedding.register_forward_hook(self.leave_embedding))
        for block in bert.blocks:
            for name, part in IN_BLOCKS.items():
                module = getattr(block, name)
                if module is not None:
                    self.watch(module, part)
        self.mark(bert.norm.register_forward_hook, HEAD)  # what follows the last norm of the encoder
        self.mark(bert.norm.register_full_backward_pre_hook, REST)

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def mark(self, register: Callable[..., RemovableHandle], part: str) -> None:
        """Mark that a part begins, whenever the hook is called that `register` registers."""

        def begin(*_: Any) -> None:
            self.marks.begin(part)

        self.handles.append(register(begin))

    def watch(self, module: nn.Module, part: str) -> None:
        """Mark where a module of a block begins and ends."""
        self.mark(module.register_forward_pre_hook, part)
        self.mark(module.register_forward_hook, REST)
        self.mark(module.register_full_backward_pre_hook, part)
        self.mark(module.register_full_backward_hook, REST)

    def leave_embedding(self, module: nn.Module, inputs: object, states: Tensor) -> None:
        """Mark where the embedding ends, and where its backward pass begins, the last of all."""
        self.marks.begin(REST)
        states.register_hook(lambda _: self.marks.begin(EMBEDDING))


def random_corpus(bert: Bert, batch_size: int) -> Corpus:
    """A batch of random sequences, and a held-out one."""
    kind = np.uint16 if bert.vocabulary <= 1 << 16 else np.uint32
    shape = (batch_size + 1, bert.length)
    rows = np.random.default_rng(0).integers(len(SPECIALS), bert.vocabulary, shape, dtype=kind)
    return Corpus(rows[1:], Heldout.of_rows(rows[:1]), bert.vocabulary, bert.specials)


class Trial:
    """A run of pretraining on random sequences, of which single parts are timed, in an empty folder.

    `seconds`: about how long one of its measurements takes.
    """

    def __init__(self, bert: Bert, training: Training, here: Machine, folder: Path, seconds: float) -> None:
        memory.check_memory(bert.architecture, training, bert.vocabulary, bert.length, here)
        endless = training.model_copy(update={"budget": 1.0, "budget_unit": "hours"})  # of epochs there are too few
        self.run = Pretraining(bert, endless, random_corpus(bert, training.batch_size), here, folder)
        self.device = here.device
        self.seconds = seconds
        self.masks = self.run.masks(0.0)
        self.passes = training.batch_size // self.run.micro_batch
        self.together = min(self.passes, TOGETHER[here.device.type])
        self.tokens = training.batch_size * bert.length
        self.limit = matrix_rate(here.device, here.dtype)
        optimizer.set_rates(self.run.optimizers, 0.0)  # the weights stay as they are

    def compute(self) -> None:
        """Read a few micro-batches and compute their losses and gradients, as training does."""
        run = self.run
        sequences = self.together * run.micro_batch
        run.backward(sequences, self.masks)
        run.spent.tokens += sequences * run.corpus.length

    def part_seconds(self) -> dict[str, float]:
        """The seconds of the parts of a pass; medians over several."""
        found: list[dict[str, float]] = []

        def compute() -> None:
            marks = Marks(self.device)
            with Watch(self.run.bert, marks):
                marks.begin(WAITING)
                self.compute()
                marks.begin(WAITING)
            found.append(marks.seconds())

        seconds_of(compute, self.device, 2 * self.seconds)
        return {part: statistics.median(each[part] for each in found[1:]) / self.together for part in PARTS}

    def pass_seconds(self) -> float:
        """The seconds of a pass as a whole. The parts of a compiled pass can't be measured."""
        return seconds_of(self.compute, self.device, self.seconds) / self.together

    def batch_seconds(self) -> float:
        """The seconds in which a thread makes a micro-batch."""
        return seconds_of(lambda: self.run.batches.make(0, self.masks), self.device, self.seconds / 2)

    def optimizer_seconds(self) -> float:
        """The seconds in which the gradients are clipped and the weights change."""
        parameters = list(self.run.module.parameters())
        found: list[float] = []

        def change() -> None:
            self.run.scaler.scale(torch.zeros((), device=self.device))  # as before a pass
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 1e-3)
            wait(self.device)
            began = time.perf_counter()
            self.run.change_weights()
            wait(self.device)
            found.append(time.perf_counter() - began)

        seconds_of(change, self.device, self.seconds / 2)
        return statistics.median(found[1:])

    def compile(self) -> tuple[float, str]:
        """Compile the forward and backward pass. Returns the seconds that it took, and why it failed if it did."""
        run = self.run
        began = time.perf_counter()
        try:
            run.model.use(compiled=True)
            memory.compute(run.model, run.training, run.corpus, run.machine, run.micro_batch, self.masks)
            wait(self.device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            run.model.use(compiled=False)
            return 0.0, "torch.compile failed: " + " ".join(str(error).split()[:20])
        return time.perf_counter() - began, ""

    def speed(self, pass_seconds: float, optimizer_seconds: float) -> Speed:
        """The speed of steps whose passes and changes of weights take so long."""
        seconds = self.passes * pass_seconds + optimizer_seconds
        operations = self.tokens * self.run.operations(self.masks)
        return Speed(seconds, self.tokens, operations / seconds / self.limit)

    def checkpoint_bytes(self) -> int:
        """The size of a checkpoint."""
        bert = self.run.bert
        return sum(memory.sizes(bert.architecture, self.run.training, bert.vocabulary, bert.length))

    def close(self) -> None:
        """End the threads of the run."""
        self.run.batches.close()
        self.run.writer.close()


def measure(trial: Trial, compiles: bool, begin: Callable[[str], None]) -> Measured:
    """Measure a step of pretraining by parts. `begin` is called with what is done next."""
    begin("forward and backward pass")
    of_pass = trial.part_seconds()
    begin("optimizer")
    of_optimizer = trial.optimizer_seconds()
    begin("making batches")
    of_batch = trial.batch_seconds()
    eager = sum(of_pass.values())
    parts = {part: trial.passes * seconds for part, seconds in of_pass.items() if seconds}
    found = Measured(
        parameters=sum(p.numel() for p in trial.run.bert.parameters()),
        checkpoint=trial.checkpoint_bytes(),
        micro_batch=trial.run.micro_batch,
        passes=trial.passes,
        parts=parts | {OPTIMIZER: of_optimizer},
        batch_seconds=of_batch,
        pass_seconds=eager,
        eager=trial.speed(eager, of_optimizer),
    )
    return with_compiled(found, trial, begin) if compiles else found


def with_compiled(found: Measured, trial: Trial, begin: Callable[[str], None]) -> Measured:
    """The same with the speed of compiled steps, or with what prevents them."""
    begin("compiling")
    of_compiler, why_not = trial.compile()
    if why_not:
        return found._replace(why_not=why_not)
    begin("the compiled pass")
    speed = trial.speed(trial.pass_seconds(), found.parts[OPTIMIZER])
    return found._replace(compiled=speed, compile_seconds=of_compiler)
