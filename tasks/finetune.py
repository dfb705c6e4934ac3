"""Finetune: one task with one seed, scored with the task's own metrics.

Reads   a pretrained artifact with its tokenizer; and the task's data
Writes  predictions.parquet (split, row, the texts, label, prediction, scores), scores.json
        lineage.json   the manifests of all artifacts that led here
        if the model is kept: config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
"""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from pydantic import Field, SkipValidation, model_validator

from model import layouts
from model.errors import InputError
from model.settings import Architecture, Finetuning, HeadName
from tasks.adopt import read_settings, weight_bytes
from tasks.glue import data as glue
from tasks.glue import probes, reading
from tasks.glue.inputs import Inputs, encode_task, encoding
from tasks.glue.own import Definition, by_name, definitions_in, name_or_definition
from tasks.glue.predictions import SplitScores, write_scores
from tasks.glue.table import GLUE, HUB_GLUE, MOST_EPOCHS, PROBES, TASKS, Task, TaskName
from tasks.reports.model_card import finetuned_card
from tasks.stage import Params, stage
from tasks.store.artifacts import LINEAGE, Artifact, read_manifest
from tasks.store.lineage import lineage_of
from tasks.text.tokenizer import copy_files
from tasks.workers import finetunes

if TYPE_CHECKING:
    from model.bert import Bert
    from model.finetuning import Classifier, Examples, Outcome
    from model.machine import Machine

    AskedTask = str | Definition
else:
    AskedTask = name_or_definition(TaskName)
Reporter = Callable[[int, str], None]  # takes the examples done, and a note
log = logging.getLogger(__name__)


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """The tasks, seeds and data, and one setting for all tasks."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (from the hub), 'probes', or a directory with TASK/train.parquet and "
        "TASK/validation.parquet (or train-*.parquet, or .tsv).",
    )
    tasks: list[AskedTask] = Field(
        list(GLUE),
        min_length=1,
        description="Tasks to finetune on: names, and definitions of your own (tasks/README.md, 'Your labels').",
    )
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
        names = [task for task in self.tasks if isinstance(task, str)]
        fitting = [name for name in TASKS if (name in PROBES) == (self.data == "probes")]
        for name in names:
            if name not in fitting:
                raise ValueError(f"data {self.data!r} has no task {name!r}; its tasks are {', '.join(fitting)}")
        own = [task.name for task in dict.fromkeys(definitions_in(self.tasks))]
        for name in own:
            if own.count(name) > 1:
                raise ValueError(f"tasks has different definitions named {name!r}; rename one of them")
        if self.epochs > MOST_EPOCHS and names:
            raise ValueError(f"epochs is {self.epochs}, but the paper's rules allow {MOST_EPOCHS}")
        if 1.0 not in self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares is {self.shares}; expected fractions above 0 and up to 1.0, with 1.0 among them")
        return self

    def runs(self) -> "list[FinetuneRun]":
        """A run for each task and seed: on all of the training data, on each share of it, without pretraining."""
        starts = [(True, share) for share in sorted(set(self.shares), reverse=True)]
        if self.baseline:
            starts.append((False, 1.0))
        tasks = [task if isinstance(task, Definition) else by_name(task, self.data) for task in self.tasks]
        shared = self.model_dump(include={*Finetuning.model_fields})
        runs = []
        for (pretrained, share), task, seed in product(starts, dict.fromkeys(tasks), range(self.seeds)):
            is_main = pretrained and share == 1.0
            keep = self.keep == "all" or (self.keep == "first" and seed == 0 and is_main)
            about = {"seed": seed, "pretrained": pretrained, "share": share, "keep": keep}
            of_task = {"data": task.data, "task": task.name, "definition": task}
            runs.append(FinetuneRun(**shared | about | of_task | task.settings()))
        return runs


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    check_is_slow = True
    data: str
    task: str
    # Not validated again: the name of a task of the table is refused for your own tasks
    definition: SkipValidation[Definition] = Field(exclude=True)
    seed: int = Field(0, ge=0, description="Seed of the head, the order of examples and dropout.")
    pretrained: bool = Field(True, description="False: random weights, the baseline without pretraining.")
    share: float = Field(1.0, gt=0, le=1, description="Fraction of the training data, drawn by the seed.")
    keep: bool = True

    def identity(self) -> dict:
        """The parameters, with digests of local files or the hub's revision in place of the data's location."""
        return self.model_dump(mode="json") | {"data": glue.identity(self.definition)}

    def label(self) -> str:
        """Task and seed, and what differs from a usual run."""
        words = [self.task, str(self.seed)]
        if not self.pretrained:
            words.append("untrained")
        if self.share < 1:
            words.append(f"{100 * self.share:g}%")
        return "-".join(words)

    def check(self) -> None:
        """Fetch and read the data before the model is pretrained. Raises InputError for bad data."""
        if self.data != "probes":
            self.check_rows()

    def check_sources(self, sources: list[Artifact]) -> None:
        """Make the probes before the model is pretrained, from the held-out text. Raises InputError for too few."""
        if self.data == "probes":
            self.check_rows(sources[0])

    def check_rows(self, start: Artifact | None = None) -> None:
        """Raise InputError for bad data, or if it has too few rows. `start`: what probes are made from."""
        from model.finetuning import steps_of

        try:
            steps_of(self.rows(self.available(start)), self)
        except InputError as error:
            share = f" The run uses a share of {self.share:g} of the data (finetune.shares)." if self.share < 1 else ""
            raise InputError(f"{self.task}: {error}{share}") from error

    def memory(self, start: Artifact, here: "Machine") -> int:
        """Bytes that the run takes; without those of the model if `start` doesn't exist yet."""
        from model import finetuning

        if read_manifest(start) is None:
            return finetunes.BYTES_A_RUN
        shape, _ = architecture_of(start)
        tokens = self.batch_size * self.max_tokens
        values = shape.layers * shape.hidden
        return finetunes.BYTES_A_RUN + finetuning.memory(weight_bytes(start), tokens, values, here)

    def head_of(self, architecture: Architecture, task: Task) -> HeadName:
        """The head of the settings; the paper's, with a warning, if transformers has no model with it."""
        native, _ = layouts.transformers_classifier(architecture, self.head, self.pooling, task.kind)
        if self.head == "native" and not native:
            why = f"transformers has no classifier for this layout and pooling {self.pooling}"
            log.warning("finetune.head is native, but %s. The head is tanh.", why)
        return "native" if native else "tanh"

    def available(self, start: Artifact | None = None) -> int:
        """The number of training rows of the task."""
        return len(reading.read(self.definition, start).tables["train"])

    def rows(self, available: int) -> int:
        """The number of training rows that this run uses."""
        return max(1, round(self.share * available))

    def examples(self) -> int:
        """The number of examples in all epochs of training; for probes, an upper limit."""
        return self.epochs * self.rows(probes.TRAIN if self.data == "probes" else self.available())


