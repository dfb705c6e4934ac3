"""The report, on hand-made artifacts: scores, data, rules and lineage."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens, write_jsonl
from huggingface_hub import ModelCard

from model import InputError
from model.quantities import counted
from model.settings import Finetuning
from tasks import stage
from tasks import store as store_module
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate
from tasks.download import Download, download
from tasks.filter import Filter
from tasks.finetune import Finetune, finetune
from tasks.glue import metrics
from tasks.glue.tasks import GLUE, TASKS
from tasks.pretrain import Pretrain, pretrain
from tasks.report import Report, report
from tasks.reports import common, data_sections, scores
from tasks.reports.markdown import render
from tasks.store import LINEAGE, Artifact
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

ENVIRONMENT = {
    "python": "3.11.1", "packages": {"torch": "2.13.0", "numpy": "2.4"}, "commit": "abc123",
    "machine": {"system": "Linux", "cores": 2},
}  # fmt: skip
BERT = scores.PUBLISHED["cramming"][0].scores
MODEL = "pretrain/00000000000a"
RULES = common.TITLES["cramming"]
HELDOUT = {
    "documents": 10, "tokens": 25, "characters": 120, "bytes": 125, "digest": "d1",
    "nats_per_token": {"value": 2.1, "standard_error": 0.05},
    "nats_per_character": {"value": 0.5, "standard_error": 0.0125},
    "nats_per_byte": {"value": 0.48, "standard_error": 0.012},
}  # fmt: skip


def counts(documents: int, characters: int) -> dict:
    half = {"documents": documents // 2, "characters": characters // 2}
    rest = {"documents": documents - documents // 2, "characters": characters - characters // 2}
    return {"documents": documents, "characters": characters, "by_source": {"books": half, "web": rest}}


def lineage(key: str = "a", decontamination: dict | None = None, **changes) -> dict[str, dict]:
    """The manifests of a pretrained artifact and of all that led to it; `changes`: of the statistics of pretraining."""
    filtered = [
        {"source": name, "documents": n, "kept": n - n // 9, "incompressible": n // 9, "no tokens": 0, "characters": 9 * n,
         "characters kept": 8 * n, "kept, % of documents": 88.9, "median tokens_per_char": 0.2345, "median zstd_ratio": 0.5}
        for name, n in (("all", 900), ("books", 450), ("web", 450))
    ]  # fmt: skip
    found_in = {"splits": ["test"], "sentences": 9, "too_short": 4, "ngrams": 50, "sentences_found": 1, "documents": 2}
    evaluations = [
        {"fraction": f, "step": int(1000 * f), "tokens": int(9e9 * f), "seconds": 86_390.0 * f, "heldout_loss": 2.1 + 8 * (1 - f) ** 3,
         "heldout_nats_per_character": 0.5 + 2 * (1 - f) ** 3, "heldout_nats_per_byte": 0.48 + 2 * (1 - f) ** 3}
        for f in np.linspace(0, 1, 11).tolist()
    ]  # fmt: skip
    pretraining = {
        "parameters": 119_589_889, "steps": 1000, "tokens": 9_000_000_000, "epochs": 1.25, "exaflops": 5.6,
        "seconds_on_the_clock": 86_390.0, "tokens_per_second": 104_178.0, "mfu": 0.42, "training_loss": 2.0,
        "heldout_loss": 2.1, "heldout": HELDOUT, "skipped": [],
        "evaluations": evaluations,
        "machine": {"device": "Toy GPU", "dtype": "bfloat16", "compiled": True, "gpus": 1, "micro_batch": 64},
    } | changes  # fmt: skip
    stages = {
        "download": (Download(), counts(1000, 9000) | {"lost": {"empty text": 3}}),
        "deduplicate": (Deduplicate(), counts(950, 8600) | {"dropped": {"duplicate": counts(50, 400)}}),
        "decontaminate": (Decontaminate(), counts(900, 8100) | {
            "dropped": {"contaminated": counts(50, 500)}, "checked": True, "words": 13, "not_at_hand": ["cola/test"],
            "documents_found": 50, "tasks": dict.fromkeys(GLUE, found_in)} | (decontamination or {})),
        "filter": (Filter(), counts(800, 7200) | {
            "dropped": {"incompressible": counts(100, 900), "no tokens": counts(0, 0)}, "seen": counts(900, 8100),
            "measured_with": {"vocabulary_entries": 32768, "tokens_kept": 1700}, "table": filtered}),
        "vocabulary": (Vocabulary(), {
            "entries": 32768, "whole_words": 25835, "continuations": 6928, "unused": 12,
            "trained_on": {"documents": 800, "characters": 7200, "words": 1500, "different_words": 700},
            "table": [{"kind": "letters", "entries": 30000, "unused": 10, "in fewer than 100 places": 99, "% of tokens": 81.5}]}),
        "tokenize": (Tokenize(), {
            "documents": 780, "characters": 7000, "tokens": 1600, "sequences": 12, "characters_per_token": 4.375,
            "unknown_tokens": 3, "entries": 32768,
            "heldout": {"documents": 20, "characters": 200, "tokens": 45,
                        "measured": {"documents": 10, "characters": 120, "bytes": 125, "tokens": 25, "sequences": 1}}}),
        "pretrain": (Pretrain(), pretraining),
    }  # fmt: skip
    found, before = {}, {}
    for name, (params, stats) in stages.items():
        own = f"{name}/00000000000{key}"
        found[own] = {"stage": name, "version": 1, "key": own.split("/")[1], "params": params.model_dump(mode="json"),
                      "inputs": before, "stats": stats, "seconds": 12.5, "finished": "2026-11-21T10:00:00.000+00:00",
                      "environment": ENVIRONMENT}  # fmt: skip
        before = {"corpus": own}
    return found


def made(name: str, manifest: dict, files: dict[str, object]) -> Artifact:
    """Put an artifact into the store."""
    artifact = Artifact(stage=name.split("/")[0], key=name.split("/")[1])
    draft = store_module.draft_of(artifact)
    draft.mkdir(parents=True)
    for file, content in files.items():
        pq.write_table(content, draft / file) if isinstance(content, pa.Table) else (draft / file).write_text(content)
    store_module.publish(draft, artifact, {"version": 1, "key": artifact.key, "environment": ENVIRONMENT} | manifest)
    return artifact


def measured(task: str, split: str, score: float, have: int | None = None, **changes) -> dict:
    """What a finetune stage says of a split."""
    about, official = TASKS[task], TASKS[task].validation[split]
    values = {metric: round(score + 0.5 * i, 4) for i, metric in enumerate(about.metrics)}
    n = about.classes
    return {
        "examples": official if have is None else have,
        "official_examples": official,
        "metrics": values,
        "intervals": {metric: [round(value - 2, 4), round(value + 2, 4)] for metric, value in values.items()},
        "notes": [],
        "majority": dict.fromkeys(about.metrics, 31.0),
        "confusion": None if n == 1 else [[90 if i == j else 10 for j in range(n)] for i in range(n)],
    } | changes


def guesses(
    task: str, texts: tuple[str, ...] = ("He left.", "Left he the.", "Who did you see?", "The book sleeps.")
) -> pa.Table:
    """Predictions of each validation split, all of the second class (or 2.5)."""
    about, tables = TASKS[task], []
    for split in about.validation:
        n, classes = len(texts), about.classes
        rows = {"split": [split] * n, "row": list(range(n)), **{name: list(texts) for name in about.columns}}
        rows["label"] = [i % classes for i in range(n)] if classes > 1 else [float(i) for i in range(n)]
        rows["prediction"] = [1] * n if classes > 1 else [2.5] * n
        rows["scores"] = [[0.0, 1.0 + i, *([-1.0] * (classes - 2))] if classes > 1 else [2.5] for i in range(n)]
        tables.append(pa.table(rows))
    return pa.concat_tables(tables)


def finetuned(
    task: str,
    score: float | dict[str, float],
    seed: int = 0,
    model: dict[str, dict] | None = None,
    have: int | None = None,
    predictions: pa.Table | None = None,
    before: Artifact | None = None,
    notes: tuple[str, ...] = (),
    **params,
) -> Artifact:
    """A finetune artifact with this score (of each split of MNLI, if a dict); `before`: the one it starts from."""
    manifests, about = model or lineage(), TASKS[task]
    settings = Finetuning().model_dump(mode="json") | {
        "data": {"repository": "nyu-mll/glue", "revision": "1"}, "task": task, "seed": seed, "protocol": "cramming",
        "pretrained": True, "share": 1.0, "start": "pretrained", "test": False, "keep": False,
    } | params  # fmt: skip
    start = next(name for name in manifests if name.startswith("pretrain/"))
    if before:
        start, manifests = before.name, json.loads((before.path / LINEAGE).read_text()) | {before.name: before.manifest}
    of_split = score if isinstance(score, dict) else dict.fromkeys(about.validation, score)
    validation = {split: measured(task, split, value, have) | ({"notes": list(notes)} if notes else {})
                  for split, value in of_split.items()}  # fmt: skip
    stats = {
        "task": task, "seed": seed, "protocol": settings["protocol"], "pretrained": settings["pretrained"],
        "share": settings["share"], "metric": about.metrics[0], "head": "tanh",
        "machine": {"device": "Other GPU", "dtype": "float16", "compiled": False}, "train_examples": about.train,
        "official_train_examples": about.train, "steps": 100, "seconds_of_training": 12.0, "examples_per_second": 321.0,
        "chosen_epoch": settings["epochs"], "epochs": [],
        "data": {"left_out": {}, "shared": {}, "duplicates": 0, "cut": dict.fromkeys(of_split, 0), "notes": []},
        "validation": validation,
    }  # fmt: skip
    manifest = {"stage": "finetune", "params": settings, "inputs": {"start": start}, "stats": stats, "seconds": 15.0,
                "finished": "2026-11-21T12:00:00.000+00:00"}  # fmt: skip
    _, about_it = stage.target("finetune", 3, Report(title=json.dumps([settings, validation, start])), {})
    files = {LINEAGE: json.dumps(manifests), "predictions.parquet": predictions or guesses(task)}
    return made(f"finetune/{about_it['key']}", manifest, files)


def with_scores(values: dict[str, float], seeds: int = 1, spread: float = 0.0, **changes) -> list[Artifact]:
    """Runs whose medians are these, by column."""
    runs = []
    for task in GLUE:
        splits = {split: values[name] for name, (of, split) in metrics.COLUMNS.items() if of == task}
        for seed in range(seeds):
            away = spread * (seed - (seeds - 1) / 2)
            runs.append(finetuned(task, {s: round(v + away, 4) for s, v in splits.items()}, seed, **changes))
    return runs


def written(runs: list[Artifact], title: str = "ours") -> tuple[str, dict, Path]:
    """The report's Markdown, its JSON, and where it is."""
    folder = report.fn(Report(title=title), runs).path
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text()), folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report with everything: both protocols, five seeds, no pretraining, shares of the data, metrics of each step."""
    with store_of_its_own(tmp_path_factory.mktemp("whole") / "artifacts"):
        runs = with_scores(BERT, seeds=5, spread=0.8)
        runs += with_scores(dict.fromkeys(BERT, 40.0), pretrained=False)
        shares = ((share, 80.0 + 4 * i) for i, share in enumerate((0.25, 0.5)))
        runs += [finetuned("sst2", score + seed, seed, share=share) for share, score in shares for seed in (0, 1)]
        settings = {"protocol": "modern", "schedule": "linear", "choose": "best", "head": "native"}
        mnli = finetuned("mnli", 85.0, epochs=3, **settings)
        rte = (finetuned("rte", 78.0 + i, i, before=mnli, start="mnli", epochs=10, **settings) for i in range(3))
        n = 1000
        steps = {name: np.linspace(1, 5, n) for name in ("loss", "lr", "tokens", "seconds", "tokens_per_second", "mfu")}
        made(MODEL, lineage()[MODEL], {"metrics.parquet": pa.table({"step": range(1, n + 1)} | steps)})
        yield written([*runs, mnli, *rte])


def at_baseline(task: str, score: float, **changes) -> Artifact:
    """A run whose score is no better than that of the majority baseline."""
    run = finetuned(task, score, **changes)
    stats = run.stats
    for about in stats["validation"].values():
        about["majority"] = {metric: value + 0.4 for metric, value in about["metrics"].items()}
    stats["data"]["notes"] = [f"{task}: training rows that stand in validation too: 2 (rows 3 and 4)."]
    (run.path / "stage.json").write_text(json.dumps(run.manifest | {"stats": stats}))
    return run


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report of one seed on some tasks: partial data, scores at the baseline, WNLI, a probe; no metrics of each step."""
    with store_of_its_own(tmp_path_factory.mktemp("mixed") / "artifacts"):
        model = lineage(steps=1, seconds_on_the_clock=60.02, tokens=13_619_200, parameters=21_120)
        model[MODEL]["params"]["budget"] = 1 / 60
        runs = [finetuned("cola", 48.4, model=model, notes=(UNDEFINED,)), finetuned("wnli", 56.3, model=model)]
        runs += [finetuned("sst2", 91.9, have=400, model=model)]
        runs += [at_baseline("mrpc", 81.2, model=model), at_baseline("stsb", 0.0, model=model)]
        runs += [finetuned("word-order", 55.0, pretrained=kind, model=model) for kind in (True, False)]
        yield written(runs)


