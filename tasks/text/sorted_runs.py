"""External sorting: sorted runs on disk, from which a process reads one range of the keys at a time.

A run is a set of files with one array each: `<name>.0.npy` has the keys, ascending, and `<name>.1.npy` … their
values. A position is a place in a corpus as one integer: the number of a part, then a row or byte of that part.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

ENTRIES = 1 << 22  # in a range: sorting them takes some 200 MiB
OFFSET_BITS = 40  # of a position: rows or bytes of a part


def position(part: int, offset: np.ndarray | int) -> np.ndarray | int:
    """The position of a row or byte of a part, or of many."""
    return (part << OFFSET_BITS) + offset


def part_of(positions: np.ndarray | int) -> np.ndarray | int:
    """The number of the part."""
    return positions >> OFFSET_BITS


def offset_of(positions: np.ndarray | int) -> np.ndarray | int:
    """The row or byte in its part."""
    return positions & ((1 << OFFSET_BITS) - 1)


def save(path: Path, array: np.ndarray) -> None:
    """Write a one-dimensional array as .npy; unlike numpy's own, an error on a full disk gives the reason."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


def save_run(run: Path, keys: np.ndarray, *values: np.ndarray) -> None:
    """Write keys, which are in ascending order, and their values."""
    run.parent.mkdir(exist_ok=True)
    for i, array in enumerate((keys, *values)):
        save(run.with_name(f"{run.name}.{i}.npy"), array)


def save_pairs(run: Path, positions: np.ndarray, firsts: np.ndarray, chosen: np.ndarray) -> None:
    """Write the chosen ones of these positions, in ascending order, and an earlier position for each."""
    positions, firsts = positions[chosen], firsts[chosen]
    order = np.argsort(positions)
    save_run(run, positions[order], firsts[order])


def runs_in(folder: Path, pattern: str) -> list[Path]:
    """The runs in a folder, by the names given to `save_run`, in their order."""
    names = [path.with_name(path.name.removesuffix(".0.npy")) for path in folder.glob(f"{pattern}.0.npy")]
    return sorted(names, key=lambda run: (len(run.name), run.name))  # those of parts by number


def load_range(runs: list[Path], low: int, high: int, arrays: int = 2) -> list[np.ndarray]:
    """The keys with low <= key < high of these runs, one run after the other, and their values."""
    pieces = [[] for _ in range(arrays)]
    for run in runs:
        keys = np.load(f"{run}.0.npy", mmap_mode="r")
        start = np.searchsorted(keys, keys.dtype.type(low))
        end = len(keys) if high > np.iinfo(keys.dtype).max else np.searchsorted(keys, keys.dtype.type(high))
        for i in range(arrays) if start < end or not pieces[0] else ():
            column = np.load(f"{run}.{i}.npy", mmap_mode="r") if i else keys
            pieces[i].append(np.array(column[start:end]))
    return [np.concatenate(column) if column else np.zeros(0, dtype=np.int64) for column in pieces]


def ranges(entries: int, most: int = 0, low: int = 0, high: int = 1 << 64) -> list[tuple[int, int]]:
    """Divide low <= key < high into ranges with about `most` (default ENTRIES) of so many evenly spread keys each."""
    count = max(1, -(-entries // (most or ENTRIES)))
    return list(pairwise(low + (high - low) * i // count for i in range(count + 1)))


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """The order that sorts keys, stable. If few keys are equal, three times as fast as numpy's stable sort."""
    order = np.argsort(keys)
    ranked = keys[order]
    equal = np.flatnonzero(ranked[1:] == ranked[:-1])
    ties = np.union1d(equal, equal + 1)
    order[ties] = order[ties][np.lexsort((order[ties], ranked[ties]))]
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
    keys, positions = keys[order], positions[order]
    starts = group_starts(keys)
    lowest = np.minimum.reduceat(positions, starts) if len(starts) else positions
    return keys, positions, np.repeat(lowest, np.diff(starts, append=len(keys)))
