"""Report: the scores beside published ones, the data funnel, the budget; one page and one JSON.

Reads   finetune artifacts (which carry the manifests of all that led to them).
Writes  report.md, report.json
"""

import json
import statistics
from pathlib import Path

from pydantic import Field

from model import InputError
from tasks import probes
from tasks.glue import TASKS
from tasks.pretrain import LINEAGE
from tasks.stage import Artifact, Params, stage

NAMES = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "qqp": "QQP", "mnli": "MNLI", "qnli": "QNLI",
         "rte": "RTE", "wnli": "WNLI"}  # fmt: skip
COLUMNS = ("MNLI m", "MNLI mm", "SST-2", "STS-B", "RTE", "QNLI", "QQP", "MRPC", "CoLA")  # nine numbers, as the paper
PUBLISHED = [  # (model, scores in the order of COLUMNS or None where no table was found, average, where published)
    (
        "BERT-base, fully trained",
        (83.2, 83.4, 91.9, 86.7, 59.2, 90.6, 87.7, 89.3, 56.5),
        80.9,
        "arXiv 2212.14034v1, as quoted by others",
    ),
    (
        "BERT-base, no pretraining",
        (34.1, 34.1, 79.9, 17.8, 47.3, 50.0, 68.6, 77.9, 0.0),
        45.5,
        "arXiv 2212.14034v1, as quoted by others",
    ),
    (
        "crammed BERT, A6000, v1",
        (83.9, 84.1, 92.2, 84.6, 53.8, 89.5, 87.3, 87.5, 44.5),
        78.6,
        "arXiv 2212.14034v1, as quoted by others",
    ),
    ("crammed BERT, A6000, final", None, 80.4, "the authors' final version, as quoted by others"),
]


class Report(Params):
    """How the page is headed."""

    title: str = Field("crammed-bert", min_length=1, description="Heading of the page.")


def column(task: str, split: str) -> str:
    """The name of a number in the tables."""
    if task == "mnli":
        return "MNLI m" if split == "validation_matched" else "MNLI mm"
    return NAMES.get(task, task)


def gather(runs: list[dict]) -> list[dict]:
    """Median and range over seeds of each task's metrics, with and without pretraining, and what the data is."""
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        for split, scores in run["validation"].items():
            groups.setdefault((run["pretrained"], run["task"], split), []).append(run | {"scores": scores})
    found = []
    for (pretrained, task, split), members in groups.items():
        metrics = {}
        for metric in TASKS[task].metrics:
            values = [m["scores"][metric] for m in members]
            metrics[metric] = {"median": round(statistics.median(values), 2), "range": [min(values), max(values)]}
        first = members[0]
        sizes = {"train": [first["train_examples"], first["official_train_examples"]]}
        sizes["validation"] = [first["scores"]["examples"], first["scores"]["official_examples"]]
        found.append(
            {
                "task": task,
                "column": column(task, split),
                "pretrained": pretrained,
                "metric": first["metric"],
                "score": metrics[first["metric"]]["median"],
                "metrics": metrics,
                "majority": first["scores"]["majority"],
                "seeds": len(members),
                "examples": sizes,
                "partial": task in NAMES and any(have != official for have, official in sizes.values()),
            }
        )
    return found


def average(rows: list[dict]) -> float | None:
    """The mean of the nine numbers, MNLI counted twice as in the paper; None unless all are there, on complete data."""
    scores = {row["column"]: row["score"] for row in rows if not row["partial"]}
    if not all(name in scores for name in COLUMNS):
        return None
    return round(statistics.mean(scores[name] for name in COLUMNS), 1)


def funnel(lineage: dict[str, dict]) -> list[dict]:
    """Documents, characters and tokens through each stage."""
    found = []
    for name, about in lineage.items():
        stats = about["stats"]
        if about["stage"] in ("download", "deduplicate", "decontaminate", "filter", "tokenize"):
            row = {"stage": about["stage"], "artifact": name}
            row |= {what: stats.get(what) for what in ("documents", "characters", "tokens", "sequences")}
            if about["stage"] == "filter":
                row["tokens"] = stats["measured_with"]["tokens_kept"]
            found.append(row)
        if about["stage"] == "tokenize":
            held = stats["heldout"]
            found.append(
                {"stage": "held out", "artifact": name}
                | {k: held[k] for k in ("documents", "characters", "tokens", "sequences")}
            )
        if about["stage"] == "pretrain":
            found.append({"stage": f"trained on ({stats['epochs']:.2f} epochs)", "artifact": name, "documents": None,
                          "characters": None, "tokens": stats["tokens"], "sequences": None})  # fmt: skip
    return found


