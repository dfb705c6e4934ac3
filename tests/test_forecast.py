"""What a run would do, by `--plan`: states, times and disk by stage, exit statuses; and that nothing is done."""

import gc
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from conftest import tiny_override, write_jsonl
from rich.console import Console
from typer.testing import CliRunner

from flows import cram, disk, forecast, logs
from flows.cli import common, execution
from flows.cli.main import app
from flows.execute import execute
from flows.forecast import Forecast, Row
from flows.recipes.recipe import RECIPES
from model import memory
from model.bert import Bert, with_detector
from model.errors import InputError
from tasks import adopt
from tasks.stage import environment
from tasks.store.artifacts import Artifact, draft_of, find
from tasks.store.locks import lock_artifact
from tasks.store.manifests import MANIFEST

TEXT = ("download", "deduplicate", "decontaminate", "measure", "filter")  # stages that the first file's plan ends with


HOUR = 3600 + 180  # seconds of a budget of an hour, with what is measured off the clock


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """Undo what the command sets for its process."""
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def shard(tmp_path: Path, toy_texts: list[str]) -> Path:
    """A file of text."""
    return write_jsonl(tmp_path / "toy.jsonl", toy_texts)


def planned(override: dict, until: str = "report", use: dict | None = None, refresh: list | None = None) -> Forecast:
    """The forecast of the tiny demo."""
    return cram.forecast_run(recipe="demo", override=override, until=until, use=use or {}, refresh=refresh or [])


def rows(found: Forecast) -> dict[str, Row]:
    return {row.stage: row for row in found.rows}


def made(override: dict, until: str) -> list[Artifact]:
    """The artifacts of a run, made."""
    plan = cram.checked_plan("demo", override, until, {}, [])
    execute(plan)
    assert not plan.problems
    return [step.artifact for step in plan.steps]


