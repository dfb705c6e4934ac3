"""GLUE: data, metrics, runs and what bad data gets."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import document
from pydantic import ValidationError
from scipy import stats

from model import InputError
from tasks import glue, probes
from tasks.glue import TASKS, Finetune, FinetuneRun, encode, local_splits, majority, read_split, score


def write(folder: Path, task: str, split: str, **columns: list) -> Path:
    """A split in the hub's layout."""
    path = folder / task / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def cola(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        write(tmp_path, "cola", split, sentence=[f"sentence {i}" for i in range(40)], label=[i % 2 for i in range(40)])
    return tmp_path


def test_metrics_equal_independent_ones_on_random_predictions():
    random = np.random.default_rng(3)
    for _ in range(20):
        labels, predicted = random.integers(0, 2, (2, 50))
        tp, tn = ((labels == 1) & (predicted == 1)).sum(), ((labels == 0) & (predicted == 0)).sum()
        fp, fn = ((labels == 0) & (predicted == 1)).sum(), ((labels == 1) & (predicted == 0)).sum()
        assert score("accuracy", labels, predicted) == pytest.approx(100 * (tp + tn) / 50)
        assert score("f1", labels, predicted) == pytest.approx(100 * 2 * tp / (2 * tp + fp + fn))
        root = np.sqrt(float((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)))
        assert score("matthews", labels, predicted) == pytest.approx(100 * (tp * tn - fp * fn) / root)
        wanted, given = random.random((2, 30))
        assert score("pearson", wanted, given) == pytest.approx(100 * np.corrcoef(wanted, given)[0, 1])
        ranks = np.corrcoef(stats.rankdata(wanted), stats.rankdata(given))[0, 1]
        assert score("spearman", wanted, given) == pytest.approx(100 * ranks)


@pytest.mark.parametrize("metric", ["matthews", "pearson", "spearman", "f1"])
def test_a_constant_prediction_scores_zero_without_a_warning(metric: str):
    assert score(metric, np.array([0, 1, 1, 0]), np.zeros(4, dtype=int)) == 0


def test_the_majority_baseline_knows_the_training_labels_only():
    train = np.array([1, 1, 1, 0])
    assert (majority(np.array([0, 0]), train, TASKS["cola"]) == 1).all()
    assert majority(np.array([5.0]), np.array([1.0, 2.0]), TASKS["stsb"])[0] == 1.5


def test_columns_and_sizes_cover_all_of_glue():
    assert set(glue.GLUE) == {"cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"}
    assert sum(len(TASKS[name].validation) for name in glue.GLUE) == 9
    assert [n for n, t in TASKS.items() if t.classes == 1] == ["stsb"]
    assert TASKS["mnli"].classes == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"label": None}, ["lacks the column label", "sentence"]),
        ({"sentence": None, "text": ["a"] * 3}, ["lacks the column sentence", "text"]),
        ({"label": [0, 1, -1]}, ["row 2", "-1", "unlabelled"]),
        ({"label": [0, 2, 1]}, ["row 1", "is 2", "0, 1"]),
        ({"label": ["0", "1", "0"]}, ["labels are string"]),
        ({"sentence": ["a", None, "c"]}, ["sentence", "row 1"]),
        ({"sentence": [1, 2, 3]}, ["sentence", "int64", "text"]),
        ({"sentence": pa.array([], pa.string()), "label": pa.array([], pa.int64())}, ["no rows"]),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_by_name(tmp_path: Path, change: dict, words: list[str]):
    columns = {"sentence": ["a", "b", "c"], "label": [0, 1, 0]} | change
    path = write(tmp_path, "cola", "train", **{k: v for k, v in columns.items() if v is not None})
    with pytest.raises(InputError) as refused:
        read_split([path], "cola")
    for word in ("cola/train.parquet", *words):
        assert word in str(refused.value)


def test_junk_in_place_of_parquet_is_refused(cola: Path):
    (cola / "cola" / "train.parquet").write_text("not parquet")
    with pytest.raises(InputError, match=r"cola/train.parquet is no Parquet file"):
        read_split([cola / "cola" / "train.parquet"], "cola")


def test_a_missing_task_is_told_with_those_there_are(cola: Path):
    with pytest.raises(InputError, match=r"no rte/train\.parquet or rte/train-\*\.parquet \(folders there: cola\)"):
        FinetuneRun(data=str(cola), task="rte").check()
    with pytest.raises(InputError, match="no mnli"):
        FinetuneRun(data=str(cola / "nowhere"), task="mnli").identity()


def test_splits_of_the_hubs_file_names_are_found(cola: Path):
    shards = [cola / "cola" / f"train-0000{i}-of-00002.parquet" for i in range(2)]
    (cola / "cola" / "train.parquet").rename(shards[0])
    pq.write_table(pq.read_table(shards[0]), shards[1])
    found = local_splits(cola, "cola")
    assert found["train"] == shards
    assert read_split(found["train"], "cola").num_rows == 80


def test_the_key_follows_the_content_of_the_data_not_its_place(cola: Path, tmp_path_factory):
    before = FinetuneRun(data=str(cola), task="cola").identity()
    moved = tmp_path_factory.mktemp("elsewhere") / "glue"
    (cola / "cola").rename(moved.parent / "cola")
    assert FinetuneRun(data=str(moved.parent), task="cola").identity() == before
    write(moved.parent, "cola", "train", sentence=["changed"], label=[1])
    assert FinetuneRun(data=str(moved.parent), task="cola").identity() != before


