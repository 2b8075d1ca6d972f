"""encode_tree: positions by depth, and a mask that shows each row the past, its ancestors and itself."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.plugins import ops

from .oracles import stacked, tree_of


def visible_by_definition(tree, slot, root_position, past, cache, window):
    """[N][cache] of bool, each cell decided on its own."""
    parents, depths = tree.parents[slot].tolist(), tree.depths[slot].tolist()
    count = int(tree.node_count[slot])

    def sees(row: int, column: int) -> bool:
        if column < past:
            key_position = column + root_position - past
        elif column < past + len(parents):
            node = ancestor = column - past
            path = [row]
            while row < count and parents[path[-1]] >= 0:
                path.append(parents[path[-1]])
            if ancestor not in path:
                return False
            key_position = root_position + depths[node]
        else:
            return False
        return window is None or root_position + depths[row] - key_position < window

    return [[sees(row, column) for column in range(cache)] for row in range(len(parents))]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 100), max_size=39), min_size=1, max_size=3),
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.one_of(st.none(), st.integers(1, 12)),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_mask_and_positions_by_definition(choices, pasts, window, dtype):
    trees = [
        tree_of([5] * (len(c) + 1), [-1, *(pick % (at + 1) for at, pick in enumerate(c))], max_depth=40, width=40)
        for c in choices
    ]
    tree, past = stacked(trees), torch.tensor(pasts[: len(trees)])
    positions, mask = ops.encode_tree(tree, past, past, 64, dtype, window=window)
    assert (positions.dtype, mask.dtype, mask.shape) == (torch.int64, dtype, (len(trees), 1, 40, 64))
    assert torch.equal(positions, past[:, None] + tree.depths)
    assert set(mask.unique().tolist()) <= {0.0, torch.finfo(dtype).min}
    for slot in range(len(trees)):
        expected = visible_by_definition(tree, slot, int(past[slot]), int(past[slot]), 64, window)
        assert (mask[slot, 0] == 0).tolist() == expected


def test_siblings_share_a_position():
    tree = tree_of([5, 1, 2, 3, 4], [-1, 0, 0, 1, 1], max_depth=3)
    positions, _ = ops.encode_tree(tree, torch.tensor([10]), torch.tensor([10]), 16, torch.float32)
    assert positions.tolist() == [[10, 11, 11, 12, 12]]


def test_padding_is_never_seen_and_never_fully_masked():
    tree = tree_of([5, 0, 0], [-1, 0, 1], max_depth=8, width=9)
    past = torch.tensor([4])
    _, mask = ops.encode_tree(tree, past, past, 16, torch.float32)
    visible = mask[0, 0] == 0
    assert not visible[:3, 4 + 3 :].any()
    assert visible[3:, :4].all()
    assert visible[3:, 4:13].tolist() == [[row == column for column in range(9)] for row in range(3, 9)]
    assert torch.softmax(mask, -1).isfinite().all()


def test_window_counts_positions_and_not_slots():
    """The deepest node stands right after its far cousins: by slots its ancestors would be out of the window."""
    tree = tree_of([5, 1, 2, 3, 4, 6], [-1, 0, 0, 0, 0, 1], max_depth=2)
    past = torch.tensor([3])
    _, mask = ops.encode_tree(tree, past, past, 9, torch.float32, window=3)
    assert (mask[0, 0, 5] == 0).nonzero().ravel().tolist() == [3, 4, 8]  # root, node 1, itself
    assert (mask[0, 0, 1] == 0).nonzero().ravel().tolist() == [2, 3, 4]


def test_root_alone_is_a_plain_decoding_step():
    past = torch.tensor([0, 5])
    positions, mask = ops.encode_tree(ops.root_tree(torch.tensor([1, 2])), past, past, 8, torch.bfloat16)
    assert positions.tolist() == [[0], [5]]
    assert (mask[:, 0, 0] == 0).sum(1).tolist() == [1, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hidden_is_finite_in_the_masks_own_dtype(dtype):
    past = torch.tensor([1])
    _, mask = ops.encode_tree(ops.root_tree(torch.tensor([1])), past, past, 3, dtype)
    assert mask.flatten().tolist() == [0.0, 0.0, torch.finfo(dtype).min]
    assert math.isfinite(mask.min())


def test_mask_words_are_read_least_significant_bit_first():
    tree = ops.build_tree(torch.zeros(1, 1, 40), torch.tensor([0]), budget=40)  # 40 children of the root, two words
    past = torch.tensor([0])
    _, mask = ops.encode_tree(tree, past, past, 41, torch.float32)
    expected = np.eye(41, dtype=bool)
    expected[:, 0] = True
    assert (mask[0, 0] == 0).numpy().tolist() == expected.tolist()
