"""GLUE: its tasks, finding and reading their data, what bad data is refused with, and probes."""

import errno
import json
import os
import random
import re
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import document
from tokenizers.models import WordPiece

from flows.plan import Plan
from model.errors import InputError
from tasks.corpus.rows import PLAIN_TSV, records
from tasks.download import Download, download
from tasks.finetune import Finetune, finetune
from tasks.glue import data as glue
from tasks.glue import probes, reading
from tasks.glue.data import find_splits
from tasks.glue.own import by_name
from tasks.glue.pieces import read_piece
from tasks.glue.table import GLUE, HUB_GLUE, PROBES, TASKS, training_splits
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import SPECIALS, save_tokenizer, tokenizer_of
from tasks.text.words import ASCII, UNICODE, Normaliser

ABC = {"sentence": ["a", "b", "c"], "label": [0, 1, 0]}
USABLE = {"cola": ABC, "stsb": {"sentence1": ["a", "b", "c"], "sentence2": ["d", "e", "f"], "label": [0.0, 5.0, 2.5]}}
COLA = {
    "sentence": {"dtype": "string", "_type": "Value"},
    "label": {"names": ["unacceptable", "acceptable"], "_type": "ClassLabel"},
}


def write(folder: Path, task: str, split: str, data: dict | list[str], end: str = "\n", mark: str = "") -> Path:
    """A split: columns as Parquet, for CoLA with the names of the classes as on the hub; or lines as TSV."""
    path = folder / task / f"{split}.{'parquet' if isinstance(data, dict) else 'tsv'}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, dict):
        about = {"huggingface": json.dumps({"info": {"features": COLA}})} if task == "cola" else None
        pq.write_table(pa.table(data, metadata=about), path)
    else:
        path.write_bytes((mark + "".join(line + end for line in data)).encode(errors="surrogateescape"))
    return path


def check_words(text: str, *words: str) -> None:
    """All of these are in the text."""
    assert not [word for word in words if word not in text], text


def read_split(paths: list[Path], task: str, split: str, notes: list[str] | None = None) -> pd.DataFrame:
    """The rows of a split, of which notes are added to `notes`."""
    own = by_name(task, "")
    pieces = [read_piece(own, split, path, {}) for path in paths]
    return reading.check_split(own, TASKS[task], split, pieces, [] if notes is None else notes)


def read(data: str, task: str, pretrained: Artifact | None = None) -> reading.Data:
    """The data of a task of GLUE, or of a probe."""
    return reading.read(by_name(task, data), pretrained)


def refused(paths: list[Path], *words: str, split: str = "train") -> None:
    """A split of these files can't be used, and the error has these words."""
    with pytest.raises(InputError) as problem:
        read_split(paths, paths[0].parent.name, split)
    check_words(str(problem.value), *words)


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        data = {"sentence": [f"{split} {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
        write(tmp_path, "cola", split, data)
    return tmp_path


def test_the_table_covers_all_of_glue():
    assert {name: task.classes for name, task in TASKS.items() if task.classes != 2} == {"stsb": 1, "mnli": 3}
    sizes = [size for name in (*GLUE, "wnli") for split, size in TASKS[name].sizes.items() if split.startswith("test")]
    assert sum(sizes) == 425_205


# Reading


@pytest.mark.parametrize(
    "data",
    [
        {"idx": [5, 6], "label": pa.array([1, 0], pa.uint8()), "sentence": ["a", "b"]},
        {"label": pa.array([1, 0]).cast(pa.decimal128(20, 1)), "sentence": ["a", "b"]},
        {"label": ["acceptable", "unacceptable"], "sentence": ["a", "b"]},
        {"label": ["1", "0.0"], "sentence": ["a", "b"]},
        {"label": pa.array(["acceptable", "unacceptable"]).dictionary_encode(), "sentence": ["a", "b"]},
        ["label\tidx\tsentence", " acceptable \t7\ta", "0\t8\tb"],
    ],
)
def test_labels_may_be_any_numbers_or_names_of_classes_and_texts_of_any_type(tmp_path: Path, data: dict | list[str]):
    table = read_split([write(tmp_path, "cola", "train", data)], "cola", "train")
    assert table.to_dict("list") == {"sentence": ["a", "b"], "label": [1, 0]}
    assert table["label"].dtype == np.int64


LATIN = pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"a\xe9tc"))


