"""Trackers follow training from separate processes: here with a double of accelerate, and TensorBoard if it's there."""

import json
import logging
import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import store_of_its_own
from safetensors.numpy import save_file
from test_workers import wait_for

from model import checkpoint
from model.checkpoint import CHECKPOINT, HELDOUT, METRICS
from model.errors import InputError
from tasks.workers import tracking

ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # else Python takes UTF-8 in that locale
ACCELERATE = """
import json, os, sys, time
from types import SimpleNamespace as Some

def record(**what):
    with open(os.environ["DOUBLE"], "a") as file:
        file.write(json.dumps(what | {"tracker": sys.argv[1]}, default=str) + "\\n")

class Accelerator:
    def __init__(self, cpu, log_with, project_dir):
        self.kind, self.trackers, self.info = log_with, [Some(finish=lambda: None)], Some(run_id="theirs")

    def init_trackers(self, project, config, settings):
        record(begin=project, config=config, settings=settings[self.kind])
        fault = os.environ.get("FAULT")
        if fault == "error":
            print("\\u2264")
            raise OSError("no\\n  route \\u00e0 B")
        if fault == "hangs":
            time.sleep(600)
        if fault == "crashes":
            os.abort()

    def log(self, numbers, step):
        record(step=step, numbers=numbers)
        if os.environ.get("FAULT") == "once" and step == 3 and not os.path.exists(os.environ["DOUBLE"] + ".fault"):
            open(os.environ["DOUBLE"] + ".fault", "w").close()
            raise OSError("lost")

    def get_tracker(self, kind, unwrap):
        return self if kind == "mlflow" else Some(finish=lambda exit_code: record(end=exit_code))

    def end_training(self):
        record(end=0)
"""
MLFLOW = """
from accelerate import record

def end_run(status):
    record(end=1 if status == "KILLED" else 0)
"""


def install_doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put doubles of accelerate and the trackers in their place; what they are given is in the file returned."""
    doubles = tmp_path / "doubles"
    doubles.mkdir()
    for name in tracking.TRACKERS:
        (doubles / f"{name}.py").write_text(MLFLOW)
    (doubles / "accelerate.py").write_text(ACCELERATE)
    monkeypatch.syspath_prepend(doubles)
    monkeypatch.setenv("PYTHONPATH", str(doubles))
    monkeypatch.setenv("DOUBLE", str(tmp_path / "record"))
    return tmp_path / "record"


@pytest.fixture
def doubles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: Path) -> Path:
    return install_doubles(tmp_path, monkeypatch)


def train(folder: Path, first: int, last: int, then: Callable[[], None] = lambda: None) -> None:
    """Write the metrics of some steps, as training does, while the trackers follow."""
    folder.mkdir(exist_ok=True)
    with tracking.trackers("pretrain-0123", folder, {"a": 1}):
        with (folder / METRICS).open("a") as rows, (folder / HELDOUT).open("a") as heldout:
            for step in range(first, last + 1):
                row = {"step": step, "fraction": step / 400, "seconds": 9.0 * step, "loss": float(first)}
                rows.write(json.dumps(row) + "\n")
                if step % 10 == 0:
                    heldout.write(json.dumps({"step": step, "shown": {"heldout_loss": 2.0}}) + "\n")
        then()


def checkpoint_at(folder: Path, step: int) -> None:
    save_file({"a": np.zeros(1)}, folder / CHECKPOINT, metadata={"spent": json.dumps({"step": step})})


def records(file: Path, tracker: str = "wandb") -> list[dict]:
    """What a tracker was given."""
    every = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    return [each for each in every if each.pop("tracker") == tracker]


def curve(file: Path, name: str = "loss", tracker: str = "wandb") -> list[tuple[int, float]]:
    """The points of a curve as its tracker shows them: TensorBoard forgets what a restart does again."""
    points: list[tuple[int, float]] = []
    for each in records(file, tracker):
        if "purge_step" in each.get("settings", {}):
            points = [point for point in points if point[0] < each["settings"]["purge_step"]]
        elif name in each.get("numbers", {}):
            points.append((each["step"], each["numbers"][name]))
    return points


def test_junk_in_the_file_of_heldout_losses_does_not_stop_a_resumed_run(tmp_path: Path):
    for junk in ("\0\0\0\n", '{"step": 3}\n[]\n', "{}\n"):
        (tmp_path / HELDOUT).write_text(junk)
        checkpoint.cut_metrics(tmp_path, 5)
        assert (tmp_path / HELDOUT).read_text() == ""


def test_without_the_setting_there_is_no_tracker_and_no_file(tmp_path: Path, store: Path):
    train(tmp_path / "work", 1, 3)
    assert not store.exists()


@pytest.mark.parametrize(("asked", "package"), [("paper", "tensorboard"), ("wandb", "wandb"), ("mlflow", "accelerate")])
def test_an_unknown_or_missing_tracker_is_refused(tmp_path: Path, monkeypatch, doubles: Path, asked: str, package: str):
    (tmp_path / "wandb").mkdir()  # its own folder, as of a run in the working directory, is not the package
    for missing in ("wandb", "accelerate"):
        (tmp_path / "doubles" / f"{missing}.py").unlink()
        monkeypatch.delitem(sys.modules, missing, raising=False)
    outside = [path for path in sys.path if "site-packages" not in path]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *outside])
    monkeypatch.setenv("CRAM_TRACK", f" {asked} ,")
    with pytest.raises(InputError, match=f"CRAM_TRACK.*{asked}.*{package}"):
        tracking.names()


@pytest.mark.parametrize("tracker", tracking.TRACKERS)
def test_accelerate_has_each_tracker_and_takes_its_settings(tmp_path: Path, monkeypatch, tracker: str):
    trackers = pytest.importorskip("accelerate.tracking").LOGGER_TYPE_TO_CLASS
    for name, value in tracking.environment_in(tmp_path).items():
        monkeypatch.setenv(name, value)
    training = tracking.Training("pretrain-0123", {}, str(tmp_path / METRICS), "", "", step=70, patience=1)
    project, settings = tracking.settings_of(tracker, training, tracking.Feed(tracker, training))
    folder = [tmp_path] if trackers[tracker].requires_logging_directory else []
    trackers[tracker](project, *folder, **settings)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What trackers got of a run that was killed at step 100 and resumed from 70 until 130, and then of another one."""
    folder = tmp_path_factory.mktemp("resumed")
    work = folder / "work"
    with pytest.MonkeyPatch.context() as patch, store_of_its_own(folder / "artifacts"):
        got = install_doubles(folder, patch)
        patch.setenv("CRAM_TRACK", ",".join(tracking.TRACKERS))
        forever = partial(time.sleep, 600)
        training = multiprocessing.get_context("fork").Process(target=train, args=(work, 1, 100, forever), daemon=True)
        training.start()
        try:
            wait_for(lambda: all(curve(got, tracker=each)[-1:] == [(100, 1.0)] for each in tracking.TRACKERS))
        finally:
            training.kill()
            training.join()
        wait_for(lambda: all("end" in records(got, each)[-1] for each in tracking.TRACKERS))
        with (work / HELDOUT).open("a", encoding="utf-8") as file:
            file.write('{"step": 11')  # cut off by the kill
        checkpoint_at(work, 70)
        train(work, 71, 130)
        before = shutil.copy(got, folder / "before")
        for path in work.iterdir():
            path.unlink()
        time.sleep(1)  # another second
        train(work, 1, 5)
    return before, got


