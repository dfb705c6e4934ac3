"""Words found by array operations, against plain Python and the vocabulary's own normaliser."""

import random
import re

import numpy as np
import pytest

from tasks.text import words
from tasks.text.tokenizer import normalizer
from tasks.text.words import grams, hashes, normalise, split


def random_texts(seed: int, size: int = 200) -> list[str]:
    """Words, signs, white space of every kind and characters from all over Unicode."""
    rng = random.Random(seed)
    signs = [*" \n\t\v\f\r.,'`\"_-#[]!", "``", "''", "word", "Émile", "x86_64", "\N{NO-BREAK SPACE}", "漢字"]
    return ["".join(rng.choice(signs) for _ in range(rng.randrange(60))) for _ in range(size)]


def test_every_character_is_normalised_as_the_vocabulary_does():
    theirs = normalizer()
    texts = ["''''' ``` '`'", "'\N{HIRAGANA LETTER A}'", "`\N{GREEK VARIA}", "'\x00'", *random_texts(1)]
    for start in range(0, 0x110000, 0x1000):  # between letters, so that marks can combine
        texts.append("".join(f"a{chr(c)}b" for c in range(start, start + 0x1000) if not 0xD800 <= c < 0xE000))
    for text in texts:
        assert normalise(text).decode() == theirs.normalize_str(text), repr(text[:60])


@pytest.mark.parametrize("slice_bytes", [1, 7, 1 << 18])
def test_words_and_their_counts_are_those_of_a_plain_split(slice_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(words, "SLICE", slice_bytes)
    texts = ["", *random_texts(2), " ", ""]
    found, start = split(texts), 0
    assert len(found.ends) == len(texts)
    for text, end in zip(texts, found.ends.tolist(), strict=True):
        here = [found.different[k] for k in found.indices[start:end].tolist()]
        assert here == re.findall(r"\w+|[^\w\s]+", normalise(text).decode(), re.ASCII), repr(text)
        start = end
    assert start == len(found.indices)
    assert len(set(found.different)) == len(found.different)
    counts = words.count(texts)
    assert counts.schema == words.COUNTS
    assert counts["word"].to_pylist() == found.different
    assert counts["count"].to_pylist() == np.bincount(found.indices).tolist()


@pytest.mark.parametrize("texts", [[], [""], ["", " \n", "漢字"]])
def test_nothing_has_no_words(texts: list[str]):
    assert len(words.count(texts)) == 0
    found = split(texts)
    assert (found.different, found.ends.tolist()) == ([], [0] * len(texts))
    assert [part.tolist() for part in grams(hashes(found), found.ends, 3)] == [[], [0] * len(texts)]


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_two_grams_have_one_hash_exactly_when_their_words_are_the_same(n: int):
    texts = [" ".join(random.Random(i).choices("abc", k=i % 30)) for i in range(300)]
    found = split(texts)
    hashed, ends = grams(hashes(found), found.ends, n)
    plain = [tuple(text.split()[i : i + n]) for text in texts for i in range(len(text.split()) - n + 1)]
    assert len(hashed) == len(plain) == ends[-1]
    assert np.diff(ends, prepend=0).tolist() == [max(0, len(text.split()) - n + 1) for text in texts]
    assert len({*zip(hashed.tolist(), plain, strict=True)}) == len(set(plain)) == len(set(hashed.tolist()))


def test_a_hash_does_not_depend_on_what_else_is_split():
    alone, among = split(["one two three four"]), split(["four", "two one", "one two three four"])
    assert grams(hashes(alone), alone.ends, 3)[0].tolist() == grams(hashes(among), among.ends, 3)[0].tolist()
