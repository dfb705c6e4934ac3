"""Local files: those that a path, a directory or a glob stands for, in order, and their digests."""

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
from tasks import printable, store
from tasks.corpus.formats import FORMATS, ending_of

WILD = re.compile(r"[*?[]")  # the characters that make a path a glob
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
NAMED = 3  # files that a warning names
log = logging.getLogger(__name__)


def unreadable(path: Path, error: OSError) -> InputError:
    """The message for a file or folder that the system refuses to read."""
    return InputError(
        f"{printable(str(error.filename or path))} can't be read: {os.strerror(error.errno)}. Expected a readable "
        "file in accessible directories. Change the permissions, or give another path."
    )


def mode_of(path: Path | str, follow: bool = True) -> int:
    """The type of what is at a path, or of a link's target, as os.stat gives it; 0 if there is nothing."""
    try:
        return os.stat(path, follow_symlinks=follow).st_mode
    except OSError as error:  # os.path.isdir takes a folder that may not be read for absent
        if error.errno in ABSENT:
            return 0
        raise


def is_folder(path: Path | str) -> bool:
    """Whether a path is a folder or a link to one."""
    return stat.S_ISDIR(mode_of(path))


def walk(top: Path, hidden: bool = True) -> Iterator[tuple[Path, list[Path]]]:
    """A folder and all folders below it, each once and with its files.

    Links are followed after everything that can be reached without them, so that they change no name, and circles end.
    """
    seen, folders, links = set(), [top], []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        if (real := os.path.realpath(folder)) in seen:
            continue
        seen.add(real)
        files = []
        for path in (folder / name for name in sorted(os.listdir(folder))):
            if not is_folder(path):
                files.append(path)
            elif hidden or not path.name.startswith("."):
                (links if path.is_symlink() else folders).append(path)
        yield folder, files


def expand(pattern: str) -> list[str]:
    """The paths that a glob matches, in order.

    As Python's glob, which would ignore folders that can't be read and follow circles of links.
    """
    paths = ["/" if pattern.startswith("/") else ""]
    for part in pattern.lstrip("/").split("/"):
        if not WILD.search(part):
            paths = [path for folder in paths if mode_of(path := os.path.join(folder, part), follow=False)]
            continue
        folders = [folder for folder in paths if is_folder(folder or ".")]
        if part == "**":
            below = (path for folder in folders for path, _ in walk(Path(folder), hidden=False))
            paths = ["" if path == Path() else str(path) for path in below]  # "./b" would sort before "a/c"
        else:
            paths = [
                os.path.join(folder, name)
                for folder in folders
                for name in fnmatch.filter(os.listdir(folder or "."), part)
                if part.startswith(".") or not name.startswith(".")
            ]
    return sorted(set(paths))


def matches(pattern: str) -> tuple[list[Path], list[Path]]:
    """The files that a path, glob or directory stands for, and those that a directory holds besides."""
    path = os.path.expanduser(pattern)
    # A file may have brackets in its name
    paths = [Path(p) for p in ([path] if mode_of(path, follow=False) else expand(path))]
    folders = [p for p in paths if is_folder(p)]
    inner = [p for folder in folders for p in sorted(p for _, files in walk(folder) for p in files)]
    files = [p for p in paths if p not in folders] + [p for p in inner if ending_of(p.name)]
    if not files:
        what = "holds no file that cram reads" if paths else "matches nothing"
        raise InputError(f"{pattern!r} {what}. Expected files that end in {', '.join(FORMATS)}. Check download.files.")
    for file in files:
        shown, mode = printable(str(file)), mode_of(file)
        if not mode:
            raise InputError(
                f"{shown} is a broken link, to {printable(os.readlink(file))}. Expected a file; correct the link or "
                "delete it."
            )
        if not stat.S_ISREG(mode):
            raise InputError(
                f"{shown} is not a regular file (a pipe, socket or device?). Save its output to a file and give that "
                "file."
            )
        if not ending_of(file.name):
            raise InputError(f"{shown} is of a kind that cram doesn't read. Expected {', '.join(FORMATS)}.")
    return files, [p for p in inner if not ending_of(p.name)]


@functools.cache
def warn_once(warning: str) -> None:
    """Log a warning once, although files are listed when a run is planned and again when it reads them."""
    log.warning(warning)


def local_files(patterns: Iterable[str]) -> dict[str, Path]:
    """The files that paths, globs and directories stand for, by names that don't depend on where they are.

    Warns of other files in directories. Raises InputError for files and folders that can't be read.
    """
    ignored: set[Path] = set()
    once: dict[tuple[str, str], Path] = {}  # by folder and name, so that a link to a folder doesn't double its files
    real = functools.cache(os.path.realpath)
    for pattern in patterns:
        try:
            files, others = matches(pattern)
        except OSError as error:
            raise unreadable(Path(pattern), error) from error
        ignored.update(others)
        for path in map(Path, map(os.path.abspath, files)):
            # Under its own name, not that of a link's target, which in the hub's cache is a digest
            once.setdefault((real(path.parent), path.name), path)
    if ignored:
        examples = ", ".join(printable(str(p)) for p in sorted(ignored)[:NAMED]) + ", …" * (len(ignored) > NAMED)
        warn_once(
            "Ignoring files with unsupported extensions in the directories of download.files: "
            f"{len(ignored):,} ({examples})."
        )
    base = Path(os.path.commonpath([path.parent for path in once.values()]))
    by_name = {printable(str(path.relative_to(base))): path for path in once.values()}
    if len(by_name) < len(once):
        raise InputError(
            "Two of the files have names that differ only in characters that can't be printed. Rename one."
        )
    return by_name


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, computed again only if the file changes. Raises InputError if it can't be read."""
    try:
        return store.known_digest(path)
    except OSError as error:
        raise unreadable(path, error) from error
