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
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError
from model.files import fsync
from tasks.store import home, locks
from tasks.store.artifacts import LATEST, Artifact, artifact_named, find_by_name, inspect_all, load_manifest
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.lineage import ancestry
from tasks.store.locks import Draft, NoLocks, is_locked, lock_artifact
from tasks.store.manifests import DATA, MANIFEST, inputs_of
from tasks.store.publish import DISCARDED, point_latest, trash

GATE = Artifact(stage="cram", key="gc")
RESULTS = ("report", "compare")
MODEL = "pretrain"
WHOLE = (MODEL, "finetune", "evaluate", *RESULTS)  # stages of which `--hollow` drops nothing
OTHER_MODELS = "other models"  # as a reason to stay, without what they were made from
AFTER_ALL = "~"  # as a date: after every other
Manifests = dict[str, dict]  # by the names of artifacts


# What must stay


def name_of(file: Path) -> str:
    """The name of the artifact that a lock, a pin or a draft belongs to."""
    return file.name.replace("-", "/", 1)


def read_pins() -> dict[str, Path]:
    """The names of the artifacts that `cram gc` keeps whole, with the files that say so."""
    files = sorted((home.root() / ".pins").glob("*-*"))
    return {name_of(path): path for path in files}


@disk_errors_as_input_errors("cram pin")
def pin(artifact: Artifact) -> None:
    """Have `cram gc` keep an artifact whole, and all that it was made from. InputError if it was just discarded."""
    folder = home.root() / ".pins"
    with lock_artifact(GATE, shared=True):
        stage = artifact.manifest["stage"]
        folder.mkdir(exist_ok=True)
        (folder / f"{stage}-{artifact.key}").touch()


@disk_errors_as_input_errors("cram pin")
def unpin(name: str) -> str:
    """Undo `pin`, also of an artifact that is gone; returns its name. Raises InputError if it is not pinned."""
    pins = read_pins()
    if name.endswith(f"/{LATEST}"):
        name = find_by_name(name).name
    matches = []
    for pinned in pins:
        key = pinned.partition("/")[2]
        if name and (pinned.startswith(name) or key.startswith(name)):
            matches.append(pinned)
    if len(matches) != 1:
        raise InputError(f"{name!r} does not name exactly one pin. Pinned artifacts: {', '.join(pins) or 'none'}.")
    pins[matches[0]].unlink(missing_ok=True)
    return matches[0]


@contextmanager
def keep_while_running(*artifacts: Iterable[Artifact]) -> Iterator[None]:
    """Keep these artifacts, made or not yet, from every `cram gc` until the run that needs them ends."""
    folder = home.root() / ".locks" / "runs"
    names = {artifact.name for some in artifacts for artifact in some}
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
    folder = home.root() / ".locks"
    names = {name_of(lock) for lock in folder.glob("*-*") if is_locked(lock, shared=True)}
    for run in (folder / "runs").glob("*"):
        if is_locked(run):
            names |= set(run.read_text(encoding="utf-8").split())
    return names


# What `cram gc` finds


def manifests_of_all() -> tuple[Manifests, set[str]]:
    """The manifests of all complete artifacts by name, of all stages, oldest first; and the names of damaged ones."""
    made: Manifests = {}
    damaged = set()
    for artifact, (about, _) in inspect_all("").items():
        if not about:
            damaged.add(artifact.name)
        elif f"{about.get('stage')}/{about.get('key')}" == artifact.name:
            made[artifact.name] = about
    return made, damaged


def closure(names: Iterable[str], made: Manifests) -> set[str]:
    """The artifacts of these names and all that they were made from, also by damaged ones, of those that are there."""

    def read(name: str) -> dict:
        return made.get(name) or load_manifest(artifact_named(name))

    return ancestry(names, read).keys() & made.keys()


