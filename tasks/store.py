"""The artifact store: artifacts/<stage>/<key>/, complete directories that a stage wrote and nobody changes again.

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

from model import InputError, fsync
from tasks.home import HOME

# files that several stages read: the tokens, and the manifests of all inputs of a model
SEQUENCES, HELDOUT_TEXT = "sequences.npy", "heldout.parquet"
FREQUENCIES, LINEAGE = "frequencies.npy", "lineage.json"
ROOT = Path(os.environ.get("CRAM_ARTIFACTS") or HOME / "artifacts").expanduser().resolve()  # bound at import
MANIFEST, STATS = "stage.json", "stats.json"
# suffixes of files that describe the run, such as its date or speed, and not the result
TELLING = (".md", ".html", ".svg", ".png", STATS, LINEAGE, "metrics.parquet")
LATEST = "latest"  # in a stage's directory: the link to its newest artifact
WORK = "work"  # in a draft: what a rerun resumes from; never published
MACHINE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.ENOLCK, errno.ENAMETOOLONG,
)  # fmt: skip
SETTLED = 2_000_000_000  # ns; a file that changed more recently can change again without a new time stamp
known_digests: dict[tuple[int, int, int, int], str] = {}  # of unchanged files, by device, inode, size and change time
hashing = threading.Lock()  # stages in several threads hash a common input once
log = logging.getLogger(__name__)


class Artifact(BaseModel, frozen=True):
    """A directory that a stage wrote: complete, and never changed again."""

    stage: str
    key: str

    @property
    def path(self) -> Path:
        """The directory."""
        return ROOT / self.stage / self.key

    @property
    def name(self) -> str:
        """Its stage and key, as in `filter/0123456789ab`."""
        return f"{self.stage}/{self.key}"

    @property
    def manifest(self) -> dict:
        """The contents of stage.json. Raises InputError if the artifact is absent or incomplete."""
        manifest, problem = inspect(self)
        if manifest is None:
            raise InputError(
                f"No complete artifact {self.name} in {ROOT}: {problem}. Run the stage again, or copy it here."
            )
        return manifest

    @property
    def stats(self) -> dict:
        """What the stage counted."""
        return self.manifest["stats"]


def named(name: str) -> Artifact:
    """The artifact of this name, which need not exist."""
    stage, _, key = name.partition("/")
    return Artifact(stage=stage, key=key)


def inspect(artifact: Artifact) -> tuple[dict | None, str]:
    """The manifest of a complete artifact and an empty string; or None and what is missing."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        manifest = json.loads((artifact.path / MANIFEST).read_text())
        for file in manifest["files"]:
            path = artifact.path / file["path"]
            if not path.is_file() or path.stat().st_size != file["bytes"]:
                return None, f"{file['path']} is missing, or its size is not the {file['bytes']:,} bytes in {MANIFEST}"
        if isinstance(manifest["stats"], dict):
            return manifest, ""
    return None, f"its {MANIFEST} is missing or can't be read"


def warn_of_damage(artifact: Artifact) -> None:
    """Log a warning if the artifact is there, but not complete."""
    manifest, problem = inspect(artifact)
    if manifest is None and artifact.path.exists():
        log.warning("%s is damaged, so its stage runs again: %s.", artifact.name, problem)


def read_manifest(artifact: Artifact) -> dict | None:
    """The manifest of a complete artifact; None if it is absent or a file does not have its recorded size."""
    return inspect(artifact)[0]


def flat(inputs: dict) -> list[Artifact]:
    """A stage's input artifacts, each once; an argument can be a list of them."""
    given = (each if isinstance(each, list) else [each] for each in inputs.values())
    return list(dict.fromkeys(artifact for some in given for artifact in some))


def contents(inputs: dict) -> dict[str, str]:
    """Digests of the contents of a stage's inputs, by name: only of those that can differ when they are made again."""
    digests = {}
    for artifact in flat(inputs):
        manifest = read_manifest(artifact) or {}
        if manifest.get("varies"):
            files = sorted((f["path"], f["sha256"]) for f in manifest["files"] if not f["path"].endswith(TELLING))
            digests[artifact.name] = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return digests


def is_made(artifact: Artifact, inputs: dict) -> bool:
    """Whether the artifact is complete and was made from the present contents of these inputs."""
    manifest, now = read_manifest(artifact), contents(inputs)
    return manifest is not None and manifest.get("made_from") == now


