"""The tree operations as torch operators, ``torch.ops.ddtree.*``, which torch.compile and torch.export take whole.

An operator has tensors and plain values for arguments and tensors for results: a DraftTree is its eight tensors, in
the order of its fields, SamplingTensors and Verified are their five. ``ops`` checks arguments and wraps results. It
calls an operator where a graph is traced; elsewhere it calls the functions ``*_cuda``, which launch the kernels, by
themselves, because the way through an operator costs some ten microseconds.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.library import custom_op

from ddtree.plugins import reference
from ddtree.plugins.launch import launch
from ddtree.plugins.operations import (
    BUILD_TREE,
    COMMIT_LINEAR,
    COMMIT_PAGED,
    DRAFT_TOPK,
    ENCODE_TREE,
    GATHER_FEATURES,
    MAX_BUDGET,
    VERIFY_TREE,
    Operation,
    mask_words,
)
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified, first_nodes

TreeTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
VerifiedTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def tree_tensors(tree: DraftTree) -> TreeTensors:
    return (
        tree.token_ids,
        tree.parents,
        tree.depths,
        tree.node_logws,
        tree.node_count,
        tree.next_token,
        tree.next_sibling,
        tree.ancestor_mask,
    )


def tree_of(tensors: Sequence[Tensor], max_depth: int) -> DraftTree:
    token_ids, parents, depths, node_logws, node_count, next_token, next_sibling, ancestor_mask = tensors
    return DraftTree(
        token_ids, parents, depths, node_logws, node_count, next_token, next_sibling, ancestor_mask, max_depth
    )


def sampling_tensors(sampling: SamplingTensors) -> list[Tensor]:
    return [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed]


# ---------------------------------------------------------------------------------------------------------------------
# build_tree
# ---------------------------------------------------------------------------------------------------------------------


@custom_op("ddtree::build_tree", mutates_args=(), device_types="cpu")
def build_tree(
    draft_logits: Tensor,  # [batch, D, vocab]
    root_token_ids: Tensor,  # [batch]
    draft_to_target: Tensor | None,  # [vocab]
    budget: int,
    mode: str,
    keep_chain: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tree_tensors(
        reference.build_tree(
            draft_logits,
            root_token_ids,
            budget=budget,
            mode=mode,
            keep_chain=keep_chain,
            draft_to_target=draft_to_target,
        )
    )


@build_tree.register_kernel("cuda")
def build_tree_cuda(
    draft_logits: Tensor,
    root_token_ids: Tensor,
    draft_to_target: Tensor | None,
    budget: int,
    mode: str,
    keep_chain: bool,
) -> TreeTensors:
    _, max_depth, vocab = draft_logits.shape
    if budget > MAX_BUDGET:
        raise ValueError(f"budget {budget} exceeds the {MAX_BUDGET} draft nodes of the CUDA kernel (lower the budget)")
    if budget == 0:  # the kernel makes one node or more
        fields = build_tree_cuda(draft_logits, root_token_ids, draft_to_target, 1, "tree", False)
        cut = tree_tensors(first_nodes(tree_of(fields, max_depth), 0))
        return tuple(field.contiguous() for field in cut)  # type: ignore[return-value]
    roots = root_token_ids.to(torch.int32).contiguous()
    table = roots.new_empty(0) if draft_to_target is None else draft_to_target.contiguous()
    most = 1 if mode == "chain" else min(budget, vocab)
    candidates = launch(DRAFT_TOPK, [draft_logits.contiguous(), table], k=most)
    keep_chain = keep_chain and budget >= max_depth
    fields = launch(BUILD_TREE, [*candidates, roots], budget=budget, mode=mode, keep_chain=int(keep_chain))
    return tuple(fields)  # type: ignore[return-value]


@build_tree.register_fake
def _(draft_logits, root_token_ids, draft_to_target, budget, mode, keep_chain):
    nodes = budget + 1
    return tuple(_new_outputs(BUILD_TREE, draft_logits, B=draft_logits.shape[0], N=nodes, W=mask_words(nodes)))


# ---------------------------------------------------------------------------------------------------------------------
# encode_tree
# ---------------------------------------------------------------------------------------------------------------------


@custom_op("ddtree::encode_tree", mutates_args=(), device_types="cpu")
def encode_tree(
    tree: list[Tensor],
    root_positions: Tensor,  # [batch]
    past_lengths: Tensor,  # [batch]
    cache_length: int,
    dtype: torch.dtype,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    draft_tree = tree_of(tree, max_depth=0)  # positions and mask do not depend on max_depth
    return reference.encode_tree(draft_tree, root_positions, past_lengths, cache_length, dtype, window=window)


@encode_tree.register_kernel("cuda")
def encode_tree_cuda(
    tree: Sequence[Tensor],
    root_positions: Tensor,
    past_lengths: Tensor,
    cache_length: int,
    dtype: torch.dtype,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    depths, ancestor_mask = tree[2], tree[7]
    position_ids, attention_mask = launch(
        ENCODE_TREE,
        _contiguous(depths, ancestor_mask, root_positions, past_lengths),
        element_type=dtype,
        cache_length=cache_length,
        window=window or 0,
    )
    return position_ids, attention_mask


@encode_tree.register_fake
def _(tree, root_positions, past_lengths, cache_length, dtype, window):
    batch, width = tree[0].shape
    return tuple(_new_outputs(ENCODE_TREE, tree[0], dtype, B=batch, N=width, cache_length=cache_length))


# ---------------------------------------------------------------------------------------------------------------------
# verify_tree
# ---------------------------------------------------------------------------------------------------------------------


@custom_op("ddtree::verify_tree", mutates_args=(), device_types="cpu")
def verify_tree(
    logits: Tensor,  # [batch, N, vocab]
    tree: list[Tensor],
    root_positions: Tensor,  # [batch]
    sampling: list[Tensor],
    token_bitmask: Tensor | None,  # [batch, N, ceil(vocab / 32)]
    coins: Tensor | None,  # [batch, N]
    final_coin: Tensor | None,  # [batch]
    max_depth: int,
    method: str,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    verified = reference.verify_tree(
        logits,
        tree_of(tree, max_depth),
        root_positions,
        SamplingTensors(*sampling),
        method=method,
        token_bitmask=token_bitmask,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
        coins=coins,
        final_coin=final_coin,
    )
    return (
        verified.accepted_nodes,
        verified.accepted_count,
        verified.output_ids,
        verified.logprobs,
        verified.status,
    )


@verify_tree.register_kernel("cuda")
def verify_tree_cuda(
    logits: Tensor,
    tree: Sequence[Tensor],
    root_positions: Tensor,
    sampling: Sequence[Tensor],
    token_bitmask: Tensor | None,
    coins: Tensor | None,
    final_coin: Tensor | None,
    max_depth: int,
    method: str,
    threshold_single: float,
    threshold_acc: float,
) -> VerifiedTensors:
    batch, width, _ = logits.shape
    token_ids, _, _, _, node_count, next_token, next_sibling, _ = tree
    temperature = sampling[0]
    thresholds = temperature.new_empty(2)
    if method == "target_only":  # filled on the device: a copy from the host would wait for it
        thresholds[0].fill_(threshold_single)
        thresholds[1].fill_(threshold_acc)
    inputs = _contiguous(
        logits,
        token_ids,
        next_token,
        next_sibling,
        node_count,
        root_positions,
        *sampling,
        token_ids.new_empty(batch, width, 0) if token_bitmask is None else token_bitmask,
        temperature.new_empty(batch, 0) if coins is None else coins,
        temperature.new_empty(0) if final_coin is None else final_coin,
        thresholds,
        token_ids.new_empty(max(max_depth, 1)),  # the kernel's rows are two wide or more
    )
    accepted_nodes, accepted_count, output_ids, logprobs, status = launch(VERIFY_TREE, inputs, method=method)
    nodes, ids, log_probs = (wide[:, : max_depth + 1].contiguous() for wide in (accepted_nodes, output_ids, logprobs))
    return nodes, accepted_count, ids, log_probs, status


@verify_tree.register_fake
def _(logits, tree, root_positions, sampling, token_bitmask, coins, final_coin, max_depth, method, single, acc):
    return tuple(_new_outputs(VERIFY_TREE, logits, B=logits.shape[0], P=max_depth + 1))


# ---------------------------------------------------------------------------------------------------------------------
# commit
# ---------------------------------------------------------------------------------------------------------------------


@custom_op("ddtree::commit", mutates_args=("caches",), device_types="cpu")
def commit(
    caches: list[Tensor],  # key, value of layer 0, key, value of layer 1, ...; each [batch, kv_heads, cache, head_dim]
    past_lengths: Tensor,  # [batch]
    accepted_nodes: Tensor,  # [batch, D + 1]
    accepted_count: Tensor,  # [batch]
) -> None:
    layers = list(zip(caches[::2], caches[1::2], strict=True))
    reference.commit(layers, past_lengths, _accepted(accepted_nodes, accepted_count))


@commit.register_kernel("cuda")
def commit_cuda(caches: Sequence[Tensor], past_lengths: Tensor, accepted_nodes: Tensor, accepted_count: Tensor) -> None:
    inputs = _contiguous(past_lengths, accepted_nodes, accepted_count)
    for (_, kv_heads, cache, row_bytes), pointers in _pointer_tables(caches, past_lengths.device):
        launch(COMMIT_LINEAR, [pointers, *inputs], kv_heads=kv_heads, cache=cache, row_bytes=row_bytes)


@commit.register_fake
def _(caches, past_lengths, accepted_nodes, accepted_count):
    return None


@custom_op("ddtree::commit_paged", mutates_args=("pools",), device_types="cpu")
def commit_paged(
    pools: list[Tensor],  # as above; each [blocks of the pool, kv_heads, tokens_per_block, head_dim]
    block_table: Tensor,  # [batch, blocks]
    past_lengths: Tensor,
    accepted_nodes: Tensor,
    accepted_count: Tensor,
) -> None:
    layers = list(zip(pools[::2], pools[1::2], strict=True))
    reference.commit_paged(layers, block_table, past_lengths, _accepted(accepted_nodes, accepted_count))


@commit_paged.register_kernel("cuda")
def commit_paged_cuda(
    pools: Sequence[Tensor], block_table: Tensor, past_lengths: Tensor, accepted_nodes: Tensor, accepted_count: Tensor
) -> None:
    inputs = _contiguous(block_table, past_lengths, accepted_nodes, accepted_count)
    for (blocks, kv_heads, page, row_bytes), pointers in _pointer_tables(pools, past_lengths.device):
        launch(
            COMMIT_PAGED,
            [pointers, *inputs],
            pool_blocks=blocks,
            kv_heads=kv_heads,
            tokens_per_block=page,
            row_bytes=row_bytes,
        )


@commit_paged.register_fake
def _(pools, block_table, past_lengths, accepted_nodes, accepted_count):
    return None


def _accepted(accepted_nodes: Tensor, accepted_count: Tensor) -> Verified:
    """What commit and gather_features read of a Verified, and nothing else."""
    empty = accepted_nodes.new_empty(0)
    return Verified(accepted_nodes, accepted_count, output_ids=empty, logprobs=empty, status=empty)


def _pointer_tables(caches: Sequence[Tensor], device: torch.device) -> list[tuple[tuple[int, int, int, int], Tensor]]:
    """For caches of one shape (slots or blocks, heads, rows, bytes a row) their addresses, int64 [n] on the device."""
    addresses: dict[tuple[int, int, int, int], list[int]] = {}
    for at, cache in enumerate(caches):
        name = "value cache" if at % 2 else "key cache"
        if not cache.is_contiguous():
            strides = list(cache.stride())
            raise ValueError(
                f"{name} of layer {at // 2} has strides {strides}: not contiguous, and its rows move in place"
            )
        if cache.device != device:  # an address says nothing about it
            raise ValueError(f"{name} of layer {at // 2} is on {cache.device}, expected {device}")
        first, heads, rows, head_dim = cache.shape
        addresses.setdefault((first, heads, rows, head_dim * cache.element_size()), []).append(cache.data_ptr())
    return [(shape, _on_device(device, tuple(of_shape))) for shape, of_shape in addresses.items()]


_tables: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}


def _on_device(device: torch.device, addresses: tuple[int, ...]) -> Tensor:
    """Kept as long as the process: a CUDA graph may hold a table's address. It is a few hundred bytes for each set of
    caches, which a server allocates once."""
    if (device, addresses) not in _tables:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("commit meets these caches for the first time: call it once before the graph's capture")
        table = torch.tensor(addresses, dtype=torch.int64, device=device)
        return _tables.setdefault((device, addresses), table)  # the first thread's, if two come at once
    return _tables[device, addresses]


# ---------------------------------------------------------------------------------------------------------------------
# gather_features
# ---------------------------------------------------------------------------------------------------------------------


@custom_op("ddtree::gather_features", mutates_args=(), device_types="cpu")
def gather_features(
    features: Tensor,  # [batch, N, layers * hidden]
    accepted_nodes: Tensor,  # [batch, D + 1]
    accepted_count: Tensor,  # [batch]
) -> Tensor:
    return reference.gather_features(features, _accepted(accepted_nodes, accepted_count))


@gather_features.register_kernel("cuda")
def gather_features_cuda(features: Tensor, accepted_nodes: Tensor, accepted_count: Tensor) -> Tensor:
    row_bytes = features.shape[2] * features.element_size()
    inputs = _contiguous(features.contiguous().view(torch.uint8), accepted_nodes, accepted_count)
    (gathered,) = launch(GATHER_FEATURES, inputs, row_bytes=row_bytes)
    return gathered.view(features.dtype)


@gather_features.register_fake
def _(features, accepted_nodes, accepted_count):
    return features.new_empty(*accepted_nodes.shape, features.shape[2])


def _contiguous(*tensors: Tensor) -> list[Tensor]:
    return [tensor.contiguous() for tensor in tensors]


def _new_outputs(
    operation: Operation, like: Tensor, element_type: torch.dtype | None = None, **sizes: int
) -> list[Tensor]:
    """What an operator's fake implementation returns: the outputs of the table, for these sizes."""
    shapes = operation.output_shapes(SimpleNamespace(**sizes))
    return [
        like.new_empty(shape, dtype=element_type if spec.dtype == "T" else getattr(torch, spec.dtype))
        for spec, shape in zip(operation.outputs, shapes, strict=True)
    ]
