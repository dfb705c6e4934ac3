"""Words of normalised texts, against `tokenizers`; words of held-out texts as they stand, against plain Python."""

import functools
import random
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import normalizers
from tokenizers.models import WordPiece
from toys import tokenizer_in

from model.errors import InputError
from model.heldout import Heldout
from tasks.text import words
from tasks.text.tokenizer import (
    ALPHABET,
    PAD,
    SEP,
    SPECIALS,
    UNK,
    WORD,
    divide_text,
    heldout_of,
    load_tokenizer,
    normaliser_of,
    normalizer,
    pre_tokenizer,
    tokenizer_of,
)
from tasks.text.words import ASCII, UNICODE, Normaliser, normalise, split

NORMALISERS = [  # each value of each setting, form and case in all combinations
    ASCII,
    Normaliser(punctuation="plain"),
    UNICODE,
    Normaliser(characters="unicode", punctuation="plain", strip_accents=True),
    Normaliser(characters="unicode", lowercase=False),
    Normaliser(characters="unicode", form="NFC", strip_accents=True),
    Normaliser(characters="unicode", form="NFC", lowercase=False, punctuation="plain"),
]
CHANGING = [*range(0x20000), *range(0x2F800, 0x2FA20), *range(0xE0000, 0xE1000)]  # no other character becomes another
THOROUGHLY = {ASCII: CHANGING, UNICODE: range(0x110000), NORMALISERS[3]: CHANGING}


def random_texts(seed: int, size: int = 200) -> list[str]:
    """Words, signs, white space of every kind and characters from all over Unicode."""
    rng = random.Random(seed)
    signs = [*" \n\t\v\f\r.,'`\"_-#[]!", "``", "''", "word", "Émile", "x86_64", "\N{NO-BREAK SPACE}", "漢字"]
    return ["".join(rng.choice(signs) for _ in range(rng.randrange(60))) for _ in range(size)]


