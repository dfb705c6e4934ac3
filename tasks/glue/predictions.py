"""Predictions of a finetuned model beside the labels, and their scores; both are written by finetune."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.glue import metrics
from tasks.glue.inputs import Inputs
from tasks.glue.pieces import TOKENS
from tasks.glue.table import LABEL, Answers


class SplitScores(metrics.Scored):
    """What scores.json says of a split."""

    examples: int
    official_examples: int  # published; 0: none


def write_scores(inputs: Inputs, raw: dict[str, np.ndarray], out: Path) -> dict[str, SplitScores]:
    """Write predictions.parquet and scores.json. `raw`: scores (n, classes) by split. Returns the metrics by split."""
    task = inputs.data.task
    validation: dict[str, SplitScores] = {}
    tables = []
    for split, scores in raw.items():
        labels, predicted = labels_and_predictions(inputs, split, scores)
        scored = metrics.score_task(task, labels, predicted, inputs.examples["train"].labels)
        validation[split] = {"examples": len(labels), "official_examples": task.sizes[split], **scored}
        tables.append(table_of(inputs, split, labels, predicted, scores))
    pq.write_table(pa.concat_tables(tables), out / "predictions.parquet")
    (out / "scores.json").write_text(json.dumps(validation, indent=2) + "\n", encoding="utf-8")
    return validation


def table_of(inputs: Inputs, split: str, labels: Answers, predicted: Answers, scores: np.ndarray) -> pa.Table:
    """The rows of a split: the texts, and in the words of the task the label and the prediction."""
    task = inputs.data.task
    given = inputs.data.tables[split]
    columns: dict[str, Any] = {"split": [split] * len(given), "row": range(len(given))}
    for name in task.columns:
        columns[name] = pa.array(given[name], pa.large_string())
    if task.kind == "tokens":
        columns[TOKENS] = given[TOKENS].map(list).tolist()
    columns[LABEL] = task.in_words(labels)
    columns["prediction"] = task.in_words(predicted)
    if task.kind != "tokens":
        columns["scores"] = list(scores)
    return pa.table(columns)


def labels_and_predictions(inputs: Inputs, split: str, scores: np.ndarray) -> tuple[Answers, Answers]:
    """The labels of a split and the predictions: one for each example, or an array for each sentence.

    A word that the model hasn't seen has the tag that is the most frequent in training.
    """
    from model.finetuning import predictions

    labels = inputs.examples[split].labels
    found = predictions(scores, inputs.data.task.kind)
    if inputs.data.task.kind != "tokens":
        return labels, found
    of_rows = inputs.data.tables[split][LABEL]
    seen = inputs.seen[split]
    tags = np.full(len(seen), metrics.usual_tag(inputs.examples["train"].labels))
    tags[seen] = found
    ends = np.cumsum(of_rows.map(len))
    return of_rows.map(np.array).tolist(), np.split(tags, ends[:-1])
