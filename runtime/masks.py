"""Additive masks of the passes that are not tree passes: a prompt chunk of the target, and the drafter's block.

0 where a query row sees a cache slot, the most negative finite value of the dtype elsewhere.
"""

import torch


def causal_mask(
    past: int,
    rows: int,
    cache_length: int,
    dtype: torch.dtype,
    window: int | None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Mask of a prompt chunk at positions [past, past + rows) of one sequence: [1, 1, rows, cache]."""
    query = torch.arange(past, past + rows, device=device)[:, None]  # [rows, 1]
    slot = torch.arange(cache_length, device=device)[None]  # [1, cache]; a committed slot's index is its position
    visible = slot <= query
    if window is not None:
        visible &= query - slot < window
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, hidden)[None, None]


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
    hidden = torch.finfo(dtype).min
    mask = torch.full((len(context), 1, block, cache_length), hidden, dtype=dtype)
    for rows, cached, count in zip(mask[:, 0], context.tolist(), counts.tolist(), strict=True):  # rows [block, cache]
        anchor = cached + count  # its position, and the number of context rows in sight
        in_context, in_block = rows[:, :anchor], rows[:, cached + width : cached + width + block]
        in_context.zero_()
        in_block.zero_()
        if causal:
            in_block.masked_fill_(torch.ones(block, block, dtype=torch.bool).triu(1), hidden)
        if window is not None:
            query = torch.arange(block)[:, None]  # relative to the anchor
            in_context.masked_fill_(query + anchor - torch.arange(anchor) >= window, hidden)
            in_block.masked_fill_(query - torch.arange(block) >= window, hidden)
    return mask


def queued_draft_mask(
    context: torch.Tensor,
    counts: torch.Tensor,
    width: int,
    block: int,
    cache_length: int,
    dtype: torch.dtype,
    window: int | None,
    causal: bool,
) -> torch.Tensor:
    """The same as ``draft_mask``, for tensors whose values the host does not know yet."""
    device = context.device
    anchor, first = ((context + of)[:, None, None, None] for of in (counts, width))  # [batch, 1, 1, 1]
    slot = torch.arange(cache_length, device=device)
    row = slot - first  # of the block, [batch, 1, 1, cache]
    visible = (slot < anchor) | ((row >= 0) & (row < block))
    query = torch.arange(block, device=device)[:, None]
    if causal:
        visible = visible & (row <= query)
    if window is not None:
        position = torch.where(row < 0, slot - anchor, row)  # relative to the anchor
        visible = visible & (query - position < window)
    mask = torch.full((len(context), 1, block, cache_length), torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(visible, 0)
