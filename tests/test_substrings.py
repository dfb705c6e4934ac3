"""Cutting repeated passages, against a naive search through all windows."""

import json
import random
from pathlib import Path

import naive
import numpy as np
import pytest
from conftest import corpus_of, documents_of, texts_of

from tasks.deduplicate import Deduplicate, deduplicate
from tasks.text import sorted_files, substrings, windows
from tasks.text.substrings import Substring


def params(size: int) -> Deduplicate:
    return Deduplicate(methods=["substring"], substring=Substring(bytes=size))


def left_of(texts: list[str], size: int) -> list[str]:
    """What is left of the texts of which something is."""
    return [text for text in naive.without_repeats(texts, size) if text is not None]


def random_texts(seed: int, alphabet: str, documents: int = 30) -> list[str]:
    """Texts that repeat pieces of themselves and of one another."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(documents):
        text = ""
        for _ in range(rng.randint(0, 6)):
            if texts and rng.random() < 0.5:
                other = rng.choice(texts) + text
                start = rng.randint(0, len(other))
                text += other[start : start + rng.randint(0, 60)]
            else:
                text += "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        texts.append(text or "-")
    return texts


@pytest.mark.parametrize(
    ("size", "alphabet"), [(8, "ab"), (13, "a"), (31, "abc \n"), (8, "aé語😀"), (13, "語😀"), (31, "the of and, \t")]
)
def test_what_is_left_is_what_a_search_through_all_windows_leaves(store, tmp_path, monkeypatch, alphabet, size: int):
    # so that windows and repeats cross chunks, blocks and ranges
    for module, name, value in (
        (windows, "CHUNK", 300),
        (windows, "BLOCK", 64),
        (substrings, "COMPARED", 200),
        (substrings, "HASHED", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sorted_files, "ENTRIES", 200)
    texts = random_texts(size * 7 + len(alphabet), alphabet)
    made = corpus_of(tmp_path, texts, 0.002)
    kept = deduplicate.fn(params(size), made)
    assert texts_of(kept) == left_of(texts_of(made), size)
    assert kept.stats["substring"]["passages"]["number"] > 5


def fresh(rng: random.Random, words: int) -> str:
    """Words that occur nowhere else."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyzäöü", k=9)) for _ in range(words))


@pytest.fixture
def planted(rng: random.Random) -> list[str]:
    """Texts that have some passages in common, among words of their own."""
    passages = [fresh(rng, rng.randint(8, 60)) for _ in range(12)]
    texts = []
    for _ in range(80):
        chosen = rng.choices(passages, k=rng.randint(0, 3))
        texts.append(" ".join([fresh(rng, 5), *(f"{passage} {fresh(rng, 4)}" for passage in chosen)]))
    return texts


def test_what_is_left_has_no_passage_twice_and_a_second_run_cuts_nothing(store, tmp_path, planted: list[str]):
    once = deduplicate.fn(params(75), corpus_of(tmp_path, planted, 0.002))
    left = texts_of(once)
    seen = set()
    assert left == left_of(planted, 75)
    for piece in (piece for text in left for piece in text.split("\n")):
        here = {piece[i : i + 75] for i in range(len(piece) - 74)}
        assert not seen & here
        seen |= here
    assert once.stats["substring"]["passages"]["number"] > 50
    twice = deduplicate.fn(params(75), once)
    assert texts_of(twice) == left
    assert twice.stats["substring"]["passages"] == {"number": 0, "largest": 0, "sizes": {}}


