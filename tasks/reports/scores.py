"""Scores: those of the finetuning runs of one model, over seeds, and published ones."""

import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from model import InputError
from tasks.glue import metrics
from tasks.glue.tasks import GLUE, PROTOCOLS, TASKS
from tasks.store import LINEAGE, Artifact

NAMES = {name: TASKS[name].title for name in (*GLUE, "wnli")}
COLUMNS = tuple(metrics.COLUMNS)  # nine numbers, as the paper
KIND = ("protocol", "pretrained", "share", "task")  # of runs that are reported together
NOT_SETTINGS = ("seed", "keep", "test")  # params that may differ between the runs of one median


class Published(NamedTuple):
    """A row of a published table."""

    model: str
    scores: dict[str, float]  # by column; those not found are missing
    average: float
    source: str
    numbers: int = 9  # that the average is the mean of


def _row(*values: float) -> dict[str, float]:
    return dict(zip(COLUMNS, values, strict=True))


V1, FINAL = "arXiv 2212.14034v1, as quoted by others", "the authors' final version, as quoted by others"
RELEASED, AGAIN = "the model card of JonasGeiping/crammed-bert", "He and Hofmann 2023, arXiv 2311.01906, tables 1 and 2"
CONDITIONED = {"SST-2": 92.5, "RTE": 55.6, "QNLI": 91.1, "QQP": 87.4, "MRPC": 86.3, "CoLA": 53.7}
MOSAIC = {"SST-2": 92.46, "STS-B": 89.27, "RTE": 81.36, "QNLI": 90.74, "QQP": 90.29, "MRPC": 90.03, "CoLA": 55.11}
PUBLISHED: dict[str, list[Published]] = {
    "cramming": [
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
    ],
    "modern": [
        Published("MosaicBERT-Base, 70,000 steps (8 A100)", MOSAIC, 84.28, "its model card, five seeds; MNLI 84.95", 8),
        Published("MosaicBERT-Base, 1.13 hours of 8 A100", {}, 79.6, "arXiv 2312.17482", 8),
        Published("BERT-base, run by MosaicML", {}, 83.3, "the README of mosaicml/examples", 8),
        Published("NexteraBERT 220M, 13 billion tokens, one GPU", {}, 85.45,
                  "the README of Rikka-Botan/NexteraBERT", 8),
        Published("ModernBERT-base, 2 trillion tokens", {}, 88.4, "the model card of Ettin", 8),
    ],
}  # fmt: skip


def column(task: str, split: str) -> str:
    """The name of a number in the tables."""
    columns = {place: name for name, place in metrics.COLUMNS.items()}
    return columns.get((task, split)) or NAMES.get(task, task)


def label(pretrained: bool, share: float = 1.0) -> str:
    """What kind of run it is."""
    return ("pretrained" if pretrained else "no pretraining") + (f", {share:.0%} of the data" if share < 1 else "")


def groups(runs: list[Artifact]) -> dict[tuple, list[Artifact]]:
    """The runs of each (protocol, pretrained, share, task). Raises InputError unless they differ in their seed only."""
    grouped: dict[tuple, list[Artifact]] = {}
    for run in runs:
        stats = run.stats
        if "protocol" not in stats:
            raise InputError(
                f"{run.name} was made by an older version of cram, so it can't be reported. Run its finetuning again."
            )
        grouped.setdefault(tuple(stats[name] for name in KIND), []).append(run)
    for (protocol, _, _, task), members in grouped.items():
        settings = [setting(run) for run in members]
        seeds = {run.manifest["params"]["seed"] for run in members}
        if len(seeds) < len(members) or any(one != settings[0] for one in settings):
            raise InputError(
                f"The {len(members)} runs of {task} by protocol {protocol} are not one setting with as many seeds, so "
                "they have no median. Give runs that differ in their seed only."
            )
    return grouped


def setting(run: Artifact) -> dict:
    """What the runs of one median have in common: params, the model that they start from, and the data."""
    params = {name: value for name, value in run.manifest["params"].items() if name not in NOT_SETTINGS}
    return params | run.manifest["inputs"] | {"data": scored_on(run)}


