"""Requests of mixed settings, as the Python API and the server take them, and what their answers have to be."""

import itertools
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddtree.runtime import RequestOutput, SamplingParams
from ddtree.runtime.sampling_params import GuidedDecodingParams

PROMPTS = (
    "def mean(values):",
    "Once there was a baker named",
    "Tom has 4 apples and buys 3 more. How many",
    "class Reader:\n    def __init__(self",
    "The wind shook the trees when",
    "import os\n\ndef ",
    "Sätze mit Umlauten – und 漢字: ",
)

STOP = {"text_input": "", "stop": True}
WORD = {"text_input": "w", "sampling_param_max_tokens": 2}
MALFORMED = [
    ({**WORD, "text_input": ""}, "the prompt is empty"),
    ({**WORD, "text_input": ["a", "b"]}, "text_input has 2 elements"),
    ({"sampling_param_max_tokens": 2}, "text_input"),
    ({**WORD, "sampling_param_max_tokens": 0}, "max_tokens 0"),
    ({**WORD, "sampling_param_max_tokens": 100_000}, "max_seq_len 2048"),
    ({**WORD, "sampling_param_temperature": -0.1}, "temperature -0.1 is out of range"),
    ({**WORD, "sampling_param_top_p": 1.1}, "top_p 1.1 is out of range"),
    ({**WORD, "sampling_param_top_k": [1, 2]}, "sampling_param_top_k"),
    ({**WORD, "sampling_param_stop": [""]}, "stop is an empty text"),
    ({**WORD, "sampling_param_stop_token_ids": [1024]}, "stop_token_ids 1024"),
    ({**WORD, "sampling_param_best_of": 4}, "best_of 4 is not supported"),
    ({**WORD, "sampling_param_logit_bias": "{5}"}, "logit_bias cannot be read"),
    ({**WORD, "sampling_param_logit_bias": '{"5": "much"}'}, "logit_bias"),
    ({**WORD, "sampling_param_guided_decoding_regex": "(a"}, "parenthesis is not closed"),
    ({**WORD, "sampling_param_guided_decoding_regex": "a", "sampling_param_guided_decoding_json": "{}"}, "give one of"),
    ({**WORD, "temperature": 0.5}, "temperature is not an input"),
    ({**WORD, "sampling_param_beam_width": 2}, "sampling_param_beam_width is not an input"),
    ({**WORD, "stop": True}, "stop is for a request by its id"),
]


def random_settings(draw: random.Random) -> dict[str, Any]:
    """Arguments of SamplingParams, ``guided_decoding`` as those of GuidedDecodingParams."""
    settings: dict[str, Any] = {"max_tokens": draw.randint(1, 32)}
    if draw.random() < 0.75:
        settings |= {"temperature": draw.choice([0.3, 0.8, 1.0, 1.7]), "seed": draw.getrandbits(64)}
        settings |= draw.choice([{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.7}])
        if draw.random() < 0.2:
            settings["n"] = draw.randint(2, 3)
    more = [
        {"stop": ["the", "\n\n"]},
        {"stop": [" a"], "include_stop_str_in_output": True},
        {"stop_token_ids": [draw.randrange(1024) for _ in range(20)]},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.6, "frequency_penalty": 0.25},
        {"bad": ["the", "self"]},
        {"bad_token_ids": [draw.randrange(1024) for _ in range(20)]},
        {"logit_bias": {draw.randrange(1024): draw.choice([-5.5, 4.25]) for _ in range(5)}},
        {"min_tokens": min(8, settings["max_tokens"]), "end_id": draw.randrange(1024)},
        {"ignore_eos": True},
        {"skip_special_tokens": False},
        {"guided_decoding": {"regex": "[a-f]{3,9}( [a-f]{3,9}){1,4}"}},
        {"guided_decoding": {"json": '{"type": "array", "items": {"type": "integer"}}'}},
        {"guided_decoding": {"grammar": 'root ::= "yes" | "no" root'}},
    ]
    for _ in range(draw.randint(0, 2)):
        settings |= draw.choice(more)
    if "guided_decoding" in settings:
        settings.pop("ignore_eos", None)
        settings.pop("end_id", None)
    return settings


def sampling_params(settings: Mapping[str, Any]) -> SamplingParams:
    """The Python API's settings, with log-probabilities."""
    guided = settings.get("guided_decoding")
    rest = {name: value for name, value in settings.items() if name != "guided_decoding"}
    return SamplingParams(**rest, logprobs=1, guided_decoding=GuidedDecodingParams(**guided) if guided else None)


def model_inputs(prompt: str, settings: Mapping[str, Any], **inputs: Any) -> dict[str, Any]:
    """The server's inputs, with all that a response can hold asked for."""
    given: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "guided_decoding":
            given |= {f"sampling_param_guided_decoding_{kind}": text for kind, text in value.items()}
        elif name == "logit_bias":
            given[f"sampling_param_{name}"] = json.dumps(value)
        else:
            given[f"sampling_param_{name}"] = value
    return {
        "text_input": prompt,
        **given,
        "sampling_param_exclude_input_from_output": True,
        "sampling_param_return_perf_metrics": True,
        "return_finish_reason": True,
        "return_stop_reason": True,
        "return_cumulative_logprob": True,
        "return_seed": True,
        **inputs,
    }


def check_answer(answers: list[dict[str, Any]], expected: RequestOutput) -> None:
    """The last response holds what the Python API gave; those before it led up to it."""
    texts = [as_list(answer["text_output"]) for answer in answers]
    for earlier, later in itertools.pairwise(texts):
        assert all(b.startswith(a) for a, b in zip(earlier, later, strict=True))
    last, outputs = answers[-1], expected.outputs
    assert texts[-1] == [output.text for output in outputs]
    assert as_list(last["finish_reason"]) == [output.finish_reason for output in outputs]
    assert as_list(last["stop_reason"]) == [str(output.stop_reason) for output in outputs]
    assert as_list(last["seed"]) == [output.seed for output in outputs]
    logprobs = np.float32([output.cumulative_logprob for output in outputs])
    np.testing.assert_array_equal(np.float32(as_list(last["cumulative_logprob"])), logprobs)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
