"""Tokenize: encode, pack into sequences of fixed length, hold some documents out, sort.

Reads   the parts of a corpus, and a vocabulary.
Writes  sequences.npy     (n, S) uint16, in the order of training (uint32 for more than 65,536 entries)
        heldout.parquet   the documents that are never trained on: id, source, text, characters, bytes, tokens, and
                          their place among those that the held-out loss is measured on (measured; null for others)
        heldout.npz       the tokens of the measured documents, and of which word each is a piece (model.heldout)
        tokenizer.json, tokenizer_config.json
"""

import hashlib
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from tokenizers import Tokenizer

from model import InputError
from model.quantities import counted
from tasks.corpus.parts import SCHEMA, parts_of, tables, unit_hash
from tasks.stage import Params, stage
from tasks.store import HELDOUT_TEXT, SEQUENCES, WORK, Artifact
from tasks.text.encoding import encoder_of
from tasks.text.tokenizer import SEP, SPECIALS, UNK, WORD_START, copy_tokenizer, inner, load_tokenizer
from tasks.workers.mapping import over_parts

BLOCK = 1 << 16  # sequences handled at once
MOST_SEQUENCES = 85_000_000  # the release's limit
JOINED, DRAWN = "joined.npy", "drawn.npy"  # all sequences, and those drawn of them, in the order of the corpus
log = logging.getLogger(__name__)
MEASURED_CHARACTERS = 1_000_000  # of held-out text that the loss is measured on, or all if there is less
HELD_SCHEMA = pa.schema([*SCHEMA, *((name, pa.int64()) for name in ("characters", "bytes", "tokens"))])


class Tokenize(Params):
    """How text becomes sequences."""

    length: int = Field(128, ge=16, le=2048, description="Tokens per sequence.")
    heldout_fraction: float = Field(
        0.0005, gt=0, lt=0.5, description="Fraction of documents that are never trained on."
    )
    sort: Literal["sentence-length", "unigram", "word-length", "fragments", "random", "none"] = Field(
        "sentence-length",
        description="sentence-length: sequences of short sentences first (most full stops, the released recipe); "
        "unigram: of likely words first (mean log-probability, the paper's text); word-length: of short entries first; "
        "fragments: of many documents first; random: in random order; none: in the order of the corpus.",
    )
    descending: bool = Field(False, description="Reverse the order: long sentences, rare words … first.")
    max_sequences: int = Field(
        MOST_SEQUENCES,
        ge=1,
        description="Keep at most this many sequences, drawn at random before sorting. "
        "The default is the release's limit.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of that draw, and of the order if sort is random.")


def tokenize_part(part: Path, tokenizer_folder: Path, params: Tokenize, out: Path) -> dict:
    """Write the sequences of a part, and its held-out documents."""
    encoder = encoder_of(tokenizer_folder)
    nothing = np.zeros(0, encoder.type)
    train, documents = [nothing], [HELD_SCHEMA.empty_table()]
    counts = {"documents": 0, "characters": 0, "unknown": 0}
    for table in tables(part):
        texts, characters = table["text"].to_pylist(), pc.utf8_length(table["text"]).to_numpy()
        ids, ends = encoder(texts)
        is_held = np.array([unit_hash(text) < params.heldout_fraction for text in texts], dtype=bool)
        closed = np.insert(ids, ends, SEP)  # a separator after every document
        lengths = np.diff(ends, prepend=0)
        train.append(closed[~np.repeat(is_held, lengths + 1)])
        apart = table.filter(pa.array(is_held))
        sizes = (characters[is_held], pc.binary_length(apart["text"]), lengths[is_held])
        documents.append(pa.table([*apart.columns, *sizes], schema=HELD_SCHEMA))
        counts["unknown"] += int((ids == UNK).sum())
        counts["documents"] += int((~is_held).sum())
        counts["characters"] += int(characters[~is_held].sum())
    ids = np.concatenate(train)
    used = len(ids) // params.length * params.length
    np.save(out / f"{part.stem}.npy", ids[:used].reshape(-1, params.length))
    pq.write_table(pa.concat_tables(documents), out / f"{part.stem}.held.parquet", compression="zstd")
    return {**counts, "tokens": len(ids), "lost": len(ids) - used}


