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
from typing import NamedTuple

import numpy as np
import xxhash
from pydantic import BaseModel, Field

from tasks.corpus.parts import tables
from tasks.text import matching, sorted_files
from tasks.text.matching import hash_ngrams, matching_words
from tasks.text.sorted_files import batch_of, files_in, load_range, offset_of, position, save_pairs, save_sorted
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


def group_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists of about PIECE characters and at most SLICE texts."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= PIECE or len(some) >= SLICE:
            yield some
            some = []
            size = 0
    if some:
        yield some


def texts_in(part: Path) -> Iterator[str]:
    """The texts of a part."""
    for table in tables(part, ("text",)):
        yield from table["text"].to_pylist()


def shingles(texts: list[str], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of all runs of n words, uint32, and where those of each text end; fewer than n words count as one run."""
    hashed, ends = hash_ngrams(matching_words(texts), n, short=True)
    return (hashed >> SHIFT).astype(np.uint32), ends


def factors(count: int) -> np.ndarray:
    """(count,) uint32: odd numbers; multiplying by one permutes all numbers, so it puts all hashes into an order."""
    digests = [xxhash.xxh3_64_intdigest(b"order %d" % i) for i in range(count)]
    return np.array([digest & 0xFFFFFFFF | 1 for digest in digests], dtype=np.uint32)


def signatures(hashed: np.ndarray, ends: np.ndarray, count: int) -> np.ndarray:
    """(count, texts) uint32: each text's least hash in each of `count` orders; the greatest number if it has none."""
    minima = np.full((count, len(ends)), 0xFFFFFFFF, dtype=np.uint32)
    starts = np.append(0, ends)[:-1]
    some = np.flatnonzero(ends > starts)
    starts = starts[some]
    ends = ends[some]
    orders = factors(count)
    for begin in range(0, len(hashed), BLOCK):
        block = hashed[begin : begin + BLOCK]
        low = np.searchsorted(ends, begin, side="right")
        high = np.searchsorted(starts, begin + len(block))
        texts = some[low:high]
        edges = np.maximum(starts[low:high] - begin, 0)
        product = np.empty_like(block)
        for row, factor in zip(minima, orders, strict=True):
            np.multiply(block, factor, out=product)
            row[texts] = np.minimum(row[texts], np.minimum.reduceat(product, edges))
    return minima


def buckets(minima: np.ndarray, bands: int) -> np.ndarray:
    """(bands, texts) uint64: the bucket of each text in each band, a hash of the band and its minima there."""
    _, texts = minima.shape
    keys = np.repeat(np.arange(bands, dtype=np.uint64)[:, None], texts, axis=1)
    for row in minima.reshape(bands, -1, texts).swapaxes(0, 1):
        keys *= MULTIPLIER
        keys += row
    keys ^= keys >> SHIFT
    keys *= MULTIPLIER
    return keys


def set_digests(hashed: np.ndarray, ends: np.ndarray, seed: int) -> np.ndarray:
    """(texts,) uint64: a digest of the words of each text in their order, another one for each seed."""
    data = hashed.view(np.uint8).data
    edges = np.append(0, hashed.itemsize * ends).tolist()
    digests = [xxhash.xxh3_64_intdigest(data[start:stop], seed=seed) for start, stop in pairwise(edges)]
    return np.array(digests, dtype=np.uint64)


class Signed(NamedTuple):
    """Of the documents of a batch: their buckets, digests of their words in order, and the sizes of their sets."""

    keys: np.ndarray  # (bands, documents) uint64
    digests: np.ndarray  # (documents,) uint64, others for each part
    sizes: np.ndarray  # (documents,) int64


def write_sets(batch: list[Path], params: MinHash, file: Path) -> Signed:
    """Write the sets of some parts' documents."""
    keys = [np.zeros((params.bands, 0), dtype=np.uint64)]
    digests = [np.zeros(0, dtype=np.uint64)]
    sizes = [np.zeros(0, dtype=np.int64)]
    with file.open("wb") as out:
        for seed, part in enumerate(batch):
            for texts in group_texts(texts_in(part)):
                hashed, ends = shingles(texts, params.words)
                out.write(hashed.data)
                minima = signatures(hashed, ends, params.bands * params.rows)
                keys.append(buckets(minima, params.bands))
                digests.append(set_digests(hashed, ends, seed))
                sizes.append(np.diff(ends, prepend=0))
    signed = Signed(np.concatenate(keys, axis=1), np.concatenate(digests), np.concatenate(sizes))
    sorted_files.save(ends_file(file), np.append(0, np.cumsum(signed.sizes)))
    return signed


def sign(number: int, batch: list[Path], params: MinHash, work: Path) -> dict:
    """Write the sets of some parts' documents, and their buckets.

    Of documents of a part with the same words in the same order, only the first is put into buckets: the others are
    compared with it.
    """
    signed = write_sets(batch, params, sets_file(work, number))
    rows = np.flatnonzero(signed.sizes)  # a document without words is similar to none
    _, documents, first = sorted_files.group(signed.digests[rows], position(number, rows))
    save_pairs(work / f"pairs/same-{number:05d}", documents, first, documents != first)
    documents = np.sort(documents[documents == first])
    save_buckets(number, signed.keys, documents, work)
    return {"documents": len(documents)}


def sets_file(work: Path, number: int) -> Path:
    """The file with the sets of a batch's documents."""
    return work / f"{number:05d}.sets"


def ends_file(sets: Path) -> Path:
    """The file that says where each of these sets begins, and where the last one ends."""
    return sets.with_suffix(".ends.npy")


def save_buckets(number: int, keys: np.ndarray, documents: np.ndarray, work: Path) -> None:
    """Write the buckets of these documents of a batch; keys: (bands, rows) those of all its rows.

    As few files as memory allows, since every file is opened for each range.
    """
    keys = keys[:, offset_of(documents)]
    step = max(1, sorted_files.ENTRIES // max(1, len(documents)))
    for band in range(0, len(keys), step):
        here = keys[band : band + step].ravel()
        order = sorted_files.stable_argsort(here)
        save_sorted(work / f"buckets/{number:05d}-{band:03d}", here[order], documents[order % len(documents)])


def pair_up(low: int, high: int, work: Path, out: Path) -> dict:
    """Write which documents of a range of buckets to compare: all pairs of a small bucket.

    In a larger one each is compared with NEIGHBOURS before it and with the first, so that the work grows with the size
    of the bucket, not with its square. If several clusters share such a bucket, some may then stay apart.
    """
    keys, documents = load_range(files_in(work / "buckets", "*"), low, high)
    order = sorted_files.stable_argsort(keys)
    documents = documents[order]
    starts = sorted_files.group_starts(keys[order])
    first = np.repeat(starts, np.diff(starts, append=len(keys)))  # in the bucket of each
    places = np.arange(len(keys))
    later = []
    earlier = []
    for back in range(1, NEIGHBOURS + 1):
        at = places[places - back >= first]
        later.append(at)
        earlier.append(at - back)
    far = places[places - first > NEIGHBOURS]
    later.append(far)
    earlier.append(first[far])

    ones = documents[np.concatenate(later)]
    others = documents[np.concatenate(earlier)]
    save_pairs(out, ones, others, ones != others)
    return {}


def pair_all(documents: int, params: MinHash, work: Path) -> None:
    """Write which documents of all batches to compare. `documents`: how many there are in buckets."""
    bounds = sorted_files.ranges(params.bands * documents)
    ranges = [(low, high, work, work / f"pairs/range-{i:05d}") for i, (low, high) in enumerate(bounds)]
    over_parts(pair_up, ranges, work / "compared", "find pairs")


def candidates(number: int, folder: Path) -> np.ndarray:
    """(n, 2) documents, later and earlier: all different pairs whose later document is in this batch."""
    pairs = np.zeros((0, 2), dtype=np.int64)
    for run in [folder / f"same-{number:05d}", *files_in(folder, "range-*")]:
        here = load_range([run], position(number, 0), position(number + 1, 0))
        if here.size:
            pairs = np.concatenate((pairs, here.T))
            pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
            pairs = pairs[sorted_files.group_starts(pairs)]
    return pairs


def sets_of(documents: np.ndarray, files: list[Path]) -> list[np.ndarray]:
    """The sets of these documents, in ascending order; not yet read, but mapped."""
    sets = []
    batches = batch_of(documents)
    for number in np.unique(batches).tolist():
        rows = offset_of(documents[batches == number])
        ends = np.load(ends_file(files[number]), mmap_mode="r")
        hashes = np.asarray(np.memmap(files[number], dtype=np.uint32, mode="r"))
        for start, stop in zip(ends[rows].tolist(), ends[rows + 1].tolist(), strict=True):
            sets.append(hashes[start:stop])
    return sets


def keys_of(sets: list[np.ndarray], side: int) -> np.ndarray:
    """(hashes,) uint64: the number of the pair, each hash of its set, and the side that the set is on."""
    sizes = [len(hashes) for hashes in sets]
    pairs = np.repeat(np.arange(len(sets), dtype=np.uint64), sizes)
    hashes = np.concatenate(sets).astype(np.uint64)
    return pairs << np.uint64(33) | hashes << np.uint64(1) | np.uint64(side)


def count_by_pair(keys: np.ndarray, pairs: int) -> np.ndarray:
    """(pairs,) how many of these keys each pair has."""
    return np.bincount((keys >> np.uint64(33)).astype(np.int64), minlength=pairs)


def jaccard(first: list[np.ndarray], second: list[np.ndarray]) -> np.ndarray:
    """The Jaccard similarity of each pair in two lists of sets, uint32 and not empty."""
    keys = np.sort(np.concatenate((keys_of(first, 0), keys_of(second, 1))))
    keys = keys[np.append(True, keys[1:] != keys[:-1])]
    differences = keys[1:] ^ keys[:-1]
    in_both = keys[1:][differences == 1]  # the same number of the same pair, on the two sides
    both = count_by_pair(in_both, len(first))
    each = count_by_pair(keys, len(first))
    return both / (each - both)


def compare(number: int, files: list[Path], least: float, pairs: Path, out: Path) -> dict:
    """Compare the pairs whose later document is in this batch; write which documents are joined with an earlier one."""
    compared = candidates(number, pairs)
    known, index = np.unique(compared, return_inverse=True)
    index = index.reshape(-1, 2)
    sets = sets_of(known, files)
    sizes = np.array([len(hashes) for hashes in sets], dtype=np.int64)
    block = np.cumsum(sizes[index].sum(axis=1)) // COMPARED
    similarities = [np.zeros(0)]
    for some in np.split(index, np.flatnonzero(np.diff(block)) + 1):
        if len(some):
            later, earlier = some.T.tolist()
            similarities.append(jaccard([sets[i] for i in later], [sets[i] for i in earlier]))
    joined = compared[np.concatenate(similarities) >= least]
    others, firsts = connect(joined)
    save_sorted(out, others, firsts)
    return {"compared": len(compared), "similar": len(joined)}


def compare_all(batches: int, least: float, work: Path) -> dict[str, int]:
    """Compare the pairs of all batches; return how many were compared, and how many are similar."""
    files = [sets_file(work, i) for i in range(batches)]
    pairs = [(i, files, least, work / "pairs", work / f"links/{i:05d}") for i in range(batches)]
    counts = over_parts(compare, pairs, work / "verified", "compare pairs")
    return {name: sum(r[name] for r in counts) for name in ("compared", "similar")}


def connect(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All but the first of each connected component of (n, 2) joined documents, ascending, and that first."""
    from scipy.sparse import coo_matrix  # slow to load, and used only here
    from scipy.sparse.csgraph import connected_components

    if not len(pairs):
        return pairs[:, 0], pairs[:, 1]
    known, index = np.unique(pairs, return_inverse=True)
    ends = tuple(index.reshape(-1, 2).T)
    links = np.ones(len(pairs), dtype=np.int8)
    graph = coo_matrix((links, ends), shape=(len(known), len(known)))
    _, component = connected_components(graph, directed=False)
    _, first = np.unique(component, return_index=True)
    kept = known[first[component]]
    others = known != kept
    return known[others], kept[others]


def find_near_duplicates(params: MinHash, batches: list[list[Path]], work: Path) -> dict:
    """Find near-duplicates in these batches of parts; write them, and the first of their cluster, as work/drops/all.

    Returns counts of the pairs compared and similar.
    """
    jobs = [(i, batch, params, work) for i, batch in enumerate(batches)]
    signed = over_parts(sign, jobs, work / "sorted", "minhash")
    pair_all(sum(r["documents"] for r in signed), params, work)
    counts = compare_all(len(batches), params.jaccard, work)
    links = load_range(files_in(work / "links", "*"), 0, position(len(batches), 0))
    others, firsts = connect(links.T)
    save_sorted(work / "drops/all", others, firsts)
    return counts


def similarity(first: str, second: str, n: int) -> float:
    """The Jaccard similarity of two texts by their runs of n words."""
    hashed, ends = shingles([first, second], n)
    return float(jaccard([hashed[: ends[0]]], [hashed[ends[0] :]])[0])
