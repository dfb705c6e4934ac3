"""The report, on hand-made artifacts: what it says of scores, data, rules and lineage."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import store_of_its_own, toy_tokens, write_jsonl

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
from tasks.reports import common, data_sections, scores, sections
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
    """The report of a run with everything: both protocols, five seeds, no pretraining, shares of the data, metrics at hand."""
    with store_of_its_own(tmp_path_factory.mktemp("whole") / "artifacts"):
        runs = with_scores(BERT, seeds=5, spread=0.8)
        runs += with_scores(dict.fromkeys(BERT, 40.0), pretrained=False)
        runs += [
            finetuned("sst2", 80.0 + 4 * i + seed, seed, share=share)
            for i, share in enumerate((0.25, 0.5))
            for seed in (0, 1)
        ]
        settings = {"protocol": "modern", "schedule": "linear", "choose": "best", "head": "native"}
        mnli = finetuned("mnli", 85.0, epochs=3, **settings)
        runs += [
            mnli,
            *(finetuned("rte", 78.0 + i, i, before=mnli, start="mnli", epochs=10, **settings) for i in range(3)),
        ]
        n = 1000
        steps = {name: np.linspace(1, 5, n) for name in ("loss", "lr", "tokens", "seconds", "tokens_per_second", "mfu")}
        made(MODEL, lineage()[MODEL], {"metrics.parquet": pa.table({"step": range(1, n + 1)} | steps)})
        yield written(runs)


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables in a text, by the first cell."""
    lines = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in text.splitlines() if line.startswith("| ")]
    return {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize(
    "row", [r for rows in scores.PUBLISHED.values() for r in rows if len(r.scores) == 9], ids=lambda r: r.model
)
def test_the_average_of_a_published_row_is_the_published_average(row):
    assert metrics.paper_average(row.scores) == pytest.approx(row.average, abs=0.1)  # of rounded scores, rounded


@pytest.mark.parametrize("average", [80.9, 80.7])
def test_the_averages_of_bert_and_of_the_released_model_are_the_published_ones(average):
    (row,) = [row for row in scores.PUBLISHED["cramming"] if row.average == average]
    assert round(metrics.paper_average(row.scores), 1) == average


def test_published_scores_as_medians_give_the_published_average(whole):
    page, about, _ = whole
    assert round(about["average"], 1) == 80.9
    assert "- **80.9** GLUE, average of nine\n" in page
    assert rows_of(section(page, RULES))["**ours** (this run)"][0] == "80.9"
    assert about["averages"]["cramming"]["official"] == pytest.approx(
        np.mean([83.3, 91.9, 86.95, 59.2, 90.6, 87.95, 89.55, 56.5]), abs=0.01
    )


def test_each_score_has_median_range_and_interval(whole):
    _, about, _ = whole
    row = next(r for r in about["scores"] if r["column"] == "CoLA" and r["pretrained"])
    assert row["score"] == 56.5
    assert row["metrics"]["matthews"] == {"median": 56.5, "range": [54.9, 58.1], "interval": [54.5, 58.5]}
    assert row["seeds"] == 5
    line = section(whole[0], RULES).split("### Every score")[1]
    assert "| CoLA | Matthews | 56.5 | 54.9 to 58.1 | 54.5 to 58.5 | 31.0 | 5 |" in line


def test_of_an_even_number_of_seeds_the_interval_is_that_of_the_lower_one_in_the_middle(store):
    runs = [finetuned("cola", score, seed) for seed, score in enumerate((50.0, 44.0, 42.0, 47.0))]
    (row,) = scores.gather(scores.groups(runs))
    assert row["score"] == 45.5
    assert row["median_run"] == runs[1].name
    assert row["metrics"]["matthews"]["interval"] == [42.0, 46.0]


def test_published_rows_are_marked_with_their_source(whole):
    text = section(whole[0], RULES)
    for row in scores.PUBLISHED["cramming"]:
        assert re.search(rf"\| \*{re.escape(row.model)}\* \(published \\\[\d\\\]\) \|", text), row.model
        assert row.source in text
    assert len([line for line in text.splitlines() if "(this run)" in line]) == 2


def test_the_protocols_are_never_mixed(whole):
    page, about, _ = whole
    cramming, modern = (section(page, title) for title in common.TITLES.values())
    nine = [f"{value:.1f}" for value in BERT.values()]
    assert rows_of(cramming)["**ours** (this run)"] == ["80.9", "80.7", *nine]
    assert rows_of(modern)["**ours** (this run)"] == [*"––", "85.0", "85.0", *"––", "79.0", *"––––"]
    assert "MosaicBERT" in modern
    assert "MosaicBERT" not in cramming
    assert (
        "No average of ours: it needs all nine numbers, and SST-2, STS-B, QNLI, QQP, MRPC, CoLA were not run." in modern
    )
    assert about["averages"]["modern"] == {"paper": None, "official": None}


def test_the_words_for_a_protocol_are_those_of_what_was_run(whole, store):
    cramming, modern = (section(whole[0], title) for title in common.TITLES.values())
    told = "one setting for all tasks, each task trained on its own training data alone, the last epoch scored"
    assert told in cramming
    assert "settings by task, RTE from the model finetuned on MNLI, the epoch chosen on a tenth" in modern
    page, _, _ = written([finetuned("cola", 50.0, choose="best"), finetuned("rte", 50.0, protocol="modern")])
    cramming, modern = (section(page, title) for title in common.TITLES.values())
    assert "one setting for all tasks, each task trained on its own training data alone, the epoch chosen" in cramming
    assert told in modern
    assert "not bound by the rules" in modern


def test_the_page_and_the_card_say_how_the_model_was_built_and_finetuned(whole):
    page, _, folder = whole
    cramming, modern = (section(page, title) for title in common.TITLES.values())
    for text in (cramming, (folder / "README.md").read_text()):
        rows = rows_of(text.split("### How it was finetuned")[1])
        for name, value in Finetuning().model_dump().items():
            assert rows[f"`{name}`"][0] == (value if isinstance(value, str) else f"{value:g}")
    rows = rows_of(modern.split("### How it was finetuned")[1])
    assert rows["setting"] == ["MNLI", "RTE"]
    assert rows["`epochs`"] == ["3", "10"]
    assert rows["`schedule`"] == ["linear", "linear"]
    assert "16 x 768, 12 heads, geglu, pre-norm" in section(page, "Recipe")


def test_published_averages_are_said_to_be_finetuned_alike_only_where_they_are(whole, store):
    assert "Published averages, with the same finetuning: BERT-base, fully trained 80.9" in whole[0]
    page, _, _ = written(with_scores(BERT, learning_rate=2e-4, epochs=3))
    told = "finetuned otherwise (epochs 5, here 3, learning_rate 4e-05, here 0.0002): BERT-base, fully trained 80.9"
    assert told in page
    assert "the same finetuning" not in page


def test_without_a_run_by_the_rules_the_headline_has_the_scores_of_the_other_protocol(store):
    page, _, _ = written([finetuned("cola", 50.0, protocol="modern")])
    assert "- **50.0** CoLA, Matthews, protocol modern" in page


def test_the_baselines_are_there_when_they_were_run(whole, store):
    rows = rows_of(section(whole[0], RULES))
    assert rows["**ours, no pretraining** (this run)"][2:] == ["40.0"] * 9
    assert rows["majority class or mean (this data)"][2:] == ["31.0"] * 9
    page, _, _ = written([finetuned("cola", 30.0)])
    assert "**ours, no pretraining** (this run)" not in page


def test_without_all_nine_numbers_there_is_no_average(store):
    page, about, _ = written([run for run in with_scores(BERT) if run.stats["task"] != "rte"])
    assert about["average"] is None
    assert rows_of(page)["**ours** (this run)"][:2] == ["–", "–"]
    assert "No average of ours: it needs all nine numbers, and RTE was not run." in page
    assert "- **91.9** SST-2, accuracy" in page


def test_partial_data_is_said_beside_the_number_and_enters_no_average(store):
    runs = [run for run in with_scores(BERT) if run.stats["task"] != "sst2"]
    page, about, _ = written([*runs, finetuned("sst2", 91.9, have=400)])
    assert about["average"] is None
    assert rows_of(page)["**ours** (this run)"][4] == "91.9\\*"
    told = "\\* SST-2 is on partial data: 67,349 of 67,349 train examples, 400 of 872 validation examples."
    assert told in page
    assert "and SST-2 is on partial data." in page
    assert "91.9** SST-2" not in page
    assert rows_of(page)["majority class or mean (this data)"][4] == "31.0\\*"
    assert "| SST-2\\*, cramming: true class |" in section(page, "Confusion tables")
    assert re.search(r"\| SST-2 \| 0 \| 91\.9\\\* \|", section(page, "Every run"))


@pytest.mark.parametrize(
    ("seconds", "told"), [(86_390.0, "24 hours"), (1200.0, "20 minutes"), (60.04, "1 minute"), (7.75, "7.75 seconds")]
)
def test_the_headline_tells_time_and_sizes_in_units_that_fit(store, seconds, told):
    manifests = lineage(seconds_on_the_clock=seconds, tokens=13_619_200, parameters=21_120)
    text = "\n".join(sections.head("x", [], manifests[MODEL], {}))
    assert f"An encoder of 21.1 k parameters, pretrained from scratch in {told} on Toy GPU." in text
    assert "**13.6 M** tokens read" in text


def test_wnli_is_reported_but_enters_no_average(store):
    page, about, _ = written([*with_scores(BERT), finetuned("wnli", 56.3)])
    assert round(about["average"], 1) == 80.9
    assert "WNLI, which enters no average: 56.3." in page


def test_undefined_metrics_and_notes_on_the_data_are_told(store):
    note = "Matthews correlation is undefined and reported as 0, for all 1,043 predictions are of class 1."
    page, _, _ = written([finetuned("cola", 0.0, notes=(note,))])
    assert f"- CoLA: {note}" in page


def at_baseline(task: str, score: float, **changes) -> Artifact:
    """A run whose score is that of the majority baseline."""
    run = finetuned(task, score, **changes)
    stats = run.stats
    for about in stats["validation"].values():
        about["majority"] = {metric: value + 0.4 for metric, value in about["metrics"].items()}
    (run.path / "stage.json").write_text(json.dumps(run.manifest | {"stats": stats}))
    return run


def test_a_score_within_its_interval_of_the_baseline_is_no_big_number_and_is_said_to_be_no_better(store):
    page, about, folder = written([at_baseline("mrpc", 81.2), at_baseline("stsb", 0.0), finetuned("cola", 50.0)])
    head = page.split("\n## ")[0]
    assert "**50.0** CoLA, Matthews" in head
    assert "**81.2**" not in head
    assert "**0.0**" not in head
    told = "No better than always answering the most frequent class: MRPC 81.2 (baseline 81.6)."
    assert told in head
    assert "No better than always answering the mean: STS-B 0.0 (baseline 0.4)." in head
    row = rows_of(section(page, RULES))["**ours** (this run)"]
    assert [row[2 + scores.COLUMNS.index(name)] for name in ("MRPC", "STS-B", "CoLA")] == ["81.2†", "0.0†", "50.0"]
    assert told in (folder / "report.html").read_text()
    assert "MRPC 81.2 (baseline 81.6)" in (folder / "README.md").read_text()
    beats = {row["column"]: row["beats_majority"] for row in about["scores"]}
    assert beats == {"MRPC": False, "STS-B": False, "CoLA": True}
    (in_terminal,) = [r for r in report_stats(folder)["table"] if r["task"] == "MRPC"]
    assert in_terminal["verdict"] == "no better than always answering the most frequent class"
    assert (in_terminal["score"], in_terminal["majority"]) == (81.2, 81.6)


def report_stats(folder: Path) -> dict:
    """What the report's manifest says of it."""
    return json.loads((folder / "stage.json").read_text())["stats"]


def test_an_average_of_scores_none_of_which_beats_the_baseline_is_no_big_number(store):
    runs = [at_baseline(task, 60.0 if TASKS[task].classes > 1 else 0.0) for task in GLUE]
    page, about, _ = written(runs)
    assert about["average"] is not None
    assert "GLUE, average of nine" not in page.split("\n## ")[0]


def test_scores_are_rounded_alike_and_one_seed_has_no_range(store):
    page, _, folder = written([finetuned("cola", 48.4), finetuned("word-order", 54.4)])
    assert "48.4 to 48.4" not in page
    assert "| CoLA | Matthews | 48.4 | – | 46.4 to 50.4 | 31.0 | 1 |" in page
    for row in report_stats(folder)["table"]:
        assert all(round(row[name], 1) == row[name] for name in ("score", "majority"))


def test_a_note_on_the_data_names_its_task_once(store):
    run = finetuned("cola", 50.0)
    stats = run.stats
    stats["data"]["notes"] = ["cola: training rows that stand in validation too: 2 (rows 3 and 4)."]
    (run.path / "stage.json").write_text(json.dumps(run.manifest | {"stats": stats}))
    page, _, _ = written([run])
    assert "- CoLA: training rows that stand in validation too" in page
    assert "cola: training" not in page


def test_speed_and_budget_are_told_in_the_fields_terms(store):
    model = lineage(steps=1, seconds_on_the_clock=60.02)
    model[MODEL]["params"]["budget"] = 1 / 60
    page, _, _ = written([finetuned("cola", 50.0, model=model)])
    assert "- **42 %** MFU\n" in page
    assert rows_of(section(page, "Budget"))["budget"] == ["1 minute"]
    assert rows_of(section(page, "Budget"))["spent"] == ["1 minute, 9,000,000,000 tokens, 1 step"]
    assert "matrix products reach" not in page.split("\n## Throughput")[0]


def test_a_document_at_the_threshold_is_said_to_be_dropped(store):
    page, _, _ = written([finetuned("cola", 50.0)])
    assert "Documents with 0.3 tokens a character or more are dropped." in page


def test_probes_are_never_called_glue(store):
    page, about, _ = written([finetuned("word-order", 55.0, pretrained=kind) for kind in (True, False)])
    assert "## Probes (these are not GLUE)" in page
    assert "## GLUE" not in page
    assert about["average"] is None
    assert rows_of(page)["word-order"][:3] == ["55.0", "55.0", "31.0"]
    assert rows_of(section(page, "Probes (these are not GLUE)"))["`learning_rate`"] == ["4e-05"]


def test_shares_make_a_learning_curve_and_leave_the_table_alone(whole, store):
    page, _, folder = whole
    rows = [line for line in section(page, "Learning curve").splitlines() if line.startswith("| SST-2")]
    assert [line.split(" | ")[1:4] for line in rows] == [
        ["25%", "16,837", "80.5"], ["50%", "33,674", "84.5"], ["100%", "67,349", "91.9"]
    ]  # fmt: skip
    assert "score" in (folder / "curve.svg").read_text()
    assert rows_of(section(page, RULES))["**ours** (this run)"][4] == "91.9"
    assert "Learning curve" not in written([finetuned("cola", 1.0)])[0]


def test_where_cola_errs_is_told_with_its_sentences(whole):
    text = section(whole[0], "CoLA: where it errs")
    assert "| unacceptable, taken for acceptable | 2 | 2 | 100.0 | 100.0 |" in text
    assert "- Who did you see?" in text
    assert rows_of(text)["all"][0] == "4"


def test_confusion_tables_name_the_classes(whole):
    text = section(whole[0], "Confusion tables")
    assert (
        "| MNLI m, cramming: true class | predicted entailment | predicted neutral | predicted contradiction | found |"
        in text
    )
    assert rows_of(text)["unacceptable"] == ["90", "10", "90.0 %"]
    assert "STS-B" not in text


def test_the_funnel_tells_what_each_stage_dropped_and_why(whole):
    page, about, _ = whole
    assert [row["stage"] for row in about["funnel"]][:4] == ["download", "deduplicate", "decontaminate", "filter"]
    text = section(page, "Data funnel")
    assert "| filter | incompressible | 100 | 900 | books 50, web 50 |" in text
    assert "| deduplicate | duplicate | 50 | 400 | books 25, web 25 |" in text
    assert "| download | unreadable: empty text | 3 | – | – |" in text
    assert rows_of(text)["web"][:4] == ["450", "400", "50", "0"]
    assert rows_of(section(page, "Vocabulary"))["entries"] == ["32,768 (wordpiece)"]


def test_every_rule_is_kept_by_a_run_that_keeps_them(whole):
    text = section(whole[0], "Rules of the game").split("### Finetuning, protocol modern")[0]
    verdicts = [row[0] for name, row in rows_of(text).items() if name not in ("rule", "---")]
    assert verdicts == ["✓"] * 10


def test_protocol_modern_breaks_rules_and_the_page_says_so(whole):
    text = section(whole[0], "Rules of the game").split("### Finetuning, protocol modern")[1]
    rows = rows_of(text)
    assert rows["at most 5 epochs"] == ["✗", "3, 10"]
    assert rows["each task on its own training data only"] == ["✗", "started from MNLI's model: RTE"]
    assert rows["one setting for all tasks"] == ["✗", "differ: epochs"]
    assert rows["the last epoch is scored"][0] == "✗"
    assert "breaks rules by design" in text


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"seconds_on_the_clock": 24.2 * 3600}, "at most 24 hours"),
        ({"machine": lineage()[MODEL]["stats"]["machine"] | {"gpus": 2}}, "one GPU"),
    ],
)
def test_a_rule_that_is_broken_is_marked(store, change, rule):
    page, about, _ = written([finetuned("cola", 50.0, model=lineage(**change))])
    assert rows_of(page)[rule][0] == "✗"
    assert [row[1] for row in about["rules"]].count("✗") == 1


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"tasks": {"wnli": {}}}, "scored on, but not looked for: CoLA"),
        ({"not_at_hand": ["cola/validation"]}, "not at hand: cola/validation; scored on, but not looked for: CoLA"),
        ({"words": 50}, "50 documents dropped; 50 words in a row count"),
    ],
)
def test_a_corpus_in_which_not_all_was_looked_for_is_not_called_free_of_it(store, found, told):
    zero = dict.fromkeys(("sentences", "too_short", "ngrams", "sentences_found", "documents"), 0) | {"splits": []}
    found |= {"tasks": dict.fromkeys(found.get("tasks", GLUE), zero)}
    _, about, _ = written([finetuned("cola", 50.0, model=lineage(decontamination=found))])
    (rule,) = [row for row in about["rules"] if row[0] == "no downstream data in the text"]
    assert rule[1] == "?"
    assert told in rule[2]


