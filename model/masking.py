"""Masks for masked language modelling: exactly k tokens of every sequence, so that all shapes are static."""

import torch
from torch import Tensor

MASKED, RANDOM = 0.8, 0.1  # of the chosen tokens: [MASK], a random token; the rest stays (Devlin et al. 2019)


def masks_per_sequence(fraction: float, length: int) -> int:
    """How many tokens of a sequence are predicted: at least one."""
    return max(1, round(fraction * length))


def mask(
    tokens_BS: Tensor,
    count: int,
    mask_id: int,
    specials: int,
    vocabulary: int,
    seed: tuple[int, int],
    corrupt: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `count` = K tokens of each sequence for prediction, and hide them.

    Returns the changed tokens (B, S), the chosen positions (B, K) and the ids that stood there (B, K). Ids below
    `specials` are never drawn as random tokens, and are chosen only where a sequence has fewer than K others.
    Of each sequence's K, exactly round(0.8 K) become [MASK] and half of the rest random tokens, as in the reference
    implementation (26, 3 and 3 of 32); with `corrupt` off all become [MASK], which is how held-out loss is measured.
    The choice depends on `seed` = (seed, index of the micro-batch) alone, so a resumed run, which keeps its micro-batch,
    masks as if never stopped.
    """
    run, index = seed
    generator = torch.Generator(device=tokens_BS.device)
    generator.manual_seed((run * 1_000_003 + index) % 2**63)
    order = torch.rand(tokens_BS.shape, generator=generator, device=tokens_BS.device)
    positions_BK = (order + (tokens_BS < specials)).argsort(dim=1)[:, :count]
    labels_BK = tokens_BS.gather(1, positions_BK)
    masked = round(MASKED * count) if corrupt else count
    random = round(RANDOM * count) if corrupt else 0
    inputs_BK = labels_BK.clone()
    inputs_BK[:, :masked] = mask_id
    shape = (len(tokens_BS), random)
    inputs_BK[:, masked : masked + random] = torch.randint(
        specials, vocabulary, shape, generator=generator, device=tokens_BS.device
    )
    return tokens_BS.scatter(1, positions_BK, inputs_BK), positions_BK, labels_BK
