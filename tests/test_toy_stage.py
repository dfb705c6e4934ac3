"""A whole run as processes, stopped once, of a checkout with one more stage: one file, one field and one line."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from conftest import tiny_override, write_jsonl
from test_cli import CRAM, HOME, cram, new_user

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
SECONDS = 4  # of pretraining
LONG = 300  # seconds, on a busy machine
IMPORT = "import time:"  # begins the lines of PYTHONPROFILEIMPORTTIME
SLOW = re.compile(r": \d+ %, about|Training took ")  # lines that a run has on a slow machine only


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
    """Steps and seconds in the metrics of a draft."""
    rows = map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
    return [(row["step"], row["seconds"]) for row in rows]


def stop_while_training(env: dict, checkout: Path, command: list[str], log: Path) -> SimpleNamespace:
    """Begin a run in a process group of its own, as at a terminal, and press Ctrl-C when it has trained a step."""
    store = Path(env["CRAM_ARTIFACTS"])
    started = [sys.executable, *CRAM, *command]
    with log.open("w", encoding="utf-8") as file:
        run = subprocess.Popen(started, env=env, cwd=checkout, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + LONG
        while not any(path.stat().st_size for path in store.glob(".partial/pretrain-*/work/metrics.jsonl")):
            assert run.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")  # noqa: PT018
            time.sleep(0.02)
        children = [file.read_text() for file in Path(f"/proc/{run.pid}/task").glob("*/children")]
        os.killpg(run.pid, signal.SIGINT)
        run.wait(LONG)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    [work] = store.glob(".partial/pretrain-*/work")
    return SimpleNamespace(
        status=run.returncode,
        log=log.read_text(encoding="utf-8"),
        children=children,
        rows=rows_of(work / "metrics.jsonl"),
        has_checkpoint=(work / "checkpoint.safetensors").exists(),
    )


@pytest.fixture(scope="module")
def whole(checkout: Path, env: dict, tmp_path_factory: pytest.TempPathFactory, toy_texts: list[str]) -> SimpleNamespace:
    """A run that was stopped while it trained, its rerun, and another, for which all is cached."""
    folder = tmp_path_factory.mktemp("run")
    shard = write_jsonl(folder / "toy.jsonl", toy_texts)
    changes = tiny_override(shard, heldout_fraction=0.4, budget=SECONDS / 3600) | {"shorten": {"max_characters": LIMIT}}
    command = ["run", "demo", "--override", json.dumps(changes)]
    return SimpleNamespace(
        store=Path(env["CRAM_ARTIFACTS"]),
        stopped=stop_while_training(env, checkout, command, folder / "log"),
        rerun=cram(env, *command, home=checkout),
        cached=cram(env | {"PYTHONPROFILEIMPORTTIME": "1"}, *command, home=checkout),
    )


def test_a_run_ended_by_ctrl_c_leaves_a_checkpoint_no_process_and_a_sentence(whole: SimpleNamespace):
    stopped = whole.stopped
    assert set(stopped.children) == {""}, "without a server, Prefect's too, and with one worker, a run is one process"
    assert stopped.status == 128 + signal.SIGINT
    assert stopped.has_checkpoint
    assert stopped.log.splitlines()[-1].startswith("cram: Stopped by Ctrl-C.")
    assert "Traceback" not in stopped.log
    assert "Crash" not in stopped.log


def test_a_stopped_run_resumes_from_its_checkpoint_with_the_rest_of_its_budget(whole: SimpleNamespace):
    model = whole.store / "pretrain" / "latest"
    table = pq.read_table(model / "metrics.parquet", columns=["step", "seconds"]).to_pydict()
    steps = table["step"]
    clock = table["seconds"]
    assert steps == list(range(1, len(steps) + 1))
    before = whole.stopped.rows
    assert 0 < len(before) < len(steps)
    assert list(zip(steps, clock, strict=True))[: len(before)] == before
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
    shares = [len(re.findall(r" [\d.]+ %", line)) for line in lines]
    assert {count for count in shares if count} == {3}, "guesses at each hidden word"
    assert f"pretrain/{(whole.store / 'pretrain' / 'latest').resolve().name}, in held-out text" in whole.rerun.stdout
    assert Path(lines[-1].removeprefix("Full report: ")).is_file()
    assert whole.cached.stdout == whole.rerun.stdout
    for run in (whole.rerun, whole.cached):
        log = [line for line in run.stderr.splitlines() if not line.startswith(IMPORT) and not SLOW.search(line)]
        assert len(log) <= 21, log


def test_a_run_for_which_all_is_cached_loads_no_library_of_the_stages_and_no_server(whole: SimpleNamespace):
    lines = [line for line in whole.cached.stderr.splitlines() if line.startswith(IMPORT)]
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert "prefect.client" in loaded
    assert loaded.isdisjoint(("transformers", "datasets", "matplotlib", "pandas", "scipy", "sklearn", "uvicorn"))


def test_a_stage_is_added_by_one_file_one_field_and_one_line(whole: SimpleNamespace, checkout: Path, env: dict):
    about = {
        stage: json.loads((whole.store / stage / "latest" / "stage.json").read_text())
        for stage in ("filter", "shorten", "vocabulary", "tokenize")
    }
    name = f"shorten/{about['shorten']['key']}"
    read = about["filter"]["stats"]
    kept = about["shorten"]["stats"]
    assert f" shorten: {kept['documents']:,} documents, " in whole.stopped.log
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
