"""The report, on hand-made artifacts: scores, data, rules and lineage."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, store_of_its_own, toy_tokens
from huggingface_hub import ModelCard

from model import InputError
from model.quantities import counted
from model.settings import Finetuning
from tasks import store as store_module
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate
from tasks.download import Download
from tasks.filter import Filter
from tasks.finetune import Finetune, finetune
from tasks.glue import metrics
from tasks.glue.tasks import GLUE, TASKS
from tasks.pretrain import Pretrain, pretrain
from tasks.report import Report, report, settings_of
from tasks.reports import common, data_sections, rules, scores
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
    "documents": 10, "tokens": 25, "words": 20, "characters": 120, "bytes": 125, "unread_bytes": 5, "digest": "d1",
    "unread": 0.04, "length_nats_per_byte": 0.05, "nats_per_word": {"value": 2.1, "standard_error": 0.05},
    "nats_per_character": {"value": 0.5, "standard_error": 0.0125},
    "nats_per_byte": {"value": 0.48, "standard_error": 0.012},
}  # fmt: skip


def counts(documents: int, characters: int) -> dict:
    half = {"documents": documents // 2, "characters": characters // 2}
    return {"documents": documents, "characters": characters, "by_source": {"books": half, "web": half}}


def lineage(key: str = "a", decontamination: dict | None = None, **changes) -> dict[str, dict]:
    """The manifests of a pretrained artifact and of all that led to it; `changes`: of the statistics of pretraining."""
    filtered = [
        {"source": name, "documents": n, "kept": n - n // 9, "incompressible": n // 9, "no tokens": 0,
         "characters": 9 * n, "characters kept": 8 * n, "kept, % of documents": 88.9, "median tokens_per_char": 0.2345}
        for name, n in (("all", 900), ("books", 450), ("web", 450))
    ]  # fmt: skip
    found_in = {"splits": ["test"], "sentences": 9, "too_short": 4, "ngrams": 50, "sentences_found": 1, "documents": 2}
    evaluations = [
        {"fraction": f, "step": int(1000 * f), "tokens": int(9e9 * f), "seconds": 86_390.0 * f,
         "heldout_loss": 9.1 - 7 * f, "heldout_nats_per_byte": 2.48 - 2 * f} for f in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    pretraining = {
        "parameters": 119_589_889, "steps": 1000, "tokens": 9_000_000_000, "epochs": 1.25, "exaflops": 5.6,
        "seconds_on_the_clock": 86_390.0, "tokens_per_second": 104_178.0, "mfu": 0.42, "heldout_loss": 2.1,
        "heldout": HELDOUT, "skipped": [], "evaluations": evaluations,
        "machine": {"device": "Toy GPU", "dtype": "bfloat16", "compiled": True, "gpus": 1, "micro_batch": 64},
    } | changes  # fmt: skip
    stages = {
        "download": (Download(), counts(1000, 9000) | {"lost": {"empty text": 3}}),
        "deduplicate": (Deduplicate(), counts(950, 8600) | {"dropped": {"duplicate": counts(50, 400)}}),
        "decontaminate": (Decontaminate(), counts(900, 8100) | {
            "dropped": {"contaminated": counts(50, 500)}, "checked": True, "words": 13, "not_at_hand": ["cola/test"],
            "documents_found": 50, "tasks": dict.fromkeys(GLUE, found_in)} | (decontamination or {})),
        "filter": (Filter(), counts(800, 7200) | {
            "dropped": {"incompressible": counts(100, 900), "no tokens": counts(0, 0)},
            "measured_with": {"tokens_kept": 1700}, "table": filtered}),
        "vocabulary": (Vocabulary(), {
            "entries": 32768, "whole_words": 25835, "continuations": 6928, "unused": 12,
            "trained_on": {"documents": 800, "characters": 7200, "different_words": 700},
            "table": [{"kind": "letters", "entries": 30000, "unused": 10, "% of tokens": 81.5}]}),
        "tokenize": (Tokenize(), {
            "documents": 780, "characters": 7000, "tokens": 1600, "sequences": 12, "characters_per_token": 4.375,
            "unknown_tokens": 3, "heldout": {"documents": 20, "characters": 200, "tokens": 45, "measured": {
                "documents": 10, "characters": 120, "bytes": 125, "tokens": 25, "sequences": 1}}}),
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


def measured(task: str, split: str, score: float, have: int | None, notes: tuple[str, ...], weak: bool) -> dict:
    """What a finetune stage says of a split."""
    about, official = TASKS[task], TASKS[task].validation[split]
    values = {metric: round(score + 0.5 * i, 4) for i, metric in enumerate(about.metrics)}
    n = about.classes
    return {
        "examples": official if have is None else have,
        "official_examples": official,
        "metrics": values,
        "intervals": {metric: [round(value - 2, 4), round(value + 2, 4)] for metric, value in values.items()},
        "notes": list(notes),
        "majority": {metric: value + 0.4 if weak else 31.0 for metric, value in values.items()},
        "confusion": None if n == 1 else [[90 if i == j else 10 for j in range(n)] for i in range(n)],
    }


def guesses(task: str) -> pa.Table:
    """Predictions of each validation split, with two classes: all are of the second."""
    texts = ["He left.", "Left he the.", "Who did you see?", "The book sleeps."]
    rows = {"row": range(4), "label": [0, 1, 0, 1], "prediction": [1] * 4, "scores": [[0.0, 1.0 + i] for i in range(4)]}
    rows |= dict.fromkeys(TASKS[task].columns, texts)
    return pa.concat_tables(pa.table({"split": [split] * 4} | rows) for split in TASKS[task].validation)


def finetuned(
    task: str,
    score: float | dict[str, float],
    seed: int = 0,
    model: dict[str, dict] | None = None,
    have: int | None = None,
    predictions: pa.Table | None = None,
    before: Artifact | None = None,
    notes: tuple[str, ...] = (),
    weak: bool = False,
    **params,
) -> Artifact:
    """A finetune artifact with this score (of each split of MNLI, if a dict).

    `before`: the run it starts from; `weak`: no better than the majority baseline, and its data has a note.
    """
    manifests, about = model or lineage(), TASKS[task]
    settings = Finetuning().model_dump(mode="json") | {
        "data": {"repository": "nyu-mll/glue", "revision": "1"}, "task": task, "seed": seed, "protocol": "cramming",
        "pretrained": True, "share": 1.0, "start": "pretrained", "test": False, "keep": False,
    } | params  # fmt: skip
    start = next(name for name in manifests if name.startswith("pretrain/"))
    if before:
        start, manifests = before.name, json.loads((before.path / LINEAGE).read_text()) | {before.name: before.manifest}
    of_split = score if isinstance(score, dict) else dict.fromkeys(about.validation, score)
    validation = {split: measured(task, split, value, have, notes, weak) for split, value in of_split.items()}
    of_data = [f"{task}: training rows that stand in validation too: 2 (rows 3 and 4)."] if weak else []
    stats = {
        "task": task, "seed": seed, "protocol": settings["protocol"], "pretrained": settings["pretrained"],
        "share": settings["share"], "metric": about.metrics[0], "head": "tanh",
        "machine": {"device": "Other GPU", "dtype": "float16", "compiled": False}, "train_examples": about.train,
        "official_train_examples": about.train, "steps": 100, "seconds_of_training": 12.0, "examples_per_second": 321.0,
        "chosen_epoch": settings["epochs"], "epochs": [],
        "data": {"left_out": {}, "shared": {}, "duplicates": 0, "cut": dict.fromkeys(of_split, 0), "notes": of_data},
        "validation": validation,
    }  # fmt: skip
    manifest = {"stage": "finetune", "params": settings, "inputs": {"start": start}, "stats": stats, "seconds": 15.0,
                "finished": "2026-11-21T12:00:00.000+00:00"}  # fmt: skip
    key = hashlib.sha256(json.dumps([settings, validation, start]).encode()).hexdigest()[:12]
    files = {LINEAGE: json.dumps(manifests), "predictions.parquet": predictions or guesses(task)}
    return made(f"finetune/{key}", manifest, files)


def with_scores(values: dict[str, float], seeds: int = 1, spread: float = 0.0, **changes) -> list[Artifact]:
    """Runs whose medians are these, by column; none of tasks without values."""
    runs = []
    for task in GLUE:
        splits = {split: values[name] for name, (of, split) in metrics.COLUMNS.items() if of == task and name in values}
        for seed in range(seeds if splits else 0):
            away = spread * (seed - (seeds - 1) / 2)
            runs.append(finetuned(task, {s: round(v + away, 4) for s, v in splits.items()}, seed, **changes))
    return runs


def written(runs: list[Artifact], title: str = "ours") -> tuple[str, dict, Path]:
    """The report's Markdown, its JSON, and where it is."""
    folder = report.fn(Report(title=title), runs).path
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text()), folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report with everything: both protocols, five seeds, no pretraining, a share of the data, metrics of steps."""
    with store_of_its_own(tmp_path_factory.mktemp("whole") / "artifacts"):
        runs = with_scores(BERT, seeds=5, spread=0.8)
        runs += with_scores(dict.fromkeys(BERT, 40.0), pretrained=False)
        runs += [finetuned("sst2", score, i, share=0.25) for i, score in enumerate((84.0, 81.0, 79.0, 82.0))]
        settings = {"protocol": "modern", "schedule": "linear", "choose": "best", "head": "native"}
        mnli = finetuned("mnli", 85.0, epochs=3, **settings)
        rte = (finetuned("rte", 78.0 + i, i, before=mnli, start="mnli", epochs=10, **settings) for i in range(3))
        n = 1000
        steps = {name: np.linspace(1, 5, n) for name in ("loss", "lr", "tokens", "seconds", "tokens_per_second", "mfu")}
        made(MODEL, lineage()[MODEL], {"metrics.parquet": pa.table({"step": range(1, n + 1)} | steps)})
        yield written([*runs, mnli, *rte])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report of one seed on some tasks: partial data, scores at the baseline, WNLI, a probe; no metrics of steps."""
    with store_of_its_own(tmp_path_factory.mktemp("mixed") / "artifacts"):
        model = lineage(steps=1, seconds_on_the_clock=60.02, tokens=13_619_200, parameters=21_120)
        model[MODEL]["params"]["budget"] = 1 / 60
        runs = [finetuned("cola", 48.4, model=model, notes=(UNDEFINED,)), finetuned("wnli", 56.3, model=model)]
        runs += [finetuned("sst2", 91.9, have=400, model=model)]
        runs += [finetuned(task, score, weak=True, model=model) for task, score in (("mrpc", 81.2), ("stsb", 0.0))]
        runs += [finetuned("word-order", 55.0, pretrained=kind, model=model) for kind in (True, False)]
        yield written(runs)


