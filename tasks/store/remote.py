"""A remote: a mirror of a store wherever fsspec reaches, for machines that share no disk.

It has a store's layout, URL/<stage>/<key>/<file>, with each manifest written last. An artifact travels whole; those
that it was made from travel hollow, without their data, unless everything is asked for.
"""

import errno
import json
import logging
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from model.errors import InputError, explain_errors
from tasks.corpus.parts import link
from tasks.store import home
from tasks.store.artifacts import LATEST, Artifact, artifacts_of, draft_of, read_manifest, result_files
from tasks.store.errors import disk_errors_as_input_errors, written_in
from tasks.store.gc import keep_while_running
from tasks.store.lineage import ancestors
from tasks.store.locks import lock_artifact, lock_for_reading
from tasks.store.manifests import (
    DATA,
    FOR_READERS,
    MANIFEST,
    inputs_of,
    parse,
    problem_of,
    refuse_hollow,
    verify_files,
)
from tasks.store.publish import point_latest, publish

SENDING = f"{MANIFEST}.part"  # at the remote: the manifest of a push that has not ended
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the artifacts that a manifest from elsewhere may name, since they become paths here
NAME = re.compile(r"[a-z][a-z0-9_-]*/[0-9a-f]+")
log = logging.getLogger(__name__)
Moved = Iterator[tuple[Artifact, list[dict]]]  # artifacts with the files of theirs that were sent or fetched


def absent(manifest: dict, whole: bool) -> set[str]:
    """The files that an artifact lacks, or is to lack if it doesn't travel whole."""
    names = set(manifest.get("hollow", ()))
    if not whole:
        names |= {file["path"] for file in manifest["files"] if DATA.fullmatch(file["path"])}
    return names


def hollowed(manifest: dict, without: set[str]) -> dict:
    """The manifest of an artifact without these files."""
    about = {name: value for name, value in manifest.items() if name != "hollow"}
    if without:
        about["hollow"] = sorted(without)
    return about


def unchanged(artifact: Artifact, manifest: dict) -> list[dict]:
    """The files of a manifest without cards and pictures that are not as it says; a warning names these."""
    found = []
    for file in manifest["files"]:
        is_for_readers = FOR_READERS.fullmatch(file["path"])
        problem = problem_of(artifact.path / file["path"], file) if is_for_readers else ""
        if problem:
            log.warning("%s of %s %s, so it is left out.", file["path"], artifact.name, problem)
        else:
            found.append(file)
    return found


def check_same(artifact: Artifact, here: dict, there: dict, url: str) -> None:
    """Raise InputError if two artifacts of one key have other contents, as two trainings have."""
    if result_files(here) != result_files(there):
        raise InputError(
            f"{artifact.name} was made twice, with different contents in {home.root()} and at {url}. Delete the one "
            "that you don't need, then run again."
        )


def bar(path: str) -> Any:
    """A callback of fsspec that draws a progress bar on a terminal."""
    from fsspec.callbacks import TqdmCallback

    return TqdmCallback({"desc": path, "unit": "B", "unit_scale": True, "leave": False, "disable": None})


