"""Every layout in transformers: its Auto classes, pipelines and Trainer give cram's own answers."""

import itertools
import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, roughen, sentence
from tokenizers import AddedToken
from tokenizers.models import WordPiece

from flows.recipes import RECIPES
from model import export
from model.bert import PAD, Bert
from model.classifier import Classifier
from model.settings import Architecture
from tasks.text.tokenizer import (
    MASK,
    SEP,
    SPECIALS,
    copy_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_of,
)

LENGTH, ENTRIES = 24, 60
TINY = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48}
LABELS = ("entailment", "neutral", "contradiction")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.15}  # of scores with a deviation of 1 to 10
torch.set_num_threads(1)


def layout(recipe: str, **axes: object) -> Architecture:
    about = RECIPES[recipe].pretrain.architecture.model_dump()
    return Architecture(**about | TINY | axes)


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


def tokenizer_in(folder: Path) -> int:
    """Put a toy tokenizer there; its number of entries."""
    words = {word for part in (SUBJECTS, VERBS, OBJECTS, ENDS) for words in part for word in words.split()}
    letters = {letter for word in words for letter in word} | {*".,!-'"}
    entries = [*SPECIALS, *sorted(words | letters), *sorted(f"##{letter}" for letter in letters)]
    tokenizer = tokenizer_of(WordPiece({entry: number for number, entry in enumerate(entries)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    (folder / "own").mkdir()
    save_tokenizer(tokenizer, folder / "own")
    copy_tokenizer(folder / "own", folder, LENGTH)
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


def test_the_losses_of_several_labels_and_of_tokens_are_those_of_their_scores(tmp_path: Path, transformers):
    (tokens, given), several = inputs(), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    labels = torch.where((tokens % 3 > 0) & (tokens != PAD), tokens % 3, -100)
    export.save_classifier(some_classifier(OWN["crammed-bert"], kind="multilabel"), tmp_path, LABELS)
    with torch.no_grad():
        found = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()(
            **given, labels=several
        )
    torch.testing.assert_close(found.loss, F.binary_cross_entropy(found.logits.sigmoid(), several))
    export.save_classifier(some_classifier(OWN["crammed-bert"], kind="tokens"), tmp_path, LABELS)
    with torch.no_grad():
        found = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path).eval()(**given, labels=labels)
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits[labels >= 0], labels[labels >= 0]))


def test_a_new_head_is_of_the_kind_that_its_class_and_config_ask_for(hf, tmp_path: Path):
    export.save(some_bert(OWN["crammed-bert"]), tmp_path)
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    for auto, asked, kind in (
        (hf.AutoModelForSequenceClassification, {"num_labels": 3}, "classes"),
        (hf.AutoModelForSequenceClassification, {"num_labels": 1}, "regression"),
        (hf.AutoModelForSequenceClassification, several, "multilabel"),
        (hf.AutoModelForTokenClassification, {"num_labels": 3}, "tokens"),
    ):
        model = auto.from_pretrained(tmp_path, **asked)
        model.save_pretrained(tmp_path / kind)
        assert export.load_classifier(tmp_path / kind).kind == kind
    with pytest.raises(ValueError, match=r"cram\.kind"):
        hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "tokens")
    with pytest.raises(ValueError, match=r"cram\.kind"):
        hf.AutoModelForTokenClassification.from_pretrained(tmp_path / "classes")


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.mark.parametrize("recipe", ["crammed-bert", "modern", "bert-base"])
def test_the_plain_pipeline_gives_each_word_the_label_of_its_first_piece(recipe: str, tmp_path: Path, transformers):
    about = layout(recipe)
    head = "tanh" if recipe == "crammed-bert" else "native"
    bert = some_bert(about, tokenizer_in(tmp_path))
    classifier = roughen(Classifier(bert, len(TAGS), 0.0, seed=2, head=head, kind="tokens").eval())
    export.save_classifier(classifier, tmp_path, TAGS)
    tag = transformers.pipeline("token-classification", model=str(tmp_path), aggregation_strategy="first")
    tokenizer, expected, given = load_tokenizer(tmp_path), [], [f"Breadmap {text}" for text in texts(30)]
    tokenizer.enable_truncation(LENGTH)
    assert sum(token.startswith("##") for token in tokenizer.encode(given[0]).tokens) > 1
    for text in given:
        encoding, groups, last = tokenizer.encode(text), [], "O"
        with torch.no_grad():
            best = classifier(torch.tensor([encoding.ids]))[0].argmax(-1).tolist()
        for number, (token, (start, end)) in enumerate(zip(encoding.tokens, encoding.offsets, strict=True)):
            if token in ("[CLS]", "[SEP]"):
                continue
            if token.startswith("##"):
                groups[-1][2] = end
                continue
            name = TAGS[best[number]]
            if groups and name[2:] == last[2:] and not name.startswith("B"):
                groups[-1][2] = end
            else:
                groups.append([name[2:], start, end])
            last = name
        expected.append([tuple(group) for group in groups if group[0]])
    found = [[(one["entity_group"], one["start"], one["end"]) for one in some] for some in tag(given)]
    assert found == expected
    assert len({group[0] for some in found for group in some}) == 2


