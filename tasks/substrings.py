"""Repeated passages: runs of bytes that stood before, anywhere in the corpus, are cut out of later documents.

A window is so many bytes of one document, in UTF-8. It is repeated when the same bytes stood before and ended before it
begins; all bytes of repeated windows are cut, but for those of a character that is not wholly within (section 4.4 of the
paper, after Lee et al., "Deduplicating training data makes language models better", 2021, where no copy stays).

Works on disk in bounded memory, without a suffix array. Every window holds an anchor: the shorter run of bytes within it
whose hash is the least (Schleimer et al., "Winnowing", 2003). Only where an anchor stands twice can a window do so: the
hashes of these windows are sorted, by range, and what has an equal before it is compared byte by byte.
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

from tasks import runs
from tasks.columns import SAMPLE_CHARACTERS, count, smallest, strings, tables, writer
from tasks.corpus import Tally
from tasks.parallel import over_parts

CHUNK = 1 << 22  # windows of a part that are looked at together
BLOCK = 1 << 15  # bytes that are hashed at once: what fits in a core's cache
COMPARED = 1 << 15  # windows that are compared at once
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


def select(data: np.ndarray, whole: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the anchors of the windows of n bytes in `data` begin, and their hashes; `whole` says which windows count.

    An anchor depends on nothing but its window, so windows of the same bytes have the same anchors. At least one is in each.
    """
    width = 1 << ((n // 2).bit_length() - 1)  # anchors in a window, of which the least counts
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
    last = np.clip(stops - n + 1, begins, start + size)
    counts = np.stack((last - begins, np.minimum(stops, start + size) - last), axis=1)
    return np.repeat(np.tile([True, False], len(stops)), np.maximum(counts, 0).ravel())


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

    Anchors that stand more than once in a chunk are known to be repeated, and the first of them stands for all.
    """
    text, ends = work / f"{part.stem}.text", [np.zeros(1, dtype=np.int64)]
    with text.open("wb") as file:
        for table in tables(part, ("text",)):
            offsets, data = strings(table["text"])
            file.write(data[offsets[0] : offsets[-1]])
            ends.append(offsets[1:] - offsets[0] + ends[-1][-1])
    ends, anchors = np.concatenate(ends)[1:], 0
    runs.save(work / f"{part.stem}.ends.npy", ends)
    for chunk, start, size in chunks(ends):
        data, whole = read_bytes(text, start, size + n - 1), whole_windows(ends, start, size, n)
        blocks = range(0, size, BLOCK)
        found = [
            (begin, *select(data[begin : begin + BLOCK + n - 1], whole[begin : begin + BLOCK], n)) for begin in blocks
        ]
        places, index = np.unique(np.concatenate([at + begin for begin, at, _ in found]), return_index=True)
        hashes = np.concatenate([hashed for _, _, hashed in found])[index]
        order = runs.ascending(hashes)
        first = runs.firsts(hashes[order])
        new, often = first == np.arange(len(order)), np.bincount(first)[first] > 1
        addresses = runs.address(number, start + places)
        runs.save_run(work / f"repeated/{part.stem}-{chunk:05d}", addresses[np.sort(order[often])])
        runs.save_run(work / f"anchors/{part.stem}-{chunk:05d}", hashes[order[new]], addresses[order[new]])
        anchors += int(new.sum())
    return {"anchors": anchors}


def match_anchors(low: int, high: int, work: Path, out: Path) -> dict:
    """Write where the anchors with hashes in a range stand that stand in more than one chunk."""
    hashes, addresses = runs.load_range(runs.runs(work / "anchors", "*"), low, high)
    order = runs.ascending(hashes)
    same = np.append(hashes[order[1:]] == hashes[order[:-1]], False)
    runs.save_run(out, np.sort(addresses[order[(same | np.roll(same, 1))[: len(order)]]]))
    return {}


def hash_windows(number: int, part: Path, n: int, work: Path) -> dict:
    """Write the hashes of the windows of a part that hold a repeated anchor, and where these windows begin.

    Those that have an equal before them in their chunk are known to be repeated, and are written as such instead.
    """
    text, ends, written = work / f"{part.stem}.text", np.load(work / f"{part.stem}.ends.npy"), 0
    width, bounds = 1 << ((n // 2).bit_length() - 1), (runs.address(number, 0), runs.address(number + 1, 0))
    [anywhere] = runs.load_range(runs.runs(work / "repeated", "range-*"), *bounds, arrays=1)
    anywhere = np.sort(runs.place_of(anywhere))
    for chunk, start, size in chunks(ends):
        own = runs.place_of(np.load(work / f"repeated/{part.stem}-{chunk:05d}.0.npy"))
        low, high = np.searchsorted(anywhere, [start, start + size + width - 1])
        wanted = np.zeros(size + width - 1, dtype=bool)
        wanted[np.concatenate((own, anywhere[low:high])) - start] = True
        wanted = sliding(np.logical_or, wanted, width) & whole_windows(ends, start, size, n)
        data, keys, places = read_bytes(text, start, size + n - 1), [], []
        for begin in range(0, size, BLOCK):
            at = np.flatnonzero(wanted[begin : begin + BLOCK])
            if len(at):
                keys.append(gram_hashes(data[begin : begin + BLOCK + n - 1], n)[at])
                places.append(at + begin + start)
        keys, places = np.concatenate([np.zeros(0, np.uint64), *keys]), np.concatenate([np.zeros(0, np.int64), *places])
        order = runs.ascending(keys)
        keys, addresses = keys[order], runs.address(number, places[order])
        first = addresses[runs.firsts(keys)]
        again = addresses - first >= n
        save_repeated(work / f"again/{part.stem}-{chunk:05d}", addresses[again], first[again])
        runs.save_run(work / f"windows/{part.stem}-{chunk:05d}", keys[~again], addresses[~again])
        written += int((~again).sum())
    return {"windows": written}


def save_repeated(run: Path, addresses: np.ndarray, firsts: np.ndarray) -> None:
    """Write the addresses of repeated windows, and of the same bytes before them."""
    order = runs.by_address(addresses)
    runs.save_run(run, addresses[order], firsts[order])


def match_windows(low: int, high: int, n: int, work: Path, out: Path) -> dict:
    """Write which windows with hashes in a range have an equal that ends before they begin, and the first such."""
    keys, addresses = runs.load_range(runs.runs(work / "windows", "*"), low, high)
    order = runs.ascending(keys)
    addresses = addresses[order]
    first = addresses[runs.firsts(keys[order])]
    again = addresses - first >= n
    save_repeated(out, addresses[again], first[again])
    return {}


def equal(places: np.ndarray, data: np.ndarray, firsts: np.ndarray, files: list[Path], n: int) -> np.ndarray:
    """(windows,) bool: whether the windows at these places of `data` are those at the addresses `firsts`, byte by byte.

    Where both go on by one from the window before, only the last byte is new.
    """
    new = np.ones(len(places), dtype=bool)
    new[1:] = (np.diff(places) != 1) | (np.diff(firsts) != 1)
    same = np.zeros(len(places), dtype=bool)
    for number in runs.parts_of(firsts):
        text, here = np.memmap(files[number], dtype=np.uint8, mode="r"), runs.part_of(firsts) == number
        last = np.flatnonzero(here & ~new)
        same[last] = data[places[last] + n - 1] == text[runs.place_of(firsts[last]) + n - 1]
        whole = np.flatnonzero(here & new)
        same[whole] = equal_windows(data, places[whole], text, runs.place_of(firsts[whole]), n)
    starts = np.flatnonzero(new)
    good = np.logical_and.reduceat(same, starts) if len(starts) else same
    same = np.repeat(good, np.diff(starts, append=len(new)))
    for i in np.flatnonzero(~same).tolist():  # two hashes were the same by chance: each window for itself
        text = np.memmap(files[runs.part_of(firsts[i])], dtype=np.uint8, mode="r")
        [same[i]] = equal_windows(data, places[i : i + 1], text, runs.place_of(firsts[i : i + 1]), n)
    return same


def equal_windows(data: np.ndarray, places: np.ndarray, text: np.ndarray, others: np.ndarray, n: int) -> np.ndarray:
    """(windows,) bool: whether n bytes from these places of two texts are the same."""
    here, there = sliding_window_view(data, n), sliding_window_view(text, n)
    blocks = range(0, len(places), COMPARED)
    same = [(here[places[i : i + COMPARED]] == there[others[i : i + COMPARED]]).all(axis=1) for i in blocks]
    return np.concatenate([np.zeros(0, dtype=bool), *same])


def intervals(starts: np.ndarray, stops: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Indices of those intervals, in ascending order, that neither overlap nor touch one before them of the same owner."""
    apart = np.ones(len(starts), dtype=bool)
    apart[1:] = (starts[1:] > stops[:-1]) | (owners[1:] != owners[:-1])
    return np.flatnonzero(apart)


def find_cuts(number: int, part: Path, n: int, files: list[Path], work: Path) -> np.ndarray:
    """(cuts, 3): where what is to be cut from the text of a part begins and ends, and the address of what begins it."""
    text, ends, found = files[number], np.load(work / f"{part.stem}.ends.npy"), []
    everywhere = runs.runs(work / "again", "range-*")
    for chunk, start, size in chunks(ends):
        bounds = (runs.address(number, start), runs.address(number, start + size))
        addresses, firsts = runs.load_range([work / f"again/{part.stem}-{chunk:05d}", *everywhere], *bounds)
        order = runs.by_address(addresses)
        places, firsts = runs.place_of(addresses[order]), firsts[order]
        same = equal(places - start, read_bytes(text, start, size + n - 1), firsts, files, n)
        places, firsts = places[same], firsts[same]
        first = intervals(places, places + n, np.searchsorted(ends, places, side="right"))
        stops = np.append(places[first[1:] - 1], places[-1:]) + n
        found.append(np.stack((places[first], stops, firsts[first]), axis=1))
    cuts = np.concatenate([np.zeros((0, 3), dtype=np.int64), *found])
    first = intervals(cuts[:, 0], cuts[:, 1], np.searchsorted(ends, cuts[:, 0], side="right"))
    stops = np.append(cuts[first[1:] - 1, 1], cuts[-1:, 1])
    return np.stack((cuts[first, 0], stops, cuts[first, 2]), axis=1)


def at_characters(cuts: np.ndarray, text: Path) -> np.ndarray:
    """The cuts without the bytes of characters that are not wholly within."""
    if not len(cuts):
        return cuts
    data, cuts = np.memmap(text, dtype=np.uint8, mode="r"), cuts.copy()
    for _ in range(3):  # no character has more than three bytes after its first, which all begin with the bits 10
        cuts[data[cuts[:, 0]] & 0xC0 == 0x80] += (1, 0, 1)
        inside = np.flatnonzero(cuts[:, 1] < len(data))
        cuts[inside, 1] -= data[cuts[inside, 1]] & 0xC0 == 0x80
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
    cuts = at_characters(find_cuts(number, part, n, files, work), files[number])
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
    tallies = {"kept": kept.counts(), "dropped": gone.counts(), "cut": cut.counts()}
    return {
        **tallies,
        "sizes": Counter((cuts[:, 1] - cuts[:, 0]).tolist()),
        "samples": samples(number, cuts, edges, files[number]),
    }


def samples(number: int, cuts: np.ndarray, edges: np.ndarray, text: Path) -> list[tuple]:
    """The cuts with the smallest digests: digest, addresses of the first copy's byte and of the document, its byte, bytes, text."""
    data = np.memmap(text, dtype=np.uint8, mode="r") if len(cuts) else b""
    digests = [(xxhash.xxh3_64_intdigest(data[start:stop]), i) for i, (start, stop) in enumerate(cuts[:, :2].tolist())]
    found = []
    for digest, i in smallest(digests):
        start, stop, first = cuts[i].tolist()
        row = int(np.searchsorted(edges, start, side="right")) - 1
        shown = bytes(data[start : min(stop, start + 4 * SAMPLE_CHARACTERS)]).decode(errors="ignore")
        place = start - int(edges[row])
        found.append((digest, first, runs.address(number, row), place, stop - start, shown[:SAMPLE_CHARACTERS]))
    return found


def earliest(first: int, work: Path) -> int:
    """The address of the first of all copies of a window that is the first in its chunk."""
    _, before = runs.load_range(runs.runs(work / "again", "range-*"), first, first + 1)
    return int(before[0]) if len(before) else first


def row_and_byte(first: int, found: list[Path], work: Path) -> tuple[int, int]:
    """In which row of its part a byte stands, and where in that document."""
    ends = np.load(work / f"{found[runs.part_of(first)].stem}.ends.npy")
    row = int(np.searchsorted(ends, runs.place_of(first), side="right"))
    return row, runs.place_of(first) - int(ends[row - 1] if row else 0)


def cut(params: Substring, found: list[Path], out: Path, work: Path) -> list[dict]:
    """Write these parts to `out` without the passages that stood before; the counts and samples of each."""
    for name in ("anchors", "repeated", "windows", "again"):
        (work / name).mkdir(parents=True, exist_ok=True)
    n, files = params.bytes, [work / f"{part.stem}.text" for part in found]
    jobs = [(i, part, n, work) for i, part in enumerate(found)]
    flat = over_parts(flatten, jobs, work / "flattened", "find anchors")
    ranges = enumerate(runs.ranges(sum(r["anchors"] for r in flat)))
    matches = [(*bounds, work, work / f"repeated/range-{i:05d}") for i, bounds in ranges]
    over_parts(match_anchors, matches, work / "anchored", "match anchors")
    hashed = over_parts(hash_windows, jobs, work / "hashed", "hash passages")
    shutil.rmtree(work / "anchors")
    ranges = enumerate(runs.ranges(sum(r["windows"] for r in hashed)))
    matches = [(*bounds, n, work, work / f"again/range-{i:05d}") for i, bounds in ranges]
    over_parts(match_windows, matches, work / "matched", "match passages")
    shutil.rmtree(work / "windows")
    jobs = [(i, part, n, files, work, out) for i, part in enumerate(found)]
    return over_parts(cut_part, jobs, work / "cut", "cut passages")
