"""The data stages on a Dask cluster: a scheduler and workers, each a process of its own, some of which are killed."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import write_jsonl
from test_workers import LONG, jobs_in, square, squares, traces, wait_for

from model import InputError
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.workers import dask_cluster, mapping
from tasks.workers.mapping import over_parts

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
        self.folder, self.processes = folder, []
        for part in ("tasks", "model", "tests"):  # a checkout of their own, as on another machine
            shutil.copytree(HERE.parent / part, folder / "cram" / part)
        dask_cluster.edition()  # of now, if someone edits the code meanwhile
        self.start("dask_scheduler", "--port", "0", "--scheduler-file", str(folder / "scheduler.json"))
        wait_for((folder / "scheduler.json").exists)
        wait_for(lambda: (folder / "scheduler.json").read_text().endswith("}"))
        self.address = json.loads((folder / "scheduler.json").read_text())["address"]

    def start(self, what: str, *arguments: str, search: str = "") -> subprocess.Popen:
        name = f"{what}-{len(self.processes)}"
        search = search or f"{self.folder}/cram{os.pathsep}{self.folder}/cram/tests"
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"distributed.cli.{what}", "--no-dashboard", *arguments],
                env=os.environ | {"PYTHONPATH": search, "TMPDIR": str(self.folder)},
                cwd=self.folder,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def add_workers(self, count: int, search: str = "") -> subprocess.Popen | None:
        """Start so many; returns the last."""
        before, process = len(self.workers()), None
        for _ in range(count):
            arguments = ("--nthreads", "1", "--no-nanny", "--local-directory", "scratch")
            process = self.start("dask_worker", self.address, *arguments, search=search)
        wait_for(lambda: len(self.workers()) == before + count)
        return process

    def workers(self) -> list[int]:
        """Process ids of the workers that the scheduler knows."""
        with distributed.Client(self.address, set_as_default=False) as client:
            return list(client.run(os.getpid).values())

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("dask"))
    yield started
    started.end()


@pytest.fixture
def dask(scheduler: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, named as a user names it."""
    monkeypatch.setenv("CRAM_DASK", scheduler.address)
    return scheduler


@pytest.fixture
def two_workers(dask: Cluster) -> Cluster:
    dask.add_workers(2 - len(dask.workers()))
    return dask


