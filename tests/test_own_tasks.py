"""Tasks of one's own, from files to scores: classes from a CSV, a regression from JSON lines, entities from CoNLL."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, store_of_its_own, texts_of, toy_model, toy_tokens
from files_table import files_of, gz
from test_finetune import MODERN, write_task
from test_metrics import by_libraries

from flows.recipes.recipe import resolve
from model.errors import InputError
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.finetune import Finetune, finetune
from tasks.glue import data as files
from tasks.glue import metrics, reading
from tasks.glue.own import Definition
from tasks.glue.table import LABEL, Task, task_of
from tasks.report import Report, report
from tasks.reports.sections import confusion_table
from tasks.store.artifacts import Artifact

WORDS = ("river", "clock", "letter", "bridge", "train", "map")
LABELS = {  # of each word
    "topic": ("refund", "billing", "other things") * 2,
    "price": tuple(range(1000, 1300, 50)),
    "subjects": ("a", "", "a;b", "b", "c", "a;b;c"),
}
PEOPLE = ("Anna Grey", "Otto", "Maria Lind")
PLACES = ("Hull", "New Leeds", "York")
QUICK = {"epochs": 4, "batch_size": 8, "learning_rate": 3e-3, "max_tokens": 32, "seeds": 1, "baseline": False}


def rows_with(labels: list) -> list[dict]:
    return [{"text": f"t {i}", "label": label} for i, label in enumerate(labels)]


def labelled(column: str, rng: np.random.Generator, rows: int = 240) -> list[dict]:
    """Rows whose label a word gives away."""
    given = []
    for i in range(rows):
        k = int(rng.integers(len(WORDS)))
        given.append({"text": f"The {WORDS[k]}, again: the {WORDS[k]} {i}.", column: LABELS[column][k]})
    return given


def write_entities(path: Path, rng: np.random.Generator, sentences: int) -> None:
    """People and places in CoNLL's columns."""
    lines = ["-DOCSTART- -X- O", ""]
    for _ in range(sentences):
        who = PEOPLE[rng.integers(3)]
        where = PLACES[rng.integers(3)]
        for text, kind in ((who, "PER"), ("saw the river near", ""), (where, "LOC"), (".", "")):
            for i, token in enumerate(text.split()):
                lines.append(f"{token} NN {'O' if not kind else ('I-' if i else 'B-') + kind}")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")


def write_rows(path: Path, rows: list[dict]) -> Path:
    """In the format that the name says: CSV, Parquet, or JSON lines."""
    frame = pd.DataFrame(rows)
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path, **changes) -> reading.Data:
    return reading.read(Definition(**{"name": "mine", "data": str(path)} | changes))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    rng = np.random.default_rng(5)
    write_rows(folder / "tickets.csv", labelled("topic", rng))
    write_rows(folder / "prices.jsonl", labelled("price", rng, 300))
    write_rows(folder / "subjects.csv", labelled("subjects", rng, 300))
    (folder / "entities").mkdir()
    for split, sentences in (("train", 200), ("dev", 60), ("test", 40)):
        write_entities(folder / "entities" / f"{split}.conll", rng, sentences)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory, toy_texts: list[str]):
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, toy_texts)["tokens"]
        yield toy_model(tokens, MODERN)


def definitions(place: Path) -> list[Definition]:
    return [
        Definition(name="tickets", data=str(place / "tickets.csv"), label="topic"),
        Definition(name="prices", data=str(place / "prices.jsonl"), label="price", kind="regression", batch_size=16),
        Definition(name="entities", data=str(place / "entities"), kind="tokens"),
        Definition(name="subjects", data=str(place / "subjects.csv"), label="subjects", kind="multilabel", epochs=8),
    ]


@pytest.fixture(scope="module")
def made(place: Path, model) -> dict[str, Artifact]:
    runs = Finetune(tasks=definitions(place), **QUICK, head="native").runs()
    return {run.task: finetune.fn(run, model) for run in runs}


def table_of(made: Artifact, split: str) -> dict[str, list]:
    table = pq.read_table(made.path / "predictions.parquet").to_pydict()
    chosen = [i for i, name in enumerate(table["split"]) if name == split]
    return {name: [values[i] for i in chosen] for name, values in table.items()}


