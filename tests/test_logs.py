"""What a run shows: its log on a terminal and in a pipe, its page in Prefect, and summaries of its artifacts."""

import io
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from markdown_it import MarkdownIt
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from rich.console import Console
from tqdm import tqdm

from flows import logs
from flows.summary import counts
from model.errors import InputError
from model.wording import age, brief_duration, printable
from tasks.store.artifacts import Artifact

SCORES = {"task": "RTE", "metric": "accuracy", "score": 54.4, "verdict": "", "no pretraining": "", "majority": 52.7,
          "share": 1.0, "seeds": 5, "partial data": False}  # fmt: skip


# Log


@pytest.fixture(params=[False, True], ids=["pipe", "terminal"])
def log(request: pytest.FixtureRequest) -> logs.TerminalLog:
    """A log that writes to a buffer, which may be a terminal."""
    handler = logs.TerminalLog()
    screen = io.StringIO()
    handler.console = Console(file=screen, force_terminal=request.param, soft_wrap=True, color_system=None)
    return handler


def write(log: logs.TerminalLog, name: str, level: int, message: str, **about: object) -> None:
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    record.__dict__.update(about)
    log.handle(record)


def screen(log: logs.TerminalLog) -> list[str]:
    """The lines as they stay on the screen, without times."""
    lines = [line.split("\x1b[2K")[-1] for line in log.console.file.getvalue().split("\n")]
    return [line[len("00:00:00 ") :] if line[:2].isdecimal() else line for line in lines]


def test_the_running_stage_stays_below_the_lines_of_a_terminal(log: logs.TerminalLog):
    log.show_running("filter")
    write(log, "tasks.filter", logging.WARNING, "\x1b[31m is escaped")
    below = "filter …" if log.console.is_terminal else ""
    assert screen(log) == ["\\u001b[31m is escaped", below]
    log.show_running("")
    write(log, "flows.plan", logging.INFO, "filter: 3 documents")
    assert screen(log)[1:] == ["filter: 3 documents", ""]


def test_a_long_title_of_the_running_stage_stays_on_its_line(log: logs.TerminalLog):
    log.console.width = 30
    log.show_running("finetune sst-2 [from scratch, seed 0]")
    assert screen(log) == (["finetune sst-…atch, seed 0] …"] if log.console.is_terminal else [""])
    assert len(screen(log)[0]) < log.console.width


def test_a_line_is_written_above_a_bar(log: logs.TerminalLog):
    with tqdm(total=4, file=log.console.file, leave=False, mininterval=0) as bar:
        write(log, "tasks.filter", logging.WARNING, "none of it")
        bar.update()
    assert "1/4" in log.console.file.getvalue().split("none of it\n")[1]


@pytest.mark.parametrize(
    ("name", "level", "message", "about", "shown"),
    [
        ("flows.plan", logging.INFO, "a result", {}, True),
        ("prefect.flow_runs", logging.INFO, "Beginning flow run", {}, False),
        ("prefect.task_runs", logging.ERROR, "a bug", {}, True),
        ("prefect.task_runs", logging.ERROR, "Finished in state Failed()", {}, False),
        ("prefect.flow_runs", logging.ERROR, "Crash detected! Execution was aborted", {}, False),
        ("prefect.flow_runs", logging.ERROR, "gone.jsonl matches nothing", {"input_error": True}, False),
    ],
)
def test_results_warnings_and_bugs_are_shown(log: logs.TerminalLog, name, level, message, about, shown: bool):
    write(log, name, level, message, **about)
    assert bool(screen(log)[:-1]) == shown
    assert (message in log.console.file.getvalue()) == shown


def failed(error: Exception, cause: Exception | None = None) -> logging.LogRecord:
    """What Prefect logs of a flow that ended with this error."""
    error.__cause__ = cause
    return logging.LogRecord("prefect.flow_runs", logging.ERROR, "", 0, "failed", (), (type(error), error, None))


def test_an_error_of_the_user_is_logged_once_without_its_traceback():
    error = InputError("no such file")
    records = [failed(error), failed(error)]
    assert [logs.OneSentence().filter(record) for record in records] == [True, False]
    assert (records[0].getMessage(), records[0].exc_info) == ("no such file", None)


