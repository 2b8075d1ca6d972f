"""What a request may ask for beside temperature and filters, and where its text ends.

Each setting that changes logits writes, with every method, what plain decoding of transformers' logits writes after
transformers' own processors and plain counts.
"""

import collections
import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ddtree.runtime import LLM, RequestError, SamplingParams
from ddtree.runtime.sampling_params import GuidedDecodingParams

from .conftest import EOS, VOCAB
from .test_lossless import drawn_token
from .test_stop_strings import ended

PROMPTS = [[1, 2, 3], [7, 7, 1, 0, 9, 12, 3, 3, 8], list(range(20)) * 2]
LENGTH = 30
BIAS = {3: 2.5, 5: -math.inf, 9: -1.0, 11: 1.5}
FEATURES = {
    "logit_bias": {"logit_bias": BIAS},
    "embedding_bias": {"embedding_bias": torch.linspace(2, -2, VOCAB)},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "repetition_reward": {"repetition_penalty": 0.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "frequency_reward": {"frequency_penalty": -0.6, "presence_penalty": -0.3},
    "bad": {"bad": ["w3", "w8 w8", "w1 w2 w3"], "bad_token_ids": [4]},
    "bad_text": {"bad": ["w9 w9", "w16 w16", "w3 w3", "w16 w21"]},
    "min_tokens": {"min_tokens": 17, "stop_token_ids": [3, 8, 16, 21], "ignore_eos": False},
    "end_id": {"end_id": 5, "ignore_eos": False},
    "all": {
        "logit_bias": {2: 1.0, 16: -0.5},
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bad": ["w2 w2"],
        "bad_token_ids": [10],
        "min_tokens": 12,
        "stop_token_ids": [5],
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}


def params_of(feature: str, temperature: float, seed: int) -> SamplingParams:
    settings = {"max_tokens": LENGTH, "ignore_eos": True, **FEATURES[feature]}
    return SamplingParams(temperature=temperature, seed=seed, logprobs=1, **settings)


REQUESTS = [
    (PROMPTS[at % len(PROMPTS)], params_of(feature, temperature, seed=at))
    for at, (feature, temperature) in enumerate(itertools.product(FEATURES, (0.0, 0.9)))
]


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32)


def words(texts: str | list[str] | None) -> list[list[int]]:
    texts = [texts] if isinstance(texts, str) else texts or []
    return [[int(word[1:]) for word in text.split()] for text in texts]


@torch.inference_mode()
def autoregressive(target: torch.nn.Module, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities: one token at a time, nothing of ours."""
    end_ids = [] if params.ignore_eos else [EOS if params.end_id is None else params.end_id]
    stop_ids = [*end_ids, *(params.stop_token_ids or [])]
    bad_words = [*words(params.bad), *([token] for token in params.bad_token_ids or [])]
    output: list[int] = []
    logprobs = []
    while len(output) < params.max_tokens and not (output and output[-1] in stop_ids):
        ids = torch.tensor([prompt + output])
        raw = target(ids).logits[:, -1]
        row = raw.clone()
        for token, bias in (params.logit_bias or {}).items():
            row[0, token] += bias
        if params.embedding_bias is not None:
            row = row + params.embedding_bias
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, row)
        for token, count in collections.Counter(output).items():
            row[0, token] -= params.presence_penalty + params.frequency_penalty * count
        if bad_words:
            row = NoBadWordsLogitsProcessor(bad_words)(ids, row)
        if params.min_tokens and stop_ids:
            row = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, stop_ids)(ids, row)
        token = drawn_token(row[0].tolist(), params, ids.shape[1])
        output.append(token)
        logprobs.append(float(torch.log_softmax(raw[0].double(), -1)[token]))
    return output, logprobs


@pytest.fixture(scope="module")
def expected(target) -> list[tuple[list[int], list[float]]]:
    return [autoregressive(target, prompt, params) for prompt, params in REQUESTS]


def test_each_feature_changes_the_text(target, expected):
    """Else the equalities below would say nothing about it."""
    for (prompt, params), (ids, _) in zip(REQUESTS, expected, strict=True):
        plain = SamplingParams(max_tokens=LENGTH, temperature=params.temperature, seed=params.seed, ignore_eos=True)
        assert autoregressive(target, prompt, plain)[0] != ids, params


@pytest.mark.parametrize(
    ("method", "budget"), [("ar", 0), ("chain", 0), *(("ddtree", budget) for budget in (0, 1, 7, 16, 64))]
)
def test_every_method_and_budget_writes_what_plain_decoding_does(tiny_llm: LLM, expected, method, budget):
    """All features in one call: each shares its batch with others."""
    tiny_llm.method, tiny_llm.budget = method, budget
    prompts, params = zip(*REQUESTS, strict=True)
    outputs = tiny_llm.generate([*prompts], [*params])
    for asked, output, (ids, logprobs) in zip(params, outputs, expected, strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == ids, asked
        assert completion.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert completion.cumulative_logprob == pytest.approx(sum(logprobs), abs=1e-3)
    if method == "chain" or budget > 1:  # so rules looked at paths
        assert sum(output.statistics.accepted_tokens for output in outputs) > (50 if budget > 1 else 10)


def test_alone_as_in_a_batch(tiny_llm: LLM, expected):
    tiny_llm.budget = 64
    for (prompt, params), (ids, _) in zip(REQUESTS[1::4], expected[1::4], strict=True):
        assert tiny_llm.generate(prompt, params).outputs[0].token_ids == ids


def test_n_texts_are_those_of_their_seeds(tiny_llm: LLM):
    params = SamplingParams(
        n=3, max_tokens=20, temperature=0.9, seed=2**63 + 5, repetition_penalty=1.3, ignore_eos=True
    )
    outputs = tiny_llm.generate(PROMPTS[0], params).outputs
    seeds = [params.seed ^ (index * 0x9E3779B97F4A7C15 % 2**64) for index in range(3)]
    assert [(output.index, output.seed) for output in outputs] == list(enumerate(seeds))
    for seed, output in zip(seeds, outputs, strict=True):
        alone = dataclasses.replace(params, n=1, seed=seed)
        assert tiny_llm.generate(PROMPTS[0], alone).outputs[0].token_ids == output.token_ids
    assert len({tuple(output.token_ids) for output in outputs}) == 3


STOPPED = [
    {"stop": "5 w1"},
    {"stop": ["w3 w3 w", "3 w10 w9"]},
    {"stop": ["w1"], "min_tokens": 15},
    {"stop": ["w9 w9", "w21"], "include_stop_str_in_output": True},
    {"stop": [" "]},
    {"stop": ["never"]},
    {"stop_token_ids": [9, 3]},
    {"stop_token_ids": [9, 3], "include_stop_str_in_output": True, "stop": "w0"},
]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_ends_at_the_same_place_with_every_method(tiny_llm: LLM, temperature):
    """Ends from the definition, on the text that the request writes without them."""
    for at, ends in enumerate(STOPPED):
        prompt = PROMPTS[at % len(PROMPTS)]
        free = SamplingParams(max_tokens=40, temperature=temperature, seed=at, ignore_eos=True, logprobs=0)
        bound = dataclasses.replace(free, **ends)
        # min_tokens forbids no stop string: what is written meanwhile is what is written without.
        tiny_llm.method = "ar"
        whole = tiny_llm.generate(prompt, free).outputs[0]
        stops = {"stop": [], "stop_token_ids": [], "include_stop_str_in_output": False, "min_tokens": 0, **ends}
        stops["stop"] = [stops["stop"]] if isinstance(stops["stop"], str) else stops["stop"]
        settings = {**stops, "skip_special_tokens": True, "max_tokens": 40}
        text, kept, finish_reason, stop_reason = ended(tiny_llm.tokenizer, whole.token_ids, settings)
        for tiny_llm.method, tiny_llm.budget in [("ar", 0), ("chain", 0), ("ddtree", 7), ("ddtree", 64)]:
            *outputs, last = tiny_llm.stream(prompt, bound)
            (completion,) = last.outputs
            assert (completion.text, completion.token_ids) == (text, kept), bound
            assert (completion.finish_reason, completion.stop_reason) == (finish_reason, stop_reason)
            assert completion.logprobs == pytest.approx(whole.logprobs[: len(kept)], abs=1e-4)
            assert all(text.startswith(output.outputs[0].text) for output in outputs)
            assert all(kept[: len(of.token_ids)] == of.token_ids for (of,) in (output.outputs for output in outputs))


def test_a_stop_token_and_the_end_token_are_in_the_ids_alone(tiny_llm: LLM):
    free = SamplingParams(max_tokens=30, ignore_eos=True)
    words = tiny_llm.generate(PROMPTS[0], free).outputs[0].token_ids
    for ends in ({"stop_token_ids": [words[4]]}, {"end_id": words[4], "ignore_eos": False}):
        upto = words[: words.index(words[4]) + 1]
        cut = tiny_llm.generate(PROMPTS[0], dataclasses.replace(free, **ends)).outputs[0]
        assert (cut.token_ids, cut.text) == (upto, " ".join(f"w{word}" for word in upto[:-1]))
        params = dataclasses.replace(free, **ends, include_stop_str_in_output=True)
        assert tiny_llm.generate(PROMPTS[0], params).outputs[0].text == " ".join(f"w{word}" for word in upto)


def test_a_request_without_a_token_left_fails_alone(tiny_llm: LLM):
    params = SamplingParams(max_tokens=10)
    nothing = SamplingParams(max_tokens=10, bad_token_ids=list(range(VOCAB)))
    two_only = SamplingParams(
        max_tokens=10, bad_token_ids=[2, *range(4, VOCAB)], bad=["w0", "w1 w1", "w3 w3", "w1 w3 w1"]
    )
    expected = tiny_llm.generate(PROMPTS[0], params).outputs[0].token_ids
    fine, failed, later, also_fine = tiny_llm.generate([PROMPTS[0]] * 4, [params, nothing, two_only, params])
    assert fine.outputs[0].token_ids == also_fine.outputs[0].token_ids == expected
    for output in (failed, later):
        assert output.error.startswith("no token is left")
        assert output.outputs[0].finish_reason == "error"
    assert failed.outputs[0].token_ids == []
    assert later.outputs[0].token_ids in ([1, 3], [3, 1, 3])


def test_settings_that_need_row_rules_are_named():
    assert (
        SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, stop="a", logprobs=1).row_rule_settings() == []
    )
    everything = SamplingParams(
        logit_bias={1: 1.0},
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=-0.1,
        bad="a",
        bad_token_ids=[1],
        min_tokens=1,
        guided_decoding=GuidedDecodingParams(regex="a"),
    )
    assert everything.row_rule_settings() == [
        *("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("bad", "bad_token_ids", "min_tokens", "guided_decoding"),
    ]
    assert SamplingParams(embedding_bias=[0.0]).row_rule_settings() == ["embedding_bias"]


def test_a_finished_sequence_keeps_nothing_as_large_as_the_vocabulary(tiny_llm: LLM):
    result = tiny_llm.generate_async(PROMPTS[0], SamplingParams(max_tokens=5, repetition_penalty=1.3))
    result.result()
    (sequence,) = result.sequences
    assert sequence.row_rules is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n 0 is out of range (use 1 or more)"),
        ({"n": 2}, "n 2 at temperature 0 is the same text 2 times (set a temperature)"),
        ({"min_tokens": -1}, "min_tokens -1 is out of range (use 0 or more)"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 exceeds max_tokens 8 (lower it)"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 is not above 0 (1 turns it off)"),
        ({"repetition_penalty": -1.0}, "repetition_penalty -1.0 is out of range (use 0 or more)"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty 1e-300 is not above 0 (1 turns it off)"),
        ({"presence_penalty": math.nan}, "presence_penalty nan is not a finite number"),
        ({"frequency_penalty": "1"}, "frequency_penalty '1' is not a finite number"),
        ({"frequency_penalty": 1e39}, "frequency_penalty 1e+39 is more than a float32 holds"),
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias {VOCAB} is out of range (use 0 to {VOCAB - 1})"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias '1' is not a whole number"),
        ({"logit_bias": {1: math.inf}}, "logit_bias of token 1 inf is not a finite number"),
        ({"logit_bias": [1.0]}, "logit_bias [1.0] is not a dict (give token ids and their biases)"),
        (
            {"logit_bias": {1: 1.0}, "embedding_bias": [0.0] * VOCAB},
            "logit_bias and embedding_bias are two biases (give one)",
        ),
        (
            {"embedding_bias": torch.zeros(3)},
            f"embedding_bias is not one number for each of the {VOCAB} tokens (give so many)",
        ),
        ({"embedding_bias": 1.0}, f"embedding_bias is not one number for each of the {VOCAB} tokens (give so many)"),
        (
            {"embedding_bias": torch.zeros(2, VOCAB)},
            f"embedding_bias is not one number for each of the {VOCAB} tokens (give so many)",
        ),
        ({"stop": ""}, "stop is an empty text (leave it out)"),
        ({"stop": ["a", ""]}, "stop is an empty text (leave it out)"),
        ({"stop": 5}, "stop 5 is neither a text nor a list of texts (give one)"),
        ({"stop": [5]}, "stop 5 is not a text"),
        ({"stop": "\ud800"}, "stop is not Unicode at character 0 (use UTF-8 text)"),
        ({"bad": ["w1", ""]}, "bad is an empty text (leave it out)"),
        ({"bad": "  "}, "bad '  ' has no tokens (leave it out)"),
        ({"bad_token_ids": [VOCAB]}, f"bad_token_ids {VOCAB} is out of range (use 0 to {VOCAB - 1})"),
        ({"bad_token_ids": 5}, "bad_token_ids 5 is not a list (give a list of token ids)"),
        ({"logprobs": 2}, "logprobs 2 is out of range (use 0 to 1)"),
        ({"logprobs": True}, "logprobs True is not a whole number"),
        ({"timeout": -1.0}, "timeout -1.0 is out of range (use 0 or more)"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output 'yes' is neither True nor False"),
        ({"guided_decoding": "a"}, "guided_decoding is of type str (give a GuidedDecodingParams)"),
        ({"temperature": 10**400}, f"temperature 1{'0' * 59}... is not a finite number"),
        ({"timeout": 10**5000}, "timeout (a whole number of thousands of digits) is not a finite number"),
        (
            {"max_tokens": 10**5000},
            "max_tokens (a whole number of thousands of digits) is out of range (use 1 to 2147483647)",
        ),
        ({"temperature": torch.ones(2, 2)}, "temperature tensor([[1., 1.], [1., 1.]]) is not a finite number"),
        ({"logit_bias": {1: np.array([1.0, 2.0])}}, "logit_bias of token 1 array([1., 2.]) is not a finite number"),
        ({"logit_bias": {1: 10**400}}, f"logit_bias of token 1 1{'0' * 59}... is not a finite number"),
    ],
)
def test_settings_out_of_range_are_refused(tiny_llm: LLM, settings: dict, message: str):
    with pytest.raises(RequestError) as refusal:
        tiny_llm.generate_async(PROMPTS[0], SamplingParams(**settings))
    assert str(refusal.value) == message
