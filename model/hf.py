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
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.modeling_outputs import (
    BaseModelOutput,
    MaskedLMOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import ModelOutput, can_return_tuple

from model.bert import OUTPUTS, PAD, SEP, Bert, Convolution, Embedding, Head, Rotation, sinusoids
from model.classifier import ClassifierHead, pooled, width_factor
from model.export import PROBLEMS, Saved, SavedClassifier, described
from model.settings import Architecture, Kind

KINDS: dict[str, Kind] = {problem: kind for kind, problem in PROBLEMS.items()}  # by the `problem_type` of a config
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


def kind_of(config: PreTrainedConfig) -> Kind:
    """What a classifier tells, by the config of any model that cram wrote or `Trainer` made of one."""
    if config.cram.get("kind") == "tokens":
        return "tokens"
    return KINDS.get(config.problem_type) or ("regression" if config.num_labels == 1 else "classes")


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
        self.add_head(config)
        self.post_init()

    def add_head(self, config: CramConfig) -> None:
        """Add what a model has beside the encoder."""

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

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> BaseModelOutput:
        """(B, S) token ids to last_hidden_state (B, S, D). `token_type_ids` are ignored."""
        return BaseModelOutput(last_hidden_state=self.bert.encode(self.padded(input_ids, attention_mask), padded=True))


class CramScorer(CramPreTrainedModel):
    """Base of the models below: scores, and a loss if there are labels."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> ModelOutput:
        """(B, S) token ids to logits, see `scores`; with labels the mean loss in nats. `token_type_ids` are ignored.

        Labels are (B, S) for scores of tokens, -100 to ignore one, or (B,) or (B, classes), by `problem_type`.
        """
        logits = self.scores(self.padded(input_ids, attention_mask))
        return self.output(loss=None if labels is None else self.loss(logits, labels), logits=logits)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens that have labels."""
        return self.loss_function(logits, labels, self.config)


class CramForMaskedLM(CramScorer):
    """The pretrained model: scores of the vocabulary for every token."""

    output = MaskedLMOutput

    def scores(self, tokens: Tensor) -> Tensor:
        """(B, S) token ids, with [PAD], to (B, S, V)."""
        return self.bert.logits(self.bert.encode(tokens, padded=True))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the tokens that have labels."""
        return self.loss_function(logits, labels, self.config.vocab_size)


class CramClassifier(CramScorer):
    """Base of finetuned models: the encoder with the paper's head (dense to 1024, tanh)."""

    described_by = SavedClassifier
    of_tokens = False

    def add_head(self, config: CramConfig) -> None:
        """Add the head. Raises ValueError for a config of the other kind of classifiers."""
        before = config.cram.get("kind")  # None: of a pretrained model
        if before and (before == "tokens") != self.of_tokens:
            raise ValueError(f"cram.kind is {before!r}, of which {type(self).__name__} can't use the head")
        now = {"kind": "tokens" if self.of_tokens else kind_of(config), "classes": config.num_labels, "head": "tanh"}
        saved = SavedClassifier(**config.cram | now)
        config.cram, self.pooling = saved.model_dump(), (saved.pooling, saved.texts)
        inputs = config.hidden_size * width_factor(*self.pooling)
        self.classifier = ClassifierHead(inputs, config.num_labels, config.dropout, seed=0)


class CramForSequenceClassification(CramClassifier):
    """A finetuned model with the paper's head: scores of classes or labels, or a number for regression."""

    output = SequenceClassifierOutput

    def scores(self, tokens: Tensor) -> Tensor:
        """(B, S) token ids, with [PAD], to (B, classes). Raises ValueError for single texts if it compares two."""
        self.check_pairs(tokens)
        return self.classifier(pooled(self.bert, tokens, True, *self.pooling))

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over the texts, by `problem_type`."""
        return self.loss_function(labels, logits, self.config)

    def check_pairs(self, tokens: Tensor) -> None:
        """Raise ValueError for inputs without a second text, which a model that compares two would take for zeros."""
        if width_factor(*self.pooling) == 1 or torch.compiler.is_compiling():
            return
        if count := int(((tokens == SEP).sum(dim=1) < 2).sum()):
            raise ValueError(
                f"{count} of {len(tokens)} inputs have fewer than two [SEP], but this model compares two texts. "
                "Give the tokenizer both: tokenizer(first, second)."
            )


class CramForTokenClassification(CramClassifier):
    """A finetuned model with the paper's head on the state of each token: scores of classes."""

    output, of_tokens = TokenClassifierOutput, True

    def scores(self, tokens: Tensor) -> Tensor:
        """(B, S) token ids, with [PAD], to (B, S, classes)."""
        return self.classifier(self.bert.encode(tokens, padded=True))


AutoConfig.register("cram", CramConfig)
AutoModel.register(CramConfig, CramModel)
AutoModelForMaskedLM.register(CramConfig, CramForMaskedLM)
AutoModelForSequenceClassification.register(CramConfig, CramForSequenceClassification)
AutoModelForTokenClassification.register(CramConfig, CramForTokenClassification)
