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
from conftest import ENDS, OBJECTS, SUBJECTS, VERBS, sentence, store_of_its_own
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
LENGTH, LONG_WORD = 24, "x" * (LONGEST_WORD + 1)
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


def finetuned(folder: Path, task: str, texts: int | None = None, max_tokens: int | None = None) -> Path:
    folder.mkdir(parents=True)
    bert = Bert(MODERN, tokenizer_in(folder), LENGTH)
    classifier = Classifier(bert, max(1, len(LABELS[task])), dropout=0.1, seed=1, head="native", texts=texts)
    roughen(classifier)
    export.save_classifier(classifier, folder, LABELS[task], max_tokens)
    return manifest(folder, "finetune", task=task)


def without_manifest(folder: Path, to: Path) -> Path:
    """A copy of a model's files as one makes it for transformers."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("stage.json"))
    return to


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pretrained model, models finetuned on three tasks, and a run whose model was not kept."""
    folder = tmp_path_factory.mktemp("store")
    with store_of_its_own(folder):
        pretrained(folder / "pretrain" / "modern")
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


@pytest.mark.parametrize(("task", "chunk", "count"), [("sst2", 1 << 16, 70), ("mnli", 100, 70), ("stsb", 1, 12)])
def test_predict_gives_the_answers_of_the_text_classification_pipeline(
    task: str, chunk: int, count: int, store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import pipeline

    monkeypatch.setattr(inference, "CHUNK", chunk)
    rng, each = random.Random(3), 1 if task == "sst2" else 2
    given = [[" ".join(sentence(rng) for _ in range(rng.randint(1, 4))) for _ in range(each)] for _ in range(count)]
    options = ["--json", "--scores"] if LABELS[task] else ["--json"]
    lines = "".join("\t".join(parts) + "\n" for parts in given)
    ours = [json.loads(line) for line in run("predict", task, *options, given=lines)[0]]
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


def test_an_answer_is_on_the_line_of_its_text_whatever_ends_the_lines(tmp_path: Path):
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


@pytest.mark.parametrize(
    ("command", "given", "notes"),
    [
        ("predict sst2", "", ["The input is empty"]),
        ("fill", "", ["The input is empty"]),
        ("predict sst2", "\n", ["1 empty line"]),
        ("predict sst2", "a map\n" + "the river " * 30, [f"1 of 2 inputs exceeded {LENGTH} tokens"]),
        ("predict sst2", "a map\n\u4e2d\u6587", ["1 of 2 inputs contained no known word"]),  # nothing is left of it
        ("predict mnli", f"a map\t{LONG_WORD}\nsome\tbread", ["1 of 2 inputs contained no known word"]),  # [UNK]
        ("fill", f"{LONG_WORD} [MASK]", ["1 of 1 text contained no known word"]),
        ("fill", "[MASK]", []),
        ("fill", "a \u4e2d [MASK]", []),
    ],
)
def test_what_makes_answers_doubtful_is_noted_after_them(command: str, given: str, notes: list[str]):
    found = run(*command.split(), given=given)[1].splitlines()
    assert [line[: len(note)] for line, note in zip(found, notes, strict=True)] == notes


def test_inputs_are_encoded_as_in_finetuning(tmp_path: Path):
    folder, short = finetuned(tmp_path / "model", "sst2", texts=1, max_tokens=10), "a map " * 4
    manifest(folder, "finetune", task="sst2", max_tokens=10)
    given = f"{short}\n{short}the river"  # with [CLS] and [SEP], 10 tokens and more
    with_manifest = run("predict", folder, given=given)
    (folder / "stage.json").unlink()
    for (first, second), notes in (with_manifest, run("predict", folder, given=given)):
        assert first == second
        assert notes.startswith("1 of 2 inputs exceeded 10 tokens")
    config = json.loads((folder / "config.json").read_text())
    del config["cram"]["max_tokens"]
    (folder / "config.json").write_text(json.dumps(config))
    (first, second), notes = run("predict", folder, given=given)
    assert (first == second, notes) == (False, ""), "truncated to what the model takes"
    ids = Labeller(folder).tokenizer.encode("a [SEP] map [PAD]").ids
    assert (ids.count(SEP), ids.count(PAD)) == (1, 0), "special tokens in a text are text"


@pytest.mark.parametrize(
    ("task", "line", "named"),
    [
        ("mnli", b"a\0b\tc", "NUL"),
        ("mnli", b"caf\xe9\tb", "byte 0xe9 at position 4"),
        ("mnli", b"\xed\xa0\x80\tb", "byte 0xed at position 1"),  # half a surrogate pair
        ("mnli", "a\té".encode()[:-1], "byte 0xc3 at position 3"),
        ("mnli", b"one text", "0 tabs;"),
        ("mnli", b"a\tb\tc", "2 tabs;"),
        ("mnli", b"a\t ", "not empty"),
        ("sst2", b"the\triver", "1 tab;"),
    ],
)
def test_a_line_that_cannot_be_answered_is_named_after_the_answers_before_it(task: str, line: bytes, named: str):
    good = b"a map\tthe river" if task == "mnli" else b"a map"
    before, _ = run("predict", task, given=good)
    printed, error = run("predict", task, given=b"\n".join([good, line, good, b""]))
    assert printed == before
    assert re.match(f"Line 2 .*{named}", error)


def test_a_file_without_line_ends_is_refused_before_it_fills_the_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inference, "LONGEST_LINE", 3_000_000)
    endless = io.BytesIO(b"a\n" + b"x" * 5_000_000)
    with pytest.raises(InputError, match="Line 2 is longer than 3 MB"):
        list(read_lines(endless))
    assert endless.tell() < 3_200_000


