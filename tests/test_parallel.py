"""Work over parts: order, processes, what a rerun does again, and what a killed worker gets."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest

from model import InputError
from tasks.workers import jobs, pool
from tasks.workers.jobs import finish
from tasks.workers.mapping import over_parts
from tasks.workers.pool import library_threads, one_library_thread, workers
from tasks.workers.usage import usage

LONG = 600  # seconds: such a part is never waited for
SCRIPT = """
import sys
from pathlib import Path
from tasks.workers.mapping import over_parts
import test_parallel

folder = Path(sys.argv[1])
over_parts(test_parallel.linger, [(number, folder) for number in range(4)], folder / "done", "linger")
print("through")
"""


def square(number: int, folder: Path) -> dict:
    """Leave a trace, and give the square and who computed it."""
    with (folder / f"{number}.trace").open("a") as file:
        file.write("x")
    return {"square": number * number, "process": os.getpid(), "threads": os.environ.get("RAYON_NUM_THREADS")}


def fail_at_three(number: int, folder: Path) -> dict:
    if number == 3 and not (folder / "mended").exists():
        wait_for(lambda: len(list((folder / "done").glob("*.json"))) == 3)
        raise InputError("three is too many")
    return square(number, folder)


def be_killed(number: int, folder: Path) -> dict:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number, folder)


def fail_while_others_work(number: int, folder: Path) -> dict:
    """The first part finishes, the second fails when it has, the others would take long."""
    if number == 1:
        wait_for(lambda: (folder / "done/00000.json").exists())
        raise InputError("part one is bad")
    time.sleep(LONG if number > 1 else 0)
    return square(number, folder)


def run_out_of_memory(number: int, folder: Path) -> dict:
    raise MemoryError(number, folder)


def linger(number: int, folder: Path) -> dict:
    """Tell who works on this, and who forked it; take long, unless told otherwise."""
    (folder / f"{number}.pid").write_text(f"{os.getpid()} {os.getppid()}")
    if not (folder / "quick").exists():
        time.sleep(LONG)
    return square(number, folder)


def slow_square(number: int, folder: Path) -> dict:
    (folder / f"{number}.begun").touch()
    wait_for(lambda: (folder / "go").exists())
    return square(number, folder)


def with_keys_of_its_own(number: int, folder: Path) -> dict:
    return {number: (folder.name, number)}


def look_around(number: int, folder: Path) -> dict:
    import pyarrow

    return {
        "environment": os.environ.get("CRAM_TEST_SETTING"),
        "threads of Arrow": pyarrow.cpu_count(),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    }


def wait_for(true: Callable[[], object]) -> None:
    """Return when it is; fail after two minutes."""
    for _ in range(12_000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def runs(pid: int) -> bool:
    """Whether the process is there, and not just its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def start(*script: str) -> subprocess.Popen:
    """A Python of its own process group, which finds this module."""
    here = Path(__file__).parent
    settings = os.environ | {"CRAM_WORKERS": "2", "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
    return subprocess.Popen(
        [sys.executable, *script],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def jobs_in(folder: Path, count: int = 6) -> list[tuple[int, Path]]:
    return [(number, folder) for number in range(count)]


def traces(folder: Path) -> dict[int, int]:
    """How often each number was worked on."""
    return {int(p.stem): len(p.read_text()) for p in folder.glob("*.trace")}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_results_come_in_the_order_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str):
    monkeypatch.setenv("CRAM_WORKERS", processes)
    monkeypatch.setattr(usage, "peak_mib", 0.0)
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [0, 1, 4, 9, 16, 25]
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)
    if processes == "2":
        assert os.getpid() not in {r["process"] for r in results}
        assert {r["threads"] for r in results} == {"1"}, "a worker leaves the other cores to the others"
        assert 10 < usage.peak_mib < 10_000
        monkeypatch.setenv("CRAM_WORKERS", "1")
    again = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    assert again == results
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)


