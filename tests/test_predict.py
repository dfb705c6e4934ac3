"""Predict and fill: transformers' answers, as they come, and a sentence for what can't be answered."""

import io
import json
import os
import pty
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pytest
import torch
import typer
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, sentence
from typer.testing import CliRunner

from flows.cli import inference, predict
from flows.cli.inference import Filler, Labeller, model_folder, read_lines
from model import InputError, export
from model.bert import Bert, Classifier
from model.settings import Architecture
from tasks.store import digest
from tasks.text import vocabulary_training
from tasks.text.tokenizer import LONGEST_WORD, PAD, SEP, copy_tokenizer, load_tokenizer, save_tokenizer

HOME = Path(__file__).resolve().parents[1]
CRAM = [sys.executable, "-m", "flows.cli"]
LENGTH = 24
MODERN = Architecture(
    layers=2, hidden=32, heads=4, intermediate=48, norm_eps=1e-6,
    positions="rotary", norm_bias=False, first_norm=False, head_transform=True,
)  # fmt: skip
PAPER = Architecture(layers=2, hidden=32, heads=4, intermediate=48)  # which only cram loads
LABELS = {"sst2": ("negative", "positive"), "mnli": ("entailment", "neutral", "contradiction"), "stsb": ()}
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(predict.predict)
app.command()(predict.fill)
torch.set_num_threads(1)


@pytest.fixture
def transformers(monkeypatch):
    """The package, which must not look anything up on a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def roughen(module: torch.nn.Module) -> None:
    """Give no parameter a value, like 0 or 1, that could hide a mistake."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def tokenizer_in(folder: Path) -> int:
    """Put a toy tokenizer there; its number of entries."""
    words = sorted({word for part in (SUBJECTS, VERBS, OBJECTS, ENDS) for words in part for word in words.split()})
    tokenizer = vocabulary_training.train(pa.table({"word": words, "count": [40] * len(words)}), 300)
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(tokenizer, Path(scratch))
        copy_tokenizer(Path(scratch), folder, LENGTH)
    return tokenizer.get_vocab_size()


def manifest(folder: Path, stage: str, **params: object) -> Path:
    """Make it an artifact."""
    about = {"stage": stage, "params": params, "inputs": {}, "stats": {}, "files": [], "finished": folder.name}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stage.json").write_text(json.dumps(about))
    return folder


def pretrained(folder: Path) -> Path:
    folder.mkdir(parents=True)
    bert = Bert(MODERN, tokenizer_in(folder), LENGTH)
    roughen(bert)
    export.save(bert, folder)
    return manifest(folder, "pretrain")


def finetuned(
    folder: Path, task: str, architecture: Architecture = MODERN, head: str = "native", **inputs: int
) -> Path:
    folder.mkdir(parents=True)
    bert = Bert(architecture, tokenizer_in(folder), LENGTH)
    classifier = Classifier(bert, max(1, len(LABELS[task])), dropout=0.1, seed=1, head=head)
    roughen(classifier)
    export.save_classifier(classifier, folder, LABELS[task], **inputs)
    return manifest(folder, "finetune", task=task)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a pretrained model and one finetuned on each of three tasks; their keys are what they are."""
    root = tmp_path_factory.mktemp("store")
    pretrained(root / "pretrain" / "modern")
    for task in LABELS:
        finetuned(root / "finetune" / task, task)
    finetuned(root / "finetune" / "paper", "sst2", PAPER, "tanh")
    return root


@pytest.fixture
def store(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from tasks import store as store_module

    monkeypatch.setattr(store_module, "ROOT", models)
    return models


def texts(count: int, pairs: bool) -> list[tuple[str, ...]]:
    """Texts of several lengths, some longer than the model takes."""
    rng = random.Random(3)
    return [
        tuple(" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(2 if pairs else 1))
        for _ in range(count)
    ]


def as_lines(some: list[tuple[str, ...]]) -> bytes:
    return b"".join(b"\t".join(map(str.encode, parts)) + b"\n" for parts in some)


def run(*arguments: str | Path, given: bytes = b"", code: int = 0) -> tuple[list[str], str]:
    """Run a command in this process: the lines it printed, and its remarks (but for the model) or its error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    if isinstance(done.exception, InputError):
        assert code == 1, done.exception
        return done.stdout.split("\n")[:-1], str(done.exception)
    assert (done.exit_code, code) == (0, 0), (done.exception, done.stderr)
    return done.stdout.split("\n")[:-1], re.sub("^Model: .*\n", "", done.stderr)


