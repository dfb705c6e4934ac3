"""GLUE: what its tasks are, where their data is found, and what bad data gets."""

import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import document

from model import InputError
from tasks.glue import data as glue
from tasks.glue import probes
from tasks.glue.data import local_splits, read, read_split
from tasks.glue.tasks import GLUE, HUB_GLUE, TASKS, splits_of


def write(folder: Path, task: str, split: str, **columns: list) -> Path:
    """A split in the hub's layout."""
    path = folder / task / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def write_tsv(folder: Path, task: str, split: str, *lines: str, end: str = "\n", encoding: str = "utf-8") -> Path:
    """The same as TSV."""
    path = folder / task / f"{split}.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(line + end for line in lines).encode(encoding))
    return path


def refused(*paths: Path, split: str = "train") -> str:
    """What is said of a split that can't be used."""
    with pytest.raises(InputError) as problem:
        read_split(list(paths), paths[0].parent.name, split)
    return str(problem.value)


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        write(tmp_path, "cola", split, sentence=[f"{split} {i}" for i in range(40)], label=[i % 2 for i in range(40)])
    return tmp_path


def test_columns_and_sizes_cover_all_of_glue():
    assert set(GLUE) == {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"}
    assert sum(len(TASKS[name].validation) for name in GLUE) == 9
    assert [name for name, task in TASKS.items() if task.classes == 1] == ["stsb"]
    assert TASKS["mnli"].classes == 3
    assert sum(sum(TASKS[name].test.values()) for name in (*GLUE, "wnli")) == 425_205
    assert set(TASKS) - set(probes.COLUMNS) == {*GLUE, "wnli"}


def test_the_data_of_a_folder_comes_by_split_with_texts_and_labels_alone(cola: Path):
    data = read(str(cola), "cola")
    assert list(data.tables) == ["train", "validation"]
    assert data.tables["validation"].to_pylist()[3] == {"sentence": "validation 3", "label": 1}
    assert (data.notes, data.left_out, data.shared, data.duplicates) == ([], {}, {"validation": 0}, 0)


def test_further_columns_are_not_read_and_labels_may_be_of_any_number_type(tmp_path: Path):
    path = write(tmp_path, "cola", "train", idx=[5, 6], label=pa.array([1, 0], pa.uint8()), sentence=["a", "b"])
    floats = write(tmp_path, "cola", "train-0", label=[1.0, 0.0], sentence=pa.array(["a", "b"]).dictionary_encode())
    views = write(
        tmp_path, "cola", "train-1", label=pa.array([1, 0], pa.int8()), sentence=pa.array(["a", "b"], pa.string_view())
    )
    decimals = write(
        tmp_path, "cola", "train-2", label=pa.array([1, 0]).cast(pa.decimal128(20, 1)), sentence=["a", "b"]
    )
    for table in (read_split([file], "cola", "train")[0] for file in (path, floats, views, decimals)):
        assert table.to_pydict() == {"sentence": ["a", "b"], "label": [1, 0]}
        assert table.schema.field("label").type == pa.int64()


FOR_COLA = "0 (unacceptable) or 1 (acceptable)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": None}, ["no column label", "are sentence", "Expected sentence, label"]),
        ({"sentence": None, "text": ["a"] * 3}, ["no column sentence", "label, text"]),
        ({"label": [0, 1, -1]}, ["label of row 3 is -1", "unlabelled", FOR_COLA]),
        ({"label": [0, 2, 7]}, ["label of rows 2 and 3 is 2", FOR_COLA]),
        ({"label": [0, 0.5, 1]}, ["label of row 2 is 0.5", FOR_COLA]),
        ({"label": pa.array([0, 0.5, 1]).cast(pa.decimal128(2, 1))}, ["label of row 2 is 0.5", FOR_COLA]),
        ({"label": [*map(Decimal, (0, 1, -1))]}, ["label of row 3 is -1.0", "unlabelled"]),
        ({"label": [0, None, None]}, ["no label in rows 2 and 3", FOR_COLA]),
        ({"label": [0.0, float("nan"), 1.0]}, ["no label in row 2"]),
        ({"label": ["0", "1", "0"]}, ["label of rows 1, 2 and 3 is '0'", FOR_COLA]),
        ({"label": ["acceptable", "good", "unacceptable"]}, ["label of row 2 is 'good'", FOR_COLA]),
        ({"label": [True, False, True]}, ["labels are bool", "numbers"]),
        ({"label": [1, 1, 1]}, ["every label is 1", FOR_COLA]),
        ({"sentence": [1, 2, 3]}, ["int64", "column sentence", "text"]),
        ({"sentence": ["a", "b", "x" * 2_000_000]}, ["sentence of row 3", "2,000,000 characters", "100,000"]),
        ({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, ["no rows"]),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_data_that_cannot_be_used_is_refused_by_file_and_row(tmp_path: Path, split: str, change: dict, words: list):
    columns = {"sentence": ["a", "b", "c"], "label": [0, 1, 0]} | change
    path = write(tmp_path, "cola", split, **{k: v for k, v in columns.items() if v is not None})
    said = refused(path, split=split)
    for word in (f"cola/{split}", *words):
        assert word in said


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["0.0", "5.0", "2.5"], ["labels are text", "a number from 0 to 5"]),
        ([0.0, 5.1, 2.5], ["label of row 2 is 5.1", "0 to 5"]),
        ([0.0, -1.0, 2.5], ["label of row 2 is -1.0", "unlabelled"]),
        ([0.0, 5.0, float("nan")], ["no label in row 3"]),
        ([0.0, 5.0, float("inf")], ["label of row 3 is inf"]),
        ([2.5, 2.5, 2.5], ["every label is 2.5"]),
    ],
)
def test_scores_that_sts_b_cannot_have_are_refused(tmp_path: Path, labels: list, words: list[str]):
    path = write(tmp_path, "stsb", "train", sentence1=["a", "b", "c"], sentence2=["d", "e", "f"], label=labels)
    said = refused(path)
    for word in ("stsb/train", *words):
        assert word in said


