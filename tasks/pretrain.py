"""Pretrain: masked language modelling from scratch, within a budget.

Reads   sequences, held-out sequences and tokenizer of a tokenize artifact.
Writes  model.safetensors, config.json, tokenizer.json, tokenizer_config.json   the model, complete in itself, as transformers
                                       reads it where it has such a model
        README.md                      the model card
        metrics.parquet (a row a step), loss.png
        heldout.npy, heldout.parquet   what the held-out loss was measured on, so that it can be measured again
        lineage.json                   the manifests of all that led here
"""

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.json
import pyarrow.parquet as pq
from pydantic import Field

from model import InputError
from model.settings import Architecture, Training
from tasks import plots, vocabulary
from tasks.progress import Progress
from tasks.stage import WORK, Artifact, Params, environment, read_manifest, stage
from tasks.tokens import HELDOUT, HELDOUT_TEXT, SEQUENCES

if TYPE_CHECKING:
    from model.distributed import Job

log = logging.getLogger(__name__)
HELDOUT_SEQUENCES = 512  # the first so many are evaluated: 9,728 predictions at 128 tokens
LINEAGE = "lineage.json"
CARD = "README.md"
JOB, TOLD = "job.json", "processes.log"  # what several processes are told, and what they say
POLL_SECONDS = 1.0  # between looks at the progress of several processes


class Pretrain(Params, Training, frozen=True, extra="forbid", allow_inf_nan=False):
    """The model, and how it is trained."""

    architecture: Architecture = Field(Architecture(), description="Sizes of the encoder.")

    def check(self) -> None:
        """Look at this machine, and what is told of it, before a model is discarded for a new one."""
        from model import machine, pretraining

        pretraining.share_of(self.batch_size, machine.gpus(machine.detect()))


def lineage(artifact: Artifact) -> dict[str, dict]:
    """The manifests of the artifact and of all its inputs, first to last; those not on this machine are left out."""
    found: dict[str, dict] = {}
    about = read_manifest(artifact)
    if about is None:
        log.warning("%s is not on this machine; the report will miss it.", artifact.name)
        return found
    for given in about["inputs"].values():
        for name in given if isinstance(given, list) else [given]:
            stage_name, key = name.split("/")
            found |= lineage(Artifact(stage=stage_name, key=key))
    return found | {artifact.name: {k: v for k, v in about.items() if k != "files"}}


def with_gpus(job: "Job", count: int, work: Path, report: Callable[[float, str], None]) -> None:
    """Train with several processes, which torchrun starts, until their run is over; their checkpoint is left in `work`."""
    from model.checkpoint import last_row, line
    from model.distributed import PROBLEM

    (work / JOB).write_text(job.model_dump_json())
    (work / PROBLEM).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    with (work / TOLD).open("w") as told:
        process = subprocess.Popen([*command, "-m", "model.distributed", str(work / JOB)], stdout=told, stderr=told)
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if row := last_row(work):
                report(row["fraction"], line(row))
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on, and they write a checkpoint
            process.wait()
    if (work / PROBLEM).exists():
        raise InputError(json.loads((work / PROBLEM).read_text()))
    if process.returncode:
        raise RuntimeError(f"One of {count} processes ended with an error:\n{(work / TOLD).read_text()}")


@stage(version=3, resumes=True, varies=True)
def pretrain(params: Pretrain, tokens: Artifact, out: Path) -> dict:
    """Train until the budget is spent, going on from the checkpoint of a killed attempt where there is one."""
    from model import checkpoint, distributed, export, machine, pretraining  # torch: not for every command line
    from tasks.card import card  # which shows what a report shows, which reads what is made here

    work = out / WORK  # checkpoint and metrics, kept until all is published
    work.mkdir(exist_ok=True)
    job = distributed.Job(
        architecture=params.architecture,
        training=Training(**params.model_dump(exclude={"architecture"})),
        sequences=tokens.path / SEQUENCES,
        heldout=tokens.path / HELDOUT,
        heldout_sequences=HELDOUT_SEQUENCES,
        vocabulary=tokens.stats["entries"],
        mask_id=vocabulary.MASK,
        specials=len(vocabulary.SPECIALS),
        folder=work,
    )
    here, shown = machine.detect(), 0.0
    gpus = machine.gpus(here)
    with Progress("pretrain", total=1.0, unit="of the budget") as bar:

        def report(fraction: float, note: str) -> None:
            nonlocal shown
            bar.update(min(1.0, fraction) - shown, note)
            shown = min(1.0, fraction)

        if gpus > 1:
            with_gpus(job, gpus, work, report)
        run = job.run(here)  # after several processes: from where they ended
        spent = run.run(report)
    model, corpus = run.bert, run.corpus
    export.save(model, out)
    np.save(out / HELDOUT, corpus.heldout)
    for file in (*vocabulary.FILES, HELDOUT_TEXT):
        shutil.copyfile(tokens.path / file, out / file)
    led_here = lineage(tokens)
    (out / LINEAGE).write_text(json.dumps(led_here, indent=2) + "\n")
    metrics = pyarrow.json.read_json(work / checkpoint.METRICS)
    pq.write_table(metrics, out / "metrics.parquet")
    rows = {name: metrics[name].to_numpy() for name in metrics.column_names}
    characters = tokens.stats["heldout"]
    per_character = characters["tokens"] / max(1, characters["characters"])
    evaluations = [
        e | {"heldout_nats_per_character": round(e["heldout_loss"] * per_character, 6)} for e in spent.evaluations
    ]
    plots.loss_curve(rows, evaluations, out / "loss.png")
    stats = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": spent.step,
        "tokens": spent.tokens,
        "epochs": round(spent.tokens / corpus.sequences.size, 4),
        "exaflops": spent.operations / 1e18,
        "seconds_on_the_clock": round(spent.seconds, 3),
        "tokens_per_second": round(spent.tokens / spent.seconds, 1),
        "mfu": round(float(np.median(rows["mfu"])), 4),
        "training_loss": round(float(rows["loss"][-max(1, len(rows["loss"]) // 20) :].mean()), 4),
        "heldout_loss": round(evaluations[-1]["heldout_loss"], 6),
        "heldout_nats_per_character": evaluations[-1]["heldout_nats_per_character"],
        "heldout_predictions": len(corpus.heldout) * round(pretraining.HELDOUT_MASKS * corpus.length),
        "skipped": spent.skipped,
        "evaluations": evaluations,
        "machine": here.describe()
        | {
            "gpus": gpus,
            "micro_batch": spent.micro_batch,
            "compiled": run.compiles() if gpus > 1 else run.forward is not model,
        },
    }
    about = {"stage": "pretrain", "params": params.identity(), "stats": stats, "environment": environment()}
    (out / CARD).write_text(card(about, led_here))
    return stats


def measure_heldout(pretrained: Artifact) -> float:
    """The held-out loss of a pretrained artifact, measured again from the files in it alone."""
    from model import export, machine, masking, pretraining

    model, here = export.load(pretrained.path), machine.detect()
    heldout = np.load(pretrained.path / HELDOUT)
    tokenizer = vocabulary.load(pretrained.path)
    corpus = masking.Corpus(
        heldout, heldout, tokenizer.get_vocab_size(), tokenizer.token_to_id("[MASK]"), len(vocabulary.SPECIALS)
    )
    return pretraining.heldout_loss(model.to(here.device), corpus, here)
