"""Labels as users have them: lists and vectors in any form, names that look the same, and rows without a label."""

import json
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.preprocessing import MultiLabelBinarizer
from test_own_tasks import read, rows_with, write_rows

from model.errors import InputError
from tasks.glue.lists import parse_list
from tasks.glue.reading import Data
from tasks.glue.table import LABEL

NAMES = np.array(["anger", "it's", "joy", "two words"])
HAS = np.random.default_rng(0).random((80, 4)) < 0.4
SETS = [NAMES[row].tolist() for row in HAS]
VECTORS = MultiLabelBinarizer(classes=NAMES.tolist()).fit_transform(SETS)


def classes_by_text(data: Data) -> dict[str, list[str]]:
    """The classes of each row, by its text."""
    found = {}
    for table in data.tables.values():
        for text, label in zip(table["text"], table[LABEL], strict=True):
            found[text] = [name for name, has in zip(data.task.labels, label, strict=True) if has]
    return found


# Several labels

OF_VECTORS = {
    "arrays of floats": list(VECTORS.astype(float)),
    "integers": VECTORS.tolist(),
    "booleans": VECTORS.astype(bool).tolist(),
    "numpy's booleans": [list(row) for row in VECTORS.astype(bool)],
    "texts": [list(map(str, row)) for row in VECTORS],
    "commas": [",".join(map(str, row)) for row in VECTORS],
    "blanks": [" ".join(map(str, row)) for row in VECTORS],
}


def test_a_list_in_a_cell_is_the_list_that_was_written(tmp_path: Path):
    data = read(write_rows(tmp_path / "a.csv", rows_with(SETS)), kind="multilabel")
    assert classes_by_text(data) == {f"t {i}": names for i, names in enumerate(SETS)}
    assert [note for note in data.notes if "a.csv" in note and "80 rows" in note]


@pytest.mark.parametrize("form", OF_VECTORS)
def test_vectors_of_0_and_1_are_classes_by_place_and_it_is_said(tmp_path: Path, form: str):
    frame = pd.DataFrame(rows_with(OF_VECTORS[form]))
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    for path in tmp_path.iterdir():
        data = read(path, kind="multilabel")
        assert data.task.labels == ("0", "1", "2", "3")
        assert classes_by_text(data) == {f"t {i}": [str(k) for k in np.flatnonzero(row)] for i, row in enumerate(HAS)}
        assert [note for note in data.notes if "vectors" in note and "0 to 3" in note]
        empty = sum(int(note.split()[1]) for note in data.notes if "none of the classes" in note)
        assert empty == sum(not row.any() for row in HAS) > 0
        assert data.skipped == {}


def test_a_place_that_is_never_1_stays_a_class_and_is_named(tmp_path: Path):
    given = [[int(i % 2 == 0), 0, int(i % 2 == 1)] for i in range(40)]
    data = read(write_rows(tmp_path / "a.jsonl", rows_with(given)), kind="multilabel")
    assert data.task.labels == ("0", "1", "2")
    assert "mine/train has no example of 1." in data.notes


@pytest.mark.parametrize(
    "given", [[["0"], ["1"], ["0", "1"], []], [[0], [1], [1, 0], [1]], ["0", "1", "0,1", "1"]], ids=str
)
def test_lists_of_classes_named_0_and_1_stay_lists(tmp_path: Path, given: list):
    data = read(write_rows(tmp_path / "a.jsonl", rows_with(given * 15)), kind="multilabel")
    found = classes_by_text(data)
    assert (data.task.labels, found["t 0"], found["t 1"], found["t 2"]) == (("0", "1"), ["0"], ["1"], ["0", "1"])
    assert not [note for note in data.notes if "vectors" in note]


def test_lists_of_one_class_named_0_or_1_are_no_vectors(tmp_path: Path):
    data = read(write_rows(tmp_path / "a.jsonl", rows_with([["0"], ["1"]] * 20)), kind="multilabel")
    assert classes_by_text(data) == {f"t {i}": [str(i % 2)] for i in range(40)}


def test_validation_is_read_as_training_is_though_its_vectors_alone_may_be_lists(tmp_path: Path):
    write_rows(tmp_path / "train.jsonl", rows_with(VECTORS.tolist()))
    write_rows(tmp_path / "validation.jsonl", [{"text": "v", "label": [0, 1, 0, 0]}])
    data = read(tmp_path, kind="multilabel")
    assert data.tables["validation"][LABEL].tolist() == [(0.0, 1.0, 0.0, 0.0)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([[0, 1, 0], [0, 0, 1], [1, 0]], ["lines 3, 6", "('1', '0')"]),
        ([[0, 2, 2], [1, 0, 0]], ["lines 1, 3", "('0', '2', '2')"]),
        ([[0, 1, -1], [1, 0, 0]], ["lines 1, 3", "('0', '1', '-1')"]),
        ([[0.25, 0.75], [0.5, 0.125]], ["lines 1, 2", "0.25"]),
        ([[["a"], ["b"]], ["a"]], ["lines 1, 3", "[['a'], ['b']]"]),
        ([{"a": 1}, {"b": 1}], ["lines 1, 2", "{'a': 1}"]),
        (["{'a': 1}", "a"], ["lines 1, 3"]),
        (["[0 1 ... 0]", "[1 0]"], ["lines 1, 3", "..."]),
    ],
)
def test_what_is_neither_lists_of_classes_nor_vectors_is_refused(tmp_path: Path, given: list, words: list):
    with pytest.raises(InputError) as problem:
        read(write_rows(tmp_path / "a.jsonl", rows_with(given * 20)), kind="multilabel")
    assert not [word for word in ("a.jsonl", *words) if word not in str(problem.value)], str(problem.value)


