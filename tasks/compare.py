"""Compare: the runs of a study on one page: losses and scores with their spread over seeds, costs, curves, a scaling law.

Reads   pretrain artifacts; where the text differs, their evaluations on a common one; reports, if the runs have scores.
Writes  study.html    the page, complete in itself
        study.md, study.json
        runs.parquet  a row for each run
        *.svg         its pictures
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from model.wording import budget, counted
from tasks.glue.table import TASKS
from tasks.reports import law, plots
from tasks.reports.markdown import Marked, code, page, render, short
from tasks.reports.scores import COLUMNS, partial_notes
from tasks.stage import Params, stage
from tasks.store.artifacts import Artifact, artifact_named

if TYPE_CHECKING:
    import pandas as pd

LOSS = "nats_per_byte"
UNITS = {
    "tokens": (("billion tokens", 1e9), ("million tokens", 1e6), ("thousand tokens", 1e3)),
    "operations": (("exaFLOP", 1e18), ("petaFLOP", 1e15), ("teraFLOP", 1e12), ("gigaFLOP", 1e9)),
    "seconds": (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0)),
}
COSTS = ("tokens", "operations", "seconds", "parameters", "tokens_per_second")
MEANS = (LOSS, "nats_per_character", "length_nats", "by_frequencies", *COSTS)
SCORE = "score: "  # begins the name of every column of runs.parquet with scores
BY_FREQUENCIES = 0.9  # of the loss by token frequencies: models that only adapt these to the text have 0.92 to 0.95
SAME_LENGTHS = 1e-6  # nats per byte: the same vocabulary has the same cost of the numbers of pieces, but for rounding
EQUAL = 0.02  # runs whose operations differ by less have equal ones, as batches are whole
AXES = tuple(UNITS)
POINTS = 11  # of a mean curve
# Runs that differ in anything else don't belong to one scaling law.
SHAPE = ("layers", "hidden", "heads", "intermediate", "embedding", "different_layers")
SIZE_FIELDS = {"pretrain.budget", "pretrain.budget_unit"} | {f"pretrain.architecture.{name}" for name in SHAPE}


class Member(BaseModel, frozen=True, extra="forbid"):
    """One run of a study."""

    run: str = Field(description="Its name in the study.")
    also: list[str] = Field([], description="Other names in the study that stand for the same run.")
    seed: int = Field(0, description="Number of the seed.")
    changes: dict[str, Any] = Field({}, description="What distinguishes it from the first run, by field.")
    model: str = Field("", description="Its pretrain artifact.")
    evaluation: str = Field("", description="Its loss on the common text, if its own held-out text is another.")
    report: str = Field("", description="Its report artifact, if it has scores.")
    compared: bool = Field(True, description="Whether its loss is on the common text.")
    problem: str = Field("", description="Why it has no result, no loss, or no scores.")


class Compare(Params):
    """What the page says of the study, and its runs."""

    title: str
    about: str = ""
    paper: str = ""
    published: dict[str, str] = Field({})
    recipe: str = ""
    scale: str = ""
    is_rescaled: bool = Field(False, description="Whether the runs have another size or budget than their names say.")
    members: list[Member] = Field([])
    fit: bool = False


def row_of(member: Member) -> dict[str, Any]:
    """The results of a run, as a row of runs.parquet; without results if it failed."""
    row = member.model_dump(include={"run", "seed", "model", "evaluation", "report", "problem"})
    row |= {"changes": json.dumps(member.changes), "weak": "", "partial": [], "short": False}
    if member.model:
        stats, params = artifact_named(member.model).stats, artifact_named(member.model).manifest["params"]
        measured = artifact_named(member.evaluation).stats if member.evaluation else stats["heldout"]
        for unit in ("byte", "character", "word"):
            row[f"nats_per_{unit}"] = measured[f"nats_per_{unit}"]["value"] if member.compared else None
        row |= {"length_nats": measured["length_nats_per_byte"], "digest": measured["digest"]}
        row |= {"by_frequencies": measured["by_frequencies"]["nats_per_byte"], "device": stats["machine"]["device"]}
        row |= {name: stats[name] for name in ("parameters", "tokens", "steps", "tokens_per_second", "mfu")}
        row |= {"operations": stats["exaflops"] * 1e18, "seconds": stats["seconds_on_the_clock"]}
        row |= {"budget": params["budget"], "budget_unit": params["budget_unit"]}
        row["short"] = "of_digest" in stats["heldout"]
    if member.report:
        about = json.loads((artifact_named(member.report).path / "report.json").read_text(encoding="utf-8"))
        scores = [one for one in about["scores"] if one["pretrained"] and one["share"] == 1.0]
        row |= {SCORE + "average": about["average"]} | {SCORE + one["column"]: one["score"] for one in scores}
        row["partial"] = [str(note) for note in partial_notes(scores)]
        row["weak"] = ", ".join(one["column"] for one in scores if not one["beats_majority"])
    return row


def heldout_digest(held: dict) -> str:
    """The digest of all documents that a long run's held-out loss would be measured on. `held`: `heldout` of stats."""
    return held.get("of_digest", held["digest"])


