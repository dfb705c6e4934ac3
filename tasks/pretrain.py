"""Pretrain: masked language modelling from scratch, within a budget.

Reads   sequences, held-out sequences and tokenizer of a tokenize artifact.
Writes  model.safetensors, config.json, tokenizer.json, tokenizer_config.json   the model, complete in itself, as transformers
                                       reads it where it has such a model
        README.md                      the model card
        metrics.parquet (a row a step), loss.png
        heldout.npy, heldout_documents.npy, heldout.parquet   what the held-out loss is measured on, so that it can be
                                       measured again
        lineage.json                   the manifests of all that led here
"""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet as pq
from pydantic import Field

from model import InputError
from model.quantities import counted
from model.settings import Architecture, Training
from tasks.reports import plots
from tasks.reports.model_card import card
from tasks.stage import Params, environment, stage
from tasks.store import HELDOUT, HELDOUT_DOCUMENTS, HELDOUT_TEXT, LINEAGE, SEQUENCES, WORK, Artifact, lineage
from tasks.text.tokenizer import FILES, MASK, SPECIALS
from tasks.tokenize import digest_of
from tasks.workers.progress import Progress

if TYPE_CHECKING:
    from model.bert import Bert
    from model.distributed import Job
    from model.machine import Machine

log = logging.getLogger(__name__)
CARD = "README.md"
JOB, TOLD = "job.json", "processes.log"  # what several processes are told, and what they say
POLL_SECONDS = 1.0  # between looks at the progress of several processes
LAST_WORDS_SECONDS = 10.0  # until the other processes are killed when one has ended with an error


class Pretrain(Params, Training, frozen=True, extra="forbid", allow_inf_nan=False):
    """The model, and how it is trained."""

    architecture: Architecture = Field(Architecture(), description="Sizes of the encoder.")

    def check(self) -> None:
        """Look at this machine and its settings before a model is discarded for a new one."""
        from model import machine, memory, pretraining

        here = machine.detect()
        count = machine.gpus(here)
        pretraining.share_of(self, count)
        shortest = 2**self.architecture.funnel  # vocabulary and length are known later, and need more
        memory.check_memory(self.architecture, self, vocabulary=1, length=shortest, machine=here, processes=count)


def with_gpus(job: "Job", count: int, work: Path, report: Callable[[float, str], None]) -> None:
    """Train with `count` processes on this machine until the budget is spent; leaves their checkpoint in `work`."""
    from model import processes
    from model.checkpoint import last_row, line
    from model.distributed import PROBLEM, STOP_SECONDS

    (work / JOB).write_text(job.model_dump_json())
    with tempfile.TemporaryDirectory(prefix="cram-") as folder, (work / TOLD).open("w") as told:
        command = [sys.executable, "-m", "model.distributed", str(work / JOB), folder]
        started: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                about = {"env": processes.environment(rank, count), "stdout": told, "stderr": told}
                # in a session of its own: Ctrl-C reaches this process alone, which stops all of them at the same step
                started.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, **about))
            while None in [process.poll() for process in started]:
                if any(process.returncode for process in started):  # the others would wait for it
                    end(started, LAST_WORDS_SECONDS)
                elif row := last_row(work):
                    report(row["fraction"], line(row))
                time.sleep(POLL_SECONDS)
        finally:
            end(started, STOP_SECONDS)
        if (problem := Path(folder, PROBLEM)).exists():
            raise InputError(json.loads(problem.read_text()))
    if any(process.returncode for process in started):
        raise RuntimeError(f"One of {count} processes ended with an error:\n{(work / TOLD).read_text()}")


def end(processes: list[subprocess.Popen], seconds: float) -> None:
    """Ask processes to stop, which they do with a checkpoint; kill those that are still there after so many seconds."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdin.close()


@stage(version=4, resumes=True, varies=True)
def pretrain(params: Pretrain, tokens: Artifact, out: Path) -> dict:
    """Train until the budget is spent, going on from the checkpoint of a killed attempt where there is one."""
    from model import checkpoint, distributed, export, machine  # torch: not for every command line

    if not (tokens.path / HELDOUT_DOCUMENTS).exists():
        raise InputError(
            f"{tokens.name} was made by an older version of cram: it has no {HELDOUT_DOCUMENTS}. Run its tokenize stage again."
        )
    work = out / WORK  # checkpoint and metrics, kept until all is published
    work.mkdir(exist_ok=True)
    job = distributed.Job(
        architecture=params.architecture,
        training=Training(**params.model_dump(exclude={"architecture"})),
        sequences=tokens.path / SEQUENCES,
        heldout=tokens.path / HELDOUT,
        heldout_documents=tokens.path / HELDOUT_DOCUMENTS,
        vocabulary=tokens.stats["entries"],
        mask_id=MASK,
        specials=len(SPECIALS),
        folder=work,
    )
    here, shown = machine.detect(), 0.0
    gpus = machine.gpus(here)
    with Progress("pretrain", total=1.0) as bar:

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
    for file in (*FILES, HELDOUT, HELDOUT_DOCUMENTS, HELDOUT_TEXT):
        shutil.copyfile(tokens.path / file, out / file)
    led_here = lineage(tokens)
    (out / LINEAGE).write_text(json.dumps(led_here, indent=2) + "\n")
    metrics = pyarrow.json.read_json(work / checkpoint.METRICS)
    pq.write_table(metrics, out / "metrics.parquet")
    rows = {name: metrics[name].to_numpy() for name in metrics.column_names}
    held = measured_on(out, model, here)
    evaluations = [
        e | {f"heldout_nats_per_{unit}": round(e["heldout_loss"] * held["tokens"] / held[f"{unit}s"], 6)
             for unit in ("character", "byte")}
        for e in spent.evaluations
    ]  # fmt: skip
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
        "heldout_loss": held["nats_per_token"]["value"],
        "heldout": held,
        "skipped": spent.skipped,
        "evaluations": evaluations,
        "machine": here.describe()
        | {
            "gpus": gpus,
            "micro_batch": spent.micro_batch,
            "compiled": spent.compilations > 0,
            "compilations": spent.compilations,
            "compile_seconds": round(spent.compile_seconds, 3),
        },
    }
    about = {"stage": "pretrain", "params": params.identity(), "stats": stats}
    about |= {"usual": params.usual(), "environment": environment()}
    (out / CARD).write_text(card(about, led_here))
    return stats


def measured_on(folder: Path, model: "Bert", here: "Machine") -> dict:
    """The loss of a model on all tokens of the measured documents in a folder of the tokenize or pretrain stage.

    Nats per token, character and UTF-8 byte, each with its standard error over documents; counts of documents, tokens,
    characters and bytes; and the digest of the documents.
    """
    from model import heldout

    text = pq.read_table(folder / HELDOUT_TEXT, columns=["text", "measured"])
    text = text.filter(pc.is_valid(text["measured"])).sort_by("measured")["text"]
    given = heldout.Heldout(np.load(folder / HELDOUT), np.load(folder / HELDOUT_DOCUMENTS))
    log.info("Measuring the held-out loss on %s.", counted(given.tokens, "token"))
    nats_D, _ = heldout.measure(model.to(here.device), given, MASK, here)
    return heldout.summary(given, nats_D) | {"digest": digest_of(one.as_py() for one in text)}


def measure_heldout(pretrained: Artifact) -> dict:
    """`heldout` of the statistics of a pretrained artifact, measured again from the files in it alone."""
    from model import export, machine

    return measured_on(pretrained.path, export.load(pretrained.path), machine.detect())