@pytest.mark.parametrize(
    ("name", "split"),
    [*((name, "validation") for name in ("tickets", "prices", "subjects", "entities")), ("entities", "test")],
)
def test_scores_are_those_that_the_libraries_compute_from_the_predictions(made, name: str, split: str):
    table = table_of(made[name], split)
    found = made[name].stats["validation"][split]
    task = task_of(made[name].stats)
    true = table["label"]
    predicted = table["prediction"]
    if name == "prices":
        assert np.abs(np.array(true) - predicted).mean() < 60, "in the labels' units"
    for metric, score in found["metrics"].items():
        given = [true, predicted]
        if name == "subjects":
            given = [[[one in row for one in task.labels] for row in rows] for rows in given]
        elif name == "entities" and metric != "span_f1":
            given = [np.concatenate(rows) for rows in given]
        assert score == pytest.approx(by_libraries(metric, *given), abs=0.01)
        low, high = found["intervals"][metric]
        assert low <= score <= high
        assert score > found["majority"][metric] + 5, "the words give the labels away"


def test_a_report_has_own_tasks_with_their_spread_their_baselines_and_a_card(made):
    import huggingface_hub

    page = report.fn(Report(title="mine"), [made[name] for name in ("tickets", "prices", "entities")], [])
    content = json.loads((page.path / "report.json").read_text())
    text = (page.path / "report.md").read_text()
    assert [row["column"] for row in content["scores"]] == ["tickets", "prices", "entities", "entities, test"]
    assert content["average"] is None
    assert set(content["confusion"]) == {"tickets", "entities"}
    assert "| prices | 4 | 16 | 0.003 |" in text, "its own batch size"
    assert "own.svg" in text
    assert "GLUE" not in text.split("## Rules")[0]
    searched = next(row for row in content["rules"] if row[0] == "no downstream data in the text")
    assert searched[1] == "?", "this corpus was not compared with these tasks"
    results = huggingface_hub.ModelCard.load(page.path / "README.md").data.eval_results
    found = {(one.dataset_name, one.dataset_split, one.metric_type): one.metric_value for one in results}
    on_the_hub = {"span_f1": "seqeval", "pearson": "pearsonr"}
    for row in content["scores"]:
        metric = on_the_hub.get(row["metric"], row["metric"])
        assert found[row["task"], row["split"], metric] == pytest.approx(row["score"], abs=0.01)
    card = huggingface_hub.ModelCard.load(made["entities"].path / "README.md")
    assert card.data.pipeline_tag == "token-classification"
    assert {one.dataset_split for one in card.data.eval_results} == {"validation", "test"}


def test_f1_is_that_of_the_rarer_class_and_the_class_is_named(tmp_path: Path):
    names = ["fraud" if i % 10 == 0 else "ok" for i in range(200)]
    data = read(write_rows(tmp_path / "a.jsonl", rows_with(names)), metric="f1")
    rng = np.random.default_rng(0)
    assert data.task.labels == ("fraud", "ok")
    assert [note for note in data.notes if "fraud" in note and "20 of 200" in note]
    true = np.array([data.task.labels.index(name) for name in names])
    found = np.where(rng.random(200) < 0.8, true, 1 - true)
    about = metrics.score_task(data.task, true, found, true)
    for metric, score in about["metrics"].items():
        assert score == pytest.approx(by_libraries(metric, true == 0, found == 0), abs=0.01)
    assert about["intervals"]["f1"][0] < about["metrics"]["f1"] < about["intervals"]["f1"][1]
    never = metrics.score_task(data.task, true, np.ones(200, int), true)
    assert (never["metrics"]["f1"], "class fraud" in " ".join(never["notes"])) == (0, True)
    assert never["majority"]["f1"] == pytest.approx(100 * 2 * 20 / (200 + 20), abs=0.01), "if all are said to be fraud"
    other = ["ok" if name == "fraud" else "fraud" for name in names]
    assert read(write_rows(tmp_path / "a.jsonl", rows_with(other)), metric="f1").task.positive == 1


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(("start", "scale"), [(1_600_000_000, 1), (0, 1e34)])
def test_numbers_of_any_size_keep_their_digits_and_are_answered_in_their_units(tmp_path: Path, model, start, scale):
    rows = [{"text": f"the {WORDS[i % 6]} {i}", "label": start + scale * (10 * (i % 6) + i % 7)} for i in range(240)]
    own = Definition(name="mine", data=str(write_rows(tmp_path / "a.jsonl", rows)), kind="regression")
    [run] = Finetune(tasks=[own], **QUICK, keep="none").runs()
    made = finetune.fn(run, model)
    table = table_of(made, "validation")
    given = {row["text"]: row["label"] for row in rows}
    assert table["label"] == [given[text] for text in table["text"]]
    assert start - 60 * scale < min(table["prediction"]) < max(table["prediction"]) < start + 120 * scale
    assert len(set(table["prediction"])) > 6, "not in steps of 128, float32's at this size"
    assert made.stats["validation"]["validation"]["metrics"]["pearson"] > 50


