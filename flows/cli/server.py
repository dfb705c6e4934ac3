"""The Prefect server that a command uses: the one at PREFECT_API_URL, or else the one that this checkout started."""

import logging
import os
import socket
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from model.errors import InputError
from tasks.store.home import STATE

if TYPE_CHECKING:
    from httpx import Response

SERVER = "http://127.0.0.1:4200/api"  # of `make up`
ANOTHER = "http://127.0.0.1:4201/api"  # what messages suggest if that port is taken
HEALTH_SECONDS = 3
ANSWER_SECONDS = 20  # for a server that has just reported its health, on a busy machine
HERE = ("127.0.0.1", "localhost", "::1")
LISTENS = "0A"  # the state of a listening socket in /proc/net/tcp
CAN_BE_STARTED = 3  # exit status for prefect.sh
ADVICE = {  # by the status of an answer
    401: "It asks for a login. Set PREFECT_API_AUTH_STRING to the server's USER:PASSWORD, or PREFECT_API_KEY to the "
    "key of Prefect Cloud; if one of them is set, the server refused it.",
    403: "It forbids that. Check the rights of PREFECT_API_KEY or PREFECT_API_AUTH_STRING, and any proxy before the "
    "server.",
    407: "The proxy in your environment asks for a login. Set it in http_proxy, or add the server's host to no_proxy.",
}
DOWN = (429, 502, 503, 504)  # statuses of an overloaded server, and of a proxy whose server doesn't answer
Route = Literal["/health", "/admin/version", "/admin/settings"]  # of Prefect's API

log = logging.getLogger(__name__)


def bypass_proxies() -> None:
    """Send requests to this machine past the proxy in the environment, for which `localhost` is the proxy itself."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in given.split(",") if host.strip()]
    if "*" not in hosts:
        every = ",".join(dict.fromkeys([*hosts, *HERE]))
        os.environ["no_proxy"] = every
        os.environ["NO_PROXY"] = every


def given_address() -> str | None:
    """The address of Prefect's API in the environment or in Prefect's settings; None if they name none but cram's."""
    url = os.environ.get("PREFECT_API_URL")
    if url:
        return url.rstrip("/")
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value() or SERVER  # in a profile, or in pyproject.toml
    configured = configured.rstrip("/")
    return None if configured == SERVER else configured


def find_server() -> str | None:
    """The address of the Prefect API to use, if one answers. If another checkout's answers, the log says so.

    Raises InputError if the server at PREFECT_API_URL can't be used.
    """
    url, why_not = look_for_server()
    if why_not:
        from flows.logs import log_to_terminal

        log_to_terminal()
        log.info(why_not)
    return url


def look_for_server() -> tuple[str | None, str]:
    """The address of the Prefect API to use, or None; and why one that answers is not used, or an empty text.

    It is the one at PREFECT_API_URL, or else this checkout's own. Raises InputError if what answers at PREFECT_API_URL
    can't be used.
    """
    url = given_address()
    if url:
        is_usable = is_prefect(url) and is_open(url)
        return (url if is_usable else None), ""
    if not answers(SERVER):
        return None, ""
    why_not = objection()
    return (None if why_not else SERVER), why_not


def answers(url: str) -> bool:
    """Whether a Prefect API answers at an address. Another program that answers there doesn't count."""
    try:
        return is_prefect(url)
    except InputError:
        return False


def is_prefect(url: str) -> bool:
    """Whether a Prefect API answers at an address; False if nothing does. Raises InputError if another program does."""
    answer = ask(url, "/health", HEALTH_SECONDS)
    if answer is not None and answer.text != "true":
        raise InputError(not_prefect(url, f"GET /health returned {answer.text[:20]!r}"))
    return answer is not None


def is_open(url: str) -> bool:
    """Whether the Prefect API at an address answers a request that may need a login. InputError if it refuses."""
    from prefect.settings import PREFECT_CLOUD_API_URL

    return url.startswith(PREFECT_CLOUD_API_URL.value()) or ask(url, "/admin/version") is not None


