"""Each part of the GPU benchmark in miniature, on a CPU that has torch and little else; and what is carried there."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import toy_tokens
from safetensors import safe_open
from test_benchmarks import BARE, FOLDER, IN_TURN, LENGTH, SIZE_OPTIONS, SIZES, tokenized, written
from torch import Tensor
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from model import InputError, attention, batches, bert, finetuning, positions
from model.bert import Bert, Classifier
from model.checkpoint import CHECKPOINT
from model.compiling import Forward
from model.machine import Machine
from model.settings import Architecture, Finetuning
from tasks.glue.tasks import TASKS

CPU = Machine(torch.device("cpu"), torch.float32, False, 4)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("carry", "correctness", "gpu", "recipes", "score")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def examples(kind: type, seed: int) -> dict[str, np.ndarray]:
    """Encoded inputs that begin with the token of their class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 2, 64)
    made = finetuning.Examples.of([[2, 10 + x, *random.integers(20, 40, 5), 3] for x in labels], labels.astype(kind))
    return {"tokens": made.tokens, "ends": made.ends, "labels": made.labels}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The results of all parts, and what they `said`, on a machine that lacks most packages."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "sitecustomize.py").write_text(BARE)
    data, out, here = tokenized(folder / "data"), folder / "results", ["--folder", folder / "results"]
    tasks = {"cola": np.int64, "stsb": np.float64}
    arrays = {
        f"{task}/{split}/{part}": array
        for task, kind in tasks.items()
        for seed, split in enumerate(("train", "validation"))
        for part, array in examples(kind, seed).items()
    }
    np.savez_compressed(data / "glue.npz", **arrays)
    tiny = [*here, "--recipe", "modern", *SIZE_OPTIONS]
    speed = ["gpu.py", "speed", *tiny, "--batch", 4, "--micro-batch", 2, 3, 4, "--steps"]
    short = [*here, "--data", data, "--recipe", "frontier", *SIZE_OPTIONS[:-2], "--batch", 8, "--minutes", 0.1]
    commands = [
        ["gpu.py", "correctness", *here, "--layout", "modern", "--dtype", "fp32", "bf16"],
        *([*speed, steps] for steps in (2, 3)),  # the second time they are there
        ["gpu.py", "finetuning", *tiny, "--examples", 40],
        ["gpu.py", "cram", *short, "--stop-after", 0.05],
        ["gpu.py", "cram", *short],
        *(["gpu.py", "glue", *short, "--seeds", 1, "--epochs", 10, "--rate", 0.01, "--task", task] for task in tasks),
    ]
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands, default=str)]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(program, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(data=data, out=out, results=written(out / "gpu.json"), said=done.stdout)


def test_the_device_is_compared_with_the_cpu_in_every_precision_and_resumed(bare):
    rows = bare.results["correctness"]
    asked = [(dtype, check) for dtype in ("fp32", "bf16") for check in ("gradients", "padded", "resumed")]
    assert [(row["dtype"], row["check"]) for row in rows] == asked
    assert all(row["right"] and row["problem"] is None for row in rows)
    errors = [row["error"] for row in rows if row["check"] != "resumed"]
    assert [error == 0 for error in errors] == [True, True, False, False], "bf16 rounds; else it is one machine"
    for row in rows[2::3]:
        assert row["difference"] == 0
        assert row["last_loss"] < row["first_loss"]


LAYOUTS = (
    "crammed-bert",
    "modern",
    "frontier",
    "bert-base",
    "funnel",
    "shared and factorised",
    "RMSNorm, ReLU², untied",
)
ROTARY = ("modern", "frontier", "RMSNorm, ReLU², untied")


def faults(layout: str, padded: bool) -> dict[str, tuple[object, str, Callable]]:
    """What could be wrong on a device: an owner, the name of its function, and the wrong function."""
    attend, make, convolve = attention.attend, batches.Batches.make, bert.Convolution.forward

    def of_others(part: int) -> Callable:
        def made(self: batches.Batches, *about: int) -> batches.Batch:
            return tuple(each.roll(1, 0) if i == part else each for i, each in enumerate(make(self, *about)))

        return made

    wrong: dict[str, tuple[object, str, Callable]] = {
        "scores of attention halved": (attention, "attend", lambda q, *other: attend(q / 2, *other)),
        "attention uniform": (attention, "attend", lambda q, *other: attend(q * 0, *other)),
    }
    if layout in ROTARY:
        wrong["not rotated"] = (positions.Rotation, "forward", lambda self, x, positions=None: x)
    if layout == "frontier":
        wrong["no convolution"] = (bert.Convolution, "forward", lambda self, x, seen: x)
    if padded:
        wrong["padding seen"] = (attention, "attend", lambda q, k, v, mask, dropout: attend(q, k, v, None, dropout))
        if layout == "frontier":
            unseen = lambda self, x, seen: convolve(self, x, None)  # noqa: E731
            wrong["padding convolved"] = (bert.Convolution, "forward", unseen)
    else:
        parts = ("tokens", "positions", "labels", "corruptions")[: 4 if layout == "frontier" else 3]
        wrong |= {f"{name} of others": (batches.Batches, "make", of_others(i)) for i, name in enumerate(parts)}
    return wrong


@pytest.mark.parametrize("padded", [False, True], ids=["pretraining", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rounding_passes_and_every_fault_fails(scripts, monkeypatch, layout: str, padded: bool):
    correctness = scripts.correctness
    expected = correctness.gradients(layout, correctness.REFERENCE, padded)

    def error(here: Machine) -> float:
        return correctness.worst(correctness.gradients(layout, here, padded), expected)[1]

    for dtype in ("bf16", "fp16") if layout == "frontier" else ("bf16",):
        rounded = replace(correctness.REFERENCE, dtype=correctness.DTYPES[dtype])
        assert 0 < error(rounded) < correctness.FAR[dtype] / 2
    for name, fault in faults(layout, padded).items():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert error(correctness.REFERENCE) > 1.5 * correctness.FAR["bf16"], name


def test_every_layout_is_tried(scripts):
    assert tuple(scripts.correctness.LAYOUTS) == LAYOUTS
    assert set(scripts.gpu.RECIPES) <= set(LAYOUTS)


def test_a_device_that_computes_something_else_is_wrong_and_an_error_is_named(scripts, monkeypatch):
    correctness, attend = scripts.correctness, attention.attend

    def in_bf16(q: Tensor, *other: object) -> Tensor:
        return attend(q / 2 if q.dtype is torch.bfloat16 else q, *other)

    def fails(self: Forward) -> None:
        raise RuntimeError("No compiler.\nMany lines.")

    monkeypatch.setattr(attention, "attend", in_bf16)
    monkeypatch.setattr(Forward, "use_compiler", fails)
    way = {"layout": "crammed-bert", "compiled": False, "check": "gradients"}
    ways = [way | {"dtype": "fp32"}, way | {"dtype": "bf16"}, way | {"dtype": "fp32", "compiled": True}]
    rows = list(correctness.check(correctness.REFERENCE, ways))
    assert [row["right"] for row in rows] == [True, False, False]
    assert "attention" in rows[1]["parameter"]
    assert [row["problem"] for row in rows] == [None, None, "RuntimeError: No compiler."]


@pytest.mark.parametrize(
    ("whole", "parts", "right"),
    [
        ([7.0, 6.8], [7.0, 6.8], True),
        ([7.0, 6.8], [7.0, 6.82], False),
        ([7.0, 6.8], [7.0], False),
        ([7.0, 7.0], [7.0, 7.0], False),
        ([7.0, math.nan], [7.0, math.nan], False),
    ],
    ids=["the same", "another loss", "a step lost", "nothing learnt", "no number"],
)
def test_resumed_training_has_the_losses_of_training_at_once_and_lowers_them(scripts, monkeypatch, whole, parts, right):
    monkeypatch.setattr(scripts.correctness, "STEPS", 2)
    monkeypatch.setattr(scripts.correctness, "losses", lambda layout, here, resume: parts if resume else whole)
    assert scripts.correctness.resumed("modern", scripts.correctness.REFERENCE)["right"] is right


def test_each_speed_is_measured_once_and_all_rows_stand_in_the_table(bare):
    asked, used = ([row[name] for row in bare.results["speed"]] for name in ("micro_batch", "used_micro_batch"))
    assert (asked, used) == ([2, 3, 4], [2, 2, 4]), "one that divides the batch"
    assert bare.said.count("micro_batch 3,") == 1
    assert all(
        row["mfu"] > 0 and row["problem"] is row["gpu"] is row["kernels"] is None for row in bare.results["speed"]
    )
    assert bare.results["finetuning"][0]["examples_per_second"] > 0
    counts = [len(rows) for rows in bare.results.values() if isinstance(rows, list)]
    lines = (bare.out / "gpu.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == sum(counts) + len(counts)


def test_a_short_cram_continues_and_is_finetuned(bare, scripts):
    assert "continues" in bare.said
    [row] = bare.results["cram"]
    assert row["seconds"] >= 6
    assert 0 < row["nats_per_byte"] < np.log(50)
    assert row["batch"] == 8
    assert [row["task"] for row in bare.results["glue"]] == ["cola", "stsb"]
    [path] = (bare.out / "glue").glob("*-cola-0-*.npz")
    with np.load(path) as kept:
        assert (kept["scores"].argmax(axis=1) == kept["labels"]).mean() > 0.9
    with pytest.raises(InputError, match=r"glue\.npz"):
        scripts.carry.carried_examples(bare.out)


def test_a_model_that_was_trained_with_detection_is_loaded(bare, scripts):
    [home] = (path.parent for path in bare.out.glob("frontier-*/result.json"))
    with safe_open(home / CHECKPOINT, "pt") as file:
        kept = file.get_tensor("model.bert.embedding.word.weight")
    loaded = scripts.score.load(home, scripts.recipes.read(bare.data))
    assert torch.equal(loaded.embedding.word.weight, kept)
    about = json.loads((home / "result.json").read_text())
    assert about["training"]["detection"] > 0


def test_glue_is_finetuned_as_the_recipe_says_unless_told_otherwise(scripts):
    tuning, carried = scripts.gpu.tuning, scripts.carry.TASKS
    assert tuning("frontier").pooling == "compare"
    assert tuning("modern", epochs=None, learning_rate=None) == Finetuning()
    demo = tuning("demo", learning_rate=1e-3)
    assert (demo.epochs, demo.batch_size, demo.learning_rate) == (4, 32, 1e-3)
    assert {task: scripts.gpu.TEXTS.get(task, 2) for task in carried} == {t: len(TASKS[t].columns) for t in carried}
    assert {task: scripts.gpu.CLASSES.get(task, 2) for task in carried} == {t: TASKS[t].classes for t in carried}


def test_glue_is_finetuned_eagerly_with_the_pooling_and_the_outputs_of_its_task(
    bare, scripts, tmp_path: Path, monkeypatch
):
    class Seen(Exception):
        pass

    def finetune(model: Classifier, train: object, settings: Finetuning, here: Machine, *_: object) -> None:
        raise Seen(model.pooling, model.texts, model.classes, settings.epochs, here.compiles_always)

    [home] = (path.parent for path in bare.out.glob("frontier-*/result.json"))
    monkeypatch.setattr(scripts.recipes, "home_of", lambda folder, run: home)
    monkeypatch.setattr(finetuning, "finetune", finetune)
    options = {"data": bare.data, "folder": tmp_path, "recipe": ["frontier"], "batch": 8, "minutes": 0.1, "seeds": 1}
    options |= {"epochs": None, "rate": None} | SIZES
    for task, expected in (("stsb", ("compare", 2, 1, 5, False)), ("cola", ("compare", 1, 2, 5, False))):
        with pytest.raises(Seen) as seen:
            scripts.gpu.glue(SimpleNamespace(task=[task], **options), replace(CPU, compiles_always=True))
        assert seen.value.args == expected
    with pytest.raises(InputError, match="--task wnli"):
        scripts.gpu.glue(SimpleNamespace(task=["cola", "wnli"], **options), CPU)


def test_speed_of_finetuning_leaves_out_its_warm_up_and_failed_graphs_are_a_problem(
    scripts, tmp_path: Path, monkeypatch
):
    taken, model, settings = [], Classifier(Bert(Architecture(**SIZES), 200, 48), 2, 0.1, 0), Finetuning(epochs=1)
    train = scripts.gpu.finetune.synthetic(200, 200)
    monkeypatch.setattr(finetuning.Steps, "take", lambda self, rows: taken.append(rows) or torch.tensor(len(taken)))
    row = scripts.gpu.epoch(model, train, settings, CPU)
    tiles = [-(-int(train.lengths[rows].max()) // finetuning.TILE) for rows in taken]
    warm_up = len(taken) - 200 // 16
    assert tiles[:warm_up] == sorted(3 * list(set(tiles[warm_up:]))), "each length three times"
    assert row["loss"] == pytest.approx(np.mean(range(warm_up + 1, len(taken) + 1)))

    def fails(self: finetuning.Steps, rows: np.ndarray) -> None:
        raise AssertionError

    monkeypatch.setattr(finetuning.Steps, "take", fails)
    options = {"recipe": ["modern"], "vocabulary": 200, "examples": 40, "folder": tmp_path, **SIZES}
    scripts.gpu.tune(SimpleNamespace(**options), CPU)
    assert [row["problem"] for row in written(tmp_path / "gpu.json")["finetuning"]] == ["AssertionError: "]


def test_each_case_has_the_kernel_of_attention_and_the_state_of_the_gpu(scripts, tmp_path: Path, monkeypatch):
    gpu, seconds = replace(CPU, device=torch.device("cuda")), {"FLASH_ATTENTION": 2e-3, "EFFICIENT_ATTENTION": 1e-3}

    def timed(kernel: SDPBackend, *about: object) -> float:
        if kernel.name not in seconds:
            raise RuntimeError("No available kernel. Aborting execution.")
        return seconds[kernel.name]

    monkeypatch.setattr(attention, "seconds_of", timed)
    with scripts.gpu.attention_by("fastest") as kernels, attention.fastest_kernel(Architecture(), 128, 2, gpu):
        assert kernels == ["EFFICIENT_ATTENTION 1.00", "FLASH_ATTENTION 2.00"]
    with scripts.gpu.attention_by("math") as kernels, attention.fastest_kernel(Architecture(), 128, 2, gpu):
        assert kernels == []
        assert _cur_sdpa_kernel_backends() == [SDPBackend.MATH]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert scripts.gpu.gpu_state(gpu) is None
    for status, state in ((0, "1980 MHz, 653.12 W, 61"), (9, None)):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho 1980 MHz, 653.12 W, 61\nexit {status}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert scripts.gpu.gpu_state(gpu) == state
    assert scripts.gpu.gpu_state(CPU) is None


def test_a_call_stops_by_itself_in_the_background_too(scripts, monkeypatch, capsys):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background job
    try:
        with scripts.gpu.stopped_after(1e-3):
            threading.Event().wait(600)
            pytest.fail("not stopped")
        with scripts.gpu.stopped_after(0):
            assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().out == "Stopped. The same command continues.\n"


def test_what_is_packed_is_unpacked_and_what_is_missing_is_named(scripts, tmp_path: Path, monkeypatch):
    carry, data = scripts.carry, tokenized(tmp_path / "data")
    monkeypatch.setattr(carry, "TOKENS_A_FILE", 40 * LENGTH)
    given = SimpleNamespace(data=data, folder=tmp_path / "carried", tokens=100 * LENGTH, glue=None)
    carry.pack(given)
    assert len(list(given.folder.glob("sequences-*.xz"))) == 3
    given.data = tmp_path / "there"
    carry.unpack(given)
    rows = np.linspace(0, 119, 100).astype(int)
    assert np.array_equal(scripts.recipes.read(given.data).sequences, np.load(data / "sequences.npy")[rows])
    (given.folder / "sequences-001.xz").write_bytes(b"junk")
    (given.folder / "heldout.npz").unlink()
    with pytest.raises(InputError, match=r"sequences-001\.xz, heldout\.npz"):
        carry.unpack(given)


def test_tasks_are_carried_as_they_are_encoded(scripts, store: Path, toy_texts: list[str], tmp_path: Path):
    tokens = toy_tokens(tmp_path, toy_texts)["tokens"]
    rows = [{"sentence": f"a letter {number}", "label": number % 2, "idx": number} for number in range(40)]
    folder = tmp_path / "glue" / "cola"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    np.savez(tmp_path / "glue.npz", **scripts.carry.examples(tokens.path, tmp_path / "glue", ["cola"], 32))
    splits = scripts.carry.carried_examples(tmp_path)["cola"]
    assert list(splits) == ["train", "validation"]
    assert splits["train"].labels.tolist() == [row["label"] for row in rows]
    assert all(splits["validation"].input(row)[[0, -1]].tolist() == [2, 3] for row in range(40))
