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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import filtered, tiny_override, write_jsonl
from typer.testing import CliRunner

from flows.cli import main, tables
from flows.cli.main import app
from flows.cli.results import print_results, print_score_table
from flows.cli.run import parse_overrides
from flows.recipes import RECIPES, STAGES
from model import InputError
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
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


def tiny(tmp_path: Path, texts: list[str], seconds: float = 2) -> str:
    """The demo recipe on toy text, with so many seconds of pretraining."""
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    return json.dumps(tiny_override(shard, budget=seconds / 3600))


def override(**stages: dict) -> str:
    return json.dumps(stages)


def check_refusal(code: int, out: str, err: str, words: str) -> None:
    """An error of the user's is one line on standard error."""
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("cram: ")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "dmo"], "'dmo'. Did you mean demo? "),
        (["run", "something"], "'something'. Recipes: "),
        (["run", "demo", "--override", "{"], "--override is not valid JSON"),
        (["run", "demo", "--override", '{"a":' * 20_000 + "1" + "}" * 20_000], "--override is nested too deeply"),
        (["run", "demo", "--override", '{"filter": {"max": 1}}'], "filter.max"),
        (["run", "demo", "--override", '{"filter": {}, "filter": {}}'], "--override has 'filter' twice"),
        (["run", "demo", "--override", '{"filter": 3}', "--override", '{"filter": {}}'], "filter: "),
        (["run", "demo", "--until", "filtr"], "'filtr'. Did you mean filter? "),
        (["run", "demo", "--until", "filter", "--until", "tokenize"], "--until names filter and tokenize"),
        (["run", "demo", "--use", "filter"], "--use is 'filter'"),
        (["run", "demo", "--use", "pretrain=123"], "no artifacts of pretrain"),
        (["run", "demo", "--override", override(download={"source": "files", "files": ["gone"]})], "'gone'"),
        (["run", "pocket", "--override", override(finetune={"data": "gone"})], "gone is no directory"),
        (["show", "filter/123"], "no artifacts of filter"),
        (["ls", "nothing"], "'nothing'. Stages: "),
        (["show", "\x1b[2Jfilter"], "\\x1b[2Jfilter"),
        (["diff", "filter", "1", "2"], "no artifacts of filter"),
    ],
)
def test_an_error_of_the_user_is_one_sentence_and_exit_1_without_a_server(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, arguments: list[str], words: str
):
    monkeypatch.setattr(sys, "argv", ["cram", *arguments])
    monkeypatch.setattr(main, "SETTINGS", {})  # Prefect, which reads them, is imported already
    with pytest.raises(SystemExit) as ended:
        main.main()
    check_refusal(ended.value.code, *capsys.readouterr(), words)
    assert not store.exists(), "nothing was published"


def test_a_process_prints_nothing_but_that_sentence(env: dict):
    done = cram(env, "run", "demo", "--override", override(download={"source": "files", "files": ["gone"]}))
    check_refusal(done.returncode, done.stdout, done.stderr, "gone")
    assert not Path(env["CRAM_ARTIFACTS"]).exists(), "nothing was published"


@pytest.mark.parametrize("command", ["ls >&-", "--help >/dev/full"])
def test_a_standard_output_that_can_not_be_written_is_an_error(env: dict, command: str):
    shell = ["sh", "-c", f'exec "$0" -m flows.cli {command}', sys.executable]
    done = subprocess.run(shell, env=env, capture_output=True, text=True, cwd=HOME)
    check_refusal(done.returncode, done.stdout, done.stderr, "Standard output")


def test_only_a_full_disk_is_an_error_of_standard_output():
    with pytest.raises(InputError, match="Standard output"), main.output_checked():
        raise OSError(errno.ENOSPC, "No space left on device")  # of a long line, which isn't buffered
    with pytest.raises(FileNotFoundError), main.output_checked():
        Path("/nothing/here").read_text()


