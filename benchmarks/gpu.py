"""Everything that is to be measured on a GPU, in calls of less than ten minutes each. Results gather in one folder.

    python benchmarks/gpu.py correctness --folder gpu
    python benchmarks/gpu.py speed --folder gpu
    python benchmarks/gpu.py speed --recipe crammed-bert --micro-batch 128 512 --attention flash cudnn --folder gpu
    python benchmarks/gpu.py finetuning --folder gpu
    python benchmarks/gpu.py cram --data data --minutes 30 --folder gpu
    python benchmarks/gpu.py glue --data data --minutes 30 --task cola mrpc --folder gpu

Needs torch (2.11 or newer), numpy, safetensors and pydantic. `carry.py` brings the data. Each call adds to gpu.json in
the folder and writes gpu.md from it. It stops after nine minutes, or --stop-after (0: never). What is there for this
device is not measured again, so the same call continues: `cram` within a run, all others with the next case. Without
a GPU all of it runs on the CPU, much slower.

correctness  gradients of every layout beside the CPU's in fp32, eager and compiled, in each precision; training resumed
speed        tokens/s, MFU, memory and the parts of a step at full size (loops.py), compiled, by micro-batch and by
             attention kernel. A case takes one to two minutes, most of it to compile
finetuning   examples a second of the loop on inputs as long as CoLA's (finetune.py), after a warm-up with inputs of all
             lengths, in which the compiler compiles for them; eager and compiled
cram         pretrains each recipe for the same minutes, always compiled, and measures its held-out loss (recipes.py)
glue         finetunes the models of cram by their recipes, eager, and writes the scores of all validation examples to
             glue/. Calls for different tasks may run side by side

A `cram` that was stopped compiles again when it goes on, on its clock, a minute of every nine: compilation belongs to
the budget. To compile once, give it a process that outlives the call, and `glue` too where a task takes longer (five
epochs of SST-2 take about ten minutes):

    setsid nohup python benchmarks/gpu.py cram --data data --stop-after 0 --folder gpu > cram.log 2>&1 &
"""

import argparse
import fcntl
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import carry
import common
import correctness
import finetune
import loops
import numpy as np
import recipes
import score
import torch
from common import LENGTH, positive
from torch.nn.attention import SDPBackend

from flows.deltas import DELTAS
from model import InputError, finetuning, machine
from model.attention import by_kernels, fastest_kernel
from model.bert import Bert, Classifier
from model.settings import Finetuning

