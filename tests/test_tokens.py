"""Tokenize: packing, held-out documents, order, against plain Python."""

import json
import math
import random
import re
import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, document, documents_in, documents_of, filtered, sentence, store_of_its_own
from tokenizers import Tokenizer

from model.errors import InputError
from model.heldout import Heldout
from tasks import tokenize as tokenize_stage
from tasks.corpus.parts import SCHEMA, parts_of, unit_hash
from tasks.store.artifacts import Artifact
from tasks.store.publish import refresh
from tasks.text import holdout, sequences
from tasks.text.tokenizer import PAD, SEP, UNK
from tasks.tokenize import Tokenize, tokenize, warn_of_unknown
from tasks.vocabulary import Vocabulary, vocabulary

LENGTH = 16
AWKWARD = ["a [SEP] b [PAD] c [MASK]", "word " + "x" * 101 + " word", "漢字", "Dr. Who... waited. No. 5!", "é\r\n\tü"]


def tokenized(corpus: Artifact, words: Artifact, **changes: object) -> Artifact:
    """The sequences of a corpus, in its order if the changes do not say otherwise."""
    return tokenize.fn(
        Tokenize(**{"length": LENGTH, "heldout_fraction": 0.1, "sort": "none", **changes}), corpus, words
    )


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
    return vocabulary.fn(Vocabulary(entries=300), corpus)


@pytest.fixture(scope="module")
def made(corpus: Artifact, words: Artifact) -> Artifact:
    return tokenized(corpus, words)


