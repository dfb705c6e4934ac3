"""Download: subsets, parts, counts, and what the key follows."""

import dataclasses
import errno
import io
import json
import os
import random
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import write_jsonl
from pydantic import ValidationError

from flows.recipes import resolve
from model import InputError
from tasks import download as download_stage
from tasks.corpus import hub, local, parts
from tasks.corpus.parts import SCHEMA, Document, add_up, batches, documents_of, in_order, parts_of
from tasks.deduplicate import Deduplicate, deduplicate
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
    found = [[d.text for batch in batches(part) for d in batch] for part in parts_of(made)]
    assert found == expected
    assert made.stats["parts"] == len(expected)
    assert [p.name for p in parts_of(made)] == [f"part-{i:05d}.parquet" for i in range(len(expected))]


def test_a_part_of_exactly_its_size_is_full(store: Path, tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", ["x" * 500, "y" * 500, "z"])
    made = download.fn(params(tmp_path / "a.jsonl", part_megabytes=0.001))
    assert [[d.text[0] for batch in batches(part) for d in batch] for part in parts_of(made)] == [["x", "y"], ["z"]]


def test_parts_are_plain_parquet_in_groups_of_a_few_megabytes(store: Path, shards: Path, toy_texts, monkeypatch):
    monkeypatch.setattr(download_stage, "ROW_GROUP_CHARACTERS", 20_000)
    made = download.fn(params(shards))
    [part] = parts_of(made)
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
    assert [pq.read_table(p)["text"] for p in parts_of(split)] == [pq.read_table(p)["text"] for p in parts_of(joined)]


def test_the_same_input_gives_the_same_bytes(store: Path, shards: Path, tmp_path: Path, monkeypatch):
    first = download.fn(params(shards, part_megabytes=0.02)).manifest["files"]
    monkeypatch.setattr("tasks.store.ROOT", tmp_path / "elsewhere")
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
    digest = local.store.digest
    monkeypatch.setattr(local.store, "digest", lambda path: digested.append(path.name) or digest(path))
    assert key(shards) == key(shards)
    assert sorted(digested) == ["toy-0.jsonl", "toy-1.jsonl", "toy-2.jsonl"]


def test_the_key_of_hub_data_follows_its_revision(monkeypatch):
    before = download.target(Download(source="pile"))
    assert before != download.target(Download(source="c4"))
    for changed in ({"revision": "f" * 40}, {"pattern": "val.*"}, {"text": "content"}, {"sets": ("Enron Emails",)}):
        other = dataclasses.replace(hub.SOURCES["pile"], **changed)
        monkeypatch.setitem(hub.SOURCES, "pile", other)
        assert before != download.target(Download(source="pile"))
    other = dataclasses.replace(hub.SOURCES["c4"], about="in other words")
    before = download.target(Download(source="c4"))
    monkeypatch.setitem(hub.SOURCES, "c4", other)
    assert before == download.target(Download(source="c4"))


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
        {"source": {}},
        {"source": {"pile": 0}},
        {"source": {"the-pile": 1}},
        {"source": {"pile": 1, "files": 1}},
        {"max_document_megabytes": 0},
        {"document": 3},
    ],
)
def test_settings_out_of_their_range_are_refused(settings: dict):
    with pytest.raises(ValidationError):
        Download(**settings)


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, when: str, made: Download) -> None:
    """Break off `download` as it ends its part number `at`, before or after it keeps its state."""
    end, ended = download_stage.Writer._end, []

    def breaking(writer: download_stage.Writer, *given: object) -> None:
        ended.append(1)
        if len(ended) == at and when == "before":
            raise KeyboardInterrupt
        end(writer, *given)
        if len(ended) == at:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(download_stage.Writer, "_end", breaking)
        with pytest.raises(KeyboardInterrupt):
            download.fn(made)


@pytest.fixture
def ugly(shards: Path, toy_texts: list[str]) -> Path:
    """Shards with losses, with documents of other sets, and one that is cut short."""
    write_jsonl(shards / "toy-3.jsonl", [None, *toy_texts[:20], "", None], source="other")
    lines = (shards / "toy-1.jsonl").read_text().splitlines()
    (shards / "toy-1.jsonl").write_text("\n".join(["{", *lines[:50], "]", "", *lines[50:], "{}"]))
    data = zstandard.ZstdCompressor().compress((shards / "toy-2.jsonl").read_bytes())
    (shards / "toy-2.jsonl").unlink()
    (shards / "toy-2.jsonl.zst").write_bytes(data[:-3])
    return shards


def variants(folder: Path) -> list[Download]:
    kept = {"part_megabytes": 0.02, "damaged": "keep", "max_lost": 0.5}
    return [
        params(folder, **kept),
        params(folder, **kept, sets=["toy 0", "other"], documents=110),
        params(folder, **kept, megabytes=0.05),
        Download(source={"files": 2, "books": 1}, files=[str(folder)], megabytes=0.06, documents=0, **kept),
        Download(source={"files": 1000, "books": 1}, files=[str(folder)], megabytes=0.15, documents=0, **kept),
    ]


