"""The tree operations as TensorRT plugins ``ddtree::draft_topk``, ``ddtree::build_tree`` and ``ddtree::verify_tree``.

There are two faces with the same nodes, inputs, outputs and attributes, all from the table in ``operations``:

* "quick", quickly deployable plugins (``tensorrt.plugin``): the engine holds the compiled kernel (AOT) and runs
  anywhere, without Python and without a plugin library. TensorRT 10.15 or newer.
* "v3", IPluginV3 classes in Python: the engine calls back into this process, which must have called ``register``.
  TensorRT 10.14 (TensorRT-LLM 1.2) or newer.

Attributes are integers to TensorRT: up to 10.15, its PluginField repeats the first element of anything longer, a
string among them. ``docs/plugin.md`` has the nodes, and what a plugin cannot do.
"""

from collections.abc import Sequence
from inspect import Parameter, Signature
from types import GenericAlias, SimpleNamespace
from typing import Any

import numpy as np

from ddtree.plugins import launch, nvrtc
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE, Operation, TensorSpec

try:
    import tensorrt as trt
except ModuleNotFoundError as error:
    raise ImportError('tensorrt is not installed (pip install "ddtree-trtllm[tensorrt]")') from error

NAMESPACE = "ddtree"
VERSION = "1"
OPERATIONS = {operation.name: operation for operation in (DRAFT_TOPK, BUILD_TREE, VERIFY_TREE)}

