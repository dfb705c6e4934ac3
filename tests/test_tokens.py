"""Tokenize: packing, held-out documents, order, against plain Python."""

import json
import math
import random
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, document, filtered, store_of_its_own
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from model import InputError
from tasks import tokenize as tokenize_stage
from tasks.corpus.parts import SCHEMA, batches, documents_of, parts_of, unit_hash
from tasks.store import Artifact
from tasks.text.tokenizer import PAD, SEP, SPECIALS, UNK
from tasks.tokenize import Tokenize, keys_of, order_of, tokenize, write_array
from tasks.vocabulary import Vocabulary, train_vocabulary

LENGTH = 16
PLAIN = Tokenize(length=LENGTH, heldout_fraction=0.1, sort="none")
AWKWARD = ["a [SEP] b [PAD] c [MASK]", "word " + "x" * 101 + " word", "漢字", "Dr. Who... waited. No. 5!", "é\r\n\tü"]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = random.Random(17)
    found = [document(rng, rng.choice([0, 1, 3, 12])) for _ in range(195)] + AWKWARD
    rng.shuffle(found)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Iterator[Artifact]:
    folder = tmp_path_factory.mktemp("corpus")
    with store_of_its_own(folder / "artifacts"):
        yield corpus_of(folder, texts)


@pytest.fixture(scope="module")
def words(corpus: Artifact) -> Artifact:
    return train_vocabulary.fn(Vocabulary(entries=300), corpus)


@pytest.fixture
def few_measured(monkeypatch: pytest.MonkeyPatch) -> Tokenize:
    """Params for which the held-out loss is measured on a few documents only; other ones than those of other tests."""
    monkeypatch.setattr(tokenize_stage.measured, "__defaults__", (2000,))
    return PLAIN.model_copy(update={"seed": 1})


def sequences_of(made: Artifact) -> list[list[int]]:
    return np.load(made.path / "sequences.npy").tolist()


def held_of(made: Artifact) -> list[str]:
    return pq.read_table(made.path / "heldout.parquet")["text"].to_pylist()


def plain_tokenizer(words: Artifact) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(words.path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def packed(corpus: Artifact, words: Artifact, held: set[str]) -> tuple[list[list[int]], int]:
    """Training sequences, and how many tokens are lost, in plain Python."""
    tokenizer, train, lost = plain_tokenizer(words), [], 0
    for part in parts_of(corpus):
        stream: list[int] = []
        for d in (d for batch in batches(part) for d in batch if d.text not in held):
            stream.extend([*tokenizer.encode(d.text, add_special_tokens=False).ids, SEP])
        train += [stream[i : i + LENGTH] for i in range(0, len(stream) - LENGTH + 1, LENGTH)]
        lost += len(stream) % LENGTH
    return train, lost


def measured_of(made: Artifact) -> list[str]:
    """The documents that the held-out loss is measured on, in its order."""
    rows = pq.read_table(made.path / "heldout.parquet").to_pylist()
    found = {row["measured"]: row["text"] for row in rows if row["measured"] is not None}
    assert sorted(found) == list(range(len(found)))
    return [found[place] for place in range(len(found))]


def test_sequences_are_the_documents_of_a_part_one_after_the_other_cut_to_length(corpus: Artifact, words: Artifact):
    made = tokenize.fn(PLAIN, corpus, words)
    train, lost = packed(corpus, words, set(held_of(made)))
    assert sequences_of(made) == train
    assert made.stats["tokens_lost_at_part_ends"] == lost > 0
    assert corpus.stats["parts"] > 3
    array = np.load(made.path / "sequences.npy", mmap_mode="r")
    assert (array.dtype, array.shape) == (np.uint16, (len(train), LENGTH))


def test_counts_add_up(corpus: Artifact, words: Artifact, texts: list[str]):
    made = tokenize.fn(PLAIN, corpus, words)
    stats, held, tokenizer = made.stats, set(held_of(made)), plain_tokenizer(words)
    encoded = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts}
    trained = [text for text in texts if text not in held]
    assert stats["documents"] == len(trained)
    assert stats["characters"] == sum(map(len, trained))
    assert stats["drawn_from"]["tokens"] == sum(len(encoded[text]) + 1 for text in trained)
    assert stats["drawn_from"]["tokens"] == stats["sequences"] * LENGTH + stats["tokens_lost_at_part_ends"]
    assert stats["tokens"] == stats["sequences"] * LENGTH
    assert stats["sequences"] == stats["drawn_from"]["sequences"] == len(sequences_of(made))
    assert stats["unknown_tokens"] == sum(ids.count(UNK) for ids in encoded.values()) == 1
    measured = stats["heldout"].pop("measured")
    assert stats["heldout"] == {
        "documents": len(held),
        "characters": sum(map(len, held)),
        "tokens": sum(len(encoded[text]) + 1 for text in held),
    }
    assert measured.pop("digest") == tokenize_stage.digest_of(measured_of(made))
    assert measured == {
        "documents": len(held),
        "characters": sum(map(len, held)),
        "bytes": sum(len(text.encode()) for text in held),
        "tokens": sum(len(encoded[text]) for text in held),
        "unknown_tokens": sum(encoded[text].count(UNK) for text in held),
        "sequences": len(np.load(made.path / "heldout.npy")),
    }
    every = sum(len(ids) + 1 for ids in encoded.values())
    assert stats["characters_per_token"] == pytest.approx(sum(map(len, texts)) / every, abs=5.1e-5)
    assert stats["entries"] == 300


