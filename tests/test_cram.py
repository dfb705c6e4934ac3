"""The whole flow, through a real Prefect server."""

import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import tiny_override, write_jsonl
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.testing.utilities import prefect_test_harness

from flows.cram import cram, planned
from flows.plan import Plan
from flows.recipes import STAGES
from model import InputError
from tasks.corpus.parts import documents_of
from tasks.store import ROOT, Artifact, artifacts, find
from tasks.workers import finetunes


@pytest.fixture(scope="module", autouse=True)
def _server():
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, toy_texts: list[str]) -> dict:
    """An override that makes the demo recipe a matter of seconds."""
    shard = write_jsonl(tmp_path_factory.mktemp("text") / "toy.jsonl", toy_texts)
    override = tiny_override(shard, budget=20_000, budget_unit="tokens")
    override["download"]["part_megabytes"] = 0.03
    return override


def run(override: dict, **parameters) -> tuple[dict[str, str], str]:
    """Run the flow; the final state of each stage on Prefect's server, and the flow run's id."""
    with patch.object(Plan, "settle", autospec=True, side_effect=Plan.settle) as settled:
        state = cram(recipe="demo", override=override, return_state=True, **parameters)
    flow_run = state.state_details.flow_run_id
    if state.is_failed():
        state.result()
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 30
        while True:  # states reach the server as events, a little later
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run]}))
            all_there = len(found) >= settled.call_count and all(r.state and r.state.is_final() for r in found)
            if (found and all_there) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    return {r.name.split("-")[0]: r.state.name for r in found}, str(flow_run)


@pytest.fixture(scope="module")
def first(tiny: dict) -> tuple[dict[str, str], str]:
    return run(tiny)


def test_every_stage_runs_once_and_is_then_cached(tiny: dict, first):
    assert first[0] == dict.fromkeys(STAGES, "Completed")
    again, _ = run(tiny)
    assert again == dict.fromkeys(STAGES, "Cached")


def test_nothing_in_a_copied_artifact_is_executed(tiny: dict, first, tmp_path: Path):
    import base64
    import pickle

    class Payload:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "executed"),)

    data = base64.encodebytes(pickle.dumps(Payload())).decode()
    record = {"metadata": {"serializer": {"type": "pickle"}, "prefect_version": "3.8.8"}, "result": data}
    for stage in STAGES:
        (find(stage, "latest").path / "prefect.json").write_text(json.dumps(record))
    assert run(tiny)[0] == dict.fromkeys(STAGES, "Cached")
    assert not (tmp_path / "executed").exists()


def test_no_file_of_an_artifact_names_the_store(first):
    files = [p for p in ROOT.rglob("*") if p.is_file() and p.suffix in (".json", ".md")]
    assert files
    assert not [p for p in files if str(ROOT) in p.read_text()]


def test_the_page_of_a_run_shows_tables_pictures_and_texts_also_of_cached_stages(tiny: dict, first):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    for _, flow_run in (first, run(tiny)):
        with get_client(sync_client=True) as client:
            shown = client.read_artifacts(
                artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
            )
        by_key = {a.key: a for a in shown}
        tables, files = {"decontaminate-table", "filter-table", "scores"}, {"filter-histogram", "pretrain-loss"}
        assert tables | files | {"pretrain-readme", "report"} <= set(by_key)
        rows = json.loads(by_key["filter-table"].data)
        assert rows[0]["documents"] == f"{find('filter', 'latest').stats['seen']['documents']:,}"
        assert by_key["pretrain-readme"].data.startswith("# ")


def test_each_stage_ends_with_a_line_of_its_result(tiny: dict, first, caplog):
    changed = tiny | {"filter": tiny["filter"] | {"max_tokens_per_char": 0.44}}
    run(changed, until="filter")
    lines = [r.getMessage() for r in caplog.records if r.name == "flows.plan" and r.levelname == "INFO"]
    assert [line.split(":")[0] for line in lines] == list(STAGES[: STAGES.index("filter") + 1])
    assert all(line.split(": ")[1].startswith("cached, ") for line in lines[:-1])
    made = find("filter", "latest")
    seen, took = made.stats["seen"]["documents"], made.manifest["seconds"]
    assert lines[-1] == f"filter: {made.stats['documents']} of {seen} documents kept, {took:.1f} s, {made.path}"


