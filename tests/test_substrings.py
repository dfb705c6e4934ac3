"""Cutting passages that stood before, against a naive search through all windows."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from conftest import write_jsonl

from tasks.corpus.parts import documents_of
from tasks.deduplicate import Deduplicate, deduplicate
from tasks.download import Download, download
from tasks.store import Artifact
from tasks.text import sorted_runs, substrings
from tasks.text.substrings import Substring

SPACE = " \t\n\r\v\f"


def corpus_of(texts: list[str], folder: Path, part_megabytes: float = 0.002) -> Artifact:
    """A corpus of many small parts."""
    write_jsonl(folder / "texts.jsonl", texts)
    files = [str(folder / "texts.jsonl")]
    return download.fn(Download(source="files", files=files, documents=0, part_megabytes=part_megabytes, max_lost=1))


def params(size: int) -> Deduplicate:
    return Deduplicate(methods=["substring"], substring=Substring(bytes=size))


def naive(texts: list[str], size: int) -> list[str]:
    """What is left of the texts of which something is."""
    return [text for text in naive_each(texts, size) if text is not None]


def naive_each(texts: list[str], size: int) -> list[str | None]:
    """Texts without the characters that lie wholly in windows whose bytes stood, and ended, before."""
    first: dict[bytes, int] = {}
    begin, left = 0, []
    for text in texts:
        data = text.encode()
        cut = [False] * len(data)
        for i in range(len(data) - size + 1):
            if begin + i - first.setdefault(data[i : i + size], begin + i) >= size:
                cut[i : i + size] = [True] * size
        begin += len(data) + size  # windows in different documents never overlap
        pieces, at, before = [""], 0, False
        for character in text:
            end = at + len(character.encode())
            gone = all(cut[at:end])
            if not gone and before and pieces[-1]:
                pieces.append("")
            if not gone:
                pieces[-1] += character
            at, before = end, gone
        joined = pieces[0]
        for piece in pieces[1:]:
            joined += piece if joined[-1] in SPACE or piece[0] in SPACE else "\n" + piece
        left.append(joined if joined.strip() or not any(cut) else None)
    return left


def random_texts(seed: int, alphabet: str, documents: int = 40) -> list[str]:
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


@pytest.mark.parametrize("alphabet", ["ab", "a", "abc \n", "aé語😀", "語😀", "the of and, \t"])
@pytest.mark.parametrize("size", [8, 13, 16, 31])
def test_what_is_left_is_what_a_search_through_all_windows_leaves(
    store, tmp_path, monkeypatch, alphabet: str, size: int
):
    monkeypatch.setattr(substrings, "CHUNK", 300)  # so that windows and repeats lie across chunks, blocks and ranges
    monkeypatch.setattr(substrings, "BLOCK", 64)
    monkeypatch.setattr(substrings, "COMPARED", 200)
    monkeypatch.setattr(substrings, "HASHED", 0.1)
    monkeypatch.setattr(sorted_runs, "ENTRIES", 200)
    texts = random_texts(size * 7 + len(alphabet), alphabet)
    made = corpus_of(texts, tmp_path)
    before = [d.text for d in documents_of(made)]
    kept = deduplicate.fn(params(size), made)
    assert [d.text for d in documents_of(kept)] == naive(before, size)
    assert kept.stats["substring"]["passages"]["number"] > 5


def cut_texts(texts: list[str], folder: Path, size: int) -> list[str]:
    return [d.text for d in documents_of(deduplicate.fn(params(size), corpus_of(texts, folder)))]


def fresh(rng: random.Random, words: int) -> str:
    """Words that stand nowhere else."""
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyzäöü", k=9)) for _ in range(words))


@pytest.fixture
def planted(rng: random.Random) -> tuple[list[str], list[str]]:
    """Passages, and texts that hold each of them many times, among words of their own."""
    passages = [fresh(rng, rng.randint(8, 60)) for _ in range(12)]
    texts = []
    for _ in range(80):
        chosen = rng.choices(passages, k=rng.randint(0, 3))
        texts.append(" ".join([fresh(rng, 5), *(f"{passage} {fresh(rng, 4)}" for passage in chosen)]))
    return passages, texts


def test_of_each_passage_the_first_copy_stays_and_nothing_else_is_lost(store, tmp_path, planted):
    passages, texts = planted
    left = cut_texts(texts, tmp_path, 75)
    assert left == naive(texts, 75)
    for passage in passages:
        first = next(i for i, text in enumerate(texts) if passage in text)
        assert [text.count(passage) for text in left] == [int(i == first) for i in range(len(texts))]
    for before, after in zip(texts, left, strict=True):
        own = [word[2:-2] for word in before.split() if not any(word in passage for passage in passages)]
        assert [word for word in own if word in after] == own, "but for a letter that follows the copies by chance"


def test_what_is_left_has_no_passage_twice_and_a_second_run_cuts_nothing(store, tmp_path, planted):
    _, texts = planted
    once = deduplicate.fn(params(75), corpus_of(texts, tmp_path))
    seen: set[str] = set()
    for document in documents_of(once):
        for piece in document.text.split("\n"):
            windows = [piece[i : i + 75] for i in range(len(piece) - 74)]
            assert not seen & set(windows)
            seen.update(windows)
    assert once.stats["substring"]["passages"]["number"] > 50
    twice = deduplicate.fn(params(75), once)
    assert [d.text for d in documents_of(twice)] == [d.text for d in documents_of(once)]
    assert twice.stats["substring"]["passages"] == {"number": 0, "largest": 0, "sizes": {}}


@pytest.mark.parametrize("size", [74, 75, 76])
def test_passages_are_cut_from_their_length_on(store: Path, tmp_path: Path, rng: random.Random, size: int):
    passage = "".join(rng.choices("abcdefgh", k=size))
    left = cut_texts([f"1{passage}2", f"3{passage}4"], tmp_path, 75)
    assert left == [f"1{passage}2", "3\n4" if size >= 75 else f"3{passage}4"]


def test_bytes_are_counted_and_no_character_is_broken(store: Path, tmp_path: Path):
    ending, other = "é" * 4, "è" * 4  # these differ in the second byte of each character
    passage = "語" * 30
    texts = [f"{ending}{passage}{ending}", f"{other}{passage}{other}", passage[:25], "語" * 24]
    assert cut_texts(texts, tmp_path, 75) == [texts[0], f"{other}\n{other}", "語" * 24]


def test_characters_that_differ_in_their_first_or_last_byte_only_stay(store: Path, tmp_path: Path):
    passage = "".join(random.Random(3).choices("abcdefgh", k=100))
    texts = [f"\U0001f600{passage}\U0001f600", f"x\U0005f600{passage}\U0001f601y"]
    assert cut_texts(texts, tmp_path, 75) == [texts[0], "x\U0005f600\n\U0001f601y"]


def test_a_run_of_one_thing_keeps_its_beginning(store: Path, tmp_path: Path):
    texts = ["-" * 500, "start " + "=+" * 400 + " end", "-" * 80]
    left = cut_texts(texts, tmp_path, 75)
    assert left == naive(texts, 75)
    assert left[0] == "-" * 75
    assert len(left) == 2
    assert len(left[1]) < 200


def test_a_newline_joins_what_no_white_space_does(store: Path, tmp_path: Path):
    passage = "q" + "".join(random.Random(1).choices("abcdefgh", k=90)) + "q"
    texts = [passage, f"1{passage}2", f"3 {passage}4", f"5{passage}\t6", f"{passage}7", f"8.{passage}", f"9{passage} 0"]
    assert cut_texts(texts, tmp_path, 75) == [passage, "1\n2", "3 4", "5\t6", "7", "8.", "9 0"]


def test_documents_are_dropped_when_only_white_space_is_left(store: Path, tmp_path: Path):
    passage = "".join(random.Random(2).choices("abcdefgh", k=200))
    made = corpus_of([passage, "short", f"\n {passage} \u00a0", passage, "short"], tmp_path)
    kept = deduplicate.fn(params(75), made)
    assert [d.text for d in documents_of(kept)] == [passage, "short", "short"]
    assert kept.stats["dropped"]["substring"]["documents"] == 2
    assert kept.stats["dropped"]["substring"]["characters"] == 404
    assert kept.stats["substring"]["cut"]["characters"] == 0


def test_kept_dropped_and_cut_are_all_that_was_there(store: Path, tmp_path: Path, planted):
    passages, texts = planted
    for i in range(2):
        write_jsonl(tmp_path / f"{i}.jsonl", [*texts[i * 40 : i * 40 + 40], *passages], source=f"toy {i}")
    files = [str(tmp_path / "?.jsonl")]
    made = download.fn(Download(source="files", files=files, documents=0, part_megabytes=0.003))
    stats = deduplicate.fn(params(75), made).stats
    cut, dropped = stats["substring"]["cut"], stats["dropped"]["substring"]
    assert cut["characters"] > 1000
    assert dropped["documents"] > 10
    for source in ("toy 0", "toy 1"):
        counts = [c["by_source"].get(source, {}) for c in (stats, dropped, cut)]
        assert sum(c.get("characters", 0) for c in counts) == made.stats["by_source"][source]["characters"]
        assert sum(c.get("documents", 0) for c in counts[:2]) == made.stats["by_source"][source]["documents"]


def test_hashes_that_collide_by_chance_cut_nothing_that_did_not_stand_before(store, tmp_path, monkeypatch):
    made = corpus_of(random_texts(3, "abc ", 80), tmp_path)
    before = {d.id: d.text for d in documents_of(made)}
    fully = dict(zip(before, naive_each(list(before.values()), 13), strict=True))
    whole = substrings.gram_hashes
    monkeypatch.setattr(substrings, "gram_hashes", lambda data, n: whole(data, n) << np.uint64(56))
    left = {d.id: d.text for d in documents_of(deduplicate.fn(params(13), made))}
    sizes = [sum(len(text or "") for text in texts.values()) for texts in (fully, left, before)]
    assert sizes[0] < sizes[1] < sizes[2], "some copies are missed, not all"
    for name, text in fully.items():
        rest = iter(left.get(name, "").replace("\n", ""))
        assert all(character in rest for character in (text or "").replace("\n", "")), (
            "all that must stay is there, in order"
        )


@pytest.mark.parametrize("n", [8, 9, 31, 64, 75, 200])
def test_every_window_holds_an_anchor_that_depends_on_its_bytes_only(n: int):
    data = np.random.default_rng(n).integers(97, 99, 3000).astype(np.uint8)
    at, hashes = substrings.select(data, np.ones(len(data) - n + 1, dtype=bool), n)
    width = 1 << ((n // 2).bit_length() - 1)
    by_place = dict(zip(at.tolist(), hashes.tolist(), strict=True))
    assert len(by_place) < 0.9 * len(data)
    for start in range(0, len(data) - n + 1, 7):
        alone, alone_hashes = substrings.select(data[start : start + n].copy(), np.ones(1, dtype=bool), n)
        assert len(alone) >= 1
        assert alone.max() < width
        for place, hashed in zip(alone.tolist(), alone_hashes.tolist(), strict=True):
            assert by_place[start + place] == hashed


def test_windows_that_lie_in_two_documents_have_no_anchors():
    data = np.random.default_rng(0).integers(97, 123, 500).astype(np.uint8)
    at, hashes = substrings.select(data, np.zeros(len(data) - 74, dtype=bool), 75)
    assert len(at) == len(hashes) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 64, 75, 100])
def test_runs_of_bytes_have_the_same_hash_exactly_where_they_are_the_same(n: int):
    data = np.random.default_rng(n).integers(0, 2, 2000).astype(np.uint8)
    hashed, named = substrings.gram_hashes(data, n).tolist(), {}
    assert len(hashed) == len(data) - n + 1
    for i, number in enumerate(hashed):
        assert named.setdefault(number, data[i : i + n].tobytes()) == data[i : i + n].tobytes()
    assert len(set(named.values())) == len(named)


@pytest.mark.parametrize("seed", range(3))
def test_windows_lie_within_one_document(seed: int):
    rng = np.random.default_rng(seed)
    ends = np.cumsum(rng.integers(0, 20, 60) + 1)  # each with a separator
    for start in range(0, int(ends[-1]), 37):
        size = min(50, int(ends[-1]) - start)
        expected = [
            i + 8 < ends[np.searchsorted(ends, i, side="right")] for i in range(start, start + size)
        ]  # fmt: skip
        assert substrings.whole_windows(ends, start, size, 8).tolist() == expected


def test_samples_say_what_was_cut_and_where_it_stood_first(store: Path, tmp_path: Path, planted):
    _, texts = planted
    made = corpus_of(texts, tmp_path)
    kept = deduplicate.fn(params(75), made)
    rows = [json.loads(line) for line in (kept.path / "duplicates.jsonl").read_text().splitlines()]
    whole = {d.id: d.text.encode() for d in documents_of(made)}
    assert len(rows) == 20 or len({row["text"] for row in rows}) == len(rows) > 8
    names = list(whole)
    for row in rows:
        first, other = row["kept"], row["cut"]
        text = whole[other["id"]][other["byte"] : other["byte"] + row["bytes"]].decode()
        assert row["text"] == text[:300]
        start = whole[first["id"]][first["byte"] :]
        assert start.startswith(text.encode()[:70])
        assert (names.index(first["id"]), first["byte"]) < (names.index(other["id"]), other["byte"])
        assert not any(text.encode()[:75] in whole[name] for name in names[: names.index(first["id"])])
