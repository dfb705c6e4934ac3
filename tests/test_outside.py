"""The benchmark against transformers' own model, tokenizer and Trainer, in miniature."""

import importlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import store_of_its_own, toy_tokens
from test_benchmarks import FOLDER
from transformers import AutoModelForMaskedLM, PreTrainedTokenizerFast

from model import heldout, machine
from tasks.pretrain import Pretrain, pretrain

TINY = Pretrain(
    architecture={
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "intermediate": 48,
        "norm_bias": False,
        "first_norm": False,
        "positions": "rotary",
        "head_transform": True,
    },
    budget=10_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def outside():
    """The module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("outside")


@pytest.fixture(scope="module")
def ours(tmp_path_factory, toy_texts: list[str]) -> SimpleNamespace:
    """Our model, the corpus that it read, and a GLUE task."""
    root = tmp_path_factory.mktemp("outside")
    with store_of_its_own(root / "artifacts"):
        made = toy_tokens(root, toy_texts)
        bert = pretrain.fn(TINY, made["tokens"])
        folder = root / "glue" / "cola"
        folder.mkdir(parents=True)
        rows = [{"sentence": f"{'river' if n % 2 else 'letter'} {n}", "label": n % 2, "idx": n} for n in range(64)]
        for split in ("train", "validation"):
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
        yield SimpleNamespace(bert=bert, corpus=made["filter"].path, glue=root / "glue", root=root)


def test_the_alternative_is_trained_for_the_minutes_measured_and_finetuned_once(outside, ours, monkeypatch, capsys):
    folder = ours.root / "outside"
    options = {"pretrained": ours.bert.path, "corpus": ours.corpus, "minutes": 0.05, "rate": 1e-2, "seeds": 2}
    options |= {"glue": ours.glue, "tasks": "cola", "folder": folder}
    monkeypatch.setattr("sys.argv", ["outside.py", *(f"--{name}={value}" for name, value in options.items())])
    outside.main()
    first = capsys.readouterr().out
    trained = [json.loads(path.read_text()) for path in folder.glob("*/pretraining.json")]
    assert len(trained) == 2
    assert all(3 <= 60 * row["minutes"] < 60 and row["tokens"] == row["steps"] * 8 * 32 for row in trained)
    uniform = ours.bert.stats["heldout"]["tokens"] * np.log(400) / ours.bert.stats["heldout"]["bytes"]
    assert all(0 < row["nats_per_byte"] < uniform for row in trained)
    assert len(list(folder.glob("*/cola-*.json"))) == 2
    assert [line.split()[0] for line in first.splitlines()[1:] if line.strip()] == ["nats", "cola"]
    monkeypatch.setattr(outside, "pretrain", None)
    monkeypatch.setattr(outside, "finetune", None)
    outside.main()
    assert capsys.readouterr().out == first


def test_a_model_of_transformers_is_measured_as_ours(outside, ours):
    """Our own model and vocabulary, opened by transformers, have the loss that our stage has measured."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    measured, here = ours.bert.stats["heldout"], machine.detect()
    found = outside.loss(ours.bert.path, AutoModelForMaskedLM.from_pretrained(ours.bert.path), tokenizer, here, 32)
    assert found["nats_per_byte"] == pytest.approx(measured["nats_per_byte"]["value"], rel=0.05), "[CLS] is added"
    held = outside.held_out(ours.bert.path, tokenizer, 32)
    assert held.documents[:, 1:].sum(axis=0).tolist() == [measured["characters"], measured["bytes"]]
    begins = held.sequences.ravel() == tokenizer.cls_token_id
    assert begins.sum() == len(held.documents)
    assert (held.owners().ravel()[begins] == -1).all()


@pytest.mark.parametrize("kind", ["ModernBERT", "BERT"])
def test_losses_at_predicted_places_are_those_of_the_whole_output(outside, ours, kind: str):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    model = outside.new_model(kind, ours.bert.path, tokenizer).eval()
    tokens = torch.randint(5, len(tokenizer), (3, 32), generator=torch.Generator().manual_seed(0))
    tokens[2, 20:] = tokenizer.pad_token_id
    places, labels = torch.tensor([1, 40, 70]), torch.tensor([7, 8, 9])
    whole = model(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long()).logits
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1)[places], labels, reduction="none")
    found = outside.Predictor(model, tokenizer.pad_token_id).losses(tokens, places, labels, True)
    assert torch.allclose(found, expected, atol=1e-5)


def test_what_is_not_read_by_the_loss_changes_nothing(outside, ours):
    """All tokens but [CLS], [SEP] and padding are scored, each once."""

    class Fixed(torch.nn.Module):
        def losses(self, tokens_BS, places_M, labels_M, padded):
            return torch.ones(len(places_M))

    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    held = outside.held_out(ours.bert.path, tokenizer, 32)
    nats_D, _ = heldout.measure(Fixed(), held, tokenizer.mask_token_id, machine.detect())
    assert nats_D.sum() == ours.bert.stats["heldout"]["tokens"]


