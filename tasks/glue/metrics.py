"""Metrics with bootstrap intervals and baselines; and GLUE's two averages.

Correlations are SciPy's; all else is made of counts, as resamples are drawn from them. All scores are in percent, -100
to 100. A metric that is undefined is reported as 0, with a note that says why.
"""

import statistics
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from model.wording import counted
from tasks.glue.table import GLUE, TASKS, Task
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
RESAMPLES, BY_PARTS = 1000, 50  # the latter at a time
CONSTANTS = {
    "classes": "the most frequent class", "regression": "the mean", "multilabel": "the most frequent labels",
    "tokens": "the most frequent tag",
}  # fmt: skip
DRAWN_AT_ONCE = 1 << 15  # examples, so that arrays fit in a processor's cache


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
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if wrong := int(np.count_nonzero(~np.isfinite(predictions))):
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

    random, labels, predictions = np.random.default_rng(0), np.asarray(labels), np.asarray(predictions)
    if note(metric, labels, predictions):
        return np.zeros(RESAMPLES)
    if metric in CORRELATIONS:
        options = {"paired": True, "vectorized": True, "method": "percentile", "n_resamples": RESAMPLES, "rng": random}
        options["batch"] = max(1, DRAWN_AT_ONCE // len(labels))
        return stats.bootstrap((labels, predictions), CORRELATIONS[metric], **options).bootstrap_distribution
    # Resampling rows is the same as drawing confusion tables, which takes 3 ms on QQP where SciPy takes 0.6 s.
    counts = count_confusions(labels, predictions)
    drawn = random.multinomial(len(labels), counts.ravel() / len(labels), size=RESAMPLES)
    return from_counts(metric, drawn.reshape(RESAMPLES, *counts.shape))


def count_confusions(labels: np.ndarray, predictions: np.ndarray, classes: int = 2) -> np.ndarray:
    """Counts by true class (row) and predicted class (column); larger than `classes` if a label is."""
    labels, predictions = np.asarray(labels).astype(int), np.asarray(predictions).astype(int)
    classes = max(classes, labels.max(initial=0) + 1, predictions.max(initial=0) + 1)
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def from_counts(metric: str, counts: np.ndarray) -> np.ndarray:
    """The scores (...) of confusion tables (..., classes, classes); 0 where the metric is undefined."""
    counts = counts.astype(float)  # products of four counts overflow integers
    right, true, predicted = np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1), counts.sum(-2)
    if metric == "matthews":  # of any number of classes: Gorodkin 2004, equation 8
        right, total = right.sum(-1), true.sum(-1)
        numerator = right * total - (true * predicted).sum(-1)
        denominator = np.sqrt((total**2 - (true**2).sum(-1)) * (total**2 - (predicted**2).sum(-1)))
        return 100 * np.divide(numerator, denominator, out=np.zeros_like(total), where=denominator > 0)
    parts = np.stack([right, true, predicted], axis=-1)
    return from_parts(metric, {"accuracy": parts.sum(-2), "f1": parts[..., 1, :], "macro_f1": parts}[metric])


