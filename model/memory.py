"""The memory that training a model needs, computed before any of it is allocated."""

import torch

from model import InputError
from model.bert import Bert
from model.detection import with_detector
from model.machine import Machine, available_memory
from model.settings import Architecture, Training

FP32 = 4  # bytes of a weight, of its gradient and of each number that an optimizer keeps


def sizes(architecture: Architecture, training: Training, vocabulary: int, length: int) -> tuple[int, int]:
    """Bytes of the weights and of the optimizer's states; Adafactor's means of rows and columns are not counted."""
    with torch.device("meta"):  # shapes only
        model = with_detector(Bert(architecture, vocabulary, length), training)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.ndim == 2)
    states = {
        "adafactor": 0,
        "sgd": parameters if training.momentum else 0,
        "muon": 2 * parameters - matrices,  # one number per weight of the blocks' matrices
    }
    return FP32 * parameters, FP32 * states.get(training.optimizer, 2 * parameters)


def check_memory(
    architecture: Architecture, training: Training, vocabulary: int, length: int, machine: Machine, processes: int = 1
) -> None:
    """Raise InputError if the machine can't hold weights, gradients, optimizer states and the copy for a checkpoint.

    Activations are not counted: they depend on the micro-batch, which is chosen to fit.
    """
    weights, states = sizes(architecture, training, vocabulary, length)
    trained, checkpoint = 2 * weights + states, weights + states
    cuda = machine.device.type == "cuda"
    needs = {machine.device_name(): (trained, machine.device_memory())} if cuda else {}
    needs["this machine"] = processes * (weights if cuda else trained) + checkpoint, available_memory()
    for where, (needed, there) in needs.items():
        if needed > there:
            given = ", ".join(f"{name} {getattr(architecture, name)}" for name in ("layers", "hidden", "intermediate"))
            raise InputError(
                f"Training pretrain.architecture ({given}) with pretrain.optimizer {training.optimizer!r} needs at "
                f"least {needed:,} bytes of memory for weights, gradients and optimizer states, but {where} has "
                f"{there:,} bytes available. Lower pretrain.architecture.layers, hidden or intermediate."
            )
