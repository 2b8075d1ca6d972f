"""A module that stands in for ``tensorrt`` where its library is missing, and does with a plugin what TensorRT does.

It is made of public facts: names and signatures from the published documentation (``test_tensorrt_types`` compares them
with the type stubs), and the order in which a builder calls a plugin. NVIDIA's own ``tensorrt/plugin/*.py``, out of a
bindings wheel, runs on top of it unchanged, so its checks of a declaration are the real ones.

It computes nothing: ``build`` gives the launches an engine would do, and ``IPluginV3`` plugins launch themselves.
"""

import enum
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

# ---------------------------------------------------------------------------------------------------------------------
# Enumerations. Their values differ from one TensorRT to the next, so nothing may depend on them.
# ---------------------------------------------------------------------------------------------------------------------

DataType = enum.Enum("DataType", "FLOAT HALF INT8 INT32 BOOL UINT8 FP8 BF16 INT64 INT4 FP4 E8M0")
TensorFormat = enum.Enum("TensorFormat", "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 HWC")
DimensionOperation = enum.Enum("DimensionOperation", "SUM PROD MAX MIN SUB EQUAL LESS FLOOR_DIV CEIL_DIV")
PluginFieldType = enum.Enum(
    "PluginFieldType", "FLOAT16 FLOAT32 FLOAT64 INT8 INT16 INT32 INT64 CHAR DIMS UNKNOWN BF16 FP8 INT4 FP4"
)
PluginCapabilityType = enum.Enum("PluginCapabilityType", "CORE BUILD RUNTIME")
QuickPluginCreationRequest = enum.Enum(
    "QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT"
)
TensorRTPhase = enum.Enum("TensorRTPhase", "BUILD RUNTIME")
PluginArgType = enum.Enum("PluginArgType", "INT")
PluginArgDataType = enum.Enum("PluginArgDataType", "INT8 INT16 INT32")

_ALIASES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int8": "INT8",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "bool": "BOOL",
}
_FIELD_DTYPES = {
    PluginFieldType.FLOAT32: np.float32,
    PluginFieldType.FLOAT64: np.float64,
    PluginFieldType.INT8: np.int8,
    PluginFieldType.INT32: np.int32,
    PluginFieldType.INT64: np.int64,
}

# ---------------------------------------------------------------------------------------------------------------------
# Plain data
# ---------------------------------------------------------------------------------------------------------------------


class Logger:
    WARNING = "W"

    def log(self, severity: Any, msg: str) -> None:
        pass


class OneElementArray(np.ndarray):
    """What a field's data is under NumPy below 2.4: an array of one element turns into a number."""

    def __int__(self) -> int:
        return int(self.item())


class PluginField:
    data_class: type[np.ndarray] = OneElementArray
    repeats_first = False  # up to TensorRT 10.15

    def __init__(self, name: str = "", data: Any = b"", type: PluginFieldType = PluginFieldType.UNKNOWN) -> None:
        self.name, self.type = name, type
        self._data = np.asarray(data).astype(_FIELD_DTYPES[type])
        self._owner = weakref.ref(self)

    @property
    def data(self) -> np.ndarray:
        if self._owner() is None:
            raise ReferenceError(f"the data of field {self.name} is gone: nothing kept the field that owns it")
        shown = np.repeat(self._data[:1], self._data.size) if self.repeats_first else self._data
        return shown.view(self.data_class)


class PluginFieldCollection:
    """Holds copies of fields that point to the data of the fields they were copied from."""

    def __init__(self, arg0: Iterable[PluginField] = ()) -> None:
        self._fields = [copy(field) for field in arg0]

    def __len__(self) -> int:
        return len(self._fields)

    def __getitem__(self, index: int) -> PluginField:
        return self._fields[index]


class Dims(tuple):
    MAX_DIMS = 8

    def __new__(cls, shape: Any = ()) -> "Dims":
        return super().__new__(cls, () if shape == 0 else shape)


class PluginTensorDesc:
    def __init__(self) -> None:
        self.dims, self.format, self.scale, self.type = Dims(), TensorFormat.LINEAR, 1.0, DataType.FLOAT


class DynamicPluginTensorDesc:
    def __init__(self) -> None:
        self.desc = PluginTensorDesc()
        self.min = self.opt = self.max = Dims()


