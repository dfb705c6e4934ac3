"""Download: subsets, parts, counts, mixtures, and what the key follows."""

import dataclasses
import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_jsonl
from pydantic import ValidationError

from flows.recipes import resolve
from model import InputError
from tasks import download as download_stage
from tasks import store as store_module
from tasks.corpus import hub, local, part_writer, parts
from tasks.corpus.part_writer import PartWriter
from tasks.corpus.parts import SCHEMA, Document, add_up, batches, documents_of, in_order, parts_of
from tasks.download import Download, download
from tasks.store import Artifact, artifacts


@pytest.fixture
def shards(tmp_path: Path, toy_texts: list[str]) -> Path:
    """Three shards of a hundred documents."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        write_jsonl(folder / f"toy-{i}.jsonl", toy_texts[100 * i : 100 * (i + 1)], source=f"toy {i}")
    return folder


def params(folder: Path | str, **settings) -> Download:
    return Download(**{"source": "files", "files": [str(folder)], "documents": 0} | settings)


def read(folder: Path | str, **settings) -> Artifact:
    return download.fn(params(folder, **settings))


def key(folder: Path | str, **settings) -> str:
    return download.target(params(folder, **settings)).key


def texts_of(made: Artifact) -> list[str]:
    return [d.text for d in documents_of(made)]


def test_documents_are_in_the_order_of_the_input_and_name_file_and_line(store: Path, shards: Path, toy_texts):
    expected = [Document(f"toy-{i // 100}.jsonl:{i % 100 + 1}", f"toy {i // 100}", t) for i, t in enumerate(toy_texts)]
    assert list(documents_of(read(shards))) == expected


@pytest.mark.parametrize("part_megabytes", [0.001, 0.01, 0.04, 1024])
def test_parts_end_where_the_text_reaches_their_size(store: Path, shards: Path, toy_texts, part_megabytes: float):
    texts = ["x" * 500, "y" * 500, *toy_texts]  # the first two fill a part of 0.001 exactly
    write_jsonl(shards / "toy-.jsonl", texts[:2])
    made = read(shards, part_megabytes=part_megabytes)
    expected: list[list[str]] = [[]]
    for text in texts:
        if sum(map(len, expected[-1])) >= 1e6 * part_megabytes:
            expected.append([])
        expected[-1].append(text)
    assert [[d.text for batch in batches(part) for d in batch] for part in parts_of(made)] == expected
    assert made.stats["parts"] == len(expected)
    assert [p.name for p in parts_of(made)] == [f"part-{i:05d}.parquet" for i in range(len(expected))]


def test_parts_are_plain_parquet_in_groups_of_a_few_megabytes(store: Path, shards: Path, toy_texts, monkeypatch):
    monkeypatch.setattr(part_writer, "ROW_GROUP_CHARACTERS", 20_000)
    [part] = parts_of(read(shards))
    file = pq.ParquetFile(part)
    assert file.schema_arrow.equals(SCHEMA)
    assert file.metadata.row_group(0).column(2).compression == "ZSTD"
    sizes = [sum(len(d.text) for d in batch) for batch in batches(part)]
    assert len(sizes) == file.num_row_groups > 3
    assert all(20_000 <= size < 20_000 + max(map(len, toy_texts)) for size in sizes[:-1])
    assert pq.read_table(part)["text"].to_pylist() == toy_texts


def test_documents_characters_and_bytes_are_counted_by_source(store: Path, shards: Path, toy_texts):
    wide = "é\N{GRINNING FACE}" * 10
    write_jsonl(shards / "toy-3.jsonl", [wide], source="toy 3")
    stats = read(shards).stats
    groups = [toy_texts[:100], toy_texts[100:200], toy_texts[200:], [wide]]
    assert (stats["shards"], stats["documents"], stats["lost"]) == (4, 301, {})
    assert stats["characters"] == sum(map(len, toy_texts)) + 20
    assert stats["bytes"] == sum(len(t.encode()) for t in toy_texts) + 60
    assert stats["by_source"] == {
        f"toy {i}": {"documents": len(texts), "characters": sum(map(len, texts))} for i, texts in enumerate(groups)
    }


def test_sums_of_counts_are_sorted_by_documents_then_name():
    a = {"by_source": {"x": {"documents": 1, "characters": 5}, "z": {"documents": 1, "characters": 1}}}
    b = {"by_source": {"y": {"documents": 3, "characters": 9}, "x": {"documents": 0, "characters": 0}}}
    total = add_up([a, b])
    assert list(total["by_source"]) == ["y", "x", "z"]
    assert (total["documents"], total["characters"]) == (5, 15)
    assert total["by_source"]["x"] == {"documents": 1, "characters": 5}


@pytest.mark.parametrize(
    ("settings", "documents", "opened"),
    [
        *(({"documents": n}, min(n, 300), min(3, -(-n // 100))) for n in (1, 99, 100, 101, 300, 1000)),
        *(({"shards": n}, 100 * min(n, 3), min(n, 3)) for n in (1, 2, 3, 9)),
    ],
)
def test_a_subset_is_a_prefix_and_opens_no_shard_beyond_it(
    store: Path, shards: Path, toy_texts, settings: dict, documents: int, opened: int
):
    made = read(shards, **settings)
    assert texts_of(made) == toy_texts[:documents]
    assert made.stats["shards"] == opened


def test_a_subset_by_megabytes_is_the_shortest_prefix_of_that_size(store: Path, tmp_path: Path):
    texts = ["é" * 500 + str(i) for i in range(100, 200)]  # 1,003 bytes each
    write_jsonl(tmp_path / "a.jsonl", texts)
    for megabytes, expected in [(0.000_001, 1), (0.001_003, 1), (0.001_004, 2), (0.05, 50), (1, 100)]:
        assert texts_of(read(tmp_path / "a.jsonl", megabytes=megabytes)) == texts[:expected]
    both = read(tmp_path / "a.jsonl", megabytes=0.05, documents=7)
    assert texts_of(both) == texts[:7], "the first limit that is reached holds"


def test_what_lies_behind_the_subset_is_not_read(store: Path, shards: Path, toy_texts):
    (shards / "toy-1.jsonl").write_text("no JSON\n" * 50)
    (shards / "toy-2.jsonl.zst").write_bytes(b"no frame")
    assert texts_of(read(shards, documents=100)) == toy_texts[:100]
    with pytest.raises(InputError, match="unreadable"):
        read(shards, documents=101, shards=2)


def test_parts_depend_neither_on_the_shards_nor_on_the_place_of_the_text(
    store: Path, shards: Path, tmp_path: Path, toy_texts, monkeypatch
):
    write_jsonl(tmp_path / "one.jsonl", toy_texts)
    split, joined = (read(path, part_megabytes=0.02) for path in (shards, tmp_path / "one.jsonl"))
    assert split != joined
    assert [pq.read_table(p)["text"] for p in parts_of(split)] == [pq.read_table(p)["text"] for p in parts_of(joined)]
    monkeypatch.setattr(store_module, "ROOT", tmp_path / "elsewhere")
    assert read(shards, part_megabytes=0.02).manifest["files"] == split.manifest["files"]


def test_the_key_follows_what_the_files_hold_and_not_where_they_are(store: Path, shards: Path, tmp_path: Path):
    before = key(shards)
    moved = shards.rename(tmp_path / "moved")
    assert {key(moved), key(moved / "*.jsonl"), key(f"{moved}/../moved/")} == {before}
    (moved / "toy-1.jsonl").write_text((moved / "toy-1.jsonl").read_text() + "\n")
    assert key(moved) != before


def test_an_edit_that_keeps_size_and_time_changes_the_key(store: Path, shards: Path):
    before, path = key(shards), shards / "toy-1.jsonl"
    about, text = path.stat(), path.read_text()
    first = read(shards)
    time.sleep(0.02)  # a clock tick of the file system
    path.write_text(text.replace("river", "RIVER"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert path.read_text() != text
    assert key(shards) != before
    second = read(shards)
    assert "RIVER" in "".join(texts_of(second))
    assert "RIVER" not in "".join(texts_of(first))
    path.write_text(text)
    assert key(shards) == before


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
    digest = local.store.digest
    monkeypatch.setattr(local.store, "digest", lambda path: digested.append(path.name) or digest(path))
    assert key(shards) == key(shards)
    assert sorted(digested) == ["toy-0.jsonl", "toy-1.jsonl", "toy-2.jsonl"]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"revision": "f" * 40}, False),
        ({"pattern": "val.*"}, False),
        ({"text": "content"}, False),
        ({"sets": ("Enron Emails",)}, False),
        ({"licence": "in other words"}, True),
    ],
)
def test_the_key_of_hub_data_follows_its_revision_and_how_it_is_read(monkeypatch, change: dict, same: bool):
    before = download.target(Download(source="pile"))
    monkeypatch.setitem(hub.SOURCES, "pile", dataclasses.replace(hub.SOURCES["pile"], **change))
    assert (download.target(Download(source="pile")) == before) == same


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"source": "files"}, "files"),
        ({"source": "pile", "files": ["a.jsonl"]}, "files"),
        ({"source": {"pile": 1, "files": 1}}, "files"),
        ({"source": "the-pile"}, "source"),
        ({"source": {}}, "source"),
        ({"source": {"pile": 0}}, "source"),
        ({"source": {"the-pile": 1}}, "source"),
        ({"documents": -1}, "documents"),
        ({"megabytes": -0.1}, "megabytes"),
        ({"shards": -1}, "shards"),
        ({"part_megabytes": 0}, "part_megabytes"),
        ({"max_lost": 1.1}, "max_lost"),
        ({"max_document_megabytes": 0}, "max_document_megabytes"),
        ({"damaged": "ignore"}, "damaged"),
        ({"document": 3}, "document"),
        ({"source": "pile-natural", "sets": ["Github"]}, "sets"),
        ({"source": {"pile-natural": 1, "books": 2}, "sets": ["Github"]}, "sets"),
    ],
)
def test_settings_out_of_their_range_are_refused(settings: dict, field: str):
    with pytest.raises(ValidationError, match=rf"\b{field}\b"):
        Download(**settings)


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, when: str, made: Download) -> None:
    """Break off `download` as it ends its part number `at`, before or after it saves its state."""
    end, ended = PartWriter._end, []

    def breaking(writer: PartWriter, *given: object) -> None:
        ended.append(1)
        if len(ended) == at and when == "before":
            raise KeyboardInterrupt
        end(writer, *given)
        if len(ended) == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "_end", breaking)
        with pytest.raises(KeyboardInterrupt):
            download.fn(made)


@pytest.fixture
def ugly(shards: Path, toy_texts: list[str]) -> Path:
    """Shards with losses, with documents of other sets, and one that is truncated."""
    write_jsonl(shards / "toy-3.jsonl", [None, *toy_texts[:20], "", None], source="other")
    lines = (shards / "toy-1.jsonl").read_text().splitlines()
    (shards / "toy-1.jsonl").write_text("\n".join(["{", *lines[:50], "]", "", *lines[50:], "{}"]))
    data = zstandard.ZstdCompressor().compress((shards / "toy-2.jsonl").read_bytes())
    (shards / "toy-2.jsonl").unlink()
    (shards / "toy-2.jsonl.zst").write_bytes(data[:-3])
    return shards


KEEP = {"part_megabytes": 0.02, "damaged": "keep", "max_lost": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sets": ["toy 0", "other"], "documents": 110},
        {"megabytes": 0.05},
        {"source": {"files": 2, "books": 1}, "megabytes": 0.06},
        {"source": {"files": 1000, "books": 1}, "megabytes": 0.15},
    ],
)
def test_an_interrupted_download_resumes_at_its_last_part_and_makes_the_same_bytes(
    store: Path, ugly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict
):
    settings = params(ugly, **KEEP | settings)
    books = write_jsonl(tmp_path / "book.jsonl", [f"{i} " * 100 for i in range(900)])
    local_source(monkeypatch, "books", books)
    whole = download.fn(settings).manifest
    count = whole["stats"]["parts"]
    assert count >= 3
    if settings.megabytes == 0.15:
        assert whole["stats"]["mixture"]["files"]["ended"]
    written = []
    write = PartWriter._write
    monkeypatch.setattr(PartWriter, "_write", lambda w, path, rows: written.append(path.name) or write(w, path, rows))
    for at in range(1, count + 1):
        for when in ("before", "after"):
            monkeypatch.setattr(store_module, "ROOT", tmp_path / f"{at} {when}")
            interrupted(monkeypatch, at, when, settings)
            assert artifacts("download") == []
            written.clear()
            again = download.fn(settings).manifest
            assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])
            done = at if when == "after" else at - 1
            assert sorted(set(written)) == [f"part-{i:05d}.parquet" for i in range(done, count)]


def test_a_failure_midway_publishes_nothing_and_leaves_no_litter_behind(store: Path, shards: Path, toy_texts):
    (shards / "toy-3.jsonl.gz").write_bytes(b"\x1f\x8b")
    threads = threading.active_count()
    with pytest.raises(InputError, match=r"toy-3\.jsonl\.gz is truncated"):
        read(shards, part_megabytes=0.01)
    assert threading.active_count() == threads
    assert artifacts("download") == []
    assert list(store.glob(".partial/download-*/part-*.parquet")), "it had begun"
    made = read(shards, part_megabytes=0.01, damaged="keep")
    assert texts_of(made) == toy_texts
    others = {"lost.jsonl", "stage.json", "stats.json"}
    assert {p.name for p in made.path.iterdir()} == {*(p.name for p in parts_of(made)), *others}


def test_after_a_full_disk_a_rerun_resumes(store: Path, ugly: Path, tmp_path: Path, monkeypatch):
    whole = read(ugly, **KEEP).manifest
    monkeypatch.setattr(store_module, "ROOT", tmp_path / "full")
    writer = pq.ParquetWriter

    def open_writer(where: Path, *given: object, **settings: object) -> pq.ParquetWriter:
        return writer("/dev/full" if Path(where).name == "part-00001.parquet" else where, *given, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", open_writer)
        with pytest.raises(InputError, match=r"No space left on device: .*CRAM_ARTIFACTS"):
            read(ugly, **KEEP)
    assert artifacts("download") == []
    again = read(ugly, **KEEP).manifest
    assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])


def local_source(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Have a source of the hub read one local file."""
    shards, identity_of = download_stage.shards, download_stage.identity_of
    shard = download_stage.Shard(path.name, path)
    monkeypatch.setattr(download_stage, "shards", lambda n, p: [shard] if n == name else shards(n, p))
    monkeypatch.setattr(download_stage, "identity_of", lambda n, p: n if n == name else identity_of(n, p))
    if not hub.SOURCES[name].sets:
        monkeypatch.setattr(hub, "SOURCES", {n: source for n, source in hub.SOURCES.items() if n != name})