def section(page: str, title: str) -> str:
    """The text under a heading of the second level; without a title, the text above all of them."""
    text = page.split(f"\n## {title}\n")[1] if title else page
    return text.split("\n## ")[0]


def lines_of(text: str) -> list[list[str]]:
    """The cells of each line of the tables in a text."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each line of the tables in a text, by the first cell."""
    return {line[0]: line[1:] for line in lines_of(text)}


SHOWN = {  # by report and section (none: the head): words of its text, and how lines of its tables begin
    ("whole", ""): ["- **80.9** GLUE, average of nine\n", "with the same finetuning: BERT-base, fully trained 80.9"],
    ("whole", RULES): [
        "one setting for all tasks, each task trained on its own training data alone, the last epoch",
        "**ours** (this run) | 80.9 | 80.7 | 83.2 | 83.4 | 91.9 | 86.7 | 59.2 | 90.6 | 87.7 | 89.3 | 56.5",
        "**ours, no pretraining** (this run) | 40.0 | 40.1 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0 | 40.0",
        "CoLA | Matthews | 56.5 | 54.9 to 58.1 | 54.5 to 58.5 | 31.0 | 5 | 8,551 | 1,043 | pretrained",
    ],
    ("whole", MODERN): [
        "settings by task, RTE from the model finetuned on MNLI, the epoch chosen on a tenth",
        "SST-2, STS-B, QNLI, QQP, MRPC, CoLA were not run.",
        "**ours** (this run) | – | – | 85.0 | 85.0 | – | – | 79.0 | – | – | – | –",
        "setting | MNLI | RTE",
        "`epochs` | 3 | 10",
    ],
    ("whole", "Rules of the game"): [
        "at most 5 epochs | ✗ | 3, 10",
        "each task on its own training data only | ✗ | started from MNLI's model: RTE",
        "one setting for all tasks | ✗ | differ: epochs",
        "the last epoch is scored | ✗",
    ],
    ("whole", "Learning curve"): ["SST-2 | 25% | 16,837 | 81.5 | 79.0 to 84.0", "SST-2 | 100% | 67,349 | 91.9"],
    ("whole", "CoLA: where it errs"): [
        "unacceptable, taken for acceptable | 2 | 2 | 100.0 | 100.0",
        "- Who did you see?",
    ],
    ("whole", "Confusion tables"): ["unacceptable | 90 | 10 | 90.0 %"],
    ("whole", "Data funnel"): [
        "filter | incompressible | 100 | 900 | books 50, web 50",
        "download | unreadable: empty text | 3 | – | –",
        "web | 450 | 400 | 50 | 0",
        "0.3 or more tokens per character",
    ],
    ("whole", "Vocabulary"): ["entries | 32,768 (wordpiece)"],
    ("whole", "Environment"): ["commit of cram | `abc123` | `abc123`", "device | Toy GPU | Other GPU | –"],
    ("mixed", ""): ["An encoder of 21.1 k parameters", "in 1 minute on Toy GPU", "**13.6 M** tokens", "**42 %** MFU\n"],
    ("mixed", RULES): [
        "MNLI m, MNLI mm, RTE, QNLI, QQP were not run and SST-2 is on partial data.",
        "67,349 of 67,349 train examples, 400 of 872 validation examples.",
        "WNLI, which is in no average: 56.3.",
        f"- CoLA: {UNDEFINED}",
        "- MRPC: training rows that stand in validation too",
        "**ours** (this run) | – | – | – | – | 91.9\\* | 0.0† | – | – | – | 81.2† | 48.4",
        "majority class or mean (this data) | – | – | – | – | 31.0\\* | 0.4 | – | – | – | 81.6 | 31.0",
        "CoLA | Matthews | 48.4 | – | 46.4 to 50.4 | 31.0 | 1",
    ],
    ("mixed", "Confusion tables"): ["SST-2\\*, cramming: true class | predicted negative"],
    ("mixed", "Probes (these are not GLUE)"): ["word-order | 55.0 | 55.0 | 31.0", "`learning_rate` | 4e-05"],
    ("mixed", "Budget"): ["spent | 1 minute, 13,619,200 tokens, 1 step"],
    ("mixed", "Loss"): ["100% | 1,000 | 9,000,000,000", "The model's folder is not available here"],
}


