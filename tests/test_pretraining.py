import concurrent.futures
import functools
import json
import logging
import math
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toys import CPU, LENGTH, SMALL, VOCABULARY, corpus_of_rows, encoder, machine_of

from model import bert, checkpoint, distributed, memory, pretraining, schedules, signals
from model.clock import BEAT_SECONDS, Clock
from model.errors import InputError
from model.machine import Machine
from model.masking import Batches, Corpus
from model.settings import Training

SPECIALS = 5
TIMES = ("seconds", "stopped_seconds", "tokens_per_second", "mfu", "compile_seconds", "compilations", "compiled_masks")
RATE = 1e9  # of this machine's matrix products, said to be
FALLING = {"mask_fraction": 0.4, "last_mask_fraction": 0.1}
TRAPEZOID = {"schedule": "trapezoid", "warmup": 0.1, "cooldown": 0.4, "floor": 0.1, "batch_ramp": 0.8} | FALLING
CONSTANT = {"batch_ramp": 0.0}  # batches of 8 from the first step on
EPOCHS = {"budget_unit": "epochs"} | CONSTANT
DETECTION = {"detection": 5.0}
FP16 = {"dtype": torch.float16, "budget": 96 * LENGTH} | CONSTANT
RECIPES = {
    "adamw": {},
    "muon": {"optimizer": "muon", "dropout": 0.1, "batch_ramp": 0.9} | FALLING,
    "adam": {"optimizer": "adam", "dropout": 0.1, "batch_ramp": 0.0},
    "adafactor": {"optimizer": "adafactor", "schedule": "cosine", "warmup": 0.2, "budget_unit": "flops", "budget": 9e6},
    "radam": {"optimizer": "radam", "last_mask_fraction": 0.5},
    "sgd": {"optimizer": "sgd", "clip": None},
    "detection": {"optimizer": "muon"} | DETECTION,
    "fp16": FP16,
    "epochs": {"budget_unit": "epochs", "budget": 1.6},
}


class Stop(BaseException):
    """What stops a run: no Exception."""


def nothing() -> None:
    """Do nothing."""


def stop() -> None:
    raise Stop


def sending(number: signal.Signals) -> Callable[[], None]:
    """Sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


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


def corpus(sequences: int = 50, heldout: int = 5) -> Corpus:
    """Sequences that count up, from some number on, over and over."""
    starts = np.random.default_rng(0).integers(0, 20, sequences + heldout)
    return corpus_of_rows(SPECIALS + (starts[:, None] + np.arange(LENGTH)) % 20, heldout=heldout)


def numbered(sequences: int) -> Corpus:
    """Sequences that hold their own number only; three of them are held out too."""
    rows = np.r_[:sequences, :3] + SPECIALS
    return corpus_of_rows(np.repeat(rows[:, None], LENGTH, axis=1), SPECIALS + sequences, heldout=3)


def seconds_of_budget(seconds: float) -> dict:
    return {"budget": seconds / 3600, "budget_unit": "hours"}


def eager(model: torch.nn.Module, **settings) -> torch.nn.Module:
    """In place of torch.compile."""
    return model


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
    here = machine_of(dtype, micro_batch, compiles, compiles_always=compiles)
    return pretraining.Pretraining(encoder(data.vocabulary), Training(**settings), data, here, folder)


def quiet(fraction: float, note: str) -> None:
    """Report to nobody."""


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / checkpoint.METRICS).read_text().splitlines()]


def trained(folder: Path, seconds: float | None = None, **changes) -> pretraining.Pretraining:
    """A run that has spent its budget."""
    run = build(folder, **changes)
    run.run(quiet, seconds)
    return run


def stopped(folder: Path, step: int, **changes) -> None:
    """Leave a run that SIGTERM has stopped after so many of its steps."""
    with pytest.raises(SystemExit) as end:
        build(folder, **changes).run(do_at(step, quiet, sending(signal.SIGTERM)))
    assert end.value.code == 128 + signal.SIGTERM


def kept(folder: Path, **changes) -> checkpoint.Spent:
    """What a checkpoint says was spent; its weights are finite, and the metrics have a row for each of its steps."""
    run = build(folder, **changes)
    assert all(value.isfinite().all() for value in run.bert.state_dict().values())
    assert [row["step"] for row in metrics(folder)] == list(range(1, run.spent.step + 1))
    return run.spent


def states(run: pretraining.Pretraining) -> dict[str, bytes]:
    """Weights and optimizers, as bytes."""
    parts = {name: value.numpy().tobytes() for name, value in run.module.state_dict().items()}
    for number, optimizer in enumerate(run.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            parts |= {f"{number}.{index}.{name}": value.numpy().tobytes() for name, value in state.items()}
    return parts


def timeless(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def outcome(run: pretraining.Pretraining) -> tuple[dict, list, list, list]:
    """All that a run leaves, but for its times: weights and optimizers, metrics, evaluations, what was spent."""
    spent = asdict(run.spent) | run.scaler.state_dict()
    evaluations = timeless(spent.pop("evaluations"))
    return states(run), timeless(metrics(run.folder)), evaluations, timeless([spent])


@pytest.fixture(scope="module", autouse=True)
def unmeasured_machine():
    """The machine's rate is not measured, which takes seconds, and batches of 8 grow by 2."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "matrix_rate", lambda device, dtype: RATE)
        patch.setattr(schedules, "RAMP_UNIT", 2)
        yield


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory) -> Callable[[str], tuple[dict, list, list, list]]:
    """The outcome of the run of a recipe, never stopped."""
    return functools.cache(lambda recipe: outcome(trained(tmp_path_factory.mktemp("unstopped"), **RECIPES[recipe])))


