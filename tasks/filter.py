"""Filter: drop documents that a WordPiece vocabulary compresses poorly (section 4.4 of the paper), by their measures.

Reads   the parts of a corpus, and their measures.
Writes  part-00000.parquet …      the documents kept, in order
        measured-00000.parquet …  the measures of every document, and its verdict: `kept`, or why it was dropped
        sources.parquet           the statistics as a table with a row for each source
        histogram.png, dropped.jsonl (samples of what was dropped, by source and reason)
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

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
SAMPLES = 3  # of each source and reason
SAMPLE_CHARACTERS = 400
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


class Rule(NamedTuple):
    """Documents are dropped whose measure compares so with the limit."""

    measure: str
    compare: np.ufunc
    limit: float | Literal["by-script"]

    def drops(self, measures: pa.Table) -> np.ndarray:
        """(documents,) bool: which documents are dropped."""
        limit = script_limits(measures) if self.limit == BY_SCRIPT else self.limit
        return self.compare(measures[self.measure].to_numpy(), limit)


def rules(params: Filter) -> dict[str, Rule]:
    """Why documents are dropped, in the order of checking: a rule by reason."""
    found = {}
    if params.min_characters:
        found["too short"] = Rule("characters", np.less, params.min_characters)
    if params.max_characters is not None:
        found["too long"] = Rule("characters", np.greater, params.max_characters)
    found["no tokens"] = Rule("tokens", np.equal, 0)  # the normaliser deletes all of the text
    if params.max_tokens_per_char is not None:
        found["incompressible"] = Rule("tokens_per_char", np.greater_equal, params.max_tokens_per_char)
    if params.max_zstd_ratio is not None:
        found["incompressible by zstd"] = Rule("zstd_ratio", np.greater_equal, params.max_zstd_ratio)
    return found


def script_limits(measures: pa.Table) -> np.ndarray:
    """(documents,) the limit of tokens per character of each; infinite for none."""
    scripts = measures["script"].to_pylist()
    return np.array([SCRIPT_LIMITS.get(script or LATIN, np.inf) for script in scripts])


def verdicts(measures: pa.Table, params: Filter) -> np.ndarray:
    """(documents,) `kept`, or the first reason why a document is dropped."""
    reasons = rules(params)
    dropped = [rule.drops(measures) for rule in reasons.values()]
    return np.select(dropped, list(reasons), KEPT)


def take_samples(dropped: pa.Table) -> list[tuple]:
    """Samples of dropped documents: source, reason, digest, id, ratios, the beginning of the text."""
    digests = map(xxhash.xxh3_64_intdigest, views(dropped["text"]))
    sources = dropped["source"].to_pylist()
    reasons = dropped["verdict"].to_pylist()
    every = zip(sources, reasons, digests, range(len(dropped)), strict=True)
    chosen = smallest_of_each(every, 2, SAMPLES)
    rows = dropped.take([place for *_, place in chosen])
    columns = [rows[name].to_pylist() for name in ("id", *RATIOS)]
    begins = pc.utf8_slice_codeunits(rows["text"], 0, SAMPLE_CHARACTERS).to_pylist()
    samples = []
    for (source, reason, digest, _), *values in zip(chosen, *columns, begins, strict=True):
        samples.append((source, reason, digest, *values))
    return samples


def filter_part(part: Path, measures: Path, params: Filter, out: Path) -> dict:
    """Write the documents of a part that are kept, and every document's verdict; return samples of the others."""
    samples: list[Sequence] = []
    with (
        writer(out / part.name) as kept_file,
        pq.ParquetWriter(out / name_of(part), MEASURED, compression="zstd") as measured_file,
    ):
        for table, about in zip(tables(part), tables(measures, tuple(MEASURES.names)), strict=True):
            verdict = pa.array(verdicts(about, params), pa.string())
            measured = about.append_column(MEASURED.field("verdict"), verdict)
            measured_file.write_table(measured)
            is_kept = pc.equal(verdict, KEPT)
            kept = table
            if not pc.all(is_kept, min_count=0).as_py():
                kept = table.filter(is_kept)
                dropped = measured.append_column("text", table["text"]).filter(pc.invert(is_kept))
                samples = smallest_of_each([*samples, *take_samples(dropped)], 2, SAMPLES)
            if len(kept):
                kept_file.write_table(kept)
    return {"samples": samples}


