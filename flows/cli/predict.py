"""`cram predict` and `cram fill`: transformers' pipelines with cram's models."""

import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO

import typer

from flows.cli.pipelines import Opened, model_folder, open_pipeline, print_note
from model.errors import InputError
from model.wording import counted, printable

if TYPE_CHECKING:
    from model.settings import Kind

BATCH = 32  # lines of a file; a line that is typed or piped is answered at once
CONTINUED = "##"  # how pieces within a word begin
LIKELY = 0.5  # probability from which on one of several labels is given
TABLES = {  # with functions of pandas that read them
    ".csv": "read_csv('{}')",
    ".json": "read_json('{}')",
    ".jsonl": "read_json('{}', lines=True)",
    ".parquet": "read_parquet('{}')",
}
FIELDS = ("text", "text_pair")  # of a line, as transformers names them
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


# Labels


def predict(
    model: Annotated[
        str,
        typer.Argument(
            metavar="TASK_ARTIFACT",
            help="Finetuned model: finetune/KEY, a key, the start of one, the name of a task (its newest model), "
            "`latest` if only one task has models, or a folder with a model.",
        ),
    ],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="UTF-8 file with one text per line, or two separated by a tab for tasks on pairs. Default: `-`, "
            "standard input. Only line feeds end lines. An empty line stays empty. Long texts are truncated, and "
            "their number is printed at the end.",
        ),
    ] = "-",
    scores: Annotated[bool, typer.Option("--scores", help="Also print the probability of every class.")] = False,
    as_json: JSON = False,
) -> None:
    """Label texts with a finetuned model. Prints one line per text: label and probability, or a regression's number.

    If a text may have several labels, those with a probability of at least 0.5; for a task on tokens, the entities.
    """
    source = open_input(file)
    labeller = Labeller(model_folder("finetune", model))
    if scores and labeller.kind in ("regression", "tokens"):
        raise InputError(
            f"{model} has no probabilities for a text's classes: its kind is {labeller.kind}. Omit --scores."
        )
    batch = BATCH if os.path.isfile(file) else 1
    for answer in labeller.answers(read_lines(source), batch):
        write([as_line(answer, scores, as_json)])
    for doubt, count in labeller.doubts.items():
        if count:
            print_note(f"{counted(count, 'line')} {doubt}.")


class Line(NamedTuple):
    """A line of the input, with the texts in it; an empty line has none."""

    number: int
    texts: list[str]

    def inputs(self) -> dict[str, str]:
        """The texts by transformers' names."""
        return dict(zip(FIELDS, self.texts, strict=False))


