"""Tags of tokens, by which models mark names and other spans: IOB2 and BIOES, and BILOU under the names of BIOES."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

OUTSIDE = "O"
MARKS = ("B-", "I-", "E-", "S-")  # how the tags of spans begin
BILOU = {"L-": "E-", "U-": "S-"}  # other names for ends and single tokens of spans


class Span(NamedTuple):
    """A run of tokens that are one entity."""

    start: int
    stop: int  # the token after the last
    name: str  # as PER of B-PER


def spans_of(tags: Sequence[str]) -> list[Span]:
    """The spans that tags mark, in order. Every tag is OUTSIDE or begins with one of MARKS.

    A span that lacks its beginning or its end counts, as in the evaluation of CoNLL 2003 and in seqeval: `I-` and `E-`
    continue an open span of their name and otherwise begin one.
    """
    spans: list[Span] = []
    open_name = None
    for place, tag in enumerate(tags):
        mark, _, name = tag.partition("-")
        if tag == OUTSIDE:
            open_name = None
            continue
        if mark in ("I", "E") and name == open_name:
            spans[-1] = spans[-1]._replace(stop=place + 1)
        else:
            spans.append(Span(place, place + 1, name))
        open_name = name if mark in ("B", "I") else None
    return spans


def mark_spans(tags: Iterable[str]) -> bool:
    """Whether all of these tags mark spans or what is outside of them."""
    return all(tag == OUTSIDE or tag.startswith(MARKS) for tag in tags)


def as_bioes(tag: str) -> str:
    """A tag by its name in BIOES."""
    return BILOU.get(tag[:2], tag[:2]) + tag[2:]


def within_words(tags: Sequence[str]) -> np.ndarray:
    """For each tag the number of that of the word's further parts: `I-` after `B-`, `E-` after `S-`, or the same."""
    later = {"B-": "I-", "S-": "E-"}
    numbers = []
    for number, tag in enumerate(tags):
        name = later.get(tag[:2], tag[:2]) + tag[2:]
        numbers.append(tags.index(name) if name in tags else number)
    return np.array(numbers)
