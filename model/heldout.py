"""The held-out loss: every token of the measured documents, predicted once, with a standard error over documents."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from model.draws import draws, random_order
from model.machine import Machine

ROUNDS = 7  # each masks another seventh of the tokens, 14.3 %, near the 15 % of most recipes
SEED = 0  # of the rounds, the same for every run
BATCH_TOKENS = 64 * 128  # computed at once, with the scores of a seventh of them in memory
CURVE_SEQUENCES = 1024  # spread over the text, for the losses over a run
UNITS = {"token": 0, "character": 1, "byte": 2}  # columns of `Heldout.documents`


@dataclass(frozen=True)
class Heldout:
    """The documents that the loss is measured on.

    sequences  (m, S) token ids: one document after another, each followed by a separator; [PAD] after the last
    documents  (d, 3) int64: tokens (without separators), characters and UTF-8 bytes of each document
    """

    sequences: np.ndarray
    documents: np.ndarray

    def __post_init__(self) -> None:
        length = int(self.documents[:, 0].sum()) + len(self.documents)
        if not length <= self.sequences.size < length + self.sequences.shape[1]:
            raise ValueError(
                f"{len(self.documents):,} documents have {length:,} tokens, which don't fit sequences of shape "
                f"{self.sequences.shape}"
            )

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Heldout":
        """Sequences of one document each, which end in its separator; characters and bytes are counted as tokens."""
        return cls(rows, np.full((len(rows), 3), rows.shape[1] - 1, dtype=np.int64))

    @property
    def tokens(self) -> int:
        """Tokens that are predicted: all but separators and padding."""
        return int(self.documents[:, 0].sum())

    def owners(self) -> np.ndarray:
        """(m, S): the number of the document that each token belongs to; -1 for separators and padding."""
        lengths_D = self.documents[:, 0] + 1
        owners = np.full(self.sequences.size, -1, dtype=np.int64)
        owners[: lengths_D.sum()] = np.repeat(np.arange(len(lengths_D)), lengths_D)
        owners[np.cumsum(lengths_D) - 1] = -1
        return owners.reshape(self.sequences.shape)


def rounds_of(owners_BS: np.ndarray, first: int) -> np.ndarray:
    """(B, S): the round in which each token is masked, -1 for never. The rounds share the tokens of a sequence evenly.

    They depend on the number of the sequence, `first` + i, and on the place in it, not on how sequences are batched.
    """
    B, S = owners_BS.shape
    never_BS = owners_BS < 0
    order_BS = random_order(draws(first, B, S, SEED), never_BS)
    ranks_BS = np.empty_like(order_BS)
    np.put_along_axis(ranks_BS, order_BS, np.arange(S)[None], axis=1)
    return np.where(never_BS, -1, ranks_BS % ROUNDS)


def measure(
    bert: nn.Module, heldout: Heldout, mask_id: int, machine: Machine, rounds: int = ROUNDS, every: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each document, nats, and how many of its tokens were predicted: (d,) each.

    All rounds together predict every token once, from a sequence in which it and the others of its round are [MASK].
    Fewer `rounds`, or only each `every`-th sequence, predict fewer tokens.
    """
    sequences, owners, documents = heldout.sequences[::every], heldout.owners()[::every], len(heldout.documents)
    nats_D, predicted_D = np.zeros(documents), np.zeros(documents, dtype=np.int64)
    was_training, batch = bert.training, max(1, BATCH_TOKENS // sequences.shape[1])
    bert.eval()
    with torch.inference_mode(), machine.autocast():
        for first in range(0, len(owners), batch):
            owners_BS, padded = owners[first : first + batch], first + batch >= len(owners)
            tokens_BS = torch.from_numpy(sequences[first : first + batch].astype(np.int64))
            rounds_BS = rounds_of(owners_BS, first)
            for number in range(rounds):
                chosen_M = np.flatnonzero(rounds_BS == number)
                losses_M = _losses(bert, tokens_BS, torch.from_numpy(chosen_M), mask_id, machine, padded)
                owners_M = owners_BS.ravel()[chosen_M]
                nats_D += np.bincount(owners_M, losses_M.double().cpu().numpy(), minlength=documents)
                predicted_D += np.bincount(owners_M, minlength=documents)
    bert.train(was_training)
    return nats_D, predicted_D


def _losses(
    bert: nn.Module, tokens_BS: Tensor, chosen_M: Tensor, mask_id: int, machine: Machine, padded: bool
) -> Tensor:
    """The losses (M,) at the chosen places, which are all masked and are numbered through the whole batch."""
    labels_M = tokens_BS.flatten()[chosen_M]
    masked_BS = tokens_BS.flatten().index_fill(0, chosen_M, mask_id).view(tokens_BS.shape)
    return bert.losses(*(part.to(machine.device) for part in (masked_BS, chosen_M, labels_M)), padded=padded)


def heldout_loss(bert: nn.Module, heldout: Heldout, mask_id: int, machine: Machine) -> float:
    """Nats per token, for the curve over a run: the first round in sequences spread over the text."""
    every = -(-len(heldout.sequences) // CURVE_SEQUENCES)
    nats_D, predicted_D = measure(bert, heldout, mask_id, machine, rounds=1, every=every)
    return float(nats_D.sum() / predicted_D.sum())


def ratio(nats_D: np.ndarray, sizes_D: np.ndarray) -> dict[str, float | None]:
    """Nats per unit of size, and its standard error by the jackknife over documents; None for a single document."""
    nats, size, D = nats_D.sum(), sizes_D.sum(), len(sizes_D)
    error = None
    if (sizes_D < size).all():
        without_D = (nats - nats_D) / (size - sizes_D)
        error = round(math.sqrt((D - 1) / D * ((without_D - without_D.mean()) ** 2).sum()), 6)
    return {"value": round(float(nats / size), 6), "standard_error": error}


def by_frequencies(heldout: Heldout, counts_V: np.ndarray) -> float:
    """Nats of all tokens if each is predicted by its share of training text: what a model reaches without context.

    counts_V: how often each entry of the vocabulary is in training text; each counts once more, so that none is zero.
    """
    nats_V = -np.log((counts_V + 1) / (counts_V + 1).sum())
    return float(nats_V[heldout.sequences[heldout.owners() >= 0]].sum())


def summary(heldout: Heldout, nats_D: np.ndarray, counts_V: np.ndarray | None = None) -> dict:
    """The result of all rounds: the size of the text, and nats per token, character and byte.

    With the counts of `by_frequencies`, its nats too.
    """
    totals = heldout.documents.sum(axis=0).tolist()
    found = {
        "documents": len(heldout.documents),
        **{f"{unit}s": totals[column] for unit, column in UNITS.items()},
        **{f"nats_per_{unit}": ratio(nats_D, heldout.documents[:, column]) for unit, column in UNITS.items()},
    }
    if counts_V is not None:
        nats = by_frequencies(heldout, counts_V)
        found["by_frequencies"] = {
            f"nats_per_{unit}": round(nats / totals[column], 6) for unit, column in UNITS.items()
        }
    return found
