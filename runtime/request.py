"""One request while it is being served, and what its caller gets back."""

from dataclasses import dataclass, field
from typing import Literal

from ddtree.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]


@dataclass
class Statistics:
    """Counts and times of one request.

    ``decode_seconds`` is the time of the rounds that the request was part of, whoever shared them.
    ``acceptance_length`` is the mean number of tokens a round emitted, bonus token included, before any cut at a stop
    token or at max_tokens; plain decoding has 1. A request that ended with its first token had no round, and has 0.
    """

    rounds: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        return (self.accepted_tokens + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass
class CompletionOutput:
    """One generated text; field names as in TensorRT-LLM. ``token_ids`` ends with the end or stop token if one was met.
    ``stop_reason`` is the one of ``stop_token_ids`` that was met, None for the end token."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | None
    seed: int


@dataclass
class RequestOutput:
    """What a request has produced so far. ``error`` holds one line if ``finish_reason`` is "error"."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    statistics: Statistics
    error: str | None = None


@dataclass
class Request:
    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    stop_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    statistics: Statistics = field(default_factory=Statistics)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, token_ids: list[int]) -> None:
        """Append what a round emitted, cut at the first stop token or at max_tokens, whichever comes first."""
        for token in token_ids:
            self.output_ids.append(token)
            if token in self.stop_ids or token in self.end_ids:
                self.finish_reason = "stop"
                self.stop_reason = token if token in self.stop_ids else None
                return
            if len(self.output_ids) == self.params.max_tokens:
                self.finish_reason = "length"
                return

    def fail(self, message: str) -> None:
        self.finish_reason, self.error = "error", message
