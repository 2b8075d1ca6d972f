"""Checkpoint directories in, engine directory out."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import BuildError
from .manifest import FORMAT_VERSION, CompiledInfo, DraftInfo, FileInfo, Limits, Manifest, TargetInfo
from .staging import check_output, reason, staged

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .config import DraftConfig, TargetConfig
    from .plans import Plans
    from .weights import Progress, Weights

TARGET_GRAPH, DRAFT_GRAPH, DRAFT_TO_TARGET = "target.onnx", "draft.onnx", "draft_to_target.npy"
TARGET_PLAN, DRAFT_PLAN = "target.engine", "draft.engine"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
MAX_TREE_NODES = 1023  # and the root: the most rows that the paper's experiments and the kernels know
MAX_BATCH_SIZE = 4096
_LIBRARIES = ("ddtree-trtllm", "onnx", "onnxruntime", "numpy")


class _Kind(NamedTuple):
    """What goes with an engine; the default comes first."""

    dtypes: tuple[str, ...]
    archs: tuple[str, ...] | None  # None: that of the GPU that is present
    verify: tuple[str, ...]


_GPU_DTYPES = ("bfloat16", "float16")
_ENGINES = {
    "onnxruntime": _Kind(("float32",), (), ()),
    "tensorrt": _Kind(_GPU_DTYPES, None, ("plugin", "kernel")),
    "tensorrt_rtx": _Kind(_GPU_DTYPES, ("sm_120",), ("kernel",)),
}


def build_engine(
    target: Path,
    draft: Path | None,
    output: Path,
    *,
    engine: str = "onnxruntime",
    arch: str | None = None,
    dtype: str | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_tree_nodes: int = 255,
    verify: str | None = None,
    timing_cache: Path | None = None,
    force: bool = False,
    progress: "Progress | None" = None,
) -> Manifest:
    """Build an engine directory from a target checkpoint and its drafter's.

    The directory is written beside ``output`` and renamed: a build that fails or is stopped leaves nothing behind.

    Args:
        target: Hugging Face directory of a target model.
        draft: directory of its DFlash drafter; None: an engine for plain decoding.
        output: the engine directory; must not exist, or be empty, or be an engine with ``force``.
        engine: "onnxruntime", "tensorrt" (for the GPU that is present) or "tensorrt_rtx" (needs none); - is as good
            as _.
        arch: the GPU to build for, such as "sm_120"; None: the one that is present, or the only one.
        dtype: of weights, activations and caches; None: the checkpoint's where the engine has it, else the engine's
            default.
        max_seq_len: tokens of prompt and output; None: as many as the checkpoints allow. A TensorRT engine's caches
            have that length for every slot, and attention reads all of it in every pass.
        max_tree_nodes: the largest budget, root excluded.
        verify: where the tree operations of a TensorRT engine run: "plugin", inside it, or "kernel", right behind it.
        timing_cache: a file of TensorRT's measurements, read if it is there, and written.
        force: replace the engine that is at ``output``.
        progress: called with what is being done, how much is done, and how much there is.

    Raises:
        BuildError: a setting, a checkpoint or the output directory cannot be used.
        BusyError: another process is building into ``output``.
    """
    engine = engine.replace("-", "_")
    kind = _check_settings(engine, arch, dtype, verify, timing_cache)
    for name, value, most in (
        ("max_batch_size", max_batch_size, MAX_BATCH_SIZE),
        ("max_tree_nodes", max_tree_nodes, MAX_TREE_NODES),
    ):
        if not 1 <= value <= most:
            raise BuildError(f"{name} {value} is out of range (use 1 to {most})")

    # Imported here: onnx takes longer to import than an engine takes to open.
    from .checkpoint import Checkpoint
    from .compile import load_library
    from .config import DraftConfig, TargetConfig
    from .plans import Plans
    from .weights import Weights

    progress = progress or _silent
    library = None
    if engine != "onnxruntime":
        library = load_library(engine)
        arch = _present_arch(arch) if kind.archs is None else arch or kind.archs[0]
    output = Path(output).absolute()
    if output.is_dir():
        output = output.resolve()  # through a symbolic link: what it names is replaced, not the link
    check_output(output, force)
    try:
        checkpoint = Checkpoint.open(Path(target), "target")
        config = TargetConfig.read(checkpoint)
        dtype = dtype or _default_dtype(kind, checkpoint)
        weights = Weights("target", checkpoint, dtype)
        drafter = None
        if draft is not None:
            draft_checkpoint = Checkpoint.open(Path(draft), "draft")
            drafter = _Drafter(DraftConfig.read(draft_checkpoint, config), Weights("draft", draft_checkpoint, dtype))
        limits = Limits(max_batch_size, _sequence_length(max_seq_len, config, drafter), max_tree_nodes)
        target_info, draft_info = describe_target(config), describe_draft(drafter.config) if drafter else None
        if not (checkpoint.directory / TOKENIZER).is_file():
            raise BuildError(
                f"target checkpoint {checkpoint.directory} has no {TOKENIZER} "
                "(write one: load it with transformers' AutoTokenizer and save_pretrained it)"
            )
        plans = None
        if library and arch:
            plans = Plans(library, arch, verify or kind.verify[0], timing_cache, limits, target_info, draft_info)
        with staged(output, force) as directory:
            if plans is None:
                notes = _write_graphs(directory, config, weights, drafter, limits, None, progress)
            else:
                notes = _write_plans(directory, config, weights, drafter, limits, plans, progress)
            tokenizer_files = tuple(name for name in TOKENIZER_FILES if (checkpoint.directory / name).is_file())
            for name in tokenizer_files:
                shutil.copyfile(checkpoint.directory / name, directory / name)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                engine=engine,
                dtype=dtype,
                limits=limits,
                target=target_info,
                draft=draft_info,
                compiled=plans.info if plans else None,
                tokenizer_files=tokenizer_files,
                files=tuple(FileInfo.of(path, path.name) for path in sorted(directory.iterdir())),
                sources=tuple(
                    FileInfo.of(file, f"{w.role}/{file.name}")
                    for w in (weights, *([drafter.weights] if drafter else []))
                    for file in (w.checkpoint.directory / "config.json", *w.checkpoint.files)
                ),
                versions={library: version(library) for library in _LIBRARIES}
                | ({engine: library.__version__} if library else {}),
                notes=tuple(notes),
            )
            manifest.save(directory)
    except OSError as error:
        raise BuildError(reason(error, output)) from error
    return manifest


class _Drafter(NamedTuple):
    config: "DraftConfig"
    weights: "Weights"


def _check_settings(
    engine: str, arch: str | None, dtype: str | None, verify: str | None, timing_cache: Path | None
) -> _Kind:
    """What goes with ``engine``, and that the settings do."""
    if engine not in _ENGINES:
        raise BuildError(f"engine {engine!r} is not known (use {', '.join(_ENGINES)})")
    kind = _ENGINES[engine]
    if dtype is not None and dtype not in kind.dtypes:
        raise BuildError(f"dtype {dtype!r} does not go with engine {engine} (use {', '.join(kind.dtypes)})")
    for name, value, known in (("arch", arch, kind.archs), ("verify", verify, kind.verify)):
        if value is not None and known is not None and value not in known:
            remedy = f"use {', '.join(known)}" if known else "leave it out"
            raise BuildError(f"{name} {value!r} does not go with engine {engine} ({remedy})")
    if timing_cache is not None and engine != "tensorrt":
        raise BuildError(
            f"timing cache {timing_cache} does not go with engine {engine}, which times no kernels (leave it out)"
        )
    return kind


def _present_arch(wanted: str | None) -> str:
    """The GPU that is present, which has to be the one that is wanted."""
    from ddtree.plugins import launch

    try:
        present = launch.device_arch()
    except (ImportError, RuntimeError) as error:
        raise BuildError(f"engine tensorrt is built on the GPU that runs it: {error} (build it there)") from error
    if wanted not in (None, present):
        raise BuildError(
            f"arch {wanted} is not the GPU that is present, {present} (build the engine on a {wanted} GPU)"
        )
    return present


def _default_dtype(kind: _Kind, checkpoint: "Checkpoint") -> str:
    """The dtype of most of the checkpoint's bytes, whose weights then need no copy, if the engine takes it."""
    from .weights import SPELLING

    def stored(dtype: str) -> int:
        return sum(tensor.size for tensor in checkpoint.tensors.values() if tensor.dtype == SPELLING[dtype])

    return max(kind.dtypes, key=stored)


