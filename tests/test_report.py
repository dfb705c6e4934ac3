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
RULES, MODERN = common.TITLES.values()
UNDEFINED = "Matthews correlation is undefined and reported as 0, for all 1,043 predictions are of class 1."
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


def measured(task: str, split: str, score: float, have: int | None = None) -> dict:
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
    }


TEXTS = ("He left.", "Left he the.", "Who did you see?", "The book sleeps.")


def guesses(task: str, texts: tuple[str, ...] = TEXTS) -> pa.Table:
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


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    return page.split(f"\n## {title}\n")[1].split("\n## ")[0]


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line of the tables in a text."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables in a text, by the first cell."""
    return {line[0]: line[1:] for line in lines_of(text)}


PUBLISHED_ROWS = [row for rows in scores.PUBLISHED.values() for row in rows if len(row.scores) == 9]


@pytest.mark.parametrize("row", PUBLISHED_ROWS, ids=lambda row: row.model)
def test_the_average_of_a_published_row_is_the_published_average(row):
    exact = row.average in (80.9, 80.7)  # BERT and the released model; of the others scores and average are rounded
    assert metrics.paper_average(row.scores) == pytest.approx(row.average, abs=0.05 if exact else 0.1)


LINES = [  # a report, one of its sections, and how a line of a table in it begins
    (
        "whole",
        RULES,
        "**ours** (this run) | 80.9 | 80.7 | 83.2 | 83.4 | 91.9 | 86.7 | 59.2 | 90.6 | 87.7 | 89.3 | 56.5",
    ),
    (
        "whole",
        RULES,
        "**ours, no pretraining** (this run) | 40.0 | 40.1 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0",
    ),
    (
        "whole",
        RULES,
        "majority class or mean (this data) | – | – | 31.0 | 31.0 | 31.0 | 31.0 | 31.0 | 31.0 | 31.0 | 31.0",
    ),
    ("whole", RULES, "CoLA | Matthews | 56.5 | 54.9 to 58.1 | 54.5 to 58.5 | 31.0 | 5 | 8,551 | 1,043 | pretrained"),
    ("whole", MODERN, "**ours** (this run) | – | – | 85.0 | 85.0 | – | – | 79.0 | – | – | – | –"),
    ("whole", MODERN, "setting | MNLI | RTE"),
    ("whole", MODERN, "`epochs` | 3 | 10"),
    ("whole", MODERN, "`schedule` | linear | linear"),
    ("whole", "Learning curve", "SST-2 | 25% | 16,837 | 80.5"),
    ("whole", "Learning curve", "SST-2 | 50% | 33,674 | 84.5"),
    ("whole", "Learning curve", "SST-2 | 100% | 67,349 | 91.9"),
    ("whole", "CoLA: where it errs", "unacceptable, taken for acceptable | 2 | 2 | 100.0 | 100.0"),
    ("whole", "Confusion tables", "MNLI m, cramming: true class | predicted entailment | predicted neutral"),
    ("whole", "Confusion tables", "unacceptable | 90 | 10 | 90.0 %"),
    ("whole", "Data funnel", "filter | incompressible | 100 | 900 | books 50, web 50"),
    ("whole", "Data funnel", "deduplicate | duplicate | 50 | 400 | books 25, web 25"),
    ("whole", "Data funnel", "download | unreadable: empty text | 3 | – | –"),
    ("whole", "Data funnel", "web | 450 | 400 | 50 | 0"),
    ("whole", "Vocabulary", "entries | 32,768 (wordpiece)"),
    ("whole", "Rules of the game", "at most 5 epochs | ✗ | 3, 10"),
    ("whole", "Rules of the game", "each task on its own training data only | ✗ | started from MNLI's model: RTE"),
    ("whole", "Rules of the game", "one setting for all tasks | ✗ | differ: epochs"),
    ("whole", "Rules of the game", "the last epoch is scored | ✗"),
    ("whole", "Environment", "commit of cram | `abc123` | `abc123`"),
    ("whole", "Environment", "device | Toy GPU | Other GPU | –"),
    ("whole", "Environment", "precision | bfloat16 | float16 | –"),
    ("mixed", RULES, "**ours** (this run) | – | – | – | – | 91.9\\* | 0.0† | – | – | – | 81.2† | 48.4"),
    ("mixed", RULES, "majority class or mean (this data) | – | – | – | – | 31.0\\* | 0.4 | – | – | – | 81.6 | 31.0"),
    ("mixed", "Confusion tables", "SST-2\\*, cramming: true class | predicted negative"),
    ("mixed", RULES, "CoLA | Matthews | 48.4 | – | 46.4 to 50.4 | 31.0 | 1"),
    ("mixed", "Probes (these are not GLUE)", "word-order | 55.0 | 55.0 | 31.0"),
    ("mixed", "Probes (these are not GLUE)", "`learning_rate` | 4e-05"),
    ("mixed", "Budget", "budget | 1 minute"),
    ("mixed", "Budget", "spent | 1 minute, 13,619,200 tokens, 1 step"),
    ("mixed", "Loss", "100% | 1,000 | 9,000,000,000"),
]
WORDS = [  # a report, one of its sections (none: its head), and what it says
    ("whole", "", "- **80.9** GLUE, average of nine\n"),
    ("whole", "", "with the same finetuning: BERT-base, fully trained 80.9"),
    ("whole", RULES, "one setting for all tasks, each task trained on its own training data alone, the last epoch"),
    ("whole", MODERN, "settings by task, RTE from the model finetuned on MNLI, the epoch chosen on a tenth"),
    ("whole", MODERN, "SST-2, STS-B, QNLI, QQP, MRPC, CoLA were not run."),
    ("whole", "Recipe", "16 x 768, 12 heads, geglu, pre-norm"),
    ("whole", "CoLA: where it errs", "- Who did you see?"),
    ("whole", "Data funnel", "0.3 or more tokens per character"),
    ("mixed", "", "An encoder of 21.1 k parameters"),
    ("mixed", "", "in 1 minute on Toy GPU"),
    ("mixed", "", "**13.6 M** tokens"),
    ("mixed", "", "**42 %** MFU\n"),
    ("mixed", RULES, "MNLI m, MNLI mm, RTE, QNLI, QQP were not run and SST-2 is on partial data."),
    ("mixed", RULES, "67,349 of 67,349 train examples, 400 of 872 validation examples."),
    ("mixed", RULES, "WNLI, which is in no average: 56.3."),
    ("mixed", RULES, f"- CoLA: {UNDEFINED}"),
    ("mixed", RULES, "- MRPC: training rows that stand in validation too"),
    ("mixed", "Loss", "The model's folder is not available here"),
]


