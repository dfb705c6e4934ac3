"""Held-out text that stands in the training text too: found as by a set of runs of words, and not measured."""

import logging
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import naive
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, document, store_of_its_own

from tasks.corpus.parts import unit_hash
from tasks.reports.funnel import overlap
from tasks.store.artifacts import Artifact
from tasks.text import holdout
from tasks.text.holdout import may_be_measured
from tasks.text.ngrams import Known
from tasks.text.overlap import WORDS_IN_A_ROW, count_short, ngrams_in, ngrams_in_common, words_in_common
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, vocabulary

FRACTION = 0.2
WORDS = [f"w{number}" for number in range(26)]


def plain_counts(held: list[str], trained: list[str]) -> list[tuple[int, int]]:
    """The words of each held-out text, and those in runs that the training texts have, in plain Python."""
    known = {run for text in trained for run in naive.runs(text, WORDS_IN_A_ROW)}
    counts = []
    for text in held:
        runs = enumerate(naive.runs(text, WORDS_IN_A_ROW))  # run i begins at word i
        own = {number for first, run in runs if run in known for number in range(first, first + len(run))}
        counts.append((len(naive.words(text)), len(own)))
    return counts


def with_passages(rng: random.Random, letters: str, size: int) -> list[str]:
    """Random texts of which some share passages of all lengths, those of others, too; with short and empty ones."""
    between = (" ", ", ", "\n", " -- ") if letters[0].isascii() else ("", "", "。", "\n")
    texts = [[rng.choice(letters) * rng.randint(1, 3) for _ in range(rng.randrange(70))] for _ in range(size)]
    for text in texts:
        other = rng.choice(texts)
        if rng.random() < 0.5 and other:
            start = rng.randrange(len(other))
            length = rng.randrange(60)
            text[rng.randrange(len(text) + 1) : 0] = other[start : start + length]
    return ["".join(word + rng.choice(between) for word in text) for text in texts]


@pytest.mark.parametrize("letters", ["abcdefghij", "漢字仮名交文章天気", "ab漢字かな한글"])
def test_runs_in_common_are_those_of_plain_sets(letters: str):
    rng = random.Random(len(letters))
    texts = with_passages(rng, letters, 120)
    held = texts[:50]
    trained = texts[50:]
    known = Known(ngrams_in(held))
    found = [ngrams_in_common(known, some) for some in (trained[:30], trained[30:])]
    counts = words_in_common(Known(np.unique(np.concatenate(found))), held)
    expected = plain_counts(held, trained)
    assert list(zip(*(column.tolist() for column in counts), strict=True)) == expected
    assert 5 < sum(shared > 0 for _, shared in expected) < 45
    assert any(0 < shared < words for words, shared in expected)


@pytest.mark.parametrize("texts", [[], [""], ["one two three"]])
def test_texts_without_runs_share_nothing(texts: list[str]):
    shared = Known(ngrams_in_common(Known(ngrams_in(texts)), ["one two three", " ".join(WORDS)]))
    assert words_in_common(shared, texts)[1].tolist() == [0] * len(texts)


@pytest.mark.parametrize("letters", ["abcdefghij", "漢字仮名交文章天気"])
def test_texts_without_runs_are_too_short_to_be_compared(letters: str):
    texts = ["", *with_passages(random.Random(3), letters, 120)]
    assert 5 < count_short(texts) == sum(not naive.runs(text, WORDS_IN_A_ROW) for text in texts) < 100
    assert count_short([]) == 0


# The stage


@pytest.fixture(scope="module")
def words(tmp_path_factory, toy_texts: list[str]) -> Iterator[Artifact]:
    root = tmp_path_factory.mktemp("made")
    with store_of_its_own(root / "artifacts"):
        yield vocabulary.fn(Vocabulary(entries=400, characters="unicode"), corpus_of(root, toy_texts))


def text_where(held: bool, make: Callable[[int], str]) -> str:
    """The first text that is held out, or the first that is not."""
    for number in count():
        text = make(number)
        if (unit_hash(text) < FRACTION) == held:
            return text
    raise AssertionError


