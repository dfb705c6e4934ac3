"""MinHash: documents of nearly the same words, found by locality-sensitive hashing and verified by their similarity.

A document is the set of its shingles, the runs of five words; without spaces between words (`matching.py`), of five
characters. In a random order of all hashes, two documents have the same least hash with a probability that is their
Jaccard similarity s (Broder, "On the resemblance and containment of documents", 1997). The signature of a document is
its least hash in many orders, divided into bands of several rows. Documents with the same minima in all rows of a band
share a bucket. Two documents share one with the probability

    1 - (1 - s^rows)^bands        with 14 bands of 8 rows: 0.56 at s = 0.7, 0.77 at 0.75, 0.92 at 0.8, 0.99 at 0.85

Documents that share a bucket are compared (in a large bucket each with a few before it and the first). Those that are
similar enough are joined; the connected components of all joined pairs are the clusters.

Works on disk in bounded memory: the sets take 4 bytes a word, the bands 16 bytes each for every document.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash
from pydantic import BaseModel, Field

from tasks.corpus.parts import tables
from tasks.text import matching, sorted_files
from tasks.text.matching import matched, runs
from tasks.text.sorted_files import batch_of, load_range, offset_of, position, runs_in, save_pairs, save_run
from tasks.text.words import MULTIPLIER, SHIFT
from tasks.workers.jobs import over_parts

VERSION = matching.VERSION + 1  # raise it when other near-duplicates are found: it enters the keys
BLOCK = 1 << 16  # hashes that are multiplied at once: what fits in a core's cache
PIECE = 1 << 20  # characters of text that are split into words at once: what fits in a core's cache
SLICE = 1 << 16  # documents whose signatures are held at once: at most 512 MiB
COMPARED = 1 << 21  # hashes of the sets that are compared at once
NEIGHBOURS = 8  # before it in its bucket that a document is compared with, besides the bucket's first


class MinHash(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Which documents are near-duplicates of others. The defaults are those of datatrove, made for FineWeb."""

    words: int = Field(5, ge=1, le=100, description="Words per run; documents are compared as sets of such runs.")
    bands: int = Field(14, ge=1, le=128, description="Number of bands; documents that agree in one are compared.")
    rows: int = Field(8, ge=1, le=16, description="Minima per band.")
    jaccard: float = Field(0.72, gt=0, le=1, description="Compared documents at least this similar are joined.")


