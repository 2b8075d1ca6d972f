"""The build_tree kernel: bit for bit the tree of the CPU path and of the best-first heap, ties included."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ddtree.plugins import ops

from ..plugins.oracles import all_prefixes, assert_tree_of_vector, nodes_of, vector_logits
from .draft_kernels import TREE_FIELDS, assert_heap_tree, assert_same_tree, build_tree, padded, ranked
from .runner import KERNELS, SimtError, build, build_text

NAN, INF = math.nan, math.inf
BUDGETS = [0, 1, 2, 15, 16, 64, 255, 1023]
VECTORS = Path(__file__).parents[1] / "vectors"

# Few values, so that sums tie within a depth and across depths: 0 is a token that is certain.
TIED = st.sampled_from([-0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -2.0, -INF])
# Sums of these round, so that different ones tie.
ROUNDED = st.sampled_from([-1e-7, -1e-3, -0.1, -0.3, -1.1, -1.3, -1e4, -8e37])


def candidates(depths: int, ranks: int, elements: st.SearchStrategy) -> st.SearchStrategy:
    """[D, K] log-probabilities, best first."""
    shapes = st.tuples(st.integers(1, depths), st.integers(1, ranks))
    return arrays(np.float32, shapes, elements=elements).map(lambda rows: -np.sort(-rows, axis=1))


def with_ids(log_probs: np.ndarray) -> list[list[tuple[int, np.float32]]]:
    """Rows for the oracles, [D, K]: the token at a rank is 40 * rank + depth."""
    return [
        [(40 * rank + depth, value) for rank, value in enumerate(row) if value > -INF]
        for depth, row in enumerate(log_probs)
    ]


def built(rows: list, budget: int, **options) -> ops.DraftTree:
    token_ids, log_probs = padded([rows], min(max(map(len, rows)), budget))
    return build_tree(token_ids, log_probs, torch.tensor([100]), budget=budget, **options)


def draft_logits(seed: int, *shape: int, scale: float) -> torch.Tensor:
    """Rows with a few likely tokens, as a drafter gives."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * scale
    return logits + 3 * scale * (torch.rand(*shape, generator=generator) < 4 / shape[-1])


def assert_cpu_path(logits: torch.Tensor, budget: int, mode: str = "tree", keep_chain: bool = False, **options) -> None:
    roots = torch.arange(100, 100 + len(logits))
    expected = ops.build_tree(logits, roots, budget=budget, mode=mode, keep_chain=keep_chain)
    found = ranked(logits, min(budget, logits.shape[-1]))
    assert_same_tree(build_tree(*found, roots, budget=budget, mode=mode, keep_chain=keep_chain, **options), expected)


# ---------------------------------------------------------------------------------------------------------------------
# The tree
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(candidates(4, 4, TIED | ROUNDED), st.integers(0, 90))
def test_tree_is_the_most_probable_prefixes_of_all(log_probs, budget):
    rows = with_ids(log_probs)
    assert nodes_of(built(rows, budget)) == all_prefixes(rows, budget)


@settings(max_examples=60, deadline=None)
@given(candidates(12, 70, TIED), st.integers(0, 120))
def test_tree_is_the_heaps_when_everything_ties(log_probs, budget):
    rows = with_ids(log_probs)
    assert_heap_tree(built(rows, budget), rows, budget, root=100)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("depths", "vocab", "scale"), [(3, 17, 1.0), (15, 333, 2.0), (16, 1500, 0.0), (8, 3000, 5.0)])
def test_tree_is_that_of_the_cpu_path(depths, vocab, scale, budget):
    logits = draft_logits(vocab, 2, depths, vocab, scale=scale)
    for mode, keep_chain in (("tree", False), ("tree", True), ("chain", False)):
        assert_cpu_path(logits, budget, mode, keep_chain)


def mixed_case(seed: int) -> tuple[torch.Tensor, int]:
    """Logits [1, D, vocab] that are flat at some depths and sharp at others, and a budget."""
    generator = np.random.default_rng(seed)
    depths, vocab, budget = generator.integers([2, 5, 10], [5, 80, 90])
    sharpness = generator.choice([0.05, 1, 3, 8], (depths, 1))
    return torch.from_numpy(generator.standard_normal((1, depths, vocab)) * sharpness).float(), int(budget)


def test_marginals_may_be_flat_at_some_depths_and_sharp_at_others():
    for seed in range(60):
        assert_cpu_path(*mixed_case(seed))
    rows = [draft_logits(at, 1, 1, 1200, scale=scale) for at, scale in enumerate((9.0, 0.0, 3.0, 0.1))]
    assert_cpu_path(torch.cat(rows, 1), 1023)


