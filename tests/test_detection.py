import hashlib
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from sklearn.metrics import log_loss
from torch.utils.flop_counter import FlopCounterMode

from model import bert, detection, memory
from model.batches import Batches
from model.detection import IGNORED, Detecting, corrupt
from model.heldout import Heldout
from model.masking import Corpus, mask
from model.settings import Architecture, Training
from tasks.pretrain import Pretrain

SPECIALS, MASK_ID, VOCABULARY = 5, 4, 60_000
CPU = torch.device("cpu")
BOTH = {"detection": 1.0, "replaced": 0.1, "swapped": 0.3}
SMALL = Architecture(layers=2, hidden=16, heads=2, intermediate=48)


def corpus_of(rows: np.ndarray, vocabulary: int = VOCABULARY) -> Corpus:
    return Corpus(rows, Heldout.of_rows(rows[:0]), vocabulary, MASK_ID, SPECIALS)


def plain(sequences: int, length: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Corpus:
    """Sequences of token ids with no special one among them."""
    rows = np.random.default_rng(seed).integers(SPECIALS, vocabulary, (sequences, length))
    return corpus_of(rows.astype(np.uint16), vocabulary)


def corrupted(corpus: Corpus, count: int = 16, first: int = 0, **settings) -> tuple[np.ndarray, ...]:
    """What masks alone make of all sequences, the places to predict, what corruption makes of it, and the labels."""
    training = Training(**BOTH | settings)
    hidden, positions, _ = mask(corpus.sequences, first, count, corpus, training.seed, training.masked_share)
    return hidden, positions, *corrupt(hidden, corpus.sequences, positions, first, corpus, training)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 128])
