"""Each benchmark at its smallest, those of training on a machine that has torch and little else."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import write_jsonl
from torch.utils.flop_counter import FlopCounterMode

from model import InputError, export, masking
from model.bert import Bert
from model.heldout import Heldout
from model.settings import Architecture, Finetuning, Training
from tasks.text.tokenizer import MASK, SPECIALS
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

ROOT = Path(__file__).parents[1]
ABSENT = ["prefect", "transformers", "pyarrow", "matplotlib", "tokenizers", "zstandard", "sklearn", "accelerate"]
BARE = f"""
import os, signal, sys
sys.modules.update(dict.fromkeys({ABSENT}))  # so that importing them fails
stop, write = os.environ.get("STOP_AFTER"), sys.stderr.write

def watched(text):
    written = write(text)
    if stop and stop in text:
        signal.raise_signal(signal.SIGTERM)
    return written

sys.stderr.write = watched
"""
PARTS = ("forward", "backward", "optimizer", "overhead")
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48}
SIZE_OPTIONS = [word for name, size in SIZES.items() for word in (f"--{name}", size)] + ["--vocabulary", 200]
RECIPES = ("pocket", "pocket-modern")
VOCABULARY, LENGTH = 50, 16


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without those packages. STOP_AFTER: the line after which a script is terminated."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    return {"PYTHONPATH": str(tmp_path / "bare")}


@pytest.fixture
def benchmarks(monkeypatch) -> SimpleNamespace:
    """Their modules."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import common
    import curves
    import finetune
    import loops
    import parity
    import recipes

    return SimpleNamespace(common=common, curves=curves, finetune=finetune, loops=loops, parity=parity, recipes=recipes)


def run(script: str, *arguments: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Run one of the scripts as a user does."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr
    return done


def test_speed_of_pretraining_with_torch_alone(bare, tmp_path: Path):
    options = ["--batch", 4, "--steps", 3, "--rounds", 2, "--json", tmp_path / "speed.json"]
    done = run("train.py", "--recipe", *RECIPES, "--peers", *SIZE_OPTIONS, *options, **bare)
    assert "transformers not installed" in done.stdout
    content = json.loads((tmp_path / "speed.json").read_text())
    rows, first = content["rows"], content["rows"][0]["turns"]
    assert tuple(row["name"] for row in rows) == RECIPES
    for row, line in zip(rows, done.stdout.splitlines()[-2:], strict=True):
        assert all(sum(turn[part] for part in PARTS) == pytest.approx(1) for turn in row["turns"])
        assert all(turn[part] > 0 for turn in row["turns"] for part in PARTS if part != "overhead")  # the rest may be 0
        speeds = [[turn["tokens_per_second"] for turn in turns] for turns in (row["turns"], first)]
        assert row["tokens_per_second"] == statistics.median(speeds[0])
        assert row["relative"] == statistics.median(ours / other for ours, other in zip(*speeds, strict=True))
        assert row["mfu"] == pytest.approx(row["gflop_per_second"] / content["matrix_gflop_per_second"])
        assert line.split()[:3] == [row["name"], f"{row['parameters']:,}", f"{row['tokens_per_second']:,.0f}"]


@pytest.mark.parametrize("peer", ["BERT", "ModernBERT"])
def test_peers_are_measured_and_their_operations_are_those_that_torch_counts(benchmarks, monkeypatch, peer: str):
    pytest.importorskip("transformers")
    loops = benchmarks.loops
    monkeypatch.setattr(loops.machine, "MATRIX_SIDE", {"cpu": 64})
    training = Training(budget=8 * 4 * LENGTH, budget_unit="tokens", batch_size=4, batch_ramp=0)
    case = loops.Case("tiny", None, False, Architecture(**SIZES), training, VOCABULARY, LENGTH, steps=2).of_peer(peer)
    model, corpus = loops.peer_model(case), case.corpus()
    model.set_attn_implementation("eager")  # the fused one is not counted
    tokens, positions, hidden = masking.mask(corpus.sequences, 0, case.masks, corpus, seed=0)
    labels = np.full_like(tokens, -100)
    np.put_along_axis(labels, positions, hidden, axis=1)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels)).loss.backward()
    assert counter.get_total_flops() / tokens.size == pytest.approx(case.operations(), rel=1e-3)
    measured = loops.measure(case, loops.machine.Machine(torch.device("cpu"), torch.float32, False, 2))
    assert all(measured[part] > 0 for part in PARTS if part != "overhead")
    assert (measured["micro_batch"], torch.Tensor.backward.__module__) == (2, "torch._tensor")


def test_speed_of_finetuning_with_torch_alone(bare, tmp_path: Path):
    options = ["--examples", 40, "--seeds", 3, "--epochs", 2, "--json", tmp_path / "speed.json"]
    done = run("finetune.py", "--peers", *SIZE_OPTIONS, *options, **bare)
    assert "transformers, accelerate not installed" in done.stdout
    (row,) = json.loads((tmp_path / "speed.json").read_text())["rows"]
    (turn,) = row["turns"]
    assert turn["examples"] == 3 * 2 * 32
    assert turn["examples_per_second"] == row["examples_per_second"] == pytest.approx(192 / turn["seconds"])
    assert 0.5 < turn["loss"] < 1.0
    assert done.stdout.splitlines()[-1].split()[3:5] == [f"{row['examples_per_second']:,.1f}", "1.000"]


