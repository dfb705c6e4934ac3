"""The held-out loss: each word of the measured documents, predicted once, with a standard error over documents.

A masked piece of a word is easy to predict while the word's other pieces are in sight, so a loss over single tokens
favours vocabularies that split more words. Therefore all pieces of a word are masked together and revealed from left to
right; each is predicted from those before it, and their sum is the loss of the word (Kauf and Ivanova 2023, arXiv
2305.10588). The number of masks shows the model how many pieces the word has. Since a vocabulary that splits more
reveals more by that number, it costs the nats of its frequency in the text.

For a model that knows the frequencies of words and reads no context, the loss is the entropy of the words, whatever the
pieces. For others it is an upper bound: a part of these numbers follows from context, but they cost as if none did. The
loss without them is a lower bound. So of two models with different vocabularies, one is better only if its upper bound
is below the other's lower bound.
"""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from model.bert import Bert
from model.machine import Machine
from model.settings import Training

ROUNDS = 7  # each masks another seventh of the words, 14.3 %, near the 15 % of most recipes
SEED = 0  # of the rounds, the same for every run
BATCH_TOKENS = 64 * 128  # computed at once, with the scores of a seventh of them in memory
# spread over the text, for the losses over a run: of single tokens, and of whole words
CURVE_SEQUENCES = 256
CURVE_WORDS = 25_000
LEAST_OF_CURVE = 1 / 25  # of the words, for the shortest runs
LEAST_SEQUENCES = 24
# How much is measured follows from the budget alone, never from the speed of a machine or its load, so that runs with
# the same budget are measured on the same words. Measuring after the run, and all losses over the run together, should
# take a tenth of the budget each on a slow machine. Two busy cores without bf16 train `pocket-frontier` on about 1,000
# tokens a second. A character takes 2.5 to 7.5 forward passes of a token, the more the smaller the vocabulary (3.8 with
# 8,192 entries); a token of training costs three.
SLOW_TOKENS = 3.6e6  # an hour
POCKET_OPERATIONS = 2.1e7  # a token
PASSES_PER_CHARACTER = 4.5
PASSES_OF_TRAINING = 3.0
CURVE_PASSES = 1.3e6  # forward passes of a token for all losses over a run: 32,768 tokens and 3,600 words, eleven times
SHARE = 0.1
ALL_FROM_HOURS = 0.5  # longer runs measure everything: two cores with bf16 need a tenth of it for a million characters
LEAST_CHARACTERS = 10_000  # some 1,800 words, however short the run
BEGINNING = 500  # characters of a document, about a sequence: many documents say more than many words of a few
BLOCK = 512  # words in a row, of which all or none are in a part of the text: the same words for every vocabulary
FILE = "heldout.npz"  # in the folders of the tokenize and pretrain stages
SIZES = ("tokens", "words", "characters", "bytes", "unread_bytes")  # columns of `Heldout.documents`
UNITS = ("word", "character", "byte")
PHILOX_WORDS = 4  # 64-bit words per count of the generator


def tokens_of(training: Training) -> float:
    """The tokens that a slow machine trains a pocket model on within the budget; infinite for a long run.

    A budget in epochs has to be given in tokens (`Training.in_tokens`).
    """
    if training.budget_unit == "tokens":
        return training.budget
    if training.budget_unit == "flops":
        return training.budget / POCKET_OPERATIONS
    assert training.budget_unit == "hours", "how many tokens an epoch has is not known here"
    if training.budget < ALL_FROM_HOURS:
        return training.budget * SLOW_TOKENS
    return math.inf


def most_characters(training: Training) -> float:
    """The most characters that the loss is measured on after a run with this budget; may be infinite."""
    passes = SHARE * tokens_of(training) * PASSES_OF_TRAINING
    return max(LEAST_CHARACTERS, passes / PASSES_PER_CHARACTER)


def share_of_curve(training: Training) -> float:
    """The fraction of CURVE_SEQUENCES and CURVE_WORDS on which the losses over a run with this budget are measured."""
    passes = SHARE * tokens_of(training) * PASSES_OF_TRAINING
    return min(1.0, max(LEAST_OF_CURVE, passes / CURVE_PASSES))


