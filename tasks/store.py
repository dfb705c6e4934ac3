"""The artifact store: artifacts/<stage>/<key>/, complete directories that some stage wrote and nobody changes again.

The directory is the only record of a result: Prefect keeps none of its own, so nothing in a copied artifact is ever
executed, and deleting the directory makes the stage run again.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

from pydantic import BaseModel

from model import InputError
from tasks.home import HOME

# files that several stages read: the tokens, and the manifests of all that led to a model
SEQUENCES, HELDOUT, HELDOUT_TEXT = "sequences.npy", "heldout.npy", "heldout.parquet"
HELDOUT_DOCUMENTS = "heldout_documents.npy"
LINEAGE = "lineage.json"
ROOT = Path(os.environ.get("CRAM_ARTIFACTS") or HOME / "artifacts").expanduser().resolve()  # bound at import
MANIFEST, STATS = "stage.json", "stats.json"
# suffixes of files that describe the run, such as its date or speed, and not the result
TELLING = (".md", ".html", ".svg", ".png", STATS, LINEAGE, "metrics.parquet")
WORK = "work"  # in a draft: what a rerun goes on from; not published, and deleted when all else is
MACHINE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOLCK,
)  # fmt: skip
RESUMING: set[str] = set()  # names of the stages that go on from a draft
SETTLED = 2_000_000_000  # ns; a file that changed less long ago may change again without a new time stamp
known_digests: dict[tuple[int, int, int, int], str] = {}  # of unchanged files, by device, inode, size and change time
hashing = threading.Lock()  # stages that run in several threads read a common input once
log = logging.getLogger(__name__)


class Artifact(BaseModel, frozen=True):
    """A directory that some stage wrote: complete, and never changed again."""

    stage: str
    key: str

    @property
    def path(self) -> Path:
        """Where its files are."""
        return ROOT / self.stage / self.key

    @property
    def name(self) -> str:
        """Its stage and key, as in `filter/0123456789ab`."""
        return f"{self.stage}/{self.key}"

    @property
    def manifest(self) -> dict:
        """What stage.json says of it."""
        found = read_manifest(self)
        if found is None:
            raise InputError(
                f"No complete artifact {self.name} in {ROOT}: {damage(self)}. Run the stage again, or copy the whole directory "
                "here."
            )
        return found

    @property
    def stats(self) -> dict:
        """What the stage counted."""
        return self.manifest["stats"]


def read_manifest(artifact: Artifact) -> dict | None:
    """The manifest of a finished artifact, or None when it is absent or its files do not have their sizes."""
    try:
        found = json.loads((artifact.path / MANIFEST).read_text())
        there = {file["path"]: (artifact.path / file["path"]).stat() for file in found["files"]}
        whole = all(
            S_ISREG(there[f["path"]].st_mode) and there[f["path"]].st_size == f["bytes"] for f in found["files"]
        )
        return found if whole and isinstance(found["stats"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def damage(artifact: Artifact) -> str:
    """For an error: why `read_manifest` returns None."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        for file in json.loads((artifact.path / MANIFEST).read_text())["files"]:
            path = artifact.path / file["path"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                return (
                    f"{file['path']} is missing, or its size is not the {file['bytes']:,} bytes that {MANIFEST} gives"
                )
    return f"its {MANIFEST} is missing or can't be read"


def contents(inputs: dict) -> dict[str, str]:
    """Digests of what a stage's input artifacts hold, by name: of those that may hold other things when they are made again."""
    found = {}
    for given in inputs.values():
        for artifact in given if isinstance(given, list) else [given]:
            about = read_manifest(artifact) or {}
            if about.get("varies"):
                held = sorted((f["path"], f["sha256"]) for f in about["files"] if not f["path"].endswith(TELLING))
                found[artifact.name] = hashlib.sha256(json.dumps(held).encode()).hexdigest()
    return found


def is_made(artifact: Artifact, inputs: dict) -> bool:
    """Whether it is complete, and was made from these inputs as they are now."""
    found = read_manifest(artifact)
    if found is None or "made_from" not in found:  # earlier versions did not record it
        return found is not None
    return found["made_from"] == contents(inputs)


def artifacts(stage: str) -> list[Artifact]:
    """The complete artifacts of a stage, the newest last."""
    folders = [p for p in (ROOT / stage).glob("*") if p.is_dir() and not p.is_symlink()]
    found = [(read_manifest(a), a) for a in (Artifact(stage=stage, key=p.name) for p in folders)]
    complete = [(about.get("finished", ""), artifact.key, artifact) for about, artifact in found if about]
    return [artifact for _, _, artifact in sorted(complete, key=lambda entry: entry[:2])]


def find(stage: str, name: str) -> Artifact:
    """The artifact that `name` means: `latest`, a key, or the beginning of one."""
    found = artifacts(stage)
    if not found:
        raise InputError(
            f"There are no artifacts of {stage} in {ROOT} yet. Make one with `cram run RECIPE --until {stage}`, copy one "
            f"there, or set CRAM_ARTIFACTS to where there are some.{elsewhere(stage, name)}"
        )
    if name == "latest":  # by their manifests: a link is missing where a directory was copied
        return found[-1]
    matches = [a for a in found if name and a.key.startswith(name)]
    if len(matches) != 1:
        keys = ", ".join(a.key for a in found[-8:])
        problem = (
            f"{len(matches)} artifacts of {stage} begin with" if matches else f"No complete artifact of {stage} is"
        )
        other = "" if matches else elsewhere(stage, name)
        raise InputError(f"{problem} {name!r}. Those in {ROOT}: {keys}. Give one of these keys, or `latest`.{other}")
    return matches[0]


def elsewhere(stage: str, key: str, of: str = "") -> str:
    """A sentence, after a space, for a key of a draft or of another stage (`of`: look in this one alone); empty for others."""
    if not key:
        return ""
    if draft := next((draft for draft in drafts(of or stage) if draft.artifact.key.startswith(key)), None):
        return f" {draft.describe()}"
    folders = [folder for folder in sorted(ROOT.glob("[!.]*")) if folder.is_dir() and of in ("", folder.name)]
    others = (a for folder in folders if folder.name != stage for a in artifacts(folder.name))
    found = next((a for a in others if a.key.startswith(key)), None)
    return f" {found.name} is of the stage {found.stage}." if found else ""


def lock_of(artifact: Artifact) -> Path:
    """The file whose lock a process holds while it makes the artifact."""
    return ROOT / ".locks" / f"{artifact.stage}-{artifact.key}"


@contextmanager
def locked(artifact: Artifact, shared: bool = False) -> Iterator[None]:
    """Be the only writer of this artifact, or one of its readers (`shared`); the kernel frees the lock of a killed process."""
    path = lock_of(artifact)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with path.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Another run is using %s; waiting until it has finished.", artifact.name)
            fcntl.flock(file, kind)
        yield


@contextmanager
def held(inputs: dict) -> Iterator[None]:
    """Keep a stage's inputs from being discarded while it reads them, and check them first.

    Raises InputError for an input that is absent, or has a file that its manifest does not describe.
    A process locks inputs before outputs and waits for nothing once it has its output's lock, so two can't wait for each other.
    """
    given = [a for each in inputs.values() for a in (each if isinstance(each, list) else [each])]
    with ExitStack() as stack:
        for artifact in dict.fromkeys(given):
            stack.enter_context(locked(artifact, shared=True))
        for artifact in dict.fromkeys(given):
            verify(artifact)
            tidy(artifact)
        try:
            yield
        except Exception:
            for artifact in dict.fromkeys(given):  # a user may have deleted or changed one: say so instead
                verify(artifact)
            raise


def draft_of(artifact: Artifact) -> Path:
    """Where the artifact is made: a stable name, so that a rerun finds what a crash left."""
    return ROOT / ".partial" / f"{artifact.stage}-{artifact.key}"


class Draft(NamedTuple):
    """Unfinished work of a stage, under way or left by a run that ended."""

    artifact: Artifact  # what it would become; without a stage if the directory is no stage's
    bytes: int
    written: str  # when last, an ISO date
    running: bool  # a process is working on it

    @property
    def fate(self) -> str:
        """What a rerun of the same command does with it."""
        if self.running:
            return "in progress"
        if not self.artifact.stage:
            return "being deleted, or left by a killed run"
        return "a rerun resumes it" if self.artifact.stage in RESUMING else "a rerun starts over"

    def describe(self) -> str:
        """A sentence, for someone who looks for a finished artifact."""
        return (
            f"{self.artifact.name} is an unfinished draft ({self.fate}); `cram ls {self.artifact.stage}` lists drafts."
        )


def drafts(stage: str = "") -> list[Draft]:
    """The drafts in the store, of one stage or of all, the last written last."""
    found = []
    for folder in (ROOT / ".partial").glob("*"):
        name, _, key = folder.name.rpartition("-")
        if stage not in ("", name):
            continue
        artifact, total, written = Artifact(stage=name, key=key), 0, 0.0
        for where, _, files in os.walk(folder):
            for path in (where, *(os.path.join(where, file) for file in files)):
                with suppress(OSError):  # a running stage deletes and publishes meanwhile
                    about = os.lstat(path)
                    total, written = total + about.st_size * S_ISREG(about.st_mode), max(written, about.st_mtime)
        if written:
            when = datetime.fromtimestamp(written, UTC).isoformat()
            found.append(Draft(artifact, total, when, is_locked(artifact)))
    return sorted(found, key=lambda draft: (draft.written, draft.artifact.key))


def is_locked(artifact: Artifact) -> bool:
    """Whether a process is making this artifact."""
    try:
        with lock_of(artifact).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such lock, or it can't be read
        return False
    return False


def discard(artifact: Artifact) -> None:
    """Take an artifact out of the store in one step, then delete it."""
    (ROOT / ".partial").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".partial") as trash, suppress(FileNotFoundError):
        artifact.path.rename(Path(trash, "old"))
        if not (artifact.path.parent / "latest").exists() and (left := artifacts(artifact.stage)):
            point_latest(left[-1])


