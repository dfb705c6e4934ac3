"""Studies through a real Prefect server: shared stages once, failed runs told, kills survived; and their page."""

import contextlib
import html
import json
import math
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from conftest import store_of_its_own, tiny_override, write_jsonl
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, FlowRunFilter
from scipy.stats import ttest_ind
from typer.testing import CliRunner

from flows.cli.main import app
from flows.plan import Plan
from flows.recipes import STAGES
from flows.server import prefect_server
from flows.studies import STUDIES
from flows.study import study
from model import InputError, pretraining
from tasks import stage as stage_module
from tasks.evaluate import Evaluate, evaluate
from tasks.reports import law
from tasks.reports.study_sections import summary
from tasks.store import Artifact, artifacts
from tasks.study import AXES, Card, Member, StudyReport, compare_runs

SGD = {"optimizer": "sgd", "clip": None, "learning_rate": 100.0}
RUNS = {
    "own": {},
    "the same": {"pretrain": {"mask_fraction": 0.2}},
    "half the rate": {"pretrain": {"learning_rate": 2e-3}},
    "300 entries": {"vocabulary": {"entries": 300}},
    "other text": {"download": {"source": "files", "files": ["OTHER"]}},
    "diverges": {"pretrain": SGD},
}
DONE = ["own", "half the rate", "300 entries", "other text"]
SHARED = {
    "download": 2,
    "deduplicate": 2,
    "decontaminate": 2,
    "measure": 2,
    "filter": 2,
    "vocabulary": 3,
    "tokenize": 3,
}
PAGE = {"study.html", "study.md", "study.json", "runs.parquet", "tokens.svg", "operations.svg", "seconds.svg"}


@pytest.fixture(scope="module")
def server():
    """A temporary server of Prefect's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PREFECT_API_URL", raising=False)
        with prefect_server("http://127.0.0.1:1/api"):  # where none answers
            yield


@pytest.fixture(scope="module")
def given(tmp_path_factory, toy_texts: list[str]) -> dict:
    """The parameters of a small study, on the texts of two files."""
    folder = tmp_path_factory.mktemp("text")
    shard, other = (
        write_jsonl(folder / f"{name}.jsonl", texts)
        for name, texts in (("toy", toy_texts[:180]), ("other", toy_texts[120:]))
    )
    (folder / "small.json").write_text(
        json.dumps({"about": "What matters.", "runs": RUNS}).replace("OTHER", str(other))
    )
    override = tiny_override(shard, budget=1500, budget_unit="tokens") | {"vocabulary": {"entries": 350}}
    return {"study": str(folder / "small.json"), "recipe": "demo", "override": override, "seeds": 2}


def carried_out(**parameters) -> SimpleNamespace:
    """A study: its page, the names of what was really made, in order, the states on the server, the flow run's id."""
    make, made = stage_module.Stage.make, []

    def noted(stage, artifact, *rest) -> None:
        made.append(artifact.name)
        make(stage, artifact, *rest)

    with patch.object(stage_module.Stage, "make", noted):
        state = study(**parameters, return_state=True)
    flow_run = state.state_details.flow_run_id
    return SimpleNamespace(page=state.result(), made=made, flow_run=flow_run, states=states_of(flow_run))


def states_of(flow_run) -> list[tuple[str, str]]:
    """Stage and final state of each task run; they reach the server as events, a little later."""
    with get_client(sync_client=True) as client:
        deadline = time.monotonic() + 60
        while True:
            found = client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": [flow_run]}))
            stages = [run.name.split("-")[0] for run in found]
            if (
                "study" in stages and all(r.state and r.state.is_final() for r in found)
            ) or time.monotonic() > deadline:
                return [(stage, run.state.name) for stage, run in zip(stages, found, strict=True)]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The store of this module's studies."""
    root = tmp_path_factory.mktemp("store") / "artifacts"
    with pytest.MonkeyPatch.context() as patch, store_of_its_own(root):
        patch.setenv("CRAM_ARTIFACTS", str(root))  # for processes
        yield root


@pytest.fixture(scope="module")
def finished(server, store, given: dict) -> SimpleNamespace:
    """The small study, carried out."""
    return carried_out(**given)


def rows_of(page: Artifact) -> pd.DataFrame:
    return pd.read_parquet(page.path / "runs.parquet")


