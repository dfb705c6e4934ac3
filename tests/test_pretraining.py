import concurrent.futures
import functools
import io
import json
import logging
import math
import os
import resource
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model import InputError, bert, checkpoint, memory, micro_batch, pretraining, processes, schedules
from model import clock as clocks
from model.batches import Batches
from model.heldout import Heldout
from model.machine import Machine, Reading
from model.masking import Corpus
from model.settings import Architecture, Training
from model.signals import Deferred
from model.steps import Step, StepQueue

SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, SPECIALS, MASK_ID = 40, 5, 4
LENGTH = 16
TIMES = ("seconds", "tokens_per_second", "mfu", "compile_seconds", "compilations")
RATE = 1e9  # of this machine's matrix products, said to be
CPU = torch.device("cpu")
RECIPES = {
    "adamw": {},
    "muon": {"optimizer": "muon", "dropout": 0.1, "mask_fraction": 0.4, "last_mask_fraction": 0.1, "batch_ramp": 0.9},
    "adam": {"optimizer": "adam", "dropout": 0.1, "batch_ramp": 0.0},
    "adafactor": {"optimizer": "adafactor", "schedule": "cosine", "warmup": 0.2, "budget_unit": "flops", "budget": 9e6},
    "radam": {"optimizer": "radam", "last_mask_fraction": 0.5},
    "sgd": {"optimizer": "sgd", "clip": None},
}
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


class Stop(BaseException):
    """What stops a run: no Exception."""


def corpus(sequences: int = 50, heldout: int = 5, length: int = LENGTH) -> Corpus:
    """Sequences that count up, from some number on, over and over."""
    starts = np.random.default_rng(0).integers(0, 20, sequences + heldout)
    rows = SPECIALS + (starts[:, None] + np.arange(length)) % 20
    rows = rows.astype(np.uint16)
    return Corpus(rows[:sequences], Heldout.of_rows(rows[sequences:]), VOCABULARY, MASK_ID, SPECIALS)


def numbered(sequences: int) -> Corpus:
    """Sequences that hold their own number only."""
    rows = SPECIALS + np.repeat(np.arange(sequences)[:, None], LENGTH, axis=1).astype(np.uint16)
    return Corpus(rows, Heldout.of_rows(rows[:3]), SPECIALS + sequences, MASK_ID, SPECIALS)


def build(
    folder: Path,
    data: Corpus | None = None,
    micro_batch: int = 2,
    dtype: torch.dtype = torch.float32,
    compiles: bool = False,
    **changes,
) -> pretraining.Pretraining:
    """A run of a small model: about 12 steps of up to 8 sequences by default."""
    data = data or corpus()
    folder.mkdir(exist_ok=True)
    settings = {"budget": 70 * LENGTH, "budget_unit": "tokens", "batch_size": 8, "learning_rate": 0.01} | changes
    model = bert.Bert(SMALL, data.vocabulary, data.length, seed=1)
    here = Machine(CPU, dtype, compiles, micro_batch, compiles_always=compiles)
    return pretraining.Pretraining(model, Training(**settings), data, here, folder)


def quiet(fraction: float, note: str) -> None:
    """Report to nobody."""


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / checkpoint.METRICS).read_text().splitlines()]


def trained(folder: Path, *given, seconds: float | None = None, **changes) -> pretraining.Pretraining:
    """A run that has spent its budget."""
    run = build(folder, *given, **changes)
    run.run(quiet, seconds)
    return run


def stopped(folder: Path, step: int, *given, seconds: float | None = None, **changes) -> None:
    """Leave a run that was stopped after so many of its steps."""
    with pytest.raises(Stop):
        build(folder, *given, **changes).run(stop_at(step), seconds)


def finite(run: pretraining.Pretraining) -> bool:
    return all(value.isfinite().all() for value in run.bert.state_dict().values())


def states(run: pretraining.Pretraining) -> dict[str, bytes]:
    """Weights and optimizers, as bytes."""
    parts = {name: value.numpy().tobytes() for name, value in run.bert.state_dict().items()}
    for number, optimizer in enumerate(run.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            parts |= {f"{number}.{index}.{name}": value.numpy().tobytes() for name, value in state.items()}
    return parts


def outcome(run: pretraining.Pretraining) -> tuple[dict, list, list, dict]:
    """All that a run leaves, but for its times: weights and optimizers, metrics, evaluations, what was spent."""
    spent = asdict(run.spent)
    timeless = [
        [{k: v for k, v in row.items() if k not in TIMES} for row in rows]
        for rows in (metrics(run.folder), spent.pop("evaluations"))
    ]
    return states(run), *timeless, {k: v for k, v in spent.items() if k not in TIMES} | run.scaler.state_dict()


def stop_at(step: int) -> Callable[[float, str], None]:
    """A report that stops the run after so many steps."""
    calls = iter(range(1, 1000))

    def report(fraction: float, note: str) -> None:
        if next(calls) == step:
            raise Stop

    return report


def nothing() -> None:
    """Do nothing."""


def do_at(call: int, function: Callable, before: Callable = nothing, after: Callable = nothing) -> Callable:
    """The function, with something else around its call of this number."""
    calls = iter(range(1, 100_000))

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        number = next(calls)
        if number == call:
            before()
        result = function(*args, **kwargs)
        if number == call:
            after()
        return result

    return wrapped


@pytest.fixture(scope="module", autouse=True)
def unmeasured_machine():
    """The machine's rate is not measured, which takes seconds, and batches of 8 grow by 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "matrix_rate", lambda device, dtype: RATE)
        patch.setattr(schedules, "RAMP_UNIT", 2)
        yield


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory) -> Callable[[str], tuple[dict, list, list, dict]]:
    """The outcome of the run of a recipe, never stopped."""
    return functools.cache(lambda recipe: outcome(trained(tmp_path_factory.mktemp("unstopped"), **RECIPES[recipe])))


@pytest.fixture(params=[0, 1], ids=["waits for each step", "one step ahead"])
def ahead(request, monkeypatch) -> None:
    """Rows of metrics are written as soon as a step is through, or after the next one has begun, as on a GPU."""
    monkeypatch.setitem(pretraining.AHEAD, "cpu", request.param)


class FakeTime:
    """A clock that only moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 5000.0

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: float, function: Callable) -> Callable:
        """The function, taking so long."""

        @functools.wraps(function)
        def slow(*args, **kwargs):
            self.now += seconds
            return function(*args, **kwargs)

        return slow


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    """Time in which a micro-batch of training takes 1 s, a held-out loss 1,000 s, and nothing else any."""
    time, run = FakeTime(), pretraining.Pretraining
    monkeypatch.setattr(clocks, "time", time)
    monkeypatch.setattr(run, "loss", time.taking(1, run.loss))
    monkeypatch.setattr(pretraining, "heldout_loss", time.taking(1000, pretraining.heldout_loss))
    return time


