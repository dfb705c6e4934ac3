"""One of several processes that train one model: python -m model.distributed JOB.json FOLDER

The job names the corpus's files and says what to train. The first process leaves checkpoint and metrics in the job's
folder, from where the run that started them goes on. The processes find each other through a file in FOLDER, which only
their user may enter.
"""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
from pydantic import BaseModel

from model import InputError, machine, memory, processes
from model.bert import Bert
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import Architecture, Training

PROBLEM = "problem.json"  # what ended the run, for the process that started it
MEETING = "meeting"  # the file through which the processes find each other
STOP_SECONDS = 300  # in which a stopped run writes its checkpoint


class Job(BaseModel, frozen=True, extra="forbid"):
    """What to train on what. Paths are of .npy files and of the folder for checkpoint and metrics."""

    architecture: Architecture
    training: Training
    sequences: Path
    heldout: Path
    heldout_documents: Path
    vocabulary: int
    mask_id: int
    specials: int
    folder: Path

    def corpus(self) -> Corpus:
        """The sequences, mapped into memory."""
        return Corpus(
            sequences=np.load(self.sequences, mmap_mode="r"),
            heldout=Heldout(np.load(self.heldout), np.load(self.heldout_documents)),
            vocabulary=self.vocabulary,
            mask_id=self.mask_id,
            specials=self.specials,
        )

    def run(self, here: machine.Machine, among: processes.Processes = processes.ALONE) -> Pretraining:
        """The run, with the model at its start or as the checkpoint has it."""
        corpus = self.corpus()
        sizes = self.architecture, self.training, self.vocabulary, corpus.length
        memory.check_memory(*sizes, here)
        bert = Bert(self.architecture, self.vocabulary, corpus.length, seed=self.training.seed)
        return Pretraining(bert, self.training, corpus, here, self.folder, among)


def stop_with_parent(runs: list[Pretraining]) -> None:
    """End this process when the one that started it, and holds its stdin open, is gone.

    A run in `runs` writes a checkpoint first. If `runs` is empty, training has not begun and nothing is lost.
    """
    while os.read(0, 1):
        pass
    if runs:
        runs[0].stopping = True
        time.sleep(STOP_SECONDS)
    os._exit(1)  # the main thread may be waiting for a process that is gone too


def main() -> None:
    """Train as one of several processes. SIGTERM, which their parent sends to all, ends the run with a checkpoint."""
    job, folder = Job.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    runs: list[Pretraining] = []  # holds this process's run once its model is built
    threading.Thread(target=stop_with_parent, args=(runs,), daemon=True).start()
    here = machine.detect()
    among = processes.join(here.device, folder / MEETING)
    logging.basicConfig(level=logging.INFO if among.first else logging.ERROR, format="%(message)s")
    try:
        run = job.run(here, among)

        def stop(*_: object) -> None:
            run.stopping = True

        signal.signal(signal.SIGTERM, stop)
        runs.append(run)
        run.run(lambda fraction, note: None)
        among.wait()  # or the first to end closes connections that others still read from
    except InputError as problem:
        own = folder / f"{PROBLEM}.{among.rank}"
        own.write_text(json.dumps(str(problem)))
        own.replace(folder / PROBLEM)
        raise SystemExit(2) from problem
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive its groups, and one that wants Python's lock while it ends aborts the process
