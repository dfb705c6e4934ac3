"""Upkeep of the store: pins, what running commands need, and what `cram gc` keeps, discards and empties.

A run of `cram gc` takes an artifact out of the store in one step, and never waits while it holds a lock. It alone has
the lock GATE, for which a run waits before it says what it needs.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError
from model.files import fsync
from tasks.store import home, locks
from tasks.store.artifacts import LATEST, Artifact, artifact_named, inspect_all, load_manifest
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.lineage import ancestry
from tasks.store.locks import Draft, NoLocks, is_locked, lock_artifact
from tasks.store.manifests import DATA, MANIFEST, inputs_of
from tasks.store.publish import DISCARDED, point_latest, trash

GATE = Artifact(stage="cram", key="gc")
RESULTS, MODEL = ("report", "compare"), "pretrain"
WHOLE = (MODEL, "finetune", "evaluate", *RESULTS)  # stages of which `--hollow` drops nothing
ALL = "~"  # a date after every other


# What must stay


def name_of(file: Path) -> str:
    """The name of the artifact that a lock, a pin or a draft belongs to."""
    return file.name.replace("-", "/", 1)


def read_pins() -> dict[str, Path]:
    """The names of the artifacts that `cram gc` keeps whole, with the files that say so."""
    return {name_of(path): path for path in sorted((home.root() / ".pins").glob("*-*"))}


@disk_errors_as_input_errors("cram pin")
def pin(artifact: Artifact) -> None:
    """Have `cram gc` keep an artifact whole, and all that it was made from. InputError if it was just discarded."""
    with lock_artifact(GATE, shared=True):
        (folder := home.root() / ".pins").mkdir(exist_ok=True)
        (folder / f"{artifact.manifest['stage']}-{artifact.key}").touch()


@disk_errors_as_input_errors("cram pin")
def unpin(name: str) -> str:
    """Undo `pin`, also of an artifact that is gone; returns its name. Raises InputError if it is not pinned."""
    matches = [one for one in read_pins() if name and (one.startswith(name) or one.partition("/")[2].startswith(name))]
    if len(matches) != 1:
        raise InputError(f"{name!r} names no single pin. Pinned are: {', '.join(read_pins()) or 'none'}.")
    read_pins()[matches[0]].unlink(missing_ok=True)
    return matches[0]


@contextmanager
def keep_while_running(*artifacts: Iterable[Artifact]) -> Iterator[None]:
    """Keep these artifacts, made or not yet, from every `cram gc` until the run that needs them ends."""
    folder, names = home.root() / ".locks" / "runs", {artifact.name for some in artifacts for artifact in some}
    with ExitStack() as stack:
        with suppress(OSError, NoLocks):  # a store that can't be written or locked, as when all is cached
            folder.mkdir(parents=True, exist_ok=True)
            with lock_artifact(GATE, shared=True):
                file = stack.enter_context(
                    tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=f"{os.getpid()}-")
                )
                locks.flock(file, fcntl.LOCK_EX)
                file.write("\n".join(names))
                file.flush()
        yield


def in_use() -> set[str]:
    """The names of artifacts that processes read or write, or will need."""
    names = {name_of(lock) for lock in (home.root() / ".locks").glob("*-*") if is_locked(lock, shared=True)}
    for run in (home.root() / ".locks" / "runs").glob("*"):
        if is_locked(run):
            names |= set(run.read_text(encoding="utf-8").split())
    return names


# What `cram gc` finds


def manifests_of_all() -> tuple[dict[str, dict], set[str]]:
    """The manifests of all complete artifacts by name, of all stages, oldest first; and the names of damaged ones."""
    found = {artifact.name: about for artifact, (about, _) in inspect_all("").items()}
    made = {
        name: about for name, about in found.items() if about and f"{about.get('stage')}/{about.get('key')}" == name
    }
    return made, {name for name, about in found.items() if not about}


def closure(names: Iterable[str], made: dict[str, dict]) -> set[str]:
    """The artifacts of these names and all that they were made from, also by damaged ones, of those that are there."""
    return ancestry(names, lambda name: made.get(name) or load_manifest(artifact_named(name))).keys() & made.keys()


class Garbage(NamedTuple):
    """What a `cram gc` keeps and frees: manifests by the names of artifacts, the oldest first."""

    kept: dict[str, set[str]]  # why artifacts stay; without what they were made from
    stays: dict[str, dict]
    goes: dict[str, dict]
    models: dict[str, dict]  # that go, or stay for their own sake
    hollow: dict[str, list[str]]  # of what stays: files to drop
    drafts: list[Draft]  # that go, and directories that a killed process was deleting

    def paths(self) -> dict[str, list[Path]]:
        """The files that go, by stage."""
        found: dict[str, list[Path]] = {}
        for artifact in map(artifact_named, self.goes):
            found.setdefault(artifact.stage, []).extend(files_below(artifact.path))
        for name, files in self.hollow.items():
            found.setdefault(artifact_named(name).stage, []).extend(artifact_named(name).path / file for file in files)
        for draft in self.drafts:
            found.setdefault("drafts", []).extend(files_below(home.root() / ".partial" / draft.name))
        return found

    def left(self) -> int:
        """The bytes on disk of what stays."""
        gone = {artifact_named(name).path / file for name, files in self.hollow.items() for file in files}
        files = {path for name, about in self.stays.items() for path in files_of(artifact_named(name), about)}
        return sizes({"": files - gone}, whole=True)[""]


def files_below(folder: Path) -> list[Path]:
    """All files in a directory."""
    return [Path(where, file) for where, _, files in os.walk(folder) for file in files]


def files_of(artifact: Artifact, about: dict) -> list[Path]:
    """The files that an artifact's manifest lists."""
    folder = artifact.path
    return [folder / file["path"] for file in about["files"]]


