"""Scores: those of one model's finetuning runs, over seeds, and published ones; and the words and marks for them."""

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from model.errors import InputError
from model.settings import Finetuning
from model.wording import counted
from tasks.glue import metrics
from tasks.glue.table import GLUE, PROBES, TASKS, task_of
from tasks.reports.markdown import Marked, code, escape
from tasks.store.artifacts import LINEAGE, Artifact

NAMES = {name: TASKS[name].title for name in (*GLUE, "wnli")}
COLUMNS = tuple(metrics.COLUMNS)  # nine numbers, as in the paper
PLACES = {place: name for name, place in metrics.COLUMNS.items()}  # columns by task and split
METRICS = {name: words.removesuffix(" correlation") for name, words in metrics.NAMES.items()}
WEAK = "†"  # marks a score that doesn't beat the majority baseline


class Published(NamedTuple):
    """A row of a published table."""

    model: str
    scores: dict[str, float]  # by column; those not found are missing
    average: float
    source: str


def _row(*values: float) -> dict[str, float]:
    return dict(zip(COLUMNS, values, strict=True))


V1, FINAL = "arXiv 2212.14034v1, as quoted by others", "the authors' final version, as quoted by others"
RELEASED, AGAIN = "the model card of JonasGeiping/crammed-bert", "He and Hofmann 2023, arXiv 2311.01906, tables 1 and 2"
CONDITIONED = {"SST-2": 92.5, "RTE": 55.6, "QNLI": 91.1, "QQP": 87.4, "MRPC": 86.3, "CoLA": 53.7}
PUBLISHED = [
    Published("BERT-base, fully trained", _row(83.2, 83.4, 91.9, 86.7, 59.2, 90.6, 87.7, 89.3, 56.5), 80.9, V1),
    Published("RoBERTa-base, fully trained", _row(86.6, 86.4, 93.7, 90.4, 77.3, 92.1, 88.3, 91.4, 60.2), 85.1, V1),
    Published("BERT-base, no pretraining", _row(34.1, 34.1, 79.9, 17.8, 47.3, 50.0, 68.6, 77.9, 0.0), 45.5, V1),
    Published("crammed BERT, A6000, v1", _row(83.9, 84.1, 92.2, 84.6, 53.8, 89.5, 87.3, 87.5, 44.5), 78.6, V1),
    Published("crammed BERT, A6000, as released (best of 5 runs)",
              _row(84.1, 84.6, 92.0, 87.4, 58.5, 90.2, 87.5, 88.9, 53.3), 80.7, RELEASED),
    Published("crammed BERT, A6000, final", {}, 80.4, FINAL),
    Published("crammed BERT, A4000, final", {}, 79.2, FINAL),
    Published("crammed BERT, 2080 Ti, run again",
              _row(81.2, 81.6, 89.9, 87.6, 56.3, 88.9, 87.1, 88.3, 49.4), 78.9, AGAIN),
    Published("conditioned embeddings, 1 GPU, 24 hours", CONDITIONED, 79.7,
              "arXiv 2505.12789, as quoted by others"),
]  # fmt: skip


def column(task: str, split: str) -> str:
    """The name of a number in the tables."""
    return PLACES.get((task, split)) or NAMES.get(task, task) + (", test" if split == "test" else "")


def label(pretrained: bool, share: float = 1.0) -> str:
    """The kind of run: pretrained or not, on which share of the data."""
    return ("pretrained" if pretrained else "no pretraining") + (f", {share:.0%} of the data" if share < 1 else "")


def mark_score(score: float | str, partial: bool, beats: bool = True) -> Marked:
    """A score (or a name) with an asterisk if its data is partial, and a dagger if it doesn't beat the baseline."""
    text = f"{score:.1f}" if isinstance(score, float) else score
    return Marked(escape(text) + ("\\*" if partial else "") + ("" if beats else WEAK))


def partial_notes(rows: Iterable[dict]) -> list[Marked]:
    """Which numbers are on partial data, and on how much."""
    notes = []
    for row in (row for row in rows if row["partial"]):
        sizes = [f"{have:,} of {counted(of, f'{split} example')}" for split, (have, of) in row["examples"].items()]
        notes.append(
            f"\\* {escape(row['column'])} is on partial data: {', '.join(sizes)}. "
            "It is left out of the averages and can't be compared with published scores."
        )
    return [Marked(note) for note in notes]


