import math

import numpy as np
import pytest

from model.heldout import Heldout
from model.masking import Corpus, mask, masks_per_sequence

SPECIALS, MASK_ID, VOCABULARY = 5, 4, 60_000


def corpus_of(rows: np.ndarray, vocabulary: int = VOCABULARY) -> Corpus:
    return Corpus(rows, Heldout.of_rows(rows[:0]), vocabulary, MASK_ID, SPECIALS)


def plain(sequences: int, length: int, vocabulary: int = VOCABULARY, kind: type = np.uint16) -> Corpus:
    """Sequences of token ids with no special one among them."""
    rows = np.random.default_rng(length).integers(SPECIALS, vocabulary, (sequences, length))
    return corpus_of(rows.astype(kind), vocabulary)


def masked(corpus: Corpus, count: int, first: int = 0, seed: int = 0):
    """What all sequences of a corpus become, and `shown`, what stands at the chosen positions."""
    inputs, positions, labels = mask(corpus.sequences, first, count, corpus, seed)
    return inputs, positions, labels, np.take_along_axis(inputs, positions, axis=1)


def same(some: tuple, others: tuple) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def squared_deviations(counts: np.ndarray, chance: float, draws: int) -> float:
    """The chi-square statistic of these counts, each with this chance per draw, in deviations from its mean."""
    expected = draws * chance
    statistic = ((counts - expected) ** 2 / (expected * (1 - chance))).sum()
    return (statistic - len(counts)) / math.sqrt(2 * len(counts))


def test_the_number_of_masks_is_the_fraction_rounded_and_at_least_one():
    assert [masks_per_sequence(p, 128) for p in (0.15, 0.15625, 0.25, 0.4)] == [19, 20, 32, 51]
    assert masks_per_sequence(0.001, 128) == 1


@pytest.mark.parametrize(
    ("count", "hidden", "random"), [(19, 15, 2), (20, 16, 2), (32, 26, 3), (51, 41, 5), (1, 1, 0), (10, 8, 1)]
)
def test_the_split_is_that_of_the_reference_implementation(count, hidden, random):
    _, positions, labels, shown = masked(plain(200, 128), count)
    assert positions.shape == labels.shape == (200, count)
    assert ((shown == MASK_ID).sum(axis=1) == hidden).all()
    others = ((shown != MASK_ID) & (shown != labels)).sum(axis=1)
    assert (others <= random).all()
    assert others.sum() >= 200 * random - 3  # a random token is the one that stood there once in 59,995 times


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_positions_are_distinct_and_labels_are_what_stood_there(kind):
    vocabulary = 60_000 if kind is np.uint16 else 200_000
    corpus = plain(100, 64, vocabulary, kind)
    before = corpus.sequences.copy()
    inputs, positions, labels, _ = masked(corpus, 16, first=7)
    assert same(masked(corpus_of(before.astype(np.uint32), vocabulary), 16, first=7)[:2], (inputs, positions))
    assert {part.dtype for part in (inputs, positions, labels)} == {np.dtype(np.int64)}
    assert np.array_equal(corpus.sequences, before)
    assert all(len(set(row)) == 16 for row in positions.tolist())
    assert np.array_equal(labels, np.take_along_axis(before, positions, axis=1))
    chosen = np.zeros(before.shape, dtype=bool)
    np.put_along_axis(chosen, positions, True, axis=1)
    assert np.array_equal(inputs[~chosen], before[~chosen])
    np.put_along_axis(inputs, positions, labels, axis=1)
    assert np.array_equal(inputs, before)
    assert before.max() > 65_535 or kind is np.uint16