def artifacts(stage: str, damaged: bool = False) -> list[Artifact]:
    """The complete artifacts of a stage, the newest last; if `damaged`, first those that are not complete."""
    paths = [path for path in (ROOT / stage).glob("*") if path.is_dir() and not path.is_symlink()]
    folders = [path for path in paths if path.name != LATEST]  # a directory in a store that was copied by `cp -L`
    manifests = {artifact: read_manifest(artifact) for artifact in (Artifact(stage=stage, key=p.name) for p in folders)}
    chosen = [artifact for artifact, manifest in manifests.items() if manifest or damaged]
    return sorted(chosen, key=lambda artifact: (str((manifests[artifact] or {}).get("finished", "")), artifact.key))


def find(stage: str, name: str) -> Artifact:
    """The artifact named by `latest`, a key, or the beginning of one. Raises InputError if there is not exactly one."""
    complete = artifacts(stage)
    if not complete:
        raise InputError(
            f"There are no artifacts of {stage} in {ROOT} yet. Make one with `cram run RECIPE --until {stage}`, copy "
            "one there, or set CRAM_ARTIFACTS to a directory that has some."
        )
    if name == LATEST:  # from the manifests: the link may not have been copied with the directory
        return complete[-1]
    matches = [artifact for artifact in complete if name and artifact.key.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    keys = ", ".join(artifact.key for artifact in complete[-8:])
    problem = f"{len(matches)} artifacts of {stage} begin with" if matches else f"No complete artifact of {stage} is"
    raise InputError(f"{problem} {name!r}. Those in {ROOT}: {keys}. Give one of these keys, or `latest`.")


@contextmanager
def locked(artifact: Artifact, shared: bool = False) -> Iterator[None]:
    """Be the only writer of the artifact, or a reader (`shared`). The kernel frees the lock of a killed process."""
    path, kind = ROOT / ".locks" / draft_of(artifact).name, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("Another run is using %s; waiting until it has finished.", artifact.name)
            fcntl.flock(file, kind)
        yield


@contextmanager
def held(inputs: dict) -> Iterator[None]:
    """Verify a stage's inputs, and keep them from being discarded while it reads them.

    Raises InputError for an input that is absent, or has a file that differs from its manifest.
    A process locks inputs before outputs and waits for nothing once it has its output's lock, so there is no deadlock.
    """
    given = flat(inputs)
    with ExitStack() as stack:
        for artifact in given:
            stack.enter_context(locked(artifact, shared=True))
        for artifact in given:
            verify(artifact)
        yield


def draft_of(artifact: Artifact) -> Path:
    """The directory in which the artifact is made. Its name is stable, so that a rerun finds what a crash left."""
    return ROOT / ".partial" / f"{artifact.stage}-{artifact.key}"


class Draft(NamedTuple):
    """Unfinished work of a stage: in progress, or left by a run that ended."""

    name: str  # of its directory
    bytes: int
    written: str  # ISO date of the last change
    running: bool  # a process is working on it


def drafts(stage: str) -> list[Draft]:
    """The drafts in the store, of one stage or of all (empty), the most recently written last."""
    left = []
    for folder in (ROOT / ".partial").glob(f"{stage}*"):
        size, written = 0, 0.0
        # unlike rglob, os.walk allows for a stage that deletes and publishes meanwhile
        for where, _, files in os.walk(folder):
            for path in (where, *(os.path.join(where, file) for file in files)):
                with suppress(OSError):
                    about = os.lstat(path)
                    size, written = size + about.st_size * S_ISREG(about.st_mode), max(written, about.st_mtime)
        if written:
            when = datetime.fromtimestamp(written, UTC).isoformat()
            left.append(Draft(folder.name, size, when, is_locked(ROOT / ".locks" / folder.name)))
    return sorted(left, key=lambda draft: (draft.written, draft.name))


def is_locked(lock: Path) -> bool:
    """Whether a process holds this lock as the only one."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # by any other error there is no such lock, or it can't be read
        return isinstance(error, BlockingIOError)
    return False


def discard(artifact: Artifact) -> None:
    """Take an artifact out of the store in one step, then delete it."""
    (ROOT / ".partial").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".partial") as trash, suppress(FileNotFoundError):
        artifact.path.rename(Path(trash, "old"))
        if not (artifact.path.parent / LATEST).exists() and (left := artifacts(artifact.stage)):
            point_latest(left[-1])


def point_latest(artifact: Artifact) -> None:
    """Point the link `latest` of its stage to the artifact."""
    latest = artifact.path.parent / LATEST
    if latest.is_dir() and not latest.is_symlink():  # in a store that was copied by `cp -L`
        return
    link = artifact.path.parent / f".latest-{os.getpid()}-{threading.get_ident()}"
    link.unlink(missing_ok=True)
    link.symlink_to(artifact.key)
    link.replace(latest)


@contextmanager
def disk_errors_as_input_errors(stage: str) -> Iterator[None]:
    """Raise InputError if the disk is full or access is denied."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not (problem := machine_problem(error)):
            raise
        paths = (getattr(error, name, None) for name in ("filename2", "filename"))  # the first is the target of a copy
        raise InputError(
            f"{stage} can't continue: {problem}: {next(filter(None, paths), ROOT)}. Free space or grant access there, "
            "or set CRAM_ARTIFACTS to another directory; then run again."
        ) from error


def machine_problem(error: Exception) -> str:
    """The system's words for an error of the disk or of access rights; empty for any other error."""
    number, text = getattr(error, "errno", None), str(error)
    if match := re.search(r"\(os error (\d+)\)", text):  # libraries in Rust: safetensors, tokenizers
        number = int(match[1])
    if re.fullmatch(r"\d+ requested and \d+ written", text):  # NumPy, which gives no reason
        number = errno.ENOSPC
    return os.strerror(number) if number in MACHINE_ERRORS else ""


def refresh(artifact: Artifact) -> None:
    """Discard the artifact and its draft, so that its stage runs from the start."""
    with disk_errors_as_input_errors(artifact.stage), locked(artifact):
        discard(artifact)
        shutil.rmtree(draft_of(artifact), ignore_errors=True)


def verify(artifact: Artifact) -> None:
    """Raise InputError unless every file of the artifact has its recorded size and digest."""
    verify_files(artifact.path, artifact.manifest["files"], artifact.name)


def verify_files(folder: Path, files: list[dict], name: str) -> None:
    """Raise InputError unless the folder has these files of a manifest, unchanged. `name`: used in the error."""
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
    """The SHA-256 of a file, computed once in this process as long as the file does not change."""
    with hashing:
        about = path.stat()
        identity = (about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns)
        if identity in known_digests:
            return known_digests[identity]
        settled, sha256 = abs(time.time_ns() - about.st_ctime_ns) > SETTLED, digest(path)
        if settled:
            known_digests[identity] = sha256
        return sha256


def publish(draft: Path, artifact: Artifact, about: dict) -> None:
    """Write the manifest last, force all files to disk, rename the draft into place and point `latest` to it."""
    manifest = draft / MANIFEST
    files = sorted(p for p in draft.rglob("*") if p.is_file() and p != manifest and draft / WORK not in p.parents)
    for path in files:
        fsync(path)
    about["files"] = [
        {"path": str(p.relative_to(draft)), "bytes": p.stat().st_size, "sha256": known_digest(p)} for p in files
    ]
    manifest.write_text(json.dumps(about, indent=2) + "\n")
    mode = manifest.stat().st_mode
    for path in files:
        if path.stat().st_mode != mode and path.stat().st_nlink == 1:  # which is in no other artifact
            path.chmod(mode)  # some libraries let nobody else read what they write
    fsync(manifest)
    fsync(draft)
    artifact.path.parent.mkdir(parents=True, exist_ok=True)
    discard(artifact)  # a damaged leftover, if there is one
    draft.rename(artifact.path)
    fsync(artifact.path.parent)
    point_latest(artifact)
    shutil.rmtree(artifact.path / WORK, ignore_errors=True)  # last: until here a killed stage resumes from its work


def lineage(artifact: Artifact) -> dict[str, dict]:
    """The manifests of the artifact and of all its inputs, first to last; those not on this machine are left out."""
    manifest = read_manifest(artifact)
    if manifest is None:
        log.warning("%s is not on this machine, so it will be missing from the report.", artifact.name)
        return {}
    manifests: dict[str, dict] = {}
    for given in manifest["inputs"].values():
        for name in given if isinstance(given, list) else [given]:
            manifests |= lineage(named(name))
    return manifests | {artifact.name: {k: v for k, v in manifest.items() if k != "files"}}