@pytest.mark.parametrize(
    ("task", "data", "words"),
    [
        ("cola", {"label": None}, ["label"]),
        ("cola", {"label": [0, 1, -1]}, ["label of row 3 is -1", "unlabelled", "0 (unacceptable) or 1 (acceptable)"]),
        ("cola", {"label": [0, 2, 7]}, ["label of rows 2 and 3 is 2"]),
        ("cola", {"label": [0, 1, None]}, ["label of row 3 is None"]),
        ("cola", {"label": [0, 0.5, 1]}, ["label of row 2 is 0.5"]),
        ("cola", {"label": [True, False, True]}, ["label of rows 1, 2 and 3 is True"]),
        ("cola", {"sentence": LATIN}, ["sentence", "UTF-8"]),
        ("cola", {"sentence": pa.array([], pa.int64()), "label": pa.array([], pa.int64())}, ["no rows"]),
        ("stsb", {"label": [0.0, 5.1, 2.5]}, ["label of row 2 is 5.1", "0 to 5"]),
        ("stsb", {"label": [0.0, 5.0, float("inf")]}, ["label of row 3 is inf"]),
        ("cola", [], ["no rows"]),
        ("cola", ["gj04\t1\t\tThe sailors rode.", "gj04\t1\t\tThey ran."], ["sentence", "nyu-mll/glue"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\tb\t0", "c\t0"], ["line 3"]),
        ("cola", ["sentence\tlabel", "a\t1", "b", "c\t0"], ["line 3"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\t", "c\t0"], ["label of line 3 is ''"]),
        ("cola", ["sentence\tlabel", "plain\t0", "\udce9t\udce9\t1"], ["line 3", "UTF-8"]),
        ("stsb", ["sentence1\tsentence2\tlabel", "a\tb\t1.5", "c\td\t1,5"], ["label of line 3 is '1,5'"]),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_file_and_row(tmp_path: Path, task: str, data, words: list):
    if isinstance(data, dict):
        data = {name: values for name, values in (USABLE[task] | data).items() if values is not None}
    for split in ("train", "validation"):
        refused([write(tmp_path, task, split, data)], f"{task}/{split}", *words, split=split)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda data: b"not parquet", "Parquet"),
        (lambda data: b"", "empty"),
        (lambda data: data[:4] + bytes(396) + data[400:], "corrupt"),  # the first page; columns can still be listed
    ],
)
def test_a_damaged_file_is_refused_by_its_name_and_only_in_the_error(tmp_path: Path, damage, word: str, capfd):
    data = {"sentence": [f"{i:09}" * 9 for i in range(1000)], "label": [0, 1] * 500}
    path = write(tmp_path, "cola", "train", data)
    path.write_bytes(damage(path.read_bytes()))
    refused([path], "cola/train.parquet", word)
    assert "".join(capfd.readouterr()) == ""


def naive_tsv(path: Path) -> list[dict[str, str]]:
    """The rows of a TSV file by splitting its text."""
    header, *lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


ODD = [
    "", " ", "NA", "nan", "null", "None", "1.50", "007", "1e5",
    '"', '"a', 'b""', "'", "#", "\\", "\\t", "é\u2028", "\0",
]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_field_of_a_tsv_is_text_as_it_stands(tmp_path: Path, end: str):
    draw = np.random.default_rng(len(end))
    rows = [["".join(draw.choice(ODD, draw.integers(3))) for _ in range(3)] for _ in range(400)]
    lines = ["sentence1\tlabel\tsentence2", *("\t".join(row) for row in rows)]
    for mark, last in (("", end), ("\ufeff", "")):
        path = write(tmp_path, "rte", "train", lines, end, mark)
        path.write_bytes(path.read_bytes().removesuffix(end.encode()) + last.encode())
        assert [row for _, row in records(path, "rte.tsv", dialect=PLAIN_TSV)] == naive_tsv(path)


def test_training_data_of_one_class_is_refused_and_a_scored_split_of_one_is_said(cola: Path):
    write(cola, "cola", "validation", ABC | {"label": [1, 1, 1]})
    assert read(str(cola), "cola").notes == ["cola/validation: every label is acceptable, so its score says little."]
    write(cola, "cola", "train", ABC | {"label": [1, 1, 1]})
    with pytest.raises(InputError, match=r"cola/train\.parquet: every label is acceptable; .*Correct it\."):
        read(str(cola), "cola")


# Rows without a sentence


def gaps(*without: tuple[int, str | None]) -> dict:
    """1,000 examples; of the rows given, with what they have in place of a sentence."""
    sentences = [f"sentence {i}" for i in range(1000)]
    for row, text in without:
        sentences[row] = text
    return {"sentence": sentences, "label": [i % 2 for i in range(1000)]}


def test_training_rows_without_a_sentence_are_left_out_counted_once_and_named(tmp_path: Path):
    data = {name: [f"{name} {i}" for i in range(1000)] for name in ("sentence1", "sentence2")}
    data["label"] = [0, 1] * 500
    write(tmp_path, "rte", "validation", data)
    for row, first, second in ((2, None, ""), (6, " \t\u00a0\u200b", "b"), (999, "a", "")):
        data["sentence1"][row] = first
        data["sentence2"][row] = second
    write(tmp_path, "rte", "train", data)
    found = read(str(tmp_path), "rte")
    assert found.left_out == 3
    kept = [i for i in range(1000) if i not in (2, 6, 999)]
    assert found.tables["train"].to_dict("list") == {name: [values[i] for i in kept] for name, values in data.items()}
    check_words(found.notes[0], "rte/train.parquet", "rows 3, 7 and 1,000")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_more_than_one_percent_of_empty_rows_are_refused_and_no_scored_row_is_left_out(tmp_path: Path, split: str):
    ten = [(row, "" if row % 2 else " \u200b") for row in range(100, 110)]
    notes: list[str] = []
    table = read_split([write(tmp_path, "cola", split, gaps(*ten))], "cola", split, notes)
    assert len(table) == (990 if split == "train" else 1000)
    check_words(notes[0], f"cola/{split}.parquet", "rows 101, 102, 103, 104, 105 and 5 more")
    eleven = write(tmp_path, "cola", split, gaps(*ten, (500, "")))
    refused([eleven], f"cola/{split}: 11 of 1,000 rows", "rows 101, 102, 103, 104, 105 and 6 more", split=split)


# Repetitions


@pytest.mark.parametrize("task", ["mnli", "rte", "stsb", "mrpc", "qqp"])
def test_repeated_rows_are_those_of_a_naive_count_and_a_class_without_examples_is_named(tmp_path: Path, task: str):
    draw = np.random.default_rng(2)
    rows = {}
    for split, count in zip(training_splits(task), (200, 90, 60), strict=False):
        pairs = [[f" {n}\n" if draw.integers(2) else f"{n}" for n in pair] for pair in draw.integers(0, 15, (count, 2))]
        labels = draw.choice([0, 2 if task in ("mnli", "stsb") else 1], count).tolist()
        texts = dict(zip(TASKS[task].columns, zip(*pairs, strict=True), strict=True))
        write(tmp_path, task, split, texts | {"label": labels})
        rows[split] = [([*map(str.strip, pair)], label) for pair, label in zip(pairs, labels, strict=True)]
    same = sorted if task in ("stsb", "mrpc", "qqp") else list  # where the order of a pair means nothing
    train, *others = ([tuple(same(pair)) for pair, _ in of_split] for of_split in rows.values())
    data = read(str(tmp_path), task)
    assert data.tables["train"]["label"].dtype == (np.float32 if task == "stsb" else np.int64)
    assert data.duplicates == len(train) - len(set(train))
    assert [*data.shared.values()] == [sum(pair in other for pair in train) for other in others]
    *without, conflict = data.notes[: -len(others)]
    assert len(without) == (len(rows) if task == "mnli" else 0)
    for split, note in zip(rows, without, strict=False):
        check_words(note, f"mnli/{split}", "neutral")
    kinds = Counter(pair for pair, _ in {(pair, label) for pair, (_, label) in zip(train, rows["train"], strict=True)})
    check_words(conflict, f"{task}/train: {sum(kinds[pair] > 1 for pair in train)} rows")
    for note, other in zip(data.notes[-len(others) :], others, strict=True):
        check_words(note, f"{sum(pair in train for pair in other)} of the {len(other)} rows")


# Finding files


def test_shards_are_found_and_rows_named_in_their_files(cola: Path):
    shards = [cola / "cola" / f"train-0000{i}-of-00002.parquet" for i in range(2)]
    (cola / "cola" / "train.parquet").rename(shards[0])
    write(cola, "cola", shards[1].stem, {"sentence": ["late"] * 3, "label": [1, 0, 1]})
    assert find_splits(str(cola), "cola")["train"] == shards
    texts = read_split(shards, "cola", "train")["sentence"].tolist()
    assert texts == [*(f"train {i}" for i in range(40)), *["late"] * 3]
    write(cola, "cola", shards[1].stem, {"sentence": ["late"] * 3, "label": [1, 2, 1]})
    refused(shards, "cola/train-00001-of-00002.parquet: the label of row 2 is 2")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["train.parquet", "train.tsv"], ["train.parquet and train.tsv"]),
        (["train.parquet", "train-00000-of-00001.parquet"], ["train.parquet and train-00000-of-00001.parquet"]),
        (["train.parquet"], ["rte/validation (.parquet", "folders there: cola, rte"]),
    ],
)
def test_a_split_that_is_missing_or_there_twice_is_refused(cola: Path, files: list[str], words: list[str]):
    (cola / "rte").mkdir()
    for name in files:
        (cola / "rte" / name).touch()
    with pytest.raises(InputError) as problem:
        find_splits(str(cola), "rte")
    check_words(str(problem.value), *words)


