import math

import pytest
import torch

from model.masking import mask, masks_per_sequence

SPECIALS, MASK_ID, VOCABULARY = 5, 4, 60_000


def plain_tokens(sequences: int, length: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids with no special one among them."""
    return torch.randint(SPECIALS, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(length))


def test_the_number_of_masks_is_the_fraction_rounded_and_at_least_one():
    assert [masks_per_sequence(p, 128) for p in (0.15, 0.15625, 0.25, 0.4)] == [19, 20, 32, 51]
    assert masks_per_sequence(0.001, 128) == 1


@pytest.mark.parametrize(
    ("count", "masked", "random"), [(19, 15, 2), (20, 16, 2), (32, 26, 3), (51, 41, 5), (1, 1, 0), (10, 8, 1)]
)
def test_the_split_is_that_of_the_reference_implementation(count, masked, random):
    tokens = plain_tokens(200, 128)
    inputs, positions, labels = mask(tokens, count, MASK_ID, SPECIALS, VOCABULARY, (0, 0))
    assert positions.shape == labels.shape == (200, count)
    shown = inputs.gather(1, positions)
    assert ((shown == MASK_ID).sum(dim=1) == masked).all()
    others = ((shown != MASK_ID) & (shown != labels)).sum(dim=1)
    assert (others <= random).all()
    assert others.sum() >= 200 * random - 3  # a random token is the one that stood there once in 59,995 times


def test_positions_are_distinct_and_labels_are_what_stood_there():
    tokens = plain_tokens(100, 64)
    before = tokens.clone()
    inputs, positions, labels = mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, (1, 2))
    assert torch.equal(tokens, before)
    assert all(len(set(row)) == 16 for row in positions.tolist())
    assert torch.equal(labels, tokens.gather(1, positions))
    chosen = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, positions, True)
    assert torch.equal(inputs[~chosen], tokens[~chosen])
    assert torch.equal(inputs.scatter(1, positions, labels), tokens)


def test_random_tokens_are_all_but_the_special_ones_and_equally_often():
    vocabulary = 15
    tokens = torch.full((4000, 40), vocabulary, dtype=torch.int64)  # an id that is not drawn, so all draws are seen
    inputs, _, _ = mask(tokens, 40, MASK_ID, SPECIALS, vocabulary, (0, 0))
    drawn = inputs[(inputs != MASK_ID) & (inputs != vocabulary)]
    assert len(drawn) == 4000 * 4
    counts = torch.bincount(drawn, minlength=vocabulary)
    assert not counts[:SPECIALS].any()
    deviation = math.sqrt(len(drawn) * 0.1 * 0.9)
    assert (counts[SPECIALS:] - len(drawn) / 10).abs().max() < 5 * deviation


def test_special_tokens_are_chosen_only_where_there_are_too_few_others():
    tokens = plain_tokens(50, 32)
    tokens[:, ::2] = 3
    _, positions, labels = mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, (0, 0))
    assert (labels >= SPECIALS).all()
    assert (positions % 2 == 1).all()
    tokens[:, 5:] = 2  # leaves the positions 1 and 3
    _, positions, labels = mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, (0, 0))
    assert ((labels >= SPECIALS).sum(dim=1) == 2).all()
    assert all({1, 3} <= set(row) and len(set(row)) == 16 for row in positions.tolist())


@pytest.mark.parametrize("corrupt", [True, False])
def test_every_position_is_as_likely_as_another(corrupt):
    sequences, length, count = 20_000, 32, 8
    tokens = plain_tokens(sequences, length)
    inputs, positions, _ = mask(tokens, count, MASK_ID, SPECIALS, VOCABULARY, (3, 0), corrupt)
    shown = (inputs == MASK_ID).sum(dim=0)  # all of the chosen, or 6 of 8
    for counts, each in ((torch.bincount(positions.flatten()), count), (shown, 6 if corrupt else count)):
        chance = each / length
        deviation = math.sqrt(sequences * chance * (1 - chance))
        assert (counts - sequences * chance).abs().max() < 5 * deviation
        assert counts.float().std() > deviation / 3  # drawn, not dealt out


def test_masks_depend_on_the_seed_alone():
    tokens = plain_tokens(8, 64)
    torch.manual_seed(1)
    first = mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, (7, 3))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, (7, 3))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)  # and draw nothing from the global generator
    for seed in ((7, 4), (8, 3), (6, 4), (8, 2), (3, 7)):
        assert not torch.equal(mask(tokens, 16, MASK_ID, SPECIALS, VOCABULARY, seed)[1], first[1])


def test_no_two_micro_batches_of_a_run_have_the_same_masks():
    tokens = plain_tokens(1, 128)
    chosen = {tuple(mask(tokens, 32, MASK_ID, SPECIALS, VOCABULARY, (0, index))[1][0].tolist()) for index in range(500)}
    assert len(chosen) == 500


def test_without_corruption_all_of_the_chosen_are_masked():
    tokens = plain_tokens(50, 128)
    inputs, positions, labels = mask(tokens, 19, MASK_ID, SPECIALS, VOCABULARY, (0, 0), False)
    assert (inputs.gather(1, positions) == MASK_ID).all()
    assert ((inputs != tokens).sum(dim=1) == 19).all()
    assert torch.equal(labels, tokens.gather(1, positions))
