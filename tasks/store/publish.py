"""How an artifact enters the store, and how it leaves it: in one step each."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model.errors import warn_once
from model.files import fsync
from tasks.store import home
from tasks.store.artifacts import LATEST, WORK, Artifact, artifacts_of, draft_of
from tasks.store.errors import disk_errors_as_input_errors
from tasks.store.locks import lock_artifact
from tasks.store.manifests import MANIFEST, known_digest

DISCARDED = "discarded-"  # begins the names of directories beside the drafts that are being deleted


@contextmanager
def trash() -> Iterator[Path]:
    """A directory in the store whose contents are deleted in the end; of a killed process, by the next `cram gc`."""
    (home.root() / ".partial").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.root() / ".partial", prefix=DISCARDED) as folder:
        yield Path(folder)


def discard(artifact: Artifact) -> None:
    """Take an artifact out of the store in one step, then delete it."""
    with trash() as folder, suppress(FileNotFoundError):
        artifact.path.rename(folder / "old")
        latest = artifact.path.parent / LATEST
        left = [] if latest.exists() else artifacts_of(artifact.stage)
        if left:
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
            f"The links STAGE/latest in {home.root()} can't be made ({error.strerror}), as on file systems without "
            "symbolic links. Commands take `latest` all the same. In place of a path with `latest`, use the one that "
            "`cram show STAGE` prints."
        )


def refresh(artifact: Artifact) -> None:
    """Discard the artifact and its draft, so that its stage runs from the start."""
    with disk_errors_as_input_errors(artifact.stage), lock_artifact(artifact):
        discard(artifact)
        shutil.rmtree(draft_of(artifact), ignore_errors=True)


def publish(draft: Path, artifact: Artifact, about: dict) -> None:
    """Write the manifest last, force all files to disk, rename the draft into place and point `latest` to it.

    `about`: the manifest; its files are added, unless it came from elsewhere with files that were checked.
    """
    manifest = draft / MANIFEST
    files = files_to_publish(draft)
    for path in files:
        fsync(path)
    about["files"] = about.get("files") or [file_entry(draft, path) for path in files]
    manifest.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    grant_access_as(manifest, files)
    fsync(manifest)
    fsync(draft)
    artifact.path.parent.mkdir(parents=True, exist_ok=True)
    discard(artifact)  # a damaged leftover, if there is one
    draft.rename(artifact.path)
    fsync(artifact.path.parent)
    point_latest(artifact)
    shutil.rmtree(artifact.path / WORK, ignore_errors=True)  # last: until here a killed stage resumes from its work


def files_to_publish(draft: Path) -> list[Path]:
    """The files of a draft, in order, without its manifest and what only a rerun needs."""
    found = []
    for path in sorted(draft.rglob("*")):
        if path.is_file() and path != draft / MANIFEST and draft / WORK not in path.parents:
            found.append(path)
    return found


def file_entry(draft: Path, path: Path) -> dict:
    """A file as the manifest lists it."""
    name = str(path.relative_to(draft))
    return {"path": name, "bytes": path.stat().st_size, "sha256": known_digest(path)}


def grant_access_as(manifest: Path, files: list[Path]) -> None:
    """Let those read the files who can read the manifest: some libraries let nobody else read what they write."""
    mode = manifest.stat().st_mode
    for path in files:
        about = path.stat()
        if about.st_mode != mode and about.st_nlink == 1:  # with more links it is in another artifact too
            with suppress(OSError):  # a file system without such modes
                path.chmod(mode)
