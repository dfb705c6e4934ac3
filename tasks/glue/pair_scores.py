"""Accuracies on minimal pairs: how often a model prefers the good sentence, in all, by part, field and group.

A tie counts as half, where the pipelines of the BabyLM challenge (2025, 2026) count it as right. The score of a set is
the unweighted mean of its groups' accuracies, as there. Its standard error is over pairs. In each group the variance is
that of its pairs and of one half of a pair more at either end of the scale (Jeffreys' prior), so that a few pairs that
are all right don't seem certain.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

PAIRS = "pairs.parquet"  # the scored pairs in an artifact
METRIC_WORDS = {"original": "original", "within_word": "within word"}
METRICS = tuple(METRIC_WORDS)  # as in model.likelihood, which loads torch
NORMAL = 1.96  # standard errors on either side of a mean in a 95 % interval
CHANCE = 50.0  # the accuracy of guessing
PAIR_METRIC = "minimal_pairs"  # the name of the metric among those of other scores
# parts of a set
EVERY = "all"
FILTERED = "BabyLM's blimp_filtered"
PERMUTED = "groups of permutations"
OTHERS = "other groups"
MOSTLY = 0.5  # share of permutations from which on a group counts as one of permutations


class Accuracy(NamedTuple):
    """The unweighted mean of the accuracies of groups, times 100, and its standard error over pairs."""

    value: float
    standard_error: float  # NaN if not known, in artifacts of earlier versions

    def half(self) -> float:
        """Half of the 95 % interval."""
        return NORMAL * self.standard_error

    def error_in_words(self) -> str | None:
        """The standard error with a digit, None if it is not known."""
        return None if math.isnan(self.standard_error) else f"{self.standard_error:.1f}"

    def ends(self) -> list[float]:
        """The 95 % interval, within the scale."""
        return [max(0.0, self.value - self.half()), min(100.0, self.value + self.half())]

    def is_above(self, value: float) -> bool:
        """Whether it is above a number by more than chance."""
        return self.value - self.half() > value


def is_right(scored: "pd.DataFrame", metric: str) -> np.ndarray:
    """(pairs,) 1 where the good sentence is likelier, 0.5 for a tie, 0 where it is less likely."""
    return is_likelier(scored[f"good_{metric}"].to_numpy(), scored[f"bad_{metric}"].to_numpy())


def is_likelier(good: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """The same of the scores of both sentences, (pairs,) each."""
    return (np.sign(good - bad) + 1) / 2


def accuracy_of(right: np.ndarray, groups: Sequence[str] | np.ndarray, lowest: float = 0.0) -> Accuracy:
    """The accuracy of pairs, or of their differences between two models.

    right: (pairs,); groups: (pairs,) that of each; lowest: the lower end of the scale, whose upper end is 1.
    """
    _, numbers = np.unique(np.asarray(groups, dtype=object), return_inverse=True)
    counts = np.bincount(numbers)
    totals = np.bincount(numbers, right)
    squares = np.bincount(numbers, right**2)
    likely_means = (totals + (lowest + 1) / 2) / (counts + 1)
    likely_squares = (squares + (lowest**2 + 1) / 2) / (counts + 1)
    variances = (likely_squares - likely_means**2) / counts  # of the mean of each group
    value = 100 * float((totals / counts).mean())
    error = 100 * math.sqrt(variances.sum()) / len(counts)
    return Accuracy(round(value, 4), round(error, 4))


def accuracy_in(about: dict[str, Any], metric: str) -> Accuracy:
    """An accuracy by a metric in a part of an artifact's statistics."""
    error = about[metric]["standard_error"]
    return Accuracy(about[metric]["value"], math.nan if error is None else error)


def main_accuracy(stats: dict[str, Any]) -> Accuracy:
    """The accuracy on all pairs of a set by the original score. `stats`: of its artifact."""
    return accuracy_in(stats["parts"][EVERY], METRICS[0])


def summarize(right: dict[str, np.ndarray], groups: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """The accuracies of some pairs by both metrics, and how many pairs and groups these are.

    right: (pairs,) by metric, as `is_right`; groups: (pairs,) that of each; rows: the numbers or the mask of the pairs.
    """
    chosen = groups[rows]
    found: dict[str, Any] = {"pairs": len(chosen), "groups": len(set(chosen))}
    for metric in METRICS:
        found[metric] = accuracy_of(right[metric][rows], chosen)._asdict()
    return found


def permuted_groups(table: "pd.DataFrame") -> set[str]:
    """The groups most of whose pairs are a `permutation`: frequencies of words can't decide these."""
    shares = table.groupby("group")["permutation"].mean()
    return set(shares.index[shares >= MOSTLY])


def parts_of(table: "pd.DataFrame") -> dict[str, np.ndarray]:
    """(pairs,) whether a pair is in a part of its set, by the name of the part.

    table: the pairs of a set, with `group`, `permutation`, and `filtered` if BabyLM leaves some of them out.
    """
    parts = {EVERY: np.ones(len(table), dtype=bool)}
    if "filtered" in table:
        parts[FILTERED] = table["filtered"].to_numpy(dtype=bool)
    is_permuted = table["group"].isin(permuted_groups(table)).to_numpy()
    if is_permuted.any() and not is_permuted.all():
        parts |= {PERMUTED: is_permuted, OTHERS: ~is_permuted}
    return parts


def statistics(scored: "pd.DataFrame", name: str) -> dict[str, Any]:
    """What the stage returns of scored pairs. `name`: of the set."""
    right = {metric: is_right(scored, metric) for metric in METRICS}
    found: dict[str, Any] = {
        "set": name,
        "pairs": len(scored),
        "groups": int(scored["group"].nunique()),
        **accuracies(scored, right),
        "ties": {metric: int((right[metric] == 0.5).sum()) for metric in METRICS},
        "same_sentences": int((scored["good"] == scored["bad"]).sum()),
        "same_tokens": int(scored["same_tokens"].sum()),
    }
    return found | {"table": [row_of(part, about) for part, about in parts_and_fields(found)]}


def accuracies(scored: "pd.DataFrame", right: dict[str, np.ndarray]) -> dict[str, dict[str, Any]]:
    """The accuracies by part, field and group. right: (pairs,) by metric, as `is_right`."""
    groups = scored["group"].to_numpy()
    of_fields = scored.groupby("field").indices
    of_groups = scored.groupby("group").indices
    return {
        "parts": {part: summarize(right, groups, rows) for part, rows in parts_of(scored).items()},
        "fields": {str(field): summarize(right, groups, rows) for field, rows in of_fields.items() if field},
        "by_group": {str(group): summarize(right, groups, rows) for group, rows in of_groups.items()},
    }


def parts_and_fields(stats: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The names and accuracies of parts, then of fields, which users name: one may be named as a part is."""
    return [*stats["parts"].items(), *stats["fields"].items()]


def row_of(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """A row of the table that `cram show` prints."""
    row = {"pairs of": name, "groups": about["groups"], "pairs": about["pairs"]}
    for metric in METRICS:
        value, error = about[metric].values()
        row[METRIC_WORDS[metric]] = f"{value:.1f} ± {error:.1f}"
    return row
