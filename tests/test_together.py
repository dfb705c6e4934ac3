"""Several runs at once, in processes: what one gives, fails of or is killed in leaves the others alone."""

import errno
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
from tqdm import tqdm

from model import InputError, machine
from tasks.workers import finetunes
from tasks.workers.usage import usage


def work(path: Path, number: int, report) -> tuple[int, int]:
    """Square a number in a process that it names; what it is told to do instead stands in the file."""
    told = path.read_text() if path.exists() else ""
    if told == "mend":
        raise InputError("the data is rubbish; mend it")
    if told == "full":
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")
    if told == "fail":
        raise KeyError("a bug")
    report(number, "halfway")
    if told == "bar":
        return type(tqdm(disable=True).get_lock())
    if told == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if told == "wait":
        (path.parent / "waiting").touch()
        signal.pause()
    return number**2, os.getpid()


def side_by_side(folder: Path, told: dict[int, str], count: int = 2, runs: int = 4) -> list:
    """The results or errors of so many runs, of which `told` says what some do."""
    for number, what in told.items():
        (folder / str(number)).write_text(what)

    def run(number: int) -> object:
        try:
            return finetunes.run(work, (folder / str(number), number), 10, f"finetune {number}")
        except Exception as error:
            return error

    with finetunes.several(count, 10 * runs, runs), ThreadPoolExecutor(count) as threads:
        return [future.result() for future in [threads.submit(copy_context().run, run, n) for n in range(runs)]]


def test_runs_go_on_in_as_many_processes_as_are_allowed_and_give_the_same(tmp_path):
    found = side_by_side(tmp_path, {}, count=2, runs=6)
    assert [square for square, _ in found] == [0, 1, 4, 9, 16, 25]
    pids = {pid for _, pid in found}
    assert len(pids) <= 2
    assert os.getpid() not in pids
    assert finetunes.run(work, (tmp_path / "x", 5), 10, "alone") == (25, os.getpid())


def test_no_process_outlives_the_runs(tmp_path):
    found = side_by_side(tmp_path, {})
    for pid in {pid for _, pid in found}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_run_is_told_and_loses_no_other(tmp_path):
    found = side_by_side(tmp_path, {1: "die"}, runs=5)
    assert [one[0] for one in (found[0], *found[2:])] == [0, 4, 9, 16]
    assert isinstance(found[1], InputError)
    assert str(found[1]).startswith("The process of 'finetune 1' was killed, most likely for lack of memory.")
    assert "CRAM_FINETUNES=1" in str(found[1])


def test_what_the_user_can_mend_stays_a_sentence_and_a_bug_keeps_its_traceback(tmp_path):
    found = side_by_side(tmp_path, {0: "mend", 2: "fail"})
    assert isinstance(found[0], InputError)
    assert str(found[0]) == "the data is rubbish; mend it"
    assert isinstance(found[2], RuntimeError)
    assert "'finetune 2' failed in its process" in str(found[2])
    assert "KeyError: 'a bug'" in str(found[2])
    assert (found[1][0], found[3][0]) == (1, 9)


def test_runs_that_are_given_up_end_at_once(tmp_path):
    (tmp_path / "0").write_text("wait")
    problems: list[Exception] = []

    def run() -> None:
        try:
            finetunes.run(work, (tmp_path / "0", 0), 10, "finetune 0")
        except InputError as error:
            problems.append(error)

    with finetunes.several(2, 10, 1):
        thread = threading.Thread(target=copy_context().run, args=(run,))
        thread.start()
        while not (tmp_path / "waiting").exists():
            time.sleep(0.01)
        process = finetunes.crew.get().members[0].process
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert process.exitcode is not None
    assert "'finetune 0' was cancelled" in str(problems[0])


def test_a_bar_that_torch_shows_in_a_process_leaves_no_semaphore_behind(tmp_path):
    assert side_by_side(tmp_path, {0: "bar"}, runs=1) == [type(threading.RLock())], "not tqdm's own"


def test_a_process_that_dies_while_it_has_nothing_to_do_is_replaced(tmp_path):
    with finetunes.several(1, 20, 2) as crew:
        _, first = finetunes.run(work, (tmp_path / "0", 0), 10, "finetune 0")
        os.kill(first, signal.SIGKILL)
        crew.idle[0].process.join()
        square, second = finetunes.run(work, (tmp_path / "3", 3), 10, "finetune 3")
    assert square == 9
    assert second != first


