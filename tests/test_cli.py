"""The command line, as processes where exit codes and signals matter."""

import errno
import fcntl
import gzip
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from conftest import corpus_of, downloaded, filtered, tiny_override, write_jsonl
from prefect.exceptions import ParameterTypeError
from typer.testing import CliRunner

from flows.cli import common, main
from flows.cli.artifacts import differences
from flows.cli.ending import signals_as_sentences
from flows.cli.execution import ServerLost, execute
from flows.cli.main import app
from flows.cli.run import print_results
from flows.recipes.recipe import RECIPES, STAGES
from model.environment import print_anything
from model.errors import InputError
from model.signals import SIGNALS, Stopped
from tasks.store.artifacts import Artifact
from tasks.store.locks import lock_artifact

CRAM = ("-m", "flows.cli.main")
HOME = Path(__file__).resolve().parents[1]


def cram(env: dict[str, str], *arguments: str, home: Path = HOME) -> subprocess.CompletedProcess:
    """Run a command to its end, as a process."""
    return subprocess.run([sys.executable, *CRAM, *arguments], env=env, capture_output=True, text=True, cwd=home)


def new_user(folder: Path) -> dict[str, str]:
    """The environment of a user whose store is empty and whose server doesn't run."""
    own = {"CRAM_ARTIFACTS": str(folder / "artifacts"), "PREFECT_HOME": str(folder / "prefect")}
    with socket.create_server(("127.0.0.1", 0)) as free:
        own["PREFECT_API_URL"] = f"http://127.0.0.1:{free.getsockname()[1]}/api"
    return os.environ | own | {"PREFECT_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a user with a store that several runs use."""
    return new_user(tmp_path_factory.mktemp("user"))


def tiny(tmp_path: Path, texts: list[str], seconds: float = 2) -> str:
    """The demo recipe on toy text, with so many seconds of pretraining."""
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    return json.dumps(tiny_override(shard, budget=seconds / 3600))


def check_refusal(code: int, out: str, err: str, words: str) -> None:
    """An error of the user's is one line on standard error."""
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("cram: ")
    assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "demo", "--override", "{"], "--override is not valid JSON"),
        (["run", "demo", "--override", "[1]"], "[1]"),
        (["run", "demo", "--override", '{"a":' * 20_000 + "1" + "}" * 20_000], "--override is not valid JSON"),
        (["run", "demo", "--override", '{"filter": {}, "filter": {}}'], "'filter' occurs twice"),
        (["run", "demo", "--override", '{"filter": {}}', "--override", '{"filter": 3}'], "filter is 3"),
        (["run", "demo", "--until", "filtr"], "'filtr'. Did you mean filter? "),
        (["run", "demo", "--use", "filter"], "--use is 'filter'"),
        (["show", "filter/123"], "no artifacts of filter"),
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


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ('run demo --override \'{"download": {"source": "files", "files": ["gone"]}}\'', "gone"),
        ("--help >/dev/full", "Standard output"),
    ],
)
def test_a_process_prints_nothing_but_that_sentence(tmp_path: Path, command: str, words: str):
    shell = ["sh", "-c", f'exec "$0" -m flows.cli.main {command}', sys.executable]
    done = subprocess.run(shell, env=new_user(tmp_path), capture_output=True, text=True, cwd=HOME)
    check_refusal(done.returncode, done.stdout, done.stderr, words)
    assert not (tmp_path / "artifacts").exists(), "nothing was published"


