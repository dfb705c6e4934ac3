"""Pictures of what the stages counted."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT, DROPPED, ACCENT = "#4c78a8", "#e45756", "#54a24b"
SERIES = (KEPT, DROPPED, ACCENT, "#b279a2", "#f58518", "#72b7b2", "#9d755d", "#8a8a8a")
INK = "#010203"  # in a drawing: whatever colour the text around it has, so that it is read on dark pages too
DRAWING = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
POINTS = 200  # of a curve: more can't be told apart


def _figure() -> "Figure":
    from matplotlib.figure import Figure  # not pyplot: no global state, no display; and not before it is needed

    return Figure(figsize=(7, 3.6))


def _save(figure: "Figure", path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})  # the same picture has the same bytes


def ratio_histogram(ratios: np.ndarray, kept: np.ndarray, threshold: float | None, path: Path) -> None:
    """Documents by tokens per character, kept and dropped, and the threshold if there is one."""
    figure = _figure()
    axes = figure.add_subplot()
    top = max(float(np.quantile(ratios, 0.995)) * 1.1, min((threshold or 0) * 1.2, 1.0)) if len(ratios) else 1.0
    bins = np.linspace(0, top, 81)
    shown = np.minimum(ratios, top)
    axes.hist([shown[kept], shown[~kept]], bins=bins, stacked=True, color=[KEPT, DROPPED], label=["kept", "dropped"])
    if threshold and threshold <= top:
        axes.axvline(threshold, color="black", linewidth=1, linestyle="--", label=f"threshold {threshold:g}")
    axes.set(xlabel="tokens per character (the last bin holds all above)", ylabel="documents")
    axes.legend(frameon=False, loc="upper right")  # fixed: to look for the best place takes long
    _save(figure, path)


def loss_curve(rows: dict[str, np.ndarray], evaluations: list[dict], path: Path) -> None:
    """Training and held-out loss against tokens, and the learning rate."""
    figure = _figure()
    axes = figure.add_subplot()
    axes.plot(rows["tokens"], rows["loss"], color=KEPT, linewidth=0.8, label="training")
    held = [(e["tokens"], e["heldout_loss"]) for e in evaluations]
    axes.plot(*zip(*held, strict=True), color=DROPPED, marker="o", markersize=3, label="held out")
    axes.set(xlabel="tokens", ylabel="loss, nats per token")
    rate = axes.twinx()
    rate.plot(rows["tokens"], rows["lr"], color=ACCENT, linewidth=0.8, linestyle=":")
    rate.set_ylabel("learning rate (dotted)")
    axes.legend(frameon=False, loc="upper right")  # fixed: to look for the best place takes long
    _save(figure, path)


@contextmanager
def _drawing(path: Path, height: float = 3.2) -> Iterator["Figure"]:
    """A figure that is saved as an SVG of the width of a telephone."""
    import matplotlib
    from matplotlib.figure import Figure

    own_ids = {"svg.hashsalt": path.name}  # the same in each run, and other ones in other pictures
    with matplotlib.rc_context(DRAWING | own_ids):
        figure, text = Figure(figsize=(5.2, height), layout="constrained"), io.StringIO()
        yield figure
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    named = text.getvalue().replace(INK, "currentColor")
    # ids of groups would stand twice on a page with several pictures
    path.write_text(re.sub(r' id="[\w.]+_\d+"', "", named))


def thinned(values: np.ndarray, points: int = POINTS) -> np.ndarray:
    """Means of about so many stretches of a curve."""
    return np.array([part.mean() for part in np.array_split(values, min(points, len(values)))])


def scores(
    names: Sequence[str], ours: Sequence[dict | None], others: dict[str, Sequence[float | None]], path: Path
) -> None:
    """Scores with the range of their seeds, a line a task, and those of others beside them.

    `ours`: the `score`, `range` and `interval` of each name. `others`: theirs by model, in the same order.
    """
    with _drawing(path, 1.3 + 0.36 * len(names)) as figure:
        axes, places = figure.add_subplot(), np.arange(len(names))
        for place, row in zip(places, ours, strict=True):
            if row:
                axes.plot(row["interval"], [place] * 2, color=KEPT, linewidth=5, alpha=0.3, solid_capstyle="butt")
                axes.plot(row["range"], [place] * 2, color=KEPT, linewidth=2)
        found = [(place, row["score"]) for place, row in zip(places, ours, strict=True) if row]
        axes.plot([s for _, s in found], [p for p, _ in found], "o", color=KEPT, markersize=6, label="this run")
        for i, (name, values) in enumerate(others.items()):
            points = [(p, v) for p, v in zip(places, values, strict=True) if v is not None]
            style = {"marker": "D^sv"[i % 4], "color": SERIES[1 + i], "markerfacecolor": "none", "linestyle": ""}
            axes.plot([v for _, v in points], [p for p, _ in points], markersize=5, label=name, **style)
        axes.set(yticks=places, yticklabels=names, ylim=(len(names) - 0.5, -0.5))
        axes.grid(axis="x", color=INK, alpha=0.15)
        figure.legend(frameon=False, loc="outside lower left", ncols=1, fontsize=9)


def lines(
    curves: dict[str, tuple[np.ndarray, np.ndarray]],
    x: str,
    y: str,
    path: Path,
    marked: Sequence[str] = (),
    ticks: Sequence[float] = (),
) -> None:
    """Curves by name, each x and y; those that are `marked` with their points. `ticks`: x is logarithmic, and has these."""
    with _drawing(path) as figure:
        axes = figure.add_subplot()
        for (name, (xs, ys)), colour in zip(curves.items(), SERIES * len(curves), strict=False):
            shape = {"marker": "o", "markersize": 4} if name in marked else {}
            axes.plot(xs, ys, color=colour, linewidth=1.4, label=name, **shape)
        axes.set(xlabel=x, ylabel=y)
        if ticks:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
        axes.grid(color=INK, alpha=0.15)
        figure.legend(frameon=False, loc="outside lower left", ncols=2, fontsize=9)


def speed(rows: dict[str, np.ndarray], path: Path) -> None:
    """Tokens a second over the run, and the share of the rate of matrix products if it was measured."""
    with _drawing(path) as figure:
        axes = figure.add_subplot()
        hours = thinned(rows["seconds"]) / 3600
        axes.plot(hours, thinned(rows["tokens_per_second"]) / 1000, color=KEPT, linewidth=1.2)
        axes.set(xlabel="hours", ylabel="thousand tokens a second")
        axes.set_ylim(bottom=0)
        axes.grid(color=INK, alpha=0.15)
        if "mfu" in rows:
            share = axes.twinx()
            share.plot(hours, 100 * thinned(rows["mfu"]), color=ACCENT, linewidth=1, linestyle=":")
            share.set_ylabel("MFU, % (dotted)")
            share.set_ylim(0, 100)
            share.spines.right.set_visible(True)


def bars(names: Sequence[str], values: Sequence[float], x: str, path: Path) -> None:
    """A bar for each name, the first on top."""
    with _drawing(path, 0.9 + 0.36 * len(names)) as figure:
        axes = figure.add_subplot()
        axes.barh(range(len(names)), values, color=KEPT, height=0.65)
        axes.set(yticks=range(len(names)), yticklabels=names, xlabel=x)
        axes.invert_yaxis()
        axes.grid(axis="x", color=INK, alpha=0.15)
        axes.set_axisbelow(True)
