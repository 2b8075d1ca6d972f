"""The real server, asked by real clients over HTTP and gRPC; what it answers is what the Python API gives alone."""

import contextlib
import http.client
import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from triton_server.client import MODEL, TIMEOUT, GrpcStream, RefusedError, grpc_answers, http_answers
from triton_server.mixed_requests import (
    MALFORMED,
    PROMPTS,
    STOP,
    WORD,
    check_answer,
    model_inputs,
    random_settings,
    sampling_params,
)
from triton_server.server import Server, ServerError

from ddtree.runtime import LLM
from ddtree.runtime.triton_repository import write_repository

CLIENTS = {"grpc": grpc_answers, "http": http_answers}


def test_64_concurrent_requests_of_mixed_settings_get_the_answers_that_they_get_alone(server: Server, llm: LLM) -> None:
    draw = random.Random(20)
    requests = [(draw.choice(PROMPTS), random_settings(draw)) for _ in range(64)]
    for _, settings in requests:
        settings.setdefault("seed", draw.getrandbits(64))
    together = threading.Barrier(len(requests) + len(MALFORMED))

    def ask(index: int) -> list[dict[str, Any]]:
        prompt, settings = requests[index]
        inputs = model_inputs(prompt, settings, streaming=index % 4 < 2)
        together.wait()
        return CLIENTS["http" if index % 2 else "grpc"](server, inputs)

    def ask_in_vain(inputs: dict[str, Any]) -> None:
        together.wait()
        with pytest.raises(RefusedError):
            http_answers(server, inputs)

    with ThreadPoolExecutor(len(requests) + len(MALFORMED)) as pool:
        answers = [pool.submit(ask, index) for index in range(len(requests))]
        refusals = [pool.submit(ask_in_vain, inputs) for inputs, _ in MALFORMED]
    for refusal in refusals:
        refusal.result()
    spans = []
    for (prompt, settings), answer in zip(requests, answers, strict=True):
        check_answer(answer.result(), llm.generate(prompt, sampling_params(settings)))
        last = answer.result()[-1]
        assert last["arrival_time_ns"] <= last["first_scheduled_time_ns"] <= last["first_token_time_ns"]
        spans.append((last["first_scheduled_time_ns"], last["last_token_time_ns"]))
    most = max(sum(start <= moment < end for start, end in spans) for moment, _ in spans)
    assert most >= 4, f"at most {most} of the requests ran at once"


@pytest.mark.parametrize(("inputs", "message"), MALFORMED, ids=[message for _, message in MALFORMED])
def test_a_malformed_request_is_told_what_is_wrong(server: Server, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        http_answers(server, inputs)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({**WORD, "text_input": np.array([b"\xff"], object)}, "text_input is not UTF-8 at byte 0"),
        ({**WORD, "text_input": []}, "text_input has 0 elements"),
        ({**WORD, "sampling_param_temperature": float("nan")}, "temperature nan is not a finite number"),
    ],
)
def test_what_only_grpc_can_send_is_refused_too(server: Server, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message) as refused:
        grpc_answers(server, inputs, codes=True)
    assert refused.value.status == "StatusCode.INVALID_ARGUMENT"


def test_a_tensor_of_another_type_is_refused(server: Server) -> None:
    with pytest.raises(RefusedError, match="data-type is 'INT64'"):
        grpc_answers(server, {**WORD, "sampling_param_temperature": np.array([1])})


def test_a_request_that_fails_while_it_runs_is_told_why(server: Server) -> None:
    every_token = json.dumps({token: float("-inf") for token in range(1024)})
    with pytest.raises(RefusedError, match="no token is left") as refused:
        grpc_answers(server, {**WORD, "sampling_param_logit_bias": every_token}, codes=True)
    assert refused.value.status == "StatusCode.INTERNAL"


def test_the_prompt_comes_before_the_text_unless_it_is_excluded_or_the_text_streamed(server: Server, llm: LLM) -> None:
    text = llm.generate(PROMPTS[0]).outputs[0].text
    assert http_answers(server, {"text_input": PROMPTS[0]})[0]["text_output"] == PROMPTS[0] + text
    assert http_answers(server, {"text_input": PROMPTS[0], "streaming": True})[-1]["text_output"] == text


def test_what_was_not_asked_for_is_not_in_the_response(server: Server) -> None:
    assert [set(answer) for answer in grpc_answers(server, WORD)] == [{"text_output"}]


def test_figures_of_speculative_decoding_are_those_of_the_python_api(server: Server, llm: LLM) -> None:
    inputs = model_inputs(PROMPTS[0], {"max_tokens": 24})
    (answer,) = http_answers(server, inputs)
    expected = llm.generate(PROMPTS[0], sampling_params({"max_tokens": 24})).statistics
    assert answer["total_draft_tokens"] == expected.draft_tokens > 0
    assert answer["total_accepted_draft_tokens"] == expected.accepted_tokens > 0
    assert answer["acceptance_rate"] == pytest.approx(expected.accepted_tokens / expected.draft_tokens)


# A request that holds the only slot for long: texts one after another, of tokens that the drafter does not know.
LONG = {"max_tokens": 1900, "n": 8, "temperature": 1.5, "ignore_eos": True, "seed": 1}
SHARED_MEMORY = "triton_python_backend_shm_region_"
SHORT = {"max_tokens": 4, "seed": 1}


@pytest.fixture(scope="module")
def narrow_server(start_server: Callable[..., Server]) -> Iterator[Server]:
    """A server with one slot, and room in the queue for the other texts of LONG and one more."""
    server = start_server(max_batch_size=1, max_queue_size=8)
    yield server
    server.stop()