def test_lines_are_the_same_in_whatever_pieces_they_arrive(monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(5)
    for number in range(500):
        monkeypatch.setattr(inference, "CHUNK", 1 + number % 9)
        given = bytes(rng.choice(b"ab\n\r\x85") for _ in range(rng.randint(0, 40)))
        *expected, last = re.split(b"\r\n|\r|\n", given)
        lines = [line for some in read_lines(io.BytesIO(given)) for line in some]
        assert lines == list(enumerate([*expected, last] if last else expected, 1))


def test_an_unknown_task_takes_its_number_of_texts_from_the_folder_or_the_first_line(store: Path, tmp_path: Path):
    folder, pair = without_manifest(store / "finetune" / "mnli", tmp_path / "copy"), "a map\tthe river\n"
    known, _ = run("predict", store / "finetune" / "mnli", given=pair)
    assert run("predict", folder, given="\n" + pair)[0] == ["", *known]
    assert "Line 2 has 0 tabs" in run("predict", folder, given=pair + "a map")[1]
    assert "Line 2 has 1 tab" in run("predict", folder, given="a map\n" + pair)[1]
    for task, number, wrong in (("sst2", 1, pair), ("mnli", 2, "the river")):
        (finetuned(tmp_path / task, task, texts=number) / "stage.json").unlink()
        assert run("predict", tmp_path / task, given=wrong)[1].startswith("Line 1 has ")


def test_a_model_is_named_as_artifacts_are_or_by_its_folder(store: Path, tmp_path: Path, monkeypatch):
    for name in ("modern", "mod", "pretrain/modern", "pretrain/m", "latest", "pretrain/latest"):
        assert model_folder("pretrain", name) == store / "pretrain" / "modern"
    assert model_folder("finetune", "latest").name == "stsb", "the newest that has a model"
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


def test_a_line_has_what_was_asked_for_and_nothing_that_controls_the_terminal():
    answer = {"label": "\x1b[2Jgood\t", "probability": 1.0, "probabilities": {"\x9b": 1.0}}
    plain = "\\u001b[2Jgood\\u0009\t1.0000"
    assert predict.labelled(dict(answer), False, False) == plain
    assert predict.labelled(dict(answer), True, False) == f"{plain}\t\\u009b=1.0000"
    assert json.loads(predict.labelled(dict(answer), True, True)) == answer
    assert predict.labelled(dict(answer), True, True).isprintable()
    assert predict.labelled({"label": 0.5}, False, False) == "0.5000", "a score of STS-B"
    assert predict.filled("", [[("\x1b", 0.5)]], False) == ["\\u001b 0.5000"]


def test_what_is_no_file_or_no_model_of_that_kind_is_refused(store: Path, tmp_path: Path):
    pretraining, finetuning, empty = store / "pretrain" / "modern", store / "finetune" / "sst2", tmp_path / "empty"
    empty.mkdir()
    for arguments, named in [
        (["predict", "finetune/nothing"], "'nothing'"),
        (["predict", "pretrain/mod"], "pretrain/modern is of the stage pretrain"),
        (["predict", "modern"], "pretrain/modern is of the stage pretrain"),
        (["predict", "a/b/c"], "'a/b/c'"),
        (["predict", "/sst2"], "'/sst2'"),
        (["predict", "x" * 5000], "xxx"),
        (["predict", ""], "''"),
        (["predict", "unkept"], "Kept models: mnli (mnli), sst2 (sst2), stsb (stsb)."),
        (["predict", empty], "holds no model"),
        (["predict", manifest(tmp_path / "report", "report")], "was made by the stage report"),
        (["predict", pretraining], "was made by the stage pretrain"),
        (["predict", without_manifest(pretraining, tmp_path / "bare")], "holds a pretrained model"),
        (["predict", "stsb", "--scores"], "--scores"),
        *((["predict", "sst2", file], repr(file)) for file in ("", "gone.txt", "/")),
        (["fill", "[MASK]", "--model", empty], "holds no model"),
        (["fill", "[MASK]", "--model", finetuning], "was made by the stage finetune"),
        (["fill", "[MASK]", "--model", without_manifest(finetuning, tmp_path / "tuned")], "holds a finetuned model"),
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
    save_tokenizer(vocabulary_training.train(pa.table({"word": ["ab"], "count": [9]}), 200), folder)
    assert f"{folder} has a tokenizer of" in run("fill", "a [MASK]", "--model", folder)[1]
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert weights.name in run("fill", "[MASK]", "--model", folder)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a|aa)+$b"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
    ],
    ids=["a pattern without end", "no pattern"],
)
def test_a_tokenizer_that_fails_is_refused_by_its_file(store: Path, tmp_path: Path, changes: dict):
    for stage, folder in (("pretrain", store / "pretrain" / "modern"), ("finetune", store / "finetune" / "sst2")):
        copy = without_manifest(folder, tmp_path / stage)
        file = copy / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        text = "a" * 40
        command = ["fill", f"{text} [MASK]", "--model", copy] if stage == "pretrain" else ["predict", copy]
        assert str(file) in run(*command, given=text)[1]


