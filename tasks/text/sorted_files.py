"""External sorting: sorted files, from which a process reads one range of the keys at a time.

A sorted file has several arrays, one after the other: the keys, ascending, and their values, of 64 bits each. A
position is a place in a corpus as one integer: the number of a batch of parts, then a row or byte of that batch.
"""

import mmap
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np

ENTRIES = 1 << 22  # in a range: sorting them takes some 200 MiB
RANGES = 8  # that are read at once
OFFSET_BITS = 40  # of a position: rows or bytes of a batch
Places = TypeVar("Places", int, np.ndarray)  # one or many


def position(batch: int, offset: Places) -> Places:
    """The position of a row or byte of a batch, or of many."""
    return (batch << OFFSET_BITS) + offset


def batch_of(positions: Places) -> Places:
    """The number of the batch."""
    return positions >> OFFSET_BITS


def offset_of(positions: Places) -> Places:
    """The row or byte in its batch."""
    return positions & ((1 << OFFSET_BITS) - 1)


def save(path: Path, array: np.ndarray) -> None:
    """Write a one-dimensional array as .npy; unlike numpy's own, an error on a full disk says why."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array).data)


def save_sorted(file: Path, keys: np.ndarray, *values: np.ndarray) -> None:
    """Write keys, which are in ascending order, and their values."""
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as out:
        for array in (keys, *values):
            out.write(np.ascontiguousarray(array).data)


def save_pairs(file: Path, positions: np.ndarray, firsts: np.ndarray, chosen: np.ndarray) -> None:
    """Write those of the positions that are chosen, in ascending order, and an earlier position for each."""
    positions = positions[chosen]
    firsts = firsts[chosen]
    order = np.argsort(positions)
    save_sorted(file, positions[order], firsts[order])


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The sorted files in a folder, in the order of their names."""
    return sorted(folder.glob(pattern), key=lambda file: (len(file.name), file.name))  # those of batches by number


def map_file(file: Path, arrays: int = 2) -> np.ndarray:
    """(arrays, n) int64: the keys and values of a sorted file, on disk."""
    if not file.stat().st_size:  # which can't be mapped
        return np.zeros((arrays, 0), dtype=np.int64)
    with file.open("rb") as data:
        memory = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
    memory.madvise(mmap.MADV_RANDOM)  # otherwise a search for a range would read most of the file
    return np.frombuffer(memory, dtype=np.int64).reshape(arrays, -1)


def load_range(files: list[Path], low: int, high: int, arrays: int = 2) -> np.ndarray:
    """(arrays, n) int64: the keys with low <= key < high of these files, one file after the other, and their values."""
    pieces = [np.zeros((arrays, 0), dtype=np.int64)]
    for file in files:
        keys = map_file(file, arrays)[0].view(np.uint64)
        start = int(keys.searchsorted(np.uint64(low)))
        end = int(keys.searchsorted(np.uint64(high - 1), side="right"))
        if start == end:
            continue
        columns = []
        for i in range(arrays):
            place = 8 * (i * len(keys) + start)
            columns.append(np.fromfile(file, np.int64, end - start, offset=place))
        pieces.append(np.stack(columns))
    return np.concatenate(pieces, axis=1)


def load_ranges(files: list[Path], bounds: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The positions in each of these ranges, ascending, and their values; a file is opened once for several ranges."""
    for begin in range(0, len(bounds), RANGES):
        several = bounds[begin : begin + RANGES]
        low, _ = several[0]
        _, high = several[-1]
        rows = load_range(files, low, high)
        rows = rows[:, np.argsort(rows[0])]
        for edges in several:
            start, end = np.searchsorted(rows[0], edges)
            yield rows[:, start:end]


def join_pieces(pieces: Iterable[tuple[np.ndarray, ...]]) -> Iterator[list[np.ndarray]]:
    """Keys and values in fewer pieces, each to become a sorted file, since every file is opened for each range."""
    waiting = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece[0])
        if size >= ENTRIES // 8:  # what a core's cache nearly holds: twice as many take longer to sort
            yield [np.concatenate(column) for column in zip(*waiting, strict=True)]
            waiting = []
            size = 0
    if waiting:
        yield [np.concatenate(column) for column in zip(*waiting, strict=True)]


def ranges(entries: int, most: int = 0, low: int = 0, high: int = 1 << 64) -> list[tuple[int, int]]:
    """Divide low <= key < high into ranges with about `most` (default ENTRIES) of this many evenly spread keys."""
    count = max(1, -(-entries // (most or ENTRIES)))
    edges = [low + (high - low) * i // count for i in range(count + 1)]
    return list(pairwise(edges))


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """The order that sorts keys, stable. If few keys are equal, three times as fast as numpy's stable sort."""
    order = np.argsort(keys)
    ranked = keys[order]
    equal = np.flatnonzero(ranked[1:] == ranked[:-1])
    ties = np.union1d(equal, equal + 1)
    places = order[ties]
    order[ties] = places[np.lexsort((places, ranked[ties]))]
    return order


def group_starts(ranked: np.ndarray) -> np.ndarray:
    """Where each group of equal keys begins; `ranked`: keys in ascending order, or (n, k) rows of several."""
    new = np.ones(len(ranked), dtype=bool)
    differ = ranked[1:] != ranked[:-1]
    new[1:] = differ.any(axis=1) if differ.ndim > 1 else differ
    return np.flatnonzero(new)


def group(keys: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys in ascending order, their positions, and for each the lowest position among those of equal keys."""
    order = np.argsort(keys)
    keys = keys[order]
    positions = positions[order]
    starts = group_starts(keys)
    lowest = np.minimum.reduceat(positions, starts) if len(starts) else positions
    sizes = np.diff(starts, append=len(keys))
    return keys, positions, np.repeat(lowest, sizes)