RECIPES = ("crammed-bert", "modern", "frontier", "bert-base")
ATTENTION = {  # kernels by the name that --attention takes
    "default": (),  # torch's own choice
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
NAME = (  # what tells one row from another
    *("device", "recipe", "layout", "dtype", "compiled", "check", "batch", "micro_batch", "attention"),
    *("minutes", "task", "seed", "epochs", "rate", "sizes", "torch"),
)
USED = {"micro_batch": "micro_batch", "compiled": "compiler"}  # what of a row may differ from what was asked for
CLASSES = {"stsb": 1}  # of the tasks carried; all others have two
TEXTS = {"cola": 1, "sst2": 1}  # in an input; all others have two
WARM_UP = 3  # steps of finetuning for each length: CUDA graphs are recorded in the second
COLUMNS = {
    "correctness": (
        *("layout", "dtype", "compiled", "check", "parameter", "error"),
        *("first_loss", "last_loss", "difference", "right", "problem"),
    ),
    "speed": (
        *("recipe", "micro_batch", "used_micro_batch", "attention", "compiled", "used_compiler"),
        *("tokens_per_second", "mfu", "memory_gb", *loops.PARTS, "overhead", "kernels", "gpu", "problem"),
    ),
    "finetuning": ("recipe", "compiled", "examples_per_second", "loss", "problem"),
    "cram": (
        *("recipe", "batch", "minutes", "tokens", "epochs_of_text", "nats_per_byte", "standard_error"),
        *("kernels", "gpu"),
    ),
    "glue": ("recipe", "batch", "minutes", "task", "seed", "epochs", "rate", "loss", "examples_per_second"),
}


def check(given: argparse.Namespace, here: machine.Machine) -> None:
    """Compute every layout on the device and on the CPU."""
    compilers = [False, True] if here.compiles else [False]
    for layout in given.layout:
        ways = [
            {"layout": layout, "dtype": dtype, "compiled": compiled, "check": which}
            for dtype, compiled, which in product(given.dtype, compilers, correctness.CHECKS)
            if which == "gradients" or not compiled
        ]
        if ways := [way for way in ways if not known(given, here, "correctness", way)]:
            for row in correctness.check(here, ways):
                add(given, here, "correctness", row)


def measure(given: argparse.Namespace, here: machine.Machine) -> None:
    """Train each recipe at full size for some steps in every micro-batch and with every attention kernel."""
    for recipe in given.recipe:
        changes = {"batch_ramp": 0.0, "last_mask_fraction": None, "batch_size": given.batch}
        architecture, training = common.settings(recipe, changes | {"architecture": common.sizes_given(given)})
        tokens = float((loops.WARM_UP + given.steps) * given.batch * LENGTH)
        training = training.model_copy(update={"budget": tokens, "budget_unit": "tokens"})
        entries = common.entries(recipe, given)
        case = loops.Case(recipe, None, here.compiles, architecture, training, entries, LENGTH, given.steps)
        for size in given.micro_batch:
            for attention in given.attention:
                about = {"recipe": recipe, "batch": given.batch, "micro_batch": size, "attention": attention}
                about["compiled"] = case.compiled
                if not known(given, here, "speed", about):
                    row = speed(case, replace(here, micro_batch=size, probes=False), attention)
                    # a size that does not divide the batch, or code that can't be compiled, is replaced by another
                    used = {f"used_{USED[name]}": row.pop(name) for name in USED if name in row}
                    add(given, here, "speed", about | row | used)


def speed(case: loops.Case, here: machine.Machine, attention: str) -> dict:
    """The row of a case, or why it can't be measured."""
    cuda = here.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        with attention_by(attention) as kernels:
            row = loops.measure(case, here)
    except RuntimeError as error:
        return {"problem": problem(error)}
    rate = row["tokens_per_second"] * case.operations()
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    row |= {"mfu": rate / 1e9 / row["matrix_gflop_per_second"], "memory_gb": memory, "problem": None}
    return row | {"kernels": ", ".join(kernels) or None, "gpu": gpu_state(here)}


@contextmanager
def attention_by(name: str) -> Iterator[list[str]]:
    """Compute attention by a kernel of ATTENTION, or by the fastest: then gives the kernels with their milliseconds."""
    timed: list[str] = []

    @contextmanager
    def chosen(*about: object) -> Iterator[None]:
        with fastest_kernel(*about) if name == "fastest" else by_kernels(*ATTENTION[name]) as seconds:
            timed[:] = [f"{kernel} {1000 * each:.2f}" for kernel, each in (seconds or {}).items()]
            yield

    with mock.patch("model.attention.fastest_kernel", chosen):
        yield timed


def gpu_state(here: machine.Machine) -> str | None:
    """The GPU's clock, power and temperature at this moment; None on a CPU or without nvidia-smi."""
    if here.device.type == "cpu":
        return None
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().replace("\n", "; ")


def problem(error: Exception) -> str:
    """Why a case can't be measured, in a line."""
    full = isinstance(error, torch.OutOfMemoryError)
    return "out of memory" if full else f"{type(error).__name__}: {error}".splitlines()[0]


def tuning(recipe: str, **instead: float | None) -> Finetuning:
    """The recipe's settings of finetuning, with those given instead."""
    fields = DELTAS[recipe].get("finetune", {}) | {name: value for name, value in instead.items() if value is not None}
    return Finetuning(**{name: value for name, value in fields.items() if name in Finetuning.model_fields})


def classifier(encoder: Bert, settings: Finetuning, seed: int, classes: int, texts: int) -> Classifier:
    """The encoder with a new head for inputs of so many texts."""
    return Classifier(encoder, classes, settings.dropout, seed, settings.head, settings.pooling, texts)


def tune(given: argparse.Namespace, here: machine.Machine) -> None:
    """Finetune each recipe's model, with random weights, on random inputs; eager and compiled."""
    for recipe, compiled in product(given.recipe, [False, True] if here.compiles else [False]):
        about = {"recipe": recipe, "compiled": compiled}
        if known(given, here, "finetuning", about):
            continue
        architecture, _ = common.settings(recipe, {"architecture": common.sizes_given(given)})
        encoder, settings = Bert(architecture, common.entries(recipe, given), LENGTH), tuning(recipe, epochs=1)
        train = finetune.synthetic(given.examples, encoder.vocabulary)
        train = finetuning.keep_used(encoder, {"train": train})["train"]
        model = classifier(encoder, settings, 0, finetune.CLASSES, 1).to(here.device).train()
        try:
            row = epoch(model, train, settings, replace(here, compiles_always=compiled))
        except (RuntimeError, AssertionError) as error:  # the latter is what torch raises of CUDA graphs
            row = {"problem": problem(error)}
        add(given, here, "finetuning", {"problem": None} | about | row)


def epoch(model: Classifier, train: finetuning.Examples, settings: Finetuning, here: machine.Machine) -> dict:
    """Examples a second of an epoch, and its mean loss. Before it, steps on inputs of every length for warm-up."""
    finetuning.no_cudnn_attention()
    order = finetuning.batches(train.lengths, settings, np.random.default_rng(0))
    tiles = -(-train.lengths[order].max(axis=1) // finetuning.TILE)
    first = order[np.unique(tiles, return_index=True)[1]]
    count = WARM_UP * len(first) + finetuning.steps_of(len(train), settings)
    steps = finetuning.Steps(model, train, settings, here, count, lambda *_: None)
    total = torch.zeros((), device=here.device)
    for rows in np.repeat(first, WARM_UP, axis=0):
        total += steps.take(rows)
    total.zero_().item()  # waits for the device
    began = time.perf_counter()
    for rows in order:
        total += steps.take(rows)
    loss = total.item() / len(order)
    return {"examples_per_second": order.size / (time.perf_counter() - began), "loss": loss}


def cram(given: argparse.Namespace, here: machine.Machine) -> None:
    """Pretrain each recipe for the minutes, from its last checkpoint on."""
    corpus = recipes.read(given.data)
    compiling = replace(here, compiles_always=here.compiles)  # also for the last minutes of a run that was stopped
    for recipe, about in runs(given, here, corpus):
        row = {"recipe": recipe, "batch": about["training"]["batch_size"], "minutes": given.minutes}
        if (recipes.home_of(given.folder, about) / recipes.RESULT).exists() and known(given, here, "cram", row):
            continue
        with attention_by("fastest") as kernels:
            result = recipes.train(recipe, about, corpus, compiling, given.folder, keep=True)
        loss = result["heldout"]["nats_per_byte"]
        row |= {"tokens": result["tokens"], "seconds": result["seconds"], "kernels": ", ".join(kernels) or None}
        row |= {"nats_per_byte": loss["value"], "standard_error": loss["standard_error"], "gpu": gpu_state(here)}
        add(given, here, "cram", row | {"epochs_of_text": result["tokens"] / corpus.sequences.size})


def runs(given: argparse.Namespace, here: machine.Machine, corpus: recipes.Corpus) -> list[tuple[str, dict]]:
    """Each recipe with what identifies its run."""
    budget = {"budget": given.minutes / 60, "budget_unit": "hours", "seed": 0}
    budget |= {"batch_size": given.batch} if given.batch else {}
    described = []
    for recipe in given.recipe:
        architecture, training = common.settings(recipe, budget | {"architecture": common.sizes_given(given)})
        about = {"recipe": recipe, "architecture": architecture.identity(), "training": training.model_dump()}
        about |= {"data": recipes.identity(corpus), "machine": here.describe(), "torch": torch.__version__}
        described.append((recipe, about))
    return described


def glue(given: argparse.Namespace, here: machine.Machine) -> None:
    """Finetune the models that `cram` has trained for the same minutes, on every task that was carried."""
    corpus, tasks = recipes.read(given.data), carry.carried_examples(given.data)
    if unknown := [task for task in given.task or () if task not in tasks]:
        raise InputError(f"--task {' '.join(unknown)}: {given.data} has {', '.join(tasks)}.")
    eager = replace(here, compiles_always=False)  # a task has too few steps to compile for every length
    (given.folder / "glue").mkdir(exist_ok=True)
    for (recipe, run), seed, task in product(runs(given, here, corpus), range(given.seeds), given.task or tasks):
        home = recipes.home_of(given.folder, run)
        settings = tuning(recipe, epochs=given.epochs, learning_rate=given.rate)
        if not (home / recipes.RESULT).exists():
            raise InputError(
                f"{recipe} is not trained for {given.minutes:g} minutes in {given.folder}. Run cram first."
            )
        about = {"task": task, "seed": seed, "epochs": settings.epochs, "rate": settings.learning_rate}
        name = "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in about.values())
        path = given.folder / "glue" / f"{home.name}-{name}.npz"
        if path.exists():
            continue
        splits, encoder = tasks[task], score.load(home, corpus)
        used = finetuning.keep_used(encoder, splits)
        model = classifier(encoder, settings, seed, CLASSES.get(task, 2), TEXTS.get(task, 2))
        outcome = finetuning.finetune(model, used["train"], settings, eager, seed, lambda *_: None)
        half = path.with_suffix(".half.npz")
        scores = finetuning.predict(model, used["validation"], eager)
        np.savez(half, scores=scores, labels=splits["validation"].labels)
        row = {"recipe": recipe, "batch": run["training"]["batch_size"], "minutes": given.minutes} | about
        row |= {"loss": outcome.epochs[-1]["loss"], "examples_per_second": outcome.examples_per_second}
        add(given, here, "glue", row)
        half.replace(path)


def read(given: argparse.Namespace) -> dict[str, list[dict]]:
    """The results so far, by part."""
    path = given.folder / "gpu.json"
    return json.loads(path.read_text()) if path.exists() else {}


def name_of(row: dict) -> dict:
    """What tells a row from the others of its part."""
    return {field: row[field] for field in NAME if field in row}


def known(given: argparse.Namespace, here: machine.Machine, part: str, about: dict) -> bool:
    """Whether there is a row of this name for this device that is not wrong; says so."""
    rows = [row for row in read(given).get(part, []) if row.get("problem") is None and row.get("right", True)]
    if there := name_of(about | of_all(given, here)) in map(name_of, rows):
        print(f"Already in gpu.json: {part}, {', '.join(map(str, about.values()))}")
    return there


def of_all(given: argparse.Namespace, here: machine.Machine) -> dict:
    """What belongs to the name of every row: the device, torch, and sizes that are not the recipe's."""
    sizes = common.sizes_given(given) | ({"vocabulary": given.vocabulary} if given.vocabulary else {})
    return {"device": here.device_name(), "torch": torch.__version__, "sizes": sizes}


def add(given: argparse.Namespace, here: machine.Machine, part: str, row: dict) -> None:
    """Add a row to the results, in place of one of the same name, and write both files."""
    row |= of_all(given, here)
    with (given.folder / "gpu.lock").open("w") as lock:  # calls for other tasks may run beside this one
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = read(given)
        results[part] = [*(other for other in results.get(part, []) if name_of(other) != name_of(row)), row]
        common.write_whole(given.folder / "gpu.json", json.dumps(results, indent=2) + "\n")
        common.write_whole(given.folder / "gpu.md", markdown(results))
    print(
        ", ".join(f"{field} {shown(row[field])}" for field in COLUMNS[part] if row.get(field) is not None), flush=True
    )


def markdown(results: dict) -> str:
    """The results as tables."""
    lines = ["# Measured on a device"]
    for part, shared in COLUMNS.items():
        columns = (*shared, "device", "torch")
        if rows := results.get(part):
            lines += ["", f"## {part}", "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
            lines += ["| " + " | ".join(shown(row.get(column)) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def shown(value: object) -> str:
    """A cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


@contextmanager
def stopped_after(minutes: float) -> Iterator[None]:
    """Interrupt the work after so many minutes, unless 0: pretraining ends with a checkpoint, other cases are lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    timer = threading.Timer(60 * minutes, os.kill, (os.getpid(), signal.SIGINT)) if minutes else None
    try:
        if timer:
            timer.start()
        yield
    except KeyboardInterrupt:
        print("Stopped. The same command continues.")
    finally:
        if timer:
            timer.cancel()


PARTS = {"correctness": check, "speed": measure, "finetuning": tune, "cram": cram, "glue": glue}


def main() -> None:
    """Measure one part and add it to the results."""
    several = {"nargs": "+"}
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "for the results"},
        recipe={**several, "default": list(RECIPES)},
        **common.SIZE_OPTIONS,
        layout={**several, "default": list(correctness.LAYOUTS), "choices": list(correctness.LAYOUTS)},
        dtype={**several, "default": list(correctness.DTYPES), "choices": list(correctness.DTYPES)},
        attention={**several, "default": ["fastest"], "choices": ["fastest", *ATTENTION]},
        batch={"type": positive, "help": "of speed (default: 4,096), and of cram instead of the recipe's"},
        steps={"type": positive, "default": 5, "help": f"of speed, after {loops.WARM_UP} for warm-up"},
        examples={"type": positive, "default": finetune.COLA, "help": "of finetuning"},
        data={"type": Path, "help": "a folder of the tokenize stage, or of carry.py"},
        minutes={"type": float, "default": 30.0, "help": "to pretrain each recipe"},
        seeds={"type": positive, "default": 3, "help": "of glue"},
        task={**several, "help": "of glue; default: all that were carried"},
        epochs={"type": positive, "help": "of glue, instead of the recipe's"},
        rate={"type": float, "help": "of glue, instead of the recipe's"},
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--micro-batch", nargs="+", type=positive, default=[512], help="of speed")
    parser.add_argument("--stop-after", type=float, default=9.0, metavar="MINUTES", help="0: never")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part == "speed":
        given.batch = given.batch or 4096
    with common.input_errors(parser), stopped_after(given.stop_after):
        if given.part in ("cram", "glue") and not given.data:
            raise InputError(f"{given.part} reads sequences; give their folder as --data.")
        PARTS[given.part](given, machine.detect())


if __name__ == "__main__":
    main()
