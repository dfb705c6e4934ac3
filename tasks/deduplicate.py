"""Deduplicate: drop documents of the same text or of nearly the same words; cut long passages that occurred before.

Reads   the parts of a corpus.
Writes  part-00000.parquet …  the same parts without the duplicates, in the same order
        duplicates.jsonl      a few pairs of each method: what was kept, and what was dropped or cut as its duplicate
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
from pydantic import Field, model_validator

from model.files import fsync
from tasks.corpus.parts import (
    SAMPLE_CHARACTERS,
    Document,
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
from tasks.text.sorted_files import (
    batch_of,
    files_in,
    group_starts,
    load_range,
    map_file,
    offset_of,
    position,
    save_pairs,
    save_sorted,
)
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
    digests: list[bytes] = []
    for part in batch:
        for table in tables(part, ("text",)):
            digests.extend(map(xxhash.xxh3_128_digest, views(table["text"])))
    halves = np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2)
    order = np.lexsort(halves.T[::-1])
    low, high = halves[order].T
    save_sorted(work / f"digests/{number:05d}", low, high, position(number, order))
    return {"documents": len(order)}


def match_digests(low: int, high: int, work: Path, out: Path) -> dict:
    """Write the documents with a digest (in this range) that an earlier one has too, and the first one that has it."""
    *halves, documents = load_range(files_in(work / "digests", "*"), low, high, arrays=3)
    digests = np.stack(halves, axis=1)
    order = np.lexsort(digests.T[::-1])  # stable, so that copies stay in the order of the corpus
    documents = documents[order]
    starts = group_starts(digests[order])
    sizes = np.diff(starts, append=len(order))
    first = np.repeat(documents[starts], sizes)
    save_pairs(out, documents, first, documents != first)
    return {}


def find_copies(batches: list[list[Path]], work: Path) -> None:
    """Write documents with the text of an earlier one, and the first of that text, to sorted files in work/drops."""
    jobs = [(i, batch, work) for i, batch in enumerate(batches)]
    counts = over_parts(digest_batch, jobs, work / "digested", "digest documents")
    bounds = sorted_files.ranges(sum(r["documents"] for r in counts))
    matches = [(low, high, work, work / f"drops/range-{i:05d}") for i, (low, high) in enumerate(bounds)]
    over_parts(match_digests, matches, work / "matched", "find duplicates")


class Duplicates(NamedTuple):
    """Documents of a batch that are dropped, in ascending order, each with the first of its cluster: positions."""

    documents: np.ndarray
    firsts: np.ndarray

    def between(self, start: int, stop: int) -> "Duplicates":
        """Those from one position to another."""
        low, high = np.searchsorted(self.documents, (start, stop))
        return Duplicates(self.documents[low:high], self.firsts[low:high])

    def samples(self, texts: pa.ChunkedArray) -> Iterator[tuple[int, int, int]]:
        """For samples: the digest of each one's text, the position of its first, and its own."""
        digests = map(xxhash.xxh3_64_intdigest, views(texts))
        return zip(digests, self.firsts.tolist(), self.documents.tolist(), strict=True)


def load_duplicates(number: int, drops: Path) -> Duplicates:
    """The documents of a batch that are in any of the files of `drops`."""
    pairs = load_range(files_in(drops, "*"), position(number, 0), position(number + 1, 0))
    return Duplicates(*pairs[:, np.argsort(pairs[0])])


def keep_rest(number: int, batch: list[Path], drops: Path, out: Path) -> dict:
    """Write the documents of some parts that no file of `drops` has; return counts, and samples of the others."""
    duplicates = load_duplicates(number, drops)
    kept = Tally()
    gone = Tally()
    samples: list[tuple] = []
    start = 0
    for file, table in rewritten(batch, out):
        here = duplicates.between(position(number, start), position(number, start + len(table)))
        stays = np.ones(len(table), dtype=bool)
        stays[offset_of(here.documents) - start] = False
        start += len(table)

        rest = table.filter(pa.array(stays))
        if len(rest):
            file.write_table(rest)
        count(kept, rest)
        others = table.filter(pa.array(~stays))
        count(gone, others)
        samples = smallest([*samples, *here.samples(others["text"])])
    return {"kept": kept.counts(), "dropped": gone.counts(), "samples": samples}


def distribution(sizes: Counter[int]) -> dict:
    """The number of clusters, the size of the largest, and how many there are by size."""
    by_power: Counter[int] = Counter()  # of two
    for size, number in sizes.items():
        by_power[(size - 1).bit_length()] += number
    named = {}
    for power, number in sorted(by_power.items()):
        name = "2" if power == 1 else f"{2 ** (power - 1) + 1}-{2**power}"
        named[name] = number
    return {"number": sizes.total(), "largest": max(sizes, default=0), "sizes": named}


def cluster_sizes(drops: Path) -> Counter[int]:
    """How many clusters have each size. All of a cluster but its first are in one file, each with that first."""
    sizes: Counter[int] = Counter()
    for file in files_in(drops, "*"):
        _, firsts = map_file(file)
        _, others = np.unique(firsts, return_counts=True)
        sizes.update((others + 1).tolist())
    return sizes


