"""The converter to TensorRT-LLM's dynamic trees against brute force, and the layers that the wrappers add."""

import sys
from dataclasses import fields, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ddtree.plugins
from ddtree.plugins import ops, trtllm
from ddtree.plugins.operations import BUILD_TREE, VERIFY_TREE

from . import tensorrt_stand_in as stand_in
from .tensorrt_wheels import plugin_sources

# ---------------------------------------------------------------------------------------------------------------------
# Dynamic trees
# ---------------------------------------------------------------------------------------------------------------------


def trees(budget: int, depth: int, vocab: int, batch: int, seed: int) -> ops.DraftTree:
    """Trees of different lengths: some tokens of each slot have probability 0, so prefixes may run out."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, depth, vocab, generator=generator)
    logits[torch.rand(batch, depth, vocab, generator=generator) < 0.4] = -torch.inf
    return ops.build_tree(logits, torch.arange(batch), budget=budget)


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 100),
    depth=st.integers(1, 6),
    vocab=st.integers(1, 9),
    batch=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_round_trip_gives_the_same_tree(budget, depth, vocab, batch, seed):
    tree = trees(budget, depth, vocab, batch, seed)
    buffers = trtllm.to_dynamic_tree(tree)
    back = trtllm.from_dynamic_tree(buffers, max_depth=depth, node_logws=tree.node_logws)
    for field in fields(tree):
        before, after = getattr(tree, field.name), getattr(back, field.name)
        assert before.equal(after) if isinstance(before, torch.Tensor) else before == after, field.name


@settings(max_examples=40, deadline=None)
@given(budget=st.integers(0, 70), batch=st.integers(1, 4), seed=st.integers(0, 2**16))
def test_packed_mask_holds_each_nodes_ancestors_row_after_row(budget, batch, seed):
    tree = trees(budget, 5, 6, batch, seed)
    buffers = trtllm.to_dynamic_tree(tree)
    lengths = buffers.spec_decoding_generation_lengths.tolist()
    words = -(-max(lengths) // 32)
    flat = buffers.spec_decoding_packed_mask.flatten().tolist()
    assert len(flat) == sum(lengths) * words
    row = 0
    for slot, length in enumerate(lengths):
        for node in range(length):
            visible, at = set(), node
            while at >= 0:
                visible.add(at)
                at = int(tree.parents[slot, at])
            bits = {32 * w + b for w in range(words) for b in range(32) if flat[row * words + w] >> b & 1}
            assert bits == visible
            row += 1


def test_walk_over_the_buffers_meets_siblings_best_first():
    tree = trees(40, 4, 5, 2, 7)
    buffers = trtllm.to_dynamic_tree(tree)
    assert buffers.candidates.dtype == torch.int64
    assert buffers.retrieve_index.tolist() == [list(range(41))] * 2
    for slot in range(2):
        for node in range(int(tree.node_count[slot])):
            children, child = [], int(buffers.retrieve_next_token[slot, node])
            while child != -1:
                children.append(child)
                child = int(buffers.retrieve_next_sibling[slot, child])
            assert children == [i for i in range(41) if tree.parents[slot, i] == node]
            assert (
                sorted(tree.node_logws[slot, children].tolist(), reverse=True)
                == tree.node_logws[slot, children].tolist()
            )


def test_node_logws_are_zero_where_unknown():
    tree = trees(20, 3, 2, 3, 1)
    assert int(tree.node_count.min()) < 21
    back = trtllm.from_dynamic_tree(trtllm.to_dynamic_tree(tree), max_depth=3)
    assert back.node_logws.tolist() == [[0.0] * count + [-np.inf] * (21 - count) for count in tree.node_count.tolist()]


def changed(tensor: torch.Tensor, index: tuple[int, ...], value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("retrieve_next_token", (0, 3), 2, "retrieve_next_token has a link"),
        ("retrieve_next_token", (0, 0), 99, "retrieve_next_token has a link"),
        ("retrieve_next_token", (0, 0), -1, "do not reach every node"),
        ("retrieve_next_sibling", (0, 0), 1, "do not reach every node"),
        ("spec_decoding_position_offsets", (1, 2), 7, "spec_decoding_position_offsets are not"),
        ("spec_decoding_packed_mask", (4, 0), 0, "spec_decoding_packed_mask is not"),
        ("spec_decoding_generation_lengths", (0,), 0, "spec_decoding_generation_lengths holds"),
    ],
)
def test_buffers_that_are_no_tree_are_refused(name, index, value, message):
    buffers = trtllm.to_dynamic_tree(trees(12, 3, 30, 2, 3))
    with pytest.raises(ValueError, match=message):
        trtllm.from_dynamic_tree(replace(buffers, **{name: changed(getattr(buffers, name), index, value)}), max_depth=3)


def test_max_depth_below_the_tree_is_refused():
    buffers = trtllm.to_dynamic_tree(ops.build_tree(torch.zeros(1, 3, 2), torch.zeros(1, dtype=torch.int32), budget=14))
    with pytest.raises(ValueError, match="max_depth 2 is below the depth 3"):
        trtllm.from_dynamic_tree(buffers, max_depth=2)


# ---------------------------------------------------------------------------------------------------------------------
# Networks
# ---------------------------------------------------------------------------------------------------------------------


class Tensor:
    """tensorrt_llm.functional.Tensor, as far as the wrappers use it."""

    def __init__(self, trt_tensor: stand_in.ITensor) -> None:
        self.trt_tensor = trt_tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.trt_tensor.shape


def functional(network: stand_in.INetworkDefinition) -> ModuleType:
    """tensorrt_llm.functional: tensors are named for how they came to be, and a constant's ITensor has its value."""
    module = ModuleType("tensorrt_llm.functional")

    def tensor(name: str, dtype: str, dims: list, value: np.ndarray | None = None) -> Tensor:
        expressions = [size if isinstance(size, stand_in.IDimensionExpr) else const(size) for size in dims]
        trt_type = getattr(sys.modules["tensorrt"], dtype)
        trt_tensor = stand_in.ITensor(name, trt_type, stand_in.DimsExprs(expressions))
        trt_tensor.value = value
        return Tensor(trt_tensor)

    def const(size: int) -> stand_in.IDimensionExpr:
        return stand_in.IExprBuilder().constant(int(size))

    def same_type(source: Tensor) -> str:
        return {"INT32": "int32", "FLOAT": "float32"}[source.trt_tensor.dtype.name]

    module.constant = lambda array: tensor("constant", str(array.dtype), array.shape, array)
    module.shape = lambda source, dim: source.trt_tensor.dims[dim]
    module.concat = lambda sizes: list(sizes)
    module.unsqueeze = lambda source, axis: tensor("unsqueezed", same_type(source), [*source.trt_tensor.dims, 1])
    module.slice = lambda source, starts, sizes: tensor("slice", same_type(source), sizes)
    module.cast = lambda source, dtype: tensor("slice", dtype, source.trt_tensor.dims)
    module._create_tensor = lambda trt_tensor, producer: Tensor(trt_tensor)
    return module


