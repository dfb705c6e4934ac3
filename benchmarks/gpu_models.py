"""Parts of gpu.py that train models with recipes.py and score them: cram, glue, blimp, time-to, states."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import carried
import common
import numpy as np
import recipes
import torch

from flows.recipes.deltas import DELTAS
from model import export, finetuning, likelihood, machine, pretraining
from model.bert import Bert
from model.errors import InputError
from model.finetuning import Classifier, Examples
from model.heldout import Heldout
from model.settings import SPECIALS, Finetuning, Training
from model.wording import duration, parse_budget
from tasks.glue.pair_scores import METRICS, is_likelier, summarize

# BERT-Mini's published scores (tasks/reports/published.py): of the test data, each the best of 20 settings. Ours are of
# the validation data. The F1 of MRPC alone would not do: there, the constant answer has 81.2.
BERT_MINI = {
    "sst2": {"accuracy": 85.9},
    "stsb": {"correlation": 75.4},
    "mrpc": {"f1": 81.1, "accuracy": 71.8},
}
STATES = {"bf16": torch.bfloat16, "fp32": None}  # what `Bert.trained_in` is
RESULTS = "comparison.json"  # of recipes.py
Runs = dict[Path, dict]  # the result of each model, by its folder


def cram(given: argparse.Namespace, others: list[str]) -> None:
    """Pretrain each recipe for the same budget."""
    if len(given.budget) != 1:
        raise InputError(f"{given.part} takes one --budget, not {len(given.budget)}. Name one.")
    pretrain(given, given.budget[0], given.folder, others)


def pretrain(given: argparse.Namespace, budget: str, folder: Path, others: list[str]) -> None:
    """Pretrain as many models of each recipe as there are seeds, compiled where that is possible, and keep them."""
    amount, unit = budget_of(budget)
    if machine.detect().compiles:  # also for the last minutes of a run that was stopped
        os.environ["CRAM_COMPILE"] = "1"
    folder.mkdir(exist_ok=True)
    seeds = given.seeds or 1
    usual = [f"--{unit}", amount, "--seeds", seeds, "--keep", "--folder", folder]
    common.measure_with(recipes.main, "--recipe", *given.recipe, "--data", given.data, *usual, *others)


def budget_of(text: str) -> tuple[float, str]:
    """The amount and the unit of a budget in words. Raises InputError if it is none."""
    try:
        amount, unit = parse_budget(text)
    except ValueError as error:
        raise InputError(f"--budget: {error}.") from error
    if not unit:
        raise InputError(f"--budget {text} has no unit. Give it one, such as '{text} minutes'.")
    return amount, unit


def models(folder: Path, names: list[str] | None) -> Runs:
    """The models of these recipes, or of all, that `cram` has trained in the folder.

    Raises InputError if there are none.
    """
    found = {}
    for path in sorted(folder.glob(f"*/{recipes.RESULT}")):
        run = common.read_json(path)
        if names is None or run["recipe"] in names:
            found[path.parent] = run
    if not found:
        raise InputError(f"There is no model of {', '.join(names or ['any recipe'])} in {folder}. Run cram first.")
    return found


# GLUE


def glue(given: argparse.Namespace) -> None:
    """Finetune models that `cram` has trained, on every task that was packed."""
    finetune(given, models(given.folder, given.recipe), given.task, given.seeds or 3)


def finetune(given: argparse.Namespace, runs: Runs, tasks: list[str] | None, seeds: int) -> list[dict]:
    """Finetune each model with each seed on these tasks, or on all that were packed; a row for each."""
    packed = carried.read_examples(given.data)
    unknown = [task for task in tasks or () if task not in packed]
    if unknown:
        raise InputError(f"There is no task {', '.join(unknown)} in {given.data}, which has {', '.join(packed)}.")
    rows = []
    for home, run in runs.items():
        settings = settings_of(run["recipe"], given)
        for seed in range(seeds):
            for task in tasks or packed:
                about = {"model": home.name, "task": task, "seed": seed, "epochs": settings.epochs}
                about["rate"] = settings.learning_rate
                work = home, packed[task], settings, seed
                rows.append(common.keep(given.folder, "glue", about, lambda work=work: score(*work)))
    return rows


def settings_of(recipe: str, given: argparse.Namespace) -> Finetuning:
    """How a recipe finetunes, with the epochs and the rate of the command line if it names them."""
    fields = dict(DELTAS[recipe].get("finetune", {}))
    if given.epochs:
        fields["epochs"] = given.epochs
    if given.rate is not None:
        fields["learning_rate"] = given.rate
    return Finetuning(**{name: value for name, value in fields.items() if name in Finetuning.model_fields})


def score(home: Path, splits: dict[str, Examples], settings: Finetuning, seed: int) -> dict[str, float | None]:
    """Finetune a model; its scores on the validation data."""
    here = machine.detect()
    encoder = export.load(home)
    labels = splits["validation"].labels
    classes = int(labels.max()) + 1 if labels.dtype.kind == "i" else 1
    texts = int((splits["train"].input(0) == SPECIALS.sep).sum())
    used = finetuning.keep_used(encoder, splits)
    model = Classifier(encoder, classes, settings.dropout, seed, settings.head, settings.pooling, texts)
    outcome = finetuning.finetune(model, used["train"], settings, here, seed, lambda *_: None)
    found = finetuning.predictions(finetuning.predict(model, used["validation"], here), model.kind)
    speed = {"loss": outcome.epochs[-1]["loss"], "examples_per_second": outcome.examples_per_second}
    return speed | scores(found, labels, classes)


def scores(found: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, float | None]:
    """Scores times 100: the accuracy, the F1 of class 1, and Matthews's or Pearson's correlation. None: undefined."""
    measured: dict[str, float | None] = dict.fromkeys(("accuracy", "f1", "correlation"))
    if classes > 1:
        measured["accuracy"] = 100 * float((found == labels).mean())
    if classes == 2 and (found.any() or labels.any()):
        measured["f1"] = 100 * 2 * float((found * labels).sum() / (found.sum() + labels.sum()))
    if classes < 3 and found.std():
        measured["correlation"] = 100 * float(np.corrcoef(found, labels)[0, 1])
    return measured


# Minimal pairs


def blimp(given: argparse.Namespace) -> None:
    """Score models that `cram` has trained on the minimal pairs that were packed."""
    packed = carried.read_pairs(given.data)
    for home, run in models(given.folder, given.recipe).items():
        about = {"model": home.name, "seed": run["training"]["seed"], "pairs": len(packed.groups)}
        common.keep(given.folder, "blimp", about, lambda home=home: judge(home, packed))


def judge(home: Path, packed: carried.Pairs) -> dict[str, dict]:
    """The accuracies on each part of the pairs, as the stage minimal_pairs gives them."""
    sentences = packed.sentences
    here = machine.detect()
    found = likelihood.score_sentences(export.load(home), sentences, SPECIALS.sep, here, lambda _: None)
    right = {}
    for metric in METRICS:
        good, bad = np.split(found[metric], 2)
        right[metric] = is_likelier(good, bad)
    parts = {}
    for part, rows in packed.parts.items():
        parts[part] = summarize(right, packed.groups, rows)
    return parts


# Seconds to BERT-Mini's scores


def time_to(given: argparse.Namespace, others: list[str]) -> None:
    """Pretrain with one budget after the other, each from the start, until all finetuned models pass all scores.

    Prints, for each task and seed, the seconds of pretraining of the first model that passed. A model is finetuned once
    on each task.
    """
    budgets = [budget_of(budget) for budget in given.budget]
    if budgets != sorted(budgets) or {unit for _, unit in budgets} != {"hours"}:
        raise InputError(f"time-to takes growing budgets in time, not {', '.join(given.budget)}. Order them.")
    seconds: dict[str, dict[str, float | None]] = {task: {} for task in BERT_MINI}
    for text, (amount, _) in zip(given.budget, budgets, strict=True):
        pretrain(given, text, given.folder, others)
        runs = models(given.folder, given.recipe)
        runs = {home: run for home, run in runs.items() if run["training"]["budget"] == amount}
        for row in finetune(given, runs, list(BERT_MINI), seeds=1):
            run = runs[given.folder / row["model"]]
            of_task = seconds[row["task"]]
            seed = f"seed {run['training']['seed']}"
            if not of_task.get(seed):
                of_task[seed] = run["seconds"] if passes(row) else None
        common.write_json(given.folder / "time-to.json", {"targets": BERT_MINI, "seconds": seconds})
        if all(all(of_task.values()) for of_task in seconds.values()):
            break
    for task, of_task in seconds.items():
        words = [f"{seed} {duration(value) if value else 'not passed'}" for seed, value in of_task.items()]
        print(f"{task}, {common.shown(BERT_MINI[task])}: {', '.join(words)}")


def passes(row: dict) -> bool:
    """Whether the scores of a finetuned model are as high as BERT-Mini's."""
    return all((row.get(metric) or 0) >= value for metric, value in BERT_MINI[row["task"]].items())


