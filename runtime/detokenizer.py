"""Tokens to text while they arrive."""

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_WINDOW = 32  # tokens that are decoded together, at least


class Detokenizer:
    """The text of one sequence so far. A character whose bytes span tokens appears when its last byte has arrived.

    Attributes:
        text: only ever grows, and is what ``tokenizer.decode`` gives for all tokens, less what may still change.

    Args:
        byte_ids: ``Vocabulary.byte_ids``. Their decoder writes a run of bytes as characters if all of it is UTF-8, else
            as a replacement character each, so no part of a run is certain before the run has ended.
    """

    def __init__(self, tokenizer: Tokenizer, byte_ids: frozenset[int] = frozenset(), skip_special_tokens: bool = True):
        self.text = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._undecided = byte_ids
        if byte_ids and skip_special_tokens:  # a token that is left out does not end a run
            added = tokenizer.get_added_tokens_decoder()
            self._undecided = byte_ids | {token for token, content in added.items() if content.special}
        # A decoder looks at a token's neighbours, so the last tokens are decoded anew with those that arrive.
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that ``text`` has
        self._border = 0  # where the latest tokens start in the window, if nothing was held back before them

    def extend(self, token_ids: Sequence[int]) -> None:
        self._window += token_ids
        end = len(self._window)
        while end and self._window[end - 1] in self._undecided:
            end -= 1
        decoded = self._decode(self._window[:end])
        settled = decoded.rstrip(REPLACEMENT)
        self._give(settled)
        if end < len(self._window) or len(settled) < len(decoded):
            return
        if end > _WINDOW and (latest := self._decode(self._window[self._border :])):
            self._window = self._window[self._border :]
            self._given = len(latest)
        self._border = len(self._window)

    def finish(self) -> None:
        """Nothing more will come: add what was held back."""
        self._give(self._decode(self._window))

    def _give(self, decoded: str) -> None:
        self.text += decoded[self._given :]
        self._given = max(self._given, len(decoded))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
