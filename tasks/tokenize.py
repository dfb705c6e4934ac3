"""Tokenize: encode, pack into sequences of fixed length, hold some documents out, sort.

Reads   the parts of a corpus, and a vocabulary.
Writes  sequences.npy     (n, S) uint16, in the order of training (uint32 for more than 65,536 entries)
        heldout.parquet   the documents that are never trained on: id, source, text, characters, bytes, tokens; words
                          (tasks/text/matching.py), and how many of them lie in passages of 13 words or more that the
                          training text has too (shared_words); and their place among those that the held-out loss is
                          measured on (measured; null for others)
        heldout.npz       the tokens of the measured documents, and of which word each is a piece (model.heldout)
        tokenizer.json, tokenizer_config.json

The held-out loss is measured on documents that share no 13 words in a row with the training text. That is all text that
isn't held out, also the sequences beyond `max_sequences`: so the choice doesn't depend on how many are kept.
"""

import hashlib
import logging
import math
import mmap
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import regex
from pydantic import Field
from tokenizers import Tokenizer

from model.errors import InputError
from model.wording import counted
from tasks.corpus.parts import SCHEMA, Document, parts_of, tables, unit_hash
from tasks.corpus.parts import table as documents_table
from tasks.stage import Params, stage
from tasks.store.artifacts import HELDOUT_TEXT, SEQUENCES, WORK, Artifact
from tasks.text import matching, overlap
from tasks.text.ngrams import Known
from tasks.text.tokenizer import (
    LONGEST_WORD,
    SEP,
    UNK,
    copy_tokenizer,
    encoder_of,
    heldout_of,
    load_tokenizer,
    normaliser_of,
)
from tasks.workers.jobs import over_parts

BLOCK, WINDOW = 1 << 24, 1 << 26  # bytes of sequences that are read, and put in order, at once
MOST_RUNS = 1000  # ascending runs of an order, up to which each is written by itself
MOST_SEQUENCES = 85_000_000  # the release's limit
MOST_UNKNOWN = 0.01  # of the tokens, before there is a warning
UNKNOWN_OF_A_PART, SHOWN_WORDS, SHOWN_CHARACTERS = 1000, 10, 30
STOP = regex.compile(r"\p{Sentence_Terminal}")
log = logging.getLogger(__name__)
# Of a document longer than all that is to be held out, than LARGE of the text and SHORT characters, a piece is a tenth
# of the greatest of the three
PIECES, LARGE, SHORT = 10, 0.02, 10_000
MEASURED_CHARACTERS = 1_000_000  # of held-out text that the loss is measured on, or all if there is less
# Of those characters, the part that must share nothing with the training text. With less, the standard error is more
# than three times as large, and what is left may be unlike the rest. A standard error needs two documents.
ENOUGH, FEWEST = 0.1, 2
HELD_SCHEMA = pa.schema([*SCHEMA, *((name, pa.int64()) for name in ("characters", "bytes", "tokens"))])
HELD_RUNS = "runs.npy"  # in the draft: the hashes of all runs of words in held-out documents
VERSION = 4 + matching.VERSION  # with other words, other documents are measured


class Tokenize(Params):
    """How text becomes sequences."""

    length: int = Field(128, ge=16, le=2048, description="Tokens per sequence.")
    heldout_fraction: float = Field(
        0.0005, gt=0, lt=0.5, description="Fraction of documents that are never trained on."
    )
    sort: Literal["sentence-length", "unigram", "random", "none"] = Field(
        "sentence-length",
        description="sentence-length: sequences of short sentences first (most full stops, the released recipe); "
        "unigram: of likely words first (mean log-probability, the paper's text); "
        "random: in random order; none: in the order of the corpus.",
    )
    max_sequences: int = Field(
        MOST_SEQUENCES,
        ge=1,
        description="Keep at most this many sequences, drawn at random before sorting. "
        "The default is the release's limit.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of that draw, and of the order if sort is random.")


def pieces_of(text: str, size: int) -> Iterator[str]:
    """A text in pieces of at least `size` characters, cut after a line where there is one, else after a word."""
    start = 0
    while len(text) - start > 2 * size:
        ends = (text.find(end, start + size, start + 2 * size) + 1 for end in ("\n", " "))
        end = next(filter(None, ends), start + size)
        yield text[start:end]
        start = end
    yield text[start:]


