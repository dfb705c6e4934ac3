"""Pretraining speed beside this machine's matrix multiplication and, with --peers, beside transformers, in the same run.

    python benchmarks/train.py --recipe pocket pocket-modern [--compile both] [--peers] [--json FILE]
    python benchmarks/train.py --layers 4 --hidden 256 --heads 4 --intermediate 768 --batch 64

Needs torch, numpy, safetensors and pydantic; --peers needs transformers too (see loops.py). CRAM_DEVICE, CRAM_DTYPE and
CRAM_MICRO_BATCH say where and how, as they do for cram. Sequences are random: speed does not depend on what they say. All
that is compared takes turns, each time with a new model; figures are medians over the rounds. On CPUs glibc keeps freed
blocks (model.machine.keep_heap), for the peers too.

    relative               tokens a second over those of the first row in the same round
    CPU s                  of all threads, for 1,000 tokens
    MFU                    matrix products and attention, over what large matrix products of this dtype reach in this run
    forward ... overhead   % of a step's time; clipping is the optimizer's, and overhead is what is left
"""

import argparse
import importlib.util
import json
import logging
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loops import PARTS, PEERS, WARM_UP, Case, measure
from pydantic import ValidationError

from flows.deltas import DELTAS
from model import InputError, machine
from model.settings import Architecture, Training

ENTRIES, LENGTH = 32_768, 128  # of recipes that name none
SIZES = ("layers", "hidden", "heads", "intermediate", "batch", "vocabulary", "length")
RATES = ("tokens_per_second", "cpu_seconds_per_1000_tokens", *PARTS, "overhead")
CODE_VARIANTS = 64  # that torch.compile keeps of one function: each model is one


def settings(recipe: str, changes: dict) -> tuple[Architecture, Training]:
    """What a recipe pretrains, with other values for some fields. Raises InputError for what can't be."""
    if recipe not in DELTAS:
        raise InputError(f"There is no recipe {recipe!r}. Recipes: {', '.join(DELTAS)}.")
    fields = DELTAS[recipe].get("pretrain", {})
    architecture = fields.get("architecture", {}) | changes.get("architecture", {})
    training = {name: value for name, value in (fields | changes).items() if name != "architecture"}
    try:
        return Architecture(**architecture), Training(**training)
    except ValidationError as error:
        problem = error.errors()[0]
        where, message = ".".join(map(str, (recipe, *problem["loc"]))), problem["msg"].removeprefix("Value error, ")
        found = f" (found {problem['input']!r})" if problem["loc"] else ""
        raise InputError(f"{where}: {message}{found}.") from error


def cases(given: argparse.Namespace) -> list[Case]:
    """All that is to be measured; a recipe's peers follow it."""
    found = []
    for recipe in given.recipe:
        changes: dict = {"batch_ramp": 0.0, "last_mask_fraction": None}  # so that all steps are alike
        changes |= {"batch_size": given.batch} if given.batch else {}
        changes["architecture"] = {name: value for name in SIZES[:4] if (value := getattr(given, name))}
        architecture, training = settings(recipe, changes)
        vocabulary = given.vocabulary or DELTAS[recipe].get("vocabulary", {}).get("entries", ENTRIES)
        length = given.length or DELTAS[recipe].get("tokenize", {}).get("length", LENGTH)
        tokens = float((WARM_UP + given.steps) * training.batch_size * length)
        training = training.model_copy(update={"budget": tokens, "budget_unit": "tokens"})
        for compiled in {"no": [False], "yes": [True], "both": [False, True]}[given.compile]:
            case = Case(recipe, None, compiled, architecture, training, vocabulary, length, given.steps)
            found += [case, *map(case.of_peer, PEERS if given.peers else ())]
    return found


