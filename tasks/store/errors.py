"""Errors of the disk and of access rights, as sentences that name the place and what to set."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model.errors import InputError, explain_errors
from tasks.store import home

MACHINE_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR,
    errno.ENAMETOOLONG,
)  # fmt: skip
FULL = (errno.ENOSPC, errno.EDQUOT)
NO_SPACE = tuple(map(os.strerror, FULL))
LITTLE = 1 << 20  # bytes: a file system with less is full
NO_SCRATCH = "No usable temporary directory"  # in the error of `tempfile` if it can write in none


@contextmanager
def disk_errors_as_input_errors(stage: str) -> Iterator[None]:
    """Raise InputError if a disk is full or access is denied."""

    def explain(error: BaseException) -> InputError | None:
        problem = machine_problem(error)
        if not problem:
            return None
        places = places_of(error, problem)
        where = " or ".join(describe_place(place, problem) for place in places)
        settings = filter(None, map(setting_of, places))
        advice = ["Free space or grant access there", *(f"or set {one}" for one in dict.fromkeys(settings))]
        return InputError(f"{stage} can't continue: {problem}: {where}. {', '.join(advice)}; then run again.")

    with explain_errors(explain):
        yield


def machine_problem(error: BaseException) -> str:
    """The system's words for an error of the disk or of access rights; empty for any other error."""
    number = getattr(error, "errno", None)
    text = str(error)
    of_rust = re.search(r"\(os error (\d+)\)", text)  # safetensors, tokenizers
    if of_rust:
        number = int(of_rust[1])
    if re.fullmatch(r"\d+ requested and \d+ written", text):  # NumPy, which gives no reason
        number = errno.ENOSPC
    if NO_SCRATCH in text:
        return "No temporary file can be written"
    return os.strerror(number) if number in MACHINE_ERRORS else ""


def places_of(error: BaseException, problem: str) -> list[str]:
    """The path that an error of the disk names; or else the store or TMPDIR, whichever is full, or both."""
    for attribute in ("filename2", "filename"):  # the first is the target of a copy
        path = getattr(error, attribute, None)
        if path:
            return [str(path)]
    if NO_SCRATCH in str(error):
        return re.findall("'(.+?)'", str(error))
    if problem not in NO_SPACE:
        return [str(home.root())]
    by_mount = {mount_of(place): place for place in (tempfile.gettempdir(), str(home.root()))}
    candidates = list(by_mount.values())
    return list(filter(is_full, candidates)) or candidates


def describe_place(place: str, problem: str) -> str:
    """A path in a sentence; if the disk is full, with its file system, since that is what needs space."""
    mount = mount_of(place) if problem in NO_SPACE else place
    return place if mount == place else f"{place}, on the file system at {mount}"


def is_full(folder: str) -> bool:
    """Whether a folder's file system has no room for another file, or for what is in it."""
    about = os.statvfs(mount_of(folder))
    return about.f_bavail * about.f_frsize < LITTLE or 0 == about.f_favail < about.f_files


def mount_of(path: str) -> str:
    """The directory at which the file system of a path is mounted; the path need not exist."""
    real = Path(os.path.realpath(path))
    return str(next(filter(os.path.ismount, (real, *real.parents))))


def setting_of(place: str) -> str:
    """What to set so that files are written elsewhere than at this path; empty if none of cram's settings does that."""
    path = Path(place).absolute()
    if path.is_relative_to(home.root()):
        return "CRAM_ARTIFACTS to another directory"
    with suppress(FileNotFoundError):  # there is no temporary directory
        if not path.is_relative_to(tempfile.gettempdir()):
            return ""
    return "TMPDIR to a directory on another file system"


@contextmanager
def written_in(place: str) -> Iterator[None]:
    """Have the error of a full disk name the place, which Python's own doesn't when a file is written."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            error.filename = error.filename or place
        raise
