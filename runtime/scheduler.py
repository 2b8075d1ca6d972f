"""Continuous batching: which sequences a pass runs, and what becomes of what it wrote.

A step runs at most one chunk of a prompt and one round of all sequences that decode, so a long prompt delays the others
by a chunk a round, no more. The sequences that decode have the engine's slots [0, n), the prompt that is being read has
slot n; every pass runs a contiguous range of slots.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from ddtree.plugins.tree import DraftTree, Verified
from ddtree.runtime.batch import Batch
from ddtree.runtime.engine import Engine
from ddtree.runtime.errors import EngineError
from ddtree.runtime.pacing import CostAwarePacing, RoundCosts, measure_rounds
from ddtree.runtime.prefill import Prefill
from ddtree.runtime.request import Request
from ddtree.runtime.results import FinishReason, GenerationResult
from ddtree.runtime.round import Method, decode_round

_STATUS = {
    1: "the target's logits hold NaN or no finite value in the round from position {position} on "
    "(check the checkpoint's weights)",
    2: "no token is left after mask and filters in the round from position {position} on (loosen them)",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafting:
    """How a request is decoded. A batch has one way; the text is the same for all of them."""

    method: Method
    budget: int
    adaptive: bool

    @property
    def paced(self) -> bool:
        return self.adaptive and self.method == "ddtree" and self.budget > 0


@dataclass(eq=False)
class _Sequence:
    """One of a request's texts, from its arrival to its end."""

    request: Request
    result: GenerationResult
    drafting: Drafting
    depths: list[int] = field(default_factory=list)  # of its tokens: of a draft token its depth in its tree, else 0

    def take(self, verified: Verified, slot: int) -> None:
        """Take in what a pass wrote."""
        request, statistics = self.request, self.request.statistics
        status, accepted = int(verified.status[slot]), int(verified.accepted_count[slot])
        if status:
            position = len(request.prompt_token_ids) + len(self.depths)
            request.fail(_STATUS[status].format(position=position))
            return
        emitted = slice(accepted + 1)
        request.extend(verified.output_ids[slot, emitted].tolist(), verified.logprobs[slot, emitted].tolist())
        statistics.last_token_time = time.monotonic()
        statistics.first_token_time = statistics.first_token_time or statistics.last_token_time

        statistics.accepted_by_depth += [0] * (accepted - len(statistics.accepted_by_depth))
        for depth in range(1, accepted + 1):
            statistics.accepted_by_depth[depth - 1] += 1
        self.depths += [*range(1, accepted + 1), 0]
        if request.finished:  # a stop cuts tokens off, those of earlier rounds too if it is a text that spans them
            kept = len(request.output_ids)
            for depth in filter(None, self.depths[kept:]):
                statistics.accepted_by_depth[depth - 1] -= 1
            del self.depths[kept:]
        statistics.emitted_tokens = max(len(self.depths) - 1, 0)