def fitting(case: Case, here: machine.Machine) -> dict:
    """One turn; a micro-batch that the memory does not hold is halved."""
    while True:
        try:
            return measure(case, here)
        except torch.OutOfMemoryError:
            if here.micro_batch == 1:
                raise
        here = replace(here, micro_batch=here.micro_batch // 2)


def take_turns(found: list[Case], here: machine.Machine, rounds: int) -> list[list[dict]]:
    """Measure all in turn, so many times; a list for each. Micro-batches stay as they are found in the first round."""
    turns: list[list[dict]] = [[] for _ in found]
    for _ in range(rounds):
        for case, done in zip(found, turns, strict=True):
            if not case.peer:
                own = done  # whose micro-batch is that of its peers, which follow, too
            known = done or own
            fixed = replace(here, micro_batch=known[-1]["micro_batch"], probes=False) if known else here
            done.append(fitting(case, fixed))
            print(f"{label(case)}: {done[-1]['tokens_per_second']:,.0f} tokens/s", file=sys.stderr)
    return turns


def label(case: Case) -> str:
    """What a row is called."""
    return (f"{case.peer}, as {case.recipe}" if case.peer else case.recipe) + (", compiled" if case.compiled else "")


def row(case: Case, turns: list[dict], first: list[dict], limit: float) -> dict:
    """A row of the table: medians. `limit`, of matrix products, in GFLOP/s."""
    medians = {name: statistics.median(turn[name] for turn in turns) for name in RATES}
    rate, speeds = "tokens_per_second", zip(turns, first, strict=True)
    gflop = medians[rate] * case.operations() / 1e9
    return {
        "name": label(case) + (" (failed: eager)" if case.compiled > turns[0]["compiled"] else ""),
        "parameters": turns[0]["parameters"],
        "batch": case.training.batch_size,
        "micro_batch": turns[0]["micro_batch"],
        "length": case.length,
        "masks": case.masks,
        "vocabulary": case.vocabulary,
        "compiled": turns[0]["compiled"],
        "relative": statistics.median(turn[rate] / other[rate] for turn, other in speeds),
        **medians,
        "gflop_per_second": gflop,
        "mfu": gflop / limit,
        "turns": turns,
    }


def table(rows: list[dict]) -> str:
    """The rows as text."""
    width = max(len(row["name"]) for row in rows)
    lines = [
        f"{'':{width}} {'parameters':>11} {'tokens/s':>10} {'relative':>8} {'CPU s':>7} {'GFLOP/s':>9} {'MFU':>6} "
        + " ".join(f"{part:>9}" for part in (*PARTS, "overhead"))
    ]
    for row in rows:
        shares = " ".join(f"{100 * row[part]:9.1f}" for part in (*PARTS, "overhead"))
        lines.append(
            f"{row['name']:{width}} {row['parameters']:11,} {row['tokens_per_second']:10,.0f} {row['relative']:8.2f} "
            f"{row['cpu_seconds_per_1000_tokens']:7.3f} {row['gflop_per_second']:9,.1f} {row['mfu']:6.1%} {shares}"
        )
    return "\n".join(lines)


def positive(text: str) -> int:
    """A whole number above 0."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main() -> None:
    """Measure, print the table, and write it as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["pocket"], help="whose model, batch and training")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive, help="in place of the recipes'")
    parser.add_argument("--compile", nargs="?", const="yes", default="no", choices=["no", "yes", "both"])
    parser.add_argument("--peers", action="store_true", help="BERT and ModernBERT of transformers too")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=10, help=f"a turn, after {WARM_UP} for warm-up")
    parser.add_argument("--threads", type=positive, help="of the CPU; else torch's choice")
    parser.add_argument("--json", type=Path, help="where to write the table, and all turns, as JSON")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch._dynamo.config.recompile_limit = CODE_VARIANTS
    if given.threads:
        torch.set_num_threads(given.threads)
    if given.peers and importlib.util.find_spec("transformers") is None:
        print("There are no peers, since transformers is not installed.")
        given.peers = False
    try:
        here = machine.detect()
        if given.compile != "no" and not here.compiles:
            raise InputError("Nothing can be compiled here: CRAM_COMPILE is '0', or there is no C++ compiler.")
        if here.device.type == "cpu":
            machine.keep_heap()
        found = cases(given)
        turns = take_turns(found, here, given.rounds)
    except InputError as error:
        parser.error(str(error))
    limit = statistics.median(turn["matrix_gflop_per_second"] for done in turns for turn in done)
    rows = [row(case, done, turns[0], limit) for case, done in zip(found, turns, strict=True)]
    about = {name: here.describe()[name] for name in ("device", "dtype")} | {"torch": torch.__version__}
    print(
        f"{', '.join(about.values())}: matrix products {limit:,.1f} GFLOP/s; {given.rounds} rounds of {given.steps} steps"
    )
    print(table(rows))
    if given.json:
        about |= {"rounds": given.rounds, "steps": given.steps, "matrix_gflop_per_second": limit}
        given.json.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
