"""Analysis of predictions: by length, kind, error, cutoff, seed and share of the training data."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import matthews_corrcoef

from model import InputError
from tasks.glue import metrics
from tasks.glue.tasks import TASKS
from tasks.reports import errors as errors_module
from tasks.reports.errors import OTHERS, by_kind, by_length, cutoffs, errors, kinds_of, learning_curve, seeds_agreement

NAMES = ("unacceptable", "acceptable")


def sentences(lengths: list[int]) -> list[str]:
    return [" ".join(["word"] * length) + "." for length in lengths]


def table(split: str, labels, scores: np.ndarray, **texts: list[str]) -> pa.Table:
    """A predictions.parquet as runs write it."""
    rows = {"split": [split] * len(scores), "row": range(len(scores)), **texts, "label": labels}
    return pa.table(rows | {"prediction": scores.argmax(axis=1), "scores": list(scores.astype(np.float32))})


def random_scores(labels: np.ndarray, classes: int, seed: int, strength: float = 1.5) -> np.ndarray:
    """Scores before softmax of a model that knows something."""
    return np.random.default_rng(seed).normal(size=(len(labels), classes)) + strength * np.eye(classes)[labels]


def test_every_example_is_in_one_range_of_lengths():
    random = np.random.default_rng(0)
    lengths = random.integers(2, 20, 500).tolist()
    labels = random.integers(0, 2, 500)
    predictions = np.where(random.random(500) < 0.8, labels, 1 - labels)
    *rows, whole = by_length(sentences(lengths), labels, predictions, NAMES)
    assert len(rows) == 6
    assert sum(row["examples"] for row in rows) == whole["examples"] == 500
    assert max(row["examples"] for row in rows) < 2.5 * min(row["examples"] for row in rows), "about as many in each"
    ranges = [tuple(map(int, row["words"].split(" to "))) for row in rows]
    assert ranges == sorted(ranges)
    for row, (fewest, *most) in zip(rows, ranges, strict=True):
        chosen = np.isin(lengths, range(fewest, (most[0] if most else fewest) + 1))
        assert row["examples"] == chosen.sum()
        assert row["matthews"] == pytest.approx(100 * matthews_corrcoef(labels[chosen], predictions[chosen]), abs=0.01)
        assert row["accuracy"] == pytest.approx(100 * (labels == predictions)[chosen].mean(), abs=0.01)
        assert row["acceptable"] == pytest.approx(100 * labels[chosen].mean(), abs=0.01)
        assert row["predicted acceptable"] == pytest.approx(100 * predictions[chosen].mean(), abs=0.01)
        assert row["interval"][0] < row["matthews"] < row["interval"][1]


def test_long_sentences_that_are_misjudged_show_by_length():
    lengths = [3] * 50 + [12] * 50
    labels = np.tile([0, 1], 50)
    predictions = np.where(np.array(lengths) == 3, labels, 1)
    short, long, _ = by_length(sentences(lengths), labels, predictions, NAMES)
    assert (short["words"], short["matthews"], short["note"]) == ("3", 100, None)
    assert (long["words"], long["matthews"], long["predicted acceptable"]) == ("12", 0, 100)
    assert "predictions are 1" in long["note"], "a zero that means undefined is told"


def test_words_are_counted_as_people_do():
    texts = ["Don't go.", "The well-known - or not - cat's", "!"]
    rows = by_length(texts, np.array([0, 1, 0]), np.array([0, 1, 1]), NAMES, bins=3)
    assert [row["words"] for row in rows] == ["0", "2", "5", "all"]


KINDS = {
    "Did Athena help us?": "question",
    "I know who left.": "wh-word",
    "John heard that they left.": "that, if",
    "The car was never driven.": "passive",
    "The bucket was kicked by Pat.": "passive",
    "They didn't get paid.": "passive",
    "John tries to leave.": "to and a verb",
    "Sue and Bill left.": "and, or, but",
    "She cannot leave.": "negation",
    "She couldn’t leave.": "modal verb",
    "Sandy won't leave.": "modal verb",
    "Every dog barked.": "quantifier",
    "They met each other.": "reflexive",
    "Ourselves like ourselves.": "reflexive",
    "Sue is taller than Bill.": "comparison",
    "There is a unicorn in the garden.": "there is",
}


@pytest.mark.parametrize(("text", "kind"), KINDS.items())
def test_a_sentence_has_what_one_sees_in_it(text: str, kind: str):
    assert any(found.startswith(kind) for found in kinds_of(text)), kinds_of(text)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The bookshelf is in need of repair.", "passive"),
        ("The shelves fell.", "reflexive"),
        ("Mary went to the station.", "to and a verb"),
        ("She isn't here.", "modal verb"),
        ("The android sang.", "and, or, but"),
        ("The notary knows Norman.", "negation"),
        ("Who? asked Bill.", "question"),
    ],
)
def test_a_sentence_lacks_what_only_looks_alike(text: str, kind: str):
    assert not any(found.startswith(kind) for found in kinds_of(text)), kinds_of(text)


def test_a_plain_sentence_is_of_no_kind():
    assert kinds_of("Chris handed Bo.") == [OTHERS]
    assert kinds_of("") == [OTHERS]


def test_kinds_are_compared_with_all_other_sentences_and_the_worst_comes_first():
    random = np.random.default_rng(4)
    texts = ["Sue and Bill left.", "Chris handed Bo."] * 200
    labels = random.integers(0, 2, 400)
    joined = np.tile([True, False], 200)
    predictions = np.where(joined & (random.random(400) < 0.5), 1 - labels, labels)
    *rows, whole = by_kind(texts, labels, predictions, NAMES)
    assert {row["kind"] for row in rows} == {*errors_module.KINDS, OTHERS}, "those without examples too"
    assert [row["kind"] for row in rows if row["examples"]] == ["and, or, but (coordination)", OTHERS]
    worst = rows[0]
    assert worst["examples"] == 200
    assert worst["difference"] == pytest.approx(worst["matthews"] - 100, abs=0.02)
    assert worst["difference_interval"][0] < worst["difference"] < worst["difference_interval"][1] < -50
    assert worst["example"] == "Sue and Bill left."
    assert rows[-1] | {"examples": 0, "matthews": None, "interval": None} == rows[-1]
    assert (whole["kind"], whole["examples"], whole["difference"]) == ("all", 400, None)


def test_a_difference_by_chance_has_an_interval_around_zero():
    random = np.random.default_rng(6)
    texts = ["Sue and Bill left.", "Chris handed Bo."] * 100
    held = 0
    for _ in range(40):
        labels = random.integers(0, 2, 200)
        predictions = np.where(random.random(200) < 0.8, labels, 1 - labels)
        row = next(r for r in by_kind(texts, labels, predictions, NAMES) if r["kind"] == OTHERS)
        held += row["difference_interval"][0] <= 0 <= row["difference_interval"][1]
    assert held >= 34


def test_errors_count_both_directions_and_show_the_most_confident():
    texts = [f"sentence {i}" for i in range(6)]
    labels = np.array([0, 0, 0, 1, 1, 1])
    margins = np.array([1.0, 3.0, -2.0, 4.0, -0.5, 2.0])  # above 0: acceptable
    scores = np.stack([np.zeros(6), margins], axis=1)
    accepted, rejected = errors(texts, labels, (margins > 0).astype(int), scores, NAMES, shown=1)
    assert accepted["error"] == "unacceptable, taken for acceptable"
    assert (accepted["examples"], accepted["of"], accepted["rate"]) == (2, 3, 66.67)
    assert (accepted["margin"], accepted["share_of_errors"]) == (2.0, 66.67)
    assert accepted["most_confident"] == [{"row": 1, "text": "sentence 1", "margin": 3.0}]
    assert rejected["error"] == "acceptable, taken for unacceptable"
    assert rejected["most_confident"] == [{"row": 4, "text": "sentence 4", "margin": 0.5}]


def test_errors_of_three_classes_are_those_off_the_diagonal_of_the_confusion_table():
    labels = np.random.default_rng(1).integers(0, 3, 300)
    scores = random_scores(labels, 3, seed=2)
    predictions, texts, names = scores.argmax(axis=1), [f"{i}" for i in range(300)], TASKS["mnli"].labels
    rows = errors(texts, labels, predictions, scores, names)
    counts = metrics.confusion(labels, predictions, 3)
    assert len(rows) == 6
    for row in rows:
        true, taken = (names.index(name) for name in row["error"].split(", taken for "))
        assert row["examples"] == counts[true, taken]
        shown = [one["margin"] for one in row["most_confident"]]
        assert shown == sorted(shown, reverse=True)
        assert min(shown) > 0
    assert sum(row["share_of_errors"] for row in rows) == pytest.approx(100, abs=0.1)
    assert sum(row["examples"] for row in rows) == (labels != predictions).sum()


def test_errors_of_perfect_predictions_are_none():
    labels = np.array([0, 1])
    for row in errors(["a", "b"], labels, labels, np.eye(2), NAMES):
        assert (row["examples"], row["rate"], row["margin"], row["most_confident"]) == (0, 0, None, [])
        assert row["share_of_errors"] is None
    alone = errors(["a"], np.array([1]), np.array([1]), np.eye(2)[[1]], NAMES)
    assert alone[0]["rate"] is None, "of no examples there is no rate"


def test_a_model_that_only_cuts_in_the_wrong_place_is_told_from_one_that_orders_badly():
    labels = np.tile([0, 1, 1], 40)
    biased = np.stack([np.zeros(120), labels + 5.0], axis=1)  # perfect order, and everything accepted
    own, even, best = cutoffs(labels, biased, NAMES)
    assert (own["matthews"], own["predicted acceptable"]) == (0, 100)
    assert (even["matthews"], best["matthews"], own["auc"]) == (100, 100, 100)
    assert even["predicted acceptable"] == pytest.approx(66.67)
    blind = np.random.default_rng(0).normal(size=(120, 2))
    rows = cutoffs(labels, blind, NAMES)
    assert 35 < rows[0]["auc"] < 65
    assert rows[2]["matthews"] < 40


def test_the_best_cutoff_is_the_best_of_all():
    random = np.random.default_rng(3)
    for _ in range(20):
        labels = random.integers(0, 2, 30)
        scores = np.round(random_scores(labels, 2, seed=int(random.integers(1000))), 1)  # with ties
        margins = scores[:, 1] - scores[:, 0]
        every = [metrics.score("matthews", labels, (margins >= cut).astype(int)) for cut in [*margins, np.inf]]
        own, _, best = cutoffs(labels, scores, NAMES)
        assert best["matthews"] == pytest.approx(max(every), abs=0.01)
        assert own["matthews"] == pytest.approx(metrics.score("matthews", labels, scores.argmax(axis=1)), abs=0.01)


def test_cutoffs_of_one_class_have_no_auc_and_no_warning():
    rows = cutoffs(np.ones(5, int), np.zeros((5, 2)), NAMES)
    assert [row["auc"] for row in rows] == [None] * 3
    assert all("undefined" in row["note"] for row in rows)


def test_seeds_agreement_tells_the_models_errors_from_chance():
    labels = np.array([0, 0, 1, 1, 1])
    right = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 0]], dtype=bool)  # by seed and example
    scores = [np.eye(2)[np.where(seed, labels, 1 - labels)] * 2.0 for seed in right]
    rows = seeds_agreement(list("abcde"), labels, scores, NAMES)
    assert [row["right"] for row in rows] == ["3 of 3", "2 of 3", "1 of 3", "0 of 3"]
    assert [row["examples"] for row in rows] == [2, 1, 1, 1]
    assert [row["share"] for row in rows] == [40, 20, 20, 20]
    assert rows[0]["most_wrong"] == []
    assert rows[3]["most_wrong"] == [{"row": 4, "text": "e", "label": "acceptable", "margin": 2.0}]
    assert rows[2]["acceptable"] == 0
    alone = seeds_agreement(list("abcde"), labels, scores[:1], NAMES)
    assert [row["examples"] for row in alone] == [4, 1]


def test_analyse_reads_the_files_of_runs_and_tells_of_the_median_one(tmp_path):
    random = np.random.default_rng(0)
    texts = [*KINDS] * 12
    labels = random.integers(0, 2, len(texts))
    tables = []
    for seed, strength in enumerate((0.2, 3.0, 1.5)):
        made = table("validation", labels, random_scores(labels, 2, seed, strength), sentence=texts)
        test = table("test", pa.nulls(2, pa.int64()), np.eye(2), sentence=["a", "b"])
        pq.write_table(pa.concat_tables([made, test]), tmp_path / f"{seed}.parquet")
        tables.append(pq.read_table(tmp_path / f"{seed}.parquet"))
    found = errors_module.analyse(TASKS["cola"], tables)["validation"]
    assert found["run"] == 2, "the median score"
    median = errors_module.Predictions.of(tables[2], TASKS["cola"], "validation")
    assert found["by_length"] == by_length(texts, labels, median.predictions, NAMES)
    assert found["by_length"][-1]["examples"] == len(texts), "the unlabelled split is left alone"
    assert sum(row["examples"] for row in found["seeds"]) == len(texts)
    assert any("roughly" in note for note in found["notes"])
    assert json.loads(json.dumps(found)) == found, "plain values only"


def test_analyse_takes_pairs_and_three_classes_and_several_splits():
    labels = np.tile([0, 1, 2], 20)
    pair = {"premise": ["The dog barked."] * 60, "hypothesis": ["Nothing barked."] * 60}
    splits = [
        table(split, labels, random_scores(labels, 3, seed), **pair)
        for seed, split in enumerate(TASKS["mnli"].validation)
    ]
    found = errors_module.analyse(TASKS["mnli"], [pa.concat_tables(splits)])
    assert list(found) == ["validation_matched", "validation_mismatched"]
    for told in found.values():
        assert told["cutoffs"] == []
        assert told["by_length"][0]["words"] == "5"
        assert told["by_length"][0]["contradiction"] == pytest.approx(33.33)
        shown = Counter(one["text"] for row in told["errors"] for one in row["most_confident"])
        assert set(shown) == {"The dog barked. | Nothing barked."}


def test_what_cannot_be_analysed_is_refused():
    plain = table("test", pa.nulls(2, pa.int64()), np.eye(2), sentence=["a", "b"])
    with pytest.raises(InputError, match=r"CoLA have 2 rows of split 'test', 2 without a label"):
        errors_module.Predictions.of(plain, TASKS["cola"], "test")
    with pytest.raises(InputError, match="0 rows of split 'validation'"):
        errors_module.analyse(TASKS["cola"], [plain])
    with pytest.raises(InputError, match="STS-B is a regression"):
        errors_module.analyse(TASKS["stsb"], [plain])


def stats(seed: int, share: float, score: float, **changes) -> dict:
    """Of a finetune run, as far as the learning curve goes."""
    about = {"task": "cola", "seed": seed, "protocol": "cramming", "pretrained": True, "share": share}
    validation = {"validation": {"metrics": {"matthews": score}, "majority": {"matthews": 0.0}}}
    return about | {"metric": "matthews", "train_examples": 8000, "validation": validation} | changes


def test_the_learning_curve_is_the_median_over_seeds_for_each_share():
    runs = [stats(seed, share, 10 * share + seed) for share in (1.0, 0.25, 0.5) for seed in range(3)]
    rows = learning_curve(runs)
    assert [row["share"] for row in rows] == [0.25, 0.5, 1.0]
    assert [row["train_examples"] for row in rows] == [2000, 4000, 8000]
    assert [(row["low"], row["median"], row["high"]) for row in rows] == [(2.5, 3.5, 4.5), (5, 6, 7), (10, 11, 12)]
    assert [row["per_doubling"] for row in rows] == [None, 2.5, 5.0]
    assert {row["seeds"] for row in rows} == {3}


def test_the_learning_curve_keeps_apart_what_cannot_be_compared():
    runs = [
        stats(0, 0.25, 1.0),
        stats(0, 1.0, 5.0),
        stats(0, 1.0, 0.0, pretrained=False),
        stats(0, 1.0, 9.0, protocol="modern"),
        stats(0, 1.0, 80.0, task="rte", metric="accuracy")
        | {"validation": {"validation": {"metrics": {"accuracy": 80.0}, "majority": {"accuracy": 52.7}}}},
    ]
    rows = learning_curve(runs)
    assert [row["seeds"] for row in rows] == [1] * 5
    assert [row["per_doubling"] for row in rows] == [None, 2.0, None, None, None]
    assert rows[-1]["majority"] == 52.7
    assert learning_curve([]) == []
