"""Models to start from and models from folders, on a toy corpus, through the recipe and every stage."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import document, store_of_its_own, tiny_override, write_jsonl
from huggingface_hub.errors import LocalEntryNotFoundError
from toys import ORIGINAL, count_words

from flows.cli.study import evaluate as measured
from flows.cram import checked_plan
from flows.execute import execute
from flows.recipes.recipe import resolve
from flows.recipes.rules import pocket
from model import distributed, export, heldout, pretraining
from model.bert import Bert
from model.errors import InputError
from tasks import adopt
from tasks.evaluate import Evaluate, evaluate
from tasks.reports.diff import compare_scores
from tasks.reports.rules import beginning
from tasks.store import home
from tasks.store.artifacts import LINEAGE, Artifact, artifacts_of
from tasks.store.manifests import MANIFEST
from tasks.text.tokenizer import FILES, load_tokenizer, save_tokenizer
from tasks.text.words import ASCII, UNICODE
from tasks.vocabulary import train_wordpiece

BUDGET = {"budget": 30_000, "budget_unit": "tokens"}
RELEASE = ("model.safetensors", "config.json", *FILES)
BERT_LAYOUT = ORIGINAL | {  # also where the demo has other axes than the defaults
    "layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "first_norm": True, "norm_bias": True, "convolution": 0,
}  # fmt: skip


def made(override: dict, until: str = "pretrain", **use: str) -> Artifact:
    """The artifact of the last stage of the demo with these changes."""
    plan = checked_plan("demo", override, until, use, [])
    execute(plan)
    return plan.results()[0]


def release(model: Artifact, folder: Path) -> Path:
    """A folder with a model and its tokenizer, and nothing else."""
    folder.mkdir()
    for file in RELEASE:
        shutil.copyfile(model.path / file, folder / file)
    return folder


def messages(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.fixture(scope="module")
def first(tmp_path_factory, toy_texts: list[str]):
    """A run of the demo until its model, with its folder and the changes to the recipe."""
    root = tmp_path_factory.mktemp("models")
    override = tiny_override(write_jsonl(root / "toy.jsonl", toy_texts), **BUDGET)
    with store_of_its_own(root / "artifacts"):
        yield {"root": root, "override": override, "model": made(override)}


def going_on(first: dict, start: str, **changes: dict) -> dict:
    """The changes of the run that starts from a model, and others by stage."""
    override = json.loads(json.dumps(first["override"]))
    override["pretrain"]["start"] = start
    for stage, fields in changes.items():
        override[stage] |= fields
    return override


@pytest.fixture(scope="module")
def second(first):
    """A run that starts from the first, with its losses on the way."""
    return made(going_on(first, first["model"].key[:6], pretrain={"budget": 20_000}))


def test_more_budget_continues_below_the_loss_at_which_the_model_ended(first, second):
    losses = [each["heldout_loss"] for each in second.stats["evaluations"]]
    ended = first["model"].stats["heldout_loss"]
    assert losses[0] == pytest.approx(ended, rel=1e-5)
    assert losses[-1] < ended - 0.2
    assert second.stats["tokens"] < 21_000, "the new budget alone"
    assert (second.path / FILES[0]).read_bytes() == (first["model"].path / FILES[0]).read_bytes()


def test_card_report_and_record_say_that_it_went_on_from_a_model(first, second):
    before = first["model"]
    assert second.stats["start"] == {"name": before.name, "tokens": before.stats["tokens"], "start": None}
    lineage = json.loads((second.path / adopt.START_LINEAGE).read_text())
    assert list(lineage)[-1] == before.name
    assert {"download", "vocabulary", "tokenize"} <= {name.split("/")[0] for name in lineage}
    card = (second.path / "README.md").read_text()
    assert f"It began from {before.name}, which had read {before.stats['tokens']:,} tokens" in card
    assert "outside the rules" in card
    assert "scratch" not in card
    page = made(going_on(first, before.name, pretrain={"budget": 20_000}), "report")
    about = json.loads((page.path / "report.json").read_text())
    text = (page.path / "report.md").read_text()
    assert f"outside the paper's rules: from {before.name}" in text.split("\n## ")[0]
    kept = {rule: (verdict, fact) for rule, verdict, fact in about["rules"]}
    assert kept["masked language modelling from scratch"][0] == kept["no pretrained model or tokenizer"][0] == "✗"
    assert kept["at most 24 hours"][0] == "?"
    assert about["pretrained"] == second.name, "the same run, whether its start is named by key, name or folder"
    third = beginning({"name": second.name, "tokens": 7, "start": second.stats["start"]})
    assert third.startswith(f"{second.name}, which had read 7 tokens and began from {before.name}, which had read ")


def test_other_text_is_tokenized_with_the_models_vocabulary(first):
    rng = random.Random(3)
    shard = write_jsonl(first["root"] / "new.jsonl", [document(rng, 8) for _ in range(120)])
    new = {"download": {"files": [str(shard)]}, "pretrain": {"budget": 3_000}}
    override = going_on(first, "latest", **new)
    del override["vocabulary"]
    plan = checked_plan("demo", override, "pretrain", {}, [])
    recipe = resolve("demo", override)
    assert recipe.vocabulary.entries == 400, "not the demo's"
    assert recipe.pretrain.start == recipe.vocabulary.start == adopt.find_model("latest").name
    execute(plan)
    words = next(step.artifact for step in plan.steps if step.stage == "vocabulary")
    assert (words.path / FILES[0]).read_bytes() == (first["model"].path / FILES[0]).read_bytes()
    assert words.stats["trained_on"]["documents"] < 130


def test_keys_follow_the_weights_and_the_tokenizer_wherever_they_lie(first, tmp_path: Path):
    folder = release(first["model"], tmp_path / "copy")
    named, copied = (resolve("demo", going_on(first, str(name))) for name in (first["model"].name, folder))
    for stage in ("vocabulary", "pretrain"):
        assert getattr(named, stage).identity() == getattr(copied, stage).identity()
        assert getattr(named, stage).identity() != getattr(resolve("demo", first["override"]), stage).identity()
    bert = export.load(folder)
    with torch.no_grad():
        bert.embedding.word.weight[0] += 1
    export.save(bert, folder)
    changed = resolve("demo", going_on(first, str(folder)))
    assert changed.vocabulary.identity() == named.vocabulary.identity()
    assert changed.pretrain.identity() != named.pretrain.identity()


@pytest.mark.parametrize(
    ("stage", "fields", "words"),
    [
        ("pretrain", {"architecture": {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 96, "convolution": 3}},
         ["pretrain.architecture.layers is 2, the model's is 1", "convolution is 3, the model's is 5"]),
        ("tokenize", {"length": 64}, ["tokenize.length is 64, but the model takes 32 tokens; further positions"]),
        ("vocabulary", {"entries": 500}, ["vocabulary.entries is 500, the model's is 400"]),
        ("vocabulary", {"characters": "unicode"}, ["vocabulary.characters is 'unicode', the model's is 'ascii'"]),
        ("pretrain", {"start": "finetune/0123"}, ["finetune/0123"]),
    ],
)  # fmt: skip
def test_a_recipe_that_contradicts_the_model_is_refused_before_anything_runs(first, stage, fields, words):
    with pytest.raises(InputError) as refused:
        checked_plan("demo", going_on(first, first["model"].name, **{stage: fields}), "pretrain", {}, [])
    assert all(each in str(refused.value) for each in words), refused.value


def test_tokens_of_another_vocabulary_are_refused(first):
    other = made(first["override"] | {"vocabulary": {"entries": 420}}, "tokenize")
    with pytest.raises(InputError, match="was not made with the tokenizer of"):
        made(going_on(first, first["model"].name), tokenize=other.key)


def test_text_that_was_tokenized_with_the_models_vocabulary_is_not_tokenized_again(first):
    tokens = first["model"].manifest["inputs"]["tokens"]
    bert = made(going_on(first, first["model"].name, pretrain={"budget": 1_500}), tokenize=tokens.split("/")[1])
    assert bert.manifest["inputs"]["tokens"] == tokens
    assert bert.stats["start"]["name"] == first["model"].name


def test_an_interrupted_run_resumes_its_own_weights_and_not_those_that_it_began_from(first, monkeypatch):
    override = going_on(first, first["model"].name, pretrain={"budget": 6_000, "seed": 3})
    step = pretraining.Pretraining.step
    steps = []

    def interrupted(run, fraction: float) -> None:
        if len(steps) == 10:
            run.save()
            raise KeyboardInterrupt
        steps.append(fraction)
        step(run, fraction)

    whole = made(override)
    weights = export.load(whole.path).state_dict()
    shutil.rmtree(whole.path)
    with monkeypatch.context() as patch:
        patch.setattr(pretraining.Pretraining, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made(override)
    again = export.load(made(override).path).state_dict()
    assert len(steps) == 10
    for name, value in weights.items():
        assert torch.equal(again[name], value), name


def test_several_processes_begin_from_the_model_too(first, monkeypatch):
    monkeypatch.setattr(distributed, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(heldout, "LEAST_OF_CURVE", 1 / 25)  # as in the other processes
    monkeypatch.setenv("CRAM_MICRO_BATCH", "8")
    begun = []
    for gpus in (1, 2):
        monkeypatch.setenv("CRAM_GPUS", str(gpus))
        bert = made(going_on(first, first["model"].name, pretrain={"budget": 3_000, "seed": 3 + gpus}))
        assert bert.stats["machine"]["gpus"] == gpus
        begun.append(bert.stats["evaluations"][0]["heldout_loss"])
    alone, together = begun
    assert together == pytest.approx(alone, rel=1e-4)


def test_another_budget_starts_from_scratch_and_says_how_to_start_from_the_model(first, caplog):
    with caplog.at_level(logging.INFO):
        made(first["override"] | {"pretrain": first["override"]["pretrain"] | {"budget": 2_000}})
    name = first["model"].name
    assert f"{name} has the same settings but a budget of 30,000 tokens" in caplog.text
    assert f"--set pretrain.start={name}" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        made(first["override"] | {"pretrain": first["override"]["pretrain"] | {"budget": 2_000, "seed": 1}})
    assert "same settings" not in caplog.text


@pytest.fixture
def labels(tmp_path: Path) -> dict:
    """A task of one's own, and quick settings for it."""
    rows = ["text,label", *(f"the {'river' if i % 2 else 'clock'} {i},{'ab'[i % 2]}" for i in range(160))]
    (tmp_path / "labels.csv").write_text("\n".join(rows) + "\n")
    own = {"name": "mine", "data": str(tmp_path / "labels.csv")}
    return {"tasks": [own], "seeds": 1, "epochs": 1, "max_tokens": 16, "baseline": False}


