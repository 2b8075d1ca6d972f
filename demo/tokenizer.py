"""A byte-level BPE tokenizer: any text can be encoded, each digit is a token of its own."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ddtree.demo.recipe import END_ID, END_TOKEN, MASK_ID, MASK_TOKEN

# A line end with the indentation after it; a word with the one sign before it; a digit; other signs; blanks.
_PIECES = r"\n\s*|[^\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens, the two special ones (end of text, the drafter's mask) included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_TOKEN, special=True), AddedToken(MASK_TOKEN, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text has pieces for {tokenizer.get_vocab_size()} tokens only, not {vocab_size}")
    assert tokenizer.token_to_id(END_TOKEN) == END_ID
    assert tokenizer.token_to_id(MASK_TOKEN) == MASK_ID
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "pad_token": END_TOKEN,
        "mask_token": MASK_TOKEN,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