def ask(url: str, path: Route, seconds: float = ANSWER_SECONDS) -> "Response | None":
    """The answer of the Prefect API at an address; None if nothing answers within that time.

    Raises InputError if what answers refuses the request.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    settings = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}
    http = {"timeout": seconds, "follow_redirects": False}
    try:
        if is_here(url) and not is_taken(url):  # Prefect's client would try four times
            return None
        with temporary_settings(settings), get_client(sync_client=True, httpx_settings=http) as client:
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
    except ImportError as error:  # of httpx, for a SOCKS proxy
        raise InputError(
            f"Prefect's client can't use the proxy in your environment (all_proxy): {error} Or unset it."
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InputError(
            f"PREFECT_API_URL is {url!r}, which is not the address of a server: {str(error).rstrip('.')}. Set it to "
            f"the address of a Prefect server's API, such as {SERVER}, or unset it."
        ) from error
    except httpx.HTTPError as error:
        raise InputError(not_prefect(url, str(error) or repr(error))) from error


def is_of_certificate(error: BaseException | None) -> bool:
    """Whether an error comes from the check of a certificate."""
    return error is not None and (isinstance(error, ssl.SSLError) or is_of_certificate(error.__context__))


def not_prefect(url: str, found: str) -> str:
    """The sentence for an address at which another program answers."""
    found = found.rstrip(".")
    return (
        f"PREFECT_API_URL is {url}, but what answers there is not a Prefect server: {found}. Set it to the address of "
        f"a Prefect server's API, such as {SERVER}, or unset it."
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
            f"{begin} It redirects to {place}, which may be a login page. Set PREFECT_API_URL to the address at which "
            "the API itself answers programs."
        )
    if status in DOWN:
        return (
            f"{begin} The server isn't running there, or it is overloaded. Start it or wait, then run again; or unset "
            "PREFECT_API_URL to run without it. If a proxy in your environment answers, add the host to no_proxy."
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

    place = (URL(url).host, port_of(url))
    try:
        with socket.create_connection(place, timeout=HEALTH_SECONDS):
            return True
    except OSError:
        return False


def objection() -> str:
    """Why the Prefect server at cram's own address should not be used, in sentences; empty if it is this checkout's.

    It is this checkout's if a process of this user listens there, and its answer names this checkout's PREFECT_HOME.
    """
    deliberate = f"Set PREFECT_API_URL={SERVER} to use it nevertheless."
    process = listener(port_of(SERVER))
    if process is None:
        return (
            f"The Prefect server at {SERVER} is not this checkout's: it is another user's, a container's or another "
            f"machine's. {deliberate}"
        )
    try:
        answer = ask(SERVER, "/admin/settings")
        settings = answer.json() if answer else {}
        home = Path(os.readlink(process / "cwd"), settings["home"]).resolve()
    except InputError as problem:
        return str(problem)
    except (OSError, ValueError, LookupError, TypeError) as problem:  # it ended, hangs, or is of another version
        return f"The Prefect server at {SERVER} does not report its owner ({problem!r}). {deliberate}"
    if home == STATE.resolve():
        return ""
    return f"The Prefect server at {SERVER} is not this checkout's: its PREFECT_HOME is {home}. {deliberate}"


def listener(port: int) -> Path | None:
    """The folder in /proc of this user's Prefect server that listens at a port of this machine; None if none does."""
    sockets = sockets_of(port)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if process.stat().st_uid != os.getuid():
                continue
            if not serves_prefect((process / "cmdline").read_bytes()):
                continue
            files = {link_target(link) for link in (process / "fd").iterdir()}
            if sockets & files:
                return process
    return None


def serves_prefect(command: bytes) -> bool:
    """Whether a command line, as in /proc, is that of a Prefect server."""
    arguments = os.fsdecode(command).split("\0")
    names = {Path(argument).name for argument in arguments}
    in_background = any(argument.startswith("prefect.server.") for argument in arguments)  # `prefect server start -b`
    return in_background or {"prefect", "server"} <= names


def sockets_of(port: int) -> set[str]:
    """The sockets that listen at a port of this machine, by their names in /proc/PID/fd."""
    sockets = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
        for line in lines[1:]:
            _, address, _, state, *others = line.split()
            own_port = int(address.rpartition(":")[2], 16)
            if state == LISTENS and own_port == port:
                inode = others[5]
                sockets.add(f"socket:[{inode}]")
    return sockets


def link_target(link: Path) -> str:
    """What a link in /proc points to; empty if the link is gone."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


# For prefect.sh


def is_running() -> bool:
    """Whether the server that `make up` should use already runs.

    Raises InputError if it doesn't and can't be started.
    """
    given = given_address()
    url = given or SERVER
    if given and is_prefect(given) and is_open(given):
        return True
    if given and not is_here(given):
        raise InputError(
            f"No Prefect server answers at {given} (PREFECT_API_URL). Start it there, or unset PREFECT_API_URL."
        )
    if not given and answers(SERVER):
        why_not = objection()
        if why_not:
            raise InputError(
                f"{why_not} With PREFECT_API_URL={ANOTHER}, `make up` starts another server; set it for `cram` too."
            )
        return True
    if is_taken(url) and listener(port_of(url)) is None:
        raise InputError(
            f"Another program uses port {port_of(url)} of this machine, so no Prefect server can start there. End that "
            f"program, or choose another port for `make up` and `cram`, for example PREFECT_API_URL={ANOTHER}."
        )
    return False


def main() -> None:
    """Print port and address of the server of `make up`. Exit status: 0: it runs, 3: it can be started, 1: neither."""
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
