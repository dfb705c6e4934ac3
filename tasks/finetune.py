"""Finetune: one task with one seed, scored with the task's own metrics; by either protocol.

Reads   a pretrained artifact or a model finetuned on MNLI, with its tokenizer; and the task's data
Writes  predictions.parquet (split, row, the texts, label, prediction, scores), scores.json
        lineage.json   the manifests of all artifacts that led here
        if the model is kept: config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
"""

import functools
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, model_validator

from model import InputError
from model.settings import Finetuning
from tasks.glue import data as glue
from tasks.glue import metrics, probes
from tasks.glue.protocols import MODERN, Modern
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, MOST_EPOCHS, PROTOCOLS, TASKS, Protocol, TaskName
from tasks.reports.model_card import finetuned_card
from tasks.stage import Params, stage
from tasks.store import LINEAGE, Artifact, read_manifest
from tasks.text.tokenizer import FILES, load_tokenizer
from tasks.workers import side_by_side

if TYPE_CHECKING:
    from model.finetuning import Examples, Outcome
    from model.machine import Machine

log = logging.getLogger(__name__)


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """The tasks, protocols, seeds and data; and the setting of protocol `cramming`, the same for all tasks."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (from the hub), 'probes', or a directory with TASK/train.parquet and "
        "TASK/validation.parquet (or train-*.parquet, or .tsv).",
    )
    tasks: list[TaskName] = Field(list(GLUE), min_length=1, description="Tasks to finetune on.")
    protocols: list[Protocol] = Field(
        ["cramming"],
        min_length=1,
        description="cramming: by the paper's rules, one setting for all tasks. modern: settings by task, and RTE, "
        "MRPC and STS-B start from the model finetuned on MNLI.",
    )
    seeds: int = Field(5, ge=1, le=100, description="Runs of each task by protocol cramming; the median is reported.")
    baseline: bool = Field(False, description="Also finetune the same model without pretraining, by protocol cramming.")
    shares: list[float] = Field(
        [1.0],
        min_length=1,
        description="Fractions of the training data to train on, by protocol cramming; several make a learning curve. "
        "Must include 1.0.",
    )
    test: bool = Field(False, description="Also predict the test data, and write files for GLUE's leaderboard.")
    keep: Literal["first", "all", "none"] = Field(
        "first",
        description="Models to keep. first: seed 0 of each task. none: only MNLI's if other tasks start from it.",
    )
    modern: Modern = Field(Modern(), description="Settings of protocol modern, by task and common to all.")

    @model_validator(mode="after")
    def _can_be_run(self) -> "Finetune":
        fitting = [name for name in TASKS if (name in probes.COLUMNS) == (self.data == "probes")]
        if wrong := [name for name in self.tasks if name not in fitting]:
            raise ValueError(f"data {self.data!r} has no task {wrong[0]!r}; its tasks are {', '.join(fitting)}")
        if without := [name for name in self.tasks if "modern" in self.protocols and name not in MODERN]:
            raise ValueError(f"protocol modern has no settings for {without[0]!r}; remove the task or the protocol")
        if "cramming" in self.protocols and self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, but the rules of protocol cramming allow {MOST_EPOCHS}")
        if 1.0 not in self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares is {self.shares}; expected fractions above 0 and up to 1.0, with 1.0 among them")
        if self.test and self.data == "probes":
            raise ValueError("test: probes have no test data; leave it false")
        return self

    def unread(self, names: Iterable[str]) -> list[str]:
        """The names among these that have no effect, since only an unselected protocol reads them."""
        own = set(self.modern.finetuning("mnli"))  # fields that protocol modern sets by itself, for any task
        readers = {"modern": "modern"} | dict.fromkeys(["seeds", "baseline", "shares", *own], "cramming")
        return [name for name in names if readers.get(name) in set(PROTOCOLS) - set(self.protocols)]

    def runs(self) -> "list[tuple[FinetuneRun, int | None]]":
        """All runs, each with the index of the run that it starts from; None for the pretrained model."""
        runs: list[tuple[FinetuneRun, int | None]] = []
        if "cramming" in self.protocols:
            runs += [(run, None) for run in self._cramming()]
        if "modern" in self.protocols:
            runs += self._modern(len(runs))
        return runs

    def _run(self, task: TaskName, seed: int, main: bool = True, needed: bool = False, **changes) -> "FinetuneRun":
        """`main`: neither a baseline nor a share of the data; `needed`: other runs start from this one."""
        shared = self.model_dump(include={"data", "test", *Finetuning.model_fields})
        keep = needed or self.keep == "all" or (self.keep == "first" and seed == 0 and main)
        return FinetuneRun(**shared | {"task": task, "seed": seed, "keep": keep} | changes)

    def _cramming(self) -> "Iterator[FinetuneRun]":
        for pretrained in (True, False) if self.baseline else (True,):
            for share in sorted(set(self.shares), reverse=True) if pretrained else (1.0,):
                for task in dict.fromkeys(self.tasks):
                    for seed in range(self.seeds):
                        yield self._run(task, seed, pretrained and share == 1.0, pretrained=pretrained, share=share)

    def _modern(self, first: int) -> "list[tuple[FinetuneRun, int | None]]":
        """`first`: the index of the first run, which is MNLI's with seed 0 if other tasks start from it."""
        runs, from_mnli = [], any(self.modern.task(task).start == "mnli" for task in self.tasks)
        for task in dict.fromkeys([*(["mnli"] if from_mnli else []), *self.tasks]):
            settings = self.modern.task(task)
            changes = {"protocol": "modern", "start": settings.start} | self.modern.finetuning(task)
            for seed in range(settings.seeds if task in self.tasks else 1):
                run = self._run(task, seed, needed=task == "mnli" and seed == 0, **changes)
                runs.append((run, first if settings.start == "mnli" else None))
        return runs


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    data: str
    task: TaskName
    seed: int = Field(0, ge=0, description="Seed of the head, the order of examples and dropout.")
    protocol: Protocol = "cramming"
    pretrained: bool = Field(True, description="False: random weights, the baseline without pretraining.")
    share: float = Field(1.0, gt=0, le=1, description="Fraction of the training data, drawn by the seed.")
    start: Literal["pretrained", "mnli"] = "pretrained"
    test: bool = False
    keep: bool = True

    def identity(self) -> dict:
        """The parameters, with digests of local files or the hub's revision in place of the data's location."""
        return self.model_dump(mode="json") | {"data": glue.identity(self.data, self.task, self.test)}

    def label(self) -> str:
        """Task and seed, and what differs from a usual run."""
        words = [self.task, str(self.seed), self.protocol if self.protocol != "cramming" else ""]
        words += ["untrained" if not self.pretrained else "", f"{100 * self.share:g}%" if self.share < 1 else ""]
        return "-".join(filter(None, words))

    def check(self) -> None:
        """Fetch and read the data before the model is pretrained. Raises InputError for bad data; logs warnings."""
        if self.data != "probes":
            from model.finetuning import steps_of

            try:
                steps_of(self.rows(training_rows(self.data, self.task, self.test)), self.finetuning())
            except InputError as error:
                share = f" That is a share of {self.share:g} (finetune.shares)." if self.share < 1 else ""
                raise InputError(f"{self.task}: {error}{share}") from error

    def memory(self, start: Artifact, here: "Machine") -> int:
        """Bytes that the run takes; without those of the model if `start` doesn't exist yet."""
        from model import finetuning

        if read_manifest(start) is None:
            return side_by_side.BYTES_A_RUN
        weights = (start.path / "model.safetensors").stat().st_size
        tokens, shape = self.batch_size * self.max_tokens, described(start)["architecture"]
        return side_by_side.BYTES_A_RUN + finetuning.memory(weights, tokens, shape["layers"] * shape["hidden"], here)

    def finetuning(self) -> Finetuning:
        """The settings of the training loop."""
        return Finetuning(**self.model_dump(include=set(Finetuning.model_fields)))

    def rows(self, available: int) -> int:
        """The number of training rows that this run uses."""
        return max(1, round(self.share * available))

    def examples(self) -> int:
        """The number of examples in all epochs of training; for probes, an upper limit."""
        rows = probes.TRAIN if self.data == "probes" else training_rows(self.data, self.task, self.test)
        return self.epochs * self.rows(rows)


