"""Report: the results of a run on one page: whether it is good, scores, blanks, examples, loss, data; all else folded.

Reads   finetune artifacts of one pretrained model (which carry the manifests of all that led to them), and its
        minimal pairs; where they are on this machine, the model's folder (its steps, weights and held-out text) and
        samples of what was dropped.
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

from model.wording import largest_unit
from tasks.adopt import has_weights
from tasks.glue.pair_scores import CHANCE, main_accuracy
from tasks.glue.table import PROBES, task_of
from tasks.reports import funnel, plots, rules, scores, sections
from tasks.reports.blanks import TOO_LITTLE, Blank, fill_blanks, with_gap
from tasks.reports.cards import cards_of
from tasks.reports.examples import Answers, answers_of
from tasks.reports.losses import context_doubt
from tasks.reports.markdown import Marked, page, render
from tasks.reports.model_card import card, recipe
from tasks.reports.pairs import lines_of, picture_name, section_of
from tasks.reports.published import PUBLISHED, in_picture, is_small
from tasks.reports.rows import CurvePoint, ScoreRow
from tasks.reports.trees import as_text, mermaid
from tasks.reports.verdict import compare, comparison_rows, verdict
from tasks.stage import Params, stage
from tasks.store.artifacts import HELDOUT_TEXT, Artifact, artifact_named, read_manifest
from tasks.store.lineage import origins
from tasks.store.manifests import verify
from tasks.text.holdout import measured_texts

NOTHING: dict = {  # of what `quoted` returns
    "blanks": [],
    "no_blanks": "this report quotes no text (report.quote)",
    "examples": [],
    "dropped_samples": [],
}


class Report(Params):
    """The heading of the page, and whether it quotes."""

    later = ("quote",)
    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")
    quote: bool = Field(
        True, description="Quote the text: held-out sentences, labelled examples, samples of what was dropped."
    )


@stage(version=17)
def report(params: Report, runs: list[Artifact], judged: list[Artifact], out: Path) -> dict:
    """Write the report as page, Markdown and JSON, its pictures, and the model card."""
    name, lineage = scores.pretrained_of(runs)
    content = for_programs(params.title, runs, judged, name, lineage)
    content["text"] = funnel.described(lineage, texts_of(artifact_named(name)))
    content |= quoted(artifact_named(name), lineage, runs) if params.quote else NOTHING
    steps = steps_of(name)
    pictures = draw(content, lineage, steps, out)
    values = for_people(content, lineage, runs) | quotations(content)
    markdown = render("report", values | {"pictures": pictures, "model_found": bool(steps)})
    files = {
        "report.md": markdown,
        "report.html": page(markdown, params.title, pictures),
        "README.md": card(lineage[name], lineage, values["glue"], values["own"], content["minimal_pairs"].values()),
        "report.json": json.dumps(content, indent=2) + "\n",
    }
    write_texts(files, out)
    table = brief(content["scores"]) + [brief_pairs(one.stats) for one in judged]
    return {"average": content["average"], "table": table}


def write_texts(files: dict[str, str], out: Path) -> None:
    """Write texts into a folder. `files`: by the file's name."""
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")


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


def quoted(model: Artifact, lineage: dict[str, dict], runs: list[Artifact]) -> dict:
    """What quotes the text in report.json: blanks, answers to examples, samples of what was dropped."""
    blanks, no_blanks = blanks_of(model)
    found = [artifact_named(name) for name in lineage]
    folders = {artifact.stage: artifact.path for artifact in found if read_manifest(artifact) is not None}
    return {
        "blanks": blanks,
        "no_blanks": no_blanks,
        "examples": examples_of(scores.group_runs(runs)),
        "dropped_samples": [sample._asdict() for sample in funnel.samples(folders)],
    }


def texts_of(model: Artifact) -> list[str]:
    """The held-out texts that the loss of a model is measured on; none if they aren't on this machine."""
    if not (model.path / HELDOUT_TEXT).exists():
        return []
    return measured_texts(model.path)


def blanks_of(model: Artifact) -> tuple[list[Blank], str]:
    """Blanks in held-out sentences, filled in by a model; without any, the reason."""
    if not has_weights(model.path):
        return [], "the model's weights are not on this machine"
    if model.stats.get("new_head"):
        return [], "the model came without a head that predicts words"
    texts = texts_of(model)
    if not texts:
        return [], "the model has no held-out text"
    found = fill_blanks(model.path, texts)
    return found, "" if found else TOO_LITTLE


