"""Checkpoint directories in, engine directory out."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .errors import BuildError
from .manifest import FORMAT_VERSION, DraftInfo, FileInfo, Limits, Manifest, TargetInfo, is_engine

if TYPE_CHECKING:
    from .config import DraftConfig, TargetConfig
    from .weights import Progress, Weights

TARGET_GRAPH, DRAFT_GRAPH, DRAFT_TO_TARGET = "target.onnx", "draft.onnx", "draft_to_target.npy"
TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_ENGINES = {"onnxruntime": ("float32",)}  # engine -> dtypes, the default first
MAX_TREE_NODES = 1023  # and the root: the most rows that the paper's experiments and the kernels know
MAX_BATCH_SIZE = 4096
_LIBRARIES = ("ddtree-trtllm", "onnx", "onnxruntime", "numpy")


def build_engine(
    target: Path,
    draft: Path | None,
    output: Path,
    *,
    engine: str = "onnxruntime",
    dtype: str | None = None,
    max_batch_size: int = 8,
    max_seq_len: int | None = None,
    max_tree_nodes: int = 255,
    force: bool = False,
    progress: "Progress | None" = None,
) -> Manifest:
    """Build an engine directory from a target checkpoint and its drafter's.

    The directory is written beside ``output`` and renamed: a build that fails or is stopped leaves nothing behind.

    Args:
        target: Hugging Face directory of a dense Qwen3 or Llama model.
        draft: directory of its DFlash drafter; None: an engine for plain decoding.
        output: the engine directory; must not exist, or be empty, or be an engine with ``force``.
        dtype: of weights, activations and caches; None: the engine's default.
        max_seq_len: tokens of prompt and output; None: as many as the checkpoints allow.
        max_tree_nodes: the largest budget, root excluded.
        force: replace the engine that is at ``output``.
        progress: called with what is being done, bytes done, and bytes in all.

    Raises:
        BuildError: a setting, a checkpoint or the output directory cannot be used.
    """
    if engine not in _ENGINES:
        raise BuildError(f"engine {engine!r} is not in this version (use {', '.join(_ENGINES)})")
    dtype = dtype or _ENGINES[engine][0]
    if dtype not in _ENGINES[engine]:
        raise BuildError(f"dtype {dtype!r} does not go with engine {engine} (use {', '.join(_ENGINES[engine])})")
    for name, value, most in (
        ("max_batch_size", max_batch_size, MAX_BATCH_SIZE),
        ("max_tree_nodes", max_tree_nodes, MAX_TREE_NODES),
    ):
        if not 1 <= value <= most:
            raise BuildError(f"{name} {value} is out of range (use 1 to {most})")

    # Imported here: onnx takes longer to import than an engine takes to open.
    from .checkpoint import Checkpoint
    from .config import DraftConfig, TargetConfig
    from .weights import Weights

    output = Path(output).absolute()
    if output.is_dir():
        output = output.resolve()  # through a symbolic link: what it names is replaced, not the link
    _check_output(output, force)
    try:
        checkpoint = Checkpoint.open(Path(target), "target")
        config = TargetConfig.read(checkpoint)
        weights = Weights("target", checkpoint, dtype)
        drafter = None
        if draft is not None:
            draft_checkpoint = Checkpoint.open(Path(draft), "draft")
            drafter = _Drafter(DraftConfig.read(draft_checkpoint, config), Weights("draft", draft_checkpoint, dtype))
        limits = Limits(max_batch_size, _sequence_length(max_seq_len, config, drafter), max_tree_nodes)
        if not (checkpoint.directory / TOKENIZER).is_file():
            raise BuildError(
                f"target checkpoint {checkpoint.directory} has no {TOKENIZER} "
                "(write one: load it with transformers' AutoTokenizer and save_pretrained it)"
            )
        with _staged(output, force) as directory:
            notes = _write_graphs(directory, config, weights, drafter, limits, progress or _silent)
            for name in _TOKENIZER_FILES:
                if (checkpoint.directory / name).is_file():
                    shutil.copyfile(checkpoint.directory / name, directory / name)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                engine=engine,
                dtype=dtype,
                limits=limits,
                target=_target_info(config),
                draft=_draft_info(drafter.config) if drafter else None,
                files=tuple(FileInfo.of(path, path.name) for path in sorted(directory.iterdir())),
                sources=tuple(
                    FileInfo.of(file, f"{w.role}/{file.name}")
                    for w in (weights, *([drafter.weights] if drafter else []))
                    for file in w.checkpoint.files
                ),
                versions={library: version(library) for library in _LIBRARIES},
                notes=tuple(notes),
            )
            manifest.save(directory)
    except OSError as error:
        raise BuildError(_reason(error, output)) from error
    return manifest


class _Drafter(NamedTuple):
    config: "DraftConfig"
    weights: "Weights"


def _write_graphs(
    directory: Path,
    config: "TargetConfig",
    weights: "Weights",
    drafter: _Drafter | None,
    limits: Limits,
    progress: "Progress",
) -> list[str]:
    """Write weights and graphs; returns notes for the user."""
    import numpy as np

    from .draft import draft_to_target, place_draft
    from .target import place_target

    # The drafter's block reaches past the last token: its rows' positions must be in the rotary tables too. And ONNX
    # Runtime's RotaryEmbedding refuses a pass of more rows than its tables have, whatever their positions.
    block = drafter.config.block_size if drafter else 0
    positions = max(limits.max_seq_len + block + 1, limits.max_tree_nodes + 1)
    graphs = {
        TARGET_GRAPH: place_target(config, weights, drafter.config.target_layer_ids if drafter else (), positions)
    }
    notes = []
    if drafter:
        graphs[DRAFT_GRAPH] = place_draft(drafter.config, drafter.weights, config, weights, positions)
        table = draft_to_target(drafter.config, drafter.weights.checkpoint)
        if table is not None:
            np.save(directory / DRAFT_TO_TARGET, table)
        notes += drafter.weights.write(directory, progress)
    notes += weights.write(directory, progress)
    for name, graph in graphs.items():
        (directory / name).write_bytes(graph.model().SerializeToString())
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


def _target_info(config: "TargetConfig") -> TargetInfo:
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


def _draft_info(config: "DraftConfig") -> DraftInfo:
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


def _check_output(output: Path, force: bool) -> None:
    if output.is_dir() and not any(output.iterdir()):
        return
    if is_engine(output):
        if not force:
            raise BuildError(f"{output} holds an engine already (use --force to replace it, or another directory)")
    elif output.is_dir():
        raise BuildError(f"{output} is not empty and not an engine (use another directory)")
    elif output.exists() or output.is_symlink():
        raise BuildError(f"{output} is not a directory (use another path)")


@contextlib.contextmanager
def _staged(output: Path, force: bool) -> Iterator[Path]:
    """A directory beside ``output`` that takes its place when the block ends, and is gone if the block fails."""
    made = [parent for parent in output.parents if not parent.exists()]  # innermost first
    staging = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
        staging.chmod(0o777 & ~_umask())
        yield staging
        _take_place(staging, output, force)
    except BaseException:  # Ctrl-C too
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # another process may use it by now
                parent.rmdir()
        raise


def _take_place(staging: Path, output: Path, force: bool) -> None:
    _check_output(output, force)  # again: another process may have written there meanwhile
    if not is_engine(output):
        staging.rename(output)  # POSIX: onto nothing, or onto an empty directory
        return
    replaced = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    output.rename(replaced)
    try:
        staging.rename(output)
    except BaseException:
        replaced.rename(output)
        raise
    shutil.rmtree(replaced)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _reason(error: OSError, output: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left for {output} (free some, or use another disk)"
    where = error.filename2 or error.filename or output
    return f"{where}: {error.strerror or error} (check the path and its permissions)"


def _silent(doing: str, done: int, total: int) -> None:
    pass
