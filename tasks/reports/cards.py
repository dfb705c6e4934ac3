"""The numbers at the head of a report, each with what it is."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from model.settings import Architecture
from model.wording import counted, duration
from tasks.glue.pair_scores import CHANCE, main_accuracy
from tasks.reports.markdown import short
from tasks.reports.scores import METRICS, averages, glue_rows
from tasks.reports.verdict import Comparison

MOST_SCORES = 3  # that have a card


class Card(NamedTuple):
    """A number with what it is, and notes in small print."""

    number: str
    what: str
    note: str


def cards_of(
    stats: dict, architecture: Architecture, compared: list[Comparison], judged: Iterable[dict] = ()
) -> list[Card]:
    """The cards of a model. `stats`: of its pretraining; `compared`: its scores; `judged`: stats of minimal pairs."""
    found = score_cards(compared) + [pairs_card(each) for each in judged]
    if "heldout" not in stats:  # an adopted model
        return [*found, size_card(stats, architecture)]
    machine = stats["machine"]
    found.append(loss_card(stats["heldout"]))
    found.append(Card(short(stats["tokens"]), "tokens read", about_text(stats)))
    found.append(Card(duration(stats["seconds_on_the_clock"]), "of training", f"on {machine['device']}"))
    speed = f"{stats['tokens_per_second']:,.0f}"
    found.append(Card(speed, "tokens a second", f"{100 * stats['mfu']:.0f} % of what the machine can compute (MFU)"))
    found.append(size_card(stats, architecture))
    return found


def about_text(stats: dict) -> str:
    """How often a model read its training text, and at most how many words that has, if they were counted."""
    times = f"{stats['epochs']:.2g} times the training text"
    words = stats.get("words")
    return f"{times}, which has at most {short(words)} words" if words else times


def size_card(stats: dict, architecture: Architecture) -> Card:
    """The size of the model."""
    note = f"{counted(architecture.layers, 'layer')} of width {architecture.hidden}"
    return Card(short(stats["parameters"]), "parameters", note)


def score_cards(compared: list[Comparison]) -> list[Card]:
    """The average over GLUE, or else the first scores that beat the majority baseline."""
    mean = averages(glue_rows(one.row for one in compared)).paper
    if mean is not None:
        return [Card(f"{mean:.1f}", "GLUE, the paper's average of nine numbers", "of 100")]
    shown = [one for one in compared if one.row["beats_majority"] and not one.row["partial"]]
    return [score_card(one) for one in shown[:MOST_SCORES]]


def score_card(one: Comparison) -> Card:
    """A score, and what it compares with."""
    row = one.row
    metric = row["metric"]
    facts = []
    if one.other:
        facts.append(f"no pretraining {one.other['score']:.1f}")
    facts.append(f"always the same answer {row['majority'][metric]:.1f}")
    return Card(f"{row['score']:.1f}", f"{row['column']}, {METRICS[metric]} (of 100)", "; ".join(facts))


def pairs_card(judged: dict) -> Card:
    """The accuracy on a set of minimal pairs. `judged`: its statistics."""
    accuracy = main_accuracy(judged)
    what = f"{judged['set']}, minimal pairs whose good sentence the model prefers (%)"
    facts = f"± {accuracy.error_in_words() or 'unknown'} over the pairs; chance {CHANCE:.0f}"
    return Card(f"{accuracy.value:.1f}", what, facts)


# The held-out loss


def loss_card(held: dict) -> Card:
    """The held-out loss as a chance: the geometric mean of the probabilities of the words, by nats per word."""
    per_word = held["nats_per_word"]
    per_byte = held["nats_per_byte"]
    facts = []
    limits = held.get("by_frequencies")
    if limits:
        words_per_byte = per_word["value"] / per_byte["value"]  # in nats, and so of any loss on the same words
        facts.append(f"by the frequencies of tokens alone {chance(limits['nats_per_byte'] * words_per_byte)}")
    facts.append(f"{with_error(per_word, 2)} nats a word, {with_error(per_byte, 3)} a byte")
    what = "is the chance of the right word in a gap of unseen text (geometric mean)"
    return Card(chance(per_word["value"]), what, "; ".join(facts))


def chance(nats: float) -> str:
    """The probability of nats as `1 in 47`, to two digits."""
    odds = math.exp(min(nats, 50.0))
    if odds < 10:
        return f"1 in {odds:.1f}"
    digits = 1 - math.floor(math.log10(odds))
    return f"1 in {round(odds, digits):,.0f}"


def with_error(loss: dict, digits: int) -> str:
    """A loss with its standard error, if it has one."""
    error = loss["standard_error"]
    shown = f"{loss['value']:.{digits}f}"
    return shown if error is None else f"{shown} ± {error:.{digits}f}"
