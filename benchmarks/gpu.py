"""Everything that is to be measured on a GPU, in calls of less than ten minutes each. Results gather in one folder.

    python benchmarks/gpu.py pack --tokenized artifacts/tokenize/latest --glue GLUE_DIR --data carried --folder gpu
    python benchmarks/gpu.py correctness --folder gpu
    python benchmarks/gpu.py speed --folder gpu
    python benchmarks/gpu.py attention --folder gpu
    python benchmarks/gpu.py finetuning --folder gpu
    python benchmarks/gpu.py cram --data carried --minutes 30 --folder gpu
    python benchmarks/gpu.py glue --data carried --task cola mrpc --folder gpu

Needs torch, numpy, safetensors and pydantic; `pack`, which needs all of cram's packages, brings the data to a machine
without a network. A call stops after nine minutes, or --stop-after (0: never). What is in the folder is not measured
again, so the same call continues: `cram` within a run, all others with the next case. Other options are handed on to
the scripts. Without a GPU all of it runs on the CPU, much slower.

correctness  gradients of every layout beside the CPU's in fp32, eager and compiled, in each precision (correctness.py)
speed        tokens/s, MFU and memory at full size, compiled (train.py); CRAM_MICRO_BATCH fixes the micro-batch
attention    milliseconds of each of torch's kernels at full size, forward and backward; in training torch chooses
finetuning   examples a second on inputs as long as CoLA's (finetune.py)
cram         pretrains each recipe for the same minutes, always compiled, and measures its held-out loss (recipes.py)
glue         finetunes the models of cram by their recipes and scores them on all validation examples. `correlation` is
             Matthews's or Pearson's. Calls for different tasks may run side by side

A `cram` that was stopped compiles again when it goes on, on its clock, a minute of every nine: compilation belongs to
the budget. To compile once, give it a process that outlives the call (setsid nohup, --stop-after 0).
"""

import argparse
import json
import logging
import lzma
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import common
import correctness
import finetune
import numpy as np
import recipes
import torch
import torch.nn.functional as F
import train
from torch.nn.attention import SDPBackend, sdpa_kernel

from flows.recipes.deltas import DELTAS
from flows.recipes.rules import LENGTH
from model import export, finetuning, heldout, machine
from model.errors import InputError
from model.finetuning import Classifier, Examples
from model.layers import SEP
from model.settings import Architecture, Finetuning

RECIPES = ("crammed-bert", "modern", "frontier", "bert-base")
KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
WARM_UP, REPEATS = 3, 10  # of a kernel that is timed; cuDNN plans at the first
TASKS = ("cola", "sst2", "mrpc", "stsb", "rte")
ROWS_A_FILE = 1 << 17  # sequences; some 25 MB of 128 tokens each
# tokens are two bytes each; one byte of context before them says little
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
GLUE = "glue.npz"
ARRAYS = ("tokens", "ends", "labels")  # of finetuning.Examples


def check(given: argparse.Namespace) -> None:
    """Compute every layout on the device and on the CPU; print a row for each way."""
    here = machine.detect()
    ways = [(check, compiled) for check in correctness.CHECKS for compiled in (False, True)]
    ways.remove(("padded", True))  # padded sequences are read eagerly
    for layout, dtype, (check, compiled) in product(given.layout, given.dtype, ways):
        if here.compiles or not compiled:
            way = {"layout": layout, "dtype": dtype, "compiled": compiled, "check": check}
            about = way | {"device": here.device_name()}
            keep(given.folder, "correctness", about, lambda way=way: correctness.compare(here, **way))


def attention(given: argparse.Namespace) -> None:
    """Time every kernel on a micro-batch of every recipe; print a row for each."""
    here = machine.detect()
    for recipe, kernel in product(given.recipe, KERNELS):
        shape = Architecture(**DELTAS[recipe].get("pretrain", {}).get("architecture", {}))
        sizes = here.micro_batch, LENGTH, shape.heads, shape.hidden // shape.heads
        about = {"recipe": recipe, "kernel": kernel, "shape": sizes, "device": here.device_name()}
        work = kernel, sizes, here
        keep(given.folder, "attention", about, lambda work=work: {"ms": 1000 * seconds_of(*work)})


def seconds_of(kernel: str, shape: tuple[int, ...], here: machine.Machine) -> float:
    """Seconds that attention on queries, keys and values of this shape (B, S, N, H) takes, forward and backward.

    They lie in memory as those of the training model do. Raises RuntimeError if the kernel can't compute it here.
    """
    B, S, N, H = shape
    about = {"dtype": here.dtype, "device": here.device}
    qkv = torch.randn((B, S, 3, N, H), **about, requires_grad=True)
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    gradient = torch.randn(shape, **about).transpose(1, 2)

    def compute(times: int) -> None:
        for _ in range(times):
            states = F.scaled_dot_product_attention(query, key, value)
            of_queries, *_ = torch.autograd.grad(states, (query, key, value), gradient)
        of_queries.sum().item()  # waits for the device

    with sdpa_kernel(getattr(SDPBackend, kernel)):
        compute(WARM_UP)
        began = time.perf_counter()
        compute(REPEATS)
    return (time.perf_counter() - began) / REPEATS


