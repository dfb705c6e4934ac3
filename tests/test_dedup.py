"""Deduplicate: exact copies against a set in plain Python; the methods one after the other; interruptions and workers."""

import hashlib
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl
from pydantic import ValidationError

from flows.recipes import resolve
from model import InputError
from tasks import deduplicate as deduplicate_stage
from tasks import store as store_module
from tasks.corpus.parts import Document, batches, documents_of, parts_of
from tasks.deduplicate import Deduplicate, deduplicate, distribution, grouped
from tasks.download import Download, download
from tasks.store import Artifact, artifacts
from tasks.text import minhash, sorted_runs, substrings
from tasks.text.minhash import MinHash
from tasks.text.substrings import Substring

ALL = ["exact", "minhash", "substring"]
PHASES = [  # method, where its work is, and how many numbers are read at once, so that there are two jobs or more
    ("exact", deduplicate_stage, "digest_part", 10**6),
    ("exact", deduplicate_stage, "match", 100),
    ("exact", deduplicate_stage, "keep_rest", 10**6),
    ("minhash", minhash, "sketch", 10**6),
    ("minhash", minhash, "pair_up", 200),
    ("minhash", minhash, "verify", 10**6),
    ("substring", substrings, "flatten", 10**6),
    ("substring", substrings, "match_anchors", 2000),
    ("substring", substrings, "extend", 10**6),
    ("substring", substrings, "hash_windows", 10**6),
    ("substring", substrings, "match_windows", 5000),
    ("substring", substrings, "cut_part", 10**6),
]


def with_duplicates(texts: list[str], seed: int = 5) -> list[str]:
    """The texts in some order, many of them more than once, and some that differ in one character."""
    rng = random.Random(seed)
    near = [text + " " for text in texts[:40]] + [text.upper() for text in texts[40:60]] + ["x", "X", " x", "x\n"]
    drawn = rng.choices(texts, k=2 * len(texts)) + near + rng.choices(near, k=20)
    rng.shuffle(drawn)
    return drawn


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


def test_any_number_of_ranges_finds_the_same(corpus: Artifact, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sorted_runs, "ENTRIES", 10)
    kept = deduplicate.fn(Deduplicate(), corpus)
    assert list(documents_of(kept)) == first_of_each(list(documents_of(corpus)))


def test_kept_and_dropped_are_all_that_was_seen(corpus: Artifact):
    stats = deduplicate.fn(Deduplicate(), corpus).stats
    before = list(documents_of(corpus))
    after = first_of_each(before)
    dropped = Counter(d.source for d in before) - Counter(d.source for d in after)
    assert stats["dropped"]["duplicate"]["documents"] == dropped.total() > 100
    for source in ("toy 0", "toy 1"):
        assert stats["dropped"]["duplicate"]["by_source"][source]["documents"] == dropped[source] > 0
        for what in ("documents", "characters"):
            counts = [c["by_source"][source][what] for c in (stats, stats["dropped"]["duplicate"], corpus.stats)]
            assert counts[0] + counts[1] == counts[2]
    assert stats["characters"] == sum(len(d.text) for d in after)
    assert stats["parts"] == corpus.stats["parts"] == len(parts_of(corpus)) > 5


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


def test_deduplicating_twice_drops_nothing_more(corpus: Artifact):
    once = deduplicate.fn(Deduplicate(), corpus)
    twice = deduplicate.fn(Deduplicate(), once)
    assert list(documents_of(twice)) == list(documents_of(once))
    assert twice.stats["dropped"]["duplicate"]["documents"] == 0


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
    write_jsonl(tmp_path / "a.jsonl", toy_texts[:10] * 3)
    size = sum(map(len, toy_texts[:10])) / 1e6
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "a.jsonl")], documents=0, part_megabytes=size))
    kept = deduplicate.fn(Deduplicate(methods=methods), corpus)
    found = [sum(len(batch) for batch in batches(part)) for part in parts_of(kept)]
    assert found == [10, 0, 0]
    again = deduplicate.fn(Deduplicate(methods=methods), kept)
    assert list(documents_of(again)) == list(documents_of(kept))
    assert [d.text for d in documents_of(kept)] == toy_texts[:10] or "substring" in methods
    assert pq.read_table(parts_of(kept)[2]).num_rows == 0


@pytest.mark.parametrize("seed", range(5))
def test_digests_count_as_equal_only_when_both_halves_are(seed: int):
    digests = np.random.default_rng(seed).integers(0, 12, size=(200, 2)).astype("<u8")
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


def test_all_that_was_there_is_kept_dropped_for_a_reason_or_cut(corpus: Artifact):
    stats = deduplicate.fn(Deduplicate(methods=ALL), corpus).stats
    assert set(stats["dropped"]) == {"duplicate", "near-duplicate", "substring"}
    assert stats["substring"]["cut"]["characters"] > 1000
    for source, before in corpus.stats["by_source"].items():
        counts = [c["by_source"].get(source, {}) for c in (stats, *stats["dropped"].values())]
        assert sum(c.get("documents", 0) for c in counts) == before["documents"]
        counts.append(stats["substring"]["cut"]["by_source"][source])
        assert sum(c.get("characters", 0) for c in counts) == before["characters"]


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


def bytes_of(made: Artifact) -> dict:
    return {file["path"]: file["sha256"] for file in made.manifest["files"]}


@pytest.mark.parametrize("methods", [["exact"], ALL])
def test_one_and_two_workers_write_the_same_bytes(
    corpus: Artifact, monkeypatch: pytest.MonkeyPatch, methods: list[str]
):
    params = Deduplicate(methods=methods)
    alone = bytes_of(deduplicate.fn(params, corpus))
    store_module.refresh(deduplicate.target(params, corpus))
    monkeypatch.setenv("CRAM_WORKERS", "2")
    assert bytes_of(deduplicate.fn(params, corpus)) == alone
    assert len(alone) == corpus.stats["parts"] + 2


