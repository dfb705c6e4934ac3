"""Report: what came out of a run, on one page: scores beside published ones, data, loss, speed, rules, lineage.

Reads   finetune artifacts of one pretrained model (which carry the manifests of all that led to them).
Writes  report.html    the page, complete in itself
        report.md, report.json
        *.svg          its pictures
        README.md      the model's card with its scores, for a copy of the model's folder
        submission/    if the test data was predicted: files for GLUE's leaderboard, by protocol
"""

import json
from collections.abc import Iterable
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
from tasks.reports.markdown import escape, items
from tasks.reports.model_card import card, recipe_section
from tasks.reports.page import page
from tasks.reports.scores import COLUMNS, PUBLISHED, averages, chosen, column, gather, groups, middle, pretrained_of
from tasks.stage import Params, environment, stage
from tasks.store import Artifact, read_manifest, verify

BESIDE = ("BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)")  # in the picture of scores
PREDICTIONS = "predictions.parquet"


class Report(Params):
    """How the page is headed."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


def finetuned(manifests: list[dict]) -> dict[str, list[dict]]:
    """The params of each protocol's runs on all of the training data, with the head that the model has."""
    runs = [about["params"] | {"head": about["stats"]["head"]} for about in manifests]
    return {name: [run for run in runs if run["protocol"] == name and run["share"] == 1.0] for name in PROTOCOLS}


def metrics_of(name: str) -> dict[str, np.ndarray] | None:
    """The metrics of every step of pretraining, if the model's folder is on this machine."""
    artifact = Artifact(stage=name.split("/")[0], key=name.split("/")[1])
    path = artifact.path / "metrics.parquet"
    if read_manifest(artifact) is None or not path.exists():
        return None
    verify(artifact)  # the stage checks its inputs, the finetuning runs, alone
    columns = pq.read_table(path)
    return {column: columns[column].to_numpy() for column in columns.column_names}


def cola(found: dict[tuple, list[Artifact]]) -> dict | None:
    """Where CoLA's predictions are wrong, if it was run by the rules."""
    runs = found.get(("cramming", True, 1.0, "cola"))
    if not runs:
        return None
    return errors.analyse(TASKS["cola"], [pq.read_table(run.path / PREDICTIONS) for run in runs])["validation"]


def draw(
    rows: list[dict], curve: list[dict], lineage: dict[str, dict], pretrained: dict, steps: dict | None, out: Path
) -> list[str]:
    """Draw what there is to see; the names of the pictures."""
    own = {row["column"]: row for row in chosen(rows, "cramming") if row["column"] in COLUMNS}
    if own:
        ours = [{"score": row["score"], **row["metrics"][row["metric"]]} for row in own.values()]
        known = {row.model: row.scores for row in PUBLISHED["cramming"]}
        others = {
            f"published: {name}": [None if row["partial"] else known[name].get(c) for c, row in own.items()]
            for name in BESIDE
        }
        names = [name + ("*" if row["partial"] else "") for name, row in own.items()]
        plots.scores(names, ours, others, out / "scores.svg")
    curves = {}
    for row in curve:
        if row["protocol"] == "cramming" and row["pretrained"]:
            curves.setdefault(column(row["task"], row["split"]), []).append((100 * row["share"], row["median"]))
    curves = {name: tuple(np.array(points).T) for name, points in curves.items() if len(points) > 1}
    if curves:
        shares = sorted({share for points, _ in curves.values() for share in points.tolist()})
        names = list(curves)
        plots.lines(curves, "% of the training data", "score", out / "curve.svg", marked=names, ticks=shares)
    held, name = pretrained["stats"]["evaluations"], "held out"
    unit, of = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    losses = {name: (np.array([e["tokens"] for e in held]) / of, np.array([e["heldout_loss"] for e in held]))}
    if steps:
        losses = {"training": (plots.thinned(steps["tokens"]) / of, plots.thinned(steps["loss"]))} | losses
        plots.speed(steps, out / "speed.svg")
    plots.lines(losses, f"{unit} tokens", "loss, nats per token", out / "loss.svg", marked=[name])
    apart = (data_sections.HELD_OUT, data_sections.MEASURED)
    passed = [row for row in data_sections.funnel(lineage) if row["characters"] and row["stage"] not in apart]
    if passed:
        values = [row["characters"] / 1e6 for row in passed]
        plots.bars([row["stage"] for row in passed], values, "million characters that came through", out / "funnel.svg")
    return sorted(path.name for path in out.glob("*.svg"))


