"""The held-out loss: every word once, the same for every vocabulary, and its standard error."""

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import entropy
from tokenizers.models import WordPiece
from torch import Tensor, nn
from toys import LENGTH, VOCABULARY, encoder, machine_of

from model import heldout
from model.heldout import Heldout, curve_losses, document_losses, ratio, token_rounds
from model.settings import Training
from tasks.text.tokenizer import SPECIALS, heldout_of, tokenizer_of

PAD = 0
UNK = 1
SEP = 3
MASK = 4
HERE = machine_of()


def packed(lengths: list[int]) -> Heldout:
    """Documents of these many tokens, [UNK] among them, in words of one to four pieces."""
    rng = np.random.default_rng(len(lengths))
    streams = [np.zeros((2, 0), int)]
    sizes = []
    before = 0
    for size in lengths:
        words = np.repeat(np.arange(size), rng.integers(1, 5, size))[:size]
        count = words[-1] + 1 if size else 0
        tokens = rng.choice([UNK, *range(5, VOCABULARY)], size)
        streams.append(np.stack([np.append(tokens, SEP), np.append(words + before, -1)]))
        sizes.append([size, count, 4 * size, 5 * size, 0])
        before += count
    stream = np.concatenate(streams, axis=1)
    padding = -stream.shape[1] % LENGTH
    rows, words = (np.pad(one, (0, padding), constant_values=pad) for one, pad in zip(stream, (PAD, -1), strict=True))
    return Heldout(rows.reshape(-1, LENGTH).astype(np.uint16), words.reshape(-1, LENGTH), np.array(sizes))


class Unigram(nn.Module):
    """Its loss is known exactly: each token costs the same in every place. Keeps what it is asked."""

    def __init__(self, nats: np.ndarray) -> None:
        super().__init__()
        self.nats = torch.from_numpy(nats)
        self.asked: list[tuple[Tensor, Tensor, Tensor]] = []

    def losses(self, tokens: Tensor, places: Tensor, labels: Tensor, padded: bool) -> Tensor:
        self.asked.append((tokens, places, labels))
        return self.nats[labels]


@pytest.fixture
def by_id() -> Unigram:
    """Every token costs its id in nats."""
    return Unigram(np.arange(VOCABULARY, dtype=np.float32))


def runs_of(held: Heldout) -> list[tuple[int, int, int, int]]:
    """The words, one loop after the other: sequence, first place, place after the last, number."""
    runs = []
    for row, words in enumerate(held.words.tolist()):
        for place, word in enumerate(words):
            if word >= 0 and (place == 0 or words[place - 1] != word):
                runs.append((row, place, place, word))
            if word >= 0:
                runs[-1] = (row, runs[-1][1], place + 1, word)
    return runs


def of_lengths(runs: list[tuple[int, int, int, int]]) -> dict[int, float]:
    """The nats of each number of pieces, by how often words have it."""
    counts = Counter(end - begin for _, begin, end, _ in runs)
    return {length: -math.log(count / len(runs)) for length, count in counts.items()}


