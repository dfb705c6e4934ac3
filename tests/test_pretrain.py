"""The stages from tokens to report, as plain calls on a toy corpus."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import write_jsonl

from model import InputError
from tasks import stage as store_module
from tasks.corpus import Download, download
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.dedup import Deduplicate, deduplicate
from tasks.filter import Filter, drop_incompressible
from tasks.glue import Finetune, finetune
from tasks.pretrain import Pretrain, measure_heldout, pretrain
from tasks.report import COLUMNS, PUBLISHED, Report, average, contamination, contamination_section, gather, report
from tasks.stage import Artifact
from tasks.tokens import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, train_vocabulary

TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48},
    budget=30_000,
    budget_unit="tokens",
    batch_size=8,
    learning_rate=5e-3,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory, toy_texts: list[str]):
    """Every stage's artifact."""
    root = tmp_path_factory.mktemp("made")
    before, store_module.ROOT = store_module.ROOT, root / "artifacts"
    shard = write_jsonl(root / "toy.jsonl", [*toy_texts, toy_texts[0]])
    corpus = download.fn(Download(source="files", files=[str(shard)], documents=0))
    unique = deduplicate.fn(Deduplicate(), corpus)
    clean = decontaminate.fn(Decontaminate(data="probes"), unique)
    kept = drop_incompressible.fn(Filter(vocabulary_entries=400, max_tokens_per_char=0.5), clean)
    words = train_vocabulary.fn(Vocabulary(entries=400), kept)
    tokens = tokenize.fn(Tokenize(length=32, heldout_fraction=0.3), kept, words)
    bert = pretrain.fn(TINY, tokens)
    asked = Finetune(data="probes", tasks=["word-order", "neighbours"], seeds=2, epochs=1, max_tokens=32, baseline=True)
    runs = [finetune.fn(run, bert) for run in asked.runs()]
    page = report.fn(Report(title="toy"), runs)
    yield {"root": root, "tokens": tokens, "pretrain": bert, "finetune": runs, "report": page, "download": corpus}
    store_module.ROOT = before


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
    import shutil

    bert, run = made["pretrain"], made["finetune"][0]
    monkeypatch.setattr(store_module, "ROOT", tmp_path)
    shutil.copytree(made["root"] / "artifacts" / bert.name, tmp_path / bert.name)
    assert measure_heldout(bert) == pytest.approx(bert.stats["heldout_loss"], abs=1e-6)
    asked = Finetune(data="probes", tasks=["word-order"], seeds=1, epochs=1, max_tokens=32)
    again = finetune.fn(next(iter(asked.runs())), bert)
    assert again == run
    assert again.stats == json.loads((made["root"] / "artifacts" / run.name / "stats.json").read_text())
    funnel = json.loads((report.fn(Report(title="toy"), [again]).path / "report.json").read_text())["funnel"]
    assert [row["stage"] for row in funnel][:4] == ["download", "deduplicate", "decontaminate", "filter"]


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


def test_predictions_agree_with_the_scores(made):
    for run in made["finetune"]:
        rows = pq.read_table(run.path / "predictions.parquet").to_pydict()
        right = np.mean(np.array(rows["label"]) == np.array(rows["prediction"]))
        assert 100 * right == pytest.approx(run.stats["validation"]["validation"]["accuracy"], abs=1e-3)


def test_the_report_has_probes_as_probes_and_the_funnel(made):
    page = (made["report"].path / "report.md").read_text()
    about = json.loads((made["report"].path / "report.json").read_text())
    assert "these are not GLUE" in page
    assert "## GLUE" not in page
    assert about["average"] is None
    passed = {row["stage"]: row["documents"] for row in about["funnel"]}
    assert passed["download"] == 301
    assert passed["deduplicate"] == passed["decontaminate"] == 300
    assert passed["tokenize"] + passed["held out"] == passed["filter"]
    for name in about["artifacts"]:
        assert (made["report"].path / ".." / ".." / name / "stage.json").exists()
    row = next(r for r in about["scores"] if r["task"] == "word-order" and r["pretrained"])
    values = [r.stats["validation"]["validation"]["accuracy"] for r in made["finetune"] if r.stats["task"] == "word-order"
              and r.stats["pretrained"]]  # fmt: skip
    assert row["score"] == pytest.approx(np.median(values), abs=0.01)
    assert row["seeds"] == 2


def test_the_report_says_that_the_text_was_not_checked_and_why(made):
    page = (made["report"].path / "report.md").read_text()
    about = json.loads((made["report"].path / "report.json").read_text())
    told = page.split("## Text of the downstream data in the corpus\n\n")[1].split("\n\n")[0]
    assert told == "Not checked, because the probes are made of held-out documents of this corpus."
    assert about["contamination"]["checked"] is False
    older = "\n".join(contamination_section(contamination({"download/x": {"stage": "download"}})))
    assert "Not checked, because the corpus did not pass the stage decontaminate." in older


