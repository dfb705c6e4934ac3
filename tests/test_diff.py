"""The comparison of two filters, against a dictionary in plain Python."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import filtered, write_jsonl
from test_report import made
from typer.testing import CliRunner

from flows.cli import tables
from flows.cli.main import app
from model import InputError
from tasks.corpus.parts import Document, documents_of, table
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.reports.filter_diff import compare
from tasks.store import Artifact

MEASURES = ("id", "source", "characters", "tokens", "tokens_per_char", "zstd_ratio", "verdict")
VERDICTS = ("kept", "kept", "incompressible", "too short")
KEYS = itertools.count()


def text_of(row: tuple) -> str:
    """A text of as many characters as were measured."""
    return f"text of {row[0]}\n".ljust(row[2], "x")


def random_rows(rng: random.Random, count: int) -> list[tuple]:
    """Measurements in which some ids occur several times."""
    names = [f"file:{rng.randrange(count)}" for _ in range(count)]
    sources = [("web", "books")[int(name[5:]) % 2] for name in names]
    return [
        (name, source, rng.randrange(20, 400), 9, rng.random(), rng.random(), rng.choice(VERDICTS))
        for name, source in zip(names, sources, strict=True)
    ]


def in_parts(rows: list[tuple], size: int) -> Artifact:
    """A filter's artifact with these measurements and the texts of the documents kept."""
    files = {}
    for number, start in enumerate(range(0, len(rows), size)):
        of_part = rows[start : start + size]
        kept = [Document(row[0], row[1], text_of(row)) for row in of_part if row[-1] == "kept"]
        files[f"measured-{number:05d}.parquet"] = pa.table(list(map(list, zip(*of_part, strict=True))), names=MEASURES)
        files[f"part-{number:05d}.parquet"] = table(kept)
    return made(f"filter/{next(KEYS):012d}", {"stage": "filter", "stats": {}}, files)


@pytest.fixture(params=range(3))
def pair(request, store: Path) -> tuple[dict, dict, dict]:
    """The rows of two filters by id and copy, and their comparison; some documents are in one filter only."""
    rng = random.Random(request.param)
    a = random_rows(rng, 90)
    b = [(*row[:4], rng.random(), rng.random(), rng.choice(VERDICTS)) for row in a[:70]] + random_rows(rng, 20)
    return by_id(a), by_id(b), compare(in_parts(a, 40), in_parts(b, 23), 4)


def by_id(rows: list[tuple]) -> dict[tuple[str, int], tuple]:
    seen, found = Counter(), {}
    for row in rows:
        found[row[0], seen[row[0]]] = row
        seen[row[0]] += 1
    return found


def test_counts_are_those_of_a_dictionary(pair):
    a, b, found = pair

    def kept(rows: dict, others: dict, source: str) -> list[int]:
        """Documents kept, their characters, and documents that the other filter does not keep."""
        own = {key: row for key, row in rows.items() if row[-1] == "kept" and source in ("all", row[1])}
        alone = [key for key in own if others.get(key, [""])[-1] != "kept"]
        return [len(own), sum(row[2] for row in own.values()), len(alone)]

    assert found["sources"][0]["source"] == "all"
    assert {row["source"] for row in found["sources"]} == {"all", "web", "books"}
    for row in found["sources"]:
        for own, other, x, y in ((a, b, "A", "B"), (b, a, "B", "A")):
            names = f"{x} keeps", f"characters, {x} keeps", f"{x} keeps, {y} does not"
            assert [row[name] for name in names] == kept(own, other, row["source"])


def test_changes_are_counted_by_both_verdicts(pair):
    a, b, found = pair
    none = (None, None, 0, None, None, None, "not given")
    both = [(a.get(key, none), b.get(key, none)) for key in a | b]
    documents, characters = Counter(), Counter()
    for x, y in both:
        if (x[-1] == "kept") != (y[-1] == "kept"):
            documents[x[-1], y[-1]] += 1
            characters[x[-1], y[-1]] += x[2] if x[-1] == "kept" else y[2]
    assert {(row["A"], row["B"]): row["documents"] for row in found["changes"]} == documents
    assert {(row["A"], row["B"]): row["characters"] for row in found["changes"]} == characters
    assert {"incompressible", "not given"} < {verdict for change in documents for verdict in change}
    assert json.loads(json.dumps(found)) == found, "plain values only"


def test_samples_have_the_text_and_both_measurements(pair):
    a, b, found = pair
    both = [(row, b[key]) for key, row in a.items() if key in b]
    for name, kept, other in (("dropped", 0, 1), ("added", 1, 0)):
        fitting = [rows for rows in both if rows[kept][-1] == "kept" and rows[other][-1] != "kept"]
        expected = [
            {"id": x[0], "source": x[1], "A tokens_per_char": round(x[4], 4), "A verdict": x[-1]}
            | {"B tokens_per_char": round(y[4], 4), "B verdict": y[-1], "text": text_of((x, y)[kept])[:200]}
            for x, y in fitting
        ]
        assert len(found[name]) == min(4, len(fitting)) > 2
        assert all(sample in expected for sample in found[name])


def test_the_same_documents_in_another_order_are_the_same(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, VERDICTS[i % 4]) for i in range(40)]
    found = compare(in_parts(rows, 11), in_parts(rows[::-1], 9))
    assert found["changes"] == found["dropped"] == found["added"] == []
    assert found["sources"][0]["A keeps"] == found["sources"][0]["B keeps"] == 20


