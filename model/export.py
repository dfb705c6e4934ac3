"""Models on disk: folders that cram and transformers load.

A model of BERT's or ModernBERT's layout is written under transformers' names, so that
`AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code. Any other is written under
the names of cram's classes for transformers, hf.py. The same holds for classifiers, if transformers has their head.
`load` reads what either wrote. model.safetensors is fp32 and stores a tied vocabulary head once.
"""

import json
import textwrap
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.bert import Bert
from model.errors import InputError
from model.finetuning import Classifier, width_factor
from model.layers import INIT_STD, MASK, PAD, ROTARY_BASE, SEP, inner
from model.layouts import MASKED, fields_of, head_for, head_of, read_config, transformers_model
from model.settings import Architecture, Kind

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
ENCODER = "bert."  # the prefixes of a model's parts
HEAD = "classifier."
VOCABULARY = "head."
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
# The names of tensors in transformers and in cram: '#' stands for each block, '*' for weight and bias. Several names
# on one side are one tensor on the other, joined along the first dimension. A model has those of its layout and head.
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
# fields of config.json that have one allowed value, as no axis of Architecture sets them
FIXED = {"hidden_act", "hidden_activation", "layer_types", "rope_parameters"}
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


class Pair(NamedTuple):
    """The names of the same tensors in transformers' model and in cram's. If one side has several, they are joined."""

    theirs: list[str]
    ours: list[str]


