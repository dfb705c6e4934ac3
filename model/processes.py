"""Several processes that train one model, each with its share of every batch; or one alone."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among `count`. What they agree on goes over the host, so that no GPU waits for it."""

    rank: int = 0
    count: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def agree(self, value: float) -> float:
        """What the first process has as `value`, an int or a float."""
        if self.count == 1:
            return value
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, src=0, group=self.control)
        return type(value)(told.item())

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values

    def wait(self) -> None:
        """Until all processes are here."""
        if self.count > 1:
            dist.barrier(group=self.control)


ALONE = Processes()


def join(device: torch.device) -> Processes:
    """This process's place among those that torchrun started."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Processes(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), dist.new_group(backend="gloo"))