def test_a_model_from_a_folder_is_finetuned_reported_and_measured_like_an_artifact(
    first, labels, tmp_path, monkeypatch
):
    folder = release(first["model"], tmp_path / "copy")
    page = made({"finetune": labels}, "report", pretrain=str(folder))
    about = json.loads((page.path / "report.json").read_text())
    model = Artifact(stage="pretrain", key=about["pretrained"].split("/")[1])
    assert model.stats["adopted"]
    text, card = ((page.path / file).read_text() for file in ("report.md", "README.md"))
    for shown in (text, card):
        assert "adopted from a folder" in shown
        assert "scratch" not in shown
        assert str(folder) not in shown
    assert "## Budget" not in text + card
    assert [rule[:2] for rule in about["rules"][:1]] == [["pretraining by the rules", "?"]]
    finetuned = Artifact(stage="finetune", key=about["artifacts"][-1].split("/")[1])
    assert "adopted from a folder" in (finetuned.path / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, tmp_path / "elsewhere")
    for place in ("copy", "elsewhere"):
        assert adopt.find_model(place) == model, "the same model is the same artifact"
    assert [row["score"] for row in compare_scores(about, about)] == ["mine, accuracy"]
    found = evaluate.fn(Evaluate(), model, first["model"], [])
    own = first["model"].stats["heldout"]
    assert found.stats["nats_per_byte"]["value"] == pytest.approx(own["nats_per_byte"]["value"], abs=1e-5)
    with pytest.raises(InputError, match="adopted from a folder, so it has no held-out text"):
        made({"finetune": {"tasks": ["neighbours"], "epochs": 1, "max_tokens": 32}}, "finetune", pretrain=str(folder))


