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
    """Run the flow; returns the final state of each stage as Prefect has it, and the flow run's id."""
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


def test_every_stage_runs_once_and_then_is_cached(tiny: dict, first):
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


def test_a_cached_run_shows_table_pictures_and_page_too(tiny: dict, first):
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    for _, flow_run in (first, run(tiny)):
        with get_client(sync_client=True) as client:
            shown = client.read_artifacts(
                artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
            )
        by_key = {a.key: a for a in shown}
        assert {
            "decontaminate-table",
            "filter-table",
            "filter-histogram",
            "pretrain-loss",
            "pretrain-readme",
            "scores",
            "report",
        } <= set(by_key)
        rows = json.loads(by_key["filter-table"].data)
        assert rows[0]["documents"] == f"{find('filter', 'latest').stats['seen']['documents']:,}"
        assert by_key["pretrain-readme"].data.startswith("# ")


def test_a_run_is_named_and_tagged_by_its_recipe_and_keeps_the_name_it_was_given(tiny: dict, first):
    with get_client(sync_client=True) as client:
        found = client.read_flow_run(first[1])
    assert found.name.startswith("demo-")
    assert len(found.name) > len("demo-")
    assert set(found.tags) == {"demo", "until report"}


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
    back, _ = run(tiny)
    assert set(back.values()) == {"Cached"}


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


def test_until_ends_the_run_and_refresh_runs_a_stage_again(tiny: dict, first):
    before = find("vocabulary", "latest")
    states, _ = run(tiny, until="vocabulary", refresh=["vocabulary"])
    cached = STAGES[: STAGES.index("vocabulary")]
    assert states == dict.fromkeys(cached, "Cached") | {"vocabulary": "Completed"}
    assert before


def test_a_refreshed_stage_is_followed_by_all_that_depends_on_it(tiny: dict, first):
    states, _ = run(tiny, refresh=["tokenize"])
    after = ("tokenize", "pretrain", "finetune", "report")
    assert states == dict.fromkeys(STAGES, "Cached") | dict.fromkeys(after, "Completed")


def test_a_model_that_is_trained_anew_is_finetuned_anew_though_another_run_does_it(tiny: dict, first, monkeypatch):
    monkeypatch.setenv("CRAM_DTYPE", "bf16")  # so that other weights have the same key
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
def test_a_bad_setting_of_the_machine_is_told_before_a_model_is_discarded(tiny, first, monkeypatch, name, value, words):
    made = {artifact: artifact.manifest for artifact in artifacts("pretrain")}
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words):
        run(tiny, refresh=["pretrain"])
    assert {artifact: artifact.manifest for artifact in artifacts("pretrain")} == made


def test_what_of_an_override_has_no_effect_is_told(tiny: dict, caplog):
    plan = planned("demo", tiny, "filter", {}, [])
    plan.tell_unused({"finetune": {"data": "elsewhere"}})
    assert not caplog.messages, "decontaminate looks for what stands there"
    plan.tell_unused({"filter": {}, "finetune": {"epochs": 3}, "pretrain": {}})
    assert caplog.messages == ["This run doesn't reach finetune, pretrain; overrides of it have no effect."]


def test_a_given_stage_makes_those_before_it_needless(tiny: dict, first, tmp_path: Path):
    bert = artifacts("pretrain")[0]
    missing = tiny | {"download": {"source": "files", "files": [str(tmp_path / "gone.jsonl")]}}
    states, _ = run(missing, use={"pretrain": bert.key})
    assert set(states) == {"finetune", "report"}


def test_two_finetune_artifacts_can_be_reported_without_anything_else(tiny: dict, first):
    states, _ = run(tiny, use={"finetune": find("finetune", "latest").key})
    assert set(states) == {"report"}


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"use": {"filter": "nothing"}}, "No complete artifact of filter is 'nothing'"),
        ({"use": {"tokenize": "latest"}, "until": "filter"}, "doesn't reach"),
        ({"refresh": ["pretrain"], "until": "filter"}, "refresh names pretrain"),
        ({"use": {"filter": "latest"}, "refresh": ["filter"]}, "both"),
    ],
)
def test_contradictions_are_refused_before_anything_runs(tiny: dict, first, parameters: dict, words: str):
    before = set(ROOT.rglob("*"))
    with pytest.raises(InputError, match=words):
        run(tiny, **parameters)
    assert set(ROOT.rglob("*")) == before


def test_several_artifacts_are_taken_for_finetuning_only(tiny: dict, first):
    run(tiny | {"filter": tiny["filter"] | {"max_tokens_per_char": 0.45}}, until="filter")
    both = ", ".join(a.key for a in artifacts("filter"))
    with pytest.raises(InputError, match="several artifacts of filter"):
        run(tiny, use={"filter": both})


def test_a_failure_that_the_user_can_mend_is_one_sentence_in_the_log_without_traceback(tiny: dict, caplog, tmp_path):
    missing = {"download": {"source": "files", "files": [str(tmp_path / "gone.jsonl")]}}
    for wrong, words, kind in (
        (missing, "matches nothing", "prefect.flow_runs"),  # before anything runs
        ({"vocabulary": {"entries": 50_000}}, "50,000 were asked for", "prefect.task_runs"),
    ):
        caplog.clear()
        with pytest.raises(InputError, match=words) as refused:
            run(tiny | wrong)
        [told] = [r for r in caplog.records if words in r.getMessage()]
        assert (told.name, told.getMessage(), told.levelname) == (kind, str(refused.value), "ERROR")
        assert not [r for r in caplog.records if r.exc_info]