@pytest.mark.parametrize("certainty", [0.3, 1.0, 2.0])
def test_every_pair_that_the_bound_allows_may_be_in_question(certainty):
    """With log p of rank r at -c log(r + 1), the last pairs with (parent + 1)(rank + 1) <= budget are about as good."""
    rows = with_ids(np.tile(-certainty * np.log(np.arange(1, 1024)), (3, 1)).astype(np.float32))
    assert_heap_tree(built(rows, 1023), rows, 1023, root=100)


def test_ties_are_settled_among_all_pairs():
    """Parents of different costs whose extensions round to one sum: the order is that of the tuples."""
    steps = -np.arange(40, dtype=np.float32) * 1e-8
    rows = with_ids(np.stack([steps, np.full(40, -100.0, np.float32), steps]))
    for budget in (40, 41, 60, 500, 1000):
        assert_heap_tree(built(rows, budget), rows, budget, root=100)


def test_a_certain_depth_adds_nodes_that_tie_with_their_parents():
    log_probs = np.zeros((32, 3), np.float32)
    log_probs[::5, 1:] = -1.0
    log_probs[1::5, 1:] = -INF
    rows = with_ids(log_probs)
    for budget in (31, 32, 33, 200, 1023):
        assert_heap_tree(built(rows, budget), rows, budget, root=100)


def test_a_budget_above_the_number_of_prefixes_leaves_padding():
    rows = with_ids(np.array([[-0.5, -1.0], [-0.25, -2.0]], np.float32))
    tree = built(rows, 70)
    assert tree.node_count.tolist() == [1 + 2 + 4]
    assert_heap_tree(tree, rows, 70, root=100)


def test_prefixes_of_probability_0_never_appear():
    """Neither candidates of -inf, nor sums that are too low for float32."""
    rows = with_ids(np.array([[-1.0, -2e38], [-2e38, -3e38], [0.0, 0.0]], np.float32))
    nodes = [(token, parent, depth) for token, parent, depth, _ in nodes_of(built(rows, 50))]
    below_0 = [(0, 0, 1), (1, 1, 2), (2, 2, 3), (42, 2, 3), (41, 1, 2), (2, 6, 3), (42, 6, 3)]
    assert nodes == [*below_0[:4], (40, 0, 1), *below_0[4:]]  # (1, 0) and (1, 1) would be at -4e38 and -5e38


@pytest.mark.parametrize("keep_chain", [False, True])
def test_a_row_without_candidates_ends_that_requests_tree_above_it(keep_chain):
    logits = draft_logits(4, 4, 5, 60, scale=3.0)
    logits[0] = NAN
    logits[2, 3] = -INF
    logits[3, 1, 7] = INF
    assert_cpu_path(logits, 40, "tree", keep_chain)
    assert_cpu_path(logits, 40, "chain")