def command(override: dict, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", "demo", "--override", json.dumps(override), "--plan", *arguments])


def change(artifact: Artifact, **fields: object) -> None:
    """Change a manifest."""
    path = artifact.path / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def put(stage: str, key: str, **about: object) -> Artifact:
    """An artifact of this machine without files."""
    usual = {"files": [], "inputs": {}, "params": {}, "stats": {}, "seconds": 9, "finished": "2026", "made_from": {}}
    made = Artifact(stage=stage, key=key)
    made.path.mkdir(parents=True)
    (made.path / MANIFEST).write_text(json.dumps(usual | {"environment": environment()} | about))
    return made


def test_a_plan_names_every_stage_of_an_empty_store_exits_with_3_and_makes_nothing(store: Path, shard: Path):
    done = command(tiny_override(shard))
    assert done.exit_code == 3
    for words in (*TEXT, "finetune neighbours-0", "report", "10 of 10 stages would run: about 1.1 minutes and 9 st"):
        assert words in done.stdout
    assert not store.exists()


def test_what_is_made_is_cached_and_the_rest_takes_what_as_much_text_took(store: Path, shard: Path, tmp_path: Path):
    override = tiny_override(shard)
    artifacts = made(override, "filter")
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert command(override, "--until", "filter").exit_code == 0
    assert command(override).exit_code == 3
    found = rows(planned(override, "filter"))
    assert {row.state for row in found.values()} == {"cached"}
    for artifact in artifacts:
        files = sum(file["bytes"] for file in artifact.manifest["files"])
        assert found[artifact.stage] == Row(artifact.stage, artifact.key, "cached", files)
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(2 * shard.read_bytes())
    size = {file["path"]: file["bytes"] for file in artifacts[0].manifest["files"]}["part-00000.parquet"]
    for artifact in artifacts:
        change(artifact, seconds=10.0)
    of_more = rows(planned(tiny_override(twice), "filter"))
    assert {row.state for row in of_more.values()} == {"to do"}
    assert of_more["download"].seconds == pytest.approx(20, rel=0.2), "of the text in JSON"
    for stage in TEXT[1:]:
        assert of_more[stage].seconds == pytest.approx(10 * twice.stat().st_size / (size / 0.38))
    change(artifacts[1], resumed=True)
    assert rows(planned(tiny_override(twice), "filter"))[TEXT[1]].seconds is None, "only a last attempt is known"
    change(artifacts[3], environment={"machine": "another"})
    assert rows(planned(tiny_override(twice), "filter"))["measure"].seconds is None
    again = rows(planned(override, "filter", refresh=["measure"]))
    assert [again[stage].state for stage in TEXT] == ["cached"] * 3 + ["to do again"] * 2
    of_given = rows(planned(override, "filter", use={"decontaminate": "latest"}))
    assert [row.state for row in of_given.values()] == ["given", "cached", "cached"]
    assert {path: path.stat().st_mtime_ns for path in before} == before | {
        artifact.path / MANIFEST: (artifact.path / MANIFEST).stat().st_mtime_ns for artifact in artifacts
    }


def test_damage_and_junk_in_the_store_are_no_obstacle(store: Path, shard: Path):
    override = tiny_override(shard)
    *_, measures, kept = made(override, "filter")
    os.truncate(measures.path / "measured-00000.parquet", 99)
    for number, content in enumerate(("[]", "", "[" * 100_000, '{"environment": {"machine": 3}}', "{}")):
        for stage in (*TEXT, "tokenize", "pretrain", "finetune", "report"):
            (put(stage, f"{number}").path / MANIFEST).write_text(content)
    for stage, odd in (("tokenize", {"params": []}), ("measure", {"inputs": None}), ("download", {"stats": 3})):
        put(stage, "odd", **odd)
    put("download", "words", stats={"bytes": "many"})
    put("pretrain", "x", stats={"adopted": True})
    found = rows(planned(override))
    assert [found[stage].state for stage in TEXT] == ["cached"] * 3 + ["to do", "cached"]
    change(kept, hollow=["part-00000.parquet"])
    hollow = rows(planned(override))
    assert hollow["filter"].there < found["filter"].there
    assert hollow["tokenize"].disk == found["tokenize"].disk, "the size of the part is in the manifest"


def test_a_draft_is_resumed_unless_it_is_refreshed_and_takes_the_rest_of_the_time(store: Path, shard: Path):
    override = tiny_override(shard, budget=1, budget_unit="hours")
    plan = cram.plan_run("demo", override, "pretrain", {}, [])
    plan.check(thoroughly=False)
    drafts = {step.stage: draft_of(step.artifact) for step in plan.steps}
    for stage in ("pretrain", "download", "decontaminate"):
        (drafts[stage] / "work").mkdir(parents=True)
    row = '{"seconds": 900.0}\n'
    (drafts["pretrain"] / "work" / "metrics.jsonl").write_text(f'{row}{row}{{"seconds": 9')
    found = rows(planned(override, "pretrain"))
    assert {stage: found[stage].state for stage in drafts} == dict.fromkeys(drafts, "to do") | dict.fromkeys(
        ("pretrain", "download", "decontaminate"), "resumable"
    )
    assert found["pretrain"].seconds == HOUR - 900
    refreshed = rows(planned(override, "pretrain", refresh=["pretrain"]))["pretrain"]
    assert (refreshed.state, refreshed.seconds) == ("to do", HOUR)
    (drafts["pretrain"] / "work" / "metrics.jsonl").write_text("\0\0\n")
    assert rows(planned(override, "pretrain"))["pretrain"].seconds == HOUR
    artifact = next(step.artifact for step in plan.steps if step.stage == "pretrain")
    with lock_artifact(artifact):
        assert rows(planned(override, "pretrain"))["pretrain"].state == "in progress"


def test_models_take_the_time_of_earlier_ones_of_their_architecture(store: Path, shard: Path):
    override = tiny_override(shard, budget=3000, budget_unit="tokens")
    assert rows(planned(override))["pretrain"].seconds is None
    plan = cram.plan_run("demo", override, "report", {}, [])
    bert, run = (next(step for step in plan.steps if step.stage == stage) for stage in ("pretrain", "finetune"))
    stats = {"tokens": 1000, "exaflops": 1e-6, "seconds_on_the_clock": 50}
    stood_still = stats | {"stopped_seconds": 900, "machine": {"device": "CPU, 64 threads", "gpus": 1}}
    elsewhere = stats | {"seconds_on_the_clock": 1, "machine": {"device": "NVIDIA H200", "gpus": 1}}
    put("pretrain", "f", params=bert.params.identity() | {"budget": 1000}, stats=elsewhere, finished="2027")
    put("pretrain", "a", params=bert.params.identity() | {"budget": 1000}, stats=stood_still, seconds=970)
    put("pretrain", "b", params=bert.params.identity() | {"architecture": {}}, stats=stats, seconds=7)
    half = run.params.identity() | {"epochs": 3}
    for key, params in (("c", half), ("d", half | {"task": "odd-word"}), ("e", half)):
        put("finetune", key, params=params, inputs={"start": "pretrain/b" if key == "e" else "pretrain/a"}, seconds=6)
    on_a_gpu = {"stats": elsewhere, "inputs": {"start": "pretrain/a"}, "finished": "2027"}
    put("finetune", "g", params=half, seconds=1, **on_a_gpu)
    found = rows(planned(override))
    assert found["pretrain"].seconds == 3 * 50, "the clock stands during interruptions and the loss on held-out text"
    assert found["finetune neighbours-0"].seconds == 2
    of_flops = tiny_override(shard, budget=2e12, budget_unit="flops")
    assert rows(planned(of_flops))["pretrain"].seconds == 2 * 50
    of_hours = tiny_override(shard, budget=1, budget_unit="hours")
    assert rows(planned(of_hours))["pretrain"].seconds == HOUR
    of_epochs = tiny_override(shard, budget=2, budget_unit="epochs")
    of_characters = shard.stat().st_size * disk.TOKENS / disk.NARROW
    assert rows(planned(of_epochs))["pretrain"].seconds == pytest.approx(50 * 2 * of_characters / 1000)
    wider = tiny_override(shard, budget=3000, budget_unit="tokens")
    wider["pretrain"]["architecture"] |= {"hidden": 64}
    assert [rows(planned(wider))[stage].seconds for stage in ("pretrain", "finetune neighbours-0")] == [None, None]


def test_a_budget_in_hours_takes_what_an_uninterrupted_run_with_the_same_one_took(store: Path, shard: Path):
    override = tiny_override(shard, budget=1, budget_unit="hours")
    plan = cram.plan_run("demo", override, "pretrain", {}, [])
    same = plan.steps[-1].params.identity()
    on_the_clock = {"seconds_on_the_clock": 3600}
    others = {"longer": same | {"budget": 2}, "other": same | {"architecture": {}}, "resumed": same}
    for key, params in others.items():
        put("pretrain", key, params=params, stats=on_the_clock, seconds=100 if key == "resumed" else 9000)
    assert rows(planned(override, "pretrain"))["pretrain"].seconds == HOUR
    put("pretrain", "same", params=same, stats=on_the_clock, seconds=3700)
    assert rows(planned(override, "pretrain"))["pretrain"].seconds == 3700


def announced(caplog: pytest.LogCaptureFixture, override: dict, until: str, use: dict) -> str:
    """The first line of a run's log."""
    caplog.clear()
    cram.checked_plan("demo", override, until, use, [])
    return caplog.messages[0]


def test_the_first_line_of_a_run_tells_what_is_to_do_and_how_long_it_takes(store: Path, shard: Path, caplog):
    caplog.set_level(logging.INFO)
    override = tiny_override(shard, budget=0.05, budget_unit="hours")
    made(override, "filter")
    assert announced(caplog, override, "filter", {}) == "demo: 5 stages, all cached."
    new = announced(caplog, override, "pretrain", {})
    assert new == (
        "demo: 8 stages, 3 to do; pretraining for 3 minutes; about 3.3 minutes and 2 stages of unknown time "
        "(nothing comparable has run here before)."
    )
    for artifact in made(override, "tokenize")[-2:]:
        change(artifact, seconds=60)
    smaller = tiny_override(shard, budget=0.05, budget_unit="hours")
    smaller["vocabulary"] = {"entries": 300}
    known = announced(caplog, smaller, "pretrain", {})
    assert known == "demo: 8 stages, 3 to do; pretraining for 3 minutes; about 5.3 minutes in all."
    given = announced(caplog, smaller, "vocabulary", {"filter": "latest"})
    assert given == "demo: 1 stage, all to do; about 1 minute in all."
    smaller["vocabulary"] = {"entries": 300, "characters": "unicode"}
    change(find("vocabulary"), environment={"machine": "another"})
    of_another = announced(caplog, smaller, "vocabulary", {"filter": "latest"})
    assert of_another == ("demo: 1 stage, all to do; for an unknown time, as nothing comparable has run here before.")


def test_what_tasks_say_while_a_run_is_planned_comes_after_its_first_line(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)

    def plan() -> None:
        with logs.lines_later():
            logging.getLogger("tasks.glue").info("read")
            logging.getLogger("flows.cram").info("first")
            raise InputError("no such file")

    with pytest.raises(InputError):
        plan()
    logging.getLogger("tasks.glue").info("later")
    assert caplog.messages == ["first", "read", "later"]


def test_titles_are_shortened_in_a_narrow_terminal_and_keys_left_out(monkeypatch: pytest.MonkeyPatch, capsys):
    title = "finetune sst2-0 [corrupted tokens detected, seed 0]"
    cells = [Row(title, "0123456789ab", "to do", seconds=None).cells(), Row("report", "ab", "cached").cells()]
    shown = {}
    for width in (200, 80, 50):
        monkeypatch.setattr(execution, "console", Console(width=width))
        monkeypatch.setattr(common, "console", execution.console)
        execution.print_forecast(cells)
        shown[width] = capsys.readouterr().out.splitlines()
    for width, lines in shown.items():
        assert len(lines) == len(cells) + (1 if width > len(title) + 40 else 2), "no line is broken"
        assert max(map(len, lines)) <= width
    assert title in shown[200][1]
    assert "0123456789ab" in shown[200][1]
    assert "0123456789ab" not in "".join(shown[50])
    assert shown[50][1].startswith("finetune sst2-0")
    assert "seed 0]" in shown[50][1]


def test_what_is_not_possible_is_told_and_the_run_would_end_with_it(store: Path, shard: Path):
    done = command(tiny_override(shard) | {"decontaminate": {"data": "/nowhere"}})
    assert isinstance(done.exception, InputError)
    assert "/nowhere" in str(done.exception)
    assert done.stdout.count("not possible") == 8
    assert "2 of 10 stages would run" in done.stdout
    assert "/nowhere" not in done.stdout
    assert not store.exists()


def test_a_hollow_model_to_use_or_to_go_on_from_is_told(store: Path, shard: Path):
    hollow = put("pretrain", "a", hollow=["model.safetensors"])
    with pytest.raises(InputError, match="pretrain/a is hollow"):
        planned(tiny_override(shard), use={"pretrain": "a"})
    with pytest.raises(InputError, match="pretrain/a is hollow"):
        adopt.digest_of_files(hollow.name, adopt.WEIGHTS)  # in the key of what goes on from it


def test_a_run_that_does_not_fit_on_the_disk_is_told_below_the_table(store: Path, shard: Path, monkeypatch):
    monkeypatch.setattr(forecast.disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    done = command(tiny_override(shard))
    assert "needs about" in str(done.exception)
    assert "finetune" in done.stdout


def test_the_size_of_a_model_is_counted_without_its_values():
    for recipe in (recipe for name, recipe in RECIPES.items() if "pocket" in name):
        training = recipe.pretrain
        model = with_detector(Bert(training.architecture, 512, 32), training)
        counted, _ = memory.sizes(training.architecture, training, 512, 32)
        assert counted == 4 * sum(p.numel() for p in model.parameters())
    huge = training.architecture.model_copy(update={"layers": 100, "hidden": 64_000})
    assert memory.sizes(huge, training, 512, 32)[0] > 1e12
