"""Deduplicate: exact copies against a set in plain Python; the methods one after the other."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import naive
import pyarrow.parquet as pq
import pytest
import xxhash
from conftest import (
    corpus_of,
    documents_in,
    documents_of,
    downloaded,
    store_of_its_own,
    texts_of,
    with_duplicates,
    write_jsonl,
)

from flows.recipes.recipe import resolve
from model.errors import InputError
from tasks.corpus import parts as corpus_parts
from tasks.corpus.parts import Tally, parts_of
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.stage import Params, stage
from tasks.store.artifacts import WORK, Artifact
from tasks.store.publish import refresh
from tasks.text import sorted_files
from tasks.text.minhash import MinHash
from tasks.text.substrings import Substring

ALL = ["exact", "minhash", "substring"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> Iterator[Artifact]:
    """Many parts from two sources, with duplicates within and between them; and a file that only looks like a part."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = with_duplicates(toy_texts)
    for i in range(2):
        write_jsonl(folder / f"{i}.jsonl", texts[i * 400 : (i + 1) * 400], source=f"toy {i}")
    with store_of_its_own(folder / "artifacts"):
        made = downloaded(folder / "?.jsonl", part_megabytes=0.06)
        shutil.copyfile(parts_of(made)[0], made.path / "part-00099.parquet")
        yield made


def test_the_first_of_the_documents_of_one_text_is_kept_in_its_place(corpus: Artifact):
    kept = deduplicate.fn(Deduplicate(), corpus)
    before = list(documents_of(corpus))
    firsts = {}
    for document in before:
        firsts.setdefault(document.text, document)
    assert list(documents_of(kept)) == list(firsts.values())
    for part in parts_of(kept):
        here, there = (list(documents_in(path)) for path in (part, corpus.path / part.name))
        assert set(here) <= set(there), "a document stays in its part"
    sizes = [n for n in Counter(d.text for d in before).values() if n > 1]
    clusters = kept.stats["exact"]["clusters"]
    assert (clusters["number"], clusters["largest"]) == (len(sizes), max(sizes))
    assert clusters["sizes"]["2"] == sizes.count(2)
    assert clusters["sizes"]["3-4"] == sizes.count(3) + sizes.count(4)
    assert sum(clusters["sizes"].values()) == len(sizes)


def test_no_method_keeps_all(corpus: Artifact):
    kept = deduplicate.fn(Deduplicate(methods=[]), corpus)
    assert list(documents_of(kept)) == list(documents_of(corpus))
    for counted in ("documents", "characters", "by_source", "parts"):
        assert kept.stats[counted] == corpus.stats[counted]
    assert kept.stats["dropped"] == {}
    assert (kept.path / "duplicates.jsonl").read_text() == ""


@pytest.mark.parametrize("methods", [["exact"], ["minhash"], ["substring"], ALL])
def test_a_part_of_nothing_but_duplicates_is_an_empty_part(store: Path, tmp_path: Path, toy_texts, methods: list[str]):
    texts = toy_texts[:10]
    kept = deduplicate.fn(Deduplicate(methods=methods), corpus_of(tmp_path, texts * 3, sum(map(len, texts)) / 1e6))
    assert [pq.read_table(part).num_rows for part in parts_of(kept)] == [10, 0, 0]
    again = deduplicate.fn(Deduplicate(methods=methods), kept)
    assert list(documents_of(again)) == list(documents_of(kept))
    assert texts_of(kept) == texts or "substring" in methods


def test_digests_count_as_equal_only_when_both_halves_are(store, tmp_path: Path, monkeypatch, toy_texts: list[str]):
    whole = xxhash.xxh3_128_digest
    texts = with_duplicates(toy_texts[:50])
    for cover in (lambda digest: bytes(8) + digest[8:], lambda digest: digest[:8] + bytes(8)):
        monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda text, cover=cover: cover(whole(text)))
        corpus = corpus_of(tmp_path, texts)
        refresh(deduplicate.fn(Deduplicate(), corpus))
        assert texts_of(deduplicate.fn(Deduplicate(), corpus)) == list(dict.fromkeys(texts))


def test_each_method_works_on_what_the_one_before_it_left(corpus: Artifact):
    made = corpus
    for method in ALL:
        made = deduplicate.fn(Deduplicate(methods=[method]), made)
    chained = deduplicate.fn(Deduplicate(methods=ALL), corpus)
    assert list(documents_of(chained)) == list(documents_of(made))
    assert [p.name for p in parts_of(chained)] == [p.name for p in parts_of(corpus)]
    other = deduplicate.fn(Deduplicate(methods=["minhash", "exact"]), corpus)
    assert other.stats["dropped"]["near-duplicate"]["documents"] > 0
    assert other.stats["dropped"]["duplicate"]["documents"] == 0, "the order is that of the list"
    assert not (chained.path / WORK).exists()