def test_a_cluster_without_workers_is_an_input_error(dask: Cluster, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dask_cluster, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(mapping, "SECONDS_BETWEEN_CHECKS", 0.2)
    with pytest.raises(InputError, match=r"no workers .*dask worker tcp://"):
        squares(square, tmp_path)


def test_a_killed_worker_s_part_is_done_by_another_and_no_finished_part_again(two_workers: Cluster, tmp_path: Path):
    def kill() -> None:
        wait_for((tmp_path / "victim").exists)
        wait_for(lambda: len(list((tmp_path / "done").glob("*.json"))) == 7)  # the other worker does what it can
        os.kill(int((tmp_path / "victim").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    results = over_parts(be_killed, jobs_in(tmp_path, 8), tmp_path / "done", "square")
    killer.join()
    assert [r["square"] for r in results] == [n * n for n in range(8)]
    assert traces(tmp_path) == dict.fromkeys(range(8), 1)
    assert int((tmp_path / "victim").read_text()) != results[3]["process"]
    assert os.getpid() not in {r["process"] for r in results}
    assert {r["threads"] for r in results} == {"1"}
    assert "IO loop" not in {thread.name for thread in threading.enumerate()}, "the client is closed"
    assert not list((tmp_path / "done").glob("*.shared"))


def test_a_stage_writes_the_same_files_as_on_this_machine(
    two_workers: Cluster, store: Path, tmp_path: Path, toy_texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    text = write_jsonl(tmp_path / "toy.jsonl", toy_texts + toy_texts[::3])
    monkeypatch.delenv("CRAM_DASK")
    corpus = download.fn(Download(source="files", files=[str(text)], documents=0, part_megabytes=0.01))
    assert corpus.stats["parts"] > 10
    here = deduplicate.fn(Deduplicate(), corpus)
    expected = here.manifest["files"]  # with their digests
    here.path.rename(tmp_path / "made here")
    monkeypatch.setenv("CRAM_DASK", two_workers.address)
    there = deduplicate.fn(Deduplicate(), corpus)
    assert there == here, "the place is no part of the key"
    assert there.manifest["files"] == expected
    assert there.manifest["peak_memory_mib"]["largest_worker"] > 10


def test_an_error_in_a_part_ends_the_work_unchanged_and_finished_parts_are_kept(two_workers: Cluster, tmp_path: Path):
    with pytest.raises(InputError, match=r"^part two is bad$"):
        squares(fail, tmp_path)
    finished = {int(p.stem) for p in (tmp_path / "done").glob("*.json")}
    assert squares(square, tmp_path) == [n * n for n in range(6)]
    assert all(traces(tmp_path)[number] == 1 for number in finished)


def test_a_worker_with_other_versions_is_refused(dask: Cluster, tmp_path: Path, monkeypatch):
    other = dask_cluster.edition() | {"pyarrow": "1.0", "cram": "0" * 12}
    monkeypatch.setattr(dask_cluster, "edition", lambda: other)
    with pytest.raises(InputError, match=r"cram \w+ \(here 0+\), pyarrow [\d.]+ \(here 1.0\)"):
        squares(square, tmp_path)
    assert traces(tmp_path) == {}


def test_a_worker_that_does_not_see_the_store_is_refused(dask: Cluster, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(Path, "touch", lambda path: None)  # as if it lay on another disk
    with pytest.raises(InputError, match=r"The Dask worker tcp://.*doesn't see /"):
        squares(square, tmp_path)
    assert traces(tmp_path) == {}


def test_a_file_or_module_that_a_worker_lacks_is_named(dask: Cluster, tmp_path: Path, monkeypatch):
    with pytest.raises(InputError, match=r"doesn't find .*\.nowhere"):
        squares(read_elsewhere, tmp_path)
    (tmp_path / "only_here.py").write_text("def work(number, folder):\n    return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with pytest.raises(InputError, match="No module named 'only_here'"):
        over_parts(only_here.work, jobs_in(tmp_path), tmp_path / "other", "work")


def test_a_worker_without_cram_is_an_input_error(dask: Cluster, tmp_path: Path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/__init__.py").write_text("raise ModuleNotFoundError('No module named tasks')")
    worker = dask.add_workers(1, search=str(tmp_path))
    with pytest.raises(InputError, match="No module named tasks"):
        squares(square, tmp_path, 60)
    worker.kill()
    wait_for(lambda: worker.poll() is not None)


def test_a_worker_of_many_threads_is_refused(tmp_path: Path, monkeypatch):
    class Worker:
        address = "tcp://somewhere:1"
        state = type("state", (), {"nthreads": 4})

    monkeypatch.setattr(distributed, "get_worker", Worker)
    with pytest.raises(InputError, match=r"tcp://somewhere:1.*--nworkers 4 --nthreads 1"):
        dask_cluster.finish_there(b"", str(tmp_path), dask_cluster.edition(), str(tmp_path / "0.json"))


@pytest.mark.parametrize(
    "error", [distributed.KilledWorker("square-3", None, 3), MemoryError()], ids=["killed", "memory"]
)
def test_a_part_that_no_worker_survives_is_an_input_error(error: Exception):
    problem = dask_cluster.explained(error, "tcp://somewhere:1", "square")
    assert isinstance(problem, InputError)
    assert "'square'" in str(problem)


def test_a_scheduler_that_is_lost_half_way_is_an_input_error(dask: Cluster, tmp_path: Path, caplog):
    def kill() -> None:
        wait_for(lambda: list(tmp_path.glob("*.begun")))
        dask.processes[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(InputError, match=r"scheduler at tcp://.* lost during 'square'"):
        squares(begin_and_wait, tmp_path)
    killer.join()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], "tracebacks"


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "nonsense", "tcp://127.0.0.1", "http://127.0.0.1:1", "tls://h:1"]
)
def test_an_address_where_no_scheduler_answers_is_refused(tmp_path: Path, monkeypatch, address: str):
    monkeypatch.setattr(dask_cluster, "CONNECT_SECONDS", 0.5)
    monkeypatch.setenv("CRAM_DASK", address)
    before = threading.active_count()
    with pytest.raises(InputError, match=f"CRAM_DASK={address}"):
        squares(square, tmp_path)
    assert threading.active_count() == before


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.setenv("CRAM_DASK", "tcp://127.0.0.1:8786")
    with pytest.raises(InputError, match=r"`distributed` is missing.*pip install"):
        squares(square, tmp_path)