def measured(texts: Iterable[str], characters: int = MEASURED_CHARACTERS) -> np.ndarray:
    """The indices of the documents that the held-out loss is measured on, in the order of their digests.

    The last is the one that completes so many characters. So the choice depends on the texts alone: not on the
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


def hold_out(stems: list[str], work: Path, length: int, out: Path) -> dict:
    """Write the held-out documents of all parts, and the tokens of the measured ones; count both."""
    from tasks.text.original_words import heldout_of  # here, as it loads torch

    held = pa.concat_tables(pq.read_table(work / f"{stem}.held.parquet", schema=HELD_SCHEMA) for stem in stems)
    order = measured(text.as_py() for text in held["text"])
    places = np.full(len(held), -1, dtype=np.int64)
    places[order] = np.arange(len(order))
    column = pa.array(places, pa.int64(), mask=places < 0)
    pq.write_table(held.append_column("measured", column), out / HELDOUT_TEXT, compression="zstd")
    texts = [held["text"][place].as_py() for place in order]
    measured_text = heldout_of(texts, load_tokenizer(out), length)
    measured_text.save(out)
    return {
        "documents": len(held),
        "characters": pc.sum(held["characters"]).as_py() or 0,
        "tokens": (pc.sum(held["tokens"]).as_py() or 0) + len(held),
        "measured": {
            "documents": len(order),
            **measured_text.totals,
            "unknown_tokens": int((measured_text.sequences == UNK).sum()),
            "sequences": len(measured_text.sequences),
            "digest": digest_of(texts),
        },
    }


def keys_of(sequences: np.memmap, sort: str, tokenizer: Tokenizer) -> np.ndarray:
    """The sort keys of the sequences: integers, so that sums don't depend on their order."""
    entries, length = tokenizer.get_vocab_size(), sequences.shape[1]

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(sequences), BLOCK):
            yield sequences[start : start + BLOCK]
            release(sequences)

    if sort in ("sentence-length", "fragments"):
        # sequences have the same length, so the more marks, the shorter the sentences or documents
        stops = [place for entry, place in tokenizer.get_vocab().items() if entry in (".", f"{WORD_START}.")]
        marks = np.zeros(entries, dtype=bool)
        marks[stops if sort == "sentence-length" else SEP] = True
        return np.concatenate([(length - marks[block].sum(axis=1)).astype(np.uint16) for block in blocks()])
    if sort == "word-length":
        worth = np.zeros(entries, dtype=np.int64)
        for entry, place in tokenizer.get_vocab().items():
            worth[place] = 0 if entry in SPECIALS else len(inner(entry))
    else:
        counts = sum(np.bincount(block.ravel(), minlength=entries) for block in blocks())
        surprise = -np.log((counts + 1) / (counts.sum() + entries))  # add-one smoothing
        worth = np.rint(surprise * 2**40).astype(np.int64)
    return np.concatenate([worth[block].sum(axis=1) for block in blocks()])


def order_of(sequences: np.memmap, params: Tokenize, tokenizer: Tokenizer) -> np.ndarray:
    """The order in which to write the sequences; ties stay in the order of the corpus."""
    if params.sort == "random":
        order = np.random.default_rng(params.seed).permutation(len(sequences))
    elif params.sort == "none":
        order = np.arange(len(sequences))
    else:
        keys = keys_of(sequences, params.sort, tokenizer)
        return np.argsort(keys.max() - keys if params.descending else keys, kind="stable")
    return order[::-1] if params.descending else order