@pytest.fixture
def seen(monkeypatch) -> list[list[int]]:
    """The first token of each sequence of each micro-batch that is trained on, as the run goes on."""
    batches, take = [], Batches.take

    def recording(*args):
        tokens, positions, labels = take(*args)
        batches.append(tokens.scatter(1, positions, labels)[:, 0].tolist())
        return tokens, positions, labels

    monkeypatch.setattr(Batches, "take", recording)
    return batches


# Resume


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_stopped_after_any_step_ends_as_if_never_stopped(tmp_path, unstopped, recipe, ahead):
    steps = len(unstopped(recipe)[1])
    assert steps >= 7
    every = recipe == "muon" and not pretraining.AHEAD["cpu"]
    for step in range(1, steps + 1) if every else (1, 4):
        folder = tmp_path / str(step)
        stopped(folder, step, **RECIPES[recipe])
        resumed = build(folder, **RECIPES[recipe])
        assert resumed.spent.step == len(metrics(folder)) >= step  # all rows are there
        resumed.run(quiet)
        assert outcome(resumed) == unstopped(recipe)


@pytest.mark.parametrize("recipe", ["adamw", "muon"])
def test_a_run_stopped_after_every_step_ends_as_if_never_stopped(tmp_path, unstopped, recipe):
    for _ in range(len(unstopped(recipe)[1])):
        stopped(tmp_path, 1, **RECIPES[recipe])
    assert outcome(trained(tmp_path, **RECIPES[recipe])) == unstopped(recipe)


@pytest.mark.parametrize("sizes", [(2, 8, 1), (1, 2)])
def test_on_machines_of_other_micro_batches_a_run_takes_the_same_steps(tmp_path, unstopped, sizes):
    expected = unstopped("adamw")[1]
    for step in range(1, len(expected)):
        stopped(tmp_path, 1, micro_batch=sizes[step % len(sizes)])
    trained(tmp_path)
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in metrics(tmp_path)]
    assert rows == [pytest.approx(row, rel=1e-4) for row in expected]


PLACES = {
    "batch": (Batches, "take", 12),
    "forward": (bert.Bert, "forward", 13),
    "backward": (torch.Tensor, "backward", 12),
    "clipping": (torch.nn.utils, "clip_grad_norm_", 5),
    "update": (torch.optim.AdamW, "step", 5),
    "end of update": (torch.optim.AdamW, "zero_grad", 5),
    "counting": (pretraining, "operations", 5),
    "row": (pretraining, "Reading", 5),
    "reading the row": (Reading, "read", 5),
    "writing the row": (json, "dumps", 5),
    "evaluation": (pretraining, "heldout_loss", 4),
    "last evaluation": (pretraining, "heldout_loss", 9),
    "checkpoint": (checkpoint, "save_file", 1),
    "end of checkpoint": (Path, "replace", 1),
}
UPDATE = ("clipping", "update", "end of update", "counting", "row")  # where a signal has to wait
STOPS = {
    "error": (Stop, None),
    "SIGTERM before": (signal.SIGTERM, None),
    "SIGINT after": (None, signal.SIGINT),
}


def stopper(what: type | signal.Signals | None) -> Callable[[], None]:
    def stop() -> None:
        if what is Stop:
            raise Stop
        os.kill(os.getpid(), what)

    return nothing if what is None else stop


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_stopped_anywhere_ends_as_if_never_stopped(tmp_path, monkeypatch, unstopped, place, stop):
    monkeypatch.setitem(pretraining.AHEAD, "cpu", len(place) % 2)
    owner, name, call = PLACES[place]
    for seconds in (0.0, None) if stop == "error" else (None,):  # a checkpoint each step, or when it is stopped only
        folder = tmp_path / str(seconds)
        with monkeypatch.context() as patch:
            around = (stopper(what) for what in STOPS[stop])
            patch.setattr(owner, name, do_at(call, getattr(owner, name), *around))
            with pytest.raises((Stop, SystemExit, KeyboardInterrupt)) as end:
                trained(folder, seconds=seconds, **RECIPES["muon"])
        assert end.type is {"error": Stop, "SIGTERM": SystemExit, "SIGINT": KeyboardInterrupt}[stop.split()[0]]
        assert end.type is not SystemExit or end.value.code == 128 + signal.SIGTERM
        resumed = build(folder, **RECIPES["muon"])
        assert [row["step"] for row in metrics(folder)] == list(range(1, resumed.spent.step + 1))
        if place in UPDATE and stop != "error":
            assert resumed.spent.step == 5
        resumed.run(quiet)
        assert outcome(resumed) == unstopped("muon")


def fork(action: Callable[[], object]) -> int:
    """Start a child process that does this, for two minutes at most; its id."""
    child = os.fork()
    if not child:
        signal.alarm(120)
        try:
            action()
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    return child


def status(child: int) -> int:
    """How a child process has ended: 0, or the number of the signal that ended it, or a larger number after an error."""
    return os.waitpid(child, 0)[1]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KILLS = [("muon", "update", call) for call in (1, 2, 3, 5, 8)] + [("adamw", "update", call) for call in (2, 7)]
KILLS += [("muon", place, call) for place in ("backward", "reading the row", "half a checkpoint") for call in (1, 2)]


@pytest.mark.parametrize(("recipe", "place", "call"), KILLS)
def test_a_killed_run_ends_as_if_never_killed(tmp_path, monkeypatch, unstopped, recipe, place, call):
    calls, save, expected = iter(range(1, 1000)), checkpoint.Writer.save, unstopped(recipe)

    def save_each_third(writer, *what) -> None:
        if next(calls) % 3 == 0:
            save(writer, *what)
            writer.wait()

    def write_half_and_kill() -> None:
        (tmp_path / f"{checkpoint.CHECKPOINT}.half").write_bytes(b"half")
        kill()

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Writer, "save", save_each_third)
        if place == "half a checkpoint":
            patch.setattr(checkpoint, "save_file", do_at(call + 1, checkpoint.save_file, write_half_and_kill))
        else:
            owner, name, _ = PLACES[place]
            patch.setattr(owner, name, do_at(call, getattr(owner, name), after=kill))
        assert status(fork(lambda: trained(tmp_path, seconds=0.0, **RECIPES[recipe]))) == signal.SIGKILL
    saved = 3 * call if place == "half a checkpoint" else len(metrics(tmp_path)) // 3 * 3
    resumed = build(tmp_path, **RECIPES[recipe])
    assert resumed.spent.step == len(metrics(tmp_path)) == saved
    resumed.run(quiet)
    assert outcome(resumed) == expected


