"""The store: keys, publication, locks, drafts, hits."""

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from chain import forked
from prefect.states import Failed
from test_workers import wait_for

from model.errors import InputError, Unreachable
from tasks.corpus.parts import link
from tasks.download import download
from tasks.stage import Params, has_lost_connection, stage
from tasks.store import home, manifests
from tasks.store.artifacts import WORK, Artifact, artifacts_of, draft_of, find, inspect_all, read_manifest
from tasks.store.errors import disk_errors_as_input_errors, written_in
from tasks.store.gc import collect, in_use, keep_while_running, pin
from tasks.store.locks import drafts, lock_for_reading
from tasks.store.manifests import verify
from tasks.store.publish import refresh

NONE_USABLE = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/full', '/tmp']")
CALLS: list[str] = []  # what the stages of this process did, and what they are asked to do


class Count(Params):
    """How far to count."""

    upto: int = 3


@stage(version=1)
def count(params: Count, out: Path) -> dict:
    """Write the numbers, in a file that nobody else may read, as some libraries do; fail if CALLS says so."""
    CALLS.append("count")
    if "fail" in CALLS:
        (out / "litter.txt").write_text("x")
        raise InputError("nothing to count")
    (out / "numbers.txt").write_text("\n".join(map(str, range(params.upto))))
    (out / "numbers.txt").chmod(0o600)
    return {"numbers": params.upto}


def write(params: Count, out: Path) -> dict:
    """Write another result if CALLS says so, and another description in every run."""
    (out / "numbers.txt").write_text("other" if "other" in CALLS else "same")
    (out / "README.md").write_text(str(time.time_ns()))
    return {"when": time.time_ns()}


wayward = stage(version=1, varies=True, name="wayward")(write)
steady = stage(version=1, name="steady")(write)


@stage(version=1, resumes=True)
def slow(params: Count, source: Artifact, out: Path) -> dict:
    """Keep every number in its work; wait in the middle as long as there is a file `.hold` in the store."""
    (out / WORK).mkdir(exist_ok=True)
    for number in range(params.upto):
        if not (out / WORK / f"{number}.txt").exists():
            CALLS.append("slow")
            (out / WORK / f"{number}.txt").write_text(str(number))
        if number == params.upto // 2:
            wait_for(lambda: not (home.root() / ".hold").exists())
    (out / "result.txt").write_text("result")
    return {"numbers": len(list((out / WORK).iterdir()))}


@stage(version=1)
def follower(params: Count, first: Artifact, others: list[Artifact], out: Path) -> dict:
    """Read what another made."""
    CALLS.append("follower")
    return json.loads((first.path / "stats.json").read_text())


@stage(version=1, resumes=True)
def halves(params: Count, source: Artifact, out: Path) -> dict:
    """Copy what another made twice, in two steps that are not repeated; fail in between if CALLS says so."""
    (out / WORK).mkdir(exist_ok=True)
    copies = []
    for name in ("first", "second"):
        copy = out / WORK / name
        if not copy.exists():
            CALLS.append(name)
            copy.write_text((source.path / "numbers.txt").read_text())
        if "fail" in CALLS:
            raise InputError("it ends here")
        copies.append(copy.read_text())
    (out / "copies.json").write_text(json.dumps(copies))
    return {}


@stage(version=1)
def summary(params: Count, page: Artifact, out: Path) -> dict:
    """Read what was made from what another made."""
    CALLS.append("summary")
    (out / "numbers.txt").write_text((page.path / "copies.json").read_text())
    return {}


meeting = threading.Barrier(4)


@stage(version=1)
def together(params: Count, out: Path) -> dict:
    """Several threads end this at the same moment."""
    meeting.wait(timeout=600)
    return {}


@pytest.fixture(autouse=True)
def _no_calls():
    CALLS.clear()


def run_slow() -> None:
    slow.fn(Count(upto=10), count.fn(Count()))


def start_slow(store: Path) -> BaseProcess:
    """A process that waits in the middle of the stage `slow`."""
    store.mkdir()
    (store / ".hold").touch()
    process = forked(run_slow)
    wait_for(lambda: list(store.glob(f".partial/slow-*/{WORK}/5.txt")))
    return process


def change_manifest(made: Artifact, change: Callable[[dict], object]) -> None:
    about = made.manifest
    change(about)
    (made.path / "stage.json").write_text(json.dumps(about))


