"""The report, on hand-made artifacts: scores, data, rules and lineage."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import check_golden, corpus_of, store_of_its_own

from model.errors import InputError
from model.settings import Finetuning
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.deduplicate import Deduplicate
from tasks.download import Download
from tasks.filter import Filter
from tasks.glue import metrics
from tasks.glue.table import GLUE, TASKS
from tasks.pretrain import Pretrain
from tasks.report import Report, report
from tasks.reports import funnel, rules, scores, sections
from tasks.reports.cards import about_text
from tasks.reports.markdown import render
from tasks.reports.model_card import card
from tasks.reports.published import PAPER
from tasks.store.artifacts import LINEAGE, Artifact, draft_of
from tasks.store.publish import publish
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

ENVIRONMENT = {
    "python": "3.11.1", "packages": {"torch": "2.13.0", "numpy": "2.4"}, "commit": "abc123",
    "machine": {"system": "Linux", "cores": 2},
}  # fmt: skip
BERT = PAPER[0].scores
MODEL = "pretrain/00000000000a"
RULES = "GLUE by the rules of cramming"
UNDEFINED = "Matthews correlation is undefined and reported as 0, for all 1,043 predictions are of class 1."
HELDOUT = {
    "documents": 10, "tokens": 2500, "words": 2000, "characters": 12_000, "bytes": 12_500, "unread_bytes": 500,
    "digest": "d1",
    "unread": 0.04, "length_nats_per_byte": 0.05, "nats_per_word": {"value": 2.1, "standard_error": 0.05},
    "nats_per_character": {"value": 0.5, "standard_error": 0.0125},
    "nats_per_byte": {"value": 0.48, "standard_error": 0.012},
}  # fmt: skip

CONFUSION = {2: [[0, 1], [0, 3]], 3: [[0, 1, 0], [0, 3, 0], [0, 0, 0]]}  # by classes: all answers are the second
SHARED = {"words_in_a_row": 13, "share_of_documents": 0.0, "share_of_words": 0.0}


def counts(documents: int, characters: int) -> dict:
    half = {"documents": documents // 2, "characters": characters // 2}
    return {"documents": documents, "characters": characters, "by_source": {"books": half, "web": half}}


def lineage(key: str = "a", decontamination: dict | None = None, **changes) -> dict[str, dict]:
    """The manifests of a pretrained artifact and of all that led to it; `changes`: of the statistics of pretraining."""
    found_in = {"splits": ["test"], "sentences": 9, "too_short": 4, "ngrams": 50, "sentences_found": 1, "documents": 2}
    evaluations = [
        {"fraction": f, "step": int(1000 * f), "tokens": int(9e9 * f), "seconds": 86_390.0 * f,
         "heldout_loss": 9.1 - 7 * f, "heldout_nats_per_byte": 2.48 - 2 * f} for f in (0.0, 0.5, 1.0)
    ]  # fmt: skip
    pretraining = {
        "parameters": 119_589_889, "steps": 1000, "tokens": 9_000_000_000, "epochs": 1.25, "exaflops": 5.6,
        "seconds_on_the_clock": 86_390.0, "tokens_per_second": 104_178.0, "mfu": 0.42, "heldout_loss": 2.1,
        "heldout": HELDOUT, "evaluations": evaluations,
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
            "measured_with": {"tokens_kept": 1700}}),
        "vocabulary": (Vocabulary(), {}),
        "tokenize": (Tokenize(), {
            "documents": 780, "characters": 7000, "tokens": 1600, "sequences": 12,
            "heldout": counts(20, 200) | {
                "tokens": 45, "shared": counts(5, 50) | SHARED | {"share_of_documents": 0.25, "share_of_words": 0.125},
                "measured": counts(10, 120) | {"tokens": 25, "sequences": 1, "shared": counts(0, 0) | SHARED}}}),
        "pretrain": (Pretrain(), pretraining),
    }  # fmt: skip
    found = {}
    before = {}
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
    draft = draft_of(artifact)
    draft.mkdir(parents=True)
    for file, content in files.items():
        pq.write_table(content, draft / file) if isinstance(content, pa.Table) else (draft / file).write_text(content)
    publish(draft, artifact, {"version": 1, "key": artifact.key, "environment": ENVIRONMENT} | manifest)
    return artifact


def measured(task: str, split: str, score: float, have: int | None, notes: tuple[str, ...], weak: bool) -> dict:
    """What a finetune stage says of a split."""
    about = TASKS[task]
    official = TASKS[task].validation[split]
    values = {metric: round(score + 0.5 * i, 4) for i, metric in enumerate(about.metrics)}
    return {
        "examples": official if have is None else have,
        "official_examples": official,
        "metrics": values,
        "intervals": {metric: [round(value - 2, 4), round(value + 2, 4)] for metric, value in values.items()},
        "notes": list(notes),
        "majority": {metric: value + 0.4 if weak else 31.0 for metric, value in values.items()},
        "confusion": CONFUSION.get(about.classes),
    }


def finetuned(
    task: str,
    score: float | dict[str, float],
    seed: int = 0,
    model: dict[str, dict] | None = None,
    have: int | None = None,
    notes: tuple[str, ...] = (),
    weak: bool = False,
    **params,
) -> Artifact:
    """A finetune artifact with this score (of each split of MNLI, if a dict).

    `weak`: no better than the majority baseline, and its data has a note.
    """
    manifests = model or lineage()
    about = TASKS[task]
    settings = Finetuning().model_dump(mode="json") | {
        "data": {"repository": "nyu-mll/glue", "revision": "1"}, "task": task, "seed": seed, "pretrained": True,
        "share": 1.0, "keep": False,
    } | params  # fmt: skip
    start = next(name for name in manifests if name.startswith("pretrain/"))
    of_split = score if isinstance(score, dict) else dict.fromkeys(about.validation, score)
    validation = {split: measured(task, split, value, have, notes, weak) for split, value in of_split.items()}
    of_data = [f"{task}: training rows that stand in validation too: 2 (rows 3 and 4)."] if weak else []
    stats = {
        "task": task, "seed": seed, "pretrained": settings["pretrained"], "share": settings["share"],
        "metric": about.metrics[0], "head": "tanh",
        "machine": {"device": "Other GPU", "dtype": "float16", "compiled": False},
        "train_examples": about.sizes["train"], "official_train_examples": about.sizes["train"],
        "steps": 100, "seconds_of_training": 12.0, "examples_per_second": 321.0,
        "epochs": [],
        "data": {"left_out": {}, "shared": {}, "duplicates": 0, "cut": dict.fromkeys(of_split, 0), "notes": of_data},
        "validation": validation,
    }  # fmt: skip
    manifest = {"stage": "finetune", "params": settings, "inputs": {"start": start}, "stats": stats, "seconds": 15.0,
                "finished": "2026-11-21T12:00:00.000+00:00"}  # fmt: skip
    key = hashlib.sha256(json.dumps([settings, validation, start]).encode()).hexdigest()[:12]
    return made(f"finetune/{key}", manifest, {LINEAGE: json.dumps(manifests)})


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
    folder = report.fn(Report(title=title), runs, []).path
    return (folder / "report.md").read_text(), json.loads((folder / "report.json").read_text()), folder


def table_of(folder: Path) -> list[dict]:
    """The scores as `cram show` lists them."""
    return json.loads((folder / "stage.json").read_text())["stats"]["table"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report with everything: five seeds, no pretraining, a share of the data, metrics of steps."""
    with store_of_its_own(tmp_path_factory.mktemp("whole") / "artifacts"):
        runs = with_scores(BERT, seeds=5, spread=0.8)
        runs += with_scores(dict.fromkeys(BERT, 40.0), pretrained=False)
        runs += [finetuned("sst2", score, i, share=0.25) for i, score in enumerate((84.0, 81.0, 79.0, 82.0))]
        n = 1000
        steps = {name: np.linspace(1, 5, n) for name in ("loss", "lr", "tokens", "seconds", "tokens_per_second", "mfu")}
        made(MODEL, lineage()[MODEL], {"metrics.parquet": pa.table({"step": range(1, n + 1)} | steps)})
        yield written(runs)


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


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory) -> tuple[str, dict, Path]:
    """A report of a run outside the rules, with little text and time lost; of the data only the text's manifests."""
    few = HELDOUT | {"documents": 3, "words": 306, "by_frequencies": {"nats_per_token": 2.2, "nats_per_byte": 0.4}}
    start = {"name": "pretrain/0", "tokens": 5, "start": {"name": "pretrain/1", "tokens": 0, "start": None}}
    machine = {"device": "CPU (toy)", "dtype": "fp32", "compiled": False, "gpus": 1, "micro_batch": 8}
    model = lineage(heldout=few, steps=21, tokens=172_032, training_loss=2.3, epochs=0.1, stopped_seconds=9000.0,
                    start=start, machine=machine)  # fmt: skip
    model[MODEL]["params"]["detection"] = 2.5
    model["vocabulary/00000000000a"]["params"]["start"] = "pretrain/0"
    shared = model["tokenize/00000000000a"]["stats"]["heldout"]["measured"]["shared"]
    shared |= {"documents": 3, "share_of_words": 0.25}
    del model["decontaminate/00000000000a"], model["download/00000000000a"]
    with store_of_its_own(tmp_path_factory.mktemp("doubtful") / "artifacts"):
        yield written(with_scores(BERT, weak=True, model=model, learning_rate=2e-4, epochs=6))


