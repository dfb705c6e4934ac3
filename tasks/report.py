"""Report: the results of a run on one page: scores beside published ones, data, loss, speed, rules, lineage.

Reads   finetune artifacts of one pretrained model (which carry the manifests of all that led to them).
Writes  report.html    the page, complete in itself
        report.md, report.json
        *.svg          its pictures
        README.md      the model's card with its scores, for a copy of the model's folder
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pydantic import Field

from tasks.glue.table import PROBES, task_of
from tasks.reports import funnel, plots, rules, scores, sections
from tasks.reports.markdown import Marked, page, render
from tasks.reports.model_card import card, recipe
from tasks.reports.rows import CurvePoint, ScoreRow
from tasks.reports.trees import as_text, mermaid
from tasks.stage import Params, stage
from tasks.store.artifacts import Artifact, artifact_named, read_manifest
from tasks.store.lineage import origins
from tasks.store.manifests import verify

BESIDE = ("BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)")  # in the picture of scores


class Report(Params):
    """The heading of the page."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


@stage(version=12)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the report as page, Markdown and JSON, its pictures, and the model card."""
    name, lineage = scores.pretrained_of(runs)
    content = for_programs(params.title, runs, name, lineage)
    steps = steps_of(name)
    pictures = draw(content, steps, out)
    values = for_people(content, lineage, runs)
    markdown = render("report", values | {"pictures": pictures, "model_found": bool(steps)})
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "report.html").write_text(page(markdown, params.title, pictures), encoding="utf-8")
    (out / "README.md").write_text(card(lineage[name], lineage, values["glue"], values["own"]), encoding="utf-8")
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {"average": content["average"], "table": brief(content["scores"])}


def steps_of(name: str) -> dict[str, np.ndarray] | None:
    """The metrics of every step of pretraining, if the model's folder is on this machine and has them."""
    artifact = artifact_named(name)
    metrics = artifact.path / "metrics.parquet"
    if read_manifest(artifact) is None or not metrics.exists():
        return None
    verify(artifact)  # the stage itself only checks its inputs, the finetuning runs
    columns = pq.read_table(metrics)
    if not columns.num_columns:  # a model that was only measured
        return None
    return {column: columns[column].to_numpy() for column in columns.column_names}


def finetuning_of(runs: list[Artifact], own: bool) -> list[dict]:
    """The params of the runs on all of the training data, of the user's own tasks or of the others."""
    params = []
    for run in runs:
        stats = run.stats
        if stats["share"] == 1 and task_of(stats).own == own:
            params.append(run.manifest["params"] | {"head": stats["head"]})
    return params


def for_programs(title: str, runs: list[Artifact], name: str, lineage: dict[str, dict]) -> dict:
    """The contents of report.json. `name`: of the pretrained model; `lineage`: the manifests of what led to it."""
    pretrained = lineage[name]
    groups = scores.group_runs(runs)
    rows = scores.gather(groups.values(), tokenized_in(lineage))
    means = scores.averages(scores.glue_rows(rows))
    ruled = finetuning_of(runs, own=False)
    kept = rules.pretraining_rules(lineage, pretrained, {row["task"] for row in rows})
    if ruled:
        kept += rules.finetuning_rules(ruled)
    return {
        "title": title,
        "average": means.paper,
        "official_average": means.official,
        "scores": rows,
        "published": [row._asdict() for row in scores.PUBLISHED],
        "funnel": funnel.funnel(lineage),
        "contamination": funnel.contamination(lineage),
        "learning_curve": sections.learning_curve(rows),
        "confusion": confusion_of(groups),
        "rules": kept,
        "pretraining": {"params": pretrained["params"], **pretrained["stats"]},
        "params": {manifest["stage"]: manifest["params"] for manifest in lineage.values()},
        "finetuning": scores.settings(ruled or finetuning_of(runs, own=True)),
        "artifacts": [*lineage, *(run.name for run in runs)],
        "pretrained": name,
    }


def tokenized_in(lineage: dict[str, dict]) -> str | None:
    """The name of the tokenized text, if there is one."""
    return next((name for name, manifest in lineage.items() if manifest["stage"] == "tokenize"), None)


def confusion_of(groups: dict[scores.Setting, list[Artifact]]) -> dict[str, list[list[int]]]:
    """The confusion table of each task with classes, of the pretrained model on all of the training data."""
    found = {}
    for setting, members in groups.items():
        if setting.pretrained and setting.share == 1:
            counts = sections.confusion_counts(members)
            if counts:
                found[setting.task] = counts
    return found


