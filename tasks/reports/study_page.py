"""The page of a study: its tables, and what to know before comparing its runs. The template has the sentences."""

import json
import math
from typing import TYPE_CHECKING, Any

from model.wording import budget, counted
from tasks.glue.table import TASKS
from tasks.reports.losses import reads_no_context, vocabularies_differ
from tasks.reports.markdown import Marked, code, short
from tasks.reports.rows import LOSS, RunMeans
from tasks.reports.scores import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

SCORE = "score: "  # begins the name of every column of runs.parquet with scores
AVERAGE = f"{SCORE}average"
UNITS = {
    "tokens": (("billion tokens", 1e9), ("million tokens", 1e6), ("thousand tokens", 1e3)),
    "operations": (("exaFLOP", 1e18), ("petaFLOP", 1e15), ("teraFLOP", 1e12), ("gigaFLOP", 1e9)),
    "seconds": (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)),
}
EQUAL = 0.02  # runs whose operations differ by less have equal ones, as batches are whole


def page_values(
    about: dict[str, Any],
    rows: "pd.DataFrame",
    means: list[RunMeans],
    law: dict[str, Any] | None,
    has_curves: bool,
) -> dict[str, Any]:
    """What the template of the page shows. `about`: the params of the page."""
    members = about["members"]
    measured = [line for line in means if math.isfinite(line.loss)]
    best = min(measured, key=lambda line: line.loss)
    names = {one["run"]: [one["run"], *one["also"]] for one in members}
    partial = {note for notes in rows["partial"] for note in notes}
    return {
        **about,
        **cautions(rows, means),
        "runs": counted(len(means), "run"),
        "first": means[0].run,
        "best": best,
        "rivals": rivals_of(best, means),
        "several": have_several_seeds(means),
        "losses": loss_table(means, about["published"], names),
        "scores": score_table(means, score_columns(rows)),
        "partial": [Marked(note) for note in sorted(partial)],
        "weak": weak_scores(rows),
        "problems": problems(rows),
        "changes": changes(members),
        "has_curves": has_curves,
        "law": law,
        "law_rows": law_table(law or {}),
        "artifacts": artifact_table(rows),
    }


def cautions(rows: "pd.DataFrame", means: list[RunMeans]) -> dict[str, Any]:
    """What to know before comparing the runs; the template has the sentences."""
    done = rows[rows["model"].ne("")]
    finished = [line for line in means if line.seeds]
    by_length = sorted(finished, key=lambda line: (line.length_nats, line.run))
    budgets = sorted(set(zip(done["budget_unit"], done["budget"], strict=True)))
    operations = done["operations"]
    return {
        "base": finished[0].run,
        "early": [
            line.run
            for line in finished
            if reads_no_context(line.loss, line.length_nats, line.value("by_frequencies"))
        ],
        "lengths": (by_length[0], by_length[-1]),
        "has_bounds": have_bounds(means),
        "budgets": [budget(amount, kind) for kind, amount in budgets],
        "in_hours": set(done["budget_unit"]) == {"hours"},
        "unequal_operations": operations.max() > (1 + EQUAL) * operations.min(),
        "common_text": done["evaluation"].ne("").any(),
        "short": done["short"].any(),
        "devices": sorted(set(done["device"])),
    }  # fmt: skip


def have_several_seeds(means: list[RunMeans]) -> bool:
    """Whether some run has several seeds, so that there is a spread."""
    return any(line.seeds > 1 for line in means)


def have_bounds(means: list[RunMeans]) -> bool:
    """Whether the runs have different vocabularies, so that a loss says no more than bounds of the true one."""
    lengths = [line.length_nats for line in means if line.seeds]
    return vocabularies_differ(min(lengths), max(lengths))


def rivals_of(best: RunMeans, means: list[RunMeans]) -> list[str]:
    """The runs with another vocabulary that may be as good as the best one: its loss isn't below their lower bound."""
    return [
        line.run
        for line in means
        if line.seeds and vocabularies_differ(line.length_nats, best.length_nats) and line.least <= best.loss
    ]


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
    return sorted({f"{run}: {columns}" for run, columns in zip(weak["run"], weak["weak"], strict=True)})


# Cells


def with_spread(value: float, deviation: float, digits: int, sign: str = "") -> str | None:
    """A number with its deviation or error, if there is one; None for a missing number."""
    if not math.isfinite(value):
        return None
    shown = f"{value:{sign}.{digits}f}"
    return f"{shown} ± {deviation:.{digits}f}" if math.isfinite(deviation) else shown