class Scheduler:
    """Serves requests first come, first served, in batches that they join and leave between rounds.

    Args:
        engine: opened, and this scheduler's alone.
        max_batch_size: the most sequences that have a slot, the one whose prompt is being read included.

    One thread calls it. A pass that fails ends the sequences that were in it with an error, and no others.

    Attributes:
        on_round: called after each round with its DraftTree and Verified.
    """

    def __init__(self, engine: Engine, max_batch_size: int):
        self._engine, self._slots = engine, max_batch_size
        self._sequences: dict[Request, _Sequence] = {}  # that wait or run
        self._waiting: OrderedDict[Request, _Sequence] = OrderedDict()  # of them, first come first
        self._deadlines: dict[GenerationResult, float] = {}
        self._next_deadline = math.inf  # none is earlier
        self._prefill: Prefill | None = None
        with engine.stream():
            self._batch = Batch(engine, max_batch_size)
        self._drafting: Drafting | None = None  # of the batch
        self._pacing: CostAwarePacing | None = None
        self._pacings: dict[int, CostAwarePacing] = {}  # by budget; they learn as long as the engine is open
        self.on_round: Callable[[DraftTree, Verified], None] | None = None

    @property
    def unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self._sequences)

    def add(self, result: GenerationResult, drafting: Drafting) -> None:
        """Queue a request behind those that have come before."""
        for request in result.sequences:
            sequence = _Sequence(request, result, drafting)
            self._sequences[request] = sequence
            self._waiting[request] = sequence
        first = result.sequences[0]
        if first.params.timeout is not None:
            self._deadlines[result] = first.statistics.arrival_time + first.params.timeout
            self._next_deadline = min(self._next_deadline, self._deadlines[result])

    def abort(self, result: GenerationResult) -> None:
        """End a request now; its slots are free then. Nothing happens if it has finished, or was never added."""
        with torch.inference_mode(), self._engine.stream():
            self._cancel(result, "cancelled")

    def abort_all(self) -> None:
        """End all requests now."""
        for result in {sequence.result: None for sequence in self._sequences.values()}:
            self.abort(result)

    def lose_all(self, error: BaseException) -> None:
        """End all requests with this error, and leave the engine alone."""
        self._forget_slots()
        self._fail(self._sequences, error)

    def step(self) -> None:
        """Drop what has timed out, let the next one in, run a chunk of its prompt, then a round of the others."""
        with torch.inference_mode(), self._engine.stream():
            self._drop_timed_out()
            self._admit()
            if self._prefill is not None:
                self._read_prompt(self._prefill)
            if len(self._batch):
                self._decode()

    def _drop_timed_out(self) -> None:
        now = time.monotonic()
        if now < self._next_deadline:
            return
        for result in [result for result, deadline in self._deadlines.items() if deadline <= now]:
            self._cancel(result, "timeout")
        self._next_deadline = min(self._deadlines.values(), default=math.inf)

    def _admit(self) -> None:
        """Give the first one in the queue the slot behind the batch, if there is one and no prompt is being read."""
        while self._waiting and self._prefill is None:
            request, sequence = next(iter(self._waiting.items()))
            slot = len(self._batch)
            if slot == self._slots or (slot and sequence.drafting != self._drafting):
                return  # another way of drafting needs a batch of its own, and nobody is overtaken
            del self._waiting[request]
            request.statistics.first_scheduled_time = time.monotonic()
            try:
                if slot == 0:
                    self._begin(sequence.drafting, request)
                self._engine.reserve_slots(slot + 1)
                self._prefill = Prefill(self._engine, request, sequence.drafting.method)
            except Exception as error:
                self._fail([request], error)

    def _begin(self, drafting: Drafting, request: Request) -> None:
        """Start a batch. The engine forgets the last one, and with it how long its caches have grown."""
        self._drafting = drafting
        self._pacing = None
        if drafting.paced and not self._engine.asynchronous:  # there the host sees no tree before its round has ended
            if drafting.budget not in self._pacings:
                self._pacings[drafting.budget] = self._new_pacing(request, drafting.budget)
            self._pacing = self._pacings[drafting.budget]
            self._pacing.clear()
        self._engine.reset(1)

    def _new_pacing(self, request: Request, budget: int) -> CostAwarePacing:
        draft = self._engine.manifest.draft
        assert draft is not None
        costs = RoundCosts(measure_rounds(self._engine, self._batch, request, budget))
        return CostAwarePacing(costs, self._slots, draft.max_depth)

    def _read_prompt(self, prefill: Prefill) -> None:
        request, slot = prefill.request, len(self._batch)
        start = time.perf_counter()
        try:
            prefilled = prefill.run_chunk(slot)
            request.statistics.prefill_seconds += time.perf_counter() - start
            if prefilled is None:
                return
            past = len(request.prompt_token_ids)
            self._sequences[request].take(prefilled.verified, 0)
            if not request.finished:
                self._batch.add(request, int(prefilled.verified.output_ids[0, 0]), past, prefilled.features)
                self._prefill = None
                if self._pacing is not None:
                    self._pacing.add(slot)
        except Exception as error:
            self._fail([request], error)
        else:
            self._settle([request])

    def _decode(self) -> None:
        batch, drafting, requests = self._batch, self._drafting, list(self._batch.requests)
        assert drafting is not None
        on_round, start = self.on_round, time.perf_counter()
        try:
            done = decode_round(
                self._engine,
                batch,
                drafting.method,
                drafting.budget,
                self._pacing,
                draft_ahead=on_round is None,  # who watches sees the round's own tree, not the next one's
            )
            nodes = done.tree.token_ids.shape[1] - 1
            if self._pacing is not None:
                self._pacing.learn(done.verified, nodes)
            for slot, request in enumerate(requests):
                statistics = request.statistics
                statistics.rounds += 1
                statistics.draft_tokens += nodes
                if done.seconds is not None:
                    statistics.stage_seconds.add(done.seconds)
                self._sequences[request].take(done.verified, slot)
            seconds = time.perf_counter() - start
            for request in requests:
                request.statistics.decode_seconds += seconds
            if on_round is not None:
                on_round(done.tree, done.verified)
        except Exception as error:
            self._fail(requests, error)
        else:
            self._settle(requests)

    def _cancel(self, result: GenerationResult, reason: FinishReason) -> None:
        running = [request for request in result.sequences if request in self._sequences]
        for request in running:
            request.cancel(reason)
        self._settle(running)

    def _fail(self, requests: Iterable[Request], error: BaseException) -> None:
        """End the sequences of a pass that failed; others are not touched."""
        if not isinstance(error, EngineError):
            _log.error("a pass failed", exc_info=error)
        requests = list(requests)
        for request in requests:
            if not request.finished:
                request.fail(_one_line(error))
        self._settle(requests)

    def _settle(self, requests: Iterable[Request]) -> None:
        """After a pass: show what there is, and free the slots of the sequences that have ended."""
        sequences = [self._sequences[request] for request in requests]
        ended = [sequence.request for sequence in sequences if sequence.request.finished]
        for request in ended:
            del self._sequences[request]
            self._waiting.pop(request, None)
        for result in {sequence.result: None for sequence in sequences}:
            if result.streaming or all(request.finished for request in result.sequences):
                result.publish()
            if result.finished:
                self._deadlines.pop(result, None)
        try:
            for request in ended:
                self._free_slot(request)
            if ended and len(self._batch):
                self._trim()
        except Exception as error:  # nobody knows what the engine holds now, so the others are lost too
            reading = [self._prefill.request] if self._prefill is not None else []
            lost = [request for request in (*self._batch.requests, *reading) if request in self._sequences]
            self._forget_slots()
            self._fail(lost, error)

    def _free_slot(self, request: Request) -> None:
        """Move the last slots up if the sequence has one. What is left behind is wiped: a mask does not stop a NaN."""
        batch, reading = self._batch, self._prefill
        if reading is not None and reading.request is request:
            self._prefill = None
            self._engine.release(len(batch), len(batch))
        elif request in batch.requests:
            slot = batch.requests.index(request)
            last = batch.remove(slot)
            if self._pacing is not None:
                self._pacing.remove(slot, last)
            self._engine.release(slot, last)
            if reading is not None:
                self._engine.release(last, last + 1)

    def _forget_slots(self) -> None:
        self._batch.clear()
        self._prefill = None

    def _trim(self) -> None:
        """Let the engine shorten caches that are longer than the sequences that are left need: passes read all rows."""
        drafting, draft = self._drafting, self._engine.manifest.draft
        assert drafting is not None
        longest = max(
            len(request.prompt_token_ids) + len(self._sequences[request].depths) for request in self._batch.requests
        )
        if self._prefill is not None:
            longest = max(longest, len(self._prefill.request.prompt_token_ids))
        depth, block = (draft.max_depth, draft.block_size) if draft else (0, 0)
        self._engine.trim(longest + max(drafting.budget, depth) + 1, longest + depth + 1 + block)


def _one_line(error: BaseException) -> str:
    line = " ".join(str(error).split())
    return line if isinstance(error, EngineError) else f"{type(error).__name__}: {line}"