def release(array: np.memmap) -> None:
    """Drop the pages of a memory-mapped file from this process's memory; the system may still cache them."""
    array._mmap.madvise(mmap.MADV_DONTNEED)


def write_rows(path: Path, source: Path, order: np.ndarray) -> None:
    """Write the sequences of a file in this order, a block at a time.

    They are read one by one: in a memory map, each would load up to 2 MiB of the file around it.
    """
    mapped = np.load(source, mmap_mode="r")  # for its type and offset
    length, begin, size = mapped.shape[1], mapped.offset, mapped.itemsize * mapped.shape[1]

    def blocks() -> Iterator[np.ndarray]:
        with source.open("rb") as file:
            for start in range(0, len(order), BLOCK):
                places = begin + size * order[start : start + BLOCK].astype(np.int64)
                rows = b"".join([os.pread(file.fileno(), size, place) for place in places.tolist()])
                yield np.frombuffer(rows, mapped.dtype).reshape(-1, length)

    write_array(path, blocks(), (len(order), length), mapped.dtype)


def write_array(path: Path, blocks: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write a .npy file of this shape from its consecutive blocks. Raises OSError if the disk is full.

    Not through a memory map: the kernel kills a process that writes into one on a full disk (SIGBUS).
    """
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, about)
        for block in blocks:
            file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)


def gather(files: list[Path], length: int, path: Path) -> np.memmap:
    """The sequences of all parts, one after the other, memory-mapped."""
    arrays = [np.load(file, mmap_mode="r") for file in files]

    def blocks() -> Iterator[np.ndarray]:
        for array in arrays:
            yield array
            release(array)

    write_array(path, blocks(), (sum(map(len, arrays)), length), arrays[0].dtype)
    return np.load(path, mmap_mode="r")


@stage(version=4, resumes=True)
def tokenize(params: Tokenize, corpus: Artifact, words: Artifact, out: Path) -> dict:
    """Write the training and the held-out sequences; count tokens, and those lost at the ends of parts."""
    copy_tokenizer(words.path, out, params.length)
    parts, work = parts_of(corpus), out / WORK
    work.mkdir(exist_ok=True)
    jobs = [(part, out, params, work) for part in parts]
    results = over_parts(tokenize_part, jobs, work / "done", "tokenize")
    counts = {name: sum(r[name] for r in results) for name in results[0]}
    tokenizer = load_tokenizer(out)
    joined = gather([work / f"{part.stem}.npy" for part in parts], params.length, work / JOINED)
    if not len(joined):
        raise InputError(
            f"The corpus gives {counted(counts['tokens'], 'token')}, less than one sequence of {params.length}. "
            "Give more text (download), or a looser filter."
        )
    kept, file = joined, JOINED
    if len(joined) > params.max_sequences:
        rng = np.random.default_rng(params.seed)
        draw = rng.choice(len(joined), params.max_sequences, replace=False, shuffle=False)
        write_rows(work / DRAWN, work / JOINED, np.sort(draw))
        kept, file = np.load(work / DRAWN, mmap_mode="r"), DRAWN
    elif params.seed and params.sort != "random":
        log.warning(
            "tokenize.seed has no effect: all %d sequences are kept, in the order of %r. It applies to sort 'random' "
            "and to a smaller max_sequences.",
            len(joined), params.sort,
        )  # fmt: skip
    order = order_of(kept, params, tokenizer)
    write_rows(out / SEQUENCES, work / file, order)
    held = hold_out([part.stem for part in parts], work, params.length, out)
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": int(kept.size),
        "sequences": len(kept),
        "drawn_from": {"tokens": counts["tokens"], "sequences": len(joined)},
        "tokens_lost_at_part_ends": counts["lost"],
        "unknown_tokens": counts["unknown"],
        "characters_per_token": round(
            (counts["characters"] + held["characters"]) / max(1, counts["tokens"] + held["tokens"]), 4
        ),
        "entries": tokenizer.get_vocab_size(),
        "heldout": held,
    }
