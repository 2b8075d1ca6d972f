"""The graphs of target and draft in operators that TensorRT 10.14, which TensorRT-LLM 1.2 comes with, has.

Its ONNX parser knows neither RMSNormalization nor RotaryEmbedding nor TensorScatter (all three came with 10.15), and no
layer of it writes into a cache. ``lower`` takes a placed graph and replaces these nodes by operators of opset 20. So it
does with Attention and Unsqueeze, which the parser knows: TensorRT-LLM looks through a network before it builds it, and
stops at types of layers that its list lacks, as it does theirs (``graph_rewriting.Layer.TRT_LAYER_TYPE_TO_LAYER``). All
else stays as it was placed, so there is one definition of each model.

A scatter would copy every KV cache in every pass, and need a second buffer for each. Instead the graph leaves the
caches as they are: attention reads ``past_key_values.{i}`` up to write_index and the pass's own rows beside them, two
products into one softmax. The rows are outputs, ``update.{i}.key|value`` [batch, kv_heads, rows, head_dim], in place of
``present.{i}``; whoever runs the engine writes them at write_index, where a TensorScatter would have.

Keys are multiplied as [cache, head_dim] x [head_dim, queries]. In the plans of TensorRT for RTX 1.7 the product the
other way round, queries by transposed keys, transposes the whole key cache in memory first.
"""

from collections.abc import Callable

import numpy as np
from onnx import NodeProto, TensorProto, helper

from .graph import ONNX_DTYPES, Graph

OPSET = 20
_LOWEST = np.array(np.finfo(np.float32).min)
_DTYPES: dict[int, str] = {number: name for name, number in ONNX_DTYPES.items()}


def lower(graph: Graph) -> Graph:
    """The same model as ``graph``, which must have been placed with caches of a fixed length.

    Softmax and normalisation compute in float32; all else in the dtype of the graph.
    """
    return _Lowering(graph).lowered


