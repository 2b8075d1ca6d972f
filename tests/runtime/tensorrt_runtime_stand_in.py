"""Modules that stand in for ``tensorrt`` and ``tensorrt_rtx`` where there is no GPU, with engines that are ONNX models.

``install`` puts them in place: ``build_engine`` then writes engine directories, by the builder's own code but for the
library's parser and compiler, and the runtime's code for a GPU opens and runs them. An execution context computes with
ONNX Runtime on whatever lies at the addresses that it was given. Tree operations inside an engine are computed by
``ddtree.plugins`` on the same addresses.

Names and signatures are those of the published type stubs (``test_tensorrt_runtime.py`` compares them). What the real
library refuses is refused: a shape outside of the profile, a missing address, caches that do not stay in place, a pass
that is recorded before its context has run, a replay after its context got other shapes.

It says nothing about time, nor about what a GPU's arithmetic gives.
"""

import ctypes
import enum
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import ddtree.plugins
from ddtree.builder import build as builder_build
from ddtree.builder import plans
from ddtree.builder.compile import Network
from ddtree.plugins import launch, reference
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, OPERATIONS, VERIFY_TREE
from ddtree.plugins.tree import DraftTree, SamplingTensors

from . import cuda_stand_in

VERSIONS = {"tensorrt": "10.15.1", "tensorrt_rtx": "1.7.1"}

# ---------------------------------------------------------------------------------------------------------------------
# Enumerations and types. Their values differ from one version to the next, so nothing may depend on them.
# ---------------------------------------------------------------------------------------------------------------------

DataType = enum.Enum("DataType", "FLOAT HALF BF16 INT32 INT64")
TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT")
ExecutionContextAllocationStrategy = enum.Enum(
    "ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED"
)
DynamicShapesKernelSpecializationStrategy = enum.Enum("DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE")

_ALIASES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}
_TORCH = {DataType[of]: getattr(torch, name) for name, of in _ALIASES.items()}
_ONNX = {
    DataType.FLOAT: TensorProto.FLOAT,
    DataType.HALF: TensorProto.FLOAT16,
    DataType.BF16: TensorProto.BFLOAT16,
    DataType.INT32: TensorProto.INT32,
    DataType.INT64: TensorProto.INT64,
}


class Dims(tuple):
    def __new__(cls, shape: Sequence[int] = ()) -> "Dims":
        return super().__new__(cls, shape)


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def __init__(self) -> None:
        pass

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------------------------
# Runtime
# ---------------------------------------------------------------------------------------------------------------------


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.logger = logger

    def deserialize_cuda_engine(self, serialized_engine: Any) -> "ICudaEngine | None":
        content = bytes(serialized_engine)
        if not content.startswith(MAGIC):
            self.logger.log(ILogger.Severity.ERROR, "stand-in: the engine's header is not there")
            return None
        size = int.from_bytes(content[len(MAGIC) : len(MAGIC) + 8], "little")
        header, model = content[len(MAGIC) + 8 :][:size], content[len(MAGIC) + 8 + size :]
        engine = ICudaEngine if json.loads(header)["library"] == "tensorrt" else RtxCudaEngine
        if _version() < (10, 15) and sys.modules["ddtree.plugins.tensorrt"].face != "v3":
            self.logger.log(ILogger.Severity.ERROR, "stand-in: no plugin ddtree::verify_tree is registered")
            return None
        return engine(self.logger, json.loads(header)["profiles"], onnx.load_from_string(model))


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in sys.modules["tensorrt"].__version__.split(".")[:2])