# States between blocks in bf16, or in fp32


def states(given: argparse.Namespace, others: list[str]) -> None:
    """Pretrain with the states between blocks in bf16 and in fp32; print the losses and the rates side by side."""
    if machine.detect().dtype is not torch.bfloat16:
        raise InputError("states compares what training in bf16 does. This machine computes otherwise; set CRAM_DTYPE.")
    runs = {}
    for name, dtype in STATES.items():
        folder = given.folder / f"states-{name}"
        with mock.patch("model.pretraining.ready_for_training", ready_with(dtype)):
            cram(argparse.Namespace(**vars(given) | {"folder": folder}), others)
        comparison = common.read_json(folder / RESULTS)
        for recipe, of_recipe in comparison["recipes"].items():
            runs[f"{recipe}, {name}"] = of_recipe["runs"]
    held = Heldout.load(given.data)
    both = comparison | {"recipes": recipes.compare(runs, held.read_bytes)}
    common.write_json(given.folder / "states.json", both)
    print(recipes.table(both))
    for name, of_name in runs.items():
        print(f"{name}: {', '.join(f'{run[recipes.RATE]:,.0f}' for run in of_name)} tokens/s, medians of steps")


def ready_with(dtype: torch.dtype | None) -> Callable[[Bert, Training, machine.Machine], Bert]:
    """`ready_for_training`, with states of this type between the blocks (None: as the weights)."""
    real = pretraining.ready_for_training

    def ready(bert: Bert, training: Training, here: machine.Machine) -> Bert:
        bert = real(bert, training, here)
        bert.trained_in = dtype
        return bert

    return ready
