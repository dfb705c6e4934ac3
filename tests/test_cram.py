"""The whole flow, through a real Prefect server."""

import base64
import errno
import json
import logging
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import tiny_override, write_jsonl, write_pairs
from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter
from prefect.states import State

from flows import execute as execute_module
from flows.cram import checked_plan, cram, pipeline
from flows.execute import execute
from flows.plan import Plan
from flows.recipes.recipe import STAGES, resolve
from flows.study import study
from model.errors import InputError
from tasks.stage import StageTask
from tasks.store import home
from tasks.store.artifacts import Artifact, artifacts_of
from tasks.workers import finetunes, processes

CACHED = dict.fromkeys(STAGES, "Cached")


pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, toy_texts: list[str]) -> dict:
    """An override that makes the demo recipe a matter of seconds."""
    shard = write_jsonl(tmp_path_factory.mktemp("text") / "toy.jsonl", toy_texts)
    override = tiny_override(shard, budget=20_000, budget_unit="tokens")
    override["download"]["part_megabytes"] = 0.03
    override["minimal_pairs"] = {"data": [str(write_pairs(shard.with_name("pairs.csv")))]}
    return override


def run(override: dict, **parameters) -> tuple[dict[str, str], str]:
    """Run the flow, as `followed` tells."""
    return followed(lambda: cram(recipe="demo", override=override, return_state=True, **parameters))


def followed(start: Callable[[], State]) -> tuple[dict[str, str], str]:
    """Start a flow; the final state of each stage on Prefect's server, and the flow run's id."""
    with patch("flows.execute.show", side_effect=execute_module.show) as shown:
        state = start()
    flow_run = state.state_details.flow_run_id
    if state.is_failed():
        state.result()
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 30
        while True:  # states reach the server as events, a little later
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run]}))
            all_there = len(found) >= shown.call_count and all(r.state and r.state.is_final() for r in found)
            if (found and all_there) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
    return {r.name.split("-")[0]: r.state.name for r in found}, str(flow_run)


def shown_by(flow_run: str) -> dict:
    """The artifacts that a flow run put on its page, by key."""
    own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        return {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=own)}


def made(override: dict, until: str = "report") -> dict[str, Artifact]:
    """The artifacts of a run, there or not, by stage; those of finetuning runs by task and seed."""
    plan = checked_plan("demo", override, until, {}, [])
    return {step.params.label() or step.stage: step.artifact for step in plan.steps}


@pytest.fixture(scope="module")
def first(tiny: dict, prefect_server) -> tuple[dict[str, str], str]:
    return run(tiny)


@pytest.fixture(scope="module")
def stricter(tiny: dict) -> dict:
    return tiny | {"filter": tiny["filter"] | {"max_tokens_per_char": 0.45}}


def test_an_override_reruns_its_stage_and_what_follows_with_a_line_for_each(tiny: dict, first, stricter, caplog):
    assert first[0] == dict.fromkeys(STAGES, "Completed")
    states, _ = run(stricter, until="tokenize")
    before = STAGES[: STAGES.index("filter")]
    rerun = ("filter", "vocabulary", "tokenize")
    assert states == dict.fromkeys(before, "Cached") | dict.fromkeys(rerun, "Completed")
    lines = [r.getMessage() for r in caplog.records if r.name == "flows.execute" and r.levelname == "INFO"]
    of = made(stricter, "tokenize")
    kept = of["filter"].stats
    starts = dict.fromkeys(before, "cached, ") | {
        "download": "cached, 300 documents, ",
        "filter": f"{kept['documents']} of {kept['seen']['documents']} documents kept, ",
        "vocabulary": "400 entries, ",
        "tokenize": f"{of['tokenize'].stats['sequences']} sequences, ",
    }
    for line, (stage, start) in zip(lines, starts.items(), strict=True):
        assert line.startswith(f"{stage}: {start}")
        assert line.endswith(f", {of[stage].path}")


def test_a_second_run_is_cached_executes_nothing_in_artifacts_and_has_the_same_page(tiny: dict, first, tmp_path: Path):
    class Payload:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "executed"),)

    data = base64.encodebytes(pickle.dumps(Payload())).decode()
    record = {"metadata": {"serializer": {"type": "pickle"}, "prefect_version": "3.8.8"}, "result": data}
    of = made(tiny)
    for artifact in of.values():
        (artifact.path / "prefect.json").write_text(json.dumps(record))
    states, second = run(tiny)
    assert states == CACHED
    assert not (tmp_path / "executed").exists()
    for flow_run in (first[1], second):
        by_key = shown_by(flow_run)
        tables = {"decontaminate-table", "filter-table", "report-table"}
        files = {"filter-histogram", "pretrain-loss"}
        assert tables | files | {"pretrain-readme", "report"} <= set(by_key)
        rows = json.loads(by_key["filter-table"].data)
        assert rows[0]["documents"] == f"{of['filter'].stats['seen']['documents']:,}"
        assert by_key["pretrain-readme"].data.startswith("# ")


