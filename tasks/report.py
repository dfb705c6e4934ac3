"""Report: the results of a run on one page: scores beside published ones, data, loss, speed, rules, lineage.

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

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from model import InputError
from tasks.glue import metrics, submission
from tasks.glue.tasks import PROTOCOLS, TASKS
from tasks.reports import common, data_sections, errors, plots, rules, scores, sections, training_sections
from tasks.reports.markdown import render
from tasks.reports.model_card import card, recipe
from tasks.reports.page import page
from tasks.reports.scores import PUBLISHED, chosen
from tasks.stage import Params, environment, stage
from tasks.store import Artifact, named, read_manifest, verify

BESIDE = ("BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)")  # in the picture of scores
PREDICTIONS = "predictions.parquet"


class Report(Params):
    """The heading of the page."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


def refuse_older(name: str, stats: dict) -> None:
    """Raise InputError for a model of an older version, whose statistics lack the held-out loss of whole words."""
    if "nats_per_word" not in stats.get("heldout", {}):
        raise InputError(
            f"{name} was made by an older version of cram, whose held-out loss is that of single tokens. Run its "
            "pretrain stage again to report it, or end with finetune (until); finished finetuning runs are kept."
        )


def settings_of(manifests: Iterable[dict]) -> dict[str, list[dict]]:
    """The params of each protocol's runs on all of the training data, with the head that the model has.

    Runs of older versions don't say what the head reads: it was [CLS].
    """
    params = [{"pooling": "cls"} | manifest["params"] | {"head": manifest["stats"]["head"]} for manifest in manifests]
    return {name: [one for one in params if one["protocol"] == name and one["share"] == 1.0] for name in PROTOCOLS}


def steps_of(name: str) -> dict[str, np.ndarray] | None:
    """The metrics of every step of pretraining, if the model's folder is on this machine."""
    artifact = named(name)
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


def for_programs(title: str, groups: dict[tuple, list[Artifact]], name: str, lineage: dict[str, dict]) -> dict:
    """The contents of report.json. `groups`: the finetuning runs; `name`, `lineage`: of their pretrained model."""
    rows, runs = scores.gather(groups), {run.name: run.manifest for members in groups.values() for run in members}
    pretrained = lineage[name]
    means = {protocol: scores.averages(chosen(rows, protocol)) for protocol in PROTOCOLS}
    return {
        "title": title,
        "average": means["cramming"]["paper"],
        "averages": means,
        "scores": rows,
        "published": {protocol: [row._asdict() for row in rows] for protocol, rows in PUBLISHED.items()},
        "funnel": data_sections.funnel(lineage),
        "contamination": data_sections.contamination(lineage),
        "learning_curve": errors.learning_curve(manifest["stats"] for manifest in runs.values()),
        "cola": cola(groups),
        "rules": rules.rules(lineage, pretrained, {row["task"] for row in rows}),
        "pretraining": {"params": pretrained["params"], **pretrained["stats"]},
        "params": {manifest["stage"]: manifest["params"] for manifest in lineage.values()},
        "finetuning": {name: common.settings(params) for name, params in settings_of(runs.values()).items()},
        "artifacts": [*lineage, *runs],
        "pretrained": name,
    }


def for_people(content: dict, lineage: dict[str, dict], runs: dict[str, dict]) -> dict:
    """What the template of the page shows. `content`: of report.json; `runs`: manifests of the finetuning runs."""
    rows, pretrained, params = content["scores"], lineage[content["pretrained"]], settings_of(runs.values())
    stages = {"pretrain": pretrained, "finetune": next(iter(runs.values())), "report": {"environment": environment()}}
    return common.HELPERS | recipe(pretrained, lineage) | data_sections.text_sections(lineage) | {
        "title": content["title"],
        "glue_tasks": len({row["task"] for row in rows} & set(scores.NAMES)),
        "headline": sections.headline(rows, content["finetuning"]["cramming"]),
        "protocols": sections.protocol_sections(rows, content["title"], params),
        "probes": sections.probes(rows, params["cramming"]),
        "rules": content["rules"],
        "finetuning_rules": {name: rules.finetuning_rules(given) for name, given in params.items() if given},
        "partial": any(row["partial"] for row in rows),
        "curve": sections.curve_rows(content["learning_curve"], {row["column"] for row in rows if row["partial"]}),
        "cola": content["cola"],
        "confusion": sections.confusion_tables(rows),
        "dropped": data_sections.dropped(lineage),
        "runs": training_sections.run_rows(runs),
        "environments": training_sections.environments(stages),
        "lineage": lineage,
        "vocabulary": common.stage_of(lineage, "vocabulary"),
        "tokens": common.stage_of(lineage, "tokenize"),
    } | data_sections.filtered(lineage)  # fmt: skip


def draw(content: dict, steps: dict[str, np.ndarray] | None, out: Path) -> list[str]:
    """Draw the pictures of the page; returns their names. `content`: of report.json; `steps`: from `steps_of`."""
    draw_scores(content["scores"], out / "scores.svg")
    draw_curve(content["learning_curve"], out / "curve.svg")
    held = content["pretraining"]["evaluations"]
    unit, size = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    losses = {"held out": (np.array([e["tokens"] for e in held]) / size, np.array([e["heldout_loss"] for e in held]))}
    if steps:
        losses = {"training": (plots.thinned(steps["tokens"]) / size, plots.thinned(steps["loss"]))} | losses
        plots.speed(steps, out / "speed.svg")
    plots.lines(losses, f"{unit} tokens", "loss, nats per token", out / "loss.svg", marked=["held out"])
    parts_of_others = (data_sections.HELD_OUT, data_sections.MEASURED)
    rows = [row for row in content["funnel"] if row["characters"] and row["stage"] not in parts_of_others]
    if rows:
        characters = [row["characters"] / 1e6 for row in rows]
        plots.bars([row["stage"] for row in rows], characters, "million characters passed on", out / "funnel.svg")
    return sorted(path.name for path in out.glob("*.svg"))


def draw_scores(rows: list[dict], path: Path) -> None:
    """Our scores by the rules beside published ones, if there are any."""
    own = {row["column"]: row for row in chosen(rows, "cramming") if row["column"] in scores.COLUMNS}
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
            name = scores.column(point["task"], point["split"])
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
            rows = pq.read_table(scores.middle(tested).path / PREDICTIONS).sort_by("row")
            for split in TASKS[task].test:
                values = rows.filter(pc.equal(rows["split"], split))["prediction"].to_numpy()
                try:  # a local copy may lack rows; the other tasks are still written
                    submission.rows(task, split, values)
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


@stage(version=10)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the report as page, Markdown and JSON, its plots, the model card, and files for the leaderboard."""
    groups = scores.groups(runs)  # first: it refuses runs of older versions
    name, lineage = scores.pretrained_of(runs)
    refuse_older(name, lineage[name]["stats"])
    content, steps = for_programs(params.title, groups, name, lineage), steps_of(name)
    pictures = draw(content, steps, out)
    values = for_people(content, lineage, {run.name: run.manifest for run in runs})
    values |= {"pictures": pictures, "model_found": bool(steps), "submitted": for_leaderboard(groups, out)}
    markdown = render("report", values)
    (out / "report.md").write_text(markdown)
    (out / "report.html").write_text(page(markdown, params.title, {n: (out / n).read_text() for n in pictures}))
    (out / "README.md").write_text(card(lineage[name], lineage, content["scores"], values["protocols"]))
    (out / "report.json").write_text(json.dumps(content, indent=2) + "\n")
    return {"average": content["average"], "table": [brief(row) for row in content["scores"]]}
