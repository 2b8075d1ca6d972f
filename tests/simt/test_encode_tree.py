"""The encode_tree kernels: positions and mask bit for bit those of the CPU path."""

import pytest
import torch

from ddtree.plugins import ops
from ddtree.plugins.operations import ENCODE_TREE

from .runner import SimtError, build

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels():
    return build("encode_tree.cu")


@pytest.fixture(scope="module")
def sanitized():
    return build("encode_tree.cu", sanitize=True)


def random_trees(batch: int, budget: int, seed: int = 0) -> ops.DraftTree:
    """Trees of different shapes; slot 0 has fewer nodes than the budget, where that is above 3."""
    logits = 3 * torch.randn(batch, 6, 12, generator=torch.Generator().manual_seed(seed))
    logits[0, 1:] = torch.nan  # ends the tree
    logits[0, 0, 3:] = -torch.inf
    return ops.build_tree(logits, torch.arange(batch), budget=budget)


def encode(
    kernels,
    tree: ops.DraftTree,
    roots: torch.Tensor,
    past: torch.Tensor,
    cache_length: int,
    dtype: torch.dtype,
    window: int | None = None,
    schedule: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel writes; a byte before or after the mask that is written too fails the test."""
    inputs = [tree.depths, tree.ancestor_mask, roots, past]
    sizes = ENCODE_TREE.sizes([tuple(each.shape) for each in inputs], cache_length=cache_length, window=window or 0)
    position_shape, mask_shape = ENCODE_TREE.output_shapes(sizes)
    count = torch.Size(mask_shape).numel()
    room = torch.full((count + 32,), 7, dtype=dtype)
    positions, mask = torch.empty(position_shape, dtype=torch.int64), room[16 : 16 + count].view(mask_shape)
    x, y = ENCODE_TREE.grid
    kernels.launch(
        ENCODE_TREE.entry(str(dtype).removeprefix("torch.")),
        grid=(x(sizes), y(sizes), 1),
        block=(ENCODE_TREE.block, 1, 1),
        args=[*inputs, *ENCODE_TREE.scalar_values(sizes), positions, mask],
        schedule=schedule,
    )
    assert (room[:16] == 7).all()
    assert (room[16 + count :] == 7).all()
    return positions, mask


def assert_equal_to_cpu_path(kernels, tree, roots, past, cache_length, dtype, window=None, schedule=0) -> None:
    positions, mask = encode(kernels, tree, roots, past, cache_length, dtype, window, schedule)
    expected_positions, expected_mask = ops.encode_tree(tree, roots, past, cache_length, dtype, window=window)
    assert torch.equal(positions, expected_positions)
    assert torch.equal(mask.view(torch.uint8), expected_mask.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [0, 2, 31, 32, 70])
@pytest.mark.parametrize("cache_length", [96, 97, 99, 101])  # rows that begin at every place within 16 bytes
def test_every_type_width_and_alignment(kernels, dtype, budget, cache_length):
    tree = random_trees(2, budget)
    past = torch.tensor([cache_length - budget - 1, 5])
    assert_equal_to_cpu_path(kernels, tree, past, past, cache_length, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 20, 10_000])
def test_windows(kernels, dtype, window):
    tree, past = random_trees(3, 40), torch.tensor([0, 3, 50])
    assert_equal_to_cpu_path(kernels, tree, past, past, 93, dtype, window)


@pytest.mark.parametrize("schedule", range(1, 6))
def test_shuffled_threads(kernels, schedule):
    tree, past = random_trees(3, 20), torch.tensor([0, 30, 3])
    assert_equal_to_cpu_path(kernels, tree, past + 2, past, 51, torch.float16, 9, schedule)


def test_positions_need_not_be_cache_rows(kernels):
    """A cache that has dropped its oldest rows."""
    tree, past = random_trees(2, 8), torch.tensor([4, 9])
    assert_equal_to_cpu_path(kernels, tree, past + 5_000_000_000, past, 32, torch.float32, 6)


def test_a_long_cache(kernels):
    """More pieces in a row than a block has threads."""
    tree, past = random_trees(1, 3), torch.tensor([9000])
    assert_equal_to_cpu_path(kernels, tree, past, past, 9001 + 8, torch.float32, 5000)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_access_outside_the_tensors(sanitized, dtype):
    for cache_length in (40, 41):
        tree, past = random_trees(2, 33), torch.tensor([cache_length - 34, 0])
        assert_equal_to_cpu_path(sanitized, tree, past, past, cache_length, dtype, 5)


@pytest.mark.parametrize("past", [-3, 38, 10**12])
def test_a_past_that_contradicts_the_cache_touches_nothing_else(sanitized, past):
    """A device cannot refuse it. The other request's mask is right."""
    tree, pasts = random_trees(2, 20), torch.tensor([past, 7])
    _, mask = encode(sanitized, tree, pasts, pasts, 40, torch.float32)
    _, expected = ops.encode_tree(tree, torch.tensor([7, 7]), torch.tensor([7, 7]), 40, torch.float32)
    assert torch.equal(mask[1], expected[1])


def test_a_piece_that_does_not_end_with_the_row_is_noticed():
    text = "first >= 0 && first + PIECE <= cache_length"
    faulty = build("encode_tree.cu", sanitize=True, replace={text: "first >= 0"})
    tree, past = random_trees(1, 2), torch.tensor([4])
    with pytest.raises(SimtError, match="heap-buffer-overflow"):
        encode(faulty, tree, past, past, 9, torch.float32)
