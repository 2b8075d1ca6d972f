"""The model of Triton's Python backend: one LLM, shared by all requests.

Imported by the process that Triton starts for a model, which alone has ``triton_python_backend_utils``.
"""

import asyncio
import concurrent.futures
import json
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import triton_python_backend_utils as pb_utils

from ddtree.builder import BuildError
from ddtree.runtime.errors import EngineError, QueueFullError, RequestError
from ddtree.runtime.results import GenerationResult
from ddtree.runtime.triton_repository import llm_arguments
from ddtree.runtime.triton_tensors import INPUTS, PREFIX, TritonRequest, read_request, response_tensors

_CANCELLATION_SECONDS = 0.1  # between looks at which requests their clients have given up; TensorRT-LLM's default
_CANCELLED = "Request cancelled by client"


class TritonPythonModel:
    """What Triton calls: ``initialize`` once, ``execute`` for new requests, ``finalize`` once.

    The thread that Triton calls submits requests. An event loop in a thread of its own sends their responses, and
    another thread asks Triton which clients have gone: each such question is a round trip to the server's process.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine.

        Args:
            args: Triton's; ``model_config`` is JSON, whose ``parameters`` are arguments of LLM.
        """
        from ddtree.runtime.llm import LLM  # late: Triton may import this file once more, to ask for a configuration

        parameters = json.loads(args["model_config"])["parameters"]
        try:
            self._llm = LLM(**llm_arguments({name: value["string_value"] for name, value in parameters.items()}))
        except (BuildError, EngineError, RequestError, TypeError) as error:
            raise pb_utils.TritonModelException(str(error)) from None
        self._running: dict[GenerationResult, tuple[Any, str]] = {}  # to the response sender and Triton's request id
        self._lock = threading.Lock()  # of _running; a sender in it has not sent its last response
        self._answers: set[concurrent.futures.Future[None]] = set()
        self._closing = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="responses"),
            threading.Thread(target=self._watch_cancellations, name="cancellations"),
        ]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: list[Any]) -> None:
        """Take requests in. Their responses follow, each through its request's own sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._submit(request, sender)
            except QueueFullError as error:
                _refuse(sender, str(error), pb_utils.TritonError.UNAVAILABLE)
            except RequestError as error:
                _refuse(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            except Exception as error:  # a defect; the other requests go on
                pb_utils.Logger.log_error(traceback.format_exc())
                _refuse(sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def finalize(self) -> None:
        """Close the engine. Should Triton not have waited for what runs, finish that first."""
        self._llm.shutdown(drain=True)
        concurrent.futures.wait(self._answers)
        self._closing.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    def _submit(self, request: Any, sender: Any) -> None:
        _check_parameters(json.loads(request.parameters()))
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if tensors.get("stop", False):
            self._stop(request.request_id())
            _refuse(sender, _CANCELLED, pb_utils.TritonError.CANCELLED)  # what TensorRT-LLM answers a stop with
            return
        asked = read_request(tensors)
        result = self._llm.generate_async(asked.prompt, asked.params, asked.streaming)
        with self._lock:
            self._running[result] = sender, request.request_id()
        answer = asyncio.run_coroutine_threadsafe(self._answer(sender, result, asked), self._loop)
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _answer(self, sender: Any, result: GenerationResult, asked: TritonRequest) -> None:
        try:
            async for output in result:
                if not output.finished:
                    if output.error is None:  # else of one of several texts; the others come to their ends first
                        _send(sender, response_tensors(output, asked), 0)
                    continue
                with self._lock:
                    del self._running[result]
                if output.error is not None:
                    _refuse(sender, output.error, pb_utils.TritonError.INTERNAL)
                elif sender.is_cancelled():
                    _refuse(sender, _CANCELLED, pb_utils.TritonError.CANCELLED)
                else:
                    tensors = response_tensors(output, asked)
                    _send(sender, tensors, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except Exception as error:  # a defect; the other requests go on
            pb_utils.Logger.log_error(traceback.format_exc())
            with self._lock:
                self._running.pop(result, None)
            result.abort()
            _refuse(sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def _stop(self, request_id: str) -> None:
        """End the requests of that id, of which none may be running any more."""
        if not request_id:
            raise RequestError(
                "stop is for a request by its id, and this one has none (give the id of the one to stop)"
            )
        with self._lock:
            stopped = [result for result, (_, running_id) in self._running.items() if running_id == request_id]
        for result in stopped:
            result.abort()

    def _watch_cancellations(self) -> None:
        while not self._closing.wait(_CANCELLATION_SECONDS):
            for result in list(self._running):
                with self._lock:  # Triton forgets a sender with its last response: do not ask it then
                    cancelled = result in self._running and self._running[result][0].is_cancelled()
                if cancelled:
                    result.abort()


def _check_parameters(parameters: Mapping[str, object]) -> None:
    """Refuse what HTTP's /generate makes a parameter of because no input has that name, if an input was meant."""
    for name in parameters:
        if PREFIX + name in INPUTS or name.startswith((PREFIX, "return_")) or name == "stream":
            raise RequestError(f"{name} is not an input of this model (inputs are named as in sampling_param_top_k)")


def _send(sender: Any, tensors: Mapping[str, Any], flags: int) -> None:
    response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])
    sender.send(response, flags)


def _refuse(sender: Any, message: str, code: Any) -> None:
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
    sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