@pytest.mark.parametrize(("report", "title"), SHOWN)
def test_sections_of_the_page_have_the_numbers_and_say_what_there_is_to_know(request, report, title):
    text = section(request.getfixturevalue(report)[0], title)
    lines = lines_of(text)
    for expected in SHOWN[report, title]:
        cells = expected.split(" | ")
        assert expected in text or cells in [line[: len(cells)] for line in lines], expected


def test_what_was_not_run_has_no_section(whole, mixed):
    for words in ("Learning curve", "## Throughput", "no pretraining** (this run)", "mrpc: training"):
        assert words not in mixed[0]
    assert "STS-B" not in section(whole[0], "Confusion tables")


def test_of_an_even_number_of_seeds_the_interval_is_that_of_the_lower_one_in_the_middle(whole):
    row = next(row for row in whole[1]["scores"] if row["share"] == 0.25)
    assert (row["score"], row["by_seed"]) == (81.5, {"0": 84.0, "1": 81.0, "2": 79.0, "3": 82.0})
    assert row["metrics"]["accuracy"]["interval"] == [79.0, 83.0]


@pytest.mark.parametrize(("score", "shown"), [(51.8486, "51.8"), (51.85, "51.9")])
def test_page_and_terminal_round_a_score_alike(store, score, shown):
    page, about, folder = written([finetuned("word-order", score)])
    table = json.loads((folder / "stage.json").read_text())["stats"]["table"]
    assert (about["scores"][0]["score"], str(table[0]["score"])) == (score, shown)
    [row] = (line for line in lines_of(section(page, "Probes (these are not GLUE)")) if line[0] == "word-order")
    assert row[1] == shown


