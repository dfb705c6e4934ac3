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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import IO, NamedTuple

from pydantic import BaseModel

from model import TENTHS, UNSUPPORTED, InputError, fsync
from tasks import warn_once
from tasks.store import opening
from tasks.store.home import HOME
from tasks.store.manifests import (
    MANIFEST,
    ancestry,
    decisive,
    known_digest,
    parsed,
    verify,
)

# files that several stages read: the tokens, and the manifests of all inputs of a model
SEQUENCES, HELDOUT_TEXT = "sequences.npy", "heldout.parquet"
FREQUENCIES, LINEAGE = "frequencies.npy", "lineage.json"
ROOT = Path(os.environ.get("CRAM_ARTIFACTS") or HOME / "artifacts").expanduser().resolve()  # bound at import
STATS = "stats.json"
# suffixes of files that describe the run, such as its date or speed, and not the result
TELLING = (".md", ".html", ".svg", ".png", STATS, LINEAGE, "metrics.parquet")
KEY = re.compile(r"[0-9a-f]*")  # or its beginning, which no stage is called
LATEST = "latest"  # in a stage's directory: the link to its newest artifact
WORK = "work"  # in a draft: what a rerun resumes from; never published
DISCARDED = "discarded-"  # begins the names of directories beside the drafts that are being deleted
MACHINE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.ENAMETOOLONG,
)  # fmt: skip
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE = tuple(map(os.strerror, FULL))
LITTLE = 1 << 20  # bytes: a file system with less is full
NO_SCRATCH = "No usable temporary directory"  # in the error of `tempfile` if it can write in none
NO_LOCKS = (*UNSUPPORTED, errno.EBADF, errno.ENOLCK)
to_fill: set["Artifact"] = set()  # hollow artifacts that this process is to make again
is_frozen = False  # set by a process that only plans: nothing in the store may change
log = logging.getLogger(__name__)


class NoLocks(InputError):
    """The store's file system has no file locks."""


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
            raise InputError(incomplete(self, problem))
        return manifest

    @property
    def stats(self) -> dict:
        """What the stage counted."""
        return self.manifest["stats"]

    frame, dataset, model = opening.frame, opening.dataset, opening.model


def named(name: str) -> Artifact:
    """The artifact of this name, which need not exist."""
    stage, _, key = name.partition("/")
    return Artifact(stage=stage, key=key)


def incomplete(artifact: Artifact, problem: str) -> str:
    """The sentence about an artifact that `inspect` finds incomplete."""
    return f"No complete artifact {artifact.name} in {ROOT}: {problem}. Run the stage again, or copy it here."


def inspect(artifact: Artifact) -> tuple[dict | None, str]:
    """The manifest of a complete artifact and an empty string; or None and what is missing.

    A hollow artifact counts as complete: the data of the files in `hollow` was dropped, all else is there. So does one
    whose card or pictures were changed.
    """
    if not (manifest := listed(artifact)):
        return None, f"its {MANIFEST} is missing or can't be read"
    folder = artifact.path
    for file in decisive(manifest):
        if size(os.path.join(folder, file["path"])) != file["bytes"]:
            return None, f"{file['path']} is missing, or its size is not the {file['bytes']:,} bytes in {MANIFEST}"
    return manifest, ""


def listed(artifact: Artifact) -> dict:
    """The contents of stage.json, also of an artifact with damaged files; empty if it can't be read."""
    with suppress(OSError, ValueError):
        return parsed((artifact.path / MANIFEST).read_bytes())
    return {}


def size(path: str) -> int:
    """The bytes of a file; -1 if there is none."""
    with suppress(OSError, ValueError):
        about = os.stat(path)
        return about.st_size if S_ISREG(about.st_mode) else -1
    return -1


def warn_of_damage(artifact: Artifact) -> None:
    """Log a warning if the artifact is there, but not complete."""
    manifest, problem = inspect(artifact)
    if manifest is None and artifact.path.exists():
        log.warning("%s is damaged, so its stage runs again: %s.", artifact.name, problem)


def read_manifest(artifact: Artifact) -> dict | None:
    """The manifest of a complete artifact; None if it is absent or a file does not have its recorded size."""
    return inspect(artifact)[0]


def is_hollow(artifact: Artifact) -> bool:
    """Whether `cram gc --hollow` dropped its data. It counts as made until a stage needs the data."""
    return bool((read_manifest(artifact) or {}).get("hollow"))


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
            digests[artifact.name] = hashlib.sha256(json.dumps(sorted(result(manifest))).encode()).hexdigest()
    return digests


def result(manifest: dict) -> set[tuple[str, str]]:
    """The files that hold an artifact's result, with their digests."""
    files = ((file["path"], file["sha256"]) for file in manifest["files"])
    return {
        (path, sha256) for path, sha256 in files if not path.endswith(TELLING) and not path.startswith(f"{TENTHS}/")
    }