@pytest.mark.parametrize("name", ["idx", "index"])
@pytest.mark.parametrize(
    ("places", "row", "found"),
    [
        ([0, 2, 1], 2, "2"),
        (["2", "1", "0"], 1, "'2'"),
        ([0.0, 2.0, 1.0], 2, "2.0"),
        ([0, 1, 1], 3, "1"),
        ([1, 2, 3], 1, "1"),
        ([7, 3, 5], 1, "7"),
        ([0, 1, None], 3, "None"),
        (["0", "one", "2"], 2, "'one'"),
    ],
)
def test_a_test_split_in_another_order_than_the_leaderboards_is_refused(
    tmp_path: Path, name: str, places: list, row: int, found: str
):
    columns = {"sentence": ["a", "b", "c"], "label": [0, 1, 0]}
    said = refused(write(tmp_path, "cola", "test", **columns, **{name: places}), split="test")
    assert (
        f"cola/test.parquet is not in the order in which the leaderboard counts: the {name} of row {row} is {found}"
        in said
    )
    assert f"expected {row - 1}. Sort" in said
    for split in ("train", "validation"):
        path = write(tmp_path, "cola", split, **columns, **{name: places})
        assert len(read_split([path], "cola", split)[0]) == 3


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], ["0", "1", " 2", "3"]])
def test_a_test_split_in_the_leaderboards_order_is_read_in_shards_too(tmp_path: Path, places: list):
    halves = [
        write(tmp_path, "cola", f"test-{i}", sentence=["a", "b"], idx=places[2 * i : 2 * i + 2], id=[9, 8])
        for i in range(2)
    ]
    assert len(read_split(halves, "cola", "test")[0]) == 4
    assert "test-1.parquet is not in the order" in refused(halves[1], halves[0], split="test")


