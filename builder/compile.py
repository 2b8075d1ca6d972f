"""ONNX graphs to the engines of TensorRT and of TensorRT for RTX, which have one API and are one module here.

Both libraries carry on where they should not: an input that nothing reads is a warning, a mask that does not go with an
option is an error line in the log of a build that succeeds. Here each of them ends the build.

How an engine reads its KV caches was found by reading plans of TensorRT for RTX 1.7 (sm_120, both half dtypes, head_dim
16 to 256). A grouped-query attention becomes one kernel that reads keys and values where they lie only if its query is
an input or an output of the network; else the keys and values of the whole cache are replicated to every query head
before each attention, whether the batch is static or dynamic. And the ONNX parser multiplies the query *and the whole
key cache* by the root of the scale. So ``read_caches_in_place`` makes every query an output, ``query.{layer}``, and
scales the query alone, before its rotation: scaled after it, bfloat16 queries that are outputs end the compiler with an
internal error. Nobody wants these outputs, but the runtime has to give each an address. One for all should do, because
a layer's query is used up before the next layer's exists; that was not tried on a GPU.
"""

import contextlib
import functools
import importlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import onnx

from .errors import BuildError
from .weights import Progress

Range = tuple[int, int, int]  # the least, the one to be fastest at, the most
Profile = dict[str, Range]  # by the name of a dynamic dimension: "batch", "seq", ...

EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx": "rtx"}  # library -> the extra that installs it
_OLDEST_TENSORRT = (10, 15)  # the first with the KV cache layer
_ONE_AT_A_TIME = threading.Lock()  # a library has one logger in a process


class Kernel(NamedTuple):
    """One step of a compiled engine. Shapes have -1 where a dimension is dynamic."""

    name: str
    inputs: dict[str, tuple[int, ...]]
    outputs: dict[str, tuple[int, ...]]


def load_library(name: str) -> ModuleType:
    """Import ``tensorrt`` or ``tensorrt_rtx``.

    Raises:
        BuildError: it is missing, cannot be loaded, or is too old.
    """
    try:
        library = importlib.import_module(name)
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise BuildError(
            f'engine {name} needs {name}: {reason} (pip install "ddtree-trtllm[{EXTRAS[name]}]")'
        ) from None
    version = tuple(int(part) for part in library.__version__.split(".")[:2])
    if name == "tensorrt" and version < _OLDEST_TENSORRT:
        raise BuildError(
            f"TensorRT {library.__version__} has no KV cache layer "
            f"(use {'.'.join(map(str, _OLDEST_TENSORRT))} or newer; TensorRT-LLM 1.2 has trtllm-build)"
        )
    return library


