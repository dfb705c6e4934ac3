"""Model folders: the same scores here and in transformers, in both directions."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import roughen
from safetensors import safe_open
from safetensors.torch import save_file

from flows.recipes.recipe import RECIPES
from model import layouts
from model.bert import Bert
from model.errors import InputError
from model.export import TOKENS, load, save, save_classifier
from model.finetuning import Classifier
from model.layers import PAD, SEP, SPECIALS
from model.settings import Architecture
from tasks.text import tokenizer as vocabulary_ids

VOCABULARY, LENGTH = 60, 24
SMALL = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48, "norm_eps": 1e-6}
MODERN = SMALL | {"positions": "rotary", "norm_bias": False, "first_norm": False, "head_transform": True}
BIASES = {"bias": True, "qkv_bias": True, "decoder_bias": True}
POST = {"norm_order": "post", "activation": "gelu", "final_norm": False, "head_transform": True}
ORIGINAL = SMALL | POST | BIASES | {"positions": "learned"}
NATIVE = {  # the model of transformers, and a layout that it has
    "modern": ("ModernBert", MODERN),
    "modern with biases": ("ModernBert", MODERN | BIASES | {"norm_bias": True}),
    "modern untied": ("ModernBert", MODERN | {"tied": False, "decoder_bias": True}),
    "bert": ("Bert", ORIGINAL),
}
OWN = {  # a layout that transformers doesn't have, and axes that keep it from being one of those above
    "the paper's": (SMALL, {"positions", "head_transform", "first_norm"}),
    "relu2": (MODERN | {"activation": "relu2"}, {"activation"}),
    "rmsnorm": (MODERN | {"norm": "rmsnorm"}, {"norm"}),
    "factorised": (MODERN | {"embedding": 16}, {"embedding"}),
    "shared": (MODERN | {"different_layers": 1}, {"different_layers"}),
    "fewer feed-forward layers": (MODERN | {"layers": 4, "ffn_every": 2}, {"ffn_every"}),
    "convolution": (MODERN | {"convolution": 3}, {"convolution"}),
    "biases but for queries": (MODERN | {"bias": True}, {"qkv_bias"}),
    "funnel": (MODERN | {"head_transform": False, "funnel": 1}, {"funnel", "head_transform"}),
    "bert, sinusoidal": (ORIGINAL | {"positions": "sinusoidal"}, {"positions"}),
    "albert": (ORIGINAL | {"embedding": 16, "different_layers": 1}, {"embedding", "different_layers"}),
    "bert, untied": (ORIGINAL | {"tied": False}, {"tied"}),
}
WITH_HF = {name: ("Cram", OWN[name][0]) for name in ("the paper's", "funnel", "convolution", "albert", "bert, untied")}
LAYOUTS = {name: layout for name, (_, layout) in NATIVE.items()} | {name: layout for name, (layout, _) in OWN.items()}
LABELS = ("entailment", "neutral", "contradiction")
torch.set_num_threads(1)  # for so small a model; several that wait for a busy core take a hundred times as long


def some_bert(layout: dict) -> Bert:
    return roughen(Bert(Architecture(**layout), VOCABULARY, LENGTH, seed=3).eval())


def some_classifier(layout: dict, head: str, classes: int = 3, **reads) -> Classifier:
    classifier = Classifier(some_bert(layout), classes, dropout=0.0, seed=2, head=head, **reads).eval()
    roughen(classifier.classifier)
    return classifier


# token ids, two of the sequences shorter than the others
PADDED = torch.randint(5, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))
PADDED[0, 9:] = PADDED[2, -1:] = PAD
PADDED[0, [4, 8]] = PADDED[1, [6, -1]] = PADDED[2, [3, -2]] = SEP  # two texts each


def states(bert: Bert) -> torch.Tensor:
    with torch.no_grad():
        return bert.encode(PADDED, padded=True)


def scores(model: Bert | Classifier) -> torch.Tensor:
    """Of the vocabulary for all tokens, or of a classifier's classes."""
    with torch.no_grad():
        return model(PADDED) if isinstance(model, Classifier) else model.logits(states(model))


