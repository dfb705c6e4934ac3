"""Windows: each n successive bytes of a text, their hashes, and the anchors that windows of the same bytes share."""

import numpy as np
import xxhash

FACTORS = [np.uint64(xxhash.xxh3_64_intdigest(b"factor %d" % i) | 3) for i in range(16)]
BYTES = np.array([xxhash.xxh3_64_intdigest(bytes([i])) for i in range(256)], dtype=np.uint64)


def gram_hashes(data: np.ndarray, n: int) -> np.ndarray:
    """(len(data) - n + 1,) uint64: a hash of each n successive bytes, made of the hashes of two shorter runs."""
    hashes, size = BYTES[data], 1
    while size < n:
        step = min(size, n - size)  # the last two may overlap
        joined = hashes[:-step] * FACTORS[size.bit_length()]
        joined += hashes[step:]
        hashes, size = joined, size + step
    hashes ^= hashes >> np.uint64(32)
    return hashes


def sliding(function: np.ufunc, values: np.ndarray, width: int) -> np.ndarray:
    """The least or greatest of each `width` successive values; width is a power of two."""
    size = 1
    while size < width:
        values, size = function(values[:-size], values[size:]), 2 * size
    return values


def anchors_in(n: int) -> int:
    """How many places in a window of n bytes an anchor can begin at: a power of two."""
    return 1 << ((n // 2).bit_length() - 1)


def select(data: np.ndarray, whole: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the anchors of windows of n bytes in `data` begin, and their hashes; `whole`: which windows to consider.

    An anchor depends on its window alone, so equal windows have equal anchors. Each window has at least one.
    """
    width = anchors_in(n)
    hashes = gram_hashes(data, n - width + 1)
    ranks = (hashes >> np.uint64(32)).astype(np.uint32) | 1  # 0 is less than all
    least = np.zeros(len(ranks) + width - 1, dtype=np.uint32)
    least[width - 1 : len(ranks)] = np.where(whole, sliding(np.minimum, ranks, width), 0)
    at = np.flatnonzero(sliding(np.maximum, least, width) == ranks)
    return at, hashes[at] * FACTORS[0]  # anchors have small hashes; this spreads them evenly


def whole_windows(ends: np.ndarray, start: int, size: int, n: int) -> np.ndarray:
    """(size,) bool: which windows of n bytes that begin at start, start + 1 … lie within one document."""
    low, high = np.searchsorted(ends, [start, start + size], side="right")
    stops = ends[low : high + 1]
    begins = np.concatenate(([start], stops[:-1]))
    last = np.clip(stops - n, begins, start + size)  # the last byte of each is the separator
    return mask(begins - start, last - start, size)


def mask(starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray:
    """(size,) bool: true within these intervals, which are in ascending order and do not overlap."""
    edges = np.concatenate(([0], np.stack((starts, stops), axis=1).ravel(), [size]))
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def intervals(chosen: np.ndarray, copies: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of true values begin and end; if `copies` are given, a run ends where they don't continue by one."""
    on = chosen[1:] & chosen[:-1]
    if copies is not None:
        on &= np.diff(copies) == 1
    return np.flatnonzero(chosen & ~np.append(False, on)), np.flatnonzero(chosen & ~np.append(on, False)) + 1
