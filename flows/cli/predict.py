"""`cram predict` and `cram fill`: transformers' pipelines with cram's models."""

import itertools
import json
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from flows.cli.common import stage_names
from flows.summary import OTHER_STAGES
from model.errors import InputError
from model.wording import age, counted, printable

if TYPE_CHECKING:
    from transformers import Pipeline

    from model.settings import Kind
    from tasks.store.artifacts import Artifact

BATCH = 32  # lines of a file; a line that is typed or piped is answered at once
CONTINUED = "##"  # how pieces within a word begin
TASKS = {  # of transformers' pipelines, by the head in the name of a model's class
    "MaskedLM": "fill-mask",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


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
            "standard input. Only line feeds end lines. Empty lines give empty lines. Long texts are truncated, and "
            "their number is printed at the end.",
        ),
    ] = "-",
    scores: Annotated[bool, typer.Option("--scores", help="Also print the probability of every class.")] = False,
    as_json: JSON = False,
) -> None:
    """Label texts with a finetuned model. Prints one line per text: label and probability, or a regression's number.

    With several labels per text, those of probability 0.5 or more; for a task on tokens, the entities with theirs.
    """
    from model import export

    source, folder, doubts = opened(file), model_folder("finetune", model), Counter()
    classify = open_pipeline(folder, "text-classification", "token-classification")
    config, kinds = classify.model.config, {problem: kind for kind, problem in export.PROBLEMS.items()}
    kind = kinds.get(config.problem_type, "classes" if config.num_labels > 1 else "regression")
    kind = "tokens" if classify.task == "token-classification" else kind
    if kind == "regression" and config.num_labels > 1:
        raise InputError(f"{folder} predicts {config.num_labels} numbers of a text; expected one.")
    if scores and kind in ("regression", "tokens"):
        raise InputError(f"{model} gives no probabilities of a text's classes: its kind is {kind}. Omit --scores.")
    for answer in answers(classify, kind, lines_of(source), BATCH if os.path.isfile(file) else 1, doubts):
        write([labelled(answer, scores, as_json)])
    for doubt, count in (+doubts).items():  # those above 0
        tell(f"{counted(count, 'line')} {doubt}.")


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
    filler = open_pipeline(model_folder("pretrain", model), "fill-mask")
    lines = ((f"Line {number}", line) for number, line in lines_of(opened("-"))) if text == "-" else [("TEXT", text)]
    for where, masked in lines:
        if masked.strip():
            masks = filled(filler, masked, top, where)
            tokens = [[{"token": token, "probability": round(share, 6)} for token, share in mask] for mask in masks]
            plain = ["\t".join(f"{printable(token)} {share:.4f}" for token, share in mask) for mask in masks]
            write([as_object({"text": masked, "masks": tokens})] if as_json else plain)


def named_model(stage: str, name: str, kept: "list[Artifact]") -> "Artifact":
    """The artifact called `name`: [STAGE/]KEY, the start of a key, `latest`, or, of the `kept` models, a task's newest.

    It may be of another stage, if that is named. Raises InputError for other names, and for `latest` if several tasks
    have models.
    """
    from tasks.store.artifacts import LATEST, find

    given, slash, key = name.rpartition("/")
    if slash and given not in (*stage_names(), *OTHER_STAGES):
        raise InputError(f"There is no folder {name!r}. Give a folder with a model, {stage}/KEY, a key, or `latest`.")
    if given not in ("", stage):
        return find(given, key)
    newest = {artifact.manifest["params"].get("task"): artifact for artifact in kept}
    if key in newest:
        return newest[key]
    if key == LATEST and len(newest) > 1:
        listed = ", ".join(f"{task} ({artifact.name})" for task, artifact in newest.items())
        raise InputError(f"{len(newest)} tasks have models: {listed}. Give the name of a task or artifact, not {name}.")
    return kept[-1] if key == LATEST and kept else find(stage, key)


