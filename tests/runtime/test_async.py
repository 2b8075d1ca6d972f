"""Requests from many threads and event loops at once: results, streams, the queue's limit, and the thread's end."""

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddtree.runtime import LLM, QueueFullError, RequestError, RequestOutput, SamplingParams

PROMPTS = [[1, 2, 3], [4], [7, 7, 1, 0, 9, 12, 3, 3, 8], [5, 6], list(range(20)) * 2, [2] * 17]
PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, temperature=1.0, seed=5, ignore_eos=True)


def tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def alone(tiny_engine: Path) -> list[list[int]]:
    """What each prompt gives alone, by plain decoding."""
    with LLM(tiny_engine, method="ar", threads=1) as llm:
        return [tokens(llm.generate(prompt, PARAMS)) for prompt in PROMPTS]


class Gate:
    """Holds the rounds of an LLM up."""

    def __init__(self, llm: LLM):
        self.llm, self.open, self.reached = llm, threading.Event(), threading.Event()
        llm.on_round = lambda *_: self._pass()

    def _pass(self) -> None:
        self.reached.set()
        assert self.open.wait(60)


@pytest.fixture
def gate(tiny_llm: LLM) -> Iterator[Gate]:
    gate = Gate(tiny_llm)
    yield gate
    gate.open.set()


def test_a_result_can_be_waited_for_awaited_and_iterated_over(tiny_llm: LLM, alone: list[list[int]]) -> None:
    assert tokens(tiny_llm.generate_async(PROMPTS[0], PARAMS).result(60)) == alone[0]
    assert [tokens(output) for output in tiny_llm.generate_async(PROMPTS[1], PARAMS)] == [alone[1]]

    async def use() -> None:
        result = tiny_llm.generate_async(PROMPTS[2], PARAMS)
        assert tokens(await result) == alone[2]
        assert tokens(await result.aresult()) == alone[2]  # as often as one likes
        assert (result.finished, result.error) == (True, None)
        assert result.outputs[0].token_ids == alone[2]
        assert [tokens(output) async for output in result] == [alone[2]]
        assert [output async for output in result] == []  # each output is handed out once
        outputs = [output async for output in tiny_llm.generate_async(PROMPTS[3], PARAMS, streaming=True)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert len(outputs) == outputs[-1].statistics.rounds + 1
        for earlier, later in itertools.pairwise(outputs):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)
            assert tokens(later)[: len(tokens(earlier))] == tokens(earlier)
        assert tokens(outputs[-1]) == alone[3]

    asyncio.run(use())


def test_a_result_says_what_was_asked(tiny_llm: LLM) -> None:
    result = tiny_llm.generate_async("w1 w2 w3", PARAMS, streaming=True)
    assert (result.prompt, result.prompt_token_ids, result.streaming) == ("w1 w2 w3", [1, 2, 3], True)
    other = tiny_llm.generate_async([4], PARAMS)
    assert (other.prompt, other.prompt_token_ids) == (None, [4])
    assert other.request_id != result.request_id
    assert other.result().request_id == other.request_id


def test_streams_interleave(tiny_llm: LLM, alone: list[list[int]], gate: Gate) -> None:
    gate.open.set()

    async def use() -> None:
        order: list[int] = []

        async def read(i: int) -> None:
            result = tiny_llm.generate_async(PROMPTS[i], PARAMS, streaming=True)
            async for _ in result:
                order.append(i)
            assert tokens(await result) == alone[i]

        await asyncio.gather(*(read(i) for i in range(4)))
        assert len(list(itertools.groupby(order))) > 8

    asyncio.run(use())


def test_slow_readers_lose_nothing(tiny_llm: LLM, alone: list[list[int]]) -> None:
    result = tiny_llm.generate_async(PROMPTS[0], PARAMS, streaming=True)
    rounds = result.result().statistics.rounds
    outputs = list(result)
    assert len(outputs) == rounds + 1
    assert tokens(outputs[-1]) == alone[0]


