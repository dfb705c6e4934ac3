import copy
import math
from typing import get_args

import pytest
import torch
from torch import nn

from model import memory, optimizer
from model.bert import Bert
from model.muon import Muon
from model.settings import READ_BY, Architecture, OptimizerName, Training

NAMES = get_args(OptimizerName)
SMALL = Architecture(layers=2, hidden=16, heads=2, intermediate=24)
BIASES = dict.fromkeys(("bias", "qkv_bias", "decoder_bias"), True)
RICH = SMALL.model_copy(  # with a parameter of every kind
    update=BIASES | {"positions": "learned", "embedding": 8, "head_transform": True, "tied": False, "convolution": 3}
)
LR, BETAS, EPS, DECAY, MOMENTUM = 0.02, (0.9, 0.98), 1e-8, 0.1, 0.9


def bert():
    return Bert(SMALL, 30, 16)


def training(name, **given):
    read = {"beta1": BETAS[0], "beta2": BETAS[1], "adam_eps": EPS, "momentum": MOMENTUM}
    known = {field: value for field, value in read.items() if field in READ_BY[name]}
    return Training(optimizer=name, **({"learning_rate": LR, "weight_decay": DECAY} | known | given))


def grouped(model, optimizers):
    """Name of each parameter, and each group that it is in."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], group) for o in optimizers for group in o.param_groups for p in group["params"]]


def set_gradients(model, generator):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("architecture", [SMALL, RICH])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norms", [False, True])
def test_every_parameter_is_in_one_group_and_matrices_decay_or_everything_but_biases(name, architecture, norms):
    model = Bert(architecture, 30, 16)
    groups = grouped(model, optimizer.optimizers(model, training(name).model_copy(update={"decay_norms": norms})))
    assert sorted(n for n, _ in groups) == sorted(n for n, _ in model.named_parameters())
    for parameter, group in groups:
        vector = parameter.endswith(("bias", "scale")) or "norm" in parameter
        if name == "muon":  # the matrices of the blocks; its AdamW decays nothing
            spared = vector or not parameter.startswith("blocks.") or "convolution" in parameter
        else:
            spared = parameter.endswith("bias") if norms else vector
        assert group["weight_decay"] == (0 if spared else DECAY), parameter


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_reads_what_the_settings_say_it_reads_and_nothing_else(name):
    def groups(**changes):
        model, settings = bert(), Training(optimizer=name).model_copy(update=changes)
        named = grouped(model, optimizer.optimizers(model, settings))
        return [(parameter, {key: v for key, v in group.items() if key != "params"}) for parameter, group in named]

    numbers = ("beta1", "beta2", "adam_eps", "momentum", "matrix_learning_rate", "learning_rate", "weight_decay")
    for field, other in (dict.fromkeys(numbers, 0.5) | {"decay_norms": True}).items():
        changed = groups(**{field: other}) != groups()
        assert changed == (field in READ_BY[name] or field in ("learning_rate", "weight_decay")), field


class Expected:
    """Each optimizer's formula, on one parameter, in double precision."""

    def __init__(self, name, parameter):
        self.change, self.matrix, self.step = getattr(self, name), parameter.ndim >= 2, 0
        self.value = parameter.detach().double().clone()
        self.decay, self.decoupled = DECAY if self.matrix else 0.0, name not in ("adam", "sgd")
        self.first, self.second, self.row, self.column = torch.zeros_like(self.value), 0.0, 0.0, 0.0

    def update(self, gradient, lr):
        self.step += 1
        decay = self.decay * self.value
        if self.decoupled:
            self.value = self.value - lr * self.change(gradient.double()) - lr * decay
        else:
            self.value = self.value - lr * self.change(gradient.double() + decay)

    def moments(self, g):
        beta1, beta2 = BETAS
        self.first = beta1 * self.first + (1 - beta1) * g
        self.second = beta2 * self.second + (1 - beta2) * g * g
        return self.first / (1 - beta1**self.step), self.second / (1 - beta2**self.step)

    def adamw(self, g):
        first, second = self.moments(g)
        return first / (second.sqrt() + EPS)

    adam = adamw

    def radam(self, g):  # Liu et al. 2019, algorithm 2
        first, second = self.moments(g)
        longest = 2 / (1 - BETAS[1]) - 1
        length = longest - 2 * self.step * BETAS[1] ** self.step / (1 - BETAS[1] ** self.step)
        if length <= 5:
            return first
        shorter, longer = (length - 4) * (length - 2) * longest, (longest - 4) * (longest - 2) * length
        return math.sqrt(shorter / longer) * first / (second.sqrt() + EPS)

    def sgd(self, g):
        self.first = MOMENTUM * self.first + g
        return g + MOMENTUM * self.first

    def adafactor(self, g):  # Shazeer & Stern 2018, algorithms 4 and 5
        beta2 = 1 - self.step**-0.8
        self.second = beta2 * self.second + (1 - beta2) * g * g
        second = self.second
        if self.matrix:
            self.row = beta2 * self.row + (1 - beta2) * (g * g).mean(dim=1, keepdim=True)
            self.column = beta2 * self.column + (1 - beta2) * (g * g).mean(dim=0, keepdim=True)
            second = self.row * self.column / self.row.mean()
        update = g / second.sqrt()
        update = update / update.square().mean().sqrt().clamp(min=1)
        return update * self.value.square().mean().sqrt().clamp(min=1e-3)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"muon"}))
