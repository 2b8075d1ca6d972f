"""Trains the drafter on the target's own text, with the target's embedding and head frozen."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddtree.demo.drafter import Drafter
from ddtree.demo.own_text import Batch, read_own_text
from ddtree.demo.recipe import Recipe
from ddtree.demo.target import Target
from ddtree.demo.training import Report, learning_rates, train

_TOKENS_PER_STEP = 2048  # rows of one step = this / their length
_LONG_EVERY = 8  # every eighth step takes the long rows


def train_drafter(recipe: Recipe, target: Target, own_text: Path, checkpoint: Path, report: Report) -> Drafter:
    """The trained drafter in float32. Goes on from `checkpoint` where there is one."""
    parts = read_own_text(recipe, own_text)
    torch.manual_seed(recipe.seed + 1)
    drafter = Drafter(recipe.target, recipe.drafter)
    embedding = target.embed_tokens.weight.detach()
    compiled = torch.compile(block_loss, dynamic=False, disable=not recipe.compile)

    def loss_of_step(step: int) -> Tensor:
        rng = np.random.default_rng([recipe.seed, step])
        part = parts[1] if step % _LONG_EVERY == 0 else parts[0]
        ids, own, features = _rows(part, rng)
        anchors = draw_anchors(own, recipe.drafter_anchors // len(ids), rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            return compiled(drafter, embedding, ids, own, features, anchors, recipe.loss_decay)

    train(
        drafter,
        loss_of_step,
        rates=learning_rates(recipe.drafter_steps, recipe.drafter_rate, recipe),
        recipe=recipe,
        checkpoint=checkpoint,
        report=report,
    )
    return drafter


def block_loss(
    drafter: Drafter,
    embedding: Tensor,  # [vocab, hidden]
    ids: Tensor,  # [rows, length] int64
    own: Tensor,  # [rows, length] bool
    features: Tensor,  # [rows, length, taps * hidden]
    anchors: Tensor,  # [rows, blocks] int64
    decay: float,
) -> Tensor:
    """Cross entropy of the block's masks against the text, depth k weighted by exp(-(k - 1) / decay): an error at one
    depth makes all later ones worthless. Depths beyond the target's own continuation have weight 0."""
    depths = torch.arange(1, drafter.shape.block_size)
    positions = anchors[:, :, None] + depths  # [rows, blocks, depth]
    inside = positions < ids.shape[1]
    flat = positions.clamp(max=ids.shape[1] - 1).flatten(1)
    labels = ids.gather(1, flat)
    written = (own.gather(1, flat).view_as(positions) & inside).float().cumprod(-1)
    weights = (written * torch.exp(-(depths - 1) / decay)).flatten()
    logits = functional.linear(drafter(features, ids, anchors, embedding), embedding)  # [rows, blocks, depth, vocab]
    losses = functional.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


def draw_anchors(own: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """`count` different positions of each row, int64 [rows, count], whose next token the target wrote (as long as the
    row has so many)."""
    keys = torch.from_numpy(rng.random(own.shape, np.float32))[:, :-1]
    return (keys + own[:, 1:]).topk(count, dim=1).indices.sort(dim=1).values


def _rows(batches: list[Batch], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    batch_rows, length = batches[0].ids.shape
    chosen = rng.choice(len(batches) * batch_rows, _TOKENS_PER_STEP // length, replace=False)
    taken = [(batches[row // batch_rows], row % batch_rows) for row in chosen]
    ids = torch.from_numpy(np.stack([batch.ids[row] for batch, row in taken]).astype(np.int64))
    own = torch.from_numpy(np.stack([batch.own[row] for batch, row in taken]))
    features = torch.from_numpy(np.stack([batch.features[row] for batch, row in taken]).astype(np.float32))
    return ids, own, features
