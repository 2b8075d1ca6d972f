"""The tree operations of a DDTree round (arXiv 2604.12989): the public face of ``ddtree.plugins``.

A round is ``build_tree`` -> ``encode_tree`` -> the target's pass over the tree -> ``verify_tree`` -> ``commit`` and
``gather_features``. All work on a batch of trees that are padded to N = budget + 1 nodes, the root included.

Arguments of wrong shape, dtype or range raise a one-line error before any work. Data never does: see
``Verified.status``. Tensors on a CPU are served by ``reference``, which is also the specification; tensors on a GPU by
the kernels, on torch's current stream. There the host waits for nothing, so what only a device knows is not checked: a
tree that does not fit into the cache is cut off, and negative ids in ``draft_to_target`` are not refused. torch.compile
and torch.export see the operators of ``custom_ops``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.plugins import custom_ops, reference
from ddtree.plugins.operations import METHODS, MODES, mask_words
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified, check_tensor, root_tree

__all__ = [
    "DraftTree",
    "RowRules",
    "SamplingTensors",
    "Verified",
    "build_tree",
    "commit",
    "encode_tree",
    "gather_features",
    "root_tree",
    "verify_tree",
]

_LOGIT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_ID_TYPES = (torch.int32, torch.int64)


def build_tree(
    draft_logits: Tensor,
    root_token_ids: Tensor,
    *,
    budget: int,
    mode: str = "tree",
    keep_chain: bool = False,
    draft_to_target: Tensor | None = None,
) -> DraftTree:
    """The ``budget`` most probable prefixes of the product of the drafter's D marginals, as a tree (exact).

    Marginals are softmax at temperature 1 over the whole vocabulary, in float32. Nodes stand in descending log-weight,
    ties in the order of their rank tuples, which is the order in which the best-first heap of the paper (arXiv
    2604.12989, algorithm 1) pops them; equal logits rank by the lower token id. Prefixes of probability 0 never appear,
    so there may be fewer than ``budget``. A row that is no distribution (NaN, +inf, nothing finite) ends the tree above
    its depth.

    Args:
        draft_logits: [batch, D, vocab] float32, float16 or bfloat16.
        root_token_ids: [batch] int32 or int64, the last sampled token of each sequence.
        budget: the most draft nodes of a tree, the root not counted; 0 or more.
        mode: "tree", or "chain": the likeliest token of each depth, a tree of width 1 (plain DFlash).
        keep_chain: make that chain part of every tree whose budget is at least D, in place of its last nodes.
        draft_to_target: [vocab] int32, the target's token id of each draft id. Draft ids of one target id are merged:
            their probabilities are added, and equal ones rank by target id.

    Returns:
        DraftTree of N = budget + 1 nodes a slot. For a plain autoregressive step, without a drafter, use ``root_tree``.

    Raises:
        ValueError: a wrong shape, dtype, mode or budget.
    """
    check_tensor("draft_logits", draft_logits, (None, None, None), *_LOGIT_TYPES)
    batch, max_depth, vocab = draft_logits.shape
    if batch < 1 or max_depth < 1 or vocab < 1:
        raise ValueError(
            f"draft_logits has shape {list(draft_logits.shape)}: give [batch, D, vocab] of at least 1 each"
        )
    check_tensor("root_token_ids", root_token_ids, (batch,), *_ID_TYPES)
    if budget < 0:
        raise ValueError(f"budget {budget} is negative (0 is the root alone; the root is not counted)")
    _check_choice("mode", mode, MODES)
    if draft_to_target is not None:
        check_tensor("draft_to_target", draft_to_target, (vocab,), torch.int32)
    _check_device("draft_logits", draft_logits, root_token_ids=root_token_ids, draft_to_target=draft_to_target)
    serve = _serve(draft_logits, custom_ops.build_tree, custom_ops.build_tree_cuda)
    if serve:
        fields = serve(draft_logits, root_token_ids, draft_to_target, budget, mode, keep_chain)
        return custom_ops.tree_of(fields, max_depth)
    if draft_to_target is not None:
        lowest = int(draft_to_target.min())
        if lowest < 0:
            raise ValueError(f"draft_to_target holds {lowest}, expected absolute target ids (add the index to offsets)")
    return reference.build_tree(
        draft_logits,
        root_token_ids,
        budget=budget,
        mode=mode,
        keep_chain=keep_chain,
        draft_to_target=draft_to_target,
    )


def encode_tree(
    tree: DraftTree,
    root_positions: Tensor,
    past_lengths: Tensor,
    cache_length: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Position ids and attention mask of the target's pass over the tree, whose rows it writes at past .. past + N - 1.

    A row sees the committed past, its ancestors and itself. With ``window`` it sees a key only if its own position less
    the key's is below it; siblings share a position. Padding rows see the past and themselves; no real row sees them.

    Args:
        tree: from ``build_tree`` or ``root_tree``.
        root_positions: [batch] int64, index of the root in its sequence.
        past_lengths: [batch] int64, number of committed cache rows; equal to ``root_positions``.
        cache_length: rows of the cache, at least past_lengths + N.
        dtype: of the mask: float32, float16 or bfloat16.
        window: positions a sliding-window layer sees, the row's own included; None for full attention.

    Returns:
        position_ids [batch, N] int64, root position + depth, and attention_mask [batch, 1, N, cache_length], additive:
        0 where visible, the most negative finite value of ``dtype`` elsewhere.

    Raises:
        ValueError: a wrong shape, dtype or window, or a tree that does not fit into the cache.
    """
    batch, width = tree.token_ids.shape
    check_tensor("root_positions", root_positions, (batch,), torch.int64)
    check_tensor("past_lengths", past_lengths, (batch,), torch.int64)
    if dtype not in _LOGIT_TYPES:
        raise ValueError(f"dtype of the mask is {dtype}, expected float32, float16 or bfloat16")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is below 1 (None for full attention)")
    _check_device("the tree", tree.token_ids, root_positions=root_positions, past_lengths=past_lengths)
    serve = _serve(tree.token_ids, custom_ops.encode_tree, custom_ops.encode_tree_cuda)
    if serve:
        return serve(custom_ops.tree_tensors(tree), root_positions, past_lengths, cache_length, dtype, window)
    longest = max(past_lengths.tolist(), default=0)
    if longest + width > cache_length:
        raise ValueError(
            f"past length {longest} + {width} tree rows exceed cache_length {cache_length} "
            f"(grow the cache to {longest + width} or lower the budget)"
        )
    return reference.encode_tree(tree, root_positions, past_lengths, cache_length, dtype, window=window)


