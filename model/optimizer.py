"""Parameter groups, the optimizers on them, and their rates. Each group carries its own peak rate, as `peak`."""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RAdam

from model.muon import Muon
from model.settings import Training

# Adafactor's smallest mean squared gradient, and the smallest RMS of a parameter that its rate is multiplied by (from
# Shazeer & Stern 2018). As the former, torch's 1e-7 hides gradients below about 1e-5, which rare words have, and the
# paper's 1e-30 underflows when squared in fp32, so that [PAD]'s gradient of 0 is divided by 0.
ADAFACTOR_EPS = (1e-18, 1e-3)


def groups(
    named: Iterable[tuple[str, nn.Parameter]], peak: float, weight_decay: float, decay_norms: bool = False
) -> list[dict]:
    """The parameters that decay, matrices with the tied embedding and convolutions, and those that don't, all others.

    With `decay_norms`, everything but biases decays.
    """
    decaying, others = [], []
    for name, parameter in named:
        decays = parameter.ndim >= 2 or (decay_norms and not name.endswith("bias"))
        (decaying if decays else others).append(parameter)
    return [
        {"params": decaying, "peak": peak, "weight_decay": weight_decay},
        {"params": others, "peak": peak, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamW:
    """AdamW on all parameters of a model."""
    return AdamW(groups(model.named_parameters(), lr, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)


def muon(bert: nn.Module, training: Training, dtype: torch.dtype) -> list[Optimizer]:
    """Muon on the matrices of `bert.blocks`; AdamW without decay on all else: embedding, convolutions, norms, head."""
    matrices = [p for p in bert.blocks.parameters() if p.ndim == 2]
    orthogonal = {id(p) for p in matrices}
    rest = [(name, p) for name, p in bert.named_parameters() if id(p) not in orthogonal]
    return [
        Muon(
            [{"params": matrices, "peak": training.matrix_learning_rate}],
            dtype,
            lr=training.matrix_learning_rate,
            weight_decay=training.weight_decay,
            momentum=training.momentum,
        ),
        AdamW(
            groups(rest, training.learning_rate, 0.0),
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.adam_eps,
            fused=True,
        ),
    ]


def optimizers(bert: nn.Module, training: Training, dtype: torch.dtype = torch.float32) -> list[Optimizer]:
    """The optimizer of `training` for an encoder with `blocks`; two for muon, each with its own parameters.

    `dtype`: of Muon's matrix products
    """
    lr, betas, eps = training.learning_rate, (training.beta1, training.beta2), training.adam_eps
    all_groups = groups(bert.named_parameters(), lr, training.weight_decay, training.decay_norms)
    match training.optimizer:
        case "adamw":
            chosen = [AdamW(all_groups, lr=lr, betas=betas, eps=eps, fused=True)]
        case "adam":  # as in BERT's paper: the decay is added to the gradient
            chosen = [Adam(all_groups, lr=lr, betas=betas, eps=eps, fused=True)]
        case "radam":
            chosen = [RAdam(all_groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=True)]
        case "adafactor":  # its rate is multiplied by the RMS of each parameter
            chosen = [Adafactor(all_groups, lr=lr, eps=ADAFACTOR_EPS)]
        case "sgd":  # Nesterov's form, which torch refuses without momentum, where it makes no difference
            momentum = training.momentum
            chosen = [SGD(all_groups, lr=lr, momentum=momentum, nesterov=momentum > 0, fused=True)]
        case "muon":
            chosen = muon(bert, training, dtype)
    check(bert, chosen)
    return chosen


def check(model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Raise RuntimeError unless each parameter is in exactly one group of one optimizer."""
    times = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if wrong := [f"{name} in {times[id(p)]}" for name, p in model.named_parameters() if times[id(p)] != 1]:
        raise RuntimeError(f"Expected each parameter in one group of an optimizer; found {', '.join(wrong)}.")


def set_rates(optimizers: list[Optimizer], multiplier: float) -> None:
    """Set each group's rate to this fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = multiplier * group["peak"]
