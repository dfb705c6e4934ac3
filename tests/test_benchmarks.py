"""Each benchmark at its smallest, those of training and GPUs on a machine that has torch and little else."""

import importlib
import json
import os
import signal
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

from model import export, masking
from model.errors import InputError
from model.finetuning import Examples
from model.heldout import Heldout
from model.machine import Machine
from model.settings import Architecture, Finetuning, Training
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

FOLDER = Path(__file__).parents[1] / "benchmarks"
CPU = Machine(torch.device("cpu"), torch.float32, False, 2)
ABSENT = ["prefect", "transformers", "datasets", "pyarrow", "matplotlib", "tokenizers", "zstandard", "sklearn"]
BARE = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))"  # so that importing them fails
IN_TURN = """
import json, runpy, sys
from model import machine

machine.MATRIX_SIDE = {"cpu": 64}  # measuring larger products takes seconds
for script, *arguments in json.loads(sys.argv[1]):
    sys.argv = [script, *map(str, arguments)]
    runpy.run_path(script, run_name="__main__")
"""
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48}
SIZE_OPTIONS = [word for name, size in SIZES.items() for word in (f"--{name}", size)]
RECIPES = ("pocket", "pocket-modern")
VOCABULARY, LENGTH, ROWS = 50, 16, 120


def tokenized(folder: Path) -> Path:
    """A folder as the tokenize stage leaves it: tokens that go up by one, from any token on."""
    folder.mkdir()
    starts = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS + 20, 1))
    rows = (5 + (starts + np.arange(LENGTH)) % (VOCABULARY - 5)).astype(np.uint16)
    np.save(folder / "sequences.npy", rows[:ROWS])
    Heldout.of_rows(rows[ROWS:]).save(folder)
    (folder / "stage.json").write_text(json.dumps({"stats": {"entries": VOCABULARY, "sequences": ROWS}}))
    return folder


def race(data: Path, folder: Path) -> list[object]:
    """The options of a comparison of two recipes."""
    changes = [f"{name}.architecture.{field}={size}" for name in RECIPES for field, size in SIZES.items()]
    changes += [f"{name}.batch_size=8" for name in RECIPES]
    budget = ["--tokens", 60 * 8 * LENGTH, "--seeds", 2]
    return ["--recipe", *RECIPES, "--set", *changes, "--data", data, *budget, "--folder", folder]


