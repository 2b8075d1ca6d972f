"""The Python API: text out of an engine directory or a pair of checkpoints."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import overload

import torch
from tokenizers import Tokenizer

from ddtree.builder import is_engine
from ddtree.plugins.tree import DraftTree, Verified
from ddtree.runtime.batch import Batch
from ddtree.runtime.detokenizer import Detokenizer
from ddtree.runtime.engine import open_engine
from ddtree.runtime.engine_cache import cached_engine, demo_pair
from ddtree.runtime.errors import RequestError
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
        threads: threads of a pass; None leaves it to the engine.

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
        threads: int | None = None,
    ):
        directory = _engine_directory(model, speculative_model)
        self.engine = open_engine(directory, threads)
        self.manifest = self.engine.manifest
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.method = method or ("ddtree" if self.manifest.draft else "ar")
        self.budget = DEFAULT_BUDGET if budget is None else budget
        self._check_method()
        self.on_round: Callable[[DraftTree, Verified], None] | None = None
        self._next_request_id = 0

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
        alone = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        if alone:
            prompts = [prompts]
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} sampling_params for {len(prompts)} prompts (give one, or one for each)")
        requests = [self._request(prompt, p or SamplingParams()) for prompt, p in zip(prompts, params, strict=True)]
        for _ in self._serve(requests):
            pass
        outputs = [self._output(request, self._text(request)) for request in requests]
        return outputs[0] if alone else outputs

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield what there is after each round; the last output is the finished one."""
        request = self._request(prompt, sampling_params or SamplingParams())
        detokenizer = Detokenizer(self.tokenizer)
        for _ in self._serve([request]):
            detokenizer.extend(request.output_ids[len(detokenizer.token_ids) :])
            if request.finished:
                detokenizer.finish()
            yield self._output(request, detokenizer.text)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        limits, target = self.manifest.limits, self.manifest.target
        params.check(target.vocab_size)
        if isinstance(prompt, str):
            try:
                ids = self.tokenizer.encode(prompt).ids
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"the prompt is not valid Unicode at character {error.start} (use UTF-8 text)"
                ) from None
        else:
            ids = [int(token) for token in prompt]
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
        ends = [params.end_id] if params.end_id is not None else target.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids or []) | (frozenset() if params.ignore_eos else frozenset(ends))
        self._next_request_id += 1
        text = prompt if isinstance(prompt, str) else None
        return Request(self._next_request_id - 1, text, ids, params, params.resolved_seed(), stop_ids)

    def _serve(self, requests: list[Request]) -> Iterator[None]:
        """Run the requests to their ends, in batches that waiting requests join as others leave."""
        waiting = deque(requests)
        slots = min(len(requests), self.manifest.limits.max_batch_size)
        self.engine.reset(slots)
        draft = self.manifest.draft
        rows, width = (
            (draft.max_depth + 1, len(draft.target_layer_ids) * self.manifest.target.hidden_size) if draft else (0, 0)
        )
        batch = Batch(slots, rows, width, self.engine.dtype)
        while waiting or len(batch):
            with torch.inference_mode():
                if waiting and len(batch) < slots:
                    self._admit(batch, waiting.popleft())
                else:
                    self._decode(batch)
                for slot in reversed(range(len(batch))):
                    request = batch.requests[slot]
                    if request.finished:
                        self.engine.release(slot, batch.remove(slot), zero=request.error is not None)
            yield

    def _admit(self, batch: Batch, request: Request) -> None:
        start = time.perf_counter()
        verified = prefill(self.engine, batch, batch.add(request), self.method)
        _emit(request, verified, 0, len(request.prompt_token_ids))
        request.statistics.prefill_seconds = time.perf_counter() - start

    def _decode(self, batch: Batch) -> None:
        start = time.perf_counter()
        positions = (batch.past + 1).tolist()
        tree, verified = decode_round(self.engine, batch, self.method, self.budget)
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
            request.statistics,
            request.error,
        )

    def _check_method(self) -> None:
        if self.method not in METHODS:
            raise RequestError(f"method {self.method!r} is not known (use one of {', '.join(METHODS)})")
        if self.method != "ar" and self.manifest.draft is None:
            raise RequestError(
                f"method {self.method!r} needs a drafter and the engine has none (build it with one, or use 'ar')"
            )
        limit = self.manifest.limits.max_tree_nodes
        if self.budget < 0:
            raise RequestError(f"budget {self.budget} is negative (use 0 to {limit})")
        if self.budget > limit:
            remedy = f"rebuild with --budget {self.budget}"
            raise RequestError(f"budget {self.budget} exceeds the engine's max_tree_nodes {limit} ({remedy})")


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
    if is_engine(model):
        if speculative_model is not None:
            raise RequestError(f"{model} is an engine and has its drafter inside (leave speculative_model out)")
        return model
    return cached_engine(model, None if speculative_model is None else Path(speculative_model))


def _length_remedy(prompt: int, limit: int) -> str:
    if prompt >= limit:
        return f"shorten the prompt to at most {limit - 1} tokens, or rebuild with a larger --max-seq-len"
    return f"lower max_tokens to {limit - prompt}, or rebuild with a larger --max-seq-len"