def markdown(header: list[str], rows: list[list[object]]) -> str:
    """A Markdown table; None is shown as a dash."""

    def cell(value: object) -> str:
        if value is None:
            return "–"
        return f"{value:,}" if isinstance(value, int) else f"{value:.1f}" if isinstance(value, float) else str(value)

    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def glue_section(rows: list[dict], title: str) -> list[str]:
    """The GLUE table: ours, and the published rows."""
    lines, notes = [], []
    for pretrained, label in ((True, title), (False, f"{title}, no pretraining")):
        own = [row for row in rows if row["pretrained"] is pretrained]
        if own:
            scores = {row["column"]: f"{row['score']:.1f}" + ("\\*" if row["partial"] else "") for row in own}
            lines.append([f"**{label}**", *(scores.get(c) for c in COLUMNS), average(own), "this run"])
    own = [row for row in rows if row["pretrained"]] or rows
    simple = {row["column"]: row["majority"][row["metric"]] for row in own}
    lines.append(["majority class or mean", *(simple.get(c) for c in COLUMNS), None, "this run"])
    lines += [
        [model, *(scores or [None] * len(COLUMNS)), mean, f"published: {where}"]
        for model, scores, mean, where in PUBLISHED
    ]
    seeds = sorted({row["seeds"] for row in own})
    notes.append(f"Ours: median of {' or '.join(map(str, seeds))} seed(s) on the validation data, last epoch. MNLI, SST-2, RTE, "
                 "QNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson; CoLA: Matthews; all times 100.")  # fmt: skip
    missing = [c for c in COLUMNS if c not in simple]
    if missing:
        notes.append(f"No average: it is the mean of nine numbers, and {', '.join(missing)} were not run.")
    for row in own:
        if row["partial"]:
            sizes = ", ".join(
                f"{have:,} of {official:,} {split} examples" for split, (have, official) in row["examples"].items()
            )
            notes.append(
                f"\\* {row['column']} is on partial data: {sizes}. It enters no average and compares with nothing published."
            )
    extra = [f"WNLI, which enters no average: {row['score']:.1f}." for row in own if row["task"] == "wnli"]
    return ["## GLUE", markdown(["model", *COLUMNS, "average", "source"], lines), *notes, *extra]


def probe_section(rows: list[dict]) -> list[str]:
    """The probes: with and without pretraining, and the majority baseline."""
    by = {(row["task"], row["pretrained"]): row for row in rows}
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        with_, without = by.get((task, True)), by.get((task, False))
        row = with_ or without
        sizes = f"{row['examples']['train'][0]:,} / {row['examples']['validation'][0]:,}"
        scores = [r["score"] if r else None for r in (with_, without)]
        lines.append([task, *scores, row["majority"][row["metric"]], sizes, row["seeds"]])
    header = ["probe", "pretrained", "no pretraining", "majority", "train / validation examples", "seeds"]
    return [
        "## Probes (these are not GLUE)",
        "Accuracy in per cent, median over seeds, on small tasks made from held-out documents.",
        markdown(header, lines),
    ]


def contamination(lineage: dict[str, dict]) -> dict:
    """Whether text of the downstream data was looked for in the corpus, and what was found."""
    about = next((a for a in lineage.values() if a["stage"] == "decontaminate"), None)
    if about is None:
        return {"checked": False, "why": "the corpus did not pass the stage decontaminate"}
    told = {
        name: about["stats"].get(name) for name in ("checked", "why", "words", "not_at_hand", "documents_found", "cut")
    }
    told |= {"dropped": about["stats"]["dropped"]["contaminated"]["documents"], "tasks": about["stats"].get("tasks")}
    return {name: value for name, value in told.items() if value is not None}


def contamination_section(about: dict) -> list[str]:
    """The same in words, with a table by task."""
    title = "## Text of the downstream data in the corpus"
    if not about["checked"]:
        return [title, f"Not checked, because {about['why']}."]
    tasks, n = about["tasks"], about["words"]
    by_task = ", ".join(
        f"{NAMES[name]} {counts['documents']:,}" for name, counts in tasks.items() if counts["documents"]
    )
    done = f"{about['dropped']:,} documents dropped"
    if "cut" in about:
        done = (
            f"{about['cut']['characters']:,} characters cut from {about['cut']['documents']:,} documents, and " + done
        )
    short, all_ = (sum(counts[what] for counts in tasks.values()) for what in ("too_short", "sentences"))
    lines = [
        f"{done}{f' (found for {by_task})' if by_task else ''}: {about['documents_found']:,} had {n} words in a row that stand in a "
        f"validation or test sentence. {short:,} of the {all_:,} sentences have fewer than {n} words, so they can't be found "
        "this way."
    ]
    if about["not_at_hand"]:
        lines.append(f"Not at hand, so not looked for: {', '.join(about['not_at_hand'])}.")
    header = ["task", "splits", "sentences", "too short", "n-grams", "sentences found", "in documents"]
    names = ("sentences", "too_short", "ngrams", "sentences_found", "documents")
    rows = [[NAMES[t], ", ".join(c["splits"]), *(c[name] for name in names)] for t, c in tasks.items()]
    return [title, *lines, markdown(header, rows)]


