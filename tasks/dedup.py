"""Deduplicate: of documents with the same text, only the first is kept.

Reads   the parts of a corpus.
Writes  part-00000.parquet …, the same parts without the duplicates, in the same order.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow.parquet as pq
import xxhash
from pydantic import Field

from tasks.corpus import SCHEMA, Tally, add_up, batches, parts, table
from tasks.parallel import over_parts
from tasks.stage import WORK, Artifact, Params, stage


class Deduplicate(Params):
    """What counts as a duplicate."""

    method: Literal["exact", "none"] = Field("exact", description="exact: the same text, character by character.")


def digest_part(part: Path, out: Path) -> dict:
    """Write the 128-bit digests of a part's documents."""
    digests = [xxhash.xxh3_128_digest(d.text.encode(errors="surrogatepass")) for batch in batches(part) for d in batch]
    with out.open("wb") as file:
        np.save(file, np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2))
    return {"documents": len(digests)}


def keep_first(part: Path, keep: Path, out: Path) -> dict:
    """Write the documents of a part that `keep`, a file of booleans, marks."""
    kept, dropped, marks, row = Tally(), Tally(), np.load(keep), 0
    with pq.ParquetWriter(out, SCHEMA, compression="zstd") as file:
        for batch in batches(part):
            chosen = []
            for document in batch:
                (kept if marks[row] else dropped).add(document)
                if marks[row]:
                    chosen.append(document)
                row += 1
            if chosen:
                file.write_table(table(chosen))
    return {"kept": kept.counts(), "dropped": dropped.counts()}


def first_occurrences(digests: np.ndarray) -> np.ndarray:
    """Which rows of (n, 2) digests stand for the first time."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal digests stay in the order of the corpus
    ranked = digests[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    first = np.zeros(len(order), dtype=bool)
    first[order[new]] = True
    return first


@stage(version=1, resumes=True)
def deduplicate(params: Deduplicate, corpus: Artifact, out: Path) -> dict:
    """Drop documents whose text stood before, in the order of the corpus; count them by source."""
    found, work = parts(corpus), out / WORK
    work.mkdir(exist_ok=True)
    files = [work / f"{part.stem}.digests.npy" for part in found]
    counts = over_parts(digest_part, list(zip(found, files, strict=True)), work / "digested", "digest documents")
    digests = np.concatenate([np.load(file) for file in files])
    first = first_occurrences(digests) if params.method == "exact" else np.ones(len(digests), dtype=bool)
    ends = np.cumsum([result["documents"] for result in counts])[:-1]
    jobs = []
    for part, marks in zip(found, np.split(first, ends), strict=True):
        np.save(work / f"{part.stem}.keep.npy", marks)
        jobs.append((part, work / f"{part.stem}.keep.npy", out / part.name))
    results = over_parts(keep_first, jobs, work / "kept", "drop duplicates")
    kept, dropped = add_up([r["kept"] for r in results]), add_up([r["dropped"] for r in results])
    return {"parts": len(found), **kept, "dropped": {"duplicate": dropped}}
