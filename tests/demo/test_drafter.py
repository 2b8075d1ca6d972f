"""The drafter that is trained with many blocks at once is the DFlash of the paper, one block at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from ddtree.demo.drafter import Drafter
from ddtree.demo.own_text import read_batch
from ddtree.demo.recipe import MASK_ID, DrafterShape, Recipe, Rows, TargetShape
from ddtree.demo.target import Target
from ddtree.demo.train_drafter import block_loss, draw_anchors, draw_rows

SHAPE = TargetShape(vocab_size=40, hidden_size=32, intermediate_size=48, layers=4, heads=4, kv_heads=2, head_dim=8)
DRAFT = DrafterShape(layers=2, intermediate_size=48, heads=4, kv_heads=2, block_size=5, target_layer_ids=(0, 2))
LENGTH = 24


@pytest.fixture
def case():
    torch.manual_seed(0)
    drafter = Drafter(SHAPE, DRAFT)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    features = torch.randn(2, LENGTH, 2 * SHAPE.hidden_size)
    ids = torch.randint(2, SHAPE.vocab_size, (2, LENGTH))
    anchors = torch.tensor([[3, 9, 18], [1, 2, 23]])
    return drafter, features, ids, anchors, torch.randn(SHAPE.vocab_size, SHAPE.hidden_size)


def _one_block(drafter, features, anchor_id, embedding):
    """Written from the paper's description: features [context, taps * hidden] of all tokens before the anchor."""
    w = dict(drafter.named_parameters())

    def norm(x, name):
        return functional.rms_norm(x, x.shape[-1:], w[name + ".weight"], SHAPE.rms_norm_eps)

    def rope(x, positions):  # [heads, n, head_dim], a complex number per pair (i, i + head_dim / 2)
        half = SHAPE.head_dim // 2
        turn = torch.polar(
            torch.ones(len(positions), half),
            positions[:, None] / SHAPE.rope_theta ** (torch.arange(half) / half),
        )
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    past, block = len(features), DRAFT.block_size
    positions = torch.arange(past + block).float()
    context = norm(features @ w["fc.weight"].T, "hidden_norm")
    x = embedding[torch.tensor([anchor_id] + [MASK_ID] * (block - 1))]
    for i in range(DRAFT.layers):
        name = f"layers.{i}."
        y = norm(x, name + "input_layernorm")
        q, k, v = (
            (source @ w[f"{name}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, SHAPE.head_dim)).transpose(0, 1)
            for part, source in (("q", y), ("k", torch.cat([context, y])), ("v", torch.cat([context, y])))
        )
        q = rope(norm(q, name + "self_attn.q_norm"), positions[past:])
        k = rope(norm(k, name + "self_attn.k_norm"), positions)
        k, v = (part.repeat_interleave(SHAPE.heads // SHAPE.kv_heads, 0) for part in (k, v))
        mixed = (q @ k.transpose(1, 2) / SHAPE.head_dim**0.5).softmax(-1) @ v  # every row sees everything
        x = x + mixed.transpose(0, 1).flatten(1) @ w[name + "self_attn.o_proj.weight"].T
        y = norm(x, name + "post_attention_layernorm")
        gate, up = (y @ w[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (functional.silu(gate) * up) @ w[name + "mlp.down_proj.weight"].T
    return norm(x, "norm")[1:]


def test_blocks_trained_together_equal_blocks_drafted_one_by_one(case):
    drafter, features, ids, anchors, embedding = case
    together = drafter(features, ids, anchors, embedding)
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            alone = _one_block(drafter, features[row, :anchor], int(ids[row, anchor]), embedding)
            torch.testing.assert_close(together[row, block], alone, rtol=1e-4, atol=1e-4)


def test_a_block_learns_nothing_from_its_own_future(case):
    drafter, features, ids, anchors, embedding = case
    before = drafter(features, ids, anchors, embedding)
    features, ids = features.clone(), ids.clone()
    features[:, 9:], ids[:, 10:] = 100.0, 2
    after = drafter(features, ids, anchors, embedding)
    assert torch.equal(before[0, :2], after[0, :2])
    assert not torch.allclose(before[0, 2], after[0, 2])


def test_the_loss_counts_only_what_the_target_wrote_without_a_gap(case):
    """Depths at and beyond the next prompt do not count, nor do those beyond the row."""
    drafter, features, ids, _, embedding = case
    anchors = torch.tensor([[5], [21]])
    own = torch.ones(2, LENGTH, dtype=torch.bool)
    own[0, 8] = False  # depths 1 and 2 of the first block count; of the second block, 22 and 23 are in the row
    loss = block_loss(drafter, embedding, ids, own, features, anchors, decay=7.0, reach=0.0)
    logits = drafter(features, ids, anchors, embedding) @ embedding.T
    expected, weights = 0.0, 0.0
    for row, start in ((0, 5), (1, 21)):
        for depth in (1, 2):
            weight = 2.718281828 ** (-(depth - 1) / 7)
            expected += weight * -logits[row, 0, depth - 1].log_softmax(-1)[ids[row, start + depth]]
            weights += weight
    torch.testing.assert_close(loss, expected / weights, rtol=1e-5, atol=1e-5)


def test_a_block_that_is_lost_early_teaches_its_first_depths(case):
    """A share of the weights is the root of the probability of everything before; no gradient goes through it."""
    drafter, features, ids, anchors, embedding = case
    own = torch.ones(2, LENGTH, dtype=torch.bool)
    loss = block_loss(drafter, embedding, ids, own, features, anchors, decay=7.0, reach=0.25)
    gradient = torch.autograd.grad(loss, drafter.fc.weight)[0]
    logits = drafter(features, ids, anchors, embedding) @ embedding.T
    expected, weights = 0.0, 0.0
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            probability = 1.0
            for depth in range(1, DRAFT.block_size):
                if anchor + depth < LENGTH:
                    log_p = logits[row, block, depth - 1].log_softmax(-1)[ids[row, anchor + depth]]
                    weight = 0.25 * probability**0.5 + 0.75 * 2.718281828 ** (-(depth - 1) / 7)
                    expected, weights = expected - weight * log_p, weights + weight
                    probability *= float(log_p.detach().exp())
    torch.testing.assert_close(loss, expected / weights, rtol=1e-5, atol=1e-5)
    expected_gradient = torch.autograd.grad(expected / weights, drafter.fc.weight)[0]
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_anchors_stand_before_text_of_the_target(case):
    own = torch.zeros(3, 50, dtype=torch.bool)
    own[:, 20:40] = True
    anchors = draw_anchors(own, 20, np.random.default_rng(0))
    assert torch.equal(anchors, torch.arange(19, 39).expand(3, 20))  # all there are, each once, in order


@pytest.mark.parametrize("greedy_share", [0.0, 0.75, 1.0])
def test_rows_of_own_text_are_greedy_as_often_as_asked(greedy_share):
    rng = np.random.default_rng(0)
    own, read = Rows("own", 2, 30, 64, share=10), Rows("read library", 2, 30, 64, share=10)
    drawn = np.stack([draw_rows(own, greedy_share, rng) for _ in range(200)])
    share_of = (greedy_share, 1 - greedy_share)  # of even rows, of odd rows
    assert set(drawn.ravel().tolist()) == {row for row in range(60) if share_of[row % 2] > 0}
    assert (drawn % 2 == 0).mean() == pytest.approx(greedy_share, abs=0.04)  # 4 standard deviations of 2,000 draws
    assert set(np.concatenate([draw_rows(read, greedy_share, rng) for _ in range(200)]).tolist()) == set(range(60))


def test_read_text_is_a_piece_of_the_text_with_the_hidden_states_of_reading_it():
    torch.manual_seed(0)
    recipe = replace(Recipe(), target=SHAPE, drafter=DRAFT)
    target = Target(SHAPE)
    text = np.arange(2000, dtype=np.uint16) % 37 + 2
    batch = read_batch(recipe, target, text, rows=70, length=16, rng=np.random.default_rng(0))
    assert batch.own.all()
    assert {tuple(row) for row in batch.ids} <= {tuple(text[start : start + 16]) for start in range(len(text) - 16)}
    for row in (0, 69):
        ids = torch.from_numpy(batch.ids[row : row + 1].astype(np.int64))
        features = target(ids, target_layer_ids=DRAFT.target_layer_ids)[1]
        np.testing.assert_allclose(batch.features[row], features[0].detach().numpy(), atol=1e-3)