@pytest.fixture
def few_measured(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Changes with which the held-out loss is measured on a few documents; no other test makes the same artifact."""
    for module in (tokenize_stage, holdout):
        monkeypatch.setattr(module, "MEASURED_CHARACTERS", 2000)
    return {"seed": 1}


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
    tokenizer = plain_tokenizer(words)
    train = []
    lost = 0
    for part in parts_of(corpus):
        stream: list[int] = []
        for d in (d for d in documents_in(part) if d.text not in held):
            stream.extend([*tokenizer.encode(d.text, add_special_tokens=False).ids, SEP])
        train += [stream[i : i + LENGTH] for i in range(0, len(stream) - LENGTH + 1, LENGTH)]
        lost += len(stream) % LENGTH
    return train, lost


def alone_of(made: Artifact) -> list[str]:
    """The held-out documents that share no passage with the training text."""
    rows = pq.read_table(made.path / "heldout.parquet").to_pylist()
    return [row["text"] for row in rows if not row["shared_words"]]


def measured_of(made: Artifact) -> list[str]:
    """The documents that the held-out loss is measured on, in its order."""
    rows = pq.read_table(made.path / "heldout.parquet").to_pylist()
    found = {row["measured"]: row["text"] for row in rows if row["measured"] is not None}
    assert sorted(found) == list(range(len(found)))
    return [found[place] for place in range(len(found))]


@pytest.mark.parametrize("one_each", [False, True])
def test_sequences_are_the_documents_of_a_part_one_after_the_other(corpus, words, texts, tmp_path, one_each: bool):
    if one_each:  # a document in each part, the first shorter than a sequence
        corpus = corpus_of(tmp_path, ["Short text.", *sorted(texts, key=len)[10::6]], part_megabytes=0.000_01)
    made = tokenized(corpus, words)
    train, lost = packed(corpus, words, set(held_of(made)))
    array = np.load(made.path / "sequences.npy")
    assert array.tolist() == train
    assert (array.dtype, array.shape) == (np.uint16, (len(train), LENGTH))
    assert made.stats["tokens_lost_at_part_ends"] == lost > 0
    assert corpus.stats["parts"] > 3


def test_counts_add_up(made: Artifact, words: Artifact, texts: list[str]):
    stats = made.stats
    held = set(held_of(made))
    tokenizer = plain_tokenizer(words)
    encoded = {text: tokenizer.encode(text, add_special_tokens=False).ids for text in texts}

    def sizes(chosen: Iterable[str]) -> dict[str, int]:
        chosen = list(chosen)
        tokens = sum(len(encoded[text]) + 1 for text in chosen)
        return {"documents": len(chosen), "characters": sum(map(len, chosen)), "tokens": tokens}

    trained = sizes(text for text in texts if text not in held)
    assert {**{name: stats[name] for name in trained}, "tokens": stats["drawn_from"]["tokens"]} == trained
    assert stats["tokens"] == stats["sequences"] * LENGTH == trained["tokens"] - stats["tokens_lost_at_part_ends"]
    assert stats["sequences"] == stats["drawn_from"]["sequences"] == len(sequences_of(made))
    assert stats["unknown_tokens"] == sum(ids.count(UNK) for ids in encoded.values()) == 1
    shared = stats["heldout"].pop("shared")
    alone = set(alone_of(made))
    assert stats["heldout"].pop("measured") == {
        **sizes(alone),
        **Heldout.load(made.path).totals,
        "bytes": sum(len(text.encode()) for text in alone),
        "tokens": sum(len(encoded[text]) for text in alone),
        "unknown_tokens": sum(encoded[text].count(UNK) for text in alone),
        "sequences": len(Heldout.load(made.path).sequences),
        "digest": holdout.digest_of(measured_of(made)),
        "shared": dict.fromkeys(shared, 0) | {"words_in_a_row": 13},
    }
    every = sizes(texts)
    share = stats["heldout"]["characters"] / every["characters"]
    assert stats["heldout"] == {**sizes(held), "share": pytest.approx(share, abs=1e-6)}
    assert shared.items() > {name: sizes(held - alone)[name] for name in ("documents", "characters")}.items()
    assert shared["share_of_documents"] == pytest.approx(len(held - alone) / len(held), abs=1e-6)
    assert stats["characters_per_token"] == pytest.approx(every["characters"] / every["tokens"], abs=5.1e-5)
    assert stats["entries"] == 300


def test_measured_documents_are_whole_and_in_the_order_of_their_digests(corpus, words, few_measured: dict):
    made = tokenized(corpus, words, **few_measured)
    found = measured_of(made)
    tokenizer = plain_tokenizer(words)
    assert found == sorted(alone_of(made), key=unit_hash)[: len(found)]
    sizes = [len(text) for text in found]
    assert sum(sizes[:-1]) < 2000 <= sum(sizes) < sum(map(len, alone_of(made)))
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in found]
    stream = [token for ids in encoded for token in (*ids, SEP)]
    written = Heldout.load(made.path)
    rows = written.sequences
    assert rows.ravel().tolist() == stream + [PAD] * (-len(stream) % LENGTH)
    assert (rows.dtype, rows.shape[1]) == (np.uint16, LENGTH)
    assert len(stream) % LENGTH, "the last sequence is not lost, but padded"
    assert written.documents[:, [0, 2, 3]].tolist() == [
        [len(ids), len(text), len(text.encode())] for ids, text in zip(encoded, found, strict=True)
    ]
    rows = pq.read_table(made.path / "heldout.parquet").to_pylist()
    assert all(row["tokens"] == len(tokenizer.encode(row["text"], add_special_tokens=False).ids) for row in rows)


def test_the_measured_documents_depend_on_the_texts_alone(corpus, words, tmp_path: Path, texts, few_measured: dict):
    shuffled = random.Random(5).sample(texts, len(texts))
    others = [
        ({}, corpus, vocabulary.fn(Vocabulary(entries=400), corpus)),
        ({"length": 64, "sort": "unigram"}, corpus, words),
        ({}, corpus_of(tmp_path, shuffled, part_megabytes=1), words),
    ]
    base = tokenized(corpus, words, **few_measured)
    found = [tokenized(*given, **few_measured, **changes) for changes, *given in others]
    assert all(measured_of(made) == measured_of(base) for made in found)
    digests = [made.stats["heldout"]["measured"]["digest"] for made in (base, *found)]
    assert len(set(digests)) == 1
    assert digests[0] != holdout.digest_of(measured_of(base)[:-1])


def test_a_first_document_of_more_than_the_limit_is_measured_alone():
    texts = ["a" * 50, "b" * 10, "c" * 10, "d" * 10]
    assert holdout.choose_measured(texts, 5).tolist() == [min(range(4), key=lambda place: unit_hash(texts[place]))]
    assert sorted(holdout.choose_measured(texts, 10**6).tolist()) == [0, 1, 2, 3]
    assert holdout.choose_measured([], 5).tolist() == []


def test_as_many_are_held_out_as_asked_for_chosen_by_their_text_alone(corpus, words, made, tmp_path: Path, texts):
    held = set(held_of(made))
    assert 8 <= len(held) <= 35, "of 200, a tenth; within 3 standard deviations"
    rng = random.Random(99)
    mixed = texts * 2 + [document(rng, 3) for _ in range(200)]
    rng.shuffle(mixed)
    times = Counter(held_of(tokenized(corpus_of(tmp_path, mixed, 1), words, sort="unigram", length=32)))
    assert {text: times.pop(text) for text in set(texts) & set(times)} == dict.fromkeys(held, 2)
    assert times, "some of the others too"
    fewer = tokenized(corpus, words, heldout_fraction=0.05)
    assert set(held_of(fewer)) < held, "a smaller fraction holds out some of the same"


def test_held_out_documents_are_kept_as_they_were(corpus: Artifact, words: Artifact, made: Artifact):
    table = pq.read_table(made.path / "heldout.parquet")
    held = set(held_of(made))
    assert table.select(SCHEMA.names).to_pylist() == [d._asdict() for d in documents_of(corpus) if d.text in held]
    assert (made.path / "tokenizer.json").read_bytes() == (words.path / "tokenizer.json").read_bytes()
    before, after = (json.loads((a.path / "tokenizer_config.json").read_text()) for a in (words, made))
    assert after == before | {"model_max_length": LENGTH}


def sort_keys(plain: list[list[int]], words: Artifact) -> dict[str, Callable[[list[int]], float]]:
    """What each sort sorts sequences by, in plain Python."""
    names = {place: entry for entry, place in plain_tokenizer(words).get_vocab().items()}
    counts = Counter(token for row in plain for token in row)
    surprise = {token: -math.log((n + 1) / (len(plain) * LENGTH + 300)) for token, n in counts.items()}
    return {
        "sentence-length": lambda row: -sum(names[token] == "." for token in row),
        "unigram": lambda row: math.fsum(surprise[token] for token in row),
    }


def test_without_a_key_the_order_is_that_of_the_corpus_or_of_the_seed(corpus, words, made: Artifact):
    plain = sequences_of(made)
    drawn = tokenized(corpus, words, sort="random")
    found = sequences_of(drawn)
    assert sorted(found) == sorted(plain)
    assert plain != found != sequences_of(tokenized(corpus, words, sort="random", seed=1))
    refresh(drawn)
    assert sequences_of(tokenized(corpus, words, sort="random")) == found


def test_of_too_many_sequences_so_many_are_drawn_and_sorted(corpus, words, made: Artifact):
    plain = sequences_of(made)
    fewer = tokenized(corpus, words, max_sequences=60, sort="sentence-length")
    found = sequences_of(fewer)
    assert fewer.stats["sequences"] == len(found) == fewer.stats["tokens"] / LENGTH == 60
    assert fewer.stats["drawn_from"] == made.stats["drawn_from"]
    assert not Counter(map(tuple, found)) - Counter(map(tuple, plain)), "none is drawn twice"
    places = [i for i, row in enumerate(plain) if row in found]
    assert places[0] < len(plain) / 4 < 3 * len(plain) / 4 < places[-1]
    stop = plain_tokenizer(words).token_to_id(".")
    assert found == sorted((plain[i] for i in places), key=lambda row: -row.count(stop))
    other = tokenized(corpus, words, max_sequences=60, sort="sentence-length", seed=1)
    assert sorted(sequences_of(other)) != sorted(found)
    assert sequences_of(tokenized(corpus, words, max_sequences=len(plain))) == plain


def parts_in(folder: Path, whole: np.ndarray, cuts: Iterable[int]) -> list[np.memmap]:
    """Sequences as the files of parts."""
    folder.mkdir()
    for number, rows in enumerate(np.split(whole, list(cuts))):
        np.save(folder / f"{number:04}.npy", rows)
    return [np.load(path, mmap_mode="r") for path in sorted(folder.iterdir())]


@pytest.mark.parametrize(("most", "most_runs"), [(1500, 1), (500, 1000)], ids=["in windows", "in ascending runs"])
@pytest.mark.parametrize("sort", ["sentence-length", "unigram", "random", "none"])
def test_the_file_is_the_same_however_sequences_are_cut(words, tmp_path: Path, monkeypatch, sort, most, most_runs: int):
    for name, value in (("BLOCK", 1000), ("WINDOW", 5000), ("MOST_RUNS", most_runs)):
        monkeypatch.setattr(sequences, name, value)
    whole = np.random.default_rng(1).integers(0, 300, (1500, LENGTH)).astype(np.uint16)
    tokenizer = plain_tokenizer(words)
    rows = sequences.draw_rows(len(whole), most, seed=0)
    kept = whole[np.asarray(rows)]
    if sort in ("sentence-length", "unigram"):
        key = sort_keys(kept.tolist(), words)[sort]
        expected = np.array(sorted(kept.tolist(), key=key), np.uint16)
    else:
        expected = kept if sort == "none" else kept[np.random.default_rng(0).permutation(most)]
    for cuts in ([], [0, 1, 1, 70, 1499], range(7, 1500, 7)):
        parts = parts_in(tmp_path / f"{len(cuts)}", whole, cuts)
        order = sequences.order_of(parts, rows, sort, 0, tokenizer)
        sequences.write_sequences(tmp_path / "sequences.npy", parts, rows, order)
        assert np.array_equal(np.load(tmp_path / "sequences.npy"), expected)


@pytest.mark.parametrize("runs", [50, 20_000])
def test_sequences_are_written_in_bounded_memory_and_read_once(tmp_path: Path, monkeypatch, runs: int):
    monkeypatch.setattr(sequences, "BLOCK", 1 << 16)
    monkeypatch.setattr(sequences, "WINDOW", 1 << 18)
    read = []
    blocks_of = sequences.blocks_of

    def counting(*given: object) -> Iterator[np.ndarray]:
        for block in blocks_of(*given):
            read.append(len(block))
            yield block

    monkeypatch.setattr(sequences, "blocks_of", counting)
    whole = np.random.default_rng(1).integers(0, 1 << 16, (20_000, 128)).astype(np.uint16)
    parts = parts_in(tmp_path / "parts", whole, range(999, 20_000, 999))
    rows = range(len(whole))
    order = np.argsort(np.random.default_rng(2).integers(0, runs, len(whole)), kind="stable")
    tracemalloc.start()
    sequences.write_sequences(tmp_path / "sequences.npy", parts, rows, order)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < whole.nbytes / 5
    assert sum(read) == len(whole)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["sequences.npy"], "no other file"


def test_a_corpus_of_less_than_one_sequence_is_refused_with_its_tokens(corpus, words, tmp_path: Path):
    with pytest.raises(InputError, match="sequence of 16"):
        tokenized(corpus_of(tmp_path, ["the river"]), words, heldout_fraction=1e-9)
    with pytest.raises(InputError, match="0 tokens"):
        tokenized(filtered(corpus, max_tokens_per_char=0.001), words)


@pytest.mark.parametrize("limit", [1000, 12_000])
def test_a_file_that_may_not_grow_is_an_input_error(corpus, words, limit: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(InputError, match="tokenize can't continue"):
            tokenized(corpus, words, length=32, heldout_fraction=0.3, sort="sentence-length")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_of_a_document_longer_than_all_that_is_held_out_pieces_are_held_out(tmp_path: Path, words: Artifact):
    rng = random.Random(5)
    long = ["\n".join(sentence(rng) for _ in range(5_000)) for _ in range(2)]
    spaced = " ".join(sentence(rng) for _ in range(5_000))
    solid = "x" * 200_000
    every = [*long, "The last one.", spaced, solid]
    made = tokenized(corpus_of(tmp_path, every), words, heldout_fraction=0.15)
    held = pq.read_table(made.path / "heldout.parquet").to_pylist()
    assert 0.05 < made.stats["heldout"]["share"] < 0.3
    asked = 0.15 * sum(map(len, every))
    for row in held:
        name, place = row["id"].rsplit("+", 1)
        whole = every[int(name.rpartition(":")[2]) - 1]
        assert whole[int(place) :].startswith(row["text"])
        assert len(row["text"]) <= asked / 5
        assert whole == solid or row["text"][-1].isspace() or whole.endswith(row["text"])
    assert made.stats["characters"] + made.stats["heldout"]["characters"] == sum(map(len, every))
    assert made.stats["documents"] == 5


# Unknown words, and sentences of any script

SENTENCES = "今天天气很好。我们去公园！ आज मौसम अच्छा है। هل تأتي معنا؟ نعم. Да, конечно. Why? "


@pytest.fixture(scope="module")
def any_script(corpus: Artifact, tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Artifact:
    """A vocabulary for Unicode."""
    of_all = corpus_of(tmp_path_factory.mktemp("any script"), [*texts, SENTENCES * 9])
    return vocabulary.fn(Vocabulary(entries=400, characters="unicode"), of_all)


@pytest.mark.parametrize(
    ("text", "helps"),
    [
        ("Да ѫѫ ѭѭ ѫѫ " * 30, r"'ѫѫ' \(60\).*'ѭѭ'.*vocabulary\.alphabet"),
        (f"Да {'н' * 300} {'т' * 300} " * 30, r"'ннн.*'ттт.*100 characters"),
    ],
)
def test_many_unknown_words_are_named_with_what_helps(any_script, tmp_path, caplog, text: str, helps: str):
    found = tokenized(corpus_of(tmp_path, [text]), any_script)
    assert re.search(helps, caplog.text, re.DOTALL)
    assert sum(found.stats["unknown_words"].values()) == found.stats["unknown_tokens"]


def test_for_the_tokenizer_of_a_public_model_no_setting_of_the_vocabulary_is_advised(caplog):
    for is_own in (True, False):
        caplog.clear()
        warn_of_unknown({"ქართული": 50}, 0.02, is_own)
        assert ("vocabulary." in caplog.text) == is_own


def test_few_unknown_words_are_counted_without_a_warning(corpus, words, made: Artifact, caplog):
    tokenized(corpus, words, length=32)
    assert sum(made.stats["unknown_words"].values()) == made.stats["unknown_tokens"] == 1
    assert "UNK" not in caplog.text


def test_sentences_end_with_the_full_stops_of_all_scripts(any_script: Artifact, tmp_path: Path):
    rng = random.Random(3)
    words = SENTENCES.split()
    corpus = corpus_of(tmp_path, [" ".join(rng.choices(words, k=rng.randint(2, 60))) for _ in range(60)])
    names = {place: entry for entry, place in plain_tokenizer(any_script).get_vocab().items()}
    plain = sequences_of(tokenized(corpus, any_script))
    rows = sequences_of(tokenized(corpus, any_script, sort="sentence-length"))
    assert rows == sorted(plain, key=lambda row: -sum(names[token] in {*".。!?؟।"} for token in row))
    assert rows != sorted(plain, key=lambda row: -sum(names[token] == "." for token in row))
