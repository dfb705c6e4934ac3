"""Report: the results of a run on one page: scores beside published ones, data, loss, speed, rules, lineage.

Reads   finetune artifacts of one pretrained model (which carry the manifests of all that led to them).
Writes  report.html    the page, complete in itself
        report.md, report.json
        *.svg          its pictures
        README.md      the model's card with its scores, for a copy of the model's folder
        submission/    if the test data was predicted: files for GLUE's leaderboard, by protocol
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from model import InputError
from tasks.glue import metrics, submission
from tasks.glue.tasks import PROTOCOLS, TASKS
from tasks.reports import common, data_sections, errors, plots, rules, sections, training_sections
from tasks.reports.markdown import render
from tasks.reports.model_card import card, recipe
from tasks.reports.page import page
from tasks.reports.scores import (
    COLUMNS,
    NAMES,
    PUBLISHED,
    averages,
    chosen,
    column,
    gather,
    groups,
    middle,
    pretrained_of,
)
from tasks.stage import Params, environment, stage
from tasks.store import Artifact, read_manifest, verify

BESIDE = ("BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)")  # in the picture of scores
PREDICTIONS = "predictions.parquet"


class Report(Params):
    """The heading of the page."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


class Found(NamedTuple):
    """What a report shows, gathered from the finetuning runs and from what led to their model."""

    name: str  # of the pretrained artifact
    pretrained: dict  # its manifest
    lineage: dict[str, dict]
    groups: dict[tuple, list[Artifact]]  # the finetuning runs, the seeds of one setting together
    manifests: list[dict]  # of the finetuning runs
    rows: list[dict]  # one for each score
    asked: dict[str, list[dict]]  # params of the finetuning runs on all of the training data, by protocol
    steps: dict[str, np.ndarray] | None  # metrics of every step of pretraining
    curve: list[dict]
    cola: dict | None
    contamination: dict
    rules: list[list[str]]


def gathered(runs: list[Artifact]) -> Found:
    """What there is to report of these finetuning runs."""
    grouped = groups(runs)  # first: it refuses runs of older versions
    name, lineage = pretrained_of(runs)
    pretrained, rows, manifests = lineage[name], gather(grouped), [run.manifest for run in runs]
    refuse_older(name, pretrained["stats"])
    return Found(
        name=name,
        pretrained=pretrained,
        lineage=lineage,
        groups=grouped,
        manifests=manifests,
        rows=rows,
        asked=finetuned(manifests),
        steps=steps_of(name),
        curve=errors.learning_curve(manifest["stats"] for manifest in manifests),
        cola=cola(grouped),
        contamination=data_sections.contamination(lineage),
        rules=rules.rules(lineage, pretrained, {row["task"] for row in rows}),
    )


def refuse_older(name: str, stats: dict) -> None:
    """Raise InputError for a pretrained model of an older version, whose statistics lack the held-out loss on all tokens."""
    if "heldout" not in stats:
        raise InputError(
            f"{name} was made by an older version of cram, whose held-out loss covers only a part of the text. Run its "
            "pretrain stage again to report it, or end with finetune (until); finished finetuning runs are kept."
        )


def finetuned(manifests: list[dict]) -> dict[str, list[dict]]:
    """The params of each protocol's runs on all of the training data, with the head that the model has."""
    runs = [manifest["params"] | {"head": manifest["stats"]["head"]} for manifest in manifests]
    return {name: [run for run in runs if run["protocol"] == name and run["share"] == 1.0] for name in PROTOCOLS}


def steps_of(name: str) -> dict[str, np.ndarray] | None:
    """The metrics of every step of pretraining, if the model's folder is on this machine."""
    artifact = Artifact(stage=name.split("/")[0], key=name.split("/")[1])
    path = artifact.path / "metrics.parquet"
    if read_manifest(artifact) is None or not path.exists():
        return None
    verify(artifact)  # the stage itself only checks its inputs, the finetuning runs
    columns = pq.read_table(path)
    return {column: columns[column].to_numpy() for column in columns.column_names}


