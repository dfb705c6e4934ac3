"""The commands that use trained models: `cram predict` and `cram fill`."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from flows.summary import age
from model import InputError
from tasks.text.printable import printable

Lines = list[tuple[int, bytes]]  # numbered from 1
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TASK_ARTIFACT",
            help="Finetuned model: finetune/KEY, a key, the start of one, `latest`, or a folder with a model.",
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="UTF-8 file with one text per line, or two separated by a tab for tasks on pairs. Default: `-`, "
            "standard input. Empty lines give empty lines. Long texts are truncated, and their number is "
            "printed at the end.",
        ),
    ] = "-",
    scores: Annotated[bool, typer.Option("--scores", help="Also print the probability of every class.")] = False,
    as_json: JSON = False,
) -> None:
    """Label texts with a finetuned model. Prints one line per text: label and probability, or the score for STS-B."""
    from flows.cli.inference import Labeller, model_folder

    with opened(file) as texts:
        folder = model_folder("finetune", model)
        labeller = Labeller(folder)
        if scores and labeller.regression:
            raise InputError(f"{model} is a regression model without classes. Omit --scores.")
        tell([f"Model: {describe(folder, 'finetune')}"])
        expected = {1: "Enter one text per line", 2: "Enter two texts per line, separated by a tab"}
        answer_lines(
            texts,
            lambda lines: (labelled(answer, scores, as_json) for answer in labeller(lines)),
            expected.get(labeller.texts, "Enter one text per line, or two separated by a tab"),
            size=0 if file == "-" else os.fstat(texts.fileno()).st_size,
        )
    tell(labeller.notes())


def describe(folder: Path, stage: str) -> str:
    """The model in a folder: its artifact, task and seed, recipe (if there is a report on it) and age."""
    from flows.cli.inference import read_json
    from tasks.store import MANIFEST, artifacts

    about = read_json(folder / MANIFEST)
    if not about:
        return f"folder {folder}"
    facts = [name := f"{stage}/{about.get('key', folder.name)}"]
    with suppress(AttributeError, TypeError):  # other programs' files; the model itself may be good
        if stage == "finetune":
            facts.append(f"task {about['params'].get('task')}, seed {about['params'].get('seed')}")
        reports = (read_json(report.path / "report.json") for report in reversed(artifacts("report")))
        facts += [f"recipe {report['title']}" for report in reports if name in report.get("artifacts", ())][:1]
        facts += [f"made {old} ago" for old in [age(about.get("finished", ""))] if old]
    return ", ".join(facts)


def tell(notes: list[str]) -> None:
    """Print notes to standard error, apart from the answers."""
    for note in notes:
        print(printable(note), file=sys.stderr)


def labelled(answer: dict, scores: bool, as_json: bool) -> str:
    """An answer as a line of output."""
    probabilities = answer.pop("probabilities", {})
    if as_json:
        return as_object(answer | ({"probabilities": probabilities} if scores else {}))
    if answer["label"] is None:
        return ""
    if "probability" not in answer:
        return f"{answer['label']:.4f}"
    every = [f"{printable(name)}={share:.4f}" for name, share in probabilities.items()] if scores else []
    return "\t".join([printable(answer["label"]), f"{answer['probability']:.4f}", *every])


def fill(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="Text with one or more [MASK]. Default: `-`, one text per line from standard input; empty lines are "
            "skipped.",
        ),
    ] = "-",
    model: Annotated[
        str, typer.Option(help="Pretrained model: pretrain/KEY, a key, the start of one, `latest`, or a folder.")
    ] = "latest",
    top: Annotated[
        int, typer.Option(min=1, help="Tokens to print per [MASK]; ## marks the continuation of a word.")
    ] = 5,
    as_json: JSON = False,
) -> None:
    """Predict the token at each [MASK]. Prints one line per [MASK]: the most likely tokens with their probabilities."""
    from flows.cli.inference import Filler, decode, model_folder

    folder = model_folder("pretrain", model)
    filler = Filler(folder)
    tell([f"Model: {describe(folder, 'pretrain')}"])

    def answers(lines: Lines) -> Iterator[str]:
        for number, line in lines:
            if (masked := decode(line, f"Line {number}")).strip():
                yield from filled(masked, filler(masked, top, f"Line {number}"), as_json)

    if text == "-":
        with opened("-") as texts:
            answer_lines(texts, answers, "Enter one text with [MASK] per line")
    else:
        masked = decode(os.fsencode(text), "The text")
        write(filled(masked, filler(masked, top, "The text"), as_json))
    tell(filler.notes())


def filled(text: str, masks: list[list[tuple[str, float]]], as_json: bool) -> list[str]:
    """The tokens for each [MASK] as lines of output."""
    if as_json:
        tokens = [[{"token": token, "probability": round(share, 6)} for token, share in mask] for mask in masks]
        return [as_object({"text": text, "masks": tokens})]
    return ["\t".join(f"{printable(token)} {share:.4f}" for token, share in mask) for mask in masks]


def as_object(answer: dict) -> str:
    r"""JSON on one line; control characters that JSON would leave unescaped become \uXXXX, which means the same."""
    return printable(json.dumps(answer, ensure_ascii=False))


def opened(name: str) -> BinaryIO:
    """A file, or standard input for `-`. Raises InputError if it can't be read."""
    if name == "-":
        if sys.stdin is None:
            raise InputError("Standard input is closed. Name a file, or pipe the texts to this command.")
        return sys.stdin.buffer
    try:
        return Path(name).open("rb")
    except OSError as error:
        raise InputError(
            f"{name!r} can't be read: {error.strerror}. Expected a file with one text per line."
        ) from error


def answer_lines(file: BinaryIO, answers: Callable[[Lines], Iterable[str]], expected: str, size: int = 0) -> None:
    """Print the answers to the lines of a file as they arrive.

    If the lines come from a terminal, print `expected` first, and continue after a line that can't be answered. If
    `size` is known (bytes; 0: unknown) and the answers don't go to a terminal, show a progress bar.
    """
    from flows.cli.inference import read_lines
    from tasks.workers.progress import Progress

    typed, lines = file.isatty(), []
    if typed:
        print(f"{expected}; end with Ctrl-D.", file=sys.stderr)
    with Progress("predict", total=size, unit="B") if size and not sys.stdout.isatty() else nullcontext() as bar:
        for lines in read_lines(file):
            try:
                write(answers(lines))
            except InputError as error:
                if not typed:
                    raise
                tell([f"cram: {error}"])
            if bar:
                bar.update(file.tell() - bar.count)
    if not lines:
        tell(["The input is empty."])


def write(lines: Iterable[str]) -> None:
    """Print lines in UTF-8 like the input, whatever the locale, and flush them, also those before an error."""
    try:
        for line in lines:
            sys.stdout.buffer.write(line.encode() + b"\n")
    finally:
        sys.stdout.buffer.flush()
