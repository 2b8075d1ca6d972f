"""Text while it arrives is the beginning of the text that the tokenizer decodes in one go."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from ddtree.runtime.detokenizer import Detokenizer
from ddtree.runtime.vocabulary import Vocabulary

from . import tokenizers_of_bytes

TOKENIZERS = {name: make() for name, make in tokenizers_of_bytes.ALL.items()}


def detokenizer(tokenizer: Tokenizer, skip_special_tokens: bool = True) -> Detokenizer:
    return Detokenizer(tokenizer, Vocabulary(tokenizer, tokenizer.get_vocab_size(), []).byte_ids, skip_special_tokens)


@st.composite
def streams(draw) -> tuple[str, list[list[int]]]:
    """Tokens in the rounds that they arrive in: whole texts and random tokens, which are mostly no UTF-8."""
    name = draw(st.sampled_from(sorted(TOKENIZERS)))
    tokenizer = TOKENIZERS[name]
    text = st.text("ab é☃😀�\n", max_size=8).map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    token = st.integers(0, tokenizer.get_vocab_size() - 1).map(lambda token: [token])
    special = st.sampled_from(sorted(tokenizer.get_added_tokens_decoder()) or [0]).map(lambda token: [token])
    ids = list(itertools.chain(*draw(st.lists(text | token | special, max_size=40))))
    ids *= draw(st.sampled_from([1, 1, 3]))
    borders = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    return name, [ids[a:b] for a, b in itertools.pairwise([0, *borders, len(ids)])]


@settings(max_examples=300, deadline=None)
@given(streams(), st.booleans())
def test_text_grows_to_what_the_tokenizer_decodes(stream, skip_special_tokens):
    name, rounds = stream
    tokenizer = TOKENIZERS[name]
    made, texts = detokenizer(tokenizer, skip_special_tokens), [""]
    for token_ids in rounds:
        made.extend(token_ids)
        texts.append(made.text)
    made.finish()
    assert made.text == tokenizer.decode([*itertools.chain(*rounds)], skip_special_tokens=skip_special_tokens)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise([*texts, made.text]))


def test_a_character_appears_with_its_last_byte():
    tokenizer = TOKENIZERS["byte level"]
    made, texts = detokenizer(tokenizer), []
    for token in tokenizer.encode("é😀!").ids:
        made.extend([token])
        texts.append(made.text)
    assert texts == ["", "é", "é", "é", "é", "é😀", "é😀!"]


def test_bytes_that_are_decoded_together_appear_when_they_are_certain():
    """Their decoder writes E2 98 83 as a snowman, and E2 98 83 E2 as four replacement characters."""
    tokenizer = TOKENIZERS["byte fallback"]
    made, texts = detokenizer(tokenizer), []
    for token in tokenizer.encode("☃\na", add_special_tokens=False).ids:
        made.extend([token])
        texts.append(made.text)
    assert texts == ["", "", "", "", "☃\na"]


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_long_text_is_not_decoded_again_and_again(monkeypatch, name):
    tokenizer, lengths = TOKENIZERS[name], []
    made = detokenizer(tokenizer)
    decode = Detokenizer._decode
    monkeypatch.setattr(Detokenizer, "_decode", lambda self, ids: (lengths.append(len(ids)), decode(self, ids))[1])
    for token in tokenizer.encode("ab é☃😀" * 500).ids:
        made.extend([token])
    assert made.text == "ab é☃😀" * 500
    assert max(lengths) < 50


@pytest.mark.parametrize("name", ["byte fallback", "metaspace"])
def test_space_behind_tokens_that_are_left_out_stays(name):
    """A decoder that strips the first space of what it decodes must not take it for the first space of the text."""
    tokenizer = TOKENIZERS[name]
    a, end = tokenizer.token_to_id("▁a"), tokenizer.token_to_id(tokenizers_of_bytes.SPECIAL)
    for count in range(1, 80):
        made = detokenizer(tokenizer)
        for token in [*[a] * count, end, a]:
            made.extend([token])
        assert made.text == "a" + " a" * count


@pytest.mark.parametrize("name", TOKENIZERS)
def test_nothing_is_an_empty_text(name):
    made = detokenizer(TOKENIZERS[name])
    made.extend([])
    made.finish()
    assert made.text == ""
