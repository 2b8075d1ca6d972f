"""The draft graph in ONNX Runtime against a plain torch DFlash that keeps no cache.

The oracle follows the paper (arXiv 2602.06036): every target layer's features of every known token are projected and
normed once, and each layer attends from the block to all of that context and to the whole block. Tolerance as for the
target: 2e-5 of the largest logit (1.5e-6 was the worst seen).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from .models import CASES, LOWEST, VOCAB, Pair, make_pair

EPSILON = 1e-6
THETA, FACTOR = 10000.0, 1.0  # of the rotary embedding: base, and what linear scaling divides the angles by


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * scale


def rotate(x: Tensor, theta: float, factor: float) -> Tensor:
    """Rotary embedding of [length, heads, head_dim] at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / factor * theta ** (-torch.arange(half) / half)  # [length, half]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


@torch.no_grad()
def dflash_logits(pair: Pair, features: Tensor, block_ids: list[int], rope: tuple[float, float]) -> np.ndarray:
    """Draft logits [D, vocabulary] from the features [known tokens, layers*hidden] and the block behind them."""
    info, weights = pair.manifest.draft, pair.draft
    assert info is not None
    embedding = weights.get("embed_tokens.weight", pair.target.get_input_embeddings().weight)
    head = weights.get("lm_head.weight", pair.target.get_output_embeddings().weight)
    context = rms_norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = embedding[block_ids]  # [block, hidden]
    known, length = len(context), len(context) + len(x)
    distance = torch.arange(known, length)[:, None] - torch.arange(length)  # [block, length]; query minus key position
    for layer in range(info.num_hidden_layers):
        w = {name.removeprefix(f"layers.{layer}."): t for name, t in weights.items() if f"layers.{layer}." in name}
        h = rms_norm(x, w["input_layernorm.weight"])
        rows = torch.cat([context, h])  # [length, hidden]
        q, k, v = (
            (rows @ w[f"self_attn.{part}_proj.weight"].T + w.get(f"self_attn.{part}_proj.bias", 0)).unflatten(
                -1, (-1, info.head_dim)
            )
            for part in "qkv"
        )
        q = rotate(rms_norm(q, w["self_attn.q_norm.weight"]), *rope)[known:]  # [block, heads, head_dim]
        k = rotate(rms_norm(k, w["self_attn.k_norm.weight"]), *rope)  # [length, kv_heads, head_dim]
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * info.head_dim**-0.5
        if info.window is not None and (layer in WINDOWED or not info.sliding_mask):
            scores[:, distance >= info.window] = -torch.inf
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1)).flatten(1)
        x = x + attended @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0)
        h = rms_norm(x, w["post_attention_layernorm.weight"])
        gate, up = (h @ w[f"mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    logits = rms_norm(x, weights["norm.weight"]) @ head.T
    return logits[len(block_ids) - info.max_depth :].numpy()


WINDOWED = (0,)  # layers of the windowed drafter below


class Drafts:
    """Rounds of a draft graph over sequences of different lengths, with padded context rows."""

    def __init__(self, pair: Pair, batch: int, rope: tuple[float, float]):
        assert pair.manifest.draft is not None
        self.rope = rope
        self.pair, self.info, self.batch = pair, pair.manifest.draft, batch
        self.session = pair.open_draft(batch, cache=96)
        self.width = pair.manifest.target.hidden_size * len(self.info.target_layer_ids)
        self.features = [torch.zeros(0, self.width) for _ in range(batch)]  # of the known tokens

    def round(self, counts: list[int], padded: int, seed: int) -> tuple[np.ndarray, list[list[int]]]:
        """Feed ``counts`` new features a sequence in ``padded`` rows: draft logits [batch, D, vocab] and blocks."""
        generator = torch.Generator().manual_seed(seed)
        block = self.info.block_size
        new = torch.randn(self.batch, padded, self.width, generator=generator)  # rows from count on are padding
        context = [len(features) for features in self.features]
        known = [past + count for past, count in zip(context, counts, strict=True)]
        masks = np.full((2, self.batch, 1, block, self.session.cache), LOWEST)  # full, windowed
        for b in range(self.batch):
            positions = {slot: slot for slot in range(known[b])} | {
                context[b] + padded + i: known[b] + i for i in range(block)
            }
            for i in range(block):
                for slot, position in positions.items():
                    masks[0, b, 0, i, slot] = 0
                    if self.info.window is not None and known[b] + i - position < self.info.window:
                        masks[1, b, 0, i, slot] = 0
        anchors = torch.randint(0, VOCAB, (self.batch,), generator=generator).tolist()
        blocks = [[anchor] + [self.info.mask_token_id] * (block - 1) for anchor in anchors]
        (logits,) = self.session.run(
            context_features=new.numpy(),
            context_position_ids=np.array(context)[:, None] + np.arange(padded),
            block_ids=np.array(blocks),
            block_position_ids=np.array(known)[:, None] + np.arange(block),
            attention_mask=masks[int(self.info.window is not None and not self.info.sliding_mask)],
            write_index=np.array(context),
            **({"sliding_attention_mask": masks[1]} if self.info.sliding_mask else {}),
        )
        for b, count in enumerate(counts):
            self.features[b] = torch.cat([self.features[b], new[b, :count]])
        return logits, blocks

    def check(self, counts: list[int], padded: int, seed: int) -> None:
        logits, blocks = self.round(counts, padded, seed)
        assert logits.shape == (self.batch, self.info.max_depth, self.info.vocab_size)
        for b in range(self.batch):
            expected = dflash_logits(self.pair, self.features[b], blocks[b], self.rope)
            difference, scale = np.abs(logits[b] - expected).max(), np.abs(expected).max()
            assert scale > 1
            assert difference <= 2e-5 * scale, f"sequence {b}: {difference:.2e} at scale {scale:.1f}"


def run_rounds(pair: Pair, batch: int, rope: tuple[float, float] = (THETA, FACTOR)) -> None:
    """A prompt, then rounds whose context grows by 1 to D + 1 rows; what the last round left behind is overwritten."""
    drafts = Drafts(pair, batch, rope)
    depth = drafts.info.max_depth
    drafts.check([19, 7, 12][:batch], 19, seed=0)
    for round_, counts in enumerate(([1, depth + 1, 3], [depth + 1, 1, 2], [2, 2, 1], [1, 1, 1])):
        drafts.check([min(count, depth + 1) for count in counts[:batch]], depth + 1, seed=1 + round_)


OWN = {name: torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(9)) for name in ("embed_tokens", "lm_head")}
BIASES = {
    f"layers.{layer}.self_attn.{part}_proj.bias": torch.randn(width, generator=torch.Generator().manual_seed(width))
    for layer in range(2)
    for part, width in (("q", 64), ("k", 32), ("v", 32), ("o", 48))
}
VARIANTS: dict[str, dict] = {
    "anchor_row_dropped": {},
    "sample_from_anchor": {"sample_from_anchor": True},
    "block7": {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 0},
    "one_layer_block2": {"layers": 1, "block_size": 2, "target_layer_ids": [1]},
    "three_layers": {"layers": 3, "target_layer_ids": [0, 1, 2]},
    "mixed_windows": {
        "use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
    },
    "window_on_every_layer": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    "five_layers_of_one_feature": {"layers": 5, "target_layer_ids": [3]},
    "layers_in_any_order_and_twice": {"target_layer_ids": [2, 0, 2]},
    "attention_bias": {"attention_bias": True, "extra_tensors": BIASES},
    "reduced_vocabulary": {"draft_vocab_size": 40, "extra_tensors": {"d2t": torch.arange(40) // 3}},
    "own_embedding_and_head": {"extra_tensors": {f"{name}.weight": tensor for name, tensor in OWN.items()}},
    "float32_by_reference": {"storage": torch.float32},
    "bfloat16": {"storage": torch.bfloat16},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_of_several_rounds(variant: str, tmp_path: Path) -> None:
    pair = make_pair(tmp_path, CASES[0], **VARIANTS[variant])
    run_rounds(pair, batch=1)
    run_rounds(pair, batch=3)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.5}},
    ],
    ids=["transformers_4", "transformers_5"],
)
def test_drafts_of_another_rotary_embedding(keys: dict, tmp_path: Path) -> None:
    run_rounds(make_pair(tmp_path, CASES[0], **keys), batch=2, rope=(300.0, 2.5))