def test_no_file_of_an_artifact_names_the_store(first):
    files = [p for p in home.root().rglob("*") if p.is_file() and p.suffix in (".json", ".md")]
    assert files
    assert not [p for p in files if str(home.root()) in p.read_text()]


def test_a_damaged_model_is_trained_again_to_the_same_contents_so_that_all_else_stays_cached(tiny: dict, first):
    weights = made(tiny)["pretrain"].path / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    assert run(tiny)[0] == dict.fromkeys(STAGES, "Cached") | {"pretrain": "Completed"}
    assert weights.read_bytes() == content


def test_what_depends_on_a_refreshed_stage_runs_again_then_or_in_a_later_run(tiny: dict, first, monkeypatch):
    monkeypatch.setenv("CRAM_DTYPE", "bf16")  # other weights under the same key
    states, _ = run(tiny, until="pretrain", refresh=["tokenize"])
    again = dict.fromkeys(("tokenize", "pretrain"), "Completed")
    assert states == dict.fromkeys(STAGES[: STAGES.index("tokenize")], "Cached") | again
    assert run(tiny)[0] == CACHED | dict.fromkeys(("minimal_pairs", "finetune", "report"), "Completed")


def test_too_little_text_for_probes_is_refused_before_a_model_is_pretrained(tiny: dict, first):
    few = tiny | {"tokenize": tiny["tokenize"] | {"heldout_fraction": 0.02}}
    with pytest.raises(InputError, match=r"tokenize/.*neighbours.*heldout_fraction"):
        cram.fn(recipe="demo", override=few)
    with pytest.raises(InputError, match="heldout_fraction"):  # the text is there now
        made(few)
    assert not made(few, "pretrain")["pretrain"].path.exists()


def test_a_sentence_too_long_for_the_model_is_refused_before_it_is_pretrained(tiny: dict, first, tmp_path: Path):
    path = tmp_path / "long.csv"
    path.write_text(f"good,bad\n{'word ' * 200},short\n", encoding="utf-8")
    override = tiny | {"minimal_pairs": {"data": [str(path)]}}
    with pytest.raises(InputError, match=r"word word.*minimal_pairs\.data"):
        cram.fn(recipe="demo", override=override)
    assert made(override, "tokenize")["tokenize"].path.exists()
    with pytest.raises(InputError, match="word word"):  # the vocabulary is there now
        made(override)
    assert not made(override, "pretrain")["pretrain"].path.exists()


OWN = {"name": "own", "data": "own.csv"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"finetune": {"data": "probes"}, "pretrain": {}}, ""),  # decontaminate reads finetune.data; nothing changes
        ({"finetune": {"epochs": 3}, "pretrain": {"seed": 1}}, "finetune.epochs, pretrain.seed"),
        ({"vocabulary": {"characters": "unicode", "entries": 300}}, "vocabulary.entries"),  # filter reads the first
        ({"finetune": {"data": "probes", "epochs": 3}}, "finetune.epochs"),
        ({"finetune": {"tasks": [OWN], "seeds": 2}}, "finetune.seeds"),
    ],
)
def test_a_warning_names_overridden_fields_that_no_stage_of_the_run_reads(
    tiny: dict, tmp_path: Path, monkeypatch, caplog, changes: dict, named: str
):
    monkeypatch.chdir(tmp_path)
    rows = [f"text {i},{'ab'[i % 2]}\n" for i in range(40)]
    (tmp_path / "own.csv").write_text("".join(["text,label\n", *rows]))
    read = {name: tiny[name] for name in ("download", "filter", "measure")}
    checked_plan("demo", read | changes, "filter", {}, [])
    of_flow = [record for record in caplog.records if record.name == "flows.cram"]
    warnings = [record.getMessage() for record in of_flow if record.levelno == logging.WARNING]
    assert len(warnings) == bool(named)
    assert all(f"reach {named};" in warning for warning in warnings)


