"""Pictures of what the stages counted."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT, DROPPED, ACCENT = "#4c78a8", "#e45756", "#54a24b"


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
    axes.plot(*zip(*held, strict=True), color=DROPPED, marker="o", markersize=3, label="held out, 15 % masked")
    axes.set(xlabel="tokens", ylabel="loss, nats per masked token")
    rate = axes.twinx()
    rate.plot(rows["tokens"], rows["lr"], color=ACCENT, linewidth=0.8, linestyle=":")
    rate.set_ylabel("learning rate (dotted)")
    axes.legend(frameon=False, loc="upper right")  # fixed: to look for the best place takes long
    _save(figure, path)
