"""Every layout in transformers: its Auto classes, pipelines and Trainer give cram's own answers."""

import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, roughen, sentence
from safetensors.torch import load_file
from tokenizers import AddedToken
from tokenizers.models import WordPiece

from flows.recipes.recipe import RECIPES
from model import export, layouts
from model.bert import Bert
from model.finetuning import Classifier
from model.layers import PAD
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


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_scores_and_the_loss_in_any_precision_are_those_of_cram(kind, tmp_path: Path, transformers):
    bert, (tokens, given) = some_bert(OWN["funnel"]), inputs()
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


def test_a_new_head_has_the_loss_that_its_class_and_config_ask_for(hf, tmp_path: Path):
    export.save(some_bert(OWN["crammed-bert"]), tmp_path)
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    (_, given), sequences, tokens = inputs(), torch.tensor([2, 0, 1]), torch.arange(3 * LENGTH).view(3, LENGTH) % 3
    for auto, asked, labels, loss in (
        (hf.CramForSequenceClassification, {"num_labels": 3}, sequences, F.cross_entropy),
        (hf.CramForSequenceClassification, {"num_labels": 1}, sequences[:, None].float(), F.mse_loss),
        (hf.CramForSequenceClassification, several, F.one_hot(sequences).float(), F.binary_cross_entropy_with_logits),
        (hf.CramForTokenClassification, {"num_labels": 3}, tokens, F.cross_entropy),
    ):
        model, shape = auto.from_pretrained(tmp_path, **asked).eval(), (*labels.shape[:2], asked["num_labels"])
        found = model(**given, labels=labels)
        wanted = loss(*((found.logits.flatten(0, 1), labels.flatten()) if labels is tokens else (found.logits, labels)))
        assert found.logits.shape == (shape if labels is tokens else (3, asked["num_labels"]))
        torch.testing.assert_close(found.loss, wanted)


TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.mark.parametrize("recipe", ["crammed-bert", "modern"])
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


def test_the_pipeline_fills_masks_by_crams_scores(tmp_path: Path, transformers):
    bert = some_bert(OWN["funnel"], tokenizer_in(tmp_path))
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


def test_the_pipeline_classifies_pairs_by_crams_scores(tmp_path: Path, transformers):
    classifier = some_classifier(OWN["convolution"], tokenizer_in(tmp_path), pooling="compare", texts=2)
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
            expected, read = model.eval()(tokens).logits, export.load(tmp_path / folder).eval()
            found = model.classifier(read.encode(tokens)[:, 0]) if labels else read.logits(read.encode(tokens))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def config_of(hf, layout: Architecture, **changes: object):
    sizes = {"vocab_size": ENTRIES, "max_position_embeddings": LENGTH}
    return hf.CramConfig(**layouts.fields_of(layout) | sizes | changes)


@own_layouts
def test_a_new_model_starts_as_those_of_cram_do(hf, layout: Architecture):
    theirs = hf.CramForMaskedLM(config_of(hf, layout, zero_outputs=True))
    ours = Bert(layout.model_copy(update={"zero_outputs": True}), ENTRIES, LENGTH)
    expected = dict(ours.named_parameters()) | dict(ours.named_buffers())
    for key, found in itertools.chain(theirs.named_parameters(), theirs.named_buffers()):
        assert found.shape == expected[key.removeprefix("bert.")].shape
        found, wanted = found.detach().numpy(), expected.pop(key.removeprefix("bert.")).detach().numpy()
        assert found.std() == pytest.approx(wanted.std(), rel=0.3), key
        assert found.mean() == pytest.approx(wanted.mean(), abs=0.01), key
        if key.endswith(("codes", "cosines", "sines", "scale")):
            assert (found == wanted).all(), key
    assert not expected
    assert not theirs.bert.embedding.word.weight[PAD].any()


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


# Every axis, against the training model

