"""The vocabulary: the same bytes every time, its special tokens, and encoding against plain references."""

import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import naive
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, documents_of, filtered, store_of_its_own
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from toys import count_words
from transformers import AutoTokenizer

from model.errors import InputError
from tasks import vocabulary as vocabulary_stage
from tasks.corpus.parts import Salt, unit_hash
from tasks.download import Download, download
from tasks.store.artifacts import Artifact, artifacts_of
from tasks.text.encoder import Encoder
from tasks.text.tokenizer import ALPHABET, CLS, MASK, PAD, SEP, SPECIALS, UNK, load_tokenizer, pieces, tokenizer_of
from tasks.text.words import COUNTS, UNICODE
from tasks.vocabulary import (
    Vocabulary,
    count_sample,
    entries_table,
    kind_of,
    sum_counts,
    train_wordpiece,
    training_lines,
    unused_entries,
    vocabulary,
)

CODE = sorted(Path(vocabulary_stage.__file__).parent.glob("text/*.py"))  # text with words, names and signs of all kinds
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
def made(corpus: Artifact) -> Artifact:
    return vocabulary.fn(Vocabulary(entries=1000), corpus)


@pytest.fixture(scope="module")
def tokenizer(made: Artifact) -> Tokenizer:
    return load_tokenizer(made.path)


