"""Both TensorRT faces, driven by NVIDIA's own Python sources of three TensorRT versions over ``tensorrt_stand_in``.

What an engine would launch is then launched: the kernels' sources, on the CPU, with exactly those arguments.
"""

import importlib
import sys
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import ddtree.plugins
from ddtree.plugins import launch, ops
from ddtree.plugins.operations import LOGIT_TYPES, METHODS, VERIFY_TREE

from ..simt import runner
from . import tensorrt_stand_in as stand_in
from .oracles import ranked_rows
from .tensorrt_wheels import BINDINGS, plugin_sources

ARCH = "sm_100"
QUICK = [version for version in BINDINGS if version != "10.14.1"]
FACES = [*((version, "quick") for version in QUICK), *((version, "v3") for version in BINDINGS)]


@pytest.fixture(scope="session")
def wheels(request):
    return request.config.cache.mkdir("tensorrt")


@dataclass
class Face:
    """One TensorRT version, and ``ddtree.plugins.tensorrt`` imported anew on top of it."""

    trt: ModuleType
    plugins: ModuleType

    def dtype(self, name: str) -> Any:
        return getattr(self.trt, name)


@pytest.fixture
def use_tensorrt(wheels, monkeypatch):
    """Installs a version of TensorRT's stand-in, under NumPy 2.3: what a user of TensorRT before 11.2 has."""
    stack = []

    def use(version: str, *, numpy: str = "2.3.5") -> Face:
        monkeypatch.setattr(np, "__version__", numpy)
        old = tuple(map(int, numpy.split(".")[:2])) < (2, 4)
        monkeypatch.setattr(stand_in.PluginField, "data_class", stand_in.OneElementArray if old else np.ndarray)
        context = stand_in.installed(version, plugin_sources(version, wheels))
        stack.append(context)
        trt = context.__enter__()
        monkeypatch.delitem(sys.modules, "ddtree.plugins.tensorrt", raising=False)
        return Face(trt, importlib.import_module("ddtree.plugins.tensorrt"))

    yield use
    for context in stack:
        context.__exit__(None, None, None)
    sys.modules.pop("ddtree.plugins.tensorrt", None)
    if hasattr(ddtree.plugins, "tensorrt"):
        del ddtree.plugins.tensorrt