@own_layouts
def test_the_pipeline_fills_masks_by_crams_scores(layout: Architecture, tmp_path: Path, transformers):
    bert = some_bert(layout, tokenizer_in(tmp_path))
    export.save(bert, tmp_path)
    text = "The grey [MASK] saw a [MASK] map"
    found = transformers.pipeline("fill-mask", model=str(tmp_path))(text, top_k=4)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.encode_special_tokens = False
    tokens = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        shares = bert.logits(bert.encode(tokens))[tokens == MASK].softmax(dim=-1)
    for answers, (values, ids) in zip(found, zip(*shares.topk(4), strict=True), strict=True):
        assert [one["token"] for one in answers] == ids.tolist()
        assert [one["score"] for one in answers] == pytest.approx(values.tolist(), rel=1e-4)


@own_layouts
@pytest.mark.parametrize("pooling", ["cls", "compare"])
def test_the_pipeline_classifies_by_crams_scores(layout: Architecture, pooling: str, tmp_path: Path, transformers):
    classifier = some_classifier(layout, tokenizer_in(tmp_path), pooling=pooling, texts=2)
    export.save_classifier(classifier, tmp_path, LABELS)
    pairs = list(zip(texts(40)[::2], texts(40)[1::2], strict=True))
    classify = transformers.pipeline("text-classification", model=str(tmp_path))
    found = classify([{"text": a, "text_pair": b} for a, b in pairs], top_k=None, truncation=True, batch_size=8)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.enable_truncation(LENGTH)
    with torch.no_grad():
        for answers, pair in zip(found, pairs, strict=True):
            shares = classifier(torch.tensor([tokenizer.encode(*pair).ids])).softmax(dim=-1)[0].tolist()
            expected = dict(zip(LABELS, shares, strict=True))
            assert {one["label"]: one["score"] for one in answers} == pytest.approx(expected, abs=1e-5)
    if pooling == "compare":
        with pytest.raises(ValueError, match=r"\[SEP\]"):
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
        tokens = torch.randint(5, 60, (2, 16))
        tokens[:, -1] = SEP
        with torch.no_grad():
            expected = model.eval()(tokens).logits
            read = export.load_classifier(tmp_path / folder).eval() if labels else export.load(tmp_path / folder).eval()
            found = read(tokens) if labels else read.logits(read.encode(tokens))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def about(layout: Architecture = OWN["crammed-bert"], **changes: object) -> dict:
    return export.Saved(architecture=layout, vocabulary=ENTRIES, length=LENGTH).model_dump() | changes


@own_layouts
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
    assert config.architecture == RECIPES["crammed-bert"].pretrain.architecture
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
    "a width that heads don't divide": ({"architecture": TINY | {"hidden": 30}}, "hidden"),
    "unknown field": ({"width": 5}, "width"),
    "other classes": ({"classes": 4}, "cram.classes"),
    "a head of transformers": ({"head": "native"}, "cram.head"),
    "longer inputs than it takes": ({"max_tokens": 4096}, "max_tokens"),
}


@pytest.mark.parametrize(("changes", "field"), JUNK.values(), ids=JUNK)
def test_a_config_that_is_no_models_is_refused_by_the_field(changes: dict, field: str, tmp_path: Path, transformers):
    export.save_classifier(some_classifier(OWN["crammed-bert"]), tmp_path, LABELS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"cram": config["cram"] | changes}))
    with pytest.raises(ValueError, match=field):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_words_have_the_same_pieces_in_a_list_which_training_reads_as_in_a_text_which_predict_reads(tmp_path: Path):
    tokenizer_in(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    odd = ["U.N.", "don’t", "Jean-Paul", "naïve", "cafe\u0301", "—", "\u4e2d\u6587", "``", "'", "'", "[SEP]", "x" * 300]
    for words in (odd, odd[::-1], *(text.split() for text in texts(10))):
        in_list = tokenizer.encode(words, is_pretokenized=True)
        assert in_list.ids == tokenizer.encode(" ".join(words)).ids
        assert {number for number in in_list.word_ids if number is not None} <= set(range(len(words)))


def test_the_tokenizer_encodes_as_cram_does_with_and_without_special_tokens(tmp_path: Path, transformers):
    export.save(Bert(OWN["crammed-bert"], tokenizer_in(tmp_path), LENGTH), tmp_path)
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
