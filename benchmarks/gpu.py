"""Everything that is to be measured on a GPU, in calls of a few minutes each. Results gather in one folder.

    python benchmarks/gpu.py correctness --folder gpu
    python benchmarks/gpu.py speed --recipe crammed-bert --micro-batch 128 512 --attention flash cudnn --folder gpu
    python benchmarks/gpu.py finetuning --folder gpu
    python benchmarks/gpu.py cram --data data --minutes 30 --stop-after 9 --folder gpu
    python benchmarks/gpu.py glue --data data --minutes 30 --stop-after 9 --folder gpu

Needs torch (2.11 or newer), numpy, safetensors and pydantic. `carry.py` brings the data. Each call adds to gpu.json in
the folder and writes gpu.md from it. What is there for this device is not measured again, so a call that was stopped is
repeated to continue. Without a GPU all of it runs on the CPU, much slower.

correctness  20 steps of every layout beside the CPU in fp32: eager and compiled, each precision, resumed
speed        tokens/s, MFU, memory and the parts of a step at full size (loops.py), compiled, by micro-batch and by
             attention kernel
finetuning   examples a second of the loop, on inputs as long as CoLA's (finetune.py), after a short run for warm-up;
             eager, and compiled, which takes its time again in every run
cram         pretrains each recipe for the same minutes, always compiled, and measures its held-out loss (recipes.py)
glue         finetunes the models of cram, and writes the scores of all validation examples to glue/
"""

import argparse
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from model import InputError, finetuning, machine
from model.attention import by_kernels
from model.bert import Bert, Classifier
from model.settings import Finetuning

RECIPES = ("crammed-bert", "modern", "bert-base")
ATTENTION = {  # kernels by the name that --attention takes
    "default": (),  # torch's own choice
    "flash": (SDPBackend.FLASH_ATTENTION,),
    "cudnn": (SDPBackend.CUDNN_ATTENTION,),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION,),
    "math": (SDPBackend.MATH,),
}
NAME = (  # what tells one row from another
    *("device", "recipe", "layout", "dtype", "compiled", "resumed", "batch", "micro_batch", "attention"),
    *("minutes", "task", "seed", "epochs", "rate"),
)
USED = {"micro_batch": "micro_batch", "compiled": "compiler"}  # what of a row may differ from what was asked for
CLASSES = {"stsb": 1}  # of the tasks carried; all others have two
COLUMNS = {
    "correctness": (
        "layout",
        "dtype",
        "compiled",
        "resumed",
        "first_loss",
        "last_loss",
        "difference",
        "right",
        "problem",
    ),
    "speed": (
        *("recipe", "micro_batch", "used_micro_batch", "attention", "compiled", "used_compiler"),
        *("tokens_per_second", "mfu", "memory_gb"),
        *loops.PARTS,
        "overhead",
        "problem",
    ),
    "finetuning": ("recipe", "compiled", "examples_per_second", "loss", "problem"),
    "cram": ("recipe", "minutes", "tokens", "epochs_of_text", "nats_per_byte", "standard_error"),
    "glue": ("recipe", "minutes", "task", "seed", "epochs", "rate", "loss", "examples_per_second"),
}


