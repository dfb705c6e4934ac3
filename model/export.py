"""Models on disk: folders that cram and transformers load.

A model of BERT's or ModernBERT's layout is written under transformers' names, so that
`AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code. Any other is written under
cram's own names, which transformers reads after `import model.hf`. The same holds for classifiers, by
`AutoModelForSequenceClassification` or `AutoModelForTokenClassification`, if they have that model's head. In all cases
config.json has a key `cram`, from which `load` or `load_classifier` rebuilds the model.

model.safetensors is fp32 and stores a tied vocabulary head once. Classifiers of transformers have no vocabulary head,
so the encoder of one gets a new head when it is loaded.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import InputError
from model.bert import INIT_STD, PAD, ROTARY_BASE, SEP, Bert
from model.classifier import Classifier
from model.layouts import transformers_classifier, transformers_model
from model.settings import Architecture, HeadName, Kind, Pooling, Texts

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ENCODER, HEAD = "bert.", "classifier."  # prefixes of a classifier's tensors; the encoder's is not stored
TYPES = "embedding.type.weight"  # the embedding of token types, which only transformers' BERT has; here it is zero
TOKENS = {  # the vocabulary fixes their ids; a sequence begins with [CLS] and ends with [SEP]
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": SEP,
    "sep_token_id": SEP,
    "mask_token_id": 4,
}
# Names of tensors in transformers, and cram's: '#' is each block, '*' each of weight and bias. Several names on one
# side are one tensor on the other, joined along the first dimension. Tensors that a layout doesn't have are left out.
ENCODER_NAMES: dict[str, dict[str, str]] = {
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
    },
    "Bert": {
        "bert.embeddings.word_embeddings.weight": "embedding.word.weight",
        "bert.embeddings.position_embeddings.weight": "embedding.position.weight",
        "bert.embeddings.token_type_embeddings.weight": TYPES,
        "bert.embeddings.LayerNorm.*": "embedding.norm.*",
        "bert.encoder.layer.#.attention.self.query.*": "blocks.#.attention.query.*",
        "bert.encoder.layer.#.attention.self.key.*": "blocks.#.attention.key.*",
        "bert.encoder.layer.#.attention.self.value.*": "blocks.#.attention.value.*",
        "bert.encoder.layer.#.attention.output.dense.*": "blocks.#.attention.out.*",
        "bert.encoder.layer.#.attention.output.LayerNorm.*": "blocks.#.attention_norm.*",
        "bert.encoder.layer.#.intermediate.dense.*": "blocks.#.ffn.dense_in.*",
        "bert.encoder.layer.#.output.dense.*": "blocks.#.ffn.dense_out.*",
        "bert.encoder.layer.#.output.LayerNorm.*": "blocks.#.ffn_norm.*",
    },
}
TRANSFORM = {"head.dense.*": "head.dense.*", "head.norm.*": "head.norm.*"}
VOCABULARY_NAMES: dict[str, dict[str, str]] = {
    "ModernBert": TRANSFORM | {"decoder.weight": "head.decoder.weight", "decoder.bias": "head.bias"},
    "Bert": {
        "cls.predictions.transform.dense.*": "head.dense.*",
        "cls.predictions.transform.LayerNorm.*": "head.norm.*",
        "cls.predictions.bias": "head.bias",
    },
}
CLASSIFIER_NAMES: dict[str, dict[str, str]] = {  # ModernBERT's begins with the transform of its vocabulary head
    "ModernBert": TRANSFORM | {"classifier.*": "classifier.out.*"},
    "Bert": {"bert.pooler.dense.*": "classifier.dense.*", "classifier.*": "classifier.out.*"},  # no pooler for tokens
}
PROBLEMS: dict[Kind, str] = {  # transformers' names of kinds; it has none for tokens
    "classes": "single_label_classification",
    "regression": "regression",
    "multilabel": "multi_label_classification",
}


class Saved(BaseModel, frozen=True, extra="forbid"):
    """The key `cram` in the config.json of a pretrained model."""

    architecture: Architecture
    vocabulary: int = Field(ge=1, lt=2**31)
    length: int = Field(ge=1, lt=2**31)


class SavedClassifier(Saved, frozen=True, extra="forbid"):
    """The key `cram` in the config.json of a classifier."""

    kind: Kind = Field("classes", description="Earlier versions wrote none; of one class, it means a regression.")
    classes: int = Field(ge=1, lt=2**31)
    head: HeadName
    pooling: Pooling = "cls"
    texts: Texts = Field(None, description="Texts per input; None: not known.")
    max_tokens: int | None = Field(
        None, ge=8, description="Length to which inputs were cut in training; None: not known."
    )

    @model_validator(mode="after")
    def _inputs_fit(self) -> "SavedClassifier":
        if self.kind == "regression" and self.classes != 1:
            raise ValueError(f"classes is {self.classes}, but kind 'regression' has one output")
        if self.pooling == "compare" and self.texts is None:
            raise ValueError("texts is null; pooling 'compare' needs the number of texts in an input, 1 or 2")
        if self.max_tokens and self.max_tokens > self.length:
            raise ValueError(f"max_tokens is {self.max_tokens}, but the model takes {self.length} tokens")
        return self


def described(about: object) -> Saved:
    """The key `cram` in config.json as settings. Raises a ValueError that names the field for anything else."""
    finetuned = isinstance(about, dict) and "classes" in about
    return (SavedClassifier if finetuned else Saved).model_validate(about)


def _write(model: Bert | Classifier, family: str | None, about: dict, saved: Saved, folder: str | Path) -> None:
    """`family`: the model of transformers under whose names it is written; `about`: more fields of config.json."""
    folder, bert = Path(folder), model.bert if isinstance(model, Classifier) else model
    state = {
        key.removeprefix(ENCODER): value.detach().float().cpu().contiguous()
        for key, value in model.state_dict().items()
    }
    config = {"model_type": "cram"}
    if family:
        config, state = config_of(family, bert), to_transformers(state, family, bert, model is not bert)
    (folder / CONFIG).write_text(json.dumps(config | about | {"cram": saved.model_dump()}, indent=2) + "\n")
    try:
        save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one too
        raise InputError(
            f"The model can't be written to {folder} ({error}). Free space or grant access there, then run again."
        ) from error


def _sizes(bert: Bert) -> dict:
    return {"architecture": bert.architecture, "vocabulary": bert.vocabulary, "length": bert.length}


def save(bert: Bert, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    family = transformers_model(bert.architecture)
    saved = Saved(**_sizes(bert))
    _write(bert, family, {"architectures": [f"{family}ForMaskedLM"]} if family else {}, saved, folder)


def save_classifier(
    classifier: Classifier, folder: str | Path, labels: tuple[str, ...], max_tokens: int | None = None
) -> None:
    """Write config.json, with the classes' names (none for regression), and model.safetensors.

    `max_tokens` to which inputs were cut; None: not known.
    """
    bert, kind, head, pooling = classifier.bert, classifier.kind, classifier.head, classifier.pooling
    if bert.kept is not None:
        raise RuntimeError("The embedding holds only some of the tokens; call restore_tokens before saving.")
    names = dict(enumerate(labels or ("score",)))
    about = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if problem := PROBLEMS.get(kind):
        about["problem_type"] = problem
    if theirs := transformers_classifier(bert.architecture, head, pooling, kind):
        about["architectures"] = [theirs]
        if pooling != "cls":
            about["classifier_pooling"] = pooling
    layers = {"kind": kind, "classes": classifier.classes, "head": head, "pooling": pooling, "texts": classifier.texts}
    saved = SavedClassifier(**_sizes(bert), **layers, max_tokens=max_tokens)
    _write(classifier, classifier.family, about, saved, folder)


def load(folder: str | Path) -> Bert:
    """Load a model that `save` wrote, or that transformers loaded and saved again; of a classifier, the encoder.

    Raises InputError for anything else.
    """
    model = _read(folder)
    return model.bert if isinstance(model, Classifier) else model


def load_classifier(folder: str | Path) -> Classifier:
    """Load a classifier that `save_classifier` wrote, or that transformers loaded and saved again; without dropout.

    Raises InputError for anything else.
    """
    model = _read(folder)
    if isinstance(model, Classifier):
        return model
    raise InputError(
        f"{folder} holds a pretrained model, which has no classes yet. Expected a model of the finetune stage."
    )


def _read(folder: str | Path) -> Bert | Classifier:
    folder = Path(folder)
    try:
        return _load(json.loads((folder / CONFIG).read_text()), folder / WEIGHTS)
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error.args[0] if isinstance(error, KeyError) else error).split()).rstrip(".")
        raise InputError(
            f"{folder} holds no model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as the pretrain "
            "and finetune stages write them."
        ) from error


def _load(config: dict, weights: Path) -> Bert | Classifier:
    if not isinstance(config, dict) or "cram" not in config:
        raise ValueError(f"{CONFIG} has no key 'cram'")
    saved = described(config["cram"])
    bert, family = Bert(saved.architecture, saved.vocabulary, saved.length), transformers_model(saved.architecture)
    model: Bert | Classifier = bert
    if isinstance(saved, SavedClassifier):
        family = family if saved.head == "native" else None
        model = Classifier(bert, saved.classes, 0.0, 0, saved.head, saved.pooling, saved.texts, saved.kind)
    expected = ["cram", *([family.lower()] if family else [])]  # model.hf saves every layout under cram's own names
    if (name := config.get("model_type")) not in expected:
        raise ValueError(f"{CONFIG} says model_type {name!r}; expected {' or '.join(expected)}")
    state = load_file(weights)
    if family and name != "cram":
        state = from_transformers(state, family, bert, model is not bert)
    state = {key.removeprefix(ENCODER): value for key, value in state.items()}  # model.hf writes this prefix
    if model is not bert:
        state = {key if key.startswith(HEAD) else ENCODER + key: value for key, value in state.items()}
    model.load_state_dict(state)
    return model


def config_of(family: str, bert: Bert) -> dict:
    """The fields of config.json from which transformers builds its model."""
    a = bert.architecture
    return {
        "model_type": family.lower(),
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
        **(modernbert_config(a) if family == "ModernBert" else bert_config(a)),
    }


def bert_config(a: Architecture) -> dict:
    """The fields that only BERT has."""
    return {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "type_vocab_size": 2,
        "layer_norm_eps": a.norm_eps,
        "position_embedding_type": "absolute",
    }


def modernbert_config(a: Architecture) -> dict:
    """The fields that only ModernBERT has."""
    rope = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    return {
        "attention_bias": a.qkv_bias,
        "mlp_bias": a.bias,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu",
        "norm_eps": a.norm_eps,
        "norm_bias": a.norm_bias,
        "layer_types": ["full_attention"] * a.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_bias": a.bias,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
        "decoder_bias": a.decoder_bias,
        "sparse_prediction": False,
        # The same under the names of 2024, which other engines (text-embeddings-inference, vLLM) require. The former
        # reads norms and heads without bias, whatever these settings say.
        "global_rope_theta": ROTARY_BASE,
        "local_rope_theta": ROTARY_BASE,
        "global_attn_every_n_layers": 1,
        "local_attention": 128,
        "layer_norm_eps": a.norm_eps,
        "initializer_cutoff_factor": 2.0,
    }


def pairs(family: str, blocks: int, classifier: bool) -> Iterator[tuple[list[str], list[str]]]:
    """The names of each tensor in transformers' model, and cram's; those of classifiers lack the vocabulary head."""
    names = ENCODER_NAMES[family] | (CLASSIFIER_NAMES if classifier else VOCABULARY_NAMES)[family]
    for theirs, ours in names.items():
        for index in range(blocks) if "#" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                sides = [side.replace("#", str(index)).replace("*", kind).split() for side in (theirs, ours)]
                yield sides[0], sides[1]


def renamed(tensors: dict[str, Tensor], names: list[tuple[list[str], list[str]]]) -> dict[str, Tensor]:
    """The tensors under their new names; `names`: old and new. Raises KeyError for a tensor that has no new name."""
    result: dict[str, Tensor] = {}
    left = dict(tensors)
    for old, new in names:
        if old[0] in left:
            parts = torch.cat([left.pop(name) for name in old]).chunk(len(new))
            result |= {name: part.clone() for name, part in zip(new, parts, strict=True)}
    if left:
        raise KeyError(f"no place for {', '.join(left)}")
    return result


def to_transformers(state: dict[str, Tensor], family: str, bert: Bert, classifier: bool) -> dict[str, Tensor]:
    """The tensors of a model under transformers' names; those of a classifier without the vocabulary head."""
    if family == "Bert":
        state = state | {TYPES: torch.zeros(2, bert.architecture.hidden)}
    names = [(ours, theirs) for theirs, ours in pairs(family, len(bert.blocks), classifier)]
    if classifier:
        stored = {key for ours, _ in names for key in ours}
        state = {key: value for key, value in state.items() if key in stored}
    return renamed(state, names)


def from_transformers(state: dict[str, Tensor], family: str, bert: Bert, classifier: bool) -> dict[str, Tensor]:
    """The tensors under cram's names; a classifier gets the vocabulary head of `bert`, as transformers stores none.

    Raises KeyError for tensors that are missing or unknown, and ValueError if token types have been trained.
    """
    names = list(pairs(family, len(bert.blocks), classifier))
    state = renamed(state, names)
    if family == "Bert" and state.pop(TYPES).any():
        raise ValueError("token_type_embeddings was trained, and cram has no token types")
    if classifier:
        stored = {key for _, ours in names for key in ours}
        heads = {key: value for key, value in bert.state_dict().items() if key.startswith("head.")}
        state |= {key: value for key, value in heads.items() if key not in stored}
    return state
