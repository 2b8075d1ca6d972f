"""What the runtime uses of torch.cuda, on a machine without a GPU: host memory stands for device memory.

Work is done when it is queued, but for two things. A copy to the host arrives when an event behind it is waited for,
and not before. And while a graph is recorded nothing happens: torch operations are kept with the very tensors that they
had, passes of engines with their addresses, and what the host would have to wait for is an error.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ddtree.plugins import ops
from ddtree.runtime import tensorrt_engine

CAPABILITY = (12, 0)
NOT_THERE_YET = -123456789  # what the host finds in memory that a copy is on the way to

_current = threading.local()
_handles = itertools.count(0x5EED)
_streams: dict[int, "Stream"] = {}


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = torch.device("cpu")
        self.cuda_stream = next(_handles)
        self.recording: CUDAGraph | None = None
        self.on_the_way: list[tuple[Tensor, Tensor]] = []  # copies to the host
        _streams[self.cuda_stream] = self

    def synchronize(self) -> None:
        pass


def stream_of(handle: int) -> Stream:
    """The stream with this address."""
    return _streams[handle]


@contextmanager
def stream(stream: Stream) -> Iterator[None]:
    before = getattr(_current, "stream", None)
    _current.stream = stream
    try:
        with _Queue(stream):
            yield
    finally:
        _current.stream = before


@contextmanager
def on_device() -> Iterator[None]:
    """What the device does and not the host, though the host has to do it here."""
    before = working()
    _current.works = True
    try:
        yield
    finally:
        _current.works = before


def working() -> bool:
    """Whether this thread does what is the device's."""
    return getattr(_current, "works", False)


class Event:
    waits = 0  # of all events

    def __init__(self, enable_timing: bool = False) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: Stream | None = None) -> None:
        self._copies = list((stream or _current.stream).on_the_way)

    def synchronize(self) -> None:
        Event.waits += 1
        for to, values in self._copies:
            with on_device(), _disable_current_modes():
                to.copy_(values)
        self._copies.clear()


class _Queue(TorchDispatchMode):
    """Sees every torch operation of the thread while a stream is its current one."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.stream.recording is not None:
            return self.stream.recording.keep(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and (args[2:] == (True,) or kwargs.get("non_blocking")):
            to, values = args[:2]
            self.stream.on_the_way = [(to, values.clone())]
            return to.fill_(NOT_THERE_YET)
        with on_device():
            return func(*args, **kwargs)


class CUDAGraph:
    replays = 0  # of all graphs

    def __init__(self, keep_graph: bool = False) -> None:
        self.steps: list[Callable[[], object]] = []
        self._held: list[object] = []  # the graph's own memory, and what it was given
        self._before: dict[tuple, tuple[Tensor, Tensor]] = {}  # what a recorded operation would have written over

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def replay(self) -> None:
        CUDAGraph.replays += 1
        with on_device(), _disable_current_modes():
            for step in self.steps:
                step()

    def keep(self, func, args, kwargs) -> Any:
        """Run an operation for the shapes of its result, and keep it; ``restore`` undoes what it wrote."""
        waits = (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.lift_fresh.default,  # torch.tensor of numbers of the host
        )
        if func in waits:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        schema = func._schema
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        written = [
            tensor
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in pytree.tree_leaves(named.get(argument.name))
        ]
        for tensor in written:
            where = tensor.data_ptr(), tensor.shape, tensor.stride()
            self._before.setdefault(where, (tensor, tensor.clone()))
        with on_device():
            result = func(*args, **kwargs)
        self._held.append((args, kwargs, result))
        if written:
            self.steps.append(lambda: func(*args, **kwargs))
        elif not _memory_of(result) <= _memory_of((args, kwargs)):  # else it is a view

            def again() -> None:
                new = pytree.tree_leaves(func(*args, **kwargs))
                for to, values in zip(pytree.tree_leaves(result), new, strict=True):
                    to.copy_(values)

            self.steps.append(again)
        return result

    def restore(self) -> None:
        for tensor, values in reversed(self._before.values()):
            tensor.copy_(values)
        self._before.clear()


def _memory_of(tree: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    assert stream is not None
    assert stream is _current.stream
    assert not any(each.recording for each in _streams.values()), "two graphs are recorded at once"
    stream.recording = cuda_graph
    try:
        yield
    finally:
        stream.recording = None
        cuda_graph.restore()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put all this in place of torch.cuda's, and have the tree operations done as one operation each."""
    for name, mine in {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "stream": stream,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, mine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5 * 10**9, 80 * 10**9))
    monkeypatch.setattr(tensorrt_engine, "_DEVICE", "cpu")
    # As on a GPU, but the operator's CPU implementation in place of the kernels.
    monkeypatch.setattr(ops, "_serve", lambda tensor, operator, kernels: lambda *given: operator(*given))
