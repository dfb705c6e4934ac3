"""How fast are the data stages, and how much memory do they take, beside what libraries do alone in the same run?

    python benchmarks/data.py FILE... [--workers 1 2] [--deduplicate exact minhash substring] [--glue DIR] [--copies 4]

The files are JSON lines. The stages run as they do in a recipe (decontamination only with --glue), in a store of its own that is deleted afterwards; the
chain runs once for each number of workers, in a new process. Text is counted in UTF-8, 10^6 bytes. The limits are
measured in one process on the beginning of the same text:

    reading       zstd (or gzip) and JSON alone
    tokenizers    the tokenizers library encoding alone, in batches, with the vocabulary of the chain
    training      the tokenizers library training a vocabulary alone

`--copies N` reads the text N times, every copy with other words, to see that memory doesn't grow with it.
"""

import argparse
import atexit
import gzip
import io
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

STORE = tempfile.mkdtemp(prefix="cram-benchmark-")
atexit.register(shutil.rmtree, STORE, ignore_errors=True)
os.environ |= {"CRAM_ARTIFACTS": STORE, "PREFECT_LOGGING_TO_API_ENABLED": "false", "TOKENIZERS_PARALLELISM": "false"}

import common
import orjson
import zstandard
from common import aligned, positive
from tokenizers import Tokenizer, trainers

from tasks.corpus import formats, records
from tasks.corpus.parts import documents_of
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.filter import Filter, drop_incompressible
from tasks.measure import Measure, measure
from tasks.store import Artifact
from tasks.text.tokenizer import load_tokenizer
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, train_vocabulary

LIMIT_BYTES = 50_000_000  # of text that the limits are measured on
READING, TOKENIZERS, TRAINING = "reading", "tokenizers", "training"


def write_copies(files: list[Path], copies: int, folder: Path) -> list[Path]:
    """Write the documents `copies` times, each copy but the first with a mark in words of six letters or more."""
    made = []
    for copy in range(copies):
        for number, path in enumerate(files):
            made.append(folder / f"copy-{copy}-{number:03d}.jsonl")
            with path.open("rb") as file, made[-1].open("wb") as out:
                for document in formats.read_file(file, path.name, records.Layout("copy", 1 << 30)):
                    if isinstance(document, records.Loss):
                        continue
                    marked = (
                        word + "abcdefgh"[copy] * (len(word) > 5 and copy > 0) for word in document.text.split(" ")
                    )
                    record = {"text": " ".join(marked), "meta": {"pile_set_name": document.source}}
                    out.write(orjson.dumps(record) + b"\n")
    return made


def rate(work, megabytes: float) -> float:
    """Megabytes that `work` does per CPU second of this process."""
    start = time.process_time()
    work()
    return megabytes / (time.process_time() - start)


def opened(path: Path) -> BinaryIO:
    """A file of lines, decompressed."""
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_alone(files: list[Path]) -> tuple[float, list[str]]:
    """The rate of decompressing and parsing alone, and the texts read."""
    texts, size, start = [], 0, time.process_time()
    for path in files:
        with opened(path) as file:
            for line in file:
                with suppress(orjson.JSONDecodeError, KeyError, TypeError):  # the stage counts these
                    texts.append(orjson.loads(line)["text"])
                size += len(line)
                if size > LIMIT_BYTES:
                    break
        if size > LIMIT_BYTES:
            break
    seconds = time.process_time() - start
    texts = [text for text in texts if isinstance(text, str)]
    return sum(len(text.encode()) for text in texts) / 1e6 / seconds, texts


