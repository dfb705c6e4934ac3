"""What to know before comparing the runs of a study. The template of the page has the sentences."""

import math
from typing import TYPE_CHECKING, Any

from model.wording import budget
from tasks.reports.losses import reads_no_context, vocabularies_differ
from tasks.reports.rows import RunMeans

if TYPE_CHECKING:
    import pandas as pd

EQUAL = 0.02  # runs whose operations differ by less have equal ones, as batches are whole


def cautions(rows: "pd.DataFrame", means: list[RunMeans]) -> dict[str, Any]:
    """What to know before comparing the runs; the template has the sentences."""
    done = rows[rows["model"].ne("")]
    return {
        **loss_cautions(means),
        **head_cautions(done),
        **budget_cautions(done[done["trained"]]),
        **text_cautions(done),
        "devices": sorted(set(done["device"])),
    }


def loss_cautions(means: list[RunMeans]) -> dict[str, Any]:
    """The run that the others are compared with, and what limits the comparison of losses."""
    finished = [line for line in means if line.seeds]
    measured = [line for line in finished if math.isfinite(line.loss)]
    compared = measured or finished
    by_length = sorted(compared, key=lambda line: (line.length_nats, line.run))
    return {
        "base": compared[0].run,
        "early": [line.run for line in measured if is_early(line)],
        "lengths": (by_length[0], by_length[-1]),
        "has_bounds": have_bounds(means),
        "untrained": [line.run for line in measured if not line.trained],
    }


def is_early(line: RunMeans) -> bool:
    """Whether a run was trained, but too shortly to read context."""
    return line.trained and bool(reads_no_context(line.loss, line.length_nats, line.value("by_frequencies")))


def head_cautions(done: "pd.DataFrame") -> dict[str, Any]:
    """The runs that began with a new head: those not trained, and the others. `done`: the rows with a model."""
    new = done[done["new_head"]]
    return {
        "headless": list(dict.fromkeys(new["run"][~new["trained"]])),
        "new_heads": list(dict.fromkeys(new["run"][new["trained"]])),
    }


def budget_cautions(trained: "pd.DataFrame") -> dict[str, Any]:
    """The budgets, and whether the runs did unequal work. `trained`: the rows of trained models."""
    budgets = sorted(set(zip(trained["budget_unit"], trained["budget"], strict=True)))
    operations = trained["operations"]
    return {
        "budgets": [budget(amount, kind) for kind, amount in budgets],
        "in_hours": set(trained["budget_unit"]) == {"hours"},
        "unequal_operations": operations.max() > (1 + EQUAL) * operations.min(),
    }


def text_cautions(done: "pd.DataFrame") -> dict[str, Any]:
    """What to know of the text that losses are measured on. `done`: the rows with a model."""
    is_evaluated = done["evaluation"].ne("").any()
    return {
        "common_text": is_evaluated and done["text"].nunique() > 1,
        "short": done["short"].any() and is_evaluated,
        "doubts": sorted(set(done["doubt"]) - {""}),
    }


def have_bounds(means: list[RunMeans]) -> bool:
    """Whether the runs have different vocabularies, so that a loss says no more than bounds of the true one."""
    lengths = [line.length_nats for line in means if line.seeds and math.isfinite(line.loss)]
    return bool(lengths) and vocabularies_differ(min(lengths), max(lengths))