def verify_tree(
    logits: Tensor,
    tree: DraftTree,
    root_positions: Tensor,
    sampling: SamplingTensors,
    *,
    method: str = "coupled",
    token_bitmask: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    coins: Tensor | None = None,
    final_coin: Tensor | None = None,
    row_rules: Sequence[RowRules | None] | None = None,
) -> Verified:
    """Walks from the root along the tokens that the target itself writes, and adds the bonus token where it stops.

    ``coupled`` draws at a node of position p the token of the largest ``logit / temperature + Gumbel noise`` among
    those that the filters keep. The noise comes from Philox4x32-10 keyed by the seed and counted by (token, p), so the
    token depends on (seed, position, distribution) alone: the text is the one that autoregressive decoding with the
    same seed writes, for every budget, tree and batch. Slots of temperature below 1e-5 take the argmax, lowest id.
    ``greedy`` does so for every slot.
    ``target_only`` follows SGLang's tree_speculative_sampling_target_only: children in sibling order, one coin a node,
    a draw from what the rejected children leave. It is lossless in distribution while both thresholds are 1.

    row_rules come first, then token_bitmask, temperature, top_k (exactly k, ties to the lower id), top_p over what that
    leaves, renormalised (the smallest set that reaches it), min_p relative to the largest probability. Only rows on the
    accepted path are read; the others may hold anything.

    Args:
        logits: [batch, N, vocab] float32, float16 or bfloat16, row i the target's prediction after node i.
        tree: the tree that was scored.
        root_positions: [batch] int64, index of the root in its sequence (prompt from 0).
        sampling: settings, one a slot.
        method: "coupled", "greedy" or "target_only".
        token_bitmask: [batch, N, ceil(vocab/32)] int32, bit v%32 of word v/32 set: token v is allowed after node i.
        threshold_single, threshold_acc: target_only: accept a child of at least this probability; divide the cumulative
            probability of the children by this before comparing the coin. 0 to 1; below 1 they are lossy.
        coins: target_only: [batch, N] float32 in (0, 1), one a node, in place of the seeded ones.
        final_coin: target_only: [batch] float32 in (0, 1), for the draw at the end.
        row_rules: per slot the bias, penalties, bad words, minimum length and grammar of its request, or None. On a GPU
            the slots that have some are verified on the host, row after row of their path, and the call waits for them;
            the others take the kernel. ``RowRules.advance`` is the caller's, after the round.

    Returns:
        Verified. Rows are D + 1 wide (``tree.max_depth`` + 1).

    Raises:
        ValueError: a wrong shape, dtype, method or threshold; row_rules where a graph is traced.
    """
    batch, width = tree.token_ids.shape
    check_tensor("logits", logits, (batch, width, None), *_LOGIT_TYPES)
    vocab = logits.shape[2]
    if vocab < 1:
        raise ValueError(f"logits has shape {list(logits.shape)}: give a vocabulary of at least 1")
    check_tensor("root_positions", root_positions, (batch,), torch.int64)
    if sampling.temperature.shape[0] != batch:
        raise ValueError(f"sampling has {sampling.temperature.shape[0]} slots, expected {batch}")
    _check_choice("method", method, METHODS)
    if token_bitmask is not None:
        check_tensor("token_bitmask", token_bitmask, (batch, width, mask_words(vocab)), torch.int32)
    if method != "target_only" and (
        coins is not None or final_coin is not None or threshold_single != 1 or threshold_acc != 1
    ):
        raise ValueError(f'coins and thresholds belong to method "target_only", not "{method}" (leave them out)')
    for name, threshold in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
        if not 0 <= threshold <= 1:
            raise ValueError(f"{name} {threshold} is outside 0 to 1")
    if coins is not None:
        check_tensor("coins", coins, (batch, width), torch.float32)
    if final_coin is not None:
        check_tensor("final_coin", final_coin, (batch,), torch.float32)
    _check_device(
        "logits",
        logits,
        tree=tree.token_ids,
        root_positions=root_positions,
        sampling=sampling.temperature,
        token_bitmask=token_bitmask,
        coins=coins,
        final_coin=final_coin,
    )
    rules = _active(row_rules, batch, vocab)
    serve = _serve(logits, custom_ops.verify_tree, custom_ops.verify_tree_cuda)
    if serve:
        if row_rules is not None and serve is custom_ops.verify_tree:
            raise ValueError("row_rules are Python objects: no part of a traced graph (verify their requests outside)")
        verified = Verified(
            *serve(
                logits,
                custom_ops.tree_tensors(tree),
                root_positions,
                custom_ops.sampling_tensors(sampling),
                token_bitmask,
                coins,
                final_coin,
                tree.max_depth,
                method,
                threshold_single,
                threshold_acc,
            )
        )
        for slot in (slot for slot, of_slot in enumerate(rules) if of_slot):
            one = slice(slot, slot + 1)
            on_host = reference.verify_tree(
                logits[one],
                custom_ops.tree_of([field[one].cpu() for field in custom_ops.tree_tensors(tree)], tree.max_depth),
                root_positions[one].cpu(),
                SamplingTensors(*(setting[one].cpu() for setting in custom_ops.sampling_tensors(sampling))),
                method=method,
                token_bitmask=None if token_bitmask is None else token_bitmask[one],
                threshold_single=threshold_single,
                threshold_acc=threshold_acc,
                coins=None if coins is None else coins[one],
                final_coin=None if final_coin is None else final_coin[one],
                row_rules=rules[one],
            )
            for field, result in vars(on_host).items():
                getattr(verified, field)[one] = result.to(logits.device)
        return verified
    return reference.verify_tree(
        logits,
        tree,
        root_positions,
        sampling,
        method=method,
        token_bitmask=token_bitmask,
        threshold_single=threshold_single,
        threshold_acc=threshold_acc,
        coins=coins,
        final_coin=final_coin,
        row_rules=rules,
    )


