"""Several processes that train one model, each with its share of every batch; or one alone."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Processes:
    """This process among `count`. They agree through the host's memory, so that no GPU waits."""

    rank: int = 0
    count: int = 1
    control: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def agree(self, value: float) -> float:
        """The first process's `value`, an int or a float."""
        if self.count == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, src=0, group=self.control)
        return type(value)(shared.item())

    def least(self, value: int) -> int:
        """The smallest `value` of all processes."""
        if self.count == 1:
            return value
        smallest = torch.tensor([value])
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self.control)
        return int(smallest.item())

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.count > 1:
            dist.all_reduce(values)
            values /= self.count
        return values

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.count > 1:
            dist.barrier(group=self.control)


ALONE = Processes()


def environment(rank: int, count: int) -> dict[str, str]:
    """The environment of process `rank` of `count` on this machine. They connect over the loopback interface only."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    threads = str(max(1, (os.cpu_count() or 1) // count))
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {"OMP_NUM_THREADS": threads} | os.environ | ranks | interfaces


def join(device: torch.device, meeting: Path) -> Processes:
    """Connect this process to the others that were started with `environment`.

    They find each other through the file `meeting`, which must be new and out of reach of other users. A server, such
    as torchrun's, would listen on all interfaces and unpickle what anyone sends.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "nccl" if device.type == "cuda" else "gloo"
    # not by a file:// address, in which torch does not decode escaped characters such as spaces
    store = dist.FileStore(str(meeting), count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    return Processes(rank, count, dist.new_group(backend="gloo"))