def counts_of(measured: pa.Table, verdict: str) -> dict:
    """How many documents have this verdict, and their characters."""
    own = measured.filter(pc.equal(measured["verdict"], verdict))
    tally = Tally()
    count(tally, own, own["characters"])
    return tally.counts()


def of_source(counts: dict, source: str | None) -> dict:
    """The counts of a source; None: of all."""
    if source is None:
        return counts
    return counts["by_source"].get(source, {"documents": 0, "characters": 0})


def sources_table(seen: dict, kept: dict, dropped: dict, medians: dict) -> list[dict]:
    """The statistics as a table: a row for all sources, then one for each."""
    table = []
    for source in (None, *seen["by_source"]):
        name = TOTAL if source is None else row_name(source)
        every = of_source(seen, source)
        own = of_source(kept, source)
        row = {"source": name, "documents": every["documents"], "kept": own["documents"]}
        for reason, gone in dropped.items():
            row[reason] = of_source(gone, source)["documents"]
        row["characters"] = every["characters"]
        row["characters kept"] = own["characters"]
        row["kept, % of documents"] = round(100 * own["documents"] / max(1, every["documents"]), 1)
        for ratio, values in medians.items():
            row[f"median {ratio}"] = values[name]["50%"]
        table.append(row)
    return table


def write_samples(samples: Iterable[Sequence], out: Path) -> None:
    """Write a few of the dropped documents of each source and reason."""
    with out.open("w", encoding="utf-8") as file:
        for source, reason, _, name, *values, text in smallest_of_each(samples, 2, SAMPLES):
            shown = {ratio: round(value, 4) for ratio, value in zip(RATIOS, values, strict=True)}
            row = {"id": name, "source": source, "reason": reason, **shown, "text": text}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_verdicts(folder: Path) -> pa.Table:
    """The verdicts of all documents, and the measures that are summed or drawn."""
    files = sorted(folder.glob("measured-*"))
    columns = ["source", "verdict", "characters", "tokens", "tokens_per_char"]
    return pq.read_table(files, columns=columns, read_dictionary=["source", "verdict"]).unify_dictionaries()


def kept_in(measured: pa.Table) -> np.ndarray:
    """(documents,) bool: which documents are kept."""
    return pc.equal(measured["verdict"], KEPT).to_numpy()


def draw_histogram(measured: pa.Table, params: Filter, out: Path) -> None:
    """Draw the tokens per character of all documents, and their limit, unless it goes by the script."""
    limit = params.max_tokens_per_char
    shown = None if isinstance(limit, str) else limit
    plots.ratio_histogram(measured["tokens_per_char"].to_numpy(), kept_in(measured), shown, out)


def statistics(measured: pa.Table, params: Filter, measures: dict) -> dict:
    """The counts that the stage returns, except for its parts. `measures`: the statistics of `measure`."""
    kept = counts_of(measured, KEPT)
    dropped = {reason: counts_of(measured, reason) for reason in rules(params)}
    seen = add_up([kept, *dropped.values()])
    tokens = measured["tokens"].to_numpy()
    return {
        **kept,
        "seen": seen,
        "dropped": dropped,
        "quantiles": measures["quantiles"],
        "measured_with": {
            "vocabulary_entries": measures["vocabulary_entries"],
            "tokens_kept": int(tokens[kept_in(measured)].sum()),
        },
        "table": sources_table(seen, kept, dropped, measures["quantiles"]),
    }


@stage(version=3, resumes=True)
def filter(params: Filter, corpus: Artifact, measures: Artifact, out: Path) -> dict:
    """Drop documents with too many tokens per character; count and sample what was dropped, by source and reason."""
    if measures.manifest["inputs"] != {"corpus": corpus.name}:
        raise InputError(
            f"{measures.name} was not measured on {corpus.name}. Omit --use measure, or name the artifact that was."
        )
    jobs = [(part, measures.path / name_of(part), params, out) for part in parts_of(corpus)]
    results = over_parts(filter_part, jobs, out / WORK / "filtered", "filter")
    write_samples(chain.from_iterable(r["samples"] for r in results), out / "dropped.jsonl")

    measured = read_verdicts(out)
    draw_histogram(measured, params, out / "histogram.png")
    counts = statistics(measured, params, measures.stats)
    pq.write_table(pa.Table.from_pylist(counts["table"]), out / "sources.parquet")
    return {"parts": len(jobs), **counts}
