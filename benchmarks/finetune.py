"""Finetuning speed: CoLA with four seeds, and with --peers the same in transformers' Trainer, in the same run.

    python benchmarks/finetune.py [--recipe pocket-modern] [--layers 4 ...] [--peers] [--json FILE]
    python benchmarks/finetune.py --data GLUE_DIR --tokenizer FILE --epochs 5

Ours needs torch, numpy, safetensors and pydantic; --peers needs transformers and accelerate too, --data pyarrow and
tokenizers. CRAM_DEVICE and CRAM_DTYPE say where and in which precision, as they do for cram. Without --data, inputs are random
tokens: as many, as long and as often the same as CoLA's.

Ours finetunes as cram does: several runs at a time, each in a process of its own, on CPUs one a core with one thread. The Trainer
has all cores for one run after the other: once in its random order, and once grouped by length; and then as many runs at a time as
ours, grouped by length, which tells what the processes give and what the loop does. All have the same encoder,
exported from cram for transformers (so --peers is for layouts that it has), batch, dropout, dtype, and AdamW without clipping; and
on CPUs glibc keeps freed blocks (model.machine.keep_heap). Time runs from when the first model is loaded to the end of the last
run, with what is between two runs.

    relative       examples a second over ours in the same round; figures are medians over the rounds
    CPU s          of all processes, for 1,000 examples
    loss           the mean of the last epoch, over the seeds
"""

import argparse
import importlib.util
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from train import ENTRIES, SIZES, positive, settings

from flows.deltas import DELTAS
from model import InputError, export, finetuning, layouts, machine
from model.bert import Bert, Classifier
from model.settings import Finetuning

LENGTH, CLASSES = 128, 2
FIRST_WORD, ENDS = 5, (2, 3)  # the vocabulary fixes both: tokens below are special; [CLS] and [SEP]
ZIPF = 1.29  # how fast words become rare, so that as many differ as in CoLA
COLA = 8551  # examples of its training data
OURS, RANDOM, GROUPED, SEVERAL = "cram", "Trainer", "Trainer, by length", "Trainer, by length, several"
STRATEGIES = {RANDOM: "random", GROUPED: "group_by_length", SEVERAL: "group_by_length"}


def synthetic(count: int, vocabulary: int) -> finetuning.Examples:
    """As CoLA with the pocket vocabulary: 11.5 tokens an example, half of them 8 to 14; 5,600 different tokens."""
    random, words = np.random.default_rng(0), vocabulary - FIRST_WORD
    lengths = np.clip(np.exp(random.normal(2.37, 0.38, count)).round().astype(int), 4, 47)
    shares = np.arange(1, words + 1) ** -ZIPF
    tokens = FIRST_WORD + random.choice(words, lengths.sum(), p=shares / shares.sum())
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    for ids in parts:
        ids[[0, -1]] = ENDS
    return finetuning.Examples.of(parts, random.integers(0, CLASSES, count))


def cola(folder: Path, tokenizer: Path, count: int) -> finetuning.Examples:
    """The first examples of cola/train.parquet. Raises InputError where that can't be read."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    try:
        table = pq.read_table(folder / "cola" / "train.parquet").slice(0, count)
        encoder = Tokenizer.from_file(str(tokenizer))
        encoder.enable_truncation(LENGTH)
        found = [encoding.ids for encoding in encoder.encode_batch_fast(table["sentence"].to_pylist())]
        return finetuning.Examples.of(found, table["label"].to_numpy())
    except Exception as error:  # tokenizers raises nothing narrower
        raise InputError(
            f"{folder}/cola/train.parquet or {tokenizer} can't be read ({error}). Give a folder of GLUE as --data, and the "
            "tokenizer.json of a pretrained model as --tokenizer."
        ) from error


def ours(folder: Path, given: finetuning.Examples, asked: Finetuning, seed: int, threads: int) -> dict:
    """One run of ours."""
    torch.set_num_threads(threads)
    here = machine.detect()
    begin, cpu = time.monotonic(), time.process_time()
    encoder = export.load(folder)
    head = "native" if layouts.transformers_model(encoder.architecture) else "tanh"
    train = finetuning.keep_used(encoder, {"train": given})["train"]
    classifier = Classifier(encoder, CLASSES, asked.dropout, seed, head)
    outcome = finetuning.finetune(classifier, train, asked, here, seed, lambda *_: None)
    return {
        "examples": outcome.steps * asked.batch_size,
        "begin": begin,
        "end": time.monotonic(),
        "cpu_seconds": time.process_time() - cpu,
        "loss": outcome.epochs[-1]["loss"],
    }


def theirs(
    folder: Path,
    given: finetuning.Examples,
    asked: Finetuning,
    seed: int,
    threads: int,
    strategy: str,
    unseen: finetuning.Examples | None = None,
) -> dict:
    """One run of transformers' Trainer; with the scores (n, classes) of `unseen` examples, if there are such."""
    import transformers

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    here = machine.detect()
    if here.device.type == "cpu":
        machine.keep_heap()
    begin, cpu = time.monotonic(), time.process_time()
    names = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout", "hidden_dropout_prob")
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=CLASSES)
    for name in (*names, "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, asked.dropout)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, config=config)

    def collate(rows: list[dict]) -> dict:
        longest = max(len(row["input_ids"]) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row["input_ids"])] = torch.tensor(row["input_ids"])
        labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}

    def rows(examples: finetuning.Examples) -> list[dict]:
        labels = examples.labels.tolist()
        return [{"input_ids": examples.input(row).tolist(), "labels": label} for row, label in enumerate(labels)]

    data = rows(given)
    with tempfile.TemporaryDirectory() as out:
        arguments = transformers.TrainingArguments(
            output_dir=out,
            num_train_epochs=asked.epochs,
            per_device_train_batch_size=asked.batch_size,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=asked.warmup,  # below 1: a fraction
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
        trainer = transformers.Trainer(model, arguments, collate, data)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        end = time.monotonic()
        trainer.args.dataloader_drop_last = False
        scores = None if unseen is None else trainer.predict(rows(unseen)).predictions
    return {
        "scores": scores,
        "examples": trainer.state.global_step * asked.batch_size,
        "begin": begin,
        "end": end,
        "cpu_seconds": time.process_time() - cpu,
        "loss": [told["loss"] for told in trainer.state.log_history if "loss" in told][-1],
    }


def turn(name: str, folder: Path, train: finetuning.Examples, asked: Finetuning, given: argparse.Namespace) -> dict:
    """All seeds once, of ours or of a peer's, in processes of their own."""
    at_once = given.workers if name in (OURS, SEVERAL) else 1
    threads = max(1, given.threads // at_once)
    work = [(folder, train, asked, seed, threads) for seed in range(given.seeds)]
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
        "examples_per_second": examples / seconds,
        "cpu_seconds_per_1000_examples": 1000 * sum(run["cpu_seconds"] for run in runs) / examples,
        "loss": statistics.mean(run["loss"] for run in runs),
        "at_once": at_once,
        "threads": threads,
    }


def row(name: str, turns: list[dict], first: list[dict]) -> dict:
    """A row of the table: medians."""
    rate = "examples_per_second"
    medians = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    relative = statistics.median(turn[rate] / other[rate] for turn, other in zip(turns, first, strict=True))
    return {"name": name, **medians, "relative": relative, "turns": turns}


def table(rows: list[dict]) -> str:
    """The rows as text."""
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'':{width}} {'at once':>7} {'threads':>7} {'examples/s':>10} {'relative':>8} {'CPU s':>7} {'loss':>6}"]
    for row in rows:
        lines.append(
            f"{row['name']:{width}} {row['at_once']:7.0f} {row['threads']:7.0f} {row['examples_per_second']:10,.1f} "
            f"{row['relative']:8.3f} {row['cpu_seconds_per_1000_examples']:7.2f} {row['loss']:6.3f}"
        )
    return "\n".join(lines)


