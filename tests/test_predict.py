"""`cram predict` and `cram fill`: the answers of cram's own models, and errors that name what is wrong."""

import itertools
import json
import logging
import os
import random
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pytest
import torch
import typer
from conftest import roughen, sentence, store_of_its_own
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from toys import MODERN, ORIGINAL, rough_bert, rough_classifier, tokenizer_in
from typer.testing import CliRunner

from flows.cli import predict
from flows.cli.pipelines import model_folder
from model import export
from model.errors import InputError
from model.finetuning import Classifier
from model.settings import Kind
from tasks.store.manifests import digest
from tasks.text.tokenizer import LONGEST_WORD, MASK, load_tokenizer, save_tokenizer
from tasks.vocabulary import train_wordpiece

HOME = Path(__file__).resolve().parents[1]
LENGTH = 24
LONG_WORD = "x" * (LONGEST_WORD + 1)
CRAM = {"layers": 2, "hidden": 32, "heads": 4, "intermediate": 48, "norm_eps": 1e-6}  # the paper's layout
LABELS = {"sst2": ("negative", "positive"), "mnli": ("entailment", "neutral", "contradiction"), "stsb": ()}
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(predict.predict)
app.command()(predict.fill)
torch.set_num_threads(1)


def manifest(folder: Path, stage: str, **params: object) -> Path:
    """Make the folder an artifact."""
    about = {"stage": stage, "params": params, "inputs": {}, "stats": {}, "files": [], "finished": folder.name}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(json.dumps(about))
    return folder


def pretrained(folder: Path, layout: dict = CRAM | MODERN) -> Path:
    """A pretrained model, in a folder of its own."""
    folder.mkdir(parents=True)
    export.save(rough_bert(layout, tokenizer_in(folder, LENGTH), LENGTH), folder)
    return folder


def finetuned(folder: Path, task: str, **about) -> Path:
    """An artifact with a model of the task."""
    tuned(folder, LABELS[task], **{"texts": None} | about)
    return manifest(folder, "finetune", task=task)


def tuned(
    folder: Path, labels: tuple[str, ...], kind: Kind = "classes", layout: dict = CRAM | MODERN,
    head: str = "native", max_tokens: int | None = None, **reads
) -> Classifier:  # fmt: skip
    """A model finetuned on a task of one's own, saved there."""
    folder.mkdir(parents=True)
    bert = rough_bert(layout, tokenizer_in(folder, LENGTH), LENGTH)
    classifier = rough_classifier(bert, max(1, len(labels)), head, kind=kind, **{"texts": 1} | reads)
    if kind == "regression":
        classifier.rescale(1e-6, 0.0)
    export.save_classifier(classifier, folder, labels, max_tokens)
    return classifier


def without_manifest(folder: Path, to: Path) -> Path:
    """A copy of a model's files as one makes it for transformers."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("stage.json"))
    return to


@pytest.fixture(autouse=True)
def no_log_by_handlers_of_earlier_tests() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pretrained model, models finetuned on three tasks, and a run whose model was not kept."""
    folder = tmp_path_factory.mktemp("store")
    with store_of_its_own(folder):
        manifest(pretrained(folder / "pretrain" / "modern"), "pretrain")
        for task in LABELS:
            finetuned(folder / "finetune" / task, task)
        manifest(folder / "finetune" / "unkept", "finetune")
        yield folder