def test_measured_documents_are_whole_and_in_the_order_of_their_digests(
    corpus: Artifact, words: Artifact, few_measured
):
    made = tokenize.fn(few_measured, corpus, words)
    found, tokenizer = measured_of(made), plain_tokenizer(words)
    assert found == sorted(held_of(made), key=unit_hash)[: len(found)]
    sizes = [len(text) for text in found]
    assert sum(sizes[:-1]) < 2000 <= sum(sizes) < sum(map(len, held_of(made)))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in found]
    stream = [token for ids in encoded for token in (*ids, SEP)]
    rows = np.load(made.path / "heldout.npy")
    assert rows.ravel().tolist() == stream + [PAD] * (-len(stream) % LENGTH)
    assert (rows.dtype, rows.shape[1]) == (np.uint16, LENGTH)
    assert len(stream) % LENGTH, "the last sequence is not lost, but padded"
    assert np.load(made.path / "heldout_documents.npy").tolist() == [
        [len(ids), len(text), len(text.encode())] for ids, text in zip(encoded, found, strict=True)
    ]
    rows = pq.read_table(made.path / "heldout.parquet").to_pylist()
    assert all(row["tokens"] == len(tokenizer.encode(row["text"], add_special_tokens=False).ids) for row in rows)


def test_the_same_documents_are_measured_whatever_vocabulary_length_order_parts_and_fraction(
    corpus: Artifact, words: Artifact, tmp_path: Path, texts: list[str], few_measured: Tokenize
):
    shuffled = random.Random(5).sample(texts, len(texts))
    others = [
        ({}, corpus, train_vocabulary.fn(Vocabulary(entries=400), corpus)),
        ({}, corpus, train_vocabulary.fn(Vocabulary(entries=300, model="unigram"), corpus)),
        ({"length": 64, "sort": "unigram"}, corpus, words),
        ({"heldout_fraction": 0.2}, corpus, words),
        ({}, corpus_of(tmp_path, shuffled, part_megabytes=1), words),
    ]
    base = tokenize.fn(few_measured, corpus, words)
    found = [tokenize.fn(few_measured.model_copy(update=change), *given) for change, *given in others]
    assert all(measured_of(made) == measured_of(base) for made in found)
    digests = [made.stats["heldout"]["measured"]["digest"] for made in (base, *found)]
    assert len(set(digests)) == 1
    assert digests[0] != tokenize_stage.digest_of(measured_of(base)[:-1])


def test_a_first_document_of_more_than_the_limit_is_measured_alone():
    texts = ["a" * 50, "b" * 10, "c" * 10, "d" * 10]
    assert tokenize_stage.measured(texts, 5).tolist() == [min(range(4), key=lambda place: unit_hash(texts[place]))]
    assert sorted(tokenize_stage.measured(texts, 10**6).tolist()) == [0, 1, 2, 3]
    assert tokenize_stage.measured([], 5).tolist() == []


def test_documents_held_out_are_about_as_many_as_asked_for_and_chosen_by_their_text_alone(
    corpus: Artifact, words: Artifact, tmp_path: Path, texts: list[str]
):
    held = set(held_of(tokenize.fn(PLAIN, corpus, words)))
    assert 8 <= len(held) <= 35, "of 200, a tenth; within 3 standard deviations"
    rng = random.Random(99)
    others = [document(rng, 3) for _ in range(200)]
    mixed = texts[::-1] + others
    rng.shuffle(mixed)
    more = tokenize.fn(PLAIN.model_copy(update={"sort": "unigram", "length": 32}), corpus_of(tmp_path, mixed, 1), words)
    assert set(held_of(more)) & set(texts) == held
    assert set(held_of(more)) - set(texts)
    fewer = tokenize.fn(PLAIN.model_copy(update={"heldout_fraction": 0.05}), corpus, words)
    assert set(held_of(fewer)) < held, "a smaller fraction holds out some of the same"