def strictly(path: Path) -> dict:
    """The content of a JSON file that every reader takes."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_stages_that_runs_share_were_run_once(finished):
    assert max(Counter(finished.made).values()) == 1
    counts = Counter(name.partition("/")[0] for name in finished.made)
    models = 2 * len(DONE)
    assert counts == SHARED | {"pretrain": models + 2, "evaluate": 2, "study": 1}
    for stage, count in (SHARED | {"pretrain": models}).items():
        assert len(artifacts(stage)) == count
    assert Counter(state for _, state in finished.states) == {"Completed": sum(counts.values()) - 2, "Failed": 2}


def test_the_page_has_its_files_and_the_run_of_prefect_shows_it(finished):
    assert {path.name for path in finished.page.path.iterdir()} >= PAGE
    about = strictly(finished.page.path / "study.json")
    assert (about["title"], about["about"], about["recipe"]) == ("Study: small", "What matters.", "demo")
    html = (finished.page.path / "study.html").read_text()
    assert html.count("<svg") == 3
    assert "http-equiv" not in html.split("<svg")[0] or "src=" not in html
    own = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[finished.flow_run]))
    with get_client(sync_client=True) as client:
        by_key = {artifact.key: artifact for artifact in client.read_artifacts(artifact_filter=own)}
    assert by_key["study"].data.startswith("# Study: small")
    assert [row["run"] for row in json.loads(by_key["study-table"].data)] == [*DONE, "diverges"]


def test_the_table_has_a_row_for_each_run_and_seed_with_the_losses_of_their_models(finished):
    rows = rows_of(finished.page)
    assert [*zip(rows["run"], rows["seed"], strict=True)] == [(name, n) for name in [*DONE, "diverges"] for n in (0, 1)]
    for row in rows[rows["run"].isin(DONE)].to_dict("records"):
        stage, _, key = row["model"].partition("/")
        about = json.loads((Artifact(stage=stage, key=key).path / "stage.json").read_text())
        stats, params = about["stats"], about["params"]
        assert params["seed"] == row["seed"]
        assert (row["tokens"], row["parameters"]) == (stats["tokens"], stats["parameters"])
        assert row["operations"] == pytest.approx(1e18 * stats["exaflops"])
        if row["run"] != "other text":
            for unit in ("word", "character", "byte"):
                assert row[f"nats_per_{unit}"] == stats["heldout"][f"nats_per_{unit}"]["value"]
            assert row["evaluation"] == ""
        for field, value in json.loads(row["changes"]).items():
            stage, _, name = field.partition(".")
            assert stage != "pretrain" or params[name] == value
    assert rows["model"][rows["model"].ne("")].nunique() == 2 * len(DONE)


def test_means_deviations_differences_and_errors_are_those_of_the_seeds(finished):
    rows = rows_of(finished.page)
    means = {line["run"]: line for line in strictly(finished.page.path / "study.json")["summary"]}
    losses = {name: own["nats_per_byte"].to_numpy() for name, own in rows.groupby("run")}
    page = (finished.page.path / "study.md").read_text()
    for name in DONE:
        line, values = means[name], losses[name]
        assert line["nats_per_byte"] == pytest.approx(values.mean())
        assert line["nats_per_byte deviation"] == pytest.approx(values.std(ddof=1))
        shown = f"{values.mean():.4f} ± {values.std(ddof=1):.4f}"
        if name == "own":
            assert "nats_per_byte difference" not in line or line["nats_per_byte difference"] is None
        else:
            difference = values.mean() - losses["own"].mean()
            error = abs(difference / ttest_ind(values, losses["own"], equal_var=False).statistic)
            assert line["nats_per_byte difference"] == pytest.approx(difference)
            assert line["nats_per_byte error"] == pytest.approx(error)
            shown += rf" *\| *{re.escape(f'{difference:+.4f} ± {error:.4f}')}"
        assert re.search(rf"\| {name}.*\| *{shown} *\|", page), name
    assert means["diverges"]["nats_per_byte"] is None


def test_a_run_that_fails_stops_no_other_and_is_told(finished):
    rows, text = rows_of(finished.page), (finished.page.path / "study.md").read_text()
    failed = rows[rows["problem"].ne("")]
    assert (failed["run"].tolist(), failed["model"].tolist()) == (["diverges"] * 2, [""] * 2)
    for problem in failed["problem"]:
        assert "pretrain.learning_rate" in problem
        assert problem in text
        assert problem.partition(". ")[0] in (finished.page.path / "study.html").read_text()
    assert finished.page.stats["failed"] == 2
    assert "## Failed runs" in text


def test_merged_runs_have_both_names(finished):
    text = (finished.page.path / "study.md").read_text()
    assert "own = the same" in text
    assert json.loads(rows_of(finished.page)["changes"][0]) == {}
    assert "unequal budgets" not in text
    assert "mask_fraction" not in text


def test_a_run_on_another_text_is_measured_on_that_of_the_first_run(finished):
    rows = rows_of(finished.page).set_index(["run", "seed"])
    text = Artifact(stage="pretrain", key=rows.loc[("own", 0), "model"].partition("/")[2])
    for seed in (0, 1):
        row = rows.loc[("other text", seed)]
        model = Artifact(stage="pretrain", key=row["model"].partition("/")[2])
        found = evaluate.fn(Evaluate(), model, text, [])
        assert row["evaluation"] == found.name
        for unit in ("word", "character", "byte"):
            assert row[f"nats_per_{unit}"] == found.stats[f"nats_per_{unit}"]["value"]
        assert row["digest"] == text.stats["heldout"]["digest"] != model.stats["heldout"]["digest"]
    assert rows["digest"].dropna().nunique() == 1
    curves = strictly(finished.page.path / "study.json")["curves"]
    assert [*curves] == [name for name in DONE if name != "other text"]
    assert "Not all runs have the same held-out text" in (finished.page.path / "study.md").read_text()


def test_a_curve_is_the_mean_of_those_of_the_seeds(finished):
    rows, curves = rows_of(finished.page), strictly(finished.page.path / "study.json")["curves"]
    for name, curve in curves.items():
        of_seeds = [
            Artifact(stage="pretrain", key=model.partition("/")[2]).stats["evaluations"]
            for model in rows[rows["run"] == name]["model"]
        ]
        assert curve["heldout_nats_per_byte"][-1] == pytest.approx(
            np.mean([one[-1]["heldout_nats_per_byte"] for one in of_seeds])
        )
        assert curve["tokens"][-1] == np.mean([one[-1]["tokens"] for one in of_seeds])
        assert all(np.diff(curve[axis]).min() >= 0 for axis in ("tokens", "operations", "seconds"))


def test_a_repeated_study_is_cached_and_makes_nothing(finished, given: dict):
    before = {path: path.stat().st_mtime_ns for path in finished.page.path.parents[1].glob("*/*/stage.json")}
    again = carried_out(**given)
    assert again.page == finished.page
    assert {name.partition("/")[0] for name in again.made} <= {"pretrain"}, "those that failed, again"
    assert len(again.made) == 2
    assert Counter(state for _, state in again.states) == {"Cached": len(finished.made) - 2, "Failed": 2}
    assert {path: path.stat().st_mtime_ns for path in finished.page.path.parents[1].glob("*/*/stage.json")} == before


def test_if_all_runs_fail_the_study_does(finished, given: dict, tmp_path: Path):
    (tmp_path / "all.json").write_text(
        json.dumps({"runs": {"a": RUNS["diverges"], "b": {"pretrain": SGD | {"clip": 9e9}}}})
    )
    before = artifacts("study")
    with pytest.raises(InputError, match=r"pretrain\.learning_rate"):
        study(**given | {"study": str(tmp_path / "all.json"), "seeds": 1})
    assert artifacts("study") == before


def test_a_run_that_can_never_begin_is_told_before_and_the_others_run(finished, given: dict, tmp_path: Path, caplog):
    runs = {"gone": {"download": {"source": "files", "files": [f"{tmp_path}/gone.jsonl"]}}, "own": {}}
    (tmp_path / "gone.json").write_text(json.dumps({"runs": runs}))
    done = carried_out(**given | {"study": str(tmp_path / "gone.json"), "seeds": 1})
    rows = rows_of(done.page)
    assert rows["model"].ne("").tolist() == [False, True]
    assert "gone.jsonl" in rows["problem"][0]
    assert [name.partition("/")[0] for name in done.made] == ["study"]
    assert "gone.jsonl" in caplog.text
    text = (done.page.path / "study.md").read_text()
    assert "±" not in text.replace("difference ± error", "")
    assert strictly(done.page.path / "study.json")["summary"][1]["nats_per_byte"] == rows["nats_per_byte"][1]


def test_a_study_killed_twice_ends_as_one_left_alone(finished, given: dict, tmp_path: Path):
    calls, settled, step, settle = iter(range(1000)), [], pretraining.Pretraining.step, Plan.settle

    def in_training(run, fraction) -> None:
        if next(calls) == 8:  # of the second model
            raise KeyboardInterrupt
        step(run, fraction)

    def after_a_model(plan, which, artifact, *cached) -> None:
        settle(plan, which, artifact, *cached)
        settled.append(artifact.stage)
        if settled.count("pretrain") == 3:
            raise KeyboardInterrupt

    names = ["own", "half the rate"]
    alone = rows_of(finished.page)
    alone = alone[alone["run"].isin(names)]
    (tmp_path / "killed.json").write_text(json.dumps({"runs": {name: RUNS[name] for name in names}}))
    given = given | {"study": str(tmp_path / "killed.json")}
    with store_of_its_own(tmp_path / "artifacts"), pytest.MonkeyPatch.context() as patch:
        patch.setenv("CRAM_ARTIFACTS", str(tmp_path / "artifacts"))
        for owner, name, kill, left in (
            (pretraining.Pretraining, "step", in_training, 1),
            (Plan, "settle", after_a_model, 3),
        ):
            with patch.context() as killing:
                killing.setattr(owner, name, kill)
                with pytest.raises(KeyboardInterrupt):
                    study(**given)
            assert len(artifacts("pretrain")) == left
            assert artifacts("study") == []
        ended = rows_of(study(**given))
        assert len(artifacts("pretrain")) == 4
    timed = ["seconds", "tokens_per_second", "mfu"]
    pd.testing.assert_frame_equal(
        ended.drop(columns=timed), alone.drop(columns=timed), check_exact=True, check_dtype=False
    )


def test_a_study_until_the_report_compares_scores(finished, given: dict, tmp_path: Path):
    runs = {name: RUNS[name] for name in ("own", "half the rate", "diverges")}
    (tmp_path / "scores.json").write_text(json.dumps({"runs": runs}))
    override = given["override"]
    files = [*override["download"]["files"], given["study"].replace("small.json", "other.jsonl")]
    more = override | {"download": override["download"] | {"files": files}}  # for the examples of the task
    more["tokenize"] = override["tokenize"] | {"heldout_fraction": 0.45}
    done = carried_out(
        **given | {"study": str(tmp_path / "scores.json"), "override": more, "seeds": 1, "until": "report"}
    )
    counts = Counter(name.partition("/")[0] for name in done.made)
    assert counts == dict.fromkeys(SHARED, 1) | {"pretrain": 3, "finetune": 2, "report": 2, "study": 1}
    rows, text = rows_of(done.page), (done.page.path / "study.md").read_text()
    for row in rows[rows["report"].ne("")].to_dict("records"):
        stage, _, key = row["report"].partition("/")
        about = json.loads((Artifact(stage=stage, key=key).path / "report.json").read_text())
        [score] = (one["score"] for one in about["scores"] if one["pretrained"])
        assert row["score: neighbours"] == score
        assert about["title"] == row["run"]
        assert re.search(rf"\| {row['run']} .*\| *{score:.1f} *\|", text.split("## Scores")[1])
    assert rows["report"].ne("").tolist() == [True, True, False]
    means = strictly(done.page.path / "study.json")["summary"]
    assert means[1]["score: neighbours difference"] == pytest.approx(
        rows["score: neighbours"][1] - rows["score: neighbours"][0]
    )


def show(*arguments: str) -> str:
    """What a command prints that ends well."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_command_runs_a_study_and_prints_its_table(finished, given: dict, monkeypatch):
    monkeypatch.setattr(
        "flows.cli.study.prefect_server", lambda default: contextlib.nullcontext()
    )  # that of the module
    monkeypatch.setattr("flows.logs.log_to_terminal", lambda: None)
    override = json.dumps(given["override"])
    printed = show("study", given["study"], "--recipe", "demo", "--seeds", "2", "--override", override)
    for name in DONE:
        assert name.split()[0] in printed
    assert f"{finished.page.path}/study.html" in printed


