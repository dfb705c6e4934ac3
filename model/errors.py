"""Errors and warnings that a person reads."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """An error in the user's input or environment; its message says what was found, expected and what to do."""


class Unreachable(InputError):
    """The network or the other side is lost; a later attempt may succeed."""


@functools.cache
def warn_once(warning: str) -> None:
    """Log a warning once in this process, however often its cause is found."""
    logging.getLogger(__name__).warning(warning)


@contextmanager
def explain_errors(explain: Callable[[BaseException], InputError | None]) -> Iterator[None]:
    """Raise what `explain` makes of an error of another library.

    Errors for which it returns None, and those that are InputErrors already, pass unchanged.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:  # tokenizers' panics are no Exceptions
        explained = explain(error)
        if explained is None:
            raise
        raise explained from error
