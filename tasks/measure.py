"""Measure: how well a WordPiece vocabulary, and zstd, compress each document; `filter` drops documents by these ratios.

Reads   the parts of a corpus.
Writes  measured-00000.parquet …  of each document: id, source, characters, how many of them the normaliser deletes
                                  (removed), tokens, both ratios, the main script (for Unicode only); in the part's
                                  row groups
        tokenizer.json            the vocabulary it measured with, trained on a fixed sample of its input; or that of
                                  the public model from which a recipe starts
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
from tasks import adopt
from tasks.corpus.parts import TOTAL, Tally, add_up, count, parts_of, row_name, tables, views
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.text.encoder import encoder_of
from tasks.text.scripts import count_deleted, main_scripts
from tasks.text.tokenizer import FILES, copy_files, load_tokenizer, save_tokenizer
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
    start: str = Field(
        "",
        description="A model whose vocabulary to measure with; that of pretrain.start if it is a public one.",
    )
    later = ("max_removed", "normaliser", "start")

    def identity(self) -> dict:
        """As for all params; in `normaliser`, the field punctuation was added later too."""
        about = super().identity()
        if self.normaliser.punctuation == "raw":
            about.get("normaliser", {}).pop("punctuation", None)
        if self.start:
            about["start"] = adopt.digest_of_files(self.start, FILES[0])
        return about


def name_of(part: Path) -> str:
    """The name of the file with the measures of a part."""
    return part.name.replace("part", "measured")


class PartMeasures:
    """What is measured of the documents of a part, and the sums."""

    def __init__(self, tokenizer_folder: Path) -> None:
        self.encoder = encoder_of(tokenizer_folder)
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.documents = Tally()
        self.tokens = 0
        self.removed = Tally()
        self.removed_by_script: Counter[str] = Counter()

    def measure(self, table: pa.Table) -> pa.Table:
        """The measures of some documents, MEASURES; they are added to the sums."""
        texts = table["text"].to_pylist()
        characters = pc.utf8_length(table["text"])
        tokens = self.encoder.tokens(texts)
        removed = self._count_removed(table, texts)
        left = characters.to_numpy() - removed
        scripts: list[str] | list[None] = [None] * len(texts)
        if self.encoder.how.characters != "ascii":
            scripts = main_scripts(texts)
        self.tokens += int(tokens.sum())
        count(self.documents, table, characters)
        columns = {
            "id": table["id"],
            "source": table["source"],
            "characters": characters,
            "removed": removed,
            "tokens": tokens,
            "tokens_per_char": tokens / np.maximum(left, 1),
            "zstd_ratio": [len(self.compressor.compress(view)) / len(view) for view in views(table["text"])],
            "script": scripts,
        }
        return pa.table(columns, schema=MEASURES)

    def _count_removed(self, table: pa.Table, texts: list[str]) -> np.ndarray:
        """(documents,) the characters that the normaliser deletes."""
        kinds, counts = count_deleted(texts, self.encoder.how)
        for kind, number in zip(kinds, counts.sum(axis=1).tolist(), strict=True):
            self.removed_by_script[kind] += number
        removed = counts.sum(axis=0)
        some = removed > 0
        count(self.removed, table.filter(pa.array(some)), pa.chunked_array([removed[some]]))
        return removed

    def result(self) -> dict:
        """The sums, as JSON."""
        return {
            "counts": self.documents.counts(),
            "tokens": self.tokens,
            "removed": self.removed.counts(),
            "by_script": self.removed_by_script,
        }


def measure_part(part: Path, tokenizer_folder: Path, out: Path) -> dict:
    """Write the measures of a part's documents; return the numbers of documents, characters and tokens."""
    measures = PartMeasures(tokenizer_folder)
    with pq.ParquetWriter(out / name_of(part), MEASURES, compression="zstd") as file:
        for table in tables(part):
            file.write_table(measures.measure(table))
    return measures.result()