def test_only_a_full_disk_is_an_error_of_standard_output(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the output of these tests goes on
    with pytest.raises(InputError, match="Standard output"), main.output_checked():
        raise OSError(errno.ENOSPC, "No space left on device")  # of a long line, which isn't buffered
    with pytest.raises(FileNotFoundError), main.output_checked():
        Path("/nothing/here").read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", None)  # as by `>&-`
    with pytest.raises(InputError, match="Standard output is closed"), main.output_checked():
        pass


def printed_by(user: dict, *arguments: str, **settings: str) -> str:
    """What a command prints, without an error, with these settings of the interpreter."""
    done = subprocess.run(
        [sys.executable, *CRAM, *arguments], env=user | settings, capture_output=True, cwd=HOME, check=True
    )
    assert b"Traceback" not in done.stderr
    return done.stdout.decode(settings.get("PYTHONIOENCODING", "utf-8"))


def test_what_the_output_cannot_encode_is_printed_in_another_way(user: dict):
    shown = printed_by(user, "params", PYTHONIOENCODING="ascii")
    assert "\\u2013" in shown
    assert "\nreport " in shown, "all of it"


def test_all_streams_of_a_process_print_any_character(monkeypatch: pytest.MonkeyPatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    print_anything()
    common.say("≤ \udcff")
    print("≤", file=sys.stderr, flush=True)
    sys.stdout.flush()
    assert sys.stdout.buffer.getvalue() == b"\\u2264 \\udcff\n"
    assert sys.stderr.buffer.getvalue() == b"\\u2264\n"


def test_without_docstrings_commands_have_their_help_and_prefects_worker_can_import_the_flows(user: dict):
    assert "Run a recipe, from raw text to scores." in printed_by(user, "--help", PYTHONOPTIMIZE="2")
    flows = [sys.executable, "-OO", "-c", "import flows.cram, flows.study; assert False"]
    assert subprocess.run(flows, env=user, cwd=HOME, capture_output=True, text=True).stderr == ""


def denied() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "/root/secret")


def lost() -> None:
    raise ServerLost("The Prefect server was lost.")


@pytest.mark.parametrize(
    ("command", "end", "words"),
    [(denied, "exit", "Permission denied: /root/secret."), (lost, "_exit", "The Prefect server was lost.")],
)
def test_an_error_of_a_disk_is_a_sentence_and_after_that_of_a_lost_server_the_process_ends_at_once(
    store: Path, monkeypatch, capsys: pytest.CaptureFixture, command, end: str, words: str
):
    ended = Mock(side_effect=SystemExit)
    monkeypatch.setattr(main, "app", command)
    monkeypatch.setattr(main, "SETTINGS", {})  # Prefect, which reads them, is imported already
    monkeypatch.setattr(os if end == "_exit" else sys, end, ended)
    with pytest.raises(SystemExit):
        main.main()
    assert ended.call_args.args == (1,)
    check_refusal(1, *capsys.readouterr(), words)


def test_a_full_file_system_of_temporary_files_is_named_and_not_the_store(user: dict, tmp_path: Path):
    mount = "mount -t tmpfs -o size=64k none ."
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    table = pa.table({"text": [os.urandom(1000).hex() for _ in range(200)]})
    packed = io.BytesIO()
    pq.write_table(table, packed)
    (tmp_path / "table.parquet.gz").write_bytes(gzip.compress(packed.getvalue()))
    changes = {"download": {"source": "files", "files": [str(tmp_path / "table.parquet.gz")]}}
    (tmp_path / "full").mkdir()
    run = f'cd full; {mount}; cd "$1"; shift; exec "$@"'
    asked = ["run", "demo", "--until", "download", "--override", json.dumps(changes)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", run, "sh", HOME, sys.executable, *CRAM, *asked],
        env=user | {"TMPDIR": str(tmp_path / "full")}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, last[:5], f"No space left on device: {tmp_path}/full." in last) == (1, "cram:", True)
    assert ("TMPDIR" in last, "CRAM_ARTIFACTS" in last) == (True, False)


def test_a_run_in_a_store_without_file_locks_is_refused_before_it_begins(
    store: Path, tmp_path: Path, toy_texts: list[str], monkeypatch
):
    from flows.cram import cram as flow

    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    with pytest.raises(InputError, match=f"{store} .*CRAM_ARTIFACTS"):
        flow.fn(recipe="demo", override=tiny_override(shard), until="download")
    assert not [path for path in store.glob("*/*") if path.parent.name != ".locks"]


def test_an_input_error_of_a_stage_is_printed_once_and_last(user: dict, tmp_path: Path, toy_texts: list[str]):
    changes = json.loads(tiny(tmp_path, toy_texts)) | {"vocabulary": {"entries": 60_000}}
    done = cram(user, "run", "demo", "--until", "vocabulary", "--override", json.dumps(changes))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("cram: The corpus of ")
    assert done.stderr.count("60,000") == 1
    assert " filter: " in done.stderr
    assert not re.search("Traceback|hook|InputError", done.stderr + done.stdout)


@pytest.fixture
def _handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("sign", "refresh"), [(signal.SIGINT, []), (signal.SIGUSR1, ["pretrain"])])
@pytest.mark.usefixtures("_handlers_restored")
def test_a_run_that_a_signal_ends_says_once_how_to_go_on(capsys: pytest.CaptureFixture, sign: int, refresh: list[str]):
    flow = SimpleNamespace(fn=lambda refresh: signal.raise_signal(sign))
    with pytest.raises(Stopped) as ended, signals_as_sentences():
        execute(flow, None, refresh=refresh)
    assert ended.value.code == 128 + sign
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("cram: Stopped by ")
    assert "resume" in line
    assert ("without --refresh" in line) == bool(refresh), "which would discard the checkpoint"


