"""verify_tree: the walk, what it reports, which rows it reads, and that slots do not touch one another."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.plugins import ops
from ddtree.plugins.sampling import filtered_weights

from . import oracles
from .oracles import sampling, stacked, tree_of

NAN, INF = math.nan, math.inf
METHODS = ["coupled", "greedy", "target_only"]
#          root 9 -> 1 (token 1), 2 (token 2);  1 -> 3 (token 3)
SMALL = tree_of([9, 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
SMALL_LOGITS = torch.tensor([[[0, 5.0, 1, 0, 0], [0, 0, 0, 5.0, 1], [0.0] * 5, [5.0, 0, 0, 0, 1]]])


def verify(logits, tree, slots, *, position=10, **options) -> ops.Verified:
    logits = torch.as_tensor(logits)
    return ops.verify_tree(logits, tree, torch.full((len(logits),), position), sampling(slots), **options)


def assert_same_slot(a: ops.Verified, slot_a: int, b: ops.Verified, slot_b: int) -> None:
    for name in ("accepted_nodes", "accepted_count", "output_ids", "logprobs", "status"):
        assert torch.equal(getattr(a, name)[slot_a], getattr(b, name)[slot_b]), name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_greedy_walk(method, dtype):
    verified = verify(SMALL_LOGITS.to(dtype), SMALL, [{"temperature": 0.0}], method=method)
    assert verified.accepted_nodes.tolist() == [[0, 1, 3]]
    assert verified.accepted_count.tolist() == [2]
    assert verified.output_ids.tolist() == [[1, 3, 0]]
    assert verified.status.tolist() == [0]


def test_method_greedy_overrules_the_temperature():
    hot = verify(SMALL_LOGITS, SMALL, [{"temperature": 50.0}], method="greedy")
    assert_same_slot(hot, 0, verify(SMALL_LOGITS, SMALL, [{"temperature": 0.0}]), 0)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_lowest_id_of_equal_logits(temperature):
    logits = torch.zeros(1, 1, 70)
    logits[0, 0, [66, 5, 30]] = 2.0
    verified = verify(logits, ops.root_tree(torch.tensor([0])), [{"temperature": temperature}])
    assert verified.output_ids.tolist() == [[5]]


def test_outputs_are_d_plus_1_wide_whatever_the_budget():
    """N = 12 rows, D + 1 = 4 outputs, batch 2: the second slot's rows are its own."""
    parents = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 8, 8]
    tree = stacked([tree_of(list(range(12)), parents, max_depth=3)] * 2)
    logits = torch.zeros(2, 12, 16)
    for slot, path in enumerate(([0, 1, 4, 9], [0, 3, 8, 11])):
        for node, following in zip(path, [*path[1:], 15 - slot], strict=True):
            logits[slot, node, following] = 8.0
    verified = verify(logits, tree, [{"temperature": 0.0}] * 2)
    assert verified.accepted_nodes.tolist() == [[0, 1, 4, 9], [0, 3, 8, 11]]
    assert verified.output_ids.tolist() == [[1, 4, 9, 15], [3, 8, 11, 14]]
    assert verified.logprobs.shape == (2, 4)


def test_padding_is_never_accepted_whatever_it_holds():
    tree = tree_of([5, 3], [-1, 0], max_depth=4, width=6)
    logits = torch.full((1, 6, 4), NAN)
    logits[0, 0] = torch.tensor([9.0, 0, 0, 0])  # token 0, as padding has
    assert verify(logits, tree, [{"temperature": 0.0}]).accepted_nodes.tolist() == [[0, -1, -1, -1, -1]]
    tree.parents[0, 2:] = 0  # padding that says it is a child of the root
    for method in METHODS:
        verified = verify(logits, tree, [{"temperature": 0.0}], method=method)
        assert verified.output_ids.tolist() == [[0, -1, -1, -1, -1]]
        assert verified.status.tolist() == [0]


