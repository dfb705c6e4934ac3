"""Scores of finetuning beside transformers' Trainer: the same pretrained weights, tasks and settings, several seeds.

    python benchmarks/parity.py --model artifacts/pretrain/latest --data GLUE_DIR --folder parity
    python benchmarks/parity.py --model … --data … --folder parity --tasks cola rte --seeds 5 --epochs 5 --rate 1e-4

Ours runs twice, with batches by length, as by default, and in random order, as the Trainer's; so the table tells what batches by
length do to scores too. The model needs a layout that transformers has. Runs go on side by side, one a core with one thread.
Results are kept in the folder, so an interrupted comparison goes on. Needs cram with its tests' extras.

    mean ± deviation   over the seeds, of the task's first metric on its validation data, times 100
    difference         to the Trainer's mean, in standard errors of the difference (Welch); beyond 2 is more than the seeds explain
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from finetune import theirs
from train import positive

from model import InputError, export, finetuning, layouts, machine
from model.bert import Classifier
from model.settings import Finetuning

LENGTH, RANDOM, TRAINER = "cram, by length", "cram, random", "Trainer, random"
ENGINES = (LENGTH, RANDOM, TRAINER)
TASKS = ("cola", "sst2", "mrpc", "rte")
FAR = 2.0  # standard errors


def read(data: Path, task: str, model: Path, most: int | None, tokens: int) -> dict[str, finetuning.Examples]:
    """Training data, the first so many examples of it, and validation data."""
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
    asked = Finetuning(
        epochs=given.epochs, learning_rate=given.rate, batches="length" if engine == LENGTH else "random", head="native"
    )
    examples = read(given.data, task, given.model, given.examples, asked.max_tokens)
    unseen = examples["validation"]
    if engine == TRAINER:
        scores = theirs(given.model, examples["train"], asked, seed, 1, "random", unseen)["scores"]
    else:
        here, encoder = machine.detect(), export.load(given.model)
        known = finetuning.keep_used(encoder, examples)
        classifier = Classifier(encoder, GLUE_TASKS[task].classes, asked.dropout, seed, asked.head)
        finetuning.finetune(classifier, known["train"], asked, here, seed, lambda *_: None)
        scores = finetuning.predict(classifier, known["validation"], here)
    return metrics.score(GLUE_TASKS[task].metrics[0], unseen.labels, finetuning.predictions(scores))


def kept(engine: str, task: str, seed: int, given: argparse.Namespace) -> None:
    """Leave the score of a run in the folder, unless it is there."""
    path = place(engine, task, seed, given)
    if not path.exists():
        score = one(engine, task, seed, given)
        path.with_suffix(".half").write_text(json.dumps({"engine": engine, "task": task, "seed": seed, "score": score}))
        path.with_suffix(".half").replace(path)
        print(f"{engine}, {task}, seed {seed}: {score:.2f}", file=sys.stderr)


def place(engine: str, task: str, seed: int, given: argparse.Namespace) -> Path:
    """Where the score of a run is kept: settings and weights are in the name."""
    about = [engine, task, seed, given.epochs, given.rate, given.examples, str(given.data.resolve()), given.digest]
    return given.folder / f"{task}-{seed}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:10]}.json"


def cell(scores: list[float]) -> str:
    """Mean and deviation."""
    return f"{statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f}"


def errors(ours: list[float], others: list[float]) -> float:
    """The difference of the means in its standard errors; 0 where all scores are the same."""
    error = math.sqrt(statistics.variance(ours) / len(ours) + statistics.variance(others) / len(others))
    difference = statistics.mean(ours) - statistics.mean(others)
    return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


def table(scores: dict[tuple[str, str], list[float]], tasks: list[str]) -> str:
    """The comparison as text."""
    lines = [f"{'task':8}{''.join(f'{engine:>20}' for engine in ENGINES)}{LENGTH:>20}{RANDOM:>20}"]
    for task in tasks:
        found = [scores[engine, task] for engine in ENGINES]
        apart = [errors(found[i], found[2]) for i in (0, 1)]
        marks = [f"{value:+.2f}{' (far)' if abs(value) > FAR else ''}" for value in apart]
        lines.append(
            f"{task:8}{''.join(f'{cell(one):>20}' for one in found)}{''.join(f'{mark:>20}' for mark in marks)}"
        )
    return "\n".join([*lines, "The last two columns: the difference to the Trainer, in standard errors."])


def main() -> None:
    """Run what is not there yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a pretrained artifact's folder")
    parser.add_argument("--data", type=Path, required=True, help="a folder of GLUE")
    parser.add_argument("--folder", type=Path, required=True, help="for the results")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=positive, default=5)
    parser.add_argument("--epochs", type=positive, default=Finetuning().epochs)
    parser.add_argument("--rate", type=float, default=Finetuning().learning_rate)
    parser.add_argument("--examples", type=positive, help="to train on, of each task; else all")
    parser.add_argument("--workers", type=positive, default=len(os.sched_getaffinity(0)), help="runs at a time")
    given = parser.parse_args()
    try:
        architecture = export.load(given.model).architecture
        if why := layouts.why_not_transformers(architecture):
            raise InputError(why)
        if given.seeds < 2:
            raise InputError("One seed has no spread. Give --seeds 2 or more.")
    except InputError as error:
        parser.error(str(error))
    given.folder.mkdir(parents=True, exist_ok=True)
    given.digest = hashlib.sha256((given.model / export.WEIGHTS).read_bytes()).hexdigest()
    runs = [(engine, task, seed, given) for seed in range(given.seeds) for task in given.tasks for engine in ENGINES]
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        pool.starmap(kept, runs, chunksize=1)
    scores = {
        (engine, task): [
            json.loads(place(engine, task, seed, given).read_text())["score"] for seed in range(given.seeds)
        ]
        for engine in ENGINES
        for task in given.tasks
    }
    print(
        f"{given.seeds} seeds, {given.epochs} epochs, rate {given.rate:g}, {given.examples or 'all'} training examples"
    )
    print(table(scores, given.tasks))


if __name__ == "__main__":
    main()
