"""Engines of TensorRT, of TensorRT for RTX and of trtllm-build.

Everything of a sequence stays on the GPU: passes and tree operations follow each other on one stream without the host,
which reads once a round what was verified. What a round does is recorded as CUDA graphs, for each number of sequences
and of nodes, and replayed from then on.
"""

import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from ddtree.builder import Manifest
from ddtree.builder.build import DRAFT_PLAN, TARGET_PLAN
from ddtree.plugins import launch, ops
from ddtree.plugins.cache import cache_root
from ddtree.plugins.operations import BUILD_TREE, VERIFY_TREE
from ddtree.plugins.row_rules import RowRules
from ddtree.plugins.tree import DraftTree, SamplingTensors, Verified, first_nodes
from ddtree.runtime.cuda_graphs import CudaGraphs, one_at_a_time
from ddtree.runtime.engine import DraftInputs, KVCaches, Result, TargetInputs
from ddtree.runtime.errors import EngineError, RequestError
from ddtree.runtime.tensorrt_plan import PROMPT, ROUND, Plan

_DEVICE = "cuda"
_MASKS = ("attention_mask", "sliding_attention_mask")
_VERIFIED = tuple(spec.name for spec in VERIFY_TREE.outputs)


class TensorRTEngine:
    """See ``ddtree.runtime.engine.Engine``. Slots and caches have their full size from the start."""

    asynchronous = True

    def __init__(self, directory: Path, threads: int | None = None):
        self.manifest = manifest = Manifest.load(directory)
        if threads is not None:
            raise RequestError(
                f"threads {threads} do not go with engine {manifest.engine}, whose passes run on a GPU (leave them out)"
            )
        library = _library(manifest, directory)
        self.device, self.dtype = torch.device(_DEVICE), getattr(torch, manifest.dtype)
        self.ahead: dict[tuple, DraftTree] = {}
        self._stream = torch.cuda.Stream()
        self._graphs = CudaGraphs(self._stream)
        self._purpose: tuple = ()  # of the rounds' passes
        weakref.finalize(self, self._stream.synchronize)  # before what a draft ahead still uses is freed
        with one_at_a_time, self.stream():
            try:
                self._allocate(library, directory)
            except torch.OutOfMemoryError as error:
                free, total = (size / 1e9 for size in torch.cuda.mem_get_info())
                raise EngineError(
                    f"{directory} does not fit into the GPU's memory of {total:.1f} GB, {free:.1f} GB of which are "
                    "left (build it with a smaller max_batch_size, max_seq_len or max_tree_nodes)"
                ) from error

    def _allocate(self, library: ModuleType, directory: Path) -> None:
        target, draft, limits = self.manifest.target, self.manifest.draft, self.manifest.limits
        digests = {file.name: file.sha256 for file in self.manifest.files}

        def plan(name: str, layers: int) -> Plan:
            compiled = cache_root() / library.__name__ / f"{digests[name][:16]}-{library.__version__}"
            return Plan(library, directory / name, layers, limits.max_batch_size, self._stream, compiled)

        self._target = plan(TARGET_PLAN, target.num_hidden_layers)
        self._draft = None if draft is None else plan(DRAFT_PLAN, draft.num_hidden_layers)
        self._plans = [each for each in (self._target, self._draft) if each is not None]
        scratch = self._zeros(max(each.scratch_bytes for each in self._plans), dtype=torch.uint8)
        for each in self._plans:
            each.allocate(scratch)

        # Trees are verified by a plugin at the end of the target's engine, or by the same kernel behind it.
        self._verifies = _VERIFIED[0] in self._target.outputs
        self._drafts_trees = self._draft is not None and BUILD_TREE.outputs[0].name in self._draft.outputs
        self._draft_to_target = None
        if draft is not None and draft.draft_to_target is not None:
            self._draft_to_target = torch.from_numpy(np.load(directory / draft.draft_to_target)).to(self.device)
        self.methods: tuple[str, ...] = ("ar",)
        if self._draft is not None:
            self.methods = ("ddtree", "chain", "ar") if "draft_logits" in self._draft.outputs else ("ddtree", "ar")

        self._logit_rows: dict[tuple[int, int, int], torch.Tensor] = {}  # by batch, rows, rows with logits
        self._no_root = self._zeros(1, dtype=torch.int32)
        self._greedy = SamplingTensors(
            self._zeros(1),
            self._zeros(1, dtype=torch.int32),
            self._zeros(1) + 1,
            self._zeros(1),
            self._zeros(1, dtype=torch.int64),
        )
        depth = draft.max_depth if draft else 1
        size = limits.max_batch_size * (3 * (depth + 1) + 2)
        self._on_host = torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._fetched = torch.cuda.Event()

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    def stream(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def reset(self, slots: int) -> None:
        """Caches stay as they are: what is in them is finite, and no mask shows it."""
        self.ahead.clear()

    def reserve_slots(self, slots: int) -> None:
        """There are as many as the engine was built for."""

    def reserve_target(self, length: int) -> None:
        """The caches are as long as the longest sequence."""

    def reserve_draft(self, length: int) -> None:
        """The same."""

    def trim(self, target_length: int, draft_length: int) -> None:
        """The same."""

    def release(self, slot: int, last: int) -> None:
        self.ahead.clear()
        for plan in self._plans:
            for cache in plan.caches:
                if last != slot:
                    cache[slot].copy_(cache[last])
                cache[last].zero_()

    def target_caches(self, slots: int) -> KVCaches:
        views = [cache[:slots] for cache in self._target.caches]
        return list(zip(views[::2], views[1::2], strict=True))

    @property
    def target_cache_length(self) -> int:
        return self._target.caches[0].shape[2]

    @property
    def draft_cache_length(self) -> int:
        return self._draft.caches[0].shape[2] if self._draft is not None else 0

    def prompt(self, slot: int, inputs: TargetInputs) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self._target_tensors(inputs, logit_rows=1)
        if self._verifies:  # all the same; of a chunk's last row as a tree that is a root alone, which nobody asks for
            root = ops.root_tree(inputs.input_ids[:, -1])
            tensors |= self._verify_tensors(root, inputs.write_index, self._greedy)
        outputs = self._target.run(PROMPT, tensors, slot)
        return outputs["logits"], self._features(outputs, inputs)

    def feed(self, slot: int, inputs: DraftInputs) -> None:
        assert self._draft is not None
        self._draft.run(PROMPT, self._draft_tensors(inputs, self._no_root), slot)

    def draft(self, inputs: DraftInputs, root_token_ids: torch.Tensor, budget: int, mode: str) -> DraftTree:
        assert self._draft is not None
        # A draft that is made ahead may be of a sequence that has ended: behind max_seq_len, or without a root.
        limits, draft = self.manifest.limits, self.manifest.draft
        assert draft is not None
        last = limits.max_seq_len + draft.block_size  # position that the rotary tables end with
        tensors = self._draft_tensors(
            inputs._replace(
                block_ids=inputs.block_ids.clamp(min=0),
                block_position_ids=inputs.block_position_ids.clamp(max=last),
            ),
            root_token_ids,
        )
        outputs = self._draft.run(ROUND, tensors, context_for=self._purpose)
        if self._drafts_trees and mode == "tree":
            fields = {spec.name: outputs[spec.name] for spec in BUILD_TREE.outputs}
            return first_nodes(DraftTree(**fields, max_depth=draft.max_depth), budget)
        return ops.build_tree(
            outputs["draft_logits"], root_token_ids, budget=budget, mode=mode, draft_to_target=self._draft_to_target
        )

    def verify(
        self,
        inputs: TargetInputs,
        tree: DraftTree,
        sampling: SamplingTensors,
        row_rules: Sequence[RowRules | None] | None,
    ) -> tuple[Verified, torch.Tensor]:
        past = inputs.write_index
        tensors = self._target_tensors(inputs, logit_rows=inputs.input_ids.shape[1])
        if self._verifies:
            tensors |= self._verify_tensors(tree, past, sampling)
        outputs = self._target.run(ROUND, tensors, context_for=self._purpose)
        features = self._features(outputs, inputs)
        if self._verifies and row_rules is None:
            return Verified(**{name: outputs[name] for name in _VERIFIED}), features
        return ops.verify_tree(outputs["logits"], tree, past, sampling, row_rules=row_rules), features

    def run(self, stage: Callable[..., Result], *arguments: object) -> Result:
        if not all(plan.recordable for plan in self._plans):
            return stage(*arguments)
        recorded = len(self._graphs)
        self._purpose = (stage, *(each for each in arguments if isinstance(each, int | str)))
        try:
            result = self._graphs.run(stage, *arguments)
        finally:
            self._purpose = ()
        if len(self._graphs) > recorded:  # so all that its passes need has been compiled
            for plan in self._plans:
                plan.save_compiled()
        return result

    def fetch(self, verified: Verified) -> Callable[[], Verified]:
        parts = [
            verified.accepted_nodes,
            verified.output_ids,
            verified.logprobs.view(torch.int32),
            verified.accepted_count[:, None],
            verified.status[:, None],
        ]
        widths = [part.shape[1] for part in parts]
        batch, width = len(verified.status), sum(widths)
        on_host = self._on_host[: batch * width].view(batch, width)
        on_host.copy_(torch.cat(parts, 1), non_blocking=True)
        self._fetched.record()

        def wait() -> Verified:
            try:
                self._fetched.synchronize()
            except RuntimeError as error:
                raise EngineError(f"the GPU failed: {' '.join(str(error).split())} (open the engine again)") from error
            nodes, output_ids, logprobs, count, status = on_host.clone().split(widths, 1)
            return Verified(nodes, count[:, 0], output_ids, logprobs.view(torch.float32), status[:, 0])

        return wait

    def _target_tensors(self, inputs: TargetInputs, logit_rows: int) -> dict[str, torch.Tensor]:
        """``logit_rows``: how many rows, the last ones, have logits."""
        batch, rows = inputs.input_ids.shape
        key = batch, rows, logit_rows
        if key not in self._logit_rows:
            wanted = torch.arange(rows - logit_rows, rows, device=self.device)
            self._logit_rows[key] = wanted.repeat(batch, 1)
        return {
            "input_ids": inputs.input_ids,
            "position_ids": inputs.position_ids,
            **dict(zip(_MASKS, inputs.attention_masks, strict=False)),
            "write_index": inputs.write_index,
            "logit_rows": self._logit_rows[key],
        }

    def _draft_tensors(self, inputs: DraftInputs, root_token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self._draft is not None
        tensors = {
            "context_features": inputs.features,
            "context_position_ids": inputs.context_position_ids,
            "block_ids": inputs.block_ids,
            "block_position_ids": inputs.block_position_ids,
            **dict(zip(_MASKS, inputs.attention_masks, strict=False)),
            "write_index": inputs.write_index,
        }
        if self._drafts_trees:
            tensors["root_token_ids"] = root_token_ids
        if "draft_to_target" in self._draft.inputs:  # the ids are the target's; else the table is in the engine
            tensors["draft_to_target"] = self._zeros(0, dtype=torch.int32)
        return tensors

    def _verify_tensors(
        self, tree: DraftTree, past: torch.Tensor, sampling: SamplingTensors
    ) -> dict[str, torch.Tensor]:
        batch, nodes = tree.token_ids.shape
        return {
            "token_ids": tree.token_ids,
            "next_token": tree.next_token,
            "next_sibling": tree.next_sibling,
            "node_count": tree.node_count,
            "root_positions": past,
            **vars(sampling),
            "token_bitmask": self._zeros(batch, nodes, 0, dtype=torch.int32),
            "coins": self._zeros(batch, 0),
            "final_coin": self._zeros(0),
        }

    def _features(self, outputs: Mapping[str, torch.Tensor], inputs: TargetInputs) -> torch.Tensor:
        """Context features, [batch, seq, layers*hidden]; of no columns without a drafter."""
        if "context_features" in outputs:
            return outputs["context_features"]
        return self._zeros(*inputs.input_ids.shape, 0)


def _library(manifest: Manifest, directory: Path) -> ModuleType:
    """The library that the engine was built with, on a GPU that it was built for."""
    engine, compiled = manifest.engine, manifest.compiled
    assert compiled is not None
    name = "tensorrt" if engine == "tensorrt_llm" else engine
    version = manifest.versions[name]
    try:
        library = importlib.import_module(name)
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise EngineError(f"{directory} needs {name} {version}: {reason} (install that version)") from error
    if library.__version__ != version:
        raise EngineError(
            f"{directory} was built with {name} {version}, and {library.__version__} is installed "
            "(build the engine again, or install that version)"
        )
    if not torch.cuda.is_available():
        raise EngineError(
            f"{directory} is a {engine} engine, and PyTorch {torch.__version__} finds no GPU here "
            "(install a CUDA build of PyTorch, or build an onnxruntime engine)"
        )
    try:
        arch = launch.device_arch()
    except (ImportError, RuntimeError) as error:
        raise EngineError(f"{directory} cannot run its tree operations here: {error}") from error
    if arch != compiled.arch:
        raise EngineError(f"{directory} was built for {compiled.arch}, and the GPU is {arch} (build it on this GPU)")
    if engine == "tensorrt_llm":  # its plugins call back into this process
        from ddtree.plugins import tensorrt

        tensorrt.register("v3")
    return library
