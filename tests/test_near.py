"""MinHash, against sets of words in plain Python and a comparison of all pairs."""

import math
import random
from collections import Counter
from pathlib import Path

import naive
import pytest
from conftest import corpus_of, texts_of

from tasks.deduplicate import Deduplicate, deduplicate
from tasks.text import minhash, sorted_files
from tasks.text.minhash import MinHash

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]


def params(**settings: float) -> Deduplicate:
    return Deduplicate(methods=["minhash"], minhash=MinHash(**settings))


def shingles(text: str) -> set[tuple[str, ...]]:
    """The runs of five words of a text."""
    return set(naive.runs(text, 5, by_halves=False, short=True))


def first_of_clusters(texts: list[str], least: float) -> list[int]:
    """For each text the first of its cluster, where all pairs at least so similar are joined."""
    sets = list(map(shingles, texts))
    cluster = list(range(len(texts)))
    for i in range(len(texts)):
        for j in range(i):
            if cluster[i] != cluster[j] and naive.jaccard(sets[i], sets[j]) >= least:
                low, high = sorted((cluster[i], cluster[j]))
                cluster = [low if c == high else c for c in cluster]
    return cluster


def changed(words: list[str], rng: random.Random, changes: int) -> list[str]:
    """The words with so many of them replaced."""
    found = list(words)
    for i in rng.sample(range(len(found)), changes):
        found[i] = rng.choice(WORDS)
    return found


def families(seed: int, count: int = 40, size: int = 6) -> list[str]:
    """Texts of some families, whose members are more or less alike, in any order."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.choice((3, 8, 60, 150)))
        texts.append(" ".join(words))
        for _ in range(rng.randint(0, size)):
            words = changed(words, rng, rng.randint(0, max(1, len(words) // 25)))
            texts.append(" ".join(words))
    rng.shuffle(texts)
    return texts


@pytest.mark.parametrize(("seed", "least"), [(0, 0.5), (1, 0.72), (3, 1.0)])
def test_many_bands_keep_the_first_of_all_that_a_naive_comparison_joins(store, tmp_path, monkeypatch, seed, least):
    monkeypatch.setattr(sorted_files, "ENTRIES", 128)  # so that there are several ranges, blocks and slices
    for name, value in (("COMPARED", 500), ("SLICE", 7)):
        monkeypatch.setattr(minhash, name, value)
    texts = families(seed, count=20)
    made = deduplicate.fn(params(bands=40, rows=1, jaccard=least), corpus_of(tmp_path, texts))
    firsts = first_of_clusters(texts, least)
    sizes = [size for size in Counter(firsts).values() if size > 1]
    assert texts_of(made) == [text for i, text in enumerate(texts) if firsts[i] == i]
    assert len(texts) * 0.3 < len(texts_of(made)) < len(texts)
    clusters = made.stats["minhash"]["clusters"]
    assert (clusters["number"], clusters["largest"]) == (len(sizes), max(sizes))
    nearest = [naive.jaccard(shingles(text), shingles(texts[first])) for text, first in zip(texts, firsts, strict=True)]
    assert min(nearest) < least or least >= 0.9, "there is a chain whose ends are not alike"


def test_pairs_are_found_as_often_as_the_bands_predict(store: Path, tmp_path: Path):
    rng = random.Random(1)
    texts = []
    chances = []
    for _ in range(400):
        words = rng.choices(WORDS, k=200)
        other = changed(words, rng, rng.randint(2, 8))
        similarity = naive.jaccard(shingles(" ".join(words)), shingles(" ".join(other)))
        chances.append(1 - (1 - similarity**8) ** 14 if similarity >= 0.72 else 0.0)
        texts += [" ".join(words), " ".join(other)]
    dropped = deduplicate.fn(params(), corpus_of(tmp_path, texts, 0.2)).stats["dropped"]["near-duplicate"]["documents"]
    deviation = math.sqrt(sum(p * (1 - p) for p in chances))
    assert abs(dropped - sum(chances)) < 4 * deviation
    assert 100 < dropped < 300, "neither all nor none"


GREEK = [f"Το {word} είναι εδώ από το 1999 και θα μείνει για πάντα" for word in ("σπίτι", "δέντρο")]
CHINESE = ["今天天气很好。我们去公园。", "今天天气很好。他们去学校。"]
KEPT = {  # texts, and which of them are kept
    "case, white space and punctuation make no difference": (
        [
            "The cat's mat: one, two & three four five_six.",
            "the CAT s mat\tone-two\n\nthree   four “five_six”…",
            "the cat s mat one two three four five six",
        ],
        [0],
    ),
    "fewer than five words: all are compared; without words a document is similar to none": (
        ["a b", "a", "A!", "b a", "a b.", "a b c d", "a b c d e", "a b c d e f", "a b c d", "...", "?", "...", "b"],
        [0, 1, 3, 5, 6, 7, 9, 10, 11, 12],
    ),
    "words beyond ASCII, without accents": (
        [*GREEK, *CHINESE, "In 1999", "café au lait", "cafe au lait", GREEK[0].upper(), "今天天气很好 我们去公园"],
        [0, 1, 2, 3, 4, 5],
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_documents_are_compared_by_their_words(store: Path, tmp_path: Path, case: str):
    texts, kept = KEPT[case]
    assert texts_of(deduplicate.fn(params(), corpus_of(tmp_path, texts))) == [texts[i] for i in kept]


@pytest.mark.parametrize(
    ("ends", "sizes", "most"),
    [
        ([f" {i}" for i in range(2_000)], "1025-2048", 14 * 9 * 2_000),  # nine others in the bucket of each band
        (["." * i for i in range(300)], "257-512", 299),  # the same words: the first only
    ],
)
def test_each_of_many_alike_is_compared_with_a_few_others(store: Path, tmp_path: Path, ends, sizes: str, most: int):
    text = " ".join(random.Random(5).choices(WORDS, k=40))
    made = deduplicate.fn(params(), corpus_of(tmp_path, [text + end for end in ends], 0.5))
    assert texts_of(made) == [text + ends[0]]
    assert made.stats["minhash"]["clusters"] == {"number": 1, "largest": len(ends), "sizes": {sizes: 1}}
    assert len(ends) - 1 <= made.stats["minhash"]["compared"] <= most