def described(start: Artifact) -> dict:
    """The section `cram` of the model's config.json: `architecture`, `length` and so on."""
    config = json.loads((start.path / "config.json").read_text())
    if "cram" not in config:
        raise InputError(
            f"{start.name} was made by an earlier version of cram, whose models can't be finetuned. "
            "Run its pretrain stage again."
        )
    return config["cram"]


@functools.cache
def training_rows(data: str, task: str, test: bool) -> int:
    """Read a task's data and log its warnings, once. Returns the number of training rows."""
    checked = glue.read(data, task, test)
    for note in checked.notes:
        log.warning(note)
    return checked.tables["train"].num_rows


@dataclass(frozen=True)
class Inputs:
    """A task's data as text and as token ids."""

    data: glue.Data
    examples: "dict[str, Examples]"
    cut: dict[str, int]  # inputs longer than max_tokens, by split


encoding = threading.Lock()  # the first of several seeds encodes the inputs; the others wait for it


@functools.lru_cache(maxsize=2 * len(TASKS))  # for all seeds and shares, and for both models that runs start from
def encoded_inputs(identity: str, data: str, task: str, test: bool, tokens: int, start: Artifact) -> Inputs:
    """Read and encode a task's data. `identity` has the digests of the data: a changed file is read again."""
    from model.finetuning import Examples

    checked, tokenizer = glue.read(data, task, test, pretrained=start), load_tokenizer(start.path)
    examples, cut = {}, {}
    for split, table in checked.tables.items():
        ids, longer = encode(table, tokenizer, tokens)
        examples[split], cut[split] = Examples.of(ids, table[LABEL].to_numpy()), sum(longer)
    return Inputs(checked, examples, cut)


