"""Numbers, durations and budgets in words, and text made safe to print."""

import re
from contextlib import suppress
from datetime import UTC, datetime

UNITS = (("hour", 3600), ("minute", 60), ("second", 1))  # for sentences and tables

# C0, DEL, C1, line and paragraph separators, bidirectional overrides, and surrogates, which no stream accepts
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`."""
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds in the largest unit that makes the number at least 1: `24 hours`, `1.5 minutes`, `7.75 seconds`."""
    unit, size = largest_unit(seconds)
    value = seconds / size
    shown = f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
    if shown != "1":
        unit += "s"
    return f"{shown} {unit}"


def largest_unit(seconds: float) -> tuple[str, int]:
    """The largest unit, with its seconds, of which this is at least 1 when rounded; or the smallest."""
    for unit, size in UNITS:
        if round(seconds / size, 2) >= 1:
            return unit, size
    return UNITS[-1]


def brief_duration(seconds: float) -> str:
    """Seconds for a column of a table: `7.8 s`, `1.5 min`, `24.0 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def age(when: str) -> str:
    """The time since an ISO date in whole units: `59 min`, `47 h`, `2 days`; empty for text that isn't a date."""
    with suppress(ValueError, TypeError):
        since = datetime.now(UTC) - datetime.fromisoformat(when)
        minutes = max(0, int(since.total_seconds() // 60))
        if minutes < 60:
            return f"{minutes} min"
        if minutes < 48 * 60:
            return f"{minutes // 60} h"
        return f"{minutes // (24 * 60)} days"
    return ""


def budget(amount: float, unit: str) -> str:
    """A budget in hours, tokens or flops: `20 minutes`, `10,000,000 tokens`, `6.7e+18 flops`."""
    if unit == "hours":
        return duration(3600 * amount)
    if unit == "tokens":
        return counted(round(amount), "token")
    return f"{amount:g} {unit}"


def span(low: float, high: float) -> str:
    """A range of scores, such as `48.4 to 51.2`; one number if both ends round to the same."""
    lower = f"{low:.1f}"
    upper = f"{high:.1f}"
    return lower if lower == upper else f"{lower} to {upper}"


def printable(text: object, lines: bool = False) -> str:
    r"""The text with control characters as \uXXXX, so that a file's contents can't control the terminal.

    `lines`: keep line feeds.
    """

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        if lines and character == "\n":
            return character
        return f"\\u{ord(character):04x}"

    return CONTROL.sub(escape, str(text))