def test_studies_and_evaluations_are_listed_and_shown(finished):
    [line] = (line for line in show("ls", "study").splitlines() if finished.page.key in line)
    assert "10 runs, 2 failed" in line
    assert finished.page.key in show("ls")
    shown = show("show", finished.page.name)
    assert "diverges" in shown
    for artifact in artifacts("evaluate"):
        assert artifact.key in show("ls", "evaluate")
        assert '"digest"' in show("show", artifact.name)


def test_the_list_of_studies_names_each_with_its_runs_and_runs_nothing(finished, monkeypatch):
    monkeypatch.setattr(Plan, "carry_out", lambda *_: pytest.fail("a stage was run"))
    monkeypatch.setattr("flows.study.usual_rate", lambda: 1e12)
    before = sorted(finished.page.path.parents[1].rglob("*"))
    printed = " ".join(show("study", "--list").split())
    for name, about in STUDIES.items():
        count, names = re.search(
            rf"\b{name} (\d+) runs, about .*? Runs: (.*?)( \w+ \d+ runs, about|$)", printed
        ).groups()[:2]
        assert int(count) == len(names.split("; ")) > len(about["runs"]) / 2, "some are the recipe itself"
        assert {own for name in names.split("; ") for own in name.split(" = ")} == set(about["runs"])
    two = " ".join(show("study", "masking", "--list", "--seeds", "2", "--scale", "1 hours").split())
    assert "masking 22 runs, about 22 hours" in two
    assert "vocabulary" not in two
    assert sorted(finished.page.path.parents[1].rglob("*")) == before