def test_nothing_begins_after_the_end(tmp_path, monkeypatch):
    """Neither alone in this process, nor in one that is being made when the end comes."""
    with finetunes.several(2, 10, 1) as crew:
        context = copy_context()
    arguments = (work, (tmp_path / "0", 0), 10, "finetune 0")
    with pytest.raises(InputError, match="'finetune 0' was cancelled"):
        context.run(finetunes.run, *arguments)
    assert not crew.members
    made, new = [], finetunes.Member

    def slow(threads: int) -> finetunes.Member:
        made.append(new(threads))
        crew.end()
        return made[0]

    with finetunes.several(2, 10, 1) as crew:
        monkeypatch.setattr(finetunes, "Member", slow)
        with pytest.raises(InputError, match="'finetune 0' was cancelled"):
            finetunes.run(*arguments)
    assert made[0].process.exitcode is not None


def test_a_failed_run_leaves_no_process_behind(tmp_path):
    (tmp_path / "0").write_text("fail")
    with finetunes.several(1, 10, 2) as crew:
        with pytest.raises(RuntimeError):
            finetunes.run(work, (tmp_path / "0", 0), 10, "finetune 0")
        assert crew.members == crew.idle == []
        assert finetunes.run(work, (tmp_path / "1", 1), 10, "finetune 1")[0] == 1


def test_a_full_disk_in_a_process_is_one_here(tmp_path):
    (tmp_path / "0").write_text("full")
    with finetunes.several(2, 10, 1), pytest.raises(OSError, match="No space left") as caught:
        finetunes.run(work, (tmp_path / "0", 0), 10, "finetune 0")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "model.safetensors")


def test_an_error_while_progress_is_told_is_no_killed_process(tmp_path):
    def broken(examples: int, note: str) -> None:
        raise OSError("the server is away")

    with finetunes.several(1, 10, 1) as crew:
        member = crew.member("finetune 0")
        with pytest.raises(OSError, match="the server is away"):
            member.run(work, (tmp_path / "0", 0), broken, "finetune 0")


def test_progress_counts_the_examples_of_all_runs_and_tells_the_time_left(tmp_path, monkeypatch):
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(finetunes.Progress, "update", lambda self, amount, note: told.append((amount, note)))
    side_by_side(tmp_path, {}, count=1, runs=4)
    assert sum(amount for amount, _ in told) == 40
    assert told[-1][1] == "4 of 4 runs done, about 0 min left"
    assert all("runs done, about" in note for _, note in told)
    assert any("; 3 halfway" in note for _, note in told)


def test_what_processes_used_is_counted_for_the_run_that_had_them(tmp_path):
    found: dict[int, tuple[float, float]] = {}

    def run(number: int) -> None:
        usage.cpu_seconds = usage.peak_mib = 0.0
        finetunes.run(work, (tmp_path / str(number), number), 10, f"finetune {number}")
        found[number] = (usage.cpu_seconds, usage.peak_mib)

    with finetunes.several(2, 20, 2), ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(copy_context().run, run, number) for number in range(2)]:
            future.result()
    assert all(0 <= seconds < 30 and 10 < peak < 10_000 for seconds, peak in found.values())


def test_as_many_runs_go_on_at_once_as_cores_and_memory_allow(monkeypatch):
    monkeypatch.setenv("CRAM_WORKERS", "8")
    monkeypatch.setattr(machine, "available_memory", lambda: 5 * finetunes.BYTES_A_RUN)
    assert [finetunes.at_once(runs) for runs in (0, 1, 3, 40)] == [0, 1, 3, 5]
    assert finetunes.at_once(40, 2 * finetunes.BYTES_A_RUN) == 2
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    assert finetunes.at_once(40) == 1
    monkeypatch.setenv("CRAM_FINETUNES", "6")
    assert [finetunes.at_once(runs) for runs in (1, 4, 40)] == [1, 4, 6]


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5"])
def test_a_number_of_runs_that_is_none_is_refused(monkeypatch, asked):
    monkeypatch.setenv("CRAM_FINETUNES", asked)
    with pytest.raises(InputError, match=f"CRAM_FINETUNES is '{asked}'; expected a positive whole number"):
        finetunes.at_once(4)
