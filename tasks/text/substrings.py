"""Repeated passages: runs of bytes that stood before, anywhere in the corpus, are cut out of later documents.

A window is so many bytes of one document, in UTF-8. It is repeated when the same bytes stood before and ended before it
begins; all bytes of repeated windows are cut, but for those of a character that is not wholly within (section 4.4 of the
paper, after Lee et al., "Deduplicating training data makes language models better", 2021). So the first copy of a passage
stays, except for what of it stood even before.

Works on disk in bounded memory, without a suffix array. Every window holds an anchor: the shorter run of bytes within it
whose hash is the least (Schleimer et al., "Winnowing", 2003). Only where an anchor stands twice can a window do so.
Where several anchors in a row stand in the same distance from their first copies, all between is compared byte by byte.
The hashes of the windows that are left are sorted, by range; those with an equal before them are compared too.
"""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, Field

from tasks.corpus.parts import SAMPLE_CHARACTERS, Tally, count, smallest, strings, tables, views, writer
from tasks.text import sorted_runs
from tasks.workers.mapping import over_parts

CHUNK = 1 << 22  # windows of a part that are looked at together
BLOCK = 1 << 15  # bytes that are hashed at once: what fits in a core's cache
COMPARED = 1 << 22  # bytes that are compared at once
SEPARATOR = b"\xff"  # between documents: no byte of UTF-8
HASHED = 0.25  # part of all windows whose hashes are on disk at once, 16 bytes each; more take several passes
FACTORS = [np.uint64(xxhash.xxh3_64_intdigest(b"factor %d" % i) | 3) for i in range(16)]
BYTES = np.array([xxhash.xxh3_64_intdigest(bytes([i])) for i in range(256)], dtype=np.uint64)


class Substring(BaseModel, frozen=True, extra="forbid"):
    """Which passages are cut."""

    bytes: int = Field(75, ge=8, le=10_000, description="Passages of so many bytes or more (75 in the paper's code).")


def gram_hashes(data: np.ndarray, n: int) -> np.ndarray:
    """(len(data) - n + 1,) uint64: a hash of each run of n bytes. Those of two runs make that of one twice as long."""
    found, size = BYTES[data], 1
    while size < n:
        step = min(size, n - size)  # the last two may overlap
        joined = found[:-step] * FACTORS[size.bit_length()]
        joined += found[step:]
        found, size = joined, size + step
    found ^= found >> np.uint64(32)
    return found


def sliding(function: np.ufunc, values: np.ndarray, width: int) -> np.ndarray:
    """The least or greatest of each `width` values in a row; width is a power of two."""
    size = 1
    while size < width:
        values, size = function(values[:-size], values[size:]), 2 * size
    return values


