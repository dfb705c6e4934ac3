"""How fast is finetuning? CoLA with four seeds, and with --peers the same in transformers' Trainer, in the same run.

    python benchmarks/finetune.py [--recipe pocket-modern] [--layers 4 ...] [--peers] [--json FILE]

Needs torch, numpy, safetensors and pydantic; --peers needs transformers and accelerate too. CRAM_DEVICE and CRAM_DTYPE
work as they do for cram; `taskset` limits the cores. Inputs are random tokens: as many, as long and as often the same
as CoLA's.

Ours finetunes as cram does: several runs at a time, each in its own process, on CPUs one per core with one thread.
The Trainer has all cores for one run after the other, in its random order; then it runs as many at a time as ours,
grouped by length, which separates the effect of processes and order from that of the loop. All have the same encoder,
exported from cram for transformers (so --peers is for layouts that it has), batch, dropout, dtype, and AdamW without
clipping; on CPUs glibc keeps freed blocks (model.machine.keep_heap). Time runs from the loading of the first model to
the end of the last run.

    relative       examples per second over ours in the same round; figures are medians over the rounds
    CPU s          of all processes, for 1,000 examples
    loss           the mean of the last epoch, over the seeds
"""

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import common
import numpy as np
import torch
from common import LENGTH, aligned, positive

from model import export, finetuning, layouts, limits, machine
from model.bert import Bert
from model.errors import InputError
from model.finetuning import Classifier
from model.settings import Finetuning

CLASSES = 2
FIRST_WORD = 5  # as in the vocabulary: tokens below are special
ENDS = (2, 3)  # [CLS] and [SEP] there
ZIPF = 1.29  # how fast words become rare, so that as many differ as in CoLA
COLA = 8551  # examples of its training data
OURS = "cram"
TRAINER = "Trainer"
SEVERAL = "Trainer, by length, several"
STRATEGIES = {TRAINER: "random", SEVERAL: "group_by_length"}
RATE = "examples_per_second"
CPU = "cpu_seconds_per_1000_examples"
DROPOUTS = (  # the fields of transformers' configurations
    *("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def synthetic(count: int, vocabulary: int) -> finetuning.Examples:
    """Like CoLA with the pocket vocabulary: 11.5 tokens per example, half of them 8 to 14; 5,600 different tokens."""
    random = np.random.default_rng(0)
    words = vocabulary - FIRST_WORD
    lengths = np.clip(np.exp(random.normal(2.37, 0.38, count)).round().astype(int), 4, 47)
    shares = np.arange(1, words + 1) ** -ZIPF
    tokens = FIRST_WORD + random.choice(words, lengths.sum(), p=shares / shares.sum())
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    for ids in parts:
        ids[[0, -1]] = ENDS
    return finetuning.Examples.of(parts, random.integers(0, CLASSES, count))


def ours(folder: Path, given: finetuning.Examples, tuning: Finetuning, seed: int, threads: int) -> dict:
    """One run of ours."""
    torch.set_num_threads(threads)
    here = machine.detect()
    torch.zeros(1, device=here.device)  # starts a GPU before the clock
    begin = time.monotonic()
    cpu = time.process_time()
    encoder = export.load(folder)
    peer, _ = layouts.transformers_model(encoder.architecture)
    head = "native" if peer else "tanh"
    train = finetuning.keep_used(encoder, {"train": given})["train"]
    classifier = Classifier(encoder, CLASSES, tuning.dropout, seed, head)
    outcome = finetuning.finetune(classifier, train, tuning, here, seed, lambda *_: None)
    return {
        "examples": outcome.steps * tuning.batch_size,
        "begin": begin,
        "end": time.monotonic(),
        "cpu_seconds": time.process_time() - cpu,
        "loss": outcome.epochs[-1]["loss"],
    }


def collate(rows: list[dict]) -> dict:
    """A padded batch for the Trainer."""
    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row["input_ids"])] = torch.tensor(row["input_ids"])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def theirs(
    folder: Path, given: finetuning.Examples, tuning: Finetuning, seed: int, threads: int, strategy: str
) -> dict:
    """One run of transformers' Trainer."""
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    here = machine.detect()
    if here.device.type == "cpu":
        machine.keep_heap()
    torch.zeros(1, device=here.device)
    begin = time.monotonic()
    cpu = time.process_time()
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=CLASSES)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, tuning.dropout)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, config=config)
    labels = given.labels.tolist()
    rows = [{"input_ids": given.input(row).tolist(), "labels": label} for row, label in enumerate(labels)]
    with tempfile.TemporaryDirectory() as out:
        trainer = transformers.Trainer(model, arguments(tuning, here, seed, strategy, out), collate, rows)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return {
        "examples": trainer.state.global_step * tuning.batch_size,
        "begin": begin,
        "end": time.monotonic(),
        "cpu_seconds": time.process_time() - cpu,
        "loss": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1],
    }


