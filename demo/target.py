"""The target: a Qwen3 model in plain torch, with Hugging Face's weight names. Equality is asserted at export."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.demo.recipe import TargetShape


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotary_tables(shape: TargetShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, each [*positions.shape, head_dim]."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE over halves, as in Llama and Qwen3: x is [..., length, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Projections(nn.Module):
    """The weights of one attention layer; target and drafter differ only in what attends to what."""

    def __init__(self, shape: TargetShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, length, hidden] -> [batch, heads, length, head_dim]"""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return rotate(self.q_norm(q).transpose(1, 2), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, length, hidden] -> twice [batch, kv_heads, length, head_dim]"""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        return rotate(self.k_norm(k).transpose(1, 2), cos, sin), v


class MLP(nn.Module):
    def __init__(self, shape: TargetShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class TargetLayer(nn.Module):
    def __init__(self, shape: TargetShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Projections(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor] | None, past: int) -> Tensor:
        """x [batch, length, hidden]. With a cache (keys, values of this layer), its rows 0..past-1 are attended to, and
        the new rows are written after them; a pass with a past takes one row."""
        attention = self.self_attn
        normed = self.input_layernorm(x)
        q = attention.queries(normed, cos, sin)
        k, v = attention.keys_values(normed, cos, sin)
        if cache is not None:
            end = past + x.shape[1]
            cache[0][:, :, past:end], cache[1][:, :, past:end] = k, v
            k, v = cache[0][:, :, :end], cache[1][:, :, :end]
        if past == 0:
            mixed = functional.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True, enable_gqa=True)
        else:  # one row sees everything: the query heads that share a key head can be the rows of one product
            mixed = functional.scaled_dot_product_attention(q.reshape(*k.shape[:2], -1, k.shape[-1]), k, v).reshape(
                q.shape
            )
        x = x + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """Token ids to hidden states; `logits` maps hidden states to logits through the tied embedding."""

    def __init__(self, shape: TargetShape):
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(TargetLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self)

    def forward(
        self,
        ids: Tensor,  # [batch, length] int64
        *,
        target_layer_ids: tuple[int, ...] = (),
        caches: list[tuple[Tensor, Tensor]] | None = None,
        past: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [batch, length, hidden] after the final norm, and the context features
        [batch, length, len(target_layer_ids) * hidden] (None without target_layer_ids)."""
        cos, sin = rotary_tables(self.shape, torch.arange(past, past + ids.shape[1]))
        x = self.embed_tokens(ids)
        taken = []
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[index] if caches is not None else None, past)
            if index in target_layer_ids:
                taken.append(x)
        return self.norm(x), torch.cat(taken, -1) if taken else None

    def logits(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.embed_tokens.weight)

    def new_caches(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Empty key and value caches, one pair a layer, each [batch, kv_heads, length, head_dim]."""
        size = (batch, self.shape.kv_heads, length, self.shape.head_dim)
        return [(torch.zeros(size), torch.zeros(size)) for _ in self.layers]


def initialise(model: nn.Module) -> None:
    """Matrices N(0, 0.02); the ones that write into the residual stream start at zero."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)
