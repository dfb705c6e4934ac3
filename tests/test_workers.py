"""Workers of this machine: parts of a corpus and finetuning runs in processes, reruns, kills and Ctrl-C."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pyarrow
import pytest
from tqdm import tqdm

from model import limits
from model.errors import InputError
from model.signals import SIGNALS
from tasks.store.artifacts import Artifact
from tasks.store.locks import lock_artifact
from tasks.workers import finetunes, jobs, processes
from tasks.workers.jobs import finish, over_parts
from tasks.workers.processes import library_threads, one_library_thread, usage, workers

LONG = 600  # seconds: such a part is never waited for
SQUARES = [0, 1, 4, 9, 16, 25]
SCRIPT = """
import os, signal, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
import test_workers
from tasks.workers import finetunes, processes
from tasks.workers.jobs import over_parts

folder = Path(sys.argv[1])
"""
QUICKLY = 'processes.PRELOADED[:] = ["test_workers"]\n'  # what the work needs, imported once
PARTS = 'over_parts(test_workers.linger, test_workers.jobs_in(folder), folder / "done", "linger")\n'
RUNS = """
processes.PRELOADED.append("torch")

def run(number):
    return finetunes.in_worker(test_workers.linger, (number, folder), 1, str(number))

with ThreadPoolExecutor(2) as threads, finetunes.several(2, 4, 4):
    list(threads.map(run, range(4)))
"""
ADDRESS = """
results = over_parts(test_workers.square, test_workers.jobs_in(folder), folder / "done", "square")
address = Path(forkserver._forkserver._forkserver_address)
print(tempfile.gettempdir(), address, oct(address.parent.stat().st_mode), *(one["square"] for one in results))
"""
INTERRUPTED = """
connect = forkserver.connect_to_new_process

def interrupt_half_way(fds):
    connected = connect(fds)
    os.kill(os.getpid(), signal.SIGINT)
    return connected