@pytest.mark.parametrize(
    ("call", "task", "words"),
    [("is_file", "rte", "/rte/train.parquet"), ("iterdir", "rte", ""), ("open", "cola", "/cola/train.parquet")],
)
def test_what_the_system_refuses_is_an_error_of_the_step(store: Path, cola: Path, monkeypatch, call, task, words):
    before = getattr(Path, call)
    plan = Plan("finetune", {}, [])

    def fail(path: Path, *given, **named) -> None:
        if cola in (path, *path.parents):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return before(path, *given, **named)

    [run] = Finetune(data=str(cola), tasks=[task], seeds=1).runs()
    plan.trace(lambda: finetune(run, download(Download(source="python-docs"))))
    monkeypatch.setattr(Path, call, fail)
    plan.check()
    (problem,) = plan.problems.values()
    check_words(str(problem), "finetune", f"Permission denied: {cola}{words}.")


def test_local_files_of_any_name_are_read_without_a_request_and_leave_nothing_behind(
    cola: Path, tmp_path: Path, monkeypatch, capfd
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, Mock(side_effect=AssertionError("a request")))
    monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=AssertionError("a request")))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", scratch)
    odd = tmp_path / "a::b [1]*" / "{x}?#%20"
    odd.mkdir(parents=True)
    write(cola, "cola", "train", ["sentence\tlabel", "a\t0", "b\t1"])
    (cola / "cola" / "train.parquet").unlink()
    (cola / "cola").rename(odd / "cola")
    tables = read(str(odd), "cola").tables
    assert {split: len(table) for split, table in tables.items()} == {"train": 2, "validation": 40}
    assert not list(scratch.iterdir())
    assert "".join(capfd.readouterr()) == ""