class Labeller:
    """A finetuned model that labels lines. `doubts` counts lines whose answers mean little."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if the folder has no classifier."""
        self.model = open_pipeline(folder, "text-classification", "token-classification")
        self.labels = list((self.model.config.id2label or {}).values())
        self.kind = self._find_kind()
        if self.kind == "regression" and len(self.labels) > 1:
            raise InputError(f"{folder} predicts {len(self.labels)} numbers for a text; expected one.")
        # the number of texts in a line; None: that of the first line decides
        self.texts: int | None = 1 if self.kind == "tokens" else self.model.about.get("texts")
        self.doubts: Counter[str] = Counter()

    def _find_kind(self) -> "Kind":
        from model import export

        if self.model.task == "token-classification":
            return "tokens"
        for kind, problem in export.PROBLEMS.items():
            if problem == self.model.config.problem_type:
                return kind
        return "classes" if len(self.labels) > 1 else "regression"

    def answers(self, lines: Iterator[tuple[int, str]], batch: int) -> Iterator[dict]:
        """Yield the answers to numbered lines, in order. Raises InputError at the first line that can't be answered.

        An answer has `line`, `text` (and `text_pair`), and the fields of `answer`.
        """
        problem = None
        while problem is None:
            some: list[Line] = []
            try:
                for number, text in itertools.islice(lines, batch):
                    some.append(self.divide(number, text))
            except InputError as error:  # which is raised after the answers to the lines before
                problem = error
            if not some:
                break
            results = iter(self.results([line for line in some if line.texts], batch))
            for line in some:
                result = next(results) if line.texts else []
                text = line.texts[0] if line.texts else ""
                yield {"line": line.number, "text": ""} | line.inputs() | self.answer(text, result)
        if problem is not None:
            raise problem

    def divide(self, number: int, line: str) -> Line:
        """The texts of a line. Raises InputError unless it has as many as the lines before."""
        if not line.strip():
            self.doubts["without a text"] += 1
            return Line(number, [])
        parts = line.split("\t")
        expected = self.texts or min(2, len(parts))
        words = "one text" if expected == 1 else "two texts, separated by one tab"
        if len(parts) != expected:
            raise InputError(f"Line {number} has {counted(len(parts) - 1, 'tab')}; expected {words}.")
        for part, which in zip(parts, ("first", "second"), strict=False):
            if not part.strip():
                raise InputError(f"Line {number} is incomplete: its {which} text is empty; expected {words}.")
        self.texts = expected
        tokenizer = self.model.tokenizer
        ids = self.model.ids(parts, add_special_tokens=False)
        length = sum(len(each) for each in ids) + 1 + len(parts)  # with special tokens
        self.doubts["truncated"] += length > tokenizer.model_max_length
        self.doubts["without a known word"] += any(set(each) <= {tokenizer.unk_token_id} for each in ids)
        return Line(number, parts)

    def results(self, lines: list[Line], batch: int) -> list:
        """What the pipeline finds in lines with texts."""
        if not lines:
            return []
        if self.kind == "tokens":
            return self.model.run([line.texts[0] for line in lines], batch_size=batch, ignore_labels=[])
        function = {"function_to_apply": "none"} if self.kind == "regression" else {}
        inputs = [line.inputs() for line in lines]
        return self.model.run(inputs, batch_size=batch, top_k=None, truncation=True, **function)

    def answer(self, text: str, result: list[dict]) -> dict:
        """The fields of an answer, from what the pipeline found in a text; nothing in an empty one.

        `label` is a class, with its `probability`, or a regression's number; None for an empty text. `labels` are
        several, with their probabilities. Both have `probabilities` of all classes. `entities`: see there.
        """
        if self.kind == "tokens":
            return {"entities": self.entities(text, result)}
        if self.kind == "regression":
            # as many digits as fp32 has
            return {"label": float(f"{result[0]['score']:.7g}") if result else None}
        shares = {one["label"]: round(one["score"], 6) for one in result}
        probabilities = {label: shares[label] for label in self.labels} if result else {}
        if self.kind == "multilabel":
            likely = {name: share for name, share in shares.items() if share >= LIKELY}
            return {"labels": likely, "probabilities": probabilities}
        if not result:
            return {"label": None}
        best = result[0]["label"]
        return {"label": best, "probability": shares[best], "probabilities": probabilities}

    def entities(self, text: str, pieces: list[dict]) -> list[dict]:
        """The entities in a text, from the pieces of its words: `start`, `end`, `word`, `label`, `probability` of each.

        Spans are those that a score counts (`tasks/glue/tags.py`); their probability is the mean over their words.
        Labels that mark no spans, such as parts of speech, are those of single words.
        """
        import numpy as np

        from tasks.glue.tags import OUTSIDE, Span, mark_spans, spans_of

        words = join_pieces(pieces)
        tags = [word["entity"] for word in words]
        if mark_spans(self.labels):
            spans = spans_of(tags)
        else:
            spans = [Span(place, place + 1, tag) for place, tag in enumerate(tags) if tag != OUTSIDE]
        entities = []
        for span in spans:
            of_span = words[span.start : span.stop]
            start = of_span[0]["start"]
            end = of_span[-1]["end"]
            share = float(np.mean([word["score"] for word in of_span]))
            about = {"word": text[start:end], "label": span.name, "probability": round(share, 6)}
            entities.append({"start": start, "end": end} | about)
        return entities


def join_pieces(pieces: list[dict]) -> list[dict]:
    """The words of a text from their pieces; the tag of a word is that of its first piece.

    transformers' own way to this, "first", recognizes a piece by its length in the text, which the normaliser may
    change: `it’s` would belong to the word before.
    """
    words: list[dict] = []
    for piece in pieces:
        is_shortened = len(piece["word"]) != piece["end"] - piece["start"]  # by the marks of a further piece
        if words and piece["word"].startswith(CONTINUED) and is_shortened:
            words[-1]["end"] = piece["end"]
        else:
            words.append(dict(piece))
    return words


# Masks


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
    opened = open_pipeline(model_folder("pretrain", model), "fill-mask")
    texts: Iterable[tuple[str, str]] = [("TEXT", text)]
    if text == "-":
        texts = ((f"Line {number}", line) for number, line in read_lines(open_input("-")))
    for where, masked in texts:
        if not masked.strip():
            continue
        masks = fill_masks(opened, masked, top, where)
        if as_json:
            rounded = [[{"token": one.token, "probability": round(one.share, 6)} for one in mask] for mask in masks]
            write([as_object({"text": masked, "masks": rounded})])
        else:
            write("\t".join(f"{printable(one.token)} {one.share:.4f}" for one in mask) for mask in masks)


class Candidate(NamedTuple):
    """A token that may be at a [MASK], with its probability."""

    token: str
    share: float


