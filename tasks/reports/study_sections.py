"""The parts of a study's page: the runs with their means and spreads, differences, costs, the scaling law."""

import json
import math
from typing import Any

import pandas as pd

from model.quantities import budget, counted
from tasks.glue.tasks import TASKS
from tasks.reports.common import short
from tasks.reports.markdown import Marked, code
from tasks.reports.scores import COLUMNS

LOSS = "nats_per_byte"
COSTS = ("tokens", "operations", "seconds", "parameters", "tokens_per_second")
UNITS = {
    "tokens": (("billion tokens", 1e9), ("million tokens", 1e6), ("thousand tokens", 1e3)),
    "operations": (("exaFLOP", 1e18), ("petaFLOP", 1e15), ("teraFLOP", 1e12), ("gigaFLOP", 1e9)),
    "seconds": (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)),
}
MEANS = (LOSS, "nats_per_character", "length_nats", "by_frequencies", *COSTS)
SCORE = "score: "  # begins the name of every column of runs.parquet with scores
BY_FREQUENCIES = 0.9  # of the loss by token frequencies: models that only adapt these to the text have 0.92 to 0.95
EQUAL = 0.02  # runs whose operations differ by less have equal ones, as batches are whole


def score_columns(rows: pd.DataFrame) -> list[str]:
    """The columns that hold scores, in the usual order; the average first."""
    found = [name for name in rows.columns if name.startswith(SCORE) and rows[name].notna().any()]
    order = [SCORE + name for name in ("average", *COLUMNS, *TASKS)]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def spread(values: pd.Series) -> float:
    """The sample standard deviation; NaN for a single value."""
    return float(values.std(ddof=1)) if len(values) > 1 else math.nan


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """A row for each run: means over its seeds, deviations, differences to the base with their standard errors.

    The base is the first run with a result. The standard error of a difference of means is that of two independent
    samples (Welch), NaN unless both runs have several seeds, and for the losses of runs with the same models.
    """
    lines, base = [], None
    scores = score_columns(rows)
    for run, own in rows.groupby("run", sort=False):
        done = own[own["model"].ne("")]
        line: dict[str, Any] = {"run": run, "seeds": len(done), "failed": len(own) - len(done)}
        line |= {"problem": " ".join(dict.fromkeys(filter(None, own["problem"]))), "models": sorted(done["model"])}
        for name in (*MEANS, *scores):
            values = done[name].dropna() if name in done else pd.Series(dtype=float)
            line |= {name: values.mean() if len(values) else math.nan, f"{name} deviation": spread(values)}
            line |= {f"{name} values": len(values)}
            if base is not None and (name == LOSS or name in scores):
                line |= difference(name, line, base)
        base = line if base is None and len(done) else base
        lines.append(line)
    return pd.DataFrame(lines)


def difference(name: str, line: dict, base: dict) -> dict[str, float]:
    """The difference of a run's mean to the base's, and its standard error."""
    deviations = [(one[f"{name} deviation"], one[f"{name} values"]) for one in (line, base)]
    error = math.sqrt(sum(deviation**2 / max(1, count) for deviation, count in deviations))
    if name == LOSS and line["models"] == base["models"]:
        error = math.nan
    return {f"{name} difference": line[name] - base[name], f"{name} error": error}


def with_spread(value: float, deviation: float, digits: int, sign: str = "") -> str | None:
    """A number with its deviation or error, if there is one; None for a missing number."""
    if not math.isfinite(value):
        return None
    return f"{value:{sign}.{digits}f}" + (f" ± {deviation:.{digits}f}" if math.isfinite(deviation) else "")


def mean(line: dict, name: str, digits: int) -> str | None:
    """The mean of a run in a column with its deviation, for a table."""
    return with_spread(line[name], line[f"{name} deviation"], digits)


def away(line: dict, name: str, digits: int) -> str | None:
    """The difference of a run to the base in a column with its standard error, for a table."""
    return with_spread(line.get(f"{name} difference", math.nan), line.get(f"{name} error", math.nan), digits, "+")


def reads_no_context(line: dict) -> bool:
    """Whether a run's loss is more than nine tenths of that of token frequencies; False where this is not known.

    Both without what the numbers of pieces cost, which is the same for both.
    """
    lengths = line["length_nats"]
    return bool(line[LOSS] - lengths > BY_FREQUENCIES * (line["by_frequencies"] - lengths))


