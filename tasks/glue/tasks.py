"""The table of GLUE's tasks: texts, labels, metrics and official sizes; and the names of the finetuning protocols."""

from dataclasses import dataclass
from typing import Literal, get_args

from tasks.corpus import hub
from tasks.glue import probes

HUB_GLUE = hub.Source(
    "nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c", "",
    instead="set finetune.data to a directory with GLUE's files (see tasks/README.md, 'GLUE')",
)  # fmt: skip
LABEL = "label"
PLACES = ("idx", "index")  # the column that numbers the rows, on the hub and in GLUE's own files
Protocol = Literal["cramming", "modern"]
PROTOCOLS = get_args(Protocol)
MOST_EPOCHS = 5  # by the rules of protocol cramming


@dataclass(frozen=True)
class Task:
    """A task: its examples, its metrics, and the sizes of the official splits."""

    title: str  # as in papers
    columns: tuple[str, ...]  # the texts of an example
    labels: tuple[str, ...]  # names of the classes, as on the hub; empty: the label is a number from 0 to 5
    metrics: tuple[str, ...]  # the first is the score
    train: int  # examples; 0 where there is no official split
    validation: dict[str, int]
    test: dict[str, int]

    @property
    def classes(self) -> int:
        """The number of classes; 1 for a regression."""
        return len(self.labels) or 1


ONE, TWO, QUESTIONS = ("sentence",), ("sentence1", "sentence2"), ("question1", "question2")
ENTAILED = ("entailment", "not_entailment")
TASKS: dict[str, Task] = {
    "cola": Task(
        "CoLA", ONE, ("unacceptable", "acceptable"), ("matthews",),
        8551, {"validation": 1043}, {"test": 1063}),
    "sst2": Task(
        "SST-2", ONE, ("negative", "positive"), ("accuracy",),
        67349, {"validation": 872}, {"test": 1821}),
    "mrpc": Task(
        "MRPC", TWO, ("not_equivalent", "equivalent"), ("f1", "accuracy"),
        3668, {"validation": 408}, {"test": 1725}),
    "stsb": Task(
        "STS-B", TWO, (), ("pearson", "spearman"),
        5749, {"validation": 1500}, {"test": 1379}),
    "qqp": Task(
        "QQP", QUESTIONS, ("not_duplicate", "duplicate"), ("f1", "accuracy"),
        363846, {"validation": 40430}, {"test": 390965}),
    "mnli": Task(
        "MNLI", ("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), ("accuracy",),
        392702, {"validation_matched": 9815, "validation_mismatched": 9832},
        {"test_matched": 9796, "test_mismatched": 9847}),
    "qnli": Task(
        "QNLI", ("question", "sentence"), ENTAILED, ("accuracy",),
        104743, {"validation": 5463}, {"test": 5463}),
    "rte": Task("RTE", TWO, ENTAILED, ("accuracy",), 2490, {"validation": 277}, {"test": 3000}),
    "wnli": Task("WNLI", TWO, ENTAILED[::-1], ("accuracy",), 635, {"validation": 71}, {"test": 146}),
}  # fmt: skip
TASKS |= {
    name: Task(name, columns, probes.LABELS[name], ("accuracy",), 0, {"validation": 0}, {})
    for name, columns in probes.COLUMNS.items()
}
TaskName = Literal[
    "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "word-order", "odd-word", "neighbours"
]
SYMMETRIC = ("mrpc", "stsb", "qqp")  # similarity of two texts: their order doesn't matter
GLUE = ("mnli", "sst2", "stsb", "rte", "qnli", "qqp", "mrpc", "cola")  # the order of the paper's tables


def splits_of(task: str, test: bool) -> list[str]:
    """The names of a task's splits: train, validation, and if `test` also test."""
    about = TASKS[task]
    return ["train", *about.validation, *(about.test if test else ())]


def evaluation_splits(task: str) -> list[str]:
    """The names of a task's validation and test splits."""
    return splits_of(task, test=True)[1:]
