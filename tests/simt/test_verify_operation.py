"""The operation's own tests, run on the kernel: the walk, what it reports, the mask, SGLang's semantics, vectors."""

import pytest

from ddtree.plugins import ops

# What these names are collected for: ``ops.verify_tree`` is the kernel in this file.
from ..plugins.test_target_only import (  # noqa: F401
    test_a_coin_of_1_is_taken_as_just_below_it,
    test_a_row_that_is_no_distribution_is_an_error,
    test_a_token_of_probability_0_is_never_accepted,
    test_reference_vectors,
    test_threshold_acc_divides_the_cumulative_probability,
    test_threshold_single_accepts_a_likely_child_whatever_the_coin,
)
from ..plugins.test_vectors import test_coupled_draw, test_verify_tree  # noqa: F401
from ..plugins.test_verify_tree import (  # noqa: F401
    test_a_mask_that_leaves_only_impossible_tokens_fails,
    test_a_root_alone_gives_one_token,
    test_a_root_that_is_no_distribution_fails_its_slot_alone,
    test_a_round_ends_before_a_row_that_fails,
    test_a_tree_of_one_child_takes_the_same_route,
    test_greedy_takes_the_lowest_id_of_equal_logits,
    test_logprobs_are_log_softmax_of_the_raw_logits,
    test_method_greedy_overrules_the_temperature,
    test_nothing_left_after_the_filters_fails,
    test_nothing_left_after_the_mask_fails_its_slot_alone,
    test_outputs_are_d_plus_1_wide_whatever_the_budget,
    test_padding_is_never_accepted_whatever_it_holds,
    test_rows_off_the_path_may_hold_anything,
    test_the_greedy_walk,
    test_the_mask_comes_before_the_filters,
    test_the_mask_is_that_of_each_node,
    test_token_0_is_accepted_where_it_is_a_real_node,
)
from .verify_kernel import verify_tree


@pytest.fixture(autouse=True)
def _on_the_kernel(monkeypatch):
    monkeypatch.setattr(ops, "verify_tree", verify_tree)