def anchors_in(n: int) -> int:
    """How many anchors begin in a window of n bytes and lie within it: a power of two; the least of them counts."""
    return 1 << ((n // 2).bit_length() - 1)


def select(data: np.ndarray, whole: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the anchors of the windows of n bytes in `data` begin, and their hashes; `whole` says which windows count.

    An anchor depends on nothing but its window, so windows of the same bytes have the same anchors. At least one is in each.
    """
    width = anchors_in(n)
    hashes = gram_hashes(data, n - width + 1)
    ranks = (hashes >> np.uint64(32)).astype(np.uint32) | 1  # 0 is less than all
    least = np.zeros(len(ranks) + width - 1, dtype=np.uint32)
    least[width - 1 : len(ranks)] = np.where(whole, sliding(np.minimum, ranks, width), 0)
    at = np.flatnonzero(sliding(np.maximum, least, width) == ranks)
    return at, hashes[at] * FACTORS[0]  # the least of many are small numbers; these are spread evenly again


def whole_windows(ends: np.ndarray, start: int, size: int, n: int) -> np.ndarray:
    """(size,) bool: which windows of n bytes, beginning at start, start + 1 …, lie within one document."""
    low, high = np.searchsorted(ends, [start, start + size], side="right")
    stops = ends[low : high + 1]
    begins = np.concatenate(([start], stops[:-1]))
    last = np.clip(stops - n, begins, start + size)  # the last byte of each is the separator
    return mask(begins - start, last - start, size)


def mask(starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray:
    """(size,) bool: what lies within intervals that are in ascending order and do not overlap."""
    edges = np.concatenate(([0], np.stack((starts, stops), axis=1).ravel(), [size]))
    return np.repeat(np.arange(len(edges) - 1) % 2 == 1, np.diff(edges))


def intervals(chosen: np.ndarray, copies: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Where the runs of true values begin and end; and if `copies` are given, of those that go on by one."""
    on = chosen[1:] & chosen[:-1]
    if copies is not None:
        on &= np.diff(copies) == 1
    return np.flatnonzero(chosen & ~np.append(False, on)), np.flatnonzero(chosen & ~np.append(on, False)) + 1


def read_bytes(text: Path, start: int, size: int) -> np.ndarray:
    """(size,) uint8 of a file from `start`, zeros behind its end."""
    data = np.zeros(size, dtype=np.uint8)
    with text.open("rb") as file:
        file.seek(start)
        file.readinto(data)
    return data


def chunks(ends: np.ndarray) -> list[tuple[int, int, int]]:
    """The windows of a part by number, first byte and count."""
    total = int(ends[-1]) if len(ends) else 0
    return [(i, start, min(CHUNK, total - start)) for i, start in enumerate(range(0, total, CHUNK))]


def flatten(number: int, part: Path, n: int, work: Path) -> dict:
    """Write the text of a part as one run of bytes, where its documents end, and the anchors of each chunk.

    Of anchors that stand more than once in a chunk, the first stands for all, and the others are known to be repeated.
    """
    text, ends = work / f"{part.stem}.text", [np.zeros(1, dtype=np.int64)]
    with text.open("wb") as file:
        for table in tables(part, ("text",)):
            file.writelines(piece for view in views(table["text"]) for piece in (view, SEPARATOR))
            offsets, _ = strings(table["text"])
            ends.append(np.cumsum(np.diff(offsets) + 1) + ends[-1][-1])
    ends, counts = np.concatenate(ends)[1:], Counter(anchors=0, windows=0)
    sorted_runs.save(work / f"{part.stem}.ends.npy", ends)
    for chunk, start, size in chunks(ends):
        data, whole = read_bytes(text, start, size + n - 1), whole_windows(ends, start, size, n)
        found = [
            (begin, *select(data[begin : begin + BLOCK + n - 1], whole[begin : begin + BLOCK], n))
            for begin in range(0, size, BLOCK)
        ]
        places, index = np.unique(np.concatenate([at + begin for begin, at, _ in found]), return_index=True)
        hashes = np.concatenate([hashed for _, _, hashed in found])[index]
        order = sorted_runs.ascending(hashes)
        hashes, addresses = hashes[order], sorted_runs.address(number, start + places[order])
        first = sorted_runs.firsts(hashes)
        new, often = first == np.arange(len(order)), np.bincount(first)[first] > 1
        save_repeated(work / f"repeated/{part.stem}-{chunk:05d}", addresses[often], addresses[first[often]])
        sorted_runs.save_run(work / f"anchors/{part.stem}-{chunk:05d}", hashes[new], addresses[new])
        counts.update(anchors=int(new.sum()), windows=size)
    return counts


def save_repeated(run: Path, addresses: np.ndarray, firsts: np.ndarray) -> None:
    """Write addresses, in ascending order, and those of the same bytes before them."""
    order = sorted_runs.by_address(addresses)
    sorted_runs.save_run(run, addresses[order], firsts[order])


def match_anchors(low: int, high: int, work: Path, out: Path) -> dict:
    """Write where the anchors with hashes in a range stand that stand in more than one chunk, and the first of each."""
    hashes, addresses = sorted_runs.load_range(sorted_runs.runs(work / "anchors", "*"), low, high)
    order = sorted_runs.ascending(hashes)
    addresses, first = addresses[order], sorted_runs.firsts(hashes[order])
    often = np.bincount(first)[first] > 1
    save_repeated(out, addresses[often], addresses[first[often]])
    return {}


def extend(number: int, part: Path, n: int, files: list[Path], work: Path) -> dict:
    """Write which windows of a part are repeated as far as its anchors show, and which others hold a repeated anchor."""
    ends, width = np.load(work / f"{part.stem}.ends.npy"), anchors_in(n)
    everywhere, left = sorted_runs.runs(work / "repeated", "range-*"), 0
    for chunk, start, size in chunks(ends):
        bounds = (sorted_runs.address(number, start), sorted_runs.address(number, start + size + width - 1))
        anchors, firsts = sorted_runs.load_range([work / f"repeated/{part.stem}-{chunk:05d}", *everywhere], *bounds)
        places = sorted_runs.place_of(anchors) - start
        held = np.zeros(size + width - 1, dtype=bool)
        held[places] = True
        held = sliding(np.logical_or, held, width) & whole_windows(ends, start, size, n)
        data = read_bytes(files[number], start, size + n - 1)
        later = anchors - firsts >= n
        again, copies = follow(places[later], data, firsts[later], files, n)
        again &= held
        starts, stops = intervals(again, copies)
        edges = [sorted_runs.address(number, start + edge) for edge in (starts, stops + n - 1)]
        sorted_runs.save_run(work / f"again/{part.stem}-{chunk:05d}", *edges, copies[starts])
        starts, stops = intervals(held & ~again)
        sorted_runs.save_run(work / f"held/{part.stem}-{chunk:05d}", starts, stops)
        left += int((stops - starts).sum())
    return {"held": left}


def follow(
    places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which windows of `data` are the same as before, by comparison around anchors in the same distance from their firsts.

    Both (len(data) - n + 1,): bool, and an address of the same bytes before. Single anchors are left out: these are mostly
    phrases that are shorter than a window.
    """
    width = anchors_in(n)
    again = np.zeros(len(data) - n + 1, dtype=bool)
    copies = np.zeros(len(again), dtype=np.int64)
    order = np.lexsort((places, firsts - places))
    places, firsts = places[order], firsts[order]
    starts = places - np.minimum(np.minimum(places, width - 1), sorted_runs.place_of(firsts))
    stops, distances = np.minimum(places + n, len(data)), firsts - places
    apart = np.ones(len(places) + 1, dtype=bool)
    apart[1:-1] = (distances[1:] != distances[:-1]) | (starts[1:] > stops[:-1])
    edges = np.flatnonzero(apart)
    several = np.flatnonzero(np.diff(edges) > 1)
    starts, stops, distances = starts[edges[several]], stops[edges[several + 1] - 1], distances[edges[several]]
    number = sorted_runs.part_of(starts + distances)
    for other in sorted_runs.parts_of(starts + distances):
        text = np.memmap(files[other], dtype=np.uint8, mode="r")
        here = np.flatnonzero(number == other)
        for some in np.split(here, np.flatnonzero(np.diff(np.cumsum(stops[here] - starts[here]) // COMPARED)) + 1):
            sizes = stops[some] - starts[some]
            last = np.repeat(np.cumsum(sizes), sizes)
            at = np.arange(len(last)) + np.repeat(starts[some] - (np.cumsum(sizes) - sizes), sizes)
            before = at + np.repeat(distances[some], sizes)
            differing = data[at] != text.take(sorted_runs.place_of(before), mode="clip")
            count = np.concatenate(([0], np.cumsum(differing)))
            same = np.flatnonzero(count[n:] == count[:-n])
            same = same[same + n <= last[same]]
            again[at[same]], copies[at[same]] = True, before[same]
    return again, copies


def hash_windows(number: int, part: Path, n: int, low: int, high: int, work: Path) -> dict:
    """Write the hashes, in a range, of the windows of a part that may be repeated, and where these begin.

    Those that have an equal before them in their chunk are known to be repeated, and are written as such instead.
    """
    text, ends, written = work / f"{part.stem}.text", np.load(work / f"{part.stem}.ends.npy"), 0
    for chunk, start, size in chunks(ends):
        held = mask(*(np.load(work / f"held/{part.stem}-{chunk:05d}.{i}.npy") for i in range(2)), size)
        data, keys, places = read_bytes(text, start, size + n - 1), [], []
        for begin in range(0, size, BLOCK):
            at = np.flatnonzero(held[begin : begin + BLOCK])
            if len(at):
                hashes = gram_hashes(data[begin : begin + BLOCK + n - 1], n)[at]
                inside = (hashes >= np.uint64(low)) & (hashes <= np.uint64(high - 1))
                keys.append(hashes[inside])
                places.append(at[inside] + begin + start)
        keys, places = np.concatenate([np.zeros(0, np.uint64), *keys]), np.concatenate([np.zeros(0, np.int64), *places])
        order = sorted_runs.ascending(keys)
        keys, addresses = keys[order], sorted_runs.address(number, places[order])
        first = addresses[sorted_runs.firsts(keys)]
        again = addresses - first >= n
        save_repeated(work / f"same/{part.stem}-{chunk:05d}-{low:016x}", addresses[again], first[again])
        sorted_runs.save_run(work / f"windows/{part.stem}-{chunk:05d}", keys[~again], addresses[~again])
        written += int((~again).sum())
    return {"windows": written}


def match_windows(low: int, high: int, n: int, work: Path, out: Path) -> dict:
    """Write which windows with hashes in a range have an equal that ends before they begin, and the first such."""
    keys, addresses = sorted_runs.load_range(sorted_runs.runs(work / "windows", "*"), low, high)
    order = sorted_runs.ascending(keys)
    addresses = addresses[order]
    first = addresses[sorted_runs.firsts(keys[order])]
    again = addresses - first >= n
    save_repeated(out, addresses[again], first[again])
    return {}


def equal(places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int) -> np.ndarray:
    """(windows,) bool: whether the windows at these places of `data` are those at the addresses `firsts`, byte by byte."""
    same = np.zeros(len(places), dtype=bool)
    here = sliding_window_view(data, n)
    for number in sorted_runs.parts_of(firsts):
        there = sliding_window_view(np.memmap(files[number], dtype=np.uint8, mode="r"), n)
        chosen = np.flatnonzero(sorted_runs.part_of(firsts) == number)
        for some in np.split(chosen, range(COMPARED // n, len(chosen), COMPARED // n)):
            same[some] = (here[places[some]] == there[sorted_runs.place_of(firsts[some])]).all(axis=1)
    return same


def find_cuts(number: int, part: Path, n: int, files: list[Path], work: Path) -> np.ndarray:
    """(cuts, 3): where what is to be cut from the text of a part begins and ends, and the address of what begins it."""
    ends, found = np.load(work / f"{part.stem}.ends.npy"), [np.zeros((3, 0), dtype=np.int64)]
    everywhere = sorted_runs.runs(work / "same", "range-*")
    for chunk, start, size in chunks(ends):
        name, bounds = (
            f"{part.stem}-{chunk:05d}",
            (sorted_runs.address(number, start), sorted_runs.address(number, start + size)),
        )
        *edges, copies = sorted_runs.load_range([work / f"again/{name}"], *bounds, arrays=3)
        found.append(np.stack([*map(sorted_runs.place_of, edges), copies]))
        addresses, copies = sorted_runs.load_range(
            [*sorted_runs.runs(work / "same", f"{name}-*"), *everywhere], *bounds
        )
        places = sorted_runs.place_of(addresses)
        same = equal(places - start, read_bytes(files[number], start, size + n - 1), copies, files, n)
        found.append(np.stack((places[same], places[same] + n, copies[same])))
    starts, stops, copies = (array := np.concatenate(found, axis=1))[:, np.argsort(array[0], kind="stable")]
    apart = np.ones(len(starts) + 1, dtype=bool)
    apart[1:-1] = starts[1:] > stops[:-1]  # documents are: the separator is never cut
    edges = np.flatnonzero(apart)
    return np.stack((starts[edges[:-1]], stops[edges[1:] - 1], copies[edges[:-1]]), axis=1)


def at_characters(cuts: np.ndarray, text: Path) -> np.ndarray:
    """The cuts without the bytes of characters that are not wholly within."""
    if not len(cuts):
        return cuts
    data, cuts = np.memmap(text, dtype=np.uint8, mode="r"), cuts.copy()
    for _ in range(3):  # no character has more than three bytes after its first, which all begin with the bits 10
        cuts[:, 0] += data[cuts[:, 0]] & 0xC0 == 0x80
        cuts[:, 1] -= data[cuts[:, 1]] & 0xC0 == 0x80  # behind the last document too there is a byte: the separator
    return cuts


def rest(text: memoryview, starts: list[int], stops: list[int]) -> bytes:
    """A text without what lies between these places. A newline joins what is left, where there is no white space already."""
    left = b""
    for start, stop in zip([0, *stops], [*starts, len(text)], strict=True):
        piece = bytes(text[start:stop])
        if left and piece and not left[-1:].isspace() and not piece[:1].isspace():
            left += b"\n"  # the halves of two words are no word
        left += piece
    return left


def cut_part(number: int, part: Path, n: int, files: list[Path], work: Path, out: Path) -> dict:
    """Write the documents of a part without repeated windows; those with nothing but white space left are dropped."""
    found = find_cuts(number, part, n, files, work)
    cuts = at_characters(found, files[number])
    edges = np.concatenate(([0], np.load(work / f"{part.stem}.ends.npy")))
    within = np.searchsorted(cuts[:, 0], edges)  # document i has the cuts from within[i] to within[i + 1]
    kept, gone, cut, begin = Tally(), Tally(), Tally(), 0
    with writer(out / part.name) as file:
        for table in tables(part):
            offsets, data = strings(table["text"])
            touched = np.flatnonzero(np.diff(within[begin : begin + len(table) + 1]))
            pieces, lengths, done, blank = [], np.diff(offsets), offsets[0], np.zeros(len(table), dtype=bool)
            for row in touched.tolist():
                here = cuts[slice(*within[begin + row : begin + row + 2]), :2] - edges[begin + row]
                left = rest(data[offsets[row] : offsets[row + 1]], *here.T.tolist())
                pieces += [data[done : offsets[row]], left]
                lengths[row], done, blank[row] = len(left), offsets[row + 1], not left.decode().strip()
            joined = pa.py_buffer(b"".join([*pieces, data[done : offsets[-1]]]))
            ends = pa.py_buffer(np.concatenate(([0], np.cumsum(lengths))))
            texts = pa.LargeStringArray.from_buffers(len(table), ends, joined)
            after = table.set_column(table.schema.get_field_index("text"), "text", texts)
            if not blank.all():
                file.write_table(after.filter(pa.array(~blank)))
            count(kept, after.filter(pa.array(~blank)))
            count(gone, table.filter(pa.array(blank)))
            partly = pa.array(touched[~blank[touched]])
            lost = pc.subtract(pc.utf8_length(table["text"]), pc.utf8_length(after["text"]))
            count(cut, table.take(partly), lost.take(partly))
            begin += len(table)
    sizes, shown = Counter((cuts[:, 1] - cuts[:, 0]).tolist()), samples(number, found, cuts, edges, files[number])
    tallies = {"kept": kept.counts(), "dropped": gone.counts(), "cut": cut.counts()}
    return {**tallies, "sizes": sizes, "samples": shown}


def samples(number: int, found: np.ndarray, cuts: np.ndarray, edges: np.ndarray, text: Path) -> list[tuple]:
    """The cuts with the smallest digests: digest, address of the copy of its first window, bytes left out before the first
    character, address of the document, byte in it, bytes, text."""
    data = np.memmap(text, dtype=np.uint8, mode="r") if len(cuts) else b""
    digests = [(xxhash.xxh3_64_intdigest(data[start:stop]), i) for i, (start, stop) in enumerate(cuts[:, :2].tolist())]
    rows = []
    for digest, i in smallest(digests):
        start, stop, copy = cuts[i].tolist()
        row = int(np.searchsorted(edges, start, side="right")) - 1
        shown = bytes(data[start : min(stop, start + 4 * SAMPLE_CHARACTERS)]).decode(errors="ignore")[
            :SAMPLE_CHARACTERS
        ]
        place = start - int(edges[row])
        rows.append(
            (digest, copy, start - int(found[i, 0]), sorted_runs.address(number, row), place, stop - start, shown)
        )
    return rows


def first_copy(copy: int, n: int, found: list[Path], work: Path) -> int:
    """The address of the first of all copies of the window at this address."""
    while True:
        name = f"{found[sorted_runs.part_of(copy)].stem}-{sorted_runs.place_of(copy) // CHUNK:05d}"
        starts, stops, copies = (np.load(work / f"again/{name}.{i}.npy", mmap_mode="r") for i in range(3))
        i = int(np.searchsorted(starts, copy, side="right")) - 1
        if i >= 0 and copy + n <= stops[i]:
            copy = int(copies[i]) + copy - int(starts[i])
            continue
        same = [*sorted_runs.runs(work / "same", f"{name}-*"), *sorted_runs.runs(work / "same", "range-*")]
        _, before = sorted_runs.load_range(same, copy, copy + 1)
        if not len(before):
            return copy
        copy = int(before[0])


def row_and_byte(address: int, found: list[Path], work: Path) -> tuple[int, int]:
    """In which row of its part a byte stands, and where in that document."""
    ends = np.load(work / f"{found[sorted_runs.part_of(address)].stem}.ends.npy")
    row = int(np.searchsorted(ends, sorted_runs.place_of(address), side="right"))
    return row, sorted_runs.place_of(address) - int(ends[row - 1] if row else 0)


def cut(params: Substring, found: list[Path], out: Path, work: Path) -> list[dict]:
    """Write these parts to `out` without the passages that stood before; the counts and samples of each."""
    for name in ("anchors", "repeated", "again", "held", "windows", "same"):
        (work / name).mkdir(parents=True, exist_ok=True)
    n, files = params.bytes, [work / f"{part.stem}.text" for part in found]
    jobs = [(i, part, n, work) for i, part in enumerate(found)]
    flat = over_parts(flatten, jobs, work / "flattened", "find anchors")
    ranges = sorted_runs.ranges(sum(r["anchors"] for r in flat))
    matches = [(*bounds, work, work / f"repeated/range-{bounds[0]:016x}") for bounds in ranges]
    over_parts(match_anchors, matches, work / "anchored", "match anchors")
    shutil.rmtree(work / "anchors")
    jobs = [(i, part, n, files, work) for i, part in enumerate(found)]
    extended = over_parts(extend, jobs, work / "extended", "compare passages")
    most = max(1, int(HASHED * sum(r["windows"] for r in flat)))
    for low, high in sorted_runs.ranges(sum(r["held"] for r in extended), most):
        jobs = [(i, part, n, low, high, work) for i, part in enumerate(found)]
        hashed = over_parts(hash_windows, jobs, work / f"hashed-{low:016x}", "hash passages")
        ranges = sorted_runs.ranges(sum(r["windows"] for r in hashed), low=low, high=high)
        matches = [(*bounds, n, work, work / f"same/range-{bounds[0]:016x}") for bounds in ranges]
        over_parts(match_windows, matches, work / f"matched-{low:016x}", "match passages")
        for file in (work / "windows").iterdir():
            file.unlink()
    jobs = [(i, part, n, files, work, out) for i, part in enumerate(found)]
    return over_parts(cut_part, jobs, work / "cut", "cut passages")
