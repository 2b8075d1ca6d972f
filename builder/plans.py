"""The compiled engines of a TensorRT engine directory: the length of their caches, the passes they are built for."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from . import tree_plugins
from .compile import Network, Profile, cache_copies, compile_graph
from .manifest import CompiledInfo, DraftInfo, Limits, TargetInfo
from .weights import Progress

PREFILL_CHUNK = 256  # the most rows of a slot in a prompt pass
_CACHE_STEP = 64  # rows; attention kernels read keys and masks in tiles of so many


class Plans:
    """Compiles the graphs of a target and its drafter.

    Args:
        library, arch, timing_cache: as ``compile_graph`` takes them.
        verify: "plugin" puts the tree operations into the engines.
        draft: None without a drafter.

    Attributes:
        info: what the manifest says of the engines. The graphs have to be placed with its cache lengths.
    """

    def __init__(
        self,
        library: ModuleType,
        arch: str,
        verify: str,
        timing_cache: Path | None,
        limits: Limits,
        target: TargetInfo,
        draft: DraftInfo | None,
    ):
        self._library, self._timing_cache = library, timing_cache
        self._limits, self._target, self._draft = limits, target, draft
        self.info = compiled_info(f"{library.__name__} {library.__version__}", arch, verify, limits, draft)
        if verify == "plugin":
            tree_plugins.register(arch)

    def compile_target(self, graph: Path, plan: Path, progress: Progress) -> list[str]:
        """Compile ``graph`` into ``plan``; returns notes for the user."""
        depth = self._draft.max_depth if self._draft else 1
        return self._compile(
            graph,
            plan,
            target_profiles(self.info, self._limits, self._target),
            lambda network: tree_plugins.add_verify_tree(network, depth),
            (self.info.target_cache_length, self._target.head_dim),
            progress,
        )

    def compile_draft(
        self, graph: Path, plan: Path, draft_to_target: np.ndarray | None, progress: Progress
    ) -> list[str]:
        """Compile ``graph`` into ``plan``; returns notes for the user.

        Args:
            draft_to_target: int32 [draft vocabulary], target ids; None where they are the same.
        """
        assert self._draft is not None
        assert self.info.draft_cache_length is not None
        draft = self._draft
        return self._compile(
            graph,
            plan,
            draft_profiles(self.info, self._limits, self._target, draft),
            lambda network: tree_plugins.add_build_tree(network, draft, self._limits.max_tree_nodes, draft_to_target),
            (self.info.draft_cache_length, draft.head_dim),
            progress,
        )

    def _compile(
        self,
        graph: Path,
        plan: Path,
        profiles: list[Profile],
        extend: Callable[[Network], None],
        cache: tuple[int, int],
        progress: Progress,
    ) -> list[str]:
        kernels = compile_graph(
            self._library,
            graph,
            plan,
            arch=self.info.arch,
            profiles=profiles,
            extend=extend if self.info.verify == "plugin" else None,
            timing_cache=self._timing_cache,
            progress=progress,
        )
        name = f"{self._library.__name__} {self._library.__version__}"
        if not kernels:
            return [f"{name} does not say which kernels {plan.name} has: whether one copies a KV cache is not known"]
        copies = cache_copies(kernels, *cache)
        if not copies:
            return []
        return [f"{name} copies whole KV caches in {plan.name}, which costs time in every pass: {', '.join(copies)}"]


def compiled_info(library: str, arch: str, verify: str, limits: Limits, draft: DraftInfo | None) -> CompiledInfo:
    """What the manifest says of engines of these limits.

    Args:
        library: name and version of the library that compiles them.
    """
    chunk, nodes = min(PREFILL_CHUNK, limits.max_seq_len), limits.max_tree_nodes + 1
    draft_rows = None if draft is None else max(draft.max_depth + 1, chunk) + draft.block_size
    capability = arch.removeprefix("sm_")
    return CompiledInfo(
        arch=arch,
        # The libraries can be asked for more, at the price of speed.
        version_compatibility=f"{library} only",
        hardware_compatibility=f"GPUs of compute capability {capability[:-1]}.{capability[-1]} only",
        verify=verify,
        prefill_chunk=chunk,
        target_cache_length=_cache_length(limits.max_seq_len + max(nodes, chunk)),
        draft_cache_length=None if draft_rows is None else _cache_length(limits.max_seq_len + draft_rows),
    )


def target_profiles(info: CompiledInfo, limits: Limits, target: TargetInfo) -> list[Profile]:
    """The passes of a target engine: a chunk of a prompt, whose last row gives the first token, and a tree."""
    chunk, nodes, common = info.prefill_chunk, limits.max_tree_nodes + 1, _common(info, limits, target)
    return [
        common | {"seq": (1, chunk, chunk), "rows": (1, 1, 1)},
        common | {"seq": (1, nodes, nodes), "rows": (1, nodes, nodes)},
    ]


def draft_profiles(info: CompiledInfo, limits: Limits, target: TargetInfo, draft: DraftInfo) -> list[Profile]:
    """The passes of a draft engine: behind a chunk of a prompt, and behind what the last round accepted."""
    chunk, accepted, common = info.prefill_chunk, draft.max_depth + 1, _common(info, limits, target)
    return [common | {"ctx": (1, chunk, chunk)}, common | {"ctx": (1, accepted, accepted)}]


def _common(info: CompiledInfo, limits: Limits, target: TargetInfo) -> Profile:
    slots = limits.max_batch_size
    return {"batch": (1, slots, slots)} | (tree_plugins.ranges(target.vocab_size) if info.verify == "plugin" else {})


def _cache_length(rows: int) -> int:
    return -(-rows // _CACHE_STEP) * _CACHE_STEP