def point_latest(artifact: Artifact) -> None:
    """Have the link `latest` of its stage lead to it."""
    link = artifact.path.parent / f".latest-{os.getpid()}-{threading.get_ident()}"
    link.unlink(missing_ok=True)
    link.symlink_to(artifact.key)
    link.replace(artifact.path.parent / "latest")


@contextmanager
def disk_errors_as_input_errors(what: str) -> Iterator[None]:
    """Raise InputError where the disk is full or access is denied."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not (problem := machine_problem(error)):
            raise
        paths = (getattr(error, name, None) for name in ("filename2", "filename"))  # the first is the target of a copy
        raise InputError(
            f"{what} can't continue: {problem}: {next(filter(None, paths), ROOT)}. Free space or grant access there, or set "
            "CRAM_ARTIFACTS to another directory; then run again."
        ) from error


def machine_problem(error: Exception) -> str:
    """What the disk or the user's rights refused, in the system's words; empty for any other error."""
    number, said = getattr(error, "errno", None), str(error)
    if found := re.search(r"\(os error (\d+)\)", said):  # libraries in Rust: safetensors, tokenizers
        number = int(found[1])
    if re.fullmatch(r"\d+ requested and \d+ written", said):  # NumPy, which does not tell why
        number = errno.ENOSPC
    return os.strerror(number) if number in MACHINE_ERRORS else ""


def refresh(artifact: Artifact) -> None:
    """Forget the artifact and any half-made draft of it, so that its stage runs from the start."""
    with disk_errors_as_input_errors(artifact.stage), locked(artifact):
        discard(artifact)
        shutil.rmtree(draft_of(artifact), ignore_errors=True)


def fsync(path: Path) -> None:
    """Force a file or directory to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def verify(artifact: Artifact) -> None:
    """Raise InputError unless every file of the artifact has its recorded size and digest."""
    verify_files(artifact.path, artifact.manifest["files"], artifact.name)