@pytest.mark.parametrize(("report", "title", "line"), LINES)
def test_tables_of_the_page_have_the_numbers(request, report, title, line):
    cells = line.split(" | ")
    assert cells in [shown[: len(cells)] for shown in lines_of(section(request.getfixturevalue(report)[0], title))]


@pytest.mark.parametrize(("report", "title", "words"), WORDS)
def test_sections_of_the_page_say_what_there_is_to_know(request, report, title, words):
    page = request.getfixturevalue(report)[0]
    assert words in (section(page, title) if title else page.split("\n## ")[0])


def test_the_averages_of_the_medians_are_the_published_ones(whole):
    official = np.mean([83.3, 91.9, 86.95, 59.2, 90.6, 87.95, 89.55, 56.5])
    means = whole[1]["averages"]
    assert round(means["cramming"]["paper"], 1) == 80.9
    assert means["cramming"]["official"] == pytest.approx(official, abs=0.01)
    assert means["modern"] == {"paper": None, "official": None}


def test_each_score_has_median_range_and_interval(whole):
    row = next(r for r in whole[1]["scores"] if r["column"] == "CoLA" and r["pretrained"])
    assert (row["score"], row["seeds"]) == (56.5, 5)
    assert row["metrics"]["matthews"] == {"median": 56.5, "range": [54.9, 58.1], "interval": [54.5, 58.5]}


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


def test_the_protocols_are_never_mixed(whole):
    cramming, modern = (section(whole[0], title) for title in common.TITLES.values())
    assert ["MosaicBERT" in text for text in (cramming, modern)] == [False, True]
    assert ["crammed BERT" in text for text in (cramming, modern)] == [True, False]