PASSAGE = "q" + "".join(random.Random(1).choices("abcdefgh", k=90)) + "q"
SHORT = "".join(random.Random(2).choices("abcdefgh", k=74))
CUTS = {  # texts, and what is left of them; passages of 75 bytes or more are cut
    "one byte too short": ([f"1{SHORT}2", f"3{SHORT}4"], [f"1{SHORT}2", f"3{SHORT}4"]),
    "just long enough": ([f"1{SHORT}z2", f"3{SHORT}z4"], [f"1{SHORT}z2", "3\n4"]),
    # é and è differ in their second byte; three bytes each
    "no character is broken": (
        ["éé" + "語" * 30 + "éé", "èè" + "語" * 30 + "èè", "語" * 25, "語" * 24],
        ["éé" + "語" * 30 + "éé", "èè\nèè", "語" * 24],
    ),
    "first or last byte differs": (
        [f"\U0001f600{PASSAGE}\U0001f600", f"x\U0005f600{PASSAGE}\U0001f601y"],
        [f"\U0001f600{PASSAGE}\U0001f600", "x\U0005f600\n\U0001f601y"],
    ),
    "a newline joins what no white space does": (
        [PASSAGE, f"1{PASSAGE}2", f"3 {PASSAGE}4", f"5{PASSAGE}\t6", f"{PASSAGE}7", f"8.{PASSAGE}", f"9{PASSAGE} 0"],
        [PASSAGE, "1\n2", "3 4", "5\t6", "7", "8.", "9 0"],
    ),
    "only white space is left": (
        [PASSAGE, "short", f"\n {PASSAGE} \u00a0", PASSAGE, "short"],
        [PASSAGE, "short", "short"],
    ),
    "a run of one thing keeps its beginning": (
        ["-" * 500, "start " + "=+" * 400 + " end", "-" * 80],
        ["-" * 75, "start " + "=+" * 38 + " end"],
    ),
}


@pytest.mark.parametrize("case", CUTS)
def test_passages_of_enough_bytes_are_cut(store: Path, tmp_path: Path, case: str):
    texts, left = CUTS[case]
    made = deduplicate.fn(params(75), corpus_of(tmp_path, texts, 0.002))
    assert texts_of(made) == left == left_of(texts, 75)


def test_hashes_that_collide_by_chance_cut_nothing_that_did_not_stand_before(store, tmp_path, monkeypatch):
    made = corpus_of(tmp_path, random_texts(3, "abc ", 80), 0.002)
    before = {d.id: d.text for d in documents_of(made)}
    whole = windows.gram_hashes
    monkeypatch.setattr(windows, "gram_hashes", lambda data, n: whole(data, n) << np.uint64(56))
    left = {d.id: d.text for d in documents_of(deduplicate.fn(params(13), made))}
    fully = [text or "" for text in naive.without_repeats(list(before.values()), 13)]
    sizes = [sum(map(len, texts)) for texts in (fully, left.values(), before.values())]
    assert sizes[0] < sizes[1] < sizes[2], "some copies are missed, not all"
    for name, text in zip(before, fully, strict=True):
        rest = iter(left.get(name, "").replace("\n", ""))
        assert all(character in rest for character in text.replace("\n", "")), "all that must stay, in order"


def test_samples_say_what_was_cut_and_where_it_stood_first(store: Path, tmp_path: Path, planted):
    made = corpus_of(tmp_path, planted, 0.002)
    kept = deduplicate.fn(params(75), made)
    rows = [json.loads(line) for line in (kept.path / "duplicates.jsonl").read_text().splitlines()]
    whole = {d.id: d.text.encode() for d in documents_of(made)}
    assert 8 < len(rows) <= 20
    for row in rows:
        other = row["cut"]
        data = whole[other["id"]][other["byte"] : other["byte"] + row["bytes"]]
        assert row["text"] == data.decode()[:300]
        first = next(name for name in whole if data[:75] in whole[name])
        assert row["kept"]["id"] == first
        assert first != other["id"] or row["kept"]["byte"] < other["byte"]
        assert whole[first][row["kept"]["byte"] :].startswith(data[:70])


def test_a_range_has_its_lowest_key_and_all_copies_of_its_highest_but_not_the_next(tmp_path: Path):
    keys = np.array([1, 3, 3, 4, 7, 7, 7, 8, 9])
    sorted_files.save_sorted(tmp_path / "keys", keys, keys * 10)
    for low in range(10):
        for high in range(low + 1, 11):
            found, values = sorted_files.load_range([tmp_path / "keys"], low, high)
            assert found.tolist() == [key for key in keys if low <= key < high]
            assert values.tolist() == (10 * found).tolist()


def test_passages_that_overlap_or_touch_are_one_with_the_copy_of_the_first():
    starts = np.array([20, 0, 5, 9, 31])
    stops = np.array([30, 5, 8, 12, 40])
    copies = np.array([103, 100, 101, 102, 104])
    joined = substrings.join_overlapping(starts, stops, copies)
    assert joined.tolist() == [[0, 8, 100], [9, 12, 102], [20, 30, 103], [31, 40, 104]]
