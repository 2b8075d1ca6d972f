"""The drafter: DFlash (arXiv 2602.06036), a few Qwen3 layers that fill a block of masks in one pass.

Written from the paper's description. Queries come from the block; keys and values from the context features, mapped to
the hidden size by `fc` and `hidden_norm`, and from the block. Nothing is causal inside the block. The embedding and the
head are the target's.
"""

import torch
from torch import Tensor, nn

from ddtree.demo.recipe import MASK_ID, DrafterShape, TargetShape
from ddtree.demo.target import MLP, Projections, RMSNorm, initialise, rotary_tables


class DrafterLayer(nn.Module):
    def __init__(self, shape: TargetShape):
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Projections(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x: Tensor,  # [batch, blocks, block_size, hidden]
        context: Tensor,  # [batch, length, hidden]
        hidden_from: Tensor,  # [batch, blocks, 1, length] bool, True where a block must not see the context
        block_rotary: tuple[Tensor, Tensor],  # each [batch, 1, blocks * block_size, head_dim]
        context_rotary: tuple[Tensor, Tensor],  # each [length, head_dim]
    ) -> Tensor:
        attention, (batch, blocks, rows, _) = self.self_attn, x.shape
        kv_heads, group, head_dim = attention.kv_heads, attention.heads // attention.kv_heads, attention.head_dim
        normed = self.input_layernorm(x).flatten(1, 2)
        q = attention.queries(normed, *block_rotary)
        k, v = attention.keys_values(normed, *block_rotary)
        context_k, context_v = attention.keys_values(context, *context_rotary)

        # Each block sees the context before its anchor and itself, not the other blocks: two products and one softmax.
        q = q.reshape(batch, kv_heads, group, blocks, rows, head_dim) * head_dim**-0.5
        k = k.reshape(batch, kv_heads, 1, blocks, rows, head_dim)
        v = v.reshape(batch, kv_heads, 1, blocks, rows, head_dim)
        to_context = q.reshape(batch, kv_heads, -1, head_dim) @ context_k.transpose(-1, -2).to(q.dtype)
        to_context = to_context.reshape(batch, kv_heads, group, blocks, rows, -1)
        to_context = to_context.masked_fill(hidden_from[:, None, None], float("-inf"))
        weights = torch.cat([to_context, q @ k.transpose(-1, -2)], -1).softmax(-1)
        on_context, on_block = weights.split([context.shape[1], rows], -1)
        mixed = on_context.reshape(batch, kv_heads, -1, context.shape[1]) @ context_v.to(weights.dtype)
        mixed = mixed.reshape(batch, kv_heads, group, blocks, rows, head_dim) + on_block @ v.to(weights.dtype)
        mixed = mixed.permute(0, 3, 4, 1, 2, 5).flatten(3)  # [batch, blocks, block_size, heads * head_dim]

        x = x + attention.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    def __init__(self, target_shape: TargetShape, shape: DrafterShape):
        super().__init__()
        self.target_shape, self.shape = target_shape, shape
        hidden = target_shape.hidden_size
        self.fc = nn.Linear(len(shape.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, target_shape.rms_norm_eps)
        self.layers = nn.ModuleList(DrafterLayer(shape.layer(target_shape)) for _ in range(shape.layers))
        self.norm = RMSNorm(hidden, target_shape.rms_norm_eps)
        initialise(self)

    def forward(self, features: Tensor, ids: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states of the masks, [batch, blocks, block_size - 1, hidden], of many blocks of the same sequences.

        features [batch, length, taps * hidden]: context features of every position; a block sees those before its
        anchor. ids [batch, length]: the tokens. anchors [batch, blocks] int64: the positions of the anchor tokens.
        embedding [vocab, hidden]: the target's. Logits are `hidden @ embedding.T`.
        """
        block_size, length = self.shape.block_size, ids.shape[1]
        masks = embedding[MASK_ID].expand(*anchors.shape, block_size - 1, -1)
        x = torch.cat([embedding[ids.gather(1, anchors)][:, :, None], masks], 2)  # [batch, blocks, block_size, hidden]
        positions = (anchors[:, :, None] + torch.arange(block_size)).flatten(1)  # [batch, blocks * block_size]
        cos, sin = rotary_tables(self.target_shape, positions)
        block_rotary = cos[:, None], sin[:, None]
        context_rotary = rotary_tables(self.target_shape, torch.arange(length))
        hidden_from = (torch.arange(length) >= anchors[:, :, None])[:, :, None]

        context = self.hidden_norm(self.fc(features))
        for layer in self.layers:
            x = layer(x, context, hidden_from, block_rotary, context_rotary)
        return self.norm(x[:, :, 1:])
