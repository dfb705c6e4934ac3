import threading

import numpy as np
import pytest
import torch

from model.batches import Batches
from model.heldout import Heldout
from model.masking import Corpus, mask

SPECIALS, MASK_ID, LENGTH = 5, 4, 12
CPU = torch.device("cpu")


def numbered(sequences: int, kind: type = np.uint16) -> Corpus:
    """Sequences that hold their own number only."""
    rows = SPECIALS + np.repeat(np.arange(sequences)[:, None], LENGTH, axis=1).astype(kind)
    return Corpus(rows, Heldout.of_rows(rows[:0]), SPECIALS + sequences, MASK_ID, SPECIALS)


@pytest.fixture
def batches():
    made = Batches(numbered(10), 4, 7, CPU)
    yield made
    made.close()


def original(batch: tuple[torch.Tensor, ...]) -> list[int]:
    """The numbers of the sequences in a batch, before they were masked."""
    tokens, positions, labels = batch
    whole = tokens.scatter(1, positions, labels) - SPECIALS
    assert (whole == whole[:, :1]).all()
    return whole[:, 0].tolist()


def same(some: tuple, others: tuple) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_a_batch_is_the_next_sequences_masked(kind):
    corpus = numbered(10, kind)
    made = Batches(corpus, 4, 7, CPU).make(3, 5)
    assert original(made) == [3, 4, 5, 6]
    assert [part.shape for part in made] == [(4, LENGTH), (4, 5), (4, 5)]
    assert {part.dtype for part in made} == {torch.int64}
    assert same(made, tuple(torch.from_numpy(part) for part in mask(corpus.sequences[3:7], 3, 5, corpus, 7)))


def test_sequences_come_again_from_the_first_with_other_masks(batches):
    taken = [batches.take(first, 5, first + 4) for first in range(0, 40, 4)]
    assert [number for batch in taken for number in original(batch)] == [number % 10 for number in range(40)]
    assert original(taken[0]) == original(taken[5]) == [0, 1, 2, 3]
    assert not torch.equal(taken[0][1], taken[5][1])


def test_what_is_taken_is_what_is_made_whatever_was_asked_for_before(batches):
    orders = [(0, 5, 4), (4, 5, 8), (8, 3, 12), (12, 3, 16), (16, 3, 999), (0, 3, 4), (4, 5, 8), (4, 5, 8), (999, 1, 0)]
    for first, masks, after in orders:
        assert same(batches.take(first, masks, after), batches.make(first, masks))


def test_the_next_batch_is_made_on_a_thread_before_it_is_asked_for(batches, monkeypatch):
    made, make = [], batches.make

    def recording(first, masks):
        made.append((first, threading.current_thread() is threading.main_thread()))
        return make(first, masks)

    monkeypatch.setattr(batches, "make", recording)
    for first, after in ((0, 4), (4, 8), (8, 100), (12, 16)):
        batches.take(first, 5, after)
        batches.next[1].result()
    assert made == [(0, True), (4, False), (8, False), (100, False), (12, True), (16, False)]


def test_an_error_on_the_thread_is_raised_where_the_batch_is_taken(batches, monkeypatch):
    def fails(*args):
        raise OSError("the disk is gone")

    batches.take(0, 5, 4)
    batches.next[1].result()
    monkeypatch.setattr(batches, "make", fails)
    batches.take(4, 5, 8)  # made before
    with pytest.raises(OSError, match="the disk is gone"):
        batches.take(8, 5, 12)


def test_closing_ends_the_thread_and_what_it_was_to_make():
    before = threading.active_count()
    made = Batches(numbered(10), 4, 7, CPU)
    made.make(0, 5)
    assert threading.active_count() == before  # no thread until a batch is taken
    made.take(0, 5, 4)
    assert threading.active_count() == before + 1
    made.close()
    assert threading.active_count() == before
    made.close()
