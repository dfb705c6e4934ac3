"""What sections of reports and cards have in common: lookups, marks and notes."""

from collections.abc import Iterable

from model.quantities import budget, counted, span
from model.settings import Finetuning
from tasks.glue import metrics
from tasks.reports.markdown import Marked, escape
from tasks.reports.scores import (
    NAMES,
    weak,
)

WEAK = "†"  # marks a score that doesn't beat the majority baseline
METRICS = {name: about.removesuffix(" correlation") for name, about in metrics.NAMES.items()}
TITLES = {
    "cramming": "GLUE by the rules of cramming",
    "modern": "GLUE by today's protocol (not by the rules)",
}
ROLES = {
    "cramming": "RTE, SST-2, QNLI, MNLI: accuracy; QQP, MRPC: F1; STS-B: Pearson; CoLA: Matthews; all times 100.",
    "modern": "Metrics as above. The published averages are of eight numbers, MNLI counted once, with metrics of their authors' "
    "choice: compare them with ours with care.",
}


def stage_of(lineage: dict[str, dict], name: str) -> dict | None:
    """The manifest of a stage, if it is known."""
    return next((about for about in lineage.values() if about["stage"] == name), None)


def picture(name: str, what: str) -> str:
    """A picture that lies beside the page."""
    return f"![{escape(what)}]({name})"


def short(number: float) -> str:
    """A large number in a few characters."""
    for unit, of in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if number >= of:
            return f"{number / of:.1f}{unit}"
    return f"{number:g}"


def budget_of(params: dict) -> str:
    """The budget of a pretrain stage in words."""
    return budget(params["budget"], params["budget_unit"])


def marked(text: str, partial: bool, beats: bool = True) -> Marked:
    """With an asterisk where it is of partial data, and a dagger where it is a score that doesn't beat the baseline."""
    return Marked(escape(text) + ("\\*" if partial else "") + ("" if beats else WEAK))


def weak_notes(rows: Iterable[dict], mark: str = f"{WEAK} ") -> list[str]:
    """Which scores don't beat the majority baseline; `mark` is what they have in a table."""
    return [f"{mark}{what.capitalize()}: {', '.join(shown)}." for what, shown in weak(rows).items()]


def spread_words(low: float, high: float, seeds: int) -> str | None:
    """The range of the seeds; None of one seed, which has none."""
    return span(low, high) if seeds > 1 else None


def settings(params: list[dict]) -> dict:
    """How the runs of a protocol finetuned: each field of `Finetuning` with its value, or with that of each task."""
    told = {}
    for name in (name for name in Finetuning.model_fields if params):
        of_task = {run["task"]: run[name] for run in params}
        told[name] = of_task if len(set(of_task.values())) > 1 else next(iter(of_task.values()))
    return told


def as_words(value: object) -> str:
    """A setting's value: numbers without trailing zeros."""
    return value if isinstance(value, str) else f"{value:g}"


def escaped_note(note: str) -> str:
    """A note of ours, in which brackets are not links; its emphasis stays."""
    return note.replace("[", "\\[").replace("]", "\\]")


def partial_notes(rows: list[dict]) -> list[str]:
    """What is partial of the data of each number."""
    found = {}
    for row in rows:
        if row["partial"]:
            sizes = ", ".join(
                f"{have:,} of {counted(official, f'{split} example')}"
                for split, (have, official) in row["examples"].items()
            )
            found[row["column"]] = sizes
    return [
        f"\\* {name} is on partial data: {sizes}. It enters no average and compares with nothing published."
        for name, sizes in found.items()
    ]


def titled(note: str, task: str) -> str:
    """A note on data, which begins with the task's name, with its title in place of it."""
    rest = note.removeprefix(task)
    return f"{NAMES[task]}{rest}" if task in NAMES and rest != note else note
