"""What a run needs to go on where it was: weights, optimizer, and how much is spent."""

import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model import InputError
from model.bert import Bert

log = logging.getLogger(__name__)
CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"


@dataclass
class Spent:
    """Where a run is: all that a checkpoint holds besides weights and optimizer."""

    step: int = 0
    seconds: float = 0.0  # on the clock, held-out evaluation not counted
    tokens: int = 0  # over the corpus's length: sequences read, which are in order
    micro_batch: int = 0  # sequences; kept over a restart: masks and the batch's growth go by it
    evaluations: list[dict] = field(default_factory=list)


def checkpoint(folder: Path, bert: Bert, adamw: torch.optim.Optimizer, spent: Spent) -> None:
    """Put all that is needed to go on into one file, in one step: a crash leaves the old one."""
    tensors = {f"model.{name}": value.contiguous() for name, value in bert.state_dict().items()}
    for index, state in adamw.state_dict()["state"].items():
        tensors |= {f"adamw.{index}.{name}": value.contiguous() for name, value in state.items()}
    half = folder / f"{CHECKPOINT}.half"
    try:
        save_file(tensors, half, metadata={"spent": json.dumps(asdict(spent))})
        with half.open("rb") as file:
            os.fsync(file.fileno())
        half.replace(folder / CHECKPOINT)
    finally:
        half.unlink(missing_ok=True)


def restore(folder: Path, bert: Bert, adamw: torch.optim.Optimizer) -> Spent:
    """Load the checkpoint, if there is one, and take the metrics of later steps back."""
    spent = Spent()
    if (folder / CHECKPOINT).exists():
        try:
            with safe_open(folder / CHECKPOINT, "pt") as file:
                spent = Spent(**json.loads(file.metadata()["spent"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            raise InputError(
                f"{folder / CHECKPOINT} is no checkpoint that can be read ({error}), so the run can't go on from it. "
                "Delete it, or refresh the pretrain stage, to train from the start."
            ) from error
        bert.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")})
        states: dict[int, dict[str, Tensor]] = {}
        for name in (name for name in tensors if name.startswith("adamw.")):
            _, index, part = name.split(".")
            states.setdefault(int(index), {})[part] = tensors[name]
        adamw.load_state_dict({"state": states, "param_groups": adamw.state_dict()["param_groups"]})
        log.info("Going on from step %d, %.0f s into the budget.", spent.step, spent.seconds)
    (folder / METRICS).touch()
    rows = (folder / METRICS).read_bytes().splitlines(keepends=True)[: spent.step]
    os.truncate(folder / METRICS, sum(map(len, rows)))  # in one step: killed here, nothing is lost
    return spent