def test_of_many_rows_the_first_are_named(tmp_path: Path):
    labels = [9 if i % 2 else i % 4 // 2 for i in range(4000)]
    said = refused(write(tmp_path, "cola", "train", sentence=["a"] * 4000, label=labels))
    assert "the label of rows 2, 4, 6, 8, 10 and 1,995 more is 9" in said


def test_names_of_the_classes_are_labels_too(tmp_path: Path):
    names = ["not_entailment", "entailment", "entailment"]
    for label in (names, pa.array(names).dictionary_encode()):
        path = write(tmp_path, "rte", "train", sentence1=["a", "b", "c"], sentence2=["d", "e", "f"], label=label)
        assert read_split([path], "rte", "train")[0]["label"].to_pylist() == [1, 0, 0]
    lines = ("sentence1\tsentence2\tlabel", "a\tb\tnot_entailment", "c\td\t0", "e\tf\t entailment ")
    assert read_split([write_tsv(tmp_path, "wnli", "train", *lines)], "wnli", "train")[0]["label"].to_pylist() == [
        0,
        0,
        1,
    ]


@pytest.fixture
def gaps() -> dict:
    """1,000 examples, some of which have no sentence."""
    sentences = [f"sentence {i}" for i in range(1000)]
    sentences[2], sentences[6], sentences[999] = None, " \t\u00a0\u200b", ""
    return {"sentence": sentences, "label": [i % 2 for i in range(1000)]}


def test_training_rows_without_a_sentence_are_left_out_counted_and_named(cola: Path, gaps: dict):
    write(cola, "cola", "train", **gaps)
    data = read(str(cola), "cola")
    assert data.left_out == {"train": {"null": 1, "empty": 2}}
    assert data.tables["train"]["sentence"].to_pylist() == [
        f"sentence {i}" for i in range(1000) if i not in (2, 6, 999)
    ]
    assert data.tables["train"]["label"].to_pylist()[:6] == [0, 1, 1, 0, 1, 1]
    (note,) = data.notes
    assert "cola/train.parquet: left out rows 3, 7 and 1,000" in note
    assert "1 null and 2 empty" in note


def test_a_pair_without_one_of_its_sentences_is_left_out_once(tmp_path: Path):
    first, second = ([f"{name} {i}" for i in range(300)] for name in "ab")
    first[4], second[4] = None, ""
    second[9] = ""
    path = write(tmp_path, "rte", "train", sentence1=first, sentence2=second, label=[i % 2 for i in range(300)])
    table, counts, _ = read_split([path], "rte", "train")
    assert (len(table), counts) == (298, {"null": 1, "empty": 1})


def test_more_than_one_percent_of_such_rows_are_refused(tmp_path: Path, gaps: dict):
    for i in range(100, 107):
        gaps["sentence"][i] = ""
    assert sum(read_split([write(tmp_path, "cola", "train", **gaps)], "cola", "train")[1].values()) == 10
    gaps["sentence"][500] = None
    said = refused(write(tmp_path, "cola", "train", **gaps))
    for word in (
        "cola/train: 11 of 1,000 rows without a sentence",
        "at most 1%",
        "rows 3, 7, 101, 102, 103 and 6 more",
    ):
        assert word in said


def test_of_the_rows_that_are_scored_none_is_left_out(cola: Path, gaps: dict):
    path = write(cola, "cola", "validation", **gaps)
    assert "cola/validation.parquet has no sentence (null) in row 3" in refused(path, split="validation")
    write(cola, "cola", "validation", **gaps | {"sentence": [sentence or "" for sentence in gaps["sentence"]]})
    data = read(str(cola), "cola")
    assert len(data.tables["validation"]) == 1000
    assert data.left_out == {}
    assert [
        note for note in data.notes if "cola/validation.parquet: a sentence is empty in rows 3, 7 and 1,000" in note
    ]


@pytest.mark.parametrize("split", ["validation", "test"])
def test_a_split_without_sentences_is_not_scored(tmp_path: Path, split: str):
    sentences, labels = [f"sentence {i}" for i in range(200)], [i % 2 for i in range(200)]
    for i, few in ((3, True), (150, True), (199, False)):
        sentences[i] = " \u200b"
        path = write(tmp_path, "cola", split, sentence=sentences, label=labels)
        if few:
            table, left_out, _ = read_split([path], "cola", split)
            assert (table["sentence"].to_pylist(), left_out) == (sentences, {})
    said = refused(path, split=split)
    for word in (f"cola/{split}: 3 of 200 rows without a sentence", "at most 1%", "rows 4, 151 and 200"):
        assert word in said
    path = write(tmp_path, "cola", split, sentence=[""] * 200, label=labels)
    assert "200 of 200 rows without a sentence" in refused(path, split=split)


def test_a_class_without_examples_is_told(tmp_path: Path):
    path = write(tmp_path, "mnli", "train", premise=["a", "b"], hypothesis=["c", "d"], label=[0, 2])
    assert read_split([path], "mnli", "train")[2] == ["mnli/train has no example of neutral."]


def test_training_rows_that_are_scored_too_are_counted_and_warned_of(tmp_path: Path):
    train = {
        "premise": ["a", " b ", "c", "c", "d"],
        "hypothesis": ["x", "y", "z", "z\n", "x"],
        "label": [0, 1, 2, 1, 0],
    }
    write(tmp_path, "mnli", "train", **train)
    seen = {"premise": ["b", "c", "a", "d"], "hypothesis": ["y", "z", "z", "y"], "label": [0, 1, 2, 0]}
    new = {"premise": ["x", "e", "f"], "hypothesis": ["a", "y", "z"], "label": [0, 1, 2]}
    write(tmp_path, "mnli", "validation_matched", **seen)
    write(tmp_path, "mnli", "validation_mismatched", **new)
    data = read(str(tmp_path), "mnli")
    assert data.shared == {"validation_matched": 3, "validation_mismatched": 0}
    assert data.duplicates == 1
    conflict, shared = data.notes
    assert conflict == "mnli/train: 2 rows with texts that occur there with another label too."
    assert "stand in validation_matched too: 3 (rows 2, 3 and 4); 2 of its 4 rows seen in training" in shared


@pytest.mark.parametrize("task", ["stsb", "mrpc", "qqp", "rte"])
def test_a_pair_the_other_way_round_is_the_same_where_the_order_means_nothing(tmp_path: Path, task: str):
    first, second = TASKS[task].columns
    train = {first: ["a", "b ", "c", "d", "b"], second: ["b", "a", "d", "c", "e"], "label": [0, 1, 0, 0, 1]}
    write(tmp_path, task, "train", **train)
    write(
        tmp_path, task, "validation", **{first: ["x", "d", "e", "a"], second: ["y", "c", "b", "a"], "label": [0, 1] * 2}
    )
    data = read(str(tmp_path), task)
    if task == "rte":
        assert (data.shared, data.duplicates) == ({"validation": 1}, 0)
        assert "stand in validation too: 1 (row 4)" in data.notes[0]
        return
    assert (data.shared, data.duplicates) == ({"validation": 3}, 2)
    conflict, shared = data.notes
    assert conflict == f"{task}/train: 2 rows with texts that occur there with another label too."
    assert "validation too, in either order: 3 (rows 3, 4 and 5); 2 of its 4 rows" in shared


def test_repeated_rows_are_counted_as_a_naive_count_does(tmp_path: Path):
    random = np.random.default_rng(2)
    texts = [f" {n} " if n % 3 else f"{n}" for n in random.integers(0, 60, 200)]
    labels = random.integers(0, 2, 200).tolist()
    write(tmp_path, "sst2", "train", sentence=texts, label=labels)
    write(tmp_path, "sst2", "validation", sentence=[f"{n}" for n in range(50, 90)], label=[0, 1] * 20)
    data, stripped = read(str(tmp_path), "sst2"), [text.strip() for text in texts]
    assert data.duplicates == 200 - len(set(stripped))
    assert data.shared["validation"] == sum(int(text) >= 50 for text in stripped)
    several = [
        text for text in set(stripped) if len({b for a, b in zip(stripped, labels, strict=True) if a == text}) > 1
    ]
    rows = sum(text in several for text in stripped)
    assert f"sst2/train: {rows} rows with texts" in data.notes[0]


def test_junk_in_place_of_parquet_is_refused(cola: Path):
    path = cola / "cola" / "train.parquet"
    path.write_text("not parquet")
    assert "cola/train.parquet is no Parquet file" in refused(path)
    path.write_text("")
    assert "cola/train.parquet is empty" in refused(path)


def test_text_that_is_not_utf_8_is_refused_with_its_place(tmp_path: Path):
    offsets = pa.py_buffer(np.array([0, 1, 3], np.int32))
    latin = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"a\xe9t"))
    said = refused(write(tmp_path, "cola", "train", sentence=latin, label=[0, 1]))
    assert "cola/train.parquet: sentence of row 2 is not UTF-8" in said
    lines = ("sentence\tlabel", "plain\t0", "\u00e9t\u00e9\t1")
    assert "cola/train.tsv is not UTF-8 (line 3" in refused(
        write_tsv(tmp_path, "cola", "train", *lines, encoding="latin1")
    )


