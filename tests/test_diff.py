"""Two filters side by side, against a dictionary in plain Python."""

import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import filtered, write_jsonl
from typer.testing import CliRunner

from flows.cli import tables
from flows.cli.main import app
from model import InputError
from tasks.corpus.parts import SCHEMA, documents_of
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.reports import filter_diff
from tasks.reports.filter_diff import compare
from tasks.stage import Params, stage
from tasks.store import Artifact

MEASURES = ("id", "source", "characters", "tokens", "tokens_per_char", "zstd_ratio", "verdict")
VERDICTS = ("kept", "kept", "incompressible", "too short")


class Rows(Params):
    """What a filter is to have measured, a list of rows a part."""

    parts: list[list[tuple]]


@stage(version=1, name="filter")
def made_up(params: Rows, out: Path) -> dict:
    """Write measurements, and the text of the documents kept, as a filter does."""
    for number, rows in enumerate(params.parts):
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        pq.write_table(pa.table(columns, names=MEASURES), out / f"measured-{number:05d}.parquet", row_group_size=5)
        kept = [(r[0], r[1], text_of(r)) for r in rows if r[-1] == "kept"]
        pq.write_table(
            pa.table([list(c) for c in zip(*kept, strict=True)] or [[], [], []], schema=SCHEMA),
            out / f"part-{number:05d}.parquet",
        )
    return {}


def text_of(row: tuple) -> str:
    """A text of as many characters as were measured."""
    return f"text of {row[0]}\n".ljust(row[2], "x")


def random_rows(rng: random.Random, count: int) -> list[tuple]:
    """Measurements in which some ids stand several times."""
    names = [f"file:{rng.randrange(count)}" for _ in range(count)]
    return [
        (
            name,
            ("web", "books")[int(name[5:]) % 2],
            rng.randrange(20, 400),
            9,
            rng.random(),
            rng.random(),
            rng.choice(VERDICTS),
        )
        for name in names
    ]


def in_parts(rows: list[tuple], size: int) -> Artifact:
    return made_up.fn(Rows(parts=[rows[i : i + size] for i in range(0, len(rows), size)]))


def by_id(rows: list[tuple]) -> dict[tuple[str, int], tuple]:
    """Rows by id, and how often it stood before."""
    seen, found = Counter(), {}
    for row in rows:
        found[row[0], seen[row[0]]] = row
        seen[row[0]] += 1
    return found


@pytest.fixture(params=range(3))
def pair(request, store: Path) -> tuple[list[tuple], list[tuple], dict]:
    """The rows of two filters, some documents being only in one and the order another, and what compares them."""
    rng = random.Random(request.param)
    a = random_rows(rng, 90)
    b = [(*row[:4], rng.random(), rng.random(), rng.choice(VERDICTS)) for row in a[:70]] + random_rows(rng, 20)
    return a, b, compare(in_parts(a, 40), in_parts(b, 23), samples=4)


def test_counts_are_those_of_a_dictionary(pair):
    a, b, found = pair
    of_a, of_b = by_id(a), by_id(b)
    for row in found["sources"]:

        def of(rows: dict, others: dict | None = None, source: str = row["source"]) -> list[int]:
            chosen = [
                r
                for key, r in rows.items()
                if source in ("all", r[1])
                and r[-1] == "kept"
                and (others is None or others.get(key, [""])[-1] != "kept")
            ]
            return [len(chosen), sum(r[2] for r in chosen)]

        assert [row["A keeps"], row["characters, A keeps"]] == of(of_a)
        assert [row["B keeps"], row["characters, B keeps"]] == of(of_b)
        assert row["A keeps, B does not"] == of(of_a, of_b)[0] > 0
        assert row["B keeps, A does not"] == of(of_b, of_a)[0] > 0
    assert {row["source"] for row in found["sources"]} == {"all", "web", "books"}
    assert found["sources"][0]["source"] == "all"


def test_changes_are_told_by_both_verdicts(pair):
    a, b, found = pair
    of_a, of_b = by_id(a), by_id(b)
    none = (None, None, 0, None, None, None, "not given")
    pairs = [(of_a.get(key, none), of_b.get(key, none)) for key in of_a | of_b]
    changed = [(x, y) for x, y in pairs if (x[-1] == "kept") != (y[-1] == "kept")]
    expected = Counter((x[-1], y[-1]) for x, y in changed)
    assert {(row["A"], row["B"]): row["documents"] for row in found["changes"]} == expected
    characters = Counter()
    for x, y in changed:
        characters[x[-1], y[-1]] += x[2] if x[-1] == "kept" else y[2]
    assert {(row["A"], row["B"]): row["characters"] for row in found["changes"]} == characters
    assert {"incompressible", "not given"} < {v for change in expected for v in change}


def test_samples_have_the_text_and_what_both_say_of_it(pair):
    a, b, found = pair
    of_a, of_b = list(by_id(a).items()), by_id(b)
    for name, kept, other in (("dropped", 0, 1), ("added", 1, 0)):
        both = [(row, of_b[key]) for key, row in of_a if key in of_b]
        fitting = [rows for rows in both if rows[kept][-1] == "kept" and rows[other][-1] != "kept"]
        assert len(found[name]) == min(4, len(fitting)) > 2
        for sample in found[name]:
            says = [
                (x, y)
                for x, y in fitting
                if (sample["id"], sample["A tokens_per_char"], sample["B tokens_per_char"])
                == (x[0], round(x[4], 4), round(y[4], 4))
            ]
            assert len(says) == 1
            assert (sample["A verdict"], sample["B verdict"]) == (says[0][0][-1], says[0][1][-1])
            assert sample["text"] == text_of(says[0][kept])[:200]
            assert sample["source"] == says[0][0][1]