@pytest.mark.parametrize("name", ["whole", "mixed", "doubtful"])
def test_the_page_and_the_card_of_a_run_are_those_that_were_read_and_approved(request, name):
    page, _, folder = request.getfixturevalue(name)
    check_golden(f"{name}.md", page)
    check_golden(f"{name}_card.md", (folder / "README.md").read_text(encoding="utf-8"))


def test_a_small_model_stands_beside_models_of_its_size_and_then_beside_the_papers(mixed):
    page = mixed[0]
    small = rows_of(section(page, RULES))
    full_size = rows_of(section(page, "GLUE beside full-size models"))
    assert "*ELECTRA-Small-OWT* (published \\[2\\])" in small
    assert not any("BERT-base" in name for name in small)
    assert any("BERT-base" in name for name in full_size)
    ours = [line for line in lines_of(section(page, RULES)) if line[0] == "**ours** (this run)"]
    assert [ours[0][1], ours[1][-1]] == ["dev", "13.6 M tokens, 1 minute of Toy GPU"], "scores, then what they took"


def test_the_card_of_the_tokens_says_epochs_and_the_words_if_they_were_counted():
    stats = lineage()[MODEL]["stats"]
    assert about_text(stats) == "1.2 times the training text"
    assert about_text(stats | {"epochs": 9.9995, "words": 9_981_965}) == (
        "10 times the training text, which has at most 10.0 M words"
    )


