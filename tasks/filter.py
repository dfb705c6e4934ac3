"""Filter: drop documents that a WordPiece vocabulary compresses poorly (section 4.4 of the paper).

Reads   the parts of a corpus.
Writes  part-00000.parquet …      the documents kept, in order
        measured-00000.parquet …  id, source, characters, tokens, both ratios and the verdict of every document
        tokenizer.json            the vocabulary it measured with, trained on a fixed sample of its input
        sources.parquet           the table of the statistics, a row a source
        histogram.png, dropped.jsonl (samples of what was dropped, by source and reason)
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard
from pydantic import Field, model_validator

from model import InputError
from tasks import plots
from tasks.corpus import SCHEMA, Tally, add_up, batches, parts, table
from tasks.parallel import over_parts
from tasks.stage import WORK, Artifact, Params, stage
from tasks.vocabulary import count, encoder_of, load, save, share, train

ZSTD_LEVEL = 3
RATIOS = ("tokens_per_char", "zstd_ratio")
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SAMPLES, SAMPLE_CHARACTERS = 3, 400  # of each source and reason
MEASURES = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("characters", pa.int64()),
        ("tokens", pa.int64()),
        ("tokens_per_char", pa.float32()),
        ("zstd_ratio", pa.float32()),
        ("verdict", pa.string()),
    ]
)


class Filter(Params):
    """Which documents are dropped. A measure that is null is only recorded."""

    max_tokens_per_char: float | None = Field(
        0.3,
        gt=0,
        le=100,
        description="Documents with this many tokens a character, or more, are dropped (t in the paper).",
    )
    max_zstd_ratio: float | None = Field(
        None, gt=0, le=100, description="The same of bytes after compression with zstd over bytes before."
    )
    min_characters: int = Field(0, ge=0, description="Shorter documents are dropped.")
    max_characters: int | None = Field(None, gt=0, description="Longer documents are dropped.")
    vocabulary_entries: int = Field(
        32_768, ge=256, le=65_536, description="Of the measuring vocabulary; fewer where the text gives fewer."
    )
    sample_megabytes: float = Field(100, gt=0, description="Text to train that vocabulary on, 10^6 characters.")

    @model_validator(mode="after")
    def _some_length_is_allowed(self) -> "Filter":
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(f"max_characters {self.max_characters} is less than min_characters {self.min_characters}")
        return self


def reasons(params: Filter) -> list[str]:
    """Why a document can be dropped with these params, in the order in which they are looked at."""
    asked = {
        "too short": params.min_characters,
        "too long": params.max_characters,
        "no tokens": True,  # nothing is left of it once accents and all but ASCII are gone
        "incompressible": params.max_tokens_per_char,
        "incompressible by zstd": params.max_zstd_ratio,
    }
    return [reason for reason, limit in asked.items() if limit]


def verdict(characters: int, tokens: int, zstd_ratio: float, params: Filter) -> str:
    """`kept`, or the first reason why a document is dropped."""
    if characters < params.min_characters:
        return "too short"
    if params.max_characters and characters > params.max_characters:
        return "too long"
    if tokens == 0:
        return "no tokens"
    if params.max_tokens_per_char and tokens / characters >= params.max_tokens_per_char:
        return "incompressible"
    if params.max_zstd_ratio and zstd_ratio >= params.max_zstd_ratio:
        return "incompressible by zstd"
    return "kept"


def filter_part(part: Path, tokenizer_folder: Path, params: Filter, out: Path) -> dict:
    """Measure the documents of a part, write those kept and all measurements, and return counts and samples."""
    encoder, compressor = encoder_of(tokenizer_folder), zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    tallies = {name: Tally() for name in ("kept", *reasons(params))}
    samples: dict[tuple[str, str], list] = {}
    tokens_kept = 0
    kept_file = pq.ParquetWriter(out / part.name, SCHEMA, compression="zstd")
    measured_file = pq.ParquetWriter(out / part.name.replace("part", "measured"), MEASURES, compression="zstd")
    with kept_file, measured_file:
        for batch in filter(None, batches(part)):
            kept, measured = [], []
            for document, tokens in zip(batch, encoder.tokens([d.text for d in batch]).tolist(), strict=True):
                raw, characters = document.text.encode(errors="surrogatepass"), len(document.text)
                ratios = tokens / characters, len(compressor.compress(raw)) / len(raw)
                ruling = verdict(characters, tokens, ratios[1], params)
                tallies[ruling].add(document)
                measured.append((document.id, document.source, characters, tokens, *ratios, ruling))
                if ruling == "kept":
                    kept.append(document)
                    tokens_kept += tokens
                else:
                    found = samples.setdefault((document.source, ruling), [])
                    found.append((share(document.text), document.id, *ratios, document.text[:SAMPLE_CHARACTERS]))
                    samples[document.source, ruling] = sorted(found)[:SAMPLES]
            columns = zip(*measured, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, MEASURES, strict=True)]
            measured_file.write_table(pa.table(arrays, schema=MEASURES))
            if kept:
                kept_file.write_table(table(kept))
    return {
        "counts": {name: tally.counts() for name, tally in tallies.items()},
        "tokens": tokens_kept,
        "samples": [[*name, *sample] for name, found in samples.items() for sample in found],
    }


def quantiles(sources: np.ndarray, names: list[str], values: np.ndarray) -> dict:
    """Quantiles of a measure, over all documents and by source, given as indices of its names."""

    def of(chosen: np.ndarray) -> dict:
        return {f"{q:.0%}": round(float(v), 4) for q, v in zip(QUANTILES, np.quantile(chosen, QUANTILES), strict=True)}

    by_name = sorted((name, index) for index, name in enumerate(names))
    return {"all": of(values), **{name: of(values[sources == index]) for name, index in by_name}}


def rows(seen: dict, kept: dict, dropped: dict, medians: dict) -> list[dict]:
    """The statistics as a table, a row a source, the sum first."""
    found = []
    for name in ("all", *seen["by_source"]):

        def of(counts: dict, what: str, name: str = name) -> int:
            return counts[what] if name == "all" else counts["by_source"].get(name, {}).get(what, 0)

        row = {"source": name, "documents": of(seen, "documents"), "kept": of(kept, "documents")}
        row |= {reason: of(counts, "documents") for reason, counts in dropped.items()}
        row |= {"characters": of(seen, "characters"), "characters kept": of(kept, "characters")}
        row["kept, % of documents"] = round(100 * row["kept"] / max(1, row["documents"]), 1)
        found.append(row | {f"median {measure}": values[name]["50%"] for measure, values in medians.items()})
    return found


def write_samples(results: list[dict], out: Path) -> None:
    """Write the few dropped documents of each source and reason whose digests are smallest."""
    taken: Counter = Counter()
    with (out / "dropped.jsonl").open("w", encoding="utf-8") as file:
        for source, reason, _, name, *ratios, text in sorted(s for r in results for s in r["samples"]):
            taken[source, reason] += 1
            if taken[source, reason] <= SAMPLES:
                measures = {measure: round(ratio, 4) for measure, ratio in zip(RATIOS, ratios, strict=True)}
                row = {"id": name, "source": source, "reason": reason, **measures, "text": text}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


@stage(version=2, resumes=True, name="filter")
def drop_incompressible(params: Filter, corpus: Artifact, out: Path) -> dict:
    """Drop documents with too many tokens a character; count and sample what was dropped, by source and reason."""
    if not corpus.stats["documents"]:
        raise InputError(
            "The filter has no document to look at: the stage before it dropped them all. Loosen its settings."
        )
    if not (out / "tokenizer_config.json").exists():  # written last, so a rerun knows that it is whole
        counts, _ = count(corpus, params.sample_megabytes, out / WORK, "count words of a sample")
        save(train(counts, params.vocabulary_entries), out)
    jobs = [(part, out, params, out) for part in parts(corpus)]
    results = over_parts(filter_part, jobs, out / WORK / "filtered", "filter")
    counts = {name: add_up([r["counts"][name] for r in results]) for name in results[0]["counts"]}
    kept, seen = counts.pop("kept"), add_up([c for r in results for c in r["counts"].values()])
    write_samples(results, out)
    names = ["source", "verdict"]  # few different ones, and as plain text more than Arrow joins
    measured = pq.read_table(sorted(out.glob("measured-*.parquet")), columns=[*names, *RATIOS], read_dictionary=names)
    columns = {name: measured[name].to_numpy() for name in RATIOS}
    sources = measured["source"].unify_dictionaries().combine_chunks()
    spread = {
        name: quantiles(sources.indices.to_numpy(), sources.dictionary.to_pylist(), columns[name]) for name in RATIOS
    }
    plots.ratio_histogram(
        columns["tokens_per_char"],
        pc.equal(measured["verdict"].cast(pa.string()), "kept").to_numpy(),
        params.max_tokens_per_char,
        out / "histogram.png",
    )
    entries, by_source = load(out).get_vocab_size(), rows(seen, kept, counts, spread)
    pq.write_table(pa.Table.from_pylist(by_source), out / "sources.parquet")
    return {
        "parts": len(jobs),
        **kept,
        "seen": seen,
        "dropped": counts,
        "quantiles": spread,
        "measured_with": {"vocabulary_entries": entries, "tokens_kept": sum(r["tokens"] for r in results)},
        "table": by_source,
    }
