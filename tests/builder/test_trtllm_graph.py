"""The graphs for TensorRT 10.14: what ``lower`` makes is the model that was placed, in operators that 10.14 has.

The tests of ``test_target`` and ``test_draft``, with their oracles transformers and plain torch, run here once more on
lowered graphs. TensorRT for RTX, whose parser is a later version of 10.14's, compiles them.
"""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tensorrt_rtx
import torch

from ddtree.builder import compile
from ddtree.builder.checkpoint import Checkpoint
from ddtree.builder.compile import Network, cache_copies, compile_graph
from ddtree.builder.config import DraftConfig, TargetConfig
from ddtree.builder.draft import place_draft
from ddtree.builder.graph import Graph
from ddtree.builder.target import place_target
from ddtree.builder.trtllm_graph import OPSET, lower
from ddtree.builder.weights import Weights

from .models import CASES, Case, GraphSession, Pair, make_draft, make_pair, make_target
from .test_draft import VARIANTS, run_rounds
from .test_target import (  # noqa: F401 - pytest runs them with the fixture `pair` of this file
    test_logit_rows_choose_the_rows,
    test_prefill,
    test_prefill_in_chunks,
    test_rounds_of_tree_pass_and_commit,
    test_sequences_of_different_lengths_in_one_batch,
)
from .trtllm_signatures import LAYER_TYPES

POSITIONS = 128
# What TensorRT 10.14's parser has no layer for, or, of Attention, none that reads a cache which is written elsewhere.
REPLACED = {"RMSNormalization", "RotaryEmbedding", "TensorScatter", "Attention"}
CACHE = 64


class UpdateSession(GraphSession):
    """A lowered graph: writes the rows that a pass gives into the caches, as the runtime does."""

    def run(self, **inputs: np.ndarray) -> list[np.ndarray]:
        outputs = [name for name in self.outputs if not name.startswith("update.")]
        past = {f"past_key_values.{name}": cache for name, cache in self.caches.items()}
        results = self.session.run(outputs + [f"update.{name}" for name in self.caches], inputs | past)
        for cache, update in zip(self.caches.values(), results[len(outputs) :], strict=True):
            for b, start in enumerate(inputs["write_index"]):
                cache[b, :, start : start + update.shape[2]] = update[b]
        return results[: len(outputs)]


class LoweredPair(Pair):
    """A pair whose graphs are lowered when they are opened, for caches of that length."""

    def open_target(self, batch: int = 1, cache: int = CACHE, name: str = "target.onnx") -> GraphSession:
        info = self.manifest.target
        graphs = write_graphs(self.directory.parent, f"cache-{cache}", "float32", cache)
        sizes = info.num_hidden_layers, info.num_key_value_heads, info.head_dim
        return UpdateSession(graphs / name, *sizes, batch, cache)

    def open_draft(self, batch: int = 1, cache: int = CACHE) -> GraphSession:
        info = self.manifest.draft
        assert info is not None
        graphs = write_graphs(self.directory.parent, f"cache-{cache}", "float32", cache)
        sizes = info.num_hidden_layers, info.num_key_value_heads, info.head_dim
        return UpdateSession(graphs / "draft.onnx", *sizes, batch, cache)


def lowered(pair: Pair) -> LoweredPair:
    return LoweredPair(**{field.name: getattr(pair, field.name) for field in dataclasses.fields(pair)})


@pytest.fixture(scope="module")
def pair(pair: Pair) -> LoweredPair:
    return lowered(pair)


def write_graphs(root: Path, name: str, dtype: str, cache: int, transform: Callable[[Graph], Graph] = lower) -> Path:
    """The transformed graphs of the checkpoints ``root/target`` and ``root/draft``, in ``root/name``."""
    directory = root / name
    if directory.exists():
        return directory
    checkpoints = {role: Checkpoint.open(root / role, role) for role in ("target", "draft")}
    weights = {role: Weights(role, checkpoint, dtype) for role, checkpoint in checkpoints.items()}
    target = TargetConfig.read(checkpoints["target"])
    draft = DraftConfig.read(checkpoints["draft"], target)
    graphs = {
        "target": place_target(target, weights["target"], draft.target_layer_ids, POSITIONS, cache),
        "draft": place_draft(draft, weights["draft"], target, weights["target"], POSITIONS, cache),
    }
    directory.mkdir()
    for role in graphs:
        weights[role].write(directory, lambda *_: None)
    for role, graph in graphs.items():
        (directory / f"{role}.onnx").write_bytes(transform(graph).model().SerializeToString())
    return directory


@pytest.mark.parametrize("variant", ["sample_from_anchor", "mixed_windows", "reduced_vocabulary", "attention_bias"])
def test_drafts_of_several_rounds(variant: str, tmp_path: Path) -> None:
    run_rounds(lowered(make_pair(tmp_path, CASES[0], **VARIANTS[variant])), batch=3)


def test_drafts_with_every_target(pair: Pair) -> None:
    run_rounds(pair, batch=2)


SOME = [CASES[0], CASES[3], CASES[4], CASES[10]]


