"""A whole run as processes, killed once, of a checkout with one more stage: one file, one field and one line."""

import json
import resource
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from conftest import tiny_override, write_jsonl
from test_cli import HOME, await_file, cram, new_user, started

STAGE = '''"""Shorten: keep the beginning of long documents."""

from pathlib import Path

import pyarrow.compute as pc
from pydantic import Field

from tasks.corpus.parts import SCHEMA, Tally, count, parts_of, tables, writer
from tasks.stage import Params, stage
from tasks.store.artifacts import Artifact


class Shorten(Params):
    """How long documents may be."""

    max_characters: int = Field(200, gt=0, description="Documents end after so many characters.")


@stage(version=1)
def shorten(params: Shorten, corpus: Artifact, out: Path) -> dict:
    """Cut documents after so many characters."""
    tally, column = Tally(), SCHEMA.get_field_index("text")
    for part in parts_of(corpus):
        with writer(out / part.name) as file:
            for table in tables(part):
                beginnings = pc.utf8_slice_codeunits(table["text"], 0, params.max_characters)
                table = table.set_column(column, SCHEMA.field("text"), beginnings)
                file.write_table(table)
                count(tally, table)
    return tally.counts()
'''
LINES = [  # in a file of flows/, before this text
    ("recipes/recipe.py", "from tasks.tokenize", "from tasks.shorten import Shorten\n"),
    ("recipes/recipe.py", "    vocabulary: Vocabulary", "    shorten: Shorten = Shorten()\n"),
    ("cram.py", "from tasks.store.artifacts", "from tasks.shorten import shorten\n"),
    ("cram.py", "    words = vocabulary(", "    kept = shorten(r.shorten, kept)\n"),  # the stages below read `kept`
]
LIMIT = 400  # characters
SECONDS = 8  # of pretraining; the first checkpoint comes after 5


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the code with one more stage, between the filter and what reads its documents."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in ("flows", "tasks", "model"):
        shutil.copytree(HOME / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "prefect.yaml"):
        shutil.copy(HOME / name, copy)
    (copy / "tasks" / "shorten.py").write_text(STAGE)
    for name, place, line in LINES:
        file = copy / "flows" / name
        file.write_text(file.read_text().replace(place, line + place))
    return copy


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user without a Prefect server."""
    return new_user(tmp_path_factory.mktemp("user"))


def rows_of(metrics: Path) -> list[tuple[int, float]]:
    """Steps and seconds in the complete lines of the metrics of a draft."""
    whole_lines = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    return [(row["step"], row["seconds"]) for row in map(json.loads, whole_lines)]


@pytest.fixture(scope="module")
def whole(checkout: Path, env: dict, tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> SimpleNamespace:
    """A run that was killed at its first checkpoint, its rerun, and another, for which all is cached."""
    folder, store = tmp_path_factory.mktemp("run"), Path(env["CRAM_ARTIFACTS"])
    shard = write_jsonl(folder / "toy.jsonl", toy_texts)
    changes = tiny_override(shard, heldout_fraction=0.4, budget=SECONDS / 3600) | {"shorten": {"max_characters": LIMIT}}
    command = ["run", "demo", "--override", json.dumps(changes)]
    with started(env, folder / "log", *command, home=checkout) as process:
        await_file(process, store, ".partial/pretrain-*/work/checkpoint.safetensors", folder / "log")
    assert not (store / "pretrain").exists()
    [metrics] = store.glob(".partial/pretrain-*/work/metrics.jsonl")
    before = rows_of(metrics)
    rerun, start = cram(env, *command, home=checkout), children_seconds()
    cached = cram(env, *command, home=checkout)
    return SimpleNamespace(
        store=store,
        log=(folder / "log").read_text(),
        before=before,
        rerun=rerun,
        cached=cached,
        seconds=children_seconds() - start,
    )


def children_seconds() -> float:
    """The processor time of the processes that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def test_a_killed_run_resumes_from_its_checkpoint_with_the_rest_of_its_budget(whole: SimpleNamespace):
    model = whole.store / "pretrain" / "latest"
    table = pq.read_table(model / "metrics.parquet", columns=["step", "seconds"]).to_pydict()
    steps, clock = table["step"], table["seconds"]
    assert steps == list(range(1, len(steps) + 1))
    after = list(zip(steps, clock, strict=True))
    kept = sum(a == b for a, b in zip(whole.before, after, strict=False))
    assert 0 < kept < len(steps), "the steps before the checkpoint are those of the killed run, the others are not"
    assert whole.before[:kept] == after[:kept]
    assert all(a < b for a, b in pairwise(clock)), "the clock goes on where it stood at the checkpoint"
    stats = json.loads((model / "stage.json").read_text())["stats"]
    # the last step may end microseconds before the budget, which is spent when the clock is read again
    assert clock[-2] < SECONDS <= stats["seconds_on_the_clock"], "and runs until the budget is spent once"
    assert stats["steps"] == steps[-1]
    assert clock[-1] - 0.001 <= stats["seconds_on_the_clock"] < clock[-1] + 1, "read again after the last row"
    assert list((whole.store / ".partial").iterdir()) == []


def test_a_run_ends_with_scores_blanks_and_the_path_of_the_report_after_a_short_log(whole: SimpleNamespace):
    assert whole.rerun.returncode == 0, whole.rerun.stderr
    lines = whole.rerun.stdout.strip().splitlines()
    assert lines[0].split()[:3] == ["task", "metric", "score"]
    assert lines[1].startswith("neighbours")
    assert [line.count("%") for line in lines if "%" in line] == [3, 3, 3]
    assert f"pretrain/{(whole.store / 'pretrain' / 'latest').resolve().name}:" in whole.rerun.stdout
    assert Path(lines[-1].removeprefix("Full report: ")).is_file()
    assert whole.cached.stdout == whole.rerun.stdout
    for run in (whole.rerun, whole.cached):
        assert len(run.stderr.splitlines()) <= 21, run.stderr


def test_a_run_for_which_all_is_cached_takes_little_processor_time(whole: SimpleNamespace):
    assert whole.seconds < 8, "3 s on a quiet machine: no stage, no pipeline and no server is loaded"


def test_a_stage_is_added_by_one_file_one_field_and_one_line(whole: SimpleNamespace, checkout: Path, env: dict):
    about = {
        stage: json.loads((whole.store / stage / "latest" / "stage.json").read_text())
        for stage in ("filter", "shorten", "vocabulary", "tokenize")
    }
    name, read, kept = f"shorten/{about['shorten']['key']}", about["filter"]["stats"], about["shorten"]["stats"]
    assert f" shorten: {kept['documents']:,} documents, " in whole.log
    assert kept["documents"] == read["documents"]
    assert kept["characters"] <= LIMIT * kept["documents"]
    assert kept["characters"] < read["characters"]
    assert {about[stage]["inputs"]["corpus"] for stage in ("vocabulary", "tokenize")} == {name}
    shown = cram(env, "show", "shorten", home=checkout).stdout
    assert name in shown
    assert f"max_characters: {LIMIT}" in shown
    funnel = json.loads((whole.store / "report" / "latest" / "report.json").read_text())["funnel"]
    stages = [row["stage"] for row in funnel]
    assert stages[stages.index("filter") + 1] == "shorten"
    assert [row["documents"] for row in funnel if row["artifact"] == name] == [kept["documents"]]
