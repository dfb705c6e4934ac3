"""Pictures of scores, losses, speed and data."""

import io
import math
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from tasks.glue.pair_scores import CHANCE, METRIC_WORDS, Accuracy
from tasks.reports.rows import Bar, PairLine, ScoreRow, StudyScore

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator

    from tasks.reports.law import LossLaw

KEPT = "#4c78a8"
DROPPED = "#e45756"
ACCENT = "#54a24b"
GREY = "#8a8a8a"
SERIES = (KEPT, DROPPED, ACCENT, "#b279a2", "#f58518", "#72b7b2", "#9d755d", GREY)
STYLES = ("-", "--", ":", "-.")  # of more curves than colours
MARKERS = "D^sv"  # of other models
PETA = 1e15
INK = "#010203"  # in a drawing: replaced by the colour of the text around it, for dark pages
DRAWING: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "font.size": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.spines.top": False,
    "axes.spines.right": False,
}
POINTS = 200  # of a curve: more look the same
NAME_WIDTH = 24  # characters of a line of a run's name
WIDE_NAME = 12  # characters of a name in a script as wide as Chinese
# No-break spaces per wide character: Matplotlib's font lacks it, and makes room for a narrower box
SPACES = 1.3
Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]  # x and y by name


class SecondAxis(NamedTuple):
    """What x is in another unit, at some points, both ascending from 0."""

    label: str
    x: np.ndarray
    values: np.ndarray


# For a stage's folder: PNG