def budget_section(about: dict) -> list[str]:
    """What was spent, and how fast."""
    stats, params = about["stats"], about["params"]
    machine = stats["machine"]
    gpus = "one" if machine["gpus"] == 1 else f"{machine['gpus']}, though the rule of the game is one"
    rows = [
        ["budget", f"{params['budget']:g} {params['budget_unit']}"],
        ["spent", f"{stats['seconds_on_the_clock'] / 3600:.3f} hours, {stats['tokens']:,} tokens, {stats['steps']:,} steps"],
        ["speed", f"{stats['tokens_per_second']:,.0f} tokens a second, {stats['mfu']:.0%} of the rate of matrix products there"],
        ["machine", f"{machine['device']}, {machine['dtype']}, {'compiled' if machine['compiled'] else 'eager'}, "
                    f"{machine['micro_batch']} sequences at once"],
        ["GPUs, or processes", gpus],
        ["parameters", f"{stats['parameters']:,}"],
        ["held-out loss", f"{stats['heldout_loss']:.4f} nats per masked token (15 % masked), "
                          f"{stats['heldout_nats_per_character']:.4f} per character"],
    ]  # fmt: skip
    rows += [
        ["skipped", f"{what['problem']}: went on behind sequences {what['sequences'][0]:,} to {what['sequences'][1]:,}"]
        for what in stats["skipped"]
    ]
    return ["## Budget", markdown(["", ""], rows)]


@stage(version=3)
def report(params: Report, runs: list[Artifact], out: Path) -> dict:
    """Write the page."""
    lineage = json.loads((runs[0].path / LINEAGE).read_text())
    models = {run.manifest["inputs"]["pretrained"] for run in runs}
    if len(models) > 1:
        raise InputError(
            f"The finetune artifacts come from different models: {', '.join(sorted(models))}. Give those of one."
        )
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        settings = run.manifest["params"]
        groups.setdefault((settings["task"], settings["pretrained"]), []).append(settings)
    for (task, _), members in groups.items():
        settings = [{k: v for k, v in member.items() if k != "seed"} for member in members]
        if len({m["seed"] for m in members}) < len(members) or any(s != settings[0] for s in settings):
            raise InputError(
                f"The {len(members)} runs of {task} are not one setting with as many seeds, so their median means nothing. Give "
                "runs that differ in their seed only."
            )
    pretrained = lineage[models.pop()]
    rows = gather([run.stats for run in runs])
    glue = [row for row in rows if row["task"] in NAMES]
    probing = [row for row in rows if row["task"] in probes.COLUMNS]
    passed = funnel(lineage)
    header = ["stage", "documents", "characters", "tokens", "sequences"]
    table = [[r["stage"], r["documents"], r["characters"], r["tokens"], r["sequences"]] for r in passed]
    sections = [
        f"# {params.title}",
        *(glue_section(glue, params.title) if glue else []),
        *(probe_section(probing) if probing else []),
    ]
    sections += budget_section(pretrained)
    note = "Tokens behind the filter are those of its own measuring vocabulary; sequences are drawn from more where a limit says so."
    sections += ["## Data funnel", markdown(header, table), note]
    text = contamination(lineage)
    sections += contamination_section(text)
    names = [*lineage, *(run.name for run in runs)]
    sections += ["## Artifacts", "\n".join(f"- [{name}](../../{name}/)" for name in names)]
    (out / "report.md").write_text("\n\n".join(sections) + "\n")
    about = {
        "title": params.title,
        "average": average([row for row in glue if row["pretrained"]]),
        "scores": rows,
        "published": [
            {"model": m, "scores": dict(zip(COLUMNS, s, strict=True)) if s else None, "average": a, "source": w}
            for m, s, a, w in PUBLISHED
        ],
        "funnel": passed,
        "contamination": text,
        "pretraining": {"params": pretrained["params"], **pretrained["stats"]},
        "artifacts": names,
    }
    (out / "report.json").write_text(json.dumps(about, indent=2) + "\n")
    lines = [
        {"task": row["column"], "pretrained": row["pretrained"], "metric": row["metric"], "score": row["score"],
         "majority": row["majority"][row["metric"]], "seeds": row["seeds"], "partial data": row["partial"]}
        for row in rows
    ]  # fmt: skip
    return {"average": about["average"], "table": lines}