def answers(theirs: torch.nn.Module, field: str = "logits") -> torch.Tensor:
    """The scores, or the states, of a model of transformers."""
    with torch.no_grad():
        return theirs.eval()(input_ids=PADDED, attention_mask=(PADDED != PAD).long())[field]


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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_is_saved_and_loaded_is_the_same_model_stored_once_in_single_precision(layout, tmp_path):
    bert = some_bert(layout)
    save(bert, tmp_path)
    loaded = load(str(tmp_path)).eval()  # as a string, as every library takes a path
    assert (loaded.architecture, loaded.vocabulary, loaded.length) == (bert.architecture, VOCABULARY, LENGTH)
    for name, value in bert.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert torch.equal(scores(loaded), scores(bert))
    save(bert.bfloat16(), tmp_path)
    tensors = tensors_of(tmp_path).values()
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert sum(tensor.ndim == 2 and len(tensor) == VOCABULARY for tensor in tensors) == 2 - bert.architecture.tied


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_classifier_with_the_papers_head_is_saved_whole_without_a_vocabulary_head(layout, tmp_path, transformers):
    ours = some_classifier(layout, "tanh", pooling="compare", texts=2)
    save_classifier(ours, tmp_path, LABELS)
    assert_close(answers(loaded_by(transformers.AutoModelForSequenceClassification, tmp_path)), scores(ours))
    loaded = load(tmp_path)
    assert torch.equal(states(loaded.eval()), states(ours.bert))
    assert torch.equal(states(loaded.train()), states(ours.bert))  # without dropout
    new = Bert(ours.bert.architecture, VOCABULARY, LENGTH).head.state_dict()
    assert all(torch.equal(value, new[key]) for key, value in loaded.head.state_dict().items())


def retrained(theirs: torch.nn.Module, folder: Path, **how) -> torch.Tensor:
    """Give all parameters of a transformers model other values, of token types the first, and save it; its scores."""
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            values = parameter[:1] if "token_type" in key else parameter
            values.copy_(0.3 * torch.randn(values.shape, generator=generator))
    theirs.save_pretrained(folder, **how)
    assert answers(theirs).std() > 0.1
    return answers(theirs)


MATRIX = [  # model, layout, head and pooling; transformers' BERT has no pooling but that of the first token
    pytest.param(name, layout, head, pooling, id=f"{id_} {head} {pooling}".rstrip())
    for id_, (name, layout) in (NATIVE | WITH_HF).items()
    for head, pooling in [("MaskedLM", ""), ("SequenceClassification", "cls"), ("SequenceClassification", "mean"),
                          ("TokenClassification", "mean")]  # of tokens, nothing is pooled
    if not (name == "Bert" and head.startswith("Sequence") and pooling == "mean")
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "head", "pooling"), MATRIX)
def test_transformers_gives_the_same_scores_and_states_and_what_it_trains_loads_here(
    name, layout, head, pooling, tmp_path, transformers
):
    seen = PADDED != PAD
    if head == "MaskedLM":
        bert = ours = some_bert(layout)
        save(bert, tmp_path)
    else:
        own_head = "tanh" if name == "Cram" else "native"
        kind = "tokens" if head.startswith("Token") else "classes"
        ours = some_classifier(layout, own_head, pooling=pooling, kind=kind, texts=2 if kind == "classes" else 1)
        bert = ours.bert
        save_classifier(ours, tmp_path, LABELS)
    theirs = loaded_by(getattr(transformers, f"AutoModelFor{head}"), tmp_path)
    assert (type(theirs).__name__, theirs.dtype) == (f"{name}For{head}", torch.float32)
    assert config_of(tmp_path)["architectures"] == [f"{name}For{head}"]
    counted = seen if head.startswith("Token") else slice(None)
    assert scores(ours).std() > 0.1
    for implementation in ("sdpa", "eager"):
        theirs.set_attn_implementation(implementation)
        assert_close(answers(theirs)[counted], scores(ours)[counted])
    assert_close(
        answers(transformers.AutoModel.from_pretrained(tmp_path), "last_hidden_state")[seen], states(bert)[seen]
    )
    expected = retrained(theirs, tmp_path / "again")
    loaded = load(tmp_path / "again").eval()
    assert_close(states(loaded)[seen], answers(theirs.base_model, "last_hidden_state")[seen])
    if head == "MaskedLM":
        assert_close(scores(loaded), expected)


