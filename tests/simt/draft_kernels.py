"""draft_topk and build_tree as the kernels on the CPU compute them, and what they must give, from scalar Python."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ddtree.plugins import ops
from ddtree.plugins.operations import BUILD_TREE, DRAFT_TOPK, MODES

from ..plugins.oracles import float32_log_softmax, heap_tree, nodes_of, tree_of
from .runner import Kernels, build

TREE_FIELDS = tuple(spec.name for spec in BUILD_TREE.outputs)
UNWRITTEN = -77  # in outputs, before the kernel runs

Row = Sequence[tuple[int, float]]  # (token, log-probability) of positive probability, best first


def draft_topk(
    draft_logits: Tensor,  # [batch, D, vocab]
    k: int,
    draft_to_target: Tensor | None = None,
    *,
    kernels: Kernels | None = None,
    schedule: int = 0,
) -> tuple[Tensor, Tensor]:
    """token_ids int32 and log_probs float32, both [batch, D, k]."""
    batch, depths, vocab = draft_logits.shape
    token_ids = torch.full((batch, depths, k), UNWRITTEN, dtype=torch.int32)
    log_probs = torch.full((batch, depths, k), float(UNWRITTEN))
    mapped = draft_to_target is not None
    table = draft_to_target if mapped else torch.empty(0, dtype=torch.int32)
    (kernels or build("draft_topk.cu")).launch(
        f"ddtree_draft_topk_{str(draft_logits.dtype).removeprefix('torch.')}",
        grid=(batch * depths, 1, 1),
        block=(DRAFT_TOPK.block, 1, 1),
        args=[draft_logits, table, depths, vocab, k, int(mapped), token_ids, log_probs],
        schedule=schedule,
    )
    return token_ids, log_probs


def build_tree(
    token_ids: Tensor,  # [batch, D, K]
    log_probs: Tensor,  # [batch, D, K]
    root_token_ids: Tensor,  # [batch]
    *,
    budget: int,
    mode: str = "tree",
    keep_chain: bool = False,
    kernels: Kernels | None = None,
    schedule: int = 0,
) -> ops.DraftTree:
    batch, depths, candidates = token_ids.shape
    width = budget + 1

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, UNWRITTEN, dtype=torch.int32)

    tree = ops.DraftTree(
        token_ids=empty(batch, width),
        parents=empty(batch, width),
        depths=empty(batch, width),
        node_logws=torch.full((batch, width), float(UNWRITTEN)),
        node_count=empty(batch),
        next_token=empty(batch, width),
        next_sibling=empty(batch, width),
        ancestor_mask=empty(batch, width, (width + 31) // 32),
        max_depth=depths,
    )
    scalars = [depths, candidates, width, MODES.index(mode), int(keep_chain)]
    (kernels or build("build_tree.cu")).launch(
        "ddtree_build_tree",
        grid=(batch, 1, 1),
        block=(BUILD_TREE.block, 1, 1),
        args=[
            token_ids,
            log_probs,
            root_token_ids.int(),
            *scalars,
            *(getattr(tree, name) for name in TREE_FIELDS),
        ],
        schedule=schedule,
    )
    return tree


def ranked(draft_logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """What draft_topk is to give, with the log-probabilities of the CPU path."""
    logits = draft_logits.float().numpy()
    log_probs = float32_log_softmax(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
    order = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    log_probs = np.take_along_axis(log_probs, order, -1)
    drawn = log_probs > -np.inf  # NaN is not
    token_ids = np.where(drawn, order, -1).astype(np.int32)
    return torch.from_numpy(token_ids), torch.from_numpy(np.where(drawn, log_probs, np.float32(-np.inf)))


def padded(rows: Sequence[Sequence[Row]], k: int) -> tuple[Tensor, Tensor]:
    """Candidates of [batch][D] rows as the kernel takes them, the first k of each."""
    token_ids = torch.full((len(rows), len(rows[0]), k), -1, dtype=torch.int32)
    log_probs = torch.full(token_ids.shape, -torch.inf)
    for slot, depths in enumerate(rows):
        for depth, row in enumerate(depths):
            for rank, (token, log_prob) in enumerate(row[:k]):
                token_ids[slot, depth, rank] = token
                log_probs[slot, depth, rank] = float(log_prob)
    return token_ids, log_probs


def rows_of(token_ids: Tensor, log_probs: Tensor) -> list[Row]:
    """The rows of one request, [D, K] each, as the oracles take them."""
    return [
        [(token, value) for token, value in zip(tokens, values, strict=True) if value > -np.inf]
        for tokens, values in zip(token_ids.tolist(), log_probs.numpy(), strict=True)
    ]


def assert_same_tree(tree: ops.DraftTree, expected: ops.DraftTree) -> None:
    """Every field, bit for bit."""
    for name in TREE_FIELDS:
        have, want = getattr(tree, name), getattr(expected, name)
        assert torch.equal(have.view(torch.int32), want.view(torch.int32)), name


def assert_heap_tree(tree: ops.DraftTree, rows: Sequence[Row], budget: int, root: int, slot: int = 0) -> None:
    """A request's tree is that of the best-first heap, and its links, mask and padding follow from its parents."""
    nodes = heap_tree([list(row) for row in rows], budget)
    assert nodes_of(tree, slot) == nodes
    tokens, parents = [root, *(node[0] for node in nodes)], [-1, *(node[1] for node in nodes)]
    expected = tree_of(tokens, parents, max_depth=tree.max_depth, width=budget + 1)
    for name in ("token_ids", "parents", "depths", "node_count", "next_token", "next_sibling", "ancestor_mask"):
        assert torch.equal(getattr(tree, name)[slot], getattr(expected, name)[0]), name
    assert tree.node_logws[slot, 0] == 0
    assert tree.node_logws[slot, len(tokens) :].eq(-torch.inf).all()
