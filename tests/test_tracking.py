"""Trackers follow training from processes of their own: here doubles of their packages, TensorBoard if it is there."""

import json
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from model import checkpoint
from model.checkpoint import CHECKPOINT, HELDOUT, METRICS
from model.errors import InputError
from tasks.workers import tracking

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # else Python takes UTF-8 in that locale
RECORD = """
import json, os, time

def record(**what):
    with open(os.environ["DOUBLE"], "a") as file:
        file.write(json.dumps(what, default=str) + "\\n")
    if (fault := os.environ.get("FAULT")) == "error" and "id" in what:
        print("\\u2264")
        raise OSError("no\\n  route \\u00e0 B")
    if fault == "hangs":
        time.sleep(600)
    if fault == "crashes":
        os.abort()
"""
WANDB = """
class Run:
    def log(self, numbers, step=None): record(step=step, numbers=numbers)
    def finish(self, exit_code=0): record(end=exit_code)

def Settings(**settings): return settings

def init(project="cram", id=None, name=None, config=None, resume=None, settings=None, embed=None):
    assert resume == "allow"
    record(id=id or name, name=name, config=config)
    return Run()
"""
MLFLOW = """
from types import SimpleNamespace as Some

def run(id): return Some(info=Some(run_id=id))
def set_experiment(name): return Some(experiment_id=name)

class MlflowClient:
    def search_runs(self, experiments, filter):
        place = os.environ["DOUBLE"] + ".runs"
        known = open(place).read().split() if os.path.exists(place) else []
        return [run(id) for id in known if filter == f"tags.cram = '{id}'"]
    def create_run(self, experiment, tags, run_name):
        with open(os.environ["DOUBLE"] + ".runs", "a") as file:
            file.write(tags["cram"] + "\\n")
        return run(tags["cram"])
    def update_run(self, id, status): record(id=id, name=id[:12])
    def log_batch(self, id, metrics=(), params=()):
        for step in sorted({m.step for m in metrics}):
            record(step=step, numbers={m.key: m.value for m in metrics if m.step == step})
    def set_terminated(self, id, status): record(end=0 if status == "FINISHED" else 1)
"""
ENTITIES = """
class Metric:
    def __init__(self, key, value, timestamp, step): self.key, self.value, self.step = key, value, step
def Param(key, value): return key, value
"""
EVENTS = """
class SessionLog(dict): START = 1
def Event(**fields): return fields
"""
SUMMARIES = """
def Summary(value): return dict(value)
Summary.Value = lambda tag, simple_value: (tag, simple_value)
"""
WRITER = """
from wandb import record
class EventFileWriter:
    def __init__(self, folder): record(id=folder, name=os.path.basename(folder))
    def add_event(self, event):
        record(step=event["step"], **({"numbers": event["summary"]} if "summary" in event else {"restart": True}))
    def flush(self): pass
    def close(self): record(end=0)
"""
DOUBLES = {
    "wandb.py": RECORD + WANDB,
    "trackio.py": RECORD + WANDB,
    "mlflow/__init__.py": RECORD + MLFLOW,
    "mlflow/entities.py": ENTITIES,
    "tensorboard/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py": EVENTS,
    "tensorboard/compat/proto/summary_pb2.py": SUMMARIES,
    "tensorboard/summary/writer/event_file_writer.py": "import os" + WRITER,
}