def sum_removed(results: list[dict], characters: int) -> dict:
    """The characters that the normaliser deletes, and their documents, by source; as a share of all; and by script."""
    removed = add_up([r["removed"] for r in results])
    by_script: Counter[str] = Counter()
    for result in results:
        by_script += Counter(result["by_script"])
    removed["share"] = round(removed["characters"] / max(1, characters), 6)
    removed["by_script"] = dict(sorted(by_script.items(), key=lambda item: (-item[1], item[0])))
    return removed


def check_removed(removed: dict, params: Measure) -> None:
    """Log how many characters are deleted. Raises InputError if they are more than the allowed fraction."""
    if not removed["characters"]:
        return
    most = list(removed["by_script"].items())[:5]
    shown = ", ".join(f"{number / removed['characters']:.0%} {name}" for name, number in most)
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
        f"{removed['characters']:,} ({shown}). {helps} raise measure.max_removed, now {params.max_removed:.1%}, with "
        "which all is measured again."
    )


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Some quantiles of a measure."""
    found = np.quantile(values, QUANTILES)
    return {f"{q:.0%}": round(float(value), 4) for q, value in zip(QUANTILES, found, strict=True)}


def quantiles_by_source(files: list[Path]) -> dict[str, dict[str, dict[str, float]]]:
    """The quantiles of each ratio, of all documents and of those of each source, from files with measures."""
    # a dictionary, since all sources as plain text can be more than Arrow joins
    measures = pq.read_table(files, columns=["source", *RATIOS], read_dictionary=["source"])
    sources = measures["source"].unify_dictionaries().combine_chunks()
    names = sources.dictionary.to_pylist()
    numbers = sources.indices.to_numpy()
    spread = {}
    for ratio in RATIOS:
        values = measures[ratio].to_numpy()
        spread[ratio] = {TOTAL: quantiles(values)}
        for name in sorted(names):
            spread[ratio][row_name(name)] = quantiles(values[numbers == names.index(name)])
    return spread


def sources_table(counts: dict, removed: dict, spread: dict[str, dict[str, dict[str, float]]]) -> list[dict]:
    """The statistics as a table: a row for all sources, then one for each."""
    table = []
    for source in (None, *counts["by_source"]):
        of_source = counts if source is None else counts["by_source"][source]
        gone = removed if source is None else removed["by_source"].get(source, {"characters": 0})
        name = TOTAL if source is None else row_name(source)
        row = {"source": name, "documents": of_source["documents"], "characters": of_source["characters"]}
        row["removed"] = gone["characters"]
        for ratio in RATIOS:
            for quantile in SHOWN:
                row[f"{ratio}, {quantile}"] = spread[ratio][name][quantile]
        table.append(row)
    return table


@stage(version=3, resumes=True)
def measure(params: Measure, corpus: Artifact, out: Path) -> dict:
    """Train the measuring vocabulary, and measure every document."""
    if not corpus.stats["documents"]:
        raise InputError(
            "No document is left to measure: the earlier stages dropped all of them. Loosen the settings of "
            "deduplicate and decontaminate, divide large documents (download.documents_by), or add more text."
        )
    if params.start:
        copy_files(adopt.find_model(params.start).path, out)
    elif not (out / "tokenizer_config.json").exists():  # written last, so a rerun knows that it is complete
        counts, _ = count_sample(
            corpus, params.sample_megabytes, out / WORK, "count words of a sample", params.normaliser
        )
        save_tokenizer(train_wordpiece(counts, params.vocabulary_entries, params.normaliser), out)
    jobs = [(part, out, out) for part in parts_of(corpus)]
    results = over_parts(measure_part, jobs, out / WORK / "measured", "measure")

    documents = add_up([r["counts"] for r in results])
    removed = sum_removed(results, documents["characters"])
    check_removed(removed, params)
    spread = quantiles_by_source(sorted(out.glob("measured-*.parquet")))
    return {
        "parts": len(jobs),
        **documents,
        "tokens": sum(r["tokens"] for r in results),
        "removed": removed,
        "vocabulary_entries": load_tokenizer(out).get_vocab_size(),
        "quantiles": spread,
        "table": sources_table(documents, removed, spread),
    }