@pytest.fixture
def network(request, monkeypatch):
    """A TensorRT-LLM 1.2 network under construction."""
    network = stand_in.INetworkDefinition()
    with stand_in.installed("10.14.1", plugin_sources("10.14.1", request.config.cache.mkdir("tensorrt"))):
        monkeypatch.setitem(sys.modules, "tensorrt_llm", package := ModuleType("tensorrt_llm"))
        package.functional = functional(network)
        common = ModuleType("tensorrt_llm._common")
        common.default_trtnet = lambda: network
        monkeypatch.setitem(sys.modules, "tensorrt_llm.functional", package.functional)
        monkeypatch.setitem(sys.modules, "tensorrt_llm._common", common)
        monkeypatch.delitem(sys.modules, "ddtree.plugins.tensorrt", raising=False)
        yield network
    sys.modules.pop("ddtree.plugins.tensorrt", None)
    if hasattr(ddtree.plugins, "tensorrt"):
        del ddtree.plugins.tensorrt


def inputs_of(network: stand_in.INetworkDefinition, **shapes: tuple[str, tuple[int, ...]]) -> dict[str, Tensor]:
    trt = sys.modules["tensorrt"]
    return {
        name: Tensor(network.add_input(name, getattr(trt, dtype), shape)) for name, (dtype, shape) in shapes.items()
    }