@pytest.mark.parametrize("method", ["exact", "minhash"])
def test_samples_show_both_of_a_pair(corpus: Artifact, method: str):
    made = deduplicate.fn(Deduplicate(methods=[method]), corpus)
    rows = [json.loads(line) for line in (made.path / "duplicates.jsonl").read_text().splitlines()]
    documents = {d.id: d for d in documents_of(corpus)}
    kept = {d.id for d in documents_of(made)}
    assert len({row["kept"]["text"] for row in rows}) > 5
    assert 5 < len(rows) <= 20
    for row in rows:
        first, other = (documents[row[which]["id"]] for which in ("kept", "dropped"))
        assert (first.id in kept, other.id in kept) == (True, False)
        likeness = {}
        if method == "minhash":
            sets = [set(naive.runs(d.text, 5, by_halves=False, short=True)) for d in (first, other)]
            likeness["jaccard"] = round(naive.jaccard(*sets), 4)
        else:
            assert first.text == other.text
        shown = {which: {**d._asdict(), "text": d.text[:300]} for which, d in (("kept", first), ("dropped", other))}
        assert row == {"method": method, **likeness, **shown}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"methods": ["exact", "exact"]}, "methods"),
        ({"minhash": {"jaccard": 0.9}}, "minhash"),
        ({"methods": ["minhash"], "substring": {"bytes": 100}}, "substring"),
        ({"methods": ["minhash"], "minhash": {"bands": 256}}, "deduplicate.minhash.bands"),
        ({"methods": ["minhash"], "minhash": {"row": 3}}, "deduplicate.minhash.row"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, named: str):
    with pytest.raises(InputError, match=named):
        resolve("crammed-bert", {"deduplicate": settings})


def test_methods_in_their_order_and_their_settings_are_part_of_the_key():
    settings = [
        {"methods": ["exact", "minhash"]},
        {"methods": ["minhash", "exact"]},
        {"methods": ["exact", "minhash"], "minhash": MinHash(bands=20)},
        {"methods": ["substring"], "substring": Substring(bytes=75)},
        {"methods": ["substring"], "substring": Substring(bytes=100)},
    ]
    assert len({json.dumps(Deduplicate(**each).identity()) for each in settings}) == len(settings)


@pytest.mark.parametrize("method", ALL)
def test_many_tiny_documents_are_deduplicated(store: Path, tmp_path: Path, method: str):
    texts = [str(i * i % 1993) for i in range(3000)]
    kept = texts_of(deduplicate.fn(Deduplicate(methods=[method]), corpus_of(tmp_path, texts, 0.01)))
    assert kept == (texts if method == "substring" else list(dict.fromkeys(texts)))


@pytest.mark.parametrize("methods", [*([method] for method in ALL), ALL], ids="-".join)
def test_a_corpus_without_parts_stays_so(store: Path, methods: list[str]):
    @stage(version=1)
    def nothing(params: Params, out: Path) -> dict:
        return Tally().counts()

    made = deduplicate.fn(Deduplicate(methods=methods), nothing.fn(Params()))
    assert (made.stats["parts"], made.stats["documents"], parts_of(made)) == (0, 0, [])


def test_many_parts_open_no_more_runs_than_a_few(store: Path, tmp_path: Path, monkeypatch, toy_texts: list[str]):
    opened = []
    map_file = sorted_files.map_file
    texts = with_duplicates(toy_texts[:60])
    monkeypatch.setattr(sorted_files, "map_file", lambda *run, **of: opened.append(run) or map_file(*run, **of))
    few_parts = corpus_of(tmp_path, texts, 0.03)
    many_parts = corpus_of(tmp_path, texts, 0.005)
    assert many_parts.stats["parts"] >= 16

    def runs_of(method: str, corpus: Artifact, batch: int) -> int:
        monkeypatch.setattr(corpus_parts, "BATCH", batch)
        opened.clear()
        refresh(deduplicate.fn(Deduplicate(methods=[method]), corpus))
        return len(opened)

    for method in ALL:
        few = runs_of(method, few_parts, 1)
        alone = runs_of(method, many_parts, 1)
        assert alone / many_parts.stats["parts"] <= 1.1 * few / few_parts.stats["parts"], method
        assert 0 < runs_of(method, many_parts, 1 << 24) <= few, method