@pytest.mark.parametrize("wrapped", [False, True], ids=["httpx's own", "wrapped by Prefect"])
def test_a_lost_server_leaves_no_traceback(log: logs.TerminalLog, wrapped: bool):
    lost = httpx.ConnectError("Connection refused")
    record = failed(ConcurrencySlotAcquisitionError("no slots"), cause=lost) if wrapped else failed(lost)
    assert logs.OneSentence().filter(record)
    assert record.getMessage().startswith("The Prefect server was lost: C")
    log.handle(record)
    assert (record.exc_info, log.console.file.getvalue()) == (None, ""), "the command says it last"


def test_a_terminal_shows_no_errors_of_logging_for_lines_that_a_lost_server_does_not_take(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.log_to_terminal()
    assert not logging.raiseExceptions


def test_a_bug_that_an_error_of_another_connection_caused_keeps_its_traceback():
    record = failed(RuntimeError("a bug"), cause=httpx.ConnectError("of the hub"))
    assert logs.OneSentence().filter(record)
    assert (record.exc_info[1].args, record.getMessage()) == (("a bug",), "failed")


# Page


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple]:
    """The contents and descriptions of the Prefect artifacts that are created, by key."""
    created = {}

    def create(content: object, key: str, description: str) -> None:
        created[key] = content, description

    for kind in ("table", "image", "markdown"):
        monkeypatch.setattr(logs, f"create_{kind}_artifact", create)
    return created


def put(store: Path, stage: str, rows: list[dict], **files: str) -> Artifact:
    """An artifact with this table and these files, by name without extension."""
    folder = store / stage / "0123"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    (folder / "stage.json").write_text(json.dumps({"files": [], "stats": {"table": rows}}))
    return Artifact(stage=stage, key="0123")


def test_a_table_is_text_with_separated_thousands_and_without_usual_columns(store: Path, shown: dict):
    logs.show_in_prefect(put(store, "report", [SCORES, SCORES | {"seeds": 1000, "no pretraining": 50.0}]), "")
    usual = {"task": "RTE", "metric": "accuracy", "score": "54.4", "majority": "52.7"}
    assert shown["report-table"][0] == [
        usual | {"no pretraining": "", "seeds": "5"}, usual | {"no pretraining": "50.0", "seeds": "1,000"}
    ]  # fmt: skip
    row = {"source": "all", "documents": 8_000_000, "kept": None, "longer than 1 MB": 0, "kept, % of documents": 91.1}
    logs.show_in_prefect(put(store, "filter", [row]), "")
    kept = {"source": "all", "documents": "8,000,000", "kept": "–", "kept, % of documents": "91.1"}
    assert shown["filter-table"][0] == [kept]


@pytest.mark.parametrize(
    "text", ["![x](http://a.org/a.png)", "<img src=http://a.org/a.png>", "[x](javascript:alert(1))"]
)
def test_a_cell_with_text_from_data_is_neither_a_picture_nor_a_link_nor_html(text: str):
    [block] = MarkdownIt("commonmark").parseInline(logs.cell(text))
    assert {part.type for part in block.children} <= {"text", "text_special"}
    assert "".join(part.content for part in block.children) == text
    for usual in ("Pile-CC", "Books & Papers", "C#", "snake_case", "≤ 1 %"):
        assert logs.cell(usual) == usual


def test_every_table_picture_and_text_says_what_it_shows_and_where_it_comes_from(store: Path, shown: dict):
    head = '---\ntags: ["cram"]\nmask_token: "[MASK]"\n---\n\n'
    for stage in ("pretrain", "report"):
        texts = {"README_md": f"{head}# Encoder\n\n---\n", f"{stage}_md": "# Page\n\n---\n"}
        logs.show_in_prefect(put(store, stage, [{"a": 1}], histogram_png="x", loss_png="x", **texts), "What it makes.")
    names = ("", "-table", "-histogram", "-loss", "-readme")
    assert {key: description for key, (_, description) in shown.items()} == {
        f"{stage}{name}": f"What it makes. Details: cram show {stage}/0123"
        for stage in ("pretrain", "report") for name in names
    }  # fmt: skip
    assert shown["pretrain-readme"][0] == "# Encoder\n\n---\n", "without the head, which is for the hub"
    assert shown["report"][0] == "# Page\n\n---\n"
    assert shown["pretrain-loss"][0] == "data:image/png;base64,eA=="