def test_sentences_for_decontamination_may_lie_in_tsv_and_in_shards(cola: Path):
    (cola / "cola" / "validation.parquet").unlink()
    tsv = write(cola, "cola", "validation", ["label\tsentence", '0\t"One.', "1\tTwo."])
    shards = [
        write(cola, "cola", f"test-0000{i}-of-00002", {"sentence": texts})
        for i, texts in enumerate((["Three.", "Four."], ["Five."]))
    ]
    found = {"cola": {"validation": [tsv], "test": shards}}
    assert glue.evaluation_files(str(cola), ["cola", "rte"]) == found
    assert [*reading.sentences(by_name("cola", ""), found["cola"])] == [
        ("validation", "sentence", 0, ['"One.', "Two."]),
        ("test", "sentence", 0, ["Three.", "Four."]),
        ("test", "sentence", 2, ["Five."]),
    ]


def test_the_key_follows_the_content_of_the_data_not_its_place(cola: Path, tmp_path_factory):
    before = glue.identity(by_name("cola", str(cola)))
    moved = tmp_path_factory.mktemp("elsewhere") / "glue"
    cola.rename(moved)
    write(moved, "cola", "test", {"sentence": ["one"]})
    assert glue.identity(by_name("cola", str(moved))) == before
    write(moved, "cola", "train", {"sentence": ["changed"], "label": [1]})
    assert glue.identity(by_name("cola", str(moved))) != before
    assert glue.identity(by_name("cola", "nyu-mll/glue")) == {
        "repository": "nyu-mll/glue",
        "revision": HUB_GLUE.revision,
    }
    assert glue.identity(by_name("odd-word", "probes")) == {"probes": probes.VERSION}


