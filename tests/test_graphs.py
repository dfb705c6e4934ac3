"""Recorded steps, on a double of torch's graphs: it records the operations of a call, undoes them, and repeats them."""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from test_finetuning import classifier, examples_of, tune
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import LENGTH, VOCABULARY, machine_of

from model import finetuning, graphs
from model.machine import Machine
from model.settings import Finetuning, Kind

# A GPU can't record what waits for it, nor copies of values that Python holds
READS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh", "unique_consecutive", "_unique2"}
EACH_KIND = ["classes", "regression", "multilabel", "tokens"]


class Tape(TorchDispatchMode):
    """Records operations with their tensors."""

    def __init__(self, refused: set[str]) -> None:
        super().__init__()
        self.refused = refused
        self.operations: list[tuple] = []
        self.before: dict[int, tuple] = {}  # by the place of memory that was written: it, and what it held
        self.random = torch.get_rng_state()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        if name in self.refused:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        for about, value in zip(function._schema.arguments, args, strict=False):
            if about.is_write:
                self.remember(value)
        for about in function._schema.arguments:
            if about.is_write and about.name in kwargs:
                self.remember(kwargs[about.name])
        made = function(*args, **kwargs)
        self.operations.append((function, args, kwargs, made))
        return made

    def remember(self, written) -> None:
        for tensor in tree_leaves(written):
            memory = tensor.untyped_storage()
            self.before.setdefault(memory.data_ptr(), (memory, memory.clone()))

    def undo(self) -> None:
        for memory, held in self.before.values():
            memory.copy_(held)
        torch.set_rng_state(self.random)


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self, cuda: "Cuda") -> None:
        self.tape: Tape | None = None
        self.cuda = cuda
        cuda.graphs.add(self)

    @torch.no_grad()
    def replay(self) -> None:
        self.cuda.replayed += 1
        for function, args, kwargs, made in self.tape.operations:
            again = function(*args, **kwargs)
            for place, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)


class Generator(Mock):
    """A GPU's generator of random numbers: one that draws what the CPU's does."""

    get_state = staticmethod(torch.get_rng_state)


class Cuda:
    """The part of torch.cuda that is for graphs. `refused` operations can't be recorded."""

    def __init__(self) -> None:
        self.usual = self.current = Mock(name="usual stream")
        self.refused = READS
        self.recorded = 0
        self.replayed = 0
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.default_generators = {None: Generator()}
        self.graph_pool_handle = Mock()

    def Stream(self, device) -> Mock:
        return Mock(name="stream of recordings")

    def current_stream(self, device) -> Mock:
        return self.current

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    @contextmanager
    def stream(self, stream) -> Iterator[None]:
        before = self.current
        self.current = stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode) -> Iterator[None]:
        """After an error it does not leave the stream, as torch's does not when a recording can't be ended."""
        assert stream is not self.usual
        assert pool is self.graph_pool_handle.return_value
        graph.tape = Tape(self.refused)
        before = self.current
        self.current = stream
        try:
            with graph.tape:
                yield
        finally:
            graph.tape.undo()
        self.recorded += 1
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """The double in the place of torch.cuda; every machine records."""
    double = Cuda()
    for name in ("Stream", "stream", "current_stream", "CUDAGraph", "graph", "graph_pool_handle", "default_generators"):
        monkeypatch.setattr(torch.cuda, name, getattr(double, name))
    monkeypatch.setattr(Machine, "records", True)
    monkeypatch.setattr(finetuning, "LENGTHS", 5)  # so that batches have four lengths, the last of which is LENGTH
    return double


def trained(kind: Kind, dtype: torch.dtype = torch.float32, dropout: float = 0.1, **axes) -> tuple[list, list[Tensor]]:
    """The losses of two epochs and the weights after them."""
    classes = 1 if kind == "regression" else 3
    model = classifier(classes, dropout=dropout, kind=kind, **axes)
    given = examples_of(kind, 90, 3, classes)
    settings = Finetuning(batch_size=8, epochs=2, learning_rate=1e-3, weight_decay=0.1, warmup=0.3)
    outcome = tune(model, given, settings, seed=5, machine=machine_of(dtype))
    return outcome.epochs, [parameter.detach() for parameter in model.parameters()]


def assert_same(found: tuple[list, list[Tensor]], expected: tuple[list, list[Tensor]]) -> None:
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


CASES = [
    *((kind, torch.float32, {}) for kind in EACH_KIND),
    ("classes", torch.bfloat16, {"positions": "rotary", "convolution": 3}),
    ("classes", torch.float16, {"positions": "learned", "bias": True}),
    ("tokens", torch.bfloat16, {"layers": 3, "funnel": 1}),
]


