"""What reports, cards and comparisons have in common: lookups, marks and notes."""

from collections.abc import Iterable, Sequence

from model.quantities import counted
from model.settings import Finetuning
from tasks.glue import metrics
from tasks.reports.markdown import Marked, code, escape
from tasks.reports.scores import NAMES, weak

WEAK = "†"  # marks a score that doesn't beat the majority baseline
METRICS = {name: words.removesuffix(" correlation") for name, words in metrics.NAMES.items()}
TITLES = {
    "cramming": "GLUE by the rules of cramming",
    "modern": "GLUE by today's protocol (not by the rules)",
}


def stage_of(lineage: dict[str, dict], name: str) -> dict | None:
    """The manifest of a stage, None where it is missing."""
    return next((manifest for manifest in lineage.values() if manifest["stage"] == name), None)


def picture(name: str, words: str) -> str:
    """A picture in a file beside the page."""
    return f"![{escape(words)}]({name})"


def short(number: float) -> str:
    """A large number in a few characters, as in `119.6 M`."""
    for unit, size in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:g}"


def marked(score: float | str, partial: bool, beats: bool = True) -> Marked:
    """A score (or a name) with an asterisk if its data is partial, and a dagger if it doesn't beat the baseline."""
    text = f"{score:.1f}" if isinstance(score, float) else score
    return Marked(escape(text) + ("\\*" if partial else "") + ("" if beats else WEAK))


def weak_notes(rows: Iterable[dict]) -> list[str]:
    """Which scores don't beat the majority baseline, as sentences without a full stop."""
    return [f"{verdict.capitalize()}: {', '.join(scores)}" for verdict, scores in weak(rows).items()]


def partial_notes(rows: Iterable[dict]) -> list[Marked]:
    """Which numbers are on partial data, and on how much."""
    notes = []
    for row in rows:
        if row["partial"]:
            sizes = ", ".join(
                f"{have:,} of {counted(official, f'{split} example')}"
                for split, (have, official) in row["examples"].items()
            )
            notes.append(
                f"\\* {escape(row['column'])} is on partial data: {sizes}. "
                "It is left out of the averages and can't be compared with published scores."
            )
    return [Marked(note) for note in notes]


def settings(params: Sequence[dict]) -> dict:
    """How the runs of a protocol finetuned: each field of `Finetuning` with its value, or with that of each task."""
    import pandas as pd

    if not params:
        return {}
    fields = list(Finetuning.model_fields)
    of_tasks = pd.DataFrame(params, dtype=object).drop_duplicates("task", keep="last").set_index("task")[fields]
    return {
        name: values.to_dict() if values.nunique(dropna=False) > 1 else values.iloc[0]
        for name, values in of_tasks.items()
    }


def settings_rows(params: Sequence[dict]) -> list[dict]:
    """The settings as rows of a table: a column for each task where they differ."""
    values = settings(params)
    tasks = dict.fromkeys(task for value in values.values() if isinstance(value, dict) for task in value)
    rows = []
    for name, value in values.items():
        of_task = value if isinstance(value, dict) else dict.fromkeys(tasks or ["all tasks"], value)
        shown = {NAMES.get(task, task): v if isinstance(v, str) else f"{v:g}" for task, v in of_task.items()}
        rows.append({"setting": code(name), **shown})
    return rows


HELPERS = {"mark": WEAK, "marked": marked, "metric_names": METRICS, "short": short, "task_names": NAMES}
