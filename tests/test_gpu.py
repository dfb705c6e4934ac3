"""Each part of the GPU benchmark in miniature, on a CPU that has torch and little else; and what is carried there."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import toy_tokens
from test_benchmarks import BARE, FOLDER, IN_TURN, LENGTH, SIZE_OPTIONS, tokenized, written

from model import InputError, finetuning


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules."""
    monkeypatch.syspath_prepend(FOLDER)
    names = ("carry", "correctness", "gpu", "recipes")
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
    short = [*here, "--data", data, "--recipe", "modern", *SIZE_OPTIONS[:-2], "--batch", 8, "--minutes", 0.1]
    commands = [
        ["gpu.py", "correctness", *here, "--layout", "modern", "funnel", "--dtype", "fp32", "bf16"],
        *([*speed, steps] for steps in (2, 3)),  # the second time they are there
        ["gpu.py", "finetuning", *tiny, "--examples", 40],
        ["gpu.py", "cram", *short, "--stop-after", 0.05],
        ["gpu.py", "cram", *short],
        ["gpu.py", "glue", *short, "--seeds", 1, "--epochs", 10, "--rate", 0.01],
    ]
    program = [sys.executable, "-c", IN_TURN, json.dumps(commands, default=str)]
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{FOLDER.parent}"}
    done = subprocess.run(program, env=env, cwd=FOLDER, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(data=data, out=out, results=written(out / "gpu.json"), said=done.stdout)


def test_the_device_is_compared_with_the_cpu_in_every_precision_and_resumed(bare):
    rows = bare.results["correctness"]
    assert [(row["layout"], row["dtype"], row["resumed"]) for row in rows] == [
        (layout, dtype, resumed)
        for layout in ("modern", "funnel")
        for dtype, resumed in (("fp32", False), ("fp32", True), ("bf16", False))
    ]
    assert all(row["right"] and row["last_loss"] < row["first_loss"] for row in rows)
    assert [row["difference"] == 0 for row in rows] == [True, True, False] * 2, "bf16 rounds; else it is one machine"


def test_a_device_that_computes_something_else_is_wrong(scripts, monkeypatch):
    correctness, true, shifts = scripts.correctness, scripts.correctness.losses, iter((0.0, 0.02, 0.0))

    def shifted(*given: object) -> tuple[list[float], bool]:
        values, compiled = true(*given)
        return [*values[:-1], values[-1] + next(shifts)], compiled

    monkeypatch.setattr(correctness, "losses", shifted)
    way = {"layout": "crammed-bert", "dtype": "fp32", "compiled": False}
    rows = correctness.check(correctness.REFERENCE, [way | {"resumed": resumed} for resumed in (False, True)])
    assert [row["right"] for row in rows] == [False, True]


def test_each_speed_is_measured_once_and_all_rows_stand_in_the_table(bare):
    asked, used = ([row[name] for row in bare.results["speed"]] for name in ("micro_batch", "used_micro_batch"))
    assert (asked, used) == ([2, 3, 4], [2, 2, 4]), "one that divides the batch"
    assert bare.said.count("micro_batch 3,") == 1
    assert all(row["mfu"] > 0 and row["problem"] is None for row in bare.results["speed"])
    assert bare.results["finetuning"][0]["examples_per_second"] > 0
    counts = [len(rows) for rows in bare.results.values() if isinstance(rows, list)]
    lines = (bare.out / "gpu.md").read_text().splitlines()
    assert sum(line.startswith("| ") for line in lines) == sum(counts) + len(counts)


def test_a_short_cram_continues_and_is_finetuned(bare, scripts):
    assert "continues" in bare.said
    [row] = bare.results["cram"]
    assert row["seconds"] >= 6
    assert 0 < row["nats_per_byte"] < np.log(50)
    assert [row["task"] for row in bare.results["glue"]] == ["cola", "stsb"]
    [path] = (bare.out / "glue").glob("*-cola-0-*.npz")
    with np.load(path) as kept:
        assert (kept["scores"].argmax(axis=1) == kept["labels"]).mean() > 0.9
    with pytest.raises(InputError, match=r"glue\.npz"):
        scripts.carry.carried_examples(bare.out)


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
    (given.folder / "heldout.npy").unlink()
    with pytest.raises(InputError, match=r"sequences-001\.xz, heldout\.npy"):
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