def beginnings(texts: list[str], characters: float) -> list[str]:
    """At most this many characters of the texts: the beginning of each, or of the first texts if that were too short.

    The result for fewer characters is a part of the result for more.
    """
    if not texts or sum(map(len, texts)) <= characters:
        return texts
    each = max(BEGINNING, int(characters) // len(texts))
    sizes = np.cumsum([min(len(text), each) for text in texts])
    number = max(1, int(np.searchsorted(sizes, characters, side="right")))
    return [beginning(text, each) for text in texts[:number]]


def beginning(text: str, characters: int) -> str:
    """At most this many characters, up to the end of a word if one ends in their second half."""
    if len(text) <= characters:
        return text
    half = characters // 2
    end = max(text.rfind(" ", half, characters), text.rfind("\n", half, characters))
    if end <= 0:
        return text[:characters]
    return text[:end]


def draws(first: int, sequences: int, words: int, key: int | np.ndarray) -> np.ndarray:
    """(sequences, words) uint64: random numbers of the sequences from number `first` on.

    They depend on the number of a sequence and the key alone, not on how sequences are batched.
    """
    counts = -(-words // PHILOX_WORDS)
    width = counts * PHILOX_WORDS
    generator = np.random.Philox(key=key)
    generator.advance(first * counts)
    return generator.random_raw(sequences * width).reshape(sequences, width)[:, :words]


def random_order(draws_BS: np.ndarray, last_BS: np.ndarray) -> np.ndarray:
    """(B, S): the places of each sequence in the order of their draws, those in `last_BS` after all others."""
    last_bit_BS = last_BS.astype(np.uint64) << np.uint64(63)
    order_BS = draws_BS >> np.uint64(1) | last_bit_BS
    return np.argsort(order_BS, axis=1, kind="stable")


@dataclass(frozen=True)
class Heldout:
    """The documents that the loss is measured on.

    sequences  (m, S) token ids: one document after another, each followed by a separator; [PAD] after the last
    words      (m, S) int32: the number of the word that each token is a piece of, counted through all documents;
               -1 for what is never predicted: separators, padding and, after `without`, [UNK]
    documents  (d, 5) int64: tokens (without separators), words, characters and UTF-8 bytes of each document; and bytes
               of it that the model can't read, because they are deleted or [UNK], with the white space after them
    """

    sequences: np.ndarray
    words: np.ndarray
    documents: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> "Heldout":
        """Read what `save` wrote to the folder."""
        with np.load(folder / FILE) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})

    def save(self, folder: Path) -> None:
        """Write FILE."""
        np.savez_compressed(folder / FILE, **{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Heldout":
        """A document from each row, which ends in a separator; each token counts as a word, a character and a byte."""
        m = len(rows)
        size = rows.shape[1] - 1  # without the separator
        numbers = np.arange(m * size, dtype=np.int32).reshape(m, size)
        words = np.pad(numbers, ((0, 0), (0, 1)), constant_values=-1)
        documents = np.tile([size, size, size, size, 0], (m, 1))
        return cls(rows, words, documents)

    def without(self, unknown: int) -> "Heldout":
        """The same with each [UNK], whose id is `unknown`, outside of all words: it stays in sight, unpredicted.

        So it does in pretraining, and its bytes are unread ones. A word with [UNK] in its middle becomes two.
        """
        words = np.where(self.sequences == unknown, np.int32(-1), self.words)
        return Heldout(self.sequences, words, self.documents)

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
        """(m, S): the number of the document that each token belongs to; -1 for those outside of all words."""
        ends = np.cumsum(self.documents[:, SIZES.index("words")])
        documents = np.searchsorted(ends, self.words, side="right")
        return np.where(self.words < 0, -1, documents)

    @cached_property
    def pieces(self) -> np.ndarray:
        """(m, S): the place of each token among the pieces of its word in this sequence, from 0."""
        is_same = self.words[:, 1:] == self.words[:, :-1]
        continues = np.pad(is_same, ((0, 0), (1, 0)))
        places = np.broadcast_to(np.arange(self.words.shape[1]), self.words.shape)
        begins = np.where(continues, 0, places)
        return places - np.maximum.accumulate(begins, axis=1)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(m, S): the number of pieces of a word in this sequence, at its first piece; 0 elsewhere."""
        valid = self.words >= 0
        first = valid & (self.pieces == 0)
        numbers = np.cumsum(first) - 1  # of the word of each token, flat
        lengths = np.zeros(self.words.shape, np.int64)
        lengths[first] = np.bincount(numbers[valid.ravel()])
        return lengths

    @cached_property
    def length_nats(self) -> np.ndarray:
        """(m, S): at the first piece of a word, the nats of its number of pieces by their frequency; 0 elsewhere."""
        counts = np.bincount(self.lengths.ravel())
        counts[0] = 0
        shares = np.maximum(counts, 1) / max(1, counts.sum())
        nats = -np.log(shares)
        nats[0] = 0
        return nats[self.lengths]

    def rounds(self) -> np.ndarray:
        """(m, S): the round in which each token is masked with its word, -1 for never.

        Of seven words in a row each has another round, by the number of the words alone: whatever their pieces.
        """
        groups = self.totals["words"] // ROUNDS + 1
        shuffled_GR = draws(0, groups, ROUNDS, SEED).argsort(axis=1)
        return np.where(self.words < 0, -1, shuffled_GR.ravel()[self.words])


def token_rounds(owners_MS: np.ndarray) -> np.ndarray:
    """(m, S): the round in which each token is masked by itself, -1 for never; evenly shared in each sequence."""
    M, S = owners_MS.shape
    never_MS = owners_MS < 0
    order_MS = random_order(draws(0, M, S, SEED), never_MS)
    ranks_MS = np.empty_like(order_MS)
    np.put_along_axis(ranks_MS, order_MS, np.arange(S)[None], axis=1)
    return np.where(never_MS, -1, ranks_MS % ROUNDS)


class Passes(Protocol):
    """Forward passes, each on a sequence of which some tokens are [MASK]."""

    @property
    def rows(self) -> np.ndarray:
        """(P,): the number of each pass's sequence."""

    def hide(self, some: slice) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of these B passes are [MASK], and which of them are predicted: (B, S) each."""


@dataclass(frozen=True)
class TokenPasses:
    """One pass for each sequence: the tokens of the first round, each by itself."""

    chosen_MS: np.ndarray  # whether a token is of that round

    @cached_property
    def rows(self) -> np.ndarray:
        """(P,): the number of each pass's sequence."""
        return np.flatnonzero(self.chosen_MS.any(axis=1))

    def hide(self, some: slice) -> tuple[np.ndarray, np.ndarray]:
        """All tokens that are [MASK] are predicted: (B, S), twice."""
        chosen_BS = self.chosen_MS[self.rows[some]]
        return chosen_BS, chosen_BS


class WordPasses:
    """One pass for each sequence, round and place in a word: it predicts the pieces at that place.

    The words of the round are [MASK] from that place on, and so are those that are not predicted.
    """

    def __init__(self, heldout: Heldout, rounds: int, every: int) -> None:
        self.pieces_MS = heldout.pieces
        self.rounds_MS = heldout.rounds()
        of_rounds_MS = (self.rounds_MS >= 0) & (self.rounds_MS < rounds)
        of_blocks_MS = heldout.words // BLOCK % every == 0
        self.predicted_MS = of_rounds_MS & of_blocks_MS
        rows, places = np.nonzero(self.predicted_MS)
        passes = np.stack([self.pieces_MS[rows, places], self.rounds_MS[rows, places], rows], axis=1)
        # sorted, so that long words of all rounds share batches
        self.pieces, self.rounds, self.rows = np.unique(passes, axis=0).T

    def hide(self, some: slice) -> tuple[np.ndarray, np.ndarray]:
        """Which tokens of these B passes are [MASK], and which of them are predicted: (B, S) each."""
        rows = self.rows[some]
        of_round_BS = self.rounds_MS[rows] == self.rounds[some, None]
        away_BS = self.pieces_MS[rows] - self.pieces[some, None]
        hidden_BS = of_round_BS & (away_BS >= 0)
        predicted_BS = of_round_BS & (away_BS == 0) & self.predicted_MS[rows]
        return hidden_BS, predicted_BS


def document_losses(
    bert: Bert, heldout: Heldout, mask_id: int, machine: Machine, rounds: int = ROUNDS, every: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each document, nats, and how many words of it were predicted: (d,) each.

    All rounds together predict every word once, from a sequence in which it and the other words of its round are
    [MASK]; a word at the end of a sequence is two words, one in each. Fewer `rounds`, or only each `every`-th BLOCK,
    predict fewer words, with the same loss.
    """
    documents = len(heldout.documents)
    passes = WordPasses(heldout, rounds, every)
    nats_D = sum_passes(bert, heldout.sequences, heldout.owners, passes, documents, mask_id, machine)

    # what the numbers of pieces cost, once a word
    first_MS = passes.predicted_MS & (heldout.pieces == 0)
    owners = heldout.owners[first_MS]
    nats_D += np.bincount(owners, heldout.length_nats[first_MS], minlength=documents)
    return nats_D, np.bincount(owners, minlength=documents)


def sum_passes(
    bert: Bert,
    sequences_MS: np.ndarray,
    owners_MS: np.ndarray,
    passes: Passes,
    documents: int,
    mask_id: int,
    machine: Machine,
) -> np.ndarray:
    """The nats of each document (d,), summed over passes on these sequences."""
    nats_D = np.zeros(documents)
    batch = max(1, BATCH_TOKENS // sequences_MS.shape[1])
    was_training = bert.training
    bert.eval()
    with torch.inference_mode(), machine.autocast():
        for first in range(0, len(passes.rows), batch):
            some = slice(first, first + batch)
            rows_B = passes.rows[some]
            tokens_BS = sequences_MS[rows_B].astype(np.int64)
            hidden_BS, predicted_BS = passes.hide(some)

            masked_BS = np.where(hidden_BS, mask_id, tokens_BS)
            places_M = np.flatnonzero(predicted_BS)
            padded = len(sequences_MS) - 1 in rows_B  # only the last sequence has [PAD]
            nats_M = losses_at(places_M, bert, masked_BS, tokens_BS, padded, machine)

            owners_M = owners_MS[rows_B].ravel()[places_M]
            nats_D += np.bincount(owners_M, nats_M, minlength=documents)
    bert.train(was_training)
    return nats_D


def losses_at(
    places_M: np.ndarray, bert: Bert, masked_BS: np.ndarray, tokens_BS: np.ndarray, padded: bool, machine: Machine
) -> np.ndarray:
    """The nats (M,) of the tokens at these places, which are numbered through the whole batch."""
    inputs = torch.from_numpy(masked_BS).to(machine.device)
    places = torch.from_numpy(places_M).to(machine.device)
    labels = torch.from_numpy(tokens_BS.ravel()[places_M]).to(machine.device)
    return bert.losses(inputs, places, labels, padded).double().cpu().numpy()


def spread(heldout: Heldout, share: float) -> int:
    """The curve's loss of single tokens is measured on every n-th sequence: this n."""
    return math.ceil(len(heldout.sequences) / max(LEAST_SEQUENCES, share * CURVE_SEQUENCES))


def curve_losses(bert: Bert, heldout: Heldout, mask_id: int, machine: Machine, share: float = 1.0) -> dict[str, float]:
    """The losses for the curve over a run, of the first round in parts spread over the text.

    heldout_loss           nats per token, with single tokens masked, as in training: not for other vocabularies
    heldout_nats_per_byte  nats per byte, with whole words masked, of the same words for every vocabulary

    `share`: of CURVE_SEQUENCES and CURVE_WORDS.
    """
    some = slice(None, None, spread(heldout, share))
    owners_MS = heldout.owners[some]
    tokens = TokenPasses(token_rounds(owners_MS) == 0)
    documents = len(heldout.documents)
    nats_D = sum_passes(bert, heldout.sequences[some], owners_MS, tokens, documents, mask_id, machine)
    nats_per_token = nats_D.sum() / tokens.chosen_MS.sum()

    # by words, so that it is the same for every vocabulary
    every = math.ceil(heldout.totals["words"] / max(1.0, share * CURVE_WORDS))
    nats_D, predicted_D = document_losses(bert, heldout, mask_id, machine, rounds=1, every=every)
    nats_per_word = nats_D.sum() / predicted_D.sum()
    words_per_byte = (heldout.lengths > 0).sum() / heldout.read_bytes.sum()
    return {
        "heldout_loss": float(nats_per_token),
        "heldout_nats_per_byte": float(nats_per_word * words_per_byte),
    }


def ratio(nats_D: np.ndarray, sizes_D: np.ndarray) -> dict[str, float | None]:
    """Nats per unit of size, and its standard error by the jackknife over documents; None for a single document."""
    nats = nats_D.sum()
    size = sizes_D.sum()
    error = None
    if (sizes_D < size).all():
        D = len(sizes_D)
        without_D = (nats - nats_D) / (size - sizes_D)
        squares = ((without_D - without_D.mean()) ** 2).sum()
        error = round(math.sqrt((D - 1) / D * squares), 6)
    return {"value": round(float(nats / size), 6), "standard_error": error}


def summary(heldout: Heldout, nats_D: np.ndarray, counts_V: np.ndarray | None = None) -> dict:
    """The result of all rounds: the size of the text, and nats per word, character and byte of it.

    `unread`: the share of the text's bytes that the model can't read, of which none is predicted: they are deleted, or
    [UNK]. Nats per byte are per byte that the model can read; otherwise a model would look better the less it can read.
    Nats per word and character are per all of them, read or not.
    `length_nats_per_byte`: the part of the nats per byte that the number of pieces of the words costs.

    With `counts_V`, how often each entry of the vocabulary is in training text, also `by_frequencies`.
    """
    totals = heldout.totals
    found: dict[str, Any] = {
        "documents": len(heldout.documents),
        **totals,
        "unread": round(totals["unread_bytes"] / max(1, totals["bytes"]), 6),
    }
    for unit in UNITS:
        sizes_D = heldout.documents[:, SIZES.index(f"{unit}s")]
        if unit == "byte":
            sizes_D = heldout.read_bytes
        found[f"nats_per_{unit}"] = ratio(nats_D, sizes_D)
    found["length_nats_per_byte"] = round(float(heldout.length_nats.sum()) / int(heldout.read_bytes.sum()), 6)
    if counts_V is not None:
        found["by_frequencies"] = by_frequencies(heldout, counts_V)
    return found


def by_frequencies(heldout: Heldout, counts_V: np.ndarray, share: float = 1.0) -> dict[str, float]:
    """The nats per token and byte if each token is predicted by its share of the training text, counted in `counts_V`.

    A model reaches them without context. Each entry counts once more, so that none is zero. The nats per token are
    those of the sequences that a curve with this `share` is measured on.
    """
    more_V = counts_V + 1
    nats_V = -np.log(more_V / more_V.sum())
    is_token_MS = heldout.words >= 0
    nats_MS = np.where(is_token_MS, nats_V[heldout.sequences], 0)
    every = 1 if share == 1 else spread(heldout, share)
    some = slice(None, None, every)
    nats_per_token = float(nats_MS[some].sum()) / int(is_token_MS[some].sum())
    nats = float(nats_MS.sum()) + float(heldout.length_nats.sum())
    nats_per_byte = nats / int(heldout.read_bytes.sum())
    return {"nats_per_token": round(nats_per_token, 6), "nats_per_byte": round(nats_per_byte, 6)}
