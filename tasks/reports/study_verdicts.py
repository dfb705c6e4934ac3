"""Which run of a study is best, by how much, and whether that is more than chance, as far as seeds and intervals show.

Of losses, the difference of two means over seeds has Welch's interval. Of scores, the interval also has the error over
the examples. On minimal pairs it is that of the differences, pair by pair; elsewhere that of two samples, which is more
than it needs, as both runs are scored on the same examples.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tasks.reports.losses import vocabularies_differ
from tasks.reports.rows import LOSS, Mean, RunMeans, StudyScore

CONFIDENCE = 0.975  # of each side of a 95 % interval
Kind = Literal["clear", "chance", "one seed", "clear bounds", "open bounds", "equal", "no interval"]


class Difference(NamedTuple):
    """How a run compares with another one."""

    run: str
    other: str
    value: float  # of the run less the other's
    half: float  # half of the 95 % interval; NaN if unknown
    kind: Kind

    @property
    def is_clear(self) -> bool:
        """Whether it is more than chance."""
        return self.kind in ("clear", "clear bounds")

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.value - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.value + self.half


class Answer(NamedTuple):
    """The best run by a loss or a score.

    against   its comparison with the first run, or if it is that, with the next best; None if it is alone
    near      other runs that are not clearly worse; empty where that is unknown for all
    worse     other runs that are clearly worse
    """

    best: str
    value: float
    other_value: float
    against: Difference | None
    near: list[str]
    worse: list[str]


def seeds_half(a: Mean, b: Mean) -> float:
    """Half of Welch's 95 % interval of the difference of two means over seeds; NaN if a spread is unknown."""
    from scipy.special import stdtrit

    variance = a.variance + b.variance
    if not variance:  # neither varies
        return 0.0
    freedom = 0.0
    for mean in (a, b):
        if mean.variance:
            freedom += mean.variance**2 / max(1, mean.count - 1)
    return float(stdtrit(variance**2 / freedom, CONFIDENCE)) * math.sqrt(variance)


def loss_difference(run: RunMeans, other: RunMeans) -> Difference:
    """How the loss of a run compares with that of another one."""
    value = run.loss - other.loss
    half = seeds_half(run.means[LOSS], other.means[LOSS])
    return Difference(run.run, other.run, value, half, kind_of_losses(run, other, value, half))


def kind_of_losses(run: RunMeans, other: RunMeans, value: float, half: float) -> Kind:
    """What a difference of losses is worth."""
    if run.models == other.models:
        return "equal"
    if vocabularies_differ(run.length_nats, other.length_nats):
        lower, higher = (run, other) if value < 0 else (other, run)
        gap = higher.least - lower.loss
        return "clear bounds" if gap > (half if math.isfinite(half) else 0) else "open bounds"
    if not math.isfinite(half):
        return "one seed"
    return "clear" if abs(value) > half else "chance"


def score_difference(run: StudyScore, other: StudyScore) -> Difference:
    """How a score of a run compares with the same of another one: by the examples, and by the seeds if several."""
    value = run.value - other.value
    halves = [*halves_over_examples(run, other), seeds_half(run.mean, other.mean)]
    known = [half for half in halves if math.isfinite(half)]  # of an average of tasks, that of seeds alone
    half = math.sqrt(sum(each**2 for each in known)) if known else math.nan
    kind: Kind = "clear" if abs(value) > half else "chance"
    if not value:
        kind = "equal"
    elif not math.isfinite(half):
        kind = "no interval"
    return Difference(run.run, other.run, value, half, kind)


def halves_over_examples(run: StudyScore, other: StudyScore) -> list[float]:
    """Half of the 95 % interval of the difference over the examples; where they aren't paired, those of both scores."""
    if other.run in run.paired:
        return [run.paired[other.run]]
    return [(score.high - score.low) / 2 for score in (run, other)]


def best_loss(means: Sequence[RunMeans]) -> Answer | None:
    """The run with the lowest loss; None if no run has one."""
    measured = [line for line in means if math.isfinite(line.loss)]
    if not measured:
        return None
    ranked = sorted(measured, key=lambda line: line.loss)
    best = ranked[0]
    differences = {line.run: loss_difference(best, line) for line in ranked[1:]}
    values = {line.run: line.loss for line in measured}
    return answer(best.run, measured[0].run, values, differences)


def best_score(scores: Sequence[StudyScore]) -> Answer | None:
    """The run with the best score in a column. `scores`: those of the column, in the order of the runs."""
    if not scores:
        return None
    ranked = sorted(scores, key=lambda score: -score.value)
    best = ranked[0]
    differences = {score.run: score_difference(best, score) for score in ranked[1:]}
    values = {score.run: score.value for score in scores}
    return answer(best.run, scores[0].run, values, differences)


def answer(best: str, first: str, values: dict[str, float], differences: dict[str, Difference]) -> Answer:
    """The answer. `differences`: of the best run to each other one, the next best first; `first`: of all runs."""
    if not differences:
        return Answer(best, values[best], math.nan, None, [], [])
    other = next(iter(differences)) if best == first else first
    others = {name: each for name, each in differences.items() if name != other}
    worse = [name for name, each in others.items() if each.is_clear]
    near = []
    if any(each.kind != "one seed" for each in differences.values()):
        near = [name for name in others if name not in worse]
    return Answer(best, values[best], values[other], differences[other], near, worse)