def run(*arguments: str | Path, given: str | bytes = b"") -> tuple[list[str], str]:
    """Run a command: the lines it printed, and its error or else its notes, without the line on the model."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    said = str(done.exception) if done.exception else re.sub("^Model: .*\n", "", done.stderr)
    if done.exception:
        assert isinstance(done.exception, InputError), done.exception
        assert "\n" not in said
    return done.stdout.split("\n")[:-1], said


@pytest.mark.parametrize(
    ("labels", "about"),
    [
        (LABELS["mnli"], {"texts": None}),
        (LABELS["mnli"], {"layout": CRAM, "head": "tanh", "pooling": "compare", "texts": 2}),
        ((), {"kind": "regression", "texts": None}),
    ],
    ids=["classes", "two texts compared", "a number"],
)
def test_predict_gives_the_answers_of_cram_s_own_model_alone_or_in_batches(labels, about, tmp_path: Path):
    rng = random.Random(3)
    given = [[" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(2)] for _ in range(70)]
    given[7][0] += " [SEP] a [PAD] map"  # text, not special tokens
    (tmp_path / "texts").write_text("".join("\t".join(parts) + "\n" for parts in given))
    classifier = tuned(tmp_path / "model", labels, **about)
    options = ["--json", "--scores"] if labels else ["--json"]
    in_batches = run("predict", tmp_path / "model", tmp_path / "texts", *options)[0]
    alone = run("predict", tmp_path / "model", *options, given=(tmp_path / "texts").read_bytes())[0]
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.enable_truncation(LENGTH, strategy="longest_first")
    for answers in (in_batches, alone):
        found = set()
        for number, (answer, parts) in enumerate(zip(map(json.loads, answers), given, strict=True), 1):
            with torch.no_grad():
                scores = classifier(torch.tensor([tokenizer.encode(*parts).ids]))[0]
            assert {"line": number, "text": parts[0], "text_pair": parts[1]}.items() <= answer.items()
            found.add(answer["label"])
            if not labels:
                assert answer["label"] == pytest.approx(scores.item(), rel=1e-5)
                continue
            assert list(answer["probabilities"].values()) == pytest.approx(scores.softmax(-1).tolist(), abs=1e-5)
            assert answer["label"] == labels[scores.argmax()]
            assert answer["probability"] == max(answer["probabilities"].values())
        assert len(found) > 1, "they aren't all the same"


def spans(
    tokenizer: Tokenizer, classifier: Classifier, text: str, tags: tuple[str, ...] = TAGS
) -> list[tuple[int, int, str, float]]:
    """The entities by each word's first piece as the tokenizer divides them; other tags than O and B-X are words'."""
    from seqeval.metrics.sequence_labeling import get_entities

    encoding = tokenizer.encode(text)
    words = []
    names = []
    with torch.no_grad():
        shares = classifier(torch.tensor([encoding.ids]))[0].softmax(-1)
    pieces = [number for number, word in enumerate(encoding.word_ids) if word is not None]
    for _, numbers in itertools.groupby(pieces, lambda number: encoding.word_ids[number]):
        first, *_, end = list(numbers) * 2
        names.append(tags[shares[first].argmax()])
        words.append((encoding.offsets[first][0], encoding.offsets[end][1], shares[first].max().item()))
    found = [(name, place, place) for place, name in enumerate(names) if name != "O"]
    if all(name == "O" or name[1] == "-" for name in tags):
        found = get_entities(names)
    return [
        (words[first][0], words[last][1], name, np.mean([share for *_, share in words[first : last + 1]]))
        for name, first, last in found
    ]


def test_entities_have_the_labels_of_their_words_first_pieces_alone_or_in_batches(tmp_path: Path):
    classifier = tuned(tmp_path / "model", TAGS, "tokens")
    rng = random.Random(4)
    tokenizer = load_tokenizer(tmp_path / "model")
    tokenizer.enable_truncation(LENGTH)
    odd = [
        "The U.N. saw Jean-Paul’s “map”",
        "it’s Straße, cafe\u0301 [SEP] a ``map''",
        "\u4e2d",
        # the normaliser deletes part of a word; `###` is both a word and a piece, `#`, of one
        *(f"{word} {rest}" for word in ("the", "a", "some") for rest in ("ma\u2014p ma\u2019p map", "### #### map")),
    ]
    given = odd + [" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(40)]
    (tmp_path / "texts").write_text("".join(text + "\n" for text in given))
    in_batches, notes = run("predict", tmp_path / "model", tmp_path / "texts", "--json")
    alone = run("predict", tmp_path / "model", "--json", given=(tmp_path / "texts").read_bytes())[0]
    long = sum(len(load_tokenizer(tmp_path / "model").encode(text).ids) > LENGTH for text in given)
    assert notes.splitlines() == [f"{long} lines truncated.", "1 line without a known word."]
    for answers in (in_batches, alone):
        for answer, text in zip(map(json.loads, answers), given, strict=True):
            assert answer.keys() == {"line", "text", "entities"}
            found = [tuple(one[name] for name in ("start", "end", "label")) for one in answer["entities"]]
            expected = spans(tokenizer, classifier, text)
            assert found == [one[:3] for one in expected], text
            shares = [one["probability"] for one in answer["entities"]]
            assert shares == pytest.approx([one[3] for one in expected], abs=1e-5)
            assert all(one["word"] == text[one["start"] : one["end"]] for one in answer["entities"])
    plain = run("predict", tmp_path / "model", tmp_path / "texts")[0]
    for line, answer in zip(plain, map(json.loads, in_batches), strict=True):
        fields = [field.rsplit(" ", 2) for field in line.split("\t") if field]
        assert [(word, label) for word, label, _ in fields] == [(e["word"], e["label"]) for e in answer["entities"]]
    assert run("predict", tmp_path / "model", given="\n")[0] == [""]
    assert "--scores" in run("predict", tmp_path / "model", "--scores", given="a map")[1]
    assert "1 tab" in run("predict", tmp_path / "model", given="a\tmap")[1]


@pytest.mark.parametrize(
    "tags",
    [("O", "B-PER", "I-PER", "E-PER", "S-PER"), ("O", "noun", "S-verb", "adjective", "pro-noun")],
    ids=["BIOES", "parts of speech"],
)
def test_other_marks_of_spans_are_understood_and_other_tags_are_those_of_words(tags: tuple, tmp_path: Path):
    classifier = tuned(tmp_path / "model", tags, "tokens")
    text = "The river saw a map. Some bread, the map"
    tokenizer = load_tokenizer(tmp_path / "model")
    [answer], _ = run("predict", tmp_path / "model", "--json", given=text)
    found = [tuple(one[name] for name in ("start", "end", "label")) for one in json.loads(answer)["entities"]]
    assert found == [one[:3] for one in spans(tokenizer, classifier, text, tags)]
    assert len(found) > 2


def test_all_labels_of_probability_one_half_are_given_or_none(tmp_path: Path):
    names = ("river", "map", "bread")
    rng = random.Random(5)
    classifier = tuned(tmp_path / "model", names, "multilabel")
    tokenizer = load_tokenizer(tmp_path / "model")
    given = [sentence(rng) for _ in range(40)]
    lines = "\n".join([*given, ""])
    answers = map(json.loads, run("predict", tmp_path / "model", "--json", "--scores", given=lines)[0])
    plain = run("predict", tmp_path / "model", given=lines)[0]
    counts = set()
    for text, answer, line in zip(given, answers, plain, strict=True):
        with torch.no_grad():
            shares = classifier(torch.tensor([tokenizer.encode(text).ids]))[0].sigmoid().tolist()
        assert answer["probabilities"] == pytest.approx(dict(zip(names, shares, strict=True)), abs=1e-5)
        expected = {name: share for name, share in zip(names, shares, strict=True) if share >= 0.5}
        assert answer["labels"] == pytest.approx(expected, abs=1e-5)
        assert [field.split(" ")[0] for field in line.split("\t")] == (list(answer["labels"]) or [""])
        counts.add(len(expected))
    assert counts >= {0, 1, 2}
    [first] = run("predict", tmp_path / "model", "--scores", given=given[0])[0]
    assert [field.split("=")[0] for field in first.split("\t")[-3:]] == list(names)


def test_a_number_has_its_digits_whatever_its_scale(tmp_path: Path):
    classifier = tuned(tmp_path / "model", (), "regression")
    tokenizer = load_tokenizer(tmp_path / "model")
    with torch.no_grad():
        expected = classifier(torch.tensor([tokenizer.encode("some bread").ids])).item()
    assert 0 < abs(expected) < 1e-4
    [line], _ = run("predict", tmp_path / "model", given="some bread")
    assert float(line) == pytest.approx(expected, rel=1e-3)
    [line], _ = run("predict", tmp_path / "model", "--json", given="some bread")
    assert json.loads(line)["label"] == pytest.approx(expected, rel=1e-6)
    assert predict.as_line({"label": 1234567.0}, False, False) == "1234567.0000"


def test_an_answer_is_on_the_line_of_its_text_with_line_ends_of_unix_and_windows(tmp_path: Path):
    unix = b"the river\n\na map\n  \t \nsome bread"
    expected, notes = run("predict", "sst2", given=unix)
    assert [bool(line) for line in expected] == [True, False, True, False, True]
    assert notes == "2 lines without a text.\n"
    for given in (unix + b"\n", unix.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf" + unix):
        (tmp_path / "file").write_bytes(given)
        assert run("predict", "sst2", tmp_path / "file")[0] == expected
        answers = [json.loads(line) for line in run("predict", "sst2", "--json", given=given)[0]]
        assert [answer["text"] for answer in answers] == ["the river", "", "a map", "", "some bread"]
    assert answers[1] == {"line": 2, "text": "", "label": None}
    assert run("predict", "sst2")[0] == run("fill")[0] == []


@pytest.mark.parametrize("last", ["", "\n"])
def test_there_are_as_many_answers_as_wc_counts_lines_and_other_marks_are_text(last: str, tmp_path: Path):
    lines = ["a map"]
    for odd in "\r\0\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029\x1a":
        lines += [f"the {odd}river", f"{odd}some bread", f"a map{odd}", odd, "the river"]
    (tmp_path / "file").write_text("\n".join(lines) + last, encoding="utf-8", newline="")
    counted = int(subprocess.run(["wc", "-l", tmp_path / "file"], capture_output=True, text=True).stdout.split()[0])
    assert counted + (not last) == len(lines)
    from_file = run("predict", "sst2", tmp_path / "file", "--json")[0]
    for found in (from_file, run("predict", "sst2", "--json", given=(tmp_path / "file").read_bytes())[0]):
        answers = [json.loads(line) for line in found]
        assert [answer["line"] for answer in answers] == [*range(1, len(lines) + 1)]
        for answer, line in zip(answers, lines, strict=True):
            without_end = line.removesuffix("\r")  # of a line of Windows
            assert answer["text"] == (without_end if without_end.strip() else "")
    assert len(run("predict", "sst2", tmp_path / "file")[0]) == len(lines)


@pytest.mark.parametrize(
    ("task", "given", "note"),
    [
        ("sst2", "a map\n" + "the river " * 30, "1 line truncated"),
        ("sst2", "a map\n\u4e2d\u6587", "1 line without a known word"),  # nothing is left of it
        ("mnli", f"a map\t{LONG_WORD}\nsome\tbread", "1 line without a known word"),  # [UNK]
        ("sst2", "a map", ""),
    ],
)
def test_what_makes_answers_doubtful_is_noted_after_them(task: str, given: str, note: str):
    assert run("predict", task, given=given)[1].startswith(note)


def test_inputs_are_truncated_as_in_finetuning(tmp_path: Path):
    folder = finetuned(tmp_path / "model", "sst2", texts=1, max_tokens=10)
    short = "a map " * 4
    (first, second), notes = run("predict", folder, given=f"{short}\n{short}the river")  # 10 tokens and more
    assert first == second
    assert notes.startswith("1 line truncated")


@pytest.mark.parametrize(
    ("task", "line", "named"),
    [
        ("mnli", b"caf\xe9\tb", "byte 0xe9 at position 4"),
        ("mnli", b"\xed\xa0\x80\tb", "byte 0xed at position 1"),  # half a surrogate pair
        ("mnli", "a\té".encode()[:-1], "byte 0xc3 at position 3"),
        ("mnli", b"one text", "0 tabs;"),
        ("mnli", b"a\tb\tc", "2 tabs;"),
        ("mnli", b"a\t ", "second text is empty"),
        ("mnli", b"\tb", "first text is empty"),
        ("sst2", b"the\triver", "1 tab;"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named_after_the_answers_before_it(
    task: str, line: bytes, named: str, tmp_path: Path
):
    good = b"a map\tthe river" if task == "mnli" else b"a map"
    before, _ = run("predict", task, given=good)
    (tmp_path / "texts").write_bytes(b"\n".join([good, line, good, b""]))
    printed, error = run("predict", task, tmp_path / "texts")
    assert printed == before
    assert re.match(f"Line 2 .*{named}", error)


@pytest.mark.parametrize("name", ["new.csv", "new.json", "new.jsonl", "new.parquet"])
def test_a_table_is_refused_with_how_to_write_its_texts(name: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"text\na map\n")
    printed, error = run("predict", "sst2", tmp_path / name)
    assert not printed
    assert f"{tmp_path / name}')" in error or f"{tmp_path / name}', lines=True)" in error


def test_an_unknown_task_takes_its_number_of_texts_from_the_folder_or_the_first_line(store: Path, tmp_path: Path):
    folder = without_manifest(store / "finetune" / "mnli", tmp_path / "copy")
    pair = "a map\tthe river\n"
    known, _ = run("predict", store / "finetune" / "mnli", given=pair)
    assert run("predict", folder, given="\n" + pair)[0] == ["", *known]
    assert "Line 2 has 0 tabs" in run("predict", folder, given=pair + "a map")[1]
    assert "Line 2 has 1 tab" in run("predict", folder, given="a map\n" + pair)[1]
    for task, number, wrong in (("sst2", 1, pair), ("mnli", 2, "the river")):
        assert run("predict", finetuned(tmp_path / task, task, texts=number), given=wrong)[1].startswith("Line 1 has ")


def test_a_model_is_named_as_artifacts_are_or_by_its_folder(store: Path, tmp_path: Path, monkeypatch, capsys):
    for name in ("modern", "mod", "pretrain/modern", "pretrain/m", "latest", "pretrain/latest"):
        assert model_folder("pretrain", name) == store / "pretrain" / "modern"
    assert model_folder("finetune", "stsb").name == "stsb"
    assert "finetune/stsb, task stsb" in capsys.readouterr().err, "which one answers is said"
    shutil.copytree(store / "pretrain" / "modern", tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    for name in ("copied", "./copied", str(tmp_path / "copied/")):
        assert model_folder("pretrain", name).samefile(tmp_path / "copied")
    assert len(run("fill", "a [MASK]", "--model", "copied")[0]) == 1


def test_the_newest_model_is_taken_of_one_task_and_asked_for_among_several(tmp_path: Path, monkeypatch):
    with store_of_its_own(tmp_path):
        for key, task in (("0a", "tickets"), ("0b", "tickets"), ("0c", "letters")):
            if task == "letters":
                assert model_folder("finetune", "latest").name == "0b"
            finetuned(tmp_path / "finetune" / key, "sst2")
            manifest(tmp_path / "finetune" / key, "finetune", task=task)
        manifest(tmp_path / "finetune" / "0d", "finetune", task="unkept")
        for name in ("latest", "finetune/latest"):
            with pytest.raises(InputError, match=r"tickets \(finetune/0b\), letters \(finetune/0c\)"):
                model_folder("finetune", name)
        (tmp_path / "labels" / "tickets").mkdir(parents=True)  # a folder without a model
        monkeypatch.chdir(tmp_path / "labels")
        found = [model_folder("finetune", name).name for name in ("tickets", "finetune/tickets", "letters", "0a")]
        assert found == ["0b", "0b", "0c", "0a"]


def test_a_line_has_what_was_asked_for_and_nothing_that_controls_the_terminal():
    answer = {"label": "\x1b[2Jgood\t", "probability": 1.0, "probabilities": {"\x9b": 1.0}}
    plain = "\\u001b[2Jgood\\u0009\t1.0000"
    assert predict.as_line(dict(answer), False, False) == plain
    assert predict.as_line(dict(answer), True, False) == f"{plain}\t\\u009b=1.0000"
    assert json.loads(predict.as_line(dict(answer), True, True)) == answer
    assert predict.as_line(dict(answer), True, True).isprintable()
    assert predict.as_line({"label": 0.5}, False, False) == "0.5000", "a score of STS-B"


def test_what_is_no_file_or_no_model_of_that_kind_is_refused(store: Path, tmp_path: Path):
    pretraining = store / "pretrain" / "modern"
    finetuning = store / "finetune" / "sst2"
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, named in [
        (["predict", "finetune/nothing"], "'nothing'"),
        (["predict", "a/b/c"], "'a/b/c'"),
        (["predict", "/sst2"], "'/sst2'"),
        (["predict", "x" * 5000], "xxx"),
        (["predict", ""], "''"),
        (["predict", "unkept"], "mnli (mnli), sst2 (sst2), stsb (stsb)"),
        (["predict", empty], "can't be opened"),
        (["predict", manifest(tmp_path / "report", "report")], "stage report"),
        (["predict", pretraining], "stage pretrain"),
        *((["predict", f"pretrain/{name}"], f"pretrain/{name} was made by the stage") for name in ("latest", "mod")),
        (["fill", "[MASK]", "--model", "finetune/latest"], "finetune/latest was made by the stage"),
        (["predict", "filter/latest"], "no artifacts of filter"),
        (["predict", without_manifest(pretraining, tmp_path / "bare")], "its head is MaskedLM"),
        (["predict", "stsb", "--scores"], "--scores"),
        *((["predict", "sst2", file], repr(file)) for file in ("", "gone.txt", "/")),
        (["fill", "[MASK]", "--model", empty], "can't be opened"),
        (["fill", "[MASK]", "--model", finetuning], "stage finetune"),
        (["fill", "[MASK]", "--model", without_manifest(finetuning, tmp_path / "tuned")], "its head is Sequence"),
    ]:
        printed, error = run(*arguments, given="a\tb")
        assert printed == []
        assert named in error, arguments


def test_a_damaged_model_and_a_tokenizer_of_another_are_refused(tmp_path: Path):
    folder = pretrained(tmp_path / "model")
    weights = folder / "model.safetensors"
    listed = [{"path": weights.name, "bytes": weights.stat().st_size, "sha256": digest(weights)}]
    (folder / "stage.json").write_text(json.dumps({"stage": "pretrain", "files": listed}))
    assert run("fill", "[MASK]", "--model", folder)[0]
    words = [f"{a}{b}{c}" for a in "abcdef" for b in "ghijkl" for c in "mnopqr"]
    save_tokenizer(train_wordpiece(pa.table({"word": words, "count": [9] * len(words)}), 400), folder)
    assert re.search(f"{folder} .* tokenizer has 3.. entries", run("fill", "a [MASK]", "--model", folder)[1])
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights.name in run("fill", "[MASK]", "--model", folder)[1]
    tuned = finetuned(tmp_path / "tuned", "mnli")
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"id2label": {"0": "only one"}}))
    assert str(tuned) in run("predict", tuned, given="a\tb")[1]


# What others trained: transformers wrote the model again (test_export compares the scores of each layout and head)

NAMES = ("bad", "good", "so so")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pretrained model that they began from."""
    return pretrained(tmp_path_factory.mktemp("others") / "start", CRAM | ORIGINAL)


