"""Finetune: one GLUE task with one seed, the paper's global settings, scored with the task's own metrics.

Reads   a pretrained artifact (which holds its tokenizer), and the task's data: from the hub (nyu-mll/glue), from local
        Parquet files with its columns, or probes made from the pretrained artifact's held-out documents.
Writes  predictions.parquet (split, row, label, prediction, scores), scores.json
        lineage.json   the manifests of all that led here
"""

import functools
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from model import InputError
from model.settings import Finetuning
from tasks import hub, probes, sources, vocabulary
from tasks.pretrain import LINEAGE
from tasks.progress import Progress
from tasks.stage import Artifact, Params, stage

HUB_GLUE = hub.Source("nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c", "")
HUB_SECONDS = 10  # for the hub to say that it is there
LABEL = "label"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A task: its columns, classes (1: regression), metrics (the first is the score), and its official sizes."""

    columns: tuple[str, ...]
    classes: int
    metrics: tuple[str, ...]
    train: int  # examples in the official training split; 0 where there is none
    validation: dict[str, int]  # the same of each validation split


TASKS: dict[str, Task] = {
    "cola": Task(("sentence",), 2, ("matthews",), 8551, {"validation": 1043}),
    "sst2": Task(("sentence",), 2, ("accuracy",), 67349, {"validation": 872}),
    "mrpc": Task(("sentence1", "sentence2"), 2, ("f1", "accuracy"), 3668, {"validation": 408}),
    "stsb": Task(("sentence1", "sentence2"), 1, ("pearson", "spearman"), 5749, {"validation": 1500}),
    "qqp": Task(("question1", "question2"), 2, ("f1", "accuracy"), 363846, {"validation": 40430}),
    "mnli": Task(
        ("premise", "hypothesis"), 3, ("accuracy",), 392702, {"validation_matched": 9815, "validation_mismatched": 9832}
    ),
    "qnli": Task(("question", "sentence"), 2, ("accuracy",), 104743, {"validation": 5463}),
    "rte": Task(("sentence1", "sentence2"), 2, ("accuracy",), 2490, {"validation": 277}),
    "wnli": Task(("sentence1", "sentence2"), 2, ("accuracy",), 635, {"validation": 71}),
}
TASKS |= {name: Task(columns, 2, ("accuracy",), 0, {"validation": 0}) for name, columns in probes.COLUMNS.items()}
TaskName = Literal[
    "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "word-order", "odd-word", "neighbours"
]
GLUE = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # the order of the paper's tables


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """Which tasks, with how many seeds, from which data; and the one setting for all of them."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (the hub), 'probes', or a directory with <task>/train.parquet, <task>/validation.parquet (or train-*.parquet …).",
    )
    tasks: list[TaskName] = Field(list(GLUE), min_length=1, description="Tasks to finetune on.")
    seeds: int = Field(5, ge=1, le=100, description="Runs of each task; the median is reported.")
    baseline: bool = Field(False, description="Finetune the same model without pretraining too.")

    @model_validator(mode="after")
    def _data_has_the_tasks(self) -> "Finetune":
        fitting = [name for name in TASKS if (name in probes.COLUMNS) == (self.data == "probes")]
        if wrong := [name for name in self.tasks if name not in fitting]:
            raise ValueError(f"data {self.data!r} has no task {wrong[0]!r}; its tasks are {', '.join(fitting)}")
        return self

    def runs(self) -> "Iterator[FinetuneRun]":
        """Every finetuning run that this asks for."""
        shared = self.model_dump(exclude={"tasks", "seeds", "baseline"})
        for pretrained in (True, False) if self.baseline else (True,):
            for task in dict.fromkeys(self.tasks):
                for seed in range(self.seeds):
                    yield FinetuneRun(**shared, task=task, seed=seed, pretrained=pretrained)


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    data: str
    task: TaskName
    seed: int = Field(0, ge=0, description="Of the head, the order of examples and dropout.")
    pretrained: bool = Field(True, description="False: random weights, the baseline without pretraining.")

    def identity(self) -> dict:
        """Digests of local files or the revision on the hub in place of where the data is."""
        about = self.model_dump(mode="json")
        if self.data == "probes":
            about["data"] = {"probes": probes.VERSION}
        elif self.data == HUB_GLUE.repository:
            about["data"] = {"repository": HUB_GLUE.repository, "revision": HUB_GLUE.revision}
        else:
            files = local_splits(Path(self.data).expanduser(), self.task)
            about["data"] = {split: [sources.file_digest(p) for p in paths] for split, paths in files.items()}
        return about

    def label(self) -> str:
        """Task and seed."""
        return f"{self.task}-{self.seed}" + ("" if self.pretrained else "-untrained")

    def check(self) -> None:
        """Bring and read the data once, so that what is wrong with it is known before the model is trained."""
        if self.data != "probes":
            _check(self.data, self.task)