def arguments(tuning: Finetuning, here: machine.Machine, seed: int, strategy: str, out: str):
    """The Trainer's settings for ours."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=out,
        num_train_epochs=tuning.epochs,
        per_device_train_batch_size=tuning.batch_size,
        learning_rate=tuning.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=tuning.warmup,  # below 1: a fraction
        adam_beta1=finetuning.BETAS[0],
        adam_beta2=finetuning.BETAS[1],
        adam_epsilon=finetuning.EPS,
        max_grad_norm=0.0,
        bf16=here.dtype is torch.bfloat16,
        fp16=here.dtype is torch.float16,
        use_cpu=here.device.type == "cpu",
        train_sampling_strategy=strategy,
        dataloader_drop_last=True,
        dataloader_pin_memory=here.device.type == "cuda",
        remove_unused_columns=False,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def turn(name: str, folder: Path, train: finetuning.Examples, tuning: Finetuning, seeds: int) -> dict:
    """All seeds once, of ours or of a peer's, in processes of their own."""
    cores = limits.cores()
    cuda = machine.detect().device.type == "cuda"
    at_once = 1 if name == TRAINER or cuda else min(cores, seeds)
    threads = max(1, cores // at_once)
    work = [(folder, train, tuning, seed, threads) for seed in range(seeds)]
    with multiprocessing.get_context("spawn").Pool(at_once) as pool:
        if name == OURS:
            runs = pool.starmap(ours, work, chunksize=1)
        else:
            runs = pool.starmap(theirs, [(*arguments, STRATEGIES[name]) for arguments in work], chunksize=1)
    examples = sum(run["examples"] for run in runs)
    seconds = max(run["end"] for run in runs) - min(run["begin"] for run in runs)
    return {
        "examples": examples,
        "seconds": seconds,
        RATE: examples / seconds,
        CPU: 1000 * sum(run["cpu_seconds"] for run in runs) / examples,
        "loss": statistics.mean(run["loss"] for run in runs),
        "at_once": at_once,
        "threads": threads,
    }


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [["", "at once", "threads", "examples/s", "relative", "CPU s", "loss"]]
    for row in rows:
        cells = [row["name"], f"{row['at_once']:.0f}", f"{row['threads']:.0f}", f"{row[RATE]:,.1f}"]
        lines.append([*cells, f"{row['relative']:.3f}", f"{row[CPU]:.2f}", f"{row['loss']:.3f}"])
    return aligned(lines)


def write_model(recipe: str, given: argparse.Namespace, folder: Path) -> Bert:
    """The recipe's model with random weights, written to a folder."""
    architecture, _ = common.settings(recipe, {"architecture": common.sizes_given(given)})
    encoder = Bert(architecture, common.entries(recipe, given), LENGTH)
    export.save(encoder, folder)
    return encoder


def main() -> None:
    """Measure, print the table, and write it to the --json file."""
    parser = common.parser(
        __doc__,
        recipe={"default": "pocket-modern", "help": "whose model"},
        **common.SIZE_OPTIONS,
        peers={"action": "store_true", "help": "transformers' Trainer too"},
        examples={"type": positive, "default": COLA, "help": "the number of training examples"},
        epochs={"type": positive, "default": 1},
        seeds={"type": positive, "default": 4, "help": "the number of runs"},
        rounds={"type": positive, "default": 1},
        json=common.JSON_OPTION,
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    names = (OURS, *STRATEGIES) if given.peers and common.installed("transformers", "accelerate") else (OURS,)
    tuning = Finetuning(epochs=given.epochs)
    with tempfile.TemporaryDirectory() as folder, common.input_errors(parser):
        here = machine.detect()
        encoder = write_model(given.recipe, given, Path(folder))
        _, why = layouts.transformers_model(encoder.architecture)
        if len(names) > 1 and why:
            raise InputError(f"There are no peers of recipe {given.recipe!r}: {why}")
        train = synthetic(given.examples, encoder.vocabulary)
        finetuning.steps_of(len(train), tuning)
        work = Path(folder), train, tuning, given.seeds
        turns = common.take_turns({name: name for name in names}, given.rounds, lambda name: turn(name, *work), RATE)
    fields = tuple(field for field in turns[0][0] if field != RATE)
    rows = [{"name": n} | common.medians(done, turns[0], RATE, fields) for n, done in zip(names, turns, strict=True)]
    about = common.about(here)
    print(
        f"{', '.join(about.values())}; {len(train):,} examples of {train.lengths.mean():.1f} tokens; "
        f"{given.seeds} seeds, {given.epochs} epochs"
    )
    print(table(rows))
    common.write_json(given.json, about | {"examples": len(train), "rounds": given.rounds, "rows": rows})


if __name__ == "__main__":
    main()
