"""One sequence while it is served: what it has written, and when it ends."""

import bisect
from collections.abc import Sequence

from ddtree.plugins.row_rules import RowRules
from ddtree.runtime.detokenizer import Detokenizer
from ddtree.runtime.errors import RequestError
from ddtree.runtime.grammar import GrammarState
from ddtree.runtime.results import FinishReason, Statistics
from ddtree.runtime.sampling_params import SEED_LIMIT, SamplingParams
from ddtree.runtime.stop_strings import StopStrings
from ddtree.runtime.vocabulary import Vocabulary

SEED_STEP = 0x9E3779B97F4A7C15


class Request:
    """One sequence of a request. One thread at a time may use it.

    Args:
        request_id: of the request, which has ``params.n`` sequences.
        index: of this sequence among them.
        prompt: the prompt's text, if it was given as one.
        prompt_token_ids: at least one.
        params: is kept: copy what the caller may change.
        seed: of the request; this sequence's is ``seed XOR index * SEED_STEP``.
        vocabulary: the engine's.

    Attributes:
        finish_reason: None while it runs.
        stop_reason: the stop token's id or the stop string that was met; None for the end token.
        error: one line, if ``finish_reason`` is "error".
        statistics: the scheduler keeps them.

    Raises:
        RequestError: a setting is refused.
    """

    def __init__(
        self,
        *,
        request_id: int,
        index: int,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        vocabulary: Vocabulary,
    ):
        params.check(vocabulary.size)
        self.request_id = request_id
        self.index = index
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.seed = seed ^ (index * SEED_STEP % SEED_LIMIT)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.statistics = Statistics()

        self._vocabulary = vocabulary
        self._end_ids = frozenset() if params.ignore_eos else vocabulary.end_ids
        if params.end_id is not None and not params.ignore_eos:
            self._end_ids = frozenset([params.end_id])
        self._stop_ids = frozenset(params.stop_token_ids or [])
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._unread = 0  # 1 if the last token ended the text and is not in it
        self._detokenizer = Detokenizer(vocabulary.tokenizer, vocabulary.byte_ids, params.skip_special_tokens)
        self._read = 0  # tokens that the detokenizer has had
        self._stops = StopStrings(params.stop_texts()) if params.stop_texts() else None
        self._lengths: list[int] = []  # with stop strings: characters of the text up to each token
        self._text_end: int | None = None  # characters of the text to show, if not all
        self._bad_words = vocabulary.bad_words(params.bad_texts())
        self._grammar = self._new_grammar()
        self._has_rules = bool(params.row_rule_settings())
        self._rules: RowRules | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far, less what may still be cut off or change. It only grows."""
        if self._stops is None or self.finished:
            self._detokenize()
        if self.finished:
            self._detokenizer.finish()
        return self._detokenizer.text[: self._text_end]

    @property
    def output_ids(self) -> list[int]:
        """The tokens so far, less those that a stop string may still cut off. They only grow as well, but where a
        tokenizer spells characters in byte tokens: the last of those may be taken back."""
        return self._ids[: self._shown]

    @property
    def logprobs(self) -> list[float] | None:
        """One for each of ``output_ids``, if asked for."""
        return None if self.params.logprobs is None else self._logprobs[: self._shown]

    @property
    def cumulative_logprob(self) -> float | None:
        """Their sum."""
        logprobs = self.logprobs
        return None if logprobs is None else sum(logprobs)

    @property
    def row_rules(self) -> RowRules | None:
        """For ``verify_tree``, in step with the tokens emitted so far. None where no setting needs them."""
        if self._rules is None and self._has_rules and not self.finished:
            self._rules = self._new_rules()
        return self._rules

    def extend(self, token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
        """Append what a round emitted, up to where the text ends; ``logprobs`` are needed if asked for."""
        for at, token in enumerate(token_ids):
            self._ids.append(token)
            if self.params.logprobs is not None:
                assert logprobs is not None
                self._logprobs.append(logprobs[at])
            self._end_at(token)
            if self.finished:
                return
        if self._rules is not None:
            self._rules.advance(token_ids)
        if self._grammar is not None:
            self._grammar.advance(token_ids)

    def cancel(self, reason: FinishReason) -> None:
        """End with what there is."""
        self._finish(reason)

    def fail(self, message: str) -> None:
        """End with an error of one line."""
        self.error = (self._grammar and self._grammar.error) or message
        self._finish("error")

    def _end_at(self, token: int) -> None:
        """End the text with this token, the last one, if it ends there."""
        params = self.params
        ends = token in self._stop_ids or token in self._end_ids
        full = len(self._ids) == params.max_tokens
        self._unread = int(ends and not params.include_stop_str_in_output)
        if self._stops is not None and self._meets_stop_string(self._stops, last=ends or full):
            return
        if ends:
            self._finish("stop", token if token in self._stop_ids else None)
        elif full:
            self._finish("length")

    def _meets_stop_string(self, stops: StopStrings, *, last: bool) -> bool:
        """Read the last token; cut and end the text if that makes a stop string whole."""
        searched = len(self._detokenizer.text)
        self._detokenize()
        if last:
            self._detokenizer.finish()
        text, keep = self._detokenizer.text, self.params.include_stop_str_in_output
        self._lengths.append(len(text))
        for start, end in stops.found(text, searched):
            length = end if keep else start
            count = self._spelled_by(text[:length])
            if count >= self.params.min_tokens:
                del self._ids[count:], self._logprobs[count:]
                self._finish("stop", text[start:end], length)
                return True
        self._text_end = len(text) - (0 if keep else stops.undecided(text))
        return False

    def _spelled_by(self, text: str) -> int:
        """The fewest tokens whose text begins with ``text``, itself the beginning of all tokens' text."""
        decode, skip = self._vocabulary.tokenizer.decode, self.params.skip_special_tokens
        count = self._tokens_up_to(len(text))
        while count and decode(self._ids[: count - 1], skip_special_tokens=skip).startswith(text):
            count -= 1
        return count

    def _tokens_up_to(self, length: int) -> int:
        """How many tokens had to be read for so many characters."""
        return bisect.bisect_left(self._lengths, length) + 1 if length else 0

    @property
    def _shown(self) -> int:
        """How many tokens are certain to stay."""
        if self.finished or self._text_end is None:
            return len(self._ids)
        return self._tokens_up_to(self._text_end)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None, length: int | None = None) -> None:
        self.finish_reason, self.stop_reason, self._text_end = reason, stop_reason, length
        self._rules = self._grammar = None  # as large as the vocabulary, and whoever holds the result holds this

    def _detokenize(self) -> None:
        """Give the detokenizer the tokens that it has not had."""
        end = len(self._ids) - self._unread
        self._detokenizer.extend(self._ids[self._read : end])
        self._read = max(self._read, end)

    def _new_grammar(self) -> GrammarState | None:
        guided = self.params.guided_decoding
        if guided is None:
            return None
        if not self._end_ids:
            raise RequestError("guided_decoding needs an end token and the checkpoint names none (set end_id)")
        vocabulary = self._vocabulary
        return GrammarState(vocabulary.grammars.compile(guided), vocabulary.size, sorted(self._end_ids))

    def _new_rules(self) -> RowRules:
        """Made when the sequence gets its turn: those of a long queue would fill the memory."""
        params = self.params
        rules = RowRules(
            vocab_size=self._vocabulary.size,
            prompt_token_ids=self.prompt_token_ids,
            logit_bias=params.biases(),
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            bad_words=[*self._bad_words, *([token] for token in params.bad_token_ids or [])],
            min_tokens=params.min_tokens,
            end_token_ids=sorted(self._end_ids | self._stop_ids),
            token_bitmask=None if self._grammar is None else self._grammar.bitmask,
        )
        rules.advance(self._ids)
        return rules
