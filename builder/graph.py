"""A thin layer over onnx.helper: place nodes one by one, name the values, refer to weights in other files."""

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from .weights import Weight

OPSET = 24  # the first with TensorScatter; RMSNormalization, RotaryEmbedding and Attention are of 23
IR_VERSION = 11

ONNX_DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}


class Graph:
    """An ONNX graph in the making. Values are referred to by name; ``scope`` is the prefix of the next names."""

    def __init__(self, name: str):
        self.name = name
        self.scope = ""
        self._nodes: list[NodeProto] = []
        self._inputs: list[ValueInfoProto] = []
        self._outputs: list[ValueInfoProto] = []
        self._weights: dict[str, Weight] = {}
        self._integers: dict[str, TensorProto] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declare an input; a dimension is a number or, where it varies, a name."""
        self._inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declare an output: the value ``name``, placed before or later."""
        self._outputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return name

    def weight(self, weight: Weight) -> str:
        """A weight as a value."""
        self._weights[weight.name] = weight
        return weight.name

    def integers(self, *values: int) -> str:
        """A constant int64 vector."""
        name = f"integers_{'_'.join(map(str, values))}"
        self._integers.setdefault(name, helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name

    def op(self, op_type: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Place a node with one output, which gets ``name`` or one made from the scope; returns that name."""
        name = name or f"{self.scope}{op_type}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def ops(self, op_type: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Place a node with several outputs; returns their names."""
        node = f"{self.scope}{op_type}_{len(self._nodes)}"
        names = [f"{node}_{i}" for i in range(outputs)]
        self._nodes.append(helper.make_node(op_type, inputs, names, name=node, **attributes))
        return names

    def model(self) -> ModelProto:
        """The finished model. Its weights must have been written."""
        graph = helper.make_graph(
            self._nodes,
            self.name,
            self._inputs,
            self._outputs,
            [*self._integers.values(), *map(_external, self._weights.values())],
        )
        opset = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="ddtree")


def _external(weight: Weight) -> TensorProto:
    tensor = TensorProto(
        name=weight.name,
        data_type=ONNX_DTYPES[weight.dtype],
        dims=weight.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in (("location", weight.file), ("offset", weight.offset), ("length", weight.size)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor
