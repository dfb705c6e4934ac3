"""Scores: those of one model's finetuning runs, over seeds; and the words and marks for them."""

import hashlib
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from model.errors import InputError
from model.settings import Finetuning
from model.wording import counted
from tasks.glue import metrics
from tasks.glue.pair_scores import PAIR_METRIC
from tasks.glue.table import GLUE, PROBES, TASKS, task_of
from tasks.reports.markdown import Marked, code, escape
from tasks.reports.rows import ScoreRow, Spread
from tasks.store.artifacts import LINEAGE, Artifact

NAMES = {name: TASKS[name].title for name in (*GLUE, "wnli")}
COLUMNS = tuple(metrics.COLUMNS)  # nine numbers, as in the paper
PLACES = {place: name for name, place in metrics.COLUMNS.items()}  # columns by task and split
METRICS = {name: words.removesuffix(" correlation") for name, words in metrics.NAMES.items()}
METRICS[PAIR_METRIC] = "accuracy"
WEAK = "†"  # marks a score that doesn't beat the majority baseline


# Words and marks


def column(task: str, split: str) -> str:
    """The name of a score in the tables."""
    if (task, split) in PLACES:
        return PLACES[task, split]
    return NAMES.get(task, task) + (", test" if split == "test" else "")


def label(pretrained: bool, share: float = 1.0) -> str:
    """The kind of run: pretrained or not, on which share of the data."""
    words = "pretrained" if pretrained else "no pretraining"
    return words if share == 1 else f"{words}, {share:.0%} of the data"


def mark_score(score: float | str, partial: bool, beats: bool = True) -> Marked:
    """A score (or a name) with an asterisk if its data is partial, and a dagger if it doesn't beat the baseline."""
    text = f"{score:.1f}" if isinstance(score, float) else score
    asterisk = "\\*" if partial else ""
    dagger = "" if beats else WEAK
    return Marked(escape(text) + asterisk + dagger)


def partial_notes(rows: Iterable[ScoreRow]) -> list[Marked]:
    """Which scores are on partial data, and on how much."""
    notes = []
    for row in rows:
        if row["partial"]:
            sizes = [f"{have:,} of {counted(of, f'{split} example')}" for split, (have, of) in row["examples"].items()]
            note = (
                f"\\* {escape(row['column'])} is on partial data: {', '.join(sizes)}. "
                "It is left out of the averages and can't be compared with published scores."
            )
            notes.append(Marked(note))
    return notes


def weak_notes(rows: Iterable[ScoreRow]) -> list[str]:
    """Which scores don't beat the majority baseline, as sentences without a full stop."""
    verdicts: dict[str, list[str]] = {}
    for row in rows:
        if not row["beats_majority"]:
            shown = f"{row['column']} {row['score']:.1f} (majority {row['majority'][row['metric']]:.1f})"
            verdicts.setdefault(metrics.verdict(task_of(row)), []).append(shown)
    return [f"{verdict.capitalize()}: {', '.join(scores)}" for verdict, scores in verdicts.items()]


def settings(params: Sequence[Mapping]) -> dict:
    """How runs were finetuned: each field of `Finetuning` with its value, or the list of its values if they differ."""
    found = {}
    for name in Finetuning.model_fields:
        values = list(dict.fromkeys(one[name] for one in params))
        if values:
            found[name] = values[0] if len(values) == 1 else values
    return found


def settings_rows(values: dict) -> list[dict]:
    """Settings as rows of a table."""
    rows = []
    for name, value in values.items():
        several = value if isinstance(value, list) else [value]
        shown = [each if isinstance(each, str) else f"{each:g}" for each in several]
        rows.append({"setting": code(name), "value": ", ".join(shown)})
    return rows


HELPERS = {  # of templates
    "label": label, "mark": WEAK, "marked": mark_score, "metric_names": METRICS, "task_names": NAMES,
}  # fmt: skip


# The runs of finetuning


class Setting(NamedTuple):
    """What distinguishes runs, except for their seeds."""

    pretrained: bool
    share: float
    task: str


