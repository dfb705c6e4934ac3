"""Metrics: parity with naive ones from the formulas, undefined ones, bootstrap intervals, the averages."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics

from tasks.glue import metrics
from tasks.glue.metrics import baseline, bootstrap, confusion, measure, note, official_average, paper_average, score
from tasks.glue.tasks import TASKS

CLASSIFICATION, REGRESSION = ("accuracy", "f1", "matthews"), ("pearson", "spearman")


def naive(metric: str, labels: list, predictions: list) -> float:
    """A metric from its formula, in plain Python; 0 where it divides by zero."""
    pairs, n = list(zip(labels, predictions, strict=True)), len(labels)
    if metric == "accuracy":
        return 100 * sum(y == p for y, p in pairs) / n
    if metric == "spearman":
        return naive("pearson", naive_ranks(labels), naive_ranks(predictions))
    if metric == "pearson":
        if len(set(labels)) == 1 or len(set(predictions)) == 1:
            return 0.0
        mean_y, mean_p = math.fsum(labels) / n, math.fsum(predictions) / n
        above = math.fsum((y - mean_y) * (p - mean_p) for y, p in pairs)
        below = math.fsum((y - mean_y) ** 2 for y in labels) * math.fsum((p - mean_p) ** 2 for p in predictions)
        return 100 * above / math.sqrt(below)
    if metric == "f1":
        true_positives = pairs.count((1, 1))
        below = 2 * true_positives + pairs.count((0, 1)) + pairs.count((1, 0))
        return 100 * 2 * true_positives / below if below else 0.0
    # Matthews of any number of classes: the correlation of one-hot labels and predictions
    covariance = {"yp": 0.0, "yy": 0.0, "pp": 0.0}
    for k in set(labels) | set(predictions):
        y_share, p_share = labels.count(k) / n, predictions.count(k) / n
        for y, p in pairs:
            y_off, p_off = (y == k) - y_share, (p == k) - p_share
            covariance["yp"] += y_off * p_off
            covariance["yy"] += y_off**2
            covariance["pp"] += p_off**2
    below = math.sqrt(covariance["yy"] * covariance["pp"])
    return 100 * covariance["yp"] / below if below > 1e-12 else 0.0


def naive_ranks(values: list) -> list[float]:
    return [sum(v < own for v in values) + (sum(v == own for v in values) + 1) / 2 for own in values]


def drawn(random: np.random.Generator, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions: skewed, tied, short, constant, or all of these by chance."""
    n = int(random.choice([1, 2, 3, 7, 40]))
    if metric in REGRESSION:
        labels = random.integers(0, random.choice([1, 2, 26]), n) / 5
        noise = random.normal(size=n) * random.choice([0, 0.1, 3])
        predictions = (random.choice([-1, 0, 1]) * labels + noise).astype(random.choice([np.float32, np.float64]))
        return labels, predictions + random.choice([0, 1000])
    classes = 2 if metric == "f1" else random.choice([2, 3])
    labels, predictions = (random.choice(classes, n, p=random.dirichlet(np.full(classes, 0.5))) for _ in range(2))
    return labels, np.where(random.random(n) < random.random(), labels, predictions)


@pytest.mark.parametrize("metric", metrics.NAMES)
def test_a_metric_equals_its_formula_on_random_and_degenerate_predictions(metric: str):
    random, undefined = np.random.default_rng(3), 0
    for _ in range(400):
        labels, predictions = drawn(random, metric)
        wanted = naive(metric, labels.tolist(), predictions.astype(float).tolist())
        assert score(metric, labels, predictions) == pytest.approx(wanted, abs=1e-5), (labels, predictions)
        if metric in CLASSIFICATION:
            by_counts = metrics.from_counts(metric, confusion(labels, predictions))
            assert by_counts == pytest.approx(wanted, abs=1e-9)
        undefined += note(metric, labels, predictions) is not None
    assert undefined == 0 if metric == "accuracy" else 20 < undefined < 380, "both kinds were tried"


@pytest.mark.parametrize("metric", ["matthews", "pearson", "spearman", "f1"])
def test_a_constant_prediction_scores_zero_and_is_noted_without_a_warning(metric: str):
    labels, constant = np.array([0, 1, 1, 0]), np.zeros(4, dtype=int)
    assert score(metric, labels, constant) == 0
    assert bootstrap(metric, labels, constant) == [0, 0]
    told = note(metric, labels, constant)
    assert told.endswith(f"{metrics.NAMES[metric]} is undefined and reported as 0.")
    assert score(metric, constant, labels) == 0
    assert "labels are 0" in note(metric, constant, labels) or metric == "f1"


def test_a_defined_metric_has_no_note():
    labels, predictions = np.array([0, 1, 1, 0]), np.array([1, 1, 1, 1])
    assert note("f1", labels, predictions) is None
    assert score("f1", labels, predictions) == pytest.approx(100 * 2 / 3)
    assert all(note(metric, labels, labels) is None for metric in metrics.NAMES)
    assert note("accuracy", labels, predictions) is None


