"""The loss of a model on another text: that of pretraining on its own, the same for every order and layout."""

import random

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import corpus_of, document, downloaded, store_of_its_own, toy_tokens, write_jsonl
from typer.testing import CliRunner

from flows.cli.main import app
from model import export
from model.errors import InputError
from tasks.evaluate import Evaluate, evaluate
from tasks.pretrain import Pretrain, pretrain
from tasks.store.artifacts import artifacts_of
from tasks.text.tokenizer import MASK, PAD, SEP, UNK, heldout_of, load_tokenizer
from tasks.tokenize import Tokenize, tokenize

TINY = Pretrain(
    architecture={"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48},
    budget=4000,
    budget_unit="tokens",
    batch_size=8,
)
TOO_LONG = " " + 101 * "x"  # for a tokenizer: [UNK]
UNITS = ("word", "character", "byte")


@pytest.fixture(scope="module")
def made(tmp_path_factory, toy_texts: list[str]):
    """The artifacts up to a model that was trained on a few thousand tokens."""
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        tokens = toy_tokens(root, [text + TOO_LONG for text in toy_texts])
        yield tokens | {"root": root, "model": pretrain.fn(TINY, tokens["tokens"])}


@pytest.fixture(scope="module")
def others() -> list[str]:
    """Documents that the model has not seen, some with letters of several bytes and a word that it can't read."""
    rng = random.Random(3)
    return [document(rng, rng.randint(1, 9)) + (f" Ein Käfer,{TOO_LONG} va." if i % 3 else "") for i in range(40)]


@pytest.mark.parametrize("text", ["tokens", "model"])
def test_a_models_loss_on_its_own_held_out_text_is_exactly_that_of_pretraining(made, text: str):
    found = evaluate.fn(Evaluate(), made["model"], made[text], []).stats
    recorded = made["model"].stats["heldout"]
    assert recorded["unread"] > 0
    assert {name: found[name] for name in recorded} == recorded
    assert set(found) - set(recorded) == {"table"}


def test_each_document_has_the_loss_that_the_model_gives_it_with_a_seventh_of_the_words_hidden(made, others, tmp_path):
    corpus = corpus_of(tmp_path, others[:6], part_megabytes=1024)
    written = pd.read_parquet(evaluate.fn(Evaluate(), made["model"], corpus, []).path / "documents.parquet")
    texts = pd.read_parquet(next(corpus.path.glob("part-*.parquet"))).set_index("id")["text"][written["id"]].tolist()
    tokenizer = load_tokenizer(made["model"].path)
    model = export.load(made["model"].path).eval()
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    held = heldout_of(texts, tokenizer, model.length).without(UNK)
    assert (held.sequences == UNK).any()
    assert held.sequences.ravel().tolist() == [
        *(token for ids in encoded for token in (*ids, SEP)), *[PAD] * (held.sequences == PAD).sum()
    ]  # fmt: skip
    nats = np.zeros(len(texts))
    rounds = held.rounds()
    for row, place in zip(*np.nonzero(held.words >= 0), strict=True):
        tokens = torch.from_numpy(held.sequences[row].astype(np.int64))
        later = held.pieces[row] >= held.pieces[row, place]
        hidden = torch.from_numpy((rounds[row] == rounds[row, place]) & later)
        kept = tokens != PAD
        with torch.no_grad():
            scores = model.logits(model.encode(tokens.masked_fill(hidden, MASK)[None, kept]))[0, place]
        nats[held.owners[row, place]] += torch.nn.functional.cross_entropy(scores, tokens[place]).item()
        nats[held.owners[row, place]] += held.length_nats[row, place]
    assert written["nats"].tolist() == pytest.approx(nats.tolist(), rel=1e-4)
    assert written["tokens"].tolist() == [len(ids) for ids in encoded]
    assert written["characters"].tolist() == [*map(len, texts)]
    assert written["bytes"].tolist() == [len(text.encode()) for text in texts]


def test_the_result_is_the_same_whatever_the_order_and_the_parts_of_the_text(made, others, tmp_path):
    found = []
    for name, megabytes in (("one", 1024), ("many", 0.002)):
        shuffled = others.copy()
        random.Random(name).shuffle(shuffled)
        corpus = corpus_of(tmp_path, shuffled, part_megabytes=megabytes, source=name)
        found.append(evaluate.fn(Evaluate(characters=9000), made["model"], corpus, []).stats)
        found[-1].pop("table")  # by the name of the source
    assert found[0] == found[1]
    assert 9000 <= found[0]["characters"] < 9000 + max(map(len, others))


def test_a_limit_measures_the_first_documents_of_the_whole(made, others, tmp_path):
    corpus = corpus_of(tmp_path, others)
    rows = [
        pd.read_parquet(evaluate.fn(Evaluate(**some), made["model"], corpus, []).path / "documents.parquet")
        for some in ({}, {"characters": 5000})
    ]
    whole, part = (table["id"].tolist() for table in rows)
    assert len(whole) == len(others)
    assert 0 < len(part) < len(whole)
    assert part == whole[: len(part)]


def test_the_sources_add_up_to_the_whole(made, others, tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", others[i::3], name) for i, name in enumerate(("one", "two", "é"))]
    found = evaluate.fn(Evaluate(), made["model"], downloaded(*files), [])
    stats = found.stats
    rows = pd.DataFrame(found.stats["table"]).set_index("source")
    written = pd.read_parquet(found.path / "documents.parquet")
    assert sorted(rows.index) == ["one", "two", "é"]
    for name in ("documents", "characters"):
        assert rows[name].sum() == stats[name]
    for unit in UNITS:
        assert written[f"{unit}s"].sum() == stats[f"{unit}s"]
        read = written[f"{unit}s"] - (written["unread_bytes"] if unit == "byte" else 0)
        sizes = read.groupby(written["source"]).sum()
        nats = rows[f"nats per {unit}"] * sizes
        assert nats.sum() / sizes.sum() == pytest.approx(stats[f"nats_per_{unit}"]["value"], abs=1e-4)
        own = written.groupby("source")["nats"].sum() / sizes
        assert rows[f"nats per {unit}"].to_dict() == pytest.approx(own.to_dict(), abs=6e-5)
        assert written["nats"].sum() / sizes.sum() == pytest.approx(stats[f"nats_per_{unit}"]["value"], abs=1e-6)


def test_what_has_no_documents_to_measure_and_a_model_that_was_not_pretrained_are_refused_by_name(
    made, others, tmp_path
):
    fewer = Tokenize(length=32, heldout_fraction=0.3)
    strange = tokenize.fn(fewer, corpus_of(tmp_path, others), made["vocabulary"])
    for model, text, compared, named in (
        ("model", "vocabulary", [], made["vocabulary"].name),
        ("model", "tokens", [strange], strange.name),
        ("tokens", "filter", [], made["tokens"].key),
    ):
        with pytest.raises(InputError, match=named):
            evaluate.fn(Evaluate(), made[model], made[text], compared)


def show(*arguments: str) -> str:
    """What a command prints that ends well."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_the_command_measures_a_users_file_and_says_what_the_artifact_holds(made, others, tmp_path):
    (tmp_path / "mine.txt").write_text("\n\n".join(others[:7]))
    printed = show("evaluate", "latest", str(tmp_path / "mine.txt"))
    found = artifacts_of("evaluate")[-1]
    assert found.manifest["inputs"]["model"] == made["model"].name
    assert found.stats["characters"] <= len((tmp_path / "mine.txt").read_text())
    for unit in UNITS:
        [line] = (line for line in printed.splitlines() if line.split()[:1] == [unit])
        assert line.split()[1] == f"{found.stats[f'nats_per_{unit}']['value']:.4f}"
    assert f"{found.path}\n" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["filter/latest", "tokenize"], "filter/latest"),
        (["zzz", "tokenize"], "zzz"),
        (["latest", "tokenize/zzz"], "zzz"),
        (["latest", "gone.txt"], "gone.txt"),
        (["latest", "vocabulary"], "vocabulary/"),
    ],
)
def test_the_command_refuses_what_is_no_model_or_no_text_and_names_it(made, arguments: list[str], words: str):
    before = artifacts_of("evaluate")
    error = CliRunner().invoke(app, ["evaluate", *arguments]).exception
    assert isinstance(error, InputError)
    assert words in str(error)
    assert artifacts_of("evaluate") == before


def test_evaluations_of_artifacts_are_made_once_listed_and_shown_with_their_loss(made):
    found = evaluate.fn(Evaluate(), made["model"], made["tokens"], [])
    value, error = found.stats["nats_per_byte"].values()
    assert f"{found.path}\n" in show("evaluate", made["model"].key, made["tokens"].name)
    [line] = (line for line in show("ls", "evaluate").splitlines() if found.key in line)
    assert f"{value:.4f} ± {error:.4f} nats per byte" in line
    assert f"text: {made['tokens'].name}" in show("show", f"evaluate/{found.key}")


def test_only_documents_that_the_others_hold_out_too_are_measured(made, tmp_path):
    tokens = made["tokens"].manifest["params"]
    fewer = Tokenize(**tokens | {"heldout_fraction": tokens["heldout_fraction"] / 2})
    other = tokenize.fn(fewer, made["filter"], made["vocabulary"])
    whole, part, again = (
        pd.read_parquet(evaluate.fn(Evaluate(), made["model"], text, others).path / "documents.parquet")
        for text, others in ((made["tokens"], []), (made["tokens"], [other]), (other, [made["model"]]))
    )
    held = pd.read_parquet(other.path / "heldout.parquet")
    held = set(held["id"][held["shared_words"] == 0])
    assert set(part["id"]) == set(whole["id"]) & held == set(again["id"])
    assert 0 < len(part) < len(whole)
