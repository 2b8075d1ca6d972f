"""The stand-ins against what they stand for: TensorRT's published type stubs, TensorRT for RTX itself, torch.cuda."""

import ast
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tensorrt_rtx
import torch

from ..plugins.tensorrt_wheels import type_stubs
from ..plugins.test_tensorrt_types import REPAIRS, attributes_of, parameters_of
from . import cuda_stand_in
from . import tensorrt_runtime_stand_in as stand_in

RUNTIME = ("ICudaEngine", "IExecutionContext", "ILogger", "Runtime")
ENUMERATIONS = ("DataType", "ExecutionContextAllocationStrategy", "TensorIOMode")
RTX = ("IRuntimeCache", "IRuntimeConfig")
OWN = {"launches", "replays", "waits", "keep", "restore"}  # what the stand-ins count, and their own work


@pytest.fixture(scope="module")
def published(request: pytest.FixtureRequest) -> dict[str, ast.ClassDef]:
    """The classes of the type stubs."""
    folder = type_stubs(request.config.cache.mkdir("tensorrt"))
    text = (folder / "tensorrt_bindings" / "tensorrt.pyi").read_text()
    for pattern, replacement in REPAIRS.items():
        text = re.sub(pattern, replacement, text)
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """What a stand-in has in public."""
    return ((name, value) for name, value in vars(cls).items() if not name.startswith("_") and name not in OWN)


@pytest.mark.parametrize("name", RUNTIME)
def test_the_runtime_has_the_published_names_and_parameters(name: str, published: dict[str, ast.ClassDef]) -> None:
    cls = getattr(stand_in, name)
    for member, value in members(cls):
        assert member in attributes_of(published[name], published) | nested(published[name]), member
        if inspect.isfunction(value):
            assert list(inspect.signature(value).parameters) in parameters_of(name, member, published), member


def nested(node: ast.ClassDef) -> set[str]:
    return {statement.name for statement in node.body if isinstance(statement, ast.ClassDef)}


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_the_enumerations_have_the_published_members(name: str, published: dict[str, ast.ClassDef]) -> None:
    assert set(getattr(stand_in, name).__members__) <= attributes_of(published[name], published)


@pytest.mark.parametrize("name", [*RUNTIME, *RTX])
def test_tensorrt_for_rtx_has_the_same_names_and_parameters(name: str) -> None:
    """Its classes are compiled: what they take is told by the first lines of their docstrings."""
    cls, real = getattr(stand_in, name), getattr(tensorrt_rtx, name)
    if name == "ICudaEngine":
        cls = stand_in.RtxCudaEngine
    for member, value in (pair for base in reversed(cls.__mro__[:-1]) for pair in members(base)):
        assert hasattr(real, member), member
        if inspect.isfunction(value):
            value = getattr(cls, member)
            assert list(inspect.signature(value).parameters) in documented(getattr(real, member), member), member
    for member in ("dynamic_shapes_kernel_specialization_strategy",) if name == "IRuntimeConfig" else ():
        assert isinstance(getattr(real, member), property)


def documented(method: Any, name: str) -> list[list[str]]:
    """The parameters of each overload of a compiled method."""
    found = re.findall(rf"^(?:\d+\. )?{name}\((self: .*)\) -> ", method.__doc__, re.MULTILINE)
    return [re.findall(r"(?:^|, )(\w+): ", parameters) for parameters in found]


@pytest.mark.parametrize("name", [*ENUMERATIONS, "DynamicShapesKernelSpecializationStrategy"])
def test_tensorrt_for_rtx_has_the_members(name: str) -> None:
    assert set(getattr(stand_in, name).__members__) <= set(getattr(tensorrt_rtx, name).__members__)


@pytest.mark.parametrize("name", ["Stream", "Event", "CUDAGraph", "stream", "graph"])
def test_torch_cuda_has_the_same_names_and_parameters(name: str) -> None:
    mine, real = getattr(cuda_stand_in, name), getattr(torch.cuda, name)
    pairs = [(mine, real)]
    if inspect.isclass(mine):
        pairs = [(mine.__init__, real.__new__)]
        pairs += [(value, getattr(real, member)) for member, value in members(mine) if inspect.isfunction(value)]
    for function, of_torch in pairs:
        parameters = [each for each in inspect.signature(function).parameters if each != "self"]
        theirs = [each for each in inspect.signature(of_torch).parameters if each not in ("self", "cls")]
        assert parameters == theirs[: len(parameters)], function


def test_the_checks_see_faults(published: dict[str, ast.ClassDef], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.IExecutionContext, "set_input_shape", lambda self, shape, name: True)
    with pytest.raises(AssertionError, match="set_input_shape"):
        test_the_runtime_has_the_published_names_and_parameters("IExecutionContext", published)
    with pytest.raises(AssertionError, match="set_input_shape"):
        test_tensorrt_for_rtx_has_the_same_names_and_parameters("IExecutionContext")
    monkeypatch.setattr(stand_in.Runtime, "open", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match="open"):
        test_the_runtime_has_the_published_names_and_parameters("Runtime", published)
