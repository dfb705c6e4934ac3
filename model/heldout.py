"""The held-out loss: each word of the measured documents, predicted once, with a standard error over documents.

A masked piece of a word is easy to predict while the word's other pieces are in sight, so a loss over single tokens
favours vocabularies that split more words. Therefore all pieces of a word are masked together and revealed from left to
right; each is predicted from those before it, and their sum is the loss of the word (Kauf and Ivanova 2023, arXiv
2305.10588). The number of masks tells the model how many pieces the word has. Since a vocabulary that splits more
tells more by it, that number costs the nats of its frequency in the text.

For a model that knows the frequencies of words and reads no context, the loss is the entropy of the words, whatever the
pieces. For others it is an upper bound: context tells a part of the numbers, but they cost as if it told nothing. The
loss without them is a lower bound. So of two models with different vocabularies, one is better only if its upper bound
is below the other's lower bound.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from model.bert import Bert
from model.machine import Machine
from model.settings import Training

ROUNDS = 7  # each masks another seventh of the words, 14.3 %, near the 15 % of most recipes
SEED = 0  # of the rounds, the same for every run
BATCH_TOKENS = 64 * 128  # computed at once, with the scores of a seventh of them in memory
# spread over the text, for the losses over a run: of single tokens, and of whole words
CURVE_SEQUENCES, CURVE_WORDS = 256, 25_000
LEAST_OF_CURVE, LEAST_SEQUENCES = 1 / 25, 24  # of the words, for the shortest runs, and sequences
# How much is measured follows from the budget alone, never from the speed of a machine or its load, so that runs with
# the same budget are measured on the same words. Measuring after the run, and all losses over the run together, should
# take a tenth of the budget each on a slow machine. Two busy cores without bf16 train `pocket-frontier` on about 1,000
# tokens a second. A character takes 2.5 to 7.5 forward passes of a token, the more the smaller the vocabulary (3.8 with
# 8,192 entries); a token of training costs three.
SLOW_TOKENS, POCKET_OPERATIONS = 3.6e6, 2.1e7  # an hour; a token
PASSES_PER_CHARACTER, PASSES_OF_TRAINING = 4.5, 3.0
CURVE_PASSES = 1.3e6  # forward passes of a token for all losses over a run: 32,768 tokens and 3,600 words, eleven times
SHARE = 0.1
ALL_FROM_HOURS = 0.5  # measured as ever: two cores with bf16 need a tenth of it for a million characters
LEAST_CHARACTERS = 10_000  # some 1,800 words, however short the run
BEGINNING = 500  # characters of a document, about a sequence: many documents tell more than many words of a few
BLOCK = 512  # words in a row, of which all or none are in a part of the text: the same words for every vocabulary
FILE = "heldout.npz"  # in the folders of the tokenize and pretrain stages
SIZES = ("tokens", "words", "characters", "bytes", "unread_bytes")  # columns of `Heldout.documents`
UNITS = ("word", "character", "byte")
PHILOX_WORDS = 4  # 64-bit words per count of the generator


def tokens_of(training: Training) -> float:
    """The tokens that a slow machine trains a pocket model on within the budget; infinite for a long run."""
    if training.budget_unit == "hours":
        return training.budget * SLOW_TOKENS if training.budget < ALL_FROM_HOURS else math.inf
    return training.budget / (POCKET_OPERATIONS if training.budget_unit == "flops" else 1)


def most_characters(training: Training) -> float:
    """How many characters the loss is measured on after a run with this budget, at most; may be infinite."""
    return max(LEAST_CHARACTERS, SHARE * tokens_of(training) * PASSES_OF_TRAINING / PASSES_PER_CHARACTER)


def share_of_curve(training: Training) -> float:
    """The part of CURVE_SEQUENCES and CURVE_WORDS that the losses over a run with this budget are measured on."""
    return min(1.0, max(LEAST_OF_CURVE, SHARE * tokens_of(training) * PASSES_OF_TRAINING / CURVE_PASSES))


def beginnings(texts: list[str], characters: float) -> list[str]:
    """At most so many characters of the texts: the beginning of each, or of the first ones if that were too little.

    With fewer characters it is a part of what it is with more.
    """
    if not texts or sum(map(len, texts)) <= characters:
        return texts
    each = max(BEGINNING, int(characters) // len(texts))
    sizes = np.cumsum([min(len(text), each) for text in texts])
    number = max(1, int(np.searchsorted(sizes, characters, side="right")))
    some = texts[:number]
    ends = [max(text.rfind(space, each // 2, each) for space in " \n") if len(text) > each else -1 for text in some]
    return [text[: end if end > 0 else each] for text, end in zip(some, ends, strict=True)]


def draws(first: int, sequences: int, words: int, key: int | np.ndarray) -> np.ndarray:
    """(sequences, words) uint64: random numbers of the sequences from number `first` on.

    They depend on the number of a sequence and the key alone, not on how sequences are batched.
    """
    counts = -(-words // PHILOX_WORDS)
    generator = np.random.Philox(key=key)
    generator.advance(first * counts)
    return generator.random_raw(sequences * counts * PHILOX_WORDS).reshape(sequences, counts * PHILOX_WORDS)[:, :words]


def random_order(draws_BS: np.ndarray, last_BS: np.ndarray) -> np.ndarray:
    """(B, S): the places of each sequence in the order of their draws, those in `last_BS` after all others."""
    order_BS = draws_BS >> np.uint64(1) | last_BS.astype(np.uint64) << np.uint64(63)
    return np.argsort(order_BS, axis=1, kind="stable")


@dataclass(frozen=True)
class Heldout:
    """The documents that the loss is measured on.

    sequences  (m, S) token ids: one document after another, each followed by a separator; [PAD] after the last
    words      (m, S) int32: the number of the word that each token is a piece of, counted through all documents;
               -1 for separators and padding
    documents  (d, 5) int64: tokens (without separators), words, characters and UTF-8 bytes of each document; and bytes
               of it that the model can't read, because they are deleted or [UNK], with the white space after them
    """

    sequences: np.ndarray
    words: np.ndarray
    documents: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> "Heldout":
        """What `save` has written to the folder."""
        with np.load(folder / FILE) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})

    def save(self, folder: Path) -> None:
        """Write FILE."""
        np.savez_compressed(folder / FILE, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Heldout":
        """Sequences of one document each, which end in its separator; words, characters and bytes are its tokens."""
        m, size = len(rows), rows.shape[1] - 1
        words = np.pad(np.arange(m * size, dtype=np.int32).reshape(m, size), ((0, 0), (0, 1)), constant_values=-1)
        return cls(rows, words, np.tile([size] * 4 + [0], (m, 1)))

    @property
    def totals(self) -> dict[str, int]:
        """The sums of SIZES over all documents."""
        return dict(zip(SIZES, self.documents.sum(axis=0).tolist(), strict=True))

    @property
    def read_bytes(self) -> np.ndarray:
        """(d,): the bytes of each document that the model can read."""
        return self.documents[:, SIZES.index("bytes")] - self.documents[:, SIZES.index("unread_bytes")]

    @cached_property
    def owners(self) -> np.ndarray:
        """(m, S): the number of the document that each token belongs to; -1 for separators and padding."""
        found = np.searchsorted(np.cumsum(self.documents[:, 1]), self.words, side="right")
        return np.where(self.words < 0, -1, found)

    @cached_property
    def pieces(self) -> np.ndarray:
        """(m, S): the place of each token among the pieces of its word in this sequence, from 0."""
        same = self.words[:, 1:] == self.words[:, :-1]
        places = np.broadcast_to(np.arange(self.words.shape[1]), self.words.shape)
        begins = np.where(np.pad(same, ((0, 0), (1, 0))), 0, places)
        return places - np.maximum.accumulate(begins, axis=1)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(m, S): the number of pieces of a word in this sequence, at its first piece; 0 elsewhere."""
        valid, lengths = self.words >= 0, np.zeros(self.words.shape, np.int64)
        first = valid & (self.pieces == 0)
        lengths[first] = np.bincount((np.cumsum(first) - 1)[valid.ravel()])
        return lengths

    @cached_property
    def length_nats(self) -> np.ndarray:
        """(m, S): at the first piece of a word, the nats of its number of pieces by their frequency; 0 elsewhere."""
        counts = np.bincount(self.lengths.ravel())
        counts[0] = 0
        nats = -np.log(np.maximum(counts, 1) / max(1, counts.sum()))
        nats[0] = 0
        return nats[self.lengths]

    def rounds(self) -> np.ndarray:
        """(m, S): the round in which each token is masked with its word, -1 for never.

        Of seven words in a row each has another round, by the number of the words alone: whatever their pieces.
        """
        shuffled_GR = draws(0, self.totals["words"] // ROUNDS + 1, ROUNDS, SEED).argsort(axis=1)
        return np.where(self.words < 0, -1, shuffled_GR.ravel()[self.words])


def token_rounds(owners_MS: np.ndarray) -> np.ndarray:
    """(m, S): the round in which each token is masked by itself, -1 for never; evenly shared in each sequence."""
    M, S = owners_MS.shape
    never_MS = owners_MS < 0
    order_MS = random_order(draws(0, M, S, SEED), never_MS)
    ranks_MS = np.empty_like(order_MS)
    np.put_along_axis(ranks_MS, order_MS, np.arange(S)[None], axis=1)
    return np.where(never_MS, -1, ranks_MS % ROUNDS)


def document_losses(
    bert: Bert, heldout: Heldout, mask_id: int, machine: Machine, rounds: int = ROUNDS, every: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each document, nats, and how many words of it were predicted: (d,) each.

    All rounds together predict every word once, from a sequence in which it and the other words of its round are
    [MASK]; a word at the end of a sequence is two words, one in each. Fewer `rounds`, or only each `every`-th BLOCK,
    predict fewer words, with the same loss.
    """
    rounds_MS, pieces_MS, owners_MS = heldout.rounds(), heldout.pieces, heldout.owners
    documents = len(heldout.documents)
    chosen_MS = (rounds_MS >= 0) & (rounds_MS < rounds) & (heldout.words // BLOCK % every == 0)
    rows, places = np.nonzero(chosen_MS)
    # one forward pass for each sequence, round and piece; sorted, so that long words of all rounds share batches
    passes = np.unique(np.stack([pieces_MS[rows, places], rounds_MS[rows, places], rows], axis=1), axis=0)

    def hide(passes_BP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pieces_B1, rounds_B1 = passes_BP[:, :1], passes_BP[:, 1:2]
        words_BS, away_BS = rounds_MS[passes_BP[:, 2]] == rounds_B1, pieces_MS[passes_BP[:, 2]] - pieces_B1
        return words_BS & (away_BS >= 0), words_BS & (away_BS == 0) & chosen_MS[passes_BP[:, 2]]

    nats_D = sum_passes(bert, heldout.sequences, owners_MS, passes, hide, documents, mask_id, machine)
    first_MS = chosen_MS & (pieces_MS == 0)
    nats_D += np.bincount(owners_MS[first_MS], heldout.length_nats[first_MS], minlength=documents)
    return nats_D, np.bincount(owners_MS[first_MS], minlength=documents)


def sum_passes(
    bert: Bert,
    sequences_MS: np.ndarray,
    owners_MS: np.ndarray,
    passes: np.ndarray,
    hide: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    documents: int,
    mask_id: int,
    machine: Machine,
) -> np.ndarray:
    """The nats of each document (d,), summed over passes, whose last column is a sequence's number.

    `hide` returns of some passes which tokens are [MASK], and which of them are predicted: (B, S) each.
    """
    nats_D = np.zeros(documents)
    batch = max(1, BATCH_TOKENS // sequences_MS.shape[1])
    was_training = bert.training
    bert.eval()
    with torch.inference_mode(), machine.autocast():
        for first in range(0, len(passes), batch):
            some = passes[first : first + batch]
            hidden_BS, predicted_BS = hide(some)
            tokens_BS, places_M = sequences_MS[some[:, -1]].astype(np.int64), np.flatnonzero(predicted_BS)
            parts = np.where(hidden_BS, mask_id, tokens_BS), places_M, tokens_BS.ravel()[places_M]
            padded = bool((some[:, -1] == len(sequences_MS) - 1).any())  # only the last sequence has [PAD]
            tokens, places, labels = (torch.from_numpy(part).to(machine.device) for part in parts)
            losses_M = bert.losses(tokens, places, labels, padded)
            owners_M = owners_MS[some[:, -1]].ravel()[places_M]
            nats_D += np.bincount(owners_M, losses_M.double().cpu().numpy(), minlength=documents)
    bert.train(was_training)
    return nats_D


def spread(heldout: Heldout, share: float) -> int:
    """Each which of the sequences the curve's loss of single tokens is measured on."""
    return math.ceil(len(heldout.sequences) / max(LEAST_SEQUENCES, share * CURVE_SEQUENCES))


def curve_losses(bert: Bert, heldout: Heldout, mask_id: int, machine: Machine, share: float = 1.0) -> dict[str, float]:
    """The losses for the curve over a run, of the first round in parts spread over the text.

    heldout_loss           nats per token, with single tokens masked, as in training: not for other vocabularies
    heldout_nats_per_byte  nats per byte, with whole words masked, of the same words for every vocabulary

    `share`: of CURVE_SEQUENCES and CURVE_WORDS.
    """
    every = spread(heldout, share)
    owners_MS = heldout.owners[::every]
    rounds_MS = token_rounds(owners_MS)
    passes = np.flatnonzero((rounds_MS == 0).any(axis=1))[:, None]

    def hide(passes_B1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        chosen_BS = rounds_MS[passes_B1[:, 0]] == 0
        return chosen_BS, chosen_BS

    sequences_MS, documents = heldout.sequences[::every], len(heldout.documents)
    nats_D = sum_passes(bert, sequences_MS, owners_MS, passes, hide, documents, mask_id, machine)
    of_tokens = nats_D.sum() / (rounds_MS == 0).sum()
    # by words, so that it is the same for every vocabulary
    every = math.ceil(heldout.totals["words"] / max(1.0, share * CURVE_WORDS))
    nats_D, predicted_D = document_losses(bert, heldout, mask_id, machine, rounds=1, every=every)
    words_per_byte = (heldout.lengths > 0).sum() / heldout.read_bytes.sum()
    return {
        "heldout_loss": float(of_tokens),
        "heldout_nats_per_byte": float(nats_D.sum() / predicted_D.sum() * words_per_byte),
    }


def ratio(nats_D: np.ndarray, sizes_D: np.ndarray) -> dict[str, float | None]:
    """Nats per unit of size, and its standard error by the jackknife over documents; None for a single document."""
    nats, size, D = nats_D.sum(), sizes_D.sum(), len(sizes_D)
    error = None
    if (sizes_D < size).all():
        without_D = (nats - nats_D) / (size - sizes_D)
        error = round(math.sqrt((D - 1) / D * ((without_D - without_D.mean()) ** 2).sum()), 6)
    return {"value": round(float(nats / size), 6), "standard_error": error}


def summary(heldout: Heldout, nats_D: np.ndarray, counts_V: np.ndarray | None = None) -> dict:
    """The result of all rounds: the size of the text, and nats per word, character and byte of it.

    `unread`: the share of its bytes that the model can't read: nothing predicts deleted ones, and [UNK] is one token.
    Nats per byte are those per byte that it can read, or the less it reads, the better it would look.
    `length_nats_per_byte`: the part of the nats per byte that is for the number of pieces of the words.

    With `counts_V`, how often each entry of the vocabulary is in training text, also `by_frequencies`.
    """
    totals, lengths, read = heldout.totals, float(heldout.length_nats.sum()), int(heldout.read_bytes.sum())
    units = {unit: heldout.documents[:, SIZES.index(f"{unit}s")] for unit in UNITS} | {"byte": heldout.read_bytes}
    found = {
        "documents": len(heldout.documents),
        **totals,
        "unread": round(totals["unread_bytes"] / max(1, totals["bytes"]), 6),
        **{f"nats_per_{unit}": ratio(nats_D, sizes_D) for unit, sizes_D in units.items()},
        "length_nats_per_byte": round(lengths / read, 6),
    }
    return found if counts_V is None else found | {"by_frequencies": by_frequencies(heldout, counts_V)}


def by_frequencies(heldout: Heldout, counts_V: np.ndarray, share: float = 1.0) -> dict[str, float]:
    """The nats per token and byte if each token is predicted by its share of the training text, counted in `counts_V`.

    A model reaches them without context. Each entry counts once more, so that none is zero. The nats per token are
    those of the sequences that a curve with this `share` is measured on.
    """
    nats_V = -np.log((counts_V + 1) / (counts_V + 1).sum())
    nats_MS = np.where(heldout.words >= 0, nats_V[heldout.sequences], 0)
    nats, lengths = float(nats_MS.sum()), float(heldout.length_nats.sum())
    rows = slice(None, None, 1 if share == 1 else spread(heldout, share))
    return {
        "nats_per_token": round(float(nats_MS[rows].sum()) / int((heldout.words[rows] >= 0).sum()), 6),
        "nats_per_byte": round((nats + lengths) / int(heldout.read_bytes.sum()), 6),
    }
