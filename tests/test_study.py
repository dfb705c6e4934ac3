"""Studies through the real flow: shared stages once, failed runs told, kills survived; and their page."""

import html
import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import check_golden, store_of_its_own, tiny_override, write_jsonl, write_pairs
from scipy.stats import ttest_ind
from typer.testing import CliRunner

from flows.cli.main import app
from flows.recipes.recipe import STAGES
from flows.recipes.studies import STUDIES
from flows.study import study
from model import heldout
from model.errors import InputError
from tasks import stage as stage_module
from tasks.adopt import START_LINEAGE
from tasks.compare import AXES, Compare, Member, compare
from tasks.evaluate import Evaluate, evaluate
from tasks.reports import law, study_page
from tasks.reports.rows import LOSS, Mean, RunMeans
from tasks.reports.study_verdicts import best_loss, loss_difference
from tasks.store.artifacts import Artifact, artifact_named, artifacts_of

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
MODELS = 2 * len(DONE)
MADE = dict.fromkeys(("download", "deduplicate", "decontaminate", "measure", "filter", "evaluate"), 2)
MADE |= {"vocabulary": 3, "tokenize": 3, "pretrain": MODELS, "compare": 1}
PICTURES = {"losses.svg", "tokens.svg", "operations.svg", "seconds.svg"}
PAGE = {"study.html", "study.md", "study.json", "runs.parquet", *PICTURES}


@pytest.fixture(scope="module")
def given(tmp_path_factory, toy_texts: list[str]) -> dict:
    """The parameters of a small study, on the texts of two files."""
    folder = tmp_path_factory.mktemp("text")
    shard, other = (
        write_jsonl(folder / f"{name}.jsonl", texts)
        for name, texts in (("toy", toy_texts[:180]), ("other", toy_texts[120:]))
    )
    override = tiny_override(shard, budget=1500, budget_unit="tokens") | {"vocabulary": {"entries": 350}}
    given = {"study": str(folder / "small.json"), "recipe": "demo", "override": override, "seeds": 2}
    about = json.dumps({"about": "What matters.", "runs": RUNS})
    Path(given["study"]).write_text(about.replace("OTHER", str(other)), encoding="utf-8")
    return given


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The store of this module's studies."""
    root = tmp_path_factory.mktemp("store") / "artifacts"
    with store_of_its_own(root):
        yield root


@pytest.fixture(scope="module")
def finished(store, given: dict) -> Artifact:
    """The page of the small study."""
    return study.fn(**given)


def written(given: dict, name: str, runs: dict, **changed: object) -> dict:
    """The parameters of a study of these runs, in a file of that name beside the small study's."""
    path = Path(given["study"]).with_name(f"{name}.json")
    path.write_text(json.dumps({"runs": runs}))
    return given | {"study": str(path)} | changed


def everything() -> list[Artifact]:
    return [artifact for name in (*STAGES, "evaluate", "compare") for artifact in artifacts_of(name)]


def rows_of(page: Artifact) -> pd.DataFrame:
    return pd.read_parquet(page.path / "runs.parquet")


def text_of(page: Artifact) -> str:
    return (page.path / "study.md").read_text()


def json_of(page: Artifact) -> dict:
    """The page for programs, which every reader of JSON takes."""
    text = (page.path / "study.json").read_text()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_stages_that_runs_share_were_run_once(finished):
    assert Counter(artifact.stage for artifact in everything()) == MADE


def test_a_plan_says_whether_the_runs_and_their_page_are_there(store, finished, given: dict):
    runs = json.loads(Path(given["study"]).read_text(encoding="utf-8"))["runs"]
    asked = written(given, "good", {name: runs[name] for name in ("own", "half the rate", "other text")})
    options = ["--recipe", asked["recipe"], "--override", json.dumps(asked["override"]), "--seeds", "2", "--plan"]
    states = [CliRunner().invoke(app, ["study", asked["study"], *options])]
    page = study.fn(**asked)
    before = len(everything())
    states += [CliRunner().invoke(app, ["study", asked["study"], *options])]
    assert [state.exit_code for state in states] == [3, 0]
    assert all(page.key in state.stdout and "evaluate [other text, seed 1]" in state.stdout for state in states)
    assert states[0].stdout.count("to do") == 1
    assert len(everything()) == before


def test_the_page_has_its_files_loads_nothing_and_names_merged_runs_by_both_names(finished):
    assert {path.name for path in finished.path.iterdir()} >= PAGE
    page = (finished.path / "study.html").read_text()
    assert page.count("<svg") == len(PICTURES)
    assert "src=" not in page
    assert "own = the same" in page


