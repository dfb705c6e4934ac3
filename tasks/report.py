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
from tasks.reports import plots, scores, sections
from tasks.reports.markdown import Marked, page, render
from tasks.reports.model_card import card, recipe
from tasks.reports.scores import PUBLISHED, glue_rows
from tasks.reports.trees import as_text, mermaid
from tasks.stage import Params, stage
from tasks.store.artifacts import Artifact, artifact_named, read_manifest
from tasks.store.lineage import origins
from tasks.store.manifests import verify

BESIDE = ("BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)")  # in the picture of scores


class Report(Params):
    """The heading of the page."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


def steps_of(name: str) -> dict[str, np.ndarray] | None:
    """The metrics of every step of pretraining, if the model's folder is on this machine and has them."""
    artifact = artifact_named(name)
    if read_manifest(artifact) is None or not (metrics := artifact.path / "metrics.parquet").exists():
        return None
    verify(artifact)  # the stage itself only checks its inputs, the finetuning runs
    columns = pq.read_table(metrics)
    return {column: columns[column].to_numpy() for column in columns.column_names}


def finetuning_of(runs: list[Artifact], own: bool) -> list[dict]:
    """The params of the runs on all of the training data, of the user's own tasks or of the others."""
    whole = [run for run in runs if run.stats["share"] == 1 and task_of(run.stats).own == own]
    return [run.manifest["params"] | {"head": run.stats["head"]} for run in whole]


def for_programs(title: str, runs: list[Artifact], name: str, lineage: dict[str, dict]) -> dict:
    """The contents of report.json. `name`: of the pretrained model; `lineage`: the manifests of what led to it."""
    groups, pretrained = scores.group_runs(runs), lineage[name]
    corpus = next((each for each, manifest in lineage.items() if manifest["stage"] == "tokenize"), None)
    rows = scores.gather(groups.values(), corpus)
    ruled = finetuning_of(runs, own=False)
    params = ruled or finetuning_of(runs, own=True)
    kept = sections.pretraining_rules(lineage, pretrained, {row["task"] for row in rows})
    means = scores.averages(glue_rows(rows))
    return {
        "title": title,
        "average": means["paper"],
        "official_average": means["official"],
        "scores": rows,
        "published": [row._asdict() for row in PUBLISHED],
        "funnel": sections.funnel(lineage),
        "contamination": sections.contamination(lineage),
        "learning_curve": sections.learning_curve(rows),
        "confusion": {
            task: counts
            for (is_pretrained, share, task), group in groups.items()
            if is_pretrained and share == 1 and (counts := sections.confusion_counts(group))
        },
        "rules": kept + (sections.finetuning_rules(ruled) if ruled else []),
        "pretraining": {"params": pretrained["params"], **pretrained["stats"]},
        "params": {manifest["stage"]: manifest["params"] for manifest in lineage.values()},
        "finetuning": scores.settings(params),
        "artifacts": [*lineage, *(run.name for run in runs)],
        "pretrained": name,
    }


def for_people(content: dict, lineage: dict[str, dict], runs: list[Artifact]) -> dict:
    """What the template of the page shows. `content`: of report.json; `runs`: those of finetuning."""
    rows, pretrained = content["scores"], lineage[content["pretrained"]]
    tasks = {row["task"]: task_of(row) for row in rows}
    settings = scores.settings_rows(content["finetuning"])
    return scores.HELPERS | recipe(pretrained, lineage) | sections.text_sections(lineage) | {
        "title": content["title"],
        "glue_tasks": len({row["task"] for row in rows} & set(scores.NAMES)),
        "headline": sections.headline(rows, content["finetuning"]),
        "glue": sections.score_section(rows, content["title"], settings),
        "settings": settings,
        "own": sections.own_section(rows, finetuning_of(runs, own=True)),
        "probes": [row for row in brief(rows) if row["task"] in PROBES and row["share"] == 1],
        "rules": content["rules"],
        "curve": content["learning_curve"],
        "confusion": [sections.confusion_table(tasks[task], counts) for task, counts in content["confusion"].items()],
        "dropped": sections.dropped(lineage),
        "runs": {run.name: run.manifest for run in runs},
        "lineage": lineage,
        "lineage_tree": Marked(as_text("this report's finetuning runs", lineage)),
        "lineage_mermaid": Marked(mermaid(origins(lineage))),
    }  # fmt: skip


def draw(content: dict, steps: dict[str, np.ndarray] | None, out: Path) -> dict[str, str]:
    """Draw the pictures of the page; returns them by name. `content`: of report.json; `steps`: from `steps_of`."""
    if own := [row for row in glue_rows(content["scores"]) if row["column"] in scores.COLUMNS]:
        others = {f"published: {row.model}": row.scores for row in PUBLISHED if row.model in BESIDE}
        plots.scores(own, others, out / "scores.svg")
    if own := [row for row in scores.own_rows(content["scores"]) if row["pretrained"]]:
        plots.scores(own, {}, out / "own.svg")
    if points := content["learning_curve"]:
        curves: dict[str, list] = {}
        for point in points:
            curves.setdefault(point["column"], []).append((100 * point["share"], point["median"]))
        lines = {name: tuple(np.array(of_column).T) for name, of_column in curves.items()}
        shares = sorted({100 * point["share"] for point in points})
        plots.lines(lines, "% of the training data", "score", out / "curve.svg", marked=list(lines), ticks=shares)
    if not (held := content["pretraining"].get("evaluations")):  # of an adopted model
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}
    unit, size = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    losses = {"held out": (np.array([e["tokens"] for e in held]) / size, np.array([e["heldout_loss"] for e in held]))}
    if steps:
        losses = {"training": (plots.thin(steps["tokens"]) / size, plots.thin(steps["loss"]))} | losses
        speed = plots.thin(steps["seconds"]) / 3600, plots.thin(steps["tokens_per_second"]) / 1000
        plots.lines({"this run": speed}, "hours", "thousand tokens per second", out / "speed.svg", bottom=0)
    plots.lines(losses, f"{unit} tokens", "loss, nats per token", out / "loss.svg", marked=["held out"])
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}


def brief(rows: list[dict]) -> list[dict]:
    """The scores as `cram show` and the page of a Prefect run list them: a row for each number with pretraining."""
    kinds = {(row["column"], row["pretrained"], row["share"]): round(row["score"], 1) for row in rows}
    return [
        {
            "task": row["column"],
            "metric": row["metric"],
            "score": round(row["score"], 1),
            "verdict": "" if row["beats_majority"] else "≤ majority",
            "no pretraining": kinds.get((row["column"], False, row["share"]), ""),
            "majority": round(row["majority"][row["metric"]], 1),
            "share": row["share"],
            "seeds": row["seeds"],
            "partial data": row["partial"],
        }
        for row in rows
        if row["pretrained"]
    ]


@stage(version=12)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the report as page, Markdown and JSON, its pictures, and the model card."""
    name, lineage = scores.pretrained_of(runs)
    content, steps = for_programs(params.title, runs, name, lineage), steps_of(name)
    pictures = draw(content, steps, out)
    values = for_people(content, lineage, runs)
    markdown = render("report", values | {"pictures": pictures, "model_found": bool(steps)})
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "report.html").write_text(page(markdown, params.title, pictures), encoding="utf-8")
    (out / "README.md").write_text(card(lineage[name], lineage, values["glue"], values["own"]), encoding="utf-8")
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return {"average": content["average"], "table": brief(content["scores"])}
