"""Requests come, go and end at any time: each text is the one that the request gives alone with plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ddtree.runtime import LLM, CompletionOutput, GenerationResult, SamplingParams
from ddtree.runtime import prefill as prefill_module
from ddtree.runtime.pacing import CostAwarePacing, RoundCosts, RoundSeconds
from ddtree.runtime.scheduler import Drafting, Scheduler

SLOTS = 3
RUNS = 300
# Few enough that each has been written alone by plain decoding after a while.
PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 9, 12, 3, 3, 8], [5, 6], list(range(20)) * 2, [2] * 17]
SETTINGS = [
    SamplingParams(max_tokens=40, seed=0),
    SamplingParams(max_tokens=1, seed=0),
    SamplingParams(max_tokens=13, seed=0, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=2**63 + 5, top_k=9, top_p=0.9, min_p=0.02, logprobs=1),
    SamplingParams(max_tokens=25, temperature=1.3, seed=7, n=3),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3, stop="w3 w", ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=1.0, seed=4, repetition_penalty=1.4, presence_penalty=0.5),
    SamplingParams(max_tokens=30, seed=0, bad_token_ids=[0, 1, 2], min_tokens=8, stop_token_ids=list(range(12))),
    SamplingParams(max_tokens=30, seed=0, timeout=0.0),
]
DRAFTINGS = [Drafting("ddtree", 16, True), Drafting("ddtree", 5, False), Drafting("chain", 0, False)]
COSTS = RoundSeconds(1e-3, [1, 17], [2e-3, 4e-3])


class Serving(RuleBasedStateMachine):
    """A scheduler whose time runs in steps."""

    llm: LLM
    reference: LLM
    alone: dict[tuple[int, int], list[CompletionOutput]]

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(self.llm.engine, SLOTS)
        depth = self.llm.manifest.draft.max_depth
        # Nothing is timed before the first round of this test.
        self.scheduler._pacings = {16: CostAwarePacing(RoundCosts(COSTS), SLOTS, depth)}
        self.asked: dict[GenerationResult, tuple[int, int]] = {}
        self.aborted: set[GenerationResult] = set()
        self.chunk = prefill_module.PREFILL_CHUNK

    @initialize(chunk=st.sampled_from([1, 4, 256]), drafting=st.sampled_from(DRAFTINGS))
    def begin(self, chunk: int, drafting: Drafting) -> None:
        prefill_module.PREFILL_CHUNK = chunk
        self.drafting = drafting

    @rule(
        prompt=st.integers(0, len(PROMPTS) - 1),
        setting=st.integers(0, len(SETTINGS) - 1),
        other=st.sampled_from([None, None, None, None, None, *DRAFTINGS, Drafting("ar", 0, False)]),
    )
    def arrive(self, prompt: int, setting: int, other: Drafting | None) -> None:
        result = self.llm._result(None, PROMPTS[prompt], SETTINGS[setting], streaming=False)
        self.scheduler.add(result, other or self.drafting)
        self.asked[result] = prompt, setting

    @rule(count=st.integers(1, 10))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        result = data.draw(st.sampled_from(self.running()))
        self.scheduler.abort(result)
        self.aborted.add(result)
        assert result.finished

    @invariant()
    def what_has_finished_is_right(self) -> None:
        for result in [result for result in self.asked if result.finished]:
            prompt, setting = self.asked.pop(result)
            for written, alone in zip(result.outputs, self.written_alone(prompt, setting), strict=True):
                if written.finish_reason in ("cancelled", "timeout"):
                    assert result in self.aborted or SETTINGS[setting].timeout is not None
                    assert written.text == self.llm.tokenizer.decode(written.token_ids)
                else:
                    assert written.text == alone.text
                    assert (written.finish_reason, written.stop_reason) == (alone.finish_reason, alone.stop_reason)
                    assert len(written.token_ids) == len(alone.token_ids)
                check_tokens(written, alone)

    @invariant()
    def all_is_accounted_for(self) -> None:
        sequences = [sequence for result in self.asked for sequence in result.sequences]
        assert self.scheduler.unfinished == sum(not sequence.finished for sequence in sequences)
        assert len(self.scheduler._batch) + (self.scheduler._prefill is not None) <= SLOTS

    def teardown(self) -> None:
        try:
            for _ in range(3000):
                if not self.scheduler.unfinished:
                    break
                self.scheduler.step()
            self.what_has_finished_is_right()
            assert not self.asked
        finally:
            prefill_module.PREFILL_CHUNK = self.chunk

    def running(self) -> list[GenerationResult]:
        return [result for result in self.asked if not result.finished]

    def written_alone(self, prompt: int, setting: int) -> list[CompletionOutput]:
        if (prompt, setting) not in self.alone:
            params = replace(SETTINGS[setting], timeout=None)
            result = self.llm._result(None, PROMPTS[prompt], params, streaming=False)
            scheduler = Scheduler(self.reference.engine, 1)
            scheduler.add(result, Drafting("ar", 0, False))
            while not result.finished:
                scheduler.step()
            self.alone[prompt, setting] = result.outputs
        return self.alone[prompt, setting]


def check_tokens(written: CompletionOutput, alone: CompletionOutput) -> None:
    """What was written is the beginning of what is written alone."""
    count = len(written.token_ids)
    assert written.token_ids == alone.token_ids[:count]
    assert written.seed == alone.seed
    if alone.logprobs is None:
        assert written.logprobs is None
    else:
        assert written.logprobs == pytest.approx(alone.logprobs[:count], abs=1e-4)


@pytest.fixture(scope="module")
def machine(tiny_engine: Path) -> Iterator[type[Serving]]:
    with LLM(tiny_engine, threads=1) as llm, LLM(tiny_engine, threads=1) as reference:

        class WithEngines(Serving):
            pass

        WithEngines.llm, WithEngines.reference, WithEngines.alone = llm, reference, {}
        yield WithEngines


def test_a_text_does_not_depend_on_who_comes_and_goes(machine: type[Serving]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=RUNS, stateful_step_count=15, deadline=None))
    assert len(machine.alone) > len(PROMPTS) * len(SETTINGS) // 2  # most of them were asked for
