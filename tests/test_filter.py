"""Filter: what is measured, what is dropped and why, against the saved tokenizer and numpy."""

import base64
import json
import random
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import document, documents_in, documents_of, filtered, store_of_its_own, write_jsonl
from pydantic import ValidationError
from tokenizers import Tokenizer

from model.errors import InputError
from tasks.corpus import parts
from tasks.corpus.parts import parts_of, unit_hash
from tasks.download import Download, download
from tasks.filter import SCRIPT_LIMITS, Filter, filter, filter_part, rules, verdicts
from tasks.measure import MEASURES, RATIOS, Measure, measure, measure_part, name_of
from tasks.reports.diff import count_kept, join_measurements
from tasks.store.artifacts import Artifact
from tasks.text.scripts import main_scripts
from tasks.text.words import ASCII, UNICODE, Normaliser

SMALL = Measure(vocabulary_entries=700)
LIMITS = {"max_zstd_ratio": 0.75, "min_characters": 200, "max_characters": 1000, "max_tokens_per_char": 0.5}


def in_lines(text: str) -> str:
    return "\n".join(text[i : i + 64] for i in range(0, len(text), 64))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose, some of it special tokens, and junk, such as a word too long for the vocabulary, in mixed order."""
    rng = random.Random(13)
    path = tmp_path_factory.mktemp("data") / "mixed.jsonl"
    texts = {
        "prose": [f"{document(rng, 12)} [MASK] [SEP]", *(document(rng, rng.randint(3, 12)) for _ in range(199))],
        "hex": [rng.randbytes(600).hex(), *(in_lines(rng.randbytes(600).hex()) for _ in range(9))],
        "base64": [in_lines(base64.b64encode(rng.randbytes(600)).decode()) for _ in range(10)],
        "foreign": [f"漢字かな交じり文 {'あいう' * i}。" for i in range(5)],
    }
    rows = [json.dumps({"text": text, "source": source}) for source in texts for text in texts[source]]
    rng.shuffle(rows)
    path.write_text("\n".join(rows))
    return path


def corpus_of(files: Path, part_megabytes: float = 0.02) -> Artifact:
    return download.fn(Download(source="files", files=[str(files)], documents=0, part_megabytes=part_megabytes))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, shard: Path) -> Iterator[Artifact]:
    """The texts in several parts; what tests make of them is kept in one store."""
    with store_of_its_own(tmp_path_factory.mktemp("store")):
        yield corpus_of(shard)


def measured(made: Artifact) -> pd.DataFrame:
    return pq.read_table(sorted(made.path.glob("measured-*.parquet"))).to_pandas()


def test_junk_is_dropped_and_prose_stays_in_its_part(corpus: Artifact):
    made = filtered(corpus, 700)
    for before, after in zip(parts_of(corpus), parts_of(made), strict=True):
        prose = [d for d in documents_in(before) if d.source == "prose"]
        assert list(documents_in(after)) == prose
    assert corpus.stats["parts"] == made.stats["parts"] > 3
    assert (made.path / "histogram.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_statistics_count_every_document_once_by_source_and_verdict(corpus: Artifact):
    made = filtered(corpus, 700, **LIMITS)
    stats = made.stats
    rows = measured(made)
    assert stats["seen"] == {name: corpus.stats[name] for name in ("documents", "characters", "by_source")}
    outcomes = {"kept": stats, **stats["dropped"]}
    assert list(outcomes) == ["kept", *rules(Filter(**LIMITS))]
    for verdict, counts in outcomes.items():
        own = rows[rows["verdict"] == verdict]
        sums = own.groupby("source")["characters"].agg(documents="size", characters="sum")
        assert counts["by_source"] == sums.to_dict("index")
        assert (counts["documents"], counts["characters"]) == (len(own), own["characters"].sum())
    head, *table = stats["table"]
    assert stats["table"] == pq.read_table(made.path / "sources.parquet").to_pylist()
    assert [head["source"], *(row["source"] for row in table)] == ["all", "prose", "base64", "hex", "foreign"]
    for column in ("documents", "kept", *stats["dropped"], "characters", "characters kept"):
        assert head[column] == sum(row[column] for row in table)
    for row in stats["table"]:
        own = rows[(rows["source"] == row["source"]) | (row["source"] == "all")]
        assert row["kept, % of documents"] == round(100 * row["kept"] / row["documents"], 1)
        for ratio in RATIOS:
            expected = {f"{p}%": np.percentile(own[ratio], p).round(4) for p in (1, 5, 25, 50, 75, 95, 99)}
            assert stats["quantiles"][ratio][row["source"]] == pytest.approx(expected)
            assert row[f"median {ratio}"] == pytest.approx(expected["50%"])


def test_measures_are_those_of_the_saved_tokenizer_on_each_document_alone(corpus: Artifact):
    made = filtered(corpus, 700)
    tokenizer = Tokenizer.from_file(str(measure.fn(SMALL, corpus).path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    rows = measured(made)
    documents = list(documents_of(corpus))
    for row, d in zip(rows.itertuples(), documents, strict=True):
        assert (row.id, row.source, row.characters) == (d.id, d.source, len(d.text))
        ids = tokenizer.encode(d.text, add_special_tokens=False).ids
        letters = sum(map(len, re.findall(r"\w{101,}", d.text)))  # a word so long is one unknown token
        assert row.tokens == len(ids) - ids.count(1) + letters
        assert row.removed == sum(not c.isascii() for c in d.text)
        assert row.tokens_per_char == row.tokens / max(1, len(d.text) - row.removed)
        assert row.zstd_ratio == len(zstandard.compress(d.text.encode(), 3)) / len(d.text.encode())
        assert row.verdict == ("no tokens" if not ids else "kept" if row.tokens_per_char < 0.3 else "incompressible")
    kept = rows["tokens"][rows["verdict"] == "kept"].sum()
    assert made.stats["measured_with"] == {"vocabulary_entries": tokenizer.get_vocab_size(), "tokens_kept": kept}


def test_a_measure_does_not_depend_on_the_part_or_batch_a_document_is_in(store: Path, shard: Path, monkeypatch):
    whole = filtered(corpus_of(shard, part_megabytes=1024), 700)
    monkeypatch.setattr(parts, "ROW_GROUP_CHARACTERS", 5_000)
    split = filtered(corpus_of(shard, part_megabytes=0.03), 700)
    assert (whole.stats["parts"], whole.stats["table"]) == (1, split.stats["table"])
    assert split.stats["parts"] > 2
    assert measured(whole).equals(measured(split))
    for file in ("dropped.jsonl", "histogram.png"):
        assert (whole.path / file).read_bytes() == (split.path / file).read_bytes(), file


@pytest.mark.parametrize(
    ("tokens", "settings", "expected"),
    [
        (2, {"max_tokens_per_char": 0.3}, "kept"),
        (3, {"max_tokens_per_char": 0.3}, "incompressible"),
        (3, {"max_tokens_per_char": float(np.nextafter(0.3, 1))}, "kept"),
        (0, {}, "no tokens"),
        (2, {"max_tokens_per_char": None, "max_zstd_ratio": 0.6}, "kept"),
        (2, {"max_tokens_per_char": None, "max_zstd_ratio": 0.5}, "incompressible by zstd"),
        (2, {"max_tokens_per_char": 0.2, "max_zstd_ratio": 0.5}, "incompressible"),
        (2, {"min_characters": 10}, "kept"),
        (2, {"min_characters": 11}, "too short"),
        (2, {"max_characters": 10}, "kept"),
        (2, {"max_characters": 9, "max_zstd_ratio": 0.5}, "too long"),
    ],
)
def test_the_verdict_names_the_first_limit_that_a_document_of_ten_characters_reaches(tokens, settings, expected):
    params = Filter(**settings)
    row = [["a"], ["b"], [10], [0], [tokens], [tokens / 10], [0.5], [None]]
    assert verdicts(pa.table(row, schema=MEASURES), params).tolist() == [expected]
    assert expected in ["kept", *rules(params)]


def test_a_filter_may_drop_all_of_which_nothing_is_left_to_measure(store: Path, tmp_path: Path):
    texts = ["漢字", "\N{GRINNING FACE}", "\N{ZERO WIDTH SPACE} \N{COMBINING ACUTE ACCENT}\n¿"]
    corpus = corpus_of(write_jsonl(tmp_path / "a.jsonl", texts), part_megabytes=1e-6)
    made = filter.fn(Filter(), corpus, measure.fn(Measure(vocabulary_entries=700, max_removed=1), corpus))
    assert made.stats["dropped"]["no tokens"]["documents"] == len(parts_of(made)) == 3
    assert made.stats["documents"] == made.stats["characters"] == 0
    assert measured(made)["tokens_per_char"].tolist() == [0, 0, 0]
    assert made.stats["quantiles"]["tokens_per_char"]["all"]["50%"] == 0
    with pytest.raises(InputError, match="deduplicate and decontaminate"):
        measure.fn(SMALL, made)
    with pytest.raises(ValidationError, match="max_characters 5"):
        Filter(min_characters=10, max_characters=5)


def test_samples_of_what_was_dropped_are_drawn_by_their_text(corpus: Artifact):
    made = filtered(corpus, 700)
    found = [json.loads(line) for line in (made.path / "dropped.jsonl").read_text(encoding="utf-8").splitlines()]
    rows = measured(made).set_index("id")
    expected = []
    for source, why in (("base64", "incompressible"), ("foreign", "no tokens"), ("hex", "incompressible")):
        documents = sorted((d for d in documents_of(corpus) if d.source == source), key=lambda d: unit_hash(d.text))[:3]
        for d in documents:
            ratios = {ratio: round(float(rows.loc[d.id, ratio]), 4) for ratio in RATIOS}
            expected.append({"id": d.id, "source": source, "reason": why, **ratios, "text": d.text[:400]})
    assert found == expected


def test_a_row_group_without_documents_is_passed_over(tmp_path: Path, corpus: Artifact):
    part = parts_of(corpus)[0]
    other = tmp_path / "part-00007.parquet"
    written = []
    rows = pq.read_table(part)
    with pq.ParquetWriter(other, rows.schema) as file:
        for table in (rows[:0], rows, rows[:0]):
            file.write_table(table)
    (tmp_path / "out").mkdir()
    for path in (part, other):
        counts = measure_part(path, measure.fn(SMALL, corpus).path, tmp_path)
        names = [path.name, name_of(path)]
        made = filter_part(path, tmp_path / names[1], Filter(), tmp_path / "out")
        written.append((counts, made, [pq.read_table(tmp_path / "out" / name).to_pylist() for name in names]))
    assert written[0] == written[1]


def test_measures_of_another_corpus_are_refused(corpus: Artifact, shard: Path):
    measures = measure.fn(SMALL, corpus_of(shard, part_megabytes=1024))
    with pytest.raises(InputError, match=f"{measures.name} was not measured on {corpus.name}"):
        filter.fn(Filter(), corpus, measures)


def test_a_source_may_have_the_name_of_the_total(store: Path, tmp_path: Path, toy_texts: list[str]):
    write_jsonl(tmp_path / "a.jsonl", toy_texts[:150], "all")
    write_jsonl(tmp_path / "b.jsonl", [in_lines(random.Random(i).randbytes(600).hex()) for i in range(10)], "hex")
    write_jsonl(tmp_path / "c.jsonl", toy_texts[150:200], '"all"')
    corpus = corpus_of(tmp_path / "?.jsonl")
    made = filtered(corpus, 700)
    strict = filtered(corpus, 700, max_tokens_per_char=0.2)
    rows = [(row["source"], row["documents"], row["kept"]) for row in made.stats["table"]]
    assert rows == [("all", 210, 200), ('"all"', 150, 150), (r'"\"all\""', 50, 50), ("hex", 10, 0)]
    assert made.stats["table"][0]["median tokens_per_char"] == measured(made)["tokens_per_char"].median().round(4)
    of_measures = measure.fn(SMALL, corpus).stats["table"]
    assert [row["source"] for row in of_measures] == [name for name, _, _ in rows]
    assert list(count_kept(join_measurements(made, strict))["source"][:2]) == ["all", '"all"']


# Characters that the normaliser deletes, and other scripts than Latin

PLAIN = Normaliser(punctuation="plain")
UNICODE_SMALL = Measure(vocabulary_entries=700, normaliser=UNICODE)
RUSSIAN = "Мама мыла раму, а кошка спала на окне и смотрела на снег. "
CHINESE = "今天天气很好，我们去公园散步，然后回家吃饭。"


def test_deleted_characters_are_counted_by_source_and_script_but_not_accents_or_white_space(store, tmp_path, toy_texts):
    write_jsonl(tmp_path / "a.jsonl", toy_texts[:100], "plain")
    write_jsonl(tmp_path / "b.jsonl", ["caf\u00e9 na\u0131\u0308ve\u00a0\u200b – 漢字 кот ½ ①"], "mixed")
    made = measure.fn(Measure(vocabulary_entries=700), corpus_of(tmp_path / "?.jsonl"))
    removed = {"CJK": 2, "CYRILLIC": 3, "punctuation": 1, "digits": 2, "LATIN": 1}  # a dotless i is no i
    assert made.stats["removed"]["by_script"] == removed
    assert made.stats["removed"]["by_source"] == {"mixed": {"documents": 1, "characters": 9}}
    assert made.stats["removed"]["characters"] == 9
    assert made.stats["removed"]["share"] == pytest.approx(9 / made.stats["characters"], abs=1e-6)
    assert [row["removed"] for row in made.stats["table"]] == [9, 0, 9]
    plain = measure.fn(Measure(vocabulary_entries=700, normaliser=PLAIN), corpus_of(tmp_path / "?.jsonl"))
    assert plain.stats["removed"]["by_script"] == {name: n for name, n in removed.items() if name != "punctuation"}


@pytest.mark.parametrize(
    ("text", "settings", "helps"),
    [
        (RUSSIAN, {}, r"CYRILLIC.*vocabulary\.characters"),
        (
            "हिन्दी में लिखा हुआ पाठ ",
            {"normaliser": {"characters": "unicode", "strip_accents": True}},
            r"DEVANAGARI.*strip_accents",
        ),
        ("\ufffd text \ue000 ", {"normaliser": UNICODE}, r"private use.*max_removed"),
    ],
)
def test_text_that_the_vocabulary_would_not_read_is_refused_with_what_helps(store, tmp_path, text, settings, helps):
    corpus = corpus_of(write_jsonl(tmp_path / "a.jsonl", [text * 20] * 3))
    with pytest.raises(InputError, match=helps):
        measure.fn(Measure(vocabulary_entries=700, **settings), corpus)
    assert (
        measure.fn(Measure(vocabulary_entries=700, max_removed=1, **settings), corpus).stats["removed"]["share"] > 0.05
    )


def test_the_limit_is_that_of_the_main_script_and_a_number_applies_to_all(store: Path, tmp_path: Path, toy_texts):
    rng = random.Random(4)
    texts = {
        "english": toy_texts[:100],
        "russian": [RUSSIAN * 20] * 5,
        "chinese": [CHINESE * 20, f"{CHINESE * 5} and an English name"],
        "hex": [in_lines(rng.randbytes(600).hex()) for _ in range(5)],
        "georgian": ["ქართული ენა " * 3],
    }
    for source, some in texts.items():
        write_jsonl(tmp_path / f"{source}.jsonl", some, source)
    corpus = corpus_of(tmp_path / "*.jsonl")
    measures = measure.fn(UNICODE_SMALL, corpus)
    made = filter.fn(Filter(max_tokens_per_char="by-script"), corpus, measures)
    rows = measured(made)
    scripts = {"english": "LATIN", "russian": "CYRILLIC", "chinese": "CJK", "hex": "LATIN", "georgian": "GEORGIAN"}
    assert rows["script"].tolist() == [scripts[source] for source in rows["source"]]
    assert {row["source"]: row["kept"] for row in made.stats["table"]} == {
        "all": 108, "english": 100, "russian": 5, "chinese": 2, "hex": 0, "georgian": 1,
    }  # fmt: skip
    for row in rows.itertuples():
        limit = SCRIPT_LIMITS.get(row.script, np.inf)
        assert (row.verdict == "incompressible") == (row.tokens_per_char >= limit)
    strict = measured(filter.fn(Filter(max_tokens_per_char=0.3), corpus, measures))
    assert (strict["verdict"] == np.where(strict["tokens_per_char"] < 0.3, "kept", "incompressible")).all()
    assert (strict["verdict"][strict["source"] == "chinese"] == "incompressible").all()


VIETNAMESE = "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi."


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (VIETNAMESE, "LATIN"),
        (unicodedata.normalize("NFD", VIETNAMESE), "LATIN"),
        ("Ａ ｆｕｌｌ ｗｉｄｔｈ", "LATIN"),
        ("ｶﾀｶﾅ ﾃﾞｽ", "KANA"),
        ("ﾡﾢﾣ", "HANGUL"),
    ],
)
def test_separate_accents_and_other_widths_are_no_scripts(text: str, script: str):
    assert main_scripts([text * 20]) == [script]


def test_settings_at_their_defaults_are_in_no_key():
    assert Measure().identity() == Measure(normaliser=ASCII).identity() == {
        "vocabulary_entries": 32_768, "sample_megabytes": 100.0,
    }  # fmt: skip
    for other in (Measure(max_removed=0.1), Measure(normaliser=UNICODE), Measure(normaliser=PLAIN)):
        assert other.identity() != Measure().identity()
    assert "punctuation" not in Measure(normaliser=UNICODE).identity()["normaliser"]
