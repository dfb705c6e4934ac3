"""Encoders that another program trained: BERTs made by transformers, with BERT's usual ids of special tokens."""

import json
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import store_of_its_own, tiny_override, write_jsonl
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece
from toys import CPU

from flows.cram import checked_plan
from flows.execute import execute
from model import export
from model.errors import InputError, Unreachable
from model.finetuning import Classifier, Examples
from model.settings import Specials
from tasks import adopt
from tasks.store.artifacts import SEQUENCES, Artifact, artifacts_of
from tasks.text.encoder import LibraryEncoder
from tasks.text.holdout import measured_texts
from tasks.text.tokenizer import FILES, heldout_of, load_tokenizer, specials_of

USUAL = Specials(pad=0, unk=100, cls=101, sep=102, mask=103)  # of bert-base-uncased
LENGTH = 64
WORDS = ["the", "river", "saw", "map", "bread", "old", "##ss", "##ed", "Map", "é"]
TEXTS = ["The old river saws maps.", "bread-and-butter… É é ÉTÉ", "地図 map", ""]
LITERAL = "zq [MASK] [SEP] the"  # text, not special tokens
LONG = "x" * 120 + " river"


def entries() -> list[str]:
    """A vocabulary in which the special tokens have BERT's ids."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, "地"]
    unused = [f"[unused{number}]" for number in range(99)]
    pieces = [*characters, *(f"##{character}" for character in characters)]
    return ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces, *WORDS]


def write_tokenizer(folder: Path, lowercase: bool, as_words: bool = False) -> int:
    """The tokenizer as the hub has it: tokenizer.json, or in old folders vocab.txt. Returns how many entries it has."""
    names = entries()
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase, "model_max_length": 512}
    (folder / FILES[1]).write_text(json.dumps(config))
    if as_words:
        (folder / "vocab.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
        return len(names)
    model = WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(12)
    tokenizer.save(str(folder / FILES[0]))
    return len(names)


def public_model(
    folder: Path, name: str = "BertForMaskedLM", lowercase: bool = True, pickled: bool = False, more: int = 0, **how
):
    """A model that transformers made and saved, with its tokenizer. `more`: entries that have no token."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    count = write_tokenizer(folder, lowercase, **how)
    config = transformers.BertConfig(
        vocab_size=count + more, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=LENGTH, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    if pickled:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return model


def some_pairs(count: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, token types and attention mask of [CLS] A [SEP] B [SEP], padded."""
    ids = torch.randint(104, 200, (count, 20), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = USUAL.cls
    ids[:, [8, 16]] = USUAL.sep
    ids[:, 17:] = USUAL.pad
    types = torch.zeros_like(ids)
    types[:, 9:17] = 1
    return ids, types, (ids != USUAL.pad).long()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("BertForMaskedLM", {}),
        ("BertForMaskedLM", {"lowercase": False}),
        ("BertForMaskedLM", {"pickled": True, "as_words": True}),
        ("BertForPreTraining", {}),
        ("BertForPreTraining", {"pickled": True, "lowercase": False, "as_words": True}),
        ("BertForMaskedLM", {"more": 6}),
    ],
)
def test_an_adopted_model_has_the_scores_and_the_tokens_of_transformers(store, tmp_path, transformers, name, how):
    theirs = public_model(tmp_path / "public", name, **how)
    config = json.loads((tmp_path / "public" / "config.json").read_text())
    if how.get("more"):  # older programs write no `architectures`
        del config["architectures"]
    (tmp_path / "public" / "config.json").write_text(json.dumps(config))
    adopted = adopt.find_model(str(tmp_path / "public"))
    assert adopt.find_model(str(tmp_path / "public")) == adopted
    assert not adopted.stats["new_head"]
    ids, types, seen = some_pairs()
    with torch.inference_mode():
        found = theirs(input_ids=ids, token_type_ids=types, attention_mask=seen)
        logits = getattr(found, "logits", getattr(found, "prediction_logits", None))[..., : len(entries())]
        ours = export.load(adopted.path).eval()
        assert ours.specials == USUAL
        assert torch.allclose(ours.logits(ours.encode(ids, True, second_BS=types > 0)), logits, atol=1e-4)
        again = transformers.AutoModelForMaskedLM.from_pretrained(adopted.path).eval()
        assert torch.allclose(again(input_ids=ids, token_type_ids=types, attention_mask=seen).logits, logits, atol=1e-4)
    before = transformers.AutoTokenizer.from_pretrained(tmp_path / "public", padding_side="right")
    after = transformers.AutoTokenizer.from_pretrained(adopted.path)
    for text in TEXTS:
        given = dict(before(text, "a map"))
        assert dict(after(text, "a map")) == given
        assert load_tokenizer(adopted.path).encode(text, "a map").ids == given["input_ids"]


def test_a_bare_encoder_gets_a_new_head_and_says_so(store, tmp_path, caplog, transformers):
    theirs = public_model(tmp_path / "bare", "BertModel")
    adopted = adopt.find_model(str(tmp_path / "bare"))
    assert adopted.stats["new_head"]
    assert "bare" in caplog.text
    ids, types, seen = some_pairs()
    with torch.inference_mode():
        states = theirs(input_ids=ids, token_type_ids=types, attention_mask=seen).last_hidden_state
        ours = export.load(adopted.path).eval().encode(ids, True, second_BS=types > 0)
    assert torch.allclose(ours[seen > 0], states[seen > 0], atol=1e-5)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_classifier_gives_the_second_text_of_a_pair_its_type(tmp_path, pooling):
    theirs = public_model(tmp_path).bert
    ids, types, seen = some_pairs()
    classifier = Classifier(export.load(tmp_path, specials=USUAL), 2, 0.0, 0, pooling=pooling).eval()
    lengths = [17, 17, 12]
    examples = Examples.of([row[:length].tolist() for row, length in zip(ids, lengths, strict=True)], np.zeros(3))
    batch, is_padded = examples.batch(np.arange(3), CPU, USUAL.pad)
    seen = (batch != USUAL.pad).long()
    with torch.inference_mode():
        states = theirs(input_ids=batch, token_type_ids=types[:, :17] * seen, attention_mask=seen).last_hidden_state
        pooled = states[:, 0]
        if pooling == "mean":
            pooled = (states * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)
        assert torch.allclose(classifier(batch, is_padded), classifier.scores(pooled), atol=1e-5)


@pytest.mark.parametrize("lowercase", [True, False])
def test_texts_are_encoded_as_by_transformers(tmp_path, transformers, lowercase):
    write_tokenizer(tmp_path, lowercase)
    encoder = LibraryEncoder(load_tokenizer(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, LITERAL, LONG]
    ids, ends = encoder(texts)
    found = [part.tolist() for part in np.split(ids, ends[:-1])]
    expected = [theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids for text in texts]
    assert found == expected
    assert encoder.unknown["図"] == 1
    costs = encoder.tokens(texts)
    assert costs[:-1].tolist() == list(map(len, found[:-1]))
    assert costs[-1] == 120 + 1, "a word that is too long for the tokenizer counts as its characters"


def made(override: dict, until: str = "pretrain", recipe: str = "demo", **use: str) -> Artifact:
    plan = checked_plan(recipe, override, until, use, [])
    execute(plan)
    return plan.results()[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory, toy_texts):
    """A public model, and the changes of a run that starts from it."""
    root = tmp_path_factory.mktemp("public")
    public_model(root / "bert")
    override = tiny_override(write_jsonl(root / "toy.jsonl", toy_texts), budget=20_000, budget_unit="tokens")
    del override["vocabulary"]
    override["pretrain"] = {name: override["pretrain"][name] for name in ("budget", "budget_unit", "batch_size")}
    override["filter"] = {"max_tokens_per_char": None}
    override["pretrain"] |= {"start": str(root / "bert"), "learning_rate": 1e-3, "optimizer": "adamw", "detection": 0}
    with store_of_its_own(root / "artifacts"):
        yield {"root": root, "override": override}


@pytest.fixture(scope="module")
def adapted(world) -> Artifact:
    return made(world["override"])


def test_training_goes_on_with_the_models_own_tokens(world, adapted, transformers):
    tokens = artifacts_of("tokenize")[-1]
    sequences = np.load(tokens.path / SEQUENCES)
    assert (sequences == USUAL.sep).any()
    assert not np.isin(sequences, [USUAL.pad, USUAL.cls, USUAL.mask]).any()
    assert tokens.stats["entries"] == len(entries())
    losses = [each["heldout_loss"] for each in adapted.stats["evaluations"]]
    assert losses[-1] < losses[0] - 0.2
    again = transformers.AutoModelForMaskedLM.from_pretrained(adapted.path).eval()
    ids, types, seen = some_pairs()
    ours = export.load(adapted.path).eval()
    with torch.inference_mode():
        logits = again(input_ids=ids, token_type_ids=types, attention_mask=seen).logits
        assert torch.allclose(ours.logits(ours.encode(ids, True, second_BS=types > 0)), logits, atol=1e-4)
    measured = artifacts_of("measure")[-1]
    assert load_tokenizer(measured.path).get_vocab() == load_tokenizer(tokens.path).get_vocab()


def test_a_budget_of_0_measures_the_model_as_it_is(world, adapted):
    same = made(world["override"] | {"pretrain": world["override"]["pretrain"] | {"budget": 0}})
    assert same.stats["steps"] == 0
    start = adopt.find_model(str(world["root"] / "bert"))
    weights = export.load(same.path).state_dict()
    before = export.load(start.path).state_dict()
    before[export.POSITIONS] = before[export.POSITIONS][:32]  # tokenize.length
    assert all(torch.equal(weights[name], tensor) for name, tensor in before.items())
    assert same.stats["heldout_loss"] == pytest.approx(adapted.stats["evaluations"][0]["heldout_loss"], rel=1e-5)
    with pytest.raises(InputError, match=r"pretrain\.budget"):
        checked_plan("demo", {"pretrain": {"budget": 0}}, "pretrain", {}, [])


def test_the_held_out_words_and_bytes_are_those_of_a_model_from_scratch(world, adapted):
    texts = measured_texts(adapted.path)
    own = {"vocabulary": {"entries": 400}, "pretrain": {"budget": 2_000, "budget_unit": "tokens"}}
    scratch = made(world["override"] | own, "vocabulary")
    held = [heldout_of(texts, load_tokenizer(one.path), 32) for one in (adapted, scratch)]
    ours, theirs = (one.totals for one in held)
    assert ours["tokens"] != theirs["tokens"]
    assert [ours[unit] for unit in ("words", "characters", "bytes")] == [
        theirs[unit] for unit in ("words", "characters", "bytes")
    ]


@pytest.mark.parametrize("head", ["native", "tanh"])
def test_finetuning_a_public_model_saves_a_classifier_that_transformers_loads(world, tmp_path, transformers, head):
    rows = [{"a": f"the map {n}", "b": "old bread", "label": "yes" if n % 2 else "no"} for n in range(80)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = {"name": "pairs", "data": str(data), "text": "a", "pair": "b", "label": "label"}
    tuned = {"tasks": [task], "seeds": 1, "epochs": 1, "baseline": False, "keep": "all", "max_tokens": 32, "head": head}
    made(world["override"] | {"finetune": tuned}, "finetune", pretrain=str(world["root"] / "bert"))
    kept = artifacts_of("finetune")[-1]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(kept.path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(kept.path)
    given = tokenizer("the map", "old bread", return_tensors="pt")
    assert given["token_type_ids"].any()
    one_text = given | {"token_type_ids": torch.zeros_like(given["token_type_ids"])}
    with torch.inference_mode():
        assert not torch.allclose(model(**given).logits, model(**one_text).logits, atol=1e-4)
        encoder = export.load(kept.path).eval()
        ids = given["input_ids"]
        states = encoder.encode(ids, second_BS=given["token_type_ids"] > 0)
        assert torch.allclose(model.bert(**given).last_hidden_state, states, atol=1e-5)


def spoilt(folder: Path, what: str) -> Path:
    """A folder with a public model that can't be used."""
    public_model(folder, "BertForSequenceClassification" if what == "head" else "BertForMaskedLM")
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "kind of tokenizer":
            tokenizer = Tokenizer(BPE({name: number for number, name in enumerate(entries())}, []))
            tokenizer.save(str(folder / FILES[0]))
        case "special tokens":
            text = (folder / FILES[0]).read_text()
            (folder / FILES[0]).write_text(text.replace("[MASK]", "<mask>"))
        case "number of entries":
            tokenizer = Tokenizer.from_file(str(folder / FILES[0]))
            tokenizer.add_tokens([f"word{number}" for number in range(3)])
            tokenizer.save(str(folder / FILES[0]))
        case "layout":
            (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
        case "family":
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "roberta"}))
        case "decoder":
            (folder / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
        case "positions":
            (folder / "config.json").write_text(json.dumps(config | {"position_embedding_type": "relative_key"}))
        case "no tokenizer":
            (folder / FILES[0]).unlink()
        case "junk":
            (folder / "model.safetensors").unlink()
            (folder / "pytorch_model.bin").write_bytes(b"junk")
        case "ids":
            (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 7}))
    return folder


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("kind of tokenizer", "BPE"),
        ("special tokens", r"\[MASK\]"),
        ("number of entries", "entries"),
        ("layout", "hidden_act"),
        ("family", "roberta"),
        ("ids", "pad|PAD"),
        ("decoder", "is_decoder"),
        ("positions", "position_embedding_type"),
        ("no tokenizer", r"vocab\.txt"),
        ("junk", r"pytorch_model\.bin"),
        ("head", "SequenceClassification"),
    ],
)
def test_a_model_that_can_not_be_started_from_is_refused_before_anything_is_adopted(store, tmp_path, what, named):
    folder = spoilt(tmp_path / "public", what)
    with pytest.raises(InputError, match=named) as refused:
        checked_plan("demo", {"pretrain": {"start": str(folder)}}, "pretrain", {}, [])
    assert not artifacts_of("pretrain")
    assert what == "kind of tokenizer" or "special" in what or str(folder) in str(refused.value)


