"""GLUE: its tasks, finding and reading their data, what bad data is refused with, and probes."""

import errno
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import document

from model import InputError
from tasks import store as store_module
from tasks.glue import data as glue
from tasks.glue import probes
from tasks.glue.data import local_splits, read, read_split
from tasks.glue.tasks import GLUE, HUB_GLUE, TASKS, splits_of

ABC = {"sentence": ["a", "b", "c"], "label": [0, 1, 0]}
PAIRS = {"sentence1": ["a", "b", "c"], "sentence2": ["d", "e", "f"]}


def write(folder: Path, task: str, split: str, **columns: object) -> Path:
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
    """The error about a split that can't be used."""
    with pytest.raises(InputError) as problem:
        read_split(list(paths), paths[0].parent.name, split)
    return str(problem.value)


def check_words(text: str, *words: str) -> None:
    """All of these are in the text."""
    assert not [word for word in words if word not in text], text


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        write(tmp_path, "cola", split, sentence=[f"{split} {i}" for i in range(40)], label=[i % 2 for i in range(40)])
    return tmp_path


def test_the_table_covers_all_of_glue():
    assert set(GLUE) == {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"}
    assert set(TASKS) - set(probes.COLUMNS) == {*GLUE, "wnli"}
    assert sum(len(TASKS[name].validation) for name in GLUE) == 9
    assert {name: task.classes for name, task in TASKS.items() if task.classes != 2} == {"stsb": 1, "mnli": 3}
    assert sum(sum(TASKS[name].test.values()) for name in (*GLUE, "wnli")) == 425_205


# Reading


def test_the_data_of_a_folder_comes_by_split_with_texts_and_labels_alone(cola: Path):
    data = read(str(cola), "cola")
    assert list(data.tables) == ["train", "validation"]
    assert data.tables["validation"].to_pylist()[3] == {"sentence": "validation 3", "label": 1}
    assert (data.notes, data.left_out, data.shared, data.duplicates) == ([], {}, {"validation": 0}, 0)


@pytest.mark.parametrize(
    "columns",
    [
        {"idx": [5, 6], "label": pa.array([1, 0], pa.uint8()), "sentence": ["a", "b"]},
        {"label": [1.0, 0.0], "sentence": pa.array(["a", "b"]).dictionary_encode()},
        {"label": pa.array([1, 0], pa.int8()), "sentence": pa.array(["a", "b"], pa.string_view())},
        {"label": pa.array([1, 0]).cast(pa.decimal128(20, 1)), "sentence": ["a", "b"]},
        {"label": ["acceptable", "unacceptable"], "sentence": ["a", "b"]},
        {"label": pa.array(["acceptable", "unacceptable"]).dictionary_encode(), "sentence": ["a", "b"]},
    ],
)
def test_labels_may_be_any_numbers_or_names_of_classes_and_texts_of_any_type(tmp_path: Path, columns: dict):
    table = read_split([write(tmp_path, "cola", "train", **columns)], "cola", "train")[0]
    assert table.to_pydict() == {"sentence": ["a", "b"], "label": [1, 0]}
    assert table.schema.field("label").type == pa.int64()


def test_labels_in_tsv_may_be_names_and_numbers(tmp_path: Path):
    lines = ("sentence1\tsentence2\tlabel", "a\tb\tnot_entailment", "c\td\t0", "e\tf\t entailment ")
    table = read_split([write_tsv(tmp_path, "wnli", "train", *lines)], "wnli", "train")[0]
    assert table["label"].to_pylist() == [0, 0, 1]


FOR_COLA = "0 (unacceptable) or 1 (acceptable)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": None}, ["no column label", "are sentence", "Expected sentence, label"]),
        ({"sentence": None, "text": ["a"] * 3}, ["no column sentence", "label, text"]),
        ({"label": [0, 1, -1]}, ["label of row 3 is -1", "unlabelled", FOR_COLA]),
        ({"label": [0, 2, 7]}, ["label of rows 2 and 3 is 2", FOR_COLA]),
        ({"label": [0, 0.5, 1]}, ["label of row 2 is 0.5", FOR_COLA]),
        ({"label": [*map(Decimal, (0, 1, -1))]}, ["label of row 3 is -1.0", "unlabelled"]),
        ({"label": [0, None, None]}, ["no label in rows 2 and 3", FOR_COLA]),
        ({"label": [0.0, float("nan"), 1.0]}, ["no label in row 2"]),
        ({"label": ["0", "1", "0"]}, ["label of rows 1, 2 and 3 is '0'", FOR_COLA]),
        ({"label": ["acceptable", "good", "unacceptable"]}, ["label of row 2 is 'good'", FOR_COLA]),
        ({"label": [True, False, True]}, ["labels are bool"]),
        ({"label": [1, 1, 1]}, ["every label is 1", FOR_COLA]),
        ({"sentence": [1, 2, 3]}, ["int64", "column sentence"]),
        ({"sentence": ["a", "b", "x" * 2_000_000]}, ["sentence", "row 3", "2,000,000 characters", "100,000"]),
        ({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, ["no rows"]),
        ({"sentence": ["a"] * 4000, "label": [9 if i % 2 else 0 for i in range(4000)]}, ["10 and 1,995 more is 9"]),
    ],
)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_data_that_cannot_be_used_is_refused_by_file_and_row(tmp_path: Path, split: str, change: dict, words: list):
    columns = {name: values for name, values in (ABC | change).items() if values is not None}
    check_words(refused(write(tmp_path, "cola", split, **columns), split=split), f"cola/{split}", *words)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["0.0", "5.0", "2.5"], ["labels are text", "a number from 0 to 5"]),
        ([0.0, 5.1, 2.5], ["label of row 2 is 5.1", "0 to 5"]),
        ([0.0, -1.0, 2.5], ["label of row 2 is -1.0", "unlabelled"]),
        ([0.0, 5.0, float("inf")], ["label of row 3 is inf"]),
    ],
)
def test_scores_that_sts_b_cannot_have_are_refused(tmp_path: Path, labels: list, words: list[str]):
    check_words(refused(write(tmp_path, "stsb", "train", **PAIRS, label=labels)), "stsb/train", *words)


