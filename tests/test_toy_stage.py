"""A new stage is one file, one field of Recipe and one line of the flow; all else follows from these."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_override, write_jsonl

HOME = Path(__file__).resolve().parents[1]
STAGE = '''"""Shorten: keep the beginning of long documents."""

from pathlib import Path

import pyarrow.compute as pc
from pydantic import Field

from tasks.corpus.parts import SCHEMA, Tally, add_up, count, parts_of, tables, writer
from tasks.stage import Params, stage
from tasks.store import WORK, Artifact
from tasks.workers.mapping import over_parts


class Shorten(Params):
    """How long documents may be."""

    max_characters: int = Field(200, gt=0, description="Documents end after so many characters.")


def shorten_part(part: Path, params: Shorten, out: Path) -> dict:
    """Write the beginnings of a part's documents; return how many they are."""
    tally, column = Tally(), SCHEMA.get_field_index("text")
    with writer(out / part.name) as file:
        for table in tables(part):
            beginnings = pc.utf8_slice_codeunits(table["text"], 0, params.max_characters)
            table = table.set_column(column, SCHEMA.field("text"), beginnings)
            file.write_table(table)
            count(tally, table)
    return tally.counts()


@stage(version=1)
def shorten(params: Shorten, corpus: Artifact, out: Path) -> dict:
    """Cut documents after so many characters."""
    jobs = [(part, params, out) for part in parts_of(corpus)]
    return add_up(over_parts(shorten_part, jobs, out / WORK / "shortened", "shorten"))
'''
FIELD = "    shorten: Shorten = Shorten()\n"
LINE = "    kept = plan(shorten, r.shorten, kept)\n"  # the stages below read `kept`
LIMIT = 400  # characters


def insert(file: Path, after: str, line: str) -> None:
    """Insert a line after the one that begins with `after`."""
    lines = file.read_text().splitlines(keepends=True)
    [place] = (number for number, known in enumerate(lines, 1) if known.startswith(after))
    file.write_text("".join([*lines[:place], line, *lines[place:]]))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the code with one more stage, between the filter and what reads its documents."""
    copy = tmp_path / "cram"
    for folder in ("flows", "tasks", "model"):
        shutil.copytree(HOME / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "prefect.yaml"):
        shutil.copy(HOME / name, copy)
    (copy / "tasks" / "shorten.py").write_text(STAGE)
    insert(copy / "flows" / "recipes.py", "from tasks.report import", "from tasks.shorten import Shorten\n")
    insert(copy / "flows" / "recipes.py", "    filter: Filter", FIELD)
    insert(copy / "flows" / "cram.py", "from tasks.report import", "from tasks.shorten import shorten\n")
    insert(copy / "flows" / "cram.py", "    kept = plan(", LINE)
    return copy


def cram(checkout: Path, *arguments: str) -> str:
    """Run a command with the code of a checkout; its output."""
    folder = checkout.parent
    env = {"CRAM_ARTIFACTS": str(folder / "artifacts"), "PREFECT_HOME": str(folder / "prefect")}
    env |= {"PREFECT_API_URL": "http://127.0.0.1:1/api"}  # where nothing answers
    command = [sys.executable, "-m", "flows.cli", *arguments]
    done = subprocess.run(command, env=os.environ | env, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_stage_is_added_by_one_file_one_field_and_one_line(checkout: Path, tmp_path: Path, toy_texts: list[str]):
    changes = tiny_override(
        write_jsonl(tmp_path / "toy.jsonl", toy_texts), heldout_fraction=0.4, budget=2_000, budget_unit="tokens"
    )
    changes["shorten"] = {"max_characters": LIMIT}
    log = cram(checkout, "run", "demo", "--override", json.dumps(changes))
    about = {
        stage: json.loads((tmp_path / "artifacts" / stage / "latest" / "stage.json").read_text())
        for stage in ("filter", "shorten", "vocabulary", "tokenize")
    }
    name, read, kept = f"shorten/{about['shorten']['key']}", about["filter"]["stats"], about["shorten"]["stats"]
    assert f" shorten: {kept['documents']:,} documents, " in log
    assert kept["documents"] == read["documents"]
    assert kept["characters"] <= LIMIT * kept["documents"]
    assert kept["characters"] < read["characters"]
    assert {about[stage]["inputs"]["corpus"] for stage in ("vocabulary", "tokenize")} == {name}
    assert name in cram(checkout, "ls")
    assert f"max_characters: {LIMIT}" in cram(checkout, "show", "shorten")
    funnel = json.loads((tmp_path / "artifacts" / "report" / "latest" / "report.json").read_text())["funnel"]
    stages = [row["stage"] for row in funnel]
    assert stages[stages.index("filter") + 1] == "shorten"
    assert [row["documents"] for row in funnel if row["artifact"] == name] == [kept["documents"]]