class Remote:
    """The artifacts at an fsspec URL, such as s3://BUCKET/FOLDER, or in a folder."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs
        from fsspec.implementations.dirfs import DirFileSystem

        if not url:
            raise InputError("No remote is set. Pass a URL, such as s3://BUCKET/FOLDER, or set CRAM_REMOTE to it.")
        self.url = re.sub("//[^/@]*@", "//", url.rstrip("/"))  # as it is shown: without a password
        with self.explain_errors():
            files, folder = url_to_fs(url)
            files.invalidate_cache()
            self.fs = DirFileSystem(folder, files)

    def explain_errors(self, path: str = "") -> AbstractContextManager[None]:
        """Raise InputError for what file systems raise, which are errors of many packages."""

        def explain(error: BaseException) -> InputError | None:
            is_of_this_disk = getattr(error, "errno", None) in FULL
            if is_of_this_disk or not isinstance(error, Exception):
                return None
            advice = "Check the address, the network and your access"
            if isinstance(error, ImportError):
                advice = "Install it, for s3:// with `pip install -e '.[s3]'`"
            first_line = str(error).strip().partition("\n")[0]
            reason = first_line.rstrip(".") or type(error).__name__
            place = f"{self.url}/{path}".rstrip("/")
            return InputError(f"{place} can't be reached: {reason}. {advice}; then run again.")

        return explain_errors(explain)

    def read(self, path: str) -> bytes | None:
        """The contents of a file; None if it is absent."""
        with self.explain_errors(path), suppress(FileNotFoundError):
            return self.fs.cat_file(path)
        return None

    def manifest(self, artifact: Artifact) -> dict | None:
        """The manifest of an artifact; None if it is absent. Raises InputError if it is not one, or another's."""
        text = self.read(f"{artifact.name}/{MANIFEST}")
        if text is None:
            return None
        about = parse(text)
        own = f"{about.get('stage')}/{about.get('key')}"
        if own == artifact.name and all(NAME.fullmatch(name) for name in (own, *inputs_of(about))):
            return about
        raise InputError(f"{self.url}/{artifact.name} has no valid {MANIFEST}. Delete that folder, and push it again.")

    def find(self, name: str) -> Artifact:
        """The artifact there: STAGE/KEY, the beginning of a key, or the newest of a stage."""
        stage, _, key = name.partition("/")
        is_newest = key in ("", LATEST)
        keys: list[str] = []
        with self.explain_errors(stage), suppress(FileNotFoundError):
            names = sorted(path.rpartition("/")[2] for path in self.fs.ls(stage, detail=False))
            keys = [each for each in names if NAME.fullmatch(f"{stage}/{each}")]  # of a store, not its link `latest`
        finished: dict[Artifact, str] = {}
        for each in keys:
            if is_newest or each.startswith(key):
                artifact = Artifact(stage=stage, key=each)
                about = self.manifest(artifact)
                if about:
                    finished[artifact] = str(about.get("finished"))
        if len(finished) == 1 or (finished and is_newest):
            return max(finished, key=lambda artifact: finished[artifact])
        raise InputError(
            f"{len(finished) or 'No'} artifacts at {self.url} match {name!r}; expected one. Those of {stage} there: "
            f"{', '.join(keys[-8:]) or 'none'}. `cram push-artifact` sends one there."
        )

    def push(self, artifact: Artifact, everything: bool) -> Moved:
        """Send an artifact and what it was made from."""
        for each, here in ancestors(artifact, read_manifest):
            is_whole = everything or each == artifact
            if is_whole:
                refuse_hollow(each)
            with lock_for_reading(each), written_in(self.fs.path):
                yield each, self.send(each, here, absent(here, is_whole))

    def send(self, artifact: Artifact, here: dict, without: set[str]) -> list[dict]:
        """Send the files that are not there yet, but no card or picture that was changed here."""
        here = here | {"files": unchanged(artifact, here)}
        there = self.manifest(artifact)
        if there:
            check_same(artifact, here, there, self.url)
        about = there or here
        mark = json.dumps(here["files"]).encode()
        with self.explain_errors(artifact.name):
            gone = self.missing(artifact, about, is_complete=there is not None, mark=mark)
            files = [file for file in about["files"] if file["path"] in gone - without]
            if there and not files:
                return []
            verify_files(artifact.path, files, artifact.name)
            self.upload(artifact, files, hollowed(about, gone & without), mark)
        return files

    def missing(self, artifact: Artifact, about: dict, is_complete: bool, mark: bytes) -> set[str]:
        """The files of a manifest that are not there, in whole: all, unless the same push was interrupted."""
        folder = artifact.name
        sizes = {}
        if is_complete or self.read(f"{folder}/{SENDING}") == mark:
            sizes = self.sizes_below(folder)
        return {file["path"] for file in about["files"] if sizes.get(file["path"]) != file["bytes"]}

    def upload(self, artifact: Artifact, files: list[dict], about: dict, mark: bytes) -> None:
        """Send these files, then the manifest; until then, a file with the `mark` says which push is under way."""
        folder = artifact.name
        self.make_folders([Path(folder, file["path"]) for file in files])
        self.fs.pipe_file(f"{folder}/{SENDING}", mark)
        for file in files:
            path = f"{folder}/{file['path']}"
            self.fs.put_file(str(artifact.path / file["path"]), path, callback=bar(path))
        manifest = json.dumps(about, indent=2) + "\n"
        self.fs.pipe_file(f"{folder}/{MANIFEST}", manifest.encode())
        self.fs.rm_file(f"{folder}/{SENDING}")

    def sizes_below(self, folder: str) -> dict[str, int]:
        """The bytes of the files in a folder there, by their paths in it."""
        found = self.fs.find(folder, detail=True)
        return {path.removeprefix(f"{folder}/"): about["size"] for path, about in found.items()}

    def make_folders(self, files: list[Path]) -> None:
        """Make the folders of these files there."""
        parents = {parent for file in files for parent in file.parents}
        for parent in sorted(parents):
            with suppress(FileExistsError):
                self.fs.mkdir(parent.as_posix().strip("."), create_parents=False)  # which would make a bucket

    def pull(self, name: str, everything: bool) -> Moved:
        """Fetch an artifact and what it was made from."""
        artifact = self.find(name)
        found = ancestors(artifact, self.manifest)
        known: dict[str, Path] = {}
        with keep_while_running(each for each, _ in found):
            for each, there in found:
                is_whole = everything or each == artifact
                if is_whole and absent(there, True):
                    raise InputError(
                        f"{each.name} is hollow at {self.url}: its data is not there. Run `cram push-artifact "
                        f"{each.name}` where it was made."
                    )
                for file in there["files"]:
                    known.setdefault(file["sha256"], each.path / file["path"])
                with disk_errors_as_input_errors(each.stage), lock_artifact(each):
                    yield each, self.fetch(each, there, absent(there, is_whole), known)

    def fetch(self, artifact: Artifact, there: dict, without: set[str], known: dict[str, Path]) -> list[dict]:
        """Fetch the files that are not here yet. `known`: paths of files that may be here, by digest."""
        here = read_manifest(artifact)
        if here:
            check_same(artifact, here, there, self.url)
            if absent(here, True) <= without:
                return []
        pulled = Artifact(stage=artifact.stage, key=f"{artifact.key}.pull")  # not the draft of an interrupted stage
        draft = draft_of(pulled)
        fetched = []
        with lock_artifact(pulled):
            draft.mkdir(parents=True, exist_ok=True)
            for file in there["files"]:
                path = draft / file["path"]
                if file["path"] in without:
                    path.unlink(missing_ok=True)
                elif self.bring(artifact, file, path, known.get(file["sha256"], draft)):
                    fetched.append(file)
            publish(draft, artifact, hollowed(there, without))
            point_latest(artifacts_of(artifact.stage)[-1])
        return fetched

    def bring(self, artifact: Artifact, file: dict, path: Path, source: Path) -> bool:
        """Bring a file to `path`, from `source` on this machine if it is there; returns whether it was fetched."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not problem_of(path, file):  # it is there from an interrupted pull
            return False
        if not problem_of(source, file):
            link(source, path)
            return False
        self.get(artifact, file, path)
        return True

    def get(self, artifact: Artifact, file: dict, path: Path) -> None:
        """Fetch a file to `path`. Raises InputError if it is damaged."""
        path.unlink(missing_ok=True)  # it may be a link
        place = f"{artifact.name}/{file['path']}"
        with self.explain_errors(place):
            self.fs.get_file(place, str(path), callback=bar(place))
        if problem_of(path, file):
            path.unlink()
            raise InputError(
                f"{self.url}/{place} was changed or cut off: its SHA-256 is not the one in {MANIFEST}. Delete its "
                "folder, and push it again."
            )
