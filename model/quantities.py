"""Numbers with their units, as sentences and tables show them."""

UNITS = (("hour", 3600), ("minute", 60), ("second", 1))


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
