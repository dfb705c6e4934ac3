"""A function's kernels on a GPU, recorded once for each shape of its inputs, and from then on launched together."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)


class Recording(NamedTuple):
    """The kernels of a call, with the places in memory that they read and write."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    output: Tensor

    def replay(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """The output for these inputs."""
        for place, given in zip(self.inputs, inputs, strict=True):
            place.copy_(given)
        self.graph.replay()
        return self.output.clone()  # the next recording that is launched may write over it


class Graphs:
    """A function of tensors on a GPU, to a tensor.

    The first call for inputs of some shapes is a plain one: it loads the kernels and makes the tensors that last, such
    as an optimizer's. The second is recorded, which computes nothing; the recording is launched then and for all later
    calls. So whatever changes between calls must be in tensors that last, and the function must not read a value of a
    tensor. If a recording fails, all further calls are plain.
    """

    def __init__(self, function: Callable[..., Tensor], device: torch.device) -> None:
        self.function = function
        self.device = device
        self.stream = torch.cuda.Stream(device)  # torch records on no device's usual stream
        self.memory = torch.cuda.graph_pool_handle()  # shared: only one recording runs at a time
        self.called: set[tuple[torch.Size, ...]] = set()
        self.recordings: dict[tuple[torch.Size, ...], Recording] = {}
        self.failed = False

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the function returns."""
        shapes = tuple(given.shape for given in inputs)
        if shapes in self.called and shapes not in self.recordings and not self.failed:
            try:
                self.recordings[shapes] = self.record(inputs)
            except RuntimeError as error:  # also those of the driver, and a lack of memory
                self.give_up(error)
        if self.failed:
            return self.function(*inputs)
        if shapes in self.recordings:
            return self.recordings[shapes].replay(inputs)
        self.called.add(shapes)
        with self.aside():
            return self.function(*inputs)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Use the stream of recordings, after the work that is queued on the usual one and before later work there."""
        usual = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(usual)
        with torch.cuda.stream(self.stream):
            yield
        usual.wait_stream(self.stream)

    def record(self, inputs: tuple[Tensor, ...]) -> Recording:
        """Record a call. Raises RuntimeError if the GPU or the function can't be recorded."""
        places = tuple(given.clone() for given in inputs)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": other threads of this process may use the GPU meanwhile
        recorder = torch.cuda.graph(graph, self.memory, self.stream, capture_error_mode="thread_local")
        with self.aside(), recorder:  # after an error torch does not leave the stream by itself
            output = self.function(*places)
        return Recording(graph, places, output)

    def give_up(self, error: RuntimeError) -> None:
        """Make only plain calls from now on."""
        first = (
            error.__context__ or error
        )  # torch can't end a recording that failed, and says so in an error of its own
        reason = str(first).partition("\n")[0]
        log.warning("The GPU's kernels can't be recorded (%s), so each is launched by itself, which is slower.", reason)
        self.failed = True
        self.recordings.clear()
        release_generator(self.device)


def release_generator(device: torch.device) -> None:
    """Let the GPU's generator draw again, with the numbers that come next.

    A recording that failed keeps the generator's state, from which torch then refuses to draw.
    """
    generator = torch.cuda.default_generators[device.index]
    free = torch.Generator(device)
    free.set_state(generator.get_state())
    generator.graphsafe_set_state(free)
