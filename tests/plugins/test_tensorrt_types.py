"""``plugins/tensorrt.py`` and its stand-in against the published type stubs of TensorRT."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from . import tensorrt_stand_in as stand_in
from .tensorrt_wheels import type_stubs

PLUGINS = Path(__file__).parents[2] / "plugins"

# The stand-in's own, which TensorRT does not have.
OWN_CLASSES = {"OneElementArray", "Launch", "BuiltLayer"}
OWN_MEMBERS = {
    "IDimensionExpr.value",
    "INetworkDefinition.add_onnx_node",
    "PluginField.data_class",
    "PluginField.repeats_first",
}


# Text of the stubs -> what a type checker needs there. Parameters called "in" do not parse, nor does one without a
# default after others that have one. The rest are conversions that the bindings do and the stubs do not tell.
REPAIRS = {
    r"\bin: list\[": "inputs: list[",
    r"\bout: list\[": "outputs: list[",
    r"channel_axis: int\)": "channel_axis: int = ...)",
    r"\bname: FallbackString": "name: str",
    r"-> PluginFieldCollection_": "-> PluginFieldCollection",
    r"field_names: PluginFieldCollection_": "field_names: PluginFieldCollection",
}
CONFIG = """
[mypy]
namespace_packages = True
explicit_package_bases = True
check_untyped_defs = True
ignore_missing_imports = True
follow_imports = silent
[mypy-tensorrt.*,tensorrt_bindings.*]
ignore_errors = True
[mypy-torch.*,numpy.*]
follow_imports = skip
"""


@pytest.fixture(scope="session")
def stubs(request, tmp_path_factory) -> Path:
    published = type_stubs(request.config.cache.mkdir("tensorrt"))
    folder = tmp_path_factory.mktemp("stubs")
    for path in published.glob("tensorrt*/*.pyi"):
        text = path.read_text()
        for pattern, replacement in REPAIRS.items():
            text = re.sub(pattern, replacement, text)
        (folder / path.parent.name).mkdir(exist_ok=True)
        (folder / path.parent.name / path.name).write_text(text)
    return folder


def type_errors(source: str, stubs: Path, scratch: Path) -> list[str]:
    """What mypy says of this text of plugins/tensorrt.py, "line: message"."""
    package = scratch / "ddtree" / "plugins"
    package.mkdir(parents=True)
    for path in PLUGINS.glob("*.py"):
        (package / path.name).write_text(path.read_text())
    (package / "tensorrt.py").write_text(source)
    (scratch / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(stubs / "cache")]
    command += ["-m", "ddtree.plugins.tensorrt"]
    environment = {**os.environ, "MYPYPATH": f"{scratch}{os.pathsep}{stubs}"}
    result = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
    assert result.returncode in (0, 1), result.stdout + result.stderr
    return re.findall(r"^ddtree/plugins/tensorrt\.py:(\d+: error: .*)$", result.stdout, re.MULTILINE)


def test_the_plugins_have_the_types_that_tensorrt_publishes(stubs, tmp_path):
    assert type_errors((PLUGINS / "tensorrt.py").read_text(), stubs, tmp_path) == []


def test_the_check_sees_faults(stubs, tmp_path):
    faults = {
        "self.num_outputs = len(operation.outputs)": "self.num_outputs = operation.outputs",
        "def get_valid_tactics(self) -> list[int]:": "def get_valid_tactics(self, more: int) -> list[int]:",
        "trt.TensorFormat.LINEAR": "trt.TensorFormat.FLAT",
    }
    source = (PLUGINS / "tensorrt.py").read_text()
    lines = set()
    for right, wrong in faults.items():
        assert source.count(right) == 1
        lines.add(source[: source.index(right)].count("\n") + 1)
        source = source.replace(right, wrong)
    assert {int(error.split(":")[0]) for error in type_errors(source, stubs, tmp_path)} == lines


def test_the_stand_in_has_the_published_names_and_parameters(stubs):
    published = {
        node.name: node
        for node in ast.parse((stubs / "tensorrt_bindings" / "tensorrt.pyi").read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    mine = {
        name: value
        for name, value in vars(stand_in).items()
        if isinstance(value, type) and value.__module__ == stand_in.__name__ and name not in OWN_CLASSES
    }
    assert len(mine) > 30
    for name, value in mine.items():
        assert name in published, name
        members = vars(value)
        if hasattr(value, "__members__"):
            assert set(value.__members__) <= attributes_of(published[name], published), name
            continue
        for member, function in members.items():
            if member.startswith("_") or f"{name}.{member}" in OWN_MEMBERS:
                continue
            assert member in attributes_of(published[name], published), f"{name}.{member}"
            if inspect.isfunction(function):
                assert list(inspect.signature(function).parameters) in parameters_of(name, member, published), member


def attributes_of(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    names = set()
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            names.add(statement.target.id)
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            names |= attributes_of(classes[base.id], classes)
    return names


def parameters_of(name: str, method: str, classes: dict[str, ast.ClassDef]) -> list[list[str]]:
    """The parameters of each overload, from the class itself or the first of its bases that has the method."""
    node = classes[name]
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == method]
    if functions:
        return [[argument.arg for argument in function.args.args] for function in functions]
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return next(filter(None, (parameters_of(base, method, classes) for base in bases)), [])
