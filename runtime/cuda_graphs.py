"""Work of the host that repeats itself, recorded once as CUDA graphs."""

import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ddtree.runtime.engine import Result

_log = logging.getLogger(__name__)
_MOST_FAILURES = 3
one_at_a_time = threading.RLock()
"""A process records one graph at a time, and meanwhile no other thread may make the device wait or allocate."""


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any
    arguments: tuple[object, ...]  # kept, because they are told apart by their addresses, which others would get


class CudaGraphs:
    """Runs what queues work on a stream: the first time as it is, the second time recording it, then from the record.

    The first time is what TensorRT and the kernels need to get ready: what they allocate and load cannot be recorded.
    A record holds addresses. So it is found by the objects that the work was given, and what it allocated is its own:
    a record always gives the same tensors. Where recording keeps failing, all goes on without.
    """

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream
        self._pool: Any = None  # of the memory of all records: they run one after another
        self._recordings: dict[tuple, _Recording] = {}
        self._ready: dict[tuple, tuple[object, ...]] = {}  # what has been run once, and its arguments: see _Recording
        self._failures = 0

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, stage: Callable[..., Result], *arguments: object) -> Result:
        """``stage(*arguments)``. Numbers and words among the arguments count by value, others by identity."""
        key = (stage, *(each if isinstance(each, int | str) else id(each) for each in arguments))
        recording = self._recordings.get(key)
        if recording is None and key in self._ready:
            recording = self._record(key, stage, arguments)
        if recording is None:
            if self._failures < _MOST_FAILURES:
                self._ready[key] = arguments
            return stage(*arguments)
        recording.graph.replay()
        return recording.result

    def _record(self, key: tuple, stage: Callable[..., Any], arguments: tuple[object, ...]) -> _Recording | None:
        graph, kept = torch.cuda.CUDAGraph(), self._ready.pop(key)
        try:
            # Other threads may go on with what they have queued on the device.
            mode = "thread_local"
            with one_at_a_time, torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                result = stage(*arguments)
        except Exception as error:  # the library allocates in this pass, or waits for the device
            _log.warning("%s is not recorded as a CUDA graph: %s", stage.__name__.strip("_"), error)
            self._failures += 1
            self._pool = None
            if self._failures == _MOST_FAILURES:
                _log.warning("rounds run without CUDA graphs from here on")
                self._ready.clear()
            return None
        self._pool = self._pool or graph.pool()
        self._recordings[key] = _Recording(graph, result, kept)
        return self._recordings[key]
