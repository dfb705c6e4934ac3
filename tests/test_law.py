"""The scaling law against runs whose law is known."""

import itertools

import numpy as np
import pandas as pd
import pytest

from tasks.reports import law
from tasks.reports.law import FEWEST, INTERVAL, can_be_fitted, fit, predict, resample

# the true law: losses per byte, of sizes and tokens as they are
E = 0.55
A = 9.0
ALPHA = 0.31
B = 40.0
BETA = 0.27
SIZES = (1e6, 2.5e6, 6e6, 15e6)
TOKENS = (1e6, 3e6, 9e6)
PAIRS = [*itertools.product(SIZES, TOKENS)]
LARGE = (60e6, 80e6)  # size and tokens of a run that is far larger than the others


def truth(sizes, tokens):
    """The loss by the true law."""
    return E + A * np.asarray(sizes) ** -ALPHA + B * np.asarray(tokens) ** -BETA


def runs_of(sizes, tokens, losses) -> pd.DataFrame:
    return pd.DataFrame({"sizes": sizes, "tokens": tokens, "losses": losses})


def runs_at(pairs: list[tuple[float, float]], noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    """Runs of these sizes and tokens, with noise relative to the loss."""
    sizes, tokens = np.array(pairs, dtype=float).T
    factors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(pairs)))
    return runs_of(sizes, tokens, truth(sizes, tokens) * factors)


def grid(noise: float = 0.0, seed: int = 0) -> pd.DataFrame:
    return runs_at(PAIRS, noise, seed)


def test_the_parameters_of_a_law_are_recovered_from_runs_without_noise():
    found = fit(grid())
    size, tokens = found.units
    expected = [E, A * size**-ALPHA, ALPHA, B * tokens**-BETA, BETA]
    assert found.values == pytest.approx(expected, rel=0.01)
    assert found.units == pytest.approx((np.prod(SIZES) ** (1 / 4), np.prod(TOKENS) ** (1 / 3)))


@pytest.mark.parametrize("seed", range(3))
def test_laws_of_many_kinds_predict_runs_within_and_beyond_those_they_were_fitted_to(seed: int):
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.2, 0.5)
    beta = rng.uniform(0.2, 0.5)
    lowest = rng.uniform(0.2, 1.0)

    def loss(sizes, tokens):
        return lowest + (np.asarray(sizes) / 1e6) ** -alpha + 1.5 * (np.asarray(tokens) / 1e6) ** -beta

    sizes, tokens = np.array(PAIRS).T
    found = fit(runs_of(sizes, tokens, loss(sizes, tokens)))
    for size, read in (*PAIRS, (4e6, 2e6), LARGE):
        assert found(size, read) == pytest.approx(loss(size, read), rel=1e-3)


def test_a_single_bad_run_hardly_moves_the_law():
    runs = grid()
    losses = runs.losses.copy()
    losses[5] *= 1.2
    found = fit(runs_of(runs.sizes, runs.tokens, losses))
    others = np.arange(len(runs)) != 5
    assert found(runs.sizes, runs.tokens)[others] == pytest.approx(runs.losses[others], rel=5e-3)


def test_the_same_runs_give_the_same_law_whatever_the_unit_of_their_size_and_their_order():
    runs = grid(0.003)
    order = np.random.default_rng(1).permutation(12)
    found = fit(runs)
    scaled = fit(runs.assign(sizes=1000 * runs["sizes"]).loc[order])
    assert scaled.values[[0, 2, 4]] == pytest.approx(found.values[[0, 2, 4]], rel=1e-2)
    assert scaled(1000 * LARGE[0], LARGE[1]) == pytest.approx(found(*LARGE), rel=1e-3)


def test_the_interval_of_resampled_laws_contains_the_truth_of_most_noisy_runs(monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 20)
    inside = 0
    for seed in range(3):
        runs = grid(0.004, seed)
        found = fit(runs)
        prediction = predict(found, resample(runs, found), *LARGE)
        assert 0 < prediction["high"] - prediction["low"] < 0.5 * truth(*LARGE)
        inside += prediction["low"] <= truth(*LARGE) <= prediction["high"]
    assert inside >= 2


def test_resampled_laws_of_the_fewest_runs_are_the_same_each_time_and_spread_as_noise_does(monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 8)
    spreads = []
    for noise in (0.0, 0.01):
        runs = runs_at([*PAIRS[: FEWEST - 1], PAIRS[-1]], noise)
        found = fit(runs)
        laws = resample(runs, found)
        again = resample(runs, found)
        assert [one.values.tolist() for one in laws] == [one.values.tolist() for one in again]
        values = [float(one(*LARGE)) for one in laws]
        low, high = np.percentile(values, INTERVAL).tolist()
        assert predict(found, laws, *LARGE) == {"loss": found(*LARGE), "low": low, "high": high}
        spreads.append(np.std(values))
    assert spreads[0] < 1e-3 < spreads[1]


@pytest.mark.parametrize(
    ("pairs", "enough"),
    [
        (PAIRS[:FEWEST], True),
        (PAIRS[: FEWEST - 1], False),
        (PAIRS[: FEWEST - 1] * 3, False),
        ([(1e6, 1e6 * n) for n in range(1, 9)], False),
        ([(1e6 * n, 1e6) for n in range(1, 9)], False),
        ([(1e6 * n, 1e6 * n) for n in range(1, 9)], True),
        ([], False),
    ],
    ids=["enough", "too few", "the same runs three times", "one size", "one number of tokens", "a diagonal", "none"],
)
def test_a_law_needs_more_different_runs_than_it_has_parameters_of_several_sizes_and_lengths(pairs, enough: bool):
    runs = runs_at(pairs) if pairs else runs_of([], [], [])
    assert can_be_fitted(runs) == enough


def test_the_test_predicts_the_largest_run_from_those_with_at_most_a_quarter_of_its_operations(monkeypatch):
    monkeypatch.setattr(law, "RESAMPLES", 10)
    size, tokens = LARGE
    largest = 6 * size * tokens
    near = [(size, tokens / 3.9), (size / 2, tokens * 0.9)]  # above a quarter
    limit = (size / 2, tokens / 2)  # exactly a quarter
    runs = runs_at([*PAIRS, limit, LARGE, *near])
    losses = runs.losses.copy()
    losses[-2:] = 17  # whatever they are
    found = law.predict_largest(runs_of(runs.sizes, runs.tokens, losses))
    assert (found["largest"], found["runs"]) == (len(PAIRS) + 1, len(PAIRS) + 1)
    assert found["share"] == pytest.approx(6 * limit[0] * limit[1] / largest) == 0.25
    assert found["measured"] == truth(*LARGE)
    assert found["loss"] == pytest.approx(truth(*LARGE), rel=1e-3)
    assert found["error"] == pytest.approx(found["loss"] / found["measured"] - 1, abs=1e-12)
    losses[len(PAIRS) + 1] *= 1.1  # the largest itself does not enter the fit
    worse = law.predict_largest(runs_of(runs.sizes, runs.tokens, losses))
    assert worse["loss"] == found["loss"]
    assert worse["error"] == pytest.approx(1 / 1.1 - 1, abs=1e-3)


def test_without_enough_small_runs_there_is_no_test():
    assert law.predict_largest(runs_at([(size, 1e6 * n) for size in (1e6, 1.1e6) for n in (8, 9, 10)])) is None
