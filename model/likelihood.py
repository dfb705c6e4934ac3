"""Pseudo-log-likelihoods: how likely a sentence is to a masked language model, without finetuning.

A sentence's score is the sum of the log-probabilities of its tokens. Each is predicted in a forward pass of its own, in
one of two ways:

original     only the token is [MASK] (Salazar et al. 2020, arXiv 1910.14659). This is the rule of BabyLM's scores.
within word  the later pieces of its word are [MASK] too (Kauf and Ivanova 2023, arXiv 2305.10588). Without this, the
             other pieces give a piece away, so that words of several pieces seem likely.

The last piece of a word is predicted in the same way by both, so one pass serves both. All is computed in fp32,
without TF32, so that scores don't depend on the machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from model.bert import Bert
from model.machine import Machine, exact_products, keep_heap

METRICS = ("original", "within_word")
FRAME = 2  # tokens around each sentence
# Computed at once: on two cores more are no faster, and on a GPU small batches only wait for their kernels' launches.
BATCH_TOKENS = {"cpu": 2048, "cuda": 16_384}


@dataclass(frozen=True)
class Sentences:
    """Sentences as tokens, without special tokens, one sentence after the other.

    tokens  (T,) ids
    words   (T,) the number of the word that each token is a piece of, different in successive words
    ends    (n,) where each sentence ends in `tokens`
    """

    tokens: np.ndarray
    words: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,): the tokens of each."""
        return np.diff(self.ends, prepend=0)

    @cached_property
    def starts(self) -> np.ndarray:
        """(n,): where each begins in `tokens`."""
        return self.ends - self.lengths

    @cached_property
    def owners(self) -> np.ndarray:
        """(T,): the number of the sentence of each token."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @cached_property
    def word_ends(self) -> np.ndarray:
        """(T,): the place after the last piece of each token's word."""
        tokens = len(self.tokens)
        is_new = np.ones(tokens + 1, dtype=bool)
        is_new[1:-1] = (np.diff(self.words) != 0) | (np.diff(self.owners) != 0)
        begins = np.flatnonzero(is_new)
        following = np.searchsorted(begins, np.arange(tokens), side="right")
        return begins[following]

    @cached_property
    def originals(self) -> np.ndarray:
        """(n,): the number of the first sentence that has the same tokens as each."""
        known: dict[bytes, int] = {}
        found = []
        for number, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            content = self.tokens[start:end].tobytes()
            found.append(known.setdefault(content, number))
        return np.array(found, dtype=np.int64)

    @cached_property
    def passes(self) -> "Passes":
        """A pass for each token by itself, then one for each piece that has later ones in its word, which it hides."""
        every = np.arange(len(self.tokens))
        is_split = self.word_ends > every + 1
        places = np.concatenate([every, every[is_split]])
        stops = np.concatenate([every + 1, self.word_ends[is_split]])
        return Passes(places, stops)

    @cached_property
    def pass_lengths(self) -> np.ndarray:
        """(P,): the tokens of each pass's sentence, without special tokens."""
        return self.lengths[self.owners[self.passes.places]]


class Passes(NamedTuple):
    """Forward passes (P,): each predicts a token while it and those up to `stops` are [MASK]."""

    places: np.ndarray  # of the predicted token in `Sentences.tokens`
    stops: np.ndarray  # the place after the last [MASK]


def batches(lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """The numbers of the passes in each batch. All inputs of a batch have the same length, so nothing is padded.

    lengths: (P,) of each pass's sentence; tokens: in a batch, at most, unless one pass has more.
    """
    order = np.argsort(lengths, kind="stable")
    edges = np.flatnonzero(np.diff(lengths[order])) + 1
    for same in np.split(order, edges):
        size = max(1, tokens // (lengths[same[0]] + FRAME))
        for first in range(0, len(same), size):
            yield same[first : first + size]


class Scorer:
    """Forward passes of a model on sentences between two special tokens: `before` and [SEP]."""

    def __init__(self, bert: Bert, sentences: Sentences, before: int, machine: Machine) -> None:
        self.bert = bert
        self.sentences = sentences
        self.before = before
        self.machine = machine

    def inputs(self, places_B: np.ndarray, stops_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(B, S) ids of sentences of one length, masked from each place to its stop; and (B,) the places in these."""
        sentences = self.sentences
        rows_B = sentences.owners[places_B]
        starts_B = sentences.starts[rows_B]
        size = sentences.lengths[rows_B[0]]
        all_BS = starts_B[:, None] + np.arange(size)
        is_masked_BS = (all_BS >= places_B[:, None]) & (all_BS < stops_B[:, None])
        masked_BS = np.where(is_masked_BS, self.bert.specials.mask, sentences.tokens[all_BS])
        framed_BS = np.pad(masked_BS, ((0, 0), (1, 1)), constant_values=(self.before, self.bert.specials.sep))
        return framed_BS, places_B - starts_B + 1

    def log_probabilities(self, places_B: np.ndarray, stops_B: np.ndarray) -> np.ndarray:
        """(B,) of the tokens at these places, in fp32."""
        inputs_BS, within_B = self.inputs(places_B, stops_B)
        tokens_BS = torch.from_numpy(inputs_BS.astype(np.int64)).to(self.machine.device)
        positions_BK = torch.from_numpy(within_B[:, None]).to(self.machine.device)
        labels_B = torch.from_numpy(self.sentences.tokens[places_B].astype(np.int64)).to(self.machine.device)
        states_BKD = self.bert.encode(tokens_BS, positions_BK=positions_BK)
        scores_BV = self.bert.logits(states_BKD[:, 0])
        return -F.cross_entropy(scores_BV.float(), labels_B, reduction="none").cpu().numpy()


def score_sentences(
    bert: Bert,
    sentences: Sentences,
    before: int,
    machine: Machine,
    report: Callable[[int], None],
    scores: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """The pseudo-log-likelihood of each sentence, nats, by METRICS: (n,) each.

    before: the id of the special token in front of a sentence.
    report: gets the number of tokens that each batch had; the sum of `pass_lengths` is that of all.
    scores: (P,) fp32, those of an earlier attempt, NaN for passes that it didn't come to; it is filled in.
    """
    passes = sentences.passes
    if scores is None:
        scores = np.full(len(passes.places), np.nan, dtype=np.float32)
    scorer = Scorer(bert, sentences, before, machine)
    lengths = sentences.pass_lengths
    bert.to(machine.device).eval()
    if machine.device.type == "cpu":
        keep_heap()  # without it, a third of the time is spent on getting memory
    with torch.inference_mode(), exact_products():
        for some in batches(lengths, BATCH_TOKENS[machine.device.type]):
            if np.isnan(scores[some]).any():
                scores[some] = scorer.log_probabilities(passes.places[some], passes.stops[some])
            report(int(lengths[some].sum()))
    return sums(sentences, scores)


def sums(sentences: Sentences, scores: np.ndarray) -> dict[str, np.ndarray]:
    """The sum of each sentence's scores by METRICS. scores: (P,) of the passes.

    Sentences of the same tokens have the same sum: in different batches, theirs may differ in the last digits.
    """
    tokens = len(sentences.tokens)
    alone = scores[:tokens]
    in_words = alone.copy()
    in_words[sentences.passes.places[tokens:]] = scores[tokens:]
    found = {}
    for name, of_tokens in zip(METRICS, (alone, in_words), strict=True):
        of_sentences = np.bincount(sentences.owners, of_tokens, minlength=len(sentences))
        found[name] = of_sentences[sentences.originals]
    return found
