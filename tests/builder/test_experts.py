"""One layer's mixture of experts, in ONNX Runtime's form and in TensorRT's, against transformers' block."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ddtree.builder.checkpoint import Checkpoint
from ddtree.builder.config import TargetConfig
from ddtree.builder.decoder import Decoder
from ddtree.builder.experts import place_experts
from ddtree.builder.graph import Graph
from ddtree.builder.weights import Weights

from .models import Case, make_target

HIDDEN, EXPERTS, LAYER = 48, 9, 1
FORMS = {"grouped": None, "dense": 16}  # cache length: none is ONNX Runtime's form, a fixed one TensorRT's


def make_checkpoint(root: Path, *, per_token: int = 3, normalized: bool = True) -> None:
    config = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": 20,
        "norm_topk_prob": normalized,
    }
    make_target(Case("moe", "qwen3_moe", (4, 2, 16), HIDDEN, False, torch.float32, config=config), root / "target")


def run_experts(root: Path, form: str, x: np.ndarray) -> np.ndarray:
    """[rows, hidden] through the experts of a layer of the checkpoint in ``root``."""
    checkpoint = Checkpoint.open(root / "target", "target")
    weights, graph = Weights("target", checkpoint, "float32"), Graph(form)
    decoder = Decoder(graph, weights, TargetConfig.read(checkpoint).decoder, "model.", 8, FORMS[form])
    graph.input("x", "float32", ["rows", HIDDEN])
    graph.output(place_experts(decoder, "x", LAYER), "float32", ["rows", HIDDEN])
    directory = root / form
    directory.mkdir()
    weights.write(directory, lambda *_: None)
    (directory / "experts.onnx").write_bytes(graph.model().SerializeToString())
    return ort.InferenceSession(directory / "experts.onnx").run(None, {"x": x})[0]


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, HIDDEN)).astype(np.float32)


@torch.no_grad()
def reference(root: Path, x: np.ndarray) -> np.ndarray:
    block = AutoModelForCausalLM.from_pretrained(root / "target").model.layers[LAYER].mlp
    out = block(torch.from_numpy(x)[None])
    return (out if isinstance(out, torch.Tensor) else out[0])[0].numpy()  # transformers 4 gives the router's logits too


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.shape == theirs.shape
    assert np.abs(theirs).max() > 0.5
    assert np.abs(ours - theirs).max() <= 2e-6 * np.abs(theirs).max()


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 2, 77])  # 1: all experts but three get no row
def test_the_sum_is_that_of_transformers(form: str, normalized: bool, count: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, normalized=normalized)
    assert_close(run_experts(tmp_path, form, rows(count)), reference(tmp_path, rows(count)))


@pytest.mark.parametrize("form", FORMS)
def test_an_expert_that_overflows_leaves_no_trace_in_rows_of_others(form: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    file = tmp_path / "target/model.safetensors"
    tensors = load_file(file)
    for part in ("gate", "up"):
        tensors[f"model.layers.{LAYER}.mlp.experts.4.{part}_proj.weight"] *= 1e30  # their product is beyond float32
    save_file(tensors, file, metadata={"format": "pt"})
    ours, theirs = run_experts(tmp_path, form, rows(40)), reference(tmp_path, rows(40))
    sound = np.isfinite(theirs).all(1)
    assert 5 < sound.sum() < 35
    assert_close(ours[sound], theirs[sound])
    assert not np.isfinite(ours[~sound]).all(1).any()


def test_a_row_gets_the_same_bits_alone_and_among_others(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, per_token=8)  # few of them are added up in one order, whatever adds them
    x = rows(200)
    together = run_experts(tmp_path, "grouped", x)
    session = ort.InferenceSession(tmp_path / "grouped/experts.onnx")
    order = np.random.default_rng(0).permutation(200)
    np.testing.assert_array_equal(session.run(None, {"x": x[order]})[0], together[order])
    for size in (1, 2, 3, 13):
        for start in range(0, 200 - size, 7):
            part = slice(start, start + size)
            np.testing.assert_array_equal(session.run(None, {"x": x[part]})[0], together[part])
