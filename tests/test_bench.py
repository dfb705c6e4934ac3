"""`cram bench`: what it measures adds up and is what it says; nothing here depends on the speed of the machine."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from toys import LENGTH, encoder, machine_of
from typer.testing import CliRunner

from flows.cli.main import app
from model import bench, machine
from model.bench import ATTENTION, EMBEDDING, FEED_FORWARD, HEAD, OPTIMIZER, REST, WAITING, Measured, Speed, Trial
from model.bert import Attention, Bert
from model.errors import InputError
from model.layers import Embedding, FeedForward
from model.masking import Batches
from model.pretraining import Pretraining
from model.settings import Training
from tasks import bench as page_of_bench
from tasks.store import home

TINY = {
    "pretrain": {"architecture": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 96}, "batch_size": 8},
    "vocabulary": {"entries": 400},
    "tokenize": {"length": 32},
}
LAYERS = 3


class Time:
    """A clock that only moves when a test moves it."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch) -> Iterator[None]:
    """Matrix products are small and a vocabulary is trained on little text, since these take seconds."""
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 64)
    monkeypatch.setattr(page_of_bench, "SAMPLE_BYTES", 50_000)
    monkeypatch.setattr(page_of_bench, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(page_of_bench, "BLOCK", 1 << 16)
    machine.matrix_rate.cache_clear()
    yield
    machine.matrix_rate.cache_clear()


class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes some seconds."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, time: Time, seconds: float) -> torch.Tensor:
        ctx.time = time
        ctx.seconds = seconds
        return states.view_as(states)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        ctx.time.now += ctx.seconds
        return gradient, None, None


def taking(time: Time, function: Callable, forward: float, backward: float = 0.0) -> Callable:
    """The function, whose forward and backward passes take so many seconds."""

    def slow(*args, **kwargs):
        time.now += forward
        result = function(*args, **kwargs)
        return Slow.apply(result, time, backward) if backward else result

    return slow


def trial_in(folder: Path, detection: float = 0.0, **about) -> Trial:
    """A trial of a small model: a step has four passes."""
    training = Training(batch_size=8, optimizer="muon", detection=detection)
    return Trial(encoder(layers=LAYERS, **about), training, machine_of(micro_batch=2), folder, 0.0)


@pytest.mark.parametrize("detection", [0.0, 5.0])
@pytest.mark.parametrize("about", [{}, {"convolution": 3}, {"norm_order": "post", "final_norm": False}], ids=str)
def test_each_part_of_a_step_has_its_seconds_and_together_they_are_the_step(
    tmp_path, monkeypatch, detection: float, about: dict
):
    time = Time()
    monkeypatch.setattr(bench, "time", time)
    for owner, name, forward, backward in (
        (Attention, "forward", 2, 3),
        (FeedForward, "forward", 5, 7),
        (Embedding, "forward", 11, 13),
        (Bert, "masked_loss", 17, 19),
        (Batches, "take", 23, 0),
        (Pretraining, "change_weights", 29, 0),
    ):
        monkeypatch.setattr(owner, name, taking(time, getattr(owner, name), forward, backward))
    trial = trial_in(tmp_path, detection, **about)
    found = bench.measure(trial, compiles=False, begin=lambda name: None)
    trial.close()
    expected = {ATTENTION: 4 * LAYERS * 5, FEED_FORWARD: 4 * LAYERS * 12, EMBEDDING: 4 * 24, HEAD: 4 * 36}
    expected |= {WAITING: 4 * 23, OPTIMIZER: 29}
    assert found.parts == expected
    assert found.eager.seconds == sum(found.parts.values())
    assert found.pass_seconds == sum(expected.values()) / 4 - 29 / 4
    assert (found.passes, found.micro_batch, found.eager.tokens) == (4, 2, 8 * LENGTH)


def test_a_trial_leaves_weights_and_hooks_as_they_were(tmp_path):
    trial = trial_in(tmp_path)
    before = {name: value.clone() for name, value in trial.run.bert.state_dict().items()}
    bench.measure(trial, compiles=False, begin=lambda name: None)
    trial.close()
    assert all(torch.equal(value, before[name]) for name, value in trial.run.bert.state_dict().items())
    for part in trial.run.bert.modules():
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
        assert not part._backward_hooks
        assert not part._backward_pre_hooks


@pytest.mark.parametrize("error", ["", "no compiler for this"])
def test_the_compiled_pass_is_measured_or_it_is_said_why_not(tmp_path, monkeypatch, error: str):
    def compiled(model: torch.nn.Module, **settings: object) -> torch.nn.Module:
        if error:
            raise RuntimeError(error)
        return model

    monkeypatch.setattr(torch, "compile", compiled)
    trial = trial_in(tmp_path)
    found = bench.measure(trial, compiles=True, begin=lambda name: None)
    trial.close()
    assert bool(found.compiled) == (not error)
    assert error in found.why_not


class Event:
    """In place of an event of a GPU: it knows its time once the GPU is waited for."""

    passed = 0
    is_done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        Event.passed += 5
        self.at = Event.passed

    def elapsed_time(self, other: "Event") -> float:
        assert Event.is_done, "not before the GPU is done"
        return other.at - self.at


def test_on_a_gpu_parts_are_timed_by_its_stream_and_read_when_it_is_done(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Event, "is_done", True))
    marks = bench.Marks(torch.device("cuda"))
    for part in (WAITING, ATTENTION, REST, ATTENTION, WAITING):
        marks.begin(part)
    assert {part: seconds for part, seconds in marks.seconds().items() if seconds} == pytest.approx(
        {WAITING: 0.005, ATTENTION: 0.010, REST: 0.005}
    )


