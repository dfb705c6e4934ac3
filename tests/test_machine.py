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
from torch._inductor import config as inductor
from toys import CPU, LENGTH, VOCABULARY, corpus_of_rows, encoder

import model
from model import bert, machine, memory
from model.errors import InputError
from model.masking import Batches
from model.settings import Architecture, Training

NAMES = ("CRAM_DEVICE", "CRAM_DTYPE", "CRAM_COMPILE", "CRAM_MICRO_BATCH")
NO_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is None


def equip(monkeypatch, parts: str) -> None:
    """A machine that has these parts only: a compiler, bf16, two GPUs."""
    has_gpus = "gpus" in parts
    has_bf16 = "bf16" in parts
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpus)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or has_bf16)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda kind: None)
    monkeypatch.setattr(machine, "cpu_has_bf16", lambda: has_bf16)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}" if "compiler" in parts else None)


@pytest.fixture(autouse=True)
def _bare(monkeypatch) -> None:
    """A machine on which nothing is set, with none of these parts."""
    for name in (*NAMES, "CXX", "CRAM_GPUS", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    equip(monkeypatch, "")


def given(*values: str) -> dict[str, str]:
    """An environment that sets these, in the order of NAMES."""
    return dict(zip(NAMES, values, strict=False))


ON_CPU = {"device": CPU, "dtype": torch.float32, "compiles": False, "micro_batch": machine.CPU_MICRO_BATCH}
ON_GPU = {"device": torch.device("cuda:0"), "dtype": torch.bfloat16, "compiles": True, "probes": True}
ON_GPU["micro_batch"] = machine.CUDA_MICRO_BATCH
FAST = {"dtype": torch.bfloat16, "compiles": True}


@pytest.mark.parametrize(
    ("parts", "environment", "expected"),
    [
        ("", {}, ON_CPU),
        ("", given("auto", "auto", "auto"), ON_CPU),
        ("", given("", "", "", ""), ON_CPU),
        ("bf16 compiler", {}, ON_CPU | FAST),
        ("bf16 compiler", given("cpu", "fp32", "0", "7"), ON_CPU | {"micro_batch": 7}),
        ("compiler", given("cpu", "bf16", "1", "1"), ON_CPU | FAST | {"micro_batch": 1, "compiles_always": True}),
        ("gpus bf16", {}, ON_GPU),
        ("gpus", {}, ON_GPU | {"dtype": torch.float16}),
        ("gpus bf16", {"CRAM_MICRO_BATCH": "24"}, ON_GPU | {"micro_batch": 24, "probes": False}),
        ("gpus bf16", {"LOCAL_RANK": "1"}, ON_GPU | {"device": torch.device("cuda:1")}),
    ],
)
def test_a_machine_is_used_as_it_is_unless_the_environment_overrides_it(
    monkeypatch, caplog, parts, environment, expected
):
    caplog.set_level(logging.INFO)
    equip(monkeypatch, parts)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.detect() == machine.Machine(**expected)
    assert ("torch.compile is not used" in caplog.text) != expected["compiles"]


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx2", False)])
def test_bf16_is_used_where_the_processor_has_it(monkeypatch, flags, fast):
    monkeypatch.undo()
    monkeypatch.setattr(
        machine.Path, "read_text", lambda self, encoding: f"processor : 0\nflags : fpu sse {flags} avx\n"
    )
    assert machine.cpu_has_bf16() is fast


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CRAM_DEVICE", "tpu"),
        ("CRAM_DEVICE", "cuda"),
        ("CRAM_DTYPE", "fp8"),
        ("CRAM_COMPILE", "1"),
        ("CRAM_MICRO_BATCH", "0"),
        ("CRAM_MICRO_BATCH", "²"),
    ],
)
def test_a_setting_that_is_wrong_or_impossible_here_is_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{name} is '{value}'"):
        machine.detect()


@pytest.mark.parametrize(
    ("asked", "device", "count"),
    [("", "auto", 1), ("1", "auto", 1), ("2", "auto", 2), ("7", "cpu", 7), ("3", "auto", None), ("0", "auto", None)],
)
def test_as_many_gpus_as_asked_for_train_and_processes_without_gpus_share_the_cpu(monkeypatch, asked, device, count):
    equip(monkeypatch, "gpus")
    monkeypatch.setenv("CRAM_GPUS", asked)
    monkeypatch.setenv("CRAM_DEVICE", device)
    with nullcontext() if count else pytest.raises(InputError, match="CRAM_GPUS"):
        assert machine.gpus(machine.detect()) == count


