"""Any data set of the hub, or a folder in its layout, as a source. The double of the hub is that of test_hub."""

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import documents_of, losses_of, texts_of
from files_table import jsonl_of, parquet_of, write
from test_corpus import interrupted
from test_hub import Hub, address_of, online, serving  # noqa: F401 - the fixture `online`

from model.errors import InputError
from tasks.corpus import documents
from tasks.corpus.documents import Options
from tasks.corpus.parts import parts_of
from tasks.corpus.streams import Split, StreamReader
from tasks.download import Download, download
from tasks.store.artifacts import Artifact

CARD = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: data/train-*.parquet}
  - {split: test, path: data/test.parquet}
- config_name: de
  data_files:
  - {split: train, path: de/train.parquet}
---
"""
TEXTS = [f"Document {i} has a few words of its own, {i * 7919}." for i in range(900)]
FIRST = ("me/own", "a" * 40)
SECOND = ("me/own", "b" * 40)


def table(texts: list[str]) -> bytes:
    columns = {"content": texts, "topic": ["law", "tax", None] * (len(texts) // 3)}
    return parquet_of(pa.table(columns | {"doc": [{"text": text.upper()} for text in texts]}))


def files(texts: list[str]) -> dict[str, bytes]:
    shards = {f"data/train-0000{i}-of-00003.parquet": table(texts[300 * i : 300 * i + 300]) for i in range(3)}
    return {
        "README.md": CARD,
        **shards,
        "data/test.parquet": table(["never read"] * 3),
        "de/train.parquet": table(TEXTS[:30]),
    }


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving({FIRST: files(TEXTS), ("me/code", "c" * 40): {"code.py": b"import datasets\n"}}) as found:
        yield found


@pytest.fixture
def hub(online: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:  # noqa: F811
    from datasets import config

    monkeypatch.setattr(config, "HF_ENDPOINT", address_of(online))
    return online


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "own", files(TEXTS))


def downloaded(dataset: str | Path, **params: object) -> Artifact:
    return download.fn(Download(source="hub", dataset=str(dataset), **{"config": "en", "documents": 0, **params}))


def test_a_folder_and_the_hub_give_the_same_documents(hub: Hub, folder: Path):
    local = downloaded(folder)
    remote = downloaded("me/own")
    assert texts_of(local) == texts_of(remote) == TEXTS
    assert [d.id for d in documents_of(local)][:2] == ["own/en/train:1", "own/en/train:2"]
    assert local.stats["by_source"] == {"own/en/train": {"documents": 900, "characters": sum(map(len, TEXTS))}}
    assert local.stats["formats"] == {"datasets": {"content": 900}}
    assert local.stats["shards"] == 1
    assert texts_of(downloaded(folder, config="de", column="doc.text")) == [text.upper() for text in TEXTS[:30]]
    by_topic = downloaded(folder, source_column="topic").stats["by_source"]
    assert {name: of["documents"] for name, of in by_topic.items()} == {"law": 300, "own/en/train": 300, "tax": 300}


def test_the_commit_of_first_use_stays_and_is_in_the_key(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    first = downloaded("me/own")
    assert first.manifest["params"]["sources"]["hub"]["revision"] == FIRST[1]
    monkeypatch.setitem(hub.files, SECOND, files(TEXTS[::-1]))
    assert downloaded("me/own") == first
    assert texts_of(downloaded("me/own", revision=SECOND[1]))[:300] == TEXTS[::-1][:300]


def test_a_changed_file_of_a_folder_changes_the_key(folder: Path, store: Path):
    before = downloaded(folder)
    (folder / "data/train-00000-of-00003.parquet").write_bytes(table(TEXTS[:3]))
    after = downloaded(folder)
    assert (after.key != before.key, after.stats["documents"]) == (True, 603)


def test_an_interrupted_download_reads_on_where_its_last_part_ended(folder: Path, store: Path, monkeypatch):
    whole = downloaded(folder, part_megabytes=0.01, sets=["own/en/train"])
    read = []
    take = documents.text_in
    interrupted(monkeypatch, lambda: downloaded(folder, part_megabytes=0.01), at="2.parquet")
    monkeypatch.setattr(documents, "text_in", lambda row, *others: read.append(row) or take(row, *others))
    again = downloaded(folder, part_megabytes=0.01)
    assert [part.read_bytes() for part in parts_of(again)] == [part.read_bytes() for part in parts_of(whole)]
    assert 0 < len(read) < 900


def test_a_reader_that_has_read_nothing_yet_stands_where_the_one_before_it_stopped(folder: Path):
    """A part may end before it: that of a mixture whose other sources are further behind."""
    read = []
    at = None
    for rows in (5, 0, 5):
        reader = StreamReader(Split(str(folder), "en", "train", ""), Options(), at)
        read += [record.text for record in islice(reader, rows)]
        at = reader.at
    assert read == TEXTS[:10]


def test_a_data_set_is_mixed_with_other_sources_and_limited(folder: Path, store: Path, tmp_path: Path):
    (tmp_path / "notes.txt").write_text("A note. " * 600)
    made = download.fn(
        Download(source={"hub": 1, "files": 1}, dataset=str(folder), config="en", files=[str(tmp_path / "notes.txt")],
                 megabytes=0.009)
    )  # fmt: skip
    sizes = {name: of["bytes"] for name, of in made.stats["mixture"].items()}
    assert sizes == {"files": pytest.approx(4500, rel=0.1), "hub": pytest.approx(4500, rel=0.1)}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"config": ""}, ("config", "en", "de")),
        ({"config": "fr"}, ("config", "en", "de")),
        ({"split": "dev"}, ("split", "train", "test")),
        ({"column": "txt"}, ("download.column", "content", "topic")),
        ({"revision": "main"}, ("revision",)),
    ],
)
def test_what_a_data_set_lacks_gives_a_sentence_with_what_it_has(folder: Path, store: Path, params: dict, named: tuple):
    with pytest.raises(InputError) as error:
        downloaded(folder, **params)
    assert all(name in str(error.value) for name in named), error.value


def test_an_empty_folder_is_named(store: Path, tmp_path: Path):
    (tmp_path / "EMPTY").mkdir()
    with pytest.raises(InputError, match="EMPTY"):
        downloaded(tmp_path / "EMPTY")


def test_what_the_hub_refuses_gives_a_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.gated.add("me/own")
    for dataset, named in (("me/code", "me/code.*code.py"), ("me/none", "me/none"), ("me/own", "HF_TOKEN")):
        with pytest.raises(InputError, match=f"(?s){named}"):
            downloaded(dataset, config="" if dataset == "me/code" else "en")


def of_shards(folder: Path, *shards: bytes, form: str) -> Path:
    """A data set of these files in the hub's layout."""
    return write(folder, {f"data/train-{i:05d}-of-{len(shards):05d}.{form}": data for i, data in enumerate(shards)})


