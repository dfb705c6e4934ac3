"""Micro-batches for pretraining: masks, corruptions, the thread that makes them, and how large they are."""

import hashlib
import math
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toys import CPU, corpus_of_rows, encoder, machine_of

from model import bert, memory
from model.bert import Detecting
from model.checkpoint import Spent
from model.machine import Machine
from model.masking import IGNORED, SWAPPED, Batches, Corpus, corrupt, mask, masks_per_sequence, swap
from model.settings import Training

SPECIALS = 5
MASK_ID = 4
VOCABULARY = 60_000
DETECTION = {"detection": 1.0}


def corpus_of(rows: np.ndarray, vocabulary: int = VOCABULARY) -> Corpus:
    return corpus_of_rows(rows, vocabulary)


def plain(sequences: int, length: int, vocabulary: int = VOCABULARY) -> Corpus:
    """Sequences of token ids with no special one among them."""
    return corpus_of(np.random.default_rng(length).integers(SPECIALS, vocabulary, (sequences, length)), vocabulary)


def repeated(tokens: np.ndarray, length: int) -> Corpus:
    """Sequences of one token each, in which swaps change nothing."""
    return corpus_of(np.repeat(tokens[:, None], length, axis=1))


def masked(corpus: Corpus, count: int, first: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What all sequences of a corpus become, the chosen positions, and what stood there."""
    return mask(corpus.sequences, first, count, corpus, seed)


def corrupted(corpus: Corpus, count: int = 16, first: int = 0, seed: int = 0) -> tuple[np.ndarray, ...]:
    """What masks alone make of all sequences, the places to predict, what corruption makes of it, and the labels."""
    hidden, positions, _ = masked(corpus, count, first, seed)
    return hidden, positions, *corrupt(hidden, corpus.sequences, positions, first, corpus, seed)


def same(some: tuple, others: tuple) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(some, others, strict=True))


def assert_drawn(counts: np.ndarray, chance: float, draws: int) -> None:
    """These counts, each with this chance per draw, are as uneven as chance makes them, not more and not less."""
    deviations = (counts - draws * chance) / math.sqrt(draws * chance * (1 - chance))
    assert abs(deviations).max() < 5
    assert 0.5 < math.sqrt((deviations**2).mean()) < 1.5


# Masks


def test_the_number_of_masks_is_the_fraction_rounded_and_at_least_one():
    assert [masks_per_sequence(p, 128) for p in (0.15, 0.15625, 0.25, 0.4, 0.001)] == [19, 20, 32, 51, 1]


@pytest.mark.parametrize(
    ("share", "count", "hidden", "random"),
    [
        *((0.8, *split) for split in ((1, 1, 0), (19, 15, 2), (20, 16, 2), (32, 26, 3))),
        (0.0, 19, 0, 10),
        (0.3, 19, 6, 7),
        (1.0, 19, 19, 0),
    ],
)  # with a share of 0.8 those of the reference implementation
def test_of_the_tokens_to_predict_the_given_share_is_hidden_and_half_of_the_others_are_random(
    share, count, hidden, random
):
    corpus = plain(400, 128)
    inputs, positions, labels = mask(corpus.sequences, 0, count, corpus, 0, share)
    shown = np.take_along_axis(inputs, positions, axis=1)
    assert positions.shape == labels.shape == (400, count)
    assert ((shown == MASK_ID).sum(axis=1) == hidden).all()
    others = ((shown != MASK_ID) & (shown != labels)).sum(axis=1)
    assert (others <= random).all()
    assert others.sum() >= 400 * random - 6  # a random token is the one that stood there once in 59,995 times


@pytest.mark.parametrize("vocabulary", [60_000, 200_000])
def test_positions_are_distinct_and_labels_are_what_stood_there(vocabulary):
    corpus = plain(100, 64, vocabulary)
    before = corpus.sequences.copy()
    inputs, positions, labels = masked(corpus, 16, first=7)
    assert {part.dtype for part in (inputs, positions, labels)} == {np.dtype(np.int64)}
    assert np.array_equal(corpus.sequences, before)
    assert all(len(set(row)) == 16 for row in positions.tolist())
    assert np.array_equal(labels, np.take_along_axis(before, positions, axis=1))
    np.put_along_axis(inputs, positions, labels, axis=1)
    assert np.array_equal(inputs, before)


def test_random_tokens_are_all_but_the_special_ones_and_equally_often():
    vocabulary = 1000
    unknown = 1  # an id that is not drawn
    corpus = corpus_of(np.full((20_000, 40), unknown), vocabulary)
    inputs, *_ = masked(corpus, 40)
    drawn = inputs[(inputs != MASK_ID) & (inputs != unknown)]
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
    sequences = 40_000
    length = 16
    count = 4
    inputs, positions, _ = masked(plain(sequences, length), count)
    chosen = np.zeros((sequences, length), dtype=np.int64)
    np.put_along_axis(chosen, positions, 1, axis=1)
    each = count / length
    assert_drawn(chosen.sum(axis=0), each, sequences)
    assert_drawn((inputs == MASK_ID).sum(axis=0), 3 / length, sequences)
    within = (chosen.T @ chosen)[~np.eye(length, dtype=bool)]
    assert_drawn(within, each * (count - 1) / (length - 1), sequences)
    assert_drawn(chosen[1:].T @ chosen[:-1], each**2, sequences - 1)


@pytest.mark.parametrize("count", [1, 13, 64])
def test_a_sequence_has_the_same_masks_however_the_corpus_is_cut_into_batches(count):
    corpus = plain(60, 66)
    first = 10**12
    for cuts in (range(1, 60), [7, 8, 38]):
        batches = np.split(corpus.sequences, cuts)
        starts = [first, *(first + cut for cut in cuts)]
        parts = [mask(rows, start, count, corpus, 0) for rows, start in zip(batches, starts, strict=True)]
        assert same(masked(corpus, count, first), [np.concatenate(part) for part in zip(*parts, strict=True)])


def test_no_two_seeds_epochs_or_sequences_have_the_same_masks():
    corpus = corpus_of(np.tile(plain(1, 128).sequences, (50, 1)))
    numbers = range(0, 1000, 50)
    every = [masked(corpus, 32, first=first, seed=seed)[1] for first in numbers for seed in (0, 1, 2**31 - 1)]
    assert len({tuple(row) for positions in every for row in positions.tolist()}) == 3 * 1000


# Corruptions


@pytest.mark.parametrize("length", [1, 3, 64])
def test_labels_say_which_visible_tokens_differ_and_places_to_predict_and_special_tokens_stay(length):
    rows = np.random.default_rng(length).integers(0, 50, (60, length))
    rows[rows == MASK_ID] = SPECIALS  # packed text has no [MASK]
    hidden, positions, changed, labels = corrupted(corpus_of(rows, 50), max(1, length // 4))
    assert (np.take_along_axis(changed, positions, 1) == np.take_along_axis(hidden, positions, 1)).all()
    assert (changed[rows < SPECIALS] == hidden[rows < SPECIALS]).all()
    assert (changed[rows >= SPECIALS] >= MASK_ID).all()
    for row in range(60):
        for place in range(length):
            asked = changed[row, place] != MASK_ID and rows[row, place] >= SPECIALS
            assert labels[row, place] == (float(changed[row, place] != rows[row, place]) if asked else IGNORED)


@pytest.mark.parametrize(("length", "masks", "expected"), [(1, 0, 1), (64, 16, 3), (128, 127, 1), (128, 128, 0)])
def test_a_twentieth_of_the_tokens_is_replaced_but_at_least_one_if_one_is_free(length, masks, expected):
    hidden, _, changed, labels = corrupted(repeated(np.arange(100, 200), length), masks)
    counts = (changed != hidden).sum(axis=1)
    assert counts.max() == expected
    assert (counts == expected).mean() > 0.8  # all but those that drew the token that stood there
    assert ((labels == 1) >= (changed != hidden)).all()


def test_tokens_are_replaced_by_frequent_ones_more_often():
    sevens = repeated(np.where(np.arange(4000) % 4, 7, np.arange(100, 4100)), 64)  # three quarters of the text
    hidden, _, changed, _ = corrupted(sevens)
    drawn = changed[::4][(changed != hidden)[::4]]
    assert len(drawn) == pytest.approx(3 * 1000, rel=0.01)
    assert (drawn == 7).mean() == pytest.approx(0.75, abs=0.03)


def test_the_corruptions_of_a_seed_stay():
    """A change of them would change what a resumed or repeated run reads, under the same key."""
    rows = np.random.default_rng(0).integers(SPECIALS, VOCABULARY, (8, 64))
    _, _, changed, labels = corrupted(corpus_of(rows), 12, first=5, seed=3)
    assert hashlib.sha256(changed.tobytes() + labels.tobytes()).hexdigest()[:12] == "81f27befc83a"


def test_swaps_move_free_tokens_by_one_or_two_places_and_lose_none():
    rng = np.random.default_rng(0)
    before = np.tile(np.arange(100), (5000, 1))
    for free in (np.full(before.shape, True), rng.random(before.shape) < 0.7):
        draws = rng.integers(0, 2**64, (5000, 33), dtype=np.uint64)
        after = swap(before, free, draws[:, :1], draws[:, 1:])
        assert (np.sort(after, axis=1) == before).all()
        assert (after == before)[~free].all()
        moved = {distance: (abs(after - before) == distance).sum() for distance in range(100)}
        assert sum(moved[distance] for distance in (0, 1, 2)) == before.size
        assert moved[1] == pytest.approx(2 * moved[2], rel=0.1)  # of three trades two are of neighbours
        if free.all():
            by_place = (after != before).mean(axis=0)[2:-4]
            assert by_place.mean() == pytest.approx(SWAPPED, rel=0.05)
            assert by_place.min() > 0.7 * SWAPPED


def test_corruptions_follow_from_the_seed_and_the_number_of_the_sequence():
    corpus = plain(40, 16)
    hidden, positions, *whole = corrupted(corpus, 4, seed=3)
    for first, last in ((0, 1), (7, 20), (39, 40)):
        rows = corpus.sequences[first:last]
        parts = corrupt(hidden[first:last], rows, positions[first:last], first, corpus, 3)
        assert same(parts, [full[first:last] for full in whole])
    for first, seed in ((0, 4), (1, 3)):
        assert not np.array_equal(corrupt(hidden, corpus.sequences, positions, first, corpus, seed)[0], whole[0])


# Detection of corruptions


def some_batch(masks: int = 4) -> tuple[torch.Tensor, ...]:
    batches = Batches(plain(8, 16, 50), 8, Training(**DETECTION), CPU)
    batches.close()
    return batches.make(0, masks)


def test_the_losses_are_those_of_masked_language_modelling_and_of_a_logistic_regression_on_the_states():
    model = Detecting(encoder(50))
    with torch.no_grad():
        model.detector.weight.normal_(generator=torch.Generator().manual_seed(5))
        model.detector.bias.fill_(0.3)
    tokens, positions, labels, asked = some_batch()
    lm_loss, detected = model(tokens, positions, labels, asked)
    torch.testing.assert_close(lm_loss, model.bert(tokens, positions, labels))
    states = model.bert.encode(tokens).detach().double()  # near 1, single precision would lose the digits of a chance
    chances = (states @ model.detector.weight[0].double() + 0.3).sigmoid().detach()
    seen = asked >= 0
    right = torch.where(asked == 1, chances, 1 - chances)
    by_hand = -right[seen].log().sum() / asked.numel()
    assert detected.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_the_detector_starts_undecided_and_every_weight_gets_a_gradient_after_a_step():
    model = Detecting(encoder(50))
    batch = some_batch()
    detected = model(*batch)[1]
    assert detected.item() == pytest.approx(math.log(2) * (batch[3] >= 0).float().mean().item(), rel=1e-5)
    with torch.no_grad():
        model.detector.weight.fill_(0.1)
    model(*batch)[1].backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []  # the embedding is tied, so that the vocabulary head has none of its own


@pytest.mark.parametrize("layout", [{}, {"funnel": 1, "layers": 3, "head_transform": True}])
def test_the_operations_of_a_step_are_counted_with_the_last_block_at_all_positions(layout):
    model = encoder(50, hidden=48, intermediate=96, **layout)
    masks = 4
    architecture = model.architecture
    model = bert.with_detector(model, Training(**DETECTION))
    with FlopCounterMode(display=False) as counter:
        model(*some_batch(masks)).sum().backward()
    per_token = bert.operations_per_token(architecture, Training(**DETECTION), 50, 16, masks)
    detector = 3 * 2 * 48
    assert counter.get_total_flops() / (8 * 16) == pytest.approx(per_token + detector, rel=2e-2)
    assert per_token > bert.operations_per_token(architecture, Training(), 50, 16, masks)


# Micro-batches


@pytest.fixture
def batches():
    """Four at a time of ten sequences that hold their own number only."""
    made = Batches(repeated(SPECIALS + np.arange(10), 12), 4, Training(seed=7), CPU)
    yield made
    made.close()


@pytest.mark.parametrize("share", [0.0, 0.8, 1.0])
def test_a_batch_is_the_next_sequences_masked_and_after_the_last_comes_the_first(batches, share):
    batches.training = Training(seed=7, masked_share=share)
    made = batches.make(28, 5)
    rows = batches.corpus.sequences[[8, 9, 0, 1]]
    assert [part.shape for part in made] == [(4, 12), (4, 5), (4, 5)]
    assert {part.dtype for part in made} == {torch.int64}
    assert same(made, mask(rows, 28, 5, batches.corpus, 7, share))


def test_with_detection_a_batch_is_masked_as_without_and_then_corrupted(batches):
    tokens, *asked = batches.make(32, 4)
    batches.training = Training(seed=7, **DETECTION)
    changed, *still_asked, labels = batches.make(32, 4)
    assert same(asked, still_asked)
    assert (changed.dtype, labels.dtype) == (torch.int64, torch.float32)
    assert not torch.equal(changed, tokens)
    assert set(labels.unique().tolist()) == {IGNORED, 0.0, 1.0}


def test_all_of_a_batch_is_contiguous_and_goes_to_a_gpu_from_pinned_memory(batches, monkeypatch):
    """A copy from elsewhere waits for the steps that are queued on the GPU."""
    pinned = []
    sent = []

    def to(part: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        sent.append((part.is_contiguous(), any(part is other for other in pinned), device.type, non_blocking))
        return part

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda part: pinned.append(part) or part)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batches.device = torch.device("cuda")
    batches.training = Training(**DETECTION)
    batches.make(0, 4)
    assert sent == [(True, True, "cuda", True)] * 4


def test_what_is_taken_is_what_is_made_whatever_was_asked_for_before(batches):
    orders = [(0, 5, 4), (4, 5, 8), (8, 3, 12), (12, 3, 16), (16, 3, 999), (0, 3, 4), (4, 5, 8), (4, 5, 8), (999, 1, 0)]
    for first, masks, after in orders:
        assert same(batches.take(first, masks, after), batches.make(first, masks))


def test_the_next_batch_is_made_on_a_thread_before_it_is_asked_for(batches, monkeypatch):
    made = []
    make = batches.make

    def recording(first, masks):
        made.append((first, threading.current_thread() is threading.main_thread()))
        return make(first, masks)

    monkeypatch.setattr(batches, "make", recording)
    for first, after in ((0, 4), (4, 8), (8, 100), (12, 16)):
        batches.take(first, 5, after)
        batches.next.batch.result()
    assert made == [(0, True), (4, False), (8, False), (100, False), (12, True), (16, False)]
    running = threading.active_count()
    batches.close()
    assert threading.active_count() == running - 1


def test_an_error_on_the_thread_is_raised_where_the_batch_is_taken(batches, monkeypatch):
    def fails(*args):
        raise OSError

    batches.take(0, 5, 4)
    batches.next.batch.result()
    monkeypatch.setattr(batches, "make", fails)
    batches.take(4, 5, 8)  # made before
    with pytest.raises(OSError):  # noqa: PT011, no other is raised
        batches.take(8, 5, 12)


def chosen(batches: Batches, share: int, most: int = 1024, spent: Spent | None = None, device: str = "cpu") -> int:
    """The size of the micro-batch where the memory is probed, which leaves the model as it was."""
    model, untouched = (encoder(SPECIALS + 10, 12) for _ in range(2))
    here = Machine(torch.device(device), torch.float32, False, most, probes=True)
    size = memory.choose_micro_batch(model, Training(), batches.corpus, here, spent or Spent(), share)
    assert all(p.grad is None for p in model.parameters())
    assert same(model.state_dict().values(), untouched.state_dict().values())
    return size


FULL = [
    torch.OutOfMemoryError("out of memory"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize(
    ("batch", "most", "failures", "used"),
    [
        *((24, 1024, [], 24), (24, 10, [], 8), (7, 1024, FULL[:1], 1), (24, 1024, 99 * FULL[:1], 1)),
        *((24, 1024, 3 * [error], 6) for error in FULL),
        (8, 1024, [RuntimeError("CUDA error: an illegal memory access was encountered")], None),
    ],
)
def test_the_memory_decides_the_micro_batch_and_any_other_error_ends_the_search(
    monkeypatch, batches, batch, most, failures, used
):
    left = iter(failures)
    backward = torch.Tensor.backward

    def limited(loss: torch.Tensor) -> None:
        backward(loss)
        for error in left:
            raise error

    monkeypatch.setattr(torch.Tensor, "backward", limited)
    with nullcontext() if used else pytest.raises(RuntimeError, match="illegal"):
        assert chosen(batches, batch, most) == used


def test_the_search_computes_a_micro_batch_while_all_gradients_exist(monkeypatch, batches):
    model = encoder(SPECIALS + 10, 12)
    backward = torch.Tensor.backward
    there = []

    def watched(loss: torch.Tensor) -> None:
        there.append({p.grad is not None for p in model.parameters()})
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", watched)
    here = machine_of(micro_batch=4, probes=True)
    assert memory.choose_micro_batch(model, Training(), batches.corpus, here, Spent(), 4) == 4
    assert there == [{False}, {True}]


def test_memory_that_an_earlier_run_has_left_on_a_gpu_is_freed_before_the_search(monkeypatch, batches):
    done = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(memory, "fits", lambda *about: not done.append("searched"))
    monkeypatch.setattr(Machine, "device_name", lambda self: "a GPU")
    chosen(batches, 4, device="cuda")
    assert done == ["freed", "searched"]


@pytest.mark.parametrize(
    ("device", "holds", "used"),
    [("same", 8, 4), ("same", 2, 2), ("smaller", 2, 2), ("smaller", 1, 1), ("larger", 8, 8)],
)
def test_a_resumed_run_keeps_its_micro_batch_on_the_same_card_and_takes_what_fits_on_another(
    monkeypatch, batches, device, holds, used
):
    monkeypatch.setattr(memory, "fits", lambda *about: about[4] <= holds)
    monkeypatch.setattr(Machine, "device_name", lambda self: device)
    assert chosen(batches, 8, spent=Spent(step=3, micro_batch=4, device="same")) == used