def tree_inputs(
    session: ort.InferenceSession, rng: np.random.Generator, sizes: dict[str, int]
) -> dict[str, np.ndarray]:
    """Inputs of one pass of three slots behind 0, 5 and 20 committed tokens: rows see them, themselves, and some of the
    rows before. Every cache row holds finite garbage."""
    inputs = {}
    for value in session.get_inputs():
        shape = [sizes.get(dim, dim) for dim in value.shape]
        if value.type == "tensor(int64)":
            inputs[value.name] = rng.integers(0, 40, shape)
        else:
            inputs[value.name] = rng.standard_normal(shape).astype(NUMPY_TYPES[value.type])
    inputs["write_index"] = np.array([0, 5, 20])
    for name, mask in inputs.items():
        if name.endswith("attention_mask"):
            written, rows = sizes["written"], mask.shape[2]
            mask[...] = np.finfo(mask.dtype).min
            for b, start in enumerate(inputs["write_index"]):
                mask[b, 0, :, :start] = 0
                mask[b, 0, :, start : start + written] *= rng.random((rows, written)) < 0.5
                for row in range(rows):
                    mask[b, 0, row, start + written - rows + row] = 0
    return inputs


NUMPY_TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_outputs_and_new_rows_are_those_of_the_graph_that_was_placed(
    case: Case, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    make_draft(make_target(case, tmp_path / "target"), tmp_path / "draft")
    placed, low = (write_graphs(tmp_path, name, dtype, CACHE, f) for name, f in (("a", lambda g: g), ("b", lower)))
    for role, sizes in (
        ("target", {"batch": 3, "seq": 7, "rows": 4, "written": 7}),
        ("draft", {"batch": 3, "ctx": 6, "written": 6 + 5}),
    ):
        sessions = [ort.InferenceSession(directory / f"{role}.onnx") for directory in (placed, low)]
        inputs = tree_inputs(sessions[0], np.random.default_rng(3), sizes)
        if role == "target":
            inputs["logit_rows"] %= 7
        assert [(i.name, i.shape, i.type) for i in sessions[0].get_inputs()] == [
            (i.name, i.shape, i.type) for i in sessions[1].get_inputs()
        ]
        expected, ours = (
            {o.name: v for o, v in zip(s.get_outputs(), s.run(None, inputs), strict=True)} for s in sessions
        )
        assert {name.replace("present.", "update.") for name in expected} == set(ours)
        for name, value in expected.items():
            if name.startswith("present."):
                written = [
                    value[b, :, start : start + sizes["written"]] for b, start in enumerate(inputs["write_index"])
                ]
                name, value = name.replace("present.", "update."), np.stack(written)
            assert ours[name].shape == value.shape
            assert np.abs(ours[name] - value).max() <= tolerance * np.abs(value).max(), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", SOME, ids=str)
def test_lowered_graphs_pass_the_model_checker(case: Case, dtype: str, tmp_path: Path) -> None:
    make_draft(make_target(case, tmp_path / "target"), tmp_path / "draft")
    directory = write_graphs(tmp_path, "graphs", dtype, CACHE)
    shutil.copytree(directory, tmp_path / "copy")  # the checker takes hard links for an attack
    for role in ("target", "draft"):
        onnx.checker.check_model(str(tmp_path / f"copy/{role}.onnx"), full_check=True)
        model = onnx.load(directory / f"{role}.onnx", load_external_data=False)
        assert [(each.domain, each.version) for each in model.opset_import] == [("", OPSET)]
        assert not REPLACED & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("case", [CASES[3], CASES[11]], ids=str)
def test_tensorrts_parser_makes_no_layer_that_tensorrt_llm_does_not_know(case: Case, tmp_path: Path) -> None:
    make_draft(make_target(case, tmp_path / "target"), tmp_path / "draft")
    directory = write_graphs(tmp_path, "graphs", "bfloat16", CACHE)
    logger = compile._logger(tensorrt_rtx)
    for role in ("target", "draft"):
        network = tensorrt_rtx.Builder(logger).create_network(0)
        assert tensorrt_rtx.OnnxParser(network, logger).parse_from_file(str(directory / f"{role}.onnx"))
        assert {network.get_layer(i).type.name for i in range(network.num_layers)} <= LAYER_TYPES


@pytest.mark.parametrize(("heads", "dtype"), [((4, 2, 16), "bfloat16"), ((2, 2, 16), "float16")])
def test_tensorrt_compiles_them_and_copies_no_cache(
    heads: tuple[int, int, int], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the library for RTX, which needs no GPU; the fused layers that it looks for otherwise are not there."""
    monkeypatch.setattr(Network, "read_caches_in_place", lambda self: None)
    target = make_target(Case("small", "qwen3", heads, 64, False, torch.bfloat16, config=SMALL), tmp_path / "target")
    ids = {"mask_token_id": 1, "target_layer_ids": [0, 1]}
    make_draft(target, tmp_path / "draft", layers=1, num_target_layers=2, target_layer_ids=[0, 1], dflash_config=ids)
    length = 192  # no other dimension is as long
    directory = write_graphs(tmp_path, "graphs", dtype, length)
    batch = {"batch": (1, 3, 3)}
    for role, profiles in (
        ("target", [{"seq": (1, 64, 64), "rows": (1, 1, 1)}, {"seq": (1, 16, 16), "rows": (1, 16, 16)}]),
        ("draft", [{"ctx": (1, 64, 64)}, {"ctx": (1, 5, 5)}]),
    ):
        kernels = compile_graph(
            tensorrt_rtx,
            directory / f"{role}.onnx",
            tmp_path / f"{role}.engine",
            arch="sm_120",
            profiles=[batch | profile for profile in profiles],
            progress=lambda *_: None,
        )
        readers = [name for kernel in kernels for name in kernel.inputs if name.startswith("past_key_values.")]
        assert set(readers) >= {"past_key_values.0.key", "past_key_values.0.value"}  # the log names them
        assert cache_copies(kernels, length, heads[2]) == []


SMALL = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 2}