@pytest.mark.parametrize(
    ("kind", "labels", "problem"),
    [
        ("classes", LABELS, "single_label_classification"),
        ("multilabel", LABELS, "multi_label_classification"),
        ("multilabel", ("urgent",), "multi_label_classification"),
        ("regression", (), "regression"),
    ],
)
@pytest.mark.parametrize("layout", [ORIGINAL, SMALL], ids=["bert", "the paper's"])
def test_a_folder_says_what_kind_its_scores_are_and_their_scale(layout, kind, labels, problem, tmp_path, transformers):
    ours = some_classifier(layout, "native" if layout is ORIGINAL else "tanh", len(labels) or 1, kind=kind)
    before = scores(ours)
    ours.rescale(scale=12.0, shift=-7.0)
    assert_close(scores(ours), 12 * before - 7)
    save_classifier(ours, tmp_path, labels)
    theirs = loaded_by(transformers.AutoModelForSequenceClassification, tmp_path)
    theirs.save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        assert config_of(folder)["problem_type"] == problem
        assert theirs.config.id2label == dict(enumerate(labels or ["score"]))
        assert theirs.config.label2id == {label: number for number, label in theirs.config.id2label.items()}
        assert_close(answers(loaded_by(transformers.AutoModelForSequenceClassification, folder)), scores(ours))


@pytest.mark.parametrize("name", ["modern", "bert"])
def test_a_classifier_of_transformers_starts_from_the_whole_encoder(name, tmp_path, transformers):
    bert = some_bert(NATIVE[name][1])
    save(bert, tmp_path)
    classifier, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, output_loading_info=True
    )
    new = {key.removeprefix("bert.").split(".")[0] for key in report["missing_keys"]}
    assert new <= {"classifier", "dense", "pooler"}
    assert_close(answers(classifier.base_model, "last_hidden_state"), states(bert))
    if name == "modern":
        assert torch.equal(classifier.head.dense.weight, bert.head.dense.weight)
    assert answers(classifier).shape == (3, 3)


def test_the_ids_of_special_tokens_are_those_of_the_vocabulary():
    ids = [TOKENS[f"{name}_token_id"] for name in ("pad", "cls", "sep", "mask")]
    assert ids == [vocabulary_ids.PAD, vocabulary_ids.CLS, vocabulary_ids.SEP, vocabulary_ids.MASK]
    assert len(vocabulary_ids.SPECIALS) == SPECIALS


def test_attention_is_global_and_rotation_is_ours_for_engines_that_read_either_spelling(tmp_path, transformers):
    save(some_bert(MODERN), tmp_path)
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


@pytest.mark.parametrize(("name", "layout"), NATIVE.values(), ids=NATIVE)
def test_a_layout_that_transformers_has_is_named_and_has_a_classifier_of_the_native_head_there(name, layout):
    about, token_class = Architecture(**layout), f"{name}ForTokenClassification"
    assert layouts.transformers_model(about) == (name, None)
    assert layouts.transformers_classifier(about, "native") == (f"{name}ForSequenceClassification", None)
    for kind in ("classes", "tokens"):
        none, why_not = layouts.transformers_classifier(about, "tanh", kind=kind)
        assert none is None
        assert "head" in why_not
    for pooling in ("cls", "mean", "compare"):  # which tokens have none of
        assert layouts.transformers_classifier(about, "native", pooling, "tokens") == (token_class, None)
    for pooling in ("mean", "compare") if name == "Bert" else ("compare",):
        assert layouts.transformers_classifier(about, "native", pooling)[0] is None
        with pytest.raises(InputError, match="pooling"):
            Classifier(some_bert(layout), 3, dropout=0.0, seed=0, head="native", pooling=pooling)


@pytest.mark.parametrize(("layout", "axes"), OWN.values(), ids=OWN)
def test_a_layout_that_transformers_lacks_is_told_by_its_axes_and_has_no_classifier_there(layout, axes, tmp_path):
    bert = some_bert(layout)
    name, why_not = layouts.transformers_model(bert.architecture)
    assert name is None
    assert {axis for axis in Architecture.model_fields if f" {axis} " in why_not} == axes
    for head in ("tanh", "native"):
        assert layouts.transformers_classifier(bert.architecture, head) == (None, why_not)
    with pytest.raises(InputError, match=r"finetune\.head"):
        Classifier(bert, 3, dropout=0.0, seed=0, head="native")
    save(bert, tmp_path)
    assert config_of(tmp_path)["model_type"] == "cram"
    names = {name.removeprefix("bert.") for name in tensors_of(tmp_path)}
    assert names == bert.state_dict().keys()