def commit(
    caches: Sequence[tuple[Tensor, Tensor]],
    past_lengths: Tensor,
    verified: Verified,
    *,
    block_table: Tensor | None = None,
) -> None:
    """Moves, in place, the cache rows of the accepted nodes to the end of the committed past.

    Row past + accepted_nodes[i] goes to past + i, in ascending order, so that no row is overwritten before it moved;
    all other rows keep their values. The bonus token has no row yet. Advance the past by accepted_count + 1 afterwards.

    Args:
        caches: per layer (key, value), each [batch, kv_heads, cache, head_dim]; or of several layers together, each
            [layers, batch, kv_heads, cache, head_dim], which a CPU moves in one go. With ``block_table`` the pools of
            paged caches, [blocks of the pool, kv_heads, tokens_per_block, head_dim].
        past_lengths: [batch] int64, rows committed before this round.
        verified: from ``verify_tree``.
        block_table: [batch, blocks] int32, the block of the pool that holds tokens_per_block rows of a slot; -1: none.

    Raises:
        ValueError: a wrong shape or dtype; on a CPU also a row outside of the cache or of the pool, before
            anything moves. On a GPU such a row stays where it is.
    """
    batch = verified.accepted_count.shape[0]
    check_tensor("past_lengths", past_lengths, (batch,), torch.int64)
    device = past_lengths.device
    checked, shortest = None, None  # the last cache's shape, which is that of most; rows of the shortest one
    for layer, pair in enumerate(caches):
        for cache in pair:
            if cache.shape != checked:
                slots = batch if block_table is None else None
                stacked = [None] if block_table is None and pair[0].ndim == 5 else []
                check_tensor(f"cache of layer {layer}", cache, (*stacked, slots, None, None, None))
                checked = cache.shape
                shortest = checked[-2] if shortest is None else min(shortest, checked[-2])
            if cache.device != device:
                raise ValueError(f"cache of layer {layer} is on {cache.device}, expected {device} like past_lengths")
    _check_device("past_lengths", past_lengths, verified=verified.accepted_nodes, block_table=block_table)
    accepted = (verified.accepted_nodes, verified.accepted_count)
    if block_table is not None:
        check_tensor("block_table", block_table, (batch, None), torch.int32)
        serve = _serve(past_lengths, custom_ops.commit_paged, custom_ops.commit_paged_cuda)
        if serve:
            serve([pool for pair in caches for pool in pair], block_table, past_lengths, *accepted)
        else:
            reference.commit_paged(caches, block_table, past_lengths, verified)
        return
    serve = _serve(past_lengths, custom_ops.commit, custom_ops.commit_cuda)
    if serve:
        flat = [cache for pair in caches for layer in _layers(*pair) for cache in layer]
        serve(flat, past_lengths, *accepted)
        return
    needed = int((past_lengths + verified.accepted_nodes.amax(1)).max()) + 1 if batch else 0
    if shortest is not None and shortest < needed:
        raise ValueError(f"a cache of {shortest} rows does not hold the accepted path (needed: {needed})")
    reference.commit(caches, past_lengths, verified)


