"""Metrics with bootstrap intervals and baselines; and GLUE's two averages.

Correlations are SciPy's; all else is made of counts, as resamples are drawn from them. All scores are in percent, -100
to 100. A metric that is undefined is reported as 0, with a note that says why.
"""

import statistics
import warnings
from collections.abc import Mapping
from typing import NamedTuple, TypedDict

import numpy as np

from model.wording import counted
from tasks.glue.table import GLUE, TASKS, Answers, Task
from tasks.glue.tags import spans_of

NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "macro_f1": "macro F1",
    "micro_f1": "micro F1",
    "span_f1": "span F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
HALVES = {"validation_matched": " m", "validation_mismatched": " mm"}
COLUMNS = {  # of the paper's tables, in order: task and validation split; the score is the task's first metric
    TASKS[task].title + HALVES.get(split, ""): (task, split) for task in GLUE for split in TASKS[task].validation
}
INTERVAL = (2.5, 97.5)  # percentiles
RESAMPLES = 1000
AT_A_TIME = 50  # resamples of sentences or of rows with several labels
CONSTANTS = {
    "classes": "the most frequent class", "regression": "the mean", "multilabel": "the most frequent labels",
    "tokens": "the most frequent tag",
}  # fmt: skip
DRAWN_AT_ONCE = 1 << 15  # examples, so that arrays fit in a processor's cache


class Scored(TypedDict):
    """What scores.json says of a split's predictions."""

    metrics: dict[str, float]
    intervals: dict[str, list[float]]  # low and high end
    notes: list[str]  # on metrics that are undefined
    majority: dict[str, float]  # the metrics of the best constant answer
    confusion: list[list[int]] | None  # true classes as rows, predicted ones as columns


class Result(NamedTuple):
    """One metric of predictions."""

    score: float
    resampled: np.ndarray  # the scores of RESAMPLES resamples
    baseline: float  # the best score of a constant answer


def score_task(
    task: Task,
    labels: Answers,
    predictions: Answers,
    train_labels: np.ndarray,
) -> Scored:
    """Metrics of predictions with intervals and notes, the metrics of the majority baseline, and the confusion table.

    `labels`, `predictions`: numbers; or an array of tags for each sentence, or of 0 and 1 for each row. The confusion
    table is None for a regression and for multilabel.
    """
    scored: Scored = {"metrics": {}, "intervals": {}, "notes": [], "majority": {}, "confusion": None}
    if task.kind == "tokens":
        table = count_confusions(np.concatenate(labels), np.concatenate(predictions), task.classes)
        scored["confusion"] = table.tolist()
    elif task.kind == "classes":
        scored["confusion"] = count_confusions(np.asarray(labels), np.asarray(predictions), task.classes).tolist()
    for metric in task.metrics:
        if task.kind in ("tokens", "multilabel"):
            result = score_by_parts(metric, task, labels, predictions, train_labels)
        else:
            result = score_by_examples(metric, task, np.asarray(labels), np.asarray(predictions), train_labels, scored)
        scored["metrics"][metric] = round(result.score, 4)
        scored["intervals"][metric] = [round(float(end), 4) for end in np.percentile(result.resampled, INTERVAL)]
        scored["majority"][metric] = round(result.baseline, 4)
    return scored


# One class or number for each example


def score_by_examples(
    metric: str, task: Task, labels: np.ndarray, predictions: np.ndarray, train_labels: np.ndarray, scored: Scored
) -> Result:
    """A score, those of resamples, and the best one of a constant answer: a class, or the mean of the training data.

    Adds a note to `scored` if the metric is undefined.
    """
    if task.positive == 0:  # all metrics of two classes but F1 are the same with the classes exchanged
        labels = 1 - labels
        predictions = 1 - predictions
        train_labels = 1 - train_labels
    constants = [train_labels.mean()] if task.kind == "regression" else range(task.classes)
    baseline = max(score(metric, labels, np.full(len(labels), constant)) for constant in constants)
    why = note(metric, labels, predictions, task.labels[task.positive] if task.labels else "")
    if why:
        scored["notes"].append(why)
    return Result(score(metric, labels, predictions), resample(metric, labels, predictions), baseline)


def score(metric: str, labels: np.ndarray, predictions: np.ndarray) -> float:
    """A GLUE metric, in [-100, 100]; 0 where it is undefined (see `note`)."""
    if note(metric, labels, predictions):
        return 0.0
    if metric in CORRELATIONS:
        return float(CORRELATIONS[metric](labels, predictions))
    return float(from_counts(metric, count_confusions(labels, predictions)))


