"""Why a run learned nothing, from made-up courses of its held-out loss."""

import pytest

from model.diagnosis import Course, advice

FREQUENCIES = 6.95
PLAIN = {"steps": 5000, "tokens": 1_000_000, "epochs": 0.3, "batch_size": 64, "learning_rate": 0.01}
PLAIN |= {"is_rotary": True, "width": 256}
BUDGET = "pretrain.budget"
BATCH = "pretrain.batch_size"
RATE = "pretrain.learning_rate"
TEXT = "download"
FLAT = [9.0, 7.1, 7.0, 6.97, 6.96, 6.96, 6.95, 6.96, 6.95, 6.95, 6.95]
FALLING = [9.1, 7.45, 7.5, 7.49, 7.44, 7.36, 7.3, 7.23, 7.18, 7.14, 7.13]  # pocket-frontier, 21 steps


def said(losses: list[float], **changes) -> str:
    return advice(Course(losses=losses, by_frequencies=FREQUENCIES, **PLAIN | changes))


@pytest.mark.parametrize(
    ("losses", "changes", "wanted", "unwanted"),
    [
        (
            FALLING,
            {"steps": 21, "tokens": 172_032},
            ["172,032 tokens in 21 steps", BUDGET, "(now 64)", "pocket-mini"],
            [RATE, TEXT],
        ),
        (FALLING, {}, ["1,000,000 tokens in 5,000 steps", BUDGET], [RATE, TEXT]),
        ([9.1, 9.5, 9.3, 8.8, 8.2, 7.8, 7.4], {"steps": 100}, ["100 steps", BUDGET], [RATE]),  # rose before it fell
        (FALLING, {"width": 128}, [BUDGET, BATCH], ["smaller model", "pocket-mini"]),
        ([9.1, 8.0], {"steps": 1}, ["1 step ", BATCH], [RATE]),
        ([9.1, 7.45, 7.5], {"steps": 5}, ["5 steps", BATCH], [RATE, TEXT]),
        ([9.1, 7.2, 7.0, 7.6, 7.9, 7.8], {}, ["7 to 7.9", RATE, "0.01"], [BUDGET, BATCH, TEXT]),
        ([9.1, 7.2, 7.0, 8.5, 7.3, 7.1, 7.0], {}, ["7 to 8.5", RATE], [BUDGET]),
        ([9.1, 11.0, 12.0], {"steps": 8}, ["9.1 to 12", RATE], [BUDGET]),
        ([9.1] + [8.2] * 8, {}, ["8.2", RATE], [BUDGET, BATCH]),
        (FLAT, {}, ["3 million", BUDGET], [RATE, BATCH, "positions to rotary"]),
        (FLAT, {"is_rotary": False, "tokens": 4_000_000}, ["8 million", BUDGET, "positions to rotary"], [RATE, BATCH]),
        (FLAT, {"tokens": 9_000_000}, ["9,000,000", RATE], [BUDGET, "positions to rotary"]),
        (
            [9.1, 7.2, 7.0, 7.1, 7.4, 7.6],
            {"epochs": 40.0, "training_loss": 3.2},
            ["40.0 times", "3.2", TEXT],
            [RATE, BATCH],
        ),
        ([9.1, 7.2, 7.0, 7.1, 7.4, 7.6], {"epochs": 40.0, "training_loss": 7.5}, [RATE], [TEXT]),
        ([9.1, 7.2, 7.0, 7.1, 7.4, 7.6], {"epochs": 0.5, "training_loss": 3.2}, [RATE], [TEXT]),
    ],
)
def test_the_advice_names_what_fits_the_course_with_its_numbers_and_nothing_else(losses, changes, wanted, unwanted):
    found = said(losses, **changes)
    for words in wanted:
        assert words in found
    for words in unwanted:
        assert words not in found
