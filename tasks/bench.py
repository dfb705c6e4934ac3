"""What bounds training on this machine: text and disk are measured here, training in model/bench.py; and a page of all.

`cram bench` calls it. It is not a stage: its results are no artifact.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from model import bench
from model.bench import OPTIMIZER, WAITING, Measured, Speed, Trial
from model.bert import Bert
from model.forward import COMPILE_FROM_SECONDS
from model.machine import DTYPES, Machine, matrix_rate
from model.settings import Training
from model.wording import duration
from tasks.corpus.documents import Found
from tasks.corpus.pydocs import installed, package_documents
from tasks.reports.markdown import page, render
from tasks.store import home
from tasks.store.errors import disk_errors_as_input_errors
from tasks.text.encoder import Encoder
from tasks.text.words import Normaliser
from tasks.vocabulary import count_portions, sum_counts, train_wordpiece
from tasks.workers.processes import workers

COMPILES_FROM = 60.0  # seconds for all measurements; compiling takes as long by itself
SAMPLE_BYTES = 1_000_000  # of text to tokenize
BLOCK = 1 << 23  # bytes written at once
FILE_BYTES = 1 << 28  # of the file that is written, at most
MUCH = 0.05  # share of a step that waiting may take
OFTEN = 0.2  # share of a step that the optimizer may take
H200 = {"crammed-bert": 57.5e9, "frontier": 48.4e9}  # tokens that one reads in 24 hours (model/README.md, GPUs)
CPU = torch.device("cpu")


class Disk(NamedTuple):
    """Bytes per second of the disk with the artifacts."""

    writes: float
    reads: float


class Bench(NamedTuple):
    """All that was measured, and of what."""

    title: str  # the recipe
    changes: dict  # fields of the recipe that have other values
    training: Training
    length: int  # tokens a sequence
    here: Machine
    products: dict[str, float]  # floating-point operations per second of large matrix products, by precision
    measured: Measured
    text: float  # bytes per second that a process tokenizes
    disk: Disk

    def speed(self) -> Speed:
        """The speed of a long run."""
        return self.measured.compiled or self.measured.eager

    def tokens_in(self, seconds: float) -> float:
        """The tokens that a run of so many seconds reads here."""
        return self.measured.tokens_in(seconds, self.here.device.type)


# Text and disk


def sample_text(size: int) -> list[str]:
    """Documentation of the installed packages, about so many bytes."""
    texts = []
    left = size
    for name in installed():
        for found in package_documents(name):
            if isinstance(found, Found):
                texts.append(found.text)
                left -= len(found.text.encode())
            if left < 0:
                return texts
    return texts


def text_rate(how: Normaliser, entries: int, seconds: float) -> float:
    """The bytes of text per second that a process tokenizes whose encoder knows no word yet."""
    texts = sample_text(SAMPLE_BYTES)
    counts = sum_counts(count_portions(texts, how)).sort_by("word")
    tokenizer = train_wordpiece(counts, entries, how)
    size = sum(len(text.encode()) for text in texts)
    return size / bench.seconds_of(lambda: Encoder(tokenizer)(texts), CPU, seconds)


def disk_rates(seconds: float) -> Disk:
    """The speed of the disk with the artifacts, of one file that is forced to it, and read after it left the memory."""
    folder = home.root()
    while not folder.is_dir():
        folder = folder.parent
    most = min(FILE_BYTES, shutil.disk_usage(folder).free // 10)
    with disk_errors_as_input_errors("cram bench"), tempfile.TemporaryFile(dir=folder, prefix=".bench-") as file:
        writing = seconds_to_write(file, most, seconds / 2)
        size = max(1, file.tell())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Disk(size / writing, size / seconds_to_read(file))


def seconds_to_write(file: IO[bytes], most: int, seconds: float) -> float:
    """Write so many bytes, or for so many seconds, and force them to the disk. Returns the seconds that it took."""
    block = os.urandom(BLOCK)  # which no file system compresses
    began = time.perf_counter()
    while file.tell() < most and time.perf_counter() - began < seconds:
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - began


def seconds_to_read(file: IO[bytes]) -> float:
    """Read a file from its beginning. Returns the seconds that it took."""
    file.seek(0)
    began = time.perf_counter()
    while file.read(BLOCK):
        pass
    return time.perf_counter() - began


# All of it


def measure(
    title: str,
    changes: dict,
    bert: Bert,
    training: Training,
    how: Normaliser,
    here: Machine,
    seconds: float,
    begin: Callable[[str], None],
) -> Bench:
    """Measure everything in about so many seconds. `begin` is called with what is done next."""
    begin("matrix products")
    names = [name for name, dtype in DTYPES.items() if dtype in (here.dtype, torch.float32)]
    products = {name: matrix_rate(here.device, DTYPES[name]) for name in names}
    begin("tokenizing")
    text = text_rate(how, bert.vocabulary, seconds / 24)
    begin("the disk")
    disk = disk_rates(seconds / 24)
    begin("the model and its micro-batch")
    measured = measure_training(bert, training, here, seconds, begin)
    return Bench(title, changes, training, bert.length, here, products, measured, text, disk)


def measure_training(
    bert: Bert, training: Training, here: Machine, seconds: float, begin: Callable[[str], None]
) -> Measured:
    """Measure steps of pretraining, in most of so many seconds."""
    with tempfile.TemporaryDirectory(prefix="cram-bench-") as folder:
        trial = Trial(bert, training, here, Path(folder), seconds / 8)
        try:
            return bench.measure(trial, here.compiles and seconds >= COMPILES_FROM, begin)
        finally:
            trial.close()


# What it means


def part_rows(found: Bench) -> list[dict[str, str]]:
    """A row for each part of a step, then the whole; eager."""
    parts = found.measured.parts
    total = sum(parts.values())
    rows = []
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        rows.append(part_row(part, seconds, total))
    return [*rows, part_row("a step", total, total)]


def part_row(name: str, seconds: float, total: float) -> dict[str, str]:
    """The row of a part."""
    return {"part of a step": name, "ms": f"{1000 * seconds:,.1f}", "share": f"{seconds / total:.1%}"}


def rate_rows(found: Bench) -> list[dict[str, str]]:
    """A row for each rate that was measured."""
    measured = found.measured
    batches = measured.micro_batch * found.length / measured.batch_seconds
    rows = []
    for name, rate in found.products.items():
        unit, size = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
        rows.append(rate_row(f"matrix products in {name}", f"{rate / size:,.1f}", unit))
    rows += speed_rows("training, eager", measured.eager)
    if measured.compiled:
        rows += speed_rows("training, compiled", measured.compiled)
    return [
        *rows,
        rate_row("making batches, a thread", f"{batches:,.0f}", "tokens/s"),
        rate_row("tokenizing, a process", f"{found.text / 1e6:,.1f}", "MB/s"),
        rate_row("writing to the disk", f"{found.disk.writes / 1e6:,.0f}", "MB/s"),
        rate_row("reading from the disk", f"{found.disk.reads / 1e6:,.0f}", "MB/s"),
    ]


def speed_rows(name: str, speed: Speed) -> list[dict[str, str]]:
    """The rows of a speed of training."""
    return [
        rate_row(name, f"{speed.rate:,.0f}", "tokens/s"),
        rate_row(f"{name}, MFU", f"{speed.mfu:.1%}", "of matrix products"),
    ]


def rate_row(what: str, rate: str, unit: str) -> dict[str, str]:
    """The row of a rate."""
    return {"what": what, "rate": rate, "unit": unit}


def budget_rows(found: Bench) -> list[dict[str, str]]:
    """A row for each budget: 20 minutes, 24 hours and the recipe's, with the tokens and steps that it allows."""
    budgets = {"20 minutes": 1200.0, "24 hours": 86_400.0}
    training = found.training
    if training.budget_unit == "hours":
        seconds = 3600 * training.budget
        budgets[duration(seconds)] = seconds
    rows = []
    for named, seconds in sorted(budgets.items(), key=lambda item: item[1]):
        rows.append(budget_row(named, found.tokens_in(seconds), found))
    if training.budget_unit == "tokens":
        seconds = training.budget / found.speed().rate
        rows.append(budget_row(duration(seconds), training.budget, found))
    return rows


