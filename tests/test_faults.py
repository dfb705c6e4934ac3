"""`make faults` notices what it looks for; the faults themselves take most of an hour."""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

CODE = b"some model"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    return importlib.import_module("trials")


def artifact(folder: Path, **about: object) -> Path:
    """An artifact as a stage leaves it."""
    folder.mkdir(parents=True)
    (folder / "model").write_bytes(CODE)
    files = [{"path": "model", "bytes": len(CODE), "sha256": hashlib.sha256(CODE).hexdigest()}]
    (folder / "stage.json").write_text(json.dumps({"files": files, "stats": {}, "stage": folder.parent.name} | about))
    return folder


def test_damaged_half_written_and_lost_artifacts_are_noticed(tmp_path: Path, trials: ModuleType):
    store = trials.Store(tmp_path)
    flipped, half, lost = (artifact(tmp_path / "pretrain" / key) for key in ("1", "2", "3"))
    hollow = artifact(tmp_path / "tokenize" / "4", hollow=["model"])
    (tmp_path / ".partial" / "pretrain-5").mkdir(parents=True)
    (hollow / "model").unlink()
    assert store.problems() == []
    (flipped / "model").write_bytes(CODE[:-1] + b"\0")
    (half / "stage.json").unlink()
    lost.rename(tmp_path / "elsewhere")
    damaged, incomplete, gone = store.problems()
    assert damaged == "pretrain/1: model is damaged"
    assert incomplete.startswith("pretrain/2 is incomplete")
    assert gone == "pretrain/3 is lost"


@pytest.mark.parametrize("said", ["Traceback (most recent call last):\ncram: It ended.", "KeyError", "cram: and then"])
def test_a_message_that_is_no_sentence_or_follows_a_traceback_is_noticed(said: str, trials: ModuleType):
    row = trials.Row("fault", "stage")
    row.hear(SimpleNamespace(text="cram: The disk is full.", said="cram: The disk is full.", code=1))
    assert row.problems == []
    row.hear(SimpleNamespace(text=said, said=said.splitlines()[-1], code=1))
    assert len(row.problems) == 1


def test_a_process_that_is_left_is_noticed_and_ended_whatever_its_group(tmp_path: Path, trials: ModuleType):
    sleeping = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    left = subprocess.Popen(sleeping, env=trials.ENV, start_new_session=True, stdout=subprocess.PIPE)
    left.stdout.readline()
    row = trials.Row("fault", "stage")
    row.check(trials.Store(tmp_path), seconds=0)
    assert "time.sleep(600)" in row.problems[0]
    assert left.wait(60) == -9
    assert os.getpid() not in trials.processes()
