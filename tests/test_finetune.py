"""The finetune stage: which runs the parameters ask for, and what one of them writes."""

import inspect
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import store_of_its_own, toy_tokens
from pydantic import ValidationError

from model import InputError, bert, export, finetuning, machine
from tasks.finetune import Finetune, FinetuneRun, Modern, encode, encoding, finetune
from tasks.glue import metrics
from tasks.glue.tasks import GLUE, TASKS
from tasks.pretrain import Pretrain, pretrain
from tasks.store import Artifact, digest
from tasks.text.tokenizer import load_tokenizer
from tasks.workers import finetunes

MODERN = {
    "layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "positions": "rotary", "norm_bias": False,
    "first_norm": False, "head_transform": True,
}  # fmt: skip
PAPERS = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}
QUICK = {"epochs": 2, "learning_rate": 3e-3, "max_tokens": 32}


# Which runs


def test_the_papers_protocol_is_one_setting_for_eight_tasks_and_five_seeds():
    runs = Finetune().runs()
    assert len(runs) == 8 * 5
    assert {start for _, start in runs} == {None}
    settings = [run.model_dump(exclude={"task", "seed", "keep"}) for run, _ in runs]
    assert all(one == settings[0] for one in settings)
    run = runs[0][0]
    assert (run.epochs, run.batch_size, run.learning_rate, run.schedule, run.warmup) == (5, 16, 4e-5, "cosine", 0.1)
    assert (run.weight_decay, run.dropout, run.max_tokens, run.head, run.choose) == (0.0, 0.1, 128, "tanh", "last")
    assert {run.seed for run, _ in runs if run.keep} == {0}


def test_the_modern_protocol_starts_three_tasks_from_seed_0_of_mnli():
    runs = Finetune(protocols=["modern"]).runs()
    for run, start in runs:
        assert run.protocol == "modern"
        assert (run.schedule, run.warmup, run.choose, run.head) == ("linear", 0.06, "best", "native")
        if run.task in ("rte", "mrpc", "stsb"):
            assert run.start == "mnli"
            first = runs[start][0]
            assert (first.task, first.seed, first.protocol, first.keep) == ("mnli", 0, "modern", True)
        else:
            assert (run.start, start) == ("pretrained", None)
    counts = {task: sum(run.task == task for run, _ in runs) for task in GLUE}
    assert counts == {"mnli": 1, "sst2": 3, "stsb": 5, "rte": 5, "qnli": 1, "qqp": 1, "mrpc": 5, "cola": 4}
    assert {run.learning_rate for run, _ in runs if run.task == "mrpc"} == {8e-5}


def test_mnli_is_trained_and_kept_for_the_tasks_that_start_from_it_though_not_asked_for():
    runs = Finetune(protocols=["modern"], tasks=["rte"], keep="none").runs()
    assert [(run.task, run.keep, start) for run, start in runs] == [("mnli", True, None), *[("rte", False, 0)] * 5]
    assert [run.task for run, _ in Finetune(protocols=["modern"], tasks=["cola"]).runs()] == ["cola"] * 4


def test_both_protocols_stand_side_by_side_and_starts_are_counted_over_both():
    runs = Finetune(protocols=["cramming", "modern"], tasks=["mnli", "rte"], seeds=2).runs()
    assert [run.protocol for run, _ in runs] == ["cramming"] * 4 + ["modern"] * 6
    (start,) = {start for run, start in runs if run.start == "mnli"}
    assert (runs[start][0].task, runs[start][0].protocol) == ("mnli", "modern")


def test_a_learning_curve_and_a_baseline_are_more_runs_of_the_papers_protocol():
    runs = [
        run
        for run, _ in Finetune(
            tasks=["cola"], seeds=2, shares=[0.1, 1.0], baseline=True, protocols=["cramming", "modern"]
        ).runs()
    ]
    what = [(run.protocol, run.share, run.pretrained, run.seed, run.keep) for run in runs[:6]]
    assert what == [
        ("cramming", 1.0, True, 0, True),
        ("cramming", 1.0, True, 1, False),
        ("cramming", 0.1, True, 0, False),
        ("cramming", 0.1, True, 1, False),
        ("cramming", 1.0, False, 0, False),
        ("cramming", 1.0, False, 1, False),
    ]
    assert all(run.pretrained and run.share == 1.0 for run in runs[6:])
    assert len({run.label() for run in runs}) == len(runs)
    assert runs[2].label() == "cola-0-10%"