def budget_row(name: str, tokens: float, found: Bench) -> dict[str, str]:
    """The row of a budget."""
    steps = tokens / found.speed().tokens
    return {"budget": name, "tokens": f"{tokens:,.0f}", "steps": f"{steps:,.0f}"}


def findings(found: Bench) -> list[str]:
    """What bounds training, in sentences."""
    speed = found.speed()
    sentences = [
        f"A step of {speed.tokens:,} tokens takes {duration(speed.seconds)}. It computes at {speed.mfu:.0%} of the "
        "rate of large matrix products (its MFU). The other time goes to smaller products, and to what only moves or "
        "adds numbers.",
        about_parts(found),
        about_batches(found),
        about_compiler(found),
        about_precision(found),
    ]
    return [sentence for sentence in [*sentences, *about_data(found)] if sentence]


def about_parts(found: Bench) -> str:
    """A sentence about the largest part, and one about the optimizer if it takes much."""
    parts = found.measured.parts
    total = sum(parts.values())
    largest = max(parts, key=lambda part: parts[part])
    sentence = f"The largest part of a step is {largest}, {parts[largest] / total:.0%}."
    if parts[OPTIMIZER] > OFTEN * total:
        sentence += (
            f" The optimizer takes {parts[OPTIMIZER] / total:.0%}; a larger pretrain.batch_size spreads it over more "
            "tokens, in fewer steps."
        )
    return sentence


