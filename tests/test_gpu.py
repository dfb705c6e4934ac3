"""The comparison of a device with the CPU: rounding passes, planted faults don't."""

import importlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_benchmarks import FOLDER
from test_graphs import Cuda, cuda
from torch import Tensor

from model import bert, finetuning, graphs, layers, masking, optimizer
from model.machine import Machine

__all__ = ["cuda"]  # a fixture


@pytest.fixture
def correctness(monkeypatch: pytest.MonkeyPatch):
    """The module."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("correctness")


def others(part: int) -> Callable:
    """Micro-batches whose tokens (0), positions, labels or corruptions (3) are those of other sequences."""
    make = masking.Batches.make
    return lambda self, *about: tuple(x.roll(1, 0) if i == part else x for i, x in enumerate(make(self, *about)))


attend = bert.attend
convolve = layers.Convolution.forward
make = (masking.Batches, "make")
# What could be wrong on a device: an owner, the name of its function, and the wrong function
FAULTS: dict[str, tuple[object, str, Callable]] = {
    "scores of attention halved": (bert, "attend", lambda q, *other: attend(q / 2, *other)),
    "attention uniform": (bert, "attend", lambda q, *other: attend(q * 0, *other)),
    "not rotated": (layers.Rotation, "forward", lambda self, x, positions=None: x),
    "no convolution": (layers.Convolution, "forward", lambda self, x, seen: x),
}
IN_PADDING = {
    "padding seen": (bert, "attend", lambda q, k, v, mask, dropout: attend(q, k, v, None, dropout)),
    "padding convolved": (layers.Convolution, "forward", lambda self, x, seen: convolve(self, x, None)),
}
IN_BATCHES = {f"{name} of others": (*make, others(i)) for i, name in enumerate(("tokens", "positions", "labels"))}


@pytest.mark.parametrize(
    ("layout", "padded", "faults"),
    [
        ("frontier", False, FAULTS | IN_BATCHES | {"corruptions of others": (*make, others(3))}),
        ("frontier", True, FAULTS | IN_PADDING),
        ("funnel", True, {"padding seen": IN_PADDING["padding seen"]}),
    ],
    ids=["pretraining", "padded", "funnel"],
)
def test_rounding_passes_and_every_fault_fails(correctness, monkeypatch, layout: str, padded: bool, faults: dict):
    def error(here: Machine) -> float:
        found = correctness.gradients(layout, here, padded)
        return correctness.worst(found, correctness.expected(layout, padded))[1]

    for dtype in ("bf16", "fp16") if layout == "frontier" and not padded else ("bf16",):
        rounded = replace(correctness.REFERENCE, dtype=correctness.DTYPES[dtype])
        assert 0 < error(rounded) < correctness.FAR[dtype] / 2
    for name, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert error(correctness.REFERENCE) > 1.5 * correctness.FAR["bf16"], name


def test_a_device_that_halves_the_scores_in_bf16_is_wrong_there_alone(correctness, monkeypatch):
    halved = lambda q, *other: attend(q / 2 if q.dtype is torch.bfloat16 else q, *other)  # noqa: E731
    monkeypatch.setattr(bert, "attend", halved)
    rows = [correctness.compare(correctness.REFERENCE, "modern", d, False, "gradients") for d in ("fp32", "bf16")]
    assert [row["right"] for row in rows] == [True, False]


def with_inputs_of_first(*numbers: int) -> Callable:
    """Launches of a recording that leave some inputs as they were when it was made."""

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        for number, (place, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if number not in numbers:
                place.copy_(given)
        self.graph.replay()
        return self.output.clone()

    return replay


def in_numbers_only(optimizers: list, multiplier: float) -> None:
    """Set no rate that is a tensor."""
    for group in optimizers[0].param_groups:
        if not isinstance(group["lr"], Tensor):
            group["lr"] = multiplier * group["peak"]


def test_recorded_finetuning_that_differs_or_is_not_recorded_is_wrong(correctness, cuda: Cuda, monkeypatch):
    monkeypatch.setattr(Machine, "records", property(lambda self: self.compiles))
    monkeypatch.setattr(finetuning, "LENGTHS", 16)

    def compare() -> dict:
        return correctness.compare(correctness.REFERENCE, "crammed-bert", "fp32", True, correctness.RECORDED)

    assert compare()["right"]
    faults = {
        "tokens of another step": (graphs.Recording, "replay", with_inputs_of_first(0)),
        "labels of another step": (graphs.Recording, "replay", with_inputs_of_first(1)),
        "rate that stays": (optimizer, "set_rates", in_numbers_only),
    }
    for name, fault in faults.items():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert compare()["error"] > 2 * correctness.FAR_LOSS, name
    cuda.refused = {"embedding"}
    assert not compare()["right"]
