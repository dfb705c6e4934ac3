"""The pretrain stage, as plain calls on a toy corpus."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens

from model import InputError
from tasks import stage as store_module
from tasks.finetune import Finetune, finetune
from tasks.pretrain import LINEAGE, Pretrain, measure_heldout, pretrain
from tasks.stage import Artifact

TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48},
    budget=30_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory, toy_texts: list[str]):
    """Every stage's artifact, up to the pretrained model."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        yield {"root": root, "tokens": tokens, "pretrain": pretrain.fn(TINY, tokens)}


def test_the_exported_model_gives_the_same_heldout_loss_again(made):
    bert: Artifact = made["pretrain"]
    assert measure_heldout(bert) == pytest.approx(bert.stats["heldout_loss"], abs=1e-6)


def test_the_model_learned_and_its_record_is_complete(made):
    bert: Artifact = made["pretrain"]
    metrics = pq.read_table(bert.path / "metrics.parquet").to_pydict()
    assert metrics["step"] == list(range(1, bert.stats["steps"] + 1))
    assert metrics["tokens"][-1] == bert.stats["tokens"] >= 30_000
    assert min(metrics["lr"]) >= 0
    first, last = bert.stats["evaluations"][0], bert.stats["evaluations"][-1]
    assert last["heldout_loss"] == pytest.approx(bert.stats["heldout_loss"], abs=1e-6)
    assert last["heldout_loss"] < first["heldout_loss"] - 0.5
    assert (bert.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(bert.path.rglob("checkpoint*"))
    per_character = bert.stats["heldout_nats_per_character"]
    held = made["tokens"].stats["heldout"]
    assert per_character == pytest.approx(bert.stats["heldout_loss"] * held["tokens"] / held["characters"], abs=1e-5)


def test_the_pretrained_artifact_is_complete_in_itself(made, tmp_path: Path, monkeypatch):
    """Copied alone to another store, it can be measured and finetuned, with the same result."""
    bert, asked = made["pretrain"], Finetune(data="probes", tasks=["word-order"], seeds=1, epochs=1, max_tokens=32)
    ((params, _),) = asked.runs()
    run = finetune.fn(params, bert)
    monkeypatch.setattr(store_module, "ROOT", tmp_path)
    shutil.copytree(made["root"] / "artifacts" / bert.name, tmp_path / bert.name)
    assert measure_heldout(bert) == pytest.approx(bert.stats["heldout_loss"], abs=1e-6)
    again = finetune.fn(params, bert)
    assert again == run
    scores = json.loads((made["root"] / "artifacts" / run.name / "scores.json").read_text())
    assert again.stats["validation"] == scores
    assert list(json.loads((again.path / LINEAGE).read_text()))[-1] == bert.name


def test_the_tokenizer_loads_from_the_pretrained_artifact_with_transformers(made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made["pretrain"].path)
    ids = tokenizer("The river.", "A map.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[0] == "[CLS]"
    assert ids.count(tokenizer.sep_token_id) == 2
    assert tokenizer.mask_token_id == 4
    assert tokenizer.pad_token_id == 0


def test_the_vocabulary_entries_are_the_models(made):
    config = json.loads((made["pretrain"].path / "config.json").read_text())
    assert config["cram"]["vocabulary"] == 400
    assert np.load(made["tokens"].path / "sequences.npy", mmap_mode="r").max() < 400


def test_a_failure_while_the_model_is_published_costs_no_training(made, monkeypatch):
    again = TINY.model_copy(update={"seed": 5})
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "publish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pretrain.fn(again, made["tokens"])
    steps = []
    with monkeypatch.context() as patch:
        from model.pretraining import Pretraining

        patch.setattr(Pretraining, "step", lambda *_: steps.append(1))
        bert = pretrain.fn(again, made["tokens"])
    assert not steps
    assert bert.stats["tokens"] >= 30_000
    assert measure_heldout(bert) == pytest.approx(bert.stats["heldout_loss"], abs=1e-6)


def test_a_budget_that_is_spent_before_the_first_step_is_told(made):
    with pytest.raises(InputError, match="spent before the first step"):
        pretrain.fn(TINY.model_copy(update={"budget": 1e-12, "budget_unit": "hours"}), made["tokens"])


def test_a_corpus_smaller_than_a_batch_is_told(made):
    with pytest.raises(InputError, match=r"fewer than one batch of 65,536"):
        pretrain.fn(TINY.model_copy(update={"batch_size": 65_536}), made["tokens"])


@pytest.mark.parametrize(
    "change",
    [
        {"budget": 20_000},
        {"batch_size": 16},
        {"batch_ramp": 0.0},
        {"learning_rate": 1e-3},
        {"weight_decay": 0.5},
        {"beta1": 0.5},
        {"beta2": 0.9},
        {"adam_eps": 1e-3},
        {"clip": 0.01},
        {"mask_fraction": 0.5},
        {"seed": 1},
        {"architecture": {"layers": 1, "hidden": 32, "heads": 4, "intermediate": 48}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_no_setting_of_pretraining_is_ignored(made, monkeypatch, change: dict):
    from safetensors.numpy import load_file

    monkeypatch.setenv("CRAM_MICRO_BATCH", "4")  # so that the batch has room to grow
    base = TINY.model_dump() | {"budget": 6_000}
    weights = []
    for delta in ({}, change):
        bert = pretrain.fn(Pretrain(**(base | delta)), made["tokens"])
        weights.append(load_file(bert.path / "model.safetensors")["blocks.0.ffn.dense_out.weight"])
    assert not np.array_equal(*weights)


def losses(pretrained: Artifact) -> tuple[list[float], list[float]]:
    """Of each step, and on held-out text."""
    rows = pq.read_table(pretrained.path / "metrics.parquet")
    return rows["loss"].to_pylist(), [e["heldout_loss"] for e in pretrained.stats["evaluations"]]


def test_two_processes_have_the_losses_of_one_with_the_same_batch(made, monkeypatch, tmp_path):
    monkeypatch.setattr(store_module, "ROOT", tmp_path / "artifacts")
    shutil.copytree(made["root"] / "artifacts", tmp_path / "artifacts", symlinks=True)
    params = TINY.model_copy(update={"seed": 6, "budget": 12_000, "dropout": 0.0})
    monkeypatch.setenv("CRAM_DEVICE", "cpu")
    monkeypatch.setenv("CRAM_DTYPE", "fp32")
    found = []
    for gpus, micro_batch in ((1, 4), (2, 2)):
        monkeypatch.setenv("CRAM_GPUS", str(gpus))
        monkeypatch.setenv("CRAM_MICRO_BATCH", str(micro_batch))
        made_here = pretrain.fn(params, made["tokens"])
        assert made_here.stats["machine"]["gpus"] == gpus
        assert made_here.stats["machine"]["micro_batch"] == micro_batch
        found.append((losses(made_here), made_here.stats["steps"]))
        shutil.rmtree(made_here.path)
    (one, steps), (two, as_many) = found
    assert steps == as_many > 40
    for expected, other in zip(one, two, strict=True):
        np.testing.assert_allclose(other, expected, rtol=1e-4)


def test_what_ends_several_processes_is_told_as_one_sentence(made, monkeypatch):
    monkeypatch.setenv("CRAM_DEVICE", "cpu")
    monkeypatch.setenv("CRAM_GPUS", "2")
    with pytest.raises(InputError, match="batch_size 7 can't be shared by 2 processes"):
        pretrain.fn(TINY.model_copy(update={"seed": 7, "batch_size": 7}), made["tokens"])
