"""Graphs with a cache of fixed length, the form that TensorRT takes, in every dtype.

They are checked as models, and run in ONNX Runtime, which computes most float16 nodes in float32. bfloat16 has no
kernels there.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

from ddtree.builder import BuildError
from ddtree.builder.checkpoint import Checkpoint
from ddtree.builder.config import DraftConfig, TargetConfig
from ddtree.builder.draft import place_draft
from ddtree.builder.target import place_target
from ddtree.builder.weights import Weights

from .models import CASES, VOCAB, Case, make_draft, make_target

CACHE, LENGTH = 32, 12
STORAGE = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MIXTURES = [case for case in CASES if case.model_type == "qwen3_moe"]
DTYPES = {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}


def write_graphs(root: Path, case: Case, dtype: str) -> torch.nn.Module:
    """Random checkpoints in ``root`` and their graphs in ``root/graphs``; returns transformers' target, float32."""
    model = make_target(case, root / "target")
    make_draft(model, root / "draft", storage=case.storage)
    checkpoints = {role: Checkpoint.open(root / role, role) for role in ("target", "draft")}
    weights = {role: Weights(role, checkpoint, dtype) for role, checkpoint in checkpoints.items()}
    target = TargetConfig.read(checkpoints["target"])
    draft = DraftConfig.read(checkpoints["draft"], target)
    (root / "graphs").mkdir()
    graphs = {
        "target": place_target(target, weights["target"], draft.target_layer_ids, 64, CACHE),
        "draft": place_draft(draft, weights["draft"], target, weights["target"], 64, CACHE),
    }
    for role in graphs:
        weights[role].write(root / "graphs", lambda *_: None)
    for role, graph in graphs.items():
        (root / f"graphs/{role}.onnx").write_bytes(graph.model().SerializeToString())
    return model


@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("case", [CASES[0], CASES[1], *MIXTURES], ids=str)
def test_graphs_of_every_dtype_pass_the_model_checker(case: Case, dtype: str, tmp_path: Path) -> None:
    write_graphs(tmp_path, case, dtype)
    shutil.copytree(tmp_path / "graphs", tmp_path / "copy")  # the checker takes hard links for an attack
    for role in ("target", "draft"):
        onnx.checker.check_model(str(tmp_path / f"copy/{role}.onnx"), full_check=True)
        graph = onnx.load(tmp_path / f"graphs/{role}.onnx", load_external_data=False).graph
        values = {value.name: value.type.tensor_type for value in [*graph.input, *graph.output]}
        integers = {name for name in values if "_ids" in name} | {"write_index", "logit_rows"}
        assert {value.elem_type for name, value in values.items() if name not in integers} == {DTYPES[dtype]}
        assert {i.data_type for i in graph.initializer} == {DTYPES[dtype], onnx.TensorProto.INT64}
        cache = values["past_key_values.0.key"].shape.dim
        assert (cache[0].dim_param, cache[2].dim_value) == ("batch", CACHE)
        assert not {"Tile", "Expand"} & {node.op_type for node in graph.node}  # queries and cache go in as they are


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_weights_are_the_checkpoints_own_files(dtype: str, tmp_path: Path) -> None:
    write_graphs(tmp_path, Case("half", "qwen3", (4, 2, 16), 48, False, STORAGE[dtype]), dtype)
    for role in ("target", "draft"):
        linked = tmp_path / f"graphs/{role}-model.safetensors"
        assert linked.samefile(tmp_path / role / "model.safetensors")
        copied = tmp_path / f"graphs/{role}.{dtype}.safetensors"
        assert copied.stat().st_size < 64 * 8 * 2 * 2 + 1000  # the rotary tables alone


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_pass_agrees_with_transformers(case: Case, dtype: str, tolerance: float, tmp_path: Path) -> None:
    model = write_graphs(tmp_path, dataclasses.replace(case, storage=STORAGE[dtype]), dtype)
    config = TargetConfig.read(Checkpoint.open(tmp_path / "target", "target")).decoder
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, LENGTH))
    numpy_dtype = np.dtype(dtype)
    distance = np.arange(LENGTH)[:, None] - np.arange(CACHE)
    windows = {"attention_mask": config.window or CACHE}
    if config.mixed_windows:
        windows = {"attention_mask": CACHE, "sliding_attention_mask": config.window}
    masks = {
        name: np.where((distance >= 0) & (distance < window), numpy_dtype.type(0), np.finfo(numpy_dtype).min)
        for name, window in windows.items()
    }
    session = ort.InferenceSession(tmp_path / "graphs/target.onnx")
    shape = (1, config.num_key_value_heads, CACHE, config.head_dim)
    caches = {i.name: np.zeros(shape, numpy_dtype) for i in session.get_inputs() if "past" in i.name}
    (logits,) = session.run(
        ["logits"],
        {
            "input_ids": ids,
            "position_ids": np.arange(LENGTH)[None],
            "write_index": np.zeros(1, np.int64),
            "logit_rows": np.arange(LENGTH)[None],
        }
        | {name: mask[None, None] for name, mask in masks.items()}
        | caches,
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits - expected).max() <= tolerance * np.abs(expected).max()


def test_a_weight_too_large_for_float16_is_refused(tmp_path: Path) -> None:
    model = make_target(CASES[1], tmp_path / "target")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e5
    model.save_pretrained(tmp_path / "target")
    checkpoint = Checkpoint.open(tmp_path / "target", "target")
    weights = Weights("target", checkpoint, "float16")
    place_target(TargetConfig.read(checkpoint), weights, (), 64, CACHE)
    with pytest.raises(BuildError, match=r"lm_head.weight has values beyond the range of float16 \(use bfloat16\)"):
        weights.write(tmp_path, lambda *_: None)