UNDEFINED = "Matthews correlation is undefined and reported as 0, for all 1,043 predictions are of class 1."


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables in a text, by the first cell."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    return {line[0]: line[1:] for line in cells}


def of(row: list[str], *names: str) -> list[str]:
    """These columns of a row of a table of scores."""
    return [row[2 + scores.COLUMNS.index(name)] for name in names]


PUBLISHED_ROWS = [row for rows in scores.PUBLISHED.values() for row in rows if len(row.scores) == 9]


@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=lambda row: row.model)
def test_the_average_of_a_published_row_is_the_published_average(row):
    exact = row.average in (80.9, 80.7)  # BERT and the released model; of the others scores and average are rounded
    assert metrics.paper_average(row.scores) == pytest.approx(row.average, abs=0.05 if exact else 0.1)


def test_published_scores_as_medians_give_the_published_average(whole):
    page, about, _ = whole
    official = np.mean([83.3, 91.9, 86.95, 59.2, 90.6, 87.95, 89.55, 56.5])
    assert round(about["average"], 1) == 80.9
    assert about["averages"]["cramming"]["official"] == pytest.approx(official, abs=0.01)
    assert "- **80.9** GLUE, average of nine\n" in page
    assert rows_of(section(page, RULES))["**ours** (this run)"][0] == "80.9"


