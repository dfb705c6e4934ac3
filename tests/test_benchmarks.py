"""Each benchmark at its smallest, those of training on a machine that has torch and little else."""

import importlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import write_jsonl
from torch.utils.flop_counter import FlopCounterMode

from model import InputError, export, heldout, masking
from model.bert import Bert
from model.heldout import Heldout
from model.settings import Architecture, Finetuning, Training
from tasks.text.tokenizer import MASK, SPECIALS
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

FOLDER = Path(__file__).parents[1] / "benchmarks"
ABSENT = ["prefect", "transformers", "pyarrow", "matplotlib", "tokenizers", "zstandard", "sklearn", "accelerate"]
BARE = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))"  # so that importing them fails
IN_TURN = """
import json, runpy, sys
from model import machine

machine.MATRIX_SIDE = {"cpu": 64}  # measuring larger products takes seconds
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *map(str, arguments)]
    runpy.run_path(script, run_name="__main__")
"""
PARTS = ("forward", "backward", "optimizer", "overhead")
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48}
SIZE_OPTIONS = [word for name, size in SIZES.items() for word in (f"--{name}", size)] + ["--vocabulary", 200]
RECIPES = ("pocket", "pocket-modern")
VOCABULARY, LENGTH = 50, 16


def tokenized(folder: Path) -> Path:
    """A folder as the tokenize stage leaves it: tokens that go up by one, from any token on."""
    folder.mkdir()
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (140, 1))
    rows = (5 + (starts + np.arange(LENGTH)) % (VOCABULARY - 5)).astype(np.uint16)
    np.save(folder / "sequences.npy", rows[:120])
    Heldout.of_rows(rows[120:]).save(folder)
    (folder / "stage.json").write_text(json.dumps({"stats": {"entries": VOCABULARY}}))
    return folder


def race(data: Path, folder: Path) -> list[object]:
    """The options of a comparison of two recipes."""
    changes = [f"{name}.architecture.{field}={size}" for name in RECIPES for field, size in SIZES.items()]
    changes += [f"{name}.batch_size=8" for name in RECIPES]
    budget = ["--tokens", 60 * 8 * LENGTH, "--seeds", 2]
    return ["--recipe", *RECIPES, "--set", *changes, "--data", data, *budget, "--folder", folder]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the scripts `said` and wrote to the `folder` on a machine without those packages, in one process."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE)
    data = tokenized(folder / "data")
    speed = ["--batch", 4, "--steps", 3, "--rounds", 2, "--json", folder / "train.json"]
    tuning = ["--examples", 40, "--seeds", 2, "--epochs", 2, "--json", folder / "finetune.json"]
    commands = [
        ["train.py", "--recipe", *RECIPES, "--peers", *SIZE_OPTIONS, *speed],
        ["finetune.py", "--peers", *SIZE_OPTIONS, *tuning],
        ["recipes.py", *race(data, folder / "race"), "--keep"],
        ["score.py", "--data", data, "--folder", folder / "race", "--json", folder / "score.json"],
    ]
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands, default=str)]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(program, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, said=" ".join(done.stdout.split()))