def lines(*rows: dict) -> bytes:
    return jsonl_of(rows)


A = {"text": "one", "topic": 1}
DRIFTS = {  # the second of two files, the first of which has the row A; how it differs; and its texts
    "another column": (lines({"text": "two", "topic": 2, "url": "x"}), "url", ["two"]),
    "a column fewer": (lines({"text": "two"}), "topic", ["two"]),
    "a string for a number": (lines({"text": "two", "topic": "law"}), "topic (string, not int64)", ["two"]),
    "an object for a number": (lines({"text": "two", "topic": {"is": "law"}}), "topic (struct", ["two"]),
    "several types": (lines({"text": "two", "topic": 1}, {"text": "three", "topic": "law"}), "topic", ["two", "three"]),
    "a list for a text": (lines({"text": ["two", "three"], "topic": 2}), "text (list", ["two\nthree"]),
    "both for a text": (lines({"text": 'a "two"'}, {"text": ["three", "four"]}), "text", ['a "two"', "three\nfour"]),
}


@pytest.mark.parametrize("how", DRIFTS)
def test_files_whose_columns_and_types_drift_are_read_and_the_drift_is_named(how: str, tmp_path: Path, store, caplog):
    caplog.set_level(logging.INFO)
    second, named, texts = DRIFTS[how]
    folder = of_shards(tmp_path / "own", lines(A), second, lines(A | {"text": "last"}), form="jsonl")
    made = downloaded(folder, config="")
    assert texts_of(made) == ["one", *texts, "last"]
    [told, *_] = [record.getMessage() for record in caplog.records if "other columns" in record.getMessage()]
    assert "train-00001-of-00003.jsonl, after row 1" in told
    assert named in told


