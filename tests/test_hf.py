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
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, sentence

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


LAYOUTS = {
    "crammed-bert": layout("crammed-bert"),
    "modern": layout("modern"),
    "funnel": layout("modern", funnel=1),
    "shared, untied": layout("crammed-bert", different_layers=1, embedding=16, tied=False, decoder_bias=True),
}
OWN = [name for name, one in LAYOUTS.items() if export.transformers_model(one) is None]


@pytest.fixture(scope="module", autouse=True)
def hf():
    """The module, with a transformers that looks nothing up on a network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        from transformers.utils import logging

        import model.hf

        logging.disable_progress_bar()
        yield model.hf


def roughen(module: torch.nn.Module) -> None:
    """Give no parameter a value, like 0 or 1, that could hide a mistake."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def some_bert(name: str, entries: int = ENTRIES) -> Bert:
    bert = Bert(LAYOUTS[name], entries, LENGTH, seed=3).eval()
    roughen(bert)
    return bert


def some_classifier(name: str, entries: int = ENTRIES, classes: int = 3) -> Classifier:
    classifier = Classifier(some_bert(name, entries), classes, dropout=0.0, seed=2).eval()
    roughen(classifier.classifier)
    return classifier


def inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(3, LENGTH) token ids, two of the sequences padded; the same for transformers, with other ids behind the mask."""
    generator = torch.Generator().manual_seed(1)
    tokens, others = torch.randint(5, ENTRIES, (2, 3, LENGTH), generator=generator)
    tokens[0, 9:] = tokens[2, -1:] = PAD
    seen = tokens != PAD
    return tokens, {"input_ids": tokens.where(seen, others), "attention_mask": seen.long()}


def logits(bert: Bert, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return bert.logits(bert.encode(tokens, padded=True))


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


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_and_states_are_those_of_cram(name: str, kind: torch.dtype, tmp_path: Path):
    from transformers import AutoModel, AutoModelForMaskedLM

    bert, (tokens, given) = some_bert(name), inputs()
    export.save(bert, tmp_path)
    theirs, report = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=kind, output_loading_info=True)
    assert not any(report.values()), report
    assert {parameter.dtype for parameter in theirs.parameters()} == {kind}
    expected = logits(bert.to(kind), tokens)
    assert expected.float().std() > 0.5
    with torch.no_grad():
        found = theirs.eval()(**given, token_type_ids=torch.zeros_like(tokens)).logits
        states = AutoModel.from_pretrained(tmp_path, dtype=kind).eval()(**given).last_hidden_state
        seen = given["attention_mask"].bool()
        torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=TOLERANCE[kind])
        encoded = bert.encode(tokens, padded=True)
        torch.testing.assert_close(states[seen], encoded[seen], rtol=1e-5, atol=TOLERANCE[kind])


@pytest.mark.parametrize("name", LAYOUTS)
def test_scores_of_a_classifier_are_those_of_cram(name: str, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    ours, (tokens, given) = some_classifier(name), inputs()
    export.save_classifier(ours, tmp_path, LABELS)
    theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert {key.split(".")[0] for key in report.pop("unexpected_keys")} <= {"head", "bert"}
    assert not any(report.values()), report
    labels = torch.tensor([2, 0, 1])
    with torch.no_grad():
        expected, output = ours(tokens), theirs.eval()(**given, labels=labels)
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(output.loss, F.cross_entropy(expected, labels), rtol=1e-5, atol=2e-5)
    assert theirs.config.id2label == dict(enumerate(LABELS))


def test_the_loss_of_one_class_is_the_squared_error(tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    ours, (tokens, given) = some_classifier("crammed-bert", classes=1), inputs()
    export.save_classifier(ours, tmp_path, ())
    labels = torch.tensor([0.5, 3.0, 4.5])
    with torch.no_grad():
        found = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(**given, labels=labels)
        torch.testing.assert_close(found.loss, F.mse_loss(ours(tokens)[:, 0], labels))


def test_the_loss_is_that_of_the_tokens_with_labels_and_outputs_are_tuples_on_request(hf):
    model, (tokens, given) = hf.CramForMaskedLM(hf.CramConfig(cram=about("crammed-bert"))).eval(), inputs()
    labels = tokens.where(torch.arange(LENGTH) % 3 == 0, -100).masked_fill(tokens == PAD, -100)
    with torch.no_grad():
        loss, scores = model(**given, labels=labels, return_dict=False)
    torch.testing.assert_close(loss, F.cross_entropy(scores[labels >= 0], labels[labels >= 0]))


@pytest.mark.parametrize("name", OWN)
def test_what_transformers_saves_loads_in_both(name: str, tmp_path: Path):
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

    tokens, given = inputs()
    seen = tokens != PAD
    export.save(some_bert(name), tmp_path)
    pretrained = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    roughen(pretrained.base_model.embedding)
    pretrained.save_pretrained(tmp_path / "pretrained")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=3).eval()
    classifier.save_pretrained(tmp_path / "finetuned")
    with torch.no_grad():
        expected = pretrained(**given).logits
        assert torch.equal(AutoModelForMaskedLM.from_pretrained(tmp_path / "pretrained")(**given).logits, expected)
        ours = logits(export.load(tmp_path / "pretrained").eval(), tokens)
        torch.testing.assert_close(ours[seen], expected[seen], rtol=1e-5, atol=2e-5)
        expected = classifier(**given).logits
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "finetuned")
        assert torch.equal(again(**given).logits, expected)
        ours = export.load_classifier(tmp_path / "finetuned").eval()(tokens)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_fill_mask_pipeline_gives_the_tokens_of_cram_fill(name: str, tmp_path: Path):
    from transformers import pipeline

    export.save(some_bert(name, tokenizer_in(tmp_path)), tmp_path)
    text = "The grey [MASK] saw a [MASK] map"
    theirs = pipeline("fill-mask", model=str(tmp_path))(text, top_k=4)
    fill = Filler(tmp_path)
    for found, expected in zip(theirs, fill(text, 4, "The text"), strict=True):
        assert [one["token"] for one in found] == [fill.tokenizer.token_to_id(token) for token, _ in expected]
        assert [one["score"] for one in found] == pytest.approx([share for _, share in expected], rel=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_text_classification_pipeline_gives_the_labels_of_cram_predict(name: str, tmp_path: Path):
    from transformers import pipeline

    export.save_classifier(some_classifier(name, entries=tokenizer_in(tmp_path)), tmp_path, LABELS, texts=2)
    pairs = list(zip(texts(40)[::2], texts(40)[1::2], strict=True))
    classify = pipeline("text-classification", model=str(tmp_path))
    theirs = classify([{"text": a, "text_pair": b} for a, b in pairs], top_k=None, truncation=True, batch_size=8)
    ours = list(Labeller(tmp_path)([(n, f"{a}\t{b}".encode()) for n, (a, b) in enumerate(pairs)]))
    assert len({answer["probability"] for answer in ours}) > 10
    for found, expected in zip(theirs, ours, strict=True):
        assert found[0]["label"] == expected["label"]
        assert {one["label"]: one["score"] for one in found} == pytest.approx(expected["probabilities"], abs=1e-5)


def test_trainer_trains_both_and_cram_reads_what_it_saves(tmp_path: Path):
    from transformers import (
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    export.save(Bert(LAYOUTS["funnel"], tokenizer_in(tmp_path), LENGTH), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    rows = [dict(tokenizer(text, truncation=True)) for text in texts(16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, learning_rate=3e-3, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    for folder, auto, labels, collate in (
        ("pretrained", AutoModelForMaskedLM, {}, DataCollatorForLanguageModeling(tokenizer, seed=1)),
        ("finetuned", AutoModelForSequenceClassification, {"num_labels": 2}, None),
    ):
        model = auto.from_pretrained(tmp_path, dropout=0.1, **labels)
        given = [row | ({"labels": 1} if labels else {}) for row in rows]
        trainer = Trainer(model, arguments, train_dataset=given, data_collator=collate, processing_class=tokenizer)
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


def about(name: str, **changes: object) -> dict:
    return export.Saved(architecture=LAYOUTS[name], vocabulary=ENTRIES, length=LENGTH).model_dump() | changes


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_new_model_starts_as_those_of_cram_do(hf, name: str):
    sizes = about(name) | {"architecture": LAYOUTS[name].model_dump() | {"zero_outputs": True}}
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
    export.save(some_bert("crammed-bert"), tmp_path)
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
    model = hf.CramModel(hf.CramConfig(cram=about("crammed-bert")))
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
def test_a_config_that_is_no_models_is_refused_by_the_field(changes: dict, field: str, tmp_path: Path):
    from transformers import AutoModelForSequenceClassification

    export.save_classifier(some_classifier("crammed-bert"), tmp_path, LABELS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"cram": config["cram"] | changes}))
    with pytest.raises(ValueError, match=f"(?s){field}"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_folder_of_another_layout_is_refused_by_the_field(hf, tmp_path: Path):
    export.save(some_bert("modern"), tmp_path)
    with pytest.raises(ValueError, match="hidden_size"):
        hf.CramForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "unigram"])
def test_every_kind_of_tokenizer_encodes_as_cram_does_with_and_without_special_tokens(kind: str, tmp_path: Path):
    from transformers import AutoTokenizer

    export.save(Bert(LAYOUTS["crammed-bert"], tokenizer_in(tmp_path, kind), LENGTH), tmp_path)
    given = [*texts(10), "a [MASK] b [SEP] c", "", " \t ", "Naïve “CAFÉ”, 3.5 €!", "``so'' it's", "x" * 300]
    ours = load_tokenizer(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path, split_special_tokens=True)
    assert plain(given)["input_ids"] == [one.ids for one in ours.encode_batch(given)]
    pairs = list(itertools.pairwise(given))
    assert plain(pairs)["input_ids"] == [one.ids for one in ours.encode_batch(pairs)]
    ours.encode_special_tokens = False
    usual = AutoTokenizer.from_pretrained(tmp_path)
    assert usual(given)["input_ids"] == [one.ids for one in ours.encode_batch(given)]
    assert usual.model_max_length == LENGTH
