"""The model cards, on hand-made manifests. test_report compares three of them whole with golden ones."""

import ast
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from test_report import MODEL, finetuned, rows_of
from test_report import lineage as made_up_lineage
from toys import MODERN, ORIGINAL, rough_bert, rough_classifier, tokenizer_in

from model import export, layouts
from model.settings import Architecture
from tasks.glue.table import TASKS
from tasks.pretrain import Pretrain
from tasks.reports.model_card import card, finetuned_card
from tasks.tokenize import Tokenize

CRAMMED = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}
LENGTH = 32


def about(architecture: dict, **params) -> dict:
    """The manifest of a pretrain stage."""
    settings = Pretrain(architecture=architecture, **params)
    return made_up_lineage()[MODEL] | {"params": settings.identity(), "usual": settings.usual()}


def test_the_card_names_what_differs_from_the_papers_recipe():
    manifests = {manifest["stage"]: manifest for manifest in made_up_lineage().values()}
    download = {"source": {"books": 1}, "files": [["train.jsonl.zst", "0" * 64]] * 8, "only here": 5, "seed": 0}
    manifests["download"] |= {"params": download, "usual": {"source": "pile", "files": [], "seed": 0, "only usual": 1}}
    manifests["tokenize"] |= {"params": Tokenize(sort="random").identity(), "usual": Tokenize().usual()}
    text = card(about(CRAMMED, budget=1.5, learning_rate=2e-3), manifests)
    rows = {name.strip("`"): [cell.strip("`") for cell in row] for name, row in rows_of(text).items()}
    assert "pretrained in 1.5 hours" in text
    assert "1 x 32, 2 heads, geglu" in text
    changed = {
        "pretrain.budget": ["1.5", "24.0"],
        "pretrain.learning_rate": ["0.002", "0.001"],
        "pretrain.architecture.layers": ["1", "16"],
        "pretrain.architecture.hidden": ["32", "768"],
        "pretrain.architecture.heads": ["2", "12"],
        "pretrain.architecture.intermediate": ["48", "2304"],
        "tokenize.sort": ['"random"', '"sentence-length"'],
        "download.source": ['{"books": 1}', '"pile"'],
        "download.files": ["8 items", "[]"],
    }
    stages = tuple(f"{stage}." for stage in manifests)
    assert {name: cells for name, cells in rows.items() if name.startswith(stages)} == changed


@pytest.mark.parametrize(
    ("axes", "library", "tag"),
    [(MODERN, "transformers", "modernbert"), (ORIGINAL, "transformers", "bert"), ({}, "cram", None)],
)
def test_the_hub_reads_the_head_of_the_card(axes, library, tag):
    data = ModelCard(card(about(CRAMMED | axes), made_up_lineage()), ignore_metadata_errors=False).data
    assert (data.library_name, data.pipeline_tag, data.license, data.datasets) == (library, "fill-mask", None, None)
    assert (data.mask_token, data.eval_results) == ("[MASK]", None)
    assert {"bert", "modernbert"} & set(data.tags) == ({tag} if tag else set())


def test_data_sets_of_the_hub_are_named_with_commit_and_terms():
    place = {"repository": "wikimedia/wikipedia", "revision": "b04c8d1"}
    params = {"source": {"wikipedia": 1, "python-docs": 1}, "sources": {"wikipedia": place, "python-docs": {}}}
    corpus = {"stage": "download", "params": params, "stats": {"documents": 5, "characters": 50}}
    text = card(about(CRAMMED), {"download/0": corpus})
    assert ModelCard(text).data.datasets == ["wikimedia/wikipedia"]
    assert "huggingface.co/datasets/wikimedia/wikipedia) at commit `b04c8d1`. Terms: CC-BY-SA-3.0 and GFDL." in text
    assert "- `python-docs`: docs of Python packages." in text


