import math
import random
from itertools import pairwise
from typing import get_args

import pytest

from model import schedules
from model.settings import READ_BY, ScheduleName, Training

NAMES = get_args(ScheduleName)
FRACTIONS = [n / 1000 for n in range(1001)]


def some(name, rng):
    """Settings of this schedule with all that it reads drawn at random."""
    warmup = rng.choice([0.0 if name != "inverse-sqrt" else 1e-6, 0.01, 0.1, 0.3, rng.random() * 0.99])
    cooldown = min(1 - warmup, rng.choice([0.01, 0.5, 1.0, 1.0 - rng.random()]))
    drawn = {"warmup": warmup, "cooldown": cooldown, "power": rng.choice([0.5, 1.0, 2.0, 16.0])}
    return Training(
        schedule=name,
        floor=rng.choice([0.0, 0.1, 0.5, rng.random()]),
        **{field: value for field, value in drawn.items() if name in READ_BY[field]},
    )


@pytest.mark.parametrize(
    ("name", "given", "values"),
    [
        ("triangle", {}, {0: 0.25, 0.25: 0.5, 0.5: 0.75, 0.75: 1, 0.9: 0.4}),  # as the reference implementation's
        ("one-cycle", {}, {0: 0, 0.25: 0.5, 0.5: 1, 0.75: 0.5, 0.9: 0.2}),
        ("cosine", {"warmup": 0.1}, {0: 0, 0.05: 0.5, 0.1: 1, 0.4: 0.75, 0.55: 0.5, 0.7: 0.25}),
        ("linear", {"warmup": 0.06}, {0: 0, 0.03: 0.5, 0.06: 1, 0.53: 0.5, 0.765: 0.25}),
        ("trapezoid", {"warmup": 0.02}, {0: 0, 0.005: 0.25, 0.02: 1, 0.3: 1, 0.5: 1, 0.75: 0.5, 0.9: 0.2}),
        (
            "inverse-sqrt",
            {"warmup": 0.04, "cooldown": 0.36},
            {0: 0, 0.01: 0.25, 0.04: 1, 0.16: 0.5, 0.36: 1 / 3, 0.64: 0.25, 0.82: 0.125},
        ),
        ("ramp", {"cooldown": 0.2}, {0: 0, 0.2: 0.25, 0.6: 0.75, 0.8: 1, 0.9: 0.5}),
        ("dive", {"cooldown": 0.25}, {0: 1, 0.75: 1, 0.8: 0.8, 0.95: 0.2}),
        ("annealing", {"warmup": 0.2}, {0: 0, 0.1: 0.5, 0.2: 1, 0.3: 0.5, 0.4: 1, 0.5: 0.5, 0.9: 0.5}),
        ("polynomial", {"power": 2.0}, {0: 1, 0.5: 0.25, 0.9: 0.01}),
        ("polynomial", {"power": 3.0, "warmup": 0.2}, {0.05: 0.25, 0.2: 1, 0.6: 0.125}),
        ("cosine", {"warmup": 0.1, "floor": 0.1}, {0: 0.1, 0.05: 0.55, 0.1: 1, 0.55: 0.55}),
    ],
)
def test_the_rate_is_what_is_computed_by_hand_and_in_the_end_the_floor(name, given, values):
    settings = Training(schedule=name, **given)
    for spent, expected in values.items():
        assert schedules.rate(settings, spent) == pytest.approx(expected, abs=1e-9), spent
    for spent in (1, 1 + 1e-9, 1.001, 7):
        assert schedules.rate(settings, spent) == settings.floor


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_set_the_rate_rises_to_one_peak_of_1_and_falls_to_the_floor(name):
    rng = random.Random(name)
    for _ in range(50):
        settings = some(name, rng)
        edges = {0, settings.warmup, 1 - settings.cooldown, 0.5, 0.75, 1}
        near = {math.nextafter(edge, way) for edge in edges for way in (0, 1)}
        rates = [schedules.rate(settings, spent) for spent in sorted({*FRACTIONS, *edges, *near})]
        assert settings.floor == rates[-1] <= min(rates)
        assert 1 >= max(rates) == pytest.approx(1)
        if name != "annealing":  # it has four peaks
            peak = rates.index(max(rates))
            assert all(a <= b + 1e-12 for a, b in pairwise(rates[: peak + 1]))
            assert all(a >= b - 1e-12 for a, b in pairwise(rates[peak:]))


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_reads_what_the_settings_say_it_reads_and_nothing_else(name):
    usual = Training(warmup=0.1, schedule="cosine").model_copy(update={"schedule": name})
    for field, other in (("warmup", 0.2), ("cooldown", 0.25), ("power", 2.0)):
        changed = usual.model_copy(update={field: other})
        same = all(schedules.rate(usual, spent) == schedules.rate(changed, spent) for spent in FRACTIONS)
        assert same == (name not in READ_BY[field]), field


def test_the_batch_ramp_is_that_of_the_reference_implementation_on_the_papers_a6000():
    micro_batch = 512
    ramp = 0.6
    for spent in (0, 0.01, 0.1, 0.3, 0.5, 0.6, 0.75, 1, 2):
        reference = min((math.floor(spent * 8192 / ramp / micro_batch) + 1) * micro_batch, 8192)  # its formula
        assert schedules.batch(Training(), spent) == reference


UNITS = {8192: 512, 4096: 256, 1536: 96, 1000: 50, 512: 32, 128: 32, 64: 32, 48: 24, 33: 11, 16: 16, 1: 1}


@pytest.mark.parametrize(("size", "unit"), UNITS.items())
def test_the_batch_grows_by_a_sixteenth_or_where_that_is_little_by_some_32_sequences(size, unit):
    settings = Training(batch_size=size)
    constant = Training(batch_size=size, batch_ramp=0.0)
    batches = [schedules.batch(settings, spent) for spent in FRACTIONS]
    assert batches == sorted(batches)
    assert sorted(set(batches)) == list(range(unit, size + 1, unit))
    assert (schedules.ramp_unit(settings), schedules.ramp_unit(constant)) == (unit, size)
    assert {schedules.batch(constant, spent) for spent in FRACTIONS} == {size}


def test_the_masked_fraction_goes_from_the_first_to_the_last_in_five_equal_steps():
    settings = Training(mask_fraction=0.4, last_mask_fraction=0.2)
    levels = {0: (0.4, 0.2), 0.19: (0.4, 0.2), 0.2: (0.35, 0.4), 0.5: (0.3, 0.6), 0.75: (0.25, 0.8), 0.8: (0.2, 1)}
    for spent, (fraction, until) in (levels | {0.99: (0.2, 1), 1: (0.2, 1), 90: (0.2, 1)}).items():
        assert schedules.mask_fraction(settings, spent) == pytest.approx(fraction)
        assert schedules.masks_stay_until(settings, spent) == until
        assert schedules.mask_fraction(Training(), spent) == 0.25
        assert schedules.masks_stay_until(Training(), spent) == 1
