"""Analysis: where a task's predictions are wrong: by length, by what a sentence has, by cutoff, by seed, by training data.

Made for CoLA, where crammed models do badly; all but the learning curve take the predictions of any classification task.
Everything is plain rows for tables. Scores and shares are in percent; intervals are 95 %, of resampled examples.
"""

import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from model import InputError
from model.quantities import counted
from tasks.glue import metrics
from tasks.glue.tasks import Task

ROUGH = (
    "What a sentence has is found by lists of words and endings, not by a parser, hence roughly; it can have several."
)
HINDSIGHT = (
    "The best cutoff is chosen on the examples that it is scored on: more than any cutoff of a real use would give."
)
SHOWN = 5  # sentences of a kind
BINS = 6  # of lengths
WORD = re.compile(r"\w+(?:['’-]\w+)*")


def _words(*listed: str) -> re.Pattern:
    return re.compile(rf"\b(?:{'|'.join(' '.join(listed).split())})\b", re.IGNORECASE)


# The phenomena that papers sort CoLA's sentences by (Warstadt and Bowman, arXiv 1901.03438), as far as words tell them.
KINDS: dict[str, re.Pattern] = {
    "question": re.compile(r"\?[\"'”’)\s]*$", re.MULTILINE),
    "wh-word (question or relative clause)": _words(
        "who whom whose which what where when why how whoever whatever whichever wherever whenever however"
    ),
    "that, if, because … (subordinate clause)": _words(
        "that whether if because although though while unless until since before after"
    ),
    "to and a verb": re.compile(
        r"\bto (?!the\b|an?\b|my\b|your\b|his\b|her\b|its\b|our\b|their\b|th(?:is|at|ese|ose|em)\b|him\b|me\b|us\b|it\b|you\b|"
        r"wh|what\b|all\b|every|each\b|some|any|no\b|one\b|\w+(?:ing|self|selves)\b)[a-z]"
    ),
    "modal verb or have": re.compile(
        r"\b(?:can|could|will|would|shall|should|may|might|must|ought|have|has|had|cannot|having)(?:n['’]t)?\b|\bwon['’]t\b|['’](?:ll|ve|d)\b",
        re.IGNORECASE,
    ),
    "negation": re.compile(
        r"\b(?:not|no|never|none|nobody|nothing|nowhere|neither|nor|hardly|scarcely|cannot)\b|n['’]t\b", re.IGNORECASE
    ),
    "passive": re.compile(
        r"(?:\b(?:am|is|are|was|were|be|been|being|gets?|got|getting)|n['’]t)(?: (?:not|also|never|always|\w+ly))* "
        r"(?!(?:need|indeed|speed|seed|red|bed|feed|even|often|then|when|seven|children|women|men|open|golden)\b)"
        r"(?:\w+(?:ed|en|wn|ght)|put|cut|hit|sent|told|sold|said|made|paid|kept|held|left|lost|met|built|read|done|gone|"
        r"found|sung|hurt|shot|fed|led|won|begun|felt|heard|laid|meant|set|shut|struck|swum|torn|worn|born)\b",
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


@dataclass(frozen=True)
class Predictions:
    """Those of one run on one split, in the order of the data."""

    texts: list[str]  # the two of a pair with " | " between them
    labels: np.ndarray  # (n,) class numbers
    predictions: np.ndarray  # (n,) class numbers
    scores: np.ndarray  # (n, classes), before softmax

    @classmethod
    def of(cls, table: pa.Table, task: Task, split: str) -> "Predictions":
        """From the table of predictions.parquet. Raises InputError for a regression, or a split without labels."""
        if task.classes == 1:
            raise InputError(
                f"{task.title} is a regression task; error analysis needs a classification task. Choose another task."
            )
        table = table.filter(pc.equal(table["split"], split)).sort_by("row")
        if not len(table) or table["label"].null_count:
            raise InputError(
                f"The predictions of {task.title} have {counted(len(table), 'row')} of split {split!r}, "
                f"{table['label'].null_count} without "
                f"a label; expected labelled ones of {', '.join(task.validation)}. Choose such a split."
            )
        scores = pc.list_flatten(table["scores"]).to_numpy().reshape(len(table), task.classes)
        texts = [" | ".join(texts) for texts in zip(*(table[name].to_pylist() for name in task.columns), strict=True)]
        return cls(texts, table["label"].to_numpy(), table["prediction"].to_numpy(), scores)


def analyse(task: Task, tables: Sequence[pa.Table]) -> dict[str, dict]:
    """All of this module but the learning curve, by validation split, of the runs (seeds) of a task.

    `run` is which of the tables has the median score (the lower of the two in the middle): all but `seeds` is told of it.
    """
    found = {}
    for split in task.validation:
        runs = [Predictions.of(table, task, split) for table in tables]
        order = np.argsort([metrics.score(task.metrics[0], run.labels, run.predictions) for run in runs], kind="stable")
        median = int(order[(len(runs) - 1) // 2])
        it = runs[median]
        found[split] = {
            "run": median,
            "by_length": by_length(it.texts, it.labels, it.predictions, task.labels),
            "by_kind": by_kind(it.texts, it.labels, it.predictions, task.labels),
            "errors": errors(it.texts, it.labels, it.predictions, it.scores, task.labels),
            "cutoffs": cutoffs(it.labels, it.scores, task.labels) if task.classes == 2 else [],
            "seeds": seeds_agreement(it.texts, it.labels, [run.scores for run in runs], task.labels),
            "notes": [ROUGH, HINDSIGHT] if task.classes == 2 else [ROUGH],
        }
    return found


def describe(labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> dict:
    """What a row tells of some examples: how many, Matthews with its interval, accuracy, and the shares of classes.

    Of two classes the second one's shares are told ("acceptable", "predicted acceptable"), of more all of them.
    """
    shown = list(enumerate(names))[1 if len(names) == 2 else 0 :]
    columns = (
        "matthews",
        "interval",
        "accuracy",
        *(f"{p}{name}" for _, name in shown for p in ("", "predicted ")),
        "note",
    )
    if not len(labels):
        return {"examples": 0} | dict.fromkeys(columns)
    shares = [_percent(values == number) for number, _ in shown for values in (labels, predictions)]
    numbers = (
        round(metrics.score("matthews", labels, predictions), 2),
        [round(end, 2) for end in metrics.bootstrap("matthews", labels, predictions)],
        _percent(labels == predictions),
        *shares,
        metrics.note("matthews", labels, predictions),
    )
    return {"examples": len(labels)} | dict(zip(columns, numbers, strict=True))


def _percent(chosen: np.ndarray) -> float:
    return round(100 * float(np.mean(chosen)), 2)


def by_length(
    texts: Sequence[str], labels: np.ndarray, predictions: np.ndarray, names: Sequence[str], bins: int = BINS
) -> list[dict]:
    """A row for each range of lengths in words, of about as many examples each, and one for all."""
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    words = np.array([len(WORD.findall(text)) for text in texts])
    ends = np.unique(np.quantile(words, np.arange(1, bins + 1) / bins, method="inverted_cdf"))
    bin_of, rows = np.searchsorted(ends, words), []
    for number in range(len(ends)):
        chosen = bin_of == number
        fewest, most = int(words[chosen].min()), int(words[chosen].max())
        name = f"{fewest} to {most}" if fewest < most else f"{fewest}"
        rows.append({"words": name, **describe(labels[chosen], predictions[chosen], names)})
    return [*rows, {"words": "all", **describe(labels, predictions, names)}]


def kinds_of(text: str) -> list[str]:
    """What a sentence has, of KINDS; or that it has none of these."""
    return [kind for kind, pattern in KINDS.items() if pattern.search(text)] or [OTHERS]


def by_kind(texts: Sequence[str], labels: np.ndarray, predictions: np.ndarray, names: Sequence[str]) -> list[dict]:
    """A row for each kind of sentence, the worst scored first, and one for all.

    `difference` is Matthews of these minus that of all others, with an interval: one that holds 0 tells nothing.
    `example` is a sentence that has little else.
    """
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    kinds, rows = [set(kinds_of(text)) for text in texts], []
    for kind in (*KINDS, OTHERS):
        has = np.array([kind in found for found in kinds], dtype=bool)
        example = texts[min(np.flatnonzero(has), key=lambda row: len(kinds[row]))] if has.any() else None
        row = {"kind": kind, **describe(labels[has], predictions[has], names)}
        rows.append(row | _difference(labels, predictions, has) | {"example": example})
    rows.sort(key=lambda row: np.inf if row["matthews"] is None else row["matthews"])
    whole = describe(labels, predictions, names) | {"difference": None, "difference_interval": None, "example": None}
    return [*rows, {"kind": "all", **whole}]


def _difference(labels: np.ndarray, predictions: np.ndarray, has: np.ndarray) -> dict:
    if has.all() or not has.any():
        return {"difference": None, "difference_interval": None}
    groups = [(labels[chosen], predictions[chosen]) for chosen in (has, ~has)]
    with_it, without = (metrics.score("matthews", *group) for group in groups)
    drawn = [metrics.resampled("matthews", *group, seed=seed) for seed, group in enumerate(groups)]
    interval = np.percentile(drawn[0] - drawn[1], metrics.INTERVAL)
    return {
        "difference": round(with_it - without, 2),
        "difference_interval": [round(float(end), 2) for end in interval],
    }


def errors(
    texts: Sequence[str],
    labels: np.ndarray,
    predictions: np.ndarray,
    scores: np.ndarray,
    names: Sequence[str],
    shown: int = SHOWN,
) -> list[dict]:
    """A row for each class taken for each other: how many, of how many, and the most confident ones.

    A margin is the score of the predicted class minus that of the true one, before softmax; `margin` is their median.
    """
    labels, predictions, rows = np.asarray(labels), np.asarray(predictions), []
    wrong = int(np.count_nonzero(labels != predictions))
    margins = _at(scores, predictions) - _at(scores, labels)
    for true, taken in itertools.permutations(range(len(names)), 2):
        found = np.flatnonzero((labels == true) & (predictions == taken))
        of, worst = int(np.count_nonzero(labels == true)), found[np.argsort(-margins[found], kind="stable")][:shown]
        rows.append(
            {
                "error": f"{names[true]}, taken for {names[taken]}",
                "examples": len(found),
                "of": of,
                "rate": round(100 * len(found) / of, 2) if of else None,
                "share_of_errors": round(100 * len(found) / wrong, 2) if wrong else None,
                "margin": round(float(np.median(margins[found])), 3) if len(found) else None,
                "most_confident": [
                    {"row": int(row), "text": texts[row], "margin": round(float(margins[row]), 3)} for row in worst
                ],
            }
        )
    return rows


def _at(scores: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The score of one class of each example, as a wide float."""
    return np.take_along_axis(np.asarray(scores, dtype=float), np.asarray(classes).astype(int)[:, None], axis=1)[:, 0]


def cutoffs(labels: np.ndarray, scores: np.ndarray, names: Sequence[str]) -> list[dict]:
    """Whether a two-class model orders examples badly or only cuts in the wrong place: scores at three cutoffs.

    The cutoff is on the second class's score minus the first's, before softmax; the model's own is 0. `auc` is the chance
    in percent that one of the second class is put above one of the first: it knows no cutoff (None with one class only).
    """
    from sklearn.metrics import roc_auc_score

    labels, margins = np.asarray(labels), _at(scores, np.ones(len(labels))) - _at(scores, np.zeros(len(labels)))
    possible = np.unique(margins)
    possible = np.append(possible, np.nextafter(possible[-1], np.inf))  # above all: none is taken for the second class
    taken = len(labels) - np.searchsorted(np.sort(margins), possible)
    right = np.count_nonzero(labels == 1) - np.searchsorted(np.sort(margins[labels == 1]), possible)
    best = np.argmax(metrics.from_counts("matthews", _tables(labels, taken, right)))
    even = np.argmin(np.abs(taken - np.count_nonzero(labels == 1)))
    auc = round(100 * float(roc_auc_score(labels, margins)), 2) if len(np.unique(labels)) == 2 else None
    found = {
        "the model's own": (0.0, margins > 0),
        f"as many {names[1]} as there are": (possible[even], margins >= possible[even]),
        "the best in hindsight": (possible[best], margins >= possible[best]),
    }
    return [
        {"cutoff": name, "at": round(float(at), 3), **describe(labels, predictions.astype(int), names), "auc": auc}
        for name, (at, predictions) in found.items()
    ]


def _tables(labels: np.ndarray, taken: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Confusion tables (cutoffs, 2, 2) from how many are taken for the second class, and how many of them rightly."""
    positive = np.count_nonzero(labels == 1)
    false = taken - right
    table = [[len(labels) - positive - false, false], [positive - right, right]]
    return np.moveaxis(np.array(table), -1, 0)


def seeds_agreement(
    texts: Sequence[str],
    labels: np.ndarray,
    scores: Sequence[np.ndarray],
    names: Sequence[str],
    shown: int = SHOWN,
) -> list[dict]:
    """How many examples all, some and none of the runs get right: a row for each number of them, all right first.

    What no seed gets right is the model's error, not chance; of each row the examples furthest on the wrong side are shown.
    """
    labels = np.asarray(labels).astype(int)
    predictions_RN = np.array([np.argmax(run, axis=1) for run in scores])
    margins = np.mean([_at(run, run.argmax(axis=1)) - _at(run, labels) for run in map(np.asarray, scores)], axis=0)
    right, rows = (predictions_RN == labels).sum(axis=0), []
    classes = list(enumerate(names))[1 if len(names) == 2 else 0 :]
    for count in range(len(scores), -1, -1):
        found = np.flatnonzero(right == count)
        worst = found[np.argsort(-margins[found], kind="stable")][:shown] if count < len(scores) else found[:0]
        rows.append(
            {
                "right": f"{count} of {len(scores)}",
                "examples": len(found),
                "share": round(100 * len(found) / len(labels), 2),
                **{name: _percent(labels[found] == number) if len(found) else None for number, name in classes},
                "most_wrong": [
                    {
                        "row": int(row),
                        "text": texts[row],
                        "label": names[labels[row]],
                        "margin": round(float(margins[row]), 3),
                    }
                    for row in worst
                ],
            }
        )
    return rows


def learning_curve(runs: Iterable[dict]) -> list[dict]:
    """Score against the share of the training data, from the stats of finetune runs: median and range over seeds.

    A row for each task, protocol, split, with and without pretraining, and share; from the smallest share up.
    `per_doubling` is what twice the examples brought, in points, since the row before.
    """
    groups: dict[tuple, dict[float, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        for split in run["validation"]:
            group = (run["task"], run["protocol"], run["pretrained"], split, run["metric"])
            groups[group][run["share"]].append(run)
    rows = []
    for (task, protocol, pretrained, split, metric), by_share in groups.items():
        before = None
        for share, of_share in sorted(by_share.items()):
            scores = [run["validation"][split]["metrics"][metric] for run in of_share]
            row = {
                "task": task,
                "protocol": protocol,
                "pretrained": pretrained,
                "split": split,
                "metric": metric,
                "share": share,
                "train_examples": round(share * of_share[0]["train_examples"]),
                "seeds": len(scores),
                "median": round(statistics.median(scores), 2),
                "low": round(min(scores), 2),
                "high": round(max(scores), 2),
                "majority": round(of_share[0]["validation"][split]["majority"][metric], 2),
                "per_doubling": None,
            }
            if before:
                doublings = np.log2(share / before["share"])
                row["per_doubling"] = round(float((row["median"] - before["median"]) / doublings), 2)
            rows.append(before := row)
    return rows
