"""How a machine computes attention and dropout: the fastest of torch's kernels on a GPU, code of its own on a CPU.

Shapes: B sequences, S tokens each, N heads, H values of each, K tokens that look at the others.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.machine import Machine
from model.settings import Architecture

log = logging.getLogger(__name__)
KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
WARM_UP, REPEATS = 3, 10  # of a kernel that is timed; cuDNN plans at the first


def drop(x: Tensor, probability: float) -> Tensor:
    """Dropout. On CPUs with 16 random bits per value, seven times as fast as torch; probabilities are exact to 1e-5."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not 0.0 < probability < 1.0:
        return F.dropout(x, probability)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    least = min(round(probability * 2**16) - 2**15, 2**15 - 1)
    kept = torch.ge(bits[: x.numel()].view(x.shape), least, out=torch.empty_like(x, requires_grad=False))
    return x * kept.div_(1.0 - probability)


def attend(q_BNKH: Tensor, k_BNSH: Tensor, v_BNSH: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Scaled dot-product attention; written out on CPUs, where torch's kernel takes 4 times as long at 128 tokens."""
    if q_BNKH.device.type != "cpu":
        return F.scaled_dot_product_attention(q_BNKH, k_BNSH, v_BNSH, attn_mask=mask, dropout_p=dropout)
    scores_BNKS = (q_BNKH * q_BNKH.shape[-1] ** -0.5) @ k_BNSH.transpose(-1, -2)
    if mask is not None:
        scores_BNKS = scores_BNKS.masked_fill(~mask, -torch.inf)
    return drop(scores_BNKS.softmax(dim=-1, dtype=v_BNSH.dtype), dropout) @ v_BNSH


def seconds_of(kernel: SDPBackend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    """Seconds that attention on queries, keys and values of this shape (B, S, N, H) takes, forward and backward.

    They lie in memory as those of `Attention` do. Raises RuntimeError if the kernel can't compute it here.
    """
    B, S, N, H = shape
    qkv_BS3NH = torch.randn((B, S, 3, N, H), dtype=dtype, device=device, requires_grad=True)
    q_BNSH, k_BNSH, v_BNSH = (part.transpose(1, 2) for part in qkv_BS3NH.unbind(2))
    gradient_BNSH = torch.randn(shape, dtype=dtype, device=device).transpose(1, 2)

    def compute(times: int) -> None:
        for _ in range(times):
            x_BNSH = F.scaled_dot_product_attention(q_BNSH, k_BNSH, v_BNSH)
            of_queries, *_ = torch.autograd.grad(x_BNSH, (q_BNSH, k_BNSH, v_BNSH), gradient_BNSH)
        of_queries.sum().item()  # waits for the device

    with sdpa_kernel(kernel):
        compute(WARM_UP)
        began = time.perf_counter()
        compute(REPEATS)
    return (time.perf_counter() - began) / REPEATS


@contextmanager
def fastest_kernel(architecture: Architecture, length: int, micro_batch: int, machine: Machine) -> Iterator[None]:
    """Attention by the kernel that is fastest on this GPU for a micro-batch of `length` tokens, in compiled code too.

    torch's own choice goes by the card's generation. On a CPU, where `attend` uses none of these kernels, and if none
    can be timed, nothing is changed.
    """
    shape, seconds = (micro_batch, length, architecture.heads, architecture.hidden // architecture.heads), {}
    for kernel in KERNELS if machine.device.type != "cpu" else ():
        try:
            seconds[kernel] = seconds_of(kernel, shape, machine.dtype, machine.device)
        except RuntimeError as error:  # not for this card or dtype, or the card is full
            log.info("Attention by %s is not available: %s", kernel.name, str(error).split("\n")[0])
    if not seconds:
        yield
        return
    order = sorted(seconds, key=seconds.__getitem__)
    log.info("Attention: %s.", ", ".join(f"{kernel.name} {1000 * seconds[kernel]:.2f} ms" for kernel in order))
    chosen = sdpa_kernel([*order, SDPBackend.MATH], set_priority=True)
    # torch's cache of compiled code does not ask which kernel it was compiled with
    with chosen, torch._functorch.config.patch(enable_autograd_cache=False):
        yield