def test_what_the_user_can_not_mend_keeps_its_traceback_in_the_log(tiny: dict, caplog, monkeypatch):
    monkeypatch.setattr("tasks.store.read_manifest", lambda artifact: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny)
    assert [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]


def test_what_is_wrong_is_known_without_a_server_and_before_anything_runs(tiny: dict, tmp_path: Path):
    before = set(ROOT.rglob("*"))
    for wrong, use, words in (
        ({"download": {"source": "files", "files": [str(tmp_path / "gone.jsonl")]}}, {}, "matches nothing"),
        ({"finetune": {"data": str(tmp_path), "tasks": ["cola"], "max_tokens": 32}}, {}, "holds no <task>"),
        ({}, {"pretrain": "nothing"}, "artifacts? of pretrain"),
    ):
        with pytest.raises(InputError, match=words):
            planned("demo", tiny | wrong, "report", use, []).check()
    assert set(ROOT.rglob("*")) == before


def test_files_that_change_while_a_run_goes_on_end_it_with_a_sentence(
    tiny: dict, tmp_path: Path, toy_texts, monkeypatch
):
    shard, check = write_jsonl(tmp_path / "toy.jsonl", toy_texts[:50]), Plan.check

    def check_and_change(plan: Plan) -> None:
        check(plan)
        write_jsonl(shard, toy_texts[:51])

    monkeypatch.setattr(Plan, "check", check_and_change)
    with pytest.raises(InputError, match=r"input files of download changed during this run.*Run again"):
        run(tiny | {"download": tiny["download"] | {"files": [str(shard)]}})


def test_failures_leave_no_stray_files_in_the_store(tiny: dict, first):
    with pytest.raises(InputError, match="vocabulary of"):
        run(tiny | {"vocabulary": {"entries": 60_000}})
    assert {p.name for p in ROOT.iterdir()} <= {*STAGES, ".locks", ".partial"}
    assert not [a for a in artifacts("vocabulary") if a.manifest["params"]["entries"] == 60_000]


@pytest.mark.parametrize(
    ("split", "words"), [("train", r"holds no <task>/validation\.parquet"), ("validation", r"no cola/train\.parquet")]
)
def test_a_glue_folder_with_a_missing_split_is_told_before_anything_runs(tiny, first, tmp_path, split: str, words: str):
    (tmp_path / "cola").mkdir()
    pq.write_table(pa.table({"sentence": ["One."], "label": [1]}), tmp_path / "cola" / f"{split}.parquet")
    wrong = {"data": str(tmp_path), "tasks": ["cola"], "max_tokens": 32}
    before = {stage: len(artifacts(stage)) for stage in STAGES}
    with pytest.raises(InputError, match=words):
        run(tiny | {"finetune": wrong, "pretrain": tiny["pretrain"] | {"seed": 99}})
    assert {stage: len(artifacts(stage)) for stage in STAGES} == before


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


def runs_of(override: dict) -> dict[str, Artifact]:
    """The finetune artifacts that a run makes or has made, by task and seed."""
    plan = planned("demo", override, "finetune", {}, [])
    plan.check()
    return {step.params.label(): artifact for step, artifact in plan.made.items() if step.stage == "finetune"}


@pytest.fixture(scope="module")
def four(tiny: dict) -> dict:
    """An override that asks for four finetuning runs."""
    return tiny | {"finetune": tiny["finetune"] | {"tasks": ["neighbours", "word-order"], "seeds": 2, "keep": "none"}}


def test_runs_side_by_side_give_what_they_give_one_by_one(tiny: dict, first, four: dict, monkeypatch):
    run(four)
    made = runs_of(four)
    alone = {name: (artifact.path / "predictions.parquet").read_bytes() for name, artifact in made.items()}
    before = {name: artifact.manifest["started"] for name, artifact in made.items()}
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    states, _ = run(four, refresh=["finetune"])
    assert states["finetune"] == "Completed"
    assert all(artifact.manifest["started"] >= before[name] for name, artifact in made.items())
    assert {name: (artifact.path / "predictions.parquet").read_bytes() for name, artifact in made.items()} == alone
    assert len(alone) == 4


def test_a_killed_run_loses_itself_alone(tiny: dict, first, four: dict, monkeypatch):
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    four = four | {"finetune": four["finetune"] | {"learning_rate": 3e-4}}
    begin = finetunes.Worker.begin

    def killed(self, work, arguments):
        if arguments[0].label() == "word-order-0":
            return self.submit(signal.raise_signal, signal.SIGKILL)
        return begin(self, work, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(finetunes.Worker, "begin", killed)
        with pytest.raises(InputError, match="The process of 'finetune word-order-0' was killed"):
            run(four)
    made = runs_of(four)
    started = {name: artifact.manifest["started"] for name, artifact in made.items() if name != "word-order-0"}
    with pytest.raises(InputError, match="No complete artifact"):
        _ = made["word-order-0"].manifest
    assert run(four)[0]["report"] == "Completed"
    assert made["word-order-0"].manifest["stats"]["task"] == "word-order"
    assert {name: made[name].manifest["started"] for name in started} == started


def test_the_store_is_the_tests_own():
    assert str(ROOT) == os.environ["CRAM_ARTIFACTS"]


def test_a_model_of_an_older_version_is_refused_before_it_is_finetuned(store: Path):
    (store / "pretrain" / "0123456789ab").mkdir(parents=True)
    manifest = {"files": [], "stats": {"heldout_loss": 5.9}, "params": {}, "inputs": {}}
    (store / "pretrain" / "0123456789ab" / "stage.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="pretrain/0123456789ab was made by an older version"):
        planned("demo", {}, "report", {"pretrain": "latest"}, []).check()
