"""Local files: those that a path, a directory or a glob stands for, in order, and their digests."""

import errno
import fnmatch
import functools
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from model import InputError
from tasks import printable, store
from tasks.corpus.containers import head_of
from tasks.corpus.kinds import FORMATS, KINDS, MARKUP, Damage, ending, form_of, unread

WILD = re.compile(r"[*?[]")  # the characters that make a path a glob
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)
NAMED = 3  # files that a warning names
ADVICE = "A path to a single file has it read whatever its name is; download.extract reads .html and .xml."
log = logging.getLogger(__name__)


def unreadable(path: Path, error: OSError) -> InputError:
    """The message for a file or folder that the system refuses to read."""
    shown, why = printable(str(error.filename or path)), os.strerror(error.errno)
    return InputError(f"{shown} can't be read: {why}. Change the permissions, or give another path.")


def changed(what: Path | str) -> Damage:
    """The message for a file or folder that changed while it was read."""
    shown = printable(str(what))
    return Damage(f"{shown} changed while it was read. Run again, and don't change it until the stage has finished.")


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


def matches(pattern: str, extract: str) -> dict[Path, str]:
    """The files that a path, glob or directory stands for or holds; with its kind if one isn't read.

    A glob that ends in a bare * stands for what a directory would. Raises InputError if there is no file to read.
    """
    path = os.path.expanduser(pattern)
    # A file may have brackets in its name
    paths = [Path(p) for p in ([path] if mode_of(path, follow=False) else expand(path))]
    anything, given = set(Path(path).name) <= {"*"}, [p for p in paths if not is_folder(p)]
    found = {p: kind_of(p, p.name if anything else "", extract) for p in given}
    for folder in (p for p in paths if p not in found):
        inner = sorted(p for _, files in walk(folder) for p in files)
        found |= {p: kind_of(p, p.relative_to(folder).as_posix(), extract) for p in inner}
    if "" not in found.values():
        there = [counted_kinds(found.values())]
        for path in list(found)[:NAMED]:
            try:
                head_of(path)
            except InputError as error:
                there.append(str(error).rstrip("."))
        what = f"holds no file that cram reads ({'; '.join(there)})" if paths else "matches nothing"
        raise InputError(f"{pattern!r} {what}. Expected {KINDS}. {ADVICE}")
    return found


def kind_of(path: Path, inner: str, extract: str) -> str:
    """The kind of a file that isn't read, by its path `inner` in the directory that was given; empty if it is read.

    Raises InputError for one that can't be read although its name says so, or although it was given itself.
    """
    known, shown, mode = ending(path.name) in FORMATS, printable(str(path)), mode_of(path)
    if inner and (kind := unread(inner, extract)):
        return kind
    if not stat.S_ISREG(mode) and inner and not known:
        return "no regular file"
    if not mode:
        raise InputError(f"{shown} is a broken link, to {printable(os.readlink(path))}. Correct or delete it.")
    if not stat.S_ISREG(mode):
        raise InputError(f"{shown} is not a regular file (a pipe, socket or device?). Save its output to a file.")
    try:
        form_of(b"" if known and ending(path.name) not in MARKUP else head_of(path), shown, extract)
    except InputError:
        if known or not inner:
            raise
        return "no text"
    return ""


def counted_kinds(kinds: Iterable[str]) -> str:
    """Kinds of files with their counts, the most frequent first."""
    return ", ".join(f"{n:,} {kind}" for kind, n in Counter(kinds).most_common()) or "nothing"


@functools.cache
def warn_once(warning: str) -> None:
    """Log a warning once, although files are listed when a run is planned and again when it reads them."""
    log.warning(warning)


def local_files(patterns: Iterable[str], extract: str = "") -> dict[str, Path]:
    """The files that paths, globs and directories stand for, by names that don't depend on where they are.

    Warns of other files in directories. Raises InputError for files and folders that can't be read.
    """
    return listing(patterns, extract)[0]


def listing(patterns: Iterable[str], extract: str = "") -> tuple[dict[str, Path], Counter]:
    """`local_files`, and the number of other files in directories by kind."""
    ignored: dict[Path, str] = {}
    once: dict[tuple[str, str], Path] = {}  # by folder and name, so that a link to a folder doesn't double its files
    real = functools.cache(os.path.realpath)
    for pattern in patterns:
        try:
            found = matches(pattern, extract)
        except OSError as error:
            raise unreadable(Path(pattern), error) from error
        ignored |= {path: kind for path, kind in found.items() if kind}
        for path in (Path(os.path.abspath(path)) for path, kind in found.items() if not kind):
            # Under its own name, not that of a link's target, which in the hub's cache is a digest
            once.setdefault((real(path.parent), path.name), path)
    if ignored:
        examples = ", ".join(printable(str(p)) for p in sorted(ignored)[:NAMED]) + ", …" * (len(ignored) > NAMED)
        html = f" {ADVICE}" if set(ignored.values()) & set(MARKUP) else ""
        warn_once(
            f"Of the directories in download.files, {len(ignored):,} files are not read: "
            f"{counted_kinds(ignored.values())} ({examples}).{html}"
        )
    base = Path(os.path.commonpath([path.parent for path in once.values()]))
    by_name = {printable(str(path.relative_to(base))): path for path in once.values()}
    if len(by_name) < len(once):
        raise InputError("Two files have names that differ only in characters that can't be printed. Rename one.")
    return by_name, Counter(ignored.values())


def file_digest(path: Path) -> str:
    """The SHA-256 of a file, computed again only if the file changes. Raises InputError if it can't be read."""
    try:
        return store.known_digest(path)
    except OSError as error:
        raise unreadable(path, error) from error
