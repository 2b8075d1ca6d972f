"""An engine directory's manifest as a table, for `ddtree inspect`."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from ddtree.builder import Manifest
from ddtree.builder.manifest import DraftInfo, TargetInfo

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def manifest_table(directory: Path, manifest: Manifest) -> Table:
    """What a user asks of an engine: models, limits, memory, files."""
    target, draft, limits, compiled = manifest.target, manifest.draft, manifest.limits, manifest.compiled
    table = Table(title=Text(str(directory)), title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")

    def section(*rows: tuple[str, object]) -> None:
        for name, value in rows:
            table.add_row(name, str(value))
        table.add_section()

    section(("engine", manifest.engine), ("dtype", manifest.dtype), ("format version", manifest.format_version))
    if compiled is not None:
        section(
            ("architecture", compiled.arch),
            ("runs on", compiled.hardware_compatibility),
            ("opened by", compiled.version_compatibility),
            ("tree operations", "inside the engines" if compiled.verify == "plugin" else "kernels behind the engines"),
            ("prompt chunk", f"{compiled.prefill_chunk} tokens of a sequence in a pass"),
        )
    section(
        ("max_batch_size", limits.max_batch_size),
        ("max_seq_len", limits.max_seq_len),
        ("max_tree_nodes", f"{limits.max_tree_nodes} (the largest budget; the root is not counted)"),
    )
    section(
        ("target", f"{target.model_type}, {target.num_hidden_layers} layers, hidden {target.hidden_size}"),
        ("vocabulary", target.vocab_size),
        ("end tokens", ", ".join(map(str, target.eos_token_ids)) or "none"),
        ("window", target.window or "none"),
    )
    if draft is None:
        section(("draft", "none: plain decoding only"))
    else:
        first = "a candidate" if draft.sample_from_anchor else "the anchor"
        section(
            ("draft", f"DFlash, {draft.num_hidden_layers} layers"),
            ("block", f"{draft.block_size} rows, the first is {first}: depths 1 to {draft.max_depth}"),
            ("mask token", draft.mask_token_id),
            ("context features", f"outputs of target layers {', '.join(map(str, draft.target_layer_ids))}"),
            ("draft vocabulary", draft.vocab_size),
        )
    section(("weights", _size(_weight_bytes(manifest))), ("KV caches", _caches(manifest)))
    section(("tokenizer", ", ".join(manifest.tokenizer_files)))
    section(*((file.name, f"{_size(file.size)}  sha256 {file.sha256[:16]}") for file in manifest.files))
    section(*((f"from {file.name}", f"{_size(file.size)}  sha256 {file.sha256[:16]}") for file in manifest.sources))
    section(*manifest.versions.items())
    if manifest.notes:
        section(*(("note", note) for note in manifest.notes))
    return table


def _weight_bytes(manifest: Manifest) -> int:
    """Weight files, or the engines that have the weights inside."""
    return sum(file.size for file in manifest.files if file.name.endswith((".safetensors", ".engine")))


def _caches(manifest: Manifest) -> str:
    """What keys and values take: as they grow in ONNX Runtime, or of every slot at once, as TensorRT has them."""
    limits, compiled = manifest.limits, manifest.compiled
    target, draft = (_BYTES[manifest.dtype] * _row_elements(model) for model in (manifest.target, manifest.draft))
    if compiled is None:
        rows = target + draft
        return f"{_size(rows)} a token, {_size(rows * limits.max_seq_len)} a full sequence (estimate)"
    slot = target * compiled.target_cache_length + draft * (compiled.draft_cache_length or 0)
    lengths = f"{compiled.target_cache_length} rows"
    if compiled.draft_cache_length is not None:
        lengths += f", the drafter's {compiled.draft_cache_length}"
    return f"{_size(slot * limits.max_batch_size)} for {limits.max_batch_size} sequences of {lengths} (estimate)"


def _row_elements(model: TargetInfo | DraftInfo | None) -> int:
    """Elements of one token's keys and values."""
    return 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim if model else 0


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