def _write_graphs(
    directory: Path,
    config: "TargetConfig",
    weights: "Weights",
    drafter: _Drafter | None,
    limits: Limits,
    compiled: CompiledInfo | None,
    progress: "Progress",
) -> list[str]:
    """Write weights and graphs, with the cache lengths of ``compiled`` or else dynamic ones; returns notes."""
    import numpy as np

    from .draft import draft_to_target, place_draft
    from .target import place_target

    target_cache, draft_cache = (
        (compiled.target_cache_length, compiled.draft_cache_length) if compiled else (None, None)
    )
    # The drafter's block reaches past the last token: its rows' positions must be in the rotary tables too. And ONNX
    # Runtime's RotaryEmbedding refuses a pass of more rows than its tables have, whatever their positions.
    block = drafter.config.block_size if drafter else 0
    positions = max(limits.max_seq_len + block + 1, limits.max_tree_nodes + 1)
    feature_layers = drafter.config.target_layer_ids if drafter else ()
    graphs = {TARGET_GRAPH: place_target(config, weights, feature_layers, positions, target_cache)}
    notes = []
    if drafter:
        graphs[DRAFT_GRAPH] = place_draft(drafter.config, drafter.weights, config, weights, positions, draft_cache)
        table = draft_to_target(drafter.config, drafter.weights.checkpoint)
        if table is not None:
            np.save(directory / DRAFT_TO_TARGET, table)
        notes += drafter.weights.write(directory, progress)
    notes += weights.write(directory, progress)
    for name, graph in graphs.items():
        (directory / name).write_bytes(graph.model().SerializeToString())
    return notes


