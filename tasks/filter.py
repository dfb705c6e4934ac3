"""Filter: drop documents that a WordPiece vocabulary compresses poorly (section 4.4 of the paper), by their measures.

Reads   the parts of a corpus, and their measures.
Writes  part-00000.parquet …      the documents kept, in order
        measured-00000.parquet …  the measures of every document, and its verdict: `kept`, or why it was dropped
        sources.parquet           the statistics as a table with a row for each source
        histogram.png, dropped.jsonl (samples of what was dropped, by source and reason)
"""

import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from pydantic import Field, model_validator

from model.errors import InputError
from tasks.corpus.parts import TOTAL, Tally, add_up, count, parts_of, row_name, smallest_of_each, tables, views, writer
from tasks.measure import MEASURES, RATIOS, name_of
from tasks.reports import plots
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text.scripts import LATIN
from tasks.workers.jobs import over_parts

KEPT = "kept"
BY_SCRIPT = "by-script"
PAPER = 0.3  # tokens per character: the paper's limit, made for English
# Limits by the main script of a document; README.md says how they were measured. Chinese has none, since an ideograph
# is a token of its own, nor have scripts that were not measured.
SCRIPT_LIMITS = {LATIN: PAPER, "CYRILLIC": PAPER, "ARABIC": 0.35, "DEVANAGARI": 0.35, "KANA": 0.6}
SAMPLES, SAMPLE_CHARACTERS = 3, 400  # of each source and reason
MEASURED = MEASURES.append(pa.field("verdict", pa.string()))


