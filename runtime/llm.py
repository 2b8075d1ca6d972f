"""The Python API: text out of an engine directory or a pair of checkpoints."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from tokenizers import Tokenizer

from ddtree.builder import is_engine
from ddtree.builder.build import MAX_TREE_NODES, TOKENIZER
from ddtree.plugins.tree import DraftTree, Verified
from ddtree.runtime.batch import Batch
from ddtree.runtime.detokenizer import Detokenizer
from ddtree.runtime.engine import open_engine
from ddtree.runtime.engine_cache import cached_engine, demo_pair
from ddtree.runtime.errors import EngineError, RequestError
from ddtree.runtime.pacing import CostAwarePacing, RoundSeconds, measure_rounds
from ddtree.runtime.request import CompletionOutput, Request, RequestOutput
from ddtree.runtime.round import METHODS, Method, decode_round, prefill
from ddtree.runtime.sampling_params import SamplingParams

Prompt = str | list[int]
DEFAULT_BUDGET = 16  # on a CPU small trees pay and large ones do not: docs/benchmarks.md

_STATUS = {
    1: "the target's logits hold NaN or no finite value in the round from position {position} on "
    "(check the checkpoint's weights)",
    2: "no token is left after mask and filters in the round from position {position} on (loosen them)",
}


class LLM:
    """A target and its drafter, ready to generate.

    Args:
        model: an engine directory, or a Hugging Face checkpoint directory, whose engine is then built into the cache;
            None is the demo pair.
        speculative_model: the DFlash drafter's checkpoint directory, if ``model`` is a checkpoint.
        method: "ddtree" (the tree), "chain" (the same drafter's chain, as DFlash), or "ar" (plain decoding). All three
            write the same text.
        budget: the most draft nodes of a tree, root excluded.
        adaptive: verify fewer nodes, and do without a draft, where more would cost time; the first call of the method
            "ddtree" then times some rounds (0.1 s with a small model). Else every round has a tree of ``budget`` nodes.
        threads: threads of a pass; None leaves it to the engine.

    An LLM serves one call at a time: a second one, from another thread or while a stream is open, is refused.

    Attributes:
        method, budget, adaptive: may be set between calls.
        on_round: called after each round with its DraftTree and Verified.

    Raises:
        BuildError, EngineError: the checkpoint or engine cannot be used.
        RequestError: method or budget do not fit the engine.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        speculative_model: str | Path | None = None,
        method: Method | None = None,
        budget: int | None = None,
        adaptive: bool = True,
        threads: int | None = None,
    ):
        directory = _engine_directory(model, speculative_model)
        self.engine = open_engine(directory, threads)
        self.manifest = self.engine.manifest
        self.tokenizer = _tokenizer(directory / TOKENIZER)
        self.method: Method = method or ("ddtree" if self.manifest.draft else "ar")
        self.budget = min(DEFAULT_BUDGET, self.manifest.limits.max_tree_nodes) if budget is None else budget
        self.adaptive = adaptive
        self._check_method()
        self.on_round: Callable[[DraftTree, Verified], None] | None = None
        self._next_request_id = 0
        self._serving = threading.Lock()
        self._round_seconds: dict[int, RoundSeconds] = {}  # by budget

    @overload
    def generate(self, prompts: Prompt, sampling_params: SamplingParams | None = None) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[RequestOutput]: ...

    def generate(self, prompts, sampling_params=None):
        """Complete one prompt or many; many share batches, and each text is the one that the prompt gives alone.

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: for all prompts, or one for each.

        Returns:
            One RequestOutput for one prompt, a list in the order given for a list of prompts. A request that fails
            while it runs has ``error`` set and harms no other.

        Raises:
            RequestError: a prompt or a setting is refused; nothing has run then.
        """
        prompts, alone = _prompts(prompts)
        given = sampling_params if isinstance(sampling_params, list | tuple) else [sampling_params] * len(prompts)
        if len(given) != len(prompts):
            raise RequestError(f"{len(given)} sampling_params for {len(prompts)} prompts (give one, or one for each)")
        requests = [self._request(prompt, params) for prompt, params in zip(prompts, given, strict=True)]
        for _ in self._serve(requests):
            pass
        outputs = [self._output(request, self._text(request)) for request in requests]
        return outputs[0] if alone else outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield what there is after each round; the last output is the finished one.

        Raises:
            RequestError: the prompt or a setting is refused.
        """
        (prompt,), _ = _prompts([prompt])
        return self._stream(self._request(prompt, sampling_params))

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        detokenizer = Detokenizer(self.tokenizer)
        for _ in self._serve([request]):
            detokenizer.extend(request.output_ids[len(detokenizer.token_ids) :])
            if request.finished:
                detokenizer.finish()
            yield self._output(request, detokenizer.text)

    def _request(self, prompt: Prompt, params: SamplingParams | None) -> Request:
        limits, target = self.manifest.limits, self.manifest.target
        params = replace(params or SamplingParams())  # the caller may change theirs while this one runs
        params.check(target.vocab_size)
        ids = self._encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not ids:
            raise RequestError("the prompt is empty (give at least one token)")
        for token in ids:
            if not 0 <= token < target.vocab_size:
                raise RequestError(f"prompt token {token} is out of range (use 0 to {target.vocab_size - 1})")
        if len(ids) + params.max_tokens > limits.max_seq_len:
            raise RequestError(
                f"prompt of {len(ids)} tokens and max_tokens {params.max_tokens} exceed the engine's max_seq_len "
                f"{limits.max_seq_len} ({_length_remedy(len(ids), limits.max_seq_len)})"
            )
        end_ids = [params.end_id] if params.end_id is not None else target.eos_token_ids
        self._next_request_id += 1
        return Request(
            self._next_request_id - 1,
            prompt if isinstance(prompt, str) else None,
            ids,
            params,
            params.resolved_seed(),
            frozenset() if params.ignore_eos else frozenset(end_ids),
            frozenset(params.stop_token_ids or []),
        )

    def _encode(self, prompt: str) -> list[int]:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not Unicode at character {error.start} (use UTF-8 text)") from None
        return self.tokenizer.encode(prompt).ids

    def _serve(self, requests: list[Request]) -> Iterator[None]:
        """Run the requests to their ends, in batches that waiting requests join as others leave."""
        self._check_method()
        method, budget = self.method, self.budget
        if not self._serving.acquire(blocking=False):
            raise RequestError("this LLM is serving another call (finish or close that stream, or open a second LLM)")
        try:
            waiting = deque(requests)
            slots = min(len(requests), self.manifest.limits.max_batch_size)
            pacing = self._pacing(slots) if self.adaptive and method == "ddtree" and budget > 0 else None
            self.engine.reset(slots)
            draft = self.manifest.draft
            rows = draft.max_depth + 1 if draft else 0
            batch = Batch(slots, rows, self.manifest.feature_width, self.engine.dtype)
            while waiting or len(batch):
                with torch.inference_mode():
                    if waiting and len(batch) < slots:
                        self._admit(batch, waiting.popleft(), method)
                        if pacing is not None:
                            pacing.add(len(batch) - 1)
                    else:
                        self._decode(batch, method, budget, pacing)
                    for slot in reversed(range(len(batch))):
                        request = batch.requests[slot]
                        if request.finished:
                            last = batch.remove(slot)
                            self.engine.release(slot, last, zero=request.error is not None)
                            if pacing is not None:
                                pacing.remove(slot, last)
                yield
        finally:
            self._serving.release()

    def _admit(self, batch: Batch, request: Request, method: Method) -> None:
        start = time.perf_counter()
        verified = prefill(self.engine, batch, batch.add(request), method)
        _emit(request, verified, 0, len(request.prompt_token_ids))
        request.statistics.prefill_seconds = time.perf_counter() - start

    def _pacing(self, slots: int) -> CostAwarePacing:
        draft = self.manifest.draft
        assert draft is not None
        if self.budget not in self._round_seconds:
            self._round_seconds[self.budget] = measure_rounds(self.engine, self.budget)
        return CostAwarePacing(self._round_seconds[self.budget], slots, draft.max_depth)

    def _decode(self, batch: Batch, method: Method, budget: int, pacing: CostAwarePacing | None) -> None:
        start = time.perf_counter()
        positions = (batch.past + 1).tolist()
        tree, verified = decode_round(self.engine, batch, method, budget, pacing)
        if pacing is not None:
            pacing.learn(verified, tree.token_ids.shape[1] - 1)
        for slot, request in enumerate(batch.requests):
            request.statistics.rounds += 1
            request.statistics.accepted_tokens += int(verified.accepted_count[slot])
            _emit(request, verified, slot, positions[slot])
            request.statistics.decode_seconds += time.perf_counter() - start
        if self.on_round is not None:
            self.on_round(tree, verified)

    def _text(self, request: Request) -> str:
        return self.tokenizer.decode(request.output_ids, skip_special_tokens=True)

    def _output(self, request: Request, text: str) -> RequestOutput:
        completion = CompletionOutput(
            0, text, list(request.output_ids), request.finish_reason, request.stop_reason, request.seed
        )
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [completion],
            request.finished,
            replace(request.statistics),
            request.error,
        )

    def _check_method(self) -> None:
        draft, limit = self.manifest.draft, self.manifest.limits.max_tree_nodes
        if self.method not in METHODS:
            raise RequestError(f"method {self.method!r} is not known (use one of {', '.join(METHODS)})")
        if self.method == "ar":
            return
        if draft is None:
            raise RequestError(f"method {self.method!r} needs a drafter and the engine has none (build it with one)")
        nodes = self.budget if self.method == "ddtree" else draft.max_depth
        if isinstance(nodes, bool) or not isinstance(nodes, Integral):
            raise RequestError(f"budget {nodes!r} is not a whole number (use 0 to {limit})")
        if nodes < 0:
            raise RequestError(f"budget {nodes} is negative (use 0 to {limit})")
        if nodes > limit:
            what = "budget" if self.method == "ddtree" else "the chain's length"
            remedy = f"rebuild with --budget {nodes}" if nodes <= MAX_TREE_NODES else f"lower it to {limit}"
            raise RequestError(f"{what} {nodes} exceeds the engine's max_tree_nodes {limit} ({remedy})")


def _prompts(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list of texts and lists of token ids, and whether one was given by itself."""

    def plain(value: Any) -> Any:
        return value.tolist() if hasattr(value, "tolist") else value

    def is_token_ids(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(
            isinstance(token, Integral) and not isinstance(token, bool) for token in value
        )

    prompts = plain(prompts)
    alone = isinstance(prompts, str) or (is_token_ids(prompts) and len(prompts) > 0)
    if alone:
        prompts = [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is a {type(prompts).__name__} (give a text, a list of token ids, or a list of them)"
        )
    prompts = [plain(prompt) for prompt in prompts]
    for prompt in prompts:
        if not isinstance(prompt, str) and not is_token_ids(prompt):
            raise RequestError(f"prompt {str(prompt)[:40]!r} is neither a text nor a list of token ids (give one)")
    return prompts, alone


def _tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise EngineError(
            f"{path} is not a tokenizer: {error} (download the checkpoint's again, then rebuild)"
        ) from None
    tokenizer.no_truncation()  # settings of whoever saved the file, not of this prompt
    tokenizer.no_padding()
    return tokenizer


def _emit(request: Request, verified: Verified, slot: int, position: int) -> None:
    """Hand a sequence's new tokens to its request; ``position`` is that of the first one."""
    accepted = int(verified.accepted_count[slot])
    status = int(verified.status[slot])
    if status:
        request.fail(_STATUS[status].format(position=position))
        return
    request.extend(verified.output_ids[slot, : accepted + 1].tolist())


def _engine_directory(model: str | Path | None, speculative_model: str | Path | None) -> Path:
    if model is None:
        if speculative_model is not None:
            raise RequestError(f"speculative_model {speculative_model} without a model (give the target as well)")
        return cached_engine(*demo_pair())
    model = Path(model)
    if not model.is_dir():
        raise RequestError(f"{model} is not a directory (give an engine's or a target checkpoint's)")
    if is_engine(model):
        if speculative_model is not None:
            raise RequestError(f"{model} is an engine and has its drafter inside (leave speculative_model out)")
        return model
    return cached_engine(model, None if speculative_model is None else Path(speculative_model))


def _length_remedy(prompt: int, limit: int) -> str:
    if prompt >= limit:
        return f"shorten the prompt to at most {limit - 1} tokens, or rebuild with a larger --max-seq-len"
    return f"lower max_tokens to {limit - prompt}, or rebuild with a larger --max-seq-len"