@pytest.mark.parametrize(
    ("task", "lines", "words"),
    [
        ("cola", [], ["is empty"]),
        ("cola", ["sentence\tlabel"], ["has no rows"]),
        ("cola", ["gj04\t1\t\tThe sailors rode."], ["no column sentence, label"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\tb\t0", "c\t0", "d"], ["lines 3 and 5", "2 fields", "has 3"]),
        ("cola", ["sentence\tlabel", "a\t1", "", "c\t0"], ["line 3", "has 1"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\tyes", "c\t0"], ["label of row 2 is 'yes'", FOR_COLA]),
        ("cola", ["sentence\tlabel", "a\t1", "b\t", "c\t0"], ["no label in row 2"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\t-1", "c\t0"], ["label of row 2 is '-1'", "unlabelled"]),
        ("cola", ["sentence\tlabel", "a\t1", "b\t1e999", "c\t0"], ["label of row 2 is '1e999'"]),
        ("cola", ["sentence\tlabel\tlabel", "a\t1\t0"], ["column label twice"]),
        *(
            ("stsb", ["sentence1\tsentence2\tlabel", "a\tb\t1.5", f"c\td\t{score}"], [f"label of row 2 is {score!r}"])
            for score in ("high", "nan", "1,5", "--1")
        ),
    ],
)
def test_bad_tsv_is_refused_by_file_and_line(tmp_path: Path, task: str, lines: list[str], words: list[str]):
    check_words(refused(write_tsv(tmp_path, task, "train", *lines)), f"{task}/train.tsv", *words)


def latin(folder: Path) -> Path:
    text = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 3], np.int32)), pa.py_buffer(b"a\xe9t"))
    return write(folder, "cola", "train", label=[0, 1], sentence=text)


def latin_tsv(folder: Path) -> Path:
    return write_tsv(folder, "cola", "train", "sentence\tlabel", "plain\t0", "\u00e9t\u00e9\t1", encoding="latin1")


def damaged(folder: Path) -> Path:
    path = write(
        folder, "cola", "train", sentence=[f"{i:09}" * 9 for i in range(999)], label=[i % 2 for i in range(999)]
    )
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(396) + data[400:])  # the first page, so that the columns' names can still be read
    return path


def junk(folder: Path, text: str = "not parquet") -> Path:
    path = write(folder, "cola", "train", **ABC)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (latin, ["train.parquet", "sentence of row 2", "UTF-8"]),
        (latin_tsv, ["train.tsv", "line 3", "UTF-8"]),
        (damaged, ["train.parquet"]),
        (junk, ["train.parquet", "Parquet"]),
        (lambda folder: junk(folder, ""), ["train.parquet", "empty"]),
    ],
)
def test_damaged_files_are_refused_with_their_place_and_only_in_the_error(tmp_path: Path, make, words, capfd):
    check_words(refused(make(tmp_path)), "cola/", *words)
    assert "".join(capfd.readouterr()) == ""