def saved(transformers, start: Path, folder: Path, head: str, names: tuple = NAMES, **settings: object):
    """A model of transformers with a new head, as `Trainer.save_model` writes it; the model."""
    about = {"id2label": dict(enumerate(names)), "label2id": {name: number for number, name in enumerate(names)}}
    model = getattr(transformers, f"AutoModelFor{head}").from_pretrained(start, **(about if names else {}), **settings)
    roughen(model).eval().save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(start).save_pretrained(folder)
    return model


KINDS = [("classes", NAMES), ("multilabel", NAMES), ("regression", ("price",))]


@pytest.mark.parametrize(("kind", "names"), KINDS, ids=[kind for kind, _ in KINDS])
def test_what_others_trained_on_texts_is_answered_with_its_own_labels_and_kind(
    kind, names, start: Path, tmp_path: Path, transformers
):
    problem = export.PROBLEMS[kind]
    saved(transformers, start, tmp_path / "model", "SequenceClassification", names, problem_type=problem)
    options = {"function_to_apply": "none"} if kind == "regression" else {}
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path / "model"))
    found = pipeline("the river saw a map", top_k=None, **options)
    shares = {one["label"]: pytest.approx(one["score"], abs=1e-5) for one in found}
    scores = ["--scores"] if kind != "regression" else []
    [line], _ = run("predict", tmp_path / "model", "--json", *scores, given="the river saw a map")
    answer = json.loads(line)
    if kind == "regression":
        assert answer["label"] == shares["price"]
    else:
        assert answer["probabilities"] == shares
        assert list(answer["probabilities"]) == list(names), "in the order of the classes"
        assert ("labels" in answer) == (kind == "multilabel")