def test_a_repeated_study_makes_nothing(finished, given: dict):
    before = {path: path.stat().st_mtime_ns for path in finished.path.parents[1].glob("*/*/stage.json")}
    assert study.fn(**given) == finished
    assert {path: path.stat().st_mtime_ns for path in finished.path.parents[1].glob("*/*/stage.json")} == before


def test_the_table_has_a_row_for_each_run_and_seed_with_the_losses_of_their_models(finished):
    rows = rows_of(finished)
    assert [*zip(rows["run"], rows["seed"], strict=True)] == [(name, n) for name in [*DONE, "diverges"] for n in (0, 1)]
    for row in rows[rows["run"].isin(DONE)].to_dict("records"):
        stats, params = (artifact_named(row["model"]).manifest[name] for name in ("stats", "params"))
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
    assert rows["model"][rows["model"].ne("")].nunique() == MODELS


def test_a_run_that_fails_stops_no_other_and_is_told(finished):
    rows = rows_of(finished)
    failed = rows[rows["problem"].ne("")]
    assert (failed["run"].tolist(), failed["model"].tolist()) == (["diverges"] * 2, [""] * 2)
    for problem in failed["problem"]:
        assert "pretrain.learning_rate" in problem
        assert problem in text_of(finished)
    assert finished.stats["failed"] == 2


def test_a_run_on_another_text_is_measured_on_that_of_the_first_run(finished):
    rows = rows_of(finished).set_index(["run", "seed"])
    text = artifact_named(rows.loc[("own", 0), "model"])
    for seed in (0, 1):
        row = rows.loc[("other text", seed)]
        model = artifact_named(row["model"])
        found = evaluate.fn(Evaluate(), model, text, [])
        assert row["evaluation"] == found.name
        for unit in ("word", "character", "byte"):
            assert row[f"nats_per_{unit}"] == found.stats[f"nats_per_{unit}"]["value"]
        assert row["digest"] == text.stats["heldout"]["digest"] != model.stats["heldout"]["digest"]
    assert rows["digest"].dropna().nunique() == 1
    assert [*json_of(finished)["curves"]] == [name for name in DONE if name != "other text"]
    assert "Not all runs have the same held-out text" in text_of(finished)


def test_a_curve_is_the_mean_of_those_of_the_seeds(finished):
    rows = rows_of(finished)
    for name, curve in json_of(finished)["curves"].items():
        ends = [artifact_named(model).stats["evaluations"][-1] for model in rows[rows["run"] == name]["model"]]
        for axis in ("heldout_nats_per_byte", "tokens"):
            assert curve[axis][-1] == pytest.approx(np.mean([end[axis] for end in ends]))
        assert all(np.diff(curve[axis]).min() >= 0 for axis in ("tokens", "operations", "seconds"))


def test_if_all_runs_fail_the_study_does(finished, given: dict):
    runs = {"a": RUNS["diverges"], "b": {"pretrain": SGD | {"clip": 9e9}}}
    before = artifacts_of("compare")
    with pytest.raises(InputError, match=r"pretrain\.learning_rate"):
        study.fn(**written(given, "all", runs, seeds=1))
    assert artifacts_of("compare") == before


def test_a_run_that_can_never_begin_is_told_before_and_the_others_run(finished, given: dict, caplog):
    runs = {"gone": {"download": {"source": "files", "files": ["gone.jsonl"]}}, "own": {}}
    runs["five heads"] = {"pretrain": {"architecture": {"heads": 5}}}
    before = everything()
    page = study.fn(**written(given, "gone", runs, seeds=1))
    rows = rows_of(page)
    assert rows["run"].tolist() == [*runs]
    assert rows["model"].ne("").tolist() == [False, True, False]
    for place, word in ((0, "gone.jsonl"), (2, "heads")):
        assert word in rows["problem"][place]
        assert word in caplog.text
    assert set(everything()) - set(before) == {page}
    assert "±" not in text_of(page)
    assert json_of(page)["summary"][1]["nats_per_byte"] == rows["nats_per_byte"][1]


def test_a_run_whose_model_is_hollow_is_told_before_and_the_others_run(finished, given: dict, caplog):
    rows = rows_of(finished).set_index(["run", "seed"])
    model = artifact_named(rows.loc[("half the rate", 0), "model"])
    manifest = (model.path / "stage.json").read_text()
    weights = model.path / "model.safetensors"
    kept = weights.read_bytes()
    asked = written(given, "hollow", {name: RUNS[name] for name in ("own", "half the rate")}, seeds=1)
    (model.path / "stage.json").write_text(json.dumps(json.loads(manifest) | {"hollow": [weights.name]}))
    weights.unlink()  # as `cram pull` leaves it
    options = ["--recipe", asked["recipe"], "--override", json.dumps(asked["override"]), "--plan"]
    planned = CliRunner().invoke(app, ["study", asked["study"], *options]).stdout
    page = study.fn(**asked)
    (model.path / "stage.json").write_text(manifest)
    weights.write_bytes(kept)
    assert rows_of(page)["model"].ne("").tolist() == [True, False]
    for said in (rows_of(page)["problem"][1], caplog.text, planned):
        assert f"{model.name} is hollow" in said
        assert "rebuilds it" not in said, "another training has another result"


