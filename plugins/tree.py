"""The tensors that pass between the four stages: a draft tree, the sampling settings, and what verification returns."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.plugins.operations import mask_words


@dataclass(frozen=True)
class DraftTree:
    """A batch of draft trees, each padded to N = budget + 1 nodes. Node 0 is the root; a parent precedes its children.

    Nodes stand in descending ``node_logws``; siblings therefore ascend in index. How many nodes are real is said by
    ``node_count`` alone: 0 is a valid token id, so padding cannot be told by its token.
    ``next_token`` / ``next_sibling`` is the encoding of EAGLE, SGLang and TensorRT-LLM's dynamic trees.
    """

    token_ids: Tensor  # [batch, N] int32, padding 0
    parents: Tensor  # [batch, N] int32, root and padding -1
    depths: Tensor  # [batch, N] int32, root and padding 0
    node_logws: Tensor  # [batch, N] float32, log-probability of the prefix under the draft; root 0, padding -inf
    node_count: Tensor  # [batch] int32, root included
    next_token: Tensor  # [batch, N] int32, first child, -1 = none
    next_sibling: Tensor  # [batch, N] int32, next child of the same parent, -1 = none
    ancestor_mask: Tensor  # [batch, N, ceil(N/32)] int32, bit j%32 of word j/32 in row i: node i sees node j
    max_depth: int  # D: rows of the draft logits. Outputs of verification are D + 1 wide, whatever the budget

    def __post_init__(self) -> None:
        check_tensor("token_ids", self.token_ids, (None, None), torch.int32)
        batch, width = self.token_ids.shape
        for name in ("parents", "depths", "next_token", "next_sibling"):
            check_tensor(name, getattr(self, name), (batch, width), torch.int32)
        check_tensor("node_logws", self.node_logws, (batch, width), torch.float32)
        check_tensor("node_count", self.node_count, (batch,), torch.int32)
        check_tensor("ancestor_mask", self.ancestor_mask, (batch, width, mask_words(width)), torch.int32)


@dataclass(frozen=True)
class SamplingTensors:
    """Sampling settings, one per batch slot. Below temperature 1e-5 a slot is decoded greedily."""

    temperature: Tensor  # [batch] float32
    top_k: Tensor  # [batch] int32, 0 = off
    top_p: Tensor  # [batch] float32, 1 = off
    min_p: Tensor  # [batch] float32, relative to the largest probability, 0 = off
    seed: Tensor  # [batch] int64

    def __post_init__(self) -> None:
        check_tensor("temperature", self.temperature, (None,), torch.float32)
        batch = self.temperature.shape[0]
        check_tensor("top_k", self.top_k, (batch,), torch.int32)
        check_tensor("top_p", self.top_p, (batch,), torch.float32)
        check_tensor("min_p", self.min_p, (batch,), torch.float32)
        check_tensor("seed", self.seed, (batch,), torch.int64)


@dataclass(frozen=True)
class Verified:
    """What one round accepted. A slot with a status other than 0 accepted and emitted nothing.

    ``status``: 0, or 1 (the root's row held NaN, +inf or no finite logit: it is no distribution), or 2 (no token left
    after the request's rules, token_bitmask and filters). A round ends before another node whose row is so: the token
    of that node is then the bonus token, and the next round fails at it as plain decoding does.
    """

    accepted_nodes: Tensor  # [batch, D+1] int32, root first, then -1
    accepted_count: Tensor  # [batch] int32, draft tokens accepted; the root is not counted
    output_ids: Tensor  # [batch, D+1] int32, accepted tokens, then the bonus token, then -1
    logprobs: Tensor  # [batch, D+1] float32, log-softmax of the raw logits at output_ids; padding 0
    status: Tensor  # [batch] int32


def root_tree(root_token_ids: Tensor, *, max_depth: int = 0) -> DraftTree:
    """The tree of budget 0: the root alone. Verifying it is one step of plain autoregressive decoding.

    ``root_token_ids`` [batch] of an integer type. With the default ``max_depth`` 0 the outputs of verification are one
    token wide; give the drafter's D to keep the width of a speculative round.
    """
    batch, device = root_token_ids.shape[0], root_token_ids.device
    none = torch.full((batch, 1), -1, dtype=torch.int32, device=device)
    return DraftTree(
        token_ids=root_token_ids.to(torch.int32)[:, None],
        parents=none,
        depths=torch.zeros((batch, 1), dtype=torch.int32, device=device),
        node_logws=torch.zeros((batch, 1), device=device),
        node_count=torch.ones(batch, dtype=torch.int32, device=device),
        next_token=none,
        next_sibling=none,
        ancestor_mask=torch.ones((batch, 1, 1), dtype=torch.int32, device=device),
        max_depth=max_depth,
    )


def first_nodes(tree: DraftTree, count: int) -> DraftTree:
    """The same trees with their first ``count`` draft nodes only: what ``build_tree`` gives for that budget (without
    keep_chain). A tree of fewer nodes stays as it is.

    Raises:
        ValueError: ``count`` is negative or the trees are not so wide.
    """
    width = tree.token_ids.shape[1]
    if not 0 <= count < width:
        raise ValueError(f"count {count} of draft nodes is out of range (the trees have 0 to {width - 1})")
    kept = count + 1
    if kept == width:
        return tree

    def links(of: Tensor) -> Tensor:
        cut = of[:, :kept]
        return cut.masked_fill(cut >= kept, -1)

    return DraftTree(
        token_ids=tree.token_ids[:, :kept],
        parents=tree.parents[:, :kept],
        depths=tree.depths[:, :kept],
        node_logws=tree.node_logws[:, :kept],
        node_count=tree.node_count.clamp(max=kept),
        next_token=links(tree.next_token),
        next_sibling=links(tree.next_sibling),
        ancestor_mask=tree.ancestor_mask[:, :kept, : mask_words(kept)],
        max_depth=tree.max_depth,
    )


def check_tensor(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """Raises a one-line error unless ``tensor`` has this shape (None: any size) and one of these dtypes (none: any)."""
    have = tensor.shape
    if have != shape and (
        len(have) != len(shape) or any(size not in (None, got) for size, got in zip(shape, have, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(have)}, expected [{wanted}]")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
