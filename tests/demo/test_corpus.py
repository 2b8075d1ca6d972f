"""Text, tokens and prompts: nothing of the held-out text is ever trained on."""

import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from ddtree.demo.corpus import HELD_OUT_FILES, KINDS, generated_texts, held_out_files, stdlib_texts, training_files
from ddtree.demo.prompts import PROMPT_TOKENS, cut, held_out_prompts
from ddtree.demo.recipe import END_ID, END_TOKEN, MASK_ID, MASK_TOKEN
from ddtree.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(generated_texts(200, held_out=False), 600)


def test_held_out_files_exist_and_are_no_training_files():
    training = {name for name, _ in training_files()}
    held_out = {name for name, _ in held_out_files()}
    assert held_out == set(HELD_OUT_FILES)
    assert not training & held_out
    assert len(training) > 400
    assert not any("site-packages" in name or name.startswith(("test/", "encodings/")) for name in training)


@pytest.mark.parametrize("kind", KINDS)
def test_no_prompt_is_part_of_the_training_text(kind, tokenizer):
    prompts = held_out_prompts(kind, 40, tokenizer=tokenizer)
    assert len(set(prompts)) == 40
    training = "\0".join(stdlib_texts(held_out=False) if kind == "stdlib" else generated_texts(3000, held_out=False))
    assert not [prompt for prompt in prompts if prompt in training]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_repeat_for_a_seed_and_differ_for_another(kind, tokenizer):
    assert held_out_prompts(kind, 5, 1, tokenizer=tokenizer) == held_out_prompts(kind, 5, 1, tokenizer=tokenizer)
    assert held_out_prompts(kind, 5, 1, tokenizer=tokenizer) != held_out_prompts(kind, 5, 2, tokenizer=tokenizer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_encodes_to_the_tokens_it_was_cut_at(kind, tokenizer):
    for prompt in held_out_prompts(kind, 20, tokenizer=tokenizer):
        assert PROMPT_TOKENS - 4 <= len(tokenizer.encode(prompt).ids) <= PROMPT_TOKENS


def test_a_cut_inside_a_character_moves_to_a_whole_one(tokenizer):
    text = "a 😀 b"  # four bytes, no merges for them: four tokens
    spelled = [cut(tokenizer, text, count) for count in range(1, len(tokenizer.encode(text).ids) + 1)]
    assert all(text.startswith(part) for part in spelled)
    assert spelled[-1] == text
    for part in spelled:
        assert tokenizer.encode(part).ids == tokenizer.encode(text).ids[: len(tokenizer.encode(part).ids)]


def test_an_unknown_kind_is_named(tokenizer):
    with pytest.raises(ValueError, match="'poem'"):
        held_out_prompts("poem", 1, tokenizer=tokenizer)


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("def f(x):\n\treturn x\r\n\n\n  # naïve — 😀\x00", "a  b   c\n \n", *stdlib_texts(held_out=True)):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer):
    assert [token for token in tokenizer.encode("x = 2048").tokens if token.isdigit()] == ["2", "0", "4", "8"]


def test_special_tokens_have_their_ids_and_no_text_has_them(tokenizer):
    assert tokenizer.token_to_id(END_TOKEN) == END_ID
    assert tokenizer.token_to_id(MASK_TOKEN) == MASK_ID
    for text in stdlib_texts(held_out=False):
        assert END_TOKEN not in text
        assert MASK_TOKEN not in text


def test_prompts_do_not_import_torch():
    """`ddtree generate` starts fast: torch is loaded only when a model is."""
    script = "import sys, ddtree.demo.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
