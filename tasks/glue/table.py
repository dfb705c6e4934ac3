"""The table of tasks: GLUE's, and the probes of the offline demo. A task is a row; your own tasks make theirs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from model.settings import Kind
from tasks.corpus import hub

HUB_GLUE = hub.Source(
    "nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c", "",
    instead="set finetune.data to a directory with GLUE's files (see tasks/README.md, 'GLUE')",
)  # fmt: skip
LABEL = "label"  # the column of the labels
Answers = np.ndarray | Sequence[np.ndarray]  # labels or predictions of examples, or an array for each sentence or row
MOST_EPOCHS = 5  # by the paper's rules


@dataclass(frozen=True)
class Task:
    """A row of the table."""

    title: str  # as in papers
    columns: tuple[str, ...]  # the texts of an example, one or two
    labels: tuple[str, ...]  # names of the classes, as on the hub; empty: a regression
    metrics: tuple[str, ...]  # the first is the score
    sizes: dict[str, int]  # published examples by split: train, one or two for validation, then for test; 0: none
    symmetric: bool = False  # the order of the two texts doesn't matter
    kind: Kind = "classes"  # what a label is
    positive: int = 1  # the class of the metric f1
    own: bool = False  # defined in finetune.tasks: predictions are in words, and a regression has a scale of its own

    @property
    def classes(self) -> int:
        """The number of classes; 1 for a regression."""
        return len(self.labels) or 1

    @property
    def pipeline(self) -> str:
        """The pipeline of transformers for its models."""
        return "token-classification" if self.kind == "tokens" else "text-classification"

    @property
    def own_scale(self) -> bool:
        """Whether the labels are numbers of any size, where STS-B's are from 0 to 5."""
        return self.own and self.kind == "regression"

    def in_words(self, labels: Answers) -> Answers | list:
        """Labels or predictions as files have them: in words for your own tasks."""
        if not self.own or self.own_scale:
            return labels
        names = np.array(self.labels, object)
        if not np.ndim(labels[0]):
            return list(names[labels])
        kind = bool if self.kind == "multilabel" else int
        return [names[np.asarray(row, kind)].tolist() for row in labels]

    def about(self) -> dict:
        """The fields of a run's statistics that describe a row that isn't in the table; see `task_of`."""
        return {"definition": asdict(self)} if self.own else {}

    @property
    def validation(self) -> dict[str, int]:
        """The published sizes of the splits that are scored."""
        return {split: size for split, size in self.sizes.items() if split.startswith("validation")}


def sizes(train: int, validation: int, test: int) -> dict[str, int]:
    """The sizes of a task with one split for validation and one for test."""
    return {"train": train, "validation": validation, "test": test}


MNLI = {
    "train": 392702, "validation_matched": 9815, "validation_mismatched": 9832,
    "test_matched": 9796, "test_mismatched": 9847,
}  # fmt: skip
ONE = ("sentence",)
TWO = ("sentence1", "sentence2")
QUESTIONS = ("question1", "question2")
ACCURACY = ("accuracy",)
SAME = ("f1", "accuracy")
ENTAILED = ("entailment", "not_entailment")
THREE = ("entailment", "neutral", "contradiction")
PROBE = {"train": 0, "validation": 0}
TASKS: dict[str, Task] = {
    "cola": Task("CoLA", ONE, ("unacceptable", "acceptable"), ("matthews",), sizes(8551, 1043, 1063)),
    "sst2": Task("SST-2", ONE, ("negative", "positive"), ACCURACY, sizes(67349, 872, 1821)),
    "mrpc": Task("MRPC", TWO, ("not_equivalent", "equivalent"), SAME, sizes(3668, 408, 1725), symmetric=True),
    "stsb": Task("STS-B", TWO, (), ("pearson", "spearman"), sizes(5749, 1500, 1379), symmetric=True, kind="regression"),
    "qqp": Task("QQP", QUESTIONS, ("not_duplicate", "duplicate"), SAME, sizes(363846, 40430, 390965), symmetric=True),
    "mnli": Task("MNLI", ("premise", "hypothesis"), THREE, ACCURACY, MNLI),
    "qnli": Task("QNLI", ("question", "sentence"), ENTAILED, ACCURACY, sizes(104743, 5463, 5463)),
    "rte": Task("RTE", TWO, ENTAILED, ACCURACY, sizes(2490, 277, 3000)),
    "wnli": Task("WNLI", TWO, ENTAILED[::-1], ACCURACY, sizes(635, 71, 146)),
    "word-order": Task("word-order", ONE, ("shuffled", "intact"), ACCURACY, PROBE),
    "odd-word": Task("odd-word", ONE, ("odd", "intact"), ACCURACY, PROBE),
    "neighbours": Task("neighbours", TWO, ("apart", "neighbours"), ACCURACY, PROBE),
}
PROBES = ("word-order", "odd-word", "neighbours")
GLUE = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # the order of the paper's tables
if TYPE_CHECKING:
    TaskName = str
else:
    TaskName = Literal[*TASKS]


def task_of(about: Mapping) -> Task:
    """The row of the task that statistics, or a report's rows, name in `task`: from the table or their definition."""
    own: dict[str, Any] = about.get("definition") or {}
    if not own:
        return TASKS[about["task"]]
    fields: dict[str, Any] = {}
    for name, value in own.items():
        fields[name] = tuple(value) if isinstance(value, list) else value
    return Task(**fields)


def training_splits(task: str) -> list[str]:
    """The names of the splits of a finetuning run: train, then those that are scored."""
    return ["train", *TASKS[task].validation]


def evaluation_splits(task: str) -> list[str]:
    """The names of a task's validation and test splits."""
    return [split for split in TASKS[task].sizes if split != "train"]