def test_a_study_that_was_interrupted_ends_as_one_left_alone(finished, given: dict, tmp_path: Path):
    make = stage_module.StageTask.make
    runs = {name: RUNS[name] for name in ("own", "half the rate")}

    def make_or_die(stage, artifact, *rest) -> None:
        make(stage, artifact, *rest)
        if artifacts_of("pretrain"):
            raise KeyboardInterrupt

    parameters = written(given, "killed", runs, seeds=1)
    alone = rows_of(finished)
    with store_of_its_own(tmp_path / "artifacts"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage_module.StageTask, "make", make_or_die)
            with pytest.raises(KeyboardInterrupt):
                study.fn(**parameters)
        assert len(artifacts_of("pretrain")) == 1
        assert artifacts_of("compare") == []
        ended = rows_of(study.fn(**parameters))
        assert len(artifacts_of("pretrain")) == 2
    timed = ["seconds", "tokens_per_second", "mfu"]
    expected = alone[alone["run"].isin(runs) & alone["seed"].eq(0)].drop(columns=timed).reset_index(drop=True)
    pd.testing.assert_frame_equal(ended.drop(columns=timed), expected, check_exact=True, check_dtype=False)


@pytest.fixture(scope="module")
def scored(finished, given: dict) -> tuple[Artifact, Counter]:
    """The page of a study until the report, and how many artifacts of each stage it made."""
    files = [*given["override"]["download"]["files"], given["study"].replace("small.json", "other.jsonl")]
    more = given["override"] | {"download": given["override"]["download"] | {"files": files}}  # examples of the task
    more["tokenize"] = more["tokenize"] | {"heldout_fraction": 0.45}
    more["finetune"] = more["finetune"] | {"baseline": True}
    more["minimal_pairs"] = {"data": [str(write_pairs(Path(given["study"]).with_name("pairs.csv")))]}
    runs = {name: RUNS[name] for name in ("own", "half the rate", "diverges")}
    before = everything()
    page = study.fn(**written(given, "scores", runs, override=more, seeds=1, until="report"))
    return page, Counter(artifact.stage for artifact in set(everything()) - set(before))


def test_a_study_until_the_report_compares_scores(scored):
    page, made = scored
    assert made == dict.fromkeys(STAGES, 1) | {
        "pretrain": 2, "minimal_pairs": 2, "finetune": 4, "report": 2, "compare": 1,
    }  # fmt: skip
    rows = rows_of(page)
    for row in rows[rows["report"].ne("")].to_dict("records"):
        about = json.loads((artifact_named(row["report"]).path / "report.json").read_text())
        [score] = (one["score"] for one in about["scores"] if one["pretrained"])
        assert row["score: neighbours"] == score
        assert about["title"] == row["run"]
        assert re.search(rf"\| {row['run']} .*\| *{score:.1f} *\|", text_of(page).split("## Scores")[1])
    assert rows["report"].ne("").tolist() == [True, True, False]
    difference = rows["score: neighbours"][1] - rows["score: neighbours"][0]
    assert json_of(page)["summary"][1]["score: neighbours difference"] == pytest.approx(difference)


def test_a_report_of_a_real_run_on_a_probe_has_a_funnel_that_adds_up_and_nothing_called_glue(scored):
    row = rows_of(scored[0]).iloc[0]
    folder = artifact_named(row["report"]).path
    page = (folder / "report.md").read_text()
    sections = re.findall("^##+ (.*)$", page, flags=re.M)
    assert {"Scores", "Data funnel", "Lineage"} <= set(sections)
    assert [name for name in sections if "GLUE" in name] == ["Probes (these are not GLUE)"]
    about = json.loads((folder / "report.json").read_text())
    held_out = "\n".join(pd.read_parquet(artifact_named(row["model"]).path / "heldout.parquet")["text"])
    assert about["blanks"]
    for blank in about["blanks"]:
        assert blank["before"] + blank["word"] + blank["after"] in held_out
    [answers] = about["examples"]
    right = sum(counts[i] for i, counts in enumerate(about["confusion"]["neighbours"]))
    assert answers["examples"] - answers["mistakes"] == right
    assert about["average"] is None
    assert about["contamination"]["checked"] is True  # for the minimal pairs
    passed = {line["stage"]: line["documents"] for line in about["funnel"]}
    assert passed["download"] > passed["deduplicate"] == passed["decontaminate"] >= passed["filter"]
    assert passed["tokenize"] + passed["held out"] == passed["filter"]
    for name in about["artifacts"]:
        assert f"[{name}](../../{name}/)" in page
        assert (folder.parents[1] / name / "stage.json").exists()
    pretrained, random = (artifact_named(name).stats for name in about["artifacts"] if name.startswith("finetune/"))
    assert (pretrained["pretrained"], random["pretrained"]) == (True, False)
    assert pretrained["epochs"] != random["epochs"], "it begins from other weights"
    card = (folder / "README.md").read_text()
    without_scores = (artifact_named(row["model"]).path / "README.md").read_text()
    assert set(without_scores.splitlines()) <= set(card.splitlines())
    assert "## Minimal pairs" in card


