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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, Field

from tasks.corpus.parts import SAMPLE_CHARACTERS, Tally, count, rewritten, smallest, strings, tables, views
from tasks.text import sorted_files
from tasks.text.sorted_files import batch_of, group, load_range, load_ranges, offset_of, position, runs_in, save_run
from tasks.workers.jobs import over_parts

CHUNK = 1 << 22  # windows of a batch that are processed together
BLOCK = 1 << 15  # bytes that are hashed at once: what fits in a core's cache
COMPARED = 1 << 22  # bytes that are compared at once
SEPARATOR = b"\xff"  # after each document: no byte of UTF-8
HASHED = 0.25  # fraction of all windows whose hashes are on disk at once, 16 bytes each; more take several passes
FACTORS = [np.uint64(xxhash.xxh3_64_intdigest(b"factor %d" % i) | 3) for i in range(16)]  # odd, of joined hashes
BYTES = np.array([xxhash.xxh3_64_intdigest(bytes([i])) for i in range(256)], dtype=np.uint64)  # the hash of each byte


class Substring(BaseModel, frozen=True, extra="forbid"):
    """Which passages are cut."""

    bytes: int = Field(75, ge=8, le=10_000, description="Passages of so many bytes or more (75 in the paper's code).")


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


def read_bytes(text: Path, start: int, size: int) -> np.ndarray:
    """(size,) uint8: bytes of a file from `start`, zeros after its end."""
    data = np.zeros(size, dtype=np.uint8)
    with text.open("rb") as file:
        file.seek(start)
        file.readinto(data)
    return data


def chunks(ends: np.ndarray) -> list[tuple[int, int]]:
    """The chunks of a batch's windows: first byte and count."""
    total = int(ends[-1]) if len(ends) else 0
    return [(start, min(CHUNK, total - start)) for start in range(0, total, CHUNK)]


def of_batch(folder: Path, number: int) -> list[Path]:
    """The runs that may have positions of a batch: its own and those of ranges."""
    return [*runs_in(folder, f"{number:05d}-*"), *runs_in(folder, "range-*")]