def test_what_was_cut_out_of_the_corpus_is_told_beside_the_rule(store):
    model = lineage(decontamination={"cut": {"documents": 70, "characters": 999}})
    _, about, _ = written([finetuned("cola", 50.0, model=model)])
    (rule,) = [row for row in about["rules"] if row[0] == "no downstream data in the text"]
    assert rule[1] == "✓"
    assert rule[2].startswith("999 characters cut from 70 documents, and 50 documents dropped")


def test_a_corpus_that_was_not_checked_is_told(store):
    manifests = {name: about for name, about in lineage().items() if about["stage"] != "decontaminate"}
    page, about, _ = written([finetuned("cola", 50.0, model=manifests)])
    assert rows_of(page)["no downstream data in the text"][0] == "?"
    assert "Not checked, because the corpus did not pass the stage decontaminate." in page
    assert about["contamination"]["checked"] is False


def test_curves_are_drawn_from_the_models_folder_and_its_absence_is_told(whole, store):
    page, _, folder = whole
    assert "not at hand here" not in page
    assert ">training<" in (folder / "loss.svg").read_text()
    assert "tokens a second" in (folder / "speed.svg").read_text()
    alone, _, without = written([finetuned("cola", 50.0)])
    assert "The model's own folder was not at hand here" in alone
    assert ">training<" not in (without / "loss.svg").read_text()
    assert not (without / "speed.svg").exists()
    assert rows_of(section(alone, "Loss"))["100%"][1] == "9,000,000,000"


