"""What callers get back: the handle of a running request, and what it has written so far."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ddtree.runtime.request import Request

FinishReason = Literal["stop", "length", "timeout", "cancelled", "error"]


@dataclass
class StageSeconds:
    """Time by stage of the rounds that a request was part of, whoever shared them."""

    draft: float = 0.0
    encode: float = 0.0
    verify: float = 0.0
    commit: float = 0.0

    def add(self, other: "StageSeconds") -> None:
        self.draft += other.draft
        self.encode += other.encode
        self.verify += other.verify
        self.commit += other.commit


@dataclass
class Statistics:
    """Counts and times of one request; of a request for ``n`` texts, the sums over them.

    Only tokens that are in the text count as accepted or emitted: what a round wrote behind a stop or beyond max_tokens
    does not. Times of day are in seconds of ``time.monotonic``, 0 where the event has not happened.
    """

    rounds: int = 0
    emitted_tokens: int = 0  # by rounds: all of the text but its first token, which the prompt's pass gives
    draft_tokens: int = 0  # draft nodes verified
    accepted_by_depth: list[int] = field(default_factory=list)  # draft tokens accepted at depth 1, 2, ...
    prefill_seconds: float = 0.0  # of the prompt's own passes
    decode_seconds: float = 0.0  # of the rounds that the request was part of, whoever shared them
    stage_seconds: StageSeconds = field(default_factory=StageSeconds)  # of those rounds; all 0 if the engine has none
    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0

    @property
    def accepted_tokens(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens a round emitted, bonus token included; plain decoding has 1. 0 without a round."""
        return self.emitted_tokens / self.rounds if self.rounds else 0.0

    @classmethod
    def total(cls, parts: Sequence["Statistics"]) -> "Statistics":
        """A new object: sums, and the earliest and latest times of day."""
        total = cls(
            rounds=sum(part.rounds for part in parts),
            emitted_tokens=sum(part.emitted_tokens for part in parts),
            draft_tokens=sum(part.draft_tokens for part in parts),
            accepted_by_depth=[0] * max(len(part.accepted_by_depth) for part in parts),
            prefill_seconds=sum(part.prefill_seconds for part in parts),
            decode_seconds=sum(part.decode_seconds for part in parts),
            arrival_time=parts[0].arrival_time,
            first_scheduled_time=_earliest(part.first_scheduled_time for part in parts),
            first_token_time=_earliest(part.first_token_time for part in parts),
            last_token_time=max(part.last_token_time for part in parts),
        )
        for part in parts:
            total.stage_seconds.add(part.stage_seconds)
            for depth, count in enumerate(part.accepted_by_depth):
                total.accepted_by_depth[depth] += count
        return total


@dataclass
class CompletionOutput:
    """One generated text; field names as in TensorRT-LLM. ``token_ids`` ends with the end or stop token if one was met.
    ``stop_reason`` is the stop token's id or the stop string that was met, None for the end token. ``logprobs``, one a
    token, and their sum ``cumulative_logprob`` are None unless asked for. ``seed`` gives the same text again."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[float] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int


@dataclass
class RequestOutput:
    """What a request has produced so far. ``error`` holds one line if a text's ``finish_reason`` is "error"."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    statistics: Statistics
    error: str | None = None