def loss_table(lines: list[dict], published: dict[str, str], also: dict[str, list[str]]) -> list[dict]:
    """The table of losses and costs, a row for each run."""
    several = any(line["seeds"] > 1 for line in lines)
    return [
        {
            "run": " = ".join([line["run"], *also[line["run"]]]),
            "seeds": seeds(line),
            "nats per byte": mean(line, LOSS, 4),
            "difference" + (" ± error" if several else ""): away(line, LOSS, 4),
            **cost,
            **({"the paper": said(published, [line["run"], *also[line["run"]]])} if published else {}),
        }
        for line, cost in zip(lines, costs(lines), strict=True)
    ]


def seeds(line: dict) -> int | str:
    """The number of seeds with a result, of all if some failed."""
    return f"{line['seeds']} of {line['seeds'] + line['failed']}" if line["failed"] else line["seeds"]


def said(published: dict[str, str], names: list[str]) -> str | None:
    """What the paper says of a run with these names."""
    return "; ".join(published[name] for name in names if name in published) or None


def unit(kind: str, largest: float) -> tuple[str, float]:
    """The largest unit that is not above a number, and its size; the smallest one for smaller numbers."""
    return next(((name, size) for name, size in UNITS[kind] if size <= largest), UNITS[kind][-1])


def costs(lines: list[dict]) -> list[dict[str, str | None]]:
    """What a run of each of these means took; all in the same units."""
    (work, of_work), (time, of_time) = (
        unit(kind, max((line[kind] for line in lines if line["seeds"]), default=0))
        for kind in ("operations", "seconds")
    )
    return [
        {
            "parameters": short(line["parameters"]),
            "tokens": short(line["tokens"]),
            work: f"{line['operations'] / of_work:.3g}",
            time: f"{line['seconds'] / of_time:.3g}",
            "tokens/s": f"{line['tokens_per_second']:,.0f}",
        }
        if line["seeds"]
        else dict.fromkeys(("parameters", "tokens", work, time, "tokens/s"))
        for line in lines
    ]


def score_table(lines: list[dict], scores: list[str]) -> list[dict]:
    """The table of scores, a row for each run, with the differences of the average or of the only score."""
    rows = []
    for line in lines:
        cells = {name.removeprefix(SCORE): mean(line, name, 1) for name in scores}
        cells[f"{scores[0].removeprefix(SCORE)}, difference"] = away(line, scores[0], 1)
        rows.append({"run": line["run"], "models": max(line[f"{name} values"] for name in scores), **cells})
    return rows


def notes(rows: pd.DataFrame, lines: list[dict], is_rescaled: bool, has_curves: bool) -> list[str]:
    """What to know before comparing the runs."""
    done, found = rows[rows["model"].ne("")], []
    base = next(line["run"] for line in lines if line["seeds"])
    if is_rescaled:
        found.append(
            "The names of the runs, and what the paper says of them, are of the paper's size and day. The runs have "
            "another size or budget; their values are under 'What the runs change'."
        )
    if base != lines[0]["run"]:
        found.append(f"The first run has no result; differences are to {base}.")
    if all(line["seeds"] <= 1 for line in lines):
        found.append("Each run has one seed, so no spread is given: any difference may be chance.")
    else:
        found.append(
            "Means over seeds ± their sample standard deviation; differences to "
            f"{base} ± the standard error of the difference of two independent means."
        )
    if early := [line["run"] for line in lines if reads_no_context(line)]:
        found.append(
            f"The loss of {', '.join(early)} is more than nine tenths of what token frequencies alone give: such a run "
            "has hardly begun to read context, and its rank says little of longer runs."
        )
    if unknown := [line["run"] for line in lines if line["seeds"] and not math.isfinite(line["by_frequencies"])]:
        found.append(
            f"Of {', '.join(unknown)} it is not known what token frequencies alone give, as an older version of cram "
            "made the models."
        )
    found += split_differently(lines)
    found += unequal(done, has_curves)
    if done["evaluation"].ne("").any():
        found.append(
            "Not all runs have the same held-out text. Losses were measured on documents that no run was trained on; "
            "curves on other text are left out."
        )
    if set(done["budget_unit"]) == {"hours"}:
        found.append("The budget is time, which other work on the machine slows down. Compare tokens too.")
    if done["device"].nunique() > 1:
        found.append(f"The runs are from different machines: {', '.join(sorted(set(done['device'])))}.")
    return found


def split_differently(lines: list[dict]) -> list[str]:
    """What the numbers of pieces cost in the losses, in a sentence, if that differs between the runs."""
    lengths = sorted((line["length_nats"], line["run"]) for line in lines if line["seeds"])
    if not lengths or lengths[-1][0] == lengths[0][0]:
        return []
    (least, one), *_, (most, other) = lengths
    return [
        f"The vocabularies split words differently. Of the losses, {least:.4f} ({one}) to {most:.4f} nats per byte "
        f"({other}) are for the number of pieces of words, at most: it follows from the context in part, so a smaller "
        "difference between two runs does not tell them apart."
    ]