def settings(params: Sequence[dict]) -> dict:
    """How runs were finetuned: each field of `Finetuning` with its value, or the list of its values if they differ."""
    values = {name: list(dict.fromkeys(one[name] for one in params)) for name in Finetuning.model_fields}
    return {name: found[0] if len(found) == 1 else found for name, found in values.items() if found}


def settings_rows(values: dict) -> list[dict]:
    """Settings as rows of a table."""
    shown = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return [
        {"setting": code(name), "value": ", ".join(v if isinstance(v, str) else f"{v:g}" for v in value)}
        for name, value in shown.items()
    ]


HELPERS = {
    "label": label,
    "mark": WEAK,
    "marked": mark_score,
    "metric_names": METRICS,
    "task_names": NAMES,
}  # of templates


def pretrained_of(runs: list[Artifact]) -> tuple[str, dict[str, dict]]:
    """The one pretrained artifact that all runs start from: its name, and the manifests up to its own."""
    names = {run.manifest["inputs"]["start"] for run in runs}
    if len(names) > 1:
        raise InputError(
            f"The finetune artifacts come from different models: {', '.join(sorted(names))}. Give those of one."
        )
    return names.pop(), json.loads((runs[0].path / LINEAGE).read_text(encoding="utf-8"))


def group_runs(runs: list[Artifact]) -> dict[tuple, list[Artifact]]:
    """The runs by (pretrained, share, task). Raises InputError unless those of a group differ in their seed only."""
    groups: dict[tuple, list[Artifact]] = {}
    for run in runs:
        stats = run.stats
        groups.setdefault((stats["pretrained"], stats["share"], stats["task"]), []).append(run)
    for (_, _, task), members in groups.items():
        params = [run.manifest["params"] for run in members]
        settings = [{name: value for name, value in one.items() if name not in ("seed", "keep")} for one in params]
        if len({one["seed"] for one in params}) < len(members) or any(one != settings[0] for one in settings):
            raise InputError(
                f"The {len(members)} runs of {task} are not one setting with as many seeds, so they have no median. "
                "Give runs that differ in their seed only."
            )
    return groups


