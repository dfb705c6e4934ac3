"""A pretraining job: a description that can be written to a file for other processes."""

from pathlib import Path

import numpy as np
from pydantic import BaseModel

from model import machine, memory, processes
from model.bert import Bert
from model.heldout import Heldout
from model.masking import Corpus
from model.pretraining import Pretraining
from model.settings import Architecture, Training


class Job(BaseModel, frozen=True, extra="forbid"):
    """What to train, on which .npy files, and the folder for checkpoint and metrics."""

    architecture: Architecture
    training: Training
    sequences: Path
    heldout: Path  # the folder of the held-out text
    vocabulary: int
    mask_id: int
    specials: int
    folder: Path

    def corpus(self) -> Corpus:
        """The sequences, mapped into memory."""
        return Corpus(
            sequences=np.load(self.sequences, mmap_mode="r"),
            heldout=Heldout.load(self.heldout),
            vocabulary=self.vocabulary,
            mask_id=self.mask_id,
            specials=self.specials,
        )

    def pretraining(self, here: machine.Machine, among: processes.Processes = processes.ALONE) -> Pretraining:
        """The training loop, at its start or at the checkpoint."""
        corpus = self.corpus()
        sizes = self.architecture, self.training, self.vocabulary, corpus.length
        memory.check_memory(*sizes, here)
        bert = Bert(self.architecture, self.vocabulary, corpus.length, seed=self.training.seed)
        return Pretraining(bert, self.training, corpus, here, self.folder, among)
