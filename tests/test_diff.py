"""`cram diff`: filters against a dictionary in plain Python, and the scores of reports."""

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from conftest import documents_of, filtered, store_of_its_own, write_jsonl
from test_report import HELDOUT, finetuned, lineage, made, written
from typer.testing import CliRunner

from flows.cli import common
from flows.cli.main import app
from model.errors import InputError
from tasks.corpus.parts import Document, table
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.glue.table import TASKS
from tasks.reports.diff import (
    LOSS,
    compare_scores,
    count_changed_verdicts,
    count_kept,
    join_measurements,
    sample_documents,
)
from tasks.store.artifacts import Artifact

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
    seen = Counter()
    found = {}
    for row in rows:
        found[row[0], seen[row[0]]] = row
        seen[row[0]] += 1
    return found


def test_a_comparison_is_that_of_dictionaries(rng: random.Random, store: Path):
    a = random_rows(rng, 90)
    b = [(*row[:4], rng.random(), rng.random(), rng.choice(VERDICTS)) for row in a[:70]] + random_rows(rng, 20)
    rng.shuffle(b)
    filters = {"A": in_parts(a, 40), "B": in_parts(b, 23)}
    both = join_measurements(*filters.values())
    a = by_copy(a)
    b = by_copy(b)
    sources = defaultdict(Counter)
    changes = defaultdict(Counter)
    samples = {"A": [], "B": []}
    for key in a | b:
        x = a.get(key, ABSENT)
        y = b.get(key, ABSENT)
        in_a = x[-1] == "kept"
        in_b = y[-1] == "kept"
        for source in ("all", x[1] or y[1]):
            sources[source].update({
                "A keeps": in_a, "A keeps, B does not": in_a and not in_b, "characters, A keeps": in_a * x[2],
                "B keeps": in_b, "B keeps, A does not": in_b and not in_a, "characters, B keeps": in_b * y[2],
            })  # fmt: skip
        if in_a != in_b:
            kept = x if in_a else y
            changes[x[-1], y[-1]].update({"documents": 1})
            if key in a and key in b:
                samples["A" if in_a else "B"].append((x[0], x[1], x[4], x[-1], y[4], y[-1], text_of(kept)[:200]))
    by_source = count_kept(both).to_dict("records")
    assert by_source[0]["source"] == "all"
    assert {row.pop("source"): row for row in by_source} == sources
    assert {(row.pop("A"), row.pop("B")): row for row in count_changed_verdicts(both).to_dict("records")} == changes
    assert {"incompressible", "not given"} < {verdict for change in changes for verdict in change}
    shown = ["id", "source", "A tokens_per_char", "A verdict", "B tokens_per_char", "B verdict", "text"]
    for (side, fitting), other in zip(samples.items(), "BA", strict=True):
        found = sample_documents(both, filters[side], side, other, 4)[shown]
        assert len(found) == min(4, len(fitting)) > 2
        assert set(found.itertuples(index=False, name=None)) <= set(fitting)


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