def test_predictions_that_are_no_numbers_score_zero_and_are_noted():
    predictions = np.array([1.0, np.nan, np.inf])
    assert score("pearson", np.array([1.0, 2.0, 3.0]), predictions) == 0
    assert bootstrap("spearman", np.array([1.0, 2.0, 3.0]), predictions) == [0, 0]
    assert "2 of 3 predictions not finite" in note("pearson", np.array([1.0, 2.0, 3.0]), predictions)


def test_predictions_that_hardly_differ_are_scored_without_a_warning():
    labels = np.arange(50.0)
    assert score("pearson", labels, 2.5 + 1e-13 * labels) == pytest.approx(100, abs=0.5)
    tiny = np.array([1e-20, 2e-20, 3e-20, 1.0])
    assert score("spearman", np.arange(4.0), tiny) == pytest.approx(100)


@pytest.mark.parametrize("metric", metrics.NAMES)
def test_intervals_are_those_of_a_plain_loop_with_the_libraries(metric: str):
    random = np.random.default_rng(5)
    labels = random.integers(0, 26, 200) / 5 if metric in REGRESSION else random.integers(0, 2, 200)
    predictions = np.where(random.random(200) < 0.7, labels, random.permutation(labels))
    functions = {
        "accuracy": sklearn_metrics.accuracy_score,
        "f1": sklearn_metrics.f1_score,
        "matthews": sklearn_metrics.matthews_corrcoef,
        "pearson": lambda x, y: stats.pearsonr(x, y).statistic,
        "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    }
    loop = []
    for _ in range(400):
        rows = random.integers(200, size=200)
        loop.append(100 * functions[metric](labels[rows], predictions[rows]))
    wanted, found = np.percentile(loop, [2.5, 97.5]), bootstrap(metric, labels, predictions, resamples=20_000)
    spread, step = np.std(loop), 100 / 200  # a 2.5 % end of 400 draws errs by 0.13 of the spread
    assert np.abs(wanted - found).max() < 0.4 * spread + step
    assert found[0] < score(metric, labels, predictions) < found[1]


@pytest.mark.parametrize("metric", REGRESSION)
def test_each_resample_scores_what_its_examples_score(metric: str, monkeypatch):
    monkeypatch.setattr(metrics, "DRAWN_AT_ONCE", 64)  # in several parts
    random = np.random.default_rng(1)
    labels, predictions = np.array([0.0, 0, 0, 0, 1, 2]), np.array([3.0, 3, 1, 3, 2, 5])
    rows, found = np.random.default_rng(9), metrics.resampled(metric, labels, predictions, 50, seed=9)
    wanted = []
    for start in range(0, 50, 64 // 6):
        for row in rows.integers(6, size=(min(64 // 6, 50 - start), 6)):
            wanted.append(score(metric, labels[row], predictions[row]))
    assert 0 in wanted, "some draws leave it undefined"
    assert found == pytest.approx(np.array(wanted), abs=1e-9)
    shuffled = random.permutation(6)
    assert bootstrap(metric, labels[shuffled], predictions[shuffled]) != [0, 0]


@pytest.mark.parametrize("metric", ["accuracy", "matthews", "f1", "pearson", "spearman"])
def test_intervals_cover_the_true_score_nineteen_times_of_twenty(metric: str):
    random, covered, times, n = np.random.default_rng(8), 0, 300, 200
    # labels are even; a prediction is right with 0.8: accuracy 80, F1 80, Matthews 60. Or both normal with correlation 0.6
    truth = {"accuracy": 80, "f1": 80, "matthews": 60, "pearson": 60, "spearman": 600 / math.pi * math.asin(0.3)}
    for seed in range(times):
        if metric in REGRESSION:
            labels, noise = random.normal(size=(2, n))
            predictions = 0.6 * labels + 0.8 * noise
        else:
            labels = random.integers(0, 2, n)
            predictions = np.where(random.random(n) < 0.8, labels, 1 - labels)
        low, high = bootstrap(metric, labels, predictions, resamples=300, seed=seed)
        covered += low <= truth[metric] <= high
    assert 0.90 < covered / times < 0.98


def test_an_interval_is_the_same_each_time_and_narrows_with_more_examples():
    labels = np.tile([0, 1, 1, 0, 1], 20)
    predictions = np.tile([0, 1, 0, 0, 1], 20)
    first = bootstrap("matthews", labels, predictions)
    assert first == bootstrap("matthews", labels, predictions)
    more = bootstrap("matthews", np.tile(labels, 16), np.tile(predictions, 16))
    assert (more[1] - more[0]) == pytest.approx((first[1] - first[0]) / 4, rel=0.2)


def test_the_baseline_is_the_best_score_of_one_answer_to_all():
    labels, train = np.array([1, 0, 0, 0]), np.array([1, 1, 1, 0])
    assert baseline("accuracy", labels, train, TASKS["rte"]) == 75
    assert baseline("f1", labels, train, TASKS["qqp"]) == pytest.approx(100 * 2 / 5)
    assert baseline("matthews", labels, train, TASKS["cola"]) == 0
    assert baseline("pearson", np.array([1.0, 5.0]), train, TASKS["stsb"]) == 0


def test_measure_tells_all_of_a_task():
    random = np.random.default_rng(2)
    labels = random.integers(0, 2, 100)
    predictions = np.where(random.random(100) < 0.8, labels, 1 - labels)
    told = measure(TASKS["mrpc"], labels, predictions, np.array([1, 1, 0]))
    assert list(told["metrics"]) == list(told["intervals"]) == list(told["majority"]) == ["f1", "accuracy"]
    assert told["majority"]["accuracy"] == pytest.approx(100 * max(labels.mean(), 1 - labels.mean()))
    assert told["notes"] == []
    seen = Counter(zip(labels.tolist(), predictions.tolist(), strict=True))
    assert told["confusion"] == [[seen[0, 0], seen[0, 1]], [seen[1, 0], seen[1, 1]]]
    three = measure(TASKS["mnli"], np.array([0, 1, 1]), np.array([0, 1, 0]), np.array([1]))
    assert three["confusion"] == [[1, 0, 0], [1, 1, 0], [0, 0, 0]], "a row for each class, seen or not"


def test_measure_notes_a_collapsed_regression():
    told = measure(TASKS["stsb"], np.array([1.0, 2.0, 5.0]), np.full(3, 2.5, np.float32), np.array([1.0, 4.0]))
    assert told["confusion"] is None
    assert told["metrics"] == {"pearson": 0, "spearman": 0}
    assert [sentence.split(":")[0] for sentence in told["notes"]] == ["All 3 predictions are 2.5"] * 2


PUBLISHED = {  # in the order of COLUMNS, with the published average
    "BERT-base": ((83.2, 83.4, 91.9, 86.7, 59.2, 90.6, 87.7, 89.3, 56.5), 80.9),
    "BERT-base, no pretraining": ((34.1, 34.1, 79.9, 17.8, 47.3, 50.0, 68.6, 77.9, 0.0), 45.5),
    "RoBERTa-base": ((86.6, 86.4, 93.7, 90.4, 77.3, 92.1, 88.3, 91.4, 60.2), 85.1),
    "crammed BERT, first version": ((83.9, 84.1, 92.2, 84.6, 53.8, 89.5, 87.3, 87.5, 44.5), 78.6),
    "crammed BERT, released": ((84.1, 84.6, 92.0, 87.4, 58.5, 90.2, 87.5, 88.9, 53.3), 80.7),
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_rows_give_their_published_averages(model: str):
    scores, average = PUBLISHED[model]
    row = dict(zip(metrics.COLUMNS, scores, strict=True))
    if model == "RoBERTa-base":  # 85.16 of rounded scores; published rounded down, or of scores that were not
        assert abs(paper_average(row) - average) < 0.1
    else:
        assert round(paper_average(row), 1) == average
    assert paper_average(row | {"WNLI": 0.0}) == paper_average(row), "WNLI never enters"
    for column in row:
        assert paper_average({k: v for k, v in row.items() if k != column}) is None
        assert paper_average(row | {column: None}) is None


def test_the_official_average_is_over_eight_tasks_with_two_metrics_of_a_task_as_one():
    one = {"accuracy": 80.0}
    table = {
        "MNLI m": {"accuracy": 70.0},
        "MNLI mm": {"accuracy": 74.0},
        "SST-2": one,
        "STS-B": {"pearson": 50.0, "spearman": 60.0},
        "RTE": one,
        "QNLI": one,
        "QQP": {"f1": 60.0, "accuracy": 70.0},
        "MRPC": {"f1": 80.0, "accuracy": 70.0},
        "CoLA": {"matthews": 20.0},
    }
    assert official_average(table) == pytest.approx((72 + 80 + 55 + 80 + 80 + 65 + 75 + 20) / 8)
    assert official_average({k: v for k, v in table.items() if k != "MNLI mm"}) is None
    assert official_average(table | {"QQP": {"f1": 60.0}}) is None, "both metrics are needed"
    assert official_average(table | {"WNLI": {"accuracy": 0.0}}) == official_average(table)


@pytest.mark.parametrize("task", ["mrpc", "cola", "stsb", "rte", "mnli"])
def test_a_constant_answer_does_not_beat_the_baseline_and_the_right_answers_do(task):
    about = TASKS[task]
    random = np.random.default_rng(0)
    labels = (
        random.random(300) * 5 if about.classes == 1 else random.choice(about.classes, 300, p=SKEWED[about.classes])
    )
    common = labels.mean() if about.classes == 1 else np.bincount(labels).argmax()
    constant = measure(about, labels, np.full(len(labels), common), labels)
    right = measure(about, labels, labels, labels)
    noise = measure(about, labels, random.permutation(labels), labels)
    for metric in about.metrics:
        assert not metrics.beats(constant, metric)
        assert metrics.beats(right, metric)
    assert not metrics.beats(noise, about.metrics[0])
    assert metrics.verdict(about).endswith("the mean" if about.classes == 1 else "the most frequent class")


SKEWED = {2: [0.32, 0.68], 3: [0.3, 0.3, 0.4]}
