"""An engine directory's manifest as a table, for `ddtree inspect`."""

from pathlib import Path

from rich.table import Table
from rich.text import Text

from ddtree.builder import Manifest

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def manifest_table(directory: Path, manifest: Manifest) -> Table:
    """What a user asks of an engine: models, limits, memory, files."""
    target, draft, limits = manifest.target, manifest.draft, manifest.limits
    table = Table(title=Text(str(directory)), title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")

    def section(*rows: tuple[str, object]) -> None:
        for name, value in rows:
            table.add_row(name, str(value))
        table.add_section()

    section(("engine", manifest.engine), ("dtype", manifest.dtype), ("format version", manifest.format_version))
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
            ("context features", f"outputs of target layers {', '.join(map(str, draft.target_layer_ids))}"),
            ("draft vocabulary", draft.vocab_size),
        )
    weights = sum(file.size for file in manifest.files if file.name.endswith(".safetensors"))
    per_token = _BYTES[manifest.dtype] * sum(
        2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim for model in (target, draft) if model
    )
    section(
        ("weights", _size(weights)),
        ("caches", f"{_size(per_token)} a token, {_size(per_token * limits.max_seq_len)} a full sequence (estimate)"),
    )
    section(*((file.name, f"{_size(file.size)}  sha256 {file.sha256[:16]}") for file in manifest.files))
    section(*manifest.versions.items())
    if manifest.notes:
        section(*(("note", note) for note in manifest.notes))
    return table


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
