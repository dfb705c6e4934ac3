"""The held-out loss: every token once, the same text for every vocabulary, and its standard error."""

import math
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from conftest import corpus_of, document
from scipy.stats import entropy
from tokenizers import Tokenizer
from torch import Tensor, nn

from model import bert, heldout
from model.heldout import Heldout, measure, ratio, rounds_of
from model.machine import Machine
from model.settings import Architecture
from tasks.download import Download, download
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, train_vocabulary

PAD, UNK, SEP, MASK = 0, 1, 3, 4
CPU = Machine(torch.device("cpu"), torch.float32, False, 8)
SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, LENGTH = 40, 16


def packed(lengths: list[int]) -> Heldout:
    """Documents of these many tokens, [UNK] among them."""
    rng = np.random.default_rng(len(lengths))
    documents = [rng.choice([UNK, *range(5, VOCABULARY)], size) for size in lengths]
    stream = np.concatenate([np.append(tokens, SEP) for tokens in documents])
    rows = np.pad(stream, (0, -len(stream) % LENGTH)).reshape(-1, LENGTH).astype(np.uint16)
    return Heldout(rows, np.array([[size, 4 * size, 5 * size] for size in lengths]))


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


@pytest.mark.parametrize("lengths", [[1], [3, 0, 40], [15], [16], [7] * 300, [2000, 1]])
def test_every_token_but_separators_is_predicted_once(lengths, by_id):
    held = packed(lengths)
    nats, predicted = measure(by_id, held, MASK, CPU)
    assert predicted.tolist() == lengths
    stream = held.sequences.ravel().astype(np.int64)
    ends = np.cumsum(held.documents[:, 0] + 1)
    assert nats.tolist() == [part[:-1].sum() for part in np.split(stream[: ends[-1]], ends[:-1])]
    seen, start = np.zeros(stream.size, dtype=int), 0
    for number, (tokens, places, labels) in enumerate(by_id.asked, start=1):
        assert np.array_equal(stream[start + places.numpy()], labels)
        assert torch.equal((tokens.flatten() == MASK).nonzero()[:, 0], places)
        seen[start + places.numpy()] += 1
        if number % heldout.ROUNDS == 0:
            start += tokens.numel()
    assert seen.tolist() == [int(token not in (PAD, SEP)) for token in stream]


def test_the_rounds_mask_a_seventh_of_each_sequence_by_its_number_alone():
    owners = packed([1000] * 20).owners()
    whole = rounds_of(owners, 0)
    parts = [rounds_of(owners[start:stop], start) for start, stop in ((0, 1), (1, 77), (77, len(owners)))]
    assert np.array_equal(np.concatenate(parts), whole)
    counts = np.stack([(whole == number).sum(axis=1) for number in range(heldout.ROUNDS)])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    assert len({row.tobytes() for row in whole}) == len(whole)
    assert ((whole < 0) == (owners < 0)).all()


def test_the_loss_is_the_models_cross_entropy_and_leaves_it_as_it_was():
    held, model = packed([100, 30, 900, 13]), bert.Bert(SMALL, VOCABULARY, LENGTH, seed=1)
    model.set_dropout(0.5)
    nats, _ = measure(model.train(), held, MASK, CPU)
    assert model.training
    rows, owners = torch.from_numpy(held.sequences.astype(np.int64)), held.owners()
    expected, rounds = np.zeros(4), rounds_of(owners, 0)
    model.eval()
    for number in range(heldout.ROUNDS):
        for row, assigned, owner in zip(rows, rounds, owners, strict=True):
            chosen = torch.from_numpy(assigned == number)
            kept = row != PAD
            with torch.no_grad():
                scores = model.logits(model.encode(row.masked_fill(chosen, MASK)[None, kept]))[0]
            losses = F.cross_entropy(scores, row[kept], reduction="none")[chosen[kept]]
            np.add.at(expected, owner[chosen.numpy()], losses.double().numpy())
    np.testing.assert_allclose(nats, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"positions": "rotary", "funnel": 1, "layers": 3}, {"positions": "learned", "norm_order": "post"}]
)
def test_what_stands_for_padding_changes_nothing(change):
    held, model = packed([100, 30, 5]), bert.Bert(SMALL.model_copy(update=change), VOCABULARY, LENGTH, seed=1)
    before, _ = measure(model, held, MASK, CPU)
    model.embedding.word.weight.data[PAD] += 100  # which is not the decoder's row
    np.testing.assert_allclose(measure(model, held, MASK, CPU)[0], before, rtol=1e-5)