def test_labels_outside_the_classes_that_a_file_names_are_refused_by_row(tmp_path: Path):
    from datasets import ClassLabel, Dataset, Features, Value

    path = write(tmp_path, "cola", "train", **ABC)
    named = Features(sentence=Value("string"), label=ClassLabel(names=["unacceptable", "acceptable"]))
    schema = Dataset.from_dict(ABC, named).data.schema
    assert "acceptable" in str(schema.metadata)
    for labels, row in (([0, 1, 0], None), ([0, 7, 1], 2), ([0, 1, None], 3)):
        pq.write_table(pa.table([ABC["sentence"], labels], schema=schema), path)
        if row:
            assert f"row {row}" in refused(path)
        else:
            assert read_split([path], "cola", "train")[0]["label"].to_pylist() == labels


def naive_tsv(path: Path) -> list[dict[str, str]]:
    """The rows of a TSV file by splitting its text."""
    header, *lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    return [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]


ODD = [
    "", " ", "NA", "nan", "null", "None", "1.50", "007", "1e5", '"', '"a', 'b""', "'", "#", "\\", "\\t", "é\u2028", "\r", "\0",
]  # fmt: skip


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("seed", range(4))
def test_every_field_of_a_tsv_is_text_as_it_stands(tmp_path: Path, seed: int, end: str):
    draw = np.random.default_rng(seed)
    rows = [["".join(draw.choice(ODD, draw.integers(3))) for _ in range(3)] for _ in range(99 if seed else 12_000)]
    lines = ["sentence1\tlabel\tsentence2", *("\t".join(row) for row in rows)]
    path = write_tsv(tmp_path, "rte", "train", *lines, end=end, encoding="utf-8-sig" if seed % 2 else "utf-8")
    table = glue.read_file(path, "rte", optional=["sentence1", "sentence2", "label", "idx"])
    assert table.to_pylist() == naive_tsv(path)
    one = write_tsv(tmp_path, "cola", "test", "sentence", *(row[0] for row in rows), "", end=end)
    assert glue.read_file(one, "cola", ["sentence"]).to_pylist() == naive_tsv(one)


def test_a_tsv_file_gives_the_table_of_a_parquet_file_of_its_rows(tmp_path: Path):
    texts = {"sentence1": ['He said "no.', "It's", "a\rb"], "sentence2": ['"', "çx", "b\u2028c"]}
    table = read_split([write(tmp_path, "stsb", "train", **texts, label=[3.8, 0, 5])], "stsb", "train")[0]
    assert table.schema.field("label").type == pa.float32(), "as on the hub"
    rows = zip(texts["sentence1"], ("3.80", "0", "5."), texts["sentence2"], strict=True)
    path = write_tsv(tmp_path, "stsb", "train", "\ufeffsentence1\tlabel\tsentence2", *map("\t".join, rows))
    assert read_split([path], "stsb", "train")[0] == table
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n").removesuffix(b"\r\n"))
    assert read_split([path], "stsb", "train")[0] == table


# Rows without a sentence


def gaps(*without: tuple[int, str | None]) -> dict:
    """1,000 examples; of the rows given, with what they have in place of a sentence."""
    sentences = [f"sentence {i}" for i in range(1000)]
    for row, text in without:
        sentences[row] = text
    return {"sentence": sentences, "label": [i % 2 for i in range(1000)]}


