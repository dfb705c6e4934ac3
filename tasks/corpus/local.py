"""Local files: which ones a path, a directory or a glob stands for, in which order, and their digests."""

import errno
import fnmatch
import functools
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from model import InputError
from tasks import store
from tasks.text.printable import printable

JSON_LINES = (".jsonl", ".json", ".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz")
SUFFIXES = (*JSON_LINES, ".parquet", ".txt")
# how the stem of a file ends that is one shard of several; those of the hub may have a digest too
SHARD = re.compile(r"[-_. ]?\d+([-_. ]?of[-_. ]?\d+(-[0-9a-f]{16})?)?$")
WILD = re.compile(r"[*?[]")  # what makes a glob of a path
NAMED = 3  # files that a warning names
log = logging.getLogger(__name__)


def suffix_of(name: str) -> str:
    """How a file's name ends, in lower case: the last suffix alone."""
    return Path(name).suffix.lower()


def is_read(path: Path) -> bool:
    """Does its name end as those of files that cram reads, in capitals or not?"""
    return path.name.lower().endswith(SUFFIXES)


def shard_family(name: str) -> str:
    """A file's name without its suffix and the number of its shard, `train` for `train-00003-of-00010.jsonl.zst`."""
    whole = Path(name).name
    stem = next((whole[: -len(suffix)] for suffix in SUFFIXES if whole.lower().endswith(suffix)), whole)
    return SHARD.sub("", stem) or stem or whole


def status(path: Path) -> os.stat_result | None:
    """What the system says of a path or of what it leads to; None of a broken link. Raises InputError where it may not."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise unreadable(path, error) from error


def is_folder(path: Path) -> bool:
    """Is it a folder, or a link to one?"""
    about = status(path)
    return about is not None and stat.S_ISDIR(about.st_mode)


def is_there(path: str) -> bool:
    """Is there anything of this name, be it a broken link?"""
    try:
        os.lstat(path)
    except PermissionError as error:
        raise unreadable(Path(path), error) from error
    except (OSError, ValueError):
        return False
    return True


def listed(folder: Path) -> list[str]:
    """The names in a folder, in order."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error


def walk(top: Path, hidden: bool = True) -> Iterator[tuple[Path, list[Path]]]:
    """A folder and all below it, each once and with what it holds but folders.

    Links are followed after all that can be reached without them, so that they change no name and lead in no circle.
    """
    seen, folders, links = set(), [top], []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        files = []
        for path in (folder / name for name in listed(folder)):
            if not is_folder(path):
                files.append(path)
            elif hidden or not path.name.startswith("."):
                (links if path.is_symlink() else folders).append(path)
        yield folder, files


def expand(pattern: str) -> list[str]:
    """What a glob matches, in order.

    As Python's glob, which is silent about folders that it may not read, and goes in circles with links.
    """
    found = ["/" if pattern.startswith("/") else ""]
    for part in pattern.lstrip("/").split("/"):
        if not WILD.search(part):
            found = [path for folder in found if is_there(path := os.path.join(folder, part))]
            continue
        folders = [folder for folder in found if is_folder(Path(folder))]
        if part == "**":
            found = [str(below) for folder in folders for below, _ in walk(Path(folder), hidden=False)]
        else:
            found = [
                os.path.join(folder, name)
                for folder in folders
                for name in fnmatch.filter(listed(Path(folder)), part)
                if part.startswith(".") or not name.startswith(".")
            ]
    return sorted(set(found))


def expect_file(path: Path) -> None:
    """Raise InputError for a broken link, a pipe or a device."""
    about = status(path)
    if about is None:
        raise InputError(
            f"{printable(str(path))} is a broken link, to {printable(os.readlink(path))}. Expected a file; correct the link or delete it."
        )
    if not stat.S_ISREG(about.st_mode):
        raise InputError(
            f"{printable(str(path))} is not a regular file (a pipe, socket or device?). Save its output to a file "
            "and give that file."
        )


@functools.cache
def warn_once(told: str) -> None:
    """Log a warning that was not given yet: the files are looked for when a run is planned, and when it reads them."""
    log.warning(told)


def local_files(patterns: Iterable[str]) -> dict[str, Path]:
    """The files that paths, globs and directories mean, by a name that doesn't depend on where they lie.

    What directories hold besides is warned of. Raises InputError for all that is named or lies in them and can't be read.
    """
    found: list[Path] = []
    ignored: set[Path] = set()
    for pattern in patterns:
        named = os.path.expanduser(pattern)  # a file may have brackets in its name
        matches = [Path(m) for m in ([named] if is_there(named) else expand(named))]
        folders = [m for m in matches if is_folder(m)]
        inner = [p for m in folders for p in sorted(p for _, files in walk(m) for p in files)]
        files = [m for m in matches if m not in folders] + [p for p in inner if is_read(p)]
        if not files:
            what = "matches nothing" if not matches else "holds no file that cram reads"
            raise InputError(
                f"{pattern!r} {what}. Expected files that end in {', '.join(SUFFIXES)}. Check download.files."
            )
        for path in files:
            expect_file(path)
        found += files
        ignored.update(p for p in inner if not is_read(p))
    if wrong := [p for p in found if not is_read(p)]:
        raise InputError(f"{wrong[0]} is of a kind that cram doesn't read. Expected {', '.join(SUFFIXES)}.")
    if ignored:
        some = ", ".join(printable(str(p)) for p in sorted(ignored)[:NAMED]) + ", …" * (len(ignored) > NAMED)
        warn_once(
            "Ignoring files with unsupported extensions in the directories of download.files: "
            f"{len(ignored):,} ({some})."
        )
    real = functools.cache(os.path.realpath)
    once: dict[tuple[str, str], Path] = {}  # by folder and name: a link to a folder doesn't make two of its files
    for path in found:  # under its own name, not what links to files point to: the hub's cache names that by digest
        path = Path(os.path.abspath(path))
        once.setdefault((real(path.parent), path.name), path)
    found = list(once.values())
    base = Path(os.path.commonpath([p.parent for p in found]))
    named = {printable(str(p.relative_to(base))): p for p in found}
    if len(named) < len(set(found)):
        raise InputError(
            "Two of the files have names that differ only in characters that can't be printed. Rename one."
        )
    return named


@functools.cache
def _digest(path: Path, *_: int) -> str:
    return store.digest(path)


def unreadable(path: Path, error: OSError) -> InputError:
    """What to say of a file or folder that the system doesn't let us read."""
    return InputError(
        f"{printable(str(error.filename or path))} can't be read: {os.strerror(error.errno)}. Expected a file that you may read, in folders that you may "
        "enter; change their rights, or name another."
    )


def file_digest(path: Path) -> str:
    """The SHA-256 of a file; computed again only when its size, time or inode changes.

    Raises InputError where it can't be read.
    """
    try:
        about = path.stat()
        return _digest(path, about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
    except OSError as error:
        raise unreadable(path, error) from error
