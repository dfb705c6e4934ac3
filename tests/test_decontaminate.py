"""Decontaminate, against a set of n-grams in plain Python."""

import json
import logging
import random
import re
import unicodedata
from pathlib import Path

import naive
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import corpus_of, texts_of

from model.errors import InputError
from tasks import decontaminate as module
from tasks.corpus.parts import parts_of
from tasks.decontaminate import Decontaminate, decontaminate
from tasks.glue import data as glue
from tasks.glue.table import HUB_GLUE, TASKS
from tasks.store.artifacts import Artifact, draft_of
from tasks.text.ngrams import detokenize, words_in

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
    "accents": lambda text: unicodedata.normalize("NFD", re.sub("e(?=[^m])", "é", text)).replace("k.", "k\u0301."),
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
    for number, (task, text) in enumerate(zip(PLANTED, written, strict=True)):
        sample = samples_of(made)[number]
        assert (sample["task"], sample["source"], sample["id"]) == (task, "toy", f"toy.jsonl:{21 + number}")
        assert sample["before"] + sample["shared"] + sample["after"] in text
        assert not unicodedata.combining(sample["after"][0]), "accents of the last letter are shared too"
        split = pq.read_table(data / task / f"{sample['split']}.parquet")
        assert detokenize(split[sample["column"]][sample["row"]].as_py()) == sample["sentence"]
        assert naive.words(sample["shared"]) == naive.words(sample["sentence"])


def test_a_sentence_in_the_tokens_of_the_treebank_is_found_as_it_is_too(store, tmp_path, data, toy_texts: list[str]):
    texts = [*toy_texts[:5], PLANTED["sst2"], f"{toy_texts[5]} {PLANTED['sst2']}"]
    made = decontaminate.fn(Decontaminate(data=str(data)), corpus_of(tmp_path, texts))
    assert texts_of(made) == toy_texts[:5]
    about = made.stats["tasks"]["sst2"]
    assert (about["documents"], about["sentences"], about["sentences_found"]) == (2, 1, 1)


SCRIPTS = {
    "latin": (("an", "Öl", "by", "Été", "42"), (" ", " ", " ", ", ", "\n", " - ", "_", "...\t", "; ")),
    "any": (("Ёж ", "ЕЖ\n", "今", "天，", "फ़ि ", "फि।"), ("", "", " ", "—", "\u00ad")),
}


def random_text(rng: random.Random, count: int, script: str) -> str:
    """Words of which some repeat, so that runs of them are often shared, between all kinds of separators."""
    words, separators = SCRIPTS[script]
    return "".join(rng.choice(words) + rng.choice(separators) for _ in range(count))


@pytest.mark.parametrize(("script", "seed"), [("latin", 0), ("latin", 1), ("any", 2), ("any", 3)])
def test_it_finds_what_a_set_of_ngrams_finds(store: Path, tmp_path: Path, script: str, seed: int, caplog):
    rng = random.Random(seed)
    n = 6
    texts = [random_text(rng, rng.randrange(1, 60), script) + f"own{i}" for i in range(150)]
    sentences = {}
    for task in ("cola", "rte"):
        own = [[random_text(rng, rng.randrange(1, 10), script) for _ in range(50)] for _ in TASKS[task].columns]
        sentences[task] = [[*column, "", "...", None] for column in own]
        write_split(tmp_path / "glue", task, "validation", *sentences[task])
    asked = Decontaminate(data=str(tmp_path / "glue"), words=n, tasks=["rte", "cola", "wnli"])
    made = decontaminate.fn(asked, corpus_of(tmp_path, texts, part_megabytes=0.004))
    found = {task: [set(naive.runs(s or "", n)) for column in of for s in column] for task, of in sentences.items()}
    of_text = [set(naive.runs(text, n)) for text in texts]
    all_tasks, *by_task = made.stats["table"]
    for (task, grams), row in zip(found.items(), by_task, strict=True):
        every = set().union(*grams)
        assert row == {
            "task": task,
            "splits": "validation",
            "sentences": len(grams),
            "too short": sum(not own for own in grams),
            "n-grams": len(every),
            "sentences found": sum(bool(own & set().union(*of_text)) for own in grams),
            "in documents": sum(bool(own & every) for own in of_text),
        }
    every = set().union(*found["cola"], *found["rte"])
    clean = [text for text, own in zip(texts, of_text, strict=True) if not own & every]
    assert texts_of(made) == clean
    assert 0 < len(clean) < len(texts)
    assert made.stats["documents_found"] == all_tasks["in documents"] == len(texts) - len(clean)
    assert all_tasks["n-grams"] == sum(row["n-grams"] for row in by_task)
    assert made.stats["not_at_hand"] == ["cola/test", "rte/test", "wnli/validation", "wnli/test"]
    assert ", ".join(made.stats["not_at_hand"]) in caplog.text
    assert len(samples_of(made)) == 2 * module.SAMPLES
    for sample in samples_of(made):
        assert sample["before"] + sample["shared"] + sample["after"] in texts[int(sample["id"].split(":")[1]) - 1]
        shared = tuple(naive.words(sample["shared"]))
        assert naive.runs(sample["shared"], n)[0] in naive.runs(sample["sentence"], n)
        assert any(shared[-len(run) :] == run for run in every)


