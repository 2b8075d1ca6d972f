"""How many nodes of a tree a round verifies, and whether it drafts at all.

A tree of b nodes is the beginning of every larger one, and the sum of its nodes' probabilities under the draft is the
number of draft tokens to expect from it (arXiv 2604.12989, proposition 1). So with a tree at hand, and the time of
rounds of each size, the size that gives the most tokens a second can be picked. And where the drafts of late gave fewer
tokens a second than rounds without one, those take their place for a while.

The text is the same for every tree, so none of this touches it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ddtree.plugins.tree import DraftTree, Verified
from ddtree.runtime.batch import Batch
from ddtree.runtime.engine import Engine
from ddtree.runtime.request import Request
from ddtree.runtime.round import decode_round
from ddtree.runtime.sampling_params import SamplingParams

_MEMORY = 0.7  # weight of what was known against the newest draft's tokens
_SIZES = (1, 8, 16, 32)  # rows that rounds are timed with
_MEASURING_SECONDS = 0.1
_MEASURED_PAST = 64  # tokens before a timed round


@dataclass(frozen=True)
class RoundSeconds:
    """What a round takes: ``draft`` seconds for the draft and the tree, if there is one, and for everything else the
    ``seconds`` of the number of rows in the target's pass. Between and beyond ``rows``, at least two and ascending,
    time is linear."""

    draft: float
    rows: Sequence[int]
    seconds: Sequence[float]

    def undrafted(self, rows: np.ndarray) -> np.ndarray:
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        return np.interp(rows, self.rows, self.seconds) + np.maximum(rows - self.rows[-1], 0) * slope


class CostAwarePacing:
    """Decides before each round of a batch, from what rounds take and what its drafts have given.

    Args:
        cost: what rounds take.
        slots: the most sequences of the batch.
        max_depth: D, the draft depths.
    """

    def __init__(self, cost: RoundSeconds, slots: int, max_depth: int):
        self._cost = cost
        self._longest_pause = max_depth
        self._hope = (max_depth + 1) / 2  # tokens that a new request's draft may give
        self._tokens = np.full(slots, self._hope)  # running mean of what a drafted round gave, for each slot
        self._pause = 0  # rounds without a draft after the last one
        self._left = 0  # of them, yet to come
        self._drafts = True

    def drafts(self, *, forced: bool) -> bool:
        """Whether the next round begins with a draft."""
        self._drafts = forced or self._left == 0
        return self._drafts

    def nodes(self, tree: DraftTree) -> int:
        """How many draft nodes of ``tree`` to verify. Slots share a pass, so it is the same for all of them."""
        probabilities = torch.exp(tree.node_logws).numpy()  # [batch, N]; 1 for the root, 0 for padding
        tokens = np.cumsum(probabilities.sum(0))  # that the batch is to expect, [N]
        rows = np.arange(1, tokens.size + 1) * len(probabilities)
        return int(np.argmax(tokens / (self._cost.draft + self._cost.undrafted(rows))))

    def learn(self, verified: Verified, nodes: int) -> None:
        """Take in a round's outcome; ``nodes`` is the number of draft nodes it verified."""
        if not self._drafts:
            self._left -= 1
            return
        batch = len(verified.accepted_count)
        tokens = self._tokens[:batch]
        tokens += (1 - _MEMORY) * (verified.accepted_count.numpy() + 1 - tokens)
        drafted, undrafted = self._cost.undrafted(np.array([batch * (nodes + 1), batch]))
        pays = tokens.sum() / (self._cost.draft + drafted) >= batch / undrafted
        self._pause = 0 if pays else min(2 * self._pause or 1, self._longest_pause)
        self._left = self._pause

    def add(self, slot: int) -> None:
        """A new request has come into ``slot``."""
        self._tokens[slot] = self._hope
        self._pause = self._left = 0

    def remove(self, slot: int, last: int) -> None:
        """The request in ``slot`` has left, and the one in slot ``last`` has taken its place."""
        self._tokens[slot] = self._tokens[last]


@dataclass(frozen=True)
class _Always:
    """Drafts in every round and verifies so many nodes."""

    count: int

    def drafts(self, *, forced: bool) -> bool:
        return True

    def nodes(self, tree: DraftTree) -> int:
        return self.count


def measure_rounds(engine: Engine, budget: int) -> RoundSeconds:
    """Time rounds of one slot with trees of ``budget`` nodes or fewer. The engine forgets all sequences.

    Each size is run at least once, and again while there is time left; the fastest run counts. ``budget`` is 1 or more.
    """
    draft = engine.manifest.draft
    assert draft is not None
    engine.reset(1)
    batch = Batch(1, draft.max_depth + 1, engine.manifest.feature_width, engine.dtype)
    batch.add(Request(0, None, [0], SamplingParams(), 0, frozenset(), frozenset()))

    def timed(nodes: int | None) -> float:
        batch.past[0], batch.root_token_ids[0] = _MEASURED_PAST, 0
        batch.feature_counts[0] = draft.max_depth // 2
        start = time.perf_counter()
        if nodes is None:
            decode_round(engine, batch, "ar", budget)
        else:
            decode_round(engine, batch, "ddtree", budget, _Always(nodes))
        return time.perf_counter() - start

    rows = sorted({min(size, budget + 1) for size in _SIZES} | {budget + 1})
    kinds = [None, *(size - 1 for size in rows)]
    fastest = dict.fromkeys(kinds, float("inf"))
    start = time.perf_counter()
    with torch.inference_mode():
        while True:
            for kind in kinds:
                fastest[kind] = min(fastest[kind], timed(kind))
            if time.perf_counter() - start > _MEASURING_SECONDS:
                break
    seconds = np.array([fastest[size - 1] for size in rows])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # no round takes longer than a larger one
    cost = max(seconds[0] - fastest[None], 0.0)
    return RoundSeconds(cost, rows, (seconds - cost).tolist())