def test_a_tsv_file_is_the_same_as_a_parquet_file_of_its_rows(tmp_path: Path):
    columns = {
        "sentence1": ['He said "no.', "It's", "a\rb"],
        "sentence2": ['"', "çx", "b\u2028c"],
        "label": [3.8, 0, 5],
    }
    table = read_split([write(tmp_path, "stsb", "train", **columns)], "stsb", "train")[0]
    assert table.schema.field("label").type == pa.float32(), "as on the hub"
    rows = zip(columns["sentence1"], ("3.80", "0", "5."), columns["sentence2"], strict=True)
    lines = ["\ufeffsentence1\tlabel\tsentence2", *("\t".join(row) for row in rows)]
    for end in ("\n", "\r\n"):
        assert read_split([write_tsv(tmp_path, "stsb", "train", *lines, end=end)], "stsb", "train")[0] == table
    path = write_tsv(tmp_path, "stsb", "train", *lines)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_split([path], "stsb", "train")[0] == table


def test_quotes_in_tsv_are_characters_and_eat_no_rows(tmp_path: Path):
    lines = ['"' * (i % 3) + f"sentence {i}\t{i % 2}" for i in range(99)]
    table = read_split([write_tsv(tmp_path, "cola", "train", "sentence\tlabel", *lines)], "cola", "train")[0]
    assert table["sentence"].to_pylist() == [line.split("\t")[0] for line in lines]


def naive_tsv(path: Path) -> list[dict[str, str]]:
    """The rows of a TSV file by splitting its text."""
    header, *lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


ODD = (
    "",
    " ",
    "NA",
    "nan",
    "null",
    "None",
    "1.50",
    "007",
    "1e5",
    '"',
    '"a',
    'b""',
    "'",
    "#",
    "\\",
    "\\t",
    "é\u2028",
    "\r",
    "\0",
)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("seed", range(4))
def test_every_field_of_a_tsv_is_text_as_it_stands(tmp_path: Path, seed: int, end: str):
    random = np.random.default_rng(seed)
    rows = [
        ["".join(random.choice(ODD, random.integers(3))) for _ in range(3)] for _ in range(12_000 if not seed else 99)
    ]
    lines = ["sentence1\tlabel\tsentence2", *("\t".join(row) for row in rows)]
    path = write_tsv(tmp_path, "rte", "train", *lines, end=end, encoding="utf-8-sig" if seed % 2 else "utf-8")
    found = glue.read_file(path, "rte", optional=["sentence1", "sentence2", "label", "idx"])
    assert found.to_pylist() == naive_tsv(path)
    one = write_tsv(tmp_path, "cola", "test", "sentence", *(row[0] for row in rows), "", end=end)
    assert glue.read_file(one, "cola", ["sentence"]).to_pylist() == naive_tsv(one)