def is_made(artifact: Artifact, inputs: dict) -> bool:
    """Whether the artifact is complete and was made from the present contents of these inputs."""
    manifest, now = read_manifest(artifact), contents(inputs)
    lacks_data = artifact in to_fill and is_hollow(artifact)
    return manifest is not None and manifest.get("made_from") == now and not lacks_data


def artifacts(stage: str) -> list[Artifact]:
    """The complete artifacts of a stage, or of all (empty), the newest last."""
    return [artifact for artifact, (manifest, _) in inspected(stage).items() if manifest]


def inspected(stage: str) -> dict[Artifact, tuple[dict | None, str]]:
    """What `inspect` finds of each artifact of a stage, or of all (empty): first of damaged ones; the newest last."""
    paths = (ROOT / stage).glob("[!.]*") if stage else ROOT.glob("[!.]*/[!.]*")
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()]
    own = [path for path in folders if path.name != LATEST]  # a directory in a store that was copied by `cp -L`
    found = {one: inspect(one) for one in (Artifact(stage=path.parent.name, key=path.name) for path in own)}
    return dict(sorted(found.items(), key=lambda one: (str((one[1][0] or {}).get("finished", "")), one[0].key)))


def find(stage: str, name: str = LATEST, damaged: bool = False) -> Artifact:
    """The artifact named by `latest`, a key, or the beginning of one, of one stage or of all (empty).

    Raises InputError if there is not exactly one. `damaged`: find those too.
    """
    known, of = [*(inspected(stage) if damaged else artifacts(stage))], f" of {stage}" if stage else ""
    if not known:
        until = f" --until {stage}" if stage else ""
        raise InputError(
            f"There are no artifacts{of} in {ROOT} yet. Make one with `cram run RECIPE{until}`, copy one there, or set "
            "CRAM_ARTIFACTS to a directory that has some."
        )
    if name == LATEST:  # from the manifests: the link may not have been copied with the directory
        return known[-1]
    begin = [artifact for artifact in known if name and artifact.key.startswith(name)]
    matches = [artifact for artifact in begin if artifact.key == name] or begin
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(artifact.key if stage else artifact.name for artifact in (matches or known)[-8:])
    problem = f"{len(matches)} artifacts{of} begin with" if matches else f"No complete artifact{of} is"
    raise InputError(f"{problem} {name!r}. Those in {ROOT}: {names}. Give one of these, or `latest`.")


def called(name: str, damaged: bool = False) -> Artifact:
    """The artifact STAGE/KEY, STAGE (the newest), or KEY of any stage; a key may be shortened. As `find` otherwise."""
    stage, slash, key = name.partition("/")
    return find("", name, damaged) if KEY.fullmatch(name) else find(stage, key if slash else LATEST, damaged)


def lock(file: IO, kind: int) -> None:
    """`fcntl.flock` of a file in the store. Raises NoLocks where the file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise NoLocks(
            f"{ROOT} is on a file system without file locks ({error.strerror}), without which two runs could write the "
            "same artifact. Set CRAM_ARTIFACTS to a directory on a file system that has them; then run again."
        ) from error


@contextmanager
def locked(artifact: Artifact, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Be the only writer of the artifact, or a reader (`shared`). The kernel frees the lock of a killed process.

    Raises BlockingIOError if others use the artifact and `wait` is false, and NoLocks where locks can't be had.
    """
    path, kind = ROOT / ".locks" / draft_of(artifact).name, fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb+") as file:  # NFS has shared locks only of files that are open for reading
        try:
            lock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            log.info("Another run is using %s; waiting until it has finished.", artifact.name)
            lock(file, kind)
        yield


@contextmanager
def reading(artifact: Artifact) -> Iterator[None]:
    """Keep an artifact from being discarded, where the store can be written and has locks."""
    with ExitStack() as stack:
        with suppress(OSError, NoLocks):
            stack.enter_context(locked(artifact, shared=True))
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


def is_locked(lock: Path, shared: bool = False) -> bool:
    """Whether a process holds this lock as the only one, or, if `shared`, in any way."""
    try:
        with lock.open("r+" if shared else "r", encoding="utf-8") as file:
            fcntl.flock(file, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:  # by any other error there is no such lock, or it can't be read
        return isinstance(error, BlockingIOError)
    return False


@contextmanager
def trash() -> Iterator[Path]:
    """A directory in the store whose contents are deleted in the end; of a killed process, by the next `cram gc`."""
    (ROOT / ".partial").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / ".partial", prefix=DISCARDED) as folder:
        yield Path(folder)


def discard(artifact: Artifact) -> None:
    """Take an artifact out of the store in one step, then delete it."""
    with trash() as folder, suppress(FileNotFoundError):
        artifact.path.rename(folder / "old")
        if not (artifact.path.parent / LATEST).exists() and (left := artifacts(artifact.stage)):
            point_latest(left[-1])


