"""What is said of an artifact in listings and logs."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from flows.summary import age, brief_duration, counts, size
from tasks.text.printable import printable


def split(score: float, **changes) -> dict:
    return {"metrics": {"accuracy": score}} | changes


def scored(*tasks: str) -> list[dict]:
    return [{"task": task, "score": 50.0, "pretrained": kind} for task in tasks for kind in (True, False)]


MNLI = {"task": "mnli", "metric": "accuracy", "validation": {"m": split(81.24), "mm": split(82)}}
WEAK = split(53.0, intervals={"accuracy": [50.0, 56.0]}, majority={"accuracy": 50.0})
BETTER = split(53.0, intervals={"accuracy": [50.1, 56.0]}, majority={"accuracy": 50.0})


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"documents": 1}, "1 document"),
        ({"documents": 5, "lost": {"empty text": 2, "not UTF-8": 1}}, "5 documents, 3 lost"),
        ({"documents": 1, "dropped": {}}, "1 of 1 document kept"),
        ({"documents": 9000, "checked": False, "dropped": {}}, "9,000 documents, unchecked"),
        ({"heldout_loss": 5.9, "heldout": {"nats_per_byte": {"value": 1.23456}}}, "held-out loss 1.2346 nats per byte"),
        (MNLI, "mnli 81.2 / 82.0 accuracy"),
        (MNLI | {"task": "rte", "validation": {"validation": WEAK}}, "rte 53.0 accuracy (≤ majority)"),
        (MNLI | {"task": "rte", "validation": {"validation": BETTER}}, "rte 53.0 accuracy"),
        ({"average": 78.26, "table": []}, "GLUE average 78.3"),
        ({"average": None, "table": scored("a", "b", "c", "d")}, "a 50.0, b 50.0, c 50.0 and 1 more"),
    ],
)
def test_the_most_telling_number_is_chosen_by_what_was_counted(stats: dict, said: str):
    assert counts(stats) == said


@pytest.mark.parametrize(
    "stats",
    [{}, {"new": 1}, {"documents": "many"}, {"validation": 3}, {"average": None, "table": [{}]}, {"dropped": []}],
)
def test_statistics_of_other_versions_are_no_error(stats: dict):
    assert counts(stats) == ""


@pytest.mark.parametrize("text", ["\x1b[31m", "\x07", "\x9b31m", "\r", "\x7f", "\u202e", "\u2028", "\ud800", "a\nb"])
def test_control_characters_are_escaped(text: str):
    shown = printable(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert printable("caf\u00e9 \u4e2d\n", lines=True) == "caf\u00e9 \u4e2d\n"


def age_after(**since: float) -> str:
    return age((datetime.now(UTC) - timedelta(**since)).isoformat())


@pytest.mark.parametrize(
    ("told", "values"),
    [
        (size, {0: "0 B", 999: "999 B", 136_000: "136 kB", 2_500_000: "2 MB", 12_100_000_000: "12.1 GB"}),
        (brief_duration, {0.04: "0.0 s", 12.84: "12.8 s", 68: "1.1 min", 86_400: "24.0 h"}),
        (age, {"no date": "", "2026-11-22T07:00:00": ""}),
        (lambda minutes: age_after(minutes=minutes), {0.1: "0 min", 59: "59 min", -1440: "0 min"}),
        (lambda hours: age_after(hours=hours), {47: "47 h", 72: "3 days"}),
    ],
)
def test_quantities_are_in_units_that_suit_them(told: Callable[[object], str], values: dict):
    assert {value: told(value) for value in values} == values
