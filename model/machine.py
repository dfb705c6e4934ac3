"""What this machine offers to training: device, precision, compiler. None of it enters a key."""

import ctypes
import logging
import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from model import InputError

log = logging.getLogger(__name__)
CPU_MICRO_BATCH = 32  # sequences; beyond it no gain on two cores, and more memory
CUDA_BYTES_PER_SEQUENCE = 80e6  # of the 16x768 model at 128 tokens, bf16; the reference fits 512 in 48 GB


@dataclass(frozen=True)
class Machine:
    """Where to compute, in which precision, whether compiled, and how many sequences a micro-batch holds."""

    device: torch.device
    dtype: torch.dtype  # of matrix products; weights and optimizer stay fp32
    compiles: bool
    micro_batch: int
    compiles_always: bool = False  # told to, also where it does not pay

    def autocast(self) -> AbstractContextManager:
        """Compute in `dtype` where that is safe."""
        if self.dtype is torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def describe(self) -> dict:
        """For the manifest."""
        cuda = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if cuda else f"CPU, {torch.get_num_threads()} threads"
        return {
            "device": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compiled": self.compiles,
            "micro_batch": self.micro_batch,
        }


def _setting(name: str, choices: tuple[str, ...]) -> str:
    value = os.environ.get(name) or "auto"
    if value not in ("auto", *choices):
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(('auto', *choices))}, or unset.")
    return value


def detect() -> Machine:
    """The fastest way this machine has. CRAM_DEVICE, CRAM_DTYPE, CRAM_COMPILE and CRAM_MICRO_BATCH override it."""
    device = _setting("CRAM_DEVICE", ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("CRAM_DEVICE is 'cuda', but torch finds no CUDA device here. Unset it to train on the CPU.")
    cuda = torch.cuda.is_available() and device != "cpu"
    if cuda:
        torch.set_float32_matmul_precision("high")
    dtype = _setting("CRAM_DTYPE", ("bf16", "fp32"))
    fast_bf16 = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else _cpu_has_bf16()
    bf16 = dtype == "bf16" or (dtype == "auto" and fast_bf16)
    compiler = _setting("CRAM_COMPILE", ("0", "1"))
    compiles = compiler != "0" and (cuda or shutil.which(os.environ.get("CXX", "g++")) is not None)
    if compiler == "1" and not compiles:
        raise InputError(
            "CRAM_COMPILE is '1', but there is no C++ compiler (CXX, or g++) here. Install one, or unset it."
        )
    if not compiles:
        log.info("torch.compile is not used: %s.", "CRAM_COMPILE=0" if compiler == "0" else "there is no C++ compiler")
    asked = os.environ.get("CRAM_MICRO_BATCH", "")
    if asked and not (asked.isdecimal() and int(asked) > 0):
        raise InputError(f"CRAM_MICRO_BATCH is {asked!r}; expected a positive whole number of sequences, or unset.")
    micro_batch = int(asked) if asked else (_cuda_micro_batch() if cuda else CPU_MICRO_BATCH)
    return Machine(
        torch.device("cuda" if cuda else "cpu"),
        torch.bfloat16 if bf16 else torch.float32,
        compiles,
        micro_batch,
        compiles_always=compiler == "1",
    )


def _cuda_micro_batch() -> int:
    fits = int(torch.cuda.mem_get_info()[0] / CUDA_BYTES_PER_SEQUENCE)
    return max(16, min(1024, 2 ** (fits.bit_length() - 1) if fits else 16))  # a power of two


def _cpu_has_bf16() -> bool:
    """Whether bf16 matrix products are in hardware: emulated ones are slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def keep_heap() -> None:
    """Have glibc keep freed blocks: giving them back and faulting them in again costs 9 to 47 % of a step on CPU."""
    try:
        libc = ctypes.CDLL("libc.so.6")
        m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
        libc.mallopt(m_trim_threshold, -1)  # as size_t: never
        libc.mallopt(m_mmap_max, 0)  # no blocks of their own, so none to unmap
    except (OSError, AttributeError):
        log.info("This C library has no mallopt; training on the CPU is somewhat slower for it.")