def test_rows_that_are_cut_or_without_a_label_are_counted_in_the_report_and_warned_of_once(
    tmp_path: Path, model, caplog
):
    rows = [{"text": "the river " * (30 if i % 2 else 2) + str(i), "label": "ab"[i % 3 % 2]} for i in range(80)]
    rows = [row | {"label": None} if i % 8 == 1 else row for i, row in enumerate(rows)]
    own = Definition(name="mine", data=str(write_rows(tmp_path / "a.jsonl", rows)), validation=0.3)
    runs = Finetune(tasks=[own], **QUICK | {"epochs": 1, "seeds": 2, "max_tokens": 16}, keep="none").runs()
    made = [finetune.fn(run, model) for run in runs]
    stats = made[0].stats
    assert (sum(stats["data"]["cut"].values()), stats["data"]["unlabelled"]) == (30, {"train": 10})
    assert stats["train_examples"] + stats["validation"]["validation"]["examples"] == 70
    logged = [record.message for record in caplog.records if "finetune.max_tokens" in record.message]
    for note, (split, count) in zip(logged, stats["data"]["cut"].items(), strict=True):
        assert f" {count} of " in note
        assert split in note
    page = (report.fn(Report(title="mine"), made, []).path / "report.md").read_text().replace("\\", "")
    assert [page.count(note) for note in logged] == [1, 1]
    assert page.count("10 of 80 rows without a label") == 1


# Reading


def rows_of(seed: int, count: int = 60) -> list[dict]:
    rng = np.random.default_rng(seed)
    return [{"text": f'row {i}, "so" it\'s said', "label": "abc"[rng.integers(3)]} for i in range(count)]


def contents(data: reading.Data) -> dict:
    return {split: table.to_dict("list") for split, table in data.tables.items()}


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "array.json", "a.parquet", "stream.arrow", "a.jsonl.gz"])
def test_the_same_rows_in_any_format_are_the_same_data(tmp_path: Path, name: str):
    stored = files_of(rows_of(1))[name.removesuffix(".gz")].data
    (tmp_path / name).write_bytes(gz(stored) if name.endswith(".gz") else stored)
    expected = contents(read(write_rows(tmp_path / "plain.jsonl", rows_of(1))))
    assert contents(read(tmp_path / name)) == expected
    assert sum(len(table["text"]) for table in expected.values()) == 60


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        (["refund", "Billing", "other"], "refund", ("Billing", "other", "refund")),
        (["10", 9, " 2"], "10", ("2", "9", "10")),
        ([True, False], "true", ("false", "true")),
        ([3.0, 1.0], "3", ("1", "3")),
        (["10", "x", 2], "10", ("10", "2", "x")),
    ],
)
def test_classes_are_in_an_order_that_does_not_follow_the_rows(tmp_path: Path, given, name: str, expected: tuple):
    rows = rows_with(given * 20)
    first = [row["text"] for row in rows[:: len(given)]]
    for order in (rows, rows[::-1]):
        data = read(write_rows(tmp_path / "a.jsonl", order))
        assert data.task.labels == expected
        every = pd.concat(data.tables.values())
        assert set(every[LABEL][every["text"].isin(first)]) == {expected.index(name)}


def test_rows_are_held_out_by_their_text_whatever_their_order_and_no_text_is_on_both_sides(tmp_path: Path):
    rare = [f"rare {i}" for i in range(20)]
    rows = rows_of(2, 400) + rows_of(3, 100) + [{"text": name, "label": name} for name in rare]
    held = []
    for seed in range(3):
        rows = [rows[i] for i in np.random.default_rng(seed).permutation(len(rows))]
        data = read(write_rows(tmp_path / "a.jsonl", rows), validation=0.2)
        train, validation = (set(data.tables[split]["text"]) for split in ("train", "validation"))
        held.append(validation)
        assert not train & validation
        assert train.issuperset(rare), "a class is not held out altogether"
        assert data.shared == {"validation": 0}
    assert held[0] == held[1] == held[2]
    assert 50 < len(held[0]) < 110
    assert len(read(tmp_path / "a.jsonl", validation=0.1).tables["validation"]) < len(held[0])


def test_rows_that_are_the_same_text_but_for_capitals_and_blanks_are_on_one_side_and_counted(tmp_path: Path):
    rows = []
    for i in range(200):
        for text in (f"The river no. {i}", f"the river  no. {i}", f"THE\u00a0RIVER no. {i}\n"):
            rows.append({"text": text, "label": "ab"[i % 2]})
    rows.append({"text": "The river no. 0", "label": "b"})
    data = read(write_rows(tmp_path / "a.jsonl", rows), validation=0.2)
    train, validation = (set(data.tables[split]["text"].map(reading.folded)) for split in ("train", "validation"))
    assert train
    assert validation
    assert not train & validation
    assert len(data.tables["train"]) == data.duplicates + len(train)
    assert [note for note in data.notes if "4 rows whose texts also occur with another label" in note]