def test_recipes_give_models_that_transformers_has_or_not():
    models = {"modern": "ModernBert", "bert-base": "Bert", "crammed-bert": None, "frontier": None}
    assert {name: layouts.transformers_model(RECIPES[name].pretrain.architecture)[0] for name in models} == models


def test_a_classifier_is_saved_with_all_tokens_only(tmp_path, transformers):
    classifier = some_classifier(MODERN, "native")
    expected = scores(classifier)
    classifier.bert.keep_tokens(torch.arange(30))
    with pytest.raises(RuntimeError):
        save_classifier(classifier, tmp_path, LABELS)
    classifier.bert.restore_tokens()
    save_classifier(classifier, tmp_path, LABELS)
    assert_close(answers(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)), expected)


@pytest.mark.parametrize("inputs", [(2, 16), (None, None)])
def test_how_inputs_are_made_stays_known_when_transformers_saves_a_classifier_again(inputs, tmp_path, transformers):
    texts, max_tokens = inputs
    save_classifier(some_classifier(MODERN, "native", texts=texts), tmp_path, LABELS, max_tokens)
    loaded_by(transformers.AutoModelForSequenceClassification, tmp_path).save_pretrained(tmp_path / "again")
    for folder in (tmp_path, tmp_path / "again"):
        saved = config_of(folder)["cram"]
        assert (saved["texts"], saved["max_tokens"]) == inputs
        assert saved["architecture"].keys() == Architecture.model_fields.keys()


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
    ("config.json", b'{"model_type": "bert"}', "'cram'"),
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
    ("model.safetensors", {"bert.pooler.dense.bias": torch.ones(32)}, r"pooler\.dense\.bias is unknown"),
    ("model.safetensors", {"bert.embeddings.token_type_embeddings.weight": None}, "token_type_embeddings.* is missing"),
]


@pytest.mark.parametrize(("part", "change", "reason"), DAMAGE)
def test_what_is_no_model_is_refused(part, change, reason, tmp_path):
    save(some_bert(ORIGINAL), tmp_path)
    spoil(tmp_path, part, change)
    assert_refused(load, tmp_path, reason)


CLASSIFIER_DAMAGE = [
    ({"model.layers.1.mlp.Wo.weight": None}, r"layers\.1\.mlp\.Wo\.weight is missing"),
    ({"model.layers.1.mlp.Wo.scale": torch.ones(3)}, r"layers\.1\.mlp\.Wo\.scale is unknown"),
    ({"model.layers.1.attn.Wqkv.weight": torch.ones(95, 32)}, "size mismatch"),
    ({"model.final_norm.weight": torch.ones(31)}, "size mismatch"),
]


@pytest.mark.parametrize(("change", "reason"), CLASSIFIER_DAMAGE)
def test_a_classifier_is_refused_for_what_is_wrong_in_its_encoder(change, reason, tmp_path):
    save_classifier(some_classifier(MODERN, "native"), tmp_path, LABELS)
    spoil(tmp_path, "model.safetensors", change)
    assert_refused(load, tmp_path, reason)


def test_a_model_without_a_vocabulary_head_is_refused_where_masks_are_to_be_filled(tmp_path):
    save_classifier(some_classifier(MODERN, "native"), tmp_path, LABELS)
    assert_refused(lambda folder: load(folder, masked=True), tmp_path, "SequenceClassification; expected MaskedLM")
    save(some_bert(MODERN), tmp_path)
    load(tmp_path, masked=True)


OTHER_HEADS = ("QuestionAnswering", "MultipleChoice", "")
TRANSFORMERS = {"modern": NATIVE["modern with biases"][1], "bert": ORIGINAL, "the paper's": SMALL}
their_layouts = pytest.mark.parametrize("layout", TRANSFORMERS.values(), ids=TRANSFORMERS)