def test_training_rows_without_a_sentence_are_left_out_counted_and_named(cola: Path):
    write(cola, "cola", "train", **gaps((2, None), (6, " \t\u00a0\u200b"), (999, "")))
    data = read(str(cola), "cola")
    assert data.left_out == {"train": {"null": 1, "empty": 2}}
    kept = [i for i in range(1000) if i not in (2, 6, 999)]
    assert data.tables["train"].to_pydict() == {
        "sentence": [f"sentence {i}" for i in kept],
        "label": [i % 2 for i in kept],
    }
    (note,) = data.notes
    check_words(note, "cola/train.parquet", "rows 3, 7 and 1,000", "1 null and 2 empty")


def test_a_pair_without_one_of_its_sentences_is_left_out_once(tmp_path: Path):
    first, second = ([f"{name} {i}" for i in range(300)] for name in "ab")
    first[4], second[4], second[9] = None, "", ""
    path = write(tmp_path, "rte", "train", sentence1=first, sentence2=second, label=[i % 2 for i in range(300)])
    table, counts, _ = read_split([path], "rte", "train")
    assert (len(table), counts) == (298, {"null": 1, "empty": 1})


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_more_than_one_percent_of_empty_rows_are_refused_and_no_scored_row_is_left_out(tmp_path: Path, split: str):
    ten = [(row, "" if row % 2 else " \u200b") for row in range(100, 110)]
    table, left_out, notes = read_split([write(tmp_path, "cola", split, **gaps(*ten))], "cola", split)
    assert (len(table), left_out) == ((990, {"empty": 10}) if split == "train" else (1000, {}))
    check_words(notes[0], f"cola/{split}.parquet", "rows 101, 102, 103, 104, 105 and 5 more")
    said = refused(write(tmp_path, "cola", split, **gaps(*ten, (500, ""))), split=split)
    check_words(said, f"cola/{split}: 11 of 1,000 rows", "1%", "rows 101, 102, 103, 104, 105 and 6 more")
    path = write(tmp_path, "cola", split, **gaps((2, None)))
    if split != "train":
        check_words(refused(path, split=split), f"cola/{split}.parquet", "null", "row 3")


# Repetitions


def test_a_class_without_examples_is_warned_of(tmp_path: Path):
    path = write(tmp_path, "mnli", "train", premise=["a", "b"], hypothesis=["c", "d"], label=[0, 2])
    (note,) = read_split([path], "mnli", "train")[2]
    check_words(note, "mnli/train", "neutral")


def test_training_rows_that_are_scored_too_are_counted_and_warned_of(tmp_path: Path):
    premises, hypotheses = ["a", " b ", "c", "c", "d"], ["x", "y", "z", "z\n", "x"]
    write(tmp_path, "mnli", "train", premise=premises, hypothesis=hypotheses, label=[0, 1, 2, 1, 0])
    seen = {"premise": ["b", "c", "a", "d"], "hypothesis": ["y", "z", "z", "y"], "label": [0, 1, 2, 0]}
    new = {"premise": ["x", "e", "f"], "hypothesis": ["a", "y", "z"], "label": [0, 1, 2]}
    write(tmp_path, "mnli", "validation_matched", **seen)
    write(tmp_path, "mnli", "validation_mismatched", **new)
    data = read(str(tmp_path), "mnli")
    assert data.shared == {"validation_matched": 3, "validation_mismatched": 0}
    assert data.duplicates == 1
    conflict, shared = data.notes
    check_words(conflict, "mnli/train: 2 rows", "another label")
    check_words(shared, "validation_matched: 3 (rows 2, 3 and 4)", "2 of the 4 rows")


