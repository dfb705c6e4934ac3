"""`make up` and `make down`: the form, deployed runs, and what becomes of them when something is killed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling, Completed, Crashed, Failed, Running
from safetensors import safe_open
from test_cli import HOME, cram, new_user, tiny
from test_server import PROXIES, answering
from websockets.sync.client import ClientConnection, connect

from flows.cli import server
from flows.cram import checked_plan
from model.errors import InputError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SUBMIT = """
var buttons = [...document.querySelectorAll('button')].filter(b => b.textContent.trim() == 'Submit')
if (window.isShown) buttons.map(b => b.click())
window.isShown = document.body.innerText.includes('norm_bias')
"""  # once the form has been there for a while, with all of its fields
OTHERS = ("http://127.0.0.1:1", "http://localhost:1", "https://example.org", "null")  # origins of other web pages
NO_PROXY = ("no_proxy", "NO_PROXY")
LONG = 600  # seconds, on a busy machine


def script(env: dict[str, str], command: str) -> subprocess.CompletedProcess:
    """What `make up` and `make down` run."""
    return subprocess.run([HOME / "flows" / "prefect.sh", command], env=env, capture_output=True, text=True)


@contextmanager
def hosted(env: dict[str, str]) -> Iterator[None]:
    """Server and worker run; they and their runs have ended afterwards."""
    up = script(env, "up")
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        yield
    finally:
        down = script(env, "down")
    assert "stopped" in down.stdout, down.stderr
    assert not processes_of(env)


def processes_of(env: dict[str, str]) -> list[int]:
    """The processes that have this Prefect home in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"PREFECT_HOME={env['PREFECT_HOME']}\0".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy that reaches nothing, and what it was asked for."""
    with answering(502) as found:
        yield found


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, proxied: tuple[str, list[str]]) -> Iterator[dict[str, str]]:
    """The environment of a user who has run `make up` behind a proxy."""
    user = {name: value for name, value in new_user(tmp_path_factory.mktemp("user")).items() if name not in NO_PROXY}
    user |= dict.fromkeys(PROXIES, proxied[0]) | {"CRAM_PYTHON": sys.executable}
    with hosted(user):
        yield user


def by_hand(env: dict[str, str]) -> dict[str, str]:
    """The environment for Prefect's own commands, as the manual says."""
    return env | {"no_proxy": "127.0.0.1"}


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


def pid_of(env: dict[str, str], service: str) -> int:
    return int((Path(env["PREFECT_HOME"]) / f"{service}.pid").read_text())


def begin(client: SyncPrefectClient, override: dict) -> UUID:
    """Submit a run that pretrains for an hour."""
    deployment = client.read_deployment_by_name("cram/full").id
    parameters = {"override": override, "until": "pretrain"}  # of the demo, the default
    return client.create_flow_run_from_deployment(deployment, parameters=parameters).id


def draft(env: dict[str, str]) -> Path:
    """The directory of the training that has begun."""
    found = Path(env["CRAM_ARTIFACTS"]).glob
    pattern = ".partial/pretrain-*/work/metrics.jsonl"
    return wait(lambda: [path for path in found(pattern) if path.stat().st_size], "training begins")[0].parent


def rows(work: Path) -> list[dict]:
    """The complete lines in the metrics of a draft."""
    return list(map(json.loads, (work / "metrics.jsonl").read_text().rpartition("\n")[0].splitlines()))


def steps_in(work: Path) -> int:
    """The number of complete lines in the metrics of a draft."""
    return (work / "metrics.jsonl").read_bytes().count(b"\n")


def trains_on(work: Path) -> None:
    before = steps_in(work)
    wait(lambda: steps_in(work) > before, "further steps")


@pytest.fixture
def paused(client: SyncPrefectClient) -> Iterator[None]:
    """No flow run begins."""
    client.update_work_pool("local", WorkPoolUpdate(is_paused=True))
    yield
    client.update_work_pool("local", WorkPoolUpdate(is_paused=False))


def steps(recipe: str, override: dict, until: str, use: dict, refresh: list) -> list[tuple]:
    """The stages of a run with their params, which its keys are made of."""
    return [(step.stage, step.params) for step in checked_plan(recipe, override, until, use, refresh).steps]


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


