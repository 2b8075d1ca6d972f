"""Opens an engine directory and generates. Names that TensorRT-LLM has too are spelled as there."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddtree.runtime.errors import EngineError, QueueFullError, RequestError
    from ddtree.runtime.llm import LLM
    from ddtree.runtime.results import CompletionOutput, GenerationResult, RequestOutput, Statistics
    from ddtree.runtime.sampling_params import GuidedDecodingParams, SamplingParams

_HOMES = {
    "LLM": "llm",
    "SamplingParams": "sampling_params",
    "GuidedDecodingParams": "sampling_params",
    "RequestOutput": "results",
    "CompletionOutput": "results",
    "GenerationResult": "results",
    "Statistics": "results",
    "RequestError": "errors",
    "QueueFullError": "errors",
    "EngineError": "errors",
}

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineError",
    "GenerationResult",
    "GuidedDecodingParams",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "Statistics",
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used: `ddtree --help` does not wait for PyTorch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
