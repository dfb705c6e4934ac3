"""Model folders: the same scores here and in transformers, in both directions."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from model import InputError
from model.bert import PAD, Bert, Classifier
from model.conversion import TOKENS
from model.export import (
    load,
    load_classifier,
    save,
    save_classifier,
    transformers_classifier,
    transformers_model,
    why_not_transformers,
    why_not_transformers_classifier,
)
from model.settings import Architecture
from tasks.text import tokenizer as vocabulary_ids

VOCABULARY, LENGTH = 60, 24
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48, "norm_eps": 1e-6}
MODERN = SMALL | {
    "positions": "rotary", "norm_bias": False, "first_norm": False, "head_transform": True,
}  # fmt: skip
EURO = SMALL | {
    "positions": "rotary", "norm": "rmsnorm", "norm_bias": False, "embedding_norm": False,
}  # fmt: skip
ORIGINAL = SMALL | {
    "positions": "learned", "norm_order": "post", "activation": "gelu", "final_norm": False, "bias": True,
    "qkv_bias": True, "head_transform": True, "decoder_bias": True,
}  # fmt: skip
BIASES = {"bias": True, "qkv_bias": True, "decoder_bias": True}
NATIVE = {  # the model of transformers, and a layout that it has
    "modern": ("ModernBert", MODERN),
    "modern with biases": ("ModernBert", MODERN | BIASES | {"norm_bias": True}),
    "modern untied": ("ModernBert", MODERN | {"tied": False, "decoder_bias": True}),
    "euro": ("EuroBert", EURO),
    "euro with biases, untied": ("EuroBert", EURO | BIASES | {"tied": False}),
    "bert": ("Bert", ORIGINAL),
    "bert, sinusoidal": ("Bert", ORIGINAL | {"positions": "sinusoidal"}),
    "bert, scaled sinusoidal": ("Bert", ORIGINAL | {"positions": "scaled-sinusoidal"}),
}  # fmt: skip
OWN = {  # a layout that transformers doesn't have, and one axis that keeps it from being another of those above
    "the paper's": (SMALL, "positions"),
    "relu2": (MODERN | {"activation": "relu2"}, "activation"),
    "factorised": (MODERN | {"embedding": 16}, "embedding"),
    "shared": (MODERN | {"different_layers": 1}, "different_layers"),
    "funnel": (MODERN | {"funnel": 1}, "funnel"),
    "fewer feed-forward layers": (MODERN | {"layers": 4, "ffn_every": 2}, "ffn_every"),
    "biases but for queries": (MODERN | {"bias": True}, "qkv_bias"),
    "no head transform": (MODERN | {"head_transform": False}, "head_transform"),
    "rotary post-norm": (ORIGINAL | {"positions": "rotary"}, "positions"),
    "albert": (ORIGINAL | {"embedding": 16, "different_layers": 1}, "embedding"),
    "bert, untied": (ORIGINAL | {"tied": False}, "tied"),
    "rmsnorm with head": (EURO | {"head_transform": True}, "head_transform"),
}
LAYOUTS = {name: layout for name, (_, layout) in NATIVE.items()} | {name: layout for name, (layout, _) in OWN.items()}
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


def some_bert(layout: dict, seed: int = 3) -> Bert:
    """An encoder in which no parameter has a value, like 0 or 1, that could hide a mistake."""
    bert = Bert(Architecture(**layout), VOCABULARY, LENGTH, seed=seed).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return bert


def padded_tokens() -> torch.Tensor:
    """(3, LENGTH) token ids, two of the sequences shorter than the others."""
    tokens = torch.randint(5, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    tokens[0, 9:] = tokens[2, -1:] = PAD
    return tokens


def scores(bert: Bert, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return bert.logits(bert.encode(tokens, padded=True))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict


@pytest.fixture
def transformers(monkeypatch):
    """The package, which must not look anything up on a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_saved_and_loaded_is_the_same_model_stored_once_in_single_precision(layout, tmp_path):
    bert = some_bert(layout)
    save(bert, tmp_path)
    loaded = load(str(tmp_path)).eval()  # as a string, as every library takes a path
    assert (loaded.architecture, loaded.vocabulary, loaded.length) == (bert.architecture, VOCABULARY, LENGTH)
    assert loaded.state_dict().keys() == bert.state_dict().keys()
    for name, value in bert.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(scores(loaded, padded_tokens()), scores(bert, padded_tokens()))
    save(bert.bfloat16(), tmp_path)
    tensors = tensors_of(tmp_path)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    fixed = sum(tensor.numel() for name, tensor in tensors.items() if "token_type" in name)
    if layout.get("norm_order") == "post" and "sinusoidal" in layout["positions"]:  # the table is stored
        fixed += LENGTH * 32 - (layout["positions"] == "scaled-sinusoidal")
    assert sum(tensor.numel() for tensor in tensors.values()) == sum(p.numel() for p in bert.parameters()) + fixed


