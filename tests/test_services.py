"""Server, worker and deployment as processes: the form, cancelled runs, and runs that lose their process."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled
from safetensors import safe_open
from test_cli import HOME, await_file, cram, new_user, started, tiny
from websockets.sync.client import connect

from flows import flow_runs, services
from flows.cram import planned
from model import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
LONG = 600  # seconds, on a busy machine


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user who has run `cram up`."""
    found = new_user(tmp_path_factory.mktemp("user"))
    up = cram(found, "up")
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        program = re.search("^Now: (.*) deployment run", up.stdout, re.MULTILINE)[1].split()[-1]
        assert (HOME / program).is_file(), "what is printed can be typed"
        yield found
    finally:
        cram(found, "down")


def ask(env: dict[str, str], path: str, body: dict | None = None, method: str | None = None) -> object:
    """The answer of the server; asked again while its database is busy, as Prefect's client does."""
    data = None if body is None else json.dumps(body).encode()
    url, header = f"{env['PREFECT_API_URL']}/{path}", {"Content-Type": "application/json"}
    deadline = time.monotonic() + LONG
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, header, method=method), timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def wait(happened: Callable[[], object], what: str) -> object:
    """Wait until something happens; its value."""
    deadline = time.monotonic() + LONG
    while not (found := happened()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


@contextmanager
def browser(folder: Path) -> Iterator[Callable[[str], object]]:
    """A headless browser, as a function that evaluates JavaScript in its page."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)} is on the path")
    process = subprocess.Popen(
        [program, f"--user-data-dir={folder}", "--remote-debugging-port=0", *FLAGS, "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        port = wait(
            lambda: (folder / "DevToolsActivePort").exists() and (folder / "DevToolsActivePort").read_text(), ""
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port.split()[0]}/json/list") as answer:
            [page] = [target for target in json.load(answer) if target["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None) as channel:

            def evaluate(script: str) -> object:
                asked = {"id": 1, "method": "Runtime.evaluate", "params": {"expression": script, "returnByValue": True}}
                channel.send(json.dumps(asked))
                while (answer := json.loads(channel.recv(timeout=60))).get("id") != 1:
                    pass
                return answer.get("result", {}).get("result", {}).get("value")  # an error while the page is loaded

            yield evaluate
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def steps(recipe: str, override: dict, until: str, use: dict, refresh: list) -> list[tuple]:
    """The stages of a run with their params, which its keys are made of."""
    return [(step.stage, step.params) for step in planned(recipe, override, until, use, refresh).steps]


def test_the_untouched_form_submits_the_recipe_unchanged(env: dict, tmp_path: Path):
    ask(env, "work_pools/local", {"is_paused": True}, "PATCH")  # nothing is to run
    deployment = ask(env, "deployments/name/cram/full")["id"]
    page = f"{env['PREFECT_API_URL'].removesuffix('/api')}/deployments/deployment/{deployment}/run"
    click = "[...document.querySelectorAll('button')].filter(b => b.textContent.trim() == 'Submit').map(b => b.click()).length"
    try:
        with browser(tmp_path / "profile") as evaluate:
            evaluate(f"location.href = {json.dumps(page)}")
            wait(lambda: "norm_bias" in str(evaluate("document.body.innerText")), "the form, with all of its fields")
            time.sleep(2)  # its fields send what they hold a moment after they are shown

            # A click on a page that is still busy is lost, so click until a run is there.
            def submitted() -> list[dict]:
                if not (runs := ask(env, "flow_runs/filter", {})):
                    evaluate(click)
                    time.sleep(2)
                return runs

            wait(submitted, "a flow run")
    finally:
        ask(env, "work_pools/local", {"is_paused": False}, "PATCH")
    runs = ask(env, "flow_runs/filter", {})  # two clicks may both have counted
    for run in runs:
        assert run["parameters"]["recipe"] == "demo"
        assert steps(**run["parameters"]) == steps("demo", {}, "report", {}, [])
        ask(env, f"flow_runs/{run['id']}", method="DELETE")


def submit(env: dict[str, str], override: str) -> tuple[str, Path]:
    """Submit a run of hours, wait until it is training; its id and the directory of its training."""
    deployment = ask(env, "deployments/name/cram/full")["id"]
    parameters = {"override": json.loads(override), "until": "pretrain"}  # of the demo, the default
    run = ask(env, f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
    store = Path(env["CRAM_ARTIFACTS"])

    def training() -> list[Path]:
        begun = ask(env, f"flow_runs/{run}")["state"]["type"] == "RUNNING"
        return begun and [p for p in store.glob(".partial/pretrain-*/work/metrics.jsonl") if p.stat().st_size]

    return run, wait(training, "training begins")[0].parent


def state(env: dict[str, str], run: str) -> tuple[str, str]:
    """A flow run's state, and its message."""
    about = ask(env, f"flow_runs/{run}")["state"]
    return about["type"], about["message"]


def rows(work: Path) -> list[dict]:
    """The complete lines in the metrics of a draft."""
    return list(map(json.loads, (work / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()))


def prefect(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Run a command of Prefect's."""
    command = [sys.executable, "-m", "prefect", *arguments]
    return subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True, timeout=LONG)


def test_a_deployed_run_is_validated_completes_and_has_a_page(env: dict, tmp_path: Path, toy_texts: list[str]):
    run = "deployment", "run", "cram/full"
    misspelt = prefect(env, *run, "-p", 'override={"filter": {"max_tokens": 1}}')
    assert misspelt.returncode == 1
    assert "max_tokens" in misspelt.stdout + misspelt.stderr
    parameters = ["-p", "recipe=demo", "-p", f"override={tiny(tmp_path, toy_texts)}", "-p", "until=vocabulary"]
    done = prefect(env, *run, *parameters, "--watch", "--watch-timeout", str(LONG))
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {path.name for path in Path(env["CRAM_ARTIFACTS"]).iterdir() if not path.name.startswith(".")}
    assert stages == {"download", "deduplicate", "decontaminate", "measure", "filter", "vocabulary"}
    assert "filter-table" in {artifact["key"] for artifact in ask(env, "artifacts/filter", {})}


def test_a_cancelled_run_leaves_its_checkpoint_and_ends(env: dict, tmp_path: Path, toy_texts: list[str]):
    run, work = submit(env, tiny(tmp_path, toy_texts, 3600))
    assert not (work / "checkpoint.safetensors").exists(), "the next one is minutes away"
    assert prefect(env, "flow-run", "cancel", run).returncode == 0
    wait((work / "checkpoint.safetensors").exists, "a checkpoint")
    wait(lambda: state(env, run)[0] == "CANCELLED", "the end of the run")
    with safe_open(work / "checkpoint.safetensors", "np") as file:
        assert json.loads(file.metadata()["spent"])["step"] == len(rows(work)) > 0
    assert not (Path(env["CRAM_ARTIFACTS"]) / "pretrain").exists(), "an unfinished stage is not published"
    shutil.rmtree(work.parent)  # the next test waits for a draft of its own


def test_stopped_and_killed_runs_free_the_slot_and_the_next_one_resumes(env, tmp_path, toy_texts):
    override = tiny(tmp_path, toy_texts, 3600)
    stopped, work = submit(env, override)
    about = ask(env, f"flow_runs/{stopped}")
    assert about["name"].startswith("demo-")
    assert {"demo", "until pretrain"} <= set(about["tags"])
    again = cram(env, "up")
    assert "Server: answers" in again.stdout
    assert "Worker: running" in again.stdout
    pids = [int(path.read_text()) for path in Path(env["PREFECT_HOME"]).glob("*.pid")]
    down = cram(env, "down")
    assert (len(pids), down.stdout.count("stopped")) == (2, 2)
    assert all(map(services.has_ended, pids))
    saved = (work / "checkpoint.safetensors").stat().st_mtime_ns
    assert cram(env, "up").returncode == 0
    kind, message = state(env, stopped)
    assert (kind, bool(message)) == ("CRASHED", True)
    steps_saved = len(rows(work))
    killed, work = submit(env, override)
    worker = int((Path(env["PREFECT_HOME"]) / "worker.pid").read_text())
    assert killed in services.SUBMITTED.findall((Path(env["PREFECT_HOME"]) / "worker.log").read_text())
    wait(lambda: len(rows(work)) > steps_saved > 0, "it resumes from the checkpoint")
    assert rows(work)[0]["step"] == 1, "the steps of the stopped run are there too"
    assert (work / "checkpoint.safetensors").stat().st_mtime_ns >= saved
    for pid in (worker, *services.children(worker)):
        os.kill(pid, signal.SIGKILL)
    assert state(env, killed)[0] == "RUNNING"
    up = cram(env, "up")
    assert state(env, killed) == ("CRASHED", flow_runs.GONE), up.stdout + up.stderr
    assert ask(env, "deployments/name/cram/full")["global_concurrency_limit"]["active_slots"] == 0


def check_ending(done: subprocess.CompletedProcess, model: Path, again: subprocess.CompletedProcess) -> None:
    """A run ends with scores, filled-in blanks and the path of the page; a cached rerun with the same ones."""
    lines = done.stdout.strip().splitlines()
    assert lines[0].split() == ["task", "metric", "score", "majority"]
    assert lines[1].startswith(" neighbours")
    assert [line.count("%") for line in lines if "%" in line] == [3, 3, 3]
    assert f"pretrain/{model.name}:" in done.stdout
    assert lines[-1].startswith("Full report: ")
    assert Path(lines[-1].removeprefix("Full report: ")).is_file()
    assert again.stdout == done.stdout
    for run in (done, again):
        assert len(run.stderr.splitlines()) <= 20, run.stderr


def test_a_killed_run_resumes_from_its_checkpoint_with_the_rest_of_its_budget(
    env: dict, tmp_path, toy_texts: list[str]
):
    seconds = 11  # the first checkpoint comes after 5
    env = env | {"CRAM_ARTIFACTS": str(tmp_path / "artifacts")}
    command = ["run", "demo", "--override", tiny(tmp_path, toy_texts, seconds)]
    store = Path(env["CRAM_ARTIFACTS"])
    with started(env, tmp_path / "log", *command) as process:
        await_file(process, store, ".partial/pretrain-*/work/checkpoint.safetensors", tmp_path / "log")
    assert not (store / "pretrain").exists()
    [metrics] = store.glob(".partial/pretrain-*/work/metrics.jsonl")
    whole_lines = metrics.read_text().rpartition("\n")[0].splitlines()
    before = [(row["step"], row["seconds"]) for row in map(json.loads, whole_lines)]
    done = cram(env, *command)
    assert done.returncode == 0, done.stderr + done.stdout
    (made,) = (p for p in (store / "pretrain").iterdir() if not p.is_symlink())
    table = pq.read_table(made / "metrics.parquet", columns=["step", "seconds"]).to_pydict()
    steps, clock = table["step"], table["seconds"]
    assert steps == list(range(1, len(steps) + 1))
    kept = sum(a == b for a, b in zip(before, zip(steps, clock, strict=True), strict=False))
    assert 0 < kept < len(steps), "the steps before the checkpoint are those of the killed run, the others are not"
    assert before[:kept] == list(zip(steps, clock, strict=True))[:kept]
    assert all(a < b for a, b in pairwise(clock)), "the clock goes on where it stood at the checkpoint"
    assert clock[-2] < seconds <= clock[-1], "and runs until the budget is spent once"
    stats = json.loads((made / "stage.json").read_text())["stats"]
    assert stats["steps"] == steps[-1]
    assert clock[-1] - 0.001 <= stats["seconds_on_the_clock"] < clock[-1] + 1, "read again after the last row"
    assert list((store / ".partial").iterdir()) == []
    check_ending(done, made, cram(env, *command))


class Server:
    """A client of a server with some flow runs."""

    def __init__(self, *runs: SimpleNamespace) -> None:
        self.runs = {str(run.id): run for run in runs}

    def read_flow_runs(self, flow_run_filter) -> list[SimpleNamespace]:
        return [self.runs[str(name)] for name in flow_run_filter.id.any_ if str(name) in self.runs]

    def set_flow_run_state(self, run, state, force: bool) -> None:
        self.runs[str(run)].state = state


def flow_run(state, pid: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(id=uuid4(), name="demo-x", state=state, infrastructure_pid=pid and str(pid))


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where flow runs lock their files."""
    monkeypatch.setattr(flow_runs, "LOCKS", tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_runs_of_this_machine_whose_process_is_gone_are_ended(locks: Path):
    gone, finished, later, cancelled = map(flow_run, (Running(), Completed(), Scheduled(), Cancelling()))
    elsewhere, lives = flow_run(Running(), 2**22), flow_run(Running(), 2**22)
    for run in (gone, finished, later, cancelled, lives):
        (locks / str(run.id)).touch()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(locks / str(lives.id))], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    server = Server(gone, finished, later, cancelled, elsewhere, lives)
    try:
        assert len(flow_runs.end_abandoned(server, [])) == 2
    finally:
        holder.communicate(b"\n")
    assert {run.state.type.value for run in (lives, elsewhere)} == {"RUNNING"}
    assert (gone.state.type.value, gone.state.message) == ("CRASHED", flow_runs.GONE)
    assert (cancelled.state.type.value, later.state.type.value) == ("CANCELLED", "SCHEDULED")
    assert {path.name for path in locks.iterdir()} == {str(lives.id), str(later.id)}
    flow_runs.end_abandoned(server, [])
    assert lives.state.type.value == "CRASHED", "once its process has ended"


def test_a_run_whose_server_was_away_gets_the_state_in_which_it_ended(locks: Path, monkeypatch: pytest.MonkeyPatch):
    run = flow_run(Running())
    with (locks / str(run.id)).open("w") as file:
        monkeypatch.setattr(flow_runs, "_held", [file])
        flow_runs.remember(Completed())
    [line] = flow_runs.end_abandoned(Server(run), [])
    assert run.state.type.value == "COMPLETED"
    assert "completed" in line


def test_a_run_that_never_began_is_ended_unless_its_process_lives(locks: Path):
    name = str(uuid4())
    run = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(run, env={"RUN": name}, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()  # until it runs, its environment cannot be read
    starting, gone = flow_run(Pending(), child.pid), flow_run(Pending(), child.pid)
    starting.id = name
    server = Server(starting, gone)
    try:
        flow_runs.end_abandoned(server, [str(starting.id), str(gone.id)])
    finally:
        child.communicate(b"\n")
    assert (starting.state.type.value, gone.state.type.value) == ("PENDING", "CRASHED")


def test_a_port_of_another_program_is_refused_with_its_number(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "STATE", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(services, "server_answers", lambda url: False)
        with pytest.raises(InputError, match=rf"{port} .*PREFECT_API_URL="):
            services.up(f"http://127.0.0.1:{port}/api", print)
    assert not services.is_taken(port)


def test_the_runs_of_a_worker_are_read_from_its_log(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "STATE", tmp_path)
    assert services.submitted() == []
    name = str(uuid4())
    (tmp_path / "worker.log").write_text(f"12:00 | Worker 'a' submitting flow run '{name}'\nAborted '{uuid4()}'\n")
    assert services.submitted() == [name]
