"""Pretraining runs side by side: the same models, kills, stops and resuming, and how many go on at a time."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from test_workers import wait_for

from model import InputError
from tasks.pretrain import Pretrain, pretrain
from tasks.store import WORK, Artifact, artifacts, draft_of
from tasks.workers import side_by_side
from tasks.workers.side_by_side import FINETUNE, PRETRAIN

TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48},
    budget=8_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)
PARAMS = [TINY, TINY.model_copy(update={"seed": 1})]
ENDLESS = TINY.model_copy(update={"budget": 1e12})
LONG = 600  # seconds: never waited for


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, toy_texts: list[str]):
    """Sequences to train on, in a store of their own."""
    from conftest import store_of_its_own, toy_tokens  # here: other processes import this module too

    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        yield toy_tokens(root, toy_texts)["tokens"]


@pytest.fixture
def emptied(tokens):
    """Remove the models of other tests."""
    for made in artifacts("pretrain"):
        shutil.rmtree(made.path)


def begun(threads: ThreadPoolExecutor, params: Pretrain, tokens: Artifact) -> Future:
    """The future of a model, trained in a process of its own."""
    with side_by_side.titled(f"pretrain [seed {params.seed}]"):
        return threads.submit(copy_context().run, pretrain.fn, params, tokens)


def both(tokens: Artifact) -> list:
    """The models of PARAMS, trained side by side, or their errors."""
    with side_by_side.several(PRETRAIN, 2, 2, 2), ThreadPoolExecutor(2) as threads:
        futures = [begun(threads, params, tokens) for params in PARAMS]
        return [future.exception() or future.result() for future in futures]


def contents(model: Artifact) -> tuple[bytes, dict, list]:
    """What must not depend on where a model was trained."""
    losses = pq.read_table(model.path / "metrics.parquet", columns=["step", "tokens", "loss"]).to_pylist()
    return (model.path / "model.safetensors").read_bytes(), model.stats["heldout"], losses


def die_halfway(job, out: Path, report: Callable[[float, str], None]) -> None:
    """Train with a checkpoint after every step, and be killed at half of the budget."""
    from model import machine

    def until_half(fraction: float, note: str) -> None:
        if fraction >= 0.5:
            os.kill(os.getpid(), signal.SIGKILL)

    job.pretraining(machine.detect()).run(until_half, seconds_between_checkpoints=0)


def say_gpu(folder: Path, runs: int, report: Callable[[float, str], None]) -> str:
    """The GPUs that this process sees, when all runs have begun."""
    import torch

    (folder / str(os.getpid())).touch()
    wait_for(lambda: len(list(folder.iterdir())) == runs)
    return os.environ["CUDA_VISIBLE_DEVICES"] if torch.get_num_threads() == 2 else "threads"


def last_step(work: Path) -> int:
    """The step of the checkpoint."""
    with safe_open(work / "checkpoint.safetensors", "np") as file:
        return json.loads(file.metadata()["spent"])["step"]


def test_models_trained_side_by_side_are_those_trained_in_this_process_and_a_killed_run_resumes(
    tokens, emptied, monkeypatch
):
    alone = []
    for params in PARAMS:
        made = pretrain.fn(params, tokens)
        alone.append((contents(made), made.stats["machine"]))
        shutil.rmtree(made.path)
    begin = side_by_side.Worker.begin

    def killed(self, work, arguments):
        return begin(self, die_halfway if arguments[0].training.seed else work, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(side_by_side.Worker, "begin", killed)
        other, error = both(tokens)
    assert (contents(other), other.stats["machine"]) == alone[0]
    assert isinstance(error, InputError)
    assert "'pretrain [seed 1]' was killed" in str(error)
    assert "Run again: only this one resumes from its checkpoint; CRAM_TRAININGS=1" in str(error)
    work = draft_of(pretrain.target(PARAMS[1], tokens)) / WORK
    steps = last_step(work)
    kept = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()[:steps]]
    assert steps > 5
    resumed = both(tokens)[1]
    assert (contents(resumed), resumed.stats["machine"]) == alone[1]
    assert pq.read_table(resumed.path / "metrics.parquet").to_pylist()[:steps] == kept, "with the seconds of each step"


def test_a_run_that_ends_with_its_pool_saves_a_checkpoint_first(tokens):
    work = draft_of(pretrain.target(ENDLESS, tokens)) / WORK
    metrics = work / "metrics.jsonl"
    with ThreadPoolExecutor(1) as thread:
        with side_by_side.several(PRETRAIN, 2, 2, 2) as run_pool:
            unfinished = begun(thread, ENDLESS, tokens)
            wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
        with pytest.raises(InputError, match=r"'pretrain \[seed 0\]' was cancelled.*it resumes from its checkpoint"):
            unfinished.result(timeout=LONG)
    assert run_pool.workers == []
    assert last_step(work) == metrics.read_text().count("\n") > 3


def on(monkeypatch: pytest.MonkeyPatch, device: str, gpus: int = 0, workers: int = 1, memory: int = 1 << 50) -> None:
    """Have this machine a device of that kind."""
    import torch

    from model import machine

    monkeypatch.setattr(machine, "detect", lambda: SimpleNamespace(device=torch.device(device)))
    monkeypatch.setattr(machine, "available_memory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CRAM_WORKERS", str(workers))


def test_a_cpu_trains_one_model_for_every_four_cores_that_the_memory_holds(monkeypatch):
    for workers, count in ((1, 1), (7, 1), (8, 2), (15, 3), (16, 4), (64, 5)):
        on(monkeypatch, "cpu", workers=workers)
        assert side_by_side.at_once(PRETRAIN, 5) == count
    on(monkeypatch, "cpu", workers=64, memory=4000)
    assert [side_by_side.at_once(PRETRAIN, 5, each) for each in (1000, 3000, 5000)] == [4, 1, 1]
    assert side_by_side.gpus(PRETRAIN) == [None]


def test_memory_of_a_gpu_that_this_process_keeps_is_freed_before_runs_start_elsewhere(monkeypatch):
    import torch

    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setenv("CRAM_FINETUNES", "4")
    for initialized, runs, times in ((False, 8, 0), (True, 1, 0), (True, 8, 1)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
        assert side_by_side.at_once(FINETUNE, runs) == min(4, runs)
        assert len(freed) == times


def test_each_gpu_trains_one_model_unless_one_takes_them_all(monkeypatch):
    for gpus, count in ((1, 1), (2, 2), (8, 5)):
        on(monkeypatch, "cuda", gpus)
        assert side_by_side.at_once(PRETRAIN, 5) == count
    monkeypatch.setenv("CRAM_GPUS", "1")
    assert side_by_side.at_once(PRETRAIN, 5) == 5
    monkeypatch.setenv("CRAM_GPUS", "4")
    assert side_by_side.at_once(PRETRAIN, 5) == 1
    monkeypatch.setenv("CRAM_TRAININGS", "3")
    assert side_by_side.at_once(PRETRAIN, 5) == 1


def test_as_many_models_as_asked_for_are_trained_at_once_but_no_more_than_there_are(monkeypatch):
    for device in ("cpu", "cuda"):
        on(monkeypatch, device, gpus=1)
        monkeypatch.setenv("CRAM_TRAININGS", "3")
        assert [side_by_side.at_once(PRETRAIN, runs) for runs in (1, 2, 40)] == [1, 2, 3]


@pytest.mark.parametrize(("visible", "seen"), [("", {"0", "1"}), ("5,GPU-7,9", {"5", "GPU-7"})])
def test_each_process_sees_a_gpu_of_its_own(tmp_path, monkeypatch, visible: str, seen: set):
    on(monkeypatch, "cuda", gpus=2, workers=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with side_by_side.several(PRETRAIN, 2, 2, 2), ThreadPoolExecutor(2) as threads:
        about = PRETRAIN, say_gpu, (tmp_path, 2), 1.0
        futures = [threads.submit(copy_context().run, side_by_side.run, *about, str(n)) for n in range(2)]
        assert {future.result() for future in futures} == seen
