"""The plugins' classes on NVIDIA's compiled bindings, whose libraries are replaced by empty ones.

Without TensorRT's library nothing can be built or run, but fields, creators and clones are real objects here.
"""

import os
import subprocess
import sys

import pytest

from .tensorrt_wheels import BINDINGS, bindings

# All that the bindings' module wants from TensorRT's libraries to be imported.
EMPTY_LIBRARY = """
void* createInferBuilder_INTERNAL() { return 0; }
void* createInferRuntime_INTERNAL() { return 0; }
void* createInferRefitter_INTERNAL() { return 0; }
void* createNvOnnxParser_INTERNAL() { return 0; }
void* createNvOnnxParserRefitter_INTERNAL() { return 0; }
void* getPluginRegistry() { return 0; }
void* getBuilderPluginRegistry() { return 0; }
int getNvOnnxParserVersion() { return 0; }
int initLibNvInferPlugins() { return 1; }
"""

SCRIPT = """
import tensorrt as trt
from ddtree.plugins import tensorrt as plugins
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE

def values(fields):
    return {fields[i].name: fields[i].data.tolist() for i in range(len(fields))}

creators = {}
class Registry:
    def register_creator(self, creator, namespace):
        assert isinstance(creator, trt.IPluginCreatorV3One)
        creators[creator.name, creator.plugin_version, namespace] = creator

trt.get_plugin_registry = Registry
assert plugins.register("v3") == "v3"
for operation, attributes, numbers in (
    (DRAFT_TOPK, {"k": 7}, {"k": [7]}),
    (BUILD_TREE, {"budget": 31, "mode": "chain", "keep_chain": 1}, {"budget": [31], "mode": [1], "keep_chain": [1]}),
    (VERIFY_TREE, {"method": "greedy"}, {"method": [1]}),
):
    creator = creators[operation.name, "1", "ddtree"]
    assert list(values(creator.field_names)) == list(attributes)
    plugin = plugins.TreePlugin(operation, attributes)
    fields = plugin.get_fields_to_serialize()
    rest = [bytearray(64) for _ in range(1000)]  # would overwrite what nothing keeps
    assert values(fields) == numbers
    restored = creator.create_plugin(operation.name, fields, trt.TensorRTPhase.RUNTIME).clone()
    assert restored.attributes == plugin.attributes
    assert (restored.plugin_name, restored.plugin_namespace) == (operation.name, "ddtree")
    assert restored.num_outputs == len(restored.get_output_data_types([])) == len(operation.outputs)
    for capability in (trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime):
        assert isinstance(restored.get_capability_interface(None), capability)
print("done with", trt.__version__)
"""


@pytest.mark.parametrize("version", BINDINGS)
def test_v3_plugins_are_made_serialised_and_restored(version, request, tmp_path):
    major = version.split(".")[0]
    source = tmp_path / "empty.cpp"
    source.write_text(f'extern "C" {{{EMPTY_LIBRARY}}}')
    for library in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        name = f"lib{library}.so.{major}"
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-shared", "-fPIC", str(source), "-o", str(tmp_path / name), f"-Wl,-soname,{name}"]
        subprocess.run(command, check=True)
    package = tmp_path / "tensorrt"
    package.mkdir()
    (package / "__init__.py").write_text("from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n")
    wheel = bindings(version, request.config.cache.mkdir("tensorrt"))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(wheel)])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == f"done with {BINDINGS[version]}\n", result.stderr