def keep(folder: Path, part: str, about: dict, make: Callable[[], dict]) -> None:
    """Print the row of a case and write it to the folder unless it's there. A failure is its `problem`, tried again."""
    path = folder / f"{part}-{common.digest(about)}.json"
    if not path.exists() or "problem" in json.loads(path.read_text(encoding="utf-8")):
        try:
            row = make()
        except RuntimeError as error:  # of the compiler, or a full GPU
            row = {"right": False, "problem": f"{type(error).__name__}: {error}".splitlines()[0]}
        common.write_json(path, about | row)
    print(
        ", ".join(f"{name} {shown(value)}" for name, value in json.loads(path.read_text(encoding="utf-8")).items()),
        flush=True,
    )


def shown(value: object) -> str:
    """A number with four digits, or whatever else."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def glue(given: argparse.Namespace) -> None:
    """Finetune the models of these recipes that `cram` has trained, on every task that was packed."""
    tasks = packed_examples(given.data)
    if unknown := [task for task in given.task or () if task not in tasks]:
        raise InputError(f"--task {' '.join(unknown)}: {given.data} has {', '.join(tasks)}.")
    models = [path.parent for path in given.folder.glob(f"*/{recipes.RESULT}")]
    runs = {home: json.loads((home / recipes.RESULT).read_text(encoding="utf-8")) for home in sorted(models)}
    runs = {home: run for home, run in runs.items() if run["recipe"] in given.recipe}
    if not runs:
        raise InputError(f"There is no model of {', '.join(given.recipe)} in {given.folder}. Run cram first.")
    for (home, run), seed, task in product(runs.items(), range(given.seeds), given.task or tasks):
        instead = {"epochs": given.epochs, "learning_rate": given.rate}
        fields = DELTAS[run["recipe"]].get("finetune", {}) | {name: x for name, x in instead.items() if x}
        settings = Finetuning(**{name: value for name, value in fields.items() if name in Finetuning.model_fields})
        about = {"model": home.name, "task": task, "seed": seed, "epochs": settings.epochs}
        work = home, tasks[task], settings, seed
        keep(given.folder, "glue", about | {"rate": settings.learning_rate}, lambda work=work: score(*work))


def score(home: Path, splits: dict[str, Examples], settings: Finetuning, seed: int) -> dict[str, float | None]:
    """Finetune a model; its scores on the validation data."""
    here, encoder, labels = machine.detect(), export.load(home), splits["validation"].labels
    classes = int(labels.max()) + 1 if labels.dtype.kind == "i" else 1
    texts = int((splits["train"].input(0) == SEP).sum())
    used = finetuning.keep_used(encoder, splits)
    model = Classifier(encoder, classes, settings.dropout, seed, settings.head, settings.pooling, texts)
    outcome = finetuning.finetune(model, used["train"], settings, here, seed, lambda *_: None)
    found = finetuning.predictions(finetuning.predict(model, used["validation"], here), model.kind)
    return {
        "loss": outcome.epochs[-1]["loss"],
        "examples_per_second": outcome.examples_per_second,
        "accuracy": 100 * float((found == labels).mean()) if classes > 1 else None,
        "correlation": 100 * float(np.corrcoef(found, labels)[0, 1]) if classes < 3 and found.std() else None,
    }


def pack(given: argparse.Namespace) -> None:
    """Write sequences spread over those of a tokenize stage, its held-out text and the encoded examples of GLUE."""
    if not given.tokenized:
        raise InputError("pack reads what the tokenize stage has written; give its folder as --tokenized.")
    corpus = recipes.read(given.tokenized)
    count = min(len(corpus.sequences), max(1, int(given.tokens) // corpus.length))
    rows = np.linspace(0, len(corpus.sequences) - 1, count).astype(np.int64)
    given.data.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, count, ROWS_A_FILE)):
        with lzma.open(given.data / f"sequences-{number:03}.npy.xz", "wb", filters=FILTERS) as file:
            np.save(file, corpus.sequences[rows[first : first + ROWS_A_FILE]])
    (given.data / heldout.FILE).write_bytes((given.tokenized / heldout.FILE).read_bytes())
    common.write_json(given.data / "stage.json", {"stats": {"entries": corpus.vocabulary, "sequences": count}})
    if given.glue:
        most = min(corpus.length, Finetuning().max_tokens)
        np.savez_compressed(given.data / GLUE, **encoded(given.tokenized, given.glue, given.task or TASKS, most))
    size = sum(path.stat().st_size for path in given.data.iterdir()) / 1e6
    print(
        f"{count * corpus.length:,} tokens and {len(corpus.heldout.documents):,} held-out documents in {size:,.1f} MB"
    )


def encoded(tokenized: Path, data: Path, tasks: list[str], most: int) -> dict[str, np.ndarray]:
    """The encoded training and validation examples of the tasks, by task, split and array."""
    from tasks.glue.inputs import encode
    from tasks.glue.own import by_name
    from tasks.glue.reading import read
    from tasks.text.tokenizer import load_tokenizer

    tokenizer, arrays = load_tokenizer(tokenized), {}
    for task in tasks:
        tables = read(by_name(task, str(data))).tables
        for split in ("train", "validation"):
            ids, _ = encode(tables[split], tokenizer, most)
            examples = Examples.of(ids, tables[split]["label"].to_numpy())
            arrays |= {f"{task}/{split}/{name}": getattr(examples, name) for name in ARRAYS}
    return arrays


def packed_examples(folder: Path) -> dict[str, dict[str, Examples]]:
    """The packed examples of each task and split. Raises InputError if there are none."""
    if not (folder / GLUE).exists():
        raise InputError(f"There is no {GLUE} in {folder}. Pack the data with --glue.")
    tasks: dict[str, dict[str, Examples]] = {}
    with np.load(folder / GLUE) as arrays:
        for name in arrays.files[:: len(ARRAYS)]:
            task, split, _ = name.split("/")
            tasks.setdefault(task, {})[split] = Examples(*(arrays[f"{task}/{split}/{array}"] for array in ARRAYS))
    return tasks


@contextmanager
def stopped_after(minutes: float) -> Iterator[None]:
    """Interrupt the work after so many minutes, unless 0: pretraining ends with a checkpoint, other cases are lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped. The same command continues.")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure_with(script: Callable[[], None], *options: object) -> None:
    """Run another script with these options."""
    sys.argv = [script.__module__, *map(str, options)]
    script()