def test_a_call_publishes_files_and_a_manifest_without_absolute_paths_and_a_second_one_finds_them(store: Path):
    first = count.fn(Count())
    second = count.fn(Count())
    assert first == second
    assert CALLS == ["count"]
    assert (first.path / "numbers.txt").read_text() == "0\n1\n2"
    assert first.stats == {"numbers": 3} == json.loads((first.path / "stats.json").read_text())
    assert {f["path"] for f in first.manifest["files"]} == {"numbers.txt", "stats.json"}
    names = {"stage", "version", "key", "params", "inputs", "seconds", "peak_memory_mib", "started", "finished"}
    assert names < set(first.manifest)
    assert {"python", "packages", "machine", "commit"} <= set(first.manifest["environment"])
    text = (first.path / "stage.json").read_text()
    assert not [folder for folder in (store, Path.cwd()) if str(folder) in text]
    [mode] = {path.stat().st_mode & 0o777 for path in first.path.iterdir()}
    assert mode != 0o600, "all files may be read by those who may read the manifest"


def key_of(name: str, version: int, params: Count, source: Artifact | list[Artifact]) -> str:
    """The key of what a stage of this name and version makes."""

    def read(params: Count, source: Artifact, out: Path) -> dict: ...

    return stage(version, name=name)(read).target(params, source).key


def test_the_key_follows_stage_version_params_and_inputs():
    a = Artifact(stage="count", key="a" * 12)
    b = Artifact(stage="count", key="b" * 12)
    different = [
        ("x", 1, Count(), a),
        ("y", 1, Count(), a),
        ("x", 2, Count(), a),
        ("x", 1, Count(upto=4), a),
        ("x", 1, Count(), b),
        ("x", 1, Count(), [a, b]),
        ("x", 1, Count(), [b, a]),
    ]
    keys = [key_of(*arguments) for arguments in different]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of("x", 1, Count(upto=3), a)


DEVICE = {"path": "/dev/zero", "bytes": 0, "sha256": ""}  # which must not be read, since it never ends
HARMS = {  # what is done to an artifact, and which file an error then names
    "a file is deleted": (lambda made: (made.path / "numbers.txt").unlink(), "numbers.txt"),
    "a file is truncated": (lambda made: (made.path / "numbers.txt").write_text("0"), "numbers.txt"),
    "a byte is flipped": (lambda made: (made.path / "numbers.txt").write_text("0\n1\n3"), "numbers.txt"),
    "its manifest is junk": (lambda made: (made.path / "stage.json").write_text("{ junk"), "stage.json"),
    "its manifest is nested deeply": (lambda made: (made.path / "stage.json").write_text("[" * 100_000), "stage.json"),
    "its manifest lists a device": (
        lambda made: change_manifest(made, lambda about: about["files"].append(DEVICE)),
        "stage.json",
    ),
    "it is discarded": (refresh, "stage.json"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_artifact_is_refused_as_an_input_and_made_again_with_a_warning(store: Path, harm: str, caplog):
    made = count.fn(Count())
    damage, file = HARMS[harm]
    damage(made)
    with pytest.raises(InputError, match=rf"{made.name}.*{file}|{file}.*{made.name}"):
        follower.fn(Count(), made, [])
    assert artifacts_of("follower") == []
    if harm == "a byte is flipped":
        shutil.rmtree(made.path)  # as the error says: no size differs
    assert read_manifest(made) is None
    was_there = made.path.exists()
    caplog.clear()
    assert count.fn(Count()) == made
    assert [made.name in line and file in line for line in caplog.messages] == [True] * was_there
    assert CALLS.count("count") == 2
    assert (made.path / "numbers.txt").read_text() == "0\n1\n2"


def test_a_failed_stage_publishes_nothing_and_its_litter_is_not_published_later(store: Path):
    CALLS.append("fail")
    with pytest.raises(InputError, match="nothing to count"):
        count.fn(Count())
    assert not (store / "count").exists()
    CALLS.clear()
    assert {f["path"] for f in count.fn(Count()).manifest["files"]} == {"numbers.txt", "stats.json"}


def test_latest_points_to_the_newest_and_the_tree_can_be_moved(store: Path, tmp_path: Path, monkeypatch):
    count.fn(Count())
    newest = count.fn(Count(upto=5))
    assert os.readlink(store / "count" / "latest") == newest.key
    shutil.move(store, tmp_path / "elsewhere")
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / "elsewhere"))
    assert find("count", "latest") == newest
    left = count.fn(Count())
    assert CALLS == ["count", "count"]
    refresh(newest)
    assert find("count", "latest") == left
    assert (left.path.parent / "latest").resolve() == left.path
    refresh(left)
    assert not (left.path.parent / "latest").exists()


