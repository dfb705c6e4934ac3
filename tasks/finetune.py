"""Finetune: one task with one seed, scored with the task's own metrics; under either protocol.

Reads   a pretrained artifact, which holds its tokenizer (or that of a finetuned MNLI model, to start from), and the task's
        data, from which what can't be trained on is left out or refused.
Writes  predictions.parquet (split, row, the texts, label, prediction, scores), scores.json
        lineage.json   the manifests of all that led here
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
from pydantic import BaseModel, Field, model_validator

from model import InputError
from model.settings import Finetuning
from tasks.glue import data as glue
from tasks.glue import metrics, probes
from tasks.glue.tasks import GLUE, HUB_GLUE, LABEL, MOST_EPOCHS, PROTOCOLS, TASKS, Protocol, TaskName
from tasks.reports.model_card import finetuned_card
from tasks.stage import Params, stage
from tasks.store import LINEAGE, Artifact, read_manifest
from tasks.text.tokenizer import FILES, load_tokenizer
from tasks.workers import finetunes

if TYPE_CHECKING:
    from model.finetuning import Examples, Outcome
    from model.machine import Machine

log = logging.getLogger(__name__)


class TaskSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """What the protocol `modern` sets for each task by itself."""

    epochs: int = Field(ge=1, le=20, description="Passes over the training data.")
    batch_size: int = Field(16, ge=1, description="Examples a step.")
    learning_rate: float = Field(gt=0, le=1, description="Peak.")
    weight_decay: float = Field(ge=0, le=1, description="On matrices.")
    seeds: int = Field(ge=1, le=100, description="Runs; the median is reported.")
    start: Literal["pretrained", "mnli"] = Field("pretrained", description="mnli: from seed 0 of MNLI.")


class Modern(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The protocol `modern`: settings of each task after those of MosaicBERT (arXiv 2312.17482 and its released code).

    Its decays are of an optimizer that multiplies by them alone, so here they are divided by the rate. It had inputs of 256
    tokens, and no part of the training data held back.
    """

    mnli: TaskSettings = TaskSettings(epochs=3, batch_size=48, learning_rate=5e-5, weight_decay=0.1, seeds=1)
    sst2: TaskSettings = TaskSettings(epochs=3, learning_rate=3e-5, weight_decay=0.1, seeds=3)
    stsb: TaskSettings = TaskSettings(
        epochs=10, batch_size=32, learning_rate=3e-5, weight_decay=0.1, seeds=5, start="mnli"
    )
    rte: TaskSettings = TaskSettings(epochs=3, learning_rate=1e-5, weight_decay=1.0, seeds=5, start="mnli")
    qnli: TaskSettings = TaskSettings(epochs=10, learning_rate=1e-5, weight_decay=0.1, seeds=1)
    qqp: TaskSettings = TaskSettings(epochs=5, learning_rate=3e-5, weight_decay=0.1, seeds=1)
    mrpc: TaskSettings = TaskSettings(
        epochs=10, batch_size=32, learning_rate=8e-5, weight_decay=0.1, seeds=5, start="mnli"
    )
    cola: TaskSettings = TaskSettings(epochs=10, batch_size=32, learning_rate=5e-5, weight_decay=0.1, seeds=4)
    # common to all, like the rest of it
    schedule: Literal["cosine", "linear"] = Field("linear", description="How the rate falls to zero.")
    warmup: float = Field(0.06, ge=0, lt=1, description="Fraction of a task's steps.")
    choose: Literal["last", "best"] = Field(
        "best", description="Epoch; best: on a tenth of the training data held back."
    )
    head: Literal["tanh", "native"] = Field(
        "native", description="native: that of transformers' model, if there is one."
    )

    @model_validator(mode="after")
    def _begins_somewhere(self) -> "Modern":
        if self.mnli.start == "mnli":
            raise ValueError("mnli.start is 'mnli', but MNLI can't start from its own model; set it to 'pretrained'")
        return self

    def settings(self, task: TaskName) -> dict:
        """What differs of `Finetuning` for a task."""
        common = {"schedule", "warmup", "choose", "head"}
        return self.model_dump(include=common) | getattr(self, task).model_dump(exclude={"seeds", "start"})


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """Which tasks by which protocol, with how many seeds, from which data; and the one setting of protocol `cramming`."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (the hub), 'probes', or a directory with TASK/train.parquet, TASK/validation.parquet (or train-*.parquet …, or .tsv).",
    )
    tasks: list[TaskName] = Field(list(GLUE), min_length=1, description="Tasks to finetune on.")
    protocols: list[Protocol] = Field(
        ["cramming"],
        min_length=1,
        description="cramming: the rules of the game, one setting for all tasks. modern: settings by task; RTE, MRPC and STS-B from MNLI's model.",
    )
    seeds: int = Field(5, ge=1, le=100, description="Runs of each task by protocol cramming; the median is reported.")
    baseline: bool = Field(False, description="By protocol cramming, finetune the same model without pretraining too.")
    shares: list[float] = Field(
        [1.0],
        min_length=1,
        description="Of the training data, by protocol cramming; several make a learning curve. 1.0 has to be among them.",
    )
    test: bool = Field(False, description="Predict the test data too, and write files for the leaderboard.")
    keep: Literal["first", "all", "none"] = Field(
        "first",
        description="Which models to keep: seed 0 of each task, all, or (but for the one of MNLI that others start from) none.",
    )
    modern: Modern = Field(Modern(), description="The settings of protocol modern, by task and common to all.")

    @model_validator(mode="after")
    def _can_be_run(self) -> "Finetune":
        fitting = [name for name in TASKS if (name in probes.COLUMNS) == (self.data == "probes")]
        if wrong := [name for name in self.tasks if name not in fitting]:
            raise ValueError(f"data {self.data!r} has no task {wrong[0]!r}; its tasks are {', '.join(fitting)}")
        if without := [name for name in self.tasks if "modern" in self.protocols and name not in Modern.model_fields]:
            raise ValueError(f"protocol modern has no settings for {without[0]!r}; leave it out, or leave modern out")
        if "cramming" in self.protocols and self.epochs > MOST_EPOCHS:
            raise ValueError(f"epochs is {self.epochs}, but the rules of protocol cramming allow {MOST_EPOCHS}")
        if 1.0 not in self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares is {self.shares}; expected shares above 0, up to 1.0, which has to be among them")
        if self.test and self.data == "probes":
            raise ValueError("test: probes have no test data; leave it false")
        return self

    def unread(self, names: Iterable[str]) -> list[str]:
        """Of these fields, those that only a protocol reads that isn't asked for."""
        by_task = self.modern.settings("cola")  # whatever task it is, these are its names
        readers = {"modern": "modern"} | dict.fromkeys(["seeds", "baseline", "shares", *by_task], "cramming")
        return [name for name in names if readers.get(name) in set(PROTOCOLS) - set(self.protocols)]

    def runs(self) -> "list[tuple[FinetuneRun, int | None]]":
        """Every run that this asks for, and the number of the one that it starts from, if it is not the pretrained model."""
        found: list[tuple[FinetuneRun, int | None]] = []
        if "cramming" in self.protocols:
            found += [(run, None) for run in self._cramming()]
        if "modern" in self.protocols:
            found += self._modern(len(found))
        return found

    def _run(self, task: TaskName, seed: int, usual: bool = True, needed: bool = False, **changes) -> "FinetuneRun":
        """`usual`: a run whose model one would want, of seed 0; `needed`: others start from it."""
        shared = self.model_dump(include={"data", "test", *Finetuning.model_fields})
        keep = needed or self.keep == "all" or (self.keep == "first" and seed == 0 and usual)
        return FinetuneRun(**shared | {"task": task, "seed": seed, "keep": keep} | changes)

    def _cramming(self) -> "Iterator[FinetuneRun]":
        for pretrained in (True, False) if self.baseline else (True,):
            for share in sorted(set(self.shares), reverse=True) if pretrained else (1.0,):
                for task in dict.fromkeys(self.tasks):
                    for seed in range(self.seeds):
                        yield self._run(task, seed, pretrained and share == 1.0, pretrained=pretrained, share=share)

    def _modern(self, first: int) -> "list[tuple[FinetuneRun, int | None]]":
        from_mnli = [task for task in self.tasks if getattr(self.modern, task).start == "mnli"]
        found, mnli = [], first if from_mnli else None
        for task in dict.fromkeys([*(["mnli"] if from_mnli else []), *self.tasks]):
            about = getattr(self.modern, task)
            for seed in range(about.seeds if task in self.tasks else 1):
                changes = {"protocol": "modern", "start": about.start} | self.modern.settings(task)
                run = self._run(task, seed, needed=task == "mnli" and seed == 0, **changes)
                found.append((run, mnli if about.start == "mnli" else None))
        return found


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    data: str
    task: TaskName
    seed: int = Field(0, ge=0, description="Of the head, the order of examples and dropout.")
    protocol: Protocol = "cramming"
    pretrained: bool = Field(True, description="False: random weights, the baseline without pretraining.")
    share: float = Field(1.0, gt=0, le=1, description="Of the training data, drawn by the seed.")
    start: Literal["pretrained", "mnli"] = "pretrained"
    test: bool = False
    keep: bool = True

    def identity(self) -> dict:
        """Digests of local files or the revision on the hub in place of where the data is."""
        return self.model_dump(mode="json") | {"data": glue.identity(self.data, self.task, self.test)}

    def label(self) -> str:
        """Task and seed, and what is not as usual."""
        what = [self.task, str(self.seed), self.protocol if self.protocol != "cramming" else ""]
        what += ["untrained" if not self.pretrained else "", f"{100 * self.share:g}%" if self.share < 1 else ""]
        return "-".join(filter(None, what))

    def check(self) -> None:
        """Bring and read the data once, so that what is wrong with it is known before the model is trained; and warn."""
        if self.data != "probes":
            from model.finetuning import steps_of

            rows = self.rows(_checked(self.data, self.task, self.test))
            try:
                steps_of(rows, Finetuning(**self.model_dump(include=set(Finetuning.model_fields))))
            except InputError as error:
                of_all = f" That is a share of {self.share:g} (finetune.shares)." if self.share < 1 else ""
                raise InputError(f"{self.task}: {error}{of_all}") from error

    def memory(self, start: Artifact, here: "Machine") -> int:
        """Bytes that the run takes, as far as the model that it starts from is known by now."""
        from model import finetuning

        if read_manifest(start) is None:
            return finetunes.BYTES_A_RUN
        weights = (start.path / "model.safetensors").stat().st_size
        tokens, shape = self.batch_size * self.max_tokens, described(start)["architecture"]
        return finetunes.BYTES_A_RUN + finetuning.memory(weights, tokens, shape["layers"] * shape["hidden"], here)

    def rows(self, there: int) -> int:
        """Of so many training rows, how many this run is given."""
        return max(1, round(self.share * there))

    def examples(self) -> int:
        """How many examples training goes through; of probes, at most."""
        rows = probes.TRAIN if self.data == "probes" else _checked(self.data, self.task, self.test)
        return self.epochs * self.rows(rows)