def test_a_plan_adopts_no_model_but_knows_one_that_was_adopted(first, tmp_path: Path):
    folder = release(first["model"], tmp_path / "another")
    kept = artifacts_of("pretrain")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": "another file is another model"}))
    with home.read_only():
        with pytest.raises(InputError, match="a plan makes nothing"):
            adopt.find_model(str(folder))
        assert artifacts_of("pretrain") == kept
    adopted = adopt.find_model(str(folder))
    with home.read_only():
        assert adopt.find_model(str(folder)) == adopted


def test_a_plan_fetches_no_model_but_knows_one_that_was_fetched(first, tmp_path: Path, monkeypatch):
    folder = release(first["model"], tmp_path / "fetched")
    there = adopt.find_model(str(folder))
    known: list[str] = []

    def snapshot(repository: str, local_files_only: bool = False, **_: object) -> str:
        if repository in known:
            return str(folder)
        if local_files_only:
            raise LocalEntryNotFoundError(repository)
        known.append(repository)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with home.read_only(), pytest.raises(InputError, match="owner/name would have to be downloaded"):
        adopt.find_model("owner/name")
    assert known == []
    assert adopt.find_model("owner/name") == there
    with home.read_only():
        assert adopt.find_model("owner/name") == there


def test_a_folder_with_a_lineage_keeps_it_and_an_artifact_of_the_store_is_itself(first, tmp_path: Path):
    model = first["model"]
    copy = tmp_path / "copy"
    shutil.copytree(model.path, copy)
    adopted = adopt.find_model(str(copy))
    assert adopted != model
    assert (adopted.path / LINEAGE).read_bytes() == (model.path / LINEAGE).read_bytes()
    assert not (adopted.path / "heldout.parquet").exists()
    assert adopt.find_model(str(model.path)) == adopt.find_model(model.key[:5]) == model


