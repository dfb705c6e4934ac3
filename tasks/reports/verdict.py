"""Is this good? The first sentence of a report: what pretraining was worth, and whether that is certain."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from model.wording import counted
from tasks.reports.rows import ScoreRow
from tasks.reports.scores import METRICS, averages, glue_rows, mark_score

MOST_TASKS = 3  # that are named in a sentence
SAME_ANSWER = "always giving the same answer"


class Comparison(NamedTuple):
    """A score, and how far it is above what it is compared with."""

    row: ScoreRow
    other: ScoreRow | None  # of the same model without pretraining
    difference: float | None  # to it
    interval: tuple[float, float] | None  # 95 %, of the difference

    @property
    def sign(self) -> int:
        """1 or -1 if pretraining helps or hurts, 0 if the difference may be chance.

        It may be if its interval contains 0, or if a seed of one model is as good as a seed of the other.
        """
        if self.interval is None or self.other is None or ranges_overlap(self.row, self.other):
            return 0
        low, high = self.interval
        return int(low > 0) - int(high < 0)


def ranges_overlap(row: ScoreRow, other: ScoreRow) -> bool:
    """Whether the scores of the seeds of two models overlap."""
    low, high = row["metrics"][row["metric"]]["range"]
    other_low, other_high = other["metrics"][other["metric"]]["range"]
    return low <= other_high and other_low <= high


def compare(rows: Iterable[ScoreRow]) -> list[Comparison]:
    """The scores with pretraining on all of the training data, each beside the one without."""
    rows = [row for row in rows if row["share"] == 1]
    random = {(row["task"], row["split"]): row for row in rows if not row["pretrained"]}
    found = []
    for row in rows:
        if row["pretrained"]:
            found.append(compare_with(row, random.get((row["task"], row["split"]))))
    return found


def compare_with(row: ScoreRow, other: ScoreRow | None) -> Comparison:
    """A score beside the one without pretraining, if there is one."""
    if other is None:
        return Comparison(row, None, None, None)
    difference, interval = difference_of(row, other)
    return Comparison(row, other, difference, interval)


def difference_of(row: ScoreRow, other: ScoreRow) -> tuple[float, tuple[float, float]]:
    """The difference of two scores, and its 95 % interval by those of both (Newcombe 1998, method 10).

    As if of different examples, so that the interval is rather too wide; and of examples alone, not of seeds.
    """
    difference = row["score"] - other["score"]
    below, above = distances(row)
    below_other, above_other = distances(other)
    low = difference - math.hypot(below, above_other)
    high = difference + math.hypot(above, below_other)
    return difference, (low, high)


def distances(row: ScoreRow) -> tuple[float, float]:
    """How far the interval of a score reaches below and above the score of the seed that it is of."""
    low, high = row["metrics"][row["metric"]]["interval"]
    of_seeds = sorted(row["by_seed"].values())
    own = of_seeds[(len(of_seeds) - 1) // 2]  # of an even number of seeds, the lower in the middle
    return own - low, high - own


def comparison_rows(found: Sequence[Comparison]) -> list[dict]:
    """The comparisons as rows of a table; columns that no row has are left out."""
    has_random = any(one.other for one in found)
    has_seeds = any(one.row["seeds"] > 1 for one in found)
    table = []
    for one in found:
        row = one.row
        line: dict[str, object] = {
            "task": mark_score(row["column"], row["partial"]),
            "metric": METRICS[row["metric"]],
            "score": mark_score(row["score"], False, row["beats_majority"]),
            "95 % interval": row["metrics"][row["metric"]]["interval"],
        }
        if has_random:
            line["no pretraining"] = one.other["score"] if one.other else None
            line["difference"] = difference_cell(one)
        line["majority"] = float(row["majority"][row["metric"]])
        line["examples"] = row["examples"]["validation"][0]
        if has_seeds:
            line["seeds"] = row["seeds"]
        table.append(line)
    return table


def difference_cell(one: Comparison) -> str | None:
    """A difference with its interval."""
    if one.difference is None or one.interval is None:
        return None
    low, high = one.interval
    return f"{one.difference:+.1f} ({low:+.1f} to {high:+.1f})"


# Sentences


def verdict(rows: Sequence[ScoreRow], has_learned: bool) -> str:
    """One or two sentences that answer whether the model is good. `has_learned`: more than token frequencies."""
    found = compare(rows)
    sentences = [] if has_learned else ["In pretraining, the model learned nothing from context."]
    mean = averages(glue_rows(rows)).paper
    if mean is not None:
        sentences.append(f"It averages {mean:.1f} on GLUE.")
    compared = [one for one in found if one.other]
    others = [one for one in found if not one.other]
    if compared:
        sentences.append(beside_random(compared))
    if others:
        sentences.append(beside_majority(others, "other score" if compared else "score"))
    if not found:
        sentences.append("It has no score, so whether it is good for anything is not known.")
    elif not compared:
        sentences.append("Whether pretraining helped was not measured (finetune.baseline).")
    return " ".join(sentences)


def beside_random(found: list[Comparison]) -> str:
    """What pretraining is worth on tasks that were also learned without it."""
    if len(found) == 1:
        return one_task(found[0])
    number = len(found)
    better = [one for one in found if one.sign > 0]
    worse = [one for one in found if one.sign < 0]
    unsure = [one for one in found if one.sign == 0]
    if len(better) == number:
        sentences = [f"Pretraining helps on all {number} scores{named(better)}."]
    elif better:
        sentences = [f"Pretraining helps on {len(better)} of {number} scores{named(better)}."]
    else:
        sentences = [f"Pretraining doesn't certainly help on any of the {number} scores."]
    if worse:
        sentences.append(f"It hurts on {len(worse)}{named(worse)}.")
    if unsure and len(unsure) < number:
        sentences.append(f"On {len(unsure)} the difference may be chance{named(unsure)}.")
    if number > MOST_TASKS:
        sentences.append(on_average(found))
    sentences += about_weak(found)
    return " ".join(sentences)


def about_weak(found: list[Comparison]) -> list[str]:
    """A sentence on the scores that aren't certainly better than a constant answer, if there are any."""
    weak = [one.row["column"] for one in found if not one.row["beats_majority"]]
    if not weak:
        return []
    which = f" ({', '.join(weak)})" if len(weak) <= MOST_TASKS else ""
    verb = "is" if len(weak) == 1 else "are"
    return [f"{len(weak)} of the {len(found)}{which} {verb} not certainly better than {SAME_ANSWER}."]