def test_of_seven_words_in_a_row_each_has_another_round_whatever_their_pieces():
    held = packed([1000] * 20)
    rounds = dict(zip(held.words.ravel().tolist(), held.rounds().ravel().tolist(), strict=True))
    assert rounds.pop(-1) == -1
    groups = [tuple(rounds[word] for word in range(first, first + 7)) for first in range(0, len(rounds) // 7 * 7, 7)]
    assert all(sorted(group) == list(range(heldout.ROUNDS)) for group in groups)
    assert len(set(groups)) > len(groups) / 2
    whole = Heldout.of_rows(np.zeros((len(rounds) // LENGTH, LENGTH + 1), np.uint16))  # a piece each
    other = whole.rounds()[whole.words >= 0]
    assert other.tolist() == [rounds[word] for word in range(len(other))]


def test_the_rounds_of_single_tokens_share_each_sequence_by_its_number_alone():
    owners = packed([1000] * 20).owners
    whole = token_rounds(owners)
    assert np.array_equal(token_rounds(owners[:77]), whole[:77])
    counts = np.stack([(whole == number).sum(axis=1) for number in range(heldout.ROUNDS)])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    assert len({row.tobytes() for row in whole}) == len(whole)
    assert ((whole < 0) == (owners < 0)).all()


@pytest.mark.parametrize("lengths", [[1], [3, 0, 40], [16], [100, 30, 300, 13]])
def test_the_loss_of_each_word_is_the_models_with_its_pieces_revealed_from_left_to_right_and_that_of_their_number(
    lengths,
):
    held = packed(lengths)
    model = encoder()
    model.set_dropout(0.5)
    nats, predicted = document_losses(model.train(), held, MASK, HERE)
    assert model.training, "it is left as it was"
    expected = np.zeros(len(lengths))
    rounds = held.rounds()
    runs = runs_of(held)
    model.eval()
    for row, begin, end, _ in runs:
        expected[held.owners[row, begin]] += of_lengths(runs)[end - begin]
        for place in range(begin, end):
            tokens = torch.from_numpy(held.sequences[row].astype(np.int64))
            hidden = torch.from_numpy((rounds[row] == rounds[row, begin]) & (held.pieces[row] >= place - begin))
            kept = tokens != PAD
            with torch.no_grad():
                scores = model.logits(model.encode(tokens.masked_fill(hidden, MASK)[None, kept]))[0, place]
            expected[held.owners[row, begin]] += F.cross_entropy(scores, tokens[place]).item()
    np.testing.assert_allclose(nats, expected, rtol=1e-5)
    owners = [held.owners[row, begin] for row, begin, *_ in runs]
    assert predicted.tolist() == np.bincount(owners, minlength=len(lengths)).tolist()


def test_an_unknown_token_is_always_in_sight_never_predicted_and_in_no_count(by_id):
    raw = packed([200, 3, 40])
    held = raw.without(UNK)
    curve = curve_losses(by_id, held, MASK, HERE)
    nats_D, predicted_D = document_losses(by_id, held, MASK, HERE)
    places = {row.tobytes() for row in raw.sequences == UNK}
    assert any(np.frombuffer(row, bool).any() for row in places)
    for tokens, _, labels in by_id.asked:
        assert not (labels == UNK).any()
        assert {row.tobytes() for row in (tokens == UNK).numpy()} <= places
    assert curve["heldout_loss"] > (5 + VOCABULARY) / 3, "the mean of the other ids is larger"
    assert nats_D.sum() == pytest.approx(held.sequences[held.words >= 0].sum() + held.length_nats.sum())
    assert predicted_D.sum() == (held.lengths > 0).sum() == len(runs_of(held))


def test_what_stands_for_padding_changes_nothing():
    held = packed([100, 30, 5])
    model = encoder(positions="rotary", funnel=1, layers=3, tied=False)
    before, _ = document_losses(model, held, MASK, HERE)
    model.embedding.word.weight.data[PAD].normal_()  # not a constant, which the norm would take away
    np.testing.assert_allclose(document_losses(model, held, MASK, HERE)[0], before, rtol=1e-5)


def test_a_model_that_knows_the_text_is_between_the_bounds_whatever_its_pieces():
    held = packed([200, 60])
    found, whole = (
        heldout.summary(one, document_losses(Unigram(np.zeros(VOCABULARY)), one, MASK, HERE)[0])
        for one in (held, Heldout.of_rows(held.sequences))
    )
    assert found["nats_per_byte"]["value"] == found["length_nats_per_byte"] > 0
    assert whole["length_nats_per_byte"] == 0


def test_the_losses_over_a_run_are_those_of_sequences_spread_over_the_text(monkeypatch, by_id):
    held = packed([130] * 20)
    assert len(held.sequences) == 164
    monkeypatch.setattr(heldout, "CURVE_SEQUENCES", 60)
    losses = curve_losses(by_id, held, MASK, HERE)
    (tokens, places, labels), *_ = by_id.asked
    rows = torch.from_numpy(held.sequences[::3].astype(np.int64))
    assert torch.equal(rows.flatten()[places], labels)
    assert torch.equal((tokens != rows).flatten().nonzero()[:, 0], places)
    assert losses["heldout_loss"] == pytest.approx(labels.float().mean().item())
    assert 2 * len(rows) <= len(labels) <= 3 * len(rows)
    nats, _ = document_losses(by_id, held, MASK, HERE)
    assert losses["heldout_nats_per_byte"] == pytest.approx(nats.sum() / held.totals["bytes"], rel=0.1), "a sample"
    monkeypatch.setattr(heldout, "ROUNDS", 1)  # all words
    whole = curve_losses(by_id, held, MASK, HERE)["heldout_nats_per_byte"]
    assert whole == pytest.approx(nats.sum() / held.totals["bytes"])


def test_a_part_of_the_text_has_the_same_words_for_every_vocabulary_predicted_as_in_all_of_it(monkeypatch):
    monkeypatch.setattr(heldout, "BLOCK", 10)
    held = packed([40] * 6)
    asked = {}
    for every in (1, 3):
        model = Unigram(np.zeros(VOCABULARY))
        _, predicted = document_losses(model, held, MASK, HERE, every=every)
        asked[every] = {
            (tuple(tokens[place // LENGTH].tolist()), place % LENGTH, label)
            for tokens, places, labels in model.asked
            for place, label in zip(places.tolist(), labels.tolist(), strict=True)
        }
    assert asked[3] < asked[1]
    assert predicted.sum() == sum(word // 10 % 3 == 0 for *_, word in runs_of(held))


class KnowsWords(nn.Module):
    """What a perfect model knows where words follow each other without any context, and each is between separators.

    It has the frequency of every word, as the ids of its pieces. It sees how many pieces a word has, and those that are
    not masked.
    """

    def __init__(self, frequencies: Counter) -> None:
        super().__init__()
        self.frequencies = frequencies

    def losses(self, tokens: Tensor, places: Tensor, labels: Tensor, padded: bool) -> Tensor:
        rows = tokens.tolist()
        found = []
        for through, label in zip(places.tolist(), labels.tolist(), strict=True):
            row = rows[through // tokens.shape[1]]
            place = through % tokens.shape[1]
            begin = max((i for i in range(place) if row[i] == SEP), default=-1) + 1
            seen = row[begin : row.index(SEP, place)]
            fits = [
                (word, count)
                for word, count in self.frequencies.items()
                if len(word) == len(seen) and all(a in (MASK, b) for a, b in zip(seen, word, strict=True))
            ]
            right = sum(count for word, count in fits if word[place - begin] == label)
            found.append(-math.log(right / sum(count for _, count in fits)))
        return torch.tensor(found)


def test_two_vocabularies_of_an_exactly_known_model_read_the_same():
    """A unigram model over words. The loss of single tokens, the other pieces in sight, favours the one that splits."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcd", k=rng.randint(1, 7))) for _ in range(40)]
    texts = rng.choices(words, weights=[1 / (rank + 1) for rank in range(40)], k=250)
    letters = [*"abcd", *(f"##{letter}" for letter in "abcd")]
    found = {}
    of_tokens = {}
    for name, entries in {"whole": sorted(set(words) - set("abcd")), "split": ["ab", "##cd", "##ba", "##ad"]}.items():
        vocabulary = {entry: number for number, entry in enumerate([*SPECIALS, *letters, *entries])}
        tokenizer = tokenizer_of(WordPiece(vocabulary, unk_token="[UNK]"))
        held = heldout_of(texts, tokenizer, length=1 << 12)
        model = KnowsWords(Counter(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts))
        found[name] = heldout.summary(held, document_losses(model, held, MASK, HERE)[0])
        of_tokens[name] = (
            curve_losses(model, held, MASK, HERE)["heldout_loss"] * held.totals["tokens"] / held.totals["bytes"]
        )
    assert found["split"]["tokens"] > 1.5 * found["whole"]["tokens"] == 1.5 * len(texts)
    exact = entropy(list(Counter(texts).values()))
    for one in found.values():
        assert one["nats_per_word"]["value"] == pytest.approx(exact, abs=1e-5)
        assert one["nats_per_byte"]["value"] == pytest.approx(exact * len(texts) / sum(map(len, texts)), abs=1e-5)
    assert of_tokens["split"] < 0.8 * of_tokens["whole"]


def test_the_standard_error_is_the_jackknifes_over_documents():
    rng = np.random.default_rng(3)
    sizes = rng.lognormal(5, 1.5, 50).round()
    nats = sizes * rng.normal(1, 0.2, 50)
    without = [sum(np.delete(nats, i)) / sum(np.delete(sizes, i)) for i in range(50)]
    error = math.sqrt(49 / 50 * sum((value - sum(without) / 50) ** 2 for value in without))
    expected = {"value": nats.sum() / sizes.sum(), "standard_error": error}
    assert ratio(nats, sizes) == pytest.approx(expected, abs=1e-6)
    assert ratio(np.array([3.0]), np.array([2])) == {"value": 1.5, "standard_error": None}
    assert ratio(np.array([3.0, 0.0]), np.array([2, 0]))["standard_error"] is None


def test_the_loss_by_frequencies_is_that_of_a_unigram_model_of_the_training_text():
    """Its loss by the same rounds; with counts of the text itself about its entropy, by scipy."""
    held = packed([3, 0, 400, 90]).without(UNK)
    counts = np.random.default_rng(0).integers(0, 50, VOCABULARY)
    measured_D = document_losses(Unigram(-np.log((counts + 1) / (counts + 1).sum())), held, MASK, HERE)[0]
    found = heldout.summary(held, measured_D, counts)
    assert found["by_frequencies"]["nats_per_byte"] == pytest.approx(found["nats_per_byte"]["value"], abs=1e-6)
    own = np.bincount(held.sequences[held.words >= 0], minlength=VOCABULARY)
    by_own = heldout.summary(held, measured_D, 10**6 * own)["by_frequencies"]
    assert by_own["nats_per_token"] == pytest.approx(entropy(own), abs=1e-3)
    assert "by_frequencies" not in heldout.summary(held, measured_D)


def test_the_loss_per_byte_is_that_of_the_bytes_that_the_model_reads():
    held = packed([30, 50, 400, 90])
    nats_D = np.arange(1.0, 5.0)
    whole = heldout.summary(held, nats_D, np.ones(VOCABULARY))
    documents = held.documents.copy()
    documents[:, 3] += 1000  # other bytes, none of which it reads
    documents[:, 4] += 1000
    found = heldout.summary(Heldout(held.sequences, held.words, documents), nats_D, np.ones(VOCABULARY))
    for name in ("nats_per_byte", "length_nats_per_byte", "by_frequencies"):
        assert found[name] == whole[name], name
    assert found["unread"] > 0.5 > whole["unread"]


def of_budget(budget: float, unit: str = "hours", **changes) -> Training:
    return Training(budget=budget, budget_unit=unit, **changes)


@pytest.mark.parametrize(
    ("training", "characters"),
    [
        (of_budget(1 / 60), 10_000),
        (of_budget(1 / 3), 80_000),
        (of_budget(0.5), math.inf),
        (of_budget(1, "tokens"), 10_000),
        (of_budget(180_000 * 2.1e7, "flops"), 12_000),
        (of_budget(15e6, "tokens"), 1_000_000),
    ],
)
def test_how_much_is_measured_follows_from_the_budget_alone(training: Training, characters: float, monkeypatch):
    monkeypatch.setattr(heldout, "LEAST_CHARACTERS", 10_000)
    for changes in ({}, {"batch_size": 3, "learning_rate": 0.5, "seed": 9}):
        assert heldout.most_characters(training.model_copy(update=changes)) == pytest.approx(characters)


def test_measuring_a_short_run_takes_a_tenth_of_its_budget_on_the_slow_machine_and_so_do_all_losses_over_it(
    monkeypatch, by_id
):
    """Passes are counted, of a text whose words have about as many pieces as with 8,192 entries, of 4.1 characters."""
    pieces = np.random.default_rng(1).choice([1, 2, 3, 4], 18_000, p=[0.93, 0.04, 0.02, 0.01])
    words = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
    words = np.pad(words, (0, -len(words) % 128), constant_values=-1).reshape(-1, 128)
    held = Heldout((words % 25 + 9).astype(np.uint16), words, np.array([[len(pieces), len(pieces), 82_000, 82_000, 0]]))
    monkeypatch.setattr(heldout, "LEAST_OF_CURVE", 1 / 25)
    monkeypatch.setattr(heldout, "LEAST_CHARACTERS", 10_000)
    training = of_budget(1 / 3)
    trained = 3 * heldout.tokens_of(training)
    document_losses(by_id, held, MASK, HERE)
    passes = sum(tokens.numel() for tokens, *_ in by_id.asked)
    assert passes * heldout.most_characters(training) / 82_000 < 0.12 * trained
    by_id.asked.clear()
    curve_losses(by_id, held, MASK, HERE, heldout.share_of_curve(training))
    assert 11 * sum(tokens.numel() for tokens, *_ in by_id.asked) < 0.12 * trained


@pytest.mark.parametrize("sizes", [[400] * 100, [30_000, 20, 9000], [700] * 30 + [5], [1], []])
def test_what_a_shorter_run_measures_is_a_part_of_what_a_longer_one_does(sizes: list[int]):
    rng = random.Random(0)
    before = []
    texts = [" ".join("x" * rng.randint(1, 9) for _ in range(size))[:size] for size in sizes]
    for characters in (1, 500, 3000, 10_000, 12_000, 100_000, math.inf):
        read = heldout.beginnings(texts, characters)
        assert sum(map(len, read)) <= max(characters, heldout.BEGINNING)
        assert all(text.startswith(begin) for text, begin in zip(texts, read, strict=False))
        assert len(before) <= len(read)
        assert all(now.startswith(was) for was, now in zip(before, read, strict=False))
        before = read
    assert before == texts


def test_a_short_run_measures_many_documents_up_to_the_end_of_a_word():
    texts = ["harbour " * 5000, *(["lamp rain\n" * 300] * 40)]
    read = heldout.beginnings(texts, 10_000)
    assert len(read) == 20
    assert all(0.9 * heldout.BEGINNING < len(text) <= heldout.BEGINNING for text in read)
    assert {text.split()[-1] for text in read} == {"harbour", "rain"}
    assert [len(text) for text in heldout.beginnings(["ж" * 9000] * 3, 2100)] == [700] * 3


def test_a_smaller_share_of_the_curve_measures_fewer_sequences_and_words_and_the_frequencies_of_the_same_ones(by_id):
    held = packed([13_000] * 4)
    counts = np.ones(VOCABULARY)
    curve_losses(by_id, held, MASK, HERE, share=0.1)
    few = sum(len(labels) for *_, labels in by_id.asked)
    rows = held.sequences[:: heldout.spread(held, 0.1)]
    assert len(rows) == math.ceil(0.1 * heldout.CURVE_SEQUENCES)
    by_id.asked.clear()
    curve_losses(by_id, held, MASK, HERE)
    assert few < 0.3 * sum(len(labels) for *_, labels in by_id.asked)
    counts[rows[0, 0]] = 1e6
    nats = -np.log((counts + 1) / (counts + 1).sum())
    valid = held.words[:: heldout.spread(held, 0.1)] >= 0
    found = heldout.by_frequencies(held, counts, 0.1)
    assert found["nats_per_token"] == pytest.approx(nats[rows[valid]].mean(), abs=1e-6)
    assert found["nats_per_byte"] == heldout.by_frequencies(held, counts)["nats_per_byte"]
