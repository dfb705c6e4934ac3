"""Which Prefect server a command uses: the one at PREFECT_API_URL, or else the one that this checkout started."""

import logging
import os
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from model.errors import InputError
from tasks.store.home import STATE

if TYPE_CHECKING:
    from httpx import Response

SERVER = "http://127.0.0.1:4200/api"  # of `make up`
ANOTHER = "http://127.0.0.1:4201/api"  # to choose if that port is taken
HEALTH_SECONDS = 3
ANSWER_SECONDS = 20  # of a server that has just said that it is well, on a busy machine
HERE = ("127.0.0.1", "localhost", "::1")
LISTENS = "0A"  # a socket's state, in /proc/net/tcp
CAN_BE_STARTED = 3  # exit status for prefect.sh
ADVICE = {  # by status of an answer
    401: "It asks for a login. Set PREFECT_API_AUTH_STRING to the server's USER:PASSWORD, or PREFECT_API_KEY to the key "
    "of Prefect Cloud; if one is set, it was refused.",
    403: "It forbids that. Check what PREFECT_API_KEY or PREFECT_API_AUTH_STRING may do, and any proxy before the server.",
    407: "The proxy of the environment asks for a login. Set it in http_proxy, or name the server's host in no_proxy.",
}
DOWN = (429, 502, 503, 504)  # statuses of a proxy whose server doesn't answer, and of a server that has too much to do

log = logging.getLogger(__name__)


def bypass_proxies() -> None:
    """Keep requests to this machine from the proxy of the environment, for which this machine is another one."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    if "*" not in hosts:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *HERE]))


def given_address() -> str | None:
    """The address of Prefect's API that the environment or a setting of Prefect's names; None if it is cram's own."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url.rstrip("/")
    from prefect.settings import PREFECT_API_URL

    url = (PREFECT_API_URL.value() or SERVER).rstrip("/")  # of a profile, or of pyproject.toml
    return None if url == SERVER else url


def find_server() -> str | None:
    """The address of the Prefect API to use, if one answers; the log says whose server is left alone.

    Raises InputError if what answers at PREFECT_API_URL can't be used.
    """
    url, why = sought()
    if why:
        from flows.logs import log_to_terminal

        log_to_terminal()
        log.info(why)
    return url


def sought() -> tuple[str | None, str]:
    """The address of the Prefect API to use, or None; and why the one that answers is left alone, if it is.

    It is PREFECT_API_URL, or else this checkout's own. Raises InputError if what answers at PREFECT_API_URL can't be
    used.
    """
    if url := given_address():
        return (url if is_prefect(url) and is_open(url) else None), ""
    if not answers(SERVER):
        return None, ""
    why = objection()
    return (None if why else SERVER), why


def answers(url: str) -> bool:
    """Whether a Prefect API answers at an address; what else answers there doesn't count."""
    try:
        return is_prefect(url)
    except InputError:
        return False


def is_prefect(url: str) -> bool:
    """Whether a Prefect API answers at an address, or else nothing. Raises InputError if something else does."""
    answer = ask(url, "/health", HEALTH_SECONDS)
    if answer is not None and answer.text != "true":
        raise InputError(not_prefect(url, f"GET /health returned {answer.text[:20]!r}"))
    return answer is not None


def is_open(url: str) -> bool:
    """Whether the Prefect API at an address answers what needs a login. Raises InputError if it refuses."""
    from prefect.settings import PREFECT_CLOUD_API_URL

    return url.startswith(PREFECT_CLOUD_API_URL.value()) or ask(url, "/admin/version") is not None


