"""The model repository that `ddtree triton` writes: its tensors, and that nothing is lost or half-written."""

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from ddtree.builder import BuildError
from ddtree.runtime.cli import main
from ddtree.runtime.errors import RequestError
from ddtree.runtime.sampling_params import GuidedDecodingParams, SamplingParams
from ddtree.runtime.triton_repository import llm_arguments, write_repository

# Inputs and outputs of TensorRT-LLM 1.2's triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt.
TENSORRT_LLM_INPUTS = {
    "text_input": "STRING[-1]",
    "streaming": "BOOL[1]",
    "sampling_param_best_of": "INT32[1]",
    "sampling_param_temperature": "FP32[1]",
    "sampling_param_top_k": "INT32[1]",
    "sampling_param_top_p": "FP32[1]",
    "sampling_param_frequency_penalty": "FP32[1]",
    "sampling_param_presence_penalty": "FP32[1]",
    "sampling_param_max_tokens": "INT32[1]",
    "sampling_param_stop": "STRING[-1]",
    "sampling_param_seed": "UINT64[1]",
    "sampling_param_exclude_input_from_output": "BOOL[1]",
    "sampling_param_return_perf_metrics": "BOOL[1]",
    "return_finish_reason": "BOOL[1]",
    "return_stop_reason": "BOOL[1]",
    "return_cumulative_logprob": "BOOL[1]",
    "stop": "BOOL[1]",
}
TENSORRT_LLM_OUTPUTS = {
    "text_output": "STRING[-1]",
    "finish_reason": "STRING[-1]",
    "stop_reason": "STRING[-1]",
    "cumulative_logprob": "FP32[-1]",
    "kv_cache_reused_block": "INT32[-1]",
    "kv_cache_missed_block": "INT32[-1]",
    "kv_cache_alloc_new_blocks": "INT32[-1]",
    "kv_cache_alloc_total_blocks": "INT32[-1]",
    "kv_cache_hit_rate": "FP32[-1]",
    "arrival_time_ns": "INT64[1]",
    "first_scheduled_time_ns": "INT64[1]",
    "first_token_time_ns": "INT64[1]",
    "last_token_time_ns": "INT64[1]",
    "acceptance_rate": "FP32[1]",
    "total_accepted_draft_tokens": "INT32[1]",
    "total_draft_tokens": "INT32[1]",
}


def configuration(repository: Path) -> ModelConfig:
    """As protobuf's own parser of its text format reads it."""
    return text_format.Parse((repository / "tensorrt_llm" / "config.pbtxt").read_text(encoding="utf-8"), ModelConfig())


def tensors(fields: Iterable[Any]) -> dict[str, str]:
    return {field.name: f"{DataType.Name(field.data_type).removeprefix('TYPE_')}{list(field.dims)}" for field in fields}


@pytest.fixture
def repository(engine: Path, tmp_path: Path) -> Path:
    write_repository(
        engine, tmp_path / "repository", {"method": "chain", "threads": 1, "adaptive": False, "budget": None}
    )
    return tmp_path / "repository"


def test_every_tensor_of_tensorrt_llm_is_there(repository: Path) -> None:
    model = configuration(repository)
    assert tensors(model.input).items() >= TENSORRT_LLM_INPUTS.items()
    assert tensors(model.output).items() >= TENSORRT_LLM_OUTPUTS.items()
    assert [field.name for field in model.input if not field.optional] == ["text_input"]


def test_every_setting_of_the_python_api_is_an_input(repository: Path) -> None:
    inputs = {field.name.removeprefix("sampling_param_") for field in configuration(repository).input}
    settings = {field.name for field in dataclasses.fields(SamplingParams)}
    # logit_bias says the same as the former, return_cumulative_logprob asks for the latter.
    assert settings - inputs == {"embedding_bias", "logprobs", "guided_decoding"}
    grammars = {field.name for field in dataclasses.fields(GuidedDecodingParams)}
    assert {f"guided_decoding_{name}" for name in grammars} <= inputs


def test_settings_are_parameters_of_the_model(repository: Path, engine: Path) -> None:
    parameters = {name: value.string_value for name, value in configuration(repository).parameters.items()}
    assert llm_arguments(parameters) == {"model": str(engine), "method": "chain", "threads": 1, "adaptive": False}
    assert llm_arguments({"EXECUTION_ENV_PATH": "x", "budgett": "5"}) == {"model": None, "budgett": 5}


def test_a_path_with_quotes_and_other_alphabets_is_read_back(engine: Path, tmp_path: Path) -> None:
    odd = tmp_path / 'an "engine" \\ 漢\n'
    shutil.copytree(engine, odd)
    write_repository(odd, tmp_path / "repository", {})
    assert configuration(tmp_path / "repository").parameters["engine"].string_value == str(odd)


def test_what_is_there_is_replaced_only_when_forced_and_only_a_repository(
    repository: Path, engine: Path, tmp_path: Path
) -> None:
    before = configuration(repository)
    with pytest.raises(RequestError, match="holds a repository already"):
        write_repository(engine, repository, {})
    assert configuration(repository) == before
    write_repository(engine, repository, {"method": "ar"}, force=True)
    assert configuration(repository).parameters["method"].string_value == "ar"

    (repository / "other_model").mkdir()
    with pytest.raises(RequestError, match="not a repository of this command"):
        write_repository(engine, repository, {}, force=True)
    assert (repository / "other_model").is_dir()
    assert configuration(repository).parameters["method"].string_value == "ar"

    (tmp_path / "file").write_text("mine")
    with pytest.raises(RequestError, match="is not a directory"):
        write_repository(engine, tmp_path / "file", {}, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "repository"]  # nothing left over


def test_a_broken_engine_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with pytest.raises(BuildError):
        write_repository(tmp_path / "engine", tmp_path / "repository", {})
    assert not (tmp_path / "repository").exists()


def test_the_command_writes_the_repository_and_refuses_in_one_line(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ddtree", "triton", "--engine", str(engine), "--output", str(tmp_path / "r"), "--whole-trees"]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    assert configuration(tmp_path / "r").parameters["adaptive"].string_value == "false"
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"ddtree: {tmp_path / 'r'} holds a repository already")