@pytest.fixture
def second(ours, tmp_path: Path):
    """A function that copies our model as seed 1, with changes to what the stage says of it."""

    def copied(stats: dict | None = None, **params: object) -> Path:
        other = tmp_path / "other"
        shutil.copytree(ours.bert.path, other)
        about = json.loads((other / "stage.json").read_text())
        about |= {
            "key": "other",
            "params": about["params"] | {"seed": 1} | params,
            "stats": about["stats"] | (stats or {}),
        }
        (other / "stage.json").write_text(json.dumps(about))
        return other

    return copied


def test_seeds_of_ours_are_averaged_beside_those_of_the_alternative(outside, ours, second, tmp_path: Path):
    for model, score in {ours.bert.name: 10.0, "pretrain/other": 14.0, "pretrain/third": 0.0}.items():
        row = {"task": "cola", "protocol": "cramming", "pretrained": True, "share": 1.0, "score": score}
        about = {"pretrained": model, "scores": [row, row | {"pretrained": False, "score": 1.0}]}
        (tmp_path / str(score)).mkdir()
        (tmp_path / str(score) / "report.json").write_text(json.dumps(about))
    folders = [ours.bert.path, second()]
    losses, minutes, scores = outside.ours(folders, [tmp_path / "10.0", tmp_path / "14.0"])
    assert losses == [ours.bert.stats["heldout"]["nats_per_byte"]["value"]] * 2
    assert minutes == ours.bert.stats["seconds_on_the_clock"] / 60
    assert scores == {"cola": [10.0, 14.0]}
    table = outside.table("BERT", losses, scores, [2.0, 3.0], {"cola": [1.0, 3.0]})
    assert ["cola", "12.0", "±", "2.8", "2.0", "±", "1.4"] in [line.split() for line in table.splitlines()]
    with pytest.raises(outside.InputError, match="pretrain/third"):
        outside.ours(folders, [tmp_path / "0.0"])


@pytest.mark.parametrize(
    ("stats", "params", "named"),
    [
        ({"seconds_on_the_clock": 1e6}, {}, "same time"),
        ({}, {"seed": 0}, "seeds 0, 0"),
        ({}, {"clip": 9.0}, "parameters"),
    ],
)
def test_models_that_are_no_seeds_of_one_recipe_are_refused(
    outside, ours, second, stats: dict, params: dict, named: str
):
    with pytest.raises(outside.InputError, match=named):
        outside.ours([ours.bert.path, second(stats, **params)], [])


def test_models_with_other_held_out_text_are_refused(outside, ours, second):
    other = second()
    (other / outside.HELDOUT_TEXT).write_bytes(b"other")
    with pytest.raises(outside.InputError, match="held-out"):
        outside.ours([ours.bert.path, other], [])


def test_results_of_the_alternative_are_kept_by_what_they_depend_on(outside, ours, second, tmp_path: Path):
    settings = {"model": "BERT", "batch": 8, "rate": 1e-3, "warm_up": 0.0, "minutes": 1.0, "corpus": ours.corpus}
    here, other = machine.detect(), second()
    base = outside.key(SimpleNamespace(**settings, pretrained=[ours.bert.path]), 0, here)
    assert outside.key(SimpleNamespace(**settings, pretrained=[other, ours.bert.path]), 0, here) == base
    changed = [{"model": "ModernBERT"}, {"rate": 2e-3}, {"minutes": 2.0}]
    keys = {outside.key(SimpleNamespace(**settings | one, pretrained=[other]), 0, here) for one in changed}
    (other / "tokenizer.json").write_text("{}")
    keys |= {
        outside.key(SimpleNamespace(**settings, pretrained=[folder]), 1, here) for folder in (other, ours.bert.path)
    }
    assert len(keys - {base}) == 5
    shutil.copytree(ours.glue, tmp_path / "glue")
    assert outside.file_of("cola", ours.glue) == outside.file_of("cola", tmp_path / "glue")
    shutil.copy(tmp_path / "glue" / "cola" / "train.parquet", tmp_path / "glue" / "cola" / "validation.parquet")
    pq.write_table(
        pq.read_table(ours.glue / "cola" / "train.parquet")[:32], tmp_path / "glue" / "cola" / "train.parquet"
    )
    assert outside.file_of("cola", ours.glue) != outside.file_of("cola", tmp_path / "glue")


def test_a_folder_that_is_no_model_or_corpus_is_named(outside, ours, tmp_path: Path):
    with pytest.raises(outside.InputError, match=str(tmp_path)):
        outside.about_of(tmp_path)
    with pytest.raises(outside.InputError, match=str(tmp_path)):
        outside.scores_of(tmp_path)
    with pytest.raises(outside.InputError, match="filter"):
        outside.about_of(ours.corpus)
    with pytest.raises(outside.InputError, match=str(tmp_path)):
        outside.texts(tmp_path, ours.bert.path)
