"""Sampling is sampling: chi-square tests of what the verified trees emit against the target's own distribution."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from ddtree.plugins import ops

from .oracles import kept_probabilities, sampling, tree_of

DRAWS = 4000
#     root 9 -> 1 (token 1), 2 (token 2);  1 -> 3 (token 3), 4 (token 0)
TREE = tree_of([9, 1, 2, 3, 0], [-1, 0, 0, 1, 1], max_depth=2)
ROWS = [[0.1, 0.5, 0.3, 0.0, 0.1], [0.2, 0.2, 0.2, 0.4, 0.0], [0.1, 0.1, 0.1, 0.1, 0.6], [0.5, 0.5, 0, 0, 0], [0.2] * 5]
LOGITS = torch.tensor(ROWS).log()


def draws(tree: ops.DraftTree, logits: torch.Tensor, *, seeds=None, positions=None, count=DRAWS, **options):
    """output_ids [count, D+1] of one tree under many seeds, or at many positions under one."""
    names = ("token_ids", "parents", "depths", "node_logws", "node_count", "next_token", "next_sibling")
    many = ops.DraftTree(
        **{n: getattr(tree, n).expand(count, *getattr(tree, n).shape[1:]) for n in (*names, "ancestor_mask")},
        max_depth=tree.max_depth,
    )
    filters = options.pop("filters", {})
    seeds = range(count) if seeds is None else seeds
    verified = ops.verify_tree(
        logits.expand(count, *logits.shape),
        many,
        torch.arange(count) * 3 if positions is None else positions,
        sampling([{**filters, "seed": seed} for seed in seeds]),
        **options,
    )
    assert not verified.status.any()
    return verified.output_ids


def assert_distributed(tokens: list[int], probabilities: dict[int, float]) -> None:
    """Never a token of probability 0, and a chi-square above 1e-4: fixed seeds, so it passes always or never."""
    counts = Counter(tokens)
    assert set(counts) <= set(probabilities)
    observed = [counts[token] for token in probabilities]
    expected = [p * len(tokens) for p in probabilities.values()]
    assert min(expected) > 5
    if len(expected) > 1:
        assert stats.chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("method", ["coupled", "target_only"])
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 3}, {"top_p": 0.75}, {"min_p": 0.5}],
    ids=lambda f: " ".join(f"{k} {v}" for k, v in f.items()) or "plain",
)
def test_tokens_along_the_path_follow_the_target(vary, method, filters):
    many = {"seeds": [5] * DRAWS} if vary == "positions" else {"positions": torch.full((DRAWS,), 41)}
    output = draws(TREE, LOGITS, method=method, filters=filters, **many).tolist()

    def target(node: int) -> dict[int, float]:
        return kept_probabilities(LOGITS[node].tolist(), **{"temperature": 1.0, **filters})

    assert_distributed([ids[0] for ids in output], target(0))
    # Given that node 1 was accepted, what follows is the target's after node 1, and so on down the tree.
    assert_distributed([ids[1] for ids in output if ids[0] == 1], target(1))
    assert_distributed([ids[1] for ids in output if ids[0] == 2], target(2))
    if not filters:
        assert_distributed([ids[2] for ids in output if ids[:2] == [1, 3]], target(3))


def test_tokens_of_successive_positions_are_independent():
    """Under coupling one seed serves a whole text: successive draws must not be correlated."""
    root = ops.root_tree(torch.tensor([0]))
    tokens = draws(root, LOGITS[4:], seeds=[99] * DRAWS, positions=torch.arange(DRAWS), filters={})[:, 0].numpy()
    table = np.zeros((5, 5))
    np.add.at(table, (tokens[:-1], tokens[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_a_large_vocabulary_is_sampled_too():
    """Noise is drawn for the likely tokens only: 30,000 equal ones in ten bins."""
    root = ops.root_tree(torch.tensor([0]))
    tokens = draws(root, torch.zeros(1, 30000), count=1500, filters={})[:, 0]
    assert_distributed((tokens // 3000).tolist(), dict.fromkeys(range(10), 0.1))


def test_a_long_tail_of_unlikely_tokens_gets_its_share():
    """29,999 tokens whose probability is e^-11 of the best one's have a third of the mass together."""
    logits = torch.full((1, 30000), -11.0)
    logits[0, 123] = 0.0
    tokens = draws(ops.root_tree(torch.tensor([0])), logits, count=1500, filters={})[:, 0]
    tail = 29999 * math.exp(-11)
    assert_distributed((tokens == 123).int().tolist(), {0: tail / (1 + tail), 1: 1 / (1 + tail)})


@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_a_tree_of_top_k_marginals_does_not_bias(method):
    """min(1, p/q) with q = [.9, .1] gives .554/.446 here."""
    tree = tree_of([9, 0, 1], [-1, 0, 0], max_depth=1)
    output = draws(tree, torch.zeros(3, 2), method=method, positions=torch.full((DRAWS,), 7)).tolist()
    assert_distributed([ids[0] for ids in output], {0: 0.5, 1: 0.5})


def test_target_only_does_not_depend_on_sibling_order_while_its_thresholds_are_1():
    swapped = tree_of([9, 2, 1, 3, 0], [-1, 0, 0, 2, 2], max_depth=2)
    rows = LOGITS[[0, 2, 1, 3, 4]]
    output = draws(swapped, rows, method="target_only").tolist()
    assert_distributed([ids[0] for ids in output], kept_probabilities(LOGITS[0].tolist(), 1.0))