def pretrained_of(runs: list[Artifact]) -> tuple[str, dict[str, dict]]:
    """The one pretrained artifact that all runs start from: its name, and the manifests up to its own."""
    names = {run.manifest["inputs"]["start"] for run in runs}
    if len(names) > 1:
        raise InputError(
            f"The finetune artifacts come from different models: {', '.join(sorted(names))}. Pass the runs of one "
            "model."
        )
    return names.pop(), json.loads((runs[0].path / LINEAGE).read_text(encoding="utf-8"))


def group_runs(runs: list[Artifact]) -> dict[Setting, list[Artifact]]:
    """The runs of each setting. Raises InputError unless those of a setting differ in their seed only."""
    groups: dict[Setting, list[Artifact]] = {}
    for run in runs:
        stats = run.stats
        setting = Setting(stats["pretrained"], stats["share"], stats["task"])
        groups.setdefault(setting, []).append(run)
    for setting, members in groups.items():
        check_seeds(setting.task, members)
    return groups


def check_seeds(task: str, members: list[Artifact]) -> None:
    """Raise InputError unless runs differ in their seed only."""
    params = [run.manifest["params"] for run in members]
    seeds = {one["seed"] for one in params}
    rest = [{name: value for name, value in one.items() if name not in ("seed", "keep")} for one in params]
    if len(seeds) < len(members) or any(one != rest[0] for one in rest):
        raise InputError(
            f"The {len(members)} runs of {task} don't differ in their seeds only, so they have no median. Pass runs of "
            "one setting, each with its own seed."
        )


