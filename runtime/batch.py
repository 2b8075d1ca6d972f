"""The sequences that are being decoded together: one row of every tensor per slot, active slots first."""

from collections.abc import Sequence

import torch

from ddtree.plugins.tree import SamplingTensors, Verified
from ddtree.runtime.engine import Engine
from ddtree.runtime.request import Request

_INT32_MAX = 2**31 - 1  # no vocabulary is larger, so a larger top_k filters nothing either


class Batch:
    """State of up to ``max_batch_size`` sequences between two rounds. Slot i of the engine's caches is row i here.

    ``past`` counts the tokens whose KV the target holds, and is the root's position. The drafter lags behind: it gets
    the last ``feature_counts`` tokens' context features at its next pass.

    Tensors are allocated once, on the engine's device, and changed in place: what an engine recorded holds their
    addresses.
    """

    def __init__(self, engine: Engine, max_batch_size: int):
        manifest, device = engine.manifest, engine.device
        feature_rows = manifest.draft.max_depth + 1 if manifest.draft else 0
        features = (max_batch_size, feature_rows, manifest.feature_width)
        self.requests: list[Request] = []
        self._root_token_ids = torch.zeros(max_batch_size, dtype=torch.int32, device=device)
        self._past = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._features = torch.zeros(features, dtype=engine.dtype, device=device)
        self._feature_counts = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._settings = SamplingTensors(
            temperature=torch.zeros(max_batch_size, dtype=torch.float32, device=device),
            top_k=torch.zeros(max_batch_size, dtype=torch.int32, device=device),
            top_p=torch.ones(max_batch_size, dtype=torch.float32, device=device),
            min_p=torch.zeros(max_batch_size, dtype=torch.float32, device=device),
            seed=torch.zeros(max_batch_size, dtype=torch.int64, device=device),
        )
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
            active = slice(len(self))
            self._sampling = SamplingTensors(*(rows[active] for rows in vars(self._settings).values()))
        return self._sampling

    def add(self, request: Request, root_token_id: int, past: int, features: torch.Tensor) -> int:
        """Take a sequence into the next free slot and return the slot.

        Args:
            root_token_id: its last token, which the target has not processed yet.
            past: the number of tokens before it.
            features: [count, layers*hidden], context features of the last of them, which the drafter has not had.
        """
        slot, count = len(self), len(features)
        self._root_token_ids[slot] = root_token_id
        self._past[slot] = past
        self._features[slot] = 0  # the rows behind are padding, and what another request left may be NaN
        self._features[slot, :count] = features
        self._feature_counts[slot] = count
        of_request = vars(sampling_tensors([request], self._past.device))
        for name, rows in vars(self._settings).items():
            rows[slot] = of_request[name][0]
        self.requests.append(request)
        self._sampling = None
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
        state = (self._root_token_ids, self._past, self._features, self._feature_counts)
        for rows in (*state, *vars(self._settings).values()):
            rows[slot] = rows[last]
        self.requests[slot] = self.requests[last]
        self.requests.pop()
        self._sampling = None
        return last

    def clear(self) -> None:
        """Drop all requests."""
        self.requests.clear()
        self._sampling = None


def sampling_tensors(requests: Sequence[Request], device: torch.device) -> SamplingTensors:
    """The settings of these sequences' draws, one a row, on ``device``."""
    params = [request.params for request in requests]

    def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:  # [len(requests)]
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        temperature=tensor([p.temperature for p in params], torch.float32),
        top_k=tensor([min(p.top_k, _INT32_MAX) for p in params], torch.int32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        min_p=tensor([p.min_p for p in params], torch.float32),
        # A seed is a uint64; int64 holds its bits.
        seed=tensor([r.seed - (1 << 64) if r.seed >> 63 else r.seed for r in requests], torch.int64),
    )
