"""The finetune stage: which runs the parameters ask for, and what one of them writes."""

import inspect
import json
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import store_of_its_own, toy_tokens
from pydantic import ValidationError

from flows.recipes import resolve
from model import InputError, bert, export, finetuning, machine
from model.settings import Finetuning
from tasks.finetune import Finetune, FinetuneRun, encode, encoding, finetune
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


def runs(**changes) -> list[tuple[FinetuneRun, int | None]]:
    return Finetune(**changes).runs()


def test_the_papers_protocol_is_one_setting_for_eight_tasks_and_five_seeds():
    made = runs()
    assert Counter(run.task for run, _ in made) == dict.fromkeys(GLUE, 5)
    assert {start for _, start in made} == {None}
    assert {run.seed for run, _ in made if run.keep} == {0}
    (setting,) = {run.model_copy(update={"task": "cola", "seed": 0, "keep": True}).model_dump_json() for run, _ in made}
    paper = {
        "epochs": 5, "batch_size": 16, "learning_rate": 4e-5, "schedule": "cosine", "warmup": 0.1, "weight_decay": 0.0,
        "dropout": 0.1, "max_tokens": 128, "head": "tanh", "choose": "last", "protocol": "cramming",
    }  # fmt: skip
    assert paper.items() <= json.loads(setting).items()


# of MosaicBERT's released code: epochs, batch, rate, decay times rate, seeds
MOSAIC = {
    "mnli": (3, 48, 5e-5, 5e-6, 1), "sst2": (3, 16, 3e-5, 3e-6, 3), "stsb": (10, 32, 3e-5, 3e-6, 5),
    "rte": (3, 16, 1e-5, 1e-5, 5), "qnli": (10, 16, 1e-5, 1e-6, 1), "qqp": (5, 16, 3e-5, 3e-6, 1),
    "mrpc": (10, 32, 8e-5, 8e-6, 5), "cola": (10, 32, 5e-5, 5e-6, 4),
}  # fmt: skip


def test_the_modern_protocol_is_mosaicberts_and_starts_three_tasks_from_seed_0_of_mnli():
    made = runs(protocols=["modern"])
    for run, start in made:
        setting = (run.protocol, run.schedule, run.warmup, run.choose, run.head)
        assert setting == ("modern", "linear", 0.06, "best", "native")
        if run.task in ("rte", "mrpc", "stsb"):
            first = made[start][0]
            assert (run.start, first.task, first.seed, first.protocol, first.keep) == (
                "mnli",
                "mnli",
                0,
                "modern",
                True,
            )
        else:
            assert (run.start, start) == ("pretrained", None)
        epochs, batch, rate, decay, _ = MOSAIC[run.task]
        assert (run.epochs, run.batch_size, run.learning_rate) == (epochs, batch, rate)
        assert run.weight_decay * run.learning_rate == pytest.approx(decay)
    assert Counter(run.task for run, _ in made) == {task: row[-1] for task, row in MOSAIC.items()}


def test_mnli_is_trained_and_kept_for_tasks_that_start_from_it_and_indices_count_both_protocols():
    made = runs(protocols=["modern"], tasks=["rte"], keep="none")
    assert [(run.task, run.keep, start) for run, start in made] == [("mnli", True, None), *[("rte", False, 0)] * 5]
    assert {run.task for run, _ in runs(protocols=["modern"], tasks=["cola"])} == {"cola"}
    both = runs(protocols=["cramming", "modern"], tasks=["mnli", "rte"], seeds=2)
    assert [run.protocol for run, _ in both] == ["cramming"] * 4 + ["modern"] * 6
    (start,) = {start for run, start in both if run.start == "mnli"}
    assert (both[start][0].task, both[start][0].protocol) == ("mnli", "modern")


def test_a_learning_curve_and_a_baseline_are_more_runs_of_the_papers_protocol():
    both = ["cramming", "modern"]
    made = [run for run, _ in runs(tasks=["cola"], seeds=2, shares=[0.1, 1.0], baseline=True, protocols=both)]
    paper = [(run.share, run.pretrained, run.seed, run.keep) for run in made if run.protocol == "cramming"]
    assert paper == [(1.0, True, 0, True), (1.0, True, 1, False), (0.1, True, 0, False), (0.1, True, 1, False),
                     (1.0, False, 0, False), (1.0, False, 1, False)]  # fmt: skip
    assert all(run.pretrained and run.share == 1.0 for run in made if run.protocol == "modern")
    assert len({run.label() for run in made}) == len(made)
    assert made[2].label() == "cola-0-10%"


