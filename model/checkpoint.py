"""How a run resumes: its checkpoint and its rows of metrics."""

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from model.errors import InputError, explain_errors
from model.files import fsync
from model.settings import Training

CHECKPOINT = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
SECONDS = (5.0, 600.0)  # between checkpoints: a tenth of the budget, within these bounds
HELDOUT = "heldout.jsonl"  # held-out losses and memory, for trackers that follow a run


@dataclass
class Spent:
    """The progress of a run: all that a checkpoint holds besides weights and optimizers.

    The next sequence follows from the number of tokens; masks and dropout are drawn from its number and the seed. A
    checkpoint is made between two steps, so it has no half-summed gradients.
    """

    step: int = 0
    seconds: float = 0.0  # on the clock, held-out evaluation not counted
    stopped_seconds: float = 0.0  # in which the process stood still; they are off the clock
    tokens: int = 0
    operations: float = 0.0  # floating-point operations for these tokens
    micro_batch: int = 0  # sequences; a run that resumes on the same device keeps it, so that sums are rounded alike
    device: str = ""  # for which that micro-batch was chosen, and the code compiled
    compiled_masks: int = 0  # masks of a sequence, for which the code is compiled; 0: it isn't
    compilations: int = 0  # successful, of the forward and backward pass
    compile_seconds: float = 0.0  # on the clock, failures included
    scaler: dict = field(default_factory=dict)  # state of the scale of fp16 gradients
    evaluations: list[dict] = field(default_factory=list)


def usual_seconds(training: Training) -> float:
    """The seconds between two checkpoints: a tenth of a budget in hours, within SECONDS; or the most."""
    least, most = SECONDS
    if training.budget_unit != "hours":
        return most
    return min(most, max(least, 360 * training.budget))


def write(folder: Path, tensors: dict[str, Tensor], spent: str) -> None:
    """Replace the checkpoint in one step: a crash or a full disk leaves the old one."""
    half = folder / f"{CHECKPOINT}.half"
    try:
        save_file(tensors, half, metadata={"spent": spent})
        for path in (half, folder / METRICS):  # a checkpoint on disk implies the rows of its steps
            fsync(path)
        half.replace(folder / CHECKPOINT)
        fsync(folder)
    finally:
        half.unlink(missing_ok=True)


def tensors_of(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Weights and optimizer states by their names in a checkpoint."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if value is not None:
                    tensors[f"optimizer.{number}.{index}.{name}"] = value
    return tensors


def weights_in(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights among the tensors of a checkpoint, by their names in the model."""
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}


def states_in(tensors: dict[str, Tensor], number: int) -> dict[int, dict[str, Tensor]]:
    """The states of the optimizer of that number, by the index of the parameter and the name of the state."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(f"optimizer.{number}."):
            _, _, index, part = name.split(".")
            states.setdefault(int(index), {})[part] = value
    return states


# what reading a checkpoint raises if it is damaged or of another model
DAMAGE = (OSError, SafetensorError, TypeError, KeyError, ValueError, RuntimeError)


class Writer:
    """Writes checkpoints during training, one at a time: copies the tensors, then writes the copies on its own thread.

    A failed write raises its error in the next call of `save`, `check` or `wait`. The copies take as much memory as a
    checkpoint takes on disk and are reused for the next one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.copies: dict[str, Tensor] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None

    def save(self, model: nn.Module, optimizers: list[torch.optim.Optimizer], spent: Spent) -> None:
        """Copy the state of a run and start writing it. Waits for the previous write to end."""
        self.wait()
        before = self.copies
        self.copies = {}
        for name, value in tensors_of(model, optimizers).items():
            copy = before.get(name)
            if copy is None:
                copy = torch.empty_like(value, device="cpu", memory_format=torch.contiguous_format)
            self.copies[name] = copy.copy_(value)
        self.writing = self.thread.submit(write, self.folder, self.copies, json.dumps(asdict(spent)))

    def check(self) -> None:
        """Raise the error of the last write if it has failed; doesn't wait for it."""
        if self.writing and self.writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk. Raises the error of writing it."""
        writing = self.writing
        self.writing = None
        if writing:
            writing.result()

    def close(self) -> None:
        """End the thread once the last checkpoint is written, and free the copies."""
        self.thread.shutdown()
        self.copies.clear()


def restore(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], scaler: torch.amp.GradScaler
) -> Spent | None:
    """Load the checkpoint, if there is one. Raises InputError if it can't be read or belongs to another model."""
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    with damage_as_input_error(path):
        with safe_open(path, "pt") as file:
            spent = Spent(**json.loads(file.metadata()["spent"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
        model.load_state_dict(weights_in(tensors))
        for number, optimizer in enumerate(optimizers):
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": states_in(tensors, number), "param_groups": groups})
        if spent.scaler:  # empty unless the run computed in fp16
            scaler.load_state_dict(spent.scaler)
    return spent


def saved_step(folder: Path) -> int:
    """The step of the checkpoint, 0 if there is none. Raises InputError if it can't be read."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    with damage_as_input_error(path), safe_open(path, "pt") as file:
        return json.loads(file.metadata()["spent"])["step"]


def damage_as_input_error(path: Path) -> AbstractContextManager[None]:
    """Turn the errors of reading the checkpoint `path` into InputError: it is damaged or of another model."""

    def explain(error: BaseException) -> InputError | None:
        if not isinstance(error, DAMAGE):
            return None
        why = " ".join(str(error).split())
        return InputError(
            f"{path} is damaged or belongs to another model ({why}), so the run can't resume from it. Delete it, or "
            "refresh the pretrain stage, to train from the start."
        )

    return explain_errors(explain)


def cut_metrics(folder: Path, steps: int) -> None:
    """Keep the metrics and held-out losses of the first `steps` steps only."""
    metrics = folder / METRICS
    metrics.touch()
    rows = metrics.read_bytes().splitlines(keepends=True)[:steps]
    os.truncate(metrics, sum(map(len, rows)))  # in one step, so that a kill loses nothing

    heldout = folder / HELDOUT
    heldout.touch()
    rows = heldout.read_bytes().splitlines(keepends=True)
    try:
        rows = [row for row in rows if row.endswith(b"\n") and json.loads(row)["step"] <= steps]
    except (ValueError, TypeError, KeyError):  # after a crash of the machine, and not needed to train
        rows = []
    os.truncate(heldout, sum(map(len, rows)))


def progress_note(row: dict) -> str:
    """The note of a step in a progress bar."""
    return f"loss {row['loss']:.3f}, {row['tokens_per_second']:,.0f} tokens/s"


def last_row(folder: Path) -> dict | None:
    """The last complete row of the metrics that another process is writing, if there is one."""
    path = folder / METRICS
    rows = path.read_bytes().split(b"\n") if path.exists() else []
    return json.loads(rows[-2]) if len(rows) > 1 else None