def test_an_input_error_of_a_stage_is_printed_once_and_last(env: dict, tmp_path: Path, toy_texts: list[str]):
    changes = json.loads(tiny(tmp_path, toy_texts)) | {"vocabulary": {"entries": 60_000}}
    done = cram(env, "run", "demo", "--until", "vocabulary", "--override", json.dumps(changes))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("cram: The corpus of ")
    assert done.stderr.count("60,000") == 1
    assert " filter: " in done.stderr
    for noise in ("Traceback", "hook", "InputError"):
        assert noise not in done.stderr + done.stdout


def await_file(process: subprocess.Popen, store: Path, pattern: str, log: Path) -> Path:
    """Wait until a running command has written to a file; the file."""
    deadline = time.monotonic() + 180
    while not (found := [path for path in store.glob(pattern) if path.stat().st_size]):
        assert time.monotonic() < deadline, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    return found[0]


def group(leader: int) -> list[int]:
    """The living processes of a group, without its leader."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            pid, (state, _, own) = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()[:3]
            found += [pid] if int(own) == leader != pid and state != "Z" else []
    return found


def with_signals() -> None:
    """Take the signals that a shell's background jobs and `nohup` ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def started(env: dict, log: Path, *arguments: str) -> Iterator[subprocess.Popen]:
    """A running command in a process group of its own, as at a terminal."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [*CRAM, *arguments],
            env=env,
            cwd=HOME,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=with_signals,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def training(env: dict, tmp_path: Path, toy_texts: list[str]) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A run that is training, and its metrics."""
    command = ["run", "demo", "--until", "pretrain", "--override", tiny(tmp_path, toy_texts, 3600)]
    with started(env, tmp_path / "log", *command) as process:
        store = Path(env["CRAM_ARTIFACTS"])
        yield process, await_file(process, store, ".partial/pretrain-*/work/metrics.jsonl", tmp_path / "log")


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
    assert group(process.pid) == [], "the processes that it started, the server too"
    log = (tmp_path / "log").read_text()
    assert log.splitlines()[-1].startswith(f"cram: Stopped by {cause}.")
    assert "Traceback" not in log
    assert "Crash" not in log


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
def test_a_run_without_its_server_is_published_and_ends_well(env: dict, tmp_path, toy_texts: list[str], sign: int):
    log, store = tmp_path / "log", Path(env["CRAM_ARTIFACTS"])
    command = ["run", "demo", "--until", "filter", "--override", tiny(tmp_path, toy_texts)]
    with started(env, log, *command) as process:
        await_file(process, store, "download/*/stage.json", log)
        [server] = group(process.pid)
        os.kill(server, sign)
        assert process.wait(120) == 0, log.read_text()
        assert group(process.pid) == []
    [made] = (path for path in (store / "filter").iterdir() if not path.is_symlink())
    assert log.read_text().endswith(f"filter: {made}\n")
    assert log.read_text().count("server does not answer") <= 1
    assert "did not accept the final state" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_ls_and_show_list_artifacts_and_their_differences(store: Path, tmp_path: Path, toy_texts: list[str]):
    runner = CliRunner()
    assert "No artifacts" in runner.invoke(app, ["ls"]).stdout
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    made = [download.fn(Download(source="files", files=[str(shard)], documents=n)) for n in (0, 50)]
    deduplicate.fn(Deduplicate(), made[1])
    listed = runner.invoke(app, ["ls"]).stdout
    for artifact, difference in zip(made, ("documents=0", "documents=50"), strict=True):
        (line,) = (row for row in listed.splitlines() if artifact.key in row)
        assert difference in line
        assert "max_lost" not in line, "the same in both"
    assert "deduplicate" not in runner.invoke(app, ["ls", "download"]).stdout
    assert runner.invoke(app, ["ls", "pretrain"]).stdout.startswith(f"No artifacts of pretrain in {store} ")
    shown = runner.invoke(app, ["show", f"download/{made[0].key[:6]}"]).stdout
    for words in (made[0].key, "toy.jsonl", '"documents": 300'):
        assert words in shown
    assert f"corpus: download/{made[1].key}" in runner.invoke(app, ["show", "deduplicate"]).stdout
    refused = str(runner.invoke(app, ["show", f"deduplicate/{made[0].key}"]).exception)
    assert refused.endswith(f" download/{made[0].key} is of the stage download.")


