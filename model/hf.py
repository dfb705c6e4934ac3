"""cram's models in transformers: after `import model.hf`, its Auto classes, pipelines, Trainer and PEFT accept them.

A layout that transformers implements is saved as that model and needs nothing from this file. The others have the
model_type "cram". Their classes need only this file and layers.py, so both can be published with a model.
Shapes: B sequences, S tokens each, D hidden, E embedding, N heads, H = D / N, V vocabulary entries, L labels.
"""

# mypy: disable-error-code="assignment, misc, override, operator, return-value, arg-type, union-attr, attr-defined"
# transformers has no types for much of this.

from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization, modeling_outputs
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.modernbert.modeling_modernbert import eager_attention_forward
from transformers.utils import ModelOutput, can_return_tuple, logging
from transformers.utils.output_capturing import capture_outputs

from . import layers
from .layers import Attention, Block, Embedding, Head, Maybe

logger = logging.get_logger(__name__)
Scores = (
    modeling_outputs.MaskedLMOutput | modeling_outputs.SequenceClassifierOutput | modeling_outputs.TokenClassifierOutput
)
HEAD_WIDTH = 1024  # of the first layer of a classifier's head, as in the paper


@strict
class CramConfig(transformers.PreTrainedConfig):
    """The sizes and layout of a model; the defaults are those of the paper's final model.

    `model.settings.Architecture` describes the layout's fields. `classifier_pooling`: what a head for sequences reads,
    see `model.settings.Finetuning`. `dropout`: in training, after the embedding and the branches, on attention weights
    and in classifiers. `cram`: fields that only cram reads. Raises ValueError for fields that don't fit together.
    """

    model_type = "cram"
    attribute_map = {  # noqa: RUF012, as transformers has it
        "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
        "intermediate": "intermediate_size", "embedding": "embedding_size", "tied": "tie_word_embeddings",
    }  # fmt: skip

    vocab_size: int = 32_768
    max_position_embeddings: int = 128
    hidden_size: int = 768
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    intermediate_size: int = 2304
    activation: Literal["geglu", "gelu", "relu2"] = "geglu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_order: Literal["pre", "post"] = "pre"
    norm_bias: bool = True
    norm_eps: float = 1e-12
    embedding_norm: bool = True
    first_norm: bool = True
    final_norm: bool = True
    bias: bool = False
    qkv_bias: bool = False
    positions: Literal["learned", "sinusoidal", "scaled-sinusoidal", "rotary"] = "scaled-sinusoidal"
    embedding_size: int | None = None
    different_layers: int | None = None
    ffn_every: int = 1
    funnel: int = 0
    head_transform: bool = False
    decoder_bias: bool = False
    tie_word_embeddings: bool = True
    zero_outputs: bool = False
    convolution: int = 0
    second_text: bool = False  # whether the tokens of a second text have an embedding of their own
    classifier_pooling: Literal["cls", "mean", "compare"] = "cls"
    dropout: float | int = 0.0
    initializer_range: float = layers.INIT_STD
    pad_token_id: int | None = layers.PAD
    sep_token_id: int | None = layers.SEP
    cram: dict | None = None

    def validate_architecture(self) -> None:
        """Part of `@strict`-powered validation: refuse fields that the model would ignore or couldn't follow."""
        super().validate_architecture()
        is_wrong = {
            "num_attention_heads": self.hidden % self.heads,
            "positions": self.positions == "rotary" and self.hidden // self.heads % 2,
            "norm_bias": self.norm == "rmsnorm" and self.norm_bias,
            "first_norm": self.norm_order == "post" and not self.first_norm,
            "convolution": self.convolution and self.convolution % 2 == 0,
            "funnel": 2 * self.funnel + 1 > self.layers or self.max_position_embeddings % 2**self.funnel,
        }
        wrong = [f"{name} {getattr(self, name)}" for name in is_wrong if is_wrong[name]]
        if wrong:
            raise ValueError(f"{', '.join(wrong)} does not fit the other fields; see model.settings.Architecture")


class CramAttention(Attention):
    """Bidirectional self-attention."""

    is_causal = False

    def forward(self, x: Tensor, mask: Maybe, position_ids: Maybe, **kwargs: Any) -> tuple[Tensor, Maybe]:
        """(B, S, D) to (B, S, D), and the weights (B, N, S, S) if the implementation returns any."""
        shape_BS1NH = (*x.shape[:2], 1, self.heads, -1)
        query = self.rotate(self.query(x).view(shape_BS1NH), position_ids)
        key = self.rotate(self.key(x).view(shape_BS1NH), position_ids)
        value = self.value(x).view(shape_BS1NH)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.sizes._attn_implementation, eager_attention_forward)
        states, weights = attend(
            self,
            query.squeeze(2).transpose(1, 2),  # (B, N, S, H)
            key.squeeze(2).transpose(1, 2),
            value.squeeze(2).transpose(1, 2),
            mask,
            scaling=query.shape[-1] ** -0.5,
            dropout=self.sizes.dropout if self.training else 0.0,
            **kwargs,
        )
        return self.out(states.flatten(2)), weights


