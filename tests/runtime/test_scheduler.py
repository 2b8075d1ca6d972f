"""Continuous batching, step by step: who gets a slot when, and what becomes of the others when one fails."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from ddtree.builder import build_engine
from ddtree.runtime import LLM, EngineError, GenerationResult, GuidedDecodingParams, SamplingParams
from ddtree.runtime import scheduler as scheduler_module
from ddtree.runtime.scheduler import Drafting, Scheduler

TREE = Drafting("ddtree", 16, False)
PLAIN = Drafting("ar", 0, False)
PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 9, 12, 3, 3, 8], [5, 6], list(range(20)) * 2, [2] * 17]


class Bench:
    """A scheduler, and the requests that it was given."""

    def __init__(self, llm: LLM, slots: int):
        self.llm, self.scheduler = llm, Scheduler(llm.engine, slots)
        self.results: list[GenerationResult] = []

    def submit(self, prompt: list[int], drafting: Drafting = TREE, **settings) -> GenerationResult:
        params = SamplingParams(**{"max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True} | settings)
        result = self.llm._result(None, prompt, params, streaming=False)
        self.scheduler.add(result, drafting)
        self.results.append(result)
        return result

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.unfinished:
                return
            self.scheduler.step()
        raise AssertionError("requests that never end")

    def running(self) -> list[GenerationResult]:
        """In the order of their slots; the one whose prompt is being read is the last."""
        reading = [self.scheduler._prefill.request] if self.scheduler._prefill else []
        by_request = {sequence: result for result in self.results for sequence in result.sequences}
        return [by_request[request] for request in [*self.scheduler._batch.requests, *reading]]


@pytest.fixture
def bench(tiny_llm: LLM) -> Callable[[int], Bench]:
    return lambda slots: Bench(tiny_llm, slots)


@pytest.fixture
def alone(tiny_engine: Path) -> Iterator[Callable[[GenerationResult], list[int]]]:
    """What a request writes alone, by plain decoding."""
    with LLM(tiny_engine, method="ar", threads=1) as llm:
        yield lambda result: llm.generate(result.prompt_token_ids, result.sequences[0].params).outputs[0].token_ids


def tokens(result: GenerationResult) -> list[int]:
    return result.outputs[0].token_ids


def test_first_come_first_served(bench: Callable[[int], Bench]) -> None:
    """Whatever their lengths, and where one wants another way of drafting, which the batch has to end for."""
    of = bench(3)
    for i in range(12):
        of.submit(PROMPTS[i % 6], PLAIN if i == 6 else TREE, max_tokens=3 + 11 * (i % 4))
    of.run()
    began = [result.sequences[0].statistics.first_scheduled_time for result in of.results]
    assert began == sorted(began)
    ended = [result.sequences[0].statistics.last_token_time for result in of.results]
    assert max(ended[:6]) < began[6]
    assert ended[6] < began[7]
    assert ended != sorted(ended)


def test_a_slot_that_becomes_free_is_taken_in_the_next_step(bench: Callable[[int], Bench]) -> None:
    of = bench(2)
    long = of.submit(PROMPTS[0], max_tokens=60)
    short = of.submit(PROMPTS[1], max_tokens=9)
    waiting = of.submit(PROMPTS[2])
    while not short.finished:
        of.scheduler.step()
        assert waiting not in of.running()
    of.scheduler.step()
    assert of.running() == [long, waiting]


def events(of: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What passes run: "p" a chunk of a prompt, and of a round the number of its sequences."""
    seen: list[str] = []
    prompt = of.llm.engine.prompt

    def spy(slot: int, inputs):
        seen.append("p")
        assert slot == len(of.scheduler._batch)
        return prompt(slot, inputs)

    monkeypatch.setattr(of.llm.engine, "prompt", spy)
    of.scheduler.on_round = lambda tree, verified: seen.append(str(len(verified.status)))
    return seen