@pytest.mark.parametrize(
    ("stage", "following"), [("pretrain", {"minimal_pairs", "finetune", "report"}), ("finetune", {"report"})]
)
def test_a_given_artifact_makes_the_stages_before_it_needless(tiny, first, tmp_path: Path, stage: str, following: set):
    missing = tiny | {"download": {"source": "files", "files": [str(tmp_path / "gone.jsonl")]}}
    plan = checked_plan("demo", missing, "report", {stage: artifacts_of(stage)[0].key}, [])
    assert {step.stage for step in plan.steps} == following
    execute(plan)
    assert not plan.problems


COLA = {"finetune": {"data": "tests", "tasks": ["cola"], "max_tokens": 32}}


@pytest.mark.parametrize(
    ("parameters", "setting", "words"),
    [
        ({"use": {"filter": "nothing"}}, {}, "No complete artifact of filter is named 'nothing'"),
        ({"use": {"tokenize": "latest"}, "until": "filter"}, {}, "use names tokenize"),
        ({"refresh": ["pretrain"], "until": "filter"}, {}, "refresh names pretrain"),
        ({"use": {"filter": "latest"}, "refresh": ["filter"]}, {}, "both"),
        ({"override": {"download": {"source": "files", "files": ["gone.jsonl"]}}}, {}, "gone.jsonl"),
        ({"override": COLA}, {}, r"<task>/validation or"),
        ({"override": COLA, "use": {"pretrain": "latest"}}, {}, r"no cola/train \("),
        ({"refresh": ["pretrain"]}, {"CRAM_DTYPE": "bf61"}, "CRAM_DTYPE is 'bf61'"),
        ({"refresh": ["pretrain"]}, {"CRAM_GPUS": "3"}, "batch_size 8 can't be shared by 3 processes"),
        ({"refresh": ["pretrain"]}, {"CRAM_WORKERS": "none"}, "CRAM_WORKERS is 'none'"),
        ({"refresh": ["pretrain"]}, {"CRAM_TRACK": "paper"}, "CRAM_TRACK is 'paper'"),
    ],
)
def test_an_error_of_the_user_is_found_before_anything_runs_or_is_discarded(
    tiny: dict, first, monkeypatch, parameters: dict, setting: dict, words: str
):
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in home.root().rglob("*") if path.is_file()}

    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    before = files()
    given = {"until": "report", "use": {}, "refresh": []} | parameters
    with pytest.raises(InputError, match=words):
        execute(checked_plan("demo", **given | {"override": tiny | given.get("override", {})}))
    assert files() == before


def test_several_artifacts_are_taken_for_finetuning_only(tiny: dict, first, stricter: dict):
    cram.fn(recipe="demo", override=stricter, until="filter")
    both = ", ".join(artifact.key for artifact in artifacts_of("filter"))
    with pytest.raises(InputError, match="several artifacts of filter"):
        checked_plan("demo", tiny, "report", {"filter": both}, [])


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
    assert {p.name for p in home.root().iterdir()} <= {*STAGES, ".locks", ".partial"}, "no stray files"


def test_a_bug_keeps_its_traceback_in_the_log(tiny: dict, caplog, monkeypatch):
    monkeypatch.setattr("tasks.store.artifacts.read_manifest", lambda artifact: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tiny)
    assert [r for r in caplog.records if r.exc_info and r.exc_info[0] is ZeroDivisionError]


def test_files_that_change_during_a_run_end_it_with_an_error(tiny: dict, tmp_path: Path, toy_texts, monkeypatch):
    shard = write_jsonl(tmp_path / "toy.jsonl", toy_texts[:50])
    check = Plan.check

    def check_and_change(plan: Plan) -> None:
        check(plan)
        write_jsonl(shard, toy_texts[:51])

    monkeypatch.setattr(Plan, "check", check_and_change)
    with pytest.raises(InputError, match=r"input files of download changed during this run.*Run again"):
        cram.fn(recipe="demo", override=tiny | {"download": tiny["download"] | {"files": [str(shard)]}})


def test_in_a_notebook_the_pipeline_is_one_call_without_prefect_and_cached(tiny: dict, first, monkeypatch):
    monkeypatch.setattr(Task, "__call__", lambda *_, **__: pytest.fail("Prefect's engine runs"))
    recipe = resolve("demo", tiny | {"finetune": tiny["finetune"] | {"learning_rate": 2e-4}})
    before = artifacts_of("finetune")
    page = pipeline(recipe)
    assert len(artifacts_of("finetune")) == len(before) + 1
    assert page.stats["table"][0]["task"] == "neighbours"
    monkeypatch.setattr(StageTask, "make", lambda *_: pytest.fail("not cached"))
    assert pipeline(recipe) == page