def test_equal_texts_are_held_out_together(store: Path, tmp_path: Path, texts: list[str]):
    corpus = corpus_of(tmp_path, texts * 2)
    made = tokenize.fn(PLAIN, corpus, train_vocabulary.fn(Vocabulary(entries=300), corpus))
    assert set(Counter(held_of(made)).values()) == {2}


def test_held_out_documents_are_kept_as_they_were(corpus: Artifact, words: Artifact):
    made = tokenize.fn(PLAIN, corpus, words)
    table = pq.read_table(made.path / "heldout.parquet")
    held = set(held_of(made))
    assert table.select(SCHEMA.names).to_pylist() == [d._asdict() for d in documents_of(corpus) if d.text in held]
    assert (made.path / "tokenizer.json").read_bytes() == (words.path / "tokenizer.json").read_bytes()
    before, after = (json.loads((a.path / "tokenizer_config.json").read_text()) for a in (words, made))
    assert after == before | {"model_max_length": LENGTH}


@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_full_stops_are_found_whatever_the_model_calls_them(corpus: Artifact, model: str):
    words = train_vocabulary.fn(Vocabulary(model=model, entries=300), corpus)
    found = sequences_of(tokenize.fn(PLAIN.model_copy(update={"sort": "sentence-length"}), corpus, words))
    tokenizer = plain_tokenizer(words)
    stops = [sum(tokenizer.id_to_token(i).lstrip("▁") == "." for i in row) for row in found]
    assert stops == sorted(stops, reverse=True)
    assert stops[0] > stops[-1]


def sort_keys(plain: list[list[int]], words: Artifact) -> dict[str, Callable[[list[int]], float]]:
    """What each sort sorts sequences by, in plain Python."""
    tokenizer = plain_tokenizer(words)
    names = {place: entry for entry, place in tokenizer.get_vocab().items()}
    stop, counts = tokenizer.token_to_id("."), Counter(token for row in plain for token in row)
    surprise = {token: -math.log((n + 1) / (len(plain) * LENGTH + 300)) for token, n in counts.items()}
    return {
        "sentence-length": lambda row: -row.count(stop),
        "unigram": lambda row: math.fsum(surprise[token] for token in row),
        "word-length": lambda row: sum(len(names[t].removeprefix("##")) for t in row if t >= len(SPECIALS)),
        "fragments": lambda row: -row.count(SEP),
    }


@pytest.mark.parametrize("sort", ["sentence-length", "unigram", "word-length", "fragments"])
def test_sequences_are_sorted_by_their_key(corpus: Artifact, words: Artifact, monkeypatch, sort: str):
    plain = sequences_of(tokenize.fn(PLAIN, corpus, words))
    key = sort_keys(plain, words)[sort]
    monkeypatch.setattr(tokenize_stage, "BLOCK", 7)
    rows = sequences_of(tokenize.fn(PLAIN.model_copy(update={"sort": sort}), corpus, words))
    assert sorted(rows) == sorted(plain)
    keys = [key(row) for row in rows]
    assert all(before <= after + 1e-9 for before, after in pairwise(keys))
    assert keys[0] < keys[-1]
    assert sort == "unigram" or rows == sorted(plain, key=key), "ties stay in the order of the corpus"


@pytest.fixture(scope="module")
def letters() -> Tokenizer:
    """A vocabulary of 40 entries, whose tenth is the full stop; the lengths of the others differ."""
    entries = [*SPECIALS, *(chr(97 + i) * (1 + i % 7) for i in range(4)), ".", *(f"##{'z' * i}" for i in range(1, 31))]
    return Tokenizer(WordPiece({entry: i for i, entry in enumerate(entries)}, unk_token="[UNK]"))


@pytest.mark.parametrize("sort", ["sentence-length", "unigram", "word-length", "fragments"])
def test_descending_is_the_other_way_round_with_ties_in_order(sort: str, letters: Tokenizer):
    rows = np.random.default_rng(2).integers(0, 40, size=(300, LENGTH)).astype(np.uint16)
    keys = keys_of(rows, sort, letters).tolist()
    order = order_of(rows, Tokenize(sort=sort, descending=True), letters).tolist()
    assert order == sorted(range(300), key=lambda i: (-keys[i], i))
    assert keys[order[0]] > keys[order[-1]]


def test_without_a_key_the_order_is_that_of_the_corpus_or_of_the_seed(letters: Tokenizer):
    rows = np.random.default_rng(0).integers(5, 40, size=(200, LENGTH)).astype(np.uint16)

    def order(**settings: object) -> list[int]:
        return order_of(rows, Tokenize(**settings), letters).tolist()

    assert order(sort="none") == list(range(200)) == order(sort="none", descending=True)[::-1]
    assert order(sort="random") == order(sort="random") != order(sort="random", seed=1)
    assert sorted(order(sort="random")) == list(range(200)) != order(sort="random")


