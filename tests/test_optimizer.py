import copy
from typing import get_args

import pytest
import torch
from torch import nn
from toys import encoder

from model import memory, optimizer
from model.bert import Bert
from model.settings import READ_BY, Architecture, OptimizerName, Training

NAMES = get_args(OptimizerName)
SMALL = Architecture(layers=2, hidden=16, heads=2, intermediate=24)
BIASES = dict.fromkeys(("bias", "qkv_bias", "decoder_bias"), True)
RICH = SMALL.model_copy(  # with a parameter of every kind
    update=BIASES | {"positions": "learned", "embedding": 8, "head_transform": True, "tied": False, "convolution": 3}
)
LR = 0.02
BETAS = (0.9, 0.97)
EPS = 1e-8
DECAY = 0.1
MOMENTUM = 0.95


def bert():
    return encoder(30, layers=2, intermediate=24)


def training(name, **given):
    read = {"beta2": BETAS[1], "adam_eps": EPS} if name in READ_BY["beta2"] else {}
    return Training(optimizer=name, **({"learning_rate": LR, "weight_decay": DECAY} | read | given))


def grouped(model, optimizers):
    """Name of each parameter, and each group that it is in."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], group) for o in optimizers for group in o.param_groups for p in group["params"]]


def set_gradients(model, generator):
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norms", [False, True])
def test_every_parameter_is_in_one_group_and_matrices_decay_or_everything_but_biases(name, norms):
    model = Bert(RICH, 30, 16)
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
        model = bert()
        settings = Training(optimizer=name).model_copy(update=changes)
        named = grouped(model, optimizer.optimizers(model, settings))
        return [(parameter, {key: v for key, v in group.items() if key != "params"}) for parameter, group in named]

    numbers = ("beta2", "adam_eps", "matrix_learning_rate", "learning_rate", "weight_decay")
    for field, other in (dict.fromkeys(numbers, 0.5) | {"decay_norms": True}).items():
        changed = groups(**{field: other}) != groups()
        assert changed == (name in READ_BY.get(field, NAMES)), field


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("adamw", torch.optim.AdamW, {"betas": BETAS, "eps": EPS}),
        ("adam", torch.optim.Adam, {"betas": BETAS, "eps": EPS}),
        ("radam", torch.optim.RAdam, {"betas": BETAS, "eps": EPS, "decoupled_weight_decay": True}),
        ("sgd", torch.optim.SGD, {"momentum": MOMENTUM, "nesterov": True}),
    ],
)
def test_the_steps_are_those_of_torchs_optimizer_on_matrices_that_decay_and_vectors_that_do_not(name, kind, settings):
    model = bert()
    plain = bert()
    generator = torch.Generator().manual_seed(0)
    (stepping,) = optimizer.optimizers(model, training(name))
    matrices, vectors = ([p for p in plain.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    expected = kind(groups, lr=LR, foreach=False, **settings)
    for step in range(1, 9):
        optimizer.set_rates([stepping], 1 / step)
        set_gradients(model, generator)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            theirs.grad = ours.grad.clone()
        for group in expected.param_groups:
            group["lr"] = LR / step
        for each in (stepping, expected):
            each.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1e-6])
@pytest.mark.parametrize(("dtype", "away"), [(torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.05)])
def test_muon_moves_matrices_as_torchs_does_in_fp32_and_continues_its_states(monkeypatch, dtype, away, size):
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's precision
    shapes = [(24, 8), (8, 24), (16, 16), (24, 8), (4, 4), (8, 24)]
    generator = torch.Generator().manual_seed(0)
    settings = {"lr": 0.1, "weight_decay": 0.2}
    theirs = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [*shapes, (4, 8)]]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    peer = torch.optim.Muon(theirs, **settings, nesterov=True, adjust_lr_fn="match_rms_adamw")
    muon = optimizer.Muon([{"params": ours}], dtype, **settings)
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
            assert (one - other).norm() <= away * (other - old).norm()
        assert torch.equal(ours[-1], before[-1])
        for one, other in zip(ours[:-1], theirs[:-1], strict=True):
            assert torch.equal(muon.state[one]["momentum_buffer"], peer.state[other]["momentum_buffer"])


def test_adafactors_step_does_not_depend_on_the_size_of_the_gradient_and_has_none_where_there_is_none():
    moved = {}
    for size in (1.0, 1e-6):
        matrix = nn.Parameter(torch.full((8, 4), 0.02))
        generator = torch.Generator().manual_seed(0)
        holder = nn.ParameterList([matrix])
        (adafactor,) = optimizer.optimizers(holder, training("adafactor", weight_decay=0.0))
        for _ in range(3):
            matrix.grad = size * torch.randn(8, 4, generator=generator) * torch.arange(8)[:, None]  # the first row is 0
            adafactor.step()
        moved[size] = matrix.detach() - 0.02
        assert not moved[size][0].any()
        assert moved[size][1:].abs().min() > 0
    torch.testing.assert_close(moved[1e-6], moved[1.0])


@pytest.mark.parametrize("step", [1, 100, 2500, 10_000])
def test_the_rate_of_a_step_is_that_by_which_adafactor_moves_and_of_others_the_schedules(step: int):
    matrix = nn.Parameter(torch.ones(4, 4))
    settings = training("adafactor").model_copy(update={"weight_decay": 0.0})
    (adafactor,) = optimizer.optimizers(nn.ParameterList([matrix]), settings)
    for number in (step - 1, step):
        matrix.data.fill_(1.0)
        matrix.grad = torch.ones(4, 4)
        adafactor.step()
        adafactor.state[matrix]["step"].fill_(number)
    moved = 1 - matrix[0, 0].item()
    assert optimizer.rate_of_step(settings, 1.0, step) == pytest.approx(moved, rel=1e-3)
    assert optimizer.rate_of_step(training("adamw"), 0.5, step) == LR / 2


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
    model = bert()
    settings = training(name)
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