def _pearson(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Pearson's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    from scipy import stats

    # SciPy warns if values far from zero differ little
    centred = (np.subtract(values, np.mean(values, axis, float, keepdims=True)) for values in (x_RN, y_RN))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return 100 * np.nan_to_num(stats.pearsonr(*centred, axis=axis).statistic)


def _spearman(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Spearman's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    from scipy.stats import rankdata

    return _pearson(rankdata(x_RN, axis=axis), rankdata(y_RN, axis=axis))


CORRELATIONS = {"pearson": _pearson, "spearman": _spearman}  # for whole arrays of resamples


def score_task(task: Task, labels: Sequence, predictions: Sequence, train_labels: np.ndarray) -> dict:
    """Metrics of predictions with intervals and notes, the metrics of the majority baseline, and the confusion table.

    `labels`, `predictions`: numbers; or an array of tags for each sentence, or of 0 and 1 for each row. The confusion
    table has true classes as rows and predicted ones as columns; it is None for a regression and for multilabel.
    """
    of_parts, flat = task.kind in ("tokens", "multilabel"), [labels, predictions]
    if task.kind == "tokens":
        flat = [np.concatenate(given) for given in flat]
    table = count_confusions(*flat, task.classes).tolist() if task.kind in ("classes", "tokens") else None
    if task.positive == 0:  # all metrics of two classes but F1 are the same with the classes exchanged
        labels, predictions, train_labels = (1 - given for given in (labels, predictions, train_labels))
    positive = task.labels[task.positive] if task.labels else ""
    about: dict = {"metrics": {}, "intervals": {}, "notes": [], "majority": {}, "confusion": table}
    for metric in task.metrics:
        value, draws, simple = (score_by_parts if of_parts else score_by_examples)(
            metric, task, labels, predictions, train_labels
        )
        about["metrics"][metric] = round(value, 4)
        about["intervals"][metric] = [round(float(end), 4) for end in np.percentile(draws, INTERVAL)]
        about["majority"][metric] = round(simple, 4)
        if not of_parts and (why := note(metric, labels, predictions, positive)):
            about["notes"].append(why)
    return about


def score_by_examples(
    metric: str, task: Task, labels: np.ndarray, predictions: np.ndarray, train_labels: np.ndarray
) -> tuple[float, np.ndarray, float]:
    """A score, those of resamples, and the best one of a constant answer: a class, or the mean of the training data."""
    constants = [train_labels.mean()] if task.kind == "regression" else range(task.classes)
    simple = max(score(metric, labels, np.full(len(labels), constant)) for constant in constants)
    return score(metric, labels, predictions), resample(metric, labels, predictions), simple


def parts_of(metric: str, task: Task, labels: Sequence[np.ndarray], predictions: Sequence[np.ndarray]) -> np.ndarray:
    """Counts of each sentence, or of each row with several labels, of what is right, what is true, what is predicted.

    (n, 3), of spans, labels or tags; for macro F1 (n, classes, 3).
    """
    pairs = list(zip(labels, predictions, strict=True))
    if metric == "span_f1":
        spans = [[set(spans_of(tags)) for tags in task.in_words(pair)] for pair in pairs]
        return np.array([(len(true & found), len(true), len(found)) for true, found in spans])
    if metric == "micro_f1":
        return np.array([(true @ found, true.sum(), found.sum()) for true, found in pairs])
    if metric == "accuracy":  # which is the F1 of all tags together
        return np.array([((true == found).sum(), len(true), len(true)) for true, found in pairs])
    of_classes = [(true[true == found], true, found) for true, found in pairs]
    return np.array([[np.bincount(each, minlength=task.classes) for each in three] for three in of_classes]).mT


def from_parts(metric: str, counts: np.ndarray) -> np.ndarray:
    """The F1 of sums of such counts; for macro F1 the mean over the classes that occur, as scikit-learn's."""
    twice, known = 2.0 * counts[..., 0], counts[..., 1] + counts[..., 2]
    each = 100 * np.divide(twice, known, out=np.zeros_like(twice), where=known > 0)
    return each.sum(-1) / (known > 0).sum(-1) if metric == "macro_f1" else each


def usual_tag(labels: np.ndarray) -> int:
    """The most frequent tag; those below 0 are none."""
    return int(np.bincount(labels[labels >= 0]).argmax())


def score_by_parts(
    metric: str, task: Task, labels: Sequence[np.ndarray], predictions: Sequence[np.ndarray], train_labels: np.ndarray
) -> tuple[float, np.ndarray, float]:
    """As `by_examples`, for sentences or rows with several labels: these are drawn.

    The constant answer is the most frequent tag; or the same labels in all rows, as many of the most frequent as is
    best.
    """
    if task.kind == "tokens":
        constants = [[np.full(len(given), usual_tag(train_labels)) for given in labels]]
    else:
        ranks = np.argsort(np.argsort(-train_labels.sum(0), kind="stable"))
        constants = [np.tile(ranks < most, (len(labels), 1)) for most in range(1, task.classes + 1)]
    simple = max(float(from_parts(metric, parts_of(metric, task, labels, given).sum(0))) for given in constants)
    counts, random, draws = parts_of(metric, task, labels, predictions).astype(float), np.random.default_rng(0), []
    for _ in range(RESAMPLES // BY_PARTS):
        rows = random.integers(len(counts), size=(BY_PARTS, len(counts)))
        times = np.stack([np.bincount(drawn, minlength=len(counts)) for drawn in rows])  # each is drawn
        draws.append(from_parts(metric, np.tensordot(times.astype(float), counts, 1)))
    return float(from_parts(metric, counts.sum(0))), np.concatenate(draws), simple


def beats(about: Mapping, metric: str) -> bool:
    """Whether the interval of a score lies above the majority baseline's score. `about`: as from `scored`."""
    return about["intervals"][metric][0] > about["majority"][metric]


def verdict(task: Task) -> str:
    """The words for a score that doesn't beat the majority baseline."""
    return f"no better than always answering {CONSTANTS[task.kind]}"


def paper_average(scores: Mapping[str, float | None]) -> float | None:
    """The mean of the nine numbers of COLUMNS, as in the paper: MNLI m and mm both count. None if one is missing."""
    nine = [scores.get(column) for column in COLUMNS]
    return None if None in nine else statistics.mean(nine)


def official_average(metrics: Mapping[str, Mapping[str, float]]) -> float | None:
    """GLUE's own average over eight tasks, without WNLI: first over the metrics of a task, then over MNLI m and mm.

    `metrics`: all metrics by name, for each of COLUMNS. None if one is missing.
    """
    of_task: dict[str, list[float]] = {}
    for column, (task, _) in COLUMNS.items():
        values = [metrics.get(column, {}).get(metric) for metric in TASKS[task].metrics]
        if None in values:
            return None
        of_task.setdefault(task, []).append(statistics.mean(values))
    return statistics.mean(statistics.mean(means) for means in of_task.values())
