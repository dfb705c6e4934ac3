"""Settings of this machine that the user gives in environment variables. None of them enters a key."""

import os

from model import InputError


def choice(name: str, choices: tuple[str, ...]) -> str:
    """The variable's value, one of `choices`; "auto" if it is unset or empty. Raises InputError for other values."""
    value = os.environ.get(name) or "auto"
    if value not in ("auto", *choices):
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(('auto', *choices))}, or unset.")
    return value


def whole_number(name: str, default: str) -> int | None:
    """The variable's value, a positive number; None if it is unset or empty. `default` says what cram uses then."""
    value = os.environ.get(name, "")
    if value and not (value.isdecimal() and int(value) > 0):
        raise InputError(f"{name} is {value!r}; expected a positive whole number, or unset for {default}.")
    return int(value) if value else None