def divided(table: pa.Table, fraction: float, longest: int) -> tuple[pa.Table, np.ndarray]:
    """The documents of a table, and which of them are held out: by their digest, whatever the other documents are.

    A document of more than `longest` characters may alone be more than the fraction of the text. Of such a one, pieces
    are held out: each is a document whose id ends in its place, and what lies between them is trained on.
    """
    texts = table["text"].to_pylist()
    if max(map(len, texts), default=0) <= longest:
        return table, np.array([unit_hash(text) < fraction for text in texts], dtype=bool)
    rows, is_held = [], []
    for name, source, text in zip(table["id"].to_pylist(), table["source"].to_pylist(), texts, strict=True):
        pieces, place = [text], 0
        if len(text) > longest:
            pieces = list(pieces_of(text, longest // PIECES))
        for held, run in groupby(pieces, key=lambda piece: unit_hash(piece) < fraction):
            for piece in run if held else ["".join(run)]:
                rows.append(Document(f"{name}+{place}" if held and piece != text else name, source, piece))
                is_held.append(held)
                place += len(piece)
    return documents_table(rows), np.array(is_held, dtype=bool)


def find_runs(part: Path, fraction: float, longest: int, out: Path) -> dict:
    """Write the hashes of the runs of words in the held-out documents of a part; the arguments are as for `divided`."""
    held = []
    for whole in tables(part):
        table, is_held = divided(whole, fraction, longest)
        held += table["text"].filter(pa.array(is_held)).to_pylist()
    np.save(out / f"{part.stem}.{HELD_RUNS}", overlap.ngrams_in(held))
    return {"documents": len(held)}


def tokenize_part(part: Path, tokenizer_folder: Path, params: Tokenize, longest: int, out: Path) -> dict:
    """Write the sequences of a part, its held-out documents, and which runs of HELD_RUNS its other documents have.

    `longest`: as for `divided`.
    """
    encoder = encoder_of(tokenizer_folder)
    known = Known(np.load(out / HELD_RUNS, mmap_mode="r"))
    encoder.unknown.clear()
    nothing = np.zeros(0, encoder.type)
    train, documents = [nothing], [HELD_SCHEMA.empty_table()]
    shared = [np.zeros(0, np.uint64)]
    counts = {"documents": 0, "characters": 0, "unknown": 0}
    for whole in tables(part):
        table, is_held = divided(whole, params.heldout_fraction, longest)
        texts, characters = table["text"].to_pylist(), pc.utf8_length(table["text"]).to_numpy()
        ids, ends = encoder(texts)
        closed = np.insert(ids, ends, SEP)  # a separator after every document
        lengths = np.diff(ends, prepend=0)
        train.append(closed[~np.repeat(is_held, lengths + 1)])
        apart = table.filter(pa.array(is_held))
        trained = table["text"].filter(pa.array(~is_held)).to_pylist()
        shared.append(overlap.ngrams_in_common(known, trained))
        sizes = (characters[is_held], pc.binary_length(apart["text"]), lengths[is_held])
        documents.append(pa.table([*apart.columns, *sizes], schema=HELD_SCHEMA))
        counts["unknown"] += int((ids == UNK).sum())
        counts["documents"] += pc.count_distinct(table["id"].filter(pa.array(~is_held))).as_py()
        counts["characters"] += int(characters[~is_held].sum())
    ids = np.concatenate(train)
    used = len(ids) // params.length * params.length
    np.save(out / f"{part.stem}.npy", ids[:used].reshape(-1, params.length))
    np.save(out / f"{part.stem}.shared.npy", np.unique(np.concatenate(shared)))
    pq.write_table(pa.concat_tables(documents), out / f"{part.stem}.held.parquet", compression="zstd")
    unknown_words = dict(encoder.unknown.most_common(UNKNOWN_OF_A_PART))
    return {"counts": {**counts, "tokens": len(ids), "lost": len(ids) - used}, "unknown_words": unknown_words}


def measured(texts: Iterable[str], characters: int) -> np.ndarray:
    """The indices of the documents that the held-out loss is measured on, in the order of their digests.

    The last is the one that completes so many characters. So the choice depends on these texts alone: not on the
    vocabulary, on the length of sequences, or on the order and the parts of the corpus.
    """
    keys = [(unit_hash(text), len(text), hashlib.sha256(text.encode()).digest()) for text in texts]
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    total = np.cumsum([keys[index][1] for index in order])
    return order[: np.searchsorted(total, characters) + 1]


def measured_texts(folder: Path) -> list[str]:
    """The documents that the held-out loss is measured on, in their order, of a tokenize or pretrain artifact."""
    table = pq.read_table(folder / HELDOUT_TEXT, columns=["text", "measured"])
    return table.filter(pc.is_valid(table["measured"])).sort_by("measured")["text"].to_pylist()


def digest_of(texts: Iterable[str]) -> str:
    """A digest of the measured documents in their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def measurable(held: pa.Table) -> np.ndarray:
    """Which held-out documents the loss may be measured on: those that share nothing with the training text.

    All of them if these are too few, or if an earlier version, which made no such comparison, has written the table.
    """
    every = np.ones(len(held), dtype=bool)
    if "shared_words" not in held.column_names:
        return every
    alone = held["shared_words"].to_numpy() == 0
    characters = held["characters"].to_numpy()
    enough = characters[alone].sum() >= ENOUGH * min(MEASURED_CHARACTERS, characters.sum())
    return alone if enough and alone.sum() >= FEWEST else every


def compared(stems: list[str], work: Path) -> pa.Table:
    """The held-out documents of all parts, with their words and how many of them the training text shares."""
    found = [np.load(work / f"{stem}.shared.npy") for stem in stems]
    shared = Known(np.unique(np.concatenate(found)))
    held = []
    for stem in stems:
        table = pq.read_table(work / f"{stem}.held.parquet", schema=HELD_SCHEMA)
        counts = overlap.words_in_common(shared, table["text"].to_pylist())
        for name, column in zip(("words", "shared_words"), counts, strict=True):
            table = table.append_column(name, pa.array(column, pa.int64()))
        held.append(table)
    return pa.concat_tables(held)


def overlap_of(held: pa.Table) -> dict:
    """How many of these documents share text with the training text, and the share of their words in such passages."""
    words = held["words"].to_numpy()
    shared = held["shared_words"].to_numpy()
    documents = int((shared > 0).sum())
    return {
        "words_in_a_row": overlap.WORDS_IN_A_ROW,
        "documents": documents,
        "characters": int(held["characters"].to_numpy()[shared > 0].sum()),
        "share_of_documents": round(documents / max(1, len(held)), 6),
        "share_of_words": round(int(shared.sum()) / max(1, int(words.sum())), 6),
    }


def say_what_is_held_out(held: dict, asked: float) -> None:
    """Log the statistics of held-out documents; warn if the loss is measured on text that was trained on."""
    of_all = held["shared"]
    of_measured = held["measured"]["shared"]
    log.info(
        "Held out %s, %.3g%% of the text (%.3g%% asked for). %.3g%% of these documents share %d words in a row with "
        "the training text; %.3g%% of the held-out words are in such passages.",
        counted(held["documents"], "document"), 100 * held["share"], 100 * asked, 100 * of_all["share_of_documents"],
        of_all["words_in_a_row"], 100 * of_all["share_of_words"],
    )  # fmt: skip
    if of_measured["documents"]:
        log.warning(
            "The held-out loss will look too low: the model is trained on passages of %d words or more that make up "
            "%.3g%% of the text it is measured on. Too few held-out documents have no such passage (%s of %s). Give "
            "more text (download), hold out more (tokenize.heldout_fraction), or cut what repeats "
            "(deduplicate.methods: substring).",
            of_measured["words_in_a_row"], 100 * of_measured["share_of_words"],
            held["documents"] - of_all["documents"], counted(held["documents"], "document"),
        )  # fmt: skip


def hold_out(stems: list[str], work: Path, params: Tokenize, trained: int, out: Path) -> dict:
    """Write the held-out documents of all parts, and the tokens of the measured ones; count both.

    `trained`: the characters of all other documents.
    """
    held = compared(stems, work)
    may_be_measured = np.flatnonzero(measurable(held))
    order = may_be_measured[measured((held["text"][row].as_py() for row in may_be_measured), MEASURED_CHARACTERS)]
    places = np.full(len(held), -1, dtype=np.int64)
    places[order] = np.arange(len(order))
    column = pa.array(places, pa.int64(), mask=places < 0)
    pq.write_table(held.append_column("measured", column), out / HELDOUT_TEXT, compression="zstd")
    chosen = held.take(pa.array(order))
    texts = chosen["text"].to_pylist()
    measured_text = heldout_of(texts, load_tokenizer(out), params.length)
    measured_text.save(out)
    characters = pc.sum(held["characters"]).as_py() or 0
    found = {
        "documents": len(held),
        "characters": characters,
        "share": round(characters / max(1, characters + trained), 6),
        "tokens": (pc.sum(held["tokens"]).as_py() or 0) + len(held),
        "shared": overlap_of(held),
        "measured": {
            "documents": len(order),
            **measured_text.totals,
            "unknown_tokens": int((measured_text.sequences == UNK).sum()),
            "sequences": len(measured_text.sequences),
            "digest": digest_of(texts),
            "shared": overlap_of(chosen),
        },
    }
    say_what_is_held_out(found, params.heldout_fraction)
    return found


def blocks_of(parts: list[np.memmap], rows: np.ndarray | range) -> Iterator[np.ndarray]:
    """The sequences in these rows, which ascend, of all parts together: each part is read once, a block at a time."""
    start, step = 0, max(1, BLOCK // parts[0].strides[0])
    for part in parts:
        for begin in range(start, start + len(part), step):
            end = min(begin + step, start + len(part))
            if len(here := rows[bisect_left(rows, begin) : bisect_left(rows, end)]):
                yield part[np.asarray(here) - start]
                # pages that this process has read count as its memory; the system still caches them
                part._mmap.madvise(mmap.MADV_DONTNEED)
        start += len(part)


def warn_of_unknown(unknown: dict[str, int], share: float) -> None:
    """Log a warning if too many tokens are [UNK], with the most frequent such words and what helps."""
    shown = ", ".join(f"{word[:SHOWN_CHARACTERS]!r} ({n:,})" for word, n in list(unknown.items())[:SHOWN_WORDS])
    long = sum(number for word, number in unknown.items() if len(word) > LONGEST_WORD)
    helps = "They have characters without an entry: raise vocabulary.alphabet, or vocabulary.entries."
    if 2 * long > sum(unknown.values()):
        helps = f"Words of more than {LONGEST_WORD} characters are [UNK]: put spaces in them, or drop such documents."
    if share > MOST_UNKNOWN:
        log.warning("%.1f %% of the tokens are [UNK], most often the words %s. %s", 100 * share, shown, helps)


def sort_keys(parts: list[np.memmap], rows: np.ndarray | range, sort: str, tokenizer: Tokenizer) -> np.ndarray:
    """The keys by which sequences are sorted: integers, so that sums don't depend on their order."""
    vocabulary, length = tokenizer.get_vocab(), parts[0].shape[1]
    if sort == "sentence-length":
        # sequences have the same length, so the more full stops, the shorter the sentences; read from a table, as
        # np.isin takes thrice as long
        in_ascii = normaliser_of(tokenizer).characters == "ascii"  # else marks of any script
        stops = [n for entry, n in vocabulary.items() if (entry == "." if in_ascii else STOP.fullmatch(entry))]
        is_stop = np.isin(np.arange(max(vocabulary.values()) + 1), stops)
        number_of_stops = (is_stop[block].sum(axis=1, dtype=np.uint16) for block in blocks_of(parts, rows))
        return length - np.concatenate(list(number_of_stops))
    counts = sum(np.bincount(block.ravel(), minlength=len(vocabulary)) for block in blocks_of(parts, rows))
    surprise = -np.log((counts + 1) / (counts.sum() + len(vocabulary)))  # add-one smoothing
    worth = np.rint(surprise * 2**40).astype(np.int64)
    return np.concatenate([worth[block].sum(axis=1) for block in blocks_of(parts, rows)])


def kept_rows(sequences: int, params: Tokenize) -> np.ndarray | range:
    """The rows to keep of so many, ascending."""
    if sequences <= params.max_sequences:
        return range(sequences)
    rng = np.random.default_rng(params.seed)
    return np.sort(rng.choice(sequences, params.max_sequences, replace=False, shuffle=False))


def order_of(parts: list[np.memmap], rows: np.ndarray | range, params: Tokenize, tokenizer: Tokenizer) -> np.ndarray:
    """The places among these rows, in the order in which to write them; ties stay in the order of the corpus."""
    if params.sort == "none":
        return np.arange(len(rows))
    if params.sort == "random":
        return np.random.default_rng(params.seed).permutation(len(rows))
    return np.argsort(sort_keys(parts, rows, params.sort, tokenizer), kind="stable")


def windows_of(order: np.ndarray, size: int) -> list[np.ndarray]:
    """The order cut into few windows: where it falls, so that each ascends, or else into windows of `size`."""
    falls = order[1:] < order[:-1]
    few = np.count_nonzero(falls) < MOST_RUNS
    return np.split(order, np.flatnonzero(falls) + 1 if few else np.arange(size, len(order), size))


def put_in_order(file: BinaryIO, ascending: np.ndarray, ranks: np.ndarray) -> None:
    """Rewrite a window of the file, at which it is, that has the shape of `ascending`: by the ranks of its rows."""
    start = file.tell()
    file.readinto(ascending)
    file.seek(start)
    step = max(1, BLOCK // ascending[0].nbytes)
    for begin in range(0, len(ranks), step):
        file.write(ascending[ranks[begin : begin + step]].data)


def write_sequences(path: Path, parts: list[np.memmap], rows: np.ndarray | range, order: np.ndarray) -> None:
    """Write these rows in this order as a .npy file. Raises OSError if the disk is full.

    The parts are read once, in their order, as a row is a sixteenth of what the disk reads: each sequence goes behind
    the one before it in the same window of the file, and a window that doesn't ascend is then put in order by itself.
    Not through a memory map: the kernel kills a process that writes into one on a full disk (SIGBUS).
    """
    size, kind = parts[0].strides[0], parts[0].dtype
    windows = windows_of(order, max(1, WINDOW // size))
    window_of = np.empty(len(order), np.uint16)
    for number, window in enumerate(windows):
        window_of[window] = number
    shape = (len(order), parts[0].shape[1])
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    with path.open("w+b") as file:
        np.lib.format.write_array_header_1_0(file, about)
        starts = file.tell() + size * np.cumsum([0, *map(len, windows)])
        ends, done = starts.copy(), 0
        for block in blocks_of(parts, rows):
            numbers = window_of[done : (done := done + len(block))]
            by_window = np.argsort(numbers, kind="stable")
            for here in np.split(by_window, np.flatnonzero(np.diff(numbers[by_window])) + 1):
                file.seek(ends[numbers[here[0]]])
                ends[numbers[here[0]]] += file.write(block[here].data)
        for start, window in zip(starts, windows, strict=False):
            if (window[1:] < window[:-1]).any():
                file.seek(start)
                put_in_order(file, np.empty((len(window), shape[1]), kind), np.argsort(np.argsort(window)))


def tokenize_parts(params: Tokenize, parts: list[Path], longest: int, work: Path, out: Path) -> list[dict]:
    """The results of `tokenize_part` for all parts, after the runs of words in held-out documents are known."""
    work.mkdir(exist_ok=True)
    over_parts(find_runs, [(part, params.heldout_fraction, longest, work) for part in parts], work / "held", "hold out")
    runs = [np.load(work / f"{part.stem}.{HELD_RUNS}") for part in parts]
    np.save(work / HELD_RUNS, np.unique(np.concatenate(runs)))
    jobs = [(part, out, params, longest, work) for part in parts]
    return over_parts(tokenize_part, jobs, work / "done", "tokenize")


@stage(version=VERSION, resumes=True)
def tokenize(params: Tokenize, corpus: Artifact, words: Artifact, out: Path) -> dict:
    """Write the training and the held-out sequences; count tokens, and those lost at the ends of parts."""
    copy_tokenizer(words.path, out, params.length)
    parts, work = parts_of(corpus), out / WORK
    longest = max(SHORT, math.ceil(max(LARGE, params.heldout_fraction) * corpus.stats["characters"]))
    results = tokenize_parts(params, parts, longest, work, out)
    counts = {name: sum(r["counts"][name] for r in results) for name in results[0]["counts"]}
    unknown = sum((Counter(r["unknown_words"]) for r in results), Counter())
    unknown = dict(sorted(unknown.items(), key=lambda item: (-item[1], item[0]))[:UNKNOWN_OF_A_PART])
    tokenizer = load_tokenizer(out)
    encoded = [np.load(work / f"{part.stem}.npy", mmap_mode="r") for part in parts]
    if not (sequences := sum(map(len, encoded))):
        raise InputError(
            f"The corpus gives {counted(counts['tokens'], 'token')}, less than one sequence of {params.length}. "
            "Give more text (download), or a looser filter."
        )
    rows = kept_rows(sequences, params)
    write_sequences(out / SEQUENCES, encoded, rows, order_of(encoded, rows, params, tokenizer))
    held = hold_out([part.stem for part in parts], work, params, counts["characters"], out)
    everything = counts["tokens"] + held["tokens"]
    warn_of_unknown(unknown, counts["unknown"] / max(1, everything))
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": len(rows) * params.length,
        "sequences": len(rows),
        "drawn_from": {"tokens": counts["tokens"], "sequences": sequences},
        "tokens_lost_at_part_ends": counts["lost"],
        "unknown_tokens": counts["unknown"],
        "unknown_words": dict(list(unknown.items())[:SHOWN_WORDS]),
        "characters_per_token": round((counts["characters"] + held["characters"]) / max(1, everything), 4),
        "entries": tokenizer.get_vocab_size(),
        "heldout": held,
    }
