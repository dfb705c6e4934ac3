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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field, SkipValidation, model_validator

from model import layouts
from model.errors import InputError
from model.settings import Architecture, Finetuning, HeadName
from model.wording import counted
from tasks.adopt import weight_bytes
from tasks.glue import data as glue
from tasks.glue import metrics, probes, reading
from tasks.glue.own import Definition, by_name, definitions_in, name_or_definition
from tasks.glue.table import GLUE, HUB_GLUE, LABEL, MOST_EPOCHS, PROBES, TASKS, Task, TaskName
from tasks.glue.tags import within_words
from tasks.reports.model_card import finetuned_card
from tasks.stage import Params, stage
from tasks.store.artifacts import LINEAGE, Artifact, read_manifest
from tasks.store.lineage import lineage_of
from tasks.text.tokenizer import FILES, load_tokenizer
from tasks.text.wordpiece import CONTINUES
from tasks.workers import finetunes

if TYPE_CHECKING:
    import pandas as pd

    from model.finetuning import Examples, Outcome
    from model.machine import Machine

Reporter = Callable[[int, str], None]  # takes the examples done, and a note
log = logging.getLogger(__name__)


class Finetune(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """The tasks, seeds and data, and one setting for all tasks."""

    data: str = Field(
        HUB_GLUE.repository,
        description="'nyu-mll/glue' (from the hub), 'probes', or a directory with TASK/train.parquet and "
        "TASK/validation.parquet (or train-*.parquet, or .tsv).",
    )
    tasks: list[name_or_definition(TaskName)] = Field(
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
        fitting = [name for name in TASKS if (name in PROBES) == (self.data == "probes")]
        names = [task for task in self.tasks if isinstance(task, str)]
        if wrong := [name for name in names if name not in fitting]:
            raise ValueError(f"data {self.data!r} has no task {wrong[0]!r}; its tasks are {', '.join(fitting)}")
        own = [task.name for task in dict.fromkeys(definitions_in(self.tasks))]
        if twice := [name for name in own if own.count(name) > 1]:
            raise ValueError(f"tasks has different definitions named {twice[0]!r}; give each a name of its own")
        if self.epochs > MOST_EPOCHS and names:
            raise ValueError(f"epochs is {self.epochs}, but the paper's rules allow {MOST_EPOCHS}")
        if 1.0 not in self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError(f"shares is {self.shares}; expected fractions above 0 and up to 1.0, with 1.0 among them")
        return self

    def runs(self) -> "list[FinetuneRun]":
        """A run for each task and seed: on all of the training data, on each share of it, without pretraining."""
        starts = [(True, share) for share in sorted(set(self.shares), reverse=True)]
        starts += [(False, 1.0)] if self.baseline else []
        tasks = [task if isinstance(task, Definition) else by_name(task, self.data) for task in self.tasks]
        shared, runs = self.model_dump(include={*Finetuning.model_fields}), []
        for (pretrained, share), task, seed in product(starts, dict.fromkeys(tasks), range(self.seeds)):
            main = pretrained and share == 1.0
            keep = self.keep == "all" or (self.keep == "first" and seed == 0 and main)
            about = {"seed": seed, "pretrained": pretrained, "share": share, "keep": keep}
            of_task = {"data": task.data, "task": task.name, "definition": task} | task.settings()
            runs.append(FinetuneRun(**shared | about | of_task))
        return runs


class FinetuneRun(Params, Finetuning, frozen=True, extra="forbid", allow_inf_nan=False):
    """One task with one seed."""

    check_is_slow = True
    data: str
    task: str
    # Not validated again: the name of a task of the table is refused to tasks of one's own
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
        share = f"{100 * self.share:g}%" if self.share < 1 else ""
        return "-".join(filter(None, (self.task, str(self.seed), "" if self.pretrained else "untrained", share)))

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
            share = f" That is a share of {self.share:g} (finetune.shares)." if self.share < 1 else ""
            raise InputError(f"{self.task}: {error}{share}") from error

    def memory(self, start: Artifact, here: "Machine") -> int:
        """Bytes that the run takes; without those of the model if `start` doesn't exist yet."""
        from model import finetuning

        if read_manifest(start) is None:
            return finetunes.BYTES_A_RUN
        shape, tokens = architecture_of(start)[0], self.batch_size * self.max_tokens
        return finetunes.BYTES_A_RUN + finetuning.memory(weight_bytes(start), tokens, shape.layers * shape.hidden, here)

    def head_of(self, architecture: Architecture, task: Task) -> HeadName:
        """The head that is asked for; with a warning, the paper's if transformers has no such model."""
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
    architecture, _, length = layouts.read_config(json.loads((start.path / "config.json").read_text(encoding="utf-8")))
    return architecture, length


@dataclass(frozen=True)
class Inputs:
    """A task's data as text and as token ids."""

    data: reading.Data
    examples: "dict[str, Examples]"
    cut: dict[str, int]  # inputs longer than max_tokens, by split
    seen: dict[str, np.ndarray]  # by split, which words have a label in `examples`, if words have labels
    notes: list[str]  # warnings


encoding = threading.Lock()  # the first of several seeds encodes the inputs; the others wait for it


@functools.lru_cache(maxsize=len(TASKS))  # for all seeds and shares
def encoded_inputs(identity: str, task: Definition, tokens: int, start: Artifact) -> Inputs:
    """Read and encode a task's data. `identity` has the digests of the data: a changed file is read again."""
    from model.finetuning import Examples

    checked = reading.read(task, start)
    tokenizer, examples, cut, seen, notes = load_tokenizer(start.path), {}, {}, {}, []
    for split, table in checked.tables.items():
        labels = np.array(table[LABEL].tolist()) if checked.task.kind == "multilabel" else table[LABEL].to_numpy()
        if checked.task.kind == "tokens":
            within = within_words(checked.task.labels) if split == "train" else None
            ids, longer, labels, seen[split] = encode_words(table, tokenizer, tokens, within)
            unread = ~seen[split]
        else:
            ids, longer = encode(table, tokenizer, tokens)
            unread = np.array([len(one) for one in ids]) <= 1 + len(checked.task.columns)  # [CLS] and [SEP]
        if unread.any():
            what = counted(len(unread), "word" if split in seen else "input")
            notes.append(f"{task.name}: {unread.sum():,} of {what} of {split} have no token that the model reads.")
        examples[split], cut[split] = Examples.of(ids, labels), sum(longer)
        if cut[split]:
            what = f"{cut[split]:,} of {counted(len(ids), 'input')} of {split}"
            notes.append(f"{task.name}: {what} are cut to {tokens} tokens (finetune.max_tokens).")
    for note in notes:
        log.warning(note)
    return Inputs(checked, examples, cut, seen, notes)


def encode(table: "pd.DataFrame", tokenizer, max_tokens: int) -> tuple[list[list[int]], list[bool]]:
    """Token ids of [CLS] A [SEP] (B [SEP]), and which inputs were cut. In a pair, the longer text is cut first."""
    tokenizer.enable_truncation(max_tokens, strategy="longest_first")
    texts = [table[name].tolist() for name in table.columns if name != LABEL]
    inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
    encodings = tokenizer.encode_batch_fast(inputs)
    return [one.ids for one in encodings], [bool(one.overflowing) for one in encodings]


def encode_words(
    table: "pd.DataFrame", tokenizer, max_tokens: int, within: np.ndarray | None = None
) -> tuple[list, list, np.ndarray, np.ndarray]:
    """As `encode`, for lists of words; with the labels of tokens, one on the first of a word, and which words have one.

    The other words are behind the cut, or have no token. Labels are those of all inputs, words those of all rows.
    `within`: by class, the label of what the tokenizer takes for further words in a word, as in `U.N.`; None: they have
    none. In plain text, where nothing says that they are one word, a model must know them (`cram predict`).
    """
    from model.finetuning import UNLABELLED

    tokenizer.enable_truncation(max_tokens)
    encodings = tokenizer.encode_batch(table[reading.TOKENS].map(list).tolist(), is_pretokenized=True)
    labels, seen = [], []
    for encoding, given in zip(encodings, table[LABEL], strict=True):
        words = np.array([-1 if word is None else word for word in encoding.word_ids])
        first = (words >= 0) & (words != np.append(-1, words[:-1]))
        labels.append(np.where(first, np.append(given, UNLABELLED)[words], UNLABELLED))
        if within is not None:
            further = (words >= 0) & ~first & [not token.startswith(CONTINUES) for token in encoding.tokens]
            labels[-1][further] = within[np.array(given)[words[further]]]
        seen.append(np.isin(np.arange(len(given)), words))
    return [e.ids for e in encodings], [bool(e.overflowing) for e in encodings], *map(np.concatenate, (labels, seen))


def train_and_predict(
    run: FinetuneRun, task: Task, folder: Path, examples: "dict[str, Examples]", out: Path, report: Reporter
) -> "tuple[Outcome, dict[str, np.ndarray], dict]":
    """Train, predict all splits but train, and save the model if the run keeps it; may run in a process of its own.

    Returns how training went, the scores (n, classes) by split, and the machine. Raises InputError if the memory is too
    small and for scores that are not finite.
    """
    import torch

    from model import bert, export, finetuning, machine
    from model.finetuning import Classifier

    here, encoder = machine.detect(), export.load(folder)
    if not run.pretrained:
        encoder = bert.Bert(encoder.architecture, encoder.vocabulary, encoder.length, seed=run.seed)
    examples = finetuning.keep_used(encoder, examples)
    training = examples.pop("train")
    if run.share < 1:
        order = np.random.default_rng(run.seed).permutation(len(training))
        training = training.take(np.sort(order[: run.rows(len(training))]))
    if task.own_scale:  # of any size: training sees numbers near 0
        mean, spread = training.labels.mean(), training.labels.std() or 1.0
        training = replace(training, labels=(training.labels - mean) / spread)
    layers = {"head": run.head, "pooling": run.pooling, "texts": len(task.columns), "kind": task.kind}
    classifier = Classifier(encoder, task.classes, run.dropout, run.seed, **layers)
    try:
        outcome = finetuning.finetune(classifier, training, run, here, run.seed, report)
        scores = {split: finetuning.predict(classifier, given, here) for split, given in examples.items()}
        if task.own_scale:  # in float64, which the classifier isn't
            scores = {split: given * np.float64(spread) + mean for split, given in scores.items()}
            classifier.rescale(float(spread), float(mean))
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
    return outcome, scores, here.describe()


def answers(inputs: Inputs, split: str, scores: np.ndarray) -> tuple[Sequence, Sequence]:
    """The labels of a split and the predictions: one for each example, or an array for each sentence.

    A word that the model hasn't seen has the tag that is the most frequent in training.
    """
    from model.finetuning import predictions

    labels, found = inputs.examples[split].labels, predictions(scores, inputs.data.task.kind)
    if inputs.data.task.kind != "tokens":
        return labels, found
    of_rows = inputs.data.tables[split][LABEL]
    tags = np.full(len(inputs.seen[split]), metrics.usual_tag(inputs.examples["train"].labels))
    tags[inputs.seen[split]] = found
    return of_rows.map(np.array).tolist(), np.split(tags, np.cumsum(of_rows.map(len))[:-1])


def write_scores(inputs: Inputs, raw: dict[str, np.ndarray], out: Path) -> dict[str, dict]:
    """Write predictions.parquet and scores.json. `raw`: scores (n, classes) by split. Returns the metrics by split."""
    task, validation, written = inputs.data.task, {}, []
    for split, scores in raw.items():
        table, (labels, predicted) = inputs.data.tables[split], answers(inputs, split, scores)
        about = metrics.score_task(task, labels, predicted, inputs.examples["train"].labels)
        validation[split] = {"examples": len(labels), "official_examples": task.sizes[split]} | about
        rows = {"split": [split] * len(labels), "row": range(len(labels))}
        rows |= {name: pa.array(table[name], pa.large_string()) for name in task.columns}
        if task.kind == "tokens":
            rows |= {reading.TOKENS: table[reading.TOKENS].map(list).tolist()}
        rows |= {LABEL: task.in_words(labels), "prediction": task.in_words(predicted)}
        written.append(pa.table(rows if task.kind == "tokens" else rows | {"scores": list(scores)}))
    pq.write_table(pa.concat_tables(written), out / "predictions.parquet")
    (out / "scores.json").write_text(json.dumps(validation, indent=2) + "\n", encoding="utf-8")
    return validation


@stage(version=5, varies=True)
def finetune(params: FinetuneRun, start: Artifact, out: Path) -> dict:
    """Train on the task's training data, score the model on its validation data."""
    architecture, length = architecture_of(start)
    params.check_length(length)
    with encoding:
        identity = json.dumps(params.identity()["data"], sort_keys=True)
        inputs = encoded_inputs(identity, params.definition, params.max_tokens, start)
    task, checked = inputs.data.task, inputs.data
    run = params.model_copy(update={"head": params.head_of(architecture, task)})
    work = run, task, start.path, inputs.examples, out
    outcome, raw, machine = finetunes.in_worker(
        train_and_predict, work, params.examples(), f"finetune {params.label()}"
    )
    validation = write_scores(inputs, raw, out)
    lineage = lineage_of(start)
    (out / LINEAGE).write_text(json.dumps(lineage, indent=2) + "\n", encoding="utf-8")
    stats = {
        **params.model_dump(include={"task", "seed", "pretrained", "share"}),
        "metric": task.metrics[0],
        "head": run.head,
        "machine": machine,
        "train_examples": len(inputs.examples["train"]),
        "official_train_examples": task.sizes["train"],
        "steps": outcome.steps,
        "seconds_of_training": round(outcome.seconds, 3),
        "stopped_seconds": round(outcome.stopped_seconds, 3),
        "examples_per_second": round(outcome.examples_per_second, 1),
        "epochs": outcome.epochs,
        "data": {
            "left_out": {"train": {"empty": checked.left_out}},
            "unlabelled": checked.skipped,
            "shared": checked.shared,
            "duplicates": checked.duplicates,
            "cut": inputs.cut,
            "notes": checked.notes + inputs.notes,
        },
        "validation": validation,
        **task.about(),
    }  # fmt: skip
    if params.keep:
        for file in FILES:
            shutil.copyfile(start.path / file, out / file)
        (out / "README.md").write_text(finetuned_card(params.identity(), stats, lineage), encoding="utf-8")
    return stats
