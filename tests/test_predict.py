"""`cram predict` and `cram fill`: the answers of transformers, one by one, and errors that name what is wrong."""

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
from tasks import store as store_module
from tasks.store import digest
from tasks.text import vocabulary_training
from tasks.text.tokenizer import LONGEST_WORD, PAD, SEP, copy_tokenizer, save_tokenizer

HOME = Path(__file__).resolve().parents[1]
LENGTH = 24
MODERN = Architecture(
    layers=2, hidden=32, heads=4, intermediate=48, norm_eps=1e-6,
    positions="rotary", norm_bias=False, first_norm=False, head_transform=True,
)  # fmt: skip
LABELS = {"sst2": ("negative", "positive"), "mnli": ("entailment", "neutral", "contradiction"), "stsb": ()}
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(predict.predict)
app.command()(predict.fill)
torch.set_num_threads(1)


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
    """Make the folder an artifact."""
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


def finetuned(folder: Path, task: str, **inputs: int) -> Path:
    folder.mkdir(parents=True)
    bert = Bert(MODERN, tokenizer_in(folder), LENGTH)
    classifier = Classifier(bert, max(1, len(LABELS[task])), dropout=0.1, seed=1, head="native")
    roughen(classifier)
    export.save_classifier(classifier, folder, LABELS[task], **inputs)
    return manifest(folder, "finetune", task=task)


def without_manifest(folder: Path, to: Path) -> Path:
    """A copy of a model's files as one makes it for transformers."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("stage.json"))
    return to


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a pretrained model and models finetuned on three tasks, whose keys are the names of the tasks."""
    root = tmp_path_factory.mktemp("store")
    pretrained(root / "pretrain" / "modern")
    for task in LABELS:
        finetuned(root / "finetune" / task, task)
    return root


