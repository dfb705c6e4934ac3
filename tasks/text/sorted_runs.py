"""Numbers too many for memory: sorted runs on disk, of which one process reads a range of the keys at a time.

A run is some files of one array each, `<name>.0.npy` with the keys, ascending, and `<name>.1.npy` … with what belongs to
them. An address is where something stands in a corpus: the number of its part, then its row, or its byte, in that part.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

ENTRIES = 1 << 22  # read at once in a range: some 200 MiB with what sorting them takes
MENDED = 1000  # pairs of keys that differ in their lower bits only; with more of them, all is sorted in the plain way
PLACE_BITS = 40  # of an address: rows or bytes of a part
MULTIPLIER = np.uint64(0xD6E8FEB86659FD93)  # odd, with its bits well spread


def address(part: int, place: np.ndarray | int) -> np.ndarray | int:
    """The address of a row or byte, or of many, in a part."""
    return (part << PLACE_BITS) + place


def part_of(addresses: np.ndarray | int) -> np.ndarray | int:
    """The number of the part."""
    return addresses >> PLACE_BITS


def place_of(addresses: np.ndarray | int) -> np.ndarray | int:
    """The row or byte in its part."""
    return addresses & ((1 << PLACE_BITS) - 1)


def save(path: Path, array: np.ndarray) -> None:
    """Write a one-dimensional array as .npy; unlike numpy's own, with the reason where the disk is full."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


def save_run(run: Path, keys: np.ndarray, *others: np.ndarray) -> None:
    """Write keys in ascending order, and what belongs to them."""
    for i, array in enumerate((keys, *others)):
        save(run.with_name(f"{run.name}.{i}.npy"), array)


def runs(folder: Path, pattern: str) -> list[Path]:
    """The runs in a folder, by the names given to `save_run`, in their order."""
    found = [path.with_name(path.name.removesuffix(".0.npy")) for path in folder.glob(f"{pattern}.0.npy")]
    return sorted(found, key=lambda run: (len(run.name), run.name))  # the parts' by number


def load_range(found: list[Path], low: int, high: int, arrays: int = 2) -> list[np.ndarray]:
    """Keys with low <= key < high of these runs, one run after the other, and what belongs to them."""
    pieces = [[] for _ in range(arrays)]
    for run in found:
        keys = np.load(f"{run}.0.npy", mmap_mode="r")
        start = np.searchsorted(keys, keys.dtype.type(low))
        end = len(keys) if high > np.iinfo(keys.dtype).max else np.searchsorted(keys, keys.dtype.type(high))
        for i in range(arrays) if start < end or not pieces[0] else ():
            pieces[i].append(np.array(np.load(f"{run}.{i}.npy", mmap_mode="r")[start:end]))
    return [np.concatenate(column) if column else np.zeros(0, dtype=np.int64) for column in pieces]


def ranges(entries: int, most: int = 0, low: int = 0, high: int = 1 << 64) -> list[tuple[int, int]]:
    """Ranges of keys from low on, below high, that, of so many evenly spread, hold about `most` (ENTRIES) or fewer each."""
    count = max(1, -(-entries // (most or ENTRIES)))
    return list(pairwise(low + (high - low) * i // count for i in range(count + 1)))


def ascending(keys: np.ndarray) -> np.ndarray:
    """The order that sorts keys from 0 to 2^64 - 1, equal ones staying as they were; several times as fast as numpy's.

    Each key's upper bits are sorted together with its index; keys that differ in the bits below only are mended.
    """
    keys = keys.astype(np.uint64, copy=False)
    index = np.uint64((1 << len(keys).bit_length()) - 1)
    shift = np.uint64(min(63, 64 - int(keys.max(initial=0)).bit_length()))
    packed = ((keys << shift) & ~index) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index).astype(np.int64)
    ranked = keys[order]
    close = (ranked[1:] != ranked[:-1]) & ((packed[1:] ^ packed[:-1]) <= index)
    doubtful = np.flatnonzero(close)
    if len(doubtful) > MENDED:
        return np.argsort(keys, kind="stable")
    for i in doubtful.tolist():
        group = slice(*np.searchsorted(packed, [packed[i] & ~index, packed[i] | index]))
        order[group] = order[group][np.argsort(keys[order[group]], kind="stable")]
    return order


def by_address(addresses: np.ndarray) -> np.ndarray:
    """The order that sorts addresses."""
    place_bits = int(place_of(addresses).max(initial=0)).bit_length()
    return ascending((part_of(addresses) << place_bits) + place_of(addresses))  # without the unused bits between


def parts_of(addresses: np.ndarray) -> np.ndarray:
    """The numbers of the parts in which these stand, each once, ascending."""
    return np.flatnonzero(np.bincount(part_of(addresses)))


def firsts(ranked: np.ndarray) -> np.ndarray:
    """Of sorted keys, the index of the first that equals each."""
    new = np.ones(len(ranked), dtype=bool)
    np.not_equal(ranked[1:], ranked[:-1], out=new[1:])
    return np.maximum.accumulate(np.where(new, np.arange(len(ranked)), 0))