def test_the_steps_are_those_of_the_formula(name):
    model, generator = bert(), torch.Generator().manual_seed(0)
    (stepping,) = optimizer.optimizers(model, training(name))
    expected = {n: Expected(name, p) for n, p in model.named_parameters()}
    for step in range(1, 9):  # RAdam adapts from the sixth step on
        optimizer.set_rates([stepping], 1 / step)
        set_gradients(model, generator)
        for n, parameter in model.named_parameters():
            expected[n].update(parameter.grad, LR / step)
        stepping.step()
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[n].value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "away"), [(torch.bfloat16, 0.05), (torch.float16, 0.01), (torch.float32, 1e-4)])
def test_muons_step_is_the_orthogonal_part_of_the_momentum_at_the_size_of_an_adamw_step(dtype, away):
    """Against the singular value decomposition; the five iterations bring each singular value near 1, not to it."""
    model, generator = bert(), torch.Generator().manual_seed(0)
    muon, adamw = optimizer.optimizers(model, training("muon", matrix_learning_rate=0.5), dtype)
    matrices = [p for group in muon.param_groups for p in group["params"]]
    momenta = [torch.zeros_like(p) for p in matrices]
    for multiplier in (0.25, 1.0):
        lr = 0.5 * multiplier
        optimizer.set_rates([muon, adamw], multiplier)
        set_gradients(model, generator)
        before = [p.detach().clone() for p in matrices]
        muon.step()
        for parameter, old, momentum in zip(matrices, before, momenta, strict=True):
            momentum.mul_(MOMENTUM).add_(parameter.grad, alpha=1 - MOMENTUM)
            nesterov = (1 - MOMENTUM) * parameter.grad + MOMENTUM * momentum
            update = (old * (1 - lr * DECAY) - parameter.detach()) / (lr * 0.2 * math.sqrt(max(old.shape)))
            left, sizes, right = torch.linalg.svd(nesterov, full_matrices=False)
            turned = left.T @ update @ right.T
            large = sizes > 0.1 * sizes.norm()
            assert large.sum() > 5
            assert turned.diag()[large].min() > 0.6
            assert turned.diag().max() < 1.3
            assert (turned - turned.diag().diag()).abs().max() < away


@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_muon_moves_matrices_as_torchs_does_in_fp32_and_continues_its_states(monkeypatch, size):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's precision
    shapes, generator = (
        [(24, 8), (8, 24), (16, 16), (24, 8), (4, 4), (8, 24), (24, 8)],
        torch.Generator().manual_seed(0),
    )
    settings = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9}
    theirs = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [*shapes, (4, 8)]]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    peer = torch.optim.Muon(theirs, **settings, nesterov=True, adjust_lr_fn="match_rms_adamw")
    muon = Muon([{"params": ours}], torch.float32, **settings)
    for step in range(6):
        if step == 3:
            muon.load_state_dict(copy.deepcopy(peer.state_dict()))
        before = [p.detach().clone() for p in theirs]
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):  # the last has no gradient
            one.data.copy_(other.data)
            other.grad = size * torch.randn(other.shape, generator=generator)
            one.grad = other.grad.clone()
        for each in (peer, muon):
            each.step()
        for one, other, old in zip(ours, theirs, before, strict=True):
            assert (one - other).norm() <= 1e-4 * (other - old).norm()
        assert torch.equal(ours[-1], before[-1])
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):
            assert torch.equal(muon.state[one]["momentum_buffer"], peer.state[other]["momentum_buffer"])


def test_adafactors_step_does_not_depend_on_the_size_of_the_gradient_and_has_none_where_there_is_none():
    moved = {}
    for size in (1.0, 1e-6):
        matrix, generator = nn.Parameter(torch.full((8, 4), 0.02)), torch.Generator().manual_seed(0)
        holder = nn.ParameterList([matrix])
        (adafactor,) = optimizer.optimizers(holder, training("adafactor", weight_decay=0.0))
        for _ in range(3):
            matrix.grad = size * torch.randn(8, 4, generator=generator) * torch.arange(8)[:, None]  # the first row is 0
            adafactor.step()
        moved[size] = matrix.detach() - 0.02
        assert not moved[size][0].any()
        assert moved[size][1:].abs().min() > 0
    torch.testing.assert_close(moved[1e-6], moved[1.0])


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_a_part_of_each_groups_peak_and_muon_has_a_peak_of_its_own(name):
    own = {"matrix_learning_rate": 8.0} if name == "muon" else {}
    optimizers = optimizer.optimizers(bert(), training(name, **own))
    for multiplier in (0.5, 0.0, 0.25):  # of the peak each time, not of the last rate
        optimizer.set_rates(optimizers, multiplier)
        rates = [{group["lr"] for group in each.param_groups} for each in optimizers]
        assert rates == [{peak * multiplier} for peak in (*own.values(), LR)]


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_that_an_optimizer_needs_is_what_it_keeps(name):
    model, settings = bert(), training(name)
    optimizers = optimizer.optimizers(model, settings)
    set_gradients(model, torch.Generator().manual_seed(0))
    for each in optimizers:
        each.step()
    states = [state for each in optimizers for state in each.state.values()]
    named = [(part, value) for state in states for part, value in state.items() if value is not None]
    kept = sum(value.numel() * value.element_size() for part, value in named if part != "step")
    weights, expected = memory.sizes(SMALL, settings, 30, 16)
    assert weights == sum(p.numel() * p.element_size() for p in model.parameters())
    assert kept < weights / 4 if name == "adafactor" else kept == expected  # whose means are counted as none