class _Lowering:
    def __init__(self, graph: Graph):
        self.lowered = Graph(graph.name, OPSET)
        self.lowered.inputs = graph.inputs
        self.lowered.weights = graph.weights
        self.lowered.constants = dict(graph.constants)
        inputs = {value.name: value.type.tensor_type for value in graph.inputs}
        cache = inputs["past_key_values.0.key"]
        self._dtype = cache.elem_type
        _, self._kv_heads, self._cache_length, self._head_dim = (dim.dim_value for dim in cache.shape.dim)
        assert self._cache_length, "the graph was placed with caches of a dynamic length"
        self._caches: dict[str, tuple[str, str]] = {}  # present -> past, update
        self._masks: dict[str, str] = {}
        self._angles: dict[str, list[str]] = {}  # of positions: cosines, sines
        replaced: dict[str, Callable[[NodeProto], None]] = {
            "RMSNormalization": self._rms_normalization,
            "RotaryEmbedding": self._rotary_embedding,
            "TensorScatter": self._tensor_scatter,
            "Attention": self._attention,
            "Unsqueeze": self._unsqueeze,
        }
        for node in graph.nodes:
            if place := replaced.get(node.op_type):
                self.lowered.scope = f"{node.name}/"
                place(node)
            else:
                self.lowered.nodes.append(node)
        for value in graph.outputs:
            if value.name in self._caches:
                batch, heads, _, head_dim = (dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
                self.lowered.output(_update(value.name), _DTYPES[self._dtype], [batch, heads, "updated", head_dim])
            else:
                self.lowered.outputs.append(value)

    def _rms_normalization(self, node: NodeProto) -> None:
        op, graph = self.lowered.op, self.lowered
        x, scale = node.input
        epsilon = _attributes(node)["epsilon"]
        wide = op("Cast", x, to=TensorProto.FLOAT)
        mean = op("ReduceMean", op("Mul", wide, wide), graph.integers(-1))
        root = op("Sqrt", op("Add", mean, graph.constant(f"float_{epsilon}", np.array(epsilon, np.float32))))
        op("Mul", op("Cast", op("Div", wide, root), to=self._dtype), scale, name=node.output[0])

    def _rotary_embedding(self, node: NodeProto) -> None:
        op, graph = self.lowered.op, self.lowered
        x, cos_table, sin_table, positions = node.input
        half = graph.weights[cos_table].shape[-1]
        if positions not in self._angles:
            over_heads = graph.integers(0, 1, -1, half)  # [batch, 1, rows, head_dim / 2]
            self._angles[positions] = [
                op("Reshape", op("Gather", table, positions), over_heads) for table in (cos_table, sin_table)
            ]
        cos, sin = self._angles[positions]
        first, second = graph.ops("Split", x, graph.integers(half, half), outputs=2, axis=-1)
        real = op("Sub", op("Mul", first, cos), op("Mul", second, sin))
        imaginary = op("Add", op("Mul", second, cos), op("Mul", first, sin))
        op("Concat", real, imaginary, axis=-1, name=node.output[0])

    def _tensor_scatter(self, node: NodeProto) -> None:
        past, rows, _ = node.input
        (present,) = node.output
        self._caches[present] = past, self.lowered.op("Identity", rows, name=_update(present))

    def _attention(self, node: NodeProto) -> None:
        op, graph = self.lowered.op, self.lowered
        q, present_key, present_value, mask = node.input
        (past_key, key), (past_value, value) = self._caches[present_key], self._caches[present_value]
        if mask not in self._masks:
            self._masks[mask] = self._split_mask(mask, key)
        scale = _attributes(node)["scale"]
        factor = op("Cast", graph.constant(f"float_{scale}", np.array(scale, np.float32)), to=self._dtype)
        # The query heads of a group become rows of their KV head: a reshape, and the caches are read as they lie.
        fold = graph.integers(0, self._kv_heads, -1, self._head_dim)
        queries = op("Reshape", op("Mul", q, factor), fold)
        turned = op("Transpose", queries, perm=[0, 1, 3, 2])  # [batch, kv_heads, head_dim, group * rows]
        scores = [op("Transpose", op("MatMul", keys, turned), perm=[0, 1, 3, 2]) for keys in (past_key, key)]
        joined = op("Cast", op("Concat", *scores, axis=-1), to=TensorProto.FLOAT)
        flat_shape = op("Shape", joined)  # [batch, kv_heads, group * rows, cache + updated]
        mask_shape = op("Shape", self._masks[mask], start=3)  # rows, cache + updated
        by_group = op("Reshape", joined, op("Concat", graph.integers(0, 0, -1), mask_shape, axis=0))
        weights = op("Softmax", op("Add", by_group, self._masks[mask]), axis=-1)
        weights = op("Reshape", op("Cast", weights, to=self._dtype), flat_shape)
        cache, end, axis = graph.integers(self._cache_length), graph.integers(2**62), graph.integers(3)
        parts = [
            op("MatMul", op("Slice", weights, graph.integers(0), cache, axis), past_value),
            op("MatMul", op("Slice", weights, cache, end, axis), value),
        ]
        op("Reshape", op("Add", *parts), op("Shape", q), name=node.output[0])

    def _split_mask(self, mask: str, update: str) -> str:
        """``mask`` [batch, 1, rows, cache] over the cache before write_index, then over the pass's own rows, which it
        finds in the slots that they will be written to: float32 [batch, 1, 1, rows, cache + updated]."""
        op, graph = self.lowered.op, self.lowered
        slots = graph.constant("slots", np.arange(self._cache_length))
        written_from = op("Reshape", "write_index", graph.integers(-1, 1, 1, 1))
        wide = op("Cast", mask, to=TensorProto.FLOAT)
        past = op("Where", op("Less", slots, written_from), wide, graph.constant("lowest", _LOWEST))
        count = op("Shape", update, start=2, end=3)
        targets = op("Add", op("Slice", slots, graph.integers(0), count, graph.integers(0)), written_from)
        targets = op("Expand", targets, op("Concat", op("Shape", mask, end=3), count, axis=0))
        own = op("GatherElements", wide, targets, axis=3)
        joined = op("Concat", past, own, axis=-1)
        return op("Reshape", joined, op("Concat", graph.integers(0, 1, 1), op("Shape", joined, start=2), axis=0))

    def _unsqueeze(self, node: NodeProto) -> None:
        """A new last axis; the placed graphs add no other."""
        op, graph = self.lowered.op, self.lowered
        x, axes = node.input
        assert axes == graph.integers(-1)
        op("Reshape", x, op("Concat", op("Shape", x), graph.integers(1), axis=0), name=node.output[0])


def _update(present: str) -> str:
    return present.replace("present.", "update.")


def _attributes(node: NodeProto) -> dict[str, float]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
