"""Parts as Arrow columns, against the same documents as objects."""

import random
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl

from model import InputError
from tasks import download as download_stage
from tasks.corpus import parts
from tasks.corpus.parts import Tally, batches, count, documents_at, parts_of, smallest, strings, tables, views, writer
from tasks.download import Download, download
from tasks.store import Artifact

TEXTS = ["one", "", "é" * 5, "語 and 😀", "five\n" * 30, " "]


@pytest.fixture
def made(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """One part of several row groups."""
    monkeypatch.setattr(download_stage, "ROW_GROUP_CHARACTERS", 100)
    rng = random.Random(0)
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", [*TEXTS[i:], *rng.choices(TEXTS, k=20)], source=f"toy {i}")
    return download.fn(Download(source="files", files=[str(tmp_path / "?.jsonl")], documents=0, max_lost=1))


def test_tables_hold_the_documents_of_a_part_and_are_counted_alike(made: Artifact):
    [part] = parts_of(made)
    documents = [d for batch in batches(part) for d in batch]
    found, texts, tally = [], [], Tally()
    for table in tables(part):
        found += [tuple(row.values()) for row in table.to_pylist()]
        texts += [bytes(view).decode() for view in views(table["text"].slice(0))]
        count(tally, table)
    assert pq.ParquetFile(part).num_row_groups > 3
    assert found == [tuple(d) for d in documents]
    assert texts == [d.text for d in documents]
    expected = Tally()
    for document in documents:
        expected.add(document)
    assert tally.counts() == expected.counts()


def test_a_slice_of_a_column_has_its_own_texts(made: Artifact):
    table = next(tables(parts_of(made)[0]))
    sliced = table["text"].slice(1, 2)
    assert [bytes(view).decode() for view in views(sliced)] == sliced.to_pylist()
    offsets, data = strings(table["text"].slice(0, 0))
    assert (offsets.tolist(), bytes(data)) == ([0], b"")


def test_any_row_is_found_in_its_row_group(made: Artifact):
    [part] = parts_of(made)
    documents = [d for batch in batches(part) for d in batch]
    rows = [0, len(documents) - 1, *range(len(documents))]
    assert documents_at(part, rows) == [documents[row] for row in rows]


def test_other_lengths_are_counted_in_place_of_all_characters(made: Artifact):
    table, tally = next(tables(parts_of(made)[0])), Tally()
    count(tally, table, pc.multiply(pc.utf8_length(table["text"]), 0))
    assert (tally.counts()["documents"], tally.counts()["characters"]) == (len(table), 0)


def test_text_that_is_not_utf8_is_damage(made: Artifact, tmp_path: Path):
    table = next(tables(parts_of(made)[0]))
    cut = pc.binary_replace_slice(table["text"].cast("large_binary"), 0, 1, b"\xff").cast("large_string", safe=False)
    with writer(tmp_path / "part-00000.parquet") as file:
        file.write_table(table.set_column(2, "text", cut))
    with pytest.raises(InputError, match=r"part-00000\.parquet is damaged.*Delete its artifact"):
        list(tables(tmp_path / "part-00000.parquet"))


def test_a_part_cut_short_is_damage(made: Artifact, tmp_path: Path):
    data = parts_of(made)[0].read_bytes()
    (tmp_path / "part-00000.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(InputError, match=r"part-00000\.parquet is damaged"):
        list(tables(tmp_path / "part-00000.parquet"))


def test_samples_are_those_of_the_smallest_digests_and_the_earlier_of_equal_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "SAMPLES", 3)
    assert smallest([(5, "a"), (3, "b"), (3, "c"), (9, "d"), (4, "e"), (5, "f")]) == [(3, "b"), (4, "e"), (5, "a")]
