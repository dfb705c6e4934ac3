"""What is said of an artifact in listings and logs."""

from datetime import UTC, datetime, timedelta

import pytest
from conftest import store_of_its_own, toy_tokens

from flows.summary import age, brief_duration, counts, size
from tasks.text.printable import printable


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]):
    root = tmp_path_factory.mktemp("toy")
    with store_of_its_own(root / "artifacts"):
        yield toy_tokens(root, toy_texts)


def test_each_data_stage_is_told_by_what_it_counts(toy: dict):
    stats = {name: artifact.stats for name, artifact in toy.items()}
    kept = stats["filter"]
    assert counts(stats["download"]) == "301 documents"
    assert counts(stats["filter"]) == f"{kept['documents']} of {kept['seen']['documents']} documents kept"
    assert counts(stats["vocabulary"]) == "400 entries"
    assert counts(stats["tokens"]) == f"{stats['tokens']['sequences']} sequences"


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
        ({"heldout_loss": 5.95321, "tokens": 3}, "held-out loss 5.9532"),
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


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([size(n) for n in (0, 999, 136_000, 2_500_000, 12_100_000_000)], "0 B|999 B|136 kB|2 MB|12.1 GB"),
        ([brief_duration(s) for s in (0.04, 12.84, 68, 86_400)], "0.0 s|12.8 s|1.1 min|24.0 h"),
        ([age(when) for when in ("no date", "2026-11-22T07:00:00")], "|"),
    ],
)
def test_quantities_are_in_units_that_suit_them(shown: list[str], expected: str):
    assert "|".join(shown) == expected


@pytest.mark.parametrize(
    ("ago", "shown"),
    [({"seconds": 5}, "0 min"), ({"minutes": 59}, "59 min"), ({"hours": 47}, "47 h"), ({"days": 3}, "3 days"), ({"days": -1}, "0 min")],
)  # fmt: skip
def test_an_age_is_in_whole_units(ago: dict, shown: str):
    assert age((datetime.now(UTC) - timedelta(**ago)).isoformat()) == shown
