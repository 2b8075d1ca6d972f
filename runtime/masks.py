"""Additive masks of the passes that are not tree passes: a prompt chunk of the target, and the drafter's block.

0 where a query row sees a cache slot, the most negative finite value of the dtype elsewhere.
"""

import torch


def causal_mask(past: int, rows: int, cache_length: int, dtype: torch.dtype, window: int | None) -> torch.Tensor:
    """Mask of a prompt chunk at positions [past, past + rows) of one sequence: [1, 1, rows, cache]."""
    query = torch.arange(past, past + rows)[:, None]  # [rows, 1]
    slot = torch.arange(cache_length)[None]  # [1, cache]; a committed slot's index is its position
    visible = slot <= query
    if window is not None:
        visible &= query - slot < window
    return _additive(visible, dtype)[None, None]


def draft_mask(
    context: torch.Tensor,  # int64 [batch]; cached context rows
    counts: torch.Tensor,  # int64 [batch]; valid rows of the new context
    width: int,  # rows of the new context, padding included
    block: int,
    cache_length: int,
    dtype: torch.dtype,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """Mask of the drafter's block rows: [batch, 1, block, cache].

    The pass writes ``width`` context rows at slot ``context`` and the block behind them. Every block row sees the
    cached context, the valid new rows and the whole block (DFlash is bidirectional inside its block) unless ``causal``.
    """
    slot = torch.arange(cache_length)[None]  # [1, cache]
    known = (context + counts)[:, None]  # [batch, 1]; also the anchor's position
    start = context[:, None] + width  # [batch, 1]; the anchor's slot
    in_block = (slot >= start) & (slot < start + block)
    visible = (slot < known) | in_block  # [batch, cache]
    if window is None and not causal:
        return _additive(visible, dtype)[:, None, None].expand(-1, 1, block, -1).contiguous()
    key_position = torch.where(in_block, known + slot - start, slot)[:, None]  # [batch, 1, cache]
    query_position = known[..., None] + torch.arange(block)[None, :, None]  # [batch, block, 1]
    seen = visible[:, None].expand(-1, block, -1)  # [batch, block, cache]
    if window is not None:
        seen = seen & (query_position - key_position < window)
    if causal:
        seen = seen & (key_position <= query_position)
    return _additive(seen, dtype)[:, None]


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