@pytest.mark.parametrize("layout", [CRAM, CRAM | MODERN], ids=["cram's", "modern"])
def test_what_others_trained_on_words_gives_the_entities_of_the_plain_pipeline(layout, tmp_path: Path, transformers):
    start = pretrained(tmp_path / "start", layout)
    folder = tmp_path / "model"
    saved(transformers, start, folder, "TokenClassification", TAGS)
    tag = transformers.pipeline("token-classification", model=str(folder), aggregation_strategy="first")
    labels = set()
    for number in range(20):
        text = "Breadmap " + sentence(random.Random(number))
        [line], _ = run("predict", folder, "--json", given=text)
        found = [(one["start"], one["end"], one["label"]) for one in json.loads(line)["entities"]]
        assert found == [(one["start"], one["end"], one["entity_group"]) for one in tag(text)]
        labels |= {label for _, _, label in found}
    assert labels == {"PER", "LOC"}
    assert len(load_tokenizer(folder).encode("Breadmap").ids) > 3, "of several pieces"


def test_masks_are_filled_by_what_others_trained_further_in_one_file_or_in_shards(
    start: Path, tmp_path: Path, transformers
):
    folder = tmp_path / "model"
    shards = tmp_path / "shards"
    text = "The river [MASK] a map"
    model = saved(transformers, start, folder, "MaskedLM", ())
    found = transformers.pipeline("fill-mask", model=str(folder))(text)
    expected = {one["token_str"].replace(" ", ""): pytest.approx(one["score"], abs=1e-5) for one in found}
    model.save_pretrained(shards, max_shard_size="20KB")
    transformers.AutoTokenizer.from_pretrained(start).save_pretrained(shards)
    assert not (shards / "model.safetensors").exists()
    for copy in (folder, shards):
        [line], _ = run("fill", text, "--model", copy, "--json")
        [mask] = json.loads(line)["masks"]
        assert {one["token"]: one["probability"] for one in mask} == expected
    min(shards.glob("*.safetensors")).unlink()
    assert str(shards) in run("fill", "a [MASK]", "--model", shards)[1]


