"""What the tree operations mean, and how a CPU runs them: the specification that every kernel is compared with.

torch reads the vocabulary; NumPy does the rest, on the small arrays that are left, because a call of it costs a fifth
of a torch operation's and a round on a CPU is made of many small ones. Arguments are checked in ``ops``, not here.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from ddtree.plugins import philox
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified
from numpy.typing import NDArray
from torch import Tensor

# Below this temperature a slot is decoded greedily.
GREEDY_TEMPERATURE = 1e-5

# ---------------------------------------------------------------------------------------------------------------------
# build_tree
# ---------------------------------------------------------------------------------------------------------------------


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
    logits = draft_logits.float()
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
        wanted = 1 if mode == "chain" else budget
        candidates = _candidates(logits, wanted, budget)
        for slot in range(batch):
            tokens = candidates[slot * max_depth : (slot + 1) * max_depth]
            log_probs = [lp for _, lp in tokens]
            depth, rank, parent, logw = _best_prefixes(log_probs, budget)
            if keep_chain and mode == "tree" and budget >= max_depth:
                depth, rank, parent, logw = _with_chain(depth, rank, parent, logw, log_probs, budget)
            count = 1 + depth.size
            offsets = np.cumsum([0] + [ids.size for ids, _ in tokens])
            token_ids[slot, 1:count] = np.concatenate([ids for ids, _ in tokens])[offsets[depth - 1] + rank]
            parents[slot, 1:count] = parent
            depths[slot, 1:count] = depth
            node_logws[slot, 1:count] = logw
            node_count[slot] = count
    if target_ids is not None:
        token_ids[:, 1:] = np.where(depths[:, 1:] > 0, target_ids[token_ids[:, 1:]], 0)

    next_token, next_sibling = _links(parents)
    return DraftTree(
        token_ids=torch.from_numpy(token_ids),
        parents=torch.from_numpy(parents),
        depths=torch.from_numpy(depths),
        node_logws=torch.from_numpy(node_logws),
        node_count=torch.from_numpy(node_count),
        next_token=torch.from_numpy(next_token),
        next_sibling=torch.from_numpy(next_sibling),
        ancestor_mask=torch.from_numpy(_ancestor_words(parents, max_depth)),
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


def _candidates(logits: Tensor, wanted: int, budget: int) -> list[tuple[NDArray, NDArray]]:
    """For each of the batch * D rows, the tokens that can be in a tree: (ids, log-probabilities), best first.

    At most ``wanted`` a row, ties by the lower id. A row that is no distribution (NaN, +inf, nothing finite) has none,
    so the tree ends above it. Exact, but without sorting the vocabulary: the largest value of each block of tokens is
    the value of some token, so the prefixes made of these alone bound the budget-th best prefix from below, and all
    that falls short of the bound is never looked at.
    """
    batch, depths, vocab = logits.shape
    log_probs = torch.log_softmax(logits, -1)
    block = 64
    while block > 1 and vocab < 2 * wanted * block:
        block //= 2
    if vocab % block:
        log_probs = torch.nn.functional.pad(log_probs, (0, -vocab % block), value=-math.inf)
    blocks = log_probs.view(batch * depths, -1, block)  # [rows, blocks, block]
    block_max = blocks.amax(-1).nan_to_num_(nan=-math.inf)  # [rows, blocks]
    kept = min(wanted, block_max.shape[1])
    top = torch.topk(block_max, kept).values.view(batch, depths, kept).numpy()

    before = np.zeros((batch, depths), np.float32)  # best prefix above each depth
    before[:, 1:] = np.cumsum(top[:, :-1, 0], 1, dtype=np.float32)
    known = (before[..., None] + top).reshape(batch, -1)
    if wanted == 1:
        floor = before + top[..., 0]
    elif known.shape[1] >= budget:
        floor = np.broadcast_to(np.partition(known, -budget, 1)[:, -budget, None], (batch, depths))
    else:
        floor = np.full((batch, depths), -np.inf, np.float32)
    before, floor = before.reshape(-1, 1), floor.reshape(-1, 1)

    def reaches(values: NDArray, row: NDArray | slice) -> NDArray:
        logw = before[row] + values
        return (logw >= floor[row]) & (logw > -np.inf)

    row, chosen = np.nonzero(reaches(block_max.numpy(), slice(None)))
    inside = blocks.numpy()[row, chosen]  # [chosen blocks, block]
    which, place = np.nonzero(reaches(inside, row))
    row, token = row[which], chosen[which] * block + place
    log_prob = inside[which, place]
    order = np.lexsort((-logits.numpy().reshape(batch * depths, vocab)[row, token], row))
    token, log_prob = token[order], log_prob[order]
    ends = np.cumsum(np.bincount(row, minlength=batch * depths)).tolist()
    starts = [0, *ends[:-1]]
    return [
        (token[start : min(end, start + wanted)], log_prob[start : min(end, start + wanted)])
        for start, end in zip(starts, ends, strict=True)
    ]


def _best_prefixes(log_probs: list[NDArray], budget: int) -> tuple[NDArray, NDArray, NDArray, NDArray]:
    """The ``budget`` most probable prefixes, best first: depth, rank of the last token, parent's node index, logw.

    ``log_probs``: per depth the log-probabilities of its ranked tokens, descending. The order is by descending logw,
    then by the tuple of ranks, which is the order in which a best-first heap pops them. A log-probability is never
    above 0, so no prefix beats its parent and the first ``budget`` of that order are a tree.

    Depth by depth, all prefixes not below the budget-th best so far are extended by all ranks; within a depth they
    stay in the order of their rank tuples. Of those that tie with the budget-th best only the first ``budget`` of a
    depth can be wanted, and neither can a descendant of one left out: it comes after them all.
    """
    level = np.zeros(1, np.float32)  # logw of the deepest prefixes kept, in the order of their rank tuples
    level_start = -1  # index of level[0] among all prefixes kept; the root is -1
    logws, ranks, parents, depths = [], [], [], []
    total = 0
    floor = np.float32(-np.inf)
    best = np.zeros(0, np.float32)
    for at, log_prob in enumerate(log_probs, start=1):
        if log_prob.size == 0:
            break
        extended = np.flatnonzero(level + log_prob[0] >= floor)
        if extended.size == 0:
            break
        level = level[extended]
        log_prob = log_prob[level.max() + log_prob >= floor]
        sums = level[:, None] + log_prob  # [parents, ranks]
        reached = sums >= floor
        logw = sums[reached]
        best = np.concatenate((best, logw))
        if best.size > budget:
            best = np.partition(best, -budget)[-budget:]
            floor = best[0]
            reached = sums >= floor
            logw = sums[reached]
        parent, rank = np.nonzero(reached)
        if logw.size > 2 * budget:
            wanted = (logw > floor) | (np.cumsum(logw == floor) <= budget)
            logw, parent, rank = logw[wanted], parent[wanted], rank[wanted]
        logws.append(logw)
        ranks.append(rank)
        parents.append(level_start + extended[parent] if at > 1 else np.full(parent.size, -1))
        depths.append(np.full(logw.size, at))
        level, level_start = logw, total
        total += logw.size
    if total == 0:
        none = np.zeros(0, np.int64)
        return none, none, none, np.zeros(0, np.float32)

    logw, rank, parent, depth = (np.concatenate(parts) for parts in (logws, ranks, parents, depths))
    order = np.argsort(-logw, kind="stable")[: budget + 1]
    if (logw[order[1:]] == logw[order[:-1]]).any():
        order = np.lexsort((*_rank_tuples(rank, parent, depth, budget), -logw))
    order = order[:budget]
    node = np.zeros(total + 1, np.int64)  # prefix -> node index; the root, -1, is node 0
    node[order] = np.arange(1, order.size + 1)
    return depth[order], rank[order], node[parent[order]], logw[order]


def _rank_tuples(rank: NDArray, parent: NDArray, depth: NDArray, budget: int) -> list[NDArray]:
    """Sort keys, least significant first, that compare as the tuples of ranks from root to node: int64 words of ranks
    plus one, 0 past the end, so that a prefix precedes its extensions."""
    deepest = int(depth[-1])
    tuples = np.zeros((rank.size + 1, deepest), np.int64)  # last row: the root
    for at in range(1, deepest + 1):
        here = np.flatnonzero(depth == at)
        tuples[here] = tuples[parent[here]]
        tuples[here, at - 1] = rank[here] + 1
    bits = budget.bit_length()
    per_word = 63 // bits
    words = []
    for first in range(0, deepest, per_word):
        part = tuples[:-1, first : first + per_word]
        words.append((part << (bits * np.arange(per_word - 1, per_word - 1 - part.shape[1], -1))).sum(1))
    return words[::-1]


def _with_chain(depth, rank, parent, logw, log_probs, budget):
    """The tree with the prefixes of best token after best token in it, in place of its least probable nodes."""
    chain = np.cumsum([lp[0] for lp in log_probs if lp.size], dtype=np.float32)
    on_chain = np.zeros(depth.size + 1, bool)  # by node
    on_chain[0] = True
    for node in np.flatnonzero(rank == 0):
        on_chain[node + 1] = on_chain[parent[node]]
    missing = chain.size - np.cumsum(on_chain[1:])
    kept = int(np.count_nonzero(np.arange(1, depth.size + 1) + missing <= budget))
    deepest = int(np.count_nonzero(on_chain[1 : kept + 1]))
    tail = np.arange(deepest + 1, chain.size + 1)
    last = int(np.flatnonzero(on_chain[: kept + 1])[-1])
    return (
        np.concatenate((depth[:kept], tail)),
        np.concatenate((rank[:kept], np.zeros_like(tail))),
        np.concatenate((parent[:kept], np.concatenate(([last], kept + np.arange(1, tail.size + 1)))[: tail.size])),
        np.concatenate((logw[:kept], chain[deepest:])),
    )


def _links(parents: NDArray) -> tuple[NDArray, NDArray]:
    """next_token and next_sibling, int32 [batch, N], of nodes whose siblings ascend in index."""
    batch, width = parents.shape
    next_token = np.full(batch * width, -1, np.int32)
    next_sibling = np.full(batch * width, -1, np.int32)
    flat = (parents + np.arange(batch)[:, None] * width).ravel()
    nodes = np.flatnonzero(parents.ravel() >= 0)
    nodes = nodes[np.argsort(flat[nodes], kind="stable")]  # siblings side by side
    same = flat[nodes[1:]] == flat[nodes[:-1]]
    next_sibling[nodes[:-1][same]] = nodes[1:][same] % width
    first = nodes[np.concatenate((np.ones(min(nodes.size, 1), bool), ~same))]
    next_token[flat[first]] = first % width
    return next_token.reshape(batch, width), next_sibling.reshape(batch, width)


def _ancestor_words(parents: NDArray, max_depth: int) -> NDArray:
    """Packed ancestor masks, int32 [batch, N, ceil(N/32)], by doubling: each step sees twice as many generations."""
    batch, width = parents.shape
    node = np.arange(width)
    words = np.zeros((batch, width, (width + 31) // 32), np.uint32)
    words[:, node, node // 32] = np.uint32(1) << (node % 32).astype(np.uint32)
    words = words.reshape(batch * width, -1)
    above = np.where(parents >= 0, parents, node) + np.arange(batch)[:, None] * width
    above = above.ravel()
    generations = 1
    while generations <= max_depth:
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
    position_ids = root_positions[:, None] + tree.depths  # [batch, N] int64
    mask = torch.full((batch, 1, width, cache_length), torch.finfo(dtype).min, dtype=dtype)
    bits = np.unpackbits(tree.ancestor_mask.numpy().view(np.uint8), axis=-1, bitorder="little")
    hidden = torch.from_numpy(bits[..., :width] == 0)  # [batch, N, N]
    shifts = (root_positions - past_lengths).tolist()
    for slot, past in enumerate(past_lengths.tolist()):
        rows = mask[slot, 0]  # [N, cache]
        rows[:, :past] = 0
        rows[:, past : past + width].masked_fill_(~hidden[slot], 0)
        if window is not None:
            keys = torch.cat((torch.arange(past) + shifts[slot], position_ids[slot]))  # position of each cache row
            outside = position_ids[slot][:, None] - keys >= window  # [N, past + N]
            rows[:, : past + width].masked_fill_(outside, torch.finfo(dtype).min)
    return position_ids, mask


# ---------------------------------------------------------------------------------------------------------------------
# verify_tree
# ---------------------------------------------------------------------------------------------------------------------


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
) -> Verified:
    batch, width, _ = logits.shape
    outputs = tree.max_depth + 1
    accepted_nodes = np.full((batch, outputs), -1, np.int32)
    output_ids = np.full((batch, outputs), -1, np.int32)
    logprobs = np.zeros((batch, outputs), np.float32)
    status = np.zeros(batch, np.int32)

    real = np.arange(width) < tree.node_count.numpy()[:, None]
    parents = np.where(real, tree.parents.numpy(), -1)
    token_ids = tree.token_ids.numpy()
    positions = root_positions.numpy() + 1  # of the token that the root predicts
    temperature, seed = sampling.temperature.numpy(), sampling.seed.numpy()
    greedy = temperature < GREEDY_TEMPERATURE if method != "greedy" else np.ones(batch, bool)
    if method == "target_only":
        walk = _TargetOnly(tree, positions, seed, threshold_single, threshold_acc, coins, final_coin)

    slots = np.arange(batch)  # the walks that have not ended
    nodes = np.zeros(batch, np.int64)  # where they stand
    for depth in range(outputs):
        rows = _read_rows(logits, slots, nodes)  # [walks, vocab]
        largest = rows.max(1)
        # +inf has no softmax either.
        broken = ~np.isfinite(largest)
        if broken.any():
            status[slots[broken]] = 1
            slots, nodes, rows, largest = slots[~broken], nodes[~broken], rows[~broken], largest[~broken]
        log_total = np.log(np.exp(rows - largest[:, None]).sum(1))
        allowed = rows
        if token_bitmask is not None:
            allowed = np.where(_allowed(token_bitmask, slots, nodes, rows.shape[1]), rows, -np.inf)
            empty = allowed.max(1) == -np.inf
            if empty.any():
                status[slots[empty]] = 2
                slots, nodes, rows, allowed = slots[~empty], nodes[~empty], rows[~empty], allowed[~empty]
                largest, log_total = largest[~empty], log_total[~empty]
        if slots.size == 0:
            break
        accepted_nodes[slots, depth] = nodes

        if method == "target_only":
            weights = np.zeros_like(allowed)
            for index in range(slots.size):
                if greedy[slots[index]]:
                    weights[index, allowed[index].argmax()] = 1
                else:
                    weights[index] = _filtered(allowed[index : index + 1], sampling, slots[index : index + 1])[1][0]
            token, child = walk.step(weights, slots, nodes, depth)
        else:
            token = allowed.argmax(1)
            drawn = np.flatnonzero(~greedy[slots])
            if drawn.size:
                scaled, weights = _filtered(allowed[drawn], sampling, slots[drawn])
                at = slots[drawn]
                token[drawn] = _draw(scaled, weights, seed[at], positions[at] + depth)
            carries = (parents[slots] == nodes[:, None]) & (token_ids[slots] == token[:, None])
            child = carries.argmax(1)
            child = np.where(carries[np.arange(slots.size), child], child, -1)
        output_ids[slots, depth] = token
        logprobs[slots, depth] = rows[np.arange(slots.size), token] - largest - log_total
        goes_on = child >= 0
        slots, nodes = slots[goes_on], child[goes_on]
        if slots.size == 0:
            break

    failed = status != 0
    accepted_nodes[failed] = -1
    output_ids[failed] = -1
    logprobs[failed] = 0
    accepted_count = np.maximum((accepted_nodes >= 0).sum(1, dtype=np.int32) - 1, 0)
    return Verified(*(torch.from_numpy(a) for a in (accepted_nodes, accepted_count, output_ids, logprobs, status)))


def _read_rows(logits: Tensor, slots: NDArray, nodes: NDArray) -> NDArray:
    """Rows of the walks, float32 [walks, vocab]; nothing else of the logits is ever touched."""
    if slots.size == 1:
        return logits[int(slots[0]), int(nodes[0])].float().numpy()[None]
    return logits[torch.from_numpy(slots), torch.from_numpy(nodes)].float().numpy()


def _allowed(token_bitmask: Tensor, slots: NDArray, nodes: NDArray, vocab: int) -> NDArray:
    words = token_bitmask.numpy()[slots, nodes]  # [walks, ceil(vocab/32)]
    return np.unpackbits(words.view(np.uint8), axis=1, count=vocab, bitorder="little").view(bool)


def _filtered(allowed: NDArray, sampling: SamplingTensors, slots: NDArray) -> tuple[NDArray, NDArray]:
    """Logits over temperature [walks, vocab], and the weights of what temperature, top_k, top_p and min_p keep: the
    probability over the largest one, 0 where filtered out."""
    scaled = allowed / sampling.temperature.numpy()[slots, None]
    weights = np.exp(scaled - scaled.max(1, keepdims=True))
    vocab = scaled.shape[1]
    top_k, top_p, min_p = (t.numpy()[slots] for t in (sampling.top_k, sampling.top_p, sampling.min_p))
    top_k = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    for row in np.flatnonzero((top_k < vocab) | (top_p < 1)):
        _keep_top(scaled[row], weights[row], int(top_k[row]), float(top_p[row]))
    for row in np.flatnonzero(min_p > 0):
        weights[row, weights[row] < min_p[row]] = 0
    return scaled, weights


def _keep_top(scaled: NDArray, weights: NDArray, top_k: int, top_p: float) -> None:
    """Zeroes ``weights`` [vocab] outside top_k and, of what that leaves, outside top_p."""
    vocab = scaled.size
    width = top_k if top_k < vocab else min(64, vocab)
    while True:
        # Values only: the order of equal ones does not matter here.
        values = torch.topk(torch.from_numpy(scaled), width).values.numpy()
        mass = np.cumsum(np.exp(values - values[0]), dtype=np.float64)
        total = mass[-1] if width == top_k else weights.sum(dtype=np.float64)
        # A mass that equals top_p but for rounding has reached it.
        short = int(np.count_nonzero(mass < top_p * total * (1 - 1e-6)))
        count = min(short + 1, width) if top_p < 1 else width
        if short < width or width == top_k:
            break
        width = min(8 * width, vocab)
    cut = values[count - 1]
    weights[scaled < cut] = 0
    tied = np.flatnonzero(scaled == cut)
    weights[tied[count - int(np.count_nonzero(values[:count] > cut)) :]] = 0


# Gumbel noise of a 32-bit uniform lies in [-2.82, 22.88]: a token whose weight (probability over the largest) is below
# exp(-2.82 - 22.88) loses against the likeliest token whatever their noise.
_HOPELESS = np.float32(math.exp(-2.82 - 22.88))


def _draw(scaled: NDArray, weights: NDArray, seeds: NDArray, positions: NDArray) -> NDArray:
    """The coupled draw: the argmax over tokens of weight > 0 of scaled + Gumbel noise, lowest id on ties.

    With weight w and E = -log1p(-u) the key's order is that of w / E. As u <= E, a token with u / w above the E / w of
    any one token cannot win: that leaves the logarithms of a few tokens to take.
    """
    walks, vocab = weights.shape
    quads = -(-vocab // 4)
    hopeful = np.zeros((walks, quads * 4), bool)
    np.greater(weights, _HOPELESS, out=hopeful[:, :vocab])
    walk, group = np.nonzero(hopeful.reshape(walks, quads, 4).any(2))
    uniforms = np.ones((walks, quads, 4), np.float32)
    uniforms[walk, group] = philox.token_uniforms(seeds[walk], positions[walk], group)
    uniforms = uniforms.reshape(walks, -1)[:, :vocab]
    with np.errstate(divide="ignore"):
        ratio = uniforms / weights
    each = np.arange(walks)
    some = ratio.argmin(1)
    bound = -np.log1p(-uniforms[each, some].astype(np.float64)) / weights[each, some]
    tokens = np.empty(walks, np.int64)
    for row in range(walks):
        near = np.flatnonzero(ratio[row] <= bound[row] * (1 + 1e-5))
        tokens[row] = near[np.argmax(scaled[row, near] + philox.gumbel(uniforms[row, near]))]
    return tokens


class _TargetOnly:
    """The walk of SGLang's tree_speculative_sampling_target_only, one coin per visited node.

    Unlike there a token of probability 0 is never accepted, and a coin is never 0 or 1.
    """

    def __init__(self, tree, positions, seed, threshold_single, threshold_acc, coins, final_coin):
        self.next_token, self.next_sibling = tree.next_token.numpy(), tree.next_sibling.numpy()
        self.token_ids = tree.token_ids.numpy()
        self.positions, self.seed = positions, seed
        self.threshold_single, self.threshold_acc = threshold_single, max(threshold_acc, 1e-9)
        self.coins = None if coins is None else coins.numpy()
        self.final_coin = None if final_coin is None else final_coin.numpy()

    def step(self, weights, slots, nodes, depth):
        drawn = philox.coins(self.seed[slots], self.positions[slots] + depth)
        coin = drawn[:, 0] if self.coins is None else self.coins[slots, nodes]
        final = drawn[:, 1] if self.final_coin is None else self.final_coin[slots]
        coin, final = (np.clip(c, np.float32(2.0**-33), np.float32(1 - 2.0**-24)) for c in (coin, final))
        total = weights.sum(1, dtype=np.float64)
        residual = weights.copy()
        each = np.arange(slots.size)
        accumulated = np.zeros(slots.size)
        child = self.next_token[slots, nodes].astype(np.int64)
        pending = child >= 0
        while pending.any():
            token = self.token_ids[slots, child]
            p = np.where(pending, weights[each, np.where(pending, token, 0)] / total, 0)
            accumulated += p
            accept = pending & (p > 0) & ((coin <= accumulated / self.threshold_acc) | (p >= self.threshold_single))
            pending &= ~accept
            residual[each[pending], token[pending]] = 0
            child = np.where(pending, self.next_sibling[slots, child], child)
            pending &= child >= 0
        chosen = np.where(child >= 0, self.token_ids[slots, child], -1).astype(np.int64)
        for row in np.flatnonzero(child < 0):
            left = residual[row] if residual[row].any() else weights[row]
            mass = np.cumsum(left, dtype=np.float64)
            chosen[row] = min(np.searchsorted(mass, final[row] * mass[-1], "right"), np.flatnonzero(left)[-1])
        return chosen, child


# ---------------------------------------------------------------------------------------------------------------------
# commit
# ---------------------------------------------------------------------------------------------------------------------


def commit(caches: Sequence[tuple[Tensor, Tensor]], past_lengths: Tensor, verified: Verified) -> None:
    moves = []
    accepted = verified.accepted_nodes.numpy()
    for slot, (past, count) in enumerate(zip(past_lengths.tolist(), verified.accepted_count.tolist(), strict=True)):
        nodes = accepted[slot, : count + 1]
        moved = np.flatnonzero(nodes != np.arange(count + 1))
        if count and moved.size:
            first = int(moved[0])  # nodes ascend along a path, so the rows before it are in place already
            moves.append((slot, slice(past + first, past + count + 1), past + nodes[first:]))
    if not moves:
        return
    for pair in caches:
        for cache in pair:  # [slots, kv_heads, cache, head_dim]
            rows = (cache.view(torch.int16) if cache.dtype == torch.bfloat16 else cache).numpy()
            for slot, destination, source in moves:
                rows[slot, :, destination] = rows[slot, :, source]  # the right side is a copy


def gather_features(features: Tensor, verified: Verified) -> Tensor:
    nodes = verified.accepted_nodes.long()  # [batch, D+1]
    slots = torch.arange(nodes.shape[0])[:, None]
    return features[slots, nodes.clamp(min=0)].masked_fill_((nodes < 0)[..., None], 0)
