"""What the runtime asks of an engine."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from ddtree.builder import Manifest
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""(key, value) of each layer, [slots, kv_heads, cache, head_dim], or of several layers, [layers, slots, ...]."""

Result = TypeVar("Result")


class DraftInputs(NamedTuple):
    """What the drafter reads in one pass, on the engine's device."""

    features: torch.Tensor  # [batch, ctx, layers*hidden]
    context_position_ids: torch.Tensor  # int64 [batch, ctx]
    block_ids: torch.Tensor  # int64 [batch, block]
    block_position_ids: torch.Tensor  # int64 [batch, block]
    attention_masks: Sequence[torch.Tensor]  # [batch, 1, block, cache]; two where only some layers have a window
    write_index: torch.Tensor  # int64 [batch]


class TargetInputs(NamedTuple):
    """What the target reads in one pass, on the engine's device."""

    input_ids: torch.Tensor  # int32 or int64 [batch, seq]
    position_ids: torch.Tensor  # int64 [batch, seq]
    attention_masks: Sequence[torch.Tensor]  # [batch, 1, seq, cache]; two where only some layers have a window
    write_index: torch.Tensor  # int64 [batch]


class Engine(Protocol):
    """Two models and their KV caches. A slot holds one sequence; it is used by one thread at a time.

    A pass of a prompt runs one slot, a pass of a round the slots [0, batch). What a pass returns is valid until the
    next pass of its kind.

    An ``asynchronous`` engine queues its work on a GPU: a call returns before its results are there, and all that has
    to do with them runs inside ``stream``. Only ``fetch`` waits.
    """

    manifest: Manifest
    dtype: torch.dtype  # of activations, masks and caches
    device: torch.device  # where the tensors are that it takes and gives
    asynchronous: bool
    methods: tuple[str, ...]  # what ``decode_round`` can do with it
    ahead: dict[tuple, DraftTree]  # drafts of the next round, by what they were made for; see ``decode_round``

    def stream(self) -> AbstractContextManager[None]:
        """Where work on the engine's tensors runs in the order in which it is given."""

    def reset(self, slots: int) -> None:
        """Forget everything and make room for so many slots."""

    def reserve_slots(self, slots: int) -> None:
        """Make room for so many slots. What is held stays."""

    def reserve_target(self, length: int) -> None:
        """Make the target's caches at least so many rows long. What is held stays."""

    def reserve_draft(self, length: int) -> None:
        """The same for the drafter's caches."""

    def trim(self, target_length: int, draft_length: int) -> None:
        """Give cache rows beyond these back, where that is worth a copy of the others."""

    def release(self, slot: int, last: int) -> None:
        """Free ``slot`` by moving slot ``last`` into it, and wipe slot ``last``. What was in ``slot`` is gone then, NaN
        above all, which a mask does not stop."""

    def target_caches(self, slots: int) -> KVCaches:
        """The target's caches of slots [0, slots), as views."""

    @property
    def target_cache_length(self) -> int: ...

    @property
    def draft_cache_length(self) -> int: ...

    def prompt(self, slot: int, inputs: TargetInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target over a chunk of one prompt: logits of its last row, [1, 1, vocab], and context features,
        [1, seq, layers*hidden]."""

    def feed(self, slot: int, inputs: DraftInputs) -> None:
        """Give the drafter context features of one prompt."""

    def draft(self, inputs: DraftInputs, root_token_ids: torch.Tensor, budget: int, mode: str) -> DraftTree:
        """Run the drafter, and make trees of ``budget`` nodes of what it gives; ``mode`` as in ``build_tree``."""

    def verify(
        self,
        inputs: TargetInputs,
        tree: DraftTree,
        sampling: SamplingTensors,
        row_rules: Sequence[RowRules | None] | None,
    ) -> tuple[Verified, torch.Tensor]:
        """Run the target over the trees, and walk them as ``verify_tree`` does: what was accepted, and the context
        features of every node, [batch, N, layers*hidden]. ``inputs.write_index`` is where the roots stand."""

    def run(self, stage: Callable[..., Result], *arguments: object) -> Result:
        """``stage(*arguments)``, which does work of an engine and waits for none; an engine may record and repeat it.

        Arguments that are the same objects hold tensors at the same addresses; plain numbers and words say the rest.
        """

    def fetch(self, verified: Verified) -> Callable[[], Verified]:
        """Begin to copy what was verified to the host; the call of the result waits for it."""


def open_engine(directory: Path, threads: int | None = None) -> Engine:
    """Open an engine directory.

    Raises:
        BuildError, EngineError: it is none, it is damaged, or it cannot run here.
        RequestError: ``threads`` is out of range, or given for an engine on a GPU.
    """
    if Manifest.load(directory).engine == "onnxruntime":
        from ddtree.runtime.onnxruntime_engine import OnnxRuntimeEngine

        return OnnxRuntimeEngine(directory, threads)
    from ddtree.runtime.tensorrt_engine import TensorRTEngine

    return TensorRTEngine(directory, threads)
