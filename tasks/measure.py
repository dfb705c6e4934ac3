"""Measure: how well a WordPiece vocabulary, and zstd, compress each document; `filter` drops documents by these ratios.

Reads   the parts of a corpus.
Writes  measured-00000.parquet …  id, source, characters, tokens, both ratios of each document; the part's row groups
        tokenizer.json            the vocabulary it measured with, trained on a fixed sample of its input
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard
from pydantic import Field

from model import InputError
from tasks.corpus.parts import TOTAL, Tally, add_up, count, parts_of, row_name, tables, views
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.text.tokenizer import encoder_of, load_tokenizer, save_tokenizer
from tasks.vocabulary import count_sample, train_wordpiece
from tasks.workers.parts import over_parts

ZSTD_LEVEL = 3
RATIOS = ("tokens_per_char", "zstd_ratio")
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SHOWN = ("5%", "50%", "95%")  # in the table
MEASURES = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("characters", pa.int64()),
        ("tokens", pa.int64()),
        ("tokens_per_char", pa.float64()),  # a threshold is compared with all its digits
        ("zstd_ratio", pa.float64()),
    ]
)


class Measure(Params):
    """The measuring vocabulary. Any change measures all documents again; thresholds are parameters of the filter."""

    vocabulary_entries: int = Field(
        32_768, ge=256, le=65_536, description="Size of the measuring vocabulary; less if the text yields less."
    )
    sample_megabytes: float = Field(100, gt=0, description="Text to train that vocabulary on, 10^6 characters.")


def name_of(part: Path) -> str:
    """The name of the file with the measures of a part."""
    return part.name.replace("part", "measured")


def measure_part(part: Path, tokenizer_folder: Path, out: Path) -> dict:
    """Write the measures of a part's documents; return the numbers of documents, characters and tokens."""
    encoder, compressor = encoder_of(tokenizer_folder), zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    tally, total = Tally(), 0
    with pq.ParquetWriter(out / name_of(part), MEASURES, compression="zstd") as file:
        for table in tables(part):
            texts, characters = table["text"].to_pylist(), pc.utf8_length(table["text"])
            tokens = encoder.tokens(texts) if texts else np.zeros(0, dtype=np.int64)
            compressed = [len(compressor.compress(view)) / len(view) for view in views(table["text"])]
            columns = [table["id"], table["source"], characters, tokens, tokens / characters.to_numpy(), compressed]
            file.write_table(pa.table(columns, schema=MEASURES))
            count(tally, table, characters)
            total += int(tokens.sum())
    return {"counts": tally.counts(), "tokens": total}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Some quantiles of a measure."""
    return {f"{q:.0%}": round(float(v), 4) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}


@stage(version=1, resumes=True)
def measure(params: Measure, corpus: Artifact, out: Path) -> dict:
    """Train the measuring vocabulary, and measure every document."""
    if not corpus.stats["documents"]:
        raise InputError(
            "There is no document to measure: the stages before dropped all of them. Loosen the settings of "
            "deduplicate and decontaminate, or give more text (download)."
        )
    if not (out / "tokenizer_config.json").exists():  # written last, so a rerun knows that it is complete
        counts, _ = count_sample(corpus, params.sample_megabytes, out / WORK, "count words of a sample")
        save_tokenizer(train_wordpiece(counts, params.vocabulary_entries), out)
    jobs = [(part, out, out) for part in parts_of(corpus)]
    results = over_parts(measure_part, jobs, out / WORK / "measured", "measure")
    counts = add_up([r["counts"] for r in results])
    # a dictionary, since all sources as plain text can be more than Arrow joins
    files, columns = sorted(out.glob("measured-*.parquet")), ["source", *RATIOS]
    measured = pq.read_table(files, columns=columns, read_dictionary=["source"])
    sources = measured["source"].unify_dictionaries().combine_chunks()
    names, indices = sources.dictionary.to_pylist(), sources.indices.to_numpy()
    rows_of = {TOTAL: slice(None), **{row_name(name): indices == names.index(name) for name in sorted(names)}}
    spread = {
        ratio: {name: quantiles(measured[ratio].to_numpy()[own]) for name, own in rows_of.items()} for ratio in RATIOS
    }
    sizes = {TOTAL: counts, **{row_name(source): of for source, of in counts["by_source"].items()}}
    return {
        "parts": len(jobs),
        **counts,
        "tokens": sum(r["tokens"] for r in results),
        "vocabulary_entries": load_tokenizer(out).get_vocab_size(),
        "quantiles": spread,
        "table": [
            {"source": name, "documents": of["documents"], "characters": of["characters"]}
            | {f"{ratio}, {q}": spread[ratio][name][q] for ratio in RATIOS for q in SHOWN}
            for name, of in sizes.items()
        ],
    }
