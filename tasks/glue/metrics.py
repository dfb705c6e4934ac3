"""Metrics, by scikit-learn, SciPy and seqeval, with bootstrap intervals and baselines; and GLUE's two averages.

All scores are in percent, -100 to 100. A metric that is undefined is reported as 0, with a note that says why.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from model import counted
from tasks.glue.tasks import TASKS, Task

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
RESAMPLES, BY_PARTS = 1000, 50  # the latter at a time
CONSTANTS = {
    "classes": "the most frequent class", "regression": "the mean", "multilabel": "the most frequent labels",
    "tokens": "the most frequent tag",
}  # fmt: skip
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
        "macro_f1": functools.partial(metrics.f1_score, average="macro", zero_division=0),
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
    metric: str, labels: np.ndarray, predictions: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
) -> list[float]:
    """The 95 % interval of a score [low, high]: percentiles over resamples of the examples."""
    return [float(end) for end in np.percentile(resampled(metric, labels, predictions, resamples, seed), INTERVAL)]


def resampled(
    metric: str, labels: np.ndarray, predictions: np.ndarray, resamples: int = RESAMPLES, seed: int = 0
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
    if metric == "macro_f1":
        return from_parts(metric, np.stack([np.diagonal(counts, axis1=-2, axis2=-1), true, predicted], axis=-1))
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
    if task.kind in ("tokens", "multilabel"):
        return scored_by_parts(task, labels, predictions, train_labels)
    table = None if task.classes == 1 else confusion(labels, predictions, task.classes).tolist()
    if task.positive == 0:  # all metrics of two classes but F1 are the same with the classes exchanged
        labels, predictions, train_labels = (1 - given for given in (labels, predictions, train_labels))
    notes = [note(metric, labels, predictions) for metric in task.metrics]
    if task.own and task.classes == 2:
        notes = [sentence and sentence.replace("class 1", f"class {task.labels[task.positive]}") for sentence in notes]
    return {
        "metrics": {metric: round(score(metric, labels, predictions), 4) for metric in task.metrics},
        "intervals": {
            metric: [round(end, 4) for end in bootstrap(metric, labels, predictions)] for metric in task.metrics
        },
        "notes": [sentence for sentence in notes if sentence],
        "majority": {metric: round(baseline(metric, labels, train_labels, task), 4) for metric in task.metrics},
        "confusion": table,
    }


def parts_of(metric: str, task: Task, labels: Sequence[np.ndarray], predictions: Sequence[np.ndarray]) -> np.ndarray:
    """Counts of each sentence, or of each row with several labels, of what is right, what is true, what is predicted.

    (n, 3), of spans, labels or tags; for macro F1 (n, classes, 3).
    """
    pairs = list(zip(labels, predictions, strict=True))
    if metric == "span_f1":
        from seqeval.metrics.sequence_labeling import get_entities

        spans = [[set(get_entities(tags)) for tags in task.in_words(pair)] for pair in pairs]
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


def scored_by_parts(
    task: Task, labels: Sequence[np.ndarray], predictions: Sequence[np.ndarray], train_labels: np.ndarray
) -> dict:
    """As `scored`, for sentences with an array of tags each, or rows of 0 and 1: these are drawn for the intervals.

    The baseline answers the most frequent tag; or the same labels in all rows, as many of the most frequent as is best.
    """
    if task.kind == "tokens":
        tag, flat = usual_tag(train_labels), [np.concatenate(given) for given in (labels, predictions)]
        constants = [[np.full(len(given), tag) for given in labels]]
    else:
        ranks = np.argsort(np.argsort(-train_labels.sum(0), kind="stable"))
        constants = [np.tile(ranks < most, (len(labels), 1)) for most in range(1, task.classes + 1)]
    about: dict = {"metrics": {}, "intervals": {}, "notes": [], "majority": {}}
    for metric in task.metrics:
        counts, random = parts_of(metric, task, labels, predictions).astype(float), np.random.default_rng(0)
        resampled = []
        for _ in range(RESAMPLES // BY_PARTS):
            rows = random.integers(len(counts), size=(BY_PARTS, len(counts)))
            times = np.stack([np.bincount(drawn, minlength=len(counts)) for drawn in rows])  # each is drawn
            resampled.append(from_parts(metric, np.tensordot(times.astype(float), counts, 1)))
        simple = [from_parts(metric, parts_of(metric, task, labels, given).sum(0)) for given in constants]
        about["metrics"][metric] = round(float(from_parts(metric, counts.sum(0))), 4)
        about["intervals"][metric] = [round(float(end), 4) for end in np.percentile(resampled, INTERVAL)]
        about["majority"][metric] = round(float(max(simple)), 4)
    return about | {"confusion": confusion(*flat, task.classes).tolist() if task.kind == "tokens" else None}


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