@pytest.mark.parametrize("how", [ASCII, UNICODE.model_copy(update={"lowercase": False})])
def test_the_normaliser_of_measure_and_vocabulary_is_that_of_the_models_tokenizer(store, tmp_path, toy_texts, how):
    tokenizer = train_wordpiece(count_words(toy_texts, how), 300, how)
    save_tokenizer(tokenizer, tmp_path)
    shape = {"layers": 1, "hidden": 16, "heads": 2, "intermediate": 48}
    export.save(Bert(resolve("demo", {"pretrain": {"architecture": shape}}).pretrain.architecture, 300, 32), tmp_path)
    recipe = resolve("demo", {"pretrain": {"start": str(tmp_path)}})
    assert recipe.measure.normaliser == recipe.vocabulary.normaliser() == how
    assert recipe.vocabulary.entries == 300
    assert (recipe.filter.max_tokens_per_char == "by-script") == (how != ASCII)


def test_a_model_that_transformers_saved_again_is_gone_on_from_at_a_shorter_length_and_however_weights_begin(
    first, tmp_path: Path, transformers
):
    own = first["override"] | {"pretrain": BUDGET | {"architecture": BERT_LAYOUT, "batch_size": 8, "budget": 5_000}}
    before = made(own)
    transformers.AutoModelForMaskedLM.from_pretrained(before.path).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(before.path).save_pretrained(tmp_path)
    assert not (tmp_path / MANIFEST).exists()
    begun = {"start": str(tmp_path), "architecture": BERT_LAYOUT | {"zero_outputs": True}}  # no contradiction
    own = own | {"pretrain": own["pretrain"] | begun, "tokenize": {"length": 16}}
    after = made(own)
    assert after.stats["start"]["tokens"] is None
    assert "which was adopted from a folder, with its vocabulary" in (after.path / "README.md").read_text()
    assert json.loads((after.path / FILES[1]).read_text())["model_max_length"] == 16
    positions = export.load(before.path).embedding.position.weight[:16]
    assert export.load(after.path).embedding.position.weight.shape == positions.shape
    assert after.stats["evaluations"][0]["heldout_loss"] == pytest.approx(before.stats["heldout_loss"], abs=0.2)


