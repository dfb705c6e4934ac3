"""Codes of positions: sinusoids, which are added to embeddings, and the rotation of queries and keys.

Shapes: S positions, E embedding, N heads, H values of each.
"""

import math

import torch
from torch import Tensor, nn

ROTARY_BASE = 10_000.0  # Su et al. 2021


def sinusoids(length: int, width: int) -> Tensor:
    """Sine and cosine position codes (S, E) of base 10,000 (Vaswani et al. 2017), the pairs interleaved."""
    positions = torch.arange(length, dtype=torch.float32)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float32) * (-math.log(10_000.0) / width))
    codes = torch.zeros(length, width)
    codes[:, 0::2] = torch.sin(positions * rates)
    codes[:, 1::2] = torch.cos(positions * rates)
    return codes


class Rotation(nn.Module):
    """Rotary positions: values i and i + H / 2 of a head are rotated by an angle proportional to the position."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__()
        rates = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
        sine = torch.sin(angles)
        self.register_buffer("cosines", torch.cos(angles).repeat(1, 2)[:, None, None], persistent=False)
        self.register_buffer("sines", torch.cat([-sine, sine], dim=1)[:, None, None], persistent=False)

    def forward(self, x_BSPNH: Tensor, positions_BS: Tensor | None = None) -> Tensor:
        """Queries or keys (P of them), rotated. They are those of the first S positions if no others are given."""
        places = slice(x_BSPNH.shape[1]) if positions_BS is None else positions_BS
        cosines, sines = (part[places].to(x_BSPNH.dtype) for part in (self.cosines, self.sines))
        # its two halves swapped; compiled for a CPU, `roll` would not be vectorised
        other = x_BSPNH.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        return torch.addcmul(x_BSPNH * cosines, other, sines)