@pytest.mark.parametrize("name", ["../secret", "/dev/zero"])
def test_a_manifest_that_lists_a_file_elsewhere_is_refused_unread(tmp_path: Path, name: str):
    folder = pretrained(tmp_path / "model")
    (tmp_path / "secret").write_text("")
    listed = [{"path": name, "bytes": 0, "sha256": digest(tmp_path / "secret")}]
    (folder / "stage.json").write_text(json.dumps({"stage": "pretrain", "files": listed}))
    assert name in run("fill", "[MASK]", "--model", folder)[1]


def test_fill_gives_the_answers_of_the_fill_mask_pipeline(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import pipeline

    fill_mask, filler = (
        pipeline("fill-mask", model=str(store / "pretrain" / "modern")),
        Filler(store / "pretrain/modern"),
    )
    names = fill_mask.tokenizer.convert_ids_to_tokens
    for text in (
        "The river [MASK] a map.",
        "[MASK]",
        "[MASK] [MASK][MASK], some bread",
        "an old [SEP] clock [MASK] [UNK] by [PAD] mistake [mask]",
        "A caf\u00e9 \u4e2d [MASK]\tin\nthe morning",
    ):
        theirs, ours = fill_mask(text, top_k=7), filler(text, 7, "The text")
        for mask, expected in zip(ours, theirs if isinstance(theirs[0], list) else [theirs], strict=True):
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


@pytest.fixture
def process(store: Path, tmp_path: Path) -> Iterator:
    """Start a command whose ends are pipes; it is killed if the test leaves it running."""
    own = {"CRAM_ARTIFACTS": str(store), "PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONUNBUFFERED": ""}
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


def test_a_pipe_gets_an_answer_before_the_next_line_is_written(process):
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


def test_a_reader_of_only_the_first_answers_sees_no_traceback(process):
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
