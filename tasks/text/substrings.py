"""Repeated passages: bytes that occurred before, anywhere in the corpus, are cut out of later documents.

A window is a number of successive bytes of one document, in UTF-8. It is repeated if the same bytes occurred before and
ended before it begins. All bytes of repeated windows are cut, except those of a character that is not wholly within
(section 4.4 of the paper, after Lee et al., "Deduplicating training data makes language models better", 2021). So the
first copy of a passage stays, except for those parts of it that occurred even before.

Works on disk in bounded memory, without a suffix array. Every window contains an anchor: the shorter run of bytes
within it that has the least hash (Schleimer et al., "Winnowing", 2003). A window can only be repeated if its anchor is.
Where several anchors in a row are at the same distance from their first copies, all bytes between are compared. The
other windows with a repeated anchor are hashed; hashes are sorted, by range, and windows with equal ones are compared.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, Field

from tasks.corpus.parts import SAMPLE_CHARACTERS, Tally, count, rewritten, smallest, strings
from tasks.text import sorted_files
from tasks.text.sorted_files import batch_of, files_in, group, load_range, offset_of, save_sorted
from tasks.text.windows import (
    Chunk,
    Text,
    anchors,
    anchors_in,
    files_of,
    intervals,
    map_text,
    sliding,
    text_file,
    window_hashes,
    write_documents,
)
from tasks.workers.jobs import over_parts

COMPARED = 1 << 22  # bytes that are compared at once
HASHED = 0.25  # fraction of all windows whose hashes are on disk at once, 16 bytes each; more take several passes


class Substring(BaseModel, frozen=True, extra="forbid"):
    """Which passages are cut."""

    bytes: int = Field(
        75, ge=8, le=10_000, description="Length in bytes from which passages are cut (75 in the paper's code)."
    )


def flatten(number: int, batch: list[Path], n: int, file: Path) -> dict:
    """Write the text of some parts as one run of bytes, the ends of their documents, and their anchors.

    Of equal anchors in a sorted file, only the first is written with the others to match; all are written as repeated.
    """
    windows = write_documents(batch, file)
    text = Text(number, file, n)
    written = 0
    for i, (hashes, places) in enumerate(sorted_files.join_pieces(anchors(text))):
        name = f"{number:05d}-{i:05d}"
        hashes, positions, first = group(hashes, text.position(places))
        save_shared(file.parent / "repeated" / name, positions, first)
        new = positions == first
        save_sorted(file.parent / "anchors" / name, hashes[new], positions[new])
        written += int(new.sum())
    return {"anchors": written, "windows": windows}


def save_shared(file: Path, positions: np.ndarray, first: np.ndarray) -> None:
    """Write the positions of which several, next to each other, have the same first; that one too."""
    same = first[1:] == first[:-1]
    shared = np.append(same, False) | np.append(False, same)
    sorted_files.save_pairs(file, positions, first, shared[: len(first)])


def match_anchors(low: int, high: int, work: Path, out: Path) -> dict:
    """Write the positions of the anchors in a range of hashes that occur in several chunks, and the first of each."""
    _, positions, first = group(*load_range(files_in(work / "anchors", "*"), low, high))
    save_shared(out, positions, first)
    return {}


def windows_with(places: np.ndarray, whole: np.ndarray, n: int) -> np.ndarray:
    """(windows,) bool: which windows of a chunk have an anchor that begins at one of these places; only whole ones."""
    width = anchors_in(n)
    begins = np.zeros(len(whole) + width - 1, dtype=bool)
    begins[places] = True
    return sliding(np.logical_or, begins, width) & whole


def divide_windows(
    text: Text, chunk: Chunk, positions: np.ndarray, firsts: np.ndarray, files: list[Path]
) -> tuple[np.ndarray, np.ndarray]:
    """The windows of a chunk with anchors at these positions: those that are shown to be repeated, and the others.

    (3, n) where intervals of the former begin, where their bytes end, and the position of a copy; (2, n) where
    intervals of the latter begin and end in the text.
    """
    places = offset_of(positions) - chunk.start
    chosen = windows_with(places, text.whole(chunk), text.n)
    later = positions - firsts >= text.n
    same, copies = follow(places[later], text.read(chunk), firsts[later], files, text.n)
    same &= chosen
    starts, stops = intervals(same, copies)
    origin = text.position(chunk.start)
    again = np.stack((origin + starts, origin + stops + text.n - 1, copies[starts]))
    return again, chunk.start + np.stack(intervals(chosen & ~same))


def extend(number: int, n: int, files: list[Path], work: Path) -> dict:
    """Write the windows of a batch that its anchors show to be repeated, and the others that have a repeated anchor."""
    text = Text(number, files[number], n)
    again = [np.zeros((3, 0), dtype=np.int64)]
    held = [np.zeros((2, 0), dtype=np.int64)]
    for chunk, positions, firsts in text.load(work / "repeated", reach=anchors_in(n) - 1):
        repeated, others = divide_windows(text, chunk, positions, firsts, files)
        again.append(repeated)
        held.append(others)
    save_sorted(work / f"again/{number:05d}", *np.concatenate(again, axis=1))
    starts, stops = np.concatenate(held, axis=1)
    save_sorted(work / f"held/{number:05d}", starts, stops)
    return {"held": int((stops - starts).sum())}


class Stretches(NamedTuple):
    """Stretches of a chunk that may repeat an earlier passage byte by byte, each at one distance.

    Each field is (stretches,) int64.
    """

    starts: np.ndarray  # in the chunk
    stops: np.ndarray
    distances: np.ndarray  # from a place in the chunk to the position in the earlier passage

    def take(self, chosen: np.ndarray) -> "Stretches":
        """Some of them."""
        return Stretches(self.starts[chosen], self.stops[chosen], self.distances[chosen])

    def portions(self) -> Iterator["Stretches"]:
        """All of them, about COMPARED bytes at a time."""
        total = np.cumsum(self.stops - self.starts)
        edges = np.flatnonzero(np.diff(total // COMPARED)) + 1
        for some in np.split(np.arange(len(total)), edges):
            yield self.take(some)


def stretches_of(places: np.ndarray, firsts: np.ndarray, size: int, n: int) -> Stretches:
    """Join anchors at the same distance from their firsts whose surroundings touch.

    Single anchors are left out: most are phrases shorter than a window. `size`: bytes of the chunk.
    """
    order = np.lexsort((places, firsts - places))
    places = places[order]
    firsts = firsts[order]
    distances = firsts - places
    back = np.minimum(anchors_in(n) - 1, places)  # not before the chunk
    back = np.minimum(back, offset_of(firsts))  # nor before the batch of the earlier passage
    starts = places - back
    stops = np.minimum(places + n, size)

    apart = np.ones(len(places) + 1, dtype=bool)
    apart[1:-1] = (distances[1:] != distances[:-1]) | (starts[1:] > stops[:-1])
    edges = np.flatnonzero(apart)
    several = np.diff(edges) > 1
    first = edges[:-1][several]
    last = edges[1:][several] - 1
    return Stretches(starts[first], stops[last], distances[first])


def equal_windows(found: Stretches, data: np.ndarray, earlier: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Where windows begin that are the same in `data` and in the batch `earlier`, and the positions of the latter."""
    sizes = found.stops - found.starts
    ends = np.cumsum(sizes)
    # the bytes of all stretches, one after the other
    shift = found.starts - (ends - sizes)
    here = np.arange(ends[-1]) + np.repeat(shift, sizes)
    there = here + np.repeat(found.distances, sizes)
    end = np.repeat(ends, sizes)

    differs = data[here] != earlier.take(offset_of(there), mode="clip")
    differing_before = np.concatenate(([0], np.cumsum(differs)))
    begins = np.flatnonzero(differing_before[n:] == differing_before[:-n])  # n bytes without a difference
    begins = begins[begins + n <= end[begins]]  # of one stretch
    return here[begins], there[begins]