def described(start: Artifact) -> dict:
    """What the model's config.json says to cram: `architecture`, `length` and so on."""
    config = json.loads((start.path / "config.json").read_text())
    if "cram" not in config:
        raise InputError(
            f"{start.name} was made by an earlier version of cram, whose models can't be finetuned. Run its pretrain stage again."
        )
    return config["cram"]


@functools.cache
def _checked(data: str, task: str, test: bool) -> int:
    """The number of training examples; what is to be said of the data is said once."""
    found = glue.read(data, task, test)
    for note in found.notes:
        log.warning(note)
    return found.tables["train"].num_rows


@dataclass(frozen=True)
class Inputs:
    """A task's data, and the same as token ids."""

    data: glue.Data
    examples: "dict[str, Examples]"
    cut: dict[str, int]  # of each split, the inputs that are longer than the model takes


encoding = threading.Lock()  # seeds that begin together wait for the first of them


@functools.lru_cache(maxsize=2 * len(TASKS))  # for all seeds, shares and protocols: from MNLI's model is another start
def _inputs(about: str, data: str, task: str, test: bool, tokens: int, start: Artifact) -> Inputs:
    """`about`: digests of the data, so that a file that was changed is read again."""
    from model.finetuning import Examples

    found = glue.read(data, task, test, pretrained=start)
    tokenizer = load_tokenizer(start.path)
    encoded = {split: encode(table, tokenizer, tokens) for split, table in found.tables.items()}
    cut = {split: sum(longer) for split, (_, longer) in encoded.items()}
    labels = {split: table[LABEL].to_numpy() for split, table in found.tables.items()}
    return Inputs(found, {split: Examples.of(ids, labels[split]) for split, (ids, _) in encoded.items()}, cut)


