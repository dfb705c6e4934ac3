"""A toy run: six stages that take no time, with files of the kinds that real ones write; and what works on it."""

import multiprocessing
import os
import random
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from model.errors import InputError
from tasks.stage import Params, StageTask, stage
from tasks.store.artifacts import Artifact

CALLS: list[str] = []  # which stages ran, and what a test asks of them: "other" contents, "no source"


class Kind(Params):
    """What tells artifacts of a stage apart."""

    number: int = 0

    def check(self) -> None:
        if "no source" in CALLS:
            raise InputError("The source of the text is gone.")


def made(name: str, *files: str, link: bool = False, varies: bool = False) -> StageTask:
    """A stage that writes these files, others each time if it `varies`, or links them to those of its first input."""

    def write(params: Kind, inputs: list[Artifact], out: Path) -> dict:
        CALLS.append(name)
        number = f"{random.random():.12f}" if varies else ""  # of one length, so that sizes tell nothing
        words = f"{name} {params.number} {'other' if 'other' in CALLS else ''}{number}"
        for file in files:
            (out / file).parent.mkdir(exist_ok=True)
            if link:
                os.link(inputs[0].path / file, out / file)
            else:
                (out / file).write_text("" if file == "empty.txt" else f"{words} {file}" * 1000)
        return {"documents": 1}

    def begin(params: Kind, out: Path) -> dict:
        return write(params, [], out)

    return stage(version=1, name=name, varies=varies)(begin if name == "download" else write)


PARTS = ("part-00000.parquet", "part-00001.parquet")
TEXT = made("download", *PARTS, "lost.jsonl")
CLEAN = made("deduplicate", *PARTS, link=True)
TOKENS = made("tokenize", "sequences.npy", "heldout.parquet", "tokenizer.json", "empty.txt", "more/loss.png")
MODEL = made("pretrain", "model.safetensors", "heldout.npz", varies=True)
TUNED = made("finetune", "scores.json", varies=True)
PAGE = made("report", "report.html")
CHAIN = (TEXT, CLEAN, TOKENS, MODEL, TUNED, PAGE)


def chain(number: int, shared: int = 0, until: StageTask = PAGE) -> list[Artifact]:
    """The artifacts of all stages; `shared` of them are those of number 0."""
    given: list[Artifact] = []
    for place, task in enumerate(CHAIN[: CHAIN.index(until) + 1]):
        given.append(task(Kind(number=0 if place < shared else number), *([given[-1:]] * bool(given))))
    return given


def forked(work: Callable[[], object]) -> BaseProcess:
    """A process that does this."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def cram(*arguments: str, status: int = 0) -> str:
    """What a command prints that ends with this status."""
    done: Result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.output


def refusal_of(*arguments: str) -> str:
    """The sentence with which a command ends."""
    with pytest.raises(InputError) as error:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(error.value)