# ---------------------------------------------------------------------------------------------------------------------
# Networks of the operations
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A batch to decode one round, and what ``ops`` says of it."""

    batch: int
    depth: int
    vocab: int
    budget: int
    dtype: str
    method: str = "coupled"
    optional: bool = False  # with token_bitmask, coins, final_coin and draft_to_target

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.batch * 1000 + self.vocab)
        dtype = getattr(torch, self.dtype)
        nodes = self.budget + 1

        def logits(*shape: int) -> torch.Tensor:
            return (3 * torch.randn(*shape, generator=generator)).to(dtype)

        self.draft_logits = logits(self.batch, self.depth, self.vocab)
        self.root_token_ids = torch.arange(self.batch, dtype=torch.int32)
        self.draft_to_target = torch.zeros(0, dtype=torch.int32)
        if self.optional:
            self.draft_to_target = torch.randperm(self.vocab, generator=generator).int()
        self.logits = logits(self.batch, nodes, self.vocab)
        batch = torch.arange(self.batch)
        self.root_positions = 10 + 7 * batch
        self.sampling = ops.SamplingTensors(
            temperature=0.7 * (batch % 3).float(),
            top_k=(5 * (batch % 2)).int(),
            top_p=1 - 0.3 * (batch % 2).float(),
            min_p=0.02 * (batch % 2).float(),
            seed=batch + 2**40,
        )
        words, coins = (-(-self.vocab // 32), nodes) if self.optional else (0, 0)
        self.token_bitmask = torch.randint(
            -(2**31), 2**31, (self.batch, nodes, words), generator=generator, dtype=torch.int64
        ).int()
        self.coins = torch.rand(self.batch, coins, generator=generator)
        self.final_coin = torch.rand(self.batch if self.optional else 0, generator=generator)
        threshold = 0.8 if self.method == "target_only" else 1.0
        self.thresholds = torch.tensor([threshold, threshold])
        self._agree(self.tree())

    def _agree(self, tree: ops.DraftTree) -> None:
        """Makes the target likely to write what the tree holds, a child that has children most of all."""
        for slot, parents in enumerate(tree.parents.tolist()):
            for node, parent in enumerate(parents):
                if parent >= 0:
                    token = int(tree.token_ids[slot, node])
                    self.logits[slot, parent, token] = 12 if node in parents else 11
                    if self.optional:
                        self.token_bitmask[slot, parent, token // 32] |= torch.tensor(1 << token % 32).int()

    def tree(self) -> ops.DraftTree:
        return ops.build_tree(
            self.draft_logits,
            self.root_token_ids,
            budget=self.budget,
            draft_to_target=self.draft_to_target if self.optional else None,
        )

    def candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What draft_topk has to give, [batch, D, K] token_ids and log_probs: these to the last bit those of ops."""
        logits = self.draft_logits.float()
        if self.optional:
            logits = logits[..., self.draft_to_target.long().argsort()]
        k = min(self.budget, self.vocab)
        rows = [[row[:k] for row in ranked_rows(slot)] for slot in logits]
        return (
            torch.tensor([[[token for token, _ in row] for row in slot] for slot in rows], dtype=torch.int32),
            torch.tensor([[[float(log_prob) for _, log_prob in row] for row in slot] for slot in rows]),
        )

    def verified(self, tree: ops.DraftTree) -> ops.Verified:
        target_only = self.method == "target_only"
        return ops.verify_tree(
            self.logits,
            tree,
            self.root_positions,
            self.sampling,
            method=self.method,
            token_bitmask=self.token_bitmask if self.optional else None,
            threshold_single=float(self.thresholds[0]),
            threshold_acc=float(self.thresholds[1]),
            coins=self.coins if target_only and self.optional else None,
            final_coin=self.final_coin if target_only and self.optional else None,
        )

    def verify_inputs(self, tree: ops.DraftTree) -> dict[str, torch.Tensor]:
        own = {"max_depth_shape": torch.zeros(self.depth, dtype=torch.int32)}
        own |= {field.name: getattr(self.sampling, field.name) for field in fields(self.sampling)}
        return {
            spec.name: own[spec.name] if spec.name in own else getattr(self, spec.name, getattr(tree, spec.name, None))
            for spec in VERIFY_TREE.inputs
        }


CASES = [
    Case(batch=1, depth=3, vocab=17, budget=5, dtype="float32"),
    Case(batch=3, depth=4, vocab=100, budget=40, dtype="float16", optional=True, method="target_only"),
    Case(batch=5, depth=7, vocab=333, budget=31, dtype="bfloat16"),
    Case(batch=4, depth=2, vocab=50, budget=70, dtype="float32", method="greedy"),
]


class Network:
    """A network under construction: every size of its inputs that is no constant of a real engine is dynamic."""

    def __init__(self, face: Face) -> None:
        self.face = face
        self.network = stand_in.INetworkDefinition()
        self.tensors: dict[str, torch.Tensor] = {}

    def input(self, name: str, tensor: torch.Tensor, fixed: tuple[int, ...] = ()) -> stand_in.ITensor:
        self.tensors[name] = tensor
        shape = [size if axis in fixed or size == 0 else -1 for axis, size in enumerate(tensor.shape)]
        return self.network.add_input(name, self.face.dtype(str(tensor.dtype).removeprefix("torch.")), shape)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def draft_network(face: Face, case: Case) -> tuple[Network, list[stand_in.IPluginV3Layer]]:
    network = Network(face)
    logits = network.input("draft_logits", case.draft_logits, fixed=(1, 2))
    mapping = network.input("draft_to_target", case.draft_to_target, fixed=(0,))
    root = network.input("root_token_ids", case.root_token_ids)
    candidates = face.plugins.add_layer(
        network.network, "draft_topk", [logits, mapping], k=min(case.budget, case.vocab)
    )
    tree = face.plugins.add_layer(
        network.network,
        "build_tree",
        [candidates.get_output(0), candidates.get_output(1), root],
        budget=case.budget,
        mode="tree",
        keep_chain=0,
    )
    return network, [candidates, tree]