def curves_of(members: list[Member]) -> dict[str, dict[str, np.ndarray]]:
    """The mean curve of each run over its seeds: tokens, operations, seconds and loss per byte.

    Only of runs that have the held-out text of the first one, on parts of which the curves are measured.
    """
    curves: dict[str, list] = {}
    texts = {one.model: heldout_digest(artifact_named(one.model).stats["heldout"]) for one in members if one.model}
    for member in members:
        if member.model and member.compared and texts[member.model] == next(iter(texts.values())):
            curves.setdefault(member.run, []).append(artifact_named(member.model).stats["evaluations"])
    grid, means = np.linspace(0, 1, POINTS), {}
    for run, of_seeds in curves.items():
        means[run] = {
            axis: np.mean(
                [np.interp(grid, [e["fraction"] for e in one], [e[axis] for e in one]) for one in of_seeds], axis=0
            )
            for axis in (*AXES, "heldout_nats_per_byte")
        }
    return means


def law_of(params: Compare, rows: "pd.DataFrame", out: Path) -> dict[str, Any]:
    """The scaling law of runs that differ in size and budget only: its test on the largest, and its picture."""
    sized = np.array([set(member.changes) <= SIZE_FIELDS for member in params.members])
    measured = rows[rows["model"].ne("") & rows["nats_per_byte"].notna() & sized]
    numbers = ["operations", "tokens", "nats_per_byte", "length_nats", "by_frequencies"]
    means = measured.groupby("run", sort=False)[numbers].mean()  # over seeds
    early = reads_no_context(means)
    done, left_out = means[~early], [*means.index[early]]
    runs = done.assign(sizes=done["operations"] / done["tokens"] / 6, losses=done[LOSS])
    if not law.can_be_fitted(runs):
        return {"runs": law.points(runs), "needed": law.FEWEST, "left_out": left_out}
    fitted = law.fit(runs)
    laws = law.resample(runs, fitted)
    plots.law(runs, fitted, laws, law.INTERVAL, out / "law.svg")
    return law.describe(runs, fitted, laws) | {"left_out": left_out, "test": law.test_on_largest(runs)}


def score_columns(rows: "pd.DataFrame") -> list[str]:
    """The columns that hold scores, in the usual order; the average first."""
    found = [name for name in rows.columns if name.startswith(SCORE) and rows[name].notna().any()]
    order = [SCORE + name for name in ("average", *COLUMNS, *TASKS)]
    return sorted(found, key=lambda name: order.index(name) if name in order else len(order))


def means_of(rows: "pd.DataFrame") -> "pd.DataFrame":
    """A row for each run: means over its seeds, sample deviations, differences to the base with their standard errors.

    The base is the first run with a result. The standard error of a difference of means is that of two independent
    samples (Welch), NaN unless both runs have several seeds, and for the losses of runs with the same models.
    """
    import pandas as pd

    lines, base, scores = [], None, score_columns(rows)
    for run, own in rows.groupby("run", sort=False):
        done = own[own["model"].ne("")]
        line: dict[str, Any] = {"run": run, "seeds": len(done), "failed": len(own) - len(done)}
        line |= {"problem": " ".join(dict.fromkeys(filter(None, own["problem"]))), "models": sorted(done["model"])}
        for name in (*MEANS, *scores):
            values = done[name].dropna()
            line |= {name: values.mean(), f"{name} deviation": values.std(), f"{name} values": len(values)}
            if base and name in (LOSS, *scores):
                variances = [one[f"{name} deviation"] ** 2 / max(1, one[f"{name} values"]) for one in (line, base)]
                same = name == LOSS and line["models"] == base["models"]
                line[f"{name} difference"] = line[name] - base[name]
                line[f"{name} error"] = math.nan if same else math.sqrt(sum(variances))
        base = base or (line if len(done) else None)
        lines.append(line)
    return pd.DataFrame(lines)


def with_spread(value: float, deviation: float, digits: int, sign: str = "") -> str | None:
    """A number with its deviation or error, if there is one; None for a missing number."""
    if not math.isfinite(value):
        return None
    return f"{value:{sign}.{digits}f}" + (f" ± {deviation:.{digits}f}" if math.isfinite(deviation) else "")