def test_labels_outside_the_classes_that_a_file_names_are_refused_by_row(tmp_path: Path):
    from datasets import ClassLabel, Dataset, Features, Value

    path = write(tmp_path, "cola", "train", sentence=["a", "b", "c"], label=[0, 1, 0])
    named = Features(sentence=Value("string"), label=ClassLabel(names=["unacceptable", "acceptable"]))
    schema = Dataset.from_dict({"sentence": ["a", "b", "c"], "label": [0, 1, 0]}, named).data.schema
    assert "acceptable" in str(schema.metadata)
    for labels, row in (([0, 1, 0], None), ([0, 7, 1], 2), ([0, 1, None], 3)):
        pq.write_table(pa.table([["a", "b", "c"], labels], schema=schema), path)
        if row:
            assert f"row {row}" in refused(path)
        else:
            assert read_split([path], "cola", "train")[0]["label"].to_pylist() == labels


def test_local_files_are_read_without_a_request_and_leave_nothing_behind(
    cola: Path, tmp_path: Path, monkeypatch, capfd
):
    import socket
    import tempfile

    import datasets

    def refuse(*_: object) -> None:
        raise AssertionError("a request")

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    odd = (tmp_path / "a::b [1]*" / "{x}?#%20").absolute()
    odd.parent.mkdir()
    cola.joinpath("cola").rename(odd)
    (odd / "validation.parquet").unlink()
    write_tsv(odd.parent, odd.name, "validation", "sentence\tlabel", "a\t0", "b\t1")
    for split, suffix, rows in (("train", "parquet", 40), ("validation", "tsv", 2)):
        assert len(read_split([odd / f"{split}.{suffix}"], "cola", split)[0]) == rows
    assert not list(scratch.iterdir())
    assert not (tmp_path / "cache").exists()
    assert "".join(capfd.readouterr()) == ""


def test_a_full_disk_is_not_taken_for_a_damaged_file(cola: Path, monkeypatch):
    import tempfile

    from datasets.arrow_writer import ArrowWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowWriter, "write_table", full)
    said = refused(cola / "cola" / "train.parquet")
    assert tempfile.gettempdir() in said
    assert "TMPDIR" in said


def test_damage_within_a_parquet_file_is_refused(tmp_path: Path, capfd):
    path = tmp_path / "cola" / "train.parquet"
    write(tmp_path, "cola", "train", sentence=[f"{i:09}" * 9 for i in range(999)], label=[i % 2 for i in range(999)])
    data = bytearray(path.read_bytes())
    data[4:400] = bytes(396)  # of the first page, so that the columns' names can still be read
    path.write_bytes(data)
    assert "cola/train.parquet" in refused(path)
    assert "".join(capfd.readouterr()) == "", "it is said once, by the error"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ["is empty"]),
        (["sentence\tlabel"], ["has no rows"]),
        (["gj04\t1\t\tThe sailors rode."], ["no column sentence, label"]),
        (["sentence\tlabel", "a\t1", "b\tb\t0", "c\t0", "d"], ["lines 3 and 5", "2 fields", "first of them has 3"]),
        (["sentence\tlabel", "a\t1", "", "c\t0"], ["line 3", "first of them has 1"]),
        (["sentence\tlabel", "a\t1", "b\tyes", "c\t0"], ["label of row 2 is 'yes'", FOR_COLA]),
        (["sentence\tlabel", "a\t1", "b\t", "c\t0"], ["no label in row 2"]),
        (["sentence\tlabel", "a\t1", "b\t-1", "c\t0"], ["label of row 2 is '-1'", "unlabelled"]),
        (["sentence\tlabel", "a\t1", "b\t1e999", "c\t0"], ["label of row 2 is '1e999'"]),
        (["sentence\tlabel\tlabel", "a\t1\t0"], ["column label twice"]),
    ],
)
def test_bad_tsv_is_refused_by_file_and_line(tmp_path: Path, lines: list[str], words: list[str]):
    said = refused(write_tsv(tmp_path, "cola", "train", *lines))
    for word in ("cola/train.tsv", *words):
        assert word in said


@pytest.mark.parametrize("score", ["high", "nan", "1,5", "--1"])
def test_what_is_no_number_in_a_tsv_of_sts_b_is_refused_by_row(tmp_path: Path, score: str):
    lines = ("sentence1\tsentence2\tlabel", "a\tb\t1.5", f"c\td\t{score}")
    said = refused(write_tsv(tmp_path, "stsb", "train", *lines))
    assert f"stsb/train.tsv: the label of row 2 is {score!r}; expected a number from 0 to 5" in said