@functools.cache
def _check(data: str, task: str) -> None:
    for paths in find_splits(data, task).values():
        read_split(paths, task)


def find_splits(data: str, task: str) -> dict[str, list[Path]]:
    """The Parquet files of each split of a task, brought from the hub if that is where they are."""
    return hub_splits(task) if data == HUB_GLUE.repository else local_splits(Path(data).expanduser(), task)


def split_files(folder: Path, task: str, split: str) -> list[Path]:
    """The Parquet files of one split in a local GLUE folder; none where there are none."""
    found = (folder / task).glob(f"{split}*.parquet")
    return sorted(p for p in found if p.stem == split or p.stem.startswith(f"{split}-"))


def local_splits(folder: Path, task: str) -> dict[str, list[Path]]:
    """The Parquet files of each split of a task in a local GLUE folder."""
    found = {}
    for split in ("train", *TASKS[task].validation):
        files = split_files(folder, task, split)
        if not files:
            present = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) if folder.is_dir() else "none"
            raise InputError(
                f"{folder} has no {task}/{split}.parquet or {task}/{split}-*.parquet (folders there: {present or 'none'}). Expected the files of "
                f"{HUB_GLUE.repository}; mend finetune.data, or leave {task} out of finetune.tasks."
            )
        found[split] = files
    return found


@functools.cache  # asked once before the model is trained, and not again by the runs a day later
def hub_splits(task: str) -> dict[str, list[Path]]:
    """The same from the hub, brought here."""
    found = {}
    for split in ("train", *TASKS[task].validation):
        pattern = rf"{task}/{split}-\d+-of-\d+\.parquet"
        source = hub.Source(HUB_GLUE.repository, HUB_GLUE.revision, pattern, folder=task)
        found[split] = [hub.bring(source, file) for file in hub.files(source)]
    return found


def evaluation_splits(task: str) -> list[str]:
    """The names of a task's validation and test splits."""
    return [
        f"{kind}{split.removeprefix('validation')}"
        for kind in ("validation", "test")
        for split in TASKS[task].validation
    ]


def evaluation_files(data: str, tasks: Iterable[str]) -> dict[str, dict[str, list[Path]]]:
    """The Parquet files at hand of the validation and test splits of GLUE tasks, by task and split.

    From the hub: all, or none where not all can be had. From a folder: those in it, where test splits
    and whole tasks may be missing. Raises InputError for a folder that has none.
    """
    folder, found = Path(data).expanduser(), {}
    for task in (name for name in TASKS if name in tasks):
        files = {
            split: hub_evaluation().get((task, split), [])
            if data == HUB_GLUE.repository
            else split_files(folder, task, split)
            for split in evaluation_splits(task)
        }
        if at_hand := {split: paths for split, paths in files.items() if paths}:
            found[task] = at_hand
    if not found and data != HUB_GLUE.repository:
        raise InputError(
            f"{folder} {'holds no' if folder.is_dir() else 'is no directory with'} <task>/validation.parquet or <task>/test.parquet of "
            f"{', '.join(tasks)}. Expected the files of {HUB_GLUE.repository}; mend finetune.data (or decontaminate.data)."
        )
    return found