def mean_cell(line: RunMeans, name: str, digits: int) -> str | None:
    """A run's mean of a column ± its deviation."""
    mean = line.means[name]
    return with_spread(mean.value, mean.deviation, digits)


def difference_cell(line: RunMeans, name: str, digits: int) -> str | None:
    """A run's difference to the base in a column ± its standard error."""
    mean = line.means[name]
    if mean.difference is None or mean.error is None:
        return None
    return with_spread(mean.difference, mean.error, digits, "+")


def seeds_cell(line: RunMeans) -> int | str:
    """The number of seeds with a result; "2 of 3" if some failed."""
    return f"{line.seeds} of {line.seeds + line.failed}" if line.failed else line.seeds


def unit(kind: str, largest: float) -> tuple[str, float]:
    """The largest unit that is not above a number, or else the smallest one; and its size."""
    return next(((name, size) for name, size in UNITS[kind] if size <= largest), UNITS[kind][-1])


# Tables


def cost_table(means: list[RunMeans]) -> list[dict[str, str | None]]:
    """The mean cost of each run, all in the same units."""
    done = [line for line in means if line.seeds]
    work, of_work = unit("operations", max(line.value("operations") for line in done))
    time, of_time = unit("seconds", max(line.value("seconds") for line in done))
    rows: list[dict[str, str | None]] = []
    for line in means:
        if line.seeds:
            row = {
                "parameters": short(line.value("parameters")),
                "tokens": short(line.value("tokens")),
                work: f"{line.value('operations') / of_work:.3g}",
                time: f"{line.value('seconds') / of_time:.3g}",
                "tokens/s": f"{line.value('tokens_per_second'):,.0f}",
            }
            rows.append({**row})
        else:
            rows.append(dict.fromkeys(("parameters", "tokens", work, time, "tokens/s")))
    return rows


def loss_table(means: list[RunMeans], published: dict[str, str], names: dict[str, list[str]]) -> list[dict]:
    """The losses and costs, a row for each run. `names`: all names of each run.

    Where vocabularies differ, it also has the least that each loss may be.
    """
    difference = "difference ± error" if have_several_seeds(means) else "difference"
    has_bounds = have_bounds(means)
    rows = []
    for line, cost in zip(means, cost_table(means), strict=True):
        row: dict[str, object] = {
            "run": " = ".join(names[line.run]),
            "seeds": seeds_cell(line),
            "nats per byte": mean_cell(line, LOSS, 4),
            difference: difference_cell(line, LOSS, 4),
        }
        if has_bounds:
            row["at least"] = with_spread(line.least, math.nan, 4)
        row |= cost
        if published:
            found = [published[name] for name in names[line.run] if name in published]
            row["the paper"] = "; ".join(found) or None
        rows.append(row)
    return rows


def score_columns(rows: "pd.DataFrame") -> list[str]:
    """The columns that hold scores, in the usual order; the average first."""
    found = [name for name in rows.columns if name.startswith(SCORE) and rows[name].notna().any()]
    order = [SCORE + name for name in ("average", *COLUMNS, *TASKS)]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def score_table(means: list[RunMeans], scores: list[str]) -> list[dict]:
    """The scores, a row for each run, with the differences of the average or the only score; empty without scores."""
    rows: list[dict] = []
    if not scores:
        return rows
    first = scores[0]
    for line in means:
        row: dict[str, object] = {"run": line.run, "models": max(line.means[name].count for name in scores)}
        for name in scores:
            row[name.removeprefix(SCORE)] = mean_cell(line, name, 1)
        row[f"{first.removeprefix(SCORE)}, difference"] = difference_cell(line, first, 1)
        rows.append(row)
    return rows


def changes(members: list[dict]) -> list[dict]:
    """The changed fields of each run."""
    rows = []
    for run, changed in {one["run"]: one["changes"] for one in members}.items():
        if changed:
            fields = [code(f"{name} = {json.dumps(value)}") for name, value in changed.items()]
            rows.append({"run": run, "changed fields": Marked(", ".join(fields))})
    return rows


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
    shown = {"tokens"} | {name for name, _ in UNITS["seconds"]}  # of the costs
    table = []
    for line, cost in zip(means, cost_table(means), strict=True):
        row: dict[str, object] = {
            "run": line.run,
            "seeds": seeds_cell(line),
            "nats per byte": mean_cell(line, LOSS, 4) or "",
            "difference": difference_cell(line, LOSS, 4) or "",
        }
        for name, value in cost.items():
            if name in shown:
                row[name] = value or ""
        if AVERAGE in line.means:
            row["average"] = mean_cell(line, AVERAGE, 1) or ""
        row["problem"] = line.problem.partition(". ")[0]
        table.append(row)
    return table