def mean(line: dict, name: str, digits: int) -> str | None:
    """A run's mean of a column ± its deviation."""
    return with_spread(line[name], line[f"{name} deviation"], digits)


def away(line: dict, name: str, digits: int) -> str | None:
    """A run's difference to the base in a column ± its standard error."""
    return with_spread(line.get(f"{name} difference", math.nan), line.get(f"{name} error", math.nan), digits, "+")


def reads_no_context(means: "pd.DataFrame") -> "pd.Series":
    """Whether the loss of each run is more than nine tenths of that of token frequencies, the cost of lengths aside."""
    lengths = means["length_nats"]
    return means[LOSS] - lengths > BY_FREQUENCIES * (means["by_frequencies"] - lengths)


def seeds(line: dict) -> int | str:
    """The number of seeds with a result; "2 of 3" if some failed."""
    return f"{line['seeds']} of {line['seeds'] + line['failed']}" if line["failed"] else line["seeds"]


def unit(kind: str, largest: float) -> tuple[str, float]:
    """The largest unit that is not above a number, or else the smallest one; and its size."""
    return next(((name, size) for name, size in UNITS[kind] if size <= largest), UNITS[kind][-1])


def costs(lines: list[dict]) -> list[dict[str, str | None]]:
    """The mean cost of each run, all in the same units."""
    (work, of_work), (time, of_time) = (
        unit(kind, max(line[kind] for line in lines if line["seeds"])) for kind in ("operations", "seconds")
    )
    rows = []
    for line in lines:
        row = {"parameters": short(line["parameters"]), "tokens": short(line["tokens"])}
        row |= {work: f"{line['operations'] / of_work:.3g}", time: f"{line['seconds'] / of_time:.3g}"}
        row["tokens/s"] = f"{line['tokens_per_second']:,.0f}"
        rows.append(row if line["seeds"] else dict.fromkeys(row))
    return rows


def lower_bound(line: dict) -> float:
    """The least that a run's loss may be in truth: without what the numbers of pieces cost (model.heldout)."""
    return line[LOSS] - line["length_nats"]


def vocabularies_differ(line: dict, other: dict) -> bool:
    """Whether two runs have vocabularies that split the words of the held-out text differently."""
    return abs(line["length_nats"] - other["length_nats"]) > SAME_LENGTHS


def rivals_of(best: dict, lines: list[dict]) -> list[str]:
    """The runs with another vocabulary that may be as good as the best one: its loss isn't below their lower bound."""
    others = [line for line in lines if line["seeds"] and vocabularies_differ(line, best)]
    return [line["run"] for line in others if lower_bound(line) <= best[LOSS]]


def losses_of(lines: list[dict], published: dict[str, str], names: dict[str, list[str]]) -> list[dict]:
    """The table of losses and costs, a row for each run. `names`: all names of each run.

    Where vocabularies differ, it also has the least that each loss may be.
    """
    several, rows = any(line["seeds"] > 1 for line in lines), []
    by_length = sorted((line for line in lines if line["seeds"]), key=lambda line: line["length_nats"])
    has_bounds = vocabularies_differ(by_length[0], by_length[-1])
    for line, cost in zip(lines, costs(lines), strict=True):
        row = {"run": " = ".join(names[line["run"]]), "seeds": seeds(line), "nats per byte": mean(line, LOSS, 4)}
        row["difference" + (" ± error" if several else "")] = away(line, LOSS, 4)
        if has_bounds:
            row["at least"] = with_spread(lower_bound(line), math.nan, 4)
        row |= cost
        if published:
            row["the paper"] = "; ".join(published[name] for name in names[line["run"]] if name in published) or None
        rows.append(row)
    return rows


def scores_of(lines: list[dict], scores: list[str]) -> list[dict]:
    """The table of scores, a row for each run, with the differences of the average or of the only score."""
    rows = []
    for line in lines:
        cells = {name.removeprefix(SCORE): mean(line, name, 1) for name in scores}
        cells[f"{scores[0].removeprefix(SCORE)}, difference"] = away(line, scores[0], 1)
        rows.append({"run": line["run"], "models": max(line[f"{name} values"] for name in scores), **cells})
    return rows


