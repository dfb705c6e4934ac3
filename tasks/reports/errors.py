"""Error analysis of a classification task: by length, by phenomenon, by cutoff, by seed, by share of the training data.

It was made for CoLA, the task where crammed models do worst. All but the learning curve take the predictions of any
classification task as a DataFrame (see `predictions_of`). Results are lists of rows that JSON can hold. Scores and
shares are in percent; intervals are 95 %, by resampling the examples.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from model import InputError
from model.quantities import counted
from tasks.glue import metrics
from tasks.glue.tasks import Task

if TYPE_CHECKING:  # importing it takes half a second
    import pandas as pd

ROUGH = (
    "Kinds of sentences are recognized by lists of words and endings, not by a parser, so only roughly. A sentence can "
    "be of several kinds."
)
HINDSIGHT = "The best cutoff is chosen on the same examples that it is scored on, so its score is optimistic."
SHOWN = 5  # sentences of a kind
BINS = 6  # of lengths
WORD = re.compile(r"\w+(?:['’-]\w+)*")


def _words(*listed: str) -> re.Pattern:
    return re.compile(rf"\b(?:{'|'.join(' '.join(listed).split())})\b", re.IGNORECASE)


# The phenomena by which papers group CoLA's sentences (Warstadt and Bowman, arXiv 1901.03438), as far as words show.
KINDS: dict[str, re.Pattern] = {
    "question": re.compile(r"\?[\"'”’)\s]*$", re.MULTILINE),
    "wh-word (question or relative clause)": _words(
        "who whom whose which what where when why how whoever whatever whichever wherever whenever however"
    ),
    "that, if, because … (subordinate clause)": _words(
        "that whether if because although though while unless until since before after"
    ),
    "to and a verb": re.compile(
        r"\bto (?!the\b|an?\b|my\b|your\b|his\b|her\b|its\b|our\b|their\b|th(?:is|at|ese|ose|em)\b|him\b|me\b|us\b|"
        r"it\b|you\b|wh|what\b|all\b|every|each\b|some|any|no\b|one\b|\w+(?:ing|self|selves)\b)[a-z]"
    ),
    "modal verb or have": re.compile(
        r"\b(?:can|could|will|would|shall|should|may|might|must|ought|have|has|had|cannot|having)(?:n['’]t)?\b|"
        r"\bwon['’]t\b|['’](?:ll|ve|d)\b",
        re.IGNORECASE,
    ),
    "negation": re.compile(
        r"\b(?:not|no|never|none|nobody|nothing|nowhere|neither|nor|hardly|scarcely|cannot)\b|n['’]t\b", re.IGNORECASE
    ),
    "passive": re.compile(
        r"(?:\b(?:am|is|are|was|were|be|been|being|gets?|got|getting)|n['’]t)(?: (?:not|also|never|always|\w+ly))* "
        r"(?!(?:need|indeed|speed|seed|red|bed|feed|even|often|then|when|seven|children|women|men|open|golden)\b)"
        r"(?:\w+(?:ed|en|wn|ght)|put|cut|hit|sent|told|sold|said|made|paid|kept|held|left|lost|met|built|read|done|"
        r"gone|found|sung|hurt|shot|fed|led|won|begun|felt|heard|laid|meant|set|shut|struck|swum|torn|worn|born)\b",
        re.IGNORECASE,
    ),
    "and, or, but (coordination)": _words("and or but nor"),
    "quantifier": _words(
        "all every each some any most many much few several both either no none everyone everybody everything someone "
        "somebody something anyone anybody anything nobody nothing only"
    ),
    "reflexive or reciprocal": re.compile(
        r"\b(?:my|your|him|her|it|one|our|them|their)sel(?:f|ves)\b|\beach other\b|\bone another\b", re.IGNORECASE
    ),
    "personal pronoun": _words("i you he she it we they me him her us them"),
    "comparison": re.compile(
        r"\b(?:than|more|less|fewer|most|least)\b|\bas \w+ (?:\w+ )*?as\b|\bthe \w+er\b.*\bthe \w+er\b", re.IGNORECASE
    ),
    "there is": re.compile(
        r"\bthere(?: \w+)? (?:is|are|was|were|be|been|seems?|arrived?|appeared|exists?)\b|\bthere['’]s\b", re.IGNORECASE
    ),
}
OTHERS = "none of these (a verb and its arguments, for the most part)"


def predictions_of(table: pa.Table, task: Task, split: str) -> "pd.DataFrame":
    """The labelled predictions of one run on one split, from the table of predictions.parquet, in order of the data.

    Columns: text (for pairs, both texts with " | " between them), label, prediction (class numbers), scores (of the
    classes, before softmax). Raises InputError for a regression task or a split without labels.
    """
    if task.classes == 1:
        raise InputError(
            f"{task.title} is a regression task; error analysis needs a classification task. Choose another task."
        )
    table = table.filter(pc.equal(table["split"], split)).sort_by("row")
    if not len(table) or table["label"].null_count:
        raise InputError(
            f"The predictions of {task.title} have {counted(len(table), 'row')} of split {split!r}, "
            f"{table['label'].null_count} without a label; expected labelled ones of {', '.join(task.validation)}. "
            "Choose such a split."
        )
    found = table.to_pandas()
    found["text"] = found[list(task.columns)].agg(" | ".join, axis=1)
    return found[["text", "label", "prediction", "scores"]]


def analyse(task: Task, tables: Sequence[pa.Table]) -> dict[str, dict]:
    """The error analysis of the runs (seeds) of a task, by validation split, without the learning curve.

    `run` is the index of the table with the median score (the lower of the two in the middle); all parts but `seeds`
    describe that run.
    """
    found = {}
    for split in task.validation:
        runs = [predictions_of(table, task, split) for table in tables]
        scores = [metrics.score(task.metrics[0], run["label"].to_numpy(), run["prediction"].to_numpy()) for run in runs]
        median = int(np.argsort(scores, kind="stable")[(len(runs) - 1) // 2])
        found[split] = {
            "run": median,
            "by_length": by_length(runs[median], task.labels),
            "by_kind": by_kind(runs[median], task.labels),
            "errors": errors(runs[median], task.labels),
            "cutoffs": cutoffs(runs[median], task.labels) if task.classes == 2 else [],
            "seeds": seeds_agreement(runs, task.labels),
            "notes": [ROUGH, HINDSIGHT] if task.classes == 2 else [ROUGH],
        }
    return found


def describe(examples: "pd.DataFrame", names: Sequence[str]) -> dict:
    """The columns that tables of examples share: how many, Matthews with its interval, accuracy, and shares of classes.

    For two classes, only the shares of the second are given ("acceptable", "predicted acceptable").
    """
    labels, predictions = examples["label"].to_numpy(), examples["prediction"].to_numpy()
    classes = _shown(names)
    columns = ["matthews", "interval", "accuracy"]
    columns += [f"{prefix}{name}" for name in classes.values() for prefix in ("", "predicted ")]
    if not len(examples):
        return {"examples": 0} | dict.fromkeys([*columns, "note"])
    numbers = [
        round(metrics.score("matthews", labels, predictions), 2),
        [round(end, 2) for end in metrics.bootstrap("matthews", labels, predictions)],
        _percent(labels == predictions),
        *(_percent(values == number) for number in classes for values in (labels, predictions)),
        metrics.note("matthews", labels, predictions),
    ]
    return {"examples": len(examples)} | dict(zip([*columns, "note"], numbers, strict=True))


def _shown(names: Sequence[str]) -> dict[int, str]:
    """The classes whose shares are shown: of two classes the second, else all."""
    return {number: name for number, name in enumerate(names) if number or len(names) != 2}


def _percent(chosen: np.ndarray) -> float:
    return round(100 * float(np.mean(chosen)), 2)


def by_length(examples: "pd.DataFrame", names: Sequence[str]) -> list[dict]:
    """A row for each range of lengths in words, with about as many examples in each, and one for all."""
    words = examples["text"].map(lambda text: len(WORD.findall(text)))
    ends = np.unique(np.quantile(words, np.arange(1, BINS + 1) / BINS, method="inverted_cdf"))
    rows = []
    for _, lengths in words.groupby(np.searchsorted(ends, words)):
        fewest, most = lengths.min(), lengths.max()
        name = f"{fewest} to {most}" if fewest < most else f"{fewest}"
        rows.append({"words": name, **describe(examples.loc[lengths.index], names)})
    return [*rows, {"words": "all", **describe(examples, names)}]


def kinds_of(text: str) -> list[str]:
    """The kinds of a sentence: the phenomena of KINDS that it has, or OTHERS."""
    return [kind for kind, pattern in KINDS.items() if pattern.search(text)] or [OTHERS]


def by_kind(examples: "pd.DataFrame", names: Sequence[str]) -> list[dict]:
    """A row for each kind of sentence, the lowest score first, and one for all.

    `difference` is Matthews of these minus that of all others, with an interval: if that contains 0, there may be no
    difference. `example` is the sentence of this kind with the fewest other kinds.
    """
    kinds = examples["text"].map(kinds_of)
    listed, rows = kinds.explode(), []
    for kind in (*KINDS, OTHERS):
        chosen = listed.index[listed == kind]
        example = examples["text"][kinds[chosen].map(len).idxmin()] if len(chosen) else None
        row = {"kind": kind, **describe(examples.loc[chosen], names)}
        rows.append(row | _difference(examples.loc[chosen], examples.drop(chosen)) | {"example": example})
    rows.sort(key=lambda row: np.inf if row["matthews"] is None else row["matthews"])
    whole = describe(examples, names) | {"difference": None, "difference_interval": None, "example": None}
    return [*rows, {"kind": "all", **whole}]


def _difference(*groups: "pd.DataFrame") -> dict:
    if any(group.empty for group in groups):
        return {"difference": None, "difference_interval": None}
    groups = [(group["label"].to_numpy(), group["prediction"].to_numpy()) for group in groups]
    these, others = (metrics.score("matthews", *group) for group in groups)
    drawn = [metrics.resampled("matthews", *group, seed=seed) for seed, group in enumerate(groups)]
    interval = np.percentile(drawn[0] - drawn[1], metrics.INTERVAL)
    return {
        "difference": round(these - others, 2),
        "difference_interval": [round(float(end), 2) for end in interval],
    }


def _margins(examples: "pd.DataFrame") -> np.ndarray:
    """(n,) scores of the predicted class minus those of the true one, before softmax."""
    scores = np.stack(examples["scores"]).astype(float)
    every = np.arange(len(examples))
    return scores[every, examples["prediction"]] - scores[every, examples["label"]]


def errors(examples: "pd.DataFrame", names: Sequence[str], shown: int = SHOWN) -> list[dict]:
    """A row for each pair of true and predicted class: how many errors, out of how many, and the most confident ones.

    A margin is the score of the predicted class minus that of the true one, before softmax; `margin` is their median.
    """
    wrong = examples.assign(margin=_margins(examples))[examples["label"] != examples["prediction"]]
    rows = []
    for true, predicted in itertools.permutations(range(len(names)), 2):
        these = wrong[(wrong["label"] == true) & (wrong["prediction"] == predicted)]
        of = int((examples["label"] == true).sum())
        rows.append(
            {
                "error": f"{names[true]}, taken for {names[predicted]}",
                "examples": len(these),
                "of": of,
                "rate": round(100 * len(these) / of, 2) if of else None,
                "share_of_errors": round(100 * len(these) / len(wrong), 2) if len(wrong) else None,
                "margin": round(float(these["margin"].median()), 3) if len(these) else None,
                "most_confident": _sentences(these, shown, {}),
            }
        )
    return rows


def _sentences(examples: "pd.DataFrame", shown: int, labels: dict[int, str]) -> list[dict]:
    """The sentences with the largest margins, with the names of their labels if these are given."""
    return [
        {"row": int(row), "text": text}
        | ({"label": labels[label]} if labels else {})
        | {"margin": round(float(margin), 3)}
        for row, text, label, margin in examples.nlargest(shown, "margin")[["text", "label", "margin"]].itertuples()
    ]


def cutoffs(examples: "pd.DataFrame", names: Sequence[str]) -> list[dict]:
    """Whether a two-class model orders examples badly or only has the wrong cutoff: its scores at three cutoffs.

    The cutoff is on the second class's score minus the first's, before softmax; the model's own is 0. `auc` is the
    probability in percent that an example of the second class is ranked above one of the first, whatever the cutoff
    (None if there is only one class).
    """
    import pandas as pd
    from sklearn.metrics import roc_auc_score

    labels = examples["label"]
    margins = np.diff(np.stack(examples["scores"]).astype(float))[:, 0]
    by_margin = pd.crosstab(margins, labels.to_numpy()).reindex(columns=[0, 1], fill_value=0)
    # (cutoffs, 2): how many of each class are at the cutoff or above; the last cutoff is above all of them.
    accepted = np.vstack([by_margin[::-1].cumsum()[::-1], [0, 0]])
    possible = np.append(by_margin.index, np.nextafter(margins.max(), np.inf))
    of_class = accepted[0]
    best = np.argmax(metrics.from_counts("matthews", np.stack([of_class - accepted, accepted], axis=-1)))
    even = np.argmin(np.abs(accepted.sum(axis=1) - of_class[1]))
    auc = round(100 * float(roc_auc_score(labels, margins)), 2) if of_class.all() else None
    chosen = {
        "the model's own": (0.0, margins > 0),
        f"as many {names[1]} as there are": (possible[even], margins >= possible[even]),
        "the best in hindsight": (possible[best], margins >= possible[best]),
    }
    return [
        {
            "cutoff": name,
            "at": round(float(at), 3),
            **describe(examples.assign(prediction=above.astype(int)), names),
            "auc": auc,
        }
        for name, (at, above) in chosen.items()
    ]


def seeds_agreement(runs: "Sequence[pd.DataFrame]", names: Sequence[str]) -> list[dict]:
    """How many examples all, some and none of the runs get right: a row for each number of runs, all first.

    What no seed gets right is the model's error, not chance. Each row shows the examples with the largest mean margins.
    """
    right = sum((run["prediction"] == run["label"]).astype(int) for run in runs)
    examples = runs[0].assign(right=right, margin=np.mean([_margins(run) for run in runs], axis=0))
    rows = []
    for count in range(len(runs), -1, -1):
        these = examples[examples["right"] == count]
        shares = {
            name: _percent(these["label"] == number) if len(these) else None for number, name in _shown(names).items()
        }
        rows.append(
            {
                "right": f"{count} of {len(runs)}",
                "examples": len(these),
                "share": round(100 * len(these) / len(examples), 2),
                **shares,
                "most_wrong": _sentences(these, SHOWN if count < len(runs) else 0, dict(enumerate(names))),
            }
        )
    return rows


def learning_curve(runs: Iterable[dict]) -> list[dict]:
    """Score by share of the training data, from the stats of finetune runs: median and range over seeds.

    A row for each task, protocol, split, with and without pretraining, and share, in ascending order of shares.
    `per_doubling` is the gain in points per doubling of the examples since the row before.
    """
    import pandas as pd

    group = ["task", "protocol", "pretrained", "split", "metric"]
    scores = pd.DataFrame(
        {name: run[name] for name in ("task", "protocol", "pretrained", "metric", "share")}
        | {"split": split, "train_examples": round(run["share"] * run["train_examples"])}
        | {"score": about["metrics"][run["metric"]], "majority": about["majority"][run["metric"]]}
        for run in runs
        for split, about in run["validation"].items()
    )
    if scores.empty:
        return []
    scores["order"] = scores.groupby(group, sort=False).ngroup()
    curve = scores.groupby(["order", *group, "share"], as_index=False).agg(
        train_examples=("train_examples", "first"),
        seeds=("score", "size"),
        median=("score", "median"),
        low=("score", "min"),
        high=("score", "max"),
        majority=("majority", "first"),
    )
    points = ["median", "low", "high", "majority"]
    curve[points] = curve[points].map(lambda score: round(float(score), 2))
    before = curve.groupby("order")[["share", "median"]].shift()
    gains = (curve["median"] - before["median"]) / np.log2(curve["share"] / before["share"])
    rounded = [None if np.isnan(gain) else round(gain, 2) for gain in gains.tolist()]
    return curve.drop(columns="order").assign(per_doubling=pd.Series(rounded, dtype=object)).to_dict("records")
