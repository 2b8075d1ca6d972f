"""Decoder layers as graph nodes: what target and drafter have in common.

Activations are flat, [batch * seq, width], so that every linear layer is one Gemm that reads its weight as the
checkpoint stores it, [out, in].
"""

import math

import numpy as np

from .config import DecoderConfig, Rope
from .graph import Graph
from .weights import Weights


class Decoder:
    """Places the layers of one model in one graph, and the inputs and outputs of its KV caches.

    Args:
        prefix: what the checkpoint's tensor names begin with, "model." or nothing.
        positions: length of the rotary tables, the largest position plus one.
        cache_length: rows of a KV cache; None leaves it dynamic, which TensorRT's KV cache layer does not take.
    """

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        config: DecoderConfig,
        prefix: str,
        positions: int,
        cache_length: int | None,
    ):
        self.graph, self.weights, self.config, self.prefix = graph, weights, config, prefix
        self.cache_length = cache_length
        cos, sin = rotary_tables(config.rope, config.head_dim, positions)  # [positions, head_dim / 2]
        self._rotary_tables = [
            graph.weight(weights.put(f"rotary.{name}", t)) for name, t in (("cos", cos), ("sin", sin))
        ]
        self._group = config.num_attention_heads // config.num_key_value_heads

    def declare(self, rows: int | str) -> list[str]:
        """Declare write_index, the mask inputs for ``rows`` query rows and the caches.

        The mask is additive and of the activation dtype. A model that mixes windowed and full layers takes a second.

        Returns:
            Per layer, its mask in the rows that ``attend`` gives to Attention.
        """
        graph, config, dtype = self.graph, self.config, self.weights.dtype
        cache: int | str = self.cache_length or "cache"
        names = ["attention_mask"] + ["sliding_attention_mask"] * config.mixed_windows
        graph.input("write_index", "int64", ["batch"])
        masks = [self._fold_mask(graph.input(name, dtype, ["batch", 1, rows, cache])) for name in names]
        shape: list[int | str] = ["batch", config.num_key_value_heads, cache, config.head_dim]
        for layer in range(config.num_hidden_layers):
            for part in ("key", "value"):
                graph.input(f"past_key_values.{layer}.{part}", dtype, shape)
                graph.output(f"present.{layer}.{part}", dtype, shape)
        return [masks[-1] if windowed else masks[0] for windowed in config.windowed]

    def norm(self, x: str, name: str, width: int) -> str:
        """RMSNorm over the last axis."""
        scale = self.graph.weight(self.weights.take(f"{self.prefix}{name}.weight", width))
        return self.graph.op("RMSNormalization", x, scale, axis=-1, epsilon=self.config.rms_norm_eps)

    def linear(self, x: str, name: str, inputs: int, outputs: int, *, bias: bool = False) -> str:
        """[rows, inputs] -> [rows, outputs]."""
        tensors = [self.weights.take(f"{self.prefix}{name}.weight", outputs, inputs)]
        if bias:
            tensors.append(self.weights.take(f"{self.prefix}{name}.bias", outputs))
        return self.graph.op("Gemm", x, *map(self.graph.weight, tensors), transB=1)

    def queries(self, x: str, layer: int, shape: str, positions: str) -> str:
        """[rows, hidden] -> rotated queries [batch, heads, seq, head_dim]; ``shape``: batch, seq, heads, head_dim."""
        config = self.config
        q = self._projection(x, layer, "q", config.num_attention_heads, shape)
        return self._rotate(self._head_norm(q, layer, "q"), positions)

    def update_caches(self, x: str, layer: int, shape: str, positions: str) -> tuple[str, str]:
        """Write keys and values of [rows, hidden] at write_index: the caches [batch, kv_heads, cache, head_dim]."""
        k, v = (self._projection(x, layer, part, self.config.num_key_value_heads, shape) for part in "kv")
        rows = {"key": self._rotate(self._head_norm(k, layer, "k"), positions), "value": self._transpose(v)}
        key, value = (
            self.graph.op(
                "TensorScatter",
                f"past_key_values.{layer}.{part}",
                rows[part],
                "write_index",
                name=f"present.{layer}.{part}",
                axis=2,
            )
            for part in ("key", "value")
        )
        return key, value

    def attend(self, q: str, key: str, value: str, mask: str, layer: int) -> str:
        """Queries over the whole cache and the output projection: [rows, hidden]."""
        graph, config = self.graph, self.config
        heads, head_dim = config.num_attention_heads, config.head_dim
        out = graph.op("Attention", self._fold_queries(q), key, value, mask, scale=head_dim**-0.5)
        out = self._transpose(self._unfold(out))  # [batch, seq, heads, head_dim]
        out = graph.op("Reshape", out, graph.integers(-1, heads * head_dim))
        name = f"layers.{layer}.self_attn.o_proj"
        return self.linear(out, name, heads * head_dim, config.hidden_size, bias=config.output_bias)

    def mlp(self, x: str, layer: int) -> str:
        """The dense feed-forward network: [rows, hidden] -> [rows, hidden]."""
        return self.swiglu(x, f"layers.{layer}.mlp", self.config.intermediate_size, bias=self.config.mlp_bias)

    def swiglu(self, x: str, name: str, width: int, *, bias: bool = False) -> str:
        """SwiGLU of ``width`` inner columns: [rows, hidden] -> [rows, hidden]."""
        sizes = self.config.hidden_size, width
        gate, up = (self.linear(x, f"{name}.{part}_proj", *sizes, bias=bias) for part in ("gate", "up"))
        return self.linear(self.gated(gate, up), f"{name}.down_proj", *reversed(sizes), bias=bias)

    def gated(self, gate: str, up: str) -> str:
        """silu(gate) * up. Not by Swish, which ONNX Runtime takes apart into four nodes: this it makes one of."""
        silu = self.graph.op("Mul", gate, self.graph.op("Sigmoid", gate))
        return self.graph.op("Mul", silu, up)

    def _projection(self, x: str, layer: int, part: str, heads: int, shape: str) -> str:
        config = self.config
        name = f"layers.{layer}.self_attn.{part}_proj"
        flat = self.linear(x, name, config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        return self.graph.op("Reshape", flat, shape)  # [batch, seq, heads, head_dim]

    def _head_norm(self, x: str, layer: int, part: str) -> str:
        if not self.config.qk_norm:
            return x
        return self.norm(x, f"layers.{layer}.self_attn.{part}_norm", self.config.head_dim)

    def _transpose(self, x: str) -> str:
        return self.graph.op("Transpose", x, perm=[0, 2, 1, 3])

    def _rotate(self, x: str, positions: str) -> str:
        return self.graph.op("RotaryEmbedding", self._transpose(x), *self._rotary_tables, positions)

    # ONNX Runtime multiplies one query row with the keys in another order than two rows or more, so a token scored
    # alone would differ in its last bits from the same token scored among others. Attention therefore never gets a
    # single row: the query heads that share a KV head become rows of that head (a reshape, no copy); where every query
    # head has its own, the first row is given twice. TensorRT would copy the whole cache for this, so its graphs stay
    # as they are.

    def _fold_queries(self, q: str) -> str:
        """[batch, heads, seq, head_dim] -> [batch, kv_heads, group * seq, head_dim]."""
        if self.cache_length is not None:
            return q
        if self._group == 1:
            return self._repeat_first_row(q)
        shape = self.graph.integers(0, self.config.num_key_value_heads, -1, self.config.head_dim)
        return self.graph.op("Reshape", q, shape)

    def _fold_mask(self, mask: str) -> str:
        """[batch, 1, seq, cache] -> [batch, 1, group * seq, cache]."""
        if self.cache_length is not None:
            return mask
        if self._group == 1:
            return self._repeat_first_row(mask)
        return self.graph.op("Tile", mask, self.graph.integers(1, 1, self._group, 1))

    def _unfold(self, out: str) -> str:
        """[batch, kv_heads, group * seq, head_dim] -> [batch, heads, seq, head_dim]."""
        graph, config = self.graph, self.config
        if self.cache_length is not None:
            return out
        if self._group == 1:
            return graph.op("Slice", out, graph.integers(0), graph.integers(-1), graph.integers(2))
        return graph.op("Reshape", out, graph.integers(0, config.num_attention_heads, -1, config.head_dim))

    def _repeat_first_row(self, x: str) -> str:
        graph = self.graph
        first = graph.op("Slice", x, graph.integers(0), graph.integers(1), graph.integers(2))
        return graph.op("Concat", x, first, axis=2)


def rotary_tables(rope: Rope, head_dim: int, positions: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 [positions, head_dim / 2].

    The angles are float32 products, as in transformers: models are trained and served with that rounding.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.float32(rope.theta) ** exponents
    if rope.scaling == "linear":
        frequencies /= np.float32(rope.factor)
    elif rope.scaling == "llama3":
        frequencies = _llama3(frequencies, rope)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)


def _llama3(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    wavelengths = np.float32(2 * math.pi) / frequencies
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = (rope.original_max_position_embeddings / wavelengths - low) / (high - low)  # 0: stretched, 1: kept
    kept = np.clip(kept, 0, 1).astype(np.float32)
    return (1 - kept) * frequencies / np.float32(rope.factor) + kept * frequencies
