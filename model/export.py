"""Models on disk: a folder that cram loads, and that transformers loads too where it has a model of that layout.

BERT, ModernBERT and EuroBERT are parts of what `Architecture` can say. A model within one of them is written under its names,
so that `AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores, without remote code; any other under cram's own
names. In all cases config.json has a key `cram` from which `load` builds the model again.

model.safetensors is fp32, and has a tied vocabulary head once.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import InputError
from model.bert import INIT_STD, PAD, ROTARY_BASE, Bert
from model.settings import Architecture

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EARLIER = "crammed-bert"  # the model_type of folders whose architecture had fewer fields, and other meanings of them
TOKENS = {  # the vocabulary fixes their ids; a sequence begins with [CLS] and ends with [SEP]
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": 3,
    "sep_token_id": 3,
    "mask_token_id": 4,
}
# Tensors by their names in transformers and here; '#' is each block, '*' each of weight and bias. Where several stand on a
# side, they are one tensor on the other, joined along the first dimension. What a layout doesn't have is left out.
NAMES: dict[str, dict[str, str]] = {
    "ModernBert": {
        "model.embeddings.tok_embeddings.weight": "embedding.word.weight",
        "model.embeddings.norm.*": "embedding.norm.*",
        "model.layers.#.attn_norm.*": "blocks.#.attention_norm.*",
        "model.layers.#.attn.Wqkv.*": "blocks.#.attention.query.* blocks.#.attention.key.* blocks.#.attention.value.*",
        "model.layers.#.attn.Wo.*": "blocks.#.attention.out.*",
        "model.layers.#.mlp_norm.*": "blocks.#.ffn_norm.*",
        "model.layers.#.mlp.Wi.*": "blocks.#.ffn.dense_in.*",
        "model.layers.#.mlp.Wo.*": "blocks.#.ffn.dense_out.*",
        "model.final_norm.*": "norm.*",
        "head.dense.*": "head.dense.*",
        "head.norm.*": "head.norm.*",
        "decoder.weight": "head.decoder.weight",
        "decoder.bias": "head.bias",
    },
    "EuroBert": {
        "model.embed_tokens.weight": "embedding.word.weight",
        "model.layers.#.input_layernorm.*": "blocks.#.attention_norm.*",
        "model.layers.#.self_attn.q_proj.*": "blocks.#.attention.query.*",
        "model.layers.#.self_attn.k_proj.*": "blocks.#.attention.key.*",
        "model.layers.#.self_attn.v_proj.*": "blocks.#.attention.value.*",
        "model.layers.#.self_attn.o_proj.*": "blocks.#.attention.out.*",
        "model.layers.#.post_attention_layernorm.*": "blocks.#.ffn_norm.*",
        "model.layers.#.mlp.gate_proj.* model.layers.#.mlp.up_proj.*": "blocks.#.ffn.dense_in.*",
        "model.layers.#.mlp.down_proj.*": "blocks.#.ffn.dense_out.*",
        "model.norm.*": "norm.*",
        "lm_head.weight": "head.decoder.weight",
        "lm_head.bias": "head.bias",
    },
    "Bert": {
        "bert.embeddings.word_embeddings.weight": "embedding.word.weight",
        "bert.embeddings.position_embeddings.weight": "embedding.position.weight",
        "bert.embeddings.token_type_embeddings.weight": "embedding.type.weight",  # see `_only_in_bert`
        "bert.embeddings.LayerNorm.*": "embedding.norm.*",
        "bert.encoder.layer.#.attention.self.query.*": "blocks.#.attention.query.*",
        "bert.encoder.layer.#.attention.self.key.*": "blocks.#.attention.key.*",
        "bert.encoder.layer.#.attention.self.value.*": "blocks.#.attention.value.*",
        "bert.encoder.layer.#.attention.output.dense.*": "blocks.#.attention.out.*",
        "bert.encoder.layer.#.attention.output.LayerNorm.*": "blocks.#.attention_norm.*",
        "bert.encoder.layer.#.intermediate.dense.*": "blocks.#.ffn.dense_in.*",
        "bert.encoder.layer.#.output.dense.*": "blocks.#.ffn.dense_out.*",
        "bert.encoder.layer.#.output.LayerNorm.*": "blocks.#.ffn_norm.*",
        "cls.predictions.transform.dense.*": "head.dense.*",
        "cls.predictions.transform.LayerNorm.*": "head.norm.*",
        "cls.predictions.bias": "head.bias",
    },
}


def _needs(a: Architecture) -> dict[str, dict]:
    """The values of axes with which each model of transformers computes what ours does; other axes may be anything."""
    every = {
        "embedding": None,
        "different_layers": None,
        "ffn_every": 1,
        "funnel": 0,
    }
    rotary = every | {
        "norm_order": "pre",
        "activation": "geglu",
        "positions": "rotary",
        "final_norm": True,
        "qkv_bias": a.bias,  # one switch for all of attention
    }
    return {
        "ModernBert": rotary
        | {"norm": "layernorm", "embedding_norm": True, "first_norm": False, "head_transform": True},
        "EuroBert": rotary
        | {
            "norm": "rmsnorm",
            "embedding_norm": False,
            "first_norm": True,
            "head_transform": False,
            "decoder_bias": a.bias,
        },
        "Bert": every
        | {
            "norm_order": "post",
            "norm": "layernorm",
            "norm_bias": True,
            "activation": "gelu",
            "positions": "learned" if a.positions == "rotary" else a.positions,  # any table can be written down
            "embedding_norm": True,
            "final_norm": False,
            "bias": True,
            "qkv_bias": True,
            "head_transform": True,
            "decoder_bias": True,
            "tied": True,
        },
    }


def _nearest(architecture: Architecture) -> tuple[str, dict]:
    """The model of transformers that lacks the fewest axes of this layout, and these with the values that it needs."""
    lacking = {
        name: {axis: value for axis, value in needed.items() if getattr(architecture, axis) != value}
        for name, needed in _needs(architecture).items()
    }
    return min(lacking.items(), key=lambda item: len(item[1]))


def transformers_model(architecture: Architecture) -> str | None:
    """The model of transformers as which this layout is saved, as in `ModernBert`ForMaskedLM; None: there is none."""
    name, lacking = _nearest(architecture)
    return None if lacking else name


def why_not_transformers(architecture: Architecture) -> str | None:
    """The sentence that says what transformers can't express of this layout; None if it can."""
    name, lacking = _nearest(architecture)
    if not lacking:
        return None
    axes = [f"{axis} {json.dumps(v)} (here {json.dumps(getattr(architecture, axis))})" for axis, v in lacking.items()]
    listed = ", ".join(axes[:-1]) + " and " * (len(axes) > 1) + axes[-1]
    return f"transformers has no model of this layout; the nearest, {name}, would need {listed}."