def test_lineage_runs_and_environment_are_listed(whole):
    page, about, _ = whole
    for name in about["artifacts"]:
        assert f"[{name}](../../{name}/)" in page, name
    assert about["pretrained"] == MODEL
    environment = rows_of(section(page, "Environment"))
    assert environment["commit of cram"][:2] == ["`abc123`", "`abc123`"]
    assert environment["device"][:2] == ["Toy GPU", "Other GPU"]
    assert environment["precision"] == ["bfloat16", "float16", "–"]


def test_runs_of_different_models_are_not_reported_as_one(store):
    with pytest.raises(InputError, match=r"different models: pretrain/00000000000a, pretrain/00000000000b"):
        written([finetuned("cola", 50.0), finetuned("rte", 50.0, model=lineage("b"))])


def test_a_run_from_a_finetuned_model_goes_back_to_the_pretrained_one(store):
    mnli = finetuned("mnli", 80.0, protocol="modern")
    runs = [finetuned("cola", 50.0), finetuned("rte", 70.0, before=mnli, protocol="modern", start="mnli")]
    assert written(runs)[1]["pretrained"] == MODEL
    other = finetuned("mnli", 80.0, protocol="modern", model=lineage("b"))
    with pytest.raises(InputError, match="different models"):
        written([runs[0], finetuned("rte", 71.0, before=other, protocol="modern", start="mnli")])


