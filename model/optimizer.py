"""Parameter groups, AdamW, and schedules as functions of the fraction of the budget that is spent."""

import math

import torch
from torch import nn


def triangle(spent: float) -> float:
    """The paper's one-cycle schedule (section 4.3): 0.25 at 0, up to 1 at 0.75, down to 0 at 1, 0 after that."""
    return max(0.0, min(0.25 + spent, 4.0 - 4.0 * spent))


def warm_cosine(spent: float, warmup: float) -> float:
    """From 0 to 1 within the fraction `warmup`, then half a cosine down to 0 at 1."""
    if spent < warmup:
        return spent / warmup
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (spent - warmup) / (1.0 - warmup))))


def ramp(spent: float, until: float, micro_batches: int) -> int:
    """Micro-batches a step: from 1 up to `micro_batches`, linear in the budget, all from the fraction `until` on."""
    if spent >= until:
        return micro_batches
    return min(micro_batches, math.floor(micro_batches * spent / until) + 1)


def adamw(
    model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW; weight decay acts on matrices (the tied embedding too), not on norms, biases and the position scale."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` from the next step on."""
    for group in optimizer.param_groups:
        group["lr"] = lr
