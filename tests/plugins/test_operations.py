"""The table of operations says what ``ops`` returns, and what the compiled kernels take."""

import re
from dataclasses import fields

import pytest
import torch

from ddtree.plugins import nvrtc, ops
from ddtree.plugins.operations import (
    BUILD_TREE,
    DRAFT_TOPK,
    ENCODE_TREE,
    GATHER_FEATURES,
    MAX_SHARED_BYTES,
    OPERATIONS,
    VERIFY_TREE,
    Operation,
)

B, D, V, BUDGET = 2, 4, 37, 40
AOT = (DRAFT_TOPK, BUILD_TREE, VERIFY_TREE)
ARCH = "sm_100"


def test_outputs_are_those_of_ops():
    tree = ops.build_tree(torch.randn(B, D, V), torch.zeros(B, dtype=torch.int32), budget=BUDGET)
    candidates = (B, D, V)
    sizes = BUILD_TREE.sizes([candidates, candidates, (B,)], budget=BUDGET, mode="tree", keep_chain=0)
    assert_outputs(BUILD_TREE, sizes, {field.name: getattr(tree, field.name) for field in fields(tree)[:-1]})

    past = torch.zeros(B, dtype=torch.int64)
    position_ids, attention_mask = ops.encode_tree(tree, past, past, 64, torch.float16)
    shapes = [tree.depths.shape, tree.ancestor_mask.shape, (B,), (B,)]
    sizes = ENCODE_TREE.sizes(shapes, cache_length=64, window=0)
    assert_outputs(ENCODE_TREE, sizes, {"position_ids": position_ids, "attention_mask": attention_mask}, torch.float16)

    sampling = ops.SamplingTensors(*sampling_settings())
    verified = ops.verify_tree(torch.randn(B, BUDGET + 1, V), tree, past, sampling)
    sizes = VERIFY_TREE.sizes(verify_shapes(), method="coupled")
    assert_outputs(VERIFY_TREE, sizes, {field.name: getattr(verified, field.name) for field in fields(verified)})

    features = torch.zeros(B, BUDGET + 1, 6, dtype=torch.float16)
    gathered = ops.gather_features(features, verified).view(torch.uint8)
    shapes = [features.view(torch.uint8).shape, verified.accepted_nodes.shape, (B,)]
    assert_outputs(GATHER_FEATURES, GATHER_FEATURES.sizes(shapes, row_bytes=12), {"gathered": gathered})


def assert_outputs(operation, sizes, results, element_type=None):
    assert [spec.name for spec in operation.outputs] == list(results)
    for spec, shape in zip(operation.outputs, operation.output_shapes(sizes), strict=True):
        assert tuple(results[spec.name].shape) == shape, spec.name
        expected = element_type if spec.dtype == "T" else getattr(torch, spec.dtype)
        assert results[spec.name].dtype == expected, spec.name


def sampling_settings():
    return torch.ones(B), torch.zeros(B, dtype=torch.int32), torch.ones(B), torch.zeros(B), torch.arange(B)


def verify_shapes(**changed):
    shapes = {spec.name: (B,) for spec in VERIFY_TREE.inputs}
    shapes |= dict.fromkeys(("token_ids", "next_token", "next_sibling"), (B, BUDGET + 1))
    shapes |= {"logits": (B, BUDGET + 1, V), "token_bitmask": (B, BUDGET + 1, 0), "coins": (B, 0), "final_coin": (0,)}
    shapes |= {"thresholds": (2,), "max_depth_shape": (D,)}
    return list((shapes | changed).values())


