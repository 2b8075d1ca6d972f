"""The tensors of the Triton model: one table that its configuration, the reading of requests and the writing of
responses share. Names and types are those of TensorRT-LLM's ``llmapi`` model, ours follow its way of naming.

Knows NumPy and the Python API, nothing of Triton's own modules.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ddtree.runtime.errors import RequestError
from ddtree.runtime.results import RequestOutput
from ddtree.runtime.sampling_params import GuidedDecodingParams, SamplingParams

ONE, MANY = 1, -1  # elements of a tensor


class Tensor(NamedTuple):
    data_type: str  # Triton's word for it, less TYPE_
    elements: int = ONE


PREFIX = "sampling_param_"
_GUIDED = "guided_decoding_"

# Fields of SamplingParams that TensorRT-LLM's model has as inputs, then those that it has not.
_FIELDS = {
    "temperature": Tensor("FP32"),
    "top_k": Tensor("INT32"),
    "top_p": Tensor("FP32"),
    "frequency_penalty": Tensor("FP32"),
    "presence_penalty": Tensor("FP32"),
    "max_tokens": Tensor("INT32"),
    "stop": Tensor("STRING", MANY),
    "seed": Tensor("UINT64"),
    "n": Tensor("INT32"),
    "min_tokens": Tensor("INT32"),
    "min_p": Tensor("FP32"),
    "repetition_penalty": Tensor("FP32"),
    "bad": Tensor("STRING", MANY),
    "bad_token_ids": Tensor("INT32", MANY),
    "end_id": Tensor("INT32"),
    "ignore_eos": Tensor("BOOL"),
    "stop_token_ids": Tensor("INT32", MANY),
    "include_stop_str_in_output": Tensor("BOOL"),
    "skip_special_tokens": Tensor("BOOL"),
    "timeout": Tensor("FP32"),
}
_GUIDED_FIELDS = {
    "json": Tensor("STRING"),
    "regex": Tensor("STRING"),
    "grammar": Tensor("STRING"),
    "json_object": Tensor("BOOL"),
}
_RETURNS = ("return_finish_reason", "return_stop_reason", "return_cumulative_logprob", "return_seed")

INPUTS: dict[str, Tensor] = {
    "text_input": Tensor("STRING", MANY),
    "streaming": Tensor("BOOL"),
    **{PREFIX + name: tensor for name, tensor in _FIELDS.items()},
    **{PREFIX + _GUIDED + name: tensor for name, tensor in _GUIDED_FIELDS.items()},
    PREFIX + "logit_bias": Tensor("STRING"),
    PREFIX + "best_of": Tensor("INT32"),
    PREFIX + "exclude_input_from_output": Tensor("BOOL"),
    PREFIX + "return_perf_metrics": Tensor("BOOL"),
    **{name: Tensor("BOOL") for name in _RETURNS},
    "stop": Tensor("BOOL"),
}
REQUIRED_INPUT = "text_input"

# Zero in every response: a cache here is a slot of a whole sequence, there are no blocks to reuse, miss or allocate.
_KV_CACHE_BLOCKS = {
    "kv_cache_reused_block": Tensor("INT32", MANY),
    "kv_cache_missed_block": Tensor("INT32", MANY),
    "kv_cache_alloc_new_blocks": Tensor("INT32", MANY),
    "kv_cache_alloc_total_blocks": Tensor("INT32", MANY),
    "kv_cache_hit_rate": Tensor("FP32", MANY),
}

OUTPUTS: dict[str, Tensor] = {
    "text_output": Tensor("STRING", MANY),
    "finish_reason": Tensor("STRING", MANY),
    "stop_reason": Tensor("STRING", MANY),
    "cumulative_logprob": Tensor("FP32", MANY),
    "seed": Tensor("UINT64", MANY),
    **_KV_CACHE_BLOCKS,
    "arrival_time_ns": Tensor("INT64"),
    "first_scheduled_time_ns": Tensor("INT64"),
    "first_token_time_ns": Tensor("INT64"),
    "last_token_time_ns": Tensor("INT64"),
    "acceptance_rate": Tensor("FP32"),
    "total_accepted_draft_tokens": Tensor("INT32"),
    "total_draft_tokens": Tensor("INT32"),
}

_NUMPY_TYPES: dict[str, Any] = {
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "STRING": np.object_,
}


@dataclass(frozen=True)
class TritonRequest:
    """What a request asks for."""

    prompt: str
    params: SamplingParams
    streaming: bool
    echo: bool  # put the prompt before the text
    returns: frozenset[str]  # which of the ``return_*`` inputs were true
    perf_metrics: bool


def read_request(tensors: Mapping[str, np.ndarray]) -> TritonRequest:
    """Make a request of its tensors, of the names, types and shapes in INPUTS.

    Raises:
        RequestError: a value cannot be used. What SamplingParams checks is left to it.
    """
    given = {name: _values(name, array) for name, array in tensors.items()}
    prompt = _one(REQUIRED_INPUT, given.get(REQUIRED_INPUT, []))
    settings: dict[str, Any] = {}
    for field, tensor in _FIELDS.items():
        values = given.get(PREFIX + field)
        if values is not None:
            settings[field] = _one(PREFIX + field, values) if tensor.elements == ONE else values
    guided = {
        field: value
        for field in _GUIDED_FIELDS
        if (value := _optional(PREFIX + _GUIDED + field, given)) not in (None, False)
    }
    if guided:
        settings["guided_decoding"] = GuidedDecodingParams(**guided)
    bias = _optional(PREFIX + "logit_bias", given)
    if bias is not None:
        settings["logit_bias"] = _logit_bias(bias)
    returns = frozenset(name for name in _RETURNS if _optional(name, given))
    if "return_cumulative_logprob" in returns:
        settings["logprobs"] = 1
    params = SamplingParams(**settings)
    best_of = _optional(PREFIX + "best_of", given)
    if best_of not in (None, 1, params.n):
        raise RequestError(f"{PREFIX}best_of {best_of} is not supported (leave it out, or ask for {PREFIX}n texts)")
    streaming = bool(_optional("streaming", given))
    excluded = bool(_optional(PREFIX + "exclude_input_from_output", given))
    return TritonRequest(
        prompt=prompt,
        params=params,
        streaming=streaming,
        echo=not excluded and not streaming,
        returns=returns,
        perf_metrics=bool(_optional(PREFIX + "return_perf_metrics", given)),
    )


def response_tensors(output: RequestOutput, request: TritonRequest) -> dict[str, np.ndarray]:
    """The tensors of a response, of the names, types and shapes in OUTPUTS.

    ``text_output`` is all of the text so far, in every response of a stream too. What is None is the word None, as in
    TensorRT-LLM.
    """
    texts = output.outputs
    before = request.prompt if request.echo else ""
    values: dict[str, list[Any]] = {"text_output": [(before + text.text).encode() for text in texts]}
    if "return_finish_reason" in request.returns:
        values["finish_reason"] = [str(text.finish_reason).encode() for text in texts]
    if "return_stop_reason" in request.returns:
        values["stop_reason"] = [str(text.stop_reason).encode() for text in texts]
    if "return_cumulative_logprob" in request.returns:
        values["cumulative_logprob"] = [text.cumulative_logprob for text in texts]
    if "return_seed" in request.returns:
        values["seed"] = [text.seed for text in texts]
    if request.perf_metrics:
        values |= _perf_metrics(output)
    return {name: np.array(value, _NUMPY_TYPES[OUTPUTS[name].data_type]) for name, value in values.items()}


def _perf_metrics(output: RequestOutput) -> dict[str, list[Any]]:
    statistics = output.statistics
    accepted, drafted = statistics.accepted_tokens, statistics.draft_tokens
    return {
        **{name: [0] for name in _KV_CACHE_BLOCKS},
        "arrival_time_ns": [_nanoseconds(statistics.arrival_time)],
        "first_scheduled_time_ns": [_nanoseconds(statistics.first_scheduled_time)],
        "first_token_time_ns": [_nanoseconds(statistics.first_token_time)],
        "last_token_time_ns": [_nanoseconds(statistics.last_token_time)],
        "acceptance_rate": [accepted / drafted if drafted else 0.0],
        "total_accepted_draft_tokens": [accepted],
        "total_draft_tokens": [drafted],
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _values(name: str, array: np.ndarray) -> list[Any]:
    """A tensor's elements as Python's own types."""
    elements = array.reshape(-1)
    if INPUTS[name].data_type == "STRING":
        return [_text(name, element) for element in elements]
    if array.dtype == np.float32:
        # The shortest decimal that is this float32: what the client wrote, as the Python API would be given it.
        return [float(str(element)) for element in elements]
    return elements.tolist()


def _text(name: str, data: bytes | str) -> str:
    try:
        return data if isinstance(data, str) else bytes(data).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 at byte {error.start} (convert it first)") from None


def _one(name: str, values: list[Any]) -> Any:
    if len(values) != 1:
        raise RequestError(f"{name} has {len(values)} elements (give 1; send more prompts as requests of their own)")
    return values[0]


def _optional(name: str, given: Mapping[str, list[Any]]) -> Any:
    return _one(name, given[name]) if name in given else None


def _logit_bias(text: str) -> dict[int, float]:
    remedy = 'give a JSON object of token ids and biases, such as {"42": -5}'
    try:
        bias = json.loads(text)
        if not isinstance(bias, dict):
            raise ValueError(f"it is a {type(bias).__name__}")
        return {int(token): value for token, value in bias.items()}
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{PREFIX}logit_bias cannot be read: {error} ({remedy})") from None
