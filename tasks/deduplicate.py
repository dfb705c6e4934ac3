"""Deduplicate: drop documents of the same text or of nearly the same words; cut long passages that occurred before.

Reads   the parts of a corpus.
Writes  part-00000.parquet …  the same parts without the duplicates, in the same order
        duplicates.jsonl      a few pairs of each method: what was kept, and what was dropped or cut as its duplicate
"""

import json
import shutil
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field, model_validator

from model.files import fsync
from tasks.corpus.parts import (
    SAMPLE_CHARACTERS,
    Tally,
    add_up,
    count,
    document_at,
    in_batches,
    link,
    parts_of,
    rewritten,
    smallest,
    tables,
    views,
)
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text import minhash, sorted_files, substrings
from tasks.text.minhash import MinHash
from tasks.text.sorted_files import batch_of, group_starts, load_range, mapped, offset_of, position, runs_in, save_pairs
from tasks.text.substrings import Substring
from tasks.workers.jobs import finish, over_parts

REASONS = {"exact": "duplicate", "minhash": "near-duplicate", "substring": "substring"}
Method = Literal["exact", "minhash", "substring"]


class Deduplicate(Params):
    """What counts as a duplicate, and what is done with it. The first copy in the corpus always stays."""

    methods: list[Method] = Field(
        ["exact"],
        description="exact: drop documents of the same text; minhash: drop those of nearly the same words; substring: "
        "cut passages that occurred before. Each works on the output of the one before it; []: keep all.",
    )
    minhash: MinHash = Field(MinHash(), description="Which documents are near-duplicates.")
    substring: Substring = Field(Substring(), description="Which passages are cut.")

    @model_validator(mode="after")
    def _each_once_and_no_idle_settings(self) -> "Deduplicate":
        if len(set(self.methods)) < len(self.methods):
            raise ValueError(f"methods is {self.methods}: name each method once")
        for name in ("minhash", "substring"):
            if name not in self.methods and getattr(self, name) != type(getattr(self, name))():
                raise ValueError(
                    f"{name} has settings, but methods is {self.methods}: add '{name}' to it, or leave them out"
                )
        return self

    def identity(self) -> dict:
        """The methods in their order, with their settings."""
        settings = self.model_dump(mode="json")
        settings["minhash"]["version"] = minhash.VERSION
        return {"methods": [[name, settings.get(name, {})] for name in self.methods]}


def digest_batch(number: int, batch: list[Path], work: Path) -> dict:
    """Write the 128-bit digests of some parts' documents, ascending."""
    texts = (views(table["text"]) for part in batch for table in tables(part, ("text",)))
    digests = b"".join(map(xxhash.xxh3_128_digest, chain.from_iterable(texts)))
    digests = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    order = np.lexsort(digests.T[::-1])
    sorted_files.save_run(work / f"digests/{number:05d}", *digests[order].T, position(number, order))
    return {"documents": len(order)}


def match(low: int, high: int, work: Path, out: Path) -> dict:
    """Write the documents with a digest (in this range) that an earlier one has too, and the first one that has it."""
    *digests, documents = load_range(runs_in(work / "digests", "*"), low, high, arrays=3)
    digests = np.stack(digests, axis=1)
    order = np.lexsort(digests.T[::-1])  # stable, so that copies stay in the order of the corpus
    documents, starts = documents[order], group_starts(digests[order])
    first = np.repeat(documents[starts], np.diff(starts, append=len(order)))
    save_pairs(out, documents, first, documents != first)
    return {}


def find_copies(batches: list[list[Path]], work: Path) -> None:
    """Find documents with the text of an earlier one; write them and the first of that text as runs in work/drops."""
    jobs = [(i, batch, work) for i, batch in enumerate(batches)]
    counts = over_parts(digest_batch, jobs, work / "digested", "digest documents")
    bounds = enumerate(sorted_files.ranges(sum(r["documents"] for r in counts)))
    jobs = [(low, high, work, work / f"drops/range-{i:05d}") for i, (low, high) in bounds]
    over_parts(match, jobs, work / "matched", "find duplicates")


def keep_rest(number: int, batch: list[Path], drops: Path, out: Path) -> dict:
    """Write the documents of some parts that are in no run of `drops`; return counts, and samples of the others."""
    dropped, firsts = load_range(runs_in(drops, "*"), position(number, 0), position(number + 1, 0))
    order = np.argsort(dropped)
    dropped, firsts = dropped[order], firsts[order]
    kept, gone, samples, start = Tally(), Tally(), [], 0
    for file, table in rewritten(batch, out):
        low, high = np.searchsorted(dropped, [position(number, row) for row in (start, start + len(table))])
        is_kept = np.ones(len(table), dtype=bool)
        is_kept[offset_of(dropped[low:high]) - start] = False
        rest, others = table.filter(pa.array(is_kept)), table.filter(pa.array(~is_kept))
        if len(rest):
            file.write_table(rest)
        count(kept, rest)
        count(gone, others)
        digests = [xxhash.xxh3_64_intdigest(view) for view in views(others["text"])]
        samples += zip(digests, firsts[low:high].tolist(), dropped[low:high].tolist(), strict=True)
        samples = smallest(samples)
        start += len(table)
    return {"kept": kept.counts(), "dropped": gone.counts(), "samples": samples}


