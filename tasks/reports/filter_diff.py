"""Two filters side by side: which documents each of them kept, from the measurements that both wrote of every document.

Documents are joined by id, in as many passes over the measurements as keep the join in bounded memory.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from model import InputError
from tasks.corpus.parts import TOTAL, batches, row_name
from tasks.store import Artifact

KEPT = "kept"
NOT_GIVEN = "not given"  # in place of a verdict on a document that the filter's input did not have
ROWS_AT_ONCE = 4_000_000  # documents joined in one pass, in some 400 MB
TEXT_CHARACTERS = 200
REPEATED = np.uint64(0x9E3779B97F4A7C15)  # odd: an id that stands again has another digest


class Rows(NamedTuple):
    """Some of the documents that a filter measured, a row each; names are numbers, as `Names` gave them."""

    digests: np.ndarray  # uint64, of the id, and of how often it stood before
    places: np.ndarray  # int64, among all rows of the filter
    sources: np.ndarray  # int64
    verdicts: np.ndarray  # int64
    characters: np.ndarray  # int64

    def take(self, chosen: np.ndarray) -> "Rows":
        """The rows at these indices."""
        return Rows(*(column[chosen] for column in self))


class Names(dict):
    """A number for each different name, in the order in which they are met."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]

    def numbers(self, column: pa.Array) -> np.ndarray:
        """(rows,) int64: a column of names as their numbers."""
        found = column.dictionary_encode()
        own = np.array([self[name] for name in found.dictionary.to_pylist()], dtype=np.int64)
        return own[found.indices.to_numpy()]


class Sample(NamedTuple):
    """A document of which two filters say different things: the digest it is chosen by, and its row in either."""

    digest: int
    in_a: int
    in_b: int


def measurements(filtered: Artifact) -> Iterator[tuple[Path, pq.ParquetFile]]:
    """The files with a filter's measurements, in order."""
    paths = sorted(filtered.path.glob("measured-*.parquet"))
    if not paths:
        raise InputError(f"{filtered.name} has no measured-*.parquet. Expected the artifact of a filter; run it again.")
    for path in paths:
        try:
            with pq.ParquetFile(path) as file:
                yield path, file
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"{path.name} of {filtered.name} is damaged: {error}. Delete the artifact and run the filter again."
            ) from error


def read(filtered: Artifact, share: int, shares: int, names: Names) -> Rows:
    """The rows whose digests, divided by `shares`, leave `share`."""
    found, before = [Rows(np.zeros(0, np.uint64), *[np.zeros(0, np.int64)] * 4)], 0
    for _, file in measurements(filtered):
        for batch in file.iter_batches(columns=["id", "source", "verdict", "characters"]):
            ids = (name.encode() for name in batch["id"].to_pylist())
            digests = np.array([xxhash.xxh3_64_intdigest(name) for name in ids], dtype=np.uint64)
            places = np.arange(before, before + len(digests))
            columns = names.numbers(batch["source"]), names.numbers(batch["verdict"]), batch["characters"].to_numpy()
            found.append(Rows(digests, places, *columns).take(digests % np.uint64(shares) == share))
            before += len(digests)
    rows = Rows(*map(np.concatenate, zip(*found, strict=True)))
    return rows._replace(digests=rows.digests + times_before(rows.digests) * REPEATED)


def times_before(digests: np.ndarray) -> np.ndarray:
    """How often each digest stood before, uint64."""
    order = np.argsort(digests, kind="stable")
    ranked, counts = digests[order], np.zeros(len(digests), dtype=np.uint64)
    counts[order] = np.arange(len(ranked)) - np.searchsorted(ranked, ranked)
    return counts


class Counts:
    """Documents and characters by (source, verdict of A, verdict of B)."""

    def __init__(self) -> None:
        self.documents, self.of_a, self.of_b = Counter(), Counter(), Counter()

    def add(self, names: Names, a: Rows | None, b: Rows | None) -> None:
        """Count documents: the same ones in A and B, or if one is None, those that only the other was given."""
        sources, size = (a or b).sources, len((a or b).sources)
        verdicts = [rows.verdicts if rows else np.full(size, names[NOT_GIVEN]) for rows in (a, b)]
        of_a, of_b = (rows.characters if rows else np.zeros(size) for rows in (a, b))
        cells = (sources * len(names) + verdicts[0]) * len(names) + verdicts[1]
        _, first, inverse = np.unique(cells, return_index=True, return_inverse=True)
        told = list(names)
        for counter, weights in ((self.documents, np.ones(size)), (self.of_a, of_a), (self.of_b, of_b)):
            for i, total in zip(first.tolist(), np.bincount(inverse, weights).tolist(), strict=True):
                counter[told[sources[i]], told[verdicts[0][i]], told[verdicts[1][i]]] += int(total)

    def total(self, counter: Counter, source: str | None, a: bool | None, b: bool | None) -> int:
        """Of a source (None: all), those that A kept or did not (None: either), and B."""
        return sum(
            count
            for (own, of_a, of_b), count in counter.items()
            if source in (None, own) and a in (None, of_a == KEPT) and b in (None, of_b == KEPT)
        )