def encode(table: pa.Table, tokenizer, max_tokens: int) -> tuple[list[list[int]], list[bool]]:
    """Ids of [CLS] A [SEP] or [CLS] A [SEP] B [SEP], and whether the input was cut; of a pair the longer text is."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    columns = [table[name].to_pylist() for name in table.column_names if name != LABEL]
    inputs = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    encodings = tokenizer.encode_batch_fast(inputs)
    return [one.ids for one in encodings], [bool(one.overflowing) for one in encodings]


def train(
    run: FinetuneRun, folder: Path, examples: "dict[str, Examples]", out: Path, report: Callable[[int, str], None]
) -> "tuple[Outcome, dict[str, np.ndarray], str, dict]":
    """Train, predict all splits but train, and save the model if the run keeps it; may run in a process of its own.

    Returns how training went, the scores (n, classes) by split, the model's head, and the machine. Raises InputError if
    the memory is too small and for scores that are not finite.
    """
    import torch

    from model import bert, export, finetuning, layouts, machine

    task, here, encoder = TASKS[run.task], machine.detect(), export.load(folder)
    if not run.pretrained:
        encoder = bert.Bert(encoder.architecture, encoder.vocabulary, encoder.length, seed=run.seed)
    head = "native" if layouts.transformers_classifier(encoder.architecture, run.head, run.pooling) else "tanh"
    settings = run.finetuning().model_copy(update={"head": head})
    examples = finetuning.keep_used(encoder, examples)
    training = examples.pop("train")
    if run.share < 1:
        order = np.random.default_rng(run.seed).permutation(len(training))
        training = training.take(np.sort(order[: run.rows(len(training))]))
    layers = {"head": head, "pooling": run.pooling, "texts": len(task.columns)}
    classifier = bert.Classifier(encoder, task.classes, settings.dropout, run.seed, **layers)
    score = functools.partial(metrics.score, task.metrics[0])
    try:
        outcome = finetuning.finetune(classifier, training, settings, here, run.seed, report, score)
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
    about = {name: here.describe()[name] for name in ("device", "dtype")} | {"compiled": here.compiles_always}
    return outcome, scores, head, about


def write_scores(run: FinetuneRun, inputs: Inputs, raw: dict[str, np.ndarray], out: Path) -> dict[str, dict]:
    """Write predictions.parquet and scores.json. `raw`: scores (n, classes) by split. Returns the metrics by split."""
    from model.finetuning import predictions

    task, validation, tables = TASKS[run.task], {}, []
    for split, scores in raw.items():
        table, labels = inputs.data.tables[split], inputs.examples[split].labels
        predicted = predictions(scores)
        if split in task.validation:
            about = metrics.measure(task, labels, predicted, inputs.examples["train"].labels)
            validation[split] = {"examples": len(labels), "official_examples": task.validation[split]} | about
        rows = {"split": [split] * len(labels), "row": range(len(labels))}
        rows |= {name: table[name] for name in task.columns}
        kind = table.schema.field(LABEL).type
        rows["label"] = table[LABEL] if split in task.validation else pa.nulls(len(labels), kind)
        tables.append(pa.table(rows | {"prediction": predicted, "scores": list(scores)}))
    pq.write_table(pa.concat_tables(tables), out / "predictions.parquet")
    (out / "scores.json").write_text(json.dumps(validation, indent=2) + "\n")
    return validation


@stage(version=5, varies=True)
def finetune(params: FinetuneRun, start: Artifact, out: Path) -> dict:
    """Train on the task's training data, score the model on its validation data."""
    task, length = TASKS[params.task], described(start)["length"]
    if params.max_tokens > length:
        raise InputError(
            f"finetune.max_tokens is {params.max_tokens}, but the model takes {length} tokens at most. Lower it."
        )
    with encoding:
        identity = json.dumps(params.identity()["data"], sort_keys=True)
        inputs = encoded_inputs(identity, params.data, params.task, params.test, params.max_tokens, start)
    work = params, start.path, inputs.examples, out
    outcome, raw, head, machine = side_by_side.run(
        side_by_side.FINETUNE, train, work, params.examples(), f"finetune {params.label()}"
    )
    if head != params.head and params.protocol == "cramming":  # protocol modern takes what the layout allows
        log.warning(
            "finetune.head is %s, but transformers has no classifier for this layout and pooling %s. The head is %s.",
            *(params.head, params.pooling, head),
        )
    validation, data = write_scores(params, inputs, raw, out), inputs.data
    lineage = json.loads((start.path / LINEAGE).read_text())
    lineage |= {start.name: {k: v for k, v in start.manifest.items() if k != "files"}}
    (out / LINEAGE).write_text(json.dumps(lineage, indent=2) + "\n")
    stats = {
        **params.model_dump(include={"task", "seed", "protocol", "pretrained", "share"}),
        "metric": task.metrics[0],
        "head": head,
        "machine": machine,
        "train_examples": len(inputs.examples["train"]),
        "official_train_examples": task.train,
        "steps": outcome.steps,
        "seconds_of_training": round(outcome.seconds, 3),
        "examples_per_second": round(outcome.examples_per_second, 1),
        "chosen_epoch": outcome.chosen_epoch,
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