@pytest.mark.parametrize("task", ["stsb", "mrpc", "qqp", "rte"])
def test_a_pair_the_other_way_round_is_the_same_where_the_order_means_nothing(tmp_path: Path, task: str):
    first, second = TASKS[task].columns
    train = {first: ["a", "b ", "c", "d", "b"], second: ["b", "a", "d", "c", "e"], "label": [0, 1, 0, 0, 1]}
    seen = {first: ["x", "d", "e", "a"], second: ["y", "c", "b", "a"], "label": [0, 1] * 2}
    write(tmp_path, task, "train", **train)
    write(tmp_path, task, "validation", **seen)
    data = read(str(tmp_path), task)
    if task == "rte":
        assert (data.shared, data.duplicates) == ({"validation": 1}, 0)
        check_words(data.notes[0], "validation: 1 (row 4)")
    else:
        assert (data.shared, data.duplicates) == ({"validation": 3}, 2)
        check_words(data.notes[0], f"{task}/train: 2 rows")
        check_words(data.notes[1], "in either order: 3 (rows 3, 4 and 5)", "2 of the 4 rows")


def test_repeated_rows_are_counted_as_a_naive_count_does(tmp_path: Path):
    draw = np.random.default_rng(2)
    texts = [f" {n} " if n % 3 else f"{n}" for n in draw.integers(0, 60, 200)]
    labels = draw.integers(0, 2, 200).tolist()
    write(tmp_path, "sst2", "train", sentence=texts, label=labels)
    write(tmp_path, "sst2", "validation", sentence=[f"{n}" for n in range(50, 90)], label=[0, 1] * 20)
    data, stripped = read(str(tmp_path), "sst2"), [text.strip() for text in texts]
    assert data.duplicates == 200 - len(set(stripped))
    assert data.shared["validation"] == sum(int(text) >= 50 for text in stripped)
    kinds = Counter(text for text, _ in set(zip(stripped, labels, strict=True)))
    assert f"sst2/train: {sum(kinds[text] > 1 for text in stripped)} rows" in data.notes[0]


# Test splits


@pytest.mark.parametrize("name", ["idx", "index"])
@pytest.mark.parametrize(
    ("places", "row", "value"),
    [
        ([0, 2, 1], 2, "2"),
        (["2", "1", "0"], 1, "'2'"),
        ([0.0, 2.0, 1.0], 2, "2.0"),
        ([0, 1, 1], 3, "1"),
        ([1, 2, 3], 1, "1"),
        ([0, 1, None], 3, "None"),
        (["0", "one", "2"], 2, "'one'"),
    ],
)
def test_a_test_split_in_another_order_than_the_leaderboards_is_refused(
    tmp_path: Path, name: str, places: list, row: int, value: str
):
    said = refused(write(tmp_path, "cola", "test", **ABC, **{name: places}), split="test")
    check_words(said, "cola/test.parquet", f"the {name} of row {row} is {value}", f"expected {row - 1}")
    for split in ("train", "validation"):
        assert len(read_split([write(tmp_path, "cola", split, **ABC, **{name: places})], "cola", split)[0]) == 3


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0], ["0", "1", " 2", "3"]])
def test_a_test_split_in_the_leaderboards_order_is_read_in_shards_too(tmp_path: Path, places: list):
    halves = [
        write(tmp_path, "cola", f"test-{i}", sentence=["a", "b"], idx=places[2 * i : 2 * i + 2], id=[9, 8])
        for i in range(2)
    ]
    assert len(read_split(halves, "cola", "test")[0]) == 4
    assert "cola/test-1.parquet" in refused(halves[1], halves[0], split="test")


def test_test_data_comes_without_labels_if_asked_for(cola: Path):
    with pytest.raises(InputError, match=r"cola/test\.parquet.*finetune\.test"):
        read(str(cola), "cola", test=True)
    assert list(read(str(cola), "cola").tables) == ["train", "validation"]
    write(cola, "cola", "test", idx=[0, 1, 2], sentence=["x", "y", "train 1"])
    data = read(str(cola), "cola", test=True)
    assert list(data.tables) == ["train", "validation", "test"]
    assert data.tables["test"].to_pydict() == {"sentence": ["x", "y", "train 1"], "label": [-1, -1, -1]}
    assert data.shared == {"validation": 0, "test": 1}
    assert "cola/test has 3 rows, not the 1,063" in data.notes[0]
    with pytest.raises(InputError, match="test data"):
        read("probes", "word-order", test=True)


# Finding files


