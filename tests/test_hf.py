"""cram's own classes in transformers: its tools and Trainer take them, and their answers are cram's own.

test_export compares the scores of every layout and head.
"""

import dataclasses
import itertools
import json
import random
from typing import get_args, get_type_hints

import pytest
import torch
import torch.nn.functional as F
from conftest import roughen, sentence
from safetensors.torch import load_file
from test_export import LABELS, LAYOUTS, LENGTH, VOCABULARY, some_bert, some_classifier
from toys import tokenizer_in

from flows.recipes.recipe import RECIPES
from model import export, layouts
from model.bert import Bert
from model.layers import PAD
from tasks.text.tokenizer import SEP, load_tokenizer

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.15}  # of scores with a deviation of 1 to 10
of_own_layouts = pytest.mark.parametrize("layout", ["the paper's", "funnel", "convolution", "albert, untied"])
of_two_layouts = pytest.mark.parametrize("layout", ["funnel", "albert, untied"])


@pytest.fixture
def hf(transformers):
    from model import hf

    return hf


def inputs() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(3, LENGTH) token ids, two of the sequences padded; the same for transformers, with other ids behind the mask."""
    generator = torch.Generator().manual_seed(1)
    tokens, others = torch.randint(5, VOCABULARY, (2, 3, LENGTH), generator=generator)
    tokens[0, 9:] = tokens[2, -1:] = PAD
    seen = tokens != PAD
    return tokens, {"input_ids": tokens.where(seen, others), "attention_mask": seen.long()}


def texts(count: int) -> list[str]:
    rng = random.Random(3)
    return [" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(count)]


def config_of(hf, layout: str, **changes: object):
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    return hf.CramConfig(**layouts.fields_of(LAYOUTS[layout]) | sizes | changes)


def masked_lm(hf, layout: str, **changes: object):
    return roughen(hf.CramForMaskedLM(config_of(hf, layout, **changes)).eval())


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


# Inputs and losses


@pytest.mark.parametrize("layout", ["funnel", "two halvings", "bert, two halvings", "convolution"])
def test_tokens_without_a_mask_embedded_words_and_positions_in_order_give_the_same(layout, tmp_path, transformers):
    bert = some_bert(layout)
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    tokens, given = inputs()
    for S in (LENGTH, LENGTH - 3):
        some = {key: value[:, :S] for key, value in given.items()}
        seen = some["attention_mask"].bool()
        with torch.no_grad():
            expected = bert.logits(bert.encode(tokens[:, :S], padded=True))[seen]
            assert_close(theirs(tokens[:, :S]).logits[seen], expected)
            words = theirs.get_input_embeddings()(some["input_ids"])
            assert_close(theirs(inputs_embeds=words, attention_mask=some["attention_mask"]).logits[seen], expected)
            assert_close(theirs(**some, position_ids=torch.arange(S).expand(3, S)).logits[seen], expected)


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "scaled-sinusoidal"])
def test_positions_can_be_given(positions, hf):
    theirs = roughen(hf.CramModel(config_of(hf, "the paper's", positions=positions)).eval())
    tokens = inputs()[0][1:2]
    turned = tokens.flip(1)
    order = torch.arange(LENGTH).flip(0)[None]
    with torch.no_grad():
        found = theirs(turned, position_ids=order).last_hidden_state.flip(1)
        assert_close(found, theirs(tokens).last_hidden_state)


def test_the_mask_and_not_padding_s_id_says_what_is_padding(tmp_path, transformers):
    bert = some_bert("convolution")
    tokens, _ = inputs()
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits
        assert_close(found, bert.logits(bert.encode(tokens)))


def test_the_first_token_is_found_behind_padding_on_the_left(hf):
    model = hf.CramModel(config_of(hf, "the paper's")).eval()
    _, given = inputs()
    found = model(**given | {"attention_mask": given["attention_mask"].flip(1)})
    firsts = found.last_hidden_state[torch.arange(3), torch.tensor([LENGTH - 9, 0, 1])]
    assert torch.equal(found.pooler_output, firsts)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["the paper's", "two halvings", "rmsnorm"])
def test_a_row_of_padding_alone_is_finite_and_so_are_its_gradients(layout, attention, hf):
    about = config_of(hf, layout, classifier_pooling="mean")
    tokens, _ = inputs()
    about._attn_implementation = attention
    alone = tokens.clone()
    alone[1] = PAD
    for auto, labels in ((hf.CramForSequenceClassification, torch.tensor([1, 0, 1])), (hf.CramForMaskedLM, alone)):
        model = roughen(auto(about))
        found = model(alone, labels=labels)
        found.loss.backward()
        assert found.logits.isfinite().all()
        assert all(part.grad.isfinite().all() for part in model.parameters() if part.grad is not None)
        others = model(tokens[[0, 2]]).logits
        torch.testing.assert_close(found.logits[[0, 2]], others, rtol=1e-4, atol=1e-4)


def test_token_types_are_taken_and_others_than_zero_warned_of(hf, caplog, monkeypatch):
    model = hf.CramModel(config_of(hf, "the paper's")).eval()
    _, given = inputs()
    monkeypatch.setattr(hf.logger, "propagate", True)
    monkeypatch.setattr(hf.logger.parent, "propagate", True)
    for types in (torch.zeros_like(given["input_ids"]), torch.ones_like(given["input_ids"])):
        assert not caplog.messages
        found = model(**given, token_type_ids=types).last_hidden_state
        assert torch.equal(found, model(**given).last_hidden_state)
    assert ["token_type_ids" in message for message in caplog.messages] == [True]


def test_inputs_that_it_can_t_take_are_refused(hf):
    model = hf.CramModel(config_of(hf, "the paper's"))
    comparing = hf.CramForSequenceClassification(config_of(hf, "the paper's", classifier_pooling="compare"))
    tokens = torch.full((1, 3), 7)
    embedded = torch.zeros(1, 3, 32)
    for call, named in (
        (lambda: model(torch.full((1, LENGTH + 1), 7)), f"{LENGTH + 1} tokens"),
        (lambda: model(), "inputs_embeds"),
        (lambda: model(tokens, inputs_embeds=embedded), "inputs_embeds"),
        (lambda: model(tokens, attention_mask=torch.ones(1, 1, 3, 3)), "attention_mask"),
        (lambda: comparing(inputs_embeds=embedded), "input_ids"),
        (lambda: comparing(torch.tensor([[7, SEP, 7, SEP], [7, 7, 7, SEP]])), r"1 of 2 .* \[SEP\]"),
    ):
        with pytest.raises(ValueError, match=named):
            call()


@pytest.mark.parametrize("kind", TOLERANCE, ids=str)
def test_scores_and_the_loss_in_any_precision_are_those_of_cram(kind, tmp_path, transformers):
    bert = some_bert("funnel")
    tokens, given = inputs()
    export.save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=kind).eval()
    assert {parameter.dtype for parameter in theirs.parameters()} == {kind}
    seen = tokens != PAD
    labels = tokens.where((torch.arange(LENGTH) % 3 == 0) & seen, -100)
    with torch.no_grad():
        expected = bert.to(kind).logits(bert.encode(tokens, padded=True))
        loss, found = theirs(**given, labels=labels, return_dict=False)
    assert expected.float().std() > 0.5
    torch.testing.assert_close(found[seen], expected[seen], rtol=1e-5, atol=TOLERANCE[kind])
    wanted = F.cross_entropy(found[labels >= 0].float(), labels[labels >= 0])
    torch.testing.assert_close(loss.float(), wanted, rtol=1e-5, atol=TOLERANCE[kind])


# Heads


def test_a_new_head_has_the_loss_that_its_class_and_config_ask_for(hf, tmp_path):
    export.save(some_bert("the paper's"), tmp_path)
    _, given = inputs()
    sequences = torch.tensor([2, 0, 1])
    tokens = torch.arange(3 * LENGTH).view(3, LENGTH) % 3
    several = {"num_labels": 3, "problem_type": "multi_label_classification"}
    for auto, asked, labels, loss in (
        (hf.CramForSequenceClassification, {"num_labels": 3}, sequences, F.cross_entropy),
        (hf.CramForSequenceClassification, {"num_labels": 1}, sequences[:, None].float(), F.mse_loss),
        (hf.CramForSequenceClassification, several, F.one_hot(sequences).float(), F.binary_cross_entropy_with_logits),
        (hf.CramForTokenClassification, {"num_labels": 3}, tokens, F.cross_entropy),
    ):
        found = auto.from_pretrained(tmp_path, **asked).eval()(**given, labels=labels)
        logits = found.logits
        if labels is tokens:
            assert logits.shape == (3, LENGTH, 3)
            logits = logits.flatten(0, 1)
            labels = labels.flatten()
        assert logits.shape[-1] == asked["num_labels"]
        torch.testing.assert_close(found.loss, loss(logits, labels))


def test_questions_and_choices_are_answered(hf):
    about = config_of(hf, "convolution")
    _, given = inputs()
    asker = roughen(hf.transformers.AutoModelForQuestionAnswering.from_config(about).eval())
    starts = torch.tensor([1, 3, 5])
    ends = torch.tensor([2, 3, 9])
    found = asker(**given, start_positions=starts, end_positions=ends)
    scores = asker.classifier(asker.bert(**given).last_hidden_state)
    torch.testing.assert_close(torch.stack([found.start_logits, found.end_logits], -1), scores)
    wanted = (F.cross_entropy(found.start_logits, starts) + F.cross_entropy(found.end_logits, ends)) / 2
    torch.testing.assert_close(found.loss, wanted)
    chooser = roughen(hf.transformers.AutoModelForMultipleChoice.from_config(about).eval())
    labels = torch.tensor([1])
    found = chooser(**{key: value[None] for key, value in given.items()}, labels=labels)
    assert found.logits.shape == (1, 3)
    torch.testing.assert_close(found.logits[0], chooser.classifier(chooser.bert(**given).pooler_output)[:, 0])
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits, labels))


def test_a_new_head_is_drawn_and_dropout_acts_in_training_only(hf, tmp_path):
    export.save(some_bert("the paper's"), tmp_path)
    model = hf.CramForSequenceClassification.from_pretrained(tmp_path, num_labels=4, dropout=0.3)
    _, given = inputs()
    assert model.classifier.dense.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.classifier.out.bias.any()
    assert {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)} == {0.3}
    model.eval()
    assert torch.equal(model(**given).logits, model(**given).logits)
    model.train()
    assert not torch.equal(model(**given).logits, model(**given).logits)


# New models and training


@of_own_layouts
def test_a_new_model_starts_as_those_of_cram_do(layout, hf):
    theirs = hf.CramForMaskedLM(config_of(hf, layout, zero_outputs=True))
    ours = Bert(LAYOUTS[layout].model_copy(update={"zero_outputs": True}), VOCABULARY, LENGTH)
    expected = dict(ours.named_parameters()) | dict(ours.named_buffers())
    for key, found in itertools.chain(theirs.named_parameters(), theirs.named_buffers()):
        wanted = expected.pop(key.removeprefix("bert.")).detach().numpy()
        found = found.detach().numpy()
        assert found.shape == wanted.shape
        assert found.std() == pytest.approx(wanted.std(), rel=0.3), key
        assert found.mean() == pytest.approx(wanted.mean(), abs=0.01), key
        if key.endswith(("codes", "cosines", "sines", "scale")):
            assert (found == wanted).all(), key
    assert not expected
    assert not theirs.bert.embedding.word.weight[PAD].any()


def test_trainer_trains_both_and_cram_reads_what_it_saves(tmp_path, transformers):
    export.save(Bert(LAYOUTS["funnel"], tokenizer_in(tmp_path, LENGTH), LENGTH), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    rows = [dict(tokenizer(text, truncation=True)) for text in texts(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, learning_rate=3e-3, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    masked = transformers.DataCollatorForLanguageModeling(tokenizer, seed=1)
    labelled = [row | {"labels": 1} for row in rows]
    for auto, given, collate, unused in (  # the last: what of the model has no part in this loss
        (transformers.AutoModelForMaskedLM, rows, masked, "classifier"),
        (transformers.AutoModelForSequenceClassification, labelled, None, "head"),
    ):
        model = auto.from_pretrained(tmp_path, dropout=0.1)
        trainer = transformers.Trainer(model, arguments, collate, given, processing_class=tokenizer)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(0)
        loss = trainer.evaluate(given)["eval_loss"]
        trainer.train()
        torch.manual_seed(0)
        assert trainer.evaluate(given)["eval_loss"] < loss
        still = [key for key, value in model.state_dict().items() if torch.equal(before[key], value)]
        assert all(unused in key.split(".") for key in still)
        trainer.save_model(tmp_path / unused)
        read = export.load(tmp_path / unused).eval()
        tokens = torch.randint(5, VOCABULARY, (2, 16))
        with torch.no_grad():
            assert_close(read.encode(tokens), model.eval().bert(tokens).last_hidden_state)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # its new name is too new
@of_two_layouts
def test_checkpointed_gradients_are_the_same(layout, hf):
    model = roughen(hf.CramForMaskedLM(config_of(hf, layout)).train())
    tokens, given = inputs()

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**given, labels=tokens).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = gradients()
    calls = []
    model.gradient_checkpointing_enable()
    model.bert.blocks[0].attention.query.register_forward_hook(lambda *_: calls.append(1))
    torch.testing.assert_close(gradients(), expected)
    about = LAYOUTS[layout]
    assert len(calls) == 2 * (about.layers if about.different_layers else 1)  # the second time for the gradients


# What its tools expect of a model of transformers


@pytest.mark.parametrize("by", ["argument", "config"])
def test_states_and_attention_of_each_block_are_given_if_asked_for(by, hf):
    about = config_of(hf, "the paper's")
    tokens, given = inputs()
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


def test_a_projection_is_a_module_that_adapters_can_wrap(hf):
    class Adapted(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner = inner
            self.low = torch.nn.Parameter(torch.randn(32, 2) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + x @ self.low @ self.low.T

    model = roughen(hf.CramForSequenceClassification(config_of(hf, "funnel")).eval())
    _, given = inputs()
    model.requires_grad_(False)
    before = model(**given).logits
    adapted = [block.attention for block in model.bert.blocks]
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
@of_two_layouts
def test_dynamic_quantization_keeps_the_scores(layout, hf):
    model = masked_lm(hf, layout)
    _, given = inputs()
    with torch.no_grad():
        expected = model(**given).logits
        full = set(map(type, model.modules()))
        small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        found = small(**given).logits
    assert torch.nn.Linear in full - set(map(type, small.modules()))
    assert not torch.equal(found, expected)
    assert torch.corrcoef(torch.stack([found.flatten(), expected.flatten()]))[0, 1] > 0.98


@of_two_layouts
def test_a_compiler_takes_it_whole_and_an_exported_graph_gives_the_same(layout, hf):
    model = masked_lm(hf, layout)
    _, given = inputs()
    with torch.no_grad():
        expected = model(**given).logits
        assert_close(torch.compile(model, backend="eager", fullgraph=True)(**given).logits, expected)
        graph = torch.export.export(model, (), given, strict=False).module()
        assert_close(graph(**given).logits, expected)


@pytest.mark.parametrize("name", ["Model", "ForMaskedLM", "ForMultipleChoice", "ForQuestionAnswering"])
def test_tools_find_the_names_of_outputs_in_the_annotation(name, hf):
    returned = get_type_hints(getattr(hf, f"Cram{name}").forward)["return"]
    kinds = get_args(returned) or [returned]
    fields = {"Model": "last_hidden_state", "ForQuestionAnswering": "start_logits"}.get(name, "logits")
    assert all(fields in {field.name for field in dataclasses.fields(kind)} for kind in kinds)


@of_own_layouts
def test_the_vocabulary_can_grow_and_shrink(layout, hf, tmp_path):
    model = masked_lm(hf, layout, decoder_bias=True)
    _, given = inputs()
    expected = model(**given).logits
    for entries in (VOCABULARY + 5, VOCABULARY - 2):
        model.resize_token_embeddings(entries)
        if entries > VOCABULARY:
            found = model(**given).logits
            assert found.shape[-1] == entries
            torch.testing.assert_close(found[..., :VOCABULARY], expected)
        model.save_pretrained(tmp_path)
        again, about = hf.CramForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(about.values())
        assert again.config.vocab_size == len(again.head.bias) == again.head.decoder.out_features == entries
        some = torch.arange(5, 20)[None]
        torch.testing.assert_close(again(some).logits, model(some).logits)
        assert again(some, labels=torch.full_like(some, entries - 1)).loss.isfinite()


# Folders


@pytest.mark.parametrize("kind", [None, "tokens"])
@of_two_layouts
def test_cram_writes_what_transformers_would(layout, kind, hf, tmp_path):
    ours = tmp_path / "ours"
    theirs = tmp_path / "theirs"
    ours.mkdir()
    if kind:
        export.save_classifier(some_classifier(layout, "tanh", kind=kind), ours, LABELS)
    else:
        export.save(some_bert(layout), ours)
    auto = hf.CramForTokenClassification if kind else hf.CramForMaskedLM
    auto.from_pretrained(ours).save_pretrained(theirs)
    tensors, again = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert tensors.keys() == again.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in again.items())
    config, written = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    left = {name for name, value in config.items() if written.get(name) != value}
    assert left <= {name for name, value in config.items() if value is None}
    assert written.keys() - config.keys() <= {"transformers_version", "dropout", "classifier_pooling", "cram"}


def test_the_paper_s_model_is_what_a_config_without_arguments_describes(hf):
    config = hf.CramConfig()
    fields = layouts.fields_of(RECIPES["crammed-bert"].pretrain.architecture)
    assert {name: getattr(config, name) for name in fields} == fields
    assert {name: getattr(config, name) for name in layouts.NAMES} == {  # under cram's names too
        name: fields[theirs] for name, theirs in layouts.NAMES.items()
    }
    assert (config.vocab_size, config.max_position_embeddings) == (32_768, 128)
    assert (config.pad_token_id, config.sep_token_id) == (PAD, SEP)


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
def test_a_config_that_is_no_models_is_refused_by_the_field(changes, field, tmp_path, transformers):
    export.save(some_bert("the paper's"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(Exception, match=field):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)


# Tokenizers


def test_words_have_the_same_pieces_in_a_list_which_training_reads_as_in_a_text_which_predict_reads(tmp_path):
    tokenizer_in(tmp_path, LENGTH)
    tokenizer = load_tokenizer(tmp_path)
    odd = ["U.N.", "don’t", "Jean-Paul", "naïve", "cafe\u0301", "—", "\u4e2d\u6587", "``", "'", "'", "[SEP]", "x" * 300]
    for words in (odd, odd[::-1], *(text.split() for text in texts(10))):
        in_list = tokenizer.encode(words, is_pretokenized=True)
        assert in_list.ids == tokenizer.encode(" ".join(words)).ids
        assert {number for number in in_list.word_ids if number is not None} <= set(range(len(words)))


def test_the_tokenizer_encodes_as_cram_does_with_and_without_special_tokens(tmp_path, transformers):
    export.save(Bert(LAYOUTS["the paper's"], tokenizer_in(tmp_path, LENGTH), LENGTH), tmp_path)
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
