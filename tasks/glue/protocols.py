"""The settings of finetuning by protocol `modern`: a table by task, and what is common to all tasks."""

from typing import Literal

from pydantic import BaseModel, Field, create_model, model_validator

from model.settings import HeadName
from tasks.glue.tasks import TaskName


class TaskSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Settings of one task by protocol `modern`."""

    epochs: int = Field(ge=1, le=20, description="Passes over the training data.")
    batch_size: int = Field(ge=1, description="Examples per step.")
    learning_rate: float = Field(gt=0, le=1, description="Peak rate.")
    weight_decay: float = Field(ge=0, le=1, description="Of AdamW, decoupled; on matrices, including the embedding.")
    seeds: int = Field(ge=1, le=100, description="Number of runs; the median is reported.")
    start: Literal["pretrained", "mnli"] = Field(
        description="Model to start from; mnli: the one finetuned on MNLI with seed 0."
    )


# After MosaicBERT (arXiv 2312.17482 and its released code), whose optimizer multiplies by the decay alone, so that here
# decays are divided by the rate. It had inputs of 256 tokens, and no part of the training data held back.
MODERN = {  # epochs, batch_size, learning_rate, weight_decay, seeds, start
    "mnli": (3, 48, 5e-5, 0.1, 1, "pretrained"),
    "sst2": (3, 16, 3e-5, 0.1, 3, "pretrained"),
    "stsb": (10, 32, 3e-5, 0.1, 5, "mnli"),
    "rte": (3, 16, 1e-5, 1.0, 5, "mnli"),
    "qnli": (10, 16, 1e-5, 0.1, 1, "pretrained"),
    "qqp": (5, 16, 3e-5, 0.1, 1, "pretrained"),
    "mrpc": (10, 32, 8e-5, 0.1, 5, "mnli"),
    "cola": (10, 32, 5e-5, 0.1, 4, "pretrained"),
}


class ModernSettings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Settings of protocol `modern` that are common to all tasks. `Modern` adds one field for each task."""

    schedule: Literal["cosine", "linear"] = Field("linear", description="How the rate falls to zero at the end.")
    warmup: float = Field(0.06, ge=0, lt=1, description="Fraction of a task's steps in which the rate rises.")
    choose: Literal["last", "best"] = Field(
        "best", description="Epoch whose model is kept; best: by the score on a held-back tenth of the training data."
    )
    head: HeadName = Field(
        "native", description="native: that of transformers' model of this layout; tanh if it has none."
    )

    @model_validator(mode="after")
    def _mnli_starts_from_pretraining(self) -> "ModernSettings":
        if self.task("mnli").start == "mnli":
            raise ValueError("mnli.start is 'mnli', but MNLI can't start from its own model; set it to 'pretrained'")
        return self

    def task(self, name: TaskName) -> TaskSettings:
        """The settings of a task."""
        return getattr(self, name)

    def finetuning(self, name: TaskName) -> dict:
        """The fields of `Finetuning` that this protocol sets for a task."""
        common = self.model_dump(include=set(ModernSettings.model_fields))
        return common | self.task(name).model_dump(exclude={"seeds", "start"})


# a field per row, so that an override can change single cells, and misspelt names are refused
ROWS = {task: TaskSettings(**dict(zip(TaskSettings.model_fields, row, strict=True))) for task, row in MODERN.items()}
Modern = create_model(
    "Modern",
    __base__=ModernSettings,
    __doc__="Settings of protocol `modern`, by task and common to all.",
    **{task: (TaskSettings, row) for task, row in ROWS.items()},
)
