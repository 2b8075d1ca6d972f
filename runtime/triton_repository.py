"""Writes a model repository for Triton Inference Server: one model of the Python backend, which serves an engine."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddtree.builder import Manifest
from ddtree.runtime.errors import RequestError
from ddtree.runtime.triton_tensors import INPUTS, OUTPUTS, REQUIRED_INPUT, Tensor

MODEL = "tensorrt_llm"  # the name that clients of TensorRT-LLM's repository ask for

_IMPORT = "from ddtree.runtime.triton_model import TritonPythonModel"
_MODEL_PY = f'''"""What Triton loads. The code is in the package, so that a new version reaches this repository."""

{_IMPORT}

__all__ = ["TritonPythonModel"]
'''

_HEAD = """\
# Written by `ddtree triton`. The model's name is that of its folder.
backend: "python"
max_batch_size: 0  # Triton does not batch: requests share the engine's batches, joining and leaving between rounds
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]  # one engine; KIND_CPU: Triton has no GPU to choose for it
"""


def write_repository(engine: Path, output: Path, settings: Mapping[str, object], *, force: bool = False) -> None:
    """Write a model repository whose one model serves ``engine``.

    It is written beside ``output`` and renamed: a failure leaves nothing behind.

    Args:
        engine: an engine directory. The repository holds its path, not a copy.
        output: must not exist, or be empty, or with ``force`` be a repository that this function wrote.
        settings: arguments of ``LLM``, by name; those that are None are left to it.

    Raises:
        BuildError: ``engine`` cannot be opened.
        RequestError: ``output`` is in the way.
    """
    Manifest.load(engine)
    try:
        str(engine.resolve()).encode()
    except UnicodeEncodeError:
        raise RequestError(f"{engine!r} is not UTF-8, which a model's configuration is (rename it)") from None
    _check_output(output, force)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
        staging = Path(scratch) / "repository"
        version = staging / MODEL / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL_PY)
        configuration = "\n".join(_configuration(_parameters(engine.resolve(), settings)))
        (staging / MODEL / "config.pbtxt").write_text(configuration, encoding="utf-8")
        if output.is_dir() and any(output.iterdir()):
            output.rename(Path(scratch) / "replaced")
        staging.rename(output)


def llm_arguments(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of ``LLM`` from the parameters of a model's configuration. Names in capitals are Triton's own."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    settings = {name: value(text) for name, text in parameters.items() if name != "engine" and not name.isupper()}
    return {"model": parameters.get("engine"), **settings}


def _parameters(engine: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """What ``llm_arguments`` reads."""
    given = {name: value for name, value in settings.items() if value is not None}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return {"engine": str(engine), **texts}


def _check_output(output: Path, force: bool) -> None:
    if output.is_dir():
        entries = list(output.iterdir())
        if not entries:
            return
        ours = [entry.name for entry in entries] == [MODEL] and _is_ours(output / MODEL)
        if not ours:
            raise RequestError(f"{output} is not empty and not a repository of this command (use another directory)")
        if not force:
            raise RequestError(f"{output} holds a repository already (use --force to replace it, or another directory)")
    elif output.exists() or output.is_symlink():
        raise RequestError(f"{output} is not a directory (use another path)")


def _is_ours(model: Path) -> bool:
    try:
        return _IMPORT in (model / "1" / "model.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def _configuration(parameters: Mapping[str, str]) -> Iterator[str]:
    yield _HEAD
    yield "# Arguments of ddtree.runtime.LLM; what is not given is its default."
    for name, value in parameters.items():
        yield f'parameters {{ key: "{name}" value {{ string_value: {_quoted(value)} }} }}'
    yield ""
    for name, tensor in INPUTS.items():
        yield _tensor("input", name, tensor, " optional: true" if name != REQUIRED_INPUT else "")
    yield ""
    for name, tensor in OUTPUTS.items():
        yield _tensor("output", name, tensor, "")
    yield ""


def _tensor(kind: str, name: str, tensor: Tensor, rest: str) -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{tensor.data_type} dims: [ {tensor.elements} ]{rest} }}'


def _quoted(text: str) -> str:
    """A string of protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
