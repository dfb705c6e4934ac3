"""Numbers with their units, as sentences and tables show them."""

UNITS = (("hour", 3600), ("minute", 60), ("second", 1))


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """As in `1 document` and `1,234 documents`; `plural` where it isn't the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds in the largest unit of which they are one or more, as in `24 hours`, `1.5 minutes` and `7.75 seconds`."""
    unit, of = next((unit for unit in UNITS if round(seconds / unit[1], 2) >= 1), UNITS[-1])
    value = seconds / of
    shown = f"{value:,.0f}" if value >= 10**digits else f"{value:.{digits}g}"
    return f"{shown} {unit if shown == '1' else unit + 's'}"


def budget(amount: float, unit: str) -> str:
    """A budget in hours, tokens or flops, as in `20 minutes`, `10,000,000 tokens` and `6.7e+18 flops`."""
    if unit == "hours":
        return duration(3600 * amount)
    return counted(round(amount), "token") if unit == "tokens" else f"{amount:g} {unit}"


def span(low: float, high: float) -> str:
    """A range of scores, as in `48.4 to 51.2`; one number where both ends are shown alike."""
    ends = f"{low:.1f}", f"{high:.1f}"
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)
