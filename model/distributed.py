"""A training job, and the processes that do it on several GPUs, each `python -m model.distributed JOB.json FOLDER`.

The first process writes checkpoint and metrics to the job's folder. The run that started the processes continues from
there. They find each other through a file in FOLDER, which only their user may enter.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel

from model import export, limits, machine, memory
from model.bert import Bert
from model.checkpoint import last_row, progress_note
from model.environment import print_anything
from model.errors import InputError
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import SPECIALS, Architecture, Specials, Training

log = logging.getLogger(__name__)
PROBLEM = "problem.json"  # the user error that ended the run, for the process that started it
MEETING = "meeting"  # the file through which the processes find each other
JOB = "job.json"
OUTPUT = "processes.log"  # of all processes
STOP_SECONDS = 300  # for a stopped run to write its checkpoint
POLL_SECONDS = 1.0  # between two looks at the progress
ERROR_SECONDS = 10.0  # after one process ended with an error, until the others are killed


class Job(BaseModel, frozen=True, extra="forbid"):
    """What to train, on which .npy files, and the folder for checkpoint and metrics."""

    architecture: Architecture
    training: Training
    sequences: Path
    heldout: Path  # the folder of the held-out text
    vocabulary: int
    folder: Path
    specials: Specials = SPECIALS  # ids of the vocabulary
    # the folder of a model of the same architecture and vocabulary, whose weights to begin from
    start: Path | None = None

    def pretraining(self, here: machine.Machine, among: machine.Processes = machine.ALONE) -> Pretraining:
        """The training loop, at its start or at the checkpoint. The sequences are mapped into memory."""
        sequences = np.load(self.sequences, mmap_mode="r")
        held = Heldout.load(self.heldout).without(self.specials.unk)
        corpus = Corpus(sequences, held, self.vocabulary, self.specials)
        memory.check_memory(self.architecture, self.training, self.vocabulary, corpus.length, here)
        bert = Bert(self.architecture, self.vocabulary, corpus.length, self.training.seed, self.specials)
        if self.start:
            first = export.load(self.start)
            bert.embedding.second = first.embedding.second
            weights = first.state_dict()
            positions = weights.get(export.POSITIONS)
            if positions is not None:  # of sequences that may have been longer
                weights[export.POSITIONS] = positions[: corpus.length]
            bert.load_state_dict(weights)
        return Pretraining(bert, self.training, corpus, here, self.folder, among)


def process_environment(rank: int, count: int) -> dict[str, str]:
    """The environment of process `rank` of `count` on this machine. They connect over the loopback interface only."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    threads = str(max(1, limits.cores() // count))
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {"OMP_NUM_THREADS": threads} | os.environ | ranks | interfaces


def join(device: torch.device, meeting: Path) -> machine.Processes:
    """Connect this process to the others that were started with `process_environment`.

    They find each other through the file `meeting`, which must be new and out of reach of other users. A server, such
    as torchrun's, would listen on all interfaces and unpickle what anyone sends.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank = int(os.environ["RANK"])
    count = int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    # not by a file:// address, in which torch does not decode escaped characters such as spaces
    store = dist.FileStore(str(meeting), count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    return machine.Processes(rank, count, dist.new_group(backend="gloo"))


def launch(job: Job, count: int, report: Callable[[float, str], None]) -> None:
    """Train with `count` processes on this machine until the budget is spent, with a checkpoint in the job's folder."""
    work = job.folder
    (work / JOB).write_text(job.model_dump_json(), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="cram-") as folder, (work / OUTPUT).open("w", encoding="utf-8") as output:
        started: list[subprocess.Popen] = []
        try:
            for rank in range(count):
                started.append(start(work / JOB, folder, output, process_environment(rank, count)))
            wait(started, work, report)
        finally:
            end(started, STOP_SECONDS)
            repeat_warnings(work / OUTPUT)
        problem = Path(folder, PROBLEM)
        if problem.exists():
            raise InputError(json.loads(problem.read_text(encoding="utf-8")))
    if any(process.returncode for process in started):
        printed = (work / OUTPUT).read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"One of {count} processes ended with an error:\n{printed}")


def repeat_warnings(output: Path) -> None:
    """Log the warnings among what the processes printed; without this, nobody would see them."""
    for line in output.read_text(encoding="utf-8", errors="replace").splitlines():
        level, _, message = line.partition(" ")
        if level == "WARNING":
            log.warning("%s", message)


def start(job: Path, folder: str, output: TextIO, variables: dict[str, str]) -> subprocess.Popen:
    """Start one of the processes of a job, in this environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "model.distributed", str(job), folder],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C reaches the parent only, which stops all at the same step
    )


def wait(processes: list[subprocess.Popen], work: Path, report: Callable[[float, str], None]) -> None:
    """Report progress until all processes have ended. If one ends with an error, the others are stopped."""
    while None in [process.poll() for process in processes]:
        if any(process.returncode for process in processes):  # the others would wait for it
            end(processes, ERROR_SECONDS)
        else:
            row = last_row(work)
            if row:
                report(row["fraction"], progress_note(row))
        time.sleep(POLL_SECONDS)


def end(processes: list[subprocess.Popen], seconds: float) -> None:
    """Stop the processes, which write a checkpoint; kill those that still run after this many seconds."""
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
        if process.stdin:
            process.stdin.close()


def stop_with_parent() -> None:
    """Stop this process when its parent is gone, which holds its stdin open. Training ends with a checkpoint."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(1)  # the main thread may wait for a process that is gone too


def main() -> None:
    """Train as one of several processes. SIGTERM, which the parent sends to all, ends the run with a checkpoint."""
    _, file, meeting = sys.argv
    job = Job.model_validate_json(Path(file).read_text(encoding="utf-8"))
    folder = Path(meeting)
    print_anything()
    threading.Thread(target=stop_with_parent, daemon=True).start()
    here = machine.detect()
    among = join(here.device, folder / MEETING)
    level = logging.INFO if among.first else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(message)s")  # for `repeat_warnings`
    try:
        job.pretraining(here, among).run(lambda fraction, note: None)
        among.wait()  # the first to end would close connections that others still read from
    except InputError as problem:
        own = folder / f"{PROBLEM}.{among.rank}"
        own.write_text(json.dumps(str(problem)), encoding="utf-8")
        own.replace(folder / PROBLEM)
        raise SystemExit(2) from problem
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive its groups; one that takes Python's lock during a normal exit aborts
