"""Metrics: GLUE's own, by scikit-learn and SciPy, with bootstrap intervals and baselines; and the two averages.

All scores are in percent, -100 to 100. A metric that is undefined is reported as 0, with a note that says why.
"""

import statistics
from collections.abc import Mapping

import numpy as np

from model.quantities import counted
from tasks.glue.tasks import TASKS, Task

NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
COLUMNS = {  # of the paper's tables, in their order: task and validation split; the task's first metric is the score
    "MNLI m": ("mnli", "validation_matched"),
    "MNLI mm": ("mnli", "validation_mismatched"),
    "SST-2": ("sst2", "validation"),
    "STS-B": ("stsb", "validation"),
    "RTE": ("rte", "validation"),
    "QNLI": ("qnli", "validation"),
    "QQP": ("qqp", "validation"),
    "MRPC": ("mrpc", "validation"),
    "CoLA": ("cola", "validation"),
}
INTERVAL = (2.5, 97.5)  # percentiles
DRAWN_AT_ONCE = 1 << 15  # examples; what is made of them stays in a processor's cache


def score(metric: str, labels: np.ndarray, predictions: np.ndarray) -> float:
    """A GLUE metric, in [-100, 100]; 0 where it is undefined (see `note`)."""
    from scipy import stats
    from sklearn import metrics

    if note(metric, labels, predictions):
        return 0.0
    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": metrics.f1_score,
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda x, y: stats.pearsonr(_centred(x), _centred(y)).statistic,
        "spearman": lambda x, y: stats.spearmanr(x, y).statistic,
    }
    return 100 * float(functions[metric](labels, predictions))


def note(metric: str, labels: np.ndarray, predictions: np.ndarray) -> str | None:
    """A sentence that says why a metric is undefined, and so reported as 0; None if it is not."""
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
                return f"None of {counted(len(values), 'example')} {what} of class 1: {undefined}."
    return None


def baseline(metric: str, labels: np.ndarray, train_labels: np.ndarray, task: Task) -> float:
    """The best score on these labels that one answer to all gives: a class, or the mean of the training labels."""
    constants = [train_labels.mean()] if task.classes == 1 else range(task.classes)
    return max(score(metric, labels, np.full(len(labels), constant)) for constant in constants)


def bootstrap(
    metric: str, labels: np.ndarray, predictions: np.ndarray, resamples: int = 1000, seed: int = 0
) -> list[float]:
    """The 95 % interval of a score [low, high]: percentiles over resamples of the examples."""
    return [float(end) for end in np.percentile(resampled(metric, labels, predictions, resamples, seed), INTERVAL)]


def resampled(
    metric: str, labels: np.ndarray, predictions: np.ndarray, resamples: int = 1000, seed: int = 0
) -> np.ndarray:
    """The scores (resamples,) of examples drawn with replacement; 0 where a draw leaves the metric undefined."""
    random, labels, predictions = np.random.default_rng(seed), np.asarray(labels), np.asarray(predictions)
    if not np.isfinite(predictions).all():
        return np.zeros(resamples)
    if metric in ("pearson", "spearman"):
        return _resampled_correlations(metric, labels, predictions, resamples, random)
    counts = confusion(labels, predictions)
    drawn = random.multinomial(len(labels), counts.ravel() / len(labels), size=resamples)
    return from_counts(metric, drawn.reshape(resamples, *counts.shape))


def confusion(labels: np.ndarray, predictions: np.ndarray, classes: int = 2) -> np.ndarray:
    """How often each class (row) was taken for each (column); of more classes if there are labels beyond those."""
    labels, predictions = np.asarray(labels).astype(int), np.asarray(predictions).astype(int)
    classes = max(classes, labels.max(initial=0) + 1, predictions.max(initial=0) + 1)
    return np.bincount(labels * classes + predictions, minlength=classes**2).reshape(classes, classes)


def from_counts(metric: str, counts: np.ndarray) -> np.ndarray:
    """The scores (...) of confusion tables (..., classes, classes); 0 where the metric is undefined."""
    counts = counts.astype(float)  # products of four counts overflow integers
    right, total = np.trace(counts, axis1=-2, axis2=-1), counts.sum((-2, -1))
    if metric == "accuracy":
        return 100 * right / total
    true, predicted = counts.sum(-1), counts.sum(-2)
    if metric == "f1":
        numerator, denominator = 2 * counts[..., 1, 1], true[..., 1] + predicted[..., 1]
    else:  # Matthews, of any number of classes: Gorodkin 2004, equation 8
        numerator = right * total - (true * predicted).sum(-1)
        denominator = np.sqrt((total**2 - (true**2).sum(-1)) * (total**2 - (predicted**2).sum(-1)))
    return 100 * np.divide(numerator, denominator, out=np.zeros_like(total), where=denominator > 0)