def diff(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["diff", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_cram_diff_filter_prints_parameters_the_counts_of_the_filters_and_samples_of_what_one_drops(filters):
    a, b = filters
    printed = diff("filter", a.key[:8], b.key, "--samples", "2")
    lines = [line.split() for line in printed.splitlines()]
    assert ["params.max_tokens_per_char", "0.4", "0.3"] in lines
    assert ["all", f"{a.stats['documents']}", f"{b.stats['documents']}"] in [line[:3] for line in lines]
    dropped = {document.id: document.text for document in documents_of(a)}
    for document in documents_of(b):
        del dropped[document.id]
    assert ["kept", "incompressible", f"{len(dropped)}"] in lines
    found = sample_documents(join_measurements(a, b), a, "A", "B", 2)
    assert len(found) == 2
    for name in found["id"]:
        assert f"{name} (" in printed
        assert " ".join(dropped[name].split())[:60] in printed
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


def test_an_unknown_stage_and_damaged_measurements_are_refused(store: Path):
    rows = [(f"f:{i}", "web", 50, 9, 0.1, 0.1, "kept") for i in range(40)]
    whole = in_parts(rows, 20)
    other = in_parts(rows[::-1], 20)
    error = CliRunner().invoke(app, ["diff", "filtr", whole.key, other.key]).exception
    assert isinstance(error, InputError)
    assert "filter?" in str(error)
    path = other.path / "measured-00001.parquet"
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(InputError, match=rf"{path.name} of {other.name}"):
        join_measurements(whole, other)


@pytest.mark.parametrize("width", [40, 160])
def test_tables_are_never_cut_off_in_a_narrow_terminal(filters, monkeypatch, capsys, width: int):
    monkeypatch.setattr(common.console, "width", width)
    rows = filters[0].stats["table"]
    common.print_rows(rows)
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert all(common.as_cell(value) in shown for row in rows for value in row.values())


# Reports


def report_of(scores: dict[str, float], data: str = "d", average: float | None = None, **heldout) -> dict:
    """What is compared of a report: accuracies by task, with intervals of two points on either side; and the loss."""
    rows = [
        {"task": task, "column": TASKS[task].title, "metric": "accuracy", "pretrained": True, "share": 1.0,
         "data": data, "score": score, "metrics": {"accuracy": {"interval": [score - 2, score + 2]}}}
        for task, score in scores.items()
    ]  # fmt: skip
    return {"scores": rows, "average": average, "pretraining": {"heldout": HELDOUT | heldout}}


def verdicts(a: dict, b: dict) -> dict[str, tuple[str, str]]:
    """The differences of the scores of two reports, and what the intervals say of them."""
    return {row["score"]: (row["B - A"], row["verdict"]) for row in compare_scores(a, b)}


def test_the_intervals_of_two_scores_decide_which_is_better():
    a = report_of({"rte": 60.0, "sst2": 60.0, "qnli": 60.0}, average=80.0)
    b = report_of({"rte": 61.0, "sst2": 65.0, "qnli": 55.0}, average=81.0)
    assert verdicts(a, b) == {
        "RTE, accuracy": ("+1.0", "no clear difference"),
        "SST-2, accuracy": ("+5.0", "B is better"),
        "QNLI, accuracy": ("-5.0", "A is better"),
        "average of nine": ("+1.0", "no interval"),
        LOSS: ("+0.0000", "the same"),
    }


@pytest.mark.parametrize(
    ("loss", "length_nats", "verdict"),
    [
        (0.30, 0.05, "B is better"),  # the same cost of the numbers of pieces: the same vocabulary
        (0.42, 0.05 + 1e-9, "B is better"),  # but for rounding
        (0.42, 0.04, "no clear difference"),  # both bounds are lower, but A may be as low as 0.43 - 0.024
        (0.36, 0.04, "B is better"),  # and with its error it is below all that A may be
    ],
)
def test_with_other_vocabularies_a_loss_is_better_below_the_lower_bound_of_the_other(loss, length_nats, verdict):
    held = {"nats_per_byte": {"value": loss, "standard_error": 0.01}, "length_nats_per_byte": length_nats}
    assert verdicts(report_of({}), report_of({}, **held))[LOSS] == (f"{loss - 0.48:+.4f}", verdict)
    opposite = verdict.replace("B", "A")
    assert verdicts(report_of({}, **held), report_of({}))[LOSS] == (f"{0.48 - loss:+.4f}", opposite)


def test_scores_on_other_data_or_of_one_report_have_no_difference():
    a = report_of({"rte": 60.0, "sst2": 60.0}, average=80.0)
    b = report_of({"rte": 70.0, "qnli": 70.0}, data="other", average=81.0, digest="d2")
    assert verdicts(a, b) == {
        "RTE, accuracy": ("–", "different data"),
        "SST-2, accuracy": ("–", ""),
        "average of nine": ("–", "different data"),
        LOSS: ("–", "different data"),
        "QNLI, accuracy": ("–", ""),
    }


def test_cram_diff_report_prints_both_scores_and_the_parameters_of_all_stages(store: Path):
    model = lineage("b")
    model["pretrain/00000000000b"]["params"]["learning_rate"] = 2e-3
    keys = [written(runs, "x")[2].name for runs in ([finetuned("cola", 50.0)], [finetuned("cola", 60.0, model=model)])]
    lines = [" ".join(line.split()) for line in diff("report", *keys).splitlines()]
    assert "CoLA, Matthews 50.0 (48.0 to 52.0) 60.0 (58.0 to 62.0) +10.0 B is better" in lines
    assert "pretrain.learning_rate 0.001 0.002" in lines