def sizes(paths: Mapping[str, Iterable[Path]], whole: bool = False) -> dict[str, int]:
    """The bytes of these files by group: a file with several names counts once, for the first.

    Unless `whole`, it counts only if all of its names are among these, so that deleting them frees its bytes.
    """
    names, first, found = Counter(), {}, dict.fromkeys(paths, 0)
    for group, some in paths.items():
        for path in some:
            with suppress(OSError):
                about = os.lstat(path)
                names[file := (about.st_dev, about.st_ino)] += 1
                first.setdefault(file, (group, about))
    for file, (group, about) in first.items():
        found[group] += about.st_size * (whole or names[file] >= about.st_nlink)
    return found


def droppable(artifact: Artifact, about: dict, drop: bool) -> list[str]:
    """An artifact's data files, if they are to be dropped; or those that a killed `cram gc` left of a hollow one."""
    if artifact.stage in WHOLE:
        return []
    before, data = set(about.get("hollow", ())), [f["path"] for f in about["files"] if DATA.fullmatch(f["path"])]
    return [name for name in data if (drop if name not in before else (artifact.path / name).exists())]


def is_left(draft: Draft, since: str, busy: set[str], models: bool) -> bool:
    """Whether nobody needs a draft; that of a model stays unless `models`, since it has a checkpoint."""
    if draft.name.startswith(DISCARDED):  # by a process that was killed or still deletes; at first it is empty
        hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        return draft.written < hour_ago or any((home.root() / ".partial" / draft.name).glob("*"))
    is_old = draft.written < since and name_of(Path(draft.name)) not in busy
    return is_old and (models or not draft.name.startswith(f"{MODEL}-"))


