"""The store: keys, publication, locks, drafts, hits."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model import InputError
from tasks import store as store_module
from tasks.stage import Params, stage, target
from tasks.store import WORK, Artifact, artifacts, draft_of, find, locked, read_manifest, refresh, verify

CALLS: list[str] = []


class Count(Params):
    """How far to count."""

    upto: int = 3


@stage(version=1)
def count(params: Count, out: Path) -> dict:
    """Write the numbers."""
    CALLS.append("count")
    (out / "numbers.txt").write_text("\n".join(map(str, range(params.upto))))
    return {"numbers": params.upto}


meeting = threading.Barrier(4)


@stage(version=1)
def together(params: Count, out: Path) -> dict:
    """Several threads end this at the same moment."""
    meeting.wait(timeout=600)
    return {}


@stage(version=1, resumes=True)
def slow(params: Count, source: Artifact, out: Path) -> dict:
    """Work that resumes: a file for every number, some seconds in all."""
    for number in range(params.upto):
        if not (out / f"{number}.txt").exists():
            (out / f"{number}.half").write_text(str(number))
            time.sleep(0.05)
            (out / f"{number}.half").rename(out / f"{number}.txt")
    return {"files": len(list(out.glob("*.txt")))}


@stage(version=1, resumes=True)
def worker(params: Count, out: Path) -> dict:
    """Keeps in its work what a rerun need not do again."""
    (out / WORK).mkdir(exist_ok=True)
    if not (out / WORK / "done").exists():
        CALLS.append("worker")
        (out / WORK / "done").write_text("yes")
    (out / "result.txt").write_text("result")
    return {}


@stage(version=1)
def careless(params: Count, out: Path) -> dict:
    """Writes a different file in every attempt, and fails in the first."""
    CALLS.append("careless")
    (out / f"attempt-{len(CALLS)}.txt").write_text("x")
    if len(CALLS) == 1:
        raise InputError("nothing to count")
    return {}


def write(params: Count, out: Path) -> dict:
    """Writes another result if CALLS says so, and another description in every run."""
    (out / "numbers.txt").write_text("other" if "other" in CALLS else "same")
    (out / "README.md").write_text(str(time.time_ns()))
    return {"when": time.time_ns()}


wayward, steady = stage(version=1, varies=True, name="wayward")(write), stage(version=1, name="steady")(write)


@stage(version=1)
def secretive(params: Count, out: Path) -> dict:
    """Lets nobody else read what it makes, as some libraries do."""
    (out / "numbers.txt").write_text("1")
    (out / "numbers.txt").chmod(0o600)
    return {}


@stage(version=1)
def reader(params: Count, source: Artifact, out: Path) -> dict:
    """Loses its input in the middle of its work, if CALLS says so, and then looks for it."""
    if "lose" in CALLS:
        shutil.rmtree(source.path)
    return {"numbers": len((source.path / "numbers.txt").read_text().split())}


@stage(version=1)
def follower(params: Count, first: Artifact, others: list[Artifact], out: Path) -> dict:
    """Reads what others made."""
    CALLS.append("follower")
    return {}


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def run_slow(root: str) -> None:
    store_module.ROOT = Path(root)
    slow.fn(Count(upto=60), count.fn(Count()))


def start_slow(store: Path) -> subprocess.Popen:
    code = f"import test_stage; test_stage.run_slow({str(store)!r})"
    tests = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    return subprocess.Popen([sys.executable, "-c", code], env=env)


def wait_for(pattern: str, store: Path) -> None:
    deadline = time.monotonic() + 600
    while not list(store.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} did not appear"
        time.sleep(0.01)


def test_a_plain_call_makes_the_artifact_and_a_second_one_finds_it(store: Path):
    first, second = count.fn(Count()), count.fn(Count())
    assert first == second
    assert CALLS == ["count"]
    assert (first.path / "numbers.txt").read_text() == "0\n1\n2"
    assert first.stats == {"numbers": 3} == json.loads((first.path / "stats.json").read_text())


def test_the_manifest_says_everything_and_names_no_absolute_path(store: Path):
    text = (count.fn(Count()).path / "stage.json").read_text()
    about = json.loads(text)
    assert {"stage", "version", "key", "params", "inputs", "files", "stats", "seconds", "peak_memory_mib", "started",
            "finished", "environment"} <= set(about)  # fmt: skip
    assert {"python", "packages", "machine", "commit"} <= set(about["environment"])
    assert {f["path"] for f in about["files"]} == {"numbers.txt", "stats.json"}
    assert str(store) not in text
    assert str(Path.cwd()) not in text


def test_the_key_follows_stage_version_params_and_inputs(store: Path):
    a, b = Artifact(stage="count", key="a" * 12), Artifact(stage="count", key="b" * 12)
    keys = [
        target("x", 1, Count(), {"source": a})[0].key,
        target("y", 1, Count(), {"source": a})[0].key,
        target("x", 2, Count(), {"source": a})[0].key,
        target("x", 1, Count(upto=4), {"source": a})[0].key,
        target("x", 1, Count(), {"source": b})[0].key,
        target("x", 1, Count(), {"source": [a, b]})[0].key,
        target("x", 1, Count(), {"source": [b, a]})[0].key,
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == target("x", 1, Count(upto=3), {"source": a})[0].key


@pytest.mark.parametrize("harm", ["delete", "truncate", "junk", "device", "folder"])
def test_a_damaged_artifact_is_made_again(store: Path, harm: str):
    made = count.fn(Count())
    if harm == "delete":
        (made.path / "numbers.txt").unlink()
    elif harm == "truncate":
        (made.path / "numbers.txt").write_text("0")
    elif harm == "junk":
        (made.path / "stage.json").write_text("{ junk")
    elif harm == "device":  # which must not be read for ever
        about = json.loads((made.path / "stage.json").read_text())
        about["files"].append({"path": "/dev/zero", "bytes": 0, "sha256": ""})
        (made.path / "stage.json").write_text(json.dumps(about))
    else:
        shutil.rmtree(made.path)
    assert read_manifest(made) is None
    with pytest.raises(InputError, match=made.key):
        _ = made.manifest
    assert count.fn(Count()) == made
    assert CALLS == ["count", "count"]
    assert (made.path / "numbers.txt").read_text() == "0\n1\n2"


def test_a_failed_stage_publishes_nothing_and_its_litter_is_not_published_later(store: Path):
    with pytest.raises(InputError, match="nothing to count"):
        careless.fn(Count())
    assert artifacts("careless") == []
    assert not (store / "careless").exists()
    made = careless.fn(Count())
    assert {f["path"] for f in made.manifest["files"]} == {"attempt-2.txt", "stats.json"}


def test_latest_points_to_the_newest_and_the_tree_can_be_moved(store: Path, tmp_path: Path, monkeypatch):
    count.fn(Count())
    newest = count.fn(Count(upto=5))
    assert os.readlink(store / "count" / "latest") == newest.key
    shutil.move(store, tmp_path / "elsewhere")
    monkeypatch.setattr(store_module, "ROOT", tmp_path / "elsewhere")
    assert find("count", "latest") == newest
    left = count.fn(Count())
    assert CALLS == ["count", "count"]
    refresh(newest)
    assert find("count", "latest") == left
    assert (left.path.parent / "latest").resolve() == left.path
    refresh(left)
    assert not (left.path.parent / "latest").exists()


def test_an_artifact_is_found_by_the_beginning_of_its_key(store: Path):
    made = count.fn(Count())
    assert find("count", made.key[:5]) == made
    (store / "count" / "latest").unlink()  # as in a store to which artifacts were copied
    assert find("count", "latest") == made
    for name in ("", "zzz"):
        with pytest.raises(InputError, match=made.key):
            find("count", name)


@pytest.mark.parametrize("name", ["latest", "0123"])
def test_for_a_stage_without_artifacts_the_error_names_the_command_that_makes_one(store: Path, name: str):
    with pytest.raises(InputError, match=r"`cram run RECIPE --until count`"):
        find("count", name)


@pytest.mark.parametrize("place", [0, 1])
def test_a_stage_runs_again_when_an_input_that_varies_has_other_contents(store: Path, place: int):
    inputs = [wayward.fn(Count(upto=number)) for number in range(2)]

    def follow() -> Artifact:
        return follower.fn(Count(), inputs[0], [inputs[1]])

    follow()
    shutil.rmtree(inputs[place].path)
    assert not follower.is_made(Count(), inputs[0], [inputs[1]]), "the contents of its input are unknown"
    wayward.fn(Count(upto=place))
    assert follower.is_made(Count(), inputs[0], [inputs[1]]), "the same result, though another description"
    follow()
    assert CALLS == ["follower"]
    CALLS.append("other")
    refresh(inputs[place])
    wayward.fn(Count(upto=place))
    assert find("follower", "latest") == follow() == follow()
    assert CALLS == ["follower", "other", "follower"]


@pytest.mark.parametrize("maker", [steady, wayward])
def test_a_stage_does_not_run_again_if_its_input_does_not_vary_or_its_contents_were_not_recorded(store: Path, maker):
    inputs = [maker.fn(Count(upto=number)) for number in range(2)]
    made = follower.fn(Count(), inputs[0], inputs[1:])
    if maker is wayward:  # made by an earlier version
        about = json.loads((made.path / "stage.json").read_text())
        del about["made_from"]
        (made.path / "stage.json").write_text(json.dumps(about))
    CALLS.append("other")
    refresh(inputs[0])
    maker.fn(Count(upto=0))
    assert follower.fn(Count(), inputs[0], inputs[1:]) == made
    assert CALLS == ["follower", "other"]


def test_all_files_may_be_read_by_those_who_may_read_the_manifest(store: Path):
    made = secretive.fn(Count())
    modes = {path.stat().st_mode & 0o777 for path in made.path.iterdir() if path.is_file()}
    assert len(modes) == 1
    assert modes != {0o600}


def test_a_killed_stage_publishes_nothing_frees_its_lock_and_is_resumed(store: Path):
    process = start_slow(store)
    wait_for(".partial/slow-*/20.txt", store)
    process.kill()
    process.wait()
    assert not (store / "slow").exists()
    draft = next((store / ".partial").glob("slow-*"))
    before = {p.name: p.stat().st_mtime_ns for p in draft.glob("*.txt")}
    run_slow(str(store))
    made = artifacts("slow")[0]
    assert made.stats == {"files": 60}
    assert {name: (made.path / name).stat().st_mtime_ns for name in before} == before
    assert not draft.exists()


def test_two_processes_on_one_key_make_it_once(store: Path):
    for process in [start_slow(store) for _ in range(2)]:
        assert process.wait(600) == 0
    assert len(artifacts("slow")) == 1
    assert sum(p.is_dir() for p in (store / ".partial").iterdir()) == 0


def test_a_manifest_is_written_last(store: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(path: Path) -> None:
        if path.name == "numbers.txt":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "fsync", fail)
    with pytest.raises(InputError, match=r"No space left.*CRAM_ARTIFACTS"):
        count.fn(Count())
    draft = draft_of(count.target(Count()))
    assert (draft / "numbers.txt").exists()
    assert not (draft / "stage.json").exists()
    assert artifacts("count") == []


@pytest.mark.parametrize("place", ["fsync", "known_digest", "discard"])
def test_work_is_not_repeated_after_a_failure_to_publish(store: Path, monkeypatch, place: str):
    with monkeypatch.context() as patch:
        patch.setattr(store_module, place, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.fn(Count())
    assert artifacts("worker") == []
    made = worker.fn(Count())
    assert CALLS == ["worker"]
    assert {p.name for p in made.path.iterdir()} == {"stage.json", "stats.json", "result.txt"}


@pytest.mark.parametrize("harm", ["flipped", "truncated", "discarded", "lost while it is read"])
def test_a_stage_refuses_an_input_that_is_not_what_its_manifest_says(store: Path, harm: str):
    source = count.fn(Count())
    if harm == "flipped":
        (source.path / "numbers.txt").write_text("0\n1\n3")
    elif harm == "truncated":
        (source.path / "numbers.txt").write_text("0")
    elif harm == "discarded":
        refresh(source)
    else:
        CALLS.append("lose")
    file = "stage.json" if harm in ("discarded", "lost while it is read") else "numbers.txt"
    with pytest.raises(InputError, match=rf"{source.name}.*{file}|{file}.*{source.name}"):
        reader.fn(Count(), source)
    assert artifacts("reader") == []


def test_a_file_is_hashed_once_a_process_and_again_when_it_has_changed(store: Path, monkeypatch):
    source, hashed = count.fn(Count()), []
    digest = store_module.digest
    monkeypatch.setattr(store_module, "digest", lambda path: hashed.append(path.name) or digest(path))
    monkeypatch.setattr(store_module, "SETTLED", 0)
    for _ in range(3):
        verify(source)
    assert sorted(hashed) == ["numbers.txt", "stats.json"]
    before = (source.path / "numbers.txt").stat()
    time.sleep(0.05)
    (source.path / "numbers.txt").write_text("0\n1\n3")
    os.utime(source.path / "numbers.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match=r"numbers\.txt"):
        verify(source)


@pytest.mark.parametrize("kill", [False, True])
def test_an_input_is_not_discarded_while_it_is_read_unless_its_reader_was_killed(store: Path, kill: bool):
    process = start_slow(store)
    wait_for(".partial/slow-*/1.txt", store)
    source = find("count", "latest")
    with ThreadPoolExecutor(1) as thread:
        discarded = thread.submit(refresh, source)
        if kill:
            process.kill()
        discarded.result(600)
    assert read_manifest(source) is None
    assert len(artifacts("slow")) == (not kill), "the reader had published"
    process.wait(600)


def test_an_artifact_can_be_taken_again_while_another_stage_reads_it(store: Path):
    source = count.fn(Count())
    with locked(source, shared=True), ThreadPoolExecutor(1) as thread:
        assert thread.submit(count.fn, Count()).result(600) == source
        assert thread.submit(reader.fn, Count(), source).result(600).stats == {"numbers": 3}


def test_work_that_a_killed_run_left_in_a_published_artifact_is_deleted_at_the_next_look(store: Path):
    made = worker.fn(Count())
    for look in (lambda: worker.fn(Count()), lambda: follower.fn(Count(), made, [])):
        (made.path / WORK).mkdir()
        (made.path / WORK / "done").write_text("yes")
        look()
        assert not (made.path / WORK).exists()
    assert CALLS == ["worker", "follower"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_an_error_of_the_disk_is_an_input_error_whichever_library_wrote(store: Path, monkeypatch, number, kind):
    def fail(*_: object) -> None:
        raise OSError(number, "words") if kind is OSError else RuntimeError(f"Error while writing (os error {number})")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(InputError, match=rf"count .*{os.strerror(number)}.*{store}"):
        count.fn(Count())


def test_a_store_that_cannot_be_written_is_an_input_error(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("no directory")
    monkeypatch.setattr(store_module, "ROOT", tmp_path / "file")
    for act in (lambda: count.fn(Count()), lambda: refresh(Artifact(stage="count", key="0" * 12))):
        with pytest.raises(InputError, match=r"Not a directory.*CRAM_ARTIFACTS"):
            act()


def test_no_peak_memory_of_another_stage_is_reported(store: Path):
    hoard = bytearray(400_000_000)
    hoard[::4096] = b"x" * len(hoard[::4096])
    del hoard
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    assert count.fn(Count()).manifest["peak_memory_mib"]["process"] < resident + 200


def test_runs_of_a_stage_that_end_together_are_all_published(store: Path):
    for turn in range(15):  # the fault was there in one of ten
        asked = [Count(upto=10 * turn + number) for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            made = list(threads.map(together.fn, asked))
        assert all(read_manifest(artifact) for artifact in made)
        assert (store / "together" / "latest").resolve().name in {artifact.key for artifact in made}