@pytest.mark.parametrize(("kind", "dtype", "axes"), CASES)
def test_recorded_steps_have_the_losses_and_weights_of_plain_ones(cuda: Cuda, monkeypatch, kind, dtype, axes):
    found = trained(kind, dtype, **axes)
    assert (cuda.recorded, cuda.replayed) == (3, 2 * (90 // 8) - 3), "the first step of each length is a plain one"
    monkeypatch.setattr(graphs.Graphs, "__call__", lambda self, *inputs: self.function(*inputs))
    assert_same(found, trained(kind, dtype, **axes))


def test_recorded_training_is_that_of_other_machines_but_for_rounding(cuda: Cuda, monkeypatch):
    losses, weights = trained("classes", dropout=0.0)
    monkeypatch.setattr(Machine, "records", False)
    expected_losses, expected_weights = trained("classes", dropout=0.0)
    assert [epoch["loss"] for epoch in losses] == pytest.approx([epoch["loss"] for epoch in expected_losses], rel=1e-4)
    for found, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("refused", ["embedding", "native_layer_norm_backward", "_fused_adamw_"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_where_recording_fails_the_results_are_right_and_the_log_says_so_once(cuda: Cuda, caplog, dtype, refused):
    expected = trained("classes", dtype)
    cuda.refused = {refused}
    with caplog.at_level(logging.WARNING):
        found = trained("classes", dtype)
    assert_same(found, expected)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert refused in caplog.text
    assert cuda.current is cuda.usual
    [call] = cuda.default_generators[None].graphsafe_set_state.call_args_list
    assert isinstance(call.args[0], torch.Generator)


def test_the_log_has_the_first_error_of_a_recording_not_that_of_its_end(cuda: Cuda, monkeypatch, caplog):
    @contextmanager
    def unended(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("unended")

    def refuse_second(values: Tensor) -> Tensor:
        calls.append(values)
        if len(calls) == 2:
            raise RuntimeError("refused")
        return values

    calls: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "graph", unended)
    recorded = graphs.Graphs(refuse_second, torch.device("cpu"))
    for _ in range(3):
        recorded(torch.ones(2))
    assert "refused" in caplog.text
    assert "unended" not in caplog.text


def test_after_a_failure_nothing_is_recorded_or_kept(cuda: Cuda):
    def double(values: Tensor) -> Tensor:
        if len(values) == 3:
            values.sum().item()
        return 2 * values

    recorded = graphs.Graphs(double, torch.device("cpu"))
    for count in (2, 2, 2, 3, 3, 2, 2, 4, 4, 4):
        values = torch.rand(count)
        assert torch.equal(recorded(values), 2 * values)
    assert (cuda.recorded, cuda.replayed) == (1, 2)
    assert recorded.recordings == {}


def test_an_output_stays_when_another_recording_is_launched(cuda: Cuda):
    total = torch.zeros(())

    def add(values: Tensor) -> Tensor:
        return total.add_(values.sum())

    recorded = graphs.Graphs(add, torch.device("cpu"))
    outputs = [recorded(torch.ones(count)) for count in (1, 2, 1, 2, 1, 2)]
    assert [float(output) for output in outputs[2:]] == [4, 6, 7, 9]
    assert float(total) == 9


def test_a_runs_recordings_and_their_memory_end_with_it(cuda: Cuda):
    gc.collect()
    gc.disable()
    try:
        trained("classes")
        assert cuda.recorded
        assert not list(cuda.graphs)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", EACH_KIND)
@pytest.mark.parametrize(
    "axes",
    [
        {"positions": "rotary", "convolution": 3, "activation": "geglu"},
        {"layers": 3, "funnel": 1, "norm": "rmsnorm"},
        {"positions": "learned", "bias": True, "qkv_bias": True, "norm_order": "post", "final_norm": False},
    ],
    ids=["rotary", "funnel", "learned"],
)
def test_a_step_on_a_device_reads_no_value_of_a_tensor(kind: Kind, axes: dict):
    """On the device "meta", whose tensors have no values, and on which layers compute as on a GPU."""
    for pooling in ("cls", "mean", "compare"):
        encoder = classifier(3, **axes).bert
        model = finetuning.Classifier(encoder, 3, 0.1, 0, pooling=pooling, texts=2, kind=kind).to("meta").train()
        tokens_BS = torch.full((4, LENGTH), VOCABULARY - 1, device="meta")
        floats = kind in ("regression", "multilabel")
        shape = {"tokens": (4, LENGTH), "multilabel": (4, 3)}.get(kind, (4,))
        labels = torch.zeros(shape, device="meta", dtype=torch.float32 if floats else torch.int64)
        finetuning.loss_of(model(tokens_BS), labels, model.kind).backward()
        assert model.bert.embedding.word.weight.grad.device.type == "meta"


def test_graphs_are_for_gpus_unless_compilation_is_off():
    def records(device: str, compiles: bool) -> bool:
        return Machine(torch.device(device), torch.bfloat16, compiles, micro_batch=1).records

    assert [records("cuda:0", True), records("cuda:0", False), records("cpu", True)] == [True, False, False]


def test_recordings_take_the_memory_of_one_more_batch_and_of_its_gradients():
    def bytes_on(device: str, weights: int, tokens: int) -> int:
        machine = Machine(torch.device(device), torch.bfloat16, compiles=True, micro_batch=1)
        return finetuning.memory(weights, tokens, values=12_288, machine=machine)

    assert bytes_on("cuda:0", 0, 2048) == 2 * bytes_on("cpu", 0, 2048)
    assert bytes_on("cuda:0", 1000, 0) == bytes_on("cpu", 1000, 0) + 1000