class IDimensionExpr:
    """``axis`` of the network input ``tensor``, a constant, or an operation on two expressions."""

    def __init__(self, operation: DimensionOperation | None, *operands: Any) -> None:
        self.operation, self.operands = operation, operands

    def is_constant(self) -> bool:
        if self.operation is None:
            return len(self.operands) == 1
        return all(operand.is_constant() for operand in self.operands)

    def get_constant_value(self) -> int:
        assert self.is_constant()
        return self.value({})

    def is_size_tensor(self) -> bool:
        return False

    def value(self, shapes: dict[str, Sequence[int]]) -> int:
        if self.operation is None:
            return self.operands[0] if self.is_constant() else shapes[self.operands[0]][self.operands[1]]
        a, b = (operand.value(shapes) for operand in self.operands)
        values = {
            "SUM": lambda: a + b,
            "PROD": lambda: a * b,
            "MAX": lambda: max(a, b),
            "MIN": lambda: min(a, b),
            "SUB": lambda: a - b,
            "FLOOR_DIV": lambda: a // b,
            "CEIL_DIV": lambda: -(-a // b),
        }
        return values[self.operation.name]()


class IExprBuilder:
    def constant(self, arg0: int) -> IDimensionExpr:
        if not isinstance(arg0, int):
            raise TypeError(f"constant(): incompatible argument {arg0!r}")
        return IDimensionExpr(None, arg0)

    def operation(self, arg0: DimensionOperation, arg1: IDimensionExpr, arg2: IDimensionExpr) -> IDimensionExpr:
        if not isinstance(arg1, IDimensionExpr) or not isinstance(arg2, IDimensionExpr):
            raise TypeError(f"operation(): incompatible arguments {arg1!r}, {arg2!r}")
        return IDimensionExpr(arg0, arg1, arg2)


class DimsExprs(list):
    def __init__(self, arg0: int | list[IDimensionExpr] = 0) -> None:
        super().__init__([None] * arg0 if isinstance(arg0, int) else arg0)


class ISymExpr:
    def __init__(self) -> None:
        pass


class ISymExprs(dict):
    nbSymExprs = 0  # noqa: N815


class KernelLaunchParams:
    pass


# ---------------------------------------------------------------------------------------------------------------------
# Interfaces that plugins implement
# ---------------------------------------------------------------------------------------------------------------------


class IVersionedInterface:
    def __init__(self) -> None:
        self.initialised = {*getattr(self, "initialised", ()), *type(self).__mro__}


class IPluginCapability(IVersionedInterface):
    pass


class IPluginV3(IVersionedInterface):
    pass


class IPluginV3OneCore(IPluginCapability):
    pass


class IPluginV3OneBuild(IPluginCapability):
    pass


class IPluginV3OneRuntime(IPluginCapability):
    pass


class IPluginV3QuickCore(IPluginCapability):
    pass


class IPluginV3QuickBuild(IPluginCapability):
    pass


class IPluginV3QuickRuntime(IPluginCapability):
    pass


class IPluginV3QuickAOTBuild(IPluginV3QuickBuild):
    pass


class IPluginCreatorInterface:
    def __init__(self) -> None:
        pass


class IPluginCreatorV3One(IPluginCreatorInterface):
    pass


class IPluginCreatorV3Quick(IPluginCreatorInterface):
    pass


class IPluginRegistry:
    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: IPluginCreatorInterface, plugin_namespace: str = "") -> bool:
        key = (creator.name, creator.plugin_version, plugin_namespace)
        return self.creators.setdefault(key, creator) is creator

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self.creators.get((type, version, plugin_namespace))


# ---------------------------------------------------------------------------------------------------------------------
# A network of plugin layers
# ---------------------------------------------------------------------------------------------------------------------


class ITensor:
    def __init__(self, name: str, dtype: DataType, dims: DimsExprs) -> None:
        self.name, self.dtype, self.dims = name, dtype, dims

    @property
    def shape(self) -> Dims:
        return Dims(size.get_constant_value() if size.is_constant() else -1 for size in self.dims)


class IPluginV3Layer:
    def __init__(self, inputs: list[ITensor], plugin: Any) -> None:
        self.inputs, self.plugin = inputs, plugin
        types = plugin.get_output_data_types([tensor.dtype for tensor in inputs], *self._ranks())
        shapes = plugin.get_output_shapes([tensor.dims for tensor in inputs], [], IExprBuilder())
        assert len(types) == len(shapes) == plugin.num_outputs
        self.outputs = [
            ITensor(f"{plugin.plugin_name}[{i}]", dtype, dims)
            for i, (dtype, dims) in enumerate(zip(types, shapes, strict=True))
        ]

    def _ranks(self) -> tuple[list[int], ...]:
        quick = isinstance(self.plugin, IPluginV3QuickBuild)
        return ([len(tensor.dims) for tensor in self.inputs],) if quick else ()

    def get_output(self, index: int) -> ITensor:
        return self.outputs[index]


