"""Server, worker and deployment as processes: what the form sends, and runs that lose their process."""

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
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled
from test_cli import HOME, cram, tiny, user_after_up
from websockets.sync.client import connect

from flows import flow_runs, services
from flows.cram import planned
from model import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "about:blank",
)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user who has run `cram up`."""
    with user_after_up(tmp_path_factory.mktemp("user")) as (found, printed):
        program = re.search("^Now: (.*) deployment run", printed, re.MULTILINE)[1].split()[-1]
        assert (HOME / program).is_file(), "what is printed can be typed"
        yield found


def ask(env: dict[str, str], path: str, body: dict | None = None, method: str | None = None) -> object:
    """What the server answers; asked again while its database is busy, as Prefect's client does."""
    data = None if body is None else json.dumps(body).encode()
    url, header = f"{env['PREFECT_API_URL']}/{path}", {"Content-Type": "application/json"}
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, header, method=method), timeout=60) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def wait(happened: Callable[[], object], what: str) -> object:
    """What happens, once it does."""
    deadline = time.monotonic() + 120
    while not (found := happened()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


@contextmanager
def browser(folder: Path) -> Iterator[Callable[[str], object]]:
    """A browser without a screen, as a function that evaluates JavaScript in its one page."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)} is on the path")
    process = subprocess.Popen(
        [program, f"--user-data-dir={folder}", "--remote-debugging-port=0", *FLAGS],
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
    """All that a run would do: what its keys are made of."""
    return [(step.stage, step.params) for step in planned(recipe, override, until, use, refresh).steps]


def test_the_untouched_form_runs_the_recipe_to_the_key(env: dict, tmp_path: Path):
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
    """Submit a run of hours, wait until it is training; its id and where it trains."""
    deployment = ask(env, "deployments/name/cram/full")["id"]
    parameters = {"override": json.loads(override), "until": "pretrain"}  # of the demo, as none is chosen
    run = ask(env, f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
    store = Path(env["CRAM_ARTIFACTS"])

    def training() -> list[Path]:
        begun = ask(env, f"flow_runs/{run}")["state"]["type"] == "RUNNING"
        return begun and [p for p in store.glob(".partial/pretrain-*/work/metrics.jsonl") if p.stat().st_size]

    return run, wait(training, "training begins")[0].parent


def state(env: dict[str, str], run: str) -> tuple[str, str]:
    """A flow run's state, and its message."""
    found = ask(env, f"flow_runs/{run}")["state"]
    return found["type"], found["message"]


def first_step(work: Path) -> int:
    """The first step that stands in the metrics of a draft."""
    return json.loads((work / "metrics.jsonl").read_text().splitlines()[0])["step"]


def test_stopped_and_killed_runs_free_the_slot_and_the_next_goes_on_from_the_checkpoint(env, tmp_path, toy_texts):
    override = tiny(tmp_path, toy_texts, 3600)
    stopped, work = submit(env, override)
    told = ask(env, f"flow_runs/{stopped}")
    assert told["name"].startswith("demo-")
    assert {"demo", "until pretrain"} <= set(told["tags"])
    assert cram(env, "down").returncode == 0
    saved = (work / "checkpoint.safetensors").stat().st_mtime_ns
    assert cram(env, "up").returncode == 0
    kind, message = state(env, stopped)
    assert (kind, bool(message)) == ("CRASHED", True)
    steps_saved = len((work / "metrics.jsonl").read_text().splitlines())
    killed, work = submit(env, override)
    worker = int((Path(env["PREFECT_HOME"]) / "worker.pid").read_text())
    assert killed in services.SUBMITTED.findall((Path(env["PREFECT_HOME"]) / "worker.log").read_text())
    wait(
        lambda: len((work / "metrics.jsonl").read_text().splitlines()) > steps_saved > 0,
        "it goes on from the checkpoint",
    )
    assert first_step(work) == 1, "the steps of the stopped run are there too"
    assert (work / "checkpoint.safetensors").stat().st_mtime_ns >= saved
    for pid in (worker, *services.children(worker)):
        os.kill(pid, signal.SIGKILL)
    assert state(env, killed)[0] == "RUNNING"
    up = cram(env, "up")
    assert state(env, killed) == ("CRASHED", flow_runs.GONE), up.stdout + up.stderr
    assert ask(env, "deployments/name/cram/full")["global_concurrency_limit"]["active_slots"] == 0


class Server:
    """Knows some flow runs, as Prefect's client does."""

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


def test_only_runs_of_this_machine_whose_process_is_gone_are_ended(locks: Path):
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


def test_a_run_locks_its_file_for_as_long_as_its_process_lives(locks: Path):
    name = str(uuid4())
    run = f"""
import sys
from pathlib import Path
from types import SimpleNamespace as Of
from prefect.context import FlowRunContext
from flows import flow_runs
from contextlib import nullcontext
from prefect.states import Completed
from tasks.workers.progress import reporter
flow_runs.LOCKS = Path({str(locks)!r})
reporter.send = lambda name, call: print(name, flush=True)
flow_runs.reports_bounded = lambda has_ended: print("bounded", flush=True) or nullcontext()
context = Of(flow_run=Of(id={name!r}, name="mine", tags=["own"], deployment_id="of the worker"))
context.parameters = dict(recipe="pocket", until="filter")
FlowRunContext.get = lambda: context
print(flow_runs.register(), flush=True)
for keep in flow_runs.untaken:
    keep(Completed())
print("kept", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HOME
    )
    try:
        assert [process.stdout.readline() for _ in range(4)] == ["bounded\n", "tags\n", "pocket-mine\n", "kept\n"]
        assert not flow_runs.is_free(locks / name)
    finally:
        process.kill()
        process.wait()
    assert flow_runs.is_free(locks / name)
    run = flow_run(Running())
    run.id = name
    [line] = flow_runs.end_abandoned(Server(run), [])
    assert run.state.type.value == "COMPLETED", "as it ended, though the server did not take that"
    assert "completed" in line


def test_a_run_that_the_worker_took_on_and_that_never_began_is_ended_unless_its_process_lives(locks: Path):
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


def test_a_port_that_another_program_has_is_named_at_once_with_that_program(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "STATE", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(services, "server_answers", lambda url: False)
        with pytest.raises(InputError, match=rf"{port} .*process {os.getpid()}\).*PREFECT_API_URL="):
            services.up(f"http://127.0.0.1:{port}/api", print)
    assert not services.is_taken(port)


def test_the_worker_log_says_which_runs_the_worker_took_on(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "STATE", tmp_path)
    assert services.submitted() == []
    name = str(uuid4())
    (tmp_path / "worker.log").write_text(f"12:00 | Worker 'a' submitting flow run '{name}'\nAborted '{uuid4()}'\n")
    assert services.submitted() == [name]