def test_a_classifier_of_pairs_that_others_trained_on_single_texts_takes_these(tmp_path: Path, transformers):
    pairs = finetuned(tmp_path / "pairs", "mnli", texts=2, max_tokens=8)
    assert "expected two texts" in run("predict", pairs, given="a map")[1]
    saved(transformers, pairs, tmp_path / "model", "SequenceClassification")
    [line], notes = run("predict", tmp_path / "model", given="the river saw a map and some bread")
    assert line.split("\t")[0] in NAMES
    assert notes == "", "nor is it cut to 8 tokens"


def test_tokens_that_were_added_are_read_and_rows_without_a_token_are_never_filled_in(
    start: Path, tmp_path: Path, transformers
):
    folder = tmp_path / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    model = transformers.AutoModelForMaskedLM.from_pretrained(start)
    tokenizer.add_tokens(["zebra"])
    entries = len(tokenizer)
    model.resize_token_embeddings(entries + 7)
    with torch.no_grad():
        model.cls.predictions.bias[entries:] = 50.0
        model.cls.predictions.bias[entries - 1] = 40.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    [line], _ = run("fill", "a zebra [MASK]", "--model", folder, "--top", "3")
    tokens = [field.split(" ")[0] for field in line.split("\t")]
    assert tokens[0] == "zebra"
    assert len(tokens) == 3
    model.resize_token_embeddings(entries - 1)
    model.save_pretrained(folder)
    assert f"{entries} entries, but the model only {entries - 1}" in run("fill", "[MASK]", "--model", folder)[1]


