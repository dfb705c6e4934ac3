"""A scaling law: the loss as a function of a model's size and of the tokens that it read, fitted to finished runs.

    L(N, D) = E + A N^-alpha + B D^-beta        (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3)

Runs are rows with their `sizes` N, `tokens` D and final `losses`. N is the operations per token / 6: for large models
the number of parameters in the blocks; for small ones it also counts the vocabulary head and attention, as the budget
does. Sizes and tokens are relative to the geometric means of the runs, which conditions the fit and leaves its
predictions as they are.
"""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

PARAMETERS = ("E", "A", "alpha", "B", "beta")
FEWEST = len(PARAMETERS) + 1  # runs: with as many as parameters, every law fits
HUBER = 1e-3  # relative residuals beyond it count linearly, as in the paper's appendix D.2
RESAMPLES = 200
INTERVAL = (5, 95)  # per cent of the resamples
TEST_SHARE = 0.25  # of the largest run's operations: the runs that must predict it have no more
STARTS = [np.array(start) for start in itertools.product((0.3, 0.7), (0.15, 0.5), (0.15, 0.5))]  # E's share, exponents


@dataclass(frozen=True)
class LossLaw:
    """A fitted law. `values`: E, A, alpha, B, beta, where A and B belong to the `units` of size and tokens."""

    values: np.ndarray
    units: tuple[float, float]

    def __call__(self, sizes: Any, tokens: Any) -> Any:
        """The loss of models of these sizes after so many tokens."""
        E, A, alpha, B, beta = self.values
        return E + A * (np.asarray(sizes) / self.units[0]) ** -alpha + B * (np.asarray(tokens) / self.units[1]) ** -beta


def points(runs: "pd.DataFrame") -> int:
    """How many different pairs of size and tokens the runs have."""
    return len(runs[["sizes", "tokens"]].drop_duplicates())


def can_be_fitted(runs: "pd.DataFrame") -> bool:
    """Whether there are enough different runs, and several sizes and numbers of tokens among them."""
    several = np.log(runs[["sizes", "tokens"]]).round(6).nunique() > 1
    return points(runs) >= FEWEST and several.all()


def fit(runs: "pd.DataFrame", start: LossLaw | None = None) -> LossLaw:
    """The law with the smallest Huber loss of relative residuals, from many starts or from a known law."""
    from scipy.optimize import least_squares

    sizes, tokens, losses = runs[["sizes", "tokens", "losses"]].to_numpy().T
    units = start.units if start else tuple(float(np.exp(np.log(x).mean())) for x in (sizes, tokens))
    lowest = float(losses.min())

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(LossLaw(values, units)(sizes, tokens) / losses)

    rest = (1 - STARTS[0][0]) * lowest / 2
    starts = [start.values] if start else [
        np.array([share * lowest, (1 - share) * lowest / 2, alpha, (1 - share) * lowest / 2, beta])
        for share, alpha, beta in STARTS
    ]  # fmt: skip
    limits = ([0, 0, 0.01, 0, 0.01], [lowest, 100 * rest, 2, 100 * rest, 2])
    best = min(
        (
            least_squares(residuals, np.clip(first, *limits), bounds=limits, loss="huber", f_scale=HUBER)
            for first in starts
        ),
        key=lambda found: found.cost,
    )
    return LossLaw(best.x, units)


def resample(runs: "pd.DataFrame", law: LossLaw, seed: int = 0) -> list[LossLaw]:
    """Laws of the same sizes and tokens, with the law's losses and relative errors drawn from its own residuals.

    The residuals are enlarged for the parameters that were fitted to them. Drawing runs instead would leave too few.
    """
    rng, expected = np.random.default_rng(seed), law(runs["sizes"], runs["tokens"])
    errors = np.log(runs["losses"] / expected) * math.sqrt(len(runs) / (len(runs) - len(PARAMETERS)))
    drawn = (expected * np.exp(rng.choice(errors, len(runs))) for _ in range(RESAMPLES))
    return [fit(runs.assign(losses=losses), law) for losses in drawn]


def predict(law: LossLaw, laws: list[LossLaw], size: float, tokens: float) -> dict[str, float]:
    """The loss that the law predicts, with the interval of the resampled laws."""
    low, high = np.percentile([float(one(size, tokens)) for one in laws], INTERVAL).tolist()
    return {"loss": float(law(size, tokens)), "low": low, "high": high}


def describe(runs: "pd.DataFrame", law: LossLaw, laws: list[LossLaw]) -> dict[str, Any]:
    """The fitted parameters with the intervals of the resampled laws, and how well the law fits."""
    bounds = np.percentile([one.values for one in laws], INTERVAL, axis=0).T.tolist()
    return {
        "runs": len(runs),
        "parameters": {
            name: {"value": float(value), "low": low, "high": high}
            for name, value, (low, high) in zip(PARAMETERS, law.values, bounds, strict=True)
        },
        "units": {"size": law.units[0], "tokens": law.units[1]},
        "resamples": len(laws),
        "residual": float(np.sqrt(np.mean((law(runs["sizes"], runs["tokens"]) / runs["losses"] - 1) ** 2))),
    }


def test_on_largest(runs: "pd.DataFrame") -> dict[str, Any] | None:
    """What the small runs predict of the largest; None if too few have a quarter of its operations or less."""
    operations = 6 * runs["sizes"] * runs["tokens"]
    largest = operations.idxmax()
    small = runs[operations <= TEST_SHARE * operations[largest]]
    if not can_be_fitted(small):
        return None
    law = fit(small)
    size, tokens, measured = map(float, runs.loc[largest, ["sizes", "tokens", "losses"]])
    prediction = predict(law, resample(small, law), size, tokens)
    return prediction | {
        "largest": largest,
        "runs": len(small),
        "share": float(operations[small.index].max() / operations[largest]),
        "measured": measured,
        "error": prediction["loss"] / measured - 1,
    }
