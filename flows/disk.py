"""The disk that a run needs: measured shares of its text, and its models."""

import functools
import logging
import shutil
from typing import NamedTuple

from rich.filesize import decimal

from flows.plan import Plan, Step
from model.errors import InputError
from tasks import adopt
from tasks.corpus import local
from tasks.corpus.parts import is_part
from tasks.download import Download
from tasks.store import home, locks
from tasks.store.artifacts import draft_of, read_manifest
from tasks.store.errors import disk_errors_as_input_errors
from tasks.tokenize import Tokenize
from tasks.vocabulary import Vocabulary

# bytes of text in a byte of a file, and in a document (of other sources: that of the Pile)
EXPANDS = {".zst": 4, ".gz": 3, ".bz2": 4.5, ".xz": 4.5, ".lz4": 2.5, ".zip": 3, ".parquet": 2.5}
DOCUMENT = {"books": 400_000, "wikipedia": 3_200, "c4": 2_200}
OTHERS = 5_700
WORD = 6.6  # bytes of text in a word and the space after it; measured on English prose
ALL = {"books": 12e9, "wikipedia": 21e9, "python-docs": 1e9}  # bytes of text in the smaller sources, at most
# bytes for a byte of text, as measured (docs/log/2026-11-b.md): of parts, of tokens, of scratch beside the parts
PARTS = 0.38
TOKENS = 0.45
TOKENS_OF_UNICODE = 0.65  # an ideograph has three bytes, and its token two
NARROW = 2  # bytes of a token of up to 65,536 entries
WIDE = 4  # of a token of more
SCRATCH = {"minhash": 0.7, "substring": 2.5}
MODELS = ("pretrain", "finetune")  # stages whose disk does not depend on the text
SHOWN = 1e9  # bytes from which the need is logged
TIGHT = 0.8  # the share of what is free that is warned of
log = logging.getLogger(__name__)


def text_of(params: Download) -> float:
    """The bytes of text that a download reads at most: what its limits allow, and what its source holds if known."""
    weights = params.weights
    documents = sum(share / DOCUMENT.get(name, OTHERS) for name, share in weights.items())  # in a byte
    limits = [1e6 * params.megabytes, params.documents * sum(weights.values()) / documents, WORD * params.words]
    if weights.keys() <= ALL.keys():
        limits.append(sum(ALL[name] for name in weights))
    if weights.keys() == {"files"}:
        files = local.local_files(params.files, params.extract).files
        sizes = [path.stat().st_size * EXPANDS.get(path.suffix.lower(), 1) for path in files.values()]
        limits.append(sum(sizes))
    return min(filter(None, limits), default=0)


@functools.cache  # a folder with many files takes seconds to list
def text_read(step: Step) -> float:
    """The bytes of text that a step without inputs reads, at most."""
    return text_of(step.params) if isinstance(step.params, Download) else 0


def text_for(step: Step) -> float:
    """The bytes of text that a step reads: by the size of the parts if they are there, or else of the source."""
    if not step.inputs:
        return text_read(step)
    given = step.inputs[0]
    if isinstance(given, list):  # of a stage that isn't ours
        return sum(text_for(each) for each in given if isinstance(each, Step))
    made = read_manifest(step.arguments[1])
    if made:
        return text_in(made)
    return text_for(given) if isinstance(given, Step) else 0


def text_in(corpus: dict) -> float:
    """The bytes of text in an artifact with this manifest, by the sizes of its parts, which need not be there."""
    return sum(file["bytes"] for file in corpus["files"] if is_part(file["path"])) / PARTS


def need(step: Step) -> tuple[float, float]:
    """The bytes that a step leaves on the disk, and those of its scratch beside them."""
    if step.stage in MODELS:
        return need_of_model(step)
    if step.stage == "tokenize":
        return need_of_tokens(step)
    if step.stage in ("download", "deduplicate", "decontaminate", "filter"):
        return need_of_text(step)
    return 0, 0