def table(counts: Counts) -> list[dict]:
    """What each filter kept and only it kept, a row a source, the sum first, the largest source next."""
    sources = {source: counts.total(counts.documents, source, None, None) for source, _, _ in counts.documents}
    return [
        {
            "source": TOTAL if name is None else row_name(name),
            "A keeps": counts.total(counts.documents, name, True, None),
            "B keeps": counts.total(counts.documents, name, None, True),
            "A keeps, B does not": counts.total(counts.documents, name, True, False),
            "B keeps, A does not": counts.total(counts.documents, name, False, True),
            "characters, A keeps": counts.total(counts.of_a, name, True, None),
            "characters, B keeps": counts.total(counts.of_b, name, None, True),
        }
        for name in (None, *sorted(sources, key=lambda source: (-sources[source], source)))
    ]


def changes(counts: Counts) -> list[dict]:
    """The documents that one of the filters kept, by what the other says of them, the most first."""
    documents, characters = Counter(), Counter()
    for cell, count in counts.documents.items():
        _, of_a, of_b = cell
        if (of_a == KEPT) != (of_b == KEPT):
            documents[of_a, of_b] += count
            characters[of_a, of_b] += (counts.of_a if of_a == KEPT else counts.of_b)[cell]
    order = sorted(documents, key=lambda change: (change[0] != KEPT, -documents[change], change))
    return [{"A": c[0], "B": c[1], "documents": documents[c], "characters": characters[c]} for c in order]


def record(filtered: Artifact, place: int) -> dict:
    """What a filter measured of the document in one of its rows, and, if it kept it, how its text begins."""
    for path, file in measurements(filtered):
        if place >= file.metadata.num_rows:
            place -= file.metadata.num_rows
            continue
        found = pq.read_table(path).slice(place, 1).to_pylist()[0]
        if found["verdict"] == KEPT:
            of_part = (d for batch in batches(path.with_name(path.name.replace("measured", "part"))) for d in batch)
            same = (d.text for d in of_part if d.id == found["id"] and len(d.text) == found["characters"])
            found["text"] = next(same, "")[:TEXT_CHARACTERS]
        return found
    raise IndexError(place)


def told(sample: Sample, a: Artifact, b: Artifact) -> dict:
    """A sample, for people to read."""
    of_a, of_b = record(a, sample.in_a), record(b, sample.in_b)
    about = {"id": of_a["id"], "source": of_a["source"]}
    for name, of in (("A", of_a), ("B", of_b)):
        about |= {f"{name} tokens_per_char": round(of["tokens_per_char"], 4), f"{name} verdict": of["verdict"]}
    return about | {"text": of_a.get("text") or of_b.get("text", "")}


def compare(a: Artifact, b: Artifact, samples: int = 5) -> dict:
    """What two filters kept: `sources` (a row a source), `changes` (by verdict), and samples of `dropped` and of `added`.

    `dropped` are documents that A kept and B dropped, `added` the reverse: those whose ids have the smallest digests.
    """
    counts, names = Counts(), Names({KEPT: 0, NOT_GIVEN: 1})
    chosen: dict[str, list[Sample]] = {"dropped": [], "added": []}
    most = max(sum(file.metadata.num_rows for _, file in measurements(each)) for each in (a, b))
    shares = -(-most // ROWS_AT_ONCE) or 1
    for share in range(shares):
        of_a, of_b = read(a, share, shares, names), read(b, share, shares, names)
        _, in_a, in_b = np.intersect1d(of_a.digests, of_b.digests, assume_unique=True, return_indices=True)
        counts.add(names, both_a := of_a.take(in_a), both_b := of_b.take(in_b))
        counts.add(names, of_a.take(np.delete(np.arange(len(of_a.digests)), in_a)), None)
        counts.add(names, None, of_b.take(np.delete(np.arange(len(of_b.digests)), in_b)))
        kept_by_a, kept_by_b = (both.verdicts == names[KEPT] for both in (both_a, both_b))
        for name, differ in (("dropped", kept_by_a & ~kept_by_b), ("added", kept_by_b & ~kept_by_a)):
            columns = (both_a.digests, both_a.places, both_b.places)
            found = zip(*(column[differ].tolist() for column in columns), strict=True)
            chosen[name] = heapq.nsmallest(samples, [*chosen[name], *(Sample(*one) for one in found)])
    return {
        "sources": table(counts),
        "changes": changes(counts),
        **{name: [told(sample, a, b) for sample in found] for name, found in chosen.items()},
    }