def test_many_whole_numbers_that_repeat_are_classes_if_it_is_asked_for_and_codes_are_no_numbers(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", rows_with([*range(60)] * 4))
    assert read(path, kind="classes").task.labels == tuple(map(str, range(60)))
    path = write_rows(tmp_path / "b.csv", rows_with(["3_5", "35", "1_0"] * 20))
    assert set(read(path).task.labels) == {"3_5", "35", "1_0"}


def test_splits_of_a_folder_are_taken_as_they_are(tmp_path: Path):
    for split, count in (("train", 50), ("dev", 20), ("test", 10)):
        rows = rows_of(len(split), count)
        write_rows(tmp_path / f"{split}.csv", [{"text": row["text"]} for row in rows] if split == "test" else rows)
    data = read(tmp_path)
    assert {split: len(table) for split, table in data.tables.items()} == {"train": 50, "validation": 20}
    assert "test has no labels" in " ".join(data.notes)
    assert "validation 0.3 is not used" in " ".join(read(tmp_path, validation=0.3).notes)
    with pytest.raises(InputError, match="revision"):
        read(tmp_path, revision="0" * 40)
    texts = {split: texts for split, _, _, texts in reading.sentences(Definition(name="mine", data=str(tmp_path)))}
    assert {split: len(of_split) for split, of_split in texts.items()} == {"validation": 20, "test": 10}
    write_rows(tmp_path / "test.csv", rows_of(4, 10))
    assert [*read(tmp_path).tables] == ["train", "validation", "test"]


def test_a_text_may_lie_within_a_field_and_a_file_may_have_another_encoding(tmp_path: Path):
    rows = rows_of(1)
    nested = [{"doc": {"text": row["text"] + " é"}, "label": row["label"]} for row in rows]
    expected = contents(read(write_rows(tmp_path / "a.jsonl", nested), text="doc.text"))
    pd.DataFrame([{"text": row["text"] + " é", "label": row["label"]} for row in rows]).to_csv(
        tmp_path / "a.csv", index=False, encoding="windows-1252"
    )
    with pytest.raises(InputError, match=r"mine/a\.csv: line 2 .*not UTF-8.*encoding"):
        read(tmp_path / "a.csv")
    assert contents(read(tmp_path / "a.csv", encoding="windows-1252")) == expected


def test_a_folder_that_datasets_saved_keeps_the_names_of_its_classes_in_bioes(tmp_path: Path):
    import datasets

    features = datasets.Features({
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=["O", "B-PER", "L-PER"])),
    })  # fmt: skip
    rows = {"tokens": [["Anna", "Grey", str(i)] for i in range(50)], "ner_tags": [[1, 2, 0]] * 50}
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.to_parquet(tmp_path / "one.parquet")
    datasets.DatasetDict({"train": saved, "validation": saved.select(range(9))}).save_to_disk(tmp_path / "both")
    both = read(tmp_path / "both", kind="tokens")
    one = read(tmp_path / "one.parquet", kind="tokens")
    assert both.task.labels == one.task.labels == ("O", "B-PER", "E-PER")
    assert both.task.metrics == ("span_f1", "accuracy")
    assert {split: len(table) for split, table in both.tables.items()} == {"train": 50, "validation": 9}
    assert set(both.tables["train"][LABEL]) == {(1, 2, 0)}


def test_a_data_set_in_the_hubs_layout_is_read_by_its_configuration(tmp_path: Path):
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: some.csv\n- config_name: b\n  data_files: other.csv\n---\n"
    )
    write_rows(tmp_path / "some.csv", rows_of(1))
    write_rows(tmp_path / "other.csv", rows_of(2, 100))
    assert sum(len(table) for table in read(tmp_path, config="b").tables.values()) == 100
    with pytest.raises(InputError, match=r"mine: .*'a', 'b'.*config"):
        read(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "code.py").write_text("raise SystemExit\n")
    with pytest.raises(InputError, match=r"mine: .*found code\.py"):
        read(tmp_path / "code")


HUB = {"name": "mine", "data": "someone/reviews", "revision": "0" * 40}