def verify_network(face: Face, case: Case, tree: ops.DraftTree) -> tuple[Network, stand_in.IPluginV3Layer]:
    network = Network(face)
    inputs = [
        network.input(name, tensor, fixed=(0,) if name in ("thresholds", "max_depth_shape") else (2,))
        for name, tensor in case.verify_inputs(tree).items()
    ]
    return network, face.plugins.add_layer(network.network, "verify_tree", inputs, method=case.method)


def run_on_cpu(
    source: str, entry: str, grid: Any, block: Any, shared_bytes: int, inputs: Any, scalars: Any, outputs: Any
) -> list[torch.Tensor]:
    """Runs the kernel's source with these arguments in this order: the order that an AOT plugin must have."""
    runner.build(source).launch(
        entry, grid=grid, block=block, shared_bytes=shared_bytes, args=[*inputs, *scalars, *outputs]
    )
    return outputs


def empty_outputs(outputs: list[tuple[tuple[int, ...], Any]]) -> list[torch.Tensor]:
    types = {"FLOAT": torch.float32, "INT32": torch.int32, "INT64": torch.int64}
    return [torch.full(shape, 77, dtype=types[dtype.name]) for shape, dtype in outputs]


def run_aot(layer: stand_in.BuiltLayer, network: Network, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    launch = layer.launch(network.shapes)
    source = f"{layer.plugin.plugin_name}.cu"
    outputs = empty_outputs(launch.outputs)
    return run_on_cpu(
        source, launch.entry, launch.grid, launch.block, launch.shared_bytes, inputs, launch.scalars, outputs
    )


def run_enqueue(layer: stand_in.BuiltLayer, network: Network, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    outputs = empty_outputs(layer.outputs(network.shapes))
    pointers = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs)]
    with pytest.MonkeyPatch.context() as patch:

        def launch_pointers(operation, dtype, sizes, input_pointers, output_pointers, stream):
            assert (input_pointers, output_pointers) == tuple(pointers)
            assert stream == 1234
            grid = (*(size(sizes) for size in operation.grid), 1)
            run_on_cpu(
                operation.source,
                operation.entry(dtype),
                grid,
                (operation.block, 1, 1),
                operation.shared_bytes(sizes),
                inputs,
                operation.scalar_values(sizes),
                outputs,
            )

        patch.setattr(launch, "launch_pointers", launch_pointers)
        layer.enqueue(network.shapes, *pointers, stream=1234)
    return outputs


def assert_candidates(outputs: list[torch.Tensor], case: Case) -> None:
    token_ids, log_probs = case.candidates()
    assert outputs[0].equal(token_ids)
    torch.testing.assert_close(outputs[1], log_probs, rtol=0, atol=1e-5)


def assert_tree(outputs: list[torch.Tensor], tree: ops.DraftTree) -> None:
    names = [field.name for field in fields(tree)][:-1]
    assert len(names) == len(outputs)
    for name, got in zip(names, outputs, strict=True):
        assert got.equal(getattr(tree, name)), name


def assert_verified(outputs: list[torch.Tensor], verified: ops.Verified) -> None:
    names = [field.name for field in fields(verified)]
    for name, got in zip(names, outputs, strict=True):
        if name == "logprobs":
            torch.testing.assert_close(got, verified.logprobs, rtol=0, atol=1e-5)
        else:
            assert got.equal(getattr(verified, name)), name


# ---------------------------------------------------------------------------------------------------------------------
# The faces compute what ops computes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.method}")
@pytest.mark.parametrize("version", QUICK)
def test_aot_launches_build_the_tree_of_ops(use_tensorrt, version, case):
    face = use_tensorrt(version)
    face.plugins.register("quick", arch=ARCH)
    network, (topk, build) = draft_network(face, case)
    inputs = [case.draft_logits, case.draft_to_target]
    assert_candidates(run_aot(stand_in.build(topk, network.shapes), network, inputs), case)
    inputs = [*case.candidates(), case.root_token_ids]
    assert_tree(run_aot(stand_in.build(build, network.shapes), network, inputs), case.tree())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.method}")
