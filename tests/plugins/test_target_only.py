"""Method target_only against the semantics of SGLang's kernel, its faults corrected."""

import math

import pytest
import torch

from ddtree.plugins import ops

from .oracles import sampling, stacked, tree_of

#         root 9 -> 1 (token 1), 2 (token 2);  1 -> 3 (token 3)
TREE = tree_of([9, 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
P0 = [0.1, 0.5, 0.3, 0.0, 0.1]
ROWS = [P0, [0.2, 0.2, 0.2, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]]


def target_only(coins: list[float], final: float, rows=ROWS, tree=TREE, **options) -> ops.Verified:
    coins = coins + [0.5] * (tree.token_ids.shape[1] - len(coins))
    return ops.verify_tree(
        torch.tensor([rows]).log(),
        tree,
        torch.tensor([10]),
        sampling([{"temperature": 1.0}]),
        method="target_only",
        coins=torch.tensor([coins]),
        final_coin=torch.tensor([final]),
        **options,
    )


@pytest.mark.parametrize(
    ("coins", "final", "nodes", "emitted"),
    [
        ([0.3, 0.9], 0.5, [0, 1], [1, 1]),
        ([0.6, 0.3], 0.5, [0, 2], [2, 4]),
        ([0.95], 0.0, [0], [0]),
        ([0.95], 0.6, [0], [4]),
        ([0.95], 1.0, [0], [4]),  # the last token that is left
        ([0.2, 0.2], 0.99, [0, 1, 3], [1, 3, 0]),
    ],
)
def test_reference_vectors(coins, final, nodes, emitted):
    verified = target_only(coins, final)
    assert verified.accepted_nodes[0].tolist() == nodes + [-1] * (3 - len(nodes))
    assert verified.accepted_count.tolist() == [len(nodes) - 1]
    assert verified.output_ids[0].tolist() == emitted + [-1] * (3 - len(emitted))


@pytest.mark.parametrize("coin", [0.0, 1e-30])
def test_a_token_of_probability_0_is_never_accepted(coin):
    verified = target_only([coin], 0.5, [[0.7, 0.0, 0.3, 0.0, 0.0], *ROWS[1:]])
    assert verified.accepted_nodes[0, :2].tolist() == [0, 2]
    assert verified.output_ids[0, 0] == 2


def test_a_coin_of_1_is_taken_as_just_below_it():
    """Node 1 has all the mass, so every coin accepts it."""
    verified = target_only([1.0], 0.5, [[0.0, 1.0, 0.0, 0.0, 0.0], *ROWS[1:]])
    assert verified.accepted_nodes[0, :2].tolist() == [0, 1]


@pytest.mark.parametrize("row", [[math.nan] * 5, [0.0] * 5])
def test_a_row_that_is_no_distribution_is_an_error(row):
    verified = target_only([0.3], 0.5, [row, *ROWS[1:]])
    assert verified.status.tolist() == [1]
    assert verified.output_ids.tolist() == [[-1, -1, -1]]


def test_threshold_single_accepts_a_likely_child_whatever_the_coin():
    assert target_only([0.95, 0.95], 0.5, threshold_single=0.5).accepted_nodes[0].tolist() == [0, 1, -1]
    assert target_only([0.95, 0.95], 0.5, threshold_single=0.51).accepted_nodes[0].tolist() == [0, -1, -1]
    # The first child is below the threshold, the second is not.
    assert target_only([0.95], 0.5, [[0.3, 0.2, 0.5, 0, 0], *ROWS[1:]], threshold_single=0.4).output_ids[0, 0] == 2


def test_threshold_acc_divides_the_cumulative_probability():
    assert target_only([0.95], 0.5, threshold_acc=0.53).accepted_nodes[0].tolist() == [0, 2, -1]  # .8 / .53 > .95
    assert target_only([0.95], 0.5, threshold_acc=0.52).accepted_nodes[0, :2].tolist() == [0, 1]  # .5 / .52 > .95
    assert target_only([0.99], 0.5, threshold_acc=0.0).accepted_nodes[0, :2].tolist() == [0, 1]
    dead = [[0.3, 0.0, 0.0, 0.3, 0.4], *ROWS[1:]]
    assert target_only([0.5], 0.5, dead, threshold_acc=0.0, threshold_single=0.0).accepted_count.tolist() == [0]


def test_the_residual_leaves_out_the_rejected_children():
    emitted = {int(target_only([0.95], final / 100).output_ids[0, 0]) for final in range(101)}
    assert emitted == {0, 4}
    # .1 and .1 are left: the lower half of the coins gives token 0.
    assert [int(target_only([0.95], final).output_ids[0, 0]) for final in (0.49, 0.51)] == [0, 4]


def test_children_that_hold_all_the_mass_are_accepted_by_the_largest_coin():
    """0.1 + 0.2 + 0.7 must not sum to less than it: nothing would be left to draw from."""
    tree = tree_of([9, 0, 1, 2], [-1, 0, 0, 0], max_depth=1)
    for final in (0.0, 0.5, 1.0):
        verified = target_only([1 - 2.0**-24], final, [[0.1, 0.2, 0.7, 0.0, 0.0], *ROWS[1:]], tree)
        assert verified.output_ids[0, 0] in (0, 1, 2)
        assert verified.status.tolist() == [0]


def test_siblings_are_tried_in_the_order_of_their_links():
    """Trees of other makers may link siblings against their index."""
    tree = tree_of([9, 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
    tree.next_token[0, 0], tree.next_sibling[0, 1], tree.next_sibling[0, 2] = 2, -1, 1
    assert target_only([0.29], 0.5, tree=tree).accepted_nodes[0, :2].tolist() == [0, 2]
    assert target_only([0.31], 0.5, tree=tree).accepted_nodes[0, :2].tolist() == [0, 1]


def test_coins_come_from_the_seed_by_position():
    def run(seeds: list[int], positions: list[int]) -> torch.Tensor:
        many = [TREE] * len(seeds)
        return ops.verify_tree(
            torch.tensor([ROWS] * len(seeds)).log(),
            stacked(many),
            torch.tensor(positions),
            sampling([{"seed": seed} for seed in seeds]),
            method="target_only",
        ).output_ids

    first = run(list(range(20)), [5] * 20)
    assert torch.equal(first, run(list(range(20)), [5] * 20))
    assert not torch.equal(first, run(list(range(20)), [6] * 20))