def test_drafts_with_every_target(pair: Pair) -> None:
    """Embedding and head come from the target's files, tied or not, converted or not, in shards or one file."""
    run_rounds(pair, batch=2)


@pytest.mark.parametrize(
    ("keys", "depth"),
    [
        ({"block_size": 16}, 15),  # z-lab's b16
        ({"block_size": 7, "architectures": ["Qwen3DSparkModel"]}, 7),  # DeepSeek's block7
        ({"block_size": 7, "sample_from_anchor": True}, 7),
        ({"block_size": 7, "sample_from_anchor": False, "architectures": ["Qwen3DSparkModel"]}, 6),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2], "block_size": 4}}, 3),
    ],
)
def test_the_depth_follows_from_block_and_convention(keys: dict, depth: int, tmp_path: Path) -> None:
    if "dflash_config" in keys:
        keys = keys | {"block_size": None}
    assert make_pair(tmp_path, CASES[0], **keys).manifest.draft.max_depth == depth  # type: ignore[union-attr]


def test_layers_of_the_target_default_to_dflashs_rule(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, CASES[0], dflash_config={"mask_token_id": 1})
    assert pair.manifest.draft is not None
    assert pair.manifest.draft.target_layer_ids == (1, 1)  # from layer 1 to the third last of 4
