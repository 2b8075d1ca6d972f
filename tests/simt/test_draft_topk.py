"""The draft_topk kernel: the exact top K of each row, ties to the lower id, and their log-probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ddtree.plugins import ops

from ..plugins.oracles import nodes_of
from .draft_kernels import assert_heap_tree, build_tree, draft_topk, ranked, rows_of
from .runner import SimtError, build

NAN, INF = math.nan, math.inf
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def logits_of(seed: int, *shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def assert_top(logits: torch.Tensor, k: int, **options) -> None:
    """Ids exactly, log-probabilities against float64.

    They differ by the rounding of logit - largest, of the sum's logarithm and of their difference: an ulp of the
    result, and 5e-7 for the sum.
    """
    token_ids, log_probs = draft_topk(logits, k, **options)
    expected_ids, _ = ranked(logits, k)
    assert torch.equal(token_ids, expected_ids)
    exact = logits.double().log_softmax(-1).gather(-1, token_ids.clamp_min(0).long())
    error = (log_probs - exact).abs()
    assert error[token_ids >= 0].le(5e-7 + 2.0**-23 * exact[token_ids >= 0].abs()).all()
    assert log_probs[token_ids < 0].eq(-INF).all()
    assert (log_probs[..., 1:] <= log_probs[..., :-1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 17, 333, 8192, 32000, 151936])
def test_the_best_of_a_row(dtype, vocab):
    logits = logits_of(vocab, 1, 2, vocab, dtype=dtype)
    for k in (1, 2, 15, 16, 64, 255, 1023):
        if k <= vocab:
            assert_top(logits, k)


@settings(max_examples=100, deadline=None)
@given(
    arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 300)), elements=st.sampled_from([-INF, -0.0, 0.0, 1.5])
    ),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
)
def test_equal_logits_rank_by_the_lower_id(logits, k, dtype):
    logits = torch.from_numpy(logits)[None].to(dtype)
    assert_top(logits, min(k, logits.shape[-1]))


@settings(max_examples=100, deadline=None)
@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(allow_nan=False, allow_infinity=False, width=32)),
    st.integers(1, 40),
)
def test_any_finite_logits(logits, k):
    token_ids, log_probs = draft_topk(torch.from_numpy(logits)[None, None], min(k, logits.size))
    expected_ids, expected = ranked(torch.from_numpy(logits)[None, None], min(k, logits.size))
    assert torch.equal(token_ids, expected_ids)
    torch.testing.assert_close(log_probs, expected, rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("vocab", [2049, 40000])
@pytest.mark.parametrize("k", [1, 300, 1023])
def test_a_row_in_which_all_logits_are_equal(vocab, k):
    assert_top(torch.full((1, 1, vocab), -2.5), k)


@pytest.mark.parametrize("k", [1, 64, 1023])
def test_likely_tokens_that_few_threads_hold(k):
    """A thread reads 8 tokens in every 8,192. With these likely, the best tokens of other threads are a poor bound."""
    few = torch.arange(100_000) % 8192 < 200
    logits = logits_of(1, 1, 2, 100_000, scale=0.001)
    logits[..., few] += torch.linspace(3, 9, int(few.sum())).round(decimals=2)
    assert_top(logits, k)


def test_a_bin_that_fits_into_the_buffer_alone_but_not_with_those_before_it():
    """1,000 tokens, then 1,500 that tie, of which 23 are wanted: together they are more than 2,048."""
    logits = torch.cat([torch.linspace(9, 10, 1000), torch.full((1500,), 5.0), torch.full((500,), -100.0)])
    shuffled = logits[torch.randperm(3000, generator=torch.Generator().manual_seed(0))]
    assert_top(shuffled[None, None], 1023)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("vocab", [9, 5000])
def test_a_row_that_is_no_distribution_has_no_candidates(vocab, mapped):
    logits = logits_of(2, 2, 3, vocab)
    logits[0, 0, 5] = NAN
    logits[0, 1, vocab - 1] = INF
    logits[1, 0] = -INF
    logits[1, 2, 1:] = -INF  # one token, of probability 1
    table = torch.arange(vocab, dtype=torch.int32) if mapped else None
    token_ids, log_probs = draft_topk(logits, 4, table)
    for slot, depth in ((0, 0), (0, 1), (1, 0)):
        assert token_ids[slot, depth].tolist() == [-1] * 4
        assert log_probs[slot, depth].tolist() == [-INF] * 4
    assert token_ids[1, 2].tolist() == [0, -1, -1, -1]
    assert log_probs[1, 2].tolist() == [0, -INF, -INF, -INF]
    for slot, depth in ((0, 2), (1, 1)):
        assert torch.equal(token_ids[slot, depth], ranked(logits[slot, depth][None, None], 4)[0][0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_does_not_depend_on_where_the_row_lies(dtype):
    """With an odd vocabulary each row has its own alignment."""
    row = logits_of(3, 4099, dtype=dtype)
    token_ids, log_probs = draft_topk(row.expand(1, 17, -1).contiguous(), 20)
    assert token_ids.eq(token_ids[:, :1]).all()
    assert log_probs.eq(log_probs[:, :1]).all()


# ---------------------------------------------------------------------------------------------------------------------
# draft_to_target
# ---------------------------------------------------------------------------------------------------------------------


def assert_top_of_merged(logits: torch.Tensor, k: int, table: torch.Tensor) -> None:
    """Against float64 sums over the draft ids of each target id, to the error that such sums have in float32."""
    token_ids, log_probs = draft_topk(logits, k, table)
    target_ids, column = table.long().unique(return_inverse=True)
    shares = torch.zeros(*logits.shape[:2], len(target_ids), dtype=torch.float64)
    exact = shares.index_add_(-1, column, logits.double().softmax(-1)).log()
    found = min(k, len(target_ids))
    assert token_ids[..., found:].eq(-1).all()
    assert log_probs[..., found:].eq(-INF).all()
    token_ids, log_probs = token_ids[..., :found].long(), log_probs[..., :found]
    assert all(len(set(ids)) == found for ids in token_ids.flatten(0, 1).tolist())
    at = torch.searchsorted(target_ids, token_ids)
    assert torch.equal(target_ids[at], token_ids)
    torch.testing.assert_close(log_probs.double(), exact.gather(-1, at), rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(
        log_probs.double(), exact.sort(-1, descending=True).values[..., :found], rtol=3e-7, atol=1e-6
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("targets", [3, 100, 2048, 2049, 6000])
def test_draft_ids_of_one_target_id_are_merged(dtype, targets):
    table = torch.randint(targets, (3001,), generator=torch.Generator().manual_seed(targets), dtype=torch.int32) * 2 + 7
    assert_top_of_merged(logits_of(targets, 1, 2, 3001, dtype=dtype), 64, table)


def test_target_ids_may_be_far_apart():
    table = torch.tensor([2**31 - 2, 0, 5_000_000, 2**31 - 2, 2047, 2048, 5_000_000, 4096], dtype=torch.int32)
    assert_top_of_merged(logits_of(5, 1, 1, 8), 8, table)


def test_more_merged_ids_than_the_buffer_holds():
    """All are equally likely: 3,000 target ids of two draft ids each, 1,000 of them wanted."""
    table = torch.arange(6000, dtype=torch.int32) // 2 * 3
    token_ids, log_probs = draft_topk(torch.zeros(1, 1, 6000), 1000, table)
    assert token_ids[0, 0].tolist() == list(range(0, 3000, 3))
    np.testing.assert_allclose(log_probs, -math.log(3000), rtol=3e-7)


def test_a_table_without_merging_only_renames():
    logits = logits_of(6, 1, 3, 500)
    logits[0, 2] = 0.0  # ties: by target id
    table = torch.randperm(500, generator=torch.Generator().manual_seed(0)).int() * 5 + 2
    token_ids, log_probs = draft_topk(logits, 30, table)
    plain_ids, plain_log_probs = draft_topk(logits, 30)
    assert torch.equal(token_ids[:, :2], table[plain_ids[:, :2].long()])
    assert token_ids[0, 2].tolist() == table.sort().values[:30].tolist()
    torch.testing.assert_close(log_probs, plain_log_probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 17, 5003])
def test_an_ascending_table_is_read_as_it_is(dtype, vocab):
    """As a drafter of a reduced vocabulary has it: the same log-probabilities to the bit, under other names."""
    generator = torch.Generator().manual_seed(vocab)
    table = (torch.randperm(9 * vocab, generator=generator)[:vocab].sort().values + 3).int()
    logits = logits_of(vocab, 1, 3, vocab, dtype=dtype)
    logits[0, 1, vocab // 2] = -INF
    logits[0, 2] = logits[0, 2].round()
    k = min(vocab, 100)
    token_ids, log_probs = draft_topk(logits, k, table)
    plain_ids, plain_log_probs = draft_topk(logits, k)
    assert torch.equal(token_ids, torch.where(plain_ids < 0, -1, table[plain_ids.clamp_min(0).long()]))
    assert torch.equal(log_probs, plain_log_probs)


@pytest.mark.parametrize("table", [[3, 9, 9, 40], [3, 9, 5, 40], [3, 9, 40, 40], [3, 3, 9, 40]])
def test_a_table_with_one_pair_out_of_order_is_merged(table):
    assert_top_of_merged(logits_of(4, 1, 2, 4), 4, torch.tensor(table, dtype=torch.int32))


def test_infinities_survive_merging():
    logits = torch.zeros(3, 1, 4)
    logits[0, 0, 1] = -INF
    logits[1, 0, 0] = INF
    logits[2, 0, 3] = NAN
    token_ids, log_probs = draft_topk(logits, 3, torch.tensor([5, 5, 7, 8], dtype=torch.int32))
    assert token_ids[:, 0].tolist() == [[5, 7, 8], [-1, -1, -1], [-1, -1, -1]]
    torch.testing.assert_close(log_probs[0, 0], torch.full((3,), -math.log(3)))


# ---------------------------------------------------------------------------------------------------------------------
# The two kernels in a row
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depths", "vocab", "budget"), [(15, 333, 64), (7, 32000, 255), (2, 151936, 16)])
def test_draft_logits_become_the_tree(dtype, depths, vocab, budget):
    """The heap's tree of the kernel's own log-probabilities; and the nodes of the CPU path, whose last bits differ."""
    logits = logits_of(vocab, 2, depths, vocab, scale=4.0, dtype=dtype)
    roots = torch.tensor([7, 8])
    found = draft_topk(logits, min(budget, vocab))
    tree = build_tree(*found, roots, budget=budget)
    expected = ops.build_tree(logits, roots, budget=budget)
    for slot in range(2):
        assert_heap_tree(tree, rows_of(found[0][slot], found[1][slot]), budget, root=int(roots[slot]), slot=slot)
        if dtype == torch.float32:  # logits of 16 bits tie: there the last bit decides
            assert [node[:3] for node in nodes_of(tree, slot)] == [node[:3] for node in nodes_of(expected, slot)]


# ---------------------------------------------------------------------------------------------------------------------
# The kernel
# ---------------------------------------------------------------------------------------------------------------------


def hard_cases() -> list[tuple]:
    """A row whose first bound is too far, one in which all tie, two with merged ids, and one with renamed ones."""
    table = torch.randint(3000, (2500,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    pairs = torch.arange(2500, dtype=torch.int32) // 2
    return [
        (logits_of(7, 1, 2, 60_001, dtype=torch.float16), 1023),
        (torch.zeros(1, 1, 30_003), 700),
        (logits_of(8, 1, 1, 2500, dtype=torch.bfloat16).round(), 100, table),
        (logits_of(8, 1, 1, 2500).round(), 100, torch.arange(2500, dtype=torch.int32) * 5),
        (logits_of(8, 1, 1, 2500).round(), 100, pairs),
    ]


@pytest.mark.parametrize("case", hard_cases())
def test_the_order_of_the_threads_does_not_matter(case):
    expected = draft_topk(*case)
    for schedule in range(1, 6):
        for have, want in zip(draft_topk(*case, schedule=schedule), expected, strict=True):
            assert torch.equal(have, want)


@pytest.mark.parametrize("case", hard_cases()[2:])
def test_no_thread_races_with_another(case):
    traced = draft_topk(*case, kernels=build("draft_topk.cu", trace=True), schedule=3)
    for have, want in zip(traced, draft_topk(*case), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("case", [*hard_cases(), (logits_of(9, 3, 2, 17), 17), (logits_of(9, 3, 2, 1), 1)])
def test_no_access_is_out_of_bounds(case):
    found = draft_topk(*case, kernels=build("draft_topk.cu", sanitize=True))
    for have, want in zip(found, draft_topk(*case), strict=True):
        assert torch.equal(have, want)


# None of these writes beyond an array: the test process has to survive them.
FAULTS = {
    "no barrier between the largest of the draft ids and their sum": (
        "                next = min(next, target);\n            }\n        }\n        __syncthreads();",
        "                next = min(next, target);\n            }\n        }",
    ),
    "two equal ids side by side are not merged": ("table[at] >= table[at + 1]", "table[at] > table[at + 1]"),
    "the bound is another thread's": ("Key bound = collected[wanted - 1]", "Key bound = collected[wanted / 2]"),
    "ties go to the higher id": ("static_cast<unsigned>(token);", "~static_cast<unsigned>(token);"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    old, new = FAULTS[fault]
    faulty = build("draft_topk.cu", replace={old: new})
    with pytest.raises((AssertionError, SimtError)):  # noqa: PT012
        for case in hard_cases():
            expected = draft_topk(*case)
            for schedule in range(6):
                for have, want in zip(draft_topk(*case, kernels=faulty, schedule=schedule), expected, strict=True):
                    assert torch.equal(have, want)


def test_a_row_too_far_is_found():
    faulty = build(
        "draft_topk.cu",
        sanitize=True,
        replace={"Row<T>(draft_logits + row * V, V)": "Row<T>(draft_logits + row * V, V + 1)"},
    )
    with pytest.raises(SimtError, match="heap-buffer-overflow"):
        draft_topk(logits_of(9, 1, 1, 17), 4, kernels=faulty)