def test_tables_drift_too_and_a_rerun_reads_on_in_the_middle(tmp_path: Path, store: Path, monkeypatch):
    texts = [f"Document {i} has some words." for i in range(600)]
    tables = [
        {"text": texts[:200], "topic": pa.nulls(200)},
        {"topic": ["law"] * 200, "text": texts[200:400], "url": ["x"] * 200},
        {"text": texts[400:]},
    ]
    shards = [parquet_of(pa.table(table), row_group_size=30) for table in tables]
    folder = of_shards(tmp_path / "own", *shards, form="parquet")
    settings = {"config": "", "part_megabytes": 0.002}
    interrupted(monkeypatch, lambda: downloaded(folder, **settings), at="3.parquet")
    assert texts_of(downloaded(folder, **settings)) == texts


def test_a_value_that_is_no_text_is_lost_and_spoils_no_text_beside_it(tmp_path: Path, store: Path):
    """`datasets` would encode all values of such a column as JSON, and make strings of numbers in later files."""
    mixed = lines(A, {"text": 5}, {"text": 'a "b"'})
    made = downloaded(of_shards(tmp_path / "own", mixed, lines({"text": 6}), form="jsonl"), config="", max_lost=1)
    assert texts_of(made) == ["one", 'a "b"']
    assert [(loss["line"], loss["reason"]) for loss in losses_of(made)] == [
        (2, "text is not a string but int"), (4, "text is not a string but int"),
    ]  # fmt: skip


def one_row(**columns: object) -> bytes:
    return parquet_of([columns])


BROKEN = b'{"text": "a"\n{{\n'
WITHOUT_TEXT = ["train-00001-of-00002", "after row 1", "without text", "also with body"]
BAD_SHARDS: dict[str, tuple[str, list[bytes], list[str]]] = {  # suffix, files, what the sentence names
    "lines without the text": ("jsonl", [lines(A), lines({"body": "two", "topic": 1})], WITHOUT_TEXT),
    "a table without the text": ("parquet", [one_row(**A), one_row(body="two", topic=1)], WITHOUT_TEXT),
    "a first file that is damaged": ("jsonl", [BROKEN, lines(A)], ["train-00000-of-00002.jsonl, after row 0"]),
    "a second file that is damaged": ("jsonl", [lines(A), BROKEN], ["train-00001-of-00002.jsonl, after row 1"]),
}


@pytest.mark.parametrize("what", BAD_SHARDS)
def test_a_file_that_is_damaged_or_without_the_text_is_named_and_not_the_config(what: str, tmp_path: Path, store: Path):
    form, shards, named = BAD_SHARDS[what]
    with pytest.raises(InputError) as refused:
        downloaded(of_shards(tmp_path / "own", *shards, form=form), config="")
    said = str(refused.value)
    assert [name for name in named if name not in said] == []
    assert "config" not in said


def test_a_drift_on_the_hub_is_named_with_its_file(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    other = one_row(body="two")
    commit = "d" * 40
    monkeypatch.setitem(hub.files, ("me/own", commit), files(TEXTS) | {"data/train-00001-of-00003.parquet": other})
    with pytest.raises(InputError) as refused:
        downloaded("me/own", revision=commit)
    assert "in data/train-00001-of-00003.parquet, after row 300" in str(refused.value)
    assert "without content, topic, doc; also with body" in str(refused.value)


@pytest.mark.parametrize(
    ("form", "data"), [("csv", b"text,topic\none,1\ntwo,2\n"), ("json", b'[{"text": "one"}, {"text": "two"}]')]
)
def test_files_whose_types_are_known_only_when_read_are_read(form: str, data: bytes, tmp_path: Path, store: Path):
    assert texts_of(downloaded(of_shards(tmp_path / "own", data, form=form), config="")) == ["one", "two"]
