"""Minimal pairs in reports and studies: tables, the picture's lines, and paired comparisons of models."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tasks.glue.pair_scores import (
    EVERY,
    FILTERED,
    METRIC_WORDS,
    METRICS,
    PAIRS,
    Accuracy,
    accuracy_in,
    accuracy_of,
    is_right,
    parts_and_fields,
)
from tasks.glue.pairs import BLIMP, SIDES
from tasks.reports import published
from tasks.reports.markdown import Marked, records, short
from tasks.reports.published import (
    BABYLM_2025,
    FULL,
    PUBLISHED_BLIMP,
    SCORERS,
    PublishedBlimp,
    blimp_footnotes,
    published_name,
    sources_of,
)
from tasks.reports.rows import PairLine
from tasks.reports.sections import cost_of
from tasks.store.artifacts import Artifact

if TYPE_CHECKING:
    import pandas as pd

WORDS = "words at most"
EPOCHS = "epochs at most"
BOTH_SIDES = "both sides"  # what a masked model reads of a token's context


def accuracies_in(about: dict[str, Any]) -> tuple[Accuracy, ...]:
    """The accuracies by METRICS in a part of the statistics."""
    return tuple(accuracy_in(about, metric) for metric in METRICS)


def lines_of(stats: dict[str, Any]) -> list[PairLine]:
    """The lines of the picture of a set: its parts, then the fields."""
    return [PairLine(name, accuracies_in(about)) for name, about in parts_and_fields(stats)]


def section_of(stats: dict[str, Any], number: int, model: Mapping) -> dict[str, Any]:
    """What the page shows of a set of pairs.

    stats: of its artifact; number: of its picture; model: the parameters and statistics of pretraining.
    """
    filtered = stats["parts"].get(FILTERED)
    section = {
        "name": stats["set"],
        "picture": picture_name(number),
        "stats": stats,
        "all": stats["parts"][EVERY],
        "filtered": filtered,
        "parts": records(table_of(parts_and_fields(stats), "pairs of")),
        "groups": records(table_of(stats["by_group"].items(), "group")),
    }
    if filtered:
        section["babylm"] = babylm_table(filtered, model)
        section["other_rules"] = other_rules_table()
        section["others"] = others_table(stats["parts"][EVERY])
    return section


class PublishedTable(NamedTuple):
    """A table with published rows, and a footnote for each of their sources."""

    table: Marked
    footnotes: list[str]


def babylm_table(filtered: dict[str, Any], model: Mapping) -> PublishedTable:
    """Our score beside those of the BabyLM challenge by the same rule: the smaller track first, the best first.

    filtered: our accuracies on BabyLM's part of BLiMP; model: as for `section_of`.
    """
    ours = {
        "model": Marked("**this run**"),
        "accuracy": f"{filtered[METRICS[0]]['value']:.1f}",
        **text_read(model),
        "parameters": short(model["parameters"]),
        "reads": BOTH_SIDES,
    }
    rows = [row for row in PUBLISHED_BLIMP if row.scorer == BABYLM_2025]
    rows.sort(key=lambda row: (row.track, -row.score))
    return PublishedTable(records([ours, *babylm_lines(rows)]), blimp_footnotes(rows))


def text_read(model: Mapping) -> dict[str, str | None]:
    """What pretraining took, as far as it is known; words and epochs only of a model that began from random weights."""
    cost = cost_of(model)
    if model.get("start"):
        return {WORDS: None, EPOCHS: None, "pretraining": cost and f"{cost}, on top of {model['start']['name']}"}
    words = model.get("words")
    epochs = model.get("epochs")
    return {WORDS: short(words) if words else None, EPOCHS: f"{epochs:.3g}" if epochs else None, "pretraining": cost}


def babylm_lines(rows: Sequence[PublishedBlimp]) -> list[dict[str, Any]]:
    """Lines of published scores on BabyLM's part of BLiMP."""
    sources = sources_of(rows)
    lines = []
    for row in rows:
        lines.append(
            {
                "model": published_name(row, sources),
                "accuracy": f"{row.score:.1f}",
                WORDS: short(row.track) if row.track else None,
                EPOCHS: row.epochs,
                "parameters": short(row.parameters) if row.parameters else None,
                "reads": "left to right" if row.causal else BOTH_SIDES,
            }
        )
    return lines


def other_rules_table() -> PublishedTable:
    """Scores on BabyLM's part of BLiMP that were found by other rules, with these; none compares with ours."""
    rows = [row for row in PUBLISHED_BLIMP if row.pairs == published.FILTERED and row.scorer != BABYLM_2025]
    lines = babylm_lines(rows)
    for line, row in zip(lines, rows, strict=True):
        line["rule"] = SCORERS[row.scorer]
    table = records(lines, ["model", "accuracy", WORDS, EPOCHS, "parameters", "rule"])
    return PublishedTable(table, blimp_footnotes(rows))