def test_scalars_say_which_optional_inputs_are_used():
    without = VERIFY_TREE.sizes(verify_shapes(), method="greedy")
    assert VERIFY_TREE.scalar_values(without) == [BUDGET + 1, V, D, 0, 0, 0, 1]
    given = verify_shapes(token_bitmask=(B, BUDGET + 1, 2), coins=(B, BUDGET + 1), final_coin=(B,))
    assert VERIFY_TREE.scalar_values(VERIFY_TREE.sizes(given, method="target_only")) == [
        *(BUDGET + 1, V, D),
        *(2, BUDGET + 1, 1, 2),
    ]
    mapped = DRAFT_TOPK.sizes([(B, D, V), (V,)], k=5)
    assert DRAFT_TOPK.scalar_values(mapped) == [D, V, 5, 1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": (B, BUDGET + 1)}, r"logits has shape \[2, 41\], expected \[B, N, V\]"),
        ({"next_token": (B, BUDGET)}, r"next_token has shape \[2, 40\]: 40 is not the 41"),
        ({"seed": (B + 1,)}, r"seed has shape \[3\]: 3 is not the 2"),
        ({"token_bitmask": (B, BUDGET + 1, 3)}, r"token_bitmask has shape \[2, 41, 3\]: 3 is not the 2"),
        ({"coins": (B, D)}, r"coins has shape \[2, 4\]: 4 is not the 41"),
        ({"final_coin": (1,)}, r"final_coin has shape \[1\]: 1 is not the 2"),
        ({"thresholds": (1,)}, r"thresholds has shape \[1\]: 1 is not the 2"),
        ({"max_depth_shape": (0,)}, r"max_depth_shape has shape \[0\]: D is 0, expected 1 or more"),
    ],
)
def test_a_wrong_shape_is_refused_by_name(changed, message):
    with pytest.raises(ValueError, match=message):
        VERIFY_TREE.sizes(verify_shapes(**changed), method="coupled")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"budget": 1024}, ValueError, "budget 1024 is outside 1 to 1023"),
        ({"budget": 0}, ValueError, "budget 0 is outside 1 to 1023"),
        ({"budget": "many"}, TypeError, "budget is 'many', expected an integer"),
        ({"mode": "bush"}, ValueError, 'mode "bush" is unknown \\(one of tree, chain\\)'),
        ({"mode": 2}, ValueError, "mode 2 is outside 0 to 1"),
        ({"keep_chain": 2}, ValueError, "keep_chain 2 is outside 0 to 1"),
        ({"depth": 1}, TypeError, "build_tree has attributes budget, mode, keep_chain, got"),
    ],
)
def test_a_wrong_attribute_is_refused_by_name(changed, error, message):
    attributes = {"budget": 7, "mode": "tree", "keep_chain": 0} | changed
    with pytest.raises(error, match=message):
        BUILD_TREE.sizes([(B, D, 7), (B, D, 7), (B,)], **attributes)


def test_what_a_kernel_has_no_room_for_is_refused():
    def wide(nodes):
        links = dict.fromkeys(("token_ids", "next_token", "next_sibling"), (B, nodes))
        return verify_shapes(logits=(B, nodes, V), token_bitmask=(B, nodes, 0), **links)

    with pytest.raises(ValueError, match="a tree of 1024 draft nodes exceeds the 1023 of the kernel"):
        VERIFY_TREE.sizes(wide(1025), method="coupled")
    VERIFY_TREE.sizes(wide(1024), method="coupled")
    chain = {"budget": 40, "mode": "tree", "keep_chain": 1}
    with pytest.raises(ValueError, match="keep_chain with D 33 exceeds the 32 depths of the kernel"):
        BUILD_TREE.sizes([(B, 33, 40), (B, 33, 40), (B,)], **chain)
    BUILD_TREE.sizes([(B, 32, 40), (B, 32, 40), (B,)], **chain)


# ---------------------------------------------------------------------------------------------------------------------
# Kernels, as NVRTC compiled them
# ---------------------------------------------------------------------------------------------------------------------

# The first lines of a kernel in PTX: its name, its parameters, and the block size it is bound to.
KERNEL = re.compile(r"\.visible \.entry (\w+)\((.*?)\)\s*\.maxntid (\d+)\n", re.DOTALL)


def kernels(operation: Operation) -> dict[str, tuple[list[str], int]]:
    ptx = nvrtc.compile_source(operation.source, ARCH).ptx.decode()
    return {name: (re.findall(r"\.param \.(\w+)", body), int(block)) for name, body, block in KERNEL.findall(ptx)}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_kernels_take_inputs_then_scalars_then_outputs(operation):
    expected = [*("u64" for _ in operation.inputs), *("u32" for _ in operation.scalars)]
    expected += ["u64" for _ in operation.outputs]
    for dtype in operation.types or (None,):
        parameters, block = kernels(operation)[operation.entry(dtype)]
        assert parameters == expected
        assert block == operation.block


def test_no_kernel_is_missing_from_the_table():
    compiled = {name for operation in OPERATIONS.values() for name in kernels(operation)}
    assert compiled == {
        operation.entry(dtype) for operation in OPERATIONS.values() for dtype in operation.types or (None,)
    }


@pytest.mark.parametrize("operation", AOT, ids=lambda operation: operation.name)
def test_shared_memory_needs_no_opt_in(operation):
    usage = nvrtc.compile_source(operation.source, ARCH).resource_usage()
    candidates = [(B, 15, 1023), (B, 15, 1023), (B,)]
    sizes = {
        "draft_topk": DRAFT_TOPK.sizes([(B, 15, 151936), (151936,)], k=1023),
        "build_tree": BUILD_TREE.sizes(candidates, budget=1023, mode="tree", keep_chain=1),
        "verify_tree": VERIFY_TREE.sizes(verify_shapes(), method="coupled"),
    }[operation.name]
    for dtype in operation.types or (None,):
        static = usage[operation.entry(dtype)].static_shared_bytes
        assert static + operation.shared_bytes(sizes) <= MAX_SHARED_BYTES
