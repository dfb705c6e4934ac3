"""Sequences of tokens, of all parts together: which to keep, in which order, and writing them in that order."""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Literal

import numpy as np
import regex
from tokenizers import Tokenizer

from tasks.store.artifacts import SEQUENCES
from tasks.text.tokenizer import reading_of

BLOCK = 1 << 24  # bytes of sequences that are read at once
WINDOW = 1 << 26  # bytes of sequences that are put in order at once
MOST_RUNS = 1000  # ascending runs of an order, up to which each is written by itself
STOP = regex.compile(r"\p{Sentence_Terminal}")
Sort = Literal["sentence-length", "unigram", "random", "none"]
Rows = np.ndarray | range  # of all parts together, ascending


def length_of(folder: Path) -> int:
    """The tokens of each sequence in a folder of `tokenize`."""
    return np.load(folder / SEQUENCES, mmap_mode="r").shape[1]


def blocks_of(parts: list[np.memmap], rows: Rows) -> Iterator[np.ndarray]:
    """The sequences in these rows of all parts together: each part is read once, a block at a time."""
    start = 0
    step = max(1, BLOCK // parts[0].strides[0])
    for part in parts:
        stop = start + len(part)
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            here = rows[bisect_left(rows, begin) : bisect_left(rows, end)]
            if len(here):
                yield part[np.asarray(here) - start]
                pages = part.base
                if isinstance(pages, mmap.mmap):  # those that are read count as memory of this process
                    pages.madvise(mmap.MADV_DONTNEED)  # the system still caches them
        start = stop


def keys_by_stops(parts: list[np.memmap], rows: Rows, tokenizer: Tokenizer) -> np.ndarray:
    """How many tokens of each sequence are not full stops: with as many tokens, more stops mean shorter sentences."""
    number_of = tokenizer.get_vocab()
    if reading_of(tokenizer).characters == "ascii":
        stops = [number_of["."]] if "." in number_of else []
    else:  # marks of any script
        stops = [number for entry, number in number_of.items() if STOP.fullmatch(entry)]
    is_stop = np.isin(
        np.arange(max(number_of.values()) + 1), stops
    )  # a table: np.isin of all tokens takes thrice as long
    number_of_stops = [is_stop[block].sum(axis=1, dtype=np.uint16) for block in blocks_of(parts, rows)]
    return parts[0].shape[1] - np.concatenate(number_of_stops)


def keys_by_surprise(parts: list[np.memmap], rows: Rows, entries: int) -> np.ndarray:
    """The sums of the tokens' negative log-probabilities, by their frequencies in these rows: whole numbers."""
    counts = np.zeros(entries, dtype=np.int64)
    for block in blocks_of(parts, rows):
        counts += np.bincount(block.ravel(), minlength=entries)
    surprise = -np.log((counts + 1) / (counts.sum() + entries))  # add-one smoothing
    worth = np.rint(surprise * 2**40).astype(np.int64)
    return np.concatenate([worth[block].sum(axis=1) for block in blocks_of(parts, rows)])


def draw_rows(sequences: int, most: int, seed: int) -> Rows:
    """At most that many rows of all, drawn at random, ascending."""
    if sequences <= most:
        return range(sequences)
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(sequences, most, replace=False, shuffle=False))


def order_of(parts: list[np.memmap], rows: Rows, sort: Sort, seed: int, tokenizer: Tokenizer) -> np.ndarray:
    """The places among these rows, in the order in which to write them; ties stay in the order of the corpus."""
    match sort:
        case "none":
            return np.arange(len(rows))
        case "random":
            return np.random.default_rng(seed).permutation(len(rows))
        case "sentence-length":
            keys = keys_by_stops(parts, rows, tokenizer)
        case "unigram":
            keys = keys_by_surprise(parts, rows, len(tokenizer.get_vocab()))
    return np.argsort(keys, kind="stable")


def windows_of(order: np.ndarray, size: int) -> list[np.ndarray]:
    """The order cut into few windows: where it falls, so that each ascends, or else into windows of `size`."""
    falls = np.flatnonzero(order[1:] < order[:-1]) + 1
    if len(falls) < MOST_RUNS:
        return np.split(order, falls)
    return np.split(order, np.arange(size, len(order), size))


def put_in_order(file: BufferedRandom, ascending: np.ndarray, ranks: np.ndarray) -> None:
    """Rewrite a window of the file, at which it is, that has the shape of `ascending`: by the ranks of its rows."""
    start = file.tell()
    file.readinto(ascending.data)
    file.seek(start)
    step = max(1, BLOCK // ascending[0].nbytes)
    for begin in range(0, len(ranks), step):
        file.write(ascending[ranks[begin : begin + step]].data)


def write_sequences(path: Path, parts: list[np.memmap], rows: Rows, order: np.ndarray) -> None:
    """Write these rows in this order as a .npy file. Raises OSError if the disk is full.

    The parts are read once, in their order, as a row is a sixteenth of what the disk reads: each sequence goes behind
    the one before it in the same window of the file, and a window that doesn't ascend is then put in order by itself.
    Not through a memory map: the kernel kills a process that writes into one on a full disk (SIGBUS).
    """
    kind = parts[0].dtype
    length = parts[0].shape[1]
    size = parts[0].strides[0]  # bytes of a sequence
    windows = windows_of(order, max(1, WINDOW // size))
    header = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": (len(order), length)}
    with path.open("w+b") as file:
        np.lib.format.write_array_header_1_0(file, header)
        starts = file.tell() + size * np.cumsum([0, *map(len, windows)])
        fill_windows(file, blocks_of(parts, rows), windows, starts)
        for start, window in zip(starts, windows, strict=False):
            if (window[1:] < window[:-1]).any():
                file.seek(start)
                ranks = np.argsort(np.argsort(window))
                put_in_order(file, np.empty((len(window), length), kind), ranks)


def fill_windows(
    file: BufferedRandom, blocks: Iterable[np.ndarray], windows: list[np.ndarray], starts: np.ndarray
) -> None:
    """Write the sequences of the blocks into their windows of the file, in the order in which they come.

    A window has the places of its sequences among those of all blocks; `starts`: where it begins in the file.
    """
    window_of = np.empty(sum(map(len, windows)), np.uint16)
    for number, window in enumerate(windows):
        window_of[window] = number
    ends = starts.copy()
    done = 0
    for block in blocks:
        numbers = window_of[done : done + len(block)]
        done += len(block)
        by_window = np.argsort(numbers, kind="stable")
        changes = np.flatnonzero(np.diff(numbers[by_window])) + 1
        for here in np.split(by_window, changes):
            number = numbers[here[0]]
            file.seek(ends[number])
            ends[number] += file.write(block[here].data)