class Garbage(NamedTuple):
    """What a `cram gc` keeps and frees: manifests by the names of artifacts, the oldest first."""

    kept: dict[str, set[str]]  # why artifacts stay; without what they were made from
    stays: Manifests
    goes: Manifests
    models: Manifests  # that go, or stay for their own sake
    hollow: dict[str, list[str]]  # of what stays: files to drop
    drafts: list[Draft]  # that go, and directories that a killed process was deleting

    def paths(self) -> dict[str, list[Path]]:
        """The files that go, by stage."""
        found: dict[str, list[Path]] = {}
        for name in self.goes:
            artifact = artifact_named(name)
            found.setdefault(artifact.stage, []).extend(files_below(artifact.path))
        for name, files in self.hollow.items():
            artifact = artifact_named(name)
            found.setdefault(artifact.stage, []).extend(artifact.path / file for file in files)
        for draft in self.drafts:
            found.setdefault("drafts", []).extend(files_below(home.root() / ".partial" / draft.name))
        return found

    def left(self) -> int:
        """The bytes on disk of what stays."""
        files: set[Path] = set()
        for name, about in self.stays.items():
            files.update(files_of(artifact_named(name), about))
        for name, dropped in self.hollow.items():
            files.difference_update(artifact_named(name).path / file for file in dropped)
        return sizes({"": files}, whole=True)[""]


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
    names: Counter[tuple[int, int]] = Counter()  # how many of the paths name a file, by device and inode
    first: dict[tuple[int, int], tuple[str, os.stat_result]] = {}
    for group, some in paths.items():
        for path in some:
            with suppress(OSError):
                about = os.lstat(path)
                file = (about.st_dev, about.st_ino)
                names[file] += 1
                first.setdefault(file, (group, about))
    found = dict.fromkeys(paths, 0)
    for file, (group, about) in first.items():
        if whole or names[file] >= about.st_nlink:
            found[group] += about.st_size
    return found


def droppable(artifact: Artifact, about: dict, drop: bool) -> list[str]:
    """An artifact's data files, if they are to be dropped; or those that a killed `cram gc` left of a hollow one."""
    if artifact.stage in WHOLE:
        return []
    dropped = set(about.get("hollow", ()))
    found = []
    for file in about["files"]:
        name = file["path"]
        if DATA.fullmatch(name):
            goes = (artifact.path / name).exists() if name in dropped else drop
            if goes:
                found.append(name)
    return found


def is_abandoned(draft: Draft, since: str, busy: set[str], models: bool) -> bool:
    """Whether nobody needs a draft; that of a model stays unless `models`, since it has a checkpoint."""
    if draft.name.startswith(DISCARDED):  # by a process that was killed or still deletes; at first it is empty
        hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
        return draft.written < hour_ago or any((home.root() / ".partial" / draft.name).glob("*"))
    if draft.written >= since or name_of(Path(draft.name)) in busy:
        return False
    return models or not draft.name.startswith(f"{MODEL}-")


def newest_results(made: Manifests, keep: int) -> tuple[set[str], str]:
    """The last `keep` reports and as many studies, and when the newest of all was finished (ISO date).

    The date is later than every other if none is kept, and empty if there is none.
    """
    last: set[str] = set()
    dates = [""]
    for stage in RESULTS:
        of_stage = [name for name in made if artifact_named(name).stage == stage]
        if of_stage:
            last.update(of_stage[max(0, len(of_stage) - keep) :])
            dates.append(made[of_stage[-1]]["finished"])
    return last, max(dates) if keep else AFTER_ALL


def files_to_drop(made: Manifests, stays: set[str], sources: set[str], busy: set[str]) -> dict[str, list[str]]:
    """The data files to drop, by artifact: of `sources`, except of those that a process uses.

    Also what a killed `cram gc` left of the others that stay.
    """
    used = closure(busy, made)
    found = {}
    for name in made:
        if name in stays and name not in used:
            files = droppable(artifact_named(name), made[name], name in sources)
            if files:
                found[name] = files
    return found


def is_newer(name: str, about: dict, since: str) -> bool:
    """Whether an artifact was finished after this ISO date, or came from another store after it.

    What comes hollow stays with what was made from it. `cram gc --hollow` changes directories, too.
    """
    if about["finished"] > since:
        return True
    changed = 0.0
    with suppress(OSError):
        changed = artifact_named(name).path.stat().st_mtime
    return not about.get("hollow") and datetime.fromtimestamp(changed, UTC).isoformat() > since