def test_an_override_reruns_its_stage_and_what_follows_and_nothing_before(tiny: dict, first):
    changed = tiny | {"filter": tiny["filter"] | {"max_tokens_per_char": 0.45}}
    states, _ = run(changed)
    before = STAGES.index("filter")
    assert states == dict.fromkeys(STAGES[:before], "Cached") | dict.fromkeys(STAGES[before:], "Completed")
    assert set(run(tiny)[0].values()) == {"Cached"}


@pytest.mark.parametrize(
    ("stage", "harm"), [("filter", "truncate"), ("vocabulary", "delete"), ("pretrain", "truncate")]
)
def test_a_damaged_artifact_is_made_again_alone(tiny: dict, first, stage: str, harm: str):
    run(tiny, refresh=["report"])
    names = json.loads((find("report", "latest").path / "report.json").read_text())["artifacts"]
    folder = ROOT / next(name for name in names if name.startswith(stage))
    file = max((p for p in folder.iterdir() if p.name != "stage.json"), key=lambda p: p.stat().st_size)
    if harm == "truncate":
        file.write_bytes(file.read_bytes()[:100])
    else:
        file.unlink()
    states, _ = run(tiny)
    assert states == dict.fromkeys(STAGES, "Cached") | {stage: "Completed"}
    assert file.stat().st_size > 100


@pytest.mark.parametrize(
    ("until", "stage", "again"),
    [
        ("vocabulary", "vocabulary", ["vocabulary"]),
        ("report", "tokenize", ["tokenize", "pretrain", "finetune", "report"]),
    ],
)
def test_a_refreshed_stage_and_all_that_depends_on_it_run_again_until_the_last(tiny, first, until, stage, again):
    states, _ = run(tiny, until=until, refresh=[stage])
    assert states == dict.fromkeys(STAGES[: STAGES.index(until) + 1], "Cached") | dict.fromkeys(again, "Completed")


def test_a_retrained_model_is_finetuned_again_in_a_later_run(tiny: dict, first, monkeypatch):
    monkeypatch.setenv("CRAM_DTYPE", "bf16")  # other weights under the same key
    run(tiny, until="pretrain", refresh=["pretrain"])
    states, _ = run(tiny)
    assert states == dict.fromkeys(STAGES, "Cached") | dict.fromkeys(("finetune", "report"), "Completed")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("CRAM_DTYPE", "bf61", "CRAM_DTYPE is 'bf61'"),
        ("CRAM_GPUS", "3", "batch_size 8 can't be shared by 3 processes"),
        ("CRAM_WORKERS", "none", "CRAM_WORKERS is 'none'"),
    ],
)
def test_a_bad_setting_of_the_machine_is_refused_before_a_model_is_discarded(
    tiny, first, monkeypatch, name, value, words
):
    made = {artifact: artifact.manifest for artifact in artifacts("pretrain")}
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        planned("demo", tiny, "report", {}, ["pretrain"]).run()
    assert {artifact: artifact.manifest for artifact in artifacts("pretrain")} == made


def test_a_warning_names_overridden_stages_that_the_run_does_not_reach(tiny: dict, caplog):
    plan = planned("demo", tiny, "filter", {}, [])
    plan.warn_of_unused({"finetune": {"data": "elsewhere"}})
    assert not caplog.messages, "decontaminate reads this field"
    plan.warn_of_unused({"filter": {}, "finetune": {"epochs": 3}, "pretrain": {}})
    [warning] = caplog.messages
    assert "finetune, pretrain;" in warning


@pytest.mark.parametrize(("stage", "following"), [("pretrain", {"finetune", "report"}), ("finetune", {"report"})])
def test_a_given_artifact_makes_the_stages_before_it_needless(tiny, first, tmp_path: Path, stage: str, following: set):
    missing = tiny | {"download": {"source": "files", "files": [str(tmp_path / "gone.jsonl")]}}
    assert set(run(missing, use={stage: artifacts(stage)[0].key})[0]) == following


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"use": {"filter": "nothing"}}, "No complete artifact of filter is 'nothing'"),
        ({"use": {"tokenize": "latest"}, "until": "filter"}, "use names tokenize"),
        ({"refresh": ["pretrain"], "until": "filter"}, "refresh names pretrain"),
        ({"use": {"filter": "latest"}, "refresh": ["filter"]}, "both"),
        ({"override": {"download": {"source": "files", "files": ["gone.jsonl"]}}}, "gone.jsonl"),
        ({"override": {"finetune": {"data": "tests", "tasks": ["cola"], "max_tokens": 32}}}, "tests"),
    ],
)
def test_errors_in_parameters_are_found_before_anything_runs(tiny: dict, first, parameters: dict, words: str):
    before = set(ROOT.rglob("*"))
    with pytest.raises(InputError, match=words):
        run(tiny | parameters.get("override", {}), **{k: v for k, v in parameters.items() if k != "override"})
    assert set(ROOT.rglob("*")) == before


