"""The finetune stage: which runs the parameters ask for, and what one of them writes."""

import inspect
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import store_of_its_own, toy_model, toy_tokens

from flows.recipes.recipe import resolve
from model import bert, export, finetuning, machine
from model.errors import InputError
from model.settings import Architecture, Finetuning, Specials
from tasks.finetune import Finetune, FinetuneRun, finetune, load_encoder
from tasks.glue import metrics
from tasks.glue.inputs import encode, encoding
from tasks.glue.own import by_name
from tasks.glue.table import GLUE, TASKS
from tasks.store.artifacts import Artifact
from tasks.text.tokenizer import load_tokenizer
from tasks.workers import finetunes

MODERN = {
    "layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "positions": "rotary", "norm_bias": False,
    "first_norm": False, "head_transform": True,
}  # fmt: skip
PAPERS = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}
QUICK = {"epochs": 2, "learning_rate": 3e-3, "max_tokens": 32}


# Which runs


def test_the_papers_rules_are_one_setting_for_eight_tasks_and_five_seeds():
    made = Finetune().runs()
    assert Counter(run.task for run in made) == dict.fromkeys(GLUE, 5)
    (setting,) = {run.model_copy(update={"task": "cola", "seed": 0, "keep": True}).model_dump_json() for run in made}
    paper = {
        "epochs": 5, "batch_size": 16, "learning_rate": 4e-5, "warmup": 0.1, "weight_decay": 0.0, "dropout": 0.1,
        "max_tokens": 128, "head": "tanh", "pooling": "cls",
    }  # fmt: skip
    assert paper.items() <= json.loads(setting).items()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            {"tasks": ["cola", "rte", "cola"], "keep": "all"},
            [f"{task}-{seed} kept" for task in ("cola", "rte") for seed in (0, 1)],
        ),
        (
            {"tasks": ["cola"], "shares": [0.1, 1.0], "baseline": True},
            ["cola-0 kept", "cola-1", "cola-0-10%", "cola-1-10%", "cola-0-untrained", "cola-1-untrained"],
        ),
        ({"tasks": ["mnli"], "keep": "none"}, ["mnli-0", "mnli-1"]),
    ],
)
def test_runs_are_those_of_each_task_and_seed_then_those_on_less_data_and_without_pretraining(asked, expected):
    found = []
    for run in Finetune(seeds=2, **asked).runs():
        found.append(run.label() + " kept" * run.keep)
        assert (run.pretrained, run.share) == ("untrained" not in found[-1], 0.1 if "10%" in found[-1] else 1.0)
    assert found == expected


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"epochs": 6}, "epochs is 6"),
        ({"shares": [0.5]}, "shares"),
        ({"shares": [0.0, 1.0]}, "shares"),
        ({"data": "probes"}, "'mnli'"),
        ({"tasks": ["word-order"]}, "'word-order'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_its_field(asked: dict, named: str):
    with pytest.raises(InputError, match=named):
        resolve("crammed-bert", {"finetune": asked})


# What a run writes

WORDS = ("river", "clock", "letter", "bridge", "train", "map")


def write_task(folder: Path, task: str, rng: np.random.Generator) -> None:
    """A task whose label is the number of a word; in regression tasks too."""
    about = TASKS[task]
    kinds = TASKS[task].classes if TASKS[task].classes > 1 else len(WORDS)
    (folder / task).mkdir(parents=True)
    sizes = {"train": 160, **dict.fromkeys(about.validation, 60)}
    for split, count in sizes.items():
        labels = rng.integers(0, kinds, count)
        labels[: len(WORDS)] = np.arange(len(WORDS)) % kinds  # each of them
        texts = [f"{(WORDS[k] + ' ') * 4}{n}." for n, k in zip(rng.integers(0, 1_000_000, count), labels, strict=True)]
        labels = labels * (1 if about.labels else 1.0)
        table = pa.table(dict.fromkeys(about.columns, texts) | {"label": labels})
        pq.write_table(table, folder / task / f"{split}.parquet")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("glue")
    rng = np.random.default_rng(3)
    for task in ("cola", "mnli", "rte", "stsb"):
        write_task(folder, task, rng)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_texts: list[str]):
    """A model of the paper's layout and a modern one."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        yield {"papers": toy_model(tokens, PAPERS), "modern": toy_model(tokens, MODERN)}


def one(data: Path, task: str, **changes) -> FinetuneRun:
    return FinetuneRun(data=str(data), task=task, definition=by_name(task, str(data)), **QUICK | changes)


def handed(monkeypatch: pytest.MonkeyPatch, run: FinetuneRun, start: Artifact) -> dict:
    """What this run gives to training, by name of the argument."""
    signature = inspect.signature(finetuning.finetune)
    train = Mock(side_effect=RuntimeError("training begins"))
    # as many epochs as no other test's run has, whose artifact would be taken
    run = run.model_copy(update={"epochs": 4, "keep": False})
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "finetune", train)
        with pytest.raises(RuntimeError, match="training begins"):
            finetune.fn(run, start)
    return signature.bind(*train.call_args.args, **train.call_args.kwargs).arguments


def test_the_model_without_pretraining_has_the_special_tokens_and_marks_a_second_text(tmp_path: Path, data: Path):
    first = bert.Bert(Architecture(**MODERN, bias=True), 40, 16, specials=Specials(pad=9, unk=5, cls=6, sep=7, mask=8))
    first.embedding.second = torch.ones(32)
    export.save(first, tmp_path)
    made = [load_encoder(one(data, "rte", pretrained=False, seed=seed), tmp_path) for seed in (0, 0, 1)]
    for encoder in made:
        assert encoder.specials == first.specials
        assert encoder.embedding.word.padding_idx == 9
        assert 0.01 < encoder.embedding.second.std() < 0.04
    same, again, other = ([*encoder.state_dict().values()] for encoder in made)
    assert all(map(torch.equal, same, again))
    assert not torch.equal(made[0].embedding.second, made[2].embedding.second)
    assert not torch.equal(made[0].embedding.second, made[0].embedding.word.weight[0])
    assert not all(map(torch.equal, same, other))


@pytest.fixture(scope="module")
def cola(models, data: Path) -> Artifact:
    """A kept model, trained long enough to learn what there is to be learned."""
    return finetune.fn(one(data, "cola", epochs=5, batch_size=4, head="native"), models["modern"])


def test_predictions_have_the_texts_and_agree_with_the_scores(cola, data: Path):
    table = pq.read_table(cola.path / "predictions.parquet")
    given = pq.read_table(data / "cola" / "validation.parquet")
    assert table.column_names == ["split", "row", "sentence", "label", "prediction", "scores"]
    assert table.select(["sentence", "label"]).to_pydict() == given.to_pydict()
    predicted = np.array(table["scores"].to_pylist()).argmax(axis=1)
    assert predicted.tolist() == table["prediction"].to_pylist()
    score = cola.stats["validation"]["validation"]["metrics"]["matthews"]
    assert score == pytest.approx(metrics.score("matthews", given["label"].to_numpy(), predicted), abs=0.01)
    assert score > 50, "the word gives the label away"
    assert json.loads((cola.path / "scores.json").read_text()) == cola.stats["validation"]


def test_a_copy_of_a_kept_model_gives_the_predictions_again_here_and_in_transformers(cola, tmp_path: Path):
    import transformers

    copy = shutil.copytree(cola.path, tmp_path / "copy")
    table = pq.read_table(copy / "predictions.parquet")
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    given = tokenizer(table["sentence"].to_pylist(), return_tensors="pt", padding=True)
    assert given.input_ids.tolist()[0] == encode(table.select(["sentence"]).to_pandas(), load_tokenizer(copy), 32)[0][0]
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(copy).eval()
    assert theirs.config.id2label == {0: "unacceptable", 1: "acceptable"}
    with torch.no_grad():
        scores = theirs(**given).logits
    np.testing.assert_allclose(scores.numpy(), np.array(table["scores"].to_pylist()), atol=1e-4)


def test_a_kept_model_that_compares_the_texts_of_a_pair_gives_its_predictions_again(models, data: Path, transformers):
    made = finetune.fn(one(data, "rte", pooling="compare"), models["papers"])
    kept = transformers.AutoModelForSequenceClassification.from_pretrained(made.path).eval()
    table = pq.read_table(made.path / "predictions.parquet")
    assert kept.classifier.dense.in_features == 4 * PAPERS["hidden"]
    texts = table.select(["sentence1", "sentence2"]).to_pandas()
    inputs, _ = encode(texts, load_tokenizer(made.path), QUICK["max_tokens"])
    with torch.no_grad():
        again = torch.cat([kept(torch.tensor([ids])).logits for ids in inputs])
    np.testing.assert_allclose(again.numpy(), np.array(table["scores"].to_pylist()), atol=1e-4)


def test_statistics_say_what_was_trained_on_and_how(cola):
    stats = cola.stats
    here = machine.detect().describe()
    assert stats["machine"] == here
    expected = {"task": "cola", "seed": 0, "head": "native", "pretrained": True, "share": 1.0,
                "train_examples": 160, "official_train_examples": 8551, "steps": 5 * (160 // 4)}  # fmt: skip
    assert expected.items() <= stats.items()
    assert stats["data"]["cut"] == {"train": 0, "validation": 0}
    lineage = json.loads((cola.path / "lineage.json").read_text())
    assert cola.manifest["inputs"] == {"start": next(reversed(lineage))}


@pytest.mark.parametrize(("task", "splits"), [("mnli", ["validation_matched", "validation_mismatched"]),
                                              ("stsb", ["validation"])])  # fmt: skip
def test_all_splits_and_metrics_of_a_task_are_scored(models, data: Path, task: str, splits: list[str]):
    made = finetune.fn(one(data, task, keep=False, epochs=1), models["papers"])
    assert list(made.stats["validation"]) == splits
    for about in made.stats["validation"].values():
        assert tuple(about["metrics"]) == TASKS[task].metrics
        assert about["examples"] == 60
    assert pq.read_table(made.path / "predictions.parquet")["split"].to_pylist() == [
        s for s in splits for _ in range(60)
    ]


def test_a_model_that_is_not_kept_leaves_no_weights_and_inputs_that_are_cut_are_counted(models, data: Path, caplog):
    made = finetune.fn(one(data, "rte", head="native", max_tokens=8, keep=False), models["papers"])
    files = {path.name for path in made.path.iterdir()}
    assert files == {"predictions.parquet", "scores.json", "lineage.json", "stage.json", "stats.json"}
    assert made.stats["data"]["cut"]["train"] == 160
    assert made.stats["head"] == "tanh", "transformers has no model of this layout"
    assert "finetune.head is native" in caplog.text


def test_weights_and_head_are_those_of_the_seed(models, data: Path, monkeypatch):
    pretrained = export.load(models["papers"].path)
    made = {}
    for known, seed in ((True, 0), (True, 1), (False, 0), (False, 1)):
        run = one(data, "rte", pretrained=known, seed=seed)
        made[known, seed] = model = handed(monkeypatch, run, models["papers"])["classifier"]
        model.bert.restore_tokens()
        fresh = bert.Bert(pretrained.architecture, pretrained.vocabulary, pretrained.length, seed=seed)
        for name, value in (pretrained if known else fresh).named_parameters():
            assert torch.equal(model.bert.get_parameter(name), value), name
    for name, value in made[True, 0].classifier.named_parameters():
        assert torch.equal(value, made[False, 0].classifier.get_parameter(name)), name
        assert torch.equal(value, made[True, 1].classifier.get_parameter(name)) == (value.ndim == 1), name


def test_a_share_of_the_training_data_is_drawn_by_the_seed(models, data: Path, monkeypatch):
    def trained_on(**changes) -> list[tuple]:
        train = handed(monkeypatch, one(data, "rte", **changes), models["papers"])["train"]
        return [(*train.input(row), train.labels[row]) for row in range(len(train))]

    every = trained_on()
    assert len(set(every)) == len(every) == 160
    first, again, other = (
        [every.index(each) for each in trained_on(share=0.25, **changes)]
        for changes in ({"seed": 0}, {"seed": 0, "batch_size": 8}, {"seed": 1})
    )
    assert len(set(first)) == len(set(other)) == 40
    assert first == again
    assert len(set(first) & set(other)) < 25, "10 for independent draws, with a deviation of 2.4"
    assert 10 < sum(row >= 80 for row in first) < 30, "from all of the data"
    stats = finetune.fn(one(data, "rte", share=0.25, keep=False), models["papers"]).stats
    assert (stats["steps"], stats["train_examples"]) == (2 * (40 // 16), 160)


def test_longer_inputs_than_the_model_takes_are_refused(models, data: Path):
    with pytest.raises(InputError, match=r"finetune\.max_tokens is 33.* 32 tokens"):
        finetune.fn(one(data, "cola", max_tokens=33), models["papers"])


def raising(problem: Exception):
    def fail(*_):
        raise problem

    return fail


@pytest.mark.parametrize(
    ("module", "name", "instead", "words"),
    [
        (finetuning, "predict", lambda _, given, __: np.full((len(given), 2), np.nan), "cola-8: .*not finite"),
        (finetuning, "finetune", raising(MemoryError()), "memory.*cola-8"),
        (finetuning, "finetune", raising(torch.OutOfMemoryError()), "memory.*cola-8"),
        (machine, "detect", raising(InputError("no such device")), "no such device"),  # in the process that trains
    ],
)
def test_what_fails_in_training_is_an_input_error(models, data: Path, monkeypatch, module, name, instead, words):
    monkeypatch.setattr(module, name, instead)
    with pytest.raises(InputError, match=words):
        finetune.fn(one(data, "cola", seed=8), models["papers"])


def test_the_memory_of_a_run_follows_from_its_batch_and_the_model_it_starts_from(models, data: Path):
    run = one(data, "cola", batch_size=16)
    start = models["papers"]
    here = machine.detect()
    weights = (start.path / "model.safetensors").stat().st_size
    more = run.model_copy(update={"batch_size": 32}).memory(start, here) - run.memory(start, here)
    assert run.memory(start, here) == finetunes.BYTES_A_RUN + 4 * weights + more
    assert more > 16 * run.max_tokens * 32, "more than a byte for each of a layer's values"
    not_made = Artifact(stage="finetune", key="0" * 12)
    assert run.memory(not_made, here) == finetunes.BYTES_A_RUN


def test_bad_data_is_refused_beforehand_and_repeated_rows_are_warned_of_once(data: Path, caplog, tmp_path):
    copy = shutil.copytree(data / "rte", tmp_path / "glue" / "rte").parent
    train, validation = (copy / "rte" / f"{split}.parquet" for split in ("train", "validation"))
    pq.write_table(pa.concat_tables([pq.read_table(train), pq.read_table(validation).slice(0, 3)]), train)
    for seed in range(2):
        one(copy, "rte", seed=seed).check()
    (warning,) = [record.message for record in caplog.records if "in validation" in record.message]
    assert "rows 161, 162 and 163" in warning
    with pytest.raises(InputError, match=r"rte: .*2 training examples.*finetune\.shares"):
        one(copy, "rte", share=0.01).check()


def test_a_file_that_changes_between_two_runs_is_read_again(models, data: Path, tmp_path: Path):
    copy = shutil.copytree(data / "rte", tmp_path / "other" / "rte").parent
    finetune.fn(one(copy, "rte", keep=False), models["papers"])
    path = copy / "rte" / "train.parquet"
    pq.write_table(pq.read_table(path).slice(32), path)
    assert finetune.fn(one(copy, "rte", keep=False), models["papers"]).stats["train_examples"] == 128


def test_of_seeds_that_begin_together_one_encodes_the_inputs(models, data: Path, monkeypatch):
    encoded = []

    def encode_alone(table: pd.DataFrame, *rest):
        assert encoding.locked(), "the others wait"
        encoded.append(len(table))
        return encode(table, *rest)

    monkeypatch.setattr("tasks.glue.inputs.encode", encode_alone)
    runs = [one(data, "rte", seed=seed, keep=False, max_tokens=30) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(finetune.fn, runs, [models["papers"]] * 2))
    assert len({each.key for each in made}) == 2
    assert encoded == [160, 60]


CHANGES = {
    "epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "warmup": 0.5, "weight_decay": 0.9, "dropout": 0.5,
    "max_tokens": 8, "head": "native", "pooling": "mean", "seed": 1, "pretrained": False, "share": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", [*Finetuning.model_fields, "seed", "pretrained", "share"])
def test_no_setting_is_ignored(models, data: Path, name: str):
    base = finetune.fn(one(data, "cola", keep=False), models["modern"])
    changed = finetune.fn(one(data, "cola", keep=False, **{name: CHANGES[name]}), models["modern"])
    first, second = (pq.read_table(run.path / "predictions.parquet")["scores"].to_pylist() for run in (base, changed))
    assert first != second