def cautions(rows: "pd.DataFrame", means: "pd.DataFrame") -> dict[str, Any]:
    """What to know before comparing the runs; the template has the sentences."""
    done, finished = rows[rows["model"].ne("")], means[means["seeds"] > 0]
    by_length = finished.sort_values(["length_nats", "run"])[["length_nats", "run"]].to_dict("records")
    budgets = sorted(set(zip(done["budget_unit"], done["budget"], strict=True)))
    return {
        "base": finished["run"].iloc[0],
        "early": [*means["run"][reads_no_context(means)]],
        "lengths": (by_length[0], by_length[-1]),
        "has_bounds": vocabularies_differ(by_length[0], by_length[-1]),
        "budgets": [budget(amount, kind) for kind, amount in budgets],
        "in_hours": set(done["budget_unit"]) == {"hours"},
        "unequal_operations": done["operations"].max() > (1 + EQUAL) * done["operations"].min(),
        "common_text": done["evaluation"].ne("").any(),
        "short": done["short"].any(),
        "devices": sorted(set(done["device"])),
    }


def problems(rows: "pd.DataFrame") -> list[str]:
    """What became of failed runs, with their seeds unless all of them have the same problem."""
    found = []
    for (run, problem), own in rows[rows["problem"].ne("")].groupby(["run", "problem"], sort=False):
        failed = ", ".join(map(str, own["seed"]))
        which = "" if len(own) == rows["run"].eq(run).sum() else f", seed{'s' if len(own) > 1 else ''} {failed}"
        found.append(f"{run}{which}: {problem}")
    return found


def for_people(
    about: dict[str, Any], rows: "pd.DataFrame", means: "pd.DataFrame", fitted: dict[str, Any] | None, curves: dict
) -> dict[str, Any]:
    """What the template of the page shows. `about`: the params of the study's report."""
    lines, scores, members = means.to_dict("records"), score_columns(rows), about["members"]
    best = lines[means[LOSS].idxmin()]
    return {
        **about,
        **cautions(rows, means),
        "runs": counted(len(lines), "run"),
        "first": lines[0]["run"],
        "best": best,
        "rivals": rivals_of(best, lines),
        "several": any(line["seeds"] > 1 for line in lines),
        "losses": losses_of(lines, about["published"], {one["run"]: [one["run"], *one["also"]] for one in members}),
        "scores": scores_of(lines, scores) if scores else [],
        "partial": [Marked(note) for note in sorted({note for notes in rows["partial"] for note in notes})],
        "weak": sorted({f"{row['run']}: {row['weak']}" for row in rows.to_dict("records") if row["weak"]}),
        "problems": problems(rows),
        "changes": [
            {"run": run, "changed fields": Marked(", ".join(code(f"{k} = {json.dumps(v)}") for k, v in own.items()))}
            for run, own in {one["run"]: one["changes"] for one in members}.items()
            if own
        ],
        "has_curves": bool(curves),
        "law": fitted,
        "law_rows": [
            {"parameter": name, "value": f"{one['value']:.4g}", "90 % of resamples": " to ".join(ends)}
            for name, one in (fitted or {}).get("parameters", {}).items()
            for ends in [[f"{round(one[end], 6):.4g}" for end in ("low", "high")]]
        ],
        "artifacts": [
            {"run": row["run"], "seed": row["seed"]}
            | {kind: row[kind] or None for kind in ("model", "evaluation", "report") if rows[kind].ne("").any()}
            for row in rows.to_dict("records")
        ],
    }


def brief(means: "pd.DataFrame") -> list[dict]:
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


@stage(version=6)
def compare(
    params: Compare, models: list[Artifact], evaluations: list[Artifact], reports: list[Artifact], out: Path
) -> dict:
    """Compare the runs of a study: the page, its parts for programs, and its pictures."""
    import pandas as pd

    rows = pd.DataFrame(map(row_of, params.members))
    rows.to_parquet(out / "runs.parquet", index=False)
    means, curves = means_of(rows), curves_of(params.members)
    for axis in AXES if curves else ():
        label, size = unit(axis, max(one[axis].max() for one in curves.values()))
        lines = {run: (one[axis] / size, one["heldout_nats_per_byte"]) for run, one in curves.items()}
        plots.lines(lines, label, "held-out loss, nats per byte", out / f"{axis}.svg")
    fitted = law_of(params, rows, out) if params.fit else None
    content = params.model_dump(mode="json") | {
        "summary": means.astype(object).where(means.notna(), None).to_dict("records"),
        "law": fitted,
        "curves": {run: {axis: values.tolist() for axis, values in one.items()} for run, one in curves.items()},
    }
    (out / "study.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    markdown = render("compare", for_people(params.model_dump(), rows, means, fitted, curves))
    (out / "study.md").write_text(markdown, encoding="utf-8")
    pictures = {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}
    (out / "study.html").write_text(page(markdown, params.title, pictures), encoding="utf-8")
    return {"runs": len(rows), "failed": int(rows["problem"].ne("").sum()), "table": brief(means)}
