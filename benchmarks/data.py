"""Speed and memory of the data stages on any corpus of JSON lines, beside what the machine's libraries do alone in the same run.

    python benchmarks/data.py FILE... [--workers 1 2] [--deduplicate exact minhash substring] [--glue DIR] [--copies 4]

Every stage runs as it does in a recipe, in a store of its own that is deleted afterwards; all of them once for each number
of workers, in a process of its own. Text is counted in UTF-8, 10^6 bytes. The limits are measured in one process on the
beginning of the same text:
reading       zstd (or gzip) and JSON alone
tokenizers    the tokenizers library encoding alone, in batches, with the vocabulary that the chain made
training      the tokenizers library training a vocabulary alone
`--copies N` reads the text N times, every copy with other words, to see that memory doesn't grow with it.
"""

import argparse
import gzip
import io
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
STORE = tempfile.mkdtemp(prefix="cram-benchmark-")
os.environ |= {"CRAM_ARTIFACTS": STORE, "PREFECT_LOGGING_TO_API_ENABLED": "false", "TOKENIZERS_PARALLELISM": "false"}

import orjson
import zstandard
from tokenizers import Tokenizer, trainers

from model import InputError
from tasks.corpus import formats, records
from tasks.corpus.parts import documents_of
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.filter import Filter, drop_incompressible
from tasks.measure import Measure, measure
from tasks.store import Artifact
from tasks.text.tokenizer import load_tokenizer, normalizer
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, train_vocabulary

LIMIT_BYTES = 50_000_000  # of text that the limits are measured on
READING, TOKENIZERS, TRAINING = "reading", "tokenizers", "training"


def write_copies(files: list[Path], copies: int, folder: Path) -> list[Path]:
    """The documents of the files `copies` times, with a mark in every word of six letters or more of all but the first."""
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
    """Megabytes that `work` does in a second of this process's CPU time."""
    start = time.process_time()
    work()
    return megabytes / (time.process_time() - start)


def opened(path: Path) -> BinaryIO:
    """A file of lines, decompressed."""
    if path.suffix == ".zst":
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True))
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_alone(files: list[Path]) -> tuple[float, list[str]]:
    """The rate of decompressing and parsing alone, and the texts that it read."""
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
    """What the libraries do alone, megabytes of text a CPU second."""
    reading, texts = read_alone(files)
    size = sum(len(text.encode()) for text in texts) / 1e6
    tokenizer = load_tokenizer(words.path)

    def encode() -> None:
        for start in range(0, len(texts), 256):
            tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)

    learner = Tokenizer(type(tokenizer.model)(unk_token="[UNK]"))
    learner.normalizer, learner.pre_tokenizer = normalizer(), tokenizer.pre_tokenizer
    trainer = trainers.WordPieceTrainer(vocab_size=tokenizer.get_vocab_size(), show_progress=False)
    training = rate(lambda: learner.train_from_iterator(texts, trainer), size)
    return {READING: reading, TOKENIZERS: rate(encode, size), TRAINING: training}


