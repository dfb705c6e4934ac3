"""The vocabulary: the same bytes every time, its special tokens, and encoding against plain references."""

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, filtered, store_of_its_own
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import AutoTokenizer

from model import InputError
from tasks import vocabulary
from tasks.corpus.parts import documents_of, unit_hash
from tasks.download import Download, download
from tasks.store import Artifact, artifacts
from tasks.text import encoding, vocabulary_training
from tasks.text.encoding import Encoder, pieces
from tasks.text.tokenizer import ALPHABET, CLS, MASK, PAD, SEP, SPECIALS, UNK, load_tokenizer, tokenizer_of
from tasks.text.vocabulary_training import count, count_words, scaled, summed, train
from tasks.text.words import COUNTS
from tasks.vocabulary import Vocabulary, kind_of, train_vocabulary, usage

CODE = sorted(Path(vocabulary.__file__).parent.rglob("*.py"))  # text with words, names and signs of all kinds
MODELS = ["wordpiece", "bpe", "unigram"]
SENTENCE = "the committee carried a long letter near the harbour"
AWKWARD = [
    "Plain words, and some more.",
    "ÉCOLE naïve Ångström ﬁne ½ İstanbul \N{KELVIN SIGN}elvin ß",
    "``quoted'' and ''quoted`` ```three'''",
    "snake_case CamelCase x86_64 a.b.c... !!! --> [1,2]",
    "tabs\tand\nlines\r\nand\x0bothers\x1c\x00\x7f",
    "漢字 かな no\N{NO-BREAK SPACE}break zero\N{ZERO WIDTH SPACE}width \N{GRINNING FACE} e\N{COMBINING ACUTE ACCENT}",
    "[MASK] [SEP] ##ing ##c <s> [UNK] a[PAD]b [CLS][CLS] [mask]",
    "x" * 100 + " " + "y" * 101 + " " + "!" * 150,
    "",
    " \n ",
]


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text."""
    ids, ends = Encoder(tokenizer)(texts)
    return [ids[start:end].tolist() for start, end in pairwise([0, *ends.tolist()])]


def counter(counts: pa.Table) -> Counter:
    """Counts of words in plain Python."""
    pairs = list(zip(counts["word"].to_pylist(), counts["count"].to_pylist(), strict=True))
    assert len(dict(pairs)) == len(pairs), "no word twice"
    return Counter(dict(pairs))


def table(counts: dict[str, int]) -> pa.Table:
    """The opposite of `counter`."""
    return pa.table([list(counts), list(counts.values())], schema=COUNTS)


@pytest.fixture(scope="module")
def texts(toy_texts: list[str]) -> list[str]:
    return toy_texts + [path.read_text(encoding="utf-8") for path in CODE]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Iterator[Artifact]:
    folder = tmp_path_factory.mktemp("corpus")
    with store_of_its_own(folder / "artifacts"):
        yield corpus_of(folder, texts, part_megabytes=1024)


@pytest.fixture(scope="module")
def made(corpus: Artifact) -> dict[str, Artifact]:
    """A vocabulary of each model."""
    return {model: train_vocabulary.fn(Vocabulary(model=model, entries=1000), corpus) for model in MODELS}


@pytest.fixture(scope="module")
def tokenizers(made: dict[str, Artifact]) -> dict[str, Tokenizer]:
    return {model: load_tokenizer(artifact.path) for model, artifact in made.items()}


SCRIPT = """
import hashlib, json, os, sys
from tasks.text.vocabulary_training import count_words, train
from tasks.vocabulary import usage
models, texts = json.load(sys.stdin)
before = len(os.listdir("/proc/self/task"))
for model in models:
    counts = count_words(texts)
    found = train(counts, 1000, kind=model)
    for text in (found.to_str(pretty=True), str(usage(found, counts).to_pylist())):
        print(hashlib.sha256(text.encode()).hexdigest())
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("seed", "workers", "threads", "order"), [("0", "1", "0", 1), ("4242", "2", "2", -1)])
def test_fresh_processes_write_the_same_bytes_for_any_hash_seed_and_order(made, texts, seed, workers, threads, order):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([MODELS, texts[::order]]),
        env=os.environ | {"PYTHONHASHSEED": seed, "CRAM_WORKERS": workers},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    here = []
    for artifact in made.values():
        entries = str(pq.read_table(artifact.path / "entries.parquet").to_pylist())
        for written in ((artifact.path / "tokenizer.json").read_bytes(), entries.encode()):
            here.append(hashlib.sha256(written).hexdigest())
    assert done.stdout.split() == [*here, threads], "as many threads as workers, and none beside the one of one worker"