@pytest.mark.parametrize("task", ["sst2", "mnli", "stsb"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 16])
def test_predict_gives_the_answers_of_the_text_classification_pipeline(
    task: str, chunk: int, store: Path, transformers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inference, "CHUNK", chunk)
    given = texts(12 if chunk == 1 else 70, pairs=task != "sst2")
    ours = [
        json.loads(line)
        for line in run("predict", task, "--json", "--scores" if LABELS[task] else "--json", given=as_lines(given))[0]
    ]
    pipeline = transformers.pipeline("text-classification", model=str(store / "finetune" / task))
    inputs = [dict(zip(("text", "text_pair"), parts, strict=False)) for parts in given]
    theirs = pipeline(inputs, top_k=None, truncation=True)
    assert [answer["line"] for answer in ours] == list(range(1, len(given) + 1))
    for answer, expected, parts in zip(ours, theirs, inputs, strict=True):
        assert {name: answer[name] for name in parts} == parts
        if task == "stsb":
            assert answer["label"] == pytest.approx(expected[0]["score"], abs=1e-4)
            continue
        assert answer["probabilities"] == pytest.approx({e["label"]: e["score"] for e in expected}, abs=1e-4)
        assert (answer["label"], answer["probability"]) == (
            expected[0]["label"],
            pytest.approx(expected[0]["score"], abs=1e-4),
        )
    found = {answer["label"] for answer in ours}
    assert len(found) > 1, "they aren't all the same"


def test_answers_of_a_model_that_transformers_lacks_are_those_of_the_model(store: Path):
    given = texts(20, pairs=False)
    classifier = export.load_classifier(store / "finetune" / "paper").eval()
    tokenizer = load_tokenizer(store / "finetune" / "paper")
    tokenizer.enable_truncation(LENGTH)
    printed, _ = run("predict", "paper", given=as_lines(given))
    for line, (text,) in zip(printed, given, strict=True):
        with torch.no_grad():
            shares = classifier(torch.tensor([tokenizer.encode(text).ids])).softmax(dim=-1)[0]
        label, share = line.split("\t")
        assert label == LABELS["sst2"][int(shares.argmax())]
        assert float(share) == pytest.approx(shares.max().item(), abs=1e-4)


def test_a_line_tells_label_and_probability_and_on_request_those_of_all_classes(store: Path):
    (plain,), _ = run("predict", "sst2", given=b"a grey cat")
    (every,), _ = run("predict", "sst2", "--scores", given=b"a grey cat")
    label, share, *others = every.split("\t")
    assert plain == f"{label}\t{share}"
    named = dict(other.split("=") for other in others)
    assert tuple(named) == LABELS["sst2"]
    assert named[label] == share == max(named.values())
    assert sum(map(float, named.values())) == pytest.approx(1, abs=2e-4)
    (number,), _ = run("predict", "stsb", given=b"a map\tthe river")
    assert len(number.split("\t")) == 1
    float(number)
    assert "Omit --scores" in run("predict", "stsb", "--scores", given=b"a\tb", code=1)[1]


def test_an_answer_stands_on_the_line_of_its_text_whatever_ends_the_lines(store: Path):
    unix = b"the river\n\na map\n  \t \nsome bread"
    expected, told = run("predict", "sst2", given=unix)
    assert [bool(line) for line in expected] == [True, False, True, False, True]
    assert told == "2 empty lines without a label.\n"
    others = [unix.replace(b"\n", end) for end in (b"\r\n", b"\r")]
    for given in (unix + b"\n", *others, b"\xef\xbb\xbf" + unix):
        assert run("predict", "sst2", given=given)[0] == expected
        as_json = [json.loads(line) for line in run("predict", "sst2", "--json", given=given)[0]]
        assert [answer["text"] for answer in as_json] == ["the river", "", "a map", "", "some bread"]
    assert as_json[1] == {"line": 2, "text": "", "label": None}
    assert [answer["line"] for answer in as_json] == [1, 2, 3, 4, 5]
    told = "The input is empty; no answers.\n"
    assert run("predict", "sst2", given=b"") == run("fill", given=b"") == ([], told)
    assert run("predict", "sst2", given=b"\n") == ([""], "1 empty line without a label.\n")