@pytest.mark.parametrize("variant", range(5))
def test_an_interrupted_download_goes_on_at_its_last_part_and_makes_the_same_bytes(
    store: Path, ugly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: int
):
    settings = variants(ugly)[variant]
    books = download_stage.Shard(
        "book.jsonl", write_jsonl(tmp_path / "book.jsonl", [f"{i} " * 100 for i in range(900)])
    )
    shards, identity_of = download_stage.shards, download_stage.identity_of
    monkeypatch.setattr(download_stage, "shards", lambda name, p: [books] if name == "books" else shards(name, p))
    monkeypatch.setattr(download_stage, "identity_of", lambda name, p: "" if name == "books" else identity_of(name, p))
    monkeypatch.setattr(hub, "SOURCES", {})
    whole = download.fn(settings).manifest
    count = whole["stats"]["parts"]
    assert count >= 3
    assert ("mixture" in whole["stats"] and whole["stats"]["mixture"]["files"]["ended"]) == (variant == 4)
    written = []
    write = download_stage.Writer._write
    monkeypatch.setattr(
        download_stage.Writer, "_write", lambda w, path, docs: written.append(path.name) or write(w, path, docs)
    )
    for at in range(1, count + 1):
        for when in ("before", "after"):
            monkeypatch.setattr("tasks.store.ROOT", tmp_path / f"{at} {when}")
            interrupted(monkeypatch, at, when, settings)
            assert artifacts("download") == []
            written.clear()
            again = download.fn(settings).manifest
            assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])
            done = at if when == "after" else at - 1
            assert sorted(set(written)) == [f"part-{i:05d}.parquet" for i in range(done, count)]


def test_the_bytes_do_not_depend_on_how_fast_the_writer_is(store: Path, ugly: Path, tmp_path: Path, monkeypatch):
    settings = variants(ugly)[0]
    expected = download.fn(settings).manifest["files"]
    rng = random.Random(1)
    work = {name: getattr(download_stage.Writer, name) for name in ("_write", "_end")}
    for name, slow in (("_write", 1), ("_end", 1), ("_write", 5)):

        def slowly(*given: object, name: str = name, slow: int = slow) -> None:
            time.sleep(slow * rng.random() / 200)
            work[name](*given)

        monkeypatch.setattr("tasks.store.ROOT", tmp_path / f"{name} {slow}")
        with monkeypatch.context() as patch:
            patch.setattr(download_stage.Writer, name, slowly)
            assert download.fn(settings).manifest["files"] == expected


def test_a_failure_midway_publishes_nothing_and_leaves_no_litter_behind(store: Path, shards: Path, toy_texts):
    (shards / "toy-3.jsonl.gz").write_bytes(b"\x1f\x8b")
    threads = threading.active_count()
    with pytest.raises(InputError, match=r"toy-3\.jsonl\.gz is truncated"):
        download.fn(params(shards, part_megabytes=0.01))
    assert threading.active_count() == threads
    assert artifacts("download") == []
    assert list(store.glob(".partial/download-*/part-*.parquet")), "it had begun"
    made = download.fn(params(shards, part_megabytes=0.01, damaged="keep"))
    assert texts_of(made) == toy_texts
    assert {p.name for p in made.path.iterdir()} == {
        *(p.name for p in parts_of(made)), "lost.jsonl", "stage.json", "stats.json"
    }  # fmt: skip


@pytest.mark.parametrize("full", ["part-00001.parquet", "lost.jsonl", "state.half"])
def test_a_full_disk_is_told_and_a_rerun_goes_on(store: Path, ugly: Path, tmp_path: Path, monkeypatch, full: str):
    settings = variants(ugly)[0]
    whole = download.fn(settings).manifest
    monkeypatch.setattr("tasks.store.ROOT", tmp_path / "full")
    writer, opened = pq.ParquetWriter, Path.open

    class Full(io.TextIOWrapper):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_writer(where: Path, *given: object, **settings: object) -> pq.ParquetWriter:
        return writer("/dev/full" if Path(where).name == full else where, *given, **settings)

    def open_path(path: Path, mode: str = "r", **settings: object) -> object:
        if path.name == full == "lost.jsonl" and mode == "a":
            return Full(opened(path, "ab"))
        return opened(Path("/dev/full") if path.name == full and mode == "w" else path, mode, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", open_writer)
        patch.setattr(Path, "open", open_path)
        with pytest.raises(InputError, match=r"download can't continue: .*No space left on device: .*CRAM_ARTIFACTS"):
            download.fn(settings)
    assert artifacts("download") == []
    again = download.fn(settings).manifest
    assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])


