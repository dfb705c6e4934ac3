import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import InputError, bert, machine, masking
from model.settings import Architecture

SETTINGS = ("CRAM_DEVICE", "CRAM_DTYPE", "CRAM_COMPILE", "CRAM_MICRO_BATCH")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
COMPILE_SECONDS = 40


@pytest.fixture(autouse=True)
def bare(monkeypatch) -> None:
    """A machine without a GPU, a compiler and bf16, on which nothing is set."""
    for name in (*SETTINGS, "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "_cpu_has_bf16", lambda: False)


def test_a_bare_machine_computes_in_fp32_on_the_cpu_and_says_that_it_cannot_compile(caplog):
    caplog.set_level(logging.INFO)
    assert machine.detect() == machine.Machine(torch.device("cpu"), torch.float32, False, machine.CPU_MICRO_BATCH)
    assert "torch.compile is not used: there is no C++ compiler." in caplog.text


def test_what_the_machine_has_is_used(monkeypatch):
    monkeypatch.setattr(machine, "_cpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    here = machine.detect()
    assert here.dtype is torch.bfloat16
    assert here.compiles
    assert not here.compiles_always


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx2", False)])
def test_bf16_is_used_where_the_processor_has_it(monkeypatch, flags, fast):
    monkeypatch.undo()
    monkeypatch.setattr(machine.Path, "read_text", lambda self: f"processor : 0\nflags : fpu sse {flags} avx\n")
    assert machine._cpu_has_bf16() is fast


def test_the_environment_overrides_what_the_machine_has(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(machine, "_cpu_has_bf16", lambda: True)
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
        ("CRAM_DTYPE", "fp8", "CRAM_DTYPE is 'fp8'; expected one of auto, bf16, fp32, or unset"),
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


@pytest.mark.parametrize(("free", "fits"), [(48e9, 512), (11e9, 128), (80e9, 512), (139e9, 1024), (1e9, 16), (0, 16)])
def test_the_micro_batch_is_what_the_gpu_holds(monkeypatch, free, fits):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (int(free), int(free)))
    assert machine._cuda_micro_batch() == fits


def test_matrix_products_are_computed_in_the_dtype():
    x, linear = torch.ones(2, 8), torch.nn.Linear(8, 8)
    for dtype in (torch.float32, torch.bfloat16):
        with machine.Machine(torch.device("cpu"), dtype, False, 1).autocast():
            assert linear(x).dtype is dtype


def test_bf16_gives_nearly_the_loss_of_fp32():
    model = bert.Bert(Architecture(layers=2, hidden=32, heads=2, intermediate=64), 50, 16)
    tokens = torch.randint(5, 50, (8, 16), generator=torch.Generator().manual_seed(0))
    masked = masking.mask(tokens, 4, 4, 5, 50, (0, 0))
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        with machine.Machine(torch.device("cpu"), dtype, False, 1).autocast():
            loss = model(*masked)
        assert loss.dtype is torch.float32
        losses.append(loss.item())
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_the_description_is_json_and_names_what_was_used():
    about = machine.Machine(torch.device("cpu"), torch.bfloat16, True, 32).describe()
    assert json.loads(json.dumps(about)) == about
    threads = f"CPU, {torch.get_num_threads()} threads"
    assert about == {"device": threads, "dtype": "bfloat16", "compiled": True, "micro_batch": 32}


def loss_and_gradients(model: bert.Bert, forward, masked: tuple) -> tuple[float, list[torch.Tensor]]:
    loss = forward(*masked)
    return loss.item(), torch.autograd.grad(loss, list(model.parameters()))


def check_compiled(backend: str) -> None:
    """Loss and gradients of the model, compiled as training compiles it, are those of the model as it is."""
    model = bert.Bert(Architecture(layers=1, hidden=32, heads=2, intermediate=64), 50, 16)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for index in range(2):
        tokens = torch.randint(5, 50, (4, 16), generator=torch.Generator().manual_seed(index))
        masked = masking.mask(tokens, 4, 4, 5, 50, (0, index))
        expected, gradients = loss_and_gradients(model, model, masked)
        loss, compiled_gradients = loss_and_gradients(model, compiled, masked)
        assert loss == pytest.approx(expected, abs=1e-4)
        for one, other in zip(gradients, compiled_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # of torch's own imports
def test_the_model_is_one_static_graph():
    torch.compiler.reset()
    check_compiled("aot_eager")


COMPILED = (
    "import sys, torch; sys.path.insert(0, sys.argv[1]); import test_machine; test_machine.check_compiled('inductor')"
)


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
def test_the_compiled_model_has_the_same_loss_and_gradients(tmp_path):
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