def architecture_of(start: Artifact) -> tuple[Architecture, int]:
    """The architecture of a pretrained model, and its maximum number of tokens."""
    architecture, _, length = layouts.read_config(read_settings(start.path))
    return architecture, length


@stage(version=6, varies=True)
def finetune(params: FinetuneRun, start: Artifact, out: Path) -> dict:
    """Train on the task's training data, score the model on its validation data."""
    architecture, length = architecture_of(start)
    params.check_length(length)
    with encoding:
        identity = json.dumps(params.identity()["data"], sort_keys=True)
        inputs = encode_task(identity, params.definition, params.max_tokens, start)
    task = inputs.data.task
    run = params.model_copy(update={"head": params.head_of(architecture, task)})
    work = (run, task, start.path, inputs.examples, out)
    trained = finetunes.in_worker(train_and_predict, work, params.examples(), f"finetune {params.label()}")
    validation = write_scores(inputs, trained.scores, out)
    lineage = lineage_of(start)
    (out / LINEAGE).write_text(json.dumps(lineage, indent=2) + "\n", encoding="utf-8")
    stats = statistics_of(run, inputs, trained, validation)
    if params.keep:
        copy_files(start.path, out)
        (out / "README.md").write_text(finetuned_card(params.identity(), stats, lineage), encoding="utf-8")
    return stats


class Trained(NamedTuple):
    """What training returns."""

    outcome: "Outcome"
    scores: dict[str, np.ndarray]  # (n, classes) by split
    machine: dict


