"""The head of a report: whether pretraining was worth it, the cards, and examples of answers."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.glue.table import TASKS, Task
from tasks.reports import cards, examples, funnel
from tasks.reports.scores import data_notes
from tasks.reports.verdict import compare, comparison_rows, difference_of, verdict


def row(task: str, score: float, half: float = 2.0, pretrained: bool = True, majority: float = 50.0, **changes) -> dict:
    """A row of a score with this half of its interval."""
    interval = [score - half, score + half]
    return {
        "task": task, "pretrained": pretrained, "share": 1.0, "split": "validation", "column": task,
        "metric": "accuracy", "score": score, "by_seed": {"0": score}, "seeds": 1, "partial": False,
        "metrics": {"accuracy": {"median": score, "range": [score, score], "interval": interval}},
        "majority": {"accuracy": majority}, "beats_majority": interval[0] > majority,
        "examples": {"train": [100, 0], "validation": [200, 0]},
    } | changes  # fmt: skip


def pair(task: str, score: float, without: float) -> list[dict]:
    """The rows of a task with and without pretraining."""
    return [row(task, score), row(task, without, pretrained=False)]


@pytest.mark.parametrize(
    ("rows", "learned", "said", "unsaid"),
    [
        (pair("a", 80.0, 70.0), True, ["Pretraining helps", "10.0 points above", "+7.2 to +12.8"], ["nothing"]),
        (pair("a", 70.0, 80.0), True, ["Pretraining hurts", "10.0 points below"], ["helps"]),
        (pair("a", 71.0, 70.0), True, ["no certain difference"], ["helps", "hurts"]),
        (pair("a", 80.0, 70.0), False, ["learned nothing", "Pretraining helps"], []),
        (pair("a", 80.0, 70.0) + pair("b", 70.0, 80.0) + pair("c", 60.0, 60.5), True,
         ["helps on 1 of 3 scores (a from 70.0 to 80.0)", "hurts on 1 (b", "On 1 the difference may be chance (c"], []),
        ([one for task in "abcd" for one in pair(task, 80.0, 70.0)], True,
         ["helps on all 4 scores", "10.0 points above"], ["from 70.0"]),
        ([row("a", 80.0)], True, ["better than always giving the same answer (50.0)", "not measured"], ["helps on"]),
        ([row("a", 51.0)], True, ["not certainly better"], []),
        ([row("a", 51.0), row("b", 80.0)], True, ["1 of 2 scores are certainly better"], []),
        ([row("a", 51.0), row("b", 50.0)], True, ["None of 2 scores is certainly better"], []),
        ([*pair("a", 80.0, 70.0), row("b", 51.0)], True, ["Pretraining helps: a", "b: 51.0"], ["not measured"]),
        ([row("a", 60.0, majority=60.0), row("a", 50.0, pretrained=False)], True,
         ["Pretraining helps: a", "But the score is not certainly better than", "same answer (60.0)"], []),
        (pair("a", 70.0, 80.0) + pair("b", 51.0, 60.0), True,
         ["doesn't certainly help on any of the 2 scores", "hurts on 2", "1 of the 2 (b) is not certainly better"], []),
        ([row("a", 50.0, pretrained=False)], True, ["no score"], ["helps", "better"]),
    ],
)  # fmt: skip
def test_the_first_sentence_says_whether_pretraining_was_worth_it(rows, learned, said, unsaid):
    sentence = verdict(rows, learned)
    assert all(words in sentence for words in said), sentence
    assert not any(words in sentence for words in unsaid), sentence


def test_the_interval_of_a_difference_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    shares = np.array([0.8, 0.7])
    counts = rng.binomial(400, shares, size=(2000, 2)) / 400
    halves = 1.96 * np.sqrt(counts * (1 - counts) / 400)
    covered = []
    for (ours, theirs), (half, other_half) in zip(100 * counts, 100 * halves, strict=True):
        _, (low, high) = difference_of(row("a", ours, half), row("a", theirs, other_half))
        covered.append(low <= 10 <= high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_of_two_seeds_the_interval_is_measured_from_its_own_and_seeds_that_overlap_say_nothing():
    spread = {"median": 80.0, "range": [78.0, 82.0], "interval": [76.0, 80.0]}  # of the lower seed
    seeds = {"by_seed": {"0": 82.0, "1": 78.0}, "seeds": 2, "metrics": {"accuracy": spread}}
    ours = row("a", 80.0, **seeds)
    [clear] = compare([ours, row("a", 70.0, pretrained=False)])
    assert clear.interval == pytest.approx((10 - math.hypot(2, 2), 10 + math.hypot(2, 2)))
    assert clear.sign == 1
    metrics = {"accuracy": {"median": 76.0, "range": [73.0, 79.0], "interval": [72.9, 73.1]}}
    theirs = row("a", 76.0, pretrained=False, by_seed={"0": 73.0, "1": 79.0}, seeds=2, metrics=metrics)
    [unclear] = compare([ours, theirs])
    assert unclear.interval[0] > 0
    assert unclear.sign == 0


def test_shares_of_the_data_and_missing_baselines_are_not_compared():
    rows = [*pair("a", 80.0, 70.0), row("a", 60.0, share=0.5), row("b", 60.0)]
    found = compare(rows)
    assert [(one.row["column"], one.difference) for one in found] == [("a", 10.0), ("b", None)]
    table = comparison_rows(found)
    assert [line["difference"] for line in table] == ["+10.0 (+7.2 to +12.8)", None]
    assert "no pretraining" not in comparison_rows(found[1:])[0]


# Cards


def test_the_loss_is_the_chance_of_the_right_word():
    held = {
        "nats_per_word": {"value": math.log(50), "standard_error": 0.05},
        "nats_per_byte": {"value": math.log(50) / 5, "standard_error": None},
        "by_frequencies": {"nats_per_byte": math.log(1000) / 5},
    }
    card = cards.loss_card(held)
    assert card.number == "1 in 50"
    assert "alone 1 in 1,000;" in card.note
    assert "3.91 ± 0.05 nats a word, 0.782 a byte" in card.note


@pytest.mark.parametrize(("odds", "shown"), [(1.25, "1.2"), (9.96, "10.0"), (47.4, "47"), (12_345, "12,000")])
def test_chances_have_two_digits(odds, shown):
    assert cards.chance(math.log(odds)) == f"1 in {shown}"


# Examples


def answers(tmp_path: Path, task: Task, **columns: list) -> dict:
    """The answers in a file of predictions."""
    n = len(columns["label"])
    pq.write_table(pa.table({"split": ["validation"] * n, "row": range(n), **columns}), tmp_path / "p.parquet")
    return examples.answers_in(tmp_path / "p.parquet", task, "t", "validation")


def test_the_surest_answers_are_shown_right_and_wrong(tmp_path):
    found = answers(
        tmp_path, TASKS["sst2"], sentence=["s0", "s1", "s2", "s3", "s4"], label=[1, 1, 0, 0, 1],
        prediction=[1, 1, 1, 1, 0], scores=[[0, 1.0], [0, 9.0], [0, 3.0], [0, 4.0], [0.5, 0]],
    )  # fmt: skip
    assert [one["texts"] for one in found["right"]] == [["s1"], ["s0"]]
    assert [one["texts"] for one in found["wrong"]] == [["s3"], ["s2"], ["s4"]]
    first = found["wrong"][0]
    assert (first["label"], first["prediction"]) == ("negative", "positive")
    assert first["probability"] == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-4)
    assert (found["examples"], found["mistakes"]) == (5, 3)


def test_numbers_are_shown_by_their_distance_and_lists_of_labels_as_one_answer(tmp_path):
    number = Task("n", ("text",), (), ("pearson",), {"train": 0, "validation": 0}, kind="regression", own=True)
    numbers = {"label": [1.0, 2.0, 3.0, 4.0], "prediction": [1.5, 2.0, 0.0, 4.1]}
    found = answers(
        tmp_path, number, text=["a", "b", "c", "long " * 99], **numbers, scores=[[p] for p in numbers["prediction"]]
    )
    assert [one["texts"][0][:4] for one in found["right"]] == ["b", "long", "a"]
    assert found["wrong"][0]["texts"] == ["c"]
    assert found["right"][1]["texts"][0].endswith(" …")
    several = Task(
        "m", ("text",), ("x", "y"), ("micro_f1",), {"train": 0, "validation": 0}, kind="multilabel", own=True
    )
    found = answers(
        tmp_path, several, text=["a", "b"], label=[["x"], ["x", "y"]], prediction=[["x"], []],
        scores=[[2.0, -2.0], [-1.0, -1.0]],
    )  # fmt: skip
    assert [one["prediction"] for one in found["right"] + found["wrong"]] == ["x", "none"]
    assert found["right"][0]["probability"] == pytest.approx((1 / (1 + math.exp(-2))) ** 2, abs=1e-4)


def test_large_numbers_keep_their_digits_and_are_ordered_by_them(tmp_path):
    price = Task("n", ("text",), (), ("pearson",), {"train": 0, "validation": 0}, kind="regression", own=True)
    numbers = {"label": [1_000_049.0, 1_000_049.0], "prediction": [1_000_000.0, 1_000_048.0]}
    found = answers(tmp_path, price, text=["far", "near"], **numbers, scores=[[p] for p in numbers["prediction"]])
    nearest = found["right"][0]
    assert (nearest["texts"], nearest["label"], nearest["prediction"]) == (["near"], "1,000,049", "1,000,048")


# Text


@pytest.mark.parametrize("file", ["my.conll", "my: own.csv", "v1.2:x.jsonl.gz", "data"])
def test_notes_lose_the_name_of_the_file_and_keep_what_is_said_of_it(file):
    said = "the label B: x of row 3 is in no training row"
    stats = {"task": "ner", "data": {"notes": [f"ner/{file}: {said}", f"ner/train: {said}"]}}
    assert data_notes(stats) == [f"ner: {said}", f"ner/train: {said}"]


def test_samples_of_what_was_dropped_name_no_files(tmp_path):
    lines = {
        "lost.jsonl": {"file": "/home/me/secret.txt", "line": 1, "reason": "not UTF-8", "sample": "lost text"},
        "duplicates.jsonl": {"method": "exact", "kept": {"text": "k"}, "dropped": {"id": "secret", "text": "twice"}},
        "contaminated.jsonl": {"sentence": "s", "id": "secret", "shared": "in a test"},
        "dropped.jsonl": {"id": "secret", "reason": "incompressible", "text": "zx qw\n" * 99},
    }
    for name, sample in lines.items():
        (tmp_path / name).write_text(3 * (json.dumps(sample) + "\n"))
    folders = dict.fromkeys(("download", "deduplicate", "decontaminate", "filter"), tmp_path)
    found = funnel.samples(folders)
    assert [one.text[:9] for one in found] == ["lost text", "twice", "in a test", "zx qw zx "]
    assert "secret" not in str(found)
    assert funnel.samples({"filter": tmp_path / "gone"}) == []


def test_the_text_is_described_with_its_scripts():
    stats = {"documents": 2000, "characters": 3_000_000}
    lineage = {
        "download/0": {"stage": "download", "params": {"source": {"files": 1, "pile": 2}}, "stats": {}},
        "tokenize/0": {"stage": "tokenize", "params": {}, "stats": stats},
    }
    said = funnel.described(lineage, ["Це українською"] * 3 + ["English"] * 2)
    assert said == "2,000 documents from local files and pile (3.0 M characters, Cyrillic and Latin script)"
    assert funnel.described({}, []) == "text that is not known here"
