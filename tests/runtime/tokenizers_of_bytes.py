"""Tokenizers of the kinds that models have, small enough that random tokens are often half a character."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = "<|end|>"
PIECES = ["a", "b", "é", "☃", "😀", " a", "ab", "  ", "\n", "�", " 😀", "a☃"]


def byte_level(pieces: list[str] = PIECES) -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: every byte is a token, and so are some strings of bytes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [split.pre_tokenize_str(piece)[0][0] for piece in pieces]
    half_a_character = [text[:-1] for text in spelled if len(text) > 2]
    tokens = dict.fromkeys([*sorted(alphabet), *spelled, *half_a_character])
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: strings are tokens, and what has none is spelled in tokens of a byte."""
    pieces = [piece.replace(" ", "▁") for piece in PIECES if piece not in ("é", "☃", "\n")]
    tokens = dict.fromkeys(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *pieces])
    model = models.BPE({token: at for at, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5's: strings are tokens, and there are no others."""
    tokens = ["<unk>", "▁", *(piece.replace(" ", "▁") for piece in PIECES)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(dict.fromkeys(tokens))}, []))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True, normalized=False)])
    return tokenizer


def words() -> Tokenizer:
    """Words with a space between them; no decoder."""
    tokenizer = Tokenizer(models.WordLevel({f"w{at}": at for at in range(9)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


ALL = {"byte level": byte_level, "byte fallback": byte_fallback, "metaspace": metaspace, "words": words}