def test_an_abort_ends_the_request_and_frees_its_slot(tiny_engine: Path, alone: list[list[int]]) -> None:
    with LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=1) as llm:
        endless = llm.generate_async(PROMPTS[0], LONG, streaming=True)
        waiting = llm.generate_async(PROMPTS[1], PARAMS)
        next(endless)
        endless.abort()
        *_, last = endless
        assert (last.finished, last.outputs[0].finish_reason) == (True, "cancelled")
        assert 0 < len(tokens(last)) < 1500
        assert tokens(last)[:30] == alone[0][: len(tokens(last))]
        assert tokens(waiting.result(60)) == alone[1]
        endless.abort()  # once more does nothing
        assert endless.result() == last


def test_a_cancelled_task_leaves_the_request_to_others(tiny_llm: LLM, alone: list[list[int]]) -> None:
    async def use() -> None:
        result = tiny_llm.generate_async(PROMPTS[0], PARAMS, streaming=True)

        async def read() -> None:
            async for _ in result:
                pass

        for lost in (asyncio.create_task(result.aresult()), asyncio.create_task(read())):
            await asyncio.sleep(0)
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
        assert tokens(await result) == alone[0]

    asyncio.run(use())


def test_waiting_for_a_result_can_end_before_it(tiny_llm: LLM, gate: Gate, alone: list[list[int]]) -> None:
    result = tiny_llm.generate_async(PROMPTS[0], PARAMS)
    with pytest.raises(TimeoutError):
        result.result(timeout=0.05)

    async def wait() -> None:
        await asyncio.wait_for(result.aresult(), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    gate.open.set()
    assert tokens(result.result(60)) == alone[0]


def test_many_threads_and_loops_at_once(tiny_llm: LLM, alone: list[list[int]]) -> None:
    """Four slots, twelve threads, four ways to ask."""

    def ask(i: int) -> list[int]:
        prompt = PROMPTS[i % 6]
        if i % 4 == 0:
            return tokens(tiny_llm.generate(prompt, PARAMS))
        if i % 4 == 1:
            return tokens(tiny_llm.generate([PROMPTS[0], prompt], PARAMS)[1])
        if i % 4 == 2:
            *_, last = tiny_llm.stream(prompt, PARAMS)
            return tokens(last)

        async def wait() -> RequestOutput:
            doomed = tiny_llm.generate_async(PROMPTS[0], LONG)
            output = await tiny_llm.generate_async(prompt, PARAMS)
            doomed.abort()
            assert (await doomed).outputs[0].finish_reason == "cancelled"
            return output

        return tokens(asyncio.run(wait()))

    with ThreadPoolExecutor(12) as pool:
        written = list(pool.map(ask, range(48)))
    assert written == [alone[i % 6] for i in range(48)]
    assert tiny_llm._scheduler.unfinished == 0


def test_a_full_queue_refuses_and_loses_nothing(tiny_engine: Path, alone: list[list[int]]) -> None:
    with LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=2, max_queue_size=3) as llm:
        gate = Gate(llm)
        taken = [llm.generate_async(PROMPTS[i], PARAMS) for i in range(5)]
        for refused in (llm.generate_async, llm.stream):
            with pytest.raises(QueueFullError) as refusal:
                refused(PROMPTS[5], PARAMS)
            assert str(refusal.value) == (
                "the queue is full: 3 of max_queue_size 3 wait "
                "(try again later, or open the LLM with a larger max_queue_size)"
            )
        with pytest.raises(RequestError) as refusal:
            llm.generate(PROMPTS[5], SamplingParams(n=6, temperature=1.0))
        assert str(refusal.value) == (
            "n 6 is more than batch and queue hold together "
            "(use at most 5, or open the LLM with a larger max_queue_size)"
        )
        gate.open.set()
        assert [tokens(result.result(60)) for result in taken] == alone[:5]
        assert tokens(llm.generate_async(PROMPTS[5], PARAMS).result(60)) == alone[5]


