"""What a model and its training can be told, without importing torch. The defaults are the paper's final recipe."""

from typing import Literal

from pydantic import BaseModel, Field, model_validator


class Architecture(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Sizes of the encoder. The defaults are the paper's final model."""

    layers: int = Field(16, ge=1, le=128, description="Transformer blocks.")
    hidden: int = Field(768, ge=2, le=65_536, description="Width of the residual stream.")
    heads: int = Field(12, ge=1, le=1024, description="Attention heads; must divide hidden.")
    intermediate: int = Field(
        3072,
        ge=2,
        le=262_144,
        description="Width of the feed-forward input layer; GEGLU halves it, so 3072 feeds 1536 on.",
    )

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Architecture":
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not a multiple of heads {self.heads}; make it one")
        if self.hidden % 2 or self.intermediate % 2:
            raise ValueError(
                f"hidden {self.hidden} and intermediate {self.intermediate} must be even: positions are sine and cosine "
                "pairs, and GEGLU splits intermediate in halves"
            )
        return self


class Training(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How to pretrain. The defaults are the paper's final recipe (section 4.3 and the released bert-o4)."""

    budget: float = Field(24.0, gt=0, description="What the run may spend, in budget_unit.")
    budget_unit: Literal["hours", "tokens"] = Field(
        "hours", description="hours: the clock, with compilation and checkpoints but without held-out evaluation."
    )
    batch_size: int = Field(8192, ge=1, description="Sequences an optimizer step, from batch_ramp on.")
    batch_ramp: float = Field(0.6, ge=0, le=1, description="Fraction of the budget over which the batch grows.")
    learning_rate: float = Field(1e-3, gt=0, le=1, description="Peak of the triangle schedule, at 75 % of the budget.")
    weight_decay: float = Field(0.01, ge=0, le=1, description="Decoupled, on matrices.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean gradient.")
    beta2: float = Field(0.98, ge=0, lt=1, description="AdamW's decay of the squared gradient.")
    adam_eps: float = Field(1e-12, gt=0, description="AdamW's epsilon.")
    clip: float = Field(0.5, gt=0, description="Largest global gradient norm.")
    mask_fraction: float = Field(0.25, gt=0, lt=1, description="Tokens of a sequence that are predicted.")
    seed: int = Field(0, ge=0, lt=2**31, description="Of initialisation and masks.")


class Finetuning(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """How to finetune: one global setting for all tasks, as the rules ask. Defaults: the reference's GLUE_sane."""

    epochs: int = Field(5, ge=1, le=5, description="Passes over the training data; the rules allow five at most.")
    batch_size: int = Field(16, ge=1, description="Examples a step; a last, smaller batch is dropped.")
    learning_rate: float = Field(4e-5, gt=0, le=1, description="Peak; half a cosine down to zero.")
    warmup: float = Field(0.1, ge=0, lt=1, description="Fraction of this task's own steps.")
    dropout: float = Field(0.1, ge=0, lt=1, description="In the encoder and the head.")
    max_tokens: int = Field(128, ge=8, description="Longer inputs are cut.")
