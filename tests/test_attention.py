import math

import pytest
import torch
import torch.nn.functional as F

from model import bert

LENGTH = 24


def some_heads(parts: int) -> torch.Tensor:
    return torch.randn(parts, 2, 4, LENGTH, 8, generator=torch.Generator().manual_seed(0))


PADDED = torch.arange(LENGTH) < torch.tensor([LENGTH, 7])[:, None, None, None]


@pytest.mark.parametrize("mask", [None, PADDED], ids=["all", "padded"])
def test_attention_on_a_cpu_is_that_of_torchs_kernel_which_is_given_everything_on_a_gpu(mask, monkeypatch):
    expected, given = F.scaled_dot_product_attention(*some_heads(3), attn_mask=mask), []
    torch.testing.assert_close(bert.attend(*some_heads(3), mask, 0.0), expected, rtol=1e-5, atol=1e-5)

    def kernel(*parts, attn_mask, dropout_p):
        given.extend([*parts, attn_mask, dropout_p])

    monkeypatch.setattr(bert.F, "scaled_dot_product_attention", kernel)
    handed = [*some_heads(3).to("meta"), mask, 0.3]
    bert.attend(*handed)
    assert all(one is other for one, other in zip(given, handed, strict=True))


def test_dropout_takes_weights_of_attention_and_makes_up_for_them():
    q_BNSH, k_BNSH = some_heads(2)
    torch.manual_seed(0)
    sums = torch.stack([bert.attend(q_BNSH, k_BNSH, torch.ones_like(q_BNSH), None, 0.25) for _ in range(100)])
    assert sums.std(dim=0).min() > 0.1  # where nothing is dropped, weights sum to 1
    assert sums.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.001])
def test_dropout_has_its_probability_and_scale_wherever_the_bits_come_from(probability):
    torch.manual_seed(0)
    x = torch.full((1000, 1001), 2.0, requires_grad=True)
    y = bert.drop(x, probability)
    assert (y == 0).logical_or(y == torch.tensor(2.0 / (1 - probability))).all() or probability == 0.001
    gone = (y == 0).detach().double().flatten()
    deviation = math.sqrt(probability * (1 - probability))
    for lane in range(4):  # of each 64 bits that are drawn
        part = gone[lane::4]
        assert part.mean().item() == pytest.approx(probability, abs=5 * deviation / math.sqrt(len(part)))
    for distance in (1, 2, 3, 4, 1001):
        both = (gone[distance:] * gone[:-distance]).mean().item()
        assert both == pytest.approx(probability**2, abs=6 * probability / math.sqrt(len(gone)))
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0)
    assert torch.equal(bert.drop(x, 0.0), x)
    assert torch.equal(bert.drop(x, 1.0), x * 0)
