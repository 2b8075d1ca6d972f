"""Requests to a Triton server, as its clients send them: HTTP's generate extension, and streams of gRPC."""

import http.client
import json
import queue
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from triton_server.server import Server
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODEL = "tensorrt_llm"
TIMEOUT = 120  # seconds, of one response


class RefusedError(Exception):
    """The server's error: ``status`` is HTTP's code or gRPC's word, the text is the server's."""

    def __init__(self, status: int | str | None, message: str):
        super().__init__(message)
        self.status = status


def http_answers(server: Server, inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All responses to a request over HTTP, of ``generate_stream`` if it is to be streamed, else of ``generate``."""
    path = "generate_stream" if inputs.get("streaming") else "generate"
    connection = http.client.HTTPConnection(server.http, timeout=TIMEOUT)
    try:
        connection.request("POST", f"/v2/models/{MODEL}/{path}", json.dumps(inputs), {"Connection": "close"})
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    events = [line.removeprefix("data: ") for line in body.split("\n\n") if line] if inputs.get("streaming") else [body]
    answers = [json.loads(event) for event in events]
    for answer in answers:
        if "error" in answer:
            raise RefusedError(response.status, answer["error"])
    return answers


class GrpcStream:
    """One request on a gRPC stream of its own. Leaving the ``with`` block closes the stream: a server that is to end
    waits for those that are open, idle ones too. With ``codes`` an error comes with its code, and ends the stream."""

    def __init__(self, server: Server, inputs: Mapping[str, Any], request_id: str = "", *, codes: bool = False):
        tensors = [_tensor(name, value) for name, value in inputs.items()]
        self._responses: queue.Queue[InferResult | InferenceServerException] = queue.Queue()
        self._answered = False
        self._client = InferenceServerClient(server.grpc)
        self._client.start_stream(
            lambda result, error: self._responses.put(error if result is None else result),
            headers={"triton_grpc_error": "true"} if codes else None,
        )
        self._client.async_stream_infer(
            MODEL,
            tensors,
            request_id=request_id,
            enable_empty_final_response=True,
        )

    def __enter__(self) -> "GrpcStream":
        return self

    def __exit__(self, *_: object) -> None:
        # Triton 2.51 does not exit before its timeout once a stream was cancelled whose request had been answered.
        self._client.stop_stream(cancel_requests=not self._answered)
        self._client.close()

    def __iter__(self) -> Iterator[dict[str, list[Any]]]:
        """The tensors of each response, strings as text, until the final one."""
        while True:
            response = self._responses.get(timeout=TIMEOUT)
            if isinstance(response, InferenceServerException):
                self._answered = True
                raise RefusedError(response.status(), response.message())
            message = response.get_response()
            if message.outputs:
                yield {output.name: _plain(response.as_numpy(output.name)) for output in message.outputs}
            if message.parameters["triton_final_response"].bool_param:
                self._answered = True
                return

    def cancel(self) -> None:
        """Give the request up, as a client that goes away does."""
        self._client.stop_stream(cancel_requests=True)


def grpc_answers(
    server: Server, inputs: Mapping[str, Any], request_id: str = "", *, codes: bool = False
) -> list[dict[str, Any]]:
    """All responses to a request over gRPC; tensors of one element are that element, as over HTTP."""
    with GrpcStream(server, inputs, request_id, codes=codes) as stream:
        return [
            {name: values[0] if len(values) == 1 else values for name, values in tensors.items()} for tensors in stream
        ]


def _tensor(name: str, value: Any) -> InferInput:
    if isinstance(value, np.ndarray):
        array = value
    else:
        values = value if isinstance(value, list) else [value]
        kinds = {bool: np.bool_, int: np.uint64 if name == "sampling_param_seed" else np.int32, float: np.float32}
        array = np.array(values, kinds.get(type(values[0]), np.object_) if values else np.object_)
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _plain(array: np.ndarray) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