def for_people(content: dict, lineage: dict[str, dict], runs: list[Artifact]) -> dict:
    """What the template of the page shows. `content`: of report.json; `runs`: those of finetuning."""
    rows: list[ScoreRow] = content["scores"]
    pretrained = lineage[content["pretrained"]]
    tasks = {row["task"]: task_of(row) for row in rows}
    settings = scores.settings_rows(content["finetuning"])
    confusion = [sections.confusion_table(tasks[task], counts) for task, counts in content["confusion"].items()]
    shared = scores.HELPERS | recipe(pretrained, lineage) | funnel.text_sections(lineage)  # with the model card
    return (
        shared
        | about_lineage(lineage, runs)
        | {
            "title": content["title"],
            "glue_tasks": len(tasks.keys() & scores.NAMES.keys()),
            "headline": sections.headline(rows, content["finetuning"]),
            "glue": sections.score_section(rows, content["title"], settings),
            "settings": settings,
            "own": sections.own_section(rows, finetuning_of(runs, own=True)),
            "probes": [row for row in brief(rows) if row["task"] in PROBES and row["share"] == 1],
            "rules": content["rules"],
            "curve": content["learning_curve"],
            "confusion": confusion,
        }
    )


def about_lineage(lineage: dict[str, dict], runs: list[Artifact]) -> dict:
    """What the template of the page shows of all that led to the scores."""
    return {
        "dropped": funnel.dropped(lineage),
        "runs": {run.name: run.manifest for run in runs},
        "lineage": lineage,
        "lineage_tree": Marked(as_text("this report's finetuning runs", lineage)),
        "lineage_mermaid": Marked(mermaid(origins(lineage))),
    }


def brief(rows: list[ScoreRow]) -> list[dict]:
    """The scores as `cram show` and the page of a Prefect run list them: a row for each score with pretraining."""
    table = []
    random = {(row["column"], row["share"]): round(row["score"], 1) for row in rows if not row["pretrained"]}
    for row in rows:
        if row["pretrained"]:
            line = {
                "task": row["column"],
                "metric": row["metric"],
                "score": round(row["score"], 1),
                "verdict": "" if row["beats_majority"] else "≤ majority",
                "no pretraining": random.get((row["column"], row["share"]), ""),
                "majority": round(row["majority"][row["metric"]], 1),
                "share": row["share"],
                "seeds": row["seeds"],
                "partial data": row["partial"],
            }
            table.append(line)
    return table


# Pictures


def draw(content: dict, steps: dict[str, np.ndarray] | None, out: Path) -> dict[str, str]:
    """Draw the pictures of the page; returns them by name. `content`: of report.json; `steps`: from `steps_of`."""
    draw_scores(content["scores"], out)
    if content["learning_curve"]:
        draw_learning_curve(content["learning_curve"], out / "curve.svg")
    held = content["pretraining"].get("evaluations")
    if held:  # an adopted model has none
        draw_loss(held, steps, out / "loss.svg")
        if steps:
            draw_speed(steps, out / "speed.svg")
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}


def draw_scores(rows: list[ScoreRow], out: Path) -> None:
    """Draw the scores on GLUE beside published ones, and those on the user's own tasks."""
    of_glue = [row for row in scores.glue_rows(rows) if row["column"] in scores.COLUMNS]
    if of_glue:
        others = {f"published: {row.model}": row.scores for row in scores.PUBLISHED if row.model in BESIDE}
        plots.scores(of_glue, scores.glue_rows(rows, pretrained=False), others, out / "scores.svg")
    own = scores.own_rows(rows)
    if own:
        pretrained, random = ([row for row in own if row["pretrained"] == kind] for kind in (True, False))
        plots.scores(pretrained, random, {}, out / "own.svg")


def draw_learning_curve(points: list[CurvePoint], path: Path) -> None:
    """Draw the scores over the share of the training data, in percent."""
    shares: dict[str, list[float]] = {}
    medians: dict[str, list[float]] = {}
    for point in points:
        name = point["column"]
        shares.setdefault(name, []).append(100 * point["share"])
        medians.setdefault(name, []).append(point["median"])
    lines = {name: (np.array(shares[name]), np.array(medians[name])) for name in shares}
    ticks = sorted({share for of_column in shares.values() for share in of_column})
    plots.lines(lines, "% of the training data", "score", path, marked=list(lines), ticks=ticks)


def draw_loss(held: list[dict], steps: dict[str, np.ndarray] | None, path: Path) -> None:
    """Draw the training loss, where `steps` are known, and the held-out loss over the tokens."""
    unit, size = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    losses = {}
    if steps:
        losses["training"] = (plots.thin(steps["tokens"]) / size, plots.thin(steps["loss"]))
    tokens = np.array([evaluation["tokens"] for evaluation in held])
    loss = np.array([evaluation["heldout_loss"] for evaluation in held])
    losses["held out"] = (tokens / size, loss)
    plots.lines(losses, f"{unit} tokens", "loss, nats per token", path, marked=["held out"])


def draw_speed(steps: dict[str, np.ndarray], path: Path) -> None:
    """Draw the tokens per second over the hours of the run."""
    hours = plots.thin(steps["seconds"]) / 3600
    speed = plots.thin(steps["tokens_per_second"]) / 1000
    plots.lines({"this run": (hours, speed)}, "hours", "thousand tokens per second", path, bottom=0)
