"""Learning rate, batch and masked fraction as functions of the fraction of the budget that is spent, from 0 to 1."""

import math
from collections.abc import Callable

from model.settings import Training

MASK_LEVELS = 5  # of the masked fraction; each has its own shapes and is compiled once
# In the reference implementation the batch grows by one micro-batch, as large as the card allows: 512 of 8,192
# sequences on the paper's A6000 and 96 or 128 on its smaller cards. Here it grows by a sixteenth on every card, or by
# more if the batch is small, because fewer than 32 sequences leave cores idle.
RAMP_LEVELS = 16
RAMP_UNIT = 32


def rise(spent: float, over: float) -> float:
    """Rises from 0 to 1 over the first fraction `over`, then stays 1."""
    return min(1.0, spent / over) if over else 1.0


def fall(spent: float, over: float) -> float:
    """Stays 1 until the last fraction `over`, then falls to 0 at 1."""
    return max(0.0, min(1.0, (1.0 - spent) / over))


def half_cosine(left: float) -> float:
    """Half a cosine, from 1 if all is left (1) to 0 if nothing is left (0)."""
    return 0.5 * (1.0 - math.cos(math.pi * left))


def warm_cosine(spent: float, warmup: float) -> float:
    """Rises from 0 to 1 over the fraction `warmup`, then falls to 0 at 1 on half a cosine."""
    return min(rise(spent, warmup), half_cosine(fall(spent, 1.0 - warmup)))


def annealing(spent: float, warmup: float) -> float:
    """A warm-up, then four half cosines from 1 to 0, one after another; the last reaches 0 at the end of the budget."""
    left = 4 * fall(spent, 1.0 - warmup)
    return min(rise(spent, warmup), half_cosine(left - max(0, math.ceil(left) - 1)))


def inverse_sqrt(spent: float, warmup: float, cooldown: float) -> float:
    """A warm-up, then one over the square root of the fraction; in the last `cooldown` multiplied by a line to 0."""
    decaying = max(warmup, min(spent, 1.0 - cooldown))
    return math.sqrt(warmup / decaying) * min(rise(spent, warmup), fall(spent, cooldown))


# By name: the rate between 0 and 1 at x, the fraction spent. With a warm-up, and for one-cycle and ramp, the first step
# has rate 0, as in the reference implementation: it moves no weight but fills the optimizer's averages.
SHAPES: dict[str, Callable[[Training, float], float]] = {
    "triangle": lambda t, x: min(0.25 + x, 4.0 - 4.0 * x),  # the paper's (section 4.3): its peak is at 0.75
    "one-cycle": lambda t, x: min(rise(x, 0.5), fall(x, 0.5)),
    "cosine": lambda t, x: warm_cosine(x, t.warmup),
    "linear": lambda t, x: min(rise(x, t.warmup), fall(x, 1.0 - t.warmup)),
    "trapezoid": lambda t, x: min(rise(x, t.warmup), fall(x, t.cooldown)),
    "inverse-sqrt": lambda t, x: inverse_sqrt(x, t.warmup, t.cooldown),
    "ramp": lambda t, x: min(rise(x, 1.0 - t.cooldown), fall(x, t.cooldown)),
    "dive": lambda t, x: fall(x, t.cooldown),
    "annealing": lambda t, x: annealing(x, t.warmup),
    "polynomial": lambda t, x: min(rise(x, t.warmup), fall(x, 1.0 - t.warmup) ** t.power),
}


def rate(training: Training, spent: float) -> float:
    """The factor of the peak rates: the schedule between `floor` and 1, and exactly `floor` from 1 on."""
    shape = SHAPES[training.schedule](training, spent) if spent < 1 else 0.0
    return training.floor + (1.0 - training.floor) * shape


def ramp_unit(training: Training) -> int:
    """Sequences by which the batch grows, a divisor of batch_size; batch_size itself if batch_ramp is 0.

    It is the same on every machine, and a machine's micro-batch divides it.
    """
    if not training.batch_ramp:
        return training.batch_size
    most = max(RAMP_UNIT, training.batch_size // RAMP_LEVELS)
    unit = min(most, training.batch_size)
    while training.batch_size % unit:
        unit -= 1
    return unit


def batch(training: Training, spent: float) -> int:
    """Sequences of a step: from one unit up to batch_size, linear in the budget; batch_size from batch_ramp on."""
    if spent >= training.batch_ramp:
        return training.batch_size
    unit = ramp_unit(training)
    units = math.floor(training.batch_size * spent / training.batch_ramp / unit) + 1
    return min(training.batch_size, unit * units)


def mask_fraction(training: Training, spent: float) -> float:
    """The fraction of tokens to predict: mask_fraction, or from it to last_mask_fraction in five equal steps."""
    first = training.mask_fraction
    last = training.last_mask_fraction
    if last is None:
        return first
    level = min(MASK_LEVELS - 1, math.floor(MASK_LEVELS * spent))
    done = level / (MASK_LEVELS - 1)
    return (1.0 - done) * first + done * last


def masks_stay_until(training: Training, spent: float) -> float:
    """The fraction of the budget at which the masked fraction changes next; 1 if it stays until the end."""
    if training.last_mask_fraction is None:
        return 1.0
    return min(MASK_LEVELS, math.floor(MASK_LEVELS * spent) + 1) / MASK_LEVELS
