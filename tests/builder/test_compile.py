"""Compiled engines: built for sm_120 by TensorRT for RTX, without a GPU; what it built is read from its own log.

The library ``tensorrt`` builds on a GPU alone. What is its own here (its name, its version, its way to say for which
GPU) is tried with a stand-in that lends the other library's classes.
"""

import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt_rtx
import torch
from onnx import TensorProto, helper

from ddtree.builder import BuildError, Manifest, build_engine, compile, plans, tree_plugins
from ddtree.builder.compile import Kernel, Network, cache_copies, compile_graph, load_library
from ddtree.builder.manifest import DraftInfo
from ddtree.plugins import launch
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, VERIFY_TREE

from .models import VOCAB, Case, make_draft, make_target

TARGET_LAYERS, DRAFT_LAYERS, HEAD_DIM = 2, 1, 16
LIMITS = {"max_batch_size": 3, "max_seq_len": 100, "max_tree_nodes": 15}
GROUPED, SINGLE = (4, 2, HEAD_DIM), (2, 2, HEAD_DIM)  # query heads, KV heads, head_dim
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}


def make_pair(root: Path, heads: tuple[int, int, int], storage: torch.dtype, **config: Any) -> Path:
    """Checkpoints of a random target of two layers and a drafter of one."""
    layers = {"num_hidden_layers": TARGET_LAYERS}
    target = make_target(Case("small", "qwen3", heads, 64, False, storage, config=layers | config), root / "target")
    make_draft(
        target,
        root / "draft",
        layers=DRAFT_LAYERS,
        storage=storage,
        num_target_layers=TARGET_LAYERS,
        target_layer_ids=[0, 1],
        dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 1]},
    )
    return root


@dataclass(frozen=True)
class Built:
    directory: Path
    manifest: Manifest
    kernels: dict[str, list[Kernel]]  # of the target and the draft


def build(root: Path, output: str = "engine", **settings: Any) -> Built:
    """Build an engine, and keep what the library said of its kernels."""
    kernels = {}

    def recorded(library: Any, graph: Path, *args: Any, **kwargs: Any) -> list[Kernel]:
        kernels[graph.stem] = compile_graph(library, graph, *args, **kwargs)
        return kernels[graph.stem]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "compile_graph", recorded)
        settings = {"engine": "tensorrt_rtx"} | LIMITS | settings
        manifest = build_engine(root / "target", root / "draft", root / output, **settings)
    return Built(root / output, manifest, kernels)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 pair, not to be changed."""
    return make_pair(tmp_path_factory.mktemp("checkpoints"), GROUPED, torch.bfloat16)


@pytest.fixture(
    scope="module",
    params=[
        ("bfloat16", GROUPED, {}),
        ("float16", GROUPED, {}),
        ("float16", SINGLE, WINDOWS),
        ("bfloat16", SINGLE, {}),
    ],
    ids=["grouped_bfloat16", "grouped_float16", "single_windows_float16", "single_bfloat16"],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An engine of each dtype, with query heads in groups and without."""
    dtype, heads, config = request.param
    root = make_pair(tmp_path_factory.mktemp("pair"), heads, getattr(torch, dtype), **config)
    return build(root, arch="sm_120", dtype=dtype)


