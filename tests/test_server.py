"""Which Prefect server a command uses, what is said of others, and that no proxy gets what goes to this machine."""

import logging
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings
from test_cli import HOME

from flows.cli import server
from model.errors import InputError

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@contextmanager
def answering(
    status: int, body: bytes = b"", certified: Path | None = None, **headers: str
) -> Iterator[tuple[str, list[str]]]:
    """A program that gives every request this answer: its address, and the targets of the requests so far.

    `certified`: a file with a key and a certificate, to answer with TLS.
    """
    asked: list[str] = []

    class Program(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_CONNECT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Program) as program:
        if certified:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certified)
            program.socket = context.wrap_socket(program.socket, server_side=True)
        threading.Thread(target=program.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{program.server_port}", asked
        program.shutdown()


@pytest.fixture(autouse=True)
def _no_address_given(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither the environment nor a setting names a server; no proxy is set."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    for name in (*PROXIES, "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that it is restored, whatever a test does
        monkeypatch.delenv(name)
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


@pytest.mark.parametrize(
    ("status", "headers", "words"),
    [
        (401, {}, ("401", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY")),
        (403, {}, ("403", "PREFECT_API_KEY")),
        (407, {}, ("407", "http_proxy")),
        (302, {"Location": "https://login.example/?to=secret"}, ("302", "https://login.example/", "PREFECT_API_URL")),
        (429, {}, ("429", "PREFECT_API_URL")),
        (502, {}, ("502", "PREFECT_API_URL")),
        (503, {}, ("503", "PREFECT_API_URL")),
    ],
)
def test_what_refuses_at_the_given_address_is_not_called_another_program(
    monkeypatch: pytest.MonkeyPatch, status: int, headers: dict, words: tuple
):
    with answering(status, **headers) as (url, _):
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        with pytest.raises(InputError) as refused:
            server.find_server()
    assert all(word in str(refused.value) for word in (*words, url))
    assert "not a Prefect server" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (404, b""), (500, b"")])
def test_another_program_at_the_given_address_is_an_error(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes):
    with answering(status, body) as (url, _):
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(InputError, match="not a Prefect server"):
            server.find_server()
        assert not server.answers(url)


@pytest.mark.parametrize("url", ["localhost:4711/api", "nonsense", "http://127.0.0.1:port/api"])
def test_what_is_no_address_is_an_error(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(InputError, match=r"PREFECT_API_URL .*, which is not the address"):
        server.find_server()


def certificate(folder: Path) -> Path:
    """A file with a new key and a certificate for localhost that nobody but it has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    pem = serialization.Encoding.PEM
    own = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(own + made.sign(key, hashes.SHA256()).public_bytes(pem))
    return folder / "server.pem"


def test_a_certificate_that_is_not_trusted_is_an_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = certificate(tmp_path)
    with answering(200, b"true", file) as (url, _):
        url = url.replace("http://127.0.0.1", "https://localhost")
        monkeypatch.setenv("PREFECT_API_URL", url)
        with pytest.raises(InputError, match="PREFECT_API_SSL_CERT_FILE"):
            server.find_server()
        with temporary_settings({PREFECT_API_SSL_CERT_FILE: str(file)}):
            assert server.find_server() == url


def test_where_nothing_answers_there_is_no_server(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    monkeypatch.setenv("PREFECT_API_URL", url)
    assert server.find_server() is None
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setattr(server, "SERVER", url)
    assert server.look_for_server() == (None, "")


def test_an_address_is_given_by_the_environment_or_by_a_setting_other_than_crams_own(monkeypatch: pytest.MonkeyPatch):
    assert server.given_address() is None
    with temporary_settings({PREFECT_API_URL: server.SERVER}):  # as by pyproject.toml
        assert server.given_address() is None
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:4300/api/"}):  # as by a profile
        assert server.given_address() == "http://127.0.0.1:4300/api"
        monkeypatch.setenv("PREFECT_API_URL", server.SERVER)
        assert server.given_address() == server.SERVER


def test_a_server_that_nobody_here_started_is_used_only_if_it_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with answering(200, b"true") as (url, asked):
        monkeypatch.setattr(server, "SERVER", url)
        with caplog.at_level(logging.INFO, server.__name__):
            assert server.find_server() is None
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert f"PREFECT_API_URL={url}" in caplog.text
        assert asked == ["/health"], "it learns nothing of this checkout"
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert server.find_server() == url


def test_make_up_refuses_a_port_that_another_server_or_program_has(monkeypatch: pytest.MonkeyPatch, capsys):
    with answering(200, b"true") as (url, _):
        monkeypatch.setattr(server, "SERVER", url)
        with pytest.raises(InputError, match=f"PREFECT_API_URL={server.ANOTHER}"):
            server.is_running()
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert server.is_running()
        monkeypatch.delenv("PREFECT_API_URL")
    with answering(404) as (url, _):
        monkeypatch.setattr(server, "SERVER", url)
        with pytest.raises(InputError, match=url.rpartition(":")[2]) as refused:
            server.is_running()
        assert "prefect server stop" not in str(refused.value)
        with pytest.raises(SystemExit, match=url.rpartition(":")[2]):
            server.main()
    assert not server.is_running(), "the port is free again"
    with pytest.raises(SystemExit) as ended:
        server.main()
    assert ended.value.code == server.CAN_BE_STARTED
    assert capsys.readouterr().out == f"{url.rpartition(':')[2]} {url}\n"
    monkeypatch.setenv("PREFECT_API_URL", "http://nowhere.invalid/api")
    with pytest.raises(InputError, match=r"nowhere\.invalid"):
        server.is_running()


def test_the_command_line_of_a_server_is_known():
    for command in ("python -m prefect --no-prompt server start", "python .venv/bin/prefect server start"):
        assert server.serves_prefect(command.replace(" ", "\0").encode())
    background = "python -m uvicorn --factory prefect.server.api.server:create_app --port 4200"
    assert server.serves_prefect(background.replace(" ", "\0").encode())
    for command in ("ssh -L 4200:localhost:4200 server", "python -m pytest prefect/tests/test_server.py", ""):
        assert not server.serves_prefect(command.replace(" ", "\0").encode())


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_no_proxy_gets_what_goes_to_this_machine_but_all_else(monkeypatch: pytest.MonkeyPatch, name: str):
    with answering(200, b"true") as (url, asked), answering(502) as (proxy, proxied):
        monkeypatch.setenv(name, proxy)
        monkeypatch.setenv("PREFECT_API_URL", url)
        server.bypass_proxies()
        assert server.find_server() == url
        for host in ("127.0.0.1", "localhost"):
            named = {PREFECT_API_URL: url.replace("127.0.0.1", host)}
            with temporary_settings(named), get_client(sync_client=True) as client:
                assert client.api_healthcheck() is None
        assert len(asked) > 2
        assert proxied == []
        httpx.get("http://hub.invalid/models")
        assert proxied == ["http://hub.invalid/models"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "127.0.0.1,localhost,::1"),
        ({"NO_PROXY": "10.0.0.1, localhost"}, "10.0.0.1,localhost,127.0.0.1,::1"),
        ({"no_proxy": ".intern", "NO_PROXY": "unused"}, ".intern,127.0.0.1,localhost,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_hosts_that_the_user_exempts_stay_exempt(monkeypatch: pytest.MonkeyPatch, given: dict, expected: str):
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    server.bypass_proxies()
    assert os.environ["no_proxy"] == expected


def test_make_down_ends_no_process_of_another_home(tmp_path: Path):
    """Its pid may have been given to another checkout's server since."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "prefect"])
    try:
        while b"prefect" not in Path(f"/proc/{other.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        for service in ("server", "worker"):
            (tmp_path / f"{service}.pid").write_text(str(other.pid))
        env = os.environ | {"PREFECT_HOME": str(tmp_path), "CRAM_PYTHON": sys.executable}
        done = subprocess.run([HOME / "flows" / "prefect.sh", "down"], env=env, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(("given", "expected"), [("2", "1"), ("3", "1"), ("1", "1"), ("", ""), (None, "unset")])
def test_make_up_keeps_the_docstrings_that_transformers_reads(tmp_path: Path, given: str | None, expected: str):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "${PYTHONOPTIMIZE-unset}" >"$PREFECT_HOME/seen"\nexit 1\n', encoding="utf-8")
    python.chmod(0o700)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
    env |= {"PREFECT_HOME": str(tmp_path), "CRAM_PYTHON": str(python)}
    env |= {} if given is None else {"PYTHONOPTIMIZE": given}
    done = subprocess.run([HOME / "flows" / "prefect.sh", "up"], env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert (tmp_path / "seen").read_text(encoding="utf-8").strip() == expected


def test_make_up_looks_twice_before_it_says_that_the_server_ended(tmp_path: Path):
    fakes = {
        "python": 'case "$*" in\n'
        '*flows.cli.server) echo 4200 url; [ -e "$PREFECT_HOME/up" ] || exit 3 ;;\n'
        '*"server start") touch "$PREFECT_HOME/up"; until [ -e "$PREFECT_HOME/over" ]; do sleep 0.1; done ;;\n'
        "*) exit 1 ;;\nesac\n",
        # at the first look, the server's process has no environment yet
        "tr": f'[ -e "$PREFECT_HOME/seen" ] && exec {shutil.which("tr")} "$@"\ntouch "$PREFECT_HOME/seen"\n',
    }
    for name, lines in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}", encoding="utf-8")
        (tmp_path / name).chmod(0o700)
    env = os.environ | {"PREFECT_HOME": str(tmp_path), "CRAM_PYTHON": str(tmp_path / "python")}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    try:
        done = subprocess.run([HOME / "flows" / "prefect.sh", "up"], env=env, capture_output=True, text=True)
    finally:
        (tmp_path / "over").touch()
    assert "The server ended" not in done.stderr
    assert "Server: running" in done.stdout