def test_too_little_text_is_refused(store: Path, tmp_path: Path):
    corpus = corpus_of(tmp_path, ["a few words"])
    with pytest.raises(InputError, match=r"11 characters gives .* of 1\d\d entries; 5,000 .*vocabulary\.entries"):
        train_vocabulary.fn(Vocabulary(entries=5000), corpus)
    with pytest.raises(InputError, match="no text left"):
        train_vocabulary.fn(Vocabulary(entries=256), filtered(corpus, min_characters=1000))
    assert artifacts("vocabulary") == []
    with pytest.raises(ValidationError, match="min_frequency"):
        Vocabulary(model="unigram", min_frequency=3)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(("min_frequency", "learned"), [(1, True), (2, False)])
def test_words_seen_often_enough_are_entries(min_frequency: int, learned: bool):
    words = train(count_words(["zebra crossing " * 50 + "quixotic"]), 256, min_frequency=min_frequency).get_vocab()
    assert {"zebra", "crossing"} <= set(words)
    assert ("quixotic" in words) == learned


def test_the_most_frequent_word_is_an_entry_of_unigram_however_often_it_occurs(texts: list[str]):
    often = counter(count_words(texts)) | {"zyx": 300_000}
    trained = train(table(often), 1000, kind="unigram")
    assert trained.encode("zyx", add_special_tokens=False).tokens == ["▁zyx"]