def test_each_score_has_median_range_and_interval(whole):
    page, about, _ = whole
    row = next(r for r in about["scores"] if r["column"] == "CoLA" and r["pretrained"])
    assert (row["score"], row["seeds"]) == (56.5, 5)
    assert row["metrics"]["matthews"] == {"median": 56.5, "range": [54.9, 58.1], "interval": [54.5, 58.5]}
    details = section(page, RULES).split("### Every score")[1].split("| no pretraining")[0]
    cola = ["Matthews", "56.5", "54.9 to 58.1", "54.5 to 58.5", "31.0", "5", "8,551", "1,043", "pretrained"]
    assert rows_of(details)["CoLA"] == cola


def test_of_an_even_number_of_seeds_the_interval_is_that_of_the_lower_one_in_the_middle(store):
    runs = [finetuned("cola", score, seed) for seed, score in enumerate((50.0, 44.0, 42.0, 47.0))]
    (row,) = scores.gather(scores.groups(runs))
    assert (row["score"], row["median_run"]) == (45.5, runs[1].name)
    assert row["by_seed"] == {"0": 50.0, "1": 44.0, "2": 42.0, "3": 47.0}
    assert row["metrics"]["matthews"]["interval"] == [42.0, 46.0]


def test_published_rows_are_marked_with_their_source(whole):
    text = section(whole[0], RULES)
    for row in scores.PUBLISHED["cramming"]:
        assert re.search(rf"\| \*{re.escape(row.model)}\* \(published \\\[\d\\\]\) +\|", text), row.model
        assert row.source in text
    assert len([line for line in text.splitlines() if "(this run)" in line]) == 2


