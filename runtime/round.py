"""One round of tree speculative decoding (DDTree, arXiv 2604.12989), and the prompt pass before the first round."""

from typing import Literal, Protocol, get_args

import torch

from ddtree.builder.manifest import DraftInfo, TargetInfo
from ddtree.plugins import ops
from ddtree.plugins.tree import DraftTree, Verified, first_nodes
from ddtree.runtime.batch import Batch
from ddtree.runtime.engine import Engine
from ddtree.runtime.masks import causal_mask, draft_mask

Method = Literal["ddtree", "chain", "ar"]
METHODS: tuple[str, ...] = get_args(Method)
PREFILL_CHUNK = 256  # prompt rows of one pass


class Pacing(Protocol):
    """Decides how much of a draft a round takes."""

    def drafts(self, *, forced: bool) -> bool:
        """Whether the round begins with a draft; it does if ``forced``."""

    def nodes(self, tree: DraftTree) -> int:
        """How many of the tree's draft nodes to verify."""


def decode_round(
    engine: Engine, batch: Batch, method: Method, budget: int, pacing: Pacing | None = None
) -> tuple[DraftTree, Verified]:
    """Advance every sequence of the batch by its accepted path and the bonus token.

    ``ddtree`` drafts a tree of ``budget`` nodes, ``chain`` the drafter's likeliest token of each depth (DFlash,
    arXiv 2602.06036), ``ar`` nothing: the root alone, which is plain autoregressive decoding. With ``pacing`` a tree is
    cut to its first nodes, and a round may go without a draft if the drafter can wait for its context features.
    """
    roots, past = batch.root_token_ids, batch.past  # int32 [batch], int64 [batch]

    # draft: context features, root -> draft_logits
    draft_logits = None  # [batch, D, draft vocabulary]
    if method != "ar" and (pacing is None or pacing.drafts(forced=batch.features_full)):
        context = past - batch.feature_counts
        width = int(batch.feature_counts.max())  # rows beyond it are padding in every slot
        draft_logits = _draft_pass(engine, 0, batch.features[:, :width], context, batch.feature_counts, roots)

    # encode: draft_logits -> DraftTree, position_ids [batch, N], attention_masks [batch, 1, N, cache]
    if draft_logits is None:
        tree = ops.root_tree(roots)
    else:
        tree = ops.build_tree(
            draft_logits,
            roots,
            budget=budget if method == "ddtree" else draft_logits.shape[1],
            mode="tree" if method == "ddtree" else "chain",
            draft_to_target=engine.draft_to_target,
        )
        if pacing is not None:
            tree = first_nodes(tree, pacing.nodes(tree))
    nodes = tree.token_ids.shape[1]
    engine.reserve_target(int(past.max()) + nodes)
    encoded = [
        ops.encode_tree(tree, past, past, engine.target_cache_length, engine.dtype, window=window)
        for window in _windows(engine.manifest.target)
    ]
    position_ids, attention_masks = encoded[0][0], [mask for _, mask in encoded]

    # verify: the target scores every node in one pass; the walk keeps the path that the target would have written
    logit_rows = torch.arange(nodes).expand(len(batch), -1)
    logits, features = engine.target(0, tree.token_ids, position_ids, attention_masks, past, logit_rows)
    verified = ops.verify_tree(logits, tree, past, batch.sampling)

    # commit: KV rows and context features of the accepted path move up, the bonus token becomes the root
    ops.commit(engine.target_caches(len(batch)), past, verified)
    if draft_logits is not None:
        batch.features.copy_(ops.gather_features(features, verified))
        batch.feature_counts.zero_()
    elif method != "ar":
        batch.append_features(features)
    batch.advance(verified)
    return tree, verified


def prefill(engine: Engine, batch: Batch, slot: int, method: Method) -> Verified:
    """Run the prompt of the request in ``slot`` through both models, in chunks, and draw its first token.

    The prompt's last token is verified as a tree that is a root alone, so the first token is drawn as every other one.
    """
    prompt = torch.tensor(batch.requests[slot].prompt_token_ids)  # int64 [prompt]
    for start in range(0, len(prompt), PREFILL_CHUNK):
        input_ids = prompt[None, start : start + PREFILL_CHUNK]  # [1, rows]
        rows = input_ids.shape[1]
        engine.reserve_target(start + rows)
        logits, features = engine.target(
            slot,
            input_ids,
            torch.arange(start, start + rows)[None],
            [
                causal_mask(start, rows, engine.target_cache_length, engine.dtype, window)
                for window in _windows(engine.manifest.target)
            ],
            torch.tensor([start]),
            torch.tensor([[rows - 1]]),
        )
        if method != "ar":
            # The last rows of the prompt wait for the first round, which saves the drafter a pass on short prompts.
            waiting = min(rows, batch.features.shape[1]) if start + rows == len(prompt) else 0
            fed = rows - waiting
            if fed:
                _draft_pass(engine, slot, features[:, :fed], torch.tensor([start]), torch.tensor([fed]), prompt[:1])
            batch.features[slot] = 0  # the rows behind are padding, and what another request left may be NaN
            batch.features[slot, :waiting] = features[0, fed:]
            batch.feature_counts[slot] = waiting
    batch.past[slot] = len(prompt)
    root = ops.root_tree(prompt[-1:].to(torch.int32))
    verified = ops.verify_tree(logits, root, torch.tensor([len(prompt) - 1]), batch.sampling_of(slice(slot, slot + 1)))
    batch.root_token_ids[slot] = verified.output_ids[0, 0]
    return verified


def _draft_pass(
    engine: Engine,
    first: int,
    features: torch.Tensor,  # [batch, ctx, layers*hidden]
    context: torch.Tensor,  # int64 [batch]; context rows the drafter holds
    counts: torch.Tensor,  # int64 [batch]; valid rows of features
    root_token_ids: torch.Tensor,  # [batch]
) -> torch.Tensor:
    """Give the drafter new context features and read the block behind them: [batch, D, draft vocabulary]."""
    draft = engine.manifest.draft
    assert draft is not None
    width, block = features.shape[1], draft.block_size
    engine.reserve_draft(int(context.max()) + width + block)
    block_ids = torch.full((len(context), block), draft.mask_token_id)  # [batch, block]
    block_ids[:, 0] = root_token_ids
    return engine.draft(
        first,
        features,
        context[:, None] + torch.arange(width),
        block_ids,
        (context + counts)[:, None] + torch.arange(block),
        [
            draft_mask(context, counts, width, block, engine.draft_cache_length, engine.dtype, window, causal)
            for window, causal in zip(_windows(draft), _causal(draft), strict=True)
        ],
        context,
    )


def _windows(model: TargetInfo | DraftInfo) -> list[int | None]:
    """The window of each mask input: one for all layers, or one for the full and one for the windowed layers."""
    return [None, model.window] if model.sliding_mask else [model.window]


def _causal(draft: DraftInfo) -> list[bool]:
    """Whether later rows of the block are hidden from a block row, for each of ``_windows``."""
    return (
        [draft.causal, draft.window_causal]
        if draft.sliding_mask
        else [draft.window_causal if draft.window else draft.causal]
    )