def test_one_label_that_is_a_list_in_text_is_refused_with_the_kind_that_reads_it(tmp_path: Path):
    for given in (["['a']", "['b']"], ["[0 1]", "[1 0]"]):
        with pytest.raises(InputError, match=r"a\.jsonl: the label of lines 1, 2.*multilabel"):
            read(write_rows(tmp_path / "a.jsonl", rows_with(given * 20)))
    for given in (["(other)", "[MASK]"], ["(a, b)", "{c}"], ["(1)", "(2)"]):
        assert set(read(write_rows(tmp_path / "a.jsonl", rows_with(given * 20))).task.labels) == set(given)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor([1., 0.])", [1, 0]),
        ("array([1, 0], dtype=int64)", [1, 0]),
        ("tensor([1., 0.], device='cuda:0', dtype=torch.float64)", [1, 0]),
        ("array(['a', 'b'], dtype='<U1')", ["a", "b"]),
        ("frozenset({'a'})", ["a"]),
        ("{'a', 'b'}", ["a", "b"]),
        ("set()", []),
        ('{"a","two words","it\'s"}', ["a", "two words", "it's"]),  # as databases write lists
        ("[a, two words]", ["a", "two words"]),
        ("[np.int64(0), np.True_]", [0, True]),
        *((text, None) for text in ("[1, 0])", "(other)", "a, b", "(1)", "(a), (b)", "it's", "10 0", "['a', 'b'",
                                    "[[1], [2", "", "a]", "tensor([0, ..., 1])")),
    ],
)  # fmt: skip
def test_lists_within_a_call_are_read_and_what_only_resembles_a_list_is_none(text: str, expected: list | None):
    assert parse_list(text) == expected


def test_lists_are_those_that_python_evaluates():
    rng = np.random.default_rng(1)
    pool = ["a", "it's", 'say "so"', "two words", "a,b", "[x]", "é\n", "back\\slash", "...", "1"]
    for _ in range(200):
        given = [pool[k] for k in rng.integers(len(pool), size=rng.integers(5))]
        for text in (repr(given), repr(tuple(given)), json.dumps(given), str(list(map(np.str_, given)))):
            assert parse_list(text) == given, text
        if given and "\n" not in "".join(given):
            assert parse_list(str(np.array(given, object))) == given


def test_tokens_and_tags_of_a_csv_are_lists_too(tmp_path: Path):
    rows = [{"tokens": ["Anna", "'s", str(i)], "tags": ["B-PER", "O", "O"]} for i in range(40)]
    data = read(write_rows(tmp_path / "a.csv", rows), kind="tokens")
    assert data.task.labels == ("B-PER", "O")
    kept = [list(tokens) for table in data.tables.values() for tokens in table["tokens"]]
    assert sorted(kept) == sorted(row["tokens"] for row in rows)
    notes = " ".join(data.notes)
    assert "the tokens in 40 rows" in notes
    assert "Anna" not in notes, "cards and reports publish the notes"


# Names


def test_names_that_look_the_same_are_one_class_and_are_named(tmp_path: Path):
    given = ["caf\u00e9", "cafe\u0301", "tea", "other things", "other\u00a0things", "\u200bother\u202fthings\ufeff"]
    data = read(write_rows(tmp_path / "a.csv", rows_with(given * 20)))
    assert data.task.labels == ("caf\u00e9", "other things", "tea")
    assert [note for note in data.notes if "a.csv" in note and "caf\u00e9, other things" in note]
    several = read(write_rows(tmp_path / "b.jsonl", rows_with([[name, "x"] for name in given] * 20)), kind="multilabel")
    assert several.task.labels == ("caf\u00e9", "other things", "tea", "x")
    assert [note for note in several.notes if "b.jsonl" in note and "caf\u00e9" in note]
    with_blank = read(write_rows(tmp_path / "c.csv", rows_with(["a", " b"] * 20)))
    assert not [note for note in with_blank.notes if "c.csv" in note]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["Billing", "billing", "refund"], "Billing and billing"),
        (["yes", "nan"], "these names are classes: nan. "),
        ([-1, 0, 1], "these names are classes: -1. "),
        (["no", "yes"], ""),
    ],
)
def test_classes_that_differ_in_capitals_or_are_named_as_missing_values_stay_and_are_named(tmp_path, given, named):
    data = read(write_rows(tmp_path / "a.jsonl", rows_with(given * 20)))
    assert data.task.labels == tuple(sorted(map(str, given)))
    notes = [note for note in data.notes if "differ in capital" in note or "names are classes" in note]
    assert len(notes) == bool(named)
    assert named in "".join(notes)