class CramBlock(GradientCheckpointingLayer, Block):
    """Attention and feed-forward layer."""

    def __init__(self, config: CramConfig, index: int) -> None:
        attention = CramAttention(config, config.max_position_embeddings)
        super().__init__(config, index, attention, nn.Dropout(config.dropout))

    def forward(self, x: Tensor, mask: Maybe, seen: Maybe, position_ids: Maybe, **kwargs: Any) -> Tensor:
        """(B, S, D) to (B, S, D). `seen` (B, S): True for tokens that others see; None: all."""
        x = self.mix(x, seen)
        attended, _ = self.attention(self.norm_input(x), mask, position_ids, **kwargs)
        return self.combine(x, attended)


class CramPreTrainedModel(transformers.PreTrainedModel):
    """Base of all models."""

    config_class = CramConfig
    base_model_prefix = "bert"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Embedding", "CramBlock"]  # noqa: RUF012, as transformers has them
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": CramBlock, "attentions": CramAttention}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = [r"^(bert\.)?head\."]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set the initial values of new models and heads, and the tables of positions, which are not stored."""
        super()._init_weights(module)
        for name, value in layers.initial_tensors(module, self.config.zero_outputs).items():
            initialization.copy_(getattr(module, name), value)

    def seen(self, input_ids: Maybe, attention_mask: Maybe) -> Maybe:
        """(B, S): True for the tokens that others see; without a mask, those that are not [PAD]; None: all."""
        if attention_mask is not None:
            if attention_mask.dim() != 2:
                raise ValueError(f"attention_mask has the shape {tuple(attention_mask.shape)}; expected (B, S)")
            return attention_mask.bool()
        if input_ids is None:
            return None
        pad = -1 if self.config.pad_token_id is None else self.config.pad_token_id
        return input_ids != pad