def unequal(done: pd.DataFrame, has_curves: bool) -> list[str]:
    """In what the budgets of the finished runs differ, in a sentence."""
    budgets = sorted(set(zip(done["budget_unit"], done["budget"], strict=True)))
    if len(budgets) > 1:
        every = ", ".join(budget(amount, unit) for unit, amount in budgets)
        curves = " Compare them on the curves." if has_curves else ""
        return [
            f"The runs have unequal budgets ({every}), so their final losses don't compare the recipes alone.{curves}"
        ]
    if done["operations"].max() > (1 + EQUAL) * done["operations"].min():
        return [
            "The runs have the same budget, but not the same number of operations: a token, or an hour, buys more of "
            "them in some runs."
        ]
    return []


def problems(rows: pd.DataFrame) -> list[str]:
    """What became of failed runs, with their seeds unless all of them have the same problem."""
    found = []
    for (run, problem), own in rows[rows["problem"].ne("")].groupby(["run", "problem"], sort=False):
        failed, every = own["seed"].tolist(), rows["run"].eq(run).sum()
        which = (
            "" if len(failed) == every else f", {'seed' if len(failed) == 1 else 'seeds'} {', '.join(map(str, failed))}"
        )
        found.append(f"{run}{which}: {problem}")
    return found


def law_rows(law: dict[str, Any]) -> dict[str, Any]:
    """The fitted parameters and the predictions as rows of tables."""

    def interval(one: dict) -> str:
        return " to ".join(f"{round(one[end], 6):.4g}" for end in ("low", "high"))

    return {
        "parameters": [
            {"parameter": name, "value": f"{one['value']:.4g}", "90 % of resamples": interval(one)}
            for name, one in law["parameters"].items()
        ],
        "predictions": [
            {"a day of": one["card"], "exaFLOP": f"{one['operations'] / 1e18:.3g}", "tokens": short(one["tokens"]),
             "nats per byte": f"{one['loss']:.4f}", "90 % of resamples": interval(one)}
            for one in law["predictions"]
        ],
    }  # fmt: skip


def for_people(
    about: dict[str, Any], rows: pd.DataFrame, means: pd.DataFrame, law: dict[str, Any] | None, curves: dict
) -> dict[str, Any]:
    """What the template of the page shows. `about`: the params of the study's report."""
    lines, scores = means.to_dict("records"), score_columns(rows)
    also = {member["run"]: member["also"] for member in about["members"]}
    changes = {member["run"]: member["changes"] for member in about["members"]}
    best = min((line for line in lines if math.isfinite(line[LOSS])), key=lambda line: line[LOSS], default=None)
    return {
        **about,
        "runs": counted(len(lines), "run"),
        "best": best,
        "several": any(line["seeds"] > 1 for line in lines),
        "losses": loss_table(lines, about["published"], also),
        "scores": score_table(lines, scores) if scores else [],
        "notes": notes(rows, lines, about["is_rescaled"], bool(curves)),
        "partial": [Marked(note) for note in sorted({note for notes in rows["partial"] for note in notes})],
        "weak": sorted({f"{row['run']}: {row['weak']}" for row in rows.to_dict("records") if row["weak"]}),
        "problems": problems(rows),
        "changes": [
            {"run": run, "changed fields": Marked(", ".join(code(f"{k} = {json.dumps(v)}") for k, v in own.items()))}
            for run, own in changes.items()
            if own
        ],
        "has_curves": bool(curves),
        "law": law,
        "law_rows": law_rows(law) if law and "parameters" in law else None,
        "artifacts": [
            {"run": row["run"], "seed": row["seed"]}
            | {kind: row[kind] or None for kind in ("model", "evaluation", "report") if rows[kind].ne("").any()}
            for row in rows.to_dict("records")
        ],
    }


def brief(means: pd.DataFrame) -> list[dict]:
    """The rows that the terminal and the page of a Prefect run show; of a problem, the first sentence."""
    table, lines = [], means.to_dict("records")
    shown = {"tokens"} | {name for name, _ in UNITS["seconds"]}  # of the costs
    for line, cost in zip(lines, costs(lines), strict=True):
        row = {"run": line["run"], "seeds": seeds(line)}
        row |= {"nats per byte": mean(line, LOSS, 4) or "", "difference": away(line, LOSS, 4) or ""}
        row |= {name: value or "" for name, value in cost.items() if name in shown}
        if (average := f"{SCORE}average") in line:
            row["average"] = mean(line, average, 1) or ""
        table.append(row | {"problem": line["problem"].partition(". ")[0]})
    return table