def tokenized(corpus: Artifact, words: Artifact, **changes: object) -> Artifact:
    return tokenize.fn(Tokenize(**{"length": 16, "heldout_fraction": FRACTION} | changes), corpus, words)


def held_of(made: Artifact) -> dict[str, dict]:
    """The rows of heldout.parquet by text."""
    return {row["text"]: row for row in pq.read_table(made.path / "heldout.parquet").to_pylist()}


def unlike(rng: random.Random, size: int) -> str:
    """A text that shares nothing with others."""
    return " ".join(f"{rng.getrandbits(40):x}" for _ in range(size))


RUNS = {
    "words": WORDS[:13],
    "characters": list("図書館司書貸本多彼女読終本少真実今日天気公園散歩行道"),
    "both": [*WORDS[:9], *"図書館司書貸本多"],
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_document_with_a_run_of_13_words_is_not_measured_and_one_with_a_word_less_is(words, tmp_path, kind: str):
    rng = random.Random(3)
    run = RUNS[kind]
    others = [unlike(rng, 20) for _ in range(200)]
    within = [
        text_where(False, lambda n: f"x{n} {unlike(random.Random(n), 3)} {' '.join(run)} y"),
        text_where(True, lambda n: f"{unlike(random.Random(n), 5)} {', '.join(run)}\nz{n}"),
        text_where(True, lambda n: f"{unlike(random.Random(n), 6)} {' '.join(run[1:])}. z{n}"),
        text_where(True, lambda n: f"{unlike(random.Random(n), 7)} {' '.join(run[:-1])} z{n}"),
    ]
    made = tokenized(corpus_of(tmp_path, [*others, *within]), words)
    rows = held_of(made)
    assert within[0] not in rows
    assert [rows[text]["shared_words"] for text in within[1:]] == [len(run), 0, 0]
    assert [rows[text]["measured"] is None for text in within[1:]] == [True, False, False]
    assert sum(row["measured"] is None for row in rows.values()) == 1
    stats = made.stats["heldout"]
    every = sum(row["words"] for row in rows.values())
    assert stats["shared"] == {
        "words_in_a_row": 13,
        "documents": 1,
        "characters": len(within[1]),
        **shares(pytest.approx(1 / len(rows), abs=1e-6), pytest.approx(len(run) / every, abs=1e-6)),
    }
    assert stats["measured"]["documents"] == len(rows) - 1
    assert stats["measured"]["shared"]["documents"] == 0


def test_text_that_held_out_documents_share_with_each_other_alone_does_not_count(words, tmp_path: Path):
    rng = random.Random(4)
    run = " ".join(WORDS)
    twice = [text_where(True, lambda n, place=place: f"{run} {place} {n}") for place in "ab"]
    made = tokenized(corpus_of(tmp_path, [*(unlike(rng, 20) for _ in range(100)), *twice]), words)
    assert [held_of(made)[text]["shared_words"] for text in twice] == [0, 0]


def test_what_is_shared_is_that_of_plain_sets_whatever_the_parts(words, tmp_path: Path):
    rng = random.Random(6)
    texts = [document(rng, rng.choice([1, 3, 8])) for _ in range(300)]
    whole = tokenized(corpus_of(tmp_path, texts, part_megabytes=1), words)
    rows = held_of(whole)
    expected = plain_counts(list(rows), [text for text in texts if text not in rows])
    assert [(row["words"], row["shared_words"]) for row in rows.values()] == expected
    assert 0 < sum(shared > 0 for _, shared in expected) < len(rows)
    in_parts = tokenized(corpus_of(tmp_path, texts, part_megabytes=0.008), words)
    assert list(held_of(in_parts).values()) == list(rows.values())
    assert in_parts.stats["heldout"] == whole.stats["heldout"]


def test_a_held_out_piece_of_a_long_document_is_compared_with_what_lies_around_it(words, tmp_path: Path):
    rng = random.Random(7)
    chorus = " ".join(WORDS)
    verses = [unlike(rng, 100) for _ in range(600)]
    text = "\n".join(f"{verse}\n{chorus}" if number % 40 == 0 else verse for number, verse in enumerate(verses))
    made = tokenized(corpus_of(tmp_path, [text, unlike(rng, 2000)]), words)
    pieces = [row for row in held_of(made).values() if "+" in row["id"]]
    assert len(pieces) > 5
    for row in pieces:
        times = row["text"].count(chorus)
        assert times * len(WORDS) <= row["shared_words"] <= (times + 2) * len(WORDS), "a chorus can be cut at both ends"
        assert (row["measured"] is None) == (row["shared_words"] > 0)
    assert {row["measured"] is None for row in pieces} == {True, False}


def shares(of_documents: float, of_words: float) -> dict[str, float]:
    return {"share_of_documents": of_documents, "share_of_words": of_words}


def test_where_nearly_all_of_it_is_shared_all_is_measured_with_a_warning(words, tmp_path: Path, caplog):
    rng = random.Random(8)
    letters = [f"To customer {unlike(rng, 3)}: {' '.join(WORDS)}. Yours {unlike(rng, 2)}" for _ in range(200)]
    made = tokenized(corpus_of(tmp_path, letters), words)
    rows = held_of(made)
    stats = made.stats["heldout"]
    assert len(rows) > 20
    assert all(row["measured"] is not None for row in rows.values())
    assert stats["measured"]["documents"] == stats["measured"]["shared"]["documents"] == len(rows)
    share = sum(row["shared_words"] for row in rows.values()) / sum(row["words"] for row in rows.values())
    assert stats["measured"]["shared"]["share_of_words"] == pytest.approx(share, abs=1e-6)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"{100 * share:.3g}%" in warning
    assert "heldout_fraction" in warning


def test_the_log_says_how_many_documents_are_too_short_to_be_compared(words, tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    texts = [f"Only {number} short words." for number in range(200)]
    held = len(held_of(tokenized(corpus_of(tmp_path, texts), words)))
    assert f"{held} held-out documents of fewer than 13 words" in caplog.text


def test_where_nothing_is_held_out_nothing_is_shared(words, tmp_path: Path):
    made = tokenized(corpus_of(tmp_path, [" ".join(WORDS)] * 9), words, heldout_fraction=1e-9)
    assert made.stats["heldout"]["shared"] == {"words_in_a_row": 13, "documents": 0, "characters": 0, **shares(0, 0)}
    assert pq.read_table(made.path / "heldout.parquet").num_rows == 0


def test_what_is_left_must_be_a_tenth_of_the_text_that_could_be_measured_and_two_documents(monkeypatch):
    monkeypatch.setattr(holdout, "MEASURED_CHARACTERS", 1000)

    def chosen(*documents: tuple[int, int]) -> list[bool]:
        columns = (pa.array(column, pa.int64()) for column in zip(*documents, strict=True))
        return may_be_measured(pa.table(list(columns), names=["characters", "shared_words"])).tolist()

    assert chosen((50, 0), (50, 0), (900, 20)) == [True, True, False]
    assert chosen((50, 0), (50, 0), (9000, 20)) == [True, True, False], "more than 1000 are not measured anyway"
    assert chosen((50, 0), (49, 0), (901, 20)) == [True] * 3
    assert chosen((500, 0), (500, 20)) == [True] * 2
    assert chosen((500, 0)) == [True]
    assert may_be_measured(pa.table({"characters": [5, 6]})).tolist() == [True] * 2, "earlier versions did not compare"


# What the report says of it


def test_the_report_says_if_the_loss_is_too_low_or_was_not_checked():
    def said(**held: dict) -> str:
        return overlap({"tokenize/0": {"stage": "tokenize", "stats": {"heldout": {"documents": 40, **held}}}})

    found = {"words_in_a_row": 13, "documents": 39, **shares(0.975, 0.8)}
    too_low = said(shared=found, measured={"shared": found | shares(0.975, 0.81)})
    assert all(words in too_low for words in ("97.5 %", "80.0 %", "too low", "81.0 %"))
    assert "not checked" in said(measured={})
    assert overlap({}) == ""