@pytest.mark.parametrize("protocol", scores.PUBLISHED)
def test_a_protocol_stands_beside_its_own_published_rows_with_their_sources(whole, protocol):
    text = section(whole[0], common.TITLES[protocol])
    for of_protocol, rows in scores.PUBLISHED.items():
        for row in rows:
            marked = re.search(rf"\| \*{re.escape(row.model)}\* \(published \\\[\d\\\]\) +\|", text)
            assert (bool(marked), row.source in text) == (of_protocol == protocol,) * 2, row.model


def test_what_was_run_and_is_known_decides_the_words_for_a_protocol_and_the_headline(store):
    alone = {MODEL: lineage()[MODEL]}  # without the manifests of the data
    page, _, _ = written([finetuned("rte", 50.0, protocol="modern", model=alone)])
    assert "the vocabulary's manifest is missing" in page
    assert "one setting for all tasks, each task trained on its own training data alone, the last epoch" in page
    assert "- **50.0** RTE, accuracy, protocol modern" in page
    page, _, _ = written(with_scores(BERT, learning_rate=2e-4, epochs=3))
    assert "(epochs 5, here 3, learning_rate 4e-05, here 0.0002): BERT-base, fully trained 80.9" in page
    page, about, _ = written(with_scores(BERT, weak=True))
    assert about["average"] == pytest.approx(80.9, abs=0.05)
    assert "GLUE, average of nine" not in page, "none of these scores beats the baseline"


