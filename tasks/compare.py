"""Compare: a study's runs on one page: losses and scores with their spread over seeds, costs, curves, a scaling law.

Reads   pretrain artifacts; where the text differs, their evaluations on a common one; reports, if the runs have scores.
Writes  study.html    the page, complete in itself
        study.md, study.json
        runs.parquet  a row for each run and seed
        *.svg         its pictures
"""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, Field

from tasks.adopt import start_stats
from tasks.glue.pair_scores import CHANCE, PAIR_METRIC
from tasks.reports import law, pairs, plots
from tasks.reports.losses import reads_no_context, text_doubt
from tasks.reports.markdown import page, render
from tasks.reports.pairs import PairedModel, PairScore, Right, paired_halves, right_of
from tasks.reports.rows import LOSS, Mean, RunMeans, ScoreRow, StudyScore
from tasks.reports.scores import partial_notes
from tasks.reports.study_page import (
    AVERAGE,
    SCORE,
    UNITS,
    brief_table,
    chart_of_losses,
    chart_of_scores,
    page_values,
    score_columns,
    unit,
)
from tasks.stage import Params, stage
from tasks.store.artifacts import Artifact, artifact_named

if TYPE_CHECKING:
    import pandas as pd

COSTS = ("text_words", "epochs", "tokens", "operations", "seconds", "parameters", "tokens_per_second")
MEANS = (LOSS, "nats_per_character", "length_nats", "by_frequencies", *COSTS)
AXES = tuple(UNITS)
CURVE_LOSS = "heldout_nats_per_byte"
POINTS = 11  # of a mean curve
# Runs that differ in anything else don't belong to one scaling law.
SHAPE = ("layers", "hidden", "heads", "intermediate", "embedding", "different_layers")
SIZE_FIELDS = {"pretrain.budget", "pretrain.budget_unit"} | {f"pretrain.architecture.{name}" for name in SHAPE}

Curve = dict[str, np.ndarray]  # by AXES and CURVE_LOSS


class Member(BaseModel, frozen=True, extra="forbid"):
    """One run of a study."""

    run: str = Field(description="Its name in the study.")
    also: list[str] = Field([], description="Other names in the study that stand for the same run.")
    seed: int = Field(0, description="Number of the seed.")
    words: str = Field("", description="What it is, in words.")
    changes: dict[str, Any] = Field({}, description="What distinguishes it from the first run, by field.")
    usual: dict[str, Any] = Field({}, description="The first run's values of these fields.")
    model: str = Field("", description="Its pretrain artifact.")
    evaluation: str = Field("", description="Its loss on the common text, if its own held-out text is another.")
    report: str = Field("", description="Its report artifact, if it has scores.")
    judged: list[str] = Field([], description="Its minimal_pairs artifacts.")
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


