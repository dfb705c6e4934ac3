"""Measure: how well a WordPiece vocabulary, and zstd, compress each document; `filter` drops documents by these ratios.

Reads   the parts of a corpus.
Writes  measured-00000.parquet …  of each document: id, source, characters, how many of them the normaliser deletes
                                  (removed), tokens, both ratios, the main script (for Unicode only); in the part's
                                  row groups
        tokenizer.json            the vocabulary it measured with, trained on a fixed sample of its input
"""

import logging
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import zstandard
from pydantic import Field

from model.errors import InputError
from tasks.corpus.parts import TOTAL, Tally, add_up, count, parts_of, row_name, tables, views
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text.scripts import deleted, main_scripts
from tasks.text.tokenizer import encoder_of, load_tokenizer, save_tokenizer
from tasks.text.words import ASCII, Normaliser
from tasks.vocabulary import count_sample, train_wordpiece
from tasks.workers.jobs import over_parts

ZSTD_LEVEL = 3
RATIOS = ("tokens_per_char", "zstd_ratio")
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
SHOWN = ("5%", "50%", "95%")  # in the table
MEASURES = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("characters", pa.int64()),
        ("removed", pa.int64()),
        ("tokens", pa.int64()),
        ("tokens_per_char", pa.float64()),  # of those that are left; a threshold is compared with all its digits
        ("zstd_ratio", pa.float64()),
        ("script", pa.string()),
    ]
)
log = logging.getLogger(__name__)


class Measure(Params):
    """The measuring vocabulary. Any change measures all documents again; thresholds are parameters of the filter."""

    vocabulary_entries: int = Field(
        32_768, ge=256, le=65_536, description="Size of the measuring vocabulary; less if the text yields less."
    )
    sample_megabytes: float = Field(100, gt=0, description="Text to train that vocabulary on, 10^6 characters.")
    max_removed: float = Field(
        0.05, ge=0, le=1, description="Largest fraction of all characters that the normaliser may delete."
    )
    normaliser: Normaliser = ASCII  # a recipe has that of the vocabulary here
    later = ("max_removed", "normaliser")

    def identity(self) -> dict:
        """Punctuation came later too."""
        about = super().identity()
        if self.normaliser.punctuation == "raw":
            about.get("normaliser", {}).pop("punctuation", None)
        return about


def name_of(part: Path) -> str:
    """The name of the file with the measures of a part."""
    return part.name.replace("part", "measured")


def measure_part(part: Path, tokenizer_folder: Path, out: Path) -> dict:
    """Write the measures of a part's documents; return the numbers of documents, characters and tokens."""
    encoder, compressor = encoder_of(tokenizer_folder), zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    tally, total, gone, by_script = Tally(), 0, Tally(), Counter()
    with pq.ParquetWriter(out / name_of(part), MEASURES, compression="zstd") as file:
        for table in tables(part):
            texts, characters = table["text"].to_pylist(), pc.utf8_length(table["text"])
            tokens = encoder.tokens(texts)
            compressed = [len(compressor.compress(view)) / len(view) for view in views(table["text"])]
            kinds, counts = deleted(texts, encoder.how)
            removed = counts.sum(axis=0)
            ratios = tokens / np.maximum(characters.to_numpy() - removed, 1)
            scripts = [None] * len(texts) if encoder.how.characters == "ascii" else main_scripts(texts)
            columns = [table["id"], table["source"], characters, removed, tokens, ratios, compressed, scripts]
            file.write_table(pa.table(columns, schema=MEASURES))
            count(tally, table, characters)
            total += int(tokens.sum())
            count(gone, table.filter(pa.array(removed > 0)), pa.chunked_array([removed[removed > 0]]))
            by_script.update(dict(zip(kinds, counts.sum(axis=1).tolist(), strict=True)))
    return {"counts": tally.counts(), "tokens": total, "removed": gone.counts(), "by_script": by_script}


def removed_of(results: list[dict], characters: int) -> dict:
    """The characters that the normaliser deletes, and their documents, by source; as a share of all; and by script."""
    removed, by_script = add_up([r["removed"] for r in results]), Counter()
    for result in results:
        by_script += Counter(result["by_script"])
    by_script = dict(sorted(by_script.items(), key=lambda item: (-item[1], item[0])))
    return removed | {"share": round(removed["characters"] / max(1, characters), 6), "by_script": by_script}


def check_removed(removed: dict, params: Measure) -> None:
    """Say how many characters are deleted. Raises InputError if they are more than the allowed fraction."""
    if not removed["characters"]:
        return
    shown = ", ".join(f"{n / removed['characters']:.0%} {name}" for name, n in list(removed["by_script"].items())[:5])
    if removed["share"] <= params.max_removed:
        log.info("The vocabulary doesn't read %.2g%% of the characters (%s).", 100 * removed["share"], shown)
        return
    helps = "Set vocabulary.characters to unicode, which reads any script; or"
    if params.normaliser.characters == "unicode":
        helps = "Clean the text; or"
    if params.normaliser.strip_accents:
        helps = "Set vocabulary.strip_accents to false, since it deletes vowel signs; or"
    raise InputError(
        f"The vocabulary would not read {removed['share']:.1%} of the characters of the text: its normaliser deletes "
        f"{removed['characters']:,} ({shown}). {helps} raise measure.max_removed, now {params.max_removed:.1%}."
    )


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Some quantiles of a measure."""
    return {f"{q:.0%}": round(float(v), 4) for q, v in zip(QUANTILES, np.quantile(values, QUANTILES), strict=True)}


@stage(version=2, resumes=True)
def measure(params: Measure, corpus: Artifact, out: Path) -> dict:
    """Train the measuring vocabulary, and measure every document."""
    if not corpus.stats["documents"]:
        raise InputError(
            "There is no document to measure: the stages before dropped all of them. Loosen the settings of "
            "deduplicate and decontaminate, divide large documents (download.documents_by), or give more text."
        )
    if not (out / "tokenizer_config.json").exists():  # written last, so a rerun knows that it is complete
        counts, _ = count_sample(
            corpus, params.sample_megabytes, out / WORK, "count words of a sample", params.normaliser
        )
        save_tokenizer(train_wordpiece(counts, params.vocabulary_entries, params.normaliser), out)
    jobs = [(part, out, out) for part in parts_of(corpus)]
    results = over_parts(measure_part, jobs, out / WORK / "measured", "measure")
    counts = add_up([r["counts"] for r in results])
    removed = removed_of(results, counts["characters"])
    check_removed(removed, params)
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
    gone = {TOTAL: removed} | {row_name(source): of for source, of in removed["by_source"].items()}
    return {
        "parts": len(jobs),
        **counts,
        "tokens": sum(r["tokens"] for r in results),
        "removed": removed,
        "vocabulary_entries": load_tokenizer(out).get_vocab_size(),
        "quantiles": spread,
        "table": [
            {"source": name, "documents": of["documents"], "characters": of["characters"]}
            | {"removed": gone[name]["characters"] if name in gone else 0}
            | {f"{ratio}, {q}": spread[ratio][name][q] for ratio in RATIOS for q in SHOWN}
            for name, of in sizes.items()
        ],
    }