@pytest.mark.parametrize("depths", [1, 2, 8, 31, 32])
@pytest.mark.parametrize("scale", [0.1, 0.6])
def test_the_chain_is_kept_whole(depths, scale):
    logits = draft_logits(depths, 2, depths, 50, scale=scale)
    logits[1, depths // 2 :] = NAN  # its chain is shorter
    for budget in (depths - 1, depths, depths + 1, 2 * depths + 5, 400):
        assert_cpu_path(logits, budget, "tree", keep_chain=True)


@pytest.mark.parametrize("entry", json.loads((VECTORS / "build_tree.json").read_text()))
def test_vectors(entry):
    logits = vector_logits(entry)
    tree = build_tree(
        *ranked(logits, min(entry["budget"], logits.shape[-1])), torch.tensor([3]), budget=entry["budget"]
    )
    assert_tree_of_vector(tree, entry)


# ---------------------------------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------------------------------


def hard_case(budget: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two requests and their roots: one in which one parent has most of the children, one in which sums tie."""
    ranks = torch.arange(min(budget, 500))
    token_ids = (7 * ranks.int()).expand(2, 3, -1).contiguous()
    log_probs = torch.stack([-(1.0 + ranks).log(), -0.5 * (1 + ranks // 4)])[:, None].repeat(1, 3, 1)
    log_probs[0, 0, 1:] -= 20
    return token_ids, log_probs, torch.tensor([1, 2])


@pytest.mark.parametrize("budget", [64, 1023])
def test_the_order_of_the_threads_does_not_matter(budget):
    case = hard_case(budget)
    expected = build_tree(*case, budget=budget, keep_chain=True)
    for schedule in range(1, 6):
        assert_same_tree(build_tree(*case, budget=budget, keep_chain=True, schedule=schedule), expected)


@pytest.mark.parametrize("schedule", [0, 3])
def test_no_thread_races_with_another(schedule):
    case = hard_case(64)
    traced = build_tree(*case, budget=64, kernels=build("build_tree.cu", trace=True), schedule=schedule)
    assert_same_tree(traced, build_tree(*case, budget=64))


@pytest.mark.parametrize("budget", [1, 64, 1023])
def test_no_access_is_out_of_bounds(budget):
    case = hard_case(budget)
    expected = build_tree(*case, budget=budget, keep_chain=True)
    sanitized = build("build_tree.cu", sanitize=True)
    assert_same_tree(build_tree(*case, budget=budget, keep_chain=True, kernels=sanitized), expected)


@pytest.mark.parametrize("keep_chain", [False, True])
def test_log_probabilities_that_cannot_be_harm_no_other_request(keep_chain):
    """Ascending, positive, NaN, infinite: the tree is of no use, but it is a tree, and nothing else is written."""
    token_ids, log_probs, _ = hard_case(200)
    token_ids, log_probs = (torch.cat([each, each[:1]]) for each in (token_ids, log_probs))
    log_probs[0] = log_probs[0].flip(-1)
    log_probs[0, 2] *= -1
    log_probs[1, 1:, ::3] = NAN
    log_probs[1, 2, 0] = INF
    roots = torch.tensor([1, 2, 3])
    tree = build_tree(
        token_ids, log_probs, roots, budget=200, keep_chain=keep_chain, kernels=build("build_tree.cu", sanitize=True)
    )
    for slot in range(2):
        count = int(tree.node_count[slot])
        parents = tree.parents[slot, :count]
        assert 1 <= count <= 201
        assert parents[0] == -1
        assert ((parents[1:] >= 0) & (parents[1:] < torch.arange(1, count))).all()
    alone = build_tree(token_ids[2:], log_probs[2:], roots[2:], budget=200, keep_chain=keep_chain)
    for name in TREE_FIELDS:
        assert torch.equal(getattr(tree, name)[2:], getattr(alone, name)), name


FAULTS = {
    "no barrier before children are looked up": (
        "links.child[links.first_child[parent[i]] + rank[i]] = threadIdx.x + i * THREADS;\n    }\n    __syncthreads();",
        "links.child[links.first_child[parent[i]] + rank[i]] = threadIdx.x + i * THREADS;\n    }",
    ),
    "ties by rank instead of by tuple": (
        "int ties_left = threshold.ties - block_exclusive_scan<THREADS>(sum, total);",
        "int ties_left = threshold.ties - 0 * block_exclusive_scan<THREADS>(sum, total);",
    ),
    "pairs of the next parent": ("(threadIdx.x * NODES_EACH + i + 1)", "(threadIdx.x * NODES_EACH + i + 2)"),
    "a cost too many": ("if (bin.size == wanted)", "if (bin.size <= wanted + 1)"),
    "the next request's candidates": ("log_probs += request * D * K;", "log_probs += (request * D + 1) * K;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    old, new = FAULTS[fault]
    case = hard_case(255)
    expected = build_tree(*case, budget=255)
    faulty = build("build_tree.cu", replace={old: new})
    with pytest.raises((AssertionError, SimtError)):  # noqa: PT012
        assert_same_tree(build_tree(*case, budget=255, kernels=faulty), expected)
        for seed in range(60):
            assert_cpu_path(*mixed_case(seed), kernels=faulty, schedule=seed)


def test_a_row_too_far_is_found():
    faulty = build("build_tree.cu", sanitize=True, replace={"log_probs += request": "log_probs += (request + 1)"})
    with pytest.raises(SimtError, match="heap-buffer-overflow"):
        build_tree(*hard_case(64), budget=64, kernels=faulty)


SELECTION = (KERNELS / "selection.cuh").read_text().replace("#pragma once", "")


@pytest.mark.parametrize("barrier", range(SELECTION.count("__syncthreads();")))
def test_a_missing_barrier_of_scan_sort_or_histogram_is_found(barrier):
    parts = SELECTION.split("__syncthreads();")
    header = "__syncthreads();".join(parts[: barrier + 1]) + ";" + "__syncthreads();".join(parts[barrier + 1 :])
    source = (KERNELS / "build_tree.cu").read_text().replace('#include "selection.cuh"', header)
    faulty, traced = (build_text(source, name="build_tree.cu", trace=trace) for trace in (False, True))
    case = hard_case(255)
    expected = build_tree(*case, budget=255)
    with pytest.raises((AssertionError, SimtError)):  # noqa: PT012
        build_tree(*hard_case(64), budget=64, kernels=traced)  # sees that a warp could run a whole scan ahead
        for schedule in range(6):
            assert_same_tree(build_tree(*case, budget=255, kernels=faulty, schedule=schedule), expected)
