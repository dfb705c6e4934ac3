"""Decontaminate, against a set of n-grams in plain Python."""

import json
import logging
import os
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, texts_of

from model import InputError
from tasks import decontaminate as module
from tasks import store as store_module
from tasks.corpus.parts import documents_of, parts_of
from tasks.decontaminate import Decontaminate, decontaminate, evaluation_sentences, without
from tasks.download import Download, download
from tasks.glue import data as glue
from tasks.glue.sentences import sentences
from tasks.glue.tasks import HUB_GLUE, TASKS, evaluation_splits
from tasks.store import Artifact
from tasks.text import ngrams as ngrams_module
from tasks.text import words
from tasks.text.ngrams import Index, ngrams, pieces, plain, restored, words_in, write_index

PLANTED = {
    "cola": "The more books the old librarian's neighbour would lend her, the less she managed to read them.",
    "sst2": "it 's a film that does n't know what it wants to say and -lrb- worse -rrb- says it twice",
    "mnli": "Nobody at the harbour office could say when the second ferry to the outer islands was due.",
    "rte": "Forty-two émigrés signed the letter which the committee had sent to the mayor last week.",
}
SHORT = "Twelve words in a row are not enough to find this sentence."


def write_split(folder: Path, task: str, split: str, *columns: list[str]) -> Path:
    """A split in GLUE's layout; every label is -1, as in the test splits."""
    path = folder / task / f"{split}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = TASKS[task].columns
    table = {**dict(zip(names, columns, strict=True)), "label": [-1] * len(columns[0])}
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A GLUE folder of four tasks, a planted sentence in each."""
    folder = tmp_path / "glue"
    write_split(folder, "cola", "validation", [SHORT, PLANTED["cola"]])
    write_split(folder, "mnli", "validation_matched", ["A short premise."], [SHORT])
    write_split(folder, "mnli", "test_mismatched", [SHORT, "Another.", SHORT], ["x", PLANTED["mnli"], "y"])
    write_split(folder, "rte", "test", [PLANTED["rte"]], [PLANTED["rte"]])
    write_split(folder, "sst2", "validation", [PLANTED["sst2"]])
    return folder


def samples_of(made: Artifact) -> list[dict]:
    return [json.loads(line) for line in (made.path / "contaminated.jsonl").read_text().splitlines()]


def hit(made: Artifact) -> dict[str, int]:
    """The documents found, by task, where there are any."""
    return {task: about["documents"] for task, about in made.stats["tasks"].items() if about["documents"]}


WAYS = {
    "exact": lambda text: text,
    "upper case": str.upper,
    "other punctuation": lambda text: re.sub(r"[^\w\s]+", " ", text).replace(" ", " ... "),
    "accents": lambda text: unicodedata.normalize("NFD", re.sub("e(?=[^m])", "é", text)),
    "over lines": lambda text: text.replace(" ", "\r\n\t", 9),
    "typographic": lambda text: text.replace("'", "’").replace(" ", "\u2003"),
    "emphasis": lambda text: re.sub(r"\b(book|ferry|letter|film)(s?)\b", r"_\1\2_", text),
    "invisible": lambda text: text.replace("er", "e\u00adr").replace("tt", "t\u200bt"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sentence_is_found_however_it_is_written(store, tmp_path, data, toy_texts: list[str], way: str):
    prose = [text.replace(" n't", "n't").replace("-lrb- worse -rrb-", "(worse)") for text in PLANTED.values()]
    written = [f"{toy_texts[i]} {WAYS[way](text)} {toy_texts[i + 9]}" for i, text in enumerate(prose)]
    made = decontaminate.fn(Decontaminate(data=str(data)), corpus_of(tmp_path, [*toy_texts[:20], *written]))
    assert texts_of(made) == toy_texts[:20]
    assert hit(made) == dict.fromkeys(PLANTED, 1)
    assert [made.stats["tasks"][task]["sentences_found"] for task in PLANTED] == [1, 1, 1, 2]
    samples = samples_of(made)
    assert [(one["task"], one["source"]) for one in samples] == [(task, "toy") for task in PLANTED]
    for number, (sample, text) in enumerate(zip(samples, written, strict=True)):
        assert sample["id"] == f"toy.jsonl:{21 + number}"
        assert sample["before"] + sample["shared"] + sample["after"] in text
        split = pq.read_table(data / sample["task"] / f"{sample['split']}.parquet")
        assert restored(split[sample["column"]][sample["row"]].as_py()) == sample["sentence"]
        assert [w.word for w in words_in(sample["shared"])] == [w.word for w in words_in(sample["sentence"])]


def test_sentences_in_the_tokens_of_the_treebank_are_found_as_they_are_and_as_prose(store, tmp_path, data, toy_texts):
    prose = "It's a film that doesn't know what it wants to say and (worse) says it twice"
    texts = [*toy_texts[:5], PLANTED["sst2"], prose, f"{toy_texts[5]} {PLANTED['sst2']}"]
    made = decontaminate.fn(Decontaminate(data=str(data)), corpus_of(tmp_path, texts))
    assert texts_of(made) == toy_texts[:5]
    about = made.stats["tasks"]["sst2"]
    assert (about["documents"], about["sentences"], about["sentences_found"], about["too_short"]) == (3, 1, 1, 0)


def naive_words(text: str) -> list[str]:
    """The words of a text of letters, digits and simple punctuation."""
    plain = unicodedata.normalize("NFD", text).encode("ascii", "ignore").decode().lower()
    return re.findall("[a-z0-9]+", plain)


def naive_ngrams(text: str, n: int) -> set[tuple[str, ...]]:
    found = naive_words(text)
    return {tuple(found[i : i + n]) for i in range(len(found) - n + 1)}


def random_text(rng: random.Random, count: int) -> str:
    """Words of which some repeat, so that runs of them are often shared, between all kinds of separators."""
    separators = (" ", " ", " ", ", ", "\n", " - ", "_", "...\t", "; ")
    return "".join(rng.choice(("an", "Öl", "by", "Été", "42")) + rng.choice(separators) for _ in range(count))


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_what_a_set_of_ngrams_finds(store: Path, tmp_path: Path, seed: int):
    rng, n = random.Random(seed), 6
    texts = [random_text(rng, rng.randrange(1, 60)) + f"own{i}" for i in range(150)]
    sentences = {
        "cola": [[random_text(rng, rng.randrange(1, 10)) for _ in range(60)]],
        "rte": [[random_text(rng, rng.randrange(1, 10)) for _ in range(40)] for _ in range(2)],
    }
    for task, columns in sentences.items():
        write_split(tmp_path / "glue", task, "validation", *columns)
    asked = Decontaminate(data=str(tmp_path / "glue"), words=n)
    made = decontaminate.fn(asked, corpus_of(tmp_path, texts, part_megabytes=0.004))
    found = {task: [naive_ngrams(s, n) for column in columns for s in column] for task, columns in sentences.items()}
    of_text = [naive_ngrams(text, n) for text in texts]
    for task, grams in found.items():
        about = made.stats["tasks"][task]
        every = set().union(*grams)
        assert about["sentences"] == len(grams)
        assert about["too_short"] == sum(not own for own in grams)
        assert about["ngrams"] == len(every)
        assert about["documents"] == sum(bool(own & every) for own in of_text)
        assert about["sentences_found"] == sum(bool(own & set().union(*of_text)) for own in grams)
    every = set().union(*found["cola"], *found["rte"])
    clean = [text for text, own in zip(texts, of_text, strict=True) if not own & every]
    assert texts_of(made) == clean
    assert 0 < len(clean) < len(texts)
    assert made.stats["documents_found"] == len(texts) - len(clean)
    assert made.stats["dropped"]["contaminated"]["documents"] == len(texts) - len(clean)


def test_the_table_has_a_row_for_each_task_and_the_sum_first(store, tmp_path: Path, data: Path, toy_texts: list[str]):
    texts = [f"{text} {PLANTED['mnli']}" if i % 7 == 0 else text for i, text in enumerate(toy_texts)]
    made = decontaminate.fn(Decontaminate(data=str(data)), corpus_of(tmp_path, texts))
    assert hit(made) == {"mnli": 43}
    head, *rows = made.stats["table"]
    assert [head["task"], *(row["task"] for row in rows)] == ["all", *PLANTED]
    for column in ("sentences", "too short", "n-grams", "sentences found", "in documents"):
        assert head[column] == sum(row[column] for row in rows)
    assert (head["sentences"], head["too short"], head["in documents"]) == (13, 8, 43)
    assert rows[2]["splits"] == "validation_matched, test_mismatched"
    assert len(samples_of(made)) == module.SAMPLES


def test_cutting_takes_the_shared_words_and_leaves_the_rest(store, tmp_path: Path, data: Path, toy_texts: list[str]):
    accented = PLANTED["rte"].replace("last week.", "last weeḱ̀.")  # with accents of its last letter
    own = [f"Before: «{PLANTED['cola']}» After.", f"{accented}\nAfter", f"{PLANTED['mnli']} ... _ \n", "…"]
    wholes = [toy_texts[0], *own]
    made = decontaminate.fn(Decontaminate(data=str(data), method="cut"), corpus_of(tmp_path, wholes))
    assert texts_of(made) == [toy_texts[0], "Before: «.» After.", ".\nAfter", "…"]
    assert made.stats["dropped"]["contaminated"]["documents"] == 1, "nothing is left of it"
    left = sum(map(len, wholes[1:3])) - len("Before: «.» After.") - len(".\nAfter")
    assert made.stats["cut"] == {"documents": 2, "characters": left}
    assert made.stats["documents_found"] == 3
    assert made.stats["characters"] == sum(map(len, texts_of(made)))


def test_what_comes_together_by_a_cut_is_cut_too(store: Path, tmp_path: Path, data: Path):
    first, second = PLANTED["cola"].split(" would ")
    text = f"Begin. {first} {PLANTED['mnli']} would {second} End."
    made = decontaminate.fn(Decontaminate(data=str(data), method="cut"), corpus_of(tmp_path, [text]))
    assert texts_of(made) == ["Begin. . End."]
    assert hit(made) == {"mnli": 1}, "the corpus did not have the other"


@pytest.mark.parametrize("seed", range(2))
def test_after_cutting_nothing_is_found_and_only_shared_words_are_gone(store: Path, tmp_path: Path, seed: int):
    rng, n = random.Random(seed), 6
    texts = [random_text(rng, rng.randrange(1, 90)) + f"own{i}" for i in range(120)]
    write_split(tmp_path / "glue", "cola", "validation", [random_text(rng, 7) for _ in range(300)])
    asked = Decontaminate(data=str(tmp_path / "glue"), words=n, method="cut")
    corpus = corpus_of(tmp_path, texts)
    made = decontaminate.fn(asked, corpus)
    again = decontaminate.fn(asked, made)
    assert made.stats["documents_found"] > 20
    assert again.stats["documents_found"] == 0
    assert texts_of(again) == texts_of(made)
    assert made.stats["documents"] == len(texts), "each has a word of its own"
    index = index_of(tmp_path / "glue", n, tmp_path)
    for before, after in zip(texts, texts_of(made), strict=True):
        matches = index.find([before]).get(0, [])
        covered = {i for match in matches for i in range(match.start, match.end)}
        once = "".join(c for i, c in enumerate(before) if i not in covered)
        assert without(before, matches) == once
        assert after == once or (index.find([once]) and len(after) < len(once))


def index_of(folder: Path, n: int, out: Path) -> Index:
    """An index of the sentences of CoLA in a GLUE folder."""
    files = glue.evaluation_files(str(folder), ["cola"])
    write_index(evaluation_sentences(files), ["cola"], n, out)
    return Index(out)


def words_of(text: str) -> list[str]:
    """What `ngrams` takes for the words of a text."""
    found = words.split([plain(text)])
    return [w for w in (found.different[i] for i in found.indices) if w[0].isalnum()]


def test_words_are_the_same_with_and_without_their_places_for_every_assigned_character():
    every = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) not in ("Cn", "Co", "Cs")]
    for start in range(0, len(every), 1 << 14):
        text = "".join(f"a{c}b {c}c{c} " for c in every[start : start + (1 << 14)])
        assert [w.word for w in words_in(text)] == words_of(text)


@pytest.mark.parametrize("seed", range(3))
def test_words_stand_where_they_are_said_to(seed: int):
    rng = random.Random(seed)
    alphabet = "aB7_-.' \n\0\x7f\u00adéÉß’…\u0301\u200bИ中ﬁ\U0001f600Ⅷ"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=40))
        found = words_in(text)
        assert [w.word for w in found] == words_of(text)
        assert all(words_of(text[w.start : w.end]) == [w.word] for w in found)
        assert [w.word for w in found] == words_of(" ".join(text[w.start : w.end] for w in found))


@pytest.mark.parametrize("seed", range(4))
def test_long_texts_are_looked_at_in_pieces_that_lose_and_repeat_nothing(tmp_path: Path, monkeypatch, seed: int):
    rng, n = random.Random(seed), (5, 13)[seed % 2]
    texts = [random_text(rng, rng.randrange(0, 400)) for _ in range(20)]
    texts += ["- , " * 90 + random_text(rng, 60), "x" * 500]
    of_texts = [naive_words(text) for text in texts[:20] for _ in range(5)]
    starts = [rng.randrange(max(1, len(found) - n)) for found in of_texts]
    runs = [" ".join(found[i : i + n + 1]) for found, i in zip(of_texts, starts, strict=True)]
    write_split(tmp_path / "glue", "cola", "validation", runs)
    index = index_of(tmp_path / "glue", n, tmp_path)
    whole = index.find(texts)
    monkeypatch.setattr(ngrams_module, "PIECE", 97)
    assert index.find(texts) == whole
    assert len(whole) > 5
    for text in texts:
        inner = list(pieces(text, n))
        assert all(text[start : start + len(piece)] == piece for start, piece in inner)
        assert sum(len(ngrams([piece], n)[0]) for _, piece in inner) == len(ngrams([text], n)[0])
        if len(text) > 2000:
            assert len(inner) > 5


def test_a_hash_that_says_the_same_of_all_makes_no_document_drop(store, tmp_path, data, toy_texts, monkeypatch):
    same = np.zeros(1, dtype=np.uint64)
    monkeypatch.setattr(words, "hashes", lambda found: np.repeat(same, len(found.indices)))
    made = decontaminate.fn(Decontaminate(data=str(data)), corpus_of(tmp_path, toy_texts[:9]))
    assert texts_of(made) == toy_texts[:9]


def test_sentences_too_short_for_a_run_are_counted_and_nothing_is_found(store, tmp_path: Path, toy_texts: list[str]):
    write_split(tmp_path / "glue", "cola", "validation", [SHORT, "", None, "..."])
    made = decontaminate.fn(Decontaminate(data=str(tmp_path / "glue")), corpus_of(tmp_path, [*toy_texts[:9], SHORT]))
    assert texts_of(made) == [*toy_texts[:9], SHORT]
    about = made.stats["tasks"]["cola"]
    assert (about["sentences"], about["too_short"], about["ngrams"]) == (4, 4, 0)
    assert made.stats["checked"]


def test_the_key_follows_the_sentences_and_not_their_place(store: Path, tmp_path: Path, data: Path):
    corpus = Artifact(stage="deduplicate", key="0" * 12)

    def key(**changes) -> str:
        return decontaminate.target(Decontaminate(**{"data": str(data)} | changes), corpus).key

    first = key()
    moved = tmp_path / "moved"
    data.rename(moved)
    data = moved
    assert key() == first
    assert key(tasks=Decontaminate().tasks[::-1]) == first
    different = {first, key(words=12), key(method="cut"), key(tasks=["cola"]), key(method="none"), key(data="probes")}
    assert len(different) == 6
    assert key(method="none") == key(method="none", data=str(tmp_path / "nowhere"), words=20)
    write_split(data, "cola", "validation", [SHORT])
    assert key() not in different
    different.add(key())
    write_split(data, "cola", "test", [SHORT])
    assert key() not in different


@pytest.mark.parametrize(("change", "why"), [({"data": "probes"}, "probes are made"), ({"method": "none"}, "'none'")])
def test_with_nothing_to_search_for_the_corpus_is_passed_on(store, tmp_path, toy_texts, caplog, change, why):
    corpus = corpus_of(tmp_path, toy_texts)
    asked = Decontaminate(**{"data": "probes"} | change)
    half = store_module.draft_of(decontaminate.target(asked, corpus)) / parts_of(corpus)[0].name
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half of it")
    with caplog.at_level(logging.INFO):
        made = decontaminate.fn(asked, corpus)
    assert [p.read_bytes() for p in parts_of(made)] == [p.read_bytes() for p in parts_of(corpus)]
    links = [p.samefile(q) for p, q in zip(parts_of(made), parts_of(corpus), strict=True)]
    assert not any(links), "damage to one would be damage to both"
    for name in ("parts", "documents", "characters", "by_source"):
        assert made.stats[name] == corpus.stats[name]
    assert made.stats["dropped"] == {"contaminated": {"documents": 0, "characters": 0, "by_source": {}}}
    assert made.stats["checked"] is False
    assert why in made.stats["why"]
    (record,) = [r for r in caplog.records if r.name == "tasks.decontaminate"]
    assert record.levelno == logging.INFO


ALL_SPLITS = [(task, split) for task in Decontaminate().tasks for split in evaluation_splits(task)]


def test_once_the_hub_can_be_reached_the_search_is_made(store, tmp_path, data, toy_texts, caplog, monkeypatch):
    corpus, asked = corpus_of(tmp_path, [*toy_texts[:9], PLANTED["cola"]]), Decontaminate(data=HUB_GLUE.repository)
    at_hand: dict = {}
    monkeypatch.setattr(glue, "hub_evaluation", lambda: at_hand)
    monkeypatch.setattr(glue, "hub_problem", lambda: "no network")
    without_hub = decontaminate.fn(asked, corpus)
    assert texts_of(without_hub) == texts_of(corpus)
    assert without_hub.stats["checked"] is False
    assert "not at hand" in without_hub.stats["why"]
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "no network" in r.getMessage()]
    at_hand |= {(task, split): [data / "cola" / "validation.parquet"] for task, split in ALL_SPLITS if task == "cola"}
    assert decontaminate.target(asked, corpus).key != without_hub.key
    assert texts_of(decontaminate.fn(asked, corpus)) == toy_texts[:9]


FROM_HUB = """
import json, logging
logging.basicConfig(level=logging.WARNING)
from tasks.decontaminate import Decontaminate
asked = Decontaminate(data="nyu-mll/glue")
files, why = asked.evaluation()
asked.check()
read = {f"{task}/{split}": [p.read_bytes().hex() for p in paths] for task, of in files.items() for split, paths in of.items()}
print(json.dumps({"files": read, "why": why, "identity": asked.identity()}))
"""


def test_all_validation_and_test_splits_come_from_the_hub_or_none_is_searched_for(tmp_path: Path):
    from test_hub import address_of, serving

    files = {"README.md": b"#"}
    for task, split in ALL_SPLITS:
        columns = [[f"{task} {split} {c}"] for c in TASKS[task].columns]
        files[f"{task}/{split}-00000-of-00001.parquet"] = write_split(tmp_path, task, split, *columns).read_bytes()
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    env |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def ask(**changes: str) -> tuple[dict, str]:
        options = {"env": env | changes, "cwd": Path(__file__).resolve().parents[1], "timeout": 600}
        done = subprocess.run([sys.executable, "-c", FROM_HUB], capture_output=True, text=True, check=True, **options)
        return json.loads(done.stdout), done.stderr

    gone = "wnli/validation-00000-of-00001.parquet"  # the last that is requested
    with serving({(HUB_GLUE.repository, HUB_GLUE.revision): files}) as server:
        env["HF_ENDPOINT"] = address_of(server)
        server.fails.update({gone: [404] * 9})
        in_part, warning = ask()
        server.reset()
        first, no_warning = ask()
    offline, none_either = ask(HF_HOME=str(tmp_path / "empty"))
    again, none_again = ask()
    assert list((tmp_path / "hf").rglob("cola/validation-*.parquet")), "some of it is in the cache"
    for unchecked in (in_part, offline):
        assert (unchecked["files"], unchecked["identity"]) == ({}, {"unchecked": unchecked["why"]})
    assert [f"{t}/{s}" for t, s in ALL_SPLITS if f"{t}/{s}" in warning.replace(gone, "")] == ["wnli/validation"]
    assert none_either == "", "offline, the stage warns"
    assert "wnli/validation" not in no_warning + none_again
    assert first["files"] == {f"{t}/{s}": [files[f"{t}/{s}-00000-of-00001.parquet"].hex()] for t, s in ALL_SPLITS}
    assert len(first["files"]) == 20
    assert "unchecked" not in first["identity"]
    assert again == first


@pytest.mark.parametrize(
    ("change", "named"),
    [({"data": "nowhere"}, "nowhere"), ({"tasks": ["wnli"]}, "wnli"), ({"data": ""}, "decontaminate.data")],
)
def test_a_folder_without_sentences_is_refused(data: Path, change: dict, named: str):
    with pytest.raises(InputError, match=re.escape(named)):
        Decontaminate(**{"data": str(data)} | change).identity()


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"text": ["x"]}, "sentence1"),
        ({"sentence1": [1], "sentence2": ["x"]}, "int64 in the column sentence1"),
        (None, "Parquet"),
    ],
)
def test_wrong_sentences_are_refused_before_anything_runs(data: Path, table: dict | None, named: str):
    file = data / "rte" / "test.parquet"
    Decontaminate(data=str(data)).check()
    if table:
        pq.write_table(pa.table(table), file)
    else:
        file.write_bytes(b"PAR1 junk")
    with pytest.raises(InputError, match=rf"rte/test\.parquet .*{named}"):
        Decontaminate(data=str(data)).check()
    Decontaminate(data=str(data), tasks=["cola", "mnli"]).check()


def test_missing_splits_are_listed(store: Path, tmp_path: Path, data: Path, toy_texts: list[str], caplog):
    asked = Decontaminate(data=str(data), tasks=["rte", "cola", "wnli"])
    made = decontaminate.fn(asked, corpus_of(tmp_path, toy_texts[:5]))
    assert made.stats["not_at_hand"] == ["cola/test", "rte/validation", "wnli/validation", "wnli/test"]
    assert made.stats["tasks"]["rte"]["splits"] == ["test"]
    assert [r for r in caplog.records if "wnli/test" in r.getMessage()]


def test_shards_of_a_split_are_read_in_order(tmp_path: Path):
    for i, names in enumerate((["a", "b"], ["c"])):
        write_split(tmp_path, "cola", f"test-0000{i}-of-00002", names)
    found = glue.evaluation_files(str(tmp_path), ["cola"])["cola"]["test"]
    assert list(sentences(found, "cola")) == [("sentence", 0, ["a", "b"]), ("sentence", 2, ["c"])]


def test_real_sentences_are_found_in_real_text_under_their_tasks(store: Path, tmp_path: Path, real_data: Path):
    folder, n = real_data / "glue", Decontaminate().words
    files = glue.evaluation_files(str(folder), Decontaminate().tasks)
    assert set(files) == set(Decontaminate().tasks)
    shard = next((real_data / "pile-like").glob("train-*.jsonl.zst"))
    real = list(documents_of(download.fn(Download(source="files", files=[str(shard)], documents=400))))
    planted = {}
    for task, splits in files.items():
        every = (s for paths in splits.values() for _, _, found in sentences(paths, task) for s in found)
        planted[task] = next(s for s in every if len(naive_words(s)) >= n + 2)
    texts = [f"{d.text}\n{planted[task].upper()}\n{d.text[:99]}" for d, task in zip(real, planted, strict=False)]
    asked = Decontaminate(data=str(folder), method="cut")
    made = decontaminate.fn(asked, corpus_of(tmp_path, [*texts, *(d.text for d in real[20:])], part_megabytes=1))
    for task in planted:
        assert made.stats["tasks"][task]["documents"] >= 1
    assert {sample["task"] for sample in samples_of(made)} == set(planted)
    assert decontaminate.fn(asked, made).stats["documents_found"] == 0
