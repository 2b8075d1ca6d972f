"""What the tree operations mean, and how a CPU runs them: the specification that every kernel is compared with.

torch reads the vocabulary; NumPy does the rest, on the small arrays that are left, because a call of it costs a fifth
of a torch operation's and a round on a CPU is made of many small ones. Arguments are checked in ``ops``, not here.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddtree.plugins import philox
from ddtree.plugins.operations import mask_words
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.sampling import TokenNoise, coupled_draw, filtered_weights, target_only_draw
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified, check_tensor

# Long rows go through a softmax so many at a time: the pages of a large result come anew from the system every time.
_ROWS_AT_ONCE = 4

# Below this temperature a slot is decoded greedily.
GREEDY_TEMPERATURE = 1e-5
# Rows up to this long NumPy reads, on one core: torch would share them out among its threads, and waiting for those,
# while ONNX Runtime's own keep the cores, takes longer than the work.
_FEW_IN_ROW = 1 << 14
_LOWEST = np.finfo(np.float32).min
_BITS = {2: torch.int16, 4: torch.int32}  # by bytes an element

# ---------------------------------------------------------------------------------------------------------------------
# build_tree
# ---------------------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore", divide="ignore", over="ignore")  # NaN, infinities and the largest numbers are data
def build_tree(
    draft_logits: Tensor,  # [batch, D, vocab]
    root_token_ids: Tensor,  # [batch]
    *,
    budget: int,
    mode: str = "tree",
    keep_chain: bool = False,
    draft_to_target: Tensor | None = None,
) -> DraftTree:
    batch, max_depth, _ = draft_logits.shape
    logits = draft_logits.float().contiguous()  # sums depend on the order in memory
    target_ids = None
    if draft_to_target is not None:
        logits, target_ids = _to_target_vocabulary(logits, draft_to_target)

    width = budget + 1
    token_ids = np.zeros((batch, width), np.int32)
    token_ids[:, 0] = root_token_ids.numpy()
    parents = np.full((batch, width), -1, np.int32)
    depths = np.zeros((batch, width), np.int32)
    node_logws = np.full((batch, width), -np.inf, np.float32)
    node_logws[:, 0] = 0
    node_count = np.ones(batch, np.int32)
    if budget > 0:
        keep_chain = mode == "chain" or (keep_chain and budget >= max_depth)
        tokens, log_probs, starts, floor = _candidates(logits, budget, mode, keep_chain)
        if target_ids is not None:
            tokens = target_ids[tokens]
        for slot in range(batch):
            first = starts[slot * max_depth : (slot + 1) * max_depth + 1]
            ranked = [log_probs[i:j] for i, j in pairwise(first.tolist())]  # per depth, descending
            depth, rank, parent, logw = _best_prefixes(ranked, budget, floor[slot])
            if mode == "tree" and keep_chain:
                depth, rank, parent, logw = _with_chain(depth, rank, parent, logw, ranked, budget)
            count = 1 + depth.size
            token_ids[slot, 1:count] = tokens[first[depth - 1] + rank]
            parents[slot, 1:count] = parent
            depths[slot, 1:count] = depth
            node_logws[slot, 1:count] = logw
            node_count[slot] = count

    next_token, next_sibling = _links(parents)
    return DraftTree(
        token_ids=torch.from_numpy(token_ids),
        parents=torch.from_numpy(parents),
        depths=torch.from_numpy(depths),
        node_logws=torch.from_numpy(node_logws),
        node_count=torch.from_numpy(node_count),
        next_token=torch.from_numpy(next_token),
        next_sibling=torch.from_numpy(next_sibling),
        ancestor_mask=torch.from_numpy(_ancestor_words(parents, int(depths.max()))),
        max_depth=max_depth,
    )


def _to_target_vocabulary(logits: Tensor, draft_to_target: Tensor) -> tuple[Tensor, NDArray]:
    """Logits over the distinct target ids in ascending order, and those ids; columns of one target id are summed."""
    target_ids, column = torch.unique(draft_to_target.long(), return_inverse=True)
    if target_ids.numel() == column.numel():
        return logits[..., column.argsort()], target_ids.numpy()
    index = column.expand(logits.shape)
    shape = (*logits.shape[:-1], target_ids.numel())
    largest = logits.new_full(shape, -math.inf).scatter_reduce_(-1, index, logits, "amax")
    shift = torch.where(largest == -math.inf, 0.0, largest)
    total = logits.new_zeros(shape).scatter_add_(-1, index, (logits - shift.gather(-1, index)).exp())
    return shift + total.log(), target_ids.numpy()


def _candidates(logits: Tensor, budget: int, mode: str, keep_chain: bool) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """The tokens that can be in a tree, without sorting the vocabulary.

    Tokens come row by row (batch * D rows), in a row by descending logit and then by id. The largest log-probability of
    a block of tokens is that of some token, so the prefixes "likeliest tokens, then the best of a block" are distinct
    prefixes, and the budget-th best of them is not above that of all. A token is wanted only if the likeliest prefix
    that ends in it reaches this floor, or if it belongs to a chain to keep. Rows that are no distribution (NaN, +inf,
    nothing finite) have no tokens.

    Returns:
        tokens, log_probs: [n], at most ``budget`` a row, 1 in mode "chain".
        starts: [batch * D + 1], where each row begins in them.
        floor: [batch] float32, no node of the tree is below it.
    """
    batch, depths, vocab = logits.shape
    rows = batch * depths
    values = logits.numpy().reshape(rows, vocab)
    block = 1  # large enough to shorten the search, with enough blocks left for the floor to be near
    while block < 256 and vocab >= 4 * budget * block:
        block *= 2
    if math.gcd(vocab, block) >= 16:
        block = math.gcd(vocab, block)  # spares the copy
    padded = values
    if vocab % block:
        padded = np.pad(values, ((0, 0), (0, -vocab % block)), constant_values=-np.inf)
    blocks = padded.shape[1] // block
    if vocab > _FEW_IN_ROW:  # tokens of a block side by side: read as whole cache lines
        blocked = padded.reshape(rows, blocks, block)
        token_of = (block, 1)  # of a block's number and a place in it
    else:
        blocked = padded.reshape(rows, block, blocks).transpose(0, 2, 1)
        token_of = (1, blocks)
    block_max = _block_max(blocked)  # [rows, blocks]
    each, column = np.arange(rows), block_max.argmax(1)
    peak = column * token_of[0] + blocked[each, column].argmax(1) * token_of[1]  # the likeliest token, [rows]
    likeliest = values[each, peak][:, None]
    log_peak = _log_peak(values, peak)  # [rows, 1]
    block_log_prob = (block_max - likeliest) + log_peak
    block_log_prob[np.isnan(log_peak[:, 0])] = -np.inf  # of rows that are no distribution

    best = np.fmax(log_peak, np.float32(-np.inf)).reshape(batch, depths)  # without the NaN of such rows
    above = np.zeros((batch, depths), np.float32)  # the likeliest prefix before each depth
    np.cumsum(best[:, :-1], 1, out=above[:, 1:])
    reach = above.reshape(rows, 1) + block_log_prob
    floor = np.full((batch, 1), _LOWEST)
    if mode == "tree" and depths * blocks >= budget:
        coarse = reach
        if blocks >= 4 * budget:  # blocks of blocks do for a floor
            together = blocks // (2 * budget)
            coarse = reach[:, : blocks // together * together].reshape(rows, together, -1).max(1)
        floor = np.maximum(floor, _kth_largest(coarse.reshape(batch, -1), budget))
    wanted = floor.repeat(depths, 1)  # [batch, D]
    if keep_chain:
        wanted = np.maximum(above + best, _LOWEST)
        if mode == "tree":
            wanted = np.minimum(wanted, floor)
    wanted, above = wanted.reshape(rows, 1), above.reshape(rows, 1)

    row, column = np.divmod((reach >= wanted).ravel().nonzero()[0], blocks)
    inside = blocked[row, column]  # [n, block]
    log_prob = (inside - likeliest[row]) + log_peak[row]
    which, place = np.divmod((above[row] + log_prob >= wanted[row]).ravel().nonzero()[0], block)
    row, token = row[which], column[which] * token_of[0] + place * token_of[1]
    order = np.lexsort((token, -inside[which, place], row))
    row, token, log_prob = row[order], token[order], log_prob[which, place][order]
    starts = np.searchsorted(row, np.arange(rows + 1))
    most = 1 if mode == "chain" else budget
    if (starts[1:] - starts[:-1] > most).any():
        kept = np.arange(row.size) - starts[row] < most
        row, token, log_prob = row[kept], token[kept], log_prob[kept]
        starts = np.searchsorted(row, np.arange(rows + 1))
    return token, log_prob, starts, floor[:, 0]


def _block_max(blocked: NDArray) -> NDArray:  # [rows, blocks, block] -> [rows, blocks]
    rows, blocks, block = blocked.shape
    if blocks * block > _FEW_IN_ROW:
        return torch.from_numpy(blocked).amax(2).numpy()
    inner = min(block, 16)  # in two steps: NumPy is at its fastest with some 16 values to compare
    halfway = blocked.transpose(0, 2, 1).reshape(rows, inner, -1).max(1)
    return halfway.reshape(rows, -1, blocks).max(1)


def _log_peak(values: NDArray, peak: NDArray) -> NDArray:
    """The log-probability of each row's likeliest token, [rows, 1]; NaN for a row that is no distribution."""
    each = np.arange(len(peak))
    if values.shape[1] <= _FEW_IN_ROW:
        return -np.log(np.exp(values - values[each, peak][:, None]).sum(1, keepdims=True))
    largest = np.empty(len(peak), np.float32)
    for start in range(0, len(peak), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        softmax = torch.softmax(torch.from_numpy(values[some]), 1).numpy()
        largest[some] = softmax[each[: len(softmax)], peak[some]]
    return np.log(largest)[:, None]


def _kth_largest(values: NDArray, k: int) -> NDArray:  # [batch, n] -> [batch, 1]
    if values.shape[1] <= _FEW_IN_ROW:
        return np.partition(values, -k, 1)[:, -k, None]
    return torch.topk(torch.from_numpy(values), k).values[:, -1:].numpy()


def _best_prefixes(log_probs: list[NDArray], budget: int, floor: NDArray) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """The ``budget`` most probable prefixes, best first: depth, rank of the last token, parent's node, logw; each [n].

    The order is by descending logw, then by the tuple of ranks from the root: that in which a best-first heap pops
    them. No log-probability is above 0, so no prefix beats its parent, and the first ``budget`` of that order are a
    tree, whose nodes are numbered in it.

    Depth by depth, every prefix not below ``floor`` is extended by every token that keeps it there; within a depth
    prefixes stay in the order of their tuples. The floor rises to the budget-th best so far. Of the prefixes of a depth
    that equal the floor only the first ``budget`` can be in the tree, and of their extensions none that another
    prefix has: these come later still.

    Args:
        log_probs: per depth the log-probabilities of its tokens, best first.
        floor: a bound, from below, on the budget-th best.
    """
    level = np.zeros(1, np.float32)  # logw of the prefixes that are extended next
    level_at = np.full(1, -1)  # where they stand in the lists below, counted through; -1 is the root
    logws: list[NDArray] = []
    ranks: list[NDArray] = []
    parents: list[NDArray] = []
    total, enough = 0, 2 * budget
    for log_prob in log_probs:
        if level.size * log_prob.size > 4096:  # cut the table before it is made
            extended = level + log_prob[0] >= floor
            level, level_at = level[extended], level_at[extended]
            if level.size:
                log_prob = log_prob[level.max() + log_prob >= floor]
        sums = level[:, None] + log_prob  # [prefixes, tokens]
        parent, rank = np.nonzero(sums >= floor)
        if parent.size == 0:
            break
        level = sums[parent, rank]
        logws.append(level)
        ranks.append(rank)
        parents.append(level_at[parent])
        level_at = np.arange(total, total + level.size)
        total += level.size
        if total > enough:  # not at every depth: a few prefixes more cost less than to find the floor
            enough = total + budget
            floor = np.partition(np.concatenate(logws), -budget)[-budget]
            reached = level >= floor
            if np.count_nonzero(reached) > 2 * budget:
                reached = (level > floor) | ((level == floor) & (np.cumsum(level == floor) <= budget))
            level, level_at = level[reached], level_at[reached]
    if total == 0:
        none = np.zeros(0, np.int64)
        return none, none, none, np.zeros(0, np.float32)

    logw, rank, parent = np.concatenate(logws), np.concatenate(ranks), np.concatenate(parents)
    depth = np.repeat(np.arange(1, len(logws) + 1), [part.size for part in logws])
    if total > budget:
        floor = np.partition(logw, -budget)[-budget]
    order = (logw >= floor).nonzero()[0]
    order = order[np.argsort(-logw[order], kind="stable")]
    descending = logw[order]
    if (descending[1:] == descending[:-1]).any():
        tuples = _rank_tuples(rank, parent, depth, budget)
        order = order[np.lexsort((*(word[order] for word in tuples), -descending))]
    order = order[:budget]
    node = np.zeros(total + 1, np.int64)  # place in the lists -> node; the root, -1, is node 0
    node[order] = np.arange(1, order.size + 1)
    return depth[order], rank[order], node[parent[order]], logw[order]


def _rank_tuples(rank: NDArray, parent: NDArray, depth: NDArray, budget: int) -> list[NDArray]:
    """Keys for np.lexsort, least significant first, that compare as the tuples of ranks: int64 words of packed ranks.

    Past the end a rank is 0, so a prefix equals its extensions by rank 0. The sort is stable: it stays before them.
    """
    deepest = int(depth[-1])
    tuples = np.zeros((rank.size + 1, deepest), np.int64)  # last row: the root
    for at in range(1, deepest + 1):
        here = (depth == at).nonzero()[0]
        tuples[here] = tuples[parent[here]]
        tuples[here, at - 1] = rank[here]
    bits = budget.bit_length()
    per_word = 63 // bits
    words = []
    for first in range(0, deepest, per_word):
        part = tuples[:-1, first : first + per_word]
        words.append((part << (bits * np.arange(per_word - 1, per_word - 1 - part.shape[1], -1))).sum(1))
    return words[::-1]


def _with_chain(
    depth: NDArray, rank: NDArray, parent: NDArray, logw: NDArray, log_probs: list[NDArray], budget: int
) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """The same tree with the chain of likeliest tokens whole, in place of the least probable nodes."""
    length = next((at for at, log_prob in enumerate(log_probs) if log_prob.size == 0), len(log_probs))
    chain_logw = np.cumsum([log_prob[0] for log_prob in log_probs[:length]], dtype=np.float32)
    chain = [0]  # its nodes that are in the tree
    while True:
        child = ((parent == chain[-1]) & (rank == 0)).nonzero()[0]
        if child.size == 0:
            break
        chain.append(int(child[0]) + 1)
    nodes = np.arange(1, depth.size + 1)
    missing = length - np.searchsorted(chain[1:], nodes, "right")  # of the chain, were the tree cut after this node
    kept = int(np.count_nonzero(nodes + missing <= budget))
    have = int(np.searchsorted(chain[1:], kept, "right"))
    added = np.arange(have, length)  # depth - 1
    joined = np.concatenate(([chain[have]], kept + 1 + np.arange(added.size)))[: added.size]
    return (
        np.concatenate((depth[:kept], added + 1)),
        np.concatenate((rank[:kept], np.zeros_like(added))),
        np.concatenate((parent[:kept], joined)),
        np.concatenate((logw[:kept], chain_logw[have:])),
    )


def _links(parents: NDArray) -> tuple[NDArray, NDArray]:
    """next_token and next_sibling, int32 [batch, N], of nodes whose siblings ascend in index."""
    batch, width = parents.shape
    next_token = np.full(batch * width, -1, np.int32)
    next_sibling = np.full(batch * width, -1, np.int32)
    flat = (parents + np.arange(batch)[:, None] * width).ravel()
    nodes = (parents.ravel() >= 0).nonzero()[0]
    nodes = nodes[np.argsort(flat[nodes], kind="stable")]  # siblings side by side
    same = flat[nodes[1:]] == flat[nodes[:-1]]
    next_sibling[nodes[:-1][same]] = nodes[1:][same] % width
    first = nodes[np.concatenate((np.ones(min(nodes.size, 1), bool), ~same))]
    next_token[flat[first]] = first % width
    return next_token.reshape(batch, width), next_sibling.reshape(batch, width)


def _ancestor_words(parents: NDArray, deepest: int) -> NDArray:
    """Packed ancestor masks, int32 [batch, N, ceil(N/32)], by doubling: each step sees twice as many generations."""
    batch, width = parents.shape
    node = np.arange(width)
    words = np.zeros((batch, width, mask_words(width)), np.uint32)
    words[:, node, node // 32] = np.uint32(1) << (node % 32).astype(np.uint32)
    words = words.reshape(batch * width, -1)
    above = np.where(parents >= 0, parents, node) + np.arange(batch)[:, None] * width
    above = above.ravel()
    generations = 1
    while generations <= deepest:
        words = words | words[above]
        above = above[above]
        generations *= 2
    return words.reshape(batch, width, -1).view(np.int32)


# ---------------------------------------------------------------------------------------------------------------------
# encode_tree
# ---------------------------------------------------------------------------------------------------------------------


def encode_tree(
    tree: DraftTree,
    root_positions: Tensor,  # [batch] int64
    past_lengths: Tensor,  # [batch] int64
    cache_length: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    batch, width = tree.token_ids.shape
    # Written as bits, because NumPy has no bfloat16: 0.0 is 0 in every dtype.
    hidden = torch.tensor(torch.finfo(dtype).min, dtype=dtype).view(_BITS[dtype.itemsize]).numpy()
    mask = np.full((batch, 1, width, cache_length), hidden)
    bits = np.unpackbits(tree.ancestor_mask.numpy().view(np.uint8), axis=-1, count=width, bitorder="little")
    tree_mask = np.where(bits, np.zeros_like(hidden), hidden)  # [batch, N, N]
    position_ids = root_positions.numpy()[:, None] + tree.depths.numpy()  # [batch, N]
    for slot, past in enumerate(past_lengths.tolist()):
        rows = mask[slot, 0]  # [N, cache]
        rows[:, :past] = 0
        rows[:, past : past + width] = tree_mask[slot]
        if window is not None:
            committed = np.arange(past) + (position_ids[slot, 0] - past)  # positions of the cache rows
            keys = np.concatenate((committed, position_ids[slot]))
            rows[:, : past + width][position_ids[slot, :, None] - keys >= window] = hidden
    return torch.from_numpy(position_ids), torch.from_numpy(mask).view(dtype)


# ---------------------------------------------------------------------------------------------------------------------
# verify_tree
# ---------------------------------------------------------------------------------------------------------------------


@np.errstate(invalid="ignore", divide="ignore", over="ignore")  # weights may be 0 or next to it, and are divided by
def verify_tree(
    logits: Tensor,  # [batch, N, vocab]
    tree: DraftTree,
    root_positions: Tensor,  # [batch] int64
    sampling: SamplingTensors,
    *,
    method: str = "coupled",
    token_bitmask: Tensor | None = None,  # [batch, N, ceil(vocab/32)] int32
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    coins: Tensor | None = None,  # [batch, N] float32
    final_coin: Tensor | None = None,  # [batch] float32
    row_rules: Sequence[RowRules | None] | None = None,  # [batch]
) -> Verified:
    batch, _, vocab = logits.shape
    outputs = tree.max_depth + 1
    accepted_nodes = np.full((batch, outputs), -1, np.int32)
    accepted_count = np.zeros(batch, np.int32)
    output_ids = np.full((batch, outputs), -1, np.int32)
    logprobs = np.zeros((batch, outputs), np.float32)
    status = np.zeros(batch, np.int32)

    fields = (tree.token_ids, tree.parents, tree.next_token, tree.next_sibling)
    arrays = [field.numpy() for field in fields]
    temperatures = sampling.temperature.numpy()
    top_k, top_p, min_p = sampling.top_k.tolist(), sampling.top_p.tolist(), sampling.min_p.tolist()
    seeds, node_counts, deepest = sampling.seed.tolist(), tree.node_count.tolist(), tree.depths.numpy().max(1).tolist()
    # Slot after slot: walks share nothing, and a row of the vocabulary is vector enough.
    for slot, root_position in enumerate(root_positions.tolist()):
        greedy = method == "greedy" or not temperatures[slot] >= GREEDY_TEMPERATURE
        rules = row_rules[slot] if row_rules else None
        children = _Children(*(array[slot, : node_counts[slot]] for array in arrays))
        first = root_position + 1  # position of the token that the root predicts
        noise = TokenNoise(seeds[slot], first, deepest[slot] + 1, vocab)
        if method == "target_only":
            seeded_coins = philox.coins(seeds[slot], first + np.arange(outputs)).tolist()
        node = 0
        path: list[int] = []
        tokens: list[int] = []
        for depth in range(outputs):
            row = _rows(logits, slot, node)  # [vocab]
            likeliest = int(row.argmax())  # the first NaN, if there is one
            if not math.isfinite(row[likeliest]):  # or all -inf, or a +inf, which has no softmax either
                status[slot] = 1
                break
            allowed = row if rules is None else _ruled(row, rules, tokens)  # so far they are the path's, root left out
            if token_bitmask is not None:
                allowed = _masked(allowed, token_bitmask[slot, node])
            if greedy:
                token = likeliest if allowed is row else int(allowed.argmax())
                if not math.isfinite(allowed[token]):
                    status[slot] = 2
                    break
                child = children.carrying(node, token)
            else:
                scaled, weights = filtered_weights(allowed, temperatures[slot], top_k[slot], top_p[slot], min_p[slot])
                if not weights.max() > 0:  # NaN where the mask allows nothing that is possible
                    status[slot] = 2
                    break
                if method == "coupled":
                    token = coupled_draw(scaled, weights, noise.at(depth, weights))
                    child = children.carrying(node, token)
                else:
                    coin, final = seeded_coins[depth]
                    coin = coin if coins is None else float(coins[slot, node])
                    final = final if final_coin is None else float(final_coin[slot])
                    candidates = children.of(node) if depth < tree.max_depth else []
                    token, child = target_only_draw(weights, candidates, coin, final, threshold_single, threshold_acc)
            path.append(node)
            tokens.append(token)
            if child < 0:
                break
            node = child
        if path:
            status[slot] = 0  # the round ends before a row that fails: the next one begins there
            accepted_nodes[slot, : len(path)] = path
            accepted_count[slot] = len(path) - 1
            output_ids[slot, : len(path)] = tokens
            logprobs[slot, : len(path)] = _log_probs(logits, slot, path, tokens)
    return Verified(*(torch.from_numpy(a) for a in (accepted_nodes, accepted_count, output_ids, logprobs, status)))


class _Children:
    """The children of a slot's nodes. Padding is cut off before: it is no node, whatever it holds."""

    def __init__(self, token_ids: NDArray, parents: NDArray, next_token: NDArray, next_sibling: NDArray) -> None:
        self.token_ids, self.next_token, self.next_sibling = token_ids, next_token, next_sibling  # [node_count]
        self.edges = (parents.astype(np.int64) << 32) | token_ids  # one number for parent and token

    def carrying(self, node: int, token: int) -> int:
        """The child of ``node`` with ``token``, -1 if there is none."""
        found = (self.edges == (node << 32 | token)).nonzero()[0]
        return int(found[0]) if found.size else -1

    def of(self, node: int) -> list[tuple[int, int]]:
        """(child, token) in sibling order."""
        found = []
        child = int(self.next_token[node])
        while child >= 0:
            found.append((child, int(self.token_ids[child])))
            child = int(self.next_sibling[child])
        return found


def _rows(logits: Tensor, slot: int, nodes: int | list[int]) -> NDArray:
    """One row, float32 [vocab], or a copy of several, [n, vocab]. Nothing else of the logits is ever read."""
    if logits.dtype == torch.float32 and not logits.is_cuda:
        return logits.numpy()[slot, nodes]
    return logits[slot, nodes].float().cpu().numpy()


def _log_probs(logits: Tensor, slot: int, path: list[int], tokens: list[int]) -> NDArray:
    """Log-softmax of the rows in ``path`` at ``tokens``; long rows one at a time, short ones together."""
    at_once = max(1, _FEW_IN_ROW // logits.shape[2])
    found = []
    for start in range(0, len(path), at_once):
        rows = _rows(logits, slot, path[start : start + at_once])
        rows -= rows.max(1, keepdims=True)
        chosen = rows[np.arange(len(rows)), tokens[start : start + at_once]]
        found.append(chosen - np.log(np.exp(rows, out=rows).sum(1)))
    return np.concatenate(found)


def _ruled(row: NDArray, rules: RowRules, path: list[int]) -> NDArray:
    changed = rules.changed(row, path)
    words = None if rules.token_bitmask is None else rules.token_bitmask(path[:])
    if words is None:
        return changed
    check_tensor("what a rule's token_bitmask returned", words, (mask_words(row.size),), torch.int32)
    return _masked(changed, words)


def _masked(row: NDArray, words: Tensor) -> NDArray:
    allowed = np.unpackbits(words.cpu().numpy().view(np.uint8), count=row.size, bitorder="little").view(bool)
    return np.where(allowed, row, np.float32(-np.inf))


# ---------------------------------------------------------------------------------------------------------------------
# commit
# ---------------------------------------------------------------------------------------------------------------------


def commit(caches: Sequence[tuple[Tensor, Tensor]], past_lengths: Tensor, verified: Verified) -> None:
    moves = []
    accepted_nodes = verified.accepted_nodes.numpy()
    for slot, (past, count) in enumerate(zip(past_lengths.tolist(), verified.accepted_count.tolist(), strict=True)):
        nodes = accepted_nodes[slot, : count + 1]
        moved = (nodes > np.arange(count + 1)).nonzero()[0]
        if moved.size:  # nodes ascend along a path: what precedes the first that moves stands in its place
            first = int(moved[0])
            moves.append((slot, slice(past + first, past + count + 1), past + nodes[first:]))
    if not moves:
        return
    for pair in caches:
        for cache in pair:  # [batch, kv_heads, cache, head_dim], or with an axis of layers before
            rows = _bits(cache)
            for slot, to, taken in moves:
                of_slot = rows[..., slot, :, :, :]
                of_slot[..., to, :] = of_slot[..., taken, :]  # the right side is a copy


def commit_paged(
    pools: Sequence[tuple[Tensor, Tensor]],
    block_table: Tensor,  # [batch, blocks]
    past_lengths: Tensor,  # [batch]
    verified: Verified,
) -> None:
    steps = np.arange(1, verified.accepted_nodes.shape[1])
    nodes = verified.accepted_nodes.numpy()[:, 1:]
    moves = (steps <= verified.accepted_count.numpy()[:, None]) & (nodes > steps)  # [batch, D]
    slots, at = moves.nonzero()
    past, table = past_lengths.numpy()[slots], block_table.numpy()
    moved = []
    for pool in (pool for pair in pools for pool in pair):  # all is looked up before anything moves
        source, row = _pool_places(pool, table, slots, past + nodes[slots, at])
        block, to = _pool_places(pool, table, slots, past + steps[at])
        moved.append((_bits(pool), source, row, block, to))
    for rows, source, row, block, to in moved:
        rows[block, :, to] = rows[source, :, row]  # the right side is a copy


def _pool_places(pool: Tensor, table: NDArray, slots: NDArray, tokens: NDArray) -> tuple[NDArray, NDArray]:
    """Block in the pool and row in the block of a token of each of ``slots``."""
    blocks, _, page, _ = pool.shape
    entries = tokens // page
    if (beyond := entries >= table.shape[1]).any():
        slot, needed = slots[beyond][0], entries[beyond][0] + 1
        raise ValueError(f"block_table has {table.shape[1]} blocks a slot: slot {slot} needs {needed}")
    ids = table[slots, entries]
    if (outside := (ids < 0) | (ids >= blocks)).any():
        slot, entry, block = slots[outside][0], entries[outside][0], ids[outside][0]
        raise ValueError(
            f"block_table holds {block} at [{slot}, {entry}], where a row moves: the pool has 0 to {blocks - 1}"
        )
    return ids, tokens % page


def gather_features(features: Tensor, verified: Verified) -> Tensor:
    accepted_nodes = verified.accepted_nodes.numpy()  # [batch, D+1]
    rows = _bits(features)
    gathered = np.zeros((*accepted_nodes.shape, rows.shape[2]), rows.dtype)
    for slot, nodes in enumerate(accepted_nodes):
        nodes = nodes[nodes >= 0]
        gathered[slot, : nodes.size] = rows[slot, nodes]
    return torch.from_numpy(gathered).view(features.dtype)


def _bits(tensor: Tensor) -> NDArray:
    """The tensor's own memory, to move values in. NumPy has no bfloat16, so these are shown as integers."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
