"""Examples of what a finetuned model answered right and wrong, from its predictions: those it was surest of."""

from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.wording import number_in_words
from tasks.glue.table import LABEL, Task, task_of
from tasks.reports.markdown import shortened
from tasks.store.artifacts import Artifact

PREDICTIONS = "predictions.parquet"
SHOWN = 3  # right ones and wrong ones


class Example(TypedDict):
    """An example with its label and the model's answer, in words."""

    texts: list[str]  # shortened
    label: str
    prediction: str
    probability: float | None  # of the prediction; None for a number


class Answers(TypedDict):
    """Right and wrong answers to the examples of a split."""

    task: str
    title: str
    kind: str
    right: list[Example]  # of numbers, the nearest
    wrong: list[Example]  # of numbers, the farthest
    examples: int
    mistakes: int | None  # None for numbers


class Predicted(NamedTuple):
    """The examples of a split with a model's predictions."""

    rows: pa.Table  # with the label of each
    labels: list[str]  # in words
    predictions: list[str]  # in words
    scores: np.ndarray  # (n, classes)


class Judged(NamedTuple):
    """How sure a model was of its answers, and whether they are right."""

    probabilities: np.ndarray | None  # (n,) of the predictions
    right_order: np.ndarray  # numbers of right answers, the surest first; of all numbers, the nearest first
    wrong_order: np.ndarray


def answers_of(run: Artifact) -> Answers | None:
    """What a run answered on its first validation split; None for tags, and where its predictions are gone."""
    task = task_of(run.stats)
    path = run.path / PREDICTIONS
    if task.kind == "tokens" or not path.exists():
        return None
    return answers_in(path, task, run.stats["task"], next(iter(run.stats["validation"])))


def answers_in(path: Path, task: Task, name: str, split: str) -> Answers:
    """The answers in a file of predictions. `name`: of the task."""
    predicted = read_predicted(path, task, split)
    judged = judge(task, predicted)
    return {
        "task": name,
        "title": task.title,
        "kind": task.kind,
        "right": first_examples(judged.right_order, task, predicted, judged.probabilities),
        "wrong": first_examples(judged.wrong_order, task, predicted, judged.probabilities),
        "examples": len(predicted.labels),
        "mistakes": None if task.kind == "regression" else len(judged.wrong_order),
    }


def read_predicted(path: Path, task: Task, split: str) -> Predicted:
    """What a file of predictions has of a split."""
    rows = pq.read_table(path, filters=[("split", "=", split)])
    labels = in_words(task, rows[LABEL].to_pylist())
    predictions = in_words(task, rows["prediction"].to_pylist())
    scores = np.array(rows["scores"].to_pylist(), dtype=np.float64).reshape(len(labels), -1)
    return Predicted(rows, labels, predictions, scores)


def first_examples(
    order: np.ndarray, task: Task, predicted: Predicted, probabilities: np.ndarray | None
) -> list[Example]:
    """The first examples in this order to show. `probabilities`: (n,) of the predictions; None for numbers."""
    shown = []
    for number in order[:SHOWN].tolist():
        example = Example(
            texts=[shortened(predicted.rows[column][number].as_py()) for column in task.columns],
            label=predicted.labels[number],
            prediction=predicted.predictions[number],
            probability=None if probabilities is None else round(float(probabilities[number]), 4),
        )
        shown.append(example)
    return shown


def judge(task: Task, predicted: Predicted) -> Judged:
    """Order the answers: classes by the probability of the prediction, numbers by their distance to the label."""
    scores = predicted.scores
    if task.kind == "regression":
        labels = np.array(predicted.rows[LABEL].to_pylist(), dtype=np.float64)
        distances = np.abs(labels - scores[:, 0])
        nearest = np.argsort(distances, kind="stable")
        return Judged(None, nearest, nearest[::-1])
    probabilities = probabilities_of(task, scores)
    surest = np.argsort(-probabilities, kind="stable")
    answers = zip(predicted.labels, predicted.predictions, strict=True)
    is_right = np.array([label == prediction for label, prediction in answers], bool)
    return Judged(probabilities, surest[is_right[surest]], surest[~is_right[surest]])


def probabilities_of(task: Task, scores: np.ndarray) -> np.ndarray:
    """(n,): the probability of each prediction, by scores (n, classes); of several labels, of all of them together."""
    if task.kind == "multilabel":
        return np.prod(1 / (1 + np.exp(-np.abs(scores))), axis=1)
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (shifted / shifted.sum(axis=1, keepdims=True)).max(axis=1)


def in_words(task: Task, answers: list) -> list[str]:
    """Labels or predictions of a file as people read them."""
    if task.kind == "regression":
        return [number_in_words(answer) for answer in answers]
    if task.kind == "multilabel":
        return [", ".join(map(str, answer)) or "none" for answer in answers]
    return [answer if isinstance(answer, str) else task.labels[answer] for answer in answers]