def _layers(key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(key, value) of each layer, of one layer's caches or of those of several together."""
    return list(zip(key, value, strict=True)) if key.ndim == 5 else [(key, value)]


def gather_features(features: Tensor, verified: Verified) -> Tensor:
    """Context features of the accepted nodes, for the drafter's next pass.

    Args:
        features: [batch, N, layers * hidden], of the target's pass over the tree.
        verified: from ``verify_tree``.

    Returns:
        [batch, D + 1, layers * hidden] of the same dtype: rows of the root and the accepted nodes, then zeros. A slot
        that failed is all zeros.

    Raises:
        ValueError: a wrong shape.
    """
    batch = verified.accepted_count.shape[0]
    check_tensor("features", features, (batch, None, None))
    _check_device("features", features, verified=verified.accepted_nodes)
    serve = _serve(features, custom_ops.gather_features, custom_ops.gather_features_cuda)
    if serve:
        return serve(features, verified.accepted_nodes, verified.accepted_count)
    return reference.gather_features(features, verified)


def _active(row_rules: Sequence[RowRules | None] | None, batch: int, vocab: int) -> list[RowRules | None]:
    """The rules of each slot that can still change a row of it; an empty list if there are none at all."""
    if row_rules is None:
        return []
    if len(row_rules) != batch:
        raise ValueError(f"row_rules has {len(row_rules)} slots, expected {batch} (None for a slot without)")
    for rules in row_rules:
        if rules is not None and rules.vocab_size != vocab:
            raise ValueError(f"row_rules of vocab_size {rules.vocab_size}, expected {vocab}, that of the logits")
    return [rules if rules is not None and rules.active else None for rules in row_rules]


def _serve(tensor: Tensor, operator: Callable, kernels: Callable) -> Callable[..., Any] | None:
    """What serves a call: the torch operator while a graph is traced, the kernels on a GPU, None: the reference."""
    if torch.compiler.is_compiling() or type(tensor) is not Tensor:  # a fake tensor has a type of its own
        return operator
    return kernels if tensor.is_cuda else None


def _check_device(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    device = tensor.device
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"{name} is on {device}: only the CPU is served, and CUDA (use .cpu())")
    for other, beside in others.items():
        if beside is not None and beside.device != device:
            raise ValueError(f"{other} is on {beside.device}, expected {device} like {name}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f'{name} "{value}" is unknown (one of {", ".join(choices)})')