def test_a_disk_that_is_full_keeps_the_old_checkpoint(tmp_path, unstopped):
    def train_until_full() -> None:
        run = build(tmp_path)

        def limit(fraction: float, note: str) -> None:
            if run.spent.step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

        with pytest.raises(InputError, match="File too large"):
            run.run(limit, 0.0)

    assert status(fork(train_until_full)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.CHECKPOINT, checkpoint.METRICS}
    resumed = build(tmp_path)
    assert 1 <= resumed.spent.step == len(metrics(tmp_path)) <= 2  # a busy machine may skip a checkpoint
    resumed.run(quiet)
    assert outcome(resumed) == unstopped("adamw")


def test_a_finished_run_trains_no_further(tmp_path, unstopped, seen):
    trained(tmp_path)
    seen.clear()
    again = trained(tmp_path)
    assert not seen
    assert outcome(again) == unstopped("adamw")


def test_sequences_are_read_in_order_epoch_after_epoch_in_the_micro_batches_of_each_machine(tmp_path, seen):
    stopped(tmp_path, 4, numbered(19), micro_batch=2, budget=100 * LENGTH)
    seen_before = [number for batch in seen for number in batch]
    seen.clear()
    spent = trained(tmp_path, numbered(19), micro_batch=1, budget=100 * LENGTH).spent
    assert {len(batch) for batch in seen} == {1}
    read = seen_before + [number for batch in seen for number in batch]
    assert len(read) == spent.tokens // LENGTH == spent.sequence > 5 * 19
    assert read == [SPECIALS + index % 19 for index in range(len(read))]


def test_training_goes_on_while_a_checkpoint_is_written_as_it_was_at_its_step(tmp_path, monkeypatch, unstopped):
    run, may_write, write = build(tmp_path), threading.Event(), checkpoint.save_file
    written = tmp_path / "written"
    written.mkdir()

    def slow(*args, **kwargs) -> None:
        assert may_write.wait(60)
        write(*args, **kwargs)

    def report(fraction: float, note: str) -> None:
        if run.spent.step == 2:
            run.save()
        if run.spent.step == 5:
            assert not (tmp_path / checkpoint.CHECKPOINT).exists()
            may_write.set()
            run.writer.wait()
            for name in (checkpoint.CHECKPOINT, checkpoint.METRICS):
                shutil.copy(tmp_path / name, written)

    monkeypatch.setattr(checkpoint, "save_file", slow)
    run.run(report)
    resumed = build(written)
    assert resumed.spent.step == len(metrics(written)) == 2
    resumed.run(quiet)
    assert outcome(resumed) == outcome(run) == unstopped("adamw")


def test_a_checkpoint_that_fails_stops_the_run_at_its_next_step(tmp_path, monkeypatch):
    run, write = build(tmp_path), checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", do_at(2, write, lambda: os.stat("/nowhere")))

    def report(fraction: float, note: str) -> None:
        if run.spent.step in (2, 4):
            run.save()
            concurrent.futures.wait([run.writer.writing])

    with pytest.raises(InputError, match="No checkpoint can be written"):
        run.run(report)
    assert run.spent.step == 5
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.CHECKPOINT, checkpoint.METRICS}
    assert build(tmp_path).spent.step == 2