@contextmanager
def _chart(path: Path) -> Iterator["Axes"]:
    """Axes of a figure that is saved as a PNG; the same picture has the same bytes."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    figure = Figure(figsize=(7, 3.6))
    axes = figure.add_subplot()
    yield axes
    axes.legend(frameon=False, loc="upper right")  # fixed, since finding the best place is slow
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def ratio_histogram(ratios: np.ndarray, kept: np.ndarray, threshold: float | None, path: Path) -> None:
    """Documents by tokens per character, kept and dropped, and the threshold if there is one."""
    top = 1.0
    if len(ratios):
        most = float(np.quantile(ratios, 0.995))
        top = max(1.1 * most, min(1.2 * (threshold or 0), 1.0))
    bins = np.linspace(0, top, 81)
    shown = np.minimum(ratios, top)
    with _chart(path) as axes:
        axes.hist(
            [shown[kept], shown[~kept]],
            bins=bins.tolist(),
            stacked=True,
            color=[KEPT, DROPPED],
            label=["kept", "dropped"],
        )
        if threshold and threshold <= top:
            axes.axvline(threshold, color="black", linewidth=1, linestyle="--", label=f"threshold {threshold:g}")
        axes.set(xlabel="tokens per character (the last bin holds all above)", ylabel="documents")


def loss_curve(rows: dict[str, np.ndarray], evaluations: list[dict], by_frequencies: float, path: Path) -> None:
    """Training and held-out loss against tokens, the loss by token frequencies alone, and the learning rate."""
    tokens = [evaluation["tokens"] for evaluation in evaluations]
    held = [evaluation["heldout_loss"] for evaluation in evaluations]
    with _chart(path) as axes:
        axes.plot(rows["tokens"], rows["loss"], color=KEPT, linewidth=0.8, label="training")
        axes.plot(tokens, held, color=DROPPED, marker="o", markersize=3, label="held out")
        axes.axhline(by_frequencies, color="black", linewidth=0.8, linestyle="--", label="token frequencies alone")
        axes.set(xlabel="tokens", ylabel="loss, nats per token")
        rate = axes.twinx()
        rate.plot(rows["tokens"], rows["lr"], color=ACCENT, linewidth=0.8, linestyle=":")
        rate.set_ylabel("learning rate (dotted)")


# For a page: SVG


@contextmanager
def _drawing(
    path: Path, height: float, grid: Literal["both", "x", "y"] = "both", columns: int = 1, title: str | None = None
) -> Iterator["Axes"]:
    """Axes of a figure that is saved as an SVG, as wide as a phone, with a legend below, of these columns."""
    import matplotlib
    from matplotlib.figure import Figure

    own_ids: dict[Any, Any] = {"svg.hashsalt": path.name}  # the same in each run, different in each picture
    text = io.StringIO()
    with matplotlib.rc_context({**DRAWING, **own_ids}):
        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.add_subplot()
        yield axes
        axes.grid(axis=grid, color=INK, alpha=0.15)
        figure.legend(frameon=False, loc="outside lower left", fontsize=9, ncols=columns, title=title)
        with warnings.catch_warnings():
            # a page's reader has fonts for the script, which text in an SVG needs
            warnings.filterwarnings("ignore", "Glyph .* missing from font|Matplotlib currently does not support")
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue().replace(INK, "currentColor")
    # without the ids of groups, which would not be unique on a page with several pictures
    path.write_text(re.sub(r' id="[\w.]+_\d+"', "", drawn), encoding="utf-8")


def thin(values: np.ndarray) -> np.ndarray:
    """The means of at most POINTS sections of a curve."""
    sections = np.array_split(values, min(POINTS, len(values)))
    return np.array([section.mean() for section in sections])


def scores(
    rows: Sequence[ScoreRow], random: Sequence[ScoreRow], others: Mapping[str, Mapping[str, float]], path: Path
) -> None:
    """Scores with their interval and their range over seeds, a line for each, beside those to compare with.

    `random`: the scores without pretraining. `others`: those of other models, by model and column; they don't compare
    with scores on partial data.
    """
    places = np.arange(len(rows), dtype=float)
    names = [row["column"] for row in rows]
    without = [row for row in random if row["column"] in names]
    lines_of_legend = 2 + bool(without) + len(others)  # names of published models are long
    with _drawing(path, 1.1 + 0.42 * len(rows) + 0.18 * lines_of_legend, grid="x") as axes:
        _mark_scores(axes, rows, places, KEPT, "this run")
        if without:
            below = np.array([names.index(row["column"]) + 0.24 for row in without])
            _mark_scores(axes, without, below, GREY, "the same model, no pretraining")
        majority = [row["majority"][row["metric"]] for row in rows]
        axes.plot(majority, places, "|", color=INK, markersize=14, label="majority class or mean")
        _mark_others(axes, rows, others)
        _name_scores(axes, rows, places)


def _name_scores(axes: "Axes", rows: Sequence[ScoreRow], places: np.ndarray) -> None:
    """Write the names of scores at these heights, with a star where the data is partial."""
    labels = [as_it_is(row["column"]) + ("*" if row["partial"] else "") for row in rows]
    axes.set(yticks=places, yticklabels=labels, ylim=(len(labels) - 0.4, -0.5), xlabel="score times 100")


def _mark_scores(axes: "Axes", rows: Sequence[ScoreRow], places: np.ndarray, colour: str, label: str) -> None:
    """Mark scores at these heights: points, with their interval as a band and their range over seeds as a line."""
    for place, row in zip(places, rows, strict=True):
        spread = row["metrics"][row["metric"]]
        line = [place, place]
        axes.plot(spread["interval"], line, color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt")
        axes.plot(spread["range"], line, color=colour, linewidth=2)
    axes.plot([row["score"] for row in rows], places, "o", color=colour, markersize=6, label=label)


def _mark_others(axes: "Axes", rows: Sequence[ScoreRow], others: Mapping[str, Mapping[str, float]]) -> None:
    """Mark the scores of other models in the lines of `rows`."""
    for i, (name, known) in enumerate(others.items()):
        values = [np.nan if row["partial"] else known.get(row["column"], np.nan) for row in rows]
        axes.plot(
            values,
            np.arange(len(rows)),
            linestyle="",
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            color=SERIES[1 + i],
            markerfacecolor="none",
            label=name,
        )


def lines(
    curves: Curves,
    x: str,
    y: str,
    path: Path,
    marked: Sequence[str] = (),
    ticks: Sequence[float] = (),
    bottom: float | None = None,
    second: SecondAxis | None = None,
) -> None:
    """Curves by name, those in `marked` with their points.

    `ticks` make x logarithmic; `bottom`: the least y; `second`: of x.
    """
    lines_of_legend = max(0, len(curves) - 4) / 2
    with _drawing(path, 3.2 + 0.18 * lines_of_legend, columns=2) as axes:
        for i, (name, (xs, ys)) in enumerate(curves.items()):
            axes.plot(
                xs,
                ys,
                color=SERIES[i % len(SERIES)],
                linestyle=STYLES[i // len(SERIES) % len(STYLES)],
                linewidth=1.4,
                marker="o" if name in marked else "",
                markersize=4,
                label=as_it_is(name),
            )
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(bottom=bottom)
        if ticks:
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xticks([], minor=True)
        if second:
            add_axis(axes, second)


def add_axis(axes: "Axes", second: SecondAxis) -> None:
    """Add another axis of x at the top, where x begins at 0."""
    axes.set_xlim(0, float(second.x[-1]))
    functions = (
        lambda x: np.interp(x, second.x, second.values),
        lambda value: np.interp(value, second.values, second.x),
    )
    axes.secondary_xaxis("top", functions=functions).set_xlabel(second.label)


def as_it_is(name: str) -> str:
    """A name for a legend, in which Matplotlib shows no mathematics, and hides none that begins with an underscore."""
    visible = "\N{ZERO WIDTH SPACE}" if name.startswith("_") else ""
    return visible + name.replace("$", r"\$") + room_for_wide(name)


def room_for_wide(name: str) -> str:
    """Spaces that make up for the width of a name's wide characters."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in name)
    return "\N{NO-BREAK SPACE}" * math.ceil(SPACES * wide)


