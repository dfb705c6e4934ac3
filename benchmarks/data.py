"""How fast are the data stages, and how much memory do they take, beside what libraries do alone in the same run?

    python benchmarks/data.py FILE... [--workers 1 2] [--deduplicate exact minhash substring] [--glue DIR] [--json FILE]
                              [--characters ascii|unicode]

The files are JSON lines. The stages run as they do in a recipe (decontamination only with --glue), in a store of its
own that is deleted afterwards; the chain runs once for each number of workers, in a new process. Text is counted in
UTF-8, 10^6 bytes. The limits are measured in one process on the beginning of the same text:

    reading       zstd and JSON alone
    tokenizers    the tokenizers library encoding alone, in batches, with the vocabulary of the chain
    training      the tokenizers library training a vocabulary alone
"""

import argparse
import io
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import common
import orjson
import zstandard
from common import aligned, positive
from tokenizers import Tokenizer, trainers

from model.limits import cores
from tasks.corpus.parts import parts_of, tables, views
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.filter import BY_SCRIPT, Filter, filter
from tasks.measure import Measure, measure
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import load_tokenizer
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, vocabulary

LIMIT_BYTES = 50_000_000  # of text that the limits are measured on
READING = "reading"
TOKENIZERS = "tokenizers"
TRAINING = "training"


def read_alone(files: list[Path]) -> list[str]:
    """The beginning of the text, decompressed and parsed."""
    texts = []
    size = 0
    for path in files:
        with path.open("rb") as file:
            lines = file
            if path.suffix == ".zst":
                lines = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
            for line in lines:
                texts.append(orjson.loads(line)["text"])
                size += len(line)
                if size > LIMIT_BYTES:
                    return texts
    return texts


def limits(files: list[Path], words: Artifact) -> dict[str, float]:
    """What the libraries do alone, in megabytes of text per CPU second."""
    tokenizer = load_tokenizer(words.path)
    learner = Tokenizer(type(tokenizer.model)(unk_token="[UNK]"))
    learner.normalizer = tokenizer.normalizer
    learner.pre_tokenizer = tokenizer.pre_tokenizer
    trainer = trainers.WordPieceTrainer(vocab_size=tokenizer.get_vocab_size(), show_progress=False)
    times = [time.process_time()]
    texts = read_alone(files)
    times.append(time.process_time())
    for start in range(0, len(texts), 256):
        tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
    times.append(time.process_time())
    learner.train_from_iterator(texts, trainer)
    times.append(time.process_time())
    size = sum(len(text.encode()) for text in texts) / 1e6
    names = READING, TOKENIZERS, TRAINING
    return {name: size / (times[i + 1] - times[i]) for i, name in enumerate(names)}


Step = tuple[str, Artifact, Artifact, str]  # a stage's name, its artifact, the text that it reads, and its limit


def run_chain(given: argparse.Namespace) -> list[Step]:
    """Run all stages."""
    text = download.fn(Download(source="files", files=[str(file) for file in given.files], documents=0))
    made = [("download", text, text, READING)]
    for method in given.deduplicate:  # one at a time, so that each has a row
        source = text
        text = deduplicate.fn(Deduplicate(methods=[method]), text)
        made.append((f"deduplicate, {method}", text, source, READING))
    if given.glue:
        source = text
        text = decontaminate.fn(Decontaminate(data=str(given.glue)), text)
        made.append(("decontaminate", text, source, TOKENIZERS))
    settings = Vocabulary(entries=given.entries, characters=given.characters)
    measures = measure.fn(Measure(normaliser=settings.normaliser(), max_removed=1), text)
    limit = BY_SCRIPT if given.characters == "unicode" else Filter().max_tokens_per_char
    kept = filter.fn(Filter(max_tokens_per_char=limit), text, measures)
    words = vocabulary.fn(settings, kept)
    sequences = tokenize.fn(Tokenize(), kept, words)
    made += [("measure", measures, text, TOKENIZERS), ("filter", kept, text, READING)]
    return [*made, ("vocabulary", words, kept, TRAINING), ("tokenize and sort", sequences, kept, TOKENIZERS)]


