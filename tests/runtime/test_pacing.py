"""Trees that are cut and drafts that are left out: never another text, and no worse a draft afterwards."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddtree.plugins import ops
from ddtree.plugins.tree import DraftTree, Verified, first_nodes
from ddtree.runtime import LLM, SamplingParams
from ddtree.runtime import pacing as pacing_module
from ddtree.runtime import scheduler as scheduler_module
from ddtree.runtime.engine import DraftInputs
from ddtree.runtime.pacing import CostAwarePacing, RoundCosts, RoundSeconds

COST = RoundSeconds(draft=1.0, rows=[1, 5, 9], seconds=[2.0, 3.0, 5.0])
PROMPTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w1 w2 w3 w4 w5 w6 w7 w8 w9 w1 w2 w3 w4", "w3 w3 w3"]


@pytest.fixture
def tiny_llm(tiny_llm: LLM) -> LLM:
    tiny_llm.adaptive = True
    return tiny_llm


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> "Clock":
    """Time that passes when it is told to."""
    clock = Clock()
    monkeypatch.setattr(pacing_module.time, "perf_counter", lambda: clock.now)
    return clock


class Clock:
    now = 100.0


class ErraticPacing(CostAwarePacing):
    """Drafts or not and cuts trees by chance."""

    def __init__(self, seed: int, slots: int, max_depth: int):
        super().__init__(RoundCosts(COST), slots, max_depth)
        self.chance = random.Random(seed)
        self.drafted = self.left_out = self.cut = 0

    def drafts(self, *, forced: bool) -> bool:
        chosen = forced or self.chance.random() < 0.4
        self.drafted += chosen
        self.left_out += not chosen
        return chosen

    def nodes(self, tree: DraftTree) -> int:
        width = tree.token_ids.shape[1]
        count = self.chance.randrange(width)
        self.cut += count < width - 1
        return count

    def learn(self, verified: Verified, nodes: int) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_does_not_depend_on_pacing(tiny_llm: LLM, monkeypatch, temperature: float, seed: int) -> None:
    params = [
        SamplingParams(max_tokens=20 + 17 * i, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)
    ]
    tiny_llm.method = "ar"
    alone = [tiny_llm.generate(p, s).outputs[0].token_ids for p, s in zip(PROMPTS, params, strict=True)]
    pacings: list[ErraticPacing] = []

    def erratic(*_: object) -> ErraticPacing:
        pacings.append(ErraticPacing(seed, 4, tiny_llm.manifest.draft.max_depth))
        return pacings[-1]

    monkeypatch.setattr(tiny_llm._scheduler, "_new_pacing", erratic)
    tiny_llm.method, tiny_llm.budget = "ddtree", 33
    together = [output.outputs[0].token_ids for output in tiny_llm.generate(PROMPTS, params)]
    assert together == alone
    assert min(pacings[0].drafted, pacings[0].left_out, pacings[0].cut) > 3


def test_a_draft_after_a_pause_is_the_one_without_it(tiny_llm: LLM, monkeypatch) -> None:
    """Draft logits at a position depend on the text before it, not on when the drafter got its context features."""
    depth = tiny_llm.manifest.draft.max_depth

    class Every(ErraticPacing):
        def __init__(self, every: int):
            super().__init__(0, 1, depth)
            self.every, self.round = every, 0

        def drafts(self, *, forced: bool) -> bool:
            self.round += 1
            return forced or self.round % self.every == 0

        def nodes(self, tree: DraftTree) -> int:
            return 0

    def drafts(every: int) -> dict[int, torch.Tensor]:
        seen = {}
        run_drafter = tiny_llm.engine._run_draft

        def spy(first: int, inputs: DraftInputs) -> torch.Tensor:
            logits = run_drafter(first, inputs)
            seen[int(inputs.block_position_ids[0, 0])] = logits.clone()
            return logits

        with monkeypatch.context() as patch:
            patch.setattr(tiny_llm.engine, "_run_draft", spy)
            patch.setattr(tiny_llm._scheduler, "_pacings", {tiny_llm.budget: Every(every)})
            tiny_llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True))
        return seen

    always = drafts(1)
    for every in (2, 5, depth + 1, 40):  # 40: the drafter must be fed before
        some = drafts(every)
        assert len(some) >= 60 // min(every, depth + 1) - 1
        for position, logits in some.items():
            torch.testing.assert_close(logits, always[position], rtol=0, atol=2e-5)


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 24))
def test_the_first_nodes_are_the_tree_of_that_budget(seed: int, batch: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 3, (batch, 4, 6)).astype(np.float32))
    logits[0, 1, 2:] = -torch.inf  # so that a slot may have fewer nodes
    roots = torch.arange(batch, dtype=torch.int32)
    count = int(rng.integers(0, budget + 1))
    cut = first_nodes(ops.build_tree(logits, roots, budget=budget), count)
    for name, expected in vars(ops.build_tree(logits, roots, budget=count)).items():
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(getattr(cut, name), expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("count", [-1, 6])
def test_more_nodes_than_there_are_is_refused(count: int) -> None:
    tree = ops.build_tree(torch.zeros(1, 2, 3), torch.zeros(1, dtype=torch.int32), budget=5)
    with pytest.raises(ValueError, match=rf"count {count} of draft nodes is out of range \(the trees have 0 to 5\)"):
        first_nodes(tree, count)


def test_time_is_linear_between_and_beyond_what_was_measured() -> None:
    np.testing.assert_allclose(COST.undrafted(np.array([1, 3, 5, 7, 9, 13])), [2.0, 2.5, 3.0, 4.0, 5.0, 7.0])


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_nodes_give_the_most_tokens_a_second(seed: int, batch: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (batch, 5, 9)).astype(np.float32))
    tree = ops.build_tree(logits, torch.zeros(batch, dtype=torch.int32), budget=12)
    chosen = CostAwarePacing(RoundCosts(COST), batch, 5).nodes(tree)

    def rate(nodes: int) -> float:
        tokens = sum(1 + sum(np.exp(float(w)) for w in row[1 : nodes + 1]) for row in tree.node_logws)
        rows = batch * (nodes + 1)
        seconds = 2 + (rows - 1) / 4 if rows <= 5 else 3 + (rows - 5) / 2
        return tokens / (batch + seconds)  # a draft for each

    assert rate(chosen) >= max(rate(nodes) for nodes in range(13)) * (1 - 1e-6)


def _verified(*accepted: int) -> Verified:
    count = torch.tensor(accepted, dtype=torch.int32)
    wide = torch.zeros(len(accepted), 9, dtype=torch.int32)
    return Verified(wide, count, wide, wide.float(), torch.zeros_like(count))


def _pacing(clock: Clock, batch: int) -> "Timed":
    pacing = Timed(clock, RoundCosts(COST), 4, 8)
    for slot in range(batch):
        pacing.add(slot)
    return pacing


class Timed(CostAwarePacing):
    """Runs rounds on a clock: each sequence's draft takes ``draft``, and a pass what COST says."""

    draft = 1.0

    def __init__(self, clock: Clock, costs: RoundCosts, slots: int, max_depth: int):
        super().__init__(costs, slots, max_depth)
        self.clock = clock

    def rounds(self, count: int, *accepted: int) -> str:
        """Which of the next rounds draft ("d") if every draft gives so much; they verify 8 nodes a sequence."""
        drawn, batch = "", len(accepted)
        tree = ops.build_tree(torch.zeros(batch, 8, 3), torch.zeros(batch, dtype=torch.int32), budget=8)
        for _ in range(count):
            drafts = self.drafts(forced=False)
            drawn += "d" if drafts else "-"
            if drafts:
                self.clock.now += batch * self.draft
                self.nodes(tree)
            rows = batch * (9 if drafts else 1)
            self.clock.now += float(COST.undrafted(np.array([rows]))[0])
            self.learn(_verified(*(accepted if drafts else [0] * batch)), 8)
        return drawn


