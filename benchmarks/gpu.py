"""Everything that is to be measured on a GPU, in calls of less than ten minutes each. Results gather in one folder.

    python benchmarks/gpu.py pack --tokenized artifacts/tokenize/latest --data build/text --folder build/gpu
    python benchmarks/gpu.py PART --folder build/gpu [--data build/text] [--recipe NAME ...]

Needs torch, numpy, safetensors and pydantic; `pack`, which needs all of cram's packages, brings the data to a machine
without a network, and prints which files travel in which call. A call stops after nine minutes, or --stop-after (0:
never), with exit status 1. What is in the folder is not measured again, so the same call continues: within a run where
a part pretrains, all others with the next case. Other options are handed on to the scripts. Without a GPU all of it
runs on the CPU, much slower. Every result has its seconds, and the medians of the card's clock, power, memory and
temperature, which are null without nvidia-smi.

correctness  gradients of every layout beside the CPU's in fp32, eager and compiled, in each precision; and finetuning,
             recorded beside plain (correctness.py)
speed        tokens/s, MFU and memory at full size, compiled (train.py); CRAM_MICRO_BATCH fixes the micro-batch
attention    milliseconds of each of torch's kernels at full size, forward and backward; in training torch chooses
finetuning   examples a second on inputs as long as CoLA's (finetune.py)
cram         pretrains each recipe with the same budget, always compiled, and measures its held-out loss (recipes.py)
glue         finetunes the models of cram by their recipes and scores them on all validation examples. `correlation` is
             Matthews's or Pearson's. Calls for different tasks may run side by side, but slow each other down
blimp        scores the models of cram on minimal pairs, as the stage minimal_pairs does
time-to      seconds of pretraining to BERT-Mini's scores: budgets that grow, each run from the start
states       cram with the states between blocks in bf16 and in fp32, on the same tokens
wait         prints the last step of a part that works --apart, every 20 s (--every), until that ends

A `cram` that was stopped compiles again when it goes on, on its clock, a minute of every nine: compilation belongs to
the budget. With --apart a part works in a process of its own, which outlives the call and compiles once.

THE PLAN, in the order of use. Seconds are what we expect of an H100 that has started; nothing here has run on a card.
Where masks fall during a run, as in the recipes of BabyLM, the model is compiled five times, so short runs keep their
masks. Batch and decay are `tuned` (flows/recipes/rules.py) for the tokens that such a card reads.

Before it, on a machine with all packages: the text, and what travels, 58 MB a call beside the repository and the wheels
of pydantic and typing-extensions. 96 million tokens of 32,768 entries travel in two calls, with tasks and BLiMP.

    cram run babylm --until tokenize …    # likewise babylm-small, and pocket-frontier with its tokenize.max_sequences
    G="python benchmarks/gpu.py"; P="--glue GLUE_DIR --pairs BLIMP_DIR --tokens 9.6e7 --stop-after 0"
    $G pack $P --tokenized TOKENIZE_DIR --data build/strict --folder build/gpu   # of babylm; so build/small, build/mini

1. 150 s. Is the code right? What travels in call 1 of build/strict travels along.

    $G correctness --layout crammed-bert frontier --dtype fp32 bf16 --folder build/gpu

2. 580 s, with call 2 of build/strict. BabyLM strict: eight minutes of training, then BLiMP (60 s). With step 1 and the
   start, that is all of fifteen minutes. With more: '14 minutes', batch_size=512, weight_decay=0.14, and the last line
   again in the next call.

    S="--set babylm.last_mask_fraction=null babylm.batch_size=256 babylm.weight_decay=0.13"
    $G cram --recipe babylm --budget '8 minutes' $S --data build/strict --folder build/gpu --apart
    $G wait --stop-after 9.5 --folder build/gpu && $G blimp --data build/strict --folder build/gpu

3. 510 s, with build/small (19 MB). BabyLM strict-small: ten epochs, three seeds: 60 s to compile, then 100 s a seed,
   and BLiMP 40 s a seed.

    S="--set babylm-small.last_mask_fraction=null"
    $G cram --recipe babylm-small --budget '10 epochs' --seeds 3 $S --data build/small --folder build/small-gpu --apart
    $G wait --stop-after 9.5 --folder build/small-gpu && $G blimp --data build/small --folder build/small-gpu

4. 1,500 s in three calls, with build/mini. Seconds to BERT-Mini's scores: 900 s of pretraining at most, and finetuning,
   most of it SST-2. With --seeds 3, three times as long. The second line again in each further call.

    S="--set pocket-frontier.batch_size=512 pocket-frontier.weight_decay=0.1"
    $G time-to $S --data build/mini --folder build/mini-gpu --apart
    $G wait --stop-after 9.5 --folder build/mini-gpu

5. 480 s. What states in bf16 gain and cost: 100 million tokens with each, 180 and 200 s, and compiling.

    S="--set frontier.batch_size=256 frontier.weight_decay=0.32"
    $G states $S --data build/strict --folder build/gpu --apart; $G wait --stop-after 9.5 --folder build/gpu

6. 45 minutes of training, and at most 30 of finetuning, less if recorded steps are as fast as expected: the best
   recipe, beside the paper's for half of its time; then three seeds of each task, one task at a time. After each line:
   `wait`.

    S="--set frontier.batch_size=1024 frontier.weight_decay=0.13"
    $G cram --recipe frontier --budget '30 minutes' $S --data build/strict --folder build/gpu --apart
    $G cram --recipe crammed-bert --budget '15 minutes' --data build/strict --folder build/gpu --apart
    $G glue --recipe frontier crammed-bert --task cola mrpc stsb rte --data build/strict --folder build/gpu --apart
    $G glue --recipe frontier crammed-bert --task sst2 --epochs 1 --data build/strict --folder build/gpu --apart
"""

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import apart
import carried
import common
import correctness
import finetune
import gpu_models
import torch
import torch.nn.functional as F
import train
from common import keep
from torch.nn.attention import SDPBackend, sdpa_kernel

