"""cram's models in transformers: after `import model.hf`, its Auto classes, pipelines and Trainer accept every layout.

A layout that transformers implements is saved as that model and needs nothing from this file. The others are saved with
model_type "cram", under cram's own names. No code in a model's folder is executed.
"""

# mypy: disable-error-code="index, union-attr, arg-type, assignment, operator"
# The fields of a config are complete once `__post_init__` has run, which the type checker can't see.

from functools import reduce
from operator import getitem

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput, SequenceClassifierOutput
from transformers.utils import can_return_tuple

from model.bert import OUTPUTS, PAD, SEP, Bert, Convolution, Embedding, Head, Rotation, sinusoids
from model.classifier import ClassifierHead, pooled, width_factor
from model.export import Saved, SavedClassifier, described
from model.settings import Architecture

PAPER = {"vocabulary": 32_768, "length": 128}  # of the paper's final model


def read_from(*names: str) -> property:
    """A property of a config that reads a field of its `cram`."""
    return property(lambda config: reduce(getitem, names, config.cram))


@strict
class CramConfig(PreTrainedConfig):
    """config.json of a model under cram's own names; the default is that of the paper's final model.

    `cram`: the fields of `export.Saved` or `export.SavedClassifier`. `dropout`: in training, after the embedding and
    the branches, on attention weights, and in a classifier's head. Raises ValueError, which names the field, if `cram`
    has unknown, missing or inconsistent fields.
    """

    model_type = "cram"
    cram: dict | None = None
    dropout: float | int = 0.0
    pad_token_id: int | None = PAD

    def __post_init__(self, **kwargs) -> None:
        saved = Saved(architecture=Architecture(), **PAPER) if self.cram is None else described(self.cram)
        self.cram = saved.model_dump()
        if isinstance(saved, SavedClassifier):
            kwargs.setdefault("num_labels", saved.classes)
            if self.id2label is not None and len(self.id2label) != saved.classes:
                raise ValueError(f"id2label has {len(self.id2label)} names, but cram.classes is {saved.classes}")
            if saved.head != "tanh":
                raise ValueError(f"cram.head is {saved.head!r}; model_type 'cram' only has the head 'tanh'")
        super().__post_init__(**kwargs)

    @property
    def architecture(self) -> Architecture:
        """The encoder's sizes and layout."""
        return Architecture(**self.cram["architecture"])

    vocab_size = read_from("vocabulary")
    max_position_embeddings = read_from("length")
    hidden_size = read_from("architecture", "hidden")
    num_hidden_layers = read_from("architecture", "layers")
    num_attention_heads = read_from("architecture", "heads")


class CramPreTrainedModel(PreTrainedModel):
    """Base of the models below: the encoder with its vocabulary head."""

    config_class = CramConfig
    base_model_prefix = "bert"
    _no_split_modules = ["Block"]  # noqa: RUF012, as transformers has it
    _supports_sdpa = True  # which runs on a GPU
    described_by = Saved

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        config.cram = {name: value for name, value in config.cram.items() if name in self.described_by.model_fields}
        self.bert = Bert(config.architecture, config.vocab_size, config.max_position_embeddings)
        self.bert.set_dropout(config.dropout)

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embedding."""
        return self.bert.embedding.word

    def resize_token_embeddings(self, *_, **__) -> nn.Embedding:
        """Raise NotImplementedError: the vocabulary is fixed."""
        raise NotImplementedError(f"The model has a fixed vocabulary of {self.config.vocab_size:,} entries.")

    def padded(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(B, S) token ids, [PAD] where a mask (B, S) is 0. ValueError if S is more than the model takes."""
        if input_ids.shape[1] > self.bert.length:
            raise ValueError(f"input_ids has {input_ids.shape[1]} tokens; the model takes {self.bert.length}")
        return input_ids if attention_mask is None else input_ids.masked_fill(attention_mask == 0, PAD)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Set the initial values of new models and heads, and the tables of positions, which are not stored."""
        super()._init_weights(module)
        if isinstance(module, Rotation):
            length, *_, size = module.cosines.shape
            for name, table in Rotation(size, length).named_buffers():
                initialization.copy_(getattr(module, name), table)
        elif isinstance(module, Embedding):
            if hasattr(module, "codes"):
                initialization.copy_(module.codes, sinusoids(*module.codes.shape))
            if hasattr(module, "scale"):
                initialization.constant_(module.scale, module.word.embedding_dim**-0.5)
        elif isinstance(module, Head) and module.bias is not None:
            initialization.zeros_(module.bias)
        elif isinstance(module, Convolution) or self._starts_at_zero(module):
            initialization.zeros_(module.weight)

    def _starts_at_zero(self, module: nn.Module) -> bool:
        named = self.bert.named_parameters() if self.bert.architecture.zero_outputs else ()
        own = getattr(module, "weight", None)
        return any(weight is own for name, weight in named if name.endswith(OUTPUTS))


class CramModel(CramPreTrainedModel):
    """The encoder: states of tokens."""

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> BaseModelOutput:
        """(B, S) token ids to last_hidden_state (B, S, D). `token_type_ids` are ignored."""
        return BaseModelOutput(last_hidden_state=self.bert.encode(self.padded(input_ids, attention_mask), padded=True))


class CramForMaskedLM(CramPreTrainedModel):
    """The pretrained model: scores of the vocabulary for every token."""

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> MaskedLMOutput:
        """(B, S) token ids to logits (B, S, V); with labels (B, S), -100 to ignore one, the mean loss in nats.

        `token_type_ids` are ignored.
        """
        logits = self.bert.logits(self.bert.encode(self.padded(input_ids, attention_mask), padded=True))
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return MaskedLMOutput(loss=loss, logits=logits)


class CramForSequenceClassification(CramPreTrainedModel):
    """A finetuned model with the paper's head (dense to 1024, tanh): scores of classes, or a number for regression."""

    described_by = SavedClassifier

    def __init__(self, config: CramConfig) -> None:
        super().__init__(config)
        saved = SavedClassifier(**config.cram | {"classes": config.num_labels, "head": "tanh"})
        config.cram, self.pooling = saved.model_dump(), (saved.pooling, saved.texts)
        inputs = config.hidden_size * width_factor(*self.pooling)
        self.classifier = ClassifierHead(inputs, config.num_labels, config.dropout, seed=0)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """(B, S) token ids to logits (B, classes); with labels (B,) the loss, by `problem_type`.

        `token_type_ids` are ignored. Raises ValueError for single texts if the model compares two.
        """
        self.check_pairs(input_ids)
        logits = self.classifier(pooled(self.bert, self.padded(input_ids, attention_mask), True, *self.pooling))
        loss = None if labels is None else self.loss_function(labels, logits, self.config)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def check_pairs(self, input_ids: Tensor) -> None:
        """Raise ValueError for inputs without a second text, which a model that compares two would take for zeros."""
        if width_factor(*self.pooling) == 1 or torch.compiler.is_compiling():
            return
        if count := int(((input_ids == SEP).sum(dim=1) < 2).sum()):
            raise ValueError(
                f"{count} of {len(input_ids)} inputs have fewer than two [SEP], but this model compares two texts. "
                "Give the tokenizer both: tokenizer(first, second)."
            )


AutoConfig.register("cram", CramConfig)
AutoModel.register(CramConfig, CramModel)
AutoModelForMaskedLM.register(CramConfig, CramForMaskedLM)
AutoModelForSequenceClassification.register(CramConfig, CramForSequenceClassification)