def test_a_missing_task_is_told_with_those_there_are(cola: Path):
    with pytest.raises(InputError, match=r"no rte/train\.parquet, rte/train-\*\.parquet or .*\(folders there: cola\)"):
        read(str(cola), "rte")
    with pytest.raises(InputError, match=r"no mnli/train.* \(folders there: none\)"):
        glue.identity(str(cola / "nowhere"), "mnli")


@pytest.mark.parametrize("method", ["is_file", "iterdir"])
def test_a_folder_that_may_not_be_read_is_told(cola: Path, monkeypatch, method: str):
    def forbidden(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, method, forbidden)
    asked = [lambda: glue.identity(str(cola), "rte"), lambda: read(str(cola), "rte")]
    if method == "is_file":
        asked.append(lambda: glue.evaluation_files(str(cola), ["rte"]))
    for ask in asked:
        with pytest.raises(InputError, match=rf"{cola}\S* can't be read: Permission denied\. .*change their rights"):
            ask()


def test_a_file_that_may_not_be_read_is_told_before_it_is_called_no_parquet(cola: Path, monkeypatch):
    def forbidden(path: Path, **_) -> None:
        raise PermissionError(errno.EACCES, f"Failed to open local file '{path}'")  # as Arrow says it

    monkeypatch.setattr(pq, "ParquetFile", forbidden)
    assert "train.parquet can't be read: Permission denied. " in refused(cola / "cola" / "train.parquet")


def test_test_data_comes_without_labels_if_asked_for(cola: Path):
    with pytest.raises(InputError, match=r"no cola/test\.parquet, .*leave finetune\.test false"):
        read(str(cola), "cola", test=True)
    assert list(read(str(cola), "cola").tables) == ["train", "validation"]
    write(cola, "cola", "test", idx=[0, 1, 2], sentence=["x", "y", "train 1"])
    data = read(str(cola), "cola", test=True)
    assert list(data.tables) == ["train", "validation", "test"]
    assert data.tables["test"].to_pydict() == {"sentence": ["x", "y", "train 1"], "label": [-1, -1, -1]}
    assert data.shared == {"validation": 0, "test": 1}
    assert "cola/test has 3 rows, not the 1,063 that the leaderboard takes." in data.notes
    write(cola, "cola", "test", sentence=["x", None])
    with pytest.raises(InputError, match=r"cola/test\.parquet has no sentence \(null\) in row 2"):
        read(str(cola), "cola", test=True)
    lines = ("index\tsentence1\tsentence2", "0\ta\t", *(f"{i}\tc\td" for i in range(1, 100)))
    table, left_out, notes = read_split([write_tsv(cola, "stsb", "test", *lines)], "stsb", "test")
    assert table.to_pydict() == {"sentence1": ["a"] + ["c"] * 99, "sentence2": [""] + ["d"] * 99, "label": [-1] * 100}
    assert left_out == {}
    assert "stsb/test.tsv: a sentence is empty in row 1; no row that is scored is left out." in notes
    with pytest.raises(InputError, match="no test data"):
        read("probes", "word-order", test=True)


def test_splits_of_the_hubs_file_names_are_found_and_rows_named_in_their_files(cola: Path):
    shards = [cola / "cola" / f"train-0000{i}-of-00002.parquet" for i in range(2)]
    (cola / "cola" / "train.parquet").rename(shards[0])
    pq.write_table(pa.table({"sentence": ["late"] * 3, "label": [1, 0, 1]}), shards[1])
    found = local_splits(cola, "cola")
    assert found["train"] == shards
    assert read_split(found["train"], "cola", "train")[0]["sentence"].to_pylist()[38:42] == [
        "train 38",
        "train 39",
        "late",
        "late",
    ]
    pq.write_table(pa.table({"sentence": ["late"] * 3, "label": [1, 2, 1]}), shards[1])
    assert "cola/train-00001-of-00002.parquet: the label of row 2 is 2" in refused(*shards)
    shards[1].unlink()
    with pytest.raises(InputError, match=r"has 1 of 2 shards of train, "):
        local_splits(cola, "cola")


@pytest.mark.parametrize("other", ["train.tsv", "train-00000-of-00001.parquet"])
def test_a_split_that_is_there_twice_is_refused(cola: Path, other: str):
    (cola / "cola" / other).write_bytes((cola / "cola" / "train.parquet").read_bytes())
    with pytest.raises(InputError, match=rf"train\.parquet and {re.escape(other)}"):
        local_splits(cola, "cola")