def glue(kind: type, seed: int) -> Examples:
    """Encoded inputs of one text that begin with the token of their class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, 64)
    return Examples.of([[2, 10 + x, *random.integers(20, 40, 5), 3] for x in labels], labels.astype(kind))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the scripts `said` and wrote to the `folder` on a machine without those packages, in one process."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE)
    data, packed, gpu = tokenized(folder / "data"), folder / "packed", folder / "gpu"
    packed.mkdir()
    arrays = {
        f"{task}/{split}/{name}": getattr(glue(kind, seed), name)
        for task, kind in {"cola": np.int64, "stsb": np.float64}.items()
        for seed, split in enumerate(("train", "validation"))
        for name in ("tokens", "ends", "labels")
    }
    np.savez(packed / "glue.npz", **arrays)
    tiny = [*SIZE_OPTIONS, "--vocabulary", 200, "--recipe"]
    turns, sizes = (
        ["--batch", 4, "--steps", 3, "--rounds", 2],
        [f"frontier.architecture.{n}={v}" for n, v in SIZES.items()],
    )
    short = ["cram", "--data", packed, "--recipe", "frontier", "--minutes", 0.1]
    short += ["--set", "frontier.batch_size=8", *sizes]
    tuning = ["--data", packed, "--recipe", "frontier", "--seeds", 1, "--epochs", 10, "--rate", 0.01]
    parts = [
        ["pack", "--tokenized", data, "--data", packed, "--tokens", 100 * LENGTH],
        ["correctness", "--layout", "modern", "--dtype", "fp32", "bf16"],
        ["speed", "--compile", "no", *tiny, "pocket", *turns],
        ["attention", "--recipe", "demo"],
        ["finetuning", *tiny, "modern", "--examples", 40, "--epochs", 1],
        [*short, "--stop-after", 0.05],
        short,
        ["glue", *tuning],
        ["glue", *tuning],
    ]
    commands = [
        ["train.py", *tiny, *RECIPES, "--peers", *turns, "--json", folder / "speed.json"],
        ["recipes.py", *race(data, folder / "race")],
        *(["gpu.py", "--folder", gpu, *part] for part in parts),
    ]
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands, default=str)]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(program, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, gpu=gpu, said=" ".join(done.stdout.split()))


def written(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Their modules."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("common", "finetune", "gpu", "recipes", "train")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def test_speed_of_pretraining_with_torch_alone(bare: SimpleNamespace):
    assert "transformers not installed" in bare.said
    content = written(bare.folder / "speed.json")
    rows, first = content["rows"], content["rows"][0]["turns"]
    assert tuple(row["name"] for row in rows) == RECIPES
    for row in rows:
        speeds = [[turn["tokens_per_second"] for turn in turns] for turns in (row["turns"], first)]
        assert row["tokens_per_second"] == statistics.median(speeds[0])
        assert row["relative"] == statistics.median(ours / other for ours, other in zip(*speeds, strict=True))
        assert row["mfu"] == pytest.approx(row["gflop_per_second"] / content["matrix_gflop_per_second"])
        assert row["cpu_seconds_per_1000_tokens"] > 0
        assert f"{row['name']} {row['parameters']:,} {row['tokens_per_second']:,.0f}" in bare.said
    assert len(written(bare.gpu / "speed-pocket.json")["rows"]) == 1


@pytest.mark.parametrize("peer", ["BERT", "ModernBERT"])
def test_peers_are_measured_and_their_operations_are_those_that_torch_counts(scripts, monkeypatch, peer: str):
    train = scripts.train
    monkeypatch.setattr(train.machine, "MATRIX_SIDE", {"cpu": 64})
    training = Training(budget=4 * 4 * LENGTH, budget_unit="tokens", batch_size=4, batch_ramp=0)
    case = train.Case("tiny", None, False, Architecture(**SIZES), training, VOCABULARY, LENGTH).of_peer(peer)
    model, corpus = train.peer_model(case), case.corpus()
    model.set_attn_implementation("eager")  # the fused one is not counted
    tokens, positions, hidden = masking.mask(corpus.sequences, 0, case.masks, corpus, seed=0)
    labels = np.full_like(tokens, -100)
    np.put_along_axis(labels, positions, hidden, axis=1)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels)).loss.backward()
    assert counter.get_total_flops() / tokens.size == pytest.approx(case.operations(), rel=1e-3)
    measured = train.measure(case, CPU)
    assert measured["micro_batch"] == 2
    assert measured["tokens_per_second"] == pytest.approx(2 * 4 * LENGTH / measured["seconds"])


def test_speed_of_finetuning_with_torch_alone(bare: SimpleNamespace):
    (row,) = written(bare.gpu / "finetuning-modern.json")["rows"]
    (turn,) = row["turns"]
    assert turn["examples"] == 32
    assert turn["examples_per_second"] == row["examples_per_second"] == pytest.approx(32 / turn["seconds"])
    assert 0.5 < turn["loss"] < 1.0
    assert f"{row['examples_per_second']:,.1f} 1.000" in bare.said


def test_the_trainer_finetunes_the_same_model_on_the_same_examples(scripts, tmp_path: Path):
    pytest.importorskip("accelerate")
    given, script = SimpleNamespace(vocabulary=200, **SIZES), scripts.finetune
    script.write_model("pocket-modern", given, tmp_path)
    examples, asked = script.synthetic(40, 200), Finetuning(epochs=2, learning_rate=1e-9)
    assert examples.lengths.mean() == pytest.approx(11.5, abs=1.5), "as long as CoLA's"
    runs = [script.ours(tmp_path, examples, asked, 0, 1), script.theirs(tmp_path, examples, asked, 0, 1, "random")]
    for one in runs:
        assert one["examples"] == 64
        assert 0.3 < one["loss"] < 2, "their last layers are random"
        assert one["end"] > one["begin"]
        assert one["cpu_seconds"] > 0


def test_the_benchmarks_assume_what_the_stages_do(scripts):
    common = scripts.common
    assert (Vocabulary().entries, Tokenize().length) == (common.ENTRIES, common.LENGTH)


def losses(comparison: dict) -> dict[str, list[list[float]]]:
    """The held-out losses of every run, by recipe."""
    runs = {name: one["runs"] for name, one in comparison["recipes"].items()}
    return {
        name: [[e["heldout_nats_per_byte"] for e in run["evaluations"]] for run in made] for name, made in runs.items()
    }


def test_an_interrupted_comparison_of_recipes_continues(bare, scripts, tmp_path: Path, monkeypatch, capsys):
    def interrupt(text: str, **_: object) -> None:
        if text.startswith("pocket-modern, seed 0: 50%"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys, "argv", ["recipes.py", *map(str, race(bare.folder / "data", tmp_path))])
    with monkeypatch.context() as patch:
        patch.setattr(scripts.recipes, "print", interrupt, raising=False)
        with pytest.raises(KeyboardInterrupt):
            scripts.recipes.main()
    assert len(list(tmp_path.glob("*/checkpoint.safetensors"))) == 1
    scripts.recipes.main()
    comparison = written(tmp_path / "comparison.json")
    assert "pocket, seed 0" not in capsys.readouterr().err, "it had finished"
    assert losses(comparison) == losses(written(bare.folder / "race" / "comparison.json")), "which was made at once"
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib is not installed" in bare.said
    for name, runs in losses(comparison).items():
        one = comparison["recipes"][name]
        assert runs[0] != runs[1], "another seed, another run"
        last, ends = one["curve"][-1], [curve[-1] for curve in runs]
        assert (last["mean"], last["deviation"]) == pytest.approx((np.mean(ends), np.std(ends, ddof=1)))
        assert 0 < one["nats_per_byte"]["mean"] < 2 * np.log(VOCABULARY)
    assert comparison["recipes"]["pocket"]["passes"]["tokens"]["seeds"] == 2, "at its own end at the latest"
    assert comparison["recipes"]["pocket-modern"]["difference"]["standard_error"] > 0


def test_a_recipe_passes_the_firsts_end_where_its_curve_first_has_that_loss(scripts):
    def ran(*losses: float, spent: int) -> dict:
        """A run whose evaluations are evenly spread."""
        evaluations = [
            {"tokens": spent * i / (len(losses) - 1), "heldout_nats_per_byte": loss} for i, loss in enumerate(losses)
        ]
        return {"evaluations": evaluations}

    first = [ran(3, end, spent=40) for end in (1, 2, 2, 2)]
    others = [ran(*curve, spent=10) for curve in [(3, 1.5), (3, 1), (3, 1, 2.5, 0.5, 0.5), (2, 1)]]
    assert scripts.recipes.passing(first, first, "tokens")["mean"] == 1.0
    found = scripts.recipes.passing(others, first, "tokens")
    assert found["fractions"] == [None, 0.5 / 4, 0.125 / 4, 0.0]


def test_an_impossible_change_is_named(scripts):
    for change in ("nope=1", "learning_rate=-1", "architecture.heads=7", "seed=1"):
        with pytest.raises(InputError, match=change.split("=")[0].split(".")[-1]):
            scripts.common.settings("pocket", scripts.recipes.changes([f"pocket.{change}"], ["pocket"])["pocket"])


def test_recipes_with_other_vocabularies_read_data_of_their_own(scripts, tmp_path: Path):
    recipes, a, b = scripts.recipes, tokenized(tmp_path / "a"), tokenized(tmp_path / "b")
    sequences = np.load(b / "sequences.npy")
    sequences[0, 0] += 1
    np.save(b / "sequences.npy", sequences)
    first, second = recipes.corpora([str(a), f"small={b}"], ["pocket", "small"]).values()
    assert recipes.identity(first) != recipes.identity(second)
    for wrong, name in (([f"small={b}"], "pocket"), ([str(a), f"other={b}"], "other")):
        with pytest.raises(InputError, match=name):
            recipes.corpora(wrong, ["pocket", "small"])
    held = Heldout.load(b)
    held.documents[0, 3] += 1
    held.save(b)
    with pytest.raises(InputError, match="--data"):
        recipes.corpora([str(a), f"small={b}"], ["pocket", "small"])
    np.save(b / "sequences.npy", sequences[1:])
    with pytest.raises(InputError, match=str(b)):
        recipes.read(b)


@pytest.mark.parametrize("characters", ["ascii", "unicode"])
def test_speed_of_the_data_stages(scripts, tmp_path: Path, toy_texts: list[str], monkeypatch, capsys, characters: str):
    for name in ("CRAM_ARTIFACTS", "PREFECT_LOGGING_TO_API_ENABLED", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # the script sets these; here they get their values back
    monkeypatch.delitem(sys.modules, "data", raising=False)
    text = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    options = ["--characters", characters, "--workers", "1", "--entries", "400", "--json", str(tmp_path / "speed.json")]
    monkeypatch.setattr(sys, "argv", ["data.py", str(text), *options])
    importlib.import_module("data").main()
    (of_one_worker,) = written(tmp_path / "speed.json")["runs"]
    rows = of_one_worker["rows"]
    stages = ["download", "deduplicate, exact", "measure", "filter", "vocabulary", "tokenize and sort"]
    assert [row["stage"] for row in rows] == [*stages, "the whole chain"]
    assert all(row["mb_per_second"] > 0 and row["peak_mib"] > 10 for row in rows)
    assert all(row["fraction_of_limit"] > 0 for row in rows[:-1])
    assert capsys.readouterr().out.splitlines()[-1].startswith("the whole chain")


def test_a_gpu_is_compared_with_the_cpu(bare):
    rows = [written(path) for path in bare.gpu.glob("correctness-*.json")]
    assert all(row["right"] for row in rows)
    rounds = {(row["dtype"], row["check"]): row["error"] > 0 for row in rows}
    assert rounds == {(d, c): d == "bf16" for d in ("fp32", "bf16") for c in ("gradients", "padded")}


def test_kernels_of_attention_are_timed_and_those_that_are_not_there_named(bare: SimpleNamespace):
    rows = {row["kernel"]: row for row in map(written, bare.gpu.glob("attention-*.json"))}
    assert {name for name, row in rows.items() if row.get("ms", 0) > 0} == {"FLASH_ATTENTION", "MATH"}  # of a CPU
    assert all(row["shape"][1:] == [128, 2, 64] for row in rows.values())
    assert "problem" in rows["CUDNN_ATTENTION"]


def test_what_is_packed_is_crammed_in_two_calls_and_finetuned(bare, scripts):
    packed = scripts.recipes.read(bare.folder / "packed")
    rows = np.linspace(0, ROWS - 1, 100).astype(int)
    assert np.array_equal(packed.sequences, np.load(bare.folder / "data" / "sequences.npy")[rows])
    assert "The same command continues" in bare.said
    [home] = bare.gpu.glob("frontier-*/")
    run = written(home / "result.json")
    assert run["seconds"] >= 6
    assert 0 < run["heldout"]["nats_per_byte"]["value"] < np.log(VOCABULARY)
    assert export.load(home).architecture.hidden == SIZES["hidden"]
    scores = {row["task"]: row for row in map(written, bare.gpu.glob("glue-*.json"))}
    assert min(scores["cola"]["accuracy"], scores["cola"]["correlation"], scores["stsb"]["correlation"]) > 80
    assert scores["stsb"]["accuracy"] is None
    said = [f"seed 0, epochs 10, rate 0.01, loss {row['loss']:,.4g}" for row in scores.values()]
    assert [bare.said.count(each) for each in said] == [2, 2], "once finetuned, twice shown"


def test_what_joins_parts_is_measured_on_made_up_rows(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    joins = importlib.import_module("joins")
    for name in ("measure", "filter", "vocabulary", "tokenize"):  # in a benchmark, each has a process of its own
        module = importlib.import_module(f"tasks.{name}")
        for patched in {"over_parts", "sort_keys", "in_batches"} & vars(module).keys():
            monkeypatch.setattr(module, patched, getattr(module, patched))
    for name, (make, step) in joins.STEPS.items():
        work = tmp_path / name
        for inner in ("digests", "drops", "buckets", "pairs"):
            (work / inner).mkdir(parents=True)
        monkeypatch.setenv("CRAM_ARTIFACTS", str(work / "artifacts"))
        make(work, 100, 4)
        assert joins.measured(step, work, 100, 4)["cpu_seconds"] > 0
    assert len(np.load(tmp_path / "tokenize" / "random")) == 400
    assert list((tmp_path / "minhash" / "pairs").glob("range-*"))
