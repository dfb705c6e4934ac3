"""Which layouts transformers has a model of."""

import json

from model.settings import CLASSIFIER_WIDTH, Architecture, HeadName, Kind, Pooling


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


def _nearest(architecture: Architecture) -> tuple[str, dict]:
    """The model of transformers that differs in the fewest axes, and these axes with the values that it needs."""
    lacking = {
        name: {axis: value for axis, value in needed.items() if getattr(architecture, axis) != value}
        for name, needed in _needs(architecture).items()
    }
    return min(lacking.items(), key=lambda item: len(item[1]))


def transformers_model(architecture: Architecture) -> str | None:
    """The model of transformers that this layout is saved as, such as `ModernBert`; None if there is none."""
    name, lacking = _nearest(architecture)
    return None if lacking else name


def why_not_transformers(architecture: Architecture) -> str | None:
    """The sentence that says which axes of this layout transformers lacks; None if it has the layout."""
    name, lacking = _nearest(architecture)
    if not lacking:
        return None
    axes = [f"{axis} {json.dumps(v)} (here {json.dumps(getattr(architecture, axis))})" for axis, v in lacking.items()]
    return f"transformers has no model of this layout; the nearest, {name}, would need {', '.join(axes)}."


def transformers_classifier(
    architecture: Architecture, head: HeadName, pooling: Pooling = "cls", kind: Kind = "classes"
) -> str | None:
    """transformers' class for such a classifier, as `BertForSequenceClassification`; None if there is none."""
    lacking = why_not_transformers_classifier(architecture, head, pooling, kind)
    unit = "Token" if kind == "tokens" else "Sequence"
    return None if lacking else f"{transformers_model(architecture)}For{unit}Classification"


def why_not_transformers_classifier(
    architecture: Architecture, head: HeadName, pooling: Pooling = "cls", kind: Kind = "classes"
) -> str | None:
    """The sentence that says why transformers can't load such a classifier; None if it can."""
    name = transformers_model(architecture)
    if name is None:
        return why_not_transformers(architecture)
    if head == "tanh":
        return (
            f"transformers' {name} has no dense-tanh head of width {CLASSIFIER_WIDTH}; finetune with head 'native' for "
            "one that it has."
        )
    if kind != "tokens" and (pooling == "compare" or (name == "Bert" and pooling == "mean")):
        return f"transformers' {name} has no pooling {pooling!r}; finetune with pooling 'cls' for one that it has."
    return None