class GenerationResult:
    """A request that has been submitted: its result to come.

    Wait for it with ``result()``, or ``await`` it; iterate over it, plainly or with ``async for``, for a RequestOutput
    after each round that wrote something if it was submitted with ``streaming``, else for the finished one alone. Each
    of them is handed out once, the last one is finished. Leaving a loop does not end the request: ``abort`` does.

    Any thread and any event loop may use it.

    Attributes:
        request_id, prompt, prompt_token_ids: as in RequestOutput.
        streaming: whether there is an output after each round.
    """

    def __init__(
        self,
        sequences: "Sequence[Request]",
        *,
        streaming: bool,
        abort: "Callable[[GenerationResult], None]",
        check_may_wait: Callable[[], None],
    ):
        self.sequences = sequences
        self.streaming = streaming
        first = sequences[0]
        self.request_id, self.prompt = first.request_id, first.prompt
        self.prompt_token_ids = list(first.prompt_token_ids)  # the caller's to change
        self._abort, self._check_may_wait = abort, check_may_wait
        self._lock = threading.Lock()
        self._latest = self._snapshot()
        self._undelivered: deque[RequestOutput] = deque()
        self._waiters: list[Future[None]] = []  # of those who iterate
        self._done: Future[RequestOutput] = Future()
        self._done.set_running_or_notify_cancel()  # so that a cancelled `await` does not cancel it for others

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The texts as of the latest round; without ``streaming`` they are empty until the request has finished."""
        return self._latest.outputs

    @property
    def finished(self) -> bool:
        return self._latest.finished

    @property
    def error(self) -> str | None:
        return self._latest.error

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the finished output.

        Raises:
            TimeoutError: it took more than ``timeout`` seconds; the request goes on.
            RequestError: called in ``on_round``, before it is there.
        """
        if not self._done.done():
            self._check_may_wait()
        return self._done.result(timeout)

    async def aresult(self) -> RequestOutput:
        """Wait for the finished output in an event loop."""
        if not self._done.done():
            self._check_may_wait()
        return await asyncio.wrap_future(self._done)

    def __await__(self):
        return self.aresult().__await__()

    def __iter__(self) -> "GenerationResult":
        return self

    def __next__(self) -> RequestOutput:
        while True:
            output = self._next()
            if isinstance(output, RequestOutput):
                return output
            if output is None:
                raise StopIteration
            output.result()

    def __aiter__(self) -> "GenerationResult":
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self._next()
            if isinstance(output, RequestOutput):
                return output
            if output is None:
                raise StopAsyncIteration
            await asyncio.wrap_future(output)

    def abort(self) -> None:
        """End the request: its slot is free before the next round, and its ``finish_reason`` is "cancelled", with what
        was written until then. Nothing happens if it has finished."""
        if not self.finished:
            self._abort(self)

    def publish(self) -> None:
        """For the scheduler: show what the sequences have written."""
        output = self._snapshot()
        with self._lock:
            self._latest = output
            self._undelivered.append(output)
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        if output.finished:
            self._done.set_result(output)

    def _next(self) -> "RequestOutput | Future[None] | None":
        """The next output, what to wait for if there is none yet, or None behind the last one."""
        with self._lock:
            if self._undelivered:
                return self._undelivered.popleft()
            if self._latest.finished:
                return None
            self._check_may_wait()
            waiter: Future[None] = Future()
            self._waiters.append(waiter)
            return waiter

    def _snapshot(self) -> RequestOutput:
        sequences = self.sequences
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [
                CompletionOutput(
                    index,
                    sequence.text,
                    list(sequence.output_ids),
                    sequence.cumulative_logprob,
                    None if sequence.logprobs is None else list(sequence.logprobs),
                    sequence.finish_reason,
                    sequence.stop_reason,
                    sequence.seed,
                )
                for index, sequence in enumerate(sequences)
            ],
            all(sequence.finished for sequence in sequences),
            Statistics.total([sequence.statistics for sequence in sequences]),
            next((sequence.error for sequence in sequences if sequence.error is not None), None),
        )


class OutputStream:
    """The outputs of a request that ends with this iterator: when it is closed, or nobody holds it any more."""

    def __init__(self, result: GenerationResult):
        self._result = result

    def __iter__(self) -> "OutputStream":
        return self

    def __next__(self) -> RequestOutput:
        return next(self._result)

    def close(self) -> None:
        """End the request."""
        self._result.abort()

    __del__ = close


def _earliest(times: Iterable[float]) -> float:
    return min((time for time in times if time), default=0.0)