def median_run(members: list[Artifact], split: str | None = None) -> Artifact:
    """The run with the median score (of an even number, the lower of two), on one split or over all of them."""

    def score(run: Artifact) -> tuple[float, int]:
        stats = run.stats
        splits = [of_split for name, of_split in stats["validation"].items() if split in (None, name)]
        return statistics.mean(of_split["metrics"][stats["metric"]] for of_split in splits), stats["seed"]

    return sorted(members, key=score)[(len(members) - 1) // 2]


def examples(stats: dict, split: str) -> dict[str, list[int]]:
    """How many rows a run's data has for training and in a validation split, and how many the official data has."""
    own, left_out = stats["validation"][split], stats["data"]["left_out"].get("train", {})
    return {  # with rows that can't be trained on: the official data has some too (QQP two)
        "train": [stats["train_examples"] + sum(left_out.values()), stats["official_train_examples"]],
        "validation": [own["examples"], own["official_examples"]],
    }


def is_partial(stats: dict, split: str) -> bool:
    """Whether a run was trained on, or scored on this split of, other than the official data, if there is such."""
    return any(official not in (0, have) for have, official in examples(stats, split).values())


def gather(groups: Iterable[list[Artifact]], corpus: str | None) -> list[dict]:
    """A row for each number of the tables: the median over seeds, its range, and the data that it was measured on.

    `groups`: the seeds' runs of each setting. `corpus`: the name of the tokenized text, from which probes are made.
    """
    rows = [score_row(members, split, corpus) for members in groups for split in members[0].stats["validation"]]
    order = {name: place for place, name in enumerate(COLUMNS)}
    return sorted(rows, key=lambda row: (not row["pretrained"], -row["share"], order.get(row["column"], len(order))))


def score_row(members: list[Artifact], split: str, corpus: str | None) -> dict:
    """The row of one split. `members`: the runs of one setting, which differ in their seeds."""
    run, of_seeds = median_run(members, split), [one.stats for one in members]
    stats = run.stats
    task, metric, own = stats["task"], stats["metric"], stats["validation"][split]
    values = {name: [one["validation"][split]["metrics"][name] for one in of_seeds] for name in own["metrics"]}
    measured_on = [run.manifest["params"]["data"], corpus if task in PROBES else None]
    return {
        "task": task,
        "pretrained": stats["pretrained"],
        "share": stats["share"],
        "split": split,
        "column": column(task, split),
        "metric": metric,
        "score": statistics.median(values[metric]),
        "by_seed": {str(one["seed"]): value for one, value in zip(of_seeds, values[metric], strict=True)},
        "metrics": {
            name: {
                "median": statistics.median(each),
                "range": [min(each), max(each)],
                "interval": own["intervals"][name],
            }
            for name, each in values.items()
        },
        "majority": own["majority"],
        "beats_majority": metrics.beats(own, metric),
        "seeds": len(members),
        "examples": examples(stats, split),
        "train_examples": round(stats["share"] * stats["train_examples"]),
        "partial": is_partial(stats, split),
        "notes": notes_on(of_seeds, split),
        "median_run": run.name,
        "data": hashlib.sha256(json.dumps(measured_on, sort_keys=True).encode()).hexdigest()[:12],
        **task_of(stats).about(),
    }


def notes_on(of_seeds: list[dict], split: str) -> list[str]:
    """Notes on undefined metrics and the data. `of_seeds`: the statistics of the runs."""
    first = of_seeds[0]
    task = first["task"]
    title, name = NAMES.get(task, task), column(task, split) + ("" if first["pretrained"] else ", no pretraining")
    notes = [f"{name}: {note}" for note in sorted({n for one in of_seeds for n in one["validation"][split]["notes"]})]
    return notes + [title + note.removeprefix(task) if note.startswith(task) else note for note in data_notes(first)]


def data_notes(stats: dict) -> list[str]:
    """The notes on a run's data, without the names of files, since reports and cards may be published."""
    file = re.compile(rf"^({re.escape(stats['task'])})/(?!(train|validation\w*|test): ).*: ", re.DOTALL)
    return [file.sub(r"\1: ", note) for note in stats["data"]["notes"]]


def glue_rows(rows: Iterable[dict], pretrained: bool = True) -> list[dict]:
    """The rows of GLUE's tasks on all of the training data."""
    return [row for row in rows if row["pretrained"] == pretrained and row["share"] == 1.0 and row["task"] in NAMES]


def own_rows(rows: Iterable[dict]) -> list[dict]:
    """The rows of the user's own tasks on all of the training data, with and without pretraining."""
    return [row for row in rows if task_of(row).own and row["share"] == 1.0]


def weak_notes(rows: Iterable[dict]) -> list[str]:
    """Which scores don't beat the majority baseline, as sentences without a full stop."""
    verdicts: dict[str, list[str]] = {}
    for row in rows:
        if not row["beats_majority"]:
            shown = f"{row['column']} {row['score']:.1f} (majority {row['majority'][row['metric']]:.1f})"
            verdicts.setdefault(metrics.verdict(task_of(row)), []).append(shown)
    return [f"{verdict.capitalize()}: {', '.join(scores)}" for verdict, scores in verdicts.items()]


def averages(rows: Iterable[dict]) -> dict[str, float | None]:
    """The paper's average and GLUE's own, of rows of one kind; None unless all numbers are there, on complete data."""
    complete = {row["column"]: row for row in rows if not row["partial"]}
    medians = {name: {m: one["median"] for m, one in row["metrics"].items()} for name, row in complete.items()}
    return {
        "paper": metrics.paper_average({name: row["score"] for name, row in complete.items()}),
        "official": metrics.official_average(medians),
    }


def average_by_seed(rows: Iterable[dict]) -> list[float]:
    """The paper's average of each seed that has all nine numbers, in ascending order."""
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        for seed, score in row["by_seed"].items() if not row["partial"] else ():
            scores.setdefault(seed, {})[row["column"]] = score
    return sorted(mean for of_seed in scores.values() if (mean := metrics.paper_average(of_seed)) is not None)
