"""`make up` and `make down`: the form, deployed runs and web pages. `make faults` kills such runs and their server."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from prefect import Flow
from prefect.client.orchestration import SyncPrefectClient
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Crashed, Failed, Running
from test_cli import HOME, cram, new_user, tiny
from test_recipes import schema
from test_server import PROXIES, answering

from flows.cli import server
from model.errors import InputError

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


def test_the_server_is_this_checkouts_if_its_home_is_and_no_other_is_used_unless_named(
    env: dict[str, str], client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    url = env["PREFECT_API_URL"]
    monkeypatch.setattr(server, "SERVER", url)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    pid = (Path(env["PREFECT_HOME"]) / "server.pid").read_text().strip()
    assert server.listener(server.port_of(url)) == Path("/proc", pid)
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


def test_the_form_is_made_of_the_schema_that_the_tests_of_recipes_fill_in(client: SyncPrefectClient):
    deployment = client.read_deployment_by_name("cram/full")
    assert deployment.parameter_openapi_schema == schema()


def test_a_deployed_run_is_validated_completes_and_has_a_page(env: dict, client: SyncPrefectClient, override: dict):
    deployment = client.read_deployment_by_name("cram/full").id
    with pytest.raises(httpx.HTTPStatusError, match="max_tokens"):
        client.create_flow_run_from_deployment(deployment, parameters={"override": {"filter": {"max_tokens": 1}}})
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
    flow = '{"name": "made by a page"}'
    token = "/csrf-token?client=a-page"
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


def test_the_proxy_of_the_environment_got_no_request_to_this_machine(env: dict[str, str], proxied: tuple):
    """Of all that happened above, in the server, the worker and its runs; and of a command."""
    override = json.dumps({"download": {"source": "files", "files": ["gone"]}})
    assert "gone" in cram(env, "run", "demo", "--override", override).stderr
    here = [asked for asked in proxied[1] if any(host in asked for host in server.HERE)]
    assert here == [], "the server itself asks for a file of GitHub's"