@stage(version=10)
def compare(
    params: Compare,
    models: list[Artifact],
    evaluations: list[Artifact],
    reports: list[Artifact],
    judged: list[Artifact],
    out: Path,
) -> dict:
    """Compare the runs of a study: the page, its parts for programs, and its pictures."""
    import pandas as pd

    rows = pd.DataFrame(map(row_of, params.members))
    rows.to_parquet(out / "runs.parquet", index=False)
    means = means_of(rows)
    found = [score for member in params.members for score in scores_of(member)]
    scores = with_paired_errors(mean_scores(found), params.members)
    curves = curves_of(params.members)
    fitted = law_of(params, rows, out) if params.fit else None
    draw_pictures(rows, means, scores, curves, out)
    content = for_programs(params, means, fitted, curves, found)
    (out / "study.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    values = page_values(params.model_dump(), rows, means, scores, fitted, bool(curves))
    write_page(values, out)
    failed = rows["problem"].ne("").sum()
    return {"runs": len(rows), "failed": int(failed), "table": brief_table(means)}


def draw_pictures(
    rows: "pd.DataFrame", means: list[RunMeans], scores: list[StudyScore], curves: dict[str, Curve], out: Path
) -> None:
    """Draw the curves, the losses and the scores."""
    draw_curves(curves, out)
    chart_of_losses(rows, means, out)
    chart_of_scores(means, scores, out)


def write_page(values: dict[str, Any], out: Path) -> None:
    """Write the page as Markdown and as HTML, with the pictures in its folder. `values`: for the template."""
    pictures = {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}
    markdown = render("compare", values | {"pictures": pictures})
    (out / "study.md").write_text(markdown, encoding="utf-8")
    (out / "study.html").write_text(page(markdown, values["title"], pictures), encoding="utf-8")


def for_programs(
    params: Compare,
    means: list[RunMeans],
    fitted: dict[str, Any] | None,
    curves: dict[str, Curve],
    found: list[dict[str, Any]],
) -> dict[str, Any]:
    """The contents of study.json. `found`: the scores of each run and seed."""
    import pandas as pd

    table = pd.DataFrame([line.flat() for line in means])
    summary = table.astype(object).where(table.notna(), None)
    return params.model_dump(mode="json") | {
        "summary": summary.to_dict("records"),
        "law": fitted,
        "curves": {run: {axis: values.tolist() for axis, values in curve.items()} for run, curve in curves.items()},
        "scores": found,
    }


# Results of each run and seed


def row_of(member: Member) -> dict[str, Any]:
    """The results of a run, as a row of runs.parquet; without results if it failed."""
    row = member.model_dump(include={"run", "seed", "model", "evaluation", "report", "problem"})
    row |= {"changes": json.dumps(member.changes), "weak": "", "partial": [], "short": False}
    row |= {"trained": True, "new_head": False, "doubt": ""}
    if member.model:
        row |= pretraining_results(member)
    if member.report:
        row |= score_results(artifact_named(member.report))
    for score in pair_scores_of(member):
        row[SCORE + score.column] = score.accuracy.value
    return row


def pair_scores_of(member: Member) -> list[PairScore]:
    """The accuracies of a run and seed on minimal pairs."""
    found = []
    for name in member.judged:
        found += pairs.scores_in(artifact_named(name).stats)
    return found


def pretraining_results(member: Member) -> dict[str, Any]:
    """The losses of a run's model, and what it took."""
    model = artifact_named(member.model)
    stats = model.stats
    params = model.manifest["params"]
    held = stats["heldout"]
    measured = artifact_named(member.evaluation).stats if member.evaluation else held
    losses = {f"nats_per_{unit}": measured[f"nats_per_{unit}"]["value"] for unit in ("byte", "character", "word")}
    is_trained = stats["steps"] > 0
    is_new = has_new_head(model)
    means_something = is_trained or not is_new
    return {
        **(losses if member.compared and means_something else dict.fromkeys(losses)),
        "trained": is_trained,
        "new_head": is_new,
        "doubt": text_doubt({"heldout": measured}),
        "text": heldout_digest(held),
        "length_nats": measured["length_nats_per_byte"],
        "digest": measured["digest"],
        "by_frequencies": measured["by_frequencies"]["nats_per_byte"],
        "device": stats["machine"]["device"],
        "parameters": stats["parameters"],
        "text_words": stats.get("words", math.nan),  # at most, of the training text
        "epochs": stats.get("epochs", math.nan),
        "tokens": stats["tokens"],
        "steps": stats["steps"],
        "tokens_per_second": stats["tokens_per_second"],
        "mfu": stats["mfu"],
        "operations": stats["exaflops"] * 1e18,
        "seconds": stats["seconds_on_the_clock"],
        "budget": params["budget"],
        "budget_unit": params["budget_unit"],
        "short": "of_digest" in held,
    }


def has_new_head(model: Artifact) -> bool:
    """Whether a model began from an encoder without a head that predicts masked words, and got a new one."""
    return bool(start_stats(model).get("new_head"))


def scores_in(report: Artifact) -> tuple[float | None, list[ScoreRow]]:
    """The average and the scores of a report, of the pretrained model on all of the training data."""
    about = json.loads((report.path / "report.json").read_text(encoding="utf-8"))
    return about["average"], [row for row in about["scores"] if row["pretrained"] and row["share"] == 1.0]


def score_results(report: Artifact) -> dict[str, Any]:
    """The scores of a run's report."""
    average, scores = scores_in(report)
    return {
        AVERAGE: average,
        **{SCORE + row["column"]: row["score"] for row in scores},
        "partial": [str(note) for note in partial_notes(scores)],
        "weak": ", ".join(row["column"] for row in scores if not row["beats_majority"]),
    }


def scores_of(member: Member) -> list[dict[str, Any]]:
    """The scores of a run and seed with their intervals, for study.json: on minimal pairs, and those of its report."""
    found = [pair_score_of(member, score) for score in pair_scores_of(member)]
    if not member.report:
        return found
    for row in scores_in(artifact_named(member.report))[1]:
        metric = row["metric"]
        spread = row["metrics"][metric]
        score = {
            "run": member.run,
            "seed": member.seed,
            "column": row["column"],
            "metric": metric,
            "score": row["score"],
            "interval": spread["interval"],
            "range": spread["range"],
            "majority": row["majority"][metric],
            "beats_majority": row["beats_majority"],
            "examples": row["examples"]["validation"][0],
            "seeds": row["seeds"],
        }
        found.append(score)
    return found


def pair_score_of(member: Member, score: PairScore) -> dict[str, Any]:
    """An accuracy on minimal pairs in the form of a score."""
    value = score.accuracy.value
    return {
        "run": member.run,
        "seed": member.seed,
        "column": score.column,
        "metric": PAIR_METRIC,
        "score": value,
        "interval": score.accuracy.ends(),
        "range": [value, value],
        "majority": CHANCE,
        "beats_majority": score.accuracy.is_above(CHANCE),
        "examples": score.pairs,
        "seeds": 0,
    }


def with_paired_errors(scores: list[StudyScore], members: list[Member]) -> list[StudyScore]:
    """The scores, those on minimal pairs with half the 95 % interval of their paired differences to other runs."""
    rights = rights_of(members)
    return [line._replace(paired=paired_halves(line.run, rights.get(line.column, {}))) for line in scores]


def rights_of(members: list[Member]) -> dict[str, dict[str, Right]]:
    """Which minimal pairs the models of each run have right, by column and run."""
    models: dict[str, dict[str, list[PairedModel]]] = {}
    for member in members:
        for name in member.judged:
            judged = artifact_named(name)
            for score in pairs.scores_in(judged.stats):
                of_column = models.setdefault(score.column, {})
                of_column.setdefault(member.run, []).append(PairedModel(judged, score))
    rights = {}
    for column, of_column in models.items():
        rights[column] = {run: right_of(of_run) for run, of_run in of_column.items()}
    return rights


# Means over seeds


def means_of(rows: "pd.DataFrame") -> list[RunMeans]:
    """The means of each run over its seeds, compared with those of the base: the first run that has the number."""
    names = [*MEANS, *score_columns(rows)]
    bases: dict[str, RunMeans] = {}
    means = []
    for run, own in rows.groupby("run", sort=False):
        line = run_means(str(run), own, names, bases)
        for name in names:
            if line.means[name].count:
                bases.setdefault(name, line)
        means.append(line)
    return means


def run_means(run: str, own: "pd.DataFrame", names: list[str], bases: dict[str, RunMeans]) -> RunMeans:
    """The means of one run. `own`: its rows; `names`: the columns, of which the loss and scores are compared.

    `bases`: the run to compare with, by column. A model that was not trained is the same with each seed.
    """
    done = own[own["model"].ne("")]
    models = sorted(done["model"])
    is_trained = bool(done["trained"].all())
    means = {}
    for name in names:
        values = done[name].dropna()
        deviation = values.std() if is_trained else 0.0
        mean = Mean(values.mean(), deviation, len(values))
        base = bases.get(name)
        if base and (name == LOSS or name.startswith(SCORE)):
            mean = mean.compared_with(base.means[name], is_same=name == LOSS and models == base.models)
        means[name] = mean
    problem = " ".join(dict.fromkeys(filter(None, own["problem"])))
    return RunMeans(run, len(done), len(own) - len(done), problem, models, means, is_trained)


def mean_scores(found: list[dict[str, Any]]) -> list[StudyScore]:
    """The means of scores over the models of each run, by run and column. `found`: the scores of study.json."""
    import pandas as pd

    scores: list[StudyScore] = []
    if not found:
        return scores
    table = pd.DataFrame(found)
    table[["low", "high"]] = table["interval"].tolist()
    for (run, column), own in table.groupby(["run", "column"], sort=False):
        values = own["score"]
        scores.append(
            StudyScore(
                run=str(run),
                column=str(column),
                metric=own["metric"].iloc[0],
                value=values.mean(),
                low=own["low"].mean(),
                high=own["high"].mean(),
                majority=own["majority"].mean(),
                is_weak=not own["beats_majority"].all(),
                examples=int(own["examples"].iloc[0]),
                seeds=int(own["seeds"].iloc[0]),
                mean=Mean(values.mean(), values.std(), len(values)),
            )
        )
    return scores


# Curves


def heldout_digest(held: dict) -> str:
    """The digest of all documents that a long run's held-out loss would be measured on. `held`: `heldout` of stats."""
    return held.get("of_digest", held["digest"])


def curves_of(members: list[Member]) -> dict[str, Curve]:
    """The mean curve of each run over its seeds: tokens, operations, seconds and loss per byte.

    Only of runs that were trained and have the held-out text of the first of them, on parts of which the curves are
    measured.
    """
    curves: dict[str, list[list[dict]]] = {}
    first = None
    for member in members:
        if not member.model:
            continue
        stats = artifact_named(member.model).stats
        if not stats["steps"]:
            continue
        text = heldout_digest(stats["heldout"])
        if first is None:
            first = text
        if member.compared and text == first:
            curves.setdefault(member.run, []).append(stats["evaluations"])
    return {run: mean_curve(of_seeds) for run, of_seeds in curves.items()}


def mean_curve(of_seeds: list[list[dict]]) -> Curve:
    """The mean of the curves of several seeds at some fractions of the budget. `of_seeds`: the evaluations of each."""
    grid = np.linspace(0, 1, POINTS)
    mean = {}
    for axis in (*AXES, CURVE_LOSS):
        curves = []
        for evaluations in of_seeds:
            fractions = [evaluation["fraction"] for evaluation in evaluations]
            values = [evaluation[axis] for evaluation in evaluations]
            curves.append(np.interp(grid, fractions, values))
        mean[axis] = np.mean(curves, axis=0)
    return mean


def draw_curves(curves: dict[str, Curve], out: Path) -> None:
    """Draw the losses over tokens, operations and seconds."""
    if not curves:
        return
    for axis in AXES:
        label, size = unit(axis, max(curve[axis].max() for curve in curves.values()))
        lines = {run: (curve[axis] / size, curve[CURVE_LOSS]) for run, curve in curves.items()}
        plots.lines(lines, label, "held-out loss, nats per byte", out / f"{axis}.svg")


# The scaling law


def law_of(params: Compare, rows: "pd.DataFrame", out: Path) -> dict[str, Any]:
    """The scaling law of runs that differ in size and budget only: its test on the largest, and its picture."""
    is_sized = np.array([set(member.changes) <= SIZE_FIELDS for member in params.members])
    is_measured = rows["model"].ne("") & rows[LOSS].notna() & rows["trained"]
    numbers = ["operations", "tokens", LOSS, "length_nats", "by_frequencies"]
    means = rows[is_measured & is_sized].groupby("run", sort=False)[numbers].mean()  # over seeds
    is_early = reads_no_context(means[LOSS], means["length_nats"], means["by_frequencies"])
    left_out = list(means.index[is_early])
    return fit_law(means[~is_early], left_out, out)


def fit_law(means: "pd.DataFrame", left_out: list[str], out: Path) -> dict[str, Any]:
    """Fit a law, test it and draw it, or say what it lacks. `means`: a row for each run but those `left_out`."""
    sizes = means["operations"] / means["tokens"] / 6
    runs = means.assign(sizes=sizes, losses=means[LOSS])
    if not law.can_be_fitted(runs):
        return {"runs": law.points(runs), "needed": law.FEWEST, "left_out": left_out}
    fitted = law.fit(runs)
    laws = law.resample(runs, fitted)
    plots.law(runs, fitted, laws, law.INTERVAL, out / "law.svg")
    return law.describe(runs, fitted, laws) | {"left_out": left_out, "test": law.predict_largest(runs)}