def finetuning_of(runs: list[Artifact], own: bool) -> list[dict]:
    """The params of the runs on all of the training data, of the user's own tasks or of the others."""
    params = []
    for run in runs:
        stats = run.stats
        if stats["share"] == 1 and task_of(stats).own == own:
            params.append(run.manifest["params"] | {"head": stats["head"]})
    return params


def for_programs(title: str, runs: list[Artifact], judged: list[Artifact], name: str, lineage: dict[str, dict]) -> dict:
    """The contents of report.json.

    `judged`: minimal pairs; `name`: of the pretrained model; `lineage`: the manifests of what led to it.
    """
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
        "published": [row._asdict() for row in PUBLISHED],
        "funnel": funnel.funnel(lineage),
        "contamination": funnel.contamination(lineage),
        "learning_curve": sections.learning_curve(rows),
        "confusion": confusion_of(groups),
        "rules": kept,
        "pretraining": {"params": pretrained["params"], **pretrained["stats"]},
        "params": {manifest["stage"]: manifest["params"] for manifest in lineage.values()},
        "finetuning": scores.settings(ruled or finetuning_of(runs, own=True)),
        "minimal_pairs": {one.name: one.stats for one in judged},
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


def examples_of(groups: dict[scores.Setting, list[Artifact]]) -> list[Answers]:
    """Right and wrong answers to each task, of the run with the median score on all of the training data."""
    found = []
    for setting, members in groups.items():
        if setting.pretrained and setting.share == 1:
            answers = answers_of(scores.median_run(members))
            if answers:
                found.append(answers)
    return found


def for_people(content: dict, lineage: dict[str, dict], runs: list[Artifact]) -> dict:
    """What the template of the page shows. `content`: of report.json; `runs`: those of finetuning."""
    rows: list[ScoreRow] = content["scores"]
    pretrained = lineage[content["pretrained"]]
    shared = scores.HELPERS | recipe(pretrained, lineage) | funnel.text_sections(lineage)  # with the model card
    compared = compare(rows)
    return (
        shared
        | about_lineage(lineage, runs)
        | about_scores(content, runs)
        | {
            "title": content["title"],
            "verdict": verdict(rows, not context_doubt(pretrained["stats"], pretrained["params"])),
            "cards": cards_of(pretrained["stats"], shared["architecture"], compared, content["minimal_pairs"].values()),
            "compared": comparison_rows(compared),
            "one_seed": all(one.row["seeds"] == 1 for one in compared),
            "has_partial": any(one.row["partial"] for one in compared),
            "pair_sets": [
                section_of(judged, number, content["pretraining"])
                for number, judged in enumerate(content["minimal_pairs"].values(), 1)
            ],
            "rules": content["rules"],
            "curve": content["learning_curve"],
        }
    )


def about_scores(content: dict, runs: list[Artifact]) -> dict:
    """What the template of the page shows in tables of scores. `content`: of report.json; `runs`: of finetuning."""
    rows: list[ScoreRow] = content["scores"]
    tasks = {row["task"]: task_of(row) for row in rows}
    settings = scores.settings_rows(content["finetuning"])
    confusion = [sections.confusion_table(tasks[task], counts) for task, counts in content["confusion"].items()]
    parameters = content["pretraining"]["parameters"]
    return {
        "beside_small": is_small(parameters) and bool(beside(rows, parameters)),
        "glue_tasks": len(tasks.keys() & scores.NAMES.keys()),
        "published": sections.published(rows, content["finetuning"]),
        "glue": sections.score_section(rows, content["title"], settings, content["pretraining"]),
        "settings": settings,
        "own": sections.own_section(rows, finetuning_of(runs, own=True)),
        "probes": [row for row in brief(rows) if row["task"] in PROBES and row["share"] == 1],
        "confusion": confusion,
    }


def quotations(content: dict) -> dict:
    """What the template of the page shows that quotes the text and the labels; a model card has nothing of it."""
    own = {row["task"] for row in content["scores"] if task_of(row).own}
    return {
        "text": content["text"],
        "blanks": content["blanks"],
        "no_blanks": content["no_blanks"],
        "in_pieces": any(blank["pieces"] > 1 for blank in content["blanks"]),
        "with_gap": with_gap,
        "own_examples": [one for one in content["examples"] if one["task"] in own],
        "other_examples": [one for one in content["examples"] if one["task"] not in own],
        "samples": content["dropped_samples"],
    }


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


