"""Pretrain: masked language modelling, from scratch or from a model (`tasks/adopt.py`), within a budget.

Reads   sequences, held-out sequences and tokenizer of a tokenize artifact.
Writes  model.safetensors, config.json, tokenizer.json, tokenizer_config.json   the complete model, for transformers too
        README.md                       the model card
        metrics.parquet, loss.png       a row per step, and its plot
        heldout.npz, heldout.parquet    the held-out text, so that the loss can be measured again
        frequencies.npy                 how often each token is in a sample of the training text: (V,)
        lineage.json                    the manifests of all artifacts that led here
        start-lineage.json              if it began from a model: the manifests of those that led to it
        tenths/10 … tenths/90           with CRAM_KEEP_TENTHS=1: the model at each tenth of the budget
        tokens/0, tokens/1, tokens/2, tokens/4 …   with CRAM_KEEP_TOKENS=1: the model at so many million tokens
"""

import json
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq
from pydantic import Field

from model.clock import about_pauses, about_stops
from model.errors import InputError
from model.files import KEPT
from model.settings import Architecture, Specials, Training
from model.wording import budget, counted
from tasks import adopt
from tasks.reports import losses, plots
from tasks.reports.model_card import card
from tasks.stage import Params, environment, stage
from tasks.store.artifacts import FREQUENCIES, HELDOUT_TEXT, LINEAGE, SEQUENCES, WORK, Artifact, artifacts_of
from tasks.store.lineage import lineage, lineage_of
from tasks.text.holdout import digest_of, measured_texts
from tasks.text.sequences import length_of
from tasks.text.tokenizer import copy_files, heldout_of, load_tokenizer, specials_of
from tasks.workers.progress import Progress
from tasks.workers.tracking import trackers

if TYPE_CHECKING:
    from model.bert import Bert
    from model.distributed import Job
    from model.machine import Machine
    from model.pretraining import Pretraining

log = logging.getLogger(__name__)
CARD = "README.md"
SHOWN_FORMATS = 5
SAMPLED_TOKENS = 4_000_000  # of the training text, for the frequencies of its tokens


class Pretrain(Params, Training, frozen=True, extra="forbid", allow_inf_nan=False):
    """The model, and how it is trained."""

    architecture: Architecture = Field(Architecture(), description="Sizes of the encoder.")
    start: str = Field(
        "",
        description="A model to start from, with its vocabulary: pretrain/KEY, a key, `latest`, a folder, or "
        "OWNER/NAME of the hub. Empty: none, as the rules demand.",
    )
    later = ("start",)

    def identity(self) -> dict:
        """What enters the key: a model to start from by the digest of its weights."""
        identity = super().identity()
        if self.start:
            identity["start"] = adopt.digest_of_files(self.start, adopt.WEIGHTS)
        return identity

    def training(self) -> Training:
        """The settings of the training loop alone."""
        return Training(**{name: getattr(self, name) for name in Training.model_fields})

    def check(self) -> None:
        """Check that this machine can train the model, before an old model is discarded."""
        from model import kept, machine, memory

        if not self.budget and not self.start:
            raise InputError(
                "pretrain.budget is 0, which takes a model as it is, but pretrain.start names none. Name a model, or "
                "set a budget."
            )
        here = machine.detect()
        kept.keeps_tenths()
        kept.keeps_tokens()
        count = machine.gpus(here)
        memory.share_of(self, count)
        shortest = 2**self.architecture.funnel  # the real vocabulary and length, not yet known, need more
        memory.check_memory(self.architecture, self, vocabulary=1, length=shortest, machine=here, processes=count)


def train(job: "Job", out: Path, report: Callable[[float, str], None]) -> dict:
    """Train until the budget is spent, from the job's checkpoint if there is one; write the model and its metrics.

    Returns the statistics. `out` has the held-out text and the frequencies already.
    """
    from model import distributed, export, heldout, machine  # here, as they load torch

    here = machine.detect()
    gpus = machine.gpus(here)
    if gpus > 1:
        distributed.launch(job, gpus, report)
    run = job.pretraining(here)  # resumes where several processes ended
    run.run(report)
    export.save(run.bert, out)
    for kind in KEPT:
        kept = job.folder / kind
        if kept.exists():
            kept.rename(out / kind)
    steps = save_metrics(job.folder, out)
    began = time.monotonic()
    held = measure_heldout(out, run.bert, here, heldout.most_characters(run.in_tokens))
    pauses = about_pauses(run.spent.seconds, run.clock.off, time.monotonic() - began)
    if pauses:
        log.info(pauses)
    stats = statistics(run, steps, held, here.describe() | {"gpus": gpus})
    if steps:
        plots.loss_curve(steps, stats["evaluations"], held["by_frequencies"]["nats_per_token"], out / "loss.png")
        warn_of_doubts(job, stats)
    return stats


