"""Model folders: the same scores here and in transformers, in both directions, of every layout and head."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from toys import BIASES, MODERN, ORIGINAL, rough_bert, rough_classifier

from flows.recipes.recipe import RECIPES
from model import layouts
from model.bert import Bert
from model.errors import InputError
from model.export import load, save, save_classifier, token_ids
from model.finetuning import Classifier
from model.layers import PAD, SEP
from model.layouts import HEADS
from model.settings import SPECIALS, Architecture
from tasks.text import tokenizer as vocabulary_ids

VOCABULARY = 60
LENGTH = 24
SIZES = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48, "norm_eps": 1e-6}
NATIVE = {  # the model of transformers, and the axes of a layout that it has
    "modern": ("ModernBert", MODERN),
    "modern with biases": ("ModernBert", MODERN | BIASES | {"norm_bias": True}),
    "modern untied": ("ModernBert", MODERN | {"tied": False, "decoder_bias": True}),
    "bert": ("Bert", ORIGINAL),
}
OWN = {  # a layout that transformers doesn't have, and axes that keep it from being one of those above
    "the paper's": ({}, {"positions", "head_transform", "first_norm"}),
    "relu2": (MODERN | {"activation": "relu2"}, {"activation"}),
    "rmsnorm": (MODERN | {"norm": "rmsnorm"}, {"norm"}),
    "factorised": (MODERN | BIASES | {"embedding": 16}, {"embedding"}),
    "fewer feed-forward layers": (
        MODERN | {"layers": 4, "different_layers": 2, "ffn_every": 2},
        {"different_layers", "ffn_every"},
    ),
    "convolution": (MODERN | {"convolution": 3}, {"convolution"}),
    "biases but for queries": (MODERN | {"bias": True}, {"qkv_bias"}),
    "funnel": (MODERN | {"head_transform": False, "funnel": 1}, {"funnel", "head_transform"}),
    "two halvings": (MODERN | {"funnel": 2, "layers": 6, "convolution": 5}, {"funnel", "convolution"}),
    "bert, two halvings": (ORIGINAL | {"funnel": 2, "layers": 5}, {"funnel"}),
    "bert, sinusoidal": (
        ORIGINAL | {"positions": "sinusoidal", "embedding_norm": False},
        {"positions", "embedding_norm"},
    ),
    "albert, untied": (
        ORIGINAL | {"embedding": 16, "different_layers": 1, "tied": False},
        {"embedding", "different_layers", "tied"},
    ),
}
FAMILIES = {name: family for name, (family, _) in NATIVE.items()} | dict.fromkeys(OWN, "Cram")
AXES = {name: axes for name, (_, axes) in NATIVE.items()} | {name: axes for name, (axes, _) in OWN.items()}
LAYOUTS = {name: Architecture(**SIZES | axes) for name, axes in AXES.items()}
LABELS = ("entailment", "neutral", "contradiction")
one_of_each_family = pytest.mark.parametrize("layout", ["modern with biases", "bert", "the paper's"])
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


def some_bert(layout: str) -> Bert:
    return rough_bert(LAYOUTS[layout], VOCABULARY, LENGTH)


def some_classifier(layout: str, head: str = "native", classes: int = 3, **reads) -> Classifier:
    return rough_classifier(some_bert(layout), classes, head, **reads)


# token ids, two of the sequences shorter than the others
PADDED = torch.randint(5, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDED[0, 9:] = PADDED[2, -4:] = PAD
PADDED[0, [4, 8]] = PADDED[1, [6, -1]] = PADDED[2, [3, -5]] = SEP  # two texts each
SEEN = PADDED != PAD


def states(bert: Bert, tokens: torch.Tensor = PADDED) -> torch.Tensor:
    with torch.no_grad():
        return bert.encode(tokens, padded=True)


def scores(model: Bert | Classifier, tokens: torch.Tensor = PADDED) -> torch.Tensor:
    """Of the vocabulary for all tokens, or of a classifier's classes."""
    with torch.no_grad():
        return model(tokens) if isinstance(model, Classifier) else model.logits(states(model, tokens))


def answers(theirs: torch.nn.Module, field: str = "logits", tokens: torch.Tensor = PADDED) -> torch.Tensor:
    """The scores, or the states, of a model of transformers, which is given padding by the mask alone."""
    seen = tokens != PAD
    with torch.no_grad():
        return theirs.eval()(input_ids=tokens.where(seen, len(SPECIALS)), attention_mask=seen.long())[field]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def loaded_by(auto: type, folder: Path, **settings) -> torch.nn.Module:
    """What transformers makes of a folder, without remote code and with nothing missing or left over."""
    assert not list(folder.glob("*.py"))
    theirs, report = auto.from_pretrained(folder, output_loading_info=True, **settings)
    if type(theirs).__name__ == "CramForSequenceClassification":  # whose folder keeps the vocabulary head
        assert {key.split(".")[0] for key in report.pop("unexpected_keys")} <= {"head", "bert"}
    assert not any(report.values()), report
    return theirs