def brief_pairs(stats: dict) -> dict:
    """The row of a set of minimal pairs in the table of `brief`. `stats`: of its artifact."""
    accuracy = main_accuracy(stats)
    return {
        "task": stats["set"],
        "metric": "minimal pairs",
        "score": round(accuracy.value, 1),
        "verdict": "" if accuracy.is_above(CHANCE) else "≤ chance",
        "no pretraining": "",
        "majority": CHANCE,
        "share": 1.0,
        "seeds": "",
        "partial data": stats["pairs"] < stats["of_pairs"],
    }


# Pictures


def draw(content: dict, lineage: dict[str, dict], steps: dict[str, np.ndarray] | None, out: Path) -> dict[str, str]:
    """Draw the pictures of the page; returns them by name. `content`: of report.json; `steps`: from `steps_of`."""
    draw_scores(content["scores"], content["pretraining"]["parameters"], out)
    if content["learning_curve"]:
        draw_learning_curve(content["learning_curve"], out / "curve.svg")
    bars = funnel.bars(lineage)
    if bars:
        plots.funnel(bars, out / "funnel.svg")
    for number, judged in enumerate(content["minimal_pairs"].values(), 1):
        plots.pairs(lines_of(judged), out / picture_name(number))
    held = content["pretraining"].get("evaluations")
    if held:  # an adopted model has none
        draw_loss(held, steps, out / "loss.svg")
        if steps:
            draw_speed(steps, out / "speed.svg")
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(out.glob("*.svg"))}


def draw_scores(rows: list[ScoreRow], parameters: float, out: Path) -> None:
    """Draw the scores on GLUE beside published ones, those on the user's own tasks, and those on probes.

    `parameters`: of our model; the published ones are of its size.
    """
    main = [row for row in rows if row["share"] == 1]
    of_glue = [row for row in main if row["column"] in scores.COLUMNS]
    published = {f"published: {model}": known for model, known in beside(rows, parameters).items()}
    kinds = {
        "scores": (of_glue, published),
        "own": (scores.own_rows(main), {}),
        "probes": ([row for row in main if row["task"] in PROBES], {}),
    }
    for name, (of_kind, others) in kinds.items():
        pretrained = [row for row in of_kind if row["pretrained"]]
        random = [row for row in of_kind if not row["pretrained"]]
        if pretrained:
            plots.scores(pretrained, random, others, out / f"{name}.svg")


def beside(rows: list[ScoreRow], parameters: float) -> dict[str, dict[str, float]]:
    """The published scores to draw beside ours, by model and column; of models that have one that can be compared."""
    whole = {row["column"] for row in scores.glue_rows(rows) if not row["partial"]}
    return {model: known for model, known in in_picture(parameters).items() if whole & known.keys()}


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
    """Draw the training loss, where `steps` are known, and the held-out loss over time, with the tokens at the top."""
    word, size = largest_unit(held[-1]["seconds"])
    losses = {}
    if steps:
        losses["training"] = (plots.thin(steps["seconds"]) / size, plots.thin(steps["loss"]))
    times = np.array([evaluation["seconds"] for evaluation in held]) / size
    loss = np.array([evaluation["heldout_loss"] for evaluation in held])
    losses["held out"] = (times, loss)
    second = tokens_over(times, held)
    plots.lines(losses, f"{word}s", "loss, nats per token", path, marked=["held out"], second=second)


def tokens_over(times: np.ndarray, held: list[dict]) -> plots.SecondAxis | None:
    """The axis of tokens over the times of the evaluations; None unless both ascend."""
    unit, many = ("billion", 1e9) if held[-1]["tokens"] >= 1e9 else ("million", 1e6)
    tokens = np.array([evaluation["tokens"] for evaluation in held]) / many
    is_ascending = len(held) > 1 and (np.diff(times) > 0).all() and (np.diff(tokens) > 0).all()
    return plots.SecondAxis(f"{unit} tokens", times, tokens) if is_ascending else None


def draw_speed(steps: dict[str, np.ndarray], path: Path) -> None:
    """Draw the tokens per second over the time of the run."""
    word, size = largest_unit(float(steps["seconds"][-1]))
    times = plots.thin(steps["seconds"]) / size
    speed = plots.thin(steps["tokens_per_second"]) / 1000
    plots.lines({"this run": (times, speed)}, f"{word}s", "thousand tokens per second", path, bottom=0)
