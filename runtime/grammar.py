"""Grammars that a text follows, by xgrammar (arXiv 2411.15100): what may come next on each path of a draft tree."""

import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

from ddtree.runtime.errors import RequestError
from ddtree.runtime.json_schema import json_schema_text
from ddtree.runtime.sampling_params import GuidedDecodingParams

_CACHE_BYTES = 256 << 20  # of compiled grammars that are kept: a server of ever new ones must not grow
_LONGEST = 1 << 16  # characters; compiling takes seconds for the worst of that length
_ANY_OBJECT = json.dumps({"type": "object", "additionalProperties": True})


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last ones. Any thread may use it.

    Raises:
        RequestError: xgrammar is not installed, or this tokenizer's tokens have no bytes of their own.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        try:
            from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
        except ImportError:
            raise RequestError("guided_decoding needs xgrammar (pip install 'ddtree-trtllm[grammar]')") from None
        decoder = b"" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
        if b"ByteLevel" not in decoder and b"ByteFallback" not in decoder:
            raise RequestError("guided_decoding needs a tokenizer with a ByteLevel or ByteFallback decoder")
        vocab_type = VocabType.BYTE_LEVEL if b"ByteLevel" in decoder else VocabType.BYTE_FALLBACK

        special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        tokens = [""] * vocab_size  # an empty token is in no text
        for text, token in tokenizer.get_vocab().items():
            if token < vocab_size and token not in special:
                tokens[token] = text
        info = TokenizerInfo(tokens, vocab_type, vocab_size=vocab_size, stop_token_ids=[])
        # Where a schema bounds the length of a string, xgrammar lets control characters into it, which JSON does not.
        # Elsewhere in JSON no other than line feeds are needed, so that other tokens with some are left out.
        no_controls = [b"" if re.search(rb"[\x00-\x09\x0b-\x1f]", token) else token for token in info.decoded_vocab]
        json_info = TokenizerInfo(no_controls, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[])
        self._compiler = GrammarCompiler(info, cache_limit_bytes=_CACHE_BYTES)
        self._json_compiler = GrammarCompiler(json_info, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, guided: GuidedDecodingParams) -> Any:
        """An ``xgrammar.CompiledGrammar``.

        Raises:
            RequestError: it is no grammar, or one that xgrammar does not take.
        """
        schema = json_schema_text(guided.json) if guided.json is not None else None
        for name, text in (("json", schema), ("regex", guided.regex), ("grammar", guided.grammar)):
            if text is not None and len(text) > _LONGEST:
                raise RequestError(f"guided_decoding.{name} has {len(text)} characters (use at most {_LONGEST})")
        try:
            if schema is not None:
                return self._json_compiler.compile_json_schema(schema)
            if guided.regex is not None:
                return self._compiler.compile_regex(guided.regex)
            if guided.grammar is not None:
                return self._compiler.compile_grammar(guided.grammar)
            return self._json_compiler.compile_json_schema(_ANY_OBJECT)
        except RuntimeError as error:
            raise RequestError(f"guided_decoding is refused by xgrammar: {_one_line(error)}") from None


class GrammarState:
    """How far one sequence is in its grammar, and what may follow it and paths below it.

    The matcher stands at the end of the last path that was asked for; for another one it goes back to where the two
    part, which xgrammar does exactly.

    Attributes:
        error: one line if xgrammar has contradicted itself; no token is allowed from then on.
    """

    def __init__(self, compiled: Any, vocab_size: int, end_ids: Sequence[int]):
        from xgrammar import GrammarMatcher, allocate_token_bitmask

        self._matcher = GrammarMatcher(compiled, override_stop_tokens=list(end_ids))
        self._words = allocate_token_bitmask(1, vocab_size)  # int32 [1, ceil(vocab_size / 32)]
        self._path: list[int] = []  # behind the tokens of ``advance``
        self.error: str | None = None

    def bitmask(self, path: list[int]) -> torch.Tensor | None:
        """``RowRules.token_bitmask``: what may follow these tokens; the tensor is valid until the next call."""
        self._go_to(path)
        if self.error is not None:
            return torch.zeros_like(self._words[0])
        if self._matcher.is_terminated():
            return None  # behind an end token, where the text is cut
        return self._words[0] if self._matcher.fill_next_token_bitmask(self._words) else None

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens into the text."""
        self._go_to(list(token_ids))
        self._path = []

    def _go_to(self, path: list[int]) -> None:
        """Let the matcher stand behind ``path``, or behind its first end token."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
            del self._path[common:]
        for token in path[common:]:
            if self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token):
                self.error = f"xgrammar refuses token {token}, which its mask allowed (report it with the grammar)"
                return
            self._path.append(token)


def _one_line(error: RuntimeError) -> str:
    """xgrammar's message without the time and the place in its source."""
    return re.sub(r"\[[\d:]+\] \S+:\d+: ", "", " ".join(str(error).split()))[:300]
