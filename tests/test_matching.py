"""Words for matching and their runs, against plain Python, character by character."""

import random
import sys
import unicodedata
from itertools import pairwise

import naive
import numpy as np
import pytest
import regex

from tasks.text import matching, words
from tasks.text.encoder import portions
from tasks.text.matching import hash_ngrams, matching_words
from tasks.text.ngrams import words_in

EVERY = [chr(c) for c in range(sys.maxunicode + 1) if not 0xD800 <= c < 0xE000]
ALIKE = regex.compile(r"[\p{Unified_Ideograph}가-힣]")  # of which one in 50 is read
SAMPLES = [  # the same words
    ["Die Straße führt über Köln. ", "die STRASSE, fuhrt\nuber_koln", "Die Stra\u00adße führt ü\u200bber “Köln”"],
    ["Ёлка й Ґанок № 5", "ЁЛКА Й ҐАНОК № 5", "елка, и. ґанок no 5"],
    ["السَّلَامُ عَلَيْكُمْ", "السلام — عليكم!", "ﺍﻟﺴﻼﻡ ﻋﻠﻴﻜﻢ"],
    ["हिन्दी ज़रूर", "हिन्दी, ज़रूर।", "हिन्दी जरूर"],
    ["ガラスの２枚", "ｶﾞﾗｽの2枚", "カラス の、２ 枚"],
    ["今天天气，很好。", "今天\n天气\u3000很好", "今 天 天 气 很 好 !"],
    ["한국어 문장", "(한국어)\t문장"],
    ["ภาษาไทย ๑๒", "ภาษา\u200bไทย “๑๒”"],
    ["ﬁne ½ ™ Ａ①", "FINE 1/2 TM a1", "fi\u0301ne 1⁄2 ᵗᵐ A1"],
]


def hashes_of(found: list[str]) -> list[int]:
    """The hashes of words, wherever they stand."""
    data = [word.encode() for word in found]
    stops = np.cumsum([len(word) + 1 for word in data], dtype=np.int64) - 1  # a space behind each
    starts = stops - np.array([len(word) for word in data], dtype=np.int64)
    return words.hashes_of(b" ".join([*data, b""]), starts, stops).tolist()


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 17, 127, 128, 129, 300])
def test_words_of_every_length_that_differ_in_one_letter_have_their_own_hashes_in_any_place(size: int):
    word = f"{'x1' * size:.{size}}"
    different = [word, *(f"{word[:place]}z{word[place + 1 :]}" for place in range(size)), f"{word}x"]
    hashed = matching_words([" ".join(different)]).hashes.tolist()
    assert len(set(hashed)) == len(different)
    assert matching_words([f"a {word} b" for word in different]).hashes.tolist()[1::3] == hashed
    assert 0 not in hashed, "which is no hash"


@pytest.mark.parametrize("bits", [1, 5, 8])
def test_hashes_are_numbered_in_the_order_in_which_they_are_added(bits: int):
    rng = np.random.default_rng(0)
    hashed = np.unique(rng.integers(1, 1 << 64, 120, dtype=np.uint64))
    hashed = np.append(hashed, np.uint64(2**64 - 1) - np.arange(40, dtype=np.uint64))  # the last slots, then the first
    known = words.Numbers(bits)  # fewer slots than hashes: there are more when they are needed
    for some in np.array_split(hashed, 3):
        assert (known.find(some) == -1).all()
        known.add(some)
    assert known.find(hashed).tolist() == list(range(len(hashed)))


def mixtures(seed: int, size: int = 60) -> list[str]:
    """Characters from all over Unicode, and such as change beside others."""
    rng = random.Random(seed)
    signs = [*"  aB\n.,_7-éßЙ漢字かなガ한İ①ﬁ½ำΣς\u0301\u0327\u093f\u094d\u200d\u00ad\0😀"]
    known = [c for c in EVERY if unicodedata.category(c)[0] != "C"]
    return ["".join(rng.choice(rng.choice((known, signs))) for _ in range(rng.randrange(300))) for _ in range(size)]