class ICudaEngine:
    def __init__(self, logger: ILogger, profiles: list[dict], model: onnx.ModelProto) -> None:
        self._logger, self._profiles, self._model = logger, profiles, model
        graph = model.graph
        self._values = {value.name: value.type.tensor_type for value in (*graph.input, *graph.output)}
        self._inputs = [value.name for value in graph.input]
        self._names = list(self._values)
        self._tree_nodes = [node for node in graph.node if node.domain == "ddtree"]
        self._constants = {
            tensor.name: torch.from_numpy(numpy_helper.to_array(tensor).copy())
            for tensor in graph.initializer
            if any(tensor.name in node.input for node in self._tree_nodes)
        }
        self._session = self._open(model)
        self._sizes = {value.name: value.shape for value in self._session.get_outputs()}

    def _open(self, model: onnx.ModelProto) -> ort.InferenceSession:
        """ONNX Runtime's session of all but the tree operations; its outputs are also what these read."""
        base = onnx.ModelProto()
        base.CopyFrom(model)
        graph = base.graph
        read = {name for node in self._tree_nodes for name in node.input}
        plain = [node for node in graph.node if node.domain != "ddtree"]
        made = {name for node in plain for name in node.output}
        outputs = [value for value in graph.output if value.name in made]
        for name in sorted((read & made) - {value.name for value in outputs}):
            outputs.append(next(value for value in graph.value_info if value.name == name))
        used = {name for node in plain for name in node.input}
        inputs = [value for value in graph.input if value.name in used]
        for field, kept in ((graph.node, plain), (graph.output, outputs), (graph.input, inputs)):
            copies = [type(each).FromString(each.SerializeToString()) for each in kept]
            del field[:]
            field.extend(copies)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        return ort.InferenceSession(base.SerializeToString(), options, providers=["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._profiles)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self._inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        of = self._values[name].elem_type
        return next(dtype for dtype, onnx_type in _ONNX.items() if onnx_type == of)

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(dim.dim_value if dim.HasField("dim_value") else -1 for dim in self._values[name].shape.dim)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        return [Dims(shape) for shape in self._profiles[profile_index][name]]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return 4096 * (profile_index + 1)

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC
    ) -> "IExecutionContext":
        return IExecutionContext(self, strategy)

    # What TensorRT does not have

    def _prepared(self, addresses: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Callable[[], None]:
        """A pass that reads inputs and writes outputs at their addresses."""
        tensors = {name: self._at(addresses[name], name, shapes[name]) for name in addresses} | self._constants
        binding = self._session.io_binding()
        for value in self._session.get_inputs():
            _bind(binding.bind_input, value.name, tensors[value.name])
        for value in self._session.get_outputs():
            if value.name not in tensors:  # only tree operations read it
                dtype = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}[value.type]
                tensors[value.name] = torch.empty(shapes[value.name], dtype=dtype)
            _bind(binding.bind_output, value.name, tensors[value.name])

        def run() -> None:
            with cuda_stand_in.on_device():
                for name in ("input_ids", "block_ids"):  # ONNX counts these from the end, a GPU reads what is there
                    if name in tensors and int(tensors[name].min()) < 0:
                        raise RuntimeError("CUDA error: an illegal memory access was encountered")
                self._session.run_with_iobinding(binding)
                for node in self._tree_nodes:
                    self._run_tree_node(node, tensors)

        return run

    def _run_tree_node(self, node: onnx.NodeProto, tensors: Mapping[str, torch.Tensor]) -> None:
        if node.op_type == DRAFT_TOPK.name:
            return  # part of build_tree here
        if node.op_type == BUILD_TREE.name:
            (topk,) = (each for each in self._tree_nodes if node.input[0] in each.output)
            logits, table = (tensors[name] for name in topk.input)
            (budget,) = (each.i for each in node.attribute if each.name == "budget")
            result: Any = reference.build_tree(
                logits, tensors[node.input[2]], budget=budget, draft_to_target=table if table.numel() else None
            )
        else:
            given = {spec.name: tensors[name] for spec, name in zip(VERIFY_TREE.inputs, node.input, strict=True)}
            result = reference.verify_tree(
                given["logits"],
                _tree(given, given["max_depth_shape"].numel()),
                given["root_positions"],
                SamplingTensors(*(given[name] for name in SamplingTensors.__annotations__)),
                token_bitmask=given["token_bitmask"] if given["token_bitmask"].numel() else None,
            )
        for spec, name in zip(OPERATIONS[node.op_type].outputs, node.output, strict=True):
            if name in tensors:
                tensors[name].copy_(getattr(result, spec.name))

    def _at(self, address: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = _TORCH[self.get_tensor_dtype(name)]
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype).view(shape)

    def _output_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Of all that is computed, for these shapes of the inputs."""
        sizes: dict[str, int] = {}
        for value in self._model.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                if dim.dim_param:
                    assert sizes.setdefault(dim.dim_param, size) == size, f"{value.name}: {dim.dim_param} is {size}"
        if "input_ids" in shapes:
            sizes["updated"] = shapes["input_ids"][1]
        else:
            sizes["updated"] = shapes["context_features"][1] + shapes["block_ids"][1]
        known = dict(shapes) | {name: tuple(tensor.shape) for name, tensor in self._constants.items()}
        known |= {
            name: tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
            for name, dims in self._sizes.items()
        }
        for node in self._tree_nodes:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            operation = OPERATIONS[node.op_type]
            words = {each.name: each.choices[attributes[each.name]] for each in operation.attributes if each.choices}
            of = operation.sizes([known[name] for name in node.input], **(attributes | words))
            known |= dict(zip(node.output, operation.output_shapes(of), strict=True))
        return known


class IExecutionContext:
    launches: list[int] = []  # noqa: RUF012 (of all contexts: the profile of each pass that was not replayed)

    def __init__(self, engine: ICudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine = engine
        self.active_optimization_profile = 0
        self._memory = 0 if strategy == ExecutionContextAllocationStrategy.USER_MANAGED else 1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._generation = 0  # of shapes
        self._ran = -1  # the generation that has run
        self._recorded = False

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.get_device_memory_size_for_profile_v2(self.active_optimization_profile)
        self._memory = memory

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        cuda_stand_in.stream_of(stream_handle)
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return self._refuse(f"there is no profile {profile_index}")
        self.active_optimization_profile = profile_index
        self._shapes.clear()
        self._generation += 1
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if name not in self.engine._inputs:
            return self._refuse(f"{name} is no input")
        least, _, most = self.engine.get_tensor_profile_shape(name, self.active_optimization_profile)
        if len(shape) != len(least) or not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            return self._refuse(f"{name} of shape {list(shape)} is outside of {list(least)} to {list(most)}")
        self._shapes[name] = tuple(shape)
        self._generation += 1
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> Dims:
        if self.infer_shapes():
            return Dims((-1,) * len(self.engine.get_tensor_shape(name)))
        return Dims(self.engine._output_shapes(self._shapes)[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine._names or memory == 0:
            return self._refuse(f"{name} cannot be at {memory}")
        if self._recorded and self._addresses.get(name) != memory:
            return self._refuse(f"{name} gets another address, though a graph holds this context")
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream, names = cuda_stand_in.stream_of(stream_handle), self.engine._names
        if missing := self.infer_shapes():
            return self._refuse(f"no shape of {', '.join(missing)}")
        if missing := [name for name in names if name not in self._addresses]:
            return self._refuse(f"no address of {', '.join(missing)}")
        if not self._memory:
            return self._refuse("no device memory")
        for name in names:
            past = name.replace("present.", "past_key_values.")
            if name.startswith("present.") and self._addresses[name] != self._addresses[past]:
                return self._refuse(f"{name} is not where {past} is")
        generation = self._generation
        if stream.recording is not None and self._ran != generation:
            return self._refuse("a pass is recorded whose shapes this context has not run before")
        with cuda_stand_in.on_device():
            run = self.engine._prepared(self._addresses, self.engine._output_shapes(self._shapes))

        def replay() -> None:
            if self._generation != generation:
                raise RuntimeError("stand-in: a graph is replayed whose context has got other shapes since")
            run()

        if stream.recording is not None:
            stream.recording.steps.append(replay)
            self._recorded = True
        else:
            run()
            self._ran = generation
            self.launches.append(self.active_optimization_profile)
        return True

    def _refuse(self, why: str) -> bool:
        self.engine._logger.log(ILogger.Severity.ERROR, f"stand-in: {why}")
        return False


def _bind(bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
    bind(name, "cpu", 0, tensor.numpy().dtype, tuple(tensor.shape), tensor.data_ptr())


def _tree(given: Mapping[str, torch.Tensor], max_depth: int) -> DraftTree:
    """The tree of which verify_tree is given some fields: parents and depths follow from the links."""
    token_ids, next_token, next_sibling = (given[name] for name in ("token_ids", "next_token", "next_sibling"))
    parents, depths = torch.full_like(token_ids, -1), torch.zeros_like(token_ids)
    for slot, count in enumerate(given["node_count"].tolist()):
        for node in range(count):
            child = int(next_token[slot, node])
            while child >= 0:
                parents[slot, child], depths[slot, child] = node, depths[slot, node] + 1
                child = int(next_sibling[slot, child])
    batch, nodes = token_ids.shape
    return DraftTree(
        token_ids,
        parents,
        depths,
        torch.zeros(batch, nodes),
        given["node_count"],
        next_token,
        next_sibling,
        torch.zeros(batch, nodes, (nodes + 31) // 32, dtype=torch.int32),
        max_depth,
    )


# ---------------------------------------------------------------------------------------------------------------------
# TensorRT for RTX: contexts are made of a configuration, and keep what they have compiled
# ---------------------------------------------------------------------------------------------------------------------


class IRuntimeCache:
    def __init__(self) -> None:
        self.content = b""

    def deserialize(self, blob: Any) -> bool:
        self.content = bytes(blob)
        return True

    def serialize(self) -> bytes:
        return self.content


class IRuntimeConfig:
    def __init__(self) -> None:
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY
        self._strategy = ExecutionContextAllocationStrategy.STATIC
        self._cache = IRuntimeCache()

    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache()

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        self._cache = cache
        return True

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self._strategy = strategy


class RtxExecutionContext(IExecutionContext):
    def is_stream_capturable(self, stream: int) -> bool:
        return self._ran == self._generation


class RtxCudaEngine(ICudaEngine):
    def create_runtime_config(self) -> IRuntimeConfig:
        return IRuntimeConfig()

    def create_execution_context(self, runtime_config: IRuntimeConfig) -> IExecutionContext:  # type: ignore[override]
        strategy = runtime_config.dynamic_shapes_kernel_specialization_strategy
        runtime_config._cache.content += f"{strategy.name};".encode()
        return RtxExecutionContext(self, runtime_config._strategy)


# ---------------------------------------------------------------------------------------------------------------------
# Building: the builder's own code, with an ONNX model in place of the library's network
# ---------------------------------------------------------------------------------------------------------------------

MAGIC = b"stand-in engine"


class Weights:
    def __init__(self, a: np.ndarray) -> None:
        self.a = a


class ITensor:
    """A value of the model. A name that it is given goes to every place where it is used."""

    def __init__(self, graph: onnx.GraphProto, name: str) -> None:
        self._graph, self._name = graph, name

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        for node in self._graph.node:
            for field in (node.input, node.output):
                for i, each in enumerate(field):
                    if each == self._name:
                        field[i] = name
        self._name = name


class INetworkDefinition:
    """What ``builder.compile.Network`` and the plugins ask of a network, done to an ONNX graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.graph = graph
        self.tensors = {value.name: ITensor(graph, value.name) for value in (*graph.input, *graph.output)}

    @property
    def num_outputs(self) -> int:
        return len(self.graph.output)

    def get_output(self, index: int) -> ITensor:
        return self.tensors[self.graph.output[index].name]

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        self.graph.input.append(helper.make_tensor_value_info(name, _ONNX[dtype], shape))
        return ITensor(self.graph, name)

    def add_constant(self, shape: Sequence[int], weights: Weights) -> Any:
        name = f"constant_{len(self.graph.initializer)}"
        self.graph.initializer.append(numpy_helper.from_array(weights.a.reshape(shape), name))
        return SimpleNamespace(get_output=lambda index: ITensor(self.graph, name))

    def mark_output(self, tensor: ITensor) -> None:
        """Of a tree operation; the names of its sizes say nothing."""
        spec = next(spec for of in (BUILD_TREE, VERIFY_TREE) for spec in of.outputs if spec.name == tensor.name)
        sizes = [f"{tensor.name}.{size}" for size in spec.dimensions]
        self.graph.output.append(
            helper.make_tensor_value_info(tensor.name, _ONNX[DataType[_ALIASES[spec.dtype]]], sizes)
        )

    def unmark_output(self, tensor: ITensor) -> None:
        value = next(value for value in self.graph.output if value.name == tensor.name)
        self.graph.value_info.append(value)
        self.graph.output.remove(value)


class PluginFace(ModuleType):
    """In place of ``ddtree.plugins.tensorrt``: a layer becomes a node of the domain ddtree."""

    def __init__(self) -> None:
        super().__init__("ddtree.plugins.tensorrt")
        self.face = ""

    def register(self, face: str | None = None, *, arch: str | None = None) -> str:
        self.face = face or "quick"
        return self.face

    def add_layer(
        self, network: INetworkDefinition, name: str, inputs: Sequence[ITensor], **attributes: int | str
    ) -> Any:
        operation = OPERATIONS[name]
        outputs = [f"{name}/{spec.name}" for spec in operation.outputs]
        numbers = operation.attribute_numbers(attributes)
        network.graph.node.append(
            helper.make_node(name, [tensor.name for tensor in inputs], outputs, domain="ddtree", **numbers)
        )
        return SimpleNamespace(get_output=lambda index: ITensor(network.graph, outputs[index]))


class Profiles:
    """A library's builder, as far as ``Network.profile`` asks it, and the profile that it makes."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def create_optimization_profile(self) -> "Profiles":
        return Profiles()

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None:
        self.shapes[input] = [list(min), list(opt), list(max)]


def compile_graph(
    library: ModuleType,
    graph: Path,
    plan: Path,
    *,
    arch: str,
    profiles: list[dict],
    extend: Callable[[Network], None] | None = None,
    timing_cache: Path | None = None,
    progress: Callable[[str, int, int], None],
) -> list:
    """In place of the builder's: writes the ONNX model with what the builder adds to it, and the profiles."""
    model = onnx.load(graph, load_external_data=False)
    _take_in_weights(model.graph, graph.parent)
    network = Network(library, INetworkDefinition(model.graph), model.graph)
    _mark_queries(model.graph)
    if extend is not None:
        extend(network)
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, network._dimensions[value.name], strict=True):
            dim.Clear()
            if isinstance(size, str):
                dim.dim_param = size
            else:
                dim.dim_value = size
    shapes = [network.profile(Profiles(), ranges).shapes for ranges in profiles]
    header = json.dumps({"library": library.__name__, "profiles": shapes}).encode()
    plan.write_bytes(MAGIC + len(header).to_bytes(8, "little") + header + model.SerializeToString())
    return []


