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
def explain_errors(explain: Callable[[Exception], str]) -> Iterator[None]:
    """Raise InputError with the sentence that `explain` has for an error of another library.

    Errors for which it returns an empty string, and those that are InputErrors already, pass unchanged.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        sentence = explain(error)
        if not sentence:
            raise
        raise InputError(sentence) from error