def test_pairs_that_one_run_cannot_read_cost_it_only_their_score(finished, given: dict):
    path = Path(given["study"]).with_name("long.csv")
    path.write_text("good,bad\n猫 sleeps,猫 sleep\n猫,犬\n", encoding="utf-8")
    runs = {"ascii": {}, "unicode": {"vocabulary": {"characters": "unicode"}}}
    asked = written(given, "readable", runs, seeds=1, until="minimal_pairs")
    asked["override"] = given["override"] | {"minimal_pairs": {"data": [str(path)]}}
    rows = rows_of(study.fn(**asked)).set_index("run")
    assert rows["nats_per_byte"].notna().all()
    assert "猫" in rows.loc["ascii", "problem"]
    assert not rows.loc["unicode", "problem"]


def test_models_that_may_know_the_held_out_text_are_measured_on_what_all_hold_out(finished, given: dict):
    runs = {"base": {}} | {str(share): {"tokenize": {"heldout_fraction": share}} for share in (0.15, 0.01)}
    *rows, apart = rows_of(study.fn(**written(given, "held", runs, seeds=1))).to_dict("records")
    held = [pd.read_parquet(artifact_named(row["model"]).path / "heldout.parquet") for row in rows]
    texts = [set(of_model["id"][of_model["shared_words"] == 0]) for of_model in held]
    measured = [
        set(pd.read_parquet(artifact_named(row["evaluation"]).path / "documents.parquet")["id"]) for row in rows
    ]
    assert measured[0] == measured[1] == texts[0] & texts[1] != texts[0]
    assert rows[0]["digest"] == rows[1]["digest"]
    assert math.isnan(apart["nats_per_byte"]), "it holds out hardly any of these documents"
    assert rows[0]["model"] in apart["problem"]


