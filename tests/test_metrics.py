"""Metrics: parity of libraries and formulas, undefined ones, bootstrap intervals, the averages."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import seqeval.metrics
import sklearn.metrics
from scipy import stats
from seqeval.metrics.sequence_labeling import get_entities

from tasks.glue import metrics
from tasks.glue.metrics import (
    INTERVAL,
    count_confusions,
    note,
    official_average,
    paper_average,
    resample,
    score,
    score_task,
)
from tasks.glue.table import TASKS, Task
from tasks.glue.tags import spans_of
from tasks.reports.published import PAPER

REGRESSION = ("pearson", "spearman")
FLAT = [name for name in metrics.NAMES if name not in ("micro_f1", "span_f1")]  # an example has one label


def bootstrap(metric: str, labels: np.ndarray, predictions: np.ndarray) -> list[float]:
    """The interval of a score."""
    return np.percentile(resample(metric, labels, predictions), INTERVAL).tolist()


def drawn(random: np.random.Generator, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions: skewed, tied, short, constant, or all of these by chance."""
    n = int(random.choice([2, 3, 7, 40] if metric in REGRESSION else [1, 2, 3, 7, 40]))
    if metric in REGRESSION:
        labels = random.integers(0, random.choice([1, 2, 26]), n) / 5
        noise = random.normal(size=n) * random.choice([0, 0.1, 3])
        predictions = (random.choice([-1, 0, 1]) * labels + noise).astype(random.choice([np.float32, np.float64]))
        return labels, predictions + random.choice([0, 1000])
    classes = 2 if metric == "f1" else random.choice([2, 3])
    labels, predictions = (random.choice(classes, n, p=random.dirichlet(np.full(classes, 0.5))) for _ in range(2))
    return labels, np.where(random.random(n) < random.random(), labels, predictions)


def by_libraries(metric: str, labels, predictions) -> float:
    """A score by scikit-learn, SciPy or seqeval, where it is defined; the class of f1 is 1."""
    functions = {
        "accuracy": sklearn.metrics.accuracy_score,
        "f1": sklearn.metrics.f1_score,
        "macro_f1": partial(sklearn.metrics.f1_score, average="macro", zero_division=0),
        "micro_f1": partial(sklearn.metrics.f1_score, average="micro"),
        "span_f1": seqeval.metrics.f1_score,  # of lists of words
        "matthews": sklearn.metrics.matthews_corrcoef,
        "pearson": lambda *given: stats.pearsonr(*given).statistic,
        "spearman": lambda *given: stats.spearmanr(*given).statistic,
    }
    return 100 * functions[metric](labels, predictions)


def scores_by_libraries(task: Task, labels: list, predictions: list) -> dict[str, float]:
    """The scores of all metrics of a task with tags of sentences, or of one with several labels a row."""
    in_words = [task.in_words(labels), task.in_words(predictions)]
    found = {}
    for metric in task.metrics:
        if metric == "span_f1":
            given = in_words
        elif task.kind == "tokens":
            given = [np.concatenate(tags) for tags in in_words]
        else:
            given = [np.array(labels), np.array(predictions)]
        found[metric] = by_libraries(metric, *given)
    return found


@pytest.mark.parametrize("metric", FLAT)
def test_scores_are_those_of_the_libraries_and_of_resamples(metric: str):
    random = np.random.default_rng(3)
    undefined = 0
    for _ in range(150):
        labels, predictions = drawn(random, metric)
        if metric in REGRESSION:
            formula = metrics.CORRELATIONS[metric](labels[None], predictions[None])[0]
        else:
            formula = metrics.from_counts(metric, count_confusions(labels, predictions))
        assert score(metric, labels, predictions) == pytest.approx(formula, abs=1e-5), (labels, predictions)
        why = note(metric, labels, predictions)
        if not why:
            wanted = by_libraries(metric, labels.astype(float), predictions.astype(float))
            assert formula == pytest.approx(wanted, abs=1e-5)
            continue
        undefined += 1
        assert formula == 0
        assert metrics.NAMES[metric] in why
        if metric == "f1":
            assert ("predicted to be of class 1" in why) == (not (predictions == 1).any())
        else:
            name, values = ("predictions", predictions) if len({*predictions}) == 1 else ("labels", labels)
            assert f"{name} are {values[0]:.4g}" in why
        assert bootstrap(metric, labels, predictions) == [0, 0]
    assert undefined == 0 if metric in ("accuracy", "macro_f1") else 10 < undefined < 140, "both kinds were tried"


def tags_of(names: tuple[str, ...], metrics: tuple[str, ...]) -> Task:
    return Task("x", ("text",), names, metrics, {}, kind="tokens", own=True)


