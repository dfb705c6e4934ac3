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
from tokenizers import Tokenizer
from torch import Tensor, nn

from model import bert, export, heldout
from model.heldout import Heldout, measure, ratio, rounds_of
from model.machine import Machine
from model.settings import Architecture
from tasks.download import Download, download
from tasks.store import Artifact
from tasks.tokenize import Tokenize, tokenize
from tasks.vocabulary import Vocabulary, train_vocabulary

PAD, UNK, SEP, MASK = 0, 1, 3, 4
CPU = Machine(torch.device("cpu"), torch.float32, False, 8)
SMALL = Architecture(layers=1, hidden=16, heads=2, intermediate=48)
VOCABULARY, LENGTH = 40, 16


def packed(lengths: list[int], length: int = LENGTH) -> Heldout:
    """Documents of these many tokens, [UNK] among them."""
    rng = np.random.default_rng(len(lengths))
    documents = [rng.choice([UNK, *range(5, VOCABULARY)], size) for size in lengths]
    stream = np.concatenate([np.append(tokens, SEP) for tokens in documents])
    rows = np.pad(stream, (0, -len(stream) % length)).reshape(-1, length).astype(np.uint16)
    return Heldout(rows, np.array([[size, 4 * size, 5 * size] for size in lengths]))


class Recorder(nn.Module):
    """No model: keeps what it is asked, and says that every token costs its id in nats."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Tensor, Tensor, Tensor, bool]] = []

    def losses(self, tokens: Tensor, places: Tensor, labels: Tensor, padded: bool) -> Tensor:
        self.asked.append((tokens, places, labels, padded))
        return labels.float()


@pytest.mark.parametrize("lengths", [[1], [3, 0, 40], [15], [16], [7] * 300, [2000, 1]])
def test_every_token_but_separators_is_predicted_once(lengths):
    held, asked = packed(lengths), Recorder()
    nats, predicted = measure(asked, held, MASK, CPU)
    assert predicted.tolist() == lengths
    stream = held.sequences.ravel()[: sum(lengths) + len(lengths)].astype(np.int64)
    ends = np.cumsum(held.documents[:, 0] + 1)
    assert nats.tolist() == [part[:-1].sum() for part in np.split(stream, ends[:-1])]
    seen, start = np.zeros(held.sequences.size, dtype=int), 0
    for number in range(0, len(asked.asked), heldout.ROUNDS):
        for tokens, places, labels, _ in asked.asked[number : number + heldout.ROUNDS]:
            original = torch.from_numpy(held.sequences.ravel()[start : start + tokens.numel()].astype(np.int64))
            assert torch.equal(original[places], labels)
            assert torch.equal(tokens.flatten() == MASK, torch.zeros(tokens.numel()).index_fill(0, places, 1) == 1)
            seen[start + places.numpy()] += 1
        start += tokens.numel()
    assert seen.tolist() == [int(token not in (PAD, SEP)) for token in held.sequences.ravel()]


def test_the_rounds_mask_a_seventh_of_each_sequence_by_its_number_alone():
    owners = packed([1000] * 20).owners()
    whole = rounds_of(owners, 0)
    parts = [rounds_of(owners[start:stop], start) for start, stop in ((0, 1), (1, 77), (77, len(owners)))]
    assert np.array_equal(np.concatenate(parts), whole)
    counts = np.stack([(whole == number).sum(axis=1) for number in range(heldout.ROUNDS)])
    assert (counts.max(axis=0) - counts.min(axis=0) <= 1).all()
    assert len({row.tobytes() for row in whole}) == len(whole)
    assert ((whole < 0) == (owners < 0)).all()


def test_the_loss_is_the_models_cross_entropy_and_leaves_it_as_it_was(tmp_path):
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
    export.save(model, tmp_path)
    again, _ = measure(export.load(tmp_path), held, MASK, CPU)
    np.testing.assert_allclose(again, nats, rtol=1e-7)


@pytest.mark.parametrize(
    "change", [{"positions": "rotary", "funnel": 1, "layers": 3}, {"positions": "learned", "norm_order": "post"}]
)
def test_what_stands_for_padding_changes_nothing(change):
    held, model = packed([100, 30, 5]), bert.Bert(SMALL.model_copy(update=change), VOCABULARY, LENGTH, seed=1)
    before, _ = measure(model, held, MASK, CPU)
    model.embedding.word.weight.data[PAD] += 100  # which is not the decoder's row
    np.testing.assert_allclose(measure(model, held, MASK, CPU)[0], before, rtol=1e-5)


def test_the_loss_over_a_run_is_that_of_sequences_spread_over_the_text(monkeypatch):
    held, asked = packed([130] * 20), Recorder()
    assert len(held.sequences) == 164
    monkeypatch.setattr(heldout, "CURVE_SEQUENCES", 60)
    loss = heldout.heldout_loss(asked, held, MASK, CPU)
    ((tokens, places, labels, _),) = asked.asked
    rows = torch.from_numpy(held.sequences[::3].astype(np.int64))
    assert torch.equal(rows.flatten()[places], labels)
    assert torch.equal((tokens != rows).flatten().nonzero()[:, 0], places)
    assert loss == pytest.approx(labels.float().mean().item())
    assert 2 * len(rows) <= len(labels) <= 3 * len(rows)


def test_the_standard_error_is_the_jackknifes_over_documents():
    rng = np.random.default_rng(3)
    sizes = rng.lognormal(5, 1.5, 50).round()
    nats = sizes * rng.normal(1, 0.2, 50)
    found = ratio(nats, sizes)
    without = [sum(np.delete(nats, i)) / sum(np.delete(sizes, i)) for i in range(50)]
    mean = sum(without) / 50
    expected = math.sqrt(49 / 50 * sum((value - mean) ** 2 for value in without))
    assert found == {
        "value": pytest.approx(nats.sum() / sizes.sum(), abs=1e-6),
        "standard_error": pytest.approx(expected, abs=1e-6),
    }
    assert ratio(np.array([3.0]), np.array([2])) == {"value": 1.5, "standard_error": None}
    assert ratio(np.array([3.0, 0.0]), np.array([2, 0]))["standard_error"] is None


def test_sequences_that_do_not_hold_the_documents_are_refused():
    held = packed([10, 20])
    for documents in (held.documents[:1], held.documents[[0, 1, 1]]):
        with pytest.raises(ValueError, match="sequences"):
            Heldout(held.sequences, documents)


class Unigram(nn.Module):
    """A model whose loss is known exactly: each token costs the same in every place."""

    def __init__(self, nats: np.ndarray) -> None:
        super().__init__()
        self.nats = torch.from_numpy(nats)

    def losses(self, tokens: Tensor, places: Tensor, labels: Tensor, padded: bool) -> Tensor:
        return self.nats[labels]


def measured_and_exact(tokens: Artifact) -> tuple[dict, dict]:
    """The measured losses of a unigram model by unit, and their exact values on the same documents."""
    counts = np.bincount(np.load(tokens.path / "sequences.npy").ravel(), minlength=tokens.stats["entries"]) + 1
    nats = -np.log(counts / counts.sum())
    given = Heldout(np.load(tokens.path / "heldout.npy"), np.load(tokens.path / "heldout_documents.npy"))
    found = heldout.summary(given, measure(Unigram(nats), given, MASK, CPU)[0])
    tokenizer = Tokenizer.from_file(str(tokens.path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    rows = pq.read_table(tokens.path / "heldout.parquet").to_pylist()
    texts = [row["text"] for row in rows if row["measured"] is not None]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    total = sum(nats[some].sum() for some in ids)
    sizes = {
        "token": sum(map(len, ids)),
        "character": sum(map(len, texts)),
        "byte": sum(len(t.encode()) for t in texts),
    }
    return {unit: found[f"nats_per_{unit}"]["value"] for unit in sizes}, {u: total / n for u, n in sizes.items()}


def test_vocabularies_of_one_corpus_are_measured_without_bias(store: Path, tmp_path: Path):
    rng = random.Random(5)
    prose = [document(rng, 40) for _ in range(150)]
    letters = [" ".join(random.Random(i).choices("aeioubcdfg", k=1500)) for i in range(30)]  # fewer characters a token
    corpus = corpus_of(tmp_path, [*prose, *letters], part_megabytes=1024)
    for entries in (256, 400):
        words = train_vocabulary.fn(Vocabulary(entries=entries), corpus)
        made = tokenize.fn(Tokenize(length=16, heldout_fraction=0.45, sort="none"), corpus, words)
        found, exact = measured_and_exact(made)
        assert found == pytest.approx(exact, abs=1e-6)


def test_vocabularies_of_real_text_are_measured_without_bias(store: Path, real_data: Path):
    shard = real_data / "pile-like" / "train-00000.jsonl.zst"
    corpus = download.fn(Download(source="files", files=[str(shard)], documents=0, megabytes=10))
    digests = set()
    for entries in (4096, 32768):
        words = train_vocabulary.fn(Vocabulary(entries=entries), corpus)
        made = tokenize.fn(Tokenize(heldout_fraction=0.1, sort="none"), corpus, words)
        found, exact = measured_and_exact(made)
        assert found == pytest.approx(exact, abs=1e-6)
        digests.add(made.stats["heldout"]["measured"]["digest"])
    assert len(digests) == 1