def cola(grouped: dict[tuple, list[Artifact]]) -> dict | None:
    """Where CoLA's predictions are wrong, if it was run by the rules."""
    runs = grouped.get(("cramming", True, 1.0, "cola"))
    if not runs:
        return None
    return errors.analyse(TASKS["cola"], [pq.read_table(run.path / PREDICTIONS) for run in runs])["validation"]


def draw(found: Found, out: Path) -> list[str]:
    """Draw the pictures of the page; returns their names."""
    draw_scores(found.rows, out / "scores.svg")
    draw_curve(found.curve, out / "curve.svg")
    held = found.pretrained["stats"]["evaluations"]
    unit, size = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    losses = {"held out": (np.array([e["tokens"] for e in held]) / size, np.array([e["heldout_loss"] for e in held]))}
    if found.steps:
        training = plots.thinned(found.steps["tokens"]) / size, plots.thinned(found.steps["loss"])
        losses = {"training": training} | losses
        plots.speed(found.steps, out / "speed.svg")
    plots.lines(losses, f"{unit} tokens", "loss, nats per token", out / "loss.svg", marked=["held out"])
    parts_of_others = (data_sections.HELD_OUT, data_sections.MEASURED)
    rows = data_sections.funnel(found.lineage)
    passed = {r["stage"]: r["characters"] / 1e6 for r in rows if r["characters"] and r["stage"] not in parts_of_others}
    if passed:
        plots.bars(list(passed), list(passed.values()), "million characters passed on", out / "funnel.svg")
    return sorted(path.name for path in out.glob("*.svg"))


def draw_scores(rows: list[dict], path: Path) -> None:
    """Our scores by the rules beside published ones, if there are any."""
    own = {row["column"]: row for row in chosen(rows, "cramming") if row["column"] in COLUMNS}
    if own:
        ours = [{"score": row["score"], **row["metrics"][row["metric"]]} for row in own.values()]
        known = {row.model: row.scores for row in PUBLISHED["cramming"]}
        others = {
            f"published: {name}": [None if row["partial"] else known[name].get(c) for c, row in own.items()]
            for name in BESIDE
        }
        plots.scores([name + ("*" if row["partial"] else "") for name, row in own.items()], ours, others, path)


def draw_curve(points: list[dict], path: Path) -> None:
    """Scores by share of the training data, if there are several shares."""
    curves: dict[str, list] = {}
    for point in points:
        if point["protocol"] == "cramming" and point["pretrained"]:
            name = column(point["task"], point["split"])
            curves.setdefault(name, []).append((100 * point["share"], point["median"]))
    lines = {name: tuple(np.array(of_name).T) for name, of_name in curves.items() if len(of_name) > 1}
    if lines:
        shares = sorted({share for xs, _ in lines.values() for share in xs.tolist()})
        plots.lines(lines, "% of the training data", "score", path, marked=list(lines), ticks=shares)


def for_leaderboard(grouped: dict[tuple, list[Artifact]], out: Path) -> list[str]:
    """Write files for GLUE's leaderboard from the runs with the median scores; returns notes on what was written."""
    notes = []
    for protocol in PROTOCOLS:
        predictions: dict[str, dict[str, np.ndarray]] = {}
        for task in TASKS:
            tested = [r for r in grouped.get((protocol, True, 1.0, task), ()) if r.manifest["params"]["test"]]
            if not tested:
                continue
            rows = pq.read_table(middle(tested).path / PREDICTIONS).sort_by("row")
            for split in TASKS[task].test:
                values = rows.filter(pc.equal(rows["split"], split))["prediction"].to_numpy()
                try:
                    submission.rows(
                        task, split, values
                    )  # a local copy may lack rows; the other tasks are still written
                    predictions.setdefault(task, {})[split] = values
                except InputError as problem:
                    notes.append(str(problem))
        if predictions:
            about = submission.write(out / "submission" / protocol, predictions)
            files = ", ".join(about["files"])
            notes.append(
                f"Of the seeds with the median scores, protocol {protocol}, in submission/{protocol}: {files}."
            )
            notes += [about["note"]] if about["note"] else []
    return notes