class LossLine(NamedTuple):
    """The loss of a run of a study."""

    run: str
    loss: float  # mean over seeds
    by_seed: list[float]
    least: float | None  # that it may be in truth, if vocabularies differ
    is_best: bool


def run_losses(lines: Sequence[LossLine], path: Path) -> None:
    """The losses of a study's runs, a line for each: the mean, each seed, and the least that it may be in truth."""
    places = np.arange(len(lines), dtype=float)
    has_seeds = any(len(line.by_seed) > 1 for line in lines)
    label = "mean over seeds" if has_seeds else "held-out loss"
    names = [short_name(line.run) for line in lines]
    with _drawing(path, 1.2 + height_of_names(names) * len(lines), grid="x", columns=2) as axes:
        for place, line in zip(places, lines, strict=True):
            _mark_spread(axes, line, place)
        _mark_means(axes, lines, places, label)
        _explain_spread(axes, has_seeds, has_bounds=lines[0].least is not None)
        axes.set(yticks=places, yticklabels=names, ylim=(len(names) - 0.4, -0.6), xlabel="nats per byte")


def _mark_means(axes: "Axes", lines: Sequence[LossLine], places: np.ndarray, label: str) -> None:
    """Mark the mean losses at these heights, the lowest in another colour. `label`: of the others."""
    losses = np.array([line.loss for line in lines])
    is_best = np.array([line.is_best for line in lines])
    axes.plot(losses, places, "o", color=KEPT, markersize=6, label=label)
    axes.plot(losses[is_best], places[is_best], "o", color=ACCENT, markersize=8, label="the lowest")


def _mark_spread(axes: "Axes", line: LossLine, place: float) -> None:
    """Mark the loss of each seed of a run at this height, and a band down to the least that it may be in truth."""
    if line.least is not None:
        axes.plot([line.least, line.loss], [place, place], color=KEPT, linewidth=5, alpha=0.3, label=None)
    if len(line.by_seed) > 1:
        axes.plot(line.by_seed, [place] * len(line.by_seed), "|", color=KEPT, markersize=9)


def _explain_spread(axes: "Axes", has_seeds: bool, has_bounds: bool) -> None:
    """Add the marks of seeds and of bounds to the legend."""
    if has_seeds:
        axes.plot([], [], "|", color=KEPT, markersize=9, label="each seed")
    if has_bounds:
        axes.plot([], [], color=KEPT, linewidth=5, alpha=0.3, label="down to what it is at least")


