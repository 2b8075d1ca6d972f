"""The tree operations in a TensorRT-LLM 1.2 network, and DraftTree in the layout of TensorRT-LLM's dynamic trees.

TensorRT-LLM is imported by the functions that add to a network. They use the "v3" face of ``ddtree.plugins.tensorrt``:
TensorRT-LLM 1.2 has TensorRT 10.14.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE, Operation, mask_words
from ddtree.plugins.tree import DraftTree, check_tensor

# ---------------------------------------------------------------------------------------------------------------------
# Networks. Tensors are tensorrt_llm.functional.Tensor here; names, shapes and types are those of the table.
# ---------------------------------------------------------------------------------------------------------------------


def build_tree(
    draft_logits: Any,
    root_token_ids: Any,
    *,
    budget: int,
    mode: str = "tree",
    keep_chain: bool = False,
    draft_to_target: Any = None,
) -> dict[str, Any]:
    """``ops.build_tree`` in a network: two layers, draft_topk and build_tree.

    Args:
        draft_logits: [batch, D, vocab] float32, float16 or bfloat16; vocab is fixed.
        root_token_ids: [batch] int32.
        budget, mode, keep_chain: as of ``ops.build_tree``; the budget from 1 to 1023.
        draft_to_target: [vocab] int32, or None.

    Returns:
        the fields of DraftTree but max_depth, by name.
    """
    functional = _functional()
    attributes: dict[str, int | str] = {"budget": budget, "mode": mode, "keep_chain": int(keep_chain)}
    BUILD_TREE.attribute_numbers(attributes)
    vocab = draft_logits.shape[-1]
    if vocab < 1:
        raise ValueError(f"draft_logits has shape {list(draft_logits.shape)}: the vocabulary must be fixed")
    if draft_to_target is None:
        draft_to_target = functional.constant(np.zeros(0, np.int32))
    candidates = _add_layer(DRAFT_TOPK, [draft_logits, draft_to_target], k=min(budget, vocab))
    return _add_layer(BUILD_TREE, [candidates["token_ids"], candidates["log_probs"], root_token_ids], **attributes)


def verify_tree(
    logits: Any,
    tree: Mapping[str, Any],
    root_positions: Any,
    *,
    max_depth: int,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
    seed: Any,
    method: str = "coupled",
    token_bitmask: Any = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    coins: Any = None,
    final_coin: Any = None,
) -> dict[str, Any]:
    """``ops.verify_tree`` in a network: one layer.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16.
        tree: token_ids, next_token, next_sibling and node_count of the tree that was scored.
        root_positions: [batch] int64.
        max_depth: D, the depths of the draft.
        temperature, top_k, top_p, min_p, seed: [batch], the fields of SamplingTensors.
        method, token_bitmask, threshold_single, threshold_acc, coins, final_coin: as of ``ops.verify_tree``.

    Returns:
        the fields of Verified, by name.
    """
    functional = _functional()
    token_ids = tree["token_ids"]
    batch = functional.shape(token_ids, 0)
    if token_bitmask is None:  # tensors that are not used have a size of 0
        words = functional.unsqueeze(token_ids, -1)
        none = functional.concat([batch, functional.shape(token_ids, 1), 0])
        token_bitmask = functional.slice(words, [0, 0, 0], none)
    if coins is None:
        coins = functional.cast(functional.slice(token_ids, [0, 0], functional.concat([batch, 0])), "float32")
    if final_coin is None:
        final_coin = functional.constant(np.zeros(0, np.float32))
    inputs = [
        logits,
        token_ids,
        *(tree[name] for name in ("next_token", "next_sibling", "node_count")),
        root_positions,
        *(temperature, top_k, top_p, min_p, seed),
        token_bitmask,
        coins,
        final_coin,
        functional.constant(np.array([threshold_single, threshold_acc], np.float32)),
        functional.constant(np.zeros(max_depth, np.int32)),
    ]
    return _add_layer(VERIFY_TREE, inputs, method=method)


def _functional() -> Any:
    try:
        import tensorrt_llm.functional
    except ModuleNotFoundError as error:
        raise ImportError('tensorrt_llm is not installed (pip install "ddtree-trtllm[trtllm]")') from error
    return tensorrt_llm.functional


def _add_layer(operation: Operation, inputs: list[Any], **attributes: int | str) -> dict[str, Any]:
    from tensorrt_llm._common import default_trtnet
    from tensorrt_llm.functional import _create_tensor

    from ddtree.plugins import tensorrt

    tensorrt.register("v3")
    layer = tensorrt.add_layer(default_trtnet(), operation.name, [each.trt_tensor for each in inputs], **attributes)
    return {spec.name: _create_tensor(layer.get_output(i), layer) for i, spec in enumerate(operation.outputs)}


# ---------------------------------------------------------------------------------------------------------------------
# Dynamic trees
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DynamicTreeBuffers:
    """The buffers of TensorRT-LLM's dynamic trees (``DynamicTreeOpsConverter``, ``spec_decoding_*``), by its names.

    The rows of ``packed_mask`` are those of the real nodes alone, request after request, as wide as the longest tree
    needs: XQA finds a row by the lengths, not by the width of a padded buffer. Where attention wants the padded form
    (trtllm-gen, on sm_100 and sm_103), that is ``DraftTree.ancestor_mask`` itself.
    """

    candidates: Tensor  # [batch, N] int64, token ids
    retrieve_index: Tensor  # [batch, N] int32, each node's own index
    retrieve_next_token: Tensor  # [batch, N] int32, first child, -1 = none
    retrieve_next_sibling: Tensor  # [batch, N] int32, next child of the same parent, -1 = none
    spec_decoding_generation_lengths: Tensor  # [batch] int32, nodes, the root included
    spec_decoding_position_offsets: Tensor  # [batch, N] int32, depths
    spec_decoding_packed_mask: Tensor  # [sum of lengths, ceil(longest / 32)] int32, bit j%32 of word j/32: sees node j

    def __post_init__(self) -> None:
        check_tensor("candidates", self.candidates, (None, None), torch.int64)
        shape = tuple(self.candidates.shape)
        for name in ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"):
            check_tensor(name, getattr(self, name), shape, torch.int32)
        check_tensor("spec_decoding_position_offsets", self.spec_decoding_position_offsets, shape, torch.int32)
        lengths = self.spec_decoding_generation_lengths
        check_tensor("spec_decoding_generation_lengths", lengths, shape[:1], torch.int32)
        if not bool(((lengths >= 1) & (lengths <= shape[1])).all()):
            raise ValueError(f"spec_decoding_generation_lengths holds {lengths.tolist()}, expected 1 to {shape[1]}")
        rows = int(lengths.sum()), mask_words(int(lengths.max()))
        check_tensor("spec_decoding_packed_mask", self.spec_decoding_packed_mask, rows, torch.int32)


def to_dynamic_tree(tree: DraftTree) -> DynamicTreeBuffers:
    """A tree of ``ops.build_tree`` in TensorRT-LLM's layout. Waits for the device: the layout depends on lengths."""
    width = tree.token_ids.shape[1]
    index = torch.arange(width, dtype=torch.int32, device=tree.token_ids.device)
    real = index < tree.node_count[:, None]
    return DynamicTreeBuffers(
        candidates=tree.token_ids.long(),
        retrieve_index=index.expand_as(tree.token_ids).contiguous(),
        retrieve_next_token=tree.next_token,
        retrieve_next_sibling=tree.next_sibling,
        spec_decoding_generation_lengths=tree.node_count,
        spec_decoding_position_offsets=tree.depths,
        spec_decoding_packed_mask=tree.ancestor_mask[real][:, : mask_words(int(tree.node_count.max()))].contiguous(),
    )


