"""Windows of bytes in the text of a batch of parts: which lie within a document, their hashes and their anchors."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from tasks.corpus.parts import strings, tables, views
from tasks.text import sorted_files
from tasks.text.sorted_files import Places, files_in, load_ranges, position

CHUNK = 1 << 22  # windows of a batch that are processed together
BLOCK = 1 << 15  # bytes that are hashed at once: what fits in a core's cache
SEPARATOR = b"\xff"  # after each document: no byte of UTF-8
FACTORS = [np.uint64(xxhash.xxh3_64_intdigest(b"factor %d" % i) | 3) for i in range(16)]  # odd, of joined hashes
BYTES = np.array([xxhash.xxh3_64_intdigest(bytes([i])) for i in range(256)], dtype=np.uint64)  # the hash of each byte


def files_of(folder: Path, number: int) -> list[Path]:
    """The sorted files that may have positions of a batch: its own and those of ranges."""
    return [*files_in(folder, f"{number:05d}-*"), *files_in(folder, "range-*")]


def text_file(work: Path, number: int) -> Path:
    """The file with the text of a batch."""
    return work / f"{number:05d}.text"


class Chunk(NamedTuple):
    """Windows that begin at successive places of a batch's text and are processed together."""

    start: int
    size: int

    @property
    def stop(self) -> int:
        """The place after the last one."""
        return self.start + self.size


class Text:
    """The documents of a batch in one file, a separator after each, for windows of n bytes."""

    def __init__(self, number: int, file: Path, n: int) -> None:
        self.number = number
        self.file = file
        self.n = n
        self.ends = np.load(ends_of(file))  # (documents,) int64: where each ends, with its separator

    def chunks(self) -> Iterator[Chunk]:
        """All windows, in order, those over the end of a document too."""
        total = size_of(self.ends)
        for start in range(0, total, CHUNK):
            yield Chunk(start, min(CHUNK, total - start))

    def read(self, chunk: Chunk) -> np.ndarray:
        """(size + n - 1,) uint8: the bytes of the windows of a chunk, zeros after the end of the text."""
        data = np.zeros(chunk.size + self.n - 1, dtype=np.uint8)
        with self.file.open("rb") as file:
            file.seek(chunk.start)
            file.readinto(data.data)
        return data

    def whole(self, chunk: Chunk) -> np.ndarray:
        """(size,) bool: which windows of a chunk lie within one document."""
        edges = (chunk.start, chunk.stop)
        low, high = np.searchsorted(self.ends, edges, side="right")
        stops = self.ends[low : high + 1]
        begins = np.concatenate(([chunk.start], stops[:-1]))
        last = np.clip(stops - self.n, begins, chunk.stop)  # the last byte of each is the separator
        return mask(begins - chunk.start, last - chunk.start, chunk.size)

    def document_at(self, place: int) -> tuple[int, int]:
        """The row of the document that has the byte at this place, and where that document begins."""
        row = int(np.searchsorted(self.ends, place, side="right"))
        return row, int(self.ends[row - 1]) if row else 0

    def position(self, places: Places) -> Places:
        """The positions of places in this text."""
        return position(self.number, places)

    def load(self, folder: Path, reach: int = 0) -> Iterator[tuple[Chunk, np.ndarray, np.ndarray]]:
        """Each chunk with the positions in a folder's files that are in it or `reach` after it, and their values."""
        bounds = [(self.position(chunk.start), self.position(chunk.stop + reach)) for chunk in self.chunks()]
        loaded = load_ranges(files_of(folder, self.number), bounds)
        for chunk, (positions, values) in zip(self.chunks(), loaded, strict=True):
            yield chunk, positions, values


def ends_of(file: Path) -> Path:
    """The file beside a text with the ends of its documents."""
    return file.with_suffix(".ends.npy")


def size_of(ends: np.ndarray) -> int:
    """The bytes of a text whose documents end here."""
    return int(ends[-1]) if len(ends) else 0


