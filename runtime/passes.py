"""The inputs of passes that are not tree passes: a chunk of a prompt through the target, and the drafter's passes.

Positions and masks are made on the engine's device, of numbers that are there already.
"""

import torch

from ddtree.builder.manifest import DraftInfo, TargetInfo
from ddtree.runtime.engine import DraftInputs, Engine, TargetInputs
from ddtree.runtime.masks import causal_mask, draft_mask, queued_draft_mask


def prompt_pass(
    engine: Engine,
    slot: int,
    token_ids: torch.Tensor,  # int64 [1, rows], on any device
    start: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target over a chunk of the prompt in ``slot``, at positions [start, start + rows): logits of the chunk's
    last token, [1, 1, vocab], and context features, [1, rows, layers*hidden]."""
    rows, device = token_ids.shape[1], engine.device
    engine.reserve_target(start + rows)
    masks = [
        causal_mask(start, rows, engine.target_cache_length, engine.dtype, window, device)
        for window in windows(engine.manifest.target)
    ]
    positions = torch.arange(start, start + rows, device=device)[None]
    write_index = torch.full((1,), start, device=device)
    return engine.prompt(slot, TargetInputs(token_ids.to(device), positions, masks, write_index))


def feed_drafter(
    engine: Engine,
    slot: int,
    features: torch.Tensor,  # [1, rows, layers*hidden]
    start: int,
) -> None:
    """Give the drafter the context features of the prompt's tokens [start, start + rows)."""
    rows, device = features.shape[1], engine.device
    context, counts = torch.full((1,), start, device=device), torch.full((1,), rows, device=device)
    engine.reserve_draft(start + rows + _block_size(engine))
    no_root = torch.zeros(1, dtype=torch.int32, device=device)  # the block is not read
    engine.feed(slot, draft_inputs(engine, features, context, counts, no_root))


def draft_inputs(
    engine: Engine,
    features: torch.Tensor,  # [batch, ctx, layers*hidden]
    context: torch.Tensor,  # int64 [batch]; context rows that the drafter holds
    counts: torch.Tensor,  # int64 [batch]; valid rows of features
    root_token_ids: torch.Tensor,  # int32 [batch]
) -> DraftInputs:
    """New context features, and the block behind them: the root, and masks in place of the tokens to come."""
    draft = engine.manifest.draft
    assert draft is not None
    width, block, device = features.shape[1], draft.block_size, engine.device
    block_ids = torch.full((len(context), block), draft.mask_token_id, device=device)  # [batch, block]
    block_ids[:, 0] = root_token_ids
    steps = torch.arange(max(width, block), device=device)
    mask = queued_draft_mask if engine.asynchronous else draft_mask
    return DraftInputs(
        features,
        context[:, None] + steps[:width],
        block_ids,
        (context + counts)[:, None] + steps[:block],
        [
            mask(context, counts, width, block, engine.draft_cache_length, engine.dtype, window, causal)
            for window, causal in zip(windows(draft), _causal(draft), strict=True)
        ],
        context,
    )


def windows(model: TargetInfo | DraftInfo) -> list[int | None]:
    """The window of each mask input: one for all layers, or one for the full and one for the windowed layers."""
    return [None, model.window] if model.sliding_mask else [model.window]


def _causal(draft: DraftInfo) -> list[bool]:
    """Whether later rows of the block are hidden from a block row, for each of ``windows``."""
    if draft.sliding_mask:
        return [draft.causal, draft.window_causal]
    return [draft.window_causal if draft.window else draft.causal]


def _block_size(engine: Engine) -> int:
    draft = engine.manifest.draft
    assert draft is not None
    return draft.block_size