def test_one_run_given_twice_or_unlike_runs_make_no_median(store):
    run = finetuned("cola", 50.0)
    with pytest.raises(InputError, match="one setting"):
        written([run, run])
    with pytest.raises(InputError, match="differ in their seed only"):
        written([run, finetuned("cola", 51.0, seed=9, epochs=2)])
    assert written([run, finetuned("cola", 51.0, seed=1, keep=True, test=False)])[1]["scores"][0]["seeds"] == 2


def test_runs_with_and_without_test_data_are_of_one_setting(store):
    files = {"train": ["a"], "validation": ["b"]}
    runs = [
        finetuned("cola", 50.0, data=files),
        finetuned("cola", 51.0, seed=1, test=True, data=files | {"test": ["c"]}),
    ]
    (row,) = written(runs)[1]["scores"]
    assert row["seeds"] == 2
    assert row["data"] == written(runs[:1])[1]["scores"][0]["data"] == written(runs[1:])[1]["scores"][0]["data"]
    with pytest.raises(InputError, match="differ in their seed only"):
        written([runs[0], finetuned("cola", 51.0, seed=2, data=files | {"validation": ["d"]})])


def test_a_run_of_an_older_version_is_refused_with_a_sentence(store):
    old = made("finetune/0123456789ab", {"stats": {"task": "cola", "seed": 0}, "params": {}, "inputs": {}}, {})
    with pytest.raises(InputError, match="older version of cram"):
        written([old])


