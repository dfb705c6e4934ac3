"""Models on disk: folders that cram and transformers load.

A model of BERT's or ModernBERT's layout is written under transformers' names, so that
`AutoModelForMaskedLM.from_pretrained(folder)` gives the same scores without remote code. Any other is written under
the names of cram's classes for transformers, hf.py. The same holds for classifiers, if transformers has their head.
`load` reads what either wrote. model.safetensors is fp32 and stores a tied vocabulary head once.
"""

import json
import textwrap
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.bert import Bert
from model.errors import InputError
from model.files import PICKLED
from model.finetuning import Classifier, width_factor
from model.layers import INIT_STD, ROTARY_BASE, inner
from model.layouts import HEADS, MASKED, fields_of, head_for, head_of, read_config, transformers_model
from model.settings import SPECIALS, Architecture, Kind, Specials

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
ENCODER = "bert."  # the prefixes of a model's parts
HEAD = "classifier."
VOCABULARY = "head."
OWN = "Cram"  # the family of classes in hf.py
POSITIONS = "embedding.position.weight"  # learned ones
SECOND = "embedding.second"  # what a model that was pretrained on pairs adds to the tokens of the second text
TYPES = "embedding.type.weight"  # transformers' BERT: an embedding for each text. Here the first one's is zero
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
# what a public BERT may have besides: the head for pairs of sentences, copies of tied weights, numbers of positions
UNUSED = ("pooler.", "cls.seq_relationship.", "cls.predictions.decoder.", "embeddings.position_ids")
# fields of config.json that have one allowed value, as no axis of Architecture sets them
FIXED = {"hidden_act", "hidden_activation", "position_embedding_type", "layer_types", "rope_parameters"}
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
        first = torch.zeros(bert.architecture.hidden)
        second = state.pop(SECOND, first)
        state[TYPES] = torch.stack([first, second])
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


def load(folder: str | Path, heads: Collection[str] | None = None, specials: Specials | None = None) -> Bert:
    """Load the encoder and the vocabulary head of a model that cram or transformers saved, in fp32.

    Other heads are left out; a vocabulary head that is missing is new. `heads`: refuse a model with another one than
    these, as transformers names them; empty: none.
    `specials`: the ids of the special tokens, for a config.json that doesn't have all of them.
    Raises InputError if the folder has no model of one of cram's layouts, or only a part of one.
    """
    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        head = head_of(config)
        if heads is not None and head not in heads:
            raise ValueError(f"its head is {head or 'none'}; expected {', '.join(name or 'none' for name in heads)}")
        return _load(config, folder, specials or specials_of(config))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, SafetensorError) as error:
        reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        reason = textwrap.shorten(reason, 500, placeholder=" …").rstrip(".")
        raise InputError(
            f"{folder} does not have a model that cram can load: {reason}. Expected {CONFIG} and {WEIGHTS} (or "
            f"{PICKLED}) as cram, save_pretrained or Trainer.save_model write them, with adapters merged."
        ) from error


def specials_of(config: dict) -> Specials:
    """The ids of special tokens in a config.json; those of cram's vocabularies where it doesn't have them."""
    ids: dict[str, int] = SPECIALS._asdict()
    for name in ids:
        ids[name] = config.get(f"{name}_token_id", ids[name])
    return Specials(**ids)


def _load(config: dict, folder: Path, specials: Specials) -> Bert:
    architecture, vocabulary, length = read_config(config)
    bert = Bert(architecture, vocabulary, length, specials=specials)
    if config.get("second_text"):
        bert.embedding.second = torch.zeros(bert.embedding.word.embedding_dim)
    own = bert.state_dict()
    family = _family(config, bert)
    keys = [*own, TYPES] if family == "Bert" else list(own)
    known = [Pair([bare(name) for name in pair.theirs], pair.ours) for pair in pairs(family, keys)]
    tensors = {bare(name): tensor.float() for name, tensor in tensors_in(folder).items()}
    if family == "Bert":
        tensors = as_today(tensors)
    state, unknown = rename(tensors, known)
    has_head = head_of(config) in HEADS
    _check_names(state, unknown, known, has_head)
    if TYPES in state:
        _add_types(bert, state)
    bert.load_state_dict(bert.state_dict() | state)
    bert.has_new_head = not any(name.startswith(VOCABULARY) for name in state)
    return bert


def as_today(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a BERT under the names that transformers gives them today, without what cram has no use for."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith(UNUSED):
            found[name.replace(".gamma", ".weight").replace(".beta", ".bias")] = tensor
    return found


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


def _add_types(bert: Bert, state: dict[str, Tensor]) -> None:
    """Add the embedding of type 0 to that of the positions; what type 1 has beyond it becomes SECOND, if anything."""
    first, *others = state.pop(TYPES)
    state[POSITIONS] = state[POSITIONS] + first
    if others and not torch.equal(others[0], first):
        bert.embedding.second = torch.zeros_like(first)
        state[SECOND] = others[0] - first


def _family(config: dict, bert: Bert) -> str:
    """The model in a folder with this config. Raises ValueError if cram does not have such a model."""
    name = config["model_type"]
    if name == OWN.lower():
        return OWN
    family, why_not = transformers_model(bert.architecture)
    if family is None or family.lower() != name:
        raise ValueError(f"model_type {name!r} does not have this layout; {why_not or family}")
    if config.get("is_decoder"):
        raise ValueError("is_decoder is true; expected an encoder, whose tokens see both sides")
    for field, value in config_of(family, bert).items():
        if field in FIXED and config.get(field, value) != value:
            raise ValueError(f"{field} is {config[field]!r}; expected {value!r}")
    return family


def bare(name: str) -> str:
    """The name of a tensor without the encoder's prefix, which a model without a head does not have."""
    return name.removeprefix(ENCODER).removeprefix("model.")


def unpickle(path: Path) -> dict[str, Tensor]:
    """The tensors in a file of torch. Runs no code of the file; raises ValueError if it isn't one of tensors."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zipfile, struct or torch, by what is wrong with the file
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path.name} can't be read: {type(error).__name__}: {reason}") from error


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder: of one file, or of those that an index lists, as transformers saves large models."""
    files = {WEIGHTS}
    if not (folder / WEIGHTS).exists() and (folder / PICKLED).exists():
        return unpickle(folder / PICKLED)
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


def token_ids(specials: Specials) -> dict[str, int]:
    """The fields of config.json with the ids of special tokens. A sequence begins with [CLS] and ends with [SEP]."""
    fields = {
        "pad_token_id": specials.pad,
        "bos_token_id": specials.cls,
        "cls_token_id": specials.cls,
        "eos_token_id": specials.sep,
        "sep_token_id": specials.sep,
        "mask_token_id": specials.mask,
    }
    if specials != SPECIALS:
        fields["unk_token_id"] = specials.unk
    return fields


def config_of(family: str, bert: Bert) -> dict:
    """The fields of config.json from which transformers builds its model."""
    architecture = bert.architecture
    about = {
        "model_type": family.lower(),
        "dtype": "float32",
        "vocab_size": bert.vocabulary,
        "max_position_embeddings": bert.length,
        "initializer_range": INIT_STD,
        **token_ids(bert.specials),
        **fields_of(architecture, family.lower()),
    }
    if family == "Bert":
        return about | BERT
    if family == "ModernBert":
        return about | modern_fields(architecture)
    return about | {"second_text": bert.embedding.second is not None}


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
