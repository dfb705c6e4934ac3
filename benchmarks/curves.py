"""Held-out losses of finished runs: their means, where one recipe passes another, a table and a picture."""

import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
from common import aligned

from model.heldout import UNITS, Heldout, ratio
from model.pretraining import EVALUATIONS

TENTHS = [number / EVALUATIONS for number in range(EVALUATIONS + 1)]


def passes(evaluations: list[dict], loss: float) -> float | None:
    """The fraction of the budget at which the held-out loss first is so low, by straight lines; or None."""
    for before, after in pairwise(evaluations):
        high, low = before["heldout_loss"], after["heldout_loss"]
        if low <= loss:
            part = (high - loss) / (high - low) if high > loss else 0.0
            return before["fraction"] + part * (after["fraction"] - before["fraction"])
    return None


def spread(values: list[float]) -> dict:
    """Mean and sample standard deviation (None for a single value)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}


def compare(results: dict[str, list[dict]]) -> dict[str, dict]:
    """Compare recipes with the first one.

    For each recipe: its budget as a fraction of the first one's, the loss at each tenth of it, the fraction of the
    first one's budget at which it passes that one's last loss, tokens and seconds.
    """
    first = next(iter(results.values()))
    ends = [run["evaluations"][-1]["heldout_loss"] for run in first]
    compared = {}
    for name, runs in results.items():
        curves = [[[e[axis] for e in run["evaluations"]] for axis in ("fraction", "heldout_loss")] for run in runs]
        losses = np.array([np.interp(TENTHS, *curve) for curve in curves])
        share = runs[0]["training"]["budget"] / first[0]["training"]["budget"]
        passed = [passes(run["evaluations"], end) for run, end in zip(runs, ends, strict=True)]
        passed = [fraction and share * fraction for fraction in passed]
        there = [fraction for fraction in passed if fraction is not None]
        compared[name] = {
            "share": share,
            "heldout_loss": [spread(column) for column in losses.T.tolist()],
            "passes": (spread(there) if there else {}) | {"seeds": len(there), "fractions": passed},
            **{what: spread([run[what] for run in runs]) for what in ("tokens", "seconds")},
            "runs": runs,
        }
    return compared


def ends(results: dict[str, list[dict]], heldout: Heldout) -> dict[str, dict]:
    """For each recipe, on all held-out tokens: nats per token, character and byte.

    Also the difference to the first recipe in nats per byte, with the standard error over documents of the means over
    runs.
    """
    means = {
        name: np.mean([run["heldout"]["nats_of_documents"] for run in runs], axis=0) for name, runs in results.items()
    }
    first = next(iter(means.values()))
    by_recipe = {}
    for name, runs in results.items():
        by_recipe[name] = {
            f"nats_per_{unit}": spread([r["heldout"][f"nats_per_{unit}"]["value"] for r in runs]) for unit in UNITS
        }
        by_recipe[name]["difference"] = ratio(means[name] - first, heldout.documents[:, UNITS["byte"]])
    return by_recipe


def end_table(ends: dict[str, dict]) -> str:
    """The result of `ends` as text, with a column for each recipe."""
    rows = [["", *ends]]
    rows += [[f"nats per {unit}", *(cell(one[f"nats_per_{unit}"], 4) for one in ends.values())] for unit in UNITS]
    away = [one["difference"].values() for one in ends.values()][1:]
    cells = [f"{value:+.4f}" + ("" if error is None else f" ± {error:.4f}") for value, error in away]
    return aligned([*rows, ["difference per byte, ± over documents", "", *cells]])


def cell(value: dict, digits: int) -> str:
    """A mean, with its deviation if there is one."""
    deviation = "" if value["deviation"] is None else f" ± {value['deviation']:.{digits}f}"
    return f"{value['mean']:,.{digits}f}{deviation}"


def table(comparison: dict) -> str:
    """The comparison as text, with a column for each recipe."""
    recipes, seeds = comparison["recipes"], comparison["seeds"]
    rows = [["", *recipes], ["budget, of the first's", *(f"{one['share']:.2f}" for one in recipes.values())]]
    for number, tenth in enumerate(TENTHS):
        rows.append([f"loss at {tenth:.0%} of it", *(cell(one["heldout_loss"][number], 3) for one in recipes.values())])
    rows.append(["passes the first's end at"])
    for one in recipes.values():
        where, count = one["passes"], one["passes"]["seeds"]
        of = "" if count == seeds else f" ({count} of {seeds})"
        rows[-1].append(cell(where, 3) + of if count else "never")
    rows.append(["tokens", *(cell(one["tokens"], 0) for one in recipes.values())])
    rows.append(["seconds on the clock", *(cell(one["seconds"], 0) for one in recipes.values())])
    about = f"{comparison['budget']:g} {comparison['budget_unit']} on {comparison['machine']['device']}"
    spread = f"{seeds} seeds: mean ± sample standard deviation" if seeds > 1 else "one seed"
    return "\n".join([f"{about}; {spread}; straight lines between evaluations", aligned(rows)])


def picture(comparison: dict, path: Path) -> None:
    """Plot the means over the budget, with a band of one deviation to either side."""
    from matplotlib.figure import Figure  # not pyplot: no display

    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.set(
        xlabel=f"fraction of {comparison['budget']:g} {comparison['budget_unit']}",
        ylabel="held-out loss, nats per token",
    )
    for name, one in comparison["recipes"].items():
        means, widths = (np.array([e[what] or 0.0 for e in one["heldout_loss"]]) for what in ("mean", "deviation"))
        places = one["share"] * np.array(TENTHS)
        axes.plot(places, means, marker="o", markersize=3, label=name)
        axes.fill_between(places, means - widths, means + widths, alpha=0.2)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
