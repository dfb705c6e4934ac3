"""Rows of tables and JSON files: the same records from every format, compression and layout, with exact numbers."""

import gzip
import json
import random
from pathlib import Path

import datasets
import pandas as pd
import pyarrow as pa
import pytest
from files_table import COMPRESSIONS, arrow_of, files_of, parquet_of

from model.errors import InputError
from tasks.corpus.kinds import Damage
from tasks.corpus.losses import Loss
from tasks.corpus.rows import records

ROWS = [
    {"a": "one", "b": "1"},
    {"a": "two, three;\tfour|", "b": '"2"'},
    {"a": "l1\nl2", "b": "é"},
    {"a": "", "b": "語"},
]
FILES = files_of(ROWS)


def found(folder: Path, name: str, stored: bytes, encoding: str = "") -> list:
    (folder / name).write_bytes(stored)
    return list(records(folder / name, name, encoding))


@pytest.mark.parametrize("suffix", ["", *COMPRESSIONS])
@pytest.mark.parametrize("name", FILES)
def test_every_shape_gives_the_same_rows_with_their_numbers(tmp_path: Path, name: str, suffix: str):
    stored, numbers = FILES[name]
    whole = COMPRESSIONS[suffix](stored) if suffix else stored
    assert found(tmp_path, name + suffix, whole) == list(zip(numbers, ROWS, strict=True))


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_compression_that_is_cut_or_followed_by_garbage_is_damage(tmp_path: Path, suffix: str):
    rng = random.Random(1)
    whole = COMPRESSIONS[suffix]("".join(f'{{"a": "{rng.random()}"}}\n' for _ in range(3000)).encode())
    for stored in (whole[:-1], whole[: len(whole) // 2], whole[:3], b"", whole + b"garbage", whole + whole[:-1]):
        with pytest.raises(Damage, match=rf"a\.jsonl{suffix} is (truncated|corrupt|mislabelled)"):
            found(tmp_path, f"a.jsonl{suffix}", stored)
    assert len(found(tmp_path, f"a.jsonl{suffix}", whole + whole)) == 6000, "one after another"


@pytest.mark.parametrize(
    ("name", "stored", "said"),
    [
        ("a.json", json.dumps(ROWS, indent=2).encode()[:-30], "truncated"),
        ("a.json", json.dumps(ROWS, indent=2).encode()[:-2], "truncated"),
        ("a.json", json.dumps(ROWS, indent=2).replace('"b": "1"', '"b" "1"').encode(), "line 4"),
        ("a.json", json.dumps(ROWS, indent=2).encode() + b"\n]", "not JSON"),
        ("a.json", b"[\n" + b"[" * 100_000, "nested"),
        ("a.json", '[\n{"a": "é"}]'.encode("latin-1"), "download.encoding"),
        ("a.csv", b'a,b\n1,2\n"open,3\n4,5\n', "line 3"),
        ("a.csv", b"a,a\n1,2\n", "named a"),
        ("a.csv", gzip.compress(b"a,b\n", mtime=0), "gzip"),
        ("a.jsonl", b'{"a": "one two three"}\n'.decode().encode("utf-16-le"), "utf-16-le"),
        ("a.csv", "слово,число\nраз,два\n".encode("utf-16-be") * 9, "utf-16-be"),
        ("a.arrow", arrow_of(ROWS)[:-8], "truncated"),
        ("a.arrow", arrow_of(ROWS, pa.ipc.new_file)[:-8], "corrupt"),
        ("a.arrow", parquet_of(ROWS), "Parquet"),
        ("a.parquet", b"a,b\n1,2\n", "text"),
        ("a.txt", b"text", "not a table"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, stored: bytes, said: str):
    with pytest.raises(InputError, match=rf"a\.\w+ .*{said}"):
        found(tmp_path, name, stored)


def test_rows_that_do_not_fit_are_lost_alone_and_with_their_lines(tmp_path: Path):
    stored = b'a,b\r\none\r\n1,2,3\r\n"q"x,2\r\n"two\r\nlines",4\r\n\xff,5\r\n\r\nlast,6\r\n'
    assert [
        row if isinstance(row, tuple) and not isinstance(row, Loss) else row[1:3]
        for row in found(tmp_path, "a.csv", stored)
    ] == [
        (2, "wrong number of fields"),
        (3, "wrong number of fields"),
        (4, "a quote within a quoted field"),
        (5, {"a": "two\r\nlines", "b": "4"}),
        (7, "not UTF-8"),
        (9, {"a": "last", "b": "6"}),
    ]
    stored = b'{"a": 1}\n[]\n{"a": "\\ud800"}\n{\n{"a": NaN}'
    rows = found(tmp_path, "a.jsonl", stored)
    assert [row[1] for row in rows if isinstance(row, Loss)] == [2, 3, 4]
    assert [row[0] for row in rows if not isinstance(row, Loss)] == [1, 5]


def test_quotes_of_a_tsv_are_plain_characters_unless_they_enclose_fields(tmp_path: Path):
    texts = ['"Hello," he said.', 'He said "no".', "plain", '"unbalanced']
    stored = "".join(f"{text}\t{i}\n" for i, text in enumerate(["a", *texts])).encode()
    assert [row["a"] for _, row in found(tmp_path, "a.tsv", stored)] == texts


def test_delimiters_within_quoted_names_of_columns_are_text(tmp_path: Path):
    rows = found(tmp_path, "a.csv", b'"a, b, c";"d, e"\n1;2\n')
    assert rows == [(2, {"a, b, c": "1", "d, e": "2"})]


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "\ufeffsep=;", "sep=;;"])
@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_the_line_in_which_excel_names_the_delimiter_is_no_row(tmp_path: Path, line: str, end: str):
    rows = [line, "text;label,", "a, b;c", "d;,,,"]
    (tmp_path / "a.csv").write_bytes(end.join(rows).encode())
    assert list(records(tmp_path / "a.csv", "a.csv")) == [
        (3, {"text": "a, b", "label,": "c"}),
        (4, {"text": "d", "label,": ",,,"}),
    ]
    (tmp_path / "b.csv").write_bytes(b"sep=\t\nx,y\tz\n1\t2\n")
    assert list(records(tmp_path / "b.csv", "b.csv")) == [(3, {"x,y": "1", "z": "2"})]
    (tmp_path / "c.csv").write_bytes(b"sep=a,b\n1,2\n")  # a header that begins so
    assert list(records(tmp_path / "c.csv", "c.csv")) == [(2, {"sep=a": "1", "b": "2"})]


def test_text_in_another_encoding_is_read_if_it_is_named(tmp_path: Path):
    for encoding in ("windows-1252", "utf-16-le", "utf-16-be", "utf-8"):
        rows = found(tmp_path, "a.csv", "a,b\ncafé,“x”\n".encode(encoding), encoding)
        assert rows == [(2, {"a": "café", "b": "“x”"})]
    assert found(tmp_path, "a.csv", "a,b\ncafé,1\n".encode(), "windows-1252") == [(2, {"a": "café", "b": "1"})]
    assert found(tmp_path, "a.csv", "a,b\ncafé,1\n".encode("latin-1"))[0].reason == "not UTF-8"


def test_values_of_any_characters_are_read_in_any_layout(tmp_path: Path):
    rng = random.Random(2)
    for _ in range(200):
        rows = [
            {"a": "".join(rng.choices('ab"\\é\n1', k=rng.randrange(30))), "n": rng.randrange(10**9)} for _ in range(5)
        ]
        indent, end = rng.choice([None, 0, 3]), rng.choice(["", "\n"])
        for text in (json.dumps(rows, indent=indent), end.join(json.dumps(row, indent=indent) for row in rows)):
            assert [row for _, row in found(tmp_path, "a.json", text.encode())] == rows, text


def test_rows_are_those_of_pandas_and_datasets(tmp_path: Path):
    rng = random.Random(3)
    rows = [{"a": "".join(rng.choices('ab",;\té\n ', k=9)) + ".", "b": str(i)} for i in range(300)]
    frame = pd.DataFrame(rows)
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_json(tmp_path / "a.json", orient="records", indent=1)
    for name in ("a.csv", "a.json"):
        assert [row for _, row in records(tmp_path / name, name)] == rows
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    [file] = (tmp_path / "saved").glob("*.arrow")
    assert [row for _, row in records(file, "data.arrow")] == rows