def test_a_data_set_of_the_hub_is_read_at_its_commit_which_is_in_the_key(tmp_path: Path, monkeypatch):
    import datasets
    import huggingface_hub

    write_rows(tmp_path / "data.csv", rows_of(1))
    asked = []
    cache = []
    load = datasets.load_dataset_builder

    def builder(name: str, config: str | None, revision: str):
        asked.append((name, config, revision))
        made = load(str(tmp_path))
        made.config.data_files = {"train": [f"hf://datasets/{name}@{revision}/deep/data.csv"]}
        return made

    def download(repository: str, name: str, repo_type: str, revision: str, force_download: bool) -> None:
        assert (repository, name, repo_type, revision) == ("someone/reviews", "deep/data.csv", "dataset", "0" * 40)
        cache.append(str(tmp_path / "data.csv"))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: cache[0] if cache else None)
    monkeypatch.setattr(files, "hub_problem", lambda source: "")
    own = Definition(**HUB, config="small")
    assert contents(reading.read(own)) == contents(read(tmp_path / "data.csv"))
    assert asked == [("someone/reviews", "small", "0" * 40)]
    place = {"repository": "someone/reviews", "revision": "0" * 40, "config": "small"}
    assert place.items() <= files.identity(own).items()
    monkeypatch.delattr(datasets, "load_dataset_builder")
    texts = reading.texts_identity(own.model_copy(update={"metric": "matthews"}))
    assert texts == reading.texts_identity(own), "without asking the hub"
    others = reading.texts_identity(own.model_copy(update={"label": "label"}))
    assert texts != others, "rows without a label are in no split"


def test_a_key_follows_the_data_and_how_it_is_read_not_where_it_lies(tmp_path: Path, place: Path):
    moved = shutil.copytree(place, tmp_path / "moved")
    for here, there in zip(definitions(place), definitions(moved), strict=True):
        assert files.identity(here) == files.identity(there)
    own = Definition(name="a", data=str(write_rows(tmp_path / "a.csv", rows_of(1))))
    wider = own.model_copy(update={"max_unlabelled": 0.6})
    assert files.identity(wider) == files.identity(own), "the rows that are read are the same"
    others = [
        own.model_copy(update=change) for change in ({"label": "text"}, {"metric": "macro_f1"}, {"validation": 0.2})
    ]
    others.append(own.model_copy(update={"data": shutil.copy(tmp_path / "a.csv", tmp_path / "a.tsv")}))
    identities = [json.dumps(files.identity(each)) for each in (own, *others)]
    write_rows(tmp_path / "a.csv", rows_of(2))
    assert len({*identities, json.dumps(files.identity(own))}) == 6
    [run] = Finetune(tasks=[own.model_copy(update={"epochs": 7})], seeds=1, epochs=2).runs()
    assert (run.identity()["task"], run.identity()["epochs"]) == ("a", 7)


# What bad data gets

GOOD = rows_with(["a", "b"] * 20)


def changed(place: int, **values) -> list[dict]:
    return [row | values if i == place else row for i, row in enumerate(GOOD)]


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        (GOOD, {"text": "body"}, ["body", "text, label", "Set text"]),
        (GOOD, {"label": "Label"}, ["Label", "text, label", "Set label"]),
        ([{"text": "a", "y": "b"}] * 20, {}, ["label, labels", "text, y"]),
        ([row | {"body": "x"} for row in GOOD], {}, ["text and body", "Set text"]),
        ([row | {"category": "x"} for row in GOOD], {}, ["label and category", "Set label"]),
        (changed(6, label=None), {"max_unlabelled": 0.02}, ["mine/train: 1 of 40 rows", "line 7", "max_unlabelled"]),
        (rows_with(["a", "b", None, None, None] * 8), {}, ["24 of 40 rows", "max_unlabelled"]),
        (changed(6, text=5), {}, ["text of line 7 is 5"]),
        (changed(6, label=["a", "b"]), {}, ["label of line 7 is ['a', 'b']", "kind"]),
        (rows_with(["a"] * 40), {}, ["label is a"]),
        (rows_with([i / 3 for i in range(40)]), {}, ["label", "'regression'"]),
        (rows_with([*range(60)] * 4), {}, ["60", "label", "'regression'", "'classes' for codes"]),
        (rows_with([*range(60)]), {"kind": "classes"}, ["60", "label", "'regression'"]),
        (rows_with([f"w {i}" for i in range(240)]), {}, ["240", "label", "another column"]),
        (GOOD, {"kind": "regression"}, ["label of lines 1, 2, 3, 4, 5 and 35 more is 'a'", "number"]),
        (rows_with([1, 2, 1e39, "n/a"]), {"kind": "regression"}, ["label of line 3 is 1e+39", "number"]),
        (GOOD, {"kind": "tokens"}, ["tokens, words"]),
        ([{"tokens": ["a", "b"], "tags": ["O"]}] * 9, {"kind": "tokens"}, ["lines 1, 2", "(2, 1)", "tags"]),
        ([{"tokens": "a b", "tags": ["O"]}] * 9, {"kind": "tokens"}, ["tokens of lines 1, 2"]),
        ([{"tokens": ["a"], "tags": "O"}] * 9, {"kind": "tokens"}, ["label of lines 1, 2"]),
        ([{"tokens": ["a", "b"], "tags": ["NN", "DT"]}] * 9, {"kind": "tokens", "metric": "span_f1"}, ["B-PER", "DT"]),
        (rows_with(["a", "b", "c"] * 20), {"metric": "f1"}, ["'f1'", "a, b, c"]),
        (rows_with(["a", "b"] * 2), {"validation": 0.01}, ["validation"]),
        ([], {}, ["no rows"]),
        (b'{"text": "a", "label": "b"}\n{"text": "a", \n', {}, ["mine/a.jsonl", "line 2"]),
        (b"text,label\na,b\nc\n", {"name": "a.csv"}, ["mine/a.csv", "line 3"]),
        (b"EU B-ORG\nrejects O\nGerman\n", {"name": "a.conll", "kind": "tokens"}, ["mine/a.conll", "line 3"]),
        (b"E\xff B-ORG\n", {"name": "a.conll", "kind": "tokens"}, ["mine/a.conll", "encoding"]),
        (b"PK", {"name": "a.docx"}, ["mine/a.docx"]),
        (b"text, topic,,my label\n" + b"a,b,c,d\n" * 9, {"name": "a.csv", "label": "topic"}, ['text, " topic", "",']),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_file_row_and_parameter(tmp_path: Path, rows, changes: dict, words):
    path = tmp_path / changes.get("name", "a.jsonl")
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        write_rows(path, rows)
    with pytest.raises(InputError) as problem:
        read(path, **{field: value for field, value in changes.items() if field != "name"})
    message = str(problem.value)
    assert not [word for word in ("mine", *words) if word not in message], message
    assert ("encoding" in message) == ("encoding" in words), "a broken row is not blamed on it"


