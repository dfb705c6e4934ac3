"""The page of a study: its answers, tables and pictures. The template has the sentences."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.wording import counted
from tasks.glue.pair_scores import PAIR_METRIC
from tasks.glue.table import TASKS
from tasks.reports import plots
from tasks.reports.markdown import Marked, escape, short
from tasks.reports.rows import LOSS, RunMeans, StudyScore
from tasks.reports.scores import COLUMNS, METRICS, WEAK
from tasks.reports.study_cautions import cautions, have_bounds
from tasks.reports.study_verdicts import Answer, best_loss, best_score, loss_difference, score_difference
from tasks.reports.study_words import settings_table, words_table

if TYPE_CHECKING:
    import pandas as pd

SCORE = "score: "  # begins the name of every column of runs.parquet with scores
AVERAGE = f"{SCORE}average"
UNITS = {
    "tokens": (("billion tokens", 1e9), ("million tokens", 1e6), ("thousand tokens", 1e3)),
    "operations": (("exaFLOP", 1e18), ("petaFLOP", 1e15), ("teraFLOP", 1e12), ("gigaFLOP", 1e9)),
    "seconds": (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)),
}
WORDS = "words at most"  # of the training text, among the costs
EPOCHS = "epochs"  # the same
MOST_ANSWERS = 3  # scores of which the head of the page names the best run
MOST_LINES = 60  # of the picture of scores, and of a table of them that isn't folded
VERDICTS = {
    "clear": "{}",
    "clear bounds": "{}",
    "chance": "may be chance",
    "one seed": "one seed",
    "open bounds": "open",
    "equal": "equal",
    "no interval": "no interval",
}


def page_values(
    about: dict[str, Any],
    rows: "pd.DataFrame",
    means: list[RunMeans],
    scores: list[StudyScore],
    law: dict[str, Any] | None,
    has_curves: bool,
) -> dict[str, Any]:
    """What the template of the page shows. `about`: the params of the page."""
    return {
        **about,
        **cautions(rows, means),
        **answers_of(means, scores),
        **tables_of(about, rows, means, scores),
        **notes_of(rows),
        "runs": counted(len(means), "run"),
        "first": means[0].run,
        "several": have_several_seeds(means),
        "mark": WEAK,
        "axes": ordered_axes(rows) if has_curves else [],
        "law": law,
        "law_rows": law_table(law or {}),
    }


def answers_of(means: list[RunMeans], scores: list[StudyScore]) -> dict[str, Any]:
    """What the head of the page says: the best runs by loss and by scores."""
    loss = best_loss(means)
    answers = best_scores(means, scores)
    return {
        "loss": loss,
        "best_scores": answers,
        "is_other_order": is_other_order(loss, answers, scores),
        "most_named": MOST_ANSWERS,
        "named": named,
    }


def tables_of(
    about: dict[str, Any], rows: "pd.DataFrame", means: list[RunMeans], scores: list[StudyScore]
) -> dict[str, Any]:
    """The tables of the page, but that of the law."""
    members = about["members"]
    names = {one["run"]: [one["run"], *one["also"]] for one in members}
    has_many = len(scores) > MOST_LINES
    return {
        "losses": loss_table(means, names),
        "costs": cost_section(means),
        "scores": score_table(means, score_columns(rows)) if has_many else [],
        "tables": interval_tables(means, scores),
        "finetuned": sorted({score.seeds for score in scores if score.seeds}),
        "words": words_table(about, rows),
        "settings": settings_table(members),
        "findings": [{"run": run, "the paper's finding": found} for run, found in about["published"].items()],
        "by_seed": seed_table(rows),
        "artifacts": artifact_table(rows),
    }


def notes_of(rows: "pd.DataFrame") -> dict[str, Any]:
    """What is wrong with single runs and scores: partial data, weak scores, failures."""
    partial = {note for notes in rows["partial"] for note in notes}
    return {
        "partial": [Marked(note) for note in sorted(partial)],
        "weak": weak_scores(rows),
        "problems": problems(rows),
    }


def best_scores(means: list[RunMeans], scores: list[StudyScore]) -> list[tuple[str, str, bool, Answer]]:
    """The column, the metric, whether the majority is as good, and the best run of the average or of some scores.

    Of more scores than MOST_ANSWERS without an average, there is no answer.
    """
    columns = list(dict.fromkeys(score.column for score in scores))
    lines = [line for line in means if AVERAGE in line.means and line.means[AVERAGE].count]
    found = []
    if lines:
        means_of_nine = [
            StudyScore(
                line.run, "GLUE", "average of nine", line.value(AVERAGE), math.nan, math.nan, math.nan, False, 0, 0,
                line.means[AVERAGE],
            )
            for line in lines
        ]  # fmt: skip
        columns = []
        best = best_score(means_of_nine)
        if best:
            found.append(("GLUE", "average of nine", False, best))
    if len(columns) > MOST_ANSWERS:
        return found
    for column in columns:
        own = [score for score in scores if score.column == column]
        best = best_score(own)
        if best:
            [weak] = [score.is_weak for score in own if score.run == best.best]
            found.append((column, METRICS[own[0].metric], weak, best))
    return found


def is_other_order(loss: Answer | None, answers: list[tuple[str, str, bool, Answer]], scores: list[StudyScore]) -> bool:
    """Whether the run with the lowest loss has scores, and is clearly not the best by any of them."""
    if loss is None or loss.best not in {score.run for score in scores}:
        return False
    return bool(answers) and all(is_behind(loss.best, answer) for *_, answer in answers)


def is_behind(run: str, answer: Answer) -> bool:
    """Whether a run is clearly worse than the best one."""
    is_compared = answer.against is not None and answer.against.other == run and answer.against.is_clear
    return run in answer.worse or is_compared


def named(runs: Sequence[str]) -> Marked:
    """The names of runs in a sentence."""
    return Marked(", ".join(f"**{escape(run)}**" for run in runs))


def ordered_axes(rows: "pd.DataFrame") -> list[str]:
    """The axes of the curves: first that of the budget, which is fair to all runs."""
    by_unit = {"hours": "seconds", "flops": "operations", "tokens": "tokens", "epochs": "tokens"}
    units = set(rows["budget_unit"][rows["trained"]].dropna())
    first = by_unit[units.pop()] if len(units) == 1 else "tokens"
    return [first, *(axis for axis in UNITS if axis != first)]


def have_several_seeds(means: list[RunMeans]) -> bool:
    """Whether some run has several seeds, so that there is a spread."""
    return any(line.seeds > 1 and line.trained for line in means)


def problems(rows: "pd.DataFrame") -> list[str]:
    """What became of failed runs, with their seeds unless all of them have the same problem."""
    found = []
    failed = rows[rows["problem"].ne("")]
    for (run, problem), own in failed.groupby(["run", "problem"], sort=False):
        which = ""
        if len(own) < rows["run"].eq(run).sum():
            seeds = ", ".join(map(str, own["seed"]))
            which = f", seed {seeds}" if len(own) == 1 else f", seeds {seeds}"
        found.append(f"{run}{which}: {problem}")
    return found


def weak_scores(rows: "pd.DataFrame") -> list[str]:
    """The scores of each run that don't beat the majority baseline."""
    weak = rows[rows["weak"].ne("")]
    return sorted({f"{run} ({columns})" for run, columns in zip(weak["run"], weak["weak"], strict=True)})