def test_a_queue_of_none_serves_as_many_as_have_a_slot(tiny_engine: Path, alone: list[list[int]]) -> None:
    with LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=1, max_queue_size=0) as llm:
        gate = Gate(llm)
        running = llm.generate_async(PROMPTS[0], PARAMS)
        with pytest.raises(QueueFullError, match="0 of max_queue_size 0 wait"):
            llm.generate_async(PROMPTS[1], PARAMS)
        gate.open.set()
        assert tokens(running.result(60)) == alone[0]
        assert [tokens(output) for output in llm.generate(PROMPTS, PARAMS)] == alone


def test_generate_takes_more_prompts_than_the_queue_holds(tiny_engine: Path, alone: list[list[int]]) -> None:
    with LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=2, max_queue_size=2) as llm:
        assert [tokens(output) for output in llm.generate(PROMPTS * 4, PARAMS)] == alone * 4


def test_a_progress_bar_goes_to_standard_error(tiny_llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_llm.generate(PROMPTS, PARAMS)
    assert capsys.readouterr() == ("", "")
    tiny_llm.generate(PROMPTS, PARAMS, use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err


@pytest.fixture
def workers() -> Callable[[], int]:
    """How many threads that serve an LLM the test has running. Threads of libraries and of other tests do not count."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "ddtree worker"}

    before = threads()
    return lambda: len(threads() - before)


def test_shutdown_cancels_what_runs_and_leaves_no_thread(
    tiny_engine: Path, alone: list[list[int]], workers: Callable[[], int]
) -> None:
    llm = LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=1)
    assert workers() == 0  # nothing to do yet
    running, waiting = llm.generate_async(PROMPTS[0], LONG, streaming=True), llm.generate_async(PROMPTS[1], LONG)
    next(running)
    assert workers() == 1
    llm.shutdown()
    assert workers() == 0
    for result in (running, waiting):
        assert result.finished
        assert result.result(0).outputs[0].finish_reason == "cancelled"
    assert tokens(running.result(0))[:30] == alone[0][: len(tokens(running.result(0)))]
    for refused in (llm.generate, llm.generate_async, llm.stream):
        with pytest.raises(RequestError, match=r"^this LLM has been shut down \(open another\)$"):
            refused(PROMPTS[0], PARAMS)
    llm.shutdown()  # once more does nothing


def test_shutdown_can_finish_what_there_is(
    tiny_engine: Path, alone: list[list[int]], workers: Callable[[], int]
) -> None:
    llm = LLM(tiny_engine, adaptive=False, threads=1, max_batch_size=1)
    results = [llm.generate_async(prompt, PARAMS) for prompt in PROMPTS]
    llm.shutdown(drain=True)
    assert [tokens(result.result(0)) for result in results] == alone
    assert workers() == 0


def test_an_llm_that_nobody_holds_ends_its_thread_when_its_requests_have_ended(
    tiny_engine: Path, alone: list[list[int]], workers: Callable[[], int]
) -> None:
    llm = LLM(tiny_engine, adaptive=False, threads=1)
    result, gone = llm.generate_async(PROMPTS[0], PARAMS), weakref.ref(llm)
    del llm
    gc.collect()
    assert tokens(result.result(60)) == alone[0]
    assert gone() is not None
    del result
    wait_until(lambda: gc.collect() >= 0 and gone() is None and workers() == 0)


def test_leaving_the_with_block_by_an_error_ends_the_thread(tiny_engine: Path, workers: Callable[[], int]) -> None:
    llm = LLM(tiny_engine, threads=1)
    results = []

    def fail() -> None:
        with llm:
            results.append(llm.generate_async(PROMPTS[0], LONG))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    (result,) = results
    assert result.outputs[0].finish_reason == "cancelled"
    assert workers() == 0


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("it never did")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process started in the background by a shell ignores SIGINT, and so would these tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_requests_of_a_call(tiny_engine: Path, alone: list[list[int]]) -> None:
    def interrupt(*_: object) -> None:
        if next(rounds) == 5:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with LLM(tiny_engine, threads=1, max_batch_size=2, max_queue_size=0) as llm:
        for prompts in (2, 9):  # waiting for the texts, or for room in the queue
            rounds = itertools.count()
            llm.on_round = interrupt
            with pytest.raises(KeyboardInterrupt):
                llm.generate([PROMPTS[0]] * prompts, LONG)
            wait_until(lambda: llm._scheduler.unfinished == 0)
            assert tokens(llm.generate(PROMPTS[0], PARAMS)) == alone[0]


def test_a_program_may_end_while_requests_run(tiny_engine: Path) -> None:
    program = textwrap.dedent(f"""
        from ddtree.runtime import LLM, SamplingParams
        llm = LLM({str(tiny_engine)!r}, threads=1, adaptive=False)
        stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True))
        print(len(next(stream).outputs[0].token_ids))
    """)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (process.returncode, process.stdout) == (0, "1\n"), process.stderr
    assert "Traceback" not in process.stderr


def test_a_scheduler_that_breaks_down_leaves_nobody_waiting(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(tiny_llm._scheduler, "step", lambda: 1 / 0)
    output = tiny_llm.generate_async(PROMPTS[0], PARAMS).result(60)
    assert (output.outputs[0].finish_reason, output.error) == ("error", "ZeroDivisionError: division by zero")
    with pytest.raises(RequestError, match="ended with ZeroDivisionError: division by zero"):
        tiny_llm.generate(PROMPTS[0], PARAMS)


@pytest.mark.parametrize(
    "wait",
    [
        lambda llm: llm.generate(PROMPTS[2], PARAMS),
        lambda llm: llm.generate_async(PROMPTS[1], PARAMS).result(),
        lambda llm: list(llm.stream(PROMPTS[1], PARAMS)),
        lambda llm: asyncio.run(llm.generate_async(PROMPTS[1], PARAMS).aresult()),
    ],
)
def test_a_callback_may_submit_but_not_wait(tiny_llm: LLM, alone: list[list[int]], wait: Callable) -> None:
    submitted = []

    def ask(*_: object) -> None:
        tiny_llm.on_round = None
        submitted.append(tiny_llm.generate_async(PROMPTS[1], PARAMS))
        wait(tiny_llm)

    tiny_llm.on_round = ask
    output = tiny_llm.generate(PROMPTS[0], PARAMS)
    assert "waiting in on_round for the thread that calls it would never end" in str(output.error)
    assert tokens(submitted[0].result(60)) == alone[1]


def test_an_interrupt_in_a_callback_is_named_to_those_who_ask_later(
    tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("enough")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    tiny_llm.on_round = interrupt
    assert tiny_llm.generate(PROMPTS[0], PARAMS).error == "KeyboardInterrupt: enough"
    with pytest.raises(RequestError, match=r"^this LLM has ended with KeyboardInterrupt: enough \(open another\)$"):
        tiny_llm.generate(PROMPTS[0], PARAMS)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("end", ["close", "del"])
def test_a_stream_that_nobody_reads_ends_its_request(tiny_llm: LLM, begun: bool, end: str) -> None:
    stream = tiny_llm.stream(PROMPTS[0], LONG)
    if begun:
        next(stream)
    if end == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    wait_until(lambda: tiny_llm._scheduler.unfinished == 0)


def test_a_forked_process_is_told_to_open_its_own(tiny_engine: Path) -> None:
    program = textwrap.dedent(f"""
        import os
        from ddtree.runtime import LLM, RequestError
        with LLM({str(tiny_engine)!r}, threads=1, adaptive=False) as llm:
            llm.generate([1, 2, 3])
            if os.fork() == 0:
                try:
                    llm.generate([1, 2, 3])
                except RequestError as error:
                    print(error, flush=True)
                os._exit(0)  # as multiprocessing does: libraries wait at exit for threads that a fork does not have
            else:
                os.wait()
                print(len(llm.generate([1, 2, 3]).outputs[0].token_ids))
    """)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    lines = process.stdout.splitlines()
    assert process.returncode == 0, process.stderr
    assert "and this is a fork of it (open one in each process)" in lines[0]
    assert lines[1:] == ["32"]