def from_dynamic_tree(buffers: DynamicTreeBuffers, *, max_depth: int, node_logws: Tensor | None = None) -> DraftTree:
    """TensorRT-LLM's buffers as a tree for ``ops.verify_tree``.

    Args:
        buffers: parents stand before their children and siblings in ascending order, as TensorRT-LLM makes them.
        max_depth: D, at least the depth of every node; outputs of verification are D + 1 wide.
        node_logws: [batch, N] float32, which TensorRT-LLM does not keep; None: 0 for every node.

    Raises:
        ValueError: a wrong shape, dtype, link, depth or mask.
    """
    lengths = buffers.spec_decoding_generation_lengths
    batch, width = buffers.candidates.shape
    device = buffers.candidates.device
    index = torch.arange(width, dtype=torch.int32, device=device)
    real = index < lengths[:, None]  # [batch, N]
    for name in ("retrieve_next_token", "retrieve_next_sibling"):
        links = getattr(buffers, name)
        inside = (links > index) & (links < lengths[:, None]) & real
        if not bool((inside | (links == -1)).all()):
            raise ValueError(f"{name} has a link that is not to a later node of the tree, nor -1")

    parents = torch.full((batch, width), -1, dtype=torch.int32, device=device)
    depths = torch.zeros((batch, width), dtype=torch.int32, device=device)
    sees = torch.eye(width, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    for node in range(width):
        for links, parent in (
            (buffers.retrieve_next_token, torch.full_like(lengths, node)),
            (buffers.retrieve_next_sibling, parents[:, node]),
        ):
            (slots,) = torch.nonzero(links[:, node] >= 0, as_tuple=True)
            to, above = links[slots, node].long(), parent[slots].long()
            parents[slots, to] = parent[slots]
            depths[slots, to] = depths[slots, above] + 1
            sees[slots, to] |= sees[slots, above]
    if not bool((parents[:, 1:] >= 0)[real[:, 1:]].all()):
        raise ValueError("retrieve_next_token and retrieve_next_sibling do not reach every node of the trees")
    if not torch.equal(depths[real], buffers.spec_decoding_position_offsets[real]):
        raise ValueError("spec_decoding_position_offsets are not the depths that the links say")
    if int(depths.max()) > max_depth:
        raise ValueError(f"max_depth {max_depth} is below the depth {int(depths.max())} of a node")
    ancestor_mask = _packed(sees)
    if not torch.equal(ancestor_mask[real][:, : mask_words(int(lengths.max()))], buffers.spec_decoding_packed_mask):
        raise ValueError("spec_decoding_packed_mask is not the ancestors that the links say")
    if node_logws is None:
        node_logws = torch.zeros((batch, width), device=device).masked_fill(~real, -torch.inf)
    return DraftTree(
        token_ids=buffers.candidates.int(),
        parents=parents,
        depths=depths,
        node_logws=node_logws,
        node_count=lengths,
        next_token=buffers.retrieve_next_token,
        next_sibling=buffers.retrieve_next_sibling,
        ancestor_mask=ancestor_mask,
        max_depth=max_depth,
    )


def _packed(sees: Tensor) -> Tensor:
    """Bits of [..., N] booleans in [..., ceil(N/32)] int32 words, bit 0 first."""
    width = sees.shape[-1]
    bits = torch.nn.functional.pad(sees, (0, 32 * mask_words(width) - width)).unflatten(-1, (-1, 32)).int()
    return (bits << torch.arange(32, dtype=torch.int32, device=sees.device)).sum(-1, dtype=torch.int32)
