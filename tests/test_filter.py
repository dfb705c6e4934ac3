"""Filter: what is measured, what is dropped and why, against the saved tokenizer and numpy."""

import base64
import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import document, filtered, write_jsonl
from pydantic import ValidationError
from tokenizers import Tokenizer

from model import InputError
from tasks import filter as filter_module
from tasks import measure as measure_module
from tasks import store as store_module
from tasks.corpus import part_writer
from tasks.corpus.parts import batches, documents_of, parts_of, unit_hash
from tasks.download import Download, download
from tasks.filter import Filter, drop_incompressible, reasons, verdicts
from tasks.measure import MEASURES, Measure, measure
from tasks.reports.filter_diff import compare
from tasks.store import Artifact, artifacts

SMALL = Measure(vocabulary_entries=700)


def junk(rng: random.Random, kind: str) -> str:
    """Hex or base64 in lines, as it stands in real text."""
    data = rng.randbytes(600)
    text = data.hex() if kind == "hex" else base64.b64encode(data).decode()
    return "\n".join(text[i : i + 64] for i in range(0, len(text), 64))


@pytest.fixture(scope="module")
def texts() -> dict[str, list[str]]:
    rng = random.Random(13)
    return {
        "prose": [document(rng, rng.randint(3, 12)) for _ in range(200)],
        "hex": [junk(rng, "hex") for _ in range(10)],
        "base64": [junk(rng, "base64") for _ in range(10)],
        "foreign": [f"漢字かな交じり文 {'あいう' * i}。" for i in range(5)],
    }


