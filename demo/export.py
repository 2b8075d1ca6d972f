"""Writes a pair as Hugging Face checkpoint directories in float16, and reads one back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ddtree.demo.drafter import Drafter
from ddtree.demo.recipe import END_ID, MASK_ID, DrafterShape, TargetShape
from ddtree.demo.target import Target

# The drafter has its names without a prefix; Hugging Face's Qwen3ForCausalLM keeps its decoder under `model.`.
_TARGET_PREFIX = "model."


def export_target(target: Target, directory: Path) -> None:
    """config.json, generation_config.json and model.safetensors; the tokenizer's files are written beside them."""
    config = {"architectures": ["Qwen3ForCausalLM"], **_shared_config(target.shape)}
    config |= {"tie_word_embeddings": True, "use_cache": True, "eos_token_id": END_ID, "pad_token_id": END_ID}
    _write(directory, config, {_TARGET_PREFIX + name: weight for name, weight in _float16(target).items()})
    _write_json(directory / "generation_config.json", {"eos_token_id": END_ID, "pad_token_id": END_ID})


def export_drafter(drafter: Drafter, directory: Path) -> None:
    """config.json and model.safetensors."""
    shape = drafter.shape
    config = {"architectures": ["DFlashDraftModel"], **_shared_config(shape.layer(drafter.target_shape))}
    config |= {
        "block_size": shape.block_size,
        "num_target_layers": drafter.target_shape.layers,
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": list(shape.target_layer_ids)},
    }
    _write(directory, config, _float16(drafter))


def load_target(shape: TargetShape, directory: Path) -> Target:
    """The exported target, its float16 weights widened to float32."""
    weights = load_file(directory / "model.safetensors")
    return _filled(Target(shape), {name.removeprefix(_TARGET_PREFIX): weight for name, weight in weights.items()})


def load_drafter(target_shape: TargetShape, shape: DrafterShape, directory: Path) -> Drafter:
    """The exported drafter, its float16 weights widened to float32."""
    return _filled(Drafter(target_shape, shape), load_file(directory / "model.safetensors"))


@torch.no_grad()
def assert_equals_transformers(shape: TargetShape, target_layer_ids: tuple[int, ...], directory: Path) -> float:
    """Logits and context features of the exported target equal those of transformers' Qwen3ForCausalLM.

    Returns the largest absolute difference of the logits; raises AssertionError from 1e-4 on.
    """
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    target = load_target(shape, directory).eval()
    ids = torch.randint(2, shape.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    output = reference(ids, output_hidden_states=True)
    hidden, features = target(ids, target_layer_ids=target_layer_ids)
    expected = torch.cat([output.hidden_states[layer + 1] for layer in target_layer_ids], -1)
    difference = float((target.logits(hidden) - output.logits).abs().max())
    assert features is not None
    assert difference < 1e-4, f"logits differ from transformers by {difference}"
    assert torch.allclose(features, expected, atol=1e-4), "context features differ from transformers"
    return difference


def _shared_config(shape: TargetShape) -> dict:
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "sliding_window": None,
        "use_sliding_window": False,
        "torch_dtype": "float16",
        "vocab_size": shape.vocab_size,
    }


def _float16(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().half().contiguous() for name, weight in model.state_dict().items()}


def _filled(model, weights: dict[str, torch.Tensor]):
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model


def _write(directory: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
