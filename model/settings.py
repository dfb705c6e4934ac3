"""Settings of architecture, pretraining and finetuning. The defaults are the paper's final recipe. Imports no torch."""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema, model_validator

from model.errors import InputError
from model.wording import BUDGETS, counted, parse_budget


class Specials(NamedTuple):
    """The ids of a vocabulary's special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


SPECIALS = Specials(pad=0, unk=1, cls=2, sep=3, mask=4)  # of the vocabularies that cram trains


class Architecture(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """The encoder's sizes and layout. The defaults are the paper's final model (section 4.2)."""

    layers: int = Field(16, ge=1, le=128, description="Transformer blocks.")
    hidden: int = Field(768, ge=2, le=65_536, description="Width of the residual stream.")
    heads: int = Field(12, ge=1, le=1024, description="Attention heads; must divide hidden.")
    intermediate: int = Field(
        2304, ge=2, le=262_144, description="Inner width of the feed-forward layer; GEGLU has two layers of 2/3 of it."
    )
    activation: Literal["geglu", "gelu", "relu2"] = Field("geglu", description="relu2: the square of ReLU.")
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="All norms.")
    norm_order: Literal["pre", "post"] = Field("pre", description="Before each branch, or after each residual sum.")
    norm_bias: bool = Field(True, description="Norms add a bias; RMSNorm has none.")
    norm_eps: float = Field(1e-12, gt=0, le=1, description="As in BERT; the paper found that it matters little.")
    embedding_norm: bool = Field(True, description="Norm after the embedding.")
    first_norm: bool = Field(True, description="With pre: norm before the first attention; ModernBERT has none.")
    final_norm: bool = Field(True, description="Norm after the last block.")
    bias: bool = Field(False, description="Biases of the dense layers, but not of queries, keys and values.")
    qkv_bias: bool = Field(False, description="Biases of queries, keys and values.")
    positions: Literal["learned", "sinusoidal", "scaled-sinusoidal", "rotary"] = Field(
        "scaled-sinusoidal", description="scaled-sinusoidal: multiplied by one learned number."
    )
    embedding: int | None = Field(
        None, ge=2, le=65_536, description="Width of the word embedding, projected to hidden (ALBERT); null: hidden."
    )
    different_layers: int | None = Field(
        None, ge=1, le=128, description="Blocks with their own weights, repeated in turn (ALBERT: 1); null: all."
    )
    ffn_every: int = Field(1, ge=1, le=128, description="Only every n-th block has a feed-forward layer.")
    funnel: int = Field(0, ge=0, le=8, description="Times that the length is halved in the first half of the blocks.")
    head_transform: bool = Field(False, description="Dense, GELU and norm before the vocabulary head, as BERT.")
    decoder_bias: bool = Field(False, description="Bias of the vocabulary head.")
    tied: bool = Field(True, description="The vocabulary head is the word embedding.")
    zero_outputs: bool = Field(False, description="Each branch's output projection starts at zero.")
    convolution: int = Field(
        0,
        ge=0,
        le=31,
        description="Tokens in a depthwise convolution that is added to the states before each block; an odd number, "
        "with the token itself in the middle. 0: none.",
    )

    @model_validator(mode="after")
    def _axes_fit(self) -> "Architecture":
        misfit = self._misfit_in_blocks() or self._misfit_of_blocks()
        if misfit:
            raise ValueError(misfit)
        return self

    def _misfit_in_blocks(self) -> str | None:
        """What is wrong with the widths, norms and positions, and what to do."""
        width = self.embedding or self.hidden
        if self.hidden % self.heads:
            return f"hidden {self.hidden} is not a multiple of heads {self.heads}; make it a multiple"
        if self.activation == "geglu" and self.intermediate % 3:
            return (
                f"intermediate {self.intermediate} is not a multiple of 3, which geglu needs for as many parameters as "
                "the others; make it a multiple"
            )
        if self.norm == "rmsnorm" and self.norm_bias:
            return "norm 'rmsnorm' has no bias; set norm_bias to false too"
        if self.norm_order == "post" and not self.first_norm:
            return "first_norm false needs norm_order 'pre', since 'post' has no such norm; leave it true"
        if self.positions.endswith("sinusoidal") and width % 2:
            return (
                f"the embedding's width {width} is odd, but sinusoidal positions are pairs of sine and cosine; make it "
                "even"
            )
        of_head = self.hidden // self.heads
        if self.positions == "rotary" and of_head % 2:
            return f"heads are {of_head} wide, but rotary positions turn pairs; make hidden / heads even"
        if self.embedding == self.hidden:
            return f"embedding {self.embedding} is equal to hidden; leave it null"
        return None

    def _misfit_of_blocks(self) -> str | None:
        """What is wrong with how blocks differ and follow each other, and what to do."""
        unique = self.different_layers or self.layers
        if self.different_layers == self.layers:
            return f"different_layers {unique} is equal to layers; leave it null"
        if self.layers % unique:
            return f"different_layers {unique} is not a divisor of layers {self.layers}; make it one"
        if self.ffn_every > unique:
            return (
                f"ffn_every {self.ffn_every} is more than different_layers or layers {unique}, so no block would have "
                "a feed-forward layer; lower it"
            )
        if self.convolution and self.convolution % 2 == 0:
            return (
                f"convolution {self.convolution} is even, so the token itself would not be in the middle; make it odd"
            )
        least = 2 * self.funnel + 1
        if least > self.layers:
            return (
                f"funnel {self.funnel} needs {least} layers or more to halve and restore, not {self.layers}; lower it"
            )
        return None

    def check_length(self, length: int) -> None:
        """Raise InputError unless sequences of this length can be halved as often as the funnel does."""
        halved = 2**self.funnel
        if length % halved:
            raise InputError(
                f"tokenize.length is {length}, which can't be halved {counted(self.funnel, 'time')}. Make it a "
                f"multiple of {halved}, or lower pretrain.architecture.funnel."
            )


OptimizerName = Literal["adamw", "adam", "adafactor", "radam", "sgd", "muon"]
ScheduleName = Literal[
    "triangle", "one-cycle", "cosine", "linear", "trapezoid", "inverse-sqrt", "ramp", "dive", "annealing", "polynomial"
]
ADAMS = {"adamw", "adam", "radam", "muon"}
# Optimizers and schedules that read a field of `Training`; with any other, the field must keep its default.
READ_BY: dict[str, set[str]] = {
    "matrix_learning_rate": {"muon"},
    "decay_norms": {"adamw", "adam", "radam", "adafactor", "sgd"},
    "beta2": ADAMS,
    "adam_eps": ADAMS,
    "warmup": {"cosine", "linear", "trapezoid", "inverse-sqrt", "annealing", "polynomial"},
    "cooldown": {"trapezoid", "inverse-sqrt", "ramp", "dive"},
    "power": {"polynomial"},
}
BUDGET_FORMS = {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "examples": list(BUDGETS)}]}


def _checked_words(words: str) -> str:
    parse_budget(words)
    return words


AskedBudget = Annotated[  # as users write it
    Annotated[float, Field(ge=0)] | Annotated[str, AfterValidator(_checked_words)], WithJsonSchema(BUDGET_FORMS)
]


def with_budget_as_number(given: Any) -> Any:
    """Settings of training with their budget, which may be in words, such as "20 minutes", as a number and its unit.

    Raises ValueError if the words are no budget, or contradict budget_unit.
    """
    words = given.get("budget") if isinstance(given, dict) else None
    if not isinstance(words, str):
        return given
    amount, unit = parse_budget(words)
    if not unit:
        return given | {"budget": amount}
    if given.get("budget_unit", unit) != unit:
        raise ValueError(f"budget is {words!r}, but budget_unit is {given['budget_unit']!r}; omit budget_unit")
    return given | {"budget": amount, "budget_unit": unit}


class Training(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How to pretrain. The defaults are the paper's final recipe (section 4.3 and the released bert-o4)."""

    budget: Annotated[float, WithJsonSchema(BUDGET_FORMS)] = Field(
        24.0,
        ge=0,
        description="Limit of the run, in budget_unit or with its own unit. 0: measure the model of pretrain.start as "
        "it is.",
    )
    budget_unit: Literal["hours", "tokens", "epochs", "flops"] = Field(
        "hours",
        description="hours: without held-out evaluation. epochs: passes over the sequences; the run ends before a step "
        "that would read more. flops: floating-point operations of all passes.",
    )
    batch_size: int = Field(8192, ge=1, description="Sequences per optimizer step, from batch_ramp on.")
    batch_ramp: float = Field(0.6, ge=0, le=1, description="Fraction of the budget over which the batch grows.")
    optimizer: OptimizerName = Field(
        "adamw",
        description="muon: for the matrices of the blocks, with adamw for everything else. adafactor: its rate is at "
        "most 1/√step.",
    )
    learning_rate: float = Field(1e-3, gt=0, le=100, description="Peak rate.")
    matrix_learning_rate: float = Field(
        5e-3, gt=0, le=100, description="Muon's peak, scaled to AdamW's size of update (match_rms_adamw)."
    )
    schedule: ScheduleName = Field("triangle", description="Learning rates over the budget.")
    warmup: float = Field(0.0, ge=0, lt=1, description="Fraction of the budget in which the rate rises from the floor.")
    cooldown: float = Field(0.5, gt=0, le=1, description="Last fraction of the budget, in which the rate falls.")
    power: float = Field(1.0, gt=0, le=16, description="Power of the polynomial.")
    floor: float = Field(0.0, ge=0, lt=1, description="Fraction of the peak below which the rate doesn't fall.")
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=1,
        description="On matrices and convolutions; decoupled except for adam and sgd. Muon: on its matrices only.",
    )
    decay_norms: bool = Field(False, description="Weight decay on norm gains and the position scale too.")
    beta2: float = Field(0.98, ge=0, lt=1, description="Decay of the squared gradient.")
    adam_eps: float = Field(1e-12, ge=1e-30, le=1, description="Adam's epsilon.")
    clip: float | None = Field(0.5, gt=0, description="Largest global gradient norm; null: none.")
    dropout: float = Field(0.0, ge=0, lt=1, description="After embedding and branches, and on attention weights.")
    mask_fraction: float = Field(0.25, gt=0, lt=1, description="Tokens of a sequence that are predicted.")
    last_mask_fraction: float | None = Field(
        None, gt=0, lt=1, description="Value of mask_fraction at the end, reached in five steps; null: constant."
    )
    masked_share: float = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of the predicted tokens that become [MASK]; half of the others become random.",
    )
    detection: float = Field(
        0.0,
        ge=0,
        le=1000,
        description="Weight of a second loss, the cross-entropy of detecting which of the tokens that are not [MASK] "
        "are corrupted, divided by the number of all tokens. 0: masked language modelling alone.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of initialisation, masks, corruptions and dropout.")

    @model_validator(mode="before")
    @classmethod
    def _budget_in_words(cls, given: Any) -> Any:
        return with_budget_as_number(given)

    @model_validator(mode="after")
    def _budget_has_its_unit(self) -> "Training":
        if self.budget_unit in ("tokens", "flops") and 0 < self.budget < 1:
            raise ValueError(
                f"budget is {self.budget:g} {self.budget_unit}, less than one; raise it, or correct budget_unit"
            )
        return self

    @model_validator(mode="after")
    def _everything_is_read(self) -> "Training":
        for name, readers in READ_BY.items():
            value = getattr(self, name)
            usual = type(self).model_fields[name].default
            if value != usual and not readers & {self.optimizer, self.schedule}:
                raise ValueError(
                    f"{name} is {value}, but neither optimizer {self.optimizer!r} nor schedule {self.schedule!r} reads "
                    f"it; leave it at {usual}"
                )
        if self.schedule == "inverse-sqrt" and not self.warmup:
            raise ValueError("schedule 'inverse-sqrt' needs a warm-up; set warmup above 0")
        if self.warmup and self.schedule in READ_BY["cooldown"] and self.warmup + self.cooldown > 1:
            raise ValueError(
                f"warmup {self.warmup} and cooldown {self.cooldown} are more than the whole budget; lower one"
            )
        if self.decay_norms and not self.weight_decay:
            raise ValueError("decay_norms is true, but weight_decay is 0, so nothing decays; set decay_norms to false")
        if self.last_mask_fraction == self.mask_fraction:
            raise ValueError("last_mask_fraction is mask_fraction; leave it null")
        return self

    def in_tokens(self, epoch: float) -> "Training":
        """These settings with a budget in epochs, which have that many tokens each, as one in tokens."""
        if self.budget_unit != "epochs":
            return self
        return self.model_copy(update={"budget": self.budget * epoch, "budget_unit": "tokens"})


