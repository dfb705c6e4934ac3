"""What do the steps that join the parts of a large corpus take? Rows are made up, by default as many as 45 GB has.

    python benchmarks/joins.py --folder DIR [--documents N] [--sequences N] [--parts N] [--step NAME ...] [--json FILE]

Work on single parts is as long as the text and needs the memory of a part; what reads all parts together may not grow
faster. Each step runs in a process of its own, with one worker, on files in the folder that are deleted afterwards:

    exact       equal documents by their digests, and what each part reads of the result
    minhash     pairs of documents in the same buckets, what each part reads of them, and clusters
    measure     quantiles of all measures by source
    filter      counts by source and verdict
    vocabulary  the sum of all parts' counts of words
    tokenize    the order by full stops and at random, the sequences in this order, held-out documents

Prints CPU seconds, the peak of resident memory above that of Python at its start, and what was read from the disk. To
see the steps under a limit of memory, which includes the system's cache, run all in a control group
(systemd-run --scope -p MemoryMax=2G).
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import common
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SOURCES = 22
WORDS = 5_000_000
TOKENS = 16
ENTRIES = 32_768
MIXED = 0x9E3779B1  # odd, so that the made-up words begin with every digit
KNOWN_FIRST = 0.1  # share of documents that have a digest in common with others
COPIES = 0.05  # share of documents that are in a bucket with another one


def random_of(part: int) -> np.random.Generator:
    """Random numbers of a part."""
    return np.random.default_rng(part)


def artifact(stage: str, key: str, parts: int, **about: object):
    """An artifact with so many empty parts."""
    from tasks.store.artifacts import Artifact
    from tasks.store.manifests import MANIFEST

    made = Artifact(stage=stage, key=key)
    made.path.mkdir(parents=True)
    names = [f"part-{i:05d}.parquet" for i in range(parts)]
    for name in names:
        (made.path / name).touch()
    files = [{"path": name, "bytes": 0, "sha256": ""} for name in names]
    (made.path / MANIFEST).write_text(
        json.dumps({"stage": stage, "key": key, "files": files, "inputs": {}} | about), encoding="utf-8"
    )
    return made


def results_of(module: ModuleType, results: list[dict]) -> None:
    """Have a stage take these as the results of its work on single parts."""
    module.over_parts = lambda *_: results


def make_exact(work: Path, each: int, parts: int) -> None:
    """Write the digests of every part's documents."""
    from tasks.text.sorted_files import position, save_sorted

    for part in range(parts):
        digests = random_of(part).integers(0, 1 << 64, (each, 2), np.uint64)
        known = random_of(part).random(each) < KNOWN_FIRST
        digests[known] = digests[known] >> np.uint64(40)  # few enough to be had by several
        digests[known, 1] = 0
        order = np.lexsort(digests.T[::-1])
        save_sorted(work / f"digests/{part:05d}", *digests[order].T, position(part, order))


def exact(work: Path, each: int, parts: int) -> None:
    """Find the copies, and read what is to be dropped of each part."""
    from tasks.deduplicate import match_digests
    from tasks.text.sorted_files import files_in, load_range, position, ranges

    for i, (low, high) in enumerate(ranges(each * parts)):
        match_digests(low, high, work, work / f"drops/range-{i:05d}")
    for part in range(parts):
        load_range(files_in(work / "drops", "*"), position(part, 0), position(part + 1, 0))


def make_minhash(work: Path, each: int, parts: int) -> None:
    """Write the buckets of every part's documents."""
    from tasks.text.minhash import MinHash
    from tasks.text.sorted_files import position, save_pairs, save_sorted

    bands = MinHash().bands
    for part in range(parts):
        keys = random_of(part).integers(0, 1 << 64, (bands, each), np.uint64)
        keys[0, random_of(part).random(each) < COPIES] >>= np.uint64(42)
        documents = position(part, np.arange(each))
        order = np.argsort(keys.ravel(), kind="stable")
        save_sorted(work / f"buckets/{part:05d}-000", keys.ravel()[order], documents[order % each])
        save_pairs(work / f"pairs/same-{part:05d}", documents, documents, documents < 0)