def about_batches(found: Bench) -> str:
    """A sentence about the thread that makes batches."""
    measured = found.measured
    share = measured.parts[WAITING] / sum(measured.parts.values())
    making = (
        f"a thread makes a micro-batch of {measured.micro_batch:,} sequences in {1000 * measured.batch_seconds:,.2f} "
        f"ms, while a pass of the one before takes {1000 * measured.pass_seconds:,.0f} ms"
    )
    if share <= MUCH:
        return f"Training does not wait for batches: {making}."
    return f"Training waits for batches {share:.0%} of the time: {making}. Leave that thread a core of its own."


def about_compiler(found: Bench) -> str:
    """A sentence about compilation, or why there is none."""
    measured = found.measured
    if measured.compiled:
        least = COMPILE_FROM_SECONDS[found.here.device.type]
        return (
            f"Compiled, a step is {measured.eager.seconds / measured.compiled.seconds:.2f} times as fast. Compiling "
            f"took {duration(measured.compile_seconds)} and counts, so runs compile from {duration(least)} on."
        )
    if measured.why_not:
        return f"{measured.why_not}. Training is eager."
    if not found.here.compiles:
        return "Nothing was compiled: there is no C++ compiler here, or CRAM_COMPILE is 0."
    return f"Nothing was compiled: that takes a minute, so it needs --seconds {COMPILES_FROM:.0f} or more."


def about_precision(found: Bench) -> str:
    """A sentence about the precision of matrix products."""
    [name] = [name for name, dtype in DTYPES.items() if dtype is found.here.dtype]
    if name == "fp32":
        return "Matrix products are in fp32: this machine has no faster precision, or CRAM_DTYPE is fp32."
    times = found.products[name] / found.products["fp32"]
    return f"Large matrix products in {name} are {times:.1f} times as fast as in fp32."


def about_data(found: Bench) -> list[str]:
    """Sentences about text and disk, and about another machine if this recipe was measured there."""
    count = workers()
    gigabyte = 1e9 / found.text / count
    checkpoint = found.measured.checkpoint
    sentences = [
        f"The data stages, with {count} processes, would tokenize 1 GB of text in about {duration(gigabyte)}, off "
        "the clock.",
        f"A checkpoint has {checkpoint / 1e6:,.0f} MB, which the disk takes in "
        f"{duration(checkpoint / found.disk.writes)}, while training continues.",
    ]
    if found.title in H200 and not found.changes:
        share = found.tokens_in(24 * 3600) / H200[found.title]
        sentences.append(f"In 24 hours this machine reads {share:.2%} of the tokens that an H200 read.")
    return sentences


def markdown(found: Bench, environment: dict[str, Any]) -> str:
    """The page, as Markdown."""
    values = {
        "title": found.title,
        "changes": json.dumps(found.changes) if found.changes else "",
        "device": found.here.device_name(),
        "dtype": found.here.describe()["dtype"],
        "parameters": found.measured.parameters,
        "speed": found.speed(),
        "in_20_minutes": found.tokens_in(20 * 60),
        "in_24_hours": found.tokens_in(24 * 3600),
        "findings": findings(found),
        "parts": part_rows(found),
        "rates": rate_rows(found),
        "budgets": budget_rows(found),
        "measured": found.measured,
        "training": found.training,
        "length": found.length,
        "environment": environment,
    }
    return render("bench", values)


def write_page(found: Bench, environment: dict[str, Any], folder: Path) -> Path:
    """Write the page into the folder, as Markdown and as HTML; returns the path of the latter."""
    text = markdown(found, environment)
    name = f"bench-{found.title}"
    with disk_errors_as_input_errors("cram bench"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
        html = folder / f"{name}.html"
        html.write_text(page(text, f"What bounds {found.title} here"), encoding="utf-8")
    return html