def test_the_protocols_are_never_mixed_and_each_says_how_it_was_run(whole):
    page, about, _ = whole
    cramming, modern = (section(page, title) for title in common.TITLES.values())
    nine = [f"{value:.1f}" for value in BERT.values()]
    assert rows_of(cramming)["**ours** (this run)"] == ["80.9", "80.7", *nine]
    assert rows_of(modern)["**ours** (this run)"] == [*"––", "85.0", "85.0", *"––", "79.0", *"––––"]
    assert about["averages"]["modern"] == {"paper": None, "official": None}
    assert "MosaicBERT" in modern
    assert "MosaicBERT" not in cramming
    assert "SST-2, STS-B, QNLI, QQP, MRPC, CoLA were not run." in modern
    for words in ("one setting for all tasks", "on its own training data alone", "the last epoch scored"):
        assert words in cramming
    for words in ("settings by task", "RTE from the model finetuned on MNLI", "chosen on a tenth"):
        assert words in modern


def test_what_was_run_decides_the_words_for_a_protocol_and_the_headline(store):
    page, _, _ = written([finetuned("rte", 50.0, protocol="modern")])
    assert "one setting for all tasks, each task trained on its own training data alone, the last epoch" in page
    assert "- **50.0** RTE, accuracy, protocol modern" in page


def test_the_page_and_the_card_say_how_the_model_was_built_and_finetuned(whole):
    page, _, folder = whole
    cramming, modern = (section(page, title) for title in common.TITLES.values())
    for text in (cramming, (folder / "README.md").read_text()):
        rows = rows_of(text.split("### How it was finetuned")[1].split("\n## ")[0])
        shown = {name: value if isinstance(value, str) else f"{value:g}" for name, value in SETTINGS.items()}
        assert {name: rows[f"`{name}`"] for name in SETTINGS} == {name: [value] for name, value in shown.items()}
    rows = rows_of(modern.split("### How it was finetuned")[1])
    assert (rows["setting"], rows["`epochs`"], rows["`schedule`"]) == (["MNLI", "RTE"], ["3", "10"], ["linear"] * 2)
    assert "16 x 768, 12 heads, geglu, pre-norm" in section(page, "Recipe")


SETTINGS = Finetuning().model_dump()


def test_published_averages_are_said_to_be_finetuned_alike_only_where_they_are(whole, store):
    assert "with the same finetuning: BERT-base, fully trained 80.9" in whole[0]
    page, _, _ = written(with_scores(BERT, learning_rate=2e-4, epochs=3))
    assert "(epochs 5, here 3, learning_rate 4e-05, here 0.0002): BERT-base, fully trained 80.9" in page
    assert "the same finetuning" not in page