def test_the_list_shows_the_path_of_a_study_as_it_is(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("flows.study.usual_rate", lambda: 1e12)
    path = tmp_path / "a [x]" / "b[" / "y].JSON"
    path.parent.mkdir(parents=True)
    path.write_text("\ufeff" + json.dumps({"runs": {"own": {}}}), encoding="utf-8")
    assert str(path) in show("study", "--list", str(path)).replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "masking"),
        (["maskin"], "'maskin' masking?"),
        (["masking", "--until", "filter"], "--until 'filter'"),
        (["masking", "--scale", "week"], "'week'"),
        (["masking", "--scale", "0.4 tokens"], "'0.4 tokens' token"),
        (["masking", "--recipe", "modrn"], "'modrn' modern?"),
        (["masking", "--override", "{"], "--override"),
        (["gone.json", "--list"], "gone.json"),
    ],
)
def test_the_command_refuses_what_it_cannot_run_and_names_it(monkeypatch, arguments: list[str], words: str):
    monkeypatch.setattr("flows.cli.study.prefect_server", lambda default: pytest.fail("a server was started"))
    monkeypatch.setattr("flows.study.usual_rate", lambda: 1e12)
    error = CliRunner().invoke(app, ["study", *arguments]).exception
    assert isinstance(error, InputError)
    for word in words.split():
        assert word in str(error)


