"""Study: the runs of a study on one page: losses and scores with their spread over seeds, costs, curves, a scaling law.

Reads   pretrain artifacts; where the text differs, their evaluations on a common one; reports, if the runs have scores.
Writes  study.html    the page, complete in itself
        study.md, study.json
        runs.parquet  a row for each run
        *.svg         its pictures
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from model import InputError
from tasks.reports import law, plots, study_sections
from tasks.reports.common import partial_notes
from tasks.reports.markdown import render
from tasks.reports.page import page
from tasks.reports.study_sections import SCORE
from tasks.stage import Params, stage
from tasks.store import Artifact, named

if TYPE_CHECKING:
    import pandas as pd

AXES = ("tokens", "operations", "seconds")
POINTS = 11  # of a mean curve
# Runs that differ in anything else don't belong to one scaling law.
SHAPE = ("layers", "hidden", "heads", "intermediate", "embedding", "different_layers")
SIZES = {"pretrain.budget", "pretrain.budget_unit"} | {f"pretrain.architecture.{name}" for name in SHAPE}


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


class Card(BaseModel, frozen=True, extra="forbid"):
    """A day of a machine, for which the law predicts a loss."""

    name: str
    operations: float = Field(description="In a day.")
    size: float = Field(description="Operations per token / 6 of the model that is trained.")


class StudyReport(Params):
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
    cards: list[Card] = Field([])


def row_of(member: Member) -> dict[str, Any]:
    """The results of a run, as a row of runs.parquet; without results if it failed."""
    row: dict[str, Any] = {"run": member.run, "seed": member.seed, "changes": json.dumps(member.changes)}
    row |= {
        "problem": member.problem,
        "weak": "",
        "partial": [],
        "model": member.model,
        "evaluation": member.evaluation,
        "report": member.report,
    }
    if member.model:
        stats = named(member.model).stats
        measured = named(member.evaluation).stats if member.evaluation else stats["heldout"]
        for unit in ("byte", "character", "word"):
            row[f"nats_per_{unit}"] = measured[f"nats_per_{unit}"]["value"] if member.compared else None
        row["length_nats"] = measured["length_nats_per_byte"]
        row["by_frequencies"] = measured.get("by_frequencies", {}).get("nats_per_byte", np.nan)  # older models lack it
        row |= {name: stats[name] for name in ("parameters", "tokens", "steps", "tokens_per_second", "mfu")}
        row |= {"operations": stats["exaflops"] * 1e18, "seconds": stats["seconds_on_the_clock"]}
        row |= {"digest": measured["digest"], "device": stats["machine"]["device"]}
        params = named(member.model).manifest["params"]
        row |= {"budget": params["budget"], "budget_unit": params["budget_unit"]}
    if member.report:
        about = json.loads((named(member.report).path / "report.json").read_text())
        own = [one for one in about["scores"] if one["pretrained"] and one["share"] == 1.0]
        names = [one["column"] + ("" if one["protocol"] == "cramming" else f" ({one['protocol']})") for one in own]
        row |= {SCORE + "average": about["average"]}
        row |= {SCORE + name: one["score"] for name, one in zip(names, own, strict=True)}
        row["partial"] = [str(note) for note in partial_notes(own)]
        row["weak"] = ", ".join(name for name, one in zip(names, own, strict=True) if not one["beats_majority"])
    return row


def curves_of(members: list[Member]) -> dict[str, dict[str, np.ndarray]]:
    """The mean curve of each run over its seeds: tokens, operations, seconds and loss per byte.

    Only of runs that are compared on their own held-out text, on which the curves are measured.
    """
    curves: dict[str, list] = {}
    for member in members:
        if not member.model or member.evaluation or not member.compared:
            continue
        evaluations = named(member.model).stats["evaluations"]
        if "operations" in evaluations[0]:  # older models lack it
            curves.setdefault(member.run, []).append(evaluations)
    grid, means = np.linspace(0, 1, POINTS), {}
    for run, of_seeds in curves.items():
        means[run] = {
            axis: np.mean(
                [np.interp(grid, [e["fraction"] for e in one], [e[axis] for e in one]) for one in of_seeds], axis=0
            )
            for axis in (*AXES, "heldout_nats_per_byte")
        }
    return means


def law_of(params: StudyReport, rows: "pd.DataFrame", out: Path) -> dict[str, Any] | None:
    """The scaling law of runs that differ in size and budget only: its test on the largest, predictions, picture."""
    if not params.fit:
        return None
    sized = np.array([set(member.changes) <= SIZES for member in params.members])
    numbers = ["operations", "tokens", "nats_per_byte"]
    measured = rows[rows["model"].ne("") & rows["nats_per_byte"].notna() & sized]
    finished = (
        measured.groupby("run", sort=False)[[*numbers, "length_nats", "by_frequencies"]].mean().reset_index()
    )  # over seeds
    early = np.array(list(map(study_sections.reads_no_context, finished.to_dict("records"))), dtype=bool)
    done, left_out = finished[~early], finished["run"][early].tolist()
    runs = law.Runs(
        (done["operations"] / done["tokens"] / 6).to_numpy(float),
        done["tokens"].to_numpy(float),
        done["nats_per_byte"].to_numpy(float),
    )
    if not law.can_be_fitted(runs):
        return {"runs": law.points(runs), "needed": law.FEWEST, "left_out": left_out}
    fitted = law.fitted(runs)
    laws = law.resampled(runs, fitted)
    values = np.array([one.values for one in laws])
    about = {
        "runs": len(runs),
        "left_out": left_out,
        "parameters": {
            name: {"value": float(fitted.values[i]), **dict(zip(("low", "high"),
                   np.percentile(values[:, i], law.INTERVAL).tolist(), strict=True))}
            for i, name in enumerate(law.PARAMETERS)
        },
        "units": {"size": fitted.units[0], "tokens": fitted.units[1]},
        "resamples": len(laws),
        "residual": float(np.sqrt(np.mean((fitted(runs.sizes, runs.tokens) / runs.losses - 1) ** 2))),
        "test": law.tested(runs),
        "predictions": [
            {"card": card.name, "operations": card.operations, "tokens": (read := card.operations / 6 / card.size),
             **law.predicted(fitted, laws, card.size, read)}
            for card in params.cards
        ],
    }  # fmt: skip
    if about["test"]:
        about["test"]["largest"] = done["run"].iloc[about["test"]["largest"]]
    plots.law(runs, fitted, laws, law.INTERVAL, out / "law.svg")
    return about


@stage(version=4, name="study")
def compare_runs(
    params: StudyReport, models: list[Artifact], evaluations: list[Artifact], reports: list[Artifact], out: Path
) -> dict:
    """Write the page, its parts for programs, and its pictures."""
    import pandas as pd

    given = {artifact.name for artifact in (*models, *evaluations, *reports)}
    for member in params.members:
        for name in filter(None, (member.model, member.evaluation, member.report)):
            if name not in given:
                raise InputError(f"{name} of run {member.run!r} is not among the inputs of the study.")
    rows = pd.DataFrame(map(row_of, params.members))
    summary = study_sections.summary(rows)
    curves = curves_of(params.members)
    for axis in AXES if curves else ():
        label, size = study_sections.unit(axis, max(one[axis].max() for one in curves.values()))
        lines = {run: (one[axis] / size, one["heldout_nats_per_byte"]) for run, one in curves.items()}
        plots.lines(lines, label, "held-out loss, nats per byte", out / f"{axis}.svg")
    fitted = law_of(params, rows, out)
    rows.to_parquet(out / "runs.parquet", index=False)
    content = params.model_dump(mode="json") | {
        "summary": summary.astype(object).where(summary.notna(), None).to_dict("records"),
        "law": fitted,
        "curves": {run: {axis: values.tolist() for axis, values in one.items()} for run, one in curves.items()},
    }
    (out / "study.json").write_text(json.dumps(content, indent=2) + "\n")
    markdown = render("study", study_sections.for_people(params.model_dump(), rows, summary, fitted, curves))
    (out / "study.md").write_text(markdown)
    pictures = {path.name: path.read_text() for path in sorted(out.glob("*.svg"))}
    (out / "study.html").write_text(page(markdown, params.title, pictures))
    return {"runs": len(rows), "failed": int(rows["problem"].ne("").sum()), "table": study_sections.brief(summary)}
