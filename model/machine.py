"""What this machine offers to training: device, precision, compiler, processes. None of it enters a key."""

import ctypes
import functools
import logging
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from model.environment import choice, whole_number
from model.errors import InputError
from model.limits import cores
from model.wording import counted

log = logging.getLogger(__name__)
CPU_MICRO_BATCH = 32  # sequences; beyond it no gain on two cores, and more memory
CUDA_MICRO_BATCH = 1024  # sequences to begin with, where the memory decides
# Largest side of the matrices whose product gives the machine's peak rate, how often it is timed, and how long it may
# take: CPUs emulate precisions that they lack at a hundredth of the usual rate, half a minute for the largest side.
MATRIX_SIDE = {"cpu": 2048, "cuda": 8192}
MATRIX_REPEATS = 5
MATRIX_SECONDS = 1.0
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Machine:
    """Where and in which precision to compute, whether to compile, and how many sequences a micro-batch holds."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; weights and optimizer stay fp32
    compiles: bool
    micro_batch: int  # sequences, at most
    compiles_always: bool = False  # CRAM_COMPILE=1: also where compiling takes longer than it saves
    probes: bool = False  # whether the free memory decides how large a micro-batch is, up to `micro_batch`

    @property
    def records(self) -> bool:
        """Whether finetuning records its steps, to launch the kernels of each together (`graphs`)."""
        return self.device.type == "cuda" and self.compiles

    def autocast(self) -> AbstractContextManager:
        """Compute in `dtype` where that is safe."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def device_name(self) -> str:
        """The GPU's name, or the number of the CPU's threads."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {counted(torch.get_num_threads(), 'thread')}"

    def describe(self) -> dict:
        """For the manifest."""
        return {"device": self.device_name(), "dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class Processes:
    """This process among `count`. The processes agree through the host's memory, so that no GPU waits."""

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

    def most(self, value: float) -> float:
        """The largest `value` of all processes, ints or floats."""
        if self.count == 1:
            return value
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        return type(value)(largest.item())

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


def detect() -> Machine:
    """The fastest settings for this machine. CRAM_DEVICE, CRAM_DTYPE, CRAM_COMPILE and CRAM_MICRO_BATCH override it."""
    limit_threads()
    device = choice("CRAM_DEVICE", ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("CRAM_DEVICE is 'cuda', but torch finds no CUDA device here. Unset it to train on the CPU.")
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        torch.set_float32_matmul_precision("high")
    dtype = choice("CRAM_DTYPE", tuple(DTYPES))
    if dtype == "auto":
        dtype = fastest_dtype(cuda)
    compiler = choice("CRAM_COMPILE", ("0", "1"))
    compiles = can_compile(compiler, cuda)
    micro_batch = whole_number("CRAM_MICRO_BATCH", "a size that fits")
    usual_micro_batch = CUDA_MICRO_BATCH if cuda else CPU_MICRO_BATCH
    name = "cpu"
    if cuda:
        rank = os.environ.get("LOCAL_RANK", 0)
        name = f"cuda:{rank}"
    return Machine(
        torch.device(name),
        DTYPES[dtype],
        compiles,
        micro_batch=micro_batch or usual_micro_batch,
        compiles_always=compiler == "1",
        probes=cuda and micro_batch is None,
    )


@contextmanager
def exact_products() -> Iterator[None]:
    """Without TF32, which rounds the factors of fp32 products to 10 bits. `detect` allows it, as it is fast."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fastest_dtype(cuda: bool) -> str:
    """The fastest of DTYPES for matrix products on the GPU, or else on the CPU."""
    if cuda:
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if cpu_has_bf16() else "fp32"


def can_compile(compiler: str, cuda: bool) -> bool:
    """Whether torch.compile is to be used. `compiler`: the value of CRAM_COMPILE."""
    if compiler == "0":
        log.info("torch.compile is not used: CRAM_COMPILE=0.")
        return False
    if cuda or shutil.which(os.environ.get("CXX", "g++")) is not None:
        return True
    if compiler == "1":
        raise InputError(
            "CRAM_COMPILE is '1', but there is no C++ compiler (CXX, or g++) here. Install one, or unset it."
        )
    log.info("torch.compile is not used: there is no C++ compiler.")
    return False


def limit_threads() -> None:
    """Let torch compute and compile with no more threads than this process has cores, unless the user sets a number.

    torch counts the cores that a process may run on, but ignores quotas of CPU time. With more threads than the quota
    pays for, the kernel would stop all of them for most of the time.
    """
    most = cores()
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > most:
        torch.set_num_threads(most)
    if most < len(os.sched_getaffinity(0)):
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(most))  # processes, of which it would have as many


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy to the device, without waiting for the work that is queued there."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def gpus(here: Machine) -> int:
    """The number of processes to train with: CRAM_GPUS, or one. Each has its own GPU, or all share the CPU."""
    count = whole_number("CRAM_GPUS", "one") or 1
    if here.device.type == "cuda" and count > torch.cuda.device_count():
        raise InputError(
            f"CRAM_GPUS is {count}, but torch finds {torch.cuda.device_count()} GPUs here. Lower it, or unset it to "
            "use one."
        )
    return count


def product_seconds(side: int, repeats: int, device: torch.device, dtype: torch.dtype) -> float:
    """The median time of a product of two square matrices, after one product for warm-up."""
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    seconds = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        (a @ b)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of large matrix products, a median: MFU is relative to it."""
    largest = MATRIX_SIDE[device.type]
    side = largest // 8
    while side < largest and 8 * product_seconds(side, 1, device, dtype) <= MATRIX_SECONDS:
        side *= 2
    return 2 * side**3 / product_seconds(side, MATRIX_REPEATS, device, dtype)


def cpu_has_bf16() -> bool:
    """Whether the CPU computes bf16 matrix products in hardware: emulated ones are slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def keep_heap() -> None:
    """Make glibc keep freed blocks: returning them and faulting them in again costs 9 to 47 % of a step on a CPU."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold = -1  # these two numbers are in malloc.h
        m_mmap_max = -4
        libc.mallopt(m_trim_threshold, -1)  # as size_t: never
        libc.mallopt(m_mmap_max, 0)  # no block is mapped alone, so none is unmapped
    except (OSError, AttributeError):
        log.info("This C library has no mallopt, so training on the CPU is somewhat slower.")