@pytest.mark.parametrize("version", QUICK)
def test_aot_launch_verifies_as_ops_does(use_tensorrt, version, case):
    face = use_tensorrt(version)
    face.plugins.register("quick", arch=ARCH)
    tree = case.tree()
    network, layer = verify_network(face, case, tree)
    outputs = run_aot(stand_in.build(layer, network.shapes), network, list(network.tensors.values()))
    assert_verified(outputs, case.verified(tree))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.method}")
@pytest.mark.parametrize(("version", "face_name"), FACES)
def test_enqueue_computes_as_ops_does(use_tensorrt, version, face_name, case):
    face = use_tensorrt(version)
    face.plugins.register(face_name, arch=ARCH)
    tree = case.tree()
    network, (topk, build) = draft_network(face, case)
    verify, verify_layer = verify_network(face, case, tree)
    layers = [topk, build, verify_layer]
    if face_name == "quick":
        layers = [as_jit(face, layer) for layer in layers]
    topk, build, verify_layer = layers
    inputs = [case.draft_logits, case.draft_to_target]
    assert_candidates(run_enqueue(stand_in.build(topk, network.shapes), network, inputs), case)
    inputs = [*case.candidates(), case.root_token_ids]
    assert_tree(run_enqueue(stand_in.build(build, network.shapes), network, inputs), tree)
    outputs = run_enqueue(stand_in.build(verify_layer, verify.shapes), verify, list(verify.tensors.values()))
    assert_verified(outputs, case.verified(tree))


def as_jit(face: Face, layer: stand_in.IPluginV3Layer) -> stand_in.IPluginV3Layer:
    operation = getattr(face.trt.plugin.op.ddtree, layer.plugin.plugin_name)
    attributes = dict(layer.plugin.attrs)
    return stand_in.INetworkDefinition().add_plugin(operation(*layer.inputs, **attributes), aot=False)


@pytest.mark.parametrize(
    "swapped",
    [
        ("token_ids", "next_token"),
        ("next_token", "next_sibling"),
        ("node_count", "top_k"),
        ("root_positions", "seed"),
        ("temperature", "min_p"),
        ("top_p", "min_p"),
    ],
    ids=" and ".join,
)
def test_a_wrong_argument_order_would_be_seen(use_tensorrt, swapped):
    face = use_tensorrt("11.4.0")
    face.plugins.register("quick", arch=ARCH)
    case = CASES[2]
    tree = case.tree()
    network, layer = verify_network(face, case, tree)
    tensors = dict(network.tensors)
    tensors[swapped[0]], tensors[swapped[1]] = tensors[swapped[1]], tensors[swapped[0]]
    outputs = run_aot(stand_in.build(layer, network.shapes), network, list(tensors.values()))
    with pytest.raises(AssertionError):
        assert_verified(outputs, case.verified(tree))


def test_the_cases_accept_paths_of_several_nodes():
    for case in CASES:
        assert int(case.verified(case.tree()).accepted_count.max()) >= 2


# ---------------------------------------------------------------------------------------------------------------------
# Declarations
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "face_name"), FACES)
def test_logits_may_have_three_types_and_all_else_has_one(use_tensorrt, version, face_name):
    face = use_tensorrt(version)
    face.plugins.register(face_name, arch=ARCH)
    tree = CASES[0].tree()
    network, layers = draft_network(face, CASES[0])
    verify, verify_layer = verify_network(face, CASES[0], tree)
    i32, f32, i64 = (face.dtype(name) for name in ("int32", "float32", "int64"))
    rest = {
        "draft_topk": [i32, i32, f32],
        "verify_tree": [
            *(i32, i32, i32, i32, i64, f32, i32, f32, f32, i64, i32, f32, f32, f32, i32),
            *(i32, i32, i32, f32, i32),
        ],
    }
    for layer, shapes in ((layers[0], network.shapes), (verify_layer, verify.shapes)):
        expected = [[face.dtype(name), *rest[layer.plugin.plugin_name]] for name in LOGIT_TYPES]
        assert stand_in.format_combinations(layer, shapes) == expected
    tree_types = [i32, f32, i32, i32, i32, i32, f32, i32, i32, i32, i32]
    assert stand_in.format_combinations(layers[1], network.shapes) == [tree_types]


