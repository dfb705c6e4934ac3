"""Parts as Arrow columns, against the same documents as objects; and artifacts of text in `datasets`."""

import random
import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens, write_jsonl

from model import InputError
from tasks.corpus import part_writer, parts
from tasks.corpus.parts import (
    Document,
    Tally,
    batches,
    count,
    documents_at,
    documents_of,
    parts_of,
    smallest,
    strings,
    tables,
    views,
    writer,
)
from tasks.download import Download, download

TEXTS = ["one", "", "é" * 5, "語 and 😀", "five\n" * 30, " "]
MANUAL = Path(__file__).parents[1] / "artifacts" / "README.md"


@pytest.fixture
def part(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One part of several row groups."""
    monkeypatch.setattr(part_writer, "ROW_GROUP_CHARACTERS", 100)
    rng = random.Random(0)
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", [*TEXTS[i:], *rng.choices(TEXTS, k=20)], source=f"toy {i}")
    made = download.fn(Download(source="files", files=[str(tmp_path / "?.jsonl")], documents=0, max_lost=1))
    [part] = parts_of(made)
    return part


@pytest.fixture
def documents(part: Path) -> list[Document]:
    return [document for batch in batches(part) for document in batch]


def test_tables_hold_the_documents_of_a_part_and_are_counted_alike(part: Path, documents: list[Document]):
    rows, texts, tally, expected = [], [], Tally(), Tally()
    for table in tables(part):
        rows += [tuple(row.values()) for row in table.to_pylist()]
        texts += [bytes(view).decode() for view in views(table["text"].slice(0))]
        count(tally, table)
    for document in documents:
        expected.add(document)
    assert pq.ParquetFile(part).num_row_groups > 3
    assert rows == [tuple(d) for d in documents]
    assert texts == [d.text for d in documents]
    assert tally.counts() == expected.counts()
    other = Tally()
    count(other, table, pc.multiply(pc.utf8_length(table["text"]), 0))
    assert (other.counts()["documents"], other.counts()["characters"]) == (len(table), 0), "with other lengths"


def test_a_slice_of_a_column_has_its_own_texts(part: Path):
    table = next(tables(part))
    sliced = table["text"].slice(1, 2)
    assert [bytes(view).decode() for view in views(sliced)] == sliced.to_pylist()
    offsets, data = strings(table["text"].slice(0, 0))
    assert (offsets.tolist(), bytes(data)) == ([0], b"")


def test_any_row_is_found_in_its_row_group(part: Path, documents: list[Document]):
    rows = [0, len(documents) - 1, *range(len(documents))]
    assert documents_at(part, rows) == [documents[row] for row in rows]


def test_a_truncated_part_and_text_that_is_not_utf8_are_damage(part: Path, tmp_path: Path):
    table, damaged = next(tables(part)), tmp_path / "part-00000.parquet"
    wrong = pc.binary_replace_slice(table["text"].cast("large_binary"), 0, 1, b"\xff").cast("large_string", safe=False)
    with writer(damaged) as file:
        file.write_table(table.set_column(2, "text", wrong))
    with pytest.raises(InputError, match=r"part-00000\.parquet is damaged.*Delete its artifact"):
        list(tables(damaged))
    damaged.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(InputError, match=r"part-00000\.parquet is damaged"):
        list(tables(damaged))


def test_samples_are_those_of_the_smallest_digests_and_the_earlier_of_equal_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "SAMPLES", 3)
    assert smallest([(5, "a"), (3, "b"), (3, "c"), (9, "d"), (4, "e"), (5, "f")]) == [(3, "b"), (4, "e"), (5, "a")]


def test_the_code_of_the_manual_opens_the_artifacts_of_text(tmp_path: Path, toy_texts, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names: dict = {}
    with store_of_its_own(tmp_path / "artifacts"):
        made = toy_tokens(tmp_path, toy_texts)
        for code in re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL):
            exec(code, names)
        assert [Document(**row) for row in names["texts"]] == list(documents_of(made["filter"]))
        stored = np.load(made["tokens"].path / "sequences.npy")
        assert np.array_equal(np.array(names["sequences"]["input_ids"]), stored)
        assert (
            names["measured"].groupby("verdict").size().sum() == made["download"].stats["documents"] - 1
        )  # a duplicate
