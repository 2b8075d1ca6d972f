"""Wrong arguments are refused before any work, in one line that names what was given and what was expected."""

import dataclasses

import pytest
import torch

from ddtree.plugins import ops

from .oracles import sampling

DRAFT, ROOT = torch.zeros(2, 3, 5), torch.zeros(2, dtype=torch.int32)
TREE = ops.build_tree(DRAFT, ROOT, budget=4)
PAST = torch.tensor([3, 4])
LOGITS = torch.zeros(2, 5, 5)
SAMPLING = sampling([{}, {}])
VERIFIED = ops.verify_tree(LOGITS, TREE, PAST, SAMPLING)


def build(draft_logits=DRAFT, root_token_ids=ROOT, *, budget=4, **options):
    return ops.build_tree(draft_logits, root_token_ids, budget=budget, **options)


def encode(tree=TREE, root_positions=PAST, past_lengths=PAST, cache_length=16, dtype=torch.float32, **options):
    return ops.encode_tree(tree, root_positions, past_lengths, cache_length, dtype, **options)


def verify(logits=LOGITS, tree=TREE, root_positions=PAST, sampling=SAMPLING, **options):
    return ops.verify_tree(logits, tree, root_positions, sampling, **options)


CASES = [
    (build, {"draft_logits": DRAFT[0]}, ValueError, r"draft_logits has shape \[3, 5\], expected \[any, any, any\]"),
    (build, {"draft_logits": DRAFT.double()}, ValueError, "draft_logits is torch.float64, expected torch.float32 or"),
    (build, {"draft_logits": DRAFT[:, :0]}, ValueError, r"draft_logits has shape \[2, 0, 5\]"),
    (build, {"draft_logits": DRAFT[:0]}, ValueError, r"draft_logits has shape \[0, 3, 5\]: give \[batch, D, vocab\]"),
    (build, {"root_token_ids": ROOT[:1]}, ValueError, r"root_token_ids has shape \[1\], expected \[2\]"),
    (build, {"root_token_ids": ROOT.float()}, ValueError, "root_token_ids is torch.float32, expected torch.int32 or"),
    (build, {"budget": -1}, ValueError, "budget -1 is negative"),
    (build, {"mode": "beam"}, ValueError, 'mode "beam" is unknown'),
    (build, {"draft_to_target": torch.arange(5)}, ValueError, "draft_to_target is torch.int64"),
    (build, {"draft_to_target": torch.arange(4).int()}, ValueError, r"draft_to_target has shape \[4\], expected \[5\]"),
    (build, {"draft_to_target": torch.arange(5).int() - 1}, ValueError, "draft_to_target holds -1"),
    (build, {"draft_logits": DRAFT.to("meta")}, NotImplementedError, "on meta: only the CPU is served"),
    (encode, {"root_positions": PAST[:1]}, ValueError, r"root_positions has shape \[1\], expected \[2\]"),
    (encode, {"past_lengths": PAST.int()}, ValueError, "past_lengths is torch.int32, expected torch.int64"),
    (
        encode,
        {"cache_length": 8},
        ValueError,
        r"past length 4 \+ 5 tree rows exceed cache_length 8 \(grow the cache",
    ),
    (encode, {"dtype": torch.float64}, ValueError, "dtype of the mask is torch.float64"),
    (encode, {"window": 0}, ValueError, "window 0 is below 1"),
    (verify, {"logits": LOGITS[:, :4]}, ValueError, r"logits has shape \[2, 4, 5\], expected \[2, 5, any\]"),
    (verify, {"logits": LOGITS.int()}, ValueError, "logits is torch.int32"),
    (verify, {"logits": LOGITS[..., :0]}, ValueError, "a vocabulary of at least 1"),
    (verify, {"root_positions": PAST.int()}, ValueError, "root_positions is torch.int32"),
    (verify, {"sampling": sampling([{}])}, ValueError, "sampling has 1 slots, expected 2"),
    (verify, {"method": "nucleus"}, ValueError, 'method "nucleus" is unknown'),
    (
        verify,
        {"token_bitmask": torch.zeros(2, 5, 2).int()},
        ValueError,
        r"token_bitmask has shape \[2, 5, 2\]",
    ),
    (verify, {"coins": torch.zeros(2, 5)}, ValueError, 'belong to method "target_only", not "coupled"'),
    (verify, {"threshold_acc": 0.5}, ValueError, 'belong to method "target_only", not "coupled"'),
    (verify, {"method": "target_only", "threshold_single": 1.5}, ValueError, "threshold_single 1.5 is outside 0 to 1"),
    (verify, {"method": "target_only", "coins": torch.zeros(2, 4)}, ValueError, r"coins has shape \[2, 4\]"),
    (verify, {"method": "target_only", "final_coin": torch.zeros(3)}, ValueError, r"final_coin has shape \[3\]"),
]


@pytest.mark.parametrize(("operation", "arguments", "error", "message"), CASES)
def test_wrong_arguments(operation, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        operation(**arguments)
    assert "\n" not in str(raised.value)


def test_the_same_calls_without_the_fault_pass():
    build(), encode(), verify()


def test_commit_refuses_caches_of_another_batch():
    cache = torch.zeros(3, 2, 16, 4)
    with pytest.raises(ValueError, match=r"cache of layer 1 has shape \[3, 2, 16, 4\], expected \[2, any, any, any\]"):
        ops.commit([(cache[:2], cache[:2]), (cache, cache)], PAST, VERIFIED)
    with pytest.raises(ValueError, match=r"past_lengths is torch\.int32"):
        ops.commit([], PAST.int(), VERIFIED)
    layers = torch.zeros(4, 2, 2, 16, 4)
    with pytest.raises(ValueError, match=r"has shape \[4, 3, 2, 16, 4\], expected \[any, 2, any, any, any\]"):
        ops.commit([(layers, torch.zeros(4, 3, 2, 16, 4))], PAST, VERIFIED)
    with pytest.raises(ValueError, match=r"has shape \[2, 2, 16, 4\], expected \[any, 2, any, any, any\]"):
        ops.commit([(layers, layers[0])], PAST, VERIFIED)
    with pytest.raises(ValueError, match="a cache of 2 rows does not hold the accepted path"):
        ops.commit([(layers[..., :2, :], layers[..., :2, :])], PAST, VERIFIED)


def test_gather_features_refuses_another_batch():
    with pytest.raises(ValueError, match=r"features has shape \[3, 5, 8\], expected \[2, any, any\]"):
        ops.gather_features(torch.zeros(3, 5, 8), VERIFIED)


def test_a_tree_of_unequal_fields_cannot_be_made():
    with pytest.raises(ValueError, match=r"parents has shape \[2, 4\], expected \[2, 5\]"):
        dataclasses.replace(TREE, parents=TREE.parents[:, :4])
    with pytest.raises(ValueError, match=r"next_token is torch\.int64, expected torch\.int32"):
        dataclasses.replace(TREE, next_token=TREE.next_token.long())
    with pytest.raises(ValueError, match=r"ancestor_mask has shape \[2, 5, 2\], expected \[2, 5, 1\]"):
        dataclasses.replace(TREE, ancestor_mask=torch.zeros(2, 5, 2, dtype=torch.int32))


def test_sampling_settings_of_unequal_length_cannot_be_made():
    with pytest.raises(ValueError, match=r"top_p has shape \[1\], expected \[2\]"):
        dataclasses.replace(SAMPLING, top_p=SAMPLING.top_p[:1])
    with pytest.raises(ValueError, match=r"seed is torch\.int32, expected torch\.int64"):
        dataclasses.replace(SAMPLING, seed=SAMPLING.seed.int())
