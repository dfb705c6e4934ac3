"""Filter: drop documents that a WordPiece vocabulary compresses poorly (section 4.4 of the paper).

Reads   the parts of a corpus, and their measures.
Writes  part-00000.parquet …      the documents kept, in order
        measured-00000.parquet …  the measures of every document, and its verdict: `kept`, or why it was dropped
        sources.parquet           the table of the statistics, a row a source
        histogram.png, dropped.jsonl (samples of what was dropped, by source and reason)
"""

import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, model_validator

from model import InputError
from tasks.corpus.parts import TOTAL, Tally, add_up, count, parts_of, row_name, tables, views, writer
from tasks.measure import MEASURES, RATIOS, name_of
from tasks.reports import plots
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.workers.mapping import over_parts

KEPT = "kept"
SAMPLES, SAMPLE_CHARACTERS = 3, 400  # of each source and reason
MEASURED = MEASURES.append(pa.field("verdict", pa.string()))


class Filter(Params):
    """Which documents are dropped. A measure that is null is only recorded."""

    max_tokens_per_char: float | None = Field(
        0.3,
        gt=0,
        le=100,
        description="Documents with this many tokens a character, or more, are dropped (t in the paper).",
    )
    max_zstd_ratio: float | None = Field(
        None,
        gt=0,
        le=100,
        description="Documents whose zstd-compressed size, as a fraction of their size, is this or more are dropped.",
    )
    min_characters: int = Field(0, ge=0, description="Shorter documents are dropped.")
    max_characters: int | None = Field(None, gt=0, description="Longer documents are dropped.")

    @model_validator(mode="after")
    def _some_length_is_allowed(self) -> "Filter":
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(f"max_characters {self.max_characters} is less than min_characters {self.min_characters}")
        return self


def reasons(params: Filter) -> list[str]:
    """Why a document can be dropped with these params, in the order in which they are checked."""
    asked = {
        "too short": params.min_characters,
        "too long": params.max_characters,
        "no tokens": True,  # nothing is left of it once accents and all but ASCII are gone
        "incompressible": params.max_tokens_per_char,
        "incompressible by zstd": params.max_zstd_ratio,
    }
    return [reason for reason, limit in asked.items() if limit]


def verdicts(measures: pa.Table, params: Filter) -> np.ndarray:
    """(documents,) `kept`, or the first reason why a document is dropped."""
    characters, tokens, *ratios = (measures[name].to_numpy() for name in ("characters", "tokens", *RATIOS))
    found = {
        "too short": characters < params.min_characters,
        "too long": characters > (params.max_characters or np.inf),
        "no tokens": tokens == 0,
        "incompressible": ratios[0] >= (params.max_tokens_per_char or np.inf),
        "incompressible by zstd": ratios[1] >= (params.max_zstd_ratio or np.inf),
    }
    return np.select(list(found.values()), list(found), KEPT)


def mismatch(part: Path, measures: Path) -> InputError:
    """The error for measures that are not those of a part."""
    names = ("/".join(path.parts[-3:]) for path in (measures, part))
    return InputError(
        "{} does not have the documents of {} in their order, so it was measured on another corpus. Leave --use measure "
        "out, or name the artifact that was measured on this corpus.".format(*names)
    )


def aligned(part: Path, measures: Path) -> Iterator[tuple[pa.Table, pa.Table]]:
    """The row groups of a part, each with the measures of its documents. Raises InputError where they are of others."""
    for table, about in zip_longest(tables(part), tables(measures, tuple(MEASURES.names))):
        if table is None or about is None or len(table) != len(about):
            raise mismatch(part, measures)
        same = pc.equal(table["id"], about["id"]), pc.equal(pc.utf8_length(table["text"]), about["characters"])
        if not all(pc.all(of_column, min_count=0).as_py() for of_column in same):
            raise mismatch(part, measures)
        yield table, about


def sampled(dropped: pa.Table) -> list[list]:
    """The few documents of each source and reason with the smallest digests: source, reason, digest, id, ratios, text."""
    digests = np.array([xxhash.xxh3_64_intdigest(view) for view in views(dropped["text"])], dtype=np.uint64)
    groups = [dropped[name].combine_chunks().dictionary_encode().indices.to_numpy() for name in ("source", "verdict")]
    order = np.lexsort((digests, *groups))
    ranked = np.stack(groups)[:, order]
    first = np.append(True, (ranked[:, 1:] != ranked[:, :-1]).any(axis=0))[: len(order)]
    places = np.arange(len(order))
    chosen = order[places - np.maximum.accumulate(np.where(first, places, 0)) < SAMPLES]
    rows = dropped.take(chosen)
    rows = rows.append_column("begins", pc.utf8_slice_codeunits(rows["text"], 0, SAMPLE_CHARACTERS))
    columns = (rows[name].to_pylist() for name in ("source", "verdict", "id", *RATIOS, "begins"))
    named = zip(*columns, digests[chosen].tolist(), strict=True)
    return [[source, reason, digest, *others] for source, reason, *others, digest in named]