def test_shards_are_found_and_rows_named_in_their_files(cola: Path):
    shards = [cola / "cola" / f"train-0000{i}-of-00002.parquet" for i in range(2)]
    (cola / "cola" / "train.parquet").rename(shards[0])
    pq.write_table(pa.table({"sentence": ["late"] * 3, "label": [1, 0, 1]}), shards[1])
    assert local_splits(cola, "cola")["train"] == shards
    sentences = read_split(shards, "cola", "train")[0]["sentence"].to_pylist()
    assert sentences == [*(f"train {i}" for i in range(40)), *["late"] * 3]
    pq.write_table(pa.table({"sentence": ["late"] * 3, "label": [1, 2, 1]}), shards[1])
    assert "cola/train-00001-of-00002.parquet: the label of row 2 is 2" in refused(*shards)
    shards[1].unlink()
    with pytest.raises(InputError, match=r"1 of 2 shards of train"):
        local_splits(cola, "cola")


@pytest.mark.parametrize("other", ["train.tsv", "train-00000-of-00001.parquet"])
def test_a_split_that_is_there_twice_is_refused(cola: Path, other: str):
    (cola / "cola" / other).write_bytes((cola / "cola" / "train.parquet").read_bytes())
    with pytest.raises(InputError, match=rf"train\.parquet and {re.escape(other)}"):
        local_splits(cola, "cola")


def test_a_missing_task_is_refused_with_those_there_are(cola: Path):
    with pytest.raises(InputError, match=r"rte/train\.parquet.*folders there: cola"):
        read(str(cola), "rte")
    with pytest.raises(InputError, match=r"mnli/train.*folders there: none"):
        glue.identity(str(cola / "nowhere"), "mnli")


def forbidden(path: Path, **_: object) -> None:
    raise PermissionError(errno.EACCES, f"Failed to open local file '{path}'")  # as Arrow's, without a file name


@pytest.mark.parametrize(
    ("owner", "method", "ask"),
    [
        (Path, "is_file", lambda folder: glue.identity(folder, "rte")),
        (Path, "is_file", lambda folder: glue.evaluation_files(folder, ["rte"])),
        (Path, "iterdir", lambda folder: read(folder, "rte")),
        (pq, "ParquetFile", lambda folder: read(folder, "cola")),
    ],
)
def test_what_may_not_be_read_is_refused_by_its_path(cola: Path, monkeypatch, owner, method: str, ask):
    monkeypatch.setattr(owner, method, forbidden)
    with pytest.raises(InputError, match=rf"{cola}\S* can't be read: Permission denied"):
        ask(str(cola))


def test_a_full_disk_is_not_taken_for_a_damaged_file(cola: Path, monkeypatch):
    from datasets.arrow_writer import ArrowWriter

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowWriter, "write_table", full)
    check_words(refused(cola / "cola" / "train.parquet"), tempfile.gettempdir(), "TMPDIR")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a request")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_local_files_of_any_name_are_read_without_a_request_and_leave_nothing_behind(
    cola: Path, tmp_path: Path, monkeypatch, capfd
):
    import datasets

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
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


def test_sentences_for_decontamination_may_lie_in_tsv_too(cola: Path):
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


# The hub

FROM_HUB = """
import json
import sys
from tasks.glue import data as glue

def tables() -> dict:
    glue.hub_files.cache_clear()
    return {split: table.to_pydict() for split, table in glue.read("nyu-mll/glue", "mnli", test=True).tables.items()}

found = [tables()]
if sys.argv[1:] == ["damage"]:
    file = glue.find_splits("nyu-mll/glue", "mnli", True)["train"][0].resolve()
    file.write_bytes(file.read_bytes()[:-9])
    found.append(tables())
print(json.dumps(found))
"""


