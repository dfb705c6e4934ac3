"""Settings from environment variables, and the output of this process."""

import io
import os
import sys

from model.errors import InputError


def choice(name: str, choices: tuple[str, ...]) -> str:
    """The environment variable's value, one of `choices`; "auto" if it is unset or empty. InputError for others."""
    value = os.environ.get(name) or "auto"
    if value not in ("auto", *choices):
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(('auto', *choices))}, or unset.")
    return value


def whole_number(name: str, default: str) -> int | None:
    """The environment variable's value, above 0; None if it is unset or empty. `default`: what cram uses then."""
    value = os.environ.get(name, "")
    if not value:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise InputError(f"{name} is {value!r}; expected a positive whole number, or unset for {default}.")
    return int(value)


def print_anything() -> None:
    r"""Let this process print characters that its output's encoding lacks as \uXXXX, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
