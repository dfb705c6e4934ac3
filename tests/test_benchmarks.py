"""Each benchmark runs at its smallest size, those of training and GPUs on a machine that has torch and little else."""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import store_of_its_own, toy_model, toy_tokens, write_jsonl
from test_minimal_pairs import MODERN, sentences_from
from torch.utils.flop_counter import FlopCounterMode

from model import masking
from model.errors import InputError
from model.finetuning import Examples
from model.heldout import Heldout
from model.machine import Machine
from model.settings import Architecture, Finetuning, Training
from tasks.minimal_pairs import PairsRun, minimal_pairs
from tasks.reports.published import SMALL, TEST
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
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code != 1:  # of a call that was stopped
            raise
"""
SIZES = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48}
SIZE_OPTIONS = [word for name, size in SIZES.items() for word in (f"--{name}", size)]
RECIPES = ("pocket", "pocket-modern")
VOCABULARY = 50
LENGTH = 16
ROWS = 120


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


def pairs(folder: Path) -> None:
    """Packed minimal pairs of three groups, as `gpu.py pack` writes them."""
    tokens = np.random.default_rng(0).integers(20, 40, 12 * 5)
    parts = {"part/all": np.ones(6, bool), "part/some": np.arange(6) < 3}
    ends = np.arange(5, 61, 5)
    groups = np.array(list("abcabc"))
    np.savez(folder / "pairs.npz", tokens=tokens, words=tokens // 2, ends=ends, groups=groups, **parts)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the scripts `said` and wrote to the `folder` on a machine without those packages, in one process."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(BARE)
    data = tokenized(folder / "data")
    packed = folder / "packed"
    gpu = folder / "gpu"
    packed.mkdir()
    pairs(packed)
    arrays = {
        f"{task}/{split}/{name}": getattr(glue(kind, seed), name)
        for task, kind in {"sst2": np.int64, "mrpc": np.int64, "stsb": np.float64}.items()
        for seed, split in enumerate(("train", "validation"))
        for name in ("tokens", "ends", "labels")
    }
    np.savez(packed / "glue.npz", **arrays)
    tiny = [*SIZE_OPTIONS, "--vocabulary", 200, "--recipe"]
    turns = ["--batch", 4, "--steps", 3, "--rounds", 2]
    sizes = [f"frontier.architecture.{n}={v}" for n, v in SIZES.items()]
    tiny_model = ["--data", packed, "--recipe", "frontier", "--set", "frontier.batch_size=8", *sizes, "--budget"]
    short = ["cram", *tiny_model, "0.04 minutes"]
    tuning = ["--data", packed, "--recipe", "frontier", "--seeds", 1, "--epochs", 10, "--rate", 0.01]
    parts = [
        ["pack", "--tokenized", data, "--data", packed, "--tokens", 100 * LENGTH],
        ["correctness", "--layout", "modern", "--dtype", "fp32", "bf16"],
        ["speed", "--compile", "no", *tiny, "pocket", *turns],
        ["attention", "--recipe", "demo"],
        ["finetuning", *tiny, "modern", "--examples", 40, "--epochs", 1],
        [*short, "--stop-after", 0.02],
        short,
        ["glue", *tuning],
        ["glue", *tuning],
        ["blimp", "--data", packed],
        ["states", *tiny_model, "4000 tokens"],
        ["time-to", *tiny_model, "0.5 seconds", "1 second", "--epochs", 1],
    ]
    away = [["cram", *tiny_model, "4000 tokens", "--apart"], ["wait", "--every", 0.2], ["blimp", "--data", packed]]
    commands = [
        ["train.py", *tiny, *RECIPES, "--peers", *turns, "--json", folder / "speed.json"],
        ["recipes.py", *race(data, folder / "race")],
        *(["gpu.py", "--folder", gpu, *part] for part in parts),
        *(["gpu.py", "--folder", folder / "apart", *part] for part in away),
    ]
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands, default=str)]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{FOLDER.parent}", "CRAM_DTYPE": "bf16"}  # for `states`
    done = subprocess.run(program, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(folder=folder, gpu=gpu, said=" ".join(done.stdout.split()))


def written(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_training_and_gpu_scripts_run_with_torch_alone(bare: SimpleNamespace):
    speeds = written(bare.folder / "speed.json")["rows"]
    assert [row["name"] for row in speeds] == list(RECIPES)
    assert "transformers not installed" in bare.said
    race = written(bare.folder / "race" / "comparison.json")["recipes"]
    assert set(race) == set(RECIPES)
    assert "matplotlib is not installed" in bare.said
    assert all(written(path)["right"] for path in bare.gpu.glob("correctness-*.json"))
    for pattern in ("speed-*.json", "attention-*.json", "finetuning-*.json", "frontier-*/result.json", "glue-*.json"):
        assert list(bare.gpu.glob(pattern)), pattern
    assert "The same command continues" in bare.said


def test_training_in_a_process_of_its_own_is_waited_for(bare: SimpleNamespace):
    [path] = (bare.folder / "apart").glob("frontier-*/result.json")
    assert written(path)["tokens"] >= 4000
    [path] = (bare.folder / "apart").glob("blimp-*.json")
    assert written(path)["model"].startswith("frontier-")
    assert {"all", "some"} <= set(written(path))
    assert written(path)["clock_mhz"] is None


def test_states_in_both_precisions_read_the_same_tokens_and_differ(bare: SimpleNamespace):
    compared = written(bare.gpu / "states.json")["recipes"]
    [[bf16], [fp32]] = (recipe["runs"] for recipe in compared.values())
    assert bf16["tokens"] == fp32["tokens"]
    assert bf16["evaluations"][0] == fp32["evaluations"][0] | {"seconds": bf16["evaluations"][0]["seconds"]}
    assert bf16["heldout"]["nats_per_byte"] != fp32["heldout"]["nats_per_byte"]


def test_packed_pairs_are_scored_as_the_stage_does_and_once(tmp_path: Path, toy_texts: list[str], monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    carried = importlib.import_module("carried")
    gpu_models = importlib.import_module("gpu_models")
    path = tmp_path / "pairs.csv"
    good = sentences_from(1, 300)
    bad = [*sentences_from(2, 150), *(" ".join(reversed(text.split())) for text in good[150:])]
    bad[:5] = good[:5]
    groups = ["other"] * 150 + ["turned"] * 150
    pd.DataFrame({"group": groups, "good": good, "bad": bad}).to_csv(path, index=False)
    with store_of_its_own(tmp_path / "artifacts"):
        tokens = toy_tokens(tmp_path, toy_texts)["tokens"]
        model = toy_model(tokens, MODERN)
        parts = minimal_pairs.fn(PairsRun(data=str(path), per_group=100), model).stats["parts"]
        np.savez(tmp_path / "pairs.npz", **carried.encoded_pairs(tokens.path, path, 100, 30))
        shutil.copytree(model.path, tmp_path / "gpu" / "one")
    (tmp_path / "gpu" / "one" / "result.json").write_text(json.dumps({"recipe": "demo", "training": {"seed": 0}}))
    given = SimpleNamespace(data=tmp_path, folder=tmp_path / "gpu", recipe=None)
    gpu_models.blimp(given)
    monkeypatch.setattr(gpu_models, "judge", None)
    gpu_models.blimp(given)
    [found] = (tmp_path / "gpu").glob("blimp-*.json")
    assert {part: written(found)[part] for part in parts} == parts
    assert len(parts) == 3
    assert parts["all"]["original"] != parts["all"]["within_word"]


@pytest.mark.parametrize(
    ("part", "option"),
    [("blimp", "--epochs"), ("time-to", "--task"), ("speed", "--seeds"), ("cram", "--per-group"), ("blimp", "--typo")],
)
def test_an_option_that_a_part_does_not_use_is_refused(tmp_path: Path, monkeypatch, capsys, part: str, option: str):
    monkeypatch.syspath_prepend(FOLDER)
    gpu = importlib.import_module("gpu")
    data = ["--data", str(tmp_path)] if part in gpu.NEED_DATA else []
    monkeypatch.setattr(sys, "argv", ["gpu.py", part, "--folder", str(tmp_path), *data, option, "3"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert f"{part} takes no {option}" in capsys.readouterr().err


def test_packed_text_that_travels_in_several_calls_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    carried = importlib.import_module("carried")
    recipes = importlib.import_module("recipes")
    monkeypatch.setattr(carried, "ROWS_A_FILE", 10)
    data = tokenized(tmp_path / "data")
    given = {"tokenized": data, "data": tmp_path / "packed", "tokens": 1e9, "glue": None, "pairs": None}
    carried.pack(SimpleNamespace(**given, call_megabytes=0.002))
    assert np.array_equal(recipes.read(tmp_path / "packed").sequences, recipes.read(data).sequences)
    [*_, last] = sorted(path for path in (tmp_path / "packed").iterdir() if path.is_dir())
    assert last.name != "1"
    shutil.rmtree(last)
    with pytest.raises(InputError, match="expected 120 sequences"):
        recipes.read(tmp_path / "packed")
    carried.pack(SimpleNamespace(**given | {"tokens": 50 * LENGTH}, call_megabytes=58))
    assert len(recipes.read(tmp_path / "packed").sequences) == 50, "what was packed before is gone"


def test_a_task_is_passed_at_the_seconds_of_the_first_budget_with_its_scores(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    gpu_models = importlib.import_module("gpu_models")
    budgets = []

    def pretrain(given: SimpleNamespace, budget: str, folder: Path, _: list[str]) -> None:
        budgets.append(budget)
        amount, _ = gpu_models.budget_of(budget)
        for seed in (0, 1):
            home = folder / f"{len(budgets)}-{seed}"
            home.mkdir()
            training = {"seed": seed, "budget": amount}
            result = {"recipe": "pocket", "training": training, "seconds": 3600 * amount + 1}
            (home / "result.json").write_text(json.dumps(result))

    def score(home: Path, *_: object) -> dict[str, float]:
        number, seed = map(int, home.name.split("-"))
        return dict.fromkeys(("accuracy", "f1", "correlation"), 90.0 if number > seed else 60.0)

    monkeypatch.setattr(gpu_models, "pretrain", pretrain)
    monkeypatch.setattr(gpu_models, "score", score)
    monkeypatch.setattr(gpu_models.carried, "read_examples", lambda _: dict.fromkeys(gpu_models.BERT_MINI))
    given = {"folder": tmp_path, "data": tmp_path, "recipe": ["pocket"], "epochs": None, "rate": None}
    gpu_models.time_to(SimpleNamespace(**given, budget=["1 minute", "2 minutes", "4 minutes"]), [])
    assert budgets == ["1 minute", "2 minutes"]
    found = written(tmp_path / "time-to.json")["seconds"]
    assert found == {task: {"seed 0": 61, "seed 1": 121} for task in gpu_models.BERT_MINI}
    with pytest.raises(InputError, match="2 minutes, 1 minute"):
        gpu_models.time_to(SimpleNamespace(**given, budget=["2 minutes", "1 minute"]), [])


def test_the_goals_are_published_scores_that_no_constant_answer_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    gpu_models = importlib.import_module("gpu_models")
    [row] = [row for row in SMALL if (row.model, row.split) == ("BERT-Mini", TEST)]
    goals = gpu_models.BERT_MINI
    assert goals["sst2"] == {"accuracy": row.scores["SST-2"]}
    assert goals["stsb"] == {"correlation": row.scores["STS-B"]}
    assert goals["mrpc"] == {"f1": row.scores["MRPC"], "accuracy": dict(row.others)["MRPC accuracy"]}
    labels = np.arange(408) < 279  # as many as in MRPC's validation data
    constant = gpu_models.scores(np.ones(408, int), labels.astype(int), 2)
    assert constant["f1"] > goals["mrpc"]["f1"]
    assert not gpu_models.passes({"task": "mrpc", **constant})


def test_the_card_is_watched_by_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    card = importlib.import_module("card")
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '1980, 612.5, 31000, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with card.watched() as seen:
        pass
    assert seen == {"clock_mhz": 1980, "watts": 612.5, "memory_mib": 31000, "celsius": None}


def test_the_benchmarks_assume_what_the_stages_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    assert (Vocabulary().entries, Tokenize().length) == (common.ENTRIES, common.LENGTH)


def test_a_file_of_numbers_in_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    common = importlib.import_module("common")
    assert common.new_file(str(tmp_path / "a.json")) == tmp_path / "a.json"
    with pytest.raises(argparse.ArgumentTypeError, match="nowhere"):
        common.new_file(str(tmp_path / "nowhere" / "a.json"))


@pytest.mark.parametrize("peer", ["BERT", "ModernBERT"])
def test_the_operations_of_peers_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch, peer: str):
    monkeypatch.syspath_prepend(FOLDER)
    train = importlib.import_module("train")
    training = Training(budget=4 * 4 * LENGTH, budget_unit="tokens", batch_size=4, batch_ramp=0)
    case = train.Case("tiny", None, False, Architecture(**SIZES), training, VOCABULARY, LENGTH).of_peer(peer)
    model = train.peer_model(case)
    model.set_attn_implementation("eager")  # the fused one is not counted
    corpus = case.corpus()
    tokens, positions, hidden = masking.mask(corpus.sequences, 0, case.masks, corpus, seed=0)
    labels = np.full_like(tokens, -100)
    np.put_along_axis(labels, positions, hidden, axis=1)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.from_numpy(tokens), labels=torch.from_numpy(labels)).loss.backward()
    assert counter.get_total_flops() / tokens.size == pytest.approx(case.operations(), rel=1e-3)


def test_the_data_stages_are_timed(tmp_path: Path, toy_texts: list[str], monkeypatch: pytest.MonkeyPatch):
    for name in ("CRAM_ARTIFACTS", "PREFECT_LOGGING_TO_API_ENABLED", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "0")  # the script sets these; here they get their values back
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    text = write_jsonl(tmp_path / "toy.jsonl", toy_texts)
    options = ["--characters", "unicode", "--workers", "1", "--entries", "400", "--json", str(tmp_path / "speed.json")]
    monkeypatch.setattr(sys, "argv", ["data.py", str(text), *options])
    importlib.import_module("data").main()
    [run] = written(tmp_path / "speed.json")["runs"]
    assert run["rows"][-1]["stage"] == "the whole chain"
    assert all(row["mb_per_second"] > 0 for row in run["rows"])


def test_the_trainer_finetunes_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate")
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("finetune")
    script.write_model("pocket-modern", SimpleNamespace(vocabulary=200, **SIZES), tmp_path)
    examples = script.synthetic(40, 200)
    asked = Finetuning(epochs=2, learning_rate=1e-9)
    ours = script.ours(tmp_path, examples, asked, 0, 1)
    theirs = script.theirs(tmp_path, examples, asked, 0, 1, "random")
    assert ours["examples"] == theirs["examples"] == 64


def test_a_layout_that_transformers_lacks_is_finetuned_without_peers(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("finetune")
    script.write_model("pocket-frontier", SimpleNamespace(vocabulary=200, **SIZES), tmp_path)
    ours = script.ours(tmp_path, script.synthetic(40, 200), Finetuning(epochs=1), 0, 1)
    assert ours["examples"] == 32
    options = ["--recipe", "pocket-frontier", "--peers", "--layers", "1", "--hidden", "16", "--heads", "2"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *options])
    with pytest.raises(SystemExit):
        script.main()
    assert "pocket-frontier" in capsys.readouterr().err


def test_what_joins_parts_is_measured_on_made_up_rows(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    joins = importlib.import_module("joins")
    for name in ("measure", "filter", "vocabulary", "text.sequences"):  # in a benchmark, each has a process of its own
        module = importlib.import_module(f"tasks.{name}")
        for patched in {"over_parts", "keys_by_stops", "in_batches"} & vars(module).keys():
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


def test_a_model_of_transformers_is_trained_for_the_cpu_seconds_and_finetuned_once(
    tmp_path: Path, toy_texts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(FOLDER)
    outside = importlib.import_module("outside")
    of_recipe = outside.common.settings
    monkeypatch.setattr(
        outside.common, "settings", lambda name, changes: of_recipe(name, changes | {"architecture": SIZES})
    )
    with store_of_its_own(tmp_path / "artifacts"):
        made = toy_tokens(tmp_path, toy_texts)
        task = tmp_path / "glue" / "cola"
        task.mkdir(parents=True)
        rows = [{"sentence": f"{'river' if n % 2 else 'letter'} {n}", "label": n % 2, "idx": n} for n in range(64)]
        for split in ("train", "validation"):
            pq.write_table(pa.Table.from_pylist(rows), task / f"{split}.parquet")
        options = {"corpus": made["filter"].path, "data": made["tokens"].path, "glue": tmp_path / "glue"}
        options |= {"length": 32, "entries": 300, "cpu-seconds": 1, "batch": 40, "seeds": 2, "tasks": "cola"}
        options |= {"folder": tmp_path / "outside"}
        monkeypatch.setattr(sys, "argv", ["outside.py", *(f"--{name}={value}" for name, value in options.items())])
        outside.main()
        for name in ("pretrain", "finetune"):
            monkeypatch.setattr(outside, name, None)  # nothing is trained twice
        outside.main()
    runs = [written(path) for path in (tmp_path / "outside").glob("*/result.json")]
    assert sorted(run["seed"] for run in runs) == [0, 1]
    assert all(run["heldout"]["nats_per_byte"]["value"] > 0 for run in runs)
    assert len(list((tmp_path / "outside").glob("*/cola-*.json"))) == 2