from flows.recipes.deltas import DELTAS
from flows.recipes.rules import LENGTH
from model import machine
from model.settings import Architecture

KERNELS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
WARM_UP = 3  # of a kernel that is timed; cuDNN plans at the first
REPEATS = 10  # that are timed
STOPPED = 1  # the exit status of a call that was stopped
RECIPES = ["crammed-bert", "modern", "frontier", "bert-base"]
RECIPES_OF = {"time-to": ["pocket-frontier"], "states": ["frontier"], "glue": None, "blimp": None}  # None: all trained
BUDGETS = {
    "cram": ["30 minutes"],
    "time-to": ["1 minute", "2 minutes", "4 minutes", "8 minutes"],
    "states": ["100 million tokens"],
}
HAND_ON = {"speed", "finetuning", *BUDGETS}  # parts that hand other options on to the scripts


def check(given: argparse.Namespace) -> None:
    """Compute every layout on the device and on the CPU; print a row for each way."""
    here = machine.detect()
    ways = [(check, compiled) for check in correctness.CHECKS for compiled in (False, True)]
    ways.remove(("padded", True))  # padded sequences are read eagerly
    if here.records:
        ways.append((correctness.RECORDED, True))
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


@contextmanager
def stopped_after(minutes: float) -> Iterator[None]:
    """Interrupt the work after so many minutes, unless 0: pretraining ends with a checkpoint, other cases are lost.

    Then the process ends with the status STOPPED.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
    try:
        yield
    except KeyboardInterrupt:
        print("Stopped. The same command continues.")
        sys.exit(STOPPED)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure_each(given: argparse.Namespace, script: Callable[[], None], options: list[object]) -> None:
    """Run another script for each recipe whose results are not there."""
    for recipe in given.recipe:
        path = given.folder / f"{given.part}-{recipe}.json"
        if not path.exists():
            common.measure_with(script, "--recipe", recipe, "--json", path, *options)


def options() -> argparse.ArgumentParser:
    """The command line."""
    several = {"nargs": "+"}
    layouts = list(correctness.LAYOUTS)
    dtypes = list(correctness.DTYPES)
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "for the results of one device"},
        recipe={**several, "help": "default: those of the part; of glue and blimp, all that were trained"},
        layout={**several, "default": layouts, "choices": layouts, "help": "of correctness"},
        dtype={**several, "default": dtypes, "choices": dtypes, "help": "of correctness"},
        data={"type": Path, "help": "a folder of `pack`; for cram also of the tokenize stage"},
        budget={**several, "help": "of each model, such as '14 minutes' or '10 epochs'; of time-to, several"},
        seeds={"type": common.positive, "help": "models of each recipe (default 1); of glue, finetunings of each (3)"},
        task={**several, "help": "of glue and pack; default: all that were packed, or cola, sst2, mrpc, stsb, rte"},
        epochs={"type": common.positive, "help": "of finetuning, instead of the recipe's"},
        rate={"type": float, "help": "of glue and time-to, instead of the recipe's"},
        stop_after={"type": float, "default": 9.0, "metavar": "MINUTES", "help": "0: never"},
        apart={"action": "store_true", "help": "work in a process of its own that outlives the call; `wait` waits"},
        every={"type": float, "default": 20.0, "metavar": "SECONDS", "help": "of wait, between two lines"},
        tokenized={"type": Path, "help": "of pack: a folder of the tokenize stage"},
        glue={"type": Path, "help": "of pack: a folder of GLUE, whose tasks are encoded"},
        pairs={"type": Path, "help": "of pack: minimal pairs, such as BLiMP"},
        per_group={"type": int, "default": 0, "help": "of pack: minimal pairs of each group; 0: all"},
        tokens={"type": float, "default": 6.5e7, "help": "of pack: at most this many tokens of training text"},
        call_megabytes={"type": float, "default": 58.0, "help": "of pack: of what travels in one call"},
    )
    parser.add_argument("part", choices=PARTS)
    return parser


def speed(given: argparse.Namespace, others: list[str]) -> None:
    """Measure pretraining at full size, compiled."""
    measure_each(given, train.main, ["--batch", 4096, "--compile", "--rounds", 1, "--steps", 5, *others])


def finetuning(given: argparse.Namespace, others: list[str]) -> None:
    """Measure finetuning."""
    measure_each(given, finetune.main, ["--seeds", 1, "--epochs", given.epochs or 5, *others])


PARTS: dict[str, Callable[..., None]] = {
    "pack": carried.pack,
    "correctness": check,
    "speed": speed,
    "attention": attention,
    "finetuning": finetuning,
    "cram": gpu_models.cram,
    "glue": gpu_models.glue,
    "blimp": gpu_models.blimp,
    "time-to": gpu_models.time_to,
    "states": gpu_models.states,
    "wait": apart.wait,
}
NEED_DATA = {"pack", "cram", "glue", "blimp", "time-to", "states"}
PRETRAIN = set(BUDGETS)
TAKEN_BY = {  # options, and the parts that use them; all others are for every part
    "tokenized": {"pack"},
    "glue": {"pack"},
    "pairs": {"pack"},
    "per_group": {"pack"},
    "tokens": {"pack"},
    "call_megabytes": {"pack"},
    "layout": {"correctness"},
    "dtype": {"correctness"},
    "data": NEED_DATA,
    "recipe": {"speed", "attention", "finetuning", "glue", "blimp", *PRETRAIN},
    "budget": PRETRAIN,
    "seeds": {"glue", *PRETRAIN},
    "task": {"pack", "glue"},
    "epochs": {"finetuning", "glue", "time-to"},
    "rate": {"glue", "time-to"},
    "every": {"wait"},
}


def check_options(parser: argparse.ArgumentParser, given: argparse.Namespace, others: list[str]) -> None:
    """End with an error if the part lacks its data, or an option is there that it doesn't use."""
    part = given.part
    if part in NEED_DATA and not given.data:
        parser.error(f"{part} needs the folder of the data; give it as --data.")
    if others and part not in HAND_ON:
        parser.error(f"{part} takes no {others[0]}.")
    for name, parts in TAKEN_BY.items():
        if part not in parts and getattr(given, name) != parser.get_default(name):
            parser.error(f"{part} takes no --{name.replace('_', '-')}; expected with {', '.join(sorted(parts))}.")


def main() -> None:
    """Measure one part and add it to the results, or pack data, or wait for a process."""
    command = [sys.executable, *(word for word in sys.argv if word != "--apart"), "--stop-after", "0"]
    parser = options()
    given, others = parser.parse_known_args()
    part = given.part
    check_options(parser, given, others)
    given.recipe = given.recipe or RECIPES_OF.get(part, RECIPES)
    given.budget = given.budget or BUDGETS.get(part)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    given.folder.mkdir(parents=True, exist_ok=True)
    with common.input_errors(parser), stopped_after(given.stop_after):
        if given.apart:
            apart.start(given.folder, command)
        elif part in HAND_ON:
            PARTS[part](given, others)
        else:
            PARTS[part](given)


if __name__ == "__main__":
    main()