AXES = {  # single values of axes that OWN has not
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal", "embedding_norm": False},
    "rotary, factorised": {"positions": "rotary", "embedding": 16, "bias": True, "qkv_bias": True},
    "post": {"norm_order": "post", "final_norm": False, "activation": "gelu", "head_transform": True},
    "rmsnorm": {"norm": "rmsnorm", "norm_bias": False, "first_norm": False, "activation": "relu2"},
    "some feed-forward layers": {"ffn_every": 2, "layers": 4, "different_layers": 2, "norm_eps": 1e-6},
    "two halvings": {"funnel": 2, "layers": 6, "convolution": 5, "positions": "rotary"},
    "learned, two halvings": {"funnel": 2, "layers": 5, "positions": "learned", "decoder_bias": True},
}
VARIANTS = OWN | {name: layout("crammed-bert", **axes) for name, axes in AXES.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_axis_gives_the_scores_of_the_training_model(name: str, attention: str, tmp_path: Path, transformers):
    bert, (tokens, given) = some_bert(VARIANTS[name]), inputs()
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    with torch.no_grad():
        for S in (LENGTH, LENGTH - 3):
            some, seen = {key: value[:, :S] for key, value in given.items()}, tokens[:, :S] != PAD
            expected = bert.logits(bert.encode(tokens[:, :S], padded=True))
            torch.testing.assert_close(theirs(**some).logits[seen], expected[seen], rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(theirs(tokens[:, :S]).logits[seen], expected[seen], rtol=1e-5, atol=2e-5)
            words = theirs.get_input_embeddings()(some["input_ids"])
            embedded = theirs(inputs_embeds=words, attention_mask=some["attention_mask"]).logits
            torch.testing.assert_close(embedded[seen], expected[seen], rtol=1e-5, atol=2e-5)
            in_order = torch.arange(S).expand(3, S)
            placed = theirs(**some, position_ids=in_order).logits
            torch.testing.assert_close(placed[seen], expected[seen], rtol=1e-5, atol=2e-5)
    assert expected.std() > 0.5


@pytest.mark.parametrize(("pooling", "texts"), [("cls", 1), ("mean", 2), ("compare", 1), ("compare", 2)])
@pytest.mark.parametrize("layout", [OWN["convolution"], OWN["funnel"]], ids=["convolution", "funnel"])
def test_classifiers_give_the_scores_of_cram(layout, pooling: str, texts: int, tmp_path: Path, transformers):
    classifier = some_classifier(layout, pooling=pooling, texts=texts)
    export.save_classifier(classifier, tmp_path, LABELS, max_tokens=16)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokens, given = inputs()
    for row, end in enumerate((9, LENGTH, LENGTH - 1)):
        for part in (tokens, given["input_ids"]):
            part[row, [4, end - 1]] = SEP
    with torch.no_grad():
        expected = classifier(tokens)
        torch.testing.assert_close(theirs(**given).logits, expected, rtol=1e-5, atol=2e-5)
    assert expected.std() > 0.1
    assert (theirs.config.id2label, theirs.config.cram["max_tokens"]) == (dict(enumerate(LABELS)), 16)


def test_the_mask_and_not_padding_s_id_says_what_is_padding(tmp_path: Path, transformers):
    bert, (tokens, _) = some_bert(OWN["convolution"]), inputs()
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits
        torch.testing.assert_close(found, bert.logits(bert.encode(tokens)), rtol=1e-5, atol=2e-5)
    with pytest.raises(ValueError, match="attention_mask"):
        theirs(tokens, attention_mask=torch.ones(3, 1, LENGTH, LENGTH))


def test_positions_can_be_given(tmp_path: Path, transformers):
    for name in ("rotary, factorised", "learned", "sinusoidal"):
        export.save(some_bert(VARIANTS[name]), tmp_path)
        theirs = transformers.AutoModel.from_pretrained(tmp_path).eval()
        tokens = inputs()[0][1:2]
        turned, order = tokens.flip(1), torch.arange(LENGTH).flip(0)[None]
        with torch.no_grad():
            found = theirs(turned, position_ids=order).last_hidden_state.flip(1)
            torch.testing.assert_close(found, theirs(tokens).last_hidden_state, rtol=1e-5, atol=2e-5)


# What its tools expect of a model of transformers


@pytest.mark.parametrize("by", ["argument", "config"])
def test_states_and_attention_of_each_block_are_given_if_asked_for(by: str, hf):
    about, (tokens, given) = config_of(hf, OWN["crammed-bert"]), inputs()
    about._attn_implementation = "eager"
    asked = {"output_hidden_states": True, "output_attentions": True, "return_dict": False}
    model = hf.CramForMaskedLM(about).eval()
    plain = model(**given)
    if by == "config":
        for name, value in asked.items():
            setattr(model.config, name, value)
    logits, states, attentions = model(**given, **(asked if by == "argument" else {}))
    assert [tuple(state.shape) for state in states] == [(3, LENGTH, 32)] * 4
    assert [tuple(weights.shape) for weights in attentions] == [(3, 4, LENGTH, LENGTH)] * 3
    for weights in attentions:
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, LENGTH))
        assert not weights.transpose(1, 3)[tokens == PAD].any()
    assert plain.hidden_states is plain.attentions is None
    assert torch.equal(logits, plain.logits)
    torch.testing.assert_close(model.head.decoder(model.head(states[-1])), logits)


