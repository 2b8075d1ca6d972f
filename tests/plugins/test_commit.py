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