def test_a_class_that_only_validation_has_is_refused_and_a_tag_is_named(tmp_path: Path):
    write_rows(tmp_path / "train.jsonl", GOOD)
    write_rows(tmp_path / "validation.jsonl", changed(3, label="c"))
    with pytest.raises(InputError, match=r"mine/validation\.jsonl: the label c of line 4 is in no training row"):
        read(tmp_path)
    write_rows(tmp_path / "train.jsonl", [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 5)
    write_rows(tmp_path / "validation.jsonl", [{"tokens": ["a", "b"], "tags": ["O", "B-Y"]}] * 5)
    data = read(tmp_path, kind="tokens")
    assert data.task.labels == ("B-X", "B-Y", "O")
    assert "label B-Y" in " ".join(data.notes)


def test_what_is_odd_but_usable_is_counted_and_said(tmp_path: Path):
    rows = [{"text": f"t {i}", "label": "ab"[i % 2]} for i in range(500)]
    rows[7]["text"] = " "
    rows[8]["label"] = "alone"
    data = read(write_rows(tmp_path / "train.csv", rows))
    notes = " ".join(data.notes)
    assert "line 9" in notes, "the empty text, with the line of the header"
    assert "only one training example of alone" in notes
    assert data.left_out == 1
    assert "held out" in notes
    both = tmp_path / "both"
    both.mkdir()
    write_rows(both / "train.csv", GOOD)
    for label, said in (("b", ["mine/validation: every label is b, so its score says little."]), ("a", []), ("", [])):
        rows = [{"text": f"v {i}", "label": label or "ab"[i % 2]} for i in range(9)]
        write_rows(both / "validation.csv", rows)
        found = [note for note in read(both).notes if "every label is b" in note]
        assert found == said


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"name": "cola", "data": "a.csv"}, "cola"),
        ({"name": "SST-2", "data": "a.csv"}, "SST-2"),
        ({"name": "a b", "data": "a.csv"}, "name"),
        ({"name": "a", "data": "probes"}, "probes"),
        ({"name": "a", "data": "a.csv", "kind": "tokens", "pair": "b"}, "pair"),
        ({"name": "a", "data": "a.csv", "metric": "pearson"}, "pearson"),
        ({"name": "a", "data": "a.csv", "lable": "b"}, "lable"),
        ({"name": "a", "data": "a.csv", "encoding": "nonsense"}, "encoding"),
        ({"name": "a"}, "data"),
        ("tickets", '"name": "tickets", "data"'),
    ],
)
def test_a_definition_that_cannot_be_is_refused_by_its_field(asked: dict | str, named: str):
    with pytest.raises(InputError, match=rf"finetune\.tasks\.1.*{named}"):
        resolve("demo", {"finetune": {"tasks": ["odd-word", asked]}})


