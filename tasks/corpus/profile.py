"""What the columns of rows hold, by a sample of the rows: prose, names, numbers or lists."""

import statistics
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

DEEPEST = 3  # levels of objects within a record whose fields are looked at
LEAST_CHARACTERS = 8  # of the median of a column with prose
LEAST_LETTERS = 0.5  # of the visible characters of prose
LEAST_BLANKS = 0.5  # of the values that have a blank, unless they are in a script without blanks
LEAST_DIFFERENT = 0.2  # of the values of a column with prose; names of classes repeat
LONG = 100  # characters in the median, from which a column is prose however often its values repeat
MANY_LETTERS = 5  # characters beyond ASCII in a value that may have no blanks


class Profile:
    """The values of a column in a sample of rows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[Any] = []  # those that are there
        self.gaps = 0

    def add(self, value: Any) -> None:
        """Take the value of the next row; None, an empty string and nan are gaps."""
        is_gap = value is None or value != value or (isinstance(value, str) and not value.strip())
        if is_gap:
            self.gaps += 1
        else:
            self.values.append(value)

    @cached_property
    def strings(self) -> list[str]:
        """The values that are strings."""
        return [value for value in self.values if isinstance(value, str)]

    @cached_property
    def different(self) -> int:
        """The number of different values."""
        return len(set(map(str, self.values)))

    @cached_property
    def length(self) -> float:
        """The median length of the strings, in characters; 0 if there is none."""
        return statistics.median(map(len, self.strings)) if self.strings else 0

    @cached_property
    def numbers(self) -> list[float] | None:
        """The values as numbers; None if one of them isn't a finite number."""
        found = []
        for value in self.values:
            number = as_number(value)
            if number is None:
                return None
            found.append(number)
        return found

    @cached_property
    def is_index(self) -> bool:
        """Whether it counts the rows, or names each of them by a whole number."""
        numbers = self.numbers
        if not numbers or not all(number.is_integer() for number in numbers):
            return False
        return len(numbers) > 2 and len(set(numbers)) == len(numbers) and numbers == sorted(numbers)

    @cached_property
    def is_prose(self) -> bool:
        """Whether the values are texts that somebody wrote, and not names, dates, addresses or numbers."""
        if not self.strings or len(self.strings) < len(self.values) or self.length < LEAST_CHARACTERS:
            return False
        if self.length < LONG and self.different < LEAST_DIFFERENT * len(self.values):
            return False
        has_blanks = sum(map(may_be_words, self.strings)) >= LEAST_BLANKS * len(self.strings)
        return has_blanks and share_of_letters(self.strings) >= LEAST_LETTERS


def as_number(value: Any) -> float | None:
    """A number, or a string that is one, as a float; None for all else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, str) and "_" in value:  # a code such as 3_5, which Python would read as 35
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def may_be_words(text: str) -> bool:
    """Whether a text has a blank within, or is in a script that may have none."""
    if len(text.split()) > 1:
        return True
    beyond = [character for character in text if character > "\x7f" and character.isalpha()]
    return len(beyond) >= MANY_LETTERS


def share_of_letters(texts: Iterable[str]) -> float:
    """The letters among the visible characters of texts."""
    visible = letters = 0
    for text in texts:
        packed = "".join(text.split())
        visible += len(packed)
        letters += sum(map(str.isalpha, packed))
    return letters / max(1, visible)


def profiles_of(rows: Sequence[dict]) -> dict[str, Profile]:
    """What each column of rows holds, by name; a field within another is named as `doc.text`."""
    found: dict[str, Profile] = {}
    for row in rows:
        for name in fields_of(row):
            found.setdefault(name, Profile(name))
    for row in rows:
        fields = fields_of(row)
        for name, profile in found.items():
            profile.add(fields.get(name))
    return found


def fields_of(row: dict, path: str = "", level: int = 1) -> dict[str, Any]:
    """The fields of a record, with those of the objects in it, by their paths."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and level < DEEPEST:
            fields |= fields_of(value, f"{path}{name}.", level + 1)
        else:
            fields[f"{path}{name}"] = value
    return fields


def prose_in(profiles: dict[str, Profile]) -> list[Profile]:
    """The columns with prose, that with the longest texts first."""
    return sorted((profile for profile in profiles.values() if profile.is_prose), key=lambda one: -one.length)