def follow(
    places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which windows of `data` are repeated, and the position of an earlier copy: (len(data) - n + 1,), bool and int64.

    All bytes around anchors at the same distance from their firsts are compared.
    """
    again = np.zeros(len(data) - n + 1, dtype=bool)
    copies = np.zeros(len(again), dtype=np.int64)
    found = stretches_of(places, firsts, len(data), n)
    batches = batch_of(found.starts + found.distances)
    for number in np.unique(batches).tolist():
        earlier = map_text(files[number])
        for some in found.take(batches == number).portions():
            here, there = equal_windows(some, data, earlier, n)
            again[here] = True
            copies[here] = there
    return again, copies


def hash_windows(number: int, file: Path, n: int, low: int, high: int) -> dict:
    """Write the hashes, in a range, of the windows of a batch that may be repeated, and their positions.

    Those with an equal window before them in their file are written as repeated instead.
    """
    text = Text(number, file, n)
    work = file.parent
    written = 0
    held = sorted_files.map_file(work / f"held/{number:05d}")
    for i, (keys, places) in enumerate(sorted_files.join_pieces(window_hashes(text, held, low, high))):
        keys, positions, first = group(keys, text.position(places))
        again = positions - first >= n
        sorted_files.save_pairs(work / f"same/{number:05d}-{low:016x}-{i:05d}", positions, first, again)
        new = ~again
        save_sorted(work / f"windows/{number:05d}-{i:05d}", keys[new], positions[new])
        written += int(new.sum())
    return {"windows": written}


def match_windows(low: int, high: int, n: int, work: Path, out: Path) -> dict:
    """Write which windows in a range of hashes have an equal one that ends before they begin, and the first one."""
    _, positions, first = group(*load_range(files_in(work / "windows", "*"), low, high))
    sorted_files.save_pairs(out, positions, first, positions - first >= n)
    return {}


def are_equal(places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int) -> np.ndarray:
    """(windows,) bool: whether the windows at these places of `data` have the bytes at the positions `firsts`."""
    same = np.zeros(len(places), dtype=bool)
    here = sliding_window_view(data, n)
    batches = batch_of(firsts)
    offsets = offset_of(firsts)
    at_once = COMPARED // n
    for number in np.unique(batches).tolist():
        there = sliding_window_view(map_text(files[number]), n)
        chosen = np.flatnonzero(batches == number)
        for some in np.split(chosen, range(at_once, len(chosen), at_once)):
            equal_bytes = here[places[some]] == there[offsets[some]]
            same[some] = equal_bytes.all(axis=1)
    return same


def find_cuts(text: Text, files: list[Path], work: Path) -> np.ndarray:
    """(cuts, 3): where each cut in the text of a batch begins and ends, and the position of an earlier copy."""
    starts, stops, copies = sorted_files.map_file(work / f"again/{text.number:05d}", arrays=3)
    found = [np.stack((offset_of(starts), offset_of(stops), copies))]
    for chunk, positions, firsts in text.load(work / "same"):
        places = offset_of(positions)
        same = are_equal(places - chunk.start, text.read(chunk), firsts, files, text.n)
        places = places[same]
        found.append(np.stack((places, places + text.n, firsts[same])))
    return join_overlapping(*np.concatenate(found, axis=1))


def join_overlapping(starts: np.ndarray, stops: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """(cuts, 3): passages in ascending order, those that overlap or touch as one, each with the copy of its first."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    stops = stops[order]
    apart = np.ones(len(starts) + 1, dtype=bool)
    apart[1:-1] = starts[1:] > stops[:-1]  # cuts of two documents always are: the separator is never cut
    edges = np.flatnonzero(apart)
    first = edges[:-1]
    return np.stack((starts[first], stops[edges[1:] - 1], copies[order][first]), axis=1)


def at_whole_characters(cuts: np.ndarray, file: Path) -> np.ndarray:
    """The cuts without the bytes of characters that are not wholly within them."""
    if not len(cuts):
        return cuts
    data = map_text(file)
    starts, stops, copies = cuts.T.copy()
    for _ in range(3):  # no character has more than three bytes after its first, which all begin with the bits 10
        starts += data[starts] & 0xC0 == 0x80
        stops -= data[stops] & 0xC0 == 0x80  # a separator follows the last document too
    return np.stack((starts, stops, copies), axis=1)


def text_without(text: memoryview, starts: list[int], stops: list[int]) -> bytes:
    """A text without the bytes between these places. A newline joins what is left, unless there is white space."""
    left = b""
    for start, stop in zip([0, *stops], [*starts, len(text)], strict=True):
        piece = bytes(text[start:stop])
        if left and piece and not left[-1:].isspace() and not piece[:1].isspace():
            left += b"\n"  # the halves of two words are not a word
        left += piece
    return left


def replace_texts(table: pa.Table, rows: np.ndarray, texts: list[str]) -> pa.Table:
    """The table with these texts in these rows, which are in ascending order."""
    replaced = np.zeros(len(table), dtype=bool)
    replaced[rows] = True
    column = table["text"].combine_chunks()
    column = pc.replace_with_mask(column, pa.array(replaced), pa.array(texts, pa.large_string()))
    return table.set_column(table.column_names.index("text"), "text", column)


class Cuts:
    """What is cut from the documents of a batch. `first`: the number of the next document."""

    def __init__(self, cuts: np.ndarray, ends: np.ndarray) -> None:
        self.starts, self.stops, _ = cuts.T
        self.edges = np.append(0, ends)
        self.within = np.searchsorted(self.starts, self.edges)  # document i has the cuts within[i]:within[i + 1]
        self.first = 0

    def texts_left(self, column: pa.ChunkedArray) -> tuple[np.ndarray, list[str]]:
        """Which of the next texts have cuts, and what is left of each."""
        within = self.within[self.first : self.first + len(column) + 1]
        offsets, data = strings(column)
        rows = np.flatnonzero(np.diff(within))
        left = []
        for row in rows.tolist():
            here = slice(within[row], within[row + 1])
            begin = self.edges[self.first + row]
            starts = self.starts[here] - begin
            stops = self.stops[here] - begin
            text = data[offsets[row] : offsets[row + 1]]
            left.append(text_without(text, starts.tolist(), stops.tolist()).decode())
        self.first += len(column)
        return rows, left


def count_lost(tally: Tally, before: pa.Table, after: pa.Table, rows: pa.Array) -> None:
    """Count the documents in these rows, and the characters that they have lost."""
    lost = pc.subtract(pc.utf8_length(before["text"]), pc.utf8_length(after["text"]))
    count(tally, before.take(rows), lost.take(rows))


class CutTally:
    """Counts the documents of a batch that are kept and those that are dropped, and what is cut from the kept ones."""

    def __init__(self) -> None:
        self.kept = Tally()
        self.dropped = Tally()
        self.cut = Tally()

    def add(self, before: pa.Table, after: pa.Table, rows: np.ndarray, stays: np.ndarray) -> None:
        """Count the documents of a table. `rows`: those with cuts; `stays`: (documents,) which are kept."""
        count(self.kept, after.filter(pa.array(stays)))
        count(self.dropped, before.filter(pa.array(~stays)))
        count_lost(self.cut, before, after, pa.array(rows[stays[rows]]))

    def counts(self) -> dict:
        """All counts, as JSON."""
        return {"kept": self.kept.counts(), "dropped": self.dropped.counts(), "cut": self.cut.counts()}


def cut_batch(number: int, batch: list[Path], n: int, files: list[Path], work: Path, out: Path) -> dict:
    """Write the documents of some parts without repeated windows; those with only white space left are dropped."""
    text = Text(number, files[number], n)
    found = find_cuts(text, files, work)
    cuts = at_whole_characters(found, text.file)
    of_documents = Cuts(cuts, text.ends)
    tally = CutTally()
    for file, table in rewritten(batch, out):
        rows, left = of_documents.texts_left(table["text"])
        after = replace_texts(table, rows, left)
        is_blank = np.array([not text.strip() for text in left], dtype=bool)
        stays = np.ones(len(table), dtype=bool)
        stays[rows[is_blank]] = False

        written = after.filter(pa.array(stays))
        if len(written):
            file.write_table(written)
        tally.add(table, after, rows, stays)
    return {
        **tally.counts(),
        "sizes": (cuts[:, 1] - cuts[:, 0]).tolist(),
        "samples": samples(text, found, cuts),
    }


def samples(text: Text, found: np.ndarray, cuts: np.ndarray) -> list[tuple]:
    """The cuts with the smallest digests: digest, position of a copy of the first window, bytes of that window before
    the cut, position of the document, byte of it, bytes cut, text. `found`: the windows of each cut, as `cuts`."""
    if not len(cuts):
        return []
    data = map_text(text.file)
    digests = []
    for i, (start, stop, _) in enumerate(cuts.tolist()):
        digests.append((xxhash.xxh3_64_intdigest(data[start:stop].data), i))
    chosen = []
    for digest, i in smallest(digests):
        start, stop, copy = cuts[i].tolist()
        before = start - int(found[i, 0])
        row, begin = text.document_at(start)
        beginning = data[start : min(stop, start + 4 * SAMPLE_CHARACTERS)].tobytes()
        shown = beginning.decode(errors="ignore")[:SAMPLE_CHARACTERS]
        chosen.append((digest, copy, before, text.position(row), start - begin, stop - start, shown))
    return chosen


def match_all_anchors(anchors: int, work: Path) -> None:
    """Write which anchors of all batches are repeated; anchors: how many there are."""
    bounds = sorted_files.ranges(anchors)
    jobs = [(low, high, work, work / f"repeated/range-{low:016x}") for low, high in bounds]
    over_parts(match_anchors, jobs, work / "anchored", "match anchors")
    shutil.rmtree(work / "anchors", ignore_errors=True)


def match_all_windows(low: int, high: int, n: int, files: list[Path], work: Path) -> None:
    """Write which windows with hashes in this range are repeated, of those of all batches that may be."""
    jobs = [(i, text, n, low, high) for i, text in enumerate(files)]
    hashed = over_parts(hash_windows, jobs, work / f"hashed-{low:016x}", "hash passages")
    bounds = sorted_files.ranges(sum(r["windows"] for r in hashed), low=low, high=high)
    matches = [(first, last, n, work, work / f"same/range-{first:016x}") for first, last in bounds]
    over_parts(match_windows, matches, work / f"matched-{low:016x}", "match passages")
    shutil.rmtree(work / "windows", ignore_errors=True)


def cut(params: Substring, batches: list[list[Path]], out: Path, work: Path) -> list[dict]:
    """Write these batches of parts to `out` without repeated passages; return the counts and samples of each."""
    n = params.bytes
    files = [text_file(work, i) for i in range(len(batches))]
    texts = [(i, batch, n, files[i]) for i, batch in enumerate(batches)]
    flat = over_parts(flatten, texts, work / "flattened", "find anchors")
    match_all_anchors(sum(r["anchors"] for r in flat), work)

    passages = [(i, n, files, work) for i in range(len(batches))]
    extended = over_parts(extend, passages, work / "extended", "compare passages")
    at_once = max(1, int(HASHED * sum(r["windows"] for r in flat)))
    for low, high in sorted_files.ranges(sum(r["held"] for r in extended), at_once):
        match_all_windows(low, high, n, files, work)

    cuts = [(i, batch, n, files, work, out) for i, batch in enumerate(batches)]
    return over_parts(cut_batch, cuts, work / "cut", "cut passages")


def first_copy(copy: int, n: int, work: Path) -> int:
    """The position of the first of all copies of the window at this position."""
    while True:
        number = batch_of(copy)
        starts, stops, copies = sorted_files.map_file(work / f"again/{number:05d}", arrays=3)
        i = int(np.searchsorted(starts, copy, side="right")) - 1
        if i >= 0 and copy + n <= stops[i]:
            copy += int(copies[i]) - int(starts[i])
            continue
        _, before = load_range(files_of(work / "same", number), copy, copy + 1)
        if not len(before):
            return copy
        copy = int(before[0])


def place_of(at: int, n: int, work: Path) -> tuple[int, int, int]:
    """Of a position in the text of a batch: the batch, the row of the document, and the byte within it."""
    number = batch_of(at)
    offset = offset_of(at)
    row, begin = Text(number, text_file(work, number), n).document_at(offset)
    return number, row, offset - begin