def test_a_damaged_manifest_does_not_hide_other_artifacts(store: Path):
    put(store, "download", "a", {"documents": 1})
    (store / "download" / "0damaged").mkdir()
    (store / "download" / "0damaged" / "stage.json").write_text('{"files": [], "stats": {}}')
    listed = CliRunner().invoke(app, ["ls"])
    assert listed.exit_code == 0
    assert "download/a" in listed.stdout
    for words in (listed.stdout, str(CliRunner().invoke(app, ["show", "download/0damaged"]).exception)):
        assert "download/0damaged is damaged: its stage.json has no params." in words


def test_paths_with_brackets_are_printed_whole(store: Path, monkeypatch, capsys, tmp_path: Path):
    put(store, "download", "a", {"documents": 1})
    moved = store.rename(tmp_path / "a [red] place")
    monkeypatch.setattr("tasks.store.ROOT", moved)
    print_results(Artifact(stage="download", key="a"))
    assert f"download: {moved}/download/a\n" in capsys.readouterr().out
    assert f"{moved}/download/a\n" in CliRunner().invoke(app, ["show", "download"]).stdout
    assert f"in {moved} yet" in CliRunner().invoke(app, ["ls", "filter"]).stdout
    tables.say(f"Server: answers at http://[::1]:4200, {moved}")
    assert capsys.readouterr().out.endswith(f"http://[::1]:4200, {moved}\n")


@pytest.mark.parametrize("arguments", [["ls"], ["show", "filter"], ["diff", "filter", "a", "b"], ["run", "demo"]])
def test_a_store_that_is_a_file_is_refused(store: Path, arguments: list[str]):
    store.write_text("")
    refused = CliRunner().invoke(app, arguments).exception
    assert isinstance(refused, InputError)
    assert f"{store} is a file" in str(refused)


def test_several_overrides_are_merged_and_the_last_one_wins():
    texts = ['{"pretrain": {"budget": 1, "architecture": {"layers": 2}}}', '{"filter": {"min_characters": 3}}']
    texts += ['{"pretrain": {"budget": 2, "architecture": {"hidden": 64}}}']
    changes = {"pretrain": {"budget": 2, "architecture": {"layers": 2, "hidden": 64}}, "filter": {"min_characters": 3}}
    assert parse_overrides(texts) == changes


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


def test_version_names_what_cram_computes_with():
    told = dict(line.split(" ", 1) for line in CliRunner().invoke(app, ["--version"]).stdout.splitlines())
    assert {name: told[name] for name in ("torch", "prefect")} == {name: version(name) for name in ("torch", "prefect")}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", told["commit"])


@pytest.mark.parametrize("command", ["run", "ls", "show", "diff"])
def test_the_help_names_recipes_and_stages(command: str):
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    for name in (*STAGES, *(RECIPES if command == "run" else ())):
        assert re.search(rf"[ :]{name}[,.]", shown.stdout), name


def test_scores_with_and_without_pretraining_share_a_row_of_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(tables.console, "width", 80)
    weak = "no better than always answering the most frequent class"
    usual = {"protocol": "cramming", "share": 1.0, "seeds": 5, "partial data": False, "metric": "accuracy"}
    usual |= {"task": "word-order", "majority": 51.5}
    other = usual | {"task": "odd-word", "pretrained": True, "score": 70.0, "verdict": ""}
    print_score_table(
        [usual | {"pretrained": flag, "score": score, "verdict": weak} for flag, score in ((True, 48.0), (False, 49.0))]
        + [other]
    )
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-3:-1] == [
        ["word-order", "accuracy", "48.0", "†", "49.0", "51.5"],
        ["odd-word", "accuracy", "70.0", "51.5"],
    ]
    assert lines[-1] == ["†", *weak.split()]