class INetworkDefinition:
    def __init__(self) -> None:
        self.inputs: list[ITensor] = []
        self.layers: list[IPluginV3Layer] = []

    def add_input(self, name: str, dtype: DataType, shape: Sequence[int]) -> ITensor:
        dims = [
            IDimensionExpr(None, name, i) if size < 0 else IDimensionExpr(None, size) for i, size in enumerate(shape)
        ]
        self.inputs.append(ITensor(name, dtype, DimsExprs(dims)))
        return self.inputs[-1]

    def add_plugin_v3(self, inputs: list[ITensor], shape_inputs: list[ITensor], plugin: Any) -> IPluginV3Layer:
        assert not shape_inputs
        self.layers.append(IPluginV3Layer(inputs, plugin))
        return self.layers[-1]

    def add_plugin(self, func: Any, aot: bool) -> IPluginV3Layer:
        request = QuickPluginCreationRequest
        inputs, shape_inputs, plugin = func(request.STRICT_AOT if aot else request.STRICT_JIT)
        return self.add_plugin_v3(inputs, shape_inputs, plugin)

    def add_onnx_node(self, op_type: str, inputs: list[ITensor], attributes: dict[str, int | str]) -> IPluginV3Layer:
        """What TensorRT's ONNX parser does with a node it has no layer for: the creator's fields become int32s."""
        creator = get_plugin_registry().get_creator(op_type, "1", attributes["plugin_namespace"])
        given = [
            PluginField(field.name, np.array([attributes[field.name]]), PluginFieldType.INT32)
            for field in creator.field_names
            if field.name in attributes
        ]
        fields = PluginFieldCollection(given)
        if isinstance(creator, IPluginCreatorV3Quick):
            request = QuickPluginCreationRequest
            plugin = creator.create_plugin(
                op_type,
                attributes["plugin_namespace"],
                fields,
                TensorRTPhase.BUILD,
                request.STRICT_AOT if attributes["aot"] else request.STRICT_JIT,
            )
        else:
            plugin = creator.create_plugin(op_type, fields, TensorRTPhase.BUILD)
        return self.add_plugin_v3(inputs, [], plugin)


# ---------------------------------------------------------------------------------------------------------------------
# What a builder does with a layer
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """One kernel launch of an engine at given shapes."""

    entry: str
    code: bytes
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    scalars: list[int]
    outputs: list[tuple[tuple[int, ...], DataType]]


def format_combinations(layer: IPluginV3Layer, shapes: dict[str, Sequence[int]]) -> list[list[DataType]]:
    """Every combination of types, all in linear format, that the plugin takes."""
    descs = _descs(layer, shapes)
    plugin, count = layer.plugin, len(layer.inputs)
    if isinstance(plugin, IPluginV3QuickBuild):
        flat = plugin.get_supported_format_combinations(descs, count)
        assert all(each.format == TensorFormat.LINEAR for each in flat)
        return [[each.type for each in flat[i : i + len(descs)]] for i in range(0, len(flat), len(descs))]
    combinations: list[list[DataType]] = [[]]
    for pos in range(len(descs)):
        taken = []
        for before in combinations:
            for each, dtype in zip(descs, before, strict=False):
                each.desc.type = dtype
            for descs[pos].desc.format in TensorFormat:
                for descs[pos].desc.type in DataType:
                    if plugin.supports_format_combination(pos, descs, count):
                        assert descs[pos].desc.format == TensorFormat.LINEAR
                        taken.append([*before, descs[pos].desc.type])
            descs[pos].desc.format = TensorFormat.LINEAR
        combinations = taken
    return combinations


def build(layer: IPluginV3Layer, optimum: dict[str, Sequence[int]]) -> "BuiltLayer":
    """Builds a layer in the types of its tensors, as a strongly typed network is, for these optimal shapes."""
    descs, count, plugin = _descs(layer, optimum), len(layer.inputs), layer.plugin
    wanted = [each.desc.type for each in descs]
    assert wanted in format_combinations(layer, optimum)
    plugin = plugin.clone()
    plugin.configure_plugin(descs[:count], descs[count:])
    tactics = plugin.get_valid_tactics() or [0]
    plugin.set_tactic(tactics[0])
    return BuiltLayer(layer, plugin, descs)