def test_random_tokens_are_all_but_the_special_ones_and_equally_often():
    vocabulary = 1000
    corpus = corpus_of(np.full((20_000, 40), vocabulary, dtype=np.uint16), vocabulary)  # an id that is not drawn
    inputs, *_ = masked(corpus, 40)
    drawn = inputs[(inputs != MASK_ID) & (inputs != vocabulary)]
    assert len(drawn) == 20_000 * 4
    counts = np.bincount(drawn, minlength=vocabulary)
    assert len(counts) == vocabulary
    assert not counts[:SPECIALS].any()
    assert (counts[SPECIALS:] > 0).all()
    assert abs(squared_deviations(counts[SPECIALS:], 1 / 995, len(drawn))) < 5


def test_special_tokens_are_chosen_only_where_there_are_too_few_others():
    rows = plain(50, 32).sequences
    rows[:, ::2] = 3
    _, positions, labels, _ = masked(corpus_of(rows), 16)
    assert (labels >= SPECIALS).all()
    assert (positions % 2 == 1).all()
    rows[:, 5:] = 2  # leaves the positions 1 and 3
    _, positions, labels, _ = masked(corpus_of(rows), 16)
    assert ((labels >= SPECIALS).sum(axis=1) == 2).all()
    assert all({1, 3} <= set(row) and len(set(row)) == 16 for row in positions.tolist())


def test_every_position_is_as_likely_as_another():
    sequences, length, count = 20_000, 128, 32
    inputs, positions, _, _ = masked(plain(sequences, length), count)
    for counts, each in (
        (np.bincount(positions.ravel(), minlength=length), count),
        ((inputs == MASK_ID).sum(axis=0), 26),
    ):
        assert abs(squared_deviations(counts, each / length, sequences)) < 5
        assert counts.std() > 0.5 * math.sqrt(sequences * each / length * (1 - each / length))  # drawn, not dealt out


def test_positions_are_drawn_independently_of_each_other():
    """All pairs of positions are as likely, in a sequence and from one sequence to the next."""
    sequences, length, count = 40_000, 16, 4
    _, positions, _, _ = masked(plain(sequences, length), count)
    chosen = np.zeros((sequences, length), dtype=np.int64)
    np.put_along_axis(chosen, positions, 1, axis=1)
    within = (chosen.T @ chosen)[~np.eye(length, dtype=bool)]
    chance = count * (count - 1) / (length * (length - 1))
    assert abs(within - sequences * chance).max() < 5 * math.sqrt(sequences * chance * (1 - chance))
    across = (chosen[1:].T @ chosen[:-1]).ravel()
    chance = (count / length) ** 2
    assert abs(across - sequences * chance).max() < 5 * math.sqrt(sequences * chance * (1 - chance))


@pytest.mark.parametrize("count", [1, 5, 13, 32, 64])
def test_a_sequence_has_the_same_masks_however_the_corpus_is_cut_into_batches(count):
    corpus, first = plain(60, 66), 10**12
    whole = masked(corpus, count, first)[:3]
    for sizes in ([1] * 60, [60], [7, 1, 30, 22]):
        starts = np.cumsum([0, *sizes])
        parts = [
            mask(corpus.sequences[start : start + size], first + int(start), count, corpus, 0)
            for start, size in zip(starts, sizes, strict=False)
        ]
        assert same(whole, tuple(np.concatenate(part) for part in zip(*parts, strict=True)))


def test_masks_depend_on_seed_and_number_of_the_sequence_alone():
    corpus = plain(8, 64)
    first = masked(corpus, 16, first=3, seed=7)
    np.random.default_rng(0).random(100)
    assert same(first, masked(corpus, 16, first=3, seed=7))
    for number, seed in ((4, 7), (3, 8), (3, 6), (2, 8), (7, 3), (3, 2**31 - 1)):
        assert not np.array_equal(masked(corpus, 16, first=number, seed=seed)[1], first[1])


def test_no_two_epochs_or_sequences_of_a_run_have_the_same_masks():
    corpus = corpus_of(np.tile(plain(1, 128).sequences, (50, 1)))
    chosen = {tuple(row) for epoch in range(40) for row in masked(corpus, 32, first=50 * epoch)[1].tolist()}
    assert len(chosen) == 40 * 50
