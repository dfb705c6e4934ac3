"""Finetune: one task with one seed, scored with the task's own metrics.

Reads   a pretrained artifact with its tokenizer; and the task's data
Writes  predictions.parquet (split, row, the texts, label, prediction, scores), scores.json
        lineage.json   the manifests of all artifacts that led here
        if the model is kept: config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
"""

import functools
import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from model import InputError, layouts
from model.settings import Architecture, Finetuning
from tasks.glue import data as glue
from tasks.glue import metrics, probes
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, MOST_EPOCHS, PROBES, TASKS, TaskName
from tasks.reports.model_card import finetuned_card
from tasks.stage import Params, stage
from tasks.store import LINEAGE, Artifact, read_manifest
from tasks.text.tokenizer import FILES, load_tokenizer
from tasks.workers import runs

if TYPE_CHECKING:
    import pandas as pd

    from model.finetuning import Examples, Outcome
    from model.machine import Machine

log = logging.getLogger(__name__)


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """The tasks, seeds and data, and one setting for all tasks."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (from the hub), 'probes', or a directory with TASK/train.parquet and "
        "TASK/validation.parquet (or train-*.parquet, or .tsv).",
    )
    tasks: list[TaskName] = Field(list(GLUE), min_length=1, description="Tasks to finetune on.")
    seeds: int = Field(5, ge=1, le=100, description="Runs of each task; the median is reported.")
    baseline: bool = Field(False, description="Also finetune the same model without pretraining.")
    shares: list[float] = Field(
        [1.0],
        min_length=1,
        description="Fractions of the training data to train on; several make a learning curve. Must include 1.0.",
    )
    keep: Literal["first", "all", "none"] = Field("first", description="Models to keep. first: seed 0 of each task.")

    @model_validator(mode="after")
    def _can_be_run(self) -> "Finetune":
        fitting = [name for name in TASKS if (name in PROBES) == (self.data == "probes")]
        if wrong := [name for name in self.tasks if name not in fitting]:
            raise ValueError(f"data {self.data!r} has no task {wrong[0]!r}; its tasks are {', '.join(fitting)}")
        if self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, but the paper's rules allow {MOST_EPOCHS}")
        if 1.0 not in self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares is {self.shares}; expected fractions above 0 and up to 1.0, with 1.0 among them")
        return self

    def runs(self) -> "list[FinetuneRun]":
        """A run for each task and seed: on all of the training data, on each share of it, without pretraining."""
        starts = [(True, share) for share in sorted(set(self.shares), reverse=True)]
        starts += [(False, 1.0)] if self.baseline else []
        shared, runs = self.model_dump(include={"data", *Finetuning.model_fields}), []
        for (pretrained, share), task, seed in product(starts, dict.fromkeys(self.tasks), range(self.seeds)):
            main = pretrained and share == 1.0
            keep = self.keep == "all" or (self.keep == "first" and seed == 0 and main)
            runs.append(FinetuneRun(**shared, task=task, seed=seed, pretrained=pretrained, share=share, keep=keep))
        return runs


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    data: str
    task: TaskName
    seed: int = Field(0, ge=0, description="Seed of the head, the order of examples and dropout.")
    pretrained: bool = Field(True, description="False: random weights, the baseline without pretraining.")
    share: float = Field(1.0, gt=0, le=1, description="Fraction of the training data, drawn by the seed.")
    keep: bool = True

    def identity(self) -> dict:
        """The parameters, with digests of local files or the hub's revision in place of the data's location."""
        return self.model_dump(mode="json") | {"data": glue.identity(self.data, self.task)}

    def label(self) -> str:
        """Task and seed, and what differs from a usual run."""
        share = f"{100 * self.share:g}%" if self.share < 1 else ""
        return "-".join(filter(None, (self.task, str(self.seed), "" if self.pretrained else "untrained", share)))

    def check(self) -> None:
        """Fetch and read the data before the model is pretrained. Raises InputError for bad data; logs warnings."""
        if self.data != "probes":
            from model.finetuning import steps_of

            try:
                steps_of(self.rows(training_rows(self.data, self.task)), self.finetuning())
            except InputError as error:
                share = f" That is a share of {self.share:g} (finetune.shares)." if self.share < 1 else ""
                raise InputError(f"{self.task}: {error}{share}") from error

    def memory(self, start: Artifact, here: "Machine") -> int:
        """Bytes that the run takes; without those of the model if `start` doesn't exist yet."""
        from model import finetuning

        if read_manifest(start) is None:
            return runs.BYTES_A_RUN
        weights = (start.path / "model.safetensors").stat().st_size
        shape, tokens = described(start)[0], self.batch_size * self.max_tokens
        return runs.BYTES_A_RUN + finetuning.memory(weights, tokens, shape.layers * shape.hidden, here)

    def finetuning(self) -> Finetuning:
        """The settings of the training loop."""
        return Finetuning(**self.model_dump(include=set(Finetuning.model_fields)))

    def rows(self, available: int) -> int:
        """The number of training rows that this run uses."""
        return max(1, round(self.share * available))

    def examples(self) -> int:
        """The number of examples in all epochs of training; for probes, an upper limit."""
        rows = probes.TRAIN if self.data == "probes" else training_rows(self.data, self.task)
        return self.epochs * self.rows(rows)


