"""cram's models as those of transformers: settings in config.json, and names of tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.bert import INIT_STD, PAD, SEP, Bert
from model.positions import ROTARY_BASE
from model.settings import Architecture

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
        "bert.embeddings.token_type_embeddings.weight": "embedding.type.weight",  # see `only_in_bert`
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
CLASSIFIER_NAMES = {  # of the head that a classifier has in place of the vocabulary head
    "ModernBert": {"classifier.*": "classifier.out.*"},
    "EuroBert": {"dense.*": "classifier.dense.*", "classifier.*": "classifier.out.*"},
    "Bert": {"bert.pooler.dense.*": "classifier.dense.*", "classifier.*": "classifier.out.*"},
}
TRANSFORM = ("head.dense.*", "head.norm.*")  # before the vocabulary head; ModernBERT's classifier has it too


def settings(name: str, bert: Bert) -> dict:
    """The settings in config.json from which transformers builds its model of this name."""
    a = bert.architecture
    return {
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
        **OWN_SETTINGS[name](a),
    }


def bert_settings(a: Architecture) -> dict:
    """Those that only BERT has."""
    return {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "type_vocab_size": 2,
        "layer_norm_eps": a.norm_eps,
        "position_embedding_type": "absolute",
    }


def eurobert_settings(a: Architecture) -> dict:
    """Those that only EuroBERT has."""
    return {
        "attention_bias": a.qkv_bias,
        "mlp_bias": a.bias,
        "attention_dropout": 0.0,
        "hidden_act": "gelu",
        "num_key_value_heads": a.heads,
        "head_dim": a.hidden // a.heads,
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "classifier_pooling": "bos",
    }


def modernbert_settings(a: Architecture) -> dict:
    """Those that only ModernBERT has."""
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


OWN_SETTINGS = {"Bert": bert_settings, "EuroBert": eurobert_settings, "ModernBert": modernbert_settings}


def pairs(name: str, blocks: int, classifier: bool) -> Iterator[tuple[list[str], list[str]]]:
    """The names of each tensor in transformers' model, and cram's; those of classifiers lack the vocabulary head."""
    names = NAMES[name]
    if classifier:
        kept = TRANSFORM if name == "ModernBert" else ()
        encoder = {theirs: ours for theirs, ours in names.items() if ours in kept or not ours.startswith("head.")}
        names = encoder | CLASSIFIER_NAMES[name]
    for theirs, ours in names.items():
        for index in range(blocks) if "#" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                sides = [side.replace("#", str(index)).replace("*", kind).split() for side in (theirs, ours)]
                yield sides[0], sides[1]


def renamed(tensors: dict[str, Tensor], names: list[tuple[list[str], list[str]]]) -> dict[str, Tensor]:
    """The tensors under their new names; `names`: old and new. Raises KeyError for a tensor that has no new name."""
    result, left = {}, dict(tensors)
    for old, new in names:
        if old[0] in left:
            parts = torch.cat([left.pop(name) for name in old]).chunk(len(new))
            result |= {name: part.clone() for name, part in zip(new, parts, strict=True)}
    if left:
        raise KeyError(f"no place for {', '.join(left)}")
    return result


def only_in_bert(bert: Bert, scale: Tensor | float) -> dict[str, Tensor]:
    """Tensors that only transformers' BERT has: token types, which are zero, and a table of sinusoidal positions."""
    fixed = {"embedding.type.weight": torch.zeros(2, bert.architecture.hidden)}
    if bert.architecture.positions != "learned":
        fixed["embedding.position.weight"] = (scale * bert.embedding.codes).float().cpu()
    return fixed


def to_transformers(state: dict[str, Tensor], name: str, bert: Bert, classifier: bool) -> dict[str, Tensor]:
    """The tensors of a model under transformers' names."""
    if name == "Bert":
        scale = bert.embedding.scale.detach() if "embedding.scale" in state else 1.0
        state = {key: value for key, value in state.items() if key != "embedding.scale"} | only_in_bert(bert, scale)
    names = [(ours, theirs) for theirs, ours in pairs(name, len(bert.blocks), classifier)]
    if classifier:  # without the vocabulary head
        stored = {key for ours, _ in names for key in ours}
        state = {key: value for key, value in state.items() if key in stored}
    return renamed(state, names)


def from_transformers(state: dict[str, Tensor], name: str, bert: Bert, classifier: bool) -> dict[str, Tensor]:
    """The tensors under cram's names; a classifier gets the vocabulary head of `bert`, as transformers stores none.

    Raises KeyError for tensors that are missing or unknown, and ValueError for those that cram has no parameter for, if
    they were changed.
    """
    names = list(pairs(name, len(bert.blocks), classifier))
    state = renamed(state, names)
    if name == "Bert":
        if bert.architecture.positions == "scaled-sinusoidal":
            state["embedding.scale"] = state["embedding.position.weight"][0, 1]  # times the cosine of 0
        for key, expected in only_in_bert(bert, state.get("embedding.scale", 1.0)).items():
            tensor = state.pop(key)
            if not torch.allclose(tensor.float(), expected, rtol=2 * torch.finfo(tensor.dtype).eps, atol=1e-6):
                raise ValueError(f"{key} was changed since, and cram can't express that")
    if classifier:
        stored = {key for _, ours in names for key in ours}
        own = bert.state_dict()
        state |= {key: own[key] for key in own if key.startswith("head.") and key not in stored}
    return state
