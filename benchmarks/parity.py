"""Does finetuning score as transformers' Trainer does? The same pretrained weights, tasks and settings, several seeds.

    python benchmarks/parity.py --model artifacts/pretrain/latest --data GLUE_DIR --folder parity
    python benchmarks/parity.py --model … --data … --folder parity --tasks cola rte --seeds 5 --epochs 5 --rate 1e-4

Ours runs twice: with batches by length, the default, and in random order as the Trainer's, which shows what batches by
length do to scores. The model needs a layout that transformers has. Runs go on side by side, one per core with one
thread. Results are kept in the folder, so an interrupted comparison continues. Needs cram with its tests' extras.

    mean ± deviation   over the seeds, of the task's first metric on its validation data, times 100
    difference         to the Trainer's mean, in standard errors (Welch); beyond 2 is more than the seeds explain
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import statistics
import sys
from pathlib import Path

import common
import torch
from common import aligned, positive
from finetune import theirs

from model import InputError, export, finetuning, layouts, machine
from model.bert import Classifier
from model.settings import Finetuning

LENGTH, RANDOM, TRAINER = "cram, by length", "cram, random", "Trainer, random"
ENGINES = (LENGTH, RANDOM, TRAINER)
TASKS = ("cola", "sst2", "mrpc", "rte")
FAR = 2.0  # standard errors


def read(data: Path, task: str, model: Path, most: int | None, tokens: int) -> dict[str, finetuning.Examples]:
    """The first `most` examples of the training data, or all, and the validation data."""
    from tasks.finetune import encode
    from tasks.glue import data as glue
    from tasks.text.tokenizer import load_tokenizer

    tables, tokenizer = glue.read(str(data), task).tables, load_tokenizer(model)
    tables = {split: tables[split].slice(0, most if split == "train" else None) for split in ("train", "validation")}
    return {
        split: finetuning.Examples.of(encode(table, tokenizer, tokens)[0], table["label"].to_numpy())
        for split, table in tables.items()
    }


def one(engine: str, task: str, seed: int, given: argparse.Namespace) -> float:
    """The score of a run."""
    from tasks.glue import metrics
    from tasks.glue.tasks import TASKS as GLUE_TASKS

    torch.set_num_threads(1)
    tuning = Finetuning(
        epochs=given.epochs, learning_rate=given.rate, batches="length" if engine == LENGTH else "random", head="native"
    )
    examples = read(given.data, task, given.model, given.examples, tuning.max_tokens)
    unseen = examples["validation"]
    if engine == TRAINER:
        scores = theirs(given.model, examples["train"], tuning, seed, 1, "random", unseen)["scores"]
    else:
        here, encoder = machine.detect(), export.load(given.model)
        known = finetuning.keep_used(encoder, examples)
        classifier = Classifier(encoder, GLUE_TASKS[task].classes, tuning.dropout, seed, tuning.head)
        finetuning.finetune(classifier, known["train"], tuning, here, seed, lambda *_: None)
        scores = finetuning.predict(classifier, known["validation"], here)
    return metrics.score(GLUE_TASKS[task].metrics[0], unseen.labels, finetuning.predictions(scores))


def kept(engine: str, task: str, seed: int, given: argparse.Namespace) -> None:
    """Write the score of a run to the folder, unless it is there."""
    path = place(engine, task, seed, given)
    if not path.exists():
        score = one(engine, task, seed, given)
        common.write_whole(path, json.dumps({"engine": engine, "task": task, "seed": seed, "score": score}))
        print(f"{engine}, {task}, seed {seed}: {score:.2f}", file=sys.stderr)


def place(engine: str, task: str, seed: int, given: argparse.Namespace) -> Path:
    """The file for the score of a run, named by a digest of settings and weights."""
    about = [engine, task, seed, given.epochs, given.rate, given.examples, str(given.data.resolve()), given.digest]
    return given.folder / f"{task}-{seed}-{common.digest(about)}.json"


def errors(ours: list[float], others: list[float]) -> float:
    """The difference of the means in standard errors; 0 where all scores are the same."""
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(others) / len(others))
    difference = statistics.mean(ours) - statistics.mean(others)
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def table(scores: dict[tuple[str, str], list[float]], tasks: list[str]) -> str:
    """The comparison as text."""
    lines = [["task", *ENGINES, LENGTH, RANDOM]]
    for task in tasks:
        cells = [f"{statistics.mean(s):.2f} ± {statistics.stdev(s):.2f}" for s in (scores[e, task] for e in ENGINES)]
        apart = [errors(scores[engine, task], scores[TRAINER, task]) for engine in (LENGTH, RANDOM)]
        lines.append([task, *cells, *(f"{value:+.2f}{' (far)' if abs(value) > FAR else ''}" for value in apart)])
    return f"{aligned(lines)}\nThe last two columns: the difference to the Trainer, in standard errors."


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = common.parser(
        __doc__,
        model={"type": Path, "required": True, "help": "a pretrained artifact's folder"},
        data={"type": Path, "required": True, "help": "a folder of GLUE"},
        folder={"type": Path, "required": True, "help": "for the results"},
        tasks={"nargs": "+", "default": list(TASKS), "choices": TASKS},
        seeds={"type": positive, "default": 5},
        epochs={"type": positive, "default": Finetuning().epochs},
        rate={"type": float, "default": Finetuning().learning_rate},
        examples={"type": positive, "help": "the number of training examples of each task; else all"},
    )
    given = parser.parse_args()
    with common.input_errors(parser):
        if why := layouts.why_not_transformers(export.load(given.model).architecture):
            raise InputError(why)
        if given.seeds < 2:
            raise InputError("One seed has no spread. Give --seeds 2 or more.")
    given.folder.mkdir(parents=True, exist_ok=True)
    given.digest = hashlib.sha256((given.model / export.WEIGHTS).read_bytes()).hexdigest()
    seeds = range(given.seeds)
    runs = [(engine, task, seed, given) for seed in seeds for task in given.tasks for engine in ENGINES]
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.starmap(kept, runs, chunksize=1)
    scores: dict[tuple[str, str], list[float]] = {}
    for engine, task, *rest in runs:
        scores.setdefault((engine, task), []).append(json.loads(place(engine, task, *rest).read_text())["score"])
    examples = f"{given.examples or 'all'} training examples"
    print(f"{given.seeds} seeds, {given.epochs} epochs, rate {given.rate:g}, {examples}")
    print(table(scores, given.tasks))


if __name__ == "__main__":
    main()