def note(metric: str, labels: np.ndarray, predictions: np.ndarray, positive: str = "1") -> str | None:
    """Why a metric is undefined, and therefore reported as 0; None if it is defined. `positive`: name of class 1."""
    undefined = f"{NAMES[metric]} is undefined and reported as 0"
    labels = np.asarray(labels)
    predictions = np.asarray(predictions)
    wrong = int(np.count_nonzero(~np.isfinite(predictions)))
    if wrong:
        return f"{wrong:,} of {counted(len(predictions), 'prediction')} not finite: {undefined}."
    if metric in ("matthews", "pearson", "spearman"):
        for name, values in (("predictions", predictions), ("labels", labels)):
            if values.min() == values.max():
                return f"All {len(values)} {name} are {values[0]:.4g}: {undefined}."
    if metric == "f1":
        for what, values in (("is predicted to be", predictions), ("is", labels)):
            if not (values == 1).any():
                return f"None of {counted(len(values), 'example')} {what} of class {positive}: {undefined}."
    return None


def resample(metric: str, labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """The scores (RESAMPLES,) of examples drawn with replacement; 0 where a draw leaves the metric undefined."""
    from scipy import stats

    labels = np.asarray(labels)
    predictions = np.asarray(predictions)
    if note(metric, labels, predictions):
        return np.zeros(RESAMPLES)
    random = np.random.default_rng(0)
    if metric in CORRELATIONS:
        drawn = stats.bootstrap(
            (labels, predictions),
            CORRELATIONS[metric],
            n_resamples=RESAMPLES,
            batch=max(1, DRAWN_AT_ONCE // len(labels)),
            vectorized=True,
            paired=True,
            method="percentile",
            rng=random,
        )
        return drawn.bootstrap_distribution
    # Resampling rows is the same as drawing confusion tables, which takes 3 ms on QQP where SciPy takes 0.6 s.
    counts = count_confusions(labels, predictions)
    tables = random.multinomial(len(labels), counts.ravel() / len(labels), size=RESAMPLES)
    return from_counts(metric, tables.reshape(RESAMPLES, *counts.shape))


def count_confusions(labels: np.ndarray, predictions: np.ndarray, classes: int = 2) -> np.ndarray:
    """Counts by true class (row) and predicted class (column); larger than `classes` if a label is."""
    labels = np.asarray(labels).astype(int)
    predictions = np.asarray(predictions).astype(int)
    classes = max(classes, labels.max(initial=0) + 1, predictions.max(initial=0) + 1)
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def from_counts(metric: str, counts: np.ndarray) -> np.ndarray:
    """The scores (...) of confusion tables (..., classes, classes); 0 where the metric is undefined."""
    counts = counts.astype(float)  # products of four counts overflow integers
    right = np.diagonal(counts, axis1=-2, axis2=-1)
    true = counts.sum(-1)
    predicted = counts.sum(-2)
    if metric == "matthews":
        return matthews(right, true, predicted)
    parts = np.stack([right, true, predicted], axis=-1)
    if metric == "accuracy":
        parts = parts.sum(-2)
    elif metric == "f1":
        parts = parts[..., 1, :]
    return from_parts(metric, parts)


def matthews(right: np.ndarray, true: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """The correlation of any number of classes, from counts (..., classes): Gorodkin 2004, equation 8."""
    total = true.sum(-1)
    numerator = right.sum(-1) * total - (true * predicted).sum(-1)
    of_true = total**2 - (true**2).sum(-1)
    of_predicted = total**2 - (predicted**2).sum(-1)
    denominator = np.sqrt(of_true * of_predicted)
    return 100 * np.divide(numerator, denominator, out=np.zeros_like(total), where=denominator > 0)


def _pearson(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Pearson's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    from scipy import stats

    # SciPy warns if values far from zero differ little
    x_RN = np.subtract(x_RN, np.mean(x_RN, axis, float, keepdims=True))
    y_RN = np.subtract(y_RN, np.mean(y_RN, axis, float, keepdims=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        found = stats.pearsonr(x_RN, y_RN, axis=axis)
    return 100 * np.nan_to_num(found.statistic)


def _spearman(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Spearman's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    from scipy.stats import rankdata

    return _pearson(rankdata(x_RN, axis=axis), rankdata(y_RN, axis=axis))


CORRELATIONS = {"pearson": _pearson, "spearman": _spearman}  # for whole arrays of resamples


# Tags of sentences, and rows with several labels


def score_by_parts(metric: str, task: Task, labels: Answers, predictions: Answers, train_labels: np.ndarray) -> Result:
    """As `score_by_examples`, for sentences or rows with several labels: these are drawn.

    The constant answer is the most frequent tag; or the same labels in all rows, as many of the most frequent as is
    best.
    """
    of_constants = []
    for answer in constant_answers(task, labels, train_labels):
        counts = parts_of(metric, task, labels, answer)
        of_constants.append(float(from_parts(metric, counts.sum(0))))
    counts = parts_of(metric, task, labels, predictions).astype(float)
    random = np.random.default_rng(0)
    resampled = []
    for _ in range(RESAMPLES // AT_A_TIME):
        rows = random.integers(len(counts), size=(AT_A_TIME, len(counts)))
        times = np.stack([np.bincount(drawn, minlength=len(counts)) for drawn in rows])  # each is drawn
        sums = np.tensordot(times.astype(float), counts, 1)
        resampled.append(from_parts(metric, sums))
    return Result(float(from_parts(metric, counts.sum(0))), np.concatenate(resampled), max(of_constants))


def constant_answers(task: Task, labels: Answers, train_labels: np.ndarray) -> list[Answers]:
    """Answers that don't depend on the text, in the shape of `labels`."""
    if task.kind == "tokens":
        tag = usual_tag(train_labels)
        return [[np.full(len(given), tag) for given in labels]]
    ranks = np.argsort(np.argsort(-train_labels.sum(0), kind="stable"))
    answers: list[Answers] = []
    for most in range(1, task.classes + 1):
        answers.append(np.tile(ranks < most, (len(labels), 1)))
    return answers


def usual_tag(labels: np.ndarray) -> int:
    """The most frequent tag; numbers below 0 are not tags."""
    return int(np.bincount(labels[labels >= 0]).argmax())


def parts_of(metric: str, task: Task, labels: Answers, predictions: Answers) -> np.ndarray:
    """Counts of each sentence, or of each row with several labels, of what is right, what is true, what is predicted.

    (n, 3), of spans, labels or tags; for macro F1 (n, classes, 3).
    """
    counts: list = []
    for true, found in zip(labels, predictions, strict=True):
        if metric == "span_f1":
            in_words = task.in_words([true, found])
            true_spans, found_spans = (set(spans_of(list(tags))) for tags in in_words)
            counts.append((len(true_spans & found_spans), len(true_spans), len(found_spans)))
        elif metric == "micro_f1":
            counts.append((true @ found, true.sum(), found.sum()))
        elif metric == "accuracy":  # which is the F1 of all tags together
            counts.append(((true == found).sum(), len(true), len(true)))
        else:
            counts.append(tags_by_class(true, found, task.classes))
    return np.array(counts)


def tags_by_class(true: np.ndarray, found: np.ndarray, classes: int) -> np.ndarray:
    """Counts (classes, 3) of a sentence's tags: right, true, predicted."""
    right = true[true == found]
    return np.stack([np.bincount(tags, minlength=classes) for tags in (right, true, found)], axis=-1)


def from_parts(metric: str, counts: np.ndarray) -> np.ndarray:
    """The F1 of sums of such counts; for macro F1 the mean over the classes that occur, as scikit-learn's."""
    twice = 2.0 * counts[..., 0]
    known = counts[..., 1] + counts[..., 2]
    each = 100 * np.divide(twice, known, out=np.zeros_like(twice), where=known > 0)
    if metric == "macro_f1":
        return each.sum(-1) / (known > 0).sum(-1)
    return each


# What scores mean


def beats(about: Mapping, metric: str) -> bool:
    """Whether the interval of a score is above the majority baseline's score. `about`: as from `score_task`."""
    low, _ = about["intervals"][metric]
    return low > about["majority"][metric]


def verdict(task: Task) -> str:
    """The words for a score that doesn't beat the majority baseline."""
    return f"no better than always answering {CONSTANTS[task.kind]}"


def paper_average(scores: Mapping[str, float | None]) -> float | None:
    """The mean of the nine numbers of COLUMNS, as in the paper: MNLI m and mm both count. None if one is missing."""
    nine = []
    for column in COLUMNS:
        score = scores.get(column)
        if score is None:
            return None
        nine.append(score)
    return statistics.mean(nine)


def official_average(metrics: Mapping[str, Mapping[str, float]]) -> float | None:
    """GLUE's own average over eight tasks, without WNLI: first over the metrics of a task, then over MNLI m and mm.

    `metrics`: all metrics by name, for each of COLUMNS. None if one is missing.
    """
    of_task: dict[str, list[float]] = {}
    for column, (task, _) in COLUMNS.items():
        given = metrics.get(column, {})
        wanted = TASKS[task].metrics
        if any(given.get(metric) is None for metric in wanted):
            return None
        of_split = statistics.mean(given[metric] for metric in wanted)
        of_task.setdefault(task, []).append(of_split)
    return statistics.mean(statistics.mean(means) for means in of_task.values())