def listing(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


# What is built


def test_an_engine_for_sm_120_is_built_without_a_gpu(built: Built) -> None:
    manifest = Manifest.verify(built.directory)
    assert manifest == built.manifest
    assert manifest.engine == "tensorrt_rtx"
    assert manifest.notes == ()
    names = {"config.json", "target.engine", "draft.engine", "tokenizer.json", "generation_config.json"}
    assert {path.name for path in built.directory.iterdir()} == names  # no graphs, no weights: they are in the engines
    assert manifest.tokenizer_files == ("tokenizer.json", "generation_config.json")
    assert {file.name for file in manifest.sources} == {
        f"{role}/{name}" for role in ("target", "draft") for name in ("config.json", "model.safetensors")
    }
    compiled, draft = manifest.compiled, manifest.draft
    assert compiled is not None
    assert draft is not None
    version = tensorrt_rtx.__version__
    assert manifest.versions["tensorrt_rtx"] == version
    assert (compiled.arch, compiled.verify) == ("sm_120", "kernel")
    assert compiled.version_compatibility == f"tensorrt_rtx {version} only"
    assert compiled.hardware_compatibility == "GPUs of compute capability 12.0 only"
    chunk, nodes = compiled.prefill_chunk, LIMITS["max_tree_nodes"] + 1
    assert compiled.target_cache_length >= LIMITS["max_seq_len"] + max(nodes, chunk)
    assert compiled.draft_cache_length is not None
    assert compiled.draft_cache_length >= LIMITS["max_seq_len"] + max(draft.max_depth + 1, chunk) + draft.block_size


def test_attention_reads_kv_caches_where_they_lie(built: Built) -> None:
    """In every profile one fused kernel a layer reads its keys and values, and nothing else does or copies a cache."""
    compiled = built.manifest.compiled
    assert compiled is not None
    for role, layers, length in (
        ("target", TARGET_LAYERS, compiled.target_cache_length),
        ("draft", DRAFT_LAYERS, compiled.draft_cache_length),
    ):
        kernels = built.kernels[role]
        assert length is not None
        assert cache_copies(kernels, length, HEAD_DIM) == []
        caches = {f"present.{layer}.{part}" for layer in range(layers) for part in ("key", "value")}
        writers = [kernel for kernel in kernels if caches & set(kernel.outputs)]
        readers = [kernel for kernel in kernels if caches & set(kernel.inputs) and kernel not in writers]
        read = [set(kernel.inputs) & caches for kernel in readers]
        assert sorted(map(sorted, read)) == sorted(
            [f"present.{layer}.key", f"present.{layer}.value"] for layer in range(layers) for _ in range(2)
        )
        assert all("mha" in kernel.name for kernel in readers)
        assert sorted(name for kernel in writers for name in set(kernel.outputs) & caches) == sorted([*caches] * 2)
        assert not any(name.startswith("past_") for kernel in kernels for name in kernel.inputs)


@pytest.mark.parametrize("heads", [GROUPED, SINGLE], ids=["grouped", "single"])
def test_without_the_rewrite_whole_caches_are_copied_and_that_is_found(
    heads: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library makes of the graph as it is: should this fail one day, the rewrite can go."""
    monkeypatch.setattr(Network, "read_caches_in_place", lambda network: None)
    built = build(make_pair(tmp_path, heads, torch.float16))
    assert built.manifest.compiled is not None
    copies = cache_copies(built.kernels["target"], built.manifest.compiled.target_cache_length, HEAD_DIM)
    assert len(copies) == 2 * TARGET_LAYERS * 2  # key and value, of each layer, in each profile
    assert any("copies whole KV caches in target.engine" in note for note in built.manifest.notes)


def test_copies_are_told_from_what_attention_reads_and_writes() -> None:
    key, rows, out = (-1, 2, 256, 16), (-1, 2, -1, 16), (-1, -1, 16)
    update = Kernel("update", {"present.0.key": key, "k": rows}, {"present.0.key": key})
    attention = Kernel("mha", {"q": out, "present.0.key": key, "attention_mask": (-1, 1, -1, 256)}, {"attended": out})
    mask = Kernel("cast", {"attention_mask": (-1, 1, -1, 256)}, {"cast_mask": (-1, 1, -1, 256)})
    assert cache_copies([update, attention, mask], 256, 16) == []
    for shape in ((-1, 16, 256), (-1, 2, 2, 256, 16), (-1, 256, 16), (12, 256, 16)):
        copy = Kernel("copy", {"present.0.key": key}, {"copied": shape})
        assert cache_copies([update, copy, attention], 256, 16) == ["copy: present.0.key"]


# The network


@dataclass(frozen=True)
class Parsed:
    network: Network
    builder: Any
    parser: Any  # some of the network's weights lie in it


def parse(graph: Path) -> Parsed:
    """The library's network of an ONNX file."""
    logger = compile._logger(tensorrt_rtx)
    builder = tensorrt_rtx.Builder(logger)
    network = Network(tensorrt_rtx, builder.create_network(0), onnx.load(graph, load_external_data=False).graph)
    parser = tensorrt_rtx.OnnxParser(network.definition, logger)
    assert parser.parse_from_file(str(graph))
    return Parsed(network, builder, parser)


@pytest.fixture(scope="module")
def graphs(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graphs and weights that a build compiles."""
    kept = tmp_path_factory.mktemp("graphs")

    def keep(library: Any, graph: Path, *args: Any, **kwargs: Any) -> list[Kernel]:
        for file in graph.parent.iterdir():
            if not (kept / file.name).exists():
                os.link(file, kept / file.name)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "compile_graph", keep)
        build_engine(checkpoints / "target", checkpoints / "draft", kept / "engine", engine="tensorrt_rtx", **LIMITS)
    return kept


def producers(network: Network) -> dict[str, Any]:
    return {layer.get_output(0).name: layer for layer in network._layers()}


@pytest.mark.parametrize(("role", "layers"), [("target", TARGET_LAYERS), ("draft", DRAFT_LAYERS)])
def test_the_query_alone_is_scaled_and_before_its_rotation(graphs: Path, role: str, layers: int) -> None:
    parsed = parse(graphs / f"{role}.onnx")
    network, types = parsed.network, tensorrt_rtx.LayerType
    network.read_caches_in_place()
    made = producers(network)
    attentions = [layer for layer in network._layers() if layer.type == types.ATTENTION_INPUT]
    assert len(attentions) == layers
    outputs = {network.definition.get_output(i).name for i in range(network.definition.num_outputs)}
    for index, attention in enumerate(attentions):
        query, key, value, mask = (attention.get_input(i).name for i in range(4))
        assert (query, key, value) == (f"query.{index}", f"present.{index}.key", f"present.{index}.value")
        assert mask == "attention_mask"
        assert query in outputs
        assert made[query].type == types.ROTARY_EMBEDDING
        scaled = made[made[query].get_input(0).name]
        assert scaled.type == types.ELEMENTWISE
        factor = made[made[scaled.get_input(1).name].get_input(0).name]  # behind the cast to the engine's dtype
        factor.__class__ = tensorrt_rtx.IConstantLayer
        assert np.asarray(factor.weights).ravel().tolist() == [HEAD_DIM**-0.5]


def test_a_network_with_a_layer_less_is_refused(graphs: Path) -> None:
    network = parse(graphs / "draft.onnx").network
    network.check_parsed("draft.onnx")
    network._model.node.add().op_type = "Attention"
    with pytest.raises(BuildError, match=r"2 Attention nodes became 1 ATTENTION_INPUT layers"):
        network.check_parsed("draft.onnx")


def test_profiles_are_for_prompts_and_for_trees(checkpoints: Path, tmp_path: Path) -> None:
    seen = {}

    def keep(library: Any, graph: Path, *args: Any, profiles: list, **kwargs: Any) -> list[Kernel]:
        parsed = parse(graph)
        made = [parsed.network.profile(parsed.builder, ranges) for ranges in profiles]
        config = parsed.builder.create_builder_config()
        assert [config.add_optimization_profile(profile) for profile in made] == [0, 1]  # -1: refused
        seen[graph.stem] = [
            lambda name, profile=profile: [tuple(shape) for shape in profile.get_shape(name)] for profile in made
        ]
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "compile_graph", keep)
        manifest = build_engine(
            checkpoints / "target", checkpoints / "draft", tmp_path / "engine", engine="tensorrt_rtx", **LIMITS
        )
    compiled, draft = manifest.compiled, manifest.draft
    assert compiled is not None
    assert draft is not None
    cache, draft_cache = compiled.target_cache_length, compiled.draft_cache_length
    prompt, tree = seen["target"]
    assert prompt("input_ids") == [(1, 1), (3, 100), (3, 100)]
    assert prompt("logit_rows") == [(1, 1), (3, 1), (3, 1)]
    assert tree("input_ids") == tree("logit_rows") == [(1, 1), (3, 16), (3, 16)]
    assert tree("attention_mask") == [(1, 1, 1, cache), (3, 1, 16, cache), (3, 1, 16, cache)]
    assert tree("past_key_values.1.value") == [(n, 2, cache, HEAD_DIM) for n in (1, 3, 3)]
    prompt, rounds = seen["draft"]
    depth, block = draft.max_depth, draft.block_size
    assert prompt("context_features") == [(1, 1, 128), (3, 100, 128), (3, 100, 128)]
    assert rounds("context_position_ids") == [(1, 1), (3, depth + 1), (3, depth + 1)]
    assert rounds("attention_mask") == [(n, 1, block, draft_cache) for n in (1, 3, 3)]


# What goes wrong


def write_model(path: Path, nodes: list[onnx.NodeProto], *more: onnx.ValueInfoProto) -> Path:
    """An ONNX file with float16 inputs q, k and v, and the output of the last node."""
    value = helper.make_tensor_value_info
    inputs = [value("q", TensorProto.FLOAT16, ["batch", 4, "seq", 16])]
    inputs += [value(name, TensorProto.FLOAT16, ["batch", 2, 64, 16]) for name in "kv"]
    output = value(nodes[-1].output[0], TensorProto.FLOAT16, ["batch", 4, "seq", 16])
    graph = helper.make_graph(nodes, "g", [*inputs, *more], [output])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return path


def refused(graph: Path, *words: str, extend: Callable[[Network], None] | None = None) -> str:
    """Compile for sm_120, and expect a one-line error that has every word."""
    settings: dict[str, Any] = {"arch": "sm_120", "profiles": [{"batch": (1, 2, 2), "seq": (1, 8, 8)}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Network, "read_caches_in_place", lambda network: None)  # these graphs have no caches
        with pytest.raises(BuildError) as caught:
            compile_graph(
                tensorrt_rtx,
                graph,
                graph.with_suffix(".engine"),
                extend=extend,
                progress=lambda *_: None,
                **settings,
            )
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"tensorrt_rtx {tensorrt_rtx.__version__} cannot build {graph.name}")
    assert message.endswith(")")
    for word in words:
        assert word in message
    return message


def test_every_error_of_the_parser_is_reported(tmp_path: Path) -> None:
    attention = helper.make_node("Attention", ["q", "k", "v"], ["o"], name="first", softcap=3.0)
    unknown = [helper.make_node(name, ["o"], [f"{name}_out"], name=name.lower()) for name in ("Foo", "Bar")]
    message = refused(write_model(tmp_path / "bad.onnx", [attention, *unknown]), "first", "softcap", "foo", "bar")
    assert message.count("In node ") == 3
    assert not (tmp_path / "bad.engine").exists()


def test_an_input_that_the_library_ignores_is_an_error(tmp_path: Path) -> None:
    """``nonpad_kv_seqlen``, which its parser takes and forgets."""
    attention = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["o"])
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, ["batch"])
    refused(write_model(tmp_path / "ignored.onnx", [attention], lengths), "Unused Input: lengths")


def test_an_error_line_of_a_build_that_goes_on_is_an_error(tmp_path: Path) -> None:
    """A mask that does not go with causal attention: the library says so, drops the mask, and builds."""

    def add_causal_attention(network: Network) -> None:
        q, k, v = (network.definition.get_input(i) for i in range(3))
        softmax, causal = tensorrt_rtx.AttentionNormalizationOp.SOFTMAX, tensorrt_rtx.CausalMaskKind.LOWER_RIGHT
        layer = network.definition.add_attention_v2(q, k, v, softmax, causal)
        layer.mask = network.input("mask", "float16", ["batch", 1, "seq", 64])
        assert layer.mask is None
        network.output(layer.get_output(0), "attended")
        network.output(network.definition.add_identity(network.definition.get_input(3)).get_output(0), "mask_too")

    attention = helper.make_node("Attention", ["q", "k", "v"], ["o"])
    graph = write_model(tmp_path / "masked.onnx", [attention])
    refused(graph, "mask cannot be used together with CausalMaskKind", extend=add_causal_attention)


def test_a_graph_that_has_no_kernel_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    make_pair(tmp_path, (4, 2, 8), torch.bfloat16)  # head_dim 8
    before = listing(tmp_path)
    with pytest.raises(
        BuildError, match=r"cannot build target.onnx, says its compiler: .*not supported by a dedicated"
    ):
        build(tmp_path)
    assert listing(tmp_path) == before


def test_a_full_disk_ends_the_build(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own error: the engine is written to /dev/full, where every write finds no space."""

    def fill(library: Any, graph: Path, plan: Path, **settings: Any) -> list[Kernel]:
        return compile_graph(library, graph, Path("/dev/full"), **settings)

    monkeypatch.setattr(plans, "compile_graph", fill)
    with pytest.raises(BuildError, match="no space left"):
        build_engine(checkpoints / "target", None, tmp_path / "engine", engine="tensorrt_rtx", **LIMITS)
    assert listing(tmp_path) == set()


def test_ctrl_c_stops_the_compiler_and_leaves_nothing(checkpoints: Path, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[str] = []

    def interrupt(doing: str, done: int, total: int) -> None:
        if doing == "compiling the target" and doing not in seen:  # soon, in the midst of the library's work
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        seen.append(doing)

    with pytest.raises(KeyboardInterrupt):
        build_engine(
            checkpoints / "target",
            checkpoints / "draft",
            tmp_path / "engine",
            engine="tensorrt_rtx",
            progress=interrupt,
            **LIMITS,
        )
    assert "compiling the draft" not in seen
    assert listing(tmp_path) == set()
    assert signal.getsignal(signal.SIGINT) is before


def test_what_progress_raises_is_raised(checkpoints: Path, tmp_path: Path) -> None:
    def fail(doing: str, done: int, total: int) -> None:
        if "compiling" in doing:
            raise RuntimeError("the bar is broken")

    with pytest.raises(RuntimeError, match="the bar is broken"):
        build_engine(checkpoints / "target", None, tmp_path / "engine", engine="tensorrt_rtx", progress=fail, **LIMITS)
    assert listing(tmp_path) == set()


def test_progress_of_the_compiler_grows_to_its_end(checkpoints: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build_engine(
        checkpoints / "target",
        None,
        tmp_path / "engine",
        engine="tensorrt_rtx",
        progress=lambda *step: seen.append(step),
        **LIMITS,
    )
    steps = [(done, total) for doing, done, total in seen if doing == "compiling the target"]
    assert len(steps) > 20
    assert steps == sorted(steps)
    assert steps[-1][0] == steps[-1][1]


def test_a_build_that_is_killed_leaves_no_engine_and_the_next_one_cleans_up(checkpoints: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from ddtree.builder import build_engine\n"
        "def kill(doing, done, total):\n"
        "    if 'compiling' in doing: os.kill(os.getpid(), signal.SIGKILL)\n"
        "build_engine(Path(sys.argv[1]), None, Path(sys.argv[2]), engine='tensorrt_rtx', max_seq_len=64, progress=kill)"
    )
    output = tmp_path / "engine"
    process = subprocess.run([sys.executable, "-c", script, checkpoints / "target", output], check=False)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    assert len(listing(tmp_path)) > 1
    for directory in tmp_path.rglob("."):
        with pytest.raises(BuildError, match="not an engine directory"):
            Manifest.load(directory)
    build_engine(checkpoints / "target", None, output)
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


# The library tensorrt


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module ``tensorrt`` with the classes of TensorRT for RTX, on a machine with a GPU of sm_120."""

    class Config:
        """The other library's, which is told what a GPU would say, and has no timing cache."""

        def __init__(self, real: Any) -> None:
            self.__dict__["real"] = real
            real.num_compute_capabilities = 1
            real.set_compute_capability(tensorrt_rtx.ComputeCapability.SM120, 0)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(self.real, name, value)

        def create_timing_cache(self, known: bytes) -> bytes:
            return known

        def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
            self.__dict__["timings"] = cache + b"measured;"
            return True

        def get_timing_cache(self) -> Any:
            return types.SimpleNamespace(serialize=lambda: self.timings)

    class Builder(tensorrt_rtx.Builder):
        def create_builder_config(self) -> Config:
            return Config(super().create_builder_config())

        def build_serialized_network(self, network: Any, config: Config) -> Any:
            return super().build_serialized_network(network, config.real)

        @property
        def build_serialized_network_to_stream(self) -> None:  # TensorRT 10.15 may have none
            raise AttributeError

    module = types.ModuleType("tensorrt")
    module.__dict__.update({name: getattr(tensorrt_rtx, name) for name in dir(tensorrt_rtx) if name[0].isupper()})
    module.Builder, module.__version__ = Builder, "10.15.1.29"  # type: ignore[attr-defined]
    module.ComputeCapability = None  # type: ignore[attr-defined]
    for name in ("float16", "bfloat16", "float32", "int32", "int64"):
        setattr(module, name, getattr(tensorrt_rtx, name))
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    logger = compile._logger(tensorrt_rtx)  # the process has this one, and takes no other
    monkeypatch.setattr(compile, "_logger", lambda library: logger)
    monkeypatch.setattr(launch, "device_arch", lambda: "sm_120")
    return module


def test_tensorrt_builds_for_the_gpu_that_is_present(tensorrt: Any, checkpoints: Path, tmp_path: Path) -> None:
    cache = tmp_path / "timing.cache"
    engine = build(checkpoints, str(tmp_path / "engine"), engine="tensorrt", verify="kernel", timing_cache=cache)
    manifest = Manifest.verify(engine.directory)
    assert manifest.compiled is not None
    assert (manifest.engine, manifest.dtype, manifest.compiled.arch) == ("tensorrt", "bfloat16", "sm_120")
    assert manifest.versions["tensorrt"] == "10.15.1.29"
    assert manifest.notes == ()
    assert engine.kernels["target"]
    assert cache.read_bytes() == b"measured;measured;"  # the draft's build has read the target's


def test_another_gpu_than_the_one_present_is_refused(tensorrt: Any, checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BuildError, match=r"^arch sm_100 is not the GPU that is present, sm_120 \(build .* sm_100 GPU\)$"
    ):
        build(checkpoints, str(tmp_path / "engine"), engine="tensorrt", arch="sm_100")
    assert listing(tmp_path) == set()


def test_a_machine_without_a_gpu_is_refused(
    tensorrt: Any, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise RuntimeError("no GPU")

    monkeypatch.setattr(launch, "device_arch", fail)
    with pytest.raises(
        BuildError, match=r"^engine tensorrt is built on the GPU that runs it: no GPU \(build it there\)$"
    ):
        build(checkpoints, str(tmp_path / "engine"), engine="tensorrt", arch="sm_100")


def test_a_tensorrt_without_the_kv_cache_layer_is_refused(tensorrt: Any) -> None:
    tensorrt.__version__ = "10.14.1.48"
    with pytest.raises(BuildError, match=r"TensorRT 10.14.1.48 has no KV cache layer \(use 10.15 or newer"):
        load_library("tensorrt")


@pytest.mark.parametrize(("engine", "extra"), [("tensorrt", "tensorrt"), ("tensorrt_rtx", "rtx")])
def test_a_missing_library_names_its_extra(engine: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(
        BuildError, match=rf'^engine {engine} needs {engine}: .* \(pip install "ddtree-trtllm\[{extra}\]"\)$'
    ):
        load_library(engine)


class PluginRecorder(types.ModuleType):
    """In place of ``ddtree.plugins.tensorrt``, which needs TensorRT: takes calls down, and gives placeholders."""

    def __init__(self) -> None:
        super().__init__("ddtree.plugins.tensorrt")
        self.registered: list[str] = []
        self.layers: list[tuple[str, list[Any], dict[str, Any]]] = []

    def register(self, face: str | None = None, *, arch: str | None = None) -> str:
        self.registered.append(str(arch))
        return "quick"

    def add_layer(self, network: Any, name: str, inputs: list[Any], **attributes: Any) -> Any:
        self.layers.append((name, inputs, attributes))
        spare = np.zeros(1, np.int32)
        return types.SimpleNamespace(
            get_output=lambda i: network.add_constant((1,), tensorrt_rtx.Weights(spare)).get_output(0)
        )


@pytest.fixture
def recorder(tensorrt: Any, monkeypatch: pytest.MonkeyPatch) -> PluginRecorder:
    import ddtree.plugins

    recorder = PluginRecorder()
    monkeypatch.setitem(sys.modules, "ddtree.plugins.tensorrt", recorder)
    monkeypatch.setattr(ddtree.plugins, "tensorrt", recorder, raising=False)
    return recorder


def sizes(tensor: Any, network: Network, **known: int) -> tuple[int, ...]:
    """The shape of an input or constant at some sizes of its dynamic dimensions."""
    dimensions = network._dimensions.get(tensor.name, list(tensor.shape))
    return tuple(known[dim] if isinstance(dim, str) else dim for dim in dimensions)


def test_with_the_plugin_the_target_ends_in_verify_tree(recorder: PluginRecorder, graphs: Path) -> None:
    parsed = parse(graphs / "target.onnx")
    network = parsed.network
    tree_plugins.add_verify_tree(network, max_depth=4)
    ((name, inputs, attributes),) = recorder.layers
    assert (name, attributes) == ("verify_tree", {"method": "coupled"})
    table = {"float16": "HALF", "bfloat16": "BF16", "float32": "FLOAT", "int32": "INT32", "int64": "INT64"}
    assert inputs[0].name == "logits"
    for tensor, spec in zip(inputs[1:], VERIFY_TREE.inputs[1:], strict=True):
        assert tensor.dtype.name == table[spec.dtype]
        assert tensor.name == spec.name or spec.name in ("thresholds", "max_depth_shape")
    for words in (0, 4):  # a grammar's bitmask of 97 tokens
        shapes = [
            sizes(each, network, batch=3, rows=16, bitmask_words=words, coins=0, final_coins=0) for each in inputs[1:]
        ]
        known = VERIFY_TREE.sizes([(3, 16, VOCAB), *shapes], method="coupled")
        found = (known.D, known.N, known.M)
        assert found == (4, 16, words)
    outputs = {network.definition.get_output(i).name for i in range(network.definition.num_outputs)}
    assert {spec.name for spec in VERIFY_TREE.outputs} | {"logits"} <= outputs
    ranges = {"batch": (1, 3, 3), "seq": (1, 16, 16), "rows": (1, 16, 16)} | tree_plugins.ranges(VOCAB)
    profile = network.profile(parsed.builder, ranges)
    assert [tuple(shape) for shape in profile.get_shape("token_bitmask")] == [(1, 1, 0), (3, 16, 0), (3, 16, 4)]


@pytest.mark.parametrize("table", [None, np.arange(0, VOCAB, 2, dtype=np.int32)], ids=["all", "reduced"])
def test_with_the_plugin_the_draft_ends_in_build_tree(
    recorder: PluginRecorder, graphs: Path, table: np.ndarray | None
) -> None:
    network = parse(graphs / "draft.onnx").network
    draft = DraftInfo(1, 2, 16, 5, False, 4, 1, (0, 1), VOCAB, None, None, False, False, False)
    tree_plugins.add_build_tree(network, draft, 31, table)
    (topk, topk_inputs, topk_settings), (tree, tree_inputs, tree_settings) = recorder.layers
    assert (topk, topk_settings) == (DRAFT_TOPK.name, {"k": 31})
    assert topk_inputs[0].name == "draft_logits"
    assert sizes(topk_inputs[1], network, mapped_vocab=0) == ((0,) if table is None else (49,))
    DRAFT_TOPK.sizes([(3, 4, VOCAB if table is None else 49), sizes(topk_inputs[1], network, mapped_vocab=0)], k=31)
    assert (tree, tree_settings) == (BUILD_TREE.name, {"budget": 31, "mode": "tree", "keep_chain": 0})
    assert tree_inputs[2].name == "root_token_ids"
    assert sizes(tree_inputs[2], network, batch=3) == (3,)
    BUILD_TREE.sizes([(3, 4, 31), (3, 4, 31), (3,)], **tree_settings)
    outputs = [network.definition.get_output(i).name for i in range(network.definition.num_outputs)]
    assert outputs[-len(BUILD_TREE.outputs) :] == [spec.name for spec in BUILD_TREE.outputs]
    assert "draft_logits" in outputs  # for the method "chain"


def test_the_plugin_is_tensorrts_default_and_is_made_for_its_gpu(
    recorder: PluginRecorder, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extended = []
    monkeypatch.setattr(plans, "compile_graph", lambda library, graph, *_, extend, **__: extended.append(extend) or [])
    settings: dict[str, Any] = {"engine": "tensorrt"} | LIMITS
    output = tmp_path / "engine"
    manifest = build_engine(checkpoints / "target", checkpoints / "draft", output, **settings)
    assert manifest.compiled is not None
    assert manifest.compiled.verify == "plugin"
    assert recorder.registered == ["sm_120"]
    assert all(extended)
    assert "which kernels target.engine has" in manifest.notes[0]  # nothing was compiled here
    build_engine(checkpoints / "target", checkpoints / "draft", output, force=True, verify="kernel", **settings)
    assert extended[2:] == [None, None]
    assert recorder.registered == ["sm_120"]


def test_a_reduced_draft_vocabulary_is_in_the_engine_and_beside_it(
    recorder: PluginRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(
        Case("small", "qwen3", GROUPED, 64, False, torch.bfloat16, config={"num_hidden_layers": TARGET_LAYERS}),
        tmp_path / "target",
    )
    ids = torch.arange(0, 2 * 40, 2)
    marked = torch.isin(torch.arange(VOCAB), ids)
    make_draft(
        target,
        tmp_path / "draft",
        num_target_layers=TARGET_LAYERS,
        target_layer_ids=[0, 1],
        dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 1]},
        draft_vocab_size=40,
        extra_tensors={"d2t": ids, "t2d": marked},
    )

    def extend_only(library: Any, graph: Path, *args: Any, extend: Callable[[Network], None], **kwargs: Any) -> list:
        extend(parse(graph).network)
        return []

    monkeypatch.setattr(plans, "compile_graph", extend_only)
    settings: dict[str, Any] = {"engine": "tensorrt"} | LIMITS
    manifest = build_engine(tmp_path / "target", tmp_path / "draft", tmp_path / "engine", **settings)
    assert manifest.draft is not None
    assert manifest.draft.draft_to_target is not None
    assert np.load(tmp_path / "engine" / manifest.draft.draft_to_target).tolist() == ids.tolist()
    assert manifest.draft.draft_to_target in {file.name for file in manifest.files}
    topk = next(inputs for name, inputs, _ in recorder.layers if name == DRAFT_TOPK.name)
    assert tuple(topk[1].shape) == (40,)


def test_a_plugin_that_cannot_be_registered_is_refused(
    recorder: PluginRecorder, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*, arch: str) -> str:
        raise RuntimeError("NumPy 2.4 is too new")

    monkeypatch.setattr(recorder, "register", fail)
    with pytest.raises(BuildError, match=r"NumPy 2.4 is too new \(or use --verify kernel\)"):
        build(checkpoints, str(tmp_path / "engine"), engine="tensorrt")
    assert listing(tmp_path) == set()