def measured(compiled: Speed | None) -> Measured:
    """What was measured of a machine that reads 100 tokens a second, eager."""
    eager = Speed(10.0, 1000, 0.3)
    parts = {ATTENTION: 6.0, WAITING: 1.0, OPTIMIZER: 3.0}
    return Measured(100, 400, 8, 1, parts, 0.5, 7.0, eager, compiled, compile_seconds=50.0)


def test_a_budget_counts_compilation_and_runs_that_are_too_short_for_it_are_eager():
    found = measured(Speed(5.0, 1000, 0.6))
    assert found.tokens_in(1200, "cpu") == (1200 - 50) * 200
    assert found.tokens_in(300, "cpu") == 300 * 100
    assert measured(None).tokens_in(1200, "cpu") == 1200 * 100


def test_the_sentences_name_what_bounds_training():
    here = machine_of(torch.bfloat16)
    disk = page_of_bench.Disk(1e8, 2e8)
    products = {"fp32": 1e12, "bf16": 4e12}
    found = page_of_bench.Bench("own", {}, Training(batch_size=8), LENGTH, here, products, measured(None), 1e7, disk)
    text = "\n".join(page_of_bench.findings(found))
    for named in ("attention, 60%", "optimizer takes 30%", "waits for batches 10%", "30% of the rate", "4.0 times"):
        assert named in text
    shares = [float(row["share"].rstrip("%")) for row in page_of_bench.part_rows(found)]
    assert sum(shares[:-1]) == shares[-1] == 100
    hours = [row["budget"] for row in page_of_bench.budget_rows(found)]
    assert hours == ["20 minutes", "24 hours"]


# The command


def ran(folder: Path, *arguments: str, override: dict = TINY) -> str:
    """What the command prints."""
    command = ["bench", *arguments, "--seconds", "1", "--folder", str(folder), "--override", json.dumps(override)]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("arguments", [(), ("pocket-unicode",)])
def test_the_command_prints_shares_that_sum_up_and_writes_the_page(tmp_path: Path, arguments: tuple):
    before = sorted(home.root().rglob("*"))
    said = ran(tmp_path, *arguments)
    shares = [float(share) for share in re.findall(r"([\d.]+)%$", said, re.MULTILINE)]
    whole = shares.index(100.0)
    assert sum(shares[:whole]) == pytest.approx(100, abs=0.5)
    name = f"bench-{arguments[0] if arguments else 'pocket-frontier'}"
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.md", f"{name}.html"}
    text = (tmp_path / f"{name}.md").read_text()
    html = (tmp_path / f"{name}.html").read_text()
    assert '"entries": 400' in text
    for part in ("attention", "24 hours", "matrix products in fp32", "tokenizing", "writing to the disk"):
        assert part in said
        assert part in text
        assert part in html
    assert sorted(home.root().rglob("*")) == before, "nothing enters the store"


@pytest.mark.parametrize(
    ("arguments", "override", "named"),
    [
        (["nonsense"], {}, "nonsense"),
        (["adapt"], {}, "pretrain.start"),
        ([], {"pretrain": {"architecture": {"hidden": 1_000_000}}}, "hidden"),
        ([], {"pretrain": {"speed": 1}}, "speed"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(tmp_path: Path, arguments: list, override: dict, named: str):
    with pytest.raises(InputError, match=named) as refused:
        ran(tmp_path, *arguments, override=override)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_model_beyond_the_memory_is_refused_before_it_is_made(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("model.memory.available_memory", lambda: 1000)
    monkeypatch.setattr(Bert, "__init__", Mock(side_effect=MemoryError))
    with pytest.raises(InputError, match="bytes of memory"):
        ran(tmp_path)


def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr(Trial, "optimizer_seconds", Mock(side_effect=KeyboardInterrupt))
    command = ["bench", "--seconds", "1", "--folder", str(tmp_path / "out"), "--override", json.dumps(TINY)]
    assert CliRunner().invoke(app, command).exit_code == 130
    assert [path.name for path in tmp_path.rglob("*")] == ["scratch"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(("batches", "checkpoint"))]
