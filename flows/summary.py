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
    """Raise InputError if the name is none of these names of a kind. `rest`: what else may be given."""
    if name not in names:
        raise InputError(f"There is no {kind} {name!r}. {did_you_mean(name, names)}Expected {', '.join(names)}{rest}.")


def telling(rows: list[dict]) -> list[str]:
    """The columns in which some row differs from the usual value."""
    return [name for name in rows[0] if name not in USUAL or any(row[name] != USUAL[name] for row in rows)]


def relative(path: Path) -> Path:
    """The path relative to the working directory, if it lies there."""
    with suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


def counts(stats: dict) -> str:
    """The most telling numbers of a stage's statistics, chosen by their names; empty for unknown or odd statistics."""
    with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):  # a listing shows the other artifacts
        return next((summarize(stats) for name, summarize in BY_NAME.items() if name in stats), "")
    return ""


def _kept(stats: dict) -> str:
    kept, dropped = stats["documents"], sum(of["documents"] for of in stats["dropped"].values())
    if not stats.get("checked", True):
        return f"{counted(kept, 'document')}, unchecked"
    return f"{kept:,} of {counted(kept + dropped, 'document')} kept"


def _documents(stats: dict) -> str:
    lost = sum(stats.get("lost", {}).values())
    return counted(stats["documents"], "document") + (f", {lost:,} lost" if lost else "")


def _validation(stats: dict) -> str:
    metric, splits = stats["metric"], stats["validation"].values()
    scores = " / ".join(f"{of['metrics'][metric]:.1f}" for of in splits)
    weak = all(of["intervals"][metric][0] <= of["majority"][metric] for of in splits)
    return f"{stats['task']} {scores} {metric}{WEAK if weak else ''}"


def _report(stats: dict) -> str:
    if stats["average"] is not None:
        return f"GLUE average {stats['average']:.1f}"
    rows = [row for row in stats["table"] if row["share"] == 1]
    shown = [f"{row['task']} {row['score']:.1f}{WEAK if row['verdict'] else ''}" for row in rows[:SHOWN_TASKS]]
    return ", ".join(shown) + (f" and {len(rows) - SHOWN_TASKS} more" if rows[SHOWN_TASKS:] else "")


def _loss(loss: dict) -> str:
    error = loss.get("standard_error")
    return f"{loss['value']:.4f}" + ("" if error is None else f" ± {error:.4f}") + " nats per byte"


# The first of these names that the statistics have decides.
BY_NAME: dict[str, Callable[[dict], str]] = {
    "failed": lambda stats: counted(stats["runs"], "run") + (f", {stats['failed']} failed" if stats["failed"] else ""),
    "nats_per_byte": lambda stats: _loss(stats["nats_per_byte"]),
    "heldout_loss": lambda stats: f"held-out loss {_loss(stats['heldout']['nats_per_byte'])}",
    "adopted": lambda stats: f"{stats['parameters']:,} parameters, adopted from a folder",
    "validation": _validation,
    "average": _report,
    "whole_words": lambda stats: f"{stats['entries']:,} entries",
    "sequences": lambda stats: counted(stats["sequences"], "sequence"),
    "dropped": _kept,
    "documents": _documents,
}


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Nested dicts as {dotted path: text}."""
    if isinstance(value, dict):
        inner = (flat(of_name, f"{path}.{name}" if path else name) for name, of_name in value.items())
        return {name: text for part in inner for name, text in part.items()}
    return {path: json.dumps(value) if not isinstance(value, str) else printable(value)}