def test_a_rerun_after_an_error_does_only_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    with pytest.raises(InputError, match="three is too many"):
        over_parts(fail_at_three, jobs_in(tmp_path, 4), tmp_path / "done", "square")
    (tmp_path / "mended").touch()
    monkeypatch.setenv("CRAM_WORKERS", "1")
    results = over_parts(fail_at_three, jobs_in(tmp_path, 4), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [0, 1, 4, 9]
    assert traces(tmp_path) == dict.fromkeys(range(4), 1)


def test_a_half_written_result_is_no_result(tmp_path: Path):
    (tmp_path / "done").mkdir()
    (tmp_path / "done/00001.half").write_text('{"square"')
    (tmp_path / "done/00002.json").write_text(json.dumps({"square": "remembered"}))
    results = over_parts(square, jobs_in(tmp_path, 3), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [0, 1, "remembered"]
    assert traces(tmp_path) == {0: 1, 1: 1}


def test_a_killed_worker_gets_one_sentence_and_the_rerun_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    with pytest.raises(InputError, match=r"'square numbers' was killed.*CRAM_WORKERS=1") as refused:
        over_parts(be_killed, jobs_in(tmp_path), tmp_path / "done", "square numbers")
    assert "\n" not in str(refused.value)
    finished = {int(p.stem) for p in (tmp_path / "done").glob("*.json")}
    assert 2 not in finished
    monkeypatch.setenv("CRAM_WORKERS", "1")
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square numbers")
    assert [r["square"] for r in results] == [0, 1, 4, 9, 16, 25]
    assert finished <= {number for number, times in traces(tmp_path).items() if times == 1}


def test_no_jobs_need_no_workers(tmp_path: Path):
    assert over_parts(square, [], tmp_path / "done", "square") == []


def test_workers_are_as_many_as_asked_for_or_one_a_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "3")
    assert workers() == 3
    monkeypatch.delenv("CRAM_WORKERS")
    assert workers() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", " ", "²"])
def test_a_number_of_workers_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str):
    monkeypatch.setenv("CRAM_WORKERS", asked)
    with pytest.raises(InputError, match=r"CRAM_WORKERS is .*expected a positive whole number"):
        workers()


def test_the_fork_server_has_one_thread_and_what_workers_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    server = forkserver._forkserver._forkserver_pid
    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1, "a fork of a process with threads can hang"
    assert "libarrow" in Path(f"/proc/{server}/maps").read_text(), "what loads slowly is loaded once"
    own = dict(pair.split("=", 1) for pair in Path(f"/proc/{server}/environ").read_text().split("\0") if pair)
    assert pool.KEPT_MEMORY.items() <= own.items(), "the C library reads it when a process begins"
    over_parts(square, jobs_in(tmp_path), tmp_path / "again", "square")
    assert forkserver._forkserver._forkserver_pid == server


def test_starting_workers_leaves_this_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    before, main, mask = dict(os.environ), sys.modules["__main__"], signal.pthread_sigmask(signal.SIG_BLOCK, [])
    over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    assert dict(os.environ) == before
    assert sys.modules["__main__"] is main
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask


@pytest.mark.parametrize(("asked", "parallel_at_first"), [("1", "false"), ("3", "true")])
def test_libraries_have_as_many_threads_as_there_are_workers_for_a_while(
    monkeypatch, asked: str, parallel_at_first: str
):
    monkeypatch.setenv("CRAM_WORKERS", asked)
    monkeypatch.setenv("RAYON_NUM_THREADS", "7")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    before = dict(os.environ)
    with library_threads():
        assert (os.environ["RAYON_NUM_THREADS"], os.environ["TOKENIZERS_PARALLELISM"]) == (asked, parallel_at_first)
        one_library_thread()
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert dict(os.environ) == before


def test_threads_can_have_workers_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    before, main = dict(os.environ), sys.modules["__main__"]
    folders = [tmp_path / str(i) for i in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for folder in folders:
            folder.mkdir()
        found = [threads.submit(over_parts, square, jobs_in(f), f / "done", "square") for f in folders]
        assert [[r["square"] for r in future.result()] for future in found] == 3 * [[0, 1, 4, 9, 16, 25]]
    assert dict(os.environ) == before
    assert sys.modules["__main__"] is main


def test_workers_have_the_environment_of_now_and_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    over_parts(look_around, jobs_in(tmp_path, 2), tmp_path / "before", "look")
    monkeypatch.setenv("CRAM_TEST_SETTING", "set when the fork server ran")
    found = over_parts(look_around, jobs_in(tmp_path, 2), tmp_path / "done", "look")
    assert found == 2 * [{"environment": "set when the fork server ran", "threads of Arrow": 1, "interrupts": True}]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_result_is_the_same_fresh_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str):
    monkeypatch.setenv("CRAM_WORKERS", processes)
    fresh = over_parts(with_keys_of_its_own, jobs_in(tmp_path, 3), tmp_path / "done", "keys")
    assert fresh == over_parts(with_keys_of_its_own, jobs_in(tmp_path, 3), tmp_path / "done", "keys")
    assert fresh[2] == {"2": [tmp_path.name, 2]}


def test_what_is_finished_needs_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    monkeypatch.setenv("CRAM_WORKERS", "2")
    monkeypatch.setattr(pool, "processes", None)
    assert over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square") == results


@pytest.mark.parametrize("marker", ["", '{"square": 1', "\0\0\0\0"])
def test_a_marker_that_a_power_cut_damaged_is_none(tmp_path: Path, marker: str):
    (tmp_path / "done").mkdir()
    (tmp_path / "done/00001.json").write_text(marker)
    assert [r["square"] for r in over_parts(square, jobs_in(tmp_path, 3), tmp_path / "done", "square")] == [0, 1, 4]
    assert traces(tmp_path)[1] == 1