@pytest.mark.parametrize("hidden", [-1.0, "-1.0", -1])
def test_a_test_split_of_numbers_hides_its_labels_as_one_of_classes_does(tmp_path: Path, hidden):
    numbers = [row | {"label": i / 3} for i, row in enumerate(GOOD)]
    write_rows(tmp_path / "test.jsonl", [row | {"label": hidden} for row in GOOD])
    for rows, kind in ((numbers, "regression"), (GOOD, "classes")):
        write_rows(tmp_path / "train.jsonl", rows)
        assert [*read(tmp_path, kind=kind).tables] == ["train", "validation"]


# Beside GLUE's tasks


def test_own_tasks_stand_beside_named_ones_with_settings_of_their_own(place: Path):
    tickets = definitions(place)[0].model_copy(update={"epochs": 8, "learning_rate": 1e-3})
    runs = Finetune(tasks=["cola", tickets], seeds=2, epochs=3).runs()
    assert [(run.label(), run.epochs) for run in runs] == [
        ("cola-0", 3),
        ("cola-1", 3),
        ("tickets-0", 8),
        ("tickets-1", 8),
    ]
    assert {run.learning_rate for run in runs} == {4e-5, 1e-3}
    with pytest.raises(InputError, match="epochs is 6"):
        resolve("crammed-bert", {"finetune": {"tasks": ["cola", tickets.model_dump()], "epochs": 6}})
    resolve("crammed-bert", {"finetune": {"tasks": [tickets.model_dump()], "epochs": 6}})
    with pytest.raises(InputError, match="tickets"):
        resolve("crammed-bert", {"finetune": {"tasks": [tickets.model_dump(), tickets.model_dump() | {"epochs": 2}]}})


@pytest.mark.parametrize("task", ["cola", "rte"])
def test_a_task_of_glue_defined_as_ones_own_has_the_same_rows_predictions_and_scores(tmp_path: Path, model, task: str):
    write_task(tmp_path, task, np.random.default_rng(2))
    columns = ("sentence", "") if task == "cola" else ("sentence1", "sentence2")
    own = Definition(name="mine", data=str(tmp_path / task), text=columns[0], pair=columns[1], metric="matthews")
    runs = Finetune(data=str(tmp_path), tasks=[task, own], **QUICK | {"epochs": 2}, keep="none").runs()
    named, defined = (finetune.fn(run, model) for run in runs)
    tables = [pq.read_table(made.path / "predictions.parquet") for made in (named, defined)]
    assert tables[0]["scores"].to_pylist() == tables[1]["scores"].to_pylist()
    assert list(map(str, tables[0]["prediction"].to_pylist())) == tables[1]["prediction"].to_pylist()
    scores = [made.stats["validation"]["validation"] for made in (named, defined)]
    for what in ("metrics", "intervals", "majority"):
        for metric in scores[0][what]:  # Matthews, and accuracy
            assert scores[0][what][metric] == scores[1][what][metric]
    assert scores[0]["confusion"] == scores[1]["confusion"]


def test_prefect_takes_definitions_and_its_form_shows_them():
    from prefect.exceptions import ParameterTypeError
    from prefect.utilities.callables import parameter_schema

    from flows.cram import cram

    own = {"name": "mine", "data": "someone/reviews", "label": "stars", "kind": "regression", "epochs": 2}
    given = {"finetune": {"tasks": ["odd-word", own]}}
    taken = cram.validate_parameters({"recipe": "demo", "override": given})["override"]
    assert resolve("demo", taken) == resolve("demo", given)
    assert resolve("demo", given).finetune.tasks == ["odd-word", Definition(**own)]
    about = parameter_schema(cram).definitions
    choices = about["FinetuneOverride"]["properties"]["tasks"]["items"]["anyOf"]
    assert choices[1] == {"$ref": "#/definitions/Definition"}
    assert set(about["Definition"]["properties"]) == set(Definition.model_fields)
    with pytest.raises(ParameterTypeError, match="kind"):
        cram.validate_parameters({"override": {"finetune": {"tasks": [own | {"kind": "stars"}]}}})


