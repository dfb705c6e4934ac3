"""The model cards, on the manifests of a toy corpus and on hand-made ones."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import store_of_its_own, toy_tokens
from huggingface_hub import ModelCard
from test_report import MODEL, finetuned, rows_of
from test_report import lineage as made_up_lineage

from model import export, layouts
from model.bert import Bert
from model.finetuning import Classifier
from model.settings import Architecture
from tasks.glue.table import TASKS
from tasks.pretrain import Pretrain
from tasks.reports.funnel import funnel
from tasks.reports.model_card import card, finetuned_card
from tasks.store.lineage import lineage
from tasks.text.tokenizer import copy_tokenizer

ROOT = Path(__file__).parents[1]
CRAMMED = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}
MODERN = CRAMMED | {"positions": "rotary", "norm_bias": False, "first_norm": False, "head_transform": True}
ORIGINAL = CRAMMED | {
    "positions": "learned", "norm_order": "post", "activation": "gelu", "final_norm": False,
    "bias": True, "qkv_bias": True, "head_transform": True, "decoder_bias": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, toy_texts: list[str]):
    """The tokenize artifact of a toy corpus, in a store of its own."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        yield toy_tokens(root, toy_texts)["tokens"]


def about(architecture: dict, **params) -> dict:
    """The manifest of a pretrain stage."""
    settings = Pretrain(architecture=architecture, **params)
    return made_up_lineage()[MODEL] | {"params": settings.identity(), "usual": settings.usual()}


def test_the_card_has_the_model_its_data_and_what_differs_from_the_papers_recipe(tokens):
    manifests = lineage(tokens)
    download = next(manifest for manifest in manifests.values() if manifest["stage"] == "download")
    download["params"] |= {"files": [["train.jsonl.zst", "0" * 64]] * 8, "source": {"books": 1}, "only here": 5}
    text = card(about(CRAMMED, budget=1.5, learning_rate=2e-3), manifests)
    rows = {name.strip("`"): [cell.strip("`") for cell in row] for name, row in rows_of(text).items()}
    for words in ("119.6 million parameters, pretrained in 1.5 hours", "Toy GPU, bfloat16, compiled", "torch 2.13.0",
                  "`abc123`", "all 2,000 words of 10 documents", "trained on (1.25 epochs)", "local files (1)",
                  "1 x 32, 2 heads, geglu", "Not checked, because", "sequences of 32"):  # fmt: skip
        assert words in text, words
    for row in funnel(manifests):
        assert rows[row["stage"]][:2] == ["–" if row[n] is None else f"{row[n]:,}" for n in ("documents", "characters")]
    expected = {
        "held-out loss, nats per byte": ["0.4800 ± 0.0120"],
        "pretrain.budget": ["1.5", "24.0"], "pretrain.learning_rate": ["0.002", "0.001"],
        "pretrain.architecture.hidden": ["32", "768"], "tokenize.sort": ['"random"', '"sentence-length"'],
        "download.source": ['{"books": 1}', '"pile"'], "download.files": ["8 items", "[]"],
        "vocabulary.entries": ["400", "32768"],
    }  # fmt: skip
    assert expected.items() <= rows.items()
    assert not [
        name
        for name in rows
        if name.startswith(("pretrain.clip", "pretrain.detection", "deduplicate.", "download.only"))
    ]


@pytest.mark.parametrize(
    ("layout", "library", "tag"),
    [(MODERN, "transformers", "modernbert"), (ORIGINAL, "transformers", "bert"), (CRAMMED, "cram", None)],
)
def test_the_hub_reads_the_head_of_the_card(layout, library, tag, tokens):
    data = ModelCard(card(about(layout), lineage(tokens)), ignore_metadata_errors=False).data
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


def test_the_card_says_what_transformers_and_other_engines_lack_and_what_is_unknown_or_the_papers_own():
    assert layouts.transformers_model(Architecture(**CRAMMED))[1] in card(about(CRAMMED), {})
    either = (MODERN, MODERN | {"norm_bias": True})
    assert ["engines other than" in card(about(layout), {}) for layout in either] == [False, True]
    of_paper = card(about({}), {})
    assert "Everything is as in `crammed-bert`" in of_paper
    assert "`download` is missing" in of_paper


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


def saved(task: str | None, layout: dict, head: str, tokens, folder: Path) -> str:
    """Save a model, finetuned if there is a task; the Python example of its card, for this folder."""
    folder.mkdir()
    copy_tokenizer(tokens.path, folder, 32)
    bert = Bert(Architecture(**layout), 400, 32)
    if task:
        classes, labels = TASKS[task].classes, TASKS[task].labels
        export.save_classifier(Classifier(bert, classes, 0.0, seed=0, head=head), folder, labels)
        text = card_of(task, layout, head)
    else:
        export.save(bert, folder)
        text = card(about(layout), lineage(tokens))
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert example.count('"FOLDER"') == 1
    assert ("import model.hf" in example) == (layout == CRAMMED)
    return example.replace('"FOLDER"', json.dumps(str(folder)))


def test_the_code_on_the_cards_fills_masks_and_labels_texts(tokens, tmp_path):
    # those that need cram's package come last, since all run in one process, each with its own names
    models = [(None, MODERN, ""), (None, ORIGINAL, ""), ("cola", MODERN, "native"), ("stsb", MODERN, "native"),
              (None, CRAMMED, ""), ("mnli", CRAMMED, "tanh")]  # fmt: skip
    examples = [saved(*model, tokens, tmp_path / str(number)) for number, model in enumerate(models)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(f"exec({example!r}, {{}})" for example in examples)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (task, *_), line in zip(models, done.stdout.splitlines(), strict=True):
        printed = ast.literal_eval(line)
        answers = printed if isinstance(printed, list) else [printed]
        assert len(answers) == (1 if task else 5)
        assert all(isinstance(answer["score"], float) for answer in answers)
        labels = TASKS[task].labels if task else ()
        assert not labels or answers[0]["label"] in labels
