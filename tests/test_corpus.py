"""Download: subsets, parts, counts, mixtures, and what the key follows."""

import dataclasses
import gzip
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import asked_for, documents_in, documents_of, downloaded, refusal, texts_of, write_jsonl
from files_table import zip_of, zst
from pydantic import ValidationError

from model.errors import InputError
from tasks import download as download_stage
from tasks.corpus import containers, hub, parts, sources, survey
from tasks.corpus.parts import SCHEMA, parts_of
from tasks.download import Download, download
from tasks.store.artifacts import WORK, artifacts_of, draft_of


@pytest.fixture
def shards(tmp_path: Path, toy_texts: list[str]) -> Path:
    """Three shards of a hundred documents."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for i in range(3):
        write_jsonl(folder / f"toy-{i}.jsonl", toy_texts[100 * i : 100 * (i + 1)], source=f"toy {i}")
    return folder


def key(*files: Path | str, **settings) -> str:
    return download.target(asked_for(*files, **settings)).key


@pytest.mark.parametrize("part_megabytes", [0.001, 0.04, 1024])
def test_parts_end_where_the_text_reaches_their_size(store: Path, shards: Path, toy_texts, part_megabytes: float):
    texts = ["x" * 500, "y" * 500, "z" * 50_000, *toy_texts]  # the first two fill a part of 0.001 exactly
    write_jsonl(shards / "toy-.jsonl", texts[:3])
    made = downloaded(shards, part_megabytes=part_megabytes)
    expected: list[list[str]] = [[]]
    for text in texts:
        if sum(map(len, expected[-1])) >= 1e6 * part_megabytes:
            expected.append([])
        expected[-1].append(text)
    assert [[d.text for d in documents_in(part)] for part in parts_of(made)] == expected
    assert made.stats["parts"] == len(expected)
    assert [p.name for p in parts_of(made)] == [f"part-{i:05d}.parquet" for i in range(len(expected))]


def test_parts_are_plain_parquet_in_groups_of_a_few_megabytes(store: Path, shards: Path, toy_texts, monkeypatch):
    monkeypatch.setattr(parts, "ROW_GROUP_CHARACTERS", 20_000)
    texts = [*toy_texts, "z" * 50_000, "after"]
    write_jsonl(shards / "toy-3.jsonl", texts[-2:])
    [part] = parts_of(downloaded(shards))
    file = pq.ParquetFile(part)
    assert file.schema_arrow.equals(SCHEMA)
    assert file.metadata.row_group(0).column(2).compression == "ZSTD"
    sizes = [sum(map(len, rows["text"].to_pylist())) for rows in parts.tables(part)]
    assert len(sizes) == file.num_row_groups > 3
    assert all(20_000 <= size < 20_000 + max(map(len, texts)) for size in sizes[:-1])
    assert pq.read_table(part)["text"].to_pylist() == texts


def test_documents_characters_and_bytes_are_counted_by_source_the_largest_first(store: Path, shards: Path, toy_texts):
    write_jsonl(shards / "toy-3.jsonl", ["é\N{GRINNING FACE}" * n for n in range(1, 102)], source="wide")
    write_jsonl(shards / "toy-.jsonl", toy_texts[:100], source="toy 3")
    made = downloaded(shards)
    of_source = {name: [] for name in ("wide", "toy 0", "toy 1", "toy 2", "toy 3")}
    for document in documents_of(made):
        of_source[document.source].append(document.text)
    counts = [(name, {"documents": len(of), "characters": len("".join(of))}) for name, of in of_source.items()]
    assert list(made.stats["by_source"].items()) == counts
    text = "".join(texts_of(made))
    sums = {"shards": 5, "documents": 501, "characters": len(text), "bytes": len(text.encode()), "lost": {}}
    assert {name: made.stats[name] for name in sums} == sums


def test_names_of_sources_beyond_a_limit_are_counted_as_one(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(download_stage, "MOST_SOURCES", 3)
    rows = [{"text": f"text {i}", "source": f"https://example.org/{i % 5}"} for i in range(20)]
    (tmp_path / "urls.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = downloaded(tmp_path / "urls.jsonl")
    found = {name: counts["documents"] for name, counts in made.stats["by_source"].items()}
    assert found == {"other": 8, **{f"https://example.org/{i}": 4 for i in range(3)}}
    assert [d.source for d in documents_of(made)][:5] == [f"https://example.org/{i}" for i in range(3)] + ["other"] * 2


def test_a_subset_is_a_prefix_and_what_lies_behind_it_is_not_read(store: Path, shards: Path, toy_texts):
    for documents in (1, 99, 100, 101, 200):
        made = downloaded(shards, documents=documents)
        assert texts_of(made) == toy_texts[:documents]
        assert made.stats["shards"] == -(-documents // 100)
    (shards / "toy-1.jsonl").write_text("no JSON\n" * 50)
    (shards / "toy-2.jsonl.zst").write_bytes(b"no frame")
    assert texts_of(downloaded(shards, documents=100)) == toy_texts[:100]
    with pytest.raises(InputError, match=r"toy-1\.jsonl.*max_lost"):
        downloaded(shards, documents=101)


def test_a_subset_by_megabytes_is_the_shortest_prefix_of_that_size(store: Path, tmp_path: Path):
    texts = ["é" * 500 + str(i) for i in range(100, 200)]  # 1,003 bytes each
    shard = write_jsonl(tmp_path / "a.jsonl", texts)
    for megabytes, expected in [(0.000_001, 1), (0.001_003, 1), (0.001_004, 2), (0.05, 50), (1, 100)]:
        assert texts_of(downloaded(shard, megabytes=megabytes)) == texts[:expected]
    assert texts_of(downloaded(shard, megabytes=0.05, documents=7)) == texts[:7], "the limit that is reached first"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


SOME_WORDS = ["one two", "three  four\nfive", "six seven", "eight"]


@pytest.mark.parametrize(
    ("words", "documents", "counted"), [(2, 1, 2), (4, 1, 2), (5, 2, 5), (7, 3, 7), (8, 4, 8), (100, 4, 8)]
)
def test_a_subset_by_words_ends_before_the_document_that_would_exceed_them(
    store: Path, tmp_path: Path, words: int, documents: int, counted: int
):
    made = downloaded(write_jsonl(tmp_path / "a.jsonl", SOME_WORDS), words=words)
    assert texts_of(made) == SOME_WORDS[:documents], "a shorter document behind it isn't taken either"
    assert made.stats["words"] == counted


def test_words_of_other_sets_and_without_a_limit_are_not_counted(store: Path, shards: Path, toy_texts: list[str]):
    words = sum(len(text.split()) for text in toy_texts[200:203])
    made = downloaded(shards, sets=["toy 2"], words=words)
    assert (texts_of(made), made.stats["words"]) == (toy_texts[200:203], words)
    assert "words" not in downloaded(shards).stats


def test_a_first_document_with_more_words_than_the_limit_is_refused(store: Path, tmp_path: Path):
    assert "download.words" in refusal(write_jsonl(tmp_path / "a.jsonl", SOME_WORDS), words=1)


def test_a_limit_of_words_holds_in_a_mixture_of_sources(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    local_source(monkeypatch, "books", write_jsonl(tmp_path / "book.jsonl", ["a book of six words here"] * 90))
    texts = write_jsonl(tmp_path / "text.jsonl", ["three short words"] * 90)
    made = downloaded(texts, source={"files": 1, "books": 1}, words=100)
    assert sum(len(text.split()) for text in texts_of(made)) == made.stats["words"]
    assert 100 - 6 < made.stats["words"] <= 100


def test_a_limit_of_words_that_was_reached_stays_so_after_an_interruption(store: Path, tmp_path: Path, monkeypatch):
    settings = asked_for(write_jsonl(tmp_path / "a.jsonl", SOME_WORDS), words=4)
    with monkeypatch.context() as patch:
        patch.setattr(download_stage, "check_unchanged", interrupt)
        with pytest.raises(KeyboardInterrupt):
            download.fn(settings)
    assert texts_of(download.fn(settings)) == SOME_WORDS[:1], "later documents would fit"


def test_the_key_follows_what_the_files_hold_and_not_where_they_are(shards: Path, tmp_path: Path):
    before = key(shards)
    moved = shards.rename(tmp_path / "moved")
    assert {key(moved), key(moved / "*.jsonl"), key(f"{moved}/../moved/")} == {before}
    with (moved / "toy-1.jsonl").open("a") as file:
        file.write("\n")
    assert key(moved) != before


def test_an_edit_that_keeps_size_and_time_changes_the_key(store: Path, shards: Path):
    before = key(shards)
    path = shards / "toy-1.jsonl"
    about = path.stat()
    text = path.read_text()
    first = downloaded(shards)
    time.sleep(0.02)  # a clock tick of the file system
    path.write_text(text.replace("river", "RIVER"))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert key(shards) != before
    assert ["RIVER" in "".join(texts_of(made)) for made in (first, downloaded(shards))] == [False, True]
    path.write_text(text)
    assert key(shards) == before


def test_the_key_follows_the_names_and_the_order_of_the_files_and_the_subset(store: Path, shards: Path, toy_texts):
    files = [shards / "toy-0.jsonl", shards / "toy-1.jsonl"]
    assert key(*files) != key(*reversed(files))
    assert texts_of(downloaded(*reversed(files), documents=150)) == toy_texts[100:200] + toy_texts[:50]
    subsets = ({"documents": 5}, {"megabytes": 1}, {"words": 5}, {"part_megabytes": 1})
    keys = [key(shards, **settings) for settings in ({}, *subsets)]
    assert key(shards, words=0) == keys[0], "no limit is that of the keys without one"
    assert len(set(keys)) == len(keys)
    (shards / "toy-2.jsonl").rename(shards / "toy-2b.jsonl")
    assert key(shards) != keys[0], "a document's id has its file's name"


def test_the_key_of_hub_data_follows_its_revision_and_how_it_is_read(monkeypatch: pytest.MonkeyPatch):
    before = key(source="pile")
    pile = hub.SOURCES["pile"]
    other = {"revision": "f" * 40, "pattern": "val.*", "text": "content", "licence": "another"}
    for field, value in other.items():
        monkeypatch.setitem(hub.SOURCES, "pile", dataclasses.replace(pile, **{field: value}))
        assert (key(source="pile") == before) == (field == "licence")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"source": "files"}, "files"),
        ({"source": "pile", "files": ["a.jsonl"]}, "files"),
        ({"source": {"pile": 1, "files": 1}}, "files"),
        ({"source": {"pile": 0}}, "source"),
        ({"source": {"books": 1, "boks": 1}}, r"source\.mixture\.boks"),
        ({"source": "hub"}, "dataset"),
        ({"source": "pile", "dataset": "me/own"}, "dataset"),
        ({"source": "pile", "split": "test"}, "split"),
        ({"source": "hub", "dataset": "me/own", "documents_by": "line"}, "documents_by"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(settings: dict, field: str):
    with pytest.raises(ValidationError, match=rf"\b{field}\b"):
        Download(**settings)


def interrupted(monkeypatch: pytest.MonkeyPatch, work: Callable, at: int | str) -> list[Path]:
    """Break off a download before its file number `at`, or one that ends so, is forced to disk; the files up to it."""
    forced = []

    def breaking(path: Path) -> None:
        forced.append(path)
        if len(forced) == at or path.name.endswith(str(at)):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts, "fsync", breaking)
        with pytest.raises(KeyboardInterrupt) if at else nullcontext():
            work()
    return forced


@pytest.fixture
def ugly(shards: Path, toy_texts: list[str]) -> Path:
    """Shards with losses, with documents of other sets, one that is compressed, and an archive."""
    write_jsonl(shards / "toy-3.jsonl", [None, *toy_texts[:20], "", None], source="other")
    lines = (shards / "toy-1.jsonl").read_text().splitlines()
    (shards / "toy-1.jsonl").write_text("\n".join(["{", *lines[:50], "]", "", *lines[50:], "{}"]))
    (shards / "toy-2.jsonl.zst").write_bytes(zst((shards / "toy-2.jsonl").read_bytes()))
    (shards / "toy-2.jsonl").unlink()
    inside = {"a.jsonl": "\n".join(lines[:3]).encode(), "b.exe": b"MZ", "__MACOSX/d.csv": b"\0"}
    inside["c.csv"] = ("text,n\nbroken\n" + "".join(f'"{text}",1\n' for text in toy_texts[:3])).encode()
    (shards / "toy-4.zip").write_bytes(zip_of(inside))
    return shards


UGLY = {"part_megabytes": 0.02, "max_lost": 0.5}


@pytest.mark.parametrize(
    "settings",
    [
        {"part_megabytes": 0.04},
        {"sets": ["toy 0", "other"], "documents": 110},
        {"words": 12_000},
        {"source": {"files": 2, "books": 1}, "megabytes": 0.06},
        {"source": {"files": 1000, "books": 1}, "megabytes": 0.15, "part_megabytes": 0.04},
    ],
)
def test_an_interrupted_download_resumes_at_its_last_part_and_makes_the_same_bytes(
    store: Path, ugly: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict
):
    settings = asked_for(ugly, **UGLY | settings)
    books = write_jsonl(tmp_path / "book.jsonl", [f"{i} " * 100 for i in range(900)])
    local_source(monkeypatch, "books", books)
    forced = interrupted(monkeypatch, lambda: download.fn(settings), at=0)
    made = download.target(settings)
    whole = made.manifest
    draft = draft_of(made).name
    assert whole["stats"]["parts"] >= 3
    if settings.megabytes == 0.15:
        assert whole["stats"]["mixture"]["files"]["ended"]
    for at, path in enumerate(forced, 1):
        root = tmp_path / str(at)
        monkeypatch.setenv("CRAM_ARTIFACTS", str(root))
        interrupted(monkeypatch, lambda: download.fn(settings), at)
        assert artifacts_of("download") == []
        state = root / ".partial" / draft / WORK / "state.json"
        finished = json.loads(state.read_text())["parts"] if state.exists() else 0
        assert finished == [p.name for p in forced[: at - 1]].count("state.half"), path
        kept = sorted(state.parents[1].glob("part-*.parquet"))[:finished]
        times = {part.name: part.stat().st_mtime_ns for part in kept}
        again = download.fn(settings).manifest
        assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])
        assert {name: (made.path / name).stat().st_mtime_ns for name in times} == times, "not written again"


def test_a_failure_midway_publishes_nothing_and_leaves_no_litter_behind(
    store: Path, shards: Path, toy_texts, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(survey, "LOOKED_AT", 0)  # or it would be found before anything is read
    monkeypatch.setattr(containers, "BUFFER", 1000)
    whole = gzip.compress((shards / "toy-2.jsonl").read_bytes())
    (shards / "toy-2.jsonl").unlink()
    (shards / "toy-2.jsonl.gz").write_bytes(whole[:-1])
    threads = threading.active_count()
    assert "toy-2.jsonl.gz is truncated" in refusal(shards, part_megabytes=0.01)
    assert threading.active_count() == threads
    assert list(store.glob(".partial/download-*/part-*.parquet")), "it had begun"
    (shards / "toy-2.jsonl.gz").write_bytes(whole)
    made = downloaded(shards, part_megabytes=0.01)
    assert texts_of(made) == toy_texts
    others = {"lost.jsonl", "stage.json", "stats.json"}
    assert {p.name for p in made.path.iterdir()} == {*(p.name for p in parts_of(made)), *others}


def test_after_a_full_disk_a_rerun_resumes(store: Path, ugly: Path, tmp_path: Path, monkeypatch):
    whole = downloaded(ugly, **UGLY).manifest
    monkeypatch.setenv("CRAM_ARTIFACTS", str(tmp_path / "full"))
    writer = pq.ParquetWriter

    def open_writer(where: Path, *given: object, **settings: object) -> pq.ParquetWriter:
        return writer("/dev/full" if Path(where).name == "part-00001.parquet" else where, *given, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(pq, "ParquetWriter", open_writer)
        with pytest.raises(InputError, match=r"No space left on device: .*CRAM_ARTIFACTS"):
            downloaded(ugly, **UGLY)
    assert artifacts_of("download") == []
    again = downloaded(ugly, **UGLY).manifest
    assert (again["files"], again["stats"]) == (whole["files"], whole["stats"])


def local_source(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> None:
    """Have a source of the hub read one local file."""
    shards_of = sources.shards_of
    identity_of = sources.identity_of
    shard = hub.File(path.name, path.stat().st_size, path=path)
    monkeypatch.setattr(sources, "shards_of", lambda n, *p: [shard] if n == name else shards_of(n, *p))
    monkeypatch.setattr(sources, "identity_of", lambda n, *p: n if n == name else identity_of(n, *p))
    monkeypatch.setattr(hub, "SOURCES", {n: source for n, source in hub.SOURCES.items() if n != name})


def mixed(tmp_path: Path, weights: dict, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, list[int]], **settings):
    """A mixture of local files under the names of sources of the hub, with documents of these numbers of bytes."""
    for name, lengths in sizes.items():
        texts = [f"{name} " + "é" * ((length - len(name) - 1) // 2) for length in lengths]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
        local_source(monkeypatch, name, tmp_path / f"{name}.jsonl")
    return downloaded(source=weights, **settings)


def test_a_mixture_follows_its_weights_at_every_point(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(2)
    sizes = {
        "books": [rng.randrange(20_000, 60_000) for _ in range(20)],
        "wikipedia": [rng.randrange(100, 4_000) for _ in range(750)],
        "c4": [rng.randrange(50, 900) for _ in range(1500)],
    }
    weights = {"wikipedia": 3, "books": 1, "c4": 0.5}
    made = mixed(tmp_path, weights, monkeypatch, sizes, megabytes=1)
    bytes_of = dict.fromkeys(weights, 0)
    for document in documents_of(made):
        name = document.id.split("/")[0]
        bytes_of[name] += len(document.text.encode())
        for a in weights:
            for b in weights:  # no source is ahead of another by more than the last document that it gave
                assert bytes_of[a] / weights[a] <= bytes_of[b] / weights[b] + max(sizes[a]) / weights[a]
    about = made.stats["mixture"]
    assert {name: counts["bytes"] for name, counts in about.items()} == bytes_of
    assert not any(counts["ended"] for counts in about.values())
    ids = [d.id for d in documents_of(made) if d.id.startswith("books/")]
    assert ids == [f"books/books.jsonl:{i}" for i in range(1, len(ids) + 1)], "each source in its own order"


def test_the_other_sources_continue_when_one_is_exhausted_in_whatever_order_they_are_written(
    store: Path, tmp_path: Path, monkeypatch, caplog
):
    sizes = {"books": [1000] * 10, "wikipedia": [1000] * 99, "c4": [1000] * 99}
    weights = {"wikipedia": 1, "c4": 1, "books": 2}
    made = mixed(tmp_path, weights, monkeypatch, sizes, documents=110)
    assert [d.id.split("/")[0] for d in documents_of(made)][:4] == ["books", "c4", "wikipedia", "books"]
    about = made.stats["mixture"]
    assert {name: counts["ended"] for name, counts in about.items()} == {"books": True, "wikipedia": False, "c4": False}
    assert [about[name]["documents"] for name in ("books", "c4", "wikipedia")] == [10, 50, 50]
    assert "books is exhausted" in caplog.text
    assert downloaded(source=dict(reversed(weights.items())), documents=110) == made


def test_files_and_the_documentation_of_the_installed_packages_may_be_mixed(store: Path, shards: Path, toy_texts):
    made = downloaded(shards, source={"files": 1, "python-docs": 9}, megabytes=0.2)
    assert made.stats["mixture"]["python-docs"]["bytes"] / made.stats["bytes"] == pytest.approx(0.9, abs=0.1)
    assert {"docstrings", "readmes", "licences"} <= set(made.stats["by_source"])
    found = list(documents_of(made))
    own = [d for d in found if d.id.startswith("files/")]
    assert [d.text for d in own] == toy_texts[: len(own)]
    assert own[0].id == "files/toy-0.jsonl:1"
    assert not [d for d in found if d.id.startswith("python-docs/cram/")], "not our own"


def test_documents_of_other_sets_are_counted_and_not_lost(store: Path, shards: Path, toy_texts, caplog):
    (shards / "toy-3.jsonl").write_text("no JSON\n")
    made = downloaded(shards, sets=["toy 1", "toy 9"], max_lost=0.004)
    assert texts_of(made) == toy_texts[100:200]
    assert made.stats["other_sets"] == {"toy 0": 100, "toy 2": 100}
    assert "toy 9. There were documents from: toy 1, toy 0, toy 2." in caplog.text
    assert made.stats["lost"] == {"broken JSON": 1}
    made = downloaded(shards, sets=["toy 2"], documents=5)
    assert texts_of(made) == toy_texts[200:205], "a limit counts what is kept"
    with pytest.raises(InputError, match=r"toy 0, toy 1.*download\.sets"):
        downloaded(shards, sets=["toy 7"])


def test_a_prefix_of_real_shards_is_what_zstandard_and_json_read(store: Path, real_data: Path):
    shard = sorted((real_data / "pile-like").glob("train-*.jsonl.zst"))[0]
    limit = 1500
    expected: list[tuple[str, str, str]] = []
    with zstandard.open(shard, "rt", encoding="utf-8", newline="\n") as file:
        for number, line in zip(range(1, limit + 1), file, strict=False):
            record = json.loads(line)
            expected.append((f"{shard.name}:{number}", record["meta"]["pile_set_name"], record["text"]))
    made = downloaded(real_data / "pile-like" / "*.jsonl.zst", documents=limit, part_megabytes=2)
    assert list(documents_of(made)) == expected
    documents = Counter(source for _, source, _ in expected)
    assert {source: counts["documents"] for source, counts in made.stats["by_source"].items()} == documents
    assert made.stats["lost"] == {}