def test_a_file_gives_the_same_answers_as_a_pipe(store: Path, tmp_path: Path):
    given = as_lines(texts(300, pairs=True))
    (tmp_path / "pairs.tsv").write_bytes(given)
    assert run("predict", "mnli", tmp_path / "pairs.tsv") == run("predict", "mnli", "-", given=given)


def test_what_is_cut_and_what_has_no_known_character_is_counted(store: Path):
    given = b"a map\n" + b"the river " * 30 + b"\n" + "\u4e2d\u6587\n".encode()
    printed, told = run("predict", "sst2", given=given)
    assert len(printed) == 3
    assert told.splitlines() == [
        f"1 of 3 inputs exceeded {LENGTH} tokens and got truncated.",
        "1 of 3 inputs contained no known word (the vocabulary is for English); labels for these mean little.",
    ]
    for unread in ("\u4e2d", "x" * (LONGEST_WORD + 1)):  # nothing is left of it, and it is [UNK]
        _, told = run("predict", "mnli", given=f"a map\t{unread}\nsome\tbread".encode())
        assert told.startswith("1 of 2 inputs contained no known word")


@pytest.mark.parametrize(
    ("text", "unread"),
    [("\u4e2d\u6587[MASK]", True), ("x" * 101 + " [MASK]", True), ("[MASK]", False), ("a \u4e2d [MASK]", False)],
)
def test_fill_says_where_the_vocabulary_knows_nothing_of_a_text(text: str, unread: bool, store: Path):
    expected = "1 of 1 text contained no known word (the vocabulary is for English) besides [MASK]; tokens for these mean little.\n"
    for told in (run("fill", text)[1], run("fill", given=text.encode())[1]):
        assert told == (expected if unread else "")


def test_inputs_are_cut_as_in_finetuning(models: Path, tmp_path: Path):
    folder, short = finetuned(tmp_path / "model", "sst2", texts=1, max_tokens=10), "a map " * 4
    manifest(folder, "finetune", task="sst2", max_tokens=10)
    given = (short + "\n" + short + "the river\n").encode()  # with [CLS] and [SEP], 10 tokens and more
    with_manifest = run("predict", folder, given=given)
    (folder / "stage.json").unlink()
    for printed, told in (with_manifest, run("predict", folder, given=given)):
        assert printed[0] == printed[1]
        assert told == "1 of 2 inputs exceeded 10 tokens and got truncated.\n"
    config = json.loads((folder / "config.json").read_text())
    config["cram"].pop("max_tokens")
    (folder / "config.json").write_text(json.dumps(config))
    printed, told = run("predict", folder, given=given)
    assert printed[0] != printed[1], "of a folder that doesn't say, what the model takes"
    assert told == ""


def test_special_tokens_in_a_text_are_text_as_they_were_in_training(store: Path):
    labeller = Labeller(store / "finetune" / "sst2")
    (ids,) = (labeller.tokenizer.encode("a [SEP] map [PAD]").ids,)
    assert PAD not in ids
    assert ids.count(SEP) == 1


HOSTILE = {  # to a task of two texts, after a line that it can answer
    "NUL": (b"a\0b\tc", "Line 2 has a NUL byte; expected UTF-8"),
    "UTF-16": ("a\tb".encode("utf-16"), "Line 2 has a NUL byte; expected UTF-8"),
    "Latin-1": (b"caf\xe9\tb", "Line 2 is not UTF-8: byte 0xe9 at position 4."),
    "half a surrogate pair": (b"\xed\xa0\x80\tb", "Line 2 is not UTF-8: byte 0xed at position 1."),
    "cut in a character": ("a\té".encode()[:-1], "Line 2 is not UTF-8: byte 0xc3 at position 3."),
    "no tab": (b"one text", "Line 2 has no tab; expected two texts, separated by one tab."),
    "two tabs": (b"a\tb\tc", "Line 2 has 2 tabs; expected two texts"),
    "one side empty": (b"a\t ", "Line 2 has no text on one side of its tab; expected two texts"),
}


