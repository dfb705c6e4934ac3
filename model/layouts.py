"""Which layouts transformers has a model of, and how config.json names what is in the others."""

import json

from model.settings import CLASSIFIER_WIDTH, Architecture, HeadName, Kind, Pooling

MASKED = "MaskedLM"
HEADS = (MASKED, "PreTraining")  # with a vocabulary head; the second also had a head for pairs of sentences
STARTS = ("", *HEADS)  # of models from which pretraining can begin: a bare encoder gets a new vocabulary head
NAMES = {  # transformers' names of axes; the others have the same name in config.json
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "tied": "tie_word_embeddings",
}
FIELDS: dict[str, dict[str, str]] = {  # by model_type, the axes that config.json has fields for
    "cram": {axis: axis for axis in Architecture.model_fields} | NAMES | {"embedding": "embedding_size"},
    "modernbert": NAMES
    | {axis: axis for axis in ("norm_eps", "norm_bias", "decoder_bias")}
    | {"bias": "mlp_bias", "qkv_bias": "attention_bias"},
    "bert": NAMES | {"norm_eps": "layer_norm_eps"},
}


FAMILIES = {"modernbert": "ModernBert", "bert": "Bert"}  # transformers' models by model_type


def fields_of(architecture: Architecture, model_type: str = "cram") -> dict:
    """The axes as fields of a config.json."""
    return {field: getattr(architecture, axis) for axis, field in FIELDS[model_type].items()}


def read_config(config: dict) -> tuple[Architecture, int, int]:
    """The architecture in a config.json, the number of entries of the vocabulary, and the most tokens of a sequence.

    The fields of transformers decide; of a layout that it has, the key `cram` has the other axes. Raises ValueError,
    KeyError or TypeError for a config that is not of a model of cram's.
    """
    about = config.get("cram") or {}
    model_type = config.get("model_type")
    if model_type not in FIELDS:
        raise ValueError(f"model_type is {model_type!r}; expected {', '.join(FIELDS)}")
    axes = dict(about.get("architecture") or {})
    if model_type != "cram" and not axes:  # another program has trained it
        axes = dict(_needs(Architecture())[FAMILIES[model_type]])
    for axis, field in FIELDS[model_type].items():
        if field in config:
            axes[axis] = config[field]
    if model_type == "modernbert":
        axes["intermediate"] = axes["intermediate"] * 3 // 2  # there it is the width within GEGLU
    return Architecture(**axes), config["vocab_size"], config["max_position_embeddings"]


def head_of(config: dict) -> str:
    """The head in a config.json, as transformers names it in its classes: `MaskedLM`; empty for a bare encoder."""
    return (config.get("architectures") or [""])[0].partition("For")[2]


def head_for(kind: Kind | None) -> str:
    """The head for a kind of classifier, as transformers names it."""
    return "TokenClassification" if kind == "tokens" else "SequenceClassification"


def _needs(a: Architecture) -> dict[str, dict]:
    """The axis values that each model of transformers requires; other axes may have any value."""
    both = {
        "embedding": None,
        "different_layers": None,
        "ffn_every": 1,
        "funnel": 0,
        "convolution": 0,
        "norm": "layernorm",
        "embedding_norm": True,
        "head_transform": True,
    }
    return {
        "ModernBert": both
        | {
            "norm_order": "pre",
            "activation": "geglu",
            "positions": "rotary",
            "first_norm": False,
            "final_norm": True,
            "qkv_bias": a.bias,  # one switch for all of attention
        },
        "Bert": both
        | {
            "norm_order": "post",
            "norm_bias": True,
            "activation": "gelu",
            "positions": "learned",
            "final_norm": False,
            "bias": True,
            "qkv_bias": True,
            "decoder_bias": True,
            "tied": True,
        },
    }


def transformers_model(architecture: Architecture) -> tuple[str | None, str | None]:
    """The model of transformers that this layout is saved as, such as `ModernBert`; or None, and the reason."""
    lacking: dict[str, dict] = {}
    for name, needed in _needs(architecture).items():
        lacking[name] = {axis: value for axis, value in needed.items() if getattr(architecture, axis) != value}
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    if not lacking[nearest]:
        return nearest, None
    needs = []
    for axis, value in lacking[nearest].items():
        here = getattr(architecture, axis)
        needs.append(f"{axis} {json.dumps(value)} (here {json.dumps(here)})")
    return None, f"transformers has no model of this layout; the nearest, {nearest}, would need {', '.join(needs)}."


def transformers_classifier(
    architecture: Architecture, head: HeadName, pooling: Pooling = "cls", kind: Kind = "classes"
) -> tuple[str | None, str | None]:
    """transformers' class for a classifier, as `BertForSequenceClassification`; or None, and the reason."""
    name, why = transformers_model(architecture)
    if name is None:
        return None, why
    if head == "tanh":
        return None, (
            f"transformers' {name} has no dense-tanh head of width {CLASSIFIER_WIDTH}; finetune with head 'native' for "
            "one that it has."
        )
    has_pooling = pooling == "cls" or (pooling == "mean" and name != "Bert")
    if kind != "tokens" and not has_pooling:
        return (
            None,
            f"transformers' {name} has no pooling {pooling!r}; finetune with pooling 'cls' for one that it has.",
        )
    return f"{name}For{head_for(kind)}", None