def test_scores_on_partial_data_or_at_the_baseline_are_no_big_numbers(mixed):
    page, about, folder = mixed
    head, readme = section(page, ""), (folder / "README.md").read_text()
    assert about["average"] is None
    assert re.findall(r"\*\*(48.4|56.3|81.2|0.0|91.9)\*\*", head) == ["48.4", "56.3"]
    assert set(re.findall("name: GLUE (.*)", readme)) == {"CoLA", "MRPC", "STS-B", "WNLI"}
    for text in (head, (folder / "report.html").read_text(), readme):
        assert "the most frequent class: MRPC 81.2 (majority 81.6)." in text
        assert "the mean: STS-B 0.0 (majority 0.4)." in text
    table = {row["task"]: row for row in json.loads((folder / "stage.json").read_text())["stats"]["table"]}
    assert [table[name]["verdict"] == "" for name in ("MRPC", "STS-B", "CoLA")] == [False, False, True]
    assert (table["MRPC"]["score"], table["MRPC"]["majority"]) == (81.2, 81.6)


def test_runs_that_do_not_say_what_the_head_read_are_reported_as_reading_cls():
    manifest = finetuned("cola", 20.0).manifest
    older = {name: value for name, value in manifest["params"].items() if name != "pooling"}
    (found,) = settings_of([manifest | {"params": older}])["cramming"]
    assert found == manifest["params"] | {"head": "tanh"}


def test_the_page_and_the_card_have_the_settings_of_finetuning(whole):
    page, _, folder = whole
    settings = {f"`{name}`": value for name, value in Finetuning().model_dump().items()}
    shown = {name: [value if isinstance(value, str) else f"{value:g}"] for name, value in settings.items()}
    for text in (section(page, RULES), section((folder / "README.md").read_text(), RULES)):
        assert shown.items() <= rows_of(text.split("### How it was finetuned")[1]).items()


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
def test_a_rule_that_is_broken_or_unknown_is_marked_with_the_fact(changes, rule, verdict, fact):
    model = lineage(**changes)
    if changes.get("decontamination", ...) is None:
        del model["decontaminate/00000000000a"]
    rows = {row[0]: row[1:] for row in rules.rules(model, model[MODEL], {"cola"})}
    assert rows[rule][0] == verdict
    assert fact in rows[rule][1]
    assert all(row[0] == "✓" for name, row in rows.items() if name not in (rule, TEXT))