def test_token_types_are_taken_and_others_than_zero_warned_of(hf, caplog, monkeypatch):
    model, (_, given) = hf.CramModel(config_of(hf, OWN["crammed-bert"])).eval(), inputs()
    monkeypatch.setattr(hf.logger, "propagate", True)
    monkeypatch.setattr(hf.logger.parent, "propagate", True)
    for types in (torch.zeros_like(given["input_ids"]), torch.ones_like(given["input_ids"])):
        assert not caplog.messages
        found = model(**given, token_type_ids=types).last_hidden_state
        assert torch.equal(found, model(**given).last_hidden_state)
    assert ["token_type_ids" in message for message in caplog.messages] == [True]


def test_a_projection_is_a_module_that_adapters_can_wrap(hf):
    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner, self.low = inner, torch.nn.Parameter(torch.randn(32, 2) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x @ self.low @ self.low.T

    for each in OWN.values():
        model, (_, given) = roughen(hf.CramForSequenceClassification(config_of(hf, each)).eval()), inputs()
        model.requires_grad_(False)
        before, adapted = model(**given).logits, [block.attention for block in model.bert.blocks]
        for name in ("query", "key", "value", "out"):
            for attention in adapted:
                setattr(attention, name, Adapted(getattr(attention, name)))
            after = model(**given).logits
            assert (after - before).abs().max() > 1e-3
            after.sum().backward()
            assert all(getattr(attention, name).low.grad.abs().max() > 0 for attention in adapted)
            for attention in adapted:
                setattr(attention, name, getattr(attention, name).inner)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch's next quantization
@own_layouts
def test_dynamic_quantization_keeps_the_scores(layout: Architecture, hf):
    model, (_, given) = roughen(hf.CramForMaskedLM(config_of(hf, layout)).eval()), inputs()
    with torch.no_grad():
        expected, full = model(**given).logits, set(map(type, model.modules()))
        small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        found = small(**given).logits
    assert torch.nn.Linear in full - set(map(type, small.modules()))
    assert not torch.equal(found, expected)
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.98


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its new name is too new
@own_layouts
def test_checkpointed_gradients_are_the_same(layout: Architecture, hf):
    model, (tokens, given) = roughen(hf.CramForMaskedLM(config_of(hf, layout)).train()), inputs()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**given, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected, calls = gradients(), []
    model.gradient_checkpointing_enable()
    model.bert.blocks[0].attention.query.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradients(), expected)
    assert len(calls) == 2 * (layout.layers if layout.different_layers else 1)  # the second time for the gradients


