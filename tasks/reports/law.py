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
START_SHARES = (0.3, 0.7)  # of E in the lowest loss, from which a fit begins
START_EXPONENTS = (0.15, 0.5)
LEAST_EXPONENT = 0.01
MOST_EXPONENT = 2


@dataclass(frozen=True)
class LossLaw:
    """A fitted law. `values`: E, A, alpha, B, beta, where A and B belong to the `units` of size and tokens."""

    values: np.ndarray
    units: tuple[float, float]

    def __call__(self, sizes: Any, tokens: Any) -> Any:
        """The loss of models of these sizes after that many tokens."""
        E, A, alpha, B, beta = self.values
        of_size = A * (np.asarray(sizes) / self.units[0]) ** -alpha
        of_tokens = B * (np.asarray(tokens) / self.units[1]) ** -beta
        return E + of_size + of_tokens


def points(runs: "pd.DataFrame") -> int:
    """How many different pairs of size and tokens the runs have."""
    return len(runs[["sizes", "tokens"]].drop_duplicates())


def can_be_fitted(runs: "pd.DataFrame") -> bool:
    """Whether there are enough different runs, and several sizes and numbers of tokens among them."""
    several = np.log(runs[["sizes", "tokens"]]).round(6).nunique() > 1
    return points(runs) >= FEWEST and several.all()


def fit(runs: "pd.DataFrame", known: LossLaw | None = None) -> LossLaw:
    """The law with the smallest Huber loss of relative residuals, from many starts or from a known law."""
    from scipy.optimize import least_squares

    sizes, tokens, losses = runs[["sizes", "tokens", "losses"]].to_numpy().T
    lowest = float(losses.min())
    units = known.units if known else (geometric_mean(sizes), geometric_mean(tokens))
    starts = [known.values] if known else starts_of(lowest)

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.log(LossLaw(values, units)(sizes, tokens) / losses)

    most = 100 * ((1 - START_SHARES[0]) * lowest / 2)  # of A and of B
    limits = ([0, 0, LEAST_EXPONENT, 0, LEAST_EXPONENT], [lowest, most, MOST_EXPONENT, most, MOST_EXPONENT])
    found = []
    for start in starts:
        begin = np.clip(start, *limits)
        found.append(least_squares(residuals, begin, bounds=limits, loss="huber", f_scale=HUBER))
    best = min(found, key=lambda each: each.cost)
    return LossLaw(best.x, units)


def geometric_mean(values: np.ndarray) -> float:
    """The geometric mean of positive numbers."""
    return float(np.exp(np.log(values).mean()))


def starts_of(lowest: float) -> list[np.ndarray]:
    """Values from which to begin: several shares of E in the lowest loss, and several exponents."""
    starts = []
    for share, alpha, beta in itertools.product(START_SHARES, START_EXPONENTS, START_EXPONENTS):
        rest = (1 - share) * lowest / 2
        starts.append(np.array([share * lowest, rest, alpha, rest, beta]))
    return starts


def resample(runs: "pd.DataFrame", law: LossLaw, seed: int = 0) -> list[LossLaw]:
    """Laws of the same sizes and tokens, with the law's losses and relative errors drawn from its own residuals.

    The residuals are enlarged for the parameters that were fitted to them. Drawing runs instead would leave too few.
    """
    rng = np.random.default_rng(seed)
    expected = law(runs["sizes"], runs["tokens"])
    freedom = len(runs) - len(PARAMETERS)
    errors = np.log(runs["losses"] / expected) * math.sqrt(len(runs) / freedom)
    laws = []
    for _ in range(RESAMPLES):
        losses = expected * np.exp(rng.choice(errors, len(runs)))
        laws.append(fit(runs.assign(losses=losses), law))
    return laws


def predict(law: LossLaw, laws: list[LossLaw], size: float, tokens: float) -> dict[str, float]:
    """The loss that the law predicts, with the interval of the resampled laws."""
    losses = [float(one(size, tokens)) for one in laws]
    low, high = np.percentile(losses, INTERVAL).tolist()
    return {"loss": float(law(size, tokens)), "low": low, "high": high}


def describe(runs: "pd.DataFrame", law: LossLaw, laws: list[LossLaw]) -> dict[str, Any]:
    """The fitted parameters with the intervals of the resampled laws, and how well the law fits."""
    values = np.array([one.values for one in laws])
    parameters = {}
    for i, name in enumerate(PARAMETERS):
        low, high = np.percentile(values[:, i], INTERVAL).tolist()
        parameters[name] = {"value": float(law.values[i]), "low": low, "high": high}
    residuals = law(runs["sizes"], runs["tokens"]) / runs["losses"] - 1
    return {
        "runs": len(runs),
        "parameters": parameters,
        "units": {"size": law.units[0], "tokens": law.units[1]},
        "resamples": len(laws),
        "residual": float(np.sqrt(np.mean(residuals**2))),
    }


def predict_largest(runs: "pd.DataFrame") -> dict[str, Any] | None:
    """What the small runs predict of the largest; None if too few have a quarter of its operations or less."""
    operations = 6 * runs["sizes"] * runs["tokens"]
    largest = operations.idxmax()
    most = operations[largest]
    small = runs[operations <= TEST_SHARE * most]
    if not can_be_fitted(small):
        return None
    law = fit(small)
    size, tokens, measured = (float(value) for value in runs.loc[largest, ["sizes", "tokens", "losses"]])
    prediction = predict(law, resample(small, law), size, tokens)
    return {
        **prediction,
        "largest": largest,
        "runs": len(small),
        "share": float(operations[small.index].max() / most),
        "measured": measured,
        "error": prediction["loss"] / measured - 1,
    }