def others_table(every: dict[str, Any]) -> PublishedTable:
    """Our scores on all of BLiMP beside published ones, in a column for each rule."""
    ours = {METRIC_WORDS[metric]: f"{every[metric]['value']:.1f}" for metric in METRICS}
    rows = [row for row in PUBLISHED_BLIMP if row.pairs == FULL]
    sources = sources_of(rows)
    of_model: dict[str, dict[str, Any]] = {}
    for row in rows:
        line = of_model.setdefault(row.model, {"model": published_name(row, sources)})
        line[row.scorer] = f"{row.score:.1f}"
    rules = dict.fromkeys([*METRIC_WORDS.values(), *(row.scorer for row in rows)])
    lines = [{"model": Marked("**this run**")} | ours, *of_model.values()]
    return PublishedTable(records(lines, ["model", *rules]), blimp_footnotes(rows))


def picture_name(number: int) -> str:
    """The file of the picture of a set. Names of sets may be too long for a file's, or differ in capitals only."""
    return f"pairs-{number}.svg"


def table_of(parts: Iterable[tuple[str, dict[str, Any]]], title: str) -> list[dict[str, Any]]:
    """A row for each part or group: how many groups and pairs it has, and its accuracies with their standard errors."""
    rows = []
    for name, about in parts:
        row: dict[str, Any] = {title: name}
        if title != "group":
            row["groups"] = about["groups"]
        row["pairs"] = about["pairs"]
        for metric, accuracy in zip(METRICS, accuracies_in(about), strict=True):
            row[METRIC_WORDS[metric]] = f"{accuracy.value:.1f}"
            row[f"± {METRIC_WORDS[metric]}"] = accuracy.error_in_words()
        rows.append(row)
    return rows


def card_table(judged: Iterable[dict[str, Any]]) -> Marked | None:
    """The accuracies on sets of pairs for a model card, which names no file or field of yours; None without any set."""
    rows: list[dict[str, Any]] = []
    own = 0
    for stats in judged:
        name = BLIMP
        if FILTERED not in stats["parts"]:  # only BLiMP has that part
            own += 1
            name = f"own pairs {own}"
        rows += table_of([(f"{name}, {part}", about) for part, about in stats["parts"].items()], "pairs of")
    return records(rows) if rows else None


# Scores of one model in a study


class PairScore(NamedTuple):
    """An accuracy of a model on a set, or on a part of it, by one metric."""

    column: str  # its name in tables
    metric: str  # of METRICS
    is_filtered: bool  # on BabyLM's part of BLiMP alone
    accuracy: Accuracy
    pairs: int


def scores_in(stats: dict[str, Any]) -> list[PairScore]:
    """The scores of a set that studies compare: by both metrics, and on BabyLM's part of BLiMP."""
    name = stats["set"]
    every = stats["parts"][EVERY]
    found = []
    for metric in METRICS:
        column = name if metric == METRICS[0] else f"{name}, {METRIC_WORDS[metric]}"
        found.append(PairScore(column, metric, False, accuracy_in(every, metric), every["pairs"]))
    filtered = stats["parts"].get(FILTERED)
    if filtered:
        accuracy = accuracy_in(filtered, METRICS[0])
        found.append(PairScore(f"{name}, filtered", METRICS[0], True, accuracy, filtered["pairs"]))
    return found


# Two models on the same pairs


def read_pairs(judged: Artifact) -> "pd.DataFrame":
    """The scored pairs of an artifact."""
    import pandas as pd

    return pd.read_parquet(judged.path / PAIRS)


class PairedModel(NamedTuple):
    """A score of a model, and the artifact that it is from."""

    judged: Artifact
    score: PairScore


class Right(NamedTuple):
    """Which pairs are right, and which pairs these are."""

    right: np.ndarray  # (pairs,), the mean over models
    groups: np.ndarray  # (pairs,)
    sentences: np.ndarray  # (pairs, 2) the good one and the bad one


def right_of(models: Sequence[PairedModel]) -> Right:
    """Which pairs several models have right, by the metric of the first one's score."""
    _, score = models[0]
    tables = [read_pairs(model.judged) for model in models]
    if score.is_filtered:
        tables = [table[table["filtered"]] for table in tables]
    found = [right_in(table, score.metric) for table in tables]
    return found[0]._replace(right=np.mean([each.right for each in found], axis=0))


def right_in(table: "pd.DataFrame", metric: str) -> Right:
    """Which of the scored pairs of a model are right."""
    return Right(is_right(table, metric), table["group"].to_numpy(), table[[*SIDES]].to_numpy())


def are_same_pairs(of_a: Right, of_b: Right) -> bool:
    """Whether two models scored the same pairs in the same groups."""
    return np.array_equal(of_a.groups, of_b.groups) and np.array_equal(of_a.sentences, of_b.sentences)


def difference_of(of_a: Right, of_b: Right) -> Accuracy:
    """The accuracy of one model less that of another on the same pairs, with its standard error."""
    return accuracy_of(of_a.right - of_b.right, of_a.groups, lowest=-1.0)


def paired_halves(run: str, rights: Mapping[str, Right]) -> dict[str, float]:
    """Half of the 95 % interval of the difference between a run and each other one, over the pairs that both scored.

    `rights`: which pairs each run has right, by one score; empty for a score that is not of minimal pairs.
    """
    halves = {}
    for other, theirs in rights.items():
        if other != run and are_same_pairs(rights[run], theirs):
            halves[other] = difference_of(rights[run], theirs).half()
    return halves