def test_a_card_that_is_no_text_and_a_picture_that_is_gone_stop_no_run(store: Path, shown: dict):
    model = put(store, "pretrain", [{"a": 1}], loss_png="x")
    (model.path / "README.md").write_bytes(b"edited: caf\xe9")
    (model.path / "other.png").symlink_to("nowhere")
    (model.path / "notes.md").mkdir()
    logs.show_in_prefect(model, "")
    assert set(shown) == {"pretrain-table", "pretrain-loss", "pretrain-readme"}
    assert shown["pretrain-readme"][0].startswith("edited: caf")


def test_the_cards_of_many_finetuned_models_are_not_shown(store: Path, shown: dict):
    logs.show_in_prefect(put(store, "finetune", [], README_md="# Model"), "")
    assert not shown


# Summaries


def split(score: float, low: float) -> dict:
    return {"metrics": {"accuracy": score}, "intervals": {"accuracy": [low, 99.0]}, "majority": {"accuracy": 50.0}}


def scored(*tasks: str) -> list[dict]:
    return [{"task": task, "score": 50.0, "share": share, "verdict": ""} for task in tasks for share in (1.0, 0.1)]


MNLI = {"task": "mnli", "metric": "accuracy", "validation": {"m": split(81.24, 80.0), "mm": split(82, 80.0)}}


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        ({"documents": 1}, "1 document"),
        ({"documents": 5, "lost": {"empty text": 2, "not UTF-8": 1}}, "5 documents, 3 lost"),
        ({"documents": 1, "dropped": {}}, "1 of 1 document kept"),
        ({"documents": 9000, "checked": False, "dropped": {}}, "9,000 documents, unchecked"),
        ({"heldout_loss": 5.9, "heldout": {"nats_per_byte": {"value": 1.23456}}}, "held-out loss 1.2346 nats per byte"),
        (
            {"heldout_loss": 5.9, "heldout": {"nats_per_byte": {"value": 1.23456, "standard_error": 0.01239}}},
            "held-out loss 1.2346 ± 0.0124 nats per byte",
        ),
        ({"nats_per_byte": {"value": 1.2, "standard_error": None}}, "1.2000 nats per byte"),
        (MNLI, "mnli 81.2 / 82.0 accuracy"),
        (MNLI | {"task": "rte", "validation": {"validation": split(53.0, 50.0)}}, "rte 53.0 accuracy (≤ majority)"),
        (MNLI | {"task": "rte", "validation": {"validation": split(53.0, 50.1)}}, "rte 53.0 accuracy"),
        ({"average": 78.26, "table": []}, "GLUE average 78.3"),
        ({"average": None, "table": scored("a", "b", "c", "d")}, "a 50.0, b 50.0, c 50.0 and 1 more"),
    ],
)
def test_the_most_telling_number_is_chosen_by_what_was_counted(stats: dict, said: str):
    assert counts(stats) == said


@pytest.mark.parametrize(
    "stats",
    [{}, {"new": 1}, {"documents": "many"}, {"validation": 3}, {"average": None, "table": [{}]}, {"dropped": []}],
)
def test_statistics_of_other_versions_are_no_error(stats: dict):
    assert counts(stats) == ""


@pytest.mark.parametrize("text", ["\x1b[31m", "\x07", "\x9b31m", "\r", "\x7f", "\u202e", "\u2028", "\ud800", "a\nb"])
def test_control_characters_are_escaped(text: str):
    shown = printable(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert printable("caf\u00e9 \u4e2d\n", lines=True) == "caf\u00e9 \u4e2d\n"


def age_after(**since: float) -> str:
    return age((datetime.now(UTC) - timedelta(**since)).isoformat())


@pytest.mark.parametrize(
    ("told", "values"),
    [
        (brief_duration, {0.04: "0.0 s", 12.84: "12.8 s", 68: "1.1 min", 86_400: "24.0 h"}),
        (age, {"no date": "", "2026-11-22T07:00:00": ""}),
        (lambda minutes: age_after(minutes=minutes), {0.1: "0 min", 59: "59 min", -1440: "0 min"}),
        (lambda hours: age_after(hours=hours), {47: "47 h", 72: "3 days"}),
    ],
)
def test_quantities_are_in_units_that_suit_them(told: Callable[[object], str], values: dict):
    assert {value: told(value) for value in values} == values