# The hub

EVERY_SPLIT = [(task, split) for task in (*GLUE, "wnli") for split in TASKS[task].sizes]


def forget() -> None:
    """What this process knows of the hub."""
    for cache in (glue.fetch, glue.hub_evaluation, glue.hub_problem, reading._read):
        cache.cache_clear()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator:
    """A double of the hub with all splits, which are in `tmp_path` too, and an empty cache of the hub's client."""
    from huggingface_hub.utils import close_session
    from test_hub import serving, use_double

    files = {"README.md": b"#", "mnli_matched/validation-00000-of-00001.parquet": b"not this one"}
    for task, split in EVERY_SPLIT:
        rows = {name: [f"{task} {split} {name} {i}" for i in range(3)] for name in TASKS[task].columns}
        rows["label"] = [-1] * 3 if "test" in split else [0, 1, 2]
        files[f"{task}/{split}-00000-of-00001.parquet"] = write(tmp_path, task, split, rows).read_bytes()
    forget()
    with serving({(HUB_GLUE.repository, HUB_GLUE.revision): files}) as server:
        use_double(server, tmp_path / "hf", monkeypatch)
        yield server
    close_session()
    forget()


def test_glue_comes_from_the_hub_at_its_pinned_revision_and_then_from_its_cache(hub, tmp_path: Path):
    names = training_splits("mnli")
    rows = {split: pq.read_table(tmp_path / "mnli" / f"{split}.parquet").to_pydict() for split in names}

    def tables() -> dict[str, dict]:
        forget()
        found = read(HUB_GLUE.repository, "mnli").tables
        return {split: table.to_dict("list") for split, table in found.items()}

    assert tables() == rows
    file = glue.find_splits(HUB_GLUE.repository, "mnli")["train"][0].resolve()
    file.write_bytes(file.read_bytes()[:-9])
    assert tables() == rows
    fetched = [path.split("/")[-1] for method, path, _ in hub.log if method == "GET" and path.startswith("/cdn/")]
    assert Counter(name.split("-")[0] for name in fetched) == dict.fromkeys(names, 1) | {"train": 2}, "came again"
    hub.reset()
    assert tables() == rows
    assert hub.log == []


