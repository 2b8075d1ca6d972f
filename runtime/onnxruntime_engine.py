"""The embedded engine: both graphs in ONNX Runtime on the CPU, KV caches updated in place.

A cache is one torch tensor bound as both input and output of its TensorScatter node, which ONNX Runtime then runs in
place. Caches grow as texts do, so a short request never pays for a long one.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch

from ddtree.builder import Manifest
from ddtree.builder.build import DRAFT_GRAPH, TARGET_GRAPH
from ddtree.builder.manifest import DraftInfo, TargetInfo
from ddtree.plugins import ops
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified
from ddtree.runtime.engine import DraftInputs, KVCaches, Result, TargetInputs
from ddtree.runtime.errors import EngineError, RequestError

_NUMPY = {torch.float32: np.float32, torch.int64: np.int64}
# Two sessions have two thread pools. Idle threads spin for a while, and take cores from the other session's pass:
# beside a spinning drafter a tree pass of the demo pair took 4.5 ms, without it 2.5 ms (2 cores). A small drafter gains
# nothing from a second thread, so it gets none. Beside a large one, whose passes are long against waking a thread, both
# pools sleep between passes.
_SMALL_DRAFT = 16 << 20  # bytes of weights
_MASKS = ("attention_mask", "sliding_attention_mask")
_SHORTEST_CACHE = 128  # rows; below this a longer cache costs nothing measurable


class _Model:
    """One graph, its session and its caches."""

    def __init__(self, path: Path, model: TargetInfo | DraftInfo, threads: int | None, *, spin: bool):
        options = ort.SessionOptions()
        options.log_severity_level = 4  # errors come as exceptions
        if threads is not None:
            options.intra_op_num_threads = threads
        if not spin:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has one exception class per status code and no public base class
            raise EngineError(
                f"{path}: ONNX Runtime cannot open it: {_first_line(error)} (build the engine again)"
            ) from error
        self.binding = self.session.io_binding()
        # Of all layers: [2 * layers (key, value of layer 0, ...), slots, kv_heads, rows, head_dim]
        self.caches = _zeros(2 * model.num_hidden_layers, 0, model.num_key_value_heads, 0, model.head_dim)
        self.bound_slots: tuple[int, int] | None = None  # (first, batch) that the caches are bound for
        self.buffers: dict[str, torch.Tensor] = {}  # what the other inputs and outputs are bound to

    @property
    def cache_length(self) -> int:
        return self.caches.shape[3]

    def views(self, slots: int) -> KVCaches:
        """Keys and values of all layers together, slots [0, slots)."""
        return [(self.caches[::2, :slots], self.caches[1::2, :slots])]

    def reset(self, slots: int) -> None:
        caches, _, heads, _, head_dim = self.caches.shape
        self.caches = _zeros(caches, slots, heads, _SHORTEST_CACHE, head_dim)
        self.bound_slots = None

    def reserve(self, slots: int, length: int) -> None:
        caches, have_slots, heads, have_length, head_dim = self.caches.shape
        if slots <= have_slots and length <= have_length:
            return
        old = self.caches
        self.caches = _zeros(caches, max(slots, have_slots), heads, max(_grown(length), have_length), head_dim)
        self.caches[:, :have_slots, :, :have_length] = old
        self.bound_slots = None

    def trim(self, length: int) -> None:
        length = _grown(length)
        if 2 * length <= self.cache_length:
            self.caches = self.caches[:, :, :, :length].clone()
            self.bound_slots = None

    def release(self, slot: int, last: int) -> None:
        if last != slot:
            self.caches[:, slot] = self.caches[:, last]
        self.caches[:, last].zero_()

    def run(self, first: int, inputs: dict[str, torch.Tensor], outputs: Mapping[str, tuple[int, ...]]) -> None:
        """Run slots [first, first + batch). What comes out lies in ``buffers`` until the next pass.

        Rounds repeat their shapes, so inputs are copied into buffers that stay bound: binding costs more than copying.
        """
        batch = next(iter(inputs.values())).shape[0]
        if self.bound_slots != (first, batch):
            self._bind_caches(first, batch)
        for name, tensor in inputs.items():
            self._buffer(self.binding.bind_input, name, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        for name, shape in outputs.items():
            self._buffer(self.binding.bind_output, name, shape, torch.float32)
        try:
            self.session.run_with_iobinding(self.binding)
        except Exception as error:
            raise EngineError(f"ONNX Runtime failed in a pass of {batch} slots: {_first_line(error)}") from error

    def _bind_caches(self, first: int, batch: int) -> None:
        for i, cache in enumerate(self.caches):
            name = f"{i // 2}.{'value' if i % 2 else 'key'}"
            rows = cache[first : first + batch]
            _bind(self.binding.bind_input, f"past_key_values.{name}", rows)
            _bind(self.binding.bind_output, f"present.{name}", rows)
        self.bound_slots = (first, batch)

    def _buffer(self, bind: Callable[..., None], name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != shape:
            dtype = torch.int64 if dtype == torch.int32 else dtype  # token ids: the graphs take int64
            self.buffers[name] = buffer = torch.empty(shape, dtype=dtype)
            _bind(bind, name, buffer)
        return buffer


def _bind(bind: Callable[..., None], name: str, tensor: torch.Tensor) -> None:
    bind(name, "cpu", 0, _NUMPY[tensor.dtype], tuple(tensor.shape), tensor.data_ptr())


class OnnxRuntimeEngine:
    """See ``ddtree.runtime.engine.Engine``."""

    dtype = torch.float32
    device = torch.device("cpu")
    asynchronous = False

    def __init__(self, directory: Path, threads: int | None = None):
        cores = os.cpu_count() or 1
        if threads is not None and not 1 <= threads <= cores:
            raise RequestError(f"threads {threads} is out of range (use 1 to {cores}, the cores of this machine)")
        self.manifest = manifest = Manifest.load(directory)
        target, draft = manifest.target, manifest.draft
        draft_bytes = sum(
            f.size for f in manifest.files if f.name.startswith("draft") and f.name.endswith("safetensors")
        )
        small_draft = draft is None or draft_bytes <= _SMALL_DRAFT
        self._target = _Model(directory / TARGET_GRAPH, target, threads, spin=small_draft)
        self._draft = None
        if draft is not None:
            self._draft = _Model(directory / DRAFT_GRAPH, draft, 1 if small_draft else threads, spin=False)
        self._draft_to_target = None
        if draft is not None and draft.draft_to_target is not None:
            self._draft_to_target = torch.from_numpy(np.load(directory / draft.draft_to_target))
        self.methods: tuple[str, ...] = ("ar",) if draft is None else ("ddtree", "chain", "ar")
        self.ahead: dict[tuple, DraftTree] = {}  # always empty: a pass is over when the call returns

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reset(self, slots: int) -> None:
        for model in (self._target, self._draft):
            if model is not None:
                model.reset(slots)

    def reserve_slots(self, slots: int) -> None:
        for model in (self._target, self._draft):
            if model is not None:
                model.reserve(slots, 0)

    def reserve_target(self, length: int) -> None:
        self._target.reserve(0, length)

    def reserve_draft(self, length: int) -> None:
        assert self._draft is not None
        self._draft.reserve(0, length)

    def trim(self, target_length: int, draft_length: int) -> None:
        self._target.trim(target_length)
        if self._draft is not None:
            self._draft.trim(draft_length)

    def release(self, slot: int, last: int) -> None:
        for model in (self._target, self._draft):
            if model is not None:
                model.release(slot, last)

    def target_caches(self, slots: int) -> KVCaches:
        return self._target.views(slots)

    @property
    def target_cache_length(self) -> int:
        return self._target.cache_length

    @property
    def draft_cache_length(self) -> int:
        return self._draft.cache_length if self._draft is not None else 0

    def prompt(self, slot: int, inputs: TargetInputs) -> tuple[torch.Tensor, torch.Tensor]:
        last = torch.tensor([[inputs.input_ids.shape[1] - 1]])
        return self._run_target(slot, inputs, last)

    def feed(self, slot: int, inputs: DraftInputs) -> None:
        self._run_draft(slot, inputs)

    def draft(self, inputs: DraftInputs, root_token_ids: torch.Tensor, budget: int, mode: str) -> DraftTree:
        logits = self._run_draft(0, inputs)
        return ops.build_tree(logits, root_token_ids, budget=budget, mode=mode, draft_to_target=self._draft_to_target)

    def verify(
        self,
        inputs: TargetInputs,
        tree: DraftTree,
        sampling: SamplingTensors,
        row_rules: Sequence[RowRules | None] | None,
    ) -> tuple[Verified, torch.Tensor]:
        batch, nodes = inputs.input_ids.shape
        logits, features = self._run_target(0, inputs, torch.arange(nodes).expand(batch, -1))
        return ops.verify_tree(logits, tree, inputs.write_index, sampling, row_rules=row_rules), features

    def run(self, stage: Callable[..., Result], *arguments: object) -> Result:
        return stage(*arguments)

    def fetch(self, verified: Verified) -> Callable[[], Verified]:
        return lambda: verified

    def _run_draft(self, first: int, inputs: DraftInputs) -> torch.Tensor:
        """draft_logits, [batch, D, draft vocabulary]."""
        draft = self.manifest.draft
        assert draft is not None
        assert self._draft is not None
        self._draft.run(
            first,
            {
                "context_features": inputs.features,
                "context_position_ids": inputs.context_position_ids,
                "block_ids": inputs.block_ids,
                "block_position_ids": inputs.block_position_ids,
                **dict(zip(_MASKS, inputs.attention_masks, strict=False)),
                "write_index": inputs.write_index,
            },
            {"draft_logits": (inputs.features.shape[0], draft.max_depth, draft.vocab_size)},
        )
        return self._draft.buffers["draft_logits"]

    def _run_target(
        self, first: int, inputs: TargetInputs, logit_rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [batch, rows, vocab] and context features [batch, seq, layers*hidden]."""
        (batch, seq), rows = inputs.input_ids.shape, logit_rows.shape[1]
        outputs = {"logits": (batch, rows, self.manifest.target.vocab_size)}
        if self._draft is not None:
            outputs["context_features"] = (batch, seq, self.manifest.feature_width)
        self._target.run(
            first,
            {
                "input_ids": inputs.input_ids,
                "position_ids": inputs.position_ids,
                **dict(zip(_MASKS, inputs.attention_masks, strict=False)),
                "write_index": inputs.write_index,
                "logit_rows": logit_rows,
            },
            outputs,
        )
        buffers = self._target.buffers
        return buffers["logits"], buffers.get("context_features", torch.empty(batch, seq, 0))


def _grown(length: int) -> int:
    """The cache length for ``length`` rows: 128, 160, 192, 224, 256, 320, ...

    Attention reads the whole cache, whatever the mask, so a power of two would cost up to twice what is needed (a tree
    pass of the demo pair at 150 tokens: a fifth more), and a step for each round a copy of everything. Four steps an
    octave copy a row some five times in its life.
    """
    if length <= _SHORTEST_CACHE:
        return _SHORTEST_CACHE
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