@functools.cache  # the answer enters a key, so it must stay the same while a run lasts
def hub_evaluation() -> dict[tuple[str, str], list[Path]]:
    """All validation and test splits from the hub, brought here if need be; or with a warning none, if not all can be.

    Some of them would be a key of their own, and another one the next time.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    about = {"repo_type": "dataset", "revision": HUB_GLUE.revision}
    wanted = [(task, split) for task in (*GLUE, "wnli") for split in evaluation_splits(task)]
    names = {f"{task}/{split}-00000-of-00001.parquet": (task, split) for task, split in wanted}  # at that commit
    cached = {split: try_to_load_from_cache(HUB_GLUE.repository, name, **about) for name, split in names.items()}
    found = {split: [Path(path)] for split, path in cached.items() if isinstance(path, str)}
    if len(found) == len(names):
        return found
    told = f"{HUB_GLUE.repository} on the hub lacks files."
    try:  # one quick request first: without a network a listing tries for half a minute
        HfApi().dataset_info(HUB_GLUE.repository, revision=HUB_GLUE.revision, timeout=HUB_SECONDS)
        source = hub.Source(HUB_GLUE.repository, HUB_GLUE.revision, "|".join(map(re.escape, names)))
        for file in hub.files(source):
            found[names[file.name]] = [hub.bring(source, file)]
    except Exception as problem:  # the hub's client raises its own, httpx's and the socket's errors
        told = problem if isinstance(problem, InputError) else hub.error(HUB_GLUE.repository, problem)
    if len(found) == len(names):
        return found
    missing = [f"{task}/{split}" for task, split in wanted if (task, split) not in found] if found else ["all of it"]
    log.warning("%s Not at hand, so that no sentence of GLUE is looked for in the text: %s.", told, ", ".join(missing))
    return {}


def splits(run: FinetuneRun, pretrained: Artifact) -> dict[str, pa.Table]:
    """The checked data of a task: train first, then its validation splits."""
    if run.data == "probes":
        return probes.make(run.task, pretrained)
    return {split: read_split(paths, run.task) for split, paths in find_splits(run.data, run.task).items()}


def read_split(paths: list[Path], name: str) -> pa.Table:
    """Read one split, and refuse what can't be trained on, naming file, column and row."""
    task, where = TASKS[name], f"{name}/{paths[0].name}"
    try:
        table = pa.concat_tables([pq.read_table(path) for path in paths], promote_options="default")
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{where} is no Parquet file that can be read: {error}. Get it again.") from error
    wanted = (*task.columns, LABEL)
    if missing := [c for c in wanted if c not in table.column_names]:
        raise InputError(
            f"{where} lacks the column {', '.join(missing)}; it has {', '.join(table.column_names)}. Expected "
            f"{', '.join(wanted)}, as in {HUB_GLUE.repository}."
        )
    if not table.num_rows:
        raise InputError(f"{where} has no rows. Get it again, or leave {name} out of finetune.tasks.")
    for column in task.columns:
        kind = table.schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(f"{where}: column {column} holds {kind}; expected text.")
        if table[column].null_count:
            row = next(i for i, v in enumerate(table[column]) if not v.is_valid)
            raise InputError(f"{where}: column {column} is empty in row {row}. Mend or drop that row.")
    kind = table.schema.field(LABEL).type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind)) or table[LABEL].null_count:
        raise InputError(
            f"{where}: the labels are {kind} with {table[LABEL].null_count} missing; expected a number in every row."
        )
    labels = table[LABEL].to_numpy()
    allowed = (labels >= 0) & (labels <= 5) if task.classes == 1 else np.isin(labels, np.arange(task.classes))
    if not allowed.all():
        row = int(np.argmin(allowed))
        expected = "0 to 5" if task.classes == 1 else f"one of {', '.join(map(str, range(task.classes)))}"
        hint = " Label -1 marks the unlabelled test split." if labels[row] == -1 else ""
        raise InputError(f"{where}: the label of row {row} is {labels[row]}; expected {expected}.{hint}")
    return table.select(wanted)