def test_all_validation_and_test_splits_come_from_the_hub_or_none(hub, tmp_path: Path, caplog):
    def evaluation() -> dict[str, bytes]:
        forget()
        found = glue.evaluation_files(HUB_GLUE.repository, TASKS)
        return {f"{task}/{split}": path.read_bytes() for task in found for split, [path] in found[task].items()}

    gone = "wnli/validation-00000-of-00001.parquet"  # the last that is requested
    names = [f"{task}/{split}" for task, split in EVERY_SPLIT if split != "train"]
    hub.fails[gone] = [404] * 9
    assert evaluation() == {}
    assert list((tmp_path / "hf").rglob("cola/validation-*.parquet")), "some of it is in the cache"
    [warning] = [record.message for record in caplog.records if record.name == glue.log.name]
    check_words(warning, gone)
    hub.reset()
    caplog.clear()
    assert evaluation() == {name: (tmp_path / f"{name}.parquet").read_bytes() for name in names}
    assert len(names) == 20
    assert not [record for record in caplog.records if record.name == glue.log.name]


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network_there_is_one_request_or_none_and_finetune_data_is_named(hub, monkeypatch, caplog, offline):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    hub.fails[""] = [500] * 99
    assert glue.evaluation_files(HUB_GLUE.repository, ["cola"]) == {}
    for task in ("cola", "mnli"):
        with pytest.raises(InputError, match=r"finetune\.data"):
            glue.find_splits(HUB_GLUE.repository, task)
    assert len(hub.log) == (0 if offline else 1), "not a listing, which the client retries for half a minute"
    assert not caplog.messages, "the problem is reported once, as the error"


# Probes


def pretrained(texts: list[str], reads: Normaliser = UNICODE) -> Artifact:
    """An artifact with what probes read: held-out documents, and a tokenizer."""
    artifact = Artifact(stage="pretrain", key="a" * 12)
    artifact.path.mkdir(parents=True)
    pq.write_table(pa.table({"text": texts}), artifact.path / "heldout.parquet")
    words = {entry: number for number, entry in enumerate([*SPECIALS, "a"])}
    save_tokenizer(tokenizer_of(WordPiece(words, unk_token="[UNK]"), reads), artifact.path)
    return artifact


@pytest.mark.parametrize("task", PROBES)
def test_probes_are_balanced_repeatable_split_by_document_and_intact_if_they_say_so(store: Path, task: str):
    rng = random.Random(5)
    columns = TASKS[task].columns
    seen = []
    texts = [document(rng, 12).replace("This text is", "All of this text is") for _ in range(120)]  # else too short
    start = pretrained(texts)
    data = read("probes", task, pretrained=start)
    whole = " ".join(texts)
    for split, again in probes.make(task, start).items():
        pd.testing.assert_frame_equal(data.tables[split], again)
    train = data.tables["train"]
    assert data.duplicates == train.duplicated(list(columns)).sum()
    for table in data.tables.values():
        assert list(table.columns) == [*columns, "label"]
        labels = table["label"].to_numpy()
        assert 0.35 < np.mean(labels) < 0.65
        examples = [" ".join(row[name] for name in columns) for row in table.to_dict("records")]
        intact = np.array([example in whole for example in examples])
        assert intact[labels == 1].all()
        assert intact[labels == 0].mean() < 0.2
        seen.append({word for example in examples for word in re.findall(r"\w+", example)})
    own = {re.match(r"All of this text is about (\w+)", text)[1] for text in texts}
    assert all(own & words for words in seen)
    assert not own & seen[0] & seen[1], "a document is in one split only"


SENTENCES = [  # | between two; what follows # is no prose
    "Wir sahen den alten Hafen im Nebel. |Über dem Wasser flogen am Abend noch Möwen!",
    "Мы долго ждали поезд на вокзале. |Он пришёл только поздно ночью, как всегда? #Да, всегда.",
    "यह घर बहुत पुराना है और बड़ा भी।|वहाँ एक पेड़ भी है जो ऊँचा है। |क्या आप आज शाम को आएँगे?",
    "هل وصل القطار إلى المحطة هذا المساء؟ |لا أعرف متى يصل القطار إلى هنا.",
    "今天的天气很好，我们一起去公园吧。|他终于问：“你们明天早上也会再来我们这里的公园里散步吗？”|我们的朋友明天可能要加班！？#短。",
    "吾輩は猫である、名前はまだない。 |『どこで生れたかは私もまるで知らないよ。』|とんと見当がつかぬのだ。",
    "ประเทศไทยมีอากาศร้อน |วันนี้ฝนตกหนักมาก",
]