# Pictures


def chart_of_losses(rows: "pd.DataFrame", means: list[RunMeans], out: Path) -> None:
    """Draw the losses of the runs, if several have one."""
    measured = [line for line in means if math.isfinite(line.loss)]
    if len(measured) < 2:
        return
    lowest = min(line.loss for line in measured)
    has_bounds = have_bounds(means)
    lines = [
        plots.LossLine(
            line.run,
            line.loss,
            rows[LOSS][rows["run"].eq(line.run)].dropna().tolist() if line.trained else [],
            line.least if has_bounds else None,
            line.loss == lowest,
        )
        for line in measured
    ]
    plots.run_losses(lines, out / "losses.svg")


def chart_of_scores(means: list[RunMeans], scores: list[StudyScore], out: Path) -> None:
    """Draw the scores of the runs with their intervals, by task, if they are not too many."""
    if 1 < len(scores) <= MOST_LINES:
        plots.run_scores(scores, out / "scores.svg")


# Cells


def number(value: float, digits: int, sign: str = "") -> str | None:
    """A number with so many digits; None for a missing one."""
    return f"{value:{sign}.{digits}f}" if math.isfinite(value) else None


def mean_cell(line: RunMeans, name: str, digits: int) -> str | None:
    """A run's mean of a column ± its deviation, if it was trained with several seeds."""
    mean = line.means[name]
    shown = number(mean.value, digits)
    if shown and line.trained and math.isfinite(mean.deviation):
        shown += f" ± {mean.deviation:.{digits}f}"
    return shown


