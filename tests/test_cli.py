"""The command line, as processes where exit codes and signals matter."""

import errno
import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import filtered, tiny_override, write_jsonl
from safetensors import safe_open
from typer.testing import CliRunner

from flows import summary
from flows.cli import main, tables
from flows.cli.artifacts import differences, without_rows
from flows.cli.main import app
from flows.cli.run import parse_overrides, tell
from flows.cli.tables import LINE, laid_out
from flows.recipes import RECIPES, STAGES
from flows.summary import flat
from model import InputError
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.reports.markdown import code, table
from tasks.store import Artifact, locked

CRAM = [sys.executable, "-m", "flows.cli"]
HOME = Path(__file__).resolve().parents[1]


def cram(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Run a command to its end, as a process."""
    return subprocess.run([*CRAM, *arguments], env=env, capture_output=True, text=True, cwd=HOME)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def new_user(folder: Path) -> dict[str, str]:
    """The environment of a user whose store is empty and whose server doesn't run."""
    own = {"CRAM_ARTIFACTS": str(folder / "artifacts"), "PREFECT_HOME": str(folder / "prefect")}
    own |= {"PREFECT_API_URL": f"http://127.0.0.1:{free_port()}/api", "PREFECT_LOGGING_LEVEL": "INFO"}
    return os.environ | own


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return new_user(tmp_path)


@contextmanager
def user_after_up(folder: Path) -> Iterator[tuple[dict[str, str], str]]:
    """The environment of a user who has run `cram up`, and what that printed; ends with `cram down`."""
    env = new_user(folder)
    up = cram(env, "up")
    try:
        assert up.returncode == 0, up.stderr + up.stdout
        yield env, up.stdout
    finally:
        cram(env, "down")


@pytest.fixture(scope="module")
def after_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user who has run `cram up`. It takes seconds, so the tests share it until the last ends it."""
    with user_after_up(tmp_path_factory.mktemp("user")) as (env, _):
        yield env


def tiny(tmp_path: Path, texts: list[str], seconds: float = 2) -> str:
    """The demo recipe on toy text, with so many seconds of pretraining."""
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    return json.dumps(tiny_override(shard, budget=seconds / 3600))


def override(**stages: dict) -> str:
    return json.dumps(stages)


def check_refusal(code: int, out: str, err: str, words: str) -> None:
    assert code == 1
    assert err.startswith("cram: ")
    assert err.count("\n") == 1
    assert words in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "dmo"], "There is no recipe 'dmo'. Did you mean demo? "),
        (["run", "something"], "There is no recipe 'something'. Recipes: "),
        (["run", "demo", "--override", "{"], "--override is not valid JSON"),
        (["run", "demo", "--override", '{"a":' * 20_000 + "1" + "}" * 20_000], "--override is nested too deeply"),
        (["run", "demo", "--override", '{"filter": {"max": 1}}'], "There is no field filter.max"),
        (["run", "demo", "--override", '{"filter": {}, "filter": {}}'], "cram: --override has 'filter' twice"),
        (["run", "demo", "--override", '{"filter": 3}', "--override", '{"filter": {}}'], "filter: Input should be"),
        (["run", "demo", "--until", "filtr"], "There is no stage 'filtr'. Did you mean filter? "),
        (["run", "demo", "--until", "filter", "--until", "tokenize"], "--until names filter and tokenize"),
        (["run", "demo", "--use", "filter"], "expected STAGE=KEY"),
        (["run", "demo", "--use", "pretrain=123"], "There are no artifacts of pretrain"),
        (["run", "demo", "--override", override(download={"source": "files", "files": ["gone"]})], "matches nothing"),
        (["run", "pocket", "--override", override(finetune={"data": "gone"})], "gone is no directory with"),
        (["show", "filter/123"], "There are no artifacts of filter"),
        (["ls", "nothing"], "There is no stage 'nothing'. Stages: "),
        (["show", "\x1b[2Jfilter"], "\\x1b[2Jfilter"),
        (["diff", "filter", "1", "2"], "There are no artifacts of filter"),
    ],
)
def test_what_the_user_can_mend_is_one_sentence_and_exit_1_without_a_server(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], words: str
):
    monkeypatch.setattr(sys, "argv", ["cram", *arguments])
    monkeypatch.setattr(main, "SETTINGS", {})  # they are for a Prefect that is not yet imported
    with pytest.raises(SystemExit) as ended:
        main.main()
    check_refusal(ended.value.code, *capsys.readouterr(), words)
    assert not store.exists(), "nothing was published"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "demo", "--override", override(download={"source": "files", "files": ["gone"]})], "matches nothing"),
        (["show", "filter"], "There are no artifacts of filter"),
    ],
)
def test_a_process_says_nothing_but_that_sentence(env: dict, arguments: list[str], words: str):
    done = cram(env, *arguments)
    check_refusal(done.returncode, done.stdout, done.stderr, words)
    assert not Path(env["CRAM_ARTIFACTS"]).exists(), "nothing was published"


@pytest.mark.parametrize(("where", "words"), [(">&-", "is closed"), (">/dev/full", "can't be written: No space left")])
@pytest.mark.parametrize("arguments", ["ls", "--help"])
def test_where_nothing_can_be_printed_a_sentence_says_so(env: dict, where: str, words: str, arguments: str):
    command = ["sh", "-c", f'exec "$0" -m flows.cli {arguments} {where}', sys.executable]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=HOME)
    check_refusal(done.returncode, done.stdout, done.stderr, f"Standard output {words}")


def test_a_disk_that_is_full_for_a_long_line_is_told_too(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:  # what is longer than a buffer fails at once, and leaves nothing to be flushed
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match="Standard output can't be written: No space"), main.output_checked():
        full()
    with pytest.raises(FileNotFoundError), main.output_checked():
        Path("/nothing/here").read_text()


def test_what_a_stage_finds_wrong_is_told_once_without_traceback_or_hooks(env: dict, tmp_path, toy_texts: list[str]):
    asked = json.loads(tiny(tmp_path, toy_texts)) | {"vocabulary": {"entries": 60_000}}
    done = cram(env, "run", "demo", "--until", "vocabulary", "--override", json.dumps(asked))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("cram: The corpus of ")
    assert done.stderr.count("60,000 were asked for") == 1
    assert "'filter' - Finished in state Completed()" in done.stderr
    assert "'vocabulary' - Finished in state Failed()" in done.stderr
    for noise in ("Traceback", "hook", "InputError"):
        assert noise not in (done.stderr + done.stdout)


def await_file(process: subprocess.Popen, store: Path, pattern: str, log: Path) -> Path:
    """The file, as soon as the running command has made it and written to it."""
    deadline = time.monotonic() + 180
    while not (found := [path for path in store.glob(pattern) if path.stat().st_size]):
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return found[0]


def group(leader: int) -> list[int]:
    """The processes of a group that live, without the one that leads it."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, (state, _, own) = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()[:3]
            found += [pid] if int(own) == leader != pid and state != "Z" else []
    return found


def with_signals() -> None:
    """Handle in a new process what a shell's background jobs and `nohup` ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture
def training(env: dict, tmp_path: Path, toy_texts: list[str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A run that is training, and its metrics; all that it starts is of its process group, as at a terminal."""
    command = ["run", "demo", "--until", "pretrain", "--override", tiny(tmp_path, toy_texts, 3600)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*CRAM, *command],
            env=env,
            cwd=HOME,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=with_signals,
        )
    try:
        store = Path(env["CRAM_ARTIFACTS"])
        yield process, await_file(process, store, ".partial/pretrain-*/work/metrics.jsonl", tmp_path / "log")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("send", "sign", "cause"),
    [
        (os.killpg, signal.SIGINT, "Ctrl-C"),
        (os.killpg, signal.SIGTERM, "SIGTERM"),
        (os.kill, signal.SIGHUP, "SIGHUP"),
    ],
)
def test_a_run_ended_by_a_signal_leaves_a_checkpoint_no_server_and_a_sentence(training, tmp_path, send, sign, cause):
    process, metrics = training
    send(process.pid, sign)
    assert process.wait(120) == 128 + sign, (tmp_path / "log").read_text()
    assert metrics.with_name("checkpoint.safetensors").exists()
    assert group(process.pid) == [], "all that it started, the server too, was of its group"
    said = (tmp_path / "log").read_text()
    assert said.splitlines()[-1].startswith(f"cram: Stopped by {cause}. Run the same command to continue")
    for noise in ("Traceback", "Crash"):
        assert noise not in said


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["is gone", "hangs"])
def test_a_run_whose_server_no_longer_answers_ends_at_the_second_interrupt(training, tmp_path: Path, sign: int):
    process, _ = training
    [server] = group(process.pid)
    os.kill(server, sign)
    deadline = time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
    assert process.returncode == 130, (tmp_path / "log").read_text()
    assert group(process.pid) == []


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["is gone", "hangs"])
def test_a_run_is_published_and_told_without_its_server(env: dict, tmp_path: Path, toy_texts: list[str], sign: int):
    command = [*CRAM, "run", "demo", "--until", "filter", "--override", tiny(tmp_path, toy_texts)]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=env, cwd=HOME, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        store = Path(env["CRAM_ARTIFACTS"])
        await_file(process, store, "download/*/stage.json", tmp_path / "log")
        [server] = group(process.pid)
        os.kill(server, sign)
        told = process.communicate(timeout=120)[0]
    said = (tmp_path / "log").read_text()
    assert process.returncode == 0, said
    [made] = (path for path in (store / "filter").iterdir() if not path.is_symlink())
    assert f"filter: {made}" in told
    assert said.count("server does not answer") <= 1
    assert "did not take the final state" in said
    assert "Traceback" not in said
    assert group(process.pid) == []