def _settings(name: str, bert: Bert) -> dict:
    """What stands in config.json for transformers."""
    a = bert.architecture
    common = {
        "model_type": name.lower(),
        "architectures": [f"{name}ForMaskedLM"],
        "dtype": "float32",
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.length,
        "hidden_size": a.hidden,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "intermediate_size": a.inner,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": a.tied,
        **TOKENS,
    }
    if name == "Bert":
        return common | {
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "type_vocab_size": 2,
            "layer_norm_eps": a.norm_eps,
            "position_embedding_type": "absolute",
        }
    biases = {"attention_bias": a.qkv_bias, "mlp_bias": a.bias, "attention_dropout": 0.0}
    if name == "EuroBert":
        return common | {
            **biases,
            "hidden_act": "gelu",
            "num_key_value_heads": a.heads,
            "head_dim": a.hidden // a.heads,
            "rms_norm_eps": a.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
            "classifier_pooling": "bos",
        }
    return common | {
        **biases,
        "hidden_activation": "gelu",
        "norm_eps": a.norm_eps,
        "norm_bias": a.norm_bias,
        "layer_types": ["full_attention"] * a.layers,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": ROTARY_BASE}
            for kind in ("full_attention", "sliding_attention")
        },
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_bias": a.bias,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
        "decoder_bias": a.decoder_bias,
        "sparse_prediction": False,
        # the same in the names of 2024, which other engines (text-embeddings-inference, vLLM) can't do without; the
        # former reads norms and heads without bias, whatever is said of them here
        "global_rope_theta": ROTARY_BASE,
        "local_rope_theta": ROTARY_BASE,
        "global_attn_every_n_layers": 1,
        "local_attention": 128,
        "layer_norm_eps": a.norm_eps,
        "initializer_cutoff_factor": 2.0,
    }


