"""The rows of a report: `report.json` has them, the page and the model card show them, `cram diff` compares them."""

from typing import NamedTuple, NotRequired, TypedDict


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


class Rule(NamedTuple):
    """A rule of cramming, whether it was kept, and the fact that says so."""

    rule: str
    kept: str  # one of the marks below
    fact: str


YES, NO, UNKNOWN = "✓", "✗", "?"