def difference_cell(line: RunMeans, name: str, digits: int) -> str | None:
    """A run's difference to the base in a column ± its standard error."""
    mean = line.means[name]
    if mean.difference is None or mean.error is None:
        return None
    shown = number(mean.difference, digits, "+")
    return f"{shown} ± {mean.error:.{digits}f}" if shown and math.isfinite(mean.error) else shown


def seeds_cell(line: RunMeans) -> int | str | None:
    """The number of seeds with a result; "2 of 3" if some failed; None for a model that was not trained."""
    if line.failed:
        return f"{line.seeds} of {line.seeds + line.failed}"
    return line.seeds if line.trained else None


def verdict_cell(kind: str, value: float, is_loss: bool) -> str:
    """What a difference is worth: `better`, `worse`, or why neither is known."""
    is_better = (value < 0) == is_loss
    return VERDICTS[kind].format("better" if is_better else "worse")


def unit(kind: str, largest: float) -> tuple[str, float]:
    """The largest unit that is not above a number, or else the smallest one; and its size."""
    return next(((name, size) for name, size in UNITS[kind] if size <= largest), UNITS[kind][-1])


# Tables


def cost_table(means: list[RunMeans]) -> list[dict[str, str | None]]:
    """The mean cost of each run, all in the same units; of a model that was not trained, its size.

    If the words of the training text were counted, also these and the epochs.
    """
    done = [line for line in means if line.seeds]
    work, of_work = unit("operations", max(line.value("operations") for line in done))
    time, of_time = unit("seconds", max(line.value("seconds") for line in done))
    has_words = any(math.isfinite(line.value("text_words")) for line in done)
    of_text = [WORDS, EPOCHS] if has_words else []
    names = ("parameters", *of_text, "tokens", work, time, "tokens/s")
    rows = []
    for line in means:
        row: dict[str, str | None] = dict.fromkeys(names)
        if line.seeds and math.isfinite(line.value("text_words")):
            row |= {WORDS: short(line.value("text_words")), EPOCHS: f"{line.value('epochs'):.3g}"}
        if line.seeds:
            row |= {"parameters": short(line.value("parameters")), "tokens": short(line.value("tokens"))}
        if line.seeds and line.trained:
            row[work] = f"{line.value('operations') / of_work:.3g}"
            row[time] = f"{line.value('seconds') / of_time:.3g}"
            row["tokens/s"] = f"{line.value('tokens_per_second'):,.0f}"
        rows.append(row)
    return rows


def cost_section(means: list[RunMeans]) -> list[dict[str, str | None]]:
    """The costs, a row for each run that has a result."""
    return [{"run": line.run, **cost} for line, cost in zip(means, cost_table(means), strict=True) if line.seeds]


def loss_table(means: list[RunMeans], names: dict[str, list[str]]) -> list[dict]:
    """The losses, a row for each run. `names`: all names of each run.

    With several seeds it has deviations, and intervals of the differences; where vocabularies differ, the least that
    each loss may be.
    """
    has_spread = have_several_seeds(means)
    has_bounds = have_bounds(means)
    base = next((line for line in means if math.isfinite(line.loss)), None)
    rows = []
    for line in means:
        mean = line.means[LOSS]
        row: dict[str, object] = {"run": " = ".join(names[line.run]), "nats per byte": number(line.loss, 4)}
        verdict = loss_verdict(line, base, has_spread)
        if has_spread or has_bounds:
            row["verdict"] = verdict.pop("verdict")
        row["difference"] = None if mean.difference is None else number(mean.difference, 4, "+")
        if has_spread:
            row |= {**verdict, "deviation": number(mean.deviation, 4) if line.trained else None}
        if has_bounds:
            row["at least"] = number(line.least, 4)
        row["seeds"] = seeds_cell(line)
        rows.append(row)
    return rows


def loss_verdict(line: RunMeans, base: RunMeans | None, has_spread: bool) -> dict[str, object]:
    """The interval of a run's difference to the base, and what it is worth."""
    cells: dict[str, object] = {"from": None, "to": None} if has_spread else {}
    cells["verdict"] = None
    if base is None or line is base or not math.isfinite(line.loss):
        return cells
    found = loss_difference(line, base)
    if has_spread:
        cells["from"] = number(found.low, 4, "+")
        cells["to"] = number(found.high, 4, "+")
    cells["verdict"] = verdict_cell(found.kind, found.value, is_loss=True)
    return cells


