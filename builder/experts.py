"""Mixture of experts: a router sends each row through ``per_token`` of ``count`` small feed-forward networks.

There are two forms of the same sum, because no single one is good in both libraries:

- ONNX Runtime: rows are grouped by expert, and each expert computes its own rows and no others (none at all, often).
  That costs what the model says it costs, per_token experts a row, and needs shapes that depend on data.
- TensorRT, where such shapes would stop the GPU at every layer: every expert computes every row, in a few large matrix
  products, and what the router did not choose is left out of the sum. The library joins the experts' weights when it
  builds, so the engine holds them once. The price is count / per_token times the arithmetic (16 times for
  Qwen3-30B-A3B), 6 * count * intermediate_size bytes of scratch memory a row in half precision (0.6 MB there: keep
  prefill chunks short), and every expert's weights read in every pass. A tree of a few hundred rows reaches nearly all
  experts anyway and reads no more than it must; a pass of one row, plain decoding, reads 16 times as much.

In both a row's result does not depend on the other rows of the pass; in ONNX Runtime to the last bit.
"""

from onnx import TensorProto

from .config import Experts
from .decoder import Decoder
from .graph import ONNX_DTYPES


def place_experts(decoder: Decoder, x: str, layer: int) -> str:
    """Router and experts of a layer in place of its feed-forward network: [rows, hidden] -> [rows, hidden]."""
    experts = decoder.config.experts
    assert experts is not None
    name = f"layers.{layer}.mlp"
    weights, chosen = _route(decoder, x, name, experts)
    place = _place_grouped if decoder.cache_length is None else _place_dense
    return place(decoder, x, name, experts, weights, chosen)


def _route(decoder: Decoder, x: str, name: str, experts: Experts) -> tuple[str, str]:
    """Weights, float32, and numbers of each row's experts: two of [rows, per_token]."""
    graph = decoder.graph
    scores = decoder.linear(x, f"{name}.gate", decoder.config.hidden_size, experts.count)
    scores = graph.op("Cast", scores, to=TensorProto.FLOAT)  # [rows, count]
    count = graph.integers(experts.per_token)
    if experts.normalized:  # the softmax over the chosen is that over all, divided by the sum of the chosen
        scores, chosen = graph.ops("TopK", scores, count, outputs=2)
        weights = graph.op("Softmax", scores)
    else:
        weights, chosen = graph.ops("TopK", graph.op("Softmax", scores), count, outputs=2)
    return weights, chosen


def _place_grouped(decoder: Decoder, x: str, name: str, experts: Experts, weights: str, chosen: str) -> str:
    graph, hidden, per_token = decoder.graph, decoder.config.hidden_size, experts.per_token
    flat = graph.op("Reshape", chosen, graph.integers(-1))  # [rows * per_token], expert of each pair of row and rank
    pairs = graph.op("Shape", flat)
    _, order = graph.ops("TopK", flat, pairs, outputs=2, largest=0)  # the pairs by expert
    rows = graph.op("Gather", x, graph.op("Div", order, graph.integers(per_token)))  # [rows * per_token, hidden]
    hits = graph.op("OneHot", flat, graph.integers(experts.count), graph.integers(0, 1))
    sizes = graph.op("ReduceSum", hits, graph.integers(0), keepdims=0)  # [count], rows of each expert
    groups = graph.ops("Split", rows, sizes, outputs=experts.count, axis=0)
    results = [
        decoder.swiglu(group, f"{name}.experts.{expert}", experts.intermediate_size)
        for expert, group in enumerate(groups)
    ]
    joined = graph.op("Concat", *results, axis=0)
    _, places = graph.ops("TopK", order, pairs, outputs=2, largest=0)  # where in the order each pair is
    by_row = graph.op("Reshape", graph.op("Gather", joined, places), graph.integers(-1, per_token, hidden))
    # Not ReduceSum: in ONNX Runtime 1.32 its last bits depend on how many rows there are.
    summed = graph.op("MatMul", graph.op("Unsqueeze", weights, graph.integers(1)), by_row)  # [rows, 1, hidden]
    return graph.op("Reshape", summed, graph.integers(-1, hidden))


def _place_dense(decoder: Decoder, x: str, name: str, experts: Experts, weights: str, chosen: str) -> str:
    graph, hidden, width = decoder.graph, decoder.config.hidden_size, experts.intermediate_size

    def stacked(part: str, shape: tuple[int, int], axis: int) -> str:
        names = [f"{decoder.prefix}{name}.experts.{expert}.{part}_proj.weight" for expert in range(experts.count)]
        return graph.op("Concat", *(graph.weight(decoder.weights.take(n, *shape)) for n in names), axis=axis)

    gate, up = (graph.op("Gemm", x, stacked(part, (width, hidden), 0), transB=1) for part in ("gate", "up"))
    gated = decoder.gated(gate, up)  # [rows, count * width]
    rows = graph.op("Shape", chosen, end=1)
    zeros = graph.op("ConstantOfShape", graph.op("Concat", rows, graph.integers(experts.count), axis=0))
    routed = graph.op("ScatterElements", zeros, chosen, weights, axis=1)  # [rows, count], float32
    taken = graph.op("Unsqueeze", graph.op("Cast", routed, to=TensorProto.BOOL), graph.integers(-1))
    routed = graph.op("Cast", routed, to=ONNX_DTYPES[decoder.weights.dtype])
    routed = graph.op("Unsqueeze", routed, graph.integers(-1))  # [rows, count, 1]
    by_expert = graph.op("Reshape", gated, graph.integers(-1, experts.count, width))
    # Where puts the weight, 0, in the place of what was not chosen: an infinity times 0 would be a NaN.
    by_expert = graph.op("Mul", graph.op("Where", taken, by_expert, routed), routed)
    gated = graph.op("Reshape", by_expert, graph.integers(-1, experts.count * width))
    return graph.op("Gemm", gated, stacked("down", (hidden, width), 1), transB=1)
