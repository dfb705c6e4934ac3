"""The commands that use what was trained: cram predict, cram fill. What they need is slow to import, so it comes late."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from model import InputError

Lines = list[tuple[int, bytes]]  # numbered from 1
JSON = Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")]


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TASK_ARTIFACT",
            help="finetune/KEY, a key, the beginning of one, `latest`, or a folder with a finetuned model.",
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Texts in UTF-8, one a line, or for tasks of two texts both, separated by a tab; `-` or none: from standard "
            "input. An empty line gets an empty answer, so that answers stay beside their texts. What is longer than the "
            "model takes is cut, and counted at the end.",
        ),
    ] = "-",
    scores: Annotated[bool, typer.Option("--scores", help="Print the probabilities of all classes too.")] = False,
    as_json: JSON = False,
) -> None:
    """Label texts with a finetuned model: prints a line for each, its label and probability (of STS-B, the number)."""
    from tasks.answers import Labeller, model_folder

    with opened(file) as lines:
        labeller = Labeller(model_folder("finetune", model))
        if scores and labeller.regression:
            raise InputError(f"{model} gives a number, and has no classes. Leave --scores out.")
        expected = {1: "One text a line", 2: "Two texts a line, separated by a tab"}
        answer_lines(
            lines,
            lambda some: (labelled(answer, scores, as_json) for answer in labeller(some)),
            expected.get(labeller.texts, "One text a line, or two separated by a tab"),
            size=0 if file == "-" else os.fstat(lines.fileno()).st_size,
        )
    tell(labeller.notes())


def tell(notes: list[str]) -> None:
    """Print what to know of the answers, apart from them."""
    for note in notes:
        print(note, file=sys.stderr)


def labelled(answer: dict, scores: bool, as_json: bool) -> str:
    """The line that tells an answer."""
    probabilities = answer.pop("probabilities", {})
    if as_json:
        return json.dumps(answer | ({"probabilities": probabilities} if scores else {}), ensure_ascii=False)
    if answer["label"] is None:
        return ""
    if "probability" not in answer:
        return f"{answer['label']:.4f}"
    every = [f"{name}={share:.4f}" for name, share in probabilities.items()] if scores else []
    return "\t".join([answer["label"], f"{answer['probability']:.4f}", *every])


def fill(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="With [MASK]; `-` or none: from standard input, one a line, empty ones passed over."
        ),
    ] = "-",
    model: Annotated[
        str, typer.Option(help="pretrain/KEY, a key, the beginning of one, `latest`, or a folder with a model.")
    ] = "latest",
    top: Annotated[int, typer.Option(min=1, help="Tokens to print; ## begins one that continues a word.")] = 5,
    as_json: JSON = False,
) -> None:
    """Fill each [MASK] of a text: prints a line for each, the likeliest tokens with their probabilities."""
    from tasks.answers import Filler, decode, model_folder

    filler = Filler(model_folder("pretrain", model))

    def answers(lines: Lines) -> Iterator[str]:
        for number, line in lines:
            if (given := decode(line, f"Line {number}")).strip():
                yield from filled(given, filler(given, top, f"Line {number}"), as_json)

    if text == "-":
        with opened("-") as lines:
            answer_lines(lines, answers, "One text a line, with [MASK]")
    else:
        given = decode(os.fsencode(text), "The text")
        write(filled(given, filler(given, top, "The text"), as_json))
    tell(filler.notes())


def filled(text: str, masks: list[list[tuple[str, float]]], as_json: bool) -> list[str]:
    """The lines that tell what was found for each [MASK]."""
    if as_json:
        found = [[{"token": token, "probability": round(share, 6)} for token, share in mask] for mask in masks]
        return [json.dumps({"text": text, "masks": found}, ensure_ascii=False)]
    return ["\t".join(f"{token} {share:.4f}" for token, share in mask) for mask in masks]


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """A file, or standard input for `-`."""
    if name == "-":
        if sys.stdin is None:
            raise InputError("Standard input is closed. Name a file, or pipe the texts in.")
        yield sys.stdin.buffer
        return
    if not name:
        raise InputError("The name of the file is empty. Name one, or give `-` for standard input.")
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("rb"))
        except OSError as error:
            raise InputError(f"{name} can't be read: {error.strerror}. Expected a file with a text a line.") from error
        yield file


def answer_lines(file: BinaryIO, answers: Callable[[Lines], Iterable[str]], expected: str, size: int = 0) -> None:
    """Print the answers to the lines of a file as they come.

    On a terminal, `expected` is told first, and a line that can't be answered doesn't end it. Of a file of `size` bytes (0:
    not known) whose answers don't go to the terminal, a bar shows how much is done.
    """
    from tasks.answers import read_lines
    from tasks.progress import Progress

    typed, some = file.isatty(), []
    if typed:
        print(f"{expected}; Ctrl-D ends.", file=sys.stderr)
    with Progress("predict", total=size, unit="B") if size and not sys.stdout.isatty() else nullcontext() as bar:
        for some in read_lines(file):
            try:
                write(answers(some))
            except InputError as error:
                if not typed:
                    raise
                print(f"cram: {error}", file=sys.stderr)
            if bar:
                bar.update(file.tell() - bar.count)
    if not some:
        print("The input is empty: there was nothing to answer.", file=sys.stderr)


def write(lines: Iterable[str]) -> None:
    """Print lines in UTF-8, whatever the locale, as the input is; those before an error too, and at once."""
    try:
        for line in lines:
            sys.stdout.buffer.write(line.encode() + b"\n")
    finally:
        sys.stdout.buffer.flush()
