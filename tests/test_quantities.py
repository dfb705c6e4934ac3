import pytest

from model.quantities import budget, counted, duration, span


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((0, "row"), "0 rows"),
        ((1, "row"), "1 row"),
        ((1234, "row"), "1,234 rows"),
        ((1, "entry", "entries"), "1 entry"),
        ((2, "entry", "entries"), "2 entries"),
    ],
)
def test_a_count_has_the_noun_in_its_number(given, text):
    assert counted(*given) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (24 * 3600, "24 hours"),
        (86_390, "24 hours"),
        (3600, "1 hour"),
        (3599.9, "1 hour"),
        (2.25 * 3600, "2.25 hours"),
        (1500 * 3600, "1,500 hours"),
        (3600 / 3, "20 minutes"),
        (3600 * (1 / 60), "1 minute"),
        (60.02, "1 minute"),
        (1, "1 second"),
        (7.75, "7.75 seconds"),
        (0.1234, "0.123 seconds"),
        (0, "0 seconds"),
    ],
)
def test_a_duration_is_told_in_a_unit_that_fits(seconds, text):
    assert duration(seconds) == text


def test_more_digits_tell_a_broken_limit_from_a_kept_one():
    assert duration(24.03 * 3600, 5) == "24.03 hours"


def test_a_range_whose_ends_look_alike_is_one_number():
    assert span(48.36, 48.44) == "48.4"
    assert span(48.4, 51.2) == "48.4 to 51.2"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((1 / 60, "hours"), "1 minute"),
        ((1 / 3, "hours"), "20 minutes"),
        ((24, "hours"), "24 hours"),
        ((1e7, "tokens"), "10,000,000 tokens"),
        ((6.7e18, "flops"), "6.7e+18 flops"),
    ],
)
def test_a_budget_is_told_in_its_unit(given, text):
    assert budget(*given) == text