def test_words_are_those_of_a_plain_reading_for_every_assigned_character_and_have_places():
    known = [c for c in EVERY if unicodedata.category(c) not in ("Cn", "Co") and not ALIKE.match(c)]
    known += [c for c in EVERY[0x3400::50] if unicodedata.category(c) == "Lo"]
    texts = ["".join(f"a{c}b{c} " for c in known[i : i + (1 << 14)]) for i in range(0, len(known), 1 << 14)]
    texts += mixtures(1)
    found = matching_words(texts)
    for text, (start, end) in zip(texts, pairwise([0, *found.ends.tolist()]), strict=True):
        own = found.hashes[start:end].tolist()
        assert own == hashes_of(naive.words(text)), repr(text[:99])
        placed = list(words_in(text))
        assert own == hashes_of([word.word for word in placed]), repr(text[:99])
        assert found.halves[start:end].tolist() == [word.half for word in placed]
        assert all(0 <= word.start < word.end <= len(text) for word in placed)


def test_characters_that_python_does_not_know_are_read_alike_with_and_without_places():
    text = "".join(f"a{c} " for c in EVERY if unicodedata.category(c) == "Cn" and ord(c) < 0x32000)
    assert matching_words([text]).hashes.tolist() == hashes_of([word.word for word in words_in(text)])


@pytest.mark.parametrize("texts", SAMPLES, ids=["de", "uk", "ar", "hi", "ja", "zh", "ko", "th", "signs"])
def test_words_are_the_same_however_a_text_is_written(texts: list[str]):
    names = ("NFC", "NFKC") if "한" in texts[0] else ("NFC", "NFD", "NFKC", "NFKD")
    forms = [unicodedata.normalize(name, text) for text in texts for name in names]
    first, *others = [matching_words([text]).hashes.tolist() for text in [*texts, *forms, texts[0].upper()]]
    assert len(first) > 1
    assert all(other == first for other in others)


@pytest.mark.parametrize("texts", [[], [""], ["", " \n", "。\u0301"]])
def test_nothing_has_no_words(texts: list[str]):
    found = matching_words(texts)
    assert (len(found.hashes), found.ends.tolist()) == (0, [0] * len(texts))
    for short in (False, True):
        assert [part.tolist() for part in hash_ngrams(found, 3, short=short)] == [[], [0] * len(texts)]


@pytest.mark.parametrize(("by_halves", "short"), [(False, True), (True, False)])
@pytest.mark.parametrize("letters", ["abc", "漢字仮", "ab漢字"])
@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_runs_have_one_hash_exactly_when_their_words_are_the_same(n, letters: str, by_halves, short, monkeypatch):
    texts = [" ".join(random.Random(i).choices(letters, k=i % 30)) for i in range(300)]
    found = matching_words(texts)
    hashed, ends = hash_ngrams(found, n, by_halves, short)
    plain = [naive.runs(text, n, by_halves, short) for text in texts]
    assert np.diff(ends, prepend=0).tolist() == list(map(len, plain))
    every = [run for own in plain for run in own]
    assert len({*zip(hashed.tolist(), every, strict=True)}) == len(set(every)) == len(set(hashed.tolist()))
    monkeypatch.setattr(matching, "BLOCK", 7)
    assert [part.tolist() for part in hash_ngrams(found, n, by_halves, short)] == [hashed.tolist(), ends.tolist()]


def test_long_texts_are_read_in_pieces_that_lose_and_divide_nothing(monkeypatch: pytest.MonkeyPatch):
    texts = ["x" * 500, "", "漢字" * 300, "ab cd " * 200, "ゼロ一二" * 99, "- , " * 90]
    whole = matching_words(texts)
    placed = [list(words_in(text)) for text in texts]
    monkeypatch.setattr("tasks.text.tokenizer.PIECE_CHARACTERS", 97)
    assert len(list(portions(texts))) > 20
    assert all(np.array_equal(a, b) for a, b in zip(whole, matching_words(texts), strict=True))
    assert [list(words_in(text)) for text in texts] == placed