def test_the_baselines_are_there_when_they_were_run(whole, mixed):
    rows = rows_of(section(whole[0], RULES))
    assert rows["**ours, no pretraining** (this run)"][2:] == ["40.0"] * 9
    assert rows["majority class or mean (this data)"][2:] == ["31.0"] * 9
    assert "**ours, no pretraining** (this run)" not in mixed[0]


def test_partial_data_is_marked_beside_the_number_and_enters_no_average(store):
    page, about, folder = written(
        [finetuned("sst2", 91.9, have=400) if r.stats["task"] == "sst2" else r for r in with_scores(BERT)]
    )
    ours, majority = (rows_of(page)[name] for name in ("**ours** (this run)", "majority class or mean (this data)"))
    assert about["average"] is None
    assert [*ours[:2], *of(ours, "SST-2", "RTE"), *of(majority, "SST-2")] == ["–", "–", "91.9\\*", "59.2", "31.0\\*"]
    assert "67,349 of 67,349 train examples, 400 of 872 validation examples." in page
    assert "needs all nine numbers, and SST-2 is on partial data." in page
    assert "91.9** SST-2" not in page
    assert "SST-2\\*, cramming: true class" in rows_of(section(page, "Confusion tables"))
    assert [row[3] for row in rows_of(section(page, "Every run")).values() if row[1] == "SST-2"] == ["91.9\\*"]
    assert "name: GLUE SST-2" not in (folder / "README.md").read_text()


def test_a_missing_number_partial_data_and_wnli_leave_no_average(mixed):
    page, about, _ = mixed
    assert about["average"] is None
    missing = "MNLI m, MNLI mm, RTE, QNLI, QQP were not run and SST-2 is on partial data."
    assert missing in page
    assert "WNLI, which enters no average: 56.3." in page


def test_scores_at_the_baseline_are_marked_and_no_big_numbers(mixed):
    page, about, folder = mixed
    head, row = page.split("\n## ")[0], rows_of(section(page, RULES))["**ours** (this run)"]
    assert of(row, "MRPC", "STS-B", "CoLA") == ["81.2†", "0.0†", "48.4"]
    assert [number for number in ("48.4", "81.2", "0.0") if f"**{number}**" in head] == ["48.4"]
    for text in (head, (folder / "report.html").read_text(), (folder / "README.md").read_text()):
        assert "the most frequent class: MRPC 81.2 (baseline 81.6)." in text
        assert "the mean: STS-B 0.0 (baseline 0.4)." in text
    beats = {row["column"]: row["beats_majority"] for row in about["scores"]}
    assert (beats["MRPC"], beats["STS-B"], beats["CoLA"]) == (False, False, True)
    table = json.loads((folder / "stage.json").read_text())["stats"]["table"]
    (listed,) = [row for row in table if row["task"] == "MRPC"]
    assert listed["verdict"] == "no better than always answering the most frequent class"
    assert (listed["score"], listed["majority"]) == (81.2, 81.6)


def test_an_average_of_scores_none_of_which_beats_the_baseline_is_no_big_number(store):
    page, about, _ = written([at_baseline(task, 60.0 if TASKS[task].classes > 1 else 0.0) for task in GLUE])
    assert about["average"] is not None
    assert "GLUE, average of nine" not in page.split("\n## ")[0]


def test_one_seed_has_no_range_and_notes_on_the_data_name_their_task_once(mixed):
    page = mixed[0]
    details = rows_of(section(page, RULES).split("### Every score")[1])
    assert details["CoLA"][:6] == ["Matthews", "48.4", "–", "46.4 to 50.4", "31.0", "1"]
    assert f"- CoLA: {UNDEFINED}" in page
    assert "- MRPC: training rows that stand in validation too" in page
    assert "mrpc: training" not in page


def test_speed_budget_and_sizes_are_in_units_that_suit_them(mixed):
    page = mixed[0]
    rows = rows_of(section(page, "Budget"))
    assert (rows["budget"], rows["spent"]) == (["1 minute"], ["1 minute, 13,619,200 tokens, 1 step"])
    for words in ("An encoder of 21.1 k parameters", "in 1 minute on Toy GPU", "**13.6 M** tokens", "**42 %** MFU\n"):
        assert words in page.split("\n## ")[0]


def test_probes_are_never_called_glue(mixed, store):
    text = section(mixed[0], "Probes (these are not GLUE)")
    assert rows_of(text)["word-order"][:3] == ["55.0", "55.0", "31.0"]
    assert rows_of(text)["`learning_rate`"] == ["4e-05"]
    page, about, _ = written([finetuned("word-order", 55.0)])
    assert "## GLUE" not in page
    assert about["average"] is None


