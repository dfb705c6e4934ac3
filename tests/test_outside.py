"""The benchmark against transformers' own model and tokenizer in a good loop, in miniature."""

import importlib
import json
import shutil
from argparse import Namespace
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

MODERN = {"norm_bias": False, "first_norm": False, "positions": "rotary", "head_transform": True}
TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48} | MODERN,
    budget=10_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)
SIZES = TINY.architecture.model_dump(include={"layers", "hidden", "heads", "intermediate"})


@pytest.fixture(scope="module")
def outside():
    """The module, whose models have the sizes of TINY."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        module = importlib.import_module("outside")
        settings = module.common.settings
        patch.setattr(
            module.common, "settings", lambda name, changes: settings(name, changes | {"architecture": SIZES})
        )
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
    """What the script leaves after two seeds, and what it printed."""
    folder = ours.root / "outside"
    options = {"corpus": ours.corpus, "data": ours.data, "length": 32, "entries": 300, "cpu-seconds": 3, "rate": 1e-2}
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
        assert 3 <= run["seconds"] < 60
        assert last["tokens"] == run["tokens"] == last["step"] * 40 * 32
        assert last["operations"] > 6 * 1e4 * last["tokens"], "six for each of the weights"
        assert last["heldout_loss"] < first["heldout_loss"]
        assert {name: run["heldout"][name] for name in ("words", "bytes")} == {n: held[n] for n in ("words", "bytes")}
        uniform = run["heldout"]["tokens"] * np.log(300) / held["bytes"] + run["heldout"]["length_nats_per_byte"]
        assert 0 < run["heldout"]["nats_per_byte"]["value"] < uniform
    assert len(list(trained.folder.glob("*/cola-*.json"))) == 2
    table = trained.said[-1].splitlines()
    assert [line.split()[-4 if "±" in line else 0] for line in table[1:]][-1] == "cola"
    assert trained.again == trained.said


def test_its_runs_stand_beside_ours_if_the_seeds_and_the_text_agree(outside, ours, trained):
    recipes = importlib.import_module("recipes")
    held, alike = heldout.Heldout.load(ours.data), {"cpu_seconds": 3.0, "machine": machine.detect().describe()}
    assert [run["seed"] for run in recipes.others(trained.folder, held, alike, 2)] == [0, 1]
    other = heldout.Heldout(held.sequences, held.words, np.add(held.documents, [0, 0, 1, 1, 0]))
    for seeds, text, budget in (
        (3, held, {}),
        (2, other, {}),
        (2, held, {"cpu_seconds": 4.0}),
        (2, held, {"machine": {}}),
    ):
        with pytest.raises(outside.InputError, match=str(trained.folder)):
            recipes.others(trained.folder, text, alike | budget, seeds)


def test_runs_stand_beside_others_of_the_same_time_only(outside, ours, trained):
    recipes, held = importlib.import_module("recipes"), heldout.Heldout.load(ours.data)

    def first(budget: float, unit: str = "hours", **clock: str) -> dict:
        return {"training": {"budget": budget, "budget_unit": unit}, "machine": machine.detect().describe(), **clock}

    assert recipes.beside([], first(1e6, "tokens"), held) == {}
    cpu = {"clock": "CPU seconds"}
    [(name, runs)] = recipes.beside([str(trained.folder)], first(3 / 3600, **cpu), held, 2).items()
    assert (name, len(runs)) == (trained.folder.name, 2)
    assert [*recipes.beside([f"other={trained.folder}"], first(3 / 3600, **cpu), held)] == ["other"]
    for wrong in (first(1e6, "tokens"), first(3 / 3600), first(4 / 3600, **cpu)):
        with pytest.raises(outside.InputError, match=r"--beside|cpu_seconds|minutes"):
            recipes.beside([str(trained.folder)], wrong, held)


def test_the_corpus_is_read_without_the_documents_held_out(outside, ours):
    read = outside.texts(ours.corpus, ours.data)
    held = set(pq.read_table(ours.data / "heldout.parquet")["text"].to_pylist())
    every = [text for part in ours.corpus.glob("part-*.parquet") for text in pq.read_table(part)["text"].to_pylist()]
    assert sorted(read) == sorted(set(every) - held)
    assert held


def test_a_model_of_transformers_is_measured_as_ours(outside, ours):
    """Our own model and vocabulary, opened by transformers, have the loss that our stage has measured."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    measured, here = ours.bert.stats["heldout"], machine.detect()
    predictor = outside.Predictor(AutoModelForMaskedLM.from_pretrained(ours.bert.path), tokenizer.pad_token_id)
    held = outside.held_out(ours.data, tokenizer, 32)
    found = heldout.summary(held, heldout.measure(predictor, held, tokenizer.mask_token_id, here)[0])
    assert found["nats_per_byte"]["value"] == pytest.approx(measured["nats_per_byte"]["value"], rel=0.05), (
        "[CLS] is added"
    )
    assert {name: found[name] for name in heldout.SIZES} == {name: measured[name] for name in heldout.SIZES}
    begins = held.sequences == tokenizer.cls_token_id
    assert begins.sum() == len(held.documents)
    assert (held.owners[begins] == -1).all()