def for_leaderboard(found: dict[tuple, list[Artifact]], out: Path) -> list[str]:
    """Write files for GLUE's leaderboard from the runs with the median scores; sentences that say what was written."""
    told = []
    for protocol in PROTOCOLS:
        given: dict[str, dict[str, np.ndarray]] = {}
        for (of, pretrained, share, task), members in found.items():
            asked = [run for run in members if run.manifest["params"]["test"]]
            if (of, pretrained, share) == (protocol, True, 1.0) and asked:
                table = pq.read_table(middle(asked).path / PREDICTIONS).sort_by("row")
                for split in TASKS[task].test:
                    values = table.filter(pc.equal(table["split"], split))["prediction"].to_numpy()
                    try:
                        submission.rows(task, split, values)  # a local copy may lack rows; then the others are written
                        given.setdefault(task, {})[split] = values
                    except InputError as problem:
                        told.append(str(problem))
        if given:
            about = submission.write(out / "submission" / protocol, given)
            told.append(
                f"Of the seeds with the median scores, protocol {protocol}, in submission/{protocol}: {', '.join(about['files'])}."
            )
            told += [about["note"]] if about["note"] else []
    return told


def refuse_older(name: str, stats: dict) -> None:
    """Raise InputError for a pretrained model without what a report says of the held-out loss."""
    if "heldout" not in stats:
        raise InputError(
            f"{name} was made by an older version of cram, whose held-out loss covers only a part of the text. Run its "
            "pretrain stage again to report it, or end with finetune (until); finished finetuning runs are kept."
        )


class Found(NamedTuple):
    """All that a report says, gathered from the finetuning runs and from what led to their model."""

    name: str  # of the pretrained artifact
    pretrained: dict  # its manifest
    lineage: dict[str, dict]
    groups: dict[tuple, list[Artifact]]  # the finetuning runs, of all seeds together
    manifests: list[dict]  # of the finetuning runs
    rows: list[dict]  # a score each
    asked: dict[str, list[dict]]  # params of the finetuning runs, by protocol
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
        steps=metrics_of(name),
        curve=errors.learning_curve(about["stats"] for about in manifests),
        cola=cola(grouped),
        contamination=data_sections.contamination(lineage),
        rules=rules.rules(lineage, pretrained, {row["task"] for row in rows}),
    )


def score_sections(title: str, found: Found, pictures: Iterable[str]) -> list[str]:
    """The tables of scores, a protocol each."""
    return [
        part
        for protocol, params in found.asked.items()
        for part in sections.glue_section(found.rows, title, protocol, params, pictures)
    ]


def page_sections(
    title: str, found: Found, pictures: Iterable[str], submitted: list[str], runs: list[dict]
) -> list[str]:
    """The sections of the page, in order. `submitted`: notes on the files for the leaderboard; `runs`: manifests with names."""
    partial = {row["column"] for row in found.rows if row["partial"]}
    made = {"pretrain": found.pretrained, "finetune": found.manifests[0], "report": {"environment": environment()}}
    return [
        *sections.head(title, found.rows, found.pretrained, common.settings(found.asked["cramming"])),
        *score_sections(title, found, pictures),
        *(["## Files for GLUE's leaderboard", items(map(escape, submitted))] if submitted else []),
        *sections.probe_section(found.rows, found.asked["cramming"]),
        *rules.rules_section(found.rules, found.asked),
        *recipe_section(found.pretrained, found.lineage),
        *training_sections.budget_section(found.pretrained),
        *training_sections.curves_section(found.pretrained, found.steps is not None, pictures),
        *sections.curve_section(found.curve, partial, pictures),
        *(sections.cola_section(found.cola) if found.cola else []),
        *sections.confusion_section(found.rows),
        *data_sections.funnel_section(found.lineage, pictures),
        *data_sections.vocabulary_section(found.lineage),
        *data_sections.contamination_section(found.contamination),
        *training_sections.lineage_section(found.lineage),
        *training_sections.runs_section(runs),
        *training_sections.environment_section(made),
    ]


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
        "params": {about["stage"]: about["params"] for about in found.lineage.values()},
        "finetuning": {protocol: common.settings(params) for protocol, params in found.asked.items()},
        "artifacts": [*found.lineage, *runs],
        "pretrained": found.name,
    }


def brief(row: dict) -> dict:
    """A score as it is listed by `cram show` and on the page of a Prefect run."""
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


@stage(version=7)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the report as a page, as Markdown and as JSON, with its plots, the model card and files for the leaderboard."""
    found, names = gathered(runs), [run.name for run in runs]
    pictures = draw(found.rows, found.curve, found.lineage, found.pretrained, found.steps, out)
    submitted = for_leaderboard(found.groups, out)
    told = [{"name": name, **about} for name, about in zip(names, found.manifests, strict=True)]
    markdown = "\n\n".join(page_sections(params.title, found, pictures, submitted, told)) + "\n"
    (out / "report.md").write_text(markdown)
    (out / "report.html").write_text(page(markdown, params.title, {n: (out / n).read_text() for n in pictures}))
    (out / "README.md").write_text(card(found.pretrained, found.lineage, score_sections(params.title, found, ())))
    about = as_json(params.title, found, names)
    (out / "report.json").write_text(json.dumps(about, indent=2) + "\n")
    return {"average": about["average"], "table": [brief(row) for row in found.rows]}