def compile_graph(
    library: ModuleType,
    graph: Path,
    plan: Path,
    *,
    arch: str,
    profiles: list[Profile],
    extend: Callable[["Network"], None] | None = None,
    timing_cache: Path | None = None,
    progress: Progress,
) -> list[Kernel]:
    """Compile an ONNX file into a serialised engine.

    Args:
        library: ``tensorrt``, which builds for the GPU that is present, or ``tensorrt_rtx``, which needs none.
        graph: the ONNX file; its weights lie beside it.
        plan: where to write the engine.
        arch: "sm_120" or another; what ``tensorrt_rtx`` builds for.
        profiles: what shapes the engine takes, one profile for each kind of pass.
        extend: adds layers to the parsed network, such as the tree operations.
        timing_cache: measurements of earlier builds, read and written by ``tensorrt``; the other library has none.
        progress: called with what is being done, and thousandths done.

    Returns:
        The engine's kernels, of all profiles; empty where the library does not say.

    Raises:
        BuildError: the library refuses the graph, or says that something is wrong with it.
        KeyboardInterrupt: Ctrl-C; the library is asked to stop, and has.
    """
    model = onnx.load(graph, load_external_data=False).graph
    logger, name = _logger(library), graph.name
    with _ONE_AT_A_TIME, _interruptible() as interrupted:
        logger.clear()
        builder = library.Builder(logger)
        strongly_typed = 1 << int(library.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = Network(library, builder.create_network(strongly_typed), model)
        parser = library.OnnxParser(network.definition, logger)
        if not parser.parse_from_file(str(graph)) or parser.num_errors:
            errors = [str(parser.get_error(i)) for i in range(parser.num_errors)] or logger.faults
            raise _refusal(library, name, "its parser", errors)
        network.check_parsed(name)
        network.read_caches_in_place()
        if extend is not None:
            extend(network)
        config = builder.create_builder_config()
        config.profiling_verbosity = library.ProfilingVerbosity.DETAILED  # so that the log describes the kernels
        for profile in profiles:
            config.add_optimization_profile(network.profile(builder, profile))
        if library.__name__ == "tensorrt_rtx":
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(library.ComputeCapability, arch.replace("_", "").upper()), 0)
            config.set_flag(library.BuilderFlag.REQUIRE_USER_ALLOCATION)  # else its passes fit into no CUDA graph
        elif timing_cache is not None:
            known = timing_cache.read_bytes() if timing_cache.is_file() else b""
            config.set_timing_cache(config.create_timing_cache(known), False)
        doing = f"compiling the {graph.stem}"
        monitor = _monitor(library, doing, progress, interrupted)
        config.progress_monitor = monitor
        written = _write_plan(library, builder, network.definition, config, plan)
        if monitor.failure is not None:
            raise monitor.failure
        if interrupted.is_set():
            return []  # no: KeyboardInterrupt is raised on the way out
        if logger.faults or not written:
            raise _refusal(library, name, "its compiler", logger.faults)
        if library.__name__ == "tensorrt" and timing_cache is not None:
            timing_cache.write_bytes(config.get_timing_cache().serialize())
        progress(doing, 1000, 1000)
        return [_kernel(line) for line in logger.kernels]


def cache_copies(kernels: list[Kernel], cache_length: int, head_dim: int) -> list[str]:
    """Which kernels copy or expand a whole KV cache: "kernel: cache"; a well compiled engine has none.

    A kernel that reads a cache may write rows of a cache, or the attention's output, which has no cache dimension.
    """
    copies = []
    for kernel in kernels:
        caches = [name for name in kernel.inputs if name.startswith(("past_key_values.", "present."))]
        for name, shape in kernel.outputs.items():
            size = np.prod([dim for dim in shape if dim > 0])
            whole = cache_length in shape and size >= cache_length * head_dim
            if caches and whole and not name.startswith("present."):
                copies.append(f"{kernel.name}: {caches[0]}")
    return copies


