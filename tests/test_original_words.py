"""The words of a text as it stands, and the tokens, bytes and losses of reading that belong to them."""

import random
import unicodedata

import numpy as np
import pytest
from tokenizers.models import WordPiece

from tasks.text.original_words import WORD, divided, heldout_of
from tasks.text.tokenizer import ALPHABET, PAD, SEP, SPECIALS, UNK, tokenizer_of

PIECES = ["th", "##e", "##ing", "court", "##law", "##.", "##)"]
CHARACTERS = "aeéßñ b–—'’“.,()$+_½²ﬁ\u00a0\u200b\t\n\x07中文かह\u093f😀"


@pytest.fixture(scope="module")
def tokenizer():
    """Letters and some longer pieces, behind cram's own normaliser."""
    entries = [*SPECIALS, *(c for c in ALPHABET if c != "~"), *(f"##{c}" for c in ALPHABET if c != "~"), *PIECES]
    return tokenizer_of(
        WordPiece({entry: number for number, entry in enumerate(dict.fromkeys(entries))}, unk_token="[UNK]")
    )


def words_by_categories(text: str) -> list[str]:
    """The words, character by character."""

    def kind(character: str) -> str:
        name = unicodedata.name(character, "")
        if name.startswith(("CJK UNIFIED", "HIRAGANA", "KATAKANA")):
            return f"alone {random.random()}"
        return "mark" if unicodedata.category(character)[0] in "PS" and character != "_" else "letter"

    words, before = [], None
    for character in text:
        now = None if character.isspace() else kind(character)
        if now is not None:
            words[-1:] = [words[-1] + character] if now == before else [*words[-1:], character]
        before = now
    return words


@pytest.mark.parametrize("seed", range(20))
def test_words_lie_between_white_space_and_punctuation(seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choices(CHARACTERS, k=300))
    assert WORD.findall(text) == words_by_categories(text)


@pytest.mark.parametrize("seed", range(20))
def test_each_token_is_a_piece_of_the_word_that_holds_its_characters(tokenizer, seed: int):
    rng = random.Random(seed)
    text = "".join(rng.choices(CHARACTERS, k=300))
    ids, words, (tokens, count, characters, size, unread) = divided(text, tokenizer)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert ids.tolist() == encoding.ids
    spans = [match.span() for match in WORD.finditer(text)]
    for word, (begin, end) in zip(words.tolist(), encoding.offsets, strict=True):
        assert spans[word][0] < end <= spans[word][1] or begin == end
    assert (tokens, count, characters, size) == (len(ids), len(spans), len(text), len(text.encode()))
    read = {
        place
        for token, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)
        if token != UNK
        for place in range(a, b)
    }
    within = {place for begin, end in spans for place in range(begin, end)}
    assert unread == sum(len(text[place].encode()) for place in within - read)


def test_what_the_normaliser_deletes_or_the_vocabulary_lacks_is_unread(tokenizer):
    for text, unread in {
        "the court": 0,
        "naïve": 0,
        "5–6": 3,
        "中文 the": 6,
        "ﬁle": 3,
        "a ~ the": 1,
        "": 0,
        " \n": 0,
    }.items():
        *_, sizes = divided(text, tokenizer)
        assert sizes[-1] == unread, text


def test_words_are_the_same_for_every_vocabulary_and_length(tokenizer):
    rng = random.Random(7)
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randint(0, 200))) for _ in range(30)]
    letters = tokenizer_of(WordPiece({entry: n for n, entry in enumerate([*SPECIALS, *"abe"])}, unk_token="[UNK]"))
    made = [heldout_of(texts, words, length) for words in (tokenizer, letters) for length in (16, 64)]
    for held in made[1:]:
        assert np.array_equal(held.documents[:, 1:4], made[0].documents[:, 1:4])
        rounds = dict(zip(held.words.ravel().tolist(), held.rounds().ravel().tolist(), strict=True))
        first = dict(zip(made[0].words.ravel().tolist(), made[0].rounds().ravel().tolist(), strict=True))
        assert {word: rounds[word] for word in rounds.keys() & first.keys()} == {
            w: first[w] for w in rounds.keys() & first.keys()
        }
    begun = heldout_of(texts, tokenizer, 16, begin=2)
    assert (begun.words[begun.sequences == 2] == -1).all()
    assert (begun.sequences == 2).sum() == len(texts)
    assert (begun.sequences == SEP).sum() == len(texts)
    assert ((begun.words >= 0).sum(), begun.tokens) == (made[0].tokens, made[0].tokens)
    assert (begun.words[begun.sequences == PAD] == -1).all()