@pytest.fixture(params=[0, 1], ids=["waits for each step", "one step ahead"])
def ahead(request, monkeypatch) -> int:
    """Rows of metrics are written as soon as a step is through, or after the next one has begun, as on a GPU."""
    monkeypatch.setitem(pretraining.AHEAD, "cpu", request.param)
    return request.param


# Resume


@pytest.mark.parametrize(
    ("recipe", "ahead"), [*((recipe, 0) for recipe in RECIPES), ("muon", 1), ("fp16", 1)], indirect=["ahead"]
)
def test_a_run_stopped_after_every_step_ends_as_if_never_stopped(tmp_path, unstopped, recipe, ahead):
    done = 0
    while done < len(unstopped(recipe)[1]):
        stopped(tmp_path, 1, **RECIPES[recipe])
        before = done
        done = kept(tmp_path, **RECIPES[recipe]).step
        assert before < done <= before + 1 + ahead
    run = trained(tmp_path, **RECIPES[recipe])
    assert run.spent.step >= 7
    assert outcome(run) == unstopped(recipe)
    assert outcome(trained(tmp_path, **RECIPES[recipe])) == outcome(run), "a finished run trains no further"


@pytest.mark.parametrize(("recipe", "sizes"), [("adamw", (2, 8, 1)), ("detection", (4, 1))])
def test_on_machines_of_other_micro_batches_a_run_takes_the_same_steps(tmp_path, unstopped, recipe, sizes):
    expected = unstopped(recipe)[1]
    for step in range(1, len(expected)):
        stopped(tmp_path, 1, micro_batch=sizes[step % len(sizes)], **RECIPES[recipe])
    trained(tmp_path, **RECIPES[recipe])
    assert timeless(metrics(tmp_path)) == [pytest.approx(row, rel=1e-4) for row in expected]


PLACES = {
    "batch": (Batches, "take", 12),
    "backward": (torch.Tensor, "backward", 12),
    "clipping": (torch.nn.utils, "clip_grad_norm_", 5),
    "update": (torch.optim.AdamW, "step", 5),
    "counting": (schedules, "rate", 5),
    "writing the row": (json, "dumps", 5),
    "evaluation": (pretraining, "curve_losses", 4),
    "last evaluation": (pretraining, "curve_losses", 9),
    "checkpoint": (checkpoint, "save_file", 1),
    "end of checkpoint": (Path, "replace", 1),
    "before any checkpoint": (torch.optim.AdamW, "step", 2),
}


def forked(*actions: Callable[[], object]) -> list[int | None]:
    """How child processes end that do this: 0, 1 after an error, minus a signal's number, None after two minutes."""

    def work(action: Callable[[], object]) -> None:
        action()
        os._exit(0)  # without what else ends with the tests' process

    children = [multiprocessing.get_context("fork").Process(target=work, args=(each,), daemon=True) for each in actions]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return [child.exitcode for child in children]


STOPS = {  # done before and after a call; what is raised; seconds between checkpoints
    "error": (stop, nothing, Stop, 0.0),
    "SIGTERM": (sending(signal.SIGTERM), nothing, SystemExit, None),
    "SIGINT": (nothing, sending(signal.SIGINT), KeyboardInterrupt, None),
    "two SIGINT": (lambda: (sending(signal.SIGINT)(), sending(signal.SIGINT)()), nothing, KeyboardInterrupt, 0.0),
    "SIGKILL": (sending(signal.SIGKILL), nothing, None, 0.0),
}


HOW = [*STOPS][:-1]
KILLED = ("update", "writing the row", "last evaluation", "checkpoint", "end of checkpoint", "before any checkpoint")


@pytest.mark.parametrize(
    ("place", "how"),
    [(place, HOW[number % len(HOW)]) for number, place in enumerate(PLACES)] + [(place, "SIGKILL") for place in KILLED],
)
def test_a_run_stopped_anywhere_ends_as_if_never_stopped(tmp_path, monkeypatch, unstopped, place, how):
    monkeypatch.setitem(pretraining.AHEAD, "cpu", len(place) % 2)
    owner, name, call = PLACES[place]
    before, after, raised, seconds = STOPS[how]
    calls = iter(range(1, 1000))
    save = checkpoint.Writer.save
    expected = unstopped("muon")

    def save_each_third(writer, *what) -> None:
        if next(calls) % 3 == 0:
            save(writer, *what)
            writer.wait()

    def run() -> None:
        trained(tmp_path, seconds=seconds, **RECIPES["muon"])

    with monkeypatch.context() as patch:
        patch.setattr(signals, "AGAIN_SECONDS", 0.0)
        patch.setattr(owner, name, do_at(call, getattr(owner, name), before, after))
        if raised:
            with pytest.raises(raised):
                run()
        else:
            patch.setattr(checkpoint.Writer, "save", save_each_third)
            assert forked(run) == [-signal.SIGKILL]
    step = kept(tmp_path, **RECIPES["muon"]).step
    assert seconds == 0 or owner is checkpoint or step >= call // 4, "the step is finished, then saved"
    assert outcome(trained(tmp_path, **RECIPES["muon"])) == expected