def test_a_second_loss_breaks_the_rule_of_masked_language_modelling():
    model = lineage()
    usual = rules.rules(model, model[MODEL], {"cola"})
    detecting = model[MODEL] | {"params": model[MODEL]["params"] | {"detection": 2.5}}
    first, *others = rules.rules(model, detecting, {"cola"})
    assert (usual[0][1], first[1]) == ("✓", "✗")
    assert "2.5" in first[2]
    assert others == usual[1:]


def test_curves_are_drawn_from_the_models_folder_if_it_is_there(whole, mixed):
    drawn, without = ({path.name: path.read_text() for path in about[2].glob("*.svg")} for about in (whole, mixed))
    assert drawn.keys() == {"scores.svg", "curve.svg", "funnel.svg", "loss.svg", "speed.svg"}
    assert "tokens per second" in drawn["speed.svg"]
    assert [">training<" in texts["loss.svg"] for texts in (drawn, without)] == [True, False]
    assert "speed.svg" not in without


def test_the_card_beside_the_report_has_the_scores(whole):
    text = (whole[2] / "README.md").read_text()
    assert text.index(f"## {RULES}") < text.index(f"## {MODERN}") < text.index("## Limits")
    assert ".svg" not in text
    results = ModelCard(text, ignore_metadata_errors=False).data.eval_results
    found = {(r.dataset_config, r.dataset_split, r.metric_type, r.metric_value) for r in results}
    assert {("cola", "validation", "matthews_correlation", 56.5), ("mnli", "validation_mismatched", "accuracy", 85.0),
            ("mnli", "validation_mismatched", "accuracy", 83.4)} <= found  # fmt: skip
    assert 40.0 not in {r.metric_value for r in results}


FILES = {"train": ["a"], "validation": ["b"]}


def test_runs_that_make_no_report_are_refused_by_name(store):
    cola, other, older = finetuned("cola", 50.0, data=FILES), lineage("b"), lineage("c")
    mnli = finetuned("mnli", 80.0, protocol="modern", model=other)
    del older["pretrain/00000000000c"]["stats"]["heldout"]
    refused = [
        ([cola, finetuned("rte", 50.0, model=other)], "different models: pretrain/00000000000a, pretrain/00000000000b"),
        ([cola, finetuned("rte", 71.0, before=mnli, protocol="modern", start="mnli")], "different models"),
        ([cola, cola], "cola by protocol cramming"),
        ([cola, finetuned("cola", 51.0, seed=9, data=FILES, epochs=2)], "cola by protocol cramming"),
        ([cola, finetuned("cola", 51.0, seed=2, data=FILES | {"validation": ["d"]})], "cola by protocol cramming"),
        (
            [made("finetune/0123456789ab", {"stats": {"task": "cola"}}, {})],
            "finetune/0123456789ab was made by an older",
        ),
        ([finetuned("cola", 50.0, model=older)], "pretrain/00000000000c was made by an older version"),
    ]
    for runs, named in refused:
        with pytest.raises(InputError, match=named):
            written(runs)


def test_runs_that_differ_in_test_data_or_kept_models_or_begin_at_mnli_make_one_report(store):
    tested = {"keep": True, "test": True, "data": FILES | {"test": ["c"]}}
    runs = [finetuned("cola", 50.0, data=FILES), finetuned("cola", 51.0, seed=1, **tested)]
    mnli = finetuned("mnli", 80.0, protocol="modern")
    behind = finetuned("rte", 70.0, before=mnli, protocol="modern", start="mnli")
    _, about, _ = written([*runs, behind])
    assert (about["pretrained"], about["scores"][0]["seeds"]) == (MODEL, 2)
    assert {scores.gather(scores.groups([run]))[0]["data"] for run in runs} == {about["scores"][0]["data"]}


def with_test(task: str, score: float, seed: int, rows: int) -> Artifact:
    """A run that predicted the test data too, of which so many rows are there, the last one first: each as its seed."""
    numbers = range(rows - 1, -1, -1)
    found = {"split": ["test"] * rows, "row": numbers, "label": pa.nulls(rows, pa.int64())}
    found |= {"prediction": [(seed + i) % 2 for i in numbers], "scores": [[0.0, 0.0]] * rows}
    tested = pa.table(found | {name: ["x"] * rows for name in TASKS[task].columns})
    return finetuned(task, score, seed, predictions=pa.concat_tables([guesses(task), tested]), test=True)


