"""The comparison of two filters, against a dictionary in plain Python."""

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import filtered, store_of_its_own, write_jsonl
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
ABSENT = (None, None, 0, None, None, None, "not given")
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


def by_copy(rows: list[tuple]) -> dict[tuple[str, int], tuple]:
    """The rows by id and the number of rows of that id before."""
    seen, found = Counter(), {}
    for row in rows:
        found[row[0], seen[row[0]]] = row
        seen[row[0]] += 1
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_comparison_is_that_of_dictionaries(seed: int, store: Path):
    rng = random.Random(seed)
    a = random_rows(rng, 90)
    b = [(*row[:4], rng.random(), rng.random(), rng.choice(VERDICTS)) for row in a[:70]] + random_rows(rng, 20)
    found = compare(in_parts(a, 40), in_parts(b, 23), 4)
    a, b = by_copy(a), by_copy(b)
    sources, changes, samples = defaultdict(Counter), defaultdict(Counter), {"dropped": [], "added": []}
    for key in a | b:
        x, y = a.get(key, ABSENT), b.get(key, ABSENT)
        in_a, in_b = x[-1] == "kept", y[-1] == "kept"
        for source in ("all", x[1] or y[1]):
            sources[source].update({
                "A keeps": in_a, "A keeps, B does not": in_a and not in_b, "characters, A keeps": in_a * x[2],
                "B keeps": in_b, "B keeps, A does not": in_b and not in_a, "characters, B keeps": in_b * y[2],
            })  # fmt: skip
        if in_a != in_b:
            kept = x if in_a else y
            changes[x[-1], y[-1]].update({"documents": 1, "characters": kept[2]})
            if key in a and key in b:
                samples["dropped" if in_a else "added"].append({
                    "id": x[0], "source": x[1], "A tokens_per_char": round(x[4], 4), "A verdict": x[-1],
                    "B tokens_per_char": round(y[4], 4), "B verdict": y[-1], "text": text_of(kept)[:200],
                })  # fmt: skip
    assert json.loads(json.dumps(found)) == found, "plain values only"
    assert found["sources"][0]["source"] == "all"
    assert {row.pop("source"): row for row in found["sources"]} == sources
    assert {(row.pop("A"), row.pop("B")): row for row in found["changes"]} == changes
    assert {"incompressible", "not given"} < {verdict for change in changes for verdict in change}
    for name, fitting in samples.items():
        assert len(found[name]) == min(4, len(fitting)) > 2
        assert all(sample in fitting for sample in found[name])


def test_the_same_documents_in_another_order_are_the_same(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, VERDICTS[i % 4]) for i in range(40)]
    found = compare(in_parts(rows, 11), in_parts(rows[::-1], 9))
    assert found["changes"] == found["dropped"] == found["added"] == []
    assert found["sources"][0]["A keeps"] == found["sources"][0]["B keeps"] == 20


@pytest.fixture(scope="module")
def filters(tmp_path_factory, toy_texts: list[str]) -> Iterator[tuple[Artifact, Artifact]]:
    """A corpus of two sources, filtered with a mild and a strict threshold."""
    folder = tmp_path_factory.mktemp("filters")
    write_jsonl(folder / "prose.jsonl", toy_texts[:150], "prose")
    noisy = [f"{text} {random.Random(n).randbytes(n).hex(' ')}" for n, text in enumerate(toy_texts[150:])]
    write_jsonl(folder / "noise.jsonl", noisy, "noise")
    with store_of_its_own(folder / "artifacts"):
        files = {"source": "files", "files": [str(folder / "*.jsonl")]}
        corpus = download.fn(Download(**files, documents=0, part_megabytes=0.03))
        yield filtered(corpus, max_tokens_per_char=0.4), filtered(corpus, max_tokens_per_char=0.3)


def test_a_stricter_threshold_only_drops_and_the_counts_are_those_of_the_filters(filters):
    a, b = filters
    found = compare(a, b, 1000)
    whole = found["sources"][0]
    for side, own in (("A", a), ("B", b)):
        kept = (whole[f"{side} keeps"], whole[f"characters, {side} keeps"])
        assert kept == (own.stats["documents"], own.stats["characters"])
    assert [(change["A"], change["B"]) for change in found["changes"]] == [("kept", "incompressible")]
    assert found["added"] == []
    texts = {document.id: document.text[:200] for document in documents_of(a)}
    gone = set(texts) - {document.id for document in documents_of(b)}
    assert len(gone) > 10
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
    found = compare(a, b, 2)
    noise = next(row for row in found["sources"] if row["source"] == "noise")
    assert ["noise", str(noise["A keeps"]), str(noise["B keeps"])] in [line[:3] for line in lines]
    assert len(found["dropped"]) == 2
    for sample in found["dropped"]:
        assert f"{sample['id']} (" in printed
        assert " ".join(sample["text"].split())[:60] in printed
    for words in ("vocabulary_entries", "read different inputs", "sample documents that B keeps"):  # nothing to tell
        assert words not in printed
    assert "sample documents that B keeps and A drops" in diff("filter", b.key, a.key)


def test_cram_diff_says_that_inputs_differ(filters):
    a, _ = filters
    corpus = Artifact(stage="download", key=a.manifest["inputs"]["corpus"].split("/")[1])
    unique = deduplicate.fn(Deduplicate(), corpus)
    other = filtered(unique, max_tokens_per_char=0.4)
    printed = diff("filter", a.key, "latest")
    assert all(words in printed for words in (other.key, "read different inputs", f"deduplicate/{unique.key}"))


def test_an_unknown_stage_an_artifact_itself_and_missing_or_damaged_measurements_are_refused(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, "kept") for i in range(40)]
    whole, other, empty = in_parts(rows, 20), in_parts(rows[::-1], 20), in_parts([], 20)
    for stage, named in (("filtr", "filter?"), ("filter", whole.name)):
        error = CliRunner().invoke(app, ["diff", stage, whole.key, whole.key]).exception
        assert isinstance(error, InputError)
        assert named in str(error)
    with pytest.raises(InputError, match=empty.name):
        compare(whole, empty)
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
    assert all(tables.cell(value) in shown for row in rows for value in row.values())