def test_several_artifacts_are_taken_for_finetuning_only(tiny: dict, first):
    run(tiny | {"filter": tiny["filter"] | {"max_tokens_per_char": 0.45}}, until="filter")
    both = ", ".join(a.key for a in artifacts("filter"))
    with pytest.raises(InputError, match="several artifacts of filter"):
        planned("demo", tiny, "report", {"filter": both}, [])


@pytest.mark.parametrize(
    ("override", "words", "logger"),
    [
        ({"download": {"source": "files", "files": ["gone.jsonl"]}}, "gone.jsonl", "prefect.flow_runs"),
        ({"vocabulary": {"entries": 50_000}}, "50,000", "prefect.task_runs"),
    ],
    ids=["before anything runs", "in a stage"],
)
def test_an_error_of_the_user_is_one_sentence_in_the_log_without_traceback(tiny, caplog, override, words, logger):
    with pytest.raises(InputError, match=words) as refused:
        run(tiny | override)
    [record] = [r for r in caplog.records if words in r.getMessage()]
    assert (record.name, record.getMessage(), record.levelname) == (logger, str(refused.value), "ERROR")
    assert not [r for r in caplog.records if r.exc_info]
    assert {p.name for p in ROOT.iterdir()} <= {*STAGES, ".locks", ".partial"}, "no stray files"


def test_a_bug_keeps_its_traceback_in_the_log(tiny: dict, caplog, monkeypatch):
    monkeypatch.setattr("tasks.store.read_manifest", lambda artifact: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny)
    assert [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]


def test_files_that_change_during_a_run_end_it_with_an_error(tiny: dict, tmp_path: Path, toy_texts, monkeypatch):
    shard, check = write_jsonl(tmp_path / "toy.jsonl", toy_texts[:50]), Plan.check

    def check_and_change(plan: Plan) -> None:
        check(plan)
        write_jsonl(shard, toy_texts[:51])

    monkeypatch.setattr(Plan, "check", check_and_change)
    with pytest.raises(InputError, match=r"input files of download changed during this run.*Run again"):
        run(tiny | {"download": tiny["download"] | {"files": [str(shard)]}})


@pytest.mark.parametrize(
    ("split", "words"), [("train", r"<task>/validation\.parquet"), ("validation", r"no cola/train\.parquet")]
)
def test_a_glue_folder_without_a_split_is_refused_before_anything_runs(tiny, tmp_path, split: str, words: str):
    (tmp_path / "cola").mkdir()
    pq.write_table(pa.table({"sentence": ["One."], "label": [1]}), tmp_path / "cola" / f"{split}.parquet")
    wrong = {"data": str(tmp_path), "tasks": ["cola"], "max_tokens": 32}
    with pytest.raises(InputError, match=words):
        planned("demo", tiny | {"finetune": wrong}, "report", {}, []).check()


def test_text_of_the_tasks_is_dropped_on_the_way_to_the_model(tiny: dict, first, tmp_path: Path, toy_texts: list[str]):
    (tmp_path / "cola").mkdir()
    sentences = [" ".join(toy_texts[3].split()[:16]), " ".join(toy_texts[200].split()[2:18])]
    pq.write_table(pa.table({"sentence": sentences, "label": [1, 0]}), tmp_path / "cola" / "validation.parquet")
    given = {"data": str(tmp_path), "tasks": ["cola"], "max_tokens": 32}
    run(tiny | {"finetune": given}, until="filter")
    unique, clean, kept = (find(stage, "latest") for stage in ("deduplicate", "decontaminate", "filter"))
    assert clean.stats["tasks"]["cola"]["sentences_found"] == 2
    assert clean.stats["documents"] == kept.stats["seen"]["documents"] == unique.stats["documents"] - 2
    texts = {document.text for document in documents_of(clean)}
    assert texts == {document.text for document in documents_of(unique)} - {toy_texts[3], toy_texts[200]}


def finetuned(override: dict) -> dict[str, Artifact]:
    """The finetune artifacts that a run makes or has made, by task and seed."""
    plan = planned("demo", override, "finetune", {}, [])
    plan.check()
    return {step.params.label(): artifact for step, artifact in plan.made.items() if step.stage == "finetune"}