def described(start: Artifact) -> tuple[Architecture, int]:
    """The architecture of a pretrained model, and its maximum number of tokens."""
    about = json.loads((start.path / "config.json").read_text())["cram"]
    return Architecture(**about["architecture"]), about["length"]


@functools.cache
def training_rows(data: str, task: str) -> int:
    """Read a task's data and log its warnings, once. Returns the number of training rows."""
    checked = glue.read(data, task)
    for note in checked.notes:
        log.warning(note)
    return len(checked.tables["train"])


@dataclass(frozen=True)
class Inputs:
    """A task's data as text and as token ids."""

    data: glue.Data
    examples: "dict[str, Examples]"
    cut: dict[str, int]  # inputs longer than max_tokens, by split


encoding = threading.Lock()  # the first of several seeds encodes the inputs; the others wait for it


@functools.lru_cache(maxsize=len(TASKS))  # for all seeds and shares
def encoded_inputs(identity: str, data: str, task: str, tokens: int, start: Artifact) -> Inputs:
    """Read and encode a task's data. `identity` has the digests of the data: a changed file is read again."""
    from model.finetuning import Examples

    checked, tokenizer = glue.read(data, task, pretrained=start), load_tokenizer(start.path)
    examples, cut = {}, {}
    for split, table in checked.tables.items():
        ids, longer = encode(table, tokenizer, tokens)
        examples[split], cut[split] = Examples.of(ids, table[LABEL].to_numpy()), sum(longer)
    return Inputs(checked, examples, cut)


