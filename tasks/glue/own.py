"""Definitions of tasks: your own ones in finetune.tasks, and definitions made from rows of the table."""

import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from model.errors import InputError
from model.settings import Finetuning, Kind
from tasks.corpus import hub
from tasks.corpus.containers import Encoding
from tasks.glue.table import HUB_GLUE, LABEL, TASKS

METRICS: dict[Kind, tuple[str, ...]] = {  # those that can be asked for; the first two are the usual ones
    "classes": ("accuracy", "macro_f1", "matthews", "f1"),
    "regression": ("pearson", "spearman"),
    "multilabel": ("micro_f1",),
    "tokens": ("span_f1", "accuracy", "macro_f1"),
}
FILE = re.compile(r"[./~].*|.*\.[A-Za-z]\w{1,6}")  # what is the name of a file, not of a data set
RESERVED = {*TASKS, *(task.title for task in TASKS.values()), "all", "average"}  # names of rows and columns
if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[*chain.from_iterable(METRICS.values())]
NAMED = "a name"
DEFINED = "a definition"
TAGS = (NAMED, DEFINED)  # in the places of errors


class Definition(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False):
    """Your own task: where its data is, which columns are text and label, and how it is scored."""

    name: str = Field(pattern=r"^\w[\w.-]{0,59}$", description="Its name in reports.")
    data: str = Field(
        min_length=1,
        description="A file (as for download.files; CoNLL for tokens), a folder with files for train, validation and "
        "test, or a data set of the hub.",
    )
    config: str = Field("", description="Configuration of a hub data set that has several.")
    revision: str = Field("", description="Commit of a hub data set. '': the newest at first use.")
    text: str = Field(
        "", description="Column of the text, or of the tokens; its number in CoNLL. '': the usual names are tried."
    )
    pair: str = Field("", description="Column of the second text of a pair. '': none.")
    label: str = Field(
        "", description="Column of the label, or of the tags; its number in CoNLL. '': the usual names are tried."
    )
    encoding: Encoding = Field("", description="Of files that aren't UTF-8, such as windows-1252.")
    kind: Kind = Field(
        "classes",
        description="What a label is. classes: one class. regression: a number. multilabel: several classes. tokens: a "
        "tag for each token.",
    )
    metric: MetricName | None = Field(
        None, description="The score. null: accuracy, Pearson's correlation, micro F1 or span F1, by the kind."
    )
    validation: float = Field(
        0.1,
        ge=0.01,
        le=0.5,
        description="Share of the training rows, 0.01 to 0.5, that is held out where the data has no validation split, "
        "by a digest of their text.",
    )
    max_unlabelled: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="Share of a split's rows, 0 to below 1, that may be without a label. They are left out and "
        "counted; more are an error.",
    )
    epochs: int | None = Field(None, ge=1, le=20, description="Of this task. null: finetune.epochs.")
    batch_size: int | None = Field(None, ge=1, description="Of this task. null: finetune.batch_size.")
    learning_rate: float | None = Field(None, gt=0, le=1, description="Of this task. null: finetune.learning_rate.")

    @model_validator(mode="after")
    def _fits(self) -> "Definition":
        if self.name in RESERVED:
            raise ValueError(f"name is {self.name!r}, which reports use for something else; choose another")
        if self.data == "probes":
            raise ValueError("data is 'probes', which are cram's own tasks; for a folder of this name write './probes'")
        if self.metric and self.metric not in METRICS[self.kind]:
            raise ValueError(
                f"metric {self.metric!r} doesn't fit kind {self.kind!r}; choose one of {', '.join(METRICS[self.kind])}"
            )
        if self.pair and self.kind == "tokens":
            raise ValueError("pair can't be set for kind 'tokens', which has one text; leave it empty")
        return self

    def settings(self) -> dict:
        """The settings of training that are the task's own."""
        chosen = {}
        for name in Finetuning.model_fields:
            value = getattr(self, name, None)
            if value is not None:
                chosen[name] = value
        return chosen

    @property
    def named(self) -> bool:
        """Whether it is a task of the table, asked for by its name; see `by_name`."""
        return self.name in TASKS

    def advice(self, fields: str) -> str:
        """The end of a sentence: what in the definition may be wrong; empty if the user gave only a name."""
        return "" if self.named else f", or set {fields} of the task (finetune.tasks)"

    def repository(self) -> str:
        """The name of the hub's data set; empty for local data. Raises InputError if there is no such file."""
        if self.named:
            return self.data if self.data == HUB_GLUE.repository else ""
        if Path(self.data).expanduser().exists():
            if self.revision:
                raise InputError(
                    f"{self.name}: revision is for data sets of the hub, but {self.data} is here. Remove it."
                )
            return ""
        if FILE.fullmatch(self.data) or self.data.count("/") > 1:
            raise InputError(
                f"{self.name}: there is no file or folder {self.data}. Correct data of the task (finetune.tasks)."
            )
        return self.data

    def source(self) -> hub.Source:
        """The data set of the hub."""
        if self.named:
            return HUB_GLUE
        advice = f"set data of {self.name} (finetune.tasks) to a local file or folder; there is no {self.data} here"
        return hub.Source(self.data, self.revision, "", instead=advice)


def by_name(task: str, data: str) -> Definition:
    """The definition of a task of the table, with its data in `data`."""
    row = TASKS[task]
    text, *others = row.columns
    pair = others[0] if others else ""
    return Definition.model_construct(name=task, data=data, text=text, pair=pair, label=LABEL, kind=row.kind)


def name_or_definition(names: Any) -> Any:
    """The type of a task's name or of a definition, by the kind of the value, so that an error is about that alone."""
    kind = Discriminator(lambda value: NAMED if isinstance(value, str) else DEFINED)
    return Annotated[Annotated[names, Tag(NAMED)] | Annotated[Definition, Tag(DEFINED)], kind]


def definitions_in(tasks: Iterable[Any]) -> list[Definition]:
    """The definitions among tasks, which may also be names."""
    return [task for task in tasks if isinstance(task, Definition)]