def _write_plans(
    directory: Path,
    config: "TargetConfig",
    weights: "Weights",
    drafter: _Drafter | None,
    limits: Limits,
    plans: "Plans",
    progress: "Progress",
) -> list[str]:
    """Write graphs and weights, compile them, and remove them: the engines have it all. Returns notes."""
    import numpy as np

    graphs = directory / "graphs"
    graphs.mkdir()
    _write_graphs(graphs, config, weights, drafter, limits, plans.info, progress)  # its notes are of what is removed
    notes = plans.compile_target(graphs / TARGET_GRAPH, directory / TARGET_PLAN, progress)
    if drafter:
        table = None
        if (graphs / DRAFT_TO_TARGET).is_file():
            (graphs / DRAFT_TO_TARGET).rename(directory / DRAFT_TO_TARGET)
            table = np.load(directory / DRAFT_TO_TARGET)
        notes += plans.compile_draft(graphs / DRAFT_GRAPH, directory / DRAFT_PLAN, table, progress)
    shutil.rmtree(graphs)
    return notes


def _sequence_length(wanted: int | None, config: "TargetConfig", drafter: _Drafter | None) -> int:
    models = {"target": config.decoder} | ({"draft": drafter.config.decoder} if drafter else {})
    role, limit = min(((role, m.max_position_embeddings) for role, m in models.items()), key=lambda pair: pair[1])
    if wanted is not None and wanted > limit:
        raise BuildError(
            f"max_seq_len {wanted} exceeds the {role}'s max_position_embeddings {limit} (use at most {limit})"
        )
    if wanted is not None and wanted < 2:
        raise BuildError(f"max_seq_len {wanted} is too small (use at least 2: one token of prompt, one of output)")
    return wanted or limit


def describe_target(config: "TargetConfig") -> TargetInfo:
    """What the manifest says of the target."""
    model = config.decoder
    return TargetInfo(
        model_type=model.model_type,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        window=model.window,
        sliding_mask=model.mixed_windows,
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
    )


def describe_draft(config: "DraftConfig") -> DraftInfo:
    """What the manifest says of the drafter."""
    model = config.decoder
    return DraftInfo(
        num_hidden_layers=model.num_hidden_layers,
        num_key_value_heads=model.num_key_value_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        sample_from_anchor=config.sample_from_anchor,
        max_depth=config.max_depth,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        vocab_size=config.draft_vocab_size,
        draft_to_target=DRAFT_TO_TARGET if config.draft_vocab_size != model.vocab_size else None,
        window=model.window,
        sliding_mask=model.mixed_windows,
        causal=config.causal,
        window_causal=config.window_causal,
    )


def _silent(doing: str, done: int, total: int) -> None:
    pass