def test_a_tab_is_refused_where_a_task_takes_one_text(store: Path):
    (before,), _ = run("predict", "sst2", given=b"a map")
    for tabs, count in ((b"\t", "a tab"), (b"\tb\t", "2 tabs")):
        printed, told = run("predict", "sst2", given=b"a map\nthe" + tabs + b"river\n", code=1)
        assert printed == [before]
        assert told.startswith(
            f"Line 2 has {count}, which separates texts; expected one text per line, as the task takes."
        )


@pytest.mark.parametrize(("line", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_line_that_cannot_be_answered_is_named_after_the_answers_before_it(line: bytes, sentence: str, store: Path):
    (before,), _ = run("predict", "mnli", given=b"a map\tthe river")
    printed, told = run("predict", "mnli", given=b"a map\tthe river\n" + line + b"\nsome\tbread\n", code=1)
    assert printed == [before]
    assert told.startswith(sentence)


def test_what_has_no_line_ends_is_refused_before_it_fills_the_memory(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inference, "LONGEST_LINE", 3_000_000)
    endless = io.BytesIO(b"a\n" + b"x" * 5_000_000)
    with pytest.raises(InputError, match="Line 2 is longer than 3 MB; expected one text per line"):
        list(read_lines(endless))
    assert endless.tell() < 3_200_000
    monkeypatch.setattr(inference, "LONGEST_LINE", 10_000_000)
    assert len(run("predict", "sst2", given=b"word " * 400_000 + b"\nb")[0]) == 2, "two megabytes are no harm"


def test_lines_are_the_same_however_they_come():
    rng = random.Random(5)
    for _ in range(200):
        given = bytes(rng.choice(b"ab\n\r\x85") for _ in range(rng.randint(0, 40)))

        class Pipe(io.RawIOBase):
            left = given

            def readable(self) -> bool:
                return True

            def readinto(self, room) -> int:
                size = min(len(self.left), rng.randint(1, 9), len(room))
                room[:size], self.left = self.left[:size], self.left[size:]
                return size

        lines = [line for some in read_lines(io.BufferedReader(Pipe())) for line in some]
        expected = re.split(b"\r\n|\r|\n", given)
        expected = expected if expected[-1] else expected[:-1]
        assert lines == list(enumerate(expected, 1))


def test_an_unknown_task_takes_its_number_of_texts_from_the_first_line(models: Path, tmp_path: Path):
    for file in (models / "finetune" / "mnli").iterdir():
        if file.name != "stage.json":  # as one copies what transformers needs
            (tmp_path / file.name).write_bytes(file.read_bytes())
    pair = b"a map\tthe river\n"
    known, _ = run("predict", models / "finetune" / "mnli", given=pair)
    assert run("predict", tmp_path, given=b"\n" + pair) == (["", *known], "1 empty line without a label.\n")
    assert run("predict", tmp_path, given=pair + b"a map", code=1)[1].startswith("Line 2 has no tab")
    printed, told = run("predict", tmp_path, given=b"a map\n" + pair, code=1)
    assert len(printed) == 1
    assert told.startswith("Line 2 has a tab, which separates texts; expected one text per line, as in the first line.")


def test_a_folder_alone_says_how_many_texts_its_task_takes(models: Path, tmp_path: Path):
    pairs, single = finetuned(tmp_path / "pairs", "mnli", texts=2), finetuned(tmp_path / "single", "sst2", texts=1)
    for folder in (pairs, single):
        (folder / "stage.json").unlink()
    assert run("predict", pairs, given=b"a map the river\n", code=1)[1].startswith("Line 1 has no tab; expected two")
    assert run("predict", single, given=b"a map\tthe river\n", code=1)[1].startswith("Line 1 has a tab, which")


@pytest.mark.parametrize("name", ["modern", "mod", "pretrain/modern", "pretrain/m", "latest", "pretrain/latest"])
def test_a_model_is_named_as_artifacts_are(name: str, store: Path):
    assert model_folder("pretrain", name) == store / "pretrain" / "modern"


def test_a_folder_is_a_model_wherever_it_is(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (store / "pretrain" / "modern").rename(tmp_path / "copied")
    try:
        monkeypatch.chdir(tmp_path)
        for name in ("copied", "./copied", str(tmp_path / "copied/")):
            assert model_folder("pretrain", name).samefile(tmp_path / "copied")
            assert len(run("fill", "a [MASK]", "--model", name)[0]) == 1
    finally:
        (tmp_path / "copied").rename(store / "pretrain" / "modern")


def test_the_model_that_answers_is_named_with_its_recipe_and_age(store: Path):
    report = manifest(store / "report" / "r", "report")
    (report / "report.json").write_text(json.dumps({"title": "tiny", "artifacts": ["pretrain/modern"]}))
    about = json.loads((store / "pretrain" / "modern" / "stage.json").read_text())
    old = about | {"finished": (datetime.now(UTC) - timedelta(hours=3)).isoformat()}
    try:
        (store / "pretrain" / "modern" / "stage.json").write_text(json.dumps(old))
        done = CliRunner().invoke(app, ["fill", "a [MASK]"])
    finally:
        (store / "pretrain" / "modern" / "stage.json").write_text(json.dumps(about))
        shutil.rmtree(store / "report")
    assert done.stderr == "Model: pretrain/modern, recipe tiny, made 3 h ago\n"
    assert len(done.stdout.splitlines()) == 1, "what programs read has answers alone"


def test_labels_and_tokens_can_not_control_the_terminal():
    answer = {"label": "\x1b[2Jgood\t", "probability": 1.0, "probabilities": {"\x9b": 1.0}}
    assert predict.labelled(dict(answer), True, False) == "\\u001b[2Jgood\\u0009\t1.0000\t\\u009b=1.0000"
    assert json.loads(predict.labelled(dict(answer), True, True)) == answer
    assert predict.labelled(dict(answer), True, True).isprintable()
    assert predict.filled("", [[("\x1b", 0.5)]], False) == ["\\u001b 0.5000"]


def test_what_is_no_model_of_that_kind_is_refused_in_a_sentence(store: Path, tmp_path: Path):
    report, unkept = manifest(tmp_path / "report", "report"), manifest(store / "finetune" / "unkept", "finetune")
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = tmp_path / "bare"  # a pretrained model without its manifest
    pretrained(bare)
    (bare / "stage.json").unlink()
    try:
        assert model_folder("finetune", "latest") == store / "finetune" / "stsb", "the newest that has a model"
        for arguments, words in {
            ("predict", "nothing"): "No complete artifact of finetune is 'nothing'",
            ("predict", "finetune/nothing"): "No complete artifact of finetune is 'nothing'",
            ("predict", "pretrain/mod"): "There is no folder 'pretrain/mod'. pretrain/modern is of the stage pretrain.",
            ("predict", "mod"): "No complete artifact of finetune is 'mod'. Those in",
            ("predict", "modern"): "or `latest`. pretrain/modern is of the stage pretrain.",
            ("predict", "a/b/c"): "There is no folder 'a/b/c'. Give a folder",
            ("predict", "/sst2"): "There is no folder '/sst2'. Give a folder",
            ("fill", "a [MASK]", "--model", "/modern"): "There is no folder '/modern'. Give a folder",
            ("predict", "./sst2"): "There is no folder './sst2'. Give a folder",
            ("predict", "sst2", ""): "The file name is empty.",
            ("predict", "x" * 5000): "No complete artifact",
            ("predict", ""): "No complete artifact",
            ("predict", report): "was made by the stage report; expected a model of the stage finetune",
            ("predict", store / "pretrain" / "modern"): "was made by the stage pretrain; expected a model",
            (
                "predict",
                unkept,
            ): "its model was not kept. Kept models: mnli (mnli), paper (sst2), sst2 (sst2), stsb (stsb). To keep",
            ("predict", "unkept"): "finetune/unkept has scores, but its model was not kept",
            ("predict", empty): "holds no model that cram can load",
            ("predict", bare): "holds a pretrained model, which has no classes yet",
            ("predict", "sst2", "gone.txt"): "gone.txt can't be read: No such file or directory",
            ("predict", "sst2", empty): "can't be read: Is a directory",
            ("fill", "a [MASK]", "--model", store / "finetune" / "sst2"): "was made by the stage finetune; expected",
            ("fill", "a [MASK]", "--model", empty): "holds no model that cram can load",
            ("fill", "a [MASK]", "--model", report): "was made by the stage report",
        }.items():
            printed, told = run(*arguments, given=b"a", code=1)
            assert printed == []
            assert words in told, arguments
            assert "\n" not in told
    finally:
        (unkept / "stage.json").unlink()
        unkept.rmdir()


def test_fill_refuses_a_finetuned_model_that_came_without_its_manifest(models: Path, tmp_path: Path):
    for file in (models / "finetune" / "sst2").iterdir():
        if file.name != "stage.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "holds a finetuned model, which labels texts" in run("fill", "a [MASK]", "--model", tmp_path, code=1)[1]


def test_a_tokenizer_of_another_model_is_refused(models: Path, tmp_path: Path):
    folder = pretrained(tmp_path / "model")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace('"##e"', '"##\u00e9"'))
    tokenizer = vocabulary_training.train(pa.table({"word": ["ab"], "count": [9]}), 200)
    save_tokenizer(tokenizer, folder)
    assert "entries, but a model of" in run("fill", "a [MASK]", "--model", folder, code=1)[1]


@pytest.mark.parametrize(
    "text",
    [
        "The river [MASK] a map.",
        "[MASK]",
        "[MASK] [MASK][MASK], some bread",
        "an old [SEP] clock [MASK] [UNK] by [PAD] mistake [mask]",
        "A caf\u00e9 \u4e2d [MASK]\tin\nthe morning",
    ],
)
def test_fill_gives_the_answers_of_the_fill_mask_pipeline(text: str, store: Path, transformers):
    pipeline = transformers.pipeline("fill-mask", model=str(store / "pretrain" / "modern"))
    theirs = pipeline(text, top_k=7)
    theirs = theirs if isinstance(theirs[0], list) else [theirs]
    ours = Filler(store / "pretrain" / "modern")(text, 7, "The text")
    assert len(ours) == text.count("[MASK]") == len(theirs)
    names = pipeline.tokenizer.convert_ids_to_tokens
    for mask, expected in zip(ours, theirs, strict=True):
        assert [token for token, _ in mask] == [names(guess["token"]) for guess in expected]
        assert [share for _, share in mask] == pytest.approx([guess["score"] for guess in expected], abs=1e-4)


def test_fill_prints_a_line_for_each_mask(store: Path):
    text = "the [MASK] ignored [MASK]"
    printed, _ = run("fill", text, "--top", "3")
    found = Filler(store / "pretrain" / "modern")(text, 3, "The text")
    assert printed == ["\t".join(f"{token} {share:.4f}" for token, share in mask) for mask in found]
    (as_json,), _ = run("fill", text, "--top", "3", "--json")
    told = json.loads(as_json)
    assert told["text"] == text
    assert [[guess["token"] for guess in mask] for mask in told["masks"]] == [[t for t, _ in mask] for mask in found]
    for arguments in ((), ("-",)):
        assert run("fill", *arguments, "--top", "3", given=f"{text}\n\n{text}".encode())[0] == printed * 2
    entries = Filler(store / "pretrain" / "modern").bert.vocabulary
    (every,), _ = run("fill", "[MASK]", "--top", "100000")
    assert len(every.split("\t")) == entries


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Paris is the capital.", "has no [MASK]. Put"),
        ("", "has no [MASK]"),
        ("[mask]", "has no [MASK]"),
        ("[MASK] " + "the " * (LENGTH - 3), ""),
        ("[MASK] " + "the " * (LENGTH - 2), f"has {LENGTH + 1} tokens with [CLS] and [SEP]; the model takes {LENGTH}."),
        ("caf\udce9 [MASK]", "is not UTF-8: byte 0xe9 at position 4"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused_in_a_sentence(text: str, words: str, store: Path):
    if not words:
        assert len(run("fill", text)[0]) == 1
        return
    assert words in run("fill", text, code=1)[1]
    if text:
        printed, told = run("fill", given=b"a [MASK]\n" + os.fsencode(text), code=1)
        assert len(printed) == 1
        assert told.startswith("Line 2 ")
        assert words in told


@pytest.fixture
def env(models: Path, tmp_path: Path) -> dict[str, str]:
    own = {"CRAM_ARTIFACTS": str(models), "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONUNBUFFERED": ""}
    return os.environ | own


@pytest.fixture
def process(env: dict) -> Iterator:
    """Start a command whose ends are pipes; it is killed if the test leaves it running."""
    with ExitStack() as running:

        def start(*arguments: str, **changes) -> subprocess.Popen:
            ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | changes
            command = [*CRAM, *arguments]
            started = running.enter_context(subprocess.Popen(command, env=env, cwd=HOME, bufsize=0, **ends))
            running.callback(started.kill)
            return started

        yield start


def next_line(pipe: BinaryIO) -> str:
    """The next line of an unbuffered pipe; fails where none comes."""
    ready, _, _ = select.select([pipe], [], [], 180)
    assert ready, "nothing came"
    return pipe.readline().decode()


def test_a_pipe_gets_an_answer_before_the_next_line_is_written(process, store: Path):
    running = process("predict", "mnli")
    for number in range(1, 4):
        running.stdin.write(b"a map\tthe river\n" * number)
        for _ in range(number):
            assert next_line(running.stdout).split("\t")[0] in LABELS["mnli"]
    running.stdin.write(b"no tab\n")
    out, err = running.communicate()
    assert (running.returncode, out) == (1, b"")
    assert err.startswith(b"Model: finetune/mnli,")
    assert err.count(b"\n") == 2
    assert err.endswith(b"cram: Line 7 has no tab; expected two texts, separated by one tab.\n")


def test_whoever_reads_the_first_answers_alone_sees_no_traceback(process, store: Path):
    running = process("fill", "--top", "2")
    running.stdin.write(b"the [MASK] ignored a map\n")
    assert next_line(running.stdout).splitlines() == run("fill", "the [MASK] ignored a map", "--top", "2")[0]
    running.stdout.close()  # as `head -1` does
    running.stdin.write(b"the [MASK]\n" * 1000)
    running.stdin.close()
    assert running.stderr.read() == b"Model: pretrain/modern\n"
    assert running.wait() != 0


def test_a_terminal_is_told_what_to_type_and_goes_on_after_a_mistake(process):
    keyboard, terminal = pty.openpty()
    running = process("predict", "mnli", stdin=terminal)
    os.close(terminal)
    assert next_line(running.stderr).startswith("Model: finetune/mnli")
    assert next_line(running.stderr) == "Enter two texts per line, separated by a tab; end with Ctrl-D.\n"
    os.write(keyboard, b"no tab\n")
    assert next_line(running.stderr).startswith("cram: Line 1 has no tab")
    os.write(keyboard, b"a map\tthe river\n")
    assert next_line(running.stdout).split("\t")[0] in LABELS["mnli"]
    os.write(keyboard, b"\x04")
    assert running.wait() == 0
    os.close(keyboard)


def test_the_commands_are_there_before_torch_is():
    code = "import sys, flows.cli.predict; sys.exit(bool({'torch', 'prefect', 'tokenizers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME).returncode == 0


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_model_that_was_changed_after_it_was_written_is_refused(store: Path, as_folder: bool):
    folder = pretrained(store / "pretrain" / f"flipped{as_folder}")
    files = [{"path": p.name, "bytes": p.stat().st_size, "sha256": digest(p)} for p in folder.iterdir() if p.is_file()]
    listed = [file for file in files if file["path"] != "stage.json"]
    (folder / "stage.json").write_text(json.dumps(json.loads((folder / "stage.json").read_text()) | {"files": listed}))
    name = folder if as_folder else folder.name
    assert run("fill", "--model", name, given=b"the [MASK]\n")[0]
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert "model.safetensors" in run("fill", "--model", name, given=b"the [MASK]\n", code=1)[1]
    shutil.rmtree(folder)
