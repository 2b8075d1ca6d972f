"""The commit kernels: the rows of the accepted path, exactly, for every layout, width and alignment; no other byte."""

import pytest
import torch

from ddtree.plugins.operations import COMMIT_LINEAR, COMMIT_PAGED, GATHER_FEATURES, Operation

from .runner import Pointers, SimtError, build

ROOM = 64  # tokens of a cache, or of the blocks of one request
FAILED: list[int] = []
PATHS = {
    "apart": [0, 3, 4, 9, 15, 20],
    "one down": [
        0,
        *range(2, 21),
    ],  # each destination is the source of the step before; more steps than are read at once
    "in place": [0, 1, 2, 3],
    "in place, then not": [0, 1, 2, 7, 8],
    "root": [0],
    "failed": FAILED,
}


@pytest.fixture(scope="module")
def kernels():
    return build("commit.cu")


@pytest.fixture(scope="module")
def sanitized():
    return build("commit.cu", sanitize=True)


def accepted(paths: list[list[int]], depth: int) -> list[torch.Tensor]:
    """accepted_nodes and accepted_count; an empty path is a slot that failed."""
    rows = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    counts = [max(len(path) - 1, 0) for path in paths]
    return [torch.tensor(rows, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)]


def random_bytes(*shape: int, offset: int = 0, seed: int = 0) -> torch.Tensor:
    """uint8, with an address that is ``offset`` bytes past a multiple of 16."""
    count = int(torch.tensor(shape).prod())
    generator = torch.Generator().manual_seed(seed)
    room = torch.randint(256, (count + 32,), dtype=torch.uint8, generator=generator)
    first = (offset - room.data_ptr()) % 16
    return room[first : first + count].view(shape)


def launch(kernels, operation: Operation, inputs: list, *, schedule: int = 0, outputs=(), **attributes) -> None:
    """With the grid, the block and the scalars of the table."""
    shapes = [(len(each.tensors),) if isinstance(each, Pointers) else tuple(each.shape) for each in inputs]
    sizes = operation.sizes(shapes, **attributes)
    x, y = operation.grid
    kernels.launch(
        operation.entry(),
        grid=(x(sizes), y(sizes), 1),
        block=(operation.block, 1, 1),
        args=[*inputs, *operation.scalar_values(sizes), *outputs],
        schedule=schedule,
    )


def moved(rows: torch.Tensor, past: int, path: list[int]) -> torch.Tensor:
    """What [kv_heads, tokens, row_bytes] of one request becomes: one row after the other."""
    result = rows.clone()
    for step, node in enumerate(path):
        result[:, past + step] = rows[:, past + node]
    return result


def commit_linear(kernels, caches: list[torch.Tensor], past: list[int], paths: list[list[int]], schedule: int = 0):
    """``caches`` uint8 [batch, kv_heads, tokens, row_bytes]. Returns what they should hold afterwards."""
    expected = [
        torch.stack([moved(rows, *each) for rows, *each in zip(cache, past, paths, strict=True)]) for cache in caches
    ]
    _, kv_heads, tokens, row_bytes = caches[0].shape
    launch(
        kernels,
        COMMIT_LINEAR,
        [Pointers(caches), torch.tensor(past), *accepted(paths, 20)],
        kv_heads=kv_heads,
        cache=tokens,
        row_bytes=row_bytes,
        schedule=schedule,
    )
    return expected


def commit_paged(kernels, pools, block_table, past: list[int], paths: list[list[int]], schedule: int = 0):
    """``pools`` uint8 [blocks, kv_heads, tokens_per_block, row_bytes]. Returns what they should hold afterwards."""
    expected = []
    pool_blocks, kv_heads, page, row_bytes = pools[0].shape
    for pool in pools:
        after = pool.clone()
        for blocks, *each in zip(block_table.long(), past, paths, strict=True):
            blocks = blocks[blocks >= 0]
            rows = pool[blocks].transpose(0, 1).reshape(kv_heads, -1, row_bytes)
            after[blocks] = moved(rows, *each).view(kv_heads, -1, page, row_bytes).transpose(0, 1)
        expected.append(after)
    launch(
        kernels,
        COMMIT_PAGED,
        [Pointers(pools), block_table, torch.tensor(past), *accepted(paths, 20)],
        pool_blocks=pool_blocks,
        kv_heads=kv_heads,
        tokens_per_block=page,
        row_bytes=row_bytes,
        schedule=schedule,
    )
    return expected


