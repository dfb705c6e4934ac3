"""The encoder and its training loops. Needs torch, numpy, safetensors and pydantic; `hf.py` needs transformers too."""

import errno
import io
import os
import sys
from pathlib import Path

# OpenMP's threads, which torch computes with, spin while they wait for each other. Beside other work on the machine
# they spin on the cores that the others need: a training of two threads then got a fifth of its share of two cores.
# Waiting in the kernel costs a sleep and a wake-up, up to a fifth of a step in virtual machines where those are slow.
# So they spin for a short while first (docs/log/2026-11.md, "threads that spin"). It has to be set before torch is
# loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")


class InputError(ValueError):
    """An error in the user's input or environment; its message says what was found, expected and what to do."""


class Unreachable(InputError):
    """The network or the other side is lost; a later attempt may succeed."""


def choice(name: str, choices: tuple[str, ...]) -> str:
    """The environment variable's value, one of `choices`; "auto" if it is unset or empty. InputError for others."""
    value = os.environ.get(name) or "auto"
    if value not in ("auto", *choices):
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(('auto', *choices))}, or unset.")
    return value


def whole_number(name: str, default: str) -> int | None:
    """The environment variable's value, above 0; None if it is unset or empty. `default` is what cram uses then."""
    value = os.environ.get(name, "")
    if value and not (value.isdecimal() and int(value) > 0):
        raise InputError(f"{name} is {value!r}; expected a positive whole number, or unset for {default}.")
    return int(value) if value else None


UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system says to what it can't do


def fsync(path: Path) -> None:
    """Force a file, or the names in a directory, to disk, where the file system can; some can't for a directory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            error.filename = str(path)
            raise
    finally:
        os.close(handle)


def print_anything() -> None:
    r"""Have this process print a character that its output's encoding lacks as \uXXXX, and not end with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


TENTHS = "tenths"  # in a model's folder: models at tenths of its budget, in folders named 10 to 90
UNITS = (("hour", 3600), ("minute", 60), ("second", 1))  # for sentences and tables


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds in the largest unit that makes the number at least 1: `24 hours`, `1.5 minutes`, `7.75 seconds`."""
    unit, size = next((unit for unit in UNITS if round(seconds / unit[1], 2) >= 1), UNITS[-1])
    value = seconds / size
    shown = f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
    return f"{shown} {unit if shown == '1' else unit + 's'}"


def budget(amount: float, unit: str) -> str:
    """A budget in hours, tokens or flops: `20 minutes`, `10,000,000 tokens`, `6.7e+18 flops`."""
    if unit == "hours":
        return duration(3600 * amount)
    return counted(round(amount), "token") if unit == "tokens" else f"{amount:g} {unit}"


def span(low: float, high: float) -> str:
    """A range of scores, such as `48.4 to 51.2`; one number if both ends round to the same."""
    ends = f"{low:.1f}", f"{high:.1f}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