def page_values(params: Report, found: Found, pictures: list[str], submitted: list[str], names: list[str]) -> dict:
    """What the template of the page shows. `submitted`: notes on the files for the leaderboard; `names`: of the runs."""
    manifests = dict(zip(names, found.manifests, strict=True))
    stages = {"pretrain": found.pretrained, "finetune": found.manifests[0], "report": {"environment": environment()}}
    return recipe(found.pretrained, found.lineage) | data_sections.text_sections(found.lineage) | {
        "title": params.title, "short": common.short, "pictures": pictures, "mark": common.WEAK, "submitted": submitted,
        "glue_tasks": len({row["task"] for row in found.rows} & set(NAMES)),
        "headline": sections.headline(found.rows, common.settings(found.asked["cramming"])),
        "protocols": sections.protocol_sections(found.rows, params.title, found.asked),
        "probes": sections.probes(found.rows, found.asked["cramming"]),
        "rules": found.rules,
        "finetuning_rules": {name: rules.finetuning_rules(runs) for name, runs in found.asked.items() if runs},
        "evaluations": training_sections.evaluations(found.pretrained["stats"]),
        "model_found": found.steps is not None,
        "partial": any(row["partial"] for row in found.rows),
        "curve": sections.curve_rows(found.curve, {row["column"] for row in found.rows if row["partial"]}),
        "cola": found.cola,
        "confusion": sections.confusion_tables(found.rows),
        "dropped": data_sections.dropped(found.lineage),
        "led_here": training_sections.led_here(found.lineage),
        "runs": training_sections.run_rows(manifests),
        "environments": training_sections.environments(stages),
    } | data_sections.filtered(found.lineage) | data_sections.vocabulary(found.lineage)  # fmt: skip


def as_json(title: str, found: Found, runs: list[str]) -> dict:
    """The report for programs. `runs`: names of the finetuning artifacts."""
    means = {protocol: averages(chosen(found.rows, protocol)) for protocol in PROTOCOLS}
    return {
        "title": title,
        "average": means["cramming"]["paper"],
        "averages": means,
        "scores": found.rows,
        "published": {protocol: [row._asdict() for row in rows] for protocol, rows in PUBLISHED.items()},
        "funnel": data_sections.funnel(found.lineage),
        "contamination": found.contamination,
        "learning_curve": found.curve,
        "cola": found.cola,
        "rules": found.rules,
        "pretraining": {"params": found.pretrained["params"], **found.pretrained["stats"]},
        "params": {manifest["stage"]: manifest["params"] for manifest in found.lineage.values()},
        "finetuning": {protocol: common.settings(params) for protocol, params in found.asked.items()},
        "artifacts": [*found.lineage, *runs],
        "pretrained": found.name,
    }


def brief(row: dict) -> dict:
    """A score as `cram show` and the page of a Prefect run list it."""
    return {
        "task": row["column"],
        "pretrained": row["pretrained"],
        "metric": row["metric"],
        "score": round(row["score"], 1),
        "majority": round(row["majority"][row["metric"]], 1),
        "verdict": "" if row["beats_majority"] else metrics.verdict(TASKS[row["task"]]),
        "protocol": row["protocol"],
        "share": row["share"],
        "seeds": row["seeds"],
        "partial data": row["partial"],
    }


@stage(version=8)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the report as a page, as Markdown and as JSON, with its plots, the model card and files for the leaderboard."""
    found, names = gathered(runs), [run.name for run in runs]
    pictures = draw(found, out)
    values = page_values(params, found, pictures, for_leaderboard(found.groups, out), names)
    markdown = render("report", values)
    (out / "report.md").write_text(markdown)
    (out / "report.html").write_text(page(markdown, params.title, {n: (out / n).read_text() for n in pictures}))
    (out / "README.md").write_text(card(found.pretrained, found.lineage, found.rows, values["protocols"]))
    content = as_json(params.title, found, names)
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")
    return {"average": content["average"], "table": [brief(row) for row in found.rows]}