def encode(table: "pd.DataFrame", tokenizer, max_tokens: int) -> tuple[list[list[int]], list[bool]]:
    """Token ids of [CLS] A [SEP] (B [SEP]), and which inputs were cut. In a pair, the longer text is cut first."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    texts = [table[name].tolist() for name in table.columns if name != LABEL]
    inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    encodings = tokenizer.encode_batch_fast(inputs)
    return [one.ids for one in encodings], [bool(one.overflowing) for one in encodings]


def train_and_predict(
    run: FinetuneRun, folder: Path, examples: "dict[str, Examples]", out: Path, report: Callable[[int, str], None]
) -> "tuple[Outcome, dict[str, np.ndarray], dict]":
    """Train, predict all splits but train, and save the model if the run keeps it; may run in a process of its own.

    Returns how training went, the scores (n, classes) by split, and the machine. Raises InputError if the memory is too
    small and for scores that are not finite.
    """
    import torch

    from model import bert, export, finetuning, machine
    from model.classifier import Classifier

    task, here, encoder = TASKS[run.task], machine.detect(), export.load(folder)
    if not run.pretrained:
        encoder = bert.Bert(encoder.architecture, encoder.vocabulary, encoder.length, seed=run.seed)
    examples = finetuning.keep_used(encoder, examples)
    training = examples.pop("train")
    if run.share < 1:
        order = np.random.default_rng(run.seed).permutation(len(training))
        training = training.take(np.sort(order[: run.rows(len(training))]))
    layers = {"head": run.head, "pooling": run.pooling, "texts": len(task.columns)}
    classifier = Classifier(encoder, task.classes, run.dropout, run.seed, **layers)
    try:
        outcome = finetuning.finetune(classifier, training, run.finetuning(), here, run.seed, report)
        scores = {split: finetuning.predict(classifier, given, here) for split, given in examples.items()}
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InputError(
            f"The memory is too small for {run.label()}. Run fewer at a time (CRAM_FINETUNES=1), or lower "
            "finetune.batch_size."
        ) from error
    if not all(np.isfinite(values).all() for values in scores.values()):
        raise InputError(f"{run.label()}: the finetuned model's scores are not finite. Lower finetune.learning_rate.")
    if run.keep:
        encoder.restore_tokens()
        export.save_classifier(classifier.cpu(), out, task.labels, run.max_tokens)
    return outcome, scores, {name: here.describe()[name] for name in ("device", "dtype")}


def write_scores(run: FinetuneRun, inputs: Inputs, raw: dict[str, np.ndarray], out: Path) -> dict[str, dict]:
    """Write predictions.parquet and scores.json. `raw`: scores (n, classes) by split. Returns the metrics by split."""
    from model.finetuning import predictions

    task, validation, tables = TASKS[run.task], {}, []
    for split, scores in raw.items():
        table, labels, predicted = inputs.data.tables[split], inputs.examples[split].labels, predictions(scores)
        about = metrics.scored(task, labels, predicted, inputs.examples["train"].labels)
        validation[split] = {"examples": len(labels), "official_examples": task.sizes[split]} | about
        rows = {"split": [split] * len(labels), "row": range(len(labels))}
        rows |= {name: pa.array(table[name], pa.large_string()) for name in task.columns}
        tables.append(pa.table(rows | {LABEL: labels, "prediction": predicted, "scores": list(scores)}))
    pq.write_table(pa.concat_tables(tables), out / "predictions.parquet")
    (out / "scores.json").write_text(json.dumps(validation, indent=2) + "\n")
    return validation


@stage(version=5, varies=True)
def finetune(params: FinetuneRun, start: Artifact, out: Path) -> dict:
    """Train on the task's training data, score the model on its validation data."""
    task, (architecture, length) = TASKS[params.task], described(start)
    if params.max_tokens > length:
        raise InputError(
            f"finetune.max_tokens is {params.max_tokens}, but the model takes {length} tokens at most. Lower it."
        )
    native = layouts.transformers_classifier(architecture, params.head, params.pooling)
    if params.head == "native" and not native:
        log.warning(
            "finetune.head is native, but transformers has no classifier for this layout and pooling %s. The head is "
            "tanh.",
            params.pooling,
        )
    run = params.model_copy(update={"head": "native" if native else "tanh"})
    with encoding:
        identity = json.dumps(params.identity()["data"], sort_keys=True)
        inputs = encoded_inputs(identity, params.data, params.task, params.max_tokens, start)
    work = run, start.path, inputs.examples, out
    outcome, raw, machine = runs.in_worker(train_and_predict, work, params.examples(), f"finetune {params.label()}")
    validation, data = write_scores(params, inputs, raw, out), inputs.data
    lineage = json.loads((start.path / LINEAGE).read_text())
    lineage |= {start.name: {k: v for k, v in start.manifest.items() if k != "files"}}
    (out / LINEAGE).write_text(json.dumps(lineage, indent=2) + "\n")
    stats = {
        **params.model_dump(include={"task", "seed", "pretrained", "share"}),
        "metric": task.metrics[0],
        "head": run.head,
        "machine": machine,
        "train_examples": len(inputs.examples["train"]),
        "official_train_examples": task.train,
        "steps": outcome.steps,
        "seconds_of_training": round(outcome.seconds, 3),
        "examples_per_second": round(outcome.examples_per_second, 1),
        "epochs": outcome.epochs,
        "data": {"left_out": data.left_out, "shared": data.shared, "duplicates": data.duplicates, "cut": inputs.cut,
                 "notes": data.notes},
        "validation": validation,
    }  # fmt: skip
    if params.keep:
        for file in FILES:
            shutil.copyfile(start.path / file, out / file)
        (out / "README.md").write_text(finetuned_card(params.identity(), stats, lineage))
    return stats