def test_a_directory_latest_of_a_copied_store_is_no_artifact_and_stays(store: Path, tmp_path: Path, monkeypatch):
    made = count.fn(Count())
    shutil.copytree(store, tmp_path / "copy")  # which follows links
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / "copy"))
    assert list(inspect_all("count")) == [made]
    newest = count.fn(Count(upto=5))
    assert find("count", "latest") == newest
    assert (newest.path.parent / "latest" / "numbers.txt").read_text() == "0\n1\n2"
    assert not list(newest.path.parent.glob(".latest*"))


def test_an_artifact_is_found_by_the_beginning_of_its_key(store: Path):
    for name in ("latest", "0123"):
        with pytest.raises(InputError, match=r"`cram run RECIPE --until count`"):
            find("count", name)
    made = count.fn(Count())
    assert find("count", made.key[:5]) == made
    (store / "count" / "latest").unlink()  # as in a store to which artifacts were copied
    assert find("count", "latest") == made
    for name in ("", "zzz"):
        with pytest.raises(InputError, match=made.key):
            find("count", name)


@pytest.mark.parametrize(("maker", "place", "again"), [(wayward, 0, True), (wayward, 1, True), (steady, 0, False)])
def test_a_stage_runs_again_exactly_when_an_input_that_varies_has_other_contents(store, maker, place, again):
    inputs = [maker.fn(Count(upto=number)) for number in range(2)]
    given = Count(), inputs[0], inputs[1:]
    follower.fn(*given)
    shutil.rmtree(inputs[place].path)
    assert follower.is_made(*given) != again, "the contents of its input are unknown"
    maker.fn(Count(upto=place))
    assert follower.is_made(*given), "the same result, though another description"
    CALLS.append("other")
    refresh(inputs[place])
    maker.fn(Count(upto=place))
    assert find("follower", "latest") == follower.fn(*given) == follower.fn(*given)
    assert CALLS.count("follower") == 1 + again


@pytest.mark.parametrize(("maker", "repeated"), [(wayward, True), (steady, False)])
def test_a_draft_is_continued_unless_an_input_that_varies_has_other_contents(store: Path, maker, repeated: bool):
    given = Count(), maker.fn(Count())
    CALLS.append("fail")
    for _ in range(2):
        with pytest.raises(InputError, match="it ends here"):
            halves.fn(*given)
    assert CALLS == ["fail", "first"]
    CALLS[:] = ["other"]
    refresh(given[1])
    maker.fn(Count())
    made = halves.fn(*given)
    assert CALLS.count("first") == repeated
    assert made.manifest.get("resumed", False) is not repeated
    first, second = json.loads((made.path / "copies.json").read_text())
    assert second == "other"
    assert (first == second) is repeated
    assert {path.name for path in made.path.iterdir()} == {"copies.json", "stats.json", "stage.json"}


def test_what_was_made_from_what_varies_is_an_input_with_contents_too(store: Path):
    page = halves.fn(Count(), wayward.fn(Count()))
    made = summary.fn(Count(), page)
    CALLS[:] = ["other"]
    refresh(find("wayward"))
    assert halves.fn(Count(), wayward.fn(Count())) == page
    assert summary.fn(Count(), page) == summary.fn(Count(), page) == made
    assert CALLS == ["other", "first", "second", "summary"]
    assert json.loads((made.path / "numbers.txt").read_text()) == ["other", "other"]


def test_a_killed_stage_publishes_nothing_frees_its_locks_and_is_resumed(store: Path, caplog):
    caplog.set_level("INFO", "tasks.store")
    process = start_slow(store)
    source = find("count", "latest")
    with ThreadPoolExecutor(1) as thread:
        discarded = thread.submit(refresh, source)
        wait_for(lambda: f"using {source.name}; waiting" in caplog.text)
        assert read_manifest(source), "it is not discarded while it is read"
        process.kill()
        discarded.result(600)
    assert read_manifest(source) is None
    assert not (store / "slow").exists()
    (store / ".hold").unlink()
    run_slow()
    assert CALLS == ["count", "slow", "slow", "slow", "slow"]
    assert find("slow", "latest").stats == {"numbers": 10}
    assert find("slow", "latest").manifest["resumed"]
    assert not list(store.glob(".partial/slow-*"))


