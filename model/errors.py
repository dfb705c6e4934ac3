"""Errors and warnings that a person reads."""

import functools
import logging


class InputError(ValueError):
    """An error in the user's input or environment; its message says what was found, expected and what to do."""


class Unreachable(InputError):
    """The network or the other side is lost; a later attempt may succeed."""


@functools.cache
def warn_once(warning: str) -> None:
    """Log a warning once, although what it is about is found when a run is planned, or in every step, and again."""
    logging.getLogger(__name__).warning(warning)