def test_several_passes_give_what_one_does(pair, monkeypatch: pytest.MonkeyPatch):
    a, b, found = pair
    monkeypatch.setattr(filter_diff, "ROWS_AT_ONCE", 7)
    calls, read = [], filter_diff.read
    monkeypatch.setattr(filter_diff, "read", lambda *arguments: calls.append(1) or read(*arguments))
    assert compare(in_parts(a, 40), in_parts(b, 23), samples=4) == found
    assert len(calls) == 2 * 13


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


def test_a_stricter_threshold_only_drops_and_the_counts_are_the_filters_own(filters):
    a, b = filters
    found = compare(a, b, samples=1000)
    everything = found["sources"][0]
    assert [everything["A keeps"], everything["B keeps"]] == [a.stats["documents"], b.stats["documents"]]
    assert [everything["characters, A keeps"], everything["characters, B keeps"]] == [
        a.stats["characters"],
        b.stats["characters"],
    ]
    assert everything["A keeps, B does not"] == a.stats["documents"] - b.stats["documents"] > 10
    assert everything["B keeps, A does not"] == len(found["added"]) == 0
    for row in found["sources"][1:]:
        assert row["A keeps"] == a.stats["by_source"][row["source"]]["documents"]
    (change,) = found["changes"]
    assert (change["A"], change["B"], change["documents"]) == (
        "kept",
        "incompressible",
        everything["A keeps, B does not"],
    )
    texts = {d.id: d.text for d in documents_of(a)}
    gone = set(texts) - {d.id for d in documents_of(b)}
    assert {sample["id"] for sample in found["dropped"]} == gone
    for sample in found["dropped"]:
        assert sample["text"] == texts[sample["id"]][:200]
        assert 0.3 <= sample["A tokens_per_char"] <= 0.4


def test_cram_diff_filter_prints_params_counts_and_samples(filters, monkeypatch: pytest.MonkeyPatch):
    a, b = filters
    done = CliRunner().invoke(app, ["diff", "filter", a.key[:8], b.key, "--samples", "2"])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert any(line.split() == ["params.max_tokens_per_char", "0.4", "0.3"] for line in lines)
    assert "vocabulary_entries" not in done.stdout
    found = compare(a, b, samples=2)
    noise = next(row for row in found["sources"] if row["source"] == "noise")
    assert any(line.split()[:3] == ["noise", str(noise["A keeps"]), str(noise["B keeps"])] for line in lines)
    assert len(found["dropped"]) == 2
    for sample in found["dropped"]:
        assert f"{sample['id']} (" in done.stdout
        assert " ".join(sample["text"].split())[:60] in done.stdout
    assert "read different inputs" not in done.stdout
    assert "sample documents that B keeps" not in done.stdout
    other = CliRunner().invoke(app, ["diff", "filter", b.key, a.key])
    assert "sample documents that B keeps and A drops" in other.stdout


def test_cram_diff_says_that_inputs_differ(filters):
    a, _ = filters
    corpus = Artifact(stage="download", key=a.manifest["inputs"]["corpus"].split("/")[1])
    unique = deduplicate.fn(Deduplicate(), corpus)
    other = filtered(unique, max_tokens_per_char=0.4)
    done = CliRunner().invoke(app, ["diff", "filter", a.key, "latest"])
    assert other.key in done.stdout
    assert "read different inputs" in done.stdout
    assert f"deduplicate/{unique.key}" in done.stdout


def test_cram_diff_of_another_stage_prints_params_and_statistics(store: Path, tmp_path: Path, toy_texts: list[str]):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    a, b = (download.fn(Download(source="files", files=[str(shard)], documents=n)) for n in (40, 50))
    done = CliRunner().invoke(app, ["diff", "download", a.key, b.key])
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["params.documents", "40", "50"] in rows
    assert ["by_source.toy.documents", "40", "50"] in rows
    assert not [row for row in rows if row[:1] == ["shards"]], "what is the same in both is not listed"


def test_what_cannot_be_compared_is_told(filters):
    a, _ = filters
    for arguments, words in (
        (["filtr", a.key, a.key], "There is no stage 'filtr'"),
        (["filter", a.key, a.key[:6]], "A and B are both filter/"),
        (["filter", a.key, "nothing"], "No complete artifact of filter is 'nothing'"),
    ):
        done = CliRunner().invoke(app, ["diff", *arguments])
        assert isinstance(done.exception, InputError)
        assert words in str(done.exception)


def test_measurements_that_are_missing_or_damaged_are_told(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, "kept") for i in range(40)]
    whole, empty = in_parts(rows, 20), made_up.fn(Rows(parts=[]))
    with pytest.raises(InputError, match=r"has no measured-\*\.parquet"):
        compare(whole, empty)
    other = in_parts(rows[::-1], 20)
    path = other.path / "measured-00001.parquet"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(InputError, match=r"measured-00001\.parquet of filter/.* is damaged"):
        compare(whole, other)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_tables_are_never_cut_off_however_narrow_the_terminal(filters, monkeypatch, capsys, width: int):

    monkeypatch.setattr(tables.console, "width", width)
    rows = filters[0].stats["table"]
    tables.print_rows(rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    for row in rows:
        for value in row.values():
            assert tables.cell(value) in shown