def shuffled_table(batch: int, blocks: int, spare: int) -> torch.Tensor:
    """Blocks of each request, int32 [batch, blocks], no two alike, out of batch * blocks + spare."""
    order = torch.randperm(batch * blocks + spare, generator=torch.Generator().manual_seed(1))
    return order[: batch * blocks].view(batch, blocks).int()


def assert_same(have: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for at, (one, other) in enumerate(zip(have, expected, strict=True)):
        assert torch.equal(one, other), f"cache {at} differs at {(one != other).nonzero()[:4].tolist()}"


# Bytes of a row: head_dim 128 of 2 bytes, 80 of 1, 12 of 2, 3 of 4, 5 of 2, 7 of 1, and 300 of 4: more than a block's
# threads move at once.
ROW_BYTES = [256, 80, 24, 12, 10, 7, 1200]


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("offset", [0, 8, 4, 2, 1])
def test_linear_caches_of_every_width_and_alignment(kernels, row_bytes, offset):
    caches = [random_bytes(2, 2, ROOM, row_bytes, offset=offset, seed=seed) for seed in range(2)]
    expected = commit_linear(kernels, caches, [5, 0], [PATHS["apart"], PATHS["one down"]])
    assert_same(caches, expected)


@pytest.mark.parametrize("schedule", range(6))
def test_requests_of_different_paths_in_every_order_of_threads(kernels, schedule):
    past = [0, 7, 40, 3, 43, 12]
    layers = [random_bytes(len(PATHS), 3, ROOM, 32, seed=seed) for seed in range(4)]
    assert_same(layers, commit_linear(kernels, layers, past, [*PATHS.values()], schedule))

    pools = [random_bytes(len(PATHS) * 8 + 5, 3, 8, 32, seed=seed) for seed in range(4)]
    table = shuffled_table(len(PATHS), 8, 5)
    assert_same(pools, commit_paged(kernels, pools, table, past, [*PATHS.values()], schedule))


@pytest.mark.parametrize("page", [1, 3, 16, 64])
@pytest.mark.parametrize("row_bytes", [256, 12, 7])
def test_paged_caches_of_every_page_size(kernels, page, row_bytes):
    blocks = -(-ROOM // page)
    pools = [random_bytes(3 * blocks + 2, 2, page, row_bytes, seed=seed) for seed in range(2)]
    table = shuffled_table(3, blocks, 2)
    table[1, -(-30 // page) :] = -1  # request 1 has room for 30 tokens, and needs no more
    assert_same(pools, commit_paged(kernels, pools, table, [5, 9, 40], [PATHS["one down"], [0, 19, 20], FAILED]))


def test_linear_cache_of_one_element_rows(kernels):
    caches = [random_bytes(1, 1, ROOM, 1)]
    assert_same(caches, commit_linear(kernels, caches, [3], [PATHS["apart"]]))


@pytest.mark.parametrize("row_bytes", [256, 24, 7])
def test_no_access_outside_the_caches(sanitized, row_bytes):
    """Paths that end in the last row of a cache whose allocation ends there."""
    caches = [random_bytes(2, 1, 21, row_bytes, seed=seed) for seed in range(2)]
    assert_same(caches, commit_linear(sanitized, caches, [0, 0], [PATHS["one down"], [0, 20]]))
    pools = [random_bytes(6, 1, 7, row_bytes, seed=seed) for seed in range(2)]
    table = shuffled_table(2, 3, 0)
    assert_same(pools, commit_paged(sanitized, pools, table, [0, 0], [PATHS["one down"], [0, 20]]))


def test_paths_out_of_the_cache_touch_nothing(sanitized):
    """Lengths that contradict the cache, which a device cannot refuse: no access out of it, no block that is none."""
    caches = [random_bytes(3, 1, 16, 8)]
    before = [caches[0].clone()]
    inputs = [torch.tensor([12, 2**40, -30]), *accepted([[0, 9, 12]] * 3, 20)]
    launch(sanitized, COMMIT_LINEAR, [Pointers(caches), *inputs], kv_heads=1, cache=16, row_bytes=8)
    assert_same(caches, before)
    pools = [random_bytes(3, 1, 16, 8)]
    before = [pools[0].clone()]
    table = torch.tensor([[0], [1], [-1]], dtype=torch.int32)
    inputs[0][2] = 0
    launch(sanitized, COMMIT_PAGED, [Pointers(pools), table, *inputs], **ONE_HEAD)
    assert_same(pools, before)


ONE_HEAD = {"pool_blocks": 3, "kv_heads": 1, "tokens_per_block": 16, "row_bytes": 8}
WRONG_BLOCKS = torch.tensor([[3, 0], [2**31 - 1, 1], [0, -5], [1, 3], [2, -1]], dtype=torch.int32)


def commit_into_wrong_blocks(kernels, pools: list[torch.Tensor]) -> None:
    """Requests 0 and 1 have their first block outside of the pool, 2 and 3 their second, where rows come from; the last
    has a second one that is not allocated, and does not need it."""
    paths = [[0, 9], [0, 9], [0, 18], [0, 18], [0, 2]]
    inputs = [torch.zeros(5, dtype=torch.int64), *accepted(paths, 20)]
    launch(kernels, COMMIT_PAGED, [Pointers(pools), WRONG_BLOCKS, *inputs], **ONE_HEAD)


def test_blocks_that_are_not_in_the_pool_are_left_alone(sanitized):
    pools = [random_bytes(3, 1, 16, 8)]
    expected = pools[0].clone()
    expected[2, 0, 1] = pools[0][2, 0, 2]
    commit_into_wrong_blocks(sanitized, pools)
    assert_same(pools, [expected])


def test_a_block_that_is_not_in_the_pool_would_be_noticed():
    faulty = build("commit.cu", sanitize=True, replace={"block >= pool_blocks": "block == -1u"})
    with pytest.raises(SimtError, match="AddressSanitizer"):
        commit_into_wrong_blocks(faulty, [random_bytes(3, 1, 16, 8)])


@pytest.mark.parametrize("row_bytes", [4096, 36, 7])
@pytest.mark.parametrize("offset", [0, 4, 1])
def test_features_are_gathered_and_padded_with_zeros(sanitized, row_bytes, offset):
    paths = [*PATHS.values()]
    features = random_bytes(len(paths), 21, row_bytes, offset=offset)
    gathered = random_bytes(len(paths), 21, row_bytes, offset=offset, seed=1)  # zeros have to be written
    expected = torch.zeros_like(gathered)
    for slot, path in enumerate(paths):
        expected[slot, : len(path)] = features[slot, path]
    launch(sanitized, GATHER_FEATURES, [features, *accepted(paths, 20)], outputs=[gathered], row_bytes=row_bytes)
    assert torch.equal(gathered, expected)


def test_output_of_gather_is_narrower_than_a_wide_tree(kernels):
    features = random_bytes(2, 12, 16)
    gathered = random_bytes(2, 4, 16, seed=1)
    launch(
        kernels,
        GATHER_FEATURES,
        [features, *accepted([[0, 11], [0, 5, 9, 10]], 3)],
        outputs=[gathered],
        row_bytes=16,
    )
    expected = torch.stack([features[0, [0, 11, 0, 0]], features[1, [0, 5, 9, 10]]])
    expected[0, 2:] = 0
    assert torch.equal(gathered, expected)


def test_a_wrong_order_of_steps_is_noticed():
    order = {"const int step = first + i;": "const int step = last_step - first - i + 1;"}  # from the last to the first
    faulty = build("commit.cu", replace=order)
    caches = [random_bytes(1, 1, ROOM, 16)]
    expected = commit_linear(faulty, caches, [3], [PATHS["one down"]])
    assert not torch.equal(caches[0], expected[0])


def test_a_column_too_many_is_noticed():
    text = "for (int column = threadIdx.x; column < words; column += blockDim.x) {\n        for (int first"
    faulty = build("commit.cu", sanitize=True, replace={text: text.replace("column < words", "column <= words")})
    caches = [random_bytes(1, 1, 21, 16)]
    with pytest.raises(SimtError, match="heap-buffer-overflow"):
        commit_linear(faulty, caches, [0], [[0, 20]])


def test_a_load_wider_than_the_alignment_is_noticed():
    text = "if (alignment % 16 == 0) {\n        move_columns"
    faulty = build("commit.cu", sanitize=True, replace={text: text.replace("% 16", "% 8")})
    caches = [random_bytes(1, 1, ROOM, 8 * 16, offset=8)]
    with pytest.raises(SimtError, match="misaligned"):
        commit_linear(faulty, caches, [0], [[0, 20]])