@pytest.fixture(scope="module")
def four(tiny: dict) -> dict:
    """An override that asks for four finetuning runs."""
    return tiny | {"finetune": tiny["finetune"] | {"tasks": ["neighbours", "word-order"], "seeds": 2, "keep": "none"}}


def test_finetuning_runs_side_by_side_give_the_same_as_one_by_one(tiny: dict, first, four: dict, monkeypatch):
    run(four)
    made = finetuned(four)
    alone = {name: (artifact.path / "predictions.parquet").read_bytes() for name, artifact in made.items()}
    before = {name: artifact.manifest["started"] for name, artifact in made.items()}
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    states, _ = run(four, refresh=["finetune"])
    assert states["finetune"] == "Completed"
    assert all(artifact.manifest["started"] >= before[name] for name, artifact in made.items())
    assert {name: (artifact.path / "predictions.parquet").read_bytes() for name, artifact in made.items()} == alone
    assert len(alone) == 4


def test_a_killed_finetuning_run_loses_only_itself(tiny: dict, first, four: dict, monkeypatch):
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    four = four | {"finetune": four["finetune"] | {"learning_rate": 3e-4}}
    begin = finetunes.Worker.begin

    def killed(self, work, arguments):
        if arguments[0].label() == "word-order-0":
            return self.submit(signal.raise_signal, signal.SIGKILL)
        return begin(self, work, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(finetunes.Worker, "begin", killed)
        with pytest.raises(InputError, match=r"1 of 4 .*'finetune word-order-0' was killed"):
            run(four)
    made = finetuned(four)
    lost = made.pop("word-order-0")
    started = {name: artifact.manifest["started"] for name, artifact in made.items()}
    assert lost not in artifacts("finetune")
    assert run(four)[0]["report"] == "Completed"
    assert lost.manifest["stats"]["task"] == "word-order"
    assert {name: artifact.manifest["started"] for name, artifact in made.items()} == started


@pytest.mark.parametrize("count", [1, 2])
def test_finetuning_runs_that_start_from_a_failed_one_are_not_begun(tiny: dict, first, monkeypatch, count: int):
    monkeypatch.setenv("CRAM_FINETUNES", str(count))
    plan = planned("demo", tiny, "finetune", {}, ["finetune"])
    [usual] = [step for step in plan.steps if step.stage == "finetune"]
    names, train = ("failing", "needs it", "independent"), finetunes.run

    def fails(work, arguments, examples, label):
        if label.endswith("-7"):
            raise InputError("seven")
        return train(work, arguments, examples, label)

    monkeypatch.setattr(finetunes, "run", fails)
    plan.steps = [step for step in plan.steps if step.stage not in ("finetune", "report")]
    steps = {}
    for name, seed in zip(names, (7, 8, 9), strict=True):
        start = steps["failing"] if name == "needs it" else usual.inputs[0]
        steps[name] = plan(usual.task, usual.params.model_copy(update={"seed": seed, "keep": True}), start)
    with pytest.raises(InputError, match=r"1 of 3 .*1 run .* seven"):
        flow(plan.run, name="finetune only")()
    assert plan.made[steps["independent"]] in artifacts("finetune")
    assert plan.made[steps["needs it"]] not in artifacts("finetune")


def test_an_interrupt_ends_finetuning_runs_and_begins_no_other(tiny: dict, first, four: dict, monkeypatch):
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    begun, begin = [], finetunes.Worker.begin

    def interrupted(self, work, arguments):
        begun.append(arguments[0].label())
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return begin(self, work, arguments)

    monkeypatch.setattr(finetunes.Worker, "begin", interrupted)
    longer = four | {"finetune": four["finetune"] | {"epochs": 5, "learning_rate": 5e-4}}
    with pytest.raises(KeyboardInterrupt):
        run(longer)
    assert len(begun) == 2
    assert not set(finetuned(longer).values()) & set(artifacts("finetune"))


def test_a_model_of_an_older_version_is_refused_before_it_is_finetuned(store: Path):
    (store / "pretrain" / "0123456789ab").mkdir(parents=True)
    manifest = {"files": [], "stats": {"heldout_loss": 5.9}, "params": {}, "inputs": {}}
    (store / "pretrain" / "0123456789ab" / "stage.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="pretrain/0123456789ab was made by an older version"):
        planned("demo", {}, "report", {"pretrain": "latest"}, []).check()
