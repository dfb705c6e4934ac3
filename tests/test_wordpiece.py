"""WordPiece by a trie, against the model of `tokenizers`."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from tasks.text import wordpiece
from tasks.text.wordpiece import LONGEST_WORD, NONE, WordPieces

LETTERS = "abcß中ж#😀_\u0301"


def random_words(rng: random.Random, count: int, longest: int) -> list[str]:
    return ["".join(rng.choices(LETTERS, k=rng.randint(1, longest))) for _ in range(count)]


def divided(vocabulary: dict[str, int], given: list[str]) -> list[list[int]]:
    data = [word.encode() for word in given]
    stops = np.cumsum([len(word) + 1 for word in data]) - 1  # a space behind each
    ids, lengths = WordPieces(vocabulary).divide(b" ".join([*data, b""]), stops - list(map(len, data)), stops)
    return [own.tolist() for own in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("seed", range(4))
def test_words_are_divided_as_by_tokenizers(monkeypatch, seed: int):
    rng = random.Random(seed)
    letters = rng.sample(LETTERS, 7)  # so that some words can't be divided
    entries = [*letters, *(f"##{letter}" for letter in letters), *random_words(rng, 40, 3)]
    entries += [f"##{part}" for part in random_words(rng, 200, 5)]
    vocabulary = {"[UNK]": 0} | {entry: number + 1 for number, entry in enumerate(dict.fromkeys(entries))}
    given = random_words(rng, 2000, 12) + random_words(rng, 20, 2 * LONGEST_WORD)
    given += ["a" * LONGEST_WORD, "a" * (LONGEST_WORD + 1), "ж" * LONGEST_WORD, "😀" * (LONGEST_WORD + 1), "##", "##a"]
    theirs = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=LONGEST_WORD))
    expected = [[vocabulary.get(token, 0) or NONE for token in theirs.encode(word).tokens] for word in given]
    assert divided(vocabulary, given) == expected
    monkeypatch.setattr(wordpiece, "AT_ONCE", 3)
    assert divided(vocabulary, given[-100:]) == expected[-100:]
    assert [NONE] in expected
    assert max(map(len, expected)) > 3


def test_a_vocabulary_without_continuations_has_only_whole_words():
    assert divided({"a": 7, "ab": 8}, ["a", "ab", "aba", "b"]) == [[7], [8], [NONE], [NONE]]


def test_no_words_are_no_ids():
    ids, lengths = WordPieces({"a": 0}).divide(b"", np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert (len(ids), len(lengths)) == (0, 0)