@pytest.mark.parametrize("text", SENTENCES, ids=["de", "ru", "hi", "ar", "zh", "ja", "th"])
def test_sentences_and_words_are_found_in_any_script_and_put_together_as_they_were(text: str):
    found = probes.prose_of(re.sub(r"[|#]", "", text).replace(" ", "\n"))
    assert found == [sentence.strip() for sentence in text.split("#")[0].split("|")]
    for sentence in found:
        words = probes.words_of(sentence)
        assert probes.join(words) == sentence
        assert words == sentence.split() or (" " not in sentence and max(map(len, words)) <= 8 < len(words) * 2)


@pytest.mark.parametrize("task", ["word-order", "odd-word"])
def test_probes_without_spaces_between_words_have_none(store: Path, task: str):
    rng = random.Random(3)
    texts = []
    letters = "的一是不了人我在有他这中大来上个国到说们"
    for _ in range(200):
        sentences = ["".join(rng.choices(letters, k=rng.randint(14, 60))) for _ in range(4)]
        texts.append("。".join(sentences) + "。")
    sentences = {f"{s}。" for text in texts for s in text.split("。")}
    by_letters = {"".join(sorted(s)) for s in sentences}
    for table in probes.make(task, pretrained(texts)).values():
        assert len(table) > 100
        for row in table.to_dict("records"):
            assert (row["sentence"] in sentences) == row["label"]
            assert task == "odd-word" or "".join(sorted(row["sentence"])) in by_letters
            assert " " not in row["sentence"]


def test_another_sentence_is_any_of_the_other_documents():
    random = np.random.default_rng(0)
    assert {probes.another([*"abcdef"], range(2, 4), random) for _ in range(200)} == {*"abef"}


def test_probes_have_no_documents_that_the_vocabulary_does_not_read_and_need_some(store: Path):
    russian = ["Это предложение из восьми слов и нескольких букв. " * 9] * 200
    english = [document(random.Random(i), 9) for i in range(200)]
    for table in probes.make("word-order", pretrained([*english, *russian], ASCII)).values():
        assert len(table) > 100
        assert all(map(str.isascii, table["sentence"]))
    shutil.rmtree(store)
    with pytest.raises(InputError, match=r"neighbours/train.*heldout_fraction"):
        probes.make("neighbours", pretrained(["Only one sentence stands here, and it is this one.", *russian], ASCII))


# Real data


def test_real_glue_data_is_read_as_a_naive_reader_does_and_from_tsv_too(real_data: Path, tmp_path: Path):
    manifest = {about["file"]: about for about in json.loads((real_data / "glue" / "MANIFEST.json").read_text())}
    sizes = {}
    shared = {}
    for task in (*GLUE, "wnli"):
        about = TASKS[task]
        data = read(str(real_data / "glue"), task)
        assert data.left_out == 0
        shared[task] = data.shared
        kind = int if about.labels else np.float32
        names = [*about.columns, "label"]
        for split, table in data.tables.items():
            rows = pq.read_table(real_data / "glue" / task / f"{split}.parquet", columns=names).to_pylist()
            assert table.to_dict("records") == [row | {"label": kind(row["label"])} for row in rows]
            if len(rows) < 6000:
                lines = ["\t".join(names), *("\t".join(str(row[name]) for name in names) for row in rows)]
                tsv = write(tmp_path, task, split, lines, end="\r\n" if split == "train" else "\n")
                again = read_split([tsv], task, split)
                pd.testing.assert_frame_equal(again.reset_index(drop=True), table.reset_index(drop=True))
            sizes[f"{task}/{split}.parquet"] = (len(rows), about.sizes[split])
    assert sizes == {file: (about["rows"], about["official"]) for file, about in manifest.items()}
    assert (shared["cola"], shared["stsb"]) == ({"validation": 16}, {"validation": 11}), "five the other way round"
