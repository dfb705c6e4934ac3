"""The disk that a run needs: measured shares of its text, and its models."""

import functools
import logging
import shutil
from collections import Counter

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

# bytes of text in a byte of a file, and in a document (of other sources: that of the Pile)
EXPANDS = {".zst": 4, ".gz": 3, ".bz2": 4.5, ".xz": 4.5, ".lz4": 2.5, ".zip": 3, ".parquet": 2.5}
DOCUMENT, OTHERS = {"books": 400_000, "wikipedia": 3_200, "c4": 2_200}, 5_700
ALL = {"books": 12e9, "wikipedia": 21e9, "python-docs": 1e9}  # bytes of text in the smaller sources, at most
# bytes for a byte of text, as measured (docs/log/2026-11.md): of parts, of tokens, of scratch beside the parts
PARTS, TOKENS, TOKENS_OF_UNICODE = 0.38, 0.45, 0.65  # an ideograph has three bytes, and its token two
SCRATCH = {"minhash": 0.7, "substring": 2.5}
MODELS = ("pretrain", "finetune")  # stages whose disk does not depend on the text
SHOWN, TIGHT = 1e9, 0.8  # bytes from which the need is logged; the share of what is free that is warned of
log = logging.getLogger(__name__)


def text_of(params: Download) -> float:
    """The bytes of text that a download reads at most: what its limits allow, and what its source holds if known."""
    weights = params.weights
    documents = sum(share / DOCUMENT.get(name, OTHERS) for name, share in weights.items())
    limits = {1e6 * params.megabytes, params.documents * sum(weights.values()) / documents}
    if weights.keys() <= ALL.keys():
        limits.add(sum(map(ALL.__getitem__, weights)))
    if weights.keys() == {"files"}:
        files = local.local_files(params.files, params.extract)[0].values()
        limits.add(sum(path.stat().st_size * EXPANDS.get(path.suffix.lower(), 1) for path in files))
    return min(filter(None, limits), default=0)


@functools.cache  # a folder with many files takes seconds to list
def text_read(step: Step) -> float:
    """The bytes of text that a step without inputs reads, at most."""
    return text_of(step.params) if isinstance(step.params, Download) else 0


def text_for(plan: Plan, step: Step) -> float:
    """The bytes of text that a step reads: by the size of the parts if they are there, or else of the source."""
    if not step.inputs:
        return text_read(step)
    if isinstance(given := step.inputs[0], list):  # of a stage that isn't ours
        return sum(text_for(plan, each) for each in given)
    made = read_manifest(plan.arguments(step)[1])
    return text_in(made) if made else text_for(plan, given)


def text_in(corpus: dict) -> float:
    """The bytes of text in an artifact with this manifest, by the sizes of its parts, which need not be there."""
    return sum(file["bytes"] for file in corpus["files"] if is_part(file["path"])) / PARTS


def behind(step: Step, stage: str) -> Step | None:
    """The step of this stage that a step needs, or that it is."""
    return step if step.stage == stage else next(filter(None, (behind(each, stage) for each in step.upstream)), None)


def of_models(plan: Plan, step: Step) -> tuple[float, float]:
    """`need` of a step that makes a model."""
    from model import machine, memory, pretraining  # load torch

    steps = [behind(step, stage) for stage in ("pretrain", "tokenize", "vocabulary")]
    if not all(steps):
        return 0, 0
    bert, tokens, words = (found.params for found in steps if found)
    weights, states = memory.sizes(bert.architecture, bert, words.entries, tokens.length)
    if step.stage == "pretrain":
        kept = pretraining.EVALUATIONS if machine.keeps_tenths() else 1
        return kept * weights, 2 * (weights + states)  # a checkpoint stays until the next is complete
    there = adopt.weight_bytes(plan.arguments(step)[1])  # of a model that was made before, or was given
    return (there or weights) * step.params.keep, 0


def need(plan: Plan, step: Step) -> tuple[float, float]:
    """The bytes that a step leaves on the disk, and those of its scratch beside them."""
    stage, params = step.stage, step.params
    if stage in MODELS:
        return of_models(plan, step)
    if stage not in ("download", "deduplicate", "decontaminate", "filter", "tokenize"):
        return 0, 0
    text = text_for(plan, step)
    if stage == "tokenize":
        words, width = step.inputs[1].params, 2 << (step.inputs[1].params.entries > 1 << 16)
        every = text * width / 2 * (TOKENS if words.characters == "ascii" else TOKENS_OF_UNICODE)
        return min(every, width * params.length * params.max_sequences), every
    methods = params.methods if stage == "deduplicate" else [stage]
    scratch = max((SCRATCH.get(method, 0) + PARTS * (i > 0) for i, method in enumerate(methods)), default=0)
    linked = not methods or (stage == "decontaminate" and params.data == "probes")
    return text * PARTS * (not linked), text * scratch


def freed(plan: Plan, step: Step) -> int:
    """The bytes of an artifact that is discarded before its step runs anew, without parts that others have too."""
    files = (path.stat() for path in plan.made[step].path.glob("*") if step in plan.anew)
    return sum(about.st_size for about in files if about.st_nlink == 1)


@disk_errors_as_input_errors("This run")
def check(plan: Plan) -> float:
    """The bytes of disk that the steps which have to run need at a time. Raises InputError if less is free."""
    steps = [step for step in plan.made if not plan.is_blocked(step) and not plan.is_made(step)]
    stays, peak, fixed, gone, drafts = Counter(), 0.0, 0.0, 0, {draft_of(plan.made[step]).name for step in steps}
    for step in steps:
        artifact, scratch = need(plan, step)
        gone += freed(plan, step)
        peak = max(peak, stays.total() + artifact + scratch - gone)
        stays[step.stage] += artifact
        fixed += (artifact + scratch) * (step.stage in MODELS)
    peak -= sum(draft.bytes for draft in locks.drafts("") if draft.name in drafts)  # a rerun goes on from them
    free = shutil.disk_usage(next(path for path in (home.root(), *home.root().parents) if path.exists())).free
    stages = ", ".join(f"{stage} {decimal(int(size))}" for stage, size in stays.items() if size)
    sizes = f"{decimal(int(peak))} of disk ({stages}; the rest is scratch), and {decimal(free)} are free"
    said = f"This run needs about {sizes} in {home.root()}."
    if peak > free:
        corpora = sum(step.stage == "download" for step in steps)  # a study may read several
        text = stays["download"] / PARTS / max(1, corpora)
        less = int((TIGHT * free - fixed) / peak * text / 1e6)
        limit = f"""read less text (--override '{{"download": {{"megabytes": {less}}}}}'), """ if less > 0 else ""
        raise InputError(f"{said} Free some, {limit}or set CRAM_ARTIFACTS to a directory on a larger disk.")
    if peak > SHOWN:
        log.log(logging.WARNING if peak > TIGHT * free else logging.INFO, said)
    return peak