def test_shares_make_a_learning_curve_and_leave_the_table_alone(whole, mixed):
    page, _, folder = whole
    lines = [line for line in section(page, "Learning curve").splitlines() if line.startswith("| SST-2")]
    points = [[cell.strip() for cell in line.split("|")[2:5]] for line in lines]
    assert points == [["25%", "16,837", "80.5"], ["50%", "33,674", "84.5"], ["100%", "67,349", "91.9"]]
    assert "score" in (folder / "curve.svg").read_text()
    assert of(rows_of(section(page, RULES))["**ours** (this run)"], "SST-2") == ["91.9"]
    assert "Learning curve" not in mixed[0]


def test_where_cola_errs_and_what_was_confused_is_shown_by_class(whole):
    text = section(whole[0], "CoLA: where it errs")
    assert rows_of(text)["unacceptable, taken for acceptable"] == ["2", "2", "100.0", "100.0"]
    assert "- Who did you see?" in text
    text = section(whole[0], "Confusion tables")
    classes = ["predicted entailment", "predicted neutral", "predicted contradiction", "recall"]
    assert rows_of(text)["MNLI m, cramming: true class"] == classes
    assert rows_of(text)["unacceptable"] == ["90", "10", "90.0 %"]
    assert "STS-B" not in text


def test_the_funnel_shows_what_each_stage_dropped_and_why(whole):
    page, about, _ = whole
    assert [row["stage"] for row in about["funnel"]][:4] == ["download", "deduplicate", "decontaminate", "filter"]
    text = section(page, "Data funnel")
    lines = [[name, *cells] for line in text.splitlines() for name, cells in rows_of(line).items()]
    for line in (
        ["filter", "incompressible", "100", "900", "books 50, web 50"],
        ["deduplicate", "duplicate", "50", "400", "books 25, web 25"],
        ["download", "unreadable: empty text", "3", "–", "–"],
    ):
        assert line in lines
    assert rows_of(text)["web"][:4] == ["450", "400", "50", "0"]
    assert "0.3 or more tokens per character" in text
    assert rows_of(section(page, "Vocabulary"))["entries"] == ["32,768 (wordpiece)"]


def test_rules_are_judged_by_protocol(whole):
    kept, broken = section(whole[0], "Rules of the game").split("### Finetuning, protocol modern")
    assert [row[0] for row in rows_of(kept).values() if row[0] in "✓✗?"] == ["✓"] * 10
    rows = rows_of(broken)
    assert rows["at most 5 epochs"] == ["✗", "3, 10"]
    assert rows["each task on its own training data only"] == ["✗", "started from MNLI's model: RTE"]
    assert rows["one setting for all tasks"] == ["✗", "differ: epochs"]
    assert rows["the last epoch is scored"][0] == "✗"


ZERO = dict.fromkeys(("sentences", "too_short", "ngrams", "sentences_found", "documents"), 0) | {"splits": []}
SEARCHED = {"tasks": dict.fromkeys(GLUE, ZERO)}
TWO_GPUS = lineage()[MODEL]["stats"]["machine"] | {"gpus": 2}
TEXT = "no downstream data in the text"


@pytest.mark.parametrize(
    ("changes", "rule", "verdict", "fact"),
    [
        ({"seconds_on_the_clock": 24.2 * 3600}, "at most 24 hours", "✗", "24.2 hours"),
        ({"machine": TWO_GPUS}, "one GPU", "✗", "2 x Toy GPU"),
        ({"decontamination": {"tasks": {"wnli": ZERO}}}, TEXT, "?", "not searched for: CoLA"),
        ({"decontamination": SEARCHED | {"not_at_hand": ["cola/validation"]}}, TEXT, "?", "cola/validation; scored on"),
        ({"decontamination": SEARCHED | {"words": 50}}, TEXT, "?", "50 words in a row"),
        ({"decontamination": SEARCHED | {"cut": {"documents": 70, "characters": 999}}}, TEXT, "✓",
         "999 characters cut from 70 documents, and 50 documents dropped"),
        ({"decontamination": None}, TEXT, "?", "did not pass the stage decontaminate"),
    ],
)  # fmt: skip
def test_a_rule_that_is_broken_or_unknown_is_marked_with_the_fact(store, changes, rule, verdict, fact):
    model = lineage(**changes)
    if changes.get("decontamination", ...) is None:
        del model["decontaminate/00000000000a"]
    page, about, _ = written([finetuned("cola", 50.0, model=model)])
    rows = {row[0]: row[1:] for row in about["rules"]}
    assert rows[rule][0] == rows_of(page)[rule][0] == verdict
    assert fact in rows[rule][1]
    assert all(row[0] == "✓" for name, row in rows.items() if name not in (rule, TEXT))


