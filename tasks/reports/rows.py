"""The rows of reports and of studies, which their JSON has, pages and cards show, and `cram diff` compares."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, NotRequired, TypedDict

from tasks.glue.pair_scores import Accuracy


class Spread(TypedDict):
    """One metric of a score, times 100."""

    median: float  # over seeds
    range: list[float]  # the lowest and the highest of the seeds
    interval: list[float]  # 95 %, over the examples, of the seed with the median score


class ScoreRow(TypedDict):
    """A score: a model, pretrained or not, finetuned on a share of a task's training data, on one validation split."""

    task: str
    pretrained: bool
    share: float  # of the training data
    split: str
    column: str  # its name in tables
    metric: str  # the task's first metric, which is the score
    score: float  # median over seeds
    by_seed: dict[str, float]
    metrics: dict[str, Spread]
    majority: dict[str, float]  # by metric, of always answering the most frequent class
    beats_majority: bool
    seeds: int
    examples: dict[str, list[int]]  # of train and validation: how many there are, how many the official data has
    train_examples: int
    partial: bool  # the data is not all of the official data
    notes: list[str]
    median_run: str  # the name of the finetune artifact
    data: str  # a digest of what was measured on
    definition: NotRequired[dict]  # of a task that is not in the table of tasks


class CurvePoint(TypedDict):
    """A score by share of the training data."""

    column: str
    partial: bool
    share: float
    train_examples: int
    seeds: int
    median: float
    low: float  # the range over seeds
    high: float
    majority: float
    per_doubling: float | None  # points gained per doubling of the examples, since the point before


class FunnelRow(TypedDict):
    """What a stage passed on; None where it counts no such thing."""

    stage: str
    artifact: str
    documents: int | None
    characters: int | None
    tokens: int | None
    sequences: int | None


class Drop(NamedTuple):
    """What a stage dropped for one reason."""

    stage: str
    reason: str
    documents: int | None
    characters: int | None
    main_sources: str | None


class Bar(NamedTuple):
    """The documents that a stage of the text kept, set aside for the held-out loss, and dropped."""

    stage: str
    kept: int
    held: int
    dropped: int


class Sample(NamedTuple):
    """Something that a stage dropped."""

    stage: str
    why: str
    text: str  # shortened


class Rule(NamedTuple):
    """A rule of cramming, whether it was kept, and the fact that says so."""

    rule: str
    kept: str  # one of the marks below
    fact: str


YES = "✓"
NO = "✗"
UNKNOWN = "?"
LOSS = "nats_per_byte"  # the loss of a study's runs


class PairLine(NamedTuple):
    """A line of a picture of accuracies on minimal pairs: what of the set it is, and the accuracies by METRICS."""

    name: str
    accuracies: tuple[Accuracy, ...]


# Studies


@dataclass(frozen=True)
class Mean:
    """A number of a study's run, over its seeds, and compared with that of the base."""

    value: float  # NaN if no seed has the number
    deviation: float  # of the sample; NaN unless several seeds have the number; 0 for a model that was not trained
    count: int  # of the seeds that have it
    difference: float | None = None  # to the base; None if there is nothing to compare with
    error: float | None = None  # the standard error of the difference; NaN if unknown

    def compared_with(self, base: "Mean", is_same: bool) -> "Mean":
        """The mean with its difference to the base, and the error of two independent samples (Welch).

        `is_same`: both are of the same models, so that their difference has no such error.
        """
        error = math.nan if is_same else math.sqrt(self.variance + base.variance)
        return replace(self, difference=self.value - base.value, error=error)

    @property
    def variance(self) -> float:
        """The variance of the mean; NaN if unknown."""
        return self.deviation**2 / max(1, self.count)


@dataclass(frozen=True)
class RunMeans:
    """A run of a study: the means over its seeds."""

    run: str
    seeds: int  # with a result
    failed: int
    problem: str
    models: list[str]
    means: dict[str, Mean]  # by column of runs.parquet
    trained: bool = True  # False: its model was measured as it is

    def value(self, name: str) -> float:
        """The mean of a column."""
        return self.means[name].value

    @property
    def loss(self) -> float:
        """Held-out nats per byte."""
        return self.value(LOSS)

    @property
    def length_nats(self) -> float:
        """The part of the loss that is for the numbers of pieces of words."""
        return self.value("length_nats")

    @property
    def least(self) -> float:
        """The least that the loss may be in truth: without what the numbers of pieces cost (model.heldout)."""
        return self.loss - self.length_nats

    def flat(self) -> dict[str, object]:
        """For study.json: each number under its own name."""
        row: dict[str, object] = {
            "run": self.run,
            "seeds": self.seeds,
            "failed": self.failed,
            "problem": self.problem,
            "models": self.models,
            "trained": self.trained,
        }
        for name, mean in self.means.items():
            row[name] = mean.value
            row[f"{name} deviation"] = mean.deviation
            row[f"{name} values"] = mean.count
            if mean.difference is not None:
                row[f"{name} difference"] = mean.difference
                row[f"{name} error"] = mean.error
        return row


class StudyScore(NamedTuple):
    """A score of a run of a study, the mean over its models."""

    run: str
    column: str
    metric: str
    value: float  # times 100
    low: float  # the ends of the 95 % interval over the examples, means over the models
    high: float
    majority: float
    is_weak: bool  # not better than the majority's, for one of the models
    examples: int  # of validation
    seeds: int  # of finetuning, of each model
    mean: Mean  # over the models
    # half the 95 % interval of the difference to other runs, over the examples, where it is known of both together
    paired: Mapping[str, float] = MappingProxyType({})