def test_drafts_that_do_not_pay_become_rare_and_come_back(clock: Clock) -> None:
    pacing = _pacing(clock, 1)  # 9 rows cost 5 + 1; a round without a draft 2: a draft pays from 3 tokens on
    drawn = pacing.rounds(60, 0)
    assert drawn.startswith("dd")  # a new request is given the benefit of the doubt
    pauses = [len(part) for part in drawn.rstrip("-").split("d") if part]
    assert pauses == [1, 2, 4, *[8] * (len(pauses) - 3)]
    assert len(pauses) > 5
    pacing.rounds(9, 8)  # up to the end of the pause, and a good draft
    assert set(pacing.rounds(30, 8)[-20:]) == {"d"}


def test_drafts_that_pay_are_never_left_out(clock: Clock) -> None:
    assert set(_pacing(clock, 1).rounds(50, 3)) == {"d"}


def test_a_full_drafter_is_fed_whatever_it_gave(clock: Clock) -> None:
    pacing = _pacing(clock, 1)
    pacing.rounds(20, 0)
    assert pacing.drafts(forced=True)


def test_a_new_request_ends_the_pause_and_a_record_moves_with_its_slot(clock: Clock) -> None:
    pacing = _pacing(clock, 1)
    assert "-" in pacing.rounds(20, 0)
    pacing.add(1)
    pacing.draft = 0.5
    assert pacing.rounds(4, 0, 8) == "---d"  # first some rounds to see what two cost without a draft
    # 18 rows and two drafts cost 10.5, two rows 2.25: what slot 1 gets, 9 tokens, is worth it for both.
    assert set(pacing.rounds(60, 0, 8)[-20:]) == {"d"}
    pacing.remove(0, 1)
    assert set(pacing.rounds(10, 8)) == {"d"}


