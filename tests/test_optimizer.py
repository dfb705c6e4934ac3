import math

import pytest
import torch

from model import bert, optimizer
from model.settings import Architecture

SMALL = Architecture(layers=2, hidden=16, heads=2, intermediate=32)
FRACTIONS = [n / 1000 for n in range(1001)]


@pytest.mark.parametrize(
    ("spent", "rate"), [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (0.9, 0.4), (1, 0), (1.001, 0), (7, 0)]
)
def test_the_triangle_is_the_papers(spent, rate):
    assert optimizer.triangle(spent) == pytest.approx(rate, abs=1e-12)


def test_the_learning_rate_is_never_negative_nor_above_its_peak():
    beyond = [*FRACTIONS, 1 + 1e-9, 1.0001, 1.5, 100.0]
    assert all(0 <= optimizer.triangle(spent) <= 1 for spent in beyond)
    for warmup in (0.0, 0.06, 0.1, 0.9):
        assert all(0 <= optimizer.warm_cosine(spent, warmup) <= 1 for spent in beyond)


@pytest.mark.parametrize("warmup", [0.06, 0.1, 0.5])
def test_warm_cosine_is_zero_at_both_ends_and_one_where_the_warmup_ends(warmup):
    assert optimizer.warm_cosine(0, warmup) == 0
    assert optimizer.warm_cosine(warmup, warmup) == 1
    assert optimizer.warm_cosine(warmup / 2, warmup) == pytest.approx(0.5)
    assert optimizer.warm_cosine((1 + warmup) / 2, warmup) == pytest.approx(0.5)
    assert optimizer.warm_cosine(warmup + (1 - warmup) / 3, warmup) == pytest.approx(0.75)
    assert optimizer.warm_cosine(1, warmup) == pytest.approx(0, abs=1e-12)
    assert optimizer.warm_cosine(1.2, warmup) == pytest.approx(0, abs=1e-12)


def test_without_warmup_the_cosine_starts_at_its_peak():
    assert optimizer.warm_cosine(0, 0.0) == 1


@pytest.mark.parametrize(
    ("spent", "batch"),
    [(0, 128), (0.01, 256), (0.1, 1408), (0.3, 4224), (0.5, 6912), (0.6, 8192), (0.75, 8192), (1, 8192), (2, 8192)],
)
def test_the_batch_ramp_is_that_of_the_reference_implementation(spent, batch):
    assert 128 * optimizer.ramp(spent, 0.6, 8192 // 128) == batch


def test_the_batch_never_shrinks_and_is_never_empty():
    for until in (0.0, 0.3, 0.6, 1.0):
        batches = [optimizer.ramp(spent, until, 64) for spent in FRACTIONS]
        assert batches == sorted(batches)
        assert batches[0] == (1 if until else 64)
        assert batches[-1] == 64
    assert {optimizer.ramp(spent, 0.6, 1) for spent in FRACTIONS} == {1}


def test_every_parameter_is_in_exactly_one_group_and_only_matrices_decay():
    classifier = bert.Classifier(bert.Bert(SMALL, 50, 16), classes=3, dropout=0.0, seed=0)
    adamw = optimizer.adamw(classifier, 1e-3, (0.9, 0.98), 1e-12, 0.01)
    names = {id(parameter): name for name, parameter in classifier.named_parameters()}
    grouped = [(names[id(p)], group["weight_decay"]) for group in adamw.param_groups for p in group["params"]]
    assert sorted(name for name, _ in grouped) == sorted(names.values())
    spared = {name for name in names.values() if name.endswith(("bias", "scale")) or "norm" in name}
    assert len(spared) == 1 + 2 * (2 + 2 * SMALL.layers) + 2  # the scale, the norms, the biases of the head
    assert dict(grouped) == {n: 0.0 if n in spared else 0.01 for n in names.values()}


def test_two_steps_are_those_of_the_formula():
    lr, beta1, beta2, eps, decay = 0.02, 0.9, 0.98, 1e-8, 0.1
    model = bert.Bert(SMALL, 30, 16)
    adamw = optimizer.adamw(model, 1.0, (beta1, beta2), eps, decay)
    expected = {name: value.detach().double().clone() for name, value in model.named_parameters()}
    first, second = ({name: torch.zeros_like(v) for name, v in expected.items()} for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    for step, rate in ((1, lr), (2, lr / 2)):
        optimizer.set_learning_rate(adamw, rate)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            g = parameter.grad.double()
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            if parameter.ndim == 2:
                expected[name] *= 1 - rate * decay
            root = (second[name] / (1 - beta2**step)).sqrt() + eps
            expected[name] -= rate * first[name] / (1 - beta1**step) / root
        adamw.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_the_learning_rate_is_set_for_all_parameters():
    adamw = optimizer.adamw(bert.Bert(SMALL, 30, 16), 1e-3, (0.9, 0.98), 1e-12, 0.01)
    optimizer.set_learning_rate(adamw, math.pi)
    assert [group["lr"] for group in adamw.param_groups] == [math.pi, math.pi]
