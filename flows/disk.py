"""The disk that a run needs: measured shares of its text, and its models."""

import logging
import shutil
from collections import Counter

from rich.filesize import decimal

from flows.plan import Plan, Step
from model import InputError
from tasks import store
from tasks.corpus import local
from tasks.corpus.parts import parts_of
from tasks.download import Download

# bytes of text in a byte of a file, and in a document (of other sources: that of the Pile)
EXPANDS = {".zst": 4, ".gz": 3, ".bz2": 4.5, ".xz": 4.5, ".lz4": 2.5, ".zip": 3, ".parquet": 2.5}
DOCUMENT, OTHERS = {"books": 400_000, "wikipedia": 3_200, "c4": 2_200}, 5_700
# bytes for a byte of text, as measured (docs/log/2026-11.md): of parts, of tokens, of scratch beside the parts
PARTS, TOKENS, TOKENS_OF_UNICODE = 0.38, 0.45, 0.65  # an ideograph has three bytes, and its token two
SCRATCH = {"minhash": 0.7, "substring": 2.5}
SHOWN, TIGHT = 1e9, 0.8  # bytes that are told of; the share of what is free that is warned of
log = logging.getLogger(__name__)


def text_of(params: Download) -> float:
    """The bytes of text that a download reads at most: what its limits allow, and what its files hold."""
    limits = {1e6 * params.megabytes, params.documents * max(DOCUMENT.get(name, OTHERS) for name in params.weights)}
    if params.weights.keys() == {"files"}:
        files = local.local_files(params.files, params.extract)[0].values()
        limits.add(sum(path.stat().st_size * EXPANDS.get(path.suffix.lower(), 1) for path in files))
    return min(filter(None, limits), default=0)


def text_for(plan: Plan, step: Step) -> float:
    """The bytes of text that a step reads: by the size of the parts if they are there, or else of the source."""
    if not step.inputs:
        return text_of(step.params) if isinstance(step.params, Download) else 0
    made = store.read_manifest(corpus := plan.arguments(step)[1])
    return sum(part.stat().st_size for part in parts_of(corpus)) / PARTS if made else text_for(plan, step.inputs[0])


def need(plan: Plan, step: Step) -> tuple[float, float]:
    """The bytes that a step leaves on the disk, and those of its scratch beside them."""
    stage, params = step.stage, step.params
    if stage in ("pretrain", "finetune"):
        from model import memory  # loads torch

        bert = step if stage == "pretrain" else step.inputs[0]
        shape = bert.inputs[0].inputs[1].params.entries, bert.inputs[0].params.length
        weights, states = memory.sizes(bert.params.architecture, bert.params, *shape)
        # a checkpoint stays until the next is complete
        return (weights, 2 * (weights + states)) if step is bert else (weights * params.keep, 0)
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


def check(plan: Plan) -> None:
    """Log how much disk is needed by the steps that have to run. Raises InputError if less is free."""
    steps = [step for step in plan.made if not plan.is_blocked(step) and not plan.is_made(step)]
    stays, peak, drafts = Counter(), 0.0, {store.draft_of(plan.made[step]).name for step in steps}
    for step in steps:
        artifact, scratch = need(plan, step)
        peak = max(peak, stays.total() + artifact + scratch)
        stays[step.stage] += artifact
    peak -= sum(draft.bytes for draft in store.drafts("") if draft.name in drafts)  # a rerun goes on from them
    free = shutil.disk_usage(next(path for path in (store.ROOT, *store.ROOT.parents) if path.exists())).free
    stages = ", ".join(f"{stage} {decimal(int(size))}" for stage, size in stays.items() if size)
    sizes = f"{decimal(int(peak))} of disk ({stages}; the rest is scratch), and {decimal(free)} are free"
    said = f"This run needs about {sizes} in {store.ROOT}."
    if peak > free:
        less = int(TIGHT * free / peak * stays["download"] / PARTS / 1e6)
        limit = f"""read less text (--override '{{"download": {{"megabytes": {less}}}}}'), """ if less else ""
        raise InputError(f"{said} Free some, {limit}or set CRAM_ARTIFACTS to a directory on a larger disk.")
    if peak > SHOWN:
        log.log(logging.WARNING if peak > TIGHT * free else logging.INFO, said)
