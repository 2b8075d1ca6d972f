"""A conversation as a prompt, in the form that the model was taught: its tokenizer's chat template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddtree.runtime.errors import RequestError

Message = Mapping[str, Any]
"""``role`` and ``content``, and what else the template reads."""


class ChatTemplate:
    """The chat template among a tokenizer's files.

    Args:
        directory: of ``tokenizer.json``, and ``tokenizer_config.json`` or ``chat_template.jinja``.

    Raises:
        RequestError: there is no template, or transformers is not installed, which reads it.
    """

    def __init__(self, directory: Path):
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise RequestError(
                "chat needs transformers and Jinja2 (pip install 'ddtree-trtllm[chat]', or give generate the prompt)"
            ) from None
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"the tokenizer of {directory} has no chat template (use generate, or a checkpoint taught to chat)"
            )

    def prompt(self, messages: list[Message]) -> str:
        """The text of ``messages`` and of the beginning of an answer, special tokens spelled out.

        Raises:
            RequestError: the messages are none, or not what the template takes.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise RequestError("messages is not a list of messages (give one or more, each with role and content)")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(f"message {str(message)[:40]!r} is not a dict with a role (give role and content)")
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # what a template does is anybody's guess
            reason = " ".join(str(error).split())
            raise RequestError(f"the chat template does not take these messages: {reason} (change them)") from None
