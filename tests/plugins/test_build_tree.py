"""build_tree is exact: the published heap's tree, node by node, ties and infinities included."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from ddtree.plugins import ops

from .oracles import all_prefixes, float32_log_softmax, heap_tree, nodes_of, ranked_rows

NAN, INF = math.nan, math.inf
# Few values, so that nearly all sums tie; -inf rows are no distributions.
TIED = st.sampled_from([-INF, -3.0, -2.5, 0.0, 0.5, 1.0, 4.0, 12.0])


def build(logits, budget: int, **options) -> ops.DraftTree:
    logits = torch.as_tensor(logits)
    return ops.build_tree(logits, torch.arange(100, 100 + len(logits)), budget=budget, **options)


def draft_logits(seed: int, *shape: int, scale: float = 2.0) -> torch.Tensor:
    """Rows with a few likely tokens, as a drafter gives."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape, generator=generator) * scale
    return logits + 3 * scale * (torch.rand(*shape, generator=generator) < 4 / shape[-1])


def tied_logits(sides: st.SearchStrategy) -> st.SearchStrategy:
    return arrays(np.float32, sides, elements=TIED)


@settings(max_examples=300, deadline=None)
@given(tied_logits(array_shapes(min_dims=2, max_dims=2, max_side=4)), st.integers(0, 90))
def test_tree_is_the_most_probable_prefixes_of_all(logits, budget):
    assert nodes_of(build(logits[None], budget)) == all_prefixes(ranked_rows(torch.tensor(logits)), budget)


@settings(max_examples=200, deadline=None)
@given(tied_logits(st.tuples(st.integers(1, 15), st.integers(1, 70))), st.integers(0, 70))
def test_tree_is_the_heaps_when_everything_ties(logits, budget):
    assert nodes_of(build(logits[None], budget)) == heap_tree(ranked_rows(torch.tensor(logits)), budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("depth", "vocab"), [(1, 500), (15, 333), (15, 3072), (15, 9001), (15, 20000)])
@pytest.mark.parametrize("scale", [0.02, 2.0, 5.0])
def test_tree_is_the_heaps(dtype, depth, vocab, scale):
    logits = draft_logits(vocab, 1, depth, vocab, scale=scale).to(dtype)
    nodes = heap_tree(ranked_rows(logits[0]), 1024)
    for budget in (1, 16, 255, 1024):
        assert nodes_of(build(logits, budget)) == nodes[:budget]


@pytest.mark.parametrize("vocab", [97, 40000])
def test_marginals_are_softmax_over_the_whole_vocabulary(vocab):
    logits = draft_logits(1, 15, vocab)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    np.testing.assert_allclose(float32_log_softmax(logits.numpy()), expected, rtol=1e-6, atol=2e-6)


@settings(max_examples=150, deadline=None)
@given(
    tied_logits(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40))), st.integers(0, 80), st.booleans()
)
def test_tree_is_well_formed(logits, budget, keep_chain):
    tree = build(logits, budget, keep_chain=keep_chain)
    for slot in range(len(logits)):
        assert_well_formed(tree, slot, budget, root=100 + slot)


