"""The stages of the pipeline, one a file; and text from any file, made safe to print."""

import functools
import logging
import re

# C0, DEL, C1, line and paragraph separators, bidirectional overrides, and surrogates, which no stream accepts
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@functools.cache
def warn_once(warning: str) -> None:
    """Log a warning once, although what it is about is found when a run is planned, or in every step, and again."""
    logging.getLogger(__name__).warning(warning)


def printable(text: object, lines: bool = False) -> str:
    r"""The text with control characters as \uXXXX, so that a file's contents can't control the terminal.

    `lines`: keep line feeds.
    """
    return CONTROL.sub(lambda match: match[0] if lines and match[0] == "\n" else f"\\u{ord(match[0]):04x}", str(text))