def test_two_runs_on_one_key_make_it_once_and_what_they_read_is_discarded_after_both(store: Path, caplog):
    caplog.set_level("INFO", "tasks.store")
    process = start_slow(store)
    source = find("count", "latest")
    with ThreadPoolExecutor(2) as threads:
        second = threads.submit(run_slow)
        wait_for(lambda: "using slow/" in caplog.text)
        discarded = threads.submit(refresh, source)
        wait_for(lambda: f"using {source.name}; waiting" in caplog.text)
        (store / ".hold").unlink()
        discarded.result(600)
        assert len(artifacts_of("slow")) == 1
        second.result(600)
    process.join(600)
    assert process.exitcode == 0
    assert CALLS == []
    assert read_manifest(source) is None
    assert not [path for path in (store / ".partial").iterdir() if path.is_dir()]


@pytest.mark.parametrize("place", ["fsync", "discard"])
def test_a_manifest_is_written_last_and_work_is_not_repeated_after_a_failure_to_publish(store, monkeypatch, place: str):
    given = Count(), count.fn(Count())
    with monkeypatch.context() as patch:
        patch.setattr(f"tasks.store.publish.{place}", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            slow.fn(*given)
    draft = draft_of(slow.target(*given))
    assert (draft / "result.txt").exists()
    assert (draft / "stage.json").exists() == (place == "discard")
    assert artifacts_of("slow") == []
    made = slow.fn(*given)
    assert CALLS == ["count", "slow", "slow", "slow"]
    assert {p.name for p in made.path.iterdir()} == {"stage.json", "stats.json", "result.txt"}


def test_a_file_is_hashed_once_a_process_and_again_when_it_has_changed(store: Path, monkeypatch):
    source = count.fn(Count())
    hashed = []
    digest = manifests.digest
    monkeypatch.setattr(manifests, "digest", lambda path: hashed.append(path.name) or digest(path))
    monkeypatch.setattr(manifests, "SETTLED", 0)
    for _ in range(3):
        verify(source)
    assert sorted(hashed) == ["numbers.txt", "stats.json"]
    before = (source.path / "numbers.txt").stat()
    time.sleep(0.05)
    (source.path / "numbers.txt").write_text("0\n1\n3")
    os.utime(source.path / "numbers.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(InputError, match=r"numbers\.txt"):
        verify(source)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.EIO, OSError(errno.EIO, "words")),
        (errno.ENOSPC, RuntimeError(f"Error while writing (os error {errno.ENOSPC})")),
        (errno.ENOSPC, OSError("100 requested and 20 written")),
    ],
    ids=["Python", "a library in Rust", "NumPy"],
)
def test_an_error_of_the_disk_is_an_input_error_whichever_library_wrote(store: Path, monkeypatch, number, error):
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=error))
    with pytest.raises(InputError, match=rf"count .*{os.strerror(number)}.*{store}"):
        count.fn(Count())


def test_on_a_full_file_system_the_error_names_that_one_and_what_moves_its_files(store: Path, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    elsewhere = tmp_path / "elsewhere" / "a.bin"
    room = {"/": 1 << 30, str(store): 1 << 30, str(scratch): 0, str(elsewhere.parent): 0}
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in room)
    about = {"f_frsize": 1, "f_files": 0, "f_favail": 0}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=room[path], **about))

    def said(number: int, *names: object) -> str:
        with pytest.raises(InputError) as raised, disk_errors_as_input_errors("count"):
            raise OSError(number, os.strerror(number), *names)
        return str(raised.value)

    def named(number: int) -> list[bool]:
        full = said(number)
        return [words in full for words in (str(scratch), "TMPDIR", str(store), "CRAM_ARTIFACTS")]

    assert named(errno.ENOSPC) == [True, True, False, False]
    with pytest.raises(OSError, match="No space") as raised, written_in(str(scratch)):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(scratch)
    assert f"{scratch}/a" in said(errno.ENOSPC, f"{scratch}/a")
    assert "or set" not in said(errno.EDQUOT, elsewhere), "no variable moves these files"
    assert f"on the file system at {elsewhere.parent}" in said(errno.EDQUOT, elsewhere)
    assert "CRAM_ARTIFACTS" in said(errno.EDQUOT, elsewhere, None, store / "count" / "a"), "the target of a copy"
    assert "CRAM_ARTIFACTS" in said(errno.EIO)
    room |= {str(store): 0, str(scratch): 1 << 30}
    assert named(errno.EDQUOT) == [False, False, True, True]
    room[str(store)] = 1 << 30  # what filled it was deleted meanwhile
    assert named(errno.ENOSPC) == [True] * 4