@pytest.mark.parametrize(("name", "layout"), NATIVE.values(), ids=NATIVE)
def test_transformers_gives_the_same_scores_and_states_without_remote_code(name, layout, tmp_path, transformers):
    bert, tokens = some_bert(layout), padded_tokens()
    save(bert, tmp_path)
    assert transformers_model(bert.architecture) == name
    assert why_not_transformers(bert.architecture) is None
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == f"{name}Config"
    assert not list(tmp_path.glob("*.py"))
    theirs, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == f"{name}ForMaskedLM"
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    ours, mask = scores(bert, tokens), tokens != PAD
    assert ours.std() > 0.5
    for implementation in ("sdpa", "eager"):
        theirs.set_attn_implementation(implementation)
        torch.testing.assert_close(answers(theirs, tokens), ours, rtol=1e-5, atol=2e-5)
    encoder = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        states = encoder(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(states, bert.encode(tokens, padded=True), rtol=1e-5, atol=2e-5)


def retrained(theirs: torch.nn.Module, layout: dict, folder: Path) -> torch.Tensor:
    """Give all parameters of a model of transformers other values, but for those that cram has none of, and save it.

    Returns the model's logits.
    """
    generator = torch.Generator().manual_seed(8)
    fixed = ["token_type"] + ["position_embeddings"] * ("sinusoidal" in layout["positions"])
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if not any(part in key for part in fixed):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(folder)
    trained = answers(theirs, padded_tokens())
    assert trained.std() > 0.1
    return trained


@pytest.mark.parametrize("name", NATIVE)
def test_what_transformers_trained_and_saved_loads_here(name, tmp_path, transformers):
    (_, layout), tokens = NATIVE[name], padded_tokens()
    save(some_bert(layout), tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    expected = retrained(theirs, layout, tmp_path / "again")
    torch.testing.assert_close(scores(load(tmp_path / "again").eval(), tokens), expected, rtol=1e-5, atol=2e-5)
    save_classifier(some_classifier(layout, "native"), tmp_path, LABELS)
    expected = retrained(theirs_of(tmp_path, transformers), layout, tmp_path / "classifier")
    ours = load_classifier(tmp_path / "classifier").eval()
    torch.testing.assert_close(logits(ours, tokens), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["modern", "euro", "bert"])
def test_a_classifier_of_transformers_starts_from_the_whole_encoder(name, tmp_path, transformers):
    bert, tokens = some_bert(NATIVE[name][1]), padded_tokens()
    save(bert, tmp_path)
    classifier, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    assert all(key.split(".")[0] in ("classifier", "dense", "bert") for key in report["missing_keys"]), report
    assert not [key for key in report["missing_keys"] if key.startswith("bert.") and "pooler" not in key]
    encoder = getattr(classifier.eval(), "bert" if name == "bert" else "model")
    with torch.no_grad():
        states = encoder(input_ids=tokens, attention_mask=(tokens != PAD).long()).last_hidden_state
    torch.testing.assert_close(states, bert.encode(tokens, padded=True), rtol=1e-5, atol=2e-5)
    if name == "modern":
        assert torch.equal(classifier.head.dense.weight, bert.head.dense.weight)
    assert classifier(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits.shape == (3, 3)


def test_the_ids_of_special_tokens_are_those_of_the_vocabulary():
    ids = [TOKENS[f"{name}_token_id"] for name in ("pad", "cls", "sep", "mask")]
    assert ids == [vocabulary_ids.PAD, vocabulary_ids.CLS, vocabulary_ids.SEP, vocabulary_ids.MASK]


def test_attention_is_global_and_rotation_is_ours_for_engines_that_read_either_spelling(tmp_path, transformers):
    save(some_bert(MODERN), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    earlier = ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")
    for spelling in (earlier, ("rope_parameters", "layer_types")):
        kept = {key: value for key, value in config.items() if key not in spelling}
        read = transformers.ModernBertConfig.from_dict(kept)
        assert read.layer_types == ["full_attention"] * 3, spelling
        assert {read.rope_parameters[kind]["rope_theta"] for kind in read.layer_types} == {10_000.0}, spelling
    needed = "initializer_range initializer_cutoff_factor norm_eps layer_norm_eps local_attention attention_dropout"
    assert set(needed.split()) <= config.keys()
    assert config["classifier_activation"] == config["hidden_activation"] == "gelu"


@pytest.mark.parametrize(("layout", "axis"), OWN.values(), ids=OWN)
def test_a_layout_that_transformers_lacks_names_the_axis_and_has_no_classifier_there(layout, axis, tmp_path):
    bert = some_bert(layout)
    assert transformers_model(bert.architecture) is None
    why_not = why_not_transformers(bert.architecture)
    assert f"{axis} " in why_not
    for head in ("tanh", "native"):
        assert transformers_classifier(bert.architecture, head) is None
        assert why_not_transformers_classifier(bert.architecture, head) == why_not
    save(bert, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "cram"
    assert tensors_of(tmp_path).keys() == bert.state_dict().keys()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("modern", "ModernBert"), ("pocket-modern", "ModernBert"), ("bert-base", "Bert"), ("crammed-bert", None)],
)
def test_recipes_give_models_that_transformers_has_or_not(recipe, name):
    from flows.recipes import RECIPES

    assert transformers_model(RECIPES[recipe].pretrain.architecture) == name


def test_the_reason_names_every_axis_with_both_values():
    reason = why_not_transformers(Architecture(**MODERN | {"head_transform": False, "funnel": 1}))
    for part in ("ModernBert", "funnel 0 (here 1)", "head_transform true (here false)"):
        assert part in reason


def spoil(folder: Path, part: str, change: object) -> None:
    """Change a file: None removes it, a number cuts it to so many bytes, bytes replace it.

    A dict changes keys of config.json, of its key `cram`, or tensors of the weights, of which None removes one.
    """
    path = folder / ("config.json" if part == "cram" else part)
    if change is None:
        path.unlink()
    elif isinstance(change, int):
        path.write_bytes(path.read_bytes()[:change])
    elif isinstance(change, bytes):
        path.write_bytes(change)
    elif part == "model.safetensors":
        tensors = tensors_of(folder) | change
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
    else:
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | ({"cram": config["cram"] | change} if part == "cram" else change)))


def assert_refused(read, folder: Path, reason: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(str(folder))} .*{reason}") as refusal:
        read(folder)
    assert "\n" not in str(refusal.value)


DAMAGE = [  # of a pretrained BERT, and what the error names
    ("config.json", None, "No such file"),
    ("config.json", 20, ""),
    ("config.json", b"\xff\xfe\x00", ""),
    ("config.json", b"[]", "JSON"),
    ("config.json", b'{"model_type": "bert"}', "'cram'"),
    ("config.json", {"model_type": "cram"}, "embedding.word.weight"),
    ("config.json", {"model_type": "modernbert"}, "'modernbert'; expected cram or bert"),
    ("config.json", {"cram": 5}, ""),
    ("cram", {"architecture": {"layers": 2, "depth": 3}}, "depth"),
    ("cram", {"architecture": 5}, "architecture"),
    ("cram", {"vocabulary": "many"}, "vocabulary"),
    ("cram", {"vocabulary": VOCABULARY + 1}, "size mismatch"),
    ("cram", {"length": LENGTH + 2}, "size mismatch"),
    ("model.safetensors", None, "model.safetensors"),
    ("model.safetensors", 0, ""),
    ("model.safetensors", 100, ""),
    ("model.safetensors", 20_000, ""),
    ("model.safetensors", bytes(range(256)) * 40, ""),
    ("model.safetensors", {"cls.predictions.bias": None}, "head.bias"),
    ("model.safetensors", {"bert.pooler.dense.bias": torch.ones(32)}, "bert.pooler.dense.bias"),
    ("model.safetensors", {"bert.embeddings.token_type_embeddings.weight": torch.ones(2, 32)}, "type.* was changed"),
]


@pytest.mark.parametrize(("part", "change", "reason"), DAMAGE)
def test_what_is_no_model_is_refused(part, change, reason, tmp_path):
    save(some_bert(ORIGINAL), tmp_path)
    spoil(tmp_path, part, change)
    assert_refused(load, tmp_path, reason)


def test_an_absent_folder_is_refused(tmp_path):
    assert_refused(load, tmp_path / "absent", "No such file")


@pytest.mark.parametrize("name", ["modern", "euro with biases, untied", "bert, scaled sinusoidal"])
def test_a_folder_that_transformers_halved_in_precision_loads(name, tmp_path, transformers):
    bert, tokens = some_bert(NATIVE[name][1]), padded_tokens()
    save(bert, tmp_path)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "again")
    halved = load(tmp_path / "again").eval()
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.float32}
    assert 0 < (scores(halved, tokens) - scores(bert, tokens)).abs().max() < 0.2


