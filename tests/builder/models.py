"""Small random checkpoints, engines built of them, and a thin way to run a graph in ONNX Runtime."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ddtree.builder import Manifest, build_engine

VOCAB, LAYERS = 97, 4
LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Case:
    """One target checkpoint: what differs from the others."""

    name: str
    model_type: str
    heads: tuple[int, int, int | None]  # query heads, KV heads, head_dim; None: config.json has none
    hidden: int
    tied: bool
    storage: torch.dtype
    shard_size: str = "1GB"
    config: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.name


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES = [
    Case("qwen3_gqa3_tied_float16", "qwen3", (6, 2, 16), 48, True, torch.float16),
    Case("qwen3_mha_untied_float32", "qwen3", (3, 3, 16), 64, False, torch.float32),
    Case("qwen3_mqa_untied_bfloat16_sharded", "qwen3", (4, 1, 8), 64, False, torch.bfloat16, "40KB"),
    Case("qwen3_bias_mixed_windows", "qwen3", (4, 2, 16), 64, True, torch.float32, config={
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2,
    }),
    Case("llama_gqa2_llama3_rope_bfloat16", "llama", (4, 2, 16), 64, False, torch.bfloat16, config={
        "rope_theta": 5000.0, "rope_scaling": LLAMA3,  # transformers 5 takes this spelling and writes the new one
    }),
    Case("llama_biases_linear_rope_float16", "llama", (4, 4, 16), 64, True, torch.float16, config={
        "attention_bias": True, "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }),
    Case("qwen2_tied_bfloat16", "qwen2", (4, 2, None), 64, True, torch.bfloat16),
    Case("qwen2_untied_mixed_windows_sharded", "qwen2", (4, 1, None), 48, False, torch.float32, "40KB", config={
        "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    }),
    Case("mistral_window_bfloat16", "mistral", (4, 2, 24), 48, False, torch.bfloat16, config={"sliding_window": 7}),
    Case("mistral_without_window_float32", "mistral", (4, 4, None), 64, True, torch.float32, config={
        "sliding_window": None,
    }),
    Case("qwen3_moe_every_layer_bfloat16_sharded", "qwen3_moe", (4, 2, 16), 48, False, torch.bfloat16, "90KB", config={
        "num_experts": 9, "num_experts_per_tok": 6, "moe_intermediate_size": 20, "norm_topk_prob": True,
    }),
    Case("qwen3_moe_some_layers_window_float32", "qwen3_moe", (4, 1, 16), 40, True, torch.float32, config={
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": False,
        "decoder_sparse_step": 2, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": 8,
    }),
]  # fmt: skip


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights that make activations of order 1 and attention far from uniform, unlike transformers' initial ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.dim() >= 2 and "embed" not in name:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.5 * noise)


def make_target(case: Case, directory: Path, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Save a random target in ``case.storage``; returns transformers' model of those weights, in float32."""
    query_heads, kv_heads, head_dim = case.heads
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": case.hidden,
        "intermediate_size": 80,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 256,
        "tie_word_embeddings": case.tied,
        "eos_token_id": 3,
        "bos_token_id": 2,
    } | ({} if head_dim is None else {"head_dim": head_dim})
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(case.model_type, **settings | (case.config or {}) | config)
    )
    randomize(model, seed)
    model.to(case.storage).save_pretrained(directory, max_shard_size=case.shard_size)
    (directory / "tokenizer.json").write_text("{}")  # the builder takes it along and does not read it
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def make_draft(
    target: PreTrainedModel, directory: Path, *, layers: int = 2, storage=torch.float16, seed: int = 1, **keys: Any
):
    """Save a random DFlash drafter for ``target`` with ``keys`` in its config.json; returns its float32 tensors."""
    config, generator = target.config, torch.Generator().manual_seed(seed)
    hidden, ids = config.hidden_size, keys.get("target_layer_ids", [0, 2])
    heads, kv_heads, head_dim, inner = 4, 2, 16, 72

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 1.5 * torch.randn(rows, columns, generator=generator) / columns**0.5

    def scale(width: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    tensors = {
        "fc.weight": matrix(hidden, len(ids) * hidden),
        "hidden_norm.weight": scale(hidden),
        "norm.weight": scale(hidden),
    }
    for i in range(layers):
        for name, shape in {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            tensors[f"layers.{i}.{name}.weight"] = matrix(*shape)
        for name, width in {
            "self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim,
            "input_layernorm": hidden, "post_attention_layernorm": hidden,
        }.items():  # fmt: skip
            tensors[f"layers.{i}.{name}.weight"] = scale(width)
    if keys.get("draft_vocab_size"):
        tensors["lm_head.weight"] = matrix(keys["draft_vocab_size"], hidden)
    tensors |= keys.pop("extra_tensors", {})
    directory.mkdir(parents=True)
    stored = {name: t.to(storage) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    description = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 5,
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": ids},
    } | keys  # fmt: skip
    (directory / "config.json").write_text(json.dumps(description))
    return {name: t.float() for name, t in stored.items()}


class GraphSession:
    """A graph in ONNX Runtime with its KV caches, which start with finite garbage: no pass may read a stale row."""

    def __init__(self, path: Path, layers: int, kv_heads: int, head_dim: int, batch: int, cache: int):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # else it warns that caches which are not bound in place are copied
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.cache = cache
        self.outputs = [output.name for output in self.session.get_outputs() if not output.name.startswith("present")]
        rng = np.random.default_rng(7)
        self.caches = {
            f"{i}.{part}": (100 * rng.standard_normal((batch, kv_heads, cache, head_dim))).astype(np.float32)
            for i in range(layers)
            for part in ("key", "value")
        }

    def run(self, **inputs: np.ndarray) -> list[np.ndarray]:
        """One pass; the caches become the pass's present ones."""
        past = {f"past_key_values.{name}": cache for name, cache in self.caches.items()}
        presents = [f"present.{name}" for name in self.caches]
        results = self.session.run(self.outputs + presents, inputs | past)
        self.caches = dict(zip(self.caches, results[len(self.outputs) :], strict=True))
        return results[: len(self.outputs)]


@dataclass(frozen=True)
class Pair:
    """A built engine beside the models that it was built of."""

    case: Case
    directory: Path
    manifest: Manifest
    target: PreTrainedModel
    draft: dict[str, torch.Tensor]

    def open_target(self, batch: int = 1, cache: int = 64, name: str = "target.onnx") -> GraphSession:
        info = self.manifest.target
        return GraphSession(
            self.directory / name, info.num_hidden_layers, info.num_key_value_heads, info.head_dim, batch, cache
        )

    def open_draft(self, batch: int = 1, cache: int = 64) -> GraphSession:
        info = self.manifest.draft
        assert info is not None
        return GraphSession(
            self.directory / "draft.onnx", info.num_hidden_layers, info.num_key_value_heads, info.head_dim, batch, cache
        )


def make_pair(root: Path, case: Case, **draft_keys: Any) -> Pair:
    """An engine of a random pair."""
    target = make_target(case, root / "target")
    draft = make_draft(target, root / "draft", **draft_keys)
    manifest = build_engine(root / "target", root / "draft", root / "engine")
    return Pair(case, root / "engine", manifest, target, draft)
