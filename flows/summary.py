"""Summaries of artifacts for listings, logs and messages: the most telling numbers and path. Checks of names.

It imports nothing slow, so that every command can use it.
"""

import difflib
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from model.errors import InputError
from model.wording import counted, printable

OTHER_STAGES = ("evaluate", "compare")  # no part of a recipe
SHOWN_TASKS = 3  # of a report without an average
# values that most rows of a table of scores have
USUAL = {"verdict": "", "no pretraining": "", "share": 1.0, "partial data": False}
WEAK = " (≤ majority)"  # of a score that is no better than always answering the most frequent class


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """A question with the most similar name, followed by a space; empty if no name is similar."""
    close = difflib.get_close_matches(str(name), names, 1)
    return f"Did you mean {close[0]}? " if close else ""


def check_name(kind: str, name: str, names: Iterable[str], rest: str = "") -> None:
    """Raise InputError if a name is not one of `names`. `rest`: what else is accepted."""
    if name not in names:
        raise InputError(f"There is no {kind} {name!r}. {did_you_mean(name, names)}Expected {', '.join(names)}{rest}.")


def telling(rows: list[dict]) -> list[str]:
    """The columns in which some row differs from the usual value."""
    return [name for name in rows[0] if name not in USUAL or any(row[name] != USUAL[name] for row in rows)]


def relative(path: Path) -> Path:
    """The path relative to the working directory, if it is in there."""
    with suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def counts(stats: dict) -> str:
    """The most telling numbers of a stage's statistics, chosen by their names; empty for unknown or odd statistics."""
    with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # a listing shows the other artifacts
        for name, summarize in BY_NAME.items():
            if name in stats:
                return summarize(stats)
    return ""


def _kept(stats: dict) -> str:
    kept = stats["documents"]
    dropped = sum(of["documents"] for of in stats["dropped"].values())
    if not stats.get("checked", True):
        return f"{counted(kept, 'document')}, unchecked"
    return f"{kept:,} of {counted(kept + dropped, 'document')} kept"


def _documents(stats: dict) -> str:
    documents = counted(stats["documents"], "document")
    lost = sum(stats.get("lost", {}).values())
    return f"{documents}, {lost:,} lost" if lost else documents


def _validation(stats: dict) -> str:
    metric = stats["metric"]
    splits = stats["validation"].values()
    scores = " / ".join(f"{of['metrics'][metric]:.1f}" for of in splits)
    is_weak = all(of["intervals"][metric][0] <= of["majority"][metric] for of in splits)
    return f"{stats['task']} {scores} {metric}{WEAK if is_weak else ''}"


def _report(stats: dict) -> str:
    if stats["average"] is not None:
        return f"GLUE average {stats['average']:.1f}"
    rows = [row for row in stats["table"] if row["share"] == 1]
    shown = []
    for row in rows[:SHOWN_TASKS]:
        weak = WEAK if row["verdict"] else ""
        shown.append(f"{row['task']} {row['score']:.1f}{weak}")
    rest = len(rows) - SHOWN_TASKS
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _loss(loss: dict) -> str:
    error = loss.get("standard_error")
    spread = "" if error is None else f" ± {error:.4f}"
    return f"{loss['value']:.4f}{spread} nats per byte"


def _pairs(stats: dict) -> str:
    from tasks.glue.pair_scores import main_accuracy  # loads numpy

    accuracy = main_accuracy(stats)
    error = accuracy.error_in_words()
    spread = f" ± {error}" if error else ""
    return f"{stats['set']} {accuracy.value:.1f}{spread}"


def _runs(stats: dict) -> str:
    runs = counted(stats["runs"], "run")
    return f"{runs}, {stats['failed']} failed" if stats["failed"] else runs


# The first of these names that the statistics have decides.
BY_NAME: dict[str, Callable[[dict], str]] = {
    "failed": _runs,
    "nats_per_byte": lambda stats: _loss(stats["nats_per_byte"]),
    "heldout_loss": lambda stats: f"held-out loss {_loss(stats['heldout']['nats_per_byte'])}",
    "adopted": lambda stats: f"{stats['parameters']:,} parameters, adopted from a folder",
    "validation": _validation,
    "same_sentences": _pairs,
    "average": _report,
    "whole_words": lambda stats: f"{stats['entries']:,} entries",
    "sequences": lambda stats: counted(stats["sequences"], "sequence"),
    "dropped": _kept,
    "documents": _documents,
}


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Nested dicts as {dotted path: text}."""
    if isinstance(value, str):
        return {path: printable(value)}
    if not isinstance(value, dict):
        return {path: json.dumps(value)}
    found: dict[str, str] = {}
    for name, inner in value.items():
        found |= flat(inner, f"{path}.{name}" if path else name)
    return found
