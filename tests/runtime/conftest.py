"""A tiny target and drafter with random weights: a vocabulary so small that random drafts are often right."""

import json
import math
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Qwen3Config, Qwen3ForCausalLM

from ddtree.builder import build_engine
from ddtree.runtime import LLM

VOCAB, HIDDEN, LAYERS, BLOCK, MASK, EOS = 24, 32, 4, 8, 23, 22


def _write_target(directory: Path, **changes: object) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=EOS,
    )
    config.update(changes)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _write_draft(directory: Path, **changes: object) -> Path:
    directory.mkdir()
    taps, heads, kv_heads, head_dim, intermediate = [0, 2], 4, 2, 16, 48
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": BLOCK,
        "num_target_layers": LAYERS,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "torch_dtype": "float32",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": taps},
    } | changes
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {
        "fc.weight": weight(HIDDEN, len(taps) * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        name = f"layers.{layer}"
        tensors |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": weight(heads * head_dim, HIDDEN),
            f"{name}.self_attn.k_proj.weight": weight(kv_heads * head_dim, HIDDEN),
            f"{name}.self_attn.v_proj.weight": weight(kv_heads * head_dim, HIDDEN),
            f"{name}.self_attn.o_proj.weight": weight(HIDDEN, heads * head_dim),
            f"{name}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"{name}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"{name}.mlp.gate_proj.weight": weight(intermediate, HIDDEN),
            f"{name}.mlp.up_proj.weight": weight(intermediate, HIDDEN),
            f"{name}.mlp.down_proj.weight": weight(HIDDEN, intermediate),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def write_target() -> Callable[..., Path]:
    """Writes the tiny target, with changes of its config, into a directory."""
    return _write_target


@pytest.fixture(scope="session")
def write_draft() -> Callable[..., Path]:
    """Writes the tiny drafter, with changes of its config, into a directory."""
    return _write_draft


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return _write_target(root / "target"), _write_draft(root / "draft")


@pytest.fixture(scope="session")
def tiny_engine(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines") / "tiny"
    build_engine(*tiny_pair, directory, max_batch_size=4)
    return directory


@pytest.fixture
def tiny_llm(tiny_engine: Path) -> Iterator[LLM]:
    # A pass this small gains nothing from a second thread; whole trees test more than those that would pay.
    with LLM(tiny_engine, adaptive=False, threads=1) as llm:
        yield llm


POISONED_POSITION = 60


@pytest.fixture(scope="session")
def poisoned_engine(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine with NaN in its rotary table: a sequence that reaches position 60 has NaN logits.

    The builder refuses NaN weights, so a copy of the engine (its weight file is a link to the checkpoint's) is damaged.
    """
    directory = tmp_path_factory.mktemp("poisoned") / "engine"
    shutil.copytree(tiny_engine, directory)
    initializers = onnx.load(directory / "target.onnx", load_external_data=False).graph.initializer
    (table,) = (tensor for tensor in initializers if tensor.name.endswith("rotary.cos"))
    entry = {item.key: item.value for item in table.external_data}
    row = table.dims[1] * 4  # bytes
    with (directory / entry["location"]).open("r+b") as file:
        file.seek(int(entry["offset"]) + POISONED_POSITION * row)
        file.write(struct.pack("<f", math.nan) * table.dims[1])
    return directory