def run_scores(scores: Sequence[StudyScore], path: Path) -> None:
    """The scores of a study's runs with their intervals, a line for each, by task. `scores`: in the order of tasks."""
    columns = list(dict.fromkeys(score.column for score in scores))
    height = height_of_names([short_name(score.run) for score in scores])
    places = []
    labels = []
    top = 0.0
    with _drawing(path, 1.3 + height * (len(scores) + len(columns)), grid="x", columns=2) as axes:
        for column in columns:
            own = [score for score in scores if score.column == column]
            places += _draw_task(axes, column, own, top)
            labels += [short_name(score.run) for score in own]
            top += len(own) + 1
        _explain_runs(axes)
        axes.set(yticks=places, yticklabels=labels, ylim=(top + 0.2, -0.3), xlabel="score times 100")


def pairs(lines: Sequence[PairLine], path: Path) -> None:
    """Accuracies on parts of a set of minimal pairs, with their 95 % intervals: a line for each, by both metrics."""
    places = np.arange(len(lines), dtype=float)
    height = height_of_names([short_name(line.name) for line in lines])
    with _drawing(path, 1.2 + 1.3 * height * len(lines), grid="x") as axes:
        for number, (words, colour) in enumerate(zip(METRIC_WORDS.values(), (KEPT, ACCENT), strict=True)):
            found = [line.accuracies[number] for line in lines]
            beside = places + (number - 0.5) * 0.3
            _mark_accuracies(axes, found, beside, colour, words)
        axes.axvline(CHANCE, color=INK, linewidth=1, linestyle=":", label="chance")
        names = [as_it_is(short_name(line.name)) for line in lines]
        axes.set(yticks=places, yticklabels=names, ylim=(len(lines) - 0.4, -0.6), xlabel="good sentences found, %")


def _mark_accuracies(axes: "Axes", found: Sequence[Accuracy], places: np.ndarray, colour: str, label: str) -> None:
    """Mark accuracies at these heights, with their 95 % intervals as bands."""
    for accuracy, place in zip(found, places, strict=True):
        axes.plot(accuracy.ends(), [place, place], color=colour, linewidth=4, alpha=0.3, solid_capstyle="butt")
    axes.plot([accuracy.value for accuracy in found], places, "o", color=colour, markersize=5, label=label)


def _draw_task(axes: "Axes", column: str, scores: Sequence[StudyScore], top: float) -> list[float]:
    """Write the name of a task below `top`, and mark its scores below it; their heights."""
    places = top + 1 + np.arange(len(scores), dtype=float)
    axes.text(0, top + 0.3, as_it_is(column), transform=axes.get_yaxis_transform(), weight="bold", va="center")
    _mark_runs(axes, scores, places)
    return places.tolist()


def _explain_runs(axes: "Axes") -> None:
    """Add the marks of scores to the legend."""
    axes.plot([], [], "o", color=KEPT, markersize=6, label="score, 95 % interval")
    axes.plot([], [], "o", color=ACCENT, markersize=8, label="the best")
    axes.plot([], [], color=INK, linewidth=1, linestyle=":", label="majority class, mean or chance")