@pytest.mark.parametrize("seed", range(3))
def test_words_stand_where_they_are_said_to(seed: int):
    rng = random.Random(seed)
    alphabet = "aB7_-.' \n\0\x7f\u00adéÉß’…\u0301\u200bИ中ﬁ\U0001f600Ⅷが한かप्र"
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=40))
        assert all(naive.words(text[w.start : w.end]) == [w.word] for w in words_in(text))


def test_where_no_sentence_is_long_enough_nothing_is_found(store, tmp_path: Path, toy_texts: list[str]):
    write_split(tmp_path / "glue", "cola", "validation", [SHORT])
    made = decontaminate.fn(Decontaminate(data=str(tmp_path / "glue")), corpus_of(tmp_path, [*toy_texts[:9], SHORT]))
    assert texts_of(made) == [*toy_texts[:9], SHORT]
    assert made.stats["checked"]


def test_the_key_follows_the_sentences_and_not_their_place(store: Path, tmp_path: Path, data: Path):
    corpus = Artifact(stage="deduplicate", key="0" * 12)

    def key(**changes) -> str:
        return decontaminate.target(Decontaminate(**{"data": str(data)} | changes), corpus).key

    first = key()
    moved = tmp_path / "moved"
    data = data.rename(moved)
    assert key() == key(tasks=Decontaminate().tasks[::-1]) == first
    keys = {first, key(words=12), key(tasks=["cola"]), key(data="probes")}
    for split in ("validation", "test"):
        write_split(data, "cola", split, [SHORT])
        keys.add(key())
    assert len(keys) == 6


def test_with_nothing_to_search_for_the_corpus_is_passed_on(store, tmp_path, toy_texts, caplog):
    corpus = corpus_of(tmp_path, toy_texts)
    asked = Decontaminate(data="probes")
    half = draft_of(decontaminate.target(asked, corpus)) / parts_of(corpus)[0].name
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half of it")
    made = decontaminate.fn(asked, corpus)
    for part, before in zip(parts_of(made), parts_of(corpus), strict=True):
        assert part.read_bytes() == before.read_bytes()
        assert part.samefile(before), "no second copy of the text"
    for name in ("parts", "documents", "characters", "by_source"):
        assert made.stats[name] == corpus.stats[name]
    assert made.stats["dropped"]["contaminated"]["documents"] == 0
    assert made.stats["checked"] is False
    assert "probes" in made.stats["why"]
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_once_the_hub_can_be_reached_the_search_is_made(store, tmp_path, data, toy_texts, caplog, monkeypatch):
    corpus = corpus_of(tmp_path, [*toy_texts[:9], PLANTED["cola"]])
    asked = Decontaminate(data=HUB_GLUE.repository)
    at_hand: dict = {}
    monkeypatch.setattr(glue, "hub_evaluation", lambda: at_hand)
    monkeypatch.setattr(glue, "hub_problem", lambda source: "no network")
    without_hub = decontaminate.fn(asked, corpus)
    assert texts_of(without_hub) == texts_of(corpus)
    assert without_hub.stats["checked"] is False
    assert "not at hand" in without_hub.stats["why"]
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "no network" in r.getMessage()]
    at_hand["cola", "validation"] = [data / "cola" / "validation.parquet"]
    assert decontaminate.target(asked, corpus).key != without_hub.key
    assert texts_of(decontaminate.fn(asked, corpus)) == toy_texts[:9]


@pytest.mark.parametrize(
    ("change", "content", "named"),
    [
        ({"data": "nowhere"}, b"", "nowhere"),
        ({"tasks": ["wnli"]}, b"", "wnli"),
        ({"data": ""}, b"", "decontaminate.data"),
        ({}, {"text": ["x"]}, "rte/test.parquet"),
        ({}, {"sentence1": [1], "sentence2": ["x"]}, "rte/test.parquet"),
        ({}, b"PAR1 junk", "rte/test.parquet"),
    ],
)
def test_wrong_sentences_are_refused_by_file_before_anything_runs(data: Path, change: dict, content, named: str):
    if isinstance(content, dict):
        pq.write_table(pa.table(content), data / "rte" / "test.parquet")
    else:
        (data / "rte" / "test.parquet").write_bytes(content)
    with pytest.raises(InputError, match=re.escape(named)):
        Decontaminate(**{"data": str(data)} | change).check()
    Decontaminate(data=str(data), tasks=["cola", "mnli"]).check()


def test_a_task_that_costs_much_of_the_text_is_warned_of(store: Path, tmp_path: Path, caplog):
    texts = [f"Letter {i}: " + " ".join(f"{word}{i}" for word in "abcdefghijklmnopqr") for i in range(20)]
    rows = [{"text": text.split(": ")[1], "label": i % 2} for i, text in enumerate(texts[:8])]
    (tmp_path / "own").mkdir()
    for split in ("train", "validation"):
        (tmp_path / f"own/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = {"name": "letters", "data": str(tmp_path / "own")}
    made = decontaminate.fn(Decontaminate(tasks=[own], data=""), corpus_of(tmp_path, texts))
    assert made.stats["documents"] == 12
    assert "letters" in next(r.getMessage() for r in caplog.records if "8 documents" in r.getMessage())