def options() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="pocket-modern", help="whose model")
    for name in (*SIZES[:4], "vocabulary"):
        parser.add_argument(f"--{name}", type=positive, help="in place of the recipe's")
    parser.add_argument("--peers", action="store_true", help="transformers' Trainer too")
    parser.add_argument("--data", type=Path, help="a folder of GLUE, with cola/train.parquet; else random tokens")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, for --data")
    parser.add_argument("--examples", type=positive, default=COLA, help="to train on; the first so many")
    parser.add_argument("--epochs", type=positive, default=1)
    parser.add_argument("--batch", type=positive, default=Finetuning().batch_size)
    parser.add_argument("--seeds", type=positive, default=4, help="runs")
    parser.add_argument("--rounds", type=positive, default=1)
    parser.add_argument("--workers", type=positive, help="of our runs at a time; else one a core, on GPUs one")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)), help="of the CPU, in all")
    parser.add_argument("--json", type=Path, help="where to write the table, and all turns, as JSON")
    return parser


def model(given: argparse.Namespace, folder: Path) -> Bert:
    """The recipe's model with random weights, written to a folder."""
    changes = {name: value for name in SIZES[:4] if (value := getattr(given, name))}
    architecture, _ = settings(given.recipe, {"architecture": changes})
    if given.peers and (why := layouts.why_not_transformers(architecture)):
        raise InputError(f"There are no peers of recipe {given.recipe!r}: {why}")
    vocabulary = given.vocabulary or DELTAS[given.recipe].get("vocabulary", {}).get("entries", ENTRIES)
    encoder = Bert(architecture, vocabulary, LENGTH)
    export.save(encoder, folder)
    return encoder


def main() -> None:
    """Measure, print the table, and write it as JSON where that is asked for."""
    parser = options()
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if given.peers and None in map(importlib.util.find_spec, ("transformers", "accelerate")):
        print("There are no peers, since transformers or accelerate is not installed.")
        given.peers = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            here = machine.detect()
            given.workers = given.workers or (1 if here.device.type == "cuda" else min(given.threads, given.seeds))
            asked = Finetuning(epochs=given.epochs, batch_size=given.batch)
            encoder = model(given, Path(folder))
            if given.data and not given.tokenizer:
                raise InputError("--data holds text; give the tokenizer.json of a pretrained model as --tokenizer.")
            examples = cola(given.data, given.tokenizer, given.examples) if given.data else None
            train = examples or synthetic(given.examples, encoder.vocabulary)
            finetuning.steps_of(len(train), asked)
        except InputError as error:
            parser.error(str(error))
        names = (OURS, *STRATEGIES) if given.peers else (OURS,)
        turns: dict[str, list[dict]] = {name: [] for name in names}
        for _ in range(given.rounds):
            for name, done in turns.items():
                done.append(turn(name, Path(folder), train, asked, given))
                print(f"{name}: {done[-1]['examples_per_second']:,.1f} examples/s", file=sys.stderr)
    rows = [row(name, done, turns[OURS]) for name, done in turns.items()]
    about = {name: here.describe()[name] for name in ("device", "dtype")} | {"torch": torch.__version__}
    tokens = {"examples": len(train), "tokens": len(train.tokens), "different_tokens": len(np.unique(train.tokens))}
    print(
        f"{', '.join(about.values())}; {len(train):,} examples of {train.lengths.mean():.1f} tokens, "
        f"{tokens['different_tokens']:,} different ones; {given.seeds} seeds, {asked.epochs} epochs, batch {asked.batch_size}"
    )
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps(about | tokens | {"rounds": given.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