@pytest.mark.parametrize("version", QUICK)
def test_one_engine_launches_by_the_shapes_of_the_moment(use_tensorrt, version):
    face = use_tensorrt(version)
    face.plugins.register("quick", arch=ARCH)
    case = CASES[1]
    network, layer = verify_network(face, case, case.tree())
    built = stand_in.build(layer, network.shapes)
    shapes = network.shapes
    for name, shape in shapes.items():
        if shape[0] == case.batch and name not in ("thresholds", "max_depth_shape"):
            shapes[name] = (9, *(13 if size == case.budget + 1 else size for size in shape[1:]))
    launch = built.launch(shapes)
    assert launch.entry == "ddtree_verify_tree_float16"
    assert (launch.grid, launch.block) == ((9, 1, 1), (VERIFY_TREE.block, 1, 1))
    words = -(-case.vocab // 32)
    assert launch.scalars == [13, case.vocab, case.depth, words, 13, 1, METHODS.index("target_only")]
    assert [shape for shape, _ in launch.outputs] == [(9, 5), (9,), (9, 5), (9, 5), (9,)]


@pytest.mark.parametrize("arch", ["sm_100", "sm_120"])
def test_the_engine_holds_ptx_of_the_architecture(use_tensorrt, arch):
    face = use_tensorrt("11.4.0")
    face.plugins.register("quick", arch="sm_90")
    face.plugins.register(arch=arch)
    network, layers = draft_network(face, CASES[1])
    for layer in layers:
        built = stand_in.build(layer, network.shapes)
        ptx = built.code.decode()
        assert f".target {arch}" in ptx
        assert f".visible .entry {built.entry}(" in ptx
        assert "\0" not in ptx


@pytest.mark.parametrize(("version", "face_name"), FACES)
def test_onnx_nodes_become_the_plugins(use_tensorrt, version, face_name):
    face = use_tensorrt(version)
    face.plugins.register(face_name, arch=ARCH)
    case = CASES[3]
    tree = case.tree()
    network, layer = verify_network(face, case, tree)
    attributes = {"plugin_namespace": "ddtree", "aot": 1, "method": METHODS.index(case.method)}
    node = network.network.add_onnx_node("verify_tree", layer.inputs, attributes)
    run = run_aot if face_name == "quick" else run_enqueue
    outputs = run(stand_in.build(node, network.shapes), network, list(network.tensors.values()))
    assert_verified(outputs, case.verified(tree))

    network, (topk, build) = draft_network(face, case)
    node = network.network.add_onnx_node("draft_topk", topk.inputs, attributes | {"k": 50})
    assert stand_in.build(node, network.shapes).outputs(network.shapes) == stand_in.build(topk, network.shapes).outputs(
        network.shapes
    )
    attributes |= {"budget": 70, "mode": 1, "keep_chain": 0}
    node = network.network.add_onnx_node("build_tree", build.inputs, attributes)
    assert stand_in.build(node, network.shapes).outputs(network.shapes)[0] == ((4, 71), face.dtype("int32"))

    del attributes["mode"]
    with pytest.raises(TypeError, match=r"build_tree has attributes budget, mode, keep_chain, got budget, keep_chain"):
        network.network.add_onnx_node("build_tree", build.inputs, attributes)


def test_v3_initialises_every_base(use_tensorrt):
    face = use_tensorrt("10.15.1")
    plugin = face.plugins.TreePlugin(VERIFY_TREE, {"method": "greedy"})
    for base in (
        face.trt.IPluginV3,
        *(getattr(face.trt, f"IPluginV3One{part}") for part in ("Core", "Build", "Runtime")),
    ):
        assert base in plugin.initialised
    clone = plugin.clone()
    assert clone is not plugin
    assert (clone.operation, clone.attributes) == (plugin.operation, plugin.attributes)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face_name", ["quick", "v3"])
def test_a_wrong_shape_is_refused_when_the_engine_is_built(use_tensorrt, face_name):
    face = use_tensorrt("11.4.0")
    face.plugins.register(face_name, arch=ARCH)
    case = CASES[1]
    network, layer = verify_network(face, case, case.tree())
    shapes = network.shapes | {"token_bitmask": (3, 41, 9)}
    layer.inputs[11].dims = stand_in.DimsExprs([stand_in.IDimensionExpr(None, size) for size in (3, 41, 9)])
    with pytest.raises(ValueError, match=r"token_bitmask has shape \[3, 41, 9\]: 9 is not the 4"):
        stand_in.build(layer, shapes)


@pytest.mark.parametrize("face_name", ["quick", "v3"])
def test_wrong_layers_are_refused_in_one_line(use_tensorrt, face_name):
    face = use_tensorrt("11.4.0")
    add = face.plugins.add_layer
    network = Network(face)
    logits = network.input("draft_logits", CASES[0].draft_logits)
    mapping = network.input("draft_to_target", CASES[0].draft_to_target)
    with pytest.raises(RuntimeError, match=r"call ddtree\.plugins\.tensorrt\.register first"):
        add(network.network, "draft_topk", [logits, mapping], k=3)
    face.plugins.register(face_name, arch=ARCH)
    with pytest.raises(ValueError, match='operation "commit" is unknown'):
        add(network.network, "commit", [])
    with pytest.raises(ValueError, match="draft_topk got 1 inputs, expected 2: draft_logits, draft_to_target"):
        add(network.network, "draft_topk", [logits], k=3)
    with pytest.raises(ValueError, match="k 1024 is outside 1 to 1023"):
        add(network.network, "draft_topk", [logits, mapping], k=1024)
    with pytest.raises(TypeError, match="draft_topk has attributes k, got none"):
        add(network.network, "draft_topk", [logits, mapping])
    other = {"quick": "v3", "v3": "quick"}[face_name]
    assert face.plugins.register(face_name) == face_name
    with pytest.raises(ValueError, match=f'face "{other}" asked for, but this process registered "{face_name}"'):
        face.plugins.register(other)
    with pytest.raises(ValueError, match='face "v2" is unknown'):
        face.plugins.register("v2")


def test_tensorrt_10_14_takes_the_v3_face(use_tensorrt):
    face = use_tensorrt("10.14.1")
    with pytest.raises(RuntimeError, match=r"TensorRT 10\.14\.1 has no working quick plugins .*v3"):
        face.plugins.register("quick")
    assert face.plugins.register() == "v3"
    assert face.trt.get_plugin_registry().get_creator("verify_tree", "1", "ddtree").plugin_namespace == "ddtree"


@pytest.mark.parametrize("version", QUICK)
def test_numpy_2_4_is_refused_where_nvidia_code_fails_with_it(use_tensorrt, version, monkeypatch):
    face = use_tensorrt(version, numpy="2.4.6")
    if version == "11.4.0":
        face.plugins.register("quick", arch=ARCH)
        draft_network(face, CASES[0])
        return
    with pytest.raises(RuntimeError, match=r"does not take integer attributes from NumPy 2\.4\.6"):
        face.plugins.register("quick", arch=ARCH)
    monkeypatch.setattr(face.plugins, "_require_quick", lambda: None)
    face.plugins.register("quick", arch=ARCH)
    with pytest.raises(TypeError):
        draft_network(face, CASES[0])


def test_a_missing_tensorrt_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.delitem(sys.modules, "ddtree.plugins.tensorrt", raising=False)
    with pytest.raises(ImportError, match=r'pip install "ddtree-trtllm\[tensorrt\]"'):
        importlib.import_module("ddtree.plugins.tensorrt")
