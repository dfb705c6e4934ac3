"""The data stages on a Dask cluster: a scheduler and workers, each a process of its own, some of which are killed."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import bytes_of, corpus_of
from test_workers import LONG, SQUARES, jobs_in, square, squares, traces, wait_for

from model.errors import InputError
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.workers import jobs
from tasks.workers.jobs import over_parts

distributed = pytest.importorskip("distributed")

HERE = Path(__file__).parent


def be_killed(number: int, folder: Path) -> dict:
    """The first worker that gets number 3 waits to be killed."""
    if number == 3 and not (folder / "victim").exists():
        (folder / "half").write_text(str(os.getpid()))
        (folder / "half").rename(folder / "victim")
        time.sleep(LONG)
    return square(number, folder)


def fail(number: int, folder: Path) -> dict:
    if number == 2:
        raise InputError("part two is bad")
    return square(number, folder)


def read_elsewhere(number: int, folder: Path) -> dict:
    return {"text": (folder / f"{number}.nowhere").read_text()}


def begin_and_wait(number: int, folder: Path) -> dict:
    (folder / f"{number}.begun").touch()
    time.sleep(LONG)
    return {}


class Cluster:
    """A scheduler and workers of one thread on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes = []
        for part in ("tasks", "model", "tests"):  # a checkout of their own, as on another machine
            shutil.copytree(HERE.parent / part, folder / "cram" / part)
        jobs.edition()  # of now, if someone edits the code meanwhile
        about = folder / "scheduler.json"
        self.start("dask_scheduler", "--port", "0", "--scheduler-file", str(about))
        wait_for(lambda: about.exists() and about.read_text().endswith("}"))
        self.address = json.loads(about.read_text())["address"]

    def start(self, what: str, *arguments: str, search: str = "") -> None:
        search = search or f"{self.folder}/cram{os.pathsep}{self.folder}/cram/tests"
        env = os.environ | {"PYTHONPATH": search, "TMPDIR": str(self.folder)}
        command = [sys.executable, "-m", f"distributed.cli.{what}", "--no-dashboard", *arguments]
        with (self.folder / "log").open("a") as log:
            self.processes.append(subprocess.Popen(command, env=env, cwd=self.folder, stdout=log, stderr=log))

    def have_workers(self, count: int, search: str = "") -> subprocess.Popen:
        """Start workers until there are so many; returns the process that was started last."""
        with distributed.Client(self.address, set_as_default=False) as client:
            for _ in range(count - len(client.nthreads())):
                arguments = ("--nthreads", "1", "--no-nanny", "--local-directory", "scratch")
                self.start("dask_worker", self.address, *arguments, search=search)
            client.wait_for_workers(count, timeout=120)
        return self.processes[-1]

    @contextmanager
    def third_worker(self, search: str) -> Iterator[subprocess.Popen]:
        """One more worker than two, for a while, that imports from `search`."""
        third = self.have_workers(3, search)
        try:
            yield third
        finally:
            third.kill()
            third.wait()


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, named as a user names it."""
    cluster = Cluster(tmp_path_factory.mktemp("dask"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAM_DASK", cluster.address)
        yield cluster
    for process in cluster.processes:
        process.kill()
        process.wait()


@pytest.fixture
def two_workers(dask: Cluster) -> Cluster:
    dask.have_workers(2)
    return dask


def test_a_cluster_without_workers_is_an_input_error(dask: Cluster, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(jobs, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "SECONDS_BETWEEN_CHECKS", 0.2)
    with pytest.raises(InputError, match="no workers"):
        squares(square, tmp_path)


def test_a_stage_writes_the_same_files_as_on_this_machine(
    two_workers: Cluster, store: Path, tmp_path: Path, toy_texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("CRAM_DASK")
    corpus = corpus_of(tmp_path, toy_texts + toy_texts[::3], part_megabytes=0.01)
    assert corpus.stats["parts"] > 10
    here = deduplicate.fn(Deduplicate(), corpus)
    expected = bytes_of(here)
    here.path.rename(tmp_path / "made here")
    monkeypatch.setenv("CRAM_DASK", two_workers.address)
    there = deduplicate.fn(Deduplicate(), corpus)
    assert there == here, "the place is no part of the key"
    assert bytes_of(there) == expected
    assert there.manifest["peak_memory_mib"]["largest_worker"] > 10


def test_an_error_in_a_part_ends_the_work_unchanged_and_finished_parts_are_kept(two_workers: Cluster, tmp_path: Path):
    with pytest.raises(InputError, match=r"^part two is bad$"):
        squares(fail, tmp_path)
    finished = {int(p.stem) for p in (tmp_path / "done").glob("*.json")}
    assert squares(square, tmp_path) == SQUARES
    assert all(traces(tmp_path)[number] == 1 for number in finished)


def test_a_worker_that_lacks_what_the_work_needs_is_refused(two_workers: Cluster, tmp_path: Path, monkeypatch):
    def refused(work: Callable, named: str) -> None:
        with pytest.raises(InputError, match=named):
            over_parts(work, jobs_in(tmp_path), tmp_path / "done", "square")

    refused(read_elsewhere, r"doesn't find .*\.nowhere")
    (tmp_path / "only_here.py").write_text("def work(number, folder):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    refused(only_here.work, "No module named 'only_here'")
    other = jobs.edition() | {"pyarrow": "1.0", "cram": "0" * 12}
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "edition", lambda: other)
        refused(square, r"cram \w+ \(here 0+\), pyarrow \S+ \(here 1.0\)")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", lambda path: None)  # as if it lay on another disk
        refused(square, r"worker tcp://.*/done/\w+\.shared")
    assert traces(tmp_path) == {}


def test_a_worker_of_another_version_is_left_out_and_said(two_workers: Cluster, tmp_path: Path, caplog):
    old = tmp_path / "old"
    shutil.copytree(two_workers.folder / "cram", old)
    with (old / "tasks/store/home.py").open("a") as file:
        file.write("# edited\n")
    with two_workers.third_worker(f"{old}{os.pathsep}{old}/tests") as third:
        results = over_parts(square, jobs_in(tmp_path, 20), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [n * n for n in range(20)]
    assert traces(tmp_path) == dict.fromkeys(range(20), 1)
    assert third.pid not in {r["process"] for r in results}
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"worker tcp://\S+ on .* has cram \w+ \(here \w+\)", said)


def test_a_worker_without_cram_is_an_input_error(two_workers: Cluster, tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/__init__.py").write_text("raise ModuleNotFoundError('No module named tasks')")
    with two_workers.third_worker(str(tmp_path)), pytest.raises(InputError, match="No module named tasks"):
        squares(square, tmp_path, 60)


def test_a_killed_worker_s_part_is_done_by_another_and_no_finished_part_again(two_workers: Cluster, tmp_path: Path):
    def kill() -> None:
        wait_for((tmp_path / "victim").exists)
        wait_for(lambda: len(list((tmp_path / "done").glob("*.json"))) == 7)  # the other worker does what it can
        os.kill(int((tmp_path / "victim").read_text()), signal.SIGKILL)

    with ThreadPoolExecutor(1) as beside:
        beside.submit(kill)
        results = over_parts(be_killed, jobs_in(tmp_path, 8), tmp_path / "done", "square")
    assert [r["square"] for r in results] == [n * n for n in range(8)]
    assert traces(tmp_path) == dict.fromkeys(range(8), 1)
    assert int((tmp_path / "victim").read_text()) != results[3]["process"]
    assert os.getpid() not in {r["process"] for r in results}
    assert all(r["threads"] == ["1", 1] for r in results)
    assert "IO loop" not in {thread.name for thread in threading.enumerate()}, "the client is closed"
    assert not list((tmp_path / "done").glob("*.shared"))


def test_a_worker_of_many_threads_is_refused(tmp_path: Path, monkeypatch):
    class Worker:
        address = "tcp://somewhere:1"
        state = type("state", (), {"nthreads": 4})

    monkeypatch.setattr(distributed, "get_worker", Worker)
    with pytest.raises(InputError, match="tcp://somewhere:1"):
        jobs.measure_there(b"", str(tmp_path), jobs.edition())


@pytest.mark.parametrize(
    "error", [distributed.KilledWorker("square-3", SimpleNamespace(address="tcp://w:1"), 3), MemoryError()], ids=repr
)
def test_a_part_that_no_worker_survives_is_an_input_error(error: Exception):
    problem = jobs.explain(error, "tcp://somewhere:1", "square")
    assert isinstance(problem, InputError)
    assert "'square'" in str(problem)


def test_a_scheduler_that_is_lost_half_way_is_an_input_error(dask: Cluster, tmp_path: Path, caplog):
    def kill() -> None:
        wait_for(lambda: list(tmp_path.glob("*.begun")))
        dask.processes[0].kill()

    dask.have_workers(1)
    with ThreadPoolExecutor(1) as beside:
        beside.submit(kill)
        with pytest.raises(InputError, match="lost"):
            squares(begin_and_wait, tmp_path)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "tracebacks"


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "nonsense", "tcp://127.0.0.1", "http://127.0.0.1:1", "tls://h:1"]
)
def test_an_address_where_no_scheduler_answers_is_refused(tmp_path: Path, monkeypatch, address: str):
    monkeypatch.setattr(jobs, "CONNECT_SECONDS", 0.1)
    monkeypatch.setenv("CRAM_DASK", address)
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(InputError, match=f"CRAM_DASK={address}"):
        squares(square, tmp_path)
    assert {thread.name for thread in threading.enumerate()} <= before | {"tqdm_monitor"}


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setenv("CRAM_DASK", "tcp://127.0.0.1:8786")
    with pytest.raises(InputError, match="distributed"):
        squares(square, tmp_path)