def retrained(theirs: torch.nn.Module, folder: Path, **how) -> None:
    """Give all parameters of a transformers model other values, of token types the first, and save it."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            values = parameter[:1] if "token_type" in key else parameter
            values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    theirs.save_pretrained(folder, **how)


def assert_has_new_head(loaded: Bert) -> None:
    new = Bert(loaded.architecture, loaded.vocabulary, loaded.length).head.state_dict()
    assert all(torch.equal(value, new[key]) for key, value in loaded.head.state_dict().items())


# Layout, head and way of loading


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_every_layout_has_the_same_scores_however_it_is_loaded(layout, tmp_path, transformers):
    bert = some_bert(layout)
    save(bert, tmp_path)
    loaded = load(str(tmp_path)).eval()  # as a string, as every library takes a path
    assert (loaded.architecture, loaded.vocabulary, loaded.length) == (bert.architecture, VOCABULARY, LENGTH)
    for name, value in bert.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(scores(loaded), scores(bert))

    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path)
    assert (type(theirs).__name__, theirs.dtype) == (f"{FAMILIES[layout]}ForMaskedLM", torch.float32)
    assert config_of(tmp_path)["architectures"] == [f"{FAMILIES[layout]}ForMaskedLM"]
    assert scores(bert).std() > 0.1
    for implementation in ("sdpa", "eager"):
        theirs.set_attn_implementation(implementation)
        for tokens in (PADDED, PADDED[:, : LENGTH - 3]):  # which a funnel can't halve
            seen = tokens != PAD
            assert_close(answers(theirs, tokens=tokens)[seen], scores(bert, tokens)[seen])
    bare = transformers.AutoModel.from_pretrained(tmp_path)
    assert_close(answers(bare, "last_hidden_state")[SEEN], states(bert)[SEEN])

    retrained(theirs, tmp_path / "again")
    loaded = load(tmp_path / "again").eval()
    assert answers(theirs).std() > 0.1
    assert_close(states(loaded)[SEEN], answers(theirs.base_model, "last_hidden_state")[SEEN])
    assert_close(scores(loaded)[SEEN], answers(theirs)[SEEN])


@pytest.mark.parametrize(
    ("family", "layout", "head", "reads"),
    [
        ("ModernBert", "modern", "native", {"pooling": "cls", "texts": 2}),
        ("ModernBert", "modern", "native", {"pooling": "mean", "texts": 1}),
        ("ModernBert", "modern with biases", "native", {"pooling": "cls"}),
        ("ModernBert", "modern with biases", "native", {"kind": "tokens"}),
        ("ModernBert", "modern untied", "native", {"pooling": "mean"}),
        ("Cram", "modern", "tanh", {"pooling": "compare", "texts": 2}),
        ("Bert", "bert", "native", {"pooling": "cls", "texts": 2}),
        ("Bert", "bert", "native", {"kind": "tokens"}),
        ("Cram", "bert", "tanh", {"pooling": "mean", "texts": 2}),
        ("Cram", "albert, untied", "tanh", {"kind": "tokens"}),
        ("Cram", "the paper's", "tanh", {"pooling": "cls", "texts": 1}),
        ("Cram", "convolution", "tanh", {"pooling": "compare", "texts": 1}),
        ("Cram", "funnel", "tanh", {"pooling": "compare", "texts": 2}),
        ("Cram", "funnel", "tanh", {"pooling": "mean"}),
        ("Cram", "two halvings", "tanh", {"kind": "tokens"}),
    ],
)
def test_a_classifier_has_the_same_scores_there_and_its_encoder_and_how_its_inputs_are_made_are_known_here(
    family, layout, head, reads, tmp_path, transformers
):
    ours = some_classifier(layout, head, **reads)
    save_classifier(ours, tmp_path, LABELS, max_tokens=16)
    kind = "TokenClassification" if reads.get("kind") == "tokens" else "SequenceClassification"
    counted = SEEN if kind == "TokenClassification" else slice(None)
    theirs = loaded_by(getattr(transformers, f"AutoModelFor{kind}"), tmp_path)
    assert (type(theirs).__name__, theirs.dtype) == (f"{family}For{kind}", torch.float32)
    assert config_of(tmp_path)["architectures"] == [f"{family}For{kind}"]
    assert scores(ours).std() > 0.1
    for implementation in ("sdpa", "eager"):
        theirs.set_attn_implementation(implementation)
        assert_close(answers(theirs)[counted], scores(ours)[counted])
    loaded = load(tmp_path)
    assert torch.equal(states(loaded.eval()), states(ours.bert))
    assert torch.equal(states(loaded.train()), states(ours.bert))  # without dropout
    if head == "tanh":
        assert_has_new_head(loaded)
    retrained(theirs, tmp_path / "again")
    loaded = load(tmp_path / "again").eval()
    assert_close(states(loaded)[SEEN], answers(theirs.base_model, "last_hidden_state")[SEEN])
    for folder in (tmp_path, tmp_path / "again"):
        about = config_of(folder)["cram"]
        assert (about["texts"], about["max_tokens"]) == (ours.texts, 16)
        assert family == "Cram" or about["architecture"].keys() == Architecture.model_fields.keys()


@one_of_each_family
@pytest.mark.parametrize("head", ["QuestionAnswering", ""])
def test_whatever_head_transformers_saved_a_model_with_its_encoder_loads(head, layout, tmp_path, transformers):
    save(some_bert(layout), tmp_path)
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    theirs = auto.from_pretrained(tmp_path)
    retrained(theirs, tmp_path / "again", max_shard_size="10KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    loaded = load(tmp_path / "again").eval()
    assert_close(states(loaded)[SEEN], answers(theirs.base_model, "last_hidden_state")[SEEN])
    if layout == "bert":  # whose other models have no part of a vocabulary head
        assert_has_new_head(loaded)


@pytest.mark.parametrize(("layout", "matrices"), [("modern", 1), ("bert", 1), ("albert, untied", 2)])
def test_weights_are_stored_once_and_in_single_precision(layout, matrices, tmp_path):
    save(some_bert(layout).bfloat16(), tmp_path)
    tensors = tensors_of(tmp_path).values()
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert sum(tensor.ndim == 2 and len(tensor) == VOCABULARY for tensor in tensors) == matrices


def test_half_of_the_precision_becomes_single_again(tmp_path, transformers):
    save(some_bert("modern"), tmp_path)
    half = loaded_by(transformers.AutoModelForMaskedLM, tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "again")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "again").values()} == {torch.bfloat16}
    loaded = load(tmp_path / "again").eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path / "again", dtype=torch.float32)
    assert_close(scores(loaded)[SEEN], answers(theirs)[SEEN])


@one_of_each_family
def test_the_fields_of_transformers_decide_not_what_cram_wrote_before(layout, tmp_path, transformers):
    save(some_bert(layout), tmp_path)
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path)
    theirs.resize_token_embeddings(VOCABULARY + 4)
    blocks = next(part for part in theirs.base_model.modules() if isinstance(part, torch.nn.ModuleList))
    del blocks[2]
    theirs.config.num_hidden_layers = 2
    if theirs.config.model_type == "modernbert":
        theirs.config.layer_types = theirs.config.layer_types[:2]
    theirs.save_pretrained(tmp_path / "again")
    loaded = load(tmp_path / "again").eval()
    assert (loaded.vocabulary, loaded.architecture.layers) == (VOCABULARY + 4, 2)
    assert_close(scores(loaded)[SEEN], answers(theirs)[SEEN])


def test_the_first_of_trained_token_types_is_part_of_the_positions(tmp_path, transformers):
    save(some_bert("bert"), tmp_path)
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path)
    types = theirs.bert.embeddings.token_type_embeddings.weight
    with torch.no_grad():
        types[0] = 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(1))
        types[1] = types[0]
    theirs.save_pretrained(tmp_path / "trained")
    loaded = load(tmp_path / "trained").eval()
    assert loaded.embedding.second is None
    assert_close(scores(loaded)[SEEN], answers(theirs)[SEEN])
    assert (scores(load(tmp_path).eval()) - answers(theirs)).abs().max() > 1e-3
    with torch.no_grad():
        types[1] = 0
    theirs.save_pretrained(tmp_path / "trained")
    assert torch.equal(scores(load(tmp_path / "trained").eval()), scores(loaded))
    save(loaded, tmp_path / "trained")
    again = loaded_by(transformers.AutoModelForMaskedLM, tmp_path / "trained")
    assert_close(answers(again)[SEEN], answers(theirs)[SEEN])


def test_a_classifier_is_saved_with_all_tokens_only(tmp_path, transformers):
    classifier = some_classifier("modern")
    expected = scores(classifier)
    classifier.bert.keep_tokens(torch.arange(30))
    with pytest.raises(RuntimeError):
        save_classifier(classifier, tmp_path, LABELS)
    classifier.bert.restore_tokens()
    save_classifier(classifier, tmp_path, LABELS)
    assert_close(answers(loaded_by(transformers.AutoModelForSequenceClassification, tmp_path)), expected)


# What config.json says


@pytest.mark.parametrize(
    ("layout", "head", "kind", "labels", "problem"),
    [
        ("the paper's", "tanh", "classes", LABELS, "single_label_classification"),
        ("bert", "native", "multilabel", LABELS, "multi_label_classification"),
        ("the paper's", "tanh", "multilabel", ("urgent",), "multi_label_classification"),
        ("the paper's", "tanh", "regression", (), "regression"),
        ("bert", "native", "regression", (), "regression"),
    ],
)
def test_a_folder_says_what_kind_its_scores_are_and_their_scale(
    layout, head, kind, labels, problem, tmp_path, transformers
):
    ours = some_classifier(layout, head, len(labels) or 1, kind=kind)
    before = scores(ours)
    ours.rescale(scale=12.0, shift=-7.0)
    assert_close(scores(ours), 12 * before - 7)
    save_classifier(ours, tmp_path, labels)
    theirs = loaded_by(transformers.AutoModelForSequenceClassification, tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        config = config_of(folder)
        assert config["problem_type"] == problem
        assert config["id2label"] == {str(number): label for number, label in enumerate(labels or ["score"])}
        assert config["label2id"] == {label: number for number, label in enumerate(labels or ["score"])}
        assert_close(answers(loaded_by(transformers.AutoModelForSequenceClassification, folder)), scores(ours))


def test_the_ids_of_special_tokens_are_those_of_the_vocabulary():
    ids = [token_ids(SPECIALS)[f"{name}_token_id"] for name in ("pad", "cls", "sep", "mask")]
    assert ids == [vocabulary_ids.PAD, vocabulary_ids.CLS, vocabulary_ids.SEP, vocabulary_ids.MASK]
    assert tuple(f"[{name.upper()}]" for name in SPECIALS._fields) == vocabulary_ids.SPECIALS


def test_attention_is_global_and_rotation_is_ours_for_engines_that_read_either_spelling(tmp_path, transformers):
    save(some_bert("modern"), tmp_path)
    config = config_of(tmp_path)
    earlier = ("global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")
    for spelling in (earlier, ("rope_parameters", "layer_types")):
        kept = {key: value for key, value in config.items() if key not in spelling}
        read = transformers.ModernBertConfig.from_dict(kept)
        assert read.layer_types == ["full_attention"] * 3, spelling
        assert {read.rope_parameters[kind]["rope_theta"] for kind in read.layer_types} == {10_000.0}, spelling
    needed = "initializer_range initializer_cutoff_factor norm_eps layer_norm_eps local_attention attention_dropout"
    assert set(needed.split()) <= config.keys()
    assert config["classifier_activation"] == config["hidden_activation"] == "gelu"


# Which layouts and heads transformers has


@pytest.mark.parametrize("layout", NATIVE)
def test_a_layout_that_transformers_has_is_named_and_has_a_classifier_of_the_native_head_there(layout):
    family = FAMILIES[layout]
    about = LAYOUTS[layout]
    assert layouts.transformers_model(about) == (family, None)
    assert layouts.transformers_classifier(about, "native") == (f"{family}ForSequenceClassification", None)
    for kind in ("classes", "tokens"):
        none, why_not = layouts.transformers_classifier(about, "tanh", kind=kind)
        assert none is None
        assert "head" in why_not
    for pooling in ("cls", "mean", "compare"):  # which tokens have none of
        named = layouts.transformers_classifier(about, "native", pooling, "tokens")
        assert named == (f"{family}ForTokenClassification", None)
    for pooling in ("mean", "compare") if family == "Bert" else ("compare",):
        assert layouts.transformers_classifier(about, "native", pooling)[0] is None
        with pytest.raises(InputError, match="pooling"):
            some_classifier(layout, "native", pooling=pooling)


@pytest.mark.parametrize("layout", OWN)
def test_a_layout_that_transformers_lacks_is_told_by_its_axes_and_has_no_classifier_there(layout):
    name, why_not = layouts.transformers_model(LAYOUTS[layout])
    assert name is None
    assert {axis for axis in Architecture.model_fields if f" {axis} " in why_not} == OWN[layout][1]
    for head in ("tanh", "native"):
        assert layouts.transformers_classifier(LAYOUTS[layout], head) == (None, why_not)
    with pytest.raises(InputError, match=r"finetune\.head"):
        some_classifier(layout, "native")


def test_recipes_give_models_that_transformers_has_or_not():
    models = {"modern": "ModernBert", "bert-base": "Bert", "crammed-bert": None, "frontier": None}
    assert {name: layouts.transformers_model(RECIPES[name].pretrain.architecture)[0] for name in models} == models


# Folders without a whole model


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
        config = config_of(folder)
        path.write_text(json.dumps(config | ({"cram": config["cram"] | change} if part == "cram" else change)))


def assert_refused(read, folder: Path, reason: str) -> None:
    with pytest.raises(InputError, match=f"{re.escape(str(folder))} .*{reason}") as refusal:
        read(folder)
    assert "\n" not in str(refusal.value)


DAMAGE = [  # of a pretrained BERT, and what the error names
    ("config.json", None, "No such file"),
    ("config.json", 20, ""),
    ("config.json", b"\xff\xfe\x00", ""),
    ("config.json", b"[]", ""),
    ("config.json", b'{"model_type": "bert"}', "vocab_size"),
    ("config.json", {"model_type": "modernbert"}, "'modernbert'"),
    ("config.json", {"model_type": "roberta"}, "'roberta'"),
    ("config.json", {"cram": 5}, ""),
    ("config.json", {"vocab_size": VOCABULARY + 1}, "size mismatch"),
    ("config.json", {"vocab_size": "many"}, ""),
    ("config.json", {"max_position_embeddings": LENGTH + 2}, "size"),
    ("config.json", {"num_hidden_layers": 4}, r"encoder\.layer\.3\..* is missing"),
    ("config.json", {"num_hidden_layers": 2}, r"encoder\.layer\.2\..* is unknown"),
    ("config.json", {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ("config.json", {"tie_word_embeddings": False}, "tied"),
    ("cram", {"architecture": {"layers": 2, "depth": 3}}, "depth"),
    ("model.safetensors", None, "model.safetensors"),
    ("model.safetensors", 0, ""),
    ("model.safetensors", 20_000, ""),
    ("model.safetensors", bytes(range(256)) * 40, ""),
    ("model.safetensors", {"cls.predictions.bias": None}, r"cls\.predictions\.bias is missing"),
    ("model.safetensors", {"bert.embeddings.token_type_embeddings.weight": None}, "token_type_embeddings.* is missing"),
]


OF_A_CLASSIFIER = [  # of ModernBERT's layout, in its encoder
    ("model.safetensors", {"model.layers.1.mlp.Wo.weight": None}, r"layers\.1\.mlp\.Wo\.weight is missing"),
    ("model.safetensors", {"model.layers.1.mlp.Wo.scale": torch.ones(3)}, r"layers\.1\.mlp\.Wo\.scale is unknown"),
    ("model.safetensors", {"model.layers.1.attn.Wqkv.weight": torch.ones(95, 32)}, "size mismatch"),
    ("model.safetensors", {"model.final_norm.weight": torch.ones(31)}, "size mismatch"),
]


@pytest.mark.parametrize(
    ("saved", "part", "change", "reason"),
    [("a model", *row) for row in DAMAGE] + [("a classifier", *row) for row in OF_A_CLASSIFIER],
)
def test_what_is_no_model_is_refused(saved, part, change, reason, tmp_path):
    if saved == "a model":
        save(some_bert("bert"), tmp_path)
    else:
        save_classifier(some_classifier("modern"), tmp_path, LABELS)
    spoil(tmp_path, part, change)
    assert_refused(load, tmp_path, reason)


def test_a_model_without_a_vocabulary_head_is_refused_where_masks_are_to_be_filled(tmp_path):
    save_classifier(some_classifier("modern"), tmp_path, LABELS)
    assert_refused(lambda folder: load(folder, HEADS), tmp_path, "SequenceClassification; expected MaskedLM")
    save(some_bert("modern"), tmp_path)
    load(tmp_path, HEADS)


def test_shards_are_read_from_the_folder_alone_and_all_of_them(tmp_path, transformers):
    save(some_bert("bert"), tmp_path)
    loaded_by(transformers.AutoModelForMaskedLM, tmp_path).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    shards[1].rename(tmp_path / shards[1].name)
    assert_refused(load, tmp_path / "shards", shards[1].name)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1].name, f"../{shards[1].name}"))
    assert_refused(load, tmp_path / "shards", "not in the folder")