@pytest.mark.parametrize(
    ("spoil", "sequences"),
    [
        (lambda path: path.write_bytes(b"junk"), 50),
        (lambda path: os.truncate(path, 9000), 50),
        (lambda path: None, 60),  # of a model with another vocabulary
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_file(tmp_path, spoil, sequences):
    stopped(tmp_path, 3, numbered(50))
    spoil(tmp_path / checkpoint.CHECKPOINT)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors"):
        build(tmp_path, numbered(sequences))


def test_the_last_row_is_the_last_that_is_whole(tmp_path):
    assert checkpoint.last_row(tmp_path) is None
    for text, row in {"": None, '{"step"': None, '{"step": 1}\n': 1, '{"step": 1}\n{"step": 2}\n{"st': 2}.items():
        (tmp_path / checkpoint.METRICS).write_text(text)
        assert (checkpoint.last_row(tmp_path) or {}).get("step") == row


# Budget and clock


@pytest.mark.parametrize("budget", [1, LENGTH, 70 * LENGTH, 70 * LENGTH + 1, 100 * LENGTH])
@pytest.mark.parametrize("unit", ["tokens", "flops"])
def test_a_run_ends_within_one_step_of_its_budget(tmp_path, unit, budget):
    budget *= 6000 if unit == "flops" else 1
    spent = trained(tmp_path, budget=budget, budget_unit=unit, last_mask_fraction=0.5).spent
    rows = metrics(tmp_path)
    each = [row["batch"] * LENGTH for row in rows]
    assert rows[-1]["tokens"] == spent.tokens == sum(each)
    operations = [bert.operations(SMALL, VOCABULARY, LENGTH, row["masks"]) for row in rows]
    if unit == "flops":
        each = np.multiply(each, operations).tolist()
        assert spent.operations == pytest.approx(sum(each))
    assert sum(each) >= budget > sum(each[:-1])


def test_hours_are_on_the_clock_without_heldout_evaluation(tmp_path, clock):
    spent = trained(tmp_path, budget=200 / 3600, budget_unit="hours").spent
    rows = metrics(tmp_path)
    assert len(spent.evaluations) > 5
    assert spent.seconds == rows[-1]["seconds"] == sum(row["batch"] // 2 for row in rows)  # 1 s each, and nothing else
    assert 200 <= spent.seconds < 200 + rows[-1]["batch"] // 2


def test_compiling_data_and_copying_checkpoints_are_on_the_clock(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(torch, "compile", clock.taking(20, lambda model, **settings: model))
    monkeypatch.setattr(Batches, "take", clock.taking(2, Batches.take))
    monkeypatch.setattr(checkpoint.Writer, "save", clock.taking(7, checkpoint.Writer.save))
    settings = {"budget": 100 / 3600, "budget_unit": "hours", "batch_ramp": 0.0}
    spent = build(tmp_path, compiles=True, **settings).run(quiet, 0.0)
    compiling, step, save = 20, 4 * (1 + 2), 7
    assert spent.step == math.ceil((100 - compiling) / (step + save))
    assert spent.seconds == compiling + spent.step * (step + save) - save  # to the end of the last step
    assert (spent.compilations, spent.compile_seconds) == (1, compiling)


@pytest.mark.parametrize("work", ["checkpoint", "compiler"])
@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed in the last evaluation"])
def test_a_resumed_run_knows_that_a_checkpoint_or_the_compiler_has_spent_the_rest(
    tmp_path, clock, monkeypatch, work, killed
):
    settings = {"budget": 40 / 3600, "budget_unit": "hours", "batch_ramp": 0.0}
    if work == "checkpoint":
        monkeypatch.setattr(checkpoint.Writer, "save", clock.taking(50, checkpoint.Writer.save))
    else:  # for the second number of masks, after steps that are in a checkpoint
        settings |= FALLING
        slow = do_at(2, lambda model, **settings: model, nothing, clock.taking(50, nothing))
        monkeypatch.setattr(torch, "compile", slow)
    copies = tmp_path / "killed"

    def copy_then_evaluate(*args) -> float:
        run.writer.wait()
        shutil.copytree(tmp_path / "run", copies, dirs_exist_ok=True)
        return 3.0

    monkeypatch.setattr(pretraining, "heldout_loss", copy_then_evaluate)
    run = build(tmp_path / "run", compiles=work == "compiler", **settings)
    steps = run.run(quiet, 0.0).step
    resumed = build(copies if killed else tmp_path / "run", compiles=work == "compiler", **settings)
    assert resumed.spent.seconds == run.spent.seconds >= 40
    assert resumed.run(quiet).step == steps == len(metrics(resumed.folder))
    assert steps == 1 or work == "compiler"


def test_a_resumed_run_has_the_hours_that_were_left(tmp_path, clock):
    settings = {"budget": 100 / 3600, "budget_unit": "hours"}
    whole = trained(tmp_path / "whole", **settings)
    steps = len(metrics(whole.folder))
    for step in (1, steps // 2, steps - 1):
        folder = tmp_path / str(step)
        stopped(folder, step, **settings)
        clock.now += 10_000  # while nothing runs
        resumed = build(folder, **settings)
        assert resumed.spent.seconds == metrics(folder)[-1]["seconds"]
        resumed.run(quiet)
        assert outcome(resumed) == outcome(whole)
        assert metrics(folder) == metrics(whole.folder)  # times too
        assert resumed.spent.seconds == whole.spent.seconds


def test_the_clock_stands_still_when_a_heldout_evaluation_is_stopped(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(pretraining, "heldout_loss", do_at(2, pretraining.heldout_loss, stopper(Stop)))
    with pytest.raises(Stop):
        build(tmp_path, budget=100 / 3600, budget_unit="hours").run(quiet)
    stopped = build(tmp_path, budget=100 / 3600, budget_unit="hours")
    assert stopped.spent.seconds == metrics(tmp_path)[-1]["seconds"] < 100


def test_a_step_that_is_stopped_is_on_the_clock(tmp_path, clock, monkeypatch):
    settings = {"budget": 100 / 3600, "budget_unit": "hours", "batch_ramp": 0.0}
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", do_at(4 * 2 + 3, torch.Tensor.backward, stopper(Stop)))
        with pytest.raises(Stop):
            build(tmp_path, **settings).run(quiet)
    resumed = build(tmp_path, **settings)
    assert (resumed.spent.step, resumed.spent.seconds) == (2, 11)
    assert resumed.run(quiet).seconds == 103


@pytest.mark.parametrize(("budget", "step", "apart"), [(20, 1, 5), (400, 4, 40), (24 * 3600, 300, 600)])
def test_checkpoints_are_a_tenth_of_the_budget_apart_within_bounds(tmp_path, clock, monkeypatch, budget, step, apart):
    saved, run = [], pretraining.Pretraining
    monkeypatch.setattr(checkpoint.Writer, "save", lambda *args: saved.append(clock.now))
    monkeypatch.setattr(pretraining, "heldout_loss", lambda *args: 0.0)
    monkeypatch.setattr(run, "loss", clock.taking(step - 1, run.loss))
    build(tmp_path, budget=budget / 3600, budget_unit="hours", batch_size=2).run(quiet)
    assert {later - earlier for earlier, later in pairwise(saved[:-1])} == {apart}
    assert saved[-1] == clock.now


def test_a_budget_spent_before_the_first_step_is_refused(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(torch, "compile", clock.taking(20, lambda model, **settings: model))
    with pytest.raises(InputError, match=r"10 seconds .*pretrain\.budget"):
        trained(tmp_path, compiles=True, budget=10 / 3600, budget_unit="hours")


# A device that computes by itself, as a GPU does


class FakeDevice:
    """Computes what is queued, one after the other, while the host's time goes on: a GPU in the time of FakeTime."""

    def __init__(self, time: FakeTime) -> None:
        self.time, self.free, self.idle, self.steps, self.waits = time, time.now, 0.0, [], 0

    def queue(self, seconds: float) -> None:
        """Work that takes so long, after all that is queued."""
        self.idle += max(0.0, self.time.now - self.free)
        self.free = max(self.free, self.time.now) + seconds

    def wait(self, until: float) -> None:
        """The host does nothing until then."""
        self.waits += 1
        self.time.now = max(self.time.now, until)


@pytest.fixture
def device(monkeypatch) -> FakeDevice:
    """A micro-batch takes about 1 s of the device and 0.2 s of the host, which waits only to read a loss."""
    time, run = FakeTime(), pretraining.Pretraining
    fake, uneven, loss, step = FakeDevice(time), np.random.default_rng(0), run.loss, run.step

    class Reading:
        def __init__(self, values: torch.Tensor) -> None:
            self.values, self.computed = values, fake.free

        def read(self) -> list[float]:
            fake.wait(self.computed)
            return self.values.tolist()

    def queued_loss(*args) -> torch.Tensor:
        time.now += 0.2
        fake.queue(uneven.uniform(0.9, 1.1))
        return loss(*args)

    def recorded_step(*args) -> None:
        began = max(time.now, fake.free)
        step(*args)
        fake.steps.append((began - 5000, fake.free - 5000))

    monkeypatch.setitem(pretraining.AHEAD, "cpu", 1)
    monkeypatch.setattr(clocks, "time", time)
    monkeypatch.setattr(pretraining, "Reading", Reading)
    monkeypatch.setattr(run, "loss", queued_loss)
    monkeypatch.setattr(run, "step", recorded_step)
    return fake


@pytest.mark.parametrize("budget", [10, 41, 200, 203.5])
def test_on_a_gpu_too_the_step_that_spends_the_budget_is_the_last(tmp_path, device, budget):
    spent = build(tmp_path, budget=budget / 3600, budget_unit="hours", batch_ramp=0.0).run(quiet)
    begun, ended = device.steps[-1]
    assert begun < budget <= ended
    assert spent.step == len(device.steps)
    assert spent.seconds == metrics(tmp_path)[-1]["seconds"] == pytest.approx(ended)


def test_on_a_gpu_too_schedules_go_by_the_time_at_which_a_step_begins(tmp_path, device):
    settings = TRAPEZOID | {"budget": 400 / 3600, "budget_unit": "hours"}
    run = trained(tmp_path, **settings)
    rows = metrics(tmp_path)
    for row, (begun, ended) in zip(rows, device.steps, strict=True):
        assert abs(400 * row["fraction"] - begun) < 0.3 * (ended - begun)
        assert row["lr"] == 0.01 * schedules.rate(run.training, row["fraction"])
    assert [row["seconds"] for row in rows] == pytest.approx([ended for _, ended in device.steps])


def test_a_gpu_does_not_wait_for_the_host_but_the_host_for_it_once_a_step(tmp_path, device):
    spent = build(tmp_path, budget=1000 / 3600, budget_unit="hours", batch_ramp=0.0).run(quiet)
    assert device.waits == spent.step > 220
    assert device.idle < 0.01 * spent.seconds  # before held-out losses, the last steps and checkpoints


# Schedules, batches, gradients


FALLING = {"mask_fraction": 0.4, "last_mask_fraction": 0.1}
TRAPEZOID = {"schedule": "trapezoid", "warmup": 0.1, "cooldown": 0.4, "floor": 0.1, "batch_ramp": 0.8} | FALLING
SCHEDULED = {"triangle": {}, "trapezoid": TRAPEZOID}


@pytest.mark.parametrize("unit", ["tokens", "flops", "hours"])
@pytest.mark.parametrize("name", SCHEDULED)
def test_rate_batch_and_masks_are_those_of_the_budget_spent_before_each_step(tmp_path, clock, unit, name):
    budget = {"tokens": 400 * LENGTH, "flops": 6e7, "hours": 250 / 3600}[unit]
    run = trained(tmp_path, budget=budget, budget_unit=unit, **SCHEDULED[name])
    rows = metrics(tmp_path)
    each = [row["batch"] * LENGTH * bert.operations(SMALL, VOCABULARY, LENGTH, row["masks"]) for row in rows]
    after = {
        "tokens": [row["tokens"] for row in rows],
        "flops": np.cumsum(each),
        "hours": [row["seconds"] / 3600 for row in rows],
    }[unit]
    assert [row["fraction"] for row in rows] == pytest.approx([0, *(value / budget for value in after[:-1])])
    assert after[-1] >= budget > after[-2]
    for row in rows:
        assert row["lr"] == 0.01 * schedules.rate(run.training, row["fraction"])
        assert row["batch"] == schedules.batch(run.training, row["fraction"])
        masked = schedules.mask_fraction(run.training, row["fraction"])
        assert row["masks"] == max(1, round(masked * LENGTH))
    assert {row["batch"] for row in rows} == {2, 4, 6, 8}
    assert len({row["masks"] for row in rows}) == (5 if name == "trapezoid" else 1)
    floor, slope = (0.1, 0.9 / 0.4) if name == "trapezoid" else (0, 4)
    assert max(row["lr"] for row in rows) > 0.0095
    assert 0.01 * floor < rows[-1]["lr"] <= 0.01 * (floor + slope * (after[-1] - after[-2]) / budget)


@pytest.mark.parametrize("recipe", ["adamw", "muon"])
def test_the_rates_and_masks_used_are_those_recorded(tmp_path, monkeypatch, recipe):
    rates, masks, set_rates, take = [], [], pretraining.optimizer.set_rates, Batches.take

    def recording_rates(optimizers, multiplier):
        set_rates(optimizers, multiplier)
        rates.append([{group["lr"] for group in optimizer.param_groups} for optimizer in optimizers])

    def recording_masks(*args):
        batch = take(*args)
        masks.append(batch[1].shape[1])
        return batch

    monkeypatch.setattr(pretraining.optimizer, "set_rates", recording_rates)
    monkeypatch.setattr(Batches, "take", recording_masks)
    training = trained(tmp_path, **RECIPES[recipe]).training
    rows = metrics(tmp_path)
    assert masks == [row["masks"] for row in rows for _ in range(row["batch"] // 2)]
    for row, used in zip(rows, rates, strict=True):
        assert used.pop() == {row["lr"]}
        ratio = training.matrix_learning_rate / training.learning_rate
        assert [list(each) for each in used] == ([[pytest.approx(row["lr"] * ratio)]] if recipe == "muon" else [])


CHANGES = {"budget": 30 * LENGTH, "batch_size": 16, "batch_ramp": 0.0, "learning_rate": 1e-3, "weight_decay": 0.5}
CHANGES |= {"decay_norms": True, "beta1": 0.5, "beta2": 0.9, "adam_eps": 1e-3, "clip": 0.01, "dropout": 0.5}
CHANGES |= {"mask_fraction": 0.5, "last_mask_fraction": 0.5, "floor": 0.5, "seed": 1}


@pytest.mark.parametrize("setting", CHANGES)
def test_no_setting_of_training_is_ignored(tmp_path, unstopped, setting):
    name = "blocks.0.ffn.dense_out.weight"
    changed = states(trained(tmp_path, **{setting: CHANGES[setting]}))
    assert changed[name] != unstopped("adamw")[0][name]


@pytest.mark.parametrize(("batch", "micro_batch", "used"), [(6, 4, 3), (7, 5, 1), (8, 100, 8), (8, 8, 8), (1, 4, 1)])
def test_the_batch_is_the_recipes_whatever_the_machines_micro_batch(tmp_path, seen, batch, micro_batch, used):
    trained(tmp_path, micro_batch=micro_batch, batch_size=batch, batch_ramp=0.0, budget=30 * LENGTH)
    assert {row["batch"] for row in metrics(tmp_path)} == {batch}
    assert {len(rows) for rows in seen} == {used}
    assert len(seen) == batch // used * math.ceil(30 / batch)


def test_gradients_are_clipped(tmp_path, monkeypatch):
    norms, step = [], torch.optim.AdamW.step

    def recording(self, *args):
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for g in self.param_groups for p in g["params"])))
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", recording)
    for clip in (0.05, None):
        norms.clear()
        build(tmp_path / str(clip), clip=clip).run(quiet)
        recorded = [row["gradient_norm"] for row in metrics(tmp_path / str(clip))]
        assert min(recorded) > 0.05  # as they were before
        assert norms == pytest.approx([clip] * len(norms) if clip else recorded, rel=1e-3)


def test_the_gradient_and_the_loss_of_a_row_are_those_of_the_whole_batch_before_the_step(tmp_path):
    """Steps of plain gradient descent are steps on the mean loss of all sequences, computed at once."""
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "clip": None, "batch_ramp": 0.0}
    run = trained(tmp_path, budget=24 * LENGTH, schedule="dive", **settings)
    model = bert.Bert(SMALL, VOCABULARY, LENGTH, seed=1)
    rows = metrics(tmp_path)
    assert len(rows) == 3
    for row in rows:
        loss = model(*Batches(corpus(), 8, 0, CPU).make(row["tokens"] // LENGTH - 8, 4))
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= row["lr"] * gradient
    for mine, theirs in zip(model.parameters(), run.bert.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "field"), [({"sequences": 7}, "batch_size"), ({"heldout": 0}, "heldout_fraction")])
def test_a_corpus_without_a_batch_or_without_held_out_text_is_refused(tmp_path, sizes, field):
    with pytest.raises(InputError, match=field):
        build(tmp_path, corpus(**sizes))


# Metrics


def test_metrics_have_one_row_a_step_and_agree_with_each_other(tmp_path, ahead):
    spent = trained(tmp_path, **RECIPES["muon"]).spent
    rows = metrics(tmp_path)
    names = {"step", "fraction", "tokens", "lr", "batch", "masks", "loss", "gradient_norm"}
    assert all(row.keys() == names | {"seconds", "tokens_per_second", "mfu"} for row in rows)
    assert [row["step"] for row in rows] == list(range(1, spent.step + 1))
    assert [row["tokens"] for row in rows] == np.cumsum([row["batch"] * LENGTH for row in rows]).tolist()
    assert rows[-1]["tokens"] == spent.tokens
    seconds = [0.0, *(row["seconds"] for row in rows)]
    for row, (before, after) in zip(rows, pairwise(seconds), strict=True):
        assert before < after
        assert row["tokens_per_second"] == row["batch"] * LENGTH / (after - before)
        work = row["tokens_per_second"] * bert.operations(SMALL, VOCABULARY, LENGTH, row["masks"])
        assert row["mfu"] == pytest.approx(work / RATE)
        assert row["gradient_norm"] > 0
    assert abs(rows[0]["loss"] - math.log(VOCABULARY)) < 0.2


def test_steps_that_are_collected_together_share_the_time_since_the_last():
    file, clock = io.StringIO(), SimpleNamespace(seconds=lambda: 8.0)
    queue = StepQueue(clock, 2.0, file, Deferred(), limit=1e9, scaled=False, ahead=0)
    for step in range(3):
        queue.pending.append(Step({"step": step}, Reading(torch.tensor([3.0, 1.0])), 0.0, 128, 1e6))
    queue.collect(everything=True)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [row["seconds"] for row in rows] == [4.0, 6.0, 8.0]
    assert [row["tokens_per_second"] for row in rows] == [64.0] * 3


# Numbers that are none


def spoil(monkeypatch, *sequences: int) -> None:
    """Make the loss of the micro-batches that begin with these sequences no number."""
    loss = pretraining.Pretraining.loss
    monkeypatch.setattr(
        pretraining.Pretraining,
        "loss",
        lambda self, batch, first: loss(self, batch, first) * (math.nan if first in sequences else 1.0),
    )


@pytest.mark.parametrize("seconds", [0.0, None], ids=["checkpoint each step", "no checkpoint"])
def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(tmp_path, monkeypatch, ahead, seconds):
    stopped(tmp_path, 2, batch_ramp=0.0)
    before = build(tmp_path, batch_ramp=0.0).spent.step
    spoil(monkeypatch, 8 * 4 + 2)
    with pytest.raises(InputError, match=r"At step 5 the loss is nan .*pretrain\.learning_rate"):
        trained(tmp_path, batch_ramp=0.0, seconds=seconds)
    resumed = build(tmp_path, batch_ramp=0.0)
    assert resumed.spent.step == len(metrics(tmp_path)) == (before if seconds is None else 4)
    assert finite(resumed)


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path):
    run = build(tmp_path, batch_ramp=0.0)
    run.bert.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(InputError, match=r"At step 1 the loss is 3\.\d+ and the gradient norm (nan|inf)"):
        run.run(quiet)


def test_a_stop_at_a_loss_that_is_no_number_leaves_no_checkpoint_of_it(tmp_path, monkeypatch):
    spoil(monkeypatch, 8 * 4)
    monkeypatch.setattr(Reading, "read", do_at(5, Reading.read, stopper(signal.SIGTERM)))
    with pytest.raises(SystemExit):
        build(tmp_path, batch_ramp=0.0).run(quiet, 0.0)
    resumed = build(tmp_path, batch_ramp=0.0)
    assert resumed.spent.step == len(metrics(tmp_path)) == 4
    assert finite(resumed)


def test_weights_that_are_no_numbers_are_in_no_checkpoint(tmp_path):
    run = build(tmp_path, batch_ramp=0.0)

    def overflow(*_) -> None:
        if run.spent.step == 2:  # in the third, whose own loss is still a number
            with torch.no_grad():
                run.bert.norm.weight[0] = math.inf

    run.optimizers[0].register_step_post_hook(overflow)
    with pytest.raises(InputError, match="At step 3 the norm of the weights is inf"):
        run.run(quiet, 0.0)
    resumed = build(tmp_path, batch_ramp=0.0)
    assert resumed.spent.step == 2
    assert finite(resumed)


@pytest.mark.parametrize("recipe", ["adamw", "muon"])
@pytest.mark.parametrize("step", [1, 5])
def test_a_batch_whose_loss_is_no_number_can_be_skipped(tmp_path, monkeypatch, caplog, ahead, recipe, step):
    """The run ends as one that has leapt over this batch, at the same price."""
    settings = RECIPES[recipe] | {"nonfinite": "skip", "batch_ramp": 0.0, "budget": 80 * LENGTH}
    begin = 8 * (step - 1)
    with monkeypatch.context() as patch:
        spoil(patch, begin + 4)
        run = trained(tmp_path / "skipping", seconds=0.0, **settings)
    spent = run.spent
    (skipped,) = spent.skipped
    assert skipped["step"] == step
    assert skipped["sequences"][0] == begin
    assert f"At step {step} the loss is nan and the gradient norm nan" in skipped["problem"]
    assert f"Resuming from step {step - 1} after skipping the bad batch." in caplog.text
    lost = skipped["sequences"][1] - begin  # with one step ahead, that one too
    rows = metrics(run.folder)
    assert [row["step"] for row in rows] == list(range(1, spent.step + 1))
    assert spent.tokens == 80 * LENGTH == (8 * spent.step + lost) * LENGTH
    assert spent.sequence == 80
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert all(earlier["seconds"] < later["seconds"] for earlier, later in pairwise(rows))

    def leaping(self, fraction: float) -> None:
        if self.spent.sequence == begin:
            self.spent.sequence += lost
            self.spent.tokens += lost * LENGTH
        else:
            one_step(self, fraction)

    one_step = pretraining.Pretraining.step
    monkeypatch.setattr(pretraining.Pretraining, "step", leaping)
    leapt = trained(tmp_path / "leaping", seconds=0.0, **settings)
    assert states(run) == states(leapt)
    assert outcome(run)[1] == outcome(leapt)[1]


def test_batches_are_skipped_once_even_over_a_restart(tmp_path, monkeypatch):
    settings = {"nonfinite": "skip", "batch_ramp": 0.0, "budget": 80 * LENGTH}
    spoil(monkeypatch, 8 * 2, 8 * 6)
    stopped(tmp_path / "stopped", 4, seconds=0.0, **settings)
    for folder in ("straight", "stopped"):
        with pytest.raises(InputError, match=r"At step 6 the loss is nan .*happened before"):
            trained(tmp_path / folder, seconds=0.0, **settings)
        kept = build(tmp_path / folder, **settings)
        assert kept.spent.step == len(metrics(tmp_path / folder)) == 5
        assert len(kept.spent.skipped) == 1
        assert kept.spent.sequence == 8 * 6
        assert finite(kept)


@pytest.mark.parametrize("last", [1, 10], ids=["without a step", "after nine steps"])
def test_steps_lost_at_the_end_of_the_budget_are_recorded_and_stay_spent(tmp_path, monkeypatch, last):
    settings = {"nonfinite": "skip", "batch_ramp": 0.0, "budget": 8 * last * LENGTH}
    for spoiled in (8 * (last - 1), None):  # the second run resumes and could train
        run = build(tmp_path, **settings)
        with monkeypatch.context() as patch:
            spoil(patch, spoiled)
            if last == 1:
                with pytest.raises(InputError, match=r"At step 1 .*pretrain\.learning_rate"):
                    run.run(quiet, 0.0)
            else:
                run.run(quiet, 0.0)
        assert [what["step"] for what in run.spent.skipped] == [last]
        assert run.spent.step == len(metrics(tmp_path)) == last - 1
        assert run.spent.tokens == 8 * last * LENGTH


def test_a_signal_while_a_batch_is_skipped_waits(tmp_path, monkeypatch):
    settings = {"nonfinite": "skip", "batch_ramp": 0.0, "budget": 80 * LENGTH}
    spoil(monkeypatch, 8 * 4)
    whole = trained(tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining, "restore", do_at(2, pretraining.restore, nothing, stopper(signal.SIGTERM)))
        with pytest.raises(SystemExit):
            trained(tmp_path / "stopped", **settings)
    resumed = build(tmp_path / "stopped", **settings)
    assert len(resumed.spent.skipped) == 1
    resumed.run(quiet)
    assert outcome(resumed) == outcome(whole)


# fp16

FP16 = {"dtype": torch.float16, "batch_ramp": 0.0, "budget": 96 * LENGTH}


def test_fp16_trains_nearly_as_fp32_and_goes_on_as_if_never_stopped(tmp_path):
    runs = [trained(tmp_path / "fp32", **FP16 | {"dtype": torch.float32}), trained(tmp_path / "whole", **FP16)]
    losses = [[row["loss"] for row in metrics(run.folder)] for run in runs]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    for step in (1, 5, 11):
        folder = tmp_path / str(step)
        stopped(folder, step, **FP16)
        resumed = build(folder, **FP16)
        assert resumed.spent.scaler["_growth_tracker"] == resumed.scaler.state_dict()["_growth_tracker"] == step
        resumed.run(quiet)
        assert outcome(resumed) == outcome(runs[1])


def weights(run: pretraining.Pretraining) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in run.bert.state_dict().items()}


def test_an_overflow_leaves_the_step_out_and_lowers_the_scale(tmp_path):
    run = build(tmp_path, **FP16)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    seen = [(run.scaler.get_scale(), weights(run))]
    run.run(lambda fraction, note: seen.append((run.scaler.get_scale(), weights(run))))
    rows = metrics(tmp_path)
    assert run.spent.step == len(rows) == len(seen) - 1 == 12
    overflows = [not math.isfinite(row["gradient_norm"]) for row in rows]
    assert 2 <= sum(overflows) < 9
    for overflow, ((scale, before), (next_scale, after)) in zip(overflows, pairwise(seen), strict=True):
        assert next_scale == (scale / 2 if overflow else scale)
        assert (after == before) is overflow
    (state, *_) = run.optimizers[0].state.values()
    assert state["step"].item() == 12 - sum(overflows)


@pytest.mark.parametrize("part", ["embedding.word.weight", "blocks.0.attention.out.weight"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_overflow_in_one_optimizers_gradients_leaves_out_the_step_of_all(tmp_path, part, value):
    run = build(tmp_path, optimizer="muon", **FP16)
    run.bert.get_parameter(part).register_hook(lambda gradient: gradient * (value if run.spent.step == 4 else 1.0))
    seen = []
    run.run(lambda fraction, note: seen.append(weights(run)))
    norms = [row["gradient_norm"] for row in metrics(tmp_path)]
    assert [step for step, norm in enumerate(norms, start=1) if not math.isfinite(norm)] == [5]
    assert [step for step, (before, after) in enumerate(pairwise(seen), start=2) if before == after] == [5]
    assert finite(run)
    assert run.scaler.get_scale() == 2.0**15


@pytest.mark.parametrize("order", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_a_run_goes_on_on_a_machine_of_another_precision(tmp_path, order):
    stopped(tmp_path, 5, **FP16 | {"dtype": order[0]})
    resumed = trained(tmp_path, **FP16 | {"dtype": order[1]})
    assert resumed.spent.step == 12
    assert bool(resumed.spent.scaler) is (order[1] is torch.float16)


def test_fp16_skips_a_batch_whose_loss_is_no_number(tmp_path, monkeypatch):
    spoil(monkeypatch, 8 * 4)
    run = trained(tmp_path, nonfinite="skip", seconds=0.0, **FP16)
    assert [skipped["step"] for skipped in run.spent.skipped] == [5]
    assert finite(run)


# Memory


@pytest.mark.parametrize(
    ("batch", "most", "holds", "used"),
    [(24, 1024, 7, 6), (24, 1024, 24, 24), (24, 10, 100, 8), (24, 1024, 1, 1), (7, 1024, 6, 1), (24, 1024, 0, 1)],
)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_memory_decides_the_micro_batch_where_it_is_probed(monkeypatch, batch, most, holds, used, where):
    sizes, forward, backward = [], bert.Bert.forward, torch.Tensor.backward

    def limited_forward(self, *parts):
        sizes.append(len(parts[0]))
        if where == "forward" and sizes[-1] > holds:
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, *parts)

    def limited_backward(self):
        backward(self)
        if where == "backward" and sizes[-1] > holds:
            raise torch.OutOfMemoryError("out of memory")

    model, here = bert.Bert(SMALL, VOCABULARY, LENGTH), Machine(CPU, torch.float32, False, most, probes=True)
    with monkeypatch.context() as patch:
        patch.setattr(bert.Bert, "forward", limited_forward)
        patch.setattr(torch.Tensor, "backward", limited_backward)
        chosen = micro_batch.choose(model, Training(), corpus(), here, checkpoint.Spent(), share=batch)
    assert chosen == used
    assert sizes == sorted(sizes, reverse=True)
    assert all(batch % size == 0 and size <= most for size in sizes)
    assert all(p.grad is None for p in model.parameters())
    fresh = bert.Bert(SMALL, VOCABULARY, LENGTH)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize(
    ("device", "holds", "used"),
    [("same", 8, 4), ("same", 2, 2), ("smaller", 2, 2), ("smaller", 1, 1), ("larger", 8, 8)],
)
def test_a_resumed_run_keeps_its_micro_batch_on_the_same_card_and_takes_what_fits_on_another(
    monkeypatch, device, holds, used
):
    monkeypatch.setattr(micro_batch, "fits", lambda *about: about[4] <= holds)
    monkeypatch.setattr(Machine, "device_name", lambda self: device)
    here = Machine(CPU, torch.float32, False, 1024, probes=True)
    model, spent = bert.Bert(SMALL, VOCABULARY, LENGTH), checkpoint.Spent(step=3, micro_batch=4, device="same")
    assert micro_batch.choose(model, Training(), corpus(), here, spent, share=8) == used


def test_processes_meet_in_a_folder_of_any_name_and_take_the_micro_batch_that_fits_all(tmp_path, monkeypatch):
    folder = tmp_path / "name with spaces, 100%20"
    folder.mkdir()

    def take_part(rank: int, most: int) -> None:
        os.environ.update(processes.environment(rank, 2))
        among = processes.join(CPU, folder / "meeting")
        micro_batch.fits = lambda *about: about[4] <= most
        here = Machine(CPU, torch.float32, False, 1024, probes=True)
        training = Training(batch_size=16, batch_ramp=0.0)
        run = pretraining.Pretraining(bert.Bert(SMALL, VOCABULARY, LENGTH), training, corpus(), here, folder, among)
        assert run.micro_batch == 2
        among.wait()

    children = [fork(functools.partial(take_part, rank, most)) for rank, most in enumerate((4, 2))]
    assert [status(child) for child in children] == [0, 0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_memory_that_an_optimizer_needs_is_what_it_keeps(tmp_path, recipe):
    run = trained(tmp_path, **RECIPES[recipe])
    kept = [
        value.numel() * value.element_size()
        for optimizer in run.optimizers
        for state in optimizer.state.values()
        for name, value in state.items()
        if value is not None and name != "step"
    ]
    weights, states = memory.sizes(SMALL, run.training, VOCABULARY, LENGTH)
    assert weights == sum(p.numel() * p.element_size() for p in run.bert.parameters())
    if recipe == "adafactor":  # counted as none
        assert sum(kept) < weights / 4 + 4 * VOCABULARY * 16
    else:
        assert states == sum(kept)


# Held-out loss


def test_the_heldout_loss_goes_down_and_is_taken_at_each_tenth_of_the_budget(tmp_path):
    data, settings = corpus(sequences=64, heldout=20), {"budget": 4000 * LENGTH, "learning_rate": 0.02}
    spent = trained(tmp_path, data, micro_batch=16, batch_size=16, **settings).spent
    losses = [row["heldout_loss"] for row in spent.evaluations]
    assert len(losses) == pretraining.EVALUATIONS + 1
    assert abs(losses[0] - math.log(VOCABULARY)) < 0.2
    assert losses[-1] < losses[0] / 2
    fractions = [row["fraction"] for row in spent.evaluations]
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert all(0 <= f - due / 10 < 16 / 4000 for due, f in enumerate(fractions))
    rows = {row["step"]: row["tokens"] for row in metrics(tmp_path)} | {0: 0}
    assert all(rows[row["step"]] == row["tokens"] for row in spent.evaluations)


# Compiling


class Compiler:
    """In place of torch.compile: what it makes holds for one shape of positions, and no more than `most` are made."""

    def __init__(self, most: int) -> None:
        self.most, self.shapes, self.calls = most, [], 0

    def __call__(self, module: torch.nn.Module, **settings) -> Callable:
        assert settings == {"fullgraph": True, "dynamic": False}
        self.calls += 1
        if self.most < 0:
            raise RuntimeError("no compiler here")

        def compiled(tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            shape = (*tokens.shape, positions.shape[1])
            if shape not in self.shapes:
                if len(self.shapes) == self.most:
                    raise RuntimeError("no code for this shape" + "\nand more" * 50)
                self.shapes.append(shape)
            return module(tokens, positions, labels)

        return compiled


@pytest.mark.parametrize("most", [-1, 0, 1, 3, 5])
def test_each_number_of_masks_is_compiled_once_until_that_fails(tmp_path, monkeypatch, caplog, unstopped, most):
    compiler = Compiler(most)
    monkeypatch.setattr(torch, "compile", compiler)
    run = trained(tmp_path, compiles=True, **RECIPES["muon"])
    assert outcome(run) == unstopped("muon")
    assert run.spent.compilations == len(compiler.shapes) == max(0, most)
    assert compiler.calls == max(1, min(5, most + 1))
    assert run.model.compiled is (most == 5)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (most < 5)
    assert all("torch.compile failed (no co" in warning and len(warning) < 500 for warning in warnings)


def test_memory_that_does_not_suffice_is_not_taken_for_a_failed_compiler(tmp_path, monkeypatch):
    def out_of_memory(*_, **__) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, compiles=True)


HOURS, TOKENS, FLOPS = ({"budget_unit": unit} for unit in ("hours", "tokens", "flops"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("settings", "fraction", "compiles"),
    [
        (HOURS | {"budget": 1 / 60}, 0.0, False),  # the demo's minute
        (HOURS | {"budget": 599 / 3600}, 0.0, False),
        (HOURS | {"budget": 600 / 3600}, 0.0, True),
        (HOURS | {"budget": 24}, 0.9, True),
        (HOURS | {"budget": 24}, 0.999, False),  # resumed for a minute and a half
        (HOURS | {"budget": 0.5} | FALLING, 0.0, False),  # six minutes a shape
        (HOURS | {"budget": 1} | FALLING, 0.4, True),
        (HOURS | {"budget": 1} | FALLING, 0.5, False),
        (FLOPS | {"budget": 0.4 * RATE * 599}, 0.0, False),
        (FLOPS | {"budget": 0.4 * RATE * 601}, 0.0, True),
        (TOKENS | {"budget": 1e6}, 0.0, False),
        (TOKENS | {"budget": 1e9}, 0.0, True),
    ],
)
def test_a_machine_compiles_where_it_pays(tmp_path, device, settings, fraction, compiles):
    run = build(tmp_path, **settings)
    run.limit = RATE
    run.machine = Machine(torch.device(device), torch.float32, True, 2)
    assert run.compiles(fraction) is compiles
    run.machine = Machine(torch.device(device), torch.float32, False, 2)
    assert not run.compiles(fraction)
    run.machine = Machine(torch.device(device), torch.float32, True, 2, compiles_always=True)
    assert run.compiles(fraction)
