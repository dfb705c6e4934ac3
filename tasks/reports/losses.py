"""Held-out losses: in words, which two can be compared, and what speaks against one."""

from typing import Any

from model.diagnosis import Course, advice
from model.wording import counted

SAME_LENGTHS = 1e-6  # nats per byte: the same vocabulary has the same cost of the numbers of pieces, but for rounding
BY_FREQUENCIES = 0.9  # of the loss by token frequencies: models that only adapt these to the text have 0.92 to 0.95
# A standard error from 10 documents is itself uncertain by a quarter, from three by a half; a word's loss varies by
# some 3 nats, so the mean of 1000 by 0.1
FEWEST_DOCUMENTS = 10
FEWEST_WORDS = 1000


def nats(held: dict, unit: str) -> str:
    """The held-out loss per word, character or byte, with its standard error."""
    loss = held[f"nats_per_{unit}"]
    error = loss["standard_error"]
    shown = f"{loss['value']:.4f}"
    return shown if error is None else f"{shown} ± {error:.4f}"


def vocabularies_differ(a: float, b: float) -> bool:
    """Whether two losses are of vocabularies that split the words of the held-out text differently.

    `a`, `b`: the nats per byte of each that are for the numbers of pieces; NaN where they are unknown.
    """
    return abs(a - b) > SAME_LENGTHS


def reads_no_context(loss: Any, lengths: Any, by_frequencies: Any) -> Any:
    """Whether a loss is more than nine tenths of that of token frequencies, the cost of lengths aside.

    Takes numbers, or columns of them.
    """
    return loss - lengths > BY_FREQUENCIES * (by_frequencies - lengths)


def doubts(stats: dict, params: dict) -> list[str]:
    """What speaks against a model or its held-out loss. `stats`, `params`: those of its pretrain stage."""
    return [doubt for doubt in (context_doubt(stats, params), text_doubt(stats)) if doubt]


def context_doubt(stats: dict, params: dict) -> str:
    """Sentences about a held-out loss that is not below that of token frequencies alone; empty for any other."""
    held = stats.get("heldout", {})
    limits = held.get("by_frequencies")
    if not limits:
        return ""
    loss = held["nats_per_byte"]["value"]
    if loss < limits["nats_per_byte"]:
        return ""
    course = Course(
        losses=[each["heldout_loss"] for each in stats["evaluations"]],
        by_frequencies=limits["nats_per_token"],
        steps=stats["steps"],
        tokens=stats["tokens"],
        epochs=stats["epochs"],
        batch_size=params["batch_size"],
        learning_rate=params["learning_rate"],
        is_rotary=params["architecture"]["positions"] == "rotary",
        width=params["architecture"]["hidden"],
        training_loss=stats["training_loss"],
    )
    return (
        f"It learned nothing from context: {loss:.4g} nats per held-out byte; token frequencies alone give "
        f"{limits['nats_per_byte']:.4g}. {advice(course)}"
    )


def text_doubt(stats: dict) -> str:
    """A sentence about a held-out loss of too little text to mean much; empty for any other."""
    held = stats.get("heldout")
    if not held or (held["documents"] >= FEWEST_DOCUMENTS and held["words"] >= FEWEST_WORDS):
        return ""
    return (
        f"The held-out loss rests on {counted(held['words'], 'word')} in {counted(held['documents'], 'document')}, too "
        f"few to compare runs by it: below {FEWEST_WORDS:,} words a few rare ones decide, and below {FEWEST_DOCUMENTS} "
        "documents its standard error means little. Raise tokenize.heldout_fraction, or train on more text."
    )