def map_text(file: Path) -> np.ndarray:
    """(bytes,) uint8: a text that is not empty, on disk."""
    return np.memmap(file, dtype=np.uint8, mode="r")


def write_documents(batch: list[Path], file: Path) -> int:
    """Write the texts of some parts as one run of bytes, and where each ends; return the number of bytes."""
    sizes = [np.zeros(0, dtype=np.int64)]
    with file.open("wb") as out:
        for part in batch:
            for table in tables(part, ("text",)):
                for view in views(table["text"]):
                    out.write(view)
                    out.write(SEPARATOR)
                offsets, _ = strings(table["text"])
                sizes.append(np.diff(offsets) + len(SEPARATOR))
    ends = np.cumsum(np.concatenate(sizes))
    sorted_files.save(ends_of(file), ends)
    return size_of(ends)


def mask(starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray:
    """(size,) bool: true within these intervals, which are in ascending order and do not overlap."""
    edges = np.concatenate(([0], np.stack((starts, stops), axis=1).ravel(), [size]))
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def intervals(chosen: np.ndarray, copies: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of true values begin and end; if `copies` are given, a run ends where they don't continue by one."""
    on = chosen[1:] & chosen[:-1]
    if copies is not None:
        on &= np.diff(copies) == 1
    begins = chosen & ~np.append(False, on)
    ends = chosen & ~np.append(on, False)
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


def gram_hashes(data: np.ndarray, n: int) -> np.ndarray:
    """(len(data) - n + 1,) uint64: a hash of each n successive bytes, made from the hashes of two shorter runs."""
    hashes = BYTES[data]
    size = 1
    while size < n:
        step = min(size, n - size)  # the last two may overlap
        joined = hashes[:-step] * FACTORS[size.bit_length()]
        joined += hashes[step:]
        hashes = joined
        size += step
    hashes ^= hashes >> np.uint64(32)
    return hashes


def sliding(function: np.ufunc, values: np.ndarray, width: int) -> np.ndarray:
    """The least or greatest of each `width` successive values; width is a power of two."""
    size = 1
    while size < width:
        values = function(values[:-size], values[size:])
        size *= 2
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


def anchors(text: Text) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes of the anchors in each chunk of a text, and where they begin."""
    for chunk in text.chunks():
        data = text.read(chunk)
        whole = text.whole(chunk)
        hashes = []
        places = []
        for begin in range(0, chunk.size, BLOCK):
            end = begin + BLOCK
            at, of_block = select(data[begin : end + text.n - 1], whole[begin:end], text.n)
            hashes.append(of_block)
            places.append(at + begin)
        different, index = np.unique(np.concatenate(places), return_index=True)
        yield np.concatenate(hashes)[index], chunk.start + different


def hashes_within(data: np.ndarray, chosen: np.ndarray, n: int, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """The hashes, in a range, of the windows of n bytes in `data` that are chosen, and where they begin."""
    at = np.flatnonzero(chosen)
    if not len(at):
        return np.zeros(0, dtype=np.uint64), at
    hashes = gram_hashes(data, n)[at]
    inside = (hashes >= np.uint64(low)) & (hashes <= np.uint64(high - 1))
    return hashes[inside], at[inside]


def window_hashes(text: Text, held: np.ndarray, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes, in a range, of the windows of each chunk of a text that are `held`, and where they begin.

    held: (2, n) where intervals of such windows begin and end, in ascending order.
    """
    for chunk in text.chunks():
        first, last = np.searchsorted(held[0], (chunk.start, chunk.stop))
        starts, stops = held[:, first:last] - chunk.start
        chosen = mask(starts, stops, chunk.size)
        data = text.read(chunk)
        keys = []
        places = []
        for begin in range(0, chunk.size, BLOCK):
            end = begin + BLOCK
            hashes, at = hashes_within(data[begin : end + text.n - 1], chosen[begin:end], text.n, low, high)
            keys.append(hashes)
            places.append(at + (begin + chunk.start))
        yield np.concatenate(keys), np.concatenate(places)
