"""verify_tree as the kernel on the CPU computes it, with the signature of ``ops.verify_tree``."""

import torch
from torch import Tensor

from ddtree.plugins import ops
from ddtree.plugins.operations import METHODS, VERIFY_TREE

from .runner import Kernels, build

THREADS = VERIFY_TREE.block


def arguments(
    logits: Tensor,
    tree: ops.DraftTree,
    root_positions: Tensor,
    sampling: ops.SamplingTensors,
    *,
    method: str = "coupled",
    token_bitmask: Tensor | None = None,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    coins: Tensor | None = None,
    final_coin: Tensor | None = None,
) -> tuple[list[Tensor | int], ops.Verified]:
    """The kernel's arguments in order, and the outputs among them, which hold what no kernel writes."""
    batch, width, vocab = logits.shape
    outputs = ops.Verified(
        accepted_nodes=torch.full((batch, tree.max_depth + 1), -77, dtype=torch.int32),
        accepted_count=torch.full((batch,), -77, dtype=torch.int32),
        output_ids=torch.full((batch, tree.max_depth + 1), -77, dtype=torch.int32),
        logprobs=torch.full((batch, tree.max_depth + 1), 77.0),
        status=torch.full((batch,), -77, dtype=torch.int32),
    )
    inputs = [
        logits,
        tree.token_ids,
        tree.next_token,
        tree.next_sibling,
        tree.node_count,
        root_positions,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        torch.empty((batch, width, 0), dtype=torch.int32) if token_bitmask is None else token_bitmask,
        torch.empty((batch, 0)) if coins is None else coins,
        torch.empty(0) if final_coin is None else final_coin,
        torch.tensor([threshold_single, threshold_acc]),
        torch.empty(tree.max_depth, dtype=torch.int32),
    ]
    words = 0 if token_bitmask is None else token_bitmask.shape[2]
    coin_count = 0 if coins is None else coins.shape[1]
    scalars = [width, vocab, tree.max_depth, words, coin_count, int(final_coin is not None), METHODS.index(method)]
    written = [outputs.accepted_nodes, outputs.accepted_count, outputs.output_ids, outputs.logprobs, outputs.status]
    return [*inputs, *scalars, *written], outputs


def entry(dtype: torch.dtype) -> str:
    return VERIFY_TREE.entry(str(dtype).removeprefix("torch."))


def verify_tree(
    logits: Tensor, *inputs, kernels: Kernels | None = None, schedule: int = 0, sanitize: bool = False, **options
) -> ops.Verified:
    args, outputs = arguments(logits, *inputs, **options)
    kernels = kernels or build(VERIFY_TREE.source, sanitize=sanitize)
    kernels.launch(entry(logits.dtype), grid=(len(logits), 1, 1), block=(THREADS, 1, 1), args=args, schedule=schedule)
    return outputs