class Saved(BaseModel, frozen=True, extra="forbid"):
    """What stands under `cram` in config.json."""

    architecture: Architecture
    vocabulary: int = Field(ge=1, lt=2**31)
    length: int = Field(ge=1, lt=2**31)


def _rows(name: str, blocks: int, theirs_first: bool) -> Iterator[tuple[list[str], list[str]]]:
    """The table of names, row by row and block by block: from which names to which."""
    for theirs, ours in NAMES[name].items():
        for index in range(blocks) if "#" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                sides = [side.replace("#", str(index)).replace("*", kind).split() for side in (theirs, ours)]
                yield (sides[0], sides[1]) if theirs_first else (sides[1], sides[0])


def _renamed(tensors: dict[str, Tensor], rows: Iterator[tuple[list[str], list[str]]]) -> dict[str, Tensor]:
    """The tensors under their other names. Raises KeyError for names that are in no row."""
    found, left = {}, dict(tensors)
    for old, new in rows:
        if old[0] in left:
            parts = torch.cat([left.pop(name) for name in old]).chunk(len(new))
            found |= {name: part.clone() for name, part in zip(new, parts, strict=True)}
    if left:
        raise KeyError(f"no place for {', '.join(left)}")
    return found


def _only_in_bert(bert: Bert) -> dict[str, Tensor]:
    """What transformers' BERT has and ours doesn't: token types, which are zero, and a table of sinusoidal positions."""
    found = {"embedding.type.weight": torch.zeros(2, bert.architecture.hidden)}
    if bert.architecture.positions != "learned":
        embedding = bert.embedding
        scale = embedding.scale.detach() if bert.architecture.positions == "scaled-sinusoidal" else 1.0
        found["embedding.position.weight"] = (scale * embedding.codes).float().cpu()
    return found


def save(bert: Bert, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    name = transformers_model(bert.architecture)
    state = {key: value.detach().float().cpu().contiguous() for key, value in bert.state_dict().items()}
    if name == "Bert":
        state.pop("embedding.scale", None)  # it is in the table
        state |= _only_in_bert(bert)
    saved = Saved(architecture=bert.architecture, vocabulary=bert.vocabulary, length=bert.length)
    config = (_settings(name, bert) if name else {"model_type": "cram"}) | {"cram": saved.model_dump()}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors = _renamed(state, _rows(name, len(bert.blocks), theirs_first=False)) if name else state
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def load(folder: Path) -> Bert:
    """Read what `save` wrote, or what transformers made of it and saved again. Raises InputError for anything else."""
    try:
        return _load(json.loads((folder / CONFIG).read_text()), folder / WEIGHTS)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split()).rstrip(".")
        raise InputError(
            f"{folder} holds no model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as the pretrain "
            "stage writes them."
        ) from error


def _load(config: dict, weights: Path) -> Bert:
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    if "cram" not in config:
        earlier = config.get("model_type") == EARLIER
        why = "an earlier version of cram wrote it; run its pretrain stage again"
        raise ValueError(why if earlier else f"{CONFIG} has no key 'cram'")
    saved = Saved.model_validate(config["cram"])
    name = transformers_model(saved.architecture)
    kind = (name or "cram").lower()
    if config.get("model_type") != kind:
        raise ValueError(f"{CONFIG} says model_type {config.get('model_type')!r}, but this layout is saved as {kind!r}")
    bert = Bert(saved.architecture, saved.vocabulary, saved.length)
    state = load_file(weights)
    if name:
        state = _renamed(state, _rows(name, len(bert.blocks), theirs_first=True))
    fixed = {key: state.pop(key) for key in _only_in_bert(bert)} if name == "Bert" else {}
    if name == "Bert" and saved.architecture.positions == "scaled-sinusoidal":
        state["embedding.scale"] = fixed["embedding.position.weight"][0, 1]  # times the cosine of 0
    bert.load_state_dict(state)
    for key, found in fixed.items():
        expected, rounding = _only_in_bert(bert)[key], torch.finfo(found.dtype).eps
        if not torch.allclose(found.float(), expected, rtol=2 * rounding, atol=1e-6):
            raise ValueError(f"{key} was changed since, and cram can't express that")
    return bert
