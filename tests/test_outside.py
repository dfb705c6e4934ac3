"""The benchmark against transformers' own model and tokenizer in a good loop, in miniature."""

import importlib
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens
from test_benchmarks import FOLDER
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from model import heldout, machine
from model.errors import InputError
from tasks.pretrain import Pretrain, pretrain

MODERN = {"norm_bias": False, "first_norm": False, "positions": "rotary", "head_transform": True}
SIZES = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}
TINY = Pretrain(architecture=SIZES | MODERN, budget=10_000, budget_unit="tokens", batch_size=8, learning_rate=5e-3)


@pytest.fixture(scope="module")
def outside():
    """The module, whose models have the sizes of TINY."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        module = importlib.import_module("outside")
        of_recipe = module.common.settings
        settings = lambda name, changes: of_recipe(name, changes | {"architecture": SIZES})  # noqa: E731
        patch.setattr(module.common, "settings", settings)
        yield module


@pytest.fixture(scope="module")
def ours(tmp_path_factory, toy_texts: list[str]) -> SimpleNamespace:
    """Our model, its tokens, the corpus that it read, and a GLUE task."""
    root = tmp_path_factory.mktemp("outside")
    with store_of_its_own(root / "artifacts"):
        made = toy_tokens(root, toy_texts)
        bert = pretrain.fn(TINY, made["tokens"])
        folder = root / "glue" / "cola"
        folder.mkdir(parents=True)
        rows = [{"sentence": f"{'river' if n % 2 else 'letter'} {n}", "label": n % 2, "idx": n} for n in range(64)]
        for split in ("train", "validation"):
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        yield SimpleNamespace(
            bert=bert, data=made["tokens"].path, corpus=made["filter"].path, glue=root / "glue", root=root
        )


@pytest.fixture(scope="module")
def trained(outside, ours) -> SimpleNamespace:
    """What the script leaves after two seeds, and what it printed, at first and when all was there."""
    folder = ours.root / "outside"
    options = {"corpus": ours.corpus, "data": ours.data, "length": 32, "entries": 300, "cpu-seconds": 2, "rate": 1e-2}
    options |= {"batch": 40, "seeds": 2, "glue": ours.glue, "tasks": "cola", "folder": folder}
    given = ["outside.py", *(f"--{name}={value}" for name, value in options.items())]
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", given)
        patch.setattr(outside, "print", lambda *words: said.append(" ".join(words)), raising=False)
        outside.main()
        first = said.copy()
        said.clear()
        patch.setattr(outside, "pretrain", None)
        patch.setattr(outside, "finetune", None)
        outside.main()
    return SimpleNamespace(folder=folder, said=first, again=said)


def test_it_is_trained_for_the_cpu_seconds_measured_and_finetuned_once(ours, trained):
    runs = [json.loads(path.read_text()) for path in trained.folder.glob("*/result.json")]
    assert sorted(run["seed"] for run in runs) == [0, 1]
    held = ours.bert.stats["heldout"]
    for run in runs:
        first, *_, last = run["evaluations"]
        assert 2 <= run["seconds"] < 60
        assert last["tokens"] == run["tokens"] == last["step"] * 40 * 32
        assert last["operations"] > 6 * 1e4 * last["tokens"], "six for each of the weights"
        assert last["heldout_loss"] < first["heldout_loss"]
        assert {name: run["heldout"][name] for name in ("words", "bytes")} == {n: held[n] for n in ("words", "bytes")}
        uniform = run["heldout"]["tokens"] * np.log(300) / held["bytes"] + run["heldout"]["length_nats_per_byte"]
        assert 0 < run["heldout"]["nats_per_byte"]["value"] < uniform
    assert len(list(trained.folder.glob("*/cola-*.json"))) == 2
    assert trained.said[-1].splitlines()[-1].startswith("cola")
    assert trained.again == trained.said, "nothing is trained twice"


def test_its_runs_stand_beside_ours_if_time_seeds_and_text_agree(outside, ours, trained, tmp_path: Path, monkeypatch):
    recipes, held = importlib.import_module("recipes"), heldout.Heldout.load(ours.data)
    options = ["--recipe", "pocket", "--data", ours.data, "--folder", tmp_path, "--seeds", 2, "--cpu-seconds", 2]
    options += ["--set", "pocket.batch_size=8", "--beside", f"other={trained.folder}"]
    monkeypatch.setattr("sys.argv", ["recipes.py", *map(str, options)])
    recipes.main()
    compared = json.loads((tmp_path / "comparison.json").read_text())["recipes"]
    assert [run["seed"] for run in compared["other"]["runs"]] == [0, 1]
    assert all(2 <= run["seconds"] < 60 for one in compared.values() for run in one["runs"])
    first, others = compared["pocket"]["runs"][0], [str(trained.folder)]
    text = heldout.Heldout(held.sequences, held.words, np.add(held.documents, [0, 0, 1, 1, 0]))
    tokens = {"training": {"budget": 1e6, "budget_unit": "tokens"}}
    wrong = [(first | tokens, held, 2), (first | {"machine": {}}, held, 2), (first, held, 3), (first, text, 2)]
    wrong.append(({name: value for name, value in first.items() if name != "clock"}, held, 2))
    for run, text, seeds in wrong:
        with pytest.raises(InputError):
            recipes.beside(others, run, text, seeds)


def test_the_corpus_is_read_without_the_documents_held_out(outside, ours, tmp_path: Path):
    read = outside.texts(ours.corpus, ours.data)
    held = set(pq.read_table(ours.data / "heldout.parquet")["text"].to_pylist())
    every = [text for part in ours.corpus.glob("part-*.parquet") for text in pq.read_table(part)["text"].to_pylist()]
    assert sorted(read) == sorted(set(every) - held)
    assert held
    for wrong in (lambda: outside.texts(tmp_path, ours.data), lambda: outside.text_of(Namespace(data=tmp_path))):
        with pytest.raises(InputError, match=str(tmp_path)):
            wrong()


def test_a_model_of_transformers_is_measured_as_ours(outside, ours):
    """Our own model and vocabulary, opened by transformers, have the loss that our stage has measured."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    measured = ours.bert.stats["heldout"]
    predictor = outside.Predictor(AutoModelForMaskedLM.from_pretrained(ours.bert.path), tokenizer.pad_token_id)
    held = outside.held_out(ours.data, tokenizer, 32)
    found = outside.measured(predictor, held, tokenizer.mask_token_id, machine.detect())
    # [CLS] is added
    assert found["nats_per_byte"]["value"] == pytest.approx(measured["nats_per_byte"]["value"], rel=0.05)
    assert {name: found[name] for name in heldout.SIZES} == {name: measured[name] for name in heldout.SIZES}
    begins = held.sequences == tokenizer.cls_token_id
    assert begins.sum() == len(held.documents)
    assert (held.owners[begins] == -1).all()


def test_glue_is_packed_for_a_gpu_as_it_is_encoded(ours, monkeypatch, tmp_path: Path):
    monkeypatch.syspath_prepend(FOLDER)
    gpu = importlib.import_module("gpu")
    np.savez(tmp_path / "glue.npz", **gpu.encoded(ours.data, ours.glue, ["cola"], 32))
    splits = gpu.packed_examples(tmp_path)["cola"]
    assert list(splits) == ["train", "validation"]
    assert splits["train"].labels.tolist() == [n % 2 for n in range(64)]
    assert all(splits["validation"].input(row)[[0, -1]].tolist() == [2, 3] for row in range(64))
    with pytest.raises(InputError, match=r"glue\.npz"):
        gpu.packed_examples(ours.data)