forkserver.connect_to_new_process = interrupt_half_way
"""


def square(number: int, folder: Path) -> dict:
    """Leave a trace; return the square and where it was computed."""
    with (folder / f"{number}.trace").open("a") as file:
        file.write("x")
    return {
        "square": number * number,
        "process": os.getpid(),
        "threads": (os.environ.get("RAYON_NUM_THREADS"), pyarrow.cpu_count()),
        "setting": os.environ.get("CRAM_TEST_SETTING"),
        "interrupts": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
    }


def go_wrong(number: int, folder: Path) -> dict:
    """Part 0 finishes, then part 1 goes wrong as the folder says; the others would take long."""
    if number == 1:
        wait_for((folder / "done/00000.json").exists)
        how = (folder / "how").read_text()
        if how == "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError if how == "lack memory" else InputError("part one is bad")
    time.sleep(LONG if number > 1 else 0)
    return square(number, folder)


def signalled(number: int, folder: Path) -> dict:
    """Send all signals that ask a process to end to the worker and the server that it was forked from."""
    for sign in SIGNALS:
        os.kill(os.getpid(), sign)
        os.kill(os.getppid(), sign)
    return square(number, folder)


def linger(number: int, folder: Path, report: Callable | None = None) -> dict:
    """Write who works on this, and who forked it; take long."""
    (folder / f"{number}.pid").write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(LONG)
    return {}


def slow_square(number: int, folder: Path) -> dict:
    (folder / f"{number}.begun").touch()
    wait_for((folder / "go").exists)
    return square(number, folder)


def wait_for(true: Callable[[], object]) -> None:
    """Return when it is true; fail after ten minutes."""
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether the process exists, not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def start(folder: Path, script: str, **variables: str) -> subprocess.Popen:
    """A script, which finds this module, in a process group of its own."""
    (folder / "script.py").write_text(SCRIPT + script)
    here = Path(__file__).parent
    settings = os.environ | {"CRAM_WORKERS": "2", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"} | variables
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, folder / "script.py", folder], env=settings, process_group=0, **pipes)


def jobs_in(folder: Path, count: int = 6) -> list[tuple[int, Path]]:
    return [(number, folder) for number in range(count)]


def squares(work: Callable, folder: Path, count: int = 6) -> list[int]:
    return [result["square"] for result in over_parts(work, jobs_in(folder, count), folder / "done", "square")]


def traces(folder: Path) -> dict[int, int]:
    """How often each number was worked on."""
    return {int(p.stem): len(p.read_text()) for p in folder.glob("*.trace")}


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAM_WORKERS", "2")


@pytest.mark.parametrize("count", ["1", "2"])
def test_results_have_the_order_of_the_jobs_and_are_the_same_fresh_and_read_again(tmp_path, monkeypatch, count):
    monkeypatch.setenv("CRAM_WORKERS", count)
    usage.peak_mib = 0.0
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    assert [result["square"] for result in results] == SQUARES
    if count == "2":
        assert os.getpid() not in {result["process"] for result in results}
        assert all(result["threads"] == ["1", 1] for result in results), "it leaves the other cores to the others"
        assert 10 < usage.peak_mib < 10_000
    assert over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square") == results
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)
    assert over_parts(square, [], tmp_path / "none", "square") == []


@pytest.mark.parametrize(
    ("how", "count", "named"),
    [
        ("fail", "3", "part one is bad"),
        ("be killed", "2", "CRAM_WORKERS=1"),
        ("lack memory", "2", "part_megabytes"),
        ("lack memory", "1", "part_megabytes"),
    ],
)
def test_an_error_ends_the_other_parts_and_a_rerun_does_only_what_is_missing(tmp_path, monkeypatch, how, count, named):
    monkeypatch.setenv("CRAM_WORKERS", count)
    (tmp_path / "how").write_text(how)
    with pytest.raises(InputError, match=named):
        squares(go_wrong, tmp_path)
    assert traces(tmp_path) == {0: 1}
    assert squares(square, tmp_path) == SQUARES
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)


def test_a_damaged_or_unfinished_result_is_none(tmp_path):
    (tmp_path / "done").mkdir()
    (tmp_path / "done/00000.half").write_text('{"square"')
    for number, text in enumerate(['{"square": "kept"}', "", '{"square": 1', "\0\0\0\0"], 1):
        (tmp_path / f"done/{number:05d}.json").write_text(text)
    assert squares(square, tmp_path, 5) == [0, "kept", 4, 9, 16]
    assert traces(tmp_path) == {0: 1, 2: 1, 3: 1, 4: 1}


def test_a_result_appears_once_the_files_of_its_part_are_on_disk_and_not_if_the_disk_fails(tmp_path, monkeypatch):
    done = tmp_path / "3.json"
    seen = []
    answers = [-1, 0]

    def syncfs(handle: int) -> int:
        seen.append((Path(os.readlink(f"/proc/self/fd/{handle}")).parent, traces(tmp_path), done.exists()))
        return answers.pop(0)

    monkeypatch.setattr(jobs, "libc", SimpleNamespace(syncfs=syncfs))
    monkeypatch.setattr(jobs.ctypes, "get_errno", lambda: errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        finish(square, (3, tmp_path), done)
    for _ in range(2):
        assert finish(square, (3, tmp_path), done)["square"] == 9
    assert seen == [(tmp_path, {3: 1}, False), (tmp_path, {3: 2}, False)]


def test_where_one_file_system_cannot_be_forced_to_disk_all_are(tmp_path, monkeypatch):
    done = tmp_path / "3.json"
    forced = []
    monkeypatch.setattr(jobs, "libc", SimpleNamespace(syncfs=lambda handle: -1))
    monkeypatch.setattr(jobs.ctypes, "get_errno", lambda: errno.ENOSYS)
    monkeypatch.setattr(os, "sync", lambda: forced.append(done.exists()))
    assert finish(square, (3, tmp_path), done)["square"] == 9
    assert forced == [False]


def errors_of_output() -> list[str]:
    """What this process does with characters that its output's encoding lacks."""
    return [sys.stdout.errors, sys.stderr.errors]


def test_a_part_that_another_worker_is_doing_is_not_done_twice(tmp_path):
    done = tmp_path / "3.json"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(finish, slow_square, (3, tmp_path), done)
        wait_for((tmp_path / "3.begun").exists)
        second = threads.submit(finish, square, (3, tmp_path), done)
        (tmp_path / "go").touch()
        assert first.result() == second.result()
    assert traces(tmp_path) == {3: 1}


