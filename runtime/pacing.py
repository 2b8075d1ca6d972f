"""How many nodes of a tree a round verifies, and whether it drafts at all.

A tree of b nodes is the beginning of every larger one, and the sum of its nodes' probabilities under the draft is the
number of draft tokens to expect from it (arXiv 2604.12989, proposition 1). So with a tree at hand, and the time of
rounds of each size, the size that gives the most tokens a second can be picked. And where the drafts of late gave fewer
tokens a second than rounds without one, those take their place for a while.

What rounds take is measured with one sequence to begin with. In a batch it is learned from the rounds that run, for
each number of sequences by itself: their passes, and still more their drafts, cost more than rows of one sequence do.

The text is the same for every tree, so none of this touches it.
"""

import math
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

_MEMORY = 0.7  # weight of what was known against the newest draft's tokens
_HOPE_MEMORY = 0.98  # the same for what a new request may hope for
_FORGETTING = 1.02  # so much longer may a round take than the fastest before it and count as the fastest
_TRIALS = 3  # rounds without a draft that tell what they take
_ROUNDS_OF_A_TRIAL = 50  # rounds with a draft, after which there is another one
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


class RoundCosts:
    """What rounds of any number of sequences take, in seconds. Of one sequence it is what was ``measured``. Of more it
    is learned, for each number of sequences, from the rounds that run: what a draft takes, and what a pass takes in
    proportion to the measured pass of as many rows, with a draft before it and without."""

    def __init__(self, measured: RoundSeconds):
        self._measured = measured
        self._draft = {1: _Fastest(measured.draft)}
        self._drafted = {1: _Fastest(1.0)}
        self._undrafted = {1: _Fastest(1.0)}
        self._since_undrafted: dict[int, int] = {}  # rounds with a draft
        self._known_passes: dict[int, np.ndarray] = {}  # by the number of sequences

    def draft(self, batch: int) -> float:
        """A draft and its tree."""
        nearest = _nearest(self._draft, batch)
        return self._draft[nearest].value * batch / nearest  # each sequence has a block of its own

    def drafted(self, batch: int, nodes: int) -> np.ndarray:
        """The rest of rounds that verify trees of 0, 1, ... ``nodes`` draft nodes, [nodes + 1]."""
        ratio = self._drafted[_nearest(self._drafted, batch)].value
        return ratio * self._passes(batch, nodes)

    def undrafted(self, batch: int) -> float:
        """A round without a draft."""
        ratio = self._undrafted[_nearest(self._undrafted, batch)].value
        return ratio * self._passes(batch, 0)[0]

    def learn_drafted(self, batch: int, nodes: int, draft: float, rest: float) -> None:
        """Take in what a round of several sequences took: its ``draft`` and the ``rest``."""
        if batch > 1:
            self._draft.setdefault(batch, _Fastest()).add(draft)
            self._drafted.setdefault(batch, _Fastest()).add(rest / self._passes(batch, nodes)[-1])
            self._since_undrafted[batch] = self._since_undrafted.get(batch, 0) + 1

    def learn_undrafted(self, batch: int, seconds: float) -> None:
        """Take in what a round of several sequences without a draft took."""
        if batch > 1:
            self._undrafted.setdefault(batch, _Fastest()).add(seconds / self._passes(batch, 0)[0])
            self._since_undrafted[batch] = 0

    def needs_undrafted(self, batch: int) -> bool:
        """Whether what ``undrafted`` says is a guess, or long ago. Such a round is a cheap trial: it emits a token of
        each sequence, as every round does."""
        if batch < 2:
            return False
        known = self._undrafted.get(batch)
        return known is None or known.count < _TRIALS or self._since_undrafted[batch] >= _ROUNDS_OF_A_TRIAL

    def _passes(self, batch: int, nodes: int) -> np.ndarray:
        """The measured passes over trees of 0, 1, ... ``nodes`` draft nodes, [nodes + 1]."""
        known = self._known_passes.get(batch)
        if known is None or known.size <= nodes:
            known = self._known_passes[batch] = self._measured.undrafted(batch * np.arange(1, nodes + 2))
        return known[: nodes + 1]


class _Fastest:
    """The shortest of some times, of which older ones count less: beside other programs some rounds take ten times as
    long as others, and that says nothing about them."""

    def __init__(self, value: float = math.inf):
        self.value, self.count = value, 0

    def add(self, value: float) -> None:
        self.value, self.count = min(value, self.value * _FORGETTING), self.count + 1


def _nearest(known: dict[int, _Fastest], batch: int) -> int:
    return min(known, key=lambda size: (abs(size - batch), size))


