"""Local files: those that a path, a directory or a glob stands for, in order."""

import fnmatch
import functools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from model.errors import InputError, warn_once
from model.wording import counted, printable
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import FORMATS, KINDS, counted_kinds, ending, form_of, unread

WILD = re.compile(r"[*?[]")  # the characters that make a path a glob
NAMED = 3  # files that a warning names
IS_NOWHERE = "is no regular file but a broken link, pipe, socket or device. Correct or delete it."
NOWHERE = "no regular file"  # the kind of a broken link, pipe, socket or device
ADVICE = "A path to a single file has it read whatever its name is; download.extract reads .html and .xml."


class Local(NamedTuple):
    """Local files by names that don't depend on where they are, in order.

    `skipped`: the number of other files in directories by kind. `gone`: broken links and the like among those that
    were to be read. `given`: the names of those that were given by their own path.
    """

    files: dict[str, Path]
    skipped: Counter
    gone: list[str]
    given: set[str]


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
            if not path.is_dir():  # as exists(), it raises OSError for what can't be looked at
                files.append(path)
            elif hidden or not path.name.startswith("."):
                (links if path.is_symlink() else folders).append(path)
        yield folder, files


def is_there(path: Path) -> bool:
    """Whether there is something at a path, if only a broken link."""
    return path.is_symlink() or path.exists()


def expand(pattern: str) -> list[Path]:
    """The paths that a glob matches, in order.

    As Python's glob, which would ignore folders that can't be read and follow circles of links.
    """
    paths = [Path("/" if pattern.startswith("/") else "")]
    for part in pattern.lstrip("/").split("/"):
        folders = [path for path in paths if path.is_dir()]
        if part == "**":
            paths = [path for folder in folders for path, _ in walk(folder, hidden=False)]
        elif WILD.search(part):
            paths = [
                folder / name
                for folder in folders
                for name in fnmatch.filter(os.listdir(folder), part)
                if part.startswith(".") or not name.startswith(".")
            ]
        else:
            paths = [path for folder in folders if is_there(path := folder / part)]
    return sorted(set(paths), key=str)


def matches(pattern: str, extract: str) -> dict[Path, str]:
    """The files that a path, glob or directory stands for or holds; with its kind if one isn't read.

    A glob that ends in a bare * stands for what a directory would. Raises InputError if there is no file to read.
    """
    glob = os.path.expanduser(pattern)
    path = Path(glob)
    # A file may have brackets in its name
    paths = [path] if is_there(path) else expand(glob)
    anything, given = set(path.name) <= {"*"}, [p for p in paths if not p.is_dir()]
    found = {p: kind_of(p, p.name if anything else "", extract, p == path) for p in given}
    for folder in (p for p in paths if p not in found):
        inner = sorted(p for _, files in walk(folder) for p in files)
        found |= {p: kind_of(p, p.relative_to(folder).as_posix(), extract) for p in inner}
    if "" not in found.values():
        what = f"holds no file that cram reads ({counted_kinds(found.values())})" if paths else "matches nothing"
        raise InputError(f"{pattern!r} {what}. Expected {KINDS}. {ADVICE}")
    return found


def kind_of(path: Path, inner: str, extract: str, itself: bool = False) -> str:
    """The kind of a file that isn't read, by its path `inner` in the directory that was given; empty if it is read.

    `itself`: it was given by its own path. Raises InputError if it then can't be read.
    """
    known = ending(path.name) in FORMATS
    if inner and (kind := unread(inner, extract)):
        return kind
    if not path.is_file():
        if itself:
            raise InputError(f"{printable(str(path))} {IS_NOWHERE}")
        return NOWHERE
    try:
        form_of(b"" if known else head_of(path), printable(str(path)), extract)
    except InputError:
        if itself:
            raise
        return "no text" if inner else ""
    return ""


def local_files(patterns: Iterable[str], extract: str = "") -> Local:
    """The files that paths, globs and directories stand for.

    It warns of those in directories that aren't read by their kind. Raises InputError if there is nothing to read, or
    if what was given by its own path can't be read, and OSError for what the system refuses.
    """
    ignored: dict[Path, str] = {}
    once: dict[tuple[str, str], Path] = {}  # by folder and name, so that a link to a folder doesn't double its files
    itself = {Path(os.path.abspath(os.path.expanduser(pattern))) for pattern in patterns}
    real = functools.cache(os.path.realpath)
    for pattern in patterns:
        found = matches(pattern, extract)
        ignored |= {path: kind for path, kind in found.items() if kind}
        for path in (Path(os.path.abspath(path)) for path, kind in found.items() if not kind):
            # Under its own name, not that of a link's target, which in the hub's cache is a digest
            once.setdefault((real(path.parent), path.name), path)
    gone = {path for path, kind in ignored.items() if kind == NOWHERE and ending(path.name) in FORMATS}
    if others := {path: kind for path, kind in ignored.items() if path not in gone}:
        examples = ", ".join(printable(str(p)) for p in sorted(others)[:NAMED]) + ", …" * (len(others) > NAMED)
        warn_once(
            f"{counted(len(others), 'file')} in the directories of download.files, not read: "
            f"{counted_kinds(others.values())} ({examples}). {ADVICE}"
        )
    base = Path(os.path.commonpath([path.parent for path in once.values()]))
    by_name = {printable(str(path.relative_to(base))): path for path in once.values()}
    if len(by_name) < len(once):
        raise InputError("Two files have names that differ only in characters that can't be printed. Rename one.")
    given = {name for name, path in by_name.items() if path in itself}
    return Local(by_name, Counter(others.values()), sorted(printable(str(path)) for path in gone), given)