def test_curves_are_drawn_from_the_models_folder_and_its_absence_is_noted(whole, mixed):
    page, _, folder = whole
    assert ">training<" in (folder / "loss.svg").read_text()
    assert "## Throughput" in page
    assert "tokens a second" in (folder / "speed.svg").read_text()
    page, _, folder = mixed
    assert "The model's folder is not available here" in page
    assert ">training<" not in (folder / "loss.svg").read_text()
    assert not (folder / "speed.svg").exists()
    assert rows_of(section(page, "Loss"))["100%"][1] == "9,000,000,000"


def test_lineage_runs_and_environment_are_listed(whole):
    page, about, _ = whole
    for name in about["artifacts"]:
        assert f"[{name}](../../{name}/)" in page, name
    assert about["pretrained"] == MODEL
    environment = rows_of(section(page, "Environment"))
    assert environment["commit of cram"][:2] == ["`abc123`", "`abc123`"]
    assert environment["device"][:2] == ["Toy GPU", "Other GPU"]
    assert environment["precision"] == ["bfloat16", "float16", "–"]


def test_the_card_beside_the_report_has_the_scores(whole):
    text = (whole[2] / "README.md").read_text()
    assert text.index("## GLUE by the rules of cramming") < text.index("## GLUE by today's protocol (not by the rules)")
    assert text.index("## GLUE") < text.index("## Limits")
    assert ".svg" not in text
    results = ModelCard(text, ignore_metadata_errors=False).data.eval_results
    found = {(r.dataset_config, r.dataset_split, r.metric_type, r.metric_value) for r in results}
    assert {("cola", "validation", "matthews_correlation", 56.5), ("mnli", "validation_mismatched", "accuracy", 85.0),
            ("mnli", "validation_mismatched", "accuracy", 83.4)} <= found  # fmt: skip
    assert 40.0 not in {r.metric_value for r in results}


# What makes no report


def older_model() -> list[Artifact]:
    model = lineage("b")
    del model["pretrain/00000000000b"]["stats"]["heldout"]
    return [finetuned("cola", 50.0, model=model)]


def older_run() -> list[Artifact]:
    return [made("finetune/0123456789ab", {"stats": {"task": "cola", "seed": 0}, "params": {}, "inputs": {}}, {})]


def from_another_model() -> list[Artifact]:
    mnli = finetuned("mnli", 80.0, protocol="modern", model=lineage("b"))
    return [finetuned("cola", 50.0), finetuned("rte", 71.0, before=mnli, protocol="modern", start="mnli")]


FILES = {"train": ["a"], "validation": ["b"]}
REFUSED: dict[str, tuple[Callable[[], list[Artifact]], str]] = {
    "two models": (lambda: [finetuned("cola", 50.0), finetuned("rte", 50.0, model=lineage("b"))],
                   "different models: pretrain/00000000000a, pretrain/00000000000b"),
    "two models, one behind MNLI": (from_another_model, "different models"),
    "a run twice": (lambda: [finetuned("cola", 50.0)] * 2, "cola by protocol cramming"),
    "two settings": (lambda: [finetuned("cola", 50.0), finetuned("cola", 51.0, seed=9, epochs=2)], "seed"),
    "two data sets": (lambda: [finetuned("cola", 50.0, data=FILES),
                               finetuned("cola", 51.0, seed=2, data=FILES | {"validation": ["d"]})], "seed"),
    "an older run": (older_run, "finetune/0123456789ab was made by an older version"),
    "an older model": (older_model, "pretrain/00000000000b was made by an older version"),
}  # fmt: skip


@pytest.mark.parametrize(("runs", "named"), REFUSED.values(), ids=REFUSED)
def test_runs_that_make_no_report_are_refused_by_name(store, runs, named):
    with pytest.raises(InputError, match=named):
        written(runs())


def test_runs_that_differ_in_test_data_or_kept_models_or_begin_at_mnli_make_one_report(store):
    mnli = finetuned("mnli", 80.0, protocol="modern")
    runs = [
        finetuned("cola", 50.0, data=FILES),
        finetuned("cola", 51.0, seed=1, keep=True, test=True, data=FILES | {"test": ["c"]}),
    ]
    behind = finetuned("rte", 70.0, before=mnli, protocol="modern", start="mnli")
    _, about, _ = written([*runs, behind])
    assert about["pretrained"] == MODEL
    assert about["scores"][0]["seeds"] == 2
    digests = {scores.gather(scores.groups([run]))[0]["data"] for run in runs}
    assert digests == {about["scores"][0]["data"]}


# Files for the leaderboard