@own_layouts
def test_the_vocabulary_can_grow_and_shrink(layout: Architecture, hf, tmp_path: Path):
    biased = layout.model_copy(update={"decoder_bias": True})
    model, (_, given) = roughen(hf.CramForMaskedLM(config_of(hf, biased)).eval()), inputs()
    expected = model(**given).logits
    for entries in (ENTRIES + 5, ENTRIES - 2):
        model.resize_token_embeddings(entries)
        found, kept = model(**given).logits if entries > ENTRIES else None, min(ENTRIES, entries)
        if found is not None:
            assert found.shape[-1] == entries
            torch.testing.assert_close(found[..., :kept], expected[..., :kept])
        model.save_pretrained(tmp_path)
        again, about = hf.CramForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(about.values())
        assert again.config.vocab_size == len(again.head.bias) == again.head.decoder.out_features == entries
        some = torch.arange(5, 20)[None]
        torch.testing.assert_close(again(some).logits, model(some).logits)
        labels = torch.full_like(some, entries - 1)
        assert again(some, labels=labels).loss.isfinite()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["crammed-bert", "convolution", "funnel", "two halvings", "rmsnorm"])
def test_a_row_of_padding_alone_is_finite_and_so_are_its_gradients(name: str, attention: str, hf):
    about, (tokens, _) = config_of(hf, VARIANTS[name], classifier_pooling="mean"), inputs()
    about._attn_implementation = attention
    alone = tokens.clone()
    alone[1] = PAD
    for model in (hf.CramForSequenceClassification(about), hf.CramForMaskedLM(about)):
        labels = torch.tensor([1, 0, 1]) if "Sequence" in type(model).__name__ else alone
        found = roughen(model)(alone, labels=labels)
        found.loss.backward()
        assert found.logits.isfinite().all()
        assert all(part.grad.isfinite().all() for part in model.parameters() if part.grad is not None)
        others = model(tokens[[0, 2]]).logits
        torch.testing.assert_close(found.logits[[0, 2]], others, rtol=1e-4, atol=1e-4)


def test_questions_and_choices_are_answered(hf):
    about, (_, given) = config_of(hf, OWN["convolution"]), inputs()
    asker = roughen(hf.transformers.AutoModelForQuestionAnswering.from_config(about).eval())
    starts, ends = torch.tensor([1, 3, 5]), torch.tensor([2, 3, 9])
    found = asker(**given, start_positions=starts, end_positions=ends)
    scores = asker.classifier(asker.bert(**given).last_hidden_state)
    torch.testing.assert_close(torch.stack([found.start_logits, found.end_logits], -1), scores)
    wanted = (F.cross_entropy(found.start_logits, starts) + F.cross_entropy(found.end_logits, ends)) / 2
    torch.testing.assert_close(found.loss, wanted)
    chooser, labels = roughen(hf.transformers.AutoModelForMultipleChoice.from_config(about).eval()), torch.tensor([1])
    found = chooser(**{key: value[None] for key, value in given.items()}, labels=labels)
    assert found.logits.shape == (1, 3)
    torch.testing.assert_close(found.logits[0], chooser.classifier(chooser.bert(**given).pooler_output)[:, 0])
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits, labels))


@pytest.mark.parametrize("name", ["Model", "ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"])
def test_tools_find_the_names_of_outputs_in_the_annotation(name: str, hf):
    returned = get_type_hints(getattr(hf, f"Cram{name}").forward)["return"]
    kinds = get_args(returned) or [returned]
    fields = {"Model": "last_hidden_state", "ForQuestionAnswering": "start_logits"}.get(name, "logits")
    assert all(fields in {field.name for field in dataclasses.fields(kind)} for kind in kinds)


def test_the_first_token_is_found_behind_padding_on_the_left(hf):
    model, (_, given) = hf.CramModel(config_of(hf, OWN["crammed-bert"])).eval(), inputs()
    found = model(**given | {"attention_mask": given["attention_mask"].flip(1)})
    firsts = found.last_hidden_state[torch.arange(3), torch.tensor([LENGTH - 9, 0, 1])]
    assert torch.equal(found.pooler_output, firsts)


@own_layouts
def test_a_compiler_takes_it_whole_and_an_exported_graph_gives_the_same(layout: Architecture, hf):
    model, (_, given) = roughen(hf.CramForMaskedLM(config_of(hf, layout)).eval()), inputs()
    with torch.no_grad():
        expected = model(**given).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)(**given).logits
        torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=2e-5)
        graph = torch.export.export(model, (), given, strict=False).module()
        torch.testing.assert_close(graph(**given).logits, expected, rtol=1e-5, atol=2e-5)


