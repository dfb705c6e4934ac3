"""Deduplicate: exact copies against a set in plain Python; the methods one after the other."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, texts_of, with_duplicates, write_jsonl

from flows.recipes import resolve
from model import InputError
from tasks import store as store_module
from tasks.corpus.parts import Document, batches, documents_of, parts_of
from tasks.deduplicate import Deduplicate, deduplicate, distribution, grouped
from tasks.download import Download, download
from tasks.store import Artifact
from tasks.text.minhash import MinHash
from tasks.text.substrings import Substring

ALL = ["exact", "minhash", "substring"]


@pytest.fixture
def corpus(store: Path, tmp_path: Path, toy_texts: list[str]) -> Artifact:
    """A corpus of many parts from two sources, with duplicates within and between them."""
    texts = with_duplicates(toy_texts)
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[i * 400 : (i + 1) * 400], source=f"toy {i}")
    return download.fn(Download(source="files", files=[str(tmp_path / "?.jsonl")], documents=0, part_megabytes=0.03))


def first_of_each(documents: list[Document]) -> list[Document]:
    seen, found = set(), []
    for document in documents:
        if document.text not in seen:
            found.append(document)
        seen.add(document.text)
    return found


def test_the_first_of_the_documents_of_one_text_is_kept_in_its_place(corpus: Artifact):
    kept = deduplicate.fn(Deduplicate(), corpus)
    before = list(documents_of(corpus))
    assert list(documents_of(kept)) == first_of_each(before)
    for part in parts_of(kept):
        here = [d for batch in batches(part) for d in batch]
        there = [d for batch in batches(corpus.path / part.name) for d in batch]
        assert set(here) <= set(there), "a document stays in its part"


def test_clusters_are_the_texts_that_stand_more_than_once(corpus: Artifact):
    sizes = [n for n in Counter(d.text for d in documents_of(corpus)).values() if n > 1]
    found = deduplicate.fn(Deduplicate(), corpus).stats["exact"]["clusters"]
    assert (found["number"], found["largest"]) == (len(sizes), max(sizes))
    assert found["sizes"]["2"] == sizes.count(2)
    assert found["sizes"]["3-4"] == sizes.count(3) + sizes.count(4)
    assert sum(found["sizes"].values()) == len(sizes)


def test_sizes_are_spread_over_powers_of_two():
    assert distribution(Counter({2: 3, 3: 1, 4: 1, 5: 1, 8: 1, 9: 1, 1024: 2, 1025: 1})) == {
        "number": 11,
        "largest": 1025,
        "sizes": {"2": 3, "3-4": 2, "5-8": 2, "9-16": 1, "513-1024": 2, "1025-2048": 1},
    }
    assert distribution(Counter()) == {"number": 0, "largest": 0, "sizes": {}}


def test_no_method_keeps_all(corpus: Artifact):
    kept = deduplicate.fn(Deduplicate(methods=[]), corpus)
    assert list(documents_of(kept)) == list(documents_of(corpus))
    assert kept.stats["dropped"] == {}
    assert {what: kept.stats[what] for what in ("documents", "characters", "by_source")} == {
        what: corpus.stats[what] for what in ("documents", "characters", "by_source")
    }
    assert (kept.path / "duplicates.jsonl").read_text() == ""
    assert kept != deduplicate.target(Deduplicate(), corpus)


@pytest.mark.parametrize("methods", [["exact"], ["minhash"], ["substring"], ALL])
def test_a_part_of_nothing_but_duplicates_is_an_empty_part(store: Path, tmp_path: Path, toy_texts, methods: list[str]):
    texts = toy_texts[:10]
    kept = deduplicate.fn(Deduplicate(methods=methods), corpus_of(tmp_path, texts * 3, sum(map(len, texts)) / 1e6))
    assert [pq.read_table(part).num_rows for part in parts_of(kept)] == [10, 0, 0]
    again = deduplicate.fn(Deduplicate(methods=methods), kept)
    assert list(documents_of(again)) == list(documents_of(kept))
    assert texts_of(kept) == texts or "substring" in methods


def test_digests_count_as_equal_only_when_both_halves_are():
    digests = np.random.default_rng(0).integers(0, 12, size=(200, 2)).astype("<u8")
    order, first = grouped(digests)
    rows = list(map(tuple, digests.tolist()))
    assert dict(zip(order.tolist(), first.tolist(), strict=True)) == {i: rows.index(row) for i, row in enumerate(rows)}
    assert [rows[i] for i in order] == sorted(rows)
    assert [len(a) for a in grouped(digests[:0])] == [0, 0]


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
    assert not (chained.path / store_module.WORK).exists()


def test_samples_show_both_of_a_pair(corpus: Artifact):
    made = deduplicate.fn(Deduplicate(), corpus)
    rows = [json.loads(line) for line in (made.path / "duplicates.jsonl").read_text().splitlines()]
    documents, kept = {d.id: d for d in documents_of(corpus)}, {d.id for d in documents_of(made)}
    assert len({row["kept"]["text"] for row in rows}) == len(rows) == 20
    for row in rows:
        assert row["kept"]["id"] in kept
        assert row["dropped"]["id"] not in kept
        assert documents[row["kept"]["id"]].text == documents[row["dropped"]["id"]].text
        for which in ("kept", "dropped"):
            document = documents[row[which]["id"]]
            assert row[which] == {"id": document.id, "source": document.source, "text": document.text[:300]}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"methods": ["exact", "exact"]}, "methods"),
        ({"methods": ["fuzzy"]}, "deduplicate.methods.0"),
        ({"minhash": {"jaccard": 0.9}}, "minhash"),
        ({"methods": ["minhash"], "substring": {"bytes": 100}}, "substring"),
        ({"methods": ["minhash"], "minhash": {"jaccard": 1.5}}, "deduplicate.minhash.jaccard"),
        ({"methods": ["minhash"], "minhash": {"bands": 0}}, "deduplicate.minhash.bands"),
        ({"methods": ["minhash"], "minhash": {"bands": 256, "rows": 9}}, "256 bands of 9 rows"),
        ({"methods": ["minhash"], "minhash": {"row": 3}}, "deduplicate.minhash.row"),
        ({"methods": ["substring"], "substring": {"bytes": 7}}, "substring.bytes"),
        ({"method": "exact"}, "deduplicate.method"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, named: str):
    with pytest.raises(InputError, match=named):
        resolve("crammed-bert", {"deduplicate": settings})


def test_methods_and_their_settings_are_part_of_the_key():
    settings = [
        {},
        {"methods": ["minhash"]},
        {"methods": ["minhash"], "minhash": MinHash(bands=20)},
        {"methods": ["exact", "minhash"]},
        {"methods": ["minhash", "exact"]},
        {"methods": ["substring"], "substring": Substring(bytes=75)},
        {"methods": ["substring"], "substring": Substring(bytes=100)},
    ]
    assert len({json.dumps(Deduplicate(**each).identity()) for each in settings}) == len(settings)


def test_a_file_that_only_looks_like_a_part_is_not_read(corpus: Artifact):
    shutil.copyfile(parts_of(corpus)[0], corpus.path / "part-00099.parquet")
    made = deduplicate.fn(Deduplicate(methods=[]), corpus)
    assert made.stats["documents"] == corpus.stats["documents"]
    assert len(parts_of(made)) == corpus.stats["parts"]


@pytest.mark.parametrize("methods", [["exact"], ["minhash"], ["substring"]])
def test_many_tiny_documents_are_deduplicated(store: Path, tmp_path: Path, methods: list[str]):
    texts = [str(i * i % 9973) for i in range(30_000)]
    kept = texts_of(deduplicate.fn(Deduplicate(methods=methods), corpus_of(tmp_path, texts, 1)))
    assert kept == (texts if methods == ["substring"] else list(dict.fromkeys(texts)))


def test_the_real_shards_have_the_exact_duplicates_that_a_set_finds(store: Path, real_data: Path):
    pattern = str(real_data / "pile-like" / "train-0000[01].jsonl.zst")
    corpus = download.fn(Download(source="files", files=[pattern], documents=0))
    kept = deduplicate.fn(Deduplicate(), corpus)
    seen: set[bytes] = set()
    count = 0
    for document in documents_of(corpus):
        count += 1
        seen.add(hashlib.sha256(document.text.encode()).digest())
    assert kept.stats["documents"] == len(seen)
    assert kept.stats["dropped"]["duplicate"]["documents"] == count - len(seen) > 100