def warn_of_doubts(job: "Job", stats: dict) -> None:
    """Log what casts doubt on the result of a training."""
    settings = job.training.model_dump() | {"architecture": job.architecture.model_dump()}
    for doubt in (*losses.doubts(stats, settings), about_stops(stats)):
        if doubt:
            log.warning(doubt)


def save_metrics(work: Path, out: Path) -> dict[str, np.ndarray]:
    """Write the metrics of the steps as a table; returns its columns, by name. Without steps it has no columns."""
    from model import checkpoint

    path = work / checkpoint.METRICS
    metrics = pyarrow.json.read_json(path) if path.stat().st_size else pa.table({})
    pq.write_table(metrics, out / "metrics.parquet")
    return {name: metrics[name].to_numpy() for name in metrics.column_names}


def count_tokens(sequences: np.ndarray, entries: int, specials: Specials) -> np.ndarray:
    """How often each token is in sequences that are spread evenly over the training text: (entries,) int64.

    Zero for special tokens, which are never predicted.
    """
    every = max(1, sequences.size // SAMPLED_TOKENS)
    counts = np.bincount(sequences[::every].ravel(), minlength=entries)
    counts[list(specials)] = 0
    return counts


def statistics(run: "Pretraining", steps: dict[str, np.ndarray], held: dict, machine: dict) -> dict:
    """The statistics of a model in stage.json. `steps`: the columns of metrics; `machine`: its description."""
    spent = run.spent
    last_loss = None
    mfu = 0.0
    if steps:
        last_losses = steps["loss"][-max(1, len(steps["loss"]) // 20) :]
        last_loss = round(float(last_losses.mean()), 4)
        mfu = round(float(np.median(steps["mfu"])), 4)
    how = {
        "micro_batch": spent.micro_batch,
        "compiled": spent.compilations > 0,
        "compilations": spent.compilations,
        "compile_seconds": round(spent.compile_seconds, 3),
    }
    return {
        "parameters": sum(p.numel() for p in run.bert.parameters()),
        "steps": spent.step,
        "tokens": spent.tokens,
        "epochs": round(spent.tokens / run.corpus.sequences.size, 4),
        "exaflops": spent.operations / 1e18,
        "seconds_on_the_clock": round(spent.seconds, 3),
        "stopped_seconds": round(spent.stopped_seconds, 3),
        "tokens_per_second": round(spent.tokens / max(spent.seconds, 1e-9), 1),
        "mfu": mfu,
        "training_loss": last_loss,
        "heldout_loss": spent.evaluations[-1]["heldout_loss"],
        "heldout": held,
        "evaluations": spent.evaluations,
        "machine": machine | how,
    }


def describe_text(manifests: dict[str, dict]) -> str:
    """What the text is, in a line: formats, columns and documents, the share of characters that is read, and tokens."""
    stats = {manifest["stage"]: manifest["stats"] for manifest in manifests.values()}
    facts = []
    read = stats.get("download")
    if read:
        facts.append(counted(read["documents"], "document") + describe_formats(read.get("formats", {})))
    removed = stats.get("measure", {}).get("removed")
    if removed:
        facts.append(f"the vocabulary reads {1 - removed['share']:.1%} of the characters")
    tokens = stats["tokenize"]
    held = tokens["heldout"]["characters"]
    share = held / max(1, held + tokens["characters"])
    facts.append(f"{counted(tokens['tokens'], 'token')} to train on, {share:.2%} of the text held out")
    return "; ".join(facts)


def words_of(manifests: dict[str, dict]) -> int | None:
    """The words between white space that were downloaded; None if they were not counted.

    The training text has at most as many, since later stages drop some.
    """
    found = [about["stats"].get("words") for about in manifests.values() if about["stage"] == "download"]
    if not found or None in found:
        return None
    return sum(found)


def describe_formats(formats: dict[str, list[str]]) -> str:
    """The formats and columns that documents were read from, in brackets; empty if none is known."""
    names = [" ".join(filter(None, (form, column))) for form, columns in formats.items() for column in columns]
    if not names:
        return ""
    if len(names) > SHOWN_FORMATS:
        names = [*names[:SHOWN_FORMATS], "…"]
    return f" ({', '.join(names)})"


def open_start(params: Pretrain, tokens: Artifact, out: Path) -> Artifact | None:
    """The model that a run starts from, with its lineage written into `out`; None if the run starts from scratch."""
    if not params.start:
        return None
    first = adopt.find_model(params.start)
    adopt.check_start(params.start, params.architecture, length_of(tokens.path))
    if load_tokenizer(first.path).to_str() != load_tokenizer(tokens.path).to_str():
        raise InputError(f"{tokens.name} was not made with the tokenizer of {first.name} (pretrain.start).")
    before = json.dumps(lineage_of(first), indent=2)
    (out / adopt.START_LINEAGE).write_text(before + "\n", encoding="utf-8")
    log.info("Training starts from %s, outside the paper's rules; optimizer and schedule are new.", first.name)
    return first


def mention_same_but_budget(params: Pretrain, tokens: Artifact) -> None:
    """Log the newest model that differs from the one to be trained in budget alone: training could start from it."""
    wanted = params.identity()
    for other in reversed(artifacts_of("pretrain")):
        about = other.manifest
        its = about["params"]
        limits = {name: wanted[name] for name in ("budget", "budget_unit")}
        if about["inputs"] == {"tokens": tokens.name} and its != wanted and its | limits == wanted:
            log.info(
                "%s has the same settings but a budget of %s. This training starts from scratch. To start from that "
                "model: --set pretrain.start=%s",
                other.name,
                budget(its["budget"], its["budget_unit"]),
                other.name,
            )
            return


@stage(version=10, resumes=True, varies=True)
def pretrain(params: Pretrain, tokens: Artifact, out: Path) -> dict:
    """Train until the budget is spent, continuing from the checkpoint of a killed attempt if there is one."""
    work = out / WORK  # checkpoint and metrics, kept until the artifact is published
    work.mkdir(exist_ok=True)
    first = open_start(params, tokens, out)
    if not first and not any(work.iterdir()):
        mention_same_but_budget(params, tokens)
    job = job_of(params, tokens, first, work)
    copy_from(tokens, out)
    manifests = lineage(tokens)
    log.info("Text: %s.", describe_text(manifests))
    done = fraction_done(work)
    with trackers(out.name, work, params.identity()), Progress("pretrain", total=1.0, done=done) as bar:
        stats = train(job, out, lambda fraction, note: bar.update(min(1.0, fraction) - bar.count, note))
    words = words_of(manifests)
    if words is not None:
        stats["words"] = words
    if first:
        stats["start"] = {"name": first.name, "tokens": first.stats.get("tokens"), "start": first.stats.get("start")}
    write_card(params, stats, manifests, out)
    return stats


def job_of(params: Pretrain, tokens: Artifact, first: Artifact | None, work: Path) -> "Job":
    """The job in the folder `work`. `first`: the model that it starts from."""
    from model.distributed import Job  # here, as it loads torch

    return Job(
        architecture=params.architecture,
        training=params.training(),
        sequences=tokens.path / SEQUENCES,
        heldout=tokens.path,
        vocabulary=tokens.stats["entries"],
        specials=specials_of(load_tokenizer(tokens.path)),
        folder=work,
        start=first.path if first else None,
    )


def write_card(params: Pretrain, stats: dict, manifests: dict[str, dict], out: Path) -> None:
    """Write the model card, and the manifests of all artifacts that led to the model."""
    (out / LINEAGE).write_text(json.dumps(manifests, indent=2) + "\n", encoding="utf-8")
    about = {
        "stage": "pretrain",
        "params": params.identity(),
        "stats": stats,
        "usual": params.usual(),
        "environment": environment(),
    }
    (out / CARD).write_text(card(about, manifests), encoding="utf-8")


def fraction_done(work: Path) -> float:
    """The fraction of the budget that an interrupted attempt has spent, by its metrics."""
    from model import checkpoint

    with suppress(OSError, ValueError, KeyError):  # resuming names what is damaged
        last = checkpoint.last_row(work)
        return min(1.0, last["fraction"]) if last else 0.0
    return 0.0


def copy_from(tokens: Artifact, out: Path) -> None:
    """Copy the tokenizer and the held-out text beside the model, and count the tokens of the training text."""
    from model import heldout

    copy_files(tokens.path, out)
    for file in (heldout.FILE, HELDOUT_TEXT):
        shutil.copyfile(tokens.path / file, out / file)
    sequences = np.load(tokens.path / SEQUENCES, mmap_mode="r")
    specials = specials_of(load_tokenizer(out))
    np.save(out / FREQUENCIES, count_tokens(sequences, tokens.stats["entries"], specials))


def measure_heldout(folder: Path, model: "Bert", here: "Machine", characters: float) -> dict:
    """The held-out loss of a model on the measured documents in a pretrain artifact, or at most that many characters.

    The `summary` of model.heldout, and the digest of what was measured. If that is only the beginnings of documents,
    `of_documents`, `of_characters` and `of_digest` are those of all that a long run would be measured on.
    """
    from model import heldout

    texts = measured_texts(folder)
    documents = heldout.Heldout.load(folder)
    tokenizer = load_tokenizer(folder)
    read = heldout.beginnings(texts, characters)
    part = {}
    if read != texts:
        documents = heldout_of(read, tokenizer, documents.sequences.shape[1])
        part = {
            "of_documents": len(texts),
            "of_characters": sum(map(len, texts)),
            "of_digest": digest_of(texts),
        }
    log.info("Measuring the held-out loss on %s.", counted(documents.totals["words"], "word"))
    specials = specials_of(tokenizer)
    documents = documents.without(specials.unk)
    nats_D, _ = heldout.document_losses(model.to(here.device), documents, specials.mask, here)
    found = heldout.summary(documents, nats_D, np.load(folder / FREQUENCIES))
    return found | part | {"digest": digest_of(read)}