def survey(keep: int, hollow: bool, models: bool) -> Garbage:
    """What a `cram gc` would do.

    It keeps the last `keep` reports and studies, what was made since the newest of them, pins, and what is in use; each
    with all that it was made from; and models, unless `models`. `hollow`: drop the data of what stays where something
    that stays was made from it.
    """
    (made, damaged), busy = manifests_of_all(), in_use()
    results = {stage: [name for name in made if artifact_named(name).stage == stage] for stage in RESULTS}
    since = max((made[some[-1]]["finished"] for some in results.values() if some), default="") if keep else ALL
    kept = {
        "last reports and studies": {name for some in results.values() for name in some[max(0, len(some) - keep) :]},
        "made since": {name for name, about in made.items() if about["finished"] > since},
        "pinned": made.keys() & read_pins(),
        "in use": made.keys() & busy,
    }
    stays = closure(damaged.union(*kept.values()), made)  # what a damaged one came from may mend it
    others = {name for name in made if artifact_named(name).stage == MODEL and name not in stays}
    kept["other models"] = set() if models else others
    stays |= kept["other models"]
    drop, used = {name for one in stays for name in inputs_of(made[one])} - kept["pinned"], closure(busy, made)
    files = {
        name: droppable(artifact_named(name), made[name], hollow and name in drop)
        for name in made
        if name in stays - used
    }
    return Garbage(
        kept=kept,
        stays={name: about for name, about in made.items() if name in stays},
        goes={name: about for name, about in made.items() if name not in stays},
        models={name: about for name, about in made.items() if name in others},
        hollow={name: some for name, some in files.items() if some},
        drafts=[draft for draft in locks.drafts("") if is_left(draft, since, busy, models)],
    )


# What `cram gc` does


@disk_errors_as_input_errors("cram gc")
def collect(keep: int, hollow: bool, models: bool) -> tuple[Garbage, dict[str, int]]:
    """Do what `survey` finds, except to what a process has begun to use; returns it, with the bytes freed by stage.

    All is first renamed into one directory, so that runs that begin meanwhile wait for moments only.
    """
    with trash() as folder:
        with lock_artifact(GATE):
            found = survey(keep, hollow, models)
            groups = list(found.paths())
            for artifact in {
                artifact_named(name).stage: artifact_named(name) for name in found.stays
            }.values():  # the newest
                link = artifact.path.parent / LATEST
                if link.is_symlink() and f"{artifact.stage}/{os.readlink(link)}" in found.goes:
                    point_latest(artifact)
            for draft in found.drafts:
                put_away(
                    artifact_named(name_of(Path(draft.name))), home.root() / ".partial" / draft.name, folder / "drafts"
                )
            for artifact in list(map(artifact_named, found.goes)):
                if not put_away(artifact, artifact.path, folder / artifact.stage):
                    found.goes.pop(artifact.name)
            for name, paths in list(found.hollow.items()):
                if not empty(artifact_named(name), paths, folder / artifact_named(name).stage):
                    found.hollow.pop(name)
            for run in (home.root() / ".locks" / "runs").glob("*"):
                if not is_locked(run):  # its process was killed
                    run.unlink(missing_ok=True)
        freed = sizes({group: files_below(folder / group) for group in groups})
    return found, freed


def put_away(artifact: Artifact, path: Path, folder: Path) -> bool:
    """Move a directory of an artifact into a folder that is being deleted; False if a process uses it."""
    with suppress(BlockingIOError, FileNotFoundError), lock_artifact(artifact, wait=False):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
        return True
    return False


def empty(artifact: Artifact, paths: list[str], folder: Path) -> bool:
    """Make an artifact hollow: move these files into a folder that is being deleted; False if a process uses it.

    The manifest says so first, so that the artifact is sound whenever the process is killed.
    """
    with suppress(BlockingIOError, InputError), lock_artifact(artifact, wait=False):
        about, new = artifact.manifest, artifact.path / f".{MANIFEST}"
        about["hollow"] = sorted({*about.get("hollow", []), *paths})
        new.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        with suppress(OSError):  # a file system without such modes
            shutil.copymode(artifact.path / MANIFEST, new)
        fsync(new)
        new.replace(artifact.path / MANIFEST)
        fsync(artifact.path)
        folder.mkdir(exist_ok=True)
        for path in paths:
            with suppress(FileNotFoundError):
                (artifact.path / path).rename(folder / f"{artifact.key}-{path}")
        return True
    return False