def score_columns(rows: "pd.DataFrame") -> list[str]:
    """The columns that hold scores, in the usual order; the average first."""
    found = [name for name in rows.columns if name.startswith(SCORE) and rows[name].notna().any()]
    order = [SCORE + name for name in ("average", *COLUMNS, *TASKS)]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def score_table(means: list[RunMeans], scores: list[str]) -> list[dict]:
    """The scores, a row for each run, with the differences of the average or the first score."""
    rows: list[dict] = []
    first = scores[0]
    for line in means:
        row: dict[str, object] = {"run": line.run}
        for name in scores:
            row[name.removeprefix(SCORE)] = number(line.value(name), 1)
        difference = line.means[first].difference
        row[f"{first.removeprefix(SCORE)}, difference"] = None if difference is None else number(difference, 1, "+")
        rows.append(row)
    return rows


def interval_tables(means: list[RunMeans], scores: list[StudyScore]) -> list[dict[str, Any]]:
    """A table for each task: the scores of the runs with their intervals, and how each differs from the first run's."""
    tables = []
    for column in dict.fromkeys(score.column for score in scores):
        own = {score.run: score for score in scores if score.column == column}
        base = next(iter(own.values()))
        about = {
            "title": f"{column}, {METRICS[base.metric]}",
            "majority": base.majority,
            "examples": base.examples,
            "has_pairs": base.metric == PAIR_METRIC,
            "rows": [score_row(line.run, own.get(line.run), base) for line in means],
        }
        tables.append(about)
    return tables


def score_row(run: str, score: StudyScore | None, base: StudyScore) -> dict[str, object]:
    """A row of a table of scores with intervals; of a run without a score, without numbers."""
    row: dict[str, object] = dict.fromkeys(("run", "score", "verdict", "low", "high", "difference", "from", "to"))
    row["run"] = run
    if not score:
        return row
    row |= {"score": number(score.value, 1), "low": number(score.low, 1), "high": number(score.high, 1)}
    if score.is_weak:
        row["score"] = f"{row['score']}{WEAK}"
    if score is not base:
        found = score_difference(score, base)
        row["difference"] = number(found.value, 1, "+")
        row["from"] = number(found.low, 1, "+")
        row["to"] = number(found.high, 1, "+")
        row["verdict"] = verdict_cell(found.kind, found.value, is_loss=False)
    return row


def seed_table(rows: "pd.DataFrame") -> list[dict]:
    """The losses and scores of each run and seed."""
    found = []
    scores = score_columns(rows)
    for row in rows[rows["model"].ne("")].to_dict("records"):
        line: dict[str, object] = {"run": row["run"], "seed": row["seed"]}
        line["nats per byte"] = number(row[LOSS], 4) if row[LOSS] is not None else None
        line |= {"steps": int(row["steps"]), "tokens": short(row["tokens"])}
        line |= {name.removeprefix(SCORE): number(row[name], 1) for name in scores}
        found.append(line)
    return found


def law_table(law: dict[str, Any]) -> list[dict]:
    """The parameters of a scaling law with their intervals; empty if none was fitted."""
    rows = []
    for name, found in law.get("parameters", {}).items():
        low, high = (f"{round(found[end], 6):.4g}" for end in ("low", "high"))
        rows.append({"parameter": name, "value": f"{found['value']:.4g}", "90 % of resamples": f"{low} to {high}"})
    return rows


def artifact_table(rows: "pd.DataFrame") -> list[dict]:
    """The artifacts of each run and seed."""
    kinds = [kind for kind in ("model", "evaluation", "report") if rows[kind].ne("").any()]
    return [
        {"run": row["run"], "seed": row["seed"], **{kind: row[kind] or None for kind in kinds}}
        for row in rows.to_dict("records")
    ]


def brief_table(means: list[RunMeans]) -> list[dict]:
    """The rows that the terminal and the page of a Prefect run show; of a problem, the first sentence."""
    shown = {WORDS, EPOCHS, "tokens"} | {name for name, _ in UNITS["seconds"]}  # of the costs
    scores = [name for name in means[0].means if name.startswith(SCORE)]
    scores = [AVERAGE] if AVERAGE in scores else scores[:MOST_ANSWERS]
    table = []
    for line, cost in zip(means, cost_table(means), strict=True):
        row: dict[str, object] = {
            "run": line.run,
            "seeds": seeds_cell(line) or "–",
            "nats per byte": mean_cell(line, LOSS, 4) or "",
            "difference": difference_cell(line, LOSS, 4) or "",
        }
        for name, value in cost.items():
            if name in shown:
                row[name] = value or ""
        for name in scores:
            row[name.removeprefix(SCORE)] = mean_cell(line, name, 1) or ""
        row["problem"] = line.problem.partition(". ")[0]
        table.append(row)
    return table