# Rows without a label


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("classes", ["a", "b", " "]),
        ("classes", [1, 0, None]),
        ("regression", ["1.5", "2.5", "n/a"]),
        ("regression", [1.5, 2.5, float("nan")]),
        ("multilabel", [["a"], ["b", "a"], None]),
        ("multilabel", ["[0, 1]", "[1, 0]", ""]),
    ],
)
def test_rows_without_a_label_are_left_out_counted_and_named(tmp_path: Path, kind: str, given: list):
    path = write_rows(tmp_path / "a.jsonl", rows_with(given * 20))
    data = read(path, kind=kind)
    assert data.skipped == {"train": 20}
    texts = sorted(text for table in data.tables.values() for text in table["text"])
    assert texts == sorted(f"t {i}" for i in range(60) if i % 3 != 2)
    assert [note for note in data.notes if "20 of 60 rows" in note and "lines 3, 6, 9, 12, 15 and 15 more" in note]
    with pytest.raises(InputError, match=r"mine/train: 20 of 60 rows .*0\.3.*max_unlabelled.*lines 3, 6"):
        read(path, kind=kind, max_unlabelled=0.3)
    assert read(path, kind=kind, max_unlabelled=0.34).skipped == {"train": 20}


def test_an_empty_cell_of_several_labels_is_none_of_the_classes_and_many_are_refused(tmp_path: Path):
    path = write_rows(tmp_path / "a.csv", rows_with(["a;b", "", "b"] * 20))
    data = read(path, kind="multilabel")
    assert data.skipped == {}
    assert classes_by_text(data)["t 1"] == []
    assert [note for note in data.notes if "20 of 60 rows" in note and "lines 3, 6" in note]
    with pytest.raises(InputError, match=r"20 of 60 rows.*\[\].*max_unlabelled"):
        read(path, kind="multilabel", max_unlabelled=0.3)
    explicit = write_rows(tmp_path / "b.csv", rows_with(["a;b", "[]", "b"] * 20))
    assert classes_by_text(read(explicit, kind="multilabel", max_unlabelled=0))["t 1"] == []


def test_rows_without_a_label_are_counted_by_split_and_gaps_change_no_name(tmp_path: Path):
    write_rows(tmp_path / "train.csv", rows_with([0, 1, None] * 20))  # pandas writes 0.0 and 1.0
    assert "0.0" in (tmp_path / "train.csv").read_text(encoding="utf-8")
    write_rows(tmp_path / "validation.csv", rows_with([0, 1] * 10))
    write_rows(tmp_path / "test.csv", rows_with([0, 1, -1, 1] * 5))
    data = read(tmp_path)
    assert data.task.labels == ("0", "1")
    assert data.skipped == {"train": 20, "test": 5}
    assert {split: len(table) for split, table in data.tables.items()} == {"train": 40, "validation": 20, "test": 15}
    write_rows(tmp_path / "train.csv", rows_with([0, 1, -1] * 20))
    assert read(tmp_path).task.labels == ("-1", "0", "1"), "where training has it, it is a class"


def test_a_declared_class_of_minus_1_is_no_label_and_other_numbers_are_refused(tmp_path: Path):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"t {i}" for i in range(60)], "label": [(0, 1, -1)[i % 3] for i in range(60)]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    data = read(tmp_path / "a.parquet")
    assert (data.task.labels, data.skipped) == (("no", "yes"), {"train": 20})
    about = json.dumps({"info": {"features": features.to_dict()}})
    table = pd.DataFrame(rows | {"label": [i % 3 for i in range(60)]})
    stored = pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata({"huggingface": about})
    pq.write_table(stored, tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b\.parquet: the label of rows 3, 6.*no, yes"):
        read(tmp_path / "b.parquet")


def test_tokens_without_any_tag_are_left_out_and_with_some_are_refused(tmp_path: Path):
    rows = [{"tokens": ["a", str(i)], "tags": ["O", "B-X"]} for i in range(40)]
    rows[4]["tags"] = None
    rows[5]["tags"] = [None, None]
    assert read(write_rows(tmp_path / "a.jsonl", rows), kind="tokens").skipped == {"train": 2}
    rows[6]["tags"] = ["O", None]
    with pytest.raises(InputError, match=r"label of line 7 "):
        read(write_rows(tmp_path / "a.jsonl", rows), kind="tokens")


def test_bytes_of_a_table_are_text_in_utf_8_and_others_are_refused(tmp_path: Path):
    def stored(label: bytes) -> Path:
        rows = [{"text": f"t {i}".encode(), "label": label if i % 2 else b"other"} for i in range(40)]
        return write_rows(tmp_path / "a.parquet", rows)

    assert read(stored("schön".encode())).task.labels == ("other", "schön")
    with pytest.raises(InputError, match=r"a\.parquet: the label of rows 2, 4.*UTF-8"):
        read(stored("schön".encode("cp1252")))
