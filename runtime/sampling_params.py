"""What a request asks for. Names are those of TensorRT-LLM's ``SamplingParams`` and ``GuidedDecodingParams``."""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from ddtree.runtime.errors import RequestError

SEED_LIMIT = 1 << 64
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234663852886e38
_SHOWN = 60  # characters


@dataclass(kw_only=True)
class GuidedDecodingParams:
    """A grammar that the text follows, by xgrammar. Give exactly one.

    Args:
        json: a JSON schema, as text, dict or Pydantic class.
        regex: a regular expression that matches the whole text.
        grammar: an EBNF grammar in GBNF's notation, with a rule named ``root``.
        json_object: any JSON object.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False

    def check(self) -> None:
        """Raise RequestError unless exactly one is given, and of the right type."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise RequestError(f"guided_decoding has {' and '.join(given) or 'no grammar'} (give one of {names})")
        (name,) = given
        value = getattr(self, name)
        if name in ("regex", "grammar"):
            _check_text(f"guided_decoding.{name}", value)
        elif name == "json_object" and value is not True:
            raise RequestError(f"guided_decoding.json_object {shown(value)} is neither True nor False")
        elif name == "json" and not isinstance(value, str | dict) and not hasattr(value, "model_json_schema"):
            raise RequestError(
                f"guided_decoding.json is of type {type(value).__name__} "
                "(give a JSON schema as text, dict or Pydantic class)"
            )


@dataclass(kw_only=True)
class SamplingParams:
    """How one request samples, and when it ends.

    Args:
        n: how many texts to write. Text i has the seed ``seed XOR i * 0x9E3779B97F4A7C15``.
        max_tokens: the most tokens to emit.
        min_tokens: the fewest tokens to emit: no end or stop token comes before, and no stop string cuts off more.
        temperature: 0 (the default) is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this mass; 1 keeps all.
        min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
        seed: 0 to 2**64 - 1; the same seed gives the same text for every method, budget and batch. None draws a
            random one, reported in ``CompletionOutput.seed``.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: is taken off the logits of tokens in the output; 0 is off.
        frequency_penalty: is taken off them once for each time that they are there; 0 is off.
        logit_bias: token -> what is added to its logit; -inf forbids the token.
        embedding_bias: the same as one number for each token of the vocabulary (a tensor, array or list).
        bad: texts not to write, one or a list: the tokens of each, encoded with and without a space before it, do not
            follow one another. (Other tokens may spell it still.)
        bad_token_ids: tokens not to write.
        end_id: the token that ends the text; None takes the checkpoint's.
        ignore_eos: go on past the end token (``stop`` and ``stop_token_ids`` still end the text).
        stop: strings that end the text, one or a list. They may span tokens. The text is cut before the one that is
            complete first; token ids and logprobs are cut to the fewest that spell the text left.
        stop_token_ids: further tokens that end the text. Like the end token, such a token is the last of the token ids,
            but not in the text.
        include_stop_str_in_output: have the stop string, stop token or end token in the text.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: 0 or 1: report the log-probability of each emitted token, from the raw logits; None: do not.
        guided_decoding: a grammar that the text follows.
        timeout: seconds from submission after which the request ends with what it has; None: never.

    What the logits go through, in this order: bias, repetition, presence and frequency penalty, bad words, min_tokens,
    grammar, temperature, top_k, top_p, min_p.
    """

    n: int = 1
    max_tokens: int = 32
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    embedding_bias: Any = None
    bad: str | list[str] | None = None
    bad_token_ids: list[int] | None = None
    end_id: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    timeout: float | None = None

    def check(self, vocab_size: int) -> None:
        """Raise RequestError if a value is out of its range."""
        _check_int("n", self.n, 1, INT32_MAX)
        _check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, INT32_MAX)
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens} (lower it)")
        self._check_sampling()
        self._check_rules(vocab_size)
        self._check_end(vocab_size)

    def resolved_seed(self) -> int:
        """The seed as given, or a fresh random one."""
        return secrets.randbits(64) if self.seed is None else int(self.seed)

    def row_rule_settings(self) -> list[str]:
        """Names of the settings that change logits row by row along a path, before the filters.

        They need ``RowRules`` in ``verify_tree``: an engine that verifies inside itself cannot take them.
        """
        on = {
            "logit_bias": bool(self.logit_bias),
            "embedding_bias": self.embedding_bias is not None,
            "repetition_penalty": self.repetition_penalty != 1,
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "bad": bool(self.bad),
            "bad_token_ids": bool(self.bad_token_ids),
            "min_tokens": self.min_tokens > 0,
            "guided_decoding": self.guided_decoding is not None,
        }
        return [name for name, is_on in on.items() if is_on]

    def _check_sampling(self) -> None:
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
        if self.n > 1 and self.temperature == 0:
            raise RequestError(f"n {self.n} at temperature 0 is the same text {self.n} times (set a temperature)")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, 1)
        if self.timeout is not None:
            _check_float("timeout", self.timeout, 0, None)

    def _check_rules(self, vocab_size: int) -> None:
        _check_float("repetition_penalty", self.repetition_penalty, 0, None)
        if not 1 / FLOAT32_MAX < self.repetition_penalty <= FLOAT32_MAX:
            raise RequestError(f"repetition_penalty {self.repetition_penalty} is not above 0 (1 turns it off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float32(name, getattr(self, name))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise RequestError(
                    f"logit_bias {shown(self.logit_bias)} is not a dict (give token ids and their biases)"
                )
            for token, bias in self.logit_bias.items():
                _check_int("logit_bias", token, 0, vocab_size - 1)
                _check_bias(f"logit_bias of token {token}", bias)
        if self.embedding_bias is not None:
            if self.logit_bias is not None:
                raise RequestError("logit_bias and embedding_bias are two biases (give one)")
            biases = _plain(self.embedding_bias)
            if not isinstance(biases, list | tuple) or len(biases) != vocab_size:
                raise RequestError(
                    f"embedding_bias is not one number for each of the {vocab_size} tokens (give so many)"
                )
            for token, bias in enumerate(biases):
                _check_bias(f"embedding_bias of token {token}", bias)
        for word in _texts("bad", self.bad):
            _check_text("bad", word)
        _check_ids("bad_token_ids", self.bad_token_ids, vocab_size)
        if self.guided_decoding is not None:
            if not isinstance(self.guided_decoding, GuidedDecodingParams):
                raise RequestError(
                    f"guided_decoding is of type {type(self.guided_decoding).__name__} (give a GuidedDecodingParams)"
                )
            self.guided_decoding.check()
            if self.ignore_eos:
                raise RequestError("ignore_eos with guided_decoding: a grammar ends with the end token (leave one out)")

    def _check_end(self, vocab_size: int) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} {shown(getattr(self, name))} is neither True nor False")
        if self.end_id is not None:
            _check_int("end_id", self.end_id, 0, vocab_size - 1)
        for text in _texts("stop", self.stop):
            _check_text("stop", text)
        _check_ids("stop_token_ids", self.stop_token_ids, vocab_size)

    def biases(self) -> Mapping[int, float]:
        """``logit_bias``, or the tokens with one in ``embedding_bias``."""
        if self.embedding_bias is None:
            return self.logit_bias or {}
        return {token: float(bias) for token, bias in enumerate(_plain(self.embedding_bias)) if bias}

    def stop_texts(self) -> list[str]:
        """``stop`` as a list."""
        return _texts("stop", self.stop)

    def bad_texts(self) -> list[str]:
        """``bad`` as a list."""
        return _texts("bad", self.bad)