@pytest.mark.parametrize("sort", ["none", "sentence-length"])
def test_of_too_many_sequences_so_many_are_drawn(corpus: Artifact, words: Artifact, sort: str):
    plain = sequences_of(tokenize.fn(PLAIN, corpus, words))
    limited = PLAIN.model_copy(update={"max_sequences": 60, "sort": sort})
    made = tokenize.fn(limited, corpus, words)
    found = sequences_of(made)
    assert made.stats["sequences"] == len(found) == 60
    assert made.stats["drawn_from"]["sequences"] == len(plain) > 120
    assert made.stats["tokens"] == 60 * LENGTH
    assert made.stats["drawn_from"]["tokens"] == len(plain) * LENGTH + made.stats["tokens_lost_at_part_ends"]
    assert not Counter(map(tuple, found)) - Counter(map(tuple, plain)), "none is drawn twice"
    other = sequences_of(tokenize.fn(limited.model_copy(update={"seed": 1}), corpus, words))
    assert sorted(other) != sorted(found)
    if sort == "none":
        places = [i for i, row in enumerate(plain) if row in found]
        assert [row for row in plain if row in found] == found, "in the order of the corpus"
        assert places[0] < len(plain) / 4 < 3 * len(plain) / 4 < places[-1]
    else:
        stop = plain_tokenizer(words).token_to_id(".")
        stops = [row.count(stop) for row in found]
        assert stops == sorted(stops, reverse=True)
    exact = tokenize.fn(PLAIN.model_copy(update={"max_sequences": len(plain)}), corpus, words)
    assert sequences_of(exact) == plain


def test_parts_too_short_for_a_sequence_are_lost_and_counted(store: Path, tmp_path: Path, texts: list[str]):
    mixed = ["Short text.", *sorted((text for text in texts if len(text) > 10), key=len)[::6]]
    corpus = corpus_of(tmp_path, mixed, part_megabytes=0.000_01)
    words = train_vocabulary.fn(Vocabulary(entries=256), corpus)
    made = tokenize.fn(PLAIN, corpus, words)
    train, lost = packed(corpus, words, set(held_of(made)))
    assert sequences_of(made) == train
    assert made.stats["tokens_lost_at_part_ends"] == lost
    assert corpus.stats["parts"] == len(mixed)
    assert len(plain_tokenizer(words).encode(mixed[0]).ids) < LENGTH


def test_a_corpus_of_less_than_one_sequence_is_refused_with_its_tokens(
    corpus: Artifact, words: Artifact, tmp_path: Path
):
    few = corpus_of(tmp_path, ["the river"])
    with pytest.raises(InputError, match=r"gives \d tokens, less than one sequence of 16"):
        tokenize.fn(PLAIN.model_copy(update={"heldout_fraction": 1e-9}), few, words)
    nothing = filtered(corpus, max_tokens_per_char=0.001)
    with pytest.raises(InputError, match="gives 0 tokens"):
        tokenize.fn(PLAIN, nothing, words)
    with pytest.raises(InputError, match="no text left"):
        train_vocabulary.fn(Vocabulary(), nothing)


def test_a_seed_without_effect_is_a_warning(corpus: Artifact, words: Artifact, caplog):
    tokenize.fn(PLAIN.model_copy(update={"seed": 3}), corpus, words)
    assert "tokenize.seed has no effect" in caplog.text
    caplog.clear()
    tokenize.fn(PLAIN.model_copy(update={"seed": 3, "max_sequences": 10}), corpus, words)
    tokenize.fn(PLAIN.model_copy(update={"seed": 3, "sort": "random"}), corpus, words)
    assert "tokenize.seed" not in caplog.text


def test_an_array_is_written_as_numpy_does_without_a_memory_map(tmp_path: Path):
    for rows in (np.arange(12, dtype=np.uint16).reshape(6, 2), np.zeros((0, 2), np.uint32)):
        np.save(tmp_path / "expected.npy", rows)
        write_array(tmp_path / "written.npy", [rows[:4], rows[4:]], rows.shape, rows.dtype)
        assert (tmp_path / "written.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


@pytest.mark.parametrize("limit", [1000, 12_000])
def test_a_file_that_may_not_grow_is_an_input_error(corpus, words, limit: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(InputError, match="tokenize can't continue"):
            tokenize.fn(Tokenize(length=32, heldout_fraction=0.3), corpus, words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
