"""One of several processes that train one model, as torchrun starts them: python -m model.distributed JOB.json

The job names the corpus's files and says what to train. The first process leaves checkpoint and metrics in the folder,
from where the run that started them goes on.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist
from pydantic import BaseModel

from model import InputError, machine, processes
from model.bert import Bert
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import Architecture, Training

PROBLEM = "problem.json"  # what ended the run, for whoever started it


class Job(BaseModel, frozen=True, extra="forbid"):
    """What to train on what. Paths are of .npy files and of the folder for checkpoint and metrics."""

    architecture: Architecture
    training: Training
    sequences: Path
    heldout: Path
    heldout_sequences: int
    vocabulary: int
    mask_id: int
    specials: int
    folder: Path

    def corpus(self) -> Corpus:
        """The sequences, mapped into memory."""
        return Corpus(
            sequences=np.load(self.sequences, mmap_mode="r"),
            heldout=np.load(self.heldout)[: self.heldout_sequences],
            vocabulary=self.vocabulary,
            mask_id=self.mask_id,
            specials=self.specials,
        )

    def run(self, here: machine.Machine, among: processes.Processes = processes.ALONE) -> Pretraining:
        """The run, with the model at its start or as the checkpoint has it."""
        corpus = self.corpus()
        bert = Bert(self.architecture, self.vocabulary, corpus.length, seed=self.training.seed)
        return Pretraining(bert, self.training, corpus, here, self.folder, among)


def main() -> None:
    """Train as one of several processes. SIGTERM, which torchrun sends to all, ends the run with a checkpoint."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_text())
    here = machine.detect()
    among = processes.join(here.device)
    logging.basicConfig(level=logging.INFO if among.first else logging.ERROR, format="%(message)s")
    try:
        run = job.run(here, among)

        def stop(*_: object) -> None:
            run.stopping = True

        signal.signal(signal.SIGTERM, stop)
        run.run(lambda fraction, note: None)
        among.wait()  # or the first to end closes connections that others still read from
    except InputError as problem:
        if among.first:
            (job.folder / PROBLEM).write_text(json.dumps(str(problem)))
        raise SystemExit(2) from problem
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive its groups, and one that wants Python's lock while it ends aborts the process