def survey(keep: int, hollow: bool, models: bool) -> Garbage:
    """What a `cram gc` would do.

    It keeps the last `keep` reports and studies, what was made or pulled since the newest of them, pins, and what is in
    use; each with all that it was made from; and models, unless `models`. `hollow`: drop the data of what stays where
    something that stays was made from it.
    """
    made, damaged = manifests_of_all()
    busy = in_use()
    last, since = newest_results(made, keep)
    kept = {
        "last reports and studies": last,
        "made since": {name for name, about in made.items() if is_newer(name, about, since)},
        "pinned": made.keys() & read_pins(),
        "in use": made.keys() & busy,
    }
    stays = closure(damaged.union(*kept.values()), made)  # what a damaged one came from may repair it
    other_models = {name for name in made if artifact_named(name).stage == MODEL and name not in stays}
    kept[OTHER_MODELS] = set() if models else other_models
    stays |= kept[OTHER_MODELS]
    sources = inputs_of_all(stays, made) - kept["pinned"] if hollow else set()
    drafts = [draft for draft in locks.drafts("") if is_abandoned(draft, since, busy, models)]
    return Garbage(
        kept=kept,
        stays=select_manifests(made, stays),
        goes=select_manifests(made, made.keys() - stays),
        models=select_manifests(made, other_models),
        hollow=files_to_drop(made, stays, sources, busy),
        drafts=drafts,
    )


def inputs_of_all(names: Iterable[str], made: Manifests) -> set[str]:
    """The names of all artifacts that these were made from directly."""
    return {given for name in names for given in inputs_of(made[name])}


def select_manifests(made: Manifests, names: Collection[str]) -> Manifests:
    """The manifests of these artifacts, the oldest first."""
    return {name: about for name, about in made.items() if name in names}


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
            move_to_trash(found, folder)
            forget_killed_runs()
        freed = sizes({group: files_below(folder / group) for group in groups})
    return found, freed


def move_to_trash(found: Garbage, folder: Path) -> None:
    """Move what goes into `folder`; take from `found` what a process has begun to use meanwhile."""
    point_links_to_what_stays(found)
    for draft in found.drafts:
        artifact = artifact_named(name_of(Path(draft.name)))
        put_away(artifact, home.root() / ".partial" / draft.name, folder / "drafts")
    for name in list(found.goes):
        artifact = artifact_named(name)
        if not put_away(artifact, artifact.path, folder / artifact.stage):
            found.goes.pop(name)
    for name, paths in list(found.hollow.items()):
        artifact = artifact_named(name)
        if not make_hollow(artifact, paths, folder / artifact.stage):
            found.hollow.pop(name)


def point_links_to_what_stays(found: Garbage) -> None:
    """Point each link `latest` to an artifact that goes to the newest of its stage that stays."""
    newest: dict[str, Artifact] = {}
    for name in found.stays:
        artifact = artifact_named(name)
        newest[artifact.stage] = artifact
    for stage, artifact in newest.items():
        link = artifact.path.parent / LATEST
        if link.is_symlink() and f"{stage}/{os.readlink(link)}" in found.goes:
            point_latest(artifact)


def forget_killed_runs() -> None:
    """Delete the lists of what runs need whose process was killed."""
    for run in (home.root() / ".locks" / "runs").glob("*"):
        if not is_locked(run):
            run.unlink(missing_ok=True)


def put_away(artifact: Artifact, path: Path, folder: Path) -> bool:
    """Move a directory of an artifact into a folder that is being deleted; False if a process uses it."""
    with suppress(BlockingIOError, FileNotFoundError), lock_artifact(artifact, wait=False):
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
        return True
    return False


def make_hollow(artifact: Artifact, paths: list[str], folder: Path) -> bool:
    """Make an artifact hollow: move these files into a folder that is being deleted; False if a process uses it.

    The manifest says so first, so that the artifact is sound whenever the process is killed.
    """
    with suppress(BlockingIOError, InputError), lock_artifact(artifact, wait=False):
        about = artifact.manifest
        about["hollow"] = sorted({*about.get("hollow", []), *paths})
        new = artifact.path / f".{MANIFEST}"
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