@pytest.fixture
def filters(store: Path, tmp_path: Path, toy_texts: list[str]) -> tuple[Artifact, Artifact]:
    """A corpus of two sources, filtered with a mild and a strict threshold."""
    write_jsonl(tmp_path / "prose.jsonl", toy_texts[:150], "prose")
    noisy = [f"{text} {random.Random(n).randbytes(n).hex(' ')}" for n, text in enumerate(toy_texts[150:])]
    write_jsonl(tmp_path / "noise.jsonl", noisy, "noise")
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "*.jsonl")], documents=0, part_megabytes=0.03))
    return filtered(corpus, max_tokens_per_char=0.4), filtered(corpus, max_tokens_per_char=0.3)


def test_a_stricter_threshold_only_drops_and_the_counts_are_those_of_the_filters(filters):
    a, b = filters
    found = compare(a, b, 1000)
    whole, *by_source = found["sources"]
    for side, own in (("A", a), ("B", b)):
        assert whole[f"{side} keeps"] == own.stats["documents"]
        assert whole[f"characters, {side} keeps"] == own.stats["characters"]
        for row in by_source:
            assert row[f"{side} keeps"] == own.stats["by_source"].get(row["source"], {"documents": 0})["documents"]
    assert whole["A keeps, B does not"] == a.stats["documents"] - b.stats["documents"] > 10
    assert whole["B keeps, A does not"] == len(found["added"]) == 0
    [change] = found["changes"]
    assert (change["A"], change["B"]) == ("kept", "incompressible")
    assert change["documents"] == whole["A keeps, B does not"]
    texts = {document.id: document.text[:200] for document in documents_of(a)}
    gone = set(texts) - {document.id for document in documents_of(b)}
    assert {sample["id"]: sample["text"] for sample in found["dropped"]} == {id: texts[id] for id in gone}
    assert all(0.3 <= sample["A tokens_per_char"] <= 0.4 for sample in found["dropped"])


def diff(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["diff", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_cram_diff_filter_prints_parameters_counts_and_samples(filters):
    a, b = filters
    printed = diff("filter", a.key[:8], b.key, "--samples", "2")
    lines = [line.split() for line in printed.splitlines()]
    assert ["params.max_tokens_per_char", "0.4", "0.3"] in lines
    assert "vocabulary_entries" not in printed, "it is the same in both"
    found = compare(a, b, 2)
    noise = next(row for row in found["sources"] if row["source"] == "noise")
    assert ["noise", str(noise["A keeps"]), str(noise["B keeps"])] in [line[:3] for line in lines]
    assert len(found["dropped"]) == 2
    for sample in found["dropped"]:
        assert f"{sample['id']} (" in printed
        assert " ".join(sample["text"].split())[:60] in printed
    assert "read different inputs" not in printed
    assert "sample documents that B keeps" not in printed
    assert "sample documents that B keeps and A drops" in diff("filter", b.key, a.key)


def test_cram_diff_says_that_inputs_differ(filters):
    a, _ = filters
    corpus = Artifact(stage="download", key=a.manifest["inputs"]["corpus"].split("/")[1])
    unique = deduplicate.fn(Deduplicate(), corpus)
    other = filtered(unique, max_tokens_per_char=0.4)
    printed = diff("filter", a.key, "latest")
    for words in (other.key, "read different inputs", f"deduplicate/{unique.key}"):
        assert words in printed


def test_cram_diff_of_another_stage_prints_params_and_statistics(store: Path, tmp_path: Path, toy_texts: list[str]):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    a, b = (download.fn(Download(source="files", files=[str(shard)], documents=n)) for n in (40, 50))
    rows = [line.split() for line in diff("download", a.key, b.key).splitlines()]
    assert ["params.documents", "40", "50"] in rows
    assert ["by_source.toy.documents", "40", "50"] in rows
    assert not [row for row in rows if row[:1] == ["shards"]], "it is the same in both"


@pytest.mark.parametrize(
    ("stage_name", "b", "named"),
    [("filtr", "latest", "filtr"), ("filter", "latest", "filter/"), ("filter", "x", "'x'")],
)
def test_what_cannot_be_compared_is_refused(stage_name: str, b: str, named: str, store: Path):
    only = in_parts([("f:1", "web", 50, 9, 0.1, 0.1, "kept")], 1)
    error = CliRunner().invoke(app, ["diff", stage_name, only.key[:6], b]).exception
    assert isinstance(error, InputError)
    assert named in str(error)


def test_missing_or_damaged_measurements_are_refused(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, "kept") for i in range(40)]
    whole, empty = in_parts(rows, 20), in_parts([], 20)
    with pytest.raises(InputError, match=empty.name):
        compare(whole, empty)
    other = in_parts(rows[::-1], 20)
    path = other.path / "measured-00001.parquet"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(InputError, match=rf"{path.name} of {other.name}"):
        compare(whole, other)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_tables_are_never_cut_off_in_a_narrow_terminal(filters, monkeypatch, capsys, width: int):
    monkeypatch.setattr(tables.console, "width", width)
    rows = filters[0].stats["table"]
    tables.print_rows(rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for row in rows:
        for value in row.values():
            assert tables.cell(value) in shown