def test_a_model_of_the_hub_is_read_from_its_cache_when_the_hub_is_out_of_reach(store, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--some--bert-tiny"
    commit = "a" * 40
    public_model(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    adopted = adopt.find_model("some/bert-tiny")
    assert adopted == adopt.find_model(f"some/bert-tiny@{commit}")
    assert specials_of(load_tokenizer(adopted.path)) == USUAL
    with pytest.raises(Unreachable, match="no/such"):
        adopt.find_model("no/such")


def test_a_path_is_no_name_on_the_hub(store, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    public_model(tmp_path / "bert")
    assert adopt.find_model("~/bert").stats["public"] == "bert"
    with pytest.raises(InputError, match=r"no folder \./bart"):
        adopt.find_model("./bart")


def test_recipes_that_continue_a_model_need_one(store):
    with pytest.raises(InputError, match=r"pretrain\.start"):
        checked_plan("pocket-adapt", {}, "pretrain", {}, [])


def test_a_layout_of_cram_is_trained_from_scratch_with_the_vocabulary_of_a_public_model(world):
    own = {"vocabulary": {"start": str(world["root"] / "bert")}, "pretrain": {"budget": 2_000, "budget_unit": "tokens"}}
    model = made(world["override"] | own)
    assert export.load(model.path).specials == USUAL