def test_glue_comes_from_the_hub_at_its_pinned_revision_and_then_from_its_cache(tmp_path: Path):
    from test_hub import address_of, serving

    labels = {split: [-1] * 3 if "test" in split else [0, 1, 2] for split in splits_of("mnli", test=True)}
    rows = {s: {"premise": [f"{s} says so"] * 3, "hypothesis": ["so"] * 3, "label": labels[s]} for s in labels}
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
        fetched = {path.split("/")[-1].split("-")[0]: times for path, times in got.items()}
        assert fetched == dict.fromkeys(rows, 1) | {"train": 2}, "the damaged file came again"
    assert ask() == [rows], "with no server"


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch):
    caches = (glue.hub_files, glue.hub_evaluation, glue.hub_problem)
    monkeypatch.setattr(glue, "cached", lambda *_: None)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("nothing_cached")
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
    assert glue.evaluation_files("nyu-mll/glue", ["cola"]) == {}
    for task in ("cola", "mnli"):
        with pytest.raises(InputError, match=r"no network.*finetune\.data"):
            glue.find_splits("nyu-mll/glue", task)
    assert asked == ["info"]
    assert not caplog.messages, "the problem is reported once, as the error"


@pytest.mark.usefixtures("nothing_cached", "no_network")
def test_offline_nothing_is_asked_and_finetune_data_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"Offline.*finetune\.data"):
        glue.find_splits(HUB_GLUE.repository, "cola")


# Probes


@pytest.fixture
def pretrained(store: Path):
    """An artifact with what probes read: held-out documents."""

    def write_heldout(texts: list[str]) -> store_module.Artifact:
        artifact = store_module.Artifact(stage="pretrain", key="a" * 12)
        artifact.path.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": texts}), artifact.path / "heldout.parquet")
        return artifact

    return write_heldout


def heldout_texts() -> list[str]:
    """Documents whose first sentences are long enough for probes, each with a word that no other document has."""
    rng = random.Random(5)
    return [document(rng, 12).replace("This text is", "All of this text is") for _ in range(120)]


@pytest.mark.parametrize("task", list(probes.COLUMNS))
def test_probes_are_balanced_repeatable_and_split_by_document(task: str, pretrained):
    texts, columns, seen = heldout_texts(), probes.COLUMNS[task], []
    start = pretrained(texts)
    data = read("probes", task, pretrained=start)
    assert data.tables == probes.make(task, start)
    train = data.tables["train"]
    assert data.duplicates == len(train) - train.group_by(list(columns)).aggregate([]).num_rows
    for table in data.tables.values():
        assert table.column_names == [*columns, "label"]
        assert 0.35 < np.mean(table["label"].to_numpy()) < 0.65
        seen.append({word for name in columns for text in table[name].to_pylist() for word in re.findall(r"\w+", text)})
    own = {re.match(r"All of this text is about (\w+)", text)[1] for text in texts}
    assert all(own & words for words in seen)
    assert not own & seen[0] & seen[1], "a document is in one split only"


def test_intact_examples_are_in_the_documents_and_the_others_are_not(pretrained):
    texts = heldout_texts()
    text, start = " ".join(texts), pretrained(texts)
    for task in ("word-order", "odd-word"):
        rows = probes.make(task, start)["train"].to_pylist()
        assert all(row["sentence"] in text for row in rows if row["label"] == 1)
        assert np.mean([row["sentence"] in text for row in rows if row["label"] == 0]) < 0.2
    for row in probes.make("neighbours", start)["train"].to_pylist():
        assert not row["label"] or f"{row['sentence1']} {row['sentence2']}" in text


def test_too_few_heldout_sentences_are_refused(pretrained):
    start = pretrained(["Only one sentence stands here, and it is this one."])
    with pytest.raises(InputError, match=r"neighbours/train.*heldout_fraction"):
        probes.make("neighbours", start)


# Real data


def test_real_glue_data_reads_with_the_sizes_that_it_has(real_data: Path):
    manifest = {about["file"]: about for about in json.loads((real_data / "glue" / "MANIFEST.json").read_text())}
    sizes, shared = {}, {}
    for task in (*GLUE, "wnli"):
        data = read(str(real_data / "glue"), task)
        assert data.left_out == {}
        official = {"train": TASKS[task].train, **TASKS[task].validation}
        sizes |= {f"{task}/{split}.parquet": (len(t), official[split]) for split, t in data.tables.items()}
        shared[task] = data.shared
    assert sizes == {file: (about["rows"], about["official"]) for file, about in manifest.items()}
    assert shared["cola"] == {"validation": 16}
    assert shared["stsb"] == {"validation": 11}, "six as they are, five the other way round"


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
        assert read_split([tsv], task, split)[0] == table, path