def statistics_of(run: FinetuneRun, inputs: Inputs, trained: Trained, validation: dict[str, SplitScores]) -> dict:
    """The statistics of a run."""
    data = inputs.data
    outcome = trained.outcome
    return {
        **run.model_dump(include={"task", "seed", "pretrained", "share"}),
        "metric": data.task.metrics[0],
        "head": run.head,
        "machine": trained.machine,
        "train_examples": len(inputs.examples["train"]),
        "official_train_examples": data.task.sizes["train"],
        "steps": outcome.steps,
        "seconds_of_training": round(outcome.seconds, 3),
        "stopped_seconds": round(outcome.stopped_seconds, 3),
        "examples_per_second": round(outcome.examples_per_second, 1),
        "epochs": outcome.epochs,
        "data": {
            "left_out": {"train": {"empty": data.left_out}},
            "unlabelled": data.skipped,
            "shared": data.shared,
            "duplicates": data.duplicates,
            "cut": inputs.cut,
            "notes": data.notes + inputs.notes,
        },
        "validation": validation,
        **data.task.about(),
    }


# In a worker


def train_and_predict(
    run: FinetuneRun, task: Task, folder: Path, examples: "dict[str, Examples]", out: Path, report: Reporter
) -> Trained:
    """Train, predict all splits but train, and save the model if the run keeps it; may run in a separate process.

    Raises InputError if the memory is too small and for scores that are not finite.
    """
    from model import export, finetuning, machine

    here = machine.detect()
    encoder = load_encoder(run, folder)
    examples = finetuning.keep_used(encoder, examples)
    training = draw_share(run, examples.pop("train"))
    classifier = with_head(encoder, run, task)
    scale = Scale.of(training.labels) if task.own_scale else None
    if scale:
        training = scale.apply(training)
    with lack_of_memory_as_input_error(run):
        outcome = finetuning.finetune(classifier, training, run, here, run.seed, report)
        scores = {split: finetuning.predict(classifier, given, here) for split, given in examples.items()}
    if scale:
        scores = {split: scale.undo(given) for split, given in scores.items()}
        classifier.rescale(float(scale.spread), float(scale.mean))
    check_finite(scores, run)
    if run.keep:
        encoder.restore_tokens()
        export.save_classifier(classifier.cpu(), out, task.labels, run.max_tokens)
    return Trained(outcome, scores, here.describe())


@contextmanager
def lack_of_memory_as_input_error(run: FinetuneRun) -> Iterator[None]:
    """Turn the errors of a memory that is too small for the run into InputError."""
    import torch

    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InputError(
            f"There is not enough memory for {run.label()}. Run fewer at a time (CRAM_FINETUNES=1), or lower "
            "finetune.batch_size."
        ) from error


def check_finite(scores: dict[str, np.ndarray], run: FinetuneRun) -> None:
    """Raise InputError for scores of a split that are not finite."""
    if not all(np.isfinite(values).all() for values in scores.values()):
        raise InputError(f"{run.label()}: the finetuned model's scores are not finite. Lower finetune.learning_rate.")


class Scale(NamedTuple):
    """The mean and spread of a regression's labels, of any size. Training sees numbers near 0, on this scale.

    In float64, which the classifier isn't, so that predictions keep the digits of the labels.
    """

    mean: np.float64
    spread: np.float64

    @classmethod
    def of(cls, labels: np.ndarray) -> "Scale":
        """The scale of these labels; of equal ones, as they are apart from their mean."""
        return cls(np.float64(labels.mean()), np.float64(labels.std() or 1.0))

    def apply(self, training: "Examples") -> "Examples":
        """The examples with labels on this scale."""
        return replace(training, labels=(training.labels - self.mean) / self.spread)

    def undo(self, scores: np.ndarray) -> np.ndarray:
        """Numbers of a trained model as predictions of labels."""
        return scores * self.spread + self.mean


def load_encoder(run: FinetuneRun, folder: Path) -> "Bert":
    """The pretrained encoder, or one like it with the random weights of the run's seed."""
    from model import bert, export

    encoder = export.load(folder)
    return encoder if run.pretrained else bert.untrained(encoder, run.seed)


def with_head(encoder: "Bert", run: FinetuneRun, task: Task) -> "Classifier":
    """A classifier for the task, with the head of the run's settings on the encoder."""
    from model import finetuning

    return finetuning.Classifier(
        encoder,
        task.classes,
        run.dropout,
        run.seed,
        head=run.head,
        pooling=run.pooling,
        texts=1 if len(task.columns) == 1 else 2,
        kind=task.kind,
    )


def draw_share(run: FinetuneRun, training: "Examples") -> "Examples":
    """The training examples of a run, in their order."""
    if run.share == 1:
        return training
    order = np.random.default_rng(run.seed).permutation(len(training))
    chosen = order[: run.rows(len(training))]
    return training.take(np.sort(chosen))