class CramModel(CramPreTrainedModel):
    """The encoder: states of tokens, and a state of each sequence."""

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        pad = layers.PAD if config.pad_token_id is None else config.pad_token_id
        self.embedding = Embedding(config, config.vocab_size, config.max_position_embeddings, pad)
        if config.second_text:
            self.embedding.second = torch.zeros(self.embedding.word.embedding_dim)
        different = config.different_layers or config.layers
        self.blocks = nn.ModuleList(CramBlock(config, index) for index in range(different))
        self.norm = layers.norm(config, config.hidden) if config.final_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding (V, E)."""
        return self.embedding.word

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the word embedding."""
        self.embedding.word = value

    @capture_outputs
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, token_type_ids: Maybe = None,
        position_ids: Maybe = None, inputs_embeds: Maybe = None, **kwargs: Any,
    ) -> modeling_outputs.BaseModelOutputWithPooling:  # fmt: skip
        """(B, S) token ids, or embeddings of words (B, S, E), to last_hidden_state (B, S, D) and pooler_output (B, D).

        attention_mask  (B, S): 0 for padding; without it, [PAD] is padding. A row of only padding has states of zero
        token_type_ids  (B, S): 1 for tokens of a second text; most models ignore them, with a warning unless all are 0
        position_ids    (B, S), less than max_position_embeddings; by default in order
        The pooler_output is the state of the first token; with classifier_pooling "mean" it is the mean of the states,
        and with "compare" None. Where a funnel shortens the sequence, hidden_states are shorter too. Raises ValueError
        for too many tokens.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass either input_ids or inputs_embeds")
        S = (inputs_embeds if input_ids is None else input_ids).shape[1]
        longest = self.config.max_position_embeddings
        if longest < S:
            raise ValueError(f"The inputs have {S} tokens; the model takes {longest}")
        second = None
        if token_type_ids is not None and self.config.second_text:
            second = token_type_ids > 0
        elif token_type_ids is not None and not torch.compiler.is_compiling() and token_type_ids.any():
            logger.warning_once("token_type_ids are ignored: the model has no token types.")
        seen = self.seen(input_ids, attention_mask)
        x = self.dropout(self.embedding(input_ids, inputs_embeds, position_ids, second))
        x = self.norm(self.encode(x, seen, position_ids, **kwargs))[:, :S]
        if seen is not None:  # rows without a token become zeros, without a gradient, which could overflow there
            x = x.masked_fill(~seen.any(dim=1)[:, None, None], 0.0)
        pooling = self.config.classifier_pooling
        pooled = None  # the classifier compares the two texts itself
        if pooling != "compare":
            pooled = layers.pool(x, seen, pooling)
        return modeling_outputs.BaseModelOutputWithPooling(x, pooled)

    def encode(self, x: Tensor, seen: Maybe, position_ids: Maybe, **kwargs: Any) -> Tensor:
        """Embedded tokens (B, S, D) to states, of which there may be more: as many as the funnel can halve."""
        x, seen, position_ids = self.lengthen(x, seen, position_ids)
        mask = self.mask(x, seen)
        longer: list[tuple] = []  # what each halving shortened
        for index, times in enumerate(layers.halvings(self.config)):
            if times > len(longer):
                longer.append((x, seen, mask, position_ids))
                x, seen = layers.halve(x, seen)
                mask = self.mask(x, seen)
                if position_ids is not None:
                    position_ids = position_ids[:, ::2] // 2
            elif times < len(longer):
                before, seen, mask, position_ids = longer.pop()
                x = before + x.repeat_interleave(2, dim=1)
            block = self.blocks[index % len(self.blocks)]
            x = block(x, mask, seen, position_ids, **kwargs)
        return x

    def lengthen(self, x: Tensor, seen: Maybe, position_ids: Maybe) -> tuple[Tensor, Maybe, Maybe]:
        """The same with padding behind it, up to a length that the funnel can halve."""
        missing = -x.shape[1] % 2**self.config.funnel
        if missing == 0:
            return x, seen, position_ids
        if seen is None:
            seen = x.new_ones(x.shape[:2], dtype=torch.bool)
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, missing))
        return F.pad(x, (0, 0, 0, missing)), F.pad(seen, (0, missing)), position_ids

    def mask(self, x: Tensor, seen: Maybe) -> Maybe:
        """The mask for attention; a row of only padding sees all of it, since a softmax needs something to see."""
        if seen is not None:
            seen = seen | ~seen.any(dim=1, keepdim=True)
        return create_bidirectional_mask(config=self.config, inputs_embeds=x, attention_mask=seen)


class CramScorer(CramPreTrainedModel):
    """Base of the models below: scores, and a loss if there are labels."""

    head_scores: int | None = None  # number of scores of a state; None: as many as labels

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = CramModel(config)
        self.add_head(config)
        self.post_init()

    def add_head(self, config: CramConfig, parts: int = 1) -> None:
        """Add the paper's head on `parts` states beside each other."""
        inputs = parts * config.hidden
        scores = self.head_scores or config.num_labels
        self.classifier = layers.ClassifierHead(inputs, scores, nn.Dropout(config.dropout), HEAD_WIDTH)

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, token_type_ids: Maybe = None,
        position_ids: Maybe = None, inputs_embeds: Maybe = None, labels: Maybe = None, **kwargs: Any,
    ) -> Scores:  # fmt: skip
        """(B, S) token ids, or the inputs of `CramModel.forward`, to the logits of `scores`.

        With labels, also the mean loss in nats. Labels are (B, S) for scores of tokens, -100 to ignore one, or (B,) or
        (B, L), by `problem_type`.
        """
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.bert(*given, **kwargs, return_dict=True)
        logits = self.scores(outputs, input_ids, attention_mask)
        loss = None
        if labels is not None:
            sizes = {"config": self.config, "vocab_size": self.config.vocab_size}
            loss = self.loss_function(logits=logits, pooled_logits=logits, labels=labels, **sizes, **kwargs)
        return self.output(loss, logits, outputs.hidden_states, outputs.attentions)

    def scores(self, outputs: ModelOutput, input_ids: Maybe, attention_mask: Maybe) -> Tensor:
        """(B, S, L)."""
        return self.classifier(outputs.last_hidden_state)


class CramForMaskedLM(CramScorer):
    """The pretrained model: scores of the vocabulary for every token."""

    output = modeling_outputs.MaskedLMOutput
    _tied_weights_keys = {"head.decoder.weight": "bert.embedding.word.weight"}  # noqa: RUF012
    _keys_to_ignore_on_load_unexpected = None

    def add_head(self, config: CramConfig) -> None:
        """Add the vocabulary head, whose decoder is a separate layer even if it shares the embedding's weights."""
        self.head = Head(config, config.vocab_size)
        self.head.decoder = nn.Linear(config.embedding or config.hidden, config.vocab_size, bias=False)

    def scores(self, outputs: ModelOutput, *_: Maybe) -> Tensor:
        """(B, S, V)."""
        scores = self.head.decoder(self.head(outputs.last_hidden_state))
        return scores if self.head.bias is None else scores + self.head.bias

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder (V, E)."""
        return self.head.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder."""
        self.head.decoder = new_embeddings

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize embedding, decoder and the vocabulary head's bias, of which new entries are zero."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        bias = self.head.bias
        if bias is not None:
            bias.data = F.pad(bias.data, (0, len(embedding.weight) - len(bias)))
        return embedding