def with_test(task: str, score: float, seed: int, rows: int | None = None) -> Artifact:
    """A run that predicted the test data too: each row as its seed."""
    about, tables = TASKS[task], [guesses(task)]
    for split, official in about.test.items():
        n = rows or official
        found = {"split": [split] * n, "row": list(range(n))[::-1], **{c: ["x"] * n for c in about.columns}}
        found["label"] = pa.nulls(n, tables[0].schema.field("label").type)
        found |= {"prediction": [(seed + i) % 2 for i in range(n)][::-1], "scores": [[0.0] * about.classes] * n}
        tables.append(pa.table(found))
    return finetuned(task, score, seed, predictions=pa.concat_tables(tables), test=True)


def test_files_for_the_leaderboard_are_those_of_the_median_seed_and_of_whole_test_data(store):
    runs = [with_test("rte", score, seed) for seed, score in enumerate((60.0, 50.0, 70.0))]
    page, _, folder = written([*runs, with_test("cola", 50.0, 0, rows=7)])
    folder /= "submission"
    lines = (folder / "cramming" / "RTE.tsv").read_text().splitlines()
    assert lines[:3] == ["index\tprediction", "0\tentailment", "1\tnot_entailment"]  # seed 0
    assert len(lines) == 3001
    assert not (folder / "modern").exists()
    assert not (folder / "cramming" / "CoLA.tsv").exists()
    text = section(page, "Files for GLUE's leaderboard")
    assert "protocol cramming, in submission/cramming: RTE.tsv, submission.zip" in text
    assert "7 rows, but the official test split has 1,063 rows" in text


# On what the stages really write


@pytest.fixture(scope="module")
def real(tmp_path_factory, toy_texts: list[str]) -> dict:
    """A tiny model, its finetuning runs on probes, and their report."""
    root = tmp_path_factory.mktemp("real")
    tiny = Pretrain(architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}, budget=10_000,
                    budget_unit="tokens", batch_size=8, learning_rate=5e-3)  # fmt: skip
    probes = {"data": "probes", "tasks": ["word-order", "neighbours"], "seeds": 2, "epochs": 1, "max_tokens": 32}
    with store_of_its_own(root / "artifacts"):
        bert = pretrain.fn(tiny, toy_tokens(root, toy_texts)["tokens"])
        runs = [finetune.fn(run, bert) for run, _ in Finetune(**probes, baseline=True).runs()]
        page, about, folder = written(runs, "toy")
        yield {"page": page, "about": about, "folder": folder, "runs": runs, "pretrain": bert}


def test_the_funnel_of_a_real_run_adds_up(real):
    passed = {row["stage"]: row["documents"] for row in real["about"]["funnel"]}
    assert passed["download"] == 301
    assert passed["deduplicate"] == passed["decontaminate"] == 300
    assert passed["tokenize"] + passed["held out"] == passed["filter"]
    for name in real["about"]["artifacts"]:
        assert (real["folder"] / ".." / ".." / name / "stage.json").exists()


def test_the_scores_of_a_real_run_are_the_medians_of_its_runs(real):
    for row in real["about"]["scores"]:
        kind = (row["task"], row["pretrained"])
        stats = [run.stats for run in real["runs"]]
        of_kind = [one["validation"]["validation"] for one in stats if (one["task"], one["pretrained"]) == kind]
        assert row["seeds"] == len(of_kind) == 2
        assert row["score"] == pytest.approx(np.median([one["metrics"]["accuracy"] for one in of_kind]), abs=0.01)


def test_the_page_of_a_real_run_has_every_section(real):
    titles = re.findall("^## (.*)$", real["page"], flags=re.M)
    assert titles == [
        "Probes (these are not GLUE)", "Rules of the game", "Recipe", "Budget", "Loss", "Throughput", "Confusion tables", "Data funnel",
        "Vocabulary", "Text of the downstream data in the corpus", "Lineage", "Every run", "Environment",
    ]  # fmt: skip
    assert "Not checked, because the probes are made of held-out documents of this corpus." in real["page"]
    assert real["about"]["contamination"]["checked"] is False
    assert (real["folder"] / "README.md").read_text() == (real["pretrain"].path / "README.md").read_text()


@pytest.mark.parametrize(("method", "dropped"), [("drop", 2), ("cut", 1)])
def test_the_report_says_which_downstream_data_was_in_the_text(store, tmp_path: Path, toy_texts, method, dropped):
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
    values = data_sections.text_sections({corpus.name: corpus.manifest, clean.name: clean.manifest})
    page, about = render("contamination", values), values["contamination"]
    assert about["dropped"] == dropped
    assert f"{counted(dropped, 'document')} dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert ("characters cut from 1 document," in page) is (method == "cut")
    assert "3 of 6 sentences have fewer than 14 words" in page
    assert "cola/validation, rte/validation" in page
    assert rows_of(page)["RTE"][:3] == ["test", "4", "2"]
    assert json.loads(json.dumps(about)) == about
