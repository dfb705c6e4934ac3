"""A model's forward pass in training, compiled or not."""

import torch
from torch import Tensor, nn

from model.bert import Bert
from model.machine import Machine, keep_heap
from model.settings import Training

# Compiling takes 20 to 60 s on CPUs and saves a tenth of a step's time or more there. Beside an H200 it takes up to a
# minute and saves from 28 % (crammed-bert) to 53 % (frontier). So it pays if the compiled code is used for this long.
# For a budget of tokens or operations, that time is estimated at the usual share of the machine's peak rate.
COMPILE_FROM_SECONDS = {"cpu": 600.0, "cuda": 240.0}
USUAL_MFU = {"cpu": 0.6, "cuda": 0.4}


class Forward(nn.Module):
    """A model's forward pass. DistributedDataParallel wraps it, and stays when compiling fails."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.masks: int | None = None  # of a sequence, for which it was prepared last
        self.compiler_failed = False
        self.use(compiled=False)

    def use(self, compiled: bool) -> None:
        """Call the model as it is, or compile it at the next call, for the shapes of that call."""
        self.compiled = compiled
        self.call = self.model.__call__
        if compiled:
            torch.compiler.reset()  # graphs of earlier shapes and runs count towards a limit
            self.call = torch.compile(self.model, fullgraph=True, dynamic=False).__call__  # type: ignore[operator]

    def forward(self, *batch: Tensor) -> Tensor:
        """The model's loss."""
        return self.call(*batch)


def ready_for_training(bert: Bert, training: Training, machine: Machine) -> Bert:
    """The encoder on the machine, with the dropout of these settings and the type of the states between its blocks."""
    if machine.device.type == "cpu":
        keep_heap()
    bert = bert.to(machine.device).train()
    bert.set_dropout(training.dropout)
    if machine.dtype is torch.bfloat16:  # reading and writing the states takes half the time; fp16 would overflow
        bert.trained_in = torch.bfloat16
    return bert