def test_a_task_by_itself_can_be_changed_in_the_modern_protocol_only():
    changed = Finetune(
        protocols=["modern"], tasks=["cola"], modern={"cola": {**Modern().cola.model_dump(), "epochs": 3}}
    )
    assert {run.epochs for run, _ in changed.runs()} == {3}
    with pytest.raises(ValidationError, match="cola"):
        Finetune(cola={"epochs": 3})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"epochs": 6}, "epochs is 6, but the rules of protocol cramming allow 5"),
        ({"protocols": ["modern"], "tasks": ["wnli"]}, "protocol modern has no settings for 'wnli'"),
        ({"shares": [0.5]}, "1.0, which has to be among them"),
        ({"shares": [0.0, 1.0]}, "expected shares above 0"),
        ({"data": "probes", "tasks": ["word-order"], "test": True}, "probes have no test data"),
        ({"data": "probes"}, "data 'probes' has no task 'mnli'"),
        ({"tasks": ["word-order"]}, "has no task 'word-order'"),
        ({"protocols": []}, "protocols"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(asked: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        Finetune(**asked)


# What a run writes


def write_task(folder: Path, task: str, rng: np.random.Generator) -> None:
    """A task whose label is told by a word; of regression tasks, by its place in a list."""
    about, words = TASKS[task], ("river", "clock", "letter", "bridge", "train", "map")

    def rows(count: int, labelled: bool = True) -> dict:
        kinds = rng.integers(0, about.classes if about.classes > 1 else 6, count)
        kinds[: len(words)] = (
            np.arange(len(words)) % max(2, about.classes) if about.classes > 1 else np.arange(len(words))
        )
        ends = rng.integers(0, 1_000_000, count)
        texts = {
            name: [f"{(words[k] + ' ') * 4}{n}." for n, k in zip(ends, kinds, strict=True)] for name in about.columns
        }
        kinds = kinds if about.classes > 1 else kinds * 1.0
        return texts | {"label": kinds if labelled else np.full(count, -1)}

    (folder / task).mkdir(parents=True)
    sizes = {"train": 160, **dict.fromkeys(about.validation, 60), **dict.fromkeys(about.test, 20)}
    for split, count in sizes.items():
        pq.write_table(pa.table(rows(count, split not in about.test)), folder / task / f"{split}.parquet")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder, rng = tmp_path_factory.mktemp("glue"), np.random.default_rng(3)
    for task in ("cola", "mnli", "rte", "stsb", "mrpc"):
        write_task(folder, task, rng)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory, toy_texts: list[str]):
    """A model of the paper's layout and a modern one."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        common = {"budget": 10_000, "budget_unit": "tokens", "batch_size": 8, "learning_rate": 5e-3}
        yield {
            name: pretrain.fn(Pretrain(architecture=architecture, **common), tokens)
            for name, architecture in (("papers", PAPERS), ("modern", MODERN))
        }


def one(data: Path, task: str, **changes) -> FinetuneRun:
    return FinetuneRun(data=str(data), task=task, **QUICK | changes)


class Handed(Exception):
    """Raised where training would begin, with the arguments that it is given."""


def handed(monkeypatch: pytest.MonkeyPatch, run: FinetuneRun, start: Artifact) -> dict:
    """What this run gives to training, by name of the argument."""
    signature = inspect.signature(finetuning.finetune)

    def hand(*given, **named):
        raise Handed(signature.bind(*given, **named).arguments)

    # as many epochs as no other test's run has, whose artifact would be taken
    run = run.model_copy(update={"epochs": 4, "keep": False})
    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "finetune", hand)
        with pytest.raises(Handed) as end:
            finetune.fn(run, start)
    return end.value.args[0]


@pytest.fixture(scope="module")
def cola(models, data: Path):
    longer = {"epochs": 5, "learning_rate": 3e-3, "batch_size": 4}  # so that it learns what there is to be learned
    return finetune.fn(one(data, "cola", **longer), models["papers"])


def test_predictions_have_the_texts_and_agree_with_the_scores(cola, data: Path):
    table = pq.read_table(cola.path / "predictions.parquet")
    assert table.column_names == ["split", "row", "sentence", "label", "prediction", "scores"]
    given = pq.read_table(data / "cola" / "validation.parquet")
    assert table["sentence"].to_pylist() == given["sentence"].to_pylist()
    assert table["label"].to_pylist() == given["label"].to_pylist()
    scores = np.array(table["scores"].to_pylist())
    assert (scores.argmax(axis=1) == table["prediction"].to_numpy()).all()
    found = cola.stats["validation"]["validation"]["metrics"]["matthews"]
    assert found == pytest.approx(
        metrics.score("matthews", given["label"].to_numpy(), table["prediction"].to_numpy()), abs=0.01
    )
    assert found > 50  # the word tells it
    assert json.loads((cola.path / "scores.json").read_text()) == cola.stats["validation"]


def test_a_kept_model_gives_the_predictions_again_from_its_folder_alone(cola, data: Path, tmp_path: Path):
    copy = shutil.copytree(cola.path, tmp_path / "copy")
    classifier, tokenizer = export.load_classifier(copy).eval(), load_tokenizer(copy)
    table = pq.read_table(copy / "predictions.parquet")
    ids, _ = encode(table.select(["sentence", "label"]), tokenizer, 32)
    expected = np.array(table["scores"].to_pylist())
    with torch.no_grad():
        scores = np.concatenate([classifier(torch.tensor([row])).float().numpy() for row in ids])
    np.testing.assert_allclose(scores, expected, atol=1e-4)
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in copy.iterdir()}


def test_statistics_tell_what_was_trained_on_and_how(cola):
    here = machine.detect()
    assert cola.stats["machine"] == {
        "device": here.describe()["device"],
        "dtype": here.describe()["dtype"],
        "compiled": False,
    }
    stats = cola.stats
    assert (stats["task"], stats["seed"], stats["protocol"], stats["pretrained"], stats["share"]) == (
        "cola",
        0,
        "cramming",
        True,
        1.0,
    )
    assert (stats["train_examples"], stats["official_train_examples"]) == (160, 8551)
    assert stats["steps"] == 5 * (160 // 4)
    assert len(stats["epochs"]) == stats["chosen_epoch"] == 5
    assert stats["examples_per_second"] > 0
    assert stats["data"]["cut"] == {"train": 0, "validation": 0}
    lineage = json.loads((cola.path / "lineage.json").read_text())
    assert [about["stage"] for about in lineage.values()][-1] == "pretrain"
    assert cola.manifest["inputs"] == {"start": next(reversed(lineage))}


def test_transformers_loads_a_kept_model_of_the_modern_protocol_and_gives_its_scores(models, data: Path):
    transformers = pytest.importorskip("transformers")
    kept = finetune.fn(one(data, "cola", protocol="modern", head="native", choose="best"), models["modern"])
    assert kept.stats["head"] == "native"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(kept.path).eval()
    assert theirs.config.id2label == {0: "unacceptable", 1: "acceptable"}
    table = pq.read_table(kept.path / "predictions.parquet")
    tokenizer = transformers.AutoTokenizer.from_pretrained(kept.path)
    with torch.no_grad():
        scores = theirs(**tokenizer(table["sentence"].to_pylist(), return_tensors="pt", padding=True)).logits
    np.testing.assert_allclose(scores.numpy(), np.array(table["scores"].to_pylist()), atol=1e-4)


def test_a_layout_that_transformers_lacks_has_the_papers_head_where_its_own_is_asked_for(models, data: Path):
    assert finetune.fn(one(data, "rte", protocol="modern", head="native"), models["papers"]).stats["head"] == "tanh"


def test_a_run_that_starts_from_mnli_begins_with_its_encoder(models, data: Path):
    modern = {"protocol": "modern", "head": "native"}
    mnli = finetune.fn(one(data, "mnli", **modern), models["modern"])
    assert set(mnli.stats["validation"]) == {"validation_matched", "validation_mismatched"}
    still = {"learning_rate": 1e-12, "epochs": 1}  # so that the encoder stays what it was
    rte = finetune.fn(one(data, "rte", start="mnli", **modern | still), mnli)
    for name, value in export.load(mnli.path).state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(export.load(rte.path).state_dict()[name], value, atol=1e-6, rtol=0)
    stages = [about["stage"] for about in json.loads((rte.path / "lineage.json").read_text()).values()]
    assert stages[-2:] == ["pretrain", "finetune"]
    assert rte.manifest["inputs"]["start"] == mnli.name


def test_a_model_that_is_not_kept_leaves_no_weights(models, data: Path):
    made = finetune.fn(one(data, "rte", keep=False), models["papers"])
    assert {path.name for path in made.path.iterdir()} == {
        "predictions.parquet", "scores.json", "lineage.json", "stage.json", "stats.json",
    }  # fmt: skip


def test_without_pretraining_the_weights_are_those_of_the_seed(models, data: Path, monkeypatch):
    start = models["papers"]
    pretrained = export.load(start.path)
    found = {}
    for seed in (0, 1):
        encoder = handed(monkeypatch, one(data, "rte", pretrained=False, seed=seed), start)["classifier"].bert
        encoder.restore_tokens()
        found[seed] = dict(encoder.named_parameters())
        fresh = bert.Bert(pretrained.architecture, pretrained.vocabulary, pretrained.length, seed=seed)
        for name, value in fresh.named_parameters():
            assert torch.equal(found[seed][name], value), name
    for name, value in pretrained.named_parameters():
        if value.ndim > 1:
            assert not torch.equal(found[0][name], found[1][name]), name
            assert not torch.equal(found[0][name], value), name


def test_the_head_is_that_of_the_seed_on_the_pretrained_encoder(models, data: Path, monkeypatch):
    first, again, other = (
        handed(monkeypatch, one(data, "rte", seed=seed), models["papers"])["classifier"] for seed in (0, 0, 1)
    )
    for name, value in first.named_parameters():
        drawn = not name.startswith("bert.") and value.ndim > 1
        assert torch.equal(value, again.get_parameter(name)), name
        assert torch.equal(value, other.get_parameter(name)) != drawn, name
    first.bert.restore_tokens()
    for name, value in export.load(models["papers"].path).named_parameters():
        assert torch.equal(first.bert.get_parameter(name), value), name


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
    overlap = len(set(first) & set(other))
    assert overlap < 25, "of two draws that know nothing of each other 10, with a deviation of 2.4"
    for rows in (first, other):
        assert 10 < sum(row >= 80 for row in rows) < 30, "from all of the data"
    stats = finetune.fn(one(data, "rte", share=0.25), models["papers"]).stats
    assert (stats["steps"], stats["train_examples"]) == (2 * (40 // 16), 160)


@pytest.mark.parametrize("task", ["cola", "stsb", "mrpc"])
def test_an_early_choice_is_by_the_tasks_first_metric(models, data: Path, monkeypatch, task: str):
    score = handed(monkeypatch, one(data, task, choose="best"), models["papers"])["score"]
    labels, predictions = np.array([1, 1, 1, 1, 0, 0]), np.array([1, 1, 1, 0, 0, 1])
    if task == "stsb":
        labels, predictions = np.array([0.0, 1.0, 2.0, 5.0]), np.array([0.5, 1.0, 4.0, 4.5])
    expected = {
        "cola": (3 * 1 - 1 * 1) / (4 * 2 * 4 * 2) ** 0.5,  # Matthews; the accuracy is 2 / 3
        "mrpc": 2 * 3 / (2 * 3 + 1 + 1),  # F1
        "stsb": np.corrcoef(labels, predictions)[0, 1],  # Pearson; Spearman's is 1
    }
    assert score(labels, predictions) == pytest.approx(100 * expected[task])


def test_the_baseline_is_that_of_the_data_that_is_scored(models, data: Path, tmp_path: Path):
    folder = tmp_path / "glue" / "rte"
    folder.mkdir(parents=True)
    for split, counts in (("train", (48, 32)), ("validation", (5, 15))):
        table = pq.read_table(data / "rte" / f"{split}.parquet")
        rows = [np.flatnonzero(table["label"].to_numpy() == kind)[:count] for kind, count in enumerate(counts)]
        assert tuple(map(len, rows)) == counts
        pq.write_table(table.take(np.concatenate(rows)), folder / f"{split}.parquet")
    stats = finetune.fn(one(folder.parent, "rte", keep=False), models["papers"]).stats
    assert stats["validation"]["validation"]["majority"] == {"accuracy": 75.0}  # 15 of 20


def test_test_data_is_predicted_without_labels_if_asked_for(models, data: Path):
    made = finetune.fn(one(data, "stsb", test=True), models["papers"])
    table = pq.read_table(made.path / "predictions.parquet")
    assert table["split"].to_pylist() == ["validation"] * 60 + ["test"] * 20
    assert table["label"].to_pylist()[60:] == [None] * 20
    assert set(made.stats["validation"]) == {"validation"}
    assert set(made.stats["validation"]["validation"]["metrics"]) == {"pearson", "spearman"}


def test_inputs_that_are_cut_are_counted(models, data: Path):
    assert (
        finetune.fn(one(data, "rte", max_tokens=8, keep=False), models["papers"]).stats["data"]["cut"]["train"] == 160
    )


def test_longer_inputs_than_the_model_takes_are_told(models, data: Path):
    with pytest.raises(
        InputError, match=r"finetune\.max_tokens is 33, but the model takes 32 tokens at most\. Lower it\."
    ):
        finetune.fn(one(data, "cola", max_tokens=33), models["papers"])


def test_scores_that_are_no_numbers_are_told(models, data: Path, monkeypatch):
    monkeypatch.setattr(finetuning, "predict", lambda _, examples, __: np.full((len(examples), 2), np.nan))
    with pytest.raises(InputError, match="cola-8: the finetuned model gives scores that are no numbers"):
        finetune.fn(one(data, "cola", seed=8), models["papers"])


@pytest.mark.parametrize("problem", [MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_is_a_sentence(models, data: Path, monkeypatch, problem: type):
    def full(*_):
        raise problem

    monkeypatch.setattr(finetuning, "finetune", full)
    with pytest.raises(InputError, match="The memory is too small for cola-9"):
        finetune.fn(one(data, "cola", seed=9), models["papers"])


def test_the_memory_of_a_run_follows_from_its_batch_and_the_model_it_starts_from(models, data: Path):
    here = machine.detect()
    run, start = one(data, "cola", batch_size=16), models["papers"]
    weights = (start.path / "model.safetensors").stat().st_size
    twice = run.model_copy(update={"batch_size": 32}).memory(start, here) - run.memory(start, here)
    assert run.memory(start, here) == finetunes.BYTES_A_RUN + 4 * weights + twice
    assert twice > 16 * run.max_tokens * 32, "more than a byte for each of a layer's values"
    assert run.memory(Artifact(stage="finetune", key="0" * 12), here) == finetunes.BYTES_A_RUN, (
        "a model that is not made yet"
    )


def test_a_model_of_an_earlier_version_is_refused_with_a_sentence(models, data: Path):
    start = Artifact(stage="pretrain", key="00000000000f")
    shutil.copytree(models["papers"].path, start.path)
    config = json.loads((start.path / "config.json").read_text())
    del config["cram"]
    (start.path / "config.json").write_text(json.dumps(config))
    about = json.loads((start.path / "stage.json").read_text())
    [listed] = [file for file in about["files"] if file["path"] == "config.json"]
    listed |= {"bytes": (start.path / "config.json").stat().st_size, "sha256": digest(start.path / "config.json")}
    (start.path / "stage.json").write_text(json.dumps(about))
    with pytest.raises(
        InputError, match=r"pretrain/00000000000f was made by an earlier version.*Run its pretrain stage again"
    ):
        finetune.fn(one(data, "cola"), start)


def test_what_is_wrong_with_the_data_is_known_beforehand_and_what_is_odd_is_warned_of(data: Path, caplog, tmp_path):
    copy = shutil.copytree(data / "rte", tmp_path / "glue" / "rte").parent
    train, validation = (copy / "rte" / f"{split}.parquet" for split in ("train", "validation"))
    pq.write_table(pa.concat_tables([pq.read_table(train), pq.read_table(validation).slice(0, 3)]), train)
    for seed in range(2):
        one(copy, "rte", seed=seed).check()
    (said,) = [record.message for record in caplog.records if "stand in validation" in record.message]
    assert "rows 161, 162 and 163" in said
    with pytest.raises(
        InputError, match=r"rte: The task has 2 training examples, .*share of 0\.01 \(finetune\.shares\)"
    ):
        one(copy, "rte", share=0.01).check()


def test_the_key_follows_the_content_of_the_data_not_its_place(data: Path, tmp_path: Path):
    copy = shutil.copytree(data / "cola", tmp_path / "other" / "cola").parent
    assert one(copy, "cola").identity() == one(data, "cola").identity()
    table = pq.read_table(copy / "cola" / "train.parquet")
    pq.write_table(table.slice(1), copy / "cola" / "train.parquet")
    assert one(copy, "cola").identity() != one(data, "cola").identity()


def test_a_file_that_changes_between_two_runs_is_read_again(models, data: Path, tmp_path: Path):
    copy = shutil.copytree(data / "rte", tmp_path / "other" / "rte").parent
    finetune.fn(one(copy, "rte", keep=False), models["papers"])
    path = copy / "rte" / "train.parquet"
    pq.write_table(pq.read_table(path).slice(32), path)
    assert finetune.fn(one(copy, "rte", keep=False), models["papers"]).stats["train_examples"] == 128


def test_seeds_share_the_encoded_inputs(models, data: Path, monkeypatch):
    encoded = []
    monkeypatch.setattr("tasks.finetune.encode", lambda table, *rest: encoded.append(1) or encode(table, *rest))
    for seed in range(3):
        finetune.fn(one(data, "stsb", seed=seed + 10, keep=False, max_tokens=31), models["papers"])
    assert len(encoded) == 2  # train and validation, once


def test_of_seeds_that_begin_together_one_encodes_the_inputs(models, data: Path, monkeypatch):
    encoded, here, both = [], set(), threading.Event()

    def arrive() -> None:
        here.add(threading.get_ident())
        if len(here) == 2:
            both.set()

    class Watched:
        """The lock, and who comes to it."""

        def __enter__(self) -> None:
            arrive()
            encoding.acquire()

        def __exit__(self, *_) -> None:
            encoding.release()

    def encode_beside_another(table: pa.Table, *rest):
        encoded.append(table.num_rows)
        arrive()
        assert both.wait(60)  # the other seed is at the lock, or has passed by it
        return encode(table, *rest)

    monkeypatch.setattr("tasks.finetune.encoding", Watched())
    monkeypatch.setattr("tasks.finetune.encode", encode_beside_another)
    runs = [one(data, "rte", seed=seed, keep=False, max_tokens=30) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(finetune.fn, runs, [models["papers"]] * 2))
    assert len({each.key for each in made}) == 2
    assert encoded == [160, 60]


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 1}, {"batch_size": 8}, {"learning_rate": 1e-3}, {"schedule": "linear"}, {"warmup": 0.5},
        {"weight_decay": 0.9}, {"dropout": 0.5}, {"max_tokens": 8}, {"head": "native"}, {"choose": "best"},
        {"batches": "random"}, {"seed": 1}, {"pretrained": False}, {"share": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_no_setting_is_ignored(models, data: Path, change: dict):
    base = finetune.fn(one(data, "cola", keep=False), models["modern"])
    changed = finetune.fn(one(data, "cola", keep=False, **change), models["modern"])
    first, second = (pq.read_table(run.path / "predictions.parquet")["scores"].to_pylist() for run in (base, changed))
    assert first != second


def test_every_setting_of_finetuning_is_among_those_tested():
    tested = {"epochs", "batch_size", "learning_rate", "schedule", "warmup", "weight_decay", "dropout", "max_tokens", "head",
              "choose", "batches"}  # fmt: skip
    from model.settings import Finetuning

    assert set(Finetuning.model_fields) == tested


def test_the_machine_is_asked_in_the_process_that_trains(models, data: Path, monkeypatch):
    monkeypatch.setattr(machine, "detect", lambda: (_ for _ in ()).throw(InputError("no such device")))
    with pytest.raises(InputError, match="no such device"):
        finetune.fn(one(data, "cola", seed=7), models["papers"])
