import math

import pytest

from model.wording import budget, counted, duration, number_in_words, parse_budget, span

HOUR = 3600


@pytest.mark.parametrize(
    ("function", "given", "text"),
    [
        (counted, (1, "row"), "1 row"),
        (counted, (1234, "row"), "1,234 rows"),
        (duration, (24.03 * HOUR, 5), "24.03 hours"),  # more digits tell a broken limit from a kept one
        (duration, (3599.9,), "1 hour"),
        (duration, (1500 * HOUR,), "1,500 hours"),
        (duration, (HOUR / 3,), "20 minutes"),
        (duration, (60.02,), "1 minute"),
        (duration, (7.75,), "7.75 seconds"),
        (duration, (0.1234,), "0.123 seconds"),
        (number_in_words, (0.0012345678,), "0.00123457"),
        (number_in_words, (999_999.7,), "1,000,000"),
        (number_in_words, (1_234_567.8,), "1,234,568"),
        (number_in_words, (1e15,), "1e+15"),
        (span, (48.36, 48.44), "48.4"),
        (span, (48.4, 51.2), "48.4 to 51.2"),
        (budget, (1 / 60, "hours"), "1 minute"),
        (budget, (1e7, "tokens"), "10,000,000 tokens"),
        (budget, (6.7e18, "flops"), "6.7e+18 flops"),
    ],
)
def test_a_quantity_has_its_unit_in_its_number(function, given, text):
    assert function(*given) == text


@pytest.mark.parametrize(
    ("words", "amount", "unit"),
    [
        ("3 minutes", 0.05, "hours"),
        ("20 minutes", 1 / 3, "hours"),
        ("1 minute", 1 / 60, "hours"),
        ("2 hours", 2, "hours"),
        ("1 hour", 1, "hours"),
        ("1.5 hours", 1.5, "hours"),
        ("90 seconds", 0.025, "hours"),
        (".1 minutes", 1 / 600, "hours"),
        ("2 days", 48, "hours"),
        ("10min", 1 / 6, "hours"),
        ("24 h", 24, "hours"),
        ("90s", 0.025, "hours"),
        ("3e6 tokens", 3e6, "tokens"),
        ("10 million tokens", 1e7, "tokens"),
        ("1.1 billion tokens", 1.1e9, "tokens"),
        ("3,000,000 Tokens ", 3e6, "tokens"),
        ("1 token", 1, "tokens"),
        ("10 epochs", 10, "epochs"),
        ("1 epoch", 1, "epochs"),
        ("0.5 Epochs", 0.5, "epochs"),
        ("1e18 FLOPs", 1e18, "flops"),
        ("6.7e+18 flops", 6.7e18, "flops"),
        ("73 exaflops", 7.3e19, "flops"),
        ("0 hours", 0, "hours"),
        ("3e6", 3e6, ""),
        ("2 million", 2e6, ""),
        ("1e999 flops", math.inf, "flops"),
    ],
)
def test_a_budget_in_words_is_the_nearest_number_in_its_unit(words: str, amount: float, unit: str):
    assert parse_budget(words) == (amount, unit)
    if unit and amount < math.inf:
        assert parse_budget(budget(amount, unit))[1] == unit


@pytest.mark.parametrize(
    "words",
    [
        "", "minutes", "three minutes", "3 minuts", "3 parsecs", "-1 hours", "nan hours", "inf hours", "1,00 tokens",
        "0,5 hours", "1 hour 30 minutes", "1:30", "3 s s", "1e9999 tokens", "3 hourss", "million tokens",
    ],
)  # fmt: skip
def test_other_words_are_no_budget(words: str):
    with pytest.raises(ValueError, match="budget"):
        parse_budget(words)
