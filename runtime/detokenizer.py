"""Tokens to text while they arrive."""

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one request so far. A character whose bytes span tokens appears when its last byte has arrived."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        self.text = ""
        self._stream = DecodeStream(skip_special_tokens=True)

    def extend(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        for token in token_ids:
            self.text += self._stream.step(self.tokenizer, token) or ""

    def finish(self) -> None:
        """Nothing more will come: add what is left of an unfinished character."""
        self.text = self.tokenizer.decode(self.token_ids, skip_special_tokens=True)
