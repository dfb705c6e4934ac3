"""The command line, as processes where exit codes and signals matter."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl
from typer.testing import CliRunner

from flows.cli import LINE, app, differences, flat, laid_out, without_rows
from flows.recipes import RECIPES, STAGES
from tasks.corpus import Download, download
from tasks.dedup import Deduplicate, deduplicate
from tasks.filter import Filter, drop_incompressible

CRAM = [sys.executable, "-m", "flows.cli"]
HOME = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose store is empty and whose server doesn't run."""
    own = {"CRAM_ARTIFACTS": str(tmp_path / "artifacts"), "PREFECT_HOME": str(tmp_path / "prefect")}
    own |= {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api", "PREFECT_LOGGING_LEVEL": "INFO"}
    return os.environ | own


def tiny(tmp_path: Path, texts: list[str], seconds: float = 2) -> str:
    """The demo recipe on toy text, with so many seconds of pretraining."""
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    return json.dumps(
        {
            "download": {"source": "files", "files": [str(shard)], "megabytes": 0},
            "filter": {"vocabulary_entries": 400, "max_tokens_per_char": 0.5},
            "vocabulary": {"entries": 400},
            "tokenize": {"length": 32, "heldout_fraction": 0.3},
            "pretrain": {
                "architecture": {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 96},
                "budget": seconds / 3600,
                "batch_size": 8,
            },
            "finetune": {"tasks": ["neighbours"], "epochs": 1, "max_tokens": 32, "baseline": False},
        }
    )


def override(**stages: dict) -> str:
    return json.dumps(stages)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "dmo"], "There is no recipe 'dmo'"),
        (["run", "demo", "--override", "{"], "--override is no JSON"),
        (["run", "demo", "--override", '{"filter": {"max": 1}}'], "filter.max is no field"),
        (["run", "demo", "--until", "filtr"], "There is no stage 'filtr'"),
        (["run", "demo", "--use", "filter"], "expected STAGE=KEY"),
        (["run", "demo", "--use", "pretrain=123"], "There are no artifacts of pretrain"),
        (["run", "demo", "--override", override(download={"source": "files", "files": ["gone"]})], "matches nothing"),
        (["run", "pocket", "--override", override(finetune={"data": "gone"})], "gone is no directory with"),
        (["show", "filter/123"], "There are no artifacts of filter"),
        (["ls", "nothing"], "There is no stage 'nothing'"),
        (["diff", "filter", "1", "2"], "There are no artifacts of filter"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_1_without_a_server(
    env: dict, arguments: list[str], words: str
):
    done = subprocess.run([*CRAM, *arguments], env=env, capture_output=True, text=True, cwd=HOME)
    assert done.returncode == 1
    assert done.stderr.startswith("cram: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert done.stdout == ""
    assert not Path(env["CRAM_ARTIFACTS"]).exists(), "nothing was published"


def test_what_a_stage_finds_wrong_is_told_once_without_traceback_or_hooks(env: dict, tmp_path, toy_texts: list[str]):
    asked = json.loads(tiny(tmp_path, toy_texts)) | {"vocabulary": {"entries": 60_000}}
    command = [*CRAM, "run", "demo", "--until", "vocabulary", "--override", json.dumps(asked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HOME)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cram: The corpus of ")
    assert done.stderr.count("60,000 were asked for") == 1
    assert "'filter' - Finished in state Completed()" in done.stderr
    assert "'vocabulary' - Finished in state Failed()" in done.stderr
    for noise in ("Traceback", "hook", "InputError"):
        assert noise not in (done.stderr + done.stdout)


def test_a_killed_run_goes_on_from_its_checkpoint_with_the_budget_left(env: dict, tmp_path: Path, toy_texts: list[str]):
    seconds = 16
    command = [*CRAM, "run", "demo", "--override", tiny(tmp_path, toy_texts, seconds)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(command, env=env, cwd=HOME, stdout=log, stderr=log, start_new_session=True)
    store, deadline = Path(env["CRAM_ARTIFACTS"]), time.monotonic() + 180
    while not list(store.glob(".partial/pretrain-*/work/checkpoint.safetensors")):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)  # with its temporary server, which would outlive it
    process.wait()
    assert not (store / "pretrain").exists()
    [metrics] = store.glob(".partial/pretrain-*/work/metrics.jsonl")
    whole_lines = metrics.read_text().rpartition("\n")[0].splitlines()
    before = [(row["step"], row["seconds"]) for row in map(json.loads, whole_lines)]
    done = subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    (made,) = (p for p in (store / "pretrain").iterdir() if not p.is_symlink())
    table = pq.read_table(made / "metrics.parquet", columns=["step", "seconds"]).to_pydict()
    steps, clock = table["step"], table["seconds"]
    assert steps == list(range(1, len(steps) + 1))
    kept = sum(a == b for a, b in zip(before, zip(steps, clock, strict=True), strict=False))
    assert 0 < kept < len(steps), "the steps before the checkpoint are those of the killed run, the others are not"
    assert before[:kept] == list(zip(steps, clock, strict=True))[:kept]
    assert all(a < b for a, b in pairwise(clock)), "the clock goes on where it stood at the checkpoint"
    assert clock[-2] < seconds <= clock[-1], "and runs until the budget is spent once"
    stats = json.loads((made / "stage.json").read_text())["stats"]
    assert (stats["steps"], stats["seconds_on_the_clock"]) == (steps[-1], round(clock[-1], 3))
    assert "neighbours" in done.stdout
    assert "The page with all of it" in done.stdout
    assert {p.name for p in (store / ".partial").iterdir()} == set()


def test_ls_and_show_tell_what_is_there_and_what_differs(store: Path, tmp_path: Path, toy_texts: list[str]):
    runner = CliRunner()
    assert "No artifacts" in runner.invoke(app, ["ls"]).stdout
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    made = [download.fn(Download(source="files", files=[str(shard)], documents=n)) for n in (0, 50)]
    deduplicate.fn(Deduplicate(), made[1])
    listed = runner.invoke(app, ["ls"]).stdout
    for artifact, difference in zip(made, ("documents=0", "documents=50"), strict=True):
        (line,) = (row for row in listed.splitlines() if artifact.key in row)
        assert difference in line
        assert "max_lost" not in line, "what does not differ is not listed"
    assert "deduplicate" not in runner.invoke(app, ["ls", "download"]).stdout
    shown = runner.invoke(app, ["show", f"download/{made[0].key[:6]}"]).stdout
    assert made[0].key in shown
    assert "toy.jsonl" in shown
    assert '"documents": 300' in shown
    assert f"corpus: download/{made[1].key}" in runner.invoke(app, ["show", "deduplicate"]).stdout


def test_show_has_the_numbers_of_each_source_in_the_table_alone(store: Path, tmp_path: Path, toy_texts: list[str]):
    for name, texts in (("prose", toy_texts[:200]), ("noise", [os.urandom(40).hex() for _ in range(40)])):
        write_jsonl(tmp_path / f"{name}.jsonl", texts, name)
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "*.jsonl")], documents=0))
    made = drop_incompressible.fn(Filter(vocabulary_entries=400, max_tokens_per_char=0.5), corpus)
    shown = CliRunner().invoke(app, ["show", "filter"]).stdout
    assert shown.count("noise") == shown.count("prose") == 1
    for row in made.stats["table"]:
        assert [line for line in shown.splitlines() if line.split()[:2] == [row["source"], str(row["documents"])]]
    stats = json.loads(re.search(r"^\{$.*?^\}$", shown, re.MULTILINE | re.DOTALL)[0])
    assert stats["seen"] == {name: made.stats["seen"][name] for name in ("documents", "characters")}
    assert stats["quantiles"]["zstd_ratio"] == {"all": made.stats["quantiles"]["zstd_ratio"]["all"]}
    assert stats["measured_with"] == made.stats["measured_with"]
    assert f"{made.path}/stats.json" in shown


