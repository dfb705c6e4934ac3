"""Every layout in transformers: its Auto classes, pipelines and Trainer give cram's own answers."""

import itertools
import json
import random
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.nn.functional as F
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, roughen, sentence

from flows.cli.inference import Filler, Labeller
from flows.recipes import RECIPES
from model import export
from model.bert import PAD, Bert, Classifier
from model.settings import Architecture
from tasks.text.tokenizer import copy_tokenizer, load_tokenizer, save_tokenizer
from tasks.text.vocabulary_training import train

LENGTH, ENTRIES = 24, 60
TINY = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48}
LABELS = ("entailment", "neutral", "contradiction")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.15}  # of scores with a deviation of 1 to 10
torch.set_num_threads(1)


def layout(recipe: str, **axes: object) -> Architecture:
    about = RECIPES[recipe].pretrain.architecture.model_dump()
    return Architecture(**about | TINY | axes)


MODERN = layout("modern")
OWN = {  # which transformers has no model of
    "crammed-bert": layout("crammed-bert"),
    "funnel": layout("modern", funnel=1),
    "convolution": layout("frontier"),
    "shared, untied": layout("crammed-bert", different_layers=1, embedding=16, tied=False, decoder_bias=True),
}
own_layouts = pytest.mark.parametrize("layout", OWN.values(), ids=OWN)


@pytest.fixture
def hf(transformers):
    from model import hf

    return hf


def some_bert(layout: Architecture, entries: int = ENTRIES) -> Bert:
    return roughen(Bert(layout, entries, LENGTH, seed=3).eval())


def some_classifier(layout: Architecture, entries: int = ENTRIES, classes: int = 3, **reads) -> Classifier:
    classifier = Classifier(some_bert(layout, entries), classes, dropout=0.0, seed=2, **reads).eval()
    roughen(classifier.classifier)
    return classifier


def inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(3, LENGTH) token ids, two of the sequences padded; the same for transformers, with other ids behind the mask."""
    generator = torch.Generator().manual_seed(1)
    tokens, others = torch.randint(5, ENTRIES, (2, 3, LENGTH), generator=generator)
    tokens[0, 9:] = tokens[2, -1:] = PAD
    seen = tokens != PAD
    return tokens, {"input_ids": tokens.where(seen, others), "attention_mask": seen.long()}


def tokenizer_in(folder: Path, kind: str = "wordpiece") -> int:
    """Put a toy tokenizer there; its number of entries."""
    words = sorted({word for part in (SUBJECTS, VERBS, OBJECTS, ENDS) for words in part for word in words.split()})
    tokenizer = train(pa.table({"word": words, "count": [40] * len(words)}), 300, kind=kind)
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch))
        copy_tokenizer(Path(scratch), folder, LENGTH)
    return tokenizer.get_vocab_size()


def texts(count: int) -> list[str]:
    rng = random.Random(3)
    return [" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(count)]


@own_layouts
@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_scores_and_the_loss_in_any_precision_are_those_of_cram(kind, layout, tmp_path: Path, transformers):
    bert, (tokens, given) = some_bert(layout), inputs()
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=kind).eval()
    assert {parameter.dtype for parameter in theirs.parameters()} == {kind}
    seen, types = tokens != PAD, torch.zeros_like(tokens)
    labels = tokens.where((torch.arange(LENGTH) % 3 == 0) & seen, -100)
    with torch.no_grad():
        expected = bert.to(kind).logits(bert.encode(tokens, padded=True))
        loss, found = theirs(**given, token_type_ids=types, labels=labels, return_dict=False)
    assert expected.float().std() > 0.5
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=TOLERANCE[kind])
    wanted = F.cross_entropy(found[labels >= 0].float(), labels[labels >= 0])
    torch.testing.assert_close(loss.float(), wanted, rtol=1e-5, atol=TOLERANCE[kind])


@pytest.mark.parametrize("labels", [(2, 0, 1), (0.5, 3.0, 4.5)], ids=["classes", "numbers"])
def test_the_loss_of_a_classifier_is_that_of_its_scores(labels: tuple, tmp_path: Path, transformers):
    names = LABELS if isinstance(labels[0], int) else ()
    (_, given), wanted = inputs(), torch.tensor(labels)
    export.save_classifier(some_classifier(OWN["crammed-bert"], classes=len(names) or 1), tmp_path, names)
    with torch.no_grad():
        found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(**given, labels=wanted)
    loss = F.cross_entropy(found.logits, wanted) if names else F.mse_loss(found.logits[:, 0], wanted)
    torch.testing.assert_close(found.loss, loss)


@own_layouts
@pytest.mark.parametrize("pooling", ["cls", "compare"])
def test_pipelines_give_the_answers_of_cram_fill_and_predict(
    layout: Architecture, pooling: str, tmp_path: Path, transformers
):
    entries = tokenizer_in(tmp_path)
    export.save(some_bert(layout, entries), tmp_path)
    text = "The grey [MASK] saw a [MASK] map"
    theirs = transformers.pipeline("fill-mask", model=str(tmp_path))(text, top_k=4)
    fill = Filler(tmp_path)
    for found, expected in zip(theirs, fill(text, 4, "The text"), strict=True):
        assert [one["token"] for one in found] == [fill.tokenizer.token_to_id(token) for token, _ in expected]
        assert [one["score"] for one in found] == pytest.approx([share for _, share in expected], rel=1e-4)
    export.save_classifier(some_classifier(layout, entries, pooling=pooling, texts=2), tmp_path, LABELS)
    pairs = list(zip(texts(40)[::2], texts(40)[1::2], strict=True))
    classify = transformers.pipeline("text-classification", model=str(tmp_path))
    theirs = classify([{"text": a, "text_pair": b} for a, b in pairs], top_k=None, truncation=True, batch_size=8)
    ours = list(Labeller(tmp_path)([(n, f"{a}\t{b}".encode()) for n, (a, b) in enumerate(pairs)]))
    assert len({answer["probability"] for answer in ours}) > 10
    for found, expected in zip(theirs, ours, strict=True):
        assert found[0]["label"] == expected["label"]
        assert {one["label"]: one["score"] for one in found} == pytest.approx(expected["probabilities"], abs=1e-5)
    if pooling == "compare":
        with pytest.raises(ValueError, match=r"1 of 1 inputs .*two texts"):
            classify("one text alone")


def test_trainer_trains_both_and_cram_reads_what_it_saves(tmp_path: Path, transformers):
    export.save(Bert(OWN["funnel"], tokenizer_in(tmp_path), LENGTH), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rows = [dict(tokenizer(text, truncation=True)) for text in texts(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, learning_rate=3e-3, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    masked = transformers.DataCollatorForLanguageModeling(tokenizer, seed=1)
    for folder, auto, labels, collate in (
        ("pretrained", transformers.AutoModelForMaskedLM, {}, masked),
        ("finetuned", transformers.AutoModelForSequenceClassification, {"num_labels": 2}, None),
    ):
        model = auto.from_pretrained(tmp_path, dropout=0.1, **labels)
        given = [row | ({"labels": 1} if labels else {}) for row in rows]
        trainer = transformers.Trainer(model, arguments, collate, given, processing_class=tokenizer)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(0)
        loss = trainer.evaluate(given)["eval_loss"]
        trainer.train()
        torch.manual_seed(0)
        assert trainer.evaluate(given)["eval_loss"] < loss
        head = {"head"} if labels else {"classifier"}  # what of the model has no part in this loss
        still = {key for key, value in model.state_dict().items() if torch.equal(before[key], value)}
        assert not {key for key in still if not head & set(key.split("."))}
        trainer.save_model(tmp_path / folder)
    assert len(Filler(tmp_path / "pretrained")("a [MASK] map", 3, "The text")[0]) == 3
    ((answer),) = Labeller(tmp_path / "finetuned")([(1, b"a map")])
    assert answer["label"] == "LABEL_1"


def about(layout: Architecture = OWN["crammed-bert"], **changes: object) -> dict:
    return export.Saved(architecture=layout, vocabulary=ENTRIES, length=LENGTH).model_dump() | changes


@pytest.mark.parametrize("layout", [*OWN.values(), MODERN], ids=[*OWN, "modern"])
def test_a_new_model_starts_as_those_of_cram_do(hf, layout: Architecture):
    sizes = about(layout) | {"architecture": layout.model_dump() | {"zero_outputs": True}}
    theirs = hf.CramForMaskedLM(hf.CramConfig(cram=sizes)).bert
    ours = Bert(theirs.architecture, ENTRIES, LENGTH)
    for (key, found), expected in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert found.shape == expected.shape
        found, expected = found.detach().numpy(), expected.detach().numpy()
        assert found.std() == pytest.approx(expected.std(), rel=0.3), key
        assert found.mean() == pytest.approx(expected.mean(), abs=0.01), key
    assert not theirs.embedding.word.weight[PAD].any()
    for (key, found), expected in zip(theirs.named_buffers(), ours.buffers(), strict=True):
        assert torch.equal(found, expected), key


def test_a_new_head_is_drawn_and_dropout_acts_in_training_only(hf, tmp_path: Path):
    export.save(some_bert(OWN["crammed-bert"]), tmp_path)
    model, (_, given) = hf.CramForSequenceClassification.from_pretrained(tmp_path, num_labels=4, dropout=0.3), inputs()
    assert model.classifier.dense.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.classifier.out.bias.any()
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.3}
    model.eval()
    assert torch.equal(model(**given).logits, model(**given).logits)
    model.train()
    assert not torch.equal(model(**given).logits, model(**given).logits)


def test_the_paper_s_model_is_what_a_config_without_arguments_describes(hf):
    config = hf.CramConfig()
    assert config.architecture == Architecture() == RECIPES["crammed-bert"].pretrain.architecture
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (768, 16, 12)
    assert (config.vocab_size, config.max_position_embeddings, config.pad_token_id) == (32_768, 128, PAD)
    assert json.loads(config.to_json_string())["cram"] == config.cram


def test_longer_inputs_and_other_vocabularies_are_refused(hf):
    model = hf.CramModel(hf.CramConfig(cram=about()))
    with pytest.raises(ValueError, match="input_ids"):
        model(torch.full((1, LENGTH + 1), 7))
    with pytest.raises(NotImplementedError):
        model.resize_token_embeddings(ENTRIES + 1)


JUNK = {  # what is written into config.json, and the field that the error names
    "a width that heads don't divide": ({"architecture": TINY | {"hidden": 30}}, "hidden 30"),
    "unknown field": ({"width": 5}, "width"),
    "other classes": ({"classes": 4}, "id2label.*cram.classes"),
    "a head of transformers": ({"head": "native"}, "cram.head"),
    "longer inputs than it takes": ({"max_tokens": 4096}, "max_tokens"),
}


@pytest.mark.parametrize(("changes", "field"), JUNK.values(), ids=JUNK)
def test_a_config_that_is_no_models_is_refused_by_the_field(changes: dict, field: str, tmp_path: Path, transformers):
    export.save_classifier(some_classifier(OWN["crammed-bert"]), tmp_path, LABELS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"cram": config["cram"] | changes}))
    with pytest.raises(ValueError, match=f"(?s){field}"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_folder_of_another_layout_is_refused_by_the_field(hf, tmp_path: Path):
    export.save(some_bert(MODERN), tmp_path)
    with pytest.raises(ValueError, match="hidden_size"):
        hf.CramForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_every_kind_of_tokenizer_encodes_as_cram_does_with_and_without_special_tokens(
    kind: str, tmp_path: Path, transformers
):
    export.save(Bert(OWN["crammed-bert"], tokenizer_in(tmp_path, kind), LENGTH), tmp_path)
    given = [*texts(10), "a [MASK] b [SEP] c", "", " \t ", "Naïve “CAFÉ”, 3.5 €!", "``so'' it's", "x" * 300]
    ours = load_tokenizer(tmp_path)
    plain = transformers.AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    assert plain(given)["input_ids"] == [one.ids for one in ours.encode_batch(given)]
    pairs = list(itertools.pairwise(given))
    assert plain(pairs)["input_ids"] == [one.ids for one in ours.encode_batch(pairs)]
    ours.encode_special_tokens = False
    usual = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert usual(given)["input_ids"] == [one.ids for one in ours.encode_batch(given)]
    assert usual.model_max_length == LENGTH
