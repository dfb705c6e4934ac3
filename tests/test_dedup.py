"""Deduplicate, against a set in plain Python."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import write_jsonl

from tasks import dedup, stage
from tasks.corpus import Download, batches, documents_of, download, parts
from tasks.dedup import Deduplicate, deduplicate, first_occurrences
from tasks.sources import Document
from tasks.stage import Artifact, artifacts


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
    for part in parts(kept):
        here = [d for batch in batches(part) for d in batch]
        there = [d for batch in batches(corpus.path / part.name) for d in batch]
        assert set(here) <= set(there), "a document stays in its part"


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
    assert stats["parts"] == corpus.stats["parts"] == len(parts(corpus)) > 5


def test_deduplicating_twice_drops_nothing_more(corpus: Artifact):
    once = deduplicate.fn(Deduplicate(), corpus)
    twice = deduplicate.fn(Deduplicate(), once)
    assert list(documents_of(twice)) == list(documents_of(once))
    assert twice.stats["dropped"]["duplicate"]["documents"] == 0


def test_method_none_keeps_all(corpus: Artifact):
    kept = deduplicate.fn(Deduplicate(method="none"), corpus)
    assert list(documents_of(kept)) == list(documents_of(corpus))
    assert kept.stats["dropped"]["duplicate"]["documents"] == 0
    assert kept != deduplicate.target(Deduplicate(), corpus)


def test_a_part_of_nothing_but_duplicates_is_an_empty_part(store: Path, tmp_path: Path, toy_texts: list[str]):
    write_jsonl(tmp_path / "a.jsonl", toy_texts[:10] * 3)
    size = sum(map(len, toy_texts[:10])) / 1e6
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "a.jsonl")], documents=0, part_megabytes=size))
    kept = deduplicate.fn(Deduplicate(), corpus)
    assert [sum(len(batch) for batch in batches(part)) for part in parts(kept)] == [10, 0, 0]
    assert [d.text for d in documents_of(deduplicate.fn(Deduplicate(), kept))] == toy_texts[:10]


@pytest.mark.parametrize("seed", range(5))
def test_digests_count_as_equal_only_when_both_halves_are(seed: int):
    digests = np.random.default_rng(seed).integers(0, 12, size=(200, 2)).astype("<u8")
    seen: set[tuple] = set()
    expected = [row not in seen and not seen.add(row) for row in map(tuple, digests.tolist())]
    assert first_occurrences(digests).tolist() == expected
    assert first_occurrences(digests[:1]).tolist() == [True]


def bytes_of(made: Artifact) -> dict:
    return {file["path"]: file["sha256"] for file in made.manifest["files"]}


def test_one_and_two_workers_write_the_same_bytes(corpus: Artifact, monkeypatch: pytest.MonkeyPatch):
    alone = bytes_of(deduplicate.fn(Deduplicate(), corpus))
    stage.refresh(deduplicate.target(Deduplicate(), corpus))
    monkeypatch.setenv("CRAM_WORKERS", "2")
    assert bytes_of(deduplicate.fn(Deduplicate(), corpus)) == alone
    assert len(alone) == corpus.stats["parts"] + 1


@pytest.mark.parametrize("work", ["digest_part", "keep_first"])
def test_after_an_interruption_finished_parts_are_not_done_again(corpus: Artifact, monkeypatch, work: str):
    whole = bytes_of(deduplicate.fn(Deduplicate(), corpus))
    stage.refresh(deduplicate.target(Deduplicate(), corpus))
    calls, of_part = [], getattr(dedup, work)

    def interrupted(part: Path, *others: Path) -> dict:
        calls.append(part.name)
        if len(calls) == 4:
            others[-1].write_bytes(b"half of it")
            raise KeyboardInterrupt
        return of_part(part, *others)

    monkeypatch.setattr(dedup, work, interrupted)
    with pytest.raises(KeyboardInterrupt):
        deduplicate.fn(Deduplicate(), corpus)
    assert artifacts("deduplicate") == []
    assert bytes_of(deduplicate.fn(Deduplicate(), corpus)) == whole
    names = [part.name for part in parts(corpus)]
    assert calls == names[:4] + names[3:]
