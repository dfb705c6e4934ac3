"""Error analysis: by length, kind, error, cutoff, seed and share of the training data."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import matthews_corrcoef

from model import InputError
from tasks.glue import metrics
from tasks.glue.tasks import TASKS
from tasks.reports import errors as analysis
from tasks.reports.errors import OTHERS, by_kind, by_length, cutoffs, errors, kinds_of, learning_curve, seeds_agreement

NAMES = ("unacceptable", "acceptable")
JOINED, PLAIN = "Sue and Bill left.", "Chris handed Bo."


def predicted(labels, scores, texts: list[str] | None = None) -> pd.DataFrame:
    """What the functions take: examples with the prediction that has the highest score."""
    texts = texts or [f"sentence {i}" for i in range(len(labels))]
    about = {"text": texts, "label": labels, "prediction": np.argmax(scores, axis=1), "scores": list(scores)}
    return pd.DataFrame(about)


def answered(labels, predictions, texts: list[str] | None = None) -> pd.DataFrame:
    """The same of these predictions, each with a score of 2 against 0."""
    return predicted(labels, 2.0 * np.eye(2)[np.asarray(predictions)], texts)


def drawn(random: np.random.Generator, examples: int, right: float) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and predictions of which this share is right."""
    labels = random.integers(0, 2, examples)
    return labels, np.where(random.random(examples) < right, labels, 1 - labels)


def random_scores(labels: np.ndarray, classes: int, seed: int, strength: float = 1.5) -> np.ndarray:
    """Scores before softmax of a model that knows something."""
    return np.random.default_rng(seed).normal(size=(len(labels), classes)) + strength * np.eye(classes)[labels]


def table(split: str, labels, scores: np.ndarray, **texts: list[str]) -> pa.Table:
    """A predictions.parquet as runs write it."""
    rows = {"split": [split] * len(scores), "row": range(len(scores)), **texts, "label": labels}
    return pa.table(rows | {"prediction": scores.argmax(axis=1), "scores": list(scores.astype(np.float32))})


UNLABELLED = table("test", pa.nulls(2, pa.int64()), np.eye(2), sentence=["a", "b"])


def test_every_example_is_in_one_range_of_lengths():
    random = np.random.default_rng(0)
    lengths, (labels, predictions) = random.integers(2, 20, 500), drawn(random, 500, right=0.8)
    texts = [" ".join(["word"] * length) + "." for length in lengths]
    *rows, whole = by_length(answered(labels, predictions, texts), NAMES)
    assert len(rows) == 6
    assert sum(row["examples"] for row in rows) == whole["examples"] == 500
    assert max(row["examples"] for row in rows) < 2.5 * min(row["examples"] for row in rows), "about as many in each"
    ranges = [tuple(map(int, row["words"].split(" to "))) for row in rows]
    assert ranges == sorted(ranges)
    for row, ends in zip(rows, ranges, strict=True):
        chosen = (lengths >= ends[0]) & (lengths <= ends[-1])
        expected = {
            "matthews": 100 * matthews_corrcoef(labels[chosen], predictions[chosen]),
            "accuracy": 100 * (labels == predictions)[chosen].mean(),
            "acceptable": 100 * labels[chosen].mean(),
            "predicted acceptable": 100 * predictions[chosen].mean(),
        }
        assert row["examples"] == chosen.sum()
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=0.01)
        assert row["interval"][0] < row["matthews"] < row["interval"][1]


@pytest.mark.parametrize(
    ("kind", "texts", "others"),
    [
        ("question", ["Did Athena help us?"], ["Who? asked Bill."]),
        ("wh-word", ["I know who left."], []),
        ("that, if", ["John heard that they left."], []),
        ("passive", ["The car was never driven.", "The bucket was kicked by Pat.", "They didn't get paid."],
         ["The bookshelf is in need of repair."]),
        ("to and a verb", ["John tries to leave."], ["Mary went to the station."]),
        ("and, or, but", [JOINED], ["The android sang."]),
        ("negation", ["She cannot leave."], ["The notary knows Norman."]),
        ("modal verb", ["She couldn’t leave.", "Sandy won't leave."], ["She isn't here."]),
        ("quantifier", ["Every dog barked."], []),
        ("reflexive", ["They met each other.", "Ourselves like ourselves."], ["The shelves fell."]),
        ("comparison", ["Sue is taller than Bill."], []),
        ("there is", ["There is a unicorn in the garden."], []),
        (OTHERS, [PLAIN, ""], [JOINED]),
    ],
)  # fmt: skip
def test_a_sentence_is_of_the_kinds_that_one_sees_in_it(kind: str, texts: list[str], others: list[str]):
    for text in (*texts, *others):
        assert any(found.startswith(kind) for found in kinds_of(text)) == (text in texts), kinds_of(text)


