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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.states import Cancelling, Completed, Pending, Running, Scheduled, Suspended
from safetensors import safe_open
from test_cli import HOME, cram, new_user, tiny
from test_server import check_only_own_pages_act
from websockets.sync.client import ClientConnection, connect

from flows import flow_runs, services
from flows.cram import planned
from model import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SUBMIT = """
if (window.isShown) [...document.querySelectorAll('button')].filter(b => b.textContent.trim() == 'Submit').map(b => b.click())
window.isShown = document.body.innerText.includes('norm_bias')
"""  # once the form has been there for a while, with all of its fields
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
        down = cram(found, "down")
    assert down.stdout.count("stopped") == 2, down.stderr + down.stdout


@pytest.fixture(scope="module")
def client(env: dict[str, str]) -> Iterator[SyncPrefectClient]:
    with SyncPrefectClient(api=env["PREFECT_API_URL"]) as made:
        yield made


@pytest.fixture(scope="module")
def override(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> dict:
    """The demo on toy text, with an hour of pretraining."""
    return json.loads(tiny(tmp_path_factory.mktemp("text"), toy_texts, 3600))


def wait(happened: Callable[[], object], what: str) -> object:
    """Wait until something happens; its value."""
    deadline = time.monotonic() + LONG
    while not (found := happened()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


@pytest.fixture
def paused(client: SyncPrefectClient) -> Iterator[None]:
    """No flow run begins."""
    client.update_work_pool("local", WorkPoolUpdate(is_paused=True))
    yield
    client.update_work_pool("local", WorkPoolUpdate(is_paused=False))


def steps(recipe: str, override: dict, until: str, use: dict, refresh: list) -> list[tuple]:
    """The stages of a run with their params, which its keys are made of."""
    return [(step.stage, step.params) for step in planned(recipe, override, until, use, refresh).steps]


@pytest.fixture
def form(env: dict[str, str], client: SyncPrefectClient, tmp_path: Path) -> Iterator[ClientConnection]:
    """A headless browser that shows the form of the deployment."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None) or pytest.skip("there is no browser here")
    deployment = client.read_deployment_by_name("cram/full").id
    page = f"{env['PREFECT_API_URL'].removesuffix('/api')}/deployments/deployment/{deployment}/run"
    command = [program, f"--user-data-dir={tmp_path}", "--remote-debugging-port=0", *FLAGS, page]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        place = tmp_path / "DevToolsActivePort"
        port = wait(lambda: place.exists() and place.read_text(), "a browser").split()[0]
        [shown] = [target for target in httpx.get(f"http://127.0.0.1:{port}/json/list").json() if target["url"] == page]
        with connect(shown["webSocketDebuggerUrl"], max_size=None) as channel:
            yield channel
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_the_untouched_form_submits_the_recipe_unchanged(client: SyncPrefectClient, paused, form: ClientConnection):
    def submitted() -> list:
        form.send(json.dumps({"id": 1, "method": "Runtime.evaluate", "params": {"expression": SUBMIT}}))
        form.recv(timeout=LONG)
        time.sleep(2)  # the fields send what they hold a moment after they are shown
        return client.read_flow_runs()

    wait(submitted, "a flow run")
    for run in client.read_flow_runs():  # two clicks may both have counted
        assert run.parameters["recipe"] == "demo"
        assert steps(**run.parameters) == steps("demo", {}, "report", {}, [])
        client.delete_flow_run(run.id)


def submit(client: SyncPrefectClient, env: dict[str, str], override: dict) -> tuple[UUID, Path]:
    """Submit a run of an hour, wait until it is training; its id and the directory of its training."""
    deployment = client.read_deployment_by_name("cram/full").id
    parameters = {"override": override, "until": "pretrain"}  # of the demo, the default
    run = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
    store = Path(env["CRAM_ARTIFACTS"])

    def training() -> list[Path]:
        begun = client.read_flow_run(run).state.is_running()
        return begun and [p for p in store.glob(".partial/pretrain-*/work/metrics.jsonl") if p.stat().st_size]

    return run, wait(training, "training begins")[0].parent


def rows(work: Path) -> list[dict]:
    """The complete lines in the metrics of a draft."""
    return list(map(json.loads, (work / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()))


def test_a_deployed_run_is_validated_completes_and_has_a_page(env: dict, client: SyncPrefectClient, override: dict):
    with pytest.raises(httpx.HTTPStatusError, match="max_tokens"):
        submit(client, env, {"filter": {"max_tokens": 1}})
    parameters = ["-p", "recipe=demo", "-p", f"override={json.dumps(override)}", "-p", "until=vocabulary"]
    run = [sys.executable, "-m", "prefect", "deployment", "run", "cram/full", *parameters, "--watch"]
    done = subprocess.run(run, env=env, cwd=HOME, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {path.name for path in Path(env["CRAM_ARTIFACTS"]).iterdir() if not path.name.startswith(".")}
    assert stages == {"download", "deduplicate", "decontaminate", "measure", "filter", "vocabulary"}
    assert "filter-table" in {artifact.key for artifact in client.read_artifacts()}


def test_web_pages_of_other_programs_cannot_start_a_run(env: dict):
    with httpx.Client(base_url=env["PREFECT_API_URL"]) as browser:
        check_only_own_pages_act(browser)


def test_the_servers_own_page_asks_at_the_address_at_which_it_was_opened(env: dict):
    page = env["PREFECT_API_URL"].removesuffix("/api").replace("127.0.0.1", "localhost")
    api = httpx.get(f"{page}/ui-settings").json()["api_url"]
    assert httpx.get(httpx.URL(page).join(api + "/health")).json() is True
    assert httpx.URL(page).join(api).host == "localhost", "another host would be another origin"


def test_the_two_deployments_share_one_slot(client: SyncPrefectClient):
    pools = {client.read_deployment_by_name(f"cram/{name}").work_pool_name for name in ("full", "study")}
    assert [client.read_work_pool(name).concurrency_limit for name in pools] == [1]


def test_a_cancelled_run_leaves_its_checkpoint_and_ends(env: dict, client: SyncPrefectClient, override: dict):
    run, work = submit(client, env, override)
    assert not (work / "checkpoint.safetensors").exists(), "the next one is minutes away"
    client.set_flow_run_state(run, Cancelling())
    wait((work / "checkpoint.safetensors").exists, "a checkpoint")
    wait(lambda: client.read_flow_run(run).state.is_cancelled(), "the end of the run")
    with safe_open(work / "checkpoint.safetensors", "np") as file:
        assert json.loads(file.metadata()["spent"])["step"] == len(rows(work)) > 0
    assert not (Path(env["CRAM_ARTIFACTS"]) / "pretrain").exists(), "an unfinished stage is not published"
    shutil.rmtree(work.parent)  # the next test waits for a draft of its own


@pytest.fixture
def url(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The server's address, with this process as one of its user's commands."""
    address, state = env["PREFECT_API_URL"], Path(env["PREFECT_HOME"])
    for name, value in (env | {"PREFECT_SERVER_API_PORT": str(urlsplit(address).port)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(services, "STATE", state)
    monkeypatch.setattr(flow_runs, "LOCKS", state / "runs")
    return address


def test_a_run_outlives_its_server_and_no_other_begins_until_it_is_suspended_and_has_ended(
    env: dict, client: SyncPrefectClient, override: dict, url: str
):
    def trains_on(work: Path) -> None:
        before = len(rows(work))
        wait(lambda: len(rows(work)) > before, "further steps")

    first, work = submit(client, env, override)
    assert client.read_flow_run(first).state.state_details.deployment_concurrency_lease_id is None, "it would expire"
    deployment, parameters = client.read_deployment_by_name("cram/full").id, {"override": override, "until": "pretrain"}
    second = client.create_flow_run_from_deployment(deployment, parameters=parameters).id
    server = services.running("server")
    os.kill(server, signal.SIGKILL)
    wait(lambda: services.has_ended(server), "the end of the server")
    trains_on(work)
    services.up(url, print)  # which sets the limits anew
    trains_on(work)
    assert client.read_flow_run(first).state.is_running()
    assert client.read_flow_run(second).state.is_scheduled()
    process = int(client.read_flow_run(first).infrastructure_pid)
    client.set_flow_run_state(first, Suspended(timeout_seconds=LONG), force=True)  # as Prefect's page does it
    wait(lambda: services.has_ended(process), "the end of the suspended run")
    saved = (work / "checkpoint.safetensors").stat().st_mtime
    assert client.read_flow_run(first).state.is_paused()
    wait(lambda: client.read_flow_run(second).state.is_running(), "the next run")
    assert client.read_flow_run(second).start_time.timestamp() > saved
    client.resume_flow_run(first)
    client.set_flow_run_state(second, Cancelling())
    wait(lambda: client.read_flow_run(first).state.is_running(), "the resumed run")
    trains_on(work)
    assert rows(work)[0]["step"] == 1, "it resumes from the checkpoint"
    client.set_flow_run_state(first, Cancelling())
    wait(lambda: client.read_flow_run(first).state.is_cancelled(), "the end of the run")
    shutil.rmtree(work.parent)


def test_stopped_and_killed_runs_free_the_slot_and_the_next_one_resumes(env, client, override, url: str, monkeypatch):
    def said_by(command: Callable, *arguments: str) -> list[str]:
        said = []
        command(*arguments, said.append)
        return said

    stopped, work = submit(client, env, override)
    about = client.read_flow_run(stopped)
    assert about.name.startswith("demo-")
    assert {"demo", "until pretrain"} <= set(about.tags)
    assert {f"Server: answers at {url}", "Worker: running"} <= set(said_by(services.up, url))
    monkeypatch.setattr(services, "prefect", lambda *command: None)  # the flow stays deployed as it is
    pids = [services.running(name) for name in ("worker", "server")]
    assert {"Worker: stopped", "Server: stopped"} <= set(said_by(services.down))
    assert all(map(services.has_ended, pids))
    saved = (work / "checkpoint.safetensors").stat().st_mtime_ns
    services.up(url, print)
    ended = client.read_flow_run(stopped).state
    assert (ended.is_crashed(), bool(ended.message)) == (True, True)
    steps_saved = len(rows(work))
    killed, work = submit(client, env, override)
    wait(lambda: len(rows(work)) > steps_saved > 0, "it resumes from the checkpoint")
    assert rows(work)[0]["step"] == 1, "the steps of the stopped run are there too"
    assert (work / "checkpoint.safetensors").stat().st_mtime_ns >= saved
    assert services.submitted() == [str(killed)]
    pids = [services.running("worker"), *services.children(services.running("worker"))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait(lambda: all(map(services.has_ended, pids)), "the end of the processes")
    # a killed process is a zombie before its last thread has ended, which frees the lock
    wait(lambda: flow_runs.is_free(flow_runs.LOCKS / str(killed)), "the end of its last thread")
    assert client.read_flow_run(killed).state.is_running()
    said = said_by(services.up, url)
    ended = client.read_flow_run(killed).state
    assert (ended.is_crashed(), ended.message) == (True, flow_runs.GONE), said


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


@contextmanager
def living(script: str, *arguments: str, env: dict[str, str] | None = None) -> Iterator[int]:
    """A Python that has run a script and lives; its process."""
    command = [sys.executable, "-c", f"{script}; print(flush=True); input()", *arguments]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.communicate(b"\n")


def test_runs_of_this_machine_whose_process_is_gone_are_ended(locks: Path):
    gone, finished, later, cancelled = map(flow_run, (Running(), Completed(), Scheduled(), Cancelling()))
    elsewhere, lives = flow_run(Running(), 2**22), flow_run(Running(), 2**22)
    for run in (gone, finished, later, cancelled, lives):
        (locks / str(run.id)).touch()
    server = Server(gone, finished, later, cancelled, elsewhere, lives)
    hold = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)"
    with living(hold, str(locks / str(lives.id))):
        assert len(flow_runs.end_abandoned(server, [])) == 2
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
    with living("pass", env={"RUN": name}) as process:
        starting, gone = flow_run(Pending(), process), flow_run(Pending(), process)
        starting.id = name
        flow_runs.end_abandoned(Server(starting, gone), [name, str(gone.id)])
    assert (starting.state.type.value, gone.state.type.value) == ("PENDING", "CRASHED")


def test_a_port_of_another_program_is_refused_with_its_number(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(services, "STATE", tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(services, "server_answers", lambda url: False)
        with pytest.raises(InputError, match=rf"{port} .*PREFECT_API_URL="):
            services.up(f"http://127.0.0.1:{port}/api", print)
    assert not services.is_taken(port)