def test_token_0_is_accepted_where_it_is_a_real_node():
    tree = tree_of([5, 0], [-1, 0], max_depth=1, width=4)
    logits = torch.zeros(1, 4, 3)
    logits[0, 0, 0], logits[0, 1, 2] = 9.0, 9.0
    verified = verify(logits, tree, [{"temperature": 0.0}])
    assert verified.output_ids.tolist() == [[0, 2]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_rows_off_the_path_may_hold_anything(method, temperature):
    slots = [{"temperature": temperature, "seed": 3}]
    clean = verify(SMALL_LOGITS, SMALL, slots, method=method)
    dirty = SMALL_LOGITS.clone()
    for node in set(range(4)) - set(clean.accepted_nodes[0].tolist()):
        dirty[0, node] = NAN
    assert_same_slot(verify(dirty, SMALL, slots, method=method), 0, clean, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    "row", [[NAN] * 5, [0, 9.0, NAN, 0, 0], [-INF] * 5, [0, INF, 0, 0, 0]], ids=["nan", "one nan", "no finite", "inf"]
)
def test_a_root_that_is_no_distribution_fails_its_slot_alone(method, temperature, row):
    logits = SMALL_LOGITS.repeat(2, 1, 1) * 40  # so peaked that every method takes the path 0, 1, 3
    logits[1, 0] = torch.tensor(row)
    slots = [{"temperature": temperature}] * 2
    verified = verify(logits, stacked([SMALL, SMALL]), slots, method=method)
    assert verified.status.tolist() == [0, 1]
    assert verified.accepted_nodes[1].tolist() == verified.output_ids[1].tolist() == [-1, -1, -1]
    assert verified.accepted_count.tolist() == [2, 0]
    assert_same_slot(verified, 0, verify(logits[:1], SMALL, slots[:1], method=method), 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("node", "emitted"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("fault", ["nan", "masked"])
def test_a_round_ends_before_a_row_that_fails(method, temperature, node, emitted, fault):
    """Plain decoding, too, has written all up to there, and fails only then: the next round's root is that row."""
    logits = SMALL_LOGITS * 40  # the path 0, 1, 3
    mask = torch.full((1, 4, 1), -1, dtype=torch.int32)
    if fault == "nan":
        logits[0, node] = NAN
    else:
        mask[0, node] = 0
    verified = verify(logits, SMALL, [{"temperature": temperature}], method=method, token_bitmask=mask)
    whole = verify(SMALL_LOGITS * 40, SMALL, [{"temperature": temperature}], method=method)
    assert verified.status.tolist() == [0]
    assert verified.accepted_count.tolist() == [emitted - 1]
    rest = 3 - emitted
    assert verified.output_ids.tolist() == [whole.output_ids[0, :emitted].tolist() + [-1] * rest]
    assert verified.accepted_nodes.tolist() == [whole.accepted_nodes[0, :emitted].tolist() + [-1] * rest]
    root = ops.root_tree(verified.output_ids[:, emitted - 1])
    following = verify(
        logits[:, node : node + 1],
        root,
        [{"temperature": temperature}],
        method=method,
        token_bitmask=mask[:, node : node + 1],
    )
    assert following.status.tolist() == [1 if fault == "nan" else 2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_after_the_mask_fails_its_slot_alone(method, temperature):
    mask = torch.full((2, 4, 1), -1, dtype=torch.int32)
    mask[1, 0] = 0
    logits = SMALL_LOGITS.repeat(2, 1, 1) * 40
    verified = verify(
        logits, stacked([SMALL, SMALL]), [{"temperature": temperature}] * 2, method=method, token_bitmask=mask
    )
    assert verified.status.tolist() == [0, 2]
    assert verified.output_ids.tolist() == [[1, 3, 0], [-1, -1, -1]]


def test_nothing_left_after_the_filters_fails():
    assert verify(SMALL_LOGITS, SMALL, [{"min_p": 1.5}]).status.tolist() == [2]


def test_a_mask_that_leaves_only_impossible_tokens_fails():
    logits = torch.tensor([[[0.0, -INF]]])
    mask = torch.tensor([[[0b10]]], dtype=torch.int32)
    assert verify(logits, ops.root_tree(torch.tensor([0])), [{}], token_bitmask=mask).status.tolist() == [2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab", [5, 32, 33, 40000])
def test_the_mask_is_that_of_each_node(method, vocab):
    """Bit v % 32 of word v // 32, after the node's own row: the walk goes where the mask lets it."""
    allowed = [vocab - 1, 3, 0, 2]  # by node
    tree = tree_of([9, vocab - 1, 2, 3], [-1, 0, 0, 1], max_depth=2)
    words = torch.zeros(1, 4, -(-vocab // 32), dtype=torch.int32)
    for node, token in enumerate(allowed):
        words[0, node, token // 32] = torch.tensor(1 << (token % 32)).to(torch.int32)  # bit 31 is the sign
    logits = torch.randn(1, 4, vocab, generator=torch.Generator().manual_seed(0))
    for temperature in (0.0, 0.8):
        verified = verify(logits, tree, [{"temperature": temperature}], method=method, token_bitmask=words)
        assert verified.output_ids.tolist() == [[vocab - 1, 3, 2]]


def test_the_mask_comes_before_the_filters():
    """top_k 1 keeps the best token that is allowed, and top_p is a share of what is allowed."""
    logits = torch.tensor([[[4.0, 3.0, 2.0, 1.0]]])
    mask = torch.tensor([[[0b1100]]], dtype=torch.int32)
    for seed in range(40):
        for filters in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
            slots = [{**filters, "seed": seed}]
            verified = verify(logits, ops.root_tree(torch.tensor([0])), slots, token_bitmask=mask)
            assert verified.output_ids.tolist() == [[2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_log_softmax_of_the_raw_logits(method, dtype):
    logits = (torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    slots = [{"temperature": 0.0}, {"temperature": 0.6, "top_k": 4, "seed": 1}, {"min_p": 0.1, "top_p": 0.7}]
    mask = torch.full((3, 4, 2), 0x0FFFFFFF, dtype=torch.int32)
    verified = verify(logits, stacked([SMALL] * 3), slots, method=method, token_bitmask=mask)
    expected = torch.log_softmax(logits.double(), -1)
    for slot in range(3):
        for at in range(int(verified.accepted_count[slot]) + 1):
            node, token = int(verified.accepted_nodes[slot, at]), int(verified.output_ids[slot, at])
            assert verified.logprobs[slot, at].item() == pytest.approx(expected[slot, node, token].item(), abs=1e-5)
        assert not verified.logprobs[slot, int(verified.accepted_count[slot]) + 1 :].any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(METHODS), st.booleans())
def test_a_slot_does_not_depend_on_its_batch(seed, method, masked):
    generator = np.random.default_rng(seed)
    batch, budget, vocab = 4, 12, int(generator.choice([8, 40, 7000]))
    draft = torch.from_numpy(generator.normal(size=(batch, 4, vocab)).astype(np.float32) * 3)
    tree = ops.build_tree(draft, torch.zeros(batch, dtype=torch.int32), budget=budget)
    logits = torch.from_numpy(generator.normal(size=(batch, budget + 1, vocab)).astype(np.float32) * 3)
    logits[:, :, :8] += 6
    slots = [
        {
            "temperature": float(generator.choice([0.0, 0.5, 1.0, 1.7])),
            "top_k": int(generator.choice([0, 1, 5])),
            "top_p": float(generator.choice([1.0, 0.8])),
            "min_p": float(generator.choice([0.0, 0.05])),
            "seed": int(generator.integers(2**63)),
        }
        for _ in range(batch)
    ]
    positions = torch.from_numpy(generator.integers(0, 5000, batch))
    mask = torch.from_numpy(generator.integers(-(2**31), 2**31, (batch, budget + 1, -(-vocab // 32)), dtype=np.int32))
    mask = mask if masked else None
    logits[1, 0, 0] = NAN  # a mate that fails

    def run(of: list[int]) -> ops.Verified:
        picked = torch.tensor(of)
        names = ("token_ids", "parents", "depths", "node_logws", "node_count", "next_token", "next_sibling")
        part = ops.DraftTree(
            **{name: getattr(tree, name)[picked] for name in (*names, "ancestor_mask")}, max_depth=tree.max_depth
        )
        return ops.verify_tree(
            logits[picked],
            part,
            positions[picked],
            sampling([slots[slot] for slot in of]),
            method=method,
            token_bitmask=None if mask is None else mask[picked],
        )

    together = run([0, 1, 2, 3])
    backwards = run([3, 2, 1, 0])
    assert together.status[1] == 1
    for slot in range(batch):
        alone = run([slot])
        assert_same_slot(together, slot, alone, 0)
        assert_same_slot(backwards, 3 - slot, alone, 0)


def test_a_tree_of_one_child_takes_the_same_route():
    tree = tree_of([9, 1], [-1, 0], max_depth=1)
    verified = verify(SMALL_LOGITS[:, :2], tree, [{"temperature": 0.0}])
    assert verified.output_ids.tolist() == [[1, 3]]


def test_a_root_alone_gives_one_token():
    for depth in (0, 5):
        root = ops.root_tree(torch.tensor([9]), max_depth=depth)
        verified = verify(SMALL_LOGITS[:, :1], root, [{"temperature": 0.0}])
        assert verified.output_ids.tolist() == [[1] + [-1] * depth]
        assert verified.accepted_nodes.tolist() == [[0] + [-1] * depth]
        assert verified.accepted_count.tolist() == [0]


@pytest.mark.parametrize(
    ("probabilities", "filters", "possible"),
    [
        ([0.4, 0.3, 0.3], {"top_k": 2}, {0, 1}),  # exactly k on ties, the lower id
        ([0.3, 0.3, 0.4], {"top_k": 2}, {0, 2}),
        ([0.25] * 4, {"top_k": 3}, {0, 1, 2}),
        ([0.6, 0.3, 0.1], {"min_p": 0.4}, {0, 1}),
        ([0.5, 0.3, 0.2], {"top_p": 0.5}, {0}),  # reached exactly by the first
        ([0.5, 0.3, 0.2], {"top_p": 0.51}, {0, 1}),  # the crossing token is kept
        ([0.5, 0.3, 0.2], {"top_p": 0.0}, {0}),
        ([0.25] * 4, {"top_k": 3, "top_p": 0.6}, {0, 1}),  # top_p of what top_k left, renormalised
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 3, "top_p": 0.85, "min_p": 0.7}, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 99}, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], {"top_k": 1, "temperature": 9.0}, {0}),
    ],
)
@pytest.mark.parametrize("method", ["coupled", "target_only"])
def test_filters_leave_exactly_these_tokens(probabilities, filters, possible, method):
    batch = 400
    logits = torch.tensor(probabilities).log().expand(batch, 1, -1)
    slots = [{**filters, "seed": seed} for seed in range(batch)]
    root = ops.root_tree(torch.zeros(batch, dtype=torch.int32))
    assert set(verify(logits, root, slots, method=method).output_ids.flatten().tolist()) == possible


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([3, 70, 700, 7000]),
    st.sampled_from([0.3, 1.0, 40.0]),
    st.sampled_from([0, 1, 50, 100, 10**6]),
    st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.booleans(),
)
def test_filters_keep_what_the_float64_oracle_keeps(seed, vocab, temperature, top_k, top_p, min_p, tied):
    logits = np.random.default_rng(seed).normal(size=vocab).astype(np.float32) * 3
    if tied:
        logits = np.round(logits)
    if not oracles.mass_is_near(logits.tolist(), temperature, top_k, top_p, min_p):
        _, weights = filtered_weights(logits, temperature, top_k, top_p, min_p)
        expected = oracles.kept_probabilities(logits.tolist(), temperature, top_k, top_p, min_p)
        assert set(weights.nonzero()[0].tolist()) == set(expected)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([3, 70, 700, 7000]),
    st.sampled_from([0.3, 0.8, 1.0, 2.5]),
    st.sampled_from([0, 1, 2, 50, 10**6]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3]),
    st.booleans(),
)
def test_the_coupled_draw_is_the_float64_oracles(seed, vocab, temperature, top_k, top_p, min_p, tied):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=vocab).astype(np.float32) * 3
    if tied:
        logits = np.round(logits)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    position = int(generator.integers(1, 2**20))
    kept = oracles.kept_probabilities(logits.tolist(), temperature, top_k, top_p, min_p)
    keys = sorted(
        ((logits[t] / temperature + oracles.gumbel(seed, position, t), t) for t in likely(kept)),
        key=lambda pair: (-pair[0], pair[1]),
    )
    near = len(keys) > 1 and keys[0][0] - keys[1][0] < 1e-4
    slots = [{**settings, "seed": seed}]
    root = ops.root_tree(torch.tensor([0]))
    verified = verify(torch.from_numpy(logits)[None, None], root, slots, position=position - 1)
    if not near and not oracles.mass_is_near(logits.tolist(), **settings):
        assert verified.output_ids.tolist() == [[keys[0][1]]]


def likely(kept: dict[int, float]) -> list[int]:
    """Without those that cannot win, so that scalar Philox need not run over a whole vocabulary."""
    best = max(kept.values())
    return [token for token, p in kept.items() if p > best * math.exp(-26)]
