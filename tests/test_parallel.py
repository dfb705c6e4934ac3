"""Work over parts: order, processes, what a rerun does again, and what a killed worker gets."""

import json
import os
import signal
from pathlib import Path

import pytest

from model import InputError
from tasks import parallel
from tasks.parallel import over_parts, workers


def square(number: int, folder: Path) -> dict:
    """Leave a trace, and give the square and who computed it."""
    with (folder / f"{number}.trace").open("a") as file:
        file.write("x")
    return {"square": number * number, "process": os.getpid(), "threads": os.environ.get("RAYON_NUM_THREADS")}


def fail_at_three(number: int, folder: Path) -> dict:
    if number == 3 and not (folder / "mended").exists():
        raise InputError("three is too many")
    return square(number, folder)


def be_killed(number: int, folder: Path) -> dict:
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(number, folder)


def jobs_in(folder: Path, count: int = 6) -> list[tuple[int, Path]]:
    return [(number, folder) for number in range(count)]


def traces(folder: Path) -> dict[int, int]:
    """How often each number was worked on."""
    return {int(p.stem): len(p.read_text()) for p in folder.glob("*.trace")}


@pytest.mark.parametrize("processes", ["1", "2"])
def test_results_come_in_the_order_of_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str):
    monkeypatch.setenv("CRAM_WORKERS", processes)
    monkeypatch.setattr(parallel, "peak_mib", 0.0)
    results = over_parts(square, jobs_in(tmp_path), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [0, 1, 4, 9, 16, 25]
    assert traces(tmp_path) == dict.fromkeys(range(6), 1)
    if processes == "2":
        assert os.getpid() not in {r["process"] for r in results}
        assert {r["threads"] for r in results} == {"1"}, "a worker leaves the other cores to the others"
        assert 10 < parallel.peak_mib < 10_000
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