def row(name: str, size: float, seconds: float, cpu_seconds: float, process: int, worker: int, limit: str) -> dict:
    """A row of the table: megabytes of text, seconds, and the peaks of memory of the process and of a worker, MiB."""
    rates = {"megabytes": size, "seconds": seconds, "mb_per_second": size / seconds, "cpu_seconds": cpu_seconds}
    rates["mb_per_cpu_second"] = size / cpu_seconds
    return {"stage": name, **rates, "peak_mib": process, "worker_peak_mib": worker, "limit": limit}


def measure_chain(given: argparse.Namespace, workers: int) -> list[dict]:
    """The rows of the table for so many workers."""
    os.environ |= {"CRAM_WORKERS": str(workers), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory(prefix="cram-benchmark-") as store:
        os.environ["CRAM_ARTIFACTS"] = store
        start = time.perf_counter()
        steps = run_chain(given)
        seconds = time.perf_counter() - start
        rows = []
        read = {}
        alone = limits(given.files, next(made for name, made, *_ in steps if name == "vocabulary"))
        for name, made, source, limit in steps:
            if source not in read:
                every = (table["text"] for part in parts_of(source) for table in tables(part, ("text",)))
                read[source] = sum(len(view) for column in every for view in views(column)) / 1e6
            about = made.manifest
            peaks = made.manifest["peak_memory_mib"]
            used = about["seconds"], about["cpu_seconds"], peaks["process"], peaks["largest_worker"]
            done = row(name, read[source], *used, limit)
            rows.append(done | {"fraction_of_limit": done["mb_per_cpu_second"] / alone[limit]})
        cpu_seconds = sum(done["cpu_seconds"] for done in rows)
        peaks = (max(done[name] for done in rows) for name in ("peak_mib", "worker_peak_mib"))
        return [*rows, row("the whole chain", rows[0]["megabytes"], seconds, cpu_seconds, *peaks, "")]


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [["stage", "seconds", "MB/s", "CPU s", "MB/CPU s", "peak MiB", "worker MiB", "of the limit"]]
    for row in rows:
        rates = (row[name] for name in ("seconds", "mb_per_second", "cpu_seconds", "mb_per_cpu_second"))
        limit = f"{row['fraction_of_limit']:.2f} of {row['limit']}" if row["limit"] else ""
        peaks = str(row["peak_mib"]), str(row["worker_peak_mib"])
        lines.append([row["stage"], *(f"{rate:.1f}" for rate in rates), *peaks, limit])
    return aligned(lines)


def main() -> None:
    """Run the stages with each number of workers, print tables, and write them to the --json file."""
    parser = common.parser(
        __doc__,
        workers={"type": positive, "nargs": "+", "default": [cores()], "metavar": "N"},
        deduplicate={"nargs": "*", "default": ["exact"], "choices": ["exact", "minhash", "substring"]},
        glue={"type": Path, "help": "decontaminate too, against the GLUE data in this folder"},
        entries={"type": positive, "default": common.ENTRIES, "help": "of the vocabulary"},
        characters={"default": "ascii", "choices": ["ascii", "unicode"], "help": "that the vocabulary reads"},
        json=common.JSON_OPTION,
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines: .jsonl, .jsonl.zst")
    given = parser.parse_args()
    for path in given.files:
        if path.suffix not in (".jsonl", ".json", ".zst") or not path.is_file():
            parser.error(f"{path} is no file of JSON lines: .jsonl, .jsonl.zst")
    runs = []
    for workers in given.workers:
        if runs:
            os.sync()  # or this run would wait for what an earlier one wrote
        with common.input_errors(parser), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            rows = process.submit(measure_chain, given, workers).result()
        print(f"\nworkers: {workers}\n{table(rows)}")
        runs.append({"workers": workers, "rows": rows})
    common.write_json(given.json, {"runs": runs})


if __name__ == "__main__":
    main()
