"""What the operations must give, computed another way: scalar Python, float64 where the operations use float32."""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from ddtree.plugins import ops, reference

# ---------------------------------------------------------------------------------------------------------------------
# Trees. A tree is a list of (token, parent node, depth, logw), the root left out.
# ---------------------------------------------------------------------------------------------------------------------


def float32_log_softmax(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return (values - values.max(1, keepdims=True)) + reference._log_peak(values, values.argmax(1))


def ranked_rows(logits: torch.Tensor) -> list[list[tuple[int, np.float32]]]:
    """Per depth of ``logits`` [D, vocab] the (token, log-probability) of positive probability, best first.

    The float32 log-softmax is the operation's own, because the order of float32 sums, ties included, depends on its
    last bit; it has a test of its own against float64.
    """
    log_probs = float32_log_softmax(logits.float().numpy())
    rows = []
    for row, values in zip(logits.float().tolist(), log_probs, strict=True):
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        rows.append([(token, values[token]) for token in order if values[token] > -math.inf])
    return rows


def heap_tree(rows: list[list[tuple[int, np.float32]]], budget: int) -> list[tuple[int, int, int, float]]:
    """The published best-first search: each pop makes a node and pushes its next sibling and its first child."""
    heap: list[tuple[np.float32, tuple[int, ...], int, np.float32]] = []

    def push(ranks: tuple[int, ...], parent: int, parent_logw: np.float32) -> None:
        if len(ranks) <= len(rows) and ranks[-1] < len(rows[len(ranks) - 1]):
            logw = np.float32(parent_logw + rows[len(ranks) - 1][ranks[-1]][1])
            heapq.heappush(heap, (-logw, ranks, parent, parent_logw))

    nodes: list[tuple[int, int, int, float]] = []
    push((0,), 0, np.float32(0))
    while heap and len(nodes) < budget:
        negative, ranks, parent, parent_logw = heapq.heappop(heap)
        nodes.append((rows[len(ranks) - 1][ranks[-1]][0], parent, len(ranks), float(-negative)))
        push((*ranks[:-1], ranks[-1] + 1), parent, parent_logw)
        push((*ranks, 0), len(nodes), -negative)
    return nodes


def all_prefixes(rows: list[list[tuple[int, np.float32]]], budget: int) -> list[tuple[int, int, int, float]]:
    """Every prefix of the product of the marginals, sorted by (-logw, ranks), cut after ``budget``."""
    prefixes = []
    for depth in range(1, len(rows) + 1):
        for ranks in product(*(range(len(row)) for row in rows[:depth])):
            logw = np.float32(0)
            for at, rank in enumerate(ranks):
                logw = np.float32(logw + rows[at][rank][1])
            prefixes.append((-float(logw), ranks))
    prefixes.sort()
    node = {ranks: at for at, (_, ranks) in enumerate(prefixes, start=1)} | {(): 0}
    return [
        (rows[len(ranks) - 1][ranks[-1]][0], node[ranks[:-1]], len(ranks), -negative)
        for negative, ranks in prefixes[:budget]
    ]


def nodes_of(tree: ops.DraftTree, slot: int = 0) -> list[tuple[int, int, int, float]]:
    count = int(tree.node_count[slot])
    fields = (tree.token_ids, tree.parents, tree.depths, tree.node_logws)
    return list(zip(*(field[slot, 1:count].tolist() for field in fields), strict=True))


def tree_of(token_ids: list[int], parents: list[int], *, max_depth: int, width: int | None = None) -> ops.DraftTree:
    """A tree of one slot from its nodes, siblings in index order, padded to ``width``."""
    count = len(token_ids)
    width = width or count
    depths, next_token, next_sibling = [0] * count, [-1] * count, [-1] * count
    mask = np.eye(width, dtype=bool)
    for node in range(1, count):
        parent = parents[node]
        depths[node] = depths[parent] + 1
        mask[node] |= mask[parent]
        if next_token[parent] < 0:
            next_token[parent] = node
        else:
            elder = next_token[parent]
            while next_sibling[elder] >= 0:
                elder = next_sibling[elder]
            next_sibling[elder] = node
    words = np.packbits(np.pad(mask, ((0, 0), (0, -width % 32))), axis=1, bitorder="little").view(np.int32)

    def padded(values: list[int], filler: int) -> torch.Tensor:
        return torch.tensor([values + [filler] * (width - count)], dtype=torch.int32)

    return ops.DraftTree(
        token_ids=padded(token_ids, 0),
        parents=padded(parents, -1),
        depths=padded(depths, 0),
        node_logws=torch.tensor([[-float(d) for d in depths] + [-math.inf] * (width - count)]),
        node_count=torch.tensor([count], dtype=torch.int32),
        next_token=padded(next_token, -1),
        next_sibling=padded(next_sibling, -1),
        ancestor_mask=torch.from_numpy(words[None].copy()),
        max_depth=max_depth,
    )


def stacked(trees: list[ops.DraftTree]) -> ops.DraftTree:
    """Trees of one slot each, as a batch."""
    names = ("token_ids", "parents", "depths", "node_logws", "node_count", "next_token", "next_sibling")
    return ops.DraftTree(
        **{name: torch.cat([getattr(tree, name) for tree in trees]) for name in (*names, "ancestor_mask")},
        max_depth=trees[0].max_depth,
    )


def vector_logits(entry: dict) -> torch.Tensor:
    """The draft logits of an entry of build_tree.json, [1, D, vocab]; JSON has null for -inf."""
    rows = [[-math.inf if value is None else value for value in row] for row in entry["draft_logits"]]
    return torch.tensor([rows])


def assert_tree_of_vector(tree: ops.DraftTree, entry: dict) -> None:
    """``tree`` is the one that an entry of build_tree.json expects."""
    count = len(entry["parents"])
    assert tree.node_count.tolist() == [count]
    assert tree.token_ids[0, 1:count].tolist() == entry["token_ids"]
    for name in ("parents", "depths", "next_token", "next_sibling"):
        assert getattr(tree, name)[0, :count].tolist() == entry[name], name
    np.testing.assert_allclose(tree.node_logws[0, :count], entry["node_logws"], rtol=0, atol=1e-5)


def sampling(slots: list[dict], **common) -> ops.SamplingTensors:
    """Settings of each slot: keys temperature, top_k, top_p, min_p, seed, what is absent being off."""
    slots = [{**common, **slot} for slot in slots]

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([slot.get(name, default) for slot in slots], dtype=dtype)

    return ops.SamplingTensors(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 0, torch.int64),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Draws
# ---------------------------------------------------------------------------------------------------------------------


def philox(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    """Philox4x32-10 on Python integers."""
    word = list(counter)
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = 0xD2511F53 * word[0], 0xCD9E8D57 * word[2]
        word = [
            second >> 32 ^ word[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ word[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return word


def uniform(word: int) -> float:
    return min(float((np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)), 1 - 2.0**-24)


def gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log1p(-uniform(philox((token // 4, position, 0, 0), seed)[token % 4])))


def ruled_logits(
    logits: list[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    bad_words: Sequence[Sequence[int]] = (),
    min_tokens: int = 0,
    end_token_ids: Sequence[int] = (),
) -> list[float]:
    """The logits after a request's rules, token by token, by counting in the text before them; float32 like theirs."""
    text = [*prompt, *output]
    ruled = []
    for token, logit in enumerate(map(np.float32, logits)):
        logit += np.float32((logit_bias or {}).get(token, 0.0))
        if token in text:
            penalty = np.float32(repetition_penalty)
            logit = logit * penalty if logit < 0 else logit / penalty
        count = list(output).count(token)
        if count > 0:
            logit = logit - np.float32(presence_penalty) - np.float32(frequency_penalty) * np.float32(count)
        completed = any([*text, token][-len(word) :] == list(word) for word in bad_words)
        too_early = token in end_token_ids and len(output) < min_tokens
        ruled.append(-math.inf if completed or too_early else float(logit))
    return ruled


def kept_probabilities(
    logits: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Token -> probability after temperature, top_k, top_p and min_p, in float64. Temperature 0: the argmax."""
    order = sorted((t for t, x in enumerate(logits) if x > -math.inf), key=lambda t: (-logits[t], t))
    if temperature < 1e-5:
        return {order[0]: 1.0}
    weight = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        mass, target = 0.0, top_p * math.fsum(weight[t] for t in order)
        for count, token in enumerate(order, start=1):
            mass += weight[token]
            if mass >= target - 1e-9:
                order = order[:count]
                break
    order = [token for token in order if weight[token] >= min_p]
    total = math.fsum(weight[t] for t in order)
    return {token: weight[token] / total for token in order}


def coupled_draw(logits: list[float], seed: int, position: int, **settings) -> int:
    """The token that autoregressive decoding draws for ``position``."""
    kept = kept_probabilities(logits, **settings)
    if settings["temperature"] < 1e-5:
        return next(iter(kept))
    keys = {t: logits[t] / settings["temperature"] + gumbel(seed, position, t) for t in kept}
    return min(keys, key=lambda t: (-keys[t], t))


def mass_is_near(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether a sum of probabilities lies within 1e-4 of top_p, or a ratio within 1e-4 of min_p."""
    kept = sorted(kept_probabilities(logits, temperature, top_k).values(), reverse=True)
    ratios = np.array(kept) / kept[0]
    near_top_p = 0 < top_p < 1 and (abs(np.cumsum(kept) - top_p) < 1e-4).any()
    near_min_p = min_p > 0 and (abs(ratios - min_p) < 1e-4).any()
    return bool(near_top_p or near_min_p)


def draw_is_near(logits: list[float], seed: int, position: int, **settings) -> bool:
    """Whether the last bit of a sum or of a logarithm may decide ``coupled_draw``."""
    if settings["temperature"] < 1e-5:
        return False
    keys = sorted(
        logits[t] / settings["temperature"] + gumbel(seed, position, t) for t in kept_probabilities(logits, **settings)
    )
    return mass_is_near(logits, **settings) or (len(keys) > 1 and keys[-1] - keys[-2] < 1e-4)


def target_only_walk(
    rows: Callable[[list[int]], list[float]],
    tree: ops.DraftTree,
    coins: list[float],
    final_coin: float,
    **settings: float,
) -> tuple[list[int], list[int], float]:
    """Accepted nodes and emitted tokens of a tree of one slot, and how near the nearest decision was.

    ``rows`` gives the logits after the tokens on the path below the root.
    """
    nodes, tokens, nearest = [0], [], math.inf
    parents, token_ids = tree.parents[0].tolist(), tree.token_ids[0].tolist()
    while True:
        probability = kept_probabilities(rows(tokens), **settings)
        children = [child for child, parent in enumerate(parents) if parent == nodes[-1]]
        mass = 0.0
        for child in children:
            mass += probability.get(token_ids[child], 0.0)
            nearest = min(nearest, abs(coins[nodes[-1]] - mass))
            if token_ids[child] in probability and coins[nodes[-1]] <= mass:
                nodes.append(child)
                tokens.append(token_ids[child])
                break
        else:
            left = {t: p for t, p in sorted(probability.items()) if t not in [token_ids[child] for child in children]}
            at = final_coin * math.fsum(left.values())
            for token, share in left.items():
                at -= share
                nearest = min(nearest, abs(at))
                if at < 0:
                    return nodes, [*tokens, token], nearest
            return nodes, [*tokens, max(left)], 0.0