def test_new_requests_hope_for_what_drafts_gave_of_late(clock: Clock) -> None:
    pacing = _pacing(clock, 1)
    assert pacing.rounds(4, 0) == "dd-d"
    pacing.rounds(1000, 0)
    pacing.remove(0, 0)
    pacing.add(0)
    assert pacing.rounds(4, 0) == "d-d-"  # one draft to see whether this one is another kind of text
    pacing.remove(0, 0)
    pacing.add(0)
    assert set(pacing.rounds(40, 8)[8:]) == {"d"}  # it is


@pytest.mark.parametrize("batch", [2, 3, 4])
def test_a_batch_drafts_only_if_its_own_drafts_pay(clock: Clock, batch: int) -> None:
    """What was measured with one sequence says too little: here drafts of a batch take ten times what they should."""
    pacing = _pacing(clock, batch)
    pacing.draft = 10.0
    undrafted = float(COST.undrafted(np.array([batch]))[0])
    drafted = 10 * batch + float(COST.undrafted(np.array([9 * batch]))[0])
    assert 9 * batch / drafted < batch / undrafted  # eight accepted tokens each do not pay
    late = pacing.rounds(100, *[8] * batch)[-45:]
    assert late.count("d") == 5  # pauses of eight
    always = _pacing(clock, batch).rounds(300, *[8] * batch)
    assert always.startswith("---d")
    assert 3 <= always[100:].count("-") <= 4  # a look now and then at what it takes without


def test_rounds_are_learned_from_those_that_run(clock: Clock) -> None:
    costs = RoundCosts(COST)
    guess = costs.draft(3), float(costs.drafted(3, 8)[-1]), costs.undrafted(3)
    assert guess == (3.0, *(float(COST.undrafted(np.array([rows]))[0]) for rows in (27, 3)))
    assert costs.needs_undrafted(3)
    for _ in range(3):
        costs.learn_drafted(3, 8, 7.0, 20.0)
        costs.learn_undrafted(3, 4.0)
    learned = costs.draft(3), float(costs.drafted(3, 8)[-1]), costs.undrafted(3)
    np.testing.assert_allclose(learned, (7.0, 20.0, 4.0))
    assert not costs.needs_undrafted(3)
    assert costs.draft(4) == pytest.approx(7.0 * 4 / 3)  # the nearest size is the best guess
    for seconds in (400.0, 400.0):  # a hiccup of the machine
        costs.learn_undrafted(3, seconds)
    assert costs.undrafted(3) < 4.2
    for _ in range(100):  # no hiccup: texts have become longer, say
        costs.learn_undrafted(3, 8.0)
    assert costs.undrafted(3) == pytest.approx(8.0)
    for _ in range(100):
        costs.learn_drafted(1, 8, 7.0, 20.0)
        costs.learn_undrafted(1, 4.0)
    assert (costs.draft(1), costs.undrafted(1)) == (1.0, 2.0)  # one sequence was measured
    assert not costs.needs_undrafted(1)


def test_rounds_are_timed_and_leave_no_trace(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    tiny_llm.adaptive = False
    before = tiny_llm.generate(PROMPTS[0], params).outputs[0].token_ids
    measured: list[RoundSeconds] = []
    monkeypatch.setattr(scheduler_module, "RoundCosts", lambda seconds: measured.append(seconds) or RoundCosts(seconds))
    tiny_llm.adaptive = True
    for tiny_llm.budget in (20, 1):
        assert tiny_llm.generate(PROMPTS[0], params).outputs[0].token_ids == before
    cost, smallest = measured
    assert list(cost.rows) == [1, 8, 21]
    assert cost.draft > 0
    assert all(0 < a <= b for a, b in zip(cost.seconds, cost.seconds[1:], strict=False))
    assert list(smallest.rows) == [1, 2]


def test_rounds_are_timed_once_a_budget_and_only_where_trees_are_drafted(tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    for tiny_llm.method, tiny_llm.budget, tiny_llm.adaptive, timed in [
        ("ar", 16, True, 0),
        ("chain", 16, True, 0),
        ("ddtree", 16, False, 0),
        ("ddtree", 0, True, 0),
        ("ddtree", 16, True, 1),
        ("ddtree", 9, True, 2),
        ("ddtree", 16, True, 2),
    ]:
        tiny_llm.generate(PROMPTS[0], params)
        assert len(tiny_llm._scheduler._pacings) == timed