def drawn_tags(random: np.random.Generator, classes: int, sentences: int) -> tuple[list, list]:
    """Tags of sentences, and predictions of which four fifths are right."""
    true = [random.integers(classes, size=random.integers(1, 12)) for _ in range(sentences)]
    found = []
    for tags in true:
        found.append(np.where(random.random(len(tags)) < 0.8, tags, random.integers(classes, size=len(tags))))
    return true, found


@pytest.mark.parametrize("marks", ["BI", "I", "BIES"])
def test_spans_and_scores_of_tags_are_those_of_seqeval_and_scikit_learn_in_every_scheme(marks: str):
    random = np.random.default_rng(len(marks))
    names = ("O", *(f"{mark}-{name}" for mark in marks for name in ("PER", "LOC", "X-Y")))
    task = tags_of(names, ("span_f1", "accuracy", "macro_f1"))
    for _ in range(8):
        true, found = drawn_tags(random, len(names), 30)
        for row in task.in_words(true + found):
            assert [(span.name, span.start, span.stop - 1) for span in spans_of(row)] == get_entities(row)
        about = score_task(task, true, found, np.concatenate(true))
        assert about["metrics"] == pytest.approx(scores_by_libraries(task, true, found), abs=1e-3)


@pytest.mark.parametrize("kind", ["tokens", "multilabel"])
def test_intervals_and_baselines_are_those_of_a_plain_loop_over_sentences_or_rows(kind: str):
    random = np.random.default_rng(0)
    if kind == "tokens":
        task = tags_of(("B-A", "I-A", "O"), ("span_f1", "accuracy", "macro_f1"))
        true, found = drawn_tags(random, 3, 80)
        train = np.array([2, 2, 1, -100])
        constant = [np.full_like(tags, 2) for tags in true]
    else:
        task = Task("x", ("text",), ("a", "b", "c"), ("micro_f1",), {}, kind="multilabel", own=True)
        true = [*(random.random((80, 3)) < (0.7, 0.4, 0.1)).astype(int)]
        found = [np.where(random.random(3) < 0.8, row, 1 - row) for row in true]
        train = np.array(true)
        constant = [np.array([1, 1, 0])] * 80  # better than the most frequent one alone, and than all
    about = score_task(task, true, found, train)
    loop = []
    for _ in range(300):
        rows = random.integers(80, size=80)
        loop.append(scores_by_libraries(task, [true[i] for i in rows], [found[i] for i in rows]))
    for metric, ends in about["intervals"].items():
        assert ends == pytest.approx(np.percentile([one[metric] for one in loop], INTERVAL), abs=2)
    assert about["metrics"] == pytest.approx(scores_by_libraries(task, true, found), abs=1e-3)
    assert about["majority"] == pytest.approx(scores_by_libraries(task, true, constant), abs=1e-3)


def test_predictions_that_are_not_finite_or_hardly_differ_are_scored_without_a_warning():
    labels = np.arange(50.0)
    odd = np.array([1.0, np.nan, np.inf])
    assert score("pearson", labels, 2.5 + 1e-13 * labels) == pytest.approx(100, abs=0.5)
    assert score("spearman", np.arange(4.0), np.array([1e-20, 2e-20, 3e-20, 1.0])) == pytest.approx(100)
    assert score("pearson", labels[:3], odd) == score("spearman", labels[:3], odd) == 0
    assert "2 of 3 predictions" in note("pearson", labels[:3], odd)
    assert bootstrap("pearson", labels[:3], odd) == [0, 0]


@pytest.mark.parametrize("metric", [metric for metric in FLAT if metric not in REGRESSION])
def test_intervals_by_confusion_tables_are_those_of_a_plain_loop_over_examples(metric: str, monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 20_000)
    random = np.random.default_rng(5)
    labels = random.integers(0, 2, 200)
    predictions = np.where(random.random(200) < 0.7, labels, random.permutation(labels))
    tables = [count_confusions(labels[rows], predictions[rows]) for rows in random.integers(200, size=(400, 200))]
    loop = [metrics.from_counts(metric, table) for table in tables]
    ends = bootstrap(metric, labels, predictions)
    spread = np.std(loop)
    step = 100 / 200  # a 2.5 % end of 400 draws errs by 0.13 of the spread
    assert np.abs(np.percentile(loop, [2.5, 97.5]) - ends).max() < 0.4 * spread + step
    assert ends[0] < score(metric, labels, predictions) < ends[1]


@pytest.mark.parametrize("metric", REGRESSION)
def test_each_resample_scores_what_its_examples_score(metric: str, monkeypatch):
    monkeypatch.setattr(metrics, "DRAWN_AT_ONCE", 64)  # in several parts
    labels = np.array([0.0, 0, 0, 0, 1, 2])
    predictions = np.array([3.0, 3, 1, 3, 2, 5])
    monkeypatch.setattr(metrics, "RESAMPLES", 50)
    draws = np.random.default_rng(0)
    found = resample(metric, labels, predictions)
    examples = np.concatenate([draws.integers(6, size=(10, 6)) for _ in range(5)])
    wanted = [score(metric, labels[rows], predictions[rows]) for rows in examples]
    assert 0 in wanted, "some draws leave it undefined"
    assert found == pytest.approx(np.array(wanted), abs=1e-9)