def need_of_model(step: Step) -> tuple[float, float]:
    """`need` of a step that makes a model."""
    from model import kept, memory, pretraining  # load torch

    bert, tokens, words = map(step.find_upstream, ("pretrain", "tokenize", "vocabulary"))
    if not (bert and tokens and words):
        return 0, 0
    training = bert.params.in_tokens(tokens_of_epoch(tokens, words))
    weights, states = memory.sizes(bert.params.architecture, training, words.params.entries, tokens.params.length)
    if step.stage == "pretrain":
        models = pretraining.EVALUATIONS if kept.keeps_tenths() else 1
        if kept.keeps_tokens():
            models += kept.most_by_tokens(training, weights // memory.FP32)
        return models * weights, 2 * (weights + states)  # a checkpoint stays until the next is complete
    there = adopt.weight_bytes(step.arguments[1])  # of a model that was made before, or was given
    return (there or weights) * step.params.keep, 0


def need_of_tokens(step: Step) -> tuple[float, float]:
    """`need` of tokenize: all sequences are written in parts first, and then those that are kept in one file."""
    words = step.find_upstream("vocabulary")
    if not words:
        return 0, 0
    width = WIDE if words.params.entries > 1 << 16 else NARROW
    every = width * tokens_in(text_for(step), words.params)
    return min(every, width * step.params.length * step.params.max_sequences), every


def tokens_in(text: float, vocabulary: Vocabulary) -> float:
    """About how many tokens so many bytes of text have, at most."""
    per_byte = TOKENS if vocabulary.characters == "ascii" else TOKENS_OF_UNICODE
    return text * per_byte / NARROW


def tokens_of_epoch(tokens: Step, words: Step) -> float:
    """The tokens of a pass over the sequences of a tokenize step: as many as it made, or an estimate.

    `words`: the step of its vocabulary.
    """
    made = read_manifest(tokens.artifact) if tokens.is_made else None
    if made:
        return made["stats"]["tokens"]
    return limited_tokens(text_for(tokens), words.params, tokens.params)


def limited_tokens(text: float, vocabulary: Vocabulary, params: Tokenize) -> float:
    """About how many tokens of so many bytes of text are trained on, at most."""
    return min(tokens_in(text, vocabulary), params.length * params.max_sequences)


def need_of_text(step: Step) -> tuple[float, float]:
    """`need` of a stage that writes text."""
    text = text_for(step)
    methods = step.params.methods if step.stage == "deduplicate" else [step.stage]
    scratch = [SCRATCH.get(method, 0) for method in methods]
    scratch[1:] = [size + PARTS for size in scratch[1:]]  # each method reads what the one before it wrote
    is_linked = not methods or (step.stage == "decontaminate" and step.params.data == "probes")
    return 0 if is_linked else text * PARTS, text * max(scratch, default=0)


def count_freed(step: Step) -> int:
    """The bytes of an artifact that is discarded before its step runs again, without parts that others have too."""
    if not step.is_anew:
        return 0
    files = [path.stat() for path in step.artifact.path.glob("*")]
    return sum(about.st_size for about in files if about.st_nlink == 1)


class Needs(NamedTuple):
    """Bytes of disk that a plan needs."""

    left: dict[str, float]  # that the artifacts of each stage take
    peak: float  # the most at a time, less what drafts have already
    models: float  # of models and their scratch, which don't depend on the text
    corpora: int  # texts that are read: a study may read several


def find_needs(plan: Plan) -> Needs:
    """What the steps need that have something to do."""
    steps = [step for step in plan.possible if not step.is_made]
    left: dict[str, float] = {}
    peak = models = freed = 0.0
    for step in steps:
        artifact, scratch = need(step)
        freed += count_freed(step)
        peak = max(peak, sum(left.values()) + artifact + scratch - freed)
        left[step.stage] = left.get(step.stage, 0) + artifact
        if step.stage in MODELS:
            models += artifact + scratch
    own = {draft_of(step.artifact).name for step in steps}
    resumed = sum(draft.bytes for draft in locks.drafts("") if draft.name in own)
    corpora = sum(step.stage == "download" for step in steps)
    return Needs(left, peak - resumed, models, corpora)


def advise_less_text(needs: Needs, free: float) -> str:
    """The advice to read less text, followed by a space; empty if that doesn't help."""
    text = needs.left.get("download", 0) / PARTS / max(1, needs.corpora)
    megabytes = int((TIGHT * free - needs.models) / needs.peak * text / 1e6)
    if megabytes <= 0:
        return ""
    return f"read less text (--set download.megabytes={megabytes}), "


@disk_errors_as_input_errors("This run")
def check(plan: Plan) -> float:
    """The bytes of disk that a plan needs at a time. Raises InputError if less is free."""
    needs = find_needs(plan)
    root = home.root()
    folder = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    stages = ", ".join(f"{stage} {decimal(int(size))}" for stage, size in needs.left.items() if size)
    sentence = (
        f"This run needs about {decimal(int(needs.peak))} of disk ({stages}; the rest is scratch), and {decimal(free)} "
        f"are free in {root}."
    )
    if needs.peak > free:
        advice = advise_less_text(needs, free)
        raise InputError(f"{sentence} Free some, {advice}or set CRAM_ARTIFACTS to a directory on a larger disk.")
    if needs.peak > SHOWN:
        log.log(logging.WARNING if needs.peak > TIGHT * free else logging.INFO, sentence)
    return needs.peak