def minhash(work: Path, each: int, parts: int) -> None:
    """Find the pairs, read those of each part, and join what a tenth of them would join."""
    from tasks.text.minhash import MinHash, candidates, connect, pair_up
    from tasks.text.sorted_files import ranges

    for i, (low, high) in enumerate(ranges(MinHash().bands * each * parts)):
        pair_up(low, high, work, work / f"pairs/range-{i:05d}")
    connect(np.concatenate([candidates(part, work / "pairs")[::10] for part in range(parts)]))


def measures(part: int, each: int) -> dict:
    """The measures of a part's documents."""
    random = random_of(part)
    sources = random.integers(0, SOURCES, each)
    return {
        "id": [f"shard:{part}:{i}" for i in range(each)], "source": [f"source {i}" for i in sources],
        "characters": random.integers(100, 50_000, each), "removed": np.zeros(each, np.int64),
        "tokens": random.integers(30, 15_000, each), "tokens_per_char": random.random(each),
        "zstd_ratio": random.random(each), "script": pa.nulls(each, pa.string()),
    }  # fmt: skip


def make_measure(work: Path, each: int, parts: int) -> None:
    """Write the measures of every part, and a vocabulary."""
    from tokenizers.models import WordPiece

    from tasks.measure import MEASURES
    from tasks.text.tokenizer import SPECIALS, save_tokenizer, tokenizer_of

    save_tokenizer(tokenizer_of(WordPiece({name: i for i, name in enumerate(SPECIALS)}, unk_token="[UNK]")), work)
    for part in range(parts):
        pq.write_table(pa.table(measures(part, each), schema=MEASURES), work / f"measured-{part:05d}.parquet")