@pytest.mark.parametrize("settings", [{}, {"replaced": 0.0}, {"swapped": 0.0}, {"replaced": 0.7, "swapped": 2 / 3}])
def test_labels_say_which_visible_tokens_differ_and_places_to_predict_and_special_tokens_stay(length, settings):
    rows = np.random.default_rng(length).integers(0, 50, (60, length)).astype(np.uint16)
    rows[rows == MASK_ID] = SPECIALS  # packed text has no [MASK]
    hidden, positions, changed, labels = corrupted(corpus_of(rows, 50), max(1, length // 4), **settings)
    assert (np.take_along_axis(changed, positions, 1) == np.take_along_axis(hidden, positions, 1)).all()
    assert (changed[rows < SPECIALS] == hidden[rows < SPECIALS]).all()
    assert (changed[rows >= SPECIALS] >= MASK_ID).all()
    for row in range(60):
        for place in range(length):
            asked = changed[row, place] != MASK_ID and rows[row, place] >= SPECIALS
            assert labels[row, place] == (float(changed[row, place] != rows[row, place]) if asked else IGNORED)


def test_so_many_tokens_are_replaced_as_asked_and_by_frequent_ones_more_often():
    rows = np.full((4000, 64), 7, dtype=np.uint16)
    rows[:, ::4] = np.arange(100, 116)  # a quarter of the text
    corpus = corpus_of(rows)
    hidden, _, changed, labels = corrupted(corpus, masked_share=1.0, replaced=0.25, swapped=0.0)
    differ = changed != hidden
    drawn = 4000 * 16  # as many draws of three sevens in four
    same = 0.75 * 0.75 + 0.25 * 0.25 / 16
    assert differ.sum() == pytest.approx(drawn * (1 - same), rel=0.02)
    assert (labels == 1).sum() == differ.sum()
    sevens = (changed == 7)[differ].mean()  # where 7 stood before, only others differ
    assert sevens == pytest.approx(0.25 * 0.75 / (1 - same), rel=0.03)
    assert (differ.sum(axis=1) <= 16).all()


@pytest.mark.parametrize("length", [1, 8, 16])
def test_of_a_short_sequence_one_token_is_replaced(length):
    corpus = plain(50, length)
    hidden, _, changed, _ = corrupted(corpus, 0, replaced=0.01, swapped=0.0)
    assert ((changed != hidden).sum(axis=1) == 1).mean() > 0.9  # all but those that drew the token that stood there


def test_the_corruptions_of_a_seed_stay():
    """A change of them would change what a resumed or repeated run reads, under the same key."""
    _, _, changed, labels = corrupted(plain(8, 64), 12, first=5, seed=3)
    assert hashlib.sha256(changed.tobytes() + labels.tobytes()).hexdigest()[:12] == "2e5fd7c8012e"


def test_all_free_tokens_can_be_replaced_and_no_more():
    hidden, _, changed, _ = corrupted(plain(50, 64), 32, replaced=0.5, swapped=0.0, mask_fraction=0.5)
    assert ((changed != hidden).sum(axis=1) == 32).mean() > 0.9  # all but those that drew the token that stood there
    few = plain(50, 64).sequences.copy()
    few[:, 40:] = 0
    hidden, _, changed, _ = corrupted(corpus_of(few), 32, replaced=0.5, swapped=0.0, mask_fraction=0.5)
    assert ((changed != hidden).sum(axis=1) == 8).mean() > 0.9


def test_swaps_move_tokens_by_one_or_two_places_and_lose_none():
    corpus = plain(3000, 100)
    hidden, _, changed, _ = corrupted(corpus, 1, masked_share=1.0, replaced=0.0, swapped=0.3)
    assert (np.sort(changed, axis=1) == np.sort(hidden, axis=1)).all()
    moved = {distance: (changed[:, distance:] == hidden[:, :-distance]).sum() for distance in range(1, 6)}
    assert moved[1] == pytest.approx(2 * moved[2], rel=0.05)  # of three trades two are of neighbours
    assert moved[3] + moved[4] + moved[5] < 100  # equal tokens by chance
    in_blocks, unmasked = 0.96, 0.98
    assert (changed != hidden).mean() == pytest.approx(0.3 * in_blocks * unmasked, rel=0.03)
    by_place = (changed != hidden).mean(axis=0)
    assert by_place[2:-4].min() > 0.8 * 0.3


@pytest.mark.parametrize("length", [16, 64])
def test_corruptions_follow_from_the_seed_and_the_number_of_the_sequence(length):
    corpus = plain(40, length)
    whole = corrupted(corpus, 4, seed=3)
    for first, last in ((0, 1), (7, 20), (39, 40)):
        training = Training(**BOTH, seed=3)
        rows = corpus.sequences[first:last]
        parts = corrupt(whole[0][first:last], rows, whole[1][first:last], first, corpus, training)
        assert all(np.array_equal(part, full[first:last]) for part, full in zip(parts, whole[2:], strict=True))
    other = corrupt(*whole[:1], corpus.sequences, whole[1], 0, corpus, Training(**BOTH, seed=4))
    later = corrupt(*whole[:1], corpus.sequences, whole[1], 1, corpus, Training(**BOTH, seed=3))
    assert not np.array_equal(other[0], whole[2])
    assert not np.array_equal(later[0], whole[2])


def test_a_training_batch_is_masked_as_without_detection_and_then_corrupted():
    corpus = plain(16, 64)
    made = [Batches(corpus, 16, Training(seed=3, **settings), CPU) for settings in ({}, BOTH)]
    (tokens, positions, labels), (changed, *same, asked) = (batches.make(32, 8) for batches in made)
    for batches in made:
        batches.close()
    assert torch.equal(same[0], positions)
    assert torch.equal(same[1], labels)
    assert (changed.dtype, asked.dtype) == (torch.int64, torch.float32)
    assert not torch.equal(changed, tokens)
    assert set(asked.unique().tolist()) == {IGNORED, 0.0, 1.0}


def some_batch(masks: int = 4) -> tuple[torch.Tensor, ...]:
    batches = Batches(plain(8, 16, 50), 8, Training(**BOTH), CPU)
    batches.close()
    return batches.make(0, masks)


def test_the_losses_are_those_of_masked_language_modelling_and_of_a_logistic_regression_on_the_states():
    model = Detecting(bert.Bert(SMALL, 50, 16, seed=1))
    with torch.no_grad():
        model.detector.weight.normal_()
        model.detector.bias.fill_(0.3)
    tokens, positions, labels, asked = some_batch()
    masked, detected = model(tokens, positions, labels, asked)
    torch.testing.assert_close(masked, model.bert(tokens, positions, labels))
    states = model.bert.encode(tokens).detach()
    chances = (states @ model.detector.weight[0] + 0.3).sigmoid().detach()
    seen = asked >= 0
    by_hand = log_loss(asked[seen].numpy(), chances[seen].double().numpy(), normalize=False) / asked.numel()
    assert detected.item() == pytest.approx(by_hand, rel=1e-5)


def test_the_detector_starts_undecided_and_every_weight_gets_a_gradient_after_a_step():
    model = Detecting(bert.Bert(SMALL, 50, 16))
    batch = some_batch()
    detected = model(*batch)[1]
    assert detected.item() == pytest.approx(math.log(2) * (batch[3] >= 0).float().mean().item(), rel=1e-5)
    with torch.no_grad():
        model.detector.weight.fill_(0.1)
    model(*batch)[1].backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []  # the embedding is tied, so that the vocabulary head has none of its own


@pytest.mark.parametrize("layout", [{}, {"funnel": 1, "layers": 3}, {"head_transform": True, "positions": "rotary"}])
def test_the_operations_of_a_step_are_counted_with_the_last_block_at_all_positions(layout):
    architecture, masks = Architecture(**{"layers": 2, "hidden": 48, "heads": 2, "intermediate": 96} | layout), 4
    model = detection.with_detector(bert.Bert(architecture, 50, 16), Training(**BOTH))
    with FlopCounterMode(display=False) as counter:
        model(*some_batch(masks)).sum().backward()
    per_token = detection.operations_per_token(architecture, Training(**BOTH), 50, 16, masks)
    detector = 3 * 2 * 48
    assert counter.get_total_flops() / (8 * 16) == pytest.approx(per_token + detector, rel=2e-2)
    assert per_token > detection.operations_per_token(architecture, Training(), 50, 16, masks)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"replaced": 0.1}, "replaced"),
        ({"swapped": 0.0}, "swapped"),
        ({"detection": -1.0}, "detection"),
        ({"detection": 1.0, "masked_share": 1.0, "replaced": 0.0, "swapped": 0.0}, "nothing to detect"),
        ({"detection": 1.0, "replaced": 0.8}, "replaced 0.8 and masks"),
        ({"detection": 1.0, "swapped": 0.7}, "swapped"),
    ],
)
def test_settings_that_would_be_ignored_or_are_impossible_are_refused(settings, field):
    with pytest.raises(ValidationError, match=field):
        Training(**settings)


def test_detection_changes_the_key_of_a_model_and_its_absence_does_not():
    assert not {"detection", "replaced", "swapped"} & set(Pretrain().identity())
    for settings in (BOTH, {"detection": 1.0, "replaced": 0.05, "swapped": 0.1}):
        changed = Pretrain(**settings).identity()
        assert {name: changed[name] for name in settings} == settings


def test_the_memory_that_training_needs_counts_the_detector():
    without, with_detector = (memory.sizes(SMALL, Training(**settings), 50, 16)[0] for settings in ({}, BOTH))
    assert with_detector - without == 4 * (16 + 1)
