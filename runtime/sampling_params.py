"""What a request asks of the sampler. Names are those of TensorRT-LLM's ``SamplingParams``."""

import math
import secrets
from dataclasses import dataclass
from numbers import Integral, Real

from ddtree.runtime.errors import RequestError

SEED_LIMIT = 1 << 64
FLOAT32_MAX = 3.4028234663852886e38


@dataclass(kw_only=True)
class SamplingParams:
    """How one request samples and when it ends.

    Args:
        max_tokens: the most tokens to emit.
        temperature: 0 (the default) is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this mass; 1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
        seed: 0 to 2**64 - 1; the same seed gives the same text for every method, budget and batch. None draws a
            random one, reported in ``CompletionOutput.seed``.
        end_id: the token that ends the text; None takes the checkpoint's.
        stop_token_ids: further tokens that end the text. The token stays in the output, as the end token does.
        ignore_eos: go on past the end token (``stop_token_ids`` still end the text).

    Filters apply in the order temperature, top_k, top_p, min_p.
    """

    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    end_id: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    def check(self, vocab_size: int) -> None:
        """Raise RequestError if a value is out of its range."""
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("temperature", self.temperature, 0, None)
        if self.temperature > FLOAT32_MAX:
            raise RequestError(f"temperature {self.temperature} is more than a float32 holds (use 0 or more)")
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p 0 keeps no token (use a value above 0, 1 turns the filter off)")
        _check_float("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, SEED_LIMIT - 1)
        if self.end_id is not None:
            _check_int("end_id", self.end_id, 0, vocab_size - 1)
        if not isinstance(self.stop_token_ids, list | tuple | None):
            raise RequestError(f"stop_token_ids {self.stop_token_ids!r} is not a list (give a list of token ids)")
        for token in self.stop_token_ids or []:
            _check_int("stop_token_ids", token, 0, vocab_size - 1)

    def resolved_seed(self) -> int:
        """The seed as given, or a fresh random one."""
        return secrets.randbits(64) if self.seed is None else int(self.seed)


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} {value!r} is not a whole number")
    _check_range(name, int(value), low, high)


def _check_float(name: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise RequestError(f"{name} {value!r} is not a finite number")
    _check_range(name, float(value), low, high)


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise RequestError(f"{name} {value} is out of range (use {allowed})")
