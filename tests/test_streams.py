"""Any data set of the hub, or a folder in its layout, as a source. The double of the hub is that of test_hub."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import documents_of
from test_hub import Hub, address_of, online, serving  # noqa: F401 - the fixture `online`

from model import InputError
from tasks.corpus import columns, parts
from tasks.corpus.parts import parts_of
from tasks.download import Download, download
from tasks.store import Artifact

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
FIRST, SECOND = ("me/own", "a" * 40), ("me/own", "b" * 40)


def table(texts: list[str]) -> bytes:
    out = pa.BufferOutputStream()
    columns = {"content": texts, "topic": ["law", "tax", None] * (len(texts) // 3)}
    pq.write_table(pa.table(columns | {"doc": [{"text": text.upper()} for text in texts]}), out)
    return out.getvalue().to_pybytes()


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
    for name, data in files(TEXTS).items():
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_bytes(data)
    return tmp_path / "own"


def downloaded(dataset: str | Path, **params: object) -> Artifact:
    return download.fn(Download(source="hub", dataset=str(dataset), **{"config": "en", "documents": 0, **params}))


def texts_of(made: Artifact) -> list[str]:
    return [document.text for document in documents_of(made)]


def test_a_folder_and_the_hub_give_the_same_documents(hub: Hub, folder: Path):
    local, remote = downloaded(folder), downloaded("me/own")
    assert texts_of(local) == texts_of(remote) == TEXTS
    assert [d.id for d in documents_of(local)][:2] == ["own/en/train:1", "own/en/train:2"]
    assert local.stats["by_source"] == {"own/en/train": {"documents": 900, "characters": sum(map(len, TEXTS))}}
    assert local.stats["formats"] == {"datasets": {"content": 900}}
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
    whole, read = downloaded(folder, part_megabytes=0.01, sets=["own/en/train"]), []
    fsync, take = parts.fsync, columns.text_in

    def breaking(path: Path) -> None:
        fsync(path)
        if path.name.endswith("2.parquet"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts, "fsync", breaking)
        with pytest.raises(KeyboardInterrupt):
            downloaded(folder, part_megabytes=0.01)
    monkeypatch.setattr(columns, "text_in", lambda row, *others: read.append(row) or take(row, *others))
    again = downloaded(folder, part_megabytes=0.01)
    assert [part.read_bytes() for part in parts_of(again)] == [part.read_bytes() for part in parts_of(whole)]
    assert 0 < len(read) < 900


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
        ({"dataset": "EMPTY"}, ("EMPTY",)),
    ],
)
def test_what_a_data_set_lacks_gives_a_sentence_with_what_it_has(folder: Path, store: Path, params: dict, named: tuple):
    dataset = folder
    if params.pop("dataset", ""):
        dataset = folder.parent / "EMPTY"
        dataset.mkdir()
    with pytest.raises(InputError) as error:
        downloaded(dataset, **params)
    assert all(name in str(error.value) for name in named), error.value


def test_what_the_hub_refuses_gives_a_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError) as scripts:
        downloaded("me/code", config="")
    assert "me/code" in str(scripts.value)
    assert "code.py" in str(scripts.value)
    with pytest.raises(InputError) as missing:
        downloaded("me/none")
    assert "me/none" in str(missing.value)
    hub.gated.add("me/own")
    with pytest.raises(InputError) as gated:
        downloaded("me/own")
    assert "HF_TOKEN" in str(gated.value)


def test_parameters_of_another_source_are_refused():
    for params in ({"source": "hub"}, {"source": "pile", "dataset": "me/own"}, {"source": "pile", "split": "test"},
                   {"source": "hub", "dataset": "me/own", "documents_by": "line"}):  # fmt: skip
        with pytest.raises(ValueError, match=r"dataset|split|documents_by"):
            Download(**params)