def test_an_error_ends_the_other_parts_and_keeps_the_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "3")
    with pytest.raises(InputError, match="part one is bad"):
        over_parts(fail_while_others_work, jobs_in(tmp_path), tmp_path / "done", "fail")
    assert traces(tmp_path) == {0: 1}
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "fail")
    assert [r["square"] for r in results] == [0, 1, 4, 9, 16, 25]
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_lack_of_memory_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str):
    monkeypatch.setenv("CRAM_WORKERS", processes)
    with pytest.raises(InputError, match=r"'grow' ran out of memory.*CRAM_WORKERS=1.*part_megabytes"):
        over_parts(run_out_of_memory, jobs_in(tmp_path), tmp_path / "done", "grow")


def test_a_marker_appears_after_what_it_vouches_for_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    done, seen = tmp_path / "3.json", []

    def syncfs(handle: int) -> int:
        seen.append((Path(os.readlink(f"/proc/self/fd/{handle}")).parent, traces(tmp_path), done.exists()))
        return 0

    monkeypatch.setattr(jobs, "libc", type("libc", (), {"syncfs": staticmethod(syncfs)}))
    finish(square, (3, tmp_path), done)
    assert seen == [(tmp_path, {3: 1}, False)]
    assert done.exists()
    finish(square, (3, tmp_path), done)
    assert len(seen) == 1


def test_a_disk_that_fails_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "libc", type("libc", (), {"syncfs": staticmethod(lambda handle: -1)}))
    monkeypatch.setattr(jobs.ctypes, "get_errno", lambda: errno.ENOSPC)
    with pytest.raises(OSError, match="No space left") as refused:
        finish(square, (3, tmp_path), tmp_path / "3.json")
    assert refused.value.errno == errno.ENOSPC
    assert not (tmp_path / "3.json").exists()


def test_a_part_that_someone_is_at_is_not_begun_again(tmp_path: Path):
    done = tmp_path / "3.json"
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(finish, slow_square, (3, tmp_path), done)
        wait_for(lambda: (tmp_path / "3.begun").exists())
        second = threads.submit(finish, square, (3, tmp_path), done)
        (tmp_path / "go").touch()
        assert first.result()[0] == second.result()[0]
    assert traces(tmp_path) == {3: 1}


def test_work_that_only_a_script_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CRAM_WORKERS", "2")
    monkeypatch.setattr(square, "__module__", "__main__")
    with pytest.raises(InputError, match=r"'square it' runs in other processes.*function square.*Move it to a module"):
        over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square it")


def test_a_script_without_a_guard_can_use_workers(tmp_path: Path):
    (tmp_path / "quick").touch()
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start(str(tmp_path / "script.py"), str(tmp_path))
    assert process.communicate(timeout=120)[0].splitlines() == ["through"]
    assert traces(tmp_path) == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_and_their_server_end_with_a_killed_parent(tmp_path: Path, how: signal.Signals):
    process = start("-c", SCRIPT, str(tmp_path))
    wait_for(lambda: len([p for p in tmp_path.glob("*.pid") if p.read_text()]) == 2)
    others = {int(pid) for p in tmp_path.glob("*.pid") for pid in p.read_text().split()}
    assert len(others) == 3, "two workers and the server that they were forked from"
    assert all(map(runs, others))
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)  # Ctrl-C goes to all of them
    printed = process.communicate(timeout=60)[0]
    wait_for(lambda: not any(map(runs, others)))
    if how == signal.SIGINT:
        assert printed.count("Traceback") == printed.count("KeyboardInterrupt") == 1, printed


def test_an_interrupt_while_the_server_starts_ends_all(tmp_path: Path):
    process = start("-c", SCRIPT, str(tmp_path))

    def server() -> list[int]:
        """The fork server, once it imports the libraries."""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        named = [pid for pid in children if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return [int(pid) for pid in named if "libarrow" in Path(f"/proc/{pid}/maps").read_text()]

    wait_for(server)
    (pid,) = server()
    os.killpg(process.pid, signal.SIGINT)
    printed = process.communicate(timeout=60)[0]
    wait_for(lambda: not runs(pid))
    assert printed.count("Traceback") == 1, printed
    assert traces(tmp_path) == {}


def test_an_interrupt_while_a_worker_starts_is_no_error_of_the_worker(tmp_path: Path):
    interrupted = """
import os, signal
from multiprocessing import forkserver

connect = forkserver.connect_to_new_process

def interrupt_half_way(fds):
    found = connect(fds)
    os.kill(os.getpid(), signal.SIGINT)
    return found

forkserver.connect_to_new_process = interrupt_half_way
"""
    process = start("-c", interrupted + SCRIPT, str(tmp_path))
    printed = process.communicate(timeout=60)[0]
    assert printed.count("Traceback") == printed.count("KeyboardInterrupt") == 1, printed
    assert "EOFError" not in printed