def ask(url: str, path: str, seconds: float = ANSWER_SECONDS) -> "Response | None":
    """What the Prefect API at an address answers; None if nothing answers within that time.

    Raises InputError if what answers does not do what is asked.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    try:
        if is_here(url) and not is_taken(url):  # Prefect's client would try four times
            return None
        with (
            temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(sync_client=True, httpx_settings={"timeout": seconds, "follow_redirects": False}) as client,
        ):
            return client.request("GET", path)
    except httpx.HTTPStatusError as error:
        raise InputError(refusal(url, path, error.response)) from error
    except (httpx.TimeoutException, httpx.NetworkError) as error:
        if is_of_certificate(error):
            raise InputError(
                f"The certificate of {url} (PREFECT_API_URL) can't be verified: {error}. If you trust it, set "
                "PREFECT_API_SSL_CERT_FILE to the file of its authority."
            ) from error
        return None
    except ImportError as error:  # httpx's, of a SOCKS proxy
        raise InputError(
            f"Prefect's client can't use the proxy of the environment (all_proxy): {error} Or unset it."
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InputError(
            f"PREFECT_API_URL is {url!r}, which is no address of a server: {str(error).rstrip('.')}. Set it to the address "
            f"of a Prefect server's API, such as {SERVER}, or unset it."
        ) from error
    except httpx.HTTPError as error:
        raise InputError(not_prefect(url, str(error) or repr(error))) from error


def is_of_certificate(error: BaseException | None) -> bool:
    """Whether an error comes from the check of a certificate."""
    return error is not None and (isinstance(error, ssl.SSLError) or is_of_certificate(error.__context__))


def not_prefect(url: str, found: str) -> str:
    """The sentence for an address where no Prefect API is."""
    found = found.rstrip(".")
    return (
        f"PREFECT_API_URL is {url}, but what answers there is not a Prefect server: {found}. Set it to the address of a "
        f"Prefect server's API, such as {SERVER}, or unset it."
    )


def refusal(url: str, path: str, response: "Response") -> str:
    """The sentence for an answer that is an error."""
    status = response.status_code
    answer = f"{status} {response.reason_phrase}".rstrip()
    begin = f"The Prefect API at {url} answers GET {path} with {answer}."
    if status in ADVICE:
        return f"{begin} {ADVICE[status]}"
    if response.has_redirect_location:
        place = response.headers["Location"].partition("?")[0]
        return (
            f"{begin} That leads to {place}, which may be the page of a login. Set PREFECT_API_URL to the address at "
            "which the API itself answers programs."
        )
    if status in DOWN:
        return (
            f"{begin} The server doesn't run there, or has too much to do. Start it or wait, then run again; or unset "
            "PREFECT_API_URL to run without it. If a proxy of the environment answers, name the host in no_proxy."
        )
    return not_prefect(url, f"GET {path} returned {answer}")


# Servers of this machine


def is_here(url: str) -> bool:
    """Whether an address is on this machine."""
    from httpx import URL

    return URL(url).host in HERE


def port_of(url: str) -> int:
    """The port of an address."""
    from httpx import URL

    parts = URL(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def is_taken(url: str) -> bool:
    """Whether a program accepts connections at an address of this machine."""
    from httpx import URL

    try:
        with socket.create_connection((URL(url).host, port_of(url)), timeout=HEALTH_SECONDS):
            return True
    except OSError:
        return False


def objection() -> str:
    """Why the Prefect server at cram's own address is not to be used, in sentences; empty if it is this checkout's.

    This checkout's is a process of this user that listens there, and whose answer names this checkout's PREFECT_HOME.
    """
    deliberate = f"PREFECT_API_URL={SERVER} uses it all the same."
    process = listener(port_of(SERVER))
    if process is None:
        who = "another user's, a container's or another machine's"
        return f"The Prefect server at {SERVER} is not this checkout's, but {who}. {deliberate}"
    try:
        answer = ask(SERVER, "/admin/settings")
        settings = answer.json() if answer else {}
        home = Path(os.readlink(process / "cwd"), settings["home"]).resolve()
    except InputError as problem:
        return str(problem)
    except (OSError, ValueError, LookupError, TypeError) as problem:  # it ended, hangs, or is of another version
        return f"The Prefect server at {SERVER} does not say whose it is ({problem!r}). {deliberate}"
    if home == STATE.resolve():
        return ""
    return f"The Prefect server at {SERVER} is not this checkout's, since its PREFECT_HOME is {home}. {deliberate}"


def listener(port: int) -> Path | None:
    """The folder in /proc of this user's Prefect server that listens at a port of this machine; None if none does."""
    sockets = sockets_of(port)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            is_ours = process.stat().st_uid == os.getuid() and serves_prefect((process / "cmdline").read_bytes())
            if is_ours and sockets & set(map(target, (process / "fd").iterdir())):
                return process
    return None


def serves_prefect(command: bytes) -> bool:
    """Whether a command line, as in /proc, is that of a Prefect server."""
    arguments = os.fsdecode(command).split("\0")
    names = {Path(argument).name for argument in arguments}
    in_background = any(argument.startswith("prefect.server.") for argument in arguments)  # `prefect server start -b`
    return in_background or {"prefect", "server"} <= names


def sockets_of(port: int) -> set[str]:
    """The sockets that listen at a port of this machine, as they are called in /proc/PID/fd."""
    tables = [table for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if table.exists()]
    rows = [line.split() for table in tables for line in table.read_text(encoding="utf-8").splitlines()[1:]]
    listening = [row for row in rows if row[3] == LISTENS]
    return {f"socket:[{row[9]}]" for row in listening if int(row[1].rpartition(":")[2], 16) == port}


def target(link: Path) -> str:
    """What a link in /proc points to; empty if it is gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


# For prefect.sh


def is_running() -> bool:
    """Whether the server that `make up` is to use runs already; if not, it can be started at its address.

    Raises InputError if it can't.
    """
    given = given_address()
    url = given or SERVER
    if given and is_prefect(given) and is_open(given):
        return True
    if given and not is_here(given):
        raise InputError(f"No Prefect server answers at {given} (PREFECT_API_URL). Start it there, or unset it.")
    if not given and answers(SERVER):
        if why := objection():
            raise InputError(f"{why} With PREFECT_API_URL={ANOTHER}, `make up` starts another; set it for `cram` too.")
        return True
    if is_taken(url) and listener(port_of(url)) is None:
        raise InputError(
            f"Port {port_of(url)} of this machine is taken by another program, so no Prefect server can start there. "
            f"End that program, or choose another port for `make up` and `cram`, as in PREFECT_API_URL={ANOTHER}."
        )
    return False


def main() -> None:
    """Print port and address of the server of `make up`. Exit status: 0: it runs, 3: it can be started, 1: it can't."""
    bypass_proxies()
    try:
        running = is_running()
    except InputError as error:
        sys.exit(str(error))
    url = given_address() or SERVER
    print(port_of(url), url)
    sys.exit(0 if running else CAN_BE_STARTED)


if __name__ == "__main__":
    main()
