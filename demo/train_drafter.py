"""Trains the drafter on the target's own text, with the target's embedding and head frozen."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddtree.demo.drafter import Drafter
from ddtree.demo.own_text import Batch, read_own_text
from ddtree.demo.recipe import Recipe, Rows
from ddtree.demo.target import Target
from ddtree.demo.training import Report, learning_rates, train

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
        shares = (recipe.long_drafter_text,) if step % _LONG_EVERY == 0 else recipe.drafter_text
        ids, own, features = _rows({rows: parts[rows] for rows in shares}, recipe.greedy_share, rng)
        anchors = draw_anchors(own, recipe.drafter_anchors // len(ids), rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.bfloat16):
            return compiled(drafter, embedding, ids, own, features, anchors, recipe.loss_decay, recipe.loss_reach)

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
    reach: float,
) -> Tensor:
    """Cross entropy of the block's masks against the text, weighted by what a right guess is worth at depth k.

    A guess counts only where all before it in the block were right. So a part `reach` of the weight is the square root
    of the probability that the drafter itself now gives the text down to depth k - 1: a block that is soon lost teaches
    its first depths, and one that is nearly settled teaches all of them. The root, because a tree gets further than the
    probability of one path says, and so does a greedy text. The rest is exp(-(k - 1) / decay), which gets a new drafter
    going. Depths beyond the target's own continuation have weight 0."""
    depths = torch.arange(1, drafter.shape.block_size)
    positions = anchors[:, :, None] + depths  # [rows, blocks, depth]
    inside = positions < ids.shape[1]
    flat = positions.clamp(max=ids.shape[1] - 1).flatten(1)
    labels = ids.gather(1, flat)
    written = (own.gather(1, flat).view_as(positions) & inside).float().cumprod(-1)
    logits = functional.linear(drafter(features, ids, anchors, embedding), embedding)  # [rows, blocks, depth, vocab]
    losses = functional.cross_entropy(logits.float().flatten(0, 2), labels.flatten(), reduction="none")
    losses = losses.view_as(positions)
    before = losses.detach().cumsum(-1) - losses.detach()
    weights = written * (reach * torch.exp(-before / 2) + (1 - reach) * torch.exp(-(depths - 1) / decay))
    return (losses * weights).sum() / weights.sum()


def draw_anchors(own: Tensor, count: int, rng: np.random.Generator) -> Tensor:
    """`count` different positions of each row, int64 [rows, count], whose next token the target wrote (as long as the
    row has so many)."""
    keys = torch.from_numpy(rng.random(own.shape, np.float32))[:, :-1]
    return (keys + own[:, 1:]).topk(count, dim=1).indices.sort(dim=1).values


def draw_rows(part: Rows, greedy_share: float, rng: np.random.Generator) -> np.ndarray:
    """The part's share of its rows for one step, int64 [share]. Of text that the target wrote, where even rows are
    greedy and odd ones sampled, a row is greedy with probability `greedy_share`, and may be drawn twice."""
    rows = rng.choice(part.batches * part.rows, part.share, replace=False)
    if part.source != "read library":
        rows = rows // 2 * 2 + (rng.random(part.share) >= greedy_share)
    return rows


def _rows(
    parts: dict[Rows, list[Batch]], greedy_share: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """ids, own and features of one step: each part's share of rows."""
    taken = [
        (batches[row // part.rows], row % part.rows)
        for part, batches in parts.items()
        for row in draw_rows(part, greedy_share, rng)
    ]
    ids = torch.from_numpy(np.stack([batch.ids[row] for batch, row in taken]).astype(np.int64))
    own = torch.from_numpy(np.stack([batch.own[row] for batch, row in taken]))
    features = torch.from_numpy(np.stack([batch.features[row] for batch, row in taken])).float()
    return ids, own, features