@functools.cache
def mixtures(seed: int, size: int) -> list[str]:
    """Characters of all scripts, known to Python or not, and such as change beside others."""
    rng = random.Random(seed)
    known = [chr(code) for code in range(0x40000) if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs")]
    signs = [*"  aÉ\n.,_漢字かな가Σİ①ﬁ\u0301\u0327\u093f\u200d\u200c\u00ad\ufffd㋿Ა❤\ufe0f"]
    return ["".join(rng.choice(rng.choice((known, signs))) for _ in range(rng.randrange(2000))) for _ in range(size)]


def words_of(found: words.Words) -> list[list[str]]:
    """The words of each text."""
    every = [found.data[a:b].decode() for a, b in zip(found.starts.tolist(), found.stops.tolist(), strict=True)]
    return [every[a:b] for a, b in pairwise([0, *found.ends.tolist()])]


def between_letters(codes: Sequence[int]) -> list[str]:
    """These characters between letters, so that marks can combine; and decomposed."""
    texts = []
    for start in range(0, len(codes), 0x1000):
        every = [chr(code) for code in codes[start : start + 0x1000] if not 0xD800 <= code < 0xE000]
        texts.append("".join(f"a{character}b" for character in every))
        decomposed = [unicodedata.normalize("NFD", character) for character in every]
        texts += [f"{some}a" for some in decomposed if len(some) > 1 and ord(some[0]) < 0x1100]
    return texts


@pytest.mark.parametrize("how", NORMALISERS, ids=str)
def test_every_character_is_normalised_and_divided_as_the_vocabulary_does(how: Normaliser):
    normalise_theirs = normalizer(how).normalize_str
    divide_theirs = pre_tokenizer(how).pre_tokenize_str
    texts = [
        "''''' ``` '`'",
        "'\N{HIRAGANA LETTER A}'",
        "`\N{GREEK VARIA}",
        "'\x00'",
        *random_texts(1),
        *mixtures(3, 20),
    ]
    for text in texts + between_letters(THOROUGHLY.get(how, [])):
        expected = normalise_theirs(text)
        assert normalise(text, how).decode() == expected, repr(text[:60])
        [here] = words_of(split([text], how))
        assert here == [word for word, _ in divide_theirs(expected)], repr(text[:60])


@pytest.mark.parametrize("how", NORMALISERS, ids=str)
def test_a_tokenizer_tells_its_normaliser_and_a_foreign_one_is_refused(how: Normaliser):
    made = tokenizer_of(WordPiece({"[UNK]": 0}, unk_token="[UNK]"), how)
    assert normaliser_of(made) == how
    made.normalizer = normalizers.Lowercase()
    with pytest.raises(InputError):
        normaliser_of(made)


@pytest.mark.parametrize(
    ("text", "as_the_paper", "plain"),
    [
        ("Don’t", "dont", "don't"),
        ("1889–1895", "18891895", "1889-1895"),
        ("£5–£10", "510", "5-10"),
        ("a\u00a0b\u2009c\u202fd", "abcd", "a b c d"),
        ("wait—no…", "waitno", "wait--no..."),
        ("“so” ‘it’ said ‘‘I’’", "so it said i", '"so" \'it\' said "i"'),
        ("−3 ≤ x", "3  x", "-3  x"),
        ("• one\u2028• two", " one two", "* one * two"),
        ("co\u00adopt naïve\u200b 漢", "coopt naive ", "coopt naive "),
    ],
)
def test_typographic_punctuation_is_deleted_as_in_the_paper_or_made_plain(text: str, as_the_paper: str, plain: str):
    made_plain = Normaliser(punctuation="plain")
    assert normalise(text).decode() == as_the_paper
    assert normalise(text, made_plain).decode() == plain
    of_scripts = Normaliser(characters="unicode", punctuation="plain")
    expected = plain.replace("5-10", "£5-£10").replace("3  x", "3 ≤ x").replace("naive ", "naïve 漢")
    assert normalise(text, of_scripts).decode() == expected.replace('"i"', "''i''")


@pytest.mark.parametrize("changed", [{"form": "NFC"}, {"lowercase": False}, {"strip_accents": True}, {"alphabet": 500}])
def test_a_setting_for_unicode_without_unicode_is_an_error(changed: dict):
    with pytest.raises(ValidationError, match=next(iter(changed))):
        Normaliser(**changed)
    assert Normaliser(characters="unicode", **changed) != UNICODE


@pytest.mark.parametrize("cut", range(8))
def test_text_cut_within_a_character_is_divided(cut: int):
    data = "a漢 é\U00020000b".encode()
    for some in (data[cut:], data[: len(data) - cut], data[cut : len(data) - cut]):
        assert len(words.kinds_of(some)) == len(some)
        _, starts, stops = words.divide(some)
        assert len(starts) == len(stops)


@pytest.mark.parametrize("how", NORMALISERS, ids=str)
@pytest.mark.parametrize("texts", [["", *mixtures(2, 3), " ", "", *random_texts(3, 20)], [], [""], ["", " \n", ""]])
def test_a_text_is_divided_and_counted_alike_beside_other_texts(texts: list[str], how: Normaliser):
    every = words_of(split(texts, how))
    assert every == [words_of(split([text], how))[0] for text in texts]
    counts = words.count(texts, how)
    assert counts.schema == words.COUNTS
    assert dict(zip(*counts.to_pydict().values(), strict=True)) == Counter(chain(*every))


# Words of held-out texts as they stand

PIECES = ["th", "##e", "##ing", "court", "##law", "##.", "##)"]
CHARACTERS = "aeéßñ b–—'’“.,()$+_½²ﬁ\u00a0\u200b\t\n\x07中文かह\u093f😀"


@pytest.fixture(scope="module", params=["raw", "plain"])
def tokenizer(request):
    """Letters and some longer pieces, behind cram's own normaliser."""
    entries = [*SPECIALS, *(c for c in ALPHABET if c != "~"), *(f"##{c}" for c in ALPHABET if c != "~"), *PIECES]
    return tokenizer_of(
        WordPiece({entry: number for number, entry in enumerate(dict.fromkeys(entries))}, unk_token="[UNK]"),
        Normaliser(punctuation=request.param),
    )


def words_by_categories(text: str) -> list[str]:
    """The words, character by character."""

    def kind(character: str) -> str:
        name = unicodedata.name(character, "")
        if name.startswith("CJK UNIFIED"):
            return f"alone {random.random()}"
        return "mark" if unicodedata.category(character)[0] in "PS" and character != "_" else "letter"

    words = []
    before = None
    for character in text:
        now = None if character.isspace() else kind(character)
        if now is not None:
            words[-1:] = [words[-1] + character] if now == before else [*words[-1:], character]
        before = now
    return words


def test_words_lie_between_white_space_and_punctuation(rng: random.Random):
    text = "".join(rng.choices(CHARACTERS, k=6000))
    assert WORD.findall(text) == words_by_categories(text)


def test_each_token_is_a_piece_of_the_word_that_holds_its_characters(tokenizer, rng: random.Random):
    text = "".join(rng.choices(CHARACTERS, k=6000))
    ids, words, (tokens, count, characters, size, unread) = divide_text(text, tokenizer)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert ids.tolist() == encoding.ids
    spans = [match.span() for match in WORD.finditer(text)]
    for word, (begin, end) in zip(words.tolist(), encoding.offsets, strict=True):
        assert spans[word][0] < end <= spans[word][1] or begin == end
    assert (tokens, count, characters, size) == (len(ids), len(spans), len(text), len(text.encode()))
    known = [span for token, span in zip(encoding.ids, encoding.offsets, strict=True) if token != UNK]
    read = {place for begin, end in known for place in range(begin, end)}
    within = {place for begin, end in spans for place in range(begin, end)}
    lost = within - read
    for place in sorted(set(range(len(text))) - within):  # white space after it too
        if place - 1 in lost:
            lost.add(place)
    assert unread == sum(len(text[place].encode()) for place in lost)


def test_what_the_normaliser_deletes_or_the_vocabulary_lacks_is_unread(tokenizer):
    for text, unread in {
        "the court": 0,
        "naïve": 0,
        "5–6": 0 if normaliser_of(tokenizer).punctuation == "plain" else 3,
        "中文 the": 7,
        "中文 \n": 8,
        "ﬁle": 3,
        "a ~ the": 2,
        "": 0,
        " \n": 0,
    }.items():
        *_, sizes = divide_text(text, tokenizer)
        assert sizes[-1] == unread, text


def test_a_vocabulary_of_ascii_knows_every_word_but_those_that_are_too_long(tmp_path: Path, rng: random.Random):
    tokenizer_in(tmp_path, 16)
    tokenizer = load_tokenizer(tmp_path)
    text = "".join(rng.choices(CHARACTERS + string.printable, k=6000))
    for more, is_known in (("", True), (" " + 101 * "x", False)):
        held = heldout_of([text + more], tokenizer, 16)
        assert np.array_equal(held.without(UNK).words, held.words) is is_known


def rounds_of(held: Heldout) -> dict[int, int]:
    """The round in which each word is predicted."""
    return dict(zip(held.words.ravel().tolist(), held.rounds().ravel().tolist(), strict=True))


def test_words_are_the_same_for_every_vocabulary_and_length(tokenizer, rng: random.Random):
    texts = ["".join(rng.choices(CHARACTERS, k=rng.randint(0, 200))) for _ in range(30)]
    letters = tokenizer_of(WordPiece({entry: n for n, entry in enumerate([*SPECIALS, *"abe"])}, unk_token="[UNK]"))
    first, *others = [heldout_of(texts, words, length) for words in (tokenizer, letters) for length in (16, 64)]
    for held in others:
        assert np.array_equal(held.documents[:, 1:4], first.documents[:, 1:4])
        rounds = rounds_of(held)
        expected = rounds_of(first)
        in_both = rounds.keys() & expected.keys()
        assert in_both
        assert all(rounds[word] == expected[word] for word in in_both)
    begun = heldout_of(texts, tokenizer, 16, begin=2)
    assert (begun.words[begun.sequences == 2] == -1).all()
    assert (begun.sequences == 2).sum() == len(texts)
    assert (begun.sequences == SEP).sum() == len(texts)
    tokens = first.totals["tokens"]
    assert ((begun.words >= 0).sum(), begun.totals["tokens"]) == (tokens, tokens)
    assert (begun.words[begun.sequences == PAD] == -1).all()
