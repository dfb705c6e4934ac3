"""Models that pretraining keeps beside the last one, for those who study it: at tenths of its budget, and by tokens."""

import shutil
from pathlib import Path

from model import export, files
from model.bert import Bert
from model.environment import choice
from model.files import TOKENS
from model.settings import Training

FASTEST = 1e6  # tokens that a GPU reads in a second at most, to estimate the disk that a run needs


def keeps_tenths() -> bool:
    """Whether pretraining keeps the model at each tenth of its budget, too (CRAM_KEEP_TENTHS)."""
    return choice("CRAM_KEEP_TENTHS", ("0", "1")) == "1"


def keeps_tokens() -> bool:
    """Whether pretraining keeps the model before its first step and at 1, 2, 4 … million tokens (CRAM_KEEP_TOKENS)."""
    return choice("CRAM_KEEP_TOKENS", ("0", "1")) == "1"


def millions_reached(tokens: int) -> int:
    """The largest of 0, 1, 2, 4, 8 … million tokens that so many tokens reach, in millions."""
    millions = tokens // files.MILLION
    return 1 << (millions.bit_length() - 1) if millions else 0


def most_by_tokens(training: Training, parameters: int) -> int:
    """How many models a run keeps by tokens at most, the one before its first step included.

    A budget in epochs has to be given in tokens (`Training.in_tokens`).
    """
    tokens = {
        "tokens": training.budget,
        "hours": 3600 * training.budget * FASTEST,
        "flops": training.budget / (2 * parameters),  # each parameter costs more, but for the rows of the embedding
    }
    millions = int(tokens[training.budget_unit] / files.MILLION)
    return 1 + millions.bit_length()


def save(bert: Bert, folder: Path, kind: str, number: int) -> None:
    """Write a model into the folder of a run. `kind`: TENTHS or TOKENS; `number`: percent, or millions."""
    kept = folder / kind / str(number)
    kept.mkdir(parents=True, exist_ok=True)
    export.save(bert, kept)


def drop_later(folder: Path, tokens: int) -> None:
    """Drop the models that an attempt kept after its last checkpoint, at which training continues after so many tokens.

    Some may be half-written, and the steps from there on need not come out the same again.
    """
    for kept in (folder / TOKENS).glob("*"):
        if int(kept.name) * files.MILLION > tokens:
            shutil.rmtree(kept)