def test_the_card_beside_the_report_has_the_scores(whole):
    text = (whole[2] / "README.md").read_text()
    assert text.startswith("---\nlibrary_name:")
    assert "## GLUE by the rules of cramming" in text
    assert "## GLUE by today's protocol (not by the rules)" in text
    assert text.index("## GLUE") < text.index("## Limits")
    assert ".svg" not in text


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


def test_files_for_the_leaderboard_are_those_of_the_median_seed(store):
    runs = [with_test("rte", score, seed) for seed, score in enumerate((60.0, 50.0, 70.0))]
    page, _, folder = written(runs)
    lines = (folder / "submission" / "cramming" / "RTE.tsv").read_text().splitlines()
    assert lines[:3] == ["index\tprediction", "0\tentailment", "1\tnot_entailment"]  # seed 0
    assert len(lines) == 3001
    assert not (folder / "submission" / "modern").exists()
    assert "protocol cramming, in submission/cramming: RTE.tsv, submission.zip" in page


def test_test_data_that_is_not_whole_is_told_and_the_rest_is_written(store):
    page, _, folder = written([with_test("rte", 60.0, 0), with_test("cola", 50.0, 0, rows=7)])
    assert "7 rows, but the official test split has 1,063 rows" in page
    assert not (folder / "submission" / "cramming" / "CoLA.tsv").exists()
    assert (folder / "submission" / "cramming" / "RTE.tsv").exists()
    assert "leaderboard" not in written([finetuned("cola", 60.0)])[0]


