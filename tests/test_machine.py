import json
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


def test_a_bare_machine_computes_in_fp32_on_the_cpu_and_says_that_it_cannot_compile(caplog):
    caplog.set_level(logging.INFO)
    assert machine.detect() == machine.Machine(torch.device("cpu"), torch.float32, False, machine.CPU_MICRO_BATCH)
    assert "torch.compile is not used: there is no C++ compiler." in caplog.text


def test_what_the_machine_has_is_used(monkeypatch):
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    here = machine.detect()
    assert here.dtype is torch.bfloat16
    assert here.compiles
    assert not here.compiles_always


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx2", False)])
def test_bf16_is_used_where_the_processor_has_it(monkeypatch, flags, fast):
    monkeypatch.undo()
    monkeypatch.setattr(machine.Path, "read_text", lambda self: f"processor : 0\nflags : fpu sse {flags} avx\n")
    assert machine.cpu_has_bf16() is fast


def test_the_environment_overrides_what_the_machine_has(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, value in zip(SETTINGS, ("cpu", "fp32", "0", "7"), strict=True):
        monkeypatch.setenv(name, value)
    assert machine.detect() == machine.Machine(torch.device("cpu"), torch.float32, False, 7)
    assert "torch.compile is not used: CRAM_COMPILE=0." in caplog.text


def test_the_environment_asks_for_more_than_is_fast(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    for name, value in zip(SETTINGS, ("cpu", "bf16", "1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    assert machine.detect() == machine.Machine(torch.device("cpu"), torch.bfloat16, True, 1, compiles_always=True)


@pytest.mark.parametrize("value", ["", "auto"])
def test_empty_and_auto_are_as_unset(monkeypatch, value):
    unset = machine.detect()
    for name in SETTINGS:
        monkeypatch.setenv(name, "" if name == "CRAM_MICRO_BATCH" else value)
    assert machine.detect() == unset


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("CRAM_DEVICE", "tpu", "CRAM_DEVICE is 'tpu'; expected one of auto, cpu, cuda, or unset"),
        ("CRAM_DEVICE", "cuda", "CRAM_DEVICE is 'cuda', but torch finds no CUDA device here"),
        ("CRAM_DTYPE", "fp8", "CRAM_DTYPE is 'fp8'; expected one of auto, bf16, fp16, fp32, or unset"),
        ("CRAM_COMPILE", "yes", "CRAM_COMPILE is 'yes'; expected one of auto, 0, 1, or unset"),
        ("CRAM_COMPILE", "1", r"CRAM_COMPILE is '1', but there is no C\+\+ compiler"),
        *(
            ("CRAM_MICRO_BATCH", value, f"CRAM_MICRO_BATCH is '{value}'; expected a positive whole number")
            for value in ("0", "-3", "1.5", "many", "²", "auto")
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_a_sentence(monkeypatch, name, value, sentence):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=sentence):
        machine.detect()


@pytest.fixture
def gpu(monkeypatch):
    """A machine with two GPUs; what it is asked for is kept from torch itself."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda kind: None)


def test_a_gpu_is_used_compiled_and_its_memory_probed(gpu):
    there = torch.device("cuda:0")
    expected = machine.Machine(there, torch.bfloat16, True, machine.CUDA_MICRO_BATCH, probes=True)
    assert machine.detect() == expected


def test_a_gpu_that_emulates_bf16_computes_in_fp16(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    assert machine.detect().dtype is torch.float16


def test_a_micro_batch_that_is_told_is_not_probed(gpu, monkeypatch):
    monkeypatch.setenv("CRAM_MICRO_BATCH", "24")
    here = machine.detect()
    assert (here.micro_batch, here.probes) == (24, False)


def test_each_process_has_the_gpu_of_its_rank(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert machine.detect().device == torch.device("cuda:1")


@pytest.mark.parametrize(("asked", "count"), [("", 1), ("1", 1), ("2", 2)])
def test_as_many_gpus_as_are_asked_for_train(gpu, monkeypatch, asked, count):
    monkeypatch.setenv("CRAM_GPUS", asked)
    assert machine.gpus(machine.detect()) == count


def test_processes_without_gpus_share_the_cpu(gpu, monkeypatch):
    monkeypatch.setenv("CRAM_GPUS", "7")
    monkeypatch.setenv("CRAM_DEVICE", "cpu")
    assert machine.gpus(machine.detect()) == 7


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("3", "CRAM_GPUS is 3, but torch finds 2 here. Lower it, or unset it for one"),
        *(
            (value, f"CRAM_GPUS is '{value}'; expected a positive whole number")
            for value in ("0", "-1", "1.5", "all", "²")
        ),
    ],
)
def test_gpus_that_cannot_be_are_refused_in_a_sentence(gpu, monkeypatch, value, sentence):
    monkeypatch.setenv("CRAM_GPUS", value)
    with pytest.raises(InputError, match=sentence):
        machine.gpus(machine.detect())


def test_the_rate_of_matrix_products_is_that_of_the_median_and_measured_once(monkeypatch):
    times = iter([0, 100, 100, 104, 104, 105, 105, 107, 107, 110, 110, 118])  # a start, then 4, 1, 2, 3 and 8 s
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 30)
    machine.matrix_rate.cache_clear()
    try:
        assert [machine.matrix_rate(CPU, torch.float32) for _ in range(2)] == [2 * 30**3 / 3] * 2
    finally:
        machine.matrix_rate.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rate_is_positive_in_every_precision(monkeypatch, dtype):
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 30)
    machine.matrix_rate.cache_clear()
    try:
        assert 0 < machine.matrix_rate(CPU, dtype) < 1e13
    finally:
        machine.matrix_rate.cache_clear()


def test_a_reading_gives_the_numbers():
    assert machine.Reading(torch.tensor([1.5, -2.0])).read() == [1.5, -2.0]


def test_matrix_products_are_computed_in_the_dtype():
    x, linear = torch.ones(2, 8), torch.nn.Linear(8, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with machine.Machine(CPU, dtype, False, 1).autocast():
            assert linear(x).dtype is dtype


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


def test_the_description_is_json_and_names_what_was_used():
    about = machine.Machine(torch.device("cpu"), torch.bfloat16, True, 32).describe()
    assert json.loads(json.dumps(about)) == about
    threads = "CPU, 1 thread" if torch.get_num_threads() == 1 else f"CPU, {torch.get_num_threads()} threads"
    assert about == {"device": threads, "dtype": "bfloat16", "compiled": True, "micro_batch": 32}


def check_compiled(backend: str, positions: str, gradients: bool) -> None:
    """Loss and gradients of the model, compiled as training compiles it, are those of the model as it is."""
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
    with pytest.raises(
        InputError, match=r"layers 128, hidden 65536, .* needs at least 1\d\d,\d{3},\d{3},\d{3},\d{3} bytes"
    ):
        memory.check_memory(GIANT, Training(), 32_768, 128, here)
    weights, states = memory.sizes(Architecture(), Training(), 32_768, 128)
    assert states == 2 * weights == 8 * sum(p.numel() for p in bert.Bert(Architecture(), 32_768, 128).parameters())
    for processes, needed in ((1, 7 * weights), (2, 11 * weights)):  # with gradients, and the copy for a checkpoint
        monkeypatch.setattr(memory, "available_memory", lambda there=needed: there)
        memory.check_memory(Architecture(), Training(), 32_768, 128, here, processes)
        monkeypatch.setattr(memory, "available_memory", lambda there=needed: there - 1)
        with pytest.raises(InputError, match=f"{needed:,} bytes .* {needed - 1:,} bytes available"):
            memory.check_memory(Architecture(), Training(), 32_768, 128, here, processes)


def test_a_model_that_the_gpu_does_not_hold_is_refused(gpu, monkeypatch):
    weights, _ = memory.sizes(Architecture(), Training(), 32_768, 128)
    monkeypatch.setattr(machine.Machine, "device_name", lambda self: "Toy GPU")
    for there, fits in ((4 * weights, True), (4 * weights - 1, False)):
        monkeypatch.setattr(machine.Machine, "device_memory", lambda self, there=there: there)
        with nullcontext() if fits else pytest.raises(InputError, match="Toy GPU has"):
            memory.check_memory(Architecture(), Training(), 32_768, 128, machine.detect())