class Network:
    """A library's network as it was parsed from an ONNX graph, with what the graph says of it."""

    def __init__(self, library: ModuleType, definition: Any, model: onnx.GraphProto):
        self.library, self.definition, self._model = library, definition, model
        self._dimensions = {  # of each input
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in model.input
        }
        self._constants: list[np.ndarray] = []  # the library keeps addresses

    def check_parsed(self, name: str) -> None:
        """Every input is there, and so is a fused layer for each attention and each KV cache update.

        Raises:
            BuildError: the parser dropped or took apart one of them.
        """
        inputs = {self.definition.get_input(i).name for i in range(self.definition.num_inputs)}
        dropped = [value.name for value in self._model.input if value.name not in inputs]
        if dropped:
            raise _refusal(self.library, name, "its parser", [f"inputs {', '.join(dropped)} are gone"])
        types = [layer.type for layer in self._layers()]
        for op_type, layer_type in (("Attention", "ATTENTION_INPUT"), ("TensorScatter", "KV_CACHE_UPDATE")):
            wanted = sum(node.op_type == op_type for node in self._model.node)
            found = types.count(getattr(self.library.LayerType, layer_type))
            if found != wanted:
                raise _refusal(
                    self.library, name, "its parser", [f"{wanted} {op_type} nodes became {found} {layer_type} layers"]
                )

    def read_caches_in_place(self) -> None:
        """Put every attention into the form whose kernel reads its KV caches where they lie: see the module's text."""
        library, layers = self.library, self._layers()
        producers = {layer.get_output(0).name: layer for layer in layers}
        attentions = [layer for layer in layers if layer.type == library.LayerType.ATTENTION_INPUT]
        nodes = [node for node in self._model.node if node.op_type == "Attention"]
        for index, (layer, node) in enumerate(zip(attentions, nodes, strict=True)):
            rotary, cache = producers[node.input[0]], producers[node.input[1]].get_output(0)
            query, (_, kv_heads, _, _) = rotary.get_input(0), cache.shape
            heads = query.shape[1]
            (scale,) = (attribute.f for attribute in node.attribute if attribute.name == "scale")
            query = self._product(query, scale)
            if heads == kv_heads:
                # Without groups there is no replication that a kernel could do without, and the cache is copied as it
                # is. So every head becomes a group of two, of which the second is thrown away.
                query = self.gather(query, np.repeat(np.arange(heads), 2))
            rotary.set_input(0, query)
            query = rotary.get_output(0)
            query.name = f"query.{index}"
            self.definition.mark_output(query)
            layer.set_input(0, query)
            layer.set_input(1, cache)
            if heads == kv_heads:
                attended = producers[node.output[0]].get_output(0)
                readers = [
                    (reader, i)
                    for reader in layers
                    for i in range(reader.num_inputs)
                    if reader.get_input(i) is not None and reader.get_input(i).name == attended.name
                ]
                kept = self.gather(attended, np.arange(0, 2 * heads, 2))
                for reader, i in readers:
                    reader.set_input(i, kept)

    def profile(self, builder: Any, ranges: Profile) -> Any:
        """An optimisation profile that gives every dynamic dimension of every input its range."""
        profile = builder.create_optimization_profile()
        for name, dimensions in self._dimensions.items():
            sizes = [ranges[dim] if isinstance(dim, str) else (dim, dim, dim) for dim in dimensions]
            profile.set_shape(name, *zip(*sizes, strict=True))
        return profile

    def input(self, name: str, dtype: str, dimensions: list[int | str]) -> Any:
        """Add an input; a dimension is a number or, where it varies, a name."""
        self._dimensions[name] = list(dimensions)
        shape = [-1 if isinstance(dim, str) else dim for dim in dimensions]
        return self.definition.add_input(name, getattr(self.library, dtype), shape)

    def output(self, tensor: Any, name: str) -> None:
        """Make ``tensor`` an output, called ``name``."""
        tensor.name = name
        self.definition.mark_output(tensor)

    def tensor(self, name: str) -> Any:
        """The tensor of the output ``name``."""
        outputs = (self.definition.get_output(i) for i in range(self.definition.num_outputs))
        return next(output for output in outputs if output.name == name)

    def constant(self, values: np.ndarray) -> Any:
        """A constant tensor."""
        self._constants.append(np.ascontiguousarray(values))
        return self.definition.add_constant(values.shape, self.library.Weights(self._constants[-1])).get_output(0)

    def gather(self, tensor: Any, heads: np.ndarray) -> Any:
        """Those heads of [batch, heads, rows, head_dim]."""
        return self.definition.add_gather(tensor, self.constant(heads.astype(np.int32)), 1).get_output(0)

    def _product(self, tensor: Any, factor: float) -> Any:
        constant = self.constant(np.full((1, 1, 1, 1), factor, np.float32))
        cast = self.definition.add_cast(constant, tensor.dtype).get_output(0)
        product = self.library.ElementWiseOperation.PROD
        return self.definition.add_elementwise(tensor, cast, product).get_output(0)

    def _layers(self) -> list[Any]:
        return [self.definition.get_layer(i) for i in range(self.definition.num_layers)]


