"""The command line, as processes where exit codes and signals matter."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import write_jsonl
from typer.testing import CliRunner

from flows.cli import LINE, app, differences, flat, laid_out
from tasks.corpus import Download, download
from tasks.dedup import Deduplicate, deduplicate

CRAM = [sys.executable, "-m", "flows.cli"]
HOME = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose store is empty and whose server doesn't run."""
    own = {"CRAM_ARTIFACTS": str(tmp_path / "artifacts"), "PREFECT_HOME": str(tmp_path / "prefect")}
    own |= {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api", "PREFECT_LOGGING_LEVEL": "INFO"}
    return os.environ | own


def tiny(tmp_path: Path, texts: list[str], seconds: float = 2) -> str:
    """The demo recipe on toy text, with so many seconds of pretraining."""
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    return json.dumps(
        {
            "download": {"source": "files", "files": [str(shard)], "megabytes": 0},
            "filter": {"vocabulary_entries": 400, "max_tokens_per_char": 0.5},
            "vocabulary": {"entries": 400},
            "tokenize": {"length": 32, "heldout_fraction": 0.3},
            "pretrain": {
                "architecture": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 64},
                "budget": seconds / 3600,
                "batch_size": 8,
            },
            "finetune": {"tasks": ["neighbours"], "epochs": 1, "max_tokens": 32, "baseline": False},
        }
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "dmo"], "There is no recipe 'dmo'"),
        (["run", "demo", "--override", "{"], "--override is no JSON"),
        (["run", "demo", "--override", '{"filter": {"max": 1}}'], "filter.max is no field"),
        (["run", "demo", "--until", "filtr"], "There is no stage 'filtr'"),
        (["run", "demo", "--use", "filter"], "expected STAGE=KEY"),
        (["show", "filter/123"], "No complete artifact of filter"),
        (["ls", "nothing"], "There is no stage 'nothing'"),
        (["diff", "filter", "1", "2"], "No complete artifact of filter"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_1(env: dict, arguments: list[str], words: str):
    done = subprocess.run([*CRAM, *arguments], env=env, capture_output=True, text=True, cwd=HOME)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert not Path(env["CRAM_ARTIFACTS"]).exists(), "nothing was published"


def test_a_killed_run_goes_on_from_its_checkpoint_with_the_budget_left(env: dict, tmp_path: Path, toy_texts: list[str]):
    command = [*CRAM, "run", "demo", "--override", tiny(tmp_path, toy_texts, seconds=16)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, env=env, cwd=HOME, stdout=log, stderr=log, start_new_session=True)
    store, deadline = Path(env["CRAM_ARTIFACTS"]), time.monotonic() + 180
    while not list(store.glob(".partial/pretrain-*/work/checkpoint.safetensors")):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # with its temporary server, which would outlive it
    process.wait()
    assert not (store / "pretrain").exists()
    done = subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "Going on from step" in done.stdout + done.stderr
    (made,) = (p for p in (store / "pretrain").iterdir() if not p.is_symlink())
    about = json.loads((made / "stage.json").read_text())
    assert 16 <= about["stats"]["seconds_on_the_clock"] < 24
    assert about["seconds"] < about["stats"]["seconds_on_the_clock"], "the rerun spent only what was left"
    assert "neighbours" in done.stdout
    assert "The page with all of it" in done.stdout
    assert {p.name for p in (store / ".partial").iterdir()} == set()


def test_ls_and_show_tell_what_is_there_and_what_differs(store: Path, tmp_path: Path, toy_texts: list[str]):
    runner = CliRunner()
    assert "No artifacts" in runner.invoke(app, ["ls"]).stdout
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    made = [download.fn(Download(source="files", files=[str(shard)], documents=n)) for n in (0, 50)]
    deduplicate.fn(Deduplicate(), made[1])
    listed = runner.invoke(app, ["ls"]).stdout
    for artifact, difference in zip(made, ("documents=0", "documents=50"), strict=True):
        (line,) = (row for row in listed.splitlines() if artifact.key in row)
        assert difference in line
        assert "max_lost" not in line, "what does not differ is not listed"
    assert "deduplicate" not in runner.invoke(app, ["ls", "download"]).stdout
    shown = runner.invoke(app, ["show", f"download/{made[0].key[:6]}"]).stdout
    assert made[0].key in shown
    assert "toy.jsonl" in shown
    assert '"documents": 300' in shown
    assert f"corpus: download/{made[1].key}" in runner.invoke(app, ["show", "deduplicate"]).stdout


def test_differences_are_by_dotted_path():
    manifests = [{"params": {"a": {"b": n}, "c": 1}, "inputs": {"corpus": f"x/{n}"}} for n in (1, 2)]
    assert differences(manifests) == ["a.b=1, from corpus=x/1", "a.b=2, from corpus=x/2"]
    assert flat({"a": {"b": [1]}, "c": "d"}) == {"a.b": "[1]", "c": "d"}


@pytest.mark.parametrize(
    "value", [{}, [], 1.5, "x", {"a": {"b": [1, {}]}}, {f"n{i}": {"d": [i] * i, "e": "é"} for i in range(60)}]
)
def test_statistics_are_printed_as_json_with_short_values_on_one_line(value):
    text = laid_out(value)
    assert json.loads(text) == value
    assert all(len(line) <= LINE + 20 or "[" in line for line in text.splitlines())
    assert laid_out({"name": {"documents": 1, "characters": 2}}) == '{"name": {"documents": 1, "characters": 2}}'


def test_up_deploys_a_run_completes_and_down_ends_what_up_started(env: dict, tmp_path: Path, toy_texts: list[str]):
    def prefect(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True, timeout=180)

    up = subprocess.run([*CRAM, "up"], env=env, cwd=HOME, capture_output=True, text=True)
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        misspelt = prefect("deployment", "run", "cram/full", "-p", 'override={"filter": {"max_tokens": 1}}')
        assert misspelt.returncode == 1
        assert "max_tokens" in misspelt.stdout + misspelt.stderr
        parameters = ["-p", "recipe=demo", "-p", f"override={tiny(tmp_path, toy_texts)}", "-p", "until=vocabulary"]
        done = prefect("deployment", "run", "cram/full", *parameters, "--watch", "--watch-timeout", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        found = {p.name for p in Path(env["CRAM_ARTIFACTS"]).iterdir() if not p.name.startswith(".")}
        assert found == {"download", "deduplicate", "decontaminate", "filter", "vocabulary"}
        assert "filter-table" in prefect("artifact", "ls").stdout
        again = subprocess.run([*CRAM, "up"], env=env, cwd=HOME, capture_output=True, text=True)
        assert "Server: answers" in again.stdout
        assert "Worker: running" in again.stdout
    finally:
        pids = [int(p.read_text()) for p in Path(env["PREFECT_HOME"]).glob("*.pid")]
        down = subprocess.run([*CRAM, "down"], env=env, cwd=HOME, capture_output=True, text=True)
    assert len(pids) == 2
    assert down.stdout.count("ended") == 2
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