class BuiltLayer:
    def __init__(self, layer: IPluginV3Layer, plugin: Any, descs: list[DynamicPluginTensorDesc]) -> None:
        self.layer, self.plugin, self.descs = layer, plugin, descs
        if isinstance(plugin, IPluginV3QuickAOTBuild):
            count = len(layer.inputs)
            self.parameters, self.scalars = KernelLaunchParams(), ISymExprs()
            dims = [tensor.dims for tensor in layer.inputs]
            plugin.get_launch_params(dims, descs, count, self.parameters, self.scalars, IExprBuilder())
            plain = [each.desc for each in descs]
            self.entry, self.code = plugin.get_kernel(plain[:count], plain[count:])

    def launch(self, shapes: dict[str, Sequence[int]]) -> Launch:
        """An AOT plugin's launch when the network's inputs have these shapes."""

        def numbers(*names: str) -> tuple[int, ...]:
            return tuple(getattr(self.parameters, name).expr.value(shapes) for name in names)

        scalars = [self.scalars[i] for i in range(self.scalars.nbSymExprs)]
        assert all(scalar.dtype == PluginArgDataType.INT32 for scalar in scalars)
        return Launch(
            self.entry,
            self.code,
            numbers("grid_x", "grid_y", "grid_z"),
            numbers("block_x", "block_y", "block_z"),
            numbers("shared_mem")[0],
            [scalar.expr.value(shapes) for scalar in scalars],
            self.outputs(shapes),
        )

    def outputs(self, shapes: dict[str, Sequence[int]]) -> list[tuple[tuple[int, ...], DataType]]:
        return [(tuple(size.value(shapes) for size in each.dims), each.dtype) for each in self.layer.outputs]

    def enqueue(self, shapes: dict[str, Sequence[int]], inputs: list[int], outputs: list[int], stream: int) -> None:
        """A plugin that launches itself: an engine's run over device pointers."""
        count = len(self.layer.inputs)
        descs = [each.desc for each in _descs(self.layer, shapes, static=True)]
        if isinstance(self.plugin, IPluginV3QuickRuntime):
            strides = [tuple(np.cumprod([1, *each.dims[:0:-1]])[::-1].tolist()) for each in descs]
            self.plugin.enqueue(descs[:count], descs[count:], inputs, outputs, strides[:count], strides[count:], stream)
            return
        creator = get_plugin_registry().get_creator(
            self.plugin.plugin_name, self.plugin.plugin_version, self.plugin.plugin_namespace
        )
        fields = self.plugin.get_fields_to_serialize()
        runtime = creator.create_plugin(self.plugin.plugin_name, fields, TensorRTPhase.RUNTIME)
        runtime = runtime.attach_to_context(None)
        runtime.on_shape_change(descs[:count], descs[count:])
        runtime.enqueue(descs[:count], descs[count:], inputs, outputs, 0, stream)


def _descs(
    layer: IPluginV3Layer, shapes: dict[str, Sequence[int]], *, static: bool = False
) -> list[DynamicPluginTensorDesc]:
    descs = []
    for tensor in layer.inputs + layer.outputs:
        each = DynamicPluginTensorDesc()
        each.min = each.opt = each.max = Dims(size.value(shapes) for size in tensor.dims)
        each.desc.dims = each.opt if static else tensor.shape
        each.desc.type = tensor.dtype
        descs.append(each)
    return descs


# ---------------------------------------------------------------------------------------------------------------------
# The module
# ---------------------------------------------------------------------------------------------------------------------


def get_plugin_registry() -> IPluginRegistry:
    return sys.modules["tensorrt"].registry


def nptype(trt_type: DataType) -> Any:
    return {"FLOAT": np.float32, "HALF": np.float16, "INT32": np.int32, "INT64": np.int64}[trt_type.name]


@contextmanager
def installed(version: str, plugin_folder: Path) -> Iterator[ModuleType]:
    """``import tensorrt`` gives the stand-in, with NVIDIA's ``tensorrt.plugin`` of this version from its wheel."""
    module = ModuleType("tensorrt")
    module.__path__ = []
    module.__version__ = version
    module.registry = IPluginRegistry()
    PluginField.repeats_first = tuple(int(part) for part in version.split(".")[:2]) <= (10, 15)
    for name, value in globals().items():
        if getattr(value, "__module__", "") == __name__:
            setattr(module, name, value)
    for alias, name in _ALIASES.items():
        setattr(module, alias, DataType[name])

    before = {name: sys.modules[name] for name in sys.modules if name.split(".")[0] == "tensorrt"}
    for name in before:
        del sys.modules[name]
    sys.modules["tensorrt"] = module
    try:
        spec = util.spec_from_file_location(
            "tensorrt.plugin", plugin_folder / "__init__.py", submodule_search_locations=[str(plugin_folder)]
        )
        sys.modules["tensorrt.plugin"] = module.plugin = util.module_from_spec(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # escapes in NVIDIA's docstrings
            spec.loader.exec_module(module.plugin)
        yield module
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tensorrt"]:
            del sys.modules[name]
        sys.modules.update(before)
