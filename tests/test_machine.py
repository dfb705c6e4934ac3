import logging
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from model import InputError, bert, machine, memory
from model.batches import Batches
from model.heldout import Heldout
from model.masking import Corpus
from model.settings import Architecture, Training

SETTINGS = ("CRAM_DEVICE", "CRAM_DTYPE", "CRAM_COMPILE", "CRAM_MICRO_BATCH")
CPU, VOCABULARY, LENGTH = torch.device("cpu"), 50, 16
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
COMPILE_SECONDS = 240  # some 40 on a quiet machine


@pytest.fixture(autouse=True)
def bare(monkeypatch) -> None:
    """A machine without a GPU, a compiler and bf16, on which nothing is set."""
    for name in (*SETTINGS, "CXX", "CRAM_GPUS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: False)


CPU_MACHINE = {"device": CPU, "dtype": torch.float32, "compiles": False, "micro_batch": machine.CPU_MICRO_BATCH}


@pytest.mark.parametrize(
    ("hardware", "environment", "expected"),
    [
        ("bare", {}, {}),
        ("bare", dict.fromkeys(SETTINGS[:3], "auto"), {}),
        ("bare", dict.fromkeys(SETTINGS, ""), {}),
        ("full", {}, {"dtype": torch.bfloat16, "compiles": True}),
        ("full", dict(zip(SETTINGS, ("cpu", "fp32", "0", "7"), strict=True)), {"micro_batch": 7}),
        (
            "compiler",
            dict(zip(SETTINGS, ("cpu", "bf16", "1", "1"), strict=True)),
            {"dtype": torch.bfloat16, "compiles": True, "micro_batch": 1, "compiles_always": True},
        ),
    ],
)
def test_a_cpu_is_used_as_it_is_unless_the_environment_overrides_it(
    monkeypatch, caplog, hardware, environment, expected
):
    caplog.set_level(logging.INFO)
    if hardware != "bare":
        monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: hardware == "full")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    here = machine.detect()
    assert here == machine.Machine(**CPU_MACHINE | expected)
    assert ("torch.compile is not used" in caplog.text) != here.compiles


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx2", False)])
def test_bf16_is_used_where_the_processor_has_it(monkeypatch, flags, fast):
    monkeypatch.undo()
    monkeypatch.setattr(machine.Path, "read_text", lambda self: f"processor : 0\nflags : fpu sse {flags} avx\n")
    assert machine.cpu_has_bf16() is fast


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CRAM_DEVICE", "tpu"),
        ("CRAM_DEVICE", "cuda"),
        ("CRAM_DTYPE", "fp8"),
        ("CRAM_COMPILE", "yes"),
        ("CRAM_COMPILE", "1"),
        *(("CRAM_MICRO_BATCH", value) for value in ("0", "1.5", "²", "auto")),
    ],
)
def test_a_setting_that_is_wrong_or_impossible_here_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{name} is '{value}'"):
        machine.detect()


