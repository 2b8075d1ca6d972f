"""What a request changes in the logits before the filters: bias, penalties, bad words, minimum length, grammar.

The changes depend on the tokens before a node: the request's context and the node's own path in the tree. So they are
made row by row as verification walks, on the rows that it visits and on no other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(kw_only=True, eq=False)
class RowRules:
    """The rules of one request, and the tokens that they look back on. Give each sequence its own.

    Applied in the order of the fields, in float32, then ``token_bitmask``. After a round, ``advance`` by the tokens
    that it emitted; the root's token is then part of the context already, as the prompt's last token is at the start.

    Raises:
        ValueError: a token id outside of the vocabulary, or a setting outside of its range; one line that names it.
    """

    vocab_size: int  # length of a row of logits
    prompt_token_ids: Sequence[int]
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token -> added to its logit; -inf forbids it
    # Over tokens of prompt and output, as Hugging Face transformers: negative logits times it, others divided by it.
    repetition_penalty: float = 1.0
    # Over tokens of the output, as OpenAI's API: logit - presence_penalty - frequency_penalty * times it is there.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Token sequences, in prompt and output: the last token is forbidden where those before it are the last ones.
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0  # end_token_ids are forbidden until the output has so many tokens
    end_token_ids: Sequence[int] = ()  # end id and stop ids
    # A grammar: gets the tokens below the root on the way to a node, [] at the root, and returns which tokens may
    # follow, int32 [ceil(vocab_size / 32)] on the CPU, bit v % 32 of word v // 32; None: all. Called once a visited
    # node, from the root down, and what it raises ends the whole call: for an error of this request alone return zeros.
    token_bitmask: Callable[[list[int]], Tensor | None] | None = None

    def __post_init__(self) -> None:
        penalty = np.float32(self.repetition_penalty)
        if not 0 < penalty < math.inf:
            raise ValueError(f"repetition_penalty {self.repetition_penalty} is not above 0 and finite (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(np.float32(getattr(self, name))):
                raise ValueError(f"{name} {getattr(self, name)} is not finite (0 is off)")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens {self.min_tokens} is negative (0 is off)")
        for token, bias in self.logit_bias.items():
            if not np.float32(bias) < math.inf:
                raise ValueError(f"logit_bias {bias} of token {token} is neither finite nor -inf")
        if any(len(word) == 0 for word in self.bad_words):
            raise ValueError("bad_words has an empty sequence (leave it out)")
        self._bias_ids = self._ids("logit_bias", [*self.logit_bias])
        self._bias = np.array([*self.logit_bias.values()], np.float32)
        self._end_ids = self._ids("end_token_ids", self.end_token_ids)
        words = [self._ids("bad_words", word).tolist() for word in self.bad_words]
        self._bad_ids = np.array([word[0] for word in words if len(word) == 1], np.int64)
        self._bad_ends = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._look_back = max((len(before) for before, _ in self._bad_ends), default=0)

        self._seen = np.zeros(self.vocab_size, bool)  # in prompt or output
        self._counts = np.zeros(self.vocab_size, np.int32)  # in the output
        self._generated = 0
        self._last: list[int] = []  # tokens of the context, as many as bad words look back on
        self._take("prompt_token_ids", self.prompt_token_ids)

    @property
    def active(self) -> bool:
        """Whether a row may still be changed. Where not, verification is that of a request without rules."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or (self._end_ids.size and self._generated < self.min_tokens)
            or self.token_bitmask is not None
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that a round emitted (accepted and bonus) into the context.

        Raises:
            ValueError: a token id outside of the vocabulary; nothing was taken.
        """
        tokens = self._take("token_ids", token_ids)
        np.add.at(self._counts, tokens, 1)
        self._generated += len(tokens)

    def changed(self, row: NDArray, path: Sequence[int]) -> NDArray:
        """The logits after all rules but ``token_bitmask``: a new array, -inf where a token is forbidden.

        Args:
            row: float32 [vocab_size], the target's logits at a node.
            path: the tokens below the root on the way to that node, its own last.
        """
        row = row.copy()
        tokens = np.array(path, np.int64)
        row[self._bias_ids] += self._bias
        if self.repetition_penalty != 1:
            seen = self._seen.copy()
            seen[tokens] = True
            ids = seen.nonzero()[0]
            penalty, logits = np.float32(self.repetition_penalty), row[ids]
            row[ids] = np.where(logits < 0, logits * penalty, logits / penalty)
        if self.presence_penalty or self.frequency_penalty:
            counts = self._counts.copy()
            np.add.at(counts, tokens, 1)
            ids = counts.nonzero()[0]
            row[ids] -= np.float32(self.presence_penalty)
            row[ids] -= np.float32(self.frequency_penalty) * counts[ids].astype(np.float32)
        row[self._bad_ids] = -np.inf
        last = [*self._last, *path]
        row[[end for before, end in self._bad_ends if last[-len(before) :] == before]] = -np.inf
        if self._generated + len(path) < self.min_tokens:
            row[self._end_ids] = -np.inf
        return row

    def _take(self, name: str, token_ids: Sequence[int]) -> NDArray:
        tokens = self._ids(name, token_ids)
        self._seen[tokens] = True
        if self._look_back:
            self._last = [*self._last, *tokens.tolist()][-self._look_back :]
        return tokens

    def _ids(self, name: str, token_ids: Sequence[int]) -> NDArray:
        ids = np.array(token_ids, np.int64)
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"{name} holds token {outside[0]}: the vocabulary has 0 to {self.vocab_size - 1}")
        return ids
