"""Grammars: with every method the text of plain decoding under them, and one that independent readers accept."""

import contextlib
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic
import pytest
import regex
import torch
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from ddtree.builder import build_engine
from ddtree.demo import TARGET_DIR
from ddtree.runtime import LLM, RequestError, SamplingParams
from ddtree.runtime.grammar import GrammarCompiler, GrammarState
from ddtree.runtime.request import Request
from ddtree.runtime.sampling_params import GuidedDecodingParams
from ddtree.runtime.vocabulary import Vocabulary

from .conftest import EOS, VOCAB
from .test_lossless import drawn_token

TOKENS = ["{", "}", "[", "]", '"', ":", ",", " ", "-", "\n", "\t", "a", "b", "0", "1"]
TOKENS += ['"a', '":', "true", "fa", "lse", "null", '",']
PROMPTS = [[1, 2, 3], [7, 7, 1, 0, 9, 12, 3, 3, 8]]
SPACE = r"[ \n]*"


class Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a: Literal["a", "bab"]
    b: list[bool] = pydantic.Field(max_length=2)
    ab: Literal[10] | None


BOOLEAN = "(true|false)"
BOOLEANS = rf"\[({SPACE}{BOOLEAN}({SPACE},{SPACE}{BOOLEAN})?)?{SPACE}\]"
RECORD = SPACE.join([r"\{", '"a":', '("a"|"bab")', ",", '"b":', BOOLEANS, ",", '"ab":', "(10|null)", r"\}"]).replace(
    ":", rf"{SPACE}:"
)
# What the grammar is to us, and what it is to a library that knows whether a text can still become a match.
GRAMMARS = {
    "regex": (GuidedDecodingParams(regex=r"[ab]{2,5}(-[01]+)?(:a|,b)"), r"[ab]{2,5}(-[01]+)?(:a|,b)"),
    "ebnf": (
        GuidedDecodingParams(grammar='root ::= pair ("," pair)*\npair ::= [ab]+ ":" ("0" | "1" [01]*)'),
        r"[ab]+:(0|1[01]*)(,[ab]+:(0|1[01]*))*",
    ),
    "pydantic": (GuidedDecodingParams(json=Record), RECORD),
    "schema": (GuidedDecodingParams(json=json.dumps(Record.model_json_schema())), RECORD),
    "string": (GuidedDecodingParams(json={"type": "string", "minLength": 3, "maxLength": 9}), r'"[^"\\\r\n\t]{3,9}"'),
}