# Folders


@own_layouts
def test_cram_writes_what_transformers_would(layout: Architecture, hf, tmp_path: Path):
    for kind, auto in ((None, hf.CramForMaskedLM), ("tokens", hf.CramForTokenClassification)):
        ours, theirs = tmp_path / f"ours {kind}", tmp_path / f"theirs {kind}"
        ours.mkdir()
        if kind:
            export.save_classifier(some_classifier(layout, kind=kind), ours, LABELS)
        else:
            export.save(some_bert(layout), ours)
        model, about = auto.from_pretrained(ours, output_loading_info=True)
        assert not any(about.values())
        model.save_pretrained(theirs)
        tensors = [load_file(folder / "model.safetensors") for folder in (ours, theirs)]
        assert tensors[0].keys() == tensors[1].keys()
        assert all(torch.equal(tensors[0][name], tensor) for name, tensor in tensors[1].items())
        configs = [json.loads((folder / "config.json").read_text()) for folder in (ours, theirs)]
        left = {name: value for name, value in configs[0].items() if configs[1].get(name) != value}
        assert set(left) <= {name for name, value in configs[0].items() if value is None}
        assert configs[1].keys() - configs[0].keys() <= {
            "transformers_version",
            "dropout",
            "classifier_pooling",
            "cram",
        }


def test_the_paper_s_model_is_what_a_config_without_arguments_describes(hf):
    config, fields = hf.CramConfig(), layouts.fields_of(RECIPES["crammed-bert"].pretrain.architecture)
    assert {name: getattr(config, name) for name in fields} == fields
    assert {name: getattr(config, name) for name in layouts.NAMES} == {  # under cram's names too
        name: fields[theirs] for name, theirs in layouts.NAMES.items()
    }
    assert (config.vocab_size, config.max_position_embeddings, config.pad_token_id) == (32_768, 128, PAD)
    assert config.sep_token_id == SEP


def test_inputs_that_it_can_t_take_are_refused(hf):
    model = hf.CramModel(config_of(hf, OWN["crammed-bert"]))
    with pytest.raises(ValueError, match=f"{LENGTH + 1} tokens"):
        model(torch.full((1, LENGTH + 1), 7))
    with pytest.raises(ValueError, match="inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="inputs_embeds"):
        model(torch.full((1, 3), 7), inputs_embeds=torch.zeros(1, 3, 32))
    comparing = hf.CramForSequenceClassification(config_of(hf, OWN["crammed-bert"], classifier_pooling="compare"))
    with pytest.raises(ValueError, match="input_ids"):
        comparing(inputs_embeds=torch.zeros(1, 3, 32))


JUNK = {  # fields of a config, and the one that the error names
    "a width that heads don't divide": ({"hidden_size": 30}, "num_attention_heads"),
    "an odd width of turned heads": ({"hidden_size": 36, "num_attention_heads": 4, "positions": "rotary"}, "positions"),
    "a bias that the norm has not": ({"norm": "rmsnorm"}, "norm_bias"),
    "a norm that the order has not": ({"norm_order": "post", "first_norm": False}, "first_norm"),
    "a convolution without a middle": ({"convolution": 4}, "convolution"),
    "more halvings than layers": ({"funnel": 2}, "funnel"),
    "a length that can't be halved": ({"funnel": 1, "max_position_embeddings": 25}, "funnel"),
    "another activation": ({"activation": "silu"}, "activation"),
    "another pooling": ({"classifier_pooling": "max"}, "classifier_pooling"),
}


@pytest.mark.parametrize(("changes", "field"), JUNK.values(), ids=JUNK)
def test_a_config_that_is_no_models_is_refused_by_the_field(changes: dict, field: str, tmp_path: Path, transformers):
    export.save(some_bert(OWN["crammed-bert"]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(Exception, match=field):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


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
