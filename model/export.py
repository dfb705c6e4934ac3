"""Models on disk: folders that cram and transformers load.

A model of BERT's or ModernBERT's layout is written under transformers' names, so that
`AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code. Any other is written under
the names of cram's classes for transformers, hf.py. The same holds for classifiers, if transformers has their head.
`load` reads what either wrote. model.safetensors is fp32 and stores a tied vocabulary head once.
"""

import json
import textwrap
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.bert import Bert
from model.errors import InputError
from model.finetuning import Classifier, width_factor
from model.layers import INIT_STD, MASK, PAD, ROTARY_BASE, SEP, inner
from model.layouts import MASKED, fields_of, head_for, head_of, read_config, transformers_model
from model.settings import Kind

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ENCODER, HEAD, VOCABULARY = "bert.", "classifier.", "head."  # prefixes of a model's parts
OWN = "Cram"  # the family of classes in hf.py
POSITIONS = "embedding.position.weight"  # learned ones
TYPES = "embedding.type.weight"  # the embedding of token types, which only transformers' BERT has; here it is zero
TOKENS = {  # the vocabulary fixes their ids; a sequence begins with [CLS] and ends with [SEP]
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "cls_token_id": 2,
    "eos_token_id": SEP,
    "sep_token_id": SEP,
    "mask_token_id": MASK,
}
# Names of tensors in transformers, and cram's: '#' is each block, '*' each of weight and bias. Several names on one
# side are one tensor on the other, joined along the first dimension. A model has those of its layout and head.
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
        "classifier.*": "classifier.out.*",
    },
    "Bert": {
        "bert.embeddings.word_embeddings.weight": "embedding.word.weight",
        "bert.embeddings.position_embeddings.weight": POSITIONS,
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
        "cls.predictions.transform.dense.*": "head.dense.*",
        "cls.predictions.transform.LayerNorm.*": "head.norm.*",
        "cls.predictions.bias": "head.bias",
        "bert.pooler.dense.*": "classifier.dense.*",  # not for tokens
        "classifier.*": "classifier.out.*",
    },
}
FIXED = {"hidden_act", "hidden_activation", "layer_types", "rope_parameters"}  # without an axis of Architecture
BERT = {  # fields of config.json that only BERT has
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
}
PROBLEMS: dict[Kind, str] = {  # transformers' names of kinds; it has none for tokens
    "classes": "single_label_classification",
    "regression": "regression",
    "multilabel": "multi_label_classification",
}