def model_folder(stage: str, name: str) -> Path:
    """The folder of the model called `name`: a folder, or that of an artifact of the stage, as in `named_model`.

    Raises InputError for other names, for artifacts without a model and for changed files.
    """
    from tasks.adopt import has_weights
    from tasks.store.artifacts import artifacts_of
    from tasks.store.manifests import MANIFEST, decisive_files, verify_files

    kept = [artifact for artifact in artifacts_of(stage) if has_weights(artifact.path)]
    # unlike Path.is_dir, False for names that are too long
    folder = Path(name) if os.path.isdir(name) else named_model(stage, name, kept).path
    about = read_json(folder / MANIFEST)
    if about.get("stage", stage) != stage:
        raise InputError(
            f"{name} was made by the stage {about['stage']}; expected a model of the stage {stage}: {stage}/KEY, a "
            f"key, or a folder. `cram ls {stage}` lists them."
        )
    if about and not (folder / "config.json").exists():
        names = ", ".join(f"{a.key} ({a.manifest['params'].get('task', stage)})" for a in kept[-8:]) or "none yet"
        raise InputError(
            f"The model of {name} was not kept. Kept models: {names}. To keep others, run the recipe with "
            'finetune.keep set to "first" (seed 0 of each task) or "all".'
        )
    if about.get("hollow") and not has_weights(folder):
        raise InputError(
            f"{name} is hollow: it has no weights here. Fetch them with `cram pull {stage}/{about['key']}`, or delete "
            f"{folder}, and the next run of its recipe makes it again."
        )
    # A copied folder may lack what a pipeline doesn't read.
    verify_files(folder, [file for file in decisive_files(about) if (folder / file["path"]).is_file()], name)
    params = about.get("params", {})
    facts = [f"{stage}/{about.get('key', folder.name)}" if about else f"folder {name}"]
    facts += [f"{field} {params[field]}" for field in ("task", "seed") if field in params]
    facts += [f"made {old} ago" for old in [age(about.get("finished", ""))] if old]
    tell(f"Model: {', '.join(facts)}")
    return folder


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is none."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def open_pipeline(folder: Path, *tasks: str) -> "Pipeline":
    """transformers' pipeline for one of these tasks with the model in a folder, by the head that its config.json names.

    Raises InputError if the folder holds no such model, or not the whole of it.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from model import hf, layouts, machine  # noqa: F401, transformers has cram's layouts once hf is loaded
    from tasks.text.tokenizer import SPECIALS, failures_named

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        saved = read_json(folder / "config.json")
        if not saved and (folder / "adapter_config.json").exists():
            raise ValueError("it has an adapter of PEFT alone; merge it (merge_and_unload), and save the whole model")
        task = TASKS.get(head := layouts.head_of(saved))
        if saved and task not in tasks:
            raise ValueError(f"its head is {head or 'none'}; expected one for {' or '.join(tasks)}")
        opener = getattr(transformers, f"AutoModelFor{head}")
        model, report = opener.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        if wrong := [f"{what} {', '.join(map(str, sorted(some)))}" for what, some in report.items() if some]:
            raise ValueError("; ".join(wrong))
        if not (folder / "tokenizer.json").exists():  # transformers would make an empty one
            raise ValueError("it has no tokenizer.json; copy that of the model that it was trained from")
        with failures_named(folder):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        if len(tokenizer) > (rows := model.config.vocab_size):
            raise ValueError(f"it has a tokenizer of {len(tokenizer):,} entries, but a model of {rows:,}")
        # Once transformers has saved a classifier, it may have been trained on other inputs than cram's.
        changed = "transformers_version" in saved and saved.get("classifier_pooling") != "compare"
        model.config.cram = {} if changed else saved.get("cram") or {}
        limits = model.config.cram.get("max_tokens"), model.config.max_position_embeddings, tokenizer.model_max_length
        tokenizer.model_max_length = min(filter(None, limits))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, StrictDataclassError) as error:
        reason = textwrap.shorten(str(error), 500, placeholder=" …").rstrip(".")
        raise InputError(f"{folder} holds no model to open: {reason}.") from error
    # A literal [SEP] in a text to classify is text, unless the model has special tokens of its user's.
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokenizer.split_special_tokens = task != "fill-mask" and special <= set(SPECIALS)
    return transformers.pipeline(task, model=model, tokenizer=tokenizer, device=machine.detect().device)


def answers(
    classify: "Pipeline", kind: "Kind", lines: Iterator[tuple[int, str]], batch: int, doubts: Counter
) -> Iterator[dict]:
    """Yield the answers to numbered lines, in order. Raises InputError at the first line that can't be answered.

    An answer has `line`, `text` (and `text_pair`), and what `labels` returns. `doubts` counts the lines whose answers
    mean little.
    """
    problem, texts = None, 1 if kind == "tokens" else classify.model.config.cram.get("texts")
    options = {"ignore_labels": []} if kind == "tokens" else {"top_k": None, "truncation": True}
    options |= {"function_to_apply": "none"} if kind == "regression" else {}
    while not problem:
        some: list[dict] = []
        try:
            for number, line in itertools.islice(lines, batch):
                parts = divided(classify, number, line, texts, doubts)
                texts = texts or len(parts) or None
                some.append({"line": number, "text": ""} | dict(zip(("text", "text_pair"), parts, strict=False)))
        except InputError as error:  # which is raised after the answers to the lines before
            problem = error
        if not some:
            break
        given = [{name: one[name] for name in ("text", "text_pair") if name in one} for one in some if one["text"]]
        inputs = [one["text"] for one in given] if kind == "tokens" else given
        found = iter(classify(inputs, batch_size=batch, **options) if inputs else [])
        for one in some:
            yield one | labels(classify, kind, one["text"], next(found) if one["text"] else [])
    if problem:
        raise problem


def divided(classify: "Pipeline", number: int, line: str, texts: int | None, doubts: Counter) -> list[str]:
    """The texts of a line; none if it is empty. Raises InputError unless there are `texts` of them (None: 1 or 2)."""
    from tasks.text.tokenizer import failures_named

    if not line.strip():
        doubts["without a text"] += 1
        return []
    tokenizer, parts = classify.tokenizer, line.split("\t")
    expected = texts or min(2, len(parts))
    if len(parts) != expected or not all(map(str.strip, parts)):
        words = {1: "one text", 2: "two texts, separated by one tab"}[expected]
        raise InputError(f"Line {number} has {counted(len(parts) - 1, 'tab')}; expected {words}.")
    with failures_named(Path(classify.model.name_or_path)):
        ids = tokenizer(parts, add_special_tokens=False).input_ids
    doubts["truncated"] += sum(map(len, ids)) + 1 + len(parts) > tokenizer.model_max_length
    doubts["without a known word"] += any(set(each) <= {tokenizer.unk_token_id} for each in ids)
    return parts


def labels(classify: "Pipeline", kind: "Kind", text: str, found: list[dict]) -> dict:
    """What a pipeline found in a text (nothing in an empty one), as the fields of an answer.

    `label` is a class, with its `probability`, or a regression's number; None for an empty text. `labels` are several,
    with their probabilities. Both have `probabilities` of all classes. `entities`: see there.
    """
    if kind == "tokens":
        return {"entities": entities(classify, text, found)}
    shares = {each["label"]: round(each["score"], 6) for each in found}
    probabilities = {label: shares[label] for label in classify.model.config.id2label.values() if found}
    if kind == "multilabel":
        likely = {name: share for name, share in shares.items() if share >= 0.5}
        return {"labels": likely, "probabilities": probabilities}
    if kind == "regression" or not found:
        return {"label": float(f"{found[0]['score']:.7g}") if found else None}  # as many digits as fp32 has
    best = found[0]["label"]
    return {"label": best, "probability": shares[best], "probabilities": probabilities}


def entities(classify: "Pipeline", text: str, found: list[dict]) -> list[dict]:
    """The entities in a text, from the pieces of its words: `start`, `end`, `word`, `label` and `probability` of each.

    A word's label is that of its first piece. The pipeline's own way to this, "first", tells a piece by its length in
    the text, which the normaliser may change: `it’s` would belong to the word before. Spans are those that a score
    counts (`tasks/glue/tags.py`); their probability is the mean over their words. Labels that mark no spans, such as
    parts of speech, are those of single words.
    """
    import numpy as np

    from tasks.glue.tags import OUTSIDE, Span, mark_spans, spans_of

    words: list[dict] = []
    for piece in found:
        name, end = piece["word"], piece["end"]
        if words and name.startswith(CONTINUED) and len(name) != end - piece["start"]:
            words[-1]["end"] = end
        else:
            words.append(dict(piece))
    tags = [word["entity"] for word in words]
    if mark_spans(classify.model.config.id2label.values()):
        spans = spans_of(tags)
    else:
        spans = [Span(place, place + 1, tag) for place, tag in enumerate(tags) if tag != OUTSIDE]
    answer = []
    for span in spans:
        of_span = words[span.start : span.stop]
        start, end = of_span[0]["start"], of_span[-1]["end"]
        share = float(np.mean([word["score"] for word in of_span]))
        about = {"word": text[start:end], "label": span.name, "probability": round(share, 6)}
        answer.append({"start": start, "end": end} | about)
    return answer


def filled(filler: "Pipeline", text: str, top: int, where: str) -> list[list[tuple[str, float]]]:
    """For each [MASK], the `top` tokens with their probabilities, best first. `where`: the text's name in errors."""
    from tasks.text.tokenizer import failures_named

    tokenizer = filler.tokenizer
    check_text(text, where)
    with failures_named(Path(filler.model.name_or_path)):
        ids = tokenizer(text).input_ids
    if tokenizer.mask_token_id not in ids:
        raise InputError(f"{where} has no [MASK]. Put [MASK], in capitals, in place of a word.")
    if len(ids) > (longest := tokenizer.model_max_length):
        raise InputError(
            f"{where} has {len(ids):,} tokens with [CLS] and [SEP]; the model takes {longest}. Shorten it."
        )
    beyond = filler.model.config.vocab_size - len(tokenizer)  # rows of the embedding that no token has
    found = filler(text, top_k=min(top, len(tokenizer)) + beyond)
    masks = found if isinstance(found[0], list) else [found]
    named = [[one for one in mask if one["token"] < len(tokenizer)][:top] for mask in masks]
    return [[(tokenizer.convert_ids_to_tokens(one["token"]), one["score"]) for one in mask] for mask in named]


