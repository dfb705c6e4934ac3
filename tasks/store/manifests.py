"""Manifests, their files, and the SHA-256 of these."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.errors import InputError

MANIFEST = "stage.json"
KINDS = {"params": dict, "inputs": dict, "environment": dict, "finished": str}  # of fields of a manifest
# the data of an artifact, which it lacks if it is hollow; all else are statistics, tables and pictures
DATA = re.compile(r"(part|measured)-\d+\.parquet|sequences\.npy|heldout\.(parquet|npz)|(.*/)?model.*\.safetensors")
# what no stage reads, such as a model's card, which people edit: a change of it must not train for another day
FOR_READERS = re.compile(r"(.*/)?(README\.md|[^/]+\.png)")
SETTLED = 2_000_000_000  # ns; a file that changed more recently can change again without a new time stamp
known_digests: dict[tuple[int, int, int, int], str] = {}  # of unchanged files, by device, inode, size and change time
hashing = threading.Lock()  # stages in several threads hash a common input once


def parse(text: bytes) -> dict:
    """A manifest, which can come from elsewhere; empty if it is none."""
    with suppress(ValueError, RecursionError):
        return validate(json.loads(text))
    return {}


def validate(about: Any) -> dict:
    """The same manifest, with what it lacks of KINDS as empty; empty if it is not a manifest."""
    with suppress(KeyError, TypeError, AttributeError):
        for name, kind in KINDS.items():
            about.setdefault(name, kind())
        about.setdefault("seconds", 0)
        paths = [file["path"] for file in about["files"]]
        digests = [file["sha256"] for file in about["files"]]
        sizes = [file["bytes"] for file in about["files"]]
        texts = [*inputs_of(about), *about.get("hollow", ()), *paths, *digests]
        numbers = [about["seconds"], *sizes]
        is_sound = (
            isinstance(about["stats"], dict)
            and all(isinstance(about[name], kind) for name, kind in KINDS.items())
            and all(isinstance(text, str) for text in texts)
            and all(0 <= number < 1e18 for number in numbers)
            and all(map(is_inside, paths))
        )
        if is_sound:
            return about
    return {}


def is_inside(path: str) -> bool:
    """Whether a file of an artifact is in its directory."""
    return not path.startswith("/") and "/../" not in f"/{path}/" and "\0" not in path


def kept_files(manifest: dict) -> list[dict]:
    """The files of a manifest whose data was not dropped."""
    hollow = set(manifest.get("hollow", ()))
    return [file for file in manifest.get("files", ()) if file["path"] not in hollow]


def decisive_files(manifest: dict) -> list[dict]:
    """Those of them without which an artifact is damaged: all but cards and pictures."""
    return [file for file in kept_files(manifest) if not FOR_READERS.fullmatch(file["path"])]


def inputs_of(manifest: dict) -> list[str]:
    """The names of the artifacts that one was made from, with the model that its training went on from."""
    start = manifest.get("stats", {}).get("start") or {}
    names: list[str] = []
    for given in (*manifest.get("inputs", {}).values(), start.get("name", [])):
        names.extend(given if isinstance(given, list) else [given])
    return names


def verify(artifact: Any, names: Collection[str] | None = None) -> None:
    """Raise InputError unless these files of an artifact, or all that it needs, are there, with their digests."""
    refuse_hollow(artifact, names)
    files = [file for file in decisive_files(artifact.manifest) if names is None or file["path"] in names]
    verify_files(artifact.path, files, artifact.name)


def refuse_hollow(artifact: Any, names: Collection[str] | None = None) -> None:
    """Raise InputError if the data of these files of an artifact, or of any, was dropped."""
    hollow = artifact.manifest.get("hollow", ())
    dropped = sorted(name for name in hollow if names is None or name in names)
    if dropped:
        rebuilt = "; a run of its recipe, without --use, rebuilds it if a later stage needs it"
        if artifact.manifest.get("varies"):  # it would come out different
            rebuilt = ""
        raise InputError(
            f"{artifact.name} is hollow: {dropped[0]} was dropped by `cram gc --hollow` or left out by `cram pull`. "
            f"`cram pull {artifact.name}` fetches it{rebuilt}."
        )


def verify_files(folder: Path, files: list[dict], name: str) -> None:
    """Raise InputError unless the folder has these files of a manifest, unchanged. `name`: used in the error."""
    for file in files:
        problem = problem_of(folder / file["path"], file)
        if problem:
            raise InputError(
                f"{file['path']} of {name} {problem}. Copy the artifact again, or delete {folder} and run its stage "
                "again."
            )


def problem_of(path: Path, file: dict) -> str:
    """What is wrong with a file, as the end of a sentence; empty if it is as its manifest says."""
    try:
        size = path.stat().st_size
        if size != file["bytes"]:
            return f"has {size:,} bytes; expected {file['bytes']:,}"
        if known_digest(path) != file["sha256"]:
            return f"was changed: its SHA-256 is not the one in {MANIFEST}"
        return ""
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"can't be read: {error.strerror}"


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
        is_settled = abs(time.time_ns() - about.st_ctime_ns) > SETTLED
        sha256 = digest(path)
        if is_settled:
            known_digests[identity] = sha256
        return sha256