def test_what_was_run_decides_the_words_for_a_protocol_and_the_headline(store):
    page, _, _ = written([finetuned("rte", 50.0, protocol="modern")])
    assert "one setting for all tasks, each task trained on its own training data alone, the last epoch" in page
    assert "- **50.0** RTE, accuracy, protocol modern" in page


def test_the_page_and_the_card_have_the_settings_of_finetuning(whole):
    page, _, folder = whole
    settings = {f"`{name}`": value for name, value in Finetuning().model_dump().items()}
    for text in (section(page, RULES), (folder / "README.md").read_text()):
        rows = rows_of(text.split("### How it was finetuned")[1].split("\n## ")[0])
        assert {name: rows[name] for name in settings} == {
            name: [value if isinstance(value, str) else f"{value:g}"] for name, value in settings.items()
        }


def test_published_averages_are_said_to_be_finetuned_otherwise_where_they_are(store):
    page, _, _ = written(with_scores(BERT, learning_rate=2e-4, epochs=3))
    assert "(epochs 5, here 3, learning_rate 4e-05, here 0.0002): BERT-base, fully trained 80.9" in page
    assert "the same finetuning" not in page


def test_scores_on_partial_data_or_at_the_baseline_are_no_big_numbers(mixed):
    page, about, folder = mixed
    head, readme = page.split("\n## ")[0], (folder / "README.md").read_text()
    assert about["average"] is None
    assert [number for number in ("48.4", "56.3", "81.2", "0.0", "91.9") if f"**{number}**" in head] == ["48.4", "56.3"]
    assert {"CoLA", "MRPC"} <= set(re.findall("name: GLUE (.*)", readme)) <= {"CoLA", "MRPC", "STS-B", "WNLI"}
    for text in (head, (folder / "report.html").read_text(), readme):
        assert "the most frequent class: MRPC 81.2 (majority 81.6)." in text
        assert "the mean: STS-B 0.0 (majority 0.4)." in text
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


def test_probes_are_never_called_glue(store):
    page, about, _ = written([finetuned("word-order", 55.0)])
    assert "## GLUE" not in page
    assert about["average"] is None


def test_what_was_not_run_has_no_section(whole, mixed):
    assert "Learning curve" not in mixed[0]
    assert "## Throughput" not in mixed[0]
    assert "no pretraining** (this run)" not in mixed[0]
    assert "mrpc: training" not in mixed[0]
    assert "STS-B" not in section(whole[0], "Confusion tables")


def test_every_rule_is_kept_by_a_run_that_keeps_them(whole):
    kept = section(whole[0], "Rules of the game").split("### Finetuning, protocol modern")[0]
    assert [line[1] for line in lines_of(kept) if line[1] in "✓✗?"] == ["✓"] * 10


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


def test_curves_are_drawn_from_the_models_folder_if_it_is_there(whole, mixed):
    texts = {path.name: path.read_text() for path in whole[2].glob("*.svg")}
    assert texts.keys() == {"scores.svg", "curve.svg", "funnel.svg", "loss.svg", "speed.svg"}
    assert ">training<" in texts["loss.svg"]
    assert "tokens per second" in texts["speed.svg"]
    assert ">training<" not in (mixed[2] / "loss.svg").read_text()
    assert not (mixed[2] / "speed.svg").exists()


def test_lineage_and_runs_are_listed(whole):
    page, about, _ = whole
    assert about["pretrained"] == MODEL
    for name in about["artifacts"]:
        assert f"[{name}](../../{name}/)" in page, name


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
    page, about = render("contamination", common.HELPERS | values), values["contamination"]
    assert about["dropped"] == dropped
    assert f"{counted(dropped, 'document')} dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert ("characters cut from 1 document," in page) is (method == "cut")
    assert "3 of 6 sentences have fewer than 14 words" in page
    assert "cola/validation, rte/validation" in page
    assert rows_of(page)["RTE"][:3] == ["test", "4", "2"]
    assert json.loads(json.dumps(about)) == about