def test_what_is_looked_for_in_the_text_may_lie_in_tsv_too(cola: Path):
    from tasks.glue.sentences import sentences

    (cola / "cola" / "validation.parquet").unlink()
    paths = {"validation": [write_tsv(cola, "cola", "validation", "label\tsentence", '0\t"One.', "1\tTwo.")]}
    paths["test"] = [write_tsv(cola, "cola", "test", "index\tsentence", "0\tThree.")]
    assert glue.evaluation_files(str(cola), ["cola", "rte"]) == {"cola": paths}
    assert [*sentences(paths["validation"], "cola")] == [("sentence", 0, ['"One.', "Two."])]
    assert [*sentences(paths["test"], "cola")] == [("sentence", 0, ["Three."])]


def test_the_key_follows_the_content_of_the_data_not_its_place(cola: Path, tmp_path_factory):
    before = glue.identity(str(cola), "cola")
    moved = tmp_path_factory.mktemp("elsewhere") / "glue"
    cola.rename(moved)
    assert glue.identity(str(moved), "cola") == before
    write(moved, "cola", "test", sentence=["one"])
    assert glue.identity(str(moved), "cola") == before
    assert glue.identity(str(moved), "cola", test=True) != before
    write(moved, "cola", "train", sentence=["changed"], label=[1])
    assert glue.identity(str(moved), "cola") != before
    assert glue.identity("nyu-mll/glue", "cola") == {"repository": "nyu-mll/glue", "revision": HUB_GLUE.revision}
    assert glue.identity("probes", "odd-word") == {"probes": probes.VERSION}


@pytest.fixture(scope="session")
def heldout_folder(tmp_path_factory) -> Path:
    """What probes read of a pretrained artifact: its held-out documents."""
    import random

    rng, folder = random.Random(5), tmp_path_factory.mktemp("pretrain") / "pretrain" / ("a" * 12)
    folder.mkdir(parents=True)
    texts = [document(rng, 12) for _ in range(120)]
    pq.write_table(pa.table({"text": texts}), folder / "heldout.parquet")
    return folder


def make_probe(task: str, folder: Path, monkeypatch) -> dict:
    from tasks import store as store_module

    monkeypatch.setattr(store_module, "ROOT", folder.parents[1])
    return probes.make(task, store_module.Artifact(stage="pretrain", key=folder.name))


@pytest.mark.parametrize("task", list(probes.COLUMNS))
def test_probes_are_balanced_repeatable_and_split_by_document(task: str, heldout_folder: Path, monkeypatch):
    found = make_probe(task, heldout_folder, monkeypatch)
    assert found == make_probe(task, heldout_folder, monkeypatch)
    for split, table in found.items():
        assert table.column_names == [*probes.COLUMNS[task], "label"]
        assert 0.35 < np.mean(table["label"].to_numpy()) < 0.65, split
    openings = [
        {s for s in t[t.column_names[0]].to_pylist() if s.startswith("This text is about")} for t in found.values()
    ]
    assert not openings[0] & openings[1], "a document's own opening sentence stands in one split only"


def test_intact_examples_stood_in_the_documents_and_the_others_did_not(heldout_folder: Path, monkeypatch):
    text = " ".join(pq.read_table(heldout_folder / "heldout.parquet")["text"].to_pylist())
    for task in ("word-order", "odd-word"):
        table = make_probe(task, heldout_folder, monkeypatch)["train"]
        rows = list(zip(table["sentence"].to_pylist(), table["label"].to_pylist(), strict=True))
        assert all(sentence in text for sentence, label in rows if label == 1)
        assert np.mean([sentence in text for sentence, label in rows if label == 0]) < 0.2
    table = make_probe("neighbours", heldout_folder, monkeypatch)["train"]
    for first, second, label in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
        assert not label or f"{first} {second}" in text


def test_too_few_heldout_sentences_are_told(tmp_path: Path, monkeypatch):
    folder = tmp_path / "pretrain" / ("b" * 12)
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table({"text": ["Only one sentence stands here, and it is this one."]}), folder / "heldout.parquet"
    )
    with pytest.raises(InputError, match=r"heldout_fraction"):
        make_probe("neighbours", folder, monkeypatch)


def test_probes_are_read_like_other_tasks(heldout_folder: Path, monkeypatch):
    from tasks import store

    made = make_probe("word-order", heldout_folder, monkeypatch)
    data = read("probes", "word-order", pretrained=store.Artifact(stage="pretrain", key=heldout_folder.name))
    assert data.tables == made
    assert data.duplicates == len(made["train"]) - len(set(made["train"]["sentence"].to_pylist()))
    assert TASKS["word-order"].labels == ("shuffled", "intact")


FROM_HUB = """
import json
import sys
from tasks.glue import data as glue

def tables() -> dict:
    glue.hub_splits.cache_clear()
    return {split: table.to_pydict() for split, table in glue.read("nyu-mll/glue", "mnli", test=True).tables.items()}

found = [tables()]
if sys.argv[1:] == ["damage"]:
    file = glue.hub_splits("mnli", True)["train"][0].resolve()
    file.write_bytes(file.read_bytes()[:-9])
    found.append(tables())
print(json.dumps(found))
"""