def on_average(found: Sequence[Comparison]) -> str:
    """How far the scores are above those without pretraining."""
    differences = [one.difference for one in found if one.difference is not None]
    mean = sum(differences) / len(differences)
    where = "above" if mean >= 0 else "below"
    return f"On average they are {abs(mean):.1f} points {where} those of the same model without pretraining."


def one_task(one: Comparison) -> str:
    """What pretraining is worth on the only task."""
    row = one.row
    words = {1: "Pretraining helps", -1: "Pretraining hurts", 0: "Pretraining makes no certain difference"}[one.sign]
    low, high = one.interval or (math.nan, math.nan)
    difference = one.difference or 0.0
    where = "above" if difference >= 0 else "below"
    sentence = (
        f"{words}: {row['column']} has {row['score']:.1f} ({METRICS[row['metric']]}), {abs(difference):.1f} points "
        f"{where} the same model without pretraining (95 % interval of the difference: {low:+.1f} to {high:+.1f})."
    )
    if row["beats_majority"]:
        return sentence
    subject = "But the score" if one.sign > 0 else "The score"
    return f"{sentence} {subject} is {beside_same_answer(row)}."


def beside_same_answer(row: ScoreRow) -> str:
    """Whether a score is better than always the same answer, and the score of that."""
    words = "better" if row["beats_majority"] else "not certainly better"
    return f"{words} than {SAME_ANSWER} ({row['majority'][row['metric']]:.1f})"


def named(found: Sequence[Comparison]) -> str:
    """A few scores, without pretraining and with it, in brackets; empty if they are many."""
    if len(found) > MOST_TASKS:
        return ""
    scores = []
    for one in found:
        before = one.other["score"] if one.other else math.nan
        scores.append(f"{one.row['column']} from {before:.1f} to {one.row['score']:.1f}")
    return f" ({', '.join(scores)})"


def beside_majority(found: Sequence[Comparison], noun: str) -> str:
    """Whether scores are better than always the same answer. `noun`: for one of them."""
    better = [one for one in found if one.row["beats_majority"]]
    if len(found) == 1:
        row = found[0].row
        return f"{row['column']}: {row['score']:.1f} ({METRICS[row['metric']]}), {beside_same_answer(row)}."
    if len(better) == len(found):
        return f"All {counted(len(found), noun)} are better than {SAME_ANSWER}."
    words = f"{len(better)} of {{}} are" if better else "None of {} is"
    return f"{words.format(counted(len(found), noun))} certainly better than {SAME_ANSWER}."
