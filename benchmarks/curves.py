"""Held-out losses of finished runs: their means, where one recipe passes another, a table and a picture."""

import statistics
from itertools import pairwise
from pathlib import Path

import numpy as np
from common import aligned

from model.heldout import SIZES, UNITS, Heldout, ratio
from model.pretraining import EVALUATIONS

TENTHS = [number / EVALUATIONS for number in range(EVALUATIONS + 1)]
AXES = {"tokens": "tokens read", "operations": "operations", "seconds": "seconds of training"}


def per_byte(run: dict) -> list[float]:
    """The held-out losses of a run's evaluations, nats per byte, with whole words masked."""
    return [evaluation["heldout_nats_per_byte"] for evaluation in run["evaluations"]]


def passes(run: dict, loss: float, axis: str) -> float | None:
    """The tokens, operations or seconds at which the held-out loss first is so low, by straight lines; or None."""
    for (before, high), (after, low) in pairwise(zip(run["evaluations"], per_byte(run), strict=True)):
        if low <= loss:
            part = (high - loss) / (high - low) if high > loss else 0.0
            return before[axis] + part * (after[axis] - before[axis])
    return None


def spread(values: list[float]) -> dict:
    """Mean and sample standard deviation (None for a single value)."""
    return {"mean": statistics.fmean(values), "deviation": statistics.stdev(values) if len(values) > 1 else None}


def passing(runs: list[dict], first: list[dict], axis: str) -> dict:
    """Where each run passes the end of the first recipe's of the same seed, as a fraction of what that one spent."""
    fractions = []
    for run, other in zip(runs, first, strict=True):
        passed = passes(run, per_byte(other)[-1], axis)
        fractions.append(None if passed is None else passed / other["evaluations"][-1][axis])
    there = [fraction for fraction in fractions if fraction is not None]
    return (spread(there) if there else {}) | {"seeds": len(there), "fractions": fractions}


def compare(results: dict[str, list[dict]]) -> dict[str, dict]:
    """Compare recipes with the first one.

    For each recipe: the loss at each tenth of its budget (nats per byte), where it passes the first one's last loss,
    by each axis, and what it spent.
    """
    first = next(iter(results.values()))
    compared = {}
    for name, runs in results.items():
        places = [[evaluation["fraction"] for evaluation in run["evaluations"]] for run in runs]
        losses = np.array([np.interp(TENTHS, at, per_byte(run)) for at, run in zip(places, runs, strict=True)])
        compared[name] = {
            "nats_per_byte": [spread(column) for column in losses.T.tolist()],
            "passes": {axis: passing(runs, first, axis) for axis in AXES},
            **{axis: spread([run["evaluations"][-1][axis] for run in runs]) for axis in AXES},
            "runs": runs,
        }
    return compared


def ends(results: dict[str, list[dict]], heldout: Heldout) -> dict[str, dict]:
    """For each recipe, on all held-out text: nats per word, character and byte.

    Also what of the nats per byte is for the numbers of pieces, and the difference to the first recipe in nats per byte,
    with the standard error over documents of the means over runs.
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
        by_recipe[name]["lengths"] = spread([run["heldout"]["length_nats_per_byte"] for run in runs])
        by_recipe[name]["difference"] = ratio(means[name] - first, heldout.documents[:, SIZES.index("bytes")])
    return by_recipe


def end_table(ends: dict[str, dict]) -> str:
    """The result of `ends` as text, with a column for each recipe."""
    rows = [["", *ends]]
    rows += [[f"nats per {unit}", *(cell(one[f"nats_per_{unit}"], 4) for one in ends.values())] for unit in UNITS]
    rows.append(
        ["of it for the numbers of pieces, at most", *(f"{one['lengths']['mean']:.4f}" for one in ends.values())]
    )
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
    rows = [["nats per byte after", *recipes]]
    for number, tenth in enumerate(TENTHS):
        rows.append([f"{tenth:.0%}", *(cell(one["nats_per_byte"][number], 4) for one in recipes.values())])
    for axis in AXES:
        rows.append([f"passes the first's end at, of its {axis}"])
        for where in (one["passes"][axis] for one in recipes.values()):
            of = "" if where["seeds"] == seeds else f" ({where['seeds']} of {seeds})"
            rows[-1].append(cell(where, 3) + of if where["seeds"] else "never")
    rows.append(["tokens", *(cell(one["tokens"], 0) for one in recipes.values())])
    rows.append(["seconds on the clock", *(cell(one["seconds"], 0) for one in recipes.values())])
    about = f"{comparison['budget']:g} {comparison['budget_unit']} on {comparison['machine']['device']}"
    spread = f"{seeds} seeds: mean ± sample standard deviation" if seeds > 1 else "one seed"
    return "\n".join([f"{about}; {spread}; straight lines between evaluations", aligned(rows)])


def picture(comparison: dict, path: Path) -> None:
    """Plot the losses of all recipes over tokens, operations and time: the means, and a line for each run."""
    from matplotlib.figure import Figure  # not pyplot: no display

    figure = Figure(figsize=(10, 3.6))
    panels = figure.subplots(1, len(AXES), sharey=True)
    for panel, (axis, label) in zip(panels, AXES.items(), strict=True):
        panel.set_xlabel(label)
        for number, (name, one) in enumerate(comparison["recipes"].items()):
            for run in one["runs"]:
                places = [evaluation[axis] for evaluation in run["evaluations"]]
                panel.plot(places, per_byte(run), color=f"C{number}", alpha=0.35, linewidth=1)
            ends = [one[axis]["mean"] * tenth for tenth in TENTHS]
            means = [value["mean"] for value in one["nats_per_byte"]]
            panel.plot(ends, means, color=f"C{number}", marker="o", markersize=3, label=name)
    panels[0].set_ylabel("held-out loss, nats per byte")
    panels[-1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def end_picture(results: dict[str, list[dict]], path: Path) -> None:
    """Plot the losses of all runs: a line for each recipe, with a dot for each run and a mark at the mean.

    A thin line goes to the left by what the numbers of pieces cost at most: the loss lies on it (model.heldout).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.8 + 0.4 * len(results)))
    panel = figure.subplots()
    for row, runs in enumerate(results.values()):
        losses = [run["heldout"]["nats_per_byte"]["value"] for run in runs]
        panel.plot(losses, [row] * len(losses), "o", color=f"C{row}", alpha=0.6)
        mean, lengths = statistics.fmean(losses), runs[0]["heldout"]["length_nats_per_byte"]
        panel.plot([mean], [row], "|", color=f"C{row}", markersize=18)
        panel.plot([mean - lengths, mean], [row, row], color=f"C{row}", linewidth=1)
    panel.set_yticks(range(len(results)), list(results))
    panel.margins(y=0.12)
    panel.invert_yaxis()
    panel.grid(axis="x", alpha=0.3)
    panel.set_xlabel("held-out loss, nats per byte")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