def limits(files: list[Path], words: Artifact) -> dict[str, float]:
    """What the libraries do alone, in megabytes of text per CPU second."""
    reading, texts = read_alone(files)
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = load_tokenizer(words.path)

    def encode() -> None:
        for start in range(0, len(texts), 256):
            tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)

    learner = Tokenizer(type(tokenizer.model)(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trainer = trainers.WordPieceTrainer(vocab_size=tokenizer.get_vocab_size(), show_progress=False)
    training = rate(lambda: learner.train_from_iterator(texts, trainer), size)
    return {READING: reading, TOKENIZERS: rate(encode, size), TRAINING: training}


Step = tuple[str, Artifact, Artifact, str]  # a stage's name, its artifact, the text that it reads, and its limit


def run_chain(given: argparse.Namespace, files: list[Path]) -> list[Step]:
    """Run all stages."""
    text = download.fn(Download(source="files", files=[str(file) for file in files], documents=0))
    made = [("download", text, text, READING)]
    for method in given.deduplicate:  # one at a time, so that each has a row
        source, text = text, deduplicate.fn(Deduplicate(methods=[method]), text)
        made.append((f"deduplicate, {method}", text, source, READING))
    if given.glue:
        source, text = text, decontaminate.fn(Decontaminate(data=str(given.glue)), text)
        made.append(("decontaminate", text, source, TOKENIZERS))
    measures = measure.fn(Measure(), text)
    kept = drop_incompressible.fn(Filter(), text, measures)
    words = train_vocabulary.fn(Vocabulary(entries=given.entries), kept)
    sequences = tokenize.fn(Tokenize(), kept, words)
    made += [("measure", measures, text, TOKENIZERS), ("filter", kept, text, READING)]
    return [*made, ("vocabulary", words, kept, TRAINING), ("tokenize and sort", sequences, kept, TOKENIZERS)]


def megabytes(artifact: Artifact) -> float:
    """The text of a stage's parts."""
    return sum(len(document.text.encode()) for document in documents_of(artifact)) / 1e6


def row(name: str, size: float, seconds: float, cpu_seconds: float, peaks: dict, **limit: object) -> dict:
    """A row of the table."""
    return {
        "stage": name,
        "megabytes": size,
        "seconds": seconds,
        "mb_per_second": size / seconds,
        "cpu_seconds": cpu_seconds,
        "mb_per_cpu_second": size / cpu_seconds,
        "peak_mib": peaks["process"],
        "worker_peak_mib": peaks["largest_worker"],
        **limit,
    }


def run(given: argparse.Namespace, workers: int) -> list[dict]:
    """The rows of the table for so many workers."""
    os.environ["CRAM_WORKERS"] = str(workers)
    os.sync()  # or this run would wait for what an earlier one wrote
    try:
        files = write_copies(given.files, given.copies, Path(STORE)) if given.copies > 1 else given.files
        start = time.perf_counter()
        steps = run_chain(given, files)
        seconds = time.perf_counter() - start
        alone = limits(files, next(made for name, made, *_ in steps if name == "vocabulary"))
        read, rows = {source: megabytes(source) for _, _, source, _ in steps}, []
        for name, made, source, limit in steps:
            about = made.manifest
            used = about["seconds"], about["cpu_seconds"], about["peak_memory_mib"]
            done = row(name, read[source], *used, limit=limit, limit_mb_per_cpu_second=alone[limit])
            rows.append(done | {"fraction_of_limit": done["mb_per_cpu_second"] / alone[limit]})
        peaks = {"process": max(r["peak_mib"] for r in rows), "largest_worker": max(r["worker_peak_mib"] for r in rows)}
        cpu_seconds = sum(r["cpu_seconds"] for r in rows)
        return [*rows, row("the whole chain", rows[0]["megabytes"], seconds, cpu_seconds, peaks, limit=None)]
    finally:
        shutil.rmtree(STORE, ignore_errors=True)


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [["stage", "seconds", "MB/s", "CPU s", "MB/CPU s", "peak MiB", "worker MiB", "of the limit"]]
    for row in rows:
        rates = (row[name] for name in ("seconds", "mb_per_second", "cpu_seconds", "mb_per_cpu_second"))
        limit = f"{row['fraction_of_limit']:.2f} of {row['limit']}" if row["limit"] else ""
        peaks = str(row["peak_mib"]), str(row["worker_peak_mib"])
        lines.append([row["stage"], *(f"{rate:.1f}" for rate in rates), *peaks, limit])
    return aligned(lines)


def speed_up(tables: dict[int, list[dict]]) -> str:
    """The seconds of each stage with each number of workers, and how many times as fast as with the first number."""
    lines = [["seconds (speed-up)", *(f"{count} workers" for count in tables)]]
    for row, *others in zip(*tables.values(), strict=True):
        faster = [f"{other['seconds']:.1f} ({row['seconds'] / other['seconds']:.2f})" for other in others]
        lines.append([row["stage"], f"{row['seconds']:.1f}", *faster])
    return aligned(lines)


def main() -> None:
    """Run the stages with each number of workers, print tables, and write them to the --json file."""
    parser = common.parser(
        __doc__,
        workers={"type": positive, "nargs": "+", "default": [len(os.sched_getaffinity(0))], "metavar": "N"},
        deduplicate={"nargs": "*", "default": ["exact"], "choices": ["exact", "minhash", "substring"]},
        glue={"type": Path, "help": "decontaminate too, against the GLUE data in this folder"},
        entries={"type": positive, "default": common.ENTRIES, "help": "of the vocabulary"},
        copies={"type": int, "default": 1, "choices": range(1, 9), "metavar": "N", "help": "read the text N times"},
        json=common.JSON_OPTION,
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines: .jsonl, .jsonl.zst, .jsonl.gz")
    given = parser.parse_args()
    for path in given.files:
        if path.suffix not in (".jsonl", ".json", ".zst", ".gz") or not path.is_file():
            parser.error(f"{path} is no file of JSON lines: .jsonl, .jsonl.zst, .jsonl.gz")
    tables = {}
    for workers in given.workers:
        with common.input_errors(parser), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            tables[workers] = process.submit(run, given, workers).result()
        print(f"\nworkers: {workers}\n{table(tables[workers])}")
    if len(tables) > 1:
        print(f"\n{speed_up(tables)}")
    runs = [{"workers": workers, "rows": rows} for workers, rows in tables.items()]
    common.write_json(given.json, {"copies": given.copies, "runs": runs})


if __name__ == "__main__":
    main()