def test_the_manual_names_every_reason_for_which_documents_are_lost_or_dropped(store: Path, tmp_path: Path):
    rows = [
        "{",
        '{"text": 1}',
        '{"text": "a"} {}',
        "[1]",
        "{}",
        '{"text": ""}',
        '{"text": "\\ud800"}',
        '{"a": ' + "[" * 100_000,
    ]
    (tmp_path / "a.jsonl").write_bytes(
        b"\n".join([*map(str.encode, rows), b"\xff", b'{"text": "%s"}' % (b"x" * 2_000_000)])
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"text")[:-3])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(os.urandom(99_999))[:-8] + bytes(8))
    (tmp_path / "d.jsonl.gz").write_bytes(b"{}")
    (tmp_path / "e.jsonl").write_bytes("\ufeff{}".encode("utf-16"))
    (tmp_path / "f.json").write_text('[{"text": "a"}]')
    write_jsonl(
        tmp_path / "g.jsonl", ["some words", "some words", "\u4e2d"] + ["more words " * n for n in range(1, 40)]
    )
    asked = {"damaged": "keep", "max_lost": 1, "max_document_megabytes": 1, "documents": 0}
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "?.json*")], **asked))
    unique = deduplicate.fn(Deduplicate(methods=["exact", "minhash", "substring"]), corpus)
    limits = {"min_characters": 1, "max_characters": 10**6, "max_zstd_ratio": 9}
    kept = drop_incompressible.fn(Filter(vocabulary_entries=256, max_tokens_per_char=9, **limits), unique)
    found = {*corpus.stats["lost"], *unique.stats["dropped"], *kept.stats["dropped"], "contaminated"}
    found = {re.sub("(?<=longer than )1(?= MB)", "100", re.sub("(?<=but )int", "…", reason)) for reason in found}
    assert len(found) == 10 + 5 + 3 + 1 + 5
    table = (HOME / "README.md").read_text().split("| stage | in its statistics |")[1].split("\n\n")[0]
    assert found <= set(re.findall("`([^`]+)`", table))