def model(root: Path, number: int, loss: float, size: float = 1e5, tokens: int = 10_000, **stats: object) -> str:
    """The name of a pretrain artifact with this loss per byte, put into the store; `size`: operations per token / 6."""
    value = {"value": loss, "standard_error": 0.01}
    held = {f"nats_per_{unit}": value for unit in ("byte", "character", "word")} | {"digest": "d"}
    held["length_nats_per_byte"] = 0.1
    about = {
        "heldout": held,
        "parameters": 2 * size,
        "tokens": tokens,
        "steps": 10,
        "tokens_per_second": 1e3,
        "mfu": 0.1,
    }
    about |= {"exaflops": 6 * size * tokens / 1e18, "seconds_on_the_clock": 5.0, "machine": {"device": "CPU"}}
    about |= {"evaluations": [{"fraction": 1.0}]} | stats
    folder = root / "pretrain" / f"{number:012}"
    folder.mkdir(parents=True)
    params = {"budget": tokens, "budget_unit": "tokens"}
    manifest = {"stage": "pretrain", "files": [], "stats": about, "params": params, "inputs": {}}
    (folder / "stage.json").write_text(json.dumps(manifest))
    return f"pretrain/{number:012}"


def compared(members: list[Member], **about) -> Artifact:
    """The page of these runs."""
    names = dict.fromkeys(member.model for member in members if member.model)
    models = [Artifact(stage="pretrain", key=name.partition("/")[2]) for name in names]
    return compare_runs.fn(StudyReport(title="Study: made up", members=members, **about), models, [], [])


@pytest.fixture
def empty(tmp_path: Path):
    """A store of its own for a test."""
    with store_of_its_own(tmp_path / "artifacts"):
        yield tmp_path / "artifacts"


def test_runs_of_one_seed_have_no_spread_and_the_page_says_so(empty: Path):
    members = [Member(run=name, model=model(empty, i, 1 + i)) for i, name in enumerate(("one", "two"))]
    made = compared(members, published={"two": "costs a lot"})
    text = (made.path / "study.md").read_text()
    assert "±" not in text
    assert "one seed" in text
    assert re.search(r"\| two .*\| *2\.0000 \| *\+1\.0000 \|.*costs a lot", text)
    for row in made.stats["table"]:
        assert not any("±" in str(cell) for cell in row.values())
    lines = strictly(made.path / "study.json")["summary"]
    assert [line["nats_per_byte deviation"] for line in lines] == [None, None]
    assert lines[1]["nats_per_byte error"] is None
    assert "unequal budgets" not in text
    assert "different machines" not in text


def test_a_failed_seed_leaves_the_statistics_to_the_others(empty: Path):
    members = [Member(run="one", seed=n, model=model(empty, n, loss)) for n, loss in enumerate((1.0, 1.2, 1.7))]
    members += [Member(run="two", seed=n, model=model(empty, 5 + n, loss)) for n, loss in enumerate((0.9, 1.0))]
    members += [Member(run="two", seed=2, problem="It was killed. Sorry.")]
    [one, two] = strictly((made := compared(members)).path / "study.json")["summary"]
    assert (one["seeds"], two["seeds"], two["failed"]) == (3, 2, 1)
    error = math.sqrt(np.var([1.0, 1.2, 1.7], ddof=1) / 3 + np.var([0.9, 1.0], ddof=1) / 2)
    assert two["nats_per_byte error"] == pytest.approx(error)
    assert "two, seed 2: It was killed. Sorry." in (made.path / "study.md").read_text()
    assert made.stats["table"][1]["problem"] == "It was killed"


def test_the_error_of_a_difference_of_scores_is_of_the_seeds_that_have_a_score():
    scores = {"one": [50.0, 53.0, 51.0], "two": [60.0, 64.0, math.nan]}
    rows = [
        {
            "run": run,
            "seed": n,
            "model": f"{run}{n}",
            "problem": "",
            "nats_per_byte": 1.0 + n,
            "nats_per_character": 1.0,
        }
        | {"score: average": math.nan, "score: rte": score}
        for run, own in scores.items()
        for n, score in enumerate(own)
    ]
    [one, two] = summary(pd.DataFrame(rows)).to_dict("records")
    assert (one["score: rte"], two["score: rte"], two["score: rte difference"]) == (
        pytest.approx(154 / 3),
        62.0,
        pytest.approx(62 - 154 / 3),
    )
    welch = ttest_ind(scores["two"][:2], scores["one"], equal_var=False)
    assert two["score: rte error"] == pytest.approx(two["score: rte difference"] / welch.statistic)
    assert two["nats_per_byte error"] == pytest.approx(math.sqrt(2 / 3))
    assert "score: average" not in one, "no run has one"


def test_costs_stand_in_units_that_fit_the_largest_run(empty: Path):
    spent = {"exaflops": 7e-6, "seconds_on_the_clock": 90.0}
    members = [Member(run="short", model=model(empty, 1, 1.0, exaflops=7e-9, seconds_on_the_clock=3.0))]
    members += [Member(run="long", model=model(empty, 2, 1.0, **spent)), Member(run="none", problem="It failed.")]
    page = compared(members)
    text = (page.path / "study.md").read_text()
    assert "teraFLOP" in text
    assert [row["minutes"] for row in page.stats["table"]] == ["0.05", "1.5", ""]
    longer = compared([Member(run="day", model=model(empty, 3, 1.0, exaflops=2.0, seconds_on_the_clock=86_400.0))])
    assert "exaFLOP" in (longer.path / "study.md").read_text()
    assert longer.stats["table"][0]["hours"] == "24"