def test_tasks_that_the_data_cannot_have_are_refused_at_once():
    with pytest.raises(ValidationError, match="'probes' has no task 'cola'"):
        Finetune(data="probes", tasks=["cola"])
    with pytest.raises(ValidationError, match="'nyu-mll/glue' has no task 'word-order'"):
        Finetune(tasks=["word-order"])


def test_inputs_are_as_bert_has_them(store: Path, toy_texts: list[str]):
    from tasks import vocabulary

    tokenizer = vocabulary.train(vocabulary.counted(toy_texts), 400)
    pair = pa.table({"sentence1": ["the river"], "sentence2": ["a grey cat"], "label": [0]})
    ids = encode(pair, tokenizer, 128)[0]
    a, b = (tokenizer.encode(t, add_special_tokens=False).ids for t in ("the river", "a grey cat"))
    assert ids == [vocabulary.CLS, *a, vocabulary.SEP, *b, vocabulary.SEP]
    long = pa.table({"sentence1": ["the river " * 99], "sentence2": ["a grey cat"], "label": [0]})
    cut = encode(long, tokenizer, 32)[0]
    assert len(cut) == 32
    assert cut[-len(b) - 1 :] == [*b, vocabulary.SEP], "the longer text is cut, not the shorter"


@pytest.fixture(scope="session")
def heldout_folder(tmp_path_factory) -> Path:
    """What probes read of a pretrained artifact: its held-out documents."""
    import random

    rng, folder = random.Random(5), tmp_path_factory.mktemp("pretrain") / "pretrain" / ("a" * 12)
    folder.mkdir(parents=True)
    texts = [document(rng, 12) for _ in range(120)]
    pq.write_table(pa.table({"text": texts}), folder / "heldout.parquet")
    return folder


def make_probe(task: str, folder: Path, monkeypatch) -> dict:
    from tasks import stage

    monkeypatch.setattr(stage, "ROOT", folder.parents[1])
    return probes.make(task, stage.Artifact(stage="pretrain", key=folder.name))


@pytest.mark.parametrize("task", list(probes.COLUMNS))
def test_probes_are_balanced_repeatable_and_split_by_document(task: str, heldout_folder: Path, monkeypatch):
    found = make_probe(task, heldout_folder, monkeypatch)
    assert found == make_probe(task, heldout_folder, monkeypatch)
    for split, table in found.items():
        assert table.column_names == [*probes.COLUMNS[task], "label"]
        assert 0.35 < np.mean(table["label"].to_numpy()) < 0.65, split
    openings = [
        {s for s in t[t.column_names[0]].to_pylist() if s.startswith("This text is about")} for t in found.values()
    ]
    assert not openings[0] & openings[1], "a document's own opening sentence stands in one split only"


def test_intact_examples_stood_in_the_documents_and_the_others_did_not(heldout_folder: Path, monkeypatch):
    text = " ".join(pq.read_table(heldout_folder / "heldout.parquet")["text"].to_pylist())
    for task in ("word-order", "odd-word"):
        table = make_probe(task, heldout_folder, monkeypatch)["train"]
        rows = list(zip(table["sentence"].to_pylist(), table["label"].to_pylist(), strict=True))
        assert all(sentence in text for sentence, label in rows if label == 1)
        assert np.mean([sentence in text for sentence, label in rows if label == 0]) < 0.2
    table = make_probe("neighbours", heldout_folder, monkeypatch)["train"]
    for first, second, label in zip(*(table[c].to_pylist() for c in table.column_names), strict=True):
        assert not label or f"{first} {second}" in text


def test_too_few_heldout_sentences_are_told(tmp_path: Path, monkeypatch):
    folder = tmp_path / "pretrain" / ("b" * 12)
    folder.mkdir(parents=True)
    pq.write_table(
        pa.table({"text": ["Only one sentence stands here, and it is this one."]}), folder / "heldout.parquet"
    )
    with pytest.raises(InputError, match=r"heldout_fraction"):
        make_probe("neighbours", folder, monkeypatch)


def test_real_glue_data_reads_with_its_official_sizes(real_data: Path):
    manifest = json.loads((real_data / "glue" / "MANIFEST.json").read_text())
    assert manifest
    for task in ("cola", "sst2", "mrpc", "stsb", "rte", "wnli"):
        for split, files in local_splits(real_data / "glue", task).items():
            official = TASKS[task].train if split == "train" else TASKS[task].validation[split]
            assert read_split(files, task).num_rows == official, (task, split)


FROM_HUB = """
import json
import os
import subprocess
import sys
import threading
from tasks.glue import FinetuneRun, find_splits, read_split
run = FinetuneRun(data="nyu-mll/glue", task="mnli")
run.check()
found = {split: read_split(paths, "mnli").to_pydict() for split, paths in find_splits(run.data, run.task).items()}
print(json.dumps(found))
"""


def test_glue_comes_from_the_hub_at_its_pinned_revision(tmp_path: Path):
    from test_hub import Hub, address_of

    rows = {
        split: {"premise": [f"{split} says so"] * 3, "hypothesis": ["so"] * 3, "label": [0, 1, 2]}
        for split in ("train", "validation_matched", "validation_mismatched")
    }
    files = {"README.md": b"#", "mnli_matched/validation-00000-of-00001.parquet": b"not this one"}
    for split, columns in rows.items():
        path = write(tmp_path, "mnli", split, **columns, idx=[0, 1, 2])
        files[f"mnli/{split}-00000-of-00001.parquet"] = path.read_bytes()
    server = Hub({(glue.HUB_GLUE.repository, glue.HUB_GLUE.revision): files})
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env |= {"HF_ENDPOINT": address_of(server), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", FROM_HUB]
    home = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=60)
    server.shutdown()
    thread.join()
    server.server_close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == rows
