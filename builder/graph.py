"""A thin layer over onnx.helper: place nodes one by one, name the values, refer to weights in other files."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

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
    """An ONNX graph in the making. Values are referred to by name; ``scope`` is the prefix of the next names.

    Attributes:
        nodes: in an order in which they can be computed.
        inputs, outputs: as declared.
        weights: by name.
    """

    def __init__(self, name: str, opset: int = OPSET):
        self.name, self.opset = name, opset
        self.scope = ""
        self.nodes: list[NodeProto] = []
        self.inputs: list[ValueInfoProto] = []
        self.outputs: list[ValueInfoProto] = []
        self.weights: dict[str, Weight] = {}
        self.constants: dict[str, TensorProto] = {}

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declare an input; a dimension is a number or, where it varies, a name."""
        self.inputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return name

    def output(self, name: str, dtype: str, shape: Sequence[int | str]) -> str:
        """Declare an output: the value ``name``, placed before or later."""
        self.outputs.append(helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], shape))
        return name

    def weight(self, weight: Weight) -> str:
        """A weight as a value."""
        self.weights[weight.name] = weight
        return weight.name

    def integers(self, *values: int) -> str:
        """A constant int64 vector."""
        return self.constant(f"integers_{'_'.join(map(str, values))}", np.array(values, np.int64))

    def constant(self, name: str, values: np.ndarray) -> str:
        """A constant that is no weight. One name has one value."""
        self.constants.setdefault(name, numpy_helper.from_array(values, name))
        return name

    def op(self, op_type: str, *inputs: str, name: str | None = None, **attributes: Any) -> str:
        """Place a node with one output, which gets ``name`` or one made from the scope; returns that name."""
        name = name or f"{self.scope}{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def ops(self, op_type: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        """Place a node with several outputs; returns their names."""
        node = f"{self.scope}{op_type}_{len(self.nodes)}"
        names = [f"{node}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=node, **attributes))
        return names

    def model(self) -> ModelProto:
        """The finished model. Its weights must have been written."""
        graph = helper.make_graph(
            self.nodes,
            self.name,
            self.inputs,
            self.outputs,
            [*self.constants.values(), *map(_external, self.weights.values())],
        )
        opset = helper.make_opsetid("", self.opset)
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