def show(*arguments: str) -> str:
    """What a command prints that ends well."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_commands_run_a_study_and_list_and_show_it(finished, given: dict):
    override = json.dumps(given["override"])
    options = ["--recipe", "demo", "--override", override]
    done = CliRunner().invoke(app, ["study", given["study"], "--seeds", "2", *options])
    printed = done.stdout
    assert done.exit_code == 1, "runs failed"
    impossible = written(given, "some", {"own": {}, "five heads": {"pretrain": {"architecture": {"heads": 5}}}})
    show("study", impossible["study"], *options)
    for name in DONE:
        assert name.split()[0] in printed
    assert f"{finished.path}/study.html" in printed
    [line] = (line for line in show("ls", "compare").splitlines() if finished.key in line)
    assert "10 runs, 2 failed" in line
    assert "diverges" in show("show", finished.name)


def test_the_list_of_studies_names_each_with_its_runs_and_runs_nothing(finished, tmp_path: Path):
    before = sorted(finished.path.parents[1].rglob("*"))
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
    own = tmp_path / "a [x]" / "b[" / "y].json"
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps({"runs": {"own": {}}}))
    assert str(own) in show("study", "--list", str(own)).replace("\n", "")
    assert sorted(finished.path.parents[1].rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["study"], "masking"),
        (["study", "maskin"], "'maskin' masking?"),
        (["study", "masking", "--until", "filter"], "--until 'filter'"),
        (["study", "masking", "--recipe", "modrn"], "'modrn' modern?"),
        (["study", "masking", "--override", "{"], "--override"),
        (["study", "gone.json", "--list"], "gone.json"),
        (["run", "demo", "--until", "compare"], "'compare'"),
        (["run", "demo", "--until", "evaluate"], "'evaluate'"),
    ],
)
def test_the_command_refuses_what_it_cannot_run_and_names_it(store, arguments: list[str], words: str):
    before = everything()
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, InputError)
    for word in words.split():
        assert word in str(error)
    assert everything() == before


def model(
    root: Path,
    number: int,
    loss: float,
    size: float = 1e5,
    tokens: int = 10_000,
    length_nats: float = 0.1,
    unit: str = "tokens",
    limits: dict = {"nats_per_byte": 100.0},  # noqa: B006
    new_head: bool = False,
    **stats: object,
) -> str:
    """The name of a pretrain artifact with this loss per byte, put into the store; `size`: operations per token / 6.

    Without tokens, it is a model that was only measured; `new_head`: one of an encoder that came without a head.
    """
    value = {"value": loss, "standard_error": 0.01}
    held = {f"nats_per_{unit}": value for unit in ("byte", "character", "word")} | {"digest": "d"}
    held |= {"documents": 100, "words": 10_000}
    held |= {"length_nats_per_byte": length_nats, "by_frequencies": limits}
    about = {"heldout": held, "parameters": 2 * size, "tokens": tokens, "steps": 10, "tokens_per_second": 1e3}
    about |= {"mfu": 0.1, "exaflops": 6 * size * tokens / 1e18, "seconds_on_the_clock": 5.0}
    about |= {"machine": {"device": "CPU"}, "evaluations": curve(0.0)}
    if not tokens:
        about |= {"steps": 0, "tokens_per_second": 0.0, "mfu": 0.0, "seconds_on_the_clock": 0.0}
        about |= {"evaluations": [curve(0.0)[0] | {"fraction": 1.0}], "start": {"name": "pretrain/abc"}}
    folder = root / "pretrain" / f"{number:012}"
    folder.mkdir(parents=True)
    if new_head:
        (folder / START_LINEAGE).write_text(json.dumps({"pretrain/abc": {"stats": {"new_head": True}}}))
    params = {"budget": tokens, "budget_unit": unit}
    manifest = {"stage": "pretrain", "files": [], "stats": about | stats, "params": params, "inputs": {}}
    (folder / "stage.json").write_text(json.dumps(manifest))
    return f"pretrain/{number:012}"


def curve(fall: float) -> list[dict]:
    """The evaluations of a run whose loss falls by so much."""
    places = ({"fraction": x, "heldout_nats_per_byte": 2 - fall * x} for x in (0.0, 1.0))
    return [place | dict.fromkeys(AXES, 9 * place["fraction"]) for place in places]


def compared(members: list[Member], **about) -> Artifact:
    """The page of these runs."""
    models, reports = (
        [artifact_named(name) for name in dict.fromkeys(getattr(member, kind) for member in members) if name]
        for kind in ("model", "report")
    )
    return compare.fn(Compare(title="Study: made up", members=members, **about), models, [], reports, [])


def report(
    root: Path, number: int, score: float, beats_majority: bool = True, partial: bool = False, column: str = "RTE"
) -> str:
    """The name of a report artifact with this score on a task."""
    row = {"column": column, "score": score, "pretrained": True, "share": 1.0, "partial": partial}
    row |= {"beats_majority": beats_majority, "examples": {"train": [1000, 2490], "validation": [277, 277]}}
    row |= {"metric": "accuracy", "majority": {"accuracy": 52.7}, "seeds": 3}
    row |= {"metrics": {"accuracy": {"interval": [score - 3, score + 4], "range": [score - 1, score + 1]}}}
    folder = root / "report" / f"{number:012}"
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps({"average": None, "scores": [row]}))
    manifest = {"stage": "report", "files": [], "stats": {}, "params": {}, "inputs": {}}
    (folder / "stage.json").write_text(json.dumps(manifest))
    return f"report/{number:012}"


@pytest.fixture
def empty(tmp_path: Path):
    """A store of its own for a test."""
    with store_of_its_own(tmp_path / "artifacts"):
        yield tmp_path / "artifacts"


def test_equal_vocabularies_are_never_ordered_and_the_page_names_the_rivals(empty: Path):
    """The truth lies between a loss and the loss without what the numbers of pieces cost."""
    rng = np.random.default_rng(0)
    lengths = rng.uniform(0.02, 0.12, 10)
    losses = 1.0 + lengths * rng.random(10)  # of ten vocabularies whose true loss is 1
    lines = [
        RunMeans(
            f"{number}",
            1,
            0,
            "",
            [f"{number}"],
            {LOSS: Mean(loss, math.nan, 1), "length_nats": Mean(length, math.nan, 1)},
        )
        for number, (loss, length) in enumerate(zip(losses, lengths, strict=True))
    ]
    for line, other in itertools.permutations(lines, 2):
        assert loss_difference(line, other).kind == "open bounds"
    found = best_loss(lines)
    assert {found.best, found.against.other, *found.near} == {line.run for line in lines}

    members = [
        Member(run="many pieces", model=model(empty, 1, 1.138)),  # at least 1.038
        Member(run="few pieces", model=model(empty, 2, 1.09, length_nats=0.04)),
        Member(run="worse", model=model(empty, 3, 1.2)),  # at least 1.1
    ]
    text = text_of(compared(members))
    assert "**few pieces** has the lowest held-out loss: 1.0900" in text
    assert "is open" in text
    assert re.search(r"\| few pieces .*\| *1\.0900 \| *open *\| *-0\.0480 \| *1\.0500 \|", text)
    assert re.search(r"\| worse .*\| *1\.2000 \| *one seed *\| *\+0\.0620 \| *1\.1000 \|", text)


def test_the_page_of_runs_with_several_seeds_is_the_one_that_was_read_and_approved(empty: Path):
    scores = [report(empty, n, 50.0 + n, beats_majority=n < 2, partial=n == 2) for n in range(3)]
    members = [
        Member(run="one", also=["1"], seed=n, model=model(empty, n, loss), report=scores[n])
        for n, loss in enumerate((1.0, 1.2, 1.7))
    ]
    changes = {"pretrain.budget": 5.0}
    gpu = {"tokens": 20_000, "machine": {"device": "GPU"}, "length_nats": 0.04, "exaflops": 7e-6}
    members += [
        Member(run="two", seed=n, model=model(empty, 5 + n, loss, **gpu), changes=changes)
        for n, loss in enumerate((0.9, 1.0))
    ]
    members += [Member(run="two", seed=2, problem="It was killed. Sorry.", changes=changes)]
    members += [Member(run="three", seed=n, problem="No text.") for n in range(2)]
    members += [Member(run="four", seed=n, problem="Late." if n else "") for n in range(3)]
    other = model(empty, 9, 1.5)
    members += [Member(run="apart", model=other, compared=False, problem=f"{other} has another text.")]
    made = compared(
        members, about="What matters.", paper="it did", recipe="demo", published={"1": "a lot", "two": "costs"}
    )
    check_golden("study_of_seeds.md", text_of(made))
    assert [row["seeds"] for row in made.stats["table"]] == [3, "2 of 3", "0 of 2", "0 of 3", 1]
    assert [row["seconds"] for row in made.stats["table"]] == ["5", "5", "", "", "5"]
    assert made.stats["table"][1]["problem"] == "It was killed"
    two = json_of(made)["summary"][1]
    error = math.sqrt(np.var([1.0, 1.2, 1.7], ddof=1) / 3 + np.var([0.9, 1.0], ddof=1) / 2)
    assert two["nats_per_byte error"] == pytest.approx(error)
    assert two["nats_per_byte deviation"] == pytest.approx(np.std([0.9, 1.0], ddof=1))


def test_the_page_of_runs_with_one_seed_is_the_one_that_was_read_and_approved(empty: Path):
    early = {"nats_per_token": 3.0, "nats_per_byte": 1.1}
    members = [Member(run="none", problem="It failed."), Member(run="a | b", model=model(empty, 1, 1.0, unit="hours"))]
    for n, tokens in ((2, 10_000), (3, 10_000)):
        members.append(Member(run=f"{n}", model=model(empty, n, 1.0 + n, tokens=tokens, unit="hours", limits=early)))
    made = compared(members, is_rescaled=True, fit=True, recipe="demo", scale="pocket")
    check_golden("study_of_one_seed.md", text_of(made))
    for row in made.stats["table"]:
        assert not any("±" in str(cell) for cell in row.values())
    lines = json_of(made)["summary"]
    assert [line["nats_per_byte deviation"] for line in lines] == [None] * 4
    assert lines[2]["nats_per_byte error"] is None


@pytest.mark.parametrize("new_head", [False, True])
def test_the_page_of_an_encoder_as_it_is_adapted_and_from_scratch_is_the_one_that_was_read_and_approved(
    empty, new_head
):
    fall = {"evaluations": curve(1.0)}
    models = {
        "as it is": model(empty, 1, 4.0 if new_head else 1.9, tokens=0, unit="hours", new_head=new_head),
        "adapted": model(empty, 2, 1.0, unit="hours", new_head=new_head, start={"name": "pretrain/abc"}, **fall),
        "from scratch": model(empty, 3, 1.3, unit="hours", length_nats=0.05, **fall),
    }
    changes = {"pretrain.budget": 0.5}
    own = STUDIES["adapt"]
    members = [
        Member(
            run=run,
            model=name,
            report=report(empty, n, score, column="tickets"),
            words=own["words"][run],
            changes=changes if n else {},
            usual={"pretrain.budget": 0.0} if n else {},
        )
        for n, ((run, name), score) in enumerate(zip(models.items(), (70.0, 81.5, 68.0), strict=True))
    ]
    made = compared(members, about=own["about"], recipe=own["recipe"])
    check_golden("study_of_a_bare_encoder.md" if new_head else "study_of_an_encoder.md", text_of(made))
    assert [*json_of(made)["curves"]] == ["adapted", "from scratch"], "what was not trained has no curve"
    for row in made.stats["table"]:
        assert row["tickets"]
        assert not {"0 tokens/s", "None", "nan"} & set(map(str, row.values()))
    rows = rows_of(made)
    assert rows["nats_per_byte"].isna().tolist() == [new_head, False, False]


def test_words_epochs_and_seconds_stand_in_one_row_beside_the_scores_if_words_were_counted(empty: Path):
    one = model(empty, 1, 1.0, epochs=9.9995, words=9_981_965)
    other = model(empty, 2, 1.1, epochs=1.0)
    members = [
        Member(run="track", model=one, report=report(empty, 1, 70.0, column="tickets")),
        Member(run="none", model=other, report=report(empty, 2, 60.0, column="tickets")),
    ]
    track, none = compared(members).stats["table"]
    shown = [track[name] for name in ("words at most", "epochs", "seconds", "tickets")]
    assert shown == ["10.0 M", "10", "5", "70.0"]
    assert not none["words at most"]
    assert "epochs" not in compared(members[1:]).stats["table"][0]


def test_a_page_says_that_the_scores_have_another_order_than_the_losses(empty: Path):
    members = []
    for n, (loss, score) in enumerate(((1.5, 80.0), (1.0, 60.0))):
        name = report(empty, n, score, column="tickets")
        members.append(Member(run=f"run {n}", model=model(empty, n, loss), report=name))
    words = "The scores have another order"
    assert words in text_of(compared(members))
    assert words not in text_of(compared([members[0].model_copy(update={"report": ""}), members[1]]))
    assert words not in text_of(compared([members[0], members[1].model_copy(update={"report": ""})]))


def test_a_study_in_which_only_what_was_not_trained_has_a_result_has_a_page(empty: Path):
    members = [Member(run="as it is", model=model(empty, 1, 1.9, tokens=0)), Member(run="adapted", problem="No disk.")]
    text = text_of(compared(members))
    assert "no other run has one to compare with" in text
    assert "## Curves" not in text


def test_a_page_of_many_tasks_has_a_row_for_each_run_and_folds_the_intervals(empty: Path):
    members = []
    for n in range(21):
        name = report(empty, n, 50.0 + n, column="RTE")
        path = artifact_named(name).path / "report.json"
        about = json.loads(path.read_text())
        about["average"] = 60.0 + n
        about["scores"] += [about["scores"][0] | {"column": column} for column in ("MRPC", "CoLA")]
        path.write_text(json.dumps(about))
        members.append(Member(run=f"run {n}", model=model(empty, n, 2.0 - n / 100), report=name))
    made = compared(members)
    text = text_of(made)
    shown, folded = text.split("\n---\n")
    assert "On **GLUE** (average of nine), **run 20** scores highest: 80.0, 20.0 above **run 0** (60.0)." in text
    assert re.search(r"\| run 20 +\| +80\.0 \|", shown)
    assert "### RTE, accuracy" not in shown
    assert folded.count("### ") == 3
    assert "scores.svg" not in text, "too many lines for a picture"


def test_the_error_of_a_difference_is_of_the_seeds_that_have_a_score_and_none_between_losses_of_the_same_models(empty):
    scores = {"one": [50.0, 53.0, 51.0], "two": [60.0, 64.0, math.nan], "again": [70.0, 72.0, 77.0]}
    models = {"one": [model(empty, seed, 1.0 + seed) for seed in range(3)]}
    models["two"] = [model(empty, 3 + seed, 1.0 + seed) for seed in range(3)]
    models["again"] = models["one"]
    members = []
    for n, (run, seed) in enumerate((run, seed) for run in scores for seed in range(3)):
        score = scores[run][seed]
        page = report(empty, n, score) if math.isfinite(score) else ""
        members.append(Member(run=run, seed=seed, model=models[run][seed], report=page))
    [one, two, again] = json_of(compared(members))["summary"]
    assert (one["score: RTE"], two["score: RTE"]) == (pytest.approx(154 / 3), 62.0)
    for line, values in ((two, scores["two"][:2]), (again, scores["again"])):
        welch = ttest_ind(values, scores["one"], equal_var=False)
        assert line["score: RTE difference"] == pytest.approx(np.mean(values) - 154 / 3)
        assert line["score: RTE error"] == pytest.approx(line["score: RTE difference"] / welch.statistic)
    assert two["nats_per_byte error"] == pytest.approx(math.sqrt(2 / 3))
    assert (again["nats_per_byte difference"], again["nats_per_byte error"]) == (0, None)
    assert "score: average" not in one, "no run has one"


@pytest.mark.parametrize(
    ("kind", "largest", "name"),
    [
        ("operations", 2e18, "exaFLOP"),
        ("operations", 7e12, "teraFLOP"),
        ("operations", 5.0, "gigaFLOP"),
        ("seconds", 3600.0, "hours"),
        ("seconds", 90.0, "minutes"),
    ],
)
def test_costs_stand_in_the_largest_unit_that_is_not_above_them_all(kind: str, largest: float, name: str):
    assert study_page.unit(kind, largest)[0] == name


def test_names_stand_in_pictures_as_they_are(empty: Path):
    names = ["_under", "10 % of $ & 5 % of $", r"$\frac{$", "ü < &amp;", "日本語の実験", "تجربة", "**[a](b)** | `c`"]
    members = [Member(run=name, model=model(empty, i, 1.0, evaluations=curve(1.0))) for i, name in enumerate(names)]
    picture = (compared(members).path / "tokens.svg").read_text()
    shown = [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", picture)]
    assert [text.strip("\N{ZERO WIDTH SPACE}\N{NO-BREAK SPACE}") for text in shown][-len(names) :] == names


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


def test_the_law_of_runs_that_differ_in_size_only_stands_on_the_page_with_its_test(empty, monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 6)
    pairs = [(size, tokens) for size in (1e5, 2e5, 4e5) for tokens in (10_000, 30_000, 90_000)] + [(16e5, 200_000)]
    made = compared(sized(empty, pairs), fit=True)
    about = json_of(made)["law"]
    assert about["runs"] == len(pairs)
    assert (about["test"]["largest"], about["test"]["measured"]) == ("run 9", lawful(*pairs[-1]))
    text = text_of(made)
    for words in ("## Scaling law", f"{about['test']['loss']:.4f}", "run 9"):
        assert words in text
    assert (made.path / "law.svg").exists()
    assert "law.svg" not in (made.path / "study.html").read_text(), "the picture is in the page"


def test_runs_that_read_no_context_are_named_and_left_out_of_the_law(empty: Path, monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 6)
    pairs = [(size, tokens) for size in (1e5, 2e5, 4e5) for tokens in (30_000, 90_000)]
    members = []
    for n, (pair, loss) in enumerate([*((pair, lawful(*pair)) for pair in pairs), ((1e5, 5_000), 1.85)]):
        name = model(empty, n, loss, *pair, limits={"nats_per_byte": 2.0})
        members.append(Member(run=f"run {n}", model=name, changes={"pretrain.budget": 5.0} if n else {}))
    made = compared(members, fit=True)
    about = json_of(made)["law"]
    assert (about["runs"], about["left_out"], about["residual"] < 1e-4) == (6, ["run 6"], True)
    text = text_of(made)
    assert "The loss of **run 6** is more than nine tenths of what token frequencies alone give" in text
    assert "Left out of the fit" in text
    again = members[2].model_copy(update={"seed": 1})
    failed = Member(run="late", problem="It failed.", changes={"pretrain.budget": 7.0})
    few = compared([*members[2:], again, failed], fit=True)
    assert not (few.path / "law.svg").exists()
    assert json_of(few)["law"] == {"runs": 4, "needed": law.FEWEST, "left_out": ["run 6"]}
    assert "without **run 6**" in text_of(few)


def test_runs_that_measured_different_parts_are_measured_again_on_the_same_documents_and_keep_their_curves(
    store, given: dict, monkeypatch
):
    monkeypatch.setattr(heldout, "LEAST_CHARACTERS", 2000)
    other = {"mask_fraction": 0.3}  # so that the runs are new
    runs = {"own": {"pretrain": other}, "longer": {"pretrain": other, "scale": {"budget": 30}}}
    page = study.fn(**written(given, "budgets", runs, seeds=1))
    rows = rows_of(page).to_dict("records")
    parts = [artifact_named(row["model"]).stats["heldout"] for row in rows]
    assert parts[0]["characters"] < parts[1]["characters"]
    assert parts[0]["of_digest"] == parts[1].get("of_digest", parts[1]["digest"])
    assert parts[0]["digest"] != parts[1]["digest"]
    for row in rows:
        how = Evaluate(characters=parts[1]["characters"])
        found = evaluate.fn(how, artifact_named(row["model"]), artifact_named(rows[0]["model"]), [])
        assert row["evaluation"] == found.name
        assert row["nats_per_byte"] == found.stats["nats_per_byte"]["value"]
    assert rows[0]["digest"] == rows[1]["digest"]
    assert [*json_of(page)["curves"]] == ["own", "longer"]
    assert "Short runs measure on a part of the held-out text" in text_of(page)