def test_one_cell_of_the_modern_protocol_can_be_changed_and_the_others_stay():
    def made(modern: dict) -> Counter[str]:
        asked = {"data": "/glue", "tasks": list(GLUE), "protocols": ["modern"], "modern": modern}
        return Counter(run.model_dump_json() for run, _ in resolve("demo", {"finetune": asked}).finetune.runs())

    usual, changed = made({}), made({"cola": {"learning_rate": 1e-3}, "rte": {"seeds": 2}})
    new = [json.loads(run) for run in changed - usual]
    assert {(run["task"], run["learning_rate"], run["epochs"]) for run in new} == {("cola", 1e-3, 10)}
    assert Counter(json.loads(run)["task"] for run in usual - changed) == {"cola": 4, "rte": 3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colla": {"epochs": 3}}, ["modern.colla", "mean cola"]),
        ({"cola": {"learning_rat": 1}}, ["modern.cola.learning_rat", "mean learning_rate"]),
        ({"cola": {"epochs": 0}}, ["modern.cola.epochs", "found 0"]),
        ({"cola": {"start": "rte"}}, ["modern.cola.start", "'rte'"]),
        ({"mnli": {"start": "mnli"}}, ["mnli.start"]),
    ],
)
def test_an_unknown_task_or_setting_of_the_modern_protocol_is_refused_by_name(changes: dict, words: list[str]):
    with pytest.raises(InputError) as refused:
        resolve("crammed-bert", {"finetune": {"protocols": ["modern"], "modern": changes}})
    assert not [word for word in words if word not in str(refused.value)], refused.value


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"epochs": 6}, "epochs is 6"),
        ({"protocols": ["modern"], "tasks": ["wnli"]}, "'wnli'"),
        ({"shares": [0.5]}, "shares"),
        ({"shares": [0.0, 1.0]}, "shares"),
        ({"data": "probes", "tasks": ["word-order"], "test": True}, "test"),
        ({"data": "probes"}, "'mnli'"),
        ({"tasks": ["word-order"]}, "'word-order'"),
        ({"protocols": []}, "protocols"),
        ({"cola": {"epochs": 3}}, "cola"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(asked: dict, words: str):
    with pytest.raises(ValidationError, match=words):
        Finetune(**asked)


# What a run writes


WORDS = ("river", "clock", "letter", "bridge", "train", "map")


def write_task(folder: Path, task: str, rng: np.random.Generator) -> None:
    """A task whose label is the number of a word; in regression tasks too."""
    about, kinds = TASKS[task], TASKS[task].classes if TASKS[task].classes > 1 else len(WORDS)
    (folder / task).mkdir(parents=True)
    sizes = {"train": 160, **dict.fromkeys(about.validation, 60), **dict.fromkeys(about.test, 20)}
    for split, count in sizes.items():
        labels = rng.integers(0, kinds, count)
        labels[: len(WORDS)] = np.arange(len(WORDS)) % kinds  # each of them
        texts = [f"{(WORDS[k] + ' ') * 4}{n}." for n, k in zip(rng.integers(0, 1_000_000, count), labels, strict=True)]
        labels = np.full(count, -1) if split in about.test else labels * (1 if about.labels else 1.0)
        table = pa.table(dict.fromkeys(about.columns, texts) | {"label": labels})
        pq.write_table(table, folder / task / f"{split}.parquet")


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
    table, given = pq.read_table(cola.path / "predictions.parquet"), pq.read_table(data / "cola" / "validation.parquet")
    assert table.column_names == ["split", "row", "sentence", "label", "prediction", "scores"]
    assert table.select(["sentence", "label"]).to_pydict() == given.to_pydict()
    predicted = np.array(table["scores"].to_pylist()).argmax(axis=1)
    assert predicted.tolist() == table["prediction"].to_pylist()
    score = cola.stats["validation"]["validation"]["metrics"]["matthews"]
    assert score == pytest.approx(metrics.score("matthews", given["label"].to_numpy(), predicted), abs=0.01)
    assert score > 50, "the word gives the label away"
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


def test_statistics_say_what_was_trained_on_and_how(cola):
    stats, here = cola.stats, machine.detect().describe()
    assert stats["machine"] == {"device": here["device"], "dtype": here["dtype"], "compiled": False}
    expected = {"task": "cola", "seed": 0, "protocol": "cramming", "pretrained": True, "share": 1.0, "chosen_epoch": 5,
                "train_examples": 160, "official_train_examples": 8551, "steps": 5 * (160 // 4)}  # fmt: skip
    assert expected.items() <= stats.items()
    assert len(stats["epochs"]) == 5
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
    files = {path.name for path in finetune.fn(one(data, "rte", keep=False), models["papers"]).path.iterdir()}
    assert files == {"predictions.parquet", "scores.json", "lineage.json", "stage.json", "stats.json"}


def test_weights_and_head_are_those_of_the_seed(models, data: Path, monkeypatch):
    start, made = models["papers"], {}
    pretrained = export.load(start.path)
    for known, seed in ((True, 0), (True, 1), (False, 0), (False, 1)):
        made[known, seed] = handed(monkeypatch, one(data, "rte", pretrained=known, seed=seed), start)["classifier"]
        made[known, seed].bert.restore_tokens()
        fresh = bert.Bert(pretrained.architecture, pretrained.vocabulary, pretrained.length, seed=seed)
        for name, value in (pretrained if known else fresh).named_parameters():
            assert torch.equal(made[known, seed].bert.get_parameter(name), value), name
    again = handed(monkeypatch, one(data, "rte"), start)["classifier"]
    for name, value in made[True, 0].named_parameters():
        if not name.startswith("bert."):
            assert torch.equal(value, again.get_parameter(name)), name
            assert torch.equal(value, made[True, 1].get_parameter(name)) == (value.ndim == 1), name
    for name, value in made[False, 0].bert.named_parameters():
        if value.ndim > 1:
            assert not torch.equal(value, made[False, 1].bert.get_parameter(name)), name
            assert not torch.equal(value, pretrained.get_parameter(name)), name


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
        pq.write_table(table.take(np.concatenate(rows)), folder / f"{split}.parquet")
    validation = finetune.fn(one(folder.parent, "rte", keep=False), models["papers"]).stats["validation"]["validation"]
    assert (validation["majority"], validation["examples"]) == ({"accuracy": 75.0}, 20)  # 15 of 20


def test_test_data_is_predicted_without_labels_if_asked_for(models, data: Path):
    made = finetune.fn(one(data, "stsb", test=True), models["papers"])
    table = pq.read_table(made.path / "predictions.parquet")
    assert table["split"].to_pylist() == ["validation"] * 60 + ["test"] * 20
    assert table["label"].to_pylist()[60:] == [None] * 20
    assert set(made.stats["validation"]) == {"validation"}
    assert set(made.stats["validation"]["validation"]["metrics"]) == {"pearson", "spearman"}


def test_inputs_that_are_cut_are_counted(models, data: Path):
    stats = finetune.fn(one(data, "rte", max_tokens=8, keep=False), models["papers"]).stats
    assert stats["data"]["cut"]["train"] == 160


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
    here = machine.detect()
    run, start = one(data, "cola", batch_size=16), models["papers"]
    weights = (start.path / "model.safetensors").stat().st_size
    twice = run.model_copy(update={"batch_size": 32}).memory(start, here) - run.memory(start, here)
    assert run.memory(start, here) == finetunes.BYTES_A_RUN + 4 * weights + twice
    assert twice > 16 * run.max_tokens * 32, "more than a byte for each of a layer's values"
    assert run.memory(Artifact(stage="finetune", key="0" * 12), here) == finetunes.BYTES_A_RUN, (
        "a model that is not made yet"
    )


def test_a_model_of_an_earlier_version_is_refused(models, data: Path):
    start = Artifact(stage="pretrain", key="00000000000f")
    shutil.copytree(models["papers"].path, start.path)
    file, manifest = start.path / "config.json", start.path / "stage.json"
    config, about = json.loads(file.read_text()), json.loads(manifest.read_text())
    del config["cram"]
    file.write_text(json.dumps(config))
    [listed] = [each for each in about["files"] if each["path"] == file.name]
    listed |= {"bytes": file.stat().st_size, "sha256": digest(file)}
    manifest.write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"pretrain/00000000000f.*earlier version"):
        finetune.fn(one(data, "cola"), start)


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


CHANGES = {
    "epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "schedule": "linear", "warmup": 0.5, "weight_decay": 0.9,
    "dropout": 0.5, "max_tokens": 8, "head": "native", "choose": "best", "batches": "random", "seed": 1, "pretrained": False,
    "share": 0.5,
}  # fmt: skip


@pytest.mark.parametrize("name", [*Finetuning.model_fields, "seed", "pretrained", "share"])
def test_no_setting_is_ignored(models, data: Path, name: str):
    base = finetune.fn(one(data, "cola", keep=False), models["modern"])
    changed = finetune.fn(one(data, "cola", keep=False, **{name: CHANGES[name]}), models["modern"])
    first, second = (pq.read_table(run.path / "predictions.parquet")["scores"].to_pylist() for run in (base, changed))
    assert first != second