def test_the_server_is_this_checkouts_if_its_home_is_and_no_other_is_used_unless_named(
    env: dict[str, str], client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    url = env["PREFECT_API_URL"]
    monkeypatch.setattr(server, "SERVER", url)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert server.listener(server.port_of(url)) == Path(f"/proc/{pid_of(env, 'server')}")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        monkeypatch.setattr(server, "STATE", Path(env["PREFECT_HOME"]))
        assert server.look_for_server() == (url, "")
        assert server.is_running()
        monkeypatch.setattr(server, "STATE", tmp_path / ".prefect")
        used, why = server.look_for_server()
        assert used is None
        assert env["PREFECT_HOME"] in why
        assert f"PREFECT_API_URL={url}" in why
        with pytest.raises(InputError, match=env["PREFECT_HOME"]):
            server.is_running()
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert server.find_server() == url


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


def test_a_deployed_run_is_validated_completes_and_has_a_page(env: dict, client: SyncPrefectClient, override: dict):
    with pytest.raises(httpx.HTTPStatusError, match="max_tokens"):
        begin(client, {"filter": {"max_tokens": 1}})
    parameters = ["-p", "recipe=demo", "-p", f"override={json.dumps(override)}", "-p", "until=vocabulary"]
    run = [sys.executable, "-m", "prefect", "deployment", "run", "cram/full", *parameters, "--watch"]
    done = subprocess.run(run, env=by_hand(env), cwd=HOME, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    stages = {path.name for path in Path(env["CRAM_ARTIFACTS"]).iterdir() if not path.name.startswith(".")}
    assert stages == {"download", "deduplicate", "decontaminate", "measure", "filter", "vocabulary"}
    assert "filter-table" in {artifact.key for artifact in client.read_artifacts()}
    assert client.read_flow_runs()[0].name.startswith("demo-")


def may_post(browser: httpx.Client, origin: str) -> bool:
    """Whether a browser lets pages of this origin send JSON to a server: it asks the server first."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    answer = browser.options("/flows/", headers={"Origin": origin, **asked})
    return answer.is_success and answer.headers.get("Access-Control-Allow-Origin") in (origin, "*")


def test_web_pages_of_other_programs_cannot_start_a_run(env: dict):
    flow, token = '{"name": "made by a page"}', "/csrf-token?client=a-page"
    with httpx.Client(base_url=env["PREFECT_API_URL"]) as browser:
        for origin in OTHERS:
            assert not may_post(browser, origin)
            answer = browser.get(token, headers={"Origin": origin})
            assert "Access-Control-Allow-Origin" not in answer.headers, "the browser keeps the answer from the page"
            for kind in ({"Content-Type": "text/plain"}, {}):  # which a browser sends without asking first
                assert browser.post("/flows/", content=flow, headers={"Origin": origin, **kind}).is_client_error
            assert browser.post("/flows/filter", headers={"Origin": origin}).is_client_error, "it has no token"
        own = {"Origin": str(browser.base_url.join("/")).rstrip("/"), "Content-Type": "application/json"}
        own |= {"Prefect-Csrf-Client": "a-page", "Prefect-Csrf-Token": browser.get(token, headers=own).json()["token"]}
        names = [each["name"] for each in browser.post("/flows/filter", content="{}", headers=own).json()]
        assert "made by a page" not in names
        assert browser.post("/flows/", content=flow, headers=own).is_success


def test_the_servers_own_page_asks_at_the_address_at_which_it_was_opened(env: dict):
    page = env["PREFECT_API_URL"].removesuffix("/api").replace("127.0.0.1", "localhost")
    api = httpx.get(f"{page}/ui-settings").json()["api_url"]
    assert httpx.get(httpx.URL(page).join(api + "/health")).json() is True
    assert httpx.URL(page).join(api).host == "localhost", "another host would be another origin"


def test_the_deployments_have_no_limit_whose_lease_the_server_could_lose(client: SyncPrefectClient):
    deployments = [client.read_deployment_by_name(f"cram/{name}") for name in ("full", "study")]
    assert [deployment.global_concurrency_limit for deployment in deployments] == [None, None]


def test_a_cancelled_run_leaves_its_checkpoint_and_the_next_one_resumes_even_if_that_is_killed(
    env: dict, client: SyncPrefectClient, override: dict
):
    cancelled = begin(client, override)
    work = draft(env)
    waiting = begin(client, override)
    trains_on(work)
    assert not (work / "checkpoint.safetensors").exists(), "the next one is minutes away"
    assert client.read_flow_run(waiting).state.is_scheduled(), "one run at a time"
    client.set_flow_run_state(cancelled, Cancelling())
    wait(lambda: client.read_flow_run(cancelled).state.is_cancelled(), "the end of the run")
    with safe_open(work / "checkpoint.safetensors", "np") as file:
        assert 0 < json.loads(file.metadata()["spent"])["step"] <= len(rows(work))
    assert not (Path(env["CRAM_ARTIFACTS"]) / "pretrain").exists(), "an unfinished stage is not published"
    for killed in (waiting, begin(client, override)):
        wait(lambda killed=killed: client.read_flow_run(killed).state.is_running(), "the next run")
        trains_on(work)
        found = [row["step"] for row in rows(work)]
        assert found == list(range(1, len(found) + 1)), "it resumes"
        os.kill(int(client.read_flow_run(killed).infrastructure_pid), signal.SIGKILL)
        wait(lambda killed=killed: client.read_flow_run(killed).state.is_crashed(), "the worker notices")


def test_a_run_trains_on_without_its_server_and_its_worker_and_down_ends_it_with_a_checkpoint(
    env: dict, client: SyncPrefectClient, override: dict
):
    begin(client, override)
    work = draft(env)
    trains_on(work)
    for service in ("server", "worker"):
        os.kill(pid_of(env, service), signal.SIGKILL)
        trains_on(work)
    before = time.time_ns()
    assert "Run: stopped" in script(env, "down").stdout
    assert not processes_of(env)
    assert (work / "checkpoint.safetensors").stat().st_mtime_ns > before
    assert script(env, "up").returncode == 0
    again = begin(client, override)
    trains_on(work)
    assert client.read_flow_run(again).state.is_running()


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """The address of a program that webhooks call, and what they have said."""
    said: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            said.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", said
        server.shutdown()


def test_the_automation_of_the_manual_tells_how_each_run_ends(
    env: dict, client: SyncPrefectClient, listener: tuple[str, list[str]]
):
    url, said = listener
    manual = (HOME / "flows" / "README.md").read_text()
    [script] = [each for each in re.findall(r"(?s)```python\n(.*?)```", manual) if "Automation" in each]
    made = subprocess.run(
        [sys.executable, "-c", script.replace("https://ntfy.sh/a-secret-topic", url)], env=by_hand(env)
    )
    assert made.returncode == 0
    [automation] = client.read_automations_by_name("A run of cram has ended")
    ends = (Completed(message="All is cached."), Failed(message="The disk is full."), Crashed(message="It was killed."))
    runs = [client.create_flow_run(Flow(lambda: None, name="ending"), state=Running()) for _ in ends]
    try:
        for run, state in zip(runs, ends, strict=True):
            client.set_flow_run_state(run.id, state, force=True)
        wait(lambda: len(said) == len(runs), f"calls of the webhook, not only {said}")
    finally:
        client.delete_automation(automation.id)
        for run in runs:
            client.delete_flow_run(run.id)
    expected = [f"{run.name}: {state.name}. {state.message}" for run, state in zip(runs, ends, strict=True)]
    assert sorted(said) == sorted(expected)


def test_a_port_of_another_program_ends_up_with_a_message(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/api"
        env = new_user(tmp_path) | {"PREFECT_API_URL": url, "CRAM_PYTHON": sys.executable}
        refused = script(env, "up")
    assert refused.returncode == 1
    assert url.split(":")[2].removesuffix("/api") in refused.stderr
    assert not processes_of(env)


def test_the_proxy_of_the_environment_got_no_request_to_this_machine(env: dict[str, str], proxied: tuple):
    """Of all that happened above, in the server, the worker and its runs; and of a command."""
    override = json.dumps({"download": {"source": "files", "files": ["gone"]}})
    assert "gone" in cram(env, "run", "demo", "--override", override).stderr
    here = [asked for asked in proxied[1] if any(host in asked for host in server.HERE)]
    assert here == [], "the server itself asks for a file of GitHub's"