def smallest(samples: list[list]) -> list[list]:
    """Of samples in the order of the corpus, the few of each source and reason whose digests are smallest."""
    found: dict[tuple[str, str], list] = {}
    for sample in sorted(samples, key=lambda sample: sample[:3]):
        of_kind = found.setdefault((sample[0], sample[1]), [])
        if len(of_kind) < SAMPLES:
            of_kind.append(sample)
    return [sample for of_kind in found.values() for sample in of_kind]


def filter_part(part: Path, measures: Path, params: Filter, out: Path) -> dict:
    """Write the documents of a part that are kept, and every document's verdict; return counts and samples."""
    tallies = {name: Tally() for name in (KEPT, *reasons(params))}
    samples, tokens = [], 0
    with (
        writer(out / part.name) as kept_file,
        pq.ParquetWriter(out / name_of(part), MEASURED, compression="zstd") as measured_file,
    ):
        for table, about in aligned(part, measures):
            ruling = verdicts(about, params)
            about = about.append_column(MEASURED.field("verdict"), pa.array(ruling, pa.string()))
            measured_file.write_table(about)
            for name, tally in tallies.items():
                of_kind = about.filter(pa.array(ruling == name))
                count(tally, of_kind, of_kind["characters"])
                tokens += pc.sum(of_kind["tokens"]).as_py() or 0 if name == KEPT else 0
            is_kept = pa.array(ruling == KEPT)
            if len(kept := table if pc.all(is_kept).as_py() else table.filter(is_kept)):
                kept_file.write_table(kept)
            if len(kept) < len(table):
                dropped = about.append_column("text", table["text"]).filter(pc.invert(is_kept))
                samples = smallest([*samples, *sampled(dropped)])
    return {"counts": {name: tally.counts() for name, tally in tallies.items()}, "tokens": tokens, "samples": samples}


def rows(seen: dict, kept: dict, dropped: dict, medians: dict) -> list[dict]:
    """The statistics as a table, a row a source, the total first."""
    found = []
    for source in (None, *seen["by_source"]):

        def of(counts: dict, what: str, source: str | None = source) -> int:
            return counts[what] if source is None else counts["by_source"].get(source, {}).get(what, 0)

        name = TOTAL if source is None else row_name(source)
        row = {"source": name, "documents": of(seen, "documents"), "kept": of(kept, "documents")}
        row |= {reason: of(counts, "documents") for reason, counts in dropped.items()}
        row |= {"characters": of(seen, "characters"), "characters kept": of(kept, "characters")}
        row["kept, % of documents"] = round(100 * row["kept"] / max(1, row["documents"]), 1)
        found.append(row | {f"median {measure}": values[name]["50%"] for measure, values in medians.items()})
    return found


def write_samples(samples: list[list], out: Path) -> None:
    """Write samples of the documents dropped."""
    with (out / "dropped.jsonl").open("w", encoding="utf-8") as file:
        for source, reason, _, name, *ratios, text in samples:
            measures = {measure: round(ratio, 4) for measure, ratio in zip(RATIOS, ratios, strict=True)}
            row = {"id": name, "source": source, "reason": reason, **measures, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


@stage(version=3, resumes=True, name="filter")
def drop_incompressible(params: Filter, corpus: Artifact, measures: Artifact, out: Path) -> dict:
    """Drop documents with too many tokens a character; count and sample what was dropped, by source and reason."""
    jobs = [(part, measures.path / name_of(part), params, out) for part in parts_of(corpus)]
    if missing := [job for job in jobs if not job[1].exists()]:
        raise mismatch(*missing[0][:2])
    results = over_parts(filter_part, jobs, out / WORK / "filtered", "filter")
    counts = {name: add_up([r["counts"][name] for r in results]) for name in (KEPT, *reasons(params))}
    kept, seen = counts.pop(KEPT), add_up([c for r in results for c in r["counts"].values()])
    write_samples(smallest([sample for r in results for sample in r["samples"]]), out)
    measured = pq.read_table(sorted(out.glob("measured-*.parquet")), columns=["tokens_per_char", "verdict"])
    plots.ratio_histogram(
        measured["tokens_per_char"].to_numpy(),
        pc.equal(measured["verdict"], KEPT).to_numpy(),
        params.max_tokens_per_char,
        out / "histogram.png",
    )
    about = measures.stats
    by_source = rows(seen, kept, counts, about["quantiles"])
    pq.write_table(pa.Table.from_pylist(by_source), out / "sources.parquet")
    return {
        "parts": len(jobs),
        **kept,
        "seen": seen,
        "dropped": counts,
        "quantiles": about["quantiles"],
        "measured_with": {
            "vocabulary_entries": about["vocabulary_entries"],
            "tokens_kept": sum(r["tokens"] for r in results),
        },
        "table": by_source,
    }