def _write_plan(library: ModuleType, builder: Any, network: Any, config: Any, plan: Path) -> bool:
    """Build and write. In pieces, where the library can: it holds one copy of the weights less then."""
    if hasattr(builder, "build_serialized_network_to_stream"):

        class Writer(library.IStreamWriter):  # type: ignore[name-defined]
            def __init__(self) -> None:
                library.IStreamWriter.__init__(self)
                self.failure: OSError | None = None

            def write(self, data: bytes) -> int:
                try:
                    return stream.write(data)
                except OSError as error:  # such as a full disk; it has no way through the library
                    self.failure = error
                    return 0

        writer = Writer()
        with plan.open("wb") as stream:
            written = builder.build_serialized_network_to_stream(network, config, writer)
        if writer.failure is not None:
            raise writer.failure
        return bool(written)
    serialized = builder.build_serialized_network(network, config)
    if serialized is not None:
        plan.write_bytes(serialized)
    return serialized is not None


def _refusal(library: ModuleType, graph: str, who: str, errors: list[str]) -> BuildError:
    reasons = "; ".join(" ".join(error.split()) for error in errors) or "no reason given"
    return BuildError(
        f"{library.__name__} {library.__version__} cannot build {graph}, says {who}: {reasons} "
        "(try another version of the library, and report this one)"
    )


@functools.cache
def _logger(library: ModuleType) -> Any:
    """The logger of the library, which takes no second one in a process."""
    severity = library.ILogger.Severity

    class Logger(library.ILogger):  # type: ignore[name-defined]
        def __init__(self) -> None:
            library.ILogger.__init__(self)
            self.clear()

        def clear(self) -> None:
            self.faults: list[str] = []  # whatever the library makes of them
            self.kernels: list[str] = []  # descriptions

        def log(self, level: Any, message: str) -> None:
            if level in (severity.ERROR, severity.INTERNAL_ERROR) or message.startswith("Unused Input"):
                self.faults.append(message)
            elif level == severity.VERBOSE and "LayerType: " in message:
                self.kernels += [line for line in message.splitlines() if line.startswith("Name: ")]

    return Logger()


_TENSOR = re.compile(r"Name: ([^,]+?)(?: \[profile \d+\])?, Dimensions: \[([-\d,]*)\]")


def _kernel(line: str) -> Kernel:
    """A line of the log, ``Name: ..., LayerType: ..., Inputs: [...], Constants: [...], Outputs: [...], ...``."""
    head, _, rest = line.partition(", Inputs: [")
    before, _, after = rest.partition("Outputs: [")
    inputs = before.partition("], Constants: [")[0]
    outputs = after.partition("], TacticName: ")[0]

    def tensors(text: str) -> dict[str, tuple[int, ...]]:
        return {name: tuple(int(dim) for dim in dims.split(",") if dim) for name, dims in _TENSOR.findall(text)}

    return Kernel(head.removeprefix("Name: ").partition(", LayerType: ")[0], tensors(inputs), tensors(outputs))


def _monitor(library: ModuleType, doing: str, progress: Progress, interrupted: threading.Event) -> Any:
    """Tells ``progress`` how far the library is, and the library to stop once ``interrupted`` is set."""

    class Monitor(library.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self.failure: BaseException | None = None
            self._phases: dict[str, list] = {}  # running: name -> [parent, steps, steps done]
            self._reached = 0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._phases[phase] = [parent, steps, 0]

        def phase_finish(self, phase: str) -> None:
            self._phases.pop(phase, None)

        def step_complete(self, phase: str, step: int) -> bool:
            if phase in self._phases:
                self._phases[phase][2] = step + 1
            reached = int(1000 * self._done(None))
            if reached > self._reached:
                self._reached = reached
                try:
                    progress(doing, reached, 1000)
                except BaseException as error:  # it has no way through the library
                    self.failure = error
            return self.failure is None and not interrupted.is_set()

        def _done(self, phase: str | None) -> float:
            """The fraction done of ``phase``, or of all, with what is done of the phases inside."""
            inside = [name for name, (parent, _, _) in self._phases.items() if parent == phase]
            part = max(map(self._done, inside), default=0.0)
            if phase is None:
                return part
            _, steps, done = self._phases[phase]
            return min((done + part) / max(steps, 1), 1.0)

    return Monitor()


@contextlib.contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, and is raised when the block has ended: an exception has no way through the library."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # Ctrl-C is the main thread's
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed.is_set():
            raise KeyboardInterrupt