def test_without_any_directory_for_temporary_files_the_error_lists_those_tried(store: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", Mock(side_effect=NONE_USABLE))
    with pytest.raises(InputError, match=r"/full or /tmp\..*TMPDIR"), disk_errors_as_input_errors("count"):
        tempfile.gettempdir()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EROFS])
def test_without_symbolic_links_stages_run_and_one_warning_says_what_to_use_instead(store, monkeypatch, caplog, number):
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=OSError(number, os.strerror(number))))
    older = count.fn(Count(upto=2))
    made = count.fn(Count())
    held = follower.fn(Count(), made, [older])
    assert {path.name for path in made.path.parent.iterdir()} == {made.key, older.key}
    assert (find("count"), find("follower")) == (made, held)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert os.strerror(number) in warning
    assert str(store) in warning
    refresh(made)
    assert find("count") == older


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_without_file_locks_nothing_runs_but_what_only_reads_works(store: Path, monkeypatch, number: int):
    made = count.fn(Count(upto=2))
    CALLS.clear()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
    for work in (lambda: count.fn(Count()), lambda: refresh(made), lambda: pin(made), lambda: collect(1, False, False)):
        with pytest.raises(InputError, match=f"{store} .*locks .*CRAM_ARTIFACTS"):
            work()
    assert CALLS == []
    with keep_while_running([made]), lock_for_reading(made):
        assert count.fn(Count(upto=2)) == find("count") == made
    assert drafts("") == []
    assert in_use() == set()


def test_locks_are_of_files_open_for_reading_and_writing_as_nfs_needs(store: Path, monkeypatch):
    modes = []
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda file, kind: (modes.append(file.mode), flock(file, kind)))
    count.fn(Count())
    follower.fn(Count(), count.fn(Count()), [])
    assert set(modes) == {"rb+"}


def test_a_file_system_that_sets_no_modes_and_forces_no_directory_to_disk_will_do(store: Path, monkeypatch):
    forced = []

    def fsync(handle: int) -> None:
        forced.append(os.readlink(f"/proc/self/fd/{handle}"))
        if os.path.isdir(forced[-1]):
            raise OSError(errno.EINVAL, "Invalid argument")

    def chmod(path: Path, mode: int, **how: bool) -> None:
        if mode != 0o600:  # which the stage sets
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        set_mode(path, mode, **how)

    set_mode = os.chmod
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "chmod", chmod)
    monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    made = count.fn(Count())
    assert (made.path / "numbers.txt").stat().st_mode & 0o777 == 0o600
    assert str(made.path.parent) in forced
    link(made.path / "numbers.txt", store / "copy")
    assert (store / "copy").read_text(encoding="utf-8") == "0\n1\n2"


def test_a_file_that_cannot_be_forced_to_disk_is_named(store: Path, monkeypatch):
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(InputError, match=r"Input/output error: \S*/numbers\.txt"):
        count.fn(Count())


def test_a_store_that_cannot_be_written_is_an_input_error(store: Path):
    store.write_text("no directory", encoding="utf-8")
    for act in (lambda: count.fn(Count()), lambda: refresh(Artifact(stage="count", key="0" * 12))):
        with pytest.raises(InputError, match=r"Not a directory.*CRAM_ARTIFACTS"):
            act()


def test_no_peak_memory_of_another_stage_is_reported(store: Path):
    hoard = bytearray(300_000_000)
    hoard[::4096] = b"x" * len(hoard[::4096])
    del hoard
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024
    assert count.fn(Count()).manifest["peak_memory_mib"]["process"] < resident + 200


def test_runs_of_a_stage_that_end_together_are_all_published(store: Path):
    for turn in range(15):  # the fault was there in one of ten
        asked = [Count(upto=10 * turn + number) for number in range(4)]
        with ThreadPoolExecutor(4) as threads:
            made = list(threads.map(together.fn, asked))
        assert all(read_manifest(artifact) for artifact in made)
        assert (store / "together" / "latest").resolve().name in {artifact.key for artifact in made}


@pytest.mark.parametrize(
    ("error", "again"), [(ConnectionResetError(), True), (Unreachable("the hub"), True), (InputError("a typo"), False)]
)
def test_prefect_tries_a_stage_again_only_after_a_lost_connection(error: Exception, again: bool):
    assert has_lost_connection(count, None, Failed(data=error)) == again
    assert (download.retries > 0, count.retries) == (True, 0)