_TYPES = {name: getattr(trt, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
_TYPE_NAMES = {trt_type: name for name, trt_type in _TYPES.items()}
_VERSION = tuple(int(part) for part in trt.__version__.split(".")[:2])

_registered: dict[str, str | None] = {}  # "face": TensorRT takes one plugin of a name; "arch": of AOT kernels


def register(face: str | None = None, *, arch: str | None = None) -> str:
    """Makes the plugins known to TensorRT. Call it before a network is made or parsed, and before an engine of face
    "v3" is deserialised. Calling it again changes the architecture alone.

    Args:
        face: "quick" or "v3"; None takes the one in use, else "quick" where this TensorRT has it.
        arch: GPU that the kernels of engines of face "quick" are compiled for, such as "sm_100"; None for the one that
            is present when an engine is built.

    Returns:
        the face.

    Raises:
        ValueError: an unknown face, or another one than before.
        RuntimeError: this TensorRT or NumPy cannot serve the face.
    """
    in_use = _registered.get("face")
    face = face or in_use or ("quick" if _VERSION >= (10, 15) else "v3")
    if face not in ("quick", "v3"):
        raise ValueError(f'face "{face}" is unknown (one of quick, v3)')
    if in_use and face != in_use:
        raise ValueError(f'face "{face}" asked for, but this process registered "{in_use}"')
    if not in_use:
        if face == "quick":
            _require_quick()
        for operation in OPERATIONS.values():
            if face == "quick":
                _register_quick(operation)
            else:
                trt.get_plugin_registry().register_creator(TreePluginCreator(operation), NAMESPACE)
    _registered.update(face=face, arch=arch)
    return face


def add_layer(
    network: trt.INetworkDefinition, name: str, inputs: Sequence[trt.ITensor], **attributes: int | str
) -> trt.IPluginV3Layer:
    """Adds one tree operation to a TensorRT network; the layer's outputs are those of the table, in its order.

    Args:
        network: to add to.
        name: "draft_topk", "build_tree" or "verify_tree".
        inputs: every input of the table, in its order.
        **attributes: every attribute of the table.

    Raises:
        ValueError, TypeError: an unknown operation, a wrong number of inputs, or a wrong attribute.
        RuntimeError: ``register`` was not called.
    """
    if name not in OPERATIONS:
        raise ValueError(f'operation "{name}" is unknown (one of {", ".join(OPERATIONS)})')
    operation = OPERATIONS[name]
    if len(inputs) != len(operation.inputs):
        wanted = ", ".join(spec.name for spec in operation.inputs)
        raise ValueError(f"{name} got {len(inputs)} inputs, expected {len(operation.inputs)}: {wanted}")
    numbers = operation.attribute_numbers(attributes)
    if not _registered:
        raise RuntimeError("the plugins are not registered (call ddtree.plugins.tensorrt.register first)")
    if _registered["face"] == "quick":
        import tensorrt.plugin as trtp

        return network.add_plugin(getattr(getattr(trtp.op, NAMESPACE), name)(*inputs, **numbers), aot=True)
    return network.add_plugin_v3(list(inputs), [], TreePlugin(operation, numbers))


# ---------------------------------------------------------------------------------------------------------------------
# IPluginV3
# ---------------------------------------------------------------------------------------------------------------------


class TreePlugin(trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
    """One tree operation as an IPluginV3: all its capabilities, launching the kernel on the stream of ``enqueue``."""

    def __init__(self, operation: Operation, attributes: dict[str, int]) -> None:
        trt.IPluginV3.__init__(self)
        trt.IPluginV3OneCore.__init__(self)
        trt.IPluginV3OneBuild.__init__(self)
        trt.IPluginV3OneRuntime.__init__(self)
        self.operation = operation
        self.attributes = operation.attribute_numbers(attributes)
        self.plugin_name = operation.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self.num_outputs = len(operation.outputs)
        self.fields = [_field(name, number) for name, number in self.attributes.items()]
        self.sizes = SimpleNamespace()  # of the shapes at hand: on_shape_change comes before enqueue

    def get_capability_interface(self, type: trt.PluginCapabilityType) -> trt.IPluginCapability:
        return self

    def clone(self) -> "TreePlugin":
        return TreePlugin(self.operation, self.attributes)

    def get_output_data_types(self, input_types: list[trt.DataType]) -> list[trt.DataType]:
        return [_TYPES[spec.dtype] for spec in self.operation.outputs]

    def get_output_shapes(
        self, inputs: list[trt.DimsExprs], shape_inputs: list[trt.DimsExprs], expr_builder: trt.IExprBuilder
    ) -> list[trt.DimsExprs]:
        symbolic = [[_Size(shape[i], expr_builder) for i in range(len(shape))] for shape in inputs]
        sizes = self.operation.sizes(symbolic, **self.attributes)
        shapes = []
        for shape in self.operation.output_shapes(sizes):
            shapes.append(trt.DimsExprs(len(shape)))
            for i, size in enumerate(shape):
                shapes[-1][i] = size.expression if isinstance(size, _Size) else expr_builder.constant(size)
        return shapes

    def supports_format_combination(self, pos: int, in_out: list[trt.DynamicPluginTensorDesc], num_inputs: int) -> bool:
        description = in_out[pos].desc
        spec = (self.operation.inputs + self.operation.outputs)[pos]
        allowed = [_TYPES[name] for name in _type_names(self.operation, spec)]
        return description.format == trt.TensorFormat.LINEAR and description.type in allowed

    def configure_plugin(
        self, inputs: list[trt.DynamicPluginTensorDesc], outputs: list[trt.DynamicPluginTensorDesc]
    ) -> None:
        self.operation.sizes([each.opt[:] for each in inputs], **self.attributes)

    def on_shape_change(self, inputs: list[trt.PluginTensorDesc], outputs: list[trt.PluginTensorDesc]) -> None:
        self.sizes = self.operation.sizes([each.dims[:] for each in inputs], **self.attributes)

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        pass

    def attach_to_context(self, resource_context: Any) -> "TreePlugin":
        return self.clone()

    def get_workspace_size(
        self, inputs: list[trt.DynamicPluginTensorDesc], outputs: list[trt.DynamicPluginTensorDesc]
    ) -> int:
        return 0

    def get_fields_to_serialize(self) -> trt.PluginFieldCollection:
        return trt.PluginFieldCollection(self.fields)

    def enqueue(
        self,
        input_desc: list[trt.PluginTensorDesc],
        output_desc: list[trt.PluginTensorDesc],
        inputs: list[int],
        outputs: list[int],
        workspace: int,
        stream: int,
    ) -> None:
        dtype = _TYPE_NAMES[input_desc[0].type] if self.operation.types else None
        launch.launch_pointers(self.operation, dtype, self.sizes, inputs, outputs, stream)


class TreePluginCreator(trt.IPluginCreatorV3One):
    """Makes ``TreePlugin`` of one operation, from the attributes of an ONNX node or of a serialised engine."""

    def __init__(self, operation: Operation) -> None:
        trt.IPluginCreatorV3One.__init__(self)
        self.operation = operation
        self.name = operation.name
        self.plugin_namespace = NAMESPACE
        self.plugin_version = VERSION
        self.fields = [_field(each.name, each.lowest) for each in operation.attributes]
        self.field_names = trt.PluginFieldCollection(self.fields)

    def create_plugin(
        self, name: str, field_collection: "trt.PluginFieldCollection_", phase: trt.TensorRTPhase
    ) -> TreePlugin:
        fields = [field_collection[i] for i in range(len(field_collection))]
        attributes = {field.name: int(field.data[0]) for field in fields}
        return TreePlugin(self.operation, attributes)


class _Size:
    """A size that TensorRT knows as an expression, with what the shapes of outputs are computed by: + and //."""

    def __init__(self, expression: trt.IDimensionExpr, builder: trt.IExprBuilder) -> None:
        self.expression = expression
        self.builder = builder

    def _with(self, operation: trt.DimensionOperation, other: "_Size | int") -> "_Size":
        operand = other.expression if isinstance(other, _Size) else self.builder.constant(other)
        return _Size(self.builder.operation(operation, self.expression, operand), self.builder)

    def __add__(self, other: "_Size | int") -> "_Size":
        return self._with(trt.DimensionOperation.SUM, other)

    def __floordiv__(self, other: "_Size | int") -> "_Size":
        return self._with(trt.DimensionOperation.FLOOR_DIV, other)


def _field(name: str, number: int) -> trt.PluginField:
    """An attribute. Who puts it into a PluginFieldCollection must keep it: the collection points into its data."""
    return trt.PluginField(name, np.array([number], np.int32), trt.PluginFieldType.INT32)


# ---------------------------------------------------------------------------------------------------------------------
# Quickly deployable plugins
# ---------------------------------------------------------------------------------------------------------------------


def _require_quick() -> None:
    if _VERSION < (10, 15):
        raise RuntimeError(f'TensorRT {trt.__version__} has no working quick plugins (10.15 or newer, or face="v3")')
    numpy_version = tuple(int(part) for part in np.__version__.split(".")[:2])
    if _VERSION < (11, 2) and numpy_version >= (2, 4):
        raise RuntimeError(
            f"TensorRT {trt.__version__} does not take integer attributes from NumPy {np.__version__} "
            '(NumPy below 2.4, or TensorRT 11.2, or face="v3")'
        )


def _register_quick(operation: Operation) -> None:
    """Declares one operation: what it gives (register), in which types (autotune), and how (impl, aot_impl).

    TensorRT calls the four functions with positional arguments and reads their parameters from their signatures, which
    are made from the table.
    """
    import tensorrt.plugin as trtp

    inputs, outputs = len(operation.inputs), len(operation.outputs)
    names = operation.attribute_names

    def describe(*descs, **attributes):
        sizes = operation.sizes([desc.shape_expr for desc in descs], **attributes)
        return tuple(
            trtp.from_shape_expr(shape, _TYPES[spec.dtype])
            for spec, shape in zip(operation.outputs, operation.output_shapes(sizes), strict=True)
        )

    def autotune(*arguments):
        descs, values = arguments[:inputs], arguments[inputs:-1]
        shapes = [desc.shape.opt if desc.shape.is_dynamic else desc.shape for desc in descs]
        operation.sizes([tuple(shape) for shape in shapes], **dict(zip(names, values, strict=True)))
        specs = operation.inputs + operation.outputs
        types = ["|".join(_TYPE_STRINGS[name] for name in _type_names(operation, spec)) for spec in specs]
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR")]

    def implement(*arguments, stream):
        tensors, values, results = arguments[:inputs], arguments[inputs:-1], arguments[-1]
        sizes = operation.sizes([tuple(tensor.shape) for tensor in tensors], **dict(zip(names, values, strict=True)))
        dtype = _TYPE_NAMES[tensors[0].dtype] if operation.types else None
        pointers = [tensor.data_ptr for tensor in tensors], [tensor.data_ptr for tensor in results]
        launch.launch_pointers(operation, dtype, sizes, *pointers, stream)

    def compile_ahead(*arguments):
        descs, values = arguments[:inputs], arguments[inputs:-2]
        sizes = operation.sizes([desc.shape_expr for desc in descs], **dict(zip(names, values, strict=True)))
        parameters = trtp.KernelLaunchParams()
        parameters.grid_x, parameters.grid_y = (size(sizes) for size in operation.grid)
        parameters.block_x = operation.block
        parameters.shared_mem = operation.shared_bytes(sizes)
        scalars = trtp.SymIntExprs(len(operation.scalars))
        for i, value in enumerate(operation.scalar_values(sizes)):
            scalars[i] = trtp.SymInt32(value)
        dtype = _TYPE_NAMES[descs[0].dtype] if operation.types else None
        compiled = nvrtc.compile_source(operation.source, _registered["arch"] or launch.device_arch())
        return operation.entry(dtype), compiled.ptx, parameters, scalars

    def typed(function: Any, tensor: Any, last: dict[str, Any], returns: Any) -> Any:
        """``function`` with the signature (inputs, attributes, last) -> returns."""
        annotations = {spec.name: tensor for spec in operation.inputs}
        annotations |= dict.fromkeys(names, int)
        parameters = [
            Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in (annotations | last).items()
        ]
        function.__signature__ = Signature(parameters, return_annotation=returns)
        return function

    desc, tensor = trtp.TensorDesc, trtp.Tensor
    descs, tensors = GenericAlias(tuple, (desc,) * outputs), GenericAlias(tuple, (tensor,) * outputs)
    kernel = tuple[str | bytes, str | bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    identity = f"{NAMESPACE}::{operation.name}"
    trtp.register(identity)(typed(describe, desc, {}, descs))
    trtp.autotune(identity)(typed(autotune, desc, {"outputs": descs}, list[trtp.AutoTuneCombination]))
    trtp.impl(identity)(typed(implement, tensor, {"outputs": tensors, "stream": int}, None))
    trtp.aot_impl(identity)(typed(compile_ahead, desc, {"outputs": descs, "tactic": int}, kernel))


_TYPE_STRINGS = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16", "int32": "INT32", "int64": "INT64"}


def _type_names(operation: Operation, spec: TensorSpec) -> tuple[str, ...]:
    return operation.types if spec.dtype == "T" else (spec.dtype,)