def opened(name: str) -> TextIO:
    """A file, or standard input for `-`. Raises InputError if it can't be read."""
    # its lines are those of `wc -l` and `paste`, so that answers stay beside their texts
    reading = {"encoding": "utf-8-sig", "errors": "surrogateescape", "newline": "\n"}
    if name == "-":
        sys.stdin.reconfigure(**reading)
        return sys.stdin
    try:
        return Path(name).open(**reading)
    except OSError as error:
        raise InputError(f"{name!r} can't be read: {error.strerror}. Expected a file of texts.") from error


def lines_of(file: TextIO) -> Iterator[tuple[int, str]]:
    """The lines of a file as they arrive, numbered from 1, without line ends. Raises InputError for one not in UTF-8."""
    if file.isatty():
        tell("Enter one text per line, or two separated by a tab; end with Ctrl-D.")
    for number, line in enumerate(file, 1):
        check_text(line, f"Line {number}")
        yield number, line.removesuffix("\n").removesuffix("\r")


def check_text(text: str, where: str) -> None:
    """Raise InputError for bytes that are not UTF-8, which Python reads as surrogates."""
    if wrong := re.search("[\ud800-\udfff]", text):
        byte, position = ord(wrong[0]) % 0x100, len(text[: wrong.start()].encode()) + 1
        raise InputError(f"{where} is no text in UTF-8: byte {byte:#04x} at position {position}. Convert it (`iconv`).")