@pytest.fixture(scope="module")
def checkpoint(write_target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target, its tokens the pieces of JSON."""
    directory = write_target(tmp_path_factory.mktemp("json") / "target")
    spelled = [token.translate({ord(" "): "Ġ", ord("\n"): "Ċ", ord("\t"): "ĉ"}) for token in TOKENS]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(spelled)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<|end|>", "<|mask|>")])
    assert (tokenizer.token_to_id("<|end|>"), tokenizer.get_vocab_size()) == (EOS, VOCAB)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "json"
    build_engine(checkpoint, tiny_pair[1], directory, max_batch_size=4)
    return directory


@pytest.fixture
def llm(engine: Path):
    with LLM(engine, adaptive=False, threads=1) as llm:
        yield llm


def params_of(grammar: str, temperature: float, seed: int, **further) -> SamplingParams:
    guided, _ = GRAMMARS[grammar]
    return SamplingParams(max_tokens=40, temperature=temperature, seed=seed, guided_decoding=guided, **further)


REQUESTS = [
    (PROMPTS[at % 2], grammar, params_of(grammar, temperature, at, **further))
    for at, (grammar, temperature, further) in enumerate(
        [
            *itertools.product(GRAMMARS, (0.0, 0.8, 1.5), [{}]),
            ("ebnf", 0.8, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 12}),
            ("regex", 0.8, {"bad": ["a", "ba"], "logit_bias": {12: -2.0}}),
        ]
    )
]


@torch.inference_mode()
def autoregressive(target: torch.nn.Module, prompt: list[int], pattern: str, params: SamplingParams) -> list[int]:
    """A token is allowed if the text with it can still become a match, the end token if the text is one."""
    output: list[int] = []
    while len(output) < params.max_tokens and EOS not in output:
        text = "".join(TOKENS[token] for token in output)
        row = target(torch.tensor([prompt + output])).logits[0, -1].clone()
        for token in range(VOCAB):
            more = text + TOKENS[token] if token < len(TOKENS) else None
            ends = token == EOS and regex.fullmatch(pattern, text)
            if not ends and (more is None or not regex.fullmatch(pattern, more, partial=True)):
                row[token] = -torch.inf
        output.append(drawn_token(row.tolist(), params, len(prompt) + len(output)))
    return output


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_plain_decoding_allows_what_can_still_become_a_match(llm: LLM, checkpoint: Path, grammar: str):
    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    llm.method = "ar"
    for prompt, temperature in itertools.product(PROMPTS, (0.0, 0.8, 1.5)):
        params = params_of(grammar, temperature, seed=len(prompt))
        expected = autoregressive(target, prompt, GRAMMARS[grammar][1], params)
        assert llm.generate(prompt, params).outputs[0].token_ids == expected


def test_every_method_and_budget_writes_what_plain_decoding_does(llm: LLM):
    """All grammars in one call, and mates without one."""
    prompts = [prompt for prompt, _, _ in REQUESTS] + PROMPTS
    params = [params for _, _, params in REQUESTS] + [SamplingParams(max_tokens=40, temperature=0.8, seed=3)] * 2
    llm.method = "ar"
    expected = [llm.generate(prompt, asked).outputs[0] for prompt, asked in zip(prompts, params, strict=True)]
    for llm.method, llm.budget in [("chain", 0), *(("ddtree", budget) for budget in (0, 1, 7, 16, 64))]:
        outputs = llm.generate(prompts, params)
        for asked, output, alone in zip(params, outputs, expected, strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == alone.token_ids, asked
            assert (completion.text, completion.finish_reason) == (alone.text, alone.finish_reason)
        if llm.budget == 64:
            assert sum(output.statistics.accepted_tokens for output in outputs[: len(REQUESTS)]) > 50


def test_the_text_is_what_it_should_be(llm: LLM):
    """To xgrammar's matcher over plain bytes, to the regular expressions, to Python's JSON reader, and to Pydantic."""
    llm.budget = 64
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)], xgrammar.VocabType.RAW, stop_token_ids=[0])
    )
    whole = 0
    for seed, grammar in itertools.product(range(8), GRAMMARS):
        guided, pattern = GRAMMARS[grammar]
        output = llm.generate(PROMPTS[0], params_of(grammar, 1.0, seed)).outputs[0]
        if guided.json is not None:
            compiled = compiler.compile_json_schema(guided.json)
        elif guided.regex is not None:
            compiled = compiler.compile_regex(guided.regex)
        else:
            compiled = compiler.compile_grammar(guided.grammar)
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(output.text) or not output.text
        if output.finish_reason == "length":
            assert regex.fullmatch(pattern, output.text, partial=True)
            continue
        whole += 1
        assert output.token_ids[-1] == EOS
        assert matcher.accept_token(0)
        assert regex.fullmatch(pattern, output.text)
        if guided.json is not None:
            json.loads(output.text)
        if pattern is RECORD:
            Record.model_validate_json(output.text)
    assert whole > 20


def test_any_json_object(llm: LLM):
    whole = 0
    for seed in range(12):
        guided = GuidedDecodingParams(json_object=True)
        # The model knows nothing of JSON: quotes, colons and closing brackets are made likely, space is not.
        bias = {TOKENS.index(token): 5.0 for token in ("}", "]", '"', ":", '":')}
        bias |= {TOKENS.index(token): -5.0 for token in (" ", "\n")}
        params = SamplingParams(max_tokens=80, temperature=1.3, seed=seed, guided_decoding=guided, logit_bias=bias)
        output = llm.generate(PROMPTS[0], params).outputs[0]
        assert output.text.startswith("{")
        if output.finish_reason == "stop":
            assert isinstance(json.loads(output.text), dict)
            whole += len(output.text) > 2
    assert whole > 2


def test_a_grammar_that_leaves_no_token_fails_its_request_alone(llm: LLM):
    free = SamplingParams(max_tokens=12)
    params = SamplingParams(max_tokens=12, guided_decoding=GuidedDecodingParams(regex="ab"), min_tokens=4)
    outputs = llm.generate([PROMPTS[0]] * 3, [free, params, free])
    assert outputs[1].error.startswith("no token is left")
    assert outputs[1].outputs[0].text == "ab"
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    assert outputs[0].error is None


def test_a_matcher_that_contradicts_itself_ends_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    free = SamplingParams(max_tokens=12)
    expected = llm.generate(PROMPTS[0], free).outputs[0].token_ids
    monkeypatch.setattr(xgrammar.GrammarMatcher, "accept_token", lambda self, token: False)
    params = SamplingParams(max_tokens=12, guided_decoding=GuidedDecodingParams(regex="abab"))
    mate, failed = llm.generate([PROMPTS[0]] * 2, [free, params])
    assert failed.error.startswith("xgrammar refuses token ")
    assert mate.outputs[0].token_ids == expected


def test_an_end_id_of_the_request_ends_the_grammar(llm: LLM):
    guided = GuidedDecodingParams(regex="ab*")
    params = SamplingParams(max_tokens=12, end_id=0, guided_decoding=guided, logit_bias={0: 3.0})
    output = llm.generate(PROMPTS[0], params).outputs[0]
    assert (output.token_ids[-1], output.finish_reason, output.stop_reason) == (0, "stop", None)
    assert regex.fullmatch("ab*", output.text)


# ---------------------------------------------------------------------------------------------------------------------
# States
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json"))
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.get_vocab_size() + 5)


def ids_of(words: torch.Tensor, vocab_size: int) -> list[int]:
    return np.unpackbits(words.numpy().view(np.uint8), count=vocab_size, bitorder="little").nonzero()[0].tolist()


def allowed(matcher: xgrammar.GrammarMatcher, vocab_size: int) -> list[int]:
    words = xgrammar.allocate_token_bitmask(1, vocab_size)
    matcher.fill_next_token_bitmask(words)
    return ids_of(words[0], vocab_size)


WALKS = {
    "json": GuidedDecodingParams(json=Record),
    "object": GuidedDecodingParams(json_object=True),
    "regex": GuidedDecodingParams(regex=r"(the|a) [a-z]+(, [a-z]+)*\."),
    "ebnf": GuidedDecodingParams(grammar='root ::= "(" root ")" | [0-9]+'),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(WALKS)), st.data())
def test_a_mask_depends_on_the_tokens_before_it_alone(demo, kind, data):
    """Whatever paths were asked for in between, it is that of a matcher which has read just those tokens."""
    tokenizer, compiler = demo
    vocab_size, end = tokenizer.get_vocab_size() + 5, 0
    compiled = compiler.compile(WALKS[kind])
    state, text = GrammarState(compiled, vocab_size, [end]), []

    def walk(start: list[int], longest: int) -> tuple[list[int], list[int] | None]:
        """A path that the grammar allows, and what it allows behind; None behind the end token."""
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[end])
        assert all(matcher.accept_token(token) for token in start)
        path = []
        for _ in range(data.draw(st.integers(0, longest))):
            choice = allowed(matcher, vocab_size)
            path.append(end if end in choice and data.draw(st.booleans()) else data.draw(st.sampled_from(choice)))
            assert matcher.accept_token(path[-1])
            if matcher.is_terminated():
                return [*path, 5, 6], None
        return path, allowed(matcher, vocab_size)

    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 4))):
            path, behind = walk(text, 6)
            words = state.bitmask(path)
            if behind is None:
                assert words is None
            else:
                assert ids_of(words, vocab_size) == behind
        path, behind = walk(text, 3)
        if behind is None:
            return
        state.advance(path)
        text += path


def test_special_and_padding_tokens_are_never_text(demo):
    tokenizer, compiler = demo
    vocab_size = tokenizer.get_vocab_size() + 5
    state = GrammarState(compiler.compile(GuidedDecodingParams(regex=r"[\s\S]*")), vocab_size, [0])
    words = state.bitmask([])
    refused = sorted({*range(vocab_size)} - {*ids_of(words, vocab_size)})
    assert set(refused) >= {1, *range(vocab_size - 5, vocab_size)}
    assert all(len(tokenizer.id_to_token(token)) == 1 for token in refused[1:-5])  # bytes that begin no character


# ---------------------------------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------------------------------

INTEGER, ANY = {"type": "integer"}, {}
BROKEN_BY = [  # a schema and a value that is not of it
    ({"type": "integer"}, "a"),
    ({"type": "integer"}, 1.5),
    ({"type": "integer", "minimum": 3}, 2),
    ({"type": "integer", "exclusiveMaximum": 3}, 3),
    ({"type": ["integer", "null"], "minimum": 3}, 1),
    ({"type": "integer", "multipleOf": 3}, 4),
    ({"type": "integer", "multipleOf": 3, "minimum": 10}, 11),
    ({"type": "number", "multipleOf": 0.5}, 0.3),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 1.5}, 1.5),
    ({"minimum": 3}, 2),
    ({"minLength": 3}, "a"),
    ({"pattern": "^a$"}, "b"),
    ({"maxItems": 1}, [1, 2]),
    ({"minProperties": 1}, {}),
    ({"type": "string", "minLength": 2}, "a"),
    ({"type": "string", "maxLength": 1}, "ab"),
    ({"type": "string", "pattern": "^a+$"}, "b"),
    ({"type": "string", "pattern": "^a", "minLength": 3}, "a"),
    ({"type": "string", "format": "date", "maxLength": 3}, "2020-01-01"),
    ({"type": "string", "format": "date", "pattern": "^1999"}, "2020-01-01"),
    ({"type": "string", "enum": ["a", "bcd"], "maxLength": 1}, "bcd"),
    ({"type": "integer", "enum": [1, "a"]}, "a"),
    ({"type": "integer", "const": "a"}, "a"),
    ({"enum": [1, 2]}, 3),
    ({"anyOf": [INTEGER, {"type": "string"}], "type": "integer"}, "a"),
    ({"anyOf": [{"minimum": 3}], "type": "integer"}, 1),
    ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, {}),
    ({"allOf": [INTEGER, {"minimum": 3}]}, 1),
    ({"not": INTEGER}, 1),
    ({"if": INTEGER, "then": {"minimum": 3}}, 1),
    ({"$ref": "#/definitions/a", "definitions": {"a": INTEGER}, "minimum": 4}, 3),
    ({"$dynamicRef": "#a", "$defs": {"x": {"$dynamicAnchor": "a", "type": "integer"}}}, "x"),
    ({"type": "array", "uniqueItems": True, "items": INTEGER}, [1, 1]),
    ({"type": "array", "items": ANY, "contains": INTEGER}, ["a"]),
    ({"type": "array", "items": ANY, "contains": ANY, "minContains": 2}, ["a"]),
    ({"type": "array", "items": INTEGER, "minItems": 2}, [1]),
    ({"type": "array", "items": INTEGER, "maxItems": 2}, [1, 2, 3]),
    ({"type": "array", "prefixItems": [INTEGER], "items": {"type": "string"}}, [1, 2]),
    ({"type": "array", "prefixItems": [INTEGER], "unevaluatedItems": {"type": "string"}}, [1, 2]),
    ({"type": "object", "properties": {"a": ANY}, "required": ["a"]}, {}),
    ({"type": "object", "required": ["a"]}, {}),
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a", "b"]}, {"a": 1}),
    ({"type": "object", "properties": {"a": INTEGER}}, {"a": "x"}),
    ({"type": "object", "properties": {"a": {"not": ANY}}}, {"a": 1}),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": INTEGER}, {"b": "x"}),
    ({"type": "object", "properties": {"a": ANY, "b": ANY}, "minProperties": 1}, {}),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, {"a": 1, "b": 2}),
    ({"type": "object", "patternProperties": {"^x$": INTEGER}}, {"x": "a"}),
    ({"type": "object", "patternProperties": {"^x": {"type": "string"}}, "properties": {"xb": INTEGER}}, {"xb": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^x$"}}, {"a": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^x$"}, "properties": {"a": ANY}}, {"a": 1}),
    ({"type": "object", "properties": {"a": ANY, "b": ANY}, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "properties": {"a": ANY}, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ({"type": "object", "properties": {"a": INTEGER}, "dependencies": {"a": ["b"]}}, {"a": 1}),
    ({"type": "object", "unevaluatedProperties": INTEGER}, {"a": "x"}),
]
MET_BY = [  # a schema that is taken, and a value of it
    (True, [1]),
    ({"title": "T", "description": "d", "x-unknown": 1, "type": "integer", "default": 3, "examples": [4]}, 5),
    ({"type": "object", "properties": {"not": INTEGER, "uniqueItems": INTEGER}}, {"not": 1, "uniqueItems": 2}),
    ({"enum": [{"not": 1}, "if", None]}, {"not": 1}),
    ({"type": "string", "const": "a"}, "a"),
    ({"type": "number", "enum": [1, 2.5]}, 1),
    ({"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, "ab"),
    ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": INTEGER}}, 1),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [INTEGER, {"type": "array", "items": {"$ref": "#"}}]}}}, [1, [2]]),
    ({"properties": {"a": ANY}, "unevaluatedProperties": False}, {"a": [1]}),
    ({"type": "object", "additionalProperties": True}, {"é": {}}),
    ({"type": "array", "prefixItems": [INTEGER], "items": {"type": "string"}, "minItems": 3}, [1, "a", "b"]),
    (Record.model_json_schema(), {"a": "bab", "b": [True], "ab": None}),
]


@pytest.fixture(scope="module")
def of_bytes() -> GrammarCompiler:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    tokenizer.decoder, tokenizer.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    compiler = GrammarCompiler(tokenizer, 257)
    compiler.tokenizer = tokenizer
    return compiler


def accepts(compiler: GrammarCompiler, schema, value) -> bool:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # as xgrammar writes objects in an enum
    compiled = compiler.compile(GuidedDecodingParams(json=json.dumps(schema)))
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[256])
    return all(matcher.accept_token(token) for token in [*compiler.tokenizer.encode(text).ids, 256])


@pytest.mark.parametrize(("schema", "value"), BROKEN_BY)
def test_no_schema_lets_a_value_through_that_breaks_it(of_bytes, schema, value):
    with contextlib.suppress(RequestError):
        assert not accepts(of_bytes, schema, value)


@pytest.mark.parametrize(("schema", "value"), MET_BY)
def test_schemas_that_can_be_held_to_are_taken(of_bytes, schema, value):
    assert accepts(of_bytes, schema, value)


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        ({}, "guided_decoding has no grammar (give one of json, regex, grammar, json_object)"),
        (
            {"regex": "a", "json_object": True},
            "guided_decoding has regex and json_object (give one of json, regex, grammar, json_object)",
        ),
        ({"regex": 5}, "guided_decoding.regex 5 is not a text"),
        ({"regex": ""}, "guided_decoding.regex is an empty text (leave it out)"),
        ({"json_object": 1}, "guided_decoding.json_object 1 is neither True nor False"),
        ({"json": 5}, "guided_decoding.json is of type int (give a JSON schema as text, dict or Pydantic class)"),
        ({"json": "{"}, "guided_decoding.json is not a JSON schema: Expecting property name enclosed in double quotes"),
        (
            {"json": {"a": {1}}},
            "guided_decoding.json is not a JSON schema: Object of type set is not JSON serializable",
        ),
        ({"json": "[" * 100000}, "guided_decoding.json is not a JSON schema: "),
        ({"json": "[" * 200 + "]" * 200}, "guided_decoding.json has more than 128 brackets in brackets"),
        ({"json": {"type": "foo"}}, 'guided_decoding is refused by xgrammar: Unsupported type "foo"'),
        (
            {"json": {"properties": {"a": {"items": {"uniqueItems": True}}}}},
            "guided_decoding.json: 'uniqueItems' at #/properties/a/items is not supported there (leave it out)",
        ),
        *(
            ({"json": schema}, f"guided_decoding.json: '{keyword}' at # is not supported there (leave it out)")
            for keyword, schema in [
                ("anyOf", {"anyOf": []}),
                ("type", {"type": []}),
                ("$ref", {"$ref": "http://example.org/schema"}),
                ("$ref", {"$ref": "#word", "$defs": {"a": {"$anchor": "word"}}}),
                ("$ref", {"$ref": "#/a/b", "a": {"b": {"type": "array", "uniqueItems": True}}}),
                ("minimum", {"type": "number", "minimum": 0.1234567}),
                ("maximum", {"type": "number", "minimum": 0.1, "maximum": 0.100001}),
            ]
        ),
        ({"json": {"type": [{}]}}, "guided_decoding.json is not a JSON schema: "),
        ({"json": {"type": "object", "required": 5}}, "guided_decoding.json is not a JSON schema: "),
        ({"json": {"enum": 5, "type": "integer"}}, "guided_decoding.json is not a JSON schema: "),
        ({"json": {"properties": 5}}, "guided_decoding.json is not a JSON schema: "),
        ({"json": []}, "guided_decoding.json is of type list (give a JSON schema as text, dict or Pydantic class)"),
        ({"json": "[]"}, "guided_decoding is refused by xgrammar: Schema should be an object or bool"),
        ({"regex": "[a-"}, "guided_decoding is refused by xgrammar: Regex parsing error at position 4: Unclosed '['"),
        ({"grammar": 'x ::= "a"'}, "guided_decoding is refused by xgrammar: EBNF parser error at line 1, column 1: "),
        ({"regex": "a" * 70000}, "guided_decoding.regex has 70000 characters (use at most 65536)"),
    ],
)
def test_what_is_no_grammar_is_refused_at_submission(llm: LLM, guided: dict, message: str):
    with pytest.raises(RequestError) as refusal:
        llm.generate_async(PROMPTS[0], SamplingParams(guided_decoding=GuidedDecodingParams(**guided)))
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_what_cannot_have_a_grammar_is_refused(llm: LLM, tiny_llm: LLM):
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    with pytest.raises(
        RequestError, match=r"^guided_decoding needs a tokenizer with a ByteLevel or ByteFallback decoder$"
    ):
        tiny_llm.generate_async(PROMPTS[0], params)
    with pytest.raises(RequestError, match=r"^ignore_eos with guided_decoding: a grammar ends with the end token"):
        llm.generate_async(PROMPTS[0], dataclasses.replace(params, ignore_eos=True))


def test_a_grammar_needs_an_end_token_and_xgrammar(monkeypatch: pytest.MonkeyPatch):
    vocabulary = Vocabulary(Tokenizer.from_file(str(TARGET_DIR / "tokenizer.json")), 1024, end_ids=[])
    params = SamplingParams(guided_decoding=GuidedDecodingParams(regex="a"))
    sequence = {"request_id": 0, "index": 0, "prompt": None, "prompt_token_ids": [1], "seed": 0}
    with pytest.raises(RequestError, match=r"^guided_decoding needs an end token .* \(set end_id\)$"):
        Request(**sequence, params=params, vocabulary=vocabulary)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestError, match=r"^guided_decoding needs xgrammar \(pip install "):
        Request(**sequence, params=dataclasses.replace(params, end_id=0), vocabulary=vocabulary)