@contextlib.contextmanager
def long_request(server: Server) -> Iterator[tuple[GrpcStream, Iterator[dict[str, list[Any]]], float]]:
    """LONG, sent and running: its stream, the responses to come, and an estimate of the seconds that it would take."""
    start = time.monotonic()
    with GrpcStream(server, model_inputs(PROMPTS[0], LONG, streaming=True), request_id="long") as stream:
        responses = iter(stream)
        for _ in range(10):
            answer = next(responses)
        yield stream, responses, seconds_of_all(answer, start)


def seconds_of_all(answer: dict[str, Any], start: float) -> float:
    """How long LONG would take, guessed low from a response to it."""
    characters = len(answer["text_output"][0])  # no fewer than tokens
    return (time.monotonic() - start) / characters * LONG["max_tokens"] * LONG["n"]


def seconds_of_a_short_request(server: Server, llm: LLM) -> float:
    start = time.monotonic()
    answers = http_answers(server, model_inputs(PROMPTS[1], SHORT))
    seconds = time.monotonic() - start
    check_answer(answers, llm.generate(PROMPTS[1], sampling_params(SHORT)))
    return seconds


def test_a_client_that_goes_away_frees_the_slot(narrow_server: Server, llm: LLM) -> None:
    with long_request(narrow_server) as (stream, _, seconds):
        stream.cancel()
        assert seconds_of_a_short_request(narrow_server, llm) < seconds / 4


def test_a_closed_http_connection_frees_the_slot(narrow_server: Server, llm: LLM) -> None:
    start = time.monotonic()
    connection = http.client.HTTPConnection(narrow_server.http, timeout=TIMEOUT)
    inputs = model_inputs(PROMPTS[0], LONG, streaming=True)
    connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(inputs))
    response = connection.getresponse()
    events = (line for line in response if line.startswith(b"data: "))
    for event in itertools.islice(events, 10):
        answer = json.loads(event.removeprefix(b"data: "))
    seconds = seconds_of_all(answer, start)
    response.close()
    connection.close()
    assert seconds_of_a_short_request(narrow_server, llm) < seconds / 4


def test_a_stop_by_request_id_ends_the_request_with_what_it_has(narrow_server: Server, llm: LLM) -> None:
    with long_request(narrow_server) as (_, responses, seconds):
        with pytest.raises(RefusedError, match="cancelled") as refused:
            grpc_answers(narrow_server, STOP, request_id="long", codes=True)
        assert refused.value.status == "StatusCode.CANCELLED"
        assert seconds_of_a_short_request(narrow_server, llm) < seconds / 4
        last = list(responses)[-1]
    assert set(last["finish_reason"]) == {"cancelled"}
    assert len(last["text_output"][0]) > 0
    assert last["text_output"][-1] == ""  # its turn had not come


def test_a_stop_leaves_other_requests_alone(narrow_server: Server, llm: LLM) -> None:
    settings = {"max_tokens": 60, "ignore_eos": True, "seed": 1}
    with GrpcStream(narrow_server, model_inputs(PROMPTS[0], settings, streaming=True), request_id="mine") as stream:
        responses = iter(stream)
        first = next(responses)
        with pytest.raises(RefusedError, match="cancelled"):
            http_answers(narrow_server, {**STOP, "id": "other"})
        check_answer([first, *responses], llm.generate(PROMPTS[0], sampling_params(settings)))


def test_a_full_queue_refuses_and_loses_nothing(narrow_server: Server, llm: LLM) -> None:
    inputs = model_inputs(PROMPTS[1], SHORT, streaming=True)
    with long_request(narrow_server) as (long, _, _), GrpcStream(narrow_server, inputs) as waiting:
        with pytest.raises(RefusedError, match="the queue is full") as refused:
            grpc_answers(narrow_server, {**WORD, "sampling_param_n": 2, "sampling_param_temperature": 1.0}, codes=True)
        assert refused.value.status == "StatusCode.UNAVAILABLE"
        long.cancel()
        check_answer(list(waiting), llm.generate(PROMPTS[1], sampling_params(SHORT)))


def test_sigterm_finishes_what_runs_and_what_waits(start_server: Callable[..., Server], llm: LLM) -> None:
    server = start_server(max_batch_size=2)
    settings = [{"max_tokens": 150, "ignore_eos": True, "temperature": 1.5, "seed": seed} for seed in range(5)]
    with contextlib.ExitStack() as open_streams:
        streams = [
            open_streams.enter_context(GrpcStream(server, model_inputs(PROMPTS[0], setting, streaming=True)))
            for setting in settings
        ]
        responses = [iter(stream) for stream in streams]
        answers = [[next(responses[0])], *([] for _ in responses[1:])]  # the first runs
        backend = server.backend_pid()
        (memory,) = [Path("/dev/shm", name) for name in command_line(backend) if name.startswith(SHARED_MEMORY)]
        assert memory.exists()
        server.terminate()
        ended = time.monotonic_ns()
        for answer, response in zip(answers, responses, strict=True):
            answer.extend(response)
    for answer, setting in zip(answers, settings, strict=True):
        check_answer(answer, llm.generate(PROMPTS[0], sampling_params(setting)))
    assert max(answer[-1]["last_token_time_ns"][0] for answer in answers) > ended + 1_000_000_000  # after the signal
    assert server.stop() == 0
    assert not Path(f"/proc/{backend}").exists()
    assert not memory.exists()


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_a_model_whose_engine_is_gone_ends_the_server_with_a_line_that_names_it(engine: Path, tmp_path: Path) -> None:
    shutil.copytree(engine, tmp_path / "engine")
    write_repository(tmp_path / "engine", tmp_path / "repository", {})
    shutil.rmtree(tmp_path / "engine")
    with pytest.raises(ServerError, match=f"{tmp_path / 'engine'} is not a directory"):
        Server(tmp_path / "repository", tmp_path / "log").start()
