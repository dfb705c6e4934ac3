"""Muon, by which the matrices of the blocks learn."""

import math
from collections import defaultdict

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's Muon with updates of AdamW's size, whose rates and decays carry over (Liu et al. 2025).

    Matrices of the same shape are orthogonalised together, and in `dtype`. torch takes one after the other, always in
    bf16: some 25 kernels for each of the 96 matrices of `modern`, and emulated where the hardware has no bf16.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(
            groups, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all matrices that have gradients."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape[matrix.shape].append(matrix)
            for matrices in by_shape.values():
                self.update(matrices, group)

    def update(self, matrices: list[Tensor], group: dict) -> None:
        """Update matrices of one shape (A, B)."""
        gradients = [matrix.grad for matrix in matrices]
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        momenta = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        nesterov_NAB = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        # normalised before the cast, as fp16 doesn't hold small gradients
        nesterov_NAB /= torch.linalg.matrix_norm(nesterov_NAB, keepdim=True).clamp(min=group["eps"])
        updates_NAB = orthogonal(nesterov_NAB.to(self.dtype), group["ns_coefficients"], group["ns_steps"])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        rate = 0.2 * math.sqrt(max(matrices[0].shape)) * group["lr"]
        torch._foreach_add_(matrices, updates_NAB.unbind(), alpha=-rate)


def orthogonal(wide_NAB: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Matrices (N, A, B) of norm 1 with singular values moved to between 0.7 and 1.2, by Newton-Schulz steps."""
    a, b, c = coefficients
    is_tall = wide_NAB.shape[1] > wide_NAB.shape[2]
    if is_tall:
        wide_NAB = wide_NAB.mT
    for _ in range(steps):
        gram_NAA = wide_NAB @ wide_NAB.mT
        change_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=b, alpha=c)
        wide_NAB = torch.baddbmm(wide_NAB, change_NAA, wide_NAB, beta=a)
    return wide_NAB.mT if is_tall else wide_NAB