@pytest.fixture
def folder(tmp_path: Path, texts: dict[str, list[str]]) -> Path:
    """All texts in one shard, in a mixed but fixed order."""
    (tmp_path / "data").mkdir()
    rows = [{"text": text, "source": source} for source, found in texts.items() for text in found]
    random.Random(1).shuffle(rows)
    (tmp_path / "data/mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "data"


def corpus_of(folder: Path, part_megabytes: float = 0.02) -> Artifact:
    return download.fn(Download(source="files", files=[str(folder)], documents=0, part_megabytes=part_megabytes))


@pytest.fixture
def corpus(store: Path, folder: Path) -> Artifact:
    return corpus_of(folder)


def measured(made: Artifact) -> dict[str, list]:
    return pq.read_table(sorted(made.path.glob("measured-*.parquet"))).to_pydict()


def test_junk_is_dropped_and_prose_is_kept(corpus: Artifact, texts: dict[str, list[str]]):
    made = filtered(corpus, 700)
    assert [d for d in documents_of(corpus) if d.source == "prose"] == list(documents_of(made))
    dropped = made.stats["dropped"]
    assert {s: c["documents"] for s, c in dropped["incompressible"]["by_source"].items()} == {"base64": 10, "hex": 10}
    assert {s: c["documents"] for s, c in dropped["no tokens"]["by_source"].items()} == {"foreign": 5}
    assert corpus.stats["parts"] == made.stats["parts"] == len(parts_of(made)) > 3


def test_kept_and_dropped_are_all_that_was_seen(corpus: Artifact):
    stats = filtered(corpus, 700).stats
    seen = stats["seen"]
    assert seen == {name: corpus.stats[name] for name in ("documents", "characters", "by_source")}
    outcomes = [stats, *stats["dropped"].values()]
    for what in ("documents", "characters"):
        assert sum(o[what] for o in outcomes) == seen[what]
        for source in seen["by_source"]:
            of_source = [o["by_source"].get(source, {}).get(what, 0) for o in outcomes]
            assert sum(of_source) == seen["by_source"][source][what]


def test_measures_are_those_of_the_saved_tokenizer_on_each_document_alone(corpus: Artifact):
    made = filtered(corpus, 700)
    tokenizer = Tokenizer.from_file(str(artifacts("measure")[-1].path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    rows, documents = measured(made), list(documents_of(corpus))
    assert rows["id"] == [d.id for d in documents]
    assert rows["source"] == [d.source for d in documents]
    assert rows["characters"] == [len(d.text) for d in documents]
    tokens = []
    for d in documents:
        ids = tokenizer.encode(d.text, add_special_tokens=False).ids
        tokens.append(len(ids) + (sum(map(len, re.findall(r"\w{101,}", d.text))) if 1 in ids else 0))
    assert rows["tokens"] == tokens
    ratios = np.array(tokens) / [len(d.text) for d in documents]
    assert rows["tokens_per_char"] == ratios.tolist()
    raw = [d.text.encode() for d in documents]
    compressed = [len(zstandard.ZstdCompressor(level=3).compress(r)) / len(r) for r in raw]
    assert rows["zstd_ratio"] == compressed
    expected = [
        "no tokens" if not t else "kept" if r < 0.3 else "incompressible" for t, r in zip(tokens, ratios, strict=True)
    ]
    assert rows["verdict"] == expected
    kept = sum(t for t, v in zip(tokens, expected, strict=True) if v == "kept")
    assert made.stats["measured_with"] == {"vocabulary_entries": tokenizer.get_vocab_size(), "tokens_kept": kept}


def test_a_measure_does_not_depend_on_the_part_or_batch_a_document_is_in(store: Path, folder: Path, monkeypatch):
    whole = filtered(corpus_of(folder, part_megabytes=1024), 700)
    monkeypatch.setattr(part_writer, "ROW_GROUP_CHARACTERS", 5_000)
    split = filtered(corpus_of(folder, part_megabytes=0.03), 700)
    assert (whole.stats["parts"], whole.stats["table"]) == (1, split.stats["table"])
    assert split.stats["parts"] > 2
    assert measured(whole) == measured(split)
    for file in ("dropped.jsonl", "histogram.png"):
        assert (whole.path / file).read_bytes() == (split.path / file).read_bytes(), file


def test_a_document_at_the_threshold_is_dropped(corpus: Artifact):
    made = filtered(corpus, 700)
    rows = measured(made)
    row = sorted(range(len(rows["id"])), key=lambda i: rows["tokens_per_char"][i])[100]
    ratio = rows["tokens"][row] / rows["characters"][row]
    at, above = (
        filtered(corpus, 700, max_tokens_per_char=float(threshold)) for threshold in (ratio, np.nextafter(ratio, 1))
    )
    assert measured(at)["verdict"][row] == "incompressible"
    assert measured(above)["verdict"][row] == "kept"
    assert measured(at)["tokens"] == rows["tokens"], "the threshold has no part in measuring"


def verdict(characters: int, tokens: int, zstd_ratio: float, params: Filter) -> str:
    row = [["a"], ["b"], [characters], [tokens], [tokens / max(1, characters)], [zstd_ratio]]
    [found] = verdicts(pa.table(row, schema=MEASURES), params)
    return found


@pytest.mark.parametrize(
    ("tokens", "characters", "expected"),
    [(2, 10, "kept"), (3, 10, "incompressible"), (4, 10, "incompressible"), (0, 10, "no tokens"), (0, 0, "no tokens")],
)
def test_the_verdict_follows_tokens_over_characters(tokens: int, characters: int, expected: str):
    assert verdict(characters, tokens, 9.0, Filter(max_tokens_per_char=0.3)) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_tokens_per_char": None}, "kept"),
        ({"max_tokens_per_char": None, "max_zstd_ratio": 0.6}, "kept"),
        ({"max_tokens_per_char": None, "max_zstd_ratio": 0.5}, "incompressible by zstd"),
        ({"max_tokens_per_char": 0.2, "max_zstd_ratio": 0.5}, "incompressible"),
        ({"min_characters": 10}, "kept"),
        ({"min_characters": 11}, "too short"),
        ({"max_characters": 10}, "kept"),
        ({"max_characters": 9, "max_zstd_ratio": 0.5}, "too long"),
    ],
)
def test_the_verdict_names_the_first_limit_that_is_passed(settings: dict, expected: str):
    params = Filter(**settings)
    assert verdict(10, 2, 0.5, params) == expected
    assert expected in ["kept", *reasons(params)]


def test_every_limit_is_counted_apart(corpus: Artifact):
    rows = measured(filtered(corpus, 700))
    settings = {"max_zstd_ratio": 0.75, "min_characters": 200, "max_characters": 1000, "max_tokens_per_char": 0.5}
    made = filtered(corpus, 700, **settings)
    found = Counter(measured(made)["verdict"])
    assert found == Counter(
        "too short" if c < 200 else "too long" if c > 1000 else "no tokens" if not t else
        "incompressible" if t / c >= 0.5 else "incompressible by zstd" if z >= 0.75 else "kept"
        for c, t, z in zip(rows["characters"], rows["tokens"], rows["zstd_ratio"], strict=True)
    )  # fmt: skip
    assert {name: c["documents"] for name, c in made.stats["dropped"].items()} == {
        name: found[name] for name in reasons(Filter(**settings))
    }
    assert min(found[name] for name in ("too short", "too long", "incompressible", "kept")) > 0
    table = pq.read_table(made.path / "sources.parquet").to_pylist()
    assert table == made.stats["table"]


def test_quantiles_are_those_of_numpy(corpus: Artifact):
    made = filtered(corpus, 700)
    rows = {name: np.array(values) for name, values in measured(made).items()}
    found = made.stats["quantiles"]
    for ratio in ("tokens_per_char", "zstd_ratio"):
        for source in ("all", "prose", "hex", "base64", "foreign"):
            chosen = rows[ratio][(rows["source"] == source) | (source == "all")]
            expected = {
                f"{p}%": pytest.approx(np.percentile(chosen, p), abs=5.1e-5) for p in (1, 5, 25, 50, 75, 95, 99)
            }
            assert found[ratio][source] == expected
        assert set(found[ratio]) == {"all", "prose", "hex", "base64", "foreign"}


def test_the_table_has_a_row_a_source_and_the_sum_first(corpus: Artifact):
    stats = filtered(corpus, 700).stats
    table = stats["table"]
    assert [row["source"] for row in table] == ["all", "prose", "base64", "hex", "foreign"]
    for what in ("documents", "kept", "incompressible", "no tokens", "characters", "characters kept"):
        assert table[0][what] == sum(row[what] for row in table[1:])
    by_source = {row["source"]: row for row in table}
    assert by_source["prose"]["kept, % of documents"] == 100.0
    assert by_source["hex"]["kept"] == by_source["hex"]["characters kept"] == 0
    assert by_source["hex"]["median tokens_per_char"] == stats["quantiles"]["tokens_per_char"]["hex"]["50%"] > 0.3


def test_samples_of_what_was_dropped_are_drawn_by_their_text(corpus: Artifact):
    made = filtered(corpus, 700)
    found = [json.loads(line) for line in (made.path / "dropped.jsonl").read_text(encoding="utf-8").splitlines()]
    why = {"hex": "incompressible", "base64": "incompressible", "foreign": "no tokens"}
    rows = measured(made)
    ratios = {
        i: (round(r, 4), round(z, 4))
        for i, r, z in zip(rows["id"], rows["tokens_per_char"], rows["zstd_ratio"], strict=True)
    }
    expected = []
    for source in sorted(why):
        documents = sorted((d for d in documents_of(corpus) if d.source == source), key=lambda d: unit_hash(d.text))[:3]
        expected += [(d.id, source, why[source], *ratios[d.id], d.text[:400]) for d in documents]
    assert [tuple(row.values()) for row in found] == expected
    assert list(found[0]) == ["id", "source", "reason", "tokens_per_char", "zstd_ratio", "text"]


def test_the_histogram_is_a_picture(corpus: Artifact):
    data = (filtered(corpus, 700).path / "histogram.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (770, 396)


@pytest.mark.parametrize("text", ["漢字", "\N{GRINNING FACE}", "\N{ZERO WIDTH SPACE} \N{COMBINING ACUTE ACCENT}\n¿"])
def test_a_document_of_which_nothing_is_left_is_dropped_for_that_reason(store: Path, tmp_path: Path, text: str):
    write_jsonl(tmp_path / "a.jsonl", [text])
    made = filtered(corpus_of(tmp_path / "a.jsonl"), 700)
    assert made.stats["documents"] == 0
    assert made.stats["dropped"]["no tokens"]["documents"] == made.stats["seen"]["documents"] == 1
    assert measured(made)["tokens"] == measured(made)["tokens_per_char"] == [0]
    assert made.stats["quantiles"]["tokens_per_char"]["all"]["50%"] == 0


def test_dropping_all_is_told_and_not_an_error(corpus: Artifact):
    made = filtered(corpus, 700, max_tokens_per_char=0.001)
    assert made.stats["documents"] == made.stats["characters"] == 0
    assert made.stats["dropped"]["incompressible"]["documents"] == 220
    assert list(documents_of(made)) == []
    assert len(parts_of(made)) == corpus.stats["parts"]


def test_a_corpus_without_documents_is_refused(corpus: Artifact):
    nothing = filtered(corpus, 700, max_tokens_per_char=0.001)
    with pytest.raises(InputError, match="no document to measure"):
        measure.fn(SMALL, nothing)


def test_a_row_group_without_documents_is_passed_over(store: Path, corpus: Artifact):
    measures, part, out = measure.fn(SMALL, corpus), parts_of(corpus)[0], store.parent / "out"
    rows = pq.read_table(part)
    out.mkdir()
    with pq.ParquetWriter(out / "part-00007.parquet", rows.schema) as file:
        for table in (rows[:0], rows, rows[:0]):
            file.write_table(table)
    (out / "filtered").mkdir()
    found = []
    for path in (part, out / "part-00007.parquet"):
        counts = measure_module.measure_part(path, measures.path, out)
        made = filter_module.filter_part(path, out / measure_module.name_of(path), Filter(), out / "filtered")
        found.append((counts, made))
    assert found[0] == found[1]


@pytest.mark.parametrize("harm", ["other ids", "other text", "fewer rows", "fewer row groups"])
def test_measures_of_other_documents_are_refused(corpus: Artifact, tmp_path: Path, harm: str):
    part, path = parts_of(corpus)[1], tmp_path / "measured-00001.parquet"
    table = pq.read_table(measure.fn(SMALL, corpus).path / path.name)
    if harm == "other ids":
        table = table.set_column(0, "id", pa.array([f"{name}0" for name in table["id"].to_pylist()]))
    elif harm == "other text":
        table = table.set_column(2, "characters", pa.array([n + 1 for n in table["characters"].to_pylist()]))
    elif harm == "fewer rows":
        table = table[1:]
    with pq.ParquetWriter(path, table.schema) as file:
        if harm != "fewer row groups":
            file.write_table(table)
    with pytest.raises(InputError, match=path.name):
        list(filter_module.aligned(part, path))


def test_measures_of_another_corpus_are_refused(corpus: Artifact, folder: Path):
    for other in (corpus_of(folder, part_megabytes=1024), corpus_of(folder, part_megabytes=0.03)):
        with pytest.raises(InputError, match=corpus.key):
            drop_incompressible.fn(Filter(), corpus, measure.fn(SMALL, other))
    assert artifacts("filter") == []


def test_another_threshold_measures_nothing_again(corpus: Artifact, monkeypatch: pytest.MonkeyPatch):
    before = filtered(corpus, 700)
    for name in ("encoder_of", "train", "measure_part"):
        monkeypatch.setattr(measure_module, name, None)
    monkeypatch.setattr(zstandard, "ZstdCompressor", None)
    after = filtered(corpus, 700, max_tokens_per_char=0.2)
    assert 0 < after.stats["documents"] < before.stats["documents"]


def test_a_source_may_have_the_name_of_the_total(store: Path, tmp_path: Path, texts):
    write_jsonl(tmp_path / "a.jsonl", texts["prose"][:150], "all")
    write_jsonl(tmp_path / "b.jsonl", texts["hex"], "hex")
    write_jsonl(tmp_path / "c.jsonl", texts["prose"][150:], '"all"')
    corpus = corpus_of(tmp_path / "?.jsonl")
    made, strict = filtered(corpus, 700), filtered(corpus, 700, max_tokens_per_char=0.2)
    rows = [(row["source"], row["documents"], row["kept"]) for row in made.stats["table"]]
    assert rows == [("all", 210, 200), ('"all"', 150, 150), (r'"\"all\""', 50, 50), ("hex", 10, 0)]
    assert made.stats["table"][0]["median tokens_per_char"] == np.median(measured(made)["tokens_per_char"]).round(4)
    of_measures = artifacts("measure")[-1].stats["table"]
    assert [row["source"] for row in of_measures] == [name for name, _, _ in rows]
    assert [row["source"] for row in compare(made, strict)["sources"]][:2] == ["all", '"all"']


def test_a_longest_that_is_less_than_the_shortest_is_refused():
    with pytest.raises(ValidationError, match="max_characters 5 is less than min_characters 10"):
        Filter(min_characters=10, max_characters=5)


def test_a_literal_special_token_is_measured_as_the_text_it_is(store: Path, tmp_path: Path, texts):
    plain = " ".join(["mask", "sep"] * 50)
    write_jsonl(tmp_path / "a.jsonl", [*texts["prose"], plain, plain.replace("mask", "[MASK]").replace("sep", "[SEP]")])
    made = filtered(corpus_of(tmp_path / "a.jsonl"), 700)
    *_, tokens, bracketed = measured(made)["tokens"]
    assert bracketed == tokens + 2 * 100, "two brackets a word"


def bytes_of(made: Artifact) -> dict:
    return {file["path"]: file["sha256"] for file in made.manifest["files"]}


def test_one_and_two_workers_write_the_same_bytes(corpus: Artifact, monkeypatch: pytest.MonkeyPatch):
    made = filtered(corpus, 700)
    measures = artifacts("measure")[-1]
    alone = bytes_of(measures), bytes_of(made)
    for artifact in (measures, made):
        store_module.refresh(artifact)
    monkeypatch.setenv("CRAM_WORKERS", "2")
    assert filtered(corpus, 700) == made
    assert (bytes_of(measures), bytes_of(made)) == alone
    kinds = [Counter(name.split("-")[0] for name in files) for files in alone]
    assert kinds[0]["measured"] == kinds[1]["part"] == kinds[1]["measured"] == corpus.stats["parts"]
    assert set(kinds[0]) == {"measured", "tokenizer.json", "tokenizer_config.json", "stats.json"}
    assert set(kinds[1]) == {"part", "measured", "histogram.png", "sources.parquet", "dropped.jsonl", "stats.json"}


def test_after_an_interruption_neither_the_vocabulary_nor_finished_parts_are_made_again(corpus: Artifact, monkeypatch):
    whole = bytes_of(measure.fn(SMALL, corpus))
    store_module.refresh(measure.target(SMALL, corpus))
    calls, train, measure_part = [], measure_module.train, measure_module.measure_part

    def counted(*arguments) -> Tokenizer:
        calls.append("train")
        return train(*arguments)

    def interrupted(part: Path, tokenizer_folder: Path, out: Path) -> dict:
        calls.append(part.name)
        if len(calls) == 4:
            (out / part.name.replace("part", "measured")).write_bytes(b"half of it")
            raise KeyboardInterrupt
        return measure_part(part, tokenizer_folder, out)

    monkeypatch.setattr(measure_module, "train", counted)
    monkeypatch.setattr(measure_module, "measure_part", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure.fn(SMALL, corpus)
    assert artifacts("measure") == []
    assert bytes_of(measure.fn(SMALL, corpus)) == whole
    names = [part.name for part in parts_of(corpus)]
    assert calls == ["train", *names[:3], *names[2:]]


def test_documents_stay_in_their_parts_and_in_order(corpus: Artifact):
    made = filtered(corpus, 700)
    for before, after in zip(parts_of(corpus), parts_of(made), strict=True):
        documents = [d for batch in batches(before) for d in batch if d.source == "prose"]
        assert [d for batch in batches(after) for d in batch] == documents


def test_unbroken_hex_is_dropped_though_wordpiece_makes_it_one_unknown_token(
    store: Path, tmp_path: Path, toy_texts: list[str]
):
    random = np.random.default_rng(0)
    dump = "vectors: " + " ".join("".join(random.choice(list("0123456789abcdef"), 500)) for _ in range(4))
    corpus = download.fn(
        Download(source="files", files=[str(write_jsonl(tmp_path / "toy.jsonl", [*toy_texts, dump]))], documents=0)
    )
    made = filtered(corpus, max_tokens_per_char=0.5)
    assert made.stats["dropped"]["incompressible"]["documents"] == 1
    dropped = json.loads((made.path / "dropped.jsonl").read_text())
    assert dropped["text"].startswith("vectors:")
    assert dropped["tokens_per_char"] > 0.9