def measure(work: Path, each: int, parts: int) -> None:
    """Join the measures."""
    from tasks import measure as module

    by_source = {f"source {i}": {"documents": each // SOURCES, "characters": each * 1000} for i in range(SOURCES)}
    counts = {"documents": each, "characters": each * 25_000, "by_source": by_source}
    nothing = {"documents": 0, "characters": 0, "by_source": {}}
    results_of(module, [{"counts": counts, "tokens": each, "removed": nothing, "by_script": {}}] * parts)
    corpus = artifact("deduplicate", "0" * 12, parts, stats={"documents": each * parts})
    module.measure.function(module.Measure(), corpus, out=work)


def make_filter(work: Path, each: int, parts: int) -> None:
    """Write the measures of every part with their verdicts."""
    from tasks.filter import MEASURED

    for part in range(parts):
        columns = measures(part, each)
        columns["verdict"] = np.where(columns["tokens_per_char"] < 0.9, "kept", "incompressible").tolist()
        pq.write_table(pa.table(columns, schema=MEASURED), work / f"measured-{part:05d}.parquet")


def filtered(work: Path, each: int, parts: int) -> None:
    """Join the verdicts."""
    from tasks import filter as module

    corpus = artifact("deduplicate", "0" * 12, parts, stats={"documents": each * parts})
    median = {name: {"50%": 0.3} for name in ("all", *(f"source {i}" for i in range(SOURCES)))}
    about = {"quantiles": dict.fromkeys(module.RATIOS, median), "vocabulary_entries": ENTRIES}
    read = artifact("measure", "0" * 12, 0, stats=about, inputs={"corpus": corpus.name})
    results_of(module, [{"samples": []}] * parts)
    module.filter.function(module.Filter(), corpus, read, out=work)


def make_vocabulary(work: Path, each: int, parts: int) -> None:
    """Write the counts of the words in the sample of every part."""
    from tasks.text.words import COUNTS
    from tasks.vocabulary import write_counts

    for part in range(parts):
        drawn = random_of(part).zipf(1.3, 100 * each) % WORDS
        numbers, times = np.unique(drawn, return_counts=True)
        words = [f"{number * MIXED % WORDS:x}" for number in numbers.tolist()]
        write_counts(pa.table([words, times], schema=COUNTS), work / f"{part:05d}.words.arrow")


def vocabulary(work: Path, each: int, parts: int) -> None:
    """Add up the counts."""
    from tasks import vocabulary as module

    corpus = artifact("filter", "0" * 12, parts, stats={"characters": 45_000_000_000})
    results_of(module, [{"documents": each, "characters": each}] * parts)
    module.in_batches = lambda parts: [[part] for part in parts]  # as they would be if they weren't empty
    module.count_sample(corpus, 1000, work, "count words")


def make_tokenize(work: Path, each: int, parts: int) -> None:
    """Write the sequences of every part, and its held-out documents: `each` is that of sequences."""
    from tasks.tokenize import HELD_SCHEMA

    for part in range(parts):
        random = random_of(part)
        np.save(work / f"part-{part:05d}.npy", random.integers(5, ENTRIES, (each, TOKENS), np.uint16))
        rows = [(f"{part}:{i}", "source", "text " * 1200, 6000, 6000, 1200) for i in range(3)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        pq.write_table(pa.table(columns, schema=HELD_SCHEMA), work / f"part-{part:05d}.held.parquet")


def tokenized(work: Path, each: int, parts: int) -> None:
    """Put the sequences in both orders, and write the held-out documents."""
    from tasks.text import sequences as module

    encoded = [np.load(work / f"part-{part:05d}.npy", mmap_mode="r") for part in range(parts)]
    module.keys_by_stops = lambda parts, rows, *_: np.concatenate(
        [(TOKENS - (block < 60).sum(axis=1, dtype=np.uint16)) for block in module.blocks_of(parts, rows)]
    )
    for sort in ("sentence-length", "random"):
        rows = module.draw_rows(each * parts, each * parts, seed=0)
        module.write_sequences(work / sort, encoded, rows, module.order_of(encoded, rows, sort, 0, None))


STEPS: dict[str, tuple[Callable, Callable]] = {
    "exact": (make_exact, exact), "minhash": (make_minhash, minhash), "measure": (make_measure, measure),
    "filter": (make_filter, filtered), "vocabulary": (make_vocabulary, vocabulary),
    "tokenize": (make_tokenize, tokenized),
}  # fmt: skip


def measured(step: Callable, work: Path, each: int, parts: int) -> dict:
    """Run a step in this process; CPU and other seconds, added memory, and bytes read."""
    from tasks.workers.processes import peak_memory, reset_usage

    def read() -> int:
        return int(
            dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines())[
                "read_bytes"
            ]
        )

    reset_usage()
    begun = peak_memory()["process"]  # torch, which the benchmarks share
    before = read()
    cpu = time.process_time()
    start = time.perf_counter()
    step(work, each, parts)
    found = {"cpu_seconds": time.process_time() - cpu, "seconds": time.perf_counter() - start}
    return found | {"peak_mib": peak_memory()["process"] - begun, "gigabytes_read": (read() - before) / 1e9}


def main() -> None:
    """Run the steps and print a table."""
    parser = common.parser(
        __doc__,
        folder={"type": Path, "required": True, "help": "for the files, up to some 15 GB by default"},
        documents={"type": common.positive, "default": 8_000_000},
        sequences={"type": common.positive, "default": 70_000_000, "help": f"of {TOKENS} tokens"},
        parts={"type": common.positive, "default": 1400},
        step={"nargs": "+", "default": list(STEPS), "choices": list(STEPS)},
        json=common.JSON_OPTION,
    )
    given: argparse.Namespace = parser.parse_args()
    rows = {}
    for name in given.step:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            os.environ["CRAM_ARTIFACTS"] = f"{folder}/artifacts"
            work = Path(folder, "work")
            for inner in ("digests", "drops", "buckets", "pairs"):
                (work / inner).mkdir(parents=True, exist_ok=True)
            each = (given.sequences if name == "tokenize" else given.documents) // given.parts
            for step in STEPS[name]:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    rows[name] = process.submit(measured, step, work, each, given.parts).result()
                os.sync()
            shutil.rmtree(work)
        print(f"{name}: {rows[name]}", flush=True)
    names = ("cpu_seconds", "seconds", "peak_mib", "gigabytes_read")
    lines = [[name, *(f"{row[column]:,.1f}" for column in names)] for name, row in rows.items()]
    print(common.aligned([["step", "CPU s", "seconds", "peak MiB", "GB read"], *lines]))
    common.write_json(given.json, {"parts": given.parts, "documents": given.documents, "rows": rows})


if __name__ == "__main__":
    main()