def verify_files(folder: Path, files: list[dict], name: str) -> None:
    """Raise InputError unless the folder has these files of a manifest, unchanged. `name`: the folder's, for people."""
    for file in files:
        try:
            same = known_digest(folder / file["path"]) == file["sha256"]
        except FileNotFoundError:
            same = False
        if not same:
            raise InputError(
                f"{file['path']} of {name} was changed after it was written: its SHA-256 is not the one in {MANIFEST}. "
                f"Copy the artifact again, or delete {folder} and run its stage again."
            )


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_digest(path: Path) -> str:
    """The SHA-256 of a file, computed once in this process for as long as the file does not change."""
    with hashing:
        about = path.stat()
        identity = (about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns)
        if identity not in known_digests:
            settled = abs(time.time_ns() - about.st_ctime_ns) > SETTLED
            found = digest(path)
            if not settled:
                return found
            known_digests[identity] = found
        return known_digests[identity]


def publish(draft: Path, artifact: Artifact, about: dict) -> None:
    """Write the manifest last, force all to disk, rename the draft into place and point `latest` to it."""
    files = sorted(
        p for p in draft.rglob("*") if p.is_file() and p != draft / MANIFEST and draft / WORK not in p.parents
    )
    for path in files:
        fsync(path)
    about["files"] = [
        {"path": str(p.relative_to(draft)), "bytes": p.stat().st_size, "sha256": known_digest(p)} for p in files
    ]
    (draft / MANIFEST).write_text(json.dumps(about, indent=2) + "\n")
    mode = (draft / MANIFEST).stat().st_mode
    for path in files:
        if path.stat().st_mode != mode:  # some libraries let nobody else read what they write
            path.chmod(mode)
    fsync(draft / MANIFEST)
    fsync(draft)
    artifact.path.parent.mkdir(parents=True, exist_ok=True)
    discard(artifact)  # a damaged leftover, if there is one
    draft.rename(artifact.path)
    fsync(artifact.path.parent)
    point_latest(artifact)
    tidy(artifact)  # last: until here a killed stage goes on from its work


def tidy(artifact: Artifact) -> None:
    """Delete the working files that a run killed right after publication left in an artifact."""
    shutil.rmtree(artifact.path / WORK, ignore_errors=True)


def lineage(artifact: Artifact) -> dict[str, dict]:
    """The manifests of the artifact and of all its inputs, first to last; those not on this machine are left out."""
    found: dict[str, dict] = {}
    about = read_manifest(artifact)
    if about is None:
        log.warning("%s is not on this machine; the report will miss it.", artifact.name)
        return found
    for given in about["inputs"].values():
        for name in given if isinstance(given, list) else [given]:
            stage_name, key = name.split("/")
            found |= lineage(Artifact(stage=stage_name, key=key))
    return found | {artifact.name: {k: v for k, v in about.items() if k != "files"}}