def install_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put doubles of the packages of all trackers in their place; what these are given is in the file returned."""
    for name, text in DOUBLES.items():
        path = tmp_path / "doubles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "doubles")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "doubles"))
    monkeypatch.setenv("DOUBLE", str(tmp_path / "record"))
    return tmp_path / "record"


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> Path:
    return install_doubles(tmp_path, monkeypatch)


def train(folder: Path, first: int, last: int, then: Callable[[], None] = lambda: None) -> None:
    """Write the metrics of some steps, as training does, while the trackers follow."""
    folder.mkdir(exist_ok=True)
    with tracking.tracked("pretrain-0123", folder, {"a": 1}):
        with (folder / METRICS).open("a") as rows, (folder / HELDOUT).open("a") as heldout:
            for step in range(first, last + 1):
                row = {"step": step, "fraction": step / 400, "seconds": 9.0 * step, "loss": float(first)}
                rows.write(json.dumps(row) + "\n")
                if step % 10 == 0:
                    heldout.write(json.dumps({"step": step, "shown": {"heldout_loss": 2.0}}) + "\n")
        then()


def checkpoint_at(folder: Path, step: int) -> None:
    save_file({"a": np.zeros(1)}, folder / CHECKPOINT, metadata={"spent": json.dumps({"step": step})})


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def curve(file: Path, name: str = "loss") -> list[tuple[int, float]]:
    """The points of a curve as its tracker shows them: TensorBoard forgets what a restart does again."""
    points: list[tuple[int, float]] = []
    for each in records(file):
        if "restart" in each:
            points = [point for point in points if point[0] < each["step"]]
        elif name in each.get("numbers", {}):
            points.append((each["step"], each["numbers"][name]))
    return points


def wait(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_junk_in_the_file_of_heldout_losses_does_not_stop_a_resumed_run(tmp_path: Path):
    for junk in ("\0\0\0\n", '{"step": 3}\n[]\n', "{}\n"):
        (tmp_path / HELDOUT).write_text(junk)
        checkpoint.cut_metrics(tmp_path, 5)
        assert (tmp_path / HELDOUT).read_text() == ""


def test_without_the_setting_there_is_no_tracker_and_no_file(tmp_path: Path, store: Path):
    train(tmp_path / "work", 1, 3)
    assert not store.exists()


@pytest.mark.parametrize(
    ("asked", "words"), [("paper", "expected one or more of tensorboard"), ("wandb", "pip install")]
)
def test_an_unknown_or_missing_tracker_is_refused(tmp_path: Path, monkeypatch, asked: str, words: str):
    (tmp_path / "wandb").mkdir()  # its own folder, as of a run in the working directory, is not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if not Path(p, "wandb", "sdk").exists())])
    monkeypatch.setenv("CRAM_TRACK", f" {asked} ,")
    with pytest.raises(InputError, match=words):
        tracking.names()


@pytest.mark.parametrize("tracker", tracking.TRACKERS)
def test_a_killed_and_resumed_run_goes_on_in_the_same_curve_with_each_step_once(
    tmp_path: Path, monkeypatch, doubles: Path, tracker: str
):
    monkeypatch.setenv("CRAM_TRACK", tracker)
    work = tmp_path / "work"
    forever = partial(time.sleep, 600)
    training = multiprocessing.get_context("fork").Process(target=train, args=(work, 1, 100, forever), daemon=True)
    training.start()
    try:
        wait(lambda: doubles.exists() and curve(doubles)[-1:] == [(100, 1.0)])
    finally:
        training.kill()
        training.join()
    wait(lambda: "end" in records(doubles)[-1])
    assert records(doubles)[-1]["end"] == (0 if tracker in ("tensorboard", "trackio") else 1), "it did not finish"
    with (work / HELDOUT).open("a") as file:
        file.write('{"step": 11')  # cut off by the kill
    checkpoint_at(work, 70)
    train(work, 71, 130)
    begin = 71 if tracker == "tensorboard" else 101  # which step can be replaced
    assert curve(doubles) == [(step, 1.0 if step < begin else 71.0) for step in range(1, 131)]
    assert curve(doubles, "heldout_loss") == [(step, 2.0) for step in range(10, 131, 10)]
    assert curve(doubles, "hours_left")[-1] == (130, pytest.approx(9 * 130 * (400 / 130 - 1) / 3600))
    assert len({each["id"] for each in records(doubles) if "id" in each}) == 1
    assert records(doubles)[-1] == {"end": 0}
    for path in work.iterdir():
        path.unlink()
    time.sleep(1)  # another second
    train(work, 1, 5)  # refreshed
    assert curve(doubles)[-5:] == [(step, 1.0) for step in range(1, 6)]
    assert len({each["id"] for each in records(doubles) if "id" in each}) == (1 if tracker == "tensorboard" else 2)


def test_a_tracker_that_is_added_later_gets_the_whole_curve(tmp_path: Path, monkeypatch, doubles: Path):
    train(tmp_path / "work", 1, 200)
    checkpoint_at(tmp_path / "work", 200)
    monkeypatch.setenv("CRAM_TRACK", "wandb")
    train(tmp_path / "work", 201, 210)
    assert [step for step, _ in curve(doubles)] == list(range(1, 211))
    assert [step for step, _ in curve(doubles, "heldout_loss")] == list(range(10, 211, 10))


@pytest.mark.parametrize(
    ("fault", "words"), [("error", "OSError: no route à B."), ("hangs", "not done"), ("crashes", "status -6")]
)
def test_a_tracker_that_fails_is_said_once_and_stops_nothing(
    tmp_path: Path, monkeypatch, doubles: Path, caplog, fault: str, words: str
):
    monkeypatch.setenv("CRAM_TRACK", "wandb,trackio")
    monkeypatch.setenv("FAULT", fault)
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracking, "SECONDS_TO_END", 2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "work", 1, 5, lambda: wait(doubles.exists))
    assert time.monotonic() - began < 60
    for tracker in ("wandb", "trackio"):
        [said] = [text for text in caplog.messages if text.startswith(tracker)]
        assert words in said
        assert "Training goes on." in said
        assert tracking.TRACKERS[tracker][1] in said
    for each in ("wandb", "trackio"):
        with (tmp_path / "work" / f"{each}.lock").open() as lock:
            tracking.fcntl.flock(lock, tracking.fcntl.LOCK_EX | tracking.fcntl.LOCK_NB)  # no process is left


def test_tensorboard_itself_shows_each_step_once(tmp_path: Path, monkeypatch, store: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("CRAM_TRACK", "tensorboard")
    work = tmp_path / "work"
    train(work, 1, 100)
    checkpoint_at(work, 70)
    train(work, 71, 130)
    events = EventAccumulator(str(store / tracking.FOLDER / "tensorboard" / "pretrain-0123"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [
        (step, 1.0 if step <= 70 else 71.0) for step in range(1, 131)
    ]