def test_a_long_prompt_delays_the_others_by_one_chunk_a_round(
    bench: Callable[[int], Bench], alone: Callable[[GenerationResult], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    of = bench(3)
    others = [of.submit(PROMPTS[0], max_tokens=60), of.submit(PROMPTS[3], max_tokens=60)]
    of.scheduler.step()
    of.scheduler.step()
    long = of.submit([i % 22 for i in range(100)])
    seen = events(of, monkeypatch)
    while not long.sequences[0].output_ids:
        of.scheduler.step()
    assert "".join(seen[:-1]) == "p2" * 12 + "p"  # a round of both between any two chunks
    assert seen[-1] == "3"
    of.run()
    for result in [*others, long]:
        assert tokens(result) == alone(result)


def test_a_prompt_that_others_do_not_wait_for_is_read_at_once(
    bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    of = bench(3)
    of.submit([i % 22 for i in range(60)], max_tokens=2)
    seen = events(of, monkeypatch)
    of.run()
    assert "".join(seen) == "p" * 8 + "1"


def test_a_sequence_leaves_while_a_prompt_is_being_read(
    bench: Callable[[int], Bench], alone: Callable[[GenerationResult], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's slot is the one behind the batch, so it moves up with the last sequence."""
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 4)
    for leaving in range(3):
        of = bench(4)
        others = [of.submit(PROMPTS[i], max_tokens=30) for i in range(3)]
        while len(of.scheduler._batch) < 3:
            of.scheduler.step()
        long = of.submit([i % 22 for i in range(40)])
        for _ in range(4):
            of.scheduler.step()
        of.scheduler.abort(others[leaving])
        assert len(of.running()) == 3
        of.run()
        for result in {*others, long} - {others[leaving]}:
            assert tokens(result) == alone(result)


def test_an_aborted_request_has_what_it_wrote_and_no_slot(
    bench: Callable[[int], Bench], alone: Callable[[GenerationResult], list[int]]
) -> None:
    of = bench(1)
    running, next_one, waiting = (of.submit(prompt, max_tokens=50) for prompt in PROMPTS[:3])
    for _ in range(6):
        of.scheduler.step()
    written = list(running.sequences[0].output_ids)
    of.scheduler.abort(waiting)
    of.scheduler.abort(running)
    assert of.running() == []
    of.scheduler.step()
    assert of.running() == [next_one]
    of.run()
    assert [result.outputs[0].finish_reason for result in of.results] == ["cancelled", "length", "cancelled"]
    assert tokens(running) == written == alone(running)[: len(written)]
    assert 0 < len(written) < 50
    assert tokens(waiting) == []
    assert tokens(next_one) == alone(next_one)
    of.scheduler.abort(running)  # nothing to end any more
    assert running.outputs[0].finish_reason == "cancelled"


def test_a_request_ends_when_its_time_is_over_waiting_or_running(
    bench: Callable[[int], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr("ddtree.runtime.scheduler.time.monotonic", lambda: now)
    of = bench(1)
    running = of.submit(PROMPTS[0], max_tokens=400, timeout=10.0)
    waiting = of.submit(PROMPTS[1], timeout=5)
    patient = of.submit(PROMPTS[2])
    for _ in range(5):
        of.scheduler.step()
    assert not any(result.finished for result in of.results)
    now += 7
    of.scheduler.step()
    assert [result.finished for result in of.results] == [False, True, False]
    now += 7
    of.scheduler.step()
    assert [result.finished for result in of.results] == [True, True, False]
    assert of.running() == [patient]
    of.run()
    assert [result.outputs[0].finish_reason for result in of.results] == ["timeout", "timeout", "length"]
    assert len(tokens(running)) > 4
    assert tokens(waiting) == []


def test_n_texts_are_those_of_their_seeds(
    bench: Callable[[int], Bench], alone: Callable[[GenerationResult], list[int]]
) -> None:
    of = bench(2)
    several = of.submit(PROMPTS[0], n=5, seed=2**64 - 3)
    of.run()
    seeds = [(2**64 - 3) ^ (i * 0x9E3779B97F4A7C15 % 2**64) for i in range(5)]
    assert [output.seed for output in several.outputs] == seeds
    assert [output.index for output in several.outputs] == list(range(5))
    for output in several.outputs:
        one = of.submit(PROMPTS[0], seed=output.seed)
        assert output.token_ids == alone(one)
    assert len({tuple(output.token_ids) for output in several.outputs}) > 1
    rounds = [sequence.statistics.rounds for sequence in several.sequences]
    assert several.result().statistics.rounds == sum(rounds)


class Failing:
    """Makes one of the engine's calls fail."""

    def __init__(self, of: Bench, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, *, after: int = 0):
        self.calls, call = 0, getattr(of.llm.engine, method)

        def failing(*arguments, **settings):
            self.calls += 1
            if self.calls == after + 1:
                raise error
            return call(*arguments, **settings)

        monkeypatch.setattr(of.llm.engine, method, failing)


def errors(of: Bench) -> list[str | None]:
    return [result.error for result in of.results]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (EngineError("the pass failed"), "the pass failed"),
        (RuntimeError("not enough memory:\n  8 GB"), "RuntimeError: not enough memory: 8 GB"),
    ],
)
@pytest.mark.parametrize("stage", ["draft", "verify"])
def test_a_round_that_fails_ends_its_sequences_and_no_others(
    bench: Callable[[int], Bench], alone, monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception, message: str
) -> None:
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    of = bench(3)
    of.submit(PROMPTS[0], max_tokens=60)
    of.submit(PROMPTS[1], max_tokens=60)
    of.submit(PROMPTS[4])  # 40 tokens: being read when the others fail
    of.submit(PROMPTS[2])
    for _ in range(4):
        of.scheduler.step()
    assert len(of.running()) == 3
    written = [list(result.sequences[0].output_ids) for result in of.results[:2]]
    Failing(of, monkeypatch, stage, error)
    of.scheduler.step()
    assert errors(of) == [message, message, None, None]
    assert [result.finished for result in of.results] == [True, True, False, False]
    assert [tokens(result) for result in of.results[:2]] == written  # what it had is not lost
    of.run()
    for result in of.results[2:]:
        assert result.error is None
        assert tokens(result) == alone(result)


def test_a_prompt_that_fails_harms_no_other(bench: Callable[[int], Bench], alone, monkeypatch) -> None:
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    of = bench(3)
    for prompt in (PROMPTS[0], PROMPTS[4], PROMPTS[2]):
        of.submit(prompt, max_tokens=40)
    Failing(of, monkeypatch, "prompt", EngineError("the pass failed"), after=3)
    of.run()
    assert errors(of) == [None, "the pass failed", None]
    assert tokens(of.results[0]) == alone(of.results[0])
    assert tokens(of.results[2]) == alone(of.results[2])


@pytest.mark.parametrize("method", ["reset", "reserve_slots"])
def test_an_engine_without_room_fails_the_request_that_asked_for_it(
    bench: Callable[[int], Bench], alone, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    of = bench(3)
    of.submit(PROMPTS[0])
    of.submit(PROMPTS[1])
    Failing(of, monkeypatch, method, RuntimeError("no memory"))
    of.run()
    assert errors(of) == ["RuntimeError: no memory", None]
    assert tokens(of.results[1]) == alone(of.results[1])


def test_an_engine_that_cannot_free_a_slot_loses_the_batch_and_goes_on(
    bench: Callable[[int], Bench], alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    of = bench(3)
    of.submit(PROMPTS[0], max_tokens=5)
    of.submit(PROMPTS[1], max_tokens=60)
    of.submit(list(range(20)) * 10)  # being read
    of.submit(PROMPTS[2])
    Failing(of, monkeypatch, "release", EngineError("the device is gone"))
    of.run()
    assert errors(of) == [None, "the device is gone", "the device is gone", None]
    for result in (of.results[0], of.results[3]):
        assert tokens(result) == alone(result)


def test_a_callback_that_fails_is_an_error_of_the_round(bench: Callable[[int], Bench], alone) -> None:
    of = bench(2)
    of.submit(PROMPTS[0])
    of.scheduler.on_round = lambda tree, verified: 1 / 0
    of.run()
    assert errors(of) == ["ZeroDivisionError: division by zero"]
    of.scheduler.on_round = None
    of.submit(PROMPTS[1])
    of.run()
    assert tokens(of.results[1]) == alone(of.results[1])


def test_caches_have_room_for_those_who_are_there(bench: Callable[[int], Bench]) -> None:
    """One request does not pay for as many slots as the engine may have."""
    of = bench(4)
    slots = lambda: of.llm.engine.target_caches(99)[0][0].shape[-4]  # noqa: E731
    of.submit(PROMPTS[0], max_tokens=30)
    of.scheduler.step()
    assert slots() == 1
    of.submit(PROMPTS[1], max_tokens=30)
    of.submit(PROMPTS[2], max_tokens=30)
    of.scheduler.step()
    assert slots() == 2
    of.run()
    of.submit(PROMPTS[0])
    of.scheduler.step()
    assert slots() == 1


def test_caches_shrink_when_the_longest_text_has_left(bench: Callable[[int], Bench], alone) -> None:
    """A server is never idle, so its caches are never begun anew."""
    of = bench(2)
    steady = of.submit(PROMPTS[0], max_tokens=900)
    of.submit([i % 22 for i in range(1000)], max_tokens=2)
    while not of.results[1].finished:
        of.scheduler.step()
    engine = of.llm.engine
    assert engine.target_cache_length < 200
    assert engine.draft_cache_length < 200
    of.scheduler.abort(steady)
    written = steady.outputs[0].token_ids
    again = of.submit(PROMPTS[0], max_tokens=len(written))
    assert tokens(steady) == alone(again)


@pytest.mark.parametrize("end", ["fails", "aborted"])
def test_a_prompt_with_nan_leaves_no_trace_in_the_slots_that_it_had(
    poisoned_engine: Path, alone, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """It moves while it is being read, and only its last chunk shows that it holds NaN."""
    monkeypatch.setattr("ddtree.runtime.prefill.PREFILL_CHUNK", 8)
    with LLM(poisoned_engine, threads=1) as llm:
        of = Bench(llm, 4)
        of.submit([1, 2, 3], max_tokens=40)
        mate = of.submit([4], max_tokens=40)
        while len(of.scheduler._batch) < 2:
            of.scheduler.step()
        poisoned = of.submit([3] * 100)  # position 60 has NaN
        for _ in range(9):
            of.scheduler.step()
        of.scheduler.abort(mate)
        if end == "aborted":
            of.scheduler.abort(poisoned)
        while not poisoned.finished:
            of.scheduler.step()
        assert (poisoned.error is not None) == (end == "fails")
        healthy = [of.submit(PROMPTS[i], max_tokens=12) for i in range(3)]
        of.run()
        for result in [of.results[0], *healthy]:
            assert result.error is None
            assert tokens(result) == alone(result)


def test_all_work_on_an_engines_tensors_is_given_to_its_stream(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing else would order it."""
    engine, inside, outside = tiny_llm.engine, [], []

    @contextmanager
    def stream() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def watched(name: str, call: Callable) -> Callable:
        def watch(*arguments, **settings):
            seen.add(name)
            if not inside:
                outside.append(name)
            return call(*arguments, **settings)

        return watch

    seen: set[str] = set()
    calls = ("reset", "reserve_slots", "prompt", "draft", "verify", "release", "trim")
    monkeypatch.setattr(engine, "stream", stream)
    monkeypatch.setattr(scheduler_module, "Batch", watched("Batch", scheduler_module.Batch))
    for name in calls:
        monkeypatch.setattr(engine, name, watched(name, getattr(engine, name)))
    of = Bench(tiny_llm, 2)
    of.submit(PROMPTS[0], max_tokens=9)
    aborted = of.submit(PROMPTS[1], max_tokens=90)
    while not of.results[0].finished:
        of.scheduler.step()
    of.scheduler.abort(aborted)
    assert seen == {"Batch", *calls}
    assert outside == []


@pytest.fixture(scope="module")
def spelling_engine(write_target, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, its tokens the letters from a to v, an end token and a mask."""
    root = tmp_path_factory.mktemp("spelling")
    target = write_target(root / "target")
    tokenizer = Tokenizer(models.BPE({chr(ord("a") + at): at for at in range(22)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|end|>", "<|mask|>")])
    tokenizer.save(str(target / "tokenizer.json"))
    build_engine(target, tiny_pair[1], root / "engine")
    return root / "engine"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_before_a_dead_end_is_the_same_for_all_methods(spelling_engine: Path, temperature: float) -> None:
    """The grammar wants the end token after some letters, and the bias forbids it."""
    with LLM(spelling_engine, adaptive=False, threads=1) as llm:
        for letters in range(1, 9):
            params = SamplingParams(
                max_tokens=20,
                temperature=temperature,
                seed=letters,
                guided_decoding=GuidedDecodingParams(regex=f"[a-v]{{{letters}}}"),
                logit_bias={22: -math.inf},
            )
            ended = []
            for llm.method, llm.budget in (("ar", 0), ("chain", 0), ("ddtree", 7), ("ddtree", 64)):
                output = llm.generate([1, 2, 3], params)
                (completion,) = output.outputs
                ended.append((completion.token_ids, completion.text, completion.finish_reason, output.error))
            assert ended == [ended[0]] * 4
            assert (len(ended[0][0]), ended[0][2]) == (letters, "error")
            assert ended[0][3] == (
                f"no token is left after mask and filters in the round from position {3 + letters} on (loosen them)"
            )