def test_positions_that_learned_elsewhere_are_not_taken_for_sinusoidal_ones(tmp_path):
    save(some_bert(ORIGINAL | {"positions": "scaled-sinusoidal"}), tmp_path)
    name = "bert.embeddings.position_embeddings.weight"
    spoil(tmp_path, "model.safetensors", {name: tensors_of(tmp_path)[name] + 0.01})
    assert_refused(load, tmp_path, r"embedding\.position\.weight")


# Classifiers

LABELS = ("entailment", "neutral", "contradiction")


def some_classifier(layout: dict, head: str, classes: int = 3) -> Classifier:
    """A classifier in which no parameter has a value, like 0 or 1, that could hide a mistake."""
    classifier = Classifier(some_bert(layout), classes, dropout=0.0, seed=2, head=head).eval()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for name, parameter in classifier.named_parameters():
            if not name.startswith("bert."):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return classifier


def logits(classifier: Classifier, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return classifier(tokens)


def answers(theirs: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a model of transformers."""
    with torch.no_grad():
        return theirs.eval()(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits


def theirs_of(folder: Path, transformers) -> torch.nn.Module:
    """What transformers makes of a folder, without remote code and with nothing missing or left over."""
    assert not list(folder.glob("*.py"))
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return theirs


@pytest.mark.parametrize(("name", "layout"), NATIVE.values(), ids=NATIVE)
def test_transformers_gives_the_scores_of_a_classifier_with_its_head(name, layout, tmp_path, transformers):
    ours, tokens = some_classifier(layout, "native"), padded_tokens()
    save_classifier(ours, tmp_path, LABELS)
    assert transformers_classifier(ours.bert.architecture, "native") == f"{name}ForSequenceClassification"
    assert why_not_transformers_classifier(ours.bert.architecture, "native") is None
    assert transformers_classifier(ours.bert.architecture, "tanh") is None
    assert "head 'native'" in why_not_transformers_classifier(ours.bert.architecture, "tanh")
    theirs = theirs_of(tmp_path, transformers)
    assert type(theirs).__name__ == f"{name}ForSequenceClassification"
    assert theirs.config.id2label == dict(enumerate(LABELS))
    assert theirs.config.label2id == {label: number for number, label in enumerate(LABELS)}
    assert theirs.config.problem_type == "single_label_classification"
    expected = logits(ours, tokens)
    assert expected.std() > 0.1
    torch.testing.assert_close(answers(theirs, tokens), expected, rtol=1e-5, atol=2e-5)


def test_a_regression_is_one_in_transformers_too(tmp_path, transformers):
    ours, tokens = some_classifier(MODERN, "native", classes=1), padded_tokens()
    save_classifier(ours, tmp_path, ())
    theirs = theirs_of(tmp_path, transformers)
    assert (theirs.config.problem_type, theirs.config.num_labels) == ("regression", 1)
    torch.testing.assert_close(answers(theirs, tokens), logits(ours, tokens), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("head", ["tanh", "native"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_classifier_that_is_saved_and_loaded_is_the_same_and_so_is_its_encoder(layout, head, tmp_path):
    if head == "native" and transformers_model(Architecture(**layout)) is None:
        with pytest.raises(InputError, match=r"finetune\.head"):
            some_classifier(layout, head)
        return
    ours, tokens = some_classifier(layout, head), padded_tokens()
    save_classifier(ours, tmp_path, LABELS)
    loaded = load_classifier(tmp_path)
    assert loaded.head == head
    assert torch.equal(logits(loaded.eval(), tokens), logits(ours, tokens))
    assert torch.equal(logits(loaded.train(), tokens), logits(ours, tokens))  # without dropout
    encoder = load(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(encoder.encode(tokens, padded=True), ours.bert.encode(tokens, padded=True))
    if head == "tanh":  # which is for cram alone, with the vocabulary head
        assert torch.equal(scores(encoder, tokens), scores(ours.bert, tokens))
        config = json.loads((tmp_path / "config.json").read_text())
        assert config["model_type"] == "cram"
        assert config["id2label"] == {str(number): label for number, label in enumerate(LABELS)}


def test_the_modern_head_is_the_pretrained_transform(tmp_path):
    save(some_bert(MODERN), tmp_path)
    classifier = Classifier(load(tmp_path), classes=2, dropout=0.0, seed=0, head="native").eval()
    state = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        dense = F.gelu(state @ tensors_of(tmp_path)["head.dense.weight"].T)
        expected = F.layer_norm(dense, (32,), tensors_of(tmp_path)["head.norm.weight"], eps=1e-6)
        torch.testing.assert_close(classifier.scores(state), classifier.classifier.out(expected))


def test_a_classifier_with_some_tokens_alone_is_not_saved(tmp_path):
    classifier = some_classifier(MODERN, "native")
    tokens, expected = padded_tokens(), logits(classifier, padded_tokens())
    classifier.bert.keep_tokens(torch.arange(30))
    with pytest.raises(RuntimeError, match="restore_tokens"):
        save_classifier(classifier, tmp_path, LABELS)
    classifier.bert.restore_tokens()
    save_classifier(classifier, tmp_path, LABELS)
    assert torch.equal(logits(load_classifier(tmp_path).eval(), tokens), expected)
    with pytest.raises(RuntimeError, match="2 names for 3 classes"):
        save_classifier(classifier, tmp_path, LABELS[:2])


@pytest.mark.parametrize("inputs", [(2, 16), (None, None)])
def test_how_inputs_are_made_stays_known_when_transformers_saves_a_classifier_again(inputs, tmp_path, transformers):
    save_classifier(some_classifier(MODERN, "native"), tmp_path, LABELS, *inputs)
    theirs_of(tmp_path, transformers).save_pretrained(tmp_path / "again")
    load_classifier(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        saved = json.loads((folder / "config.json").read_text())["cram"]
        assert (saved["texts"], saved["max_tokens"]) == inputs
        assert saved["architecture"].keys() == Architecture.model_fields.keys()


def test_a_pretrained_model_is_no_classifier(tmp_path):
    save(some_bert(MODERN), tmp_path)
    with pytest.raises(InputError, match="pretrained model"):
        load_classifier(str(tmp_path))


CLASSIFIER_DAMAGE = [
    ("model.safetensors", {"classifier.bias": None}, "out.bias"),
    ("model.safetensors", {"head.dense.weight": None}, "head.dense.weight"),
    ("model.safetensors", {"decoder.bias": torch.ones(60)}, "decoder.bias"),
    ("cram", {"classes": 4}, "size mismatch"),
    ("cram", {"classes": 0}, "classes"),
    ("cram", {"head": "tanh"}, "model_type 'modernbert'"),
    ("cram", {"head": "wide"}, "head"),
    ("cram", {"texts": 3}, "texts"),
    ("cram", {"max_tokens": 4096}, "max_tokens"),
]


@pytest.mark.parametrize(("part", "change", "reason"), CLASSIFIER_DAMAGE)
@pytest.mark.parametrize("read", [load, load_classifier])
def test_what_is_no_classifier_is_refused(read, part, change, reason, tmp_path):
    save_classifier(some_classifier(MODERN, "native"), tmp_path, LABELS)
    spoil(tmp_path, part, change)
    assert_refused(read, tmp_path, reason)