def test_what_is_not_of_a_row_stays_in_the_statistics():
    stats = {"a": 1, "b": {"x": 2, "y": {}}, "c": {"x": 3}, "d": {"all": 4, "x": 5}, "e": {"f": {"x": 6}, "g": [7]}}
    assert without_rows(stats, {"all", "x", "z"}) == {"a": 1, "b": {"x": 2}, "d": {"all": 4}, "e": {"g": [7]}}


@pytest.mark.parametrize("command", ["run", "ls", "show", "diff"])
def test_the_help_names_recipes_and_stages(command: str):
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    for name in (*STAGES, *(RECIPES if command == "run" else ())):
        assert re.search(rf"[ :]{name}[,.]", shown.stdout), name


def test_differences_are_by_dotted_path():
    manifests = [{"params": {"a": {"b": n}, "c": 1}, "inputs": {"corpus": f"x/{n}"}} for n in (1, 2)]
    assert differences(manifests) == ["a.b=1, from corpus=x/1", "a.b=2, from corpus=x/2"]
    assert flat({"a": {"b": [1]}, "c": "d"}) == {"a.b": "[1]", "c": "d"}


@pytest.mark.parametrize(
    "value", [{}, [], 1.5, "x", {"a": {"b": [1, {}]}}, {f"n{i}": {"d": [i] * i, "e": "é"} for i in range(60)}]
)
def test_statistics_are_printed_as_json_with_short_values_on_one_line(value):
    text = laid_out(value)
    assert json.loads(text) == value
    assert all(len(line) <= LINE + 20 or "[" in line for line in text.splitlines())
    assert laid_out({"name": {"documents": 1, "characters": 2}}) == '{"name": {"documents": 1, "characters": 2}}'


def test_up_deploys_a_run_completes_and_down_ends_what_up_started(env: dict, tmp_path: Path, toy_texts: list[str]):
    def prefect(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "prefect", *arguments]
        return subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True, timeout=180)

    up = subprocess.run([*CRAM, "up"], env=env, cwd=HOME, capture_output=True, text=True)
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        misspelt = prefect("deployment", "run", "cram/full", "-p", 'override={"filter": {"max_tokens": 1}}')
        assert misspelt.returncode == 1
        assert "max_tokens" in misspelt.stdout + misspelt.stderr
        parameters = ["-p", "recipe=demo", "-p", f"override={tiny(tmp_path, toy_texts)}", "-p", "until=vocabulary"]
        done = prefect("deployment", "run", "cram/full", *parameters, "--watch", "--watch-timeout", "150")
        assert done.returncode == 0, done.stdout + done.stderr
        found = {p.name for p in Path(env["CRAM_ARTIFACTS"]).iterdir() if not p.name.startswith(".")}
        assert found == {"download", "deduplicate", "decontaminate", "filter", "vocabulary"}
        assert "filter-table" in prefect("artifact", "ls").stdout
        again = subprocess.run([*CRAM, "up"], env=env, cwd=HOME, capture_output=True, text=True)
        assert "Server: answers" in again.stdout
        assert "Worker: running" in again.stdout
    finally:
        pids = [int(p.read_text()) for p in Path(env["PREFECT_HOME"]).glob("*.pid")]
        down = subprocess.run([*CRAM, "down"], env=env, cwd=HOME, capture_output=True, text=True)
    assert len(pids) == 2
    assert down.stdout.count("ended") == 2
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