def test_the_fork_server_has_one_thread_and_the_libraries_and_workers_the_environment_of_now(
    tmp_path, two_workers, monkeypatch
):
    squares(square, tmp_path)
    server = forkserver._forkserver._forkserver_pid
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a fork of a process with threads can hang"
    assert "libarrow" in Path(f"/proc/{server}/maps").read_text(encoding="utf-8"), "what loads slowly is loaded once"
    own = dict(
        pair.split("=", 1) for pair in Path(f"/proc/{server}/environ").read_text(encoding="utf-8").split("\0") if pair
    )
    assert processes.KEPT_MEMORY.items() <= own.items(), "the C library reads it when a process begins"
    monkeypatch.setenv("CRAM_TEST_SETTING", "set when the fork server ran")
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "again", "square")
    assert {result["setting"] for result in results} == {"set when the fork server ran"}
    assert not any(result["interrupts"] for result in results), "Ctrl-C is for the process that has the workers"
    assert forkserver._forkserver._forkserver_pid == server


LONG_NAME = "job-" + "x" * 80


@pytest.mark.parametrize("mode", [None, 0o755, 0o700])
@pytest.mark.parametrize("name", ["run", LONG_NAME])
def test_a_directory_of_this_user_alone_whose_path_is_short_takes_the_sockets(monkeypatch, mode, name: str):
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{LONG_NAME}")
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cram-") as folder:
        runtime = Path(folder, name)
        if mode:
            runtime.mkdir(mode=mode)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
        fits = mode == 0o700 and name == "run"
        assert processes.place_for_sockets() == (str(runtime) if fits else "/tmp")
    monkeypatch.setattr(processes, "socket_places", lambda: iter(()))
    with pytest.raises(InputError, match=f"TMPDIR is '/tmp/{LONG_NAME}'"):
        processes.place_for_sockets()


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_longest_tmpdir_in_which_sockets_fit_is_used_as_it_is(tmp_path, beyond: int):
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="cram-") as short:
        length = processes.LONGEST_SOCKET - len(processes.WITHIN_TMPDIR) + beyond
        usual = Path(short, "x" * (length - len(short) - 1))
        usual.mkdir()
        process = start(tmp_path, QUICKLY + ADDRESS, TMPDIR=str(usual), XDG_RUNTIME_DIR="")
        printed = process.communicate(timeout=LONG)[0]
        kept, address, rights, *found = printed.split()
        assert (kept, found) == (str(usual), [str(number) for number in SQUARES]), printed
        place = Path(address).parent
        assert (place.parent, rights) == (Path("/tmp") if beyond else usual, "0o40700")
        assert not place.exists(), "it is removed at the end"


def test_threads_can_have_workers_at_the_same_time_and_leave_this_process_as_it_was(tmp_path, two_workers):
    before = dict(os.environ)
    main = sys.modules["__main__"]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(squares, [square] * 3, folders)) == [SQUARES] * 3
    with library_threads():
        one_library_thread()
    assert dict(os.environ) == before
    assert sys.modules["__main__"] is main
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


def test_signals_to_the_whole_group_are_for_the_parent_alone(tmp_path, two_workers):
    servers = set()
    for name in ("once", "again"):
        folder = tmp_path / name
        folder.mkdir()
        assert squares(signalled, folder) == SQUARES
        servers.add(forkserver._forkserver._forkserver_pid)
    assert len(servers) == 1, "no other one had to be started"


def test_work_that_only_a_script_has_is_refused(tmp_path, two_workers, monkeypatch):
    monkeypatch.setattr(square, "__module__", "__main__")
    with pytest.raises(InputError, match="function square"):
        squares(square, tmp_path)


def printed_once(process: subprocess.Popen) -> None:
    """Wait for the end of a process that was interrupted, which prints one traceback."""
    printed = process.communicate(timeout=LONG)[0]
    assert printed.count("Traceback") == printed.count("KeyboardInterrupt") == 1, printed
    assert "EOFError" not in printed


@pytest.mark.parametrize(("script", "how"), [(PARTS, signal.SIGKILL), (RUNS, signal.SIGINT)], ids=["parts", "runs"])
def test_workers_of_a_script_without_a_guard_and_their_server_end_with_it(tmp_path, script, how):
    process = start(tmp_path, QUICKLY + script)
    wait_for(lambda: len([p for p in tmp_path.glob("*.pid") if p.read_text()]) == 2)
    others = {int(pid) for p in tmp_path.glob("*.pid") for pid in p.read_text().split()}
    assert len(others) == 3, "two workers and the server that they were forked from"
    assert all(map(is_running, others))
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # Ctrl-C goes to all of them
        printed_once(process)
    else:
        process.send_signal(how)
        process.communicate(timeout=LONG)
    wait_for(lambda: not any(map(is_running, others)))
    assert len(list(tmp_path.glob("*.pid"))) == 2, "no other work begins"