def test_the_loss_over_a_run_is_that_of_sequences_spread_over_the_text(monkeypatch, by_id):
    held = packed([130] * 20)
    assert len(held.sequences) == 164
    monkeypatch.setattr(heldout, "CURVE_SEQUENCES", 60)
    loss = heldout.heldout_loss(by_id, held, MASK, CPU)
    ((tokens, places, labels),) = by_id.asked
    rows = torch.from_numpy(held.sequences[::3].astype(np.int64))
    assert torch.equal(rows.flatten()[places], labels)
    assert torch.equal((tokens != rows).flatten().nonzero()[:, 0], places)
    assert loss == pytest.approx(labels.float().mean().item())
    assert 2 * len(rows) <= len(labels) <= 3 * len(rows)


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


def test_sequences_that_do_not_hold_the_documents_are_refused():
    held = packed([10, 20])
    for documents in (held.documents[:1], held.documents[[0, 1, 1]]):
        with pytest.raises(ValueError, match="sequences"):
            Heldout(held.sequences, documents)


@pytest.mark.parametrize(
    ("text", "entries", "fraction"), [("toy", 256, 0.45), ("toy", 400, 0.45), ("real", 4096, 0.1), ("real", 16384, 0.1)]
)
def test_no_vocabulary_is_measured_with_a_bias(store: Path, tmp_path: Path, request, text, entries, fraction):
    """Against the losses of a unigram model on whole documents."""
    if text == "toy":
        rng = random.Random(5)
        prose = [document(rng, 40) for _ in range(150)]
        letters = [" ".join(rng.choices("aeioubcdfg", k=1500)) for _ in range(30)]  # fewer characters a token
        corpus = corpus_of(tmp_path, [*prose, *letters], part_megabytes=1024)
    else:
        shard = request.getfixturevalue("real_data") / "pile-like" / "train-00000.jsonl.zst"
        corpus = download.fn(Download(source="files", files=[str(shard)], documents=0, megabytes=5))
    words = train_vocabulary.fn(Vocabulary(entries=entries), corpus)
    tokens = tokenize.fn(Tokenize(length=16, heldout_fraction=fraction, sort="none"), corpus, words)
    counts = np.bincount(np.load(tokens.path / "sequences.npy").ravel(), minlength=tokens.stats["entries"]) + 1
    nats = -np.log(counts / counts.sum())
    given = Heldout(np.load(tokens.path / "heldout.npy"), np.load(tokens.path / "heldout_documents.npy"))
    found = heldout.summary(given, measure(Unigram(nats), given, MASK, CPU)[0])
    tokenizer = Tokenizer.from_file(str(tokens.path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    rows = pq.read_table(tokens.path / "heldout.parquet").to_pylist()
    texts = [row["text"] for row in rows if row["measured"] is not None]
    ids = [tokenizer.encode(one, add_special_tokens=False).ids for one in texts]
    total = sum(nats[some].sum() for some in ids)
    sizes = {"token": map(len, ids), "character": map(len, texts), "byte": (len(one.encode()) for one in texts)}
    for unit, size in sizes.items():
        assert found[f"nats_per_{unit}"]["value"] == pytest.approx(total / sum(size), abs=1e-6)


def test_the_loss_by_frequencies_is_that_of_a_unigram_model_of_the_training_text():
    """Its loss by the same rounds; with counts of the text itself about its entropy, by scipy."""
    held = packed([3, 0, 400, 90])
    counts = np.random.default_rng(0).integers(0, 50, VOCABULARY)
    measured_D = measure(Unigram(-np.log((counts + 1) / (counts + 1).sum())), held, MASK, CPU)[0]
    found = heldout.summary(held, measured_D, counts)
    for unit, loss in found["by_frequencies"].items():
        assert loss == pytest.approx(found[unit]["value"], abs=1e-6)
    own = np.bincount(held.sequences[held.owners() >= 0], minlength=VOCABULARY)
    by_own = heldout.summary(held, measured_D, 10**6 * own)["by_frequencies"]
    assert by_own["nats_per_token"] == pytest.approx(entropy(own), abs=1e-3)
    assert "by_frequencies" not in heldout.summary(held, measured_D)