def test_a_run_goes_on_after_a_signal_whose_handler_returns(tmp_path, unstopped):
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        build(tmp_path).run(do_at(3, quiet, sending(signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]
    assert outcome(build(tmp_path)) == unstopped("adamw")


def test_a_checkpoint_that_cannot_be_written_stops_the_run_at_its_next_step_and_the_old_one_stays(
    tmp_path, monkeypatch, unstopped
):
    run = build(tmp_path)
    fails = do_at(2, checkpoint.save_file, before=stop)

    def report(fraction: float, note: str) -> None:
        if run.spent.step in (2, 4):
            run.save()
            concurrent.futures.wait([run.writer.writing])

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fails)
        with pytest.raises(Stop):
            run.run(report)
    assert run.spent.step == 4
    assert {path.name for path in tmp_path.iterdir()} == {checkpoint.CHECKPOINT, checkpoint.METRICS, checkpoint.HELDOUT}
    assert kept(tmp_path).step == 2
    assert outcome(trained(tmp_path)) == unstopped("adamw")


def test_training_goes_on_while_a_checkpoint_is_written_as_it_was_at_its_step(tmp_path, monkeypatch, unstopped):
    run = build(tmp_path / "run")
    may_write = threading.Event()
    write = checkpoint.save_file

    def slow(*args, **kwargs) -> None:
        assert may_write.wait(60)
        write(*args, **kwargs)

    def report(fraction: float, note: str) -> None:
        if run.spent.step == 2:
            run.save()
        if run.spent.step == 5:
            assert not (run.folder / checkpoint.CHECKPOINT).exists()
            may_write.set()
            run.writer.wait()
            shutil.copytree(run.folder, tmp_path / "written")

    monkeypatch.setattr(checkpoint, "save_file", slow)
    run.run(report)
    assert kept(tmp_path / "written").step == 2
    assert outcome(trained(tmp_path / "written")) == outcome(run) == unstopped("adamw")


@pytest.mark.parametrize(
    ("spoil", "sequences"),
    [
        (lambda path: path.write_bytes(b"junk"), 50),
        (lambda path: os.truncate(path, 9000), 50),
        (lambda path: None, 60),  # of a model with another vocabulary
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_name_of_its_file(tmp_path, spoil, sequences):
    stopped(tmp_path, 3, data=numbered(50))
    spoil(tmp_path / checkpoint.CHECKPOINT)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors"):
        build(tmp_path, numbered(sequences))


# Budget and clock


class FakeTime:
    """A clock that only moves when a test moves it."""

    now = 5000.0

    def read(self) -> float:
        return self.now

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let runs go by it; without beats, which would be late whenever a test moves the clock."""
        patch.setattr(Clock, "now", self.read)
        patch.setattr(Clock, "beats", False)

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
    time = FakeTime()
    time.use(monkeypatch)
    monkeypatch.setattr(Batches, "take", time.taking(1, Batches.take))
    monkeypatch.setattr(pretraining, "curve_losses", time.taking(1000, pretraining.curve_losses))
    return time


def test_the_heldout_loss_is_taken_at_each_tenth_of_the_budget(tmp_path):
    evaluations = trained(tmp_path, budget=400 * LENGTH).spent.evaluations
    fractions = [row["fraction"] for row in evaluations]
    assert (fractions[0], fractions[-1], len(fractions)) == (0, 1, pretraining.EVALUATIONS + 1)
    assert all(0 <= fraction - due / 10 < 8 / 400 for due, fraction in enumerate(fractions))
    assert abs(evaluations[0]["heldout_loss"] - math.log(VOCABULARY)) < 0.2
    tokens = {row["step"]: row["tokens"] for row in metrics(tmp_path)} | {0: 0}
    assert all(tokens[row["step"]] == row["tokens"] for row in evaluations)


def test_compiling_data_and_copying_checkpoints_are_on_the_clock_and_heldout_losses_are_not(
    tmp_path, clock, monkeypatch
):
    monkeypatch.setattr(torch, "compile", clock.taking(20, eager))
    monkeypatch.setattr(Batches, "take", clock.taking(2, Batches.take))
    monkeypatch.setattr(checkpoint.Writer, "save", clock.taking(7, checkpoint.Writer.save))
    spent = build(tmp_path, compiles=True, **seconds_of_budget(100), **CONSTANT).run(quiet, 0.0)
    compiling = 20
    step = 4 * (1 + 2)
    save = 7
    assert len(spent.evaluations) > 2
    assert spent.step == math.ceil((100 - compiling) / (step + save))
    assert spent.seconds == compiling + spent.step * (step + save) - save  # to the end of the last step
    assert (spent.compilations, spent.compile_seconds) == (1, compiling)


@pytest.mark.parametrize("work", ["checkpoint", "compiler"])
def test_a_run_killed_at_the_end_knows_that_a_checkpoint_or_the_compiler_has_spent_the_rest(
    tmp_path, clock, monkeypatch, work
):
    settings = seconds_of_budget(40) | CONSTANT | {"compiles": work == "compiler"}
    if work == "checkpoint":
        monkeypatch.setattr(checkpoint.Writer, "save", clock.taking(50, checkpoint.Writer.save))
    else:  # for the second number of masks, after steps that are in a checkpoint
        settings |= FALLING
        monkeypatch.setattr(torch, "compile", do_at(2, eager, clock.taking(50, nothing)))
    run = build(tmp_path / "run", **settings)

    def copy_then_evaluate(*args) -> dict:
        run.writer.wait()
        shutil.copytree(run.folder, tmp_path / "killed", dirs_exist_ok=True)
        return {"heldout_loss": 1.0}

    monkeypatch.setattr(pretraining, "curve_losses", copy_then_evaluate)
    steps = run.run(quiet, 0.0).step
    assert steps == 1 or work == "compiler"
    resumed = build(tmp_path / "killed", **settings)
    assert resumed.spent.seconds == run.spent.seconds >= 40
    assert resumed.run(quiet).step == steps == len(metrics(resumed.folder))


def test_a_resumed_run_has_the_hours_that_were_left_and_the_same_times(tmp_path, clock):
    settings = seconds_of_budget(100)
    whole = trained(tmp_path / "whole", **settings)
    steps = len(metrics(whole.folder))
    for step in (1, steps - 1):
        folder = tmp_path / str(step)
        stopped(folder, step, **settings)
        clock.now += 10_000  # while nothing runs
        resumed = trained(folder, **settings)
        assert outcome(resumed) == outcome(whole)
        assert metrics(folder) == metrics(whole.folder)
        assert resumed.spent.seconds == whole.spent.seconds


def test_time_in_which_the_process_stood_still_is_not_spent_but_said_and_kept_over_a_restart(tmp_path, clock, caplog):
    settings = seconds_of_budget(100)
    whole = trained(tmp_path / "whole", **settings)
    assert whole.spent.stopped_seconds == 0
    run = build(tmp_path / "stood still", **settings)

    def stand_still(fraction: float, note: str) -> None:
        if run.spent.step in (3, 5):
            run.clock.last_beat = clock.now
            run.clock.last_wakes = run.clock.wakes()
            clock.now += 25
            run.clock.beat()
            run.clock.last_beat = None  # nobody else beats
        if run.spent.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run.run(stand_still)
    stopped_for = 2 * (25 - BEAT_SECONDS)
    assert kept(run.folder, **settings).stopped_seconds == pytest.approx(stopped_for)
    resumed = trained(run.folder, **settings)
    assert resumed.spent.stopped_seconds == pytest.approx(stopped_for)
    assert resumed.spent.step == whole.spent.step
    assert resumed.spent.seconds == pytest.approx(whole.spent.seconds, abs=1)
    assert sum("stood still for 24.9 seconds" in record.message for record in caplog.records) == 2


@pytest.mark.parametrize(("budget", "step", "apart"), [(20, 1, 5), (400, 4, 40), (3 * 3600, 300, 600)])
def test_checkpoints_are_a_tenth_of_the_budget_apart_within_bounds(tmp_path, clock, monkeypatch, budget, step, apart):
    saved = []
    monkeypatch.setattr(checkpoint.Writer, "save", lambda *args: saved.append(clock.now))
    monkeypatch.setattr(pretraining, "curve_losses", lambda *args: {"heldout_loss": 1.0})
    monkeypatch.setattr(Batches, "take", clock.taking(step - 1, Batches.take))
    trained(tmp_path, batch_size=2, **seconds_of_budget(budget))
    assert {later - earlier for earlier, later in pairwise(saved[:-2])} == {apart}
    assert saved[-1] == clock.now


def test_a_budget_spent_before_the_first_step_is_refused(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(torch, "compile", clock.taking(20, eager))
    with pytest.raises(InputError, match=r"10 seconds .*pretrain\.budget"):
        trained(tmp_path, compiles=True, **seconds_of_budget(10))


# A device that computes by itself, as a GPU does


@pytest.fixture
def device(monkeypatch) -> SimpleNamespace:
    """It computes what is queued, one after the other, while the host's time goes on: a GPU in the time of FakeTime.

    A micro-batch takes about 1 s of it and 0.2 s of the host, which waits only to read a loss.
    """
    time = FakeTime()
    run = pretraining.Pretraining
    uneven = np.random.default_rng(0)
    device = SimpleNamespace(free=time.now, idle=0.0, steps=[])
    take = Batches.take
    step = run.step
    read = run.read

    def queued_batch(*args) -> tuple:
        time.now += 0.2
        device.idle += max(0.0, time.now - device.free)
        device.free = max(device.free, time.now) + uneven.uniform(0.9, 1.1)
        return take(*args)

    def recorded_step(*args) -> None:
        began = max(time.now, device.free)
        step(*args)
        device.steps.append((began - FakeTime.now, device.free - FakeTime.now))

    def waiting_read(run) -> None:
        row, *_ = run.queued[0]
        time.now = max(time.now, FakeTime.now + device.steps[row["step"] - 1][1])
        read(run)

    monkeypatch.setitem(pretraining.AHEAD, "cpu", 1)
    time.use(monkeypatch)
    monkeypatch.setattr(Batches, "take", queued_batch)
    monkeypatch.setattr(run, "step", recorded_step)
    monkeypatch.setattr(run, "read", waiting_read)
    return device


@pytest.mark.parametrize("budget", [10, 150, 203.5])
def test_on_a_gpu_too_the_step_that_spends_the_budget_is_the_last_and_the_gpu_does_not_wait(tmp_path, device, budget):
    spent = trained(tmp_path, **seconds_of_budget(budget), **CONSTANT).spent
    begun, ended = device.steps[-1]
    assert begun < budget <= ended
    assert spent.step == len(device.steps)
    assert spent.seconds == metrics(tmp_path)[-1]["seconds"] == pytest.approx(ended)
    assert device.idle < 4  # before held-out losses, the last steps and checkpoints


def test_on_a_gpu_schedules_go_by_a_time_within_the_step_before(tmp_path, device):
    run = trained(tmp_path, **TRAPEZOID, **seconds_of_budget(150))
    rows = metrics(tmp_path)
    for row, (before, _), (begun, _) in zip(rows, [(0, 0), *device.steps], device.steps, strict=False):
        assert before - 1e-6 <= 150 * row["fraction"] <= begun + 1e-6
        assert row["lr"] == 0.01 * schedules.rate(run.training, row["fraction"])
    assert [row["seconds"] for row in rows] == pytest.approx([ended for _, ended in device.steps])


# Schedules, batches, gradients


@pytest.mark.parametrize(
    ("unit", "settings", "masks"), [("tokens", TRAPEZOID, 5), ("flops", {}, 1), ("hours", TRAPEZOID, 5)]
)
def test_rate_batch_and_masks_are_those_of_the_budget_spent_before_each_step(tmp_path, clock, unit, settings, masks):
    budget = {"tokens": 400 * LENGTH, "flops": 6e7, "hours": 250 / 3600}[unit]
    run = trained(tmp_path, budget=budget, budget_unit=unit, **settings)
    rows = metrics(tmp_path)
    tokens = [row["batch"] * LENGTH for row in rows]
    operations = [bert.operations(SMALL, VOCABULARY, LENGTH, row["masks"]) for row in rows]
    each = {"tokens": tokens, "flops": np.multiply(tokens, operations), "hours": [one / 2 / LENGTH for one in tokens]}
    after = np.cumsum(each[unit]) / (3600 if unit == "hours" else 1)
    assert [row["fraction"] for row in rows] == pytest.approx([0, *(after[:-1] / budget)])
    assert after[-1] >= budget > after[-2]
    assert [row["tokens"] for row in rows] == np.cumsum(tokens).tolist()
    for row, work in zip(rows, operations, strict=True):
        assert row["lr"] == 0.01 * schedules.rate(run.training, row["fraction"])
        assert row["batch"] == schedules.batch(run.training, row["fraction"])
        assert row["masks"] == max(1, round(schedules.mask_fraction(run.training, row["fraction"]) * LENGTH))
        assert row["tokens_per_second"] == 2 * LENGTH
        assert row["mfu"] == pytest.approx(2 * LENGTH * work / RATE)
    assert {row["batch"] for row in rows} == {2, 4, 6, 8}
    assert len({row["masks"] for row in rows}) == masks


@pytest.mark.parametrize(
    ("epochs", "settings", "read"),
    [(2, CONSTANT, 96), (1, CONSTANT, 48), (0.5, CONSTANT, 24), (0.25, CONSTANT, 8), (1.3, {"batch_ramp": 0.9}, None)],
)
def test_a_budget_in_epochs_is_never_exceeded_and_leaves_less_than_a_step(tmp_path, epochs, settings, read):
    run = trained(tmp_path, data=corpus(48), budget=epochs, budget_unit="epochs", **settings)
    sequences = run.spent.tokens // LENGTH
    assert sequences <= 48 * epochs < sequences + metrics(tmp_path)[-1]["batch"]
    assert read in (sequences, None)
    assert run.spent.evaluations[-1]["step"] == run.spent.step


def test_each_epoch_has_all_sequences_once(tmp_path, monkeypatch):
    read = []
    take = Batches.take

    def taking(self: Batches, first: int, masks: int, after: int):
        read.extend(range(first, first + self.size))
        return take(self, first, masks, after)

    monkeypatch.setattr(Batches, "take", taking)
    trained(tmp_path, data=corpus(48), budget=3, **EPOCHS)
    assert read == list(range(3 * 48))


def test_whole_epochs_train_as_so_many_tokens_do(tmp_path):
    data = corpus(48)
    epochs = trained(tmp_path / "epochs", data=data, budget=2, **EPOCHS)
    tokens = trained(tmp_path / "tokens", data=data, budget=2 * 48 * LENGTH, **CONSTANT)
    assert outcome(epochs) == outcome(tokens)


CHANGES = {"budget": 30 * LENGTH, "batch_size": 16, "batch_ramp": 0.0, "learning_rate": 1e-3, "weight_decay": 0.5}
CHANGES |= {"decay_norms": True, "beta2": 0.9, "adam_eps": 1e-3, "clip": 0.01, "dropout": 0.5}
CHANGES |= {"mask_fraction": 0.5, "last_mask_fraction": 0.5, "floor": 0.5, "seed": 1}


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        *(("adamw", {field: value}) for field, value in CHANGES.items()),
        *(("detection", {field: 1.0}) for field in ("detection", "masked_share")),
    ],
)
def test_no_setting_of_training_is_ignored(tmp_path, unstopped, recipe, change):
    changed = states(trained(tmp_path, **RECIPES[recipe] | change))
    name = "ffn.dense_out.weight"
    weights = [each for each in changed if each.endswith((name, "detector.weight"))]
    assert len(weights) == 1 + (recipe == "detection")
    assert not [name for name in weights if changed[name] == unstopped(recipe)[0][name]]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_rate_gradient_and_loss_of_a_row_are_those_of_a_step_on_the_whole_batch(tmp_path, clip):
    """Steps by gradient descent are steps on the mean loss of all sequences, computed at once."""
    settings = {"optimizer": "sgd", "weight_decay": 0.0, "clip": clip} | CONSTANT | FALLING
    run = trained(tmp_path, budget=24 * LENGTH, schedule="dive", **settings)
    model = encoder()
    descent = torch.optim.SGD(model.parameters(), momentum=0.95, nesterov=True)
    rows = metrics(tmp_path)
    assert [row["masks"] for row in rows] == [6, 5, 3]
    assert rows[-1]["lr"] < rows[0]["lr"]
    for row in rows:
        loss = model(*Batches(corpus(), 8, Training(), CPU).make(row["tokens"] // LENGTH - 8, row["masks"]))
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm().item()
        assert norm > 0.05
        assert (row["loss"], row["gradient_norm"]) == pytest.approx((loss.item(), norm), rel=1e-5)
        for parameter in model.parameters():
            parameter.grad *= clip / norm if clip else 1
        descent.param_groups[0]["lr"] = row["lr"]
        descent.step()
        descent.zero_grad()
    for mine, theirs in zip(model.parameters(), run.bert.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_processes_take_the_micro_batch_that_fits_all(tmp_path):
    def take_part(rank: int, most: int) -> None:
        os.environ.update(distributed.process_environment(rank, 2))
        among = distributed.join(CPU, tmp_path / "meeting")
        memory.fits = lambda *about: about[4] <= most
        here = machine_of(micro_batch=1024, probes=True)
        training = Training(batch_size=16, batch_ramp=0.0)
        run = pretraining.Pretraining(encoder(), training, corpus(), here, tmp_path, among)
        assert run.micro_batch == 2
        among.wait()

    assert forked(functools.partial(take_part, 0, 4), functools.partial(take_part, 1, 2)) == [0, 0]


@pytest.mark.parametrize(("sizes", "field"), [({"sequences": 7}, "batch_size"), ({"heldout": 0}, "heldout_fraction")])
def test_a_corpus_without_a_batch_or_without_held_out_text_is_refused(tmp_path, sizes, field):
    with pytest.raises(InputError, match=field):
        build(tmp_path, corpus(**sizes))


def test_a_budget_of_0_needs_no_batch_and_no_memory_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "fits", lambda *_: pytest.fail("a micro-batch is computed"))
    folder = tmp_path / "run"
    folder.mkdir()
    run = pretraining.Pretraining(encoder(), Training(budget=0), corpus(7), machine_of(probes=True), folder)
    assert run.run(quiet).evaluations


def test_a_part_of_an_epoch_without_a_batch_is_refused(tmp_path):
    build(tmp_path / "a batch", corpus(50), budget=0.16, **EPOCHS)
    with pytest.raises(InputError, match=r"0\.15 epochs.*7 sequences.*batch_size"):
        build(tmp_path / "less", corpus(50), budget=0.15, **EPOCHS)


# Numbers that are none


@pytest.mark.parametrize("part", ["loss", "gradient", "weights"])
def test_what_is_no_number_stops_the_run_and_is_in_no_checkpoint(tmp_path, ahead, part):
    run = build(tmp_path, **CONSTANT)

    def factor(of: str) -> float:
        return math.inf if of == part and run.spent.step == 2 else 1.0

    run.bert.register_forward_hook(lambda module, given, loss: loss * factor("loss") if module.training else loss)
    run.bert.norm.weight.register_hook(lambda gradient: gradient * factor("gradient"))
    run.optimizers[0].register_step_post_hook(lambda *_: run.bert.norm.weight.data.mul_(factor("weights")))
    with pytest.raises(InputError, match=f"step 3 .*{part}"):
        run.run(quiet, 0.0)
    assert kept(tmp_path, **CONSTANT).step == 2


# fp16


def test_fp16_trains_nearly_as_fp32(tmp_path):
    losses = []
    for dtype in (torch.float32, torch.float16):
        trained(tmp_path / str(dtype), **FP16 | {"dtype": dtype} | DETECTION)
        losses.append([row[name] for name in ("loss", "detection_loss") for row in metrics(tmp_path / str(dtype))])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize(
    ("optimizer", "part", "value"),
    [
        ("adamw", "embedding.word.weight", math.inf),
        ("muon", "embedding.word.weight", math.inf),
        ("muon", "blocks.0.attention.out.weight", math.nan),
    ],
)
def test_an_overflow_in_some_gradients_leaves_out_the_step_of_all_and_halves_the_scale(
    tmp_path, optimizer, part, value
):
    run = build(tmp_path, optimizer=optimizer, **FP16)
    seen = []
    run.bert.get_parameter(part).register_hook(lambda gradient: gradient * (value if run.spent.step == 4 else 1.0))
    run.run(lambda fraction, note: seen.append((run.scaler.get_scale(), states(run))))
    norms = [row["gradient_norm"] for row in metrics(tmp_path)]
    assert [step for step, norm in enumerate(norms, start=1) if not math.isfinite(norm)] == [5]
    still = [before.items() <= after.items() for (_, before), (_, after) in pairwise(seen)]
    assert [step for step, stays in enumerate(still, start=2) if stays] == [5]
    assert [scale for scale, _ in seen] == 4 * [2.0**16] + 8 * [2.0**15]
    assert kept(tmp_path, optimizer=optimizer, **FP16).step == 12


@pytest.mark.parametrize("order", [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_a_run_goes_on_on_a_machine_of_another_precision(tmp_path, order):
    stopped(tmp_path, 5, **FP16 | {"dtype": order[0]})
    resumed = trained(tmp_path, **FP16 | {"dtype": order[1]})
    assert resumed.spent.step == 12
    assert bool(resumed.spent.scaler) is (order[1] is torch.float16)


# Compiling


@pytest.mark.parametrize("most", [-1, 1, 5])
def test_each_number_of_masks_is_compiled_once_until_that_fails(tmp_path, monkeypatch, caplog, unstopped, most):
    """Compiled code holds for one shape here, and is made for no more than `most` shapes."""
    calls = []
    shapes = []

    def compiler(module: torch.nn.Module, **settings) -> Callable:
        calls.append(settings)
        if most < 0:
            raise RuntimeError("no compiler here")

        def compiled(*batch: torch.Tensor) -> torch.Tensor:
            shape = [part.shape for part in batch]
            if shape not in shapes:
                if len(shapes) == most:
                    raise RuntimeError("no code for this shape" + "\nand more" * 50)
                shapes.append(shape)
            return module(*batch)

        return compiled

    monkeypatch.setattr(torch, "compile", compiler)
    run = trained(tmp_path, compiles=True, **RECIPES["muon"])
    assert outcome(run) == unstopped("muon")
    assert run.spent.compilations == len(shapes) == max(0, most)
    assert calls == [{"fullgraph": True, "dynamic": False}] * max(1, min(5, most + 1))
    assert run.model.compiled is (most == 5)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == (most < 5)
    assert all("torch.compile failed (no co" in warning and len(warning) < 500 for warning in warnings)


@pytest.mark.parametrize("of", ["the same device", "another device", "other masks", "an old checkpoint", "hours"])
def test_a_resumed_run_compiles_again_what_its_device_had_compiled_also_where_little_is_left(
    tmp_path, monkeypatch, clock, of
):
    settings = seconds_of_budget(60) if of == "hours" else {}

    def started() -> pretraining.Pretraining:
        run = build(tmp_path, compiles=True, **CONSTANT, **settings)
        run.machine = replace(run.machine, compiles_always=False)
        return run

    monkeypatch.setattr(torch, "compile", eager)
    monkeypatch.setitem(pretraining.COMPILE_FROM_SECONDS, "cpu", 0.0)
    with monkeypatch.context() as patch:
        if of == "an old checkpoint":
            new = ("compiled_masks",)
            patch.setattr(checkpoint, "asdict", lambda spent: {k: v for k, v in asdict(spent).items() if k not in new})
        with pytest.raises(SystemExit):
            started().run(do_at(3, quiet, sending(signal.SIGTERM)))

    monkeypatch.setitem(pretraining.COMPILE_FROM_SECONDS, "cpu", math.inf)
    run = started()
    assert run.spent.step == 3
    if of == "another device":
        run.device = "Toy GPU"
    if of == "other masks":
        run.spent.compiled_masks += 1
    run.run(quiet)
    assert run.model.compiled is (of == "the same device")
    assert bool(run.spent.compiled_masks) is run.model.compiled


def test_memory_that_does_not_suffice_is_not_taken_for_a_failed_compiler(tmp_path, monkeypatch):
    def out_of_memory(*_, **__) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "compile", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        trained(tmp_path, compiles=True)


@pytest.mark.parametrize(
    ("device", "settings", "fraction", "pays"),
    [
        ("cpu", seconds_of_budget(599), 0.0, False),
        ("cpu", seconds_of_budget(600), 0.0, True),
        ("cuda", seconds_of_budget(239), 0.0, False),
        ("cuda", seconds_of_budget(240), 0.0, True),
        ("cpu", seconds_of_budget(24 * 3600), 0.9, True),
        ("cpu", seconds_of_budget(24 * 3600), 0.999, False),  # resumed for a minute and a half
        ("cpu", seconds_of_budget(3600) | FALLING, 0.4, True),  # twelve minutes a shape
        ("cpu", seconds_of_budget(3600) | FALLING, 0.5, False),
        ("cpu", {"budget_unit": "flops", "budget": 0.6 * RATE * 599}, 0.0, False),
        ("cpu", {"budget_unit": "flops", "budget": 0.6 * RATE * 601}, 0.0, True),
        ("cuda", {"budget_unit": "flops", "budget": 0.4 * RATE * 239}, 0.0, False),
        ("cuda", {"budget_unit": "flops", "budget": 0.4 * RATE * 241}, 0.0, True),
        ("cpu", {"budget_unit": "epochs", "budget": 1e4}, 0.0, False),
        ("cpu", {"budget_unit": "epochs", "budget": 1e8}, 0.0, True),
        ("cpu", {"budget": 1e6}, 0.0, False),
        ("cpu", {"budget": 1e9}, 0.0, True),
    ],
)
def test_a_run_is_compiled_where_it_pays(tmp_path, device, settings, fraction, pays):
    run = build(tmp_path, **settings)
    run.limit = RATE
    for allowed, always in ((True, False), (False, False), (True, True)):
        run.machine = Machine(torch.device(device), torch.float32, allowed, 2, compiles_always=always)
        assert run.compiles(fraction) is (always or (allowed and pays))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_states_between_blocks_are_bf16_in_bf16_only(tmp_path, dtype: torch.dtype):
    assert build(tmp_path, dtype=dtype).bert.trained_in == (dtype if dtype is torch.bfloat16 else None)