def written(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Their modules."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("common", "curves", "finetune", "loops", "parity", "recipes", "score")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_speed_of_pretraining_with_torch_alone(bare: SimpleNamespace):
    assert "transformers not installed" in bare.said
    content = written(bare.folder / "train.json")
    rows, first = content["rows"], content["rows"][0]["turns"]
    assert tuple(row["name"] for row in rows) == RECIPES
    for row in rows:
        for turn in row["turns"]:
            *parts, rest = (turn[part] for part in PARTS)
            assert min(parts) > 0
            assert sum(parts) + rest == pytest.approx(1)
        speeds = [[turn["tokens_per_second"] for turn in turns] for turns in (row["turns"], first)]
        assert row["tokens_per_second"] == statistics.median(speeds[0])
        assert row["relative"] == statistics.median(ours / other for ours, other in zip(*speeds, strict=True))
        assert row["mfu"] == pytest.approx(row["gflop_per_second"] / content["matrix_gflop_per_second"])
        assert f"{row['name']} {row['parameters']:,} {row['tokens_per_second']:,.0f}" in bare.said


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


def test_speed_of_finetuning_with_torch_alone(bare: SimpleNamespace):
    assert "transformers, accelerate not installed" in bare.said
    (row,) = written(bare.folder / "finetune.json")["rows"]
    (turn,) = row["turns"]
    assert turn["examples"] == 2 * 2 * 32
    assert turn["examples_per_second"] == row["examples_per_second"] == pytest.approx(128 / turn["seconds"])
    assert 0.5 < turn["loss"] < 1.0
    assert f"{row['examples_per_second']:,.1f} 1.000" in bare.said


def test_the_trainer_finetunes_the_same_model_on_the_same_examples(benchmarks, tmp_path: Path):
    pytest.importorskip("accelerate")
    script, layout = benchmarks.finetune, benchmarks.common.settings("pocket-modern", {"architecture": SIZES})[0]
    export.save(Bert(layout, 200, script.LENGTH), tmp_path)
    given, asked = script.synthetic(40, 200), Finetuning(epochs=2, learning_rate=1e-9)
    assert given.lengths.mean() == pytest.approx(11.5, abs=1.5), "as long as CoLA's"
    runs = [script.ours(tmp_path, given, asked, 0, 1), script.theirs(tmp_path, given, asked, 0, 1, "group_by_length")]
    for one in runs:
        assert one["examples"] == 64
        assert 0.3 < one["loss"] < 2, "their last layers are random"
        assert one["end"] > one["begin"]
        assert one["cpu_seconds"] > 0


def test_two_engines_are_compared_in_welchs_standard_errors(benchmarks):
    from scipy import stats

    rng, parity = np.random.default_rng(0), benchmarks.parity
    ours, others = rng.normal(50, 3, 5).tolist(), rng.normal(51, 1, 5).tolist()
    assert parity.errors(ours, others) == pytest.approx(stats.ttest_ind(ours, others, equal_var=False).statistic)
    assert [parity.errors([1.0, 1.0], [x, x]) for x in (1.0, 2.0)] == [0.0, -np.inf]
    scores = {(engine, "rte"): [50.0, 52.0] for engine in parity.ENGINES} | {(parity.LENGTH, "rte"): [60.0, 62.0]}
    assert parity.table(scores, ["rte"]).splitlines()[1].split()[-3:] == ["+7.07", "(far)", "+0.00"]


def test_peers_of_finetuning_need_a_layout_that_transformers_has(benchmarks, tmp_path: Path):
    given = SimpleNamespace(recipe="pocket", peers=True, vocabulary=200, **SIZES)
    with pytest.raises(InputError, match="recipe 'pocket'"):
        benchmarks.finetune.model(given, tmp_path)


def test_the_benchmarks_assume_what_the_stages_do(benchmarks):
    assert (Vocabulary().entries, Tokenize().length) == (benchmarks.common.ENTRIES, benchmarks.common.LENGTH)
    assert (MASK, len(SPECIALS)) == (benchmarks.loops.MASK_ID, benchmarks.loops.SPECIALS)


def losses(comparison: dict) -> dict[str, list[list[float]]]:
    """The held-out losses of every run, by recipe."""
    runs = {name: one["runs"] for name, one in comparison["recipes"].items()}
    return {
        name: [[e["heldout_nats_per_byte"] for e in run["evaluations"]] for run in made] for name, made in runs.items()
    }


def test_an_interrupted_comparison_of_recipes_continues(bare, benchmarks, tmp_path: Path, monkeypatch, caplog, capsys):
    def interrupt(text: str, **_: object) -> None:
        if text.startswith("pocket-modern, seed 0: 50%"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "argv", ["recipes.py", *map(str, race(bare.folder / "data", tmp_path))])
    with monkeypatch.context() as patch:
        patch.setattr(benchmarks.recipes, "print", interrupt, raising=False)
        with pytest.raises(KeyboardInterrupt):
            benchmarks.recipes.main()
    caplog.set_level(logging.INFO, "model")
    benchmarks.recipes.main()
    comparison = written(tmp_path / "comparison.json")
    assert "Resuming from step" in caplog.text
    assert "pocket, seed 0" not in capsys.readouterr().err, "it had finished"
    assert losses(comparison) == losses(written(bare.folder / "race" / "comparison.json")), "which was made at once"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib is not installed" in bare.said
    for name, runs in losses(comparison).items():
        assert runs[0] != runs[1], "another seed, another run"
        last, ends = comparison["recipes"][name]["nats_per_byte"][-1], [curve[-1] for curve in runs]
        assert (last["mean"], last["deviation"]) == pytest.approx((np.mean(ends), np.std(ends, ddof=1)))
    for axis in ("tokens", "operations", "seconds"):
        assert comparison["recipes"]["pocket"]["passes"][axis]["seeds"] == 2, "at its own end at the latest"


def test_a_recipe_with_detection_reads_shuffled_sequences(benchmarks, tmp_path: Path):
    corpus, here = benchmarks.recipes.read(tokenized(tmp_path / "data")), benchmarks.recipes.machine.detect()
    changes = {"budget": 10 * 8 * LENGTH, "budget_unit": "tokens", "batch_size": 8, "architecture": SIZES}
    architecture, training = benchmarks.common.settings("pocket-frontier", changes)
    about = {"recipe": "own", "architecture": architecture.model_dump(), "training": training.model_dump()}
    made = benchmarks.recipes.train("own", about, corpus, here, tmp_path, False)
    assert made["tokens"] == 10 * 8 * LENGTH
    assert 0 < made["heldout"]["nats_per_word"]["value"] < 2 * np.log(VOCABULARY)
    shuffled = replace(corpus, sequences=benchmarks.recipes.Shuffled(corpus.sequences, 0))
    assert np.array_equal(np.sort(shuffled.ordinary), np.sort(corpus.ordinary)), "the same tokens are drawn"


def test_kept_runs_are_scored_again(bare, benchmarks, tmp_path: Path):
    scores = written(bare.folder / "score.json")
    raced = written(bare.folder / "race" / "comparison.json")["ends"]
    assert [*scores["ends"].values()] == [*raced.values()]
    for name, recipe in zip(scores["ends"], raced, strict=True):
        assert name.startswith(f"{recipe}, 50 entries, ")
        assert {f"hidden {SIZES['hidden']}", "batch_size 8"} <= set(name.split(", "))
    with pytest.raises(InputError, match=r"50 entries.*40"):
        benchmarks.score.corpus_for(next((bare.folder / "race").glob("pocket-*")), {40: None})
    assert 0 < [*scores["ends"].values()][1]["difference"]["standard_error"] < 0.5
    with pytest.raises(InputError, match=r"checkpoint\.safetensors"):
        benchmarks.score.runs_below(tmp_path)


def test_a_part_of_the_text_is_measured_as_if_it_were_all(bare, benchmarks, monkeypatch):
    monkeypatch.setattr(heldout, "BLOCK", 20)
    home, corpus = next((bare.folder / "race").glob("pocket-*")), benchmarks.recipes.read(bare.folder / "data")
    every, part = (
        benchmarks.score.score(home, corpus, benchmarks.recipes.machine.detect(), number)["heldout"]
        for number in (1, 3)
    )
    assert part["nats_per_byte"]["value"] == pytest.approx(every["nats_per_byte"]["value"], rel=0.2)
    assert part != every


def test_the_losses_of_all_runs_are_drawn(benchmarks, tmp_path: Path):
    held = {"length_nats_per_byte": 0.1}
    runs = [{"heldout": held | {"nats_per_byte": {"value": value}}} for value in (1.0, 2.0)]
    benchmarks.curves.end_picture({"one": runs, "other": runs[:1]}, tmp_path / "ends.png")
    assert (tmp_path / "ends.png").read_bytes().startswith(b"\x89PNG")


def test_a_recipe_passes_the_firsts_end_where_its_curve_first_has_that_loss(benchmarks):
    def ran(*losses: float, spent: int) -> dict:
        """A run whose evaluations are evenly spread."""
        evaluations = [
            {"fraction": i / (len(losses) - 1), "heldout_nats_per_byte": loss}
            | {axis: spent * i / (len(losses) - 1) * times for axis, times in axes.items()}
            for i, loss in enumerate(losses)
        ]
        return {"evaluations": evaluations}

    axes = {"tokens": 1, "operations": 100, "seconds": 0.1}
    first = [ran(3, end, spent=40) for end in (1, 2, 2, 2)]
    curves = [(3, 1.5), (3, 1), (3, 1, 2.5, 0.5, 0.5), (2, 1)]
    others = [ran(*curve, spent=10) for curve in curves]
    compared = benchmarks.curves.compare({"first": first, "other": others})
    for axis in axes:
        assert compared["first"]["passes"][axis]["mean"] == 1.0
        assert compared["other"]["passes"][axis]["fractions"] == [None, 0.5 / 4, 0.125 / 4, 0.0]
    assert compared["other"]["nats_per_byte"][0]["mean"] == pytest.approx(np.mean([curve[0] for curve in curves]))


@pytest.mark.parametrize(
    "change",
    ["pocket.nope=1", "pocket.learning_rate=-1", "pocket.architecture.heads=7", "pocket.seed=1", "other.steps=1"],
)
def test_an_impossible_change_is_named(benchmarks, change: str):
    field = change.split("=")[0].split(".")[-1]
    with pytest.raises(InputError, match=field):
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


def test_recipes_with_other_vocabularies_read_data_of_their_own(benchmarks, tmp_path: Path):
    corpora, a, b = benchmarks.recipes.corpora, tokenized(tmp_path / "a"), tokenized(tmp_path / "b")
    sequences = np.load(a / "sequences.npy")
    np.save(b / "sequences.npy", sequences[:50])
    found = corpora([str(a), f"small={b}"], ["pocket", "small"])
    assert [len(corpus.sequences) for corpus in found.values()] == [120, 50]
    for wrong, about in (([f"small={b}"], "pocket"), ([str(a), f"other={b}"], "other"), ([str(a), str(b)], "twice")):
        with pytest.raises(InputError, match=about):
            corpora(wrong, ["pocket", "small"])
    held = Heldout.load(b)
    held.documents[0, 3] += 1
    held.save(b)
    with pytest.raises(InputError, match="hold out different documents"):
        corpora([str(a), f"small={b}"], ["pocket", "small"])


def test_speed_of_the_data_stages(benchmarks, tmp_path: Path, toy_texts: list[str], monkeypatch, capsys):
    for name in ("CRAM_ARTIFACTS", "PREFECT_LOGGING_TO_API_ENABLED", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # the script sets these; here they get their values back
    monkeypatch.delitem(sys.modules, "data", raising=False)
    text = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    options = ["--workers", "1", "--entries", "400", "--json", str(tmp_path / "speed.json")]
    monkeypatch.setattr(sys, "argv", ["data.py", str(text), *options])
    importlib.import_module("data").main()
    (of_one_worker,) = written(tmp_path / "speed.json")["runs"]
    rows = of_one_worker["rows"]
    stages = ["download", "deduplicate, exact", "measure", "filter", "vocabulary", "tokenize and sort"]
    assert [row["stage"] for row in rows] == [*stages, "the whole chain"]
    assert all(row["mb_per_second"] > 0 and row["peak_mib"] > 10 for row in rows)
    assert all(row["fraction_of_limit"] > 0 for row in rows[:-1])
    assert capsys.readouterr().out.splitlines()[-1].startswith("the whole chain")