def labelled(answer: dict, scores: bool, as_json: bool) -> str:
    """An answer as a line of output."""
    probabilities = answer.pop("probabilities", {})
    if as_json:
        return as_object(answer | ({"probabilities": probabilities} if scores else {}))
    every = [f"{printable(name)}={share:.4f}" for name, share in probabilities.items()] if scores else []
    if "entities" in answer:
        found = [f"{printable(e['word'])} {printable(e['label'])} {e['probability']:.4f}" for e in answer["entities"]]
    elif "labels" in answer:
        found = [f"{printable(name)} {share:.4f}" for name, share in answer["labels"].items()] or [""]
    elif (label := answer["label"]) is None:
        found = []
    elif "probability" in answer:
        found = [printable(label), f"{answer['probability']:.4f}"]
    else:  # four decimals, and four digits of a small number
        found = [f"{label:.4f}" if abs(label) >= 1 else f"{label:#.4g}"]
    return "\t".join(found + every)


def as_object(answer: dict) -> str:
    r"""JSON on one line; control characters that JSON would leave unescaped become \uXXXX, which means the same."""
    return printable(json.dumps(answer, ensure_ascii=False))


def tell(note: str) -> None:
    """Print a note to standard error, apart from the answers."""
    print(printable(note), file=sys.stderr)


def write(lines: Iterable[str]) -> None:
    """Print lines in UTF-8 like the input, whatever the locale, and flush them."""
    for line in lines:
        sys.stdout.buffer.write(line.encode() + b"\n")
    sys.stdout.buffer.flush()
