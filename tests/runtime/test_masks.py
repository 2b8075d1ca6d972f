"""Prompt and drafter masks against their definition, cell by cell."""

import itertools
from collections.abc import Callable

import pytest
import torch

from ddtree.runtime.masks import causal_mask, draft_mask, queued_draft_mask

VISIBLE, HIDDEN = 0.0, torch.finfo(torch.float32).min


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize(("past", "rows"), [(0, 1), (0, 5), (7, 3)])
def test_a_prompt_row_sees_itself_and_what_came_before(past: int, rows: int, window: int | None) -> None:
    mask = causal_mask(past, rows, 12, torch.float32, window)
    assert mask.shape == (1, 1, rows, 12)
    for row, slot in itertools.product(range(rows), range(12)):
        query = past + row
        seen = slot <= query and (window is None or query - slot < window)
        assert mask[0, 0, row, slot] == (VISIBLE if seen else HIDDEN)


@pytest.mark.parametrize("of_draft", [draft_mask, queued_draft_mask])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 3, 6])
def test_a_block_row_sees_the_context_and_the_whole_block_but_no_padding(
    window: int | None, causal: bool, of_draft: Callable[..., torch.Tensor]
) -> None:
    context, counts, width, block, cache = torch.tensor([0, 5]), torch.tensor([1, 3]), 4, 3, 16
    mask = of_draft(context, counts, width, block, cache, torch.float32, window, causal)
    assert mask.shape == (2, 1, block, cache)
    for slot_index, row, slot in itertools.product(range(2), range(block), range(cache)):
        past, count = int(context[slot_index]), int(counts[slot_index])
        anchor = past + count  # position of the block's first row; the block is written behind the padded context
        if slot < anchor:
            position = slot
        elif past + width <= slot < past + width + block:
            position = anchor + slot - (past + width)
        else:
            position = None
        seen = (
            position is not None
            and (window is None or anchor + row - position < window)
            and not (causal and position > anchor + row)
        )
        assert mask[slot_index, 0, row, slot] == (VISIBLE if seen else HIDDEN)