class CostAwarePacing:
    """Decides before each round of a batch, from what rounds take and what its drafts have given.

    Args:
        costs: what rounds take; it learns from the rounds that run.
        slots: the most sequences of a batch.
        max_depth: D, the draft depths.
    """

    def __init__(self, costs: RoundCosts, slots: int, max_depth: int):
        self._costs = costs
        self._longest_pause = max_depth
        self._hope = (max_depth + 1) / 2  # tokens that a new request's draft may give: what drafts gave of late
        self._tokens = np.full(slots, self._hope)  # running mean of what a drafted round gave, for each slot
        self._batch = 0  # sequences
        self._pause = 0  # rounds without a draft after the last one
        self._left = 0  # of them, yet to come
        self._drafts = True
        self._began = self._drafted = 0.0  # when the round began, and when its tree was there

    def drafts(self, *, forced: bool) -> bool:
        """Whether the round that begins now has a draft."""
        self._began = time.perf_counter()
        self._drafts = forced or (self._left == 0 and not self._costs.needs_undrafted(self._batch))
        return self._drafts

    def nodes(self, tree: DraftTree) -> int:
        """How many draft nodes of ``tree`` to verify. Slots share a pass, so it is the same for all of them."""
        self._drafted = time.perf_counter()
        probabilities = np.exp(tree.node_logws.numpy())  # [batch, N]; 1 for the root, 0 for padding
        tokens = np.cumsum(probabilities.sum(0))  # that the batch is to expect, [N]
        batch = len(probabilities)
        seconds = self._costs.draft(batch) + self._costs.drafted(batch, tokens.size - 1)
        return int(np.argmax(tokens / seconds))

    def learn(self, verified: Verified, nodes: int) -> None:
        """Take in the round that ends now; ``nodes`` is the number of draft nodes it verified."""
        now, batch, costs = time.perf_counter(), len(verified.accepted_count), self._costs
        if not self._drafts:
            costs.learn_undrafted(batch, now - self._began)
            self._left = max(self._left - 1, 0)
            return
        costs.learn_drafted(batch, nodes, self._drafted - self._began, now - self._drafted)
        tokens, given = self._tokens[:batch], verified.accepted_count.numpy() + 1  # [batch]
        tokens += (1 - _MEMORY) * (given - tokens)
        self._hope += (1 - _HOPE_MEMORY) * (float(given.mean()) - self._hope)
        seconds = costs.draft(batch) + costs.drafted(batch, nodes)[-1]
        pays = tokens.sum() / seconds >= batch / costs.undrafted(batch)
        self._pause = 0 if pays else min(2 * self._pause or 1, self._longest_pause)
        self._left = self._pause

    def add(self, slot: int) -> None:
        """A new request has come into ``slot``, the one behind the batch."""
        self._batch += 1
        self._tokens[slot] = self._hope
        self._pause = self._left = 0

    def clear(self) -> None:
        """A batch begins."""
        self._batch = self._pause = self._left = 0

    def remove(self, slot: int, last: int) -> None:
        """The request in ``slot`` has left, and the one in slot ``last`` has taken its place."""
        self._batch -= 1
        self._tokens[slot] = self._tokens[last]


@dataclass(frozen=True)
class _Always:
    """Drafts in every round and verifies so many nodes."""

    count: int

    def drafts(self, *, forced: bool) -> bool:
        return True

    def nodes(self, tree: DraftTree) -> int:
        return self.count


def measure_rounds(engine: Engine, batch: Batch, request: Request, budget: int) -> RoundSeconds:
    """Time rounds of one slot, with the settings of ``request`` and trees of ``budget`` nodes or fewer. The engine
    forgets all sequences; ``batch`` is empty before and after.

    Each size is run at least once, and again while there is time left; the fastest run counts. ``budget`` is 1 or more.
    """
    draft = engine.manifest.draft
    assert draft is not None
    engine.reset(1)
    features = torch.zeros(draft.max_depth // 2, engine.manifest.feature_width, dtype=engine.dtype)
    batch.add(request, 0, _MEASURED_PAST, features)

    def timed(nodes: int | None) -> float:
        batch.past[0], batch.root_token_ids[0] = _MEASURED_PAST, 0
        batch.feature_counts[0] = draft.max_depth // 2
        start = time.perf_counter()
        if nodes is None:
            decode_round(engine, batch, "ar", budget)
        else:
            decode_round(engine, batch, "ddtree", budget, _Always(nodes))
        return time.perf_counter() - start

    # Beyond the last two sizes time is taken to be linear, so they must not be close.
    rows = [*(size for size in _SIZES if 4 * size <= 3 * (budget + 1)), budget + 1]
    kinds = [None, *(size - 1 for size in rows)]
    fastest = dict.fromkeys(kinds, float("inf"))
    start = time.perf_counter()
    with torch.inference_mode():
        while True:
            for kind in kinds:
                fastest[kind] = min(fastest[kind], timed(kind))
            if time.perf_counter() - start > _MEASURING_SECONDS:
                break
    batch.clear()
    seconds = np.array([fastest[size - 1] for size in rows])
    seconds = np.minimum.accumulate(seconds[::-1])[::-1]  # no round takes longer than a larger one
    cost = max(seconds[0] - fastest[None], 0.0)
    return RoundSeconds(cost, rows, (seconds - cost).tolist())
