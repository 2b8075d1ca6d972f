"""commit and gather_features: the rows of the accepted path, and no others."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.plugins import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def verified(paths: list[list[int]], depth: int, status: list[int] | None = None) -> ops.Verified:
    """Accepted paths, the root included; an empty one failed."""
    rows = [path + [-1] * (depth + 1 - len(path)) for path in paths]
    return ops.Verified(
        accepted_nodes=torch.tensor(rows, dtype=torch.int32),
        accepted_count=torch.tensor([max(len(path) - 1, 0) for path in paths], dtype=torch.int32),
        output_ids=torch.tensor(rows, dtype=torch.int32),
        logprobs=torch.zeros(len(paths), depth + 1),
        status=torch.tensor([0 if path else 1 for path in paths], dtype=torch.int32),
    )


def random_caches(layers: int, batch: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch, 2, 40, 3)
    return [
        tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))  # type: ignore[misc]
        for _ in range(layers)
    ]


paths = st.lists(st.integers(1, 20), max_size=7, unique=True).map(lambda nodes: [0, *sorted(nodes)])


@settings(max_examples=100, deadline=None)
@given(st.lists(paths | st.just([]), min_size=1, max_size=4), st.data(), st.sampled_from(DTYPES))
def test_rows_move_to_the_end_of_the_past(path_of, data, dtype):
    past = data.draw(st.lists(st.integers(0, 19), min_size=len(path_of), max_size=len(path_of)))
    caches = random_caches(2, len(path_of), dtype)
    before = [[cache.clone() for cache in pair] for pair in caches]
    addresses = [[cache.data_ptr() for cache in pair] for pair in caches]
    ops.commit(caches, torch.tensor(past), verified(path_of, 7))
    assert addresses == [[cache.data_ptr() for cache in pair] for pair in caches]
    for pair, old_pair in zip(caches, before, strict=True):
        for cache, old in zip(pair, old_pair, strict=True):
            for slot, path in enumerate(path_of):
                expected = old[slot].clone()
                for at, node in enumerate(path):
                    expected[:, past[slot] + at] = old[slot, :, past[slot] + node]
                assert torch.equal(cache[slot], expected)


@settings(max_examples=30, deadline=None)
@given(st.lists(paths | st.just([]), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_layers_together_and_one_by_one(path_of, dtype):
    past = torch.arange(len(path_of))
    caches = random_caches(3, len(path_of), dtype)
    keys, values = (torch.stack(part) for part in zip(*caches, strict=True))
    wider = torch.cat([keys, values], 1)  # other slots behind: what is moved may be a view
    ops.commit(caches, past, verified(path_of, 7))
    ops.commit([(wider[:, : len(path_of)], values)], past, verified(path_of, 7))
    for layer, pair in enumerate(caches):
        assert torch.equal(wider[layer, : len(path_of)], pair[0])
        assert torch.equal(values[layer], pair[1])


@settings(max_examples=60, deadline=None)
@given(st.lists(paths | st.just([]), min_size=1, max_size=4), st.sampled_from(DTYPES))
def test_features_are_those_of_the_accepted_nodes(path_of, dtype):
    features = torch.full((len(path_of), 21, 6), torch.nan, dtype=dtype)  # NaN wherever nothing was accepted
    for slot, path in enumerate(path_of):
        for node in path:
            features[slot, node] = 21 * slot + node
    gathered = ops.gather_features(features, verified(path_of, 7))
    assert (gathered.shape, gathered.dtype) == ((len(path_of), 8, 6), dtype)
    for slot, path in enumerate(path_of):
        assert gathered[slot, :, 0].tolist() == [21.0 * slot + node for node in path] + [0.0] * (8 - len(path))


def test_output_is_max_depth_wide_even_for_a_wider_tree():
    features = torch.arange(2 * 12).view(2, 12, 1).float()
    gathered = ops.gather_features(features, verified([[0, 11], [0, 5, 9, 10]], 3))
    assert gathered[..., 0].tolist() == [[0.0, 11.0, 0.0, 0.0], [12.0, 17.0, 21.0, 22.0]]


@pytest.mark.parametrize("path", [[0], [0, 1, 2, 3], []])
def test_rows_in_place_already_are_left_alone(path):
    caches = random_caches(1, 1, torch.float32)
    before = [cache.clone() for cache in caches[0]]
    ops.commit(caches, torch.tensor([5]), verified([path], 7))
    assert all(torch.equal(cache, old) for cache, old in zip(caches[0], before, strict=True))


def test_nan_in_rows_that_were_not_accepted_stays_where_it_is():
    caches = random_caches(1, 2, torch.float32)
    for cache in caches[0]:
        cache[0, :, 10 + 1] = torch.nan  # a rejected node of slot 0
    ops.commit(caches, torch.tensor([10, 10]), verified([[0, 2, 3], [0, 4]], 7))
    for cache in caches[0]:
        assert cache[0, :, :13].isfinite().all()  # rows 10, 11, 12: root and the two accepted nodes
        assert cache[1].isfinite().all()


# ---------------------------------------------------------------------------------------------------------------------
# Paged caches
# ---------------------------------------------------------------------------------------------------------------------


def paged(caches: list[tuple[torch.Tensor, torch.Tensor]], page: int) -> tuple[list, torch.Tensor]:
    """The same caches in pools of blocks, whose order is shuffled and two of which nobody uses; and the block table."""
    batch, heads, rows, dim = caches[0][0].shape
    blocks = -(-rows // page)
    order = torch.randperm(batch * blocks + 2, generator=torch.Generator().manual_seed(page))
    table = order[: batch * blocks].view(batch, blocks)
    pools = []
    for pair in caches:
        both = []
        for cache in pair:
            padded = torch.zeros(batch, heads, blocks * page, dim, dtype=cache.dtype)
            padded[:, :, :rows] = cache
            pool = torch.full((len(order), heads, page, dim), 7.0, dtype=cache.dtype)
            pool[table] = padded.view(batch, heads, blocks, page, dim).transpose(1, 2)
            both.append(pool)
        pools.append(tuple(both))
    return pools, table.int()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(paths | st.just([]), min_size=1, max_size=4),
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 3, 8, 64]),
)
def test_paged_caches_hold_what_linear_ones_do(path_of, data, dtype, page):
    past = torch.tensor(data.draw(st.lists(st.integers(0, 19), min_size=len(path_of), max_size=len(path_of))))
    caches = random_caches(2, len(path_of), dtype)
    pools, table = paged(caches, page)
    ops.commit(pools, past, verified(path_of, 7), block_table=table)
    ops.commit(caches, past, verified(path_of, 7))
    for pair, expected in zip(pools, paged(caches, page)[0], strict=True):
        assert all(torch.equal(*each) for each in zip(pair, expected, strict=True))


def test_blocks_that_no_row_needs_may_be_missing():
    pools, table = paged(random_caches(1, 2, torch.float32), 8)
    table[:, 2:] = -1  # room for 16 rows
    ops.commit(pools, torch.tensor([5, 9]), verified([[0, 4, 9], [0, 1]], 7), block_table=table)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (-1, r"block_table holds -1 at \[1, 2\], where a row moves: the pool has 0 to 11"),
        (12, r"block_table holds 12 at \[1, 2\], where a row moves: the pool has 0 to 11"),
    ],
)
def test_a_row_that_moves_in_a_block_outside_of_the_pool_is_refused(block, message):
    """Before anything moves: -1 is not the last block."""
    pools, table = paged(random_caches(2, 2, torch.float32), 8)
    before = [[pool.clone() for pool in pair] for pair in pools]
    table[1, 2] = block  # rows 16 to 23
    with pytest.raises(ValueError, match=message):
        ops.commit(pools, torch.tensor([5, 9]), verified([[0, 4], [0, 7]], 7), block_table=table)
    for pair, old in zip(pools, before, strict=True):
        assert all(torch.equal(*each) for each in zip(pair, old, strict=True))


def test_a_path_beyond_the_cache_is_refused():
    path = verified([[0, 4], [0, 12]], 7)
    caches = random_caches(1, 2, torch.float32)
    pools, table = paged(caches, 8)
    with pytest.raises(ValueError, match=r"block_table has 5 blocks a slot: slot 1 needs 6"):
        ops.commit(pools, torch.tensor([0, 28]), path, block_table=table)
    with pytest.raises(ValueError, match=r"a cache of 40 rows does not hold the accepted path \(needed: 41\)"):
        ops.commit(caches, torch.tensor([0, 28]), path)
    ops.commit(caches, torch.tensor([0, 27]), path)


def test_pools_and_tables_of_a_wrong_shape_are_refused():
    pools, table = paged(random_caches(1, 2, torch.float32), 8)
    arguments = (torch.tensor([5, 9]), verified([[0, 4], [0, 1]], 7))
    with pytest.raises(ValueError, match=r"block_table has shape \[1, 5\], expected \[2, any\]"):
        ops.commit(pools, *arguments, block_table=table[:1])
    with pytest.raises(ValueError, match=r"block_table is torch\.int64, expected torch\.int32"):
        ops.commit(pools, *arguments, block_table=table.long())
    with pytest.raises(ValueError, match=r"cache of layer 0 has shape \[12, 2, 24\], expected \[any, any, any, any\]"):
        ops.commit([(pools[0][0].flatten(2), pools[0][1])], *arguments, block_table=table)