def test_peers_of_finetuning_need_a_layout_that_transformers_has():
    pytest.importorskip("accelerate")
    assert "recipe 'pocket'" in run("finetune.py", "--recipe", "pocket", "--peers", *SIZE_OPTIONS, code=2).stderr


def test_the_trainer_finetunes_the_same_model_on_the_same_examples(benchmarks, tmp_path: Path):
    pytest.importorskip("accelerate")
    script, layout = benchmarks.finetune, benchmarks.common.settings("pocket-modern", {"architecture": SIZES})[0]
    export.save(Bert(layout, 200, script.LENGTH), tmp_path)
    given, asked = script.synthetic(40, 200), Finetuning(epochs=2, learning_rate=1e-9)
    assert given.lengths.mean() == pytest.approx(11.5, abs=1.5), "as long as CoLA's"
    runs = [script.ours(tmp_path, given, asked, 0, 1), script.theirs(tmp_path, given, asked, 0, 1, "group_by_length")]
    assert [one["examples"] for one in runs] == [64] * 2
    assert all(0.3 < one["loss"] < 2 for one in runs)  # their last layers are random
    assert all(one["end"] > one["begin"] and one["cpu_seconds"] > 0 for one in runs)


def test_two_engines_are_compared_in_welchs_standard_errors(benchmarks):
    from scipy import stats

    rng = np.random.default_rng(0)
    ours, others = rng.normal(50, 3, 5).tolist(), rng.normal(51, 1, 5).tolist()
    expected = stats.ttest_ind(ours, others, equal_var=False).statistic
    parity = benchmarks.parity
    assert parity.errors(ours, others) == pytest.approx(expected)
    assert [parity.errors([1.0, 1.0], [x, x]) for x in (1.0, 2.0)] == [0.0, -np.inf]
    scores = {(engine, "rte"): [50.0, 52.0] for engine in parity.ENGINES} | {(parity.LENGTH, "rte"): [60.0, 62.0]}
    row = parity.table(scores, ["rte"]).splitlines()[1].split()
    assert row == ["rte", "61.00", "±", "1.41", "51.00", "±", "1.41", "51.00", "±", "1.41", "+7.07", "(far)", "+0.00"]


def test_the_benchmarks_assume_what_the_stages_do(benchmarks):
    assert (Vocabulary().entries, Tokenize().length) == (benchmarks.common.ENTRIES, benchmarks.common.LENGTH)
    assert (MASK, len(SPECIALS)) == (benchmarks.loops.MASK_ID, benchmarks.loops.SPECIALS)


def tokenized(folder: Path) -> Path:
    """A folder as the tokenize stage leaves it: tokens that go up by one, from any token on."""
    folder.mkdir()
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (140, 1))
    rows = (5 + (starts + np.arange(LENGTH)) % (VOCABULARY - 5)).astype(np.uint16)
    np.save(folder / "sequences.npy", rows[:120])
    np.save(folder / "heldout.npy", rows[120:])
    np.save(folder / "heldout_documents.npy", Heldout.of_rows(rows[120:]).documents)
    (folder / "stage.json").write_text(json.dumps({"stats": {"entries": VOCABULARY}}))
    return folder


def losses(folder: Path) -> dict[str, list[list[float]]]:
    """The held-out losses of every run, by recipe."""
    recipes = json.loads((folder / "comparison.json").read_text())["recipes"]
    return {name: [[e["heldout_loss"] for e in r["evaluations"]] for r in one["runs"]] for name, one in recipes.items()}


def test_recipes_are_compared_with_torch_alone_and_an_interrupted_run_continues(bare, tmp_path: Path):
    changes = [f"{name}.architecture.{field}={size}" for name in RECIPES for field, size in SIZES.items()]
    changes += [f"{name}.batch_size=8" for name in RECIPES]
    race = ["--recipe", *RECIPES, "--set", *changes, "--data", tokenized(tmp_path / "data")]
    race += ["--tokens", 60 * 8 * LENGTH, "--seeds", 2, "--folder"]
    assert "matplotlib" in run("recipes.py", *race, tmp_path / "at-once", **bare).stdout
    place = "pocket-modern, seed 0: 50%"
    assert place in run("recipes.py", *race, tmp_path / "race", "--keep", code=143, STOP_AFTER=place, **bare).stderr
    rest = run("recipes.py", *race, tmp_path / "race", "--keep")  # with matplotlib
    assert "Resuming from step" in rest.stderr
    assert "pocket, seed 0" not in rest.stderr, "it had finished"
    assert losses(tmp_path / "race") == losses(tmp_path / "at-once")
    assert (tmp_path / "race" / "comparison.png").read_bytes().startswith(b"\x89PNG")

    comparison = json.loads((tmp_path / "race" / "comparison.json").read_text())
    row = next(line for line in rest.stdout.splitlines() if "loss at 100%" in line)
    cells = iter(word for word in row.split()[5:] if word != "±")
    for name, runs in losses(tmp_path / "race").items():
        ends = [curve[-1] for curve in runs]
        assert runs[0] != runs[1], "another seed, another run"
        assert comparison["recipes"][name]["heldout_loss"][-1]["mean"] == pytest.approx(np.mean(ends))
        shown = [float(next(cells)), float(next(cells))]
        assert shown == pytest.approx([np.mean(ends), np.std(ends, ddof=1)], abs=6e-4)
    assert comparison["recipes"]["pocket"]["passes"]["seeds"] == 2, "at its own end at the latest"

    score = ["--data", tmp_path / "data", "--json", tmp_path / "scores.json", "--folder"]
    assert "nats per byte" in run("score.py", *score, tmp_path / "race", **bare).stdout
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["ends"] == comparison["ends"]
    assert 0 < scores["ends"]["pocket-modern"]["difference"]["standard_error"] < 0.5
    assert "checkpoint.safetensors" in run("score.py", *score, tmp_path / "at-once", code=2).stderr


