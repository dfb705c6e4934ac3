"""Sections of reports and cards that show scores. Templates have the sentences."""

import itertools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from model.settings import Finetuning
from model.wording import duration
from tasks.glue.table import Task
from tasks.reports.markdown import Marked, escape, records, short, table
from tasks.reports.published import (
    DEV,
    PAPER,
    SMALL,
    Published,
    footnotes,
    is_small,
    published_name,
    read_twice,
    sources_of,
)
from tasks.reports.rows import CurvePoint, ScoreRow
from tasks.reports.scores import (
    COLUMNS,
    average_by_seed,
    averages,
    glue_rows,
    mark_score,
    median_run,
    own_rows,
    partial_notes,
    weak_notes,
)
from tasks.store.artifacts import Artifact

HEADLINE = ("BERT-base, fully trained", "crammed BERT, A6000, final")  # published rows that are named beside ours
REFERENCE = Finetuning().model_dump()  # the settings of the published rows
OWN_SETTINGS = ("epochs", "batch_size", "learning_rate")  # that a user's own task can have
MOST_CLASSES = 12  # of a confusion table


def published(rows: list[ScoreRow], finetuning: dict) -> dict:
    """Published averages to compare ours with, if there is one; `differing`: of our settings, those not as theirs.

    `finetuning`: our settings.
    """
    if averages(glue_rows(rows)).paper is None:
        return {"averages": [], "differing": []}
    differing = []
    for name, usual in REFERENCE.items():
        if finetuning.get(name) != usual:
            differing.append(f"{name} {usual}, here {finetuning[name]}")
    return {
        "averages": [f"{row.model} {row.average}" for row in PAPER if row.model in HEADLINE],
        "differing": differing,
    }


def score_section(rows: list[ScoreRow], title: str, shown: list[dict], model: Mapping) -> dict:
    """What scores.md.j2 shows of the scores on GLUE; empty if there are none.

    `shown`: settings as rows of a table. `model`: the statistics and `params` of pretraining.
    """
    own = glue_rows(rows)
    random = glue_rows(rows, pretrained=False)
    if not own:
        return {}
    have = {row["column"] for row in own}
    return {
        "beside_paper": score_table(title, own, random),
        "sources": sources_of(PAPER),
        "small": beside_small(title, own, random, model) if is_small(model["parameters"]) else {},
        "seed_averages": average_by_seed(own),
        "missing": [name for name in COLUMNS if name not in have],
        "incomplete": [row["column"] for row in own if row["partial"] and row["column"] in COLUMNS],
        "partial_notes": partial_notes(own),
        "wnli": [row["score"] for row in own if row["task"] == "wnli"],
        "settings": shown,
        **every_score(own + random),
    }


def beside_small(title: str, own: list[ScoreRow], random: list[ScoreRow], model: Mapping) -> dict:
    """What scores.md.j2 shows of a small model beside those of its size: scores, footnotes, and what they cost."""
    lines = own_lines(title, own, random)
    for line in lines:
        line["split"] = DEV
    sources = sources_of(SMALL)
    for row in SMALL:
        line = {"model": published_name(row, sources), "split": row.split, "published average": row.average}
        lines.append(line | row.scores)
    averages_of_ours = [name for name in ("average", "GLUE's own") if lines[0][name] is not None]
    return {
        "scores": records(lines, ["model", "split", *averages_of_ours, "published average", *COLUMNS]),
        "footnotes": footnotes(SMALL),
        "read_twice": read_twice(SMALL),
        "costs": records(cost_lines(title, model)),
    }


def cost_lines(title: str, model: Mapping) -> list[dict]:
    """The sizes of our model and of the published small ones, and what pretraining them took."""
    architecture = model["params"]["architecture"]
    ours = {
        "model": Marked(f"**{escape(title)}** (this run)"),
        "layers x width": f"{architecture['layers']} x {architecture['hidden']}",
        "parameters": short(model["parameters"]),
        "pretraining": cost_of(model),
    }
    by_size = sorted(SMALL, key=lambda row: row.parameters or 0)
    lines = {row.model: cost_line(row) for row in by_size}  # two rows can be of the same weights
    return [ours, *lines.values()]


def cost_of(model: Mapping) -> str | None:
    """What pretraining took; None for an adopted model. `model`: as in `score_section`."""
    if "machine" not in model:
        return None
    time = duration(model["seconds_on_the_clock"])
    return f"{short(model['tokens'])} tokens, {time} of {model['machine']['device']}"


def cost_line(row: Published) -> dict:
    """The size of a published model, and what pretraining it took."""
    return {
        "model": Marked(f"*{escape(row.model)}*"),
        "layers x width": row.shape,
        "parameters": short(row.parameters) if row.parameters else None,
        "pretraining": row.cost or None,
    }