def _centred(values: np.ndarray) -> np.ndarray:
    """Pearson's correlation stays the same, and SciPy does not warn of values that lie close together far from zero."""
    values = np.asarray(values, dtype=float)
    return values - values.mean()


def _resampled_correlations(
    metric: str, labels: np.ndarray, predictions: np.ndarray, resamples: int, random: np.random.Generator
) -> np.ndarray:
    if metric == "spearman":
        x, y = (np.unique(values, return_inverse=True)[1] for values in (labels, predictions))
    else:
        x, y = _centred(labels), _centred(predictions)
    found, at_once = [], max(1, DRAWN_AT_ONCE // len(x))
    for start in range(0, resamples, at_once):
        rows = random.integers(len(x), size=(min(at_once, resamples - start), len(x)))
        drawn = (x[rows], y[rows])
        found.append(_correlations(*map(_ranks, drawn) if metric == "spearman" else drawn))
    return np.concatenate(found)


def _ranks(places_RN: np.ndarray) -> np.ndarray:
    """The rank of each value among those of its row, ties sharing the mean of theirs; values are 0, 1, 2 …"""
    rows, kinds = len(places_RN), places_RN.max() + 1
    counts = np.bincount((places_RN + kinds * np.arange(rows)[:, None]).ravel(), minlength=rows * kinds)
    counts_RK = counts.reshape(rows, kinds)
    return np.take_along_axis(counts_RK.cumsum(axis=1) - (counts_RK - 1) / 2, places_RN, axis=1)


def _correlations(x_RN: np.ndarray, y_RN: np.ndarray) -> np.ndarray:
    """Pearson's of each row, in percent; 0 for rows where x or y is constant."""
    varies = (np.ptp(x_RN, axis=1) > 0) & (np.ptp(y_RN, axis=1) > 0)
    x_RN, y_RN = (values - values.mean(axis=1, keepdims=True) for values in (x_RN, y_RN))
    covariance, *variances = (np.einsum("rn,rn->r", a, b) for a, b in ((x_RN, y_RN), (x_RN, x_RN), (y_RN, y_RN)))
    spread = np.sqrt(variances[0]) * np.sqrt(variances[1])
    return 100 * np.divide(covariance, spread, out=np.zeros(len(spread)), where=varies & (spread > 0))


def measure(task: Task, labels: np.ndarray, predictions: np.ndarray, train_labels: np.ndarray) -> dict:
    """The report on predictions: metrics, their intervals, notes, the majority baseline's metrics, confusion.

    The confusion table has true classes as rows and predicted ones as columns; it is None for a regression.
    """
    notes = [note(metric, labels, predictions) for metric in task.metrics]
    return {
        "metrics": {metric: round(score(metric, labels, predictions), 4) for metric in task.metrics},
        "intervals": {
            metric: [round(end, 4) for end in bootstrap(metric, labels, predictions)] for metric in task.metrics
        },
        "notes": [sentence for sentence in notes if sentence],
        "majority": {metric: round(baseline(metric, labels, train_labels, task), 4) for metric in task.metrics},
        "confusion": None if task.classes == 1 else confusion(labels, predictions, task.classes).tolist(),
    }


def beats(about: Mapping, metric: str) -> bool:
    """Whether the interval of a score lies above the majority baseline's score. `about`: as from `measure`."""
    return about["intervals"][metric][0] > about["majority"][metric]


def verdict(task: Task) -> str:
    """What a score is that doesn't beat the majority baseline."""
    constant = "the mean" if task.classes == 1 else "the most frequent class"
    return f"no better than always answering {constant}"


def paper_average(scores: Mapping[str, float | None]) -> float | None:
    """The mean of the nine numbers of COLUMNS, as in the paper: MNLI m and mm both count. None if one is missing."""
    nine = [scores.get(column) for column in COLUMNS]
    return None if None in nine else statistics.mean(nine)


def official_average(metrics: Mapping[str, Mapping[str, float]]) -> float | None:
    """GLUE's own average, without WNLI: over eight tasks, after that of a task's two metrics and that of MNLI m and mm.

    `metrics` holds all metrics of each of COLUMNS, by name. None if one is missing.
    """
    of_task: dict[str, list[float]] = {}
    for column, (task, _) in COLUMNS.items():
        found = [metrics.get(column, {}).get(metric) for metric in TASKS[task].metrics]
        if None in found:
            return None
        of_task.setdefault(task, []).append(statistics.mean(found))
    return statistics.mean(statistics.mean(means) for means in of_task.values())