# On what the stages really write


@pytest.fixture(scope="module")
def real(tmp_path_factory, toy_texts: list[str]) -> dict:
    """A tiny model, its finetuning runs on probes, and their report."""
    root = tmp_path_factory.mktemp("real")
    tiny = Pretrain(architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}, budget=10_000,
                    budget_unit="tokens", batch_size=8, learning_rate=5e-3)  # fmt: skip
    with store_of_its_own(root / "artifacts"):
        bert = pretrain.fn(tiny, toy_tokens(root, toy_texts)["tokens"])
        asked = Finetune(
            data="probes", tasks=["word-order", "neighbours"], seeds=2, epochs=1, max_tokens=32, baseline=True
        )
        runs = [finetune.fn(run, bert) for run, _ in asked.runs()]
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
        values = [
            run.stats["validation"]["validation"]["metrics"]["accuracy"]
            for run in real["runs"]
            if (run.stats["task"], run.stats["pretrained"]) == (row["task"], row["pretrained"])
        ]
        assert row["seeds"] == len(values) == 2
        assert row["score"] == pytest.approx(np.median(values), abs=0.01)


def test_the_page_of_a_real_run_has_every_section(real):
    titles = re.findall("^## (.*)$", real["page"], flags=re.M)
    assert titles == [
        "Probes (these are not GLUE)", "Rules of the game", "Recipe", "Budget", "Loss", "Throughput", "Confusion tables", "Data funnel",
        "Vocabulary", "Text of the downstream data in the corpus", "Lineage", "Every run", "Environment",
    ]  # fmt: skip
    assert "Not checked, because the probes are made of held-out documents of this corpus." in real["page"]
    assert real["about"]["contamination"]["checked"] is False
    assert (real["folder"] / "README.md").read_text() == (real["pretrain"].path / "README.md").read_text()


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
    about = data_sections.contamination({corpus.name: corpus.manifest, clean.name: clean.manifest})
    page = "\n".join(data_sections.contamination_section(about))
    dropped = about["dropped"]
    assert dropped == {"drop": 2, "cut": 1}[method]
    assert f"{counted(dropped, 'document')} dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert ("characters cut from 1 document," in page) is (method == "cut")
    assert "Of 6 sentences, 3 have fewer than 14 words" in page
    assert "Not at hand, so not looked for: cola/validation, rte/validation." in page
    assert "| RTE | test | 4 | 2 |" in page
    assert json.loads(json.dumps(about)) == about


def test_a_model_of_an_older_version_is_told(store):
    older = lineage("b")
    del older["pretrain/00000000000b"]["stats"]["heldout"]
    with pytest.raises(InputError, match="pretrain/00000000000b was made by an older version of cram"):
        written([finetuned("cola", 50.0, model=older)], "old")
