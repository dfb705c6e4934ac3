"""Lists as text, as pandas, numpy, JSON and databases write them into one cell of a file; and vectors of 0 and 1."""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

STRING = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
CALL = r"(?:array|tensor|frozenset|set|list)\("
LIST = re.compile(rf"({CALL})?\s*([\[({{])(.*)[\])}}](?(1)\s*(?:,\s*\w+=[\w.<>:']+)*\s*\))", re.DOTALL)
OPENING = re.compile(rf"\s*(?:{CALL}\s*)?[\[{{]")  # how no class begins
EMPTY = {"set()", "frozenset()"}
SCALAR = re.compile(rf"\bnp\.(?:(True|False)_|\w+\(((?:{STRING}|[^()'\"])*)\))")  # numpy's, as in a list of Python's
ITEM = re.compile(rf"\s*(?:({STRING})\s*(?:,|(?=['\"])|$)|([^,'\"\[\]{{}}]+)(?:,|(?=['\"])|$))", re.DOTALL)
CONSTANTS = {"true": True, "false": False, "none": None, "null": None, "nan": None}
ZEROS_AND_ONES = re.compile(r"[01](\.0*)?(\s+[01](\.0*)?)+")  # a vector without brackets
NO_NUMBER = object()


def plain_value(text: str) -> Any:
    """The number, boolean or None that a word stands for; NO_NUMBER if it is some other word."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    try:
        value = float(text)
    except ValueError:
        return NO_NUMBER
    return int(value) if value.is_integer() else value


def items_of(body: str) -> list | None:
    """What stands between the brackets of a list; None if it can't be read."""
    body = body.strip()
    items: list = []
    at = 0
    while at < len(body):
        match = ITEM.match(body, at)
        if not match:
            return None
        at = match.end()
        quoted, bare = match.groups()
        if quoted:
            try:
                items.append(ast.literal_eval(quoted.replace("\n", "\\n")))
            except (SyntaxError, ValueError):  # of an escape such as \\x
                return None
            continue
        words = bare.split()
        if "..." in words:  # numpy shortens what is longer than 1,000
            return None
        values = [plain_value(word) for word in words]
        if NO_NUMBER in values:
            items.append(" ".join(words))
        else:
            items += values
    return items


def parse_list(text: str) -> list | None:
    """The list that a text stands for, such as `['a', 'b']`, `["a"]`, `['a' 'b']`, `{a,b}`, `[0. 1.]`; None for others.

    In round brackets, which a class may have too, there must be strings in quotes or numbers.
    """
    text = text.strip()
    if text in EMPTY:
        return []
    if ZEROS_AND_ONES.fullmatch(text):
        return [plain_value(word) for word in text.split()]
    match = LIST.fullmatch(text)
    if not match:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if isinstance(found, list):
        return found
    _, bracket, body = match.groups()
    items = items_of(SCALAR.sub(lambda scalar: scalar[1] or scalar[2], body))
    if items is None or (bracket == "(" and not is_clearly_list(text, items)):
        return None
    return items


def is_clearly_list(text: str, items: list) -> bool:
    """Whether a program wrote the list: its strings have quotes, or it has several numbers and nothing else."""
    if re.search(STRING, text):
        return True
    has_words = any(isinstance(item, str) for item in items)
    return not has_words and len(items) != 1


# Vectors


def bit(name: str) -> bool | None:
    """What a name of a class says of a place in a vector: 0, 1, 0.0, true and so on; None if it is another name."""
    value = CONSTANTS.get(name.lower())
    if value is not None:
        return value
    try:
        number = float(name)
    except ValueError:
        return None
    return bool(number) if number in (0, 1) else None


class Vectors(NamedTuple):
    """What lists of labels are, if they are vectors."""

    size: int = 0  # places; 0: they are not vectors
    expected: str = ""  # of what is wrong with them, if anything is
    fits: Callable[[Sequence[str]], bool] = lambda row: True


def find_vectors(rows: Collection[Sequence[str]]) -> Vectors:
    """Whether lists of labels, none of them empty, are vectors of 0 and 1: all of one length, of 2 or more.

    Wrong are such of several lengths, which have a value twice, and numbers of one length that are twice or fractions.
    """
    sizes = Counter(map(len, rows))
    usual = sizes.most_common(1)[0][0] if sizes else 0
    one_length = len(sizes) == 1 and usual > 1
    names = {name for row in rows for name in row}
    bits = {name: bit(name) for name in names}
    if names and None not in bits.values():
        if one_length:
            return Vectors(usual)
        if any(len({bits[name] for name in row}) < len(row) for row in rows):
            expected = f"vectors of 0 and 1 that are all of one length, such as {usual}, or names of classes"
            return Vectors(0, expected, lambda row: len(row) == usual)
    if one_length and look_like_vectors(rows, names):
        expected = f"0 or 1 in vectors, which they look like since all have {usual} numbers, or names of classes"
        return Vectors(0, expected, lambda row: all(bits[name] is not None for name in row))
    return Vectors()


def look_like_vectors(rows: Collection[Sequence[str]], names: Collection[str]) -> bool:
    """Whether lists of one length have numbers only, with fractions or some number twice in a row."""
    numbers = [plain_value(name) for name in names]
    if not all(isinstance(number, int | float) for number in numbers):
        return False
    fractions = any(isinstance(number, float) for number in numbers)
    return fractions or any(len(set(row)) < len(row) for row in rows)


def as_classes(row: Sequence[str] | None) -> tuple[str, ...] | None:
    """The classes of a vector, by their places; None for a row without one."""
    if not row or not any(row):
        return None
    return tuple(str(place) for place, name in enumerate(row) if bit(name))
