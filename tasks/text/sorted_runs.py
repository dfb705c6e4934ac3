"""Numbers too many for memory: sorted runs on disk, from which a process reads one range of the keys at a time.

A run is a set of files with one array each: `<name>.0.npy` has the keys, ascending, and `<name>.1.npy` … their
values. An address is a place in a corpus: the number of a part, then a row or byte of that part.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np

ENTRIES = 1 << 22  # in a range: sorting them takes some 200 MiB
CLOSE = 1000  # pairs of keys that differ in their lower bits only; above this number a plain sort is faster
PLACE_BITS = 40  # of an address: rows or bytes of a part


def address(part: int, place: np.ndarray | int) -> np.ndarray | int:
    """The address of a row or byte of a part, or of many."""
    return (part << PLACE_BITS) + place


def part_of(addresses: np.ndarray | int) -> np.ndarray | int:
    """The number of the part."""
    return addresses >> PLACE_BITS


def place_of(addresses: np.ndarray | int) -> np.ndarray | int:
    """The row or byte in its part."""
    return addresses & ((1 << PLACE_BITS) - 1)


def save(path: Path, array: np.ndarray) -> None:
    """Write a one-dimensional array as .npy; unlike numpy's own, an error on a full disk gives the reason."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
        file.write(np.ascontiguousarray(array))


def save_run(run: Path, keys: np.ndarray, *others: np.ndarray) -> None:
    """Write keys, which are in ascending order, and their values."""
    for i, array in enumerate((keys, *others)):
        save(run.with_name(f"{run.name}.{i}.npy"), array)


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
            pieces[i].append(np.array(np.load(f"{run}.{i}.npy", mmap_mode="r")[start:end]))
    return [np.concatenate(column) if column else np.zeros(0, dtype=np.int64) for column in pieces]


def ranges(entries: int, most: int = 0, low: int = 0, high: int = 1 << 64) -> list[tuple[int, int]]:
    """Divide low <= key < high into ranges with about `most` (default ENTRIES) of so many evenly spread keys each."""
    count = max(1, -(-entries // (most or ENTRIES)))
    return list(pairwise(low + (high - low) * i // count for i in range(count + 1)))


def ascending(keys: np.ndarray) -> np.ndarray:
    """The order that sorts keys from 0 to 2^64 - 1, stable; several times as fast as numpy's argsort.

    Each key's upper bits are sorted together with its index; keys that differ in the bits below are then put in order.
    """
    keys = keys.astype(np.uint64, copy=False)
    index = np.uint64((1 << len(keys).bit_length()) - 1)
    shift = np.uint64(min(63, 64 - int(keys.max(initial=0)).bit_length()))
    packed = ((keys << shift) & ~index) | np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & index).astype(np.int64)
    ranked = keys[order]
    close = (ranked[1:] != ranked[:-1]) & ((packed[1:] ^ packed[:-1]) <= index)
    if close.sum() > CLOSE:
        return np.argsort(keys, kind="stable")
    for i in np.flatnonzero(close).tolist():
        group = slice(*np.searchsorted(packed, [packed[i] & ~index, packed[i] | index]))
        order[group] = order[group][np.argsort(keys[order[group]], kind="stable")]
    return order


def by_address(addresses: np.ndarray) -> np.ndarray:
    """The order that sorts addresses."""
    place_bits = int(place_of(addresses).max(initial=0)).bit_length()
    return ascending((part_of(addresses) << place_bits) + place_of(addresses))  # without the unused bits between


def part_numbers(addresses: np.ndarray) -> np.ndarray:
    """The numbers of the parts of these addresses, each once, ascending."""
    return np.flatnonzero(np.bincount(part_of(addresses)))


def firsts(ranked: np.ndarray) -> np.ndarray:
    """For each of sorted keys, the index of the first that equals it."""
    new = np.ones(len(ranked), dtype=bool)
    np.not_equal(ranked[1:], ranked[:-1], out=new[1:])
    return np.maximum.accumulate(np.where(new, np.arange(len(ranked)), 0))


def group(keys: np.ndarray, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The keys in ascending order, their addresses, and for each the address of the first that equals it."""
    order = ascending(keys)
    keys, addresses = keys[order], addresses[order]
    return keys, addresses, addresses[firsts(keys)]