@pytest.mark.parametrize("tracker", tracking.TRACKERS)
def test_a_killed_and_resumed_run_continues_the_same_curve_with_each_step_once(resumed, tracker: str):
    got, after_refresh = resumed
    begin = 71 if tracker == "tensorboard" else 101  # which step can be replaced
    assert curve(got, tracker=tracker) == [(step, 1.0 if step < begin else 71.0) for step in range(1, 131)]
    assert curve(got, "heldout_loss", tracker) == [(step, 2.0) for step in range(10, 131, 10)]
    assert curve(got, "hours_left", tracker)[-1] == (130, pytest.approx(9 * 130 * (400 / 130 - 1) / 3600))
    ends = [each["end"] for each in records(got, tracker) if "end" in each]
    killed = 0 if tracker in ("tensorboard", "trackio") else 1  # which have no word for it
    assert ends == [killed, 0]
    assert curve(after_refresh, tracker=tracker)[-5:] == [(step, 1.0) for step in range(1, 6)]


@pytest.mark.parametrize(("tracker", "name"), [("wandb", "id"), ("mlflow", "run_id"), ("trackio", "name")])
def test_a_resumed_run_is_the_same_at_its_tracker_and_a_refreshed_one_another(resumed, tracker: str, name: str):
    first, again, refreshed = [each for each in records(resumed[1], tracker) if "begin" in each]
    assert (first["begin"], first["config"]) == ("cram", {"a": 1})
    assert again["settings"][name] == ("theirs" if tracker == "mlflow" else first["settings"][name])
    assert refreshed["settings"][name] != again["settings"][name]


def test_tensorboard_gets_a_folder_and_no_nested_settings(resumed):
    first, *_ = records(resumed[0], "tensorboard")
    assert (first["begin"], first["config"]) == ("pretrain-0123", None)


def test_a_tracker_that_has_failed_is_tried_again_where_it_stopped(tmp_path: Path, monkeypatch, doubles: Path):
    monkeypatch.setenv("CRAM_TRACK", "wandb")
    monkeypatch.setenv("FAULT", "once")
    train(tmp_path / "work", 1, 9, lambda: wait_for(Path(f"{doubles}.fault").exists))
    assert [step for step, _ in curve(doubles)] == [1, 2, 3, *range(3, 10)], "the third may have been lost"


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
def test_a_tracker_that_fails_is_reported_once_and_stops_nothing(
    tmp_path: Path, monkeypatch, doubles: Path, caplog, fault: str, words: str
):
    monkeypatch.setenv("CRAM_TRACK", "wandb,trackio")
    monkeypatch.setenv("FAULT", fault)
    for name, value in ASCII.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tracking, "SECONDS_TO_END", 2)
    with caplog.at_level(logging.WARNING):
        train(tmp_path / "work", 1, 5, lambda: wait_for(doubles.exists))
    for tracker in ("wandb", "trackio"):
        [said] = [text for text in caplog.messages if text.startswith(tracker)]
        assert words in said
        assert tracking.TRACKERS[tracker] in said
        with (tmp_path / "work" / f"{tracker}.lock").open() as lock:
            tracking.fcntl.flock(lock, tracking.fcntl.LOCK_EX | tracking.fcntl.LOCK_NB)  # no process is left


def test_tensorboard_itself_shows_each_step_once(tmp_path: Path, monkeypatch, store: Path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("accelerate")
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