class Filter(Params):
    """Which documents are dropped. A measure without a limit is only recorded."""

    max_tokens_per_char: Annotated[float, Field(gt=0, le=100)] | Literal["by-script"] | None = Field(
        PAPER,
        description="Documents with at least this many tokens per character are dropped (t in the paper). "
        "by-script: the limit goes by the main script of a document, from 0.3 for Latin letters to none for Chinese; "
        "the default if vocabulary.characters is unicode.",
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


def rules(params: Filter) -> dict[str, tuple[str, np.ufunc, float | str]]:
    """Why documents are dropped, in the order of checking: by reason, a measure, the comparison, and the limit."""
    every = {
        "too short": ("characters", np.less, params.min_characters or None),
        "too long": ("characters", np.greater, params.max_characters),
        "no tokens": ("tokens", np.equal, 0),  # the normaliser deletes all of the text
        "incompressible": ("tokens_per_char", np.greater_equal, params.max_tokens_per_char),
        "incompressible by zstd": ("zstd_ratio", np.greater_equal, params.max_zstd_ratio),
    }
    return {reason: rule for reason, rule in every.items() if rule[-1] is not None}


def by_script(measures: pa.Table) -> np.ndarray:
    """(documents,) the limit of tokens per character of each; infinite for none."""
    return np.array([SCRIPT_LIMITS.get(script or LATIN, np.inf) for script in measures["script"].to_pylist()])


def verdicts(measures: pa.Table, params: Filter) -> np.ndarray:
    """(documents,) `kept`, or the first reason why a document is dropped."""
    dropped = [
        compare(measures[name].to_numpy(), by_script(measures) if limit == BY_SCRIPT else limit)
        for name, compare, limit in rules(params).values()
    ]
    return np.select(dropped, list(rules(params)), KEPT)


def sampled(dropped: pa.Table) -> list[tuple]:
    """Samples of dropped documents: source, reason, digest, id, ratios, the beginning of the text."""
    digests = [xxhash.xxh3_64_intdigest(view) for view in views(dropped["text"])]
    kinds = (dropped[name].to_pylist() for name in ("source", "verdict"))
    chosen = smallest_of_each(zip(*kinds, digests, range(len(digests)), strict=True), 2, SAMPLES)
    rows = dropped.take([place for *_, place in chosen])
    columns = [rows[name].to_pylist() for name in ("id", *RATIOS)]
    begins = pc.utf8_slice_codeunits(rows["text"], 0, SAMPLE_CHARACTERS).to_pylist()
    return [(*kind, *others) for (*kind, _), *others in zip(chosen, *columns, begins, strict=True)]


def filter_part(part: Path, measures: Path, params: Filter, out: Path) -> dict:
    """Write the documents of a part that are kept, and every document's verdict; return samples of the others."""
    samples = []
    with (
        writer(out / part.name) as kept_file,
        pq.ParquetWriter(out / name_of(part), MEASURED, compression="zstd") as measured_file,
    ):
        for table, about in zip(tables(part), tables(measures, tuple(MEASURES.names)), strict=True):
            about = about.append_column(MEASURED.field("verdict"), pa.array(verdicts(about, params), pa.string()))
            measured_file.write_table(about)
            is_kept = pc.equal(about["verdict"], KEPT)
            if len(kept := table if pc.all(is_kept).as_py() else table.filter(is_kept)):
                kept_file.write_table(kept)
            if len(kept) < len(table):
                dropped = about.append_column("text", table["text"]).filter(pc.invert(is_kept))
                samples = smallest_of_each([*samples, *sampled(dropped)], 2, SAMPLES)
    return {"samples": samples}


def counts_of(measured: pa.Table, verdict: str) -> dict:
    """How many documents have this verdict, and their characters."""
    own, tally = measured.filter(pc.equal(measured["verdict"], verdict)), Tally()
    count(tally, own, own["characters"])
    return tally.counts()


def sources_table(seen: dict, kept: dict, dropped: dict, medians: dict) -> list[dict]:
    """The statistics as a table: a row for all sources, then one for each."""
    table, nothing = [], {"documents": 0, "characters": 0}
    for source in (None, *seen["by_source"]):
        every, own, *gone = (
            of if source is None else of["by_source"].get(source, nothing) for of in (seen, kept, *dropped.values())
        )
        name = TOTAL if source is None else row_name(source)
        row = {"source": name, "documents": every["documents"], "kept": own["documents"]}
        row |= {reason: of["documents"] for reason, of in zip(dropped, gone, strict=True)}
        row |= {"characters": every["characters"], "characters kept": own["characters"]}
        row["kept, % of documents"] = round(100 * own["documents"] / max(1, every["documents"]), 1)
        table.append(row | {f"median {ratio}": values[name]["50%"] for ratio, values in medians.items()})
    return table


@stage(version=3, resumes=True)
def filter(params: Filter, corpus: Artifact, measures: Artifact, out: Path) -> dict:
    """Drop documents with too many tokens per character; count and sample what was dropped, by source and reason."""
    if measures.manifest["inputs"] != {"corpus": corpus.name}:
        raise InputError(
            f"{measures.name} was not measured on {corpus.name}. Omit --use measure, or name the artifact that was."
        )
    jobs = [(part, measures.path / name_of(part), params, out) for part in parts_of(corpus)]
    results = over_parts(filter_part, jobs, out / WORK / "filtered", "filter")
    samples = [sample for result in results for sample in result["samples"]]
    with (out / "dropped.jsonl").open("w", encoding="utf-8") as file:
        for source, reason, _, name, *values, text in smallest_of_each(samples, 2, SAMPLES):
            shown = {ratio: round(value, 4) for ratio, value in zip(RATIOS, values, strict=True)}
            row = {"id": name, "source": source, "reason": reason, **shown, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    columns, files = ["source", "verdict", "characters", "tokens", "tokens_per_char"], sorted(out.glob("measured-*"))
    measured = pq.read_table(files, columns=columns, read_dictionary=columns[:2]).unify_dictionaries()
    kept, dropped = counts_of(measured, KEPT), {reason: counts_of(measured, reason) for reason in rules(params)}
    seen, is_kept = add_up([kept, *dropped.values()]), pc.equal(measured["verdict"], KEPT).to_numpy()
    ratios, limit = measured["tokens_per_char"].to_numpy(), params.max_tokens_per_char
    plots.ratio_histogram(ratios, is_kept, None if limit == BY_SCRIPT else limit, out / "histogram.png")
    about = measures.stats
    table = sources_table(seen, kept, dropped, about["quantiles"])
    pq.write_table(pa.Table.from_pylist(table), out / "sources.parquet")
    return {
        "parts": len(jobs),
        **kept,
        "seen": seen,
        "dropped": dropped,
        "quantiles": about["quantiles"],
        "measured_with": {
            "vocabulary_entries": about["vocabulary_entries"],
            "tokens_kept": int(measured["tokens"].to_numpy()[is_kept].sum()),
        },
        "table": table,
    }