def _write(model: Bert | Classifier, family: str, about: dict, folder: str | Path) -> None:
    """`family`: the model of transformers under whose names it is written; `about`: more fields of config.json."""
    bert = model.bert if isinstance(model, Classifier) else model
    config = config_of(family, bert) | about
    if family != OWN:
        config["cram"] = about.get("cram", {}) | {"architecture": bert.architecture.model_dump()}
    Path(folder, CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    state = _state_of(model, family)
    if family == "Bert":
        state[TYPES] = torch.zeros(2, bert.architecture.hidden)
    renames = [(pair.ours, pair.theirs) for pair in pairs(family, state)]
    tensors, _ = rename(state, renames)
    save_file(tensors, Path(folder, WEIGHTS), metadata={"format": "pt"})


def _state_of(model: Bert | Classifier, family: str) -> dict[str, Tensor]:
    """The tensors to save, in fp32, by cram's names without the encoder's prefix."""
    state = {}
    for name, tensor in model.state_dict().items():
        state[name.removeprefix(ENCODER)] = tensor.detach().float().cpu().contiguous()
    if isinstance(model, Bert):
        return state
    # ModernBERT's classifiers keep the dense layer and the norm of the vocabulary head
    unused = ("head.decoder.", "head.bias") if family == "ModernBert" else VOCABULARY
    return {name: tensor for name, tensor in state.items() if not name.startswith(unused)}


def save(bert: Bert, folder: str | Path) -> None:
    """Write config.json and model.safetensors."""
    family = transformers_model(bert.architecture)[0] or OWN
    _write(bert, family, {"architectures": [f"{family}For{MASKED}"]}, folder)


def save_classifier(
    classifier: Classifier, folder: str | Path, labels: tuple[str, ...], max_tokens: int | None = None
) -> None:
    """Write config.json, with the names of the classes (none for regression), and model.safetensors.

    `max_tokens`: the length to which inputs were truncated; None: unknown.
    """
    if classifier.bert.kept is not None:
        raise RuntimeError("The embedding has only some of the tokens; call restore_tokens before saving.")
    family = classifier.family or OWN
    texts = classifier.texts
    pooling = classifier.pooling
    names = dict(enumerate(labels or ("score",)))
    about: dict = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    if classifier.kind in PROBLEMS:
        about["problem_type"] = PROBLEMS[classifier.kind]
    about["architectures"] = [f"{family}For{head_for(classifier.kind)}"]
    if pooling != "cls":
        about["classifier_pooling"] = pooling if width_factor(pooling, texts) > 1 else "mean"
    about["cram"] = {"head": classifier.head, "pooling": pooling, "texts": texts, "max_tokens": max_tokens}
    _write(classifier, family, about, folder)


def load(folder: str | Path, masked: bool = False) -> Bert:
    """Load the encoder and the vocabulary head of a model that cram or transformers saved, in fp32.

    Other heads are left out; a vocabulary head that is missing is new. `masked`: refuse a model with another head.
    Raises InputError if the folder has no model of cram's, or only a part of one.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        head = head_of(config)
        if masked and head != MASKED:
            raise ValueError(f"its head is {head or 'none'}; expected {MASKED}")
        return _load(config, folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        reason = textwrap.shorten(reason, 500, placeholder=" …").rstrip(".")
        raise InputError(
            f"{folder} does not have a model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} as cram, "
            "save_pretrained or Trainer.save_model write them, with adapters merged."
        ) from error


def _load(config: dict, folder: Path) -> Bert:
    bert = Bert(*read_config(config))
    own = bert.state_dict()
    family = _family(config, bert)
    keys = [*own, TYPES] if family == "Bert" else list(own)
    known = [Pair([bare(name) for name in pair.theirs], pair.ours) for pair in pairs(family, keys)]
    tensors = {bare(name): tensor.float() for name, tensor in tensors_in(folder).items()}
    state, unknown = rename(tensors, known)
    _check_names(state, unknown, known, masked=head_of(config) == MASKED)
    if TYPES in state:
        _add_types(state, folder)
    bert.load_state_dict(own | state)
    return bert


def _check_names(state: dict[str, Tensor], unknown: list[str], known: list[Pair], masked: bool) -> None:
    """Raise ValueError for tensors that are missing or `unknown`; without a vocabulary head, only for the encoder's."""
    needed = known if masked else [pair for pair in known if not pair.ours[0].startswith(VOCABULARY)]
    if not masked:
        parts = {pair.theirs[0].split(".")[0] for pair in needed}
        unknown = [name for name in unknown if name.split(".")[0] in parts]
    missing = [pair.theirs[0] for pair in needed if pair.ours[0] not in state]
    problems = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
    if problems:
        raise ValueError(", ".join(problems))


def _add_types(state: dict[str, Tensor], folder: Path) -> None:
    """Add the embedding of type 0, which all tokens have in cram, to that of the positions."""
    first, *others = state.pop(TYPES)
    state[POSITIONS] = state[POSITIONS] + first
    if any(other.any() for other in others):
        warnings.warn(
            f"{folder} was trained with token types. cram gives all tokens type 0. So it reads single texts as "
            "transformers does, but not pairs, whose second text may have had type 1 in training.",
            stacklevel=4,
        )


def _family(config: dict, bert: Bert) -> str:
    """The model in a folder with this config. Raises ValueError if cram does not have such a model."""
    name = config["model_type"]
    if name == OWN.lower():
        return OWN
    family, why_not = transformers_model(bert.architecture)
    if family is None or family.lower() != name:
        raise ValueError(f"model_type {name!r} does not have this layout; {why_not or family}")
    for field, value in config_of(family, bert).items():
        if field in FIXED and config.get(field, value) != value:
            raise ValueError(f"{field} is {config[field]!r}; expected {value!r}")
    return family


def bare(name: str) -> str:
    """The name of a tensor without the encoder's prefix, which a model without a head does not have."""
    return name.removeprefix(ENCODER).removeprefix("model.")


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder: of one file, or of those that an index lists, as transformers saves large models."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = set(index["weight_map"].values())
    for file in files:
        if Path(file).name != file:
            raise ValueError(f"{INDEX} lists {file!r}, which is not in the folder")
    tensors: dict[str, Tensor] = {}
    for file in sorted(files):
        tensors |= load_file(folder / file)
    return tensors


def config_of(family: str, bert: Bert) -> dict:
    """The fields of config.json from which transformers builds its model."""
    architecture = bert.architecture
    about = {
        "model_type": family.lower(),
        "dtype": "float32",
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.length,
        "initializer_range": INIT_STD,
        **TOKENS,
        **fields_of(architecture, family.lower()),
    }
    if family == "Bert":
        return about | BERT
    if family == "ModernBert":
        return about | modern_fields(architecture)
    return about


def modern_fields(architecture: Architecture) -> dict:
    """Fields of config.json that only ModernBERT has."""
    rope = {"rope_type": "default", "rope_theta": ROTARY_BASE}
    return {
        "intermediate_size": inner(architecture),
        "attention_dropout": 0.0,
        "hidden_activation": "gelu",
        "layer_types": ["full_attention"] * architecture.layers,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        "classifier_dropout": 0.0,
        "classifier_bias": architecture.bias,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
        "sparse_prediction": False,
        # The same under the names of 2024, which other engines (text-embeddings-inference, vLLM) require. The former
        # reads norms and heads without bias, whatever these settings are.
        "global_rope_theta": ROTARY_BASE,
        "local_rope_theta": ROTARY_BASE,
        "global_attn_every_n_layers": 1,
        "local_attention": 128,
        "layer_norm_eps": architecture.norm_eps,
        "initializer_cutoff_factor": 2.0,
    }


def pairs(family: str, keys: Collection[str]) -> Iterator[Pair]:
    """The names of tensors in transformers' model and in cram's, for those of these `keys` that both have."""
    if family == OWN:
        for key in keys:
            is_head = key.startswith((HEAD, VOCABULARY))
            yield Pair([key if is_head else ENCODER + key], [key])
    blocks = {key.split(".")[1] for key in keys if key.startswith("blocks.")}
    for theirs, ours in NAMES.get(family, {}).items():
        for block in blocks if "#" in ours else ("",):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                pair = Pair(
                    theirs.replace("#", block).replace("*", kind).split(),
                    ours.replace("#", block).replace("*", kind).split(),
                )
                if pair.ours[0] in keys:
                    yield pair


def rename(
    tensors: dict[str, Tensor], names: Iterable[tuple[list[str], list[str]]]
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under their new names, and the names of those that have no new one. `names`: old and new."""
    result: dict[str, Tensor] = {}
    left = dict(tensors)
    for old, new in names:
        if old[0] not in left:
            continue
        parts = [left.pop(name) for name in old]
        if len(old) != len(new):
            parts = list(torch.cat(parts).chunk(len(new)))
        for name, part in zip(new, parts, strict=True):
            result[name] = part.contiguous()
    return result, list(left)