SCRIPT = """
import hashlib, json, os, sys
from tasks.text.words import ASCII, UNICODE
from tasks.vocabulary import count_portions, entries_table, sum_counts, train_wordpiece

def count_words(texts, how):
    return sum_counts(count_portions(texts, how)).sort_by("word")

texts, of_any_script = json.load(sys.stdin)
counts = count_words(texts, ASCII)
before = len(os.listdir("/proc/self/task"))
found = train_wordpiece(counts, 1000)
other = train_wordpiece(count_words(of_any_script, UNICODE), 300, UNICODE)
for text in (found.to_str(pretty=True), str(entries_table(found, counts).to_pylist()), other.to_str(pretty=True)):
    print(hashlib.sha256(text.encode()).hexdigest())
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.parametrize(("seed", "workers", "threads", "order"), [("0", "1", "0", 1), ("4242", "2", "2", -1)])
def test_fresh_processes_write_the_same_bytes_for_any_hash_seed_and_order(made, texts, seed, workers, threads, order):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([texts[::order], any_script(3)[::order]]),
        env=os.environ | {"PYTHONHASHSEED": seed, "CRAM_WORKERS": workers},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    entries = str(pq.read_table(made.path / "entries.parquet").to_pylist())
    other = train_wordpiece(count_words(any_script(3), UNICODE), 300, UNICODE).to_str(pretty=True)
    written = ((made.path / "tokenizer.json").read_bytes(), entries.encode(), other.encode())
    here = [hashlib.sha256(content).hexdigest() for content in written]
    assert done.stdout.split() == [*here, threads], "as many threads as workers, and none beside the one of one worker"


def test_too_little_text_is_refused(store: Path, tmp_path: Path):
    corpus = corpus_of(tmp_path, ["a few words"])
    with pytest.raises(InputError, match=r"5,000 were asked for. It reads 9 .* vocabulary\.entries"):
        vocabulary.fn(Vocabulary(entries=5000), corpus)
    with pytest.raises(InputError, match="filter"):
        vocabulary.fn(Vocabulary(entries=256), filtered(corpus, min_characters=1000))
    assert artifacts_of("vocabulary") == []
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_words_seen_twice_or_more_are_entries():
    words = set(train_wordpiece(count_words(["zebra crossing " * 2 + "quixotic"]), 256).get_vocab())
    assert {"zebra", "crossing"} <= words
    assert "quixotic" not in words


def test_transformers_and_tokenizers_load_the_folder_and_encode_as_we_do(made: Artifact, tokenizer: Tokenizer):
    ours = tokenizer
    theirs = AutoTokenizer.from_pretrained(made.path)
    known = ours.get_vocab()
    assert sorted(known.values()) == list(range(1000))
    assert [known[token] for token in SPECIALS] == [PAD, UNK, CLS, SEP, MASK] == [0, 1, 2, 3, 4]
    assert [getattr(theirs, f"{name}_token_id") for name in ("pad", "unk", "cls", "sep", "mask")] == [0, 1, 2, 3, 4]
    [sentence, *awkward] = encode(ours, [SENTENCE, *AWKWARD[:6]])
    assert ours.decode(sentence) == SENTENCE
    assert theirs(AWKWARD[:6])["input_ids"] == [[CLS, *ids, SEP] for ids in awkward]
    padded = theirs(["a", SENTENCE], ["the", SENTENCE], padding=True)
    assert padded["input_ids"][1] == [CLS, *sentence, SEP, *sentence, SEP]
    assert padded["input_ids"][0][-1] == PAD
    assert padded["attention_mask"][0] == [int(token != PAD) for token in padded["input_ids"][0]]
    assert set(padded) == {"input_ids", "attention_mask"}


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


def test_encoding_is_that_of_a_plain_word_piece(tokenizer: Tokenizer):
    words = tokenizer.get_vocab()
    rng = random.Random(2)
    texts = AWKWARD + [random_text(rng, sorted(words), 60) for _ in range(300)]
    for text, ids in zip(texts, encode(tokenizer, texts), strict=True):
        assert ids == naive.word_pieces(text, words, UNK), repr(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
        assert not set(ids) & {PAD, CLS, SEP, MASK}, "special tokens in a text are text"
    assert encode(tokenizer, []) == []


@pytest.mark.parametrize(
    ("limit", "size"),
    [
        ("tokenizer.PIECE_CHARACTERS", 1),
        ("tokenizer.PIECE_CHARACTERS", 50),
        ("encoder.KNOWN_WORDS", 100),
        ("wordpiece.AT_ONCE", 30),
    ],
)
def test_texts_in_pieces_and_encoders_that_forget_give_the_same_tokens(tokenizer, monkeypatch, toy_texts, limit, size):
    rng = random.Random(3)
    drawn = [random_text(rng, sorted(tokenizer.get_vocab()), 100) for _ in range(4)]
    texts = [*AWKWARD, *toy_texts[:2], *drawn, "word" * 30, ""]
    expected = encode(tokenizer, texts)
    monkeypatch.setattr(f"tasks.text.{limit}", size)
    assert (len(list(pieces(toy_texts[0]))) > 2) == (limit == "tokenizer.PIECE_CHARACTERS")
    assert encode(tokenizer, texts) == expected
    encoder = Encoder(tokenizer)
    assert [encoder([text]).ids.tolist() for text in texts] == expected


def test_a_unit_hash_depends_on_text_and_salt_alone_and_is_spread_evenly():
    hashes = np.array([unit_hash(str(i)) for i in range(20_000)])
    assert 0 <= hashes.min() < hashes.max() < 1
    counts, _ = np.histogram(hashes, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 45, "chi squared, 19 degrees of freedom: p > 0.0007"
    other = np.array([unit_hash(str(i), Salt.TRAIN_VOCABULARY) for i in range(20_000)])
    assert abs(np.corrcoef(hashes, other)[0, 1]) < 0.03


def test_a_sample_is_the_same_documents_in_any_order_and_of_about_the_size(store: Path, tmp_path: Path, toy_texts):
    texts = [f"{text} {i}" for i in range(5) for text in toy_texts]
    chosen = [text for text in texts if unit_hash(text, Salt.TRAIN_VOCABULARY) < 0.25]
    for number, order in enumerate((texts, texts[::-1])):
        corpus = corpus_of(tmp_path, order, part_megabytes=0.05)
        megabytes = corpus.stats["characters"] / 4e6
        counts, used = count_sample(corpus, megabytes, tmp_path / f"{number}", "count")
        assert counter(counts) == counter(count_words(chosen))
        assert used == {"documents": len(chosen), "characters": sum(map(len, chosen))}
        assert 0.8 < used["characters"] / (1e6 * megabytes) < 1.2
    made = vocabulary.fn(Vocabulary(entries=256, sample_megabytes=megabytes), corpus)
    assert (made.path / "tokenizer.json").read_text() == train_wordpiece(counts, 256).to_str(pretty=True)
    assert {name: made.stats["trained_on"][name] for name in used} == used


def test_counts_are_those_of_a_plain_split_in_pieces_and_batches_too(texts: list[str], monkeypatch):
    expected = Counter(word for text in texts for word in naive.ascii_words(text) if len(word) <= 100)
    assert counter(count_words(texts)) == expected
    monkeypatch.setattr("tasks.text.tokenizer.PIECE_CHARACTERS", 500)
    assert counter(count_words(texts)) == expected
    some = texts[::20]
    assert counter(sum_counts(count_words([text]) for text in some)) == counter(count_words(some))
    assert counter(sum_counts([])) == counter(count_words([])) == {}


def test_scaled_down_words_keep_their_shares_rare_ones_together(monkeypatch: pytest.MonkeyPatch):
    counts = {f"often{i}": 1000 + i for i in range(50)} | {f"once{i}": 1 for i in range(20_000)}
    lines = list(training_lines(table(counts)))
    assert Counter(word for line in lines for word in line.split()) == counts
    assert {len(line.split()) for line in lines[:-1]} == {vocabulary_stage.LINE_WORDS}
    monkeypatch.setattr(vocabulary_stage, "TRAINING_WORDS", sum(counts.values()) // 10)
    fewer = Counter(word for line in training_lines(table(counts)) for word in line.split())
    assert all(abs(fewer[word] - n / 10) < 1 for word, n in counts.items())
    assert abs(sum(fewer[f"once{i}"] for i in range(20_000)) - 2000) < 150, "three standard deviations are 127"


@pytest.mark.parametrize(("entries", "bits"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)])
def test_more_than_65536_entries_have_ids_of_32_bits(entries: int, bits: type):
    words = [*SPECIALS, *(f"w{i}" for i in range(5, entries))]
    tokenizer = tokenizer_of(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    ids, ends = Encoder(tokenizer)([f"w{entries - 1} w5", "w65535"])
    assert (ids.dtype, ids.tolist(), ends.tolist()) == (bits, [entries - 1, 5, 65_535], [2, 3])


def test_tokens_are_counted_as_encoded_and_long_words_by_their_characters(tokenizer, texts: list[str]):
    plain = [text for text in texts + AWKWARD if max(map(len, text.split()), default=0) <= 100]
    assert Encoder(tokenizer).tokens(plain).tolist() == list(map(len, encode(tokenizer, plain)))
    assert Encoder(tokenizer).tokens(["a " + "x" * 101, "", "!" * 100 + " ."]).tolist()[:2] == [102, 0]


def test_the_entries_are_counted_by_their_kind_and_use(made: Artifact, corpus: Artifact):
    stats = made.stats
    entries = pq.read_table(made.path / "entries.parquet").to_pandas()
    words = dict(zip(entries["entry"], entries["id"], strict=True))
    assert words == load_tokenizer(made.path).get_vocab()
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


def test_special_entries_are_not_unused_though_unk_occurs():
    kinds = ["special", "special", "letters", "digits"]
    assert unused_entries(pa.table({"kind": kinds, "occurrences": [0, 3, 0, 5]})) == 1


def test_an_entry_is_of_the_kind_of_its_characters():
    kinds = {
        "letters": ["the", "##ing", "हि", "##ि"],
        "digits": ["1984"],
        "punctuation": ["##...", "##", "__"],
        "mixed": ["x86"],
        "special": ["[SEP]"],
    }
    assert {kind: [entry for entry in entries if kind_of(entry) == kind] for kind, entries in kinds.items()} == kinds


def test_use_is_that_of_the_encoded_text_however_many_words_are_known_at_once(tokenizer, texts, monkeypatch):
    some = [text for text in texts if max(map(len, naive.ascii_words(text))) <= 100]
    expected = np.bincount(np.concatenate(encode(tokenizer, some)), minlength=1000)
    for at_once in (1 << 20, 100):
        monkeypatch.setattr(vocabulary_stage, "KNOWN_WORDS", at_once)
        assert entries_table(tokenizer, count_words(some))["occurrences"].to_pylist() == expected.tolist()


# Any script

SCRIPTS = {
    "zh": "今天天气很好，我们去公园散步，然后回家吃饭。他说：“明天见！”漢字㐀",
    "ja": "今日はとても良い天気です。公園へ行きましょう！カタカナとひらがな、漢字。",
    "ar": "الطقس جميل اليوم، سنذهب إلى الحديقة. هل تأتي معنا؟ نعم.",
    "hi": "आज मौसम बहुत अच्छा है। क्या आप हमारे साथ बगीचे में चलेंगे? क़लम",
    "uk": "Сьогодні гарна погода, ходімо до парку. Чи підеш ти з нами? Їжак і ґудзик.",
    "de": "Heute ist schönes Wetter; wir gehen in den Park. Straße, ﬁnden, 5\u00a0mg, court—law, ÄÖÜ.",
}


def any_script(seed: int, size: int = 200) -> list[str]:
    """Texts of the words of all scripts in any order, with junk between them."""
    rng = random.Random(seed)
    parts = [part for text in SCRIPTS.values() for part in (*text.split(), text)]
    parts += ["word", "THE", "x86_64", *"😀ΣİΑ", "👩\u200d👧", "\u0301", "e\u0301", "\ufffd", "\u00ad", "가나다"]
    return [
        "".join(rng.choice(parts) + rng.choice(["", " ", "\n"]) for _ in range(rng.randrange(40))) for _ in range(size)
    ]


def typographic(seed: int, size: int) -> list[str]:
    """Texts of typographic punctuation and spaces."""
    rng = random.Random(seed)
    signs = "-–—−’‘“”«´″…•\u00a0\u2009\u202f\u2028⁄'\"` é漢a1"
    return ["".join(rng.choices([*signs, "word", " it"], k=60)) for _ in range(size)]


@pytest.mark.parametrize(
    "settings",
    [
        {"characters": "ascii", "punctuation": "plain"},
        {"characters": "unicode", "punctuation": "plain"},
        {"characters": "unicode", "form": "NFC", "lowercase": False},
        {"characters": "unicode", "strip_accents": True, "alphabet": 100},
    ],
    ids=str,
)
def test_text_of_any_script_and_typography_is_encoded_as_transformers_does(store, tmp_path: Path, settings: dict):
    corpus = corpus_of(tmp_path, any_script(1) + [path.read_text() for path in CODE[:9]] + typographic(3, 50))
    made = vocabulary.fn(Vocabulary(entries=600, **settings), corpus)
    ours = load_tokenizer(made.path)
    theirs = AutoTokenizer.from_pretrained(made.path)
    texts = any_script(2, 100) + AWKWARD[:6] + typographic(4, 200)
    assert encode(ours, texts) == theirs(texts, add_special_tokens=False)["input_ids"]
    known = ours.get_vocab()
    assert sorted(known.values()) == list(range(600))
    assert set(known) > {f"{mark}{c}" for c in ALPHABET for mark in ("", "##")}, "all of ASCII"
    assert not any("\u4e00" <= c <= "\u9fff" for entry in known if entry.startswith("##") for c in entry)
    assert "##ि" not in known or "ि" not in known, "only where it occurs"
    assert ("T" in known) == ("lowercase" in settings)


def test_the_alphabet_has_the_most_frequent_characters_and_leaves_room_for_words():
    often = "жшщюяэ"
    rare = "ѣѳѵ"
    text = " ".join([*(c * 2 for c in often for _ in range(50)), *(f"{c}ж" for c in rare for _ in range(3)), "ѫж"])
    counts = count_words([text], UNICODE)
    known = train_wordpiece(counts, 2000, UNICODE).get_vocab()
    assert {*often, *(f"##{c}" for c in often), *rare} <= set(known)
    assert not {"ѫ", *(f"##{c}" for c in rare)} & set(known), "once is too rare; within words they don't occur"
    few = train_wordpiece(counts, 2000, UNICODE.model_copy(update={"alphabet": len(often)})).get_vocab()
    assert {*often} <= set(few)
    assert not {*rare} & set(few)
    small = train_wordpiece(counts, 280, UNICODE).get_vocab()
    assert sum(len(entry.removeprefix("##")) == 1 for entry in small) <= 140 + 2, "half; # and ## are both one"
    tokenizer = train_wordpiece(counts, 280, UNICODE)
    assert encode(tokenizer, ["ѫж"]) == [[UNK]], "there is nothing smaller than a character"


def test_words_of_up_to_100_characters_are_counted_in_any_script():
    counts = count_words(["ж" * 100 + " " + "ж" * 101], UNICODE)
    assert counts["word"].to_pylist() == ["ж" * 100]


def test_the_settings_for_unicode_enter_the_key_only_with_unicode_and_punctuation_only_if_plain():
    assert Vocabulary().identity() == {"entries": 32_768, "sample_megabytes": 1000.0}
    assert Vocabulary(characters="unicode", form="NFC").identity()["form"] == "NFC"
    assert "punctuation" not in Vocabulary(characters="unicode").identity()
    for text in ("ascii", "unicode"):
        plain = Vocabulary(characters=text, punctuation="plain").identity()
        assert plain == Vocabulary(characters=text).identity() | {"punctuation": "plain"}


@pytest.mark.skipif("CRAM_REAL_DATA" not in os.environ, reason="CRAM_REAL_DATA names no directory with real text")
@pytest.mark.parametrize("language", list(SCRIPTS))
def test_real_text_of_six_scripts_has_the_ids_of_transformers(store: Path, tmp_path: Path, language: str):
    file = Path(os.environ["CRAM_REAL_DATA"]) / "scripts" / f"{language}.jsonl.zst"
    corpus = download.fn(Download(source="files", files=[str(file)], documents=0))
    made = vocabulary.fn(Vocabulary(entries=5000 if language != "zh" else 4000, characters="unicode"), corpus)
    texts = [document.text for document in documents_of(corpus)]
    theirs = AutoTokenizer.from_pretrained(made.path)(texts, add_special_tokens=False)["input_ids"]
    assert encode(load_tokenizer(made.path), texts) == theirs
    assert np.mean(np.concatenate(theirs) == UNK) < 0.01


def test_nothing_is_learned_from_a_word_with_a_character_that_gets_no_entry():
    words = pa.table({"word": ["the", "zqzqzqzq☃"], "count": [300, 1]})  # a character that occurs once gets none
    known = train_wordpiece(words, 256, UNICODE).get_vocab()
    assert "the" in known
    assert {entry for entry in known if "z" in entry} == {"z", "##z"}