def test_special_tokens_of_a_user_are_read_as_such(start: Path, tmp_path: Path, transformers):
    folder = tmp_path / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(start)
    tokenizer.add_tokens(["[E1]"], special_tokens=True)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(start, num_labels=3).eval()
    model.resize_token_embeddings(len(tokenizer))
    roughen(model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    [answer], _ = run("predict", folder, "--json", "--scores", given="the [E1] river")
    given = tokenizer("the [E1] river", return_tensors="pt")
    assert len(tokenizer) - 1 in given.input_ids
    with torch.no_grad():
        shares = model(**given).logits.softmax(-1)[0].tolist()
    assert list(json.loads(answer)["probabilities"].values()) == pytest.approx(shares, abs=1e-5)


def test_what_is_not_the_whole_of_a_model_to_open_is_refused(start: Path, tmp_path: Path, transformers):
    auto = transformers.AutoModelForSequenceClassification
    whole = auto.from_pretrained(start, num_labels=3)
    numbers = auto.from_pretrained(start, num_labels=3, problem_type="regression")
    for name, model, change, named in (
        ("untokenized", whole, None, "no tokenizer.json"),
        ("numbers", numbers, {}, "predicts 3 numbers"),
        ("answers", transformers.AutoModelForQuestionAnswering.from_pretrained(start), {}, "head is QuestionAnswering"),
        ("bare", transformers.AutoModel.from_pretrained(start), {}, "its head is none"),
        ("missing", whole, {"classifier.bias": None}, "missing_keys classifier.bias"),
        ("unknown", whole, {"bert.scale": torch.ones(3)}, "unexpected_keys bert.scale"),
        ("sizes", whole, {"vocab_size": 9.5}, "vocab_size"),
    ):
        folder = tmp_path / name
        model.save_pretrained(folder)
        if change is not None:
            transformers.AutoTokenizer.from_pretrained(start).save_pretrained(folder)
        if name == "sizes":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | change))
        elif change:
            state = load_file(folder / "model.safetensors") | change
            kept = {key: value for key, value in state.items() if value is not None}
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        assert named in run("predict", folder, given="a map")[1]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "adapter of PEFT; merge it" in run("predict", adapter, given="a map")[1]