def anchors(text: Path, ends: np.ndarray, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes of the anchors in each chunk of a text, and where they begin."""
    for start, size in chunks(ends):
        data, whole = read_bytes(text, start, size + n - 1), whole_windows(ends, start, size, n)
        found = [
            (begin, *select(data[begin : begin + BLOCK + n - 1], whole[begin : begin + BLOCK], n))
            for begin in range(0, size, BLOCK)
        ]
        places, index = np.unique(np.concatenate([at + begin for begin, at, _ in found]), return_index=True)
        yield np.concatenate([hashes for _, _, hashes in found])[index], start + places


def flatten(number: int, batch: list[Path], n: int, text: Path) -> dict:
    """Write the text of some parts as one run of bytes, the ends of their documents, and their anchors.

    Of equal anchors in a run, only the first is written with the others to match; all are written as repeated.
    """
    ends, count = [np.zeros(1, dtype=np.int64)], 0
    with text.open("wb") as file:
        for table in (table for part in batch for table in tables(part, ("text",))):
            file.writelines(piece for view in views(table["text"]) for piece in (view, SEPARATOR))
            offsets, _ = strings(table["text"])
            ends.append(np.cumsum(np.diff(offsets) + 1) + ends[-1][-1])
    ends = np.concatenate(ends)[1:]
    sorted_files.save(text.with_suffix(".ends.npy"), ends)
    for i, (hashes, places) in enumerate(sorted_files.joined(anchors(text, ends, n))):
        hashes, positions, first = group(hashes, position(number, places))
        save_shared(text.parent / f"repeated/{number:05d}-{i:05d}", positions, first)
        new = positions == first
        save_run(text.parent / f"anchors/{number:05d}-{i:05d}", hashes[new], positions[new])
        count += int(new.sum())
    return {"anchors": count, "windows": sum(size for _, size in chunks(ends))}


def save_shared(run: Path, positions: np.ndarray, first: np.ndarray) -> None:
    """Write the positions of which several, next to each other, have the same first; that one too."""
    same = first[1:] == first[:-1]
    sorted_files.save_pairs(run, positions, first, (np.append(same, False) | np.append(False, same))[: len(first)])


def match_anchors(low: int, high: int, work: Path, out: Path) -> dict:
    """Write the positions of the anchors in a range of hashes that occur in several chunks, and the first of each."""
    _, positions, first = group(*load_range(runs_in(work / "anchors", "*"), low, high))
    save_shared(out, positions, first)
    return {}


def extend(number: int, n: int, files: list[Path], work: Path) -> dict:
    """Write the windows of a batch that its anchors show to be repeated, and the others that have a repeated anchor."""
    ends, width = np.load(files[number].with_suffix(".ends.npy")), anchors_in(n)
    again, held = [np.zeros((3, 0), dtype=np.int64)], [np.zeros((2, 0), dtype=np.int64)]
    bounds = [(position(number, start), position(number, start + size + width - 1)) for start, size in chunks(ends)]
    loaded = load_ranges(of_batch(work / "repeated", number), bounds)
    for (start, size), (found, firsts) in zip(chunks(ends), loaded, strict=True):
        places = offset_of(found) - start
        chosen = np.zeros(size + width - 1, dtype=bool)
        chosen[places] = True
        chosen = sliding(np.logical_or, chosen, width) & whole_windows(ends, start, size, n)
        data = read_bytes(files[number], start, size + n - 1)
        later = found - firsts >= n
        same, copies = follow(places[later], data, firsts[later], files, n)
        same &= chosen
        starts, stops = intervals(same, copies)
        origin = position(number, start)
        again.append(np.stack((origin + starts, origin + stops + n - 1, copies[starts])))
        held.append(np.stack(intervals(chosen & ~same)) + start)
    save_run(work / f"again/{number:05d}", *np.concatenate(again, axis=1))
    starts, stops = np.concatenate(held, axis=1)
    save_run(work / f"held/{number:05d}", starts, stops)
    return {"held": int((stops - starts).sum())}


def follow(
    places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which windows of `data` are repeated, by comparing bytes around anchors at the same distance from their firsts.

    Both (len(data) - n + 1,): bool, and the position of an earlier copy. Single anchors are left out: most are phrases
    shorter than a window.
    """
    width = anchors_in(n)
    again = np.zeros(len(data) - n + 1, dtype=bool)
    copies = np.zeros(len(again), dtype=np.int64)
    order = np.lexsort((places, firsts - places))
    places, firsts = places[order], firsts[order]
    starts = places - np.minimum(np.minimum(places, width - 1), offset_of(firsts))
    stops, distances = np.minimum(places + n, len(data)), firsts - places
    apart = np.ones(len(places) + 1, dtype=bool)
    apart[1:-1] = (distances[1:] != distances[:-1]) | (starts[1:] > stops[:-1])
    edges = np.flatnonzero(apart)
    several = np.flatnonzero(np.diff(edges) > 1)
    starts, stops, distances = starts[edges[several]], stops[edges[several + 1] - 1], distances[edges[several]]
    number = batch_of(starts + distances)
    for other in np.unique(batch_of(starts + distances)).tolist():
        text = np.memmap(files[other], dtype=np.uint8, mode="r")
        here = np.flatnonzero(number == other)
        for some in np.split(here, np.flatnonzero(np.diff(np.cumsum(stops[here] - starts[here]) // COMPARED)) + 1):
            sizes = stops[some] - starts[some]
            last = np.repeat(np.cumsum(sizes), sizes)
            at = np.arange(len(last)) + np.repeat(starts[some] - (np.cumsum(sizes) - sizes), sizes)
            before = at + np.repeat(distances[some], sizes)
            differing = data[at] != text.take(offset_of(before), mode="clip")
            count = np.concatenate(([0], np.cumsum(differing)))
            same = np.flatnonzero(count[n:] == count[:-n])
            same = same[same + n <= last[same]]
            again[at[same]], copies[at[same]] = True, before[same]
    return again, copies


def hashed(text: Path, ends: np.ndarray, n: int, low: int, high: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The hashes, in a range, of the windows of each chunk of a text that may be repeated, and where they begin."""
    held = sorted_files.mapped(text.parent / f"held/{text.stem}")
    for start, size in chunks(ends):
        here = held[:, slice(*np.searchsorted(held[0], (start, start + size)))] - start
        chosen, data = mask(*here, size), read_bytes(text, start, size + n - 1)
        keys, places = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
        for begin in range(0, size, BLOCK):
            at = np.flatnonzero(chosen[begin : begin + BLOCK])
            if len(at):
                hashes = gram_hashes(data[begin : begin + BLOCK + n - 1], n)[at]
                inside = (hashes >= np.uint64(low)) & (hashes <= np.uint64(high - 1))
                keys.append(hashes[inside])
                places.append(at[inside] + begin + start)
        yield np.concatenate(keys), np.concatenate(places)


def hash_windows(number: int, text: Path, n: int, low: int, high: int) -> dict:
    """Write the hashes, in a range, of the windows of a batch that may be repeated, and their positions.

    Those with an equal window before them in their run are written as repeated instead.
    """
    ends, work, written = np.load(text.with_suffix(".ends.npy")), text.parent, 0
    for i, (keys, places) in enumerate(sorted_files.joined(hashed(text, ends, n, low, high))):
        keys, positions, first = group(keys, position(number, places))
        again = positions - first >= n
        sorted_files.save_pairs(work / f"same/{number:05d}-{low:016x}-{i:05d}", positions, first, again)
        save_run(work / f"windows/{number:05d}-{i:05d}", keys[~again], positions[~again])
        written += int((~again).sum())
    return {"windows": written}


def match_windows(low: int, high: int, n: int, work: Path, out: Path) -> dict:
    """Write which windows in a range of hashes have an equal one that ends before they begin, and the first one."""
    _, positions, first = group(*load_range(runs_in(work / "windows", "*"), low, high))
    sorted_files.save_pairs(out, positions, first, positions - first >= n)
    return {}


def equal(places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int) -> np.ndarray:
    """(windows,) bool: whether the windows at these places of `data` have the bytes at the positions `firsts`."""
    same = np.zeros(len(places), dtype=bool)
    here = sliding_window_view(data, n)
    for number in np.unique(batch_of(firsts)).tolist():
        there = sliding_window_view(np.memmap(files[number], dtype=np.uint8, mode="r"), n)
        chosen = np.flatnonzero(batch_of(firsts) == number)
        for some in np.split(chosen, range(COMPARED // n, len(chosen), COMPARED // n)):
            same[some] = (here[places[some]] == there[offset_of(firsts[some])]).all(axis=1)
    return same


def find_cuts(number: int, n: int, files: list[Path], work: Path) -> np.ndarray:
    """(cuts, 3): where each cut in the text of a batch begins and ends, and the position of an earlier copy."""
    ends = np.load(files[number].with_suffix(".ends.npy"))
    *edges, copies = sorted_files.mapped(work / f"again/{number:05d}", arrays=3)
    found = [np.stack([*map(offset_of, edges), copies])]
    bounds = [(position(number, start), position(number, start + size)) for start, size in chunks(ends)]
    loaded = load_ranges(of_batch(work / "same", number), bounds)
    for (start, size), (positions, copies) in zip(chunks(ends), loaded, strict=True):
        places = offset_of(positions)
        same = equal(places - start, read_bytes(files[number], start, size + n - 1), copies, files, n)
        found.append(np.stack((places[same], places[same] + n, copies[same])))
    starts, stops, copies = (array := np.concatenate(found, axis=1))[:, np.argsort(array[0], kind="stable")]
    apart = np.ones(len(starts) + 1, dtype=bool)
    apart[1:-1] = starts[1:] > stops[:-1]  # cuts of two documents always are: the separator is never cut
    edges = np.flatnonzero(apart)
    return np.stack((starts[edges[:-1]], stops[edges[1:] - 1], copies[edges[:-1]]), axis=1)


def at_characters(cuts: np.ndarray, text: Path) -> np.ndarray:
    """The cuts without the bytes of characters that are not wholly within them."""
    if not len(cuts):
        return cuts
    data, cuts = np.memmap(text, dtype=np.uint8, mode="r"), cuts.copy()
    for _ in range(3):  # no character has more than three bytes after its first, which all begin with the bits 10
        cuts[:, 0] += data[cuts[:, 0]] & 0xC0 == 0x80
        cuts[:, 1] -= data[cuts[:, 1]] & 0xC0 == 0x80  # a separator follows the last document too
    return cuts


def rest(text: memoryview, starts: list[int], stops: list[int]) -> bytes:
    """A text without the bytes between these places. A newline joins what is left, unless there is white space."""
    left = b""
    for start, stop in zip([0, *stops], [*starts, len(text)], strict=True):
        piece = bytes(text[start:stop])
        if left and piece and not left[-1:].isspace() and not piece[:1].isspace():
            left += b"\n"  # the halves of two words are not a word
        left += piece
    return left


def cut_batch(number: int, batch: list[Path], n: int, files: list[Path], work: Path, out: Path) -> dict:
    """Write the documents of some parts without repeated windows; those with only white space left are dropped."""
    found = find_cuts(number, n, files, work)
    cuts = at_characters(found, files[number])
    edges = np.concatenate(([0], np.load(files[number].with_suffix(".ends.npy"))))
    within = np.searchsorted(cuts[:, 0], edges)  # document i has the cuts from within[i] to within[i + 1]
    kept, gone, cut, begin = Tally(), Tally(), Tally(), 0
    for file, table in rewritten(batch, out):
        offsets, data = strings(table["text"])
        touched = np.flatnonzero(np.diff(within[begin : begin + len(table) + 1]))
        left = []
        for row in touched.tolist():
            here = cuts[slice(*within[begin + row : begin + row + 2]), :2] - edges[begin + row]
            left.append(rest(data[offsets[row] : offsets[row + 1]], *here.T.tolist()).decode())
        is_touched, blank = np.zeros((2, len(table)), dtype=bool)
        is_touched[touched], blank[touched] = True, [not text.strip() for text in left]
        column, texts = table.column_names.index("text"), pa.array(left, pa.large_string())
        texts = pc.replace_with_mask(table["text"].combine_chunks(), pa.array(is_touched), texts)
        after = table.set_column(column, "text", texts)
        written = after.filter(pa.array(~blank))
        if len(written):
            file.write_table(written)
        count(kept, written)
        count(gone, table.filter(pa.array(blank)))
        partly = pa.array(touched[~blank[touched]])
        lost = pc.subtract(pc.utf8_length(table["text"]), pc.utf8_length(after["text"]))
        count(cut, table.take(partly), lost.take(partly))
        begin += len(table)
    return {
        "kept": kept.counts(),
        "dropped": gone.counts(),
        "cut": cut.counts(),
        "sizes": (cuts[:, 1] - cuts[:, 0]).tolist(),
        "samples": samples(number, found, cuts, edges, files[number]),
    }


def samples(number: int, found: np.ndarray, cuts: np.ndarray, edges: np.ndarray, text: Path) -> list[tuple]:
    """The cuts with the smallest digests: digest, position of a copy of the first window, bytes of that window before
    the cut, position of the document, byte of it, bytes cut, text."""
    data = np.memmap(text, dtype=np.uint8, mode="r") if len(cuts) else b""
    digests = [(xxhash.xxh3_64_intdigest(data[start:stop]), i) for i, (start, stop) in enumerate(cuts[:, :2].tolist())]
    chosen = []
    for digest, i in smallest(digests):
        start, stop, copy = cuts[i].tolist()
        row = int(np.searchsorted(edges, start, side="right")) - 1
        begins = bytes(data[start : min(stop, start + 4 * SAMPLE_CHARACTERS)]).decode(errors="ignore")
        before, place = start - int(found[i, 0]), start - int(edges[row])
        chosen.append((digest, copy, before, position(number, row), place, stop - start, begins[:SAMPLE_CHARACTERS]))
    return chosen


def cut(params: Substring, batches: list[list[Path]], out: Path, work: Path) -> list[dict]:
    """Write these batches of parts to `out` without repeated passages; return the counts and samples of each."""
    n, files = params.bytes, [work / f"{i:05d}.text" for i in range(len(batches))]
    jobs = [(i, batch, n, files[i]) for i, batch in enumerate(batches)]
    flat = over_parts(flatten, jobs, work / "flattened", "find anchors")
    of_anchors = sorted_files.ranges(sum(r["anchors"] for r in flat))
    matches = [(*bounds, work, work / f"repeated/range-{bounds[0]:016x}") for bounds in of_anchors]
    over_parts(match_anchors, matches, work / "anchored", "match anchors")
    shutil.rmtree(work / "anchors", ignore_errors=True)
    jobs = [(i, n, files, work) for i in range(len(batches))]
    extended = over_parts(extend, jobs, work / "extended", "compare passages")
    most = max(1, int(HASHED * sum(r["windows"] for r in flat)))
    for low, high in sorted_files.ranges(sum(r["held"] for r in extended), most):
        jobs = [(i, text, n, low, high) for i, text in enumerate(files)]
        found = over_parts(hash_windows, jobs, work / f"hashed-{low:016x}", "hash passages")
        of_windows = sorted_files.ranges(sum(r["windows"] for r in found), low=low, high=high)
        matches = [(*bounds, n, work, work / f"same/range-{bounds[0]:016x}") for bounds in of_windows]
        over_parts(match_windows, matches, work / f"matched-{low:016x}", "match passages")
        shutil.rmtree(work / "windows", ignore_errors=True)
    jobs = [(i, batch, n, files, work, out) for i, batch in enumerate(batches)]
    return over_parts(cut_batch, jobs, work / "cut", "cut passages")
