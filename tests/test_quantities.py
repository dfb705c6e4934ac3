import pytest

from model.wording import budget, counted, duration, span

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
        (span, (48.36, 48.44), "48.4"),
        (span, (48.4, 51.2), "48.4 to 51.2"),
        (budget, (1 / 60, "hours"), "1 minute"),
        (budget, (1e7, "tokens"), "10,000,000 tokens"),
        (budget, (6.7e18, "flops"), "6.7e+18 flops"),
    ],
)
def test_a_quantity_has_its_unit_in_its_number(function, given, text):
    assert function(*given) == text