def test_a_killed_run_goes_on_from_its_checkpoint_with_the_budget_left(after_up: dict, tmp_path, toy_texts: list[str]):
    seconds = 11  # the first checkpoint comes after 5
    env = after_up | {"CRAM_ARTIFACTS": str(tmp_path / "artifacts")}
    command = ["run", "demo", "--override", tiny(tmp_path, toy_texts, seconds)]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([*CRAM, *command], env=env, cwd=HOME, stdout=log, stderr=log, start_new_session=True)
    store = Path(env["CRAM_ARTIFACTS"])
    await_file(process, store, ".partial/pretrain-*/work/checkpoint.safetensors", tmp_path / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (store / "pretrain").exists()
    [metrics] = store.glob(".partial/pretrain-*/work/metrics.jsonl")
    whole_lines = metrics.read_text().rpartition("\n")[0].splitlines()
    before = [(row["step"], row["seconds"]) for row in map(json.loads, whole_lines)]
    done = cram(env, *command)
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
    assert stats["steps"] == steps[-1]
    assert clock[-1] - 0.001 <= stats["seconds_on_the_clock"] < clock[-1] + 1, (
        "read again after the last row, and rounded"
    )
    assert "neighbours" in done.stdout
    assert "Full report" in done.stdout
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


def test_ls_of_a_stage_without_artifacts_names_it(store: Path, tmp_path: Path, toy_texts: list[str]):
    download.fn(Download(source="files", files=[str(write_jsonl(tmp_path / "toy.jsonl", toy_texts))], documents=0))
    told = CliRunner().invoke(app, ["ls", "pretrain"]).stdout
    assert told == f"No artifacts of pretrain in {store} yet. Make some: cram run demo --until pretrain\n"


def test_a_damaged_manifest_is_told_by_ls_and_show(store: Path, tmp_path: Path, toy_texts: list[str]):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    whole = download.fn(Download(source="files", files=[str(shard)], documents=0))
    (store / "download" / "0damaged").mkdir()
    (store / "download" / "0damaged" / "stage.json").write_text('{"files": [], "stats": {}}')
    listed = CliRunner().invoke(app, ["ls"])
    assert listed.exit_code == 0
    assert whole.key in listed.stdout
    words = "download/0damaged is damaged: its stage.json has no params."
    assert words in listed.stdout
    assert words in str(CliRunner().invoke(app, ["show", "download/0damaged"]).exception)


def test_paths_with_brackets_are_printed_whole(store: Path, monkeypatch, capsys, tmp_path: Path, toy_texts: list[str]):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    made = download.fn(Download(source="files", files=[str(shard)], documents=0))
    inside = tmp_path / "a [red] place"
    inside.mkdir()
    moved = store.rename(inside / "store")
    monkeypatch.setattr("tasks.store.ROOT", moved)
    tell(made)
    assert f"download: {moved}/download/{made.key}\n" in capsys.readouterr().out
    assert f"{moved}/download/{made.key}\n" in CliRunner().invoke(app, ["show", "download"]).stdout
    assert f"in {moved} yet" in CliRunner().invoke(app, ["ls", "filter"]).stdout
    tables.say(f"Server: answers at http://[::1]:4200, {moved}")
    assert capsys.readouterr().out.endswith(f"http://[::1]:4200, {moved}\n")


@pytest.mark.parametrize("arguments", [["ls"], ["show", "filter"], ["diff", "filter", "a", "b"], ["run", "demo"]])
def test_a_store_that_is_a_file_is_said_to_be_one(store: Path, arguments: list[str]):
    store.write_text("")
    told = str(CliRunner().invoke(app, arguments).exception)
    assert told == f"The artifact store {store} is a file; expected a directory. Set CRAM_ARTIFACTS to one."


def test_several_overrides_are_merged_and_the_later_decides():
    texts = ['{"pretrain": {"budget": 1, "architecture": {"layers": 2}}}', '{"filter": {"min_characters": 3}}']
    texts += ['{"pretrain": {"budget": 2, "architecture": {"hidden": 64}}}']
    changes = {"pretrain": {"budget": 2, "architecture": {"layers": 2, "hidden": 64}}, "filter": {"min_characters": 3}}
    assert parse_overrides(texts) == changes


def test_a_run_takes_all_its_overrides(store: Path, monkeypatch: pytest.MonkeyPatch):
    given = []
    monkeypatch.setattr("flows.cram.planned", lambda *arguments: given.append(arguments) or sys.exit(0))
    asked = ["--override", override(filter={"min_characters": 3}), "--override", override(pretrain={"budget": 2})]
    CliRunner().invoke(app, ["run", "demo", *asked])
    assert given[0][:3] == ("demo", {"filter": {"min_characters": 3}, "pretrain": {"budget": 2}}, "report")


def test_a_key_of_another_stage_is_said_to_be_one(store: Path, tmp_path: Path, toy_texts: list[str]):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    corpus = download.fn(Download(source="files", files=[str(shard)], documents=0))
    deduplicate.fn(Deduplicate(), corpus)
    told = str(CliRunner().invoke(app, ["show", f"deduplicate/{corpus.key}"]).exception)
    assert told.startswith("No complete artifact of deduplicate is ")
    assert told.endswith(f" download/{corpus.key} is of the stage download.")
    assert "is of the stage" not in str(CliRunner().invoke(app, ["show", "deduplicate/none"]).exception)


def test_diff_of_reports_shows_the_scores_that_differ(store: Path):
    def report(key: str, *scores: float) -> None:
        kinds = [{}, {"pretrained": False}, {"share": 0.1}]
        usual = {"task": "RTE", "protocol": "modern", "pretrained": True, "share": 1.0, "metric": "accuracy"}
        rows = [usual | kind | {"score": score} for kind, score in zip(kinds, scores, strict=True)]
        about = {"version": 4, "params": {"title": "x"}, "inputs": {"runs": [key]}, "files": [], "finished": key}
        about |= {"seconds": 1, "environment": {}}
        (store / "report" / key).mkdir(parents=True)
        (store / "report" / key / "stage.json").write_text(
            json.dumps(about | {"stats": {"average": None, "table": rows}})
        )

    report("a", 61.5, 50.0, 55.1)
    report("b", 63.25, 50.0, 55.2)
    told = CliRunner().invoke(app, ["diff", "report", "a", "b"]).stdout.split("differing statistics")[1]
    assert [" ".join(line.split()) for line in told.splitlines() if "RTE" in line] == [
        "RTE, accuracy, modern 61.5 63.25",
        "RTE, accuracy, modern, 10 % of the data 55.1 55.2",
    ]
    assert "cram compare a b" in told


def test_show_has_the_numbers_of_each_source_in_the_table_alone(store: Path, tmp_path: Path, toy_texts: list[str]):
    for name, texts in (("prose", toy_texts[:200]), ("noise", [os.urandom(40).hex() for _ in range(40)])):
        write_jsonl(tmp_path / f"{name}.jsonl", texts, name)
    corpus = download.fn(Download(source="files", files=[str(tmp_path / "*.jsonl")], documents=0))
    made = filtered(corpus, max_tokens_per_char=0.5)
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
    kept = filtered(unique, 256, max_tokens_per_char=9, **limits)
    found = {*corpus.stats["lost"], *unique.stats["dropped"], *kept.stats["dropped"], "contaminated"}
    found = {re.sub("(?<=longer than )1(?= MB)", "100", re.sub("(?<=but )int", "…", reason)) for reason in found}
    assert len(found) == 10 + 5 + 3 + 1 + 5
    table = (HOME / "tasks" / "README.md").read_text().split("| stage | in its statistics |")[1].split("\n\n")[0]
    assert found <= set(re.findall("`([^`]+)`", table))


def test_no_control_character_of_a_name_reaches_the_terminal_or_a_page(capsys: pytest.CaptureFixture):
    name = "\x1b[31mred\x9b0m\u202e\a"
    tables.print_rows([{"source": name, "documents": 1}])
    told = capsys.readouterr().out + summary.flat({"a": {"b": name}})["a.b"] + table(["source"], [[name]]) + code(name)
    assert "red" in told
    assert not {"\x1b", "\x9b", "\u202e", "\a"} & set(told)


def put(store: Path, stage: str, key: str, stats: dict, **params: object) -> None:
    """An artifact of two hours ago."""
    finished = (datetime.now(UTC) - timedelta(hours=2)).isoformat(timespec="milliseconds")
    about = {"stage": stage, "key": key, "params": params, "inputs": {}, "files": [], "stats": stats}
    (store / stage / key).mkdir(parents=True)
    about |= {"finished": finished, "seconds": 4271.8, "environment": {}}
    (store / stage / key / "stage.json").write_text(json.dumps(about))


def draft(store: Path, name: str) -> None:
    (store / ".partial" / name / "work").mkdir(parents=True)
    (store / ".partial" / name / "work" / "state").write_bytes(bytes(2_000))


@pytest.mark.parametrize("width", [80, 200])
def test_ls_fits_the_terminal_and_has_each_result(store: Path, monkeypatch: pytest.MonkeyPatch, width: int):
    kept = {"documents": 45_095, "dropped": {"incompressible": {"documents": 5_394}}}
    for key, limit in (("0123456789ab", 0.3), ("123456789abc", 0.25)):
        put(store, "filter", key, kept, max_tokens_per_char=limit, sample_megabytes=limit * 100)
    for key, layers in (("23456789abcd", 12), ("3456789abcde", 16)):
        sizes = {"layers": layers, "hidden": 48 * layers, "heads": layers, "intermediate": 144 * layers}
        put(store, "pretrain", key, {"heldout_loss": 5.95321}, architecture=sizes, budget=layers)
    draft(store, "pretrain-456789abcdef")
    monkeypatch.setattr(tables.console, "width", width)
    lines = CliRunner().invoke(app, ["ls"]).stdout.splitlines()
    assert max(len(line) for line in lines if str(store) not in line) <= width
    for name, result in (
        ("filter/0123456789ab", "45,095 of 50,489 documents"),
        ("pretrain/3456789abcde", "loss 5.9532"),
    ):
        [line] = (line for line in lines if name in line)
        assert result in line
        assert "  2 h  " in line
        assert "  1.2 h  " in line
        assert ("architecture.layers=16" in line) == (width == 200 and "pretrain" in name)
    assert "architecture.layers=16, architecture.hidden=768" in "\n".join(lines)


def test_ls_lists_drafts_and_what_becomes_of_them(store: Path):
    for name in ("pretrain-0123456789ab", "finetune-123456789abc", "pretrain-23456789abcd", "tmpold"):
        draft(store, name)
    with locked(Artifact(stage="pretrain", key="23456789abcd")):
        listed = CliRunner().invoke(app, ["ls"]).stdout
        only = CliRunner().invoke(app, ["ls", "finetune"]).stdout
        sentence = str(CliRunner().invoke(app, ["show", "pretrain/2345"]).exception)
    found = [re.split("  +", line) for line in listed.splitlines() if "2 kB" in line]
    assert sorted([name, state] for name, _, _, state in found) == [
        ["finetune/123456789abc", "a rerun starts over"],
        ["pretrain/0123456789ab", "a rerun resumes it"],
        ["pretrain/23456789abcd", "in progress"],
        ["tmpold", "being deleted, or left by a killed run"],
    ]
    assert "finetune/123456789abc" in only
    assert "pretrain/" not in only
    assert "pretrain/23456789abcd is an unfinished draft (in progress)" in sentence


def test_control_characters_of_an_artifact_do_not_reach_the_terminal(store: Path):
    evil, stats = "\x1b[31m\x9b2J\u202e\ud800 name", {"documents": 1, "table": [{"source": "all", "documents": 1}]}
    stats["table"][0] |= {"\x1b]0;a\x07": 2, "what": evil}
    put(store, "filter", "a", stats, files=[evil])
    put(store, "filter", "b", stats, files=[evil, evil], **{"\x1b[1m": 1})
    (store / "filter" / "\x1b[2J").mkdir()
    (store / "filter" / "\x1b[2J" / "stage.json").write_text('{"files": [], "stats": {}}')
    draft(store, "filter-\x1b[2J")
    for arguments in (["ls"], ["show", "filter/a"], ["show", "filter/b"], ["diff", "download", "a", "b"]):
        if arguments[0] == "diff":
            (store / "filter").rename(store / "download")
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.exception
        assert "\\u001b[31m" in done.stdout
        assert [c for c in done.stdout if not c.isprintable() and c != "\n"] == []


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    env = {"_CRAM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["cram", *words]), "COMP_CWORD": str(len(words))}
    return CliRunner().invoke(app, [], env=env, prog_name="cram").stdout.split()


def test_recipes_and_stages_complete():
    assert completed("run", "") == list(RECIPES)
    assert completed("run", "dem") == ["demo"]
    for words in (["ls"], ["show"], ["diff"], ["run", "demo", "--until"], ["run", "demo", "--refresh"]):
        assert completed(*words, "") == list(STAGES)
        assert completed(*words, "fi") == ["filter", "finetune"]


def test_help_and_completion_import_nothing_slow():
    code = "import sys; import flows.cli.main; from flows.cli import arguments; heavy = {'prefect', 'pydantic', 'torch'}; print(heavy & set(sys.modules));"
    code += "arguments.stage_names(), arguments.recipe_names(); print({'prefect', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HOME)
    assert done.stdout == "set()\n" * 2


def test_version_names_what_cram_computes_with():
    told = dict(line.split(" ", 1) for line in CliRunner().invoke(app, ["--version"]).stdout.splitlines())
    assert {name: told[name] for name in ("torch", "prefect")} == {name: version(name) for name in ("torch", "prefect")}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", told["commit"])


def test_what_is_not_of_a_row_stays_in_the_statistics():
    stats = {"a": 1, "b": {"x": 2, "y": {}}, "c": {"x": 3}, "d": {"all": 4, "x": 5}, "e": {"f": {"x": 6}, "g": [7]}}
    assert without_rows({"by_source": {"all": 1, "x": 2}}, {"all", '"all"', "x"}) == {}
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


def deployment_run(env: dict[str, str], *parameters: str) -> subprocess.CompletedProcess:
    """Submit a run to the worker that `cram up` started."""
    command = [sys.executable, "-m", "prefect", "deployment", "run", "cram/full", *parameters]
    return subprocess.run(command, env=env, cwd=HOME, capture_output=True, text=True, timeout=180)


def test_up_deploys_and_a_run_completes(after_up: dict, tmp_path, toy_texts: list[str]):
    misspelt = deployment_run(after_up, "-p", 'override={"filter": {"max_tokens": 1}}')
    assert misspelt.returncode == 1
    assert "max_tokens" in misspelt.stdout + misspelt.stderr
    parameters = ["-p", "recipe=demo", "-p", f"override={tiny(tmp_path, toy_texts)}", "-p", "until=vocabulary"]
    done = deployment_run(after_up, *parameters, "--watch", "--watch-timeout", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {p.name for p in Path(after_up["CRAM_ARTIFACTS"]).iterdir() if not p.name.startswith(".")}
    assert found == {"download", "deduplicate", "decontaminate", "measure", "filter", "vocabulary"}
    header = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{after_up['PREFECT_API_URL']}/artifacts/filter", b"{}", header)
    with urllib.request.urlopen(asked) as answer:
        assert "filter-table" in {artifact["key"] for artifact in json.load(answer)}


def test_a_cancelled_run_leaves_its_checkpoint_and_ends(after_up: dict, tmp_path: Path, toy_texts: list[str]):
    submitted = deployment_run(
        after_up, "-p", "recipe=demo", "-p", f"override={tiny(tmp_path, toy_texts, 3600)}", "-p", "until=pretrain"
    )
    run = re.search(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", submitted.stdout).group()
    store, state = Path(after_up["CRAM_ARTIFACTS"]), f"{after_up['PREFECT_API_URL']}/flow_runs/{run}"

    def told() -> dict:
        with urllib.request.urlopen(state) as answer:
            return json.load(answer)

    def wait(happened: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert time.monotonic() < deadline, (what, told()["state"])
            time.sleep(0.1)

    wait(
        lambda: [p for p in store.glob(".partial/pretrain-*/work/metrics.jsonl") if p.stat().st_size], "training begins"
    )
    (work,) = (p.parent for p in store.glob(".partial/pretrain-*/work/metrics.jsonl"))
    assert not (work / "checkpoint.safetensors").exists(), "the next one is minutes away"
    cancel = [sys.executable, "-m", "prefect", "flow-run", "cancel", run]
    assert subprocess.run(cancel, env=after_up, capture_output=True, text=True).returncode == 0
    wait((work / "checkpoint.safetensors").exists, "a checkpoint")
    wait(lambda: told()["state"]["type"] == "CANCELLED", "the end of the run")
    steps = len((work / "metrics.jsonl").read_text().splitlines())
    with safe_open(work / "checkpoint.safetensors", "np") as file:
        assert json.loads(file.metadata()["spent"])["step"] == steps > 0
    assert not (store / "pretrain").exists(), "what is not finished is not published"


def test_up_again_finds_what_runs_and_down_ends_what_up_started(after_up: dict):
    again = cram(after_up, "up")
    assert "Server: answers" in again.stdout
    assert "Worker: running" in again.stdout
    pids = [int(p.read_text()) for p in Path(after_up["PREFECT_HOME"]).glob("*.pid")]
    down = cram(after_up, "down")
    assert len(pids) == 2
    assert down.stdout.count("ended") == 2
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_scores_fit_80_columns_without_what_is_usual_and_with_their_verdicts(monkeypatch, capsys):
    monkeypatch.setattr(tables.console, "width", 80)
    row = {"task": "word-order", "pretrained": True, "metric": "accuracy", "score": 48.0, "majority": 51.5}
    row |= {"verdict": "no better than always answering the most frequent class"}
    usual = {"protocol": "cramming", "share": 1.0, "seeds": 5, "partial data": False}
    tables.print_scores([row | usual, row | usual | {"pretrained": False, "score": 60.0, "verdict": ""}])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:3]] == [
        ["word-order", "True", "accuracy", "48.0", "51.5"],
        ["word-order", "False", "accuracy", "60.0", "51.5"],
    ]
    assert ["†" in line for line in lines[1:3]] == [True, False]
    assert lines[3:] == [f"† {row['verdict']}"]
