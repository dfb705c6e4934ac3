"""Numbers, durations and budgets in words, and text made safe to print."""

import math
import re
from contextlib import suppress
from datetime import UTC, datetime
from fractions import Fraction

UNITS = (("hour", 3600), ("minute", 60), ("second", 1))  # for sentences and tables
NUMBER = r"(\d{1,3}(?:,\d{3})+|\d*\.?\d+(?:e[+-]?\d{1,3})?)"  # commas between thousands only
MULTIPLES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# of a budget, with the words for each and what they stand for
BUDGET_UNITS: dict[str, dict[str, Fraction | int]] = {
    "hours": {
        "day": 24,
        "hour": 1,
        "h": 1,
        "minute": Fraction(1, 60),
        "min": Fraction(1, 60),
        "second": Fraction(1, 3600),
        "s": Fraction(1, 3600),
    },
    "tokens": {"token": 1},
    "flops": {"flop": 1, "exaflop": 10**18},
    "epochs": {"epoch": 1},
}
BUDGET = re.compile(rf"{NUMBER} *({'|'.join(MULTIPLES)})? *([a-z]*)")
BUDGETS = ("20 minutes", "1.5 hours", "10 million tokens", "10 epochs", "1e18 flops")  # examples

# C0, DEL, C1, line and paragraph separators, bidirectional overrides, and surrogates, which no stream accepts
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, noun: str) -> str:
    """`1 document`, `1,234 documents`."""
    if number != 1:
        noun += "s"
    return f"{number:,} {noun}"


def number_in_words(number: float) -> str:
    """A number with six digits, or all those in front of its point: `3.5`, `0.00123457`, `1,234,567`.

    With an exponent from 1e15 on.
    """
    if 1e5 <= abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:,.6g}"


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
    """A budget in hours, tokens, epochs or flops: `20 minutes`, `10,000,000 tokens`, `1 epoch`, `6.7e+18 flops`."""
    if unit == "hours":
        return duration(3600 * amount)
    if unit == "tokens":
        return counted(round(amount), "token")
    if amount == 1:
        unit = unit.removesuffix("s")
    return f"{amount:g} {unit}"


def parse_budget(text: str) -> tuple[float, str]:
    """The amount and the unit (hours, tokens, epochs, flops; empty for a number alone) of a budget in words.

    The amount is the number nearest to what the words say, so 20 minutes are exactly 1/3 hours. Raises ValueError if
    the words are no budget.
    """
    match = BUDGET.fullmatch(text.strip().lower())
    if match:
        number, multiple, word = match.groups()
        amount = Fraction(number.replace(",", "")) * MULTIPLES.get(multiple, 1)
        if not word:
            return nearest_float(amount), ""
        for unit, sizes in BUDGET_UNITS.items():
            size = sizes.get(word) or sizes.get(word.removesuffix("s"))
            if size:
                return nearest_float(amount * size), unit
    examples = [repr(example) for example in BUDGETS]
    raise ValueError(
        f"budget is {text!r}; expected a number and its unit, such as {', '.join(examples[:-1])} or {examples[-1]}"
    )


def nearest_float(value: Fraction) -> float:
    """The number nearest to a value; infinite if that is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


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