@pytest.mark.parametrize("kind", ["ModernBERT", "BERT"])
def test_losses_at_predicted_places_are_those_of_the_whole_output(outside, ours, kind: str):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ours.bert.path)
    model = outside.new_model(Namespace(model=kind, recipe="pocket", length=32), tokenizer).eval()
    tokens = torch.randint(5, len(tokenizer), (3, 32), generator=torch.Generator().manual_seed(0))
    tokens[2, 20:] = tokenizer.pad_token_id
    places, labels = torch.tensor([1, 40, 70]), torch.tensor([7, 8, 9])
    whole = model(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long()).logits
    expected = torch.nn.functional.cross_entropy(whole.flatten(0, 1)[places], labels, reduction="none")
    found = outside.Predictor(model, tokenizer.pad_token_id).losses(tokens, places, labels, True)
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_rate_rises_and_falls_on_lines(outside):
    assert [outside.rate(fraction, 0.2) for fraction in (0.0, 0.1, 0.2, 0.6, 1.0)] == pytest.approx([0, 0.5, 1, 0.5, 0])
    assert outside.rate(0.0, 0.0) == 1


def test_results_are_kept_by_what_they_depend_on(outside, ours, tmp_path: Path):
    given = Namespace(
        **dict.fromkeys(outside.SETTINGS), corpus=ours.corpus, data=ours.data, minutes=1.0, cpu_seconds=None
    )
    here = machine.detect()
    base = outside.about_of(given, here)
    for name in (*outside.SETTINGS, "minutes", "cpu_seconds"):
        assert outside.about_of(Namespace(**vars(given) | {name: 3}), here) != base
    other = shutil.copytree(ours.data, tmp_path / "data")
    assert outside.about_of(Namespace(**vars(given) | {"data": other}), here) == base
    (other / "tokenizer.json").write_text("{}")
    assert outside.about_of(Namespace(**vars(given) | {"data": other}), here) != base
    shutil.copytree(ours.glue, tmp_path / "glue")
    assert outside.file_of("cola", ours.glue) == outside.file_of("cola", tmp_path / "glue")
    part = tmp_path / "glue" / "cola" / "train.parquet"
    pq.write_table(pq.read_table(part)[:32], part)
    assert outside.file_of("cola", ours.glue) != outside.file_of("cola", tmp_path / "glue")


def test_a_folder_that_is_no_corpus_or_tokens_is_named(outside, ours, tmp_path: Path):
    with pytest.raises(outside.InputError, match=str(tmp_path)):
        outside.text_of(Namespace(corpus=ours.corpus, data=tmp_path))
    with pytest.raises(outside.InputError, match=str(tmp_path)):
        outside.texts(tmp_path, ours.data)