def encode(table: pa.Table, tokenizer, max_tokens: int) -> list[list[int]]:
    """[CLS] A [SEP] or [CLS] A [SEP] B [SEP]; of too long a pair the longer text is cut."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    columns = [table[c].to_pylist() for c in table.column_names if c != LABEL]
    inputs = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(inputs)]


def score(metric: str, labels: np.ndarray, predictions: np.ndarray) -> float:
    """A GLUE metric, in [-100, 100]. One that a constant prediction leaves undefined is 0, as GLUE counts it."""
    from scipy import stats
    from sklearn import metrics

    if metric in ("pearson", "spearman"):
        if np.ptp(predictions) == 0 or np.ptp(labels) == 0:
            return 0.0
        correlate = stats.pearsonr if metric == "pearson" else stats.spearmanr
        return 100 * float(correlate(labels, predictions).statistic)
    functions = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda y, p: metrics.f1_score(y, p, zero_division=0),
        "matthews": metrics.matthews_corrcoef,
    }
    return 100 * float(functions[metric](labels, predictions))


def majority(labels: np.ndarray, train: np.ndarray, task: Task) -> np.ndarray:
    """What the simplest baseline predicts: the training data's commonest class, or mean."""
    constant = train.mean() if task.classes == 1 else np.bincount(train.astype(int)).argmax()
    return np.full(len(labels), constant)


@stage(version=2)
def finetune(params: FinetuneRun, pretrained: Artifact, out: Path) -> dict:
    """Train on the task's training data, score the last epoch's model on its validation data."""
    import torch

    from model import bert, export, finetuning, machine

    task, data = TASKS[params.task], splits(params, pretrained)
    tokenizer, here = vocabulary.load(pretrained.path), machine.detect()
    encoder = export.load(pretrained.path)
    if params.max_tokens > encoder.length:
        raise InputError(
            f"finetune.max_tokens is {params.max_tokens}, but the model takes {encoder.length} tokens at most. Lower it."
        )
    if not params.pretrained:
        encoder = bert.Bert(encoder.architecture, encoder.vocabulary, encoder.length, seed=params.seed)
    encoded = {split: encode(table, tokenizer, params.max_tokens) for split, table in data.items()}
    used = np.unique(np.concatenate([[vocabulary.PAD], *(ids for found in encoded.values() for ids in found)]))
    encoder.keep_tokens(torch.from_numpy(used))
    examples = {
        split: finetuning.Examples(
            [np.searchsorted(used, ids).tolist() for ids in found], data[split][LABEL].to_numpy()
        )
        for split, found in encoded.items()
    }
    train = examples.pop("train")
    classifier = bert.Classifier(encoder, task.classes, params.dropout, params.seed)
    settings = finetuning.Finetuning(**params.model_dump(include=set(finetuning.Finetuning.model_fields)))
    steps = settings.epochs * (len(train.tokens) // settings.batch_size)
    label = f"finetune {params.task}, seed {params.seed}" + ("" if params.pretrained else ", no pretraining")
    with Progress(label, total=steps, unit="step") as bar:
        finetuning.finetune(
            classifier, train, settings, here, params.seed, lambda step, note: bar.update(step - bar.count, note)
        )
    scores, tables = {}, []
    for split, given in examples.items():
        raw = finetuning.predict(classifier, given, here)
        predicted = raw[:, 0] if task.classes == 1 else raw.argmax(axis=1)
        simple = majority(given.labels, train.labels, task)
        scores[split] = {
            "examples": len(given.labels),
            "official_examples": task.validation[split],
            **{metric: round(score(metric, given.labels, predicted), 4) for metric in task.metrics},
            "majority": {metric: round(score(metric, given.labels, simple), 4) for metric in task.metrics},
        }
        rows = {"split": [split] * len(raw), "row": range(len(raw)), "label": given.labels, "prediction": predicted}
        rows["scores"] = raw  # of the classes, before softmax; the one number of a regression
        tables.append(pa.table({name: pa.array(list(values)) for name, values in rows.items()}))
    pq.write_table(pa.concat_tables(tables, promote_options="permissive"), out / "predictions.parquet")
    (out / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")
    led_here = json.loads((pretrained.path / LINEAGE).read_text())
    about = {k: v for k, v in pretrained.manifest.items() if k != "files"}
    (out / LINEAGE).write_text(json.dumps(led_here | {pretrained.name: about}, indent=2) + "\n")
    return {
        "task": params.task,
        "seed": params.seed,
        "pretrained": params.pretrained,
        "metric": task.metrics[0],
        "train_examples": len(train.labels),
        "official_train_examples": task.train,
        "steps": steps,
        "validation": scores,
    }