def own_section(rows: list[ScoreRow], runs: Iterable[dict]) -> dict:
    """What scores.md.j2 shows of the user's own tasks; empty if there are none. `runs`: the params of their runs."""
    own = own_rows(rows)
    if not own:
        return {}
    settings = {run["task"]: {name: f"{run[name]:g}" for name in OWN_SETTINGS} for run in runs}
    return every_score(own) | {"settings": list(settings.items())}


def every_score(rows: list[ScoreRow]) -> dict:
    """What scores.md.j2 shows of any tasks: the rows, which of them are weak, and notes."""
    return {
        "rows": rows,
        "weak": weak_notes(row for row in rows if row["pretrained"]),
        "notes": list(dict.fromkeys(note for row in rows for note in row["notes"])),
    }


def score_table(title: str, own: list[ScoreRow], random: list[ScoreRow]) -> Marked:
    """Our models, pretrained and (`random`) not; the majority baseline; the paper's models."""
    lines = own_lines(title, own, random)
    sources = sources_of(PAPER)
    for row in PAPER:
        lines.append({"model": published_name(row, sources), "average": row.average, **row.scores})
    return records(lines, ["model", "average", "GLUE's own", *COLUMNS])


def own_lines(title: str, own: list[ScoreRow], random: list[ScoreRow]) -> list[dict[str, object]]:
    """The lines of our models, pretrained and (`random`) not, and of the majority baseline."""
    lines = [score_line(escape(title), own)]
    if random:
        lines.append(score_line(f"{escape(title)}, no pretraining", random))
    majority = {row["column"]: mark_score(row["majority"][row["metric"]], row["partial"]) for row in own}
    lines.append({"model": "majority class or mean (this data)", **majority})
    return lines


def score_line(name: str, rows: list[ScoreRow]) -> dict[str, object]:
    """The line of one of our models."""
    mean = averages(rows)
    scores = {row["column"]: mark_score(row["score"], row["partial"], row["beats_majority"]) for row in rows}
    return {
        "model": Marked(f"**{name}** (this run)"),
        "average": mean.paper,
        "GLUE's own": mean.official,
        **scores,
    }


# Learning curve


def learning_curve(rows: Iterable[ScoreRow]) -> list[CurvePoint]:
    """Scores by share of the training data, smallest first, of the columns that have several shares."""
    pretrained = [row for row in rows if row["pretrained"]]
    by_column: dict[str, list[ScoreRow]] = {}
    for row in sorted(pretrained, key=lambda row: row["share"]):
        by_column.setdefault(row["column"], []).append(row)
    curve = []
    for of_column in by_column.values():
        if len(of_column) > 1:
            curve.append(curve_point(of_column[0], None))
            curve += [curve_point(row, before) for before, row in itertools.pairwise(of_column)]
    return curve


def curve_point(row: ScoreRow, before: ScoreRow | None) -> CurvePoint:
    """A point of the curve. `before`: the row with the next smaller share."""
    low, high = row["metrics"][row["metric"]]["range"]
    per_doubling = None
    if before:
        doublings = math.log2(row["share"] / before["share"])
        per_doubling = round((row["score"] - before["score"]) / doublings, 2)
    return {
        "column": row["column"],
        "partial": row["partial"],
        "share": row["share"],
        "train_examples": row["train_examples"],
        "seeds": row["seeds"],
        "median": row["score"],
        "low": low,
        "high": high,
        "majority": row["majority"][row["metric"]],
        "per_doubling": per_doubling,
    }


# Confusion tables


def confusion_counts(members: list[Artifact]) -> list[list[int]] | None:
    """Counts by true class (row) and predicted class, over all validation splits; None for a regression.

    They are those of the run with the median score. `members`: the seeds' runs of a task.
    """
    counts = [about["confusion"] for about in median_run(members).stats["validation"].values()]
    return None if None in counts else np.sum(counts, axis=0).tolist()


def confusion_table(task: Task, counts: list[list[int]]) -> Marked:
    """How often which class was predicted as which, with the recall of each class; of many, the most mistakes."""
    true_class = f"{task.title}: true class"
    if len(counts) > MOST_CLASSES:
        return table([true_class, "predicted", "examples", "of the class"], most_mistakes(task, counts))
    lines: list[list[object]] = []
    for i, (name, row) in enumerate(zip(task.labels, counts, strict=True)):
        recall = 100 * row[i] / max(1, sum(row))
        lines.append([name, *row, f"{recall:.1f} %"])
    predicted = [f"predicted {name}" for name in task.labels]
    return table([true_class, *predicted, "recall"], lines)


def most_mistakes(task: Task, counts: list[list[int]]) -> list[list[object]]:
    """True class, predicted class, examples and their share of the true class, of the most frequent mistakes."""
    wrong = [(-n, i, j) for i, row in enumerate(counts) for j, n in enumerate(row) if n and i != j]
    lines: list[list[object]] = []
    for minus, i, j in sorted(wrong)[:MOST_CLASSES]:
        share = -100 * minus / sum(counts[i])
        lines.append([task.labels[i], task.labels[j], -minus, f"{share:.1f} %"])
    return lines
