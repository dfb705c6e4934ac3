"""Which run of a study is best, and whether that is more than chance, against SciPy's Welch test."""

import math

import numpy as np
import pytest
from scipy.stats import ttest_ind

from tasks.reports.rows import LOSS, Mean, RunMeans, StudyScore
from tasks.reports.study_verdicts import best_loss, best_score, loss_difference, score_difference, seeds_half

CLOSE = [1.0, 1.02, 1.01]
FAR = [1.5, 1.53, 1.49]


def mean_of(values: list[float]) -> Mean:
    return Mean(np.mean(values), np.std(values, ddof=1) if len(values) > 1 else math.nan, len(values))


def line(run: str, losses: list[float], length_nats: float = 0.1, trained: bool = True) -> RunMeans:
    """A run with a loss for each seed."""
    mean = mean_of(losses)
    if not trained:
        mean = Mean(mean.value, 0.0, mean.count)
    models = [f"{run} {n}" for n in range(len(losses))]
    means = {LOSS: mean, "length_nats": Mean(length_nats, math.nan, 1)}
    return RunMeans(run, len(losses), 0, "", models, means, trained)


def score(run: str, values: list[float], half: float = 2.0, is_weak: bool = False) -> StudyScore:
    """A run with a score for each model, with an interval of so much on either side."""
    mean = mean_of(values)
    return StudyScore(
        run, "own", "accuracy", mean.value, mean.value - half, mean.value + half, 50, is_weak, 99, 1, mean
    )


@pytest.mark.parametrize("other", [FAR, [0.7, 1.4], [1.01, 1.05, 1.0, 0.97]])
def test_the_interval_of_a_difference_over_seeds_is_that_of_welch(other: list[float]):
    interval = ttest_ind(CLOSE, other, equal_var=False).confidence_interval(0.95)
    half = seeds_half(mean_of(CLOSE), mean_of(other))
    difference = np.mean(CLOSE) - np.mean(other)
    assert (difference - half, difference + half) == pytest.approx((interval.low, interval.high))


@pytest.mark.parametrize(
    ("run", "other", "kind"),
    [
        (line("a", CLOSE), line("b", FAR), "clear"),
        (line("a", CLOSE), line("b", [1.0, 1.1, 1.02]), "chance"),
        (line("a", [1.0]), line("b", [9.0]), "one seed"),
        (line("a", CLOSE), line("b", [9.0]), "one seed"),
        (line("a", [1.0], length_nats=0.2), line("b", [1.09]), "open bounds"),
        (line("a", [1.0], length_nats=0.2), line("b", [1.3]), "clear bounds"),
        (line("a", [1.0, 1.4], length_nats=0.2), line("b", [1.3, 1.7]), "open bounds"),  # the seeds are far apart
        (line("a", CLOSE), line("b", [2.0], trained=False), "clear"),  # what was not trained has no seed
        (line("a", [1.0]), line("b", [2.0], trained=False), "one seed"),
        (line("a", CLOSE), line("a", CLOSE), "equal"),
    ],
)
def test_a_difference_of_losses_is_clear_only_if_seeds_and_vocabularies_allow_it(run, other, kind):
    for one, against in ((run, other), (other, run)):
        found = loss_difference(one, against)
        assert found.kind == kind
        assert found.is_clear == kind.startswith("clear")


@pytest.mark.parametrize(
    ("run", "other", "kind"),
    [
        (score("a", [70.0]), score("b", [66.0]), "clear"),  # 4 > sqrt(2² + 2²)
        (score("a", [70.0]), score("b", [67.5]), "chance"),
        (score("a", [70.0, 71.0]), score("b", [66.0, 60.0]), "chance"),  # of few examples enough, of seeds not
        (score("a", [70.0]), score("b", [70.0]), "equal"),
        (score("a", [70.0], half=math.nan), score("b", [60.0], half=math.nan), "no interval"),
        (score("a", [70.0, 71.0], half=math.nan), score("b", [50.0, 51.5], half=math.nan), "clear"),  # GLUE's average
    ],
)
def test_a_difference_of_scores_is_clear_only_if_it_is_beyond_the_errors_of_examples_and_seeds(run, other, kind):
    for one, against in ((run, other), (other, run)):
        assert score_difference(one, against).kind == kind


def test_the_best_run_is_compared_with_the_first_or_else_the_next_and_those_near_it_are_named():
    lines = [line("first", FAR), line("best", CLOSE), line("near", [1.0, 1.1, 1.02]), line("none", [math.nan])]
    found = best_loss(lines)
    assert (found.best, found.against.other, found.against.kind, found.near) == ("best", "first", "clear", ["near"])
    found = best_loss(lines[1:])
    assert (found.best, found.against.other, found.against.kind, found.near) == ("best", "near", "chance", [])
    found = best_score([score("first", [60.0]), score("far", [50.0]), score("best", [70.0]), score("near", [69.0])])
    assert (found.best, found.against.other, found.near, found.worse) == ("best", "first", ["near"], ["far"])
    assert best_loss([line("none", [math.nan])]) is None
    assert best_loss([line("alone", [1.0])]).against is None