@pytest.mark.parametrize("model", MODELS)
def test_transformers_and_tokenizers_load_the_folder_and_encode_as_we_do(made, tokenizers, model: str):
    ours, theirs = tokenizers[model], AutoTokenizer.from_pretrained(made[model].path)
    known, rng = ours.get_vocab(), random.Random(5)
    assert sorted(known.values()) == list(range(1000))
    assert [known[token] for token in SPECIALS] == [PAD, UNK, CLS, SEP, MASK] == [0, 1, 2, 3, 4]
    assert [getattr(theirs, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")] == [0, 1, 2, 3, 4]
    texts = AWKWARD + [random_text(rng, sorted(known), 60) for _ in range(200)]
    assert encode(ours, texts) == [ours.encode(text, add_special_tokens=False).ids for text in texts]
    [sentence, *awkward] = encode(ours, [SENTENCE, *AWKWARD[:6]])
    assert ours.decode(sentence) == SENTENCE
    assert theirs(AWKWARD[:6])["input_ids"] == [[CLS, *ids, SEP] for ids in awkward]
    padded = theirs(["a", SENTENCE], ["the", SENTENCE], padding=True)
    assert padded["input_ids"][1] == [CLS, *sentence, SEP, *sentence, SEP]
    assert padded["input_ids"][0][-1] == PAD
    assert padded["attention_mask"][0] == [int(token != PAD) for token in padded["input_ids"][0]]
    assert set(padded) == {"input_ids", "attention_mask"}


def normal(text: str) -> str:
    """What the normaliser should make of a text, in plain Python."""
    text = unicodedata.normalize("NFD", text.replace("``", '"').replace("''", '"')).lower()
    text = "".join(c for c in text if not unicodedata.category(c).startswith("M"))
    return re.sub(r"[^\x09-\x0d\x20-\x7e]", "", text)


def plain_words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]+", normal(text), re.ASCII)


def word_pieces(text: str, words: dict[str, int]) -> list[int]:
    """WordPiece in plain Python: of what is left of a word, always the longest entry."""
    found = []
    for word in plain_words(text):
        ids, start = [], 0
        while start < len(word) and len(word) <= 100:
            ends = range(len(word), start, -1)
            entries = (("##" if start else "") + word[start:end] for end in ends)
            end, entry = next((e, w) for e, w in zip(ends, entries, strict=True) if w in words)
            ids.append(words[entry])
            start = end
        found += ids or [UNK]
    return found


def random_text(rng: random.Random, words: list[str], size: int) -> str:
    """Words of the vocabulary, white space and characters from all over Unicode, in any order."""
    signs = [*"  \n\t.,'`\"\x0b\r_-#[]é", "``", "''", "[MASK]", "e\N{COMBINING ACUTE ACCENT}", "\N{NO-BREAK SPACE}"]
    blocks = ((1, 0x250), (0x300, 0x370), (0x1F00, 0x2100))

    def one() -> str:
        kind = rng.random()
        if kind < 0.1:
            return chr(rng.randrange(*rng.choice(blocks)))
        return rng.choice(signs) if kind < 0.6 else rng.choice(words).removeprefix("##").swapcase()

    return "".join(one() for _ in range(size))


def test_encoding_is_that_of_a_plain_word_piece(tokenizers: dict[str, Tokenizer]):
    words, rng = tokenizers["wordpiece"].get_vocab(), random.Random(2)
    texts = AWKWARD + [random_text(rng, sorted(words), 60) for _ in range(300)]
    for text, ids in zip(texts, encode(tokenizers["wordpiece"], texts), strict=True):
        assert ids == word_pieces(text, words), repr(text)
        assert not set(ids) & {PAD, CLS, SEP, MASK}, "special tokens in a text are text"
    assert encode(tokenizers["wordpiece"], []) == []


@pytest.mark.parametrize(
    ("limit", "size"),
    [("PIECE_CHARACTERS", 1), ("PIECE_CHARACTERS", 50), ("KNOWN_WORDS", 100), ("LEARNED_AT_ONCE", 30)],
)
def test_texts_in_pieces_and_encoders_that_forget_give_the_same_tokens(tokenizers, monkeypatch, toy_texts, limit, size):
    tokenizer, rng = tokenizers["wordpiece"], random.Random(3)
    drawn = [random_text(rng, sorted(tokenizer.get_vocab()), 200) for _ in range(20)]
    texts = [*AWKWARD, *toy_texts[:20], *drawn, "word" * 30, ""]
    expected = encode(tokenizer, texts)
    monkeypatch.setattr(encoding, limit, size)
    assert (len(list(pieces(toy_texts[0]))) > 2) == (limit == "PIECE_CHARACTERS")
    assert encode(tokenizer, texts) == expected
    encoder = Encoder(tokenizer)
    assert [encoder([text]).ids.tolist() for text in texts] == expected


def test_a_unit_hash_depends_on_text_and_salt_alone_and_is_spread_evenly():
    hashes = np.array([unit_hash(str(i)) for i in range(20_000)])
    assert 0 <= hashes.min() < hashes.max() < 1
    counts, _ = np.histogram(hashes, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 45, "chi squared, 19 degrees of freedom: p > 0.0007"
    other = np.array([unit_hash(str(i), salt=1) for i in range(20_000)])
    assert abs(np.corrcoef(hashes, other)[0, 1]) < 0.03


def test_a_sample_is_the_same_documents_in_any_order_and_of_about_the_size(store: Path, tmp_path: Path, toy_texts):
    texts = [f"{text} {i}" for i in range(5) for text in toy_texts]
    chosen = [text for text in texts if unit_hash(text, salt=1) < 0.25]
    for number, order in enumerate((texts, texts[::-1])):
        corpus = corpus_of(tmp_path, order, part_megabytes=0.05)
        megabytes = corpus.stats["characters"] / 4e6
        counts, used = count(corpus, megabytes, tmp_path / f"{number}", "count")
        assert counter(counts) == counter(count_words(chosen))
        assert used == {"documents": len(chosen), "characters": sum(map(len, chosen))}
        assert 0.8 < used["characters"] / (1e6 * megabytes) < 1.2
    made = train_vocabulary.fn(Vocabulary(entries=256, sample_megabytes=megabytes), corpus)
    assert (made.path / "tokenizer.json").read_text() == train(counts, 256).to_str(pretty=True)
    assert {name: made.stats["trained_on"][name] for name in used} == used


def test_counts_are_those_of_a_plain_split_in_pieces_and_batches_too(texts: list[str], monkeypatch):
    expected = Counter(word for text in texts for word in plain_words(text) if len(word) <= 100)
    assert counter(count_words(texts)) == expected
    monkeypatch.setattr(encoding, "PIECE_CHARACTERS", 500)
    assert counter(count_words(texts)) == counter(summed(count_words([text]) for text in texts)) == expected
    assert counter(summed([])) == counter(count_words([])) == {}


def test_scaled_down_words_keep_their_shares_rare_ones_together(monkeypatch: pytest.MonkeyPatch):
    counts = {f"often{i}": 1000 + i for i in range(50)} | {f"once{i}": 1 for i in range(20_000)}
    lines = list(scaled(table(counts)))
    assert Counter(word for line in lines for word in line.split()) == counts
    assert {len(line.split()) for line in lines[:-1]} == {vocabulary_training.LINE_WORDS}
    monkeypatch.setattr(vocabulary_training, "TRAINING_WORDS", sum(counts.values()) // 10)
    fewer = Counter(word for line in scaled(table(counts)) for word in line.split())
    assert all(abs(fewer[word] - n / 10) < 1 for word, n in counts.items())
    assert abs(sum(fewer[f"once{i}"] for i in range(20_000)) - 2000) < 150, "three standard deviations are 127"


@pytest.mark.parametrize(("entries", "bits"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_more_than_65536_entries_have_ids_of_32_bits(entries: int, bits: type):
    words = [*SPECIALS, *(f"w{i}" for i in range(5, entries))]
    tokenizer = tokenizer_of(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    ids, ends = Encoder(tokenizer)([f"w{entries - 1} w5", "w65535"])
    assert (ids.dtype, ids.tolist(), ends.tolist()) == (bits, [entries - 1, 5, 65_535], [2, 3])


def test_tokens_are_counted_as_encoded_and_long_words_by_their_characters(tokenizers, texts: list[str]):
    tokenizer, plain = tokenizers["wordpiece"], [text for text in texts + AWKWARD if not re.search(r"\S{101}", text)]
    assert Encoder(tokenizer).tokens(plain).tolist() == list(map(len, encode(tokenizer, plain)))
    assert Encoder(tokenizer).tokens(["a " + "x" * 101, "", "!" * 100 + " ."]).tolist()[:2] == [102, 0]


@pytest.mark.parametrize("model", MODELS)
def test_a_word_too_long_to_divide_is_unknown_in_every_model(tokenizers: dict[str, Tokenizer], model: str):
    plain, longest = tokenizers[model], "ab" * 50_000
    [known, unknown, among] = encode(plain, [longest, f"{longest}c", f"the {longest * 50}, the"])
    assert known == plain.encode(longest, add_special_tokens=False).ids
    assert len(unknown) <= 2, "Unigram marks the beginning of a word with an entry of its own"
    assert unknown[-1] == UNK
    before, after = encode(plain, ["the", ", the"])
    assert among == [*before, *unknown, *after]


def test_the_entries_are_counted_by_their_kind_and_use(made: dict[str, Artifact], corpus: Artifact):
    stats = made["wordpiece"].stats
    entries = pq.read_table(made["wordpiece"].path / "entries.parquet").to_pandas()
    words = dict(zip(entries["entry"], entries["id"], strict=True))
    assert words == load_tokenizer(made["wordpiece"].path).get_vocab()
    assert set(words) > {f"{mark}{c}" for c in ALPHABET for mark in ("", "##")}, "all that the normaliser leaves"
    assert stats["entries"] == 1000 == stats["whole_words"] + stats["continuations"] + len(SPECIALS)
    assert stats["continuations"] == sum(word.startswith("##") for word in words)
    assert stats["unused"] == (entries["occurrences"][5:] == 0).sum()
    for counted in ("documents", "characters"):
        assert stats["trained_on"][counted] == corpus.stats[counted]
    for row in stats["table"]:
        own = entries[entries["kind"] == row["kind"]]["occurrences"]
        assert list(row.values())[1:4] == [len(own), (own == 0).sum(), (own < 100).sum()]
        assert row["% of tokens"] == round(100 * own.sum() / entries["occurrences"].sum(), 2)
    kinds = {"the": "letters", "##ing": "letters", "1984": "digits", "##...": "punctuation", "x86": "mixed",
             "[SEP]": "special", "▁the": "letters", "__": "punctuation"}  # fmt: skip
    assert {entry: kind_of(entry) for entry in kinds} == kinds


@pytest.mark.parametrize("model", MODELS)
def test_use_is_that_of_the_encoded_text_however_many_words_are_divided_at_once(tokenizers, texts, model, monkeypatch):
    some = [text for text in texts if max(map(len, plain_words(text))) <= 100]
    expected = np.bincount(np.concatenate(encode(tokenizers[model], some)), minlength=1000)
    for divided, batches in ((1 << 12, 32), (3, 2)):
        monkeypatch.setattr(vocabulary, "DIVIDED_AT_ONCE", divided)
        monkeypatch.setattr(vocabulary, "BATCHES_AT_ONCE", batches)
        assert usage(tokenizers[model], count_words(some))["occurrences"].to_pylist() == expected.tolist()


def test_real_text_is_encoded_as_the_plain_tokenizer_does(real_data: Path, store: Path):
    files = sorted(map(str, real_data.glob("pile-like/train-*.jsonl.zst")))
    corpus = download.fn(Download(source="files", files=files[-1:], documents=0, megabytes=6))
    plain = load_tokenizer(train_vocabulary.fn(Vocabulary(entries=8192), corpus).path)
    texts = [d.text for d in documents_of(corpus)]
    expected = [e.ids for e in plain.encode_batch_fast(texts, add_special_tokens=False)]
    assert encode(plain, texts) == expected
