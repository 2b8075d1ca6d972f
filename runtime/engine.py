"""What the runtime asks of an engine."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from ddtree.builder import Manifest
from ddtree.runtime.errors import EngineError

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""(key, value) of each layer, [slots, kv_heads, cache, head_dim]."""


class Engine(Protocol):
    """Two models and their KV caches. A slot holds one sequence; a pass runs the slots [first, first + batch).

    What a pass returns is valid until the next pass of the same model.
    """

    manifest: Manifest
    dtype: torch.dtype
    draft_to_target: torch.Tensor | None  # int32 [draft vocabulary], target ids; None where they are the same

    def reset(self, slots: int) -> None:
        """Forget everything and make room for so many slots."""

    def reserve_target(self, length: int) -> None:
        """Make the target's caches at least so many rows long. New rows are zero; what is held stays."""

    def reserve_draft(self, length: int) -> None:
        """The same for the drafter's caches."""

    def release(self, slot: int, last: int, *, zero: bool) -> None:
        """Free ``slot`` by moving slot ``last`` into it. ``zero`` wipes slot ``last`` then, and with it what was in
        ``slot`` is gone: a mask does not stop NaN."""

    def target_caches(self, slots: int) -> KVCaches:
        """The target's caches of slots [0, slots), as views."""

    @property
    def target_cache_length(self) -> int: ...

    @property
    def draft_cache_length(self) -> int: ...

    def draft(
        self,
        first: int,
        features: torch.Tensor,  # [batch, ctx, layers*hidden]
        context_position_ids: torch.Tensor,  # int64 [batch, ctx]
        block_ids: torch.Tensor,  # int64 [batch, block]
        block_position_ids: torch.Tensor,  # int64 [batch, block]
        attention_masks: Sequence[torch.Tensor],  # [batch, 1, block, cache]; two where only some layers have a window
        write_index: torch.Tensor,  # int64 [batch]
    ) -> torch.Tensor:
        """Run the drafter: logits of the next D positions, [batch, D, draft vocabulary]."""

    def target(
        self,
        first: int,
        input_ids: torch.Tensor,  # int32 or int64 [batch, seq]
        position_ids: torch.Tensor,  # int64 [batch, seq]
        attention_masks: Sequence[torch.Tensor],  # [batch, 1, seq, cache]; two where only some layers have a window
        write_index: torch.Tensor,  # int64 [batch]
        logit_rows: torch.Tensor,  # int64 [batch, rows]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the target: logits [batch, rows, vocab] and context features [batch, seq, layers*hidden]."""


def open_engine(directory: Path, threads: int | None = None) -> Engine:
    """Open an engine directory.

    Raises:
        BuildError, EngineError: it is none, it is damaged, or this version does not run its kind.
    """
    engine = Manifest.load(directory).engine
    if engine != "onnxruntime":
        raise EngineError(
            f"{directory} is a {engine} engine, which this version builds but does not run "
            "(build one with --engine onnxruntime)"
        )
    from ddtree.runtime.onnxruntime_engine import OnnxRuntimeEngine

    return OnnxRuntimeEngine(directory, threads)