def _mark_runs(axes: "Axes", scores: Sequence[StudyScore], places: np.ndarray) -> None:
    """Mark the scores of one task at these heights, the best of them in another colour."""
    highest = max(score.value for score in scores)
    for place, score in zip(places, scores, strict=True):
        is_best = score.value == highest
        colour = ACCENT if is_best else KEPT
        axes.plot([score.low, score.high], [place, place], color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt")
        axes.plot(score.value, place, "o", color=colour, markersize=8 if is_best else 6)
    majority = scores[0].majority
    axes.plot([majority, majority], [places[0] - 0.4, places[-1] + 0.4], color=INK, linewidth=1, linestyle=":")


def short_name(name: str) -> str:
    """A run's name beside its line, on at most two lines; in a wide script on one, whose end Matplotlib can place."""
    room = room_for_wide(name)
    if room:
        shown = name if len(name) <= WIDE_NAME else name[: WIDE_NAME - 1] + "…"
        return room_for_wide(shown) + shown.replace("$", r"\$")
    return as_it_is("\n".join(textwrap.wrap(name, NAME_WIDTH, max_lines=2, placeholder=" …")))


def height_of_names(names: Sequence[str]) -> float:
    """The inches of each line, so that names on two lines have room."""
    return 0.4 if any("\n" in name for name in names) else 0.3


def funnel(bars: Sequence[Bar], path: Path) -> None:
    """The documents that each stage kept, held out and dropped, a bar for each."""
    places = np.arange(len(bars))
    most = max(sum(bar[1:]) for bar in bars)
    with _drawing(path, 1.1 + 0.4 * len(bars), grid="x", columns=3) as axes:
        ends = _stack_parts(axes, bars, places)
        _write_counts(axes, bars, places, ends)
        axes.set(
            yticks=places,
            yticklabels=[bar.stage for bar in bars],
            ylim=(len(bars) - 0.5, -0.5),
            xlim=(0, 1.3 * max(1, most)),
            xlabel="documents",
        )
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_major_locator(whole_numbers())


def _stack_parts(axes: "Axes", bars: Sequence[Bar], places: np.ndarray) -> np.ndarray:
    """Draw the parts of bars at these heights, side by side; returns where each bar ends."""
    parts = (
        ("kept", KEPT, "kept"),
        ("held", ACCENT, "held out, never trained on"),
        ("dropped", DROPPED, "dropped here"),
    )
    ends = np.zeros(len(bars))
    for name, colour, label in parts:
        sizes = np.array([getattr(bar, name) for bar in bars], dtype=float)
        if sizes.any():
            axes.barh(places, sizes, left=ends, height=0.6, color=colour, label=label)
        ends = ends + sizes
    return ends


def _write_counts(axes: "Axes", bars: Sequence[Bar], places: np.ndarray, ends: np.ndarray) -> None:
    """Write the numbers of documents kept and dropped at the ends of bars."""
    for place, bar, end in zip(places, bars, ends, strict=True):
        words = f" {bar.kept:,}" + (f" (−{bar.dropped:,})" if bar.dropped else "")
        axes.text(end, float(place), words, va="center", fontsize=9)


def whole_numbers() -> "MaxNLocator":
    """Few ticks, at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4, integer=True)


def law(
    runs: "pd.DataFrame", fitted: "LossLaw", laws: "Sequence[LossLaw]", interval: tuple[float, float], path: Path
) -> None:
    """The losses of runs over their operations, and a scaling law for each size; a band for the largest size.

    `laws`: fitted to resamples, `interval`: the band's ends in per cent of them.
    """
    sizes, nearest = rounded_sizes(runs["sizes"].to_numpy())
    most_tokens = runs["tokens"].max()
    with _drawing(path, 3.6, columns=4, title="operations per token / 6") as axes:
        for i, size in enumerate(sizes):
            own = runs[nearest == i]
            tokens = np.geomspace(own["tokens"].min() / 2, most_tokens * 2, 60)
            work = 6 * size * tokens / PETA
            colour = SERIES[i % len(SERIES)]
            label = f"{size / 1e6:.2g} M"
            axes.plot(own["operations"] / PETA, own["losses"], "o", color=colour, markersize=4, label=label)
            axes.plot(work, fitted(size, tokens), color=colour, linewidth=1)
        # of the largest size
        low, high = band(laws, size, tokens, interval)
        axes.fill_between(work, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set(xlabel="petaFLOP", ylabel="held-out loss, nats per byte", xscale="log")


def band(laws: "Sequence[LossLaw]", size: float, tokens: np.ndarray, interval: tuple[float, float]) -> np.ndarray:
    """(2, n): the ends of the interval, in per cent of the laws, of losses of models of a size after these tokens."""
    losses = [one(size, tokens) for one in laws]
    return np.percentile(losses, interval, axis=0)


def rounded_sizes(sizes: np.ndarray) -> tuple[list[float], np.ndarray]:
    """The different sizes, to two digits and in order, and for each of the given ones the place of the nearest."""
    rounded = sorted({float(f"{size:.2g}") for size in sizes})
    distances = np.abs(np.subtract.outer(sizes, rounded))
    return rounded, distances.argmin(axis=1)