def test_an_adopted_model_has_a_size_and_no_cost():
    adopted = {"parameters": 11_300_000, "params": lineage()[MODEL]["params"]}
    ours, *published = sections.cost_lines("ours", adopted)
    assert (ours["parameters"], ours["pretraining"]) == ("11.3 M", None)
    assert len(published) == len({line["model"] for line in published}), "weights that were judged twice, once"


def test_a_full_size_model_stands_beside_the_papers_models_alone(whole):
    page = whole[0]
    assert "BERT-Mini" not in page
    assert "GLUE beside full-size models" not in page


def test_the_picture_has_published_models_of_the_size_that_share_a_score_on_all_of_the_data(whole, mixed):
    drawn = [set(re.findall("published: ([^<]+)<", (about[2] / "scores.svg").read_text())) for about in (whole, mixed)]
    assert drawn[0] == {"BERT-base, fully trained", "crammed BERT, A6000, as released (best of 5 runs)"}
    assert drawn[1] == {"ELECTRA-Small-OWT"}, "the others have SST-2 and MNLI alone, ours of SST-2 is on partial data"


def test_the_averages_are_those_of_the_table_that_the_scores_are_from(whole, mixed):
    assert whole[1]["average"] == pytest.approx(80.9, abs=0.05)
    assert mixed[1]["average"] is None


def test_the_terminal_shows_which_scores_are_at_the_baseline(mixed):
    table = {row["task"]: row for row in table_of(mixed[2])}
    assert [table[name]["verdict"] == "" for name in ("MRPC", "STS-B", "CoLA")] == [False, False, True]
    assert (table["MRPC"]["score"], table["MRPC"]["majority"]) == (81.2, 81.6)
    assert (table["word-order"]["no pretraining"], table["CoLA"]["no pretraining"]) == (55.0, "")


def test_of_an_even_number_of_seeds_the_interval_is_that_of_the_lower_one_in_the_middle(whole):
    row = next(row for row in whole[1]["scores"] if row["share"] == 0.25)
    assert (row["score"], row["by_seed"]) == (81.5, {"0": 84.0, "1": 81.0, "2": 79.0, "3": 82.0})
    assert row["metrics"]["accuracy"]["interval"] == [79.0, 83.0]


