"""Why a run has not learned from context, as far as its held-out losses show it, and what helps."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from model.errors import InputError
from model.wording import counted

HOPEFUL_UNTIL = 0.1  # fraction of the budget until which the loss may be above that of token frequencies alone
FELL = 0.05  # nats per token by which a loss has to fall, over the second half of the run, to be called falling
ROSE = 0.15  # nats per token of a rise that counts: measured on a few hundred tokens, a loss swings by some hundredths
NEAR = 0.05  # fraction of the loss by token frequencies; a loss within it is on the plateau of that loss
# tokens for which pocket-sized models stay on the plateau, by their positions (docs/findings.md)
PLATEAU = 8_000_000
PLATEAU_ROTARY = 3_000_000
FEW_STEPS = 300  # the demo's recipe leaves the plateau within 200 steps of 2,048 tokens
SMALL_WIDTH = 128  # the width of the smallest recipe, pocket-mini: nobody is advised to take a smaller model
# After this many epochs, a training loss that is this far below the held-out loss means that the text is memorized.
MANY_EPOCHS = 4
KNOWN_BY_HEART = 0.5


class Course(NamedTuple):
    """A run up to now: its held-out losses (nats per token, the first before any step), and what it has done.

    `by_frequencies`: nats per held-out token by token frequencies alone. `epochs`: how often it has read the text.
    `training_loss`: nats per masked token of the last steps, None if unknown.
    """

    losses: Sequence[float]
    by_frequencies: float
    steps: int
    tokens: int
    epochs: float
    batch_size: int
    learning_rate: float
    is_rotary: bool
    width: int  # of the model's states
    training_loss: float | None = None

    @property
    def rise(self) -> tuple[float, float]:
        """The largest rise of the loss: the lowest value before it, and the value at its top."""
        lowest = np.minimum.accumulate(self.losses)
        top = int(np.argmax(self.losses - lowest))
        return float(lowest[top]), float(self.losses[top])

    @property
    def jumped(self) -> bool:
        """Whether the loss rose far at some point and has not fallen below where the rise began."""
        low, high = self.rise
        return high - low > ROSE and self.losses[-1] > low - FELL

    @property
    def falls(self) -> bool:
        """Whether the loss fell over the second half of the run, to about its lowest value."""
        last = self.losses[-1]
        middle = self.losses[(len(self.losses) - 1) // 2]
        return last < middle - FELL and last < min(self.losses) + FELL

    @property
    def known_by_heart(self) -> bool:
        """Whether the model has memorized the training text, so that training longer on it doesn't help."""
        if self.training_loss is None or self.epochs < MANY_EPOCHS:
            return False
        return self.losses[-1] - self.training_loss > KNOWN_BY_HEART

    @property
    def stands_near_frequencies(self) -> bool:
        """Whether the loss is about that of the token frequencies."""
        return abs(self.losses[-1] - self.by_frequencies) <= NEAR * self.by_frequencies


def becomes_hopeless(evaluations: list[dict], limit: float) -> bool:
    """Whether the last held-out loss is the first one to worry about.

    `limit`: the loss by token frequencies. A loss that falls is not worrying: with a budget of a minute, it may be
    above the limit for a third of the run.
    """
    hopeless = []
    for before, after in pairwise(evaluations):
        falls = after["heldout_loss"] < max(before["heldout_loss"], limit)
        if after["fraction"] >= HOPEFUL_UNTIL and not falls:
            hopeless.append(after)
    return hopeless == evaluations[-1:]


def advice(course: Course) -> str:
    """Sentences: what the losses say, with the numbers that they rest on, and what to change."""
    last = course.losses[-1]
    did = f"{counted(course.tokens, 'token')} in {counted(course.steps, 'step')}"
    rate = (
        f"Lower pretrain.learning_rate (now {course.learning_rate:g}; Muon's is matrix_learning_rate), or set or lower "
        "pretrain.clip."
    )
    if course.known_by_heart:
        return (
            f"The model has read the text {course.epochs:.1f} times and memorized it: its loss is "
            f"{course.training_loss:.4g} nats per token in training and {last:.4g} on held-out text. Add text "
            "(download), or lower pretrain.budget."
        )
    if course.jumped:
        low, high = course.rise
        return (
            f"The held-out loss rose from {low:.4g} to {high:.4g} nats per token: the learning rate is too high. {rate}"
        )
    if course.falls:
        return f"The held-out loss is falling overall, but {did} are too few. {advice_for_more_steps(course)}"
    if course.steps < FEW_STEPS:
        return f"The model has read {did}, too few to say more. {advice_for_more_steps(course)}"
    if not course.stands_near_frequencies:
        return (
            f"After {did} the held-out loss stays at {last:.4g} nats per token, far from the "
            f"{course.by_frequencies:.4g} of token frequencies: the learning rate may be too high. {rate}"
        )
    if course.is_rotary and course.tokens > PLATEAU_ROTARY:
        return f"After {did} the model still knows only token frequencies, for longer than usual. {rate}"
    return (
        f"After {did} the model knows only token frequencies, as every model does at first: {advice_on_plateau(course)}"
    )


def advice_for_more_steps(course: Course) -> str:
    """How to take more steps."""
    batch = f"Lower pretrain.batch_size (now {course.batch_size:,}) to take more steps"
    if course.width > SMALL_WIDTH:
        batch += ", take a smaller model (recipe pocket-mini),"
    return f"{batch} or raise pretrain.budget."


def advice_on_plateau(course: Course) -> str:
    """How long a model usually knows only token frequencies, and how to get beyond that."""
    usual = PLATEAU_ROTARY if course.is_rotary else PLATEAU
    raises = "Raise pretrain.budget"
    if not course.is_rotary:
        raises += ", or set pretrain.architecture.positions to rotary"
    return f"a pocket-sized one with such positions for about {usual / 1e6:g} million tokens. {raises}."


def not_finite(step: int, what: str) -> InputError:
    """The error of a step whose loss, gradient or weights are not finite."""
    return InputError(
        f"At step {step} {what}; expected finite numbers. The last checkpoint is kept. Lower pretrain.learning_rate or "
        "pretrain.clip."
    )
