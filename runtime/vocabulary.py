"""What a model's tokens are: its tokenizer, how many logits it has, and which tokens end a text."""

import re
import threading
from collections.abc import Iterable
from functools import cached_property

from tokenizers import Tokenizer

from ddtree.runtime.errors import RequestError
from ddtree.runtime.grammar import GrammarCompiler

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class Vocabulary:
    """One for each LLM; any thread may use it.

    Attributes:
        tokenizer: without truncation and padding.
        size: the model's vocabulary, which may be padded beyond the tokenizer's.
        end_ids: the checkpoint's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: Iterable[int]):
        self.tokenizer = tokenizer
        self.size = size
        self.end_ids = frozenset(end_ids)
        self._lock = threading.Lock()
        self._grammars: GrammarCompiler | None = None

    @property
    def grammars(self) -> GrammarCompiler:
        """Made when the first request with a grammar comes."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer, self.size)
            return self._grammars

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that are one byte each, which the decoder joins to characters; none where a token is its own text."""
        if b"ByteFallback" not in (self.tokenizer.decoder.__getstate__() if self.tokenizer.decoder else b""):
            return frozenset()
        return frozenset(id for token, id in self.tokenizer.get_vocab().items() if _BYTE_TOKEN.fullmatch(token))

    def bad_words(self, texts: Iterable[str]) -> list[list[int]]:
        """The token sequences that spell these texts at the start of a word and inside of one.

        Raises:
            RequestError: a text that has no tokens, or one that the model does not have.
        """
        words = []
        for text in texts:
            encoded = [self.tokenizer.encode(start + text, add_special_tokens=False).ids for start in ("", " ")]
            if not encoded[0]:
                raise RequestError(f"bad {text!r} has no tokens (leave it out)")
            for token in {*encoded[0], *encoded[1]}:
                if token >= self.size:
                    raise RequestError(f"bad {text!r} has token {token} and the model has {self.size} (leave it out)")
            words += [word for word in encoded if word not in words]
        return words