def ending(*losses: float, budget: float = 1.0) -> list[dict]:
    """Runs that go straight from a loss of 3 to these."""
    about = {"tokens": 1, "seconds": 1.0, "training": {"budget": budget}}
    return [
        about | {"evaluations": [{"fraction": f, "heldout_loss": x} for f, x in ((0.0, 3.0), (1.0, loss))]}
        for loss in losses
    ]


@pytest.mark.parametrize(
    ("runs", "where"),
    [
        (
            {"a": ending(1, 2), "b": ending(1.5, 1.5), "c": ending(2.5, 2.5)},
            ["1.000 ± 0.000", "0.667 (1 of 2)", "never"],
        ),
        ({"a": ending(1, budget=40.0), "b": ending(1, budget=10.0)}, ["1.000", "0.250"]),
    ],
)
def test_the_table_says_where_each_recipe_passes_the_firsts_end(benchmarks, runs: dict, where: list[str]):
    about = {"budget": 1.0, "budget_unit": "tokens", "machine": {"device": "CPU"}, "seeds": len(runs["a"])}
    table = benchmarks.curves.table(about | {"recipes": benchmarks.curves.compare(runs)})
    line = next(line for line in table.splitlines() if "passes the first's end at" in line)
    assert [cell.strip() for cell in line.split("  ") if cell.strip()][1:] == where


def test_a_loss_is_passed_where_the_curve_first_has_it(benchmarks):
    curve = [{"fraction": f, "heldout_loss": x} for f, x in zip([0, 0.5, 0.8, 1], [3, 1, 2, 0.5], strict=True)]
    assert [benchmarks.curves.passes(curve, loss) for loss in (3, 2, 0.5, 0.4)] == [0, 0.25, 1, None]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pocket.nope=1", "pocket.nope"),
        ("pocket.learning_rate=-1", "pocket.learning_rate"),
        ("pocket.architecture.heads=7", "heads 7"),
        ("pocket.seed=1", "pocket.seed=1"),
        ("other.learning_rate=1", "other.learning_rate=1"),
    ],
)
def test_an_impossible_change_is_named(benchmarks, change: str, named: str):
    with pytest.raises(InputError, match=named):
        benchmarks.common.settings("pocket", benchmarks.recipes.changes([change], ["pocket"])["pocket"])


def test_data_of_a_race_is_checked_and_other_data_is_another_run(benchmarks, tmp_path: Path):
    data, recipes = tokenized(tmp_path / "data"), benchmarks.recipes
    corpus = recipes.read(data)
    rows = np.array(corpus.sequences)
    rows[0, 0] += 1
    other = masking.Corpus(rows, corpus.heldout, VOCABULARY, 4, 5)
    assert recipes.identity(corpus) != recipes.identity(other)
    (data / "stage.json").write_text(json.dumps({"stats": {"entries": 40}}))
    with pytest.raises(InputError, match="token 49 of 40 entries"):
        recipes.read(data)
    with pytest.raises(InputError, match=r"sequences\.npy"):
        recipes.read(tmp_path)


def test_speed_of_the_data_stages(tmp_path: Path, toy_texts: list[str]):
    text = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    done = run("data.py", text, "--workers", 1, "--entries", 400, "--json", tmp_path / "speed.json")
    (of_one_worker,) = json.loads((tmp_path / "speed.json").read_text())["runs"]
    rows = of_one_worker["rows"]
    names = [
        "download",
        "deduplicate, exact",
        "measure",
        "filter",
        "vocabulary",
        "tokenize and sort",
        "the whole chain",
    ]
    assert [row["stage"] for row in rows] == names
    assert all(row["mb_per_second"] > 0 and row["peak_mib"] > 10 for row in rows)
    assert all(row["fraction_of_limit"] > 0 for row in rows[:-1])
    assert done.stdout.splitlines()[-1].startswith("the whole chain")