class CramForSequenceClassification(CramScorer):
    """A finetuned model with the paper's head: scores of classes or labels, or a number for regression."""

    output = modeling_outputs.SequenceClassifierOutput
    accepts_loss_kwargs = False  # not all of its losses count items, so Trainer has to divide

    def add_head(self, config: CramConfig) -> None:
        """Add the paper's head."""
        super().add_head(config, 4 if config.classifier_pooling == "compare" else 1)

    def scores(self, outputs: ModelOutput, input_ids: Maybe, attention_mask: Maybe) -> Tensor:
        """(B, L). Raises ValueError for single texts if the model compares two."""
        if self.config.classifier_pooling != "compare":
            return self.classifier(outputs.pooler_output)
        if input_ids is None:
            raise ValueError("This model compares two texts, which it finds by [SEP]; pass input_ids")
        seen = self.seen(input_ids, attention_mask)
        ends = input_ids == self.config.sep_token_id
        if not torch.compiler.is_compiling():
            texts_B = (ends & seen).sum(dim=1)
            single = int((texts_B < 2).sum())
            if single:
                raise ValueError(
                    f"{single} of {len(input_ids)} inputs have fewer than two [SEP], but this model compares two "
                    "texts. Pass both to the tokenizer: tokenizer(first, second)."
                )
        return self.classifier(layers.compare_texts(outputs.last_hidden_state, seen, ends))


class CramForMultipleChoice(CramForSequenceClassification):
    """The paper's head with one score for each choice."""

    head_scores = 1

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, token_type_ids: Maybe = None,
        position_ids: Maybe = None, inputs_embeds: Maybe = None, labels: Maybe = None, **kwargs: Any,
    ) -> modeling_outputs.MultipleChoiceModelOutput:  # fmt: skip
        """(B, choices, S) token ids to logits (B, choices); with labels (B,) the mean cross-entropy in nats."""
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        flat = (None if part is None else part.flatten(0, 1) for part in given)
        outputs = super().forward(*flat, **kwargs | {"return_dict": True})
        choices = (inputs_embeds if input_ids is None else input_ids).shape[1]
        logits = outputs.logits.view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return modeling_outputs.MultipleChoiceModelOutput(loss, logits, outputs.hidden_states, outputs.attentions)


class CramForTokenClassification(CramScorer):
    """A finetuned model with the paper's head on the state of each token: scores of classes."""

    output = modeling_outputs.TokenClassifierOutput


class CramForQuestionAnswering(CramForTokenClassification):
    """The paper's head on the state of each token: scores of its being the first and the last of an answer."""

    accepts_loss_kwargs = False
    head_scores = 2

    @can_return_tuple
    def forward(
        self, input_ids: Maybe = None, attention_mask: Maybe = None, token_type_ids: Maybe = None,
        position_ids: Maybe = None, inputs_embeds: Maybe = None, start_positions: Maybe = None,
        end_positions: Maybe = None, **kwargs: Any,
    ) -> modeling_outputs.QuestionAnsweringModelOutput:  # fmt: skip
        """(B, S) token ids to start_logits and end_logits (B, S); with positions (B,) their mean loss in nats."""
        given = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = super().forward(*given, **kwargs | {"return_dict": True})
        start, end = outputs.logits.unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start, end, start_positions, end_positions, **kwargs)
        return modeling_outputs.QuestionAnsweringModelOutput(
            loss, start, end, outputs.hidden_states, outputs.attentions
        )


transformers.AutoConfig.register("cram", CramConfig, exist_ok=True)
transformers.AutoModel.register(CramConfig, CramModel, exist_ok=True)
transformers.AutoModelForMaskedLM.register(CramConfig, CramForMaskedLM, exist_ok=True)
transformers.AutoModelForMultipleChoice.register(CramConfig, CramForMultipleChoice, exist_ok=True)
transformers.AutoModelForQuestionAnswering.register(CramConfig, CramForQuestionAnswering, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(CramConfig, CramForSequenceClassification, exist_ok=True)
transformers.AutoModelForTokenClassification.register(CramConfig, CramForTokenClassification, exist_ok=True)