@their_layouts
@pytest.mark.parametrize("head", OTHER_HEADS)
def test_whatever_head_transformers_saved_a_model_with_its_encoder_loads(head, layout, tmp_path, transformers):
    bert = some_bert(layout)
    save(bert, tmp_path)
    auto = getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
    theirs = auto.from_pretrained(tmp_path)
    retrained_encoder(theirs)
    theirs.save_pretrained(tmp_path / "again", max_shard_size="10KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    loaded = load(tmp_path / "again").eval()
    assert_close(states(loaded), answers(theirs.base_model, "last_hidden_state"))
    if layout is ORIGINAL:  # whose other models have no part of a vocabulary head
        new = Bert(bert.architecture, VOCABULARY, LENGTH).head.state_dict()
        assert all(torch.equal(value, new[key]) for key, value in loaded.head.state_dict().items())


def retrained_encoder(theirs: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in theirs.base_model.parameters():
            if parameter.shape[:1] != (2,):  # of token types
                parameter.mul_(1.1)


def test_shards_are_read_from_the_folder_alone_and_all_of_them(tmp_path, transformers):
    save(some_bert(ORIGINAL), tmp_path)
    loaded_by(transformers.AutoModelForMaskedLM, tmp_path).save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    shards = sorted((tmp_path / "shards").glob("*.safetensors"))
    shards[1].rename(tmp_path / shards[1].name)
    assert_refused(load, tmp_path / "shards", shards[1].name)
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(shards[1].name, f"../{shards[1].name}"))
    assert_refused(load, tmp_path / "shards", "not in the folder")


def test_the_first_of_trained_token_types_is_part_of_the_positions_and_of_others_there_is_a_warning(
    tmp_path, transformers
):
    save(Bert(Architecture(**ORIGINAL), VOCABULARY, LENGTH, seed=4), tmp_path)
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path)
    types = theirs.bert.embeddings.token_type_embeddings.weight
    with torch.no_grad():
        types[0] = 0.1 * torch.randn(32, generator=torch.Generator().manual_seed(1))
        before, types[1] = answers(theirs), types[0]
    theirs.save_pretrained(tmp_path / "trained")
    with pytest.warns(UserWarning, match="token types.*pairs"):
        loaded = load(tmp_path / "trained").eval()
    assert (scores(loaded) - before).abs().max() < 1e-6
    assert (scores(load(tmp_path).eval()) - before).abs().max() > 1e-3
    with torch.no_grad():
        types[1] = 0
    theirs.save_pretrained(tmp_path / "trained")
    assert (scores(load(tmp_path / "trained").eval()) - before).abs().max() < 1e-6
    save(loaded, tmp_path / "trained")
    assert_close(answers(loaded_by(transformers.AutoModelForMaskedLM, tmp_path / "trained")), before)


@their_layouts
def test_the_fields_of_transformers_decide_not_what_cram_wrote_before(layout, tmp_path, transformers):
    save(some_bert(layout), tmp_path)
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path)
    theirs.resize_token_embeddings(VOCABULARY + 4)
    encoder = theirs.base_model
    blocks = next(part for part in encoder.modules() if isinstance(part, torch.nn.ModuleList))
    del blocks[2]
    theirs.config.num_hidden_layers = 2
    if theirs.config.model_type == "modernbert":
        theirs.config.layer_types = theirs.config.layer_types[:2]
    theirs.save_pretrained(tmp_path / "again")
    loaded = load(tmp_path / "again").eval()
    assert (loaded.vocabulary, loaded.architecture.layers) == (VOCABULARY + 4, 2)
    assert_close(scores(loaded), answers(theirs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_of_the_precision_becomes_single_again(dtype, tmp_path, transformers):
    save(some_bert(MODERN), tmp_path)
    loaded_by(transformers.AutoModelForMaskedLM, tmp_path, dtype=dtype).save_pretrained(tmp_path / "again")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "again").values()} == {dtype}
    loaded = load(tmp_path / "again").eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    theirs = loaded_by(transformers.AutoModelForMaskedLM, tmp_path / "again", dtype=torch.float32)
    assert_close(scores(loaded), answers(theirs))


@their_layouts
def test_adapters_that_are_merged_load_and_those_alone_are_refused(layout, tmp_path, transformers):
    save(some_bert(layout), tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    before = answers(theirs.base_model, "last_hidden_state")
    generator = torch.Generator().manual_seed(3)
    named = {"query", "key", "value", "Wqkv"}
    for name, part in theirs.named_modules():
        if name.split(".")[-1] in named:  # W + B A, as LoRA's
            down, up = (torch.randn(size, generator=generator) for size in ((2, 32), (len(part.weight), 2)))
            part.weight.data += 0.2 * up @ down
    theirs.save_pretrained(tmp_path / "merged")
    expected = answers(theirs.base_model, "last_hidden_state")
    assert (expected - before).abs().max() > 0.1
    assert_close(states(load(tmp_path / "merged").eval()), expected)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert_refused(load, tmp_path / "adapter", "adapters merged")