def test_kinds_are_compared_with_all_other_sentences_and_the_worst_comes_first():
    random = np.random.default_rng(4)
    labels, joined = random.integers(0, 2, 400), np.tile([True, False], 200)
    predictions = np.where(joined & (random.random(400) < 0.5), 1 - labels, labels)
    *rows, whole = by_kind(answered(labels, predictions, [JOINED, PLAIN] * 200), NAMES)
    assert {row["kind"] for row in rows} == {*analysis.KINDS, OTHERS}, "those without examples too"
    assert [row["kind"] for row in rows if row["examples"]] == ["and, or, but (coordination)", OTHERS]
    worst = rows[0]
    assert (worst["examples"], worst["example"]) == (200, JOINED)
    assert worst["difference"] == pytest.approx(worst["matthews"] - 100, abs=0.02)
    assert worst["difference_interval"][0] < worst["difference"] < worst["difference_interval"][1] < -50
    assert rows[-1] | {"examples": 0, "matthews": None, "interval": None} == rows[-1]
    assert (whole["kind"], whole["examples"], whole["difference"]) == ("all", 400, None)


def test_a_difference_by_chance_has_an_interval_around_zero():
    random, contained = np.random.default_rng(6), 0
    for _ in range(20):
        rows = by_kind(answered(*drawn(random, 200, right=0.8), [JOINED, PLAIN] * 100), NAMES)
        low, high = next(row["difference_interval"] for row in rows if row["kind"] == OTHERS)
        contained += low <= 0 <= high
    assert contained >= 17


def test_errors_count_both_directions_and_show_the_most_confident():
    margins = np.array([1.0, 3.0, -2.0, 4.0, -0.5, 2.0])  # above 0: acceptable
    examples = predicted([0, 0, 0, 1, 1, 1], np.stack([np.zeros(6), margins], axis=1))
    accepted, rejected = errors(examples, NAMES)
    shown = [{"row": row, "text": f"sentence {row}", "margin": margin} for row, margin in ((1, 3.0), (0, 1.0))]
    assert accepted == {
        "error": "unacceptable, taken for acceptable", "examples": 2, "of": 3, "rate": 66.67, "share_of_errors": 66.67,
        "margin": 2.0, "most_confident": shown,
    }  # fmt: skip
    assert errors(examples, NAMES, shown=1)[0]["most_confident"] == shown[:1]
    assert rejected["most_confident"] == [{"row": 4, "text": "sentence 4", "margin": 0.5}]
    nothing = {"examples": 0, "rate": 0, "share_of_errors": None, "margin": None, "most_confident": []}
    assert all(nothing.items() <= row.items() for row in errors(answered([0, 1], [0, 1]), NAMES))
    assert errors(answered([1], [1]), NAMES)[0]["rate"] is None, "of a class that no example has"


def test_a_wrong_cutoff_is_told_apart_from_a_wrong_order():
    labels = np.tile([0, 1, 1], 40)
    biased = np.stack([np.zeros(120), labels + 5.0], axis=1)  # perfect order, and everything accepted
    own, even, best = cutoffs(predicted(labels, biased), NAMES)
    assert (own["matthews"], own["predicted acceptable"]) == (0, 100)
    assert (even["matthews"], best["matthews"], own["auc"]) == (100, 100, 100)
    assert even["predicted acceptable"] == pytest.approx(66.67)
    own, _, best = cutoffs(predicted(labels, np.random.default_rng(0).normal(size=(120, 2))), NAMES)
    assert 35 < own["auc"] < 65
    assert best["matthews"] < 40
    one_class = cutoffs(predicted([1] * 5, np.zeros((5, 2))), NAMES)  # gives no warning
    assert [(row["auc"], "undefined" in row["note"]) for row in one_class] == [(None, True)] * 3


def test_the_best_cutoff_is_the_best_of_all():
    random = np.random.default_rng(3)
    for _ in range(10):
        labels = random.integers(0, 2, 30)
        scores = np.round(random_scores(labels, 2, seed=int(random.integers(1000))), 1)  # with ties
        margins = scores[:, 1] - scores[:, 0]
        every = [metrics.score("matthews", labels, (margins >= cut).astype(int)) for cut in [*margins, np.inf]]
        own, _, best = cutoffs(predicted(labels, scores), NAMES)
        assert best["matthews"] == pytest.approx(max(every), abs=0.01)
        assert own["matthews"] == pytest.approx(metrics.score("matthews", labels, scores.argmax(axis=1)), abs=0.01)


