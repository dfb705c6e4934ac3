"""The benchmarks of training, on a machine that has torch and little else."""

import json
import os
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import InputError, export, machine, masking
from model.bert import Bert
from model.heldout import Heldout
from model.settings import Architecture, Finetuning, Training
from tasks import vocabulary
from tasks.text.tokenizer import CLS, MASK, SEP, SPECIALS
from tasks.tokenize import Tokenize

ROOT = Path(__file__).parents[1]
ABSENT = [
    "prefect",
    "transformers",
    "pyarrow",
    "matplotlib",
    "tokenizers",
    "zstandard",
    "sklearn",
    "typer",
    "accelerate",
]
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
    """Their modules; the machine's limit is found in no time."""
    monkeypatch.setattr(machine, "MATRIX_SIDE", {"cpu": 64})
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import curves
    import finetune
    import loops
    import parity
    import recipes
    import train
    import watch

    return SimpleNamespace(
        curves=curves, finetune=finetune, loops=loops, parity=parity, recipes=recipes, train=train, watch=watch
    )


def run(script: str, *arguments: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
    """Run one of the scripts as a user does."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done


def numbers(text: str) -> list[float]:
    return [float(word.strip("%").replace(",", "")) for word in text.split()]


def short(rounds: str, file: Path) -> list[str]:
    """Options for a model and a number of steps that take no time."""
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    return [*sizes, "--batch", "4", "--vocabulary", "200", "--steps", "3", "--rounds", rounds, "--json", str(file)]


def test_speed_is_measured_with_torch_alone_and_told_alike_as_table_and_as_json(bare, tmp_path: Path):
    done = run("train.py", "--recipe", *RECIPES, "--peers", *short("2", tmp_path / "speed.json"), **bare)
    assert "transformers is not installed" in done.stdout
    found = json.loads((tmp_path / "speed.json").read_text())
    limit, rows = found["matrix_gflop_per_second"], found["rows"]
    assert tuple(row["name"] for row in rows) == RECIPES
    assert limit == statistics.median(turn["matrix_gflop_per_second"] for row in rows for turn in row["turns"])
    for row, line in zip(rows, done.stdout.splitlines()[-2:], strict=True):
        turns, first = row["turns"], rows[0]["turns"]
        assert len(turns) == 2
        for turn in turns:
            assert all(0 < turn[part] < 1 for part in PARTS)
            assert sum(turn[part] for part in PARTS) == pytest.approx(1)
            assert turn["cpu_seconds_per_1000_tokens"] > 0
        for name in ("tokens_per_second", *PARTS):
            assert row[name] == statistics.median(turn[name] for turn in turns)
        speeds = [[turn["tokens_per_second"] for turn in each] for each in (turns, first)]
        assert row["relative"] == statistics.median(ours / other for ours, other in zip(*speeds, strict=True))
        assert row["mfu"] == pytest.approx(row["gflop_per_second"] / limit)
        parameters, speed, relative, _, _, mfu, *shares = numbers(line.removeprefix(row["name"]))
        assert (parameters, speed) == (row["parameters"], round(row["tokens_per_second"]))
        assert [relative, mfu / 100] == pytest.approx([row["relative"], row["mfu"]], abs=0.006)
        assert shares == pytest.approx([100 * row[part] for part in PARTS], abs=0.06)


def test_peers_are_measured_beside_every_recipe(benchmarks, tmp_path: Path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("CRAM_MICRO_BATCH", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", "--peers", *short("1", tmp_path / "speed.json")])
    benchmarks.train.main()
    rows = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["pocket", "BERT, as pocket", "ModernBERT, as pocket"]
    assert {(row["batch"], row["micro_batch"], row["masks"]) for row in rows} == {(4, 2, 32)}
    assert all(0 < row[part] < 1 for row in rows for part in PARTS)


def few(file: Path, *more: object) -> list[str]:
    """Options for finetuning a model on some examples, which takes no time."""
    sizes = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
    return [
        *sizes,
        "--vocabulary",
        "200",
        "--examples",
        "40",
        "--seeds",
        "3",
        "--threads",
        "2",
        "--json",
        str(file),
        *map(str, more),
    ]


def test_finetuning_is_measured_with_torch_alone(bare, tmp_path: Path):
    done = run("finetune.py", "--peers", *few(tmp_path / "speed.json", "--epochs", 2), **bare)
    assert "transformers or accelerate is not installed" in done.stdout
    found = json.loads((tmp_path / "speed.json").read_text())
    (row,), (turn,) = found["rows"], found["rows"][0]["turns"]
    assert turn["examples"] == 3 * 2 * 32
    assert (turn["at_once"], turn["threads"]) == (2, 1)
    assert turn["examples_per_second"] == pytest.approx(turn["examples"] / turn["seconds"])
    assert 0.5 < turn["loss"] < 1.0
    name, *cells = done.stdout.splitlines()[-1].split()
    assert name == row["name"] == "cram"
    assert numbers(" ".join(cells))[2:4] == pytest.approx([row["examples_per_second"], 1.0], abs=0.06)


def test_the_trainer_finetunes_the_same_model_on_the_same_examples(benchmarks, tmp_path: Path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script, layout = benchmarks.finetune, benchmarks.train.settings("pocket-modern", {"architecture": SIZES})[0]
    export.save(Bert(layout, 200, script.LENGTH), tmp_path)
    given, asked = script.synthetic(40, 200), Finetuning(epochs=2, learning_rate=1e-9)
    runs = [script.ours(tmp_path, given, asked, 0, 1)]
    runs += [script.theirs(tmp_path, given, asked, 0, 1, strategy) for strategy in script.STRATEGIES.values()]
    assert [one["examples"] for one in runs] == [64] * 4
    assert all(0.3 < one["loss"] < 2 for one in runs)  # their last layers are random
    assert all(one["end"] > one["begin"] and one["cpu_seconds"] > 0 for one in runs)


def test_the_difference_of_two_engines_is_in_welchs_standard_errors(benchmarks):
    from scipy import stats

    rng = np.random.default_rng(0)
    for _ in range(20):
        ours, others = rng.normal(50, 3, 5).tolist(), rng.normal(51, 1, 5).tolist()
        expected = stats.ttest_ind(ours, others, equal_var=False).statistic
        assert benchmarks.parity.errors(ours, others) == pytest.approx(expected)
    assert benchmarks.parity.errors([1.0, 1.0], [1.0, 1.0]) == 0.0
    assert benchmarks.parity.errors([1.0, 1.0], [2.0, 2.0]) == -np.inf
    scores = {(engine, "rte"): [50.0, 52.0] for engine in benchmarks.parity.ENGINES}
    scores[benchmarks.parity.LENGTH, "rte"] = [60.0, 62.0]
    row = benchmarks.parity.table(scores, ["rte"]).splitlines()[1].split()
    assert row == ["rte", "61.00", "±", "1.41", "51.00", "±", "1.41", "51.00", "±", "1.41", "+7.07", "(far)", "+0.00"]


def test_synthetic_examples_are_as_long_as_colas(benchmarks):
    given = benchmarks.finetune.synthetic(8551, 32_768)
    assert len(given) == 8551
    assert np.percentile(given.lengths, [25, 50, 75, 90]).tolist() == pytest.approx([9, 11, 13, 17], abs=1)
    assert given.lengths.mean() == pytest.approx(11.5, abs=0.2)
    assert len(np.unique(given.tokens)) == pytest.approx(5563, rel=0.05)
    assert (given.tokens[given.ends - 1] == SEP).all()
    assert (given.tokens[given.ends - given.lengths] == CLS).all()


def test_peers_need_a_layout_that_transformers_has(tmp_path: Path):
    pytest.importorskip("accelerate")
    done = run("finetune.py", "--recipe", "pocket", "--peers", *few(tmp_path / "speed.json"), code=2)
    assert "no peers of recipe 'pocket': transformers has no model of this layout" in done.stderr


def test_a_tokenizer_or_data_that_is_not_there_is_told(tmp_path: Path):
    done = run("finetune.py", "--data", tmp_path, *few(tmp_path / "speed.json"), code=2)
    assert "--tokenizer" in done.stderr
    done = run(
        "finetune.py", "--data", tmp_path, "--tokenizer", tmp_path / "no.json", *few(tmp_path / "speed.json"), code=2
    )
    assert "cola/train.parquet" in done.stderr


def case(benchmarks, peer: str | None = None, **changes):
    """A recipe's model and training, or a peer's, at tiny sizes."""
    training = Training(budget=8 * 4 * LENGTH, budget_unit="tokens", batch_size=4, batch_ramp=0)
    architecture = Architecture(**SIZES | changes)
    ours = benchmarks.loops.Case("tiny", None, False, architecture, training, VOCABULARY, LENGTH, steps=6)
    return ours.of_peer(peer) if peer else ours


@pytest.mark.parametrize("peer", ["BERT", "ModernBERT"])
@pytest.mark.parametrize("changes", [{}, {"activation": "gelu", "intermediate": 64}])
def test_operations_of_the_peers_are_those_that_torch_counts(benchmarks, peer: str, changes: dict):
    pytest.importorskip("transformers")
    theirs = case(benchmarks, peer, **changes)
    model, corpus = benchmarks.loops.peer_model(theirs), theirs.corpus()
    model.set_attn_implementation("eager")  # the fused one is not counted
    tokens, positions, hidden = masking.mask(corpus.sequences, 0, theirs.masks, corpus, seed=0)
    labels = np.full_like(tokens, -100)
    np.put_along_axis(labels, positions, hidden, axis=1)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels)).loss.backward()
    counted = counter.get_total_flops() / tokens.size  # with the angles of positions in some versions
    assert counted == pytest.approx(theirs.operations(), rel=1e-3)


@pytest.mark.parametrize("peer", [None, "BERT"])
def test_each_part_of_a_step_is_timed_once_and_not_before_the_warm_up_is_over(benchmarks, monkeypatch, peer):
    if peer:
        pytest.importorskip("transformers")
    watch, made = benchmarks.watch.Watch, []

    class Kept(watch):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(benchmarks.loops, "Watch", Kept)
    here = machine.Machine(torch.device("cpu"), torch.float32, False, 2)  # two micro-batches a step
    found = benchmarks.loops.measure(case(benchmarks, peer), here)
    steps = [[part for part, *_ in step] for step in made[0].steps]
    assert len(steps) == 2 + 6
    assert all(step.count("forward") == step.count("backward") == 2 for step in steps)
    spans = [(begin, end) for step in made[0].steps for _, begin, end in step]
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))  # none within another
    assert found["micro_batch"] == 2
    assert torch.Tensor.backward.__module__ == "torch._tensor"  # as it was


def test_the_benchmarks_assume_what_the_stages_do(benchmarks):
    assert vocabulary.Vocabulary().entries == benchmarks.train.ENTRIES
    assert Tokenize().length == benchmarks.train.LENGTH
    assert MASK == benchmarks.loops.MASK_ID
    assert len(SPECIALS) == benchmarks.loops.SPECIALS


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
    found = json.loads((folder / "comparison.json").read_text())["recipes"]
    return {
        name: [[e["heldout_loss"] for e in run["evaluations"]] for run in one["runs"]] for name, one in found.items()
    }


def test_recipes_are_compared_with_torch_alone_and_an_interrupted_run_goes_on(bare, tmp_path: Path):
    changes = [f"{name}.architecture.{field}={size}" for name in RECIPES for field, size in SIZES.items()]
    changes += [f"{name}.batch_size=8" for name in RECIPES]
    race = ["--recipe", *RECIPES, "--set", *changes, "--data", tokenized(tmp_path / "data"), "--threads", 1]
    race += ["--tokens", 60 * 8 * LENGTH, "--seeds", 2, "--folder"]
    bare_run = run("recipes.py", *race, tmp_path / "at-once", **bare)
    assert "matplotlib is not installed" in bare_run.stdout
    place = "pocket-modern, seed 0: 50%"
    stopped = run("recipes.py", *race, tmp_path / "race", "--keep", code=143, STOP_AFTER=place, **bare)
    assert place in stopped.stderr
    rest = run("recipes.py", *race, tmp_path / "race", "--keep")  # with matplotlib
    assert "Resuming from step" in rest.stderr
    assert "pocket, seed 0" not in rest.stderr  # it had finished
    assert "pocket-modern, seed 0: 40%" not in rest.stderr
    assert losses(tmp_path / "race") == losses(tmp_path / "at-once")
    assert (tmp_path / "race" / "comparison.png").read_bytes().startswith(b"\x89PNG")

    comparison = json.loads((tmp_path / "race" / "comparison.json").read_text())
    found = comparison["recipes"]
    row = next(line for line in rest.stdout.splitlines() if "loss at 100%" in line)
    cells = iter(word for word in row.split()[5:] if word != "±")
    for name, runs in losses(tmp_path / "race").items():
        ends = [curve[-1] for curve in runs]
        assert len({tuple(curve) for curve in runs}) == 2  # another seed, another run
        assert found[name]["heldout_loss"][-1]["mean"] == pytest.approx(sum(ends) / 2)
        assert [float(next(cells)), float(next(cells))] == pytest.approx(
            [np.mean(ends), np.std(ends, ddof=1)], abs=6e-4
        )
        fractions = found[name]["passes"]["fractions"]
        assert all(fraction is None or 0 < fraction <= 1 for fraction in fractions)
        assert found[name]["passes"]["seeds"] == 2 - fractions.count(None)
    assert found["pocket"]["passes"]["seeds"] == 2  # at its own end at the latest
    scored_again(tmp_path, comparison, bare)


def scored_again(folder: Path, comparison: dict, bare: dict) -> None:
    """score.py finds the held-out losses of kept runs again, and their differences, in a table too."""
    score = ["--data", folder / "data", "--threads", 1, "--json", folder / "scores.json", "--folder"]
    done = run("score.py", *score, folder / "race", **bare)
    scores, ends = json.loads((folder / "scores.json").read_text()), comparison["ends"]
    assert scores["ends"] == ends
    for name, runs in scores["runs"].items():
        assert [one["heldout"] for one in runs] == [one["heldout"] for one in comparison["recipes"][name]["runs"]]
        value = ends[name]["nats_per_byte"]["mean"]
        assert value == pytest.approx(np.mean([one["heldout"]["nats_per_byte"]["value"] for one in runs]))
        assert f"{value:.4f} ± " in next(line for line in done.stdout.splitlines() if "nats per byte" in line)
    first, other = (ends[name]["nats_per_byte"]["mean"] for name in RECIPES)
    assert ends["pocket-modern"]["difference"]["value"] == pytest.approx(other - first, abs=1e-5)
    assert 0 < ends["pocket-modern"]["difference"]["standard_error"] < 0.5
    assert "checkpoint.safetensors" in run("score.py", *score, folder / "at-once", code=2).stderr


def evaluations(fractions, losses) -> list[dict]:
    pairs = zip(fractions, losses, strict=True)
    return [{"fraction": float(fraction), "heldout_loss": float(loss)} for fraction, loss in pairs]


def test_a_loss_is_passed_where_the_falling_curve_has_it(benchmarks):
    rng = np.random.default_rng(0)
    for _ in range(50):
        curve = np.sort(rng.random(11))[::-1]
        fractions = np.concatenate([[0], np.sort(rng.random(9)), [1]])
        loss = rng.uniform(curve[-1], curve[0])
        found = benchmarks.curves.passes(evaluations(fractions, curve), loss)
        assert np.interp(found, fractions, curve) == pytest.approx(loss)
    assert benchmarks.curves.passes(evaluations([0, 0.5, 1], [3, 2, 1]), 0.9) is None
    assert benchmarks.curves.passes(evaluations([0, 0.5, 1], [3, 2, 1]), 1) == 1
    assert benchmarks.curves.passes(evaluations([0, 0.5, 0.8, 1], [3, 1, 2, 0]), 2) == 0.25  # the first time


def compared(benchmarks, runs: dict[str, list[dict]]) -> dict[str, list[str]]:
    """The rows of the table, by their first cell."""
    about = {"budget": 1.0, "budget_unit": "tokens", "machine": {"device": "CPU"}, "seeds": len(runs["a"])}
    table = benchmarks.curves.table(about | {"recipes": benchmarks.curves.compare(runs)})
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


def test_a_recipe_that_does_not_get_there_is_said_to_never_do(benchmarks):
    runs = {
        name: [
            {"evaluations": evaluations([0, 1], ends), "tokens": 1, "seconds": 1.0, "training": {"budget": 1.0}}
            for ends in curves
        ]
        for name, curves in {"a": [(3, 1), (3, 2)], "b": [(3, 1.5), (3, 1.5)], "c": [(3, 2.5), (3, 2.5)]}.items()
    }
    table = compared(benchmarks, runs)
    assert table["passes the first's end at"] == ["1.000 ± 0.000", "0.667 (1 of 2)", "never"]


def test_a_smaller_budget_is_told_and_where_it_passes_is_a_fraction_of_the_first_ones(benchmarks):
    curve = {"evaluations": evaluations([0, 1], [3, 1]), "tokens": 1, "seconds": 1.0}
    runs = {name: [curve | {"training": {"budget": budget}}] for name, budget in {"a": 40.0, "b": 10.0}.items()}
    table = compared(benchmarks, runs)
    assert table["budget, of the first's"] == ["1.00", "0.25"]
    assert table["loss at 100% of it"] == ["1.000", "1.000"]
    assert table["passes the first's end at"] == ["1.000", "0.250"]


def test_the_order_of_the_sequences_is_the_seeds(benchmarks):
    rows = np.arange(60).reshape(20, 3)
    first, again, other = (benchmarks.recipes.Shuffled(rows, seed)[np.arange(20)] for seed in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert (np.sort(first[:, 0]) == rows[:, 0]).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("pocket.nope=1", "pocket.nope"),
        ("pocket.learning_rate=-1", "pocket.learning_rate"),
        ("pocket.architecture.heads=7", "heads 7"),
        ("pocket.seed=1", "pocket.seed=1"),
        ("pocket.architecture=1", "pocket.architecture=1"),
        ("other.learning_rate=1", "other.learning_rate=1"),
        ("pocket.learning_rate", "pocket.learning_rate"),
    ],
)
def test_a_change_that_can_not_be_made_is_named(benchmarks, change: str, named: str):
    with pytest.raises(InputError, match=named):
        benchmarks.train.settings("pocket", benchmarks.recipes.changes([change], ["pocket"])["pocket"])


def test_a_change_is_made_to_its_recipe_alone(benchmarks):
    texts = ["a.learning_rate=0.25", "a.architecture.layers=7", "a.optimizer=sgd", "a.budget=5"]
    found = benchmarks.recipes.changes(texts, ["a", "b"])
    a = {"learning_rate": 0.25, "architecture": {"layers": 7}, "optimizer": "sgd", "budget": 5}
    assert found == {"a": a, "b": {}}
    architecture, training = benchmarks.train.settings("pocket", found["a"])
    assert (architecture.layers, architecture.hidden) == (7, 256)  # the latter pocket's
    assert (training.learning_rate, training.optimizer) == (0.25, "sgd")


def test_what_is_wrong_with_the_data_is_told(benchmarks, tmp_path: Path):
    with pytest.raises(InputError, match="not what the tokenize stage writes"):
        benchmarks.recipes.read(tmp_path, None)
    data = tokenized(tmp_path / "data")
    with pytest.raises(InputError, match="token 49 of 40 entries"):
        benchmarks.recipes.read(data, 40)
    assert benchmarks.recipes.read(data, None).vocabulary == VOCABULARY
    (data / "stage.json").unlink()
    assert benchmarks.recipes.read(data, 60).vocabulary == 60
    with pytest.raises(InputError, match="--vocabulary"):
        benchmarks.recipes.read(data, None)


def test_other_data_is_another_run(benchmarks, tmp_path: Path):
    corpus = benchmarks.recipes.read(tokenized(tmp_path / "data"), None)
    rows = np.array(corpus.sequences)
    rows[0, 0] += 1
    assert benchmarks.recipes.identity(corpus) != benchmarks.recipes.identity(
        masking.Corpus(rows, corpus.heldout, VOCABULARY, 4, 5)
    )