def test_build_tree_adds_two_layers(network):
    given = inputs_of(network, draft_logits=("float16", (-1, 4, 30)), root_token_ids=("int32", (-1,)))
    tree = trtllm.build_tree(given["draft_logits"], given["root_token_ids"], budget=40, keep_chain=True)
    assert list(tree) == [spec.name for spec in BUILD_TREE.outputs]
    topk, build = network.layers
    assert [tensor.name for tensor in topk.inputs] == ["draft_logits", "constant"]
    assert topk.inputs[1].shape == (0,)
    assert topk.plugin.attributes == {"k": 30}
    assert build.inputs[:2] == topk.outputs
    assert build.inputs[2].name == "root_token_ids"
    assert build.plugin.attributes == {"budget": 40, "mode": 0, "keep_chain": 1}
    assert tree["ancestor_mask"].trt_tensor is build.get_output(7)
    assert tree["ancestor_mask"].shape == (-1, 41, 2)
    batch = {"draft_logits": (6, 4, 30), "root_token_ids": (6,)}
    assert [size.value(batch) for size in tree["ancestor_mask"].trt_tensor.dims] == [6, 41, 2]


def test_verify_tree_adds_one_layer_and_fills_what_is_not_used(network):
    integers = dict.fromkeys(("token_ids", "next_token", "next_sibling"), ("int32", (-1, -1)))
    a_slot = {"node_count": "int32", "root_positions": "int64", "temperature": "float32", "top_k": "int32"}
    a_slot |= {"top_p": "float32", "min_p": "float32", "seed": "int64"}
    shapes = integers | {name: (dtype, (-1,)) for name, dtype in a_slot.items()}
    given = inputs_of(network, logits=("bfloat16", (-1, -1, 99)), **shapes)
    names = ("token_ids", "next_token", "next_sibling", "node_count")
    settings = {name: given[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")}
    verified = trtllm.verify_tree(
        given["logits"],
        {name: given[name] for name in names},
        given["root_positions"],
        max_depth=7,
        method="target_only",
        threshold_single=0.5,
        **settings,
    )
    assert list(verified) == [spec.name for spec in VERIFY_TREE.outputs]
    (layer,) = network.layers
    expected = [spec.name for spec in VERIFY_TREE.inputs[:11]]
    assert [tensor.name for tensor in layer.inputs] == [*expected, "slice", "slice", "constant", "constant", "constant"]
    assert layer.plugin.attributes == {"method": 2}
    assert layer.inputs[14].value.tolist() == [0.5, 1.0]
    batch = {name: tuple({-1: 5}.get(size, size) for size in tensor.shape) for name, tensor in given.items()}
    sizes = [tuple(size.value(batch) for size in tensor.dims) for tensor in layer.inputs]
    assert sizes[11:] == [(5, 5, 0), (5, 0), (0,), (2,), (7,)]
    assert VERIFY_TREE.scalar_values(VERIFY_TREE.sizes(sizes, method="target_only")) == [5, 99, 7, 0, 0, 0, 2]
    for spec, tensor in zip(VERIFY_TREE.inputs, layer.inputs, strict=True):
        wanted = "bfloat16" if spec.dtype == "T" else spec.dtype
        assert tensor.dtype == getattr(sys.modules["tensorrt"], wanted), spec.name


def test_what_a_network_cannot_have_is_refused(network):
    given = inputs_of(network, draft_logits=("float16", (-1, 4, -1)), root_token_ids=("int32", (-1,)))
    with pytest.raises(ValueError, match="the vocabulary must be fixed"):
        trtllm.build_tree(given["draft_logits"], given["root_token_ids"], budget=40)
    for budget in (0, 1024):
        with pytest.raises(ValueError, match=f"budget {budget} is outside 1 to 1023"):
            trtllm.build_tree(given["draft_logits"], given["root_token_ids"], budget=budget)
    assert network.layers == []


def test_a_missing_tensorrt_llm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(ImportError, match=r'pip install "ddtree-trtllm\[trtllm\]"'):
        trtllm.build_tree(None, None, budget=1)
