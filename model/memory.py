"""Memory for training: whether the model fits, and how large a micro-batch may be."""

import functools
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model import schedules
from model.bert import Bert, with_detector
from model.checkpoint import Spent
from model.errors import InputError
from model.limits import available_memory
from model.machine import Machine
from model.masking import Batches, Corpus, masks_per_sequence
from model.settings import Architecture, Training
from model.wording import counted

FP32 = 4  # bytes of a weight, of its gradient and of each number that an optimizer keeps
SPARE_MEMORY = 0.1  # of a GPU's memory, kept free when the size of a micro-batch is chosen
# In the messages of other errors that a full GPU causes, such as those of a library that can't allocate its workspace
FULL = ("out of memory", "ALLOC_FAILED", "STATUS_NOT_INITIALIZED")


class ShapesOnly(TorchFunctionMode):
    """Let modules that are made inside this context have weights without memory or values.

    `torch.device("meta")` also turns the small tables of positions into symbols, which loads torch's compiler: 1 s.
    """

    def __torch_function__(
        self, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result; without values for new weights."""
        kwargs = kwargs or {}
        if function is torch.empty:
            kwargs = kwargs | {"device": "meta"}
        elif getattr(function, "__module__", "") == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


@functools.cache  # every finetuning run needs it
def sizes(architecture: Architecture, training: Training, vocabulary: int, length: int) -> tuple[int, int]:
    """Bytes of the weights and of the optimizer's states; Adafactor's means of rows and columns are not counted."""
    with ShapesOnly():
        model = with_detector(Bert(architecture, vocabulary, length), training)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    states = {
        "adafactor": 0,
        "sgd": parameters,
        "muon": 2 * parameters - matrices,  # one number per weight of the blocks' matrices
    }
    return FP32 * parameters, FP32 * states.get(training.optimizer, 2 * parameters)


def check_memory(
    architecture: Architecture, training: Training, vocabulary: int, length: int, machine: Machine, processes: int = 1
) -> None:
    """Raise InputError if the machine can't hold weights, gradients, optimizer states and the copy for a checkpoint.

    A budget of 0, which trains nothing, needs no gradients and states. Activations are not counted: they depend on the
    micro-batch, which is chosen to fit.
    """
    weights, states = sizes(architecture, training, vocabulary, length)
    trained = 2 * weights + states
    checkpoint = weights + states
    parts = "weights, gradients and optimizer states"
    if not training.budget:
        trained = weights
        checkpoint = weights
        parts = "weights"
    needs: list[tuple[str, int, int]] = []  # where, bytes needed and bytes there
    if machine.device.type == "cuda":
        of_gpu = torch.cuda.get_device_properties(machine.device).total_memory
        needs.append((machine.device_name(), trained, of_gpu))
        needs.append(("this machine", processes * weights + checkpoint, available_memory()))
    else:
        needs.append(("this machine", processes * trained + checkpoint, available_memory()))
    for where, needed, there in needs:
        if needed > there:
            a = architecture
            raise InputError(
                f"Training pretrain.architecture (layers {a.layers}, hidden {a.hidden}, intermediate {a.intermediate}) "
                f"with pretrain.optimizer {training.optimizer!r} needs at least {needed:,} bytes of memory for "
                f"{parts}, but {where} has {there:,} bytes available. Lower pretrain.architecture.layers, hidden or "
                "intermediate."
            )


def used_gib(device: torch.device) -> float:
    """GiB of a GPU's memory that this process has used at most; on a CPU, GiB that it uses."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    _, resident, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return int(resident) * os.sysconf("SC_PAGE_SIZE") / 2**30


def share_of(training: Training, processes: int) -> int:
    """The sequences of each unit of the batch that one process computes. Raises InputError if they differ."""
    unit = schedules.ramp_unit(training)
    if unit % processes:
        raise InputError(
            f"pretrain.batch_size {training.batch_size} can't be shared by {processes} processes: it consists of units "
            f"of {counted(unit, 'sequence')}. Set CRAM_GPUS to a divisor of {unit}."
        )
    return unit // processes


def choose_micro_batch(
    model: nn.Module, training: Training, corpus: Corpus, machine: Machine, spent: Spent, share: int
) -> int:
    """Sequences of the largest micro-batch that divides the share and, where the machine probes, fits into memory.

    Since micro-batches divide the unit, all are equally large and one compiled shape serves every step. A run that
    resumes on the same device keeps its micro-batch if that still fits, so that its sums are rounded alike.
    """
    if machine.device.type == "cuda":  # blocks that an earlier run has left would count as used
        gc.collect()
        torch.cuda.empty_cache()
    most = min(share, machine.micro_batch)
    if machine.probes and spent.device == machine.device_name():
        most = min(most, spent.micro_batch)
    sizes = [size for size in range(1, most + 1) if share % size == 0]
    if machine.probes:
        is_new = not spent.step
        while len(sizes) > 1 and not fits(model, training, corpus, machine, sizes[-1], is_new):
            sizes.pop()
    return sizes[-1]


def fits(model: nn.Module, training: Training, corpus: Corpus, machine: Machine, size: int, new: bool) -> bool:
    """Whether a micro-batch can be computed with memory to spare; `new`: the optimizers have no state yet."""
    fraction = max(training.mask_fraction, training.last_mask_fraction or 0.0)
    masks = masks_per_sequence(fraction, corpus.length)
    try:
        # twice, since all gradients exist while the second micro-batch of a step is computed
        compute(model, training, corpus, machine, size, masks, times=2)
        if machine.device.type != "cuda":
            return True
        free, total = torch.cuda.mem_get_info(machine.device)
        states = 0
        if new:
            states = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        return free > states + SPARE_MEMORY * total
    except torch.OutOfMemoryError:
        return False
    except RuntimeError as error:
        if not any(words in str(error) for words in FULL):
            raise
        return False
    finally:
        if machine.device.type == "cuda":
            torch.cuda.empty_cache()


def compute(
    model: nn.Module, training: Training, corpus: Corpus, machine: Machine, size: int, masks: int, times: int = 1
) -> None:
    """Compute the loss and the gradients of a micro-batch this many times; discard them."""
    batch = Batches(corpus, size, training, machine.device).make(0, masks)
    try:
        for _ in range(times):
            with machine.autocast():
                model(*batch).sum().backward()
    finally:
        model.zero_grad()