def median_run(members: list[Artifact], split: str | None = None) -> Artifact:
    """The run with the median score (of an even number, the lower of two), on one split or over all of them."""

    def score(run: Artifact) -> tuple[float, int]:
        stats = run.stats
        scores = [
            of_split["metrics"][stats["metric"]]
            for name, of_split in stats["validation"].items()
            if split is None or split == name
        ]
        return statistics.mean(scores), stats["seed"]

    return sorted(members, key=score)[(len(members) - 1) // 2]


def examples(stats: dict, split: str) -> dict[str, list[int]]:
    """How many rows a run's data has for training and in a validation split, and how many the official data has."""
    of_split = stats["validation"][split]
    left_out = stats["data"]["left_out"].get("train", {})  # can't be trained on; the official data has some (QQP two)
    return {
        "train": [stats["train_examples"] + sum(left_out.values()), stats["official_train_examples"]],
        "validation": [of_split["examples"], of_split["official_examples"]],
    }


def is_partial(stats: dict, split: str) -> bool:
    """Whether a run was trained on, or scored on this split of, other than the official data, if there is such."""
    return any(official not in (0, have) for have, official in examples(stats, split).values())


def notes_on(members: list[Artifact], split: str) -> list[str]:
    """Notes on undefined metrics and the data, of the runs of one setting."""
    first = members[0].stats
    task = first["task"]
    name = column(task, split) + ("" if first["pretrained"] else ", no pretraining")
    of_metrics = {note for run in members for note in run.stats["validation"][split]["notes"]}
    notes = [f"{name}: {note}" for note in sorted(of_metrics)]
    for note in data_notes(first):
        if note.startswith(task):
            note = NAMES.get(task, task) + note.removeprefix(task)
        notes.append(note)
    return notes


def data_notes(stats: dict) -> list[str]:
    """The notes on a run's data, without the names of files, since reports and cards may be published."""
    task = re.escape(stats["task"])
    # up to its ending, since a name may have a colon in it, as what is said of the file may
    file = re.compile(rf"^({task})/(?!(train|validation\w*|test): )(.*?\.\w+|.*?): ", re.DOTALL)
    return [file.sub(r"\1: ", note) for note in stats["data"]["notes"]]


# Rows


def gather(groups: Iterable[list[Artifact]], corpus: str | None) -> list[ScoreRow]:
    """A row for each score of the tables, in their order: pretrained first, then the largest shares.

    `groups`: the seeds' runs of each setting. `corpus`: the name of the tokenized text, from which probes are made.
    """
    rows = [score_row(members, split, corpus) for members in groups for split in members[0].stats["validation"]]

    def place(row: ScoreRow) -> tuple[bool, float, int]:
        name = row["column"]
        return not row["pretrained"], -row["share"], COLUMNS.index(name) if name in COLUMNS else len(COLUMNS)

    return sorted(rows, key=place)


def score_row(members: list[Artifact], split: str, corpus: str | None) -> ScoreRow:
    """The row of one split. `members`: the runs of one setting, which differ in their seeds."""
    run = median_run(members, split)
    stats = run.stats
    task = stats["task"]
    metric = stats["metric"]
    of_split = stats["validation"][split]
    values = metrics_by_seed(members, split)
    row: ScoreRow = {
        "task": task,
        "pretrained": stats["pretrained"],
        "share": stats["share"],
        "split": split,
        "column": column(task, split),
        "metric": metric,
        "score": statistics.median(values[metric].values()),
        "by_seed": values[metric],
        "metrics": {name: spread(of_seed, of_split["intervals"][name]) for name, of_seed in values.items()},
        "majority": of_split["majority"],
        "beats_majority": metrics.beats(of_split, metric),
        "seeds": len(members),
        "examples": examples(stats, split),
        "train_examples": round(stats["share"] * stats["train_examples"]),
        "partial": is_partial(stats, split),
        "notes": notes_on(members, split),
        "median_run": run.name,
        "data": digest_of_data(run, corpus),
    }
    definition = task_of(stats).about().get("definition")
    if definition:
        row["definition"] = definition
    return row


def metrics_by_seed(members: list[Artifact], split: str) -> dict[str, dict[str, float]]:
    """The values of each metric on a split, by seed."""
    values: dict[str, dict[str, float]] = {}
    for run in members:
        stats = run.stats
        for name, value in stats["validation"][split]["metrics"].items():
            values.setdefault(name, {})[str(stats["seed"])] = value
    return values


def spread(by_seed: dict[str, float], interval: list[float]) -> Spread:
    """A metric over seeds."""
    values = list(by_seed.values())
    return {"median": statistics.median(values), "range": [min(values), max(values)], "interval": interval}


def digest_of_data(run: Artifact, corpus: str | None) -> str:
    """A digest of the data a run was measured on; scores on equal data can be compared. `corpus`: as in `gather`."""
    made_from = corpus if run.stats["task"] in PROBES else None
    measured_on = [run.manifest["params"]["data"], made_from]
    return hashlib.sha256(json.dumps(measured_on, sort_keys=True).encode()).hexdigest()[:12]


def glue_rows(rows: Iterable[ScoreRow], pretrained: bool = True) -> list[ScoreRow]:
    """The rows of GLUE's tasks on all of the training data."""
    return [row for row in rows if row["pretrained"] == pretrained and row["share"] == 1.0 and row["task"] in NAMES]


def own_rows(rows: Iterable[ScoreRow]) -> list[ScoreRow]:
    """The rows of the user's own tasks on all of the training data, with and without pretraining."""
    return [row for row in rows if task_of(row).own and row["share"] == 1.0]


# Averages


class Averages(NamedTuple):
    """The averages over GLUE's tasks; None unless all scores are there, on complete data."""

    paper: float | None
    official: float | None


def averages(rows: Iterable[ScoreRow]) -> Averages:
    """The paper's average and GLUE's own, of rows of one kind."""
    complete = {row["column"]: row for row in rows if not row["partial"]}
    scores = {name: row["score"] for name, row in complete.items()}
    medians = {
        name: {metric: of_metric["median"] for metric, of_metric in row["metrics"].items()}
        for name, row in complete.items()
    }
    return Averages(metrics.paper_average(scores), metrics.official_average(medians))


def average_by_seed(rows: Iterable[ScoreRow]) -> list[float]:
    """The paper's average of each seed that has all nine scores, in ascending order."""
    scores: dict[str, dict[str, float]] = {}
    for row in rows:
        if not row["partial"]:
            for seed, score in row["by_seed"].items():
                scores.setdefault(seed, {})[row["column"]] = score
    means = [metrics.paper_average(of_seed) for of_seed in scores.values()]
    return sorted(mean for mean in means if mean is not None)