@pytest.mark.parametrize(("rate", "side"), [(1e10, 800), (2e8, 400), (1e3, 100)])  # a product of 400: 1.28e8 operations
def test_matrix_products_whose_rate_is_measured_once_are_as_large_as_a_second_allows(monkeypatch, rate, side):
    measured = []

    def seconds(side: int, *_: object) -> float:
        measured.append(side)
        return 2 * side**3 / rate

    monkeypatch.setattr(machine, "product_seconds", seconds)
    monkeypatch.setitem(machine.MATRIX_SIDE, "cpu", 800)
    machine.matrix_rate.cache_clear()
    try:
        assert [machine.matrix_rate(CPU, torch.float32) for _ in range(2)] == pytest.approx([rate] * 2)
    finally:
        machine.matrix_rate.cache_clear()
    assert (measured[-1], measured.count(100)) == (side, 1 + (side == 100))


FEW_KERNELS = {"activation": "relu2", "norm": "rmsnorm", "norm_bias": False, "embedding_norm": False}


@pytest.mark.filterwarnings("ignore")  # of torch's own imports
@pytest.mark.parametrize(
    ("axes", "settings", "backend"),
    [
        pytest.param(FEW_KERNELS, {}, "inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")),
        ({"positions": "rotary"}, {"detection": 1.0}, "eager"),  # the graph alone, without code for it
        ({"layers": 3, "funnel": 1, "convolution": 3, "embedding": 8, "norm_order": "post"}, {}, "eager"),
    ],
    ids=["compiled", "detection", "funnel"],
)
def test_the_model_is_one_static_graph_that_compiled_has_the_same_loss_and_gradients(
    monkeypatch, tmp_path, axes, settings, backend
):
    monkeypatch.undo()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    model = bert.with_detector(encoder(**{"heads": 1, "intermediate": 24} | axes), Training(**settings))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    corpus = corpus_of_rows(np.random.default_rng(0).integers(5, VOCABULARY, (8, LENGTH)))
    batches = Batches(corpus, 8, Training(**settings), CPU)
    # with AVX2 if the processor has it: to try the compiler on all sets of instructions takes half as long as a model
    with inductor.patch({"compile_threads": 1, "cpp.vec_isa_ok": True, "cpp.simdlen": 256}):
        for first in (0, 8):  # another batch, by the same code
            losses = [forward(*batches.make(first, 4)).sum() for forward in (model, compiled)]
            torch.testing.assert_close(*losses, rtol=0, atol=1e-4)
            one, other = (torch.autograd.grad(loss, [*model.parameters()]) for loss in losses)
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert any(tmp_path.rglob("*.so")) is (backend == "inductor")


@pytest.mark.parametrize(
    ("parts", "processes", "budget", "copies", "where"),
    [
        ("", 1, 24, 7, "this machine"),
        ("", 2, 24, 11, "this machine"),
        ("gpus", 1, 24, 4, "Toy GPU"),
        ("", 1, 0, 2, "this machine"),
        ("gpus", 1, 0, 2, "this machine"),
    ],
)
def test_a_model_fits_if_its_weights_gradients_and_moments_do(monkeypatch, parts, processes, budget, copies, where):
    """Those of each process take four times the weights, and on the host a checkpoint three times.

    With a budget of 0 there are only weights, twice.
    """
    equip(monkeypatch, parts)
    monkeypatch.setattr(machine.Machine, "device_name", lambda self: "Toy GPU")
    training = Training(budget=budget)
    needed = copies * memory.sizes(Architecture(), training, 32_768, 128)[0]
    for there in (needed, needed - 1):
        monkeypatch.setattr(memory, "available_memory", lambda there=there: there)
        properties = SimpleNamespace(total_memory=there)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        refused = pytest.raises(InputError, match=f"{needed:,} bytes .* {where} has {there:,} bytes")
        with nullcontext() if there == needed else refused:
            memory.check_memory(Architecture(), training, 32_768, 128, machine.detect(), processes)


@pytest.mark.parametrize(
    ("module", "given", "found"),
    [
        ("tasks.finetune", {}, "False 5000"),
        ("model", {"GOMP_SPINCOUNT": "7"}, "False 7"),
        ("model", {"OMP_WAIT_POLICY": "active"}, "False None"),
    ],
)
def test_before_torch_is_loaded_its_threads_are_set_to_wait_without_spinning_unless_the_user_says_how(
    module, given, found
):
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = f"import os, sys, {module}; print('torch' in sys.modules, os.environ.get('GOMP_SPINCOUNT'))"
    root = Path(model.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], env=env | given, cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == found, done.stderr
