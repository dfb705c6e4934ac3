"""Metrics: GLUE's own, by scikit-learn and SciPy, with bootstrap intervals and baselines; and the two averages.

All scores are in percent, -100 to 100. A metric that is undefined is reported as 0, with a note that says why.
"""

import statistics
from collections.abc import Mapping

import numpy as np

from model import counted
from tasks.glue.tasks import TASKS, Task

NAMES = {
    "accuracy": "accuracy",
    "f1": "F1",
    "matthews": "Matthews correlation",
    "pearson": "Pearson correlation",
    "spearman": "Spearman correlation",
}
COLUMNS = {  # of the paper's tables, in order: task and validation split; the score is the task's first metric
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
DRAWN_AT_ONCE = 1 << 15  # examples, so that arrays fit in a processor's cache


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
    """Why a metric is undefined, and therefore reported as 0; None if it is defined."""
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
    """The best score of a constant answer: one class for all examples, or the mean of the training labels."""
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
    from scipy import stats

    random, labels, predictions = np.random.default_rng(seed), np.asarray(labels), np.asarray(predictions)
    if note(metric, labels, predictions):
        return np.zeros(resamples)
    if metric in CORRELATIONS:
        pairs = (labels, predictions) if metric == "spearman" else (_centred(labels), _centred(predictions))
        options = {"paired": True, "vectorized": True, "method": "percentile", "n_resamples": resamples, "rng": random}
        batch = max(1, DRAWN_AT_ONCE // len(labels))
        return stats.bootstrap(pairs, CORRELATIONS[metric], batch=batch, **options).bootstrap_distribution
    # Resampling rows is the same as drawing confusion tables, which takes 3 ms on QQP where SciPy takes 0.6 s.
    counts = confusion(labels, predictions)
    drawn = random.multinomial(len(labels), counts.ravel() / len(labels), size=resamples)
    return from_counts(metric, drawn.reshape(resamples, *counts.shape))


def confusion(labels: np.ndarray, predictions: np.ndarray, classes: int = 2) -> np.ndarray:
    """Counts by true class (row) and predicted class (column); larger than `classes` if a label is."""
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
    """The values minus their mean, with the same correlations: SciPy warns if values far from zero differ little."""
    values = np.asarray(values, dtype=float)
    return values - values.mean()


def _pearson(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Pearson's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    varies = (np.ptp(x_RN, axis) > 0) & (np.ptp(y_RN, axis) > 0)
    x_RN, y_RN = (values - values.mean(axis, keepdims=True) for values in (x_RN, y_RN))
    covariance, *variances = (np.einsum("...n,...n", a, b) for a, b in ((x_RN, y_RN), (x_RN, x_RN), (y_RN, y_RN)))
    spread = np.sqrt(variances[0]) * np.sqrt(variances[1])
    return 100 * np.divide(covariance, spread, out=np.zeros_like(spread), where=varies & (spread > 0))


def _spearman(x_RN: np.ndarray, y_RN: np.ndarray, axis: int = -1) -> np.ndarray:
    """Spearman's correlation (R,) of each resample, in percent; 0 where x or y is constant."""
    from scipy.stats import rankdata

    return _pearson(rankdata(x_RN, axis=axis), rankdata(y_RN, axis=axis))


CORRELATIONS = {"pearson": _pearson, "spearman": _spearman}  # for whole arrays of resamples


def scored(task: Task, labels: np.ndarray, predictions: np.ndarray, train_labels: np.ndarray) -> dict:
    """Metrics of predictions with intervals and notes, the metrics of the majority baseline, and the confusion table.

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
    """Whether the interval of a score lies above the majority baseline's score. `about`: as from `scored`."""
    return about["intervals"][metric][0] > about["majority"][metric]


def verdict(task: Task) -> str:
    """The words for a score that doesn't beat the majority baseline."""
    constant = "the mean" if task.classes == 1 else "the most frequent class"
    return f"no better than always answering {constant}"


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