def gathered(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about PIECE characters and at most SLICE texts."""
    some, size = [], 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= PIECE or len(some) >= SLICE:
            yield some
            some, size = [], 0
    if some:
        yield some


def texts_in(part: Path) -> Iterator[str]:
    """The texts of a part."""
    return (text for table in tables(part, ("text",)) for text in table["text"].to_pylist())


def shingles(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of n words, uint32, and where those of each text end; fewer than n words count as one run."""
    hashed, ends = runs(matched(texts), n, short=True)
    return (hashed >> SHIFT).astype(np.uint32), ends


def signatures(hashed: np.ndarray, ends: np.ndarray, count: int) -> np.ndarray:
    """(count, texts) uint32: the least hash of each text in so many orders; the greatest number if it has none."""
    minima = np.full((count, len(ends)), 0xFFFFFFFF, dtype=np.uint32)
    # to multiply by an odd number permutes all numbers
    factors = np.array(
        [xxhash.xxh3_64_intdigest(b"order %d" % i) & 0xFFFFFFFF | 1 for i in range(count)], dtype=np.uint32
    )
    starts = np.concatenate(([0], ends[:-1]))
    some = np.flatnonzero(ends > starts)
    starts, ends = starts[some], ends[some]
    product = np.empty(min(BLOCK, len(hashed)), dtype=np.uint32)
    for begin in range(0, len(hashed), BLOCK):
        block = hashed[begin : begin + BLOCK]
        low, high = np.searchsorted(ends, begin, side="right"), np.searchsorted(starts, begin + len(block))
        texts, edges = some[low:high], np.maximum(starts[low:high] - begin, 0)
        for row, factor in zip(minima, factors, strict=True):
            np.multiply(block, factor, out=product[: len(block)])
            row[texts] = np.minimum(row[texts], np.minimum.reduceat(product[: len(block)], edges))
    return minima


def buckets(minima: np.ndarray, bands: int) -> np.ndarray:
    """(bands, texts) uint64: the bucket of each text in each band, a hash of the band and its minima there."""
    keys = np.repeat(np.arange(bands, dtype=np.uint64)[:, None], minima.shape[1], axis=1)
    for row in minima.reshape(bands, -1, minima.shape[1]).swapaxes(0, 1):
        keys *= MULTIPLIER
        keys += row
    keys ^= keys >> SHIFT
    keys *= MULTIPLIER
    return keys


def sign(number: int, batch: list[Path], params: MinHash, work: Path) -> dict:
    """Write the sets of some parts' documents, and their buckets.

    Of documents of a part with the same words in the same order, only the first is put into buckets: the others are
    compared with it.
    """
    keys, ends, digests = [np.zeros((params.bands, 0), dtype=np.uint64)], [np.zeros(1, dtype=np.int64)], []
    with (work / f"{number:05d}.sets").open("wb") as file:
        for seed, texts in ((i, texts) for i, part in enumerate(batch) for texts in gathered(texts_in(part))):
            hashed, ends_here = shingles(texts, params.words)
            keys.append(buckets(signatures(hashed, ends_here, params.bands * params.rows), params.bands))
            data, edges = memoryview(hashed.view(np.uint8)), [0, *(4 * ends_here).tolist()]
            here = [xxhash.xxh3_64_intdigest(data[a:b], seed=seed) for a, b in pairwise(edges)]  # another for each part
            digests.append(np.array(here, dtype=np.uint64))
            file.write(data)
            ends.append(ends_here + ends[-1][-1])
    sorted_files.save(work / f"{number:05d}.ends.npy", np.concatenate(ends))
    rows = np.flatnonzero(np.diff(np.concatenate(ends)))  # a document without words is similar to none
    digest = np.concatenate([np.zeros(0, dtype=np.uint64), *digests])[rows]
    _, documents, first = sorted_files.group(digest, position(number, rows))
    save_pairs(work / f"pairs/same-{number:05d}", documents, first, documents != first)
    documents = np.sort(documents[documents == first])
    rows = offset_of(documents)
    of_bands, step = np.concatenate(keys, axis=1)[:, rows], max(1, sorted_files.ENTRIES // max(1, len(rows)))
    for band in range(0, params.bands, step):  # as few runs as memory allows: each is opened for every range
        here = of_bands[band : band + step].ravel()
        order = sorted_files.stable_argsort(here)
        save_run(work / f"buckets/{number:05d}-{band:03d}", here[order], documents[order % len(documents)])
    return {"documents": len(rows)}


def pair_up(low: int, high: int, work: Path, out: Path) -> dict:
    """Write which documents of a range of buckets to compare: all pairs of a small bucket.

    In a larger one each is compared with NEIGHBOURS before it and with the first, so that the work grows with the size
    of the bucket, not with its square. If several clusters share such a bucket, some may then stay apart.
    """
    keys, documents = load_range(runs_in(work / "buckets", "*"), low, high)
    order = sorted_files.stable_argsort(keys)
    starts, index, documents = sorted_files.group_starts(keys[order]), np.arange(len(keys)), documents[order]
    first = np.repeat(starts, np.diff(starts, append=len(keys)))
    pairs = [(at, at - back) for back in range(1, NEIGHBOURS + 1) for at in [index[index - back >= first]]]
    far = index[index - first > NEIGHBOURS]
    later, earlier = (np.concatenate(side) for side in zip(*pairs, (far, first[far]), strict=True))
    later, earlier = documents[later], documents[earlier]
    save_pairs(out, later, earlier, later != earlier)
    return {}


def candidates(number: int, folder: Path) -> np.ndarray:
    """(n, 2) documents, later and earlier: all different pairs whose later document is in this batch."""
    pairs = np.zeros((0, 2), dtype=np.int64)
    for run in [folder / f"same-{number:05d}", *runs_in(folder, "range-*")]:
        here = load_range([run], position(number, 0), position(number + 1, 0))
        if here.size:
            pairs = np.concatenate((pairs, here.T))
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
            pairs = pairs[sorted_files.group_starts(pairs)]
    return pairs


def sets_of(documents: np.ndarray, files: list[Path]) -> list[np.ndarray]:
    """The sets of these documents, in ascending order; not yet read, but mapped."""
    sets = []
    for number in np.unique(batch_of(documents)).tolist():
        rows = offset_of(documents[batch_of(documents) == number])
        ends = np.load(files[number].with_suffix(".ends.npy"), mmap_mode="r")
        hashes = np.asarray(np.memmap(files[number], dtype=np.uint32, mode="r"))
        sets += [hashes[a:b] for a, b in zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True)]
    return sets


def jaccard(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    """The Jaccard similarity of each pair in two lists of sets, uint32 and not empty."""
    keys = []
    for side, sets in enumerate((first, second)):
        pair = np.repeat(np.arange(len(sets), dtype=np.uint64), [len(numbers) for numbers in sets])
        keys.append(pair << np.uint64(33) | np.concatenate(sets).astype(np.uint64) << np.uint64(1) | np.uint64(side))
    keys = np.sort(np.concatenate(keys))
    keys = keys[np.concatenate(([True], keys[1:] != keys[:-1]))]
    in_both = keys[1:][keys[1:] ^ keys[:-1] == 1]  # the same number of the same pair, on the two sides
    both, each = (np.bincount((k >> np.uint64(33)).astype(np.int64), minlength=len(first)) for k in (in_both, keys))
    return both / (each - both)


def verify(number: int, files: list[Path], least: float, pairs: Path, out: Path) -> dict:
    """Compare the pairs whose later document is in this batch; write which documents are joined with an earlier one."""
    compared = candidates(number, pairs)
    known, index = np.unique(compared, return_inverse=True)
    sets, index = sets_of(known, files), index.reshape(-1, 2)
    cost = np.cumsum(np.array(list(map(len, sets)), dtype=np.int64)[index].sum(axis=1)) // COMPARED
    similar = [np.zeros(0)]
    for block in np.split(index, np.flatnonzero(np.diff(cost)) + 1) if len(index) else []:
        similar.append(jaccard(*([sets[i] for i in side] for side in block.T)))
    joined = compared[np.concatenate(similar) >= least]
    save_run(out, *connected(joined))
    return {"compared": len(compared), "similar": len(joined)}


def connected(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All but the first of each connected component of (n, 2) joined documents, ascending, and that first."""
    from scipy.sparse import coo_matrix  # slow to load, and used only here
    from scipy.sparse.csgraph import connected_components

    if not len(pairs):
        return pairs[:, 0], pairs[:, 1]
    known, index = np.unique(pairs, return_inverse=True)
    ends = index.reshape(-1, 2).T
    graph = coo_matrix((np.ones(len(pairs), dtype=np.int8), tuple(ends)), shape=(len(known), len(known)))
    _, component = connected_components(graph, directed=False)
    _, first = np.unique(component, return_index=True)
    kept = known[first[component]]
    return known[known != kept], kept[known != kept]


def find(params: MinHash, batches: list[list[Path]], work: Path) -> dict:
    """Find near-duplicates in these batches of parts; write them, and the first of their cluster, as work/drops/all.

    Returns counts of the pairs compared and similar.
    """
    jobs = [(i, batch, params, work) for i, batch in enumerate(batches)]
    signed = over_parts(sign, jobs, work / "sorted", "minhash")
    bounds = enumerate(sorted_files.ranges(params.bands * sum(r["documents"] for r in signed)))
    jobs = [(low, high, work, work / f"pairs/range-{i:05d}") for i, (low, high) in bounds]
    over_parts(pair_up, jobs, work / "compared", "find pairs")
    files = [work / f"{i:05d}.sets" for i in range(len(batches))]
    jobs = [(i, files, params.jaccard, work / "pairs", work / f"links/{i:05d}") for i in range(len(batches))]
    counts = over_parts(verify, jobs, work / "verified", "compare pairs")
    links = load_range(runs_in(work / "links", "*"), 0, position(len(batches), 0))
    save_run(work / "drops/all", *connected(links.T))
    return {name: sum(r[name] for r in counts) for name in ("compared", "similar")}


def similarity(first: str, second: str, n: int) -> float:
    """The Jaccard similarity of two texts by their runs of n words."""
    hashed, ends = shingles([first, second], n)
    return float(jaccard([hashed[: ends[0]]], [hashed[ends[0] :]])[0])