def test_the_corpus_is_searched_for_the_texts_of_own_tasks_alone_if_only_these_are_asked(tmp_path: Path, store):
    words = "the quick committee of the harbour described every broken lamp twice before the cold rain of number"
    rows = [{"text": f"{words} {i} and went home", "label": "ab"[i % 2]} for i in range(60)]
    own = {"name": "mine", "data": str(write_rows(tmp_path / "a.csv", rows))}
    held = reading.read(Definition(**own)).tables["validation"]["text"].tolist()
    kept = [row["text"] for row in rows if row["text"] not in held]
    filler = "Nothing of it is in any task, however long one looks for it in these sentences of the corpus. "
    texts = [filler + f"{text.split(words)[1]} number" for text in kept[:5]] + [filler + held[0] + ". End."]
    params = resolve("crammed-bert", {"finetune": {"tasks": [own]}}).decontaminate
    assert params.data == ""
    made = decontaminate.fn(params, corpus_of(tmp_path, texts))
    assert texts_of(made) == texts[:5]
    assert made.stats["tasks"]["mine"] | {"documents": 1, "splits": ["validation"]} == made.stats["tasks"]["mine"]
    assert [*made.stats["tasks"]] == ["mine"]
    asked = [own | {"metric": "matthews", "epochs": 2}, own | {"text": "text"}, own | {"validation": 0.2}]
    others = [resolve("crammed-bert", {"finetune": {"tasks": [one]}}).decontaminate.identity() for one in asked]
    assert params.identity() == others[0] == others[1] != others[2], "only the texts concern the corpus"
    assert Decontaminate(data="probes").identity().keys() == {"unchecked"}, "as before there were own tasks"
    with pytest.raises(InputError, match="nothing"):
        resolve("demo", {"finetune": {"tasks": [own | {"text": "nothing"}]}}).decontaminate.check()


# Tokens and several labels


def test_comments_above_sentences_are_no_tokens_and_bilou_is_read_as_bioes(tmp_path: Path):
    lines = ["# id = 1", "# id 0000\tdomain=en", "#sent_id=1", "Anna\tB-PER", "Grey\tL-PER", "#\tO", "York\tU-LOC", ""]
    lines += ["#\tO", "# x=1\tO", ""]  # within a sentence, where it is a token
    for name in ("train", "validation"):
        (tmp_path / f"{name}.conll").write_text("\n".join(lines * 30))
    data = read(tmp_path, kind="tokens")
    assert data.task.labels == ("B-PER", "E-PER", "O", "S-LOC")
    assert data.task.metrics == ("span_f1", "accuracy")
    assert not [note for note in data.notes if "accuracy" in note]
    first, second, *_ = data.tables["train"].to_dict("records")
    assert (first["tokens"], first[LABEL]) == (["Anna", "Grey", "#", "York"], (0, 1, 2, 3))
    assert (second["tokens"], second[LABEL]) == (["#", "# x=1"], (2, 2))


def test_tags_that_mark_no_spans_are_named_where_the_score_is_accuracy_for_them(tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"tokens": ["a", str(i)], "tags": ["O", "LOC"]} for i in range(50)])
    data = read(path, kind="tokens")
    assert data.task.metrics[0] == "accuracy"
    assert [note for note in data.notes if "accuracy" in note and "LOC" in note]
    asked = read(path, kind="tokens", metric="accuracy").notes
    assert not [note for note in asked if "LOC" in note], "it was asked for"


def test_words_behind_the_cut_or_without_a_token_are_answered_and_counted(tmp_path: Path, model):
    words = ["the", "river", "Анна", "map"] + ["the"] * 12
    tags = ["O", "B-X", "B-X", "O"] + ["O"] * 12
    for split in ("train", "validation"):
        write_rows(tmp_path / f"{split}.jsonl", [{"tokens": words, "tags": tags}] * 40)
    own = Definition(name="mine", data=str(tmp_path), kind="tokens")
    [run] = Finetune(tasks=[own], **QUICK | {"max_tokens": 8}, keep="none").runs()
    made = finetune.fn(run, model)
    assert made.stats["data"]["cut"] == {"train": 40, "validation": 40}
    assert "of 640 words of validation have no token" in " ".join(made.stats["data"]["notes"])
    table = table_of(made, "validation")
    assert {len(tags) for tags in table["prediction"]} == {16}
    assert {tuple(tags[2:3] + tags[8:]) for tags in table["prediction"]} == {("O",) * 9}, "the usual tag"
    assert table["tokens"][0] == words


def test_of_many_classes_the_most_frequent_mistakes_are_shown():
    names = tuple(f"class {i}" for i in range(20))
    counts = np.diag(np.full(20, 30))
    counts[3, 7] = 9
    counts[19, 0] = 4
    shown = str(confusion_table(Task("x", ("text",), names, ("accuracy",), {}, own=True), counts.tolist()))
    rows = [line.split("|")[1:5] for line in shown.splitlines()[2:]]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["class 3", "class 7", "9", "23.1 %"], ["class 19", "class 0", "4", "11.8 %"],
    ]  # fmt: skip