def measure_each(given: argparse.Namespace, script: Callable[[], None], options: list[object]) -> None:
    """Run another script for each recipe whose results are not there."""
    for recipe in given.recipe:
        path = given.folder / f"{given.part}-{recipe}.json"
        if not path.exists():
            measure_with(script, "--recipe", recipe, "--json", path, *options)


def main() -> None:
    """Measure one part and add it to the results, or pack data."""
    several, layouts, dtypes = {"nargs": "+"}, list(correctness.LAYOUTS), list(correctness.DTYPES)
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "for the results of one device"},
        recipe={**several, "default": list(RECIPES)},
        layout={**several, "default": layouts, "choices": layouts, "help": "of correctness"},
        dtype={**several, "default": dtypes, "choices": dtypes, "help": "of correctness"},
        data={"type": Path, "help": "a folder of `pack`; for cram also of the tokenize stage"},
        minutes={"type": float, "default": 30.0, "help": "to pretrain each recipe"},
        seeds={"type": common.positive, "default": 3, "help": "of glue"},
        task={**several, "help": "of glue; default: all that were packed"},
        epochs={"type": common.positive, "help": "of glue, instead of the recipe's, and of finetuning"},
        rate={"type": float, "help": "of glue, instead of the recipe's"},
        stop_after={"type": float, "default": 9.0, "metavar": "MINUTES", "help": "0: never"},
        tokenized={"type": Path, "help": "of pack: a folder of the tokenize stage"},
        glue={"type": Path, "help": "of pack: a folder of GLUE, whose tasks are encoded"},
        tokens={"type": float, "default": 6.5e7, "help": "of pack: at most this many tokens of training text"},
    )
    parser.add_argument("part", choices=["pack", "correctness", "speed", "attention", "finetuning", "cram", "glue"])
    given, others = parser.parse_known_args()
    if given.part in ("cram", "glue", "pack") and not given.data:
        parser.error(f"{given.part} needs the folder of the data; give it as --data.")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    with common.input_errors(parser), stopped_after(given.stop_after):
        match given.part:
            case "speed":
                usual = ["--batch", 4096, "--compile", "--rounds", 1, "--steps", 5, *others]
                measure_each(given, train.main, usual)
            case "finetuning":
                measure_each(given, finetune.main, ["--seeds", 1, "--epochs", given.epochs or 5, *others])
            case "cram":
                if machine.detect().compiles:  # also for the last minutes of a run that was stopped
                    os.environ["CRAM_COMPILE"] = "1"
                usual = ["--hours", given.minutes / 60, "--seeds", 1, "--keep", "--folder", given.folder]
                measure_with(recipes.main, "--recipe", *given.recipe, "--data", given.data, *usual, *others)
            case part:
                {"pack": pack, "correctness": check, "attention": attention, "glue": glue}[part](given)


if __name__ == "__main__":
    main()
