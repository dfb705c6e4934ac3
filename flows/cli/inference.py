"""Inference with trained models: labels of texts from a finetuned one, tokens for [MASK] from a pretrained one.

Lines of a file or a pipe are read as they arrive, so that each text is answered as soon as it is written. Answers are
computed in single precision and equal those of transformers' pipelines on the same folder.

The pipelines themselves are not used. They return no encodings, by which truncated and unknown texts are counted, and
they add untrained classes to a pretrained model instead of refusing it. `pipeline("text-classification")` needs 4.6 to
5.3 s of CPU time to start (here 1.8 to 2.1 s), and 4.2 to 5.9 s for 1,200 texts in batches sorted by length (here 4.2
to 4.4 s; two layouts of 4 x 256, one core).
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from tokenizers import Encoding, Tokenizer

from model import InputError, export, finetuning, machine
from model.bert import Bert
from model.quantities import counted
from tasks.glue.tasks import TASKS
from tasks.store import MANIFEST, Artifact, artifacts, elsewhere, find, verify_files
from tasks.text.tokenizer import MASK, UNK, failures_named, load_tokenizer

CHUNK = 1 << 16  # bytes read at once: some hundred lines, so that answers to a long file come steadily
LONGEST_LINE = 10_000_000  # bytes; a file without line ends is not text and would fill the memory
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNKNOWN = "contained no known word (the vocabulary is for English)"


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def with_model(stage: str) -> list[Artifact]:
    """The artifacts of a stage whose model was kept, the newest last."""
    return [artifact for artifact in artifacts(stage) if (artifact.path / export.CONFIG).exists()]


def model_folder(stage: str, name: str) -> Path:
    """The folder of the model called `name`: a folder, or the artifact STAGE/KEY, KEY, or the start of a key.

    `latest` is the newest artifact with a model. Raises InputError for other names, and for artifacts without a model.
    """
    if os.path.isdir(name):  # unlike Path.is_dir, False for names that are too long
        folder, title = Path(name), name
    else:
        given, slash, key = name.rpartition("/")
        if slash and given != stage:
            raise InputError(
                f"There is no folder {name!r}.{elsewhere(stage, key, given) if given else ''} Give a folder with a "
                f"model, {stage}/KEY, a key, the start of one, or `latest`; `cram ls {stage}` lists the artifacts."
            )
        kept = with_model(stage) if key == "latest" else []
        artifact = kept[-1] if kept else find(stage, key)
        folder, title = artifact.path, artifact.name
    manifest = read_json(folder / MANIFEST)
    if manifest.get("stage", stage) != stage:
        raise InputError(
            f"{title} was made by the stage {manifest['stage']}; expected a model of the stage {stage}. "
            f"`cram ls {stage}` lists them."
        )
    if stage == "finetune" and manifest and not (folder / export.CONFIG).exists():
        kept = ", ".join(f"{a.key} ({a.manifest['params'].get('task')})" for a in with_model(stage)[-8:]) or "none yet"
        raise InputError(
            f"{title} has scores, but its model was not kept. Kept models: {kept}. To keep others, run the recipe with "
            'finetune.keep set to "first" (seed 0 of each task) or "all", for example '
            '--override \'{"finetune": {"keep": "all"}}\'.'
        )
    # A copied folder may lack what inference doesn't read.
    verify_files(folder, [file for file in manifest.get("files", []) if (folder / file["path"]).exists()], title)
    return folder


def read_lines(file: BinaryIO) -> Iterator[list[tuple[int, bytes]]]:
    """The lines with their numbers, from 1, as many at a time as are available. They end with \\n, \\r\\n or \\r."""
    number, rest = 1, b""
    while chunk := file.read1(CHUNK):
        lines = (rest + chunk).splitlines(keepends=True)
        rest = b"" if lines[-1].endswith(b"\n") else lines.pop()  # \r at the end may be the first half of \r\n
        if lines:
            yield list(enumerate((line.rstrip(b"\r\n") for line in lines), number))
            number += len(lines)
        if len(rest) > LONGEST_LINE:
            raise InputError(
                f"Line {number} is longer than {LONGEST_LINE // 10**6} MB; expected one text per line. Check that this "
                "is a text file."
            )
    if rest:
        yield [(number, rest.rstrip(b"\r\n"))]


def decode(line: bytes, where: str) -> str:
    """The text of a line without a byte order mark. Raises InputError if it is not UTF-8 text."""
    line = line.removeprefix(BYTE_ORDER_MARK)
    if b"\0" in line:
        raise InputError(
            f"{where} has a NUL byte; expected UTF-8, one text per line. Convert the file to UTF-8 (`iconv`)."
        )
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8: byte {line[error.start]:#x} at position {error.start + 1}. Convert the file to "
            "UTF-8 (`iconv`)."
        ) from error


def tokenizer_for(folder: Path, bert: Bert) -> Tokenizer:
    """The tokenizer of a model, for raw text, without padding or truncation."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.get_vocab_size() != bert.vocabulary:
        raise InputError(
            f"{folder} has a tokenizer of {tokenizer.get_vocab_size():,} entries, but a model of {bert.vocabulary:,}. "
            "Copy both from the same artifact."
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def known_texts(encoding: Encoding) -> set[int]:
    """The numbers of an input's texts (0, 1) that have a known token other than [MASK]."""
    tokens = zip(encoding.sequence_ids, encoding.ids, strict=True)
    return {text for text, token in tokens if text is not None and token not in (UNK, MASK)}


class Labeller:
    """A finetuned model and its tokenizer: labels texts, or pairs of texts separated by a tab."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.classifier = folder, export.load_classifier(folder)
        self.machine = replace(machine.detect(), dtype=torch.float32)
        self.tokenizer = tokenizer_for(folder, self.classifier.bert)
        config, params = read_json(folder / export.CONFIG), read_json(folder / MANIFEST).get("params", {})
        saved = export.SavedClassifier.model_validate(config["cram"])
        self.longest = params.get("max_tokens", saved.max_tokens or saved.length)  # as in finetuning
        self.tokenizer.enable_truncation(self.longest, strategy="longest_first")
        self.regression = saved.classes == 1
        numbers = [str(number) for number in range(saved.classes)]
        names = config.get("id2label", {number: f"LABEL_{number}" for number in numbers})  # transformers' usual names
        if not isinstance(names, dict) or set(names) != set(numbers):
            raise InputError(
                f"id2label in {folder / export.CONFIG} does not match the {saved.classes} classes of the model. Copy "
                "both files from the same artifact."
            )
        self.labels = [str(names[number]) for number in numbers]
        task = params.get("task")
        self.texts = len(TASKS[task].columns) if task in TASKS else saved.texts  # per input
        self.guessed = self.texts is None  # then the first input decides
        self.answered = self.empty = self.truncated = self.unknown = 0

    def __call__(self, lines: list[tuple[int, bytes]]) -> Iterator[dict]:
        """Yield the answers to numbered lines, in order. Raises InputError at the first line that can't be answered.

        An answer has `line`, `text` (and `text_pair`), `label` (for regression the number; None for an empty line), and
        with classes `probability` and `probabilities` by label.
        """
        inputs, problem = [], None
        for number, line in lines:
            try:
                inputs.append((number, self.divide(number, line)))
            except InputError as error:
                problem = error
                break
        scores = iter(self.scores([texts for _, texts in inputs if texts]))
        for number, texts in inputs:
            about = {"line": number} | dict(zip(("text", "text_pair"), texts or ("",), strict=False))
            yield about | (self.answer(next(scores)) if texts else {"label": None})
        if problem:
            raise problem

    def divide(self, number: int, line: bytes) -> tuple[str, ...]:
        """The one or two texts of a line; none if it is blank."""
        text = decode(line, f"Line {number}")
        if not text.strip():
            self.empty += 1
            return ()
        parts = tuple(text.split("\t"))
        self.texts = self.texts or min(2, len(parts))
        if len(parts) != self.texts or not all(map(str.strip, parts)):
            expected = {1: "one text per line, without tabs", 2: "two texts that are not empty, separated by one tab"}
            why = ", as in the first line" if self.guessed else ""
            raise InputError(
                f"Line {number} has {counted(len(parts) - 1, 'tab')}; expected {expected[self.texts]}{why}."
            )
        return parts

    def scores(self, inputs: list[tuple[str, ...]]) -> np.ndarray:
        """(n, classes) scores of inputs, before softmax, in their order."""
        with failures_named(self.folder):
            encodings = self.tokenizer.encode_batch_fast([texts if len(texts) > 1 else texts[0] for texts in inputs])
        self.answered += len(encodings)
        self.truncated += sum(bool(encoding.overflowing) for encoding in encodings)
        self.unknown += sum(
            len(known_texts(encoding)) < len(texts) for texts, encoding in zip(inputs, encodings, strict=True)
        )
        examples = finetuning.Examples.of([encoding.ids for encoding in encodings], np.zeros(len(encodings)))
        return finetuning.predict(self.classifier, examples, self.machine)

    def answer(self, scores: np.ndarray) -> dict:
        """The answer for (classes,) scores."""
        if self.regression:
            return {"label": round(float(scores[0]), 6)}
        shares = torch.from_numpy(scores).double().softmax(dim=0).tolist()
        best = int(np.argmax(scores))
        return {
            "label": self.labels[best],
            "probability": round(shares[best], 6),
            "probabilities": {name: round(share, 6) for name, share in zip(self.labels, shares, strict=True)},
        }

    def notes(self) -> list[str]:
        """Remarks on the answers given so far."""
        cases = {
            f"exceeded {self.longest} tokens and were truncated": self.truncated,
            f"{UNKNOWN}; their labels mean little": self.unknown,
        }
        of = counted(self.answered, "input")
        notes = [f"{number:,} of {of} {what}." for what, number in cases.items() if number]
        return notes + ([f"{counted(self.empty, 'empty line')} without a label."] if self.empty else [])


class Filler:
    """A pretrained model and its tokenizer: fills every [MASK] of a text."""

    def __init__(self, folder: Path) -> None:
        saved = read_json(folder / export.CONFIG).get("cram")
        if isinstance(saved, dict) and "classes" in saved:  # `load` would add an untrained vocabulary head
            raise InputError(
                f"{folder} holds a finetuned model, which labels texts (`cram predict`); expected a pretrained one. "
                "`cram ls pretrain` lists them."
            )
        self.folder, self.device = folder, machine.detect().device
        self.bert = export.load(folder).to(self.device).eval()
        self.tokenizer = tokenizer_for(folder, self.bert)
        self.tokenizer.encode_special_tokens = False  # unlike in the corpus, [MASK] is meant as one
        self.filled = self.unknown = 0  # texts

    def __call__(self, text: str, top: int, where: str) -> list[list[tuple[str, float]]]:
        """For each [MASK], the `top` tokens with their probabilities, best first. `where`: its name in errors."""
        with failures_named(self.folder):
            encoding = self.tokenizer.encode(text)
        ids = torch.tensor(encoding.ids, device=self.device)
        if MASK not in ids:
            raise InputError(f"{where} has no [MASK]. Put [MASK], in capitals, in place of a word.")
        if len(ids) > self.bert.length:
            raise InputError(
                f"{where} has {len(ids):,} tokens with [CLS] and [SEP]; the model takes {self.bert.length}. Shorten it."
            )
        with torch.inference_mode():
            states_MD = self.bert.encode(ids[None])[0, ids == MASK]
            probabilities_MV = self.bert.logits(states_MD).float().softmax(dim=-1)
        self.filled += 1
        self.unknown += bool(text.replace("[MASK]", "").strip()) and not known_texts(encoding)
        best = probabilities_MV.topk(min(top, self.bert.vocabulary))
        return [
            [(self.tokenizer.id_to_token(token), probability) for token, probability in zip(*of_mask, strict=True)]
            for of_mask in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def notes(self) -> list[str]:
        """Remarks on the answers given so far."""
        of = counted(self.filled, "text")
        note = f"{self.unknown:,} of {of} {UNKNOWN} besides [MASK]; tokens for these mean little."
        return [note] if self.unknown else []