def test_an_interrupt_while_the_server_starts_ends_all(tmp_path):
    process = start(tmp_path, PARTS)

    def server() -> list[int]:
        """The fork server, once it imports the libraries."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        children += [pid for p in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in p.read_text().split()]
        named = {pid for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()}
        return [int(pid) for pid in named if "libarrow" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")]

    wait_for(server)
    (pid,) = server()
    os.killpg(process.pid, signal.SIGINT)
    printed_once(process)
    wait_for(lambda: not is_running(pid))
    assert not list(tmp_path.glob("*.pid"))


def test_an_interrupt_while_a_worker_starts_is_no_error_of_the_worker(tmp_path):
    printed_once(start(tmp_path, QUICKLY + INTERRUPTED + PARTS))


# Finetuning runs


def train(path: Path, number: int, report: Callable[[int, str], None]) -> object:
    """The square of a number and the process that computed it; or what the file asks for."""
    asked = path.read_text(encoding="utf-8") if path.exists() else ""
    report(number, "halfway")
    if asked == "bar":
        return type(tqdm(disable=True).get_lock()), os.getpid()
    if asked == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "wait":
        (path.parent / "waiting").touch()
        time.sleep(LONG)
    return number**2, os.getpid()


class Strange(Exception):
    """An error that pickle writes and can't read."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(f"{found}, not {expected}")


def fail(error: Exception) -> None:
    raise error


def strange() -> None:
    raise Strange("this", "that")


def run_one(folder: Path, number: int, asks: str = "") -> tuple[int, int]:
    if asks:
        (folder / str(number)).write_text(asks)
    return finetunes.in_worker(train, (folder / str(number), number), 10, f"finetune {number}")


def two_at_a_time(folder: Path, asks: dict[int, str], count: int) -> list:
    """The results or errors of so many runs, two at a time, with the memory that their processes used."""

    def run(number: int) -> object:
        usage.peak_mib = 0.0
        try:
            return *run_one(folder, number, asks.get(number, "")), usage.peak_mib
        except Exception as error:
            return error

    with ThreadPoolExecutor(2) as threads, finetunes.several(2, 10 * count, count):
        return list(threads.map(run, range(count)))


def test_runs_have_at_most_so_many_processes_none_of_which_outlives_them(tmp_path):
    update = finetunes.Progress.update
    with mock.patch.object(finetunes.Progress, "update", autospec=True, side_effect=update) as updates:
        values, pids, peaks = zip(*two_at_a_time(tmp_path, {0: "bar"}, 6), strict=True)
    assert values[0] is type(threading.RLock()), "tqdm's own semaphore would outlive a worker that is ended"
    assert list(values[1:]) == SQUARES[1:]
    assert len(set(pids)) <= 2
    assert os.getpid() not in pids
    assert not any(map(is_running, pids))
    assert all(10 < peak < 10_000 for peak in peaks)
    amounts, notes = zip(*(call.args[1:] for call in updates.call_args_list), strict=True)
    assert sum(amounts) == 60, "the examples of all runs"
    assert notes[-1].startswith("6 of 6 done")
    assert any("; 3 halfway" in note for note in notes)
    assert run_one(tmp_path, 5) == (25, os.getpid()), "one alone needs no other process"


def test_a_killed_run_loses_no_other(tmp_path):
    results = two_at_a_time(tmp_path, {1: "die"}, 3)
    assert [results[number][0] for number in (0, 2)] == [0, 4]
    assert isinstance(results[1], InputError)
    assert "'finetune 1'" in str(results[1])
    assert "CRAM_FINETUNES=1" in str(results[1])