ENDLESS = {"type": "Split", "pattern": {"Regex": "(a|aa)+$b"}, "behavior": "Isolated", "invert": False}
NO_PATTERN = {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}


@pytest.mark.parametrize("changes", [{"pre_tokenizer": ENDLESS}, {"normalizer": NO_PATTERN}], ids=str)
def test_a_tokenizer_that_fails_is_refused_by_its_file(store: Path, tmp_path: Path, changes: dict):
    for stage, folder in (("pretrain", store / "pretrain" / "modern"), ("finetune", store / "finetune" / "sst2")):
        copy = without_manifest(folder, tmp_path / stage)
        file = copy / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        text = "a" * 40
        command = ["fill", f"{text} [MASK]", "--model", copy] if stage == "pretrain" else ["predict", copy]
        assert str(file) in run(*command, given=text)[1]


@pytest.mark.parametrize("text", ["The river [MASK] a map", "[MASK]", "[MASK] [SEP] [MASK][MASK], bread \u4e2d"])
def test_fill_prints_a_line_for_each_mask_with_the_probabilities_of_cram_s_own_model(text: str, store: Path):
    bert = export.load(store / "pretrain" / "modern")
    tokenizer = load_tokenizer(store / "pretrain" / "modern")
    tokenizer.encode_special_tokens = False
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        best = bert.logits(bert.eval().encode(ids)[ids == MASK]).softmax(-1).topk(7)
    [line], _ = run("fill", text, "--top", "7", "--json")
    masks = json.loads(line)["masks"]
    for mask, tokens, shares in zip(masks, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [one["token"] for one in mask] == [tokenizer.id_to_token(token) for token in tokens]
        assert [one["probability"] for one in mask] == pytest.approx(shares, abs=1e-5)
    printed, _ = run("fill", text, "--top", "7")
    assert [len(line.split("\t")) for line in printed] == [7] * text.count("[MASK]")
    assert run("fill", "-", "--top", "7", given=f"{text}\n\n{text}")[0] == printed * 2


def test_fill_takes_texts_as_long_as_the_model_and_as_many_tokens_as_it_knows():
    [every], _ = run("fill", "[MASK] " + "the " * (LENGTH - 3), "--top", "100000")
    assert len(every.split("\t")) > 100


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[mask]", "[MASK]"),
        ("[MASK] " + "the " * (LENGTH - 2), f"{LENGTH + 1} tokens"),
        ("caf\udce9 [MASK]", "byte 0xe9 at position 4"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused(text: str, named: str):
    assert named in run("fill", text)[1]
    printed, error = run("fill", given=b"a [MASK]\n" + os.fsencode(text))
    assert len(printed) == 1
    assert re.match(f"Line 2 .*{re.escape(named)}", error)


def next_line(pipe: BinaryIO) -> str:
    """The next line of an unbuffered pipe; fails where none comes."""
    ready, _, _ = select.select([pipe], [], [], 180)
    assert ready, "nothing came"
    return pipe.readline().decode()


def test_a_pipe_gets_an_answer_before_the_next_line_is_written_and_may_be_closed_early(store: Path, tmp_path: Path):
    own = {"CRAM_ARTIFACTS": str(store), "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONUNBUFFERED": ""}
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "flows.cli.main", "predict", "mnli"]
    with subprocess.Popen(command, env=os.environ | own, cwd=HOME, bufsize=0, **ends) as running:
        try:
            for number in range(1, 4):
                running.stdin.write(b"a map\tthe river\n" * number)
                for _ in range(number):
                    assert next_line(running.stdout).split("\t")[0] in LABELS["mnli"]
            running.stdout.close()  # as `head -6` does
            running.stdin.write(b"a map\tthe river\n" * 1000)
            running.stdin.close()
            [model] = running.stderr.read().splitlines()
            assert model.startswith(b"Model: finetune/mnli,")
            assert running.wait() != 0
        finally:
            running.kill()
