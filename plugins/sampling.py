"""From a row of logits to a token: temperature, filters and the coupled draw. One row at a time, float32 [vocab]."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from ddtree.plugins import philox

# The noise of a 32-bit uniform lies in [-2.82, 22.88]. A token whose weight (probability over the largest) is below
# this loses against the likeliest token, whatever the noise of the two.
_HOPELESS = np.float32(math.exp(-2.82 - 22.88))
# Uniforms drawn in one go: as many positions ahead as this holds. On short arrays NumPy's cost is that of the calls.
_UNIFORMS_AHEAD = 24576


def filtered_weights(
    logits: NDArray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray, NDArray]:
    """Logits over temperature, less their largest, and the weights: exp of these, 0 for tokens that a filter drops.

    Args:
        logits: -inf where a token is not allowed.
        temperature: above 0.
        top_k: keep exactly this many, the lower id first among equals; 0 = off.
        top_p: then the smallest set that reaches this share of the mass left; 1 = off.
        min_p: then those of at least this share of the largest probability; 0 = off. Above 1 nothing is left.
    """
    vocab = logits.size
    scaled = (logits - logits.max()) / temperature
    weights = np.exp(scaled)
    if not 0 < top_k < vocab:
        top_k = vocab
    if top_k < vocab or top_p < 1:
        weights = np.where(_top(logits, weights, temperature, top_k, top_p), weights, np.float32(0))
    if min_p > 0:
        weights = np.where(weights < np.float32(min_p), np.float32(0), weights)
    return scaled, weights


def _top(logits: NDArray, weights: NDArray, temperature: float, top_k: int, top_p: float) -> NDArray:
    """bool [vocab]: what top_k keeps and, of its mass, top_p."""
    vocab = logits.size
    width = top_k if top_k < vocab else min(64, vocab)
    while True:
        # Only the values are used: topk leaves the order of equal ones open.
        values = torch.topk(torch.from_numpy(logits), width).values.numpy()
        count = width
        if top_p < 1:
            mass = np.cumsum(np.exp((values - values[0]) / temperature), dtype=np.float64)
            total = mass[-1] if width == top_k else weights.sum(dtype=np.float64)
            # A mass that equals top_p but for rounding has reached it.
            count = 1 + int(np.count_nonzero(mass < top_p * total * (1 - 1e-6)))
        if count <= width or width == top_k:
            break
        width = min(8 * width, vocab)
    cut = values[min(count, width) - 1]
    kept = logits > cut
    tied = (logits == cut).nonzero()[0]  # ascending ids
    kept[tied[: min(count, width) - np.count_nonzero(kept)]] = True
    return kept


class TokenNoise:
    """The uniforms of one sequence's tokens at consecutive positions."""

    def __init__(self, seed: int, first_position: int, positions: int, vocab: int) -> None:
        self.seed, self.first_position, self.positions, self.vocab = seed, first_position, positions, vocab
        self.groups = np.arange((vocab + 3) // 4)
        self.ahead = max(1, _UNIFORMS_AHEAD // vocab)
        self.start = 0  # of the positions drawn so far
        self.drawn = np.empty((0, vocab), np.float32)

    def at(self, index: int, weights: NDArray) -> NDArray:
        """Uniforms, float32 [vocab], at position ``first_position + index``; 1 for tokens without hope."""
        if self.ahead == 1:
            hopeful = np.zeros((self.groups.size, 4), bool)
            np.greater(weights, _HOPELESS, out=hopeful.reshape(-1)[: self.vocab])
            groups = hopeful.view(np.uint32).nonzero()[0]  # four flags at once
            uniforms = np.ones((self.groups.size, 4), np.float32)
            uniforms[groups] = philox.token_uniforms(self.seed, np.array([self.first_position + index]), groups)[0]
            return uniforms.reshape(-1)[: self.vocab]
        if index >= self.start + len(self.drawn):
            ahead = np.arange(index, min(index + self.ahead, max(self.positions, index + 1)))
            uniforms = philox.token_uniforms(self.seed, self.first_position + ahead, self.groups)
            self.start, self.drawn = index, uniforms.reshape(ahead.size, -1)[:, : self.vocab]
        return self.drawn[index - self.start]


def coupled_draw(scaled: NDArray, weights: NDArray, uniforms: NDArray) -> int:
    """The argmax over tokens of weight > 0 of ``scaled - log(-log1p(-u))``, the lowest id on ties (Gumbel-max).

    ``scaled`` is the logits over temperature, less a number common to all; ``weights`` is exp(scaled), filtered.
    With weight w and E = -log1p(-u), the largest key is the smallest E / w. As u <= E, no token whose u / w is above
    the E / w of any other can win, so that the logarithms of a few tokens are enough.
    """
    ratio = uniforms / weights
    some = ratio.argmin()
    bound = -math.log1p(-float(uniforms[some])) / float(weights[some])
    near = (ratio <= bound * (1 + 1e-5)).nonzero()[0]
    return int(near[np.argmax(scaled[near] + philox.gumbel(uniforms[near]))])


def target_only_draw(
    weights: NDArray,
    children: list[tuple[int, int]],
    coin: float,
    final_coin: float,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[int, int]:
    """One node of SGLang's tree_speculative_sampling_target_only: (token, accepted child or -1).

    Unlike there, a token of probability 0 is never accepted and a coin is never 0 or 1.

    Args:
        weights: of the tokens that the filters keep, up to a factor.
        children: (node, token) in sibling order.
        coin: accepts the first child whose cumulative probability, over ``threshold_acc``, reaches it.
        final_coin: picks from what the rejected children leave, by cumulative probability.
        threshold_single: a child of at least this probability is accepted whatever the coin.
        threshold_acc: see ``coin``; taken as at least 1e-9.
    """
    lowest, highest = 2.0**-33, 1 - 2.0**-24
    coin, final_coin = min(max(coin, lowest), highest), min(max(final_coin, lowest), highest)
    total = float(weights.sum(dtype=np.float64))
    cumulative = 0.0
    for child, token in children:
        probability = float(weights[token]) / total
        cumulative += probability
        reached = coin <= cumulative / max(threshold_acc, 1e-9) or probability >= threshold_single
        if probability > 0 and reached:
            return token, child
    # Something is left: children that hold all the mass sum, in float64, to more than the largest coin.
    left = weights.copy()
    left[[token for _, token in children]] = 0
    mass = np.cumsum(left, dtype=np.float64)
    picked = int(np.searchsorted(mass, final_coin * mass[-1], "right"))
    return min(picked, int(np.flatnonzero(left)[-1])), -1