def point_latest(artifact: Artifact) -> None:
    """Point the link `latest` of its stage to the artifact; log a warning, once, where that can't be done.

    Nothing reads these links but people: `find` reads the manifests.
    """
    latest = artifact.path.parent / LATEST
    if latest.is_dir() and not latest.is_symlink():  # in a store that was copied by `cp -L`
        return
    link = artifact.path.parent / f".latest-{os.getpid()}-{threading.get_ident()}"
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(artifact.key)
        link.replace(latest)
    except OSError as error:
        warn_once(
            f"The links STAGE/latest in {ROOT} can't be made ({error.strerror}), as on file systems without symbolic "
            "links. Commands take `latest` all the same. In place of a path with `latest`, use the one that "
            "`cram show STAGE` prints."
        )


@contextmanager
def disk_errors_as_input_errors(stage: str) -> Iterator[None]:
    """Raise InputError if a disk is full or access is denied."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not (problem := machine_problem(error)):
            raise
        places = places_of(error, problem)
        where = " or ".join(described(place, problem) for place in places)
        instead = dict.fromkeys(filter(None, map(setting_of, places)))
        advice = ", ".join(("Free space or grant access there", *(f"or set {one}" for one in instead)))
        raise InputError(f"{stage} can't continue: {problem}: {where}. {advice}; then run again.") from error


def machine_problem(error: Exception) -> str:
    """The system's words for an error of the disk or of access rights; empty for any other error."""
    number, text = getattr(error, "errno", None), str(error)
    if match := re.search(r"\(os error (\d+)\)", text):  # libraries in Rust: safetensors, tokenizers
        number = int(match[1])
    if re.fullmatch(r"\d+ requested and \d+ written", text):  # NumPy, which gives no reason
        number = errno.ENOSPC
    if NO_SCRATCH in text:
        return "No temporary file can be written"
    return os.strerror(number) if number in MACHINE_ERRORS else ""


def places_of(error: Exception, problem: str) -> list[str]:
    """The path that an error of the disk names; or else the store or TMPDIR, whichever is full, or both."""
    named = (getattr(error, name, None) for name in ("filename2", "filename"))  # the first is the target of a copy
    if path := next(filter(None, named), None):
        return [str(path)]
    if NO_SCRATCH in str(error):
        return re.findall("'(.+?)'", str(error))
    if problem not in NO_SPACE:
        return [str(ROOT)]
    candidates = list({mount_of(place): place for place in (tempfile.gettempdir(), str(ROOT))}.values())
    return list(filter(is_full, candidates)) or candidates


def is_full(folder: str) -> bool:
    """Whether a folder's file system has no room for another file, or for what is in it."""
    about = os.statvfs(mount_of(folder))
    return about.f_bavail * about.f_frsize < LITTLE or 0 == about.f_favail < about.f_files


def mount_of(path: str) -> str:
    """The directory at which the file system of a path is mounted; the path need not exist."""
    real = Path(os.path.realpath(path))
    return str(next(filter(os.path.ismount, (real, *real.parents))))


def described(place: str, problem: str) -> str:
    """A path in a sentence; if the disk is full, with its file system, since that is what needs space."""
    mount = mount_of(place) if problem in NO_SPACE else place
    return place if mount == place else f"{place}, on the file system at {mount}"


def setting_of(place: str) -> str:
    """What to set so that files are written elsewhere than at this path; empty if nothing of cram's does that."""
    if Path(place).absolute().is_relative_to(ROOT):
        return "CRAM_ARTIFACTS to another directory"
    with suppress(FileNotFoundError):  # there is none
        if not Path(place).absolute().is_relative_to(tempfile.gettempdir()):
            return ""
    return "TMPDIR to a directory on another file system"


@contextmanager
def written_in(place: str) -> Iterator[None]:
    """Have the error of a full disk name the place, which Python's own doesn't when a file is written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = error.filename or place
        raise


def refresh(artifact: Artifact) -> None:
    """Discard the artifact and its draft, so that its stage runs from the start."""
    with disk_errors_as_input_errors(artifact.stage), locked(artifact):
        discard(artifact)
        shutil.rmtree(draft_of(artifact), ignore_errors=True)


def publish(draft: Path, artifact: Artifact, about: dict) -> None:
    """Write the manifest last, force all files to disk, rename the draft into place and point `latest` to it.

    `about`: the manifest; its files are added, unless it came from elsewhere with files that were checked.
    """
    manifest = draft / MANIFEST
    files = sorted(p for p in draft.rglob("*") if p.is_file() and p != manifest and draft / WORK not in p.parents)
    for path in files:
        fsync(path)
    about["files"] = about.get("files") or [
        {"path": str(p.relative_to(draft)), "bytes": p.stat().st_size, "sha256": known_digest(p)} for p in files
    ]
    manifest.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    mode = manifest.stat().st_mode
    for path in files:
        if path.stat().st_mode != mode and path.stat().st_nlink == 1:  # which is in no other artifact
            with suppress(OSError):  # a file system without such modes
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
    missing = "%s is not on this machine, so it will be missing from the report."
    found = ancestry([artifact.name], lambda name: read_manifest(named(name)), missing)
    return {name: {k: v for k, v in m.items() if k not in ("files", "hollow")} for name, m in found.items()}