def document_of(batches: list[list[Path]], at: int) -> Document:
    """The document at a position."""
    return document_at(batches[batch_of(at)], offset_of(at))


def in_sample(document: Document) -> dict:
    """A document as samples show it."""
    return {**document._asdict(), "text": document.text[:SAMPLE_CHARACTERS]}


def pair_in_sample(method: str, params: Deduplicate, kept: Document, dropped: Document) -> dict:
    """A row of the samples of a method that drops documents."""
    row: dict[str, Any] = {"method": method}
    if method == "minhash":
        row["jaccard"] = round(minhash.similarity(kept.text, dropped.text, params.minhash.words), 4)
    row["kept"] = in_sample(kept)
    row["dropped"] = in_sample(dropped)
    return row


def drop_duplicates(method: str, params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict:
    """Drop the documents that a method finds; return counts and samples: documents kept, and dropped as the same."""
    batches = in_batches(parts)
    compared = {}
    if method == "minhash":
        compared = minhash.find_near_duplicates(params.minhash, batches, work)
    else:
        find_copies(batches, work)
    jobs = [(i, batch, work / "drops", out) for i, batch in enumerate(batches)]
    results = over_parts(keep_rest, jobs, work / "kept", "drop duplicates")

    rows = []
    for _, first, other in smallest(list(chain.from_iterable(r["samples"] for r in results))):
        rows.append(pair_in_sample(method, params, document_of(batches, first), document_of(batches, other)))
    return {
        "kept": add_up([r["kept"] for r in results]),
        "dropped": add_up([r["dropped"] for r in results]),
        "stats": {"clusters": distribution(cluster_sizes(work / "drops")), **compared},
        "samples": rows,
    }


def cut_in_sample(sample: tuple, batches: list[list[Path]], n: int, work: Path) -> dict:
    """A row of the samples of what was cut. `sample`: as `substrings.samples` has them; `n`: bytes of a window."""
    _, copy, before, other, byte, size, text = sample
    first = substrings.first_copy(copy, n, work) + before
    number, row, first_byte = substrings.place_of(first, n, work)
    there = document_at(batches[number], row)
    here = document_of(batches, other)
    return {
        "kept": {"id": there.id, "source": there.source, "byte": first_byte},
        "cut": {"id": here.id, "source": here.source, "byte": byte},
        "bytes": size,
        "text": text,
    }


def cut_passages(method: str, params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict:
    """Cut repeated passages; return counts and samples: what was cut, and where it stood first."""
    batches = in_batches(parts)
    results = substrings.cut(params.substring, batches, out, work)
    rows = []
    for sample in smallest(list(chain.from_iterable(r["samples"] for r in results))):
        rows.append({"method": method, **cut_in_sample(sample, batches, params.substring.bytes, work)})
    passages = Counter(chain.from_iterable(r["sizes"] for r in results))
    return {
        "kept": add_up([r["kept"] for r in results]),
        "dropped": add_up([r["dropped"] for r in results]),
        "stats": {"cut": add_up([r["cut"] for r in results]), "passages": distribution(passages)},
        "samples": rows,
    }


def apply(method: str, params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict:
    """The result of a method, which is kept over a crash; the files that led to it are then deleted."""
    out.mkdir(exist_ok=True)
    files = work / f"{method}-runs"
    act = cut_passages if method == "substring" else drop_duplicates
    result = finish(act, (method, params, parts, out, files), work / f"{method}.json")
    fsync(work)  # otherwise a power cut could lose the result but not the deletion
    shutil.rmtree(files, ignore_errors=True)  # larger than the text
    return result


def write_samples(results: Iterable[dict], out: Path) -> None:
    """Write the samples of all methods."""
    with out.open("w", encoding="utf-8") as file:
        for row in chain.from_iterable(result["samples"] for result in results):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def apply_all(params: Deduplicate, parts: list[Path], out: Path, work: Path) -> dict[str, dict]:
    """The results of the methods, each applied to the parts that the one before it wrote; the last writes to `out`."""
    results: dict[str, dict] = {}
    before: Path | None = None  # the folder that the previous method wrote to
    for method in params.methods:
        written = out if method == params.methods[-1] else work / f"{method}-parts"
        results[method] = apply(method, params, parts, written, work)
        if before:
            shutil.rmtree(before, ignore_errors=True)
        before = written
        parts = [written / part.name for part in parts]
    return results


@stage(version=2, resumes=True)
def deduplicate(params: Deduplicate, corpus: Artifact, out: Path) -> dict:
    """Apply the methods one after the other; count what each dropped or cut, by source."""
    work = out / WORK
    work.mkdir(exist_ok=True)
    parts = parts_of(corpus)
    results = apply_all(params, parts, out, work)
    if results:
        kept = results[params.methods[-1]]["kept"]
    else:
        for part in parts:
            link(part, out / part.name)
        kept = {name: corpus.stats[name] for name in Tally().counts()}

    write_samples(results.values(), out / "duplicates.jsonl")
    return {
        "parts": len(parts),
        **kept,
        "dropped": {REASONS[method]: result["dropped"] for method, result in results.items()},
        **{method: result["stats"] for method, result in results.items()},
    }
