"""Models on disk: folders that cram and transformers load.

`Architecture` covers BERT, ModernBERT and EuroBERT. A model of such a layout is written under transformers' names, so
that `AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code; any other under cram's
own names, which transformers reads after `import model.hf`. The same holds for classifiers, by
`AutoModelForSequenceClassification`, if they have that model's head. In all cases config.json has a key `cram`, from
which `load` or `load_classifier` rebuilds the model.

model.safetensors is fp32, and has a tied vocabulary head once. That of a classifier of transformers has none, so a model that
is loaded from it has a new one.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import InputError
from model.bert import CLASSIFIER_WIDTH, INIT_STD, PAD, ROTARY_BASE, Bert, Classifier
from model.layouts import transformers_model, why_not_transformers
from model.settings import Architecture, HeadName

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
TRANSFORM = ("head.dense.*", "head.norm.*")  # before the vocabulary head; ModernBERT's classifier has it too
OWN = "classifier."  # of a classifier, what is beside the encoder
PREFIX = "bert."  # of the encoder's tensors in what transformers saves of a model in cram's own layout
CLASSIFIER_NAMES = {  # what classifiers have in place of the vocabulary head
    "ModernBert": {"classifier.*": "classifier.out.*"},
    "EuroBert": {"dense.*": "classifier.dense.*", "classifier.*": "classifier.out.*"},
    "Bert": {"bert.pooler.dense.*": "classifier.dense.*", "classifier.*": "classifier.out.*"},
}


def transformers_classifier(architecture: Architecture, head: HeadName) -> str | None:
    """The class of transformers that has this layout and head, as `ModernBertForSequenceClassification`; None: there is none."""
    name = transformers_model(architecture) if head == "native" else None
    return f"{name}ForSequenceClassification" if name else None


def why_not_transformers_classifier(architecture: Architecture, head: HeadName) -> str | None:
    """The sentence that says why transformers can't load a classifier of this layout and head; None if it can."""
    if head == "native" or not transformers_model(architecture):
        return why_not_transformers(architecture)
    return (
        f"transformers' {transformers_model(architecture)} has no dense-tanh head of width {CLASSIFIER_WIDTH}; finetune with "
        "head 'native' for one that it has."
    )