@pytest.mark.parametrize(
    ("metric", "ends"),
    [("accuracy", [68.75, 87.5]), ("f1", [64.6154, 86.7494]), ("matthews", [37.9516, 74.9381]),
     ("pearson", [30.9322, 71.4158]), ("spearman", [31.7821, 72.1566])],
)  # fmt: skip
def test_intervals_keep_their_digits(metric: str, ends: list[float]):
    random = np.random.default_rng(1)
    labels = random.integers(0, 26, 80) / 5 if metric in REGRESSION else random.integers(0, 2, 80)
    predictions = np.where(random.random(80) < 0.5, labels, random.permutation(labels))
    found = [round(end, 4) for end in bootstrap(metric, labels, predictions)]
    assert found == ends, "other draws change results: raise the version of finetune if this is intended"


def test_all_metrics_of_a_task_are_scored_with_their_baseline_and_confusions():
    random = np.random.default_rng(2)
    labels = random.integers(0, 2, 100)
    predictions = np.where(random.random(100) < 0.8, labels, 1 - labels)
    about = score_task(TASKS["mrpc"], labels, predictions, np.array([1, 1, 0]))
    assert list(about["metrics"]) == list(about["intervals"]) == list(about["majority"]) == ["f1", "accuracy"]
    ones = labels.mean()
    assert about["majority"] == pytest.approx({"f1": 200 * ones / (1 + ones), "accuracy": 100 * max(ones, 1 - ones)})
    assert about["notes"] == []
    seen = Counter(zip(labels.tolist(), predictions.tolist(), strict=True))
    assert about["confusion"] == [[seen[0, 0], seen[0, 1]], [seen[1, 0], seen[1, 1]]]
    three = score_task(TASKS["mnli"], np.array([0, 1, 1]), np.array([0, 1, 0]), np.array([1]))
    assert three["confusion"] == [[1, 0, 0], [1, 1, 0], [0, 0, 0]], "a row for each class, seen or not"


NINE = [row for row in PAPER if len(row.scores) == 9]


@pytest.mark.parametrize("row", NINE, ids=lambda row: row.model)
def test_published_rows_give_their_published_averages(row):
    scores = row.scores
    assert paper_average(scores) == pytest.approx(row.average, abs=0.07), "RoBERTa's 85.16 was published as 85.1"
    assert paper_average(scores | {"WNLI": 0.0}) == paper_average(scores), "WNLI never enters"
    for column in scores:
        assert paper_average({k: v for k, v in scores.items() if k != column}) is None
        assert paper_average(scores | {column: None}) is None


def test_the_official_average_is_over_eight_tasks_with_two_metrics_of_a_task_as_one():
    table = {name: {"accuracy": 80.0} for name in ("SST-2", "RTE", "QNLI")} | {
        "MNLI m": {"accuracy": 70.0}, "MNLI mm": {"accuracy": 74.0}, "STS-B": {"pearson": 50.0, "spearman": 60.0},
        "QQP": {"f1": 60.0, "accuracy": 70.0}, "MRPC": {"f1": 80.0, "accuracy": 70.0}, "CoLA": {"matthews": 20.0},
    }  # fmt: skip
    assert official_average(table) == pytest.approx((72 + 80 + 55 + 80 + 80 + 65 + 75 + 20) / 8)
    assert official_average({k: v for k, v in table.items() if k != "MNLI mm"}) is None
    assert official_average(table | {"QQP": {"f1": 60.0}}) is None, "both metrics are needed"
    assert official_average(table | {"WNLI": {"accuracy": 0.0}}) == official_average(table)


@pytest.mark.parametrize("task", ["mrpc", "cola", "stsb", "rte", "mnli"])
def test_a_constant_answer_does_not_beat_the_baseline_and_the_right_answers_do(task):
    about = TASKS[task]
    random = np.random.default_rng(0)
    shares = {2: [0.32, 0.68], 3: [0.3, 0.3, 0.4]}.get(about.classes)
    labels = random.choice(about.classes, 300, p=shares) if shares else random.random(300) * 5
    common = np.bincount(labels).argmax() if shares else labels.mean()
    constant, right, noise = (
        score_task(about, labels, answers, labels)
        for answers in (np.full(len(labels), common), labels, random.permutation(labels))
    )
    assert constant["metrics"] == constant["majority"]
    assert len(constant["notes"]) == {"cola": 1, "stsb": 2}.get(task, 0), "of metrics that are undefined"
    assert (constant["confusion"] is None) == (task == "stsb")
    for metric in about.metrics:
        assert not metrics.beats(constant, metric)
        assert metrics.beats(right, metric)
    assert not metrics.beats(noise, about.metrics[0])