@pytest.mark.parametrize(("score", "shown"), [(51.8486, "51.8"), (51.85, "51.9")])
def test_page_and_terminal_round_a_score_alike(store, score, shown):
    page, about, folder = written([finetuned("word-order", score)])
    table = table_of(folder)
    assert (about["scores"][0]["score"], str(table[0]["score"])) == (score, shown)
    [row] = (line for line in lines_of(section(page, "Probes (these are not GLUE)")) if line[0] == "word-order")
    assert row[1] == shown


def test_finetuning_that_differs_between_tasks_breaks_a_rule():
    runs = [Finetuning(epochs=epochs).model_dump() | {"task": f"{epochs}", "pretrained": True} for epochs in (5, 6)]
    verdicts = {rule: (mark, fact) for rule, mark, fact in rules.finetuning_rules(runs)}
    assert verdicts["at most 5 epochs"] == ("✗", "5, 6")
    assert verdicts["one setting for all tasks"] == ("✗", "differ: epochs")
    assert scores.settings(runs)["epochs"] == [5, 6]


ZERO = dict.fromkeys(("sentences", "too_short", "ngrams", "sentences_found", "documents"), 0) | {"splits": []}
SEARCHED = {"tasks": dict.fromkeys(GLUE, ZERO)}
TWO_GPUS = lineage()[MODEL]["stats"]["machine"] | {"gpus": 2}
TEXT = "no downstream data in the text"


@pytest.mark.parametrize("stopped", [None, 0.0, 3600.0])
def test_up_to_a_tenth_of_the_time_lost_is_in_the_budget_alone(store, stopped):
    model = lineage(**({} if stopped is None else {"stopped_seconds": stopped}))
    page = written([finetuned("cola", 48.4, model=model)])[0]
    assert "Training stood still" not in section(page, "") + card(model[MODEL], model)
    assert ("stood still, off the clock" in rows_of(section(page, "Budget"))) is bool(stopped)


@pytest.mark.parametrize(
    ("changes", "rule", "verdict", "fact"),
    [
        ({"seconds_on_the_clock": 24.2 * 3600}, "at most 24 hours", "✗", "24.2 hours"),
        ({"machine": TWO_GPUS}, "one GPU", "✗", "2 x Toy GPU"),
        ({"decontamination": {"tasks": {"wnli": ZERO}}}, TEXT, "?", "not searched for: CoLA"),
        ({"decontamination": SEARCHED | {"not_at_hand": ["cola/validation"]}}, TEXT, "?", "cola/validation; scored on"),
        ({"decontamination": SEARCHED | {"words": 50}}, TEXT, "?", "50 words in a row"),
        ({"decontamination": SEARCHED}, TEXT, "✓", "50 documents dropped; 13 words in a row"),
    ],
)
def test_a_rule_that_is_broken_or_unknown_is_marked_with_the_fact(changes, rule, verdict, fact):
    model = lineage(**changes)
    rows = {row[0]: row[1:] for row in rules.pretraining_rules(model, model[MODEL], {"cola"})}
    assert rows[rule][0] == verdict
    assert fact in rows[rule][1]
    assert all(row[0] == "✓" for name, row in rows.items() if name not in (rule, TEXT))


def test_without_the_manifests_of_the_text_its_rules_are_unknown():
    alone = {MODEL: lineage()[MODEL]}
    assert [rule.kept for rule in rules.pretraining_rules(alone, alone[MODEL], {"cola"})] == ["✓", "?", "✓", "✓", "?"]


def test_curves_are_drawn_from_the_models_folder_if_it_is_there(whole, mixed):
    drawn, without = ({path.name: path.read_text() for path in about[2].glob("*.svg")} for about in (whole, mixed))
    assert drawn.keys() == {"scores.svg", "curve.svg", "loss.svg", "speed.svg", "funnel.svg"}
    assert "tokens per second" in drawn["speed.svg"]
    assert [">training<" in texts["loss.svg"] for texts in (drawn, without)] == [True, False]
    assert "speed.svg" not in without


@pytest.mark.parametrize("quote", [True, False])
def test_a_report_quotes_the_text_unless_it_is_told_not_to(store, quote):
    model = lineage()
    filtered = "filter/00000000000a"
    made(filtered, model[filtered], {"dropped.jsonl": json.dumps({"text": "a dropped text"})})
    run = finetuned("sst2", 80.0, model=model)
    answers = {"split": ["validation"], "row": [0], "sentence": ["a labelled text"], "label": [1], "prediction": [1]}
    pq.write_table(pa.table(answers | {"scores": [[0.0, 2.0]]}), run.path / "predictions.parquet")
    folder = report.fn(Report(quote=quote), [run], []).path
    for name in ("report.md", "report.html", "report.json"):
        text = (folder / name).read_text()
        assert ("a dropped text" in text, "a labelled text" in text) == (quote, quote)
    page = (folder / "report.md").read_text()
    assert ("This page quotes" in page) is quote
    assert ("report.quote" in section(page, "Words filled in")) is not quote