def _settings(name: str, bert: Bert) -> dict:
    """What stands in config.json for transformers."""
    a = bert.architecture
    common = {
        "model_type": name.lower(),
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


class SavedClassifier(Saved, frozen=True, extra="forbid"):
    """The same of a classifier."""

    classes: int = Field(ge=1, lt=2**31)
    head: HeadName
    texts: Literal[1, 2] | None = Field(None, description="In an input; None: not known.")
    max_tokens: int | None = Field(None, ge=8, description="To which inputs were cut in training; None: not known.")

    @model_validator(mode="after")
    def _inputs_fit(self) -> "SavedClassifier":
        if self.max_tokens and self.max_tokens > self.length:
            raise ValueError(f"max_tokens is {self.max_tokens}, but the model takes {self.length} tokens")
        return self


def described(about: object) -> Saved:
    """What stands under `cram` in config.json. Raises a ValueError that names the field for anything else."""
    finetuned = isinstance(about, dict) and "classes" in about
    return (SavedClassifier if finetuned else Saved).model_validate(about)


def _names(name: str, saved: Saved) -> dict[str, str]:
    """The table of names of a model of transformers, with the head that it has."""
    if not isinstance(saved, SavedClassifier):
        return NAMES[name]
    kept = TRANSFORM if name == "ModernBert" else ()
    encoder = {theirs: ours for theirs, ours in NAMES[name].items() if ours in kept or not ours.startswith("head.")}
    return encoder | CLASSIFIER_NAMES[name]


def _rows(names: dict[str, str], blocks: int, theirs_first: bool) -> Iterator[tuple[list[str], list[str]]]:
    """The table of names, row by row and block by block: from which names to which."""
    for theirs, ours in names.items():
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


def _write(bert: Bert, own: dict[str, Tensor], saved: Saved, about: dict, name: str | None, folder: str | Path) -> None:
    """`own`: what is beside the encoder; `about`: what else transformers is to know; `name`: of its model, if it has one."""
    state = {key: value.detach().float().cpu().contiguous() for key, value in (bert.state_dict() | own).items()}
    if name == "Bert":
        state.pop("embedding.scale", None)  # it is in the table
        state |= _only_in_bert(bert)
    if name:
        rows = list(_rows(_names(name, saved), len(bert.blocks), theirs_first=False))
        if isinstance(saved, SavedClassifier):  # without the vocabulary head
            there = {key for ours, _ in rows for key in ours}
            state = {key: value for key, value in state.items() if key in there}
        state = _renamed(state, iter(rows))
    config = (_settings(name, bert) if name else {"model_type": "cram"}) | about | {"cram": saved.model_dump()}
    folder = Path(folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    try:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one too
        raise InputError(
            f"The model can't be written to {folder} ({error}). Free space or grant access there, then run again."
        ) from error


def save(bert: Bert, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    name = transformers_model(bert.architecture)
    saved = Saved(architecture=bert.architecture, vocabulary=bert.vocabulary, length=bert.length)
    _write(bert, {}, saved, {"architectures": [f"{name}ForMaskedLM"]} if name else {}, name, folder)


def save_classifier(
    classifier: Classifier,
    folder: str | Path,
    labels: tuple[str, ...],
    texts: Literal[1, 2] | None = None,
    max_tokens: int | None = None,
) -> None:
    """Write config.json, with the classes' names (none for regression), and model.safetensors.

    `texts` in an input, and `max_tokens` to which inputs were cut: for whoever labels texts with it; None: not known.
    """
    bert, classes = classifier.bert, classifier.classes
    if bert.kept is not None:
        raise RuntimeError("The embedding holds some tokens alone; call restore_tokens before saving.")
    if len(labels) != (classes if classes > 1 else 0):
        raise RuntimeError(f"There are {len(labels)} names for {classes} classes.")
    about = {
        "id2label": dict(enumerate(labels or ("score",))),
        "label2id": {label: number for number, label in enumerate(labels or ("score",))},
        "problem_type": "single_label_classification" if labels else "regression",
    }
    if theirs := transformers_classifier(bert.architecture, classifier.head):
        about["architectures"] = [theirs]
    sizes = {"architecture": bert.architecture, "vocabulary": bert.vocabulary, "length": bert.length}
    saved = SavedClassifier(**sizes, classes=classes, head=classifier.head, texts=texts, max_tokens=max_tokens)
    own = {key: value for key, value in classifier.state_dict().items() if key.startswith(OWN)}
    _write(bert, own, saved, about, classifier.layout, folder)


def load(folder: str | Path) -> Bert:
    """Read what `save` wrote, or what transformers made of it and saved again; of a classifier, the encoder.

    Raises InputError for anything else.
    """
    model = _read(folder)
    return model.bert if isinstance(model, Classifier) else model


def load_classifier(folder: str | Path) -> Classifier:
    """Read what `save_classifier` wrote, or what transformers made of it and saved again; without dropout.

    Raises InputError for anything else.
    """
    model = _read(folder)
    if isinstance(model, Classifier):
        return model
    raise InputError(
        f"{folder} holds a pretrained model, which has no classes yet. Expected a finetuned one, as the finetune stage keeps it."
    )


def _read(folder: str | Path) -> Bert | Classifier:
    folder = Path(folder)
    try:
        return _load(json.loads((folder / CONFIG).read_text()), folder / WEIGHTS)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split()).rstrip(".")
        raise InputError(
            f"{folder} holds no model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as the pretrain and "
            "finetune stages write them."
        ) from error


def _load(config: dict, weights: Path) -> Bert | Classifier:
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is no JSON object")
    if "cram" not in config:
        earlier = config.get("model_type") == EARLIER
        why = "an earlier version of cram wrote it; run its pretrain stage again"
        raise ValueError(why if earlier else f"{CONFIG} has no key 'cram'")
    saved = described(config["cram"])
    finetuned = isinstance(saved, SavedClassifier)
    name = transformers_model(saved.architecture) if not finetuned or saved.head == "native" else None
    # model.hf saves every layout under cram's own names
    kinds = {"cram": None} | ({name.lower(): name} if name else {})
    if config.get("model_type") not in kinds:
        raise ValueError(f"{CONFIG} says model_type {config.get('model_type')!r}; expected {' or '.join(kinds)}")
    name = kinds[config["model_type"]]
    bert = Bert(saved.architecture, saved.vocabulary, saved.length)
    state = load_file(weights)
    if name:
        state = _renamed(state, _rows(_names(name, saved), len(bert.blocks), theirs_first=True))
    else:
        state = {key.removeprefix(PREFIX): value for key, value in state.items()}
    fixed = {key: state.pop(key) for key in _only_in_bert(bert)} if name == "Bert" else {}
    if name == "Bert" and saved.architecture.positions == "scaled-sinusoidal":
        state["embedding.scale"] = fixed["embedding.position.weight"][0, 1]  # times the cosine of 0
    own = {key: state.pop(key) for key in list(state) if finetuned and key.startswith(OWN)}
    if finetuned and name:  # what of the vocabulary head is not stored is new
        stored = {key for _, ours in _rows(_names(name, saved), len(bert.blocks), theirs_first=True) for key in ours}
        fresh = {
            key: value for key, value in bert.state_dict().items() if key.startswith("head.") and key not in stored
        }
        state = fresh | state
    bert.load_state_dict(state)
    for key, found in fixed.items():
        expected, rounding = _only_in_bert(bert)[key], torch.finfo(found.dtype).eps
        if not torch.allclose(found.float(), expected, rtol=2 * rounding, atol=1e-6):
            raise ValueError(f"{key} was changed since, and cram can't express that")
    if not finetuned:
        return bert
    classifier = Classifier(bert, saved.classes, dropout=0.0, seed=0, head=saved.head)
    classifier.load_state_dict({f"bert.{key}": value for key, value in bert.state_dict().items()} | own)
    return classifier