def middle(members: list[Artifact], split: str | None = None) -> Artifact:
    """The run with the median score (of an even number, the lower of two), on one split or over all of them."""

    def score(run: Artifact) -> tuple[float, int]:
        stats = run.stats
        splits = [of_split for name, of_split in stats["validation"].items() if split in (None, name)]
        return statistics.mean(of_split["metrics"][stats["metric"]] for of_split in splits), stats["seed"]

    return sorted(members, key=score)[(len(members) - 1) // 2]


def present(stats: dict) -> int:
    """Rows in a run's training data, with those that can't be trained on: the official data has some too (QQP two)."""
    return stats["train_examples"] + sum(stats["data"]["left_out"].get("train", {}).values())


def is_partial(task: str, sizes: Iterable[Sequence[int]]) -> bool:
    """Whether a task of GLUE has unofficial numbers of examples; `sizes`: pairs (present, official)."""
    return task in NAMES and any(have != official for have, official in sizes)


def is_partial_run(stats: dict) -> bool:
    """Whether a run was trained or scored on a part of the official data."""
    splits = stats["validation"].values()
    sizes = [(of_split["examples"], of_split["official_examples"]) for of_split in splits]
    return is_partial(stats["task"], [(present(stats), stats["official_train_examples"]), *sizes])


def gather(grouped: dict[tuple, list[Artifact]]) -> list[dict]:
    """A row for each number of the tables: the median over seeds, its range, and the data that it was measured on."""
    rows = []
    for kind, members in grouped.items():
        stats = [run.stats for run in members]  # each reads a file
        rows += [score_row(kind, members, stats, split) for split in stats[0]["validation"]]
    order = {name: place for place, name in enumerate(COLUMNS)}
    return sorted(
        rows,
        key=lambda row: (
            PROTOCOLS.index(row["protocol"]), not row["pretrained"], -row["share"], order.get(row["column"], len(order))
        ),
    )  # fmt: skip


def score_row(kind: tuple, members: list[Artifact], stats: list[dict], split: str) -> dict:
    """The number of one split. `members`: the seeds' runs of one `kind`, with their statistics."""
    import pandas as pd

    median, first = middle(members, split), stats[0]
    of_median, of_seeds = median.stats["validation"][split], [one["validation"][split] for one in stats]
    metric = first["metric"]
    values = pd.DataFrame([of_seed["metrics"] for of_seed in of_seeds], index=[str(one["seed"]) for one in stats])
    spread = {
        name: {
            "median": float(one["median"]),  # round() of a numpy number is less exact
            "range": [one["min"], one["max"]],
            "interval": of_median["intervals"][name],
        }
        for name, one in values.agg(["median", "min", "max"]).items()
    }
    sizes = {
        "train": [present(first), first["official_train_examples"]],
        "validation": [of_median["examples"], of_median["official_examples"]],
    }
    return dict(zip(KIND, kind, strict=True)) | {
        "split": split,
        "column": column(first["task"], split),
        "metric": metric,
        "score": spread[metric]["median"],
        "by_seed": values[metric].to_dict(),
        "metrics": spread,
        "majority": of_median["majority"],
        "beats_majority": metrics.beats(of_median, metric),
        "seeds": len(members),
        "examples": sizes,
        "partial": is_partial(first["task"], sizes.values()),
        "notes": sorted({note for of_seed in of_seeds for note in of_seed["notes"]}),
        "data_notes": list(dict.fromkeys(note for one in stats for note in one["data"]["notes"])),
        "cut": max(one["data"]["cut"].get(split, 0) for one in stats),
        "confusion": of_median["confusion"],
        "median_run": median.name,
        "data": _digest(scored_on(members[0])),
    }


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def chosen(rows: Iterable[dict], protocol: str, pretrained: bool = True) -> list[dict]:
    """The rows of GLUE's tasks on all of the training data, by one protocol."""
    kind = (protocol, pretrained, 1.0)
    return [r for r in rows if (r["protocol"], r["pretrained"], r["share"]) == kind and r["task"] in NAMES]


def weak(rows: Iterable[dict]) -> dict[str, list[str]]:
    """The scores that don't beat the majority baseline, by the verdict on them."""
    verdicts: dict[str, list[str]] = {}
    for row in rows:
        if not row["beats_majority"]:
            majority = row["majority"][row["metric"]]
            shown = f"{row['column']} {row['score']:.1f} (majority {majority:.1f})"
            verdicts.setdefault(metrics.verdict(TASKS[row["task"]]), []).append(shown)
    return verdicts


def averages(rows: list[dict]) -> dict[str, float | None]:
    """The paper's average and GLUE's own, of rows of one kind; None unless all numbers are there, on complete data."""
    complete = {row["column"]: row for row in rows if not row["partial"]}
    medians = {name: {m: one["median"] for m, one in row["metrics"].items()} for name, row in complete.items()}
    return {
        "paper": metrics.paper_average({name: row["score"] for name, row in complete.items()}),
        "official": metrics.official_average(medians),
    }


def average_by_seed(rows: list[dict]) -> list[float]:
    """The paper's average of each seed that has all nine numbers, in ascending order."""
    complete = {row["column"]: row["by_seed"] for row in rows if not row["partial"]}
    if any(name not in complete for name in COLUMNS):
        return []
    seeds = set.intersection(*(set(complete[name]) for name in COLUMNS))
    return sorted(metrics.paper_average({name: complete[name][seed] for name in COLUMNS}) for seed in seeds)


def scored_on(run: Artifact) -> dict:
    """The data of a run: files by split or a revision, without the files of the test data."""
    params = run.manifest["params"]
    return {split: files for split, files in params["data"].items() if split not in TASKS[params["task"]].test}


def start(run: Artifact) -> str:
    """The name of the pretrained artifact that a run goes back to, also through a finetuned model."""
    lineage, name = json.loads((run.path / LINEAGE).read_text()), run.manifest["inputs"]["start"]
    while not name.startswith("pretrain/"):
        name = lineage[name]["inputs"]["start"]
    return name


def pretrained_of(runs: list[Artifact]) -> tuple[str, dict[str, dict]]:
    """The one pretrained artifact that all runs go back to: its name, and the manifests up to its own."""
    names = {start(run) for run in runs}
    if len(names) > 1:
        raise InputError(
            f"The finetune artifacts come from different models: {', '.join(sorted(names))}. Give those of one."
        )
    lineage = json.loads((runs[0].path / LINEAGE).read_text())
    return names.pop(), {name: manifest for name, manifest in lineage.items() if manifest["stage"] != "finetune"}