@pytest.mark.parametrize(("method", "module", "work", "entries"), PHASES, ids=[phase[2] for phase in PHASES])
def test_after_an_interruption_the_same_bytes_come_and_finished_jobs_are_not_done_again(
    corpus: Artifact, monkeypatch: pytest.MonkeyPatch, method: str, module, work: str, entries: int
):
    monkeypatch.setattr(sorted_runs, "ENTRIES", entries)
    params = Deduplicate(methods=[method])
    whole = bytes_of(deduplicate.fn(params, corpus))
    store_module.refresh(deduplicate.target(params, corpus))
    calls, of_job, draft = [], getattr(module, work), store_module.draft_of(deduplicate.target(params, corpus))

    def interrupted(*job) -> dict:
        calls.append(job)
        before = set(draft.rglob("*"))
        result = of_job(*job)
        if len(calls) == 2:
            for file in set(draft.rglob("*")) - before:
                os.truncate(file, file.stat().st_size // 2)
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(module, work, interrupted)
    with pytest.raises(KeyboardInterrupt):
        deduplicate.fn(params, corpus)
    assert artifacts("deduplicate") == []
    assert bytes_of(deduplicate.fn(params, corpus)) == whole
    assert calls[1] == calls[2]
    assert len(set(map(repr, calls))) == len(calls) - 1


def test_a_finished_method_is_not_done_again(corpus: Artifact, monkeypatch: pytest.MonkeyPatch):
    params = Deduplicate(methods=ALL)
    whole = bytes_of(deduplicate.fn(params, corpus))
    store_module.refresh(deduplicate.target(params, corpus))

    def interrupted(*_: object) -> dict:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(substrings, "flatten", interrupted)
        with pytest.raises(KeyboardInterrupt):
            deduplicate.fn(params, corpus)
    for _, module, work, _ in PHASES[:6]:
        monkeypatch.setattr(module, work, interrupted)
    assert bytes_of(deduplicate.fn(params, corpus)) == whole


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"methods": ["exact", "exact"]}, ["deduplicate", "name each method once"]),
        ({"methods": ["fuzzy"]}, ["deduplicate.methods.0", "'exact', 'minhash' or 'substring'", "'fuzzy'"]),
        ({"minhash": {"jaccard": 0.9}}, ["minhash has settings", "add 'minhash' to it"]),
        ({"methods": ["minhash"], "substring": {"bytes": 100}}, ["substring has settings", "add 'substring' to it"]),
        (
            {"methods": ["minhash"], "minhash": {"jaccard": 1.5}},
            ["deduplicate.minhash.jaccard", "less than or equal to 1"],
        ),
        (
            {"methods": ["minhash"], "minhash": {"bands": 0}},
            ["deduplicate.minhash.bands", "greater than or equal to 1"],
        ),
        (
            {"methods": ["minhash"], "minhash": {"bands": 256, "rows": 64}},
            ["16,384 minima", "take fewer bands or rows"],
        ),
        ({"methods": ["minhash"], "minhash": {"row": 3}}, ["deduplicate.minhash.row", "Did you mean rows"]),
        ({"methods": ["substring"], "substring": {"bytes": 7}}, ["substring.bytes", "greater than or equal to 8"]),
        ({"method": "exact"}, ["deduplicate.method", "Did you mean methods"]),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, words: list[str]):
    with pytest.raises(InputError) as refused:
        resolve("crammed-bert", {"deduplicate": settings})
    for word in words:
        assert word in str(refused.value)


def test_settings_are_part_of_what_is_made():
    made = [
        Deduplicate(),
        Deduplicate(methods=["minhash"]),
        Deduplicate(methods=["minhash"], minhash=MinHash(bands=20)),
    ]
    made += [Deduplicate(methods=["exact", "minhash"]), Deduplicate(methods=["minhash", "exact"])]
    made += [Deduplicate(methods=["substring"], substring=Substring(bytes=n)) for n in (75, 100)]
    assert len({json.dumps(params.identity()) for params in made}) == len(made)
    with pytest.raises(ValidationError):
        Deduplicate(minhash=MinHash(jaccard=0.8))


@pytest.mark.parametrize("harm", ["flipped", "truncated", "deleted"])
def test_a_damaged_part_is_refused(corpus: Artifact, harm: str):
    part = parts_of(corpus)[3]
    data = part.read_bytes()
    part.unlink()
    if harm != "deleted":
        part.write_bytes(data[:-100] if harm == "truncated" else data[:99] + bytes([data[99] ^ 1]) + data[100:])
    with pytest.raises(InputError, match=rf"{corpus.name}.*part-00003\.parquet|part-00003\.parquet.*{corpus.name}"):
        deduplicate.fn(Deduplicate(methods=["exact"]), corpus)


def test_a_file_that_only_looks_like_a_part_is_not_read(corpus: Artifact):
    shutil.copyfile(parts_of(corpus)[0], corpus.path / "part-00099.parquet")
    made = deduplicate.fn(Deduplicate(methods=[]), corpus)
    assert made.stats["documents"] == corpus.stats["documents"]
    assert len(parts_of(made)) == corpus.stats["parts"]


@pytest.mark.parametrize("methods", [["exact"], ["minhash"], ["substring"]])
def test_many_tiny_documents_are_deduplicated(store: Path, tmp_path: Path, methods: list[str]):
    texts = [str(i * i % 9973) for i in range(30_000)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "a.jsonl")], documents=0))
    kept = [d.text for d in documents_of(deduplicate.fn(Deduplicate(methods=methods), corpus))]
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
