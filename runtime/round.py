"""One round of tree speculative decoding (DDTree, arXiv 2604.12989): draft, encode, verify, commit."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Literal, Protocol, get_args

from ddtree.plugins import ops
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.tree import DraftTree, Verified, first_nodes
from ddtree.runtime.batch import Batch
from ddtree.runtime.engine import Engine, TargetInputs
from ddtree.runtime.passes import draft_inputs, windows
from ddtree.runtime.request import Request
from ddtree.runtime.results import StageSeconds

Method = Literal["ddtree", "chain", "ar"]
METHODS: tuple[str, ...] = get_args(Method)


class Pacing(Protocol):
    """Decides how much of a draft a round takes."""

    def drafts(self, *, forced: bool) -> bool:
        """Whether the round begins with a draft; it does if ``forced``."""

    def nodes(self, tree: DraftTree) -> int:
        """How many of the tree's draft nodes to verify."""


@dataclass(frozen=True)
class Round:
    """What a round did."""

    tree: DraftTree  # on the engine's device, until the next draft: with ``draft_ahead`` that has been made already
    verified: Verified  # on the host
    seconds: StageSeconds | None  # None: the stages ran on a GPU, which nobody stopped to time them


def decode_round(
    engine: Engine,
    batch: Batch,
    method: Method,
    budget: int,
    pacing: Pacing | None = None,
    *,
    draft_ahead: bool = True,
) -> Round:
    """Advance every sequence of the batch by its accepted path and the bonus token.

    ``ddtree`` drafts a tree of ``budget`` nodes, ``chain`` the drafter's likeliest token of each depth (DFlash,
    arXiv 2602.06036), ``ar`` nothing: the root alone, which is plain autoregressive decoding. With ``pacing`` a tree is
    cut to its first nodes, and a round may go without a draft if the drafter can wait for its context features.

    With ``draft_ahead`` an asynchronous engine is given the next round's draft before the host waits for this round's
    tokens. If a sequence joins or leaves then, that draft is not used, and the next one writes the same rows again.
    """
    start, drafting = perf_counter(), (len(batch), method, budget)
    tree = engine.ahead.pop(drafting, None)
    if tree is None and method != "ar" and (pacing is None or pacing.drafts(forced=batch.features_full)):
        tree = engine.run(_draft, engine, batch, *drafting)
        if pacing is not None:
            tree = first_nodes(tree, pacing.nodes(tree))
    drafted = perf_counter()

    rules = [request.row_rules for request in batch.requests]
    if any(rule is not None and rule.active for rule in rules):  # the host takes part, and nothing can record that
        tree, verified, ends = _encode_verify_commit(engine, batch, len(batch), method, tree, rules)
    else:
        tree, verified, ends = engine.run(_encode_verify_commit, engine, batch, len(batch), method, tree)

    fetched = engine.fetch(verified)
    if draft_ahead and engine.asynchronous and method != "ar" and all(map(_goes_on, batch.requests)):
        engine.ahead[drafting] = engine.run(_draft, engine, batch, *drafting)
    seconds = None if engine.asynchronous else StageSeconds(*(b - a for a, b in pairwise((start, drafted, *ends))))
    return Round(tree, fetched(), seconds)


# What an engine may record: apart from the batch's tensors, the arguments say all. ``size`` is the batch's.


def _draft(engine: Engine, batch: Batch, size: int, method: Method, budget: int) -> DraftTree:
    # draft: context features, root -> draft_logits [batch, D, draft vocabulary] -> DraftTree
    draft, roots = engine.manifest.draft, batch.root_token_ids  # roots int32 [batch]
    assert draft is not None
    context, width = batch.past - batch.feature_counts, batch.features.shape[1]
    if not engine.asynchronous:  # the host knows the lengths
        width = max(batch.feature_counts.tolist())  # rows beyond it are padding in every slot
        engine.reserve_draft(max(context.tolist()) + width + draft.block_size)
    inputs = draft_inputs(engine, batch.features[:, :width], context, batch.feature_counts, roots)
    if method == "chain":
        return engine.draft(inputs, roots, draft.max_depth, "chain")
    return engine.draft(inputs, roots, budget, "tree")


def _encode_verify_commit(
    engine: Engine,
    batch: Batch,
    size: int,
    method: Method,
    drafted: DraftTree | None,
    rules: Sequence[RowRules | None] | None = None,
) -> tuple[DraftTree, Verified, list[float]]:
    roots, past = batch.root_token_ids, batch.past  # int32 [batch], int64 [batch]

    # encode: DraftTree -> position_ids [batch, N], attention_masks [batch, 1, N, cache]
    tree = ops.root_tree(roots.clone()) if drafted is None else drafted
    if not engine.asynchronous:
        engine.reserve_target(max(past.tolist()) + tree.token_ids.shape[1])
    encoded = [
        ops.encode_tree(tree, past, past, engine.target_cache_length, engine.dtype, window=window)
        for window in windows(engine.manifest.target)
    ]
    inputs = TargetInputs(tree.token_ids, encoded[0][0], [mask for _, mask in encoded], past)
    ends = [perf_counter()]

    # verify: the target scores every node in one pass; the walk keeps the path that the target would have written
    verified, features = engine.verify(inputs, tree, batch.sampling, rules)
    ends.append(perf_counter())

    # commit: KV rows and context features of the accepted path move up, the bonus token becomes the root
    if tree.token_ids.shape[1] > 1:  # a root stands where it belongs
        ops.commit(engine.target_caches(size), past, verified)
    if drafted is not None:
        batch.features.copy_(ops.gather_features(features, verified))
        batch.feature_counts.zero_()
    elif method != "ar":
        batch.append_features(features)
    batch.advance(verified)
    ends.append(perf_counter())
    return tree, verified, ends


def _goes_on(request: Request) -> bool:
    """Whether one more token does not end it for certain."""
    return len(request.output_ids) + 1 < request.params.max_tokens