FILES = {"train": ["a"], "validation": ["b"]}


def test_runs_that_make_no_report_are_refused_by_name(store):
    cola = finetuned("cola", 50.0, data=FILES)
    other = lineage("b")
    refused = [
        ([cola, finetuned("rte", 50.0, model=other)], "pretrain/00000000000a, pretrain/00000000000b"),
        ([cola, cola], "cola"),
        ([cola, finetuned("cola", 51.0, seed=9, data=FILES, epochs=2)], "cola"),
        ([cola, finetuned("cola", 51.0, seed=2, data=FILES | {"validation": ["d"]})], "cola"),
    ]
    for runs, named in refused:
        with pytest.raises(InputError, match=named):
            written(runs)


def test_runs_that_differ_in_kept_models_make_one_report_and_scores_know_their_data(store):
    kept = finetuned("cola", 51.0, seed=1, data=FILES, keep=True)
    others = [finetuned("cola", 50.0, data=FILES), finetuned("cola", 40.0, data=FILES, pretrained=False)]
    _, about, _ = written([*others, kept, finetuned("word-order", 60.0, data=FILES)])
    rows = {(row["column"], row["pretrained"]): row for row in about["scores"]}
    assert rows["CoLA", True]["seeds"] == 2
    assert rows["CoLA", True]["data"] == rows["CoLA", False]["data"]
    assert rows["CoLA", True]["data"] != rows["word-order", True]["data"], "probes are those of one corpus"


def test_the_learning_curve_has_the_gain_per_doubling_of_the_examples(store):
    shares = ((1.0, (11.0, 13.0)), (0.25, (4.0, 5.0)), (0.5, (7.0, 9.0)))
    runs = [finetuned("cola", score, i, share=share) for share, pair in shares for i, score in enumerate(pair)]
    curve = sections.learning_curve(scores.gather(scores.group_runs([*runs, finetuned("rte", 50.0)]).values(), None))
    names = ("column", "share", "median", "per_doubling", "low", "high", "train_examples")
    assert [tuple(point[name] for name in names) for point in curve] == [
        ("CoLA", 0.25, 4.5, None, 4, 5, 2138),
        ("CoLA", 0.5, 8.0, 3.5, 7, 9, 4276),
        ("CoLA", 1.0, 12.0, 4.0, 11, 13, 8551),
    ]


# On what the stages really write


def test_the_report_says_which_downstream_data_was_in_the_text(store, tmp_path: Path, toy_texts):
    sentence = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
    for task, columns in (("cola", ("sentence",)), ("rte", ("sentence1", "sentence2"))):
        (tmp_path / "glue" / task).mkdir(parents=True)
        rows = {column: [f"{task} {column} {sentence}", "short"] for column in columns}
        pq.write_table(pa.table(rows), tmp_path / "glue" / task / "test.parquet")
    texts = [*toy_texts[:9], f"rte sentence1 {sentence}", f"{toy_texts[9]} cola sentence {sentence}"]
    asked = Decontaminate(data=str(tmp_path / "glue"), words=14, tasks=["cola", "rte"])
    clean = decontaminate.fn(asked, corpus_of(tmp_path, texts))
    values = funnel.text_sections({clean.name: clean.manifest})
    page = render("contamination", scores.HELPERS | values)
    about = values["contamination"]
    assert about["dropped"] == 2
    assert "2 documents dropped (found for CoLA 2, RTE 2): 2 had 14 words in a row" in page
    assert "3 of 6 sentences have fewer than 14 words" in page
    assert "cola/validation, rte/validation" in page
    assert rows_of(page)["RTE"][:3] == ["test", "4", "2"]
    assert json.loads(json.dumps(about)) == about


def test_the_characters_that_a_vocabulary_does_not_read_are_a_row_of_what_was_dropped():
    removed = {"characters": 30, "share": 0.01, "by_source": {"web": {"documents": 2, "characters": 29}}}
    rows = funnel.dropped({"measure/0": {"stage": "measure", "stats": {"removed": removed}}})
    assert rows == [("vocabulary", "characters it doesn't read", None, 30, "web 29")]