def test_seeds_agreement_tells_the_errors_of_the_model_from_chance():
    labels = np.array([0, 0, 1, 1, 1])
    right = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 0]], dtype=bool)  # by seed and example
    runs = [answered(labels, np.where(seed, labels, 1 - labels), list("abcde")) for seed in right]
    rows = seeds_agreement(runs, NAMES)
    assert [(row["right"], row["examples"], row["share"], row["acceptable"]) for row in rows] == [
        ("3 of 3", 2, 40, 50), ("2 of 3", 1, 20, 100), ("1 of 3", 1, 20, 0), ("0 of 3", 1, 20, 100)
    ]  # fmt: skip
    assert rows[0]["most_wrong"] == []
    assert rows[3]["most_wrong"] == [{"row": 4, "text": "e", "label": "acceptable", "margin": 2.0}]
    assert [row["examples"] for row in seeds_agreement(runs[:1], NAMES)] == [4, 1]


def test_analyse_describes_the_run_with_the_median_score():
    labels = np.random.default_rng(0).integers(0, 2, 60)
    tables = []
    for seed, strength in enumerate((0.2, 3.0, 1.5)):
        texts = {"sentence": [JOINED, PLAIN] * 30}
        made = table("validation", labels, random_scores(labels, 2, seed, strength), **texts)
        tables.append(pa.concat_tables([UNLABELLED, made.take(list(range(59, -1, -1)))]))
    found = analysis.analyse(TASKS["cola"], tables)["validation"]
    assert found["run"] == 2
    median = analysis.predictions_of(tables[2], TASKS["cola"], "validation")
    assert median["label"].tolist() == labels.tolist(), "in the order of the data"
    assert found["by_length"] == by_length(median, NAMES)
    assert sum(row["examples"] for row in found["seeds"]) == 60
    assert json.loads(json.dumps(found)) == found, "plain values only"


def test_analyse_takes_pairs_three_classes_and_several_splits():
    about, labels = TASKS["mnli"], np.tile([0, 1, 2], 20)
    pair = {"premise": ["The well-known dog didn't bark."] * 60, "hypothesis": ["Nothing - barked."] * 60}
    scores = {split: random_scores(labels, 3, seed) for seed, split in enumerate(about.validation)}
    tables = [table(split, labels, of_split, **pair) for split, of_split in scores.items()]
    found = analysis.analyse(about, [pa.concat_tables(tables)])
    assert list(found) == list(scores)
    for split, of_split in found.items():
        assert of_split["cutoffs"] == []
        assert of_split["by_length"][0]["words"] == "7"
        assert of_split["by_length"][0]["contradiction"] == pytest.approx(33.33)
        counts = metrics.confusion(labels, scores[split].argmax(axis=1), 3)
        assert len(of_split["errors"]) == 6
        for row in of_split["errors"]:
            assert row["examples"] == counts[*map(about.labels.index, row["error"].split(", taken for "))]
        assert sum(row["share_of_errors"] for row in of_split["errors"]) == pytest.approx(100, abs=0.1)
        shown = {one["text"] for row in of_split["errors"] for one in row["most_confident"]}
        assert shown == {"The well-known dog didn't bark. | Nothing - barked."}


@pytest.mark.parametrize(
    ("task", "split", "named"),
    [("cola", "test", "'test'"), ("cola", "validation", "0 rows"), ("stsb", "test", "STS-B")],
)
def test_what_cannot_be_analysed_is_refused(task: str, split: str, named: str):
    with pytest.raises(InputError, match=named):
        analysis.predictions_of(UNLABELLED, TASKS[task], split)


def stats(seed: int, share: float, score: float, **changes) -> dict:
    """Of a finetune run, as far as the learning curve goes."""
    about = {"task": "cola", "seed": seed, "protocol": "cramming", "pretrained": True, "share": share}
    validation = {"validation": {"metrics": {"matthews": score}, "majority": {"matthews": 0.5}}}
    return about | {"metric": "matthews", "train_examples": 8000, "validation": validation} | changes


def test_the_learning_curve_is_the_median_over_seeds_for_each_share_of_what_can_be_compared():
    runs = [stats(seed, share, 10 * share + seed) for share in (1.0, 0.25, 0.5) for seed in range(3)]
    others = ({"pretrained": False}, {"protocol": "modern"}, {"task": "rte"})
    *rows, a, b, c = learning_curve([*runs, *(stats(0, 1.0, 9.0, **other) for other in others)])
    assert [(row["share"], row["train_examples"]) for row in rows] == [(0.25, 2000), (0.5, 4000), (1.0, 8000)]
    assert [(row["low"], row["median"], row["high"]) for row in rows] == [(2.5, 3.5, 4.5), (5, 6, 7), (10, 11, 12)]
    assert [row["per_doubling"] for row in rows] == [None, 2.5, 5.0]
    assert {(row["seeds"], row["majority"]) for row in rows} == {(3, 0.5)}
    assert {(row["seeds"], row["median"], row["per_doubling"]) for row in (a, b, c)} == {(1, 9, None)}
    assert json.loads(json.dumps(rows)) == rows
    assert learning_curve([]) == []
