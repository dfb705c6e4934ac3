"""Download: subsets, parts, counts, and what the key follows."""

import json
import os
import random
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_jsonl
from pydantic import ValidationError

from model import InputError
from tasks import corpus, sources
from tasks.corpus import SCHEMA, Download, add_up, batches, documents_of, download, parts
from tasks.dedup import Deduplicate, deduplicate
from tasks.sources import Document
from tasks.stage import Artifact, artifacts


@pytest.fixture
def shards(tmp_path: Path, toy_texts: list[str]) -> Path:
    """Three shards of a hundred documents."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        write_jsonl(folder / f"toy-{i}.jsonl", toy_texts[100 * i : 100 * (i + 1)], source=f"toy {i}")
    return folder


def params(folder: Path | str, **settings) -> Download:
    return Download(source="files", files=[str(folder)], **{"documents": 0} | settings)


def texts_of(made: Artifact) -> list[str]:
    return [d.text for d in documents_of(made)]


def test_documents_come_in_the_order_of_the_input_and_name_file_and_line(store: Path, shards: Path, toy_texts):
    made = download.fn(params(shards))
    expected = [Document(f"toy-{i // 100}.jsonl:{i % 100 + 1}", f"toy {i // 100}", t) for i, t in enumerate(toy_texts)]
    assert list(documents_of(made)) == expected


@pytest.mark.parametrize("part_megabytes", [0.001, 0.01, 0.04, 1024])
def test_parts_end_where_the_text_reaches_their_size(store: Path, shards: Path, toy_texts, part_megabytes: float):
    made = download.fn(params(shards, part_megabytes=part_megabytes))
    expected: list[list[str]] = [[]]
    for text in toy_texts:
        if sum(map(len, expected[-1])) >= 1e6 * part_megabytes:
            expected.append([])
        expected[-1].append(text)
    found = [[d.text for batch in batches(part) for d in batch] for part in parts(made)]
    assert found == expected
    assert made.stats["parts"] == len(expected)
    assert [p.name for p in parts(made)] == [f"part-{i:05d}.parquet" for i in range(len(expected))]


def test_a_part_of_exactly_its_size_is_full(store: Path, tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 500, "y" * 500, "z"])
    made = download.fn(params(tmp_path / "a.jsonl", part_megabytes=0.001))
    assert [[d.text[0] for batch in batches(part) for d in batch] for part in parts(made)] == [["x", "y"], ["z"]]


def test_parts_are_plain_parquet_in_groups_of_a_few_megabytes(store: Path, shards: Path, toy_texts, monkeypatch):
    monkeypatch.setattr(corpus, "ROW_GROUP_CHARACTERS", 20_000)
    made = download.fn(params(shards))
    [part] = parts(made)
    file = pq.ParquetFile(part)
    assert file.schema_arrow.equals(SCHEMA)
    assert file.metadata.row_group(0).column(2).compression == "ZSTD"
    sizes = [sum(len(d.text) for d in batch) for batch in batches(part)]
    assert len(sizes) == file.num_row_groups > 3
    assert all(20_000 <= size < 20_000 + max(map(len, toy_texts)) for size in sizes[:-1])
    assert pq.read_table(part)["text"].to_pylist() == toy_texts


def test_counts_add_up_by_source(store: Path, shards: Path, toy_texts):
    stats = download.fn(params(shards)).stats
    assert (stats["shards"], stats["documents"], stats["lost"]) == (3, 300, {})
    assert stats["characters"] == sum(map(len, toy_texts))
    assert stats["bytes"] == sum(len(t.encode()) for t in toy_texts)
    assert stats["by_source"] == {
        f"toy {i}": {"documents": 100, "characters": sum(map(len, toy_texts[100 * i : 100 * (i + 1)]))}
        for i in range(3)
    }


def test_characters_are_not_bytes(store: Path, tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", ["é\N{GRINNING FACE}" * 10])
    stats = download.fn(params(tmp_path / "a.jsonl")).stats
    assert (stats["characters"], stats["bytes"]) == (20, 60)


def test_sums_of_counts_are_sorted_by_documents_then_name():
    a = {"by_source": {"x": {"documents": 1, "characters": 5}, "z": {"documents": 1, "characters": 1}}}
    b = {"by_source": {"y": {"documents": 3, "characters": 9}, "x": {"documents": 0, "characters": 0}}}
    found = add_up([a, b])
    assert list(found["by_source"]) == ["y", "x", "z"]
    assert (found["documents"], found["characters"]) == (5, 15)
    assert found["by_source"]["x"] == {"documents": 1, "characters": 5}


@pytest.mark.parametrize(("settings", "expected"), [({"documents": n}, n) for n in (1, 99, 100, 101, 300, 1000)])
def test_a_subset_by_documents_is_a_prefix(store: Path, shards: Path, toy_texts, settings: dict, expected: int):
    made = download.fn(params(shards, **settings))
    assert texts_of(made) == toy_texts[:expected]
    assert made.stats["shards"] == min(3, -(-expected // 100)), "no shard is opened beyond the last document"


def test_a_subset_by_megabytes_is_the_shortest_prefix_of_that_size(store: Path, tmp_path: Path):
    texts = ["é" * 500 + str(i) for i in range(100, 200)]  # 1,003 bytes each
    write_jsonl(tmp_path / "a.jsonl", texts)
    for megabytes, expected in [(0.000_001, 1), (0.001_003, 1), (0.001_004, 2), (0.05, 50), (1, 100)]:
        made = download.fn(params(tmp_path / "a.jsonl", megabytes=megabytes))
        assert texts_of(made) == texts[:expected]
    made = download.fn(params(tmp_path / "a.jsonl", megabytes=0.05, documents=7))
    assert texts_of(made) == texts[:7], "the first limit that is reached holds"


def test_a_subset_by_shards_is_the_first_of_them(store: Path, shards: Path, toy_texts):
    for count in (1, 2, 3, 9):
        made = download.fn(params(shards, shards=count))
        assert texts_of(made) == toy_texts[: 100 * count]
        assert made.stats["shards"] == min(count, 3)


def test_what_lies_behind_the_subset_is_not_read(store: Path, shards: Path, toy_texts):
    (shards / "toy-1.jsonl").write_text("no JSON\n" * 50)
    (shards / "toy-2.jsonl.zst").write_bytes(b"no frame")
    assert texts_of(download.fn(params(shards, documents=100))) == toy_texts[:100]
    with pytest.raises(InputError, match="unreadable"):
        download.fn(params(shards, documents=101, shards=2))


def test_parts_do_not_depend_on_the_shards_the_text_lies_in(store: Path, shards: Path, tmp_path: Path, toy_texts):
    write_jsonl(tmp_path / "one.jsonl", toy_texts)
    split, joined = (download.fn(params(p, part_megabytes=0.02)) for p in (shards, tmp_path / "one.jsonl"))
    assert split != joined
    assert [pq.read_table(p)["text"] for p in parts(split)] == [pq.read_table(p)["text"] for p in parts(joined)]


def test_the_same_input_gives_the_same_bytes(store: Path, shards: Path, tmp_path: Path, monkeypatch):
    first = download.fn(params(shards, part_megabytes=0.02)).manifest["files"]
    monkeypatch.setattr("tasks.stage.ROOT", tmp_path / "elsewhere")
    second = download.fn(params(shards, part_megabytes=0.02)).manifest["files"]
    assert first == second


def key(folder: Path | str, **settings) -> str:
    return download.target(params(folder, **settings)).key


def test_the_key_does_not_follow_where_the_files_lie_but_what_they_hold(store: Path, shards: Path, tmp_path: Path):
    before = key(shards)
    moved = shards.rename(tmp_path / "moved")
    assert key(moved) == before
    assert key(moved / "*.jsonl") == before
    assert key(f"{moved}/../moved/") == before
    (moved / "toy-1.jsonl").write_text((moved / "toy-1.jsonl").read_text() + "\n")
    assert key(moved) != before


def test_an_edit_that_leaves_size_and_time_as_they_were_changes_the_key(store: Path, shards: Path):
    before, path = key(shards), shards / "toy-1.jsonl"
    about, text = path.stat(), path.read_text()
    time.sleep(0.02)  # a clock tick of the file system
    path.write_text(text.replace("river", "RIVER"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert path.read_text() != text
    assert key(shards) != before
    download.fn(params(shards))
    path.write_text(text)
    assert key(shards) == before


def test_an_edited_file_is_read_again(store: Path, shards: Path):
    first = download.fn(params(shards))
    write_jsonl(shards / "toy-1.jsonl", ["another text"])
    second = download.fn(params(shards))
    assert "another text" in texts_of(second)
    assert "another text" not in texts_of(first)
    assert len(artifacts("download")) == 2


def test_the_key_follows_the_names_and_the_order_of_the_files(store: Path, shards: Path, toy_texts):
    first, second = str(shards / "toy-0.jsonl"), str(shards / "toy-1.jsonl")
    forward, backward = (Download(source="files", files=f, documents=150) for f in ([first, second], [second, first]))
    assert download.target(forward) != download.target(backward)
    assert texts_of(download.fn(backward)) == toy_texts[100:200] + toy_texts[:50]
    before = key(shards)
    (shards / "toy-1.jsonl").rename(shards / "toy-1b.jsonl")
    assert key(shards) != before, "a document's id has its file's name"


def test_the_key_follows_the_subset_and_not_files_that_are_never_opened(store: Path, shards: Path):
    keys = [key(shards, **s) for s in ({}, {"documents": 5}, {"megabytes": 1}, {"shards": 2}, {"part_megabytes": 1})]
    assert len(set(keys)) == len(keys)
    write_jsonl(shards / "toy-2.jsonl", ["changed"])
    assert key(shards, shards=2) == keys[3]
    assert key(shards) != keys[0]


def test_a_file_is_not_digested_twice(store: Path, shards: Path, monkeypatch):
    digested = []
    digest = sources.stage.digest
    monkeypatch.setattr(sources.stage, "digest", lambda path: digested.append(path.name) or digest(path))
    assert key(shards) == key(shards)
    assert sorted(digested) == ["toy-0.jsonl", "toy-1.jsonl", "toy-2.jsonl"]


def test_the_key_of_hub_data_follows_its_revision(monkeypatch):
    before = download.target(Download(source="pile"))
    assert before != download.target(Download(source="c4"))
    other = sources.HubSource(sources.HUB["pile"].repository, "f" * 40, sources.HUB["pile"].pattern)
    monkeypatch.setitem(sources.HUB, "pile", other)
    assert before != download.target(Download(source="pile"))


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "files"},
        {"source": "pile", "files": ["a.jsonl"]},
        {"documents": -1},
        {"megabytes": -0.1},
        {"shards": -1},
        {"part_megabytes": 0},
        {"max_lost": 1.1},
        {"damaged": "ignore"},
        {"source": "the-pile"},
        {"document": 3},
    ],
)
def test_settings_out_of_their_range_are_refused(settings: dict):
    with pytest.raises(ValidationError):
        Download(**settings)


def test_a_failure_midway_publishes_nothing_and_a_rerun_starts_afresh(store: Path, shards: Path, toy_texts):
    (shards / "toy-3.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match=r"toy-3\.jsonl\.gz is truncated"):
        download.fn(params(shards, part_megabytes=0.01))
    assert artifacts("download") == []
    assert list(store.glob(".partial/download-*/part-*.parquet")), "it had begun"
    made = download.fn(params(shards, part_megabytes=0.01, damaged="keep"))
    assert texts_of(made) == toy_texts
    assert {p.name for p in made.path.iterdir()} == {
        *(p.name for p in parts(made)), "lost.jsonl", "stage.json", "stats.json"
    }  # fmt: skip


def test_a_document_of_some_megabytes_is_one_document(store: Path, tmp_path: Path):
    long = " ".join(map(str, random.Random(0).choices(range(10**6), k=800_000)))
    assert len(long) > corpus.ROW_GROUP_CHARACTERS
    write_jsonl(tmp_path / "a.jsonl", ["short", long, "after"])
    made = download.fn(params(tmp_path / "a.jsonl", part_megabytes=4))
    assert texts_of(made) == ["short", long, "after"]
    assert made.stats["parts"] == 2


def test_a_prefix_of_real_shards_is_what_zstandard_and_json_read(store: Path, real_data: Path):
    pattern, limit = real_data / "pile-like" / "*.jsonl.zst", 1500
    expected: list[tuple[str, str, str]] = []
    for shard in sorted((real_data / "pile-like").glob("train-*.jsonl.zst")):
        with zstandard.open(shard, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, 1):
                record = json.loads(line)
                expected.append((f"{shard.name}:{number}", record["meta"]["pile_set_name"], record["text"]))
                if len(expected) == limit:
                    break
        if len(expected) == limit:
            break
    made = download.fn(params(pattern, documents=limit, part_megabytes=2))
    assert [tuple(d) for d in documents_of(made)] == expected
    counts = {source: [t for _, s, t in expected if s == source] for source in {s for _, s, _ in expected}}
    assert made.stats["by_source"] == {
        source: {"documents": len(texts), "characters": sum(map(len, texts))} for source, texts in counts.items()
    }
    assert made.stats["lost"] == {}
    unique = list(dict.fromkeys(text for _, _, text in expected))
    assert len(unique) < limit, "there are duplicates among them"
    kept = deduplicate.fn(Deduplicate(), made)
    assert texts_of(kept) == unique
    assert kept.stats["dropped"]["duplicate"]["documents"] == limit - len(unique)