def calls_of(folder: Path, documents: int) -> int:
    """How many calls of functions it takes to read so many tiny documents; in this thread and in those it starts."""
    folder.mkdir()
    write_jsonl(folder / "tiny.jsonl", [str(i) for i in range(documents)])
    counted = [0]

    def count(_frame: object, event: str, _given: object) -> None:
        counted[0] += event in ("call", "c_call")

    settings = params(folder)
    download.target(settings)  # the file is digested here
    threading.setprofile(count)
    sys.setprofile(count)
    try:
        made = download.fn(settings)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert made.stats["documents"] == documents
    return counted[0]


def test_the_work_grows_as_the_number_of_documents_and_no_faster(store: Path, tmp_path: Path):
    few, some, many = (calls_of(tmp_path / str(n), n) for n in (1_000, 5_000, 20_000))
    each = (some - few) / 4_000
    assert 5 < each < 60
    assert (many - some) / 15_000 == pytest.approx(each, rel=0.05)


def mixed(tmp_path: Path, weights: dict, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]], **settings):
    """A mixture of local files under the names of sources; documents are of so many bytes each."""
    for name, lengths in sizes.items():
        texts = [f"{name} " + "é" * ((length - len(name) - 1) // 2) for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    found = {name: [download_stage.Shard(f"{name}.jsonl", tmp_path / f"{name}.jsonl")] for name in sizes}
    monkeypatch.setattr(download_stage, "shards", lambda name, params: found[name])
    monkeypatch.setattr(download_stage, "identity_of", lambda name, params: name)
    monkeypatch.setattr(hub, "SOURCES", {})
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
            for b in weights:  # nobody is ahead of another by more than the last document that it gave
                assert bytes_of[a] / weights[a] <= bytes_of[b] / weights[b] + max(sizes[a]) / weights[a]
    total = sum(bytes_of.values())
    about = made.stats["mixture"]
    assert {name: found["bytes"] for name, found in about.items()} == bytes_of
    assert sum(found["documents"] for found in about.values()) == made.stats["documents"]
    assert sum(found["share"] for found in about.values()) == pytest.approx(1, abs=1e-5)
    for name, weight in weights.items():
        assert about[name]["asked_for"] == pytest.approx(weight / 4.5, abs=1e-6)
        assert abs(about[name]["bytes"] - total * weight / 4.5) < 60_000 * 3
        assert not about[name]["ended"]
    ids = [d.id for d in documents_of(made) if d.id.startswith("books/")]
    assert ids == [f"books/books.jsonl:{i}" for i in range(1, len(ids) + 1)], "each source in its own order"
    assert {d.source for d in documents_of(made)} == {"books", "wikipedia", "c"}, "the family of their files"


def test_the_other_sources_go_on_when_one_has_ended(store: Path, tmp_path: Path, monkeypatch, caplog):
    sizes = {"books": [1000] * 10, "wikipedia": [1000] * 100, "c4": [1000] * 100}
    made = mixed(tmp_path, {"books": 2, "wikipedia": 1, "c4": 1}, monkeypatch, sizes, documents=110)
    about = made.stats["mixture"]
    assert {name: found["ended"] for name, found in about.items()} == {"books": True, "wikipedia": False, "c4": False}
    assert [about[name]["documents"] for name in ("books", "c4", "wikipedia")] == [10, 50, 50]
    assert "books has ended; c4, wikipedia go on" in caplog.text


def test_a_mixture_does_not_depend_on_the_order_in_which_it_is_written(store: Path, tmp_path: Path, monkeypatch):
    sizes = {"books": [900] * 30, "wikipedia": [900] * 30}
    first = mixed(tmp_path, {"books": 1, "wikipedia": 1}, monkeypatch, sizes)
    second = mixed(tmp_path, {"wikipedia": 1, "books": 1}, monkeypatch, sizes)
    assert first == second
    assert [d.id.split("/")[0] for d in documents_of(first)][:4] == ["books", "wikipedia"] * 2


def test_a_mixture_is_written_as_any_field_of_a_recipe():
    mixture = {"wikipedia": 3, "books": 1}
    assert resolve("demo", {"download": {"source": mixture}}).download.weights == {"books": 1, "wikipedia": 3}
    for wrong, words in (
        ({"boks": 1}, ["boks", "'books'"]),
        ({"books": 0}, ["books", "greater than 0"]),
        ("x", ["'pile'"]),
    ):
        with pytest.raises(InputError) as refused:
            resolve("demo", {"download": {"source": wrong}})
        assert all(word in str(refused.value) for word in ["download.source", *words])


def test_files_and_python_docs_may_be_mixed(store: Path, shards: Path, toy_texts):
    mixture = {"files": 3, "python-docs": 1}
    made = download.fn(Download(source=mixture, files=[str(shards)], megabytes=0.1, documents=0))
    assert made.stats["mixture"]["files"]["share"] == pytest.approx(0.75, abs=0.2)
    found = [d for d in documents_of(made) if d.id.startswith("files/")]
    assert [d.text for d in found] == toy_texts[: len(found)]
    assert found[0].id == "files/toy-0.jsonl:1"
    about = made.manifest["params"]["sources"]
    assert [name for name, _ in about["files"]["files"]] == ["toy-0.jsonl", "toy-1.jsonl", "toy-2.jsonl"]
    assert len(about["python-docs"]["packages"]) == 64


def test_documents_of_other_sets_are_counted_and_not_lost(store: Path, shards: Path, toy_texts):
    (shards / "toy-3.jsonl").write_text("no JSON\n")
    made = download.fn(params(shards, sets=["toy 1", "toy 9"], max_lost=0.004))
    assert texts_of(made) == toy_texts[100:200]
    assert made.stats["other_sets"] == {"toy 0": 100, "toy 2": 100}
    assert made.stats["lost"] == {"broken JSON": 1}
    made = download.fn(params(shards, sets=["toy 2"], documents=5, shards=3))
    assert texts_of(made) == toy_texts[200:205], "a limit is of what is kept"
    with pytest.raises(InputError, match=r"no documents from the requested sets.*toy 0, toy 1.*download.sets"):
        download.fn(params(shards, sets=["toy 7"], shards=2))


def test_the_natural_pile_is_the_pile_without_its_other_sets(store: Path, tmp_path: Path, monkeypatch):
    sets = ["Wikipedia (en)", "Github", "Gutenberg (PG-19)", "Pile-CC", "Books3"]
    rows = [{"text": f"text {i}", "meta": {"pile_set_name": sets[i % 5]}} for i in range(100)]
    (tmp_path / "00.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(
        download_stage, "shards", lambda name, params: [download_stage.Shard("00.jsonl", tmp_path / "00.jsonl")]
    )
    made = download.fn(Download(source="pile-natural"))
    assert set(made.stats["by_source"]) == {"Wikipedia (en)", "Gutenberg (PG-19)", "Books3"}
    assert made.stats["other_sets"] == {"Github": 20, "Pile-CC": 20}
    assert set(download.fn(Download(source="pile")).stats["by_source"]) == set(sets)
    assert set(download.fn(Download(source="pile", sets=["Github"])).stats["by_source"]) == {"Github"}


@pytest.mark.parametrize("source", ["pile-natural", {"pile-natural": 1, "books": 2}])
def test_sets_are_refused_for_a_source_that_stands_for_some(source: str | dict):
    with pytest.raises(
        InputError, match=r"^download: source 'pile-natural' stands for sets of its own \(Gutenberg.*'pile'"
    ):
        resolve("crammed-bert", {"download": {"source": source, "sets": ["Github"]}})
    assert resolve("crammed-bert", {"download": {"source": source}}).download.sets == []


def test_too_long_a_document_is_lost_with_its_line(store: Path, tmp_path: Path):
    write_jsonl(tmp_path / "a.jsonl", ["short", "x" * 20_000, "after"])
    made = download.fn(params(tmp_path / "a.jsonl", max_document_megabytes=0.01, max_lost=0.5))
    assert texts_of(made) == ["short", "after"]
    [lost] = [json.loads(line) for line in (made.path / "lost.jsonl").read_text().splitlines()]
    assert lost == {"file": "a.jsonl", "line": 2, "reason": "longer than 0.01 MB", "sample": ""}


def test_a_document_of_some_megabytes_is_one_document(store: Path, tmp_path: Path):
    long = " ".join(map(str, random.Random(0).choices(range(10**6), k=800_000)))
    assert len(long) > parts.ROW_GROUP_CHARACTERS
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


def test_names_of_sources_beyond_a_limit_are_counted_as_one(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(download_stage, "MOST_SOURCES", 3)
    rows = [{"text": f"text {i}", "source": f"https://example.org/{i % 5}"} for i in range(20)]
    (tmp_path / "urls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = download.fn(Download(source="files", files=[str(tmp_path / "urls.jsonl")], documents=0))
    found = {name: counts["documents"] for name, counts in made.stats["by_source"].items()}
    assert found == {"other": 8, **{f"https://example.org/{i}": 4 for i in range(3)}}
    assert [d.source for d in documents_of(made)][:5] == [f"https://example.org/{i}" for i in range(3)] + ["other"] * 2


def test_parts_are_in_the_order_of_their_numbers_however_many(tmp_path: Path):
    for number in (99_999, 100_000, 2):
        (tmp_path / f"part-{number:05d}.parquet").touch()
    assert [p.name for p in in_order(tmp_path)] == ["part-00002.parquet", "part-99999.parquet", "part-100000.parquet"]