def assert_well_formed(tree: ops.DraftTree, slot: int, budget: int, root: int) -> None:
    token_ids, parents, depths, node_logws, next_token, next_sibling = (
        getattr(tree, name)[slot].tolist()
        for name in ("token_ids", "parents", "depths", "node_logws", "next_token", "next_sibling")
    )
    width, count = budget + 1, int(tree.node_count[slot])
    assert 1 <= count <= width == len(token_ids)
    assert (token_ids[0], parents[0], depths[0], node_logws[0]) == (root, -1, 0, 0.0)
    assert token_ids[count:] == depths[count:] == [0] * (width - count)
    assert parents[count:] == next_token[count:] == next_sibling[count:] == [-1] * (width - count)
    assert node_logws[count:] == [-INF] * (width - count)
    assert all(-INF < later <= earlier for earlier, later in pairwise(node_logws[:count]))

    children: dict[int, list[int]] = {node: [] for node in range(count)}
    sees = [{node} for node in range(width)]
    for node in range(1, count):
        assert 0 <= parents[node] < node
        assert depths[node] == depths[parents[node]] + 1
        children[parents[node]].append(node)
        sees[node] |= sees[parents[node]]
    for node, expected in children.items():
        assert len({token_ids[child] for child in expected}) == len(expected)
        followed, child = [], next_token[node]
        while child >= 0:
            followed.append(child)
            child = next_sibling[child]
        assert followed == expected  # in descending node_logw, as nodes are
    words = tree.ancestor_mask[slot].numpy().view(np.uint32)
    for node in range(width):
        assert {j for j in range(words.shape[1] * 32) if words[node, j // 32] >> (j % 32) & 1} == sees[node]


def test_a_smaller_budget_gives_the_first_nodes():
    logits = draft_logits(3, 1, 7, 50)
    largest = nodes_of(build(logits, 200))
    for budget in range(200):
        assert nodes_of(build(logits, budget)) == largest[:budget]


@pytest.mark.parametrize(("depth", "vocab"), [(7, 60), (7, 3000), (4, 16384), (3, 20000), (7, 40000)])
def test_a_slot_does_not_depend_on_its_batch(depth, vocab):
    logits = draft_logits(4, 4, depth, vocab, scale=5.0)
    logits[1] = NAN
    logits[2, 2] = -INF
    batched = build(logits, 40)
    for slot in range(4):
        assert nodes_of(batched, slot) == nodes_of(build(logits[slot : slot + 1], 40))
    assert batched.node_count[1] == 1
    assert batched.depths[2].max() == 2  # the tree ends above the row that is no distribution


@pytest.mark.parametrize("vocab", [300, 20000])
def test_the_order_in_memory_does_not_matter(vocab):
    logits = draft_logits(5, 2, 3, vocab, scale=0.5)
    expected = build(logits, 60)
    for axes in ((2, 0, 1), (1, 2, 0), (2, 1, 0)):
        other = logits.permute(axes).contiguous().permute(*np.argsort(axes).tolist())
        assert not other.is_contiguous()
        for slot in range(2):
            assert nodes_of(build(other, 60), slot) == nodes_of(expected, slot)


@pytest.mark.filterwarnings("error")
def test_the_largest_logits_are_numbers_like_any_other():
    logits = torch.tensor([[[3e38, -3e38, 3e38, 0.0]]])
    half = pytest.approx(math.log(0.5))
    assert nodes_of(build(logits, 4)) == [(0, 0, 1, half), (2, 0, 1, half), (3, 0, 1, pytest.approx(-3e38))]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_no_distribution_ends_the_tree_above_it(bad):
    logits = draft_logits(5, 1, 4, 30)
    logits[0, 2, 7] = bad
    assert nodes_of(build(logits, 50)) == nodes_of(build(logits[:, :2], 50))


def test_tokens_of_probability_0_never_appear():
    """The published code's heap makes -inf - -inf = NaN of these rows."""
    tree = build([[[0.0, -INF, -INF], [1.0, 0.0, -INF]]], 6)
    assert tree.node_count.tolist() == [4]
    assert tree.token_ids[0, 1:].tolist() == [0, 0, 1, 0, 0, 0]


def test_uniform_marginals_come_in_the_order_of_rank_tuples():
    tree = build(torch.zeros(1, 2, 2), 6)
    assert tree.token_ids[0].tolist() == [100, 0, 1, 0, 1, 0, 1]
    assert tree.parents[0].tolist() == [-1, 0, 0, 1, 1, 2, 2]


def test_float_sums_that_tie_across_depths_follow_the_tuples():
    """.6 * .5 = .3: the extension (0, 0) and the sibling (1) may tie, and the tuple (0, 0) is the smaller."""
    logits = torch.tensor([[[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]]]).log()
    assert nodes_of(build(logits, 12)) == heap_tree(ranked_rows(logits[0]), 12)
    # Rows of probability 1 add exactly 0, so that a child ties with its parent, here for each of 49 that tie already.
    certain = torch.zeros(1, 4, 7)
    certain[0, 2:, 1:] = -INF
    nodes = heap_tree(ranked_rows(certain[0]), 160)
    for budget in range(160):
        assert nodes_of(build(certain, budget)) == nodes[:budget]


def test_equal_logits_rank_by_the_lower_token_id():
    logits = torch.zeros(1, 1, 40000)
    logits[0, 0, [39999, 7, 20000]] = 5.0
    assert build(logits, 6).token_ids[0].tolist() == [100, 7, 20000, 39999, 0, 1, 2]


def test_the_root_is_not_counted_in_the_budget():
    logits = draft_logits(6, 1, 3, 9)
    for budget in (0, 1, 5):
        tree = build(logits, budget)
        assert tree.token_ids.shape == (1, budget + 1)
        assert tree.node_count.tolist() == [budget + 1]
        assert tree.max_depth == 3
    assert build(logits, 10_000).node_count.tolist() == [1 + 9 + 81 + 729]


def test_token_0_is_a_node_like_any_other():
    tree = build([[[9.0, 0.0], [9.0, 0.0]]], 2)
    assert tree.token_ids.tolist() == [[100, 0, 0]]
    assert tree.node_count.tolist() == [3]


@pytest.mark.parametrize("vocab", [1, 2, 700, 40000])
@pytest.mark.parametrize("budget", [0, 1, 7, 20])
def test_chain_mode_is_the_argmax_of_each_depth(vocab, budget):
    logits = draft_logits(7, 2, 8, vocab).round()  # ties: torch.argmax takes the first
    tree = build(logits, budget, mode="chain")
    length = min(budget, 8)
    assert tree.node_count.tolist() == [length + 1] * 2
    assert tree.token_ids[:, 1 : length + 1].tolist() == logits.argmax(-1)[:, :length].tolist()
    assert tree.parents[:, : length + 1].tolist() == [list(range(-1, length))] * 2
    assert tree.next_sibling.eq(-1).all()
    for slot in range(2):
        assert_well_formed(tree, slot, budget, root=100 + slot)


def test_chain_mode_is_the_tree_whose_rows_have_one_token_each():
    logits = draft_logits(8, 1, 6, 30)
    best = torch.where(logits == logits.amax(-1, keepdim=True), logits, -INF)
    chain, tree = build(logits, 6, mode="chain"), build(best, 6)
    for name in ("token_ids", "parents", "depths", "node_count", "next_token", "next_sibling", "ancestor_mask"):
        assert torch.equal(getattr(chain, name), getattr(tree, name)), name


@pytest.mark.parametrize("vocab", [30, 40000])
@pytest.mark.parametrize("budget", [8, 9, 20, 64])
def test_keep_chain_puts_the_chain_in_place_of_the_last_nodes(vocab, budget):
    logits = draft_logits(9, 1, 8, vocab, scale=0.1)  # flat: the exact tree of these budgets is shallow
    chain = logits.argmax(-1)[0].tolist()
    exact, kept = nodes_of(build(logits, budget)), nodes_of(build(logits, budget, keep_chain=True))
    assert max(depth for _, _, depth, _ in exact) < 8
    tree = build(logits, budget, keep_chain=True)
    assert_well_formed(tree, 0, budget, root=100)
    node = 0
    for token in chain:
        node = next(at for at, (t, parent, _, _) in enumerate(kept, start=1) if (t, parent) == (token, node))
    shared = sum(a == b for a, b in zip(exact, kept, strict=True))
    assert kept[:shared] == exact[:shared]
    assert shared >= budget - 8  # at most the chain's nodes were exchanged


def test_keep_chain_changes_nothing_where_the_chain_is_in_already_or_does_not_fit():
    peaked, flat = draft_logits(10, 1, 5, 30, scale=5.0), draft_logits(9, 1, 8, 30, scale=0.1)
    assert nodes_of(build(peaked, 60, keep_chain=True)) == nodes_of(build(peaked, 60))
    assert nodes_of(build(flat, 7, keep_chain=True)) == nodes_of(build(flat, 7))


@pytest.mark.parametrize("vocab", [30, 30000])
def test_draft_ids_are_mapped_to_target_ids(vocab):
    logits = draft_logits(11, 1, 3, vocab)
    table = torch.randperm(vocab, generator=torch.Generator().manual_seed(0)).int() * 5 + 2
    plain, mapped = build(logits, 25), build(logits, 25, draft_to_target=table)
    assert mapped.token_ids[0, 1:].tolist() == table[plain.token_ids[0, 1:].long()].tolist()
    assert torch.equal(mapped.parents, plain.parents)
    assert mapped.token_ids[0, 0] == 100


def test_mapped_ids_tie_by_target_id():
    table = torch.tensor([30, 20, 10], dtype=torch.int32)
    assert build(torch.zeros(1, 1, 3), 3, draft_to_target=table).token_ids[0].tolist() == [100, 10, 20, 30]


def test_draft_ids_of_one_target_id_are_merged():
    probabilities = torch.tensor([[[0.3, 0.25, 0.25, 0.2, 0.0]]])
    table = torch.tensor([4, 9, 9, 2, 2], dtype=torch.int32)
    nodes = nodes_of(build(probabilities.log(), 5, draft_to_target=table))
    assert [token for token, _, _, _ in nodes] == [9, 4, 2]
    np.testing.assert_allclose(np.exp([logw for *_, logw in nodes]), [0.5, 0.3, 0.2], rtol=1e-5)


def test_merging_leaves_padding_and_broken_rows_alone():
    logits = torch.zeros(2, 2, 4)
    logits[0, 1] = -INF
    logits[1, 0, 2] = NAN
    tree = build(logits, 6, draft_to_target=torch.tensor([5, 5, 7, 8], dtype=torch.int32))
    assert tree.token_ids.tolist() == [[100, 5, 7, 8, 0, 0, 0], [101, 0, 0, 0, 0, 0, 0]]
    assert tree.node_count.tolist() == [4, 1]


def test_root_tree_is_the_tree_of_budget_0():
    root = ops.root_tree(torch.tensor([7, 8]), max_depth=4)
    built = ops.build_tree(torch.zeros(2, 4, 3), torch.tensor([7, 8]), budget=0)
    for name in ("token_ids", "parents", "depths", "node_logws", "node_count", "next_token", "next_sibling"):
        assert torch.equal(getattr(root, name), getattr(built, name)), name
    assert torch.equal(root.ancestor_mask, built.ancestor_mask)
    assert root.max_depth == built.max_depth == 4