def test_after_an_interrupt_unfinished_runs_end_and_none_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(finetunes, "pool", None)  # also in the end
    later = threading.Event()
    futures = []
    with ThreadPoolExecutor(2) as threads:
        try:
            with finetunes.several(2, 10, 2):
                futures.append(threads.submit(run_one, tmp_path, 0, "wait"))
                futures.append(threads.submit(lambda: later.wait() and run_one(tmp_path, 1)))
                wait_for((tmp_path / "waiting").exists)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            later.set()
        for number, future in enumerate(futures):
            with pytest.raises(InputError, match=f"'finetune {number}' was cancelled"):
                future.result(timeout=LONG)
    assert run_one(tmp_path, 5) == (25, os.getpid()), "this thread can go on"


def test_after_an_interrupt_no_thread_waits_for_what_another_run_uses(store: Path, monkeypatch, caplog):
    monkeypatch.setattr(finetunes, "pool", None)  # also in the end
    caplog.set_level("INFO", "tasks.store")
    used = Artifact(stage="finetune", key="0123456789ab")

    def wait() -> None:
        with lock_artifact(used):
            pass

    with ThreadPoolExecutor(1) as threads, lock_artifact(used):
        with suppress(KeyboardInterrupt), finetunes.several(1, 10, 1):
            waiting = threads.submit(wait)
            wait_for(lambda: f"using {used.name}; waiting" in caplog.text)
            raise KeyboardInterrupt
        with pytest.raises(InputError, match=used.name):
            waiting.result(timeout=60)


def test_a_process_is_used_again_and_replaced_after_an_error_or_its_death():
    full = OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
    with processes.Processes() as pool, ThreadPoolExecutor(1) as thread:

        def ended(work: Callable, *arguments: object) -> object:
            """The result of a call, or the error."""
            done = thread.submit(pool.call, work, *arguments)
            return done.exception() or done.result()[0]

        first = ended(os.getpid)
        assert ended(os.getpid) == first
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{first}").exists())  # all its threads have ended
        second = ended(os.getpid)
        error = ended(fail, full)
        assert (type(error), error.errno, error.filename) == (OSError, errno.ENOSPC, "model.safetensors")
        assert "in fail" in error.__notes__[0], "the traceback of the other process"
        assert not is_running(second), "a failed run's memory is freed"
        assert ended(os.getpid) not in (first, second)
        error = ended(strange)
        assert isinstance(error, RuntimeError)
        assert "Strange: this, not that" in str(error), "it is not taken for a killed process"
        assert ended(errors_of_output) == ["backslashreplace"] * 2, "a worker prints any character"


def test_an_error_while_progress_is_shown_is_no_killed_process(tmp_path, monkeypatch):
    monkeypatch.setattr(finetunes.Progress, "update", mock.Mock(side_effect=OSError("the terminal is gone")))
    with finetunes.several(1, 10, 1), pytest.raises(OSError, match="the terminal is gone"):
        run_one(tmp_path, 0)


def test_as_many_workers_and_runs_go_on_at_once_as_asked_for_or_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.delenv("CRAM_WORKERS")
    assert workers() == limits.cores()
    monkeypatch.setenv("CRAM_WORKERS", "8")
    assert workers() == 8
    monkeypatch.setattr(limits, "available_memory", lambda: 5 * finetunes.BYTES_A_RUN)
    assert [finetunes.at_once(count) for count in (0, 1, 3, 40)] == [0, 1, 3, 5]
    assert finetunes.at_once(40, 2 * finetunes.BYTES_A_RUN) == 2
    monkeypatch.setattr(limits, "available_memory", lambda: 0)
    assert finetunes.at_once(40) == 1
    monkeypatch.setenv("CRAM_FINETUNES", "6")
    assert [finetunes.at_once(count) for count in (1, 4, 40)] == [1, 4, 6]


def test_memory_of_a_gpu_that_this_process_keeps_is_freed_before_runs_start_elsewhere(monkeypatch):
    import torch

    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    monkeypatch.setenv("CRAM_FINETUNES", "4")
    for initialized, count, times in ((False, 8, 0), (True, 1, 0), (True, 8, 1)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda initialized=initialized: initialized)
        assert finetunes.at_once(count) == min(4, count)
        assert len(freed) == times


@pytest.mark.parametrize(
    ("name", "count"),
    [("CRAM_WORKERS", workers), ("CRAM_FINETUNES", finetunes.finetunes)],
)
def test_a_number_that_is_none_is_refused(monkeypatch, name, count):
    for value in ("0", "-1", "two", "1.5", " ", "²"):
        monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=name):
            count()