@pytest.mark.parametrize("method", ["drop", "cut"])
def test_the_report_says_what_of_the_downstream_data_was_in_the_text(store, tmp_path: Path, toy_texts, method: str):
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    for task, columns in (("cola", ("sentence",)), ("rte", ("sentence1", "sentence2"))):
        (tmp_path / "glue" / task).mkdir(parents=True)
        rows = {column: [f"{task} {column} {sentence}", "short"] for column in columns}
        pq.write_table(pa.table(rows), tmp_path / "glue" / task / "test.parquet")
    texts = [*toy_texts[:9], f"rte sentence1 {sentence}", f"{toy_texts[9]} cola sentence {sentence}"]
    shard = write_jsonl(tmp_path / "toy.jsonl", texts)
    corpus = download.fn(Download(source="files", files=[str(shard)], documents=0))
    asked = Decontaminate(data=str(tmp_path / "glue"), method=method, words=14, tasks=["cola", "rte"])
    clean = decontaminate.fn(asked, corpus)
    about = contamination({corpus.name: corpus.manifest, clean.name: clean.manifest})
    page = "\n".join(contamination_section(about))
    dropped = about["dropped"]
    assert dropped == {"drop": 2, "cut": 1}[method]
    assert f"{dropped:,} documents dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert ("characters cut from 1 documents" in page) is (method == "cut")
    assert "3 of the 6 sentences have fewer than 14 words" in page
    assert "Not at hand, so not looked for: cola/validation, rte/validation." in page
    assert "| RTE | test | 4 | 2 |" in page
    assert json.loads(json.dumps(about)) == about


def test_runs_of_different_models_are_not_reported_as_one(made):
    other = pretrain.fn(TINY.model_copy(update={"seed": 1}), made["tokens"])
    asked = Finetune(data="probes", tasks=["word-order"], seeds=1, epochs=1, max_tokens=32)
    run = finetune.fn(next(iter(asked.runs())), other)
    with pytest.raises(InputError, match="different models"):
        report.fn(Report(), [made["finetune"][0], run])


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


def test_one_run_given_twice_or_unlike_runs_make_no_median(made):
    run = made["finetune"][0]
    with pytest.raises(InputError, match="one setting"):
        report.fn(Report(title="x"), [run, run])
    other = next(iter(Finetune(data="probes", tasks=["word-order"], epochs=2, max_tokens=32).runs()))
    with pytest.raises(InputError, match="differ in their seed only"):
        report.fn(Report(title="x"), [run, finetune.fn(other.model_copy(update={"seed": 9}), made["pretrain"])])


def test_a_corpus_smaller_than_a_batch_is_told(made):
    with pytest.raises(InputError, match=r"fewer than one batch of 65,536"):
        pretrain.fn(TINY.model_copy(update={"batch_size": 65_536}), made["tokens"])


def test_longer_inputs_than_the_model_takes_are_told(made):
    asked = Finetune(data="probes", tasks=["word-order"], seeds=1, max_tokens=64)
    with pytest.raises(InputError, match="takes 32 tokens at most"):
        finetune.fn(next(iter(asked.runs())), made["pretrain"])


def run_of(task: str, split: str, score: float, metric: str, have: int, official: int) -> dict:
    scores = {"examples": have, "official_examples": official, metric: score, "majority": {metric: 0.0}}
    return {"task": task, "seed": 0, "pretrained": True, "metric": metric, "train_examples": 10,
            "official_train_examples": 10, "validation": {split: scores}}  # fmt: skip


def published_runs(values: tuple[float, ...], have: int = 5) -> list[dict]:
    from tasks.glue import TASKS

    names = ("mnli", "mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")
    splits = ("validation_matched", "validation_mismatched", *["validation"] * 7)
    found = []
    for task, split, value in zip(names, splits, values, strict=True):
        one = run_of(task, split, value, TASKS[task].metrics[0], have, 5)
        for metric in TASKS[task].metrics[1:]:
            one["validation"][split] |= {metric: 0.0}
            one["validation"][split]["majority"] |= {metric: 0.0}
        found.append(one)
    return found


@pytest.mark.parametrize(("scores", "mean"), [(s, m) for _, s, m, _ in PUBLISHED if s])
def test_the_average_of_published_rows_is_the_published_average(scores: tuple, mean: float):
    assert average(gather(published_runs(scores))) == pytest.approx(mean, abs=0.051)


def test_no_average_on_partial_or_missing_data():
    scores = PUBLISHED[0][1]
    assert average(gather(published_runs(scores, have=4))) is None
    assert average(gather(published_runs(scores)[1:])) is None


def test_partial_data_is_said_beside_the_number():
    from tasks.report import glue_section

    text = "\n".join(glue_section(gather(published_runs(PUBLISHED[0][1], have=4)), "ours"))
    assert "91.9\\*" in text
    assert "4 of 5 validation examples" in text
    assert all(name in text for name in COLUMNS)
    assert "80.4" in text
    assert "published" in text


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


@pytest.mark.parametrize(
    "change",
    [{"epochs": 2}, {"batch_size": 8}, {"learning_rate": 4e-3}, {"warmup": 0.5}, {"dropout": 0.4}, {"max_tokens": 8}],
    ids=lambda change: next(iter(change)),
)
def test_no_setting_of_finetuning_is_ignored(made, change: dict):
    base = {"data": "probes", "tasks": ["neighbours"], "seeds": 1, "epochs": 1, "max_tokens": 32, "learning_rate": 1e-3}
    bert = Artifact(stage="pretrain", key=made["pretrain"].key)
    tables = []
    for delta in ({}, change):
        (run,) = Finetune(**(base | delta)).runs()
        tables.append(finetune.fn(run, bert))
    scores = [pq.read_table(t.path / "predictions.parquet")["scores"].to_pylist() for t in tables]
    assert scores[0] != scores[1]


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