def check(given: argparse.Namespace, here: machine.Machine) -> None:
    """Train every layout on the device and on the CPU."""
    compilers = [False, True] if here.compiles else [False]
    for layout in given.layout:
        ways = [
            {"layout": layout, "dtype": dtype, "compiled": compiled, "resumed": resumed}
            for dtype in given.dtype
            for compiled in compilers
            for resumed in ([False, True] if dtype == given.dtype[0] and not compiled else [False])
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

    def chosen(*_: object) -> AbstractContextManager:
        return by_kernels(*ATTENTION[attention])

    kernel = nullcontext() if attention == "fastest" else mock.patch("model.attention.fastest_kernel", chosen)
    try:
        with kernel:
            row = loops.measure(case, here)
    except RuntimeError as error:
        return {"problem": problem(error)}
    rate = row["tokens_per_second"] * case.operations()
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    return row | {"mfu": rate / 1e9 / row["matrix_gflop_per_second"], "memory_gb": memory, "problem": None}


def problem(error: RuntimeError) -> str:
    """Why a case can't be measured, in a line."""
    full = isinstance(error, torch.OutOfMemoryError)
    return "out of memory" if full else f"{type(error).__name__}: {error}".splitlines()[0]


def tune(given: argparse.Namespace, here: machine.Machine) -> None:
    """Finetune each recipe's model, with random weights, on random inputs; eager and compiled."""
    settings = Finetuning(epochs=1)
    for recipe, compiled in product(given.recipe, [False, True] if here.compiles else [False]):
        about = {"recipe": recipe, "compiled": compiled}
        if known(given, here, "finetuning", about):
            continue
        architecture, _ = common.settings(recipe, {"architecture": common.sizes_given(given)})
        train = finetune.synthetic(given.examples, common.entries(recipe, given))
        for examples in (train.take(np.arange(settings.batch_size)), train):  # the first for warm-up
            encoder = Bert(architecture, common.entries(recipe, given), LENGTH)
            used = finetuning.keep_used(encoder, {"train": examples})["train"]
            classifier = Classifier(encoder, finetune.CLASSES, settings.dropout, 0)
            compiling = replace(here, compiles_always=compiled)
            try:
                outcome = finetuning.finetune(classifier, used, settings, compiling, 0, lambda *_: None)
                row = {"examples_per_second": outcome.examples_per_second, "loss": outcome.epochs[-1]["loss"]}
            except RuntimeError as error:
                row = {"problem": problem(error)}
                break
        add(given, here, "finetuning", {"problem": None} | about | row)


def cram(given: argparse.Namespace, here: machine.Machine) -> None:
    """Pretrain each recipe for the minutes, from its last checkpoint on."""
    corpus = recipes.read(given.data)
    compiling = replace(here, compiles_always=here.compiles)  # also for the last minutes of a run that was stopped
    for recipe, about in runs(given, here, corpus):
        result = recipes.train(recipe, about, corpus, compiling, given.folder, keep=True)
        loss = result["heldout"]["nats_per_byte"]
        row = {"recipe": recipe, "minutes": given.minutes, "tokens": result["tokens"], "seconds": result["seconds"]}
        row |= {"nats_per_byte": loss["value"], "standard_error": loss["standard_error"]}
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
    tuning = Finetuning(epochs=given.epochs, learning_rate=given.rate)
    (given.folder / "glue").mkdir(exist_ok=True)
    for (recipe, run), seed, (task, splits) in product(runs(given, here, corpus), range(given.seeds), tasks.items()):
        home = recipes.home_of(given.folder, run)
        if not (home / recipes.RESULT).exists():
            raise InputError(
                f"{recipe} is not trained for {given.minutes:g} minutes in {given.folder}. Run cram first."
            )
        path = given.folder / "glue" / f"{home.name}-{task}-{seed}-{given.epochs}-{given.rate:g}.npz"
        if path.exists():
            continue
        encoder = score.load(home, corpus)
        used = finetuning.keep_used(encoder, splits)
        classifier = Classifier(encoder, CLASSES.get(task, 2), tuning.dropout, seed, tuning.head)
        outcome = finetuning.finetune(classifier, used["train"], tuning, here, seed, lambda *_: None)
        half = path.with_suffix(".half.npz")
        scores = finetuning.predict(classifier, used["validation"], here)
        np.savez(half, scores=scores, labels=splits["validation"].labels)
        row = {"recipe": recipe, "minutes": given.minutes, "task": task, "seed": seed, "epochs": given.epochs}
        row |= {"rate": given.rate, "loss": outcome.epochs[-1]["loss"]}
        add(given, here, "glue", row | {"examples_per_second": outcome.examples_per_second})
        half.replace(path)


def read(given: argparse.Namespace) -> dict[str, list[dict]]:
    """The results so far, by part."""
    path = given.folder / "gpu.json"
    return json.loads(path.read_text()) if path.exists() else {}


def name_of(row: dict) -> dict:
    """What tells a row from the others of its part."""
    return {field: row[field] for field in NAME if field in row}


def known(given: argparse.Namespace, here: machine.Machine, part: str, about: dict) -> bool:
    """Whether there is a row of this name for this device."""
    return name_of(about | {"device": here.device_name()}) in map(name_of, read(given).get(part, []))


def add(given: argparse.Namespace, here: machine.Machine, part: str, row: dict) -> None:
    """Add a row to the results, in place of one of the same name, and write both files."""
    results, row = read(given), row | {"device": here.device_name(), "torch": torch.__version__}
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
def stopped_after(minutes: float | None) -> Iterator[None]:
    """Interrupt the work after so many minutes: training ends with a checkpoint, from which the next call goes on."""
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
        epochs={"type": positive, "default": Finetuning().epochs, "help": "of glue"},
        rate={"type": float, "default": Finetuning().learning_rate, "help": "of glue"},
    )
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--micro-batch", nargs="+", type=positive, default=[256, 512, 1024], help="of speed")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="interrupt the call; repeat it to continue")
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