def fill_masks(opened: Opened, text: str, top: int, where: str) -> list[list[Candidate]]:
    """For each [MASK], the `top` candidates, the most likely first. `where`: the text's name in errors."""
    check_text(text, where)
    tokenizer = opened.tokenizer
    ids = opened.ids(text)
    if tokenizer.mask_token_id not in ids:
        raise InputError(f"{where} has no [MASK]. Put [MASK], in capitals, in place of a word.")
    longest = tokenizer.model_max_length
    if len(ids) > longest:
        raise InputError(
            f"{where} has {len(ids):,} tokens with [CLS] and [SEP]; the model takes {longest}. Shorten it."
        )
    entries = len(tokenizer)
    without_token = opened.config.vocab_size - entries  # rows of the embedding
    results = opened.run(text, top_k=min(top, entries) + without_token)
    masks = results if isinstance(results[0], list) else [results]
    filled = []
    for mask in masks:
        known = [one for one in mask if one["token"] < entries][:top]
        tokens = tokenizer.convert_ids_to_tokens([one["token"] for one in known])
        filled.append([Candidate(token, one["score"]) for token, one in zip(tokens, known, strict=True)])
    return filled


# Lines


def open_input(name: str) -> TextIO:
    """Open a file, or standard input for `-`. Raises InputError if it can't be read, and for a table."""
    # Its lines are those of `wc -l` and `paste`, so that answers stay beside their texts.
    encoding = "utf-8-sig"
    errors = "surrogateescape"
    if name == "-":
        sys.stdin.reconfigure(encoding=encoding, errors=errors, newline="\n")  # type: ignore[union-attr]
        return sys.stdin
    reader = TABLES.get(Path(name).suffix.lower())
    if reader and os.path.isfile(name):
        texts = f"pd.{reader.format(name)}['text']"  # of the column with this name
        raise InputError(
            f"{name} is a table by its name; expected a file with one text per line. To write one, of its column text: "
            f"""python -c "import pandas as pd; [print(*str(text).split()) for text in {texts}]" > texts.txt"""
        )
    try:
        return Path(name).open(encoding=encoding, errors=errors, newline="\n")
    except OSError as error:
        raise InputError(f"{name!r} can't be read: {error.strerror}. Expected a file of texts.") from error


def read_lines(file: TextIO) -> Iterator[tuple[int, str]]:
    """The lines of a file as they come, numbered from 1, without line ends. Raises InputError for one not in UTF-8."""
    if file.isatty():
        print_note("Enter one text per line, or two separated by a tab; end with Ctrl-D.")
    for number, line in enumerate(file, 1):
        check_text(line, f"Line {number}")
        yield number, line.removesuffix("\n").removesuffix("\r")


def check_text(text: str, where: str) -> None:
    """Raise InputError for bytes that are not UTF-8, which Python reads as surrogates."""
    wrong = re.search("[\ud800-\udfff]", text)
    if wrong:
        byte = ord(wrong[0]) % 0x100
        position = len(text[: wrong.start()].encode()) + 1
        raise InputError(f"{where} is not UTF-8: byte {byte:#04x} at position {position}. Convert it (`iconv`).")


def as_line(answer: dict, scores: bool, as_json: bool) -> str:
    """An answer as a line of output."""
    probabilities = answer.pop("probabilities", {})
    if as_json:
        return as_object(answer | {"probabilities": probabilities} if scores else answer)
    fields = answer_fields(answer)
    if scores:
        fields += [f"{printable(name)}={share:.4f}" for name, share in probabilities.items()]
    return "\t".join(fields)


def answer_fields(answer: dict) -> list[str]:
    """The fields of a line of output, without the probabilities of all classes."""
    if "entities" in answer:
        found = answer["entities"]
        return [f"{printable(one['word'])} {printable(one['label'])} {one['probability']:.4f}" for one in found]
    if "labels" in answer:
        return [f"{printable(name)} {share:.4f}" for name, share in answer["labels"].items()] or [""]
    label = answer["label"]
    if label is None:
        return []
    if "probability" in answer:
        return [printable(label), f"{answer['probability']:.4f}"]
    # a number with four decimals, or a small one with four digits
    return [f"{label:.4f}" if abs(label) >= 1 else f"{label:#.4g}"]


def as_object(answer: dict) -> str:
    r"""JSON on one line; control characters that JSON would leave unescaped become \uXXXX, which means the same."""
    return printable(json.dumps(answer, ensure_ascii=False))


def write(lines: Iterable[str]) -> None:
    """Print lines in UTF-8 like the input, whatever the locale, and flush them."""
    for line in lines:
        sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()