@pytest.mark.parametrize("broken", ["no tokenizer", "no weights", "other specials", "too large a tokenizer"])
def test_a_folder_without_a_whole_model_is_refused(first, tmp_path: Path, broken: str):
    folder = release(first["model"], tmp_path / "copy")
    if broken == "other specials":
        text = (folder / FILES[0]).read_text()
        (folder / FILES[0]).write_text(
            text.replace("[CLS]", "[???]").replace("[SEP]", "[CLS]").replace("[???]", "[SEP]")
        )
    elif broken == "too large a tokenizer":
        tokenizer = load_tokenizer(folder)
        tokenizer.add_tokens(["zyzzyva"])
        save_tokenizer(tokenizer, folder)
    else:
        os.remove(folder / ("model.safetensors" if broken == "no weights" else FILES[0]))
    for refused in (lambda: checked_plan("demo", {}, "finetune", {"pretrain": str(folder)}, []),
                    lambda: checked_plan("demo", going_on(first, str(folder)), "pretrain", {}, [])):  # fmt: skip
        with pytest.raises(InputError, match="copy"):
            refused()


def test_a_folder_without_a_vocabulary_head_is_named_and_not_adopted_where_one_is_needed(first, tmp_path: Path):
    folder = release(first["model"], tmp_path / "copy")
    kept = artifacts_of("pretrain")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["CramModel"]}))
    with pytest.raises(InputError, match=r"copy .* model .* its head is none; expected MaskedLM"):
        measured(str(folder), str(folder), 1)
    assert artifacts_of("pretrain") == kept


def test_a_run_that_learns_nothing_says_so_after_a_tenth_at_its_end_and_on_every_page(first, caplog):
    hopeless = {"learning_rate": 1.0, "clip": None, "budget": 6_000, "matrix_learning_rate": 1.0}
    override = first["override"] | {"pretrain": first["override"]["pretrain"] | hopeless}
    with caplog.at_level(logging.WARNING):
        bert = made(override)
    late = [r.getMessage() for r in caplog.records if "by token frequencies alone it is" in r.getMessage()]
    assert len(late) == 1
    held = bert.stats["heldout"]
    assert held["nats_per_byte"]["value"] > held["by_frequencies"]["nats_per_byte"]
    said = "It learned nothing from context: "
    assert said in caplog.text
    assert f"**{said}" in (bert.path / "README.md").read_text()
    page = made(override, "report")
    assert f"**{said}" in (page.path / "report.md").read_text().split("\n## ")[0]
    assert "learned nothing" not in (first["model"].path / "README.md").read_text()


def test_a_run_that_is_slow_but_falls_is_not_called_hopeless(first, caplog, monkeypatch):
    monkeypatch.setattr("model.masking.by_frequencies", lambda *_: {"nats_per_token": 0.0})
    override = first["override"] | {"pretrain": first["override"]["pretrain"] | {"budget": 10_000, "seed": 9}}
    with caplog.at_level(logging.WARNING):
        losses = [each["heldout_loss"] for each in made(override).stats["evaluations"]]
    assert (np.diff(losses) < 0).all()
    assert "by token frequencies alone it is" not in caplog.text


def test_a_pocket_recipe_can_go_on_from_a_model():
    assert pocket({"pretrain": {"start": "latest"}})["pretrain"]["start"] == "latest"