def _write(model: Bert | Classifier, family: str, about: dict, folder: str | Path) -> None:
    """`family`: the model of transformers under whose names it is written; `about`: more fields of config.json."""
    folder, bert = Path(folder), model.bert if isinstance(model, Classifier) else model
    state = {k.removeprefix(ENCODER): v.detach().float().cpu().contiguous() for k, v in model.state_dict().items()}
    if model is not bert:
        unused = ("head.decoder.", "head.bias") if family == "ModernBert" else VOCABULARY
        state = {key: value for key, value in state.items() if not key.startswith(unused)}
    if family == "Bert":
        state[TYPES] = torch.zeros(2, bert.architecture.hidden)
    if family != OWN:
        about |= {"cram": about.get("cram", {}) | {"architecture": bert.architecture.model_dump()}}
    (folder / CONFIG).write_text(json.dumps(config_of(family, bert) | about, indent=2) + "\n", encoding="utf-8")
    state, _ = renamed(state, [(ours, theirs) for theirs, ours in pairs(family, state)])
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def save(bert: Bert, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    family = transformers_model(bert.architecture)[0] or OWN
    _write(bert, family, {"architectures": [f"{family}For{MASKED}"]}, folder)


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
    texts, family = classifier.texts, classifier.family or OWN
    about["architectures"] = [f"{family}For{head_for(kind)}"]
    if pooling != "cls":
        about["classifier_pooling"] = pooling if width_factor(pooling, texts) > 1 else "mean"
    about["cram"] = {"head": head, "pooling": pooling, "texts": texts, "max_tokens": max_tokens}
    _write(classifier, family, about, folder)


def load(folder: str | Path, masked: bool = False) -> Bert:
    """Load the encoder and the vocabulary head of a model that cram or transformers saved, in fp32.

    Other heads are left out; a vocabulary head that is missing is new. `masked`: refuse a model of another head. Raises
    InputError for what is no model of cram's, or not the whole of one.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if masked and (head := head_of(config)) != MASKED:
            raise ValueError(f"its head is {head or 'none'}; expected {MASKED}")
        return _load(config, folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        reason = textwrap.shorten(reason, 500, placeholder=" …").rstrip(".")
        raise InputError(
            f"{folder} holds no model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as cram, "
            "save_pretrained or Trainer.save_model write them, with adapters merged."
        ) from error


def _load(config: dict, folder: Path) -> Bert:
    bert, masked = Bert(*read_config(config)), head_of(config) == MASKED
    own, family = bert.state_dict(), _family(config, bert)
    names = [(list(map(bare, theirs)), ours) for theirs, ours in pairs(family, [*own, *[TYPES] * (family == "Bert")])]
    state, left = renamed({bare(name): value.float() for name, value in tensors_of(folder).items()}, names)
    if not masked:
        encoder = {old[0].split(".")[0] for old, new in names if not new[0].startswith(VOCABULARY)}
        left = [name for name in left if name.split(".")[0] in encoder]
    missing = [old[0] for old, new in names if new[0] not in state and (masked or not new[0].startswith(VOCABULARY))]
    if wrong := [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in left]:
        raise ValueError(", ".join(wrong))
    if TYPES in state:
        first, *others = state.pop(TYPES)
        state[POSITIONS] = state[POSITIONS] + first
        if any(other.any() for other in others):
            warnings.warn(
                f"{folder} was trained with token types. cram gives all tokens type 0, so single texts read as in "
                "transformers, but pairs, whose second text may have had type 1 in training, do not.",
                stacklevel=3,
            )
    bert.load_state_dict(own | state)
    return bert


def _family(config: dict, bert: Bert) -> str:
    """The model in a folder with this config. Raises ValueError if cram has no such model."""
    (family, why_not), name = transformers_model(bert.architecture), config["model_type"]
    if name == OWN.lower():
        return OWN
    if family is None or family.lower() != name:
        raise ValueError(f"model_type {name!r} has no such layout; {why_not or family}")
    for field, value in config_of(family, bert).items():
        if field in FIXED and config.get(field, value) != value:
            raise ValueError(f"{field} is {config[field]!r}; expected {value!r}")
    return family


def bare(name: str) -> str:
    """A tensor's name without the encoder's prefix, which a model without a head doesn't have."""
    return name.removeprefix(ENCODER).removeprefix("model.")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder: of one file, or of those that an index lists, as transformers saves large models."""
    names = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    if elsewhere := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{INDEX} lists {elsewhere[0]!r}, which is not in the folder")
    return {name: tensor for file in sorted(names) for name, tensor in load_file(folder / file).items()}


def config_of(family: str, bert: Bert) -> dict:
    """The fields of config.json from which transformers builds its model."""
    a, rope = bert.architecture, {"rope_type": "default", "rope_theta": ROTARY_BASE}
    about = {
        "model_type": family.lower(),
        "dtype": "float32",
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.length,
        "initializer_range": INIT_STD,
        **TOKENS,
        **fields_of(a, family.lower()),
    }
    if family != "ModernBert":
        return about | (BERT if family == "Bert" else {})
    return about | {  # what only ModernBERT has
        "intermediate_size": inner(a),
        "attention_dropout": 0.0,
        "hidden_activation": "gelu",
        "layer_types": ["full_attention"] * a.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_bias": a.bias,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
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


def pairs(family: str, keys: Collection[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The names in transformers' model of tensors with these keys, and cram's: those that are one on either side."""
    if family == OWN:
        yield from (([key if key.startswith((HEAD, VOCABULARY)) else ENCODER + key], [key]) for key in keys)
    blocks = {key.split(".")[1] for key in keys if key.startswith("blocks.")}
    for theirs, ours in NAMES.get(family, {}).items():
        for index in blocks if "#" in ours else ("",):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                sides = [side.replace("#", index).replace("*", kind).split() for side in (theirs, ours)]
                if sides[1][0] in keys:
                    yield sides[0], sides[1]


def renamed(
    tensors: dict[str, Tensor], names: list[tuple[list[str], list[str]]]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under their new names, and the names of those that have none; `names`: old and new."""
    result: dict[str, Tensor] = {}
    left = dict(tensors)
    for old, new in names:
        if old[0] in left:
            parts = tuple(left.pop(name) for name in old)
            parts = parts if len(old) == len(new) else torch.cat(parts).chunk(len(new))
            result |= {name: part.contiguous() for name, part in zip(new, parts, strict=True)}
    return result, list(left)
