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
from tasks.corpus.columns import first_of
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import FORMATS, KINDS, counted_kinds, ending, form_of, reason_to_skip

WILD = re.compile(r"[*?[]")  # the characters that make a path a glob
NAMED = 3  # files that a warning names
IS_NOWHERE = "is not a regular file but a broken link, pipe, socket or device. Correct or delete it."
NOWHERE = "no regular file"  # the kind of a broken link, pipe, socket or device
ADVICE = "A file that is named by its own path is read whatever its suffix is; set download.extract for .html and .xml."


class Local(NamedTuple):
    """Local files by names that don't depend on where they are, in order.

    `skipped`: the number of other files in directories by kind. `gone`: broken links and the like among those that
    were to be read. `given`: the names of those that were given by their own path.
    """

    files: dict[str, Path]
    skipped: Counter[str]
    gone: list[str]
    given: set[str]


def walk(top: Path, hidden: bool = True) -> Iterator[tuple[Path, list[Path]]]:
    """A folder and all folders below it, each once and with its files.

    Links are followed after everything that can be reached without them, so that they change no name, and circles end.
    """
    seen: set[str] = set()
    folders = [top]
    links: list[Path] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop()
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        files = []
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if not path.is_dir():  # as exists(), it raises OSError for what can't be looked at
                files.append(path)
            elif hidden or not name.startswith("."):
                (links if path.is_symlink() else folders).append(path)
        yield folder, files


def files_below(top: Path, hidden: bool = True) -> list[Path]:
    """All files in a folder and below it, in order."""
    files = []
    for _, inner in walk(top, hidden):
        files += inner
    return sorted(files)


def is_there(path: Path) -> bool:
    """Whether there is something at a path, if only a broken link."""
    return path.is_symlink() or path.exists()


def expand(pattern: str) -> list[Path]:
    """The paths that a glob matches, in order.

    As Python's glob, which would ignore folders that can't be read and follow circles of links.
    """
    paths = [Path("/" if pattern.startswith("/") else "")]
    for part in pattern.lstrip("/").split("/"):
        matching: list[Path] = []
        for folder in paths:
            if folder.is_dir():
                matching += paths_in(folder, part)
        paths = matching
    return sorted(set(paths), key=str)


def paths_in(folder: Path, part: str) -> Iterator[Path]:
    """The paths in a folder that a part of a glob matches, and below it for **."""
    if part == "**":
        for below, _ in walk(folder, hidden=False):
            yield below
    elif WILD.search(part):
        for name in fnmatch.filter(os.listdir(folder), part):
            if part.startswith(".") or not name.startswith("."):
                yield folder / name
    elif is_there(folder / part):
        yield folder / part


def matches(pattern: str, extract: str) -> dict[Path, str]:
    """The files that a path, glob or directory stands for or holds; with its kind if one isn't read.

    A glob that ends in a bare * stands for what a directory would. Raises InputError if there is no file to read.
    """
    glob = os.path.expanduser(pattern)
    path = Path(glob)
    paths = [path] if is_there(path) else expand(glob)  # a file may have brackets in its name
    is_any_name = set(path.name) <= {"*"}
    found: dict[Path, str] = {}
    for file in [each for each in paths if not each.is_dir()]:
        found[file] = kind_of(file, file.name if is_any_name else "", extract, itself=file == path)
    for folder in [each for each in paths if each.is_dir()]:
        for file in files_below(folder):
            found[file] = kind_of(file, file.relative_to(folder).as_posix(), extract)
    if "" not in found.values():
        what = f"holds no file that cram reads ({counted_kinds(found.values())})" if paths else "matches nothing"
        raise InputError(f"{pattern!r} {what}. Expected {KINDS}. {ADVICE}")
    return found


def kind_of(path: Path, inner: str, extract: str, itself: bool = False) -> str:
    """The kind of a file that isn't read, by its path `inner` in the directory that was given; empty if it is read.

    `itself`: it was given by its own path. Raises InputError if it then can't be read.
    """
    reason = reason_to_skip(inner, extract) if inner else ""
    if reason:
        return reason
    if not path.is_file():
        if itself:
            raise InputError(f"{printable(str(path))} {IS_NOWHERE}")
        return NOWHERE
    is_known = ending(path.name) in FORMATS
    try:
        form_of(b"" if is_known else head_of(path), printable(str(path)), extract)
    except InputError:
        if itself:
            raise
        return "no text" if inner else ""
    return ""


def absolute(path: str | Path) -> Path:
    """A path from the root, without .. in it."""
    return Path(os.path.abspath(path))


def local_files(patterns: Iterable[str], extract: str = "") -> Local:
    """The files that paths, globs and directories stand for.

    It warns about other files in directories, by kind. Raises InputError if there is nothing to read, or
    if what was given by its own path can't be read, and OSError for what the system refuses.
    """
    files: list[Path] = []
    others: dict[Path, str] = {}
    gone: set[str] = set()
    itself: set[Path] = set()
    for pattern in patterns:
        itself.add(absolute(os.path.expanduser(pattern)))
        for path, kind in matches(pattern, extract).items():
            if not kind:
                files.append(absolute(path))
            elif kind == NOWHERE and ending(path.name) in FORMATS:
                gone.add(printable(str(path)))
            else:
                others[path] = kind
    if others:
        warn_of_others(others)
    by_name = names_of(without_doubles(files))
    given = {name for name, path in by_name.items() if path in itself}
    return Local(by_name, Counter(others.values()), sorted(gone), given)


def without_doubles(files: list[Path]) -> list[Path]:
    """Each file once, though a link leads to its folder.

    A link to a file has its own name and not its target's, which in the hub's cache is a digest.
    """
    real_folder = functools.cache(os.path.realpath)
    once: dict[tuple[str, str], Path] = {}
    for file in files:
        once.setdefault((real_folder(file.parent), file.name), file)
    return list(once.values())


def warn_of_others(others: dict[Path, str]) -> None:
    """Log which files in directories aren't read, by kind."""
    examples = first_of([printable(str(path)) for path in sorted(others)], NAMED)
    warn_once(
        f"{counted(len(others), 'file')} in the directories of download.files are not read: "
        f"{counted_kinds(others.values())} ({examples}). {ADVICE}"
    )


def names_of(files: list[Path]) -> dict[str, Path]:
    """Files by their paths in the folder that they have in common. Raises InputError if two have the same."""
    base = Path(os.path.commonpath([path.parent for path in files]))
    by_name = {printable(str(path.relative_to(base))): path for path in files}
    if len(by_name) < len(files):
        raise InputError("Two files have names that differ only in characters that can't be printed. Rename one.")
    return by_name