def test_other_budgets_and_machines_are_noted(empty: Path):
    members = [Member(run="one", model=model(empty, 1, 1.0))]
    members += [Member(run="two", model=model(empty, 2, 1.0, tokens=20_000, machine={"device": "GPU"}))]
    notes = (compared(members).path / "study.md").read_text()
    assert "10,000 tokens, 20,000 tokens" in notes
    assert "CPU, GPU" in notes
    assert "curves" not in notes, "there are none"
    members.append(Member(run="three", model=model(empty, 3, 1.0, tokens=9000)))
    assert "9,000 tokens, 10,000 tokens, 20,000 tokens" in (compared(members).path / "study.md").read_text()


def test_names_stand_in_pictures_as_they_are(empty: Path):
    places = ({"fraction": x, "heldout_nats_per_byte": 2 - x} | dict.fromkeys(AXES, 9 * x) for x in (0.0, 1.0))
    curve, names = {"evaluations": [*places]}, ["_under", "10 % of $ & 5 % of $", r"$\frac{$", "ü < &amp;"]
    members = [Member(run=name, model=model(empty, i, 1.0, **curve)) for i, name in enumerate(names)]
    picture = (compared(members).path / "tokens.svg").read_text()
    shown = [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", picture)]
    assert [text.lstrip("\N{ZERO WIDTH SPACE}") for text in shown][-len(names) :] == names


def test_an_artifact_that_is_not_among_the_inputs_is_refused(empty: Path):
    member = Member(run="one", model=model(empty, 1, 1.0))
    with pytest.raises(InputError, match=f"{member.model}.*'one'"):
        compare_runs.fn(StudyReport(title="x", members=[member]), [], [], [])


def lawful(size: float, tokens: float) -> float:
    return 0.6 + 0.4 * (size / 1e5) ** -0.3 + 0.5 * (tokens / 1e4) ** -0.3


def sized(root: Path, pairs: list[tuple[float, int]]) -> list[Member]:
    """Runs of these sizes and tokens, whose losses follow a law, and one that differs otherwise."""
    field = {"pretrain.architecture.layers": 2, "pretrain.budget": 5.0}
    members = [
        Member(run=f"run {i}", model=model(root, i, lawful(*pair), *pair), changes=field if i else {})
        for i, pair in enumerate(pairs)
    ]
    other = model(root, 99, 9.0, 3e5, 30_000)
    return [*members, Member(run="other", model=other, changes=field | {"pretrain.mask_fraction": 0.4})]


def test_the_law_of_runs_that_differ_in_size_only_stands_on_the_page_with_its_test_and_predictions(empty, monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 6)
    pairs = [(size, tokens) for size in (1e5, 2e5, 4e5) for tokens in (10_000, 30_000, 90_000)] + [(16e5, 200_000)]
    card = Card(name="A card", operations=6 * 1e6 * 1e6, size=1e6)
    made = compared(sized(empty, pairs), fit=True, cards=[card])
    about = strictly(made.path / "study.json")["law"]
    assert about["runs"] == len(pairs)
    assert about["residual"] < 1e-4
    assert about["test"]["largest"] == "run 9"
    assert (about["test"]["runs"], about["test"]["measured"]) == (9, lawful(*pairs[-1]))
    assert abs(about["test"]["error"]) < 1e-3
    [found] = about["predictions"]
    assert found["tokens"] == 1e6
    assert found["loss"] == pytest.approx(lawful(1e6, 1e6), rel=2e-3)
    text = (made.path / "study.md").read_text()
    for words in ("## Scaling law", "A card", f"{about['test']['loss']:.4f}", f"{found['loss']:.4f}", "run 9"):
        assert words in text
    assert (made.path / "law.svg").exists()
    assert "law.svg" not in (made.path / "study.html").read_text(), "the picture is in the page"


def test_without_enough_finished_sizes_there_is_no_law_and_the_page_says_what_it_needs(empty: Path):
    pairs = [(1e5, 10_000), (1e5, 20_000), (2e5, 10_000), (2e5, 20_000)]
    members = sized(empty, pairs)
    again = [member.model_copy(update={"seed": 1}) for member in members[:2]]
    failed = [Member(run=f"late {n}", problem="It failed.", changes={"pretrain.budget": 7.0 + n}) for n in range(3)]
    made = compared([*members, *again, *failed], fit=True)
    assert strictly(made.path / "study.json")["law"] == {"runs": 4, "needed": law.FEWEST, "left_out": []}
    text = (made.path / "study.md").read_text()
    assert "No law was fitted" in text
    assert f"needs {law.FEWEST} " in text
    assert not (made.path / "law.svg").exists()


def test_runs_that_read_no_context_are_named_and_left_out_of_the_law(empty: Path, monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 6)
    pairs = [(size, tokens) for size in (1e5, 2e5, 4e5) for tokens in (30_000, 90_000)]
    held = {"value": 1.0, "standard_error": 0.01}
    known = {f"nats_per_{unit}": held for unit in ("character", "word")} | {"digest": "d", "length_nats_per_byte": 0.1}
    known["by_frequencies"] = {"nats_per_byte": 2.0}
    members = []
    for n, (pair, loss) in enumerate([*((pair, lawful(*pair)) for pair in pairs), ((1e5, 5_000), 1.85)]):
        heldout = known | {"nats_per_byte": held | {"value": loss}}
        changes = {"pretrain.budget": 5.0} if n else {}
        members.append(Member(run=f"run {n}", model=model(empty, n, loss, *pair, heldout=heldout), changes=changes))
    made = compared(members, fit=True)
    about = strictly(made.path / "study.json")["law"]
    assert (about["runs"], about["left_out"], about["residual"] < 1e-4) == (6, ["run 6"], True)
    text = (made.path / "study.md").read_text()
    assert "The loss of run 6 is more than nine tenths of what token frequencies alone give" in text
    assert "Left out of the fit" in text
    few = compared(members[2:], fit=True)
    assert strictly(few.path / "study.json")["law"] == {"runs": 4, "needed": law.FEWEST, "left_out": ["run 6"]}
    assert "without run 6" in (few.path / "study.md").read_text()


def test_the_stages_of_a_study_are_none_of_a_recipe():
    assert not {"study", "evaluate"} & set(STAGES)
    for name in ("study", "evaluate"):
        error = CliRunner().invoke(app, ["run", "demo", "--until", name]).exception
        assert isinstance(error, InputError)
        assert f"'{name}'" in str(error)


def test_models_that_may_know_the_held_out_text_are_measured_on_what_all_hold_out(server, empty: Path, given: dict):
    runs = {"base": {}, "few held": {"tokenize": {"heldout_fraction": 0.15}}}
    file = Path(given["study"]).with_name("held.json")
    file.write_text(json.dumps({"runs": runs}))
    rows = rows_of(study(study=str(file), recipe="demo", override=given["override"])).set_index("run")
    assert rows["digest"].nunique() == 1
    texts = [set(pd.read_parquet(empty / row["model"] / "heldout.parquet")["id"]) for row in rows.to_dict("records")]
    measured = [
        set(pd.read_parquet(empty / row["evaluation"] / "documents.parquet")["id"]) for row in rows.to_dict("records")
    ]
    assert measured[0] == measured[1] == texts[0] & texts[1] != texts[0]


def test_scores_and_failures_are_told_by_seed(empty: Path):
    members = [Member(run="one", seed=n, model=model(empty, n, loss)) for n, loss in enumerate((1.0, 1.2))]
    members += [Member(run="two", problem="It failed."), Member(run="two", seed=1, model=model(empty, 9, 0.9))]
    page = compared(members)
    assert [row["seeds"] for row in page.stats["table"]] == [2, "1 of 2"]
    swapped = (compared(members[2:] + members[:2]).path / "study.md").read_text()
    assert "differences are to one" not in swapped
    assert "two, seed 0: It failed." in swapped
    members += [Member(run="three", seed=n, problem="No text.") for n in range(2)]
    members += [Member(run="four", seed=n, problem="Late." if n else "") for n in range(3)]
    text = (compared(members).path / "study.md").read_text()
    assert text.count("three: No text.") == 1
    assert "four, seeds 1, 2: Late." in text
    first = [Member(run="none", problem="It failed."), *members[:2]]
    assert "differences are to one" in (compared(first).path / "study.md").read_text()
