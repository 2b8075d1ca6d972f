"""A compiled engine of TensorRT or TensorRT for RTX: its tensors' memory, and the contexts that run it.

Addresses never change, because CUDA graphs hold them: KV caches and outputs have memory of their own as long as the
engine is open, and a pass of fewer rows than the largest uses its beginning.
"""

import functools
import logging
import math
import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ddtree.runtime.cuda_graphs import one_at_a_time
from ddtree.runtime.errors import EngineError

_log = logging.getLogger(__name__)
PROMPT, ROUND = 0, 1  # optimisation profiles, in the order in which the builder adds them
_TYPES = ("float32", "float16", "bfloat16", "int32", "int64")

Shapes = Mapping[str, tuple[int, ...]]


class Plan:
    """One compiled engine. All its work goes to ``stream``, which has to be torch's current one.

    Args:
        library: ``tensorrt`` or ``tensorrt_rtx``.
        path: the serialised engine.
        layers: of the model; its KV caches go by their numbers.
        slots: sequences that the caches hold.
        kernels: file of what TensorRT for RTX has compiled for the shapes that it met; read if it is there.

    Attributes:
        caches: key, value of layer 0, key, value of layer 1, ...; each [slots, kv_heads, cache, head_dim], zero at
            first. A pass updates them.
        inputs, outputs: dtypes of all other tensors, by name.
        scratch_bytes: memory that a pass needs while it runs; ``allocate`` is given it.
        recordable: whether CUDA graphs can hold its rounds, as far as is known.

    Raises:
        EngineError: the library does not open it.
    """

    def __init__(
        self, library: ModuleType, path: Path, layers: int, slots: int, stream: torch.cuda.Stream, kernels: Path
    ):
        self._library, self._path, self._stream, self._kernels = library, path, stream, kernels
        self._logger = _logger(library)
        self._logger.fault = ""
        self._runtime = library.Runtime(self._logger)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self._engine = self._runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise self._error("cannot open it")
        dtypes = {getattr(library, name): getattr(torch, name) for name in _TYPES}
        self.inputs: dict[str, torch.dtype] = {}
        self.outputs: dict[str, torch.dtype] = {}
        for i in range(self._engine.num_io_tensors):
            name = self._engine.get_tensor_name(i)
            reads = self._engine.get_tensor_mode(name) == library.TensorIOMode.INPUT
            (self.inputs if reads else self.outputs)[name] = dtypes[self._engine.get_tensor_dtype(name)]
        self._cached = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
        self._in_place = f"present.{self._cached[0]}" in self.outputs
        self.caches: list[torch.Tensor] = []
        for name in self._cached:
            _, *row_shape = self._engine.get_tensor_shape(f"past_key_values.{name}")
            dtype = self.inputs.pop(f"past_key_values.{name}")
            self.outputs.pop(f"present.{name}", None)
            self.caches.append(torch.zeros(slots, *row_shape, dtype=dtype, device=stream.device))
        self.scratch_bytes = max(self._engine.get_device_memory_size_for_profile_v2(i) for i in (PROMPT, ROUND))
        self.recordable = True
        self._contexts: dict[tuple, Any] = {}
        self._bound: dict[tuple, tuple[Shapes, int, dict[str, torch.Tensor]]] = {}  # shapes, slot, outputs
        self._memory: dict[tuple[int, str], torch.Tensor] = {}  # of outputs, by profile and name, flat
        self._compiled: Any = None  # TensorRT for RTX: what it has compiled
        if library.__name__ == "tensorrt_rtx":
            self._compiled = self._engine.create_runtime_config().create_runtime_cache()
            if kernels.is_file():
                self._compiled.deserialize(kernels.read_bytes())  # refused: they are compiled again

    def allocate(self, scratch: torch.Tensor) -> None:
        """Allocate the outputs of the largest passes: a chunk of one prompt, and a round of all slots.

        Args:
            scratch: uint8, of ``scratch_bytes`` or more. Engines that run one after another may share it.
        """
        self._scratch = scratch
        self._nothing = torch.empty(1, dtype=torch.int64, device=self._stream.device)  # an address for empty tensors
        for profile in (PROMPT, ROUND):
            largest = {name: tuple(self._engine.get_tensor_profile_shape(name, profile)[2]) for name in self.inputs}
            if profile == PROMPT:
                largest = {name: (min(batch, 1), *rest) for name, (batch, *rest) in largest.items()}
            context = self._new_context(profile)
            self._set_shapes(context, largest)
            for name, dtype in self.outputs.items():
                size = math.prod(context.get_tensor_shape(name))
                self._memory[profile, name] = torch.empty(size, dtype=dtype, device=self._stream.device)

    def run(
        self, profile: int, inputs: Mapping[str, torch.Tensor], slot: int = 0, context_for: tuple = ()
    ) -> Mapping[str, torch.Tensor]:
        """Queue a pass of the slots [slot, slot + batch).

        Args:
            inputs: every tensor of ``inputs``.
            context_for: what the pass is for. A CUDA graph wants an execution context of its own, so rounds of each
                shape and purpose have one; all prompts share one.

        Returns:
            every tensor of ``outputs``, valid until the next pass of this profile.

        Raises:
            EngineError: the library refuses the pass.
        """
        inputs = {name: tensor.to(self.inputs[name]).contiguous() for name, tensor in inputs.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        key = (profile, *context_for, *shapes.values()) if profile == ROUND else (profile,)
        self._logger.fault = ""
        if key not in self._contexts:
            self._contexts[key] = self._new_context(profile)
        context = self._contexts[key]
        if self._bound.get(key, (None, 0))[:2] != (shapes, slot):
            self._bound.pop(key, None)
            self._set_shapes(context, shapes)
            self._bound[key] = shapes, slot, self._bind(context, profile, slot, shapes["write_index"][0])
        for name, tensor in inputs.items():
            self._check(context.set_tensor_address(name, tensor.data_ptr() or self._nothing.data_ptr()), name)
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise self._error(f"failed in a pass of {shapes['write_index'][0]} slots")
        if profile == ROUND and hasattr(context, "is_stream_capturable"):
            self.recordable &= context.is_stream_capturable(self._stream.cuda_stream)
        outputs = self._bound[key][2]
        if not self._in_place:
            self._write_rows(outputs, inputs["write_index"], slot)
        return outputs

    def save_compiled(self) -> None:
        """Keep what TensorRT for RTX has compiled so far, for the next time that the engine is opened."""
        if self._compiled is None:
            return
        try:
            self._kernels.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._kernels.parent) as folder:
                written = Path(folder) / self._kernels.name
                written.write_bytes(self._compiled.serialize())
                written.replace(self._kernels)
        except OSError as error:  # they are compiled again the next time
            _log.warning("%s is not written: %s", self._kernels, error)

    def _new_context(self, profile: int) -> Any:
        with one_at_a_time:
            return self._made_context(profile)

    def _made_context(self, profile: int) -> Any:
        library, strategy = self._library, self._library.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._compiled is None:
            context = self._engine.create_execution_context(strategy)
        else:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.set_runtime_cache(self._compiled)
            # A round's kernels have to be there when it is recorded. A prompt's chunks are of many lengths.
            kinds = library.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if profile == ROUND else kinds.LAZY
            context = self._engine.create_execution_context(runtime_config=config)
        if context is None:
            raise self._error("makes no context for it")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        self._check(context.set_optimization_profile_async(profile, self._stream.cuda_stream), f"profile {profile}")
        return context

    def _set_shapes(self, context: Any, shapes: Shapes) -> None:
        batch = shapes["write_index"][0]
        for name, shape in shapes.items():
            self._check(context.set_input_shape(name, shape), f"{name} of shape {list(shape)}")
        for name, cache in zip(self._cached, self.caches, strict=True):
            past = f"past_key_values.{name}"
            self._check(context.set_input_shape(past, (batch, *cache.shape[1:])), f"{past} of {batch} slots")
        if missing := context.infer_shapes():
            raise self._error(f"misses inputs: {', '.join(missing)}")

    def _bind(self, context: Any, profile: int, slot: int, batch: int) -> dict[str, torch.Tensor]:
        """Give caches and outputs their addresses."""
        for name, cache in zip(self._cached, self.caches, strict=True):
            for end in ("past_key_values", "present") if self._in_place else ("past_key_values",):
                self._check(context.set_tensor_address(f"{end}.{name}", cache[slot].data_ptr()), name)
        outputs = {}
        for name in self.outputs:
            shape = tuple(context.get_tensor_shape(name))
            memory = self._memory[profile, name]
            outputs[name] = memory[: math.prod(shape)].view(shape)
            self._check(context.set_tensor_address(name, memory.data_ptr()), name)
        return outputs

    def _write_rows(self, outputs: Mapping[str, torch.Tensor], write_index: torch.Tensor, slot: int) -> None:
        """TensorRT 10.14 has no layer that updates a cache, so engines of TensorRT-LLM give their new rows."""
        batch = len(write_index)
        rows = outputs[f"update.{self._cached[0]}"].shape[2]
        at = write_index[:, None] + torch.arange(rows, device=write_index.device)  # [batch, rows]
        for name, cache in zip(self._cached, self.caches, strict=True):
            update = outputs[f"update.{name}"]  # [batch, kv_heads, rows, head_dim]
            cache[slot : slot + batch].scatter_(2, at[:, None, :, None].expand_as(update), update)

    def _check(self, taken: bool, what: str) -> None:
        if not taken:
            raise self._error(f"does not take {what}")

    def _error(self, what: str) -> EngineError:
        reason = " ".join(self._logger.fault.split()) or "no reason given"
        name = f"{self._library.__name__} {self._library.__version__}"
        return EngineError(f"{self._path}: {name} {what}: {reason} (build it again if GPU and driver are in order)")


@functools.cache
def _logger(library: ModuleType) -> Any:
    severity = library.ILogger.Severity

    class Logger(library.ILogger):  # type: ignore[name-defined]
        """Keeps the last error."""

        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.fault = ""

        def log(self, level: Any, message: str) -> None:
            if level in (severity.ERROR, severity.INTERNAL_ERROR):
                self.fault = message

    return Logger()