def encode(table: pa.Table, tokenizer, max_tokens: int) -> tuple[list[list[int]], list[bool]]:
    """[CLS] A [SEP] or [CLS] A [SEP] B [SEP], and whether it was cut; of too long a pair the longer text is cut."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    columns = [table[name].to_pylist() for name in table.column_names if name != LABEL]
    inputs = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    found = tokenizer.encode_batch_fast(inputs)
    return [one.ids for one in found], [bool(one.overflowing) for one in found]


def train(
    run: FinetuneRun, folder: Path, examples: "dict[str, Examples]", out: Path, report: Callable[[int, str], None]
) -> "tuple[Outcome, dict[str, np.ndarray], str, dict]":
    """Train, predict every split but train, and save the model if it is kept; in this process or in another.

    Returns how training went, the scores (n, classes) of each split, the head that the model has, and on what it was trained.
    Raises InputError for what the user can mend.
    """
    import torch

    from model import bert, export, finetuning, machine

    task, here, encoder = TASKS[run.task], machine.detect(), export.load(folder)
    if not run.pretrained:
        encoder = bert.Bert(encoder.architecture, encoder.vocabulary, encoder.length, seed=run.seed)
    native = run.head == "native" and export.transformers_classifier(encoder.architecture, "native") is not None
    settings = finetuning.Finetuning(**run.model_dump(include=set(Finetuning.model_fields)))
    settings = settings.model_copy(update={"head": "native" if native else "tanh"})
    examples = finetuning.keep_used(encoder, examples)
    learned = examples.pop("train")
    if run.share < 1:
        order = np.random.default_rng(run.seed).permutation(len(learned))
        learned = learned.take(np.sort(order[: run.rows(len(learned))]))
    classifier = bert.Classifier(encoder, task.classes, settings.dropout, run.seed, settings.head)
    score = functools.partial(metrics.score, task.metrics[0])
    try:
        outcome = finetuning.finetune(classifier, learned, settings, here, run.seed, report, score)
        scores = {split: finetuning.predict(classifier, given, here) for split, given in examples.items()}
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InputError(
            f"The memory is too small for {run.label()}. Run fewer at a time (CRAM_FINETUNES=1), or lower finetune.batch_size."
        ) from error
    if not all(np.isfinite(found).all() for found in scores.values()):
        raise InputError(
            f"{run.label()}: the finetuned model gives scores that are no numbers. Lower finetune.learning_rate."
        )
    if run.keep:
        encoder.restore_tokens()
        export.save_classifier(classifier.cpu(), out, task.labels, len(task.columns), run.max_tokens)
    where = here.describe()
    where = {"device": where["device"], "dtype": where["dtype"], "compiled": here.compiles_always}
    return outcome, scores, settings.head, where


def score(params: FinetuneRun, given: Inputs, raw: dict[str, np.ndarray], out: Path) -> dict[str, dict]:
    """Write predictions.parquet; the metrics of each validation split. `raw`: scores (examples, classes) by split."""
    task, validation, tables = TASKS[params.task], {}, []
    for split, scores in raw.items():
        table, labels = given.data.tables[split], given.examples[split].labels
        predicted = scores[:, 0] if task.classes == 1 else scores.argmax(axis=1)
        if split in task.validation:
            about = metrics.measure(task, labels, predicted, given.examples["train"].labels)
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
        about = json.dumps(params.identity()["data"], sort_keys=True)
        given = _inputs(about, params.data, params.task, params.test, params.max_tokens, start)
    work = params, start.path, given.examples, out
    outcome, raw, head, where = finetunes.run(train, work, params.examples(), f"finetune {params.label()}")
    validation, data = score(params, given, raw, out), given.data
    led_here = json.loads((start.path / LINEAGE).read_text())
    led_here |= {start.name: {k: v for k, v in start.manifest.items() if k != "files"}}
    (out / LINEAGE).write_text(json.dumps(led_here, indent=2) + "\n")
    stats = {
        "task": params.task,
        "seed": params.seed,
        "protocol": params.protocol,
        "pretrained": params.pretrained,
        "share": params.share,
        "metric": task.metrics[0],
        "head": head,
        "machine": where,
        "train_examples": len(given.examples["train"]),
        "official_train_examples": task.train,
        "steps": outcome.steps,
        "seconds_of_training": round(outcome.seconds, 3),
        "examples_per_second": round(outcome.examples_per_second, 1),
        "chosen_epoch": outcome.chosen_epoch,
        "epochs": outcome.epochs,
        "data": {"left_out": data.left_out, "shared": data.shared, "duplicates": data.duplicates, "cut": given.cut,
                 "notes": data.notes},
        "validation": validation,
    }  # fmt: skip
    if params.keep:
        for file in FILES:
            shutil.copyfile(start.path / file, out / file)
        (out / "README.md").write_text(finetuned_card(params.identity(), stats, led_here))
    return stats