def _take_in_weights(graph: onnx.GraphProto, folder: Path) -> None:
    """As the library's parser does it. onnx refuses hard links, which the weight files are."""
    for tensor in graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            start, size = int(entry["offset"]), int(entry["length"])
            tensor.raw_data = (folder / entry["location"]).read_bytes()[start : start + size]
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def _mark_queries(graph: onnx.GraphProto) -> None:
    """Each layer's queries are an output, as ``Network.read_caches_in_place`` has it."""
    shapes = {value.name: value.type.tensor_type for value in graph.input}
    weights = {tensor.name: tensor.dims for tensor in graph.initializer}
    attentions = [node for node in graph.node if node.op_type == "Attention"]
    for layer, node in enumerate(attentions):
        cache, mask = shapes[f"past_key_values.{layer}.key"], shapes["attention_mask"]
        batch, _, _, head_dim = cache.shape.dim
        rows = mask.shape.dim[2]
        (width,) = (
            dims[0] for name, dims in weights.items() if name.endswith(f"layers.{layer}.self_attn.q_proj.weight")
        )
        sizes = [batch.dim_param, width // head_dim.dim_value, rows.dim_param or rows.dim_value, head_dim.dim_value]
        graph.node.append(helper.make_node("Identity", [node.input[0]], [f"query.{layer}"]))
        graph.output.append(helper.make_tensor_value_info(f"query.{layer}", cache.elem_type, sizes))


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Put everything in place, and let engines have float32, too, which ONNX Runtime has kernels for.

    Args:
        versions: of the libraries, where not those of ``VERSIONS``.
    """
    cuda_stand_in.install(monkeypatch)
    names = [
        "DataType",
        "Dims",
        "DynamicShapesKernelSpecializationStrategy",
        "ExecutionContextAllocationStrategy",
        "ILogger",
        "Runtime",
        "TensorIOMode",
        "Weights",
    ]
    for name, version in (VERSIONS | versions).items():
        module = ModuleType(name)
        module.__version__ = version  # type: ignore[attr-defined]
        vars(module).update({each: globals()[each] for each in names})
        vars(module).update({alias: DataType[of] for alias, of in _ALIASES.items()})
        monkeypatch.setitem(sys.modules, name, module)
        kind = builder_build._ENGINES[name]
        monkeypatch.setitem(builder_build._ENGINES, name, kind._replace(dtypes=(*kind.dtypes, "float32")))
    face = PluginFace()
    monkeypatch.setitem(sys.modules, "ddtree.plugins.tensorrt", face)
    monkeypatch.setattr(ddtree.plugins, "tensorrt", face, raising=False)
    monkeypatch.setattr(plans, "compile_graph", compile_graph)
    monkeypatch.setattr(launch, "device_arch", lambda: "sm_{}{}".format(*cuda_stand_in.CAPABILITY))