def test_the_card_says_what_transformers_and_other_engines_lack_and_what_is_unknown():
    assert layouts.transformers_model(Architecture(**CRAMMED))[1] in card(about(CRAMMED), {})
    either = (CRAMMED | MODERN, CRAMMED | MODERN | {"norm_bias": True})
    assert ["engines other than" in card(about(layout), {}) for layout in either] == [False, True]
    assert "`download` is missing" in card(about({}), {})


def card_of(task: str, architecture: dict = CRAMMED, head: str = "tanh", **changes) -> str:
    """The card of a finetuned model with hand-made statistics."""
    manifests = made_up_lineage()
    manifests[MODEL]["params"]["architecture"] = Architecture(**architecture).model_dump(mode="json")
    run = finetuned(task, 60.0, model=manifests, **changes)
    return finetuned_card(run.manifest["params"], run.stats | {"head": head}, manifests)


def test_the_card_of_a_finetuned_model_has_its_score_labels_and_making(store):
    text = card_of("rte", seed=3, epochs=4)
    rows = rows_of(text)
    for words in ("# RTE, finetuned with seed 3", "Labels: 0: entailment, 1: not_entailment.",
                  "From the pretrained model, on 2,490 of 2,490 training examples", "in 4 epochs",
                  "└── pretrain/00000000000a", "128 tokens", "a tab between the texts"):  # fmt: skip
        assert words in text, words
    assert rows["validation"] == ["accuracy", "60.0", "58.0 to 62.0", "31.0", "277 of 277"]
    assert rows["`learning_rate`"] == ["4e-05"]
    data = ModelCard(text, ignore_metadata_errors=False).data
    assert (data.pipeline_tag, data.datasets) == ("text-classification", ["nyu-mll/glue"])
    (score,) = data.eval_results
    assert (score.dataset_config, score.dataset_split) == ("rte", "validation")
    assert (score.metric_type, score.metric_value) == ("accuracy", 60.0)


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("rte", {"weak": True}, "- † No better than always answering the most frequent class."),
        ("cola", {"pretrained": False}, "From random weights, without pretraining"),
        ("cola", {"share": 0.25}, "of which 25% were used"),
        ("stsb", {}, "Labels: one number, from 0 to 5."),
        ("cola", {"have": 400}, "400 of 1,043"),
    ],
)
def test_the_card_of_a_finetuned_model_says_how_it_is_special(store, task, changes, words):
    text = card_of(task, **changes)
    assert words in text
    assert ("†" in text) is ("weak" in changes)
    assert bool(ModelCard(text).data.eval_results) is ("have" not in changes)  # the hub gets no scores on partial data


@pytest.mark.parametrize(
    ("task", "axes"),
    [(None, MODERN), (None, ORIGINAL), (None, {}), ("cola", MODERN), ("stsb", MODERN), ("mnli", {})],
)
def test_the_code_on_the_card_fills_masks_and_labels_texts(task, axes, store, tmp_path: Path, transformers, capsys):
    layout = CRAMMED | axes
    head = "native" if axes else "tanh"
    bert = rough_bert(layout, tokenizer_in(tmp_path, LENGTH), LENGTH)
    if task:
        export.save_classifier(rough_classifier(bert, TASKS[task].classes, head), tmp_path, TASKS[task].labels)
        text = card_of(task, layout, head)
    else:
        export.save(bert, tmp_path)
        text = card(about(layout), made_up_lineage())
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert example.count('"FOLDER"') == 1
    assert ("import model.hf" in example) == (not axes)  # test_cli_export runs both in a process of their own
    exec(example.replace('"FOLDER"', json.dumps(str(tmp_path))), {})
    printed = ast.literal_eval(capsys.readouterr().out)
    answers = printed if isinstance(printed, list) else [printed]
    assert len(answers) == (1 if task else 5)
    assert all(isinstance(answer["score"], float) for answer in answers)
    labels = TASKS[task].labels if task else ()
    assert not labels or answers[0]["label"] in labels
