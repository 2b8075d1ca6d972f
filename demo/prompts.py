"""Prompts for trying and measuring the demo pair. None of them is part of the text that the pair was trained on."""

import random

from tokenizers import Tokenizer

from ddtree.demo import TARGET_DIR
from ddtree.demo.corpus import HELD_OUT_FILES, KINDS, stdlib_texts
from ddtree.demo.generator import FIRST_HELD_OUT_SEED, generate

__all__ = ["DEFAULT_PROMPT", "KINDS", "held_out_prompts"]

# What `ddtree generate` continues when it is given no prompt.
DEFAULT_PROMPT = (
    "Mia and the golden kite\n\nNear the lake there lived a baker named Mia. "
    "She had a golden kite, a present from her friend Tom. One windy morning the golden kite was gone."
)

PROMPT_TOKENS = 48
_PIECE = 1_000  # characters that surely hold PROMPT_TOKENS tokens


def held_out_prompts(kind: str, count: int, seed: int = 0, *, tokenizer: Tokenizer | None = None) -> list[str]:
    """`count` prompts of about 48 tokens, the same for the same seed (and, for "stdlib", the same Python version).

    kind: "stdlib" (pieces of held-out files of the running interpreter's standard library, from the start of a line),
    "problem", "story" or "function" (the beginnings of documents of held-out generator seeds). Each prompt ends where a
    token of its text does, so that encoding it gives exactly those tokens.

    tokenizer: the demo target's, by default read from the package.
    Raises ValueError for another kind, FileNotFoundError where there is no standard library in source form.
    """
    if kind not in KINDS:
        raise ValueError(f"no prompts of kind {kind!r} (known: {', '.join(KINDS)})")
    tokenizer = tokenizer or Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    rng = random.Random(f"prompts {kind} {seed}")
    if kind == "stdlib":
        texts = [text for text in stdlib_texts(held_out=True) if len(text) > 2 * _PIECE]
        if not texts:
            raise FileNotFoundError(f"this Python has none of {', '.join(HELD_OUT_FILES)} as source files")
        pieces = [_piece(rng, texts) for _ in range(count)]
    else:
        pieces = [generate(kind, FIRST_HELD_OUT_SEED + rng.randrange(10**9)) for _ in range(count)]
    return [cut(tokenizer, piece, PROMPT_TOKENS) for piece in pieces]


def cut(tokenizer: Tokenizer, text: str, tokens: int) -> str:
    """What the first `tokens` tokens of `text` spell, or a few fewer where that would encode to other tokens."""
    encoding = tokenizer.encode(text)
    for count in range(min(tokens, len(encoding.ids)), 0, -1):
        beginning = text[: encoding.offsets[count - 1][1]]
        if tokenizer.encode(beginning).ids == encoding.ids[:count]:
            return beginning
    raise ValueError(f"no beginning of {text[:40]!r} encodes as it does within the text")


def _piece(rng: random.Random, texts: list[str]) -> str:
    """A piece of one of the texts that begins with a line that is not blank; long texts are taken more often."""
    text = rng.choices(texts, [len(text) for text in texts])[0]
    start = text.index("\n", rng.randrange(len(text) - 2 * _PIECE)) + 1
    while text[start] == "\n":
        start += 1
    return text[start : start + _PIECE]