@pytest.fixture
def gpu(monkeypatch):
    """A machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda kind: None)


@pytest.mark.parametrize(
    ("environment", "emulated", "expected"),
    [
        ({}, False, {}),
        ({}, True, {"dtype": torch.float16}),
        ({"CRAM_MICRO_BATCH": "24"}, False, {"micro_batch": 24, "probes": False}),
        ({"LOCAL_RANK": "1"}, False, {"device": torch.device("cuda:1")}),
    ],
)
def test_a_gpu_is_used_compiled_and_its_memory_probed(gpu, monkeypatch, environment, emulated, expected):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or not emulated
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    usual = {"device": torch.device("cuda:0"), "dtype": torch.bfloat16, "compiles": True, "probes": True}
    usual["micro_batch"] = machine.CUDA_MICRO_BATCH
    assert machine.detect() == machine.Machine(**usual | expected)


@pytest.mark.parametrize(
    ("asked", "device", "count"),
    [("", "auto", 1), ("1", "auto", 1), ("2", "auto", 2), ("7", "cpu", 7), ("3", "auto", None), ("0", "auto", None)],
)
def test_as_many_gpus_as_asked_for_train_and_processes_without_gpus_share_the_cpu(
    gpu, monkeypatch, asked, device, count
):
    monkeypatch.setenv("CRAM_GPUS", asked)
    monkeypatch.setenv("CRAM_DEVICE", device)
    with nullcontext() if count else pytest.raises(InputError, match="CRAM_GPUS"):
        assert machine.gpus(machine.detect()) == count


def test_the_rate_of_matrix_products_is_that_of_the_median_and_measured_once(monkeypatch):
    times = iter([0, 100, 100, 104, 104, 105, 105, 107, 107, 110, 110, 118])  # a start, then 4, 1, 2, 3 and 8 s
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 30)
    machine.matrix_rate.cache_clear()
    try:
        assert [machine.matrix_rate(CPU, torch.float32) for _ in range(2)] == [2 * 30**3 / 3] * 2
    finally:
        machine.matrix_rate.cache_clear()


def masked(seed: int) -> tuple[torch.Tensor, ...]:
    """Eight sequences to train on."""
    rows = np.random.default_rng(seed).integers(5, VOCABULARY, (8, LENGTH)).astype(np.uint16)
    return Batches(Corpus(rows, Heldout.of_rows(rows), VOCABULARY, 4, 5), 8, seed, CPU).make(0, 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision_gives_nearly_the_loss_of_fp32(dtype, tolerance):
    model = bert.Bert(Architecture(layers=2, hidden=32, heads=2, intermediate=96), VOCABULARY, LENGTH)
    losses = []
    for kind in (torch.float32, dtype):
        with machine.Machine(CPU, kind, False, 1).autocast():
            loss = model(*masked(0))
        assert loss.dtype is torch.float32
        losses.append(loss.item())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)


def check_compiled(backend: str, positions: str, gradients: bool) -> None:
    """Loss and gradients of the model, compiled as training compiles it, are those without compiling."""
    architecture = Architecture(layers=1, hidden=32, heads=2, intermediate=96, positions=positions)
    model = bert.Bert(architecture, VOCABULARY, LENGTH)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    with torch.set_grad_enabled(gradients):
        for seed in range(2):
            losses = [forward(*masked(seed)) for forward in (model, compiled)]
            assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-4)
            if gradients:
                pairs = zip(*(torch.autograd.grad(loss, [*model.parameters()]) for loss in losses), strict=True)
                for one, other in pairs:
                    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch's own imports
@pytest.mark.parametrize("positions", ["scaled-sinusoidal", "rotary"])
def test_the_model_is_one_static_graph(positions):
    torch.compiler.reset()
    check_compiled("aot_eager", positions, gradients=True)


COMPILED = """
import sys
sys.path.insert(0, sys.argv[1])
from test_machine import check_compiled
check_compiled("inductor", "scaled-sinusoidal", gradients=True)
check_compiled("inductor", "rotary", gradients=False)  # as each of its kernels takes a second or more
"""


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_the_compiled_models_have_the_same_losses_and_gradients(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", COMPILED, str(Path(__file__).parent)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"compiling takes more than {COMPILE_SECONDS} s here")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.rglob("*.so"))  # something was compiled


def test_the_memory_that_can_be_had_is_what_the_kernel_says(monkeypatch, tmp_path):
    whole = machine.available_memory()
    assert 1 << 26 < whole < 1 << 50
    limit, used, stat = (tmp_path / f"memory.{name}" for name in ("max", "current", "stat"))
    monkeypatch.setattr(machine, "CGROUPS", ((str(limit), str(used), str(stat)),))
    limit.write_text("5000000\n")
    used.write_text("2000000\n")
    stat.write_text("anon 999\nfile 600\nshmem 200\nactive_file 100\ninactive_file 300\nactive_anon 7\n")
    assert machine.available_memory() == 3_000_400
    limit.write_text("max\n")
    assert machine.available_memory() > 3_000_000


GIANT = Architecture(layers=128, hidden=65_536, heads=1024, intermediate=196_608)


def test_a_model_that_no_memory_holds_is_refused_before_it_is_made(monkeypatch):
    here = machine.Machine(CPU, torch.float32, False, 1)
    with pytest.raises(InputError, match=r"layers 128, hidden 65536.* 1\d\d,\d{3},\d{3},\d{3},\d{3} bytes"):
        memory.check_memory(GIANT, Training(), 32_768, 128, here)
    weights, states = memory.sizes(Architecture(), Training(), 32_768, 128)
    assert states == 2 * weights == 8 * sum(p.numel() for p in bert.Bert(Architecture(), 32_768, 128).parameters())
    for processes, needed in ((1, 7 * weights), (2, 11 * weights)):  # with gradients, and the copy for a checkpoint
        monkeypatch.setattr(memory, "available_memory", lambda there=needed: there)
        memory.check_memory(Architecture(), Training(), 32_768, 128, here, processes)
        monkeypatch.setattr(memory, "available_memory", lambda there=needed: there - 1)
        with pytest.raises(InputError, match=f"{needed:,} bytes .* {needed - 1:,} bytes"):
            memory.check_memory(Architecture(), Training(), 32_768, 128, here, processes)


def test_a_model_that_the_gpu_does_not_hold_is_refused(gpu, monkeypatch):
    weights, _ = memory.sizes(Architecture(), Training(), 32_768, 128)
    monkeypatch.setattr(machine.Machine, "device_name", lambda self: "Toy GPU")
    for there, fits in ((4 * weights, True), (4 * weights - 1, False)):
        monkeypatch.setattr(machine.Machine, "device_memory", lambda self, there=there: there)
        with nullcontext() if fits else pytest.raises(InputError, match="Toy GPU has"):
            memory.check_memory(Architecture(), Training(), 32_768, 128, machine.detect())