def show(*arguments: str) -> str:
    """What a command prints that ends well."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def refusal(*arguments: str) -> str:
    """The sentence of a command that refuses."""
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, InputError)
    return str(error)


def put(store: Path, stage: str, key: str, stats: dict, **params: object) -> None:
    """An artifact of two hours ago."""
    about = {"stage": stage, "key": key, "params": params, "inputs": {"corpus": "download/b2"}, "files": []}
    about |= {"stats": stats, "seconds": 4271.8, "environment": {}}
    about["finished"] = (datetime.now(UTC) - timedelta(hours=2)).isoformat(timespec="milliseconds")
    (store / stage / key).mkdir(parents=True)
    (store / stage / key / "stage.json").write_text(json.dumps(about))


def draft(store: Path, name: str) -> None:
    (store / ".partial" / name / "work").mkdir(parents=True)
    (store / ".partial" / name / "work" / "state").write_bytes(bytes(2_000))


def test_parameters_that_prefect_refuses_are_a_sentence(monkeypatch):
    def refuse(**_: object) -> None:
        raise ParameterTypeError("Flow run received invalid parameters:\n - recipe: Input should be 'demo'")

    with pytest.raises(InputError, match="recipe"):
        execute(SimpleNamespace(fn=refuse), None)


@pytest.mark.parametrize(("stopped", "said"), [(25.0, True), (5.0, False)])
def test_show_begins_with_time_in_which_training_stood_still_if_it_was_more_than_a_tenth(store, stopped, said):
    put(store, "pretrain", "d4", {"seconds_on_the_clock": 60.0, "stopped_seconds": stopped})
    shown = show("show", "pretrain/d4")
    assert ("Training stood still for 25 seconds" in shown.split("params")[0]) is said
    assert f'"stopped_seconds": {stopped}' in shown


def test_the_line_of_an_artifact_has_how_it_differs_and_no_digests():
    tasks = [("a", "1" * 64), ("b", "2" * 64)]
    made = [{"params": {"task": task, "data": {"train": [f"{digest}.csv"]}}, "inputs": {}} for task, digest in tasks]
    assert differences(made) == ["task=a", "task=b"]


def test_ls_and_show_list_artifacts_and_their_differences(store: Path):
    assert show("ls", "pretrain").startswith(f"No artifacts of pretrain in {store} ")
    for key, documents in (("a1", 0), ("b2", 50)):
        put(store, "download", key, {"documents": 300}, documents=documents, max_lost=1)
    put(store, "deduplicate", "c3", {})
    for key, difference in (("a1", "documents=0"), ("b2", "documents=50")):
        listed = show("ls")
        assert difference in listed.split(key)[1].split("download/")[0]
        assert "max_lost" not in listed, "the same in both"
    assert "deduplicate" not in show("ls", "download")
    for words in ("download/a1", "documents: 0", '"documents": 300'):
        assert words in show("show", "download/a")
    assert "corpus: download/b2" in show("show", "deduplicate")
    assert "'a1'" in refusal("show", "deduplicate/a1")


@pytest.mark.parametrize(
    ("content", "file"),
    [
        ("[" * 100_000, "stage.json"),
        ("", "stage.json"),
        ('{"files": [{"path": "gone.npy", "bytes": 1, "sha256": ""}], "stats": {}}', "gone.npy"),
    ],
)
def test_ls_lists_a_damaged_artifact_with_the_file_that_is_wrong(store: Path, content: str, file: str):
    put(store, "download", "a", {"documents": 1})
    (store / "download" / "bad").mkdir()
    (store / "download" / "bad" / "stage.json").write_text(content)
    shown = show("ls", "download").splitlines()
    assert [line for line in shown if "download/a" in line]
    [line] = [line for line in shown if "download/bad" in line]
    assert f": {file} " in line or f": its {file} " in line


def test_paths_with_brackets_are_printed_whole(store: Path, monkeypatch, capsys, tmp_path: Path):
    put(store, "download", "a", {"documents": 1})
    moved = store.rename(tmp_path / "a [red] place")
    monkeypatch.setenv("CRAM_ARTIFACTS", str(moved))
    print_results(Artifact(stage="download", key="a"))
    assert f"download: {moved}/download/a\n" in capsys.readouterr().out
    assert f"{moved}/download/a\n" in show("show", "download")
    assert f"in {moved} yet" in show("ls", "filter")


def test_show_has_the_numbers_of_each_source_in_the_table_alone(store: Path, tmp_path: Path, toy_texts: list[str]):
    made = filtered(corpus_of(tmp_path, toy_texts, source="prose"), max_tokens_per_char=0.5)
    shown = show("show", "filter")
    assert shown.count("prose") == 1
    for row in made.stats["table"]:
        assert [line for line in shown.splitlines() if line.split()[:2] == [row["source"], str(row["documents"])]]
    stats = json.loads(re.search(r"^\{$.*?^\}$", shown, re.MULTILINE | re.DOTALL)[0])
    assert stats["seen"] == {name: made.stats["seen"][name] for name in ("documents", "characters")}
    assert stats["quantiles"]["zstd_ratio"] == {"all": made.stats["quantiles"]["zstd_ratio"]["all"]}
    assert stats["measured_with"] == made.stats["measured_with"]
    assert f"{made.path}/stats.json" in shown


@pytest.mark.parametrize("width", [80, 200])
def test_ls_fits_the_terminal_and_has_each_result(store: Path, monkeypatch: pytest.MonkeyPatch, width: int):
    kept = {"documents": 45_095, "dropped": {"incompressible": {"documents": 5_394}}}
    for key, limit in (("0123456789ab", 0.3), ("123456789abc", 0.25)):
        put(store, "filter", key, kept, max_tokens_per_char=limit, sample_megabytes=limit * 100)
    for key, layers in (("23456789abcd", 12), ("3456789abcde", 16)):
        sizes = {"layers": layers, "hidden": 48 * layers, "heads": layers, "intermediate": 144 * layers}
        put(
            store,
            "pretrain",
            key,
            {"heldout_loss": 5.9, "heldout": {"nats_per_byte": {"value": 1.23456, "standard_error": 0.0123}}},
            architecture=sizes,
            budget=layers,
        )
    draft(store, "pretrain-456789abcdef")
    monkeypatch.setattr(common.console, "width", width)
    lines = show("ls").splitlines()
    assert max(len(line) for line in lines if str(store) not in line) <= width
    results = {"filter/0123456789ab": "45,095 of 50,489 documents", "pretrain/3456789abcde": "loss 1.2346"}
    for name, result in results.items():
        [line] = (line for line in lines if name in line)
        for words in (result, "  2 h  ", "  1.2 h  "):
            assert words in line
    assert "architecture.layers=16, architecture.hidden=768" in " ".join(" ".join(lines).split())


def test_ls_lists_drafts_and_which_are_in_progress(store: Path):
    for name in ("pretrain-0123456789ab", "finetune-123456789abc", "pretrain-23456789abcd", "tmpold"):
        draft(store, name)
    with lock_artifact(Artifact(stage="pretrain", key="23456789abcd")):
        listed = show("ls")
        only = show("ls", "finetune")
    found = [re.split("  +", line.rstrip()) for line in listed.splitlines() if "2.0 kB" in line]
    assert {name: state for name, _, _, *state in found} == {
        "finetune-123456789abc": [],
        "pretrain-0123456789ab": [],
        "pretrain-23456789abcd": ["in progress"],
        "tmpold": [],
    }
    assert "finetune-123456789abc" in only
    assert "pretrain-" not in only


def test_control_characters_of_an_artifact_do_not_reach_the_terminal(store: Path):
    evil = "\x1b[31m\x9b2J\u202e\ud800 name"
    stats = {"documents": 1, "table": [{"source": "all", "documents": 1}]}
    stats["table"][0] |= {"\x1b]0;a\x07": 2, "what": evil}
    for stage in ("filter", "download"):
        put(store, stage, "a", stats, files=[evil])
        put(store, stage, "b", stats, files=[evil, evil], **{"\x1b[1m": 1})
        (store / stage / "\x1b[2J").mkdir()
    draft(store, "filter-\x1b[2J")
    for arguments in (["ls"], ["show", "filter/a"], ["show", "filter/b"], ["diff", "download", "a", "b"]):
        shown = show(*arguments)
        assert "\\u001b[31m" in shown
        assert [c for c in shown if not c.isprintable() and c != "\n"] == []


def completed(*words: str) -> list[str]:
    """What bash offers for the last of these words."""
    env = {"_CRAM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["cram", *words]), "COMP_CWORD": str(len(words))}
    return CliRunner().invoke(app, [], env=env, prog_name="cram").stdout.split()


def test_recipes_and_stages_complete_and_are_named_in_the_help():
    assert completed("run", "")[: len(RECIPES)] == list(RECIPES), "recipe files come after them"
    assert completed("run", "dem") == ["demo"]
    for command in ("run", "study"):
        assert completed(command, "--set", "pretrain.architecture.l") == ["pretrain.architecture.layers="]
    for words in (["ls"], ["show"], ["diff"], ["run", "demo", "--until"], ["run", "demo", "--refresh"]):
        assert completed(*words, "") == list(STAGES)
        assert completed(*words, "fi") == ["filter", "finetune"]
        shown = show(words[0], "--help")
        for name in (*STAGES, *(RECIPES if words[0] == "run" else ())):
            assert re.search(rf"[ :]{name}[,.]", shown), name


def test_every_command_shows_its_help():
    for command in typer.main.get_command(app).commands:
        assert f"Usage: root {command} [OPTIONS]" in " ".join(show(command, "--help").split())


def test_version_names_what_cram_computes_with():
    told = dict(line.split(" ", 1) for line in show("--version").splitlines())
    assert {name: told[name] for name in ("torch", "prefect")} == {name: version(name) for name in ("torch", "prefect")}
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown", told["commit"])


def test_scores_with_and_without_pretraining_share_a_row_of_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(common.console, "width", 80)
    usual = {"task": "odd-word", "metric": "accuracy", "score": 70.0, "verdict": "", "no pretraining": "",
             "majority": 51.5, "share": 1.0, "seeds": 5, "partial data": False}  # fmt: skip
    weak = usual | {"task": "word-order", "score": 48.0, "verdict": "≤ majority", "no pretraining": 49.0}
    common.print_rows([weak, usual])
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-2:]] == [
        ["word-order", "accuracy", "48.0", "≤", "majority", "49.0", "51.5", "5"],
        ["odd-word", "accuracy", "70.0", "51.5", "5"],
    ]


def test_show_has_the_first_of_many_sources_and_says_how_many_more(store: Path, tmp_path: Path):
    for i in range(60):
        (tmp_path / f"letter {i:02d} of a client.txt").write_text(f"This is letter {i}.")
    downloaded(*tmp_path.glob("*.txt"))
    shown = show("show", "download")
    assert "20 more" in shown
    assert len(shown.splitlines()) < 300
