import threading

import numpy as np
import pytest
import torch

from model import bert, micro_batch
from model.batches import Batches
from model.checkpoint import Spent
from model.heldout import Heldout
from model.machine import Machine
from model.masking import Corpus, mask
from model.settings import Architecture, Training

SPECIALS, LENGTH = 5, 12
SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)


@pytest.fixture
def batches():
    """Four at a time of ten sequences that hold their own number only."""
    rows = SPECIALS + np.repeat(np.arange(10)[:, None], LENGTH, axis=1).astype(np.uint16)
    made = Batches(
        Corpus(rows, Heldout.of_rows(rows[:0]), SPECIALS + 10, 4, SPECIALS), 4, Training(seed=7), torch.device("cpu")
    )
    yield made
    made.close()


def same(some: tuple, others: tuple) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_a_batch_is_the_next_sequences_masked_and_after_the_last_comes_the_first(batches):
    made, rows = batches.make(28, 5), batches.corpus.sequences[[8, 9, 0, 1]]
    assert [part.shape for part in made] == [(4, LENGTH), (4, 5), (4, 5)]
    assert {part.dtype for part in made} == {torch.int64}
    assert same(made, tuple(torch.from_numpy(part) for part in mask(rows, 28, 5, batches.corpus, 7)))


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


def test_closing_ends_the_thread(batches):
    before = threading.active_count()
    batches.take(0, 5, 4)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def chosen(batches: Batches, share: int, most: int = 1024, spent: Spent | None = None) -> int:
    """The size of the micro-batch where the memory is probed."""
    model = bert.Bert(SMALL, SPECIALS + 10, LENGTH)
    here = Machine(batches.device, torch.float32, False, most, probes=True)
    size = micro_batch.choose(model, Training(), batches.corpus, here, spent or Spent(), share)
    assert all(p.grad is None for p in model.parameters())
    untouched = bert.Bert(SMALL, SPECIALS + 10, LENGTH).state_dict()
    assert all(torch.equal(value, untouched[name]) for name, value in model.state_dict().items())
    return size


FULL = [
    torch.OutOfMemoryError("out of memory"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", FULL)
@pytest.mark.parametrize(
    ("batch", "most", "failures", "used"),
    [(24, 1024, 3, 6), (24, 1024, 0, 24), (24, 10, 0, 8), (24, 1024, 7, 1), (7, 1024, 1, 1), (24, 1024, 99, 1)],
)
def test_the_memory_decides_the_micro_batch_where_it_is_probed(
    monkeypatch, batches, batch, most, failures, used, error
):
    left, backward = iter(range(failures)), torch.Tensor.backward

    def limited(loss: torch.Tensor) -> None:
        backward(loss)
        if next(left, None) is not None:
            raise error

    monkeypatch.setattr(torch.Tensor, "backward", limited)
    assert chosen(batches, batch, most) == used


def test_an_error_that_is_not_of_the_memory_ends_the_search(monkeypatch, batches):
    def broken(loss: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.Tensor, "backward", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        chosen(batches, 8)


def test_the_search_computes_a_micro_batch_while_all_gradients_exist(monkeypatch, batches):
    model, backward, there = bert.Bert(SMALL, SPECIALS + 10, LENGTH), torch.Tensor.backward, []

    def watched(loss: torch.Tensor) -> None:
        there.append({p.grad is not None for p in model.parameters()})
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    here = Machine(batches.device, torch.float32, False, 4, probes=True)
    assert micro_batch.choose(model, Training(), batches.corpus, here, Spent(), 4) == 4
    assert there == [{False}, {True}]


def test_memory_that_an_earlier_run_has_left_on_a_gpu_is_freed_before_the_search(monkeypatch, batches):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(micro_batch, "fits", lambda *about: not done.append("searched"))
    monkeypatch.setattr(Machine, "device_name", lambda self: "a GPU")
    here = Machine(torch.device("cuda"), torch.bfloat16, False, 4, probes=True)
    micro_batch.choose(bert.Bert(SMALL, SPECIALS + 10, LENGTH), Training(), batches.corpus, here, Spent(), 4)
    assert done == ["freed", "searched"]


@pytest.mark.parametrize(
    ("device", "holds", "used"),
    [("same", 8, 4), ("same", 2, 2), ("smaller", 2, 2), ("smaller", 1, 1), ("larger", 8, 8)],
)
def test_a_resumed_run_keeps_its_micro_batch_on_the_same_card_and_takes_what_fits_on_another(
    monkeypatch, batches, device, holds, used
):
    monkeypatch.setattr(micro_batch, "fits", lambda *about: about[4] <= holds)
    monkeypatch.setattr(Machine, "device_name", lambda self: device)
    assert chosen(batches, 8, spent=Spent(step=3, micro_batch=4, device="same")) == used