def mixed(tmp_path: Path, weights: dict, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]], **settings):
    """A mixture of local files under the names of sources, with documents of these numbers of bytes."""
    for name, lengths in sizes.items():
        texts = [f"{name} " + "é" * ((length - len(name) - 1) // 2) for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        if name in hub.SOURCES:
            local_source(monkeypatch, name, tmp_path / f"{name}.jsonl")
    return download.fn(Download(source=weights, **{"documents": 0} | settings))


def test_a_mixture_follows_its_weights_at_every_point(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(2)
    sizes = {
        "books": [rng.randrange(20_000, 60_000) for _ in range(40)],
        "wikipedia": [rng.randrange(100, 4_000) for _ in range(1500)],
        "c4": [rng.randrange(50, 900) for _ in range(3000)],
    }
    weights = {"wikipedia": 3, "books": 1, "c4": 0.5}
    made = mixed(tmp_path, weights, monkeypatch, sizes, megabytes=2)
    bytes_of = dict.fromkeys(weights, 0)
    for document in documents_of(made):
        name = document.id.split("/")[0]
        bytes_of[name] += len(document.text.encode())
        for a in weights:
            for b in weights:  # no source is ahead of another by more than the last document that it gave
                assert bytes_of[a] / weights[a] <= bytes_of[b] / weights[b] + max(sizes[a]) / weights[a]
    about = made.stats["mixture"]
    assert {name: counts["bytes"] for name, counts in about.items()} == bytes_of
    assert sum(counts["documents"] for counts in about.values()) == made.stats["documents"]
    assert sum(counts["share"] for counts in about.values()) == pytest.approx(1, abs=1e-5)
    for name, weight in weights.items():
        assert about[name]["asked_for"] == pytest.approx(weight / 4.5, abs=1e-6)
        assert not about[name]["ended"]
    ids = [d.id for d in documents_of(made) if d.id.startswith("books/")]
    assert ids == [f"books/books.jsonl:{i}" for i in range(1, len(ids) + 1)], "each source in its own order"
    assert {d.source for d in documents_of(made)} == {"books", "wikipedia", "c"}, "the family of their files"


def test_the_other_sources_continue_when_one_is_exhausted(store: Path, tmp_path: Path, monkeypatch, caplog):
    sizes = {"books": [1000] * 10, "wikipedia": [1000] * 100, "c4": [1000] * 100}
    made = mixed(tmp_path, {"books": 2, "wikipedia": 1, "c4": 1}, monkeypatch, sizes, documents=110)
    about = made.stats["mixture"]
    assert {name: counts["ended"] for name, counts in about.items()} == {"books": True, "wikipedia": False, "c4": False}
    assert [about[name]["documents"] for name in ("books", "c4", "wikipedia")] == [10, 50, 50]
    assert "books is exhausted" in caplog.text


def test_a_mixture_does_not_depend_on_the_order_in_which_it_is_written(store: Path, tmp_path: Path, monkeypatch):
    sizes = {"books": [900] * 30, "wikipedia": [900] * 30}
    first = mixed(tmp_path, {"books": 1, "wikipedia": 1}, monkeypatch, sizes)
    second = mixed(tmp_path, {"wikipedia": 1, "books": 1}, monkeypatch, sizes)
    assert first == second
    assert [d.id.split("/")[0] for d in documents_of(first)][:4] == ["books", "wikipedia"] * 2


def test_a_recipe_accepts_a_mixture_and_names_a_wrong_source():
    mixture = {"wikipedia": 3, "books": 1}
    assert resolve("demo", {"download": {"source": mixture}}).download.weights == {"books": 1, "wikipedia": 3}
    with pytest.raises(InputError, match=r"download\.source.*boks"):
        resolve("demo", {"download": {"source": {"boks": 1}}})


def test_files_and_python_docs_may_be_mixed(store: Path, shards: Path, toy_texts):
    mixture = {"files": 3, "python-docs": 1}
    made = read(shards, source=mixture, megabytes=0.1)
    assert made.stats["mixture"]["files"]["share"] == pytest.approx(0.75, abs=0.2)
    found = [d for d in documents_of(made) if d.id.startswith("files/")]
    assert [d.text for d in found] == toy_texts[: len(found)]
    assert found[0].id == "files/toy-0.jsonl:1"
    identity = made.manifest["params"]["sources"]
    assert [name for name, _ in identity["files"]["files"]] == ["toy-0.jsonl", "toy-1.jsonl", "toy-2.jsonl"]
    assert len(identity["python-docs"]["packages"]) == 64


def test_documents_of_other_sets_are_counted_and_not_lost(store: Path, shards: Path, toy_texts):
    (shards / "toy-3.jsonl").write_text("no JSON\n")
    made = read(shards, sets=["toy 1", "toy 9"], max_lost=0.004)
    assert texts_of(made) == toy_texts[100:200]
    assert made.stats["other_sets"] == {"toy 0": 100, "toy 2": 100}
    assert made.stats["lost"] == {"broken JSON": 1}
    made = read(shards, sets=["toy 2"], documents=5, shards=3)
    assert texts_of(made) == toy_texts[200:205], "a limit counts what is kept"
    with pytest.raises(InputError, match=r"toy 0, toy 1.*download\.sets"):
        read(shards, sets=["toy 7"], shards=2)


def test_the_natural_pile_is_the_pile_without_its_other_sets(store: Path, tmp_path: Path, monkeypatch):
    sets = ["Wikipedia (en)", "Github", "Gutenberg (PG-19)", "Pile-CC", "Books3"]
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": sets[i % 5]}} for i in range(100)]
    (tmp_path / "00.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("pile-natural", "pile"):
        local_source(monkeypatch, name, tmp_path / "00.jsonl")
    made = download.fn(Download(source="pile-natural"))
    assert set(made.stats["by_source"]) == {"Wikipedia (en)", "Gutenberg (PG-19)", "Books3"}
    assert made.stats["other_sets"] == {"Github": 20, "Pile-CC": 20}
    assert set(download.fn(Download(source="pile")).stats["by_source"]) == set(sets)
    assert set(download.fn(Download(source="pile", sets=["Github"])).stats["by_source"]) == {"Github"}


def test_a_document_longer_than_a_part_is_whole_and_too_long_a_one_is_lost(store: Path, tmp_path: Path):
    long = " ".join(map(str, random.Random(0).choices(range(10**6), k=800_000)))
    assert len(long) > parts.ROW_GROUP_CHARACTERS
    write_jsonl(tmp_path / "a.jsonl", ["short", long, "after"])
    made = read(tmp_path / "a.jsonl", part_megabytes=4)
    assert (texts_of(made), made.stats["parts"]) == (["short", long, "after"], 2)
    assert texts_of(read(tmp_path / "a.jsonl", max_document_megabytes=0.01, max_lost=0.5)) == ["short", "after"]


def test_a_prefix_of_real_shards_is_what_zstandard_and_json_read(store: Path, real_data: Path):
    shard, limit = sorted((real_data / "pile-like").glob("train-*.jsonl.zst"))[0], 1500
    expected: list[tuple[str, str, str]] = []
    with zstandard.open(shard, "rt", encoding="utf-8", newline="\n") as file:
        for number, line in zip(range(1, limit + 1), file, strict=False):
            record = json.loads(line)
            expected.append((f"{shard.name}:{number}", record["meta"]["pile_set_name"], record["text"]))
    made = read(real_data / "pile-like" / "*.jsonl.zst", documents=limit, part_megabytes=2)
    assert [tuple(d) for d in documents_of(made)] == expected
    documents, characters = Counter(), Counter()
    for _, source, text in expected:
        documents[source] += 1
        characters[source] += len(text)
    assert made.stats["by_source"] == {s: {"documents": documents[s], "characters": characters[s]} for s in documents}
    assert made.stats["lost"] == {}


def test_names_of_sources_beyond_a_limit_are_counted_as_one(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(download_stage, "MOST_SOURCES", 3)
    rows = [{"text": f"text {i}", "source": f"https://example.org/{i % 5}"} for i in range(20)]
    (tmp_path / "urls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = read(tmp_path / "urls.jsonl")
    found = {name: counts["documents"] for name, counts in made.stats["by_source"].items()}
    assert found == {"other": 8, **{f"https://example.org/{i}": 4 for i in range(3)}}
    assert [d.source for d in documents_of(made)][:5] == [f"https://example.org/{i}" for i in range(3)] + ["other"] * 2


def test_parts_are_in_the_order_of_their_numbers_however_many(tmp_path: Path):
    for number in (99_999, 100_000, 2):
        (tmp_path / f"part-{number:05d}.parquet").touch()
    assert [p.name for p in in_order(tmp_path)] == ["part-00002.parquet", "part-99999.parquet", "part-100000.parquet"]
