"""How fast is pretraining, beside this machine's matrix products and, with --peers, models of transformers?

    python benchmarks/train.py --recipe pocket pocket-modern [--compile both] [--peers] [--json FILE]
    python benchmarks/train.py --layers 4 --hidden 256 --heads 4 --intermediate 768 --batch 64

Needs torch, numpy, safetensors and pydantic; --peers needs transformers too (see loops.py). CRAM_DEVICE, CRAM_DTYPE,
CRAM_MICRO_BATCH and OMP_NUM_THREADS work as they do for cram. Sequences are random, since speed does not depend on
them. The cases take turns, each time with a new model; figures are medians over the rounds. On CPUs glibc keeps freed
blocks (model.machine.keep_heap), for the peers too.

    relative               tokens per second over those of the first row in the same round
    CPU s                  of all threads, for 1,000 tokens
    MFU                    matrix products and attention, over the rate of large matrix products in this run
    forward ... overhead   % of a step's time; clipping belongs to the optimizer; overhead is the rest
"""

import argparse
import logging
import statistics
from dataclasses import replace

import common
import torch
from common import LENGTH, aligned, positive
from loops import PARTS, PEERS, WARM_UP, Case, measure

from flows.deltas import DELTAS
from model import InputError, machine

RATE, SHARES = "tokens_per_second", (*PARTS, "overhead")
CODE_VARIANTS = 64  # that torch.compile keeps of one function: each model is one


def cases(given: argparse.Namespace) -> dict[str, Case]:
    """All cases by name; a recipe's peers follow it."""
    chosen = []
    for recipe in given.recipe:
        changes: dict = {"batch_ramp": 0.0, "last_mask_fraction": None}  # so that all steps are alike
        changes |= {"batch_size": given.batch} if given.batch else {}
        architecture, training = common.settings(recipe, changes | {"architecture": common.sizes_given(given)})
        length = given.length or DELTAS[recipe].get("tokenize", {}).get("length", LENGTH)
        tokens = float((WARM_UP + given.steps) * training.batch_size * length)
        training = training.model_copy(update={"budget": tokens, "budget_unit": "tokens"})
        for compiled in {"no": [False], "yes": [True], "both": [False, True]}[given.compile]:
            vocabulary = common.entries(recipe, given)
            case = Case(recipe, None, compiled, architecture, training, vocabulary, length, given.steps)
            chosen += [case, *map(case.of_peer, PEERS if given.peers else ())]
    return {case.name: case for case in chosen}


def fitting(case: Case, here: machine.Machine, known: dict[str, int]) -> dict:
    """One turn, with the micro-batch of earlier turns or of our model; one that the memory does not hold is halved."""
    if size := known.get(case.name) or known.get(replace(case, peer=None).name):
        here = replace(here, micro_batch=size, probes=False)
    while True:
        try:
            turn = measure(case, here)
        except torch.OutOfMemoryError:
            if here.micro_batch == 1:
                raise
            here = replace(here, micro_batch=here.micro_batch // 2)
        else:
            known[case.name] = turn["micro_batch"]
            return turn


def row(case: Case, turns: list[dict], first: list[dict], limit: float) -> dict:
    """A row of the table. `limit`: GFLOP/s of matrix products."""
    medians = common.medians(turns, first, RATE, ("cpu_seconds_per_1000_tokens", *SHARES))
    gflop, compiled = medians[RATE] * case.operations() / 1e9, turns[0]["compiled"]
    return {
        "name": case.name + (" (failed: eager)" if case.compiled > compiled else ""),
        **{name: turns[0][name] for name in ("parameters", "micro_batch", "compiled")},
        "batch": case.training.batch_size,
        "length": case.length,
        "masks": case.masks,
        "vocabulary": case.vocabulary,
        **medians,
        "gflop_per_second": gflop,
        "mfu": gflop / limit,
    }


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [["", "parameters", "tokens/s", "relative", "CPU s", "GFLOP/s", "MFU", *SHARES]]
    for row in rows:
        cells = [f"{row['parameters']:,}", f"{row[RATE]:,.0f}", f"{row['relative']:.2f}"]
        cells += [f"{row['cpu_seconds_per_1000_tokens']:.3f}", f"{row['gflop_per_second']:,.1f}", f"{row['mfu']:.1%}"]
        lines.append([row["name"], *cells, *(f"{100 * row[part]:.1f}" for part in SHARES)])
    return aligned(lines)


def main() -> None:
    """Measure, print the table, and write it to the --json file."""
    parser = common.parser(
        __doc__,
        recipe={"nargs": "+", "default": ["pocket"], "help": "whose model, batch and training"},
        **common.SIZE_OPTIONS,
        batch={"type": positive, "help": "instead of the recipe's"},
        length={"type": positive, "help": "instead of the recipe's"},
        compile={"nargs": "?", "const": "yes", "default": "no", "choices": ["no", "yes", "both"]},
        peers={"action": "store_true", "help": "BERT and ModernBERT of transformers too"},
        rounds={"type": positive, "default": 5},
        steps={"type": positive, "default": 10, "help": f"a turn, after {WARM_UP} for warm-up"},
        json=common.JSON_OPTION,
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch._dynamo.config.recompile_limit = CODE_VARIANTS
    given.peers = given.peers and common.installed("transformers")
    with common.input_errors(parser):
        here, known = machine.detect(), {}
        if given.compile != "no" and not here.compiles:
            raise InputError("Nothing can be compiled here: CRAM_COMPILE is '0', or there is no C++ compiler.")
        if here.device.type == "cpu":
            machine.keep_heap()
        chosen = cases(given)
        turns = common.take_turns(chosen, given.rounds, lambda case: fitting(case, here, known), RATE)
    limit = statistics.median(turn["matrix_gflop_per_second"] for done in turns for turn in done)
    rows = [row(case, done, turns[0], limit) for case, done in zip(chosen.values(), turns, strict=True)]
    about = common.about(here)
    rounds = f"{given.rounds} rounds of {given.steps} steps"
    print(f"{', '.join(about.values())}: matrix products {limit:,.1f} GFLOP/s; {rounds}")
    print(table(rows))
    about |= {"rounds": given.rounds, "steps": given.steps, "matrix_gflop_per_second": limit, "rows": rows}
    common.write_json(given.json, about)


if __name__ == "__main__":
    main()
