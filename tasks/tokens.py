"""Tokenize: encode, pack to sequences of fixed length, hold some documents out, sort.

Reads   the parts of a corpus, and a vocabulary.
Writes  sequences.npy     (n, S) uint16, in the order of training
        heldout.npy       (m, S) uint16, of documents that are never trained on
        heldout.parquet   those documents (id, source, text)
        tokenizer.json, tokenizer_config.json
"""

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
from pydantic import Field

from model import InputError
from tasks import vocabulary
from tasks.corpus import SCHEMA, batches, parts, table
from tasks.parallel import over_parts
from tasks.stage import WORK, Artifact, Params, stage

BLOCK = 1 << 16  # sequences handled at once
SEQUENCES, HELDOUT, HELDOUT_TEXT = "sequences.npy", "heldout.npy", "heldout.parquet"


class Tokenize(Params):
    """How text becomes sequences."""

    length: int = Field(128, ge=16, le=2048, description="Tokens a sequence.")
    heldout_fraction: float = Field(0.0005, gt=0, lt=0.5, description="Of documents, never trained on.")
    sort: Literal["sentence-length", "unigram", "random", "none"] = Field(
        "sentence-length",
        description="sentence-length: sequences of short sentences first (most full stops, the released recipe); "
        "unigram: of likely words first (mean log-probability, the paper's text); random: in random order; none: as in the corpus.",
    )
    max_sequences: int = Field(
        85_000_000, ge=1, description="Keep at most so many, drawn evenly before sorting (the reference's limit)."
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Of that draw, and of the order where sort is random.")


def tokenize_part(part: Path, tokenizer_folder: Path, params: Tokenize, out: Path) -> dict:
    """Write the sequences of a part, the ids of its held-out documents, and these documents."""
    tokenizer = vocabulary.load(tokenizer_folder)
    end, train, held, held_documents = np.array([vocabulary.SEP], dtype=np.uint16), [], [], []
    counts = {"documents": 0, "characters": 0, "unknown": 0, "heldout_characters": 0}
    for batch in batches(part):
        for document, ids in zip(batch, vocabulary.encode(tokenizer, [d.text for d in batch]), strict=True):
            is_held = vocabulary.share(document.text) < params.heldout_fraction
            (held if is_held else train).extend((ids, end))
            counts["unknown"] += int((ids == vocabulary.UNK).sum())
            if is_held:
                held_documents.append(document)
                counts["heldout_characters"] += len(document.text)
            else:
                counts["documents"] += 1
                counts["characters"] += len(document.text)
    ids = np.concatenate(train) if train else end[:0]
    whole = len(ids) // params.length * params.length
    np.save(out / f"{part.stem}.npy", ids[:whole].reshape(-1, params.length))
    np.save(out / f"{part.stem}.held.npy", np.concatenate(held) if held else end[:0])
    pq.write_table(table(held_documents), out / f"{part.stem}.held.parquet", compression="zstd")
    return {**counts, "tokens": len(ids), "lost": len(ids) - whole, "heldout_documents": len(held_documents)}


def sentence_length(rows: np.ndarray, stop: int) -> np.ndarray:
    """What mean sentence length goes by, where all sequences are as long: S minus the full stops, small first."""
    return (rows.shape[1] - (rows == stop).sum(axis=1)).astype(np.uint16)


def order_of(sequences: np.ndarray, sort: str, stop: int, entries: int, seed: int = 0) -> np.ndarray:
    """In which order to write the sequences; ties stay in the order of the corpus."""
    blocks = [sequences[start : start + BLOCK] for start in range(0, len(sequences), BLOCK)]
    if sort == "none":
        return np.arange(len(sequences))
    if sort == "random":
        return np.random.default_rng(seed).permutation(len(sequences))
    if sort == "sentence-length":
        return np.argsort(np.concatenate([sentence_length(block, stop) for block in blocks]), kind="stable")
    counts = sum(np.bincount(block.ravel(), minlength=entries) for block in blocks)
    surprise = -np.log((counts + 1) / (counts.sum() + entries))  # add-one smoothing
    exact = np.rint(surprise * 2**40).astype(
        np.int64
    )  # whole numbers: the sum doesn't depend on the order of the tokens
    return np.argsort(np.concatenate([exact[block].sum(axis=1) for block in blocks]), kind="stable")


def write_rows(path: Path, sequences: np.ndarray, order: np.ndarray) -> None:
    """Write the sequences in an order, a block at a time."""
    out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(len(order), sequences.shape[1]))
    for start in range(0, len(order), BLOCK):
        out[start : start + BLOCK] = sequences[order[start : start + BLOCK]]
    out.flush()


def gather(files: list[Path], length: int, path: Path) -> np.ndarray:
    """The sequences of all parts, one after the other, memory-mapped."""
    arrays = [np.load(file, mmap_mode="r") for file in files]
    joined = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(sum(map(len, arrays)), length))
    start = 0
    for array in arrays:
        joined[start : start + len(array)] = array
        start += len(array)
    return joined


@stage(version=1, resumes=True)
def tokenize(params: Tokenize, corpus: Artifact, words: Artifact, out: Path) -> dict:
    """Write the training and the held-out sequences; count tokens, and those lost at the ends of parts."""
    vocabulary.copy(words.path, out, params.length)
    found, work = parts(corpus), out / WORK
    work.mkdir(exist_ok=True)
    jobs = [(part, out, params, work) for part in found]
    results = over_parts(tokenize_part, jobs, work / "done", "tokenize")
    counts = {name: sum(r[name] for r in results) for name in results[0]}
    tokenizer = vocabulary.load(out)
    joined = gather([work / f"{part.stem}.npy" for part in found], params.length, work / "joined.npy")
    if not len(joined):
        raise InputError(
            f"The corpus gives {counts['tokens']:,} tokens, less than one sequence of {params.length}. Give more text "
            "(download), or a looser filter."
        )
    kept = joined
    if len(joined) > params.max_sequences:
        draw = np.random.default_rng(params.seed).choice(
            len(joined), params.max_sequences, replace=False, shuffle=False
        )
        write_rows(work / "drawn.npy", joined, np.sort(draw))
        kept = np.load(work / "drawn.npy", mmap_mode="r")
    order = order_of(kept, params.sort, tokenizer.token_to_id("."), tokenizer.get_vocab_size(), params.seed)
    write_rows(out / SEQUENCES, kept, order)
    held = np.concatenate([np.load(work / f"{part.stem}.held.npy") for part in found])
    held_sequences = held[: len(held) // params.length * params.length].reshape(-1, params.length)
    np.save(out / HELDOUT, held_sequences)
    with pq.ParquetWriter(out / HELDOUT_TEXT, SCHEMA, compression="zstd") as file:
        for part in found:
            file.write_table(pq.read_table(work / f"{part.stem}.held.parquet", schema=SCHEMA))
    every = counts["tokens"] + len(held)
    return {
        "documents": counts["documents"],
        "characters": counts["characters"],
        "tokens": int(kept.size),
        "sequences": len(kept),
        "drawn_from": {"tokens": counts["tokens"], "sequences": len(joined)},
        "tokens_lost_at_part_ends": counts["lost"],
        "unknown_tokens": counts["unknown"],
        "characters_per_token": round((counts["characters"] + counts["heldout_characters"]) / max(1, every), 4),
        "entries": tokenizer.get_vocab_size(),
        "heldout": {
            "documents": counts["heldout_documents"],
            "characters": counts["heldout_characters"],
            "tokens": len(held),
            "sequences": len(held_sequences),
        },
    }
