"""Rules of a request, path by path: DDTree rounds write what decoding token by token, with plain counts, writes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ddtree.plugins import ops
from ddtree.plugins.row_rules import RowRules

from . import oracles
from .oracles import sampling, stacked, tree_of
from .toy_model import LENGTH, VOCAB, Request, autoregressive, ddtree, target_logits

NAN, INF = math.nan, math.inf
METHODS = ["coupled", "greedy", "target_only"]
#          root 9 -> 1 (token 1), 2 (token 2);  1 -> 3 (token 3), 4 (token 1);  4 -> 5 (token 1)
TREE = tree_of([9, 1, 2, 3, 1, 1], [-1, 0, 0, 1, 1, 4], max_depth=3)

RULES = {
    "logit_bias": {"logit_bias": {3: 4.0, 5: -100.0, 6: -INF}},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "repetition_reward": {"repetition_penalty": 0.6},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "frequency_reward": {"frequency_penalty": -0.3, "presence_penalty": -0.5},
    "bad_words": {"bad_words": [[4], [1, 2], [2, 2], [7, 8, 9], [3, 3, 3, 3]]},
    "min_tokens": {"min_tokens": 13, "end_token_ids": [0, 7]},
    "all": {
        "logit_bias": {1: 1.0, 8: -2.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "bad_words": [[10], [2, 5]],
        "min_tokens": 9,
        "end_token_ids": [3],
    },
}


def verify(logits, rules, tree=TREE, slots=({"temperature": 0.0},), **options) -> ops.Verified:
    logits = torch.as_tensor(logits)
    return ops.verify_tree(
        logits, tree, torch.full((len(logits),), 10), sampling(list(slots)), row_rules=rules, **options
    )


def rules_of(prompt=(), output=(), vocab=5, **rules) -> RowRules:
    made = RowRules(vocab_size=vocab, prompt_token_ids=prompt, **rules)
    made.advance(output)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    made = []
    for at, rules in enumerate(RULES.values()):
        for temperature in (0.0, 0.9):
            made.append(Request((1, 2, at), temperature=temperature, top_p=0.95, seed=at, quality=2.0, rules=rules))
    return [*made, Request((1, 2, 3), seed=5)]


@pytest.fixture(scope="module")
def expected(requests) -> list[list[int]]:
    return [autoregressive(request) for request in requests]


def test_each_rule_changes_the_text(requests, expected):
    """Else the equalities below would say nothing about it."""
    for request, text in zip(requests[:-1], expected[:-1], strict=True):
        plain = Request(request.prompt, request.temperature, top_p=request.top_p, seed=request.seed)
        assert autoregressive(plain) != text


@pytest.mark.parametrize("options", [{"budget": n} for n in (0, 1, 5, 16, 64)] + [{"budget": 5, "mode": "chain"}])
def test_tree_chain_and_plain_decoding_write_the_oracles_text(options, requests, expected):
    texts, rounds = ddtree(requests, **options)
    assert texts == expected
    if options["budget"] >= 16:
        assert min(rounds) < 0.7 * LENGTH  # drafts were accepted, so rules looked at paths


def test_the_text_does_not_depend_on_slot_or_batch_mates(requests, expected):
    assert ddtree(requests[::-1], 12)[0] == expected[::-1]
    for request, text in zip(requests[::3], expected[::3], strict=True):
        assert ddtree([request], 12)[0] == [text]


TOKEN = st.integers(0, VOCAB - 1)
FEW_TOKENS = st.lists(TOKEN, min_size=1, max_size=3)
ANY_RULES = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(TOKEN, st.sampled_from([-INF, -3.0, 0.25, 2.5]), max_size=3),
        "repetition_penalty": st.sampled_from([0.5, 0.9, 1.1, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.7, 2.0]),
        "frequency_penalty": st.sampled_from([-0.4, 0.3, 1.5]),
        "bad_words": st.lists(FEW_TOKENS, max_size=5),
        "min_tokens": st.integers(0, LENGTH),
        "end_token_ids": st.lists(TOKEN, max_size=2),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    ANY_RULES,
    st.lists(TOKEN, min_size=1, max_size=6),
    st.sampled_from([0.0, 0.6, 1.2]),
    st.sampled_from([{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}]),
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 7, 30]),
    st.sampled_from(["tree", "chain"]),
)
def test_any_rules_give_the_oracles_text(rules, prompt, temperature, filters, seed, budget, mode):
    request = Request(tuple(prompt), temperature=temperature, seed=seed, quality=2.0, rules=rules, **filters)
    try:
        expected = autoregressive(request)
    except IndexError:  # the rules leave no token somewhere
        assume(False)
    text = (*request.prompt, *expected)
    for at in range(len(prompt), len(text)):
        logits = oracles.ruled_logits(list(target_logits(text[:at])), prompt, text[len(prompt) : at], **rules)
        assume(not oracles.draw_is_near(logits, seed, at, **request.settings))
    mate = Request((5, 6), temperature=1.0, seed=3)
    assert ddtree([request, mate], budget, mode=mode)[0] == [expected, autoregressive(mate)]


@settings(max_examples=150, deadline=None)
@given(
    ANY_RULES,
    st.lists(TOKEN, min_size=1, max_size=6),
    st.lists(TOKEN, max_size=6),
    st.sampled_from([{"temperature": 0.7}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 4}]),
    st.integers(0, 10**6),
)
def test_target_only_walks_as_the_oracle_does(rules, prompt, output, settings, seed):
    generator = np.random.default_rng(seed)
    nodes = 16
    draft = torch.from_numpy(generator.normal(size=(1, 4, VOCAB)).astype(np.float32) * 2)
    tree = ops.build_tree(draft, torch.tensor([prompt[-1]]), budget=nodes - 1)
    logits = torch.from_numpy(generator.normal(size=(1, nodes, VOCAB)).astype(np.float32))
    path_of = {(): 0}
    for node in range(1, nodes):
        parent = int(tree.parents[0, node])
        before = next(path for path, of in path_of.items() if of == parent)
        path_of[*before, int(tree.token_ids[0, node])] = node
    coins, final_coin = torch.from_numpy(generator.uniform(size=(1, nodes)).astype(np.float32)), generator.uniform()

    def rows(path: list[int]) -> list[float]:
        raw = logits[0, path_of[tuple(path)]].tolist()
        return oracles.ruled_logits(raw, prompt, [*output, *path], **rules)

    made = rules_of(prompt, output, VOCAB, **rules)
    verified = verify(
        logits,
        [made],
        tree,
        [settings],
        method="target_only",
        coins=coins,
        final_coin=torch.tensor([final_coin], dtype=torch.float32),
    )
    try:
        accepted, tokens, nearest = oracles.target_only_walk(rows, tree, coins[0].tolist(), final_coin, **settings)
    except IndexError:
        assert verified.status.tolist() == [2]
        return
    assume(nearest > 1e-5)
    count = int(verified.accepted_count[0])
    assert verified.accepted_nodes[0, : count + 1].tolist() == accepted
    assert verified.output_ids[0, : count + 1].tolist() == tokens


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


def test_a_node_is_penalised_with_its_own_ancestors():
    """Chain 0, 0 under a presence penalty of 2: the second 0 is no longer the best."""
    tree = tree_of([7, 0, 0], [-1, 0, 1], max_depth=2)
    logits = torch.tensor([[[2.0, 1.9]] * 3])
    verified = verify(logits, [rules_of(vocab=2, presence_penalty=2.0)], tree)
    assert verified.output_ids.tolist() == [[0, 1, -1]]
    assert verified.accepted_nodes.tolist() == [[0, 1, -1]]


def test_rules_apply_in_their_order():
    """Token 0: (3 + 1) / 2 - 0.5 - 2 * 0.25; token 1: (-3 + 1) * 2 - 0.5 - 0.25; token 2, of the prompt: 3 / 2."""
    rules = rules_of(
        [2],
        [0, 1, 0],
        logit_bias={0: 1.0, 1: 1.0},
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        bad_words=[[1, 0, 3]],
        min_tokens=4,
        end_token_ids=[4],
    )
    row = np.array([3.0, -3.0, 3.0, 1.0, 9.0], np.float32)
    assert rules.changed(row, []).tolist() == [1.0, -4.75, 1.5, -INF, -INF]
    assert row.tolist() == [3.0, -3.0, 3.0, 1.0, 9.0]
    # One token further on: token 3 is no bad word behind 1, 0, 2, the output is long enough, 2 is in it.
    assert rules.changed(row, [2]).tolist() == [1.0, -4.75, 0.75, 1.0, 9.0]


def test_penalties_of_the_output_leave_the_prompt_alone():
    rules = rules_of([0, 1], [], presence_penalty=1.0, frequency_penalty=1.0)
    row = np.ones(5, np.float32)
    assert rules.changed(row, []).tolist() == [1.0] * 5
    assert rules.changed(row, [1, 1]).tolist() == [1.0, -2.0, 1.0, 1.0, 1.0]


def test_bad_words_look_back_over_prompt_output_and_path():
    rules = rules_of([1], [2], bad_words=[[1, 2, 3, 4], [2, 0], [4, 4, 4]])
    row = np.zeros(5, np.float32)

    def forbidden(path: list[int]) -> list[int]:
        return np.flatnonzero(rules.changed(row, path) == -INF).tolist()

    assert [forbidden(path) for path in ([], [3], [3, 1], [4], [4, 4])] == [[0], [4], [], [], [4]]
    rules.advance([3])
    assert forbidden([]) == [4]


def test_min_tokens_counts_the_path():
    rules = rules_of([1], [2], min_tokens=3, end_token_ids=[0, 4])
    row = np.zeros(5, np.float32)
    assert [np.flatnonzero(rules.changed(row, path) == -INF).tolist() for path in ([], [1], [1, 1])] == [
        [0, 4],
        [0, 4],
        [],
    ]


@pytest.mark.parametrize("method", METHODS)
def test_rules_come_before_mask_and_filters(method):
    """top_k 1 keeps the best of what rules and mask leave."""
    logits = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0]]])
    root = ops.root_tree(torch.tensor([2]))
    mask = torch.tensor([[[0b11101]]], dtype=torch.int32)
    rules = rules_of([0], [], repetition_penalty=10.0, logit_bias={2: -5.0})
    slots = [{"temperature": 1.0, "top_k": 1}]
    assert verify(logits, [rules], root, slots, method=method, token_bitmask=mask).output_ids.tolist() == [[3]]


@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_the_raw_logits(method):
    logits = torch.randn(1, 6, 5, generator=torch.Generator().manual_seed(2))
    verified = verify(logits, [rules_of([1], [2], logit_bias={1: 50.0}, frequency_penalty=3.0)], method=method)
    expected = torch.log_softmax(logits.double(), -1)
    assert verified.accepted_nodes.tolist() == [[0, 1, 4, 5]]
    for at, (node, token) in enumerate(zip([0, 1, 4, 5], verified.output_ids[0].tolist(), strict=True)):
        assert verified.logprobs[0, at].item() == pytest.approx(expected[0, node, token].item(), abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_only_rows_on_the_accepted_path_are_changed(method, monkeypatch):
    seen = []
    changed = RowRules.changed
    monkeypatch.setattr(
        RowRules, "changed", lambda self, row, path: (seen.append([*path]), changed(self, row, path))[1]
    )
    logits = torch.full((1, 6, 5), NAN)
    for node, token in ((0, 1), (1, 1), (4, 2)):
        logits[0, node] = torch.nn.functional.one_hot(torch.tensor(token), 5) * 90.0
    verified = verify(logits, [rules_of(logit_bias={0: 1.0})], slots=[{}], method=method)
    assert verified.output_ids.tolist() == [[1, 1, 2, -1]]
    assert seen == [[], [1], [1, 1]]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_left_is_the_status_of_its_slot_alone(method):
    logits = torch.zeros(3, 6, 5)
    logits[0, 0, 2] = NAN
    rules = [rules_of(bad_words=[[t] for t in range(ids)]) for ids in (5, 5, 4)]
    verified = verify(logits, rules, stacked([TREE] * 3), [{"temperature": 0.8}] * 3, method=method)
    assert verified.status.tolist() == [1, 2, 0]
    assert verified.output_ids.tolist() == [[-1] * 4, [-1] * 4, [4, -1, -1, -1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_that_overflows_is_a_status(temperature):
    logits = torch.full((1, 1, 5), 3e38)
    root = ops.root_tree(torch.tensor([0]))
    assert verify(logits, [rules_of(logit_bias={1: 3e38})], root, [{"temperature": temperature}]).status.tolist() == [2]


def test_verifying_does_not_advance_rules():
    rules = rules_of([1], [2], presence_penalty=1.0, bad_words=[[1, 1]])
    row = np.zeros(5, np.float32)
    before = rules.changed(row, []).tolist()
    verify(torch.zeros(1, 6, 5), [rules])
    assert rules.changed(row, []).tolist() == before


# ---------------------------------------------------------------------------------------------------------------------
# Grammar
# ---------------------------------------------------------------------------------------------------------------------


def words(*allowed: int, vocab: int = 5) -> torch.Tensor:
    bits = np.zeros(-(-vocab // 32) * 32, bool)
    bits[list(allowed)] = True
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32).copy())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_asked_once_a_visited_node_from_the_root_down(method, temperature):
    """It lets 1, 1, then 3, and none of these is what the logits like."""
    asked = []

    def grammar(path: list[int]) -> torch.Tensor:
        asked.append(path)
        return words((1, 1, 3)[len(path)])

    logits = torch.zeros(1, 6, 5)
    logits[..., 2] = 30.0
    slots = [{"temperature": temperature}]
    verified = verify(logits, [rules_of(token_bitmask=grammar)], slots=slots, method=method)
    assert verified.output_ids.tolist() == [[1, 1, 3, -1]]
    assert asked == [[], [1], [1, 1]]


def test_a_grammar_may_allow_everything_or_nothing():
    logits = torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0))
    root = ops.root_tree(torch.zeros(3, dtype=torch.int64))
    rules = [rules_of(token_bitmask=lambda path: None), rules_of(token_bitmask=lambda path: words()), None]
    verified = verify(logits, rules, root, [{"temperature": 0.0}] * 3)
    best = logits.argmax(-1)[:, 0].tolist()
    assert verified.status.tolist() == [0, 2, 0]
    assert verified.output_ids.tolist() == [[best[0]], [-1], [best[2]]]


def test_a_grammar_and_the_other_rules_and_a_mask_all_hold():
    root = ops.root_tree(torch.tensor([0]))
    rules = rules_of(bad_words=[[0]], token_bitmask=lambda path: words(0, 1, 2))
    logits = torch.tensor([[[5.0, 4.0, 3.0, 9.0, 9.0]]])
    verified = verify(logits, [rules], root, token_bitmask=words(0, 2, 3)[None, None])
    assert verified.output_ids.tolist() == [[2]]


def test_a_grammar_of_a_large_vocabulary():
    vocab = 40_000
    rules = rules_of(vocab=vocab, token_bitmask=lambda path: words(31, vocab - 1, vocab=vocab))
    logits = torch.zeros(1, 1, vocab)
    root = ops.root_tree(torch.tensor([0]))
    drawn = {
        int(verify(logits, [rules], root, [{"temperature": 1.0, "seed": seed}]).output_ids[0, 0]) for seed in range(20)
    }
    assert drawn == {31, vocab - 1}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), r"token_bitmask returned has shape \[2\], expected \[1\]"),
        (torch.zeros(1, dtype=torch.int64), r"token_bitmask returned is torch\.int64, expected torch\.int32"),
    ],
)
def test_a_grammars_wrong_words_are_refused(returned, message):
    with pytest.raises(ValueError, match=message):
        verify(torch.zeros(1, 6, 5), [rules_of(token_bitmask=lambda path: returned)])


# ---------------------------------------------------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"repetition_penalty": 0.0}, r"repetition_penalty 0\.0 is not above 0 and finite \(1 is off\)"),
        ({"repetition_penalty": 1e-60}, "repetition_penalty 1e-60 is not above 0"),
        ({"repetition_penalty": NAN}, "repetition_penalty nan"),
        ({"presence_penalty": INF}, r"presence_penalty inf is not finite \(0 is off\)"),
        ({"frequency_penalty": NAN}, "frequency_penalty nan is not finite"),
        ({"logit_bias": {5: 1.0}}, "logit_bias holds token 5: the vocabulary has 0 to 4"),
        ({"logit_bias": {1: NAN}}, "logit_bias nan of token 1 is neither finite nor -inf"),
        ({"logit_bias": {1: INF}}, "logit_bias inf of token 1"),
        ({"bad_words": [[1], [2, -1]]}, "bad_words holds token -1: the vocabulary"),
        ({"bad_words": [[1], []]}, r"bad_words has an empty sequence \(leave it out\)"),
        ({"min_tokens": -1}, "min_tokens -1 is negative"),
        ({"end_token_ids": [9]}, "end_token_ids holds token 9"),
        ({"prompt": [7]}, "prompt_token_ids holds token 7"),
    ],
)
def test_wrong_rules_cannot_be_made(rules, message):
    with pytest.raises(ValueError, match=message) as raised:
        rules_of(**rules)
    assert "\n" not in str(raised.value)


def test_tokens_that_are_none_are_refused_and_nothing_is_taken():
    """-1 is how a slot that failed is padded."""
    rules = rules_of([1], [2], presence_penalty=1.0, bad_words=[[3, 3]])
    with pytest.raises(ValueError, match="token_ids holds token -1"):
        rules.advance([3, -1])
    assert rules.changed(np.zeros(5, np.float32), []).tolist() == [0.0, 0.0, -1.0, 0.0, 0.0]


def test_rules_of_another_batch_or_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"row_rules has 2 slots, expected 1 \(None for a slot without\)"):
        verify(torch.zeros(1, 6, 5), [None, None])
    with pytest.raises(ValueError, match="row_rules of vocab_size 6, expected 5, that of the logits"):
        verify(torch.zeros(1, 6, 5), [rules_of(vocab=6)])


def test_rules_are_no_part_of_a_traced_graph():
    rules = [rules_of(logit_bias={1: 1.0})]

    def step(logits):
        return verify(logits, rules).output_ids

    with pytest.raises(Exception, match="row_rules are Python objects: no part of a traced graph"):
        torch.compile(step, backend="eager", fullgraph=True)(torch.zeros(1, 6, 5))


def test_rules_are_active_while_they_can_change_a_row():
    assert not rules_of([1, 2]).active
    assert not rules_of(min_tokens=5).active  # without an id that ends
    short = rules_of(min_tokens=2, end_token_ids=[0])
    assert short.active
    short.advance([1, 1])
    assert not short.active
    for rules in RULES.values():
        assert rules_of(vocab=VOCAB, **rules).active
    assert rules_of(token_bitmask=lambda path: None).active