def distribution(sizes: Counter) -> dict:
    """The number of clusters, the size of the largest, and how many there are by size."""
    spread: Counter = Counter()  # by power of two
    for size, number in sizes.items():
        spread[(size - 1).bit_length()] += number
    named = {"2" if p == 1 else f"{2 ** (p - 1) + 1}-{2**p}": spread[p] for p in sorted(spread)}
    return {"number": sizes.total(), "largest": max(sizes, default=0), "sizes": named}


def drop(method: str, params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict:
    """Drop the documents that a method finds; return counts and samples: documents kept, and dropped as the same."""
    batches = in_batches(parts)
    compared = minhash.find(params.minhash, batches, work) if method == "minhash" else {}
    if method == "exact":
        find_copies(batches, work)
    jobs = [(i, batch, work / "drops", out) for i, batch in enumerate(batches)]
    results, rows, sizes = over_parts(keep_rest, jobs, work / "kept", "drop duplicates"), [], Counter()
    for run in runs_in(work / "drops", "*"):  # all of a cluster but its first are in one run, each with that first
        sizes.update((np.unique(mapped(run)[1], return_counts=True)[1] + 1).tolist())
    for _, *pair in smallest([sample for result in results for sample in result["samples"]]):
        first, other = (document_at(batches[batch_of(at)], offset_of(at)) for at in pair)
        row = {"method": method}
        if method == "minhash":
            row["jaccard"] = round(minhash.similarity(first.text, other.text, params.minhash.words), 4)
        for what, document in (("kept", first), ("dropped", other)):
            row[what] = {**document._asdict(), "text": document.text[:SAMPLE_CHARACTERS]}
        rows.append(row)
    return {
        "kept": add_up([r["kept"] for r in results]),
        "dropped": add_up([r["dropped"] for r in results]),
        "stats": {"clusters": distribution(sizes), **compared},
        "samples": rows,
    }


def first_copy(copy: int, n: int, work: Path) -> int:
    """The position of the first of all copies of the window at this position."""
    while True:
        starts, stops, copies = mapped(work / f"again/{batch_of(copy):05d}", arrays=3)
        i = int(np.searchsorted(starts, copy, side="right")) - 1
        if i >= 0 and copy + n <= stops[i]:
            copy += int(copies[i]) - int(starts[i])
            continue
        _, before = load_range(substrings.of_batch(work / "same", batch_of(copy)), copy, copy + 1)
        if not len(before):
            return copy
        copy = int(before[0])


def cut(method: str, params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict:
    """Cut repeated passages; return counts and samples: what was cut, and where it stood first."""
    batches = in_batches(parts)
    results, rows = substrings.cut(params.substring, batches, out, work), []
    samples = smallest([sample for result in results for sample in result["samples"]])
    for _, copy, before, other, place, size, text in samples:
        first = first_copy(copy, params.substring.bytes, work) + before
        ends = np.load(work / f"{batch_of(first):05d}.ends.npy")  # of the batch's documents in its text
        row = int(np.searchsorted(ends, offset_of(first), side="right"))
        byte = offset_of(first) - int(ends[row - 1] if row else 0)
        there = document_at(batches[batch_of(first)], row)
        here = document_at(batches[batch_of(other)], offset_of(other))
        places = {"kept": (there, byte), "cut": (here, place)}
        named = {what: {"id": d.id, "source": d.source, "byte": at} for what, (d, at) in places.items()}
        rows.append({"method": method, **named, "bytes": size, "text": text})
    counts = {name: add_up([r[name] for r in results]) for name in ("kept", "dropped", "cut")}
    return {
        "kept": counts["kept"],
        "dropped": counts["dropped"],
        "stats": {
            "cut": counts["cut"],
            "passages": distribution(Counter(chain.from_iterable(r["sizes"] for r in results))),
        },
        "samples": rows,
    }


@stage(version=2, resumes=True)
def deduplicate(params: Deduplicate, corpus: Artifact, out: Path) -> dict:
    """Apply the methods one after the other; count what each dropped or cut, by source."""
    parts, work, results = parts_of(corpus), out / WORK, {}
    work.mkdir(exist_ok=True)
    kept = {name: corpus.stats[name] for name in Tally().counts()}
    for part in [] if params.methods else parts:
        link(part, out / part.name)
    for method in params.methods:
        runs, written = work / f"{method}-runs", out if method == params.methods[-1] else work / f"{method}-parts"
        written.mkdir(exist_ok=True)
        job = (method, params, parts, written, runs)
        results[method] = finish(cut if method == "substring" else drop, job, work / f"{method}.json")
        kept = results[method]["kept"]
        fsync(work)  # or a power cut could take the result and leave a deletion
        for done in (runs, *{part.parent for part in parts if work in part.parents}):  # larger than the text together
            shutil.rmtree(done, ignore_errors=True)
        parts = [written / part.name for part in parts]
    with (out / "duplicates.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for r in results.values() for row in r["samples"])
    return {
        "parts": len(parts),
        **kept,
        "dropped": {REASONS[method]: result["dropped"] for method, result in results.items()},
        **{method: result["stats"] for method, result in results.items()},
    }