@pytest.fixture
def store(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def run(*arguments: str | Path, given: bytes = b"") -> tuple[list[str], str]:
    """Run a command in this process: the lines it printed, and its notes without the line on the model."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert done.exit_code == 0, (done.exception, done.stderr)
    return done.stdout.split("\n")[:-1], re.sub("^Model: .*\n", "", done.stderr)


def refused(*arguments: str | Path, given: bytes = b"") -> tuple[list[str], str]:
    """Run a command that fails: the lines it printed before, and its error."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert isinstance(done.exception, InputError), done.exception
    assert "\n" not in str(done.exception)
    return done.stdout.split("\n")[:-1], str(done.exception)


@pytest.mark.parametrize(("task", "chunk", "count"), [("sst2", 1 << 16, 70), ("mnli", 100, 70), ("stsb", 1, 12)])
def test_predict_gives_the_answers_of_the_text_classification_pipeline(
    task: str, chunk: int, count: int, store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import pipeline

    monkeypatch.setattr(inference, "CHUNK", chunk)
    given = texts(count, pairs=task != "sst2")
    options = ["--json", "--scores"] if LABELS[task] else ["--json"]
    ours = [json.loads(line) for line in run("predict", task, *options, given=as_lines(given))[0]]
    inputs = [dict(zip(("text", "text_pair"), parts, strict=False)) for parts in given]
    theirs = pipeline("text-classification", model=str(store / "finetune" / task))(inputs, top_k=None, truncation=True)
    assert [answer["line"] for answer in ours] == list(range(1, len(given) + 1))
    for answer, (best, *others), parts in zip(ours, theirs, inputs, strict=True):
        assert {name: answer[name] for name in parts} == parts
        if task == "stsb":
            assert answer["label"] == pytest.approx(best["score"], abs=1e-4)
            continue
        expected = {one["label"]: one["score"] for one in (best, *others)}
        assert answer["probabilities"] == pytest.approx(expected, abs=1e-4)
        assert (answer["label"], answer["probability"]) == (best["label"], pytest.approx(best["score"], abs=1e-4))
    assert len({answer["label"] for answer in ours}) > 1, "they aren't all the same"


def test_a_line_has_label_and_probability_and_on_request_those_of_all_classes(store: Path):
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
    assert "--scores" in refused("predict", "stsb", "--scores", given=b"a\tb")[1]


def test_an_answer_is_on_the_line_of_its_text_whatever_ends_the_lines(store: Path, tmp_path: Path):
    unix = b"the river\n\na map\n  \t \nsome bread"
    expected, notes = run("predict", "sst2", given=unix)
    assert [bool(line) for line in expected] == [True, False, True, False, True]
    assert notes == "2 empty lines without a label.\n"
    for given in (unix + b"\n", unix.replace(b"\n", b"\r\n"), unix.replace(b"\n", b"\r"), b"\xef\xbb\xbf" + unix):
        (tmp_path / "file").write_bytes(given)
        assert run("predict", "sst2", tmp_path / "file")[0] == expected
        answers = [json.loads(line) for line in run("predict", "sst2", "--json", given=given)[0]]
        assert [answer["text"] for answer in answers] == ["the river", "", "a map", "", "some bread"]
    assert answers[1] == {"line": 2, "text": "", "label": None}


def test_an_empty_input_is_noted(store: Path):
    for command in (("predict", "sst2"), ("fill",)):
        printed, notes = run(*command, given=b"")
        assert (printed, len(notes.splitlines())) == ([], 1)
    assert run("predict", "sst2", given=b"\n") == ([""], "1 empty line without a label.\n")


def test_truncated_and_unknown_texts_are_counted(store: Path):
    printed, notes = run("predict", "sst2", given=b"a map\n" + b"the river " * 30 + b"\n" + "\u4e2d\u6587\n".encode())
    assert len(printed) == 3
    truncated, unknown = notes.splitlines()
    assert truncated.startswith(f"1 of 3 inputs exceeded {LENGTH} tokens")
    assert unknown.startswith("1 of 3 inputs contained no known word")
    for text in ("\u4e2d", "x" * (LONGEST_WORD + 1)):  # nothing is left of the first; the second is [UNK]
        _, notes = run("predict", "mnli", given=f"a map\t{text}\nsome\tbread".encode())
        assert notes.startswith("1 of 2 inputs contained no known word")


@pytest.mark.parametrize(
    ("text", "unknown"),
    [("\u4e2d\u6587[MASK]", True), ("x" * 101 + " [MASK]", True), ("[MASK]", False), ("a \u4e2d [MASK]", False)],
)
def test_fill_notes_texts_without_a_known_word(text: str, unknown: bool, store: Path):
    for _, notes in (run("fill", text), run("fill", given=text.encode())):
        assert ("1 of 1 text contained no known word" in notes) == unknown


def test_inputs_are_truncated_as_in_finetuning(tmp_path: Path):
    folder, short = finetuned(tmp_path / "model", "sst2", texts=1, max_tokens=10), "a map " * 4
    manifest(folder, "finetune", task="sst2", max_tokens=10)
    given = (short + "\n" + short + "the river\n").encode()  # with [CLS] and [SEP], 10 tokens and more
    with_manifest = run("predict", folder, given=given)
    (folder / "stage.json").unlink()
    for (first, second), notes in (with_manifest, run("predict", folder, given=given)):
        assert first == second
        assert notes.startswith("1 of 2 inputs exceeded 10 tokens")
    config = json.loads((folder / "config.json").read_text())
    config["cram"].pop("max_tokens")
    (folder / "config.json").write_text(json.dumps(config))
    (first, second), notes = run("predict", folder, given=given)
    assert (first == second, notes) == (False, ""), "truncated to what the model takes"


def test_special_tokens_in_a_text_are_text_as_they_were_in_training(store: Path):
    ids = Labeller(store / "finetune" / "sst2").tokenizer.encode("a [SEP] map [PAD]").ids
    assert PAD not in ids
    assert ids.count(SEP) == 1


@pytest.mark.parametrize(
    ("task", "line", "named"),
    [
        ("mnli", b"a\0b\tc", "NUL"),
        ("mnli", "a\tb".encode("utf-16"), "NUL"),
        ("mnli", b"caf\xe9\tb", "byte 0xe9 at position 4"),
        ("mnli", b"\xed\xa0\x80\tb", "byte 0xed at position 1"),  # half a surrogate pair
        ("mnli", "a\té".encode()[:-1], "byte 0xc3 at position 3"),
        ("mnli", b"one text", "0 tabs;"),
        ("mnli", b"a\tb\tc", "2 tabs;"),
        ("mnli", b"a\t ", "not empty"),
        ("sst2", b"the\triver", "1 tab;"),
        ("sst2", b"the\tb\triver", "2 tabs;"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named_after_the_answers_before_it(
    task: str, line: bytes, named: str, store: Path
):
    good = b"a map\tthe river" if task == "mnli" else b"a map"
    before, _ = run("predict", task, given=good)
    printed, error = refused("predict", task, given=b"\n".join([good, line, good, b""]))
    assert printed == before
    assert error.startswith("Line 2 ")
    assert named in error


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inference, "LONGEST_LINE", 3_000_000)
    endless = io.BytesIO(b"a\n" + b"x" * 5_000_000)
    with pytest.raises(InputError, match="Line 2 is longer than 3 MB"):
        list(read_lines(endless))
    assert endless.tell() < 3_200_000
    monkeypatch.setattr(inference, "LONGEST_LINE", 10_000_000)
    assert len(run("predict", "sst2", given=b"word " * 400_000 + b"\nb")[0]) == 2


def test_lines_are_the_same_in_whatever_pieces_they_arrive():
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
    folder, pair = without_manifest(models / "finetune" / "mnli", tmp_path / "copy"), b"a map\tthe river\n"
    known, _ = run("predict", models / "finetune" / "mnli", given=pair)
    assert run("predict", folder, given=b"\n" + pair)[0] == ["", *known]
    assert "Line 2 has 0 tabs" in refused("predict", folder, given=pair + b"a map")[1]
    printed, error = refused("predict", folder, given=b"a map\n" + pair)
    assert len(printed) == 1
    assert error.startswith("Line 2 has 1 tab")


@pytest.mark.parametrize(("task", "number"), [("mnli", 2), ("sst2", 1)])
def test_a_folder_alone_knows_how_many_texts_its_task_takes(task: str, number: int, tmp_path: Path):
    folder = finetuned(tmp_path / task, task, texts=number)
    (folder / "stage.json").unlink()
    assert refused("predict", folder, given=b"a map\t" * (2 - number) + b"the river")[1].startswith("Line 1 has ")


@pytest.mark.parametrize("name", ["modern", "mod", "pretrain/modern", "pretrain/m", "latest", "pretrain/latest"])
def test_a_model_is_named_as_artifacts_are(name: str, store: Path):
    assert model_folder("pretrain", name) == store / "pretrain" / "modern"


def test_a_folder_is_a_model_wherever_it_is(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(store / "pretrain" / "modern", tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    for name in ("copied", "./copied", str(tmp_path / "copied/")):
        assert model_folder("pretrain", name).samefile(tmp_path / "copied")
    assert len(run("fill", "a [MASK]", "--model", "copied")[0]) == 1


def test_the_model_that_answers_is_named_with_its_recipe_and_age(store: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store_module, "ROOT", tmp_path)
    shutil.copytree(store / "pretrain", tmp_path / "pretrain")
    report = manifest(tmp_path / "report" / "r", "report")
    (report / "report.json").write_text(json.dumps({"title": "tiny", "artifacts": ["pretrain/modern"]}))
    path = tmp_path / "pretrain" / "modern" / "stage.json"
    old = {"finished": (datetime.now(UTC) - timedelta(hours=3)).isoformat()}
    path.write_text(json.dumps(json.loads(path.read_text()) | old))
    done = CliRunner().invoke(app, ["fill", "a [MASK]"])
    assert done.stderr == "Model: pretrain/modern, recipe tiny, made 3 h ago\n"
    assert len(done.stdout.splitlines()) == 1, "only answers are on standard output"


def test_labels_and_tokens_can_not_control_the_terminal():
    answer = {"label": "\x1b[2Jgood\t", "probability": 1.0, "probabilities": {"\x9b": 1.0}}
    assert predict.labelled(dict(answer), True, False) == "\\u001b[2Jgood\\u0009\t1.0000\t\\u009b=1.0000"
    assert json.loads(predict.labelled(dict(answer), True, True)) == answer
    assert predict.labelled(dict(answer), True, True).isprintable()
    assert predict.filled("", [[("\x1b", 0.5)]], False) == ["\\u001b 0.5000"]


@pytest.fixture
def odd_folders(store: Path, tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Folders that hold no model of the kind asked for; one of them is an artifact."""
    unkept = manifest(store / "finetune" / "unkept", "finetune")
    (tmp_path / "empty").mkdir()
    yield {
        "EMPTY": tmp_path / "empty",
        "REPORT": manifest(tmp_path / "report", "report"),
        "PRETRAINED": store / "pretrain" / "modern",
        "PRETRAINED ALONE": without_manifest(store / "pretrain" / "modern", tmp_path / "bare"),
        "FINETUNED": store / "finetune" / "sst2",
        "FINETUNED ALONE": without_manifest(store / "finetune" / "sst2", tmp_path / "bare_finetuned"),
    }
    shutil.rmtree(unkept)


REFUSED = [  # command, model, and what the error names
    ("predict", "finetune/nothing", "'nothing'"),
    ("predict", "pretrain/mod", "pretrain/modern is of the stage pretrain"),
    ("predict", "modern", "pretrain/modern is of the stage pretrain"),
    ("predict", "a/b/c", "'a/b/c'"),
    ("predict", "/sst2", "'/sst2'"),
    ("predict", "x" * 5000, "xxx"),
    ("predict", "", "''"),
    ("predict", "REPORT", "was made by the stage report"),
    ("predict", "PRETRAINED", "was made by the stage pretrain"),
    ("predict", "PRETRAINED ALONE", "holds a pretrained model"),
    ("predict", "unkept", "Kept models: mnli (mnli), sst2 (sst2), stsb (stsb)."),
    ("predict", "EMPTY", "holds no model"),
    ("fill", "FINETUNED", "was made by the stage finetune"),
    ("fill", "FINETUNED ALONE", "holds a finetuned model"),
    ("fill", "EMPTY", "holds no model"),
]


def test_what_is_no_model_of_that_kind_is_refused(odd_folders: dict[str, Path]):
    assert model_folder("finetune", "latest").name == "stsb", "the newest that has a model"
    for command, name, named in REFUSED:
        model = odd_folders.get(name, name)
        printed, error = refused(
            *(["predict", model] if command == "predict" else ["fill", "[MASK]", "--model", model])
        )
        assert printed == []
        assert named in error, name


@pytest.mark.parametrize("file", ["", "gone.txt", "/"])
def test_a_file_that_cannot_be_read_is_refused(file: str, store: Path):
    assert repr(file) in refused("predict", "sst2", file)[1]


def test_a_tokenizer_of_another_model_is_refused(models: Path, tmp_path: Path):
    folder = pretrained(tmp_path / "model")
    tokenizer = vocabulary_training.train(pa.table({"word": ["ab"], "count": [9]}), 200)
    save_tokenizer(tokenizer, folder)
    assert f"{folder} has a tokenizer of" in refused("fill", "a [MASK]", "--model", folder)[1]


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
def test_fill_gives_the_answers_of_the_fill_mask_pipeline(text: str, store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import pipeline

    fill_mask = pipeline("fill-mask", model=str(store / "pretrain" / "modern"))
    theirs = fill_mask(text, top_k=7)
    theirs = theirs if isinstance(theirs[0], list) else [theirs]
    ours = Filler(store / "pretrain" / "modern")(text, 7, "The text")
    assert len(ours) == text.count("[MASK]") == len(theirs)
    names = fill_mask.tokenizer.convert_ids_to_tokens
    for mask, expected in zip(ours, theirs, strict=True):
        assert [token for token, _ in mask] == [names(guess["token"]) for guess in expected]
        assert [share for _, share in mask] == pytest.approx([guess["score"] for guess in expected], abs=1e-4)


def test_fill_prints_a_line_for_each_mask(store: Path):
    text, filler = "the [MASK] ignored [MASK]", Filler(store / "pretrain" / "modern")
    masks = filler(text, 3, "The text")
    printed, _ = run("fill", text, "--top", "3")
    assert printed == ["\t".join(f"{token} {share:.4f}" for token, share in mask) for mask in masks]
    [line], _ = run("fill", text, "--top", "3", "--json")
    tokens = [[{"token": token, "probability": round(share, 6)} for token, share in mask] for mask in masks]
    assert json.loads(line) == {"text": text, "masks": tokens}
    for arguments in ((), ("-",)):
        assert run("fill", *arguments, "--top", "3", given=f"{text}\n\n{text}".encode())[0] == printed * 2
    [every], _ = run("fill", "[MASK] " + "the " * (LENGTH - 3), "--top", "100000")  # as long as the model takes
    assert len(every.split("\t")) == filler.bert.vocabulary


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Paris is the capital.", "[MASK]"),
        ("[mask]", "[MASK]"),
        ("[MASK] " + "the " * (LENGTH - 2), f"{LENGTH + 1} tokens"),
        ("caf\udce9 [MASK]", "byte 0xe9 at position 4"),
    ],
)
def test_a_text_that_cannot_be_filled_is_refused(text: str, named: str, store: Path):
    assert named in refused("fill", text)[1]
    printed, error = refused("fill", given=b"a [MASK]\n" + os.fsencode(text))
    assert len(printed) == 1
    assert error.startswith("Line 2 ")
    assert named in error


@pytest.fixture
def process(models: Path, tmp_path: Path) -> Iterator:
    """Start a command whose ends are pipes; it is killed if the test leaves it running."""
    own = {"CRAM_ARTIFACTS": str(models), "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONUNBUFFERED": ""}
    with ExitStack() as running:

        def start(*arguments: str, **changes) -> subprocess.Popen:
            ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE) | changes
            command = [sys.executable, "-m", "flows.cli", *arguments]
            child = subprocess.Popen(command, env=os.environ | own, cwd=HOME, bufsize=0, **ends)
            running.callback(running.enter_context(child).kill)
            return child

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
    model, error = err.splitlines()
    assert model.startswith(b"Model: finetune/mnli,")
    assert error.startswith(b"cram: Line 7 has 0 tabs")


def test_a_reader_of_only_the_first_answers_sees_no_traceback(process, store: Path):
    running = process("fill", "--top", "2")
    running.stdin.write(b"the [MASK] ignored a map\n")
    assert next_line(running.stdout).splitlines() == run("fill", "the [MASK] ignored a map", "--top", "2")[0]
    running.stdout.close()  # as `head -1` does
    running.stdin.write(b"the [MASK]\n" * 1000)
    running.stdin.close()
    assert running.stderr.read() == b"Model: pretrain/modern\n"
    assert running.wait() != 0


def test_a_terminal_gets_a_prompt_and_continues_after_a_mistake(process):
    keyboard, terminal = pty.openpty()
    running = process("predict", "mnli", stdin=terminal)
    os.close(terminal)
    assert next_line(running.stderr).startswith("Model: finetune/mnli")
    assert next_line(running.stderr).startswith("Enter two texts per line")
    os.write(keyboard, b"no tab\n")
    assert next_line(running.stderr).startswith("cram: Line 1 has 0 tabs")
    os.write(keyboard, b"a map\tthe river\n")
    assert next_line(running.stdout).split("\t")[0] in LABELS["mnli"]
    os.write(keyboard, b"\x04")
    assert running.wait() == 0
    os.close(keyboard)


def test_a_model_that_was_changed_after_it_was_written_is_refused(store: Path, tmp_path: Path):
    folder = Path(shutil.copytree(store / "pretrain" / "modern", tmp_path / "model"))
    weights = folder / "model.safetensors"
    listed = [{"path": weights.name, "bytes": weights.stat().st_size, "sha256": digest(weights)}]
    (folder / "stage.json").write_text(json.dumps({"stage": "pretrain", "files": listed}))
    assert run("fill", "[MASK]", "--model", folder)[0]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights.name in refused("fill", "[MASK]", "--model", folder)[1]