@pytest.fixture
def four(tiny: dict, first, monkeypatch: pytest.MonkeyPatch) -> dict:
    """An override that asks for four finetuning runs, two at a time."""
    monkeypatch.setenv("CRAM_FINETUNES", "2")
    return tiny | {"finetune": tiny["finetune"] | {"tasks": ["neighbours", "word-order"], "seeds": 2, "keep": "none"}}


def finetuned(override: dict) -> dict[str, Artifact]:
    """The finetune artifacts of a run, there or not, by task and seed."""
    return {name: artifact for name, artifact in made(override).items() if artifact.stage == "finetune"}


def sources(flow_run: str, name: str) -> Counter:
    """How many runs of each stage Prefect's run graph has an edge from to the task run of that name."""
    with get_client(sync_client=True) as client:
        found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run]}))
    [target] = [task_run for task_run in found if task_run.name == name]
    before = {given.id for inputs in target.task_inputs.values() for given in inputs}
    return Counter(task_run.name.split("-")[0] for task_run in found if task_run.id in before)


def test_the_run_of_a_study_shows_its_page_which_has_an_edge_from_each_model_evaluation_and_report(
    tiny: dict, first, tmp_path: Path
):
    runs = {"own": {}, "more held out": {"tokenize": {"heldout_fraction": 0.45}}}
    (tmp_path / "hosted.json").write_text(json.dumps({"runs": runs}))
    asked = {"study": str(tmp_path / "hosted.json"), "recipe": "demo", "override": tiny, "until": "report"}
    _, flow_run = followed(lambda: study(**asked, return_state=True))
    assert sources(flow_run, "compare") == {"pretrain": 2, "evaluate": 2, "minimal_pairs": 2, "report": 2}
    by_key = shown_by(flow_run)
    assert by_key["compare-study"].data.startswith("# Study: hosted")
    assert [row["run"] for row in json.loads(by_key["compare-table"].data)] == [*runs]


def test_runs_side_by_side_give_the_same_as_one_by_one_and_a_killed_one_loses_only_itself(four: dict, monkeypatch):
    def predictions() -> dict[str, bytes]:
        return {name: (artifact.path / "predictions.parquet").read_bytes() for name, artifact in found.items()}

    def killed(self, work, *arguments, **others):
        if arguments[1][0].label() == "word-order-1":
            work = signal.raise_signal
            arguments = (signal.SIGKILL,)
        return call(self, work, *arguments, **others)

    found = finetuned(four)
    call = processes.Processes.call
    assert sources(run(four)[1], "report") == {"minimal_pairs": 1, "finetune": 4}
    together = predictions()
    assert len(set(together.values())) == 4
    with monkeypatch.context() as patch:
        patch.setattr(processes.Processes, "call", killed)
        with pytest.raises(InputError, match=r"1 of 4 .*'finetune word-order-1' was killed"):
            run(four, refresh=["finetune"])
    assert set(found.values()) - set(artifacts_of("finetune")) == {found["word-order-1"]}
    started = {name: artifact.manifest["started"] for name, artifact in found.items() if name != "word-order-1"}
    states, rerun = run(four)  # of the killed one, alone in this process
    assert states["report"] == "Cached", "the report of all four is the same"
    assert sources(rerun, "report") == {"minimal_pairs": 1, "finetune": 4}
    assert {name: found[name].manifest["started"] for name in started} == started
    assert predictions() == together


def test_if_all_finetuning_runs_fail_none_is_said_to_be_kept(four: dict, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(processes.Processes, "call", full)
    with pytest.raises(InputError, match=r"^4 of 4 finetuning runs failed\. finetune can't continue: No space left"):
        cram.fn(recipe="demo", override=four | {"finetune": four["finetune"] | {"learning_rate": 3e-4}})


def test_an_interrupt_ends_finetuning_runs_and_begins_no_other(four: dict, monkeypatch):
    begun = []
    call = processes.Processes.call
    monkeypatch.setattr(finetunes, "pool", None)  # an ended pool stays after an error; not for the tests that follow

    def interrupted(self, *_, **__):
        if not self.ended:
            begun.append(self)
            if len(begun) == 2:
                os.kill(os.getpid(), signal.SIGINT)
        return call(self, time.sleep, 600)  # a run that ends by an interrupt only

    monkeypatch.setattr(processes.Processes, "call", interrupted)
    longer = four | {"finetune": four["finetune"] | {"epochs": 5, "learning_rate": 5e-4}}
    with pytest.raises(KeyboardInterrupt):  # without Prefect, whose server for tests would end too
        cram.fn(recipe="demo", override=longer)
    assert len(begun) == 2
    assert not set(finetuned(longer).values()) & set(artifacts_of("finetune"))
