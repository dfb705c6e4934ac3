"""Parts as Arrow columns, against the same documents as objects; and artifacts of text in `datasets`."""

import random
import re
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import documents_in, documents_of, downloaded, store_of_its_own, toy_tokens, write_jsonl

from model.errors import InputError
from tasks.corpus import parts
from tasks.corpus.parts import Document, Tally, views

TEXTS = ["one", "", "é" * 5, "語 and 😀", "five\n" * 30, " "]
MANUAL = Path(__file__).parents[1] / "artifacts" / "README.md"


@pytest.fixture
def part(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One part of several row groups."""
    monkeypatch.setattr(parts, "ROW_GROUP_CHARACTERS", 100)
    rng = random.Random(0)
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", [*TEXTS[i:], *rng.choices(TEXTS, k=20)], source=f"toy {i}")
    [part] = parts.parts_of(downloaded(tmp_path / "?.jsonl", max_lost=1))
    assert pq.ParquetFile(part).num_row_groups > 3
    return part


def test_tables_and_rows_of_a_part_are_its_documents_and_are_counted_alike(part: Path):
    documents = list(documents_in(part))
    rows = []
    tally = Tally()
    expected = Tally()
    for table in parts.tables(part):
        rows += [tuple(row.values()) for row in table.to_pylist()]
        for column in (table["text"], table["text"].slice(1, 2), table["text"].slice(0, 0)):
            assert [bytes(view).decode() for view in views(column)] == column.to_pylist()
        parts.count(tally, table)
    for document in documents:
        expected.add(document)
    assert rows == documents
    assert [parts.document_at([part], row) for row in range(len(rows))] == documents
    assert tally.counts() == expected.counts()
    other = Tally()
    parts.count(other, table, pc.multiply(pc.utf8_length(table["text"]), 0))
    assert (other.counts()["documents"], other.counts()["characters"]) == (len(table), 0), "with other lengths"


def test_a_truncated_part_and_text_that_is_not_utf8_are_damage(part: Path, tmp_path: Path):
    table = next(parts.tables(part))
    damaged = tmp_path / "part-00000.parquet"
    wrong = pc.binary_replace_slice(table["text"].cast("large_binary"), 0, 1, b"\xff").cast("large_string", safe=False)
    with parts.writer(damaged) as file:
        file.write_table(table.set_column(2, "text", wrong))
    for _ in range(2):
        with pytest.raises(InputError, match=r"part-00000\.parquet is damaged.*Delete its artifact"):
            list(parts.tables(damaged))
        damaged.write_bytes(part.read_bytes()[: part.stat().st_size // 2])


def test_samples_are_those_of_the_smallest_digests_and_the_earlier_of_equal_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "SAMPLES", 3)
    assert parts.smallest([(5, "a"), (3, "b"), (3, "c"), (9, "d"), (4, "e"), (5, "f")]) == [
        (3, "b"),
        (4, "e"),
        (5, "a"),
    ]


def test_the_code_of_the_manual_opens_the_artifacts_of_text(tmp_path: Path, toy_texts, monkeypatch: pytest.MonkeyPatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    names: dict = {}
    with store_of_its_own(tmp_path / "artifacts"):
        made = toy_tokens(tmp_path, toy_texts)
        for code in re.findall(r"```python\n(.*?)```", MANUAL.read_text(), re.DOTALL):
            exec("\n".join(line for line in code.splitlines() if ".model()" not in line), names)
        filtered = names["filtered"]
        assert [Document(**row) for row in filtered.dataset()] == list(documents_of(made["filter"]))
        stored = np.load(made["tokens"].path / "sequences.npy")
        assert np.array_equal(np.array(names["sequences"]["input_ids"]), stored)
        assert len(filtered.frame("measured")) == made["download"].stats["documents"] - 1  # a duplicate