def _plain(values: Any) -> Any:
    """A tensor or array as a list."""
    return values.tolist() if hasattr(values, "tolist") else values


def _texts(name: str, value: str | list[str] | None) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} {shown(value)} is neither a text nor a list of texts (give one)")
    return list(value)


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise RequestError(f"{name} {shown(value)} is not a text")
    if not value:
        raise RequestError(f"{name} is an empty text (leave it out)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not Unicode at character {error.start} (use UTF-8 text)") from None


def _check_ids(name: str, value: object, vocab_size: int) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} {shown(value)} is not a list (give a list of token ids)")
    for token in value:
        _check_int(name, token, 0, vocab_size - 1)


def _check_bias(name: str, value: object) -> None:
    if not (isinstance(value, Real) and value == -math.inf):
        _check_float32(name, value)


def _check_float32(name: str, value: Any) -> None:
    _check_float(name, value, -math.inf, None)
    if not abs(float(value)) <= FLOAT32_MAX:
        raise RequestError(f"{name} {value} is more than a float32 holds")


def _check_int(name: str, value: object, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"{name} {shown(value)} is not a whole number")
    _check_range(name, int(value), low, high)


def _check_float(name: str, value: object, low: float, high: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_finite(value):
        raise RequestError(f"{name} {shown(value)} is not a finite number")
    _check_range(name, float(value), low, high)


def _is_finite(value: Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def shown(value: object) -> str:
    """A value for a message: one line, cut where it gets long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "(a whole number of thousands of digits)"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None or (value < low and high == INT32_MAX) else f"{low} to {high}"
        raise RequestError(f"{name} {shown(value)} is out of range (use {allowed})")