def main() -> None:
    """Run the stages with each number of workers, print tables, and write them as JSON where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines: .jsonl, .jsonl.zst, .jsonl.gz")
    parser.add_argument("--workers", type=int, nargs="+", default=[len(os.sched_getaffinity(0))], metavar="N")
    parser.add_argument("--deduplicate", nargs="*", default=["exact"], choices=["exact", "minhash", "substring"])
    parser.add_argument("--glue", type=Path, help="decontaminate too, against the GLUE data in this directory")
    parser.add_argument("--entries", type=int, default=32_768, help="of the vocabulary")
    parser.add_argument("--copies", type=int, default=1, choices=range(1, 9), metavar="N", help="read the text N times")
    parser.add_argument("--json", type=Path, help="where to write the tables as JSON")
    given = parser.parse_args()
    for path in given.files:
        if path.suffix not in (".jsonl", ".json", ".zst", ".gz") or not path.is_file():
            parser.error(f"{path} is no file of JSON lines: .jsonl, .jsonl.zst, .jsonl.gz")
    tables = {}
    for workers in given.workers:
        try:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # with its own store and caches
                tables[workers] = process.submit(run, given, workers).result()
        except InputError as error:
            parser.error(str(error))
        finally:
            shutil.rmtree(STORE, ignore_errors=True)
        print_table(workers, tables[workers])
    if len(tables) > 1:
        print_speed_up(tables)
    if given.json:
        runs = [{"workers": workers, "rows": rows} for workers, rows in tables.items()]
        given.json.write_text(json.dumps({"copies": given.copies, "runs": runs}, indent=2) + "\n")


def print_table(workers: int, rows: list[dict]) -> None:
    """Print what `run` gives."""
    width = max(len(row["stage"]) for row in rows)
    print(f"\nworkers: {workers}")
    head = f"{'stage':{width}} {'seconds':>8} {'MB/s':>7} {'CPU s':>7} {'MB/CPU s':>9} {'peak MiB':>9} {'worker MiB':>11}  of the limit"
    print(head)
    for row in rows:
        part = f"{row['fraction_of_limit']:.2f} of {row['limit']}" if row["limit"] else ""
        peaks = f"{row['peak_mib']:9} {row['worker_peak_mib']:11}"
        print(
            f"{row['stage']:{width}} {row['seconds']:8.1f} {row['mb_per_second']:7.1f} {row['cpu_seconds']:7.1f} "
            f"{row['mb_per_cpu_second']:9.1f} {peaks}  {part}"
        )


def print_speed_up(tables: dict[int, list[dict]]) -> None:
    """Print the seconds of each stage with each number of workers, and how many times as fast as with the first number."""
    width = max(len(row["stage"]) for rows in tables.values() for row in rows)
    print(f"\n{'seconds (speed-up)':{width}}" + "".join(f"{f'{n} workers':>16}" for n in tables))
    for row, *others in zip(*tables.values(), strict=True):
        cells = [f"{row['seconds']:.1f}"]
        cells += [f"{other['seconds']:.1f} ({row['seconds'] / other['seconds']:.2f})" for other in others]
        print(f"{row['stage']:{width}}" + "".join(f"{cell:>16}" for cell in cells))


def run(given: argparse.Namespace, workers: int) -> list[dict]:
    """The rows of the table for so many workers."""
    os.environ["CRAM_WORKERS"] = str(workers)
    os.sync()  # what an earlier run wrote is not this one's to wait for
    try:
        return measured(given)
    finally:
        shutil.rmtree(STORE, ignore_errors=True)


def measured(given: argparse.Namespace) -> list[dict]:
    """Run all stages; a row for each."""
    files = write_copies(given.files, given.copies, Path(STORE)) if given.copies > 1 else given.files
    start = time.perf_counter()
    read = download.fn(Download(source="files", files=[str(f) for f in files], documents=0))
    made = [("download", read, READING)]
    unique, sizes = read, [read]
    for method in given.deduplicate:  # one at a time, so that each has a row
        unique = deduplicate.fn(Deduplicate(methods=[method]), unique)
        sizes.append(unique)
        made.append((f"deduplicate, {method}", unique, READING))
    if given.glue:
        unique = decontaminate.fn(Decontaminate(data=str(given.glue)), unique)
        sizes.append(unique)
        made.append(("decontaminate", unique, TOKENIZERS))
    measures = measure.fn(Measure(), unique)
    kept = drop_incompressible.fn(Filter(), unique, measures)
    words = train_vocabulary.fn(Vocabulary(entries=given.entries), kept)
    sequences = tokenize.fn(Tokenize(), kept, words)
    seconds = time.perf_counter() - start
    made += [
        ("measure", measures, TOKENIZERS),
        ("filter", kept, READING),
        ("vocabulary", words, TRAINING),
        ("tokenize and sort", sequences, TOKENIZERS),
    ]
    alone = limits(files, words)
    megabytes = {a.name: sum(len(d.text.encode()) for d in documents_of(a)) / 1e6 for a in (*sizes, kept)}
    rows = []
    for name, artifact, limit in made:
        about = artifact.manifest
        size = megabytes[next(iter(about["inputs"].values()), artifact.name)]  # of what it reads
        per_cpu = size / about["cpu_seconds"]
        rows.append(
            {
                "stage": name,
                "megabytes": size,
                "seconds": about["seconds"],
                "mb_per_second": size / about["seconds"],
                "cpu_seconds": about["cpu_seconds"],
                "mb_per_cpu_second": per_cpu,
                "peak_mib": about["peak_memory_mib"]["process"],
                "worker_peak_mib": about["peak_memory_mib"]["largest_worker"],
                "limit": limit,
                "limit_mb_per_cpu_second": alone[limit],
                "fraction_of_limit": per_cpu / alone[limit],
            }
        )
    whole, cpu = megabytes[read.name], sum(row["cpu_seconds"] for row in rows)
    rows.append(
        {
            "stage": "the whole chain",
            "megabytes": whole,
            "seconds": seconds,
            "mb_per_second": whole / seconds,
            "cpu_seconds": cpu,
            "mb_per_cpu_second": whole / cpu,
            "peak_mib": max(row["peak_mib"] for row in rows),
            "worker_peak_mib": max(row["worker_peak_mib"] for row in rows),
            "limit": None,
        }
    )
    return rows


if __name__ == "__main__":
    main()
