"""Parameter groups, the optimizers on them, and their rates. Each group carries its own peak rate, as `peak`."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn, optim
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer, RAdam

from model.bert import Bert, Detecting
from model.settings import Training

BETA1 = 0.9  # decay of the mean gradient
MOMENTUM = 0.95  # of sgd and muon, in Nesterov's form
# Adafactor's smallest mean squared gradient, and the smallest RMS of a parameter that its rate is multiplied by (from
# Shazeer & Stern 2018). As the former, torch's 1e-7 hides gradients below about 1e-5, which rare words have, and the
# paper's 1e-30 underflows when squared in fp32, so that [PAD]'s gradient of 0 is divided by 0.
ADAFACTOR_EPS = (1e-18, 1e-3)


def groups(
    named: Iterable[tuple[str, nn.Parameter]], peak: float, weight_decay: float, decay_norms: bool = False
) -> list[dict]:
    """Two groups: the parameters that decay (matrices, embeddings, convolutions) and all others, which don't.

    With `decay_norms`, everything but biases decays.
    """
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.ndim >= 2 or (decay_norms and not name.endswith("bias")):
            decaying.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": decaying, "peak": peak, "weight_decay": weight_decay},
        {"params": others, "peak": peak, "weight_decay": 0.0},
    ]


def optimizers(bert: Bert | Detecting, training: Training, dtype: torch.dtype = torch.float32) -> list[Optimizer]:
    """The optimizer of `training` for an encoder with `blocks`; two for muon, each with its own parameters.

    `dtype`: of Muon's matrix products
    """
    if training.optimizer == "muon":
        return muon_and_adamw(bert, training, dtype)
    lr = training.learning_rate
    betas = (BETA1, training.beta2)
    eps = training.adam_eps
    all_groups = groups(bert.named_parameters(), lr, training.weight_decay, training.decay_norms)
    match training.optimizer:
        case "adamw":
            return [AdamW(all_groups, lr=lr, betas=betas, eps=eps, fused=True)]
        case "adam":  # as in BERT's paper: the decay is added to the gradient
            return [Adam(all_groups, lr=lr, betas=betas, eps=eps, fused=True)]
        case "radam":
            return [RAdam(all_groups, lr=lr, betas=betas, eps=eps, decoupled_weight_decay=True)]
        case "adafactor":  # its rate is multiplied by the RMS of each parameter
            return [Adafactor(all_groups, lr=lr, eps=ADAFACTOR_EPS)]
        case "sgd":
            return [SGD(all_groups, lr=lr, momentum=MOMENTUM, nesterov=True, fused=True)]


def muon_and_adamw(bert: Bert | Detecting, training: Training, dtype: torch.dtype) -> list[Optimizer]:
    """Muon for the matrices of the blocks; AdamW without decay for embedding, convolutions, norms and head."""
    matrices = [parameter for parameter in bert.blocks.parameters() if parameter.ndim == 2]
    ids = {id(matrix) for matrix in matrices}
    others = [(name, parameter) for name, parameter in bert.named_parameters() if id(parameter) not in ids]

    peak = training.matrix_learning_rate
    muon = Muon([{"params": matrices, "peak": peak}], dtype, lr=peak, weight_decay=training.weight_decay)
    lr = training.learning_rate
    betas = (BETA1, training.beta2)
    adamw = AdamW(groups(others, lr, 0.0), lr=lr, betas=betas, eps=training.adam_eps, fused=True)
    return [muon, adamw]


def rate_of_step(training: Training, multiplier: float, step: int) -> float:
    """The learning rate of a step (from 1) at this fraction of the peak. Adafactor's is 1/√step at most (torch)."""
    rate = multiplier * training.learning_rate
    if training.optimizer == "adafactor":
        return min(rate, step**-0.5)
    return rate


def set_rates(optimizers: list[Optimizer], multiplier: float) -> None:
    """Set each group's rate to this fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = multiplier * group["peak"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a recorded step reads it there
            else:
                group["lr"] = rate


class Muon(optim.Muon):
    """torch's Muon with updates as large as AdamW's, so that AdamW's rates and decays fit it too (Liu et al. 2025).

    Matrices of the same shape are orthogonalised together, and in `dtype`. torch takes one after the other, always in
    bf16: some 25 kernels for each of the 96 matrices of `modern`, and emulated where the hardware has no bf16.
    """

    def __init__(self, groups: list[dict], dtype: torch.dtype, lr: float, weight_decay: float) -> None:
        super().__init__(
            groups, lr=lr, weight_decay=weight_decay, momentum=MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
        )
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
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
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self.momentum_of(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        nesterov_NAB = torch.stack(torch._foreach_lerp(gradients, momenta, group["momentum"]))
        # normalised before the cast, as fp16 doesn't hold small gradients
        nesterov_NAB /= torch.linalg.matrix_norm(nesterov_NAB, keepdim=True).clamp(min=group["eps"])
        updates_NAB = orthogonal(nesterov_NAB.to(self.dtype), group["ns_coefficients"], group["ns_steps"])
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        rate = 0.2 * math.sqrt(max(matrices[0].shape)) * group["lr"]
        torch._foreach_add_(matrices, updates_NAB.unbind(), alpha=-rate)

    def momentum_of(self, matrix: Tensor) -> Tensor:
        """The mean gradient of a matrix; zero at first."""
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return state["momentum_buffer"]


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
