"""The Python API: text out of an engine directory or a pair of checkpoints."""

import itertools
import time
import weakref
from collections.abc import Callable
from copy import deepcopy
from numbers import Integral
from pathlib import Path
from typing import Any, TypeGuard, overload

from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from ddtree.builder import is_engine
from ddtree.builder.build import MAX_TREE_NODES, TOKENIZER
from ddtree.plugins.tree import DraftTree, Verified
from ddtree.runtime.chat import ChatTemplate, Message
from ddtree.runtime.engine import open_engine
from ddtree.runtime.engine_cache import cached_engine, demo_pair
from ddtree.runtime.errors import EngineError, RequestError
from ddtree.runtime.request import Request
from ddtree.runtime.results import GenerationResult, OutputStream, RequestOutput
from ddtree.runtime.round import METHODS, Method
from ddtree.runtime.sampling_params import SamplingParams
from ddtree.runtime.scheduler import Drafting, Scheduler
from ddtree.runtime.vocabulary import Vocabulary
from ddtree.runtime.worker import Worker

Prompt = str | list[int]
DEFAULT_BUDGET = 16  # on a CPU small trees pay and large ones do not: docs/benchmarks.md


class LLM:
    """A target and its drafter, ready to generate.

    Args:
        model: an engine directory, or a Hugging Face checkpoint directory, whose engine is then built into the cache;
            None is the demo pair.
        speculative_model: the DFlash drafter's checkpoint directory, if ``model`` is a checkpoint.
        method: "ddtree" (the tree), "chain" (the same drafter's chain, as DFlash), or "ar" (plain decoding). All three
            write the same text.
        budget: the most draft nodes of a tree, root excluded.
        adaptive: verify fewer nodes, and do without a draft, where more would cost time; the first request of the
            method "ddtree" then times some rounds (0.1 s with a small model). Else every round has a tree of ``budget``
            nodes.
        threads: threads of a pass; None leaves it to the engine.
        max_batch_size: the most sequences that run together; None: as many as the engine was built for.
        max_queue_size: the most sequences that wait behind them.

    Any number of threads may use it at once: their requests share batches, and each text is the one that its request
    gives alone. A thread of its own does the work, from the first request on. ``shutdown``, or leaving a ``with``
    block, ends it; so does the end of the last reference to the LLM and its results, or of the program.

    Attributes:
        method, budget, adaptive: may be set between requests; a request keeps what was set when it was submitted.
            Requests of one setting share batches, those of another wait for the batch to end.
        on_round: called after each round with its DraftTree and Verified, in the thread that does the work.

    Raises:
        BuildError, EngineError: the checkpoint or engine cannot be used.
        RequestError: a setting does not fit the engine.
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
        max_batch_size: int | None = None,
        max_queue_size: int = 1024,
    ):
        if threads is not None and not _is_whole(threads):
            raise RequestError(f"threads {_shown(threads)} is not a whole number (use 1 or more)")
        _check_count("max_queue_size", max_queue_size, 0)
        self._directory = directory = _engine_directory(model, speculative_model)
        self.engine = open_engine(directory, threads)
        self.manifest = self.engine.manifest
        self.tokenizer = _tokenizer(directory / TOKENIZER)
        target = self.manifest.target
        self._vocabulary = Vocabulary(self.tokenizer, target.vocab_size, target.eos_token_ids)
        self.method: Method = method or ("ddtree" if self.manifest.draft else "ar")
        self.budget = min(DEFAULT_BUDGET, self.manifest.limits.max_tree_nodes) if budget is None else budget
        self.adaptive = adaptive
        self._check_drafting()
        slots = self._checked_slots(max_batch_size)
        self._scheduler = Scheduler(self.engine, slots)
        self._worker = Worker(self._scheduler, slots, max_queue_size)
        self._finalizer = weakref.finalize(self, self._worker.shutdown)
        self._chat_template: ChatTemplate | None = None
        self._request_ids = itertools.count()

    @property
    def on_round(self) -> Callable[[DraftTree, Verified], None] | None:
        return self._scheduler.on_round

    @on_round.setter
    def on_round(self, call: Callable[[DraftTree, Verified], None] | None) -> None:
        self._scheduler.on_round = call

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the thread that serves requests; later ones are refused.

        Args:
            drain: finish the requests that there are. Else they are cancelled.
        """
        self._worker.shutdown(drain=drain)

    @overload
    def generate(
        self, prompts: Prompt, sampling_params: SamplingParams | None = None, use_tqdm: bool = False
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]: ...

    def generate(self, prompts, sampling_params=None, use_tqdm=False):
        """Complete one prompt or many, and wait for them. More prompts than the queue holds are no error: they follow
        as it empties.

        Args:
            prompts: texts, or lists of token ids.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar on standard error.

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
        drafting = self._current_drafting()
        results = [
            self._result(*self._encoded(prompt), params, streaming=False)
            for prompt, params in zip(prompts, given, strict=True)
        ]
        outputs = self._served(results, drafting, use_tqdm)
        return outputs[0] if alone else outputs

    def generate_async(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> GenerationResult:
        """Submit one prompt and return at once.

        Args:
            prompt: a text, or a list of token ids.
            sampling_params: its settings.
            streaming: whether the result has an output after each round, or the finished one alone.

        Raises:
            RequestError: the prompt or a setting is refused.
            QueueFullError: as many requests wait as may; try again later.
        """
        (prompt,), _ = _prompts([prompt])
        drafting = self._current_drafting()
        result = self._result(*self._encoded(prompt), sampling_params, streaming=streaming)
        self._worker.submit(result, drafting, wait=False)
        return result

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> OutputStream:
        """Complete one prompt and yield what there is after each round; the last output is the finished one. Closing
        the iterator ends the request.

        Raises:
            RequestError: the prompt or a setting is refused.
            QueueFullError: as many requests wait as may; try again later.
        """
        return OutputStream(self.generate_async(prompt, sampling_params, streaming=True))

    def chat(self, messages: list[Message], sampling_params: SamplingParams | None = None) -> RequestOutput:
        """Write the next message of a conversation, and wait for it.

        Args:
            messages: dicts of ``role`` and ``content``, which the tokenizer's chat template makes a prompt of.
            sampling_params: its settings.

        Raises:
            RequestError: the tokenizer has no chat template, or a message or a setting is refused.
        """
        if self._chat_template is None:
            self._chat_template = ChatTemplate(self._directory)
        text = self._chat_template.prompt(messages)
        drafting = self._current_drafting()
        # The template spells special tokens out; the tokenizer would add some of them once more.
        ids = self.tokenizer.encode(_unicode(text), add_special_tokens=False).ids
        (output,) = self._served([self._result(text, ids, sampling_params, streaming=False)], drafting)
        return output

    def _served(
        self, results: list[GenerationResult], drafting: Drafting, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Submit requests, and wait for all of them."""
        try:
            for result in results:
                self._worker.submit(result, drafting, wait=True)
            awaited = track(results, "generating", console=Console(stderr=True)) if use_tqdm else results
            return [result.result() for result in awaited]
        except BaseException:  # an interrupt above all
            for result in results:
                result.abort()
            raise

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it is one, and its token ids."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(_unicode(prompt)).ids
        return None, [int(token) for token in prompt]

    def _result(
        self, text: str | None, ids: list[int], params: SamplingParams | None, *, streaming: bool
    ) -> GenerationResult:
        """A request that has been checked, and not submitted yet."""
        limits, target = self.manifest.limits, self.manifest.target
        if not isinstance(params, SamplingParams | None):
            kind = type(params).__name__
            raise RequestError(f"sampling_params is a {kind} (give a SamplingParams, or a list of one for each prompt)")
        params = params or SamplingParams()
        params.check(target.vocab_size)
        params = deepcopy(params)  # the caller may change theirs while this one runs
        if params.n > self._worker.capacity:
            raise RequestError(
                f"n {params.n} is more than batch and queue hold together "
                f"(use at most {self._worker.capacity}, or open the LLM with a larger max_queue_size)"
            )
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
        request_id, arrival, seed = next(self._request_ids), time.monotonic(), params.resolved_seed()
        sequences = [
            Request(
                request_id=request_id,
                index=index,
                prompt=text,
                prompt_token_ids=ids,
                params=params,
                seed=seed,
                vocabulary=self._vocabulary,
            )
            for index in range(params.n)
        ]
        for sequence in sequences:
            sequence.statistics.arrival_time = arrival
        return GenerationResult(
            sequences, streaming=streaming, abort=self._abort, check_may_wait=self._worker.check_may_wait
        )

    def _abort(self, result: GenerationResult) -> None:
        # A method of this object, so that whoever holds a result keeps the LLM from being collected and shut down.
        self._worker.abort(result)

    def _checked_slots(self, max_batch_size: int | None) -> int:
        limit = self.manifest.limits.max_batch_size
        if max_batch_size is None:
            return limit
        _check_count("max_batch_size", max_batch_size, 1)
        if max_batch_size > limit:
            raise RequestError(
                f"max_batch_size {max_batch_size} exceeds the engine's {limit} "
                f"(rebuild with --max-batch-size {max_batch_size})"
            )
        return max_batch_size

    def _current_drafting(self) -> Drafting:
        self._check_drafting()
        return Drafting(self.method, self.budget, self.adaptive)

    def _check_drafting(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise RequestError(f"adaptive {_shown(self.adaptive)} is neither True nor False")
        draft, limit = self.manifest.draft, self.manifest.limits.max_tree_nodes
        if self.method not in METHODS:
            raise RequestError(f"method {self.method!r} is not known (use one of {', '.join(METHODS)})")
        if self.method == "ar":
            return
        if draft is None:
            raise RequestError(f"method {self.method!r} needs a drafter and the engine has none (build it with one)")
        if self.method not in self.engine.methods:
            raise RequestError(
                f"method {self.method!r} does not go with this {self.manifest.engine} engine, which makes trees inside "
                "(use ddtree or ar, or rebuild with --verify kernel)"
            )
        nodes = self.budget if self.method == "ddtree" else draft.max_depth
        if not _is_whole(nodes):
            raise RequestError(f"budget {_shown(nodes)} is not a whole number (use 0 to {limit})")
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
        return isinstance(value, list | tuple) and all(map(_is_whole, value))

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
            raise RequestError(f"prompt {_shown(prompt)} is neither a text nor a list of token ids (give one)")
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


def _unicode(prompt: str) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not Unicode at character {error.start} (use UTF-8 text)") from None
    return prompt


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a number that a token id or a count may be; one that no int64 holds is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and -(1 << 63) <= int(value) < 1 << 63


def _shown(value: object) -> str:
    """The value in an error message."""
    try:
        return repr(value)[:40]
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"{type(value).__name__} too long to show"


def _check_count(name: str, value: object, lowest: int) -> None:
    if not _is_whole(value):
        raise RequestError(f"{name} {_shown(value)} is not a whole number (use {lowest} or more)")
    if value < lowest:
        raise RequestError(f"{name} {value} is out of range (use {lowest} or more)")


def _engine_directory(model: str | Path | None, speculative_model: str | Path | None) -> Path:
    for name, path in (("model", model), ("speculative_model", speculative_model)):
        if path is not None and (not isinstance(path, str | Path) or not str(path)):
            raise RequestError(f"{name} {_shown(path)} is no path (give a directory's)")
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