def test_files_for_the_leaderboard_are_those_of_the_median_seed_and_of_whole_test_data(store):
    runs = [with_test("rte", score, seed, rows=3000) for seed, score in enumerate((60.0, 50.0, 70.0))]
    page, _, folder = written([*runs, with_test("cola", 50.0, 0, rows=7)])
    files = {str(path.relative_to(folder / "submission")) for path in (folder / "submission").rglob("*.*")}
    assert files == {"cramming/RTE.tsv", "cramming/submission.zip"}
    lines = (folder / "submission" / "cramming" / "RTE.tsv").read_text().splitlines()
    assert lines[:3] == ["index\tprediction", "0\tentailment", "1\tnot_entailment"]  # seed 0
    assert len(lines) == 3001
    text = section(page, "Files for GLUE's leaderboard")
    assert "protocol cramming, in submission/cramming: RTE.tsv, submission.zip" in text
    assert "7 rows, but the official test split has 1,063 rows" in text


# On what the stages really write


def test_a_real_run_on_a_probe_has_every_section_a_funnel_that_adds_up_and_nothing_called_glue(
    store, tmp_path, toy_texts
):
    tiny = Pretrain(architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}, budget=10_000,
                    budget_unit="tokens", batch_size=8, learning_rate=5e-3)  # fmt: skip
    probe = Finetune(data="probes", tasks=["neighbours"], seeds=1, epochs=1, max_tokens=32, baseline=True)
    bert = pretrain.fn(tiny, toy_tokens(tmp_path, toy_texts)["tokens"])
    page, about, folder = written([finetune.fn(run, bert) for run, _ in probe.runs()])
    assert re.findall("^## (.*)$", page, flags=re.M) == [
        "Probes (these are not GLUE)", "Rules of the game", "Recipe", "Budget", "Loss", "Throughput",
        "Confusion tables", "Data funnel", "Vocabulary", "Text of the downstream data in the corpus", "Lineage",
        "Every run", "Environment",
    ]  # fmt: skip
    assert about["average"] is None
    assert about["contamination"]["checked"] is False
    passed = {row["stage"]: row["documents"] for row in about["funnel"]}
    assert (passed["download"], passed["deduplicate"], passed["decontaminate"]) == (301, 300, 300)
    assert passed["tokenize"] + passed["held out"] == passed["filter"]
    for name in about["artifacts"]:
        assert f"[{name}](../../{name}/)" in page
        assert (store / name / "stage.json").exists()
    assert (folder / "README.md").read_text() == (bert.path / "README.md").read_text()


@pytest.mark.parametrize(("method", "dropped"), [("drop", 2), ("cut", 1)])
def test_the_report_says_which_downstream_data_was_in_the_text(store, tmp_path: Path, toy_texts, method, dropped):
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    for task, columns in (("cola", ("sentence",)), ("rte", ("sentence1", "sentence2"))):
        (tmp_path / "glue" / task).mkdir(parents=True)
        rows = {column: [f"{task} {column} {sentence}", "short"] for column in columns}
        pq.write_table(pa.table(rows), tmp_path / "glue" / task / "test.parquet")
    texts = [*toy_texts[:9], f"rte sentence1 {sentence}", f"{toy_texts[9]} cola sentence {sentence}"]
    asked = Decontaminate(data=str(tmp_path / "glue"), method=method, words=14, tasks=["cola", "rte"])
    clean = decontaminate.fn(asked, corpus_of(tmp_path, texts))
    values = data_sections.text_sections({clean.name: clean.manifest})
    page, about = render("contamination", common.HELPERS | values), values["contamination"]
    assert about["dropped"] == dropped
    assert f"{counted(dropped, 'document')} dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert ("characters cut from 1 document," in page) is (method == "cut")
    assert "3 of 6 sentences have fewer than 14 words" in page
    assert "cola/validation, rte/validation" in page
    assert rows_of(page)["RTE"][:3] == ["test", "4", "2"]
    assert json.loads(json.dumps(about)) == about