HeadName = Literal["tanh", "native"]
CLASSIFIER_WIDTH = 1024  # of head tanh, as in the reference implementation's GLUE settings
Pooling = Literal["cls", "mean", "compare"]
Texts = Literal[1, 2] | None  # in an input of a classifier
Kind = Literal[
    "classes", "regression", "multilabel", "tokens"
]  # what a classifier predicts for an input, or for its tokens


class Finetuning(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How to finetune on one task. The defaults are the release's GLUE_sane: one setting for all tasks."""

    epochs: int = Field(5, ge=1, le=20, description="Passes over the training data.")
    batch_size: int = Field(16, ge=1, description="Examples per step; each epoch drops a smaller last batch.")
    learning_rate: float = Field(4e-5, gt=0, le=1, description="Peak rate.")
    warmup: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="Fraction of the task's steps in which the rate rises from zero; after it the rate falls to zero "
        "along half a cosine.",
    )
    weight_decay: float = Field(
        0.0, ge=0, le=1, description="Of AdamW, decoupled; on matrices, including the embedding."
    )
    dropout: float = Field(0.1, ge=0, lt=1, description="Dropout probability in the encoder and the head.")
    max_tokens: int = Field(128, ge=8, description="Longest input in tokens; longer inputs are truncated.")
    head: HeadName = Field(
        "tanh",
        description="Layers between the pooled state and the scores. tanh: dense to 1024 and tanh, as in the "
        "release. native: those of transformers' model of this layout, so that transformers loads the finetuned model.",
    )
    pooling: Pooling = Field(
        "cls",
        description="What the head reads. cls: the state of [CLS]. mean: the mean over all tokens. compare: for a "
        "pair, the mean of each text, their absolute difference and product (GLUE's baselines, Wang et al. 2018). "
        "Tasks on tokens read the state of each token.",
    )

    def check_length(self, length: int) -> None:
        """Raise InputError if inputs may be longer than `length`, the longest sequence of the model."""
        if self.max_tokens > length:
            raise InputError(
                f"finetune.max_tokens is {self.max_tokens}, but the model takes at most {length} tokens "
                "(tokenize.length). Lower it."
            )
