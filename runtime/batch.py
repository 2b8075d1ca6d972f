"""The sequences that are being decoded together: one row of every tensor per slot, active slots first."""

import torch

from ddtree.plugins.tree import SamplingTensors, Verified
from ddtree.runtime.request import Request

_INT32_MAX = 2**31 - 1  # no vocabulary is larger, so a larger top_k filters nothing either


class Batch:
    """State of up to ``max_batch_size`` sequences between two rounds. Slot i of the engine's caches is row i here.

    ``past`` counts the tokens whose KV the target holds, and is the root's position. The drafter lags behind: it gets
    the last ``feature_counts`` tokens' context features at its next pass.
    """

    def __init__(self, max_batch_size: int, feature_rows: int, feature_width: int, dtype: torch.dtype):
        self.requests: list[Request] = []
        self._root_token_ids = torch.zeros(max_batch_size, dtype=torch.int32)
        self._past = torch.zeros(max_batch_size, dtype=torch.int64)
        self._features = torch.zeros(max_batch_size, feature_rows, feature_width, dtype=dtype)
        self._feature_counts = torch.zeros(max_batch_size, dtype=torch.int64)
        self._temperature = torch.zeros(max_batch_size, dtype=torch.float32)
        self._top_k = torch.zeros(max_batch_size, dtype=torch.int32)
        self._top_p = torch.ones(max_batch_size, dtype=torch.float32)
        self._min_p = torch.zeros(max_batch_size, dtype=torch.float32)
        self._seed = torch.zeros(max_batch_size, dtype=torch.int64)
        self._sampling: SamplingTensors | None = None  # of the active slots, while they stay the same

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def root_token_ids(self) -> torch.Tensor:  # int32 [batch]
        return self._root_token_ids[: len(self)]

    @property
    def past(self) -> torch.Tensor:  # int64 [batch]
        return self._past[: len(self)]

    @property
    def features(self) -> torch.Tensor:  # [batch, D+1, layers*hidden]
        return self._features[: len(self)]

    @property
    def feature_counts(self) -> torch.Tensor:  # int64 [batch]
        return self._feature_counts[: len(self)]

    @property
    def sampling(self) -> SamplingTensors:
        if self._sampling is None:
            self._sampling = self.sampling_of(slice(len(self)))
        return self._sampling

    def sampling_of(self, slots: slice) -> SamplingTensors:
        return SamplingTensors(
            self._temperature[slots], self._top_k[slots], self._top_p[slots], self._min_p[slots], self._seed[slots]
        )

    def add(self, request: Request) -> int:
        """Take a request into the next free slot and return the slot."""
        slot = len(self)
        self._sampling = None
        self.requests.append(request)
        params = request.params
        self._past[slot] = 0
        self._feature_counts[slot] = 0
        self._temperature[slot] = params.temperature
        self._top_k[slot] = min(params.top_k, _INT32_MAX)
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = request.seed - (1 << 64) if request.seed >> 63 else request.seed  # uint64 bits in an int64
        return slot

    @property
    def features_full(self) -> bool:
        """Whether a sequence has no room for another token's context features."""
        return int(self.feature_counts.max()) == self._features.shape[1]

    def append_features(self, features: torch.Tensor) -> None:
        """Keep the context features of the roots, [batch, 1, layers*hidden], for the drafter's next pass."""
        self.features[torch.arange(len(self)), self.feature_counts] = features[:, 0]

    def advance(self, verified: Verified) -> None:
        """Move past the root and the accepted path; the bonus token is the next root."""
        committed = verified.accepted_count + 1  # int32 [batch]
        self.past.add_(committed)
        self.feature_counts.add_(committed)
        bonus = verified.output_ids.gather(1, verified.accepted_count.long()[:, None])  # [batch, 1]
        self.root_token_ids.copy_(bonus[:, 0])

    def remove(self, slot: int) -> int:
        """Drop the request in ``slot``, move the last one there, and return the slot it came from."""
        last = len(self) - 1
        self._sampling = None
        for rows in (
            self._root_token_ids,
            self._past,
            self._features,
            self._feature_counts,
            self._temperature,
            self._top_k,
            self._top_p,
            self._min_p,
            self._seed,
        ):
            rows[slot] = rows[last]
        self.requests[slot] = self.requests[last]
        self.requests.pop()
        return last
