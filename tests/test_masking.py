import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from model.batches import Batches
from model.heldout import Heldout
from model.masking import Corpus, mask, masks_per_sequence
from model.settings import Training
from tasks.pretrain import Pretrain

SPECIALS, MASK_ID, VOCABULARY = 5, 4, 60_000


def corpus_of(rows: np.ndarray, vocabulary: int = VOCABULARY) -> Corpus:
    return Corpus(rows, Heldout.of_rows(rows[:0]), vocabulary, MASK_ID, SPECIALS)


def plain(sequences: int, length: int, vocabulary: int = VOCABULARY, kind: type = np.uint16) -> Corpus:
    """Sequences of token ids with no special one among them."""
    rows = np.random.default_rng(length).integers(SPECIALS, vocabulary, (sequences, length))
    return corpus_of(rows.astype(kind), vocabulary)


def masked(corpus: Corpus, count: int, first: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What all sequences of a corpus become, the chosen positions, and what stood there."""
    return mask(corpus.sequences, first, count, corpus, seed)


def same(some: tuple, others: tuple) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def assert_drawn(counts: np.ndarray, chance: float, draws: int) -> None:
    """These counts, each with this chance per draw, are as uneven as chance makes them, not more and not less."""
    deviations = (counts - draws * chance) / math.sqrt(draws * chance * (1 - chance))
    assert abs(deviations).max() < 5
    assert 0.5 < math.sqrt((deviations**2).mean()) < 1.5


def test_the_number_of_masks_is_the_fraction_rounded_and_at_least_one():
    assert [masks_per_sequence(p, 128) for p in (0.15, 0.15625, 0.25, 0.4, 0.001)] == [19, 20, 32, 51, 1]


@pytest.mark.parametrize(
    ("count", "hidden", "random"), [(19, 15, 2), (20, 16, 2), (32, 26, 3), (51, 41, 5), (1, 1, 0), (10, 8, 1)]
)
def test_the_split_is_that_of_the_reference_implementation(count, hidden, random):
    inputs, positions, labels = masked(plain(200, 128), count)
    shown = np.take_along_axis(inputs, positions, axis=1)
    assert positions.shape == labels.shape == (200, count)
    assert ((shown == MASK_ID).sum(axis=1) == hidden).all()
    others = ((shown != MASK_ID) & (shown != labels)).sum(axis=1)
    assert (others <= random).all()
    assert others.sum() >= 200 * random - 3  # a random token is the one that stood there once in 59,995 times


@pytest.mark.parametrize("count", [1, 19, 32])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 1.0])
def test_of_the_tokens_to_predict_the_given_share_is_hidden_and_half_of_the_others_are_random(count, share):
    corpus = plain(400, 128)
    inputs, positions, labels = mask(corpus.sequences, 0, count, corpus, 0, share)
    shown = np.take_along_axis(inputs, positions, axis=1)
    hidden, kept = (shown == MASK_ID).sum(axis=1), (shown == labels).sum(axis=1)
    assert (hidden == round(share * count)).all()
    random = round((1 - share) / 2 * count)
    assert (kept >= count - round(share * count) - random).all()
    assert (
        kept.sum() <= 400 * (count - round(share * count) - random) + 5
    )  # a random token can be the one that stood there
    assert share != 0.8 or same(masked(corpus, count), (inputs, positions, labels)), "the usual share"


def test_training_hides_the_share_that_its_settings_give():
    corpus = plain(16, 64)
    for share in (0.0, 0.8, 1.0):
        with_share = Batches(corpus, 16, Training(seed=3, masked_share=share), torch.device("cpu"))
        tokens, positions, labels = with_share.make(0, 16)
        with_share.close()
        expected = mask(corpus.sequences, 0, 16, corpus, 3, share)
        assert same([part.numpy() for part in (tokens, positions, labels)], expected)


@pytest.mark.parametrize("detection", [0.0, 1.0])
def test_all_of_a_batch_is_contiguous_and_goes_to_a_gpu_from_pinned_memory(detection: float, monkeypatch):
    """A copy from elsewhere waits for the steps that are queued on the GPU."""
    pinned, sent = [], []

    def to(part: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        sent.append((part.is_contiguous(), any(part is other for other in pinned), device.type, non_blocking))
        return part

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part: pinned.append(part) or part)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batches = Batches(plain(16, 64), 8, Training(detection=detection), torch.device("cuda"))
    batches.make(0, 16)
    batches.close()
    assert sent == [(True, True, "cuda", True)] * (4 if detection else 3)


def test_the_usual_share_leaves_the_key_of_a_model_as_it_was_and_another_changes_it():
    usual = Pretrain().identity()
    newer = {"masked_share", "detection", "replaced", "swapped"}
    assert set(usual) == set(Pretrain.model_fields) - newer
    assert Pretrain(masked_share=0.8).identity() == usual
    assert Pretrain(masked_share=1.0).identity() == usual | {"masked_share": 1.0}
    assert Pretrain(masked_share=0.0).identity() == usual | {"masked_share": 0.0}
    for share in (-0.1, 1.1):
        with pytest.raises(ValidationError, match="masked_share"):
            Pretrain(masked_share=share)


@pytest.mark.parametrize(("kind", "vocabulary"), [(np.uint16, 60_000), (np.uint32, 200_000)])
def test_positions_are_distinct_and_labels_are_what_stood_there(kind, vocabulary):
    corpus = plain(100, 64, vocabulary, kind)
    before = corpus.sequences.copy()
    inputs, positions, labels = masked(corpus, 16, first=7)
    assert {part.dtype for part in (inputs, positions, labels)} == {np.dtype(np.int64)}
    assert np.array_equal(corpus.sequences, before)
    assert all(len(set(row)) == 16 for row in positions.tolist())
    assert np.array_equal(labels, np.take_along_axis(before, positions, axis=1))
    np.put_along_axis(inputs, positions, labels, axis=1)
    assert np.array_equal(inputs, before)
    wider = corpus_of(before.astype(np.uint32), vocabulary)
    assert same(masked(wider, 16, first=7)[1:], (positions, labels))


def test_random_tokens_are_all_but_the_special_ones_and_equally_often():
    vocabulary = 1000
    corpus = corpus_of(np.full((20_000, 40), vocabulary, dtype=np.uint16), vocabulary)  # an id that is not drawn
    inputs, *_ = masked(corpus, 40)
    drawn = inputs[(inputs != MASK_ID) & (inputs != vocabulary)]
    assert len(drawn) == 20_000 * 4
    counts = np.bincount(drawn, minlength=vocabulary)
    assert len(counts) == vocabulary
    assert not counts[:SPECIALS].any()
    assert_drawn(counts[SPECIALS:], 1 / 995, len(drawn))


def test_special_tokens_are_chosen_only_where_there_are_too_few_others():
    rows = plain(50, 32).sequences
    rows[:, ::2] = 3
    _, positions, _ = masked(corpus_of(rows), 16)
    assert (positions % 2 == 1).all()
    rows[:, 5:] = 2  # leaves the positions 1 and 3
    _, positions, _ = masked(corpus_of(rows), 16)
    assert all({1, 3} <= set(row) and len(set(row)) == 16 for row in positions.tolist())


def test_positions_are_equally_likely_and_drawn_independently_of_each_other():
    """Each position, each hidden one, and each pair, in a sequence and from one sequence to the next."""
    sequences, length, count = 40_000, 16, 4
    inputs, positions, _ = masked(plain(sequences, length), count)
    chosen = np.zeros((sequences, length), dtype=np.int64)
    np.put_along_axis(chosen, positions, 1, axis=1)
    each = count / length
    assert_drawn(chosen.sum(axis=0), each, sequences)
    assert_drawn((inputs == MASK_ID).sum(axis=0), 3 / length, sequences)
    within = (chosen.T @ chosen)[~np.eye(length, dtype=bool)]
    assert_drawn(within, each * (count - 1) / (length - 1), sequences)
    assert_drawn(chosen[1:].T @ chosen[:-1], each**2, sequences - 1)


@pytest.mark.parametrize("count", [1, 5, 13, 32, 64])
def test_a_sequence_has_the_same_masks_however_the_corpus_is_cut_into_batches(count):
    corpus, first = plain(60, 66), 10**12
    for cuts in (range(1, 60), [7, 8, 38]):
        batches, starts = np.split(corpus.sequences, cuts), [first, *(first + cut for cut in cuts)]
        parts = [mask(rows, start, count, corpus, 0) for rows, start in zip(batches, starts, strict=True)]
        assert same(masked(corpus, count, first), [np.concatenate(part) for part in zip(*parts, strict=True)])


def test_no_two_seeds_epochs_or_sequences_have_the_same_masks():
    corpus, numbers = corpus_of(np.tile(plain(1, 128).sequences, (50, 1))), range(0, 1000, 50)
    every = [masked(corpus, 32, first=first, seed=seed)[1] for first in numbers for seed in (0, 1, 2**31 - 1)]
    assert len({tuple(row) for positions in every for row in positions.tolist()}) == 3 * 1000