def test_glue_comes_from_the_hub_at_its_pinned_revision_and_then_from_its_cache(tmp_path: Path):
    from test_hub import address_of, serving

    rows = {
        split: {"premise": [f"{split} says so"] * 3, "hypothesis": ["so"] * 3, "label": labels}
        for splits, labels in ((splits_of("mnli", test=False), [0, 1, 2]), (TASKS["mnli"].test, [-1] * 3))
        for split in splits
    }
    files = {"README.md": b"#", "mnli_matched/validation-00000-of-00001.parquet": b"not this one"}
    for split, columns in rows.items():
        path = write(tmp_path, "mnli", split, **columns, idx=[0, 1, 2])
        files[f"mnli/{split}-00000-of-00001.parquet"] = path.read_bytes()
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def ask(*arguments: str) -> list[dict]:
        command = [sys.executable, "-c", FROM_HUB, *arguments]
        home = Path(__file__).resolve().parents[1]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with serving({(HUB_GLUE.repository, HUB_GLUE.revision): files}) as server:
        env["HF_ENDPOINT"] = address_of(server)
        assert ask("damage") == [rows, rows]
        got = Counter(path for method, path, _ in server.log if method == "GET" and path.startswith("/cdn/"))
        assert {path.split("/")[-1].split("-")[0]: times for path, times in got.items()} == dict.fromkeys(rows, 1) | {
            "train": 2
        }
    assert ask() == [rows], "with no server"


def test_without_a_network_one_request_is_made_and_finetune_data_is_named(monkeypatch, caplog):
    asked = []

    class Unreachable:
        def dataset_info(self, *_: object, **__: object) -> None:
            asked.append("info")
            raise ConnectionError("no network")

        def list_repo_tree(self, *_: object, **__: object) -> None:
            asked.append("a listing, which the client retries for half a minute")
            raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    monkeypatch.setattr(glue, "cached", lambda *_: None)
    caches = (glue.hub_splits, glue.hub_evaluation, glue.hub_problem)
    for cache in caches:
        cache.cache_clear()
    assert glue.evaluation_files("nyu-mll/glue", ["cola"]) == {}
    for task in ("cola", "mnli"):
        with pytest.raises(InputError, match=r"no network.*finetune\.data"):
            glue.find_splits("nyu-mll/glue", task)
    assert asked == ["info"]
    assert not caplog.messages, "the sentence comes once, as the error"
    for cache in caches:
        cache.cache_clear()


def test_offline_nothing_is_asked_and_finetune_data_is_named(tmp_path: Path, monkeypatch):
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(glue, "cached", lambda *_: None)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    caches = (glue.hub_splits, glue.hub_problem)
    for cache in caches:
        cache.cache_clear()
    with pytest.raises(InputError, match=r"Offline.*finetune\.data"):
        glue.find_splits(HUB_GLUE.repository, "cola")
    for cache in caches:
        cache.cache_clear()


def test_real_glue_data_reads_with_the_sizes_that_it_has(real_data: Path):
    manifest = {about["file"]: about for about in json.loads((real_data / "glue" / "MANIFEST.json").read_text())}
    checked = 0
    for task in (*GLUE, "wnli"):
        data = read(str(real_data / "glue"), task)
        assert data.left_out == {}
        for split, table in data.tables.items():
            about = manifest[f"{task}/{split}.parquet"]
            assert len(table) == about["rows"], (task, split)
            official = TASKS[task].train if split == "train" else TASKS[task].validation[split]
            assert official == about["official"], (task, split)
            checked += 1
    assert checked == len(manifest) == 19
    assert read(str(real_data / "glue"), "cola").shared == {"validation": 16}
    assert read(str(real_data / "glue"), "stsb").shared == {"validation": 11}, (
        "six as they are, five the other way round"
    )


def test_real_glue_rows_are_those_of_a_naive_reader_in_parquet_and_in_tsv(real_data: Path, tmp_path: Path):
    for path in sorted((real_data / "glue").rglob("*.parquet")):
        task, split = path.parent.name, path.stem
        texts, rows = TASKS[task].columns, pq.read_table(path).to_pylist()
        kind = int if TASKS[task].labels else np.float32
        expected = [{name: row[name] for name in texts} | {"label": kind(row["label"])} for row in rows]
        table = read_split([path], task, split)[0]
        assert table.to_pylist() == expected, path
        assert table.schema.field("label").type == (pa.int64() if kind is int else pa.float32())
        lines = ["\t".join((*texts, "label")), *("\t".join(str(row[n]) for n in (*texts, "label")) for row in rows)]
        tsv = write_tsv(tmp_path, task, split, *lines, end="\r\n" if split == "train" else "\n")
        assert [{n: row[n] for n in texts} for row in naive_tsv(tsv)] == [{n: row[n] for n in texts} for row in rows]
        assert read_split([tsv], task, split)[0] == table, path
