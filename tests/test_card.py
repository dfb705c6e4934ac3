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
from test_report import HELDOUT, finetuned, rows_of
from test_report import lineage as made_up_lineage

from model import export
from model.bert import Bert, Classifier
from model.settings import Architecture
from tasks.glue.tasks import TASKS
from tasks.pretrain import Pretrain
from tasks.reports.data_sections import funnel
from tasks.reports.markdown import code
from tasks.reports.model_card import card, deltas, finetuned_card
from tasks.store import lineage
from tasks.text.tokenizer import copy_tokenizer

ROOT = Path(__file__).parents[1]
MODERN = {
    "layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "positions": "rotary", "norm_bias": False,
    "first_norm": False, "head_transform": True,
}  # fmt: skip
ORIGINAL = {
    "layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "positions": "learned", "norm_order": "post",
    "activation": "gelu", "final_norm": False, "bias": True, "qkv_bias": True, "head_transform": True, "decoder_bias": True,
}  # fmt: skip
CRAMMED = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory, toy_texts: list[str]):
    """The tokenize artifact of a toy corpus, in a store of its own."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        yield toy_tokens(root, toy_texts)["tokens"]


def about(architecture: dict, **params) -> dict:
    """The manifest of a pretrain stage."""
    settings = Pretrain(architecture=architecture, **params)
    stats = {
        "parameters": 1_234_567, "steps": 70, "tokens": 30_000, "epochs": 1.25, "seconds_on_the_clock": 5400.0,
        "tokens_per_second": 5.5, "heldout_loss": 2.1, "heldout": HELDOUT, "mfu": 0.42, "skipped": [],
        "machine": {"device": "Toy GPU", "dtype": "bfloat16", "compiled": True, "gpus": 1, "micro_batch": 64},
    }  # fmt: skip
    return {
        "stage": "pretrain",
        "params": settings.identity(),
        "usual": settings.usual(),
        "stats": stats,
        "environment": {"python": "3.11.1", "packages": {"torch": "2.13.0"}, "commit": "abc123"},
    }


def test_the_card_has_funnel_budget_loss_hardware_and_software(tokens):
    manifests = lineage(tokens)
    text = card(about(CRAMMED, budget=1.5), manifests)
    rows = rows_of(text)
    for words in ("1.2 million parameters, pretrained in 1.5 hours", "1,234,567", "Toy GPU, bfloat16, compiled", "30,000 tokens",
                  "70 steps", "torch 2.13.0", "`abc123`", "all 25 tokens of 10 documents", "trained on (1.25 epochs)",
                  "local files (1)", "1 x 32, 2 heads, geglu", "Not checked, because", "sequences of 32"):  # fmt: skip
        assert words in text, words
    assert rows["held-out loss, nats per byte"] == ["0.4800 ± 0.0120"]
    for row in funnel(manifests):
        assert rows[row["stage"]][:2] == ["–" if row[n] is None else f"{row[n]:,}" for n in ("documents", "characters")]


def test_the_recipe_is_what_differs_from_the_papers(tokens):
    rows = rows_of(card(about(CRAMMED, budget=1.5, learning_rate=2e-3), lineage(tokens)))
    expected = {
        "pretrain.budget": ["1.5", "24.0"], "pretrain.learning_rate": ["0.002", "0.001"],
        "pretrain.architecture.hidden": ["32", "768"], "tokenize.sort": ['"random"', '"sentence-length"'],
        "download.source": ['"files"', '"pile"'], "vocabulary.entries": ["400", "32768"],
    }  # fmt: skip
    assert (
        expected.items() <= {name.strip("`"): [cell.strip("`") for cell in row] for name, row in rows.items()}.items()
    )
    assert not [name for name in rows if name.startswith(("`pretrain.clip", "`deduplicate", "`decontaminate"))]


def test_params_within_params_are_compared_one_by_one_and_long_lists_by_their_length():
    files = [[f"train-{number:05}.jsonl.zst", "0" * 64] for number in range(8)]
    usual = {"a": 1, "b": {"c": 2, "d": 3}, "e": "pile", "files": []}
    here = {"a": 1, "b": {"c": 2, "d": 4}, "e": {"books": 1}, "files": files, "only here": 5}
    assert deltas(here, usual, "x") == [
        ["`x.b.d`", "`4`", "`3`"], ["`x.e`", '`{"books": 1}`', '`"pile"`'], ["`x.files`", "8 items", code("[]")]
    ]  # fmt: skip


def test_the_papers_own_recipe_has_no_table_of_differences():
    text = card(about({}), {})
    assert "Everything is as in `crammed-bert`" in text
    assert "parameter" not in rows_of(text)
    assert "`download` is missing" in text


@pytest.mark.parametrize(
    ("layout", "library", "tag"),
    [(MODERN, "transformers", "modernbert"), (ORIGINAL, "transformers", "bert"), (CRAMMED, "cram", None)],
)
def test_the_hub_reads_the_head_of_the_card(layout, library, tag, tokens):
    data = ModelCard(card(about(layout), lineage(tokens)), ignore_metadata_errors=False).data
    assert (data.library_name, data.pipeline_tag, data.license, data.datasets) == (library, "fill-mask", None, None)
    assert (data.mask_token, data.eval_results) == ("[MASK]", None)
    assert (tag in data.tags) if tag else not {"bert", "modernbert", "eurobert"} & set(data.tags)


def test_data_sets_of_the_hub_are_named_with_commit_and_terms():
    place = {"repository": "wikimedia/wikipedia", "revision": "b04c8d1"}
    corpus = {"stage": "download", "params": {"source": {"wikipedia": 1, "python-docs": 1}, "sources": {
        "wikipedia": place, "python-docs": {"packages": "0"}}}, "stats": {"documents": 5, "characters": 50}}  # fmt: skip
    text = card(about(CRAMMED), {"download/0": corpus})
    assert ModelCard(text).data.datasets == ["wikimedia/wikipedia"]
    assert "huggingface.co/datasets/wikimedia/wikipedia) at commit `b04c8d1`. Terms: CC-BY-SA-3.0 and GFDL." in text
    assert "- `python-docs`: docs of Python packages." in text


def test_the_card_says_why_transformers_lacks_a_layout_and_what_other_engines_may_lack():
    text = card(about(CRAMMED), {})
    assert export.why_not_transformers(Architecture(**CRAMMED)) in text
    assert ["import model.hf" in text for text in (text, card(about(MODERN), {}))] == [True, False]
    layouts = (MODERN, MODERN | {"norm_bias": True})
    assert ["engines other than" in card(about(layout), {}) for layout in layouts] == [False, True]


def run(text: str, folder: Path) -> str:
    """What the one Python example of a card prints for the model in a folder."""
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert example.count('"FOLDER"') == 1
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", example.replace('"FOLDER"', json.dumps(str(folder)))],
        cwd=ROOT, capture_output=True, text=True, timeout=300, env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("layout", [MODERN, ORIGINAL, CRAMMED], ids=["modern", "original", "crammed"])
def test_the_code_on_the_card_fills_a_mask(layout, tokens, tmp_path):
    copy_tokenizer(tokens.path, tmp_path, 32)
    export.save(Bert(Architecture(**layout), 400, 32), tmp_path)
    assert len(re.findall(r"'token': (\d+)", run(card(about(layout), lineage(tokens)), tmp_path))) == 5


def card_of(task: str, architecture: dict = CRAMMED, head: str = "tanh", majority: float = 31.0, **params) -> str:
    """The card of a finetuned model with hand-made statistics."""
    manifests = made_up_lineage()
    manifests["pretrain/00000000000a"]["params"]["architecture"] = Architecture(**architecture).model_dump(mode="json")
    run = finetuned(task, 60.0, model=manifests, **params)
    stats = run.stats | {"head": head}
    for of_split in stats["validation"].values():
        of_split["majority"] = dict.fromkeys(of_split["metrics"], majority)
    return finetuned_card(run.manifest["params"], stats, manifests)


def test_the_card_of_a_finetuned_model_has_its_score_labels_and_making(store):
    text = card_of("rte", seed=3, epochs=4)
    rows = rows_of(text)
    for words in ("# RTE, finetuned with seed 3", "Labels: 0: entailment, 1: not_entailment.",
                  "From the pretrained model, on 2,490 of 2,490 training examples", "epoch 4 of 4",
                  "`pretrain/00000000000a`", "128 tokens", "cram predict FOLDER", "a tab between the texts"):  # fmt: skip
        assert words in text, words
    assert rows["validation"] == ["accuracy", "60.0", "58.0 to 62.0", "31.0", "277 of 277"]
    assert rows["`learning_rate`"] == ["4e-05"]
    data = ModelCard(text, ignore_metadata_errors=False).data
    assert (data.pipeline_tag, data.datasets) == ("text-classification", ["nyu-mll/glue"])
    (score,) = data.eval_results
    assert (score.dataset_config, score.dataset_split, score.metric_type, score.metric_value) == (
        "rte", "validation", "accuracy", 60.0
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("rte", {"majority": 59.0}, "- † No better than always answering the most frequent class."),
        ("cola", {"pretrained": False}, "From random weights, without pretraining"),
        ("cola", {"start": "mnli", "protocol": "modern"}, "finetuned on MNLI, on"),
        ("cola", {"share": 0.25}, "of which 25% were used"),
        ("stsb", {}, "Labels: one number, from 0 to 5."),
        ("cola", {"have": 400}, "400 of 1,043"),
    ],
)
def test_the_card_of_a_finetuned_model_says_how_it_is_special(store, task, changes, words):
    text = card_of(task, **changes)
    assert words in text
    assert ("†" in text) is ("majority" in changes)
    assert bool(ModelCard(text).data.eval_results) is ("have" not in changes)  # the hub gets no scores on partial data


@pytest.mark.parametrize(
    ("task", "layout", "head"), [("cola", MODERN, "native"), ("mnli", CRAMMED, "tanh"), ("stsb", MODERN, "native")]
)
def test_the_code_on_the_card_of_a_finetuned_model_labels_a_text(task, layout, head, tokens, tmp_path):
    copy_tokenizer(tokens.path, tmp_path, 32)
    architecture, about = Architecture(**layout), TASKS[task]
    export.save_classifier(
        Classifier(Bert(architecture, 400, 32), about.classes, 0.0, seed=0, head=head), tmp_path, about.labels
    )
    text = card_of(task, layout, head)
    assert ("`ModernBertForSequenceClassification` of transformers" in text) == (head == "native")
    assert ("import model.hf" in text) == (head == "tanh")
    printed = ast.literal_eval(run(text, tmp_path))
    (answer,) = printed if isinstance(printed, list) else [printed]
    assert answer["label"] in about.labels or not about.labels
    assert isinstance(answer["score"], float)
